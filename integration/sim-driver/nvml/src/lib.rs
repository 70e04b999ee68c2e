//! The library that stands for `libnvidia-ml.so.1`. Every name of the real library is there; what is not modelled
//! answers `NVML_ERROR_NOT_SUPPORTED`.

mod device;
mod events;
mod system;

mod symbols {
    include!(concat!(env!("OUT_DIR"), "/symbols.rs"));
}

pub(crate) const SUCCESS: u32 = 0;
pub(crate) const UNINITIALIZED: u32 = 1;
pub(crate) const INVALID_ARGUMENT: u32 = 2;
pub(crate) const NOT_SUPPORTED: u32 = 3;
pub(crate) const NOT_FOUND: u32 = 6;
pub(crate) const INSUFFICIENT_SIZE: u32 = 7;
pub(crate) const DRIVER_NOT_LOADED: u32 = 9;
pub(crate) const TIMEOUT: u32 = 10;
pub(crate) const GPU_IS_LOST: u32 = 15;
pub(crate) const VERSION_MISMATCH: u32 = 25;

/// What every call ends with.
pub(crate) type Outcome<T = ()> = Result<T, u32>;

/// The status of an outcome.
pub(crate) fn status(outcome: Outcome) -> u32 {
    outcome.err().unwrap_or(SUCCESS)
}

/// Writes `value` where `to` points.
pub(crate) fn put<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the caller of an NVML function passes valid pointers or null.
    unsafe { to.write(value) };
    Ok(())
}

/// Writes `text` and a NUL to the `length` bytes at `to`.
pub(crate) fn put_text(to: *mut u8, length: u32, text: &[u8]) -> Outcome {
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    if end >= length as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    // SAFETY: the caller says that `to` has `length` bytes, and `end` is less.
    unsafe {
        to.copy_from_nonoverlapping(text.as_ptr(), end);
        to.add(end).write(0);
    }
    Ok(())
}
