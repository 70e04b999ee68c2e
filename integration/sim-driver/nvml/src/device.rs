//! GPUs: handles, identity, memory, processes.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::Ordering::SeqCst;

use crate::{
    GPU_IS_LOST, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, Outcome, VERSION_MISMATCH, put, put_text,
    status,
    system::{Library, with},
};

/// A device's handle: one more than the module's number of its GPU.
pub(crate) type Device = usize;

/// The GPU of a handle.
pub(crate) fn gpu(library: &Library, device: Device) -> Outcome<usize> {
    let gpu = device.wrapping_sub(1);
    if !library.gpus.contains(&gpu) {
        return Err(INVALID_ARGUMENT);
    }
    if library.connection.state.gpus[gpu].lost.load(SeqCst) != 0 {
        return Err(GPU_IS_LOST);
    }
    Ok(gpu)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCount_v2(count: *mut u32) -> u32 {
    status(with(|library| put(count, u32::try_from(library.gpus.len()).unwrap_or(0))))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCount(count: *mut u32) -> u32 {
    nvmlDeviceGetCount_v2(count)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: *mut Device) -> u32 {
    status(with(|library| put(device, library.gpus.get(index as usize).ok_or(INVALID_ARGUMENT)? + 1)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByIndex(index: u32, device: *mut Device) -> u32 {
    nvmlDeviceGetHandleByIndex_v2(index, device)
}

/// # Safety
/// `text` is null or a C string.
unsafe fn found(text: *const c_char, device: *mut Device, is: impl Fn(&sim_gpud::Gpu, &str) -> bool) -> u32 {
    if text.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    status(with(|library| {
        let gpu = library.gpus.iter().find(|gpu| is(&library.connection.state.gpus[**gpu], &text));
        put(device, gpu.ok_or(NOT_FOUND)? + 1)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut Device) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { found(uuid, device, |gpu, text| uuid_text(&gpu.uuid) == text) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(id: *const c_char, device: *mut Device) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { found(id, device, |gpu, text| bus_id(gpu.pci_bus).ends_with(&text.to_ascii_uppercase())) }
}

/// A UUID as NVML prints it.
fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

fn bus_id(bus: u32) -> String {
    format!("00000000:{bus:02X}:00.0")
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetName(device: Device, to: *mut u8, length: u32) -> u32 {
    status(with(|library| put_text(to, length, &library.connection.state.gpus[gpu(library, device)?].name)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUUID(device: Device, to: *mut u8, length: u32) -> u32 {
    status(with(|library| {
        let uuid = library.connection.state.gpus[gpu(library, device)?].uuid;
        put_text(to, length, uuid_text(&uuid).as_bytes())
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetIndex(device: Device, index: *mut u32) -> u32 {
    status(with(|library| {
        let gpu = gpu(library, device)?;
        let at = library.gpus.iter().position(|other| *other == gpu).ok_or(INVALID_ARGUMENT)?;
        put(index, u32::try_from(at).unwrap_or(0))
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMinorNumber(device: Device, minor: *mut u32) -> u32 {
    status(with(|library| put(minor, library.connection.state.gpus[gpu(library, device)?].minor)))
}

/// `nvmlPciInfo_t`.
#[repr(C)]
pub struct PciInfo {
    legacy: [u8; 16],
    domain: u32,
    bus: u32,
    device: u32,
    id: u32,
    subsystem: u32,
    text: [u8; 32],
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPciInfo_v3(device: Device, to: *mut PciInfo) -> u32 {
    status(with(|library| {
        let bus = library.connection.state.gpus[gpu(library, device)?].pci_bus;
        // An A100-SXM4's.
        let mut info = PciInfo {
            legacy: [0; 16],
            domain: 0,
            bus,
            device: 0,
            id: 0x20b0_10de,
            subsystem: 0x134f_10de,
            text: [0; 32],
        };
        let text = bus_id(bus);
        info.text[..text.len()].copy_from_slice(text.as_bytes());
        let legacy = &text[4..];
        info.legacy[..legacy.len()].copy_from_slice(legacy.as_bytes());
        put(to, info)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPciInfo_v2(device: Device, to: *mut PciInfo) -> u32 {
    nvmlDeviceGetPciInfo_v3(device, to)
}

/// `nvmlMemory_t`.
#[repr(C)]
pub struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
pub struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryInfo(device: Device, to: *mut Memory) -> u32 {
    status(with(|library| {
        let gpu = gpu(library, device)?;
        let (total, used) = (library.connection.state.gpus[gpu].total, library.connection.state.used(gpu));
        put(to, Memory { total, free: total.saturating_sub(used), used: used.min(total) })
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Device, to: *mut MemoryV2) -> u32 {
    // NVML_STRUCT_VERSION(Memory, 2).
    const VERSION: u32 = 40 | 2 << 24;
    // SAFETY: the caller passes a valid structure or null.
    let Some(to) = (unsafe { to.as_mut() }) else { return INVALID_ARGUMENT };
    if to.version != VERSION {
        return VERSION_MISMATCH;
    }
    status(with(|library| {
        let gpu = gpu(library, device)?;
        let (total, used) = (library.connection.state.gpus[gpu].total, library.connection.state.used(gpu));
        (to.total, to.reserved, to.free, to.used) = (total, 0, total.saturating_sub(used), used.min(total));
        Ok(())
    }))
}

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
pub struct ProcessV1 {
    pid: u32,
    bytes: u64,
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
pub struct Process {
    pid: u32,
    bytes: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// # Safety
/// `count` is null or valid, and `to` has as many places as it says.
unsafe fn processes<T>(device: Device, count: *mut u32, to: *mut T, make: impl Fn(u32, u64) -> T) -> u32 {
    status(with(|library| {
        let gpu = gpu(library, device)?;
        let clients = &library.connection.state.clients;
        let running: Vec<(u32, u64)> = clients
            .iter()
            .filter_map(|client| {
                let bytes = client.used[gpu].load(SeqCst);
                let pid = u32::try_from(client.pid.load(SeqCst)).ok()?;
                (pid != 0 && bytes > 0).then_some((pid, bytes))
            })
            .collect();
        if count.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: null was refused; the caller's promise.
        unsafe {
            let room = *count as usize;
            *count = u32::try_from(running.len()).unwrap_or(u32::MAX);
            if room < running.len() || to.is_null() && !running.is_empty() {
                return Err(INSUFFICIENT_SIZE);
            }
            for (at, (pid, bytes)) in running.into_iter().enumerate() {
                to.add(at).write(make(pid, bytes));
            }
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses(
    device: Device,
    count: *mut u32,
    to: *mut ProcessV1,
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { processes(device, count, to, |pid, bytes| ProcessV1 { pid, bytes }) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v2(
    device: Device,
    count: *mut u32,
    to: *mut Process,
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { nvmlDeviceGetComputeRunningProcesses_v3(device, count, to) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: Device,
    count: *mut u32,
    to: *mut Process,
) -> u32 {
    let whole = |pid, bytes| Process { pid, bytes, gpu_instance: u32::MAX, compute_instance: u32::MAX };
    // SAFETY: the caller's promise.
    unsafe { processes(device, count, to, whole) }
}

fn none(device: Device, count: *mut u32) -> u32 {
    status(with(|library| gpu(library, device).and_then(|_| put(count, 0))))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetGraphicsRunningProcesses(
    device: Device,
    count: *mut u32,
    _to: *mut c_void,
) -> u32 {
    none(device, count)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v2(
    device: Device,
    count: *mut u32,
    _to: *mut c_void,
) -> u32 {
    none(device, count)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(
    device: Device,
    count: *mut u32,
    _to: *mut c_void,
) -> u32 {
    none(device, count)
}

/// `nvmlUtilization_t`.
#[repr(C)]
pub struct Utilization {
    gpu: u32,
    memory: u32,
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUtilizationRates(device: Device, to: *mut Utilization) -> u32 {
    // Work takes no time here.
    status(with(|library| gpu(library, device).and_then(|_| put(to, Utilization { gpu: 0, memory: 0 }))))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetComputeMode(device: Device, mode: *mut u32) -> u32 {
    status(with(|library| gpu(library, device).and_then(|_| put(mode, 0))))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMigMode(device: Device, current: *mut u32, pending: *mut u32) -> u32 {
    status(with(|library| {
        gpu(library, device)?;
        put(current, 0)?;
        put(pending, 0)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryAffinity(
    device: Device,
    words: u32,
    to: *mut u64,
    _scope: u32,
) -> u32 {
    status(with(|library| {
        let node = library.connection.state.gpus[gpu(library, device)?].numa;
        if to.is_null() || words == 0 {
            return Err(INVALID_ARGUMENT);
        }
        for at in 0..words as usize {
            let here = u64::try_from(node)
                .ok()
                .filter(|node| node / 64 == at as u64)
                .map_or(0, |node| 1 << (node % 64));
            // SAFETY: the caller says that there are so many words.
            unsafe { to.add(at).write(here) };
        }
        Ok(())
    }))
}
