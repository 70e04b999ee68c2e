//! Arrays and mipmapped arrays. Their memory is tiled and padded, and only the driver knows how: it says so of an array
//! of the same shape that is to be mapped later (CUDA 11.6), which takes nothing itself. Where it does not say, the size
//! is reckoned from the tiles that GPUs have had so far.

use crate::{
    cuda::{
        Allocated, allocate,
        arguments::{Out, copy_of},
        binding, free,
        types::{
            Array, Array3dDescriptor, Array3dDescriptorV1, ArrayDescriptor, ArrayDescriptorV1, CUDA_SUCCESS,
            Result,
        },
    },
    map::Map,
    real::driver,
    share::Share,
};

// Flags of CUDA_ARRAY3D_DESCRIPTOR.
const LAYERED: u32 = 0x01;
const SPARSE: u32 = 0x40;
const DEFERRED_MAPPING: u32 = 0x80;

fn arrays(share: &'static Share) -> &'static Map {
    &share.state().arrays
}

/// `CUDA_ARRAY_MEMORY_REQUIREMENTS`.
#[derive(Default)]
#[repr(C)]
struct Requirements {
    size: usize,
    alignment: usize,
    reserved: [u32; 4],
}

/// Bytes that an array of this shape takes.
fn size_of_array(shape: &Array3dDescriptor) -> u64 {
    if shape.flags & (SPARSE | DEFERRED_MAPPING) != 0 {
        // Memory is mapped to it later, and accounted where that is made.
        return 0;
    }
    let twin = Array3dDescriptor { flags: shape.flags | DEFERRED_MAPPING, ..*shape };
    asked(
        // SAFETY: the array outlives the call.
        |array| unsafe { driver!(cuda::cuArray3DCreate_v2(array => *mut Array, &raw const twin => *const Array3dDescriptor)) },
        // SAFETY: the array lives; arrays belong to the device that is current here, and on one GPU the answer is the
        // same for each device handle.
        |requirements, array, device| unsafe {
            driver!(cuda::cuArrayGetMemoryRequirements(requirements => *mut Requirements, array => Array, device => i32))
        },
        // SAFETY: made here.
        |array| unsafe { driver!(cuda::cuArrayDestroy(array => Array)) },
    )
    .unwrap_or_else(|| reckoned(shape))
}

/// Bytes that a mipmapped array of this shape takes.
fn size_of_mipmapped_array(shape: &Array3dDescriptor, levels: u32) -> u64 {
    if shape.flags & (SPARSE | DEFERRED_MAPPING) != 0 {
        return 0;
    }
    let twin = Array3dDescriptor { flags: shape.flags | DEFERRED_MAPPING, ..*shape };
    asked(
        // SAFETY: the array outlives the call.
        |array| unsafe { driver!(cuda::cuMipmappedArrayCreate(array => *mut Array, &raw const twin => *const Array3dDescriptor, levels => u32)) },
        // SAFETY: as for arrays.
        |requirements, array, device| unsafe {
            driver!(cuda::cuMipmappedArrayGetMemoryRequirements(requirements => *mut Requirements, array => Array, device => i32))
        },
        // SAFETY: made here.
        |array| unsafe { driver!(cuda::cuMipmappedArrayDestroy(array => Array)) },
    )
    .unwrap_or_else(|| {
        // Each level has half the extent of the one above, and at least one; layers stay.
        (0..levels.min(32)).fold(0_u64, |sum, level| {
            let half = |extent: usize| if extent == 0 { 0 } else { (extent >> level).max(1) };
            let depth = if shape.flags & LAYERED != 0 { shape.depth } else { half(shape.depth) };
            let level = Array3dDescriptor { width: half(shape.width), height: half(shape.height), depth, ..*shape };
            sum.saturating_add(reckoned(&level))
        })
    })
}

fn asked(
    create: impl FnOnce(&mut Array) -> Result,
    ask: impl FnOnce(&mut Requirements, Array, i32) -> Result,
    destroy: impl FnOnce(Array) -> Result,
) -> Option<u64> {
    let (mut array, mut device, mut requirements) = (0, 0, Requirements::default());
    if create(&mut array) != CUDA_SUCCESS {
        return None;
    }
    // SAFETY: `device` outlives the call.
    let current = unsafe { driver!(cuda::cuCtxGetDevice(&raw mut device => *mut i32)) };
    let said = current == CUDA_SUCCESS && ask(&mut requirements, array, device) == CUDA_SUCCESS;
    destroy(array);
    (said && requirements.size > 0).then_some(requirements.size as u64)
}

/// The size reckoned: rows of elements in tiles of 64 bytes by 8 rows, as GPUs have laid arrays out since Fermi.
fn reckoned(shape: &Array3dDescriptor) -> u64 {
    let block = block_bytes(shape.format);
    let (width, height) = (shape.width.max(1) as u64, shape.height.max(1) as u64);
    let (row, rows) = match block {
        Some(bytes) => (width.div_ceil(4).saturating_mul(bytes), height.div_ceil(4)),
        None => (width.saturating_mul(element_bytes(shape.format, shape.channels)), height),
    };
    let rows = if shape.height == 0 { rows } else { rows.saturating_add(7) / 8 * 8 };
    (row.saturating_add(63) / 64 * 64).saturating_mul(rows).saturating_mul(shape.depth.max(1) as u64)
}

/// Bytes of one block of 4×4 elements of a block-compressed format (`CU_AD_FORMAT_BC*`).
fn block_bytes(format: u32) -> Option<u64> {
    match format {
        // BC1 and BC4.
        0x91 | 0x92 | 0x97 | 0x98 => Some(8),
        0x93..=0x96 | 0x99..=0x9f => Some(16),
        _ => None,
    }
}

/// Bytes of one element of a `CUarray_format`.
fn element_bytes(format: u32, channels: u32) -> u64 {
    let per_channel = match format {
        // Signed and unsigned bytes.
        0x01 | 0x08 => 1,
        // 16 bits, half floats.
        0x02 | 0x09 | 0x10 => 2,
        // NV12 has half as much again for colour, rounded up.
        0xb0 => 2,
        // CU_AD_FORMAT_{UNORM,SNORM}_INT8X1/2/4 and INT16X1/2/4 say their channels in their name.
        0xc0 | 0xc6 => return 1,
        0xc1 | 0xc7 | 0xc3 | 0xc9 => return 2,
        0xc2 | 0xc8 | 0xc4 | 0xca => return 4,
        0xc5 | 0xcb => return 8,
        // 32 bits, floats, and what is newer.
        _ => 4,
    };
    per_channel * u64::from(channels.clamp(1, 4))
}

impl From<ArrayDescriptor> for Array3dDescriptor {
    fn from(ArrayDescriptor { width, height, format, channels }: ArrayDescriptor) -> Self {
        Self { width, height, depth: 0, format, channels, flags: 0 }
    }
}

impl From<ArrayDescriptorV1> for Array3dDescriptor {
    fn from(ArrayDescriptorV1 { width, height, format, channels }: ArrayDescriptorV1) -> Self {
        ArrayDescriptor { width: width as usize, height: height as usize, format, channels }.into()
    }
}

impl From<Array3dDescriptorV1> for Array3dDescriptor {
    fn from(shape: Array3dDescriptorV1) -> Self {
        let Array3dDescriptorV1 { width, height, depth, format, channels, flags } = shape;
        let (width, height, depth) = (width as usize, height as usize, depth as usize);
        Self { width, height, depth, format, channels, flags }
    }
}

/// Has the driver make an array of the application's shape, which takes as many bytes as `size` says.
///
/// # Safety
/// Both pointers must be null or the application's, and `call` a driver's function that on success writes the handle where it
/// is told.
unsafe fn create<S: Copy + Into<Array3dDescriptor>>(
    array: *mut Array,
    shape: *const S,
    size: impl FnOnce(&Array3dDescriptor) -> u64,
    call: impl FnOnce(*mut Array, *const S) -> Result,
) -> Result {
    // SAFETY: the caller's promise.
    let Some(copy) = (unsafe { copy_of(shape) }) else { return call(array, shape) };
    let bytes = size(&copy.into());
    // SAFETY: the caller's promise.
    let array = unsafe { Out::new(array) };
    let call = || call(array.room(), &raw const copy);
    let result = allocate(arrays, bytes, call, || Allocated { key: array.value(), bytes }, |_| {});
    array.hand_over(result)
}

macro_rules! creates {
    ($($symbol:ident of $shape:ty;)*) => { $(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(array: *mut Array, shape: *const $shape) -> Result {
            // SAFETY: the arguments are the application's, for the driver to judge.
            unsafe {
                create(array, shape, size_of_array, |array, shape| {
                    driver!(cuda::$symbol(array => *mut Array, shape => *const $shape))
                })
            }
        }
    )* };
}
creates! {
    cuArray3DCreate of Array3dDescriptorV1;
    cuArray3DCreate_v2 of Array3dDescriptor;
    cuArrayCreate of ArrayDescriptorV1;
    cuArrayCreate_v2 of ArrayDescriptor;
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMipmappedArrayCreate(
    array: *mut Array,
    shape: *const Array3dDescriptor,
    levels: u32,
) -> Result {
    let size = |shape: &_| size_of_mipmapped_array(shape, levels);
    // SAFETY: the arguments are the application's, for the driver to judge.
    unsafe {
        create(array, shape, size, |array, shape| {
            driver!(cuda::cuMipmappedArrayCreate(
                array => *mut Array, shape => *const Array3dDescriptor, levels => u32,
            ))
        })
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuArrayDestroy(array: Array) -> Result {
    // SAFETY: the argument is the application's, for the driver to judge.
    let call = || unsafe { driver!(cuda::cuArrayDestroy(array => Array)) };
    free(arrays, array, || binding::destroy_array(array, call))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMipmappedArrayDestroy(array: Array) -> Result {
    // SAFETY: the argument is the application's, for the driver to judge.
    let call = || unsafe { driver!(cuda::cuMipmappedArrayDestroy(array => Array)) };
    free(arrays, array, || binding::destroy_array(array, call))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reckoned_size_is_never_below_the_elements() {
        let shape = |width, height, depth| Array3dDescriptor {
            width,
            height,
            depth,
            format: 0x20,
            channels: 4,
            flags: 0,
        };
        assert_eq!(reckoned(&shape(64, 0, 0)), 64 * 16);
        assert_eq!(reckoned(&shape(1024, 1024, 0)), 1024 * 1024 * 16);
        assert_eq!(reckoned(&shape(1, 1, 3)), 64 * 8 * 3, "a tile each");
        assert_eq!(reckoned(&shape(usize::MAX, usize::MAX, usize::MAX)), u64::MAX);
        let bc1 = Array3dDescriptor { format: 0x91, ..shape(64, 64, 0) };
        assert_eq!(reckoned(&bc1), 16 * 8 * 16);
    }
}
