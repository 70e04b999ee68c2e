//! Places at which a test lets a process die or stop. Empty in a shipped build.

/// Sends the process the signal that a test asked for, if this is the point it asked for.
#[inline(always)]
pub(crate) fn point() {
    #[cfg(feature = "fault-points")]
    armed::point();
}

#[cfg(feature = "fault-points")]
pub use armed::{after, hook, use_stock};

#[cfg(feature = "fault-points")]
pub(crate) use armed::stock;

#[cfg(feature = "fault-points")]
mod armed {
    use std::{
        cell::{Cell, RefCell},
        sync::atomic::{AtomicI32, AtomicI64, Ordering::Relaxed},
    };

    static LEFT: AtomicI64 = AtomicI64::new(-1);
    static SIGNAL: AtomicI32 = AtomicI32::new(0);

    thread_local! {
        static STOCK: Cell<Option<usize>> = const { Cell::new(None) };
        static HOOK: RefCell<Option<Box<dyn Fn()>>> = const { RefCell::new(None) };
    }

    /// Has `hook` called at every point that this thread comes to.
    pub fn hook(hook: impl Fn() + 'static) {
        HOOK.set(Some(Box::new(hook)));
    }

    /// Has this thread use stock `number`, below 15, of its process.
    pub fn use_stock(number: usize) {
        STOCK.set(Some(number));
    }

    pub(crate) fn stock() -> Option<usize> {
        STOCK.get()
    }

    /// Sends this process `signal` at the point after the next `points` ones, once.
    pub fn after(points: i64, signal: i32) {
        SIGNAL.store(signal, Relaxed);
        LEFT.store(points, Relaxed);
    }

    pub fn point() {
        HOOK.with_borrow(|hook| hook.iter().for_each(|hook| hook()));
        if LEFT.fetch_sub(1, Relaxed) == 0 {
            // SAFETY: no memory is involved.
            unsafe { libc::kill(libc::getpid(), SIGNAL.load(Relaxed)) };
        }
    }
}
