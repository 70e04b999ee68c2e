//! How much memory there is: the share's, whatever the card has.

use crate::{
    cuda::{
        settle,
        types::{CUDA_ERROR_SYSTEM_NOT_READY, CUDA_SUCCESS, Device, Result},
    },
    real::driver,
    share::share,
};

/// Total and used bytes of the GPU that is current, or what to return instead. A device that is not of this share has
/// nothing.
fn here() -> core::result::Result<(u64, u64), Result> {
    let share = share().ok_or(CUDA_ERROR_SYSTEM_NOT_READY)?;
    settle(share);
    Ok(share.here().and_then(|place| place.gpu).map_or((0, 0), |gpu| share.memory(gpu)))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Result {
    // The driver judges the arguments, null among them.
    // SAFETY: the arguments are the application's.
    let result = unsafe { driver!(cuda::cuMemGetInfo_v2(free => *mut usize, total => *mut usize)) };
    if result != CUDA_SUCCESS {
        return result;
    }
    match here() {
        // SAFETY: null, or the driver has just written there.
        Ok((all, used)) => unsafe {
            write(free, usize::try_from(all - used).unwrap_or(usize::MAX));
            write(total, usize::try_from(all).unwrap_or(usize::MAX));
            CUDA_SUCCESS
        },
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetInfo(free: *mut u32, total: *mut u32) -> Result {
    // SAFETY: the arguments are the application's.
    let result = unsafe { driver!(cuda::cuMemGetInfo(free => *mut u32, total => *mut u32)) };
    if result != CUDA_SUCCESS {
        return result;
    }
    match here() {
        // SAFETY: null, or the driver has just written there.
        Ok((all, used)) => unsafe {
            write(free, u32::try_from(all - used).unwrap_or(u32::MAX));
            write(total, u32::try_from(all).unwrap_or(u32::MAX));
            CUDA_SUCCESS
        },
        Err(error) => error,
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: Device) -> Result {
    // SAFETY: the arguments are the application's.
    let result = unsafe { driver!(cuda::cuDeviceTotalMem_v2(bytes => *mut usize, device => Device)) };
    if result != CUDA_SUCCESS {
        return result;
    }
    let Some(share) = share() else { return CUDA_ERROR_SYSTEM_NOT_READY };
    let total = share.gpu_of_device(device).map_or(0, |gpu| share.memory(gpu).0);
    // SAFETY: null, or the driver has just written there.
    unsafe { write(bytes, usize::try_from(total).unwrap_or(usize::MAX)) };
    CUDA_SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceTotalMem(bytes: *mut u32, device: Device) -> Result {
    // SAFETY: the arguments are the application's.
    let result = unsafe { driver!(cuda::cuDeviceTotalMem(bytes => *mut u32, device => Device)) };
    if result != CUDA_SUCCESS {
        return result;
    }
    let Some(share) = share() else { return CUDA_ERROR_SYSTEM_NOT_READY };
    let total = share.gpu_of_device(device).map_or(0, |gpu| share.memory(gpu).0);
    // SAFETY: null, or the driver has just written there.
    unsafe { write(bytes, u32::try_from(total).unwrap_or(u32::MAX)) };
    CUDA_SUCCESS
}

/// # Safety
/// `to` must be null or valid.
unsafe fn write<T>(to: *mut T, value: T) {
    // SAFETY: the caller's promise.
    if let Some(to) = unsafe { to.as_mut() } {
        *to = value;
    }
}
