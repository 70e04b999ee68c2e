//! Memory limits of cgroups (NVML 13.4): the module holds them, whatever a process in the cgroup does.

use std::{
    ffi::{OsStr, c_char},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
};

use rustix::fs::{CWD, Mode, OFlags, openat};
use sim_gpud::wire::request;

use crate::{
    device::{Device, find},
    ffi::{
        Error, INVALID_VALUE, NO_PERMISSION, NOT_FOUND, NOT_SUPPORTED, OPERATING_SYSTEM, Out, Outcome, Text,
        UNKNOWN, api,
    },
};

/// `nvmlSetMemoryLimits_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct SetLimits {
    cgroup: *const c_char,
    soft: u64,
    hard: u64,
}

/// `nvmlGetMemoryLimits_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct GetLimits {
    cgroup: *const c_char,
    soft: u64,
    hard: u64,
    used: u64,
}

/// Opens a cgroup's folder, as this process sees it.
fn folder(cgroup: *const c_char) -> Outcome<OwnedFd> {
    let path = OsStr::from_bytes(Text::at(cgroup as u64).bytes()?);
    openat(CWD, path, OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|_| OPERATING_SYSTEM)
}

fn refused(error: &io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::EPERM) => NO_PERMISSION,
        Some(libc::EINVAL) => INVALID_VALUE,
        Some(libc::ENOENT) => NOT_FOUND,
        // No cgroup of version 2.
        Some(libc::ENOTDIR) => OPERATING_SYSTEM,
        Some(libc::ENOSPC) => NOT_SUPPORTED,
        _ => UNKNOWN,
    }
}

api! {
    fn nvmlDeviceSetMemoryLimits_v1(device: Device, limits: Out<SetLimits>) {
        let found = find(device)?;
        let SetLimits { cgroup, soft, hard } = limits.get()?;
        let folder = folder(cgroup)?;
        let words = [request::SET_CEILING, found.index as u64, soft, hard];
        found.library.link.ask(&words, Some(folder.as_fd())).map(drop).map_err(|error| refused(&error))
    }

    fn nvmlDeviceGetMemoryLimits_v1(device: Device, limits: Out<GetLimits>) {
        let found = find(device)?;
        let wanted = limits.get()?;
        let folder = folder(wanted.cgroup)?;
        let words = [request::GET_CEILING, found.index as u64];
        let answer = found.library.link.ask(&words, Some(folder.as_fd()));
        let ([_, soft, hard, used, ..], _) = answer.map_err(|error| refused(&error))?;
        limits.put(GetLimits { soft, hard, used, ..wanted })
    }
}
