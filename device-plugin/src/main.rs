//! Command line of the device plugin.

#![forbid(unsafe_code)]

use std::{
    io::{ErrorKind, IsTerminal, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Args, Parser, Subcommand, ValueEnum};
use device_plugin::{fatal::Fatal, plugin, status::Status};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};
use tracing::{error, info};
use tracing_subscriber::EnvFilter;
use vcuda_config::NodeFile;

/// Offers shares of this node's GPUs to kubelet.
#[derive(Parser)]
#[command(name = "vcuda-device-plugin", version, after_help = Fatal::HELP)]
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
    #[command(after_help = Fatal::HELP)]
    Run(Run),
    /// Show GPUs, shares, what is free, and what each container has used
    Status {
        /// How to write it
        #[arg(short, long, value_enum, default_value_t = Format::Text, value_name = "FORMAT")]
        output: Format,
    },
}

#[derive(Args)]
struct Run {
    /// End with an exit code when there is no driver or no GPU, instead of waiting for one
    #[arg(long)]
    fail_without_driver: bool,
    /// How to write the log; what to write is set by RUST_LOG, such as `info` or `device_plugin=debug`
    #[arg(long, value_enum, value_name = "FORMAT")]
    log_format: Option<Format>,
}

impl Run {
    /// These options, given before the subcommand, and those after it.
    fn or(self, later: Self) -> Self {
        Self {
            fail_without_driver: self.fail_without_driver || later.fail_without_driver,
            log_format: later.log_format.or(self.log_format),
        }
    }
}

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
        Some(Command::Status { output }) => status(&cli.config, output),
    }
}

fn serve(config: &Path, run: &Run) -> ExitCode {
    start_log(run.log_format);
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
    let outcome = run_until_signal(file, run.fail_without_driver);
    match outcome {
        Ok(()) => {
            info!("stopped");
            ExitCode::SUCCESS
        }
        Err(fatal) => end(&fatal),
    }
}

fn status(config: &Path, output: Format) -> ExitCode {
    let shown = NodeFile::load_or_default(config).map_err(Fatal::from).and_then(|file| {
        let status = Status::read(&file)?;
        let text = match output {
            Format::Text => status.to_string(),
            Format::Json => format!("{:#}\n", serde_json::json!(status)),
        };
        match std::io::stdout().write_all(text.as_bytes()) {
            // Whoever reads it has seen enough.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
            Err(source) => Err(Fatal::System { what: "stdout", source }),
            Ok(()) => Ok(()),
        }
    });
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(fatal) => {
            eprintln!("{fatal}");
            ExitCode::from(fatal.exit_code())
        }
    }
}

fn run_until_signal(file: NodeFile, fail_without_driver: bool) -> Result<(), Fatal> {
    let system = |what| move |source| Fatal::System { what, source };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(system("no event loop could be started"))?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).map_err(system("SIGTERM cannot be caught"))?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(system("SIGINT cannot be caught"))?;
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            stop.send_replace(true);
            // Held, so that nobody takes the end of this task for something else.
            stop.closed().await;
        });
        plugin::run(file, fail_without_driver, stopped).await
    })
}

fn end(fatal: &Fatal) -> ExitCode {
    error!("{fatal}");
    ExitCode::from(fatal.exit_code())
}

fn start_log(format: Option<Format>) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let stderr = std::io::stderr;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(stderr().is_terminal())
        .with_writer(stderr);
    match format {
        None | Some(Format::Text) => log.init(),
        Some(Format::Json) => log.json().init(),
    }
}
