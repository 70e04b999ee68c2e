//! NVML's memory limits of cgroups (nvml.h 13.4, drivers from 615 on): for a GPU and a cgroup of version 2, how much its
//! processes may hold together, and how much they do, contexts and modules included. The driver keeps to it whatever a
//! process does, and forgets it with the cgroup. `nvml-wrapper` does not have these two functions; that is all this crate
//! is for. It knows nothing of shares. Its unsafe code is what loads NVML and calls it, which is C.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    os::unix::ffi::OsStrExt,
    path::Path,
};

use libloading::Library;
use thiserror::Error;

/// Why a limit cannot be set or read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LimitsError {
    /// This driver, or this node, has no such thing.
    #[error("{0}")]
    NotOffered(String),
    /// The cgroup has no limit on this GPU.
    #[error("the cgroup has no limit on this GPU")]
    NotSet,
    /// The driver can, and could not.
    #[error("{0}")]
    Failed(String),
}

/// A limit that is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// What the cgroup's processes may hold, in bytes.
    pub bytes: u64,
    /// What they hold, with contexts, modules and all else, in bytes.
    pub used_bytes: u64,
}

/// `nvmlSetMemoryLimits_v1_t`.
#[repr(C)]
struct SetLimits {
    cgroup: *const c_char,
    /// What is kept free for it: nothing. The node has promised no more than there is.
    soft: u64,
    hard: u64,
}

/// `nvmlGetMemoryLimits_v1_t`.
#[repr(C)]
struct GetLimits {
    cgroup: *const c_char,
    soft: u64,
    hard: u64,
    used: u64,
}

/// `nvmlReturn_t`, as far as it is told apart.
mod status {
    pub(super) const SUCCESS: i32 = 0;
    pub(super) const NOT_SUPPORTED: i32 = 3;
    pub(super) const NO_PERMISSION: i32 = 4;
    pub(super) const NOT_FOUND: i32 = 6;
    pub(super) const FUNCTION_NOT_FOUND: i32 = 13;
    pub(super) const OPERATING_SYSTEM: i32 = 17;
}

type Device = *mut c_void;
type NoArguments = unsafe extern "C" fn() -> c_int;
type ByUuid = unsafe extern "C" fn(*const c_char, *mut Device) -> c_int;
type SetFunction = unsafe extern "C" fn(Device, *const SetLimits) -> c_int;
type GetFunction = unsafe extern "C" fn(Device, *mut GetLimits) -> c_int;
type ErrorText = unsafe extern "C" fn(c_int) -> *const c_char;

/// What is called of NVML.
struct Functions {
    init: NoArguments,
    shutdown: NoArguments,
    by_uuid: ByUuid,
    set: SetFunction,
    get: GetFunction,
    error_text: ErrorText,
}

/// NVML, initialised once more in this process for as long as this lives. Where somebody else has it initialised too,
/// as a program has that watches its GPUs, that costs microseconds.
pub struct MemoryLimits {
    nvml: Functions,
    /// Keeps the functions where they are.
    _library: Library,
}

impl MemoryLimits {
    /// Loads and initialises the NVML at `library`.
    ///
    /// # Errors
    ///
    /// [`LimitsError::NotOffered`] where it has no memory limits; else what is wrong with the driver.
    pub fn open(library: &Path) -> Result<Self, LimitsError> {
        let failed = |error: libloading::Error| LimitsError::Failed(error.to_string());
        // SAFETY: the driver's library, whose initialisers are those that every program with NVML runs.
        let library = unsafe { Library::new(library) }.map_err(failed)?;
        // SAFETY: the signatures are those of nvml.h 13.4, and the library stays as long as the functions do.
        let nvml = unsafe {
            if library.get::<SetFunction>(b"nvmlDeviceSetMemoryLimits_v1\0").is_err() {
                return Err(LimitsError::NotOffered(
                    "this driver has no memory limits for cgroups; drivers from 615 on have".into(),
                ));
            }
            Functions {
                init: *library.get(b"nvmlInit_v2\0").map_err(failed)?,
                shutdown: *library.get(b"nvmlShutdown\0").map_err(failed)?,
                by_uuid: *library.get(b"nvmlDeviceGetHandleByUUID\0").map_err(failed)?,
                set: *library.get(b"nvmlDeviceSetMemoryLimits_v1\0").map_err(failed)?,
                get: *library.get(b"nvmlDeviceGetMemoryLimits_v1\0").map_err(failed)?,
                error_text: *library.get(b"nvmlErrorString\0").map_err(failed)?,
            }
        };
        // SAFETY: it takes nothing.
        nvml.check("nvmlInit", unsafe { (nvml.init)() })?;
        Ok(Self { nvml, _library: library })
    }

    /// Has the driver hold the processes of `cgroup` (its folder) to `bytes` of the GPU `uuid`.
    ///
    /// # Errors
    ///
    /// See [`LimitsError`].
    pub fn set(&self, uuid: &str, cgroup: &Path, bytes: u64) -> Result<(), LimitsError> {
        let (device, cgroup) = (self.device(uuid)?, text(cgroup.as_os_str().as_bytes())?);
        let limits = SetLimits { cgroup: cgroup.as_ptr(), soft: 0, hard: bytes };
        // SAFETY: the handle is NVML's, and the structure and its text outlive the call.
        self.nvml.check("nvmlDeviceSetMemoryLimits", unsafe { (self.nvml.set)(device, &raw const limits) })
    }

    /// The limit that `cgroup` (its folder) has on the GPU `uuid`, and what it uses.
    ///
    /// # Errors
    ///
    /// See [`LimitsError`]; [`LimitsError::NotSet`] where it has none.
    pub fn get(&self, uuid: &str, cgroup: &Path) -> Result<Limit, LimitsError> {
        let (device, cgroup) = (self.device(uuid)?, text(cgroup.as_os_str().as_bytes())?);
        let mut limits = GetLimits { cgroup: cgroup.as_ptr(), soft: 0, hard: 0, used: 0 };
        // SAFETY: as above.
        let result = unsafe { (self.nvml.get)(device, &raw mut limits) };
        if result == status::NOT_FOUND {
            return Err(LimitsError::NotSet);
        }
        self.nvml.check("nvmlDeviceGetMemoryLimits", result)?;
        Ok(Limit { bytes: limits.hard, used_bytes: limits.used })
    }

    fn device(&self, uuid: &str) -> Result<Device, LimitsError> {
        let uuid = text(uuid.as_bytes())?;
        let mut device = std::ptr::null_mut();
        // SAFETY: text and handle outlive the call.
        let result = unsafe { (self.nvml.by_uuid)(uuid.as_ptr(), &raw mut device) };
        self.nvml.check("nvmlDeviceGetHandleByUUID", result)?;
        Ok(device)
    }
}

impl Drop for MemoryLimits {
    fn drop(&mut self) {
        // SAFETY: it takes nothing, and was initialised when this was made.
        unsafe { (self.nvml.shutdown)() };
    }
}

impl Functions {
    fn check(&self, call: &str, result: c_int) -> Result<(), LimitsError> {
        let remedy = match result {
            status::SUCCESS => return Ok(()),
            status::NOT_SUPPORTED | status::FUNCTION_NOT_FOUND => {
                return Err(LimitsError::NotOffered(format!(
                    "{call}: {}; this driver or this kernel has no memory limits for cgroups",
                    self.describe(result)
                )));
            }
            status::NO_PERMISSION => "; this process must be root",
            status::OPERATING_SYSTEM => {
                "; the driver needs the container's cgroup, of version 2, at this path"
            }
            _ => "",
        };
        Err(LimitsError::Failed(format!("{call}: {}{remedy}", self.describe(result))))
    }

    /// The driver's words for an error.
    fn describe(&self, result: c_int) -> String {
        // SAFETY: it takes any number.
        let words = unsafe { (self.error_text)(result) };
        if words.is_null() {
            return format!("error {result}");
        }
        // SAFETY: a text of the library, which is loaded.
        unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
    }
}

fn text(bytes: &[u8]) -> Result<CString, LimitsError> {
    CString::new(bytes).map_err(|_| LimitsError::Failed("a path or UUID with a NUL in it".into()))
}
