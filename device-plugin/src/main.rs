//! Command line of the device plugin.

#![forbid(unsafe_code)]

use std::{
    fmt::{self, Display},
    io::{ErrorKind, IsTerminal, Write},
    num::NonZeroU32,
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
    time::Duration,
};

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use daemon::{End, LogFormat, start_log};
use device_plugin::{
    cluster::{self, Access},
    explain::{self, Explained},
    fatal::Fatal,
    migrate::{self, Checkpoint, Migration},
    node::Node,
    plugin,
    set::{self, PodName, memory_units, percent},
    status::Status,
    top::Top,
};
use ledger::{Change, Policy};
use serde::Serialize;
use tokio::sync::watch;
use tracing::{error, info, warn};
use vcuda_config::{Exit, NodeFile, Request, daemons, in_one_line};

/// Offers shares of this node's GPUs to kubelet.
#[derive(Parser)]
#[command(name = "vcuda-device-plugin", version, after_help = codes_of_run())]
struct Cli {
    /// Node file. Without it, the default file may be absent.
    #[arg(long, value_name = "FILE", default_value = NodeFile::DEFAULT_PATH, global = true)]
    config: PathBuf,
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: Run,
}

#[derive(Subcommand)]
enum Command {
    /// Serve kubelet until stopped (the default)
    #[command(after_help = codes_of_run())]
    Run(Run),
    /// Say where a request would go and what each GPU lacks for it, or why a pod's shares are where they are
    #[command(after_help = codes(&[Exit::FitsNowhere]))]
    Explain(Explain),
    /// Say what becomes of each workload that gpu-manager runs on this node; nothing is changed
    #[command(after_help = codes(&[Exit::NoDriver, Exit::SomeWillNotRun]))]
    Migrate(Migrate),
    /// Show GPUs, shares, what is free, and what each container has used
    #[command(after_help = codes(&[]))]
    Status {
        /// How to write it
        #[arg(short, long, value_enum, default_value_t = Format::Text, value_name = "FORMAT")]
        output: Format,
    },
    /// Show what each container does with its share, again and again
    #[command(after_help = codes(&[]))]
    Top {
        /// How to write it; JSON is one object a line
        #[arg(short, long, value_enum, default_value_t = Format::Text, value_name = "FORMAT")]
        output: Format,
        /// Seconds between two looks
        #[arg(short, long, default_value_t = 1, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
        interval: u64,
        /// Number of looks, after which it ends; without it, it goes on until stopped
        #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
        count: Option<u64>,
    },
    /// Change what a running container may use
    #[command(after_help = codes(&[Exit::NoShare, Exit::CannotBeSet]), long_about = SET_HELP)]
    Set(Set),
}

/// What the help of a command says of exit codes.
fn codes(more: &[Exit]) -> String {
    let codes = [&[Exit::NodeFile], more].concat();
    Exit::help("done", "the system refused something, or there is no state to show", &codes)
}

fn codes_of_run() -> String {
    let codes = [Exit::NodeFile, Exit::NoDriver, Exit::NoGpu, Exit::AlreadyRuns, Exit::Unwritable];
    Exit::help("stopped by SIGTERM, SIGINT or SIGHUP", "something failed that a restart may heal", &codes)
        + "\n\n4 and 5 only with --fail-without-driver; otherwise it waits for a driver and a GPU."
}

/// What `set --help` says first.
const SET_HELP: &str = "Change what a running container may use, at once.

It is checked against what the GPU has left, never past 100 core or its memory, and holds until the pod ends, over
restarts of the container and of every part of vcuda. Memory that the container holds above a new ceiling stays; it
gets no more until it is below.

Kubernetes does not know of it: kubelet and the scheduler go on counting what the pod asked for. A pod that they send
here because of that, and that no longer fits, is refused with the reason.";

#[derive(Args)]
struct Set {
    /// The pod
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pod: PodName,
    /// The container
    #[arg(long, value_name = "NAME")]
    container: String,
    #[command(flatten)]
    amounts: Amounts,
    /// How to write what was set
    #[arg(short, long, value_enum, default_value_t = Format::Text, value_name = "FORMAT")]
    output: Format,
}

#[derive(Args)]
#[group(required = true, multiple = true)]
struct Amounts {
    /// Percent of the GPU's compute time, 1 to 99
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    core: Option<u32>,
    /// Device memory: a multiple of 256MiB, such as 16GiB, or a number of units of 256 MiB, such as 64
    #[arg(long, value_name = "SIZE", value_parser = memory_units)]
    memory: Option<NonZeroU32>,
    /// Percent that it may use while others leave it idle, from its core to 100
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    core_limit: Option<u32>,
}

#[derive(Args)]
struct Migrate {
    /// Look, and change nothing; there is nothing else that it does
    #[arg(long, required = true)]
    check: bool,
    /// gpu-manager's checkpoint
    #[arg(long, value_name = "FILE", default_value = migrate::CHECKPOINT)]
    checkpoint: PathBuf,
    /// Go by the node's pods alone
    #[arg(long, conflicts_with = "checkpoint")]
    no_checkpoint: bool,
    /// Kubeconfig for the way to the API server
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    kubeconfig: Option<PathBuf>,
    /// This node's name in the cluster; the host's name if it is not given
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node_name: Option<String>,
    /// How to write it
    #[arg(short, long, value_enum, default_value_t = Format::Text, value_name = "FORMAT")]
    output: Format,
}

/// A request, or a pod.
#[derive(Args)]
#[command(
    group = ArgGroup::new("what").required(true).args(["pod", "core"]),
    override_usage = "vcuda-device-plugin explain [OPTIONS] <POD | --core <PERCENT> [--memory <SIZE>]>"
)]
struct Explain {
    /// Pod whose shares are explained: NAMESPACE/NAME, a name, or a UID
    #[arg(value_name = "POD", conflicts_with_all = ["core", "memory", "policy"])]
    pod: Option<String>,
    /// Core of the request that is explained: 1 to 99 percent of one GPU, or a multiple of 100
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    core: Option<u32>,
    /// Memory of the request: a multiple of 256MiB, such as 8GiB, or a number of units of 256 MiB, such as 32
    #[arg(long, value_name = "SIZE", value_parser = memory_units)]
    memory: Option<NonZeroU32>,
    /// How its GPU is picked: pack or spread
    #[arg(long, value_name = "POLICY", default_value_t = Policy::Pack)]
    policy: Policy,
    /// How to write it
    #[arg(short, long, value_enum, default_value_t = Format::Text, value_name = "FORMAT")]
    output: Format,
}

#[derive(Args)]
struct Run {
    /// End with an exit code when there is no driver or no GPU, instead of waiting for one
    #[arg(long)]
    fail_without_driver: bool,
    /// Kubeconfig for the way to the API server, such as kubelet's own. In a pod, its service account will do. Without
    /// either, vcuda-scheduler cannot use this node
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    kubeconfig: Option<PathBuf>,
    /// This node's name in the cluster; the host's name if it is not given
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node_name: Option<String>,
    /// How to write the log, text if it is not given; what to write is set by RUST_LOG, such as `info` or `device_plugin=debug`
    #[arg(long, value_enum, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
}

impl Run {
    /// These options, given before the subcommand, and those after it.
    fn or(self, later: Self) -> Self {
        Self {
            fail_without_driver: self.fail_without_driver || later.fail_without_driver,
            kubeconfig: later.kubeconfig.or(self.kubeconfig),
            node_name: later.node_name.or(self.node_name),
            log_format: later.log_format.or(self.log_format),
        }
    }
}

/// What is logged where RUST_LOG says nothing: what a watch of the API server fails with is told by whoever watches.
const LOG: &str = "info,kube_runtime::watcher=error";

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// For people
    Text,
    /// JSON, for programs
    Json,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match cli.command {
        None => serve(&cli.config, &cli.run),
        Some(Command::Run(run)) => serve(&cli.config, &cli.run.or(run)),
        Some(Command::Status { output }) => ended(status(&cli.config, output)),
        Some(Command::Top { output, interval, count }) => ended(top(&cli.config, output, interval, count)),
        Some(Command::Set(set)) => ended(change(&cli.config, &set)),
        Some(Command::Migrate(of)) => answered(check_migration(&cli.config, &of)),
        Some(Command::Explain(of)) => answered(explain(&cli.config, &of)),
    }
}

fn serve(config: &Path, run: &Run) -> ExitCode {
    start_log(run.log_format.unwrap_or(LogFormat::Text), LOG);
    let file = match NodeFile::load_or_default(config) {
        Ok(file) => file,
        Err(error) => return end(&Fatal::from(error)),
    };
    info!(
        version = vcuda_config::VERSION,
        driver_root = %file.paths.driver_root.display(),
        kubelet = %file.paths.kubelet.display(),
        "starting"
    );
    if let Some(another) = daemons::installed_elsewhere(&file.paths) {
        warn!("{another}");
    }
    let outcome = run_until_signal(
        file,
        access(run.kubeconfig.as_ref(), run.node_name.as_ref()),
        run.fail_without_driver,
    );
    match outcome {
        Ok(()) => {
            info!("stopped");
            ExitCode::SUCCESS
        }
        Err(fatal) => end(&fatal),
    }
}

fn status(config: &Path, output: Format) -> Result<(), Fatal> {
    let status = Status::read(&NodeFile::load_or_default(config)?)?;
    print(&match output {
        Format::Text => status.to_string(),
        Format::Json => format!("{:#}\n", serde_json::json!(status)),
    })
    .map(drop)
}

fn top(config: &Path, output: Format, interval: u64, count: Option<u64>) -> Result<(), Fatal> {
    /// Moves a terminal's cursor home and clears what is below (ECMA-48).
    const CLEAR: &str = "\x1b[H\x1b[J";
    let mut top = Top::new(NodeFile::load_or_default(config)?);
    let clear = if std::io::stdout().is_terminal() { CLEAR } else { "" };
    for look in 1_u64.. {
        let seen = top.look()?;
        let text = match output {
            Format::Text => format!("{clear}{seen}"),
            Format::Json => format!("{}\n", serde_json::json!(seen)),
        };
        if !print(&text)? || count.is_some_and(|count| look >= count) {
            break;
        }
        thread::sleep(Duration::from_secs(interval));
    }
    Ok(())
}

fn change(config: &Path, set: &Set) -> Result<(), Fatal> {
    let Amounts { core, memory, core_limit } = set.amounts;
    let change = Change { core, memory_units: memory, core_limit };
    let report = set::set(&NodeFile::load_or_default(config)?, &set.pod, &set.container, change)?;
    print(&match set.output {
        Format::Text => report.to_string(),
        Format::Json => format!("{:#}\n", serde_json::json!(report)),
    })
    .map(drop)
}

/// Writes to stdout; false when nobody reads it any more.
fn print(text: &str) -> Result<bool, Fatal> {
    let mut stdout = std::io::stdout();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        // Whoever reads it has seen enough.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(source) => Err(Fatal::System { what: "stdout", source }),
        Ok(()) => Ok(true),
    }
}

fn ended(outcome: Result<(), Fatal>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(fatal) => {
            eprintln!("vcuda-device-plugin: {fatal}");
            fatal.exit().into()
        }
    }
}

fn answered(outcome: Result<ExitCode, Fatal>) -> ExitCode {
    outcome.unwrap_or_else(|fatal| ended(Err(fatal)))
}

fn explain(config: &Path, of: &Explain) -> Result<ExitCode, Fatal> {
    let file = NodeFile::load_or_default(config)?;
    if let Some(pod) = &of.pod {
        show(&Lines(explain::shares_of(&file, pod)?), of.output)?;
        return Ok(ExitCode::SUCCESS);
    }
    let request = match Request::new(of.core.unwrap_or(0), of.memory.map_or(0, NonZeroU32::get)) {
        Ok(request) => request,
        Err(error) => {
            eprintln!("vcuda-device-plugin: {error}");
            return Ok(Exit::FitsNowhere.into());
        }
    };
    let explained = Explained::read(&file, &request, of.policy)?;
    let fits = !explained.gpus.is_empty();
    show(&explained, of.output)?;
    let exit = if fits { Exit::Done } else { Exit::FitsNowhere };
    Ok(exit.into())
}

fn check_migration(config: &Path, of: &Migrate) -> Result<ExitCode, Fatal> {
    let file = NodeFile::load_or_default(config)?;
    // While gpu-manager runs, this system's device plugin does not: its inventory is of another time.
    let inventory = Node::ask(&file).map_err(Fatal::NoDriver)?.inventory;
    let checkpoint = match of.no_checkpoint {
        true => Checkpoint::default(),
        false => Checkpoint::load(&of.checkpoint)?,
    };
    let access = access(of.kubeconfig.as_ref(), of.node_name.as_ref());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime =
        runtime.map_err(|source| Fatal::System { what: "no event loop could be started", source })?;
    let pods = runtime.block_on(cluster::pods_of_node(&access));
    let pods = pods.map_err(|error| Fatal::ApiServer(in_one_line(error.as_ref())))?;
    let migration = Migration::of(&inventory, &checkpoint, pods.as_deref(), &file.resources);
    show(&migration, of.output)?;
    let exit = if migration.all_run() { Exit::Done } else { Exit::SomeWillNotRun };
    Ok(exit.into())
}

/// The way to the cluster. Empty settings, as a manifest may leave them, are none.
fn access(kubeconfig: Option<&PathBuf>, node: Option<&String>) -> Access {
    Access {
        kubeconfig: kubeconfig.filter(|path| !path.as_os_str().is_empty()).cloned(),
        node: node.filter(|name| !name.is_empty()).cloned(),
    }
}

fn show<T: Display + Serialize>(found: &T, output: Format) -> Result<(), Fatal> {
    print(&match output {
        Format::Text => found.to_string(),
        Format::Json => format!("{:#}\n", serde_json::json!(found)),
    })
    .map(drop)
}

/// Several things, one after the other.
#[derive(Serialize)]
#[serde(transparent)]
struct Lines<T>(Vec<T>);

impl<T: Display> Display for Lines<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|line| line.fmt(f))
    }
}

fn run_until_signal(file: NodeFile, access: Access, fail_without_driver: bool) -> Result<(), Fatal> {
    let system = |what| move |source| Fatal::System { what, source };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(system("no event loop could be started"))?;
    let outcome = runtime.block_on(async {
        let mut end = End::catch().map_err(system("signals cannot be caught"))?;
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(async move {
            end.asked().await;
            stop.send_replace(true);
            // Held, so that nobody takes the end of this task for something else.
            stop.closed().await;
        });
        plugin::run(file, access, fail_without_driver, stopped).await
    });
    // A call that waits for a disk or the driver is no reason to stay.
    runtime.shutdown_background();
    outcome
}

fn end(fatal: &Fatal) -> ExitCode {
    error!("{fatal}");
    fatal.exit().into()
}
