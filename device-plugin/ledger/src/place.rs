//! Placement: which GPU a request goes to. Pure functions over what is free; the same answer for the same input,
//! and a reason for every answer.

use std::fmt;

use thiserror::Error;
use vcuda_config::{CORE_PER_GPU, GpuUuid, MEMORY_UNIT_BYTES, Request};

use crate::{Gpu, GpuShare};

/// What is left of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuFree<'a> {
    /// The GPU.
    pub gpu: &'a Gpu,
    /// Percent of its compute time that no share holds.
    pub core: u32,
    /// Bytes of its memory on offer that no share holds.
    pub memory_bytes: u64,
    /// Shares on it.
    pub shares: usize,
}

/// Where a request goes, and why there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// What it gets, one entry a GPU.
    pub gpus: Vec<GpuShare>,
    /// Why these.
    pub choice: Choice,
    /// GPUs that were preferred and lack something.
    pub passed_over: Vec<Lack>,
}

/// What decided a placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The caller preferred these GPUs, and they have room.
    Preferred,
    /// The fullest GPUs that still have room, so that whole ones stay free.
    Packed,
}

/// Why one GPU does not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lack {
    /// It is not on offer on this node.
    Absent(GpuUuid),
    /// It is unhealthy.
    Unhealthy(GpuUuid),
    /// It has too little left of core, of memory, or of both.
    Room {
        /// The GPU.
        gpu: GpuUuid,
        /// Core left.
        core: u32,
        /// Memory left, in bytes.
        memory_bytes: u64,
    },
    /// Whole GPUs are asked, and this one carries shares.
    Shared {
        /// The GPU.
        gpu: GpuUuid,
        /// How many shares it carries.
        shares: usize,
    },
}

/// No GPU, or not enough of them, can take the request.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct NoRoom {
    /// What was asked.
    pub request: Request,
    /// Whole GPUs that would have been free.
    pub free: usize,
    /// What each GPU lacks.
    pub lacks: Vec<Lack>,
}

/// Places `request` on the GPUs of `free`. GPUs in `prefer` come first, in that order, where they can take it;
/// otherwise the fullest one that can, which keeps whole GPUs free. Unhealthy GPUs take nothing.
pub fn place(free: &[GpuFree<'_>], request: &Request, prefer: &[GpuUuid]) -> Result<Placement, NoRoom> {
    let lacks: Vec<Option<Lack>> = free.iter().map(|gpu| gpu.lack(request)).collect();
    let preferred: Vec<Option<usize>> =
        prefer.iter().map(|uuid| free.iter().position(|free| free.gpu.uuid == *uuid)).collect();
    let passed_over = || {
        let lack = |(uuid, at): (&GpuUuid, &Option<usize>)| match at {
            Some(at) => lacks[*at].clone(),
            None => Some(Lack::Absent(uuid.clone())),
        };
        prefer.iter().zip(&preferred).filter_map(lack).collect()
    };

    let wanted = match request {
        Request::Share { .. } => 1,
        Request::Whole { gpus } => gpus.get() as usize,
    };
    let mut order: Vec<usize> = Vec::with_capacity(free.len());
    for at in preferred.iter().flatten() {
        if lacks[*at].is_none() && !order.contains(at) {
            order.push(*at);
        }
    }
    let preferred_fit = order.len();
    let mut others: Vec<usize> =
        (0..free.len()).filter(|at| lacks[*at].is_none() && !order.contains(at)).collect();
    // A stable sort: of equals, the first in the inventory.
    others.sort_by_key(|at| free[*at].emptiness());
    order.extend(others);

    if order.len() < wanted {
        let absent = prefer.iter().zip(&preferred).filter(|(_, at)| at.is_none());
        let mut all: Vec<Lack> = absent.map(|(uuid, _)| Lack::Absent(uuid.clone())).collect();
        all.extend(lacks.into_iter().flatten());
        return Err(NoRoom { request: *request, free: order.len(), lacks: all });
    }
    order.truncate(wanted);
    let gpus = order.iter().map(|at| free[*at].take(request)).collect();
    let choice = if preferred_fit >= wanted { Choice::Preferred } else { Choice::Packed };
    Ok(Placement { gpus, choice, passed_over: passed_over() })
}

impl GpuFree<'_> {
    /// What this GPU lacks to take (its part of) `request`.
    fn lack(&self, request: &Request) -> Option<Lack> {
        let gpu = || self.gpu.uuid.clone();
        if !self.gpu.healthy {
            return Some(Lack::Unhealthy(gpu()));
        }
        match request {
            Request::Share { core, .. } => {
                let memory = request.memory_bytes().unwrap_or(u64::MAX);
                (self.core < *core || self.memory_bytes < memory).then(|| Lack::Room {
                    gpu: gpu(),
                    core: self.core,
                    memory_bytes: self.memory_bytes,
                })
            }
            Request::Whole { .. } if self.shares > 0 => {
                Some(Lack::Shared { gpu: gpu(), shares: self.shares })
            }
            Request::Whole { .. } => {
                let whole = self.core == CORE_PER_GPU && self.memory_bytes == self.gpu.usable_bytes();
                // A GPU without a single unit of memory on offer is no use to anyone.
                (!whole || self.memory_bytes == 0).then(|| Lack::Room {
                    gpu: gpu(),
                    core: self.core,
                    memory_bytes: self.memory_bytes,
                })
            }
        }
    }

    fn take(&self, request: &Request) -> GpuShare {
        let (core, memory_bytes) = match request {
            Request::Share { core, .. } => (*core, request.memory_bytes().unwrap_or(0)),
            Request::Whole { .. } => (CORE_PER_GPU, self.gpu.usable_bytes()),
        };
        GpuShare { uuid: self.gpu.uuid.clone(), minor: self.gpu.minor, core, memory_bytes }
    }

    /// How empty the GPU is: free core and free memory, each in thousandths of the GPU, added up. Both terms are
    /// at most 1000 (memory left never exceeds the usable), so nothing overflows.
    fn emptiness(&self) -> u64 {
        let usable = self.gpu.usable_bytes().max(1);
        let memory = u128::from(self.memory_bytes) * 1000 / u128::from(usable);
        u64::from(self.core) * 1000 / u64::from(CORE_PER_GPU) + u64::try_from(memory).unwrap_or(1000)
    }
}

impl Gpu {
    /// Memory on offer, in bytes.
    pub fn usable_bytes(&self) -> u64 {
        u64::from(self.memory_units) * MEMORY_UNIT_BYTES
    }
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent(gpu) => write!(f, "{gpu} is not on offer here"),
            Self::Unhealthy(gpu) => write!(f, "{gpu} is unhealthy"),
            Self::Room { gpu, core, memory_bytes } => {
                write!(f, "{gpu} has {core} core and {} free", Memory(*memory_bytes))
            }
            Self::Shared { gpu, shares: 1 } => write!(f, "{gpu} carries a share"),
            Self::Shared { gpu, shares } => write!(f, "{gpu} carries {shares} shares"),
        }
    }
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.request {
            Request::Share { core, .. } => {
                let memory = Memory(self.request.memory_bytes().unwrap_or(0));
                write!(f, "no GPU has {core} core and {memory} free")?;
            }
            Request::Whole { gpus } => {
                write!(f, "{gpus} whole GPU(s) asked, {} free", self.free)?;
            }
        }
        for (at, lack) in self.lacks.iter().enumerate() {
            write!(f, "{} {lack}", if at == 0 { ":" } else { ";" })?;
        }
        if self.lacks.is_empty() {
            f.write_str(": the node has no GPU on offer")?;
        }
        Ok(())
    }
}

/// Bytes, as people say them.
pub(crate) struct Memory(pub u64);

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (gib, mib) = (self.0 >> 30, (self.0 >> 20) & 1023);
        match mib {
            0 => write!(f, "{gib} GiB"),
            256 => write!(f, "{gib}.25 GiB"),
            512 => write!(f, "{gib}.5 GiB"),
            768 => write!(f, "{gib}.75 GiB"),
            _ => write!(f, "{} MiB", self.0 >> 20),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(n: u8, units: u32) -> Gpu {
        Gpu {
            uuid: GpuUuid::from_bytes([n; 16]),
            name: "NVIDIA A100".into(),
            minor: n.into(),
            total_bytes: u64::from(units) * MEMORY_UNIT_BYTES,
            memory_units: units,
            numa_node: None,
            pci_bus_id: String::new(),
            healthy: true,
            device_nodes: Vec::new(),
        }
    }

    fn free(gpu: &Gpu, core: u32, units: u32) -> GpuFree<'_> {
        let shares = usize::from(core < CORE_PER_GPU || units < gpu.memory_units);
        GpuFree { gpu, core, memory_bytes: u64::from(units) * MEMORY_UNIT_BYTES, shares }
    }

    fn minors(placement: &Placement) -> Vec<u32> {
        placement.gpus.iter().map(|gpu| gpu.minor).collect()
    }

    #[test]
    fn a_share_goes_to_the_fullest_gpu_that_can_take_it() {
        let gpus = [gpu(0, 160), gpu(1, 160), gpu(2, 160)];
        let free = [free(&gpus[0], 100, 160), free(&gpus[1], 50, 80), free(&gpus[2], 30, 40)];
        for (core, units, minor) in [(20, 32, 2), (30, 40, 2), (31, 40, 1), (30, 41, 1), (51, 1, 0)] {
            let placement = place(&free, &Request::new(core, units).unwrap(), &[]).unwrap();
            assert_eq!(minors(&placement), [minor], "{core} core, {units} units");
            assert_eq!(placement.choice, Choice::Packed);
        }
    }

    #[test]
    fn the_preferred_gpu_wins_when_it_can_take_it_and_is_explained_when_not() {
        let gpus = [gpu(0, 160), gpu(1, 160)];
        let free = [free(&gpus[0], 100, 160), free(&gpus[1], 50, 80)];
        let prefer = [gpus[0].uuid.clone()];
        let placement = place(&free, &Request::new(20, 32).unwrap(), &prefer).unwrap();
        assert_eq!((minors(&placement), placement.choice), (vec![0], Choice::Preferred));

        let prefer = [gpus[1].uuid.clone(), GpuUuid::from_bytes([9; 16])];
        let placement = place(&free, &Request::new(60, 32).unwrap(), &prefer).unwrap();
        assert_eq!((minors(&placement), placement.choice), (vec![0], Choice::Packed));
        let said: Vec<_> = placement.passed_over.iter().map(ToString::to_string).collect();
        assert!(said[0].contains("50 core and 20 GiB free"), "{said:?}");
        assert!(said[1].contains("not on offer"), "{said:?}");
    }

    #[test]
    fn whole_gpus_are_whole() {
        let mut gpus = [gpu(0, 160), gpu(1, 160), gpu(2, 160), gpu(3, 160)];
        gpus[3].healthy = false;
        let free = [
            free(&gpus[0], 100, 160),
            free(&gpus[1], 99, 160),
            free(&gpus[2], 100, 160),
            free(&gpus[3], 100, 160),
        ];
        let placement = place(&free, &Request::new(200, 0).unwrap(), &[gpus[2].uuid.clone()]).unwrap();
        assert_eq!(minors(&placement), [2, 0]);
        assert!(placement.gpus.iter().all(|gpu| gpu.core == 100 && gpu.memory_bytes == 40 << 30));

        let error = place(&free, &Request::new(300, 0).unwrap(), &[]).unwrap_err().to_string();
        assert!(error.starts_with("3 whole GPU(s) asked, 2 free"), "{error}");
        assert!(error.contains("carries a share") && error.contains("unhealthy"), "{error}");
    }

    #[test]
    fn a_refusal_says_what_each_gpu_lacks() {
        let gpus = [gpu(0, 160), gpu(1, 160)];
        let free = [free(&gpus[0], 12, 160), free(&gpus[1], 100, 3)];
        let error = place(&free, &Request::new(20, 32).unwrap(), &[]).unwrap_err().to_string();
        assert!(error.starts_with("no GPU has 20 core and 8 GiB free: GPU-00000000"), "{error}");
        assert!(error.contains("12 core and 40 GiB free; GPU-01010101"), "{error}");
        assert!(error.contains("100 core and 0.75 GiB free"), "{error}");
        let error = place(&[], &Request::new(20, 32).unwrap(), &[]).unwrap_err().to_string();
        assert!(error.contains("no GPU on offer"), "{error}");
    }
}
