//! Addresses for device memory. They lie in reserved parts of the process's address space, so that no host memory can
//! have the same, and a program that follows one faults, as with a real driver.

use std::collections::HashMap;

/// Addresses are handed out in steps of this: two allocations never share a page of the GPU.
const STEP: u64 = 512;

/// What is reserved at a time, at first; less where the system does not let us.
const PART: u64 = 1 << 40;

/// Less than this at a time is no use.
const SMALLEST_PART: u64 = 1 << 31;

/// Addresses that are free.
#[derive(Default)]
pub(crate) struct Space {
    next: u64,
    end: u64,
    /// What is reserved.
    parts: Vec<(u64, u64)>,
    /// Freed ranges by size: programs allocate the same sizes again and again.
    freed: HashMap<u64, Vec<u64>>,
}

impl Space {
    /// A range of `size` bytes at a multiple of `alignment`, a power of two; none when addresses have run out.
    pub(crate) fn take(&mut self, size: u64, alignment: u64) -> Option<u64> {
        let size = size.max(1).checked_next_multiple_of(STEP)?;
        let alignment = alignment.max(STEP);
        if let Some(same) = self.freed.get_mut(&size)
            && let Some(found) = same.iter().rposition(|at| at.is_multiple_of(alignment))
        {
            return Some(same.swap_remove(found));
        }
        if let Some(at) = self.bump(size, alignment) {
            return Some(at);
        }
        if !self.grow(size.checked_add(alignment)?) {
            self.join();
            return self.fit(size, alignment);
        }
        self.bump(size, alignment)
    }

    /// Gives a range back.
    pub(crate) fn give(&mut self, at: u64, size: u64) {
        let Some(size) = size.max(1).checked_next_multiple_of(STEP) else { return };
        self.freed.entry(size).or_default().push(at);
    }

    /// Whether an address is one for device memory.
    pub(crate) fn covers(&self, address: u64) -> bool {
        self.parts.iter().any(|(from, to)| (*from..*to).contains(&address))
    }

    fn bump(&mut self, size: u64, alignment: u64) -> Option<u64> {
        let at = self.next.checked_next_multiple_of(alignment)?;
        let end = at.checked_add(size).filter(|end| *end <= self.end)?;
        if at > self.next {
            self.give(self.next, at - self.next);
        }
        self.next = end;
        Some(at)
    }

    fn grow(&mut self, at_least: u64) -> bool {
        let mut part = PART.max(at_least.next_power_of_two());
        while part >= at_least.max(SMALLEST_PART) {
            if let Some(at) = reserve(part) {
                let left = self.end - self.next;
                if left > 0 {
                    self.give(self.next, left);
                }
                (self.next, self.end) = (at, at + part);
                self.parts.push((at, at + part));
                return true;
            }
            part /= 2;
        }
        false
    }

    /// Joins freed ranges that touch.
    fn join(&mut self) {
        let mut all: Vec<(u64, u64)> = self
            .freed
            .drain()
            .flat_map(|(size, ranges)| ranges.into_iter().map(move |at| (at, size)))
            .collect();
        all.sort_unstable();
        let mut joined: Option<(u64, u64)> = None;
        for (at, size) in all {
            match &mut joined {
                Some((from, length)) if *from + *length == at => *length += size,
                _ => {
                    if let Some((from, length)) = joined.replace((at, size)) {
                        self.give(from, length);
                    }
                }
            }
        }
        if let Some((from, length)) = joined {
            self.give(from, length);
        }
    }

    /// The first freed range that is long enough, cut to size.
    fn fit(&mut self, size: u64, alignment: u64) -> Option<u64> {
        let (length, from) = self.freed.iter().find_map(|(length, ranges)| {
            let fits = |from: &&u64| {
                let at = from.checked_next_multiple_of(alignment);
                at.and_then(|at| at.checked_add(size)).is_some_and(|end| end <= *from + length)
            };
            ranges.iter().find(fits).map(|from| (*length, *from))
        })?;
        self.freed.get_mut(&length)?.retain(|other| *other != from);
        let at = from.next_multiple_of(alignment);
        for (rest, left) in [(from, at - from), (at + size, from + length - at - size)] {
            if left > 0 {
                self.give(rest, left);
            }
        }
        Some(at)
    }
}

fn reserve(bytes: u64) -> Option<u64> {
    let length = usize::try_from(bytes).ok()?;
    // SAFETY: a new mapping at an address that the kernel picks; nothing can be read or written there.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    (at != libc::MAP_FAILED).then_some(at as u64)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_two_ranges_overlap(
            steps in proptest::collection::vec((any::<bool>(), 1..10_000_000_u64, 0..22_u32), 1..200)
        ) {
            let mut space = Space { next: 1 << 30, end: 1 << 33, ..Space::default() };
            let mut taken: BTreeMap<u64, u64> = BTreeMap::new();
            for (give, size, alignment) in steps {
                if give && let Some((&at, &size)) = taken.iter().nth(usize::try_from(size).unwrap() % taken.len().max(1)) {
                    taken.remove(&at);
                    space.give(at, size);
                } else if let Some(at) = space.take(size, 1 << alignment) {
                    prop_assert!(at.is_multiple_of(1 << alignment));
                    if let Some((before, length)) = taken.range(..=at).next_back() {
                        prop_assert!(before + length <= at);
                    }
                    if let Some((after, _)) = taken.range(at..).next() {
                        prop_assert!(at + size <= *after);
                    }
                    taken.insert(at, size);
                }
            }
        }
    }

    #[test]
    fn freed_ranges_are_joined_when_addresses_run_out() {
        let mut space = Space { next: 1 << 20, end: (1 << 20) + 4096, ..Space::default() };
        let small: Vec<u64> = (0..8).map(|_| space.bump(512, 512).unwrap()).collect();
        assert_eq!(space.bump(512, 512), None);
        for at in &small {
            space.give(*at, 512);
        }
        space.join();
        assert_eq!(space.fit(2048, 1024), Some(1 << 20));
        assert_eq!(space.fit(2048, 512), Some((1 << 20) + 2048));
        assert_eq!(space.fit(512, 512), None);
    }
}
