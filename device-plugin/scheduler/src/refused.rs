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

/// Pods that are remembered. Past that, the one that was refused first is forgotten: kube-scheduler asks about it next.
const MOST: usize = 1000;

/// The pods, by UID.
#[derive(Debug, Default)]
pub struct Refused(HashMap<String, RefusedPod>);

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
    /// The nodes that were asked about, see [`key`], sorted. kube-scheduler itself has ruled out all others.
    nodes: Box<[u64]>,
}

/// Stands for a node's name, in few bytes: a pod may have been refused on hundreds. Where two names share one, a pod is
/// tried again in vain.
fn key(node: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    node.hash(&mut hasher);
    hasher.finish()
}

impl Refused {
    /// Whether no pod waits.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Remembers that a pod fitted on none of `nodes` at the time `since`.
    pub fn note(
        &mut self,
        uid: &str,
        (namespace, name): (&str, &str),
        wanted: Arc<Wanted>,
        nodes: &[&str],
        since: Instant,
    ) {
        if self.0.len() >= MOST && !self.0.contains_key(uid) {
            let first = self.0.values().min_by_key(|pod| pod.since).map(|pod| pod.uid.clone());
            first.and_then(|first| self.0.remove(&first));
        }
        let mut nodes: Box<[u64]> = nodes.iter().map(|node| key(node)).collect();
        nodes.sort_unstable();
        let (namespace, name) = (namespace.into(), name.into());
        self.0.insert(uid.into(), RefusedPod { uid: uid.into(), namespace, name, wanted, since, nodes });
    }

    /// Forgets a pod: it fits somewhere.
    pub fn remove(&mut self, uid: &str) {
        self.0.remove(uid);
    }

    /// Forgets a refusal, but not one that came after it.
    pub fn forget(&mut self, refused: &RefusedPod) {
        if self.0.get(&refused.uid).is_some_and(|pod| pod.since == refused.since) {
            self.0.remove(&refused.uid);
        }
    }

    /// Up to `most` pods that fit by now on one of the nodes in `roomier` that were asked about, each with that node:
    /// the most important first, and of these the one that was refused first.
    pub fn fitting<'a>(
        &mut self,
        cluster: &Cluster,
        roomier: &'a BTreeSet<Box<str>>,
        now: Instant,
        most: usize,
    ) -> Vec<(RefusedPod, &'a str)> {
        self.0.retain(|_, pod| now.saturating_duration_since(pod.since) < WAITS);
        let roomier: Vec<(u64, &str)> = roomier.iter().map(|node| (key(node), &**node)).collect();
        let node_for = |pod: &RefusedPod| {
            let asked = roomier.iter().filter(|(key, _)| pod.nodes.binary_search(key).is_ok());
            asked.map(|(_, node)| *node).find(|node| cluster.fits(&pod.uid, &pod.wanted, node))
        };
        let mut pods: Vec<&RefusedPod> = self.0.values().collect();
        pods.sort_by_key(|pod| (Reverse(pod.wanted.priority), pod.since, &pod.uid));
        pods.into_iter().filter_map(|pod| node_for(pod).map(|node| (pod.clone(), node))).take(most).collect()
    }
}
