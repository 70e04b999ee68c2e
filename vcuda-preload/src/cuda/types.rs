//! The driver's types, as far as arguments of its functions are looked at.

#![allow(clippy::upper_case_acronyms, reason = "the driver's names")]

use std::ffi::c_int;

/// `CUresult`.
pub(crate) type Result = c_int;
/// `CUdevice`.
pub(crate) type Device = c_int;
/// `CUdeviceptr`, of CUDA 3.2 and later.
pub(crate) type DevicePtr = u64;
/// `CUcontext`: a pointer that is never followed here, so a number.
pub(crate) type Context = u64;
/// `CUarray` or `CUmipmappedArray`, the same.
pub(crate) type Array = u64;

pub(crate) const CUDA_SUCCESS: Result = 0;
pub(crate) const CUDA_ERROR_OUT_OF_MEMORY: Result = 2;
/// "System is not yet ready to start any CUDA work": the share is not in place.
pub(crate) const CUDA_ERROR_SYSTEM_NOT_READY: Result = 802;

/// `CUDA_ARRAY_DESCRIPTOR` of CUDA 2.0.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ArrayDescriptorV1 {
    pub width: u32,
    pub height: u32,
    pub format: u32,
    pub channels: u32,
}

/// `CUDA_ARRAY_DESCRIPTOR` of CUDA 3.2.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ArrayDescriptor {
    pub width: usize,
    pub height: usize,
    pub format: u32,
    pub channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR` of CUDA 2.0.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Array3dDescriptorV1 {
    pub width: u32,
    pub height: u32,
    pub depth: u32,
    pub format: u32,
    pub channels: u32,
    pub flags: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR` of CUDA 3.2.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Array3dDescriptor {
    pub width: usize,
    pub height: usize,
    pub depth: usize,
    pub format: u32,
    pub channels: u32,
    pub flags: u32,
}
