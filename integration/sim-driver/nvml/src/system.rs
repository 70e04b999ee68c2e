//! The library and the system: start and end, versions, error texts.

use std::{
    ffi::{CStr, c_char, c_void},
    mem::MaybeUninit,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

use sim_gpud::{Connection, root_of};

use crate::{DRIVER_NOT_LOADED, Outcome, UNINITIALIZED, put, put_text, status};

/// What this process has of the driver.
pub(crate) struct Library {
    pub connection: Connection,
    /// GPUs whose device nodes it can open, as the real library has it in a container.
    pub gpus: Vec<usize>,
    started: u32,
}

static LIBRARY: Mutex<Option<Library>> = Mutex::new(None);

fn lock() -> MutexGuard<'static, Option<Library>> {
    LIBRARY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does `work` once NVML was started.
pub(crate) fn with<T>(work: impl FnOnce(&Library) -> Outcome<T>) -> Outcome<T> {
    match &*lock() {
        Some(library) if library.started > 0 => work(library),
        _ => Err(UNINITIALIZED),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> u32 {
    let mut library = lock();
    if let Some(library) = &mut *library {
        library.started += 1;
        return crate::SUCCESS;
    }
    let path = path();
    let root = root_of(&path);
    if !accessible(&root.join("dev/nvidiactl")) {
        return DRIVER_NOT_LOADED;
    }
    let Ok(connection) = Connection::open(&path) else { return DRIVER_NOT_LOADED };
    let gpus = (0..connection.state.gpu_count as usize)
        .filter(|gpu| accessible(&root.join(format!("dev/nvidia{}", connection.state.gpus[*gpu].minor))))
        .collect();
    *library = Some(Library { connection, gpus, started: 1 });
    crate::SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit() -> u32 {
    nvmlInit_v2()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: u32) -> u32 {
    nvmlInit_v2()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> u32 {
    let mut library = lock();
    let Some(known) = &mut *library else { return UNINITIALIZED };
    known.started -= 1;
    if known.started == 0 {
        // Its mapping stays: another thread may still read a name from it.
        *library = None;
    }
    crate::SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetDriverVersion(to: *mut u8, length: u32) -> u32 {
    status(with(|library| put_text(to, length, &library.connection.state.driver_version)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetNVMLVersion(to: *mut u8, length: u32) -> u32 {
    status(with(|library| {
        let version = &library.connection.state.driver_version;
        let end = version.iter().position(|byte| *byte == 0).unwrap_or(0);
        put_text(to, length, &[b"12.", &version[..end]].concat())
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetCudaDriverVersion(to: *mut i32) -> u32 {
    status(with(|library| put(to, library.connection.state.cuda_version)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetCudaDriverVersion_v2(to: *mut i32) -> u32 {
    nvmlSystemGetCudaDriverVersion(to)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetProcessName(pid: u32, to: *mut u8, length: u32) -> u32 {
    let name = std::fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| crate::NOT_FOUND);
    status(name.and_then(|name| {
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        let room = usize::try_from(length.saturating_sub(1)).unwrap_or(0);
        put_text(to, length, &name[..end.min(room)])
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(error: u32) -> *const c_char {
    let text: &'static CStr = match error {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        15 => c"GPU is lost",
        25 => c"Argument version mismatch",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

fn accessible(node: &std::path::Path) -> bool {
    match std::fs::File::options().read(true).write(true).open(node) {
        Ok(_) => true,
        // No kernel module answers behind a simulated node, but it is there and the cgroup permits it.
        Err(error) => matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV)),
    }
}

fn path() -> PathBuf {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: any address may be asked about; the name it gives lives as long as the library.
    unsafe {
        if libc::dladdr(path as *const c_void, info.as_mut_ptr()) == 0 {
            return PathBuf::new();
        }
        PathBuf::from(CStr::from_ptr(info.assume_init().dli_fname).to_string_lossy().into_owned())
    }
}
