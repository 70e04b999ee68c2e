//! `vcuda-check`: whether an image, or a node, is fit for GPU shares, said before a pod finds out. It reads files
//! and executes nothing of them. For people as text, for pipelines as JSON; the exit code says it too.

#![forbid(unsafe_code)]

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand, ValueEnum};
use oci_hooks::{
    compat::{
        Severity, archive,
        check::{self, Limits, Node, Report, Verdict},
        cuda::Driver,
        start::Command,
    },
    rootfs::Rootfs,
};
use vcuda_config::NodeFile;

/// Says whether an image can run with a share of a GPU, from its files alone.
///
/// Exit codes: 0 it fits; 1 it does not; 2 it could not be told, and standard error or the report says why.
#[derive(Parser)]
#[command(name = "vcuda-check", version, verbatim_doc_comment)]
struct Cli {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Check a root folder: an unpacked image, a container's root, a chroot.
    Rootfs {
        /// The folder.
        dir: PathBuf,
        #[command(flatten)]
        started: Started,
        #[command(flatten)]
        common: Common,
    },
    /// Check an image in a file, as `docker save`, `ctr image export` or `skopeo copy` write it. Needs no root and
    /// unpacks nothing; its layers may be compressed, the file as a whole may not.
    Image {
        /// The file.
        file: PathBuf,
        #[command(flatten)]
        common: Common,
    },
}

#[derive(Args)]
struct Started {
    /// The program that is started, with its arguments after it.
    #[arg(long, value_name = "PROGRAM", num_args = 1.., allow_hyphen_values = true, value_terminator = ";")]
    entry: Vec<String>,
    /// A variable of its environment, NAME=value; may be given more than once.
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Its working folder.
    #[arg(long, value_name = "FOLDER", default_value = "/")]
    cwd: PathBuf,
}

#[derive(Args)]
struct Common {
    /// Root of the driver to check against. Default: the node file's driverRoot, where a driver is there.
    #[arg(long, value_name = "DIR")]
    driver: Option<PathBuf>,
    /// The shim to check against. Default: the one installed on this node, else glibc 2.17 is assumed.
    #[arg(long, value_name = "FILE")]
    shim: Option<PathBuf>,
    /// The node file.
    #[arg(long, value_name = "FILE", default_value = NodeFile::DEFAULT_PATH)]
    config: PathBuf,
    /// How the answer is written.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    output: Output,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For people.
    Text,
    /// One JSON object.
    Json,
}

/// When to say that it goes on, and how often.
const PATIENCE: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli.what) {
        Ok(Verdict::Fits) => ExitCode::SUCCESS,
        Ok(Verdict::DoesNotFit) => ExitCode::from(1),
        Ok(Verdict::Unknown) => ExitCode::from(2),
        Err(error) => {
            eprintln!("vcuda-check: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(what: &What) -> Result<Verdict> {
    match what {
        What::Rootfs { dir, started, common } => {
            let node = node(common)?;
            let dir = std::path::absolute(dir).context("the folder's path cannot be completed")?;
            let rootfs = Rootfs::open(&dir)?;
            let report =
                check::rootfs(&rootfs, &started.command(), &node, Limits::default(), &mut progress())?;
            print(&report, common.output)?;
            Ok(report.verdict)
        }
        What::Image { file, common } => {
            let node = node(common)?;
            let report = archive::check(file, &node, archive::Limits::default(), &mut progress())
                .with_context(|| file.display().to_string())?;
            print(&report, common.output)?;
            Ok(report.verdict)
        }
    }
}

impl Started {
    fn command(&self) -> Command {
        Command { args: self.entry.clone(), env: self.env.clone(), cwd: self.cwd.clone() }
    }
}

fn node(common: &Common) -> Result<Node> {
    let file = NodeFile::load_or_default(&common.config)?;
    let shim = common.shim.clone().unwrap_or_else(|| file.paths.shim());
    let mut node = match Node::with_shim(&shim) {
        Ok(node) => node,
        // Asked for by name, it must be there.
        Err(trouble) if common.shim.is_some() => return Err(trouble.into()),
        Err(_) => Node::without_shim(),
    };
    node.driver = match &common.driver {
        Some(root) => Some(Driver::find(root, None)?),
        None => Driver::find(&file.paths.driver_root, None).ok(),
    };
    Ok(node)
}

/// Says on standard error that a long check goes on.
fn progress() -> impl FnMut(u64) {
    let mut last = Instant::now();
    move |files| {
        if last.elapsed() > PATIENCE {
            last = Instant::now();
            eprintln!("vcuda-check: {files} files so far");
        }
    }
}

fn print(report: &Report, output: Output) -> Result<()> {
    let mut out = io::stdout().lock();
    match output {
        Output::Json => {
            serde_json::to_writer_pretty(&mut out, report)?;
            writeln!(out)?;
        }
        Output::Text => out.write_all(text(report).as_bytes())?,
    }
    Ok(())
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    let verdict = match report.verdict {
        Verdict::Fits => "fits",
        Verdict::DoesNotFit => "does not fit",
        Verdict::Unknown => "could not be told",
    };
    let driver = match (&report.driver, &report.driver_cuda) {
        (Some(version), Some(cuda)) => format!("driver {version} (CUDA {cuda})"),
        _ => "no driver known".into(),
    };
    let runtimes = if report.runtimes.is_empty() { "none".into() } else { report.runtimes.join(", ") };
    text.push_str(&format!("{}: {verdict}\n", report.subject));
    text.push_str(&format!(
        "against {driver}, a shim for glibc {} and newer; CUDA runtimes in it: {runtimes}\n",
        report.shim_glibc
    ));
    text.push_str(&format!(
        "{} files seen, {} programs and libraries, {} MiB\n",
        report.files,
        report.elf,
        report.bytes >> 20
    ));
    if let Some(incomplete) = &report.incomplete {
        text.push_str(&format!("not seen whole: {incomplete}\n"));
    }
    for finding in &report.findings {
        let severity = match finding.severity {
            Severity::Refuse => "REFUSED",
            Severity::Warn => "warning",
            Severity::Info => "note",
        };
        let file = finding.file.as_deref().map(Path::display);
        let file = file.map(|file| format!("  {file}")).unwrap_or_default();
        text.push_str(&format!("\n{severity}  {}{file}\n", finding.id));
        text.push_str(&format!(
            "  what  {}\n  why   {}\n  do    {}\n",
            finding.what, finding.why, finding.remedy
        ));
    }
    text
}
