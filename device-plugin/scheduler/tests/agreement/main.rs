//! The scheduler's books and the nodes' ledgers, the real ones, over one long random history: pods of all sizes come,
//! are bound, start, restart, end and are deleted; every part is killed between any two steps, kubelet and containerd
//! too, and what happens then is told late, twice or never; GPUs fall ill and are cordoned. No GPU is promised past what it
//! has, no running container loses its GPU, no ghost stays, and in the end scheduler and nodes say the same.
//! `VCUDA_MODEL_STEPS` names the number of steps, `VCUDA_MODEL_SEED` the history.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "an assertion, in a test")]

mod cluster;
mod node;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use ledger::{Inventory, Ledger, SandboxEnd, ShareName, ShareState};
use scheduler::{BoundPod, Claim, Cluster, Reservation, Wanted};
use tempfile::TempDir;
use vcuda_config::GpuUuid;

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

    fn any_pod(&mut self, choose: impl Fn(&Pod) -> bool) -> Option<String> {
        let mut fit: Vec<_> =
            self.pods.iter().filter(|(_, pod)| choose(pod)).map(|(uid, _)| uid.clone()).collect();
        let at = self.random.below(fit.len());
        (!fit.is_empty()).then(|| fit.swap_remove(at))
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
