//! The process table of `nvidia-smi`: it does not ask NVML's public functions for it, but slots 213 to 215 of an internal
//! table, where each entry carries the process's name. They are answered for the container, on drivers whose table is
//! known; everything else in the table stays the driver's.
//!
//! What is known of it: slot 0 holds the table's size in bytes, and `nvidia-smi` compares it before it uses a slot, so a
//! table only grows. 535.261, 550.163 and 555.58 have 245, 251 and 255 slots, with the same three functions in the same
//! places and the same entries of 4128 bytes; NVIDIA's own stand-in (k8s-test-infra, mocknvml) says the same of 580.65.

use std::{
    ffi::{c_char, c_void},
    fs::File,
    io::Read,
    ptr::null_mut,
    sync::atomic::{
        AtomicPtr, AtomicU32,
        Ordering::{AcqRel, Acquire, Relaxed},
    },
};

use super::{Device, NO_INSTANCE, Return, SUCCESS, list};
use crate::{errno, real::driver};

/// The table's ID, 6c3efec4-8fc9-4e6c-a327-ee696e12f7c4, as it lies in memory.
const TABLE: [u8; 16] =
    [0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4];

/// The first driver branch in which these slots were found to be what is said here, and the last.
const KNOWN_BRANCHES: std::ops::RangeInclusive<u32> = 535..=580;

/// Slots that list processes that compute, and two kinds of those that draw.
const LISTS: [usize; 3] = [213, 214, 215];

/// A table of more slots than this is none.
const SLOTS_MAX: usize = 4096;

/// An entry of a list.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Process {
    pid: u32,
    bytes: u64,
    gpu_instance: u32,
    compute_instance: u32,
    protected_bytes: u64,
    name: [u8; 4096],
}

const _: () = assert!(size_of::<Process>() == 4128 && std::mem::offset_of!(Process, name) == 32);

impl From<(u32, u64)> for Process {
    fn from((pid, bytes): (u32, u64)) -> Self {
        let mut name = [0; 4096];
        // As the driver has it: the command's first word. A process that is gone by now has none.
        let mut line = [0; 4095];
        let length = File::open(format!("/proc/{pid}/cmdline")).and_then(|mut file| file.read(&mut line));
        let line = line.get(..length.unwrap_or(0)).unwrap_or_default();
        let word = line.split(|byte| *byte == 0).next().unwrap_or_default();
        name[..word.len()].copy_from_slice(word);
        Self {
            pid,
            bytes,
            gpu_instance: NO_INSTANCE,
            compute_instance: NO_INSTANCE,
            protected_bytes: 0,
            name,
        }
    }
}

/// The driver's own functions of [`LISTS`].
static DRIVERS: [AtomicPtr<()>; 3] = [const { AtomicPtr::new(null_mut()) }; 3];

/// The table that stands for the driver's; null before it is first asked for. The driver's library is never unloaded, so
/// there is one for good.
static OURS: AtomicPtr<usize> = AtomicPtr::new(null_mut());

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvmlInternalGetExportTable(
    table: *mut *const usize,
    id: *const c_void,
) -> Return {
    // SAFETY: the arguments are the application's, for the driver to judge; on success both are what they should be.
    unsafe {
        let result =
            driver!(nvml::nvmlInternalGetExportTable(table => *mut *const usize, id => *const c_void));
        if result == SUCCESS && !(*table).is_null() && id.cast::<[u8; 16]>().read_unaligned() == TABLE {
            *table = ours(*table);
        }
        result
    }
}

/// The table with our functions in the place of the driver's lists; the driver's own where it is too short for them.
///
/// # Safety
/// `theirs` must be the driver's table with the ID [`TABLE`].
unsafe fn ours(theirs: *const usize) -> *const usize {
    let known = OURS.load(Acquire);
    if !known.is_null() {
        return known;
    }
    let _kept = errno::Keep::new();
    // SAFETY: slot 0 is the size in bytes, with itself.
    let slots = unsafe { theirs.read() } / size_of::<usize>();
    if !(LISTS[2] + 1..=SLOTS_MAX).contains(&slots) {
        return theirs;
    }
    // SAFETY: the driver's table has so many slots.
    let mut copy = unsafe { std::slice::from_raw_parts(theirs, slots) }.to_vec();
    let ours: [*const (); 3] = [computing as *const (), drawing::<1> as *const (), drawing::<2> as *const ()];
    for ((slot, ours), driver) in LISTS.into_iter().zip(ours).zip(&DRIVERS) {
        // An empty slot stays empty.
        if copy[slot] != 0 {
            driver.store(std::ptr::with_exposed_provenance_mut(copy[slot]), Relaxed);
            copy[slot] = ours.expose_provenance();
        }
    }
    // Without a lock, which a forked child could find held. Of two threads one is later, and its copy goes.
    let copy = Box::into_raw(copy.into_boxed_slice());
    match OURS.compare_exchange(null_mut(), copy.cast(), AcqRel, Acquire) {
        Ok(_) => copy.cast(),
        Err(earlier) => {
            // SAFETY: made above, and nobody else has it.
            drop(unsafe { Box::from_raw(copy) });
            earlier
        }
    }
}

/// The driver's branch, such as 550; 0 where it does not tell.
fn branch() -> u32 {
    static BRANCH: AtomicU32 = AtomicU32::new(0);
    let known = BRANCH.load(Relaxed);
    if known != 0 {
        return known;
    }
    let mut text = [0_u8; 80];
    // SAFETY: the buffer has that many bytes.
    let result = unsafe {
        driver!(nvml::nvmlSystemGetDriverVersion(text.as_mut_ptr().cast() => *mut c_char, 80 => u32))
    };
    let digits = text.split(|byte| !byte.is_ascii_digit()).next().filter(|_| result == SUCCESS);
    let branch = digits.and_then(|digits| str::from_utf8(digits).ok()?.parse().ok()).unwrap_or(0);
    BRANCH.store(branch, Relaxed);
    branch
}

/// Answers for the driver's list number `kind`.
///
/// # Safety
/// The arguments must be the application's, and the driver's function known.
unsafe fn answer(kind: usize, device: Device, count: *mut u32, processes: *mut Process) -> Return {
    let function = DRIVERS[kind].load(Relaxed);
    let driver = |count: *mut u32, processes: *mut Process| {
        // SAFETY: it was in a slot of the driver's table that takes these arguments, in all branches; they are the application's.
        unsafe {
            let function: unsafe extern "C" fn(Device, *mut u32, *mut Process) -> Return =
                std::mem::transmute(function);
            function(device, count, processes)
        }
    };
    if !KNOWN_BRANCHES.contains(&branch()) {
        return driver(count, processes);
    }
    // SAFETY: the application's.
    unsafe { list(driver, device, count, processes, kind == 0) }
}

unsafe extern "C" fn computing(device: Device, count: *mut u32, processes: *mut Process) -> Return {
    // SAFETY: whoever has the table calls it as it is meant.
    unsafe { answer(0, device, count, processes) }
}

unsafe extern "C" fn drawing<const KIND: usize>(
    device: Device,
    count: *mut u32,
    processes: *mut Process,
) -> Return {
    // SAFETY: as above.
    unsafe { answer(KIND, device, count, processes) }
}
