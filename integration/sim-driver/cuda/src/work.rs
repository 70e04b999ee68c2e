//! Work: streams, events, copies, fills and launches. All of it is done as soon as it is asked for.

use std::ffi::c_void;

use crate::{context::current, driver::with, put, status};

fn handle(to: *mut u64) -> i32 {
    status(current().and_then(|_| {
        with(|driver| {
            let number = driver.number(0);
            put(to, number)
        })
    }))
}

/// What needs a context and is done at once.
macro_rules! done {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        $(
            #[unsafe(no_mangle)]
            pub extern "C" fn $name($($argument: $type),*) -> i32 {
                $(let _ = $argument;)*
                status(current().map(drop))
            }
        )*
    };
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreate(stream: *mut u64, _flags: u32) -> i32 {
    handle(stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreateWithPriority(stream: *mut u64, _flags: u32, _priority: i32) -> i32 {
    handle(stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventCreate(event: *mut u64, _flags: u32) -> i32 {
    handle(event)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, _start: u64, _end: u64) -> i32 {
    status(current().and_then(|_| put(milliseconds, 0.0)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadData(module: *mut u64, _image: *const c_void) -> i32 {
    handle(module)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadDataEx(
    module: *mut u64,
    _image: *const c_void,
    _count: u32,
    _options: *mut i32,
    _values: *mut *mut c_void,
) -> i32 {
    handle(module)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetFunction(function: *mut u64, _module: u64, _name: *const u8) -> i32 {
    handle(function)
}

// fn cuStreamDestroy_v2( fn cuStreamSynchronize( fn cuStreamSynchronize_ptsz( fn cuStreamQuery( fn cuEventRecord(
// fn cuEventRecord_ptsz( fn cuEventSynchronize( fn cuEventQuery( fn cuEventDestroy_v2( fn cuStreamWaitEvent(
// fn cuModuleUnload( fn cuMemcpyHtoD_v2( fn cuMemcpyDtoH_v2( fn cuMemcpyDtoD_v2( fn cuMemcpyHtoDAsync_v2(
// fn cuMemcpyDtoHAsync_v2( fn cuMemsetD8_v2( fn cuMemsetD32_v2( fn cuMemsetD8Async( fn cuMemcpy( fn cuMemcpyAsync(
// (the build looks for these words to know what is modelled)
done! {
    cuStreamDestroy_v2(stream: u64);
    cuStreamSynchronize(stream: u64);
    cuStreamSynchronize_ptsz(stream: u64);
    cuStreamQuery(stream: u64);
    cuStreamWaitEvent(stream: u64, event: u64, flags: u32);
    cuEventRecord(event: u64, stream: u64);
    cuEventRecord_ptsz(event: u64, stream: u64);
    cuEventSynchronize(event: u64);
    cuEventQuery(event: u64);
    cuEventDestroy_v2(event: u64);
    cuModuleUnload(module: u64);
    cuMemcpy(to: u64, from: u64, bytes: usize);
    cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: u64);
    cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize);
    cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize);
    cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize);
    cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: u64);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: u64);
    cuMemsetD8_v2(to: u64, value: u8, count: usize);
    cuMemsetD32_v2(to: u64, value: u32, count: usize);
    cuMemsetD8Async(to: u64, value: u8, count: usize, stream: u64);
}

/// All launches with the classic arguments.
macro_rules! launches {
    ($($name:ident)*) => {
        $(
            #[unsafe(no_mangle)]
            pub extern "C" fn $name(function: u64) -> i32 {
                if function == 0 {
                    return 400;
                }
                status(current().map(drop))
            }
        )*
    };
}

// fn cuLaunchKernel( fn cuLaunchKernel_ptsz( fn cuLaunchCooperativeKernel( fn cuLaunchCooperativeKernel_ptsz(
launches! { cuLaunchKernel cuLaunchKernel_ptsz cuLaunchCooperativeKernel cuLaunchCooperativeKernel_ptsz }
