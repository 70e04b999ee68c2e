//! Status codes and structures of `cuda.h`.

use std::ffi::{c_int, c_void};

pub(crate) use crate::pointers::{In, Out, Outcome, Text, api, put_text};

/// `CUresult`, other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Error(pub i32);

pub(crate) const INVALID_VALUE: Error = Error(1);
pub(crate) const OUT_OF_MEMORY: Error = Error(2);
pub(crate) const NOT_INITIALIZED: Error = Error(3);
pub(crate) const NO_DEVICE: Error = Error(100);
pub(crate) const INVALID_DEVICE: Error = Error(101);
pub(crate) const DEVICE_UNAVAILABLE: Error = Error(46);
pub(crate) const INVALID_IMAGE: Error = Error(200);
pub(crate) const INVALID_CONTEXT: Error = Error(201);
pub(crate) const FILE_NOT_FOUND: Error = Error(301);
pub(crate) const INVALID_HANDLE: Error = Error(400);
pub(crate) const NOT_FOUND: Error = Error(500);
pub(crate) const PEER_ACCESS_ALREADY_ENABLED: Error = Error(704);
pub(crate) const PEER_ACCESS_NOT_ENABLED: Error = Error(705);
pub(crate) const CONTEXT_IS_DESTROYED: Error = Error(709);
pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: Error = Error(712);
pub(crate) const HOST_MEMORY_NOT_REGISTERED: Error = Error(713);
pub(crate) const NOT_READY: Error = Error(600);
pub(crate) const NOT_SUPPORTED: Error = Error(801);
pub(crate) const SYSTEM_DRIVER_MISMATCH: Error = Error(803);
pub(crate) const STREAM_CAPTURE_UNSUPPORTED: Error = Error(900);
pub(crate) const STREAM_CAPTURE_UNMATCHED: Error = Error(903);
pub(crate) const ILLEGAL_STATE: Error = Error(401);

/// A word of data under a name that only debuggers use.
#[repr(transparent)]
pub(crate) struct Data(std::cell::UnsafeCell<u64>);

// SAFETY: nothing here reads or writes it.
unsafe impl Sync for Data {}

impl Data {
    pub(crate) const fn zero() -> Self {
        Self(std::cell::UnsafeCell::new(0))
    }
}

/// `CUmemLocation`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Location {
    pub kind: c_int,
    pub id: c_int,
}

/// `CUmemLocationType`.
pub(crate) mod location {
    pub(crate) const NONE: i32 = 0;
    pub(crate) const DEVICE: i32 = 1;
    pub(crate) const HOST: i32 = 2;
    pub(crate) const HOST_NUMA: i32 = 3;
    pub(crate) const HOST_NUMA_CURRENT: i32 = 4;
}

/// `CUmemAllocationProp`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct AllocationProperties {
    pub kind: c_int,
    pub handle_types: c_int,
    pub location: Location,
    pub win32: *const c_void,
    pub flags: [u8; 8],
}

/// `CUmemPoolProps`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct PoolProperties {
    pub kind: c_int,
    pub handle_types: c_int,
    pub location: Location,
    pub win32: *const c_void,
    pub max_size: usize,
    pub rest: [u8; 56],
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct AccessDescription {
    pub location: Location,
    pub flags: c_int,
}

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(crate) const POSIX_FILE_DESCRIPTOR: c_int = 1;
