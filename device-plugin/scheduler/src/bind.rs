//! Binding: room is reserved, then one request to the API server puts the pod on its node and writes the choice on it.
//! The annotations of a Binding are merged into the pod's in the same write that sets its node (`setPodNodeAndMetadata`
//! in kube-apiserver), so there is no pod with one but not the other, and a failed bind leaves nothing behind.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use k8s_openapi::{
    api::core::v1::{Binding, ObjectReference, Pod},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{Api, api::PostParams, core::Status};
use thiserror::Error;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tracing::{info, warn};
use vcuda_config::annotation;

use crate::{
    Claim, Found, NotServing, Refusal, Reservation, Seen, Service, Wanted,
    service::{count, in_time},
    wire::BindOrder,
};

/// Why a pod was not bound, or is not known to be.
#[derive(Debug, Error)]
pub enum BindError {
    /// It cannot run anywhere.
    #[error("{0}")]
    Wanted(#[from] crate::WantedError),
    /// There is no room.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// This replica stopped leading in between.
    #[error(transparent)]
    NotServing(#[from] NotServing),
    /// The pod is no longer there to be bound.
    #[error("the pod was deleted")]
    Gone,
    /// The pod could not be read.
    #[error("the API server did not tell what the pod asks for: {0}")]
    Unread(String),
    /// The API server said no.
    #[error("the API server refused to bind the pod: {0}")]
    ApiServer(String),
    /// Nobody knows yet.
    #[error(
        "the API server did not say whether the pod was bound ({0}); its room is kept until that is known"
    )]
    Unknown(String),
}

/// What the API server made of a binding.
enum Posted {
    /// The pod is on the node.
    Bound,
    /// It certainly is not, because of this request.
    Refused(Box<Status>),
    /// It may be.
    Unknown(String),
}

impl Service {
    /// Binds a pod to the node that kube-scheduler picked, and to the GPUs that are picked here.
    pub async fn bind(&self, order: BindOrder) -> Result<(), BindError> {
        let BindOrder { pod_name, pod_namespace, pod_uid, node } = order;
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &pod_namespace);
        let wanted = match self.recall(&pod_uid) {
            Some(wanted) => wanted,
            // This process was started since the pod was filtered.
            None => self.look_up(&pods, &pod_name, &pod_uid).await?,
        };
        let claim = Claim { uid: pod_uid, node };
        if wanted.demand.is_empty() {
            return self.settle(&pods, &pod_name, &claim, None).await;
        }
        let (now, since_1970) = (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH));
        let placed_at = since_1970.map_or(0, |since| since.as_secs());
        let reservation = self
            .cluster_mut()
            .reserve(&claim, &pod_namespace, &pod_name, &wanted, placed_at, now)
            .inspect_err(|_| count(&self.counters.bind_refused))?;
        self.settle(&pods, &pod_name, &claim, Some(&reservation)).await
    }

    async fn look_up(&self, pods: &Api<Pod>, name: &str, uid: &str) -> Result<Arc<Wanted>, BindError> {
        let pod = self.find(pods, name, uid).await.map_err(BindError::Unread)?.ok_or(BindError::Gone)?;
        Ok(self.read(&pod)?)
    }

    /// Posts the binding, and books what came of it.
    async fn settle(
        &self,
        pods: &Api<Pod>,
        name: &str,
        claim: &Claim,
        reservation: Option<&Reservation>,
    ) -> Result<(), BindError> {
        // Right before the request: a replica that was held up must not bind when another leads.
        self.standing().check().inspect_err(|_| self.cluster_mut().refused(claim))?;
        let mut posted = self.post(pods, name, claim, reservation).await;
        if let Posted::Refused(status) = &posted
            && status.code == 409
        {
            // An earlier attempt, even of an earlier process, may have been carried out although its answer was lost.
            let seen = self.find(pods, name, &claim.uid).await.map(|pod| self.seen(pod));
            posted = match seen.map(|seen| self.cluster_mut().book(claim, seen)) {
                Ok(Found::Here) => Posted::Bound,
                Ok(Found::Waiting | Found::Elsewhere | Found::Gone) => posted,
                Err(error) => Posted::Unknown(error),
            };
        }
        match posted {
            Posted::Bound => {
                count(&self.counters.bound);
                self.cluster_mut().bound(claim);
                if let Some(reservation) = reservation {
                    let said = format!("{}/{name}", reservation.namespace);
                    info!(pod = said, node = claim.node, placement = %reservation.placement, "bound");
                }
                Ok(())
            }
            Posted::Refused(status) => {
                count(&self.counters.bind_refused);
                self.cluster_mut().refused(claim);
                Err(BindError::ApiServer(status.message))
            }
            Posted::Unknown(error) => {
                count(&self.counters.bind_unknown);
                Err(BindError::Unknown(error))
            }
        }
    }

    async fn post(
        &self,
        pods: &Api<Pod>,
        name: &str,
        claim: &Claim,
        reservation: Option<&Reservation>,
    ) -> Posted {
        let placement = reservation.map(|reservation| reservation.placement.to_string());
        let annotations =
            placement.map(|placement| BTreeMap::from([(annotation::PLACEMENT.to_owned(), placement)]));
        let binding = Binding {
            metadata: ObjectMeta {
                name: Some(name.into()),
                // Another pod of the same name is not the one that was placed.
                uid: Some(claim.uid.clone()),
                annotations,
                ..ObjectMeta::default()
            },
            target: ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("Node".into()),
                name: Some(claim.node.clone()),
                ..ObjectReference::default()
            },
        };
        let params = PostParams::default();
        let request = pods.create_subresource::<_, Status>("binding", name, &params, &binding);
        match timeout(self.settings.bind_timeout, request).await {
            Ok(Ok(_)) => Posted::Bound,
            Ok(Err(kube::Error::Api(status))) if (400..500).contains(&status.code) => Posted::Refused(status),
            Ok(Err(error)) => Posted::Unknown(error.to_string()),
            Err(_) => Posted::Unknown(format!("no answer within {:?}", self.settings.bind_timeout)),
        }
    }

    /// The pod as the API server has it; none when it is no more.
    async fn find(&self, pods: &Api<Pod>, name: &str, uid: &str) -> Result<Option<Pod>, String> {
        let found = in_time(self.settings.bind_timeout, pods.get_opt(name)).await?;
        Ok(found.filter(|pod| pod.metadata.uid.as_deref() == Some(uid)))
    }

    /// Where the API server says that a pod is.
    fn seen(&self, pod: Option<Pod>) -> Seen {
        pod.map_or(Seen::Gone, |pod| self.bound_pod(&pod).map_or(Seen::Waiting, Seen::Bound))
    }

    /// Finds out what became of pods whose binding was posted long ago and that were never seen on their node. Never
    /// returns.
    pub async fn follow_up(&self) {
        let mut tick = interval(self.settings.expiry / 10);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            let expired = self.cluster().expired(Instant::now(), self.settings.expiry);
            for (claim, reservation) in expired {
                let pods: Api<Pod> = Api::namespaced(self.client.clone(), &reservation.namespace);
                let said = format!("{}/{}", reservation.namespace, reservation.name);
                match self.find(&pods, &reservation.name, &claim.uid).await {
                    Ok(pod) => {
                        let (seen, now) = (self.seen(pod), Instant::now());
                        if self.cluster_mut().follow_up(&claim, reservation.attempt, seen, now) != Found::Here
                        {
                            info!(pod = said, node = claim.node, "was not bound after all; its room is free");
                        }
                    }
                    Err(error) => {
                        warn!(pod = said, node = claim.node, "not known whether it was bound: {error}");
                        self.cluster_mut().postpone(&claim, Instant::now());
                    }
                }
            }
        }
    }
}
