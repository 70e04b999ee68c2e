//! The interposer: stands where a program looks for the driver's `libcuda.so.1` and `libnvidia-ml.so.1`, holds the
//! container to its memory ceiling, and shows it the memory of its share.
//!
//! It is a guest in other people's processes: preloaded into every one of them, it does nothing at all until the
//! first CUDA or NVML call; then it starts no thread, installs no handler, prints nothing unless asked (`VCUDA_LOG`) or
//! unable to hold the ceiling, and never ends the process. It changes how much memory there seems to be, never which
//! devices there are, since real runtimes check that.
//!
//! It must not know about anything but `region`.

#![allow(
    clippy::missing_safety_doc,
    reason = "the exports are the driver's functions, whose callers know no Rust"
)]

mod cuda;
mod door;
mod errno;
mod jump;
mod libc_door;
mod lock;
mod log;
mod map;
mod nvml;
mod pace;
mod real;
mod share;
mod state;
