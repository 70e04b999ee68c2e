//! One node: its GPUs, the pods on it, and what is left of each GPU, kept up to date with every change so that a
//! decision reads and never counts.

use std::{
    collections::{BTreeMap, HashMap},
    num::NonZeroU32,
    sync::Arc,
};

use ledger::{Gpu, GpuFilter, GpuFree, LOOSEST, Policy, Rules};
use vcuda_config::{
    CORE_PER_GPU, GpuGroup, GpuUuid, Link, MEMORY_UNIT_BYTES, NodeGpus, NodeGpusError, Request, annotation,
};

use crate::{Held, Hold, On, Wanted, hold::gpus_of, plan};

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
    trouble: Option<Arc<str>>,
    /// By UID.
    pub(crate) pods: HashMap<Box<str>, PodOnNode>,
    /// What is left of each GPU, in the order of `gpus`.
    rooms: Vec<Room>,
    /// Containers of which nobody knows on which GPU they are.
    unplaced: u32,
    /// Whether the cluster has such a node. Pods outlive their node for a while.
    exists: bool,
    /// Whether there has come to be more room on a GPU since this was last set to false.
    pub(crate) roomier: bool,
    /// The list of nodes in which it was last seen.
    pub(crate) seen: u32,
}

/// What is left of a GPU, in few bytes: a question about a large cluster reads that of every GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    /// Bytes of memory that no share holds.
    memory_bytes: u64,
    /// Percent of the compute time that no share holds.
    core: u32,
    /// Shares on it.
    shares: u32,
    /// How full it is, 0 to [`EMPTY`].
    fullness: u16,
    /// Whether it takes new shares at all.
    open: bool,
    /// Whether it can be had whole.
    whole: bool,
}

impl Room {
    /// Whether there is more room than there was in `before`, for any share.
    fn is_more_than(&self, before: &Self) -> bool {
        let more = self.core > before.core || self.memory_bytes > before.memory_bytes;
        self.open && (more || !before.open) || self.whole && !before.whole
    }
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
    /// How far its way to the node is known.
    pub known: Known,
}

/// How far the way of a pod to its node is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    /// Room is reserved. It is being bound, or nobody knows yet whether it was.
    Reserved,
    /// The API server has bound it; the watch has yet to tell of it.
    Bound,
    /// The watch told of it, last in the list of pods with this number.
    Listed(u32),
}

impl Default for Node {
    fn default() -> Self {
        Self {
            gpus: Vec::new(),
            groups: Vec::new(),
            cordoned: Vec::new(),
            trouble: Some("vcuda-scheduler has not seen this node yet; it is tried again".into()),
            pods: HashMap::new(),
            rooms: Vec::new(),
            unplaced: 0,
            exists: false,
            roomier: false,
            seen: 0,
        }
    }
}

impl Node {
    /// Takes over what the node's annotations say.
    pub fn set_annotations(&mut self, annotations: Option<&BTreeMap<String, String>>) {
        let value = |key: &str| annotations.and_then(|map| map.get(key)).map(String::as_str);
        self.exists = true;
        self.trouble =
            self.read(value(annotation::NODE_GPUS), value(annotation::CORDON)).err().map(Into::into);
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

    /// Counts anew what is left. A node has few pods, and counting cannot drift.
    fn count(&mut self) {
        let (rooms, unplaced) = self.counted(|_| true);
        let other_gpus = rooms.len() != self.rooms.len();
        self.roomier |= other_gpus || rooms.iter().zip(&self.rooms).any(|(now, was)| now.is_more_than(was));
        (self.rooms, self.unplaced) = (rooms, unplaced);
    }

    /// What is left of each GPU when only the pods count whose UID `counts`, and how many containers are unplaced.
    fn counted(&self, counts: impl Fn(&str) -> bool) -> (Vec<Room>, u32) {
        let mut used = vec![Held::default(); self.gpus.len()];
        let mut anywhere = Held::default();
        for (_, pod) in self.pods.iter().filter(|(uid, _)| counts(uid)) {
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
        let room = |(at, used): (usize, &Held)| self.room(at, used.and(anywhere));
        (used.iter().enumerate().map(room).collect(), anywhere.shares)
    }

    fn room(&self, at: usize, taken: Held) -> Room {
        let gpu = &self.gpus[at];
        let free = GpuFree {
            gpu,
            core: CORE_PER_GPU.saturating_sub(taken.core),
            memory_bytes: gpu.usable_bytes().saturating_sub(taken.memory_bytes),
            shares: taken.shares as usize,
        };
        let whole = Request::Whole { gpus: NonZeroU32::MIN };
        let open = gpu.healthy && !self.cordoned.contains(&at);
        Room {
            memory_bytes: free.memory_bytes,
            core: free.core,
            shares: taken.shares,
            fullness: u16::try_from(EMPTY.saturating_sub(free.emptiness())).unwrap_or(0),
            open,
            whole: open && ledger::takes(&[free], 0, &whole, &Rules::default()),
        }
    }

    /// What is left of each GPU.
    pub fn free(&self) -> Vec<GpuFree<'_>> {
        self.free_in(&self.rooms)
    }

    /// As [`Node::free`], when `rooms` are left.
    pub(crate) fn free_in(&self, rooms: &[Room]) -> Vec<GpuFree<'_>> {
        (0..self.gpus.len().min(rooms.len())).map(|at| self.free_at(rooms, at)).collect()
    }

    fn free_at(&self, rooms: &[Room], at: usize) -> GpuFree<'_> {
        let (gpu, room) = (&self.gpus[at], &rooms[at]);
        GpuFree { gpu, core: room.core, memory_bytes: room.memory_bytes, shares: room.shares as usize }
    }

    /// What is left of each GPU.
    pub(crate) fn rooms(&self) -> &[Room] {
        &self.rooms
    }

    /// What is left of each GPU when only the pods count whose UID `counts`.
    pub(crate) fn rooms_with(&self, counts: impl Fn(&str) -> bool) -> Vec<Room> {
        self.counted(counts).0
    }

    /// Whether a pod fits when `rooms` are left. For a pod with one share it allocates nothing.
    pub(crate) fn fits(&self, rooms: &[Room], wanted: &Wanted) -> bool {
        match wanted.demand.containers.as_slice() {
            [] => true,
            [one] => {
                let gpus = gpus_of(&one.request);
                self.takers(rooms, &one.request, &wanted.filter).take(gpus).count() == gpus
            }
            _ => plan(&self.free_in(rooms), &wanted.demand, &self.rules(wanted)).is_ok(),
        }
    }

    /// Positions of the GPUs that take `request`, or a GPU's worth of it: as [`ledger::takes`] has it.
    pub(crate) fn takers<'a>(
        &'a self,
        rooms: &'a [Room],
        request: &'a Request,
        filter: &'a GpuFilter,
    ) -> impl Iterator<Item = usize> + 'a {
        let least = Held::by(request);
        let any = filter.is_empty();
        let has_room = move |room: &Room| match request {
            Request::Share { .. } => {
                room.open && room.core >= least.core && room.memory_bytes >= least.memory_bytes
            }
            Request::Whole { .. } => room.whole,
        };
        let fit = rooms.iter().enumerate().filter(move |(_, room)| has_room(room));
        fit.map(|(at, _)| at).filter(move |at| any || filter.rules_out(&self.gpus[*at]).is_none())
    }

    /// Why nothing can be placed here, whatever is free.
    pub fn trouble(&self) -> Option<&Arc<str>> {
        self.trouble.as_ref()
    }

    /// Containers of which nobody knows on which GPU they are.
    pub fn unplaced(&self) -> u32 {
        self.unplaced
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

    /// How well the node suits, when `rooms` are left on it and the pod fits there: more is better, and figures of one
    /// pod can be compared.
    ///
    /// Packing likes a GPU that a share fills well, and then a full node; whole GPUs like a fast link among them as
    /// much as a full node. Spreading is the reverse, but for the link.
    pub(crate) fn fitness(&self, rooms: &[Room], wanted: &Wanted) -> u64 {
        if rooms.is_empty() {
            return 0;
        }
        let turned = |full: u64| if wanted.policy == Policy::Spread { EMPTY - full } else { full };
        let fullness = |room: &Room| u64::from(room.fullness);
        let of_node = turned(rooms.iter().map(fullness).sum::<u64>() / rooms.len() as u64);
        let [one] = wanted.demand.containers.as_slice() else { return of_node };
        let mut takers = self.takers(rooms, &one.request, &wanted.filter);
        match (gpus_of(&one.request), wanted.policy) {
            (1, Policy::Pack) => {
                let looseness = |at: usize| self.free_at(rooms, at).looseness(&one.request);
                of_node + 3 * (LOOSEST - takers.map(looseness).min().unwrap_or(LOOSEST))
            }
            (1, Policy::Spread) => {
                of_node + 3 * takers.map(|at| turned(fullness(&rooms[at]))).max().unwrap_or(0)
            }
            (gpus, _) => {
                let closest = if self.groups.is_empty() { None } else { self.closest(takers.by_ref(), gpus) };
                let link = match closest {
                    Some(Link::NvLink) => EMPTY,
                    Some(Link::Pcie) => EMPTY / 2,
                    Some(Link::Numa) => EMPTY / 4,
                    None => 0,
                };
                link + of_node
            }
        }
    }

    /// The fastest link of a group that has `wanted` of the GPUs at `fit`.
    fn closest(&self, fit: impl Iterator<Item = usize>, wanted: usize) -> Option<Link> {
        let fit: Vec<usize> = fit.collect();
        let holds = |group: &&GpuGroup| fit.iter().filter(|at| group.gpus.contains(at)).count() >= wanted;
        self.groups.iter().filter(holds).map(|group| group.link).min()
    }
}
