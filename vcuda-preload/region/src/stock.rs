//! What a process has freed and keeps on its account for its next allocation: its *stock*. Each process has a few a GPU, and
//! its threads have them in common, so that an allocation and its free change one word that other processors seldom use.
//!
//! A word holds units that count as held by the process, though none of its blocks has them. Its own threads take from it and
//! put into it by one compare-and-swap each, and may do so unless it is marked as *draining*. Whoever needs the units marks
//! it; from then on it stays as it is until a change of the total that says so has taken them off the account, which anybody
//! may make (`account.rs`). So whoever dies or stops on the way delays nobody, and loses nothing.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, SeqCst},
};

use crate::{bits::bits, fault, layout::UsageFile};

/// Stocks of a process. The word of the total has four bits for the number of one, and one value means none.
pub(crate) const STOCKS: usize = 15;

/// What a stock can hold, in units: one less than 32 MiB. More goes back at once.
pub(crate) const MAX_STOCK: u64 = (1 << UNITS_BITS) - 1;

const UNITS_BITS: u32 = 16;
const SEQUENCE_BITS: u32 = 47;
const _: () = assert!(UNITS_BITS + 1 + SEQUENCE_BITS == 64);

/// The word of a stock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stock {
    /// 16 bits.
    pub units: u64,
    /// Not to be taken from or put into.
    pub draining: bool,
    /// Grows with every change; 47 bits. So a word that is the same was the same all along.
    pub sequence: u64,
}

impl Stock {
    pub fn unpack(word: u64) -> Self {
        Self {
            units: word & MAX_STOCK,
            draining: word >> UNITS_BITS & 1 == 1,
            sequence: word >> (UNITS_BITS + 1),
        }
    }

    pub fn pack(self) -> u64 {
        self.units & MAX_STOCK | u64::from(self.draining) << UNITS_BITS | self.sequence << (UNITS_BITS + 1)
    }

    /// The next value of the word: whatever is changed, it is another one than all before.
    pub fn then(self, units: u64, draining: bool) -> Self {
        Self { units, draining, sequence: (self.sequence + 1) & ((1 << SEQUENCE_BITS) - 1) }
    }
}

/// Numbers of the stocks of `slot` that have ever been put into. Nothing is in the others as this looks.
pub(crate) fn used(file: &UsageFile, slot: usize) -> impl Iterator<Item = usize> {
    bits(file.slots[slot].stocks_used.load(Acquire) & ((1 << STOCKS) - 1))
}

/// A stock in the file.
#[derive(Clone, Copy)]
pub(crate) struct StockAt<'a> {
    word: &'a AtomicU64,
    used: &'a AtomicU64,
    number: usize,
}

impl<'a> StockAt<'a> {
    /// `slot`, `number` and `gpu` are below `MAX_PROCESSES`, `STOCKS` and `MAX_GPUS`.
    pub fn new(file: &'a UsageFile, slot: usize, number: usize, gpu: usize) -> Self {
        Self { word: &file.stocks[slot][number].gpus[gpu], used: &file.slots[slot].stocks_used, number }
    }

    pub fn load(self) -> Stock {
        Stock::unpack(self.word.load(Acquire))
    }

    pub fn replace(self, old: Stock, new: Stock) -> bool {
        self.word.compare_exchange(old.pack(), new.pack(), SeqCst, Relaxed).is_ok()
    }

    /// Takes `wanted` units out if they are there and `may` says so after it was seen that they are.
    pub fn take(self, wanted: u64, may: impl Fn() -> bool) -> bool {
        self.change(|seen| (wanted <= seen.units && may()).then(|| seen.units - wanted))
    }

    /// Puts `given` units in if there is room and `may` says so of what it then holds.
    pub fn put(self, given: u64, may: impl Fn(u64) -> bool) -> bool {
        let bit = 1 << self.number;
        if self.used.load(Relaxed) & bit == 0 {
            self.used.fetch_or(bit, SeqCst);
            fault::point();
        }
        self.change(|seen| seen.units.checked_add(given).filter(|sum| *sum <= MAX_STOCK && may(*sum)))
    }

    fn change(self, to: impl Fn(Stock) -> Option<u64>) -> bool {
        /// Another thread got ahead so often: then the account is no slower.
        const ATTEMPTS: u32 = 4;
        for _ in 0..ATTEMPTS {
            let seen = self.load();
            let Some(units) = (!seen.draining).then(|| to(seen)).flatten() else { return false };
            fault::point();
            if self.replace(seen, seen.then(units, false)) {
                fault::point();
                return true;
            }
        }
        false
    }
}

/// Number of the stock that the calling thread uses, by its thread pointer, which lie a stack apart: multiples of the golden
/// ratio are spread evenly.
pub(crate) fn of_thread() -> usize {
    #[cfg(feature = "fault-points")]
    if let Some(number) = fault::stock() {
        return number;
    }
    let spread = thread_pointer().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    // Below STOCKS.
    usize::try_from((spread * STOCKS as u64) >> 32).unwrap_or(0)
}

/// The ABI's, other than for any other living thread of the process.
fn thread_pointer() -> u64 {
    let pointer: u64;
    // SAFETY: every thread has one; on x86-64 its first word points to itself (ELF TLS, variant II).
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!("mov {}, qword ptr fs:[0]", out(reg) pointer, options(pure, readonly, nostack, preserves_flags));
    }
    // SAFETY: the register is readable everywhere.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(pure, nomem, nostack, preserves_flags));
    }
    pointer
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn words_round_trip(word: u64) {
            prop_assert_eq!(Stock::unpack(word).pack(), word);
        }

        #[test]
        fn no_value_comes_twice(word: u64, units in 0..=MAX_STOCK, draining: bool) {
            let stock = Stock::unpack(word);
            prop_assert_ne!(stock.then(units, draining).pack(), word);
            prop_assert_eq!(stock.then(units, draining).units, units);
        }
    }

    #[test]
    fn threads_of_a_program_use_different_stocks() {
        let barrier = std::sync::Barrier::new(STOCKS);
        let used: std::collections::BTreeSet<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..STOCKS)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        let number = of_thread();
                        barrier.wait();
                        number
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(used.iter().all(|number| *number < STOCKS));
        assert!(used.len() > STOCKS / 3, "{used:?}");
    }
}
