//! Status codes of `nvml.h`, and versions of its structures.

use std::ffi::{CStr, c_char, c_int};

pub(crate) use crate::pointers::{In, Out, Outcome, Text, api};

/// `nvmlReturn_t`, other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Error(pub i32);

pub(crate) const UNINITIALIZED: Error = Error(1);
pub(crate) const INVALID_VALUE: Error = Error(2);
pub(crate) const NOT_SUPPORTED: Error = Error(3);
pub(crate) const NO_PERMISSION: Error = Error(4);
pub(crate) const NOT_FOUND: Error = Error(6);
pub(crate) const INSUFFICIENT_SIZE: Error = Error(7);
pub(crate) const DRIVER_NOT_LOADED: Error = Error(9);
pub(crate) const TIMEOUT: Error = Error(10);
pub(crate) const GPU_IS_LOST: Error = Error(15);
pub(crate) const OPERATING_SYSTEM: Error = Error(17);
pub(crate) const LIB_RM_VERSION_MISMATCH: Error = Error(18);
pub(crate) const NO_DATA: Error = Error(21);
pub(crate) const VERSION_MISMATCH: Error = Error(25);
pub(crate) const UNKNOWN: Error = Error(999);

/// `NVML_STRUCT_VERSION`.
pub(crate) const fn version_of<T>(version: u32) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "structures are small")]
    let size = size_of::<T>() as u32;
    size | version << 24
}

/// Writes a text into the caller's `length` bytes; it must fit, with its end.
pub(crate) fn put_text(to: Out<u8>, length: u32, text: &[u8]) -> Outcome {
    to.wanted()?;
    if text.len() >= length as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    crate::pointers::put_text(to, c_int::try_from(length).unwrap_or(c_int::MAX), text)
}

/// Writes a list as NVML does: `count` says how many places there are, and gets how many there should be.
pub(crate) fn put_list<T: Copy>(count: Out<u32>, to: Out<T>, all: &[T]) -> Outcome {
    let room = count.get()? as usize;
    count.put(u32::try_from(all.len()).unwrap_or(u32::MAX))?;
    if room < all.len() {
        return Err(INSUFFICIENT_SIZE);
    }
    for (at, one) in all.iter().enumerate() {
        to.put_at(at, *one)?;
    }
    Ok(())
}

/// The text of a status code, as the real library 555 gives it.
pub(crate) fn describe(error: c_int) -> &'static CStr {
    match error {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        5 => c"Already Initialized",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        8 => c"Insufficient External Power",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        11 => c"Interrupt Request Issue",
        12 => c"NVML Shared Library Not Found",
        13 => c"Function Not Found",
        14 => c"Corrupted infoROM",
        15 => c"GPU is lost",
        16 => c"GPU requires reset",
        17 => c"GPU access blocked by the operating system",
        18 => c"Driver/library version mismatch",
        19 => c"In use by another client",
        20 => c"Insufficient Memory",
        21 => c"No data",
        22 => c"vGPU ECC not supported",
        23 => c"Insufficient Resources",
        24 => c"Invalid Frequency",
        25 => c"Argument version mismatch",
        26 => c"Requested functionality has been deprecated",
        27 => c"System is not in ready state",
        28 => c"No supported GPUs were found",
        29 => c"Resource not in correct state to perform requested operation",
        _ => c"Unknown Error",
    }
}

/// A text that the library keeps.
pub(crate) type Kept = *const c_char;
