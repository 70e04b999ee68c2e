//! Initialisation, and contexts: what is allocated in a context dies with it.

use std::ffi::c_int;

use crate::{
    cuda::{
        pool,
        types::{CUDA_ERROR_SYSTEM_NOT_READY, CUDA_SUCCESS, Context, Device, Result},
    },
    errno, pace,
    real::driver,
    share::{Share, share},
};

/// Where the share cannot be kept, there is no CUDA: the driver is not even asked.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuInit(flags: u32) -> Result {
    if !share().is_some_and(Share::is_ready) {
        return CUDA_ERROR_SYSTEM_NOT_READY;
    }
    // SAFETY: the argument is the application's, for the driver to judge.
    unsafe { driver!(cuda::cuInit(flags => u32)) }
}

/// Has the driver destroy `context`, which is forgotten first: once destroyed, another thread may get the same address.
/// `destroyed` says from the result whether it was.
fn destroy(
    context: Context,
    call: impl FnOnce() -> Result,
    destroyed: impl FnOnce(Result) -> bool,
) -> Result {
    let Some(share) = share() else { return call() };
    if context != 0 {
        pace::forget_context(context);
    }
    let place = share.forget_context(context);
    let result = call();
    if let Some(place) = place {
        let _kept = errno::Keep::new();
        if destroyed(result) {
            share.give_all_of(place);
        } else {
            share.remember_context(context, place);
        }
    }
    result
}

macro_rules! destroys {
    ($symbol:ident) => {
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(context: Context) -> Result {
            // SAFETY: the argument is the application's, for the driver to judge.
            let call = || unsafe { driver!(cuda::$symbol(context => Context)) };
            destroy(context, call, |result| result == CUDA_SUCCESS)
        }
    };
}
destroys!(cuCtxDestroy);
destroys!(cuCtxDestroy_v2);

/// Gives up one of several uses of a context; the last one destroys it.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxDetach(context: Context) -> Result {
    // SAFETY: the argument is the application's, for the driver to judge.
    let call = || unsafe { driver!(cuda::cuCtxDetach(context => Context)) };
    destroy(context, call, |result| {
        let mut version = 0;
        // SAFETY: the driver tells its contexts from anything else; `version` outlives the call.
        let alive =
            unsafe { driver!(cuda::cuCtxGetApiVersion(context => Context, &raw mut version => *mut u32)) };
        result == CUDA_SUCCESS && alive != CUDA_SUCCESS
    })
}

/// The primary context that `device` has, or had when the application last asked for it; 0 if it never did.
fn primary(device: Device) -> Context {
    share().and_then(|share| share.state().primary_contexts.get(key_of(device))).unwrap_or(0)
}

/// A device as a key: never 0.
fn key_of(device: Device) -> u64 {
    u64::from(device.cast_unsigned()) + 1
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut Context, device: Device) -> Result {
    // SAFETY: the arguments are the application's, for the driver to judge.
    let result =
        unsafe { driver!(cuda::cuDevicePrimaryCtxRetain(context => *mut Context, device => Device)) };
    if result == CUDA_SUCCESS
        && let Some(share) = share()
    {
        // SAFETY: written on success.
        let _ = share.state().primary_contexts.insert(key_of(device), unsafe { *context });
    }
    result
}

/// Whether the driver has torn the primary context of `device` down.
fn is_torn_down(device: Device) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: both outlive the call.
    let asked = unsafe {
        driver!(cuda::cuDevicePrimaryCtxGetState(
            device => Device, &raw mut flags => *mut u32, &raw mut active => *mut c_int,
        ))
    };
    asked == CUDA_SUCCESS && active == 0
}

macro_rules! releases_primary {
    ($symbol:ident) => {
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(device: Device) -> Result {
            // SAFETY: the argument is the application's, for the driver to judge.
            let call = || unsafe { driver!(cuda::$symbol(device => Device)) };
            // The last of several releases tears it down.
            destroy(primary(device), call, |result| result == CUDA_SUCCESS && is_torn_down(device))
        }
    };
}
releases_primary!(cuDevicePrimaryCtxRelease);
releases_primary!(cuDevicePrimaryCtxRelease_v2);

macro_rules! resets_primary {
    ($symbol:ident) => {
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(device: Device) -> Result {
            // SAFETY: the argument is the application's, for the driver to judge.
            let call = || unsafe { driver!(cuda::$symbol(device => Device)) };
            let result = destroy(primary(device), call, |result| result == CUDA_SUCCESS);
            if result == CUDA_SUCCESS
                && let Some(share) = share()
            {
                pool::reset(share, share.gpu_of_device(device));
            }
            result
        }
    };
}
resets_primary!(cuDevicePrimaryCtxReset);
resets_primary!(cuDevicePrimaryCtxReset_v2);

/// A green context has a context of its own, and takes it along.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGreenCtxDestroy(green: Context) -> Result {
    let mut context = 0;
    // SAFETY: the argument is the application's, for the driver to judge; `context` outlives the call.
    unsafe {
        if driver!(cuda::cuCtxFromGreenCtx(&raw mut context => *mut Context, green => Context))
            == CUDA_SUCCESS
        {
            pace::forget_context(context);
        }
        driver!(cuda::cuGreenCtxDestroy(green => Context))
    }
}
