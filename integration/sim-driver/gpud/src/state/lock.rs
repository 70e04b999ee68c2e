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

/// The lock is closed as long as this lives.
pub(super) struct Locked<'a> {
    lock: &'a Lock,
    owner: u32,
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
        Locked { lock: self, owner }
    }

    /// For the daemon: also takes the lock away from `dead`.
    pub(super) fn acquire_from(&self, dead: usize) -> Locked<'_> {
        let owner = owner(MODULE);
        self.acquire_slowly(owner, Some(self::owner(dead)));
        Locked { lock: self, owner }
    }

    #[cold]
    fn acquire_slowly(&self, owner: u32, dead: Option<u32>) {
        let mut wanted = owner;
        for spins in 0_u32.. {
            let now = self.0.load(Relaxed);
            if now == 0 || dead == Some(now & !WAITERS) {
                if self.0.compare_exchange(now, wanted | (now & WAITERS), Acquire, Relaxed).is_ok() {
                    return;
                }
                continue;
            }
            if spins < 100 {
                std::hint::spin_loop();
                continue;
            }
            // From here on others may be waiting as well, so whoever opens the lock must wake.
            wanted = owner | WAITERS;
            let marked = now | WAITERS;
            if now == marked || self.0.compare_exchange(now, marked, Relaxed, Relaxed).is_ok() {
                let _ = futex::wait(&self.0, futex::Flags::empty(), marked, Some(&NAP));
            }
        }
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
