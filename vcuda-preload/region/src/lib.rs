//! What the shim inside a container and the node outside agree on: the layout of a share's `limits` and `usage`
//! files, and where things are in the container.

/// Where things are inside a container with a share. The shim knows these by heart; the node mounts them.
pub mod place {
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
