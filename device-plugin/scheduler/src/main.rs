//! `vcuda-scheduler`: tells kube-scheduler which nodes a pod's GPU shares fit on, and binds them to GPUs.

#![forbid(unsafe_code)]

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    pin::pin,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use axum::{Router, serve::Listener};
use clap::{ArgAction, CommandFactory, Parser, error::ErrorKind};
use daemon::{Connections, LogFormat, start_log};
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use ledger::Policy;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use scheduler::{
    Lead, ResourceNames, Service, Settings, Standing,
    lease::Candidate,
    tls::{Files, REFRESH, TlsListener},
    verbs,
};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle, time::timeout};
use tokio_rustls::rustls::crypto::ring;
use tracing::{error, info, warn};
use vcuda_config::{Exit, in_one_line};

/// Connections of probes and Prometheus that are open at a time.
const PROBES_MAX: usize = 64;

/// Connections to the verbs that are open at a time, where the process may have so many files. kube-scheduler has one for
/// each pod that is being bound, and a burst of pods is bound at once; a bind goes on where its connection was closed.
const CALLERS_MAX: usize = 4096;

const HELP: &str = "\
kube-scheduler calls it as an extender, for pods that ask for GPU shares: it says which nodes have GPUs with room,
which suit best, and binds the pod to a node and its GPUs at once. config/deploy/ has the manifests.

It serves in one of two ways:
  beside kube-scheduler  in the same pod, over HTTP on loopback, with --leader-elect=false: kube-scheduler elects a
                         leader among its replicas, and each asks the extender beside it. This is the usual way.
  as a Service           over HTTPS, with a leader of its own; replicas that do not lead are not ready.";

fn help() -> String {
    let codes = Exit::help(
        "stopped by SIGTERM, SIGINT or SIGHUP",
        "something failed that a restart may heal",
        &[Exit::LeaseLost],
    );
    format!("{HELP}\n\n{codes}")
}

/// Scheduler extender for GPU shares.
#[derive(Debug, Parser)]
#[command(name = "vcuda-scheduler", version, after_help = help())]
struct Arguments {
    /// How to reach the API server. Without it: $KUBECONFIG, ~/.kube/config, or the pod's service account.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Where kube-scheduler calls.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:10280")]
    listen: SocketAddr,

    /// Certificate of this server (PEM); with it, the verbs are served over HTTPS. Read anew when it changes.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_certificate: Option<PathBuf>,

    /// Private key of the certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,

    /// CA that kube-scheduler's client certificate must be known to (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    client_ca: Option<PathBuf>,

    /// Serve callers that nobody knows on an address that others reach. They can bind pods.
    #[arg(long)]
    allow_unknown_callers: bool,

    /// Where probes and Prometheus call: /healthz, /readyz, /metrics, over HTTP.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:10281")]
    health_listen: SocketAddr,

    /// How GPUs are picked: pack (the fullest that fits, which keeps whole ones free) or spread. A pod may say
    /// otherwise in its annotation tencent.com/vcuda-policy.
    #[arg(long, value_name = "POLICY", default_value_t = Policy::Pack)]
    policy: Policy,

    /// Name of the core resource.
    #[arg(long, value_name = "NAME", default_value = "tencent.com/vcuda-core")]
    core_resource: String,

    /// Name of the memory resource.
    #[arg(long, value_name = "NAME", default_value = "tencent.com/vcuda-memory")]
    memory_resource: String,

    /// Elect a leader among the replicas.
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    leader_elect: bool,

    /// Namespace of the lease.
    #[arg(long, value_name = "NAME", default_value = "kube-system")]
    lease_namespace: String,

    /// Name of the lease.
    #[arg(long, value_name = "NAME", default_value = "vcuda-scheduler")]
    lease_name: String,

    /// Seconds after which another replica takes over from one that died.
    #[arg(long, value_name = "SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u32).range(3..=600))]
    lease_duration: u32,

    /// Seconds after which a pod that was bound, but is not seen on its node, is looked up.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(15..=3600))]
    reservation_expiry: u32,

    /// How to write the log; what to write is set by RUST_LOG, such as `info` or `scheduler=debug`.
    #[arg(long, value_enum, default_value_t = LogFormat::Text, value_name = "FORMAT")]
    log_format: LogFormat,
}

/// How the scheduler came to its end.
enum End {
    Stopped,
    LeaseLost,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let known = arguments.listen.ip().is_loopback() || arguments.client_ca.is_some();
    if !known && !arguments.allow_unknown_callers {
        let open = format!(
            "--listen {}: whoever reaches it could bind pods; pass --client-ca, or an address on loopback, or \
             --allow-unknown-callers where the network keeps others out",
            arguments.listen
        );
        Arguments::command().error(ErrorKind::ArgumentConflict, open).exit();
    }
    start_log(arguments.log_format, "info");
    match run(&arguments) {
        Ok(End::Stopped) => {
            info!("stopped");
            ExitCode::SUCCESS
        }
        Ok(End::LeaseLost) => Exit::LeaseLost.into(),
        Err(error) => {
            error!("{}", in_one_line(error.as_ref()));
            Exit::No.into()
        }
    }
}

#[tokio::main]
async fn run(arguments: &Arguments) -> Result<End> {
    if ring::default_provider().install_default().is_err() {
        bail!("another TLS library was set up before");
    }
    let mut signals = daemon::End::catch().context("signals cannot be caught")?;
    let client = client(arguments.kubeconfig.as_deref()).await?;
    let (lead_until, until) = watch::channel(None);
    let (lead, mut candidate) = if arguments.leader_elect {
        (Lead::Lease(until), Some(candidate(&client, arguments)?))
    } else {
        (Lead::Alone, None)
    };
    let service = Arc::new(Service::new(client, settings(arguments), Standing::new(lead)));

    let (stop, stopped) = watch::channel(());
    let health = bind(arguments.health_listen, "--health-listen").await?;
    tokio::spawn(
        axum::serve(Connections::new(health, PROBES_MAX), verbs::health(service.clone())).into_future(),
    );
    let mut server = serve(arguments, verbs::verbs(service.clone()), stopped).await?;

    let end = {
        let mut work = pin!(work(&service, candidate.as_mut(), &lead_until));
        let end = tokio::select! {
            () = signals.asked() => End::Stopped,
            () = &mut work => End::LeaseLost,
            ended = &mut server => {
                ended.context("the server broke off")??;
                bail!("the server ended by itself");
            }
        };
        if matches!(end, End::Stopped) {
            drop(stop);
            // What is being bound is brought to its end, while the lease is still held: also what kube-scheduler no longer
            // waits for.
            let drained = async {
                let _ = (&mut server).await;
                service.binds_end().await;
            };
            tokio::select! {
                drained = timeout(settings(arguments).bind_timeout * 2, drained) => if drained.is_err() {
                    warn!("kube-scheduler kept a request open, or the API server did; it is dropped");
                },
                () = &mut work => {}
            }
        }
        end
    };
    if let Some(candidate) = &mut candidate
        && matches!(end, End::Stopped)
    {
        candidate.release().await;
    }
    Ok(end)
}

/// Leads and follows the cluster. Returns when this replica no longer leads.
async fn work(
    service: &Arc<Service>,
    candidate: Option<&mut Candidate>,
    lead_until: &watch::Sender<Option<Instant>>,
) {
    let hold = match candidate {
        None => None,
        Some(candidate) => {
            candidate.acquire(lead_until).await;
            Some(candidate.hold(lead_until))
        }
    };
    // All is read after the lease was acquired, and so after the last bind of whoever held it before.
    let lost = async {
        match hold {
            Some(hold) => hold.await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = service.clone().watch_nodes() => {}
        () = service.clone().watch_pods() => {}
        () = service.follow_up() => {}
        () = service.nudge() => {}
        reason = lost => error!("the lease was lost: {reason}"),
    }
}

async fn serve(
    arguments: &Arguments,
    router: Router,
    mut stopped: watch::Receiver<()>,
) -> Result<JoinHandle<std::io::Result<()>>> {
    let listener = bind(arguments.listen, "--listen").await?;
    // `changed` fails when the sender is dropped, which is the sign.
    let stopped = async move { drop(stopped.changed().await) };
    let address = listener.local_addr()?;
    let callers = CALLERS_MAX.min(open_files() / 2);
    let (Some(certificate), Some(key)) = (&arguments.tls_certificate, &arguments.tls_key) else {
        info!("serves kube-scheduler at http://{address}");
        return Ok(answer(Connections::new(listener, callers), router, stopped));
    };
    let files =
        Files { certificate: certificate.clone(), key: key.clone(), client_ca: arguments.client_ca.clone() };
    let listener = TlsListener::new(listener, files, REFRESH)?;
    info!("serves kube-scheduler at https://{address}");
    Ok(answer(Connections::new(listener, callers), router, stopped))
}

/// Answers what comes over `callers` until `stopped` ends, and then what has come before.
fn answer<L>(
    callers: Connections<L>,
    router: Router,
    stopped: impl Future<Output = ()> + Send + 'static,
) -> JoinHandle<std::io::Result<()>>
where
    L: Listener<Addr = SocketAddr>,
{
    tokio::spawn(axum::serve(callers, router).with_graceful_shutdown(stopped).into_future())
}

/// How many files the process may have open, once it has been allowed as many as it may allow itself.
fn open_files() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let all = Rlimit { current: limit.maximum, ..limit };
    let current = match setrlimit(Resource::Nofile, all) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    current.and_then(|files| files.try_into().ok()).unwrap_or(usize::MAX)
}

async fn bind(address: SocketAddr, flag: &str) -> Result<TcpListener> {
    let bound = TcpListener::bind(address).await;
    bound.with_context(|| format!("{flag} {address}: cannot be listened at; pass another address"))
}

async fn client(kubeconfig: Option<&Path>) -> Result<Client> {
    let config = match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).with_context(|| {
                format!(
                    "--kubeconfig {}: cannot be used; name a kubeconfig that this user may read",
                    path.display()
                )
            })?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?
        }
        None => Config::infer().await.context("there is no way to the API server; pass --kubeconfig")?,
    };
    Ok(scheduler::client(config)?)
}

fn settings(arguments: &Arguments) -> Settings {
    Settings {
        names: ResourceNames {
            core: arguments.core_resource.clone(),
            memory: arguments.memory_resource.clone(),
        },
        policy: arguments.policy,
        // A request sent at the end of a reign, half the lease's duration, is over before another replica leads.
        bind_timeout: Duration::from_secs(arguments.lease_duration.into()) / 3,
        expiry: Duration::from_secs(arguments.reservation_expiry.into()),
    }
}

fn candidate(client: &Client, arguments: &Arguments) -> Result<Candidate> {
    // A restarted replica is another one: nobody knows what became of what it sent before.
    let random = fs::read_to_string("/proc/sys/kernel/random/uuid").context("/proc is not mounted")?;
    let identity = format!("{}_{}", rustix::system::uname().nodename().to_string_lossy(), random.trim());
    let duration = Duration::from_secs(arguments.lease_duration.into());
    let (namespace, name) = (&arguments.lease_namespace, &arguments.lease_name);
    Ok(Candidate::new(client.clone(), namespace, name, identity, duration))
}
