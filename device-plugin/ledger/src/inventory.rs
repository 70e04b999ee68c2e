//! What the device plugin found on this node, written for the NRI plugin, which must not touch NVML.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use vcuda_config::{GpuGroup, GpuUuid, NodeGpu, NodeGpus};

use crate::files;

const INVENTORY_VERSION: u32 = 1;

/// 16 GPUs with all their links are far below this.
const INVENTORY_MAX_BYTES: u64 = 4 << 20;

/// The node's GPUs and driver, as of `boot_id`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Inventory {
    /// Format version.
    pub version: u32,
    /// The boot during which this was found.
    pub boot_id: String,
    /// The driver.
    pub driver: Driver,
    /// Device nodes that every CUDA process needs: `/dev/nvidiactl`, `/dev/nvidia-uvm`, ….
    pub control_nodes: Vec<DeviceNode>,
    /// GPUs on offer, in NVML's order.
    pub gpus: Vec<Gpu>,
    /// How they are connected, by their positions in `gpus`; empty where nothing is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GpuGroup>,
    /// GPUs that an administrator has cordoned: they take no new share. Some may not be on offer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cordoned: Vec<GpuUuid>,
    /// What NVML says of which code a GPU runs: its compute capability without the dot, 80 for 8.0.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub capabilities: BTreeMap<GpuUuid, u32>,
}

/// The driver's libraries, as a container will see them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Driver {
    /// Version, such as `550.163.01`: the suffix of its library files.
    pub version: String,
    /// Where in a container the driver's libraries are, such as `/usr/lib/x86_64-linux-gnu`. A container with a
    /// share gets the shim there under the names `libcuda.so.<version>` and `libnvidia-ml.so.<version>`.
    pub library_dir: PathBuf,
}

/// One GPU on offer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Gpu {
    /// UUID.
    pub uuid: GpuUuid,
    /// Model name, as NVML says it.
    pub name: String,
    /// Number of the device node `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Memory of the card in bytes.
    pub total_bytes: u64,
    /// Memory on offer, in units of 256 MiB.
    pub memory_units: u32,
    /// NUMA node, where the platform tells.
    pub numa_node: Option<u32>,
    /// PCI address, `00000000:3b:00.0`.
    pub pci_bus_id: String,
    /// False while an event or a missing node keeps new shares away.
    pub healthy: bool,
    /// The GPU's own device nodes.
    pub device_nodes: Vec<DeviceNode>,
}

/// A character device, on the host and in the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceNode {
    /// Path in the container, such as `/dev/nvidia0`.
    pub path: PathBuf,
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
    /// Permission bits of the node, such as 0o666.
    pub file_mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// Why there is no inventory.
#[derive(Debug, Error)]
pub enum InventoryError {
    /// The file cannot be read.
    #[error("{path}: {source}; {remedy}", remedy = remedy(source))]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is no inventory of this version.
    #[error("{path}: {reason}; restart vcuda-device-plugin, which writes it anew")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// What to do about an inventory that cannot be read.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "run as root",
        _ => "it is written by vcuda-device-plugin, see whether that runs on this node",
    }
}

impl Inventory {
    /// An inventory of this boot, in which nothing is known of connections and nothing is cordoned.
    pub fn new(boot_id: String, driver: Driver, control_nodes: Vec<DeviceNode>, gpus: Vec<Gpu>) -> Self {
        Self {
            version: INVENTORY_VERSION,
            boot_id,
            driver,
            control_nodes,
            gpus,
            groups: Vec::new(),
            cordoned: Vec::new(),
            capabilities: BTreeMap::new(),
        }
    }

    /// Reads the inventory at `path`.
    pub fn load(path: &Path) -> Result<Self, InventoryError> {
        let invalid = |reason| InventoryError::Invalid { path: path.into(), reason };
        let bytes = files::read_bounded(path, INVENTORY_MAX_BYTES)
            .map_err(|source| InventoryError::Read { path: path.into(), source })?;
        let inventory: Self = serde_json::from_slice(&bytes).map_err(|error| invalid(error.to_string()))?;
        if inventory.version != INVENTORY_VERSION {
            return Err(invalid(format!(
                "version {} is not known, only {INVENTORY_VERSION}",
                inventory.version
            )));
        }
        Ok(inventory)
    }

    /// Writes the inventory to `path`, atomically, readable by root only.
    pub fn store(&self, path: &Path) -> io::Result<()> {
        vcuda_config::write_atomically(path, &serde_json::to_vec_pretty(self)?, 0o600)
    }

    /// What the node tells the cluster; `groups` say how the GPUs are connected, by their positions in the inventory.
    pub fn node_gpus(&self, groups: Vec<GpuGroup>) -> NodeGpus {
        let told = |gpu: &Gpu| NodeGpu {
            uuid: gpu.uuid.clone(),
            model: gpu.name.clone(),
            minor: gpu.minor,
            units: gpu.memory_units,
            numa: gpu.numa_node,
            healthy: gpu.healthy,
        };
        NodeGpus::new(self.gpus.iter().map(told).collect(), groups)
    }

    /// Positions of the cordoned GPUs.
    pub fn cordoned_at(&self) -> Vec<usize> {
        let cordoned = |(_, gpu): &(usize, &Gpu)| self.cordoned.contains(&gpu.uuid);
        self.gpus.iter().enumerate().filter(cordoned).map(|(at, _)| at).collect()
    }

    /// The GPU with this UUID.
    pub fn gpu(&self, uuid: &GpuUuid) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.uuid == *uuid)
    }
}
