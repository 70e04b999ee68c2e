//! A small node for the ledger's tests.

use std::collections::BTreeMap;

use ledger::{Claim, ContainerRef, Driver, Gpu, Inventory, PodRef, ShareKind, Shares, Terms, Wishes};
use vcuda_config::{GpuUuid, MEMORY_UNIT_BYTES, Request};

pub const UNITS: u32 = 40;

pub fn inventory(gpus: u8) -> Inventory {
    let gpu = |n: u8| Gpu {
        uuid: GpuUuid::from_bytes([n; 16]),
        name: "NVIDIA A100".into(),
        minor: n.into(),
        total_bytes: u64::from(UNITS) * MEMORY_UNIT_BYTES,
        memory_units: UNITS,
        numa_node: None,
        pci_bus_id: format!("00000000:{n:02x}:00.0"),
        healthy: true,
        device_nodes: Vec::new(),
    };
    let driver = Driver { version: "550.163.01".into(), library_dir: "/usr/lib".into() };
    Inventory::new("boot".into(), driver, Vec::new(), (0..gpus).map(gpu).collect())
}

pub fn claim(pod: u32, sandbox: u32, container: u32, attempt: u32, request: Request) -> Claim {
    Claim {
        pod: PodRef {
            uid: format!("pod-{pod}"),
            namespace: "default".into(),
            name: format!("train-{pod}"),
            sandbox_id: format!("sandbox-{pod}-{sandbox}"),
        },
        container: ContainerRef { name: format!("c{container}"), id: format!("{pod}-{container}-{attempt}") },
        request,
        terms: Terms::default(),
        wishes: Wishes::default(),
    }
}

/// I1, from the records alone.
pub fn assert_not_overpromised(shares: &Shares, inventory: &Inventory) {
    for gpu in &inventory.gpus {
        let on_it: Vec<_> = shares
            .records
            .values()
            .flat_map(|record| &record.gpus)
            .filter(|share| share.uuid == gpu.uuid)
            .collect();
        let core: u32 = on_it.iter().map(|share| share.core).sum();
        let memory: u64 = on_it.iter().map(|share| share.memory_bytes).sum();
        assert!(core <= 100, "{}: {core} core promised", gpu.uuid);
        assert!(memory <= gpu.usable_bytes(), "{}: {memory} bytes promised", gpu.uuid);
    }
    assert_timetable(shares);
}

/// Every share of a part of a GPU has a slot for each core, and no slot has two owners.
pub fn assert_timetable(shares: &Shares) {
    let mut owners = BTreeMap::new();
    for (name, record) in &shares.records {
        for gpu in &record.gpus {
            let slots = if record.kind == ShareKind::Share { gpu.core } else { 0 };
            assert_eq!(gpu.slots.count(), slots, "{name} on {}", gpu.uuid);
            for slot in gpu.slots.iter() {
                let other = owners.insert((gpu.uuid.clone(), slot), name);
                assert_eq!(other, None, "{}: slot {slot} has two owners, one is {name}", gpu.uuid);
            }
        }
    }
}
