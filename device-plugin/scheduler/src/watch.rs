//! Feeds the books from the API server: all nodes, and all pods that have a node and have not ended.

use std::{fmt::Display, future::ready, sync::Arc, time::Duration};

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, Client, Config, ResourceExt,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use tracing::{info, warn};

use crate::{BoundPod, Demand, Service, holds_of_bound, service::count};

/// Pods that hold something.
const ON_A_NODE: &str = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed";

/// For how many seconds a watch is opened at a time. One that an API server has forgotten goes unnoticed as long as it may
/// be silent, and where nothing changes it is silent to its end: bookmarks come only when the resource version has moved.
const WATCH: u32 = 60;

/// Longest silence of a connection: longer than a watch is open.
const SILENCE: Duration = Duration::from_secs(90);

/// A client that gives up connections which went silent.
///
/// # Errors
///
/// The configuration names a proxy or credentials that cannot be used.
pub fn client(mut config: Config) -> kube::Result<Client> {
    // Each caller knows best what to do about a failure.
    config.default_retry = false;
    config.read_timeout = Some(SILENCE);
    // From the request on, not since the connection was last used.
    config.reset_reader_on_write = true;
    Client::try_from(config)
}

impl Service {
    /// Follows all nodes. Never returns.
    pub async fn watch_nodes(self: Arc<Self>) {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let events = watcher(nodes, watcher::Config::default().timeout(WATCH));
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
        let events = watcher(pods, watcher::Config::default().timeout(WATCH).fields(ON_A_NODE));
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

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        future::{IntoFuture, pending},
        sync::atomic::{AtomicUsize, Ordering},
    };

    use axum::{Router, body::Body, extract::RawQuery, http::StatusCode, routing::get};
    use futures::{future::join, stream};
    use serde_json::json;
    use tokio::{net::TcpListener, time::timeout};

    use super::*;
    use crate::testing;

    #[tokio::test(start_paused = true)]
    async fn a_list_that_an_api_server_takes_and_does_not_answer_is_asked_for_again() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let service = Arc::new(testing::service(listener.local_addr().unwrap().port()));
        let router = Router::new().route("/api/v1/nodes", get(pending::<StatusCode>));
        tokio::spawn(axum::serve(listener, router).into_future());
        let never = timeout(SILENCE + Duration::from_secs(1), service.clone().watch_nodes()).await;
        assert!(never.is_err());
        assert_eq!(service.counters.watch_errors.load(Ordering::Relaxed), 1);
    }

    /// Until then pods are placed by books that nobody keeps. A watch of which nothing changes looks the same, so it is no
    /// error.
    #[tokio::test(start_paused = true)]
    async fn watches_that_an_api_server_has_forgotten_are_opened_anew() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let service = Arc::new(testing::service(listener.local_addr().unwrap().port()));
        let answer = |kind: &'static str, watches: Arc<AtomicUsize>| {
            get(move |RawQuery(query): RawQuery| async move {
                if query.is_some_and(|query| query.contains("watch=true")) {
                    watches.fetch_add(1, Ordering::Relaxed);
                    return Body::from_stream(stream::pending::<Result<&str, Infallible>>());
                }
                let metadata = json!({ "resourceVersion": "1" });
                Body::from(json!({ "kind": kind, "metadata": metadata, "items": [] }).to_string())
            })
        };
        let (nodes, pods) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let router = Router::new()
            .route("/api/v1/nodes", answer("NodeList", nodes.clone()))
            .route("/api/v1/pods", answer("PodList", pods.clone()));
        tokio::spawn(axum::serve(listener, router).into_future());
        let both = join(service.clone().watch_nodes(), service.clone().watch_pods());
        let never = timeout(Duration::from_secs(u64::from(WATCH) + 10), both).await;
        assert!(never.is_err());
        assert_eq!([nodes, pods].map(|watches| watches.load(Ordering::Relaxed)), [2, 2]);
        assert_eq!(service.counters.watch_errors.load(Ordering::Relaxed), 0);
    }
}
