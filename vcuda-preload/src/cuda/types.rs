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
/// `CUstream`, the same.
pub(crate) type Stream = u64;
/// `CUmemoryPool`, the same.
pub(crate) type Pool = u64;
/// `CUmemGenericAllocationHandle`.
pub(crate) type Handle = u64;
/// `CUgraph`, a pointer, so a number.
pub(crate) type Graph = u64;
/// `CUgraphNode`, the same.
pub(crate) type Node = u64;
/// `CUgraphExec`, the same.
pub(crate) type Exec = u64;
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

/// `CUmemAllocationProp`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct AllocationProperties {
    pub begin: Properties,
    rest: [u64; 2],
}
const _: () = assert!(size_of::<AllocationProperties>() == 32);

/// `CUmemPoolProps`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PoolProperties {
    pub begin: Properties,
    rest: [u64; 9],
}
const _: () = assert!(size_of::<PoolProperties>() == 88);

/// Beginning of both.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Properties {
    kind: u32,
    handle_types: u32,
    location_kind: u32,
    location: u32,
}

impl Properties {
    /// Whether a `CUmemLocationType` is the host's memory: HOST, HOST_NUMA, HOST_NUMA_CURRENT.
    pub fn is_host(location_kind: u32) -> bool {
        (2..=4).contains(&location_kind)
    }

    /// Of a kind of memory (`CUmemAllocationType`) at a location, as the driver tells them.
    pub fn new(kind: i32, location_kind: i32, location: i32) -> Self {
        let [kind, location_kind, location] = [kind, location_kind, location].map(i32::cast_unsigned);
        Self { kind, handle_types: 0, location_kind, location }
    }

    /// Whether it is managed memory, whose location is where it shall rather be.
    pub fn is_managed(&self) -> bool {
        // CU_MEM_ALLOCATION_TYPE_MANAGED.
        self.kind == 2
    }

    /// The device whose memory is meant; none for the host's, and where managed memory need not be anywhere.
    pub fn device(&self) -> Option<Device> {
        match self.location_kind {
            kind if Self::is_host(kind) => None,
            0 if self.is_managed() => None,
            // DEVICE_LOCALITY_DOMAIN: a part of the device that the first byte names.
            6 => Some(Device::from(self.location.to_le_bytes()[0])),
            // DEVICE, and what is newer: better on the account of a device than on none.
            _ => Some(self.location.cast_signed()),
        }
    }
}
