//! Where all containers of one pod go on one node, at once: the ledger's placement, container by container. Pure.

use std::fmt;

use ledger::{GpuFree, NoRoom, Rules, place_by};
use thiserror::Error;
use vcuda_config::{GpuUuid, PodPlacement};

use crate::{Demand, Role, hold::gpus_of};

/// No way was found to put all containers of a pod on a node.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct Misfit {
    /// The container that found no room, where the pod has several.
    pub container: Option<String>,
    /// What it found.
    pub no_room: NoRoom,
}

/// Picks GPUs for each container of `demand` on a node whose GPUs have `free` left.
///
/// What runs to the end of the pod is placed first, the largest first. An init container is placed beside the
/// sidecars started before it, on the GPUs that the pod has later, where they have room: so the pod holds no more
/// than it must.
pub fn plan(free: &[GpuFree<'_>], demand: &Demand, rules: &Rules<'_>) -> Result<PodPlacement, Misfit> {
    let mut gpus: Vec<Vec<GpuUuid>> = vec![Vec::new(); demand.containers.len()];
    let several = demand.containers.len() > 1;
    let put = |at: usize, left: &mut [GpuFree<'_>], prefer: &[GpuUuid]| {
        let container = &demand.containers[at];
        let placement = place_by(left, &container.request, prefer, rules)
            .map_err(|no_room| Misfit { container: several.then(|| container.name.clone()), no_room })?;
        for share in &placement.gpus {
            if let Some(gpu) = left.iter_mut().find(|gpu| gpu.gpu.uuid == share.uuid) {
                gpu.core = gpu.core.saturating_sub(share.core);
                gpu.memory_bytes = gpu.memory_bytes.saturating_sub(share.memory_bytes);
                gpu.shares += 1;
            }
        }
        Ok(placement.gpus.into_iter().map(|share| share.uuid).collect::<Vec<_>>())
    };

    let (mut lasting, turns): (Vec<usize>, Vec<usize>) =
        (0..gpus.len()).partition(|at| demand.containers[*at].role != Role::Init);
    let request = |at: &usize| &demand.containers[*at].request;
    lasting.sort_by_key(|at| {
        // Whole GPUs first, then by the share of a GPU that the larger of core and memory is.
        let of_memory = |bytes: u64| {
            let largest = free.iter().map(|gpu| gpu.gpu.usable_bytes()).max().unwrap_or(0).max(1);
            u128::from(bytes) * 100 / u128::from(largest)
        };
        let memory = request(at).memory_bytes().map_or(u128::MAX, of_memory);
        let core = u128::from(crate::Held::by(request(at)).core);
        std::cmp::Reverse((gpus_of(request(at)), core.max(memory)))
    });
    let mut left = free.to_vec();
    for at in lasting {
        gpus[at] = put(at, &mut left, &[])?;
    }
    for at in turns {
        let mut left = free.to_vec();
        for sidecar in (0..at).filter(|other| demand.containers[*other].role == Role::Sidecar) {
            // It fitted among all that lasts, so it fits where it is.
            let there = gpus[sidecar].clone();
            put(sidecar, &mut left, &there)?;
        }
        let of_pod: Vec<GpuUuid> = gpus.iter().flatten().cloned().collect();
        gpus[at] = put(at, &mut left, &of_pod)?;
    }
    let named = demand.containers.iter().map(|container| container.name.clone());
    Ok(PodPlacement { placed_at: 0, containers: named.zip(gpus).collect() })
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(container) = &self.container {
            write!(f, "container {container}: ")?;
        }
        self.no_room.fmt(f)
    }
}
