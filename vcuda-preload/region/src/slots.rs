//! The timetable of a GPU: which of the hundred slots of a period a share launches in.
//!
//! A period is [`PERIOD_NS`] of CLOCK_MONOTONIC, which every container of a host shares; slot `n` is its `n`th
//! millisecond. A GPU's shares hold at most 100 core together, one slot for each, so no slot needs two owners.

use std::fmt;

use crate::pair::{halves, whole};

/// Length of a period in nanoseconds.
pub const PERIOD_NS: u64 = 100_000_000;

/// Length of a slot in nanoseconds.
pub const SLOT_NS: u64 = PERIOD_NS / SLOTS as u64;

/// Slots of a period.
pub const SLOTS: u32 = 100;

/// A set of slots.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Slots(u128);

impl Slots {
    /// No slot.
    pub const NONE: Self = Self(0);
    /// Every slot.
    pub const ALL: Self = Self((1 << SLOTS) - 1);

    /// The first `count` slots of the period; all if there are no more.
    pub fn first(count: u32) -> Self {
        if count >= SLOTS { Self::ALL } else { Self((1 << count) - 1) }
    }

    /// The slots whose bits are set; bits from 100 on are no slots.
    pub const fn from_bits(bits: u128) -> Self {
        Self(bits & Self::ALL.0)
    }

    /// A bit for each slot.
    pub const fn bits(self) -> u128 {
        self.0
    }

    /// The slot that the moment `now_ns` of CLOCK_MONOTONIC is in, where slots last `slot_ns`.
    #[expect(clippy::cast_possible_truncation, reason = "below a hundred")]
    pub const fn at(now_ns: u64, slot_ns: u64) -> u32 {
        (now_ns / slot_ns % SLOTS as u64) as u32
    }

    /// Whether `slot` is in this set.
    pub const fn contains(self, slot: u32) -> bool {
        slot < SLOTS && self.0 >> slot & 1 == 1
    }

    /// How many slots these are.
    pub const fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Whether there is none.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The slots in one or both sets.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The slots in both sets.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The slots of this set that are not in the other.
    #[must_use]
    pub const fn difference(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The slots, from the first.
    pub fn iter(self) -> impl Iterator<Item = u32> {
        (0..SLOTS).filter(move |slot| self.contains(*slot))
    }

    /// `count` slots of those not `taken`: in a row where that can be, in the shortest row that is long enough; else the
    /// first free ones. None if fewer are free.
    pub fn place(count: u32, taken: Self) -> Option<Self> {
        let free = Self::ALL.difference(taken);
        if count > free.count() {
            return None;
        }
        let mut best: Option<(u32, u32)> = None;
        let mut at = 0;
        while at < SLOTS {
            let length = (free.0 >> at).trailing_ones();
            if length >= count && best.is_none_or(|(_, shortest)| length < shortest) {
                best = Some((at, length));
            }
            at += length.max(1);
        }
        Some(match best {
            Some((at, _)) => Self(Self::first(count).0 << at),
            None => Self(free.iter().take(count as usize).fold(0, |bits, slot| bits | 1 << slot)),
        })
    }

    /// Nanoseconds from `now_ns` to the next moment in one of these slots of `slot_ns`: 0 within one. None if there is no
    /// slot.
    pub fn wait_from(self, now_ns: u64, slot_ns: u64) -> Option<u64> {
        let slot = Self::at(now_ns, slot_ns);
        if self.contains(slot) {
            return Some(0);
        }
        // The coming slots first, then those of the next period.
        let turned = (self.0 >> slot | self.0 << (SLOTS - slot)) & Self::ALL.0;
        (turned != 0).then(|| u64::from(turned.trailing_zeros()) * slot_ns - now_ns % slot_ns)
    }

    /// Nanoseconds from `now_ns` to the end of the slots of `slot_ns` in a row that it is in: 0 outside, no end if these are
    /// all slots.
    pub fn left_from(self, now_ns: u64, slot_ns: u64) -> u64 {
        if self == Self::ALL {
            return u64::MAX;
        }
        let slot = Self::at(now_ns, slot_ns);
        let turned = (self.0 >> slot | self.0 << (SLOTS - slot)) & Self::ALL.0;
        (u64::from(turned.trailing_ones()) * slot_ns).saturating_sub(now_ns % slot_ns)
    }

    /// How much of the time from `from_ns` to `until_ns`, in nanoseconds, is in these slots of `slot_ns`; 0 if it ends before it
    /// begins.
    pub fn within(self, from_ns: u64, until_ns: u64, slot_ns: u64) -> u64 {
        let period = slot_ns * u64::from(SLOTS);
        // From the beginning of all time.
        let before = |at_ns: u64| {
            let slot = Self::at(at_ns, slot_ns);
            let whole = self.intersection(Self::first(slot)).count();
            let part = if self.contains(slot) { at_ns % slot_ns } else { 0 };
            (at_ns / period * u64::from(self.count()) + u64::from(whole)) * slot_ns + part
        };
        before(until_ns).saturating_sub(before(from_ns))
    }

    /// The longest time in a row, in nanoseconds, where slots last `slot_ns`; no end if these are all slots.
    pub fn longest_ns(self, slot_ns: u64) -> u64 {
        if self == Self::ALL {
            return u64::MAX;
        }
        // A row over the end of the period begins in this one and ends in the next.
        let twice = |slot: u32| self.contains(slot % SLOTS);
        let (mut longest, mut length) = (0, 0);
        for slot in 0..2 * SLOTS {
            length = if twice(slot) { length + 1 } else { 0 };
            longest = longest.max(length);
        }
        u64::from(longest.min(SLOTS)) * slot_ns
    }

    pub(crate) fn words(self) -> (u64, u64) {
        halves(self.0)
    }

    pub(crate) fn from_words(low: u64, high: u64) -> Self {
        Self::from_bits(whole(low, high))
    }
}

/// Rows of slots: `0-29,50`; nothing for none.
impl fmt::Display for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut at = 0;
        let mut comma = "";
        while at < SLOTS {
            let length = (self.0 >> at).trailing_ones();
            match length {
                0 => {}
                1 => write!(f, "{comma}{at}")?,
                _ => write!(f, "{comma}{at}-{}", at + length - 1)?,
            }
            if length > 0 {
                comma = ",";
            }
            at += length.max(1);
        }
        Ok(())
    }
}

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slots({self})")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slots() -> impl Strategy<Value = Slots> {
        any::<u128>().prop_map(Slots::from_bits)
    }

    #[test]
    fn slots_read_as_rows() {
        let slots = Slots::first(30).union(Slots::from_bits(1 << 50)).union(Slots::from_bits(3 << 98));
        assert_eq!(slots.to_string(), "0-29,50,98-99");
        assert_eq!((Slots::NONE.to_string(), Slots::ALL.to_string()), (String::new(), "0-99".into()));
        assert_eq!(
            (Slots::first(0), Slots::first(100), Slots::first(101)),
            (Slots::NONE, Slots::ALL, Slots::ALL)
        );
    }

    #[test]
    fn a_row_may_go_on_into_the_next_period() {
        let slots = Slots::from_bits(1 << 99 | 0b111);
        let second = 40 * PERIOD_NS;
        assert_eq!(slots.left_from(second + 99 * SLOT_NS + 5, SLOT_NS), 4 * SLOT_NS - 5);
        assert_eq!(
            (slots.left_from(second + 2 * SLOT_NS, SLOT_NS), slots.left_from(second + 3 * SLOT_NS, SLOT_NS)),
            (SLOT_NS, 0)
        );
        assert_eq!((Slots::ALL.left_from(7, SLOT_NS), Slots::NONE.left_from(7, SLOT_NS)), (u64::MAX, 0));
        assert_eq!((slots.longest_ns(SLOT_NS), Slots::NONE.longest_ns(SLOT_NS)), (4 * SLOT_NS, 0));
        assert_eq!(Slots::from_bits(0b11_0111).longest_ns(SLOT_NS), 3 * SLOT_NS);
    }

    #[test]
    fn a_share_gets_the_shortest_row_that_holds_it() {
        let taken = Slots::ALL.difference(Slots::from_bits(0xff << 4 | 0x3f << 40));
        assert_eq!(Slots::place(5, taken), Some(Slots::from_bits(0x1f << 40)));
        assert_eq!(Slots::place(7, taken), Some(Slots::from_bits(0x7f << 4)));
        // No row is as long as that.
        assert_eq!(Slots::place(10, taken), Some(Slots::from_bits(0xff << 4 | 3 << 40)));
        assert_eq!(Slots::place(15, taken), None);
        assert_eq!(Slots::place(100, Slots::NONE), Some(Slots::ALL));
        assert_eq!(Slots::place(0, Slots::ALL), Some(Slots::NONE));
    }

    #[test]
    fn time_within_slots_is_theirs_and_no_more() {
        let slots = Slots::from_bits(1 << 99 | 0b110);
        let second = 40 * PERIOD_NS;
        let within = |from: u64, until: u64| slots.within(second + from, second + until, SLOT_NS);
        assert_eq!(within(0, SLOT_NS), 0);
        assert_eq!(within(SLOT_NS + 7, 2 * SLOT_NS + 5), SLOT_NS - 2);
        assert_eq!(within(SLOT_NS / 2, 50 * SLOT_NS), 2 * SLOT_NS);
        assert_eq!(within(99 * SLOT_NS + 3, 101 * SLOT_NS + 3), SLOT_NS, "over the end of a period");
        assert_eq!(within(5, 5 + 3 * PERIOD_NS), 9 * SLOT_NS);
        assert_eq!((within(9, 3), Slots::NONE.within(0, u64::MAX, SLOT_NS)), (0, 0));
        assert_eq!(Slots::ALL.within(7, u64::MAX, SLOT_NS), u64::MAX - 7);
    }

    proptest! {
        #[test]
        fn what_is_placed_was_free_and_is_as_much_as_asked(taken in slots(), count in 0..=110_u32) {
            match Slots::place(count, taken) {
                Some(placed) => {
                    prop_assert_eq!(placed.count(), count);
                    prop_assert!(placed.intersection(taken).is_empty());
                }
                None => prop_assert!(count > 100 - taken.count()),
            }
        }

        #[test]
        fn shares_of_one_gpu_fit_as_long_as_they_sum_to_100(cores in prop::collection::vec(1..=60_u32, 1..20)) {
            let mut taken = Slots::NONE;
            for core in cores {
                let placed = Slots::place(core, taken);
                prop_assert_eq!(placed.is_some(), taken.count() + core <= 100);
                taken = taken.union(placed.unwrap_or_default());
            }
        }

        #[test]
        fn the_wait_ends_at_the_first_moment_of_the_next_slot(slots in slots(), now: u64) {
            let now = now / 2;
            match slots.wait_from(now, SLOT_NS) {
                None => prop_assert!(slots.is_empty()),
                Some(0) => prop_assert!(slots.contains(Slots::at(now, SLOT_NS))),
                Some(wait) => {
                    prop_assert!(wait < PERIOD_NS);
                    prop_assert_eq!((now + wait) % SLOT_NS, 0);
                    prop_assert!(slots.contains(Slots::at(now + wait, SLOT_NS)));
                    prop_assert!(!slots.contains(Slots::at(now + wait - 1, SLOT_NS)));
                    let starts = (now / SLOT_NS + 1..(now + wait) / SLOT_NS).map(|slot| slot * SLOT_NS);
                    prop_assert!(starts.chain([now]).all(|moment| !slots.contains(Slots::at(moment, SLOT_NS))));
                }
            }
        }
    }
}
