//! Placement: which GPU a request goes to. Pure functions over what is free; the same answer for the same input,
//! and a reason for every answer.

use std::fmt;

use region::Slots;
use thiserror::Error;
use vcuda_config::{CORE_PER_GPU, GpuUuid, Link, MEMORY_UNIT_BYTES, Request};

use crate::{Gpu, GpuShare, Policy, Rules};

/// The worst of [`GpuFree::looseness`]: more than 4000 of core, 1000 of memory, and twice 1000 between them.
pub const LOOSEST: u64 = 16_000;

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
    /// What it gets, one entry a GPU; slots are given out when it is bound.
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
    /// The emptiest GPUs.
    Spread,
    /// Whole GPUs of the smallest group that such a link connects and that has enough of them free.
    Connected(Link),
}

/// Why one GPU does not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lack {
    /// It is not on offer on this node.
    Absent(GpuUuid),
    /// It is unhealthy.
    Unhealthy(GpuUuid),
    /// An administrator keeps new shares away.
    Cordoned(GpuUuid),
    /// The pod's owner ruled it out.
    Unwanted {
        /// The GPU.
        gpu: GpuUuid,
        /// Its model.
        model: String,
        /// The pod annotation that says so.
        by: &'static str,
    },
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

/// Places `request` on the GPUs of `free` by the default rules: see [`place_by`].
pub fn place(free: &[GpuFree<'_>], request: &Request, prefer: &[GpuUuid]) -> Result<Placement, NoRoom> {
    place_by(free, request, prefer, &Rules::default())
}

/// Places `request` on the GPUs of `free`, which are all GPUs of the node, in its order. GPUs in `prefer` come
/// first, in that order, where they can take it; otherwise `rules` decide. Unhealthy GPUs take nothing.
pub fn place_by(
    free: &[GpuFree<'_>],
    request: &Request,
    prefer: &[GpuUuid],
    rules: &Rules<'_>,
) -> Result<Placement, NoRoom> {
    let lacks: Vec<Option<Lack>> = (0..free.len()).map(|at| lack(free, at, request, rules)).collect();
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
    let mut others: Vec<usize> =
        (0..free.len()).filter(|at| lacks[*at].is_none() && !order.contains(at)).collect();

    if order.len() + others.len() < wanted {
        let absent = prefer.iter().zip(&preferred).filter(|(_, at)| at.is_none());
        let mut all: Vec<Lack> = absent.map(|(uuid, _)| Lack::Absent(uuid.clone())).collect();
        let free = order.len() + others.len();
        all.extend(lacks.into_iter().flatten());
        return Err(NoRoom { request: *request, free, lacks: all });
    }
    let mut choice = match rules.policy {
        Policy::Pack => Choice::Packed,
        Policy::Spread => Choice::Spread,
    };
    if order.len() >= wanted {
        choice = Choice::Preferred;
        order.truncate(wanted);
    } else if wanted > 1 {
        let fit: Vec<usize> = order.iter().chain(&others).copied().collect();
        let (connected, link) = rules.connected(free, &fit, &order, wanted);
        choice = link.map_or(choice, Choice::Connected);
        order = connected;
    } else {
        rules.order(free, request, &mut others);
        order.extend(others.first());
    }
    let gpus = order.iter().map(|at| free[*at].take(request)).collect();
    Ok(Placement { gpus, choice, passed_over: passed_over() })
}

/// Whether the GPU at `at` takes `request`, or one GPU of it where it asks for several. Allocates nothing: the
/// scheduler asks it for every GPU of a cluster.
pub fn takes(free: &[GpuFree<'_>], at: usize, request: &Request, rules: &Rules<'_>) -> bool {
    free[at].gpu.healthy
        && !rules.cordoned.contains(&at)
        && rules.filter.is_none_or(|filter| filter.rules_out(free[at].gpu).is_none())
        && free[at].has_room(request)
}

/// What the GPU at `at` lacks to take (its part of) `request`.
pub fn lack(free: &[GpuFree<'_>], at: usize, request: &Request, rules: &Rules<'_>) -> Option<Lack> {
    if takes(free, at, request, rules) {
        return None;
    }
    let this = &free[at];
    let gpu = this.gpu.uuid.clone();
    if !this.gpu.healthy {
        return Some(Lack::Unhealthy(gpu));
    }
    if rules.cordoned.contains(&at) {
        return Some(Lack::Cordoned(gpu));
    }
    if let Some(by) = rules.filter.and_then(|filter| filter.rules_out(this.gpu)) {
        return Some(Lack::Unwanted { gpu, model: this.gpu.name.clone(), by });
    }
    Some(match request {
        Request::Whole { .. } if this.shares > 0 => Lack::Shared { gpu, shares: this.shares },
        _ => Lack::Room { gpu, core: this.core, memory_bytes: this.memory_bytes },
    })
}

impl GpuFree<'_> {
    /// Whether it has room for (its part of) `request`.
    fn has_room(&self, request: &Request) -> bool {
        match request {
            Request::Share { core, .. } => {
                self.core >= *core && self.memory_bytes >= request.memory_bytes().unwrap_or(u64::MAX)
            }
            // A GPU without a single unit of memory on offer is no use to anyone.
            Request::Whole { .. } => {
                self.shares == 0
                    && self.core == CORE_PER_GPU
                    && self.memory_bytes == self.gpu.usable_bytes()
                    && self.memory_bytes > 0
            }
        }
    }

    fn take(&self, request: &Request) -> GpuShare {
        let (core, memory_bytes) = match request {
            Request::Share { core, .. } => (*core, request.memory_bytes().unwrap_or(0)),
            Request::Whole { .. } => (CORE_PER_GPU, self.gpu.usable_bytes()),
        };
        GpuShare {
            uuid: self.gpu.uuid.clone(),
            minor: self.gpu.minor,
            core,
            memory_bytes,
            slots: Slots::NONE,
        }
    }

    /// How badly a share packs onto the GPU, which has room for it; up to [`LOOSEST`]. What would be left is bad, core
    /// four times as much as memory, since every share needs core; and so is core without memory or memory without
    /// core, which nobody can use. An untouched GPU is worse than all others. The weights are those that did best over
    /// the streams of pods of the scheduler's `side_by_side` test.
    pub fn looseness(&self, request: &Request) -> u64 {
        if self.shares == 0 {
            return LOOSEST;
        }
        let (core, memory) = match request {
            Request::Share { core, .. } => (*core, request.memory_bytes().unwrap_or(0)),
            Request::Whole { .. } => (CORE_PER_GPU, self.gpu.usable_bytes()),
        };
        // In thousandths of the GPU.
        let core = u64::from(self.core.saturating_sub(core)) * 1000 / u64::from(CORE_PER_GPU);
        let units = |bytes: u64| bytes / MEMORY_UNIT_BYTES;
        let memory =
            units(self.memory_bytes.saturating_sub(memory)) * 1000 / u64::from(self.gpu.memory_units.max(1));
        (4 * core + memory + 2 * core.abs_diff(memory)).min(LOOSEST - 1)
    }

    /// How empty the GPU is: free core and free memory, each in thousandths of the GPU, added up. Both terms are
    /// at most 1000 (memory left never exceeds the usable), so nothing overflows.
    pub fn emptiness(&self) -> u64 {
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

impl Lack {
    /// The GPU.
    pub fn gpu(&self) -> &GpuUuid {
        match self {
            Self::Absent(gpu)
            | Self::Unhealthy(gpu)
            | Self::Cordoned(gpu)
            | Self::Unwanted { gpu, .. }
            | Self::Room { gpu, .. }
            | Self::Shared { gpu, .. } => gpu,
        }
    }
}

impl Placement {
    /// Why these GPUs, in one line; `kept` where the container had them before.
    pub(crate) fn explain(&self, kept: bool) -> String {
        let mut text = if kept { "its container had it before".to_owned() } else { self.choice.to_string() };
        for (at, lack) in self.passed_over.iter().enumerate() {
            text.push_str(if at == 0 { "; passed over: " } else { "; " });
            text.push_str(&lack.to_string());
        }
        text
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Preferred => "it was asked for, by the scheduler or by the device IDs, and has room",
            Self::Packed => "the fullest that has room, so that whole GPUs stay free",
            Self::Spread => "the emptiest",
            Self::Connected(Link::NvLink) => "the smallest group of free GPUs that NVLink connects",
            Self::Connected(Link::Pcie) => "the smallest group of free GPUs behind one PCIe switch",
            Self::Connected(Link::Numa) => "the smallest group of free GPUs of one NUMA node",
        })
    }
}

impl fmt::Display for GpuFree<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "has {} core and {} free", self.core, Memory(self.memory_bytes))
    }
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent(gpu) => write!(f, "{gpu} is not on offer here"),
            Self::Unhealthy(gpu) => write!(f, "{gpu} is unhealthy"),
            Self::Cordoned(gpu) => write!(f, "{gpu} is cordoned"),
            Self::Unwanted { gpu, model, by } => write!(f, "{gpu} ({model}) is ruled out by {by}"),
            Self::Room { gpu, core, memory_bytes } => {
                write!(f, "{gpu} has {core} core and {} free", Memory(*memory_bytes))
            }
            Self::Shared { gpu, shares: 1 } => write!(f, "{gpu} carries a share"),
            Self::Shared { gpu, shares } => write!(f, "{gpu} carries {shares} shares"),
        }
    }
}

impl NoRoom {
    /// The refusal without what each GPU lacks: the same text for many nodes, so that they can be counted.
    pub fn headline(&self) -> String {
        match self.request {
            Request::Share { core, .. } => {
                let memory = Memory(self.request.memory_bytes().unwrap_or(0));
                format!("no GPU has {core} core and {memory} free")
            }
            Request::Whole { gpus } => format!("{gpus} whole GPU(s) asked, {} free", self.free),
        }
    }
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.headline())?;
        for (at, lack) in self.lacks.iter().enumerate() {
            write!(f, "{} {lack}", if at == 0 { ":" } else { ";" })?;
        }
        if self.lacks.is_empty() {
            f.write_str(": the node has no GPU on offer")?;
        }
        Ok(())
    }
}

/// Bytes, as people say them: `8 GiB`.
#[derive(Clone, Copy, Debug)]
pub struct Memory(pub u64);

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
