//! Binding: from a container that is being created to its share, and from what ends back to what is free. Blocking
//! work on a few small files; who calls it, and how long it may take, is `service`'s matter.

use std::{
    collections::HashSet,
    fs::{self, Permissions},
    io,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ledger::{
    Claim, ContainerRef, Inventory, Ledger, LedgerError, PodRef, SandboxEnd, ShareFolder, ShareKind,
    ShareName, ShareRecord, ShareState, Terms, Wishes, place_by,
};
use region::{Limits, Usage, place};
use vcuda_config::{GpuUuid, Paths, Request};

use crate::{
    adjust,
    chosen::Chosen,
    grant::Granted,
    refusal::Refusal,
    wire::{Container, ContainerAdjustment, PodSandbox},
};

/// Longest ID of a container or sandbox that is taken; containerd's are 64 characters.
const ID_MAX: usize = 256;

/// Longest pod name and namespace that is recorded; Kubernetes' are at most 253 characters.
const POD_NAME_MAX: usize = 253;

/// Binds and releases the shares of one node.
#[derive(Debug)]
pub struct Binder {
    paths: Paths,
    ledger: Ledger,
    inventory: Mutex<Option<Cached>>,
    ours: Mutex<Ours>,
}

/// The inventory as it was read, and the file that it was read from.
#[derive(Debug)]
struct Cached {
    /// Inode, modification time in seconds and nanoseconds, size. The file is replaced, never rewritten.
    stamp: (u64, i64, i64, u64),
    inventory: Arc<Inventory>,
}

/// Containers and sandboxes that have shares: so that events about all others are over at once.
#[derive(Clone, Debug, Default)]
struct Ours {
    containers: HashSet<String>,
    sandboxes: HashSet<String>,
    /// Of the sandboxes, those that were there when the session began. containerd tells of their containers, but no
    /// longer of their own end when it has been restarted since they were made (nri.go `needsStopping`: it forgets
    /// the state of sandboxes, in all versions to 2.3).
    old_sandboxes: HashSet<String>,
    /// Shares that the runtime's last list left open, see [`ledger::Pruned::unseen`].
    unseen: Vec<ShareName>,
    /// See [`Binder::is_behind`].
    behind: bool,
}

/// A share that was bound, and what its container gets.
#[derive(Debug)]
pub struct Binding {
    /// Its name.
    pub name: ShareName,
    /// What the container gets.
    pub adjustment: ContainerAdjustment,
}

impl Binder {
    /// Opens the ledger at the places that `paths` names.
    pub fn open(paths: Paths) -> Result<Self, LedgerError> {
        let ledger = Ledger::open(&paths.shares())?;
        let binder = Self { paths, ledger, inventory: Mutex::default(), ours: Mutex::default() };
        binder.reload(Vec::new())?;
        Ok(binder)
    }

    /// The ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The node's places.
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Binds the share of `container`, which has a grant, if it is `wanted` still when its turn has come: kubelet may
    /// have tried again by then, and the share be that of the next container, or the pod may be gone.
    pub fn bind(
        &self,
        pod: &PodSandbox,
        container: &Container,
        wanted: impl Fn() -> bool,
    ) -> Result<Binding, Refusal> {
        let refuse = |reason: String| Refusal::new(pod, container, reason);
        let granted = Granted::read(pod, container, &self.paths).map_err(refuse)?;
        let claim = claim(pod, container, &granted).map_err(refuse)?;
        let inventory = self.inventory().map_err(refuse)?;
        let chosen = Chosen::read(pod, &container.name, &inventory).map_err(refuse)?;
        if matches!(granted.request, Request::Share { .. }) && !self.paths.shim().is_file() {
            return Err(refuse(format!(
                "{} is not there; install vcuda {} on this node again",
                self.paths.shim().display(),
                vcuda_config::VERSION
            )));
        }
        let mut obstacle = None;
        let fill = |record: &ShareRecord, fresh: &ShareFolder| {
            // Asked here, where it is known which GPU it would be, while nobody else changes anything, and before anything
            // is bound.
            obstacle = (!wanted())
                .then(|| "nobody waits for its share any more".to_owned())
                .or_else(|| self.misplaced(record, &chosen, &granted, &claim.wishes, &inventory))
                .or_else(|| adjust::unenforceable(record, &inventory, container));
            if obstacle.is_some() {
                return Err(io::ErrorKind::Unsupported.into());
            }
            fill(record, fresh)
        };
        let preferred = preferred_gpus(&chosen, &granted);
        // The pod's end, should it be told before this is done, waits for its turn.
        self.ours().sandboxes.insert(pod.id.clone());
        let bound = self.ledger.bind(&inventory, &claim, &preferred, fill);
        let bound = match (bound, obstacle) {
            (_, Some(obstacle)) => return Err(refuse(obstacle)),
            (bound, None) => bound.map_err(|error| refuse(error.to_string()))?,
        };
        {
            let mut ours = self.ours();
            ours.containers.insert(claim.container.id);
            // A list that was gone through meanwhile may have forgotten it.
            ours.sandboxes.insert(claim.pod.sandbox_id);
        }
        for lack in &bound.placement.passed_over {
            tracing::warn!(share = %bound.name, %lack, "not placed where kubelet counts it");
        }
        for name in &bound.gave_way {
            tracing::info!(share = %name, to = %bound.name, "the share of an ended container gave way");
        }
        tracing::info!(
            share = %bound.name,
            pod = %format_args!("{}/{}", pod.namespace, pod.name),
            gpus = %described(&bound.record),
            choice = ?bound.placement.choice,
            "bound"
        );
        let adjustment = adjust::adjustment(&bound.record, &inventory, container);
        Ok(Binding { name: bound.name, adjustment })
    }

    /// Why a share may not be where `record` puts it: the scheduler counts it elsewhere.
    fn misplaced(
        &self,
        record: &ShareRecord,
        chosen: &Chosen,
        granted: &Granted,
        wishes: &Wishes,
        inventory: &Inventory,
    ) -> Option<String> {
        let Chosen::Must(gpus) = chosen else { return None };
        if record.gpus.len() == gpus.len() && record.gpus.iter().all(|gpu| gpus.contains(&gpu.uuid)) {
            return None;
        }
        let lack = self.ledger.shares().ok().and_then(|shares| {
            let free = shares.free(inventory).ok()?;
            let cordoned = inventory.cordoned_at();
            let rules = wishes.rules(inventory, &cordoned);
            Some(match place_by(&free, &granted.request, gpus, &rules) {
                Ok(placement) if placement.gpus.iter().all(|gpu| gpus.contains(&gpu.uuid)) => Vec::new(),
                Ok(placement) => placement.passed_over,
                Err(no_room) => no_room.lacks.into_iter().filter(|lack| gpus.contains(lack.gpu())).collect(),
            })
        });
        let lack = lack.filter(|lacks| !lacks.is_empty()).map(|lacks| {
            let lacks: Vec<_> = lacks.iter().map(ToString::to_string).collect();
            lacks.join("; ")
        });
        let lack = lack.unwrap_or_else(|| "its container is bound elsewhere".into());
        let gpus: Vec<&str> = gpus.iter().map(GpuUuid::as_str).collect();
        Some(format!(
            "the scheduler picked {} for it, which cannot take it ({lack}); delete the pod to have it placed anew",
            gpus.join(", ")
        ))
    }

    /// Whether a share belongs to the container with this ID.
    pub fn knows_container(&self, id: &str) -> bool {
        self.ours().containers.contains(id)
    }

    /// Whether a share belongs to the pod sandbox with this ID.
    pub fn knows_sandbox(&self, id: &str) -> bool {
        self.ours().sandboxes.contains(id)
    }

    /// Notes that a container has ended. Its share stays with its pod.
    pub fn container_ended(&self, id: &str) -> Result<(), LedgerError> {
        if let Some(share) = self.noted(self.ledger.mark_stopped(id))? {
            tracing::info!(%share, "container ended; the share stays with its pod");
        }
        self.ours().containers.remove(id);
        Ok(())
    }

    /// Releases what belongs to a pod whose sandbox has ended.
    pub fn sandbox_ended(&self, id: &str, end: SandboxEnd) -> Result<(), LedgerError> {
        let released = self.noted(self.ledger.end_sandbox(id, end))?;
        for share in &released {
            tracing::info!(%share, "pod ended; share released");
        }
        if end == SandboxEnd::Removed || !released.is_empty() {
            self.ours().sandboxes.remove(id);
        }
        Ok(())
    }

    /// Whether the ledger lacks something that the runtime has told of, as after an error of the disk: it tells of an end
    /// only once, so its list is to be asked for.
    pub fn is_behind(&self) -> bool {
        self.ours().behind
    }

    pub(crate) fn set_behind(&self, behind: bool) {
        self.ours().behind = behind;
    }

    pub(crate) fn noted<T>(&self, done: Result<T, LedgerError>) -> Result<T, LedgerError> {
        if done.is_err() {
            self.set_behind(true);
        }
        done
    }

    /// The node's GPUs, as the device plugin last wrote them down in this boot.
    pub(crate) fn inventory(&self) -> Result<Arc<Inventory>, String> {
        let path = self.paths.inventory();
        let mut cached = self.inventory.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = fs::metadata(&path).map(|it| (it.ino(), it.mtime(), it.mtime_nsec(), it.size())).ok();
        if let (Some(cached), Some(stamp)) = (&*cached, stamp)
            && cached.stamp == stamp
        {
            return Ok(Arc::clone(&cached.inventory));
        }
        *cached = None;
        let inventory = Arc::new(Inventory::load(&path).map_err(|error| error.to_string())?);
        if inventory.boot_id != self.ledger.boot_id() {
            return Err(format!(
                "{} is from before the last reboot, so vcuda-device-plugin has not run since; see why it does not start",
                path.display()
            ));
        }
        if let Some(stamp) = stamp {
            *cached = Some(Cached { stamp, inventory: Arc::clone(&inventory) });
        }
        Ok(inventory)
    }

    /// Reads anew which containers and sandboxes have shares. `unseen` are the shares that the runtime's list left
    /// open.
    pub(crate) fn reload(&self, unseen: Vec<ShareName>) -> Result<(), LedgerError> {
        let before = self.ours().clone();
        let shares = self.ledger.shares()?;
        for unreadable in &shares.unreadable {
            tracing::error!("{unreadable}");
        }
        for path in &shares.foreign {
            tracing::warn!(path = %path.display(), "no share, left alone");
        }
        let mut ours = self.ours();
        // What came in while the folder was read stays.
        ours.containers.retain(|id| !before.containers.contains(id));
        ours.sandboxes.retain(|id| !before.sandboxes.contains(id));
        for record in shares.records.into_values() {
            if record.state == ShareState::Running {
                ours.containers.insert(record.container.id);
            }
            ours.sandboxes.insert(record.pod.sandbox_id);
        }
        ours.unseen = unseen;
        Ok(())
    }

    /// Notes that the session begins with the sandboxes that are known now.
    pub(crate) fn session_begins(&self) {
        let mut ours = self.ours();
        ours.old_sandboxes = ours.sandboxes.clone();
    }

    /// Shares that may have been left by pods whose end nobody told, with no container running: of old sandboxes, and
    /// of an earlier boot, whose sandboxes the runtime has long forgotten when a pod goes before all its containers are
    /// back. And those that cannot be read, beside which nothing is bound.
    pub fn doubtful(&self) -> Result<Vec<ShareName>, LedgerError> {
        let Ours { old_sandboxes, unseen, .. } = self.ours().clone();
        let doubtful = |name: &ShareName, record: &ShareRecord| {
            let of_earlier_boot = record.boot_id != self.ledger.boot_id();
            of_earlier_boot
                || (record.state == ShareState::Stopped || unseen.contains(name))
                    && old_sandboxes.contains(&record.pod.sandbox_id)
        };
        let shares = self.ledger.shares()?;
        let records = shares.records.into_iter().filter(|(name, record)| doubtful(name, record));
        let unreadable = shares.unreadable.into_iter().map(|share| share.name);
        Ok(records.map(|(name, _)| name).chain(unreadable).collect())
    }

    fn ours(&self) -> MutexGuard<'_, Ours> {
        self.ours.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// GPUs to try first: the scheduler's choice, then those of the device IDs, so that kubelet's books and ours agree.
fn preferred_gpus(chosen: &Chosen, granted: &Granted) -> Vec<GpuUuid> {
    chosen.gpus().iter().chain(&granted.gpus).cloned().collect()
}

fn claim(pod: &PodSandbox, container: &Container, granted: &Granted) -> Result<Claim, String> {
    for (what, id) in [("container", &container.id), ("pod sandbox", &pod.id)] {
        if id.is_empty() || id.len() > ID_MAX {
            return Err(format!("the {what}'s ID has {} bytes, not 1 to {ID_MAX}", id.len()));
        }
    }
    if pod.name.len() > POD_NAME_MAX || pod.namespace.len() > POD_NAME_MAX {
        return Err(format!("the pod's name is longer than {POD_NAME_MAX} bytes"));
    }
    let terms = terms(pod, &granted.request)?;
    let wishes = Wishes::read(|key| pod.annotations.get(key).map(String::as_str))
        .map_err(|error| format!("the pod's {error}"))?;
    let (pod, container, request) = (pod_ref(pod), container_ref(container), granted.request);
    Ok(Claim { pod, container, request, terms, wishes })
}

/// What the pod's owner says about compute time.
pub(crate) fn terms(pod: &PodSandbox, request: &Request) -> Result<Terms, String> {
    let annotation = |key: &str| pod.annotations.get(key).map(String::as_str);
    Terms::read(request, annotation).map_err(|error| error.to_string())
}

pub(crate) fn pod_ref(pod: &PodSandbox) -> PodRef {
    PodRef {
        uid: pod.uid.clone(),
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        sandbox_id: pod.id.clone(),
    }
}

pub(crate) fn container_ref(container: &Container) -> ContainerRef {
    ContainerRef { name: container.name.clone(), id: container.id.clone() }
}

/// Makes the files that a share's container sees.
pub(crate) fn fill(record: &ShareRecord, folder: &ShareFolder) -> io::Result<()> {
    if record.kind == ShareKind::Whole {
        return Ok(());
    }
    // Whether the node divides idle time is the device plugin's to add.
    Limits::create(&folder.limits(), &record.limits(false))?;
    folder.make_room()?;
    Usage::create(&folder.usage())?;
    let preload: PathBuf = folder.preload();
    fs::write(&preload, format!("{}\n", place::SHIM))?;
    // Whatever user the container runs as, its loader reads this.
    fs::set_permissions(&preload, Permissions::from_mode(0o644))
}

/// What a share holds, for the log.
fn described(record: &ShareRecord) -> String {
    let gpus = record
        .gpus
        .iter()
        .map(|gpu| format!("{}: {} core, {} MiB", gpu.uuid, gpu.core, gpu.memory_bytes >> 20));
    gpus.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use ledger::GpuShare;

    use super::*;

    /// A share that the container of a pod's sandbox held, in this boot or in an earlier one.
    fn held(binder: &Binder, pod: &str, boot_id: &str) -> ShareName {
        let gpu = GpuShare {
            uuid: GpuUuid::from_bytes([1; 16]),
            minor: 0,
            core: 100,
            memory_bytes: 1 << 30,
            slots: region::Slots::NONE,
        };
        let record = ShareRecord {
            version: ShareRecord::VERSION,
            pod: PodRef {
                uid: pod.into(),
                namespace: "ml".into(),
                name: pod.into(),
                sandbox_id: format!("{pod}-sandbox"),
            },
            container: ContainerRef { name: "main".into(), id: format!("{pod}-main") },
            boot_id: boot_id.into(),
            kind: ShareKind::Whole,
            gpus: vec![gpu],
            state: ShareState::Running,
            bound_at: 1,
            bound_uptime: 1,
            shim: false,
            terms: ledger::Terms::default(),
            set: ledger::Change::default(),
        };
        assert!(binder.ledger().adopt(&record, |_, _| Ok(())).unwrap());
        record.name().unwrap()
    }

    /// A pod that is deleted after a reboot, before all its containers are back: its new sandbox ends, and no share of
    /// the containers that never came back is known by that sandbox.
    #[test]
    fn shares_of_an_earlier_boot_stay_in_doubt_until_their_containers_are_back() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths { state: folder.path().into(), ..Paths::default() };
        let binder = Binder::open(paths).unwrap();
        let old = held(&binder, "before", "an-earlier-boot");
        held(&binder, "now", binder.ledger().boot_id());
        binder.reload(Vec::new()).unwrap();
        binder.session_begins();
        assert_eq!(binder.doubtful().unwrap(), std::slice::from_ref(&old));
        // Another session, and with it another list of the runtime's, which still has the pod.
        binder.session_begins();
        assert_eq!(binder.doubtful().unwrap(), [old]);
    }
}
