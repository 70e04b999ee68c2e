//! What the driver itself measures: which process has used how much of a GPU's time. The NVML thread fills it, once a
//! tick and only for GPUs that somebody wants; the governor empties it. Neither ever waits for the other.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use nvml_wrapper::{Nvml, error::NvmlError};
use tracing::debug;
use vcuda_config::GpuUuid;

use crate::governor::monotonic_ns;

/// How often it is read. NVML's own figures are older: a sample covers a sixth of a second to a second.
pub const TICK: Duration = Duration::from_millis(100);

/// The longest time that one of NVML's samples stands for, in microseconds. Before the first sample of a process
/// nothing is known of how long it has been running.
const LONGEST_SAMPLE_US: u64 = 1_000_000;

/// Uses that wait for the governor; it takes them ten times a second, and what is older is worth nothing.
const MAX_WAITING: usize = 1 << 16;

/// GPU time that a process has used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The process, as this PID namespace numbers it.
    pub pid: u32,
    /// Nanoseconds.
    pub used_ns: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Meter(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    wanted: BTreeSet<GpuUuid>,
    uses: Vec<Use>,
    /// Until when it is known of each GPU what has been used, in nanoseconds of CLOCK_MONOTONIC.
    known: BTreeMap<GpuUuid, u64>,
}

/// What the NVML thread remembers from one reading to the next.
#[derive(Debug, Default)]
pub(crate) struct Readings {
    last: Option<Instant>,
    of_gpu: BTreeMap<GpuUuid, Reading>,
}

/// What has been read of a GPU.
#[derive(Debug, Default)]
pub struct Reading {
    /// NVML's time of the newest sample, in microseconds since 1970: the next answer is about the time since then.
    newest: u64,
    /// The same for each process of the last answer.
    of_process: BTreeMap<u32, u64>,
}

impl Meter {
    /// Says which GPUs are to be measured from now on.
    pub fn want(&self, gpus: BTreeSet<GpuUuid>) {
        let mut state = self.state();
        state.uses.retain(|used| gpus.contains(&used.gpu));
        state.known.retain(|gpu, _| gpus.contains(gpu));
        state.wanted = gpus;
    }

    /// What has been measured since this was last called.
    pub fn take(&self) -> Vec<Use> {
        std::mem::take(&mut self.state().uses)
    }

    /// How old what has been measured of a GPU is at the moment `now_ns` of CLOCK_MONOTONIC, in nanoseconds; the most there can be
    /// if nothing has.
    pub(crate) fn late_ns(&self, gpu: &GpuUuid, now_ns: u64) -> u64 {
        self.state().known.get(gpu).map_or(u64::MAX, |known| now_ns.saturating_sub(*known))
    }

    #[cfg(test)]
    pub(crate) fn add(&self, used: Use) {
        self.state().uses.push(used);
    }

    /// Whether anything is to be measured.
    pub(crate) fn is_wanted(&self) -> bool {
        !self.state().wanted.is_empty()
    }

    /// Reads NVML if a tick has passed.
    pub(crate) fn read(&self, nvml: &Nvml, readings: &mut Readings) {
        if readings.last.is_some_and(|last| last.elapsed() < TICK * 9 / 10) {
            return;
        }
        readings.last = Some(Instant::now());
        // Never held while the driver is asked.
        let wanted = self.state().wanted.clone();
        readings.of_gpu.retain(|gpu, _| wanted.contains(gpu));
        let now_us = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        let now_us = u64::try_from(now_us).unwrap_or(u64::MAX);
        for gpu in wanted {
            let reading = readings.of_gpu.entry(gpu.clone()).or_default();
            let samples = nvml
                .device_by_uuid(gpu.as_str())
                .and_then(|device| device.process_utilization_stats(reading.since(now_us)));
            let samples = match samples {
                Ok(samples) => samples,
                // Nothing has run since.
                Err(NvmlError::NotFound) => vec![],
                Err(error) => {
                    debug!(%gpu, %error, "the driver does not tell who uses it");
                    continue;
                }
            };
            let samples = samples.iter().map(|sample| (sample.pid, sample.timestamp, sample.sm_util));
            self.take_in(&gpu, reading, now_us, monotonic_ns(), samples);
        }
    }

    /// Takes in NVML's answer about a GPU's time since [`Reading::since`]: samples, as process, microseconds since 1970 and percent.
    /// It was asked at `now_us` in microseconds since 1970, which is `now_ns` in nanoseconds of CLOCK_MONOTONIC.
    pub fn take_in(
        &self,
        gpu: &GpuUuid,
        reading: &mut Reading,
        now_us: u64,
        now_ns: u64,
        samples: impl Iterator<Item = (u32, u64, u32)>,
    ) {
        let uses = reading.take_in(samples);
        let late = u64::try_from(reading.late(now_us).as_nanos()).unwrap_or(u64::MAX);
        let mut state = self.state();
        state.known.insert(gpu.clone(), now_ns.saturating_sub(late));
        let room = MAX_WAITING.saturating_sub(state.uses.len());
        let uses = uses.into_iter().take(room);
        state.uses.extend(uses.map(|(pid, used_ns)| Use { gpu: gpu.clone(), pid, used_ns }));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reading {
    /// From when on to ask at this time. Not further back than a sample can reach: a percentage is told of all the time
    /// since then, and what came before was idle.
    pub fn since(&mut self, now_us: u64) -> u64 {
        // The clock may have been set back.
        let since = self.newest.clamp(now_us.saturating_sub(LONGEST_SAMPLE_US), now_us);
        if since != self.newest {
            self.newest = since;
            self.of_process.clear();
        }
        since
    }

    /// How old at this time what is known of all processes is: a busy one's last sample may be older than another's.
    fn late(&self, now_us: u64) -> Duration {
        let known = self.of_process.values().copied().min().unwrap_or(self.newest);
        Duration::from_micros(now_us.saturating_sub(known))
    }

    /// From samples (process, time in microseconds, percent of the time since the last answer) to nanoseconds used.
    fn take_in(&mut self, samples: impl Iterator<Item = (u32, u64, u32)>) -> Vec<(u32, u64)> {
        let before = self.newest;
        let mut uses = Vec::new();
        let mut of_process = BTreeMap::new();
        for (pid, at, percent) in samples {
            // One that was not in the last answer was idle until that.
            let last = self.of_process.get(&pid).copied().unwrap_or(before);
            let span_us = at.saturating_sub(last.max(at.saturating_sub(LONGEST_SAMPLE_US)));
            uses.push((pid, span_us * 10 * u64::from(percent.min(100))));
            self.newest = self.newest.max(at);
            of_process.insert(pid, at);
        }
        if !of_process.is_empty() {
            self.of_process = of_process;
        }
        uses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_add_up_to_the_time_used() {
        let mut reading = Reading::default();
        // Nothing is known of what was before the first one.
        reading.take_in([(7, 5_000_000, 50)].into_iter());
        let mut used = 0;
        for tick in 1..=10 {
            let samples = [(7, 5_000_000 + tick * 100_000, 30), (8, 5_000_000 + tick * 100_000, 0)];
            used += reading.take_in(samples.into_iter()).iter().map(|(_, ns)| ns).sum::<u64>();
        }
        assert_eq!(used, 300_000_000, "30 % of a second");
    }

    /// What is told of it is of the time since the last answer, not since it was last busy.
    #[test]
    fn one_that_was_idle_while_others_were_not_has_not_used_that_time() {
        let mut reading = Reading::default();
        let mut used = 0;
        for tick in 0..30 {
            let at = 5_000_000 + tick * 167_000;
            // A kernel of 200 ms in every 500 ms.
            let samples = [(7, at, 70), (8, at, 40)];
            let both = if tick % 3 == 0 { 2 } else { 1 };
            let uses = reading.take_in(samples.into_iter().take(both));
            used +=
                if tick > 0 { uses.iter().filter(|(pid, _)| *pid == 8).map(|(_, ns)| ns).sum() } else { 0 };
        }
        assert_eq!(used, 9 * 167_000_000 / 100 * 40);
    }

    #[test]
    fn after_a_pause_of_all_the_driver_is_asked_of_no_more_than_a_sample_can_tell() {
        let mut reading = Reading::default();
        assert_eq!(reading.since(5_000_000), 4_000_000);
        reading.take_in([(7, 5_000_000, 50)].into_iter());
        assert_eq!(reading.since(5_100_000), 5_000_000);
        assert_eq!(reading.since(65_500_000), 64_500_000);
        assert_eq!(reading.take_in([(7, 65_000_000, 100)].into_iter()), [(7, 500_000_000)]);
        assert_eq!(reading.since(3_000_000), 3_000_000, "the clock was set back");
    }

    #[test]
    fn figures_are_as_old_as_the_oldest_last_sample_of_a_busy_process() {
        let mut reading = Reading::default();
        reading.since(5_000_000);
        reading.take_in([(7, 4_900_000, 50), (8, 4_700_000, 50)].into_iter());
        assert_eq!(reading.late(5_000_000), Duration::from_millis(300));
        // Nothing has run for a while.
        reading.since(6_500_000);
        reading.take_in(std::iter::empty());
        assert_eq!(reading.late(6_500_000), Duration::from_secs(1));
    }

    #[test]
    fn nobody_knows_how_old_the_figures_of_a_gpu_are_that_was_not_read() {
        assert_eq!(Meter::default().late_ns(&GpuUuid::from_bytes([1; 16]), 7), u64::MAX);
    }

    #[test]
    fn nonsense_from_the_driver_is_bounded() {
        let mut reading = Reading::default();
        let uses = reading.take_in([(7, u64::MAX, u32::MAX), (7, 0, 100), (8, 1, 1)].into_iter());
        assert!(uses.iter().all(|(_, ns)| *ns <= 1_000_000_000), "{uses:?}");
    }

    #[test]
    fn what_nobody_wants_any_more_is_not_kept() {
        let meter = Meter::default();
        let gpu = |n| GpuUuid::from_bytes([n; 16]);
        meter.want([gpu(1), gpu(2)].into());
        meter.state().uses =
            vec![Use { gpu: gpu(1), pid: 1, used_ns: 1 }, Use { gpu: gpu(2), pid: 1, used_ns: 1 }];
        meter.want([gpu(2)].into());
        assert_eq!(meter.take().len(), 1);
        assert!(meter.take().is_empty() && meter.is_wanted());
    }
}
