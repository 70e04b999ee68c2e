//! What all parts of vcuda agree on: resource names and units, device IDs, requests, grants, the node file and
//! the well-known places. Pure data and parsing; it knows neither Kubernetes clients nor NVML.

#![forbid(unsafe_code)]

mod atomic;
pub mod daemons;
mod device;
mod exit;
pub mod floor;
mod gpu_admission;
mod grant;
mod mistake;
mod node_file;
mod node_gpus;
mod path;
mod pod_placement;
mod request;
mod told;

pub use atomic::write_atomically;
pub use device::{DeviceId, DeviceIdError, GpuUuid, GpuUuidError};
pub use exit::Exit;
pub use gpu_admission::gpu_admission_minors;
pub use grant::{Grant, GrantError};
pub use node_file::{
    ComputePolicy, GpuPolicy, ImagePolicy, MemoryFloor, MemoryPolicy, MetricsSettings, NodeFile,
    NodeFileError, NriSettings, Paths, Policy, Resources,
};
pub use node_gpus::{GpuGroup, Link, NodeGpu, NodeGpus, NodeGpusError};
pub use path::plain;
pub use pod_placement::{PodPlacement, PodPlacementError};
pub use request::{Request, RequestError};
pub use told::in_one_line;

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

/// The OCI hook as CDI specs name it and others look for it: its subcommands.
pub mod hook {
    /// Links, loader cache and guard in one process.
    pub const CREATE_CONTAINER: &str = "create-container";
    /// The guard alone: what specs of earlier versions name.
    const GUARD: &str = "guard";

    /// Whether the hook with these arguments, its own name first, ends with the guard.
    pub fn guards(args: &[String]) -> bool {
        args.get(1).is_some_and(|arg| [CREATE_CONTAINER, GUARD].contains(&arg.as_str()))
    }
}

/// Keys of the annotations that the parts leave for each other, and that users set, on containers, pods and nodes.
pub mod annotation {
    /// Set by the device plugin's Allocate: core granted, per GPU, as a [`crate::Grant`].
    pub const CORE_GRANT: &str = "tencent.com/vcuda-core-grant";
    /// Set by the device plugin's Allocate: memory units granted, per GPU, as a [`crate::Grant`].
    pub const MEMORY_GRANT: &str = "tencent.com/vcuda-memory-grant";
    /// Set by the NRI plugin when it has bound the share: the name of the share's folder. The guard looks for it.
    pub const SHARE: &str = "tencent.com/vcuda-share";
    /// Set by the device plugin on its node: the GPUs on offer, as [`crate::NodeGpus`]. The scheduler places by it.
    pub const NODE_GPUS: &str = "tencent.com/vcuda-gpus";
    /// Set by an administrator on a node: UUIDs of GPUs that take no new share, separated by commas.
    pub const CORDON: &str = "tencent.com/vcuda-cordon";
    /// Set on a pod by whoever picks its GPUs, the scheduler as it binds or else the node: a
    /// [`crate::PodPlacement`].
    pub const PLACEMENT: &str = "tencent.com/vcuda-placement";
    /// Set on a pod that waits, by vcuda-scheduler, so that kube-scheduler tries it again: when, and which node has come
    /// to have room. Nobody removes it: it stays on the pod for life, and says nothing once the pod has a node.
    pub const ROOM: &str = "tencent.com/vcuda-room";
    /// Set by a user on a pod: `pack` or `spread`.
    pub const POLICY: &str = "tencent.com/vcuda-policy";
    /// Set by a user on a pod: GPU models that will do, separated by commas; each a part of the model's name.
    pub const USE_MODEL: &str = "tencent.com/vcuda-use-model";
    /// Set by a user on a pod: GPU models that will not do, as [`USE_MODEL`].
    pub const AVOID_MODEL: &str = "tencent.com/vcuda-avoid-model";
    /// Set by a user on a pod: UUIDs of GPUs that will do, separated by commas.
    pub const USE_GPU: &str = "tencent.com/vcuda-use-gpu";
    /// Set by a user on a pod: UUIDs of GPUs that will not do, separated by commas.
    pub const AVOID_GPU: &str = "tencent.com/vcuda-avoid-gpu";
    /// Set by a user on a pod: percent of its GPU's compute time that each of its containers with a share may use
    /// while others leave it idle; from its core to 100.
    pub const CORE_LIMIT: &str = "tencent.com/vcuda-core-limit";
    /// Set by a user on a pod: `low` or `normal`. Low ones get idle time only when no normal one wants it.
    pub const PRIORITY: &str = "tencent.com/vcuda-priority";
}
