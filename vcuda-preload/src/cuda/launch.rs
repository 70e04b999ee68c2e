//! Launches of kernels, by all doors. Each waits for its turn; what the driver answers is what the caller gets.

use std::ffi::{c_int, c_uint, c_void};

use crate::{
    cuda::types::{Result, Stream},
    jump::launches,
    pace::{self, In, Turn},
    real::driver,
};

/// `CUfunction`, or a `CUkernel` in its place: a pointer that is never followed here, so a number.
type Function = u64;

/// Grid, block, and bytes of shared memory.
type Extent = c_uint;

macro_rules! kernels {
    ($($symbol:ident, $held:ident in $stream:path, ($($more:ident: $type:ty),*);)*) => { $(
        launches!($symbol, $held);

        unsafe extern "C" fn $held(
            function: Function,
            grid_x: Extent, grid_y: Extent, grid_z: Extent,
            block_x: Extent, block_y: Extent, block_z: Extent,
            shared: Extent,
            stream: Stream,
            $($more: $type),*
        ) -> Result {
            // SAFETY: the arguments are the application's, for the driver to judge.
            pace::launch(function, $stream(stream), || unsafe {
                driver!(cuda::$symbol(
                    function => Function, grid_x => Extent, grid_y => Extent, grid_z => Extent,
                    block_x => Extent, block_y => Extent, block_z => Extent, shared => Extent, stream => Stream,
                    $($more => $type),*
                ))
            })
        }
    )* };
}
kernels! {
    cuLaunchKernel, hold_kernel in In::legacy, (parameters: *mut c_void, extra: *mut c_void);
    cuLaunchKernel_ptsz, hold_kernel_ptsz in In::per_thread, (parameters: *mut c_void, extra: *mut c_void);
    cuLaunchCooperativeKernel, hold_cooperative in In::legacy, (parameters: *mut c_void);
    cuLaunchCooperativeKernel_ptsz, hold_cooperative_ptsz in In::per_thread, (parameters: *mut c_void);
}

/// Beginning of `CUlaunchConfig`.
#[repr(C)]
pub(crate) struct Config {
    extents: [Extent; 7],
    stream: Stream,
}
const _: () = assert!(std::mem::offset_of!(Config, stream) == 32);

macro_rules! kernels_ex {
    ($($symbol:ident, $held:ident in $stream:path;)*) => { $(
        launches!($symbol, $held);

        unsafe extern "C" fn $held(
            config: *const Config,
            function: Function,
            parameters: *mut c_void,
            extra: *mut c_void,
        ) -> Result {
            // SAFETY: the arguments are the application's, for the driver to judge.
            let call = || unsafe {
                driver!(cuda::$symbol(
                    config => *const Config, function => Function, parameters => *mut c_void, extra => *mut c_void,
                ))
            };
            // SAFETY: null or the application's.
            let Some(config) = (unsafe { config.as_ref() }) else { return call() };
            pace::launch(function, $stream(config.stream), call)
        }
    )* };
}
kernels_ex! {
    cuLaunchKernelEx, hold_kernel_ex in In::legacy;
    cuLaunchKernelEx_ptsz, hold_kernel_ex_ptsz in In::per_thread;
}

/// `CUDA_LAUNCH_PARAMS`.
#[repr(C)]
pub(crate) struct Parameters {
    function: Function,
    extents: [Extent; 7],
    stream: Stream,
    parameters: *mut c_void,
}
const _: () = assert!(size_of::<Parameters>() == 56);

/// Devices of one launch; the driver allows as many as there are.
const DEVICES: usize = 64;

/// One kernel on several devices, which begins on all of them or on none.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLaunchCooperativeKernelMultiDevice(
    list: *mut Parameters,
    count: c_uint,
    flags: c_uint,
) -> Result {
    let given = usize::try_from(count).unwrap_or(0);
    let launches: &[Parameters] = if list.is_null() || given > DEVICES {
        &[]
    } else {
        // SAFETY: the application says that there are so many.
        unsafe { std::slice::from_raw_parts(list, given) }
    };
    let mut turns = [const { Turn::Free }; DEVICES];
    for (turn, launch) in turns.iter_mut().zip(launches) {
        *turn = pace::await_turn(launch.function, In::legacy(launch.stream));
    }
    // SAFETY: the arguments are the application's, for the driver to judge.
    let result = unsafe {
        driver!(cuda::cuLaunchCooperativeKernelMultiDevice(
            list => *mut Parameters, count => c_uint, flags => c_uint,
        ))
    };
    turns.into_iter().for_each(|turn| turn.over(result));
    result
}

// ---- of CUDA 2.0 ----------------------------------------------------------------------------------------------------

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLaunch(function: Function) -> Result {
    // SAFETY: the argument is the application's, for the driver to judge.
    pace::launch(function, In::legacy(0), || unsafe { driver!(cuda::cuLaunch(function => Function)) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLaunchGrid(function: Function, width: c_int, height: c_int) -> Result {
    // SAFETY: the arguments are the application's, for the driver to judge.
    pace::launch(function, In::legacy(0), || unsafe {
        driver!(cuda::cuLaunchGrid(function => Function, width => c_int, height => c_int))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLaunchGridAsync(
    function: Function,
    width: c_int,
    height: c_int,
    stream: Stream,
) -> Result {
    // SAFETY: the arguments are the application's, for the driver to judge.
    pace::launch(function, In::legacy(stream), || unsafe {
        driver!(cuda::cuLaunchGridAsync(
            function => Function, width => c_int, height => c_int, stream => Stream,
        ))
    })
}
