//! Memory that takes room on a GPU: plain blocks, pitched, managed, stream-ordered, physical (VMM) and arrays. Blocks
//! have addresses and sizes, but nothing behind them: copies and fills succeed without moving a byte.

use std::ffi::c_void;

use crate::{
    INVALID_VALUE, NOT_SUPPORTED, Outcome,
    context::current,
    driver::{Block, GRANULE, with},
    put, status,
};

fn allocate(address: *mut u64, bytes: u64) -> Outcome {
    if address.is_null() || bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let gpu = current()?;
    with(|driver| {
        let taken = bytes.checked_next_multiple_of(GRANULE).ok_or(crate::OUT_OF_MEMORY)?;
        driver.take(gpu, taken)?;
        let at = driver.number(bytes);
        driver.blocks.insert(at, Block { bytes, taken, gpu: Some(gpu) });
        put(address, at)
    })
}

fn release(address: u64) -> Outcome {
    if address == 0 {
        return Ok(());
    }
    with(|driver| {
        let block = driver.blocks.remove(&address).ok_or(INVALID_VALUE)?;
        if let Some(gpu) = block.gpu {
            driver.give(gpu, block.taken);
        }
        Ok(())
    })
}

fn block_at(address: u64) -> Outcome<(u64, Block)> {
    with(|driver| {
        let (at, block) = driver.blocks.range(..=address).next_back().ok_or(INVALID_VALUE)?;
        if address - at < block.bytes { Ok((*at, *block)) } else { Err(INVALID_VALUE) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> i32 {
    status(allocate(address, bytes as u64))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc(address: *mut u32, bytes: u32) -> i32 {
    let _ = (address, bytes);
    // 32-bit device addresses: no GPU of today has them.
    NOT_SUPPORTED
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> i32 {
    status(release(address))
}

/// Rows begin at multiples of this.
const PITCH: u64 = 512;

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocPitch_v2(
    address: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: u32,
) -> i32 {
    if pitch.is_null() || !matches!(element, 4 | 8 | 16) {
        return INVALID_VALUE;
    }
    let row = (width as u64).checked_next_multiple_of(PITCH);
    let Some((row, bytes)) = row.and_then(|row| Some((row, row.checked_mul(height as u64)?))) else {
        return INVALID_VALUE;
    };
    status(allocate(address, bytes).and_then(|()| put(pitch, usize::try_from(row).unwrap_or(0))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocManaged(address: *mut u64, bytes: usize, flags: u32) -> i32 {
    if !matches!(flags, 1 | 2 | 4) {
        return INVALID_VALUE;
    }
    status(allocate(address, bytes as u64))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocAsync(address: *mut u64, bytes: usize, _stream: u64) -> i32 {
    status(allocate(address, bytes as u64))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocAsync_ptsz(address: *mut u64, bytes: usize, stream: u64) -> i32 {
    cuMemAllocAsync(address, bytes, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeAsync(address: u64, _stream: u64) -> i32 {
    status(release(address))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeAsync_ptsz(address: u64, stream: u64) -> i32 {
    cuMemFreeAsync(address, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> i32 {
    status(current().and_then(|gpu| {
        with(|driver| {
            if !free.is_null() {
                put(free, usize::try_from(driver.free(gpu)).unwrap_or(0))?;
            }
            if !total.is_null() {
                put(total, usize::try_from(driver.facts(gpu).total).unwrap_or(0))?;
            }
            Ok(())
        })
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, address: u64) -> i32 {
    status(block_at(address).and_then(|(at, block)| {
        if !base.is_null() {
            put(base, at)?;
        }
        if !size.is_null() {
            put(size, usize::try_from(block.bytes).unwrap_or(0))?;
        }
        Ok(())
    }))
}

// Host memory is real, and takes no room on a GPU.

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, _flags: u32) -> i32 {
    status(current().and_then(|_| {
        // SAFETY: no precondition; the block goes back to `free` in cuMemFreeHost.
        let block = unsafe { libc::aligned_alloc(4096, bytes.max(1).next_multiple_of(4096)) };
        if block.is_null() { Err(crate::OUT_OF_MEMORY) } else { put(address, block) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocHost_v2(address: *mut *mut c_void, bytes: usize) -> i32 {
    // SAFETY: the caller's promise.
    unsafe { cuMemHostAlloc(address, bytes, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(block: *mut c_void) -> i32 {
    // SAFETY: the caller passes what cuMemHostAlloc gave.
    unsafe { libc::free(block) };
    crate::SUCCESS
}

/// `CUmemLocation` and what stands before it in `CUmemAllocationProp`.
#[repr(C)]
pub struct Properties {
    kind: i32,
    handle_types: i32,
    location: i32,
    id: i32,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemCreate(
    handle: *mut u64,
    bytes: usize,
    wanted: *const Properties,
    _flags: u64,
) -> i32 {
    if wanted.is_null() || !bytes.is_multiple_of(2 << 20) || bytes == 0 {
        return INVALID_VALUE;
    }
    // SAFETY: the caller passes a CUmemAllocationProp, which begins so.
    let wanted = unsafe { &*wanted };
    status(with(|driver| {
        // CU_MEM_LOCATION_TYPE_DEVICE; the others are on the host.
        let gpu = if wanted.location == 1 { Some(driver.gpu(wanted.id)?) } else { None };
        if let Some(gpu) = gpu {
            driver.take(gpu, bytes as u64)?;
        }
        let number = driver.number(0);
        driver.handles.insert(number, Block { bytes: bytes as u64, taken: bytes as u64, gpu });
        put(handle, number)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(handle: u64) -> i32 {
    status(with(|driver| {
        let block = driver.handles.remove(&handle).ok_or(INVALID_VALUE)?;
        if let Some(gpu) = block.gpu {
            driver.give(gpu, block.taken);
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAllocationGranularity(
    size: *mut usize,
    _wanted: *const Properties,
    _option: i32,
) -> i32 {
    status(put(size, 2 << 20))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressReserve(
    address: *mut u64,
    bytes: usize,
    _align: usize,
    _at: u64,
    _flags: u64,
) -> i32 {
    status(with(|driver| {
        let number = driver.number(bytes as u64);
        put(address, number)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressFree(_address: u64, _bytes: usize) -> i32 {
    crate::SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(_address: u64, _bytes: usize, _offset: usize, handle: u64, _flags: u64) -> i32 {
    status(with(|driver| driver.handles.get(&handle).map(drop).ok_or(INVALID_VALUE)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemUnmap(_address: u64, _bytes: usize) -> i32 {
    crate::SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemSetAccess(_address: u64, _bytes: usize, _access: *const c_void, _count: usize) -> i32 {
    crate::SUCCESS
}

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
pub struct ArrayShape {
    width: usize,
    height: usize,
    format: u32,
    channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
pub struct ArrayShape3d {
    width: usize,
    height: usize,
    depth: usize,
    format: u32,
    channels: u32,
    flags: u32,
}

fn array(handle: *mut u64, cells: [usize; 3], format: u32, channels: u32) -> Outcome {
    let gpu = current()?;
    // CUarray_format: the bits of one channel.
    let channel: u64 = match format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        0x03 | 0x0a | 0x20 => 4,
        _ => return Err(INVALID_VALUE),
    };
    if cells[0] == 0 || !matches!(channels, 1 | 2 | 4) {
        return Err(INVALID_VALUE);
    }
    let cells = cells.iter().try_fold(1_u64, |all, cells| all.checked_mul((*cells).max(1) as u64));
    let bytes =
        cells.and_then(|cells| cells.checked_mul(channel * u64::from(channels))).ok_or(INVALID_VALUE)?;
    let taken = bytes.checked_next_multiple_of(64 << 10).ok_or(INVALID_VALUE)?;
    with(|driver| {
        driver.take(gpu, taken)?;
        let number = driver.number(0);
        driver.handles.insert(number, Block { bytes, taken, gpu: Some(gpu) });
        put(handle, number)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuArrayCreate_v2(handle: *mut u64, shape: *const ArrayShape) -> i32 {
    if shape.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller passes a descriptor.
    let shape = unsafe { &*shape };
    status(array(handle, [shape.width, shape.height, 1], shape.format, shape.channels))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuArray3DCreate_v2(handle: *mut u64, shape: *const ArrayShape3d) -> i32 {
    if shape.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller passes a descriptor.
    let shape = unsafe { &*shape };
    let _ = shape.flags;
    status(array(handle, [shape.width, shape.height, shape.depth], shape.format, shape.channels))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuArrayDestroy(handle: u64) -> i32 {
    cuMemRelease(handle)
}
