//! The C library's own `dlsym` and `dlvsym`, which our exports of these names hide from everybody, us included.
//!
//! They are found in the C library's symbol table, as the loader would, without calling anything: this runs within
//! any process's first `dlsym`, even before constructors have run.

use std::{
    ffi::{CStr, c_char, c_void},
    sync::atomic::{AtomicPtr, Ordering::Relaxed},
};

/// The C library's `dlsym`; null until [`find`] was called.
pub(crate) static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// The C library's `dlvsym`; null until [`find`] was called.
pub(crate) static DLVSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// `struct link_map` of `<link.h>`, the part that every glibc has.
#[repr(C)]
pub(crate) struct LinkMap {
    address: usize,
    name: *const c_char,
    dynamic: *const Dynamic,
    pub next: *const LinkMap,
    pub previous: *const LinkMap,
}

#[repr(C)]
struct Debug {
    version: i32,
    map: *const LinkMap,
}

#[repr(C)]
struct Dynamic {
    tag: i64,
    value: usize,
}

#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: usize,
}

// Tags of <elf.h>.
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const SHN_UNDEF: u16 = 0;

unsafe extern "C" {
    /// The loader's list of loaded objects; `_r_debug` of ld.so.
    static _r_debug: Debug;
}

/// Fills [`DLSYM`] and [`DLVSYM`], once.
pub(crate) fn find() {
    if DLSYM.load(Relaxed).is_null() {
        // SAFETY: the loader keeps its list; the C library stands near its beginning, before anything that can be
        // unloaded.
        unsafe { find_in(_r_debug.map) }
    }
}

/// # Safety
/// `map` must begin a list of loaded objects.
#[cold]
unsafe fn find_in(mut map: *const LinkMap) {
    // SAFETY: the caller's promise.
    while let Some(object) = unsafe { map.as_ref() } {
        // SAFETY: names in the list are C strings.
        let name = unsafe { CStr::from_ptr(object.name) }.to_bytes();
        // Before glibc 2.34 they are in libdl, which we need for that reason.
        if name.ends_with(b"/libc.so.6") || name.ends_with(b"/libdl.so.2") {
            // SAFETY: an object of the list.
            let (dlsym, dlvsym) = unsafe { (object.symbol(c"dlsym"), object.symbol(c"dlvsym")) };
            if !dlsym.is_null() && !dlvsym.is_null() {
                DLVSYM.store(dlvsym.cast_mut(), Relaxed);
                DLSYM.store(dlsym.cast_mut(), Relaxed);
                return;
            }
        }
        map = object.next;
    }
    // Cannot be: no glibc without them loads this library. Nothing is found then, and nobody dies of it.
    DLVSYM.store(nothing as *mut c_void, Relaxed);
    DLSYM.store(nothing as *mut c_void, Relaxed);
}

extern "C" fn nothing() -> *mut c_void {
    std::ptr::null_mut()
}

impl LinkMap {
    /// Address of the function `name` that this object defines, whatever its version; null if it does not.
    ///
    /// # Safety
    /// The object must be loaded.
    unsafe fn symbol(&self, name: &CStr) -> *const c_void {
        let (mut strings, mut symbols, mut hash) = (0, 0, 0);
        let mut entry = self.dynamic;
        // SAFETY: this entry is there: a dynamic section ends with DT_NULL.
        while let Some(&Dynamic { tag: tag @ 1.., value }) = unsafe { entry.as_ref() } {
            // glibc turns these into addresses in place, on most machines.
            let address = if value < self.address { value + self.address } else { value };
            match tag {
                DT_STRTAB => strings = address,
                DT_SYMTAB => symbols = address,
                DT_GNU_HASH => hash = address,
                _ => {}
            }
            // SAFETY: not the last entry.
            entry = unsafe { entry.add(1) };
        }
        if strings == 0 || symbols == 0 || hash == 0 {
            return std::ptr::null();
        }
        // SAFETY: the tables are where the dynamic section says, for as long as the object is loaded.
        let found =
            unsafe { lookup(hash as *const u32, symbols as *const Symbol, strings as *const c_char, name) };
        found.map_or(std::ptr::null(), |value| (self.address + value) as *const c_void)
    }
}

/// Looks `name` up in a table of the form `DT_GNU_HASH`: bucket count, first symbol, bloom words, shift, then bloom,
/// buckets and chains.
///
/// # Safety
/// The tables must be those of one loaded object.
unsafe fn lookup(
    hash: *const u32,
    symbols: *const Symbol,
    strings: *const c_char,
    name: &CStr,
) -> Option<usize> {
    let wanted =
        name.to_bytes().iter().fold(5381_u32, |hash, c| hash.wrapping_mul(33).wrapping_add((*c).into()));
    // SAFETY: the header's four words, and tables of the sizes they tell.
    unsafe {
        let (buckets, first, bloom_words) = (*hash, *hash.add(1), *hash.add(2));
        let bucket_table = hash.add(4).add(bloom_words as usize * size_of::<usize>() / size_of::<u32>());
        let chains = bucket_table.add(buckets as usize);
        let mut index = *bucket_table.add((wanted % buckets) as usize);
        if index < first {
            return None;
        }
        loop {
            let chain = *chains.add((index - first) as usize);
            let symbol = &*symbols.add(index as usize);
            if chain | 1 == wanted | 1
                && symbol.section != SHN_UNDEF
                && CStr::from_ptr(strings.add(symbol.name as usize)) == name
            {
                return Some(symbol.value);
            }
            if chain & 1 == 1 {
                return None;
            }
            index += 1;
        }
    }
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

/// `dlvsym` as the C library has it.
///
/// # Safety
/// As for [`dlsym`].
pub(crate) unsafe fn dlvsym(handle: *mut c_void, name: &CStr, version: *const c_char) -> *mut c_void {
    find();
    // SAFETY: `find` has filled it with the address of a function of this type.
    let dlvsym: unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void =
        unsafe { std::mem::transmute(DLVSYM.load(Relaxed)) };
    // SAFETY: the caller's promise.
    unsafe { dlvsym(handle, name.as_ptr(), version) }
}
