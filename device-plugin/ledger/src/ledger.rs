//! The ledger: who may change the folder of shares, and how. Every change is made under one lock, and is a rename:
//! a process killed at any instant leaves the share as it was, or as it was to become. Capacity is given back
//! before it is handed out again, so no GPU is ever promised twice, not even for an instant.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use rustix::fs::{CWD, FlockOperation, RenameFlags};
use thiserror::Error;
use vcuda_config::{GpuUuid, Request};

use crate::{
    Change, ContainerRef, Inventory, NoRoom, Placement, PodRef, ShareFolder, ShareKind, ShareName,
    ShareNameError, ShareRecord, ShareState, Shares, Terms, Wishes, files, place_by, room,
    shares::free_beside, timetable,
};

/// How many milliseconds after its binding a container may be missing from a list that is not [`Live::complete`].
const LISTING_GRACE_MS: u64 = 60_000;

/// The ledger of one node.
#[derive(Debug)]
pub struct Ledger {
    folder: PathBuf,
    boot_id: String,
    /// Keeps threads of this process apart; the lock on the folder keeps processes apart.
    threads: Mutex<()>,
    attempts: AtomicU64,
}

/// A container that asks for its share.
#[derive(Clone, Debug)]
pub struct Claim {
    /// Its pod.
    pub pod: PodRef,
    /// The container.
    pub container: ContainerRef,
    /// What it asks.
    pub request: Request,
    /// What its pod's owner says about compute time.
    pub terms: Terms,
    /// What its pod's owner says about its GPUs.
    pub wishes: Wishes,
}

/// A share that was bound.
#[derive(Debug)]
pub struct Bound {
    /// Its name.
    pub name: ShareName,
    /// What it holds.
    pub record: ShareRecord,
    /// Its folder.
    pub folder: ShareFolder,
    /// Why it holds just that.
    pub placement: Placement,
    /// Ended containers of the same pod whose shares gave way.
    pub gave_way: Vec<ShareName>,
}

/// What of the node's pods and containers is alive, from the runtime's own list.
#[derive(Clone, Debug, Default)]
pub struct Live {
    /// When the list was made, by [`uptime_ms`]. It says nothing about what was bound since.
    pub taken_at: u64,
    /// Pods by UID.
    pub pods: BTreeMap<String, PodLife>,
    /// IDs of containers that are created or run.
    pub containers: BTreeSet<String>,
    /// Names of the shares that those of them would have that were granted one, whatever is on record.
    pub granted: BTreeSet<ShareName>,
    /// Whether no container was being created while the list was made. Otherwise one may be missing that was bound
    /// just before.
    pub complete: bool,
}

/// Whether a pod that the runtime lists still runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodLife {
    /// Its sandbox is up.
    Up,
    /// Its sandbox is known but has ended.
    Ended,
}

/// How a pod's sandbox ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SandboxEnd {
    /// It was stopped; kubelet may make it anew for the same pod.
    Stopped,
    /// It was removed.
    Removed,
}

/// What [`Ledger::prune`] did.
#[derive(Debug, Default)]
pub struct Pruned {
    /// Shares of pods that are gone, and unreadable ones of which no container runs: released.
    pub released: Vec<ShareName>,
    /// Shares whose container has ended, of pods that are not gone: kept, marked stopped.
    pub stopped: Vec<ShareName>,
    /// Shares whose container is not listed, but so young that it may be on its way: left as they were.
    pub unseen: Vec<ShareName>,
    /// What could not be done, as on a full disk. All else was.
    pub failed: Vec<LedgerError>,
}

/// Why the ledger could not be read or changed.
#[derive(Debug, Error)]
#[error("{path}: {source}; see that the folder exists, belongs to root and has room")]
pub struct LedgerError {
    /// File or folder.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

/// Why a share was not bound.
#[derive(Debug, Error)]
pub enum BindError {
    /// The pod's or the container's name can name no share.
    #[error(transparent)]
    Name(#[from] ShareNameError),
    /// No GPU can take it.
    #[error("{0}; wait until other pods end, ask for less, or use another node")]
    NoRoom(#[from] NoRoom),
    /// Another share cannot be read, so nothing is known to be free.
    #[error("{0}")]
    Unreadable(String),
    /// The share's files could not be made.
    #[error("{path}: {source}; see that the file system has room and is writable")]
    Fill {
        /// The share's folder, before it got its name.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The folder of shares could not be read or changed.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

/// Proof that the folder is locked, and the lock itself.
pub(crate) struct Locked<'a> {
    _process: File,
    _thread: MutexGuard<'a, ()>,
}

impl Ledger {
    /// Opens the ledger in the folder `shares`, which is made where it does not exist, and clears away what a
    /// killed process left half done.
    pub fn open(shares: &Path) -> Result<Self, LedgerError> {
        let boot_id = files::boot_id()
            .map_err(|source| LedgerError { path: "/proc/sys/kernel/random/boot_id".into(), source })?;
        Self::open_in_boot(shares, boot_id)
    }

    /// As [`Ledger::open`], during the boot with this ID.
    pub fn open_in_boot(shares: &Path, boot_id: String) -> Result<Self, LedgerError> {
        let ledger = Self {
            folder: shares.into(),
            boot_id,
            threads: Mutex::default(),
            attempts: AtomicU64::default(),
        };
        let lock = ledger.lock()?;
        ledger.clear_leftovers().map_err(|source| ledger.error(source))?;
        ledger.mend_timetable()?;
        drop(lock);
        Ok(ledger)
    }

    /// The folder of shares.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// ID of the boot during which the ledger was opened.
    pub fn boot_id(&self) -> &str {
        &self.boot_id
    }

    /// All shares, as they are now.
    pub fn shares(&self) -> Result<Shares, LedgerError> {
        Shares::read(&self.folder).map_err(|source| self.error(source))
    }

    /// Binds the share of a container that is being created.
    ///
    /// A container that held a share before, in this boot or an earlier one, keeps its GPU where it still has room,
    /// its slots there, and what an operator has changed ([`Ledger::change`]);
    /// otherwise the GPUs in `prefer` are tried first, in that order, then [`place_by()`] decides. A cordoned GPU is
    /// kept by whoever has it, and taken by nobody else. The first share of a
    /// container takes the place of shares of ended containers of its pod: kubelet gives an init container's
    /// devices on to the pod's other containers.
    ///
    /// `fill` makes the share's other files in the folder it is given. The share appears with all its files, or
    /// not at all. Nothing is synced to disk: see [`Ledger::sync`].
    pub fn bind(
        &self,
        inventory: &Inventory,
        claim: &Claim,
        prefer: &[GpuUuid],
        fill: impl FnOnce(&ShareRecord, &ShareFolder) -> io::Result<()>,
    ) -> Result<Bound, BindError> {
        let name = ShareName::new(&claim.pod.uid, &claim.container.name)?;
        let _lock = self.lock()?;
        let shares = self.shares()?;
        // A record of the same name that cannot be read is about to be replaced, so it matters no more.
        if let Some(unreadable) = shares.unreadable.iter().find(|other| other.name != name) {
            return Err(BindError::Unreadable(unreadable.to_string()));
        }
        let own = shares.records.get(&name);
        let gives_way = |other: &ShareName, record: &ShareRecord| {
            own.is_none() && other.pod_uid() == name.pod_uid() && record.state == ShareState::Stopped
        };
        let gave_way: Vec<ShareName> = shares
            .records
            .iter()
            .filter(|(other, record)| **other != name && gives_way(other, record))
            .map(|(other, _)| other.clone())
            .collect();
        let others = || {
            let stays = |other: &ShareName| *other != name && !gave_way.contains(other);
            shares.records.iter().filter(move |(other, _)| stays(other)).map(|(_, record)| record)
        };

        let mut wish: Vec<GpuUuid> =
            own.iter().flat_map(|own| &own.gpus).map(|gpu| gpu.uuid.clone()).collect();
        wish.extend(prefer.iter().filter(|gpu| !wish.contains(gpu)).cloned().collect::<Vec<_>>());
        let has_it = |at: &usize| {
            own.is_some_and(|own| own.gpus.iter().any(|gpu| gpu.uuid == inventory.gpus[*at].uuid))
        };
        let mut cordoned = inventory.cordoned_at();
        cordoned.retain(|at| !has_it(at));
        let rules = claim.wishes.rules(inventory, &cordoned);
        let set = own.map(|own| own.set).unwrap_or_default();
        let free = free_beside(inventory, others());
        let mut placement = place_by(&free, &set.of(claim.request), &wish, &rules)?;
        let had = own.map_or(&[][..], |own| &own.gpus);
        timetable::give(kind(&claim.request), &mut placement.gpus, had, &timetable::taken(others()));
        let record = ShareRecord { set, ..self.record(claim, &placement) };

        let fresh = self.work_folder(&name, "new")?;
        let kept = own.is_some_and(|own| own.gpus == record.gpus);
        let made = fill(&record, &fresh)
            .and_then(|()| fs::write(fresh.why(), placement.explain(kept)))
            .and_then(|()| record.store(&fresh));
        made.map_err(|source| not_made(&fresh, source))?;
        for other in &gave_way {
            self.remove(other)?;
        }
        let folder = ShareFolder::new(&self.folder, &name);
        self.put(&fresh, &folder)?;
        Ok(Bound { name, record, folder, placement, gave_way })
    }

    /// Puts back the record of a container that runs, where there is none. It runs whatever the ledger says, so
    /// room is not asked for; it gets slots where as many are free. False when there is a record.
    pub fn adopt(
        &self,
        record: &ShareRecord,
        fill: impl FnOnce(&ShareRecord, &ShareFolder) -> io::Result<()>,
    ) -> Result<bool, BindError> {
        let name = record.name()?;
        let _lock = self.lock()?;
        if ShareRecord::load(&self.folder, &name).is_ok() {
            return Ok(false);
        }
        let mut record = record.clone();
        let taken = timetable::taken(self.shares()?.records.values());
        timetable::give(record.kind, &mut record.gpus, &[], &taken);
        let fresh = self.work_folder(&name, "new")?;
        let made = fill(&record, &fresh).and_then(|()| record.store(&fresh));
        made.map_err(|source| not_made(&fresh, source))?;
        self.put(&fresh, &ShareFolder::new(&self.folder, &name))?;
        Ok(true)
    }

    /// Syncs shares to disk. A kill never loses a bound share; a loss of power may lose one that was not synced,
    /// and then nothing runs that it belonged to. So this can be done when the container's creation goes on.
    pub fn sync(&self, names: &[ShareName]) -> Result<(), LedgerError> {
        let of_share = |name| {
            let folder = ShareFolder::new(&self.folder, name);
            [folder.record(), folder.path().into()]
        };
        for path in names.iter().flat_map(of_share).chain([self.folder.clone()]) {
            match File::open(&path).and_then(|file| file.sync_all()) {
                // Released in the meantime.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                synced => synced.map_err(|source| LedgerError { path, source })?,
            }
        }
        Ok(())
    }

    /// Notes that the container with this ID has ended. Its share stays with its pod. None when no share belongs to
    /// just this container, as after a restart, when a new one has taken over.
    pub fn mark_stopped(&self, container_id: &str) -> Result<Option<ShareName>, LedgerError> {
        let _lock = self.lock()?;
        for (name, record) in self.shares()?.records {
            if record.container.id == container_id {
                self.set_stopped(&name, record)?;
                return Ok(Some(name));
            }
        }
        Ok(None)
    }

    /// Releases the shares of the pod whose sandbox has ended. After a reboot kubelet stops the sandboxes of the
    /// earlier boot and makes new ones for the same pods, so a share bound in an earlier boot stays until its
    /// sandbox is removed.
    ///
    /// # Errors
    ///
    /// The first, after all was released that could be.
    pub fn end_sandbox(&self, sandbox_id: &str, end: SandboxEnd) -> Result<Vec<ShareName>, LedgerError> {
        let _lock = self.lock()?;
        let (mut released, mut failed) = (Vec::new(), None);
        for (name, record) in self.shares()?.records {
            if record.pod.sandbox_id != sandbox_id {
                continue;
            }
            let done = if end == SandboxEnd::Removed || record.boot_id == self.boot_id {
                self.remove(&name).map(|_| released.push(name))
            } else {
                self.set_stopped(&name, record)
            };
            failed = failed.or(done.err());
        }
        failed.map_or(Ok(released), Err)
    }

    /// Releases one share, whatever state it is in; false when there is none of this name.
    pub fn release(&self, name: &ShareName) -> Result<bool, LedgerError> {
        let _lock = self.lock()?;
        self.remove(name)
    }

    /// Brings the ledger in line with what the runtime lists: releases shares of pods that are gone, and marks those stopped
    /// whose container is gone. A share that cannot be read holds nobody knows what, and nothing where none of its
    /// containers is there: then it is released, too, and its container bound anew when it is back.
    ///
    /// # Errors
    ///
    /// The folder cannot be read. What could not be done of single shares is in [`Pruned::failed`].
    pub fn prune(&self, live: &Live) -> Result<Pruned, LedgerError> {
        let _lock = self.lock()?;
        let shares = self.shares()?;
        let mut pruned = Pruned::default();
        // Of a container that is being created the record was made a moment ago, and can be read.
        let unreadable = shares.unreadable.into_iter().map(|unreadable| unreadable.name);
        for name in unreadable.filter(|name| !live.granted.contains(name)) {
            match self.remove(&name) {
                Ok(_) => pruned.released.push(name),
                Err(error) => pruned.failed.push(error),
            }
        }
        for (name, record) in shares.records {
            let this_boot = record.boot_id == self.boot_id;
            if this_boot && record.bound_uptime >= live.taken_at {
                continue;
            }
            let gone = match live.pods.get(name.pod_uid()) {
                None => true,
                // After a reboot all sandboxes have ended, and kubelet makes them anew.
                Some(PodLife::Ended) => this_boot,
                Some(PodLife::Up) => false,
            };
            if gone {
                match self.remove(&name) {
                    Ok(_) => pruned.released.push(name),
                    Err(error) => pruned.failed.push(error),
                }
            } else if record.state == ShareState::Running && !live.containers.contains(&record.container.id) {
                let young = live.taken_at < record.bound_uptime.saturating_add(LISTING_GRACE_MS);
                if this_boot && young && !live.complete {
                    pruned.unseen.push(name);
                } else {
                    match self.set_stopped(&name, record) {
                        Ok(()) => pruned.stopped.push(name),
                        Err(error) => pruned.failed.push(error),
                    }
                }
            }
        }
        Ok(pruned)
    }

    fn record(&self, claim: &Claim, placement: &Placement) -> ShareRecord {
        let kind = kind(&claim.request);
        ShareRecord {
            version: ShareRecord::VERSION,
            pod: claim.pod.clone(),
            container: claim.container.clone(),
            boot_id: self.boot_id.clone(),
            kind,
            gpus: placement.gpus.clone(),
            state: ShareState::Running,
            bound_at: milliseconds_since_1970(),
            bound_uptime: uptime_ms(),
            shim: kind == ShareKind::Share,
            terms: claim.terms,
            set: Change::default(),
        }
    }

    /// See [`timetable::mend`]. While a share cannot be read its slots are unknown, and all is left as it is.
    fn mend_timetable(&self) -> Result<(), LedgerError> {
        let mut shares = self.shares()?;
        if !shares.unreadable.is_empty() {
            return Ok(());
        }
        for name in timetable::mend(&mut shares.records) {
            let folder = ShareFolder::new(&self.folder, &name);
            if let Some(record) = shares.records.get(&name) {
                record.store(&folder).map_err(|source| LedgerError { path: folder.record(), source })?;
                tracing::info!(share = %name, "got its place in the timetable of its GPU");
            }
        }
        Ok(())
    }

    fn set_stopped(&self, name: &ShareName, mut record: ShareRecord) -> Result<(), LedgerError> {
        if record.state == ShareState::Stopped {
            return Ok(());
        }
        record.state = ShareState::Stopped;
        let folder = ShareFolder::new(&self.folder, name);
        record.store(&folder).map_err(|source| LedgerError { path: folder.record(), source })
    }

    /// Gives the filled folder `fresh` its name, in one step with taking it from an older one.
    fn put(&self, fresh: &ShareFolder, folder: &ShareFolder) -> Result<(), LedgerError> {
        let failed =
            |source: rustix::io::Errno| LedgerError { path: folder.path().into(), source: source.into() };
        match rustix::fs::renameat_with(CWD, fresh.path(), CWD, folder.path(), RenameFlags::NOREPLACE) {
            Err(rustix::io::Errno::EXIST) => {}
            done => return done.map_err(failed),
        }
        rustix::fs::renameat_with(CWD, fresh.path(), CWD, folder.path(), RenameFlags::EXCHANGE)
            .map_err(failed)?;
        // What is now there under the working name is the older one, without a claim on anything.
        let _ = room::remove_share(fresh.path());
        Ok(())
    }

    fn remove(&self, name: &ShareName) -> Result<bool, LedgerError> {
        let path = self.folder.join(name.as_str());
        let failed = |source| LedgerError { path: path.clone(), source };
        let retired = self.work_path(name, "old");
        let _ = room::remove_share(&retired);
        match fs::rename(&path, &retired) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            renamed => renamed.map_err(failed)?,
        }
        // Released with the rename; what cannot be deleted now is cleared away at the next start.
        if room::remove_share(&retired).is_err() {
            let _ = fs::remove_file(&retired);
        }
        Ok(true)
    }

    fn work_path(&self, name: &ShareName, kind: &str) -> PathBuf {
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        self.folder.join(format!(".{}.{attempt}.{kind}", name.pod_uid()))
    }

    fn work_folder(&self, name: &ShareName, kind: &str) -> Result<ShareFolder, LedgerError> {
        let path = self.work_path(name, kind);
        let _ = room::remove_share(&path);
        match DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => Ok(ShareFolder::at(path)),
            Err(source) => Err(LedgerError { path, source }),
        }
    }

    fn clear_leftovers(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.as_encoded_bytes();
            if name.starts_with(b".") && (name.ends_with(b".new") || name.ends_with(b".old")) {
                tracing::info!(path = %entry.path().display(), "clearing away what a killed process left");
                let Err(error) = room::remove_share(&entry.path()) else { continue };
                if fs::remove_file(entry.path()).is_err() {
                    // It holds nothing, so it is no reason for the node to do without shares.
                    tracing::warn!(path = %entry.path().display(), %error, "it cannot be; remove it");
                }
            }
        }
        Ok(())
    }

    pub(crate) fn lock(&self) -> Result<Locked<'_>, LedgerError> {
        let thread = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let open = || match File::open(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                DirBuilder::new().recursive(true).mode(0o700).create(&self.folder)?;
                File::open(&self.folder)
            }
            opened => opened,
        };
        let process = open().map_err(|source| self.error(source))?;
        rustix::io::retry_on_intr(|| rustix::fs::flock(&process, FlockOperation::LockExclusive))
            .map_err(|source| self.error(source.into()))?;
        Ok(Locked { _process: process, _thread: thread })
    }

    fn error(&self, source: io::Error) -> LedgerError {
        LedgerError { path: self.folder.clone(), source }
    }
}

/// That a share's files could not be made; those that were are taken away.
fn not_made(fresh: &ShareFolder, source: io::Error) -> BindError {
    // What cannot be taken away now is at the next start.
    let _ = room::remove_share(fresh.path());
    BindError::Fill { path: fresh.path().into(), source }
}

fn kind(request: &Request) -> ShareKind {
    match request {
        Request::Share { .. } => ShareKind::Share,
        Request::Whole { .. } => ShareKind::Whole,
    }
}

/// The time, in milliseconds since 1970, for people and for other machines.
fn milliseconds_since_1970() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_millis().try_into().unwrap_or(u64::MAX)
}

/// Milliseconds since the node's start, for whatever is compared with another moment of this boot: the time of day may be
/// set back, and a share that seems to be bound after a list of the runtime's would stay when its pod is gone. With
/// seconds, one bound in the second of the list would, too.
pub fn uptime_ms() -> u64 {
    let since = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let (seconds, rest) = (u64::try_from(since.tv_sec), u64::try_from(since.tv_nsec));
    seconds.unwrap_or(0).saturating_mul(1_000).saturating_add(rest.unwrap_or(0) / 1_000_000)
}
