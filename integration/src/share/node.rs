//! A node with one GPU, as the ledger and the governor have it: shares are bound by the real ledger, in real files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;
use ledger::{Claim, ContainerRef, Driver, Gpu, Inventory, Ledger, PodRef, ShareFolder, ShareRecord, Terms};
use region::{Limits, Usage};
use vcuda_config::{GpuUuid, MEMORY_UNIT_BYTES, Request};

/// What the ledger takes for the machine's boot.
const BOOT: &str = "bench";

/// The GPU of a node without shares.
pub(super) fn inventory(driver: String, uuid: GpuUuid, name: String, total_bytes: u64) -> Result<Inventory> {
    let gpu = Gpu {
        uuid,
        name,
        minor: 0,
        total_bytes,
        memory_units: u32::try_from(total_bytes / MEMORY_UNIT_BYTES)?,
        numa_node: None,
        pci_bus_id: "00000000:10:00.0".into(),
        healthy: true,
        device_nodes: vec![],
    };
    let driver = Driver { version: driver, library_dir: "/usr/lib/x86_64-linux-gnu".into() };
    Ok(Inventory::new(BOOT.into(), driver, vec![], vec![gpu]))
}

/// The shares of a node.
pub(super) struct Node {
    ledger: Ledger,
    inventory: Inventory,
    /// Where they are.
    pub shares: PathBuf,
}

impl Node {
    /// A node without shares, in this folder.
    pub fn new(folder: &Path, inventory: Inventory) -> Result<Self> {
        let shares = folder.join("shares");
        fs::create_dir_all(&shares)?;
        Ok(Self { ledger: Ledger::open_in_boot(&shares, BOOT.into())?, inventory, shares })
    }

    /// A new share, of a container of this ID.
    pub fn share(&self, id: &str, core: u32, terms: Terms) -> Result<ShareFolder> {
        let claim = Claim {
            pod: PodRef {
                uid: id.into(),
                namespace: "bench".into(),
                name: id.into(),
                sandbox_id: format!("sandbox-{id}"),
            },
            container: ContainerRef { name: "main".into(), id: id.into() },
            request: Request::new(core, 4)?,
            terms,
            wishes: ledger::Wishes::default(),
        };
        let fill = |record: &ShareRecord, folder: &ShareFolder| {
            Limits::create(&folder.limits(), &record.limits(false))?;
            fs::create_dir_all(folder.usage().parent().unwrap_or(Path::new("/")))?;
            Usage::create(&folder.usage())
        };
        Ok(self.ledger.bind(&self.inventory, &claim, &[], fill)?.folder)
    }
}
