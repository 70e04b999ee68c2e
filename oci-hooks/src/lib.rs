//! Hooks that run on the host against a container's root, before the container starts, and the compatibility
//! check that they share with `vcuda-check`. They run as root over files that an image's author chose, so
//! everything below a container's root goes through [`rootfs`]. Nothing here knows NRI or kubelet.

#![forbid(unsafe_code)]

pub mod compat;
pub mod guard;
pub mod ldcache;
pub mod links;
pub mod node;
pub mod rootfs;
pub mod running;
pub mod scans;
pub mod state;
pub mod verdicts;
