//! What a container may ask for.

use std::num::NonZeroU32;

use thiserror::Error;

use crate::{CORE_PER_GPU, MEMORY_UNIT_BYTES};

/// A valid request of one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// A part of one GPU: below 100 core, and at least one memory unit.
    Share {
        /// Percent of one GPU's compute time, 1 to 99.
        core: u32,
        /// Device memory in units of 256 MiB.
        memory_units: NonZeroU32,
    },
    /// Whole GPUs, with their whole memory.
    Whole {
        /// How many.
        gpus: NonZeroU32,
    },
}

/// Why a request can never be met. The text names the field and the remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RequestError {
    /// No core at all.
    #[error("vcuda-core is missing: memory without core cannot run; ask for at least 1 core")]
    NoCore,
    /// Part of a GPU without memory.
    #[error(
        "vcuda-memory is missing: {0} core is a part of a GPU and needs memory; ask for at least 1 unit (256 MiB)"
    )]
    NoMemory(u32),
    /// More than a GPU, but no whole number of them.
    #[error(
        "vcuda-core {0} is neither below 100 nor a multiple of 100; ask for a part of one GPU (1 to 99) or for whole GPUs (100, 200, …)"
    )]
    BrokenGpus(u32),
}

impl Request {
    /// Checks `core` (percent of one GPU) and `memory_units` (256 MiB each). Whole GPUs come with their whole
    /// memory, so for them `memory_units` says nothing.
    pub fn new(core: u32, memory_units: u32) -> Result<Self, RequestError> {
        match core {
            0 => Err(RequestError::NoCore),
            1..CORE_PER_GPU => NonZeroU32::new(memory_units)
                .map(|memory_units| Self::Share { core, memory_units })
                .ok_or(RequestError::NoMemory(core)),
            _ if core.is_multiple_of(CORE_PER_GPU) => NonZeroU32::new(core / CORE_PER_GPU)
                .map(|gpus| Self::Whole { gpus })
                .ok_or(RequestError::NoCore),
            _ => Err(RequestError::BrokenGpus(core)),
        }
    }

    /// Bytes of device memory asked for; none for whole GPUs, which have what they have.
    pub fn memory_bytes(&self) -> Option<u64> {
        match self {
            Self::Share { memory_units, .. } => Some(u64::from(memory_units.get()) * MEMORY_UNIT_BYTES),
            Self::Whole { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_needs_core_and_memory() {
        assert_eq!(Request::new(20, 32).unwrap().memory_bytes(), Some(8 << 30));
        assert_eq!(Request::new(20, 0), Err(RequestError::NoMemory(20)));
        assert_eq!(Request::new(0, 32), Err(RequestError::NoCore));
        assert_eq!(Request::new(0, 0), Err(RequestError::NoCore));
    }

    #[test]
    fn from_a_hundred_on_only_whole_gpus() {
        assert_eq!(Request::new(100, 0), Ok(Request::Whole { gpus: NonZeroU32::MIN }));
        assert_eq!(Request::new(300, 7), Ok(Request::Whole { gpus: NonZeroU32::new(3).unwrap() }));
        for core in [101, 150, 199, 250, u32::MAX] {
            assert_eq!(Request::new(core, 1), Err(RequestError::BrokenGpus(core)));
        }
    }
}
