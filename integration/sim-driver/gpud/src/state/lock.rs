//! The lock of a GPU's books. It lies in shared memory, so it must survive its owner.

use std::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use rustix::thread::futex;

use super::MODULE;

/// A lock that names its owner, so that the daemon can open it for one that died.
#[repr(transparent)]
pub(super) struct Lock(AtomicU32);

/// The owner's slot plus one, and whether someone waits.
const WAITERS: u32 = 1 << 31;

/// An owner can die between opening the lock and waking the next one; nobody sleeps longer than this.
const NAP: futex::Timespec = futex::Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// Tells the daemon whether the process in a slot is gone. Only then may it open what that process had closed.
pub type Gone<'a> = &'a dyn Fn(usize) -> bool;

/// The lock is closed as long as this lives.
pub(super) struct Locked<'a> {
    lock: &'a Lock,
    owner: u32,
    /// It was taken from a process that died in the middle of its work.
    pub stolen: bool,
}

fn owner(slot: usize) -> u32 {
    u32::try_from(slot + 1).unwrap_or(u32::MAX) & !WAITERS
}

impl Lock {
    /// Closes the lock for the process in a slot.
    #[inline]
    pub(super) fn acquire(&self, slot: usize) -> Locked<'_> {
        let owner = owner(slot);
        if self.0.compare_exchange(0, owner, Acquire, Relaxed).is_err() {
            self.acquire_slowly(owner, None);
        }
        Locked { lock: self, owner, stolen: false }
    }

    /// Closes the lock for the daemon, which also takes it from processes that are gone.
    pub(super) fn acquire_for_module(&self, gone: Gone<'_>) -> Locked<'_> {
        let owner = owner(MODULE);
        let stolen = self.0.compare_exchange(0, owner, Acquire, Relaxed).is_err()
            && self.acquire_slowly(owner, Some(gone));
        Locked { lock: self, owner, stolen }
    }

    /// The slot that has closed it.
    pub(super) fn owner(&self) -> Option<usize> {
        (self.0.load(Relaxed) & !WAITERS).checked_sub(1).map(|slot| slot as usize)
    }

    /// True where it was taken from a process that is gone.
    #[cold]
    fn acquire_slowly(&self, owner: u32, gone: Option<Gone<'_>>) -> bool {
        let mut wanted = owner;
        for spins in 0_u32.. {
            let now = self.0.load(Relaxed);
            if now == 0 {
                if self.0.compare_exchange(now, wanted, Acquire, Relaxed).is_ok() {
                    return false;
                }
                continue;
            }
            if spins < 100 {
                std::hint::spin_loop();
                continue;
            }
            if let Some(gone) = gone
                && gone((now & !WAITERS).wrapping_sub(1) as usize)
            {
                if self.0.compare_exchange(now, owner | WAITERS, Acquire, Relaxed).is_ok() {
                    return true;
                }
                continue;
            }
            // From here on others may be waiting as well, so whoever opens the lock must wake.
            wanted = owner | WAITERS;
            let marked = now | WAITERS;
            if now == marked || self.0.compare_exchange(now, marked, Relaxed, Relaxed).is_ok() {
                let _ = futex::wait(&self.0, futex::Flags::empty(), marked, Some(&NAP));
            }
        }
        false
    }
}

impl Drop for Locked<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.lock.0.compare_exchange(self.owner, 0, Release, Relaxed).is_err() {
            self.lock.0.store(0, Release);
            let _ = futex::wake(&self.lock.0, futex::Flags::empty(), 1);
        }
    }
}
