//! The cluster, as far as GPUs go: every node with the pods on it, and what was reserved for pods that are being
//! bound. It is fed by watches and binds, and knows no API client and no clock.
//!
//! A reservation stands until the pod is seen on its node, or is known not to be there. It never lapses by time
//! alone: a bind whose answer was lost may have been carried out.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    mem,
    time::{Duration, Instant},
};

use ledger::GpuFree;
use thiserror::Error;
use vcuda_config::PodPlacement;

use crate::{
    Hold, Misfit, Wanted,
    hold::holds_of_placement,
    node::{Known, Node, PodOnNode},
    plan,
};

/// What is known of all nodes and all pods with a share.
#[derive(Debug, Default)]
pub struct Cluster {
    pub(crate) nodes: HashMap<Box<str>, Node>,
    reservations: BTreeMap<Claim, Reservation>,
    /// Number of the list of nodes that is being read or was read last.
    nodes_list: u32,
    /// Number of the list of pods that is being read or was read last.
    pods_list: u32,
    attempts: u64,
}

/// A pod on a node that it is being bound to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claim {
    /// UID of the pod.
    pub uid: String,
    /// The node.
    pub node: String,
}

/// Room kept for a pod while it is being bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// The GPUs.
    pub placement: PodPlacement,
    /// When it was made, or last asked for again.
    pub since: Instant,
    /// Counts up: a later attempt to bind the same pod to the same node has a higher one.
    pub attempt: u64,
    /// Attempts of which it is not known how they ended. Each may yet put the pod on the node.
    open: u32,
}

/// A pod that has a node.
#[derive(Clone, Debug)]
pub struct BoundPod {
    /// UID.
    pub uid: String,
    /// Its node.
    pub node: String,
    /// What it holds there.
    pub holds: Box<[Hold]>,
    /// Its priority.
    pub priority: i32,
    /// Whether it is being deleted.
    pub ending: bool,
}

/// Why a pod gets no room on a node.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The node takes no pod.
    #[error("node {node}: {reason}")]
    Trouble {
        /// The node.
        node: String,
        /// Why.
        reason: String,
    },
    /// It takes pods, but this one does not fit.
    #[error("node {node}: {misfit}")]
    Misfit {
        /// The node.
        node: String,
        /// What is missing.
        misfit: Box<Misfit>,
    },
    /// The pod runs there.
    #[error("node {node} has the pod already")]
    Bound {
        /// The node.
        node: String,
    },
}

/// Figures for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Nodes that offer GPUs.
    pub nodes: usize,
    /// GPUs on offer.
    pub gpus: usize,
    /// Pods with a share.
    pub pods: usize,
    /// Containers of which nobody says on which GPU they are.
    pub unplaced: u64,
    /// Pods that are being bound.
    pub reservations: usize,
}

/// What the API server says of a pod that was to be bound.
#[derive(Clone, Debug)]
pub enum Seen {
    /// It is no more.
    Gone,
    /// It has no node yet.
    Waiting,
    /// It has one.
    Bound(BoundPod),
}

/// Where a pod is that was to be bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// On that node.
    Here,
    /// On another.
    Elsewhere,
    /// On none yet: it may still come to the node.
    Waiting,
    /// It is no more.
    Gone,
}

impl Cluster {
    /// A list of all nodes begins.
    pub fn begin_nodes(&mut self) {
        self.nodes_list = self.nodes_list.wrapping_add(1);
    }

    /// A node is there, with these annotations.
    pub fn set_node(&mut self, name: &str, annotations: Option<&BTreeMap<String, String>>) {
        let seen = self.nodes_list;
        let node = self.nodes.entry(name.into()).or_default();
        node.seen = seen;
        node.set_annotations(annotations);
    }

    /// A node is gone.
    pub fn remove_node(&mut self, name: &str) {
        if let Some(node) = self.nodes.get_mut(name) {
            node.set_gone();
            self.nodes.retain(|_, node| !node.is_unused());
        }
    }

    /// The list of nodes is complete: what was not in it is gone.
    pub fn end_nodes(&mut self) {
        for node in self.nodes.values_mut().filter(|node| node.seen != self.nodes_list) {
            node.set_gone();
        }
        self.nodes.retain(|_, node| !node.is_unused());
    }

    /// A list of all pods that have a node begins.
    pub fn begin_pods(&mut self) {
        self.pods_list = self.pods_list.wrapping_add(1);
    }

    /// A pod is on its node. What was reserved for it, there or elsewhere, is settled.
    pub fn set_pod(&mut self, pod: BoundPod) {
        self.settle(&pod.uid, Some(&pod.node));
        if pod.holds.is_empty() {
            return self.take(&pod.uid, &pod.node);
        }
        let BoundPod { uid, node, holds, priority, ending } = pod;
        let known = Known::Listed(self.pods_list);
        self.nodes.entry(node.into()).or_default().put(&uid, PodOnNode { holds, priority, ending, known });
    }

    /// A pod has ended or was deleted.
    pub fn remove_pod(&mut self, uid: &str, node: &str) {
        self.settle(uid, None);
        self.take(uid, node);
    }

    /// The list of pods is complete: what was not in it is gone, but for what is being bound.
    pub fn end_pods(&mut self) {
        let list = self.pods_list;
        for node in self.nodes.values_mut() {
            node.keep(|pod| match pod.known {
                Known::Reserved | Known::Bound => true,
                Known::Listed(last) => last == list,
            });
        }
    }

    /// Reserves room for a pod on a node. A pod that has a reservation there keeps it, GPUs and all: an earlier
    /// attempt to bind it may have been carried out.
    pub fn reserve(
        &mut self,
        claim: &Claim,
        namespace: &str,
        name: &str,
        wanted: &Wanted,
        placed_at: u64,
        now: Instant,
    ) -> Result<Reservation, Refusal> {
        self.attempts += 1;
        if let Some(reservation) = self.reservations.get_mut(claim) {
            reservation.since = now;
            reservation.attempt = self.attempts;
            reservation.open = reservation.open.saturating_add(1);
            return Ok(reservation.clone());
        }
        let node_name = || claim.node.clone();
        let trouble = |reason: &str| Refusal::Trouble { node: node_name(), reason: reason.into() };
        let Some(node) = self.nodes.get_mut(claim.node.as_str()) else {
            return Err(trouble("vcuda-scheduler does not know it"));
        };
        if let Some(reason) = node.trouble() {
            return Err(trouble(reason));
        }
        if node.pods.contains_key(claim.uid.as_str()) {
            return Err(Refusal::Bound { node: node_name() });
        }
        let placement = plan(&node.free(), &wanted.demand, &node.rules(wanted))
            .map(|placement| PodPlacement { placed_at, ..placement })
            .map_err(|misfit| Refusal::Misfit { node: node_name(), misfit: Box::new(misfit) })?;
        let holds = holds_of_placement(&wanted.demand, &placement).unwrap_or_default();
        let known = Known::Reserved;
        node.put(&claim.uid, PodOnNode { holds, priority: wanted.priority, ending: false, known });
        let reservation = Reservation {
            namespace: namespace.into(),
            name: name.into(),
            placement,
            since: now,
            attempt: self.attempts,
            open: 1,
        };
        self.reservations.insert(claim.clone(), reservation.clone());
        Ok(reservation)
    }

    /// The pod was bound to the node: what was reserved for it elsewhere is free. Its own reservation stands until
    /// the pod is seen there.
    pub fn bound(&mut self, claim: &Claim) {
        let on = self.nodes.get_mut(claim.node.as_str());
        if let Some(pod) = on.and_then(|node| node.pods.get_mut(claim.uid.as_str()))
            && pod.known == Known::Reserved
        {
            pod.known = Known::Bound;
        }
        for other in self.claims_of(&claim.uid).into_iter().filter(|other| other.node != claim.node) {
            self.drop_reservation(&other);
        }
    }

    /// Books what the API server says of the pod of `claim`, and tells where that is.
    pub fn book(&mut self, claim: &Claim, seen: Seen) -> Found {
        match seen {
            Seen::Waiting => Found::Waiting,
            Seen::Bound(pod) if pod.node == claim.node => {
                self.correct(claim, pod.holds);
                self.bound(claim);
                Found::Here
            }
            Seen::Bound(_) => {
                self.drop_reservation(claim);
                Found::Elsewhere
            }
            Seen::Gone => {
                self.drop_reservation(claim);
                Found::Gone
            }
        }
    }

    /// The pod is on the node but holds `holds`, which an earlier attempt to bind it wrote. The reservation stands.
    fn correct(&mut self, claim: &Claim, holds: Box<[Hold]>) {
        let reserved = self.reservations.contains_key(claim);
        let node = self.nodes.get_mut(claim.node.as_str()).filter(|_| reserved);
        if let Some((node, pod)) = node.and_then(|node| {
            let pod = node.pods.get(claim.uid.as_str())?.clone();
            Some((node, pod))
        }) {
            node.put(&claim.uid, PodOnNode { holds, ..pod });
        }
    }

    /// One attempt certainly did not put the pod on the node. Where no other is open, its room is free.
    pub fn refused(&mut self, claim: &Claim) {
        if let Some(reservation) = self.reservations.get_mut(claim) {
            reservation.open = reservation.open.saturating_sub(1);
            if reservation.open == 0 {
                self.drop_reservation(claim);
            }
        }
    }

    /// The pod was not on the node long after attempt number `attempt`, which was the last one, or else nothing is known.
    pub fn lapse(&mut self, claim: &Claim, attempt: u64) {
        if self.reservations.get(claim).is_some_and(|reservation| reservation.attempt == attempt) {
            self.drop_reservation(claim);
        }
    }

    /// Reservations that have stood for `expiry`: whoever asks finds out what became of the pods.
    pub fn expired(&self, now: Instant, expiry: Duration) -> Vec<(Claim, Reservation)> {
        let is_old = |since: Instant| now.saturating_duration_since(since) >= expiry;
        let old = self.reservations.iter().filter(|(_, reservation)| is_old(reservation.since));
        old.map(|(claim, reservation)| (claim.clone(), reservation.clone())).collect()
    }

    /// Books what the API server says of the pod of `claim`, whose binding was last posted in attempt number `attempt`, long
    /// ago. One that is on its node stays: the watch is slow to tell, but it will. The room of any other is free.
    pub fn follow_up(&mut self, claim: &Claim, attempt: u64, seen: Seen, now: Instant) -> Found {
        let found = self.book(claim, seen);
        match found {
            Found::Here => self.postpone(claim, now),
            Found::Elsewhere | Found::Waiting | Found::Gone => self.lapse(claim, attempt),
        }
        found
    }

    /// Puts off the expiry of a reservation whose pod's fate is still unknown.
    pub fn postpone(&mut self, claim: &Claim, now: Instant) {
        if let Some(reservation) = self.reservations.get_mut(claim) {
            reservation.since = now;
        }
    }

    /// The nodes on which there has come to be more room since this was last asked.
    pub fn take_roomier(&mut self) -> BTreeSet<Box<str>> {
        let nodes = self.nodes.iter_mut().map(|(name, node)| (name, mem::take(&mut node.roomier)));
        nodes.filter(|(_, roomier)| *roomier).map(|(name, _)| name.clone()).collect()
    }

    /// The names of all nodes.
    pub fn names(&self) -> BTreeSet<Box<str>> {
        self.nodes.keys().cloned().collect()
    }

    /// What is left of each GPU of a node, for tests and metrics.
    pub fn free(&self, node: &str) -> Option<Vec<GpuFree<'_>>> {
        self.nodes.get(node).map(Node::free)
    }

    /// Figures for metrics.
    pub fn figures(&self) -> Figures {
        let mut figures = Figures { reservations: self.reservations.len(), ..Figures::default() };
        for node in self.nodes.values() {
            figures.nodes += usize::from(!node.gpus().is_empty());
            figures.gpus += node.gpus().len();
            figures.pods += node.pods.len();
            figures.unplaced += u64::from(node.unplaced());
        }
        figures
    }

    /// Nodes on which room is reserved for the pod.
    pub(crate) fn claims_of(&self, uid: &str) -> Vec<Claim> {
        let first = Claim { uid: uid.into(), node: String::new() };
        self.reservations
            .range(first..)
            .map(|(claim, _)| claim.clone())
            .take_while(|claim| claim.uid == uid)
            .collect()
    }

    /// Ends all reservations of a pod whose fate is known. What it holds on `node`, if it is there, stays.
    fn settle(&mut self, uid: &str, node: Option<&str>) {
        for claim in self.claims_of(uid) {
            if Some(claim.node.as_str()) == node {
                self.reservations.remove(&claim);
            } else {
                self.drop_reservation(&claim);
            }
        }
    }

    fn drop_reservation(&mut self, claim: &Claim) {
        if self.reservations.remove(claim).is_some() {
            self.take(&claim.uid, &claim.node);
        }
    }

    fn take(&mut self, uid: &str, node: &str) {
        if let Some(on) = self.nodes.get_mut(node) {
            on.take(uid);
            if on.is_unused() {
                self.nodes.remove(node);
            }
        }
    }
}
