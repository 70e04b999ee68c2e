//! The governor: once a tick it reads what every container of the node has used, and lends time that its owners leave
//! idle. It is no part of the guarantee: a share's own slots and core stand in its `limits`, and leases end by
//! themselves, so when it is gone everybody has just that, and when it is back nobody notices.
//!
//! All it knows is read anew from the shares' folders; nothing is kept on disk. It must not know of kubelet.

pub(crate) mod cgroup;
pub mod lend;
mod share;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::Instant,
};

use daemon::Told;
use ledger::ShareName;
use region::{Demand, Stretching};
use serde::Serialize;
use tokio::sync::oneshot;
use tracing::{debug, error};
use vcuda_config::GpuUuid;

use crate::meter::{Meter, TICK};
use cgroup::Cgroups;
use share::Governed;
pub(crate) use share::{monotonic_ns, nanoseconds};

/// How long what is lent is lent, in nanoseconds: two ticks and a half, so that one late tick ends no lease. When the
/// governor is killed, a borrower goes on for as long as that.
const LEASE_NS: u64 = 250_000_000;

/// What a container has been seen to do on a GPU. Counters never fall as long as the device plugin runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Figures {
    /// The GPU.
    pub gpu: GpuUuid,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
    /// Percent of the GPU's time that is its own.
    pub core: u32,
    /// Percent that it may use while others leave it idle.
    pub core_limit: u32,
    /// Comes after the others there.
    pub low: bool,
    /// Thousandths of the GPU's time that it may use at this moment.
    pub rate_permille: u32,
    /// Thousandths that it has used in the last second.
    pub busy_permille: u32,
    /// Thousandths that a nanosecond of its own measure counts.
    pub charge_permille: u32,
    /// GPU time that it has measured itself, in nanoseconds.
    pub charged_ns: u64,
    /// GPU time that the driver has seen it use, in nanoseconds.
    pub driver_ns: u64,
    /// Kernel launches, on all its GPUs.
    pub launches: u64,
    /// Time that its launches were held back, in nanoseconds, summed over threads.
    pub throttled_ns: u64,
}

/// The running governor; it ends when this is dropped.
#[derive(Debug)]
pub struct Handle {
    figures: Arc<Published>,
    ended: oneshot::Receiver<()>,
    _stop: Sender<()>,
}

/// What every container has been seen to do, as of the last tick.
#[derive(Debug, Default)]
pub struct Published(Mutex<Vec<Figures>>);

impl Published {
    /// The figures.
    pub fn read(&self) -> Vec<Figures> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Handle {
    /// What every container has been seen to do, as of the last tick.
    pub fn figures(&self) -> Arc<Published> {
        Arc::clone(&self.figures)
    }

    /// Waits for its end, which only a panic brings.
    pub(crate) async fn ended(&mut self) {
        let _ = (&mut self.ended).await;
    }
}

/// See the module.
pub struct Governor {
    folder: PathBuf,
    work_conserving: bool,
    meter: Arc<Meter>,
    cgroups: Cgroups,
    shares: BTreeMap<ShareName, Governed>,
    /// How long the slots of each GPU last.
    stretching: BTreeMap<GpuUuid, Stretching>,
    last_ns: u64,
    /// Shares whose record cannot be read: their slots are unknown.
    unreadable: BTreeSet<ShareName>,
    told: Told,
}

/// Starts the governor of the shares in `folder` on a thread of its own.
///
/// # Errors
///
/// No thread could be started.
pub fn start(folder: PathBuf, work_conserving: bool, meter: Arc<Meter>) -> io::Result<Handle> {
    let (stop, stopped) = channel();
    let (alive, ended) = oneshot::channel();
    let figures = Arc::new(Published::default());
    let published = Arc::clone(&figures);
    let mut governor = Governor::new(folder, work_conserving, meter, "/proc".into());
    thread::Builder::new().name("governor".into()).spawn(move || {
        // Dropped with the thread, however that ends.
        let _alive: oneshot::Sender<()> = alive;
        run(&mut governor, &stopped, &published);
    })?;
    Ok(Handle { figures, ended, _stop: stop })
}

fn run(governor: &mut Governor, stopped: &Receiver<()>, published: &Published) {
    let mut next = Instant::now();
    loop {
        governor.tick(monotonic_ns());
        *published.0.lock().unwrap_or_else(PoisonError::into_inner) = governor.figures();
        // Ticks that were missed are missed.
        next = (next + TICK).max(Instant::now());
        let pause = next.saturating_duration_since(Instant::now());
        if stopped.recv_timeout(pause) == Err(RecvTimeoutError::Disconnected) {
            return;
        }
    }
}

impl Governor {
    /// A governor of the shares in `folder`. Processes are looked up below `proc`.
    pub fn new(folder: PathBuf, work_conserving: bool, meter: Arc<Meter>, proc: PathBuf) -> Self {
        Self {
            folder,
            work_conserving,
            meter,
            cgroups: Cgroups::new(proc),
            shares: BTreeMap::new(),
            stretching: BTreeMap::new(),
            last_ns: 0,
            unreadable: BTreeSet::new(),
            told: Told::default(),
        }
    }

    /// Does what is to be done in one tick, at the moment `now_ns` of CLOCK_MONOTONIC.
    pub fn tick(&mut self, now_ns: u64) {
        let passed_ns = if self.last_ns == 0 { 0 } else { now_ns.saturating_sub(self.last_ns) };
        self.last_ns = now_ns;
        match self.look() {
            Ok(()) => self.told.forget(),
            Err(error) => {
                let text = format!("{}: {error}", self.folder.display());
                if self.told.is_news(&text) {
                    error!("the shares cannot be listed, so nothing is lent: {text}");
                }
                // Leases end by themselves.
                return;
            }
        }
        let used = self.used();
        for (name, share) in &mut self.shares {
            let driver = |gpu: &GpuUuid| {
                let used_ns = used.get(&(name.clone(), gpu.clone())).copied().unwrap_or(0);
                (used_ns, self.meter.late_ns(gpu, now_ns))
            };
            share.read(now_ns, passed_ns, driver);
        }
        let less = self.lend(now_ns);
        let until_ns = now_ns.saturating_add(LEASE_NS);
        // Who loses something is told first, so that nothing is lent twice, not even for an instant.
        for first in [true, false] {
            for (name, share) in &mut self.shares {
                if less.contains(name) == first {
                    share.write(now_ns, until_ns, self.work_conserving);
                }
            }
        }
    }

    /// What every container has been seen to do.
    pub fn figures(&self) -> Vec<Figures> {
        let of_share = |share: &Governed| {
            let of_gpu = |(at, gpu): (usize, &share::OnGpu)| {
                let terms = share.on(at, self.last_ns, self.work_conserving);
                Figures {
                    gpu: gpu.uuid.clone(),
                    namespace: share.record.pod.namespace.clone(),
                    pod: share.record.pod.name.clone(),
                    container: share.record.container.name.clone(),
                    core: terms.core,
                    core_limit: terms.limit,
                    low: terms.low,
                    rate_permille: gpu.lent.rate_permille,
                    busy_permille: gpu.busy_permille(),
                    charge_permille: gpu.charge_permille,
                    charged_ns: gpu.charged_ns.sum,
                    driver_ns: gpu.driver_ns,
                    launches: share.launches.sum,
                    throttled_ns: share.throttled_ns.sum,
                }
            };
            share.gpus.iter().enumerate().map(of_gpu).collect::<Vec<_>>()
        };
        self.shares.values().flat_map(of_share).collect()
    }

    /// Reads which shares there are.
    fn look(&mut self) -> io::Result<()> {
        let mut before = std::mem::take(&mut self.shares);
        self.unreadable.clear();
        for name in names(&self.folder)? {
            match Governed::look(&self.folder, &name, before.remove(&name)) {
                Ok(Some(share)) => {
                    self.shares.insert(name, share);
                }
                Ok(None) => {}
                // Released in this moment.
                Err(_) if fs::symlink_metadata(self.folder.join(name.as_str())).is_err() => {}
                Err(error) => {
                    debug!(%error, "what this share owns is unknown, so nothing is lent");
                    self.unreadable.insert(name);
                }
            }
        }
        let wanted = self.shares.values().flat_map(|share| share.gpus.iter().map(|gpu| gpu.uuid.clone()));
        self.meter.want(wanted.collect());
        Ok(())
    }

    /// What the driver has seen each share use of each GPU since the last tick.
    fn used(&mut self) -> HashMap<(ShareName, GpuUuid), u64> {
        let by_container: HashMap<&str, &ShareName> =
            self.shares.iter().map(|(name, share)| (share.record.container.id.as_str(), name)).collect();
        self.cgroups.tick();
        let mut used = HashMap::new();
        for one in self.meter.take() {
            let container = self.cgroups.container(one.pid, |id| by_container.contains_key(id));
            if let Some(name) = container.and_then(|id| by_container.get(id)) {
                let sum: &mut u64 = used.entry(((*name).clone(), one.gpu)).or_default();
                *sum = sum.saturating_add(one.used_ns);
            }
        }
        used
    }

    /// Decides who is lent what. Tells who has less than before.
    fn lend(&mut self, now_ns: u64) -> BTreeSet<ShareName> {
        let mut by_gpu: BTreeMap<GpuUuid, Vec<(ShareName, usize)>> = BTreeMap::new();
        for (name, share) in &self.shares {
            for (at, gpu) in share.gpus.iter().enumerate() {
                by_gpu.entry(gpu.uuid.clone()).or_default().push((name.clone(), at));
            }
        }
        self.stretching.retain(|gpu, _| by_gpu.contains_key(gpu));
        let mut less = BTreeSet::new();
        for (gpu, on_gpu) in &by_gpu {
            let mut shares: Vec<lend::Share> = on_gpu
                .iter()
                .map(|(name, at)| self.shares[name].on(*at, now_ns, self.work_conserving))
                .collect();
            let running = on_gpu.iter().zip(&shares).filter(|(_, share)| share.running);
            let demands: Option<Vec<Demand>> =
                running.map(|((name, at), _)| self.shares[name].demand(*at, now_ns)).collect();
            let demands = demands.filter(|_| self.unreadable.is_empty());
            let stretching = self.stretching.entry(gpu.clone()).or_default();
            let stretch = stretching.tick(now_ns, demands.as_deref());
            if stretching.is_stretched(now_ns) {
                // What is lent of such slots would not be back in time.
                shares.iter_mut().for_each(|share| share.active = share.running);
            }
            let lent = if self.unreadable.is_empty() {
                lend::lend(&shares)
            } else {
                vec![lend::Lent::default(); shares.len()]
            };
            for ((name, at), lent) in on_gpu.iter().zip(lent) {
                let Some(share) = self.shares.get_mut(name) else { continue };
                share.gpus[*at].stretch = stretch;
                let had = std::mem::replace(&mut share.gpus[*at].lent, lent);
                if !had.slots.difference(lent.slots).is_empty() || lent.rate_permille < had.rate_permille {
                    less.insert(name.clone());
                }
            }
        }
        less
    }
}

/// The shares in `folder`; none where it does not exist.
fn names(folder: &Path) -> io::Result<Vec<ShareName>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        if let Some(Ok(name)) = entry?.file_name().to_str().map(str::parse) {
            names.push(name);
        }
    }
    Ok(names)
}
