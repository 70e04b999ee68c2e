//! The GPUs' time, in the state that all processes share. Whoever asks about a GPU first brings it up to the present time,
//! under its lock; nobody else has to do anything for time to pass.

use std::sync::atomic::Ordering::Relaxed;

use super::{Gone, MAX_CLIENTS, MAX_GPUS, State};
use crate::time::Turns;

/// The turns of all processes at one GPU.
pub type GpuTurns = Turns<MAX_CLIENTS>;

/// The machine's clock, in nanoseconds (`CLOCK_MONOTONIC`): the same for all processes, in containers too.
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a live `timespec`; this clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

impl State {
    /// The turns at a GPU, brought up to the present time, for the process in `slot`.
    pub fn at_gpu<T>(&self, slot: usize, gpu: usize, work: impl FnOnce(&GpuTurns) -> T) -> T {
        let turns = &self.turns[gpu];
        let _locked = self.gpus[gpu].lock.acquire(slot);
        // Read under the lock, so that it is not older than what another process saw.
        turns.advance(now());
        work(turns)
    }

    /// The turns at a GPU, as whoever looked last left them.
    pub fn turns(&self, gpu: usize) -> &GpuTurns {
        &self.turns[gpu]
    }

    /// Brings all GPUs up to the present time, and gives that.
    pub fn catch_up(&self, gone: Gone<'_>) -> u64 {
        for gpu in 0..self.gpus().len() {
            let _locked = self.lock_for_module(gpu, gone);
            self.turns[gpu].advance(now());
        }
        now()
    }

    /// What the process in `slot` had to do is not done any more.
    pub fn drop_work(&self, slot: usize, gone: Gone<'_>) {
        for gpu in 0..self.gpus().len() {
            let _locked = self.lock_for_module(gpu, gone);
            self.turns[gpu].advance(now());
            self.turns[gpu].drop_work(slot);
        }
    }

    /// Nanoseconds that a process has had each GPU.
    pub fn busy(&self, slot: usize) -> [u64; MAX_GPUS] {
        let mut busy = [0; MAX_GPUS];
        for (gpu, busy) in busy.iter_mut().enumerate().take(self.gpus().len()) {
            *busy = self.turns[gpu].had(slot);
        }
        busy
    }

    /// After a process died in the middle of a change.
    pub(super) fn repair_turns(&self, gpu: usize) {
        self.turns[gpu].repair(self.high.load(Relaxed) as usize);
    }
}
