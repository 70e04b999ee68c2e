//! Ceilings of cgroups on GPUs, as NVML 13.4 sets them: which cgroups have one, and which processes stand under it.
//! Needs cgroup version 2; a process counts to the cgroup that it is in when it connects.

use std::{
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    sync::atomic::Ordering::Relaxed,
};

use rustix::fs::{FsWord, fstat, fstatfs};

use crate::state::{CEILINGS_DEEP, Gone, State};

/// CGROUP2_SUPER_MAGIC (linux/magic.h).
const CGROUP2: FsWord = 0x6367_7270;

struct Limited {
    gpu: usize,
    /// The cgroup's folder, as the daemon sees it, and its inode.
    folder: PathBuf,
    inode: u64,
    ceiling: usize,
}

/// The cgroups that have a ceiling.
#[derive(Default)]
pub(super) struct Ceilings {
    limited: Vec<Limited>,
}

impl Ceilings {
    /// Sets the ceiling of a cgroup. No guarantee and no limit is none.
    pub(super) fn set(
        &mut self,
        state: &State,
        gpu: usize,
        folder: &OwnedFd,
        (soft, hard): (u64, u64),
        gone: Gone<'_>,
    ) -> io::Result<()> {
        let inode = cgroup(folder)?;
        let total = state.gpus[gpu].facts.total;
        if (hard != u64::MAX && hard > total) || soft > total || soft > hard {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        self.forget_removed(state);
        let known = self.limited.iter().position(|limited| limited.gpu == gpu && limited.inode == inode);
        if soft == 0 && hard == u64::MAX {
            if let Some(known) = known {
                let lifted = self.limited.swap_remove(known);
                self.rebind(state, gone);
                state.drop_ceiling(lifted.ceiling);
            }
            return Ok(());
        }
        let at = match known {
            Some(known) => self.limited[known].ceiling,
            None => {
                let ceiling = state.new_ceiling(gpu).ok_or(io::Error::from_raw_os_error(libc::ENOSPC))?;
                let folder = fs::read_link(format!("/proc/self/fd/{}", raw(folder)))?;
                self.limited.push(Limited { gpu, folder, inode, ceiling });
                ceiling
            }
        };
        state.ceilings[at].soft.store(soft, Relaxed);
        state.ceilings[at].hard.store(hard, Relaxed);
        if known.is_none() {
            self.rebind(state, gone);
        }
        Ok(())
    }

    /// Soft, hard and used bytes of a cgroup on a GPU.
    pub(super) fn get(&mut self, state: &State, gpu: usize, folder: &OwnedFd) -> io::Result<[u64; 3]> {
        let inode = cgroup(folder)?;
        self.forget_removed(state);
        let known = self.limited.iter().find(|limited| limited.gpu == gpu && limited.inode == inode);
        let at = &state.ceilings[known.ok_or(io::Error::from_raw_os_error(libc::ENOENT))?.ceiling];
        Ok([at.soft.load(Relaxed), at.hard.load(Relaxed), at.used.load(Relaxed)])
    }

    /// Puts the process in a slot under the ceilings of its cgroup and those above it.
    pub(super) fn bind(&mut self, state: &State, slot: usize, pid: i32, gone: Gone<'_>) {
        self.forget_removed(state);
        let above = if self.limited.is_empty() { vec![] } else { inodes(pid) };
        for gpu in 0..state.gpus().len() {
            let own: Vec<usize> = self
                .limited
                .iter()
                .filter(|limited| limited.gpu == gpu && above.contains(&limited.inode))
                .map(|limited| limited.ceiling)
                .take(CEILINGS_DEEP)
                .collect();
            state.bind(slot, gpu, &own, gone);
        }
    }

    fn rebind(&mut self, state: &State, gone: Gone<'_>) {
        let all: Vec<(usize, i32)> =
            state.clients().map(|(slot, client)| (slot, client.pid.load(Relaxed))).collect();
        for (slot, pid) in all {
            self.bind(state, slot, pid, gone);
        }
    }

    /// A ceiling goes with its cgroup.
    fn forget_removed(&mut self, state: &State) {
        self.limited.retain(|limited| {
            let there = fs::metadata(&limited.folder).is_ok_and(|folder| folder.ino() == limited.inode);
            if !there {
                state.drop_ceiling(limited.ceiling);
            }
            there
        });
    }
}

fn raw(descriptor: &OwnedFd) -> i32 {
    std::os::fd::AsRawFd::as_raw_fd(&descriptor.as_fd())
}

/// The inode of a cgroup's folder.
fn cgroup(folder: &OwnedFd) -> io::Result<u64> {
    if fstatfs(folder)?.f_type != CGROUP2 {
        return Err(io::Error::from_raw_os_error(libc::ENOTDIR));
    }
    Ok(fstat(folder)?.st_ino)
}

/// Inodes of a process's cgroup and of those above it.
fn inodes(pid: i32) -> Vec<u64> {
    let Ok(text) = fs::read_to_string(format!("/proc/{pid}/cgroup")) else { return vec![] };
    let Some(own) = text.lines().find_map(|line| line.strip_prefix("0::/")) else { return vec![] };
    let Some(top) = mounted() else { return vec![] };
    let folder = top.join(own);
    folder
        .ancestors()
        .take_while(|above| above.starts_with(&top))
        .filter_map(|above| fs::metadata(above).ok())
        .map(|folder| folder.ino())
        .collect()
}

/// Where the whole cgroup tree, version 2, is mounted.
fn mounted() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    // proc_pid_mountinfo(5): ID, parent, device, root, mount point, options, fields up to "-", type.
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        (root == "/" && kind.starts_with("cgroup2 ")).then(|| Path::new(point).to_path_buf())
    })
}
