//! A file of fixed size, mapped and seen as a structure of atomics.

use std::{ffi::CStr, io, ops::Deref, os::fd::RawFd, ptr::NonNull};

/// Types that a mapping may be seen as.
///
/// # Safety
/// Every bit pattern must be a valid value, every field must be interior-mutable without a destructor, and the
/// alignment must be at most that of a page.
pub(crate) unsafe trait Shared {}

// SAFETY: nothing but atomics, in structures and arrays; both are aligned to 4096.
unsafe impl Shared for crate::layout::LimitsFile {}
// SAFETY: the same.
unsafe impl Shared for crate::layout::UsageFile {}

/// A shared mapping of a whole `T`. It stays valid as long as the file keeps its size: whoever truncates the file
/// under it makes the next access fault. That is why the node maps nothing that a container can write.
pub(crate) struct Mapping<T: Shared> {
    at: NonNull<T>,
}

// SAFETY: shared memory of atomics belongs to no thread.
unsafe impl<T: Shared> Send for Mapping<T> {}
// SAFETY: the same.
unsafe impl<T: Shared> Sync for Mapping<T> {}

impl<T: Shared> Mapping<T> {
    /// Maps the file behind `fd`, which must be as large as `T`. It must be open for reading, and for writing too
    /// if `writable`.
    pub fn new(fd: RawFd, writable: bool) -> io::Result<Self> {
        // SAFETY: plain old data, for which zero is a value.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: `stat` outlives the call.
        if unsafe { libc::fstat(fd, &raw mut stat) } != 0 {
            return Err(io::Error::last_os_error());
        }
        if u64::try_from(stat.st_size).ok() != Some(size_of::<T>() as u64) {
            return Err(invalid(format!("has {} bytes instead of {}", stat.st_size, size_of::<T>())));
        }
        let access = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        // SAFETY: a new mapping at a place of the kernel's choice disturbs nothing.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), size_of::<T>(), access, libc::MAP_SHARED, fd, 0) };
        match NonNull::new(at.cast::<T>()) {
            Some(at) if at.as_ptr().cast() != libc::MAP_FAILED => Ok(Self { at }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl<T: Shared> Deref for Mapping<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the mapping lives as long as `self`, is as large as `T`, page-aligned, and `Shared` allows any
        // content and any change behind our back.
        unsafe { self.at.as_ref() }
    }
}

impl<T: Shared> Drop for Mapping<T> {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `new` made; no reference into it outlives `self`.
        unsafe { libc::munmap(self.at.as_ptr().cast(), size_of::<T>()) };
    }
}

/// For whoever opens a file that a container has. Root in a container is the file's owner, and may take a lease on it
/// (fcntl(2), `F_SETLEASE`): without this flag the node waits for `/proc/sys/fs/lease-break-time`, 45 s, with this it is an error.
pub(crate) const NEVER_WAITS: libc::c_int = libc::O_NONBLOCK;

/// Opens `path` without any allocation, close-on-exec.
pub(crate) fn open(path: &CStr, flags: libc::c_int) -> io::Result<RawFd> {
    loop {
        // SAFETY: `path` ends in NUL.
        let fd = unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC) };
        if fd >= 0 {
            return Ok(fd);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

pub(crate) fn invalid(reason: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason.into())
}
