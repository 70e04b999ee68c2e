//! A mutual exclusion of four bytes for which zero is "free", so that memory the kernel wipes at fork holds free locks.
//! Threads of one process only; held for nanoseconds, or around one call of the driver.

use std::{
    cell::UnsafeCell,
    ops::{Deref, DerefMut},
    sync::atomic::{
        AtomicU32,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use crate::errno;

const FREE: u32 = 0;
const HELD: u32 = 1;
const WAITED_FOR: u32 = 2;

/// A `T` that one thread at a time uses.
#[derive(Default)]
#[repr(C)]
pub(crate) struct Locked<T> {
    state: AtomicU32,
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
        if self.state.compare_exchange_weak(FREE, HELD, Acquire, Relaxed).is_err() {
            self.wait();
        }
        Guard { of: self }
    }

    /// The value, if the lock is free now.
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        self.state.compare_exchange(FREE, HELD, Acquire, Relaxed).is_ok().then_some(Guard { of: self })
    }

    #[cold]
    fn wait(&self) {
        for _ in 0..64 {
            if self.state.load(Relaxed) == FREE
                && self.state.compare_exchange_weak(FREE, HELD, Acquire, Relaxed).is_ok()
            {
                return;
            }
            std::hint::spin_loop();
        }
        let _kept = errno::Keep::new();
        while self.state.swap(WAITED_FOR, Acquire) != FREE {
            self.futex(libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, WAITED_FOR);
        }
    }

    fn futex(&self, operation: libc::c_int, value: u32) {
        let no_timeout = std::ptr::null::<libc::timespec>();
        // SAFETY: the word outlives the call; whether it waited, and why it stopped, is looked at by the caller.
        unsafe { libc::syscall(libc::SYS_futex, self.state.as_ptr(), operation, value, no_timeout) };
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
        if self.of.state.swap(FREE, Release) == WAITED_FOR {
            let _kept = errno::Keep::new();
            self.of.futex(libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, 1);
        }
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
