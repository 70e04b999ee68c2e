//! Makes kube-scheduler try a pod again that it was told fits nowhere, when word of room comes after that answer. The
//! only sign that it takes is a change of the pod: an annotation, written through the pod's status, for which
//! vcuda-scheduler needs no right to change what a pod runs. Pods that kube-scheduler refuses by itself, by the totals
//! of nodes, are not among them: no change of the pod makes it try these again.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tracing::{info, warn};
use vcuda_config::annotation;

use crate::{Filtered, RefusedPod, Service, Wanted, service::count};

/// Pause between two looks. Word of room counts at the second look after it came: mostly kube-scheduler has asked again
/// by then, and nothing is written.
const PAUSE: Duration = Duration::from_secs(1);

/// Pods that are nudged at one look. One that is bound then makes kube-scheduler try all others that were refused.
const AT_ONCE: usize = 4;

impl Service {
    /// Notes what kube-scheduler is told about a pod and the nodes that it named.
    pub(crate) fn note_filtered(
        &self,
        pod: &Pod,
        wanted: &Arc<Wanted>,
        nodes: &[&str],
        filtered: &Filtered<'_>,
    ) {
        let metadata = &pod.metadata;
        let (Some(uid), Some(namespace), Some(name)) = (&metadata.uid, &metadata.namespace, &metadata.name)
        else {
            return;
        };
        if filtered.fit.is_empty() {
            self.refused().note(uid, (namespace, name), Arc::clone(wanted), nodes, Instant::now());
        } else {
            self.refused().remove(uid);
        }
    }

    /// Nudges pods that were refused and for which there is room now. Never returns.
    pub async fn nudge(&self) {
        let mut tick = interval(PAUSE);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut fresh, mut roomier) = (BTreeSet::new(), BTreeSet::new());
        loop {
            tick.tick().await;
            if self.refused().is_empty() || self.standing().check().is_err() {
                continue;
            }
            roomier.append(&mut fresh);
            fresh = self.cluster_mut().take_roomier();
            let pods = {
                let cluster = self.cluster();
                self.refused().fitting(&cluster, &roomier, Instant::now(), AT_ONCE)
            };
            let mut all = pods.len() < AT_ONCE;
            for (pod, node) in pods {
                if !self.nudge_one(&pod, node).await {
                    all = false;
                    break;
                }
                self.refused().forget(&pod);
            }
            if all {
                roomier.clear();
            }
        }
    }

    /// False when it is worth another attempt.
    async fn nudge_one(&self, pod: &RefusedPod, node: &str) -> bool {
        let RefusedPod { uid, namespace, name, .. } = pod;
        let change = json!({ "metadata": {
            // Another pod of the same name is not the one that was refused.
            "uid": uid,
            "annotations": { annotation::ROOM: format!("{} {node}", Timestamp::now()) },
        } });
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let (params, change) = (PatchParams::default(), Patch::Merge(&change));
        let said = format!("{namespace}/{name}");
        let answer = timeout(self.settings.bind_timeout, pods.patch_status(name, &params, &change)).await;
        let (error, again) = match answer {
            Ok(Ok(_)) => {
                count(&self.counters.nudges);
                info!(pod = said, node, "word of room came late, so kube-scheduler is made to try it again");
                return true;
            }
            // It is gone, and another may have its name.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => return true,
            Ok(Err(kube::Error::Api(status))) if status.code == 403 => {
                let remedy = "apply the ClusterRole vcuda-scheduler of config/deploy/scheduler.yaml";
                (format!("{}; {remedy}", status.message), false)
            }
            Ok(Err(error)) => (error.to_string(), true),
            Err(_) => (format!("no answer within {:?}", self.settings.bind_timeout), true),
        };
        warn!(pod = said, node, "there is room, but kube-scheduler cannot be made to try it again: {error}");
        !again
    }
}
