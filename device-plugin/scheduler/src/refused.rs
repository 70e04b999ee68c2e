//! Pods that fitted on none of the nodes that kube-scheduler asked about. kube-scheduler asks again when it hears of a
//! change that may help. It may hear of that earlier than this process: then the answer is the old one, and nothing
//! wakes the pod until something else happens in the cluster, or five minutes have passed. Pure; it knows no clock.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{Cluster, Wanted};

/// How long a pod is remembered: then kube-scheduler asks again by itself (`podMaxInUnschedulablePodsDuration`).
const WAITS: Duration = Duration::from_secs(5 * 60);

/// Pods that are remembered. Past that the least important is forgotten, and of these the one that was refused first.
const MOST: usize = 1000;

/// Pairs of a pod and a node that are looked at in one go, while the books cannot change.
const PAIRS: usize = 2000;

/// Pauses before a pod is tried once more that could not be made known to kube-scheduler: the first, and the longest.
const PAUSES: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(64)];

/// The pods, and where room has come to be for them.
#[derive(Debug, Default)]
pub struct Refused {
    /// By UID.
    pods: HashMap<String, RefusedPod>,
    /// Nodes that have come to have room, and when this was last heard, that no pod was looked at for.
    heard: Option<(BTreeSet<Box<str>>, Instant)>,
    round: Round,
}

/// All pods are looked at for some nodes, in several goes.
#[derive(Debug, Default)]
struct Round {
    /// The nodes, each with its [`key`]. Empty between two rounds.
    nodes: Vec<(u64, Box<str>)>,
    /// When word of their room came. Pods that were refused later were refused in spite of it.
    heard: Option<Instant>,
    /// Where the next go starts. None at the start.
    next: Option<Next>,
}

/// A pod and a node that were not looked at yet.
#[derive(Debug)]
struct Next {
    /// The pod, see [`RefusedPod::order`].
    pod: (Reverse<i32>, Instant, String),
    /// The place of the node in [`Round::nodes`].
    node: usize,
}

/// A pod that fitted nowhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedPod {
    /// Its UID.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// What it wants.
    pub wanted: Arc<Wanted>,
    /// When it was refused last.
    pub since: Instant,
    /// The nodes that were asked about, see [`key`], sorted. kube-scheduler itself has ruled out all others. None where
    /// that is not known.
    nodes: Option<Box<[u64]>>,
    /// The nodes on which kube-scheduler would have had others end for it, as `nodes`.
    contested: Box<[u64]>,
    /// It has room, but kube-scheduler could not be made to try it.
    again: Option<Again>,
}

/// Another attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Again {
    node: Box<str>,
    at: Instant,
    pause: Duration,
}

/// What one go through the pods has found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Due {
    /// Pods that are to be tried again, each with a node where there is room.
    pub pods: Vec<(RefusedPod, Box<str>)>,
    /// Whether there is more to look at.
    pub more: bool,
}

/// Stands for a node's name, in few bytes: a pod may have been refused on hundreds. Where two names share one, a pod is
/// tried again in vain.
fn key(node: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    node.hash(&mut hasher);
    hasher.finish()
}

fn keys<'a>(nodes: impl IntoIterator<Item = &'a str>) -> Box<[u64]> {
    let mut keys: Box<[u64]> = nodes.into_iter().map(key).collect();
    keys.sort_unstable();
    keys
}

impl RefusedPod {
    /// A pod that fitted on none of `nodes` at the time `since`; none where nobody knows which nodes were asked about.
    pub fn new(
        uid: &str,
        (namespace, name): (&str, &str),
        wanted: Arc<Wanted>,
        nodes: Option<&[&str]>,
        since: Instant,
    ) -> Self {
        Self {
            uid: uid.into(),
            namespace: namespace.into(),
            name: name.into(),
            wanted,
            since,
            nodes: nodes.map(|nodes| keys(nodes.iter().copied())),
            contested: Box::default(),
            again: None,
        }
    }

    /// By which pods are looked at: the most important first, then the one that was refused first.
    fn order(&self) -> (Reverse<i32>, Instant, &str) {
        (Reverse(self.wanted.priority), self.since, &self.uid)
    }

    /// Whether kube-scheduler, if it tried the pod now, would find room for it on a node, or could make it.
    fn may_run(&self, cluster: &Cluster, node: &str, key: u64) -> bool {
        let asked = self.nodes.as_ref().is_none_or(|nodes| nodes.binary_search(&key).is_ok());
        asked && cluster.fits(&self.uid, &self.wanted, node)
            || self.contested.binary_search(&key).is_ok() && self.may_preempt(cluster, node)
    }

    /// Whether others have to end for it. Of those that are ending kube-scheduler hears by itself.
    fn may_preempt(&self, cluster: &Cluster, node: &str) -> bool {
        cluster.victims(&self.wanted, node, Vec::new()).is_some_and(|victims| !victims.uids.is_empty())
    }
}

impl Refused {
    /// Whether no pod waits.
    pub fn is_empty(&self) -> bool {
        self.pods.is_empty()
    }

    /// Remembers a pod, or what is new of it.
    pub fn note(&mut self, pod: RefusedPod) {
        self.pods.insert(pod.uid.clone(), pod);
        if self.pods.len() > MOST {
            let least = self.pods.values().min_by_key(|pod| (pod.wanted.priority, pod.since));
            least.map(|pod| pod.uid.clone()).and_then(|uid| self.pods.remove(&uid));
        }
    }

    /// Remembers a pod, unless more is known of it.
    pub fn note_if_new(&mut self, pod: RefusedPod) {
        if !self.pods.contains_key(&pod.uid) {
            self.note(pod);
        }
    }

    /// Remembers that others were to end on `nodes` for the sake of a pod that fitted nowhere. kube-scheduler gives that up
    /// where one of them has ended already, and this process was yet to hear of it.
    pub fn note_preemption<'a>(&mut self, uid: &str, nodes: impl IntoIterator<Item = &'a str>) {
        if let Some(pod) = self.pods.get_mut(uid) {
            pod.contested = keys(nodes);
        }
    }

    /// Forgets a pod: it fits somewhere.
    pub fn remove(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// Forgets a refusal, but not one that came after it.
    pub fn forget(&mut self, refused: &RefusedPod) {
        if self.pods.get(&refused.uid).is_some_and(|pod| pod.since == refused.since) {
            self.pods.remove(&refused.uid);
        }
    }

    /// Has a pod that has room on `node` tried again after a pause, longer each time.
    pub fn postpone(&mut self, refused: &RefusedPod, node: &str, now: Instant) {
        if let Some(pod) = self.pods.get_mut(&refused.uid).filter(|pod| pod.since == refused.since) {
            let [first, longest] = PAUSES;
            let pause = pod.again.as_ref().map_or(first, |again| (again.pause * 2).min(longest));
            pod.again = Some(Again { node: node.into(), at: now + pause, pause });
        }
    }

    /// There has come to be room on `nodes`, and this was heard at the time `at`.
    pub fn hear(&mut self, nodes: BTreeSet<Box<str>>, at: Instant) {
        if !nodes.is_empty() {
            let (heard, last) = self.heard.get_or_insert_with(|| (BTreeSet::new(), at));
            heard.extend(nodes);
            *last = at;
        }
    }

    /// Forgets where room has come to be.
    pub fn drop_word(&mut self) {
        (self.heard, self.round) = (None, Round::default());
    }

    /// Up to `most` pods that have come to fit on one of the nodes that they were refused on, or could have others end
    /// there: the most important first, and of these the one that was refused first. One go looks at a bounded number of
    /// pods and nodes; the next goes on from there.
    pub fn due(&mut self, cluster: &Cluster, now: Instant, most: usize) -> Due {
        self.pods.retain(|_, pod| now.saturating_duration_since(pod.since) < WAITS);
        let mut due = Due::default();
        self.take_postponed(cluster, now, most, &mut due.pods);
        let mut pods: Vec<&RefusedPod> = self.pods.values().collect();
        pods.sort_unstable_by(|a, b| a.order().cmp(&b.order()));
        let mut left = PAIRS;
        loop {
            if self.round.nodes.is_empty() {
                let Some((nodes, heard)) = self.heard.take() else { return due };
                let nodes = nodes.into_iter().map(|node| (key(&node), node)).collect();
                self.round = Round { nodes, heard: Some(heard), next: None };
            }
            let round = &mut self.round;
            let next = round.next.take();
            let next = next
                .as_ref()
                .map(|Next { pod: (priority, since, uid), node }| ((*priority, *since, uid.as_str()), *node));
            let from = next.map_or(0, |(next, _)| pods.partition_point(|pod| pod.order() < next));
            for pod in &pods[from..] {
                if pod.again.is_some() || round.heard.is_some_and(|heard| pod.since > heard) {
                    continue;
                }
                let start = next.filter(|(next, _)| *next == pod.order()).map_or(0, |(_, at)| at);
                let end = round.nodes.len().min(start + left);
                let may_run = |at: &usize| {
                    let (key, node) = &round.nodes[*at];
                    pod.may_run(cluster, node, *key)
                };
                let is_full = due.pods.len() == most;
                let found = if is_full { None } else { (start..end).find(may_run) };
                if let Some(at) = found {
                    left -= at + 1 - start;
                    due.pods.push(((*pod).clone(), round.nodes[at].1.clone()));
                } else if is_full || end < round.nodes.len() {
                    let (priority, since, uid) = pod.order();
                    let node = if is_full { start } else { end };
                    round.next = Some(Next { pod: (priority, since, uid.into()), node });
                    due.more = true;
                    return due;
                } else {
                    left -= end - start;
                }
            }
            self.round = Round::default();
        }
    }

    /// Pods that are to be tried once more, and still have room. The others wait for word of other room.
    fn take_postponed(
        &mut self,
        cluster: &Cluster,
        now: Instant,
        most: usize,
        due: &mut Vec<(RefusedPod, Box<str>)>,
    ) {
        let is_due = |pod: &&mut RefusedPod| pod.again.as_ref().is_some_and(|again| again.at <= now);
        let mut pods: Vec<&mut RefusedPod> = self.pods.values_mut().filter(is_due).collect();
        pods.sort_unstable_by(|a, b| a.order().cmp(&b.order()));
        for pod in pods.into_iter().take(most) {
            let Some(node) = pod.again.as_ref().map(|again| again.node.clone()) else { continue };
            if pod.may_run(cluster, &node, key(&node)) {
                due.push((pod.clone(), node));
            } else {
                pod.again = None;
            }
        }
    }
}
