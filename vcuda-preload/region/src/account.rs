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
//! What a process frees it may keep in a stock (`stock.rs`), from which its next allocation takes it without a change of the
//! total. What is used is what is held without what is in stock, so the ceiling holds for it as it does for the total: a
//! stock is only taken from while the total is within the ceiling, and at the moment at which that was seen the units were
//! in it. When the total leaves no room, all stocks of all processes are drained first, and an allocation is only refused if all were
//! empty at one moment at which the total had no room.
//!
//! Draining a stock is a change of the total that names it. Its word is marked before, and then only changes by being
//! emptied, which is the first part of carrying that change over; so the mark says that the change has not been made,
//! until it is the last change. A word is only marked after the last change has been carried over, with the word unchanged since
//! before: so whoever finds a mark and, after that, the last change not carried over, knows that the mark is that change's.
//!
//! Every word here can be overwritten by any process of the container. Nothing read from it is used as anything but
//! a number, all arithmetic saturates, and every loop is bounded.

use std::{
    cell::Cell,
    sync::atomic::Ordering::{Relaxed, SeqCst},
};

use crate::{
    ACCOUNT_UNIT_BYTES, fault,
    layout::UsageFile,
    pair::{halves, whole},
    stock::{self, STOCKS, Stock, StockAt},
};

/// Attempts before a change is given up. Each failed one means that another process got ahead, so an honest container
/// never comes near; a container that spoils its own region gets refusals instead of a hanging process.
const MAX_ATTEMPTS: u32 = 1 << 20;

/// How often what other threads may change meanwhile is looked at again, until it was the same twice.
const MAX_LOOKS: u32 = 64;

/// Frees that go past the stocks after an allocation has needed what was in them: so that it need not come back for each.
const PAST_STOCKS: u64 = 1024;

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
    /// The sum over all slots in units; 32 bits, which is 2 TiB.
    pub units: u64,
    /// Which stock of the slot the last change has emptied, if that was what it was for; 4 bits, 0 for none. 0 in files of
    /// version 2, in which these are the highest of 36 bits of units.
    pub drained: Option<usize>,
}

const SEQUENCE_BITS: u32 = 45;
const SLOT_BITS: u32 = 10;
const CHANGE_BITS: u32 = 37;
const UNITS_BITS: u32 = 32;
const DRAINED_BITS: u32 = 4;
const MAX_UNITS: u64 = (1 << UNITS_BITS) - 1;
const UNITS_AT: u32 = SEQUENCE_BITS + SLOT_BITS + CHANGE_BITS;
const _: () = assert!(UNITS_AT + UNITS_BITS + DRAINED_BITS == 128);
const _: () = assert!(STOCKS < 1 << DRAINED_BITS);
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
            units: field(UNITS_AT, UNITS_BITS),
            drained: usize::try_from(field(UNITS_AT + UNITS_BITS, DRAINED_BITS)).unwrap_or(0).checked_sub(1),
        }
    }

    fn pack(self) -> u128 {
        let field = |value: u64, at: u32, bits: u32| (u128::from(value) & ((1 << bits) - 1)) << at;
        field(self.sequence, 0, SEQUENCE_BITS)
            | field(self.slot as u64, SEQUENCE_BITS, SLOT_BITS)
            | field(self.change.cast_unsigned(), SEQUENCE_BITS + SLOT_BITS, CHANGE_BITS)
            | field(self.units, UNITS_AT, UNITS_BITS)
            | field(self.drained.map_or(0, |number| number as u64 + 1), UNITS_AT + UNITS_BITS, DRAINED_BITS)
    }

    /// The total after `change` units in `slot`. |change| ≤ MAX_UNITS < 2^32, so it fits 37 bits with its sign.
    fn after(self, change: i64, slot: usize, drained: Option<usize>) -> Self {
        Self {
            sequence: (self.sequence + 1) & ((1 << SEQUENCE_BITS) - 1),
            slot,
            change,
            units: self.units.saturating_add_signed(change).min(MAX_UNITS),
            drained,
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

/// What some stocks hold together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Stocks {
    units: u64,
    /// Sum of their words, of which each only grows: the same again if none has changed.
    seen: u64,
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

impl<'a> Account<'a> {
    /// Takes `wanted` units into `slot` if the total then stays within `ceiling` units.
    pub fn take(self, slot: usize, wanted: u64, ceiling: u64) -> Result<(), Refused> {
        // More than the words can hold is more than any ceiling.
        let change = i64::try_from(wanted).ok().filter(|_| wanted <= MAX_UNITS).ok_or(Refused)?;
        let fits =
            |total: Total| total.units.checked_add(wanted).is_some_and(|sum| sum <= ceiling.min(MAX_UNITS));
        self.change(slot, None, |total, _| fits(total).then_some(change)).map(drop)
    }

    /// Puts `wanted` units into `slot` whatever the ceiling says: memory that is already there.
    pub fn charge(self, slot: usize, wanted: u64) {
        let change = i64::try_from(wanted.min(MAX_UNITS)).unwrap_or(0);
        // A full word saturates: nothing that exists is refused here.
        let _ = self.change(slot, None, |_, _| Some(change));
    }

    /// Gives `given` units of `slot` back, at most what it holds.
    pub fn give(self, slot: usize, given: u64) {
        let _ = self.change(slot, None, |_, held| Some(-i64::try_from(given.min(held)).unwrap_or(0)));
    }

    /// The same if `still` says so.
    pub fn give_if(self, slot: usize, given: u64, still: impl Fn() -> bool) {
        let _ =
            self.change(slot, None, |_, held| still().then(|| -i64::try_from(given.min(held)).unwrap_or(0)));
    }

    /// Takes `wanted` units from stock `number` of `slot`, if they are there and the total is within `ceiling`.
    pub fn take_from_stock(self, slot: usize, number: usize, wanted: u64, ceiling: u64) -> bool {
        let total = &self.file.gpus[self.gpu].total;
        // The one field that is needed is whole in the high word.
        let fits = || Total::unpack(whole(0, total.high())).units <= ceiling;
        wanted > 0 && self.stock(slot, number).take(wanted, fits)
    }

    /// Keeps `given` units of `slot` in its stock `number`, if there is room and no allocation has needed what was there lately.
    pub fn give_to_stock(self, slot: usize, number: usize, given: u64) -> bool {
        // Nobody keeps more than the process holds, be its figures wrong.
        let held = || Held::unpack(whole(0, self.file.slots[slot].held[self.gpu].high())).units;
        let past = &self.file.gpus[self.gpu].past_stocks;
        let left = past.load(SeqCst);
        if left > 0 {
            let _ = past.compare_exchange(left, left.min(PAST_STOCKS) - 1, SeqCst, Relaxed);
            return false;
        }
        given > 0 && self.stock(slot, number).put(given, |sum| sum <= held())
    }

    /// Takes `wanted` units into `slot` if the total then stays within `ceiling` units, for which all stocks of `slots`, which are
    /// those that may have some, are drained. If it is refused, then at some moment no stock had anything and the total had no
    /// room.
    pub fn take_drained<S: Iterator<Item = usize>>(
        self,
        slot: usize,
        wanted: u64,
        ceiling: u64,
        slots: impl Fn() -> S,
    ) -> Result<(), Refused> {
        // Each round but the last means that a thread put something into a stock that was empty, and from here on they find
        // that they shall not.
        for _ in 0..MAX_LOOKS {
            self.file.gpus[self.gpu].past_stocks.store(PAST_STOCKS, SeqCst);
            let before = slots().fold(0, |seen: u64, slot| seen.wrapping_add(self.drain(slot)));
            fault::point();
            if self.take(slot, wanted, ceiling).is_ok() {
                return Ok(());
            }
            fault::point();
            let now = self.stocks(slots());
            if now.units == 0 && now.seen == before {
                break;
            }
        }
        Err(Refused)
    }

    /// Gives back what `slot` has in stock. Tells what its stocks were when they were empty, as [`Stocks::seen`] does.
    fn drain(self, slot: usize) -> u64 {
        // Who holds nothing has nothing in stock.
        if self.held_as_it_is(slot).units == 0 {
            return self.stocks([slot].into_iter()).seen;
        }
        stock::used(self.file, slot)
            .fold(0, |seen: u64, number| seen.wrapping_add(self.drain_one(slot, number).pack()))
    }

    fn drain_one(self, slot: usize, number: usize) -> Stock {
        let at = self.stock(slot, number);
        let mut seen = at.load();
        for _ in 0..MAX_ATTEMPTS {
            if seen.units == 0 {
                break;
            }
            if !seen.draining {
                self.settle(self.load());
                fault::point();
                if at.replace(seen, seen.then(seen.units, true)) {
                    fault::point();
                }
            } else {
                let change = self.change(slot, Some(number), |_, held| {
                    let now = at.load();
                    now.draining.then(|| -i64::try_from(now.units.min(held)).unwrap_or(0))
                });
                if change == Ok(0) {
                    // Spoilt: in stock is at most what is held.
                    at.replace(seen, seen.then(0, false));
                }
            }
            seen = at.load();
        }
        seen
    }

    /// What all of `slots` have in stock.
    fn stocks(self, slots: impl Iterator<Item = usize>) -> Stocks {
        let all = slots
            .flat_map(|slot| stock::used(self.file, slot).map(move |number| self.stock(slot, number).load()));
        all.fold(Stocks::default(), |sum, stock| Stocks {
            units: sum.units + stock.units,
            seen: sum.seen.wrapping_add(stock.pack()),
        })
    }

    fn stock(self, slot: usize, number: usize) -> StockAt<'a> {
        StockAt::new(self.file, slot, number, self.gpu)
    }

    /// Gives back what `slot` holds beyond the units that `stays` tells, if it says that the process of `slot` is gone. Tells
    /// how many units that were, without those in stock.
    ///
    /// A new process may claim the slot while this runs. Before it can hold anything of this GPU, the total has
    /// changed: it takes over an empty slot, or empties it by this same function. So the swap below fails, and `stays`
    /// is asked again.
    pub fn reap(self, slot: usize, stays: impl Fn() -> Option<u64>) -> u64 {
        for _ in 0..MAX_LOOKS {
            let in_stock = Cell::new(false);
            let reaped = self.change(slot, None, |_, held| {
                let goes = held.saturating_sub(if held > 0 { stays()? } else { return None });
                // The dead put nothing into stocks.
                in_stock.set(self.stocks([slot].into_iter()).units > 0);
                (!in_stock.get()).then(|| -i64::try_from(goes.min(MAX_UNITS)).unwrap_or(0))
            });
            if !in_stock.get() {
                return reaped.map_or(0, i64::unsigned_abs);
            }
            self.drain(slot);
        }
        0
    }

    /// Units that all processes hold together, with what they have in stock.
    #[cfg(test)]
    pub fn total(self) -> u64 {
        self.load().units
    }

    /// Units that `slot` holds, with what it has in stock.
    pub fn held(self, slot: usize) -> u64 {
        let total = self.load();
        self.settle(total);
        self.held_as_it_is(slot).units
    }

    /// Units that are in use by all processes, where only those of `slots` may have some in stock.
    pub fn used<S: Iterator<Item = usize>>(self, slots: impl Fn() -> S) -> u64 {
        self.without_stocks(|total| total.units, slots)
    }

    /// Units that the process of `slot` uses.
    pub fn used_by(self, slot: usize) -> u64 {
        self.without_stocks(|_| self.held_as_it_is(slot).units, || [slot].into_iter())
    }

    /// The same if no other process holds any: all that is used then, for who holds nothing has nothing in stock.
    pub fn used_by_only(self, slot: usize) -> Option<u64> {
        let only = Cell::new(false);
        let held = |total: Total| {
            let held = self.held_as_it_is(slot).units;
            only.set(held == total.units);
            held
        };
        let used = self.without_stocks(held, || [slot].into_iter());
        only.get().then_some(used)
    }

    /// What `of` tells of the total, less what `slots` have in stock, at one moment: unless others never let that be.
    fn without_stocks<S: Iterator<Item = usize>>(
        self,
        of: impl Fn(Total) -> u64,
        slots: impl Fn() -> S,
    ) -> u64 {
        let mut units = 0;
        for _ in 0..MAX_LOOKS {
            let total = self.load();
            self.settle(total);
            let stocks = self.stocks(slots());
            fault::point();
            units = of(total).saturating_sub(stocks.units);
            if self.stocks(slots()) == stocks && self.load().sequence == total.sequence {
                break;
            }
        }
        units
    }

    /// Without the last change, if that has not been carried over.
    fn held_as_it_is(self, slot: usize) -> Held {
        Held::unpack(self.file.slots[slot].held[self.gpu].load())
    }

    fn load(self) -> Total {
        Total::unpack(self.file.gpus[self.gpu].total.load())
    }

    /// Makes one change in `slot`, by which its stock `drained` is emptied if one is named. `plan` gets the total and the units
    /// held by the slot and says by how much, or that it shall not be.
    fn change(
        self,
        slot: usize,
        drained: Option<usize>,
        plan: impl Fn(Total, u64) -> Option<i64>,
    ) -> Result<i64, Refused> {
        let word = &self.file.gpus[self.gpu].total;
        for _ in 0..MAX_ATTEMPTS {
            let total = self.load();
            fault::point();
            self.settle(total);
            // The total is still `total` when the swap below succeeds, so nothing was carried over in between and
            // this figure is the slot's at that moment.
            let held = self.held_as_it_is(slot).units;
            let change = plan(total, held).ok_or(Refused)?;
            if change == 0 {
                return Ok(0);
            }
            let after = total.after(change, slot, drained);
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
            if let Some(number) = total.drained.filter(|number| *number < STOCKS) {
                fault::point();
                let at = self.stock(total.slot, number);
                let stock = at.load();
                fault::point();
                // Only now, see above.
                if stock.draining && Held::unpack(held.load()) != seen {
                    continue;
                }
                if stock.draining && at.replace(stock, stock.then(0, false)) {
                    fault::point();
                }
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
        Take { slot: usize, stock: usize, units: u64 },
        Charge { slot: usize, units: u64 },
        Give { slot: usize, stock: usize, units: u64 },
        Reap { slot: usize },
        Lower { ceiling: u64 },
    }

    fn step() -> impl Strategy<Value = Step> {
        let (slot, stock) = (0..4_usize, 0..3_usize);
        prop_oneof![
            3 => (slot.clone(), stock.clone(), 0..60_u64)
                .prop_map(|(slot, stock, units)| Step::Take { slot, stock, units }),
            1 => (slot.clone(), 0..5_u64).prop_map(|(slot, units)| Step::Charge { slot, units }),
            3 => (slot.clone(), stock, 0..60_u64)
                .prop_map(|(slot, stock, units)| Step::Give { slot, stock, units }),
            1 => slot.prop_map(|slot| Step::Reap { slot }),
            1 => (50..150_u64).prop_map(|ceiling| Step::Lower { ceiling }),
        ]
    }

    impl Account<'_> {
        fn take_somehow(self, slot: usize, stock: usize, units: u64, ceiling: u64) -> Result<(), Refused> {
            if self.take_from_stock(slot, stock, units, ceiling) {
                return Ok(());
            }
            self.take(slot, units, ceiling)
                .or_else(|Refused| self.take_drained(slot, units, ceiling, || 0..4))
        }
    }

    proptest! {
        #[test]
        fn words_round_trip(word: u128, held: u128) {
            let total = Total::unpack(word);
            prop_assert_eq!(Total::unpack(total.pack()), total);
            prop_assert_eq!(total.pack(), word);
            prop_assert_eq!(Held::unpack(held).pack(), held);
        }

        /// The model is a map and a sum; it knows nothing of stocks.
        #[test]
        fn the_total_is_the_sum_and_the_ceiling_holds(steps in prop::collection::vec(step(), 0..200)) {
            let mut ceiling = 100;
            let file = empty();
            let account = Account { file: &file, gpu: 3 };
            let mut model = BTreeMap::from([(0, 0), (1, 0), (2, 0), (3, 0)]);
            for step in steps {
                let sum: u64 = model.values().sum();
                match step {
                    Step::Take { slot, stock, units } => {
                        let taken = account.take_somehow(slot, stock, units, ceiling);
                        prop_assert_eq!(taken.is_ok(), sum + units <= ceiling);
                        *model.get_mut(&slot).unwrap() += if taken.is_ok() { units } else { 0 };
                    }
                    Step::Charge { slot, units } => {
                        account.charge(slot, units);
                        *model.get_mut(&slot).unwrap() += units;
                    }
                    Step::Give { slot, stock, units } => {
                        let held = model.get_mut(&slot).unwrap();
                        let units = units.min(*held);
                        if !account.give_to_stock(slot, stock, units) {
                            account.give(slot, units);
                        }
                        *held -= units;
                    }
                    Step::Reap { slot } => {
                        let before = account.total();
                        prop_assert_eq!(account.reap(slot, || None), 0);
                        prop_assert_eq!(account.total(), before, "the living keep what they have in stock");
                        prop_assert_eq!(account.reap(slot, || Some(0)), model.insert(slot, 0).unwrap());
                        prop_assert_eq!(account.held(slot), 0);
                    }
                    Step::Lower { ceiling: to } => ceiling = to,
                }
                prop_assert_eq!(account.used(|| 0..4), model.values().sum::<u64>());
                prop_assert_eq!(account.total(), (0..4).map(|slot| account.held(slot)).sum::<u64>());
                for (slot, units) in &model {
                    prop_assert_eq!(account.used_by(*slot), *units);
                }
            }
        }

        /// A container may write anything there: calls end, and never let more than the ceiling through.
        #[test]
        fn garbage_neither_hangs_nor_crashes_nor_lifts_the_ceiling(
            total: u128, held: u128, stocks: [u64; 4], taken in 0..1_u64 << 40,
        ) {
            let file = empty();
            for (number, word) in stocks.into_iter().enumerate() {
                file.stocks[7][number].gpus[0].store(word, Relaxed);
                file.stocks[Total::unpack(total).slot][number].gpus[0].store(word.rotate_left(1), Relaxed);
            }
            file.gpus[0].total.replace(0, total);
            let slot = Total::unpack(total).slot;
            file.slots[slot].held[0].replace(0, held);
            file.slots[7].held[0].replace(0, held);
            let account = Account { file: &file, gpu: 0 };
            if account.take(7, taken, 1000).is_ok() {
                prop_assert!(account.total() <= 1000);
            }
            if account.take_drained(7, taken, 1000, || 5..9).is_ok() {
                prop_assert!(account.total() <= 1000);
            }
            if account.take_from_stock(7, 2, taken, 1000) {
                prop_assert!(account.total() <= 1000);
            }
            account.give_to_stock(7, 3, taken);
            account.used(|| 5..9);
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
                        if account.take_somehow(slot, thread / 3, units, CEILING).is_ok() {
                            assert!(account.total() <= CEILING);
                            if !account.give_to_stock(slot, thread % 2, units) {
                                account.give(slot, units);
                            }
                        }
                    }
                });
            }
        });
        assert_eq!(account.used(|| 0..4), 0);
        assert_eq!((0..3).map(|slot| account.used_by(slot)).sum::<u64>(), 0);
        assert_eq!((0..3).map(|slot| account.held(slot)).sum::<u64>(), account.total());
        account.take_drained(3, CEILING, CEILING, || 0..4).unwrap();
    }

    /// What fits is never refused because of what others have in stock, be that taken and put back all the time.
    #[test]
    fn what_fits_is_not_refused_for_what_is_in_stock() {
        const CEILING: u64 = 64;
        let file = empty();
        let account = Account { file: &file, gpu: 1 };
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            // Eight at most each, of which one thread frees what the other has allocated into another stock.
            for slot in 0..3_usize {
                let (account, done) = (&account, &done);
                scope.spawn(move || {
                    let mut round = 0;
                    while !done.load(Relaxed) {
                        account.take_somehow(slot, round % 5, 8, CEILING).unwrap();
                        if !account.give_to_stock(slot, (round + 1) % 5, 8) {
                            account.give(slot, 8);
                        }
                        round += 1;
                    }
                });
            }
            for _ in 0..20_000 {
                account.take_somehow(3, 0, CEILING - 24, CEILING).unwrap();
                account.give(3, CEILING - 24);
            }
            done.store(true, Relaxed);
        });
    }

    #[test]
    fn a_lowered_ceiling_holds_for_what_is_in_stock() {
        let file = empty();
        let account = Account { file: &file, gpu: 1 };
        account.take(0, 80, 100).unwrap();
        assert!(account.give_to_stock(0, 0, 50));
        assert_eq!(account.take_somehow(0, 0, 50, 60), Err(Refused));
        account.take_somehow(0, 0, 30, 60).unwrap();
        assert_eq!(account.used(|| 0..4), 60);
    }
}
