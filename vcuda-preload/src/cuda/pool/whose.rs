//! Whose memory a pool has.

use super::{attribute, current};
use crate::{
    cuda::types::{CUDA_SUCCESS, Device, Pool, Properties},
    real::driver,
    share::Share,
};

// CUmemPool_attribute, of CUDA 13.0.
const LOCATION_ID: i32 = 11;
const LOCATION_TYPE: i32 = 12;

/// Whose memory a pool has. All zero is the first.
#[derive(Clone, Copy, Default)]
#[repr(u8)]
pub(super) enum Memory {
    /// The host's, which is not the share's.
    #[default]
    Host,
    /// A GPU's of the share, by number.
    Gpu(usize),
    /// A device's that is none of the share's.
    Foreign,
}

impl Memory {
    /// The GPU of the share that has it.
    pub fn gpu(self) -> Option<usize> {
        match self {
            Self::Gpu(gpu) => Some(gpu),
            Self::Host | Self::Foreign => None,
        }
    }

    pub fn of_device(share: &Share, device: Device) -> Self {
        share.gpu_of_device(device).map_or(Self::Foreign, Self::Gpu)
    }

    /// That of a pool that we did not see made, from which a stream of `device` wants some: the pool may be another
    /// device's (`cuMemAllocFromPoolAsync`). Drivers before 13.0 do not say; they have no such pools but one for each device.
    pub fn of_pool(share: &Share, pool: Pool, device: Device) -> Self {
        /// CU_MEM_LOCATION_TYPE_DEVICE.
        const DEVICE: u32 = 1;
        let (mut kind, mut of) = (0_i32, 0_i32);
        if attribute(pool, LOCATION_TYPE, (&raw mut kind).cast()) {
            if Properties::is_host(kind.cast_unsigned()) {
                return Self::Host;
            }
            if kind.cast_unsigned() == DEVICE && attribute(pool, LOCATION_ID, (&raw mut of).cast()) {
                return Self::of_device(share, of);
            }
        }
        let mut count = 0;
        // SAFETY: `count` outlives the call.
        unsafe { driver!(cuda::cuDeviceGetCount(&raw mut count => *mut i32)) };
        let is_its_own = |of: &Device| current(*of) == Some(pool) || default_of(*of) == Some(pool);
        Self::of_device(share, (0..count).find(is_its_own).unwrap_or(device))
    }
}

/// The pool that a device has from the beginning.
fn default_of(device: Device) -> Option<Pool> {
    let mut pool = 0;
    // SAFETY: `pool` outlives the call.
    let result =
        unsafe { driver!(cuda::cuDeviceGetDefaultMemPool(&raw mut pool => *mut Pool, device => Device)) };
    (result == CUDA_SUCCESS).then_some(pool)
}
