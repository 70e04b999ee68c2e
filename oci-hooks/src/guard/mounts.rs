//! What enforces a share is mounted where it works: each place in the container is the very file of the node, not
//! one that the image or a volume put there, and those that a container must not change are read-only.

use std::{
    fmt,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use ledger::{Driver, ShareFolder};
use region::place;
use rustix::fs::{StatVfsMountFlags, fstatvfs};
use vcuda_config::Paths;

use crate::rootfs::Rootfs;

/// A place in the container and the file of the node that must be mounted there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    what: &'static str,
    host: PathBuf,
    place: PathBuf,
    writable: bool,
}

/// A mount that is not as it must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    what: &'static str,
    host: PathBuf,
    place: PathBuf,
    /// What is wrong.
    pub flaw: Flaw,
}

/// What is wrong with a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// The node's own file cannot be read.
    NoHostFile(String),
    /// Nothing is there.
    Nothing,
    /// Another file is there.
    AnotherFile,
    /// The container could write it.
    Writable,
    /// The container could not write it.
    ReadOnly,
    /// What is there cannot be looked at.
    Unreadable(String),
}

/// Everything that must be mounted for a share.
pub fn expected(paths: &Paths, driver: &Driver, folder: &ShareFolder) -> Vec<Mount> {
    let read_only =
        |what, host: PathBuf, place: &Path| Mount { what, host, place: place.into(), writable: false };
    let library = |name: &str| driver.library_dir.join(format!("{name}.so.{}", driver.version));
    vec![
        read_only("the shim", paths.shim(), Path::new(place::SHIM)),
        read_only("the shim in libcuda's place", paths.shim(), &library("libcuda")),
        read_only("the shim in NVML's place", paths.shim(), &library("libnvidia-ml")),
        read_only("its limits", folder.limits(), Path::new(place::LIMITS)),
        read_only("the list of preloaded libraries", folder.preload(), Path::new(place::LD_SO_PRELOAD)),
        Mount { what: "its usage", host: folder.usage(), place: place::USAGE.into(), writable: true },
    ]
}

impl Mount {
    /// Sees that the place in the container is the node's file.
    pub fn verify(&self, rootfs: &Rootfs) -> Result<(), Mounted> {
        let flawed =
            |flaw| Mounted { what: self.what, host: self.host.clone(), place: self.place.clone(), flaw };
        let host =
            std::fs::metadata(&self.host).map_err(|error| flawed(Flaw::NoHostFile(error.to_string())))?;
        let file = rootfs
            .file(&self.place)
            .map_err(|error| flawed(Flaw::Unreadable(error.to_string())))?
            .ok_or_else(|| flawed(Flaw::Nothing))?;
        let unreadable = |error: std::io::Error| flawed(Flaw::Unreadable(error.to_string()));
        let inside = file.metadata().map_err(unreadable)?;
        if (inside.dev(), inside.ino()) != (host.dev(), host.ino()) {
            return Err(flawed(Flaw::AnotherFile));
        }
        let flags = fstatvfs(&file).map_err(|error| unreadable(error.into()))?.f_flag;
        match (flags.contains(StatVfsMountFlags::RDONLY), self.writable) {
            (true, true) => Err(flawed(Flaw::ReadOnly)),
            (false, false) => Err(flawed(Flaw::Writable)),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Mounted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, host, place, flaw } = self;
        let (host, place) = (host.display(), place.display());
        let rebind = "see that vcuda-nri-plugin of this version runs on this node, then delete the pod";
        match flaw {
            Flaw::NoHostFile(reason) => {
                write!(f, "{what} cannot be verified: {host}: {reason}; {rebind}")
            }
            Flaw::Nothing => {
                write!(f, "{what} is not mounted at {place}, so the share would not hold; {rebind}")
            }
            Flaw::AnotherFile => write!(
                f,
                "{what} is not what is at {place}, so the share would not hold; remove volumes from the pod that are mounted there, else {rebind}"
            ),
            Flaw::Writable => {
                write!(
                    f,
                    "{what} at {place} is not read-only, so the container could lift its limits; {rebind}"
                )
            }
            Flaw::ReadOnly => {
                write!(f, "{what} at {place} is read-only, so no CUDA program in it could start; {rebind}")
            }
            Flaw::Unreadable(reason) => write!(f, "{what} at {place} cannot be verified: {reason}; {rebind}"),
        }
    }
}
