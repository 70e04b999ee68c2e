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

/// For how many seconds a watch is opened at a time. One that an API server has forgotten goes unnoticed as long as it may
/// be silent, and where nothing changes it is silent to its end: bookmarks come only when the resource version has moved.
pub(super) const WATCH: u32 = 120;

/// Longest silence of a connection: longer than a watch is open.
pub(super) const SILENCE: Duration = Duration::from_secs(150);

/// Set by kubelet in every pod.
const IN_A_POD: &str = "KUBERNETES_SERVICE_HOST";

/// A client, and the node's name; none where there are no credentials at all. Credentials are read anew each time:
/// kubelet's are replaced every few months.
pub(super) async fn open(access: &Access) -> Result<Option<(Client, String)>> {
    // Another part of the process may have done so; there is one provider in this build.
    let _ = ring::default_provider().install_default();
    let config = match &access.kubeconfig {
        Some(path) => {
            let file =
                Kubeconfig::read_from(path).with_context(|| format!("--kubeconfig {}", path.display()))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?
        }
        None if std::env::var_os(IN_A_POD).is_some() => Config::incluster()?,
        None => return Ok(None),
    };
    let node = match &access.node {
        Some(node) => node.clone(),
        None => rustix::system::uname().nodename().to_string_lossy().trim().to_lowercase(),
    };
    Ok(Some((client(config)?, node)))
}

/// A client that gives up what stays silent.
pub(super) fn client(mut config: Config) -> kube::Result<Client> {
    // A failure ends the session, which has its own pauses.
    config.default_retry = false;
    config.read_timeout = Some(SILENCE);
    // From the request on, not since the connection was last used.
    config.reset_reader_on_write = true;
    Client::try_from(config)
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
