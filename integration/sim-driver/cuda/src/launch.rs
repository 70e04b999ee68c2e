//! Launches of kernels, by all ways. What a kernel computes is not simulated, only the time that it takes.

use std::ffi::{c_int, c_void};

use crate::{
    ffi::{INVALID_VALUE, In, Outcome, api},
    stream::{Operation, Stream, submit},
};

/// Threads of a block at most, on every GPU here.
const MAX_THREADS: u64 = 1024;

/// `CUlaunchConfig`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Configuration {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: u64,
    attributes: *const c_void,
    count: u32,
}

/// `CUDA_LAUNCH_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Parameters {
    function: u64,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: u64,
    parameters: *const c_void,
}

/// A kernel with its threads, if that can be launched.
pub(crate) fn kernel(function: u64, grid: [u32; 3], block: [u32; 3]) -> Outcome<Operation> {
    let count =
        |dimensions: [u32; 3]| dimensions.iter().try_fold(1_u64, |all, one| all.checked_mul((*one).into()));
    let (blocks, threads) = (count(grid).ok_or(INVALID_VALUE)?, count(block).ok_or(INVALID_VALUE)?);
    if blocks == 0 || threads == 0 || threads > MAX_THREADS || block[2] > 64 {
        return Err(INVALID_VALUE);
    }
    let duration = crate::driver::tables()?.modules.duration(function)?;
    Ok(Operation::Kernel { threads: blocks.saturating_mul(threads), duration })
}

fn launch(function: u64, grid: [u32; 3], block: [u32; 3], stream: Stream) -> Outcome {
    stream.context()?;
    submit(stream, kernel(function, grid, block)?)
}

api! {
    fn cuLaunchKernel, cuLaunchKernel_ptsz(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared_bytes: u32, stream: u64, parameters: *const c_void, extra: *const c_void,
    ) {
        let _ = (shared_bytes, parameters, extra);
        launch(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], Stream::new(stream, PER_THREAD))
    }

    fn cuLaunchKernelEx, cuLaunchKernelEx_ptsz(
        configuration: In<Configuration>, function: u64, parameters: *const c_void, extra: *const c_void
    ) {
        let _ = (parameters, extra);
        let Configuration { grid, block, stream, .. } = configuration.get()?;
        launch(function, grid, block, Stream::new(stream, PER_THREAD))
    }

    fn cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared_bytes: u32, stream: u64, parameters: *const c_void,
    ) {
        let _ = (shared_bytes, parameters);
        launch(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], Stream::new(stream, PER_THREAD))
    }

    fn cuLaunchCooperativeKernelMultiDevice(list: In<Parameters>, count: u32, flags: u32) {
        if count == 0 || flags & !3 != 0 {
            return Err(INVALID_VALUE);
        }
        for at in 0..count as usize {
            let Parameters { function, grid, block, stream, .. } = list.get_at(at)?;
            launch(function, grid, block, Stream::new(stream, false))?;
        }
        Ok(())
    }

    // The way of CUDA before 4.0: the shape of a block is the function's.
    fn cuFuncSetBlockShape(function: u64, x: c_int, y: c_int, z: c_int) {
        let shape = [x, y, z].map(|length| u32::try_from(length).unwrap_or(0));
        crate::driver::tables()?.modules.set_block(function, shape)
    }

    fn cuFuncSetSharedSize(function: u64, bytes: u32) {
        let _ = bytes;
        crate::driver::tables()?.modules.launchable(function)
    }

    fn cuParamSetSize, cuParamSetTexRef(function: u64, bytes: u32) {
        let _ = bytes;
        crate::driver::tables()?.modules.launchable(function)
    }

    fn cuParamSeti(function: u64, offset: c_int, value: u32) {
        let _ = (offset, value);
        crate::driver::tables()?.modules.launchable(function)
    }

    fn cuParamSetf(function: u64, offset: c_int, value: f32) {
        let _ = (offset, value);
        crate::driver::tables()?.modules.launchable(function)
    }

    fn cuParamSetv(function: u64, offset: c_int, value: *const c_void, bytes: u32) {
        let _ = (offset, value, bytes);
        crate::driver::tables()?.modules.launchable(function)
    }

    fn cuLaunch(function: u64) {
        let block = crate::driver::tables()?.modules.block(function)?;
        launch(function, [1; 3], block, Stream::new(0, false))
    }

    fn cuLaunchGrid(function: u64, width: c_int, height: c_int) {
        legacy(function, width, height, Stream::new(0, false))
    }

    fn cuLaunchGridAsync(function: u64, width: c_int, height: c_int, stream: u64) {
        legacy(function, width, height, Stream::new(stream, false))
    }
}

fn legacy(function: u64, width: c_int, height: c_int, stream: Stream) -> Outcome {
    let block = crate::driver::tables()?.modules.block(function)?;
    let length = |length| u32::try_from(length).map_err(|_| INVALID_VALUE);
    launch(function, [length(width)?, length(height)?, 1], block, stream)
}
