//! `vcuda-hook ldcache`: makes the loader in a container find the driver's libraries, wherever the host's
//! distribution keeps them. It writes `/etc/ld.so.cache` itself: no `ldconfig` is run, neither the image's nor the
//! host's, and nothing of the image is executed. It knows nothing of what the libraries are.

pub mod cache;

use std::{
    collections::BTreeSet,
    ffi::{CString, OsStr},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    str::FromStr,
};

use rustix::{fs::Mode, io::Errno};
use thiserror::Error;

use self::cache::{Cache, Library};
use crate::rootfs::{Rootfs, RootfsError, split};

/// The loader's cache.
const CACHE: &str = "/etc/ld.so.cache";

/// Where folders are named for an `ldconfig` that runs in the container later. `00` puts ours before the image's.
const CONFIG_FOLDER: &str = "/etc/ld.so.conf.d";
const CONFIG_NAME: &str = "00-vcuda.conf";

/// Where `ldconfig` is.
const LDCONFIG: [&str; 2] = ["/sbin/ldconfig", "/usr/sbin/ldconfig"];

/// A file of folder names is a page of text.
const CONFIG_MAX_BYTES: u64 = 1 << 20;

/// Loaders of the two C libraries on this architecture, which their ABIs fix.
#[cfg(target_arch = "x86_64")]
const GLIBC_LOADER: &str = "/lib64/ld-linux-x86-64.so.2";
#[cfg(target_arch = "x86_64")]
const MUSL_LOADER: &str = "/lib/ld-musl-x86_64.so.1";
#[cfg(target_arch = "aarch64")]
const GLIBC_LOADER: &str = "/lib/ld-linux-aarch64.so.1";
#[cfg(target_arch = "aarch64")]
const MUSL_LOADER: &str = "/lib/ld-musl-aarch64.so.1";

/// Readable by everyone, as `ldconfig` makes its files.
const MODE: Mode = Mode::from_raw_mode(0o644);

/// Arguments of `vcuda-hook ldcache`.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Args {
    /// A library that programs are to find by its file name, such as /usr/lib64/libcuda.so.1; absolute in the
    /// container. May be given many times.
    #[arg(long = "library", value_name = "PATH", required = true)]
    pub libraries: Vec<LibraryPath>,
}

/// Path of a library in a container, which names a file in an absolute folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryPath(PathBuf);

/// Why a text is no path of a library.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is no absolute path of a library")]
pub struct LibraryPathError(String);

impl FromStr for LibraryPath {
    type Err = LibraryPathError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || LibraryPathError(text.into());
        let (_, name) = split(Path::new(text)).map_err(|_| bad())?;
        // A line break would write lines of its own into the configuration.
        let plain = !text.bytes().any(|c| c.is_ascii_control()) && !text.ends_with('/');
        (plain && name.len() <= 255).then(|| Self(text.into())).ok_or_else(bad)
    }
}

/// Puts the libraries into the container's loader cache, in the place of others of the same name, and their
/// folders into its configuration. A root that has musl's loader only is left alone: it has no such cache.
pub fn run(args: &Args, rootfs: &Rootfs) -> Result<(), RootfsError> {
    if rootfs.stat(Path::new(MUSL_LOADER))?.is_some() && rootfs.stat(Path::new(GLIBC_LOADER))?.is_none() {
        return Ok(());
    }
    write_cache(args, rootfs)?;
    write_config(args, rootfs)
}

fn write_cache(args: &Args, rootfs: &Rootfs) -> Result<(), RootfsError> {
    let libraries: Vec<_> = args.libraries.iter().filter_map(|path| library(&path.0)).collect();
    let path = Path::new(CACHE);
    let old = match rootfs.read(path, cache::MAX_BYTES) {
        Ok(bytes) => bytes.unwrap_or_default(),
        // A link to itself or to /dev/null: the loader has no cache, and the link is replaced.
        Err(RootfsError::Failed { reason: Errno::LOOP, .. } | RootfsError::NotRegular { .. }) => Vec::new(),
        Err(error) => return Err(error),
    };
    let mut cache = Cache::parse(&old).unwrap_or_default();
    if cache.has(&libraries) {
        return Ok(());
    }
    cache.add(&libraries);
    let (folder, name) = split(path)?;
    rootfs.folder(folder)?.replace_file(name, &cache.to_bytes(), MODE)
}

/// Names the folders for an `ldconfig` that someone runs in the container later, where the image has one, and a folder
/// for that.
fn write_config(args: &Args, rootfs: &Rootfs) -> Result<(), RootfsError> {
    let folder = Path::new(CONFIG_FOLDER);
    // Where it cannot be told, there may be one.
    let without = LDCONFIG.iter().all(|path| matches!(rootfs.stat(Path::new(path)), Ok(None)));
    if without || rootfs.stat(folder)?.is_none() {
        return Ok(());
    }
    let folders: BTreeSet<_> = args.libraries.iter().filter_map(|path| path.0.parent()).collect();
    let mut text = Vec::new();
    for folder in folders {
        text.extend(folder.as_os_str().as_bytes());
        text.push(b'\n');
    }
    if rootfs.read(&folder.join(CONFIG_NAME), CONFIG_MAX_BYTES)?.as_ref() == Some(&text) {
        return Ok(());
    }
    rootfs.folder(folder)?.replace_file(OsStr::new(CONFIG_NAME), &text, MODE)
}

/// The library at `path` under its file name.
fn library(path: &Path) -> Option<Library> {
    let text = |text: &OsStr| CString::new(text.as_bytes()).ok();
    Some(Library { name: text(path.file_name()?)?, path: text(path.as_os_str())? })
}

#[cfg(test)]
mod tests;
