//! Names: `cuGetProcAddress` in both forms, error texts, export tables. Answers are those of the real driver, as seen
//! on 535 and 555: base names only; the newest ABI that is not newer than asked; flags 0 to 3.

use std::ffi::{CStr, c_char, c_void};

use crate::{
    INVALID_VALUE, NOT_FOUND, SUCCESS, put, status,
    symbols::{NAMES, Variant},
};

/// `CUdriverProcAddressQueryResult`.
const FOUND: i32 = 0;
const UNKNOWN: i32 = 1;
const TOO_OLD: i32 = 2;

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD: u64 = 2;

fn find(name: &[u8], version: i32, flags: u64) -> Result<&'static Variant, i32> {
    let at = NAMES.binary_search_by(|(known, _)| known.as_bytes().cmp(name)).map_err(|_| UNKNOWN)?;
    let variants = NAMES[at].1;
    let newest = |per_thread: bool| {
        let fits = |variant: &&Variant| variant.per_thread == per_thread && variant.version <= version;
        variants.iter().filter(fits).max_by_key(|variant| variant.version)
    };
    // A name that has entries for per-thread default streams has nothing else for who asks for them.
    let per_thread = flags & PER_THREAD != 0 && variants.iter().any(|variant| variant.per_thread);
    newest(per_thread).ok_or(TOO_OLD)
}

/// # Safety
/// `name` is null or a C string; the others are null or valid.
unsafe fn lookup(name: *const c_char, entry: *mut *const (), version: i32, flags: u64) -> Result<(), i32> {
    if name.is_null() {
        return Err(UNKNOWN);
    }
    // SAFETY: the caller's promise.
    let found = find(unsafe { CStr::from_ptr(name) }.to_bytes(), version, flags)?;
    // SAFETY: the caller's promise; null was refused.
    unsafe { entry.write(found.entry) };
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    entry: *mut *const (),
    version: i32,
    flags: u64,
    result: *mut i32,
) -> i32 {
    if name.is_null() || entry.is_null() || flags > 3 {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's promise.
    let found = match unsafe { lookup(name, entry, version, flags) } {
        Ok(()) => FOUND,
        Err(why) => {
            // SAFETY: null was refused.
            unsafe { entry.write(std::ptr::null()) };
            why
        }
    };
    if !result.is_null() {
        // SAFETY: the caller's promise.
        unsafe { result.write(found) };
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress(
    name: *const c_char,
    entry: *mut *const (),
    version: i32,
    flags: u64,
) -> i32 {
    if name.is_null() || entry.is_null() || flags > 3 {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's promise.
    match unsafe { lookup(name, entry, version, flags) } {
        Ok(()) => SUCCESS,
        Err(_) => NOT_FOUND,
    }
}

/// The vendor's undocumented tables are not forged; a runtime that needs them says that it found no genuine driver.
#[unsafe(no_mangle)]
pub extern "C" fn cuGetExportTable(table: *mut *const c_void, _id: *const u8) -> i32 {
    let _ = put(table, std::ptr::null());
    NOT_FOUND
}

const ERRORS: [(i32, &CStr, &CStr); 10] = [
    (0, c"CUDA_SUCCESS", c"no error"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (100, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (500, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
];

fn describe(
    error: i32,
    to: *mut *const c_char,
    which: impl Fn(&(i32, &'static CStr, &'static CStr)) -> &'static CStr,
) -> i32 {
    match ERRORS.iter().find(|(code, ..)| *code == error) {
        Some(known) => status(put(to, which(known).as_ptr())),
        None => {
            let _ = put(to, std::ptr::null());
            INVALID_VALUE
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(error: i32, to: *mut *const c_char) -> i32 {
    describe(error, to, |known| known.1)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(error: i32, to: *mut *const c_char) -> i32 {
    describe(error, to, |known| known.2)
}
