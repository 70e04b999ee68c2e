//! The image in the guard's eyes: what is started, and all that the image has, against the shim and the driver that
//! the container gets. An image that the node has seen is known by its layers; another one is gone through once.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    time::Duration,
};

use region::place;

use super::{Command, Finding, Rootfs, Severity};
use crate::{
    compat::{
        check::{Limits, Unseen},
        cuda::{Covered, Driver},
        elf::{Depth, Elf},
        files::{Facts, Trouble, host_file},
        start::{self, Shim},
        survey::Against,
    },
    scans::{self, Grounds, Scans, Stamp},
};

/// How long an image may keep its container from starting, the first time. One that takes longer starts with a
/// warning, and is looked at anew the next time.
const LIMITS: Limits = Limits { files: 2_000_000, time: Duration::from_secs(2) };

/// What was found in an image.
#[derive(Clone, Debug)]
pub struct Looked {
    /// What refuses or warns, the worst first.
    pub findings: Vec<Finding>,
    /// The image's layers by name, where they are known to be what the container has.
    pub layers: Option<String>,
    /// The program that is started, where it was found.
    pub started: Option<PathBuf>,
}

/// Looks at the image at `rootfs`, from which `command` is to be started under the shim in the file `shim`, with a
/// driver of this version and GPUs of these compute capabilities.
///
/// # Errors
/// A file that decides cannot be read.
pub fn look(
    scans: &Scans,
    rootfs: &Rootfs,
    command: &Command,
    shim: &Path,
    version: &str,
    gpus: &BTreeSet<u32>,
) -> Result<Looked, Trouble> {
    let needs = match host_shim(shim, Depth::Linking)?.elf() {
        Some(elf) => Shim::of(elf),
        None => return Err(Trouble("the shim is no library; install vcuda on this node again".into())),
    };
    let mut findings = start::judge(rootfs, command, needs)?;
    let layers = scans.layers(rootfs);
    let started = start::started(rootfs, command);
    let grounds = match &layers {
        Some(layers) => Some(Grounds {
            version: scans::VERSION,
            layers: layers.clone(),
            shim: host_stamp(shim)?,
            driver: [stamp(rootfs, place::REAL_CUDA)?, stamp(rootfs, place::REAL_NVML)?],
            gpus: gpus.clone(),
            started: started.clone(),
            driver_version: version.into(),
        }),
        None => None,
    };
    if let Some(known) = grounds.as_ref().and_then(|grounds| scans.judgement(grounds)) {
        findings.extend(known);
    } else {
        let scanned = scans.survey_of(rootfs, layers.clone(), LIMITS, &mut |_| {})?;
        match scanned.unseen {
            Unseen::None => {
                let has_cuda = scanned.survey.has_cuda();
                // A driver or a file that cannot be read now may be another time: that verdict is of today only.
                let (driver, lasts) = if has_cuda { driver(rootfs, version) } else { (None, true) };
                let against = Against {
                    driver: driver.as_ref(),
                    covered: &Covered::of(&host_shim(shim, Depth::Symbols)?),
                    machine: needs.machine,
                    started: started.as_deref(),
                    gpus,
                };
                let mut found = scanned.survey.judge(against);
                found.retain(|finding| finding.severity > Severity::Info);
                findings.extend_from_slice(&found);
                if let Some(grounds) = grounds.filter(|_| lasts && scanned.survey.is_whole()) {
                    // A full disk costs the next look its time, no more.
                    let _ = scans.note_judgement(grounds, found);
                }
            }
            // From a part of an image nothing can be said of its runtimes: another part may have what is missing.
            Unseen::Some(reason) | Unseen::Most(reason) => findings.push(
                Finding::warn(
                    "image-unseen",
                    format!("the image was not looked at whole: {reason}"),
                    "whether its CUDA runtimes fit this node's driver is left open",
                    "check it with `vcuda-check image` before it is rolled out",
                )
                .at(Path::new("/")),
            ),
        }
    }
    findings.retain(|finding| finding.severity > Severity::Info);
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    Ok(Looked { findings, layers: layers.map(|layers| layers.id()), started })
}

/// The node's own shim.
fn host_shim(path: &Path, depth: Depth) -> Result<Facts, Trouble> {
    host_file(path, depth).map_err(|Trouble(reason)| {
        Trouble(format!("the shim cannot be read: {reason}; install vcuda on this node again"))
    })
}

fn host_stamp(path: &Path) -> Result<Stamp, Trouble> {
    let stat = rustix::fs::stat(path);
    stat.map(|stat| Stamp::of(&stat)).map_err(|error| Trouble(format!("{}: {error}", path.display())))
}

fn stamp(rootfs: &Rootfs, path: &str) -> Result<Option<Stamp>, Trouble> {
    Ok(rootfs.stat(Path::new(path))?.map(|stat| Stamp::of(&stat)))
}

/// The driver that the container gets: its real libraries, where they are mounted for the shim. And whether all of it that
/// is there could be read.
fn driver(rootfs: &Rootfs, version: &str) -> (Option<Driver>, bool) {
    let library = |path: &str| match rootfs.file(Path::new(path)) {
        Ok(Some(file)) => Elf::read(&file, Depth::Symbols).map(Some).map_err(|_| ()),
        Ok(None) => Ok(None),
        Err(_) => Err(()),
    };
    let (cuda, nvml) = (library(place::REAL_CUDA), library(place::REAL_NVML));
    let whole = cuda.is_ok() && nvml.is_ok();
    let of = |cuda| Driver::of(version.to_owned(), cuda, nvml.ok().flatten());
    (cuda.ok().flatten().map(of), whole)
}
