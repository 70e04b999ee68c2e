//! One node: its GPUs, the pods on it, and what is left of each GPU, kept up to date with every change so that a
//! decision reads and never counts.

use std::collections::{BTreeMap, HashMap};

use ledger::{Gpu, GpuFree, Policy, Rules};
use vcuda_config::{
    CORE_PER_GPU, GpuGroup, GpuUuid, Link, MEMORY_UNIT_BYTES, NodeGpus, NodeGpusError, annotation,
};

use crate::{Demand, Held, Hold, On, Wanted, hold::gpus_of};

/// Emptiness of an untouched GPU, see [`GpuFree::emptiness`].
const EMPTY: u64 = 2000;

/// Best score of a node, `MaxExtenderPriority` of kube-scheduler.
pub const SCORE_MAX: u64 = 10;

/// A node, as its annotations and the pods on it show it.
#[derive(Debug)]
pub struct Node {
    gpus: Vec<Gpu>,
    groups: Vec<GpuGroup>,
    cordoned: Vec<usize>,
    /// Why nothing can be placed here, whatever is free.
    trouble: Option<String>,
    /// By UID.
    pub(crate) pods: HashMap<Box<str>, PodOnNode>,
    /// What is taken of each GPU, in the order of `gpus`.
    used: Vec<Held>,
    /// What is taken of any of them, nobody knows which.
    anywhere: Held,
    /// Whether the cluster has such a node. Pods outlive their node for a while.
    exists: bool,
    /// The list of nodes in which it was last seen.
    pub(crate) seen: u32,
}

/// A pod with a share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodOnNode {
    /// What it holds.
    pub holds: Box<[Hold]>,
    /// Its priority; a higher one is worth more.
    pub priority: i32,
    /// It is about to end.
    pub ending: bool,
    /// The list of pods in which it was last seen; none while it is only reserved.
    pub seen: Option<u32>,
}

impl Default for Node {
    fn default() -> Self {
        Self {
            gpus: Vec::new(),
            groups: Vec::new(),
            cordoned: Vec::new(),
            trouble: Some("vcuda-scheduler has not seen this node yet; it is tried again".into()),
            pods: HashMap::new(),
            used: Vec::new(),
            anywhere: Held::default(),
            exists: false,
            seen: 0,
        }
    }
}

impl Node {
    /// Takes over what the node's annotations say.
    pub fn set_annotations(&mut self, annotations: Option<&BTreeMap<String, String>>) {
        let value = |key: &str| annotations.and_then(|map| map.get(key)).map(String::as_str);
        self.exists = true;
        self.trouble = self.read(value(annotation::NODE_GPUS), value(annotation::CORDON)).err();
        if self.trouble.is_some() {
            (self.gpus, self.groups, self.cordoned) = Default::default();
        }
        self.count();
    }

    /// The node is gone; pods that were on it may still be listed.
    pub fn set_gone(&mut self) {
        (self.gpus, self.groups, self.cordoned) = Default::default();
        self.exists = false;
        self.trouble = Some("the node was removed from the cluster".into());
        self.count();
    }

    fn read(&mut self, gpus: Option<&str>, cordon: Option<&str>) -> Result<(), String> {
        let text = gpus.ok_or_else(|| {
            format!(
                "the node offers no GPU: it has no annotation {}; see that vcuda-device-plugin runs there",
                annotation::NODE_GPUS
            )
        })?;
        let node = NodeGpus::parse(text).map_err(|error: NodeGpusError| error.to_string())?;
        let mut cordoned = Vec::new();
        for name in cordon.unwrap_or("").split(',').map(str::trim).filter(|name| !name.is_empty()) {
            let gpu: GpuUuid = name.parse().map_err(|error| {
                format!("the node's annotation {}: {error}; correct it or remove it", annotation::CORDON)
            })?;
            cordoned.extend(node.gpus.iter().position(|other| other.uuid == gpu));
        }
        self.cordoned = cordoned;
        self.groups = node.groups;
        if !self.groups.iter().any(|group| group.link == Link::Numa) {
            let mut by_numa: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
            for (at, gpu) in node.gpus.iter().enumerate() {
                if let Some(numa) = gpu.numa {
                    by_numa.entry(numa).or_default().push(at);
                }
            }
            let groups = by_numa.into_values().map(|gpus| GpuGroup { link: Link::Numa, gpus });
            self.groups.extend(groups);
        }
        let gpu = |gpu: vcuda_config::NodeGpu| Gpu {
            uuid: gpu.uuid,
            name: gpu.model,
            minor: gpu.minor,
            total_bytes: u64::from(gpu.units) * MEMORY_UNIT_BYTES,
            memory_units: gpu.units,
            numa_node: gpu.numa,
            pci_bus_id: String::new(),
            healthy: gpu.healthy,
            device_nodes: Vec::new(),
        };
        self.gpus = node.gpus.into_iter().map(gpu).collect();
        Ok(())
    }

    /// Puts a pod on the node, or replaces what is known of it.
    pub(crate) fn put(&mut self, uid: &str, pod: PodOnNode) {
        self.pods.insert(uid.into(), pod);
        self.count();
    }

    /// Takes a pod off the node.
    pub(crate) fn take(&mut self, uid: &str) {
        if self.pods.remove(uid).is_some() {
            self.count();
        }
    }

    /// Takes pods off the node that are not to be kept.
    pub(crate) fn keep(&mut self, mut keep: impl FnMut(&PodOnNode) -> bool) {
        let before = self.pods.len();
        self.pods.retain(|_, pod| keep(pod));
        if self.pods.len() != before {
            self.count();
        }
    }

    /// Whether there is nothing to remember of it.
    pub fn is_unused(&self) -> bool {
        !self.exists && self.pods.is_empty()
    }

    /// Counts anew what is taken. A node has few pods, and counting cannot drift.
    fn count(&mut self) {
        (self.used, self.anywhere) = self.counted(|_| true);
    }

    fn counted(&self, count: impl Fn(&str) -> bool) -> (Vec<Held>, Held) {
        let mut used = vec![Held::default(); self.gpus.len()];
        let mut anywhere = Held::default();
        for (_, pod) in self.pods.iter().filter(|(uid, _)| count(uid)) {
            for hold in &pod.holds {
                let at = match hold.on {
                    On::Gpu(bytes) => match self.gpus.iter().position(|gpu| gpu.uuid.bytes() == bytes) {
                        Some(at) => Some(at),
                        // It is not on offer here, and the node starts the pod nowhere else.
                        None => continue,
                    },
                    On::Minor(minor) => self.gpus.iter().position(|gpu| gpu.minor == minor),
                    On::Anywhere => None,
                };
                let held = at.map_or(&mut anywhere, |at| &mut used[at]);
                *held = held.and(hold.held);
            }
        }
        (used, anywhere)
    }

    /// What is left of each GPU.
    pub fn free(&self) -> Vec<GpuFree<'_>> {
        let mut free = Vec::with_capacity(self.gpus.len());
        self.free_into(&mut free);
        free
    }

    /// As [`Node::free`], into a list that is used again and again.
    pub fn free_into<'a>(&'a self, free: &mut Vec<GpuFree<'a>>) {
        free.clear();
        free.extend(left(&self.gpus, &self.used, self.anywhere));
    }

    /// What is left when only the pods count whose UID `count` takes.
    pub fn free_with(&self, count: impl Fn(&str) -> bool) -> Vec<GpuFree<'_>> {
        let (used, anywhere) = self.counted(count);
        left(&self.gpus, &used, anywhere).collect()
    }

    /// Why nothing can be placed here, whatever is free.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// Containers of which nobody knows on which GPU they are.
    pub fn unplaced(&self) -> u32 {
        self.anywhere.shares
    }

    /// Its GPUs.
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// What decides here between GPUs that have room for a pod with such wishes.
    pub fn rules<'a>(&'a self, wanted: &'a Wanted) -> Rules<'a> {
        Rules {
            policy: wanted.policy,
            filter: Some(&wanted.filter),
            cordoned: &self.cordoned,
            groups: &self.groups,
        }
    }

    /// How well the node suits, 0 to [`SCORE_MAX`], when `free` is left on it and the pod fits there.
    ///
    /// Packing likes a full GPU three times as much as a full node; whole GPUs like a fast link among them as much
    /// as a full node. Spreading is the reverse, but for the link.
    pub fn score(&self, free: &[GpuFree<'_>], demand: &Demand, rules: &Rules<'_>) -> u64 {
        if free.is_empty() {
            return 0;
        }
        let spread = rules.policy == Policy::Spread;
        let fullness = |gpu: &GpuFree<'_>| EMPTY - gpu.emptiness().min(EMPTY);
        // At most 64 GPUs of 2000 each.
        let of_node = free.iter().map(fullness).sum::<u64>() / free.len() as u64;
        let turned = |full: u64| if spread { EMPTY - full } else { full };
        let [one] = demand.containers.as_slice() else {
            return turned(of_node) * SCORE_MAX / EMPTY;
        };
        let fit = (0..free.len()).filter(|at| ledger::takes(free, *at, &one.request, rules));
        match gpus_of(&one.request) {
            1 => {
                let of_gpu = fit.map(|at| fullness(&free[at]));
                let of_gpu = if spread { of_gpu.min() } else { of_gpu.max() }.unwrap_or(0);
                (3 * turned(of_gpu) + turned(of_node)) * SCORE_MAX / (4 * EMPTY)
            }
            wanted => {
                let fit: Vec<usize> = fit.collect();
                let holds =
                    |group: &&GpuGroup| fit.iter().filter(|at| group.gpus.contains(at)).count() >= wanted;
                let link = match self.groups.iter().filter(holds).map(|group| group.link).min() {
                    Some(Link::NvLink) => EMPTY,
                    Some(Link::Pcie) => EMPTY / 2,
                    Some(Link::Numa) => EMPTY / 4,
                    None => 0,
                };
                (link + turned(of_node)) * SCORE_MAX / (2 * EMPTY)
            }
        }
    }
}

fn left<'a>(gpus: &'a [Gpu], used: &[Held], anywhere: Held) -> impl Iterator<Item = GpuFree<'a>> {
    gpus.iter().zip(used).map(move |(gpu, used)| {
        let taken = used.and(anywhere);
        GpuFree {
            gpu,
            core: CORE_PER_GPU.saturating_sub(taken.core),
            memory_bytes: gpu.usable_bytes().saturating_sub(taken.memory_bytes),
            shares: taken.shares as usize,
        }
    })
}
