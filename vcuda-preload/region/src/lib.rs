//! What the shim inside a container and the node outside agree on: the layout of a share's `limits` and `usage`
//! files, the accounting that the processes of a container do in `usage`, and where things are in the container.
//!
//! `limits` is written by the node and only read in the container. `usage` is written by every process of the
//! container, so the node reads it as it would read anything hostile. Both are fixed in size, hold nothing but
//! atomics, and are the same on every machine word for word; a change of layout changes [`LIMITS_VERSION`] or
//! [`USAGE_VERSION`].
//!
//! It must not know about CUDA, NVML, or who calls it.

mod account;
mod bits;
mod budget;
mod correct;
mod exports;
#[cfg(not(feature = "fault-points"))]
mod fault;
#[cfg(feature = "fault-points")]
pub mod fault;
mod layout;
mod limits;
mod mapping;
mod pace;
mod pair;
mod process;
mod refund;
mod slots;
mod snapshot;
mod stock;
mod stretch;
mod usage;

pub use account::Refused;
pub use budget::{Budget, Terms};
pub use correct::Correction;
pub use exports::{Exported, Key};
pub use limits::{GpuLimit, Limits, LimitsWriter, UNSEEN_LASTS_NS};
pub use pace::{Lease, MAX_STRETCH, Pace, Stretch};
pub use refund::Refund;
pub use slots::{PERIOD_NS, SLOT_NS, SLOTS, Slots};
pub use snapshot::{GpuUsage, ProcessUsage, UsageReader, UsageSnapshot};
pub use stretch::{Demand, KernelLength, Stretching};
pub use usage::{Process, Usage};

/// Version of the layout of `limits`. The shim refuses files of another version; the node writes files and mounts the shim
/// of one version together, so they only differ where a file outlived an upgrade.
pub const LIMITS_VERSION: u32 = 2;

/// Version of the layout of `usage`, of which the same is true. The node also reads version 2, of containers that were
/// started before it was upgraded.
pub const USAGE_VERSION: u32 = 3;

/// Size of a `usage` file in bytes, a multiple of 4096. It is sparse; all of it may be written to in time.
pub const USAGE_BYTES: u64 = layout::USAGE_SIZE as u64;

/// GPUs that one share can span.
pub const MAX_GPUS: usize = 16;

/// Processes of one container that can use GPUs at a time.
pub const MAX_PROCESSES: usize = 1024;

/// Pieces of memory that processes of one container can let each other have at a time.
pub const MAX_EXPORTS: usize = 1024;

/// Memory is accounted in units of this many bytes: the alignment of CUDA's smallest allocation.
pub const ACCOUNT_UNIT_BYTES: u64 = 512;

/// Where things are inside a container with a share. The shim knows these by heart; the node mounts them.
pub mod place {
    /// The folder that is ours alone.
    pub const FOLDER: &str = "/usr/local/vcuda";
    /// The shim.
    pub const SHIM: &str = "/usr/local/vcuda/lib/libvcuda_preload.so";
    /// The driver's real libcuda, behind the shim.
    pub const REAL_CUDA: &str = "/usr/local/vcuda/driver/libcuda.so.1";
    /// The driver's real NVML, behind the shim.
    pub const REAL_NVML: &str = "/usr/local/vcuda/driver/libnvidia-ml.so.1";
    /// This share's limits; the node writes, the container reads.
    pub const LIMITS: &str = "/usr/local/vcuda/share/limits";
    /// This share's usage; the container writes, the node reads and trusts nothing.
    pub const USAGE: &str = "/usr/local/vcuda/share/usage";
    /// Libraries that the loader of every program in the container loads first.
    pub const LD_SO_PRELOAD: &str = "/etc/ld.so.preload";
}
