//! The library that stands for `libnvidia-ml.so.1`: what the daemon `sim-gpud` keeps, as NVML tells it. What is modelled, and
//! what only answers "not supported", says `symbols.tsv`.
//!
//! It knows nothing of what is tested with it.

mod device;
mod events;
mod ffi;
mod limits;
mod memory;
mod nvlink;
#[path = "../../shared/pointers.rs"]
mod pointers;
mod sensors;
mod smi;
mod system;
mod utilization;

/// Every name of the real library that is not modelled.
mod symbols {
    include!(concat!(env!("OUT_DIR"), "/symbols.rs"));
}
