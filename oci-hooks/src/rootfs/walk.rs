//! Going through every file of a container's root, without following a single link: each name is opened below the
//! folder that it was found in. What lies on another mount is left out.

use std::{
    ffi::{CStr, OsStr, OsString},
    fs::File,
    ops::ControlFlow,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{self, Dir, FileType, Mode, OFlags, ResolveFlags},
    io::Errno,
};

use super::{Rootfs, RootfsError, failed};

/// Folders within folders; deeper ones are left out. Each takes a file descriptor while it is gone through.
const MAX_DEPTH: usize = 128;

/// A regular file that was come by.
pub struct Entry<'a> {
    folder: &'a OwnedFd,
    name: &'a CStr,
    /// Where it is, as the container sees it.
    pub path: &'a Path,
}

/// What a walk could not see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unseen {
    /// Folders that could not be read.
    pub unreadable: u64,
    /// Folders deeper than is gone.
    pub too_deep: u64,
    /// Devices, FIFOs and sockets, which are never looked into.
    pub special: u64,
}

/// Names under which an overlay marks folders of its upper layer that hide what is below them in other layers, or hold
/// marks that hide single files (kernel, `Documentation/filesystems/overlayfs.rst`).
const OPAQUE: [&CStr; 2] = [c"trusted.overlay.opaque", c"user.overlay.opaque"];

/// Whether the folder `fd`, of an overlay's upper layer, hides anything. One that cannot tell may.
fn hides(fd: &OwnedFd) -> bool {
    OPAQUE.into_iter().any(|name| {
        let asked = fs::fgetxattr(fd, name, &mut [0_u8; 8]);
        !matches!(asked, Err(Errno::NODATA | Errno::OPNOTSUPP))
    })
}

impl Entry<'_> {
    /// Opens it for reading; `XDEV` where something else is mounted on it. Should a FIFO have taken its place
    /// meanwhile, it is not waited for.
    pub fn open(&self) -> Result<File, Errno> {
        let flags = OFlags::RDONLY
            | OFlags::NOFOLLOW
            | OFlags::NONBLOCK
            | OFlags::NOCTTY
            | OFlags::NOATIME
            | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV;
        let open = |flags| fs::openat2(self.folder, self.name, flags, Mode::empty(), resolve);
        // NOATIME is for the owner and root only.
        let file = match open(flags) {
            Err(Errno::PERM) => open(flags - OFlags::NOATIME)?,
            opened => opened?,
        };
        Ok(File::from(file))
    }
}

impl Rootfs {
    /// Names in the folder at `path`, at most `limit` of them; none where it is no folder.
    pub fn list(&self, path: &Path, limit: usize) -> Result<Vec<OsString>, RootfsError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let opened = match self.look_up(path, flags, ResolveFlags::empty()) {
            Err(RootfsError::Failed { reason: Errno::LOOP | Errno::NAMETOOLONG, .. }) => {
                return Ok(Vec::new());
            }
            opened => opened?,
        };
        let Some(fd) = opened else { return Ok(Vec::new()) };
        let names = Dir::read_from(&fd).map_err(|reason| failed(path, "list it", reason))?;
        let names = names.flatten().map(|entry| OsStr::from_bytes(entry.file_name().to_bytes()).to_owned());
        Ok(names.filter(|name| name != "." && name != "..").take(limit).collect())
    }

    /// Calls `visit` with every regular file below the root, until it breaks.
    ///
    /// # Errors
    /// The root itself cannot be read.
    pub fn walk(&self, visit: &mut dyn FnMut(&Entry<'_>) -> ControlFlow<()>) -> Result<Unseen, RootfsError> {
        self.walk_through(visit, &mut |_| ControlFlow::Continue(()))
    }

    /// The same for the upper layer of an overlay; true where it hides what lower layers have, and then it goes no
    /// further.
    ///
    /// # Errors
    /// The root itself cannot be read.
    pub fn walk_upper(
        &self,
        visit: &mut dyn FnMut(&Entry<'_>) -> ControlFlow<()>,
    ) -> Result<(Unseen, bool), RootfsError> {
        let mut hiding = false;
        let unseen = self.walk_through(visit, &mut |folder| {
            hiding = hides(folder);
            if hiding { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        // Whiteouts are devices.
        Ok((unseen, hiding || unseen.special > 0))
    }

    fn walk_through(
        &self,
        visit: &mut dyn FnMut(&Entry<'_>) -> ControlFlow<()>,
        enter: &mut dyn FnMut(&OwnedFd) -> ControlFlow<()>,
    ) -> Result<Unseen, RootfsError> {
        let root = Path::new("/");
        let open = |below: &OwnedFd, name: &CStr| {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            fs::openat2(below, name, flags, Mode::empty(), ResolveFlags::BENEATH | ResolveFlags::NO_XDEV)
        };
        let mut unseen = Unseen::default();
        let fd = open(&self.fd, c".").map_err(|reason| failed(root, "list it", reason))?;
        if enter(&fd).is_break() {
            return Ok(unseen);
        }
        let list = |fd: &OwnedFd| Dir::read_from(fd);
        let mut stack = vec![(list(&fd).map_err(|reason| failed(root, "list it", reason))?, fd)];
        let mut path = PathBuf::from(root);
        loop {
            let depth = stack.len();
            let Some((names, folder)) = stack.last_mut() else { return Ok(unseen) };
            let Some(entry) = names.next() else {
                stack.pop();
                path.pop();
                continue;
            };
            let Ok(entry) = entry else {
                unseen.unreadable += 1;
                stack.pop();
                path.pop();
                continue;
            };
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let kind = match entry.file_type() {
                // File systems that do not tell in the listing.
                FileType::Unknown => fs::statat(&*folder, name, fs::AtFlags::SYMLINK_NOFOLLOW)
                    .map_or(FileType::Unknown, |stat| FileType::from_raw_mode(stat.st_mode)),
                kind => kind,
            };
            path.push(OsStr::from_bytes(name.to_bytes()));
            match kind {
                FileType::Directory if depth == MAX_DEPTH => unseen.too_deep += 1,
                FileType::Directory => match open(folder, name).and_then(|fd| Ok((list(&fd)?, fd))) {
                    Ok(opened) => {
                        if enter(&opened.1).is_break() {
                            return Ok(unseen);
                        }
                        stack.push(opened);
                        continue;
                    }
                    // Another mount.
                    Err(Errno::XDEV) => {}
                    Err(_) => unseen.unreadable += 1,
                },
                FileType::RegularFile if visit(&Entry { folder, name, path: &path }).is_break() => {
                    return Ok(unseen);
                }
                FileType::RegularFile | FileType::Symlink => {}
                _ => unseen.special += 1,
            }
            path.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn every_file_is_seen_once_and_no_link_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(at("a/b")).unwrap();
        for name in ["x", "a/y", "a/b/z"] {
            std::fs::write(at(name), name).unwrap();
        }
        symlink("/etc", at("out")).unwrap();
        symlink("..", at("a/up")).unwrap();
        symlink("y", at("a/link")).unwrap();
        fs::mknodat(fs::CWD, at("fifo"), FileType::Fifo, Mode::from_raw_mode(0o644), 0).unwrap();

        let mut seen = Vec::new();
        let unseen = Rootfs::open(folder.path())
            .unwrap()
            .walk(&mut |entry| {
                let text = std::io::read_to_string(entry.open().unwrap()).unwrap();
                seen.push((entry.path.to_owned(), text));
                ControlFlow::Continue(())
            })
            .unwrap();
        seen.sort();
        let expected = ["a/b/z", "a/y", "x"].map(|name| (Path::new("/").join(name), name.to_owned()));
        assert_eq!((seen.as_slice(), unseen), (&expected[..], Unseen { special: 1, ..Unseen::default() }));
    }

    #[test]
    fn a_walk_ends_where_it_is_told_to_and_never_goes_too_deep() {
        let folder = tempfile::tempdir().unwrap();
        let mut deep = folder.path().to_owned();
        for _ in 0..MAX_DEPTH + 10 {
            deep.push("d");
        }
        std::fs::create_dir_all(&deep).unwrap();
        std::fs::write(deep.join("x"), "").unwrap();
        std::fs::write(folder.path().join("y"), "").unwrap();
        let rootfs = Rootfs::open(folder.path()).unwrap();
        let mut count = 0;
        let mut visit = |_: &Entry<'_>| {
            count += 1;
            ControlFlow::Break(())
        };
        assert_eq!(rootfs.walk(&mut visit).unwrap().unreadable, 0);
        assert_eq!(count, 1);
        let unseen = rootfs.walk(&mut |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(unseen, Unseen { too_deep: 1, ..Unseen::default() });
    }
}
