//! Two 64-bit words that change as one. The only machine-dependent code of this crate.

use std::sync::atomic::{AtomicU64, Ordering::Acquire};

/// The low and the high word of `whole`.
#[expect(clippy::cast_possible_truncation, reason = "each half is a word by its shift")]
pub(crate) const fn halves(whole: u128) -> (u64, u64) {
    (whole as u64, (whole >> 64) as u64)
}

/// The opposite of [`halves`].
pub(crate) const fn whole(low: u64, high: u64) -> u128 {
    // Widening; `From` is no constant function.
    (high as u128) << 64 | low as u128
}

/// A 128-bit atomic whose every new value differs from the one before in its low word.
///
/// That promise, which both users keep by a sequence number there, lets a reader do with plain loads. It also
/// works through a read-only mapping, where a locked instruction would fault.
#[repr(C, align(16))]
pub(crate) struct AtomicPair {
    low: AtomicU64,
    high: AtomicU64,
}

impl AtomicPair {
    /// The value at some instant during the call.
    pub fn load(&self) -> u128 {
        let mut low = self.low.load(Acquire);
        loop {
            let high = self.high.load(Acquire);
            // Acquire keeps this load behind the one above.
            let again = self.low.load(Acquire);
            if low == again {
                return whole(low, high);
            }
            low = again;
        }
    }

    /// The high word at some instant during the call.
    pub fn high(&self) -> u64 {
        self.high.load(Acquire)
    }

    /// Stores `new` if the value is `old`; tells whether it did. Sequentially consistent.
    pub fn replace(&self, old: u128, new: u128) -> bool {
        // SAFETY: `self` is 16 bytes of interior-mutable memory, aligned to 16, and writable: read-only mappings
        // are only ever handed out behind types that do not reach this function.
        unsafe { compare_exchange(std::ptr::from_ref(self).cast_mut().cast(), old, new) }
    }
}

/// # Safety
/// `at` must be valid for reads and writes of 16 bytes and aligned to 16.
#[cfg(target_arch = "x86_64")]
unsafe fn compare_exchange(at: *mut u128, old: u128, new: u128) -> bool {
    let ((old_low, old_high), (new_low, new_high)) = (halves(old), halves(new));
    let result: u64;
    // Not `core::arch`'s function: it needs a target feature at every caller, and glibc's floor is plain x86-64.
    // SAFETY: the caller's promise. Every x86-64 processor that drives a CUDA-capable GPU has the instruction: it is
    // part of x86-64-v2. rbx, which LLVM keeps for itself, is put back; it also hands it out as any `reg`, so the address,
    // which is used while rbx holds another value, is in a register by name.
    unsafe {
        std::arch::asm!(
            "xchg {new_low}, rbx",
            "lock cmpxchg16b [rdi]",
            "sete cl",
            "mov rbx, {new_low}",
            in("rdi") at,
            new_low = inout(reg) new_low => _,
            inout("rcx") new_high => result,
            inout("rax") old_low => _,
            inout("rdx") old_high => _,
            options(nostack),
        );
    }
    result & 0xff != 0
}

/// # Safety
/// `at` must be valid for reads and writes of 16 bytes and aligned to 16.
#[cfg(target_arch = "aarch64")]
unsafe fn compare_exchange(at: *mut u128, old: u128, new: u128) -> bool {
    let (mut seen_low, mut seen_high): (u64, u64);
    let mut failed: u32;
    let ((old_low, old_high), (new_low, new_high)) = (halves(old), halves(new));
    loop {
        // SAFETY: the caller's promise; the pair instructions are in every ARMv8 processor.
        unsafe {
            std::arch::asm!(
                "ldaxp {low}, {high}, [{at}]",
                "cmp {low}, {old_low}",
                "ccmp {high}, {old_high}, #0, eq",
                "b.ne 2f",
                "stlxp {failed:w}, {new_low}, {new_high}, [{at}]",
                "b 3f",
                // A value read by a pair load is only whole once a pair store to it has succeeded.
                "2: stlxp {failed:w}, {low}, {high}, [{at}]",
                "3:",
                at = in(reg) at,
                low = out(reg) seen_low,
                high = out(reg) seen_high,
                old_low = in(reg) old_low,
                old_high = in(reg) old_high,
                new_low = in(reg) new_low,
                new_high = in(reg) new_high,
                failed = out(reg) failed,
                options(nostack),
            );
        }
        if failed == 0 {
            return whole(seen_low, seen_high) == old;
        }
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the accounting needs a 128-bit compare-and-swap; only x86-64 and aarch64 are written");

#[cfg(test)]
mod tests {
    use std::{sync::atomic::AtomicU64, thread};

    use super::{AtomicPair, halves, whole};

    #[test]
    fn a_reader_never_sees_halves_of_two_values() {
        let pair = AtomicPair { low: AtomicU64::new(0), high: AtomicU64::new(0) };
        let twice = |n: u64| whole(n, n);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..100_000 {
                        let seen = pair.load();
                        let (n, _) = halves(seen);
                        assert_eq!(seen, twice(n));
                        pair.replace(seen, twice(n + 1));
                    }
                });
            }
        });
        assert!(halves(pair.load()).0 >= 100_000);
        assert!(!pair.replace(twice(1), twice(2)), "a stale value is not replaced");
    }
}
