//! The two ways to the runtime. A plugin that containerd starts finds a connected socket in its environment; any
//! other connects to containerd's NRI socket, and does so again whenever containerd was restarted.

use std::{
    env,
    ffi::OsString,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream as StdUnixStream,
    },
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use daemon::Told;
use futures::FutureExt;
use ledger::LedgerError;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getppid, pidfd_getfd, pidfd_open};
use thiserror::Error;
use tokio::{
    net::UnixStream,
    task::spawn_blocking,
    time::{sleep, timeout},
};
use vcuda_config::{NodeFile, Paths};

use crate::{
    backoff::Backoff,
    log::LogFile,
    node::Node,
    service::{NodeSource, Service, Standing},
    session::{self, Identity, SessionError},
};

/// First and longest pause between attempts to connect.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// First and longest pause between looks for shares that pods may have left behind.
const LOOKS: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(300));

/// Longest that a plugin which containerd starts waits to be shown the list.
const LISTED_AT_START: Duration = Duration::from_secs(2);

/// Longest that the runtime's list is waited for.
const LIST: Duration = Duration::from_secs(60);

/// Longest that a call which is being worked on holds up the end.
const DRAIN: Duration = Duration::from_secs(1);

/// For answers that are on their way when the last call is done.
const FLUSH: Duration = Duration::from_millis(50);

/// What containerd tells a plugin that it starts: there is nothing else in such a plugin's environment
/// (containerd/nri, pkg/adaptation/plugin.go).
#[derive(Debug)]
pub struct Launched {
    /// The name and index from the plugin's file name.
    pub identity: Identity,
    socket: OwnedFd,
}

/// Why what containerd left in the environment is no use.
#[derive(Debug, Error)]
#[error(
    "NRI_PLUGIN_SOCKET={0:?} is no socket of this process ({1}); containerd sets it when it starts a plugin, so leave \
     it unset anywhere else"
)]
pub struct LaunchError(OsString, String);

impl Launched {
    /// What containerd left in the environment; None when it did not start this process.
    pub fn from_env() -> Result<Option<Self>, LaunchError> {
        let Some(socket) = env::var_os("NRI_PLUGIN_SOCKET") else { return Ok(None) };
        let wrong = |reason: String| LaunchError(socket.clone(), reason);
        let number = socket.to_str().and_then(|text| text.parse::<i32>().ok()).filter(|number| *number > 2);
        let number = number.ok_or_else(|| wrong("not the number of an open file".into()))?;
        let text = |name: &str| env::var(name).map_err(|_| wrong(format!("{name} is missing beside it")));
        let identity = Identity { name: text("NRI_PLUGIN_NAME")?, index: text("NRI_PLUGIN_IDX")? };
        let socket = duplicate(number).map_err(|error| wrong(error.to_string()))?;
        rustix::net::sockopt::socket_domain(&socket).map_err(|error| wrong(error.to_string()))?;
        Ok(Some(Self { identity, socket }))
    }

    fn stream(self) -> std::io::Result<UnixStream> {
        let stream = StdUnixStream::from(self.socket);
        stream.set_nonblocking(true)?;
        UnixStream::from_std(stream)
    }
}

/// A descriptor of our own for open file `number`. The kernel looks it up, so a wrong number is an error and no
/// unsafe claim is made about it (`pidfd_getfd`, Linux 5.6).
fn duplicate(number: i32) -> rustix::io::Result<OwnedFd> {
    let own = pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
    pidfd_getfd(own.as_fd(), number, PidfdGetfdFlags::empty())
}

/// The way to the runtime that a process goes.
#[derive(Debug)]
pub enum Way {
    /// containerd started us.
    Launched {
        /// What it gave us.
        launched: Launched,
        /// The node file to use where containerd configures nothing else.
        config: PathBuf,
        /// The log, which gets its place with the node file.
        log: LogFile,
    },
    /// We connect.
    External {
        /// Who we are.
        identity: Identity,
        /// The node.
        node: Arc<Node>,
        /// containerd's NRI socket.
        socket: PathBuf,
    },
}

/// Who opened the connection of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenedBy {
    Containerd,
    Us,
}

impl Way {
    /// The way of a process that containerd did not start.
    pub fn external(file: &NodeFile, node: Node) -> Self {
        Self::External {
            identity: Identity { name: file.nri.name.clone(), index: file.nri.index.clone() },
            node: Arc::new(node),
            socket: file.paths.nri_socket.clone(),
        }
    }

    /// Serves the runtime until `stop` is done: as often as it takes, or, started by containerd, as long as that
    /// containerd lives.
    ///
    /// # Errors
    ///
    /// When there is no way on: what containerd configured cannot be used.
    pub async fn go(self, stop: impl Future<Output = ()>) -> Result<(), SessionError> {
        // Asked again and again, also after it is done.
        let stop = stop.shared();
        match self {
            Self::External { identity, node, socket } => {
                serve_forever(&identity, &node, socket, || true, stop).await;
                Ok(())
            }
            Self::Launched { launched, config, log } => {
                let containerd = getppid();
                let identity = launched.identity.clone();
                let service = Service::new(NodeSource::Configure(config));
                let stream = launched.stream()?;
                let mut standing = service.standing();
                let place_log = async {
                    let _ = standing.wait_for(|now| *now != Standing::Registering).await;
                    place(&log, service.node().as_deref());
                    std::future::pending().await
                };
                let ended = tokio::select! {
                    never = place_log => never,
                    ended = serve_once(stream, OpenedBy::Containerd, &identity, &service) => ended,
                    () = finish_when(stop.clone(), &service) => return Ok(()),
                };
                place(&log, service.node().as_deref());
                let Some(node) = service.node() else { return ended };
                drop(service);
                // containerd starts a plugin once. If it only dropped us, we come back through its socket; a new
                // containerd starts a plugin of its own.
                let socket = node.binder().paths().nri_socket.clone();
                report(&ended);
                serve_forever(&identity, &node, socket, || getppid() == containerd, stop).await;
                Ok(())
            }
        }
    }
}

async fn serve_forever(
    identity: &Identity,
    node: &Arc<Node>,
    socket: PathBuf,
    wanted: impl Fn() -> bool,
    stop: impl Future<Output = ()> + Clone,
) {
    let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
    let mut told = Told::default();
    while wanted() {
        let service = Service::new(NodeSource::Here(Arc::clone(node)));
        let attempt = async {
            match UnixStream::connect(&socket).await {
                Ok(stream) => serve_once(stream, OpenedBy::Us, identity, &service)
                    .await
                    .map_err(|error| error.to_string()),
                Err(error) => Err(format!(
                    "{}: {error}; see that containerd runs and has NRI on (`disable = false` in its NRI section)",
                    socket.display()
                )),
            }
        };
        let ended = tokio::select! {
            ended = attempt => ended,
            () = finish_when(stop.clone(), &service) => return,
        };
        match ended {
            Ok(()) => {
                tracing::warn!("containerd closed the connection; pods with a share wait until it is back");
                backoff.reset();
                told.forget();
            }
            Err(error) if told.is_news(&error) => {
                tracing::error!(error, "no session with containerd; trying on");
            }
            Err(error) => tracing::debug!(error, "still no session"),
        }
        tokio::select! {
            () = sleep(backoff.pause()) => {}
            () = stop.clone() => return,
        }
    }
    tracing::info!("the containerd that started this plugin is gone");
}

/// Serves one session, and shows while it is in service.
async fn serve_once(
    stream: UnixStream,
    opened_by: OpenedBy,
    identity: &Identity,
    service: &Arc<Service>,
) -> Result<(), SessionError> {
    let mut standing = service.standing();
    let show = async {
        while standing.changed().await.is_ok() {
            let now = standing.borrow_and_update().clone();
            if let (Standing::Ready(runtime), Some(node)) = (now, service.node()) {
                tracing::info!(runtime, "in service");
                node.set_ready(Some(&runtime));
            }
        }
        std::future::pending().await
    };
    let look = async {
        let _ = service
            .standing()
            .wait_for(|now| matches!(now, Standing::Configured(_) | Standing::Ready(_)))
            .await;
        let Some(node) = service.node() else { return std::future::pending().await };
        let identity = Identity { name: format!("{}-list", identity.name), index: identity.index.clone() };
        if opened_by == OpenedBy::Containerd {
            see_list_once(&identity, &node, service).await;
        }
        let _ = service.standing().wait_for(|now| matches!(now, Standing::Ready(_))).await;
        look_for_left_shares(&identity, &node).await
    };
    let ended = tokio::select! {
        ended = session::serve(stream, identity, service) => ended,
        never = show => never,
        never = look => never,
    };
    if let Some(node) = service.node() {
        node.set_ready(None);
    }
    ended
}

/// containerd 1.7.24 and .25 (NRI 0.6) list their pods to plugins that connect, and never to plugins that they start
/// themselves. Then we connect, too, for the list.
async fn see_list_once(identity: &Identity, node: &Arc<Node>, service: &Service) {
    let mut standing = service.standing();
    let listed = standing.wait_for(|now| matches!(now, Standing::Ready(_)));
    if timeout(LISTED_AT_START, listed).await.is_ok() {
        return;
    }
    let mut backoff = Backoff::new(PAUSES.0, LOOKS.1);
    while let Err(error) = ask_for_list(identity, node).await {
        tracing::warn!(error, "containerd has not listed its pods; asking again");
        sleep(backoff.pause()).await;
    }
    service.listed();
}

/// Once containerd has been restarted it does not tell of the end of pods from before. So while there are shares that
/// such pods may have left, or it has told what could not be noted, its list is asked for, in a short session beside the
/// one in service.
async fn look_for_left_shares(identity: &Identity, node: &Arc<Node>) -> Result<(), SessionError> {
    let mut backoff = Backoff::new(LOOKS.0, LOOKS.1);
    let mut before = (Vec::new(), false);
    loop {
        sleep(backoff.pause()).await;
        let binder = Arc::clone(node.binder());
        let found = match spawn_blocking(move || Ok((binder.doubtful()?, binder.is_behind()))).await {
            Ok(Ok(found)) => found,
            Ok(Err::<_, LedgerError>(error)) => {
                tracing::error!(%error, "cannot look for shares that pods left");
                continue;
            }
            Err(_) => continue,
        };
        // The same ones again are most likely of containers that wait for their restart.
        if found != before {
            backoff.reset();
        }
        let (doubtful, behind) = &found;
        if doubtful.is_empty() && !behind {
            backoff.reset();
        } else if let Err(error) = ask_for_list(identity, node).await {
            tracing::warn!(
                error,
                shares = doubtful.len(),
                "shares that pods may have left stay until the next look"
            );
        }
        before = found;
    }
}

async fn ask_for_list(identity: &Identity, node: &Arc<Node>) -> Result<(), String> {
    let stream =
        UnixStream::connect(&node.binder().paths().nri_socket).await.map_err(|error| error.to_string())?;
    let service = Service::for_list(Arc::clone(node));
    let mut standing = service.standing();
    let seen = async {
        let _ = standing.wait_for(|now| matches!(now, Standing::Ready(_))).await;
        sleep(FLUSH).await;
    };
    tokio::select! {
        ended = session::serve(stream, identity, &service) => ended.map_err(|error| error.to_string()),
        () = seen => Ok(()),
        () = sleep(LIST) => Err(format!("containerd gave no list of its pods within {LIST:?}")),
    }
}

/// Gives the log its place: the node's, or the usual one where no node file could be used.
fn place(log: &LogFile, node: Option<&Node>) {
    let usual = Paths::default();
    let paths = node.map_or(&usual, |node| node.binder().paths());
    if let Err(error) = log.place(paths) {
        tracing::warn!(%error, path = %paths.run.display(), "the log cannot be written there");
    }
}

fn report(ended: &Result<(), SessionError>) {
    match ended {
        Ok(()) => tracing::warn!("containerd closed the connection"),
        Err(error) => tracing::error!(%error, "the session that containerd opened is over"),
    }
}

/// Waits for `stop`, then lets what is being worked on come to its end, within a bound. The session goes on being
/// served meanwhile, or no answer would leave.
async fn finish_when(stop: impl Future<Output = ()>, service: &Service) {
    stop.await;
    tracing::info!(
        "stopping; pods with a share are refused until the plugin is back, running ones never notice"
    );
    service.drain(DRAIN).await;
    sleep(FLUSH).await;
    if let Some(node) = service.node() {
        node.set_ready(None);
    }
}
