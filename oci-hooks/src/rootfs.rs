//! A container's root, seen from the host: every path in it is reached through file descriptors that
//! `openat2(RESOLVE_IN_ROOT)` opened, so no symlink, `..` or rename in an image leads out of it. Nothing is
//! checked by path and then used by path, nothing of it is executed or mounted, and what is read is bounded. It
//! knows nothing of what the hooks want with the files.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Component, Path, PathBuf},
    process,
    sync::atomic::{AtomicU32, Ordering},
};

use rustix::{
    fs::{self, AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat, StatxAttributes, StatxFlags},
    io::Errno,
};
use thiserror::Error;

/// How often a look-up is tried again when the kernel says that the tree changed under it (`EAGAIN`,
/// openat2(2)). Something that changes it faster than this is up to no good.
const LOOKUP_TRIES: u32 = 64;

/// How many names are tried for a temporary file before a folder counts as hostile.
const TEMPORARY_NAME_TRIES: u32 = 16;

/// The kernel's own limit on a path, and so on a symlink's target (`PATH_MAX`).
const TARGET_MAX_BYTES: usize = 4096;

/// A container's root folder.
#[derive(Debug)]
pub struct Rootfs {
    fd: OwnedFd,
    path: PathBuf,
}

/// A folder in a container's root, open to be changed.
#[derive(Debug)]
pub struct Folder {
    fd: OwnedFd,
    path: PathBuf,
}

/// Why something in a container's root could not be read or changed. Paths are as the container sees them.
#[derive(Debug, Error)]
pub enum RootfsError {
    /// The root itself cannot be opened.
    #[error("{path} is no root folder that can be looked into: {reason}; name one that is there")]
    Root {
        /// The root, on the host.
        path: PathBuf,
        /// Why.
        reason: Errno,
    },
    /// The kernel has no `openat2`.
    #[error(
        "this kernel has no openat2, without which an image's files cannot be touched safely; run Linux 5.6 or newer"
    )]
    OldKernel,
    /// A call failed.
    #[error("{path} in the container: cannot {action}: {reason}")]
    Failed {
        /// The file or folder.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        reason: Errno,
    },
    /// A FIFO, socket, device or folder stands where a file was expected.
    #[error("{path} in the container is no regular file; remove it from the image or the volume")]
    NotRegular {
        /// What stands there.
        path: PathBuf,
    },
    /// A file is larger than anything honest.
    #[error(
        "{path} in the container is larger than {limit} bytes, the most that is read of it; use an image with a smaller one"
    )]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The limit, in bytes.
        limit: u64,
    },
    /// A folder to be changed lies on a volume, whose contents belong to someone else.
    #[error(
        "{path} in the container lies on a volume, which is never changed; mount the volume somewhere else"
    )]
    OnVolume {
        /// The folder.
        path: PathBuf,
    },
    /// A path that no one but a mistaken caller can have written.
    #[error("{path:?} is no path in a container: it must be absolute, without '..', and name something")]
    BadPath {
        /// The path.
        path: PathBuf,
    },
}

impl Rootfs {
    /// Opens the root at `path`, an absolute path on the host.
    pub fn open(path: &Path) -> Result<Self, RootfsError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = fs::open(path, flags, Mode::empty())
            .map_err(|reason| RootfsError::Root { path: path.into(), reason })?;
        Ok(Self { fd, path: path.into() })
    }

    /// Where the root is on the host. For messages: what is in it is reached by the methods only.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The ID of the mount whose root this is, as in `/proc/<pid>/mountinfo`; `None` for a folder within a mount.
    pub fn mount(&self) -> Option<u64> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::NO_AUTOMOUNT;
        let stat = fs::statx(&self.fd, "", flags, StatxFlags::MNT_ID).ok()?;
        let known = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::MNT_ID);
        (known && stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)).then_some(stat.stx_mnt_id)
    }

    /// What `path` is, symlinks followed within the root; `None` where there is nothing.
    pub fn stat(&self, path: &Path) -> Result<Option<Stat>, RootfsError> {
        let Some(fd) = self.look_up(path, OFlags::PATH, ResolveFlags::empty())? else { return Ok(None) };
        fs::fstat(&fd).map(Some).map_err(|reason| failed(path, "look at it", reason))
    }

    /// Where `path` leads, symlinks followed within the root: a path without any, as the container sees it; `None`
    /// where there is nothing. For a root that nobody changes meanwhile: the path is only true until then.
    pub fn resolve(&self, path: &Path) -> Result<Option<PathBuf>, RootfsError> {
        let Some(fd) = self.look_up(path, OFlags::PATH, ResolveFlags::empty())? else { return Ok(None) };
        let real = |fd: &OwnedFd| {
            let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
            link_target_at(&link).map_err(|reason| failed(path, "tell where it leads", reason))
        };
        let (real, root) = (real(&fd)?, real(&self.fd)?);
        let below = real.strip_prefix(&root).map_err(|_| failed(path, "tell where it leads", Errno::XDEV))?;
        Ok(Some(Path::new("/").join(below)))
    }

    /// Opens the regular file at `path` for reading, symlinks followed within the root; `None` where there is
    /// nothing. A FIFO or a device is never opened.
    pub fn file(&self, path: &Path) -> Result<Option<File>, RootfsError> {
        let Some(seen) = self.stat(path)? else { return Ok(None) };
        let regular = |stat: &Stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !regular(&seen) {
            return Err(RootfsError::NotRegular { path: path.into() });
        }
        // NONBLOCK and NOCTTY for the case that a FIFO or a terminal took its place since; then it is refused.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let Some(fd) = self.look_up(path, flags, ResolveFlags::empty())? else { return Ok(None) };
        let stat = fs::fstat(&fd).map_err(|reason| failed(path, "look at it", reason))?;
        if !regular(&stat) || (stat.st_dev, stat.st_ino) != (seen.st_dev, seen.st_ino) {
            return Err(RootfsError::NotRegular { path: path.into() });
        }
        Ok(Some(File::from(fd)))
    }

    /// The contents of the regular file at `path`, at most `limit` bytes; `None` where there is nothing.
    pub fn read(&self, path: &Path, limit: u64) -> Result<Option<Vec<u8>>, RootfsError> {
        let Some(file) = self.file(path)? else { return Ok(None) };
        let mut contents = Vec::new();
        // What the file system says of its size may be a lie: the read itself is bounded.
        file.take(limit.saturating_add(1))
            .read_to_end(&mut contents)
            .map_err(|error| failed(path, "read it", errno(&error)))?;
        if contents.len() as u64 > limit {
            return Err(RootfsError::TooLarge { path: path.into(), limit });
        }
        Ok(Some(contents))
    }

    /// The target of the symlink at `path`, as it is written; `None` where there is nothing or no symlink.
    pub fn read_link(&self, path: &Path) -> Result<Option<PathBuf>, RootfsError> {
        let (parent, name) = split(path)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let Some(parent) = self.look_up(parent, flags, ResolveFlags::empty())? else { return Ok(None) };
        link_target(&parent, name).map_err(|reason| failed(path, "read the link", reason))
    }

    /// Opens the folder at `path` to change what is in it, and creates it, and the folders above it, where they
    /// are missing. Symlinks on the way are followed within the root; a volume on the way is refused.
    pub fn folder(&self, path: &Path) -> Result<Folder, RootfsError> {
        self.folder_across(path, ResolveFlags::NO_XDEV)
    }

    /// The same; `resolve` says whether volumes may be on the way.
    fn folder_across(&self, path: &Path, resolve: ResolveFlags) -> Result<Folder, RootfsError> {
        let names = names(path)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        // The deepest folder that exists. Each try starts at the root: only there does RESOLVE_IN_ROOT give
        // absolute symlinks their meaning.
        let mut depth = names.len();
        let mut fd = loop {
            let existing: PathBuf = Path::new("/").join(names[..depth].iter().collect::<PathBuf>());
            match self.look_up(&existing, flags, resolve)? {
                Some(fd) => break fd,
                None if depth == 0 => return Err(failed(path, "open the root", Errno::NOENT)),
                None => depth -= 1,
            }
        };
        for name in &names[depth..] {
            match fs::mkdirat(&fd, *name, Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(reason) => return Err(failed(path, "create the folder", reason)),
            }
            // NOFOLLOW: a name that is there and yet was not found is a file or a symlink to nowhere.
            let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            fd = fs::openat2(&fd, *name, flags, Mode::empty(), ResolveFlags::BENEATH | ResolveFlags::NO_XDEV)
                .map_err(|reason| match reason {
                    Errno::NOTDIR | Errno::LOOP => {
                        failed(path, "create the folder, a file or a broken symlink is in its way", reason)
                    }
                    reason => failed(path, "open the folder", reason),
                })?;
        }
        Ok(Folder { fd, path: path.into() })
    }

    /// Opens `path` with the root as its `/`; `None` where there is nothing.
    fn look_up(
        &self,
        path: &Path,
        flags: OFlags,
        resolve: ResolveFlags,
    ) -> Result<Option<OwnedFd>, RootfsError> {
        let resolve = resolve | ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        for _ in 0..LOOKUP_TRIES {
            match fs::openat2(&self.fd, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
                Ok(fd) => return Ok(Some(fd)),
                Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::NOSYS) => return Err(RootfsError::OldKernel),
                Err(Errno::XDEV) => return Err(RootfsError::OnVolume { path: path.into() }),
                Err(reason) => return Err(failed(path, "open it", reason)),
            }
        }
        Err(failed(path, "open it, the folders above it change all the time", Errno::AGAIN))
    }
}

impl Folder {
    /// The target of the symlink `name`, as it is written; `None` where there is nothing or no symlink.
    pub fn read_link(&self, name: &OsStr) -> Result<Option<PathBuf>, RootfsError> {
        link_target(&self.fd, name).map_err(|reason| self.failed(name, "read the link", reason))
    }

    /// Puts a file with these contents and `mode` in the place of whatever `name` is, except a folder. It is
    /// replaced at once: a reader sees the old file or the new one. A symlink is replaced, not followed.
    pub fn replace_file(&self, name: &OsStr, contents: &[u8], mode: Mode) -> Result<(), RootfsError> {
        // No fsync: a container's root does not outlive a crash of its node.
        self.replace(name, "write the file", |temporary| {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mut file = File::from(fs::openat(&self.fd, temporary, flags, Mode::from_raw_mode(0o600))?);
            let written = file
                .write_all(contents)
                .map_err(|error| errno(&error))
                .and_then(|()| fs::fchmod(&file, mode));
            if written.is_err() {
                // EXIST comes from the creation only, so this one is ours to remove.
                let _ = fs::unlinkat(&self.fd, temporary, AtFlags::empty());
            }
            written
        })
    }

    /// Puts a symlink to `target`, taken as it is, in the place of whatever `name` is, except a folder.
    pub fn replace_link(&self, name: &OsStr, target: &Path) -> Result<(), RootfsError> {
        // Where nothing is, nothing need be replaced.
        if fs::symlinkat(target, &self.fd, name).is_ok() {
            return Ok(());
        }
        self.replace(name, "write the link", |temporary| fs::symlinkat(target, &self.fd, temporary))
    }

    /// Has `create` make something new under a temporary name, then renames it to `name`.
    fn replace(
        &self,
        name: &OsStr,
        action: &'static str,
        create: impl Fn(&OsStr) -> Result<(), Errno>,
    ) -> Result<(), RootfsError> {
        for _ in 0..TEMPORARY_NAME_TRIES {
            let temporary = temporary_name();
            match create(&temporary) {
                Ok(()) => {}
                Err(Errno::EXIST) => continue,
                Err(reason) => return Err(self.failed(name, action, reason)),
            }
            return fs::renameat(&self.fd, &temporary, &self.fd, name).map_err(|reason| {
                let _ = fs::unlinkat(&self.fd, &temporary, AtFlags::empty());
                match reason {
                    // rename(2): a mount point of this mount namespace.
                    Errno::BUSY => RootfsError::OnVolume { path: self.path.join(name) },
                    reason => self.failed(name, action, reason),
                }
            });
        }
        Err(self.failed(name, action, Errno::EXIST))
    }

    fn failed(&self, name: &OsStr, action: &'static str, reason: Errno) -> RootfsError {
        failed(&self.path.join(name), action, reason)
    }
}

/// A name that is free for all we know; whoever creates it does so with `O_EXCL`.
fn temporary_name() -> OsString {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!(".vcuda-{}-{}-{}", process::id(), now.subsec_nanos(), NEXT.fetch_add(1, Ordering::Relaxed)).into()
}

fn link_target_at(link: &str) -> Result<PathBuf, Errno> {
    let target = fs::readlink(link, Vec::with_capacity(TARGET_MAX_BYTES))?;
    Ok(OsStr::from_bytes(target.as_bytes()).into())
}

fn link_target(parent: &OwnedFd, name: &OsStr) -> Result<Option<PathBuf>, Errno> {
    match fs::readlinkat(parent, name, Vec::with_capacity(TARGET_MAX_BYTES)) {
        Ok(target) => Ok(Some(OsStr::from_bytes(target.as_bytes()).into())),
        // EINVAL: it is no symlink, readlink(2).
        Err(Errno::NOENT | Errno::INVAL) => Ok(None),
        Err(reason) => Err(reason),
    }
}

/// The names that `path` is made of; none for `/`.
fn names(path: &Path) -> Result<Vec<&OsStr>, RootfsError> {
    let bad = || RootfsError::BadPath { path: path.into() };
    if !path.is_absolute() {
        return Err(bad());
    }
    path.components()
        .filter(|part| !matches!(part, Component::RootDir | Component::CurDir))
        .map(|part| if let Component::Normal(name) = part { Ok(name) } else { Err(bad()) })
        .collect()
}

/// The folder and the last name of `path`.
pub(crate) fn split(path: &Path) -> Result<(&Path, &OsStr), RootfsError> {
    names(path)?;
    path.parent().zip(path.file_name()).ok_or_else(|| RootfsError::BadPath { path: path.into() })
}

fn failed(path: &Path, action: &'static str, reason: Errno) -> RootfsError {
    RootfsError::Failed { path: path.into(), action, reason }
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

mod mount;
mod walk;

pub use mount::{Access, Room};
pub use walk::{Entry, Unseen};

#[cfg(test)]
mod tests;
