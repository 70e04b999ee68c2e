//! Linear device memory: plain, pitched, managed. A block of more than 1 MiB takes whole pages of 2 MiB; smaller ones are
//! packed, and count as what they are.
//!
//! Managed memory counts in full on the GPU that is current when it is allocated: any kernel may draw all of it there,
//! and no later call says so.

use crate::{
    cuda::{
        Allocated, allocate,
        arguments::Out,
        free,
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
/// `address` must be null or the application's, and `call` a driver's function that on success writes the address where it is
/// told.
pub(super) unsafe fn allocate_linear(
    address: *mut DevicePtr,
    bytes: usize,
    call: impl FnOnce(*mut DevicePtr) -> Result,
) -> Result {
    let bytes = taken(bytes as u64);
    // SAFETY: the caller's promise.
    let address = unsafe { Out::new(address) };
    let outcome = || Allocated { key: address.value(), bytes };
    let result = allocate(blocks, bytes, || call(address.room()), outcome, |_| {});
    address.hand_over(result)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAlloc_v2(address: *mut DevicePtr, bytes: usize) -> Result {
    // SAFETY: the arguments are the application's, for the driver to judge.
    unsafe {
        allocate_linear(
            address,
            bytes,
            |address| driver!(cuda::cuMemAlloc_v2(address => *mut DevicePtr, bytes => usize)),
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
            |address| driver!(cuda::cuMemAllocManaged(address => *mut DevicePtr, bytes => usize, flags => u32)),
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
    // SAFETY: null or the application's.
    let (address, pitch) = unsafe { (Out::new(address), Out::new(pitch)) };
    let result = allocate(
        blocks,
        taken(expected.saturating_mul(rows)),
        // SAFETY: the arguments are the application's, for the driver to judge.
        || unsafe {
            driver!(cuda::cuMemAllocPitch_v2(
                address.room() => *mut DevicePtr, pitch.room() => *mut usize, width_bytes => usize, height => usize,
                element_bytes => u32,
            ))
        },
        || Allocated { key: address.value(), bytes: taken((pitch.value() as u64).saturating_mul(rows)) },
        // SAFETY: just allocated, and known to nobody.
        |address| _ = unsafe { driver!(cuda::cuMemFree_v2(address => DevicePtr)) },
    );
    pitch.hand_over(result);
    address.hand_over(result)
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
    // SAFETY: null or the application's.
    let address = unsafe { Out::new(address) };
    // SAFETY: the arguments are the application's, for the driver to judge.
    let call = || unsafe { driver!(cuda::cuMemAlloc(address.room() => *mut u32, bytes => u32)) };
    let outcome = || Allocated { key: address.value().into(), bytes: size };
    let result = allocate(blocks, size, call, outcome, |_| {});
    address.hand_over(result)
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
    // SAFETY: null or the application's.
    let (address, pitch) = unsafe { (Out::new(address), Out::new(pitch)) };
    let result = allocate(
        blocks,
        taken(u64::from(width_bytes).next_multiple_of(PITCH_BYTES).saturating_mul(rows)),
        // SAFETY: the arguments are the application's, for the driver to judge.
        || unsafe {
            driver!(cuda::cuMemAllocPitch(
                address.room() => *mut u32, pitch.room() => *mut u32, width_bytes => u32, height => u32, element_bytes => u32,
            ))
        },
        || Allocated {
            key: address.value().into(),
            bytes: taken(u64::from(pitch.value()).saturating_mul(rows)),
        },
        // SAFETY: just allocated, and known to nobody.
        |address| _ = unsafe { driver!(cuda::cuMemFree_v2(address => DevicePtr)) },
    );
    pitch.hand_over(result);
    address.hand_over(result)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemFree(address: u32) -> Result {
    // SAFETY: the argument is the application's, for the driver to judge.
    free(blocks, u64::from(address), || unsafe { driver!(cuda::cuMemFree(address => u32)) })
}
