//! What happens on a node: kubelet starts and ends containers, containerd and the NRI plugin die and come back, GPUs fall
//! ill, the device plugin says what there is.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    panic::{self, AssertUnwindSafe},
};

use ledger::{
    BindError, ContainerRef, Driver, Gpu, Inventory, Ledger, Live, PodLife, PodRef, SandboxEnd, ShareName,
    ShareRecord, ShareState, Terms, Wishes,
};
use scheduler::{ContainerDemand, Role};
use tempfile::TempDir;
use vcuda_config::{GpuUuid, PodPlacement, annotation};

use super::{Event, GPUS, NODES, Node, Pod, Told, UNITS, World, gpu};

impl Node {
    pub(super) fn new(node: usize) -> Self {
        let one = |n: u8| Gpu {
            uuid: gpu(node, n),
            name: "A100".into(),
            minor: n.into(),
            total_bytes: 0,
            memory_units: UNITS - u32::from(n),
            numa_node: None,
            pci_bus_id: String::new(),
            healthy: true,
            device_nodes: Vec::new(),
        };
        let driver = Driver { version: "550.163.01".into(), library_dir: "/usr/lib".into() };
        let inventory = Inventory::new("boot".into(), driver, Vec::new(), (0..GPUS).map(one).collect());
        Self {
            folder: TempDir::new().unwrap(),
            ledger: None,
            inventory,
            boot: 0,
            kubelet: true,
            containerd: true,
            // As a cluster of old and new machines.
            lists_all: node > 0,
            old_sandboxes: BTreeSet::new(),
            told: Vec::new(),
        }
    }

    /// What the NRI plugin does when it is told.
    pub(super) fn tell(&mut self, what: Told) {
        let Some(ledger) = self.ledger.as_ref().filter(|_| self.containerd) else { return };
        match &what {
            Told::Stopped(id) => drop(ledger.mark_stopped(id).unwrap()),
            Told::Ended(id, end) => drop(ledger.end_sandbox(id, *end).unwrap()),
        }
        self.told.push(what);
    }

    pub(super) fn annotations(&self) -> BTreeMap<String, String> {
        let cordon: Vec<_> = self.inventory.cordoned.iter().map(GpuUuid::as_str).collect();
        BTreeMap::from([
            (annotation::NODE_GPUS.to_owned(), self.inventory.node_gpus(Vec::new()).to_text()),
            (annotation::CORDON.to_owned(), cordon.join(",")),
        ])
    }
}

impl World {
    /// The NRI plugin starts, and learns from the runtime what lives, if that is there.
    pub(super) fn start_nri(&mut self, n: usize) {
        let boot = format!("boot-{}", self.nodes[n].boot);
        let ledger = Ledger::open_in_boot(&self.nodes[n].folder.path().join("shares"), boot).unwrap();
        self.nodes[n].ledger = Some(ledger);
        self.synchronize(n);
    }

    /// The runtime lists what lives.
    pub(super) fn synchronize(&mut self, n: usize) {
        let Some(ledger) = self.nodes[n].ledger.as_ref().filter(|_| self.nodes[n].containerd) else { return };
        let taken_at = ledger::uptime_ms() + 1;
        let mut live = Live { taken_at, complete: self.nodes[n].lists_all, ..Live::default() };
        for (uid, pod) in self.pods.iter().filter(|(_, pod)| pod.node == Some(n)) {
            live.pods.insert(uid.clone(), PodLife::Up);
            live.containers.extend(pod.running.values().map(|(id, _)| id.clone()));
        }
        ledger.prune(&live).unwrap();
    }

    /// containerd dies, or comes back: without the state of its sandboxes, and with a list for the NRI plugin.
    pub(super) fn restart_containerd(&mut self, n: usize) {
        let node = &mut self.nodes[n];
        node.containerd = !node.containerd;
        if !node.containerd {
            return self.count("containerd killed");
        }
        let here = self.pods.iter().filter(|(_, pod)| pod.node == Some(n));
        node.old_sandboxes = here.map(|(uid, pod)| pod_ref(uid, pod).sandbox_id).collect();
        self.synchronize(n);
    }

    /// Kubelet dies, or comes back, and ends once more what it does not remember to have ended.
    pub(super) fn restart_kubelet(&mut self, n: usize) {
        self.nodes[n].kubelet = !self.nodes[n].kubelet;
        if !self.nodes[n].kubelet {
            return self.count("kubelet killed");
        }
        for _ in 0..3 {
            self.tell_again(n);
        }
    }

    /// An event comes once more, however old it is.
    pub(super) fn tell_again(&mut self, n: usize) {
        let at = self.random.below(self.nodes[n].told.len());
        let Some(what) = self.nodes[n].told.get(at).cloned() else { return };
        if self.nodes[n].ledger.is_some() && self.nodes[n].containerd {
            self.nodes[n].tell(what);
            self.nodes[n].told.pop();
            self.count("told twice");
        }
    }

    /// Kubelet starts the next container of a pod, and the NRI plugin binds its share, or is killed at it.
    pub(super) fn start(&mut self) {
        let Some(uid) = self.any_pod(|pod| pod.node.is_some()) else { return };
        let pod = &self.pods[&uid];
        let n = pod.node.unwrap();
        if !self.nodes[n].kubelet || !self.nodes[n].containerd {
            return;
        }
        let Some(next) = next_container(pod) else { return };
        let placement: Option<PodPlacement> =
            pod.annotations.get(annotation::PLACEMENT).map(|text| text.parse().unwrap());
        let must = placement.map(|it| it.gpus(&next.name).to_vec()).filter(|gpus| !gpus.is_empty());
        self.attempts += 1;
        let claim = ledger::Claim {
            pod: pod_ref(&uid, pod),
            container: ContainerRef { name: next.name.clone(), id: format!("{uid}-{}", self.attempts) },
            request: next.request,
            terms: Terms::default(),
            wishes: Wishes::default(),
        };
        let killed = self.random.chance(25);
        let node = &self.nodes[n];
        // Without the NRI plugin, kubelet tries again later.
        let Some(ledger) = &node.ledger else { return };
        let bound = panic::catch_unwind(AssertUnwindSafe(|| {
            ledger.bind(&node.inventory, &claim, must.as_deref().unwrap_or_default(), |record, folder| {
                fs::write(folder.limits(), "x")?;
                if killed {
                    // Without the hook of a panic, which would print each.
                    panic::resume_unwind(Box::new(()));
                }
                let obeyed = must.as_ref().is_none_or(|must| {
                    must.len() == record.gpus.len() && record.gpus.iter().all(|gpu| must.contains(&gpu.uuid))
                });
                if obeyed { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
            })
        }));
        match bound {
            Err(_) => {
                self.count("nri killed while binding");
                self.nodes[n].ledger = None;
            }
            Ok(Ok(bound)) => {
                let gpus: Vec<_> = bound.record.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
                if self.random.chance(30) {
                    // Killed after it: the container is never made, and kubelet tries again.
                    self.nodes[n].ledger = None;
                    return self.count("nri killed after binding");
                }
                self.count("started");
                let pod = self.pods.get_mut(&uid).unwrap();
                pod.running.insert(next.name, (claim.container.id, gpus));
            }
            Ok(Err(BindError::Fill { .. } | BindError::NoRoom(_))) => {
                let sick = |gpu: &GpuUuid| {
                    !node.inventory.gpu(gpu).unwrap().healthy || node.inventory.cordoned.contains(gpu)
                };
                let left = self.left_by_init(n);
                let must = must.unwrap_or_default();
                // The pod's own init container, whose end nobody heard, stands in its way until the next list of the
                // runtime's that is not too young to tell.
                let own = |name: &String| {
                    let shares = self.nodes[n].ledger.as_ref().unwrap().shares().unwrap();
                    let record = shares.records.get(&ShareName::new(&uid, name).unwrap());
                    record.is_some_and(|record| record.state == ShareState::Running)
                };
                let waits = self.pods[&uid].done.iter().any(own);
                if node.lists_all {
                    assert!(!waits && left.is_empty(), "{uid}: {left:?}");
                }
                let in_doubt = |gpu: &GpuUuid| sick(gpu) || left.contains_key(gpu);
                let excused = self.with_foreign || waits || must.iter().any(in_doubt);
                let shares = self.nodes[n].ledger.as_ref().unwrap().shares().unwrap();
                // Of a pod that was deleted after a reboot before all its containers were back, or after a restart of
                // containerd. While there are such shares the NRI plugin asks the runtime for its list.
                let gone = |name: &ShareName| !self.pods.contains_key(name.pod_uid());
                let boot = format!("boot-{}", self.nodes[n].boot);
                let untold = |record: &ShareRecord| {
                    record.boot_id != boot || self.nodes[n].old_sandboxes.contains(&record.pod.sandbox_id)
                };
                if shares.records.iter().any(|(name, record)| gone(name) && untold(record)) {
                    self.synchronize(n);
                    let shares = self.nodes[n].ledger.as_ref().unwrap().shares().unwrap();
                    assert!(shares.records.keys().all(|name| self.pods.contains_key(name.pod_uid())));
                    return self.count("listed for shares whose end nobody told");
                }
                if !excused {
                    for (name, record) in &shares.records {
                        let pod = self.pods.get(name.pod_uid());
                        let asked = pod.map(|pod| &pod.wanted.demand.containers);
                        let says = pod.and_then(|pod| pod.annotations.get(annotation::PLACEMENT));
                        println!("{name}: {:?} {:?}, {asked:?}, {says:?}", record.state, record.gpus);
                    }
                    panic!("the scheduler's choice for {uid}, {must:?}, does not fit on node {n}");
                }
                self.count("refused by the node");
            }
            Ok(Err(error)) => panic!("{error}"),
        }
    }

    /// What init containers still hold beside containers that came after them: nobody heard their end, since the NRI
    /// plugin was down, and the list of the runtime's was not one to conclude from, so they did not give way. It is
    /// given back with the pod. Whether a container is an init container, the runtime does not tell.
    pub(super) fn left_by_init(&self, n: usize) -> BTreeMap<GpuUuid, (u32, u64)> {
        let mut left: BTreeMap<GpuUuid, (u32, u64)> = BTreeMap::new();
        let shares = self.nodes[n].ledger.as_ref().unwrap().shares().unwrap();
        for (name, record) in &shares.records {
            let Some(pod) = self.pods.get(name.pod_uid()) else { continue };
            let containers = &pod.wanted.demand.containers;
            let at = containers.iter().position(|one| one.name == name.container()).unwrap();
            let has_share = |one: &ContainerDemand| {
                shares.records.contains_key(&ShareName::new(name.pod_uid(), &one.name).unwrap())
            };
            if containers[at].role == Role::Init && containers[at + 1..].iter().any(has_share) {
                for gpu in &record.gpus {
                    let entry = left.entry(gpu.uuid.clone()).or_default();
                    *entry = (entry.0 + gpu.core, entry.1 + gpu.memory_bytes);
                }
            }
        }
        left
    }

    /// A container ends: an init container for good, another to be restarted. The event is lost when nobody hears it.
    pub(super) fn end(&mut self) {
        let Some(uid) = self.any_pod(|pod| !pod.running.is_empty()) else { return };
        let pod = self.pods.get_mut(&uid).unwrap();
        let names: Vec<_> = pod.running.keys().cloned().collect();
        let ended = names[self.random.below(names.len())].clone();
        let (id, _) = pod.running.remove(&ended).unwrap();
        let role = pod.wanted.demand.containers.iter().find(|one| one.name == ended).unwrap().role;
        if role == Role::Init {
            pod.done.insert(ended);
        }
        let n = pod.node.unwrap();
        self.nodes[n].tell(Told::Stopped(id));
    }

    /// A pod is deleted: kubelet ends its sandbox, and then the object goes. Without kubelet, or containerd, it stays.
    pub(super) fn delete(&mut self) {
        let up = self.nodes.iter().map(|node| node.kubelet && node.containerd).collect::<Vec<_>>();
        let Some(uid) = self.any_pod(|pod| pod.node.is_none_or(|n| up[n])) else { return };
        let pod = self.pods.remove(&uid).unwrap();
        let Some(n) = pod.node else { return };
        let sandbox = pod_ref(&uid, &pod).sandbox_id;
        let killed = self.random.chance(10);
        let node = &mut self.nodes[n];
        for (id, _) in pod.running.values() {
            node.tell(Told::Stopped(id.clone()));
        }
        if killed {
            node.ledger = None;
        } else if !node.old_sandboxes.contains(&sandbox) {
            node.tell(Told::Ended(sandbox.clone(), SandboxEnd::Stopped));
            node.tell(Told::Ended(sandbox, SandboxEnd::Removed));
        }
        self.events.push(Event::Deleted(uid, n));
        self.count("deleted");
    }

    /// The machine loses power: nothing runs, kubelet makes all anew, on the same GPUs.
    pub(super) fn reboot(&mut self) {
        let n = self.random.below(NODES);
        let node = &mut self.nodes[n];
        node.boot += 1;
        node.ledger = None;
        (node.kubelet, node.containerd) = (true, true);
        node.old_sandboxes.clear();
        for pod in self.pods.values_mut().filter(|pod| pod.node == Some(n)) {
            pod.running.clear();
            pod.done.clear();
            pod.sandbox += 1;
        }
        self.count("rebooted");
    }

    /// The device plugin writes on pods where their shares are, and what the node has.
    pub(super) fn device_plugin(&mut self, n: usize) {
        let Some(ledger) = &self.nodes[n].ledger else { return };
        let shares = ledger.shares().unwrap();
        let mut told = BTreeSet::new();
        for record in shares.records.values() {
            let Some(pod) = self.pods.get_mut(&record.pod.uid) else { continue };
            let text = pod.annotations.get(annotation::PLACEMENT);
            let mut placement: PodPlacement = text.map(|text| text.parse().unwrap()).unwrap_or_default();
            let gpus: Vec<_> = record.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
            let said = placement.gpus(&record.container.name);
            if said.len() != gpus.len() || !gpus.iter().all(|gpu| said.contains(gpu)) {
                placement.containers.insert(record.container.name.clone(), gpus);
                pod.annotations.insert(annotation::PLACEMENT.into(), placement.to_string());
                told.insert(record.pod.uid.clone());
            }
        }
        for uid in told {
            self.tell(&uid);
        }
        self.events.push(Event::Node(n, self.nodes[n].annotations()));
    }

    pub(super) fn trouble(&mut self) {
        let (n, g) = (self.random.below(NODES), self.random.below(GPUS.into()));
        let (sick, well) = (self.random.chance(2), self.random.chance(2));
        let inventory = &mut self.nodes[n].inventory;
        let uuid = inventory.gpus[g].uuid.clone();
        if sick {
            inventory.gpus[g].healthy = well;
        } else if !inventory.cordoned.contains(&uuid) && !well {
            inventory.cordoned = vec![uuid];
        } else {
            inventory.cordoned.clear();
        }
    }
}

pub(super) fn pod_ref(uid: &str, pod: &Pod) -> PodRef {
    let sandbox_id = format!("{uid}-{}", pod.sandbox);
    PodRef { uid: uid.into(), namespace: "default".into(), name: uid.into(), sandbox_id }
}

/// The container that kubelet would start next.
pub(super) fn next_container(pod: &Pod) -> Option<ContainerDemand> {
    for container in &pod.wanted.demand.containers {
        let over = pod.done.contains(&container.name);
        let runs = pod.running.contains_key(&container.name);
        match (container.role, over, runs) {
            (Role::Init, true, _) => {}
            // The others wait for its end.
            (Role::Init, false, true) => return None,
            (_, _, true) => {}
            (_, _, false) => return Some(container.clone()),
        }
    }
    None
}
