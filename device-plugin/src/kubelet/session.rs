//! Keeps one resource registered with kubelet through whatever kubelet does: its restart, which deletes all sockets of
//! the folder, the loss of the folder, and the case that it drops a plugin without a word.

use std::{
    error::Error,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use daemon::Told;
use tokio::{net::UnixListener, sync::watch, task::JoinHandle, time};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Endpoint, Server};
use tracing::{debug, info, warn};

use super::{
    API_VERSION, KUBELET_SOCKET,
    api::{
        RegisterRequest, device_plugin_server::DevicePluginServer, registration_client::RegistrationClient,
    },
    service::{Context, OPTIONS, Service},
};
use crate::offer::Resource;

/// Kubelet dials back for up to 10 s before it answers a registration (kubelet 1.36, v1beta1/client.go, dial).
const REGISTER_TIMEOUT: Duration = Duration::from_secs(15);

/// Kubelet opens its stream right after a registration.
const STREAM_TIMEOUT: Duration = Duration::from_secs(10);

/// How long calls in flight get to end. Allocate is a matter of milliseconds.
const DRAIN: Duration = Duration::from_secs(5);

/// First and longest pause after a failure.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// A registration that holds this long was no failure.
const SETTLED: Duration = Duration::from_secs(10);

/// The session for one resource.
pub struct Session {
    resource: Resource,
    folder: PathBuf,
    context: Arc<Context>,
    notices: watch::Receiver<()>,
    stop: watch::Receiver<bool>,
}

/// How one registration ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// It was asked to.
    Stopped,
    /// Kubelet is another one, or has cleared the folder.
    Renewed,
    /// Something failed; what.
    Failed(String),
}

/// Which file is at a path: a socket that is made anew is another one, even if it gets the same inode number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity(u64, u64, i64, i64);

impl Identity {
    fn of(path: &Path) -> Option<Self> {
        let meta = fs::symlink_metadata(path).ok()?;
        Some(Self(meta.dev(), meta.ino(), meta.ctime(), meta.ctime_nsec()))
    }
}

impl Session {
    /// A session that serves `resource` in kubelet's device plugin folder `folder`. `notices` tell of changes there.
    /// It ends when `stop` becomes true.
    pub fn new(
        resource: Resource,
        folder: PathBuf,
        context: Arc<Context>,
        notices: watch::Receiver<()>,
        stop: watch::Receiver<bool>,
    ) -> Self {
        Self { resource, folder, context, notices, stop }
    }

    /// Serves until it is stopped, then lets calls in flight end, for at most a few seconds.
    pub async fn run(mut self) {
        let kubelet_socket = self.folder.join(KUBELET_SOCKET);
        let mut pause = BACKOFF.0;
        let mut told = Told::default();
        loop {
            let Some(kubelet) = self.wait_for_kubelet().await else { return };
            let begun = time::Instant::now();
            let end = self.serve(kubelet).await;
            if begun.elapsed() > SETTLED {
                pause = BACKOFF.0;
                told.forget();
            }
            match end {
                End::Stopped => return,
                End::Renewed => info!(resource = %self.resource, "kubelet was restarted; registering again"),
                End::Failed(reason) => {
                    if told.is_news(&reason) {
                        warn!(resource = %self.resource, reason, "not registered with kubelet; trying again");
                    } else {
                        debug!(resource = %self.resource, reason, "still not registered with kubelet");
                    }
                    tokio::select! {
                        () = time::sleep(pause) => {}
                        () = renewed(&mut self.notices, &kubelet_socket, kubelet) => {}
                        _ = self.stop.wait_for(|stop| *stop) => return,
                    }
                    pause = (pause * 2).min(BACKOFF.1);
                }
            }
        }
    }

    /// Waits until there is a kubelet socket; none when stopped.
    async fn wait_for_kubelet(&mut self) -> Option<Identity> {
        let path = self.folder.join(KUBELET_SOCKET);
        let mut told = false;
        loop {
            if *self.stop.borrow() {
                return None;
            }
            if let Some(kubelet) = Identity::of(&path) {
                return Some(kubelet);
            }
            if !told {
                info!(resource = %self.resource, socket = %path.display(), "waiting for kubelet's socket");
                told = true;
            }
            tokio::select! {
                // No more notices: the plugin is on its way out.
                notice = self.notices.changed() => notice.ok()?,
                _ = self.stop.wait_for(|stop| *stop) => return None,
            }
        }
    }

    /// Serves and registers once, with the kubelet of this moment.
    async fn serve(&self, kubelet: Identity) -> End {
        let socket = self.folder.join(self.resource.socket());
        let listener = match bind(&socket) {
            Ok(listener) => listener,
            Err(error) => return End::Failed(format!("{}: {error}", socket.display())),
        };
        // Made by the line above; if it is gone already, kubelet has cleared the folder.
        let Some(own) = Identity::of(&socket) else { return End::Renewed };
        let (streams, mut open) = watch::channel(0);
        let (closing, closed) = watch::channel(false);
        let service = Service::new(self.resource, Arc::clone(&self.context), streams, closed.clone());
        let server = tokio::spawn(serve_on(listener, service, closed));

        let (mut of_kubelet, mut of_ours, mut stop) =
            (self.notices.clone(), self.notices.clone(), self.stop.clone());
        let kubelet_socket = self.folder.join(KUBELET_SOCKET);
        let end = tokio::select! {
            reason = self.stay_registered(&mut open) => End::Failed(reason),
            () = renewed(&mut of_kubelet, &kubelet_socket, kubelet) => End::Renewed,
            () = renewed(&mut of_ours, &socket, own) => End::Renewed,
            _ = stop.wait_for(|stop| *stop) => End::Stopped,
        };
        closing.send_replace(true);
        drain(server, self.resource).await;
        if Identity::of(&socket) == Some(own) {
            let _ = fs::remove_file(&socket);
        }
        end
    }

    /// Registers, and returns when kubelet no longer holds the plugin for registered; why.
    ///
    /// Kubelet tells nobody when it drops a plugin. It does so, for one, when the end of an earlier stream of the same
    /// resource is handled after the new registration (kubelet 1.36, v1beta1/handler.go, runClient). It shows in
    /// that its stream ends.
    async fn stay_registered(&self, open: &mut watch::Receiver<usize>) -> String {
        if let Err(error) = self.register().await {
            return format!("registration failed: {error}");
        }
        let name = self.context.resource_name(self.resource);
        info!(resource = name, socket = self.resource.socket(), "registered with kubelet");
        match time::timeout(STREAM_TIMEOUT, open.wait_for(|open| *open > 0)).await {
            Ok(_) => {}
            Err(_) => return "kubelet accepted the registration and asked for no devices".into(),
        }
        let _ = open.wait_for(|open| *open == 0).await;
        "kubelet closed its connection".into()
    }

    async fn register(&self) -> Result<(), String> {
        let unreached =
            |error: tonic::transport::Error| format!("{}; see whether kubelet runs", root_cause(&error));
        let path = self.folder.join(KUBELET_SOCKET);
        let endpoint = Endpoint::from_shared(format!("unix://{}", path.display())).map_err(unreached)?;
        let endpoint = endpoint.connect_timeout(REGISTER_TIMEOUT).timeout(REGISTER_TIMEOUT);
        let request = RegisterRequest {
            version: API_VERSION.into(),
            endpoint: self.resource.socket().into(),
            resource_name: self.context.resource_name(self.resource),
            options: Some(OPTIONS),
        };
        let refused = |status: tonic::Status| format!("kubelet answered: {}", status.message());
        let mut kubelet = RegistrationClient::new(endpoint.connect().await.map_err(unreached)?);
        kubelet.register(request).await.map_err(refused)?;
        Ok(())
    }
}

/// The innermost reason; the outer ones say "transport error" only.
fn root_cause(mut error: &dyn Error) -> String {
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// Returns when another file, or none, is at `path`.
async fn renewed(notices: &mut watch::Receiver<()>, path: &Path, was: Identity) {
    while Identity::of(path) == Some(was) {
        if notices.changed().await.is_err() {
            // Nobody follows the folder any more: the plugin is on its way out.
            std::future::pending::<()>().await;
        }
    }
}

fn bind(socket: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    UnixListener::bind(socket)
}

async fn serve_on(
    listener: UnixListener,
    service: Service,
    mut closed: watch::Receiver<bool>,
) -> Result<(), tonic::transport::Error> {
    let closed = async move {
        let _ = closed.wait_for(|closed| *closed).await;
    };
    Server::builder()
        .add_service(DevicePluginServer::new(service))
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), closed)
        .await
}

async fn drain(mut server: JoinHandle<Result<(), tonic::transport::Error>>, resource: Resource) {
    match time::timeout(DRAIN, &mut server).await {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(error))) => warn!(%resource, %error, "the server ended badly"),
        Ok(Err(error)) => warn!(%resource, %error, "the server ended badly"),
        Err(_) => {
            warn!(%resource, "calls still in flight after {} s; ending them", DRAIN.as_secs());
            server.abort();
        }
    }
}
