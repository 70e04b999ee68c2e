//! Who places: vcuda-scheduler itself, and the rules of gpu-manager with gpu-admission and of HAMi, written down from their
//! source (gpu-admission 47d56ae, gpu-manager 8cd842e, HAMi 4707fb0), without what has no bearing on placement.

use std::{cmp::Reverse, collections::BTreeMap, time::Instant};

use scheduler::{BoundPod, Claim, Cluster, ContainerDemand, Demand, Role, Wanted, holds_of_bound};
use vcuda_config::{GpuUuid, NodeGpu, NodeGpus, Request, annotation};

use super::{GPUS, NODES, Places, Pod, State, UNITS, Used};

/// HAMi's `deviceSplitCount`.
const HAMI_SPLIT: u32 = 10;

/// gpu-admission picks the node: of those that fit, the one with the least free core, then memory. gpu-manager's
/// `share` picks the GPU: least free core, then memory, then its number. Whole GPUs: the first that are empty.
pub(super) struct GpuManager;

impl Places for GpuManager {
    fn name(&self) -> &'static str {
        "gpu-manager"
    }

    fn place(&mut self, _: u64, pod: Pod, state: &State) -> Option<(usize, Vec<usize>)> {
        let free = |node: &[Used; GPUS]| {
            let core: u32 = node.iter().map(|gpu| 100 - gpu.core).sum();
            let units: u32 = node.iter().map(|gpu| UNITS - gpu.units).sum();
            (core, units)
        };
        let mut nodes: Vec<usize> = (0..NODES).collect();
        nodes.sort_by_key(|at| (free(&state[*at]), *at));
        nodes.into_iter().find_map(|node| {
            let mut fit: Vec<usize> = (0..GPUS).filter(|gpu| state[node][*gpu].takes(pod)).collect();
            if !pod.is_whole() {
                fit.sort_by_key(|gpu| (100 - state[node][*gpu].core, UNITS - state[node][*gpu].units, *gpu));
            }
            fit.truncate(pod.gpus());
            (fit.len() == pod.gpus()).then_some((node, fit))
        })
    }
}

/// HAMi: the score of a GPU is the sum of its used parts of slots, core and memory, that of a node the same over all its
/// GPUs; binpack takes the highest, spread the lowest.
pub(super) struct Hami {
    pub(super) pack_nodes: bool,
    pub(super) pack_gpus: bool,
}

impl Places for Hami {
    fn name(&self) -> &'static str {
        match (self.pack_nodes, self.pack_gpus) {
            (true, true) => "HAMi binpack/binpack",
            (true, false) => "HAMi binpack/spread (default)",
            (false, true) => "HAMi spread/binpack",
            (false, false) => "HAMi spread/spread",
        }
    }

    fn place(&mut self, _: u64, pod: Pod, state: &State) -> Option<(usize, Vec<usize>)> {
        let score = |used: &Used| {
            u64::from(used.shares) * 1000 / u64::from(HAMI_SPLIT)
                + u64::from(used.core) * 10
                + u64::from(used.units) * 1000 / u64::from(UNITS)
        };
        let order = |pack: bool, score: u64| if pack { u64::MAX - score } else { score };
        let mut nodes: Vec<usize> = (0..NODES).collect();
        nodes.sort_by_key(|at| (order(self.pack_nodes, state[*at].iter().map(score).sum()), *at));
        nodes.into_iter().find_map(|node| {
            let takes = |gpu: &usize| {
                let used = state[node][*gpu];
                used.takes(pod) && used.shares < HAMI_SPLIT
            };
            let mut fit: Vec<usize> = (0..GPUS).filter(takes).collect();
            fit.sort_by_key(|gpu| (order(self.pack_gpus, score(&state[node][*gpu])), *gpu));
            fit.truncate(pod.gpus());
            (fit.len() == pod.gpus()).then_some((node, fit))
        })
    }
}

/// The real thing: what the extender answers, and of the best nodes the first, as kube-scheduler has no other opinion.
pub(super) struct Vcuda {
    cluster: Cluster,
    on: BTreeMap<u64, usize>,
}

impl Vcuda {
    pub(super) fn new() -> Self {
        let mut cluster = Cluster::default();
        cluster.begin_nodes();
        for node in 0..NODES {
            let one = |gpu| NodeGpu {
                uuid: uuid(node, gpu),
                model: "A100".into(),
                minor: u32::try_from(gpu).unwrap(),
                units: UNITS,
                numa: None,
                healthy: true,
            };
            let gpus = NodeGpus::new((0..GPUS).map(one).collect(), Vec::new());
            let annotations = BTreeMap::from([(annotation::NODE_GPUS.to_owned(), gpus.to_text())]);
            cluster.set_node(&format!("{node}"), Some(&annotations));
        }
        cluster.end_nodes();
        cluster.begin_pods();
        cluster.end_pods();
        Self { cluster, on: BTreeMap::new() }
    }
}

fn uuid(node: usize, gpu: usize) -> GpuUuid {
    GpuUuid::from_bytes([u8::try_from(node * GPUS + gpu).unwrap(); 16])
}

impl Places for Vcuda {
    fn name(&self) -> &'static str {
        "vcuda"
    }

    fn place(&mut self, id: u64, pod: Pod, _: &State) -> Option<(usize, Vec<usize>)> {
        let request = Request::new(pod.core, pod.units).unwrap();
        let container = ContainerDemand { name: "main".into(), request, role: Role::App };
        let demand = Demand { containers: vec![container] };
        let wanted = Wanted { demand, ..Wanted::default() };
        let uid = id.to_string();
        let names: Vec<String> = (0..NODES).map(|node| node.to_string()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let fit = self.cluster.filter(&uid, &wanted, &names).fit;
        let scores = self.cluster.prioritize(&uid, &wanted, &fit);
        let (node, _) = scores.iter().min_by_key(|(_, score)| Reverse(*score))?;
        let claim = Claim { uid: uid.clone(), node: (*node).to_owned() };
        let reservation = self.cluster.reserve(&claim, "", "", &wanted, 0, Instant::now()).unwrap();
        let annotations =
            BTreeMap::from([(annotation::PLACEMENT.to_owned(), reservation.placement.to_string())]);
        self.cluster.bound(&claim);
        let holds = holds_of_bound(&wanted.demand, &claim.node, Some(&annotations));
        self.cluster.set_pod(BoundPod { uid, node: claim.node.clone(), holds, priority: 0, ending: false });
        let node = claim.node.parse().unwrap();
        self.on.insert(id, node);
        let of = |gpu: &GpuUuid| (0..GPUS).find(|at| uuid(node, *at) == *gpu).unwrap();
        Some((node, reservation.placement.gpus("main").iter().map(of).collect()))
    }

    fn ended(&mut self, id: u64) {
        let node = self.on.remove(&id).unwrap();
        self.cluster.remove_pod(&id.to_string(), &node.to_string());
    }
}
