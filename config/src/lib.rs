//! What all parts of vcuda agree on: resource names and units, device IDs, requests, grants, the node file and
//! the well-known places. Pure data and parsing; it knows neither Kubernetes clients nor NVML.

#![forbid(unsafe_code)]

mod device;
mod grant;
mod node_file;
mod request;

pub use device::{DeviceId, DeviceIdError, GpuUuid, GpuUuidError};
pub use grant::{Grant, GrantError};
pub use node_file::{GpuPolicy, NodeFile, NodeFileError, NriSettings, Paths, Resources};
pub use request::{Request, RequestError};

/// Bytes of device memory that one unit of the memory resource stands for (256 MiB, gpu-manager's unit).
pub const MEMORY_UNIT_BYTES: u64 = 256 * 1024 * 1024;

/// Core units of one whole GPU: one unit is one percent of its compute time.
pub const CORE_PER_GPU: u32 = 100;

/// CDI kind of our devices, `vendor/class`.
pub const CDI_KIND: &str = "tencent.com/vcuda";

/// CDI device of a container that shares a GPU: the driver's CUDA and NVML libraries wait in the private folder.
pub const CDI_DEVICE_SHARE: &str = "share";

/// CDI device of a container that has whole GPUs: the driver's libraries stand in their usual place.
pub const CDI_DEVICE_WHOLE: &str = "whole";

/// Version of this build, which also names the folder it is installed in.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Keys of the annotations that the parts leave for each other on a container.
pub mod annotation {
    /// Set by the device plugin's Allocate: core granted, per GPU, as a [`crate::Grant`].
    pub const CORE_GRANT: &str = "tencent.com/vcuda-core-grant";
    /// Set by the device plugin's Allocate: memory units granted, per GPU, as a [`crate::Grant`].
    pub const MEMORY_GRANT: &str = "tencent.com/vcuda-memory-grant";
    /// Set by the NRI plugin when it has bound the share: the name of the share's folder. The guard looks for it.
    pub const SHARE: &str = "tencent.com/vcuda-share";
}
