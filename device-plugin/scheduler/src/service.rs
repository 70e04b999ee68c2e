//! What all parts of the running scheduler share: the books, what is known of pods that wait, and the counters.

use std::{
    collections::HashMap,
    future::Future,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use ledger::Policy;
use tokio::{sync::watch, time::timeout};

use crate::{Cluster, Refused, ResourceNames, Standing, Wanted, WantedError};

/// Pods whose wants are remembered between filter and bind. Past that all are forgotten, and read anew.
const WAITING_MAX: usize = 10_000;

/// What the API server answers to a request within `limit`, or in words why it does not.
pub(crate) async fn in_time<T>(
    limit: Duration,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, String> {
    match timeout(limit, request).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {limit:?}")),
    }
}

/// How the scheduler was set up.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Names of the resources.
    pub names: ResourceNames,
    /// How GPUs are picked for pods that do not say it.
    pub policy: Policy,
    /// How long a binding may take. Its answer is not waited for any longer.
    pub bind_timeout: Duration,
    /// How old a reservation gets before its pod's fate is looked up. Far above `bind_timeout`.
    pub expiry: Duration,
}

/// The scheduler.
pub struct Service {
    pub(crate) settings: Settings,
    pub(crate) client: Client,
    pub(crate) counters: Counters,
    standing: Standing,
    cluster: RwLock<Cluster>,
    /// By UID.
    waiting: Mutex<HashMap<String, Arc<Wanted>>>,
    refused: Mutex<Refused>,
    /// Each bind that is under way holds a receiver.
    binds: watch::Sender<()>,
}

/// What was done since the start.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub filtered: AtomicU64,
    pub bound: AtomicU64,
    pub bind_refused: AtomicU64,
    pub bind_unknown: AtomicU64,
    pub watch_errors: AtomicU64,
    pub nudges: AtomicU64,
}

impl Service {
    /// A scheduler that knows nothing yet.
    pub fn new(client: Client, settings: Settings, standing: Standing) -> Self {
        Self {
            settings,
            client,
            counters: Counters::default(),
            standing,
            cluster: RwLock::default(),
            waiting: Mutex::default(),
            refused: Mutex::default(),
            binds: watch::Sender::default(),
        }
    }

    /// A bind is under way until what this returns is dropped.
    pub(crate) fn begin_bind(&self) -> impl Send + 'static {
        self.binds.subscribe()
    }

    /// Waits until no bind is under way.
    pub async fn binds_end(&self) {
        self.binds.closed().await;
    }

    /// Whether this replica may answer.
    pub fn standing(&self) -> &Standing {
        &self.standing
    }

    /// The books, to read. A thread that died while it held the lock left them as whole as any: all counts are made
    /// anew with every change.
    pub fn cluster(&self) -> RwLockReadGuard<'_, Cluster> {
        self.cluster.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The books, to change.
    pub fn cluster_mut(&self) -> RwLockWriteGuard<'_, Cluster> {
        self.cluster.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pods that fitted nowhere. Who needs the books as well takes them first.
    pub(crate) fn refused(&self) -> MutexGuard<'_, Refused> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a pod wants.
    pub(crate) fn read(&self, pod: &Pod) -> Result<Arc<Wanted>, WantedError> {
        Wanted::of(pod, &self.settings.names, self.settings.policy).map(Arc::new)
    }

    /// Remembers what a pod wants until it is bound.
    pub(crate) fn remember(&self, uid: &str, wanted: &Arc<Wanted>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.len() >= WAITING_MAX {
            waiting.clear();
        }
        waiting.insert(uid.into(), wanted.clone());
    }

    /// What a pod wants, as it was remembered last.
    pub(crate) fn recall(&self, uid: &str) -> Option<Arc<Wanted>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(uid)
    }

    /// Figures in Prometheus' text format.
    pub fn metrics(&self) -> String {
        let figures = self.cluster().figures();
        let counter = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut text = String::new();
        let mut say = |name: &str, kind: &str, help: &str, values: &[(&str, u64)]| {
            text.push_str(&format!(
                "# HELP vcuda_scheduler_{name} {help}\n# TYPE vcuda_scheduler_{name} {kind}\n"
            ));
            for (labels, value) in values {
                text.push_str(&format!("vcuda_scheduler_{name}{labels} {value}\n"));
            }
        };
        let serving = u64::from(self.standing.check().is_ok());
        say("serving", "gauge", "1 while this replica answers kube-scheduler.", &[("", serving)]);
        say("nodes", "gauge", "Nodes that offer GPUs.", &[("", figures.nodes as u64)]);
        say("gpus", "gauge", "GPUs on offer.", &[("", figures.gpus as u64)]);
        say("pods", "gauge", "Pods with a share.", &[("", figures.pods as u64)]);
        say(
            "unplaced_containers",
            "gauge",
            "Containers with a share that do not say which GPU they are on; they count on each of their node.",
            &[("", figures.unplaced)],
        );
        say("reservations", "gauge", "Pods that are being bound.", &[("", figures.reservations as u64)]);
        say("filtered_total", "counter", "Pods filtered.", &[("", counter(&self.counters.filtered))]);
        say(
            "binds_total",
            "counter",
            "Binds by result; unknown: the API server's answer was lost, and is looked up.",
            &[
                ("{result=\"bound\"}", counter(&self.counters.bound)),
                ("{result=\"refused\"}", counter(&self.counters.bind_refused)),
                ("{result=\"unknown\"}", counter(&self.counters.bind_unknown)),
            ],
        );
        say(
            "nudges_total",
            "counter",
            "Pods that kube-scheduler was made to try again: it had been told that they fit nowhere, just before word of room came.",
            &[("", counter(&self.counters.nudges))],
        );
        let errors = counter(&self.counters.watch_errors);
        say("watch_errors_total", "counter", "Interrupted watches.", &[("", errors)]);
        text
    }
}

/// Counts up.
pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
