//! The library that stands for `libcuda.so.1`. What a call does is in the module of its subject; every other name
//! of the real library is there too and answers `CUDA_ERROR_NOT_SUPPORTED`.

mod address;
mod context;
mod device;
mod driver;
mod memory;
mod work;

mod symbols {
    use crate::{address::*, context::*, device::*, memory::*, work::*};

    /// One ABI of a name.
    pub(crate) struct Variant {
        /// CUDA version that brought it.
        pub version: i32,
        /// For the per-thread default stream.
        pub per_thread: bool,
        /// The function.
        pub entry: *const (),
    }

    // SAFETY: pointers to functions.
    unsafe impl Sync for Variant {}

    include!(concat!(env!("OUT_DIR"), "/symbols.rs"));
}

pub(crate) const SUCCESS: i32 = 0;
pub(crate) const INVALID_VALUE: i32 = 1;
pub(crate) const OUT_OF_MEMORY: i32 = 2;
pub(crate) const NOT_INITIALIZED: i32 = 3;
pub(crate) const NO_DEVICE: i32 = 100;
pub(crate) const INVALID_DEVICE: i32 = 101;
pub(crate) const INVALID_CONTEXT: i32 = 201;
pub(crate) const NOT_FOUND: i32 = 500;
pub(crate) const NOT_SUPPORTED: i32 = 801;

/// Success, or why not: what every call ends with.
pub(crate) type Outcome<T = ()> = Result<T, i32>;

/// The status of an outcome.
pub(crate) fn status(outcome: Outcome) -> i32 {
    outcome.err().unwrap_or(SUCCESS)
}

/// Writes `value` where `to` points.
pub(crate) fn put<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller of a CUDA function passes valid pointers or null.
    unsafe { to.write(value) };
    Ok(())
}
