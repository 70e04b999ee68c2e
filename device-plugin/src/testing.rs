//! Inventories of nodes, for the unit tests of several modules.

use ledger::{Driver, Gpu, Inventory};
use vcuda_config::{GpuUuid, MEMORY_UNIT_BYTES};

/// GPU number `n`, healthy, with so many memory units on offer.
pub(crate) fn gpu(n: u8, memory_units: u32) -> Gpu {
    Gpu {
        uuid: GpuUuid::from_bytes([n; 16]),
        name: "NVIDIA H100".into(),
        minor: n.into(),
        total_bytes: u64::from(memory_units) * MEMORY_UNIT_BYTES,
        memory_units,
        numa_node: None,
        pci_bus_id: format!("00000000:{n:02x}:00.0"),
        healthy: true,
        device_nodes: Vec::new(),
    }
}

/// A node that was started as `boot_id` says, with these GPUs.
pub(crate) fn inventory(boot_id: &str, gpus: Vec<Gpu>) -> Inventory {
    let driver = Driver { version: "550.163.01".into(), library_dir: "/usr/lib64".into() };
    Inventory::new(boot_id.into(), driver, Vec::new(), gpus)
}
