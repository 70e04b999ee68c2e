//! Our functions that stand for NVML's: the share's memory, and the container's own processes.

mod smi;

use std::ffi::{c_char, c_int, c_void};

pub(crate) use smi::nvmlInternalGetExportTable;

use crate::{
    errno,
    real::driver,
    share::{Share, share},
};

/// `nvmlReturn_t`.
type Return = c_int;
/// `nvmlDevice_t`: a pointer that is never followed here, so a number.
type Device = u64;

const SUCCESS: Return = 0;
const ERROR_NOT_FOUND: Return = 6;
const ERROR_INSUFFICIENT_SIZE: Return = 7;
/// "An operating system call failed": the share is not in place.
const ERROR_OPERATING_SYSTEM: Return = 17;

/// The share, and which of its GPUs a handle is; none for handles that are no GPU of the share. Parts of a card (MIG)
/// have UUIDs of their own, and are none.
fn find(device: Device) -> Option<(&'static Share, usize)> {
    let share = share()?;
    let known = &share.state().nvml_handles;
    // Remembered plus one; 0 is for handles of other devices.
    if let Some(gpu) = known.get(device) {
        return usize::try_from(gpu).ok()?.checked_sub(1).map(|gpu| (share, gpu));
    }
    let mut text = [0_u8; 96];
    // SAFETY: the buffer has that many bytes.
    let result = unsafe {
        driver!(nvml::nvmlDeviceGetUUID(device => Device, text.as_mut_ptr().cast() => *mut c_char, 96 => u32))
    };
    if result != SUCCESS {
        return None;
    }
    let gpu = parse_uuid(&text).and_then(|uuid| share.limits().find(&uuid));
    let _ = known.insert(device, gpu.map_or(0, |gpu| gpu as u64 + 1));
    gpu.map(|gpu| (share, gpu))
}

/// The bytes of `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
fn parse_uuid(text: &[u8]) -> Option<[u8; 16]> {
    let mut digits = text.strip_prefix(b"GPU-")?.iter().filter(|c| **c != b'-');
    let mut uuid = [0; 16];
    for byte in &mut uuid {
        let mut digit =
            || char::from(*digits.next()?).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        *byte = digit()? << 4 | digit()?;
    }
    Some(uuid)
}

// ---- memory ---------------------------------------------------------------------------------------------------------

/// `nvmlMemory_t`.
#[repr(C)]
pub(crate) struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
pub(crate) struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// Has the driver judge the arguments, then puts the share's figures in the place of the card's. Where the share cannot
/// be read, the card's are not shown either.
fn view(device: Device, call: impl FnOnce() -> Return, put: impl FnOnce(u64, u64)) -> Return {
    let result = call();
    if result != SUCCESS {
        return result;
    }
    match find(device) {
        Some((share, gpu)) => {
            let (total, used) = share.memory(gpu);
            put(total, used);
            SUCCESS
        }
        None if share().is_none() => ERROR_OPERATING_SYSTEM,
        None => SUCCESS,
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvmlDeviceGetMemoryInfo(device: Device, memory: *mut Memory) -> Return {
    // SAFETY: the arguments are the application's, for the driver to judge; it has written on success.
    unsafe {
        view(
            device,
            || driver!(nvml::nvmlDeviceGetMemoryInfo(device => Device, memory => *mut Memory)),
            |total, used| *memory = Memory { total, free: total - used, used },
        )
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Device, memory: *mut MemoryV2) -> Return {
    // SAFETY: the same.
    unsafe {
        view(
            device,
            || driver!(nvml::nvmlDeviceGetMemoryInfo_v2(device => Device, memory => *mut MemoryV2)),
            |total, used| {
                *memory =
                    MemoryV2 { version: (*memory).version, total, reserved: 0, free: total - used, used };
            },
        )
    }
}

// ---- processes ------------------------------------------------------------------------------------------------------

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
pub(crate) struct ProcessInfoV1 {
    pid: u32,
    bytes: u64,
}

/// `nvmlProcessInfo_v2_t`, and its third version.
#[repr(C)]
pub(crate) struct ProcessInfo {
    pid: u32,
    bytes: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// Not on a part of a card.
const NO_INSTANCE: u32 = u32::MAX;

impl From<(u32, u64)> for ProcessInfoV1 {
    fn from((pid, bytes): (u32, u64)) -> Self {
        Self { pid, bytes }
    }
}

impl From<(u32, u64)> for ProcessInfo {
    fn from((pid, bytes): (u32, u64)) -> Self {
        Self { pid, bytes, gpu_instance: NO_INSTANCE, compute_instance: NO_INSTANCE }
    }
}

/// Answers with the container's own processes where `mine` says that they are of the kind asked for, else with none.
///
/// # Safety
/// `count` and `list` must be the application's arguments.
unsafe fn list<T: From<(u32, u64)>>(
    driver: impl Fn(*mut u32, *mut T) -> Return,
    device: Device,
    count: *mut u32,
    list: *mut T,
    mine: bool,
) -> Return {
    // SAFETY: null or the application's.
    let Some(room) = (unsafe { count.as_mut() }) else {
        return driver(count, list);
    };
    // The driver judges the handle; with room for none it writes nothing but a number.
    let mut ignored = 0;
    let result = driver(&raw mut ignored, std::ptr::null_mut());
    if !matches!(result, SUCCESS | ERROR_INSUFFICIENT_SIZE) {
        return result;
    }
    let Some((share, gpu)) = find(device) else {
        if share().is_none() {
            return ERROR_OPERATING_SYSTEM;
        }
        return driver(count, list);
    };
    let (capacity, mut found) = (*room, 0_u32);
    if mine {
        let _kept = errno::Keep::new();
        share.for_each_process(gpu, |pid, bytes| {
            if found < capacity && !list.is_null() {
                // SAFETY: the application's list has room for `capacity`.
                unsafe { list.add(found as usize).write((pid, bytes).into()) };
            }
            found += 1;
        });
    }
    *room = found;
    if found > capacity || (found > 0 && list.is_null()) { ERROR_INSUFFICIENT_SIZE } else { SUCCESS }
}

macro_rules! lists {
    ($symbol:ident, $info:ty, $mine:literal) => {
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(device: Device, count: *mut u32, infos: *mut $info) -> Return {
            // SAFETY: the arguments are the application's, for the driver to judge.
            unsafe {
                let driver = |count, infos| {
                    driver!(nvml::$symbol(device => Device, count => *mut u32, infos => *mut $info))
                };
                list(driver, device, count, infos, $mine)
            }
        }
    };
}
lists!(nvmlDeviceGetComputeRunningProcesses, ProcessInfoV1, true);
lists!(nvmlDeviceGetComputeRunningProcesses_v2, ProcessInfo, true);
lists!(nvmlDeviceGetComputeRunningProcesses_v3, ProcessInfo, true);
lists!(nvmlDeviceGetGraphicsRunningProcesses, ProcessInfoV1, false);
lists!(nvmlDeviceGetGraphicsRunningProcesses_v2, ProcessInfo, false);
lists!(nvmlDeviceGetGraphicsRunningProcesses_v3, ProcessInfo, false);
lists!(nvmlDeviceGetMPSComputeRunningProcesses, ProcessInfoV1, false);
lists!(nvmlDeviceGetMPSComputeRunningProcesses_v2, ProcessInfo, false);
lists!(nvmlDeviceGetMPSComputeRunningProcesses_v3, ProcessInfo, false);

// ---- what the driver says of processes, with those of others left out ---------------------------------------------

/// The process IDs of the container that hold memory of the device, as its processes see them; none if the device is none
/// of the share's.
fn own_pids(device: Device) -> Option<Vec<u32>> {
    let (share, gpu) = find(device)?;
    let mut pids = Vec::new();
    share.for_each_process(gpu, |pid, _| pids.push(pid));
    Some(pids)
}

/// Moves the entries that are the container's own to the front of `list`, and puts their number into `count`.
///
/// # Safety
/// `list` must be null, or hold `count` entries.
unsafe fn leave_others_out<T: Copy>(device: Device, list: *mut T, count: &mut u32, pid: impl Fn(&T) -> u32) {
    let Some(own) = own_pids(device).filter(|_| !list.is_null()) else { return };
    // SAFETY: the caller's promise.
    let entries = unsafe { std::slice::from_raw_parts_mut(list, *count as usize) };
    let mut kept = 0;
    for at in 0..entries.len() {
        if own.contains(&pid(&entries[at])) {
            entries[kept] = entries[at];
            kept += 1;
        }
    }
    *count = u32::try_from(kept).unwrap_or(0);
}

/// `nvmlProcessUtilizationSample_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UtilizationSample {
    pid: u32,
    time: u64,
    utilization: [u32; 4],
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvmlDeviceGetProcessUtilization(
    device: Device,
    samples: *mut UtilizationSample,
    count: *mut u32,
    since: u64,
) -> Return {
    // SAFETY: the arguments are the application's, for the driver to judge; on success both are filled.
    unsafe {
        let result = driver!(nvml::nvmlDeviceGetProcessUtilization(
            device => Device, samples => *mut UtilizationSample, count => *mut u32, since => u64,
        ));
        if result == SUCCESS {
            leave_others_out(device, samples, &mut *count, |sample| sample.pid);
        }
        result
    }
}

/// `nvmlProcessUtilizationInfo_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
struct UtilizationInfo {
    time: u64,
    pid: u32,
    utilization: [u32; 6],
}

/// `nvmlProcessesUtilizationInfo_v1_t`.
#[repr(C)]
pub(crate) struct UtilizationInfos {
    version: u32,
    count: u32,
    since: u64,
    list: *mut UtilizationInfo,
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvmlDeviceGetProcessesUtilizationInfo(
    device: Device,
    infos: *mut UtilizationInfos,
) -> Return {
    // SAFETY: as above.
    unsafe {
        let result = driver!(nvml::nvmlDeviceGetProcessesUtilizationInfo(device => Device, infos => *mut UtilizationInfos));
        if result == SUCCESS {
            leave_others_out(device, (*infos).list, &mut (*infos).count, |info| info.pid);
        }
        result
    }
}

/// `nvmlProcessDetail_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
struct ProcessDetail {
    pid: u32,
    bytes: u64,
    instances: [u32; 2],
    protected_bytes: u64,
}

/// `nvmlProcessDetailList_v1_t`.
#[repr(C)]
pub(crate) struct ProcessDetails {
    version: u32,
    mode: u32,
    count: u32,
    list: *mut ProcessDetail,
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvmlDeviceGetRunningProcessDetailList(
    device: Device,
    details: *mut ProcessDetails,
) -> Return {
    // SAFETY: as above.
    unsafe {
        let result = driver!(nvml::nvmlDeviceGetRunningProcessDetailList(device => Device, details => *mut ProcessDetails));
        if result == SUCCESS {
            leave_others_out(device, (*details).list, &mut (*details).count, |detail| detail.pid);
        }
        result
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvmlDeviceGetAccountingPids(
    device: Device,
    count: *mut u32,
    pids: *mut u32,
) -> Return {
    // SAFETY: as above.
    unsafe {
        let result =
            driver!(nvml::nvmlDeviceGetAccountingPids(device => Device, count => *mut u32, pids => *mut u32));
        if result == SUCCESS {
            leave_others_out(device, pids, &mut *count, |pid| *pid);
        }
        result
    }
}

macro_rules! of_one_process {
    ($symbol:ident, $stats:ty) => {
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(device: Device, pid: u32, stats: *mut $stats) -> Return {
            if own_pids(device).is_some_and(|own| !own.contains(&pid)) {
                return ERROR_NOT_FOUND;
            }
            // SAFETY: the arguments are the application's, for the driver to judge.
            unsafe { driver!(nvml::$symbol(device => Device, pid => u32, stats => *mut $stats)) }
        }
    };
}
of_one_process!(nvmlDeviceGetAccountingStats, c_void);
of_one_process!(nvmlDeviceGetAccountingStats_v2, c_void);

/// `nvmlUtilization_t`.
#[repr(C)]
pub(crate) struct Utilization {
    gpu: u32,
    memory: u32,
}

/// The container's own share of the GPU's time, once the node measures it; the card's till then.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvmlDeviceGetUtilizationRates(
    device: Device,
    rates: *mut Utilization,
) -> Return {
    // SAFETY: the arguments are the application's, for the driver to judge; on success it is filled.
    unsafe {
        let result =
            driver!(nvml::nvmlDeviceGetUtilizationRates(device => Device, rates => *mut Utilization));
        if result == SUCCESS
            && let Some((share, gpu)) = find(device)
            && let Some(busy) = share.limits().busy_percent(gpu)
        {
            // Of the time that the card's memory was busy, the part of this container is not known; it is not more.
            *rates = Utilization { gpu: busy, memory: (*rates).memory.min(busy) };
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_read_as_nvml_prints_them() {
        let uuid = parse_uuid(b"GPU-4d4f434b-0000-1111-2222-00000000000a\0\0").unwrap();
        assert_eq!((uuid[0], uuid[7], uuid[15]), (0x4d, 0x11, 0x0a));
        assert!(parse_uuid(b"MIG-4d4f434b-0000-1111-2222-00000000000a\0").is_none());
        assert!(parse_uuid(b"GPU-4d4f434b\0").is_none());
    }
}
