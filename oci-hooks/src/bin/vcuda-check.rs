//! `vcuda-check`: whether an image, or a node, is fit for GPU shares, said before a pod finds out. It reads files
//! and executes nothing of them. For people as text, for pipelines as JSON; the exit code says it too.

#![forbid(unsafe_code)]

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use ledger::{Inventory, ShareState, Shares};
use oci_hooks::{
    compat::{
        Finding, Severity, archive,
        check::{self, Limits, Node, Report, Seen, Verdict},
        cuda::Driver,
        files::Files,
        start::Command,
        survey::Survey,
    },
    node,
    rootfs::Rootfs,
    running::Running,
    scans::Scans,
    verdicts,
};
use serde::Serialize;
use vcuda_config::NodeFile;

/// Says whether an image can run with a share of a GPU, from its files alone, and whether a node can give it one.
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
    /// Check a root folder: an unpacked image, a chroot.
    Rootfs {
        /// The folder.
        dir: PathBuf,
        #[command(flatten)]
        started: Started,
        #[command(flatten)]
        against: Against,
        #[command(flatten)]
        common: Common,
    },
    /// Check an image in a file, as `docker save`, `ctr image export` or `skopeo copy` write it. Needs no root and
    /// unpacks nothing; its layers may be compressed, the file as a whole may not.
    Image {
        /// The file.
        file: PathBuf,
        #[command(flatten)]
        against: Against,
        #[command(flatten)]
        common: Common,
    },
    /// Check a container that runs on this node, by its ID or the beginning of it.
    Container {
        /// The ID.
        id: String,
        #[command(flatten)]
        containerd: Containerd,
        #[command(flatten)]
        against: Against,
        #[command(flatten)]
        common: Common,
    },
    /// Check this node: driver, containerd's settings, what is installed.
    Node {
        /// containerd's program, which is asked for its settings.
        #[arg(long, value_name = "FILE", default_value = "containerd")]
        containerd: PathBuf,
        /// Its configuration, where it is not the usual one.
        #[arg(long, value_name = "FILE")]
        containerd_config: Option<PathBuf>,
        #[command(flatten)]
        common: Common,
    },
    /// List the images with shares that this node has seen, and how they fared.
    List {
        /// Write metrics, as node_exporter's textfile collector reads them.
        #[arg(long)]
        metrics: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Check many images against many drivers: which workloads a new driver would break.
    Matrix {
        /// A file with one root folder or image file a line; # begins a comment.
        #[arg(long, value_name = "FILE")]
        list: Option<PathBuf>,
        /// All containers with a share that run on this node, as its ledger has them.
        #[arg(long)]
        running: bool,
        /// All images with a share that this node has seen (`list`), from memory.
        #[arg(long)]
        seen: bool,
        /// Root of a driver, or a folder of its libraries; may be given more than once. Default: this node's.
        #[arg(long, value_name = "DIR")]
        driver: Vec<PathBuf>,
        /// The shim to check against. Default: the one installed on this node, else glibc 2.17 is assumed.
        #[arg(long, value_name = "FILE")]
        shim: Option<PathBuf>,
        /// Compute capability of the GPUs to check against, such as 8.0; may be given more than once. Default: of this
        /// node's GPUs.
        #[arg(long, value_name = "N.N", value_parser = capability)]
        gpu: Vec<u32>,
        #[command(flatten)]
        containerd: Containerd,
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
struct Against {
    /// Root of the driver to check against, or the folder of its libraries. Default: the node file's driverRoot,
    /// where a driver is there.
    #[arg(long, value_name = "DIR")]
    driver: Option<PathBuf>,
    /// The shim to check against. Default: the one installed on this node, else glibc 2.17 is assumed.
    #[arg(long, value_name = "FILE")]
    shim: Option<PathBuf>,
    /// Compute capability of the GPUs to check against, such as 8.0; may be given more than once. Default: of this
    /// node's GPUs.
    #[arg(long, value_name = "N.N", value_parser = capability)]
    gpu: Vec<u32>,
}

#[derive(Args)]
struct Containerd {
    /// containerd's state folder.
    #[arg(long, value_name = "DIR", default_value = "/run/containerd")]
    containerd_state: PathBuf,
    /// containerd's namespace; Kubernetes has its own.
    #[arg(long, value_name = "NAME", default_value = "k8s.io")]
    namespace: String,
}

#[derive(Args)]
struct Common {
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
    let limits = Limits::default();
    match what {
        What::Rootfs { dir, started, against, common } => {
            let file = common.load()?;
            let node = node(&file, against.shim.as_deref(), against.driver.as_deref(), &against.gpu)?;
            let seen = see_folder(dir, started.command(), &Scans::below(&file.paths.state))?;
            answer(&seen.report(&node), common.output)
        }
        What::Image { file, against, common } => {
            let node =
                node(&common.load()?, against.shim.as_deref(), against.driver.as_deref(), &against.gpu)?;
            answer(&see_archive(file)?.report(&node), common.output)
        }
        What::Container { id, containerd, against, common } => {
            let file = common.load()?;
            let node = node(&file, against.shim.as_deref(), against.driver.as_deref(), &against.gpu)?;
            let running = Running::find(&containerd.containerd_state, &containerd.namespace, id)?;
            let subject = format!("container {}", running.id);
            let scans = Scans::below(&file.paths.state).of_process(running.pid);
            let (root, command) = (running.rootfs()?, running.command);
            let seen = check::rootfs(root, subject, command, limits, Some(&scans), &mut progress())?;
            answer(&seen.report(&node), common.output)
        }
        What::Node { containerd, containerd_config, common } => {
            let report = node::check(&common.load()?, containerd, containerd_config.as_deref());
            output(&report, common.output, print::node)?;
            Ok(report.verdict)
        }
        What::List { metrics, common } => {
            let seen = verdicts::list(&common.load()?.paths.state)?;
            if *metrics {
                io::stdout().lock().write_all(verdicts::metrics(&seen).as_bytes())?;
                return Ok(Verdict::Fits);
            }
            output(&seen, common.output, |seen| print::seen(seen))?;
            Ok(Verdict::Fits)
        }
        What::Matrix { list, running, seen, driver, shim, gpu, containerd, common } => {
            let file = common.load()?;
            let nodes: Vec<Node> = if driver.is_empty() {
                vec![node(&file, shim.as_deref(), None, gpu)?]
            } else {
                let of = |driver: &PathBuf| node(&file, shim.as_deref(), Some(driver), gpu);
                driver.iter().map(of).collect::<Result<_>>()?
            };
            if list.is_none() && !running && !seen {
                bail!("nothing to check; give --list, --running or --seen");
            }
            let scans = Scans::below(&file.paths.state);
            let running = running.then_some((&file, containerd));
            let mut rows = matrix(list.as_deref(), running, &nodes, &scans)?;
            if *seen {
                let seen = verdicts::list(&file.paths.state)?;
                rows.extend(seen.into_iter().map(|seen| remembered(&seen, &nodes, &scans)));
            }
            output(&rows, common.output, |rows| print::matrix(rows, &nodes))?;
            let of = |row: &Row| worst(row.reports.iter().map(|report| report.verdict));
            let unless_error = |row: &Row| if row.error.is_some() { Verdict::Unknown } else { of(row) };
            Ok(worst(rows.iter().map(unless_error)))
        }
    }
}

fn answer(report: &Report, format: Output) -> Result<Verdict> {
    output(report, format, print::image)?;
    Ok(report.verdict)
}

/// Does not fit, if one does not; else open, if one is.
fn worst(verdicts: impl Iterator<Item = Verdict>) -> Verdict {
    verdicts.fold(Verdict::Fits, |worst, verdict| match (worst, verdict) {
        (Verdict::DoesNotFit, _) | (_, Verdict::DoesNotFit) => Verdict::DoesNotFit,
        (Verdict::Unknown, _) | (_, Verdict::Unknown) => Verdict::Unknown,
        (Verdict::Fits, Verdict::Fits) => Verdict::Fits,
    })
}

fn see_folder(dir: &Path, command: Command, scans: &Scans) -> Result<Seen<Rootfs>> {
    let dir = std::path::absolute(dir).context("the folder's path cannot be completed")?;
    let subject = dir.display().to_string();
    let root = Rootfs::open(&dir)?;
    Ok(check::rootfs(root, subject, command, Limits::default(), Some(scans), &mut progress())?)
}

fn see_archive(file: &Path) -> Result<Seen<archive::Tree>> {
    archive::see(file, archive::Limits::default(), &mut progress())
        .with_context(|| file.display().to_string())
}

/// One image of a matrix: a report for each driver, or why there is none.
#[derive(Serialize)]
struct Row {
    subject: String,
    reports: Vec<Report>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

fn matrix(
    list: Option<&Path>,
    running: Option<(&NodeFile, &Containerd)>,
    nodes: &[Node],
    scans: &Scans,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    if let Some(list) = list {
        let text = std::fs::read_to_string(list).with_context(|| list.display().to_string())?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        for line in lines {
            let path = Path::new(line);
            rows.push(if path.is_dir() {
                row(line.to_owned(), see_folder(path, Command::default(), scans), nodes)
            } else {
                row(line.to_owned(), see_archive(path), nodes)
            });
        }
    }
    if let Some((file, containerd)) = running {
        let shares = Shares::read(&file.paths.shares())?;
        for record in shares.records.values().filter(|record| record.state == ShareState::Running) {
            let subject = format!(
                "pod {}/{}, container {}",
                record.pod.namespace, record.pod.name, record.container.name
            );
            let see = || {
                let found =
                    Running::find(&containerd.containerd_state, &containerd.namespace, &record.container.id)?;
                let (root, limits) = (found.rootfs()?, Limits::default());
                let (subject, scans) = (subject.clone(), scans.of_process(found.pid));
                Ok(check::rootfs(root, subject, found.command, limits, Some(&scans), &mut progress())?)
            };
            rows.push(row(subject.clone(), see(), nodes));
        }
        rows.extend(shares.unreadable.iter().map(|share| Row {
            subject: format!("share {}", share.name),
            reports: Vec::new(),
            error: Some(share.to_string()),
        }));
    }
    Ok(rows)
}

/// An image that the guard has seen, judged anew from what was found in it then.
fn remembered(seen: &verdicts::Seen, nodes: &[Node], scans: &Scans) -> Row {
    let survey = seen.layers.as_deref().and_then(|layers| scans.by_id(layers));
    let error = survey.is_none().then(|| {
        "what is in it was not kept, since it is no overlay or was not seen whole; check its file with --list".to_owned()
    });
    let refused = seen.unfit_on_any_driver();
    let report = |survey: &Survey, node| check::remembered(survey, seen.image.clone(), refused.clone(), node);
    let reports =
        survey.iter().flat_map(|survey| nodes.iter().map(move |node| report(survey, node))).collect();
    Row { subject: seen.image.clone(), reports, error }
}

/// One that cannot be looked at is no reason not to look at the others.
fn row<F: Files>(subject: String, seen: Result<Seen<F>>, nodes: &[Node]) -> Row {
    match seen {
        Ok(seen) => {
            let reports = nodes.iter().map(|node| seen.report(node)).collect();
            Row { subject, reports, error: None }
        }
        Err(error) => Row { subject, reports: Vec::new(), error: Some(format!("{error:#}")) },
    }
}

impl Common {
    fn load(&self) -> Result<NodeFile> {
        Ok(NodeFile::load_or_default(&self.config)?)
    }
}

impl Started {
    fn command(&self) -> Command {
        Command { args: self.entry.clone(), env: self.env.clone(), cwd: self.cwd.clone() }
    }
}

fn node(file: &NodeFile, shim: Option<&Path>, driver: Option<&Path>, gpus: &[u32]) -> Result<Node> {
    let mut node = match Node::with_shim(shim.unwrap_or(&file.paths.shim())) {
        Ok(node) => node,
        // Asked for by name, it must be there.
        Err(trouble) if shim.is_some() => return Err(trouble.into()),
        Err(_) => Node::without_shim(),
    };
    node.driver = match driver {
        Some(root) => Some(Driver::find(root, None)?),
        None => Driver::find(&file.paths.driver_root, None).ok(),
    };
    node.gpus = if gpus.is_empty() {
        let inventory = Inventory::load(&file.paths.inventory()).ok();
        let of = |inventory: &Inventory| {
            inventory.gpus.iter().filter_map(|gpu| node::capability(inventory, gpu)).collect()
        };
        inventory.as_ref().map(of).unwrap_or_default()
    } else {
        gpus.iter().copied().collect()
    };
    Ok(node)
}

/// A compute capability such as 8.0, as 80.
fn capability(text: &str) -> Result<u32, String> {
    let parse = || {
        let (major, minor) = text.split_once('.')?;
        Some(
            major.parse::<u32>().ok().filter(|major| *major < 100)? * 10
                + minor.parse::<u32>().ok().filter(|minor| *minor < 10)?,
        )
    };
    parse().ok_or_else(|| "it must be like 8.0 or 12.0".to_owned())
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

fn output<T: Serialize>(what: &T, format: Output, text: impl FnOnce(&T) -> String) -> Result<()> {
    let mut out = io::stdout().lock();
    match format {
        Output::Json => {
            serde_json::to_writer_pretty(&mut out, what)?;
            writeln!(out)?;
        }
        Output::Text => out.write_all(text(what).as_bytes())?,
    }
    Ok(())
}

/// Reports as text for people.
mod print {
    use super::{Finding, Node, Path, Report, Row, Severity, Verdict};
    use oci_hooks::{node::NodeReport, verdicts::Seen};

    pub(super) fn image(report: &Report) -> String {
        let driver = driver(report.driver.as_deref(), report.driver_cuda.as_deref());
        let runtimes = if report.runtimes.is_empty() { "none".into() } else { report.runtimes.join(", ") };
        let mut text = format!(
            "{}: {}\nagainst {driver}, a shim for glibc {} and newer; CUDA runtimes in it: {runtimes}\n\
             {} files seen, {} programs and libraries, {} MiB\n",
            report.subject,
            word(report.verdict),
            report.shim_glibc,
            report.files,
            report.elf,
            report.bytes >> 20
        );
        if let Some(incomplete) = &report.incomplete {
            text.push_str(&format!("not seen whole: {incomplete}\n"));
        }
        text + &findings(&report.findings)
    }

    pub(super) fn node(report: &NodeReport) -> String {
        let driver = driver(report.driver.as_deref(), report.driver_cuda.as_deref());
        let containerd = report.containerd.as_deref().unwrap_or("unknown");
        format!(
            "this node: {}\n{driver}, {} GPUs on offer, containerd {containerd}\n{}",
            word(report.verdict),
            report.gpus,
            findings(&report.findings)
        )
    }

    pub(super) fn matrix(rows: &[Row], nodes: &[Node]) -> String {
        let mut text = String::new();
        for row in rows {
            text.push_str(&format!("{}\n", row.subject));
            if let Some(error) = &row.error {
                text.push_str(&format!("  could not be told: {error}\n"));
            }
            for (node, report) in nodes.iter().zip(&row.reports) {
                let driver = node.driver.as_ref().map_or("no driver", |driver| &driver.version);
                let ids: Vec<&str> = report
                    .findings
                    .iter()
                    .filter(|finding| finding.severity > Severity::Info)
                    .map(|finding| finding.id)
                    .collect();
                text.push_str(&format!("  {driver:<16}  {:<17}  {}\n", word(report.verdict), ids.join(", ")));
            }
        }
        text
    }

    pub(super) fn seen(seen: &[Seen]) -> String {
        let line = |seen: &Seen| {
            let started = if seen.started { "started" } else { "refused" };
            format!(
                "{}\n  {:<17}  {started}, {} times, last for pod {}  {}\n",
                seen.image,
                word(seen.verdict),
                seen.starts,
                seen.pod,
                seen.findings.join(", ")
            )
        };
        if seen.is_empty() {
            "no image with a share was seen\n".into()
        } else {
            seen.iter().map(line).collect()
        }
    }

    fn word(verdict: Verdict) -> &'static str {
        match verdict {
            Verdict::Fits => "fits",
            Verdict::DoesNotFit => "does not fit",
            Verdict::Unknown => "could not be told",
        }
    }

    fn driver(version: Option<&str>, cuda: Option<&str>) -> String {
        match (version, cuda) {
            (Some(version), Some(cuda)) => format!("driver {version} (CUDA {cuda})"),
            _ => "no driver known".into(),
        }
    }

    fn findings(findings: &[Finding]) -> String {
        let mut text = String::new();
        for finding in findings {
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
}
