//! What kube-scheduler and an extender say to each other, as `k8s.io/kube-scheduler/extender/v1` has it: JSON with Go's
//! field names.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1::Pod;
use serde::{
    Deserialize, Serialize, Serializer,
    de::IgnoredAny,
    ser::{SerializeMap, SerializeSeq},
};

use crate::{Filtered, Victims};

/// `ExtenderArgs`: the question of filter and prioritize.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Question<'a> {
    /// The pod to be scheduled.
    pub pod: Pod,
    /// Candidates. kube-scheduler names them where the extender is configured with `nodeCacheCapable`, and sends
    /// them whole where not.
    #[serde(borrow)]
    pub node_names: Option<Vec<&'a str>>,
}

/// `ExtenderFilterResult`, with the nodes that were named.
///
/// A node that does not fit is always one of those that preemption does not help: kube-scheduler asks only about nodes
/// that all of its own filters pass, and so finds no pod to evict there.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct FilterAnswer<'a> {
    /// Nodes that fit.
    node_names: Option<&'a [&'a str]>,
    /// Nodes that do not, and why.
    #[serde(serialize_with = "as_map")]
    failed_and_unresolvable_nodes: &'a [(&'a str, Arc<str>)],
    /// Why there is no answer.
    error: &'a str,
}

impl<'a> FilterAnswer<'a> {
    /// These nodes fit.
    pub fn filtered(filtered: &'a Filtered<'a>) -> Self {
        Self { node_names: Some(&filtered.fit), failed_and_unresolvable_nodes: &filtered.unfit, error: "" }
    }

    /// There is no answer.
    pub fn error(error: &'a str) -> Self {
        Self { error, ..Self::default() }
    }
}

fn as_map<S: Serializer>(pairs: &&[(&str, Arc<str>)], serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(pairs.len()))?;
    for (name, reason) in *pairs {
        map.serialize_entry(name, &**reason)?;
    }
    map.end()
}

/// `HostPriorityList`: the answer to prioritize.
#[derive(Debug)]
pub struct Scores<'a>(pub Vec<(&'a str, u64)>);

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct HostPriority<'a> {
    host: &'a str,
    score: u64,
}

impl Serialize for Scores<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.0.len()))?;
        for (host, score) in &self.0 {
            list.serialize_element(&HostPriority { host, score: *score })?;
        }
        list.end()
    }
}

/// `ExtenderBindingArgs`: the order to bind.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct BindOrder {
    /// The pod.
    pub pod_name: String,
    /// Its namespace.
    pub pod_namespace: String,
    /// Its UID.
    #[serde(rename = "PodUID")]
    pub pod_uid: String,
    /// The node that was picked.
    pub node: String,
}

/// `ExtenderBindingResult`; an empty error means that the pod is bound.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct BindAnswer<'a> {
    /// Why it is not.
    pub error: &'a str,
}

/// `ExtenderPreemptionArgs`: kube-scheduler's own victims, by node.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct PreemptQuestion<'a> {
    /// The pod to be scheduled.
    pub pod: Pod,
    /// Victims by UID, where the extender is configured with `nodeCacheCapable`.
    #[serde(borrow)]
    pub node_name_to_meta_victims: Option<BTreeMap<&'a str, MetaVictims<'a>>>,
    /// Whole pods, where it is not; they are not read.
    pub node_name_to_victims: Option<IgnoredAny>,
}

/// `MetaVictims`: pods that have to end on a node.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct MetaVictims<'a> {
    /// The pods.
    #[serde(borrow)]
    pub pods: Option<Vec<MetaPod<'a>>>,
    /// Disruption budgets that this breaks.
    #[serde(rename = "NumPDBViolations")]
    pub pdb_violations: i64,
}

/// `MetaPod`.
#[derive(Debug, Deserialize, Serialize)]
pub struct MetaPod<'a> {
    /// UID.
    #[serde(rename = "UID", borrow)]
    pub uid: Cow<'a, str>,
}

/// `ExtenderPreemptionResult`.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct PreemptAnswer<'a> {
    node_name_to_meta_victims: BTreeMap<&'a str, MetaVictims<'a>>,
}

impl<'a> PreemptAnswer<'a> {
    /// On this node, these pods make room.
    pub fn add(&mut self, victims: Victims<'a>, pdb_violations: i64) {
        let pods = victims.uids.into_iter().map(|uid| MetaPod { uid }).collect();
        self.node_name_to_meta_victims.insert(victims.node, MetaVictims { pods: Some(pods), pdb_violations });
    }
}
