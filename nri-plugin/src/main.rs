//! `vcuda-nri-plugin`: gives containers their GPU shares when containerd creates them.

#![forbid(unsafe_code)]

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Context;
use clap::Parser;
use daemon::{End, LogFormat, start_log};
use nri_plugin::{
    connect::{Launched, Way},
    log,
    node::{Node, NodeError},
    session::SessionError,
};
use vcuda_config::{
    Exit, NodeFile, NodeFileError,
    daemons::{LockError, NriPlugin},
    in_one_line,
};

/// How long a thread that bound a share waits for the next one.
const WORKER_STAYS: Duration = Duration::from_secs(24 * 60 * 60);

const HELP: &str = "\
When kubelet has granted a container a GPU share, containerd asks this plugin what to add before it creates the
container: the share's device nodes, the library that holds it to its limits, and the limits themselves. Containers
without a share are answered at once and left as they are.

It runs in one of two ways:
  by itself     (a systemd unit or a DaemonSet): it connects to containerd's NRI socket, and again whenever
                containerd was restarted. This is the usual way.
  by containerd: linked as /opt/nri/plugins/90-vcuda. containerd passes it the content of
                /etc/nri/conf.d/vcuda.conf, which may be a node file or the path of one. It logs to
                /run/vcuda/nri-plugin.log.

While it is in service, /run/vcuda/nri-plugin.ready exists. `vcuda-nri-plugin --ready` asks for that, as a probe.

While it is stopped, containers with a share are refused by the guard; running ones never notice.";

fn help() -> String {
    let codes = Exit::help(
        "stopped by SIGTERM, SIGINT or SIGHUP, or containerd, which had started it, is gone; with --ready: it is in service",
        "something failed that a restart may heal; with --ready: it is not in service",
        &[Exit::NodeFile, Exit::AlreadyRuns],
    );
    format!("{HELP}\n\n{codes}")
}

/// Gives containers their GPU shares when containerd creates them (NRI plugin).
#[derive(Debug, Parser)]
#[command(name = "vcuda-nri-plugin", version, after_help = help())]
struct Arguments {
    /// Node file. Without it, the default file may be absent.
    #[arg(long, value_name = "FILE", default_value = NodeFile::DEFAULT_PATH)]
    config: PathBuf,

    /// How to write the log; what to write is set by RUST_LOG, such as `info` or `nri_plugin=debug`.
    #[arg(long, value_enum, default_value_t = LogFormat::Text, value_name = "FORMAT")]
    log_format: LogFormat,

    /// Ask whether the plugin on this node is in service, and do nothing else.
    #[arg(long)]
    ready: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(code) => code,
        Err(error) => {
            let told = in_one_line(error.as_ref());
            // In the log, once there is one. That of a plugin that containerd started is a file, which may have no place yet.
            let launched = std::env::var_os("NRI_PLUGIN_SOCKET").is_some();
            let logs = tracing::dispatcher::has_been_set();
            if logs {
                tracing::error!("{told}");
            }
            if launched || !logs {
                eprintln!("vcuda-nri-plugin: {told}");
            }
            exit(&error).into()
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.ready {
        let file = NodeFile::load_or_default(&arguments.config)?;
        let reason = match NriPlugin::of(&file.paths) {
            Ok(NriPlugin::Connected { runtime, .. }) => {
                println!("in service for {runtime}");
                return Ok(ExitCode::SUCCESS);
            }
            Ok(NriPlugin::NotConnected) => {
                "vcuda-nri-plugin runs here, but containerd does not ask it".into()
            }
            Ok(NriPlugin::NotRunning) => "vcuda-nri-plugin does not run here".into(),
            Err(error) => format!("that cannot be told: {error}"),
        };
        println!("not in service: {reason}; see the plugin's log, and `vcuda-check node` as root");
        return Ok(Exit::No.into());
    }
    let way = match Launched::from_env()? {
        Some(launched) => {
            let log = log::to_file();
            Way::Launched { launched, config: arguments.config.clone(), log }
        }
        None => {
            start_log(arguments.log_format, log::DEFAULT);
            let file = NodeFile::load_or_default(&arguments.config)?;
            Way::external(&file, Node::start(&file)?)
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // A container that waits for its share need not wait for a thread to be made.
        .thread_keep_alive(WORKER_STAYS)
        .build()?;
    let ended = runtime.block_on(async {
        let mut end = End::catch().context("signals cannot be caught")?;
        way.go(async { end.asked().await }).await?;
        Ok::<_, anyhow::Error>(())
    });
    // A call that waits for a disk is no reason to stay: it has been waited for as long as it may take, and the next plugin
    // starts only when this one is gone.
    runtime.shutdown_background();
    ended.map(|()| ExitCode::SUCCESS)
}

fn exit(error: &anyhow::Error) -> Exit {
    if error.is::<NodeFileError>() {
        return Exit::NodeFile;
    }
    if matches!(error.downcast_ref(), Some(SessionError::Unusable(_))) {
        return Exit::NodeFile;
    }
    match error.downcast_ref() {
        Some(NodeError::Lock(LockError::Held { .. })) => Exit::AlreadyRuns,
        Some(NodeError::Config(_)) => Exit::NodeFile,
        _ => Exit::No,
    }
}
