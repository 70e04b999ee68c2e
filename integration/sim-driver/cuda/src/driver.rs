//! The driver of this process: its connection to the module, the GPUs that it may use, and everything that it has made.
//! A forked child has none of it.

use std::{
    collections::HashMap,
    ffi::{CStr, c_void},
    io,
    mem::MaybeUninit,
    path::PathBuf,
    ptr::NonNull,
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
};

use sim_gpud::{
    link::Link,
    stamp::Stamp,
    state::{self, Gpu},
};

use crate::{
    array::Arrays,
    context::Contexts,
    ffi::{
        Error, INVALID_DEVICE, NO_DEVICE, NOT_INITIALIZED, OUT_OF_MEMORY, Outcome, SYSTEM_DRIVER_MISMATCH,
    },
    graph::Graphs,
    ipc::Opened,
    memory::Blocks,
    module::Modules,
    pool::Pools,
    space::Space,
    stream::Streams,
    visible,
    vmm::Physicals,
    work::Working,
};

/// Made by the first `cuInit` that succeeds.
static DRIVER: OnceLock<Driver> = OnceLock::new();

/// Two threads may call `cuInit` at once.
static INIT: Mutex<()> = Mutex::new(());

/// The driver of this process.
pub(crate) struct Driver {
    pub link: Link,
    /// The module's number of each CUDA device.
    pub devices: Vec<usize>,
    /// In a page that a forked child finds wiped.
    here: &'static AtomicU32,
    tables: Mutex<Tables>,
    /// Work that takes time. Locked after the tables, never before.
    pub work: Working,
}

/// Everything that the process has made.
#[derive(Default)]
pub(crate) struct Tables {
    pub space: Space,
    pub contexts: Contexts,
    pub blocks: Blocks,
    pub physicals: Physicals,
    pub arrays: Arrays,
    pub pools: Pools,
    pub opened: Opened,
    pub streams: Streams,
    pub modules: Modules,
    pub graphs: Graphs,
}

/// `cuInit`.
pub(crate) fn init() -> Outcome {
    let _one = INIT.lock().unwrap_or_else(PoisonError::into_inner);
    if DRIVER.get().is_some() {
        return driver().map(drop);
    }
    let link = Link::cuda(&library()).map_err(|error| match error.kind() {
        // As a real driver without its kernel module.
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused | io::ErrorKind::PermissionDenied => {
            NO_DEVICE
        }
        _ => OUT_OF_MEMORY,
    })?;
    link.node("nvidiactl").map_err(|_| NO_DEVICE)?;
    if state::text(&link.state.driver) != Stamp::own().driver {
        return Err(SYSTEM_DRIVER_MISMATCH);
    }
    let devices = visible::devices(&link);
    if devices.is_empty() {
        return Err(NO_DEVICE);
    }
    let here = wiped_in_children().ok_or(OUT_OF_MEMORY)?;
    here.store(1, Relaxed);
    let _ = DRIVER.set(Driver { link, devices, here, tables: Mutex::default(), work: Working::default() });
    Ok(())
}

/// Branch and CUDA version of the driver that this library belongs to.
pub(crate) fn version() -> (u32, i32) {
    static OWN: OnceLock<(u32, i32)> = OnceLock::new();
    *OWN.get_or_init(|| {
        let stamp = Stamp::own();
        (stamp.branch(), stamp.cuda)
    })
}

/// The driver, where it is initialised in this process, not in a parent of it.
#[inline]
pub(crate) fn driver() -> Outcome<&'static Driver> {
    match DRIVER.get() {
        Some(driver) if driver.here.load(Relaxed) != 0 => Ok(driver),
        _ => Err(NOT_INITIALIZED),
    }
}

/// Locks what the process has made.
pub(crate) fn tables() -> Outcome<MutexGuard<'static, Tables>> {
    driver().map(Driver::tables)
}

/// A number that no other handle has.
pub(crate) fn new_handle() -> u64 {
    // Handles of a real driver are addresses.
    static NEXT: AtomicU64 = AtomicU64::new(0x5_0000_0000);
    NEXT.fetch_add(64, Relaxed)
}

impl Driver {
    pub(crate) fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The module's number of a CUDA device.
    pub(crate) fn gpu(&self, device: i32) -> Outcome<usize> {
        usize::try_from(device)
            .ok()
            .and_then(|device| self.devices.get(device))
            .copied()
            .ok_or(INVALID_DEVICE)
    }

    /// The CUDA device of a GPU.
    pub(crate) fn device(&self, gpu: usize) -> i32 {
        let at = self.devices.iter().position(|other| *other == gpu);
        at.and_then(|at| i32::try_from(at).ok()).unwrap_or(-1)
    }

    pub(crate) fn state(&self, gpu: usize) -> &Gpu {
        &self.link.state.gpus[gpu]
    }

    /// Counts a launch. Without threads it is work that was counted before.
    pub(crate) fn count_kernel(&self, gpu: usize, threads: u64) {
        if threads == 0 {
            return;
        }
        let client = &self.link.state.clients[self.link.slot];
        client.launches[gpu].fetch_add(1, Relaxed);
        client.threads[gpu].fetch_add(threads, Relaxed);
    }

    /// Takes bytes of a GPU for this process.
    #[inline]
    pub(crate) fn charge(&self, gpu: usize, bytes: u64) -> Outcome {
        if self.link.state.charge(self.link.slot, gpu, bytes) { Ok(()) } else { Err(OUT_OF_MEMORY) }
    }

    /// Gives bytes of a GPU back.
    #[inline]
    pub(crate) fn discharge(&self, gpu: usize, bytes: u64) {
        self.link.state.discharge(self.link.slot, gpu, bytes);
    }

    /// Bytes that a block of this size takes of a GPU.
    pub(crate) fn rounded(&self, gpu: usize, bytes: u64) -> Outcome<u64> {
        let granularity = self.state(gpu).facts.granularity.max(1);
        bytes.checked_next_multiple_of(granularity).ok_or(OUT_OF_MEMORY)
    }
}

/// Takes bytes of a GPU; where there are too few, gives back first what pools only keep in reserve, as the real driver
/// does.
pub(crate) fn charge(driver: &Driver, tables: &mut Tables, gpu: usize, bytes: u64) -> Outcome {
    driver
        .charge(gpu, bytes)
        .or_else(|error| if tables.trim(driver, gpu) { driver.charge(gpu, bytes) } else { Err(error) })
}

/// What an error of the module's means to a program.
pub(crate) fn refused(error: &io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::EINVAL | libc::EBADF) => crate::ffi::INVALID_VALUE,
        _ => crate::ffi::NOT_SUPPORTED,
    }
}

/// Handles of one kind of thing.
pub(crate) struct Registry<T>(HashMap<u64, T>);

impl<T> Default for Registry<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T> Registry<T> {
    pub(crate) fn add(&mut self, thing: T) -> u64 {
        let handle = new_handle();
        self.0.insert(handle, thing);
        handle
    }

    pub(crate) fn get(&mut self, handle: u64, otherwise: Error) -> Outcome<&mut T> {
        self.0.get_mut(&handle).ok_or(otherwise)
    }

    pub(crate) fn remove(&mut self, handle: u64, otherwise: Error) -> Outcome<T> {
        self.0.remove(&handle).ok_or(otherwise)
    }

    pub(crate) fn values(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.values_mut()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.0.iter().map(|(handle, thing)| (*handle, thing))
    }
}

/// Path of this library, as the loader knows it.
fn library() -> PathBuf {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: any address may be asked about; the name it gives lives as long as the library.
    unsafe {
        if libc::dladdr(library as *const c_void, info.as_mut_ptr()) == 0 {
            return PathBuf::new();
        }
        PathBuf::from(CStr::from_ptr(info.assume_init().dli_fname).to_string_lossy().into_owned())
    }
}

/// A number in a page of its own, which every way to make a child process leaves at zero there.
fn wiped_in_children() -> Option<&'static AtomicU32> {
    const PAGE: usize = 4096;
    // SAFETY: a new mapping, which is never unmapped; zeroes are a valid AtomicU32.
    unsafe {
        let at = libc::mmap(
            std::ptr::null_mut(),
            PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        if at == libc::MAP_FAILED || libc::madvise(at, PAGE, libc::MADV_WIPEONFORK) != 0 {
            return None;
        }
        NonNull::new(at.cast::<AtomicU32>()).map(|at| at.as_ref())
    }
}
