//! What pods and nodes say, and what they should say. Pure; it knows no API server.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use ledger::Shares;
use vcuda_config::{GpuUuid, PodPlacement, Resources, annotation};

use crate::expected::Expected;

/// Set by kubelet on the API server's copy of a static pod: the UID by which kubelet, and so the ledger, knows it.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// A pod on this node, as far as it matters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PodOnNode {
    pub(super) namespace: String,
    pub(super) name: String,
    /// The API server's UID of it.
    pub(super) api_uid: String,
    /// Where it says that its shares are; what cannot be read says nothing.
    pub(super) placement: Option<PodPlacement>,
    /// What its containers ask, core and memory, in the order in which they start; none once it has ended.
    asks: Vec<(String, u32, u32)>,
}

impl PodOnNode {
    /// The pod, and the UID by which kubelet knows it.
    pub(super) fn read(pod: &Pod, names: &Resources) -> Option<(String, Self)> {
        let api_uid = pod.uid()?;
        let uid = pod.annotations().get(MIRROR).cloned().unwrap_or_else(|| api_uid.clone());
        let placement = pod.annotations().get(annotation::PLACEMENT).and_then(|text| text.parse().ok());
        let ended = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let ended = matches!(ended, Some("Succeeded" | "Failed"));
        let containers = pod
            .spec
            .iter()
            .filter(|_| !ended)
            .flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers));
        let asks = containers.map(|one| {
            let units = |name: String| {
                let limits = one.resources.as_ref().and_then(|it| it.limits.as_ref());
                limits.and_then(|limits| limits.get(&name)?.0.parse().ok()).unwrap_or(0)
            };
            (one.name.clone(), units(names.core_name()), units(names.memory_name()))
        });
        let asks = asks.filter(|(_, core, _)| *core > 0).collect();
        Some((
            uid,
            Self {
                asks,
                namespace: pod.namespace().unwrap_or_default(),
                name: pod.name_any(),
                api_uid,
                placement,
            },
        ))
    }
}

/// Where the shares of one pod are, by container, and when the first was bound, in seconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Containers {
    pub(super) since: u64,
    pub(super) gpus: BTreeMap<String, Vec<GpuUuid>>,
}

/// The shares, by their pod's UID.
pub(super) fn by_pod(shares: &Shares) -> BTreeMap<String, Containers> {
    let mut pods: BTreeMap<String, Containers> = BTreeMap::new();
    for record in shares.records.values() {
        let pod = pods.entry(record.pod.uid.clone()).or_default();
        let since = record.bound_at / 1000;
        pod.since = if pod.gpus.is_empty() { since } else { pod.since.min(since) };
        let gpus = record.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        pod.gpus.insert(record.container.name.clone(), gpus);
    }
    pods
}

/// Containers that were placed here and have no share yet, in the order in which they were placed.
pub(super) fn expected(
    pods: &BTreeMap<String, PodOnNode>,
    bound: &BTreeMap<String, Containers>,
) -> Vec<Expected> {
    let mut placed: Vec<(u64, &String, &PodOnNode, &PodPlacement)> = pods
        .iter()
        .filter(|(_, pod)| !pod.asks.is_empty())
        .filter_map(|(uid, pod)| {
            let placement = pod.placement.as_ref()?;
            Some((placement.placed_at, uid, pod, placement))
        })
        .collect();
    placed.sort_by_key(|(at, uid, ..)| (*at, *uid));
    let mut expected = Vec::new();
    for (_, uid, pod, placement) in placed {
        let has_share =
            |container: &str| bound.get(uid.as_str()).is_some_and(|known| known.gpus.contains_key(container));
        for (container, core, memory) in &pod.asks {
            let gpus = placement.gpus(container);
            if !gpus.is_empty() && !has_share(container) {
                expected.push(Expected {
                    pod: uid.clone(),
                    container: container.clone(),
                    core: *core,
                    memory: *memory,
                    gpus: gpus.to_vec(),
                });
            }
        }
    }
    expected
}

/// What a pod should say that says `there` and whose containers are where `known` has them; none when it says so
/// already. Of containers that have no share (yet, or any more) it goes on to say what it said.
pub(super) fn corrected(there: Option<&PodPlacement>, known: &Containers) -> Option<PodPlacement> {
    let mut now =
        there.cloned().unwrap_or_else(|| PodPlacement { placed_at: known.since, ..Default::default() });
    for (container, gpus) in &known.gpus {
        let said = now.containers.entry(container.clone()).or_default();
        // The order is the scheduler's to choose.
        let same = said.len() == gpus.len() && gpus.iter().all(|gpu| said.contains(gpu));
        if !same {
            said.clone_from(gpus);
        }
    }
    (there != Some(&now)).then_some(now)
}

/// The GPUs that a node's annotation cordons, and what of it is no UUID.
pub(super) fn cordoned(text: &str) -> (BTreeSet<GpuUuid>, Option<String>) {
    let mut misread = None;
    let entries = text.split(',').map(str::trim).filter(|entry| !entry.is_empty());
    let gpus = entries.filter_map(|entry| match entry.parse() {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            misread = Some(format!("{error}"));
            None
        }
    });
    (gpus.collect(), misread)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(n: u8) -> GpuUuid {
        GpuUuid::from_bytes([n; 16])
    }

    fn known(containers: &[(&str, &[u8])]) -> Containers {
        let gpus =
            containers.iter().map(|(name, gpus)| ((*name).into(), gpus.iter().map(|n| gpu(*n)).collect()));
        Containers { since: 7, gpus: gpus.collect() }
    }

    #[test]
    fn a_pod_that_says_nothing_is_told_where_it_is() {
        let now = corrected(None, &known(&[("main", &[1])])).unwrap();
        assert_eq!(now.to_string(), format!("1;7;main={}", gpu(1)));
        assert_eq!(corrected(Some(&now), &known(&[("main", &[1])])), None);
    }

    #[test]
    fn a_schedulers_choice_stays_as_it_is_where_the_share_is_there() {
        let text = format!("1;5;init={};main={},{}", gpu(3), gpu(2), gpu(1));
        let there: PodPlacement = text.parse().unwrap();
        assert_eq!(corrected(Some(&there), &known(&[("main", &[1, 2])])), None);
        let moved = corrected(Some(&there), &known(&[("main", &[1, 4])])).unwrap();
        assert_eq!(moved.to_string(), format!("1;5;init={};main={},{}", gpu(3), gpu(1), gpu(4)));
    }

    #[test]
    fn a_typing_mistake_in_a_cordon_costs_its_own_entry_only() {
        assert_eq!(cordoned(""), (BTreeSet::new(), None));
        let (gpus, misread) = cordoned(&format!(" {}, GPU-1 ,{},", gpu(1), gpu(2)));
        assert_eq!(gpus, BTreeSet::from([gpu(1), gpu(2)]));
        assert!(misread.unwrap().contains("GPU-1"));
    }

    #[test]
    fn what_was_placed_and_has_no_share_is_expected_the_first_placed_first() {
        let limits = |core: u32, memory: u32| {
            serde_json::json!({ "limits": {
                "tencent.com/vcuda-core": core.to_string(), "tencent.com/vcuda-memory": memory.to_string(),
            } })
        };
        let pod = |uid: &str, placement: Option<String>, phase: &str| {
            let annotations: BTreeMap<_, _> =
                placement.map(|text| (annotation::PLACEMENT, text)).into_iter().collect();
            let pod = serde_json::from_value(serde_json::json!({
                "metadata": { "name": uid, "namespace": "n", "uid": uid, "annotations": annotations },
                "spec": {
                    "initContainers": [{ "name": "init", "resources": limits(30, 4) }],
                    "containers": [{ "name": "main", "resources": limits(20, 8) }, { "name": "log" }],
                },
                "status": { "phase": phase },
            }));
            PodOnNode::read(&pod.unwrap(), &Resources::default()).unwrap()
        };
        let at = |time: u32| Some(format!("1;{time};init={};main={}", gpu(1), gpu(2)));
        let pods = BTreeMap::from([
            pod("a", at(9), "Pending"),
            pod("b", at(8), "Pending"),
            pod("c", None, "Pending"),
            pod("d", at(7), "Succeeded"),
            pod("e", Some("rubbish".into()), "Pending"),
        ]);
        let bound = BTreeMap::from([("b".to_owned(), known(&[("init", &[1])]))]);
        let expected = expected(&pods, &bound);
        let said: Vec<_> =
            expected.iter().map(|it| (it.pod.as_str(), it.container.as_str(), it.core, it.memory)).collect();
        assert_eq!(said, [("b", "main", 20, 8), ("a", "init", 30, 4), ("a", "main", 20, 8)]);
        assert_eq!(expected[0].gpus, [gpu(2)]);
    }

    #[test]
    fn a_static_pod_goes_by_the_uid_that_kubelet_gave_it() {
        let pod = |annotations| {
            serde_json::from_value::<Pod>(serde_json::json!({ "metadata": {
                "name": "p", "namespace": "n", "uid": "api", "annotations": annotations,
            } }))
            .unwrap()
        };
        let (uid, plain) = PodOnNode::read(&pod(serde_json::json!({})), &Resources::default()).unwrap();
        assert_eq!((uid.as_str(), plain.api_uid.as_str(), plain.placement), ("api", "api", None));
        let (uid, mirror) =
            PodOnNode::read(&pod(serde_json::json!({ MIRROR: "file" })), &Resources::default()).unwrap();
        assert_eq!((uid.as_str(), mirror.api_uid.as_str()), ("file", "api"));
    }
}
