//! What happens at the API server and in the scheduler: pods come, are filtered, reserved, bound or not, and word of it
//! comes late.

use std::collections::{BTreeMap, BTreeSet};

use scheduler::{
    BoundPod, Claim, Cluster, ContainerDemand, Demand, Found, Role, Seen, Wanted, holds_of_bound,
};
use vcuda_config::{PodPlacement, Request, annotation};

use super::{EXPIRY, Event, NODES, PODS_MAX, Pod, World, index, name};

impl World {
    /// A fresh scheduler reads everything.
    pub(super) fn start_scheduler(&mut self) {
        self.events.clear();
        self.cluster = Cluster::default();
        self.cluster.begin_nodes();
        for (n, node) in self.nodes.iter().enumerate() {
            self.cluster.set_node(&name(n), Some(&node.annotations()));
        }
        self.cluster.end_nodes();
        self.list();
    }

    pub(super) fn list(&mut self) {
        self.events.retain(|event| matches!(event, Event::Node(..)));
        self.cluster.begin_pods();
        for (uid, pod) in &self.pods {
            if let Some(bound) = bound_pod(uid, pod) {
                self.cluster.set_pod(bound);
            }
        }
        self.cluster.end_pods();
    }

    pub(super) fn watch(&mut self, events: usize) {
        let events = events.min(self.events.len());
        for event in self.events.drain(..events) {
            match event {
                Event::Set(pod) => self.cluster.set_pod(pod),
                Event::Deleted(uid, node) => self.cluster.remove_pod(&uid, &name(node)),
                Event::Node(node, annotations) => self.cluster.set_node(&name(node), Some(&annotations)),
            }
        }
    }

    pub(super) fn tell(&mut self, uid: &str) {
        if let Some(bound) = self.pods.get(uid).and_then(|pod| bound_pod(uid, pod)) {
            self.events.push(Event::Set(bound));
        }
    }

    pub(super) fn create(&mut self) {
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

    pub(super) fn reserve(&mut self) {
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
    pub(super) fn post(&mut self, claim: &Claim, placement: &PodPlacement) -> bool {
        let Some(pod) = self.pods.get_mut(&claim.uid).filter(|pod| pod.node.is_none()) else { return false };
        pod.node = Some(index(&claim.node));
        pod.annotations.insert(annotation::PLACEMENT.into(), placement.to_string());
        self.tell(&claim.uid);
        true
    }

    pub(super) fn answer(&mut self) {
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
    pub(super) fn seen(&self, uid: &str) -> Seen {
        self.pods.get(uid).map_or(Seen::Gone, |pod| bound_pod(uid, pod).map_or(Seen::Waiting, Seen::Bound))
    }

    pub(super) fn expire(&mut self) {
        // No bind is under way for as long as that.
        while !self.binds.is_empty() {
            self.answer();
        }
        self.now += EXPIRY;
        for (claim, reservation) in self.cluster.expired(self.now, EXPIRY) {
            let seen = self.seen(&claim.uid);
            self.cluster.follow_up(&claim, reservation.attempt, seen, self.now);
        }
    }

    /// Another scheduler, which counts no GPUs, binds a pod.
    pub(super) fn foreign(&mut self) {
        if !self.with_foreign {
            return;
        }
        let Some(uid) = self.any_pod(|pod| pod.node.is_none()) else { return };
        let node = self.random.below(NODES);
        let pod = self.pods.get_mut(&uid).unwrap();
        (pod.node, pod.foreign) = (Some(node), true);
        self.tell(&uid);
    }
}

pub(super) fn bound_pod(uid: &str, pod: &Pod) -> Option<BoundPod> {
    let node = name(pod.node?);
    Some(BoundPod {
        uid: uid.into(),
        holds: holds_of_bound(&pod.wanted.demand, &node, Some(&pod.annotations)),
        node,
        priority: 0,
        ending: false,
    })
}
