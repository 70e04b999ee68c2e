//! The connection to the kernel module, and which GPUs this process may use.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::{CStr, c_void},
    mem::MaybeUninit,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

use sim_gpud::{Connection, Gpu, MAX_GPUS, root_of};

use crate::{INVALID_DEVICE, NO_DEVICE, NOT_INITIALIZED, OUT_OF_MEMORY, Outcome};

/// What this process has of the driver.
pub(crate) struct Driver {
    pub connection: Connection,
    /// The process's devices: indices of the module's GPUs.
    pub devices: Vec<usize>,
    /// Contexts a device: the first takes its memory.
    pub contexts: [u32; MAX_GPUS],
    /// Primary contexts' reference counts.
    pub primary: [u32; MAX_GPUS],
    /// Blocks of memory by address: bytes asked, bytes taken, GPU (none for the host).
    pub blocks: BTreeMap<u64, Block>,
    /// What other handles stand for.
    pub handles: HashMap<u64, Block>,
    next: u64,
}

/// One allocation.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    pub bytes: u64,
    pub taken: u64,
    pub gpu: Option<usize>,
}

static DRIVER: Mutex<Option<Driver>> = Mutex::new(None);

/// The driver rounds every block up to this.
pub(crate) const GRANULE: u64 = 512;

/// Device addresses start here.
const FIRST_ADDRESS: u64 = 0x7f00_0000_0000;

pub(crate) fn lock() -> MutexGuard<'static, Option<Driver>> {
    DRIVER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does `work` with the driver, once `cuInit` was called.
pub(crate) fn with<T>(work: impl FnOnce(&mut Driver) -> Outcome<T>) -> Outcome<T> {
    work(lock().as_mut().ok_or(NOT_INITIALIZED)?)
}

/// `cuInit`.
pub(crate) fn init() -> Outcome {
    let mut driver = lock();
    if driver.is_some() {
        return Ok(());
    }
    let library = library();
    let root = root_of(&library);
    if !accessible(&root.join("dev/nvidiactl")) {
        return Err(NO_DEVICE);
    }
    let connection = Connection::open(&library).map_err(|_| NO_DEVICE)?;
    let count = connection.state.gpu_count as usize;
    let present: Vec<usize> = (0..count)
        .filter(|gpu| accessible(&root.join(format!("dev/nvidia{}", connection.state.gpus[*gpu].minor))))
        .collect();
    let devices = visible(&connection.state.gpus, present, std::env::var("CUDA_VISIBLE_DEVICES").ok());
    if devices.is_empty() {
        return Err(NO_DEVICE);
    }
    *driver = Some(Driver {
        connection,
        devices,
        contexts: [0; MAX_GPUS],
        primary: [0; MAX_GPUS],
        blocks: BTreeMap::new(),
        handles: HashMap::new(),
        next: FIRST_ADDRESS,
    });
    // SAFETY: the handler only closes a descriptor and forgets.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    Ok(())
}

/// A child has no context of its parent's. It closes the connection, or the daemon would not see the parent's end.
unsafe extern "C" fn in_child() {
    if let Ok(mut driver) = DRIVER.try_lock()
        && let Some(driver) = driver.take()
    {
        // SAFETY: the child's own copy of the descriptor.
        unsafe { libc::close(driver.connection.fd()) };
        std::mem::forget(driver);
    }
}

/// No kernel module answers behind a simulated node: opening it fails with ENXIO or ENODEV where the node is there and
/// the cgroup permits it, and otherwise when not.
fn accessible(node: &std::path::Path) -> bool {
    match std::fs::File::options().read(true).write(true).open(node) {
        Ok(_) => true,
        Err(error) => matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV)),
    }
}

/// `CUDA_VISIBLE_DEVICES`: indices or UUIDs (or their beginnings), in the order wanted, up to the first that is
/// none.
fn visible(gpus: &[Gpu], present: Vec<usize>, wish: Option<String>) -> Vec<usize> {
    let Some(wish) = wish else { return present };
    let mut devices = Vec::new();
    for part in wish.split(',').map(str::trim) {
        let found = if let Ok(index) = part.parse::<usize>() {
            present.get(index).copied()
        } else if part.starts_with("GPU-") {
            let mut found = present.iter().filter(|gpu| uuid_text(&gpus[**gpu].uuid).starts_with(part));
            found.next().copied().filter(|_| found.next().is_none())
        } else {
            None
        };
        match found {
            Some(gpu) if !devices.contains(&gpu) => devices.push(gpu),
            Some(_) => return vec![],
            None => break,
        }
    }
    devices
}

/// A UUID as NVML prints it.
pub(crate) fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Path of this library.
fn library() -> PathBuf {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: any address may be asked about; the name it gives lives as long as the library.
    unsafe {
        if libc::dladdr(init as *const c_void, info.as_mut_ptr()) == 0 {
            return PathBuf::new();
        }
        let name = CStr::from_ptr(info.assume_init().dli_fname);
        PathBuf::from(name.to_string_lossy().into_owned())
    }
}

impl Driver {
    /// The module's GPU behind a device of this process.
    pub fn gpu(&self, device: i32) -> Outcome<usize> {
        usize::try_from(device).ok().and_then(|at| self.devices.get(at)).copied().ok_or(INVALID_DEVICE)
    }

    /// The facts of a GPU.
    pub fn facts(&self, gpu: usize) -> &Gpu {
        &self.connection.state.gpus[gpu]
    }

    /// Takes memory of a GPU.
    pub fn take(&self, gpu: usize, bytes: u64) -> Outcome {
        self.connection.state.take(self.connection.slot, gpu, bytes).then_some(()).ok_or(OUT_OF_MEMORY)
    }

    /// Gives it back.
    pub fn give(&self, gpu: usize, bytes: u64) {
        self.connection.state.give(self.connection.slot, gpu, bytes);
    }

    /// Notes one more context of a GPU; the first takes its memory.
    pub fn enter(&mut self, gpu: usize) -> Outcome {
        if self.contexts[gpu] == 0 {
            self.take(gpu, self.facts(gpu).context)?;
        }
        self.contexts[gpu] += 1;
        Ok(())
    }

    /// Notes one less.
    pub fn leave(&mut self, gpu: usize) {
        self.contexts[gpu] = self.contexts[gpu].saturating_sub(1);
        if self.contexts[gpu] == 0 {
            self.give(gpu, self.facts(gpu).context);
        }
    }

    /// A new number for a handle or a block of so many bytes.
    pub fn number(&mut self, bytes: u64) -> u64 {
        let number = self.next;
        self.next += bytes.next_multiple_of(2 << 20) + (2 << 20);
        number
    }

    /// Free bytes of a GPU.
    pub fn free(&self, gpu: usize) -> u64 {
        self.facts(gpu).total.saturating_sub(self.connection.state.used(gpu))
    }
}
