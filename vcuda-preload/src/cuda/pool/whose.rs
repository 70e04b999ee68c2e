//! Whose memory a pool has.

use super::{attribute, current};
use crate::{
    cuda::types::{CUDA_SUCCESS, Device, Pool, Properties},
    real::driver,
    share::Share,
};

// CUmemPool_attribute, of CUDA 13.0.
const ALLOCATION_TYPE: i32 = 9;
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
    /// Managed memory, which any kernel may draw to a GPU. It counts on the one that it prefers; where it prefers none, on that
    /// of the first stream that takes some.
    Managed(Option<usize>),
    /// A device's that is none of the share's.
    Foreign,
}

impl Memory {
    /// The GPU of the share that has it on its account.
    pub fn gpu(self) -> Option<usize> {
        match self {
            Self::Gpu(gpu) => Some(gpu),
            Self::Managed(gpu) => gpu,
            Self::Host | Self::Foreign => None,
        }
    }

    /// What a pool with such properties has.
    pub fn of(share: &Share, properties: Properties) -> Self {
        match (properties.device(), properties.is_managed()) {
            (None, false) => Self::Host,
            (None, true) => Self::Managed(None),
            (Some(device), false) => Self::of_device(share, device),
            (Some(device), true) => {
                share.gpu_of_device(device).map_or(Self::Foreign, |gpu| Self::Managed(Some(gpu)))
            }
        }
    }

    fn of_device(share: &Share, device: Device) -> Self {
        share.gpu_of_device(device).map_or(Self::Foreign, Self::Gpu)
    }

    /// That of a pool that we did not see made, from which a stream of `device` wants some: the pool may be another
    /// device's (`cuMemAllocFromPoolAsync`). Drivers before 13.0 do not say; they have no such pools but one for each device.
    pub fn of_pool(share: &Share, pool: Pool, device: Device) -> Self {
        /// CU_MEM_LOCATION_TYPE_DEVICE.
        const DEVICE: i32 = 1;
        let ask = |which| {
            let mut value = 0_i32;
            attribute(pool, which, (&raw mut value).cast()).then_some(value)
        };
        if let Some(location_kind) = ask(LOCATION_TYPE) {
            let properties = Properties::new(
                ask(ALLOCATION_TYPE).unwrap_or(0),
                location_kind,
                ask(LOCATION_ID).unwrap_or(0),
            );
            if location_kind == DEVICE || properties.device().is_none() {
                return Self::of(share, properties);
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
