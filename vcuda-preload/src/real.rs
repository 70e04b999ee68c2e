//! The driver's real libraries, loaded from their private place at the first use, and the addresses of their
//! functions, found one by one as they are needed.

use std::{
    ffi::{CStr, c_void},
    sync::atomic::{AtomicPtr, Ordering::Acquire, Ordering::Release},
};

use crate::{errno, libc_door};

/// A function of ours that stands for the driver's.
pub(crate) struct Ours(pub *const ());

// SAFETY: the address of a function.
unsafe impl Sync for Ours {}

/// One of the driver's libraries.
pub(crate) struct Library {
    place: &'static CStr,
    handle: AtomicPtr<c_void>,
}

impl Library {
    const fn new(place: &'static CStr) -> Self {
        Self { place, handle: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Handle of the library, loaded if it is not yet; null where it is not in its place.
    pub fn open(&self) -> *mut c_void {
        let handle = self.handle.load(Acquire);
        if !handle.is_null() {
            return handle;
        }
        // No lock of ours is held meanwhile: the loader has one, and calls constructors under it which may come
        // here. Who comes second gets the same handle.
        // SAFETY: a library of the driver; its constructors are those that the program wants run.
        let handle = unsafe { libc::dlopen(self.place.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        self.handle.store(handle, Release);
        handle
    }
}

/// What both libraries have: the generated tables, and a slot a symbol with the address of the driver's function.
macro_rules! library {
    ($module:ident, $file:literal, $place:expr, $missing:literal, $unavailable:literal) => {
        pub(crate) mod $module {
            #![allow(dead_code, reason = "the table is whole, not every symbol is called by name")]

            use super::{AtomicPtr, Library, Ours, Release, errno, libc_door};
            use std::{ffi::CStr, sync::atomic::Ordering::Acquire};

            include!(concat!(env!("OUT_DIR"), "/", $file));

            /// The library.
            pub(crate) static LIBRARY: Library = Library::new($place);

            /// The driver's functions, null before they are first needed.
            pub(crate) static SLOTS: [AtomicPtr<()>; COUNT] =
                [const { AtomicPtr::new(std::ptr::null_mut()) }; COUNT];

            /// Name of symbol number `index`.
            pub(crate) fn name(index: usize) -> &'static CStr {
                let rest = STARTS.get(index).and_then(|start| NAMES.as_bytes().get(usize::from(*start)..));
                rest.and_then(|rest| CStr::from_bytes_until_nul(rest).ok()).unwrap_or_default()
            }

            /// Number of the symbol `wanted`.
            pub(crate) fn find(wanted: &[u8]) -> Option<usize> {
                let (mut low, mut high) = (0, COUNT);
                while low < high {
                    let middle = (low + high) / 2;
                    match name(middle).to_bytes().cmp(wanted) {
                        std::cmp::Ordering::Less => low = middle + 1,
                        std::cmp::Ordering::Greater => high = middle,
                        std::cmp::Ordering::Equal => return Some(middle),
                    }
                }
                None
            }

            /// Address of the driver's function number `index`, or of one that takes no argument and returns an error.
            pub(crate) fn function(index: usize) -> *const () {
                match SLOTS[index].load(Acquire) {
                    slot if slot.is_null() => resolve(index),
                    slot => slot.cast_const(),
                }
            }

            /// Address of the driver's function number `index`; null where this driver has none.
            pub(crate) fn address(index: usize) -> *const () {
                let address = function(index);
                if address == missing as *const () || address == unavailable as *const () {
                    return std::ptr::null();
                }
                address
            }

            /// Finds the driver's function number `index`, for the export of that name or for [`address`]. Never null.
            pub(crate) extern "C" fn resolve(index: usize) -> *const () {
                let _kept = errno::Keep::new();
                let handle = LIBRARY.open();
                if handle.is_null() {
                    return unavailable as *const ();
                }
                // SAFETY: the handle is never closed.
                let found = unsafe { libc_door::dlsym(handle, name(index)) }.cast::<()>();
                let found = if found.is_null() { missing as *mut () } else { found };
                if let Some(slot) = SLOTS.get(index) {
                    slot.store(found, Release);
                }
                found
            }

            /// Function of ours for what symbol number `index` stands for, or null.
            pub(crate) fn ours(index: usize) -> *const () {
                match HANDLED.binary_search_by_key(&index, |(index, _)| *index) {
                    Ok(at) => HANDLED[at].1.0,
                    Err(_) => std::ptr::null(),
                }
            }

            /// Stands in for a function that this driver does not have.
            extern "C" fn missing() -> i32 {
                $missing
            }

            /// Stands in for all functions where the driver's library is not in its place.
            extern "C" fn unavailable() -> i32 {
                $unavailable
            }
        }
    };
}

/// `place` as a C string.
const fn c_string<const N: usize>(place: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let mut at = 0;
    while at < place.len() {
        bytes[at] = place.as_bytes()[at];
        at += 1;
    }
    bytes
}

const fn as_c_str(bytes: &'static [u8]) -> &'static CStr {
    match CStr::from_bytes_until_nul(bytes) {
        Ok(place) => place,
        Err(_) => panic!("ends in NUL by its length"),
    }
}

static CUDA_PLACE: [u8; region::place::REAL_CUDA.len() + 1] = c_string(region::place::REAL_CUDA);
static NVML_PLACE: [u8; region::place::REAL_NVML.len() + 1] = c_string(region::place::REAL_NVML);

// CUDA_ERROR_NOT_SUPPORTED and CUDA_ERROR_SHARED_OBJECT_INIT_FAILED.
library!(cuda, "cuda.rs", super::as_c_str(&super::CUDA_PLACE), 801, 303);
// NVML_ERROR_FUNCTION_NOT_FOUND and NVML_ERROR_LIBRARY_NOT_FOUND.
library!(nvml, "nvml.rs", super::as_c_str(&super::NVML_PLACE), 13, 12);

/// Calls the driver's function of that name. Each argument comes with its type in the public header; unsafe, since a
/// wrong type is a wrong call.
macro_rules! driver {
    ($library:ident :: $symbol:ident ( $($argument:expr => $type:ty),* $(,)? )) => {{
        let address = crate::real::$library::function(crate::real::$library::index::$symbol);
        std::mem::transmute::<*const (), unsafe extern "C" fn($($type),*) -> std::ffi::c_int>(address)($($argument),*)
    }};
}
pub(crate) use driver;
