//! Places at which a test lets a process die. Empty in a shipped build.

/// Ends the process by SIGKILL if a test asked for that at this, the n-th, point.
#[inline(always)]
pub(crate) fn point(_name: &'static str) {
    #[cfg(feature = "fault-points")]
    armed::point();
}

#[cfg(feature = "fault-points")]
pub use armed::after;

#[cfg(feature = "fault-points")]
mod armed {
    use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

    static LEFT: AtomicI64 = AtomicI64::new(i64::MAX);

    /// Lets this process die at the `points`-th fault point from now on.
    pub fn after(points: i64) {
        LEFT.store(points, Relaxed);
    }

    pub fn point() {
        if LEFT.fetch_sub(1, Relaxed) <= 0 {
            // SAFETY: no memory is involved.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
    }
}
