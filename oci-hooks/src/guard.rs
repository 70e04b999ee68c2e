//! The guard: the last look before a container with a share starts. It runs as an OCI `createContainer` hook, in
//! the container's mount namespace, with the pod's volumes in place and the host's files still in sight. The container
//! starts only if the share that it claims is bound to it in the ledger and the image can run under the shim (design: D2,
//! I2). What the claim says is looked up, never believed. The guard mounts the shim and its files itself, and looks whether
//! they are where they work; `/etc/ld.so.preload` it completes with what the image had there.
//!
//! It says one sentence on refusal: thing, reason, remedy. The runtime carries it into the pod's events. It knows
//! neither NRI nor kubelet nor how the hook is called.

mod floor;
pub mod image;
mod mounts;
mod preload;

use std::{io, path::PathBuf, time::Duration};

use ledger::{Inventory, RecordError, ShareFolder, ShareKind, ShareName, ShareRecord};
use region::Limits;
use thiserror::Error;
use vcuda_config::{ImagePolicy, MemoryFloor, Paths, Policy, annotation};

use crate::{
    compat::{Finding, Severity, files::Trouble, start::Command},
    node::capability,
    rootfs::Rootfs,
    scans::Scans,
    verdicts,
};

pub use floor::FloorError;
pub use mounts::{DriverFile, Flaw, Mounted};
pub use preload::PreloadError;

/// A look takes a few milliseconds. Past this something is wrong with the node's disk (a read can hang in the kernel, on
/// a volume whose server is gone), and a container that hangs in creation tells its owner less than one that says so:
/// whoever calls [`run`] ends with [`Refusal::Timeout`] then.
pub const TIME_LIMIT: Duration = Duration::from_secs(5);

/// What the runtime says about the container that is to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    /// ID in the runtime.
    pub id: String,
    /// What it is called in a refusal, before a record says whose it is.
    pub name: String,
    /// The share that it claims: its annotation [`annotation::SHARE`].
    pub share: Option<String>,
    /// What it starts.
    pub command: Command,
    /// Name of its image, where the runtime tells.
    pub image: Option<String>,
    /// SELinux context of what is mounted for it, where the node has such.
    pub mount_label: Option<String>,
}

/// Why a container does not start.
#[derive(Debug, Error)]
pub enum Refusal {
    /// It claims no share, so nobody has bound one.
    #[error(
        "{name}: its GPU share was not bound, the annotation {key} is missing; see that vcuda-nri-plugin runs on this node and that NRI is on in containerd's configuration (io.containerd.nri.v1.nri: disable = false), then delete the pod",
        key = annotation::SHARE
    )]
    Unbound {
        /// What the container is called.
        name: String,
    },
    /// What it claims is no share's name.
    #[error("{name}: the annotation {key} must not be set by hand: {reason}; remove it from the pod", key = annotation::SHARE)]
    BadClaim {
        /// What the container is called.
        name: String,
        /// What is wrong.
        reason: ledger::ShareNameError,
    },
    /// The hook is in a user namespace and cannot see the node's files.
    #[error(
        "{name}: it runs in a user namespace, from which its GPU share cannot be verified; set hostUsers: true in the pod"
    )]
    UserNamespace {
        /// What the container is called.
        name: String,
    },
    /// There is no such record.
    #[error(
        "{name}: there is no record of share {share}; vcuda-nri-plugin writes it, see whether it runs on this node, then delete the pod"
    )]
    NoRecord {
        /// What the container is called.
        name: String,
        /// The share that it claims.
        share: ShareName,
    },
    /// The record cannot be used.
    #[error("{name}: the record of its share: {reason}; delete the pod, it will be bound anew")]
    BadRecord {
        /// What the container is called.
        name: String,
        /// Why.
        reason: RecordError,
    },
    /// The record is about another container.
    #[error(
        "{name}: share {share} is bound to container {bound}, not to this one; remove the annotation {key} from the pod if it is set there, else delete the pod",
        key = annotation::SHARE
    )]
    BoundToAnother {
        /// What the container is called.
        name: String,
        /// The share that it claims.
        share: ShareName,
        /// Whose it is.
        bound: String,
    },
    /// The record is from before the machine was started.
    #[error(
        "{name}: share {share} was bound before this node's last start; see that vcuda-nri-plugin runs, then delete the pod"
    )]
    BoundBeforeBoot {
        /// What the container is called.
        name: String,
        /// The share that it claims.
        share: ShareName,
    },
    /// Something that enforces the share is not where it works.
    #[error("{who}: {mounted}")]
    Mount {
        /// The pod and its container.
        who: Who,
        /// What is wrong.
        mounted: Box<Mounted>,
    },
    /// The limits cannot be used.
    #[error("{who}: {path}: {reason}; delete the pod, its limits will be written anew")]
    Limits {
        /// The pod and its container.
        who: Who,
        /// The file on the node.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The image cannot run under the shim.
    #[error("{who}: {}", .finding.sentence())]
    Unfit {
        /// The pod and its container.
        who: Who,
        /// The worst finding.
        finding: Box<Finding>,
    },
    /// The image's `/etc/ld.so.preload` cannot be kept.
    #[error("{who}: {reason}")]
    Preload {
        /// The pod and its container.
        who: Who,
        /// Why.
        reason: Box<PreloadError>,
    },
    /// The driver does not hold it, and must.
    #[error("{who}: {reason}")]
    Floor {
        /// The pod and its container.
        who: Who,
        /// Why.
        reason: FloorError,
    },
    /// Something of the node cannot be read.
    #[error("{who}: {reason}")]
    Node {
        /// The pod and its container.
        who: Who,
        /// What and why.
        reason: String,
    },
    /// It took too long.
    #[error(
        "{name}: verifying its GPU share took more than {} s; look at the load and the disks of this node, the pod is tried again",
        TIME_LIMIT.as_secs()
    )]
    Timeout {
        /// What the container is called.
        name: String,
    },
}

/// The pod and its container, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Who {
    namespace: String,
    pod: String,
    container: String,
}

impl Who {
    fn of(record: &ShareRecord) -> Self {
        Self {
            namespace: record.pod.namespace.clone(),
            pod: record.pod.name.clone(),
            container: record.container.name.clone(),
        }
    }
}

impl std::fmt::Display for Who {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "pod {}/{}, container {}", self.namespace, self.pod, self.container)
    }
}

/// Mounts what holds `container` to its share in its root at `rootfs`, and the driver's files, and decides whether it may start.
/// `paths` and `files` are the node's; `images` says what becomes of an image that does not fit, `floor` who else must hold its memory. What it
/// found and let pass is returned.
///
/// # Errors
/// Why it may not start.
pub fn run(
    paths: &Paths,
    images: &ImagePolicy,
    floor: MemoryFloor,
    files: &[DriverFile],
    container: &Container,
    rootfs: &Rootfs,
) -> Result<Vec<Finding>, Refusal> {
    let (name, record) = record(paths, container)?;
    match record.kind {
        // The driver's own libraries, all of the GPU, no limits: nothing of ours is in the container.
        ShareKind::Whole => Ok(Vec::new()),
        ShareKind::Share => {
            let folder = ShareFolder::new(&paths.shares(), &name);
            let inventory = Inventory::load(&paths.inventory())
                .map_err(|error| Refusal::Node { who: Who::of(&record), reason: error.to_string() })?;
            let preload = |reason| Refusal::Preload { who: Who::of(&record), reason: Box::new(reason) };
            let list = preload::compose(rootfs).map_err(preload)?;
            let mounts = mounts::expected(paths, &inventory.driver, files, &folder);
            mount(&mounts, container, rootfs, &record)?;
            verify_limits(&record, &folder)?;
            let findings = verify_image(paths, images, container, rootfs, &record, &folder, &inventory)?;
            floor::hold(paths, floor, &name, &inventory.driver.version)
                .map_err(|reason| Refusal::Floor { who: Who::of(&record), reason })?;
            preload::write(&list, &folder).map_err(preload)?;
            Ok(findings)
        }
    }
}

/// The record of the share that the container claims, if it is this container's.
fn record(paths: &Paths, container: &Container) -> Result<(ShareName, ShareRecord), Refusal> {
    let name = || container.name.clone();
    let Some(claim) = &container.share else {
        return Err(Refusal::Unbound { name: name() });
    };
    let share: ShareName = claim.parse().map_err(|reason| Refusal::BadClaim { name: name(), reason })?;
    let record = ShareRecord::load(&paths.shares(), &share).map_err(|reason| match &reason {
        RecordError::Read { .. } if in_user_namespace() => Refusal::UserNamespace { name: name() },
        RecordError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => {
            Refusal::NoRecord { name: name(), share: share.clone() }
        }
        _ => Refusal::BadRecord { name: name(), reason },
    })?;
    if record.container.id != container.id {
        return Err(Refusal::BoundToAnother { name: name(), share, bound: record.container.id });
    }
    let boot = ledger::boot_id().map_err(|error| Refusal::Node {
        who: Who::of(&record),
        reason: format!("the node's boot ID cannot be read: {error}; see that /proc is mounted"),
    })?;
    if record.boot_id != boot {
        return Err(Refusal::BoundBeforeBoot { name: name(), share });
    }
    Ok((share, record))
}

/// Mounts all that enforces the share, and sees that it is where it works: an image whose links lead from one of the places
/// to another has one mount over the other.
fn mount(
    mounts: &[mounts::Mount],
    container: &Container,
    rootfs: &Rootfs,
    record: &ShareRecord,
) -> Result<(), Refusal> {
    let refuse = |mounted| Refusal::Mount { who: Who::of(record), mounted };
    mounts::make(mounts, rootfs, container.mount_label.as_deref()).map_err(refuse)?;
    mounts.iter().try_for_each(|mount| mount.verify(rootfs).map_err(|mounted| refuse(Box::new(mounted))))
}

/// The image can run under the shim, or the node says that this is no matter.
fn verify_image(
    paths: &Paths,
    images: &ImagePolicy,
    container: &Container,
    rootfs: &Rootfs,
    record: &ShareRecord,
    folder: &ShareFolder,
    inventory: &Inventory,
) -> Result<Vec<Finding>, Refusal> {
    // Of an earlier start of this container.
    verdicts::forget_warning(folder);
    let policy = images.of(&record.pod.namespace);
    if policy == Policy::Off {
        return Ok(Vec::new());
    }
    let node = |reason: String| Refusal::Node { who: Who::of(record), reason };
    let scans = Scans::below(&paths.state);
    let bound = inventory.gpus.iter().filter(|gpu| record.gpus.iter().any(|bound| bound.uuid == gpu.uuid));
    let gpus = bound.filter_map(|gpu| capability(inventory, gpu)).collect();
    let looked =
        image::look(&scans, rootfs, &container.command, &paths.shim(), &inventory.driver.version, &gpus).map_err(|Trouble(reason)| {
            node(format!(
                "whether its image can run under a GPU share cannot be told: {reason}; check the image and its volumes"
            ))
        })?;
    let findings = looked.findings;
    let worst = findings.iter().find(|finding| finding.severity == Severity::Refuse);
    let refused = worst.filter(|_| policy == Policy::Enforce);
    // What follows is memory only: a full disk is no reason to keep a container from starting.
    if let Some(image) = &container.image {
        let pod = format!("{}/{}", record.pod.namespace, record.pod.name);
        let looked = verdicts::Looked { image, layers: looked.layers, program: looked.started, pod };
        let _ = verdicts::remember(&paths.state, looked, &findings, refused.is_none());
    }
    if refused.is_none()
        && let Some(finding) = worst
    {
        let _ = verdicts::warn(folder, &container.id, finding);
    }
    match refused {
        Some(finding) => Err(Refusal::Unfit { who: Who::of(record), finding: Box::new(finding.clone()) }),
        None => Ok(findings),
    }
}

/// The limits are those of the record: the shim will enforce them and nothing else.
fn verify_limits(record: &ShareRecord, folder: &ShareFolder) -> Result<(), Refusal> {
    let path = folder.limits();
    let refuse = |reason: String| Refusal::Limits { who: Who::of(record), path: path.clone(), reason };
    let limits = Limits::open(&path).map_err(|error| refuse(error.to_string()))?;
    if limits.gpu_count() != record.gpus.len() {
        return Err(refuse(format!(
            "it limits {} GPUs, the share has {}",
            limits.gpu_count(),
            record.gpus.len()
        )));
    }
    for gpu in &record.gpus {
        let limit = limits.find(&gpu.uuid.bytes()).and_then(|at| limits.get(at));
        match limit {
            None => return Err(refuse(format!("it has no limit for {}", gpu.uuid))),
            Some(limit) if limit.memory_bytes == 0 || limit.core_percent == 0 => {
                return Err(refuse(format!("it leaves nothing of {}", gpu.uuid)));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// Whether this process's root is another user outside: then the node's root-only files are out of reach.
fn in_user_namespace() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_ascii_whitespace().collect::<Vec<_>>() != ["0", "0", "4294967295"]
}

#[cfg(test)]
#[path = "guard/tests.rs"]
mod tests;
