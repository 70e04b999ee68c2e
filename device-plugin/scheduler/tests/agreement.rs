//! The scheduler's books and the nodes' ledgers, the real ones, over one long random history: pods of all sizes come,
//! are bound, start, restart, end and are deleted; every part is killed between any two steps, kubelet and containerd
//! too, and what happens then is told late, twice or never; GPUs fall ill and are cordoned. No GPU is promised past what it has, no running container loses its GPU, no ghost stays, and in the end
//! scheduler and nodes say the same. `VCUDA_MODEL_STEPS` names the number of steps, `VCUDA_MODEL_SEED` the history.

#![expect(clippy::unwrap_used, reason = "an assertion, in a test")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    panic::{self, AssertUnwindSafe},
    time::{Duration, Instant},
};

use ledger::{
    BindError, ContainerRef, Driver, Gpu, Inventory, Ledger, Live, PodLife, PodRef, SandboxEnd, ShareName,
    ShareRecord, ShareState, Terms, Wishes,
};
use scheduler::{
    BoundPod, Claim, Cluster, ContainerDemand, Demand, Found, Reservation, Role, Seen, Wanted, holds_of_bound,
};
use tempfile::TempDir;
use vcuda_config::{GpuUuid, PodPlacement, Request, annotation};

const NODES: usize = 3;
const GPUS: u8 = 4;
const UNITS: u32 = 16;
const PODS_MAX: usize = 60;
const EXPIRY: Duration = Duration::from_secs(60);

/// Steps of an ordinary run.
const STEPS: u64 = 3_000;

/// Steps between two looks at everything.
const QUIET_EVERY: u64 = 250;

/// A generator of numbers that anybody can repeat (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n.max(1) as u64).unwrap()
    }

    fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }
}

/// A pod, as the API server has it, and as its node runs it.
#[derive(Clone)]
struct Pod {
    wanted: Wanted,
    node: Option<usize>,
    annotations: BTreeMap<String, String>,
    /// Bound by another scheduler, which knows of no GPU.
    foreign: bool,
    sandbox: u32,
    /// Where each container runs that does.
    running: BTreeMap<String, (String, Vec<GpuUuid>)>,
    /// Init containers that have ended.
    done: BTreeSet<String>,
}

struct Node {
    folder: TempDir,
    /// None while the NRI plugin is down.
    ledger: Option<Ledger>,
    inventory: Inventory,
    boot: u32,
    /// While kubelet is down nothing is started or deleted.
    kubelet: bool,
    /// While containerd is down nobody hears of anything, and what runs runs on.
    containerd: bool,
    /// Whether containerd creates no container while it lists them, see [`Live::complete`].
    lists_all: bool,
    /// Sandboxes from before containerd's last start: it no longer tells of their end.
    old_sandboxes: BTreeSet<String>,
    /// What containerd has told of, to be told once more.
    told: Vec<Told>,
}

/// What containerd tells the NRI plugin.
#[derive(Clone)]
enum Told {
    Stopped(String),
    Ended(String, SandboxEnd),
}

enum Event {
    Set(BoundPod),
    Deleted(String, usize),
    Node(usize, BTreeMap<String, String>),
}

struct World {
    random: Random,
    nodes: Vec<Node>,
    pods: BTreeMap<String, Pod>,
    created: u64,
    attempts: u64,
    events: Vec<Event>,
    cluster: Cluster,
    binds: Vec<(Claim, Reservation)>,
    now: Instant,
    with_foreign: bool,
    /// What happened, to see that all of it does.
    counts: BTreeMap<&'static str, u64>,
}

fn gpu(node: usize, n: u8) -> GpuUuid {
    GpuUuid::from_bytes([u8::try_from(node).unwrap() * 16 + n; 16])
}

fn name(node: usize) -> String {
    format!("node-{node}")
}

fn index(name: &str) -> usize {
    name.trim_start_matches("node-").parse().unwrap()
}

fn pod_ref(uid: &str, pod: &Pod) -> PodRef {
    let sandbox_id = format!("{uid}-{}", pod.sandbox);
    PodRef { uid: uid.into(), namespace: "default".into(), name: uid.into(), sandbox_id }
}

impl Node {
    fn new(node: usize) -> Self {
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
    fn tell(&mut self, what: Told) {
        let Some(ledger) = self.ledger.as_ref().filter(|_| self.containerd) else { return };
        match &what {
            Told::Stopped(id) => drop(ledger.mark_stopped(id).unwrap()),
            Told::Ended(id, end) => drop(ledger.end_sandbox(id, *end).unwrap()),
        }
        self.told.push(what);
    }

    fn annotations(&self) -> BTreeMap<String, String> {
        let cordon: Vec<_> = self.inventory.cordoned.iter().map(GpuUuid::as_str).collect();
        BTreeMap::from([
            (annotation::NODE_GPUS.to_owned(), self.inventory.node_gpus(Vec::new()).to_text()),
            (annotation::CORDON.to_owned(), cordon.join(",")),
        ])
    }
}

impl World {
    fn new(seed: u64, with_foreign: bool) -> Self {
        let mut world = Self {
            random: Random(seed),
            nodes: (0..NODES).map(Node::new).collect(),
            pods: BTreeMap::new(),
            created: 0,
            attempts: 0,
            events: Vec::new(),
            cluster: Cluster::default(),
            binds: Vec::new(),
            now: Instant::now(),
            with_foreign,
            counts: BTreeMap::new(),
        };
        (0..NODES).for_each(|node| world.start_nri(node));
        world.start_scheduler();
        world
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// A fresh scheduler reads everything.
    fn start_scheduler(&mut self) {
        self.events.clear();
        self.cluster = Cluster::default();
        self.cluster.begin_nodes();
        for (n, node) in self.nodes.iter().enumerate() {
            self.cluster.set_node(&name(n), Some(&node.annotations()));
        }
        self.cluster.end_nodes();
        self.list();
    }

    fn list(&mut self) {
        self.events.retain(|event| matches!(event, Event::Node(..)));
        self.cluster.begin_pods();
        for (uid, pod) in &self.pods {
            if let Some(bound) = bound_pod(uid, pod) {
                self.cluster.set_pod(bound);
            }
        }
        self.cluster.end_pods();
    }

    fn watch(&mut self, events: usize) {
        let events = events.min(self.events.len());
        for event in self.events.drain(..events) {
            match event {
                Event::Set(pod) => self.cluster.set_pod(pod),
                Event::Deleted(uid, node) => self.cluster.remove_pod(&uid, &name(node)),
                Event::Node(node, annotations) => self.cluster.set_node(&name(node), Some(&annotations)),
            }
        }
    }

    fn tell(&mut self, uid: &str) {
        if let Some(bound) = self.pods.get(uid).and_then(|pod| bound_pod(uid, pod)) {
            self.events.push(Event::Set(bound));
        }
    }

    /// The NRI plugin starts, and learns from the runtime what lives, if that is there.
    fn start_nri(&mut self, n: usize) {
        let boot = format!("boot-{}", self.nodes[n].boot);
        let ledger = Ledger::open_in_boot(&self.nodes[n].folder.path().join("shares"), boot).unwrap();
        self.nodes[n].ledger = Some(ledger);
        self.synchronize(n);
    }

    /// The runtime lists what lives.
    fn synchronize(&mut self, n: usize) {
        let Some(ledger) = self.nodes[n].ledger.as_ref().filter(|_| self.nodes[n].containerd) else { return };
        let taken_at = ledger::milliseconds_since_1970() + 1;
        let mut live = Live { taken_at, complete: self.nodes[n].lists_all, ..Live::default() };
        for (uid, pod) in self.pods.iter().filter(|(_, pod)| pod.node == Some(n)) {
            live.pods.insert(uid.clone(), PodLife::Up);
            live.containers.extend(pod.running.values().map(|(id, _)| id.clone()));
        }
        ledger.prune(&live).unwrap();
    }

    /// containerd dies, or comes back: without the state of its sandboxes, and with a list for the NRI plugin.
    fn restart_containerd(&mut self, n: usize) {
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
    fn restart_kubelet(&mut self, n: usize) {
        self.nodes[n].kubelet = !self.nodes[n].kubelet;
        if !self.nodes[n].kubelet {
            return self.count("kubelet killed");
        }
        for _ in 0..3 {
            self.tell_again(n);
        }
    }

    /// An event comes once more, however old it is.
    fn tell_again(&mut self, n: usize) {
        let at = self.random.below(self.nodes[n].told.len());
        let Some(what) = self.nodes[n].told.get(at).cloned() else { return };
        if self.nodes[n].ledger.is_some() && self.nodes[n].containerd {
            self.nodes[n].tell(what);
            self.nodes[n].told.pop();
            self.count("told twice");
        }
    }

    fn any_pod(&mut self, choose: impl Fn(&Pod) -> bool) -> Option<String> {
        let mut fit: Vec<_> =
            self.pods.iter().filter(|(_, pod)| choose(pod)).map(|(uid, _)| uid.clone()).collect();
        let at = self.random.below(fit.len());
        (!fit.is_empty()).then(|| fit.swap_remove(at))
    }

    fn create(&mut self) {
        if self.pods.len() >= PODS_MAX {
            return;
        }
        let mut containers = Vec::new();
        let roles: &[Role] = match self.random.below(8) {
            0 => &[Role::Init, Role::App],
            1 => &[Role::App, Role::App],
            2 => &[Role::Sidecar, Role::Init, Role::App],
            _ => &[Role::App],
        };
        for (at, role) in roles.iter().enumerate() {
            let request = if roles.len() == 1 && self.random.chance(8) {
                Request::new(if self.random.chance(3) { 200 } else { 100 }, 0)
            } else {
                let core = 1 + u32::try_from(self.random.below(60)).unwrap();
                Request::new(core, 1 + u32::try_from(self.random.below(9)).unwrap())
            };
            containers.push(ContainerDemand {
                name: format!("c{at}"),
                request: request.unwrap(),
                role: *role,
            });
        }
        let wanted = Wanted { demand: Demand { containers }, ..Wanted::default() };
        self.created += 1;
        self.pods.insert(
            format!("pod-{:06}", self.created),
            Pod {
                wanted,
                node: None,
                annotations: BTreeMap::new(),
                foreign: false,
                sandbox: 0,
                running: BTreeMap::new(),
                done: BTreeSet::new(),
            },
        );
    }

    fn reserve(&mut self) {
        let Some(uid) = self.any_pod(|pod| pod.node.is_none()) else { return };
        let wanted = self.pods[&uid].wanted.clone();
        let names: Vec<String> = (0..NODES).map(name).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let fit: Vec<String> =
            self.cluster.filter(&uid, &wanted, &names).fit.into_iter().map(Into::into).collect();
        if fit.is_empty() {
            return self.count("fits nowhere");
        }
        let node = fit[self.random.below(fit.len())].clone();
        let claim = Claim { uid: uid.clone(), node };
        if let Ok(reservation) = self.cluster.reserve(&claim, "default", &uid, &wanted, 0, self.now) {
            self.binds.push((claim, reservation));
        }
    }

    /// What the API server does with a binding.
    fn post(&mut self, claim: &Claim, placement: &PodPlacement) -> bool {
        let Some(pod) = self.pods.get_mut(&claim.uid).filter(|pod| pod.node.is_none()) else { return false };
        pod.node = Some(index(&claim.node));
        pod.annotations.insert(annotation::PLACEMENT.into(), placement.to_string());
        self.tell(&claim.uid);
        true
    }

    fn answer(&mut self) {
        if self.binds.is_empty() {
            return;
        }
        let at = self.random.below(self.binds.len());
        let (claim, reservation) = self.binds.swap_remove(at);
        match self.random.below(10) {
            0 => self.cluster.refused(&claim),
            1 => drop(self.post(&claim, &reservation.placement)),
            2 => {}
            _ if self.post(&claim, &reservation.placement) => {
                self.count("bound");
                self.cluster.bound(&claim);
            }
            _ => {
                let seen = self.seen(&claim.uid);
                if self.cluster.book(&claim, seen) != Found::Here {
                    self.cluster.refused(&claim);
                }
            }
        }
    }

    /// What the API server says of a pod.
    fn seen(&self, uid: &str) -> Seen {
        self.pods.get(uid).map_or(Seen::Gone, |pod| bound_pod(uid, pod).map_or(Seen::Waiting, Seen::Bound))
    }

    fn expire(&mut self) {
        // No bind is under way for as long as that.
        while !self.binds.is_empty() {
            self.answer();
        }
        self.now += EXPIRY;
        for (claim, reservation) in self.cluster.expired(self.now, EXPIRY) {
            let seen = self.seen(&claim.uid);
            match self.cluster.book(&claim, seen) {
                Found::Here => self.cluster.postpone(&claim, self.now),
                _ => self.cluster.lapse(&claim, reservation.attempt),
            }
        }
    }

    /// Another scheduler, which counts no GPUs, binds a pod.
    fn foreign(&mut self) {
        if !self.with_foreign {
            return;
        }
        let Some(uid) = self.any_pod(|pod| pod.node.is_none()) else { return };
        let node = self.random.below(NODES);
        let pod = self.pods.get_mut(&uid).unwrap();
        (pod.node, pod.foreign) = (Some(node), true);
        self.tell(&uid);
    }

    /// Kubelet starts the next container of a pod, and the NRI plugin binds its share, or is killed at it.
    fn start(&mut self) {
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
    fn left_by_init(&self, n: usize) -> BTreeMap<GpuUuid, (u32, u64)> {
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
    fn end(&mut self) {
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
    fn delete(&mut self) {
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
    fn reboot(&mut self) {
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
    fn device_plugin(&mut self, n: usize) {
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

    fn trouble(&mut self) {
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

    fn step(&mut self) {
        match self.random.below(100) {
            0..14 => self.create(),
            14..34 => self.reserve(),
            34..52 => self.answer(),
            52..74 => self.start(),
            74..80 => self.end(),
            80..86 => self.delete(),
            86..91 => {
                let events = self.random.below(8);
                self.watch(events);
            }
            91 => self.list(),
            92 => self.foreign(),
            93 => {
                let n = self.random.below(NODES);
                self.nodes[n].ledger = None;
                self.count("nri killed");
            }
            94..96 => {
                let n = self.random.below(NODES);
                self.start_nri(n);
            }
            96 => {
                let n = self.random.below(NODES);
                self.device_plugin(n);
            }
            97 => match self.random.below(8) {
                0 => self.reboot(),
                1 => self.expire(),
                2 => self.trouble(),
                3 => {
                    let n = self.random.below(NODES);
                    self.tell_again(n);
                }
                4 | 5 => {
                    let n = self.random.below(NODES);
                    self.restart_kubelet(n);
                }
                _ => {
                    let n = self.random.below(NODES);
                    self.restart_containerd(n);
                }
            },
            98 => {
                for (claim, reservation) in std::mem::take(&mut self.binds) {
                    if self.random.chance(2) {
                        self.post(&claim, &reservation.placement);
                    }
                }
                self.start_scheduler();
                self.count("scheduler killed");
            }
            _ => {
                let n = self.random.below(NODES);
                if self.nodes[n].ledger.is_none() {
                    self.start_nri(n);
                }
                // Nobody leaves them down for long.
                if !self.nodes[n].containerd {
                    self.restart_containerd(n);
                }
                if !self.nodes[n].kubelet {
                    self.restart_kubelet(n);
                }
            }
        }
    }

    /// No GPU is promised past what it has, and whatever runs has its share where it started.
    fn check(&self) {
        for (n, node) in self.nodes.iter().enumerate() {
            let Some(ledger) = &node.ledger else { continue };
            let shares = ledger.shares().unwrap();
            assert!(shares.unreadable.is_empty() && shares.foreign.is_empty(), "node {n}");
            for gpu in &node.inventory.gpus {
                let held = shares.records.values().flat_map(|it| &it.gpus).filter(|it| it.uuid == gpu.uuid);
                let (core, bytes) =
                    held.fold((0, 0), |(core, bytes), it| (core + it.core, bytes + it.memory_bytes));
                assert!(
                    core <= 100 && bytes <= gpu.usable_bytes(),
                    "{}: {core} core, {bytes} bytes",
                    gpu.uuid
                );
            }
            for (uid, pod) in self.pods.iter().filter(|(_, pod)| pod.node == Some(n)) {
                for (container, (id, gpus)) in &pod.running {
                    let share = ShareName::new(uid, container).unwrap();
                    let record = shares.records.get(&share).unwrap_or_else(|| panic!("{share} was lost"));
                    let there: Vec<_> = record.gpus.iter().map(|gpu| &gpu.uuid).collect();
                    assert_eq!((&record.container.id, record.state), (id, ShareState::Running), "{share}");
                    assert_eq!(there, gpus.iter().collect::<Vec<_>>(), "{share}");
                }
            }
        }
    }

    /// Everything catches up; then nothing may be left over, and nobody may count less than there is.
    fn settle(&mut self) {
        let mut compared = 0;
        for n in 0..NODES {
            if !self.nodes[n].containerd {
                self.restart_containerd(n);
            }
            self.nodes[n].kubelet = true;
            self.nodes[n].told.clear();
        }
        (0..NODES).for_each(|n| self.start_nri(n));
        (0..NODES).for_each(|n| self.device_plugin(n));
        self.watch(usize::MAX);
        self.expire();
        self.watch(usize::MAX);
        self.check();
        assert_eq!(self.cluster.figures().reservations, 0);
        for (n, node) in self.nodes.iter().enumerate() {
            let shares = node.ledger.as_ref().unwrap().shares().unwrap();
            for name in shares.records.keys() {
                let pod = self.pods.get(name.pod_uid()).unwrap_or_else(|| panic!("{name} is a ghost"));
                assert_eq!(pod.node, Some(n), "{name}");
            }
            let of_node = || self.pods.values().filter(|pod| pod.node == Some(n));
            // Of one container, and that has its share: then both must say the same to the byte.
            let plain =
                of_node().all(|pod| pod.wanted.demand.containers.len() == 1 && !pod.running.is_empty());
            let left = self.left_by_init(n);
            assert!(left.is_empty() || !node.lists_all, "{left:?}");
            let here = shares.free(&node.inventory).unwrap();
            let there = self.cluster.free(&name(n)).unwrap();
            for (here, there) in here.iter().zip(&there) {
                let (core, bytes) = left.get(&here.gpu.uuid).copied().unwrap_or_default();
                let (core, bytes) = (here.core + core, here.memory_bytes + bytes);
                assert!(there.core <= core && there.memory_bytes <= bytes, "node {n}: {here:?}, {there:?}");
                if plain {
                    assert_eq!((there.core, there.memory_bytes), (here.core, here.memory_bytes), "{here:?}");
                }
            }
            if plain {
                compared += 1;
            }
        }
        *self.counts.entry("nodes compared to the byte").or_default() += compared;
    }
}

fn bound_pod(uid: &str, pod: &Pod) -> Option<BoundPod> {
    let node = name(pod.node?);
    Some(BoundPod {
        uid: uid.into(),
        holds: holds_of_bound(&pod.wanted.demand, &node, Some(&pod.annotations)),
        node,
        priority: 0,
        ending: false,
    })
}

/// The container that kubelet would start next.
fn next_container(pod: &Pod) -> Option<ContainerDemand> {
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

fn history(steps: u64, seed: u64, with_foreign: bool) {
    let mut world = World::new(seed, with_foreign);
    for step in 1..=steps {
        world.step();
        world.check();
        if step % QUIET_EVERY == 0 {
            world.settle();
        }
    }
    world.settle();
    let counts = &world.counts;
    println!("{steps} steps from seed {seed}: {counts:?}");
    for what in [
        "bound",
        "started",
        "deleted",
        "nri killed while binding",
        "nri killed after binding",
        "kubelet killed",
        "containerd killed",
        "told twice",
    ] {
        assert!(counts.get(what).is_some_and(|n| *n > 0), "{what} never happened: {counts:?}");
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

#[test]
fn scheduler_and_nodes_agree_whoever_is_killed() {
    history(setting("VCUDA_MODEL_STEPS", STEPS), setting("VCUDA_MODEL_SEED", 5), false);
}

#[test]
fn scheduler_and_nodes_agree_beside_a_scheduler_that_counts_no_gpus() {
    history(setting("VCUDA_MODEL_STEPS", STEPS), setting("VCUDA_MODEL_SEED", 6), true);
}
