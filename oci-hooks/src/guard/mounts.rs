//! Mounts what enforces a share where it works, and then looks whether it is there: each place in the container is the very
//! file of the node, not one that the image or a volume put there, and those that a container must not change are
//! read-only. The driver's other files are mounted too. All of it here and not by the runtime, which takes ten times as long
//! for each.

use std::{
    fmt,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Component, Path, PathBuf},
    str::FromStr,
};

use ledger::{Driver, ShareFolder};
use region::place;
use rustix::fs::{StatVfsMountFlags, fstatvfs};
use thiserror::Error;
use vcuda_config::Paths;

use crate::rootfs::{Access, Rootfs};

/// A file of the driver that a container with a share gets: behind the shim where its place is below [`place::FOLDER`], else
/// one that the driver needs beside it. Read-only, but for sockets, which are there to be spoken to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFile {
    /// Where it is on the node.
    pub host: PathBuf,
    /// Where the container finds it.
    pub place: PathBuf,
}

/// Why a text names no file of the driver.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is no HOST::PATH of two absolute paths, of which PATH is without '..' and names a file")]
pub struct DriverFileError(String);

impl FromStr for DriverFile {
    type Err = DriverFileError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || DriverFileError(text.into());
        let (host, place) = text.split_once("::").ok_or_else(bad)?;
        let (host, place) = (Path::new(host), Path::new(place));
        let below = place.strip_prefix("/").map_err(|_| bad())?;
        let plain = below.components().all(|part| matches!(part, Component::Normal(_)));
        let is_folder = below.as_os_str().is_empty() || place == Path::new(place::FOLDER);
        if !host.is_absolute() || is_folder || !plain {
            return Err(bad());
        }
        Ok(Self { host: host.into(), place: place.into() })
    }
}

/// A place in the container and the file of the node that must be mounted there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    what: &'static str,
    host: PathBuf,
    place: PathBuf,
    writable: bool,
    /// Whether the share hangs on it.
    enforces: bool,
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
    /// It cannot be mounted.
    Refused(String),
}

/// Everything that must be mounted for a share, the driver's other files first: nothing of them can be over what enforces it.
pub fn expected(paths: &Paths, driver: &Driver, files: &[DriverFile], folder: &ShareFolder) -> Vec<Mount> {
    let read_only = |what, host: PathBuf, place: &Path| Mount {
        what,
        host,
        place: place.into(),
        writable: false,
        enforces: true,
    };
    let library = |name: &str| driver.library_dir.join(format!("{name}.so.{}", driver.version));
    let (behind, beside): (Vec<_>, Vec<_>) =
        files.iter().partition(|file| file.place.starts_with(place::FOLDER));
    let beside = beside.into_iter().map(|file| Mount {
        what: "the driver's file",
        host: file.host.clone(),
        place: file.place.clone(),
        writable: std::fs::metadata(&file.host).is_ok_and(|file| file.file_type().is_socket()),
        enforces: false,
    });
    let mut all: Vec<_> = beside.collect();
    all.extend([
        read_only("the shim", paths.shim(), Path::new(place::SHIM)),
        // The same file where the driver's own libraries are looked up: the loader knows it by its inode and loads it
        // once.
        read_only("the shim in libcuda's place", paths.shim(), &library("libcuda")),
        read_only("the shim in NVML's place", paths.shim(), &library("libnvidia-ml")),
        read_only("its limits", folder.limits(), Path::new(place::LIMITS)),
        read_only("the list of preloaded libraries", folder.preload(), Path::new(place::LD_SO_PRELOAD)),
        Mount { writable: true, ..read_only("its usage", folder.usage(), Path::new(place::USAGE)) },
    ]);
    all.extend(behind.iter().map(|file| read_only("the driver's library", file.host.clone(), &file.place)));
    all
}

/// Mounts all of `mounts`, those of [`place::FOLDER`] in a file system of its own, which the container cannot change.
///
/// # Errors
/// The first that cannot be.
pub fn make(mounts: &[Mount], rootfs: &Rootfs, label: Option<&str>) -> Result<(), Box<Mounted>> {
    let folder = Path::new(place::FOLDER);
    let of_folder = |reason: String| {
        let (host, place) = ("tmpfs".into(), folder.into());
        Box::new(Mounted { what: "vcuda's folder", host, place, flaw: Flaw::Refused(reason) })
    };
    let room = rootfs.mount_room(folder, label).map_err(|error| of_folder(error.to_string()))?;
    for mount in mounts {
        let access = if mount.writable { Access::Writable } else { Access::ReadOnly };
        rootfs.mount_file(&mount.host, &mount.place, access).map_err(|error| {
            let missing = std::fs::metadata(&mount.host).err();
            let flaw = missing.map(|reason| Flaw::NoHostFile(reason.to_string()));
            Box::new(mount.flawed(flaw.unwrap_or_else(|| Flaw::Refused(error.to_string()))))
        })?;
    }
    room.seal().map_err(|error| of_folder(format!("it cannot be made read-only: {error}")))
}

impl Mount {
    fn flawed(&self, flaw: Flaw) -> Mounted {
        Mounted { what: self.what, host: self.host.clone(), place: self.place.clone(), flaw }
    }

    /// Sees that the place in the container is the node's file, where the share hangs on it.
    pub fn verify(&self, rootfs: &Rootfs) -> Result<(), Mounted> {
        if !self.enforces {
            return Ok(());
        }
        let flawed = |flaw| self.flawed(flaw);
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
        let rebind = "see that all parts of vcuda on this node are of one version, then delete the pod";
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
            Flaw::Refused(reason) => write!(
                f,
                "{what} ({host}) cannot be mounted: {reason}; remove from the image or the pod's volumes what is in the way, else {rebind}"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_at_a_plain_path_is_taken() {
        let file: DriverFile =
            "/usr/lib/libcuda.so.550.1::/usr/local/vcuda/driver/libcuda.so.1".parse().unwrap();
        assert_eq!(file.host, Path::new("/usr/lib/libcuda.so.550.1"));
        assert_eq!(file.place, Path::new(place::REAL_CUDA));
        assert!("/a::/usr/bin/nvidia-smi".parse::<DriverFile>().is_ok());
        for text in [
            "",
            "/a",
            "/a::b",
            "/a::/",
            "a::/usr/bin/b",
            "/a::/usr/local/vcuda",
            "/a::/usr/local/vcuda/../b",
            "/a::/../b",
        ] {
            assert!(text.parse::<DriverFile>().is_err(), "{text}");
        }
    }
}
