//! Inventories of nodes and claims of containers, for the unit tests of several modules.

use std::{fs, io};

use ledger::{Claim, ContainerRef, Driver, Gpu, Inventory, PodRef, ShareFolder, ShareRecord, Terms, Wishes};
use region::{Limits, Usage};
use vcuda_config::{GpuUuid, MEMORY_UNIT_BYTES, Request};

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

/// What a pod `ns/<name>` wants for its container `main`, whose ID is `id-<UID>`.
pub(crate) fn claim(uid: &str, name: &str, request: Request, terms: Terms) -> Claim {
    Claim {
        wishes: Wishes::default(),
        pod: PodRef {
            uid: uid.into(),
            namespace: "ns".into(),
            name: name.into(),
            sandbox_id: format!("sandbox-{uid}"),
        },
        container: ContainerRef { name: "main".into(), id: format!("id-{uid}") },
        request,
        terms,
    }
}

/// Lays a share's files into its folder, as the NRI plugin does.
pub(crate) fn fill(record: &ShareRecord, folder: &ShareFolder) -> io::Result<()> {
    Limits::create(&folder.limits(), &record.limits(false))?;
    fs::create_dir(folder.usage().parent().unwrap())?;
    Usage::create(&folder.usage())
}
