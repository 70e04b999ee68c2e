//! The verbs that kube-scheduler calls, over HTTP. kube-scheduler shows users an answer's `Error`, but nothing of an
//! answer that is not 200; so what a user should read is said in an answer.

use std::sync::Arc;

use axum::{
    Router,
    body::Bytes,
    extract::{DefaultBodyLimit, State, rejection::BytesRejection},
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::{Deserialize, Serialize};
use tracing::{debug, info, warn};

use crate::{
    Filtered, Service, Wanted,
    service::count,
    wire::{
        BindAnswer, BindOrder, FilterAnswer, MetaVictims, PreemptAnswer, PreemptQuestion, Question, Scores,
    },
};

/// 5,000 node names of full length and a pod are below this.
const BODY_MAX: usize = 8 << 20;

const CACHE_CAPABLE: &str = "vcuda-scheduler wants node names, not nodes; set nodeCacheCapable: true for this extender in KubeSchedulerConfiguration";

type Body = Result<Bytes, BytesRejection>;

/// Serves the verbs.
pub fn verbs(service: Arc<Service>) -> Router {
    Router::new()
        .route("/filter", post(filter))
        .route("/prioritize", post(prioritize))
        .route("/bind", post(bind))
        .route("/preempt", post(preempt))
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .with_state(service.clone())
        .merge(health(service))
}

/// Serves what a kubelet and a Prometheus ask.
pub fn health(service: Arc<Service>) -> Router {
    let ready = |State(service): State<Arc<Service>>| async move {
        match service.standing().check() {
            Ok(()) => (StatusCode::OK, "ok".to_owned()),
            Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason.to_string()),
        }
    };
    let metrics = |State(service): State<Arc<Service>>| async move { service.metrics() };
    Router::new()
        .route("/healthz", get(async || "ok"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(service)
}

/// Parses what came, if this replica may answer at all.
fn read<'a, T: Deserialize<'a>>(service: &Service, body: &'a Body) -> Result<T, String> {
    service.standing().check().map_err(|reason| reason.to_string())?;
    let bytes = body.as_ref().map_err(|error| format!("{error}; {CACHE_CAPABLE}"))?;
    serde_json::from_slice(bytes).map_err(|error| format!("the request cannot be read: {error}"))
}

fn json(value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(text) => ([(CONTENT_TYPE, "application/json")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn filter(State(service): State<Arc<Service>>, body: Body) -> Response {
    count(&service.counters.filtered);
    let question = read::<Question<'_>>(&service, &body);
    let answer = question.and_then(|question| {
        let names = question.node_names.ok_or(CACHE_CAPABLE)?;
        Ok((question.pod, names))
    });
    let (pod, names) = match &answer {
        Ok(question) => question,
        Err(error) => {
            warn!("filter: {error}");
            return json(&FilterAnswer::error(error));
        }
    };
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    match service.read(pod) {
        Ok(wanted) => {
            service.remember(uid, &wanted);
            let cluster = service.cluster();
            let filtered = cluster.filter(uid, &wanted, names);
            // Before the books change: what comes next may be the room that this pod needs.
            service.note_filtered(pod, &wanted, names, &filtered);
            debug!(pod = %said(pod), fit = filtered.fit.len(), unfit = filtered.unfit.len(), "filtered");
            json(&FilterAnswer::filtered(&filtered))
        }
        // It fits nowhere; said per node, so that the pod counts as unschedulable and not as a failure of ours.
        Err(error) => {
            info!(pod = %said(pod), "cannot run anywhere: {error}");
            let error: Arc<str> = error.to_string().into();
            let unfit = names.iter().map(|name| (*name, error.clone())).collect();
            json(&FilterAnswer::filtered(&Filtered { fit: Vec::new(), unfit }))
        }
    }
}

async fn prioritize(State(service): State<Arc<Service>>, body: Body) -> Response {
    let question = read::<Question<'_>>(&service, &body);
    let scored = question.and_then(|question| {
        let names = question.node_names.ok_or(CACHE_CAPABLE)?;
        let wanted = service.read(&question.pod).map_err(|error| error.to_string())?;
        let uid = question.pod.metadata.uid.as_deref().unwrap_or_default();
        Ok(Scores(service.cluster().prioritize(uid, &wanted, &names)))
    });
    match &scored {
        Ok(scores) => json(scores),
        // There is no field for it, and kube-scheduler goes on without scores.
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, error.clone()).into_response(),
    }
}

async fn bind(State(service): State<Arc<Service>>, body: Body) -> Response {
    let order = match read::<BindOrder>(&service, &body) {
        Ok(order) => order,
        Err(error) => {
            warn!("bind: {error}");
            return json(&BindAnswer { error: &error });
        }
    };
    let said = format!("{}/{}", order.pod_namespace, order.pod_name);
    // Its own task: kube-scheduler may stop listening, and the bind must come to an end all the same.
    let underway = service.begin_bind();
    let bind = async move {
        let _underway = underway;
        service.bind(order).await
    };
    let outcome = tokio::spawn(bind).await;
    let error = match outcome {
        Ok(Ok(())) => String::new(),
        Ok(Err(error)) => error.to_string(),
        Err(error) => format!("vcuda-scheduler broke off: {error}"),
    };
    if !error.is_empty() {
        info!(pod = said, "not bound: {error}");
    }
    json(&BindAnswer { error: &error })
}

async fn preempt(State(service): State<Arc<Service>>, body: Body) -> Response {
    let question = match read::<PreemptQuestion<'_>>(&service, &body) {
        Ok(question) => question,
        Err(error) => return (StatusCode::SERVICE_UNAVAILABLE, error).into_response(),
    };
    let victims = match (question.node_name_to_meta_victims, question.node_name_to_victims) {
        (None, Some(_)) => return (StatusCode::BAD_REQUEST, CACHE_CAPABLE).into_response(),
        (victims, _) => victims.unwrap_or_default(),
    };
    // A pod that can run nowhere is helped by nobody's end.
    let Ok(wanted) = service.read(&question.pod) else { return json(&PreemptAnswer::default()) };
    let cluster = service.cluster();
    // Before the books change: that may be word of a pod's end that makes kube-scheduler give this preemption up.
    if let Some(uid) = &question.pod.metadata.uid {
        service.refused().note_preemption(uid, victims.keys().copied());
    }
    json(&preemption(&cluster, &wanted, victims))
}

fn preemption<'a>(
    cluster: &'a crate::Cluster,
    wanted: &Wanted,
    victims: std::collections::BTreeMap<&'a str, MetaVictims<'a>>,
) -> PreemptAnswer<'a> {
    let mut answer = PreemptAnswer::default();
    for (node, victims) in victims {
        let uids = victims.pods.unwrap_or_default().into_iter().map(|pod| pod.uid).collect();
        if let Some(found) = cluster.victims(wanted, node, uids) {
            answer.add(found, victims.pdb_violations);
        }
    }
    answer
}

fn said(pod: &k8s_openapi::api::core::v1::Pod) -> String {
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    format!("{}/{}", part(&pod.metadata.namespace), part(&pod.metadata.name))
}

#[cfg(test)]
mod tests;
