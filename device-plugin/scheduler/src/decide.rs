//! What kube-scheduler asks: which nodes fit, which are best, and whose end would make room. All of it reads what the
//! cluster keeps up to date; none of it changes anything.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use ledger::NoRoom;

use crate::{
    Claim, Cluster, Wanted,
    node::{Known, Node, Room, SCORE_MAX},
    plan,
};

/// Nodes of one answer whose refusal says what each GPU lacks. kube-scheduler puts all different texts into the pod's
/// status and event, and counts equal ones; so the rest of a large cluster gets one text.
const DETAILED_NODES: usize = 8;

/// Which nodes a pod fits on.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Filtered<'a> {
    /// Nodes that it fits on, in the order of the question.
    pub fit: Vec<&'a str>,
    /// Nodes that it does not fit on, and why. Most nodes of a large cluster share a reason.
    pub unfit: Vec<(&'a str, Arc<str>)>,
}

/// Pods that have to end so that another fits on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Victims<'a> {
    /// The node.
    pub node: &'a str,
    /// Their UIDs: those that were named, and those that are needed beside them.
    pub uids: Vec<Cow<'a, str>>,
}

impl Cluster {
    /// Which of `names` the pod fits on. Room that is reserved for the pod itself counts as free.
    pub fn filter<'a>(&'a self, uid: &str, wanted: &Wanted, names: &[&'a str]) -> Filtered<'a> {
        let mut filtered = Filtered::default();
        if wanted.demand.is_empty() {
            filtered.fit = names.to_vec();
            return filtered;
        }
        let own = self.claims_of(uid);
        let unknown: Arc<str> = "vcuda-scheduler has not seen the node yet; it is tried again".into();
        let mut detailed = 0;
        let mut headlines: BTreeMap<usize, Arc<str>> = BTreeMap::new();
        for name in names {
            let Some(node) = self.nodes.get(*name) else {
                filtered.unfit.push((name, unknown.clone()));
                continue;
            };
            if let Some(reason) = node.trouble() {
                filtered.unfit.push((name, reason.clone()));
                continue;
            }
            let rooms = left_for(uid, &own, name, node);
            if node.fits(&rooms, wanted) {
                filtered.fit.push(name);
                continue;
            }
            let reason = match wanted.demand.containers.as_slice() {
                [one] if detailed >= DETAILED_NODES => {
                    let free = node.takers(&rooms, &one.request, &wanted.filter).count();
                    let no_room =
                        || NoRoom { request: one.request, free, lacks: Vec::new() }.headline().into();
                    headlines.entry(free).or_insert_with(no_room).clone()
                }
                _ => refusal(node, &rooms, wanted, detailed < DETAILED_NODES).into(),
            };
            detailed += 1;
            filtered.unfit.push((name, reason));
        }
        filtered
    }

    /// Whether the pod fits on the node `name`, as [`Cluster::filter`] has it.
    pub fn fits(&self, uid: &str, wanted: &Wanted, name: &str) -> bool {
        let own = self.claims_of(uid);
        let node = self.nodes.get(name).filter(|node| node.trouble().is_none());
        node.is_some_and(|node| node.fits(&left_for(uid, &own, name, node), wanted))
    }

    /// How well each of `names` suits, 0 to `SCORE_MAX`: the best has all of it, the others by how far they are from
    /// the worst, and never as much as the best.
    pub fn prioritize<'a>(&self, uid: &str, wanted: &Wanted, names: &[&'a str]) -> Vec<(&'a str, u64)> {
        let own = self.claims_of(uid);
        if wanted.demand.is_empty() {
            return names.iter().map(|name| (*name, 0)).collect();
        }
        let fitness = |name: &&'a str| {
            let node = self.nodes.get(*name);
            (*name, node.map_or(0, |node| node.fitness(&left_for(uid, &own, name, node), wanted)))
        };
        let mut scores: Vec<_> = names.iter().map(fitness).collect();
        let best = scores.iter().map(|(_, fitness)| *fitness).max().unwrap_or(0);
        let worst = scores.iter().map(|(_, fitness)| *fitness).min().unwrap_or(0);
        for (_, score) in &mut scores {
            // Fitness is far below 2^32, so nothing overflows.
            *score = match *score {
                fitness if fitness == best => SCORE_MAX,
                fitness => (fitness - worst) * SCORE_MAX / (best - worst),
            };
        }
        scores
    }

    /// Whether a pod fits on `name` once the pods `named` have ended, and if not, which pods of a lower priority have
    /// to end as well: as few as it takes, the least important first. None when nothing helps.
    ///
    /// A pod of which only the API server has said that it is bound may have to end: kube-scheduler assumed it on its node
    /// before it had it bound. One whose bind is not known to have been carried out may not: kube-scheduler may have
    /// forgotten it, and it gives up the whole preemption for a pod that it does not know (`convertPodUIDToPod` in its
    /// extender.go).
    pub fn victims<'a>(
        &'a self,
        wanted: &Wanted,
        name: &'a str,
        named: Vec<Cow<'a, str>>,
    ) -> Option<Victims<'a>> {
        if wanted.demand.is_empty() {
            return Some(Victims { node: name, uids: named });
        }
        let node = self.nodes.get(name).filter(|node| node.trouble().is_none())?;
        // Pods that are ending anyway make room by themselves.
        let mut gone: HashSet<&str> = node
            .pods
            .iter()
            .filter(|(uid, pod)| pod.ending || named.iter().any(|named| **named == ***uid))
            .map(|(uid, _)| &**uid)
            .collect();
        let fit = |gone: &HashSet<&str>| node.fits(&node.rooms_with(|uid| !gone.contains(uid)), wanted);
        let mut more: Vec<(&str, i32)> = Vec::new();
        if !fit(&gone) {
            more = node
                .pods
                .iter()
                .filter(|(uid, pod)| {
                    pod.priority < wanted.priority && pod.known != Known::Reserved && !gone.contains(&***uid)
                })
                .map(|(uid, pod)| (&**uid, pod.priority))
                .collect();
            gone.extend(more.iter().map(|(uid, _)| *uid));
            if !fit(&gone) {
                return None;
            }
            // Spare whom we can, the most important first.
            more.sort_by_key(|(uid, priority)| (std::cmp::Reverse(*priority), *uid));
            more.retain(|(uid, _)| {
                gone.remove(uid);
                let spared = fit(&gone);
                if !spared {
                    gone.insert(uid);
                }
                !spared
            });
        }
        let uids = named.into_iter().chain(more.into_iter().map(|(uid, _)| uid.into())).collect();
        Some(Victims { node: name, uids })
    }
}

/// What is left on a node for the pod; `own` are the places where room is reserved for the pod itself, which counts as
/// free.
fn left_for<'a>(uid: &str, own: &[Claim], name: &str, node: &'a Node) -> Cow<'a, [Room]> {
    match own.iter().any(|claim| claim.node == name) {
        true => node.rooms_with(|other| other != uid).into(),
        false => node.rooms().into(),
    }
}

/// Why the pod does not fit on `node`, when `rooms` are left there.
fn refusal(node: &Node, rooms: &[Room], wanted: &Wanted, detailed: bool) -> String {
    let Err(misfit) = plan(&node.free_in(rooms), &wanted.demand, &node.rules(wanted)) else {
        return "it fits, but did not a moment ago".into();
    };
    if !detailed {
        return misfit.no_room.headline();
    }
    let mut text = misfit.to_string();
    if node.unplaced() > 0 {
        text.push_str(&format!(
            "; {} container(s) there do not say which GPU they are on, and count on each",
            node.unplaced()
        ));
    }
    text
}
