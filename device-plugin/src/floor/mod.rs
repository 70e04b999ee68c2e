//! The driver's floor under the shim: where NVML has memory limits for cgroups, a container with a share gets one before
//! its first process runs, since the guard asks for it (`server`). It follows the share, is made up for where a container
//! started while this plugin was down, and tells what a container really holds (`Reader`), which no call in it shows. The shim
//! still gives the container its view and a clean out-of-memory; the floor holds whoever passes it by.

mod cgroup;
mod server;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use daemon::Told;
use ledger::{RecordError, ShareFolder, ShareKind, ShareName, ShareRecord, ShareState, Shares};
use nvml_limits::{LimitsError, MemoryLimits};
use region::Limits;
use tracing::{debug, info, warn};
use vcuda_config::{GpuUuid, MemoryFloor, Paths, floor::Answer};

pub(crate) use server::serve;

/// Puts the driver's floor under shares.
#[derive(Debug)]
pub(crate) struct Floor {
    paths: Paths,
    policy: MemoryFloor,
    /// Shares of which it was said that they have none, and why, so that it is said once.
    told: Mutex<BTreeMap<ShareName, Told>>,
}

impl Floor {
    /// None where the node wants none.
    pub(crate) fn new(paths: Paths, policy: MemoryFloor) -> Option<Arc<Self>> {
        (policy != MemoryFloor::Shim).then(|| Arc::new(Self { paths, policy, told: Mutex::default() }))
    }

    /// Holds the container of `share`, in whose cgroup process `pid` is. It may block for the driver.
    fn hold(&self, share: &str, pid: i32) -> Answer {
        let held = self.record(share).and_then(|(name, record)| {
            let cgroup = cgroup::of_process(pid, &record.container.id).map_err(LimitsError::Failed)?;
            self.put(&self.nvml()?, &name, &record, cgroup)
        });
        self.answer(share, held)
    }

    /// Holds the container of `share`, which runs, to what it may use now. It may block for the driver.
    fn renew(&self, share: &str) -> Answer {
        let held = self.record(share).and_then(|(name, record)| {
            let folder = ShareFolder::new(&self.paths.shares(), &name);
            let cgroup = match ledger::Floor::load(&folder, &record.container.id) {
                Some(floor) => floor.cgroup,
                None => cgroup::of_container(&record.container.id)
                    .map_err(LimitsError::Failed)?
                    .ok_or_else(|| LimitsError::Failed("its container has no cgroup of version 2".into()))?,
            };
            self.put(&self.nvml()?, &name, &record, cgroup)
        });
        self.answer(share, held)
    }

    /// Sees to all shares: those that have no floor yet, or another than they should, get it. It may block for the driver.
    pub(crate) fn tend(&self) {
        let Ok(shares) = Shares::read(&self.paths.shares()) else { return };
        self.told().retain(|name, _| shares.records.contains_key(name));
        let wanted =
            |record: &ShareRecord| record.kind == ShareKind::Share && record.state == ShareState::Running;
        let mut running = shares.records.iter().filter(|(_, record)| wanted(record)).peekable();
        if running.peek().is_none() {
            return;
        }
        let nvml = match self.nvml() {
            Ok(nvml) => nvml,
            Err(error) => return debug!(%error, "no floor"),
        };
        for (name, record) in running {
            if let Err(error) = self.tend_one(&nvml, name, record) {
                self.tell(name.as_str(), &error);
            }
        }
    }

    fn tend_one(
        &self,
        nvml: &MemoryLimits,
        name: &ShareName,
        record: &ShareRecord,
    ) -> Result<(), LimitsError> {
        let folder = ShareFolder::new(&self.paths.shares(), name);
        let Some(floor) = ledger::Floor::load(&folder, &record.container.id) else {
            // One that has no cgroup yet is still being made, and the guard will ask.
            return match cgroup::of_container(&record.container.id).map_err(LimitsError::Failed)? {
                Some(cgroup) => self.put(nvml, name, record, cgroup),
                None => Ok(()),
            };
        };
        if floor.bytes != ceilings(&folder, record) {
            return self.put(nvml, name, record, floor.cgroup);
        }
        for gpu in floor.bytes.keys() {
            match nvml.get(gpu.as_str(), &floor.cgroup) {
                Err(LimitsError::NotSet) => return self.put(nvml, name, record, floor.cgroup),
                limit => limit?,
            };
        }
        Ok(())
    }

    fn put(
        &self,
        nvml: &MemoryLimits,
        name: &ShareName,
        record: &ShareRecord,
        cgroup: PathBuf,
    ) -> Result<(), LimitsError> {
        let folder = ShareFolder::new(&self.paths.shares(), name);
        let bytes = ceilings(&folder, record);
        for (gpu, bytes) in &bytes {
            nvml.set(gpu.as_str(), &cgroup, *bytes)?;
        }
        ledger::Floor::new(record.container.id.clone(), cgroup, bytes)
            .store(&folder)
            .map_err(|error| LimitsError::Failed(format!("{}: {error}", folder.floor().display())))?;
        self.told().remove(name);
        info!(share = %name, "the driver holds it to its memory");
        Ok(())
    }

    fn record(&self, share: &str) -> Result<(ShareName, ShareRecord), LimitsError> {
        let failed = |error: String| LimitsError::Failed(error);
        let name: ShareName =
            share.parse().map_err(|error: ledger::ShareNameError| failed(error.to_string()))?;
        let record = ShareRecord::load(&self.paths.shares(), &name)
            .map_err(|error: RecordError| failed(error.to_string()))?;
        match record.kind {
            ShareKind::Share => Ok((name, record)),
            ShareKind::Whole => Err(failed(format!("share {name} is of whole GPUs, which have no ceiling"))),
        }
    }

    /// NVML, of the driver that is installed at this moment.
    fn nvml(&self) -> Result<MemoryLimits, LimitsError> {
        let driver = cdi_generator::Driver::discover(&self.paths.driver_root)
            .map_err(|error| LimitsError::Failed(error.to_string()))?;
        MemoryLimits::open(&driver.nvml.host)
    }

    fn answer(&self, share: &str, held: Result<(), LimitsError>) -> Answer {
        let Err(error) = held else { return Answer::Held };
        self.tell(share, &error);
        match error {
            LimitsError::NotOffered(reason) => Answer::NotOffered { reason },
            other => Answer::Failed { reason: other.to_string() },
        }
    }

    /// Says why a share has no floor: loud where the driver could, or the node demands it.
    fn tell(&self, share: &str, error: &LimitsError) {
        let words = error.to_string();
        if let Ok(name) = share.parse::<ShareName>()
            && !self.told().entry(name).or_default().is_news(&words)
        {
            return;
        }
        match error {
            LimitsError::NotOffered(_) if self.policy == MemoryFloor::Auto => {
                debug!(share, why = words, "held by the shim only");
            }
            _ => warn!(share, why = words, "held by the shim only"),
        }
    }

    fn told(&self) -> std::sync::MutexGuard<'_, BTreeMap<ShareName, Told>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks what cgroups hold that have a floor.
pub(crate) struct Reader {
    floor: Arc<Floor>,
    /// Open from one look to the next.
    nvml: Option<MemoryLimits>,
}

impl Reader {
    pub(crate) fn new(floor: Arc<Floor>) -> Self {
        Self { floor, nvml: None }
    }

    /// Bytes of a GPU that the processes of a cgroup hold, contexts and modules included: for each of `wanted` of which the
    /// driver tells it. It may block for the driver.
    pub(crate) fn read<'a, K: Ord>(
        &mut self,
        wanted: impl Iterator<Item = (K, &'a GpuUuid, &'a Path)>,
    ) -> BTreeMap<K, u64> {
        let open = || self.floor.nvml().ok();
        look(&mut self.nvml, open, wanted, |nvml, gpu, cgroup| {
            nvml.get(gpu.as_str(), cgroup).map(|limit| limit.used_bytes)
        })
    }
}

/// Asks of each of `wanted` how much it holds. NVML is opened once at most, and a GPU that fails is not asked again.
fn look<'a, N, K: Ord>(
    nvml: &mut Option<N>,
    open: impl Fn() -> Option<N>,
    wanted: impl Iterator<Item = (K, &'a GpuUuid, &'a Path)>,
    ask: impl Fn(&N, &GpuUuid, &Path) -> Result<u64, LimitsError>,
) -> BTreeMap<K, u64> {
    let (mut held, mut failed, mut opened) = (BTreeMap::new(), BTreeSet::new(), false);
    let mut wanted = wanted.peekable();
    if wanted.peek().is_none() {
        *nvml = None;
    }
    for (key, gpu, cgroup) in wanted {
        if failed.contains(gpu) {
            continue;
        }
        if nvml.is_none() && !opened {
            opened = true;
            *nvml = open();
        }
        let Some(at) = nvml.as_ref() else { break };
        match ask(at, gpu, cgroup) {
            Ok(bytes) => _ = held.insert(key, bytes),
            // It is put again soon.
            Err(LimitsError::NotSet) => {}
            Err(error) => {
                debug!(%error, %gpu, "the driver does not tell what a container holds");
                failed.insert(gpu);
                // The driver may have been replaced since it was opened.
                if !opened {
                    *nvml = None;
                }
            }
        }
    }
    if !failed.is_empty() {
        *nvml = None;
    }
    held
}

/// What the share may use of each of its GPUs at this moment: what its container sees, or else what was bound.
fn ceilings(folder: &ShareFolder, record: &ShareRecord) -> BTreeMap<GpuUuid, u64> {
    let limits = Limits::open(&folder.limits()).ok();
    let now = |gpu: &GpuUuid| {
        let limits = limits.as_ref()?;
        Some(limits.memory_bytes(limits.find(&gpu.bytes())?)).filter(|bytes| *bytes > 0)
    };
    record.gpus.iter().map(|gpu| (gpu.uuid.clone(), now(&gpu.uuid).unwrap_or(gpu.memory_bytes))).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_gpu_that_fails_is_asked_once_a_look_and_nvml_opened_once() {
        let [dead, live] = [1, 2].map(|n| format!("GPU-00000000-0000-0000-0000-{n:012}").parse().unwrap());
        let (opened, asked) = (Cell::new(0), Cell::new(0));
        let open = || {
            opened.set(opened.get() + 1);
            Some(())
        };
        let ask = |(): &(), gpu: &GpuUuid, _: &Path| {
            asked.set(asked.get() + 1);
            if *gpu == dead { Err(LimitsError::Failed("lost".into())) } else { Ok(7) }
        };
        let mut nvml = None;
        for round in 1..=3 {
            // Twenty shares on the one, and then as many on the other.
            let wanted = (0..40).map(|n| (n, if n < 20 { &dead } else { &live }, Path::new("/")));
            let held = look(&mut nvml, open, wanted, ask);
            assert_eq!(held, (20..40).map(|n| (n, 7)).collect());
            assert_eq!((opened.get(), asked.get()), (round, 21 * round));
        }
        let wanted = |count| (0..count).map(|n| (n, &live, Path::new("/")));
        look(&mut nvml, open, wanted(5), ask);
        look(&mut nvml, open, wanted(5), ask);
        assert_eq!((opened.get(), nvml), (4, Some(())), "it stays open where nothing fails");
        look(&mut nvml, open, wanted(0), ask);
        assert_eq!(nvml, None);
    }
}
