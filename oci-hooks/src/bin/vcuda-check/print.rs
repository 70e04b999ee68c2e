//! Reports as text, for people.

use std::path::Path;

use oci_hooks::{
    compat::{
        Finding, Severity,
        check::{Node, Report, Verdict},
    },
    node::NodeReport,
    verdicts::Seen,
};

use super::Row;

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
    if rows.is_empty() {
        return "nothing to check was found\n".into();
    }
    let mut text = String::new();
    for row in rows {
        text.push_str(&format!("{}\n", row.subject));
        if let Some(error) = &row.error {
            text.push_str(&format!("  could not be told: {error}\n"));
        }
        for (node, report) in nodes.iter().zip(&row.reports) {
            let driver = node.driver.as_ref().map_or("no driver", |driver| &driver.version);
            let loud = || report.findings.iter().filter(|finding| finding.severity > Severity::Info);
            let mut ids: Vec<&str> = loud().map(|finding| &*finding.id).collect();
            ids.dedup();
            text.push_str(&format!("  {driver:<16}  {:<17}  {}\n", word(report.verdict), ids.join(", ")));
            for finding in loud().filter(|finding| finding.severity == Severity::Refuse) {
                text.push_str(&format!("    {}\n", finding.sentence()));
            }
            if let Some(incomplete) = &report.incomplete {
                text.push_str(&format!("    not seen whole: {incomplete}\n"));
            }
        }
    }
    text
}

pub(super) fn seen(seen: &[Seen]) -> String {
    let line = |seen: &Seen| {
        let started = if seen.started { "started" } else { "refused" };
        let times = if seen.starts == 1 { "once".into() } else { format!("{} times", seen.starts) };
        let reason = seen.reason.as_deref().map(|reason| format!("    {reason}\n")).unwrap_or_default();
        format!(
            "{}\n  {:<17}  {started} {times}, last for pod {}  {}\n{reason}",
            seen.image,
            word(seen.verdict),
            seen.pod,
            seen.findings.join(", ")
        )
    };
    if seen.is_empty() { "no image with a share was seen\n".into() } else { seen.iter().map(line).collect() }
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
