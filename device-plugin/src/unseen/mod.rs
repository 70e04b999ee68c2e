//! Memory that no call in a container shows: contexts, modules, and what a process takes past the shim. It is what the driver
//! says that the container holds beyond its own account: its cgroup where that has the driver's floor, else its processes, which
//! are told apart by their cgroups. It goes into `limits`, where it counts against the ceiling for a while, so that nothing is
//! refused for long for what nobody measures any more.
//!
//! On a thread of its own: what it reads of containers can be slow to read, if they want it so. Those are looked at less often.

mod rule;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread,
    time::Duration,
};

use ledger::{ShareFolder, ShareKind, ShareName, ShareRecord, ShareState, Shares};
use region::{GpuUsage, LimitsWriter, UsageReader, UsageSnapshot};
use tokio::sync::oneshot;
use tracing::debug;
use vcuda_config::GpuUuid;

use crate::{
    floor::{self, Floor},
    governor::{cgroup::Cgroups, monotonic_ns, nanoseconds},
    holders::{Held, Holders},
};
use rule::{Figure, beyond};

/// How often a look is taken. The driver goes through all that its clients hold for each.
const EVERY: Duration = Duration::from_millis(500);

/// How long the driver's answer is waited for. What comes later is of another time than the accounts.
const PATIENCE: Duration = Duration::from_secs(1);

/// Of a processor's time, one part in so many goes to a share at most. An account takes some microseconds a process to read; one
/// whose container has set very many locks on it takes up to 50 ms.
const PARTS: u64 = 50;

/// The running thread; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Handle {
    ended: oneshot::Receiver<()>,
    _stop: Sender<()>,
}

impl Handle {
    /// Waits for its end, which only a panic brings.
    pub(crate) async fn ended(&mut self) {
        let _ = (&mut self.ended).await;
    }
}

/// Looks at the shares in `folder` on a thread of its own. With a `floor`, it is asked about those that have it.
///
/// # Errors
///
/// No thread could be started.
pub(crate) fn start(folder: PathBuf, floor: Option<Arc<Floor>>, holders: Arc<Holders>) -> io::Result<Handle> {
    let (stop, stopped) = channel::<()>();
    let (alive, ended) = oneshot::channel::<()>();
    let mut unseen = Unseen::new(folder, floor.is_some(), "/proc".into());
    let mut reader = floor.map(floor::Reader::new);
    thread::Builder::new().name("unseen".into()).spawn(move || {
        // Dropped with the thread, however that ends.
        let _alive = alive;
        loop {
            let (by_cgroup, by_process): (Vec<_>, Vec<_>) =
                unseen.begin(monotonic_ns()).into_iter().partition(|look| look.cgroup.is_some());
            if let Some(reader) = &mut reader {
                let held = reader.read(by_cgroup.iter().flat_map(Look::of_cgroup));
                unseen.end(by_cgroup, &held, monotonic_ns());
            }
            let gpus: BTreeSet<_> = by_process.iter().flat_map(Look::gpus).collect();
            if !gpus.is_empty()
                && let Ok(held) = holders.ask(gpus).recv_timeout(PATIENCE)
            {
                let held = unseen.by_share(&by_process, &held);
                unseen.end(by_process, &held, monotonic_ns());
            }
            if stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Disconnected) {
                return;
            }
        }
    })?;
    Ok(Handle { ended, _stop: stop })
}

/// See the module.
struct Unseen {
    folder: PathBuf,
    floors: bool,
    cgroups: Cgroups,
    figures: BTreeMap<(ShareName, GpuUuid), Known>,
    /// Whose the node's containers are, by ID: all of them, also of shares that are not looked at, so that none can pass its
    /// processes off as another's by the names of cgroups that it makes.
    containers: HashMap<String, ShareName>,
    /// CLOCK_MONOTONIC in nanoseconds until when a share is not looked at.
    resting: BTreeMap<ShareName, u64>,
}

/// Bytes that the driver says shares' containers hold of GPUs. Where it does not answer, there is no entry.
type OfShares = BTreeMap<(ShareName, GpuUuid), u64>;

/// What is known of a container on one GPU.
struct Known {
    container: String,
    figure: Figure,
}

/// A look at a share that has begun: its account before the driver is asked.
struct Look {
    name: ShareName,
    record: ShareRecord,
    /// Of which the driver is asked, where it holds that to the share.
    cgroup: Option<PathBuf>,
    limits: LimitsWriter,
    usage: UsageReader,
    before: UsageSnapshot,
}

impl Unseen {
    /// Processes are looked up below `proc`.
    fn new(folder: PathBuf, floors: bool, proc: PathBuf) -> Self {
        Self {
            folder,
            floors,
            cgroups: Cgroups::new(proc),
            figures: BTreeMap::new(),
            containers: HashMap::new(),
            resting: BTreeMap::new(),
        }
    }

    /// Reads what the shares account for that are to be looked at.
    fn begin(&mut self, now_ns: u64) -> Vec<Look> {
        let Ok(shares) = Shares::read(&self.folder) else { return Vec::new() };
        let mut records = shares.records;
        self.containers =
            records.iter().map(|(name, record)| (record.container.id.clone(), name.clone())).collect();
        records.retain(|_, record| {
            record.kind == ShareKind::Share && record.shim && record.state == ShareState::Running
        });
        self.figures.retain(|(name, _), _| records.contains_key(name));
        self.resting.retain(|name, until_ns| records.contains_key(name) && *until_ns > now_ns);
        records.retain(|name, _| !self.resting.contains_key(name));
        let mut looks = Vec::new();
        for (name, record) in records {
            let begun_ns = busy_ns();
            looks.extend(self.look_at(&name, record));
            self.rest(name, busy_ns().saturating_sub(begun_ns), now_ns);
        }
        for look in &looks {
            for gpu in look.gpus() {
                let known = look.at(&gpu).map_or(0, |at| look.limits.limits().unseen_bytes(at, || now_ns));
                let container = &look.record.container.id;
                let key = (look.name.clone(), gpu);
                if self.figures.get(&key).is_none_or(|known| known.container != *container) {
                    let figure = Figure::known(known);
                    self.figures.insert(key, Known { container: container.clone(), figure });
                }
            }
        }
        looks
    }

    /// Leaves a share alone for a while, by what half a look at it has cost.
    fn rest(&mut self, name: ShareName, spent_ns: u64, now_ns: u64) {
        self.resting.insert(name, now_ns.saturating_add(spent_ns.saturating_mul(2 * PARTS)));
    }

    /// None where the container's files cannot be read.
    fn look_at(&self, name: &ShareName, record: ShareRecord) -> Option<Look> {
        let folder = ShareFolder::new(&self.folder, name);
        let floor = self.floors.then(|| ledger::Floor::load(&folder, &record.container.id)).flatten();
        let opened = (|| -> io::Result<_> {
            let limits = LimitsWriter::open(&folder.limits())?;
            let usage = UsageReader::open(&folder.usage())?;
            let before = usage.snapshot()?;
            Ok((limits, usage, before))
        })();
        let (limits, usage, before) =
            opened.inspect_err(|error| debug!(%error, share = %name, "not looked at")).ok()?;
        Some(Look {
            name: name.clone(),
            record,
            cgroup: floor.map(|floor| floor.cgroup),
            limits,
            usage,
            before,
        })
    }

    /// Goes on with what the driver has said: `held`.
    fn end(&mut self, looks: Vec<Look>, held: &OfShares, now_ns: u64) {
        for look in looks {
            let Ok(after) = look.usage.snapshot() else { continue };
            for gpu in look.gpus() {
                let key = (look.name.clone(), gpu);
                let Some(held) = held.get(&key) else { continue };
                let (Some(at), Some(known)) = (look.at(&key.1), self.figures.get_mut(&key)) else { continue };
                let (Some(before), Some(after)) = (look.before.gpus.get(at), after.gpus.get(at)) else {
                    continue;
                };
                let unseen = known.figure.look(beyond(*held, look.sees(*before), look.sees(*after)));
                let ceiling = look.limits.limits().memory_bytes(at);
                let noted = look.limits.set_unseen(&key.1.bytes(), unseen.min(ceiling), now_ns);
                if let Err(error) = noted {
                    debug!(%error, share = %look.name, "nothing noted");
                }
            }
        }
    }

    /// What the driver says that the processes of each share hold of each GPU, added up.
    fn by_share(&mut self, looks: &[Look], held: &Held) -> OfShares {
        self.cgroups.tick();
        let answered = looks.iter().flat_map(|look| {
            look.gpus().filter(|gpu| held.contains_key(gpu)).map(|gpu| (look.name.clone(), gpu))
        });
        let mut sums: OfShares = answered.map(|key| (key, 0)).collect();
        for (gpu, pid, bytes) in
            held.iter().flat_map(|(gpu, of_gpu)| of_gpu.iter().map(move |(pid, bytes)| (gpu, pid, bytes)))
        {
            let container = self.cgroups.container(*pid, |id| self.containers.contains_key(id));
            if let Some(name) = container.and_then(|id| self.containers.get(id))
                && let Some(sum) = sums.get_mut(&(name.clone(), gpu.clone()))
            {
                *sum = sum.saturating_add(*bytes);
            }
        }
        sums
    }
}

/// How long this thread has been on a processor, in nanoseconds: a node that is busy is no container's fault.
fn busy_ns() -> u64 {
    nanoseconds(rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime))
}

impl Look {
    fn gpus(&self) -> impl Iterator<Item = GpuUuid> {
        self.record.gpus.iter().map(|gpu| gpu.uuid.clone())
    }

    /// What the driver is to be asked of a container that it holds.
    fn of_cgroup(&self) -> impl Iterator<Item = ((ShareName, GpuUuid), &GpuUuid, &Path)> {
        let gpus = self.record.gpus.iter().map(|gpu| &gpu.uuid);
        let cgroup = self.cgroup.as_deref();
        gpus.filter_map(move |gpu| Some(((self.name.clone(), gpu.clone()), gpu, cgroup?)))
    }

    /// The account as the driver's figure is to be compared with it: a cgroup has once what several of its processes have.
    fn sees(&self, usage: GpuUsage) -> GpuUsage {
        if self.cgroup.is_some() { GpuUsage { shared_bytes: 0, ..usage } } else { usage }
    }

    /// Which GPU of the share it is.
    fn at(&self, gpu: &GpuUuid) -> Option<usize> {
        self.limits.limits().find(&gpu.bytes())
    }
}
