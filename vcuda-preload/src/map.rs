//! A map from addresses to words that costs the same with one entry and with a million, from one thread and from many:
//! sharded, open addressing, no allocator. All zero is an empty map.

use std::ptr::NonNull;

use crate::lock::Locked;

/// Enough that sixteen threads seldom meet, few enough that a small program touches little memory.
const SHARDS: usize = 32;
const SHARD_BITS: u32 = SHARDS.trailing_zeros();

/// Entries of a shard's first table: one page.
const FIRST_CAPACITY: usize = 4096 / size_of::<Entry>();

#[derive(Clone, Copy)]
struct Entry {
    /// 0 for none.
    key: u64,
    value: u64,
}

/// One shard on a cache line of its own.
#[derive(Default)]
#[repr(C, align(64))]
struct Shard(Locked<Table>);

/// Linear probing; entries are moved up when one is removed, so there are no tombstones.
#[derive(Default)]
#[repr(C)]
struct Table {
    entries: Option<NonNull<Entry>>,
    /// A power of two; 0 before the first entry.
    capacity: usize,
    length: usize,
}

// SAFETY: the table owns its memory.
unsafe impl Send for Table {}

/// The map. There is nothing at key 0.
#[derive(Default)]
#[repr(C)]
pub(crate) struct Map {
    shards: [Shard; SHARDS],
}

impl Map {
    /// Puts `value` at `key`, over what was there. False if there is no memory for it, or the key is 0.
    #[must_use]
    pub fn insert(&self, key: u64, value: u64) -> bool {
        let hash = hash(key);
        key != 0 && self.shard(hash).0.lock().insert(hash, Entry { key, value })
    }

    /// Takes the value at `key` out.
    pub fn remove(&self, key: u64) -> Option<u64> {
        let hash = hash(key);
        self.shard(hash).0.lock().remove(hash, key)
    }

    /// The value at `key`.
    pub fn get(&self, key: u64) -> Option<u64> {
        let hash = hash(key);
        let table = self.shard(hash).0.lock();
        table.find(hash, key).map(|at| table.entries()[at].value)
    }

    /// Takes out all entries of which `which` says so, and gives each to `to`. Looks at every entry.
    pub fn drain(&self, which: impl Fn(u64, u64) -> bool, mut to: impl FnMut(u64, u64)) {
        for shard in &self.shards {
            let mut table = shard.0.lock();
            let mut at = 0;
            while at < table.capacity {
                let Entry { key, value } = table.entries()[at];
                if key != 0 && which(key, value) {
                    // Another entry may move here.
                    table.remove(hash(key), key);
                    to(key, value);
                } else {
                    at += 1;
                }
            }
        }
    }

    /// Puts what `to` makes of it in the place of every value.
    pub fn change(&self, to: impl Fn(u64) -> u64) {
        for shard in &self.shards {
            for entry in shard.0.lock().entries_mut().iter_mut().filter(|entry| entry.key != 0) {
                entry.value = to(entry.value);
            }
        }
    }

    fn shard(&self, hash: u64) -> &Shard {
        // The top bits; the rest chooses the place within the shard.
        &self.shards[usize::try_from(hash >> (64 - SHARD_BITS)).unwrap_or(0)]
    }
}

/// Fibonacci hashing. Addresses are multiples of 256 or more, and the multiplication brings their differences up.
fn hash(key: u64) -> u64 {
    key.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Table {
    fn entries(&self) -> &[Entry] {
        match self.entries {
            // SAFETY: `capacity` entries were mapped, zero or written; the lock is held.
            Some(entries) => unsafe { std::slice::from_raw_parts(entries.as_ptr(), self.capacity) },
            None => &[],
        }
    }

    fn entries_mut(&mut self) -> &mut [Entry] {
        match self.entries {
            // SAFETY: as above, and the table is borrowed mutably.
            Some(entries) => unsafe { std::slice::from_raw_parts_mut(entries.as_ptr(), self.capacity) },
            None => &mut [],
        }
    }

    /// Where the search for `hash` begins.
    fn home(&self, hash: u64) -> usize {
        // The bits below those that chose the shard. The capacity is at least that of a page.
        usize::try_from(hash << SHARD_BITS >> (64 - self.capacity.trailing_zeros())).unwrap_or(0)
    }

    fn find(&self, hash: u64, key: u64) -> Option<usize> {
        if self.length == 0 {
            return None;
        }
        let mut at = self.home(hash);
        // There is always an empty entry: a table is at most three quarters full.
        loop {
            match self.entries()[at].key {
                0 => return None,
                found if found == key => return Some(at),
                _ => at = (at + 1) & (self.capacity - 1),
            }
        }
    }

    fn insert(&mut self, hash: u64, entry: Entry) -> bool {
        if let Some(at) = self.find(hash, entry.key) {
            self.entries_mut()[at] = entry;
            return true;
        }
        if (self.length + 1) * 4 > self.capacity * 3 && !self.grow() {
            return false;
        }
        self.place(hash, entry);
        self.length += 1;
        true
    }

    /// Writes an entry that is not there yet, where there is room.
    fn place(&mut self, hash: u64, entry: Entry) {
        let mut at = self.home(hash);
        while self.entries()[at].key != 0 {
            at = (at + 1) & (self.capacity - 1);
        }
        self.entries_mut()[at] = entry;
    }

    fn remove(&mut self, hash_of_key: u64, key: u64) -> Option<u64> {
        let mut hole = self.find(hash_of_key, key)?;
        let value = self.entries()[hole].value;
        let mask = self.capacity - 1;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let entry = self.entries()[at];
            if entry.key == 0 {
                break;
            }
            // It may fill the hole if its search begins at or before the hole, going round.
            let home = self.home(hash(entry.key));
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask {
                self.entries_mut()[hole] = entry;
                hole = at;
            }
        }
        self.entries_mut()[hole] = Entry { key: 0, value: 0 };
        self.length -= 1;
        Some(value)
    }

    /// Doubles the table. False if there is no memory.
    #[cold]
    fn grow(&mut self) -> bool {
        let capacity = (self.capacity * 2).max(FIRST_CAPACITY);
        let Some(entries) = crate::state::map_zeroed(capacity * size_of::<Entry>()) else { return false };
        let old =
            std::mem::replace(self, Table { entries: Some(entries.cast()), capacity, length: self.length });
        for entry in old.entries().iter().filter(|entry| entry.key != 0) {
            self.place(hash(entry.key), *entry);
        }
        if let Some(entries) = old.entries {
            // SAFETY: this is what `map_zeroed` gave, and nothing refers to it any more.
            unsafe { libc::munmap(entries.as_ptr().cast(), old.capacity * size_of::<Entry>()) };
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Repeatable numbers: a failure can be looked at.
    fn numbers(mut seed: u64) -> impl FnMut() -> u64 {
        move || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        }
    }

    #[test]
    fn it_does_what_a_map_does() {
        for seed in 1..20 {
            let (map, mut model, mut next) = (Map::default(), HashMap::new(), numbers(seed));
            for _ in 0..20_000 {
                // Few different keys, some close to each other, so that they collide and come back.
                let key = (1 + next() % 700) << (next() % 2 * 20);
                match next() % 3 {
                    0 => assert_eq!(map.remove(key), model.remove(&key)),
                    1 => {
                        assert!(map.insert(key, next()));
                        model.insert(key, map.get(key).unwrap());
                    }
                    _ => assert_eq!(map.get(key), model.get(&key).copied()),
                }
            }
            map.change(|value| value + 2);
            model.values_mut().for_each(|value| *value += 2);
            let mut drained = HashMap::new();
            map.drain(|_, value| value % 2 == 0, |key, value| assert!(drained.insert(key, value).is_none()));
            assert!(!map.insert(0, 1) && map.remove(0).is_none());
            assert_eq!(drained, model.iter().filter(|(_, v)| *v % 2 == 0).map(|(k, v)| (*k, *v)).collect());
            assert!(model.iter().all(|(k, v)| map.get(*k) == (v % 2 == 1).then_some(*v)));
        }
    }

    #[test]
    fn entries_of_allocations_in_a_row_are_spread() {
        let map = Map::default();
        for n in 1..=100_000_u64 {
            assert!(map.insert(0x7f00_0000_0000 + n * (2 << 20), n));
        }
        let lengths: Vec<_> = map.shards.iter().map(|shard| shard.0.lock().length).collect();
        assert!(lengths.iter().all(|length| (2000..5000).contains(length)), "{lengths:?}");
        for shard in &map.shards {
            let table = shard.0.lock();
            let far = table.entries().iter().enumerate().filter(|(at, entry)| {
                entry.key != 0 && at.wrapping_sub(table.home(hash(entry.key))) & (table.capacity - 1) > 32
            });
            assert!(far.count() < 20, "searches stay short");
        }
    }

    #[test]
    fn threads_do_not_disturb_each_other() {
        let map = Map::default();
        std::thread::scope(|scope| {
            for thread in 1..=8_u64 {
                let map = &map;
                scope.spawn(move || {
                    for round in 0..10_000_u64 {
                        let key = thread << 40 | (round % 100) << 9 | 1;
                        assert!(map.insert(key, round));
                        assert_eq!(map.get(key), Some(round));
                        assert_eq!(map.remove(key), Some(round));
                    }
                });
            }
        });
    }
}
