//! One share as the governor holds it: its record, its open files, and what it has been seen to use.

use std::{fs, io, os::unix::fs::MetadataExt, path::Path, time::Duration};

use daemon::Told;
use ledger::{Priority, ShareFolder, ShareName, ShareRecord, ShareState};
use region::{Correction, Demand, KernelLength, LimitsWriter, Refund, SLOT_NS, SLOTS, Stretch, UsageReader};
use vcuda_config::GpuUuid;

use super::lend;

/// How long after its last sign of work a share counts as active: two ticks, so that one late look does not end it.
const ACTIVE_NS: u64 = 200_000_000;

/// How long after its last sign of work a share no longer says how long slots should last: some samples of the driver's, which
/// alone tells of a program that waits for a kernel.
const SILENT_NS: u64 = 1_000_000_000;

/// Over how long use is averaged for the eye.
const SHOWN_NS: u64 = 1_000_000_000;

/// A container that nothing holds back does not measure itself, and the driver's figures of that time come up to a
/// second later.
const LATE_NS: u64 = 1_500_000_000;

/// Which state of a file was read. It is always replaced, never rewritten.
type Stamp = (u64, u64, i64, i64);

/// A share with the shim.
pub(super) struct Governed {
    stamp: Stamp,
    pub record: ShareRecord,
    files: Option<Files>,
    pub gpus: Vec<OnGpu>,
    /// Launches, and nanoseconds that they were held back. They never fall.
    pub launches: Rising,
    pub throttled_ns: Rising,
    /// Differs from what the file says when a process has come.
    generation: u64,
    /// The last thing that was said about its files.
    pub told: Told,
}

struct Files {
    limits: LimitsWriter,
    usage: UsageReader,
}

/// What it does on one GPU.
pub(super) struct OnGpu {
    pub uuid: GpuUuid,
    /// GPU time that the container measured itself.
    pub charged_ns: Rising,
    /// GPU time that the driver saw it use.
    pub driver_ns: u64,
    pub correction: Correction,
    refund: Refund,
    /// What it is to get back with the next write, in nanoseconds of GPU time.
    back_ns: u64,
    /// What its kernels last.
    length: KernelLength,
    /// CLOCK_MONOTONIC of its last sign of work.
    sign_ns: u64,
    /// CLOCK_MONOTONIC when last nothing held it back.
    unpaced_ns: u64,
    own: Rate,
    driver: Rate,
    /// Thousandths that its own measure counts.
    pub charge_permille: u32,
    pub lent: lend::Lent,
    pub stretch: Stretch,
}

/// A counter of a container's, which may write anything there: what it adds up to, and never less than before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rising {
    /// None until it has been seen: how long it has been rising to what it is then is not known.
    last: Option<u64>,
    pub sum: u64,
}

impl Rising {
    /// Takes in what the counter says now; tells by how much it rose.
    pub(super) fn see(&mut self, now: u64) -> u64 {
        let more = now.saturating_sub(self.last.unwrap_or(0));
        self.sum = self.sum.saturating_add(more);
        if self.last.replace(now).is_some() { more } else { 0 }
    }

    /// The counter begins anew, with another file.
    fn restart(&mut self) {
        self.last = self.last.map(|_| 0);
    }
}

/// Use of the last second or so.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    used_ns: u64,
    seen_ns: u64,
}

impl Rate {
    fn add(&mut self, passed_ns: u64, used_ns: u64) {
        let passed = passed_ns.clamp(1, SHOWN_NS);
        let fade = |sum: u64| sum - sum / 1000 * (passed / (SHOWN_NS / 1000));
        self.used_ns = fade(self.used_ns).saturating_add(used_ns.min(SHOWN_NS));
        self.seen_ns = fade(self.seen_ns).saturating_add(passed);
    }

    fn permille(self) -> u32 {
        u32::try_from(self.used_ns.saturating_mul(1000) / self.seen_ns.max(1))
            .map_or(1000, |used| used.min(1000))
    }
}

impl Governed {
    /// The share `name` below `folder` as it is now, with what was known of it `before`; none where it is no share with
    /// the shim.
    pub(super) fn look(
        folder: &Path,
        name: &ShareName,
        before: Option<Self>,
    ) -> Result<Option<Self>, ledger::RecordError> {
        let place = ShareFolder::new(folder, name);
        let stamp = stamp(&place.record()).unwrap_or_default();
        if let Some(before) = before {
            if before.stamp == stamp && before.files.is_some() {
                return Ok(Some(before));
            }
            let record = ShareRecord::load(folder, name)?;
            return Ok(record.shim.then(|| before.renewed(&place, record, stamp)));
        }
        let record = ShareRecord::load(folder, name)?;
        let fresh = Self {
            stamp: Stamp::default(),
            gpus: record.gpus.iter().map(|gpu| OnGpu::new(gpu.uuid.clone())).collect(),
            record: record.clone(),
            files: None,
            launches: Rising::default(),
            throttled_ns: Rising::default(),
            generation: 0,
            told: Told::default(),
        };
        Ok(record.shim.then(|| fresh.renewed(&place, record, stamp)))
    }

    /// With another record. The files are those of a binding: they stay when only the record was changed.
    fn renewed(mut self, place: &ShareFolder, record: ShareRecord, stamp: Stamp) -> Self {
        let same = |a: &ShareRecord| (a.bound_at, &a.container.id) == (record.bound_at, &record.container.id);
        let on_the_same = self.gpus.iter().map(|gpu| &gpu.uuid).eq(record.gpus.iter().map(|gpu| &gpu.uuid));
        if !on_the_same {
            self.gpus = record.gpus.iter().map(|gpu| OnGpu::new(gpu.uuid.clone())).collect();
        }
        if self.files.is_none() || !same(&self.record) {
            self.files = match Files::open(place) {
                Ok(files) => {
                    self.told.forget();
                    Some(files)
                }
                Err(error) => {
                    self.tell(&error);
                    None
                }
            };
            self.launches.restart();
            self.throttled_ns.restart();
            self.gpus.iter_mut().for_each(|gpu| gpu.charged_ns.restart());
        }
        Self { record, stamp, ..self }
    }

    /// Reads what the container says of itself. `passed_ns` is since it was last read; `driver` tells what the driver
    /// has seen of it on a GPU since then, and how old that is, both in nanoseconds.
    pub(super) fn read(&mut self, now_ns: u64, passed_ns: u64, driver: impl Fn(&GpuUuid) -> (u64, u64)) {
        let Some(files) = &self.files else { return };
        let usage = match files.usage.counters() {
            Ok(usage) => usage,
            Err(error) => {
                self.tell(&error);
                return;
            }
        };
        // Launches are not told apart by GPU: a share spans one.
        let launches = self.launches.see(usage.launches);
        self.throttled_ns.see(usage.throttled_ns);
        let others = std::mem::replace(&mut self.generation, usage.generation) != usage.generation;
        for gpu in &mut self.gpus {
            let at = files.limits.limits().find(&gpu.uuid.bytes());
            let Some(said) = at.and_then(|at| usage.gpus.get(at)) else { continue };
            let own = gpu.charged_ns.see(said.charged_ns);
            let (seen, late_ns) = driver(&gpu.uuid);
            gpu.driver_ns = gpu.driver_ns.saturating_add(seen);
            let sign = if launches > 0 || own > 0 || seen > 0 { now_ns } else { said.waiting_ns.min(now_ns) };
            gpu.sign_ns = gpu.sign_ns.max(sign);
            gpu.own.add(passed_ns, own);
            gpu.driver.add(passed_ns, seen);
            if gpu.lent.rate_permille >= 1000 {
                gpu.unpaced_ns = now_ns;
            }
            if others || now_ns.saturating_sub(gpu.unpaced_ns) < LATE_NS {
                gpu.correction = Correction::default();
                gpu.refund = Refund::default();
            }
            let paid = own.saturating_mul(gpu.charge_permille.into()) / 1000;
            let back = gpu.refund.add(passed_ns, seen, paid, usage.most_processes, late_ns);
            gpu.back_ns = gpu.back_ns.saturating_add(back);
            gpu.charge_permille = gpu.correction.add(passed_ns, seen, own, usage.most_processes, late_ns);
            gpu.length.add(own.saturating_mul(gpu.charge_permille.into()) / 1000, launches);
        }
    }

    /// How it takes part in its GPU.
    pub(super) fn on(&self, at: usize, now_ns: u64, work_conserving: bool) -> lend::Share {
        let held = &self.record.gpus[at];
        let limits = self.record.limits(work_conserving);
        lend::Share {
            own: held.slots,
            core: held.core,
            limit: limits.get(at).map_or(held.core, |limit| limit.core_limit_percent),
            low: self.record.terms.priority == Priority::Low,
            running: self.record.state == ShareState::Running && self.files.is_some(),
            active: now_ns.saturating_sub(self.gpus[at].sign_ns) <= ACTIVE_NS,
        }
    }

    /// What says how long slots of its GPU should last; none where they must not last longer: it has been at rest, or its shim
    /// knows nothing of it.
    pub(super) fn demand(&self, at: usize, now_ns: u64) -> Option<Demand> {
        let (gpu, own) = (&self.gpus[at], self.record.gpus[at].slots);
        let files = self.files.as_ref()?;
        let works = now_ns.saturating_sub(gpu.sign_ns) <= SILENT_NS;
        if !works || own.is_empty() || !files.limits.limits().stretches() {
            return None;
        }
        let row = own.union(gpu.lent.slots).longest_ns(SLOT_NS) / SLOT_NS;
        Some(Demand { row: u32::try_from(row).unwrap_or(SLOTS), kernel_ns: gpu.length.ns() })
    }

    /// Tells the container how it may go on. What its record says is written again where it differs: by a change that
    /// was recorded and did not get further, or a version that knew less.
    pub(super) fn write(&mut self, now_ns: u64, until_ns: u64, work_conserving: bool) {
        let Some(files) = &self.files else { return };
        let writer = &files.limits;
        let done = (|| -> io::Result<()> {
            for wanted in self.record.limits(work_conserving) {
                let there = writer.limits().find(&wanted.uuid).and_then(|at| writer.limits().get(at));
                if there != Some(wanted) {
                    writer.set(&wanted)?;
                }
            }
            for gpu in &mut self.gpus {
                let uuid = gpu.uuid.bytes();
                let lease =
                    region::Lease { slots: gpu.lent.slots, rate_permille: gpu.lent.rate_permille, until_ns };
                writer.set_stretch(&uuid, gpu.stretch)?;
                writer.set_lease(&uuid, &lease)?;
                writer.set_charge(&uuid, gpu.charge_permille)?;
                writer.refund(&uuid, std::mem::take(&mut gpu.back_ns))?;
                writer.set_busy_percent(&uuid, gpu.busy_permille().div_ceil(10))?;
            }
            writer.beat(now_ns);
            Ok(())
        })();
        if let Err(error) = done {
            self.tell(&error);
        }
    }

    fn tell(&mut self, error: &io::Error) {
        let text = error.to_string();
        // One that does not run may have none: they went with the last boot.
        if self.record.state == ShareState::Running && self.told.is_news(&text) {
            tracing::warn!(
                pod = %format_args!("{}/{}", self.record.pod.namespace, self.record.pod.name),
                container = self.record.container.name,
                error = text,
                "its files cannot be used, so it gets its own share and nothing else, and has no figures"
            );
        }
    }
}

impl Files {
    fn open(place: &ShareFolder) -> io::Result<Self> {
        let named = |what: &'static str| {
            move |error: io::Error| io::Error::new(error.kind(), format!("{what}: {error}"))
        };
        Ok(Self {
            limits: LimitsWriter::open(&place.limits()).map_err(named("limits"))?,
            usage: UsageReader::open(&place.usage()).map_err(named("usage"))?,
        })
    }
}

impl OnGpu {
    fn new(uuid: GpuUuid) -> Self {
        Self {
            uuid,
            charged_ns: Rising::default(),
            driver_ns: 0,
            correction: Correction::default(),
            refund: Refund::default(),
            back_ns: 0,
            length: KernelLength::default(),
            sign_ns: 0,
            unpaced_ns: 0,
            own: Rate::default(),
            driver: Rate::default(),
            charge_permille: 1000,
            lent: lend::Lent::default(),
            stretch: Stretch::default(),
        }
    }

    /// Thousandths of the GPU's time that it has used in the last second: what the driver saw, and where that sees
    /// nothing, what the container says.
    pub(super) fn busy_permille(&self) -> u32 {
        match self.driver.permille() {
            0 => self.own.permille(),
            seen => seen,
        }
    }
}

fn stamp(path: &Path) -> io::Result<Stamp> {
    let file = fs::metadata(path)?;
    Ok((file.dev(), file.ino(), file.ctime(), file.ctime_nsec()))
}

/// CLOCK_MONOTONIC in nanoseconds, as the shim reads it.
pub(crate) fn monotonic_ns() -> u64 {
    nanoseconds(rustix::time::clock_gettime(rustix::time::ClockId::Monotonic))
}

/// What a clock says, in nanoseconds.
pub(crate) fn nanoseconds(time: rustix::time::Timespec) -> u64 {
    let seconds = Duration::from_secs(time.tv_sec.unsigned_abs());
    u64::try_from(seconds.as_nanos()).unwrap_or(u64::MAX).saturating_add(time.tv_nsec.unsigned_abs())
}
