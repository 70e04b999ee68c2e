//! Which GPU share sits on which GPU: share records on disk, the node's inventory of GPUs, and placement. Pure
//! logic plus one folder of files; it knows neither gRPC, nor NVML, nor Kubernetes.

#![forbid(unsafe_code)]

mod files;
mod inventory;

pub use files::boot_id;
pub use inventory::{DeviceNode, Driver, Gpu, Inventory, InventoryError};
