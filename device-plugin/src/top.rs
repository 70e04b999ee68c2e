//! `vcuda-device-plugin top`: what every share does from one moment to the next, from its files. It asks no running
//! process.

use std::{
    collections::HashMap,
    fmt,
    time::{Duration, Instant},
};

use ledger::ShareState;
use serde::Serialize;
use vcuda_config::{GpuUuid, NodeFile};

use crate::status::{ShareStatus, Status, StatusError, Usage, core, gib, write_table};

/// Looks at the node time and again.
pub struct Top {
    file: NodeFile,
    last: Option<(Instant, HashMap<Key, Usage>)>,
}

/// One share on one GPU: pod UID, container, GPU.
type Key = (String, String, GpuUuid);

/// What has happened since the last look.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Look {
    /// Milliseconds since the last look; 0 at the first.
    pub passed_ms: u64,
    /// Shares, the busiest first.
    pub shares: Vec<Doing>,
}

/// What one share does on one GPU.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Doing {
    /// What it has, and has used so far.
    #[serde(flatten)]
    pub share: ShareStatus,
    /// Thousandths of the GPU's time that it has used, by its own measure, since the last look. None where nothing
    /// holds it back: then it does not measure itself.
    pub measured_permille: Option<u64>,
    /// Kernel launches a second.
    pub launches_per_s: Option<u64>,
    /// Thousandths of the time that launches were held back, summed over threads.
    pub held_back_permille: Option<u64>,
}

impl Top {
    /// Looks at the node of `file`.
    pub fn new(file: NodeFile) -> Self {
        Self { file, last: None }
    }

    /// Looks once more.
    ///
    /// # Errors
    ///
    /// See [`Status::read`].
    pub fn look(&mut self) -> Result<Look, StatusError> {
        let status = Status::read(&self.file)?;
        let now = Instant::now();
        let shares = status.gpus.into_iter().flat_map(|gpu| gpu.shares).chain(status.shares_elsewhere);
        let mut seen = HashMap::new();
        let passed = self.last.as_ref().map(|(then, _)| now - *then);
        let mut doing: Vec<Doing> = shares
            .map(|share| {
                let key = (share.pod_uid.clone(), share.container.clone(), share.gpu.clone());
                let before = self.last.as_ref().and_then(|(_, last)| last.get(&key));
                let done = Doing::since(before, passed, share);
                done.share.usage.map(|usage| seen.insert(key, usage));
                done
            })
            .collect();
        let driver = |one: &Doing| one.share.used_percent.map(|percent| u64::from(percent) * 10);
        doing.sort_by_key(|one| std::cmp::Reverse(one.measured_permille.or(driver(one))));
        self.last = Some((now, seen));
        let passed_ms = passed.map_or(0, |passed| passed.as_millis().try_into().unwrap_or(u64::MAX));
        Ok(Look { passed_ms, shares: doing })
    }
}

impl Doing {
    fn since(before: Option<&Usage>, passed: Option<Duration>, share: ShareStatus) -> Self {
        let passed_us = passed.map_or(0, |passed| passed.as_micros());
        let rate = |of: fn(&Usage) -> u64, scale: u128| {
            let (before, now) = (before?, share.usage.as_ref()?);
            // A container that starts anew counts from nought.
            let more = of(now).checked_sub(of(before)).unwrap_or_else(|| of(now));
            u64::try_from(u128::from(more).checked_mul(scale)?.checked_div(passed_us)?).ok()
        };
        let unpaced = [before, share.usage.as_ref()].into_iter().flatten().any(|usage| usage.unpaced);
        Self {
            // Nanoseconds in a microsecond are thousandths as they are.
            measured_permille: rate(|usage| usage.gpu_ns, 1).filter(|_| !unpaced),
            launches_per_s: rate(|usage| usage.launches, 1_000_000),
            held_back_permille: rate(|usage| usage.throttled_ns, 1),
            share,
        }
    }
}

impl fmt::Display for Look {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = [
            "GPU",
            "POD",
            "CONTAINER",
            "CORE",
            "MEASURED",
            "NVML",
            "HELD BACK",
            "LAUNCHES/S",
            "MEMORY",
            "OF",
        ];
        let percent = |permille: Option<u64>| {
            permille.map_or_else(|| "-".into(), |n| format!("{}.{} %", n / 10, n % 10))
        };
        let row = |one: &Doing| {
            let share = &one.share;
            let state = if share.state == ShareState::Stopped { " (stopped)" } else { "" };
            [
                share.gpu.as_str().chars().take(12).collect(),
                format!("{}/{}{state}", share.namespace, share.pod),
                share.container.clone(),
                core(share),
                percent(one.measured_permille),
                share.used_percent.map_or_else(|| "-".into(), |used| format!("{used} %")),
                percent(one.held_back_permille),
                one.launches_per_s.map_or_else(|| "-".into(), |n| n.to_string()),
                share.usage.map_or_else(|| "-".into(), |usage| gib(usage.memory_bytes)),
                gib(share.memory_bytes),
            ]
        };
        let rows: Vec<_> =
            std::iter::once(head.map(String::from)).chain(self.shares.iter().map(row)).collect();
        write_table(f, "", &rows)
    }
}

#[cfg(test)]
mod tests {
    use ledger::{Priority, ShareKind};

    use super::*;

    fn share(usage: Option<Usage>) -> ShareStatus {
        ShareStatus {
            gpu: GpuUuid::from_bytes([1; 16]),
            namespace: "ns".into(),
            pod: "train".into(),
            pod_uid: "7f".into(),
            container: "main".into(),
            kind: ShareKind::Share,
            state: ShareState::Running,
            core: 20,
            core_limit: 50,
            priority: Priority::Low,
            used_percent: None,
            memory_bytes: 8 << 30,
            usage,
            held_by: None,
            usage_error: None,
        }
    }

    #[test]
    fn rates_are_what_was_added_by_time() {
        let before = Usage { gpu_ns: 5, launches: 1000, throttled_ns: 7, ..Usage::default() };
        let now = Usage { gpu_ns: 400_000_005, launches: 3000, throttled_ns: 1_000_000_007, ..before };
        let done = Doing::since(Some(&before), Some(Duration::from_secs(2)), share(Some(now)));
        assert_eq!(
            (done.measured_permille, done.launches_per_s, done.held_back_permille),
            (Some(200), Some(1000), Some(500))
        );
        let text = Look { passed_ms: 2000, shares: vec![done] }.to_string();
        for part in ["ns/train", "20 to 50 low", "20.0 %", "1000", "8.0 GiB"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn one_that_nothing_holds_back_has_no_measure_of_its_own_rather_than_nought() {
        let before = Usage { launches: 1000, unpaced: true, ..Usage::default() };
        let now = Usage { launches: 3000, ..before };
        for (before, now) in [(before, now), (before, Usage { unpaced: false, ..now })] {
            let mut share = share(Some(now));
            share.used_percent = Some(97);
            let done = Doing::since(Some(&before), Some(Duration::from_secs(1)), share);
            assert_eq!((done.measured_permille, done.launches_per_s), (None, Some(2000)));
            let text = Look { passed_ms: 1000, shares: vec![done] }.to_string();
            assert!(text.contains("97 %") && !text.contains("0.0 %  97"), "{text}");
        }
    }

    #[test]
    fn a_first_look_a_restart_and_a_spoiled_file_have_no_absurd_rates() {
        let some = Usage { gpu_ns: 100, launches: 9, ..Usage::default() };
        let first = Doing::since(None, None, share(Some(some)));
        assert_eq!((first.measured_permille, first.launches_per_s), (None, None));
        let spoiled = Doing::since(Some(&some), Some(Duration::from_secs(1)), share(None));
        assert_eq!(spoiled.launches_per_s, None);
        let anew = Usage { launches: 4, ..Usage::default() };
        let restarted = Doing::since(Some(&some), Some(Duration::from_secs(1)), share(Some(anew)));
        assert_eq!(restarted.launches_per_s, Some(4));
        let absurd = Usage { launches: u64::MAX, gpu_ns: u64::MAX, ..Usage::default() };
        Doing::since(Some(&some), Some(Duration::from_micros(1)), share(Some(absurd)));
        assert_eq!(Doing::since(Some(&some), Some(Duration::ZERO), share(Some(some))).launches_per_s, None);
    }
}
