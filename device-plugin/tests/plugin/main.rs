//! The plugin from outside: its sessions with a kubelet that speaks the real protocol, the real program without a
//! driver, and the real program with the simulated driver.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "whatever fails here fails the test")]

use std::time::Duration;

mod cluster;
mod daemon;
mod driver;
mod kubelet;
mod process;
mod sessions;

/// Nothing that is waited for takes longer, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(90);
