//! The library and the system: start and end, versions, error texts.

use std::{
    ffi::{CStr, c_int, c_void},
    fs, io,
    mem::MaybeUninit,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sim_gpud::{
    link::Link,
    stamp::Stamp,
    state::{self, State},
};

use crate::ffi::{
    DRIVER_NOT_LOADED, INVALID_VALUE, Kept, LIB_RM_VERSION_MISMATCH, NO_PERMISSION, NOT_FOUND, Out, Outcome,
    UNINITIALIZED, UNKNOWN, api, describe, put_text,
};

/// What a started library has of the driver.
pub(crate) struct Library {
    pub link: Link,
    /// GPUs whose device nodes the process may open: the real library, too, has only those.
    pub gpus: Vec<usize>,
}

impl Library {
    pub(crate) fn state(&self) -> &State {
        &self.link.state
    }
}

/// The started library, and how often it was started.
static STARTED: Mutex<Option<(Arc<Library>, u32)>> = Mutex::new(None);

fn started() -> MutexGuard<'static, Option<(Arc<Library>, u32)>> {
    STARTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The library, once it was started.
pub(crate) fn library() -> Outcome<Arc<Library>> {
    started().as_ref().map(|(library, _)| Arc::clone(library)).ok_or(UNINITIALIZED)
}

fn start() -> Outcome {
    let mut started = started();
    if let Some((_, times)) = &mut *started {
        *times += 1;
        return Ok(());
    }
    let link = Link::nvml(&path()).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => DRIVER_NOT_LOADED,
        io::ErrorKind::PermissionDenied => NO_PERMISSION,
        _ => UNKNOWN,
    })?;
    // No control node in a container is to the real library as no driver.
    link.node("nvidiactl").map_err(|_| DRIVER_NOT_LOADED)?;
    if state::text(&link.state.driver) != Stamp::own().driver {
        return Err(LIB_RM_VERSION_MISMATCH);
    }
    let gpus = link.accessible();
    *started = Some((Arc::new(Library { link, gpus }), 1));
    Ok(())
}

api! {
    fn nvmlInit, nvmlInit_v2() { start() }

    fn nvmlInitWithFlags(flags: u32) {
        let _ = flags;
        start()
    }

    fn nvmlShutdown() {
        let mut started = started();
        match &mut *started {
            None => return Err(UNINITIALIZED),
            Some((_, times)) if *times > 1 => *times -= 1,
            Some(_) => *started = None,
        }
        Ok(())
    }

    fn nvmlSystemGetDriverVersion(to: Out<u8>, length: u32) {
        put_text(to, length, state::text(&library()?.state().driver).as_bytes())
    }

    // Works before nvmlInit.
    fn nvmlSystemGetNVMLVersion(to: Out<u8>, length: u32) {
        let Stamp { driver, cuda } = Stamp::own();
        put_text(to, length, format!("{}.{driver}", cuda / 1000).as_bytes())
    }

    fn nvmlSystemGetCudaDriverVersion, nvmlSystemGetCudaDriverVersion_v2(to: Out<c_int>) {
        // Works before nvmlInit.
        to.put(Stamp::own().cuda)
    }

    fn nvmlSystemGetProcessName(pid: u32, to: Out<u8>, length: u32) {
        library()?;
        let line = fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| NOT_FOUND)?;
        let name = line.split(|byte| *byte == 0).next().unwrap_or_default();
        if length == 0 {
            return Err(INVALID_VALUE);
        }
        put_text(to, length, &name[..name.len().min(length as usize - 1)])
    }

    fn nvmlSystemGetHicVersion(count: Out<u32>, entries: *const c_void) {
        let _ = entries;
        library()?;
        count.put(0)
    }

    fn nvmlGetExcludedDeviceCount(count: Out<u32>) { count.put(0) }

    fn nvmlUnitGetCount(count: Out<u32>) {
        library()?;
        count.put(0)
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(error: c_int) -> Kept {
    describe(error).as_ptr()
}

/// Path of this library, as the loader knows it.
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
