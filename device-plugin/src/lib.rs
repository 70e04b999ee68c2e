//! The device plugin of a node: finds GPUs through NVML, offers shares of them to kubelet, answers kubelet's
//! Allocate, and watches their health. It knows nothing of OCI specs, and never guesses which pod an Allocate is
//! for: that is the NRI plugin's to know.

#![forbid(unsafe_code)]

pub mod allocate;
mod cdi;
pub mod cluster;
pub mod expected;
pub mod explain;
pub mod fatal;
mod floor;
pub mod folder;
pub mod governor;
pub mod health;
mod holders;
mod keeper;
pub mod kubelet;
pub mod meter;
mod metrics;
pub mod migrate;
pub mod node;
pub mod nvml;
pub mod offer;
pub mod plugin;
pub mod prefer;
pub mod set;
pub mod status;
#[cfg(test)]
mod testing;
pub mod top;
pub mod topology;
mod unseen;
mod warned;
pub mod withdraw;
