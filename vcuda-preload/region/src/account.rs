//! Who holds how much of a GPU: exact under `kill -9` and SIGSTOP of any process at any instruction.
//!
//! Each GPU has one [`Total`]: the bytes that all processes hold together, and *the last change*: by how much, in
//! whose slot. Each process slot has one [`Held`] a GPU: the bytes of that process, and the last change it contains.
//! A change is one compare-and-swap of the total, which checks the ceiling and is the moment at which it counts.
//! Whoever comes next first carries the last change over into the slot, if its maker has not; then makes its own.
//! So a process that dies or stops between the two steps delays nobody, and the sum of all slots is the total.
//!
//! There is no lock. Memory of a dead process is given back by whoever needs it, by a change like any other.
//!
//! Every word here can be overwritten by any process of the container. Nothing read from it is used as anything but
//! a number, all arithmetic saturates, and every loop is bounded.

use std::sync::atomic::Ordering::Relaxed;

use crate::{
    ACCOUNT_UNIT_BYTES, fault,
    layout::UsageFile,
    pair::{halves, whole},
};

/// Attempts before a change is given up. Each failed one means that another process got ahead, so an honest container
/// never comes near; a container that spoils its own region gets refusals instead of a hanging process.
const MAX_ATTEMPTS: u32 = 1 << 20;

/// The ceiling does not allow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// All that a container holds on one GPU, and the last change. 128 bits; the low word changes with every change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Total {
    /// Number of this change, counted from 1; 45 bits. At ten million a second it comes round in forty days.
    pub sequence: u64,
    /// Whose slot the last change belongs in; 10 bits.
    pub slot: usize,
    /// The last change in units; 37 bits.
    pub change: i64,
    /// The sum over all slots in units; 36 bits, which is 32 TiB.
    pub units: u64,
}

const SEQUENCE_BITS: u32 = 45;
const SLOT_BITS: u32 = 10;
const CHANGE_BITS: u32 = 37;
const UNITS_BITS: u32 = 36;
const MAX_UNITS: u64 = (1 << UNITS_BITS) - 1;
const _: () = assert!(SEQUENCE_BITS + SLOT_BITS + CHANGE_BITS + UNITS_BITS == 128);
const _: () = assert!(crate::MAX_PROCESSES == 1 << SLOT_BITS);

impl Total {
    pub fn unpack(word: u128) -> Self {
        let field = |at: u32, bits: u32| halves(word >> at & ((1 << bits) - 1)).0;
        let change = field(SEQUENCE_BITS + SLOT_BITS, CHANGE_BITS) << (64 - CHANGE_BITS);
        Self {
            sequence: field(0, SEQUENCE_BITS),
            // Ten bits.
            slot: usize::try_from(field(SEQUENCE_BITS, SLOT_BITS)).unwrap_or(0),
            // The shift back is arithmetic and brings the sign.
            change: change.cast_signed() >> (64 - CHANGE_BITS),
            units: field(SEQUENCE_BITS + SLOT_BITS + CHANGE_BITS, UNITS_BITS),
        }
    }

    fn pack(self) -> u128 {
        let field = |value: u64, at: u32, bits: u32| (u128::from(value) & ((1 << bits) - 1)) << at;
        field(self.sequence, 0, SEQUENCE_BITS)
            | field(self.slot as u64, SEQUENCE_BITS, SLOT_BITS)
            | field(self.change.cast_unsigned(), SEQUENCE_BITS + SLOT_BITS, CHANGE_BITS)
            | field(self.units, SEQUENCE_BITS + SLOT_BITS + CHANGE_BITS, UNITS_BITS)
    }

    /// The total after `change` units in `slot`. |change| ≤ MAX_UNITS < 2^36, so it fits 37 bits with its sign.
    fn after(self, change: i64, slot: usize) -> Self {
        Self {
            sequence: (self.sequence + 1) & ((1 << SEQUENCE_BITS) - 1),
            slot,
            change,
            units: self.units.saturating_add_signed(change).min(MAX_UNITS),
        }
    }
}

/// What one process holds on one GPU. The low word is the number of the last change it contains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    pub sequence: u64,
    pub units: u64,
}

impl Held {
    pub fn unpack(word: u128) -> Self {
        let (sequence, units) = halves(word);
        Self { sequence, units }
    }

    fn pack(self) -> u128 {
        whole(self.sequence, self.units)
    }

    /// What `slot` holds if `total` is the total: the last change counts, carried over or not.
    pub fn with(self, slot: usize, total: Total) -> Self {
        if total.slot != slot || total.sequence == self.sequence {
            return self;
        }
        Self {
            sequence: total.sequence,
            units: self.units.saturating_add_signed(total.change).min(MAX_UNITS),
        }
    }
}

/// Units that `bytes` take, rounded up.
pub(crate) fn units(bytes: u64) -> u64 {
    bytes.div_ceil(ACCOUNT_UNIT_BYTES)
}

/// Bytes that `units` are.
pub(crate) fn bytes(units: u64) -> u64 {
    units.saturating_mul(ACCOUNT_UNIT_BYTES)
}

/// The account of one GPU. `gpu` is below `MAX_GPUS`, slots are below `MAX_PROCESSES`.
#[derive(Clone, Copy)]
pub(crate) struct Account<'a> {
    pub file: &'a UsageFile,
    pub gpu: usize,
}

impl Account<'_> {
    /// Takes `wanted` units into `slot` if the total then stays within `ceiling` units.
    pub fn take(self, slot: usize, wanted: u64, ceiling: u64) -> Result<(), Refused> {
        // More than the words can hold is more than any ceiling.
        let change = i64::try_from(wanted).ok().filter(|_| wanted <= MAX_UNITS).ok_or(Refused)?;
        let fits =
            |total: Total| total.units.checked_add(wanted).is_some_and(|sum| sum <= ceiling.min(MAX_UNITS));
        self.change(slot, |total, _| fits(total).then_some(change)).map(drop)
    }

    /// Puts `wanted` units into `slot` whatever the ceiling says: memory that is already there.
    pub fn charge(self, slot: usize, wanted: u64) {
        let change = i64::try_from(wanted.min(MAX_UNITS)).unwrap_or(0);
        // A full word saturates: nothing that exists is refused here.
        let _ = self.change(slot, |_, _| Some(change));
    }

    /// Gives `given` units of `slot` back, at most what it holds.
    pub fn give(self, slot: usize, given: u64) {
        let _ = self.change(slot, |_, held| Some(-i64::try_from(given.min(held)).unwrap_or(0)));
    }

    /// The same if `still` says so.
    pub fn give_if(self, slot: usize, given: u64, still: impl Fn() -> bool) {
        let _ = self.change(slot, |_, held| still().then(|| -i64::try_from(given.min(held)).unwrap_or(0)));
    }

    /// Gives back what `slot` holds beyond the units that `stays` tells, if it says that the process of `slot` is gone. Tells
    /// how many units that were.
    ///
    /// A new process may claim the slot while this runs. Before it can hold anything of this GPU, the total has
    /// changed: it takes over an empty slot, or empties it by this same function. So the swap below fails, and `stays`
    /// is asked again.
    pub fn reap(self, slot: usize, stays: impl Fn() -> Option<u64>) -> u64 {
        let reaped = self.change(slot, |_, held| {
            let goes = held.saturating_sub(if held > 0 { stays()? } else { return None });
            Some(-i64::try_from(goes.min(MAX_UNITS)).unwrap_or(0))
        });
        reaped.map_or(0, i64::unsigned_abs)
    }

    /// Units that all processes hold together.
    pub fn total(self) -> u64 {
        self.load().units
    }

    /// Units that `slot` holds.
    pub fn held(self, slot: usize) -> u64 {
        let total = self.load();
        self.settle(total);
        Held::unpack(self.file.slots[slot].held[self.gpu].load()).units
    }

    fn load(self) -> Total {
        Total::unpack(self.file.gpus[self.gpu].total.load())
    }

    /// Makes one change in `slot`. `plan` gets the total and the units held by the slot and says by how much, or that
    /// it shall not be.
    fn change(self, slot: usize, plan: impl Fn(Total, u64) -> Option<i64>) -> Result<i64, Refused> {
        let word = &self.file.gpus[self.gpu].total;
        for _ in 0..MAX_ATTEMPTS {
            let total = self.load();
            fault::point();
            self.settle(total);
            // The total is still `total` when the swap below succeeds, so nothing was carried over in between and
            // this figure is the slot's at that moment.
            let held = Held::unpack(self.file.slots[slot].held[self.gpu].load()).units;
            let change = plan(total, held).ok_or(Refused)?;
            if change == 0 {
                return Ok(0);
            }
            let after = total.after(change, slot);
            fault::point();
            if word.replace(total.pack(), after.pack()) {
                fault::point();
                self.settle(after);
                return Ok(change);
            }
            std::hint::spin_loop();
        }
        Err(Refused)
    }

    /// Carries the last change over into its slot, unless that is done.
    fn settle(self, total: Total) {
        let held = &self.file.slots[total.slot].held[self.gpu];
        for _ in 0..MAX_ATTEMPTS {
            let seen = Held::unpack(held.load());
            // No number is ever used twice for one slot, so the swap below only succeeds if `seen` was still there
            // all along; and as `total` was the last change after `seen` was read, `seen` does not contain it.
            if seen.sequence == total.sequence || self.load().sequence != total.sequence {
                return;
            }
            fault::point();
            if held.replace(seen.pack(), seen.with(total.slot, total).pack()) {
                fault::point();
                return;
            }
        }
    }

    /// Counts one refusal.
    pub fn count_refusal(self) {
        self.file.gpus[self.gpu].refusals.fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs::File, os::fd::AsRawFd};

    use proptest::prelude::*;

    use super::*;
    use crate::{layout::USAGE_SIZE, mapping::Mapping};

    fn empty() -> Mapping<UsageFile> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(USAGE_SIZE as u64).unwrap();
        Mapping::new(File::as_raw_fd(&file), true).unwrap()
    }

    #[derive(Clone, Debug)]
    enum Step {
        Take { slot: usize, units: u64 },
        Charge { slot: usize, units: u64 },
        Give { slot: usize, units: u64 },
        Reap { slot: usize },
    }

    fn step() -> impl Strategy<Value = Step> {
        let slot = 0..4_usize;
        prop_oneof![
            3 => (slot.clone(), 0..60_u64).prop_map(|(slot, units)| Step::Take { slot, units }),
            1 => (slot.clone(), 0..5_u64).prop_map(|(slot, units)| Step::Charge { slot, units }),
            3 => (slot.clone(), 0..60_u64).prop_map(|(slot, units)| Step::Give { slot, units }),
            1 => slot.prop_map(|slot| Step::Reap { slot }),
        ]
    }

    proptest! {
        #[test]
        fn words_round_trip(word: u128, held: u128) {
            prop_assert_eq!(Total::unpack(word).pack(), word);
            prop_assert_eq!(Held::unpack(held).pack(), held);
        }

        /// The model is a map and a sum.
        #[test]
        fn the_total_is_the_sum_and_the_ceiling_holds(steps in prop::collection::vec(step(), 0..200)) {
            const CEILING: u64 = 100;
            let file = empty();
            let account = Account { file: &file, gpu: 3 };
            let mut model = BTreeMap::from([(0, 0), (1, 0), (2, 0), (3, 0)]);
            for step in steps {
                let sum: u64 = model.values().sum();
                match step {
                    Step::Take { slot, units } => {
                        let taken = account.take(slot, units, CEILING);
                        prop_assert_eq!(taken.is_ok(), sum + units <= CEILING);
                        *model.get_mut(&slot).unwrap() += if taken.is_ok() { units } else { 0 };
                    }
                    Step::Charge { slot, units } => {
                        account.charge(slot, units);
                        *model.get_mut(&slot).unwrap() += units;
                    }
                    Step::Give { slot, units } => {
                        account.give(slot, units);
                        let held = model.get_mut(&slot).unwrap();
                        *held -= units.min(*held);
                    }
                    Step::Reap { slot } => {
                        prop_assert_eq!(account.reap(slot, || None), 0);
                        prop_assert_eq!(account.reap(slot, || Some(0)), model.insert(slot, 0).unwrap());
                    }
                }
                prop_assert_eq!(account.total(), model.values().sum::<u64>());
                for (slot, units) in &model {
                    prop_assert_eq!(account.held(*slot), *units);
                }
            }
        }

        /// A container may write anything there: calls end, and never let more than the ceiling through.
        #[test]
        fn garbage_neither_hangs_nor_crashes_nor_lifts_the_ceiling(total: u128, held: u128, taken in 0..1_u64 << 40) {
            let file = empty();
            file.gpus[0].total.replace(0, total);
            let slot = Total::unpack(total).slot;
            file.slots[slot].held[0].replace(0, held);
            file.slots[7].held[0].replace(0, held);
            let account = Account { file: &file, gpu: 0 };
            if account.take(7, taken, 1000).is_ok() {
                prop_assert!(account.total() <= 1000);
            }
            account.give(7, taken);
            account.charge(slot, taken);
            account.reap(slot, || Some(0));
            account.held(7);
        }
    }

    #[test]
    fn sizes_beyond_any_memory_are_refused() {
        let file = empty();
        let account = Account { file: &file, gpu: 0 };
        for wanted in [MAX_UNITS + 1, u64::MAX / 2, u64::MAX] {
            assert_eq!(account.take(0, wanted, u64::MAX), Err(Refused));
        }
        assert_eq!(account.take(0, MAX_UNITS, u64::MAX), Ok(()));
        assert_eq!(account.take(1, 1, u64::MAX), Err(Refused));
        account.charge(1, 5);
        assert_eq!(account.total(), MAX_UNITS);
    }

    #[test]
    fn threads_of_one_process_and_of_several_lose_nothing() {
        const CEILING: u64 = 64;
        let file = empty();
        let account = Account { file: &file, gpu: 1 };
        std::thread::scope(|scope| {
            for thread in 0..8_usize {
                scope.spawn(move || {
                    for round in 0..20_000_u64 {
                        let (slot, units) = (thread % 3, 1 + round % 16);
                        if account.take(slot, units, CEILING).is_ok() {
                            assert!(account.total() <= CEILING);
                            account.give(slot, units);
                        }
                    }
                });
            }
        });
        assert_eq!(account.total(), 0);
        assert_eq!((0..3).map(|slot| account.held(slot)).sum::<u64>(), 0);
    }
}
