//! Initialisation, and contexts: what is allocated in a context dies with it.

use std::ffi::c_int;

use crate::{
    cuda::{
        arguments::Out,
        binding, graph, pool,
        stream::{self, End},
        take,
        types::{
            CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_SYSTEM_NOT_READY, CUDA_SUCCESS, Context, Device, Result,
        },
        whole,
    },
    errno,
    lock::Guard,
    pace,
    real::driver,
    share::{Block, PartOf, Place, Share, share},
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

/// The context that is current for the calling thread, if there is one.
#[inline]
pub(crate) fn current_context() -> Option<Context> {
    let mut context: Context = 0;
    // SAFETY: `context` outlives the call.
    let result = unsafe { driver!(cuda::cuCtxGetCurrent(&raw mut context => *mut Context)) };
    (result == CUDA_SUCCESS && context != 0).then_some(context)
}

/// Does something while `context` is current, and leaves current what was.
pub(crate) fn with_current(context: Context, act: impl FnOnce()) {
    let mut current = current_context().unwrap_or(0);
    if current == context {
        return act();
    }
    // SAFETY: a context that is in use, current for the moment; `current` outlives the call.
    unsafe {
        if driver!(cuda::cuCtxPushCurrent_v2(context => Context)) == CUDA_SUCCESS {
            act();
            driver!(cuda::cuCtxPopCurrent_v2(&raw mut current => *mut Context));
        }
    }
}

/// Has the driver destroy `context`, and its streams with it. It is forgotten first: once destroyed, another thread may get the
/// same address. `is_gone` says from the result whether it is; then `then` gets the place that it had.
fn end(
    context: Context,
    call: impl FnOnce() -> Result,
    is_gone: impl FnOnce(Result) -> bool,
    then: impl FnOnce(&'static Share, Place),
) -> Result {
    let Some(share) = share() else { return call() };
    if context != 0 {
        pace::forget_context(context);
    }
    graph::forget_context(context);
    pool::begin_end(share, context);
    binding::begin_end(share, context);
    let place = share.forget_context(context);
    let (result, is_gone) = {
        // With it ends what is captured in its streams.
        let _captured = stream::end_capture();
        let result = call();
        (result, is_gone(result))
    };
    let _kept = errno::Keep::new();
    let how = if is_gone { End::Gone } else { End::Not };
    pool::end(share, context, how);
    binding::end(share, context, how);
    if let Some(place) = place {
        if is_gone {
            then(share, place);
        } else {
            share.remember_context(context, place);
        }
    }
    result
}

/// Has the driver destroy `context`, with all that was allocated in it, as far as `is_gone` says so from the result.
fn destroy(context: Context, call: impl FnOnce() -> Result, is_gone: impl FnOnce(Result) -> bool) -> Result {
    end(context, call, is_gone, |share, place| share.give_all_of(place))
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

/// No primary context is made or torn down elsewhere until what this gives is dropped.
fn change_primary() -> Option<Guard<'static, ()>> {
    share().map(|share| share.state().primary_changing.lock())
}

/// A device as a key: never 0.
fn key_of(device: Device) -> u64 {
    u64::from(device.cast_unsigned()) + 1
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut Context, device: Device) -> Result {
    // SAFETY: null or the application's.
    let context = unsafe { Out::new(context) };
    let _changed = change_primary();
    // SAFETY: the arguments are the application's, for the driver to judge.
    let result =
        unsafe { driver!(cuda::cuDevicePrimaryCtxRetain(context.room() => *mut Context, device => Device)) };
    if result == CUDA_SUCCESS
        && let Some(share) = share()
    {
        let _ = share.state().primary_contexts.insert(key_of(device), context.value());
    }
    context.hand_over(result)
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
            // The last of several releases tears it down, and the next one who asks for it gets another.
            let _changed = change_primary();
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
                graph::reset(device);
            }
            result
        }
    };
}
resets_primary!(cuDevicePrimaryCtxReset);
resets_primary!(cuDevicePrimaryCtxReset_v2);

// CUlimit. What others take is told nowhere; it counts when the driver shows it.
const STACK_SIZE: u32 = 0;
const PRINTF_FIFO_SIZE: u32 = 1;
const MALLOC_HEAP_SIZE: u32 = 2;

/// Bytes of its GPU that the current context takes for `limit` set to `value`, beyond those that every context has for it, which
/// no call shows.
fn taken_for(limit: u32, value: usize, device: Device) -> u64 {
    // What drivers begin with; a stack is one a thread that the GPU can have at a time.
    let (begins_with, each) = match limit {
        STACK_SIZE => (1 << 10, threads(device)),
        PRINTF_FIFO_SIZE => (1 << 20, 1),
        MALLOC_HEAP_SIZE => (8 << 20, 1),
        _ => return 0,
    };
    whole((value as u64).saturating_sub(begins_with).saturating_mul(each))
}

/// Threads that a GPU can have at a time.
fn threads(device: Device) -> u64 {
    // CUdevice_attribute: multiprocessors, threads on each of them.
    [16, 39].into_iter().fold(1, |product, attribute| {
        let mut value: c_int = 0;
        // SAFETY: `value` outlives the call.
        unsafe {
            driver!(cuda::cuDeviceGetAttribute(
                &raw mut value => *mut c_int, attribute => c_int, device => Device,
            ));
        }
        product * u64::try_from(value).unwrap_or(0)
    })
}

/// Stacks, the heap of kernels and what they print lie in the GPU's memory, as large as this says.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxSetLimit(limit: u32, value: usize) -> Result {
    // SAFETY: the arguments are the application's, for the driver to judge.
    let call = || unsafe { driver!(cuda::cuCtxSetLimit(limit => u32, value => usize)) };
    if limit > MALLOC_HEAP_SIZE {
        return call();
    }
    let Some(share) = share() else { return CUDA_ERROR_SYSTEM_NOT_READY };
    let current = current_context().unwrap_or(0);
    let Some(Place { gpu: Some(gpu), context, device }) = share.here() else { return call() };
    // Among arrays, which go with their context too; no handle of one is the address of a context and a bit.
    let (blocks, key) = (&share.state().arrays, current + 1 + u64::from(limit));
    let _setting = share.state().limits_setting.lock();
    let had = blocks.get(key).map_or(0, |word| Block::unpack(word).bytes);
    let wanted = taken_for(limit, value, device);
    if wanted > had && !take(share, gpu, wanted - had) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    let result = call();
    let mut has = had;
    if result == CUDA_SUCCESS {
        let mut value = value;
        // SAFETY: `value` outlives the call.
        unsafe { driver!(cuda::cuCtxGetLimit(&raw mut value => *mut usize, limit => u32)) };
        has = taken_for(limit, value, device);
        let block = Block { bytes: has, gpu, part_of: PartOf::Context(context), exported: false };
        let _ = blocks.insert(key, block.pack());
    }
    let taken = wanted.max(had);
    if has > taken {
        // The driver has rounded it up.
        share.charge(gpu, has - taken);
    } else {
        share.give(gpu, taken - has);
    }
    result
}

/// A green context has a context of its own, and takes it along; what was allocated there stays, as the device's primary
/// context does.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGreenCtxDestroy(green: Context) -> Result {
    // SAFETY: the argument is the application's, for the driver to judge.
    let call = || unsafe { driver!(cuda::cuGreenCtxDestroy(green => Context)) };
    let mut context = 0;
    // SAFETY: as above; `context` outlives the call.
    let known =
        unsafe { driver!(cuda::cuCtxFromGreenCtx(&raw mut context => *mut Context, green => Context)) };
    if known != CUDA_SUCCESS || context == 0 {
        return call();
    }
    end(
        context,
        call,
        |result| result == CUDA_SUCCESS,
        |share, place| {
            let heir = primary(place.device);
            share.hand_over(place, if heir == 0 { 0 } else { share.place_of(heir, place.device).context });
        },
    )
}
