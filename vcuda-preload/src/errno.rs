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
