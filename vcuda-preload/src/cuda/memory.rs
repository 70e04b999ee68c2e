//! Linear device memory: plain, pitched, managed. A block of more than 1 MiB takes whole pages of 2 MiB; smaller ones are
//! packed, and count as what they are.
//!
//! Managed memory counts in full on the GPU that is current when it is allocated: any kernel may draw all of it there,
//! and no later call says so.

use crate::{
    cuda::{
        Allocated, allocate, free,
        types::{DevicePtr, Result},
    },
    map::Map,
    real::driver,
    share::Share,
};

pub(super) fn blocks(share: &'static Share) -> &'static Map {
    &share.state().blocks
}

/// Blocks of so many bytes and fewer share pages.
pub(super) const SMALL: u64 = 1 << 20;
/// Larger ones have pages of their own.
pub(super) const PAGE: u64 = 2 << 20;

/// Bytes that a block of so many takes of its GPU.
pub(super) fn taken(bytes: u64) -> u64 {
    if bytes > SMALL { bytes.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX) } else { bytes }
}

/// # Safety
/// `call` must be a driver's function that on success writes the address through `address`.
pub(super) unsafe fn allocate_linear(
    address: *mut DevicePtr,
    bytes: usize,
    call: impl FnOnce() -> Result,
) -> Result {
    let bytes = taken(bytes as u64);
    // SAFETY: read only after success, when the driver has written it.
    let outcome = || Allocated { key: unsafe { *address }, bytes };
    allocate(blocks, bytes, call, outcome, |_| {})
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAlloc_v2(address: *mut DevicePtr, bytes: usize) -> Result {
    // SAFETY: the arguments are the application's, for the driver to judge.
    unsafe {
        allocate_linear(
            address,
            bytes,
            || driver!(cuda::cuMemAlloc_v2(address => *mut DevicePtr, bytes => usize)),
        )
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocManaged(
    address: *mut DevicePtr,
    bytes: usize,
    flags: u32,
) -> Result {
    // SAFETY: as above.
    unsafe {
        allocate_linear(
            address,
            bytes,
            || driver!(cuda::cuMemAllocManaged(address => *mut DevicePtr, bytes => usize, flags => u32)),
        )
    }
}

/// How GPUs round the length of a row, as far as has been seen; what the driver did is looked at afterwards.
const PITCH_BYTES: u64 = 512;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocPitch_v2(
    address: *mut DevicePtr,
    pitch: *mut usize,
    width_bytes: usize,
    height: usize,
    element_bytes: u32,
) -> Result {
    let rows = height as u64;
    let expected = (width_bytes as u64).saturating_add(PITCH_BYTES - 1) / PITCH_BYTES * PITCH_BYTES;
    allocate(
        blocks,
        taken(expected.saturating_mul(rows)),
        // SAFETY: the arguments are the application's, for the driver to judge.
        || unsafe {
            driver!(cuda::cuMemAllocPitch_v2(
                address => *mut DevicePtr, pitch => *mut usize, width_bytes => usize, height => usize,
                element_bytes => u32,
            ))
        },
        // SAFETY: both are written on success.
        || unsafe { Allocated { key: *address, bytes: taken((*pitch as u64).saturating_mul(rows)) } },
        // SAFETY: just allocated, and known to nobody.
        |address| _ = unsafe { driver!(cuda::cuMemFree_v2(address => DevicePtr)) },
    )
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemFree_v2(address: DevicePtr) -> Result {
    // SAFETY: the argument is the application's, for the driver to judge.
    free(blocks, address, || unsafe { driver!(cuda::cuMemFree_v2(address => DevicePtr)) })
}

// ---- the same with addresses and sizes of 32 bits, of CUDA 2.0 -----------------------------------------------------

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAlloc(address: *mut u32, bytes: u32) -> Result {
    let size = taken(u64::from(bytes));
    // SAFETY: the arguments are the application's, for the driver to judge.
    let call = || unsafe { driver!(cuda::cuMemAlloc(address => *mut u32, bytes => u32)) };
    // SAFETY: written on success.
    allocate(blocks, size, call, || Allocated { key: u64::from(unsafe { *address }), bytes: size }, |_| {})
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocPitch(
    address: *mut u32,
    pitch: *mut u32,
    width_bytes: u32,
    height: u32,
    element_bytes: u32,
) -> Result {
    let rows = u64::from(height);
    allocate(
        blocks,
        taken(u64::from(width_bytes).next_multiple_of(PITCH_BYTES).saturating_mul(rows)),
        // SAFETY: the arguments are the application's, for the driver to judge.
        || unsafe {
            driver!(cuda::cuMemAllocPitch(
                address => *mut u32, pitch => *mut u32, width_bytes => u32, height => u32, element_bytes => u32,
            ))
        },
        // SAFETY: both are written on success.
        || unsafe {
            Allocated { key: u64::from(*address), bytes: taken(u64::from(*pitch).saturating_mul(rows)) }
        },
        // SAFETY: just allocated, and known to nobody.
        |address| _ = unsafe { driver!(cuda::cuMemFree_v2(address => DevicePtr)) },
    )
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemFree(address: u32) -> Result {
    // SAFETY: the argument is the application's, for the driver to judge.
    free(blocks, u64::from(address), || unsafe { driver!(cuda::cuMemFree(address => u32)) })
}
