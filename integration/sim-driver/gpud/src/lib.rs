//! What the simulated driver's parts share: the machine that is simulated (`config`), the state that stands for the
//! kernel module's (`state`), and the way a process gets at it (`wire`, `link`). The daemon `sim-gpud` owns the state;
//! the libraries `sim-cuda` and `sim-nvml` map it.
//!
//! Nothing here knows the product that is tested with it.

pub mod config;
pub mod daemon;
pub mod exports;
pub mod layout;
pub mod link;
mod models;
pub mod stamp;
pub mod state;
pub mod time;
pub mod wire;
