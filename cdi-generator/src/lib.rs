//! CDI specifications for GPU shares: the driver's files are found below the driver root ([`Driver::discover`]),
//! and the file that gives them to containers is kept current ([`ensure_spec`]). Also the general part:
//! the format, its rules, and what a node's files add up to. It knows neither kubelet nor NRI.

#![forbid(unsafe_code)]

mod driver;
pub mod file;
pub mod folders;
mod generate;
pub mod rules;
pub mod spec;

pub use driver::{Driver, DriverError, DriverFile, Finder, Library};
pub use generate::{EnsureError, ensure_spec, spec, spec_path};
