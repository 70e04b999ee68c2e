//! containerd's NRI, seen from a plugin, and what this plugin does with it: when a container is created that was
//! granted a GPU share, it binds the share in the ledger and gives the container its device nodes, the shim and its
//! limits. It knows neither NVML nor kubelet: GPUs come from the inventory, grants from the container's annotations.
//!
//! From the socket up: [`mux`], [`wire`], [`session`], [`service`], [`binding`], [`adjust`].

// Not `forbid`: the generated client and server allow it in their heads, and use none.
#![deny(unsafe_code)]

pub mod adjust;
mod backoff;
pub mod binding;
mod chosen;
pub mod connect;
mod grant;
pub mod log;
pub mod mux;
pub mod node;
mod refusal;
pub mod service;
pub mod session;
mod synchronize;
pub mod wire;

pub use refusal::Refusal;
