//! Memory of the application that its arguments point to. Another thread may change it at any time, so it is read once, and what
//! the account goes by is what the driver goes by: that gets a copy of what says how much to take and where, and writes its
//! answers where they are read before the application has them.

use std::{cell::UnsafeCell, mem::MaybeUninit};

use crate::cuda::types::{CUDA_SUCCESS, Result};

/// A copy of what is at `from`; none where that is null.
///
/// # Safety
/// `from` must be null or valid.
pub(super) unsafe fn copy_of<T: Copy>(from: *const T) -> Option<T> {
    // SAFETY: the caller's promise. Volatile, so that it is not read again where the copy is used.
    (!from.is_null()).then(|| unsafe { from.read_volatile() })
}

/// An answer of the driver's on its way to the application, which gets it when what it stands for is noted: no other thread
/// can use it before.
pub(super) struct Out<T> {
    to: *mut T,
    room: UnsafeCell<MaybeUninit<T>>,
}

impl<T: Copy> Out<T> {
    /// # Safety
    /// `to` must be null or have room for a `T`, of which all bits are a value.
    pub unsafe fn new(to: *mut T) -> Self {
        Self { to, room: UnsafeCell::new(MaybeUninit::zeroed()) }
    }

    /// Where the driver is to write it: null where the application wants none, which is the driver's to judge.
    pub fn room(&self) -> *mut T {
        if self.to.is_null() { self.to } else { self.room.get().cast() }
    }

    /// What the driver has written.
    pub fn value(&self) -> T {
        // SAFETY: zero or the driver's, and all bits are a value.
        unsafe { (*self.room.get()).assume_init() }
    }

    /// Gives it to the application, if the result is that it shall have it.
    pub fn hand_over(self, result: Result) -> Result {
        if result == CUDA_SUCCESS && !self.to.is_null() {
            // SAFETY: the promise that `new` was given.
            unsafe { self.to.write(self.value()) };
        }
        result
    }
}
