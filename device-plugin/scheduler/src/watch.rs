//! Feeds the books from the API server: all nodes, and all pods that have a node and have not ended.

use std::{fmt::Display, future::ready, sync::Arc};

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, ResourceExt,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use tracing::{info, warn};

use crate::{BoundPod, Demand, Service, holds_of_bound, service::count};

/// Pods that hold something.
const ON_A_NODE: &str = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed";

impl Service {
    /// Follows all nodes. Never returns.
    pub async fn watch_nodes(self: Arc<Self>) {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let events = watcher(nodes, watcher::Config::default());
        self.follow("nodes", events, |event| match event {
            Event::Init => self.cluster_mut().begin_nodes(),
            Event::InitApply(node) | Event::Apply(node) => {
                self.cluster_mut().set_node(&node.name_any(), node.metadata.annotations.as_ref());
            }
            Event::InitDone => {
                self.cluster_mut().end_nodes();
                self.standing().nodes_read();
                info!(figures = ?self.cluster().figures(), "all nodes were read");
            }
            Event::Delete(node) => self.cluster_mut().remove_node(&node.name_any()),
        })
        .await;
    }

    /// Follows all pods that hold something. Never returns.
    pub async fn watch_pods(self: Arc<Self>) {
        let pods: Api<Pod> = Api::all(self.client.clone());
        let events = watcher(pods, watcher::Config::default().fields(ON_A_NODE));
        self.follow("pods", events, |event| match event {
            Event::Init => self.cluster_mut().begin_pods(),
            Event::InitApply(pod) | Event::Apply(pod) => {
                if let Some(pod) = self.bound_pod(&pod) {
                    self.cluster_mut().set_pod(pod);
                }
            }
            Event::InitDone => {
                self.cluster_mut().end_pods();
                self.standing().pods_read();
                info!(figures = ?self.cluster().figures(), "all pods were read");
            }
            // It was deleted, or it ended, which takes it out of the selection.
            Event::Delete(pod) => {
                if let (Some(uid), Some(node)) = (pod.uid(), pod.spec.and_then(|spec| spec.node_name)) {
                    self.cluster_mut().remove_pod(&uid, &node);
                }
            }
        })
        .await;
    }

    async fn follow<K, E: Display>(
        &self,
        what: &str,
        events: impl Stream<Item = Result<Event<K>, E>> + Send,
        mut apply: impl FnMut(Event<K>),
    ) {
        let events = events.default_backoff().for_each(|event| {
            match event {
                Ok(event) => apply(event),
                // It resumes by itself, after a pause that grows.
                Err(error) => {
                    count(&self.counters.watch_errors);
                    warn!("watch of {what} was interrupted, and is taken up again: {error}");
                }
            }
            ready(())
        });
        events.await;
    }

    /// What a pod holds on its node. What asks for the impossible is refused by the node, and holds nothing.
    pub(crate) fn bound_pod(&self, pod: &Pod) -> Option<BoundPod> {
        let spec = pod.spec.as_ref()?;
        let node = spec.node_name.clone()?;
        let demand = Demand::of(pod, &self.settings.names).unwrap_or_default();
        let holds = holds_of_bound(&demand, &node, pod.metadata.annotations.as_ref());
        Some(BoundPod {
            uid: pod.uid()?,
            node,
            holds,
            priority: spec.priority.unwrap_or(0),
            ending: pod.metadata.deletion_timestamp.is_some(),
        })
    }
}
