//! Which GPU share sits on which GPU: share records on disk, the node's inventory of GPUs, and placement. Pure
//! logic plus one folder of files; it knows neither gRPC, nor NVML, nor Kubernetes.

#![forbid(unsafe_code)]

mod change;
mod files;
mod filter;
mod floor;
mod inventory;
mod ledger;
mod place;
mod room;
mod rules;
mod share;
mod shares;
mod terms;
mod timetable;

pub use change::{ChangeError, Changed};
pub use files::boot_id;
pub use filter::{GpuFilter, WishError, Wishes};
pub use floor::Floor;
pub use inventory::{DeviceNode, Driver, Gpu, Inventory, InventoryError};
pub use ledger::{
    BindError, Bound, Claim, Ledger, LedgerError, Live, PodLife, Pruned, SandboxEnd, uptime_ms,
};
pub use place::{Choice, GpuFree, LOOSEST, Lack, Memory, NoRoom, Placement, lack, place, place_by, takes};
pub use rules::{Policy, PolicyError, Rules};
pub use share::{
    ContainerRef, GpuShare, PodRef, RecordError, ShareFolder, ShareKind, ShareName, ShareNameError,
    ShareRecord, ShareState,
};
pub use shares::{Shares, Unreadable};
pub use terms::{Change, Priority, Terms};
