//! The cluster's books against a model of the API server, over random histories: pods come and go, binds succeed, fail
//! or lose their answer, watches lag, lists are read anew, and the scheduler is killed and started again.

#![expect(clippy::unwrap_used, reason = "an assertion, in a test")]

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use ledger::Rules;
use proptest::prelude::*;
use scheduler::{
    BoundPod, Claim, Cluster, ContainerDemand, Demand, Found, Role, Seen, Wanted, holds_of_bound, plan,
};
use vcuda_config::{GpuUuid, MEMORY_UNIT_BYTES, NodeGpu, NodeGpus, PodPlacement, Request, annotation};

const NODES: usize = 3;
const GPUS: usize = 3;
const UNITS: u32 = 16;
const EXPIRY: Duration = Duration::from_secs(60);

#[derive(Clone, Debug)]
enum Step {
    /// A pod is created.
    Create(Vec<(u32, u32, Role)>),
    /// kube-scheduler has a pod filtered, and bound to one of the nodes that fit.
    Bind { pod: usize, node: usize },
    /// The answer to a bind comes, or does not.
    Answer { bind: usize, outcome: Outcome },
    /// The watch delivers some events.
    Watch(usize),
    /// The watch breaks, and all pods are listed anew.
    List,
    /// A pod is deleted.
    Delete(usize),
    /// Reservations expire, and the API server is asked what became of their pods.
    Expire,
    /// The scheduler is killed. Binds under way are carried out or not.
    Restart { carried_out: u32 },
    /// Another scheduler binds a pod; the node picks the GPUs.
    Foreign { pod: usize, node: usize },
    /// The node says on which GPUs a pod of another scheduler is.
    Tell(usize),
    /// A GPU becomes healthy, or ill.
    Health { node: usize, gpu: usize, healthy: bool },
}

#[derive(Clone, Copy, Debug)]
enum Outcome {
    CarriedOut,
    Refused,
    CarriedOutAnswerLost,
    LostOnTheWay,
}

#[derive(Clone, Debug)]
struct Pod {
    wanted: Wanted,
    node: Option<String>,
    annotations: BTreeMap<String, String>,
    /// Where it is in truth.
    placement: PodPlacement,
}

#[derive(Debug)]
enum Event {
    Set(String, Pod),
    Deleted(String, String),
}

#[derive(Debug)]
struct Bind {
    claim: Claim,
    placement: PodPlacement,
}

/// The API server, the nodes, and the scheduler under test.
struct World {
    nodes: Vec<NodeGpus>,
    pods: BTreeMap<String, Pod>,
    created: usize,
    events: Vec<Event>,
    delivered: usize,
    binds: Vec<Bind>,
    cluster: Cluster,
    now: Instant,
}

fn name(node: usize) -> String {
    format!("node-{node}")
}

fn gpu(node: usize, gpu: usize) -> GpuUuid {
    GpuUuid::from_bytes([u8::try_from(node * 16 + gpu).unwrap(); 16])
}

impl World {
    fn new() -> Self {
        let node = |n| {
            let one = |g| NodeGpu {
                uuid: gpu(n, g),
                model: "A100".into(),
                minor: u32::try_from(g).unwrap(),
                // GPUs of different size.
                units: UNITS - u32::try_from(g).unwrap(),
                numa: Some(u32::try_from(g / 2).unwrap()),
                healthy: true,
            };
            NodeGpus::new((0..GPUS).map(one).collect(), Vec::new())
        };
        let mut world = Self {
            nodes: (0..NODES).map(node).collect(),
            pods: BTreeMap::new(),
            created: 0,
            events: Vec::new(),
            delivered: 0,
            binds: Vec::new(),
            cluster: Cluster::default(),
            now: Instant::now(),
        };
        world.start();
        world
    }

    /// A fresh scheduler reads everything.
    fn start(&mut self) {
        self.cluster = Cluster::default();
        self.cluster.begin_nodes();
        (0..NODES).for_each(|node| self.tell_node(node));
        self.cluster.end_nodes();
        self.list();
    }

    fn tell_node(&mut self, node: usize) {
        let annotations = BTreeMap::from([(annotation::NODE_GPUS.to_owned(), self.nodes[node].to_text())]);
        self.cluster.set_node(&name(node), Some(&annotations));
    }

    fn list(&mut self) {
        self.delivered = self.events.len();
        self.cluster.begin_pods();
        for (uid, pod) in &self.pods {
            tell_pod(&mut self.cluster, uid, pod);
        }
        self.cluster.end_pods();
    }

    fn watch(&mut self, events: usize) {
        for _ in 0..events {
            match self.events.get(self.delivered) {
                None => return,
                Some(Event::Set(uid, pod)) => tell_pod(&mut self.cluster, uid, pod),
                Some(Event::Deleted(uid, node)) => self.cluster.remove_pod(uid, node),
            }
            self.delivered += 1;
        }
    }

    fn nth(&self, pod: usize) -> Option<String> {
        (!self.pods.is_empty()).then(|| self.pods.keys().nth(pod % self.pods.len()).cloned()).flatten()
    }

    /// What the API server does with a binding: `Ok` when the pod is now on the node.
    fn post(&mut self, bind: &Bind) -> Result<(), ()> {
        let pod = self.pods.get_mut(&bind.claim.uid).filter(|pod| pod.node.is_none()).ok_or(())?;
        pod.node = Some(bind.claim.node.clone());
        pod.annotations.insert(annotation::PLACEMENT.into(), bind.placement.to_string());
        pod.placement = bind.placement.clone();
        self.events.push(Event::Set(bind.claim.uid.clone(), pod.clone()));
        Ok(())
    }

    /// What the API server says of a pod.
    fn seen(&self, uid: &str) -> Seen {
        self.pods.get(uid).map_or(Seen::Gone, |pod| bound_pod(uid, pod).map_or(Seen::Waiting, Seen::Bound))
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Create(containers) => {
                let container = |(at, (core, memory, role))| ContainerDemand {
                    name: format!("c{at}"),
                    request: Request::new(core, memory).unwrap(),
                    role,
                };
                let containers = containers.into_iter().enumerate().map(container).collect();
                let wanted = Wanted { demand: Demand { containers }, ..Wanted::default() };
                let (annotations, placement) = Default::default();
                self.pods.insert(
                    format!("pod-{:04}", self.created),
                    Pod { wanted, node: None, annotations, placement },
                );
                self.created += 1;
            }
            Step::Bind { pod, node } => {
                let Some(uid) = self.nth(pod) else { return };
                let pod = self.pods[&uid].clone();
                let names: Vec<String> = (0..NODES).map(name).collect();
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                let filtered = self.cluster.filter(&uid, &pod.wanted, &names);
                assert_eq!(filtered.fit.len() + filtered.unfit.len(), NODES);
                // The quick answer for pods with one share is the one that placement gives.
                let books_are_settled = self.cluster.figures().reservations == 0;
                if pod.wanted.demand.containers.len() == 1 && pod.node.is_none() && books_are_settled {
                    for name in &names {
                        let free = self.cluster.free(name).unwrap();
                        let placed = plan(&free, &pod.wanted.demand, &Rules::default()).is_ok();
                        assert_eq!(placed, filtered.fit.contains(name), "{name}: {pod:?}");
                    }
                }
                if filtered.fit.is_empty() {
                    return;
                }
                let node = filtered.fit[node % filtered.fit.len()].to_owned();
                let claim = Claim { uid: uid.clone(), node };
                let reserved = self.cluster.reserve(&claim, "default", &uid, &pod.wanted, 0, self.now);
                if let Ok(reservation) = reserved {
                    self.binds.push(Bind { claim, placement: reservation.placement });
                }
            }
            Step::Answer { bind, outcome } => {
                if self.binds.is_empty() {
                    return;
                }
                let bind = self.binds.swap_remove(bind % self.binds.len());
                match outcome {
                    Outcome::CarriedOut => match self.post(&bind) {
                        Ok(()) => self.cluster.bound(&bind.claim),
                        Err(()) => {
                            let seen = self.seen(&bind.claim.uid);
                            if self.cluster.book(&bind.claim, seen) != Found::Here {
                                self.cluster.refused(&bind.claim);
                            }
                        }
                    },
                    Outcome::Refused => self.cluster.refused(&bind.claim),
                    Outcome::CarriedOutAnswerLost => drop(self.post(&bind)),
                    Outcome::LostOnTheWay => {}
                }
            }
            Step::Watch(events) => self.watch(events),
            Step::List => self.list(),
            Step::Delete(pod) => {
                if let Some((uid, pod)) = self.nth(pod).and_then(|uid| self.pods.remove_entry(&uid))
                    && let Some(node) = pod.node
                {
                    self.events.push(Event::Deleted(uid, node));
                }
            }
            Step::Expire => {
                // No bind is under way for as long as that.
                while !self.binds.is_empty() {
                    self.step(Step::Answer { bind: 0, outcome: Outcome::LostOnTheWay });
                }
                self.now += EXPIRY;
                for (claim, reservation) in self.cluster.expired(self.now, EXPIRY) {
                    let seen = self.seen(&claim.uid);
                    self.cluster.follow_up(&claim, reservation.attempt, seen, self.now);
                }
            }
            Step::Restart { carried_out } => {
                for (at, bind) in std::mem::take(&mut self.binds).into_iter().enumerate() {
                    if carried_out >> (at % 32) & 1 == 1 {
                        let _ = self.post(&bind);
                    }
                }
                self.start();
            }
            Step::Foreign { pod, node } => self.foreign(pod, node % NODES),
            Step::Tell(pod) => {
                if let Some(uid) = self.nth(pod) {
                    self.tell(&uid);
                }
            }
            Step::Health { node, gpu, healthy } => {
                self.nodes[node % NODES].gpus[gpu % GPUS].healthy = healthy;
                self.tell_node(node % NODES);
            }
        }
    }

    /// A pod gets its node from someone else, and its GPU from the node, which refuses what does not fit. The books
    /// are up to date: two schedulers that race for one node are the node's to part.
    fn foreign(&mut self, pod: usize, node: usize) {
        self.watch(usize::MAX);
        let Some(uid) = self.nth(pod).filter(|uid| self.pods[uid].node.is_none()) else { return };
        for gpu in 0..GPUS {
            let mut pod = self.pods[&uid].clone();
            let on = |container: &ContainerDemand| match container.request {
                Request::Share { .. } => Some((container.name.clone(), vec![self::gpu(node, gpu)])),
                Request::Whole { .. } => None,
            };
            let Some(containers) = pod.wanted.demand.containers.iter().map(on).collect() else { return };
            pod.placement = PodPlacement { placed_at: 0, containers };
            pod.node = Some(name(node));
            let before = self.pods.insert(uid.clone(), pod.clone()).unwrap();
            let under_way: Vec<_> = self
                .binds
                .iter()
                .filter(|bind| bind.claim.uid != uid)
                .filter_map(|bind| Some((self.pods.get(&bind.claim.uid)?, &bind.claim.node, &bind.placement)))
                .filter(|(pod, _, _)| pod.node.is_none())
                .collect();
            let reserved = self.cluster.expired(self.now + EXPIRY, EXPIRY);
            let reserved = reserved
                .iter()
                .filter(|(claim, _)| claim.uid != uid)
                .filter_map(|(claim, it)| Some((self.pods.get(&claim.uid)?, &claim.node, &it.placement)));
            let fits = self.overbooked(under_way.into_iter().chain(reserved)).is_none();
            if fits {
                self.events.push(Event::Set(uid, pod));
                self.watch(usize::MAX);
                return;
            }
            self.pods.insert(uid.clone(), before);
        }
    }

    fn tell(&mut self, uid: &str) {
        if let Some(pod) = self.pods.get_mut(uid).filter(|pod| pod.node.is_some()) {
            pod.annotations.insert(annotation::PLACEMENT.into(), pod.placement.to_string());
            self.events.push(Event::Set(uid.into(), pod.clone()));
        }
    }

    /// What is taken of each GPU in truth, counted from scratch.
    fn taken<'a>(
        &'a self,
        more: impl Iterator<Item = (&'a Pod, &'a String, &'a PodPlacement)>,
    ) -> BTreeMap<GpuUuid, (u32, u64)> {
        let bound = self.pods.values().filter_map(|pod| Some((pod, pod.node.as_ref()?, &pod.placement)));
        let mut taken: BTreeMap<GpuUuid, (u32, u64)> = BTreeMap::new();
        for (pod, _, placement) in bound.chain(more) {
            let mut of_pod: BTreeMap<GpuUuid, (u32, u64)> = BTreeMap::new();
            let containers = &pod.wanted.demand.containers;
            let turns = (0..containers.len()).filter(|at| containers[*at].role == Role::Init);
            for turn in turns.map(Some).chain([None]) {
                let mut now: BTreeMap<GpuUuid, (u32, u64)> = BTreeMap::new();
                for (at, container) in containers.iter().enumerate() {
                    let runs = match (turn, container.role) {
                        (Some(turn), Role::Init) => at == turn,
                        (Some(turn), Role::Sidecar) => at < turn,
                        (Some(_), Role::App) | (None, Role::Init) => false,
                        (None, _) => true,
                    };
                    for gpu in placement.gpus(&container.name).iter().filter(|_| runs) {
                        let (core, memory) = match container.request {
                            Request::Share { core, memory_units } => (core, memory_units.get().into()),
                            Request::Whole { .. } => (100, self.units(gpu)),
                        };
                        let entry = now.entry(gpu.clone()).or_default();
                        *entry = (entry.0 + core, entry.1 + memory);
                    }
                }
                for (gpu, (core, memory)) in now {
                    let entry = of_pod.entry(gpu).or_default();
                    *entry = (entry.0.max(core), entry.1.max(memory));
                }
            }
            for (gpu, (core, memory)) in of_pod {
                let entry = taken.entry(gpu).or_default();
                *entry = (entry.0 + core, entry.1 + memory);
            }
        }
        taken
    }

    fn units(&self, gpu: &GpuUuid) -> u64 {
        self.nodes.iter().flat_map(|node| &node.gpus).find(|other| other.uuid == *gpu).unwrap().units.into()
    }

    fn overbooked<'a>(
        &'a self,
        more: impl Iterator<Item = (&'a Pod, &'a String, &'a PodPlacement)>,
    ) -> Option<(GpuUuid, (u32, u64))> {
        self.taken(more).into_iter().find(|(gpu, (core, memory))| *core > 100 || *memory > self.units(gpu))
    }
}

fn tell_pod(cluster: &mut Cluster, uid: &str, pod: &Pod) {
    if let Some(bound) = bound_pod(uid, pod) {
        cluster.set_pod(bound);
    }
}

fn bound_pod(uid: &str, pod: &Pod) -> Option<BoundPod> {
    let node = pod.node.clone()?;
    Some(BoundPod {
        uid: uid.into(),
        holds: holds_of_bound(&pod.wanted.demand, &node, Some(&pod.annotations)),
        node,
        priority: 0,
        ending: false,
    })
}

fn containers() -> impl Strategy<Value = Vec<(u32, u32, Role)>> {
    let share = (1..=60_u32, 1..=10_u32);
    let whole = (1..=2_u32).prop_map(|gpus| (gpus * 100, 0));
    let role = prop_oneof![Just(Role::Init), Just(Role::Sidecar)];
    let sized = || prop_oneof![6 => share.clone(), 1 => whole.clone()];
    let before = proptest::collection::vec((sized(), role), 0..2);
    let apps = proptest::collection::vec(sized(), 1..3);
    (before, apps).prop_map(|(before, apps)| {
        let before = before.into_iter().map(|((core, memory), role)| (core, memory, role));
        before.chain(apps.into_iter().map(|(core, memory)| (core, memory, Role::App))).collect()
    })
}

fn step() -> impl Strategy<Value = Step> {
    let outcome = prop_oneof![
        6 => Just(Outcome::CarriedOut),
        1 => Just(Outcome::Refused),
        1 => Just(Outcome::CarriedOutAnswerLost),
        1 => Just(Outcome::LostOnTheWay),
    ];
    prop_oneof![
        6 => containers().prop_map(Step::Create),
        8 => (0..64_usize, 0..NODES).prop_map(|(pod, node)| Step::Bind { pod, node }),
        7 => (0..8_usize, outcome).prop_map(|(bind, outcome)| Step::Answer { bind, outcome }),
        4 => (1..6_usize).prop_map(Step::Watch),
        1 => Just(Step::List),
        4 => (0..64_usize).prop_map(Step::Delete),
        1 => Just(Step::Expire),
        1 => any::<u32>().prop_map(|carried_out| Step::Restart { carried_out }),
        1 => (0..64_usize, 0..NODES).prop_map(|(pod, node)| Step::Foreign { pod, node }),
        1 => (0..64_usize).prop_map(Step::Tell),
        1 => (0..NODES, 0..GPUS, any::<bool>())
            .prop_map(|(node, gpu, healthy)| Step::Health { node, gpu, healthy }),
    ]
}

proptest! {
    // 256 histories of 400 steps on average, or as many as PROPTEST_CASES says.
    #![proptest_config(ProptestConfig { max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn no_gpu_is_promised_past_what_it_has_and_nothing_is_lost_or_left_over(
        steps in proptest::collection::vec(step(), 200..600),
    ) {
        let mut world = World::new();
        for step in steps {
            let said = format!("{step:?}");
            world.step(step);
            let overbooked = world.overbooked(std::iter::empty());
            prop_assert!(overbooked.is_none(), "after {said}: {overbooked:?}");
        }

        // All is quiet: every pod is known for what it is, and no ghost holds anything.
        for uid in world.pods.keys().cloned().collect::<Vec<_>>() {
            world.tell(&uid);
        }
        world.watch(usize::MAX);
        world.step(Step::Expire);
        world.watch(usize::MAX);
        prop_assert_eq!(world.cluster.figures().reservations, 0);
        let taken = world.taken(std::iter::empty());
        for node in 0..NODES {
            for free in world.cluster.free(&name(node)).unwrap() {
                let (core, units) = taken.get(&free.gpu.uuid).copied().unwrap_or_default();
                prop_assert_eq!(100 - free.core, core, "{}", &free.gpu.uuid);
                prop_assert_eq!(free.gpu.usable_bytes() - free.memory_bytes, units * MEMORY_UNIT_BYTES);
            }
        }
    }
}
