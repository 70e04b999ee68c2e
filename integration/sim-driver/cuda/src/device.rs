//! Devices: which there are and what they are like.

use std::ffi::{CStr, c_char};

use crate::{
    INVALID_VALUE, Outcome,
    driver::{self, with},
    put, status,
};

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: u32) -> i32 {
    status(if flags == 0 { driver::init() } else { Err(INVALID_VALUE) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(version: *mut i32) -> i32 {
    // Works before cuInit. Without the module, this library's own version.
    let known = driver::lock().as_ref().map(|driver| driver.connection.state.cuda_version);
    status(put(version, known.unwrap_or(12040)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: *mut i32) -> i32 {
    status(with(|driver| put(count, i32::try_from(driver.devices.len()).unwrap_or(0))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: *mut i32, ordinal: i32) -> i32 {
    status(with(|driver| driver.gpu(ordinal).and_then(|_| put(device, ordinal))))
}

fn text(to: *mut c_char, length: i32, text: &[u8]) -> Outcome {
    let room = usize::try_from(length).ok().filter(|room| *room > 0 && !to.is_null()).ok_or(INVALID_VALUE)?;
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len()).min(room - 1);
    // SAFETY: the caller says that `to` has `length` bytes, and `end` is less.
    unsafe {
        to.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), end);
        to.add(end).write(0);
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetName(name: *mut c_char, length: i32, device: i32) -> i32 {
    status(with(|driver| text(name, length, &driver.facts(driver.gpu(device)?).name)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: i32) -> i32 {
    status(with(|driver| put(uuid, driver.facts(driver.gpu(device)?).uuid)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32) -> i32 {
    cuDeviceGetUuid(uuid, device)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetPCIBusId(to: *mut c_char, length: i32, device: i32) -> i32 {
    status(with(|driver| {
        let bus = driver.facts(driver.gpu(device)?).pci_bus;
        text(to, length, format!("0000:{bus:02X}:00.0").as_bytes())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetByPCIBusId(device: *mut i32, id: *const c_char) -> i32 {
    if id.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller passes a C string.
    let id = unsafe { CStr::from_ptr(id) }.to_string_lossy().to_ascii_uppercase();
    status(with(|driver| {
        let found = driver
            .devices
            .iter()
            .position(|gpu| id.ends_with(&format!(":{:02X}:00.0", driver.facts(*gpu).pci_bus)));
        put(device, found.and_then(|at| i32::try_from(at).ok()).ok_or(crate::INVALID_DEVICE)?)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: i32) -> i32 {
    status(with(|driver| {
        let total = driver.facts(driver.gpu(device)?).total;
        put(bytes, usize::try_from(total).unwrap_or(usize::MAX))
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceTotalMem(bytes: *mut u32, device: i32) -> i32 {
    status(with(|driver| {
        let total = driver.facts(driver.gpu(device)?).total;
        put(bytes, u32::try_from(total).unwrap_or(u32::MAX))
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceComputeCapability(major: *mut i32, minor: *mut i32, device: i32) -> i32 {
    status(with(|driver| driver.gpu(device).and_then(|_| put(major, 8)).and_then(|()| put(minor, 0))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) -> i32 {
    status(with(|driver| {
        let facts = driver.facts(driver.gpu(device)?);
        // An A100's, by CUdevice_attribute of cuda.h.
        let known = match attribute {
            1 => 1024,
            2..=4 => [1024, 1024, 64][usize::try_from(attribute - 2).unwrap_or(0)],
            5 => i32::MAX,
            6 | 7 => 65535,
            8 => 49152,
            9 => 65536,
            10 => 32,
            11 => i32::MAX,
            12 => 65536,
            13 => 1_410_000,
            14 => 512,
            15 | 31 | 41 | 47 | 78 | 79 | 83 | 88..=91 | 95 | 102..=105 | 115 | 119 => 1,
            16 => 108,
            33 => i32::try_from(facts.pci_bus).unwrap_or(0),
            36 => 1_215_000,
            37 => 5120,
            38 => 41_943_040,
            39 => 2048,
            75 => 8,
            76 => 0,
            81 => 167_936,
            82 => 65536,
            97 => 166_912,
            106 => 32,
            _ => 0,
        };
        if !(1..=160).contains(&attribute) {
            return Err(INVALID_VALUE);
        }
        put(value, known)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetLuid(_luid: *mut c_char, _mask: *mut u32, _device: i32) -> i32 {
    // Windows only.
    crate::NOT_SUPPORTED
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceCanAccessPeer(can: *mut i32, one: i32, other: i32) -> i32 {
    status(with(|driver| {
        driver.gpu(one)?;
        driver.gpu(other)?;
        put(can, i32::from(one != other))
    }))
}
