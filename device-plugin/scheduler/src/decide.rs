//! What kube-scheduler asks: which nodes fit, which are best, and whose end would make room. All of it reads what the
//! cluster keeps up to date; none of it changes anything.

use std::{borrow::Cow, collections::HashSet};

use ledger::NoRoom;

use crate::{
    Cluster, Wanted,
    node::{Node, Room},
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
    /// Nodes that it does not fit on, and why.
    pub unfit: Vec<(&'a str, Cow<'a, str>)>,
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
        let mut detailed = 0;
        for name in names {
            let Some(node) = self.nodes.get(*name) else {
                let reason = "vcuda-scheduler has not seen the node yet; it is tried again";
                filtered.unfit.push((name, reason.into()));
                continue;
            };
            if let Some(reason) = node.trouble() {
                filtered.unfit.push((name, reason.into()));
                continue;
            }
            let rooms = node.rooms_for(uid);
            if node.fits(&rooms, wanted) {
                filtered.fit.push(name);
                continue;
            }
            detailed += 1;
            filtered.unfit.push((name, refusal(node, &rooms, wanted, detailed <= DETAILED_NODES).into()));
        }
        filtered
    }

    /// How well each of `names` suits, 0 to 10.
    pub fn prioritize<'a>(&self, uid: &str, wanted: &Wanted, names: &[&'a str]) -> Vec<(&'a str, u64)> {
        let score = |name: &&'a str| {
            let node = self.nodes.get(*name).filter(|_| !wanted.demand.is_empty());
            (*name, node.map_or(0, |node| node.score(&node.rooms_for(uid), wanted)))
        };
        names.iter().map(score).collect()
    }

    /// Whether a pod fits on `name` once the pods `named` have ended, and if not, which pods of a lower priority have
    /// to end as well: as few as it takes, the least important first. None when nothing helps.
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
                    pod.priority < wanted.priority && pod.seen.is_some() && !gone.contains(&***uid)
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

/// Why the pod does not fit on `node`, when `rooms` are left there.
fn refusal(node: &Node, rooms: &[Room], wanted: &Wanted, detailed: bool) -> String {
    if let ([one], false) = (wanted.demand.containers.as_slice(), detailed) {
        let free = node.takers(rooms, &one.request, &wanted.filter).count();
        return NoRoom { request: one.request, free, lacks: Vec::new() }.headline();
    }
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
