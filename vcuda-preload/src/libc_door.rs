//! The C library's own `dlsym`, which our export of that name hides from everybody, us included.

use std::{
    ffi::{CStr, c_char, c_void},
    sync::atomic::{AtomicPtr, Ordering::Relaxed},
};

/// The C library's `dlsym`; null until [`find`] was called.
pub(crate) static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Version of `dlsym` that every glibc has had on this machine.
#[cfg(target_arch = "x86_64")]
const VERSION: &CStr = c"GLIBC_2.2.5";
#[cfg(target_arch = "aarch64")]
const VERSION: &CStr = c"GLIBC_2.17";

unsafe extern "C" {
    // Not overridden: the driver's symbols have no versions, so this function finds none of them.
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// Fills [`DLSYM`], once.
pub(crate) fn find() {
    if DLSYM.load(Relaxed).is_null() {
        // Other interposers' functions have no version either, so this is the C library's.
        // SAFETY: both are C strings.
        let found = unsafe { dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), VERSION.as_ptr()) };
        // It is there in every glibc. If it were not, nothing would be found, and nobody die of it.
        let found = if found.is_null() { nothing as *mut c_void } else { found };
        DLSYM.store(found, Relaxed);
    }
}

extern "C" fn nothing() -> *mut c_void {
    std::ptr::null_mut()
}

/// `dlsym` as the C library has it. The caller is this library, so `handle` should be a real one.
///
/// # Safety
/// `handle` must be valid, or RTLD_DEFAULT.
pub(crate) unsafe fn dlsym(handle: *mut c_void, name: &CStr) -> *mut c_void {
    find();
    // SAFETY: `find` has filled it with the address of a function of this type.
    let dlsym: unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void =
        unsafe { std::mem::transmute(DLSYM.load(Relaxed)) };
    // SAFETY: the caller's promise.
    unsafe { dlsym(handle, name.as_ptr()) }
}
