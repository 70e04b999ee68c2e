//! A mutual exclusion for which zero is "free", so that memory the kernel wipes at fork holds free locks. Threads of one
//! process only; held for nanoseconds, or around one call of the driver. Freeing it is a plain store: it is on the way of
//! every allocation, where a futex's exchange would cost as much as all the rest of a look-up.

use std::{
    cell::UnsafeCell,
    ops::{Deref, DerefMut},
    sync::atomic::{
        AtomicBool,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use crate::errno;

/// A `T` that one thread at a time uses.
#[derive(Default)]
#[repr(C)]
pub(crate) struct Locked<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the lock lets one thread at a time at the value.
unsafe impl<T: Send> Sync for Locked<T> {}

/// Frees the lock when dropped.
pub(crate) struct Guard<'a, T> {
    of: &'a Locked<T>,
}

impl<T> Locked<T> {
    /// Waits until the lock is free.
    pub fn lock(&self) -> Guard<'_, T> {
        if self.held.compare_exchange_weak(false, true, Acquire, Relaxed).is_err() {
            self.wait();
        }
        Guard { of: self }
    }

    /// The value, if the lock is free now.
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        self.held.compare_exchange(false, true, Acquire, Relaxed).is_ok().then_some(Guard { of: self })
    }

    #[cold]
    fn wait(&self) {
        const SPINS: u32 = 64;
        const YIELDS: u32 = 80;
        let _kept = errno::Keep::new();
        let mut tries = 0;
        while self.held.load(Relaxed)
            || self.held.compare_exchange_weak(false, true, Acquire, Relaxed).is_err()
        {
            match tries {
                ..SPINS => std::hint::spin_loop(),
                // SAFETY: no memory is involved.
                SPINS..YIELDS => _ = unsafe { libc::sched_yield() },
                // Who holds it may need this processor, and have a lower real-time priority.
                YIELDS.. => {
                    let while_passes = libc::timespec { tv_sec: 0, tv_nsec: 50_000 };
                    // SAFETY: the time outlives the call.
                    unsafe { libc::nanosleep(&raw const while_passes, std::ptr::null_mut()) };
                }
            }
            tries = (tries + 1).min(YIELDS);
        }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the lock is held.
        unsafe { &*self.of.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the lock is held.
        unsafe { &mut *self.of.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        self.of.held.store(false, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_at_a_time() {
        let count = Locked::<u64>::default();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        *count.lock() += 1;
                    }
                });
            }
        });
        assert_eq!(*count.lock(), 160_000);
        let held = count.lock();
        assert!(count.try_lock().is_none());
        drop(held);
        assert!(count.try_lock().is_some());
    }
}
