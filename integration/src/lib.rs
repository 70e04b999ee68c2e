//! The harness of the end-to-end tests, the benches and the demo: a whole node in one folder, made of real parts.
//! containerd, runc and the product's binaries are what runs on a real node; kubelet is played by a stand-in that
//! speaks the real protocols; the driver is the real one or the simulated one.

#![forbid(unsafe_code)]

pub mod burst;
pub mod cache;
pub mod cluster;
pub mod containerd;
pub mod counters;
pub mod cri;
pub mod devices;
pub mod driver;
pub mod host;
pub mod image;
pub mod interrupt;
pub mod kubelet;
pub mod mountinfo;
pub mod node;
mod plugins;
pub mod pod;
pub mod pod_resources;
pub mod probe;
pub mod process;
#[cfg(test)]
mod scripts;
pub mod share;
pub mod teardown;
pub mod twin;
pub mod vcuda;
