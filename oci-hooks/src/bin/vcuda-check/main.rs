//! `vcuda-check`: whether an image, or a node, is fit for GPU shares, said before a pod finds out. It reads files
//! and executes nothing of them. For people as text, for pipelines as JSON; the exit code says it too.

#![forbid(unsafe_code)]

mod arguments;
mod print;
mod progress;

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, bail};
use arguments::{Cli, Containerd, Output, What};
use clap::Parser;
use ledger::{Inventory, ShareState, Shares};
use oci_hooks::{
    compat::{
        archive,
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
use progress::progress;
use serde::Serialize;
use vcuda_config::{Exit, NodeFile, in_one_line};

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli.what) {
        Ok(Verdict::Fits) => Exit::Done.into(),
        Ok(Verdict::DoesNotFit) => Exit::No.into(),
        Ok(Verdict::Unknown) => Exit::Usage.into(),
        Err(error) => {
            eprintln!("vcuda-check: {}", in_one_line(error.as_ref()));
            Exit::Usage.into()
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
        What::Node { containerd, containerd_config, driver, common } => {
            let mut file = common.load()?;
            if let Some(driver) = driver {
                file.paths.driver_root.clone_from(driver);
            }
            let report = node::check(&file, containerd, containerd_config.as_deref());
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
    if file.is_dir() {
        bail!("{} is a folder; check an unpacked image with `vcuda-check rootfs`", file.display());
    }
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
        let text = std::fs::read_to_string(list).with_context(|| {
            format!(
                "--list {}: cannot be read; name a file with one root folder or image file a line",
                list.display()
            )
        })?;
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
    let report = |survey: &Survey, node| {
        check::remembered(survey, seen.image.clone(), seen.program.as_deref(), refused.clone(), node)
    };
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
        Err(error) => Row { subject, reports: Vec::new(), error: Some(in_one_line(error.as_ref())) },
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
