//! `errno` belongs to the application: what we do between its call and the driver must not show in it.

/// Puts `errno` back when dropped.
pub(crate) struct Keep(i32);

impl Keep {
    pub fn new() -> Self {
        // SAFETY: every thread has an `errno`.
        Self(unsafe { *libc::__errno_location() })
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        // SAFETY: every thread has an `errno`.
        unsafe { *libc::__errno_location() = self.0 };
    }
}

/// A number of the calling thread that no other living thread of the process has; never 0.
pub(crate) fn thread() -> u64 {
    // SAFETY: every thread has an `errno`, at a place of its own.
    unsafe { libc::__errno_location() as u64 }
}
