//! Command line of the CDI generator.

#![forbid(unsafe_code)]

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Result;
use cdi_generator::{
    Driver, DriverError, ensure_spec, file,
    folders::Registry,
    rules::{self, Fault},
    spec, spec_path,
};
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;
use serde_json::json;
use tracing_subscriber::EnvFilter;
use vcuda_config::{Exit, NodeFile, NodeFileError, in_one_line};

/// Folder of specifications that administrators write; runtimes read it before the configured one.
const STATIC_FOLDER: &str = "/etc/cdi";

fn codes_of_generate() -> String {
    let codes = [Exit::NodeFile, Exit::NoDriver];
    Exit::help("it is printed, or there as it should be", "a file could not be read or written", &codes)
}

/// Writes and checks CDI specifications, by which a container gets the NVIDIA driver's files.
///
/// The device plugin keeps the specification of tencent.com/vcuda current by itself. This is for looking at it, for
/// writing it by hand, and for finding out why a runtime does not know a device.
#[derive(Parser)]
#[command(name = "vcuda-cdi", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Find the driver and print the specification of tencent.com/vcuda, or write it
    #[command(after_help = codes_of_generate())]
    Generate(Generate),
    /// Show the devices that a runtime knows, and what keeps it from knowing others
    ///
    /// A device that two files of one folder define is known by neither, and one broken rule takes a whole file out:
    /// both are told, and then the exit code is 1.
    #[command(after_help = Exit::help("all is well", "something keeps a device from being known", &[Exit::NodeFile]))]
    List(List),
    /// Check specification files, of any vendor, by the rules of CDI 1.1.0
    ///
    /// Tells every broken rule with its place in the file. A runtime leaves out a file that breaks a single one.
    #[command(after_help = Exit::help("all are valid", "one breaks a rule, or cannot be read", &[]))]
    Validate(Validate),
}

#[derive(Args)]
struct Node {
    /// Node file. Without it, the default file may be absent
    #[arg(long, value_name = "FILE", default_value = NodeFile::DEFAULT_PATH)]
    config: PathBuf,
}

#[derive(Args)]
struct Output {
    /// How to write it
    #[arg(short, long, value_enum, default_value_t = Format::Text, value_name = "FORMAT")]
    output: Format,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people
    Text,
    /// JSON, for programs
    Json,
}

#[derive(Args)]
struct Generate {
    #[command(flatten)]
    node: Node,
    /// Where the driver is installed, instead of the node file's paths.driverRoot
    #[arg(long, value_name = "FOLDER")]
    driver_root: Option<PathBuf>,
    /// Write the specification into the node file's paths.cdi, if it is not there yet as it should be
    #[arg(long)]
    write: bool,
    #[command(flatten)]
    output: Output,
}

#[derive(Args)]
struct List {
    #[command(flatten)]
    node: Node,
    /// A folder of specifications; may be given many times, later ones win [default: /etc/cdi and the node file's
    /// paths.cdi]
    #[arg(long = "folder", value_name = "FOLDER")]
    folders: Vec<PathBuf>,
    #[command(flatten)]
    output: Output,
}

#[derive(Args)]
struct Validate {
    /// Specification files, JSON or YAML
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// What is told about one file.
#[derive(Serialize)]
struct Verdict {
    file: PathBuf,
    valid: bool,
    faults: Vec<Fault>,
}

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).init();
    let mut out = io::stdout().lock();
    let result = match Cli::parse().command {
        Command::Generate(args) => generate(&args, &mut out),
        Command::List(args) => list(&args, &mut out),
        Command::Validate(args) => validate(&args, &mut out),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => Exit::No.into(),
        // Somebody like `head` has seen enough.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "vcuda-cdi: {}", in_one_line(error.as_ref()));
            exit(&error).into()
        }
    }
}

fn exit(error: &anyhow::Error) -> Exit {
    match error.downcast_ref() {
        Some(DriverError::NotFound { .. } | DriverError::Root { .. }) => Exit::NoDriver,
        _ if error.is::<NodeFileError>() => Exit::NodeFile,
        _ => Exit::No,
    }
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

fn generate(args: &Generate, out: &mut dyn Write) -> Result<bool> {
    let mut paths = NodeFile::load_or_default(&args.node.config)?.paths;
    if let Some(root) = &args.driver_root {
        paths.driver_root = std::path::absolute(root)?;
    }
    let driver = Driver::discover(&paths.driver_root)?;
    for (library, reason) in &driver.left_out {
        tracing::warn!(library = %library.display(), reason, "left out of containers");
    }
    if !args.write {
        // The specification is JSON in either format.
        write!(out, "{}", spec(&paths, &driver).to_json())?;
        return Ok(true);
    }
    let (path, written) = (spec_path(&paths), ensure_spec(&paths, &driver)?);
    // libcuda and NVML are two more.
    let libraries = driver.libraries.len() + driver.past_cuda.len() + 2;
    match args.output.output {
        Format::Json => {
            let report = json!({
                "file": path,
                "written": written,
                "driver": {
                    "root": driver.root,
                    "version": driver.version,
                    "libraryDir": driver.library_dir,
                    "libraries": libraries,
                    "files": driver.files.len(),
                    "sockets": driver.sockets.len(),
                },
            });
            writeln!(out, "{report:#}")?;
        }
        Format::Text => {
            let done = if written { "written" } else { "current already" };
            writeln!(
                out,
                "{}: {done}; driver {} below {}, {} libraries around {}, {} programs and firmware files, {} sockets",
                path.display(),
                driver.version,
                driver.root.display(),
                libraries,
                driver.library_dir.display(),
                driver.files.len(),
                driver.sockets.len(),
            )?;
        }
    }
    Ok(true)
}

fn list(args: &List, out: &mut dyn Write) -> Result<bool> {
    let folders = if args.folders.is_empty() {
        vec![STATIC_FOLDER.into(), NodeFile::load_or_default(&args.node.config)?.paths.cdi]
    } else {
        args.folders.clone()
    };
    let registry = Registry::read(&folders)?;
    match args.output.output {
        Format::Json => writeln!(out, "{}", serde_json::to_string_pretty(&registry)?)?,
        Format::Text => list_text(&registry, &folders, out)?,
    }
    Ok(registry.is_sound())
}

fn list_text(registry: &Registry, folders: &[PathBuf], out: &mut dyn Write) -> io::Result<()> {
    if registry.devices.is_empty() {
        let named = |folder: &PathBuf| {
            let none = if folder.exists() { "" } else { " (there is no such folder)" };
            format!("{}{none}", folder.display())
        };
        let folders: Vec<_> = folders.iter().map(named).collect();
        writeln!(out, "no devices in {}", folders.join(", "))?;
    } else {
        let width = registry.devices.keys().map(String::len).max().unwrap_or(0).max("DEVICE".len());
        writeln!(out, "{:width$}  NODES  MOUNTS  HOOKS  FILE", "DEVICE")?;
        for (name, entry) in &registry.devices {
            let file = entry.file.display();
            writeln!(
                out,
                "{name:width$}  {:5}  {:6}  {:5}  {file}",
                entry.device_nodes, entry.mounts, entry.hooks
            )?;
        }
    }
    for (name, files) in &registry.conflicts {
        let files: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
        writeln!(
            out,
            "conflict: {name} is defined by {}; runtimes know it no more, remove it from all but one",
            files.join(" and ")
        )?;
    }
    for reason in registry.broken.values().flatten() {
        writeln!(out, "left out: {reason}")?;
    }
    Ok(())
}

fn validate(args: &Validate, out: &mut dyn Write) -> Result<bool> {
    let verdicts: Vec<_> = args.files.iter().map(|file| verdict(file)).collect();
    match args.output.output {
        Format::Json => writeln!(out, "{}", serde_json::to_string_pretty(&verdicts)?)?,
        Format::Text => {
            for verdict in &verdicts {
                let file = verdict.file.display();
                if verdict.valid {
                    writeln!(out, "{file}: valid")?;
                }
                for fault in &verdict.faults {
                    writeln!(out, "{file}: {fault}")?;
                }
            }
        }
    }
    Ok(verdicts.iter().all(|verdict| verdict.valid))
}

fn verdict(path: &Path) -> Verdict {
    let mut faults = match file::read(path) {
        Ok(spec) => rules::faults(&spec),
        Err(error) => vec![Fault { place: "file".into(), reason: error.reason() }],
    };
    if !file::is_spec_name(path) {
        let reason = "runtimes read files that end in .json or .yaml only; rename it".into();
        faults.push(Fault { place: "file name".into(), reason });
    }
    Verdict { file: path.into(), valid: faults.is_empty(), faults }
}
