//! What a GPU is.

use super::{MAX_GPUS, MAX_LINKS};
use crate::time::Settings;

/// What an NVLink leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Peer(u32);

impl Peer {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// A switch.
    pub const SWITCH: Self = Self(u32::MAX);

    /// Another GPU.
    pub fn gpu(index: usize) -> Self {
        Self(u32::try_from(index).map_or(0, |index| index + 1))
    }

    /// The GPU that it is, if it is one.
    pub fn as_gpu(self) -> Option<usize> {
        let index = (self.0 as usize).checked_sub(1)?;
        (index < MAX_GPUS).then_some(index)
    }
}

/// What a GPU is. Nothing of it changes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Facts {
    /// UUID bytes, in the order of `CUuuid`.
    pub uuid: [u8; 16],
    /// Model, NUL-terminated.
    pub name: [u8; 96],
    /// Memory in bytes, as NVML tells it.
    pub total: u64,
    /// Bytes of it that the driver keeps.
    pub reserved: u64,
    /// Bytes that a process takes with its first context.
    pub context: u64,
    /// Bytes that a loaded module takes.
    pub module: u64,
    /// A block takes a multiple of this many bytes.
    pub granularity: u64,
    /// Number of the device node.
    pub minor: u32,
    /// PCI domain.
    pub pci_domain: u32,
    /// PCI bus.
    pub pci_bus: u32,
    /// PCI device.
    pub pci_device: u32,
    /// PCI device and vendor.
    pub pci_id: u32,
    /// PCI subsystem.
    pub pci_subsystem: u32,
    /// PCI switch, −1 for none.
    pub pci_switch: i32,
    /// NUMA node, −1 for none.
    pub numa: i32,
    /// CPUs of that node, a bitmap.
    pub cpus: [u64; 4],
    /// Compute capability, before the dot.
    pub major: u32,
    /// Compute capability, after the dot.
    pub minor_capability: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Their highest clock in MHz.
    pub clock_mhz: u32,
    /// The memory's in MHz.
    pub memory_clock_mhz: u32,
    /// Width of the memory bus in bits.
    pub bus_bits: u32,
    /// L2 cache in KiB.
    pub l2_kib: u32,
    /// Power limit.
    pub milliwatts: u32,
    /// 1 where it can be split into MIG instances.
    pub mig_capable: u32,
    /// NVLink version, 0 for none.
    pub nvlink: u32,
    /// What its links lead to.
    pub links: [Peer; MAX_LINKS],
    /// How it goes from one process to the next.
    pub turns: Settings,
}

impl Facts {
    /// Bytes that processes can have, which is what CUDA calls the total.
    pub fn usable(&self) -> u64 {
        self.total.saturating_sub(self.reserved)
    }

    /// PCI address as NVML prints it.
    pub fn pci(&self) -> String {
        format!("{:08X}:{:02X}:{:02X}.0", self.pci_domain, self.pci_bus, self.pci_device)
    }

    /// UUID as NVML prints it.
    pub fn uuid_text(&self) -> String {
        let hex: String = self.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
    }

    /// Model name.
    pub fn name(&self) -> &str {
        text(&self.name)
    }
}

/// The text before the first NUL.
pub fn text(bytes: &[u8]) -> &str {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    std::str::from_utf8(&bytes[..end]).unwrap_or_default()
}
