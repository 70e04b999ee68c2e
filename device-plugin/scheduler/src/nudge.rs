//! Makes kube-scheduler try a pod again that it was told fits nowhere, when word of room comes after that answer. The
//! only sign that it takes is a change of the pod: an annotation, written through the pod's status. Whoever has that right
//! cannot change what a pod runs, but can write all else that its status and metadata say, its addresses and its placement
//! among them; config/deploy/admission.yaml keeps vcuda-scheduler's account from that. Pods that kube-scheduler refuses by
//! itself, by the totals of nodes, are not among those that are tried again: no change of the pod makes it try these.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tracing::{info, warn};
use vcuda_config::annotation;

use crate::{
    Filtered, RefusedPod, Service, Wanted,
    service::{count, in_time},
};

/// Pause between two looks. Word of room counts at the second look after it came: mostly kube-scheduler has asked again
/// by then, and nothing is written.
const PAUSE: Duration = Duration::from_secs(1);

/// Pods that are nudged at one look. One that is bound then makes kube-scheduler try all others that were refused.
const AT_ONCE: usize = 4;

/// Goes through the pods that one look takes, and the pause between two: the books change meanwhile.
const GOES: usize = 20;
const BREATH: Duration = Duration::from_millis(20);

/// Longest pause before the API server is asked once more for the pods that wait.
const LONGEST: Duration = Duration::from_secs(60);

/// Pods that wait to be scheduled.
const WAITING: &str = "spec.nodeName=,status.phase=Pending";

/// Pods of one answer of the API server.
const PAGE: u32 = 500;

/// What came of a nudge.
enum Nudged {
    /// Nothing is left to do.
    Done,
    /// It failed for this pod.
    Failed,
    /// The API server cannot be reached.
    Unreachable,
}

impl Service {
    /// Notes what kube-scheduler is told about a pod and the nodes that it named.
    pub(crate) fn note_filtered(
        &self,
        pod: &Pod,
        wanted: &Arc<Wanted>,
        nodes: &[&str],
        filtered: &Filtered<'_>,
    ) {
        if !filtered.fit.is_empty() {
            self.refused().remove(pod.metadata.uid.as_deref().unwrap_or_default());
        } else if let Some(refused) = refused(pod, Arc::clone(wanted), Some(nodes)) {
            self.refused().note(refused);
        }
    }

    /// Nudges pods that were refused and for which there is room now. Never returns.
    pub async fn nudge(&self) {
        let mut tick = interval(PAUSE);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut fresh = (BTreeSet::new(), Instant::now());
        let mut takes_over = Some((Instant::now(), PAUSE));
        loop {
            tick.tick().await;
            // Room that came while nobody waited, or while another replica led, is no news to whoever waits later.
            let mut word = self.word();
            if self.standing().check().is_err() {
                self.refused().drop_word();
                fresh = (BTreeSet::new(), Instant::now());
                continue;
            }
            if let Some((_, pause)) = takes_over.filter(|(at, _)| *at <= Instant::now()) {
                match self.take_over().await {
                    Ok(()) => {
                        takes_over = None;
                        word = (self.cluster().names(), Instant::now());
                    }
                    Err(error) => {
                        warn!(
                            "not known which pods wait, so word of room that came before is not heard: {error}"
                        );
                        takes_over = Some((Instant::now() + pause, (pause * 2).min(LONGEST)));
                    }
                }
            }
            let (nodes, at) = std::mem::replace(&mut fresh, word);
            if self.refused().is_empty() {
                self.refused().drop_word();
                fresh = (BTreeSet::new(), Instant::now());
                continue;
            }
            self.refused().hear(nodes, at);
            self.look().await;
        }
    }

    /// The nodes that have come to have room, and the time: a pod that is refused later was refused in spite of it.
    fn word(&self) -> (BTreeSet<Box<str>>, Instant) {
        let mut cluster = self.cluster_mut();
        (cluster.take_roomier(), Instant::now())
    }

    /// Notes the pods that kube-scheduler has given up. Whoever answered it before this process did may have told it so
    /// because word of room came late; which nodes were asked about is not known.
    async fn take_over(&self) -> Result<(), String> {
        let pods: Api<Pod> = Api::all(self.client.clone());
        let mut params = ListParams::default().fields(WAITING).limit(PAGE);
        loop {
            let list = in_time(self.settings.bind_timeout, pods.list(&params)).await?;
            list.items.iter().filter(|pod| is_given_up(pod)).for_each(|pod| self.note_given_up(pod));
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(()),
            }
        }
    }

    fn note_given_up(&self, pod: &Pod) {
        // What asks for the impossible fits nowhere, and a pod without a share is not refused here.
        let wanted = self.read(pod).ok().filter(|wanted| !wanted.demand.is_empty());
        if let Some(refused) = wanted.and_then(|wanted| refused(pod, wanted, None)) {
            self.refused().note_if_new(refused);
        }
    }

    async fn look(&self) {
        let mut left = AT_ONCE;
        for _ in 0..GOES {
            let due = {
                let cluster = self.cluster();
                self.refused().due(&cluster, Instant::now(), left)
            };
            left -= due.pods.len();
            if !self.nudge_all(due.pods).await || !due.more || left == 0 {
                return;
            }
            sleep(BREATH).await;
        }
    }

    /// Nudges pods, each of which has room on its node. False when the API server cannot be reached.
    async fn nudge_all(&self, pods: Vec<(RefusedPod, Box<str>)>) -> bool {
        let mut reachable = true;
        for (pod, node) in pods {
            let nudged = if reachable { self.nudge_one(&pod, &node).await } else { Nudged::Failed };
            reachable &= !matches!(nudged, Nudged::Unreachable);
            match nudged {
                Nudged::Done => self.refused().forget(&pod),
                Nudged::Failed | Nudged::Unreachable => self.refused().postpone(&pod, &node, Instant::now()),
            }
        }
        reachable
    }

    async fn nudge_one(&self, pod: &RefusedPod, node: &str) -> Nudged {
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
        let (error, nudged) = match answer {
            Ok(Ok(_)) => {
                count(&self.counters.nudges);
                info!(pod = said, node, "word of room came late, so kube-scheduler is made to try it again");
                return Nudged::Done;
            }
            // It is gone, and another may have its name: that a UID is another one is answered as an attempt to change it
            // (422, `ValidateObjectMetaAccessorUpdate` in Kubernetes' objectmeta.go).
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409 | 422) => {
                info!(pod = said, node, "is not tried again: {}", status.message);
                return Nudged::Done;
            }
            Ok(Err(kube::Error::Api(status))) if status.code == 403 => {
                let mut error = status.message.clone();
                if error.contains("cannot patch resource") {
                    error.push_str("; apply the ClusterRole vcuda-scheduler of config/deploy/scheduler.yaml");
                }
                (error, Nudged::Done)
            }
            Ok(Err(error @ (kube::Error::Service(_) | kube::Error::HyperError(_)))) => {
                (error.to_string(), Nudged::Unreachable)
            }
            Ok(Err(error)) => (error.to_string(), Nudged::Failed),
            Err(_) => (format!("no answer within {:?}", self.settings.bind_timeout), Nudged::Failed),
        };
        warn!(pod = said, node, "there is room, but kube-scheduler cannot be made to try it again: {error}");
        nudged
    }
}

/// A pod that is refused at this moment; none without the names that every pod of an API server has.
fn refused(pod: &Pod, wanted: Arc<Wanted>, nodes: Option<&[&str]>) -> Option<RefusedPod> {
    let metadata = &pod.metadata;
    let (uid, namespace, name) =
        (metadata.uid.as_ref()?, metadata.namespace.as_ref()?, metadata.name.as_ref()?);
    Some(RefusedPod::new(uid, (namespace, name), wanted, nodes, Instant::now()))
}

/// Whether kube-scheduler has found no node for a pod and waits for a change.
fn is_given_up(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    let given_up = conditions.into_iter().flatten().any(|condition| {
        condition.type_ == "PodScheduled"
            && condition.status == "False"
            && condition.reason.as_deref() == Some("Unschedulable")
    });
    given_up && pod.metadata.deletion_timestamp.is_none()
}

#[cfg(test)]
mod tests;
