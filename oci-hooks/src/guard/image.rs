//! The image in the guard's eyes: what is started, and all that the image has, against the shim and the driver that
//! the container gets. An image that the node has seen is known by its layers; another one is gone through once.

use std::{collections::BTreeSet, path::Path, time::Duration};

use region::place;

use super::{Command, Finding, Rootfs, Severity};
use crate::{
    compat::{
        check::{Limits, Unseen},
        cuda::{Covered, Driver},
        elf::{Depth, Elf},
        files::{Facts, Trouble},
        start::{self, Shim},
        survey::Against,
    },
    scans::Scans,
};

/// How long an image may keep its container from starting, the first time. One that takes longer starts with a
/// warning, and is looked at anew the next time.
const LIMITS: Limits = Limits { files: 2_000_000, time: Duration::from_secs(2) };

/// What was found in an image.
pub(super) struct Looked {
    /// What refuses or warns, the worst first.
    pub findings: Vec<Finding>,
    /// The image's layers by name, where they are known to be what the container has.
    pub layers: Option<String>,
}

/// Looks at the image at `rootfs`, from which `command` is to be started under the shim whose file says `shim`, with a
/// driver of this version and GPUs of these compute capabilities.
pub(super) fn look(
    scans: &Scans,
    rootfs: &Rootfs,
    command: &Command,
    shim: &Facts,
    version: &str,
    gpus: &BTreeSet<u32>,
) -> Result<Looked, Trouble> {
    let Some(elf) = shim.elf() else { return Err(Trouble("the shim is no library".into())) };
    let needs = Shim::of(elf);
    let mut findings = start::judge(rootfs, command, needs)?;
    let scanned = scans.survey(rootfs, LIMITS, &mut |_| {})?;
    match scanned.unseen {
        Unseen::None => {
            let driver = if scanned.survey.has_cuda() { driver(rootfs, version) } else { None };
            let started = start::started(rootfs, command);
            let against = Against {
                driver: driver.as_ref(),
                covered: &Covered::of(shim),
                machine: needs.machine,
                started: started.as_deref(),
                gpus,
            };
            findings.extend(scanned.survey.judge(against));
        }
        // From a part of an image nothing can be said of its runtimes: another part may have what is missing.
        Unseen::Some(reason) | Unseen::Most(reason) => findings.push(Finding::warn(
            "image-unseen",
            format!("the image was not looked at whole: {reason}"),
            "whether its CUDA runtimes fit this node's driver is left open",
            "check it with `vcuda-check image` before it is rolled out",
        )),
    }
    findings.retain(|finding| finding.severity > Severity::Info);
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    Ok(Looked { findings, layers: scanned.layers.map(|layers| layers.id()) })
}

/// The driver that the container gets: its real libraries, where they are mounted for the shim.
fn driver(rootfs: &Rootfs, version: &str) -> Option<Driver> {
    let library = |path: &str| Elf::read(&rootfs.file(Path::new(path)).ok()??, Depth::Symbols).ok();
    Some(Driver::of(version.to_owned(), library(place::REAL_CUDA)?, library(place::REAL_NVML)))
}
