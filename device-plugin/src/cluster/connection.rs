//! The way to the API server, with whatever credentials there are.

use std::{future::Future, time::Duration};

use anyhow::{Context, Result, anyhow};
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use tokio::time;
use tokio_rustls::rustls::crypto::ring;

use super::Access;

/// Longest wait for an answer of the API server, but for watches. One that took the connection and hangs would be waited for
/// as long as for a silent watch.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// Set by kubelet in every pod.
const IN_A_POD: &str = "KUBERNETES_SERVICE_HOST";

/// A client, and the node's name; none where there are no credentials at all. Credentials are read anew each time:
/// kubelet's are replaced every few months.
pub(super) async fn open(access: &Access) -> Result<Option<(Client, String)>> {
    // Another part of the process may have done so; there is one provider in this build.
    let _ = ring::default_provider().install_default();
    let mut config = match &access.kubeconfig {
        Some(path) => {
            let file =
                Kubeconfig::read_from(path).with_context(|| format!("--kubeconfig {}", path.display()))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?
        }
        None if std::env::var_os(IN_A_POD).is_some() => Config::incluster()?,
        None => return Ok(None),
    };
    // A failure ends the session, which has its own pauses.
    config.default_retry = false;
    // Longer than a watch is open, so that one which went silent is noticed.
    config.read_timeout = Some(Duration::from_secs(300));
    let node = match &access.node {
        Some(node) => node.clone(),
        None => rustix::system::uname().nodename().to_string_lossy().trim().to_lowercase(),
    };
    Ok(Some((Client::try_from(config)?, node)))
}

/// What the API server answers to `request`.
///
/// # Errors
///
/// It does not, for as long as it may take.
pub(super) async fn answer<T>(request: impl Future<Output = kube::Result<T>>) -> Result<kube::Result<T>> {
    let answer = time::timeout(PATIENCE, request).await;
    answer.map_err(|_| anyhow!("the API server does not answer within {PATIENCE:?}"))
}
