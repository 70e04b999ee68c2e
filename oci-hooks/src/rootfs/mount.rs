//! Files of the node in a container's root. A hook runs in the container's mount namespace before the root is entered,
//! so what it mounts there is the container's and goes with it. A place is reached by `openat2(RESOLVE_IN_ROOT)` and the
//! mount is put on just that: no path of the image is given to the kernel a second time (CVE-2024-0132, CVE-2025-23359).

use std::{
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{self, CWD, FileType, Mode, OFlags, PROC_SUPER_MAGIC, ResolveFlags},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags,
        OpenTreeFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount_change, mount_remount,
        move_mount, open_tree,
    },
};

use super::{Rootfs, RootfsError, failed, split};

/// What a container may do with a file of the node. Libraries can be loaded from a read-only one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read and load.
    ReadOnly,
    /// Read and write.
    Writable,
}

/// A small file system in memory that was mounted in a root.
#[derive(Debug)]
pub struct Room(OwnedFd);

impl Room {
    /// Lets nobody change any more which files there are. What is mounted in it stays as it is.
    pub fn seal(&self) -> Result<(), Errno> {
        restrict(&self.0, MountFlags::RDONLY | MountFlags::NOEXEC)
    }
}

impl Rootfs {
    /// Mounts an empty file system in memory at the folder `path`, which is made where it is missing: for mount points
    /// alone, which cost next to nothing there. `label` is the SELinux context of its files, where the node has such.
    pub fn mount_room(&self, path: &Path, label: Option<&str>) -> Result<Room, RootfsError> {
        let point = self.folder_across(path, ResolveFlags::empty())?;
        let mounted = || -> Result<OwnedFd, Errno> {
            let room = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
            fsconfig_set_string(room.as_fd(), "size", "64k")?;
            fsconfig_set_string(room.as_fd(), "mode", "0755")?;
            if let Some(label) = label {
                fsconfig_set_string(room.as_fd(), "context", label)?;
            }
            fsconfig_create(room.as_fd())?;
            let room = fsmount(room.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
            attach(&room, &point.fd)?;
            Ok(room)
        };
        mounted().map(Room).map_err(|reason| failed(path, "mount a file system in memory there", reason))
    }

    /// Mounts the file `host` of the node at `path`, where an empty file is made if nothing is there. A volume on the
    /// way gets that file, as it does from a runtime.
    pub fn mount_file(&self, host: &Path, path: &Path, access: Access) -> Result<(), RootfsError> {
        let point = self.mount_point(path)?;
        let mounted = || -> Result<(), Errno> {
            let file =
                open_tree(CWD, host, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?;
            attach(&file, &point)?;
            restrict(
                &file,
                match access {
                    Access::ReadOnly => MountFlags::RDONLY,
                    Access::Writable => MountFlags::NOEXEC,
                },
            )
        };
        mounted().map_err(|reason| failed(path, "mount the node's file there", reason))
    }

    /// The regular file or socket at `path`, symlinks followed within the root; a file is made where it is missing. None of
    /// `/proc`: the runtime has yet to write there (runc, rootfs_linux.go: checkProcMount).
    fn mount_point(&self, path: &Path) -> Result<OwnedFd, RootfsError> {
        if let Some(fd) = self.look_up(path, OFlags::PATH, ResolveFlags::empty())? {
            let stat = fs::fstat(&fd).map_err(|reason| failed(path, "look at it", reason))?;
            let system = fs::fstatfs(&fd).map_err(|reason| failed(path, "look at it", reason))?;
            if system.f_type == PROC_SUPER_MAGIC {
                return Err(failed(path, "mount a file there, it leads into /proc", Errno::PERM));
            }
            return match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile | FileType::Socket => Ok(fd),
                _ => Err(RootfsError::NotRegular { path: path.into() }),
            };
        }
        let (folder, name) = split(path)?;
        let folder = self.folder_across(folder, ResolveFlags::empty())?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        fs::openat(&folder.fd, name, flags, Mode::from_raw_mode(0o644)).map_err(|reason| match reason {
            Errno::EXIST => failed(path, "make the file, a broken symlink is in its way", reason),
            reason => failed(path, "make the file", reason),
        })
    }
}

fn attach(mount: &OwnedFd, point: &OwnedFd) -> Result<(), Errno> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(mount, "", point, "", flags)
}

/// Takes rights from a mount that is in its place: `mount` cannot before, and nothing of the container runs by then. What
/// the node mounts later does not come after it.
fn restrict(mount: &OwnedFd, flags: MountFlags) -> Result<(), Errno> {
    // The node's /proc: the container's root is not entered yet.
    let path = format!("/proc/self/fd/{}", mount.as_raw_fd());
    mount_change(&path, MountPropagationFlags::PRIVATE)?;
    mount_remount(&path, MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV | flags, "")
}
