//! Looking symbols up by name: what `dlsym` answers for the driver's symbols, and the functions that the driver's own
//! look-up hands out. Both answer from the one table.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr::null,
    sync::atomic::{AtomicPtr, Ordering::Relaxed},
};

use crate::{
    errno, libc_door,
    real::{self, Library, driver},
};

/// What a look-up gets: an address, or, where that is null, the handle with which the C library is to be asked.
#[repr(C)]
pub(crate) struct Answer {
    address: *const (),
    ask: *mut c_void,
}

/// Which of the driver's libraries a name belongs to, and its number in the table if it is there.
enum Symbol {
    Cuda(Option<usize>),
    Nvml(Option<usize>),
}

impl Symbol {
    fn of(name: &CStr) -> Option<Self> {
        let name = name.to_bytes();
        match name {
            // Not cudart's, cuBLAS's, cuDNN's and so on: theirs go on in lower case. The debugger's interface does too.
            [b'c', b'u', b'A'..=b'Z', ..] | [b'c', b'u', b'd', b'b', b'g', ..] => {
                Some(Self::Cuda(real::cuda::find(name)))
            }
            [b'n', b'v', b'm', b'l', b'A'..=b'Z', ..] => Some(Self::Nvml(real::nvml::find(name))),
            _ => None,
        }
    }

    fn library(&self) -> &'static Library {
        match self {
            Self::Cuda(_) => &real::cuda::LIBRARY,
            Self::Nvml(_) => &real::nvml::LIBRARY,
        }
    }

    /// Our function of this name, or the driver's where we have none; null if the driver has none either, whether or
    /// not we have one.
    fn address(&self) -> *const () {
        let (driver, ours) = match *self {
            Self::Cuda(Some(index)) => (real::cuda::address(index), real::cuda::ours(index)),
            Self::Nvml(Some(index)) => (real::nvml::address(index), real::nvml::ours(index)),
            _ => (null(), null()),
        };
        if driver.is_null() || ours.is_null() { driver } else { ours }
    }
}

/// See `jump::dlsym`.
pub(crate) extern "C" fn answer_dlsym(
    handle: *mut c_void,
    name: *const c_char,
    caller: *const c_void,
) -> Answer {
    libc_door::find();
    let as_asked = Answer { address: null(), ask: handle };
    // SAFETY: the caller of `dlsym` passes a C string.
    let name = unsafe { name.as_ref().map(|name| CStr::from_ptr(name)) };
    let Some((name, symbol)) = name.and_then(|name| Some((name, Symbol::of(name)?))) else { return as_asked };
    let _kept = errno::Keep::new();

    if is_driver(object_of(caller)) {
        // The driver looks for its own.
        return as_asked;
    }
    let found = if handle == libc::RTLD_NEXT {
        if is_before_us(object_of(caller)) {
            // Whatever comes after the caller is right, be it another interposer or us, if the driver has it.
            let lacking = symbol.address().is_null() && !symbol.library().open().is_null();
            return if lacking { ask_driver(&symbol) } else { as_asked };
        }
        // We are not after the caller, but the driver would have been.
        null()
    } else {
        // SAFETY: the handle is the caller's; for RTLD_DEFAULT the global scope begins the same for all callers.
        unsafe { libc_door::dlsym(handle, name) }.cast_const()
    };
    if found.is_null() {
        let may_be_ours = handle == libc::RTLD_NEXT || handle == libc::RTLD_DEFAULT || is_us(handle);
        if !may_be_ours {
            return as_asked;
        }
    } else if !is_driver(object_of(found)) && !within_us(found) {
        // Another library's function of that name: an interposer of the application's.
        return as_asked;
    }
    match symbol.address() {
        address if !address.is_null() => Answer { address, ask: handle },
        _ if symbol.library().open().is_null() => as_asked,
        // New to our table, or not in this driver: its own answer, and its own error.
        _ => ask_driver(&symbol),
    }
}

fn ask_driver(symbol: &Symbol) -> Answer {
    Answer { address: null(), ask: symbol.library().open() }
}

/// `struct link_map` of `<link.h>`, the part that every glibc has.
#[repr(C)]
struct LinkMap {
    address: usize,
    name: *const c_char,
    dynamic: *const c_void,
    next: *const LinkMap,
    previous: *const LinkMap,
}

/// A loaded object: the loader's entry for it, and the path it was loaded from. Both null for none.
#[derive(Clone, Copy)]
struct Object {
    entry: *const LinkMap,
    path: *const c_char,
}

/// The loaded object that an address is in.
fn object_of(address: *const c_void) -> Object {
    // SAFETY: plain old data, for which zero is a value.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let mut entry: *const LinkMap = null();
    // SAFETY: any address may be asked for; `info` and `entry` outlive the call, and with this flag the third argument
    // is a link map.
    let known = unsafe { dladdr1(address, &raw mut info, (&raw mut entry).cast(), RTLD_DL_LINKMAP) } != 0;
    if known { Object { entry, path: info.dli_fname } } else { Object { entry: null(), path: null() } }
}

/// Whether this is a libcuda or an NVML, wherever it comes from: the driver's, one that the image brought along, a
/// stub.
fn is_driver(object: Object) -> bool {
    if object.path.is_null() || object.entry == us() {
        return false;
    }
    // SAFETY: `dladdr1` gives C strings.
    let path = unsafe { CStr::from_ptr(object.path) }.to_bytes();
    let name = path.rsplit(|c| *c == b'/').next().unwrap_or_default();
    name.starts_with(b"libcuda.so") || name.starts_with(b"libnvidia-ml.so")
}

/// The loader's entry for this library.
fn us() -> *const LinkMap {
    static ENTRY: AtomicPtr<LinkMap> = AtomicPtr::new(std::ptr::null_mut());
    let entry = ENTRY.load(Relaxed);
    if !entry.is_null() {
        return entry;
    }
    let entry = object_of(us as *const c_void).entry;
    ENTRY.store(entry.cast_mut(), Relaxed);
    entry
}

fn within_us(address: *const c_void) -> bool {
    !address.is_null() && object_of(address).entry == us()
}

/// Whether `handle` leads to this library: only we have our functions under their names.
fn is_us(handle: *mut c_void) -> bool {
    // SAFETY: the handle was good enough for the caller.
    within_us(unsafe { libc_door::dlsym(handle, c"cuGetProcAddress_v2") })
}

/// Whether the object was loaded before us, so that we come after it in the order of look-ups. Such objects were there
/// when the program started, and stay.
fn is_before_us(object: Object) -> bool {
    // SAFETY: our own entry of the loader's list, and those before it.
    let mut entry = unsafe { us().as_ref() }.map_or(null(), |us| us.previous);
    // SAFETY: the same.
    while let Some(earlier) = unsafe { entry.as_ref() } {
        if std::ptr::from_ref(earlier) == object.entry {
            return true;
        }
        entry = earlier.previous;
    }
    false
}

/// From `<dlfcn.h>`.
const RTLD_DL_LINKMAP: c_int = 2;

unsafe extern "C" {
    fn dladdr1(
        address: *const c_void,
        info: *mut libc::Dl_info,
        extra: *mut *mut c_void,
        flags: c_int,
    ) -> c_int;
}

// ---- the driver's own look-up ---------------------------------------------------------------------------------------

/// Turns the address of a driver's function into that of ours, if we have one that stands for just this one. The driver
/// hands out the addresses of its exports (seen with 535, 550 and 555 for every name, version and flag), so there is
/// nothing to guess about variants.
fn ours_for(address: *mut c_void) -> *mut c_void {
    for (index, ours) in real::cuda::HANDLED {
        if real::cuda::address(*index).cast() == address.cast_const() {
            return ours.0.cast_mut().cast();
        }
    }
    address
}

/// Puts ours in the place of the driver's.
///
/// # Safety
/// `function` must be null or valid.
unsafe fn replace(result: c_int, function: *mut *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    if let Some(function) = unsafe { function.as_mut() }
        && result == 0
        && !function.is_null()
    {
        *function = ours_for(*function);
    }
    result
}

/// `CUresult cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)`, of CUDA 11.3.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> c_int {
    // SAFETY: the arguments are the application's, for the driver to judge; on success it has written `function`.
    unsafe {
        let result = driver!(cuda::cuGetProcAddress(
            symbol => *const c_char, function => *mut *mut c_void, version => c_int, flags => u64,
        ));
        replace(result, function)
    }
}

/// The same of CUDA 12.0, which also tells why there is no function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> c_int {
    // SAFETY: as above.
    unsafe {
        let result = driver!(cuda::cuGetProcAddress_v2(
            symbol => *const c_char, function => *mut *mut c_void, version => c_int, flags => u64, status => *mut c_int,
        ));
        replace(result, function)
    }
}
