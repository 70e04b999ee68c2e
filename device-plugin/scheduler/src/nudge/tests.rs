//! What the API server may answer to a nudge, said by a small server, and what comes of it.

use std::sync::atomic::{AtomicUsize, Ordering};

use axum::{Router, extract::Path, http::StatusCode, response::IntoResponse, routing::patch};
use serde_json::Value;
use tokio::net::TcpListener;

use super::*;
use crate::testing::service;

/// Pods that were refused and fit by now, to be nudged in this order.
fn waiting(service: &Service, names: &[&str]) -> Vec<(RefusedPod, Box<str>)> {
    let start = Instant::now();
    for (n, name) in (0..).zip(names) {
        let since = start + Duration::from_nanos(n);
        let pod =
            RefusedPod::new(name, ("default", name), Arc::new(Wanted::default()), Some(&["node"]), since);
        service.refused().note(pod);
    }
    let later = start + Duration::from_secs(1);
    let (nodes, _) = service.word();
    service.refused().hear(nodes, later);
    service.refused().due(&service.cluster(), later, 99).pods
}

/// Pods that are to be tried once more when a minute has passed.
fn again(service: &Service) -> Vec<String> {
    let later = Instant::now() + Duration::from_secs(60);
    let due = service.refused().due(&service.cluster(), later, 99);
    due.pods.into_iter().map(|(pod, _)| pod.uid).collect()
}

/// Answers as the pod's name says.
async fn answer(Path((_, name)): Path<(String, String)>) -> impl IntoResponse {
    let code = name.strip_prefix("pod-").unwrap();
    if code == "hangs" {
        std::future::pending::<()>().await;
    }
    let code = StatusCode::from_bytes(code.as_bytes()).unwrap();
    let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name } });
    let status = json!({ "kind": "Status", "status": "Failure", "code": code.as_u16(), "message": "no" });
    let body: Value = if code.is_success() { pod } else { status };
    (code, body.to_string())
}

#[tokio::test]
async fn an_error_of_one_pod_stops_no_other_and_only_what_may_pass_is_tried_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let service = service(listener.local_addr().unwrap().port());
    let router = Router::new().route("/api/v1/namespaces/{namespace}/pods/{name}/status", patch(answer));
    tokio::spawn(axum::serve(listener, router).into_future());
    let pods = waiting(
        &service,
        &[
            "pod-500",
            "pod-404",
            "pod-409",
            "pod-422",
            "pod-403",
            "pod-429",
            "pod-hangs",
            "pod-503",
            "pod-200",
        ],
    );
    assert_eq!(pods.len(), 9);
    assert!(service.nudge_all(pods).await);
    assert_eq!(service.counters.nudges.load(Ordering::Relaxed), 1);
    assert_eq!(again(&service), ["pod-500", "pod-429", "pod-hangs", "pod-503"]);
}

#[tokio::test]
async fn an_api_server_that_cannot_be_reached_is_asked_once_and_all_pods_wait() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let service = service(listener.local_addr().unwrap().port());
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = connections.clone();
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::Relaxed);
            drop(connection);
        }
    });
    let pods = waiting(&service, &["a", "b", "c"]);
    assert!(!service.nudge_all(pods).await);
    assert_eq!(connections.load(Ordering::Relaxed), 1);
    assert_eq!(again(&service), ["a", "b", "c"]);
}

#[test]
fn a_pod_is_given_up_when_kube_scheduler_waits_for_a_change() {
    let pod = |reason: &str, metadata: Value| -> Pod {
        let condition = json!({ "type": "PodScheduled", "status": "False", "reason": reason });
        serde_json::from_value(json!({ "metadata": metadata, "status": { "conditions": [condition] } }))
            .unwrap()
    };
    assert!(is_given_up(&pod("Unschedulable", json!({}))));
    assert!(!is_given_up(&pod("SchedulingGated", json!({}))));
    assert!(!is_given_up(&pod("SchedulerError", json!({}))));
    assert!(!is_given_up(&pod("Unschedulable", json!({ "deletionTimestamp": "2026-01-01T00:00:00Z" }))));
    assert!(!is_given_up(&Pod::default()));
}
