//! The `usage` file as the processes of a container use it: claiming a slot, taking and giving memory, and finding
//! out who is dead.
//!
//! A process owns its slot by a kernel record lock on the slot's bytes of the file (fcntl(2), F_SETLK). The kernel
//! drops it when the process dies or calls exec, never before, and a forked child does not have it; so it tells the
//! living from the dead across PID namespaces and users, and no number that is used again can fool it. Nobody ever
//! waits for such a lock.
//!
//! The driver has a process's memory back when the last descriptor of its device is closed, and children that were forked
//! have copies of those: one that lives on keeps what its parent held. So a process also has descriptors whose copies a
//! child gets and drops as it does the driver's, of this file and of the device, with a lock each that belongs to the open
//! file and not to the process (F_OFD_SETLK). Memory is back once the process is dead and one of these two is gone.

use std::{
    ffi::CString,
    io,
    os::{fd::RawFd, unix::ffi::OsStrExt},
    path::Path,
    sync::atomic::{
        AtomicI32,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use crate::{
    MAX_GPUS, MAX_PROCESSES,
    account::{Account, Refused, bytes, units},
    bits::bits,
    fault,
    layout::{Header, Slot, USAGE, USAGE_SIZE, UsageFile},
    limits::{replace, take_room},
    mapping::{Mapping, invalid, open},
    process::Identity,
    stock,
};

/// A container's `usage` file. All figures are bytes; GPUs are numbered as in `limits`.
///
/// Closing any descriptor of the file in this process drops this process's locks (fcntl(2)), so a process opens it
/// once and keeps it.
pub struct Usage {
    file: Mapping<UsageFile>,
    fd: RawFd,
    path: CString,
    /// The driver's device, where there is one.
    device: CString,
    /// A descriptor of it, or -1.
    device_fd: AtomicI32,
    /// 15 bits that tell this container's file from others'.
    tag: u64,
}

/// Every process that uses a GPU has it open. Programs whose children close the driver's descriptors know them by this name.
const DEVICE: &str = "/dev/nvidiactl";

/// The slot of the calling process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    slot: usize,
}

impl Process {
    /// Number of the slot, below [`MAX_PROCESSES`].
    pub fn slot(self) -> usize {
        self.slot
    }

    /// The process that claimed slot `slot` before.
    pub fn of_slot(slot: usize) -> Option<Self> {
        (slot < MAX_PROCESSES).then_some(Self { slot })
    }
}

impl Usage {
    /// Writes an empty `usage` file at `path`, writable by all: whole or not at all, replacing what was there. It is
    /// 2.6 MiB, of which only what is used takes room on disk.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn create(path: &Path) -> io::Result<()> {
        use std::os::fd::AsRawFd;
        replace(path, 0o666, |file| {
            take_room(file, size_of::<Header>())?;
            file.set_len(USAGE_SIZE as u64)?;
            let map = Mapping::<UsageFile>::new(file.as_raw_fd(), true)?;
            USAGE.stamp(&map.header);
            Ok(())
        })
    }

    /// Maps the usage file at `path`, for reading and writing.
    ///
    /// # Errors
    /// The file cannot be opened, or is none of this layout.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::open_beside(path, Path::new(DEVICE))
    }

    /// The same with another file as the driver's device.
    ///
    /// # Errors
    /// As [`Usage::open`].
    pub fn open_beside(path: &Path, device: &Path) -> io::Result<Self> {
        let path = CString::new(path.as_os_str().as_bytes())?;
        let device = CString::new(device.as_os_str().as_bytes())?;
        let fd = open(&path, libc::O_RDWR)?;
        let usage = Mapping::new(fd, true).and_then(|file: Mapping<UsageFile>| {
            let Header { magic, version, size } = &file.header;
            let (magic, version, size) = (magic.load(Acquire), version.load(Relaxed), size.load(Relaxed));
            USAGE.check(magic, version, size).map_err(invalid)?;
            let tag = tag(fd)?;
            Ok(Self { file, fd, path: path.clone(), device, device_fd: AtomicI32::new(-1), tag })
        });
        if usage.is_err() {
            // SAFETY: the descriptor is ours and nobody else knows it.
            unsafe { libc::close(fd) };
        }
        usage
    }

    /// Claims a slot for the calling process, or finds the one that it has: two copies of the shim in one process (as
    /// dlmopen(3) makes) share it. After fork, the child claims its own.
    ///
    /// # Errors
    /// All [`MAX_PROCESSES`] slots belong to living processes, or the kernel refuses locks.
    pub fn claim(&self) -> io::Result<Process> {
        let me = Identity::of_caller();
        for slot in self.claimed() {
            // Locking what one has locked already succeeds.
            if self.identity(slot) == me && self.lock(slot, libc::F_WRLCK)? {
                return Ok(Process { slot });
            }
        }
        for slot in 0..MAX_PROCESSES {
            if !self.lock(slot, libc::F_WRLCK)? || self.identity(slot).shares_files() {
                continue;
            }
            // The lock is ours, but memory of a process that is still being torn down stays where it is, or that a child keeps.
            if (0..MAX_GPUS).any(|gpu| self.account(gpu).held(slot) > 0) {
                if !self.identity(slot).is_exiting() && !self.is_kept(slot) {
                    for gpu in 0..MAX_GPUS {
                        self.account(gpu).reap(slot, || Some(self.kept_exports(None, slot, gpu)));
                    }
                }
                if (0..MAX_GPUS).any(|gpu| self.account(gpu).held(slot) > 0) {
                    self.lock(slot, libc::F_UNLCK)?;
                    continue;
                }
            }
            fault::point();
            self.forget_exports(slot);
            let Slot { pid, start, pid_namespace, program, .. } = &self.file.slots[slot];
            pid.store(u64::from(me.pid), Relaxed);
            fault::point();
            start.store(me.start, Relaxed);
            pid_namespace.store(me.pid_namespace, Relaxed);
            program.store(me.program, Relaxed);
            fault::point();
            self.file.claimed[slot / 64].fetch_or(1 << (slot % 64), Release);
            fault::point();
            self.keep(slot);
            fault::point();
            return Ok(Process { slot });
        }
        Err(io::Error::other(format!("{MAX_PROCESSES} processes of this container use GPUs already")))
    }

    /// Takes `wanted` bytes of GPU `gpu` for `me` if all processes together then use at most `ceiling` bytes. Before
    /// it refuses, it gives back what any process has in stock, and what dead processes held.
    ///
    /// # Errors
    /// The ceiling does not allow it. Whether that is a refusal is the caller's to count.
    pub fn take(&self, me: Process, gpu: usize, wanted: u64, ceiling: u64) -> Result<(), Refused> {
        if gpu >= MAX_GPUS {
            return Err(Refused);
        }
        let account = self.account(gpu);
        // Rounded down: a unit that is only half below the ceiling is not to be had.
        let (wanted, ceiling) = (units(wanted), units(ceiling.saturating_add(1)) - 1);
        if account.take_from_stock(me.slot, stock::of_thread(), wanted, ceiling) {
            return Ok(());
        }
        let drained = || account.take_drained(me.slot, wanted, ceiling, || self.claimed());
        account.take(me.slot, wanted, ceiling).or_else(|Refused| drained()).or_else(|Refused| {
            self.reap(me, gpu);
            drained()
        })
    }

    /// Puts `there` bytes on the account of `me`, whatever the ceiling: memory that is taken already.
    pub fn charge(&self, me: Process, gpu: usize, there: u64) {
        if gpu < MAX_GPUS {
            self.account(gpu).charge(me.slot, units(there));
        }
    }

    /// Gives back `given` bytes that `me` took; never more than it holds.
    pub fn give(&self, me: Process, gpu: usize, given: u64) {
        if gpu < MAX_GPUS && !self.account(gpu).give_to_stock(me.slot, stock::of_thread(), units(given)) {
            self.account(gpu).give(me.slot, units(given));
        }
    }

    /// Counts an allocation that the ceiling refused.
    pub fn count_refusal(&self, gpu: usize) {
        if gpu < MAX_GPUS {
            self.account(gpu).count_refusal();
        }
    }

    /// Bytes that the living processes of the container use on GPU `gpu`. `me` is the caller's own slot, if it has
    /// one. Costs a system call for each other process that holds something.
    pub fn used(&self, me: Option<Process>, gpu: usize) -> u64 {
        if gpu >= MAX_GPUS {
            return 0;
        }
        let account = self.account(gpu);
        if let Some(me) = me {
            self.settle_exports(me);
            if let Some(used) = account.used_by_only(me.slot) {
                return bytes(used);
            }
        }
        self.reap_all_but(me, gpu);
        bytes(account.used(|| self.claimed()))
    }

    /// Bytes that `me` holds on GPU `gpu`, without those in stock.
    pub fn held(&self, me: Process, gpu: usize) -> u64 {
        if gpu < MAX_GPUS { bytes(self.account(gpu).used_by(me.slot)) } else { 0 }
    }

    /// Calls `with` for every living process that holds memory of GPU `gpu`: its ID as it sees itself, and bytes.
    pub fn for_each_process(&self, me: Option<Process>, gpu: usize, mut with: impl FnMut(u32, u64)) {
        if gpu >= MAX_GPUS {
            return;
        }
        for slot in self.claimed() {
            let held = self.account(gpu).used_by(slot);
            if held > 0 && !self.is_over(me, slot) {
                let pid = u32::try_from(self.file.slots[slot].pid.load(Relaxed)).unwrap_or(0);
                with(pid, bytes(held));
            }
        }
    }

    /// Counters of `me`: launches, and nanoseconds for which launches were held back. They only grow.
    pub fn counters(&self, me: Process) -> (&std::sync::atomic::AtomicU64, &std::sync::atomic::AtomicU64) {
        let slot = &self.file.slots[me.slot];
        (&slot.launches, &slot.throttled_ns)
    }

    /// Another counter of launches of `me`, which only one thread of the process may change. It only grows.
    pub fn launches_of_one(&self, me: Process) -> &std::sync::atomic::AtomicU64 {
        &self.file.slots[me.slot].launches_of_one
    }

    pub(crate) fn tag(&self) -> u64 {
        self.tag
    }

    pub(crate) fn file(&self) -> &UsageFile {
        &self.file
    }

    pub(crate) fn account(&self, gpu: usize) -> Account<'_> {
        Account { file: &self.file, gpu }
    }

    fn reap(&self, me: Process, gpu: usize) {
        self.settle_exports(me);
        self.reap_all_but(Some(me), gpu);
    }

    fn reap_all_but(&self, me: Option<Process>, gpu: usize) {
        for slot in self.claimed() {
            let stays = || self.dead(me, slot).then(|| self.kept_exports(me, slot, gpu));
            self.account(gpu).reap(slot, stays);
        }
    }

    /// Slots that any process ever claimed.
    pub(crate) fn claimed(&self) -> impl Iterator<Item = usize> {
        self.file
            .claimed
            .iter()
            .enumerate()
            .flat_map(|(word, set)| bits(set.load(Acquire)).map(move |bit| word * 64 + bit))
    }

    /// Opens the two descriptors of which forked children get copies, and locks them for `slot`. They stay open, in children
    /// too: closing one of this file would drop the process's locks.
    fn keep(&self, slot: usize) {
        if let Ok(fd) = open(&self.path, libc::O_RDWR) {
            lock_open_file(fd, slot);
        }
        if let Ok(fd) = open(&self.device, libc::O_RDWR | libc::O_NONBLOCK | libc::O_NOCTTY) {
            lock_open_file(fd, slot);
            self.device_fd.store(fd, Relaxed);
        }
    }

    /// Whether a child of the process of `slot` has the descriptors through which the driver keeps its memory.
    fn is_kept(&self, slot: usize) -> bool {
        let device = self.device_fd.load(Relaxed);
        is_kept(self.fd, slot) && (device < 0 || is_kept(device, slot))
    }

    /// Whether the driver has the memory of the process of `slot` back.
    pub(crate) fn dead(&self, me: Option<Process>, slot: usize) -> bool {
        self.is_over(me, slot) && !self.is_kept(slot)
    }

    /// Whether the process of `slot` is gone, and the driver done with it.
    ///
    /// The kernel drops locks before it closes the driver's files. While a process of this PID namespace is still on
    /// its way out, its memory is not back. Elsewhere the lock alone decides.
    pub(crate) fn is_over(&self, me: Option<Process>, slot: usize) -> bool {
        let identity = self.identity(slot);
        // One's own lock never shows, nor does that of another copy of the shim in this process.
        if me.is_some_and(|me| me.slot == slot) || identity.may_be_caller() {
            return false;
        }
        matches!(locked(self.fd, slot), Ok(None)) && !identity.is_exiting() && !identity.shares_files()
    }

    fn identity(&self, slot: usize) -> Identity {
        let Slot { pid, start, pid_namespace, program, .. } = &self.file.slots[slot];
        Identity {
            pid: u32::try_from(pid.load(Relaxed)).unwrap_or(0),
            start: start.load(Relaxed),
            pid_namespace: pid_namespace.load(Relaxed),
            program: program.load(Relaxed),
        }
    }

    /// Sets or drops the calling process's lock on `slot`; false if another process has it.
    fn lock(&self, slot: usize, kind: libc::c_int) -> io::Result<bool> {
        let lock = record_lock(slot, kind);
        // SAFETY: `lock` outlives the call.
        if unsafe { libc::fcntl(self.fd, libc::F_SETLK, &raw const lock) } == 0 {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => Ok(false),
            _ => Err(error),
        }
    }
}

impl Drop for Usage {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours.
        unsafe { libc::close(self.fd) };
    }
}

/// From device and inode, which are the same wherever the file is mounted.
fn tag(fd: RawFd) -> io::Result<u64> {
    // SAFETY: plain old data, for which zero is a value.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` outlives the call.
    if unsafe { libc::fstat(fd, &raw mut stat) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((stat.st_ino ^ stat.st_dev.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 49)
}

/// The process that has `slot` of the file behind `fd` locked, as this PID namespace numbers it (0: not visible
/// here); none if nobody has, the caller included.
pub(crate) fn locked(fd: RawFd, slot: usize) -> io::Result<Option<u32>> {
    let mut lock = record_lock(slot, libc::F_WRLCK);
    // SAFETY: `lock` outlives the call.
    if unsafe { libc::fcntl(fd, libc::F_GETLK, &raw mut lock) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let free = libc::c_int::from(lock.l_type) == libc::F_UNLCK;
    Ok((!free).then(|| u32::try_from(lock.l_pid).unwrap_or(0)))
}

/// Whether somebody else has the descriptors of the process of `slot`, whose file or device is behind `fd`.
pub(crate) fn is_kept(fd: RawFd, slot: usize) -> bool {
    let mut lock = open_file_lock(slot);
    // SAFETY: `lock` outlives the call.
    let asked = unsafe { libc::fcntl(fd, libc::F_GETLK, &raw mut lock) } == 0;
    asked && libc::c_int::from(lock.l_type) != libc::F_UNLCK
}

/// Nothing is lost where that fails: another copy of the shim in this process has the lock already.
fn lock_open_file(fd: RawFd, slot: usize) {
    let lock = open_file_lock(slot);
    // SAFETY: `lock` outlives the call.
    unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const lock) };
}

/// A lock of the open file: behind all of the processes' own, a byte a slot. The same bytes as before there were stocks, for
/// the node reads files of both layouts.
fn open_file_lock(slot: usize) -> libc::flock {
    lock(std::mem::offset_of!(UsageFile, stocks) + slot, 1, libc::F_WRLCK)
}

fn record_lock(slot: usize, kind: libc::c_int) -> libc::flock {
    lock(std::mem::offset_of!(UsageFile, slots) + slot * size_of::<Slot>(), size_of::<Slot>(), kind)
}

fn lock(at: usize, length: usize, kind: libc::c_int) -> libc::flock {
    // All of these are far below what the types hold.
    libc::flock {
        l_type: kind.try_into().unwrap_or(0),
        l_whence: libc::SEEK_SET.try_into().unwrap_or(0),
        l_start: at.try_into().unwrap_or(0),
        l_len: length.try_into().unwrap_or(0),
        l_pid: 0,
    }
}
