//! Contexts: primary ones, created ones, and each thread's stack of them.

use std::cell::RefCell;

use crate::{
    INVALID_CONTEXT, NOT_INITIALIZED, Outcome,
    driver::{self, with},
    put, status,
};

/// A context's handle: where its device stands, with a generation for created ones.
type Context = u64;

/// Handles of primary contexts: this and the GPU.
const PRIMARY: u64 = 0x1000;

/// Handles of created ones: this, a number, and the GPU in the last four bits.
const CREATED: u64 = 0x1_0000;

thread_local! {
    static STACK: RefCell<Vec<Context>> = const { RefCell::new(Vec::new()) };
}

/// The GPU of a context.
fn gpu_of(context: Context) -> usize {
    usize::try_from(context & 15).unwrap_or(0)
}

/// The GPU of this thread's current context.
pub(crate) fn current() -> Outcome<usize> {
    if driver::lock().is_none() {
        return Err(NOT_INITIALIZED);
    }
    STACK
        .with_borrow(|stack| stack.last().copied().filter(|context| *context != 0).map(gpu_of))
        .ok_or(INVALID_CONTEXT)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(context: *mut Context, device: i32) -> i32 {
    status(with(|driver| {
        let gpu = driver.gpu(device)?;
        if driver.primary[gpu] == 0 {
            driver.enter(gpu)?;
        }
        driver.primary[gpu] += 1;
        put(context, PRIMARY + gpu as u64)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: i32) -> i32 {
    status(with(|driver| {
        let gpu = driver.gpu(device)?;
        match driver.primary[gpu] {
            0 => return Err(INVALID_CONTEXT),
            1 => driver.leave(gpu),
            _ => {}
        }
        driver.primary[gpu] -= 1;
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease(device: i32) -> i32 {
    cuDevicePrimaryCtxRelease_v2(device)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxReset_v2(device: i32) -> i32 {
    status(with(|driver| {
        let gpu = driver.gpu(device)?;
        let given: u64 =
            driver.blocks.values().filter(|block| block.gpu == Some(gpu)).map(|block| block.taken).sum();
        driver.blocks.retain(|_, block| block.gpu != Some(gpu));
        driver.give(gpu, given);
        if driver.primary[gpu] > 0 {
            driver.primary[gpu] = 0;
            driver.leave(gpu);
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxReset(device: i32) -> i32 {
    cuDevicePrimaryCtxReset_v2(device)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxSetFlags_v2(device: i32, _flags: u32) -> i32 {
    status(with(|driver| driver.gpu(device).map(drop)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxSetFlags(device: i32, flags: u32) -> i32 {
    cuDevicePrimaryCtxSetFlags_v2(device, flags)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32) -> i32 {
    status(with(|driver| {
        let gpu = driver.gpu(device)?;
        put(flags, 0)?;
        put(active, i32::from(driver.primary[gpu] > 0))
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxCreate_v2(context: *mut Context, _flags: u32, device: i32) -> i32 {
    status(with(|driver| {
        let gpu = driver.gpu(device)?;
        driver.enter(gpu)?;
        let handle = CREATED + (driver.number(0) << 4) + gpu as u64;
        STACK.with_borrow_mut(|stack| stack.push(handle));
        put(context, handle)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxCreate(context: *mut Context, flags: u32, device: i32) -> i32 {
    cuCtxCreate_v2(context, flags, device)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxCreate_v3(
    context: *mut Context,
    _affinity: *const u8,
    _count: i32,
    flags: u32,
    device: i32,
) -> i32 {
    cuCtxCreate_v2(context, flags, device)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDestroy_v2(context: Context) -> i32 {
    if context < CREATED {
        return INVALID_CONTEXT;
    }
    STACK.with_borrow_mut(|stack| stack.retain(|other| *other != context));
    status(with(|driver| {
        driver.leave(gpu_of(context));
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDestroy(context: Context) -> i32 {
    cuCtxDestroy_v2(context)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: Context) -> i32 {
    STACK.with_borrow_mut(|stack| stack.push(context));
    status(with(|_| Ok(())))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPopCurrent_v2(context: *mut Context) -> i32 {
    status(match STACK.with_borrow_mut(Vec::pop) {
        Some(popped) if context.is_null() => {
            let _ = popped;
            Ok(())
        }
        Some(popped) => put(context, popped),
        None => Err(INVALID_CONTEXT),
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: Context) -> i32 {
    STACK.with_borrow_mut(|stack| {
        stack.pop();
        if context != 0 {
            stack.push(context);
        }
    });
    status(with(|_| Ok(())))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCurrent(context: *mut Context) -> i32 {
    status(with(|_| put(context, STACK.with_borrow(|stack| stack.last().copied().unwrap_or(0)))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetDevice(device: *mut i32) -> i32 {
    status(current().and_then(|gpu| {
        with(|driver| {
            let at = driver.devices.iter().position(|other| *other == gpu);
            put(device, at.and_then(|at| i32::try_from(at).ok()).ok_or(INVALID_CONTEXT)?)
        })
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetApiVersion(_context: Context, version: *mut u32) -> i32 {
    status(put(version, 3020))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetFlags(flags: *mut u32) -> i32 {
    status(current().and_then(|_| put(flags, 0)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> i32 {
    status(current().map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetLimit(value: *mut usize, _limit: i32) -> i32 {
    status(current().and_then(|_| put(value, 1024)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetLimit(_limit: i32, _value: usize) -> i32 {
    status(current().map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) -> i32 {
    status(current().and_then(|_| put(least, 0)).and_then(|()| put(greatest, -5)))
}
