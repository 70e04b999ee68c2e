//! Time on a simulated GPU. Nothing here looks at a clock: the time, in nanoseconds of whatever clock the caller has, is
//! a parameter of every call. So a test steps it, and the driver passes `CLOCK_MONOTONIC`.
//!
//! Two parts make the model. `Turns` says which process has the GPU when: one at a time, in slices, by turns among those
//! that have work. `Timeline` says what happens in the time that one process has: its streams run at once, and the
//! kernels that run share the GPU evenly, as kernels do that each fill it. So a process with any work to do always
//! gets as much done in a second of its time, however it spreads that over streams. `Engine` puts both together.

pub mod engine;
pub mod timeline;
pub mod turns;

pub use self::{
    engine::{Engine, Work},
    timeline::{Point, Timeline},
    turns::{Settings, Turns},
};

/// Launches that a stream takes before the launching thread must wait (seen with drivers from 418 to 550: 1024 launches
/// of a stream are pending at most).
pub const QUEUE: usize = 1024;

/// GPU time that an event takes where its process does not have the GPU: the time comes from the GPU, so its turn must.
pub const TURN_NS: u64 = 1;
