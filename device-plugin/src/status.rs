//! What `vcuda-device-plugin status` shows: the inventory, the shares, and what each container has used, read from
//! their files at this moment. It asks no running process, so it works when nothing runs.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use k8s_openapi::jiff::Timestamp;
use ledger::{
    Gpu, GpuShare, Inventory, InventoryError, Priority, ShareFolder, ShareKind, ShareName, ShareRecord,
    ShareState, Shares,
};
use region::{Limits, UsageReader};
use serde::Serialize;
use thiserror::Error;
use vcuda_config::{
    CORE_PER_GPU, GpuUuid, NodeFile, Paths,
    daemons::{NriPlugin, is_held},
};

use crate::governor::monotonic_ns;

/// A device plugin that has given no sign of life for so long, in nanoseconds, measures nothing.
const HEARTBEAT_NS: u64 = 1_000_000_000;

/// Why there is nothing to show.
#[derive(Debug, Error)]
pub enum StatusError {
    /// No inventory.
    #[error(transparent)]
    Inventory(#[from] InventoryError),
    /// A share cannot be read, so nothing is known to be free.
    #[error("{0}")]
    Unreadable(String),
    /// No share is of such a pod.
    #[error("no share on this node is of a pod {0:?}; `vcuda-device-plugin status` lists them")]
    NoSuchPod(String),
    /// The shares cannot be listed.
    #[error("{path}: {source}; run this as root on the node")]
    Shares {
        /// Their folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The node at one moment.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// Version of the driver.
    pub driver_version: String,
    /// Whether a device plugin runs on this node.
    pub plugin_running: bool,
    /// How the NRI plugin of this node stands.
    pub nri_plugin: NriPluginStatus,
    /// False when the inventory was written before the last boot, so that GPUs may have changed since.
    pub inventory_current: bool,
    /// GPUs on offer.
    pub gpus: Vec<GpuStatus>,
    /// Shares on GPUs that are not on offer any more.
    pub shares_elsewhere: Vec<ShareStatus>,
    /// Shares whose record cannot be read, and why; while there are any, nothing counts as free.
    pub unreadable: Vec<String>,
}

/// How the NRI plugin stands, without which containers with a share do not start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase", tag = "state")]
pub enum NriPluginStatus {
    /// containerd asks it.
    Connected {
        /// The runtime, with its version.
        runtime: String,
        /// From when on: RFC 3339, in UTC, to the second.
        since: String,
    },
    /// It runs, and containerd does not ask it.
    NotConnected,
    /// It does not run.
    NotRunning,
    /// That cannot be told.
    Unknown {
        /// Why.
        reason: String,
    },
}

/// One GPU.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuStatus {
    /// UUID.
    pub uuid: GpuUuid,
    /// Model.
    pub name: String,
    /// Number of its device node.
    pub minor: u32,
    /// NUMA node.
    pub numa_node: Option<u32>,
    /// Whether it works well enough for new shares.
    pub healthy: bool,
    /// Whether an administrator keeps new shares away.
    pub cordoned: bool,
    /// Core, in percent.
    pub core: Amount,
    /// Memory, in bytes.
    pub memory_bytes: Amount,
    /// Shares on it.
    pub shares: Vec<ShareStatus>,
}

/// How much of something there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Amount {
    /// On offer.
    pub total: u64,
    /// Held by shares.
    pub granted: u64,
    /// Free for new ones, if that is known.
    pub free: Option<u64>,
}

/// What one share has of one GPU.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareStatus {
    /// The GPU.
    pub gpu: GpuUuid,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// UID of the pod.
    pub pod_uid: String,
    /// Name of the container.
    pub container: String,
    /// Part of a GPU, or whole GPUs.
    pub kind: ShareKind,
    /// Whether its container runs.
    pub state: ShareState,
    /// Percent of the GPU's compute time.
    pub core: u32,
    /// Percent that it may use while others leave it idle.
    pub core_limit: u32,
    /// Who comes first at idle time.
    pub priority: Priority,
    /// Percent that it has used in the last second, as the device plugin measures it; none while that does not run.
    pub used_percent: Option<u32>,
    /// Memory ceiling on this GPU in bytes, as the container sees it at this moment.
    pub memory_bytes: u64,
    /// What holds the container to its memory; none for whole GPUs, which have no ceiling.
    pub held_by: Option<HeldBy>,
    /// What its processes hold, by their own account; none for whole GPUs, which are not accounted.
    pub usage: Option<Usage>,
    /// Why there are no figures.
    pub usage_error: Option<String>,
}

/// What holds a container to its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum HeldBy {
    /// The shim, through every door that it covers.
    #[serde(rename = "shim")]
    Shim,
    /// The shim, and below it the driver, whatever a process does.
    #[serde(rename = "driver+shim")]
    DriverAndShim,
}

impl HeldBy {
    /// As metrics and tables have it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Shim => "shim",
            Self::DriverAndShim => "driver+shim",
        }
    }
}

/// What a container has used of one GPU, by its own account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// Bytes held.
    pub memory_bytes: u64,
    /// Bytes beyond these that the driver says it holds: contexts, modules, local memory. They count against the ceiling. 0
    /// where it does not tell.
    pub unseen_bytes: u64,
    /// Allocations that the ceiling has refused.
    pub refusals: u64,
    /// GPU time, in nanoseconds.
    pub gpu_ns: u64,
    /// Kernel launches, on all GPUs of the share.
    pub launches: u64,
    /// Time that launches were held back, in nanoseconds, summed over threads, on all GPUs of the share.
    pub throttled_ns: u64,
    /// Nothing holds it back at this moment, so it does not measure its GPU time.
    pub unpaced: bool,
}

/// Of one GPU: what its container is held to, and what it has used.
#[derive(Default)]
struct OnGpu {
    ceiling: Option<u64>,
    core_limit: Option<u32>,
    used_percent: Option<u32>,
    usage: Option<Usage>,
}

impl Status {
    /// Reads everything.
    ///
    /// # Errors
    ///
    /// See [`StatusError`]. What is wrong with a single share is part of the answer.
    pub fn read(file: &NodeFile) -> Result<Self, StatusError> {
        let inventory = Inventory::load(&file.paths.inventory())?;
        let folder = file.paths.shares();
        let shares =
            Shares::read(&folder).map_err(|source| StatusError::Shares { path: folder.clone(), source })?;
        let mut all = statuses(&folder, &shares);
        let free = shares.free(&inventory).ok();
        let of_gpu = |(at, gpu): (usize, &Gpu)| {
            let mine: Vec<_> = all.extract_if(.., |share| share.gpu == gpu.uuid).collect();
            let free = free.as_ref().and_then(|free| free.get(at));
            GpuStatus {
                uuid: gpu.uuid.clone(),
                name: gpu.name.clone(),
                minor: gpu.minor,
                numa_node: gpu.numa_node,
                healthy: gpu.healthy,
                cordoned: inventory.cordoned.contains(&gpu.uuid),
                core: Amount {
                    total: CORE_PER_GPU.into(),
                    granted: mine.iter().map(|share| u64::from(share.core)).sum(),
                    free: free.map(|free| free.core.into()),
                },
                memory_bytes: Amount {
                    total: gpu.usable_bytes(),
                    granted: mine.iter().map(|share| share.memory_bytes).fold(0, u64::saturating_add),
                    free: free.map(|free| free.memory_bytes),
                },
                shares: mine,
            }
        };
        let gpus = inventory.gpus.iter().enumerate().map(of_gpu).collect();
        Ok(Self {
            driver_version: inventory.driver.version.clone(),
            plugin_running: is_held(&file.paths.device_plugin_lock()).unwrap_or(false),
            nri_plugin: NriPluginStatus::of(&file.paths),
            inventory_current: ledger::boot_id().is_ok_and(|boot| boot == inventory.boot_id),
            gpus,
            shares_elsewhere: all,
            unreadable: shares.unreadable.iter().map(ToString::to_string).collect(),
        })
    }
}

/// One entry for each GPU of each share.
fn statuses(folder: &Path, shares: &Shares) -> Vec<ShareStatus> {
    let of_share = |(name, record): (&ShareName, &ShareRecord)| {
        let folder = ShareFolder::new(folder, name);
        let figures = record.shim.then(|| Figures::read(&folder));
        let floor = ledger::Floor::load(&folder, &record.container.id);
        let of_gpu = |gpu: &GpuShare| {
            let (here, usage_error) = match &figures {
                Some(Ok(figures)) => (figures.of(&gpu.uuid), None),
                Some(Err(error)) => (OnGpu::default(), Some(error.clone())),
                None => (OnGpu::default(), None),
            };
            ShareStatus {
                gpu: gpu.uuid.clone(),
                namespace: record.pod.namespace.clone(),
                pod: record.pod.name.clone(),
                pod_uid: record.pod.uid.clone(),
                container: record.container.name.clone(),
                kind: record.kind,
                state: record.state,
                core: gpu.core,
                core_limit: here.core_limit.or(record.core_limit()).unwrap_or(gpu.core),
                priority: record.terms.priority,
                used_percent: here.used_percent,
                memory_bytes: here.ceiling.unwrap_or(gpu.memory_bytes),
                held_by: record.shim.then(|| match &floor {
                    Some(floor) if floor.bytes.contains_key(&gpu.uuid) => HeldBy::DriverAndShim,
                    _ => HeldBy::Shim,
                }),
                usage: here.usage,
                usage_error,
            }
        };
        record.gpus.iter().map(of_gpu).collect::<Vec<_>>()
    };
    shares.records.iter().flat_map(of_share).collect()
}

/// The files of one share.
struct Figures {
    limits: Limits,
    usage: region::UsageSnapshot,
}

impl Figures {
    fn read(folder: &ShareFolder) -> Result<Self, String> {
        let limits = Limits::open(&folder.limits()).map_err(|error| format!("limits: {error}"))?;
        let usage = UsageReader::open(&folder.usage()).and_then(|usage| usage.snapshot());
        Ok(Self { limits, usage: usage.map_err(|error| format!("usage: {error}"))? })
    }

    /// What there is to say of one GPU.
    fn of(&self, gpu: &GpuUuid) -> OnGpu {
        let Some(at) = self.limits.find(&gpu.bytes()) else { return OnGpu::default() };
        let now = monotonic_ns();
        let governed = now.saturating_sub(self.limits.heartbeat_ns()) < HEARTBEAT_NS;
        let usage = |gpu: &region::GpuUsage| Usage {
            memory_bytes: gpu.used_bytes,
            unseen_bytes: self.limits.unseen_bytes(at, || now),
            refusals: gpu.refusals,
            gpu_ns: gpu.charged_ns,
            launches: self.usage.launches,
            throttled_ns: self.usage.throttled_ns,
            unpaced: self.limits.pace(at).is_some_and(|pace| pace.is_unpaced(now)),
        };
        OnGpu {
            ceiling: Some(self.limits.memory_bytes(at)),
            core_limit: self.limits.get(at).map(|limit| limit.core_limit_percent),
            used_percent: self.limits.busy_percent(at).filter(|_| governed),
            usage: self.usage.gpus.get(at).map(usage),
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plugin = if self.plugin_running { "runs" } else { "does not run" };
        writeln!(f, "driver {}, device plugin {plugin}", self.driver_version)?;
        writeln!(f, "{}", self.nri_plugin)?;
        if !self.inventory_current {
            writeln!(f, "the inventory is older than the last boot; start vcuda-device-plugin to renew it")?;
        }
        for gpu in &self.gpus {
            let health = if gpu.healthy { "healthy" } else { "takes no new shares, see the plugin's log" };
            let numa = gpu.numa_node.map(|node| format!(", NUMA node {node}")).unwrap_or_default();
            let cordoned = if gpu.cordoned { ", cordoned: takes no new shares" } else { "" };
            writeln!(f, "\n{} {} (/dev/nvidia{}{numa}): {health}{cordoned}", gpu.uuid, gpu.name, gpu.minor)?;
            writeln!(f, "  core    {}", gpu.core.show(|n| n.to_string()))?;
            writeln!(f, "  memory  {}", gpu.memory_bytes.show(gib))?;
            write_shares(f, &gpu.shares)?;
        }
        if !self.shares_elsewhere.is_empty() {
            writeln!(f, "\non GPUs that are not on offer any more:")?;
            write_shares(f, &self.shares_elsewhere)?;
        }
        for line in &self.unreadable {
            writeln!(f, "\n{line}")?;
        }
        Ok(())
    }
}

impl NriPluginStatus {
    fn of(paths: &Paths) -> Self {
        match NriPlugin::of(paths) {
            Ok(NriPlugin::Connected { runtime, since }) => {
                let since = Timestamp::try_from(since)
                    .and_then(|since| Timestamp::from_second(since.as_second()))
                    .unwrap_or(Timestamp::UNIX_EPOCH);
                Self::Connected { runtime, since: since.to_string() }
            }
            Ok(NriPlugin::NotConnected) => Self::NotConnected,
            Ok(NriPlugin::NotRunning) => Self::NotRunning,
            Err(error) => Self::Unknown { reason: error.to_string() },
        }
    }
}

impl fmt::Display for NriPluginStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LOST: &str = "no container with a share starts, see `vcuda-check node`";
        match self {
            Self::Connected { runtime, since } => {
                write!(f, "NRI plugin connected to {runtime} since {since}")
            }
            Self::NotConnected => write!(f, "NRI plugin runs, but containerd does not ask it: {LOST}"),
            Self::NotRunning => write!(f, "NRI plugin does not run: {LOST}"),
            Self::Unknown { reason } => write!(f, "NRI plugin unknown: {reason}; run this as root"),
        }
    }
}

impl Amount {
    fn show(self, unit: impl Fn(u64) -> String) -> String {
        let free =
            self.free.map_or_else(|| "unknown what is free".into(), |free| format!("{} free", unit(free)));
        format!("{} of {} granted, {free}", unit(self.granted), unit(self.total))
    }
}

fn write_shares(f: &mut fmt::Formatter<'_>, shares: &[ShareStatus]) -> fmt::Result {
    if shares.is_empty() {
        return Ok(());
    }
    let head =
        ["POD", "CONTAINER", "STATE", "CORE", "USED", "HELD BACK", "MEMORY", "FLOOR", "IN USE", "REFUSED"]
            .map(String::from);
    let row = |share: &ShareStatus| {
        let figure = |show: fn(Usage) -> String| match (&share.usage, &share.usage_error) {
            (Some(usage), _) => show(*usage),
            (None, Some(_)) => "unreadable".into(),
            (None, None) => "-".into(),
        };
        let state = match share.state {
            ShareState::Running => "running",
            ShareState::Stopped => "stopped",
        };
        [
            format!("{}/{}", share.namespace, share.pod),
            share.container.clone(),
            state.into(),
            core(share),
            share.used_percent.map_or_else(|| "-".into(), |used| format!("{used} %")),
            figure(|usage| {
                format!("{}.{} s", usage.throttled_ns / 1_000_000_000, usage.throttled_ns / 100_000_000 % 10)
            }),
            gib(share.memory_bytes),
            share.held_by.map_or("-", HeldBy::as_str).into(),
            figure(|usage| gib(usage.memory_bytes.saturating_add(usage.unseen_bytes))),
            figure(|usage| usage.refusals.to_string()),
        ]
    };
    let rows: Vec<_> = std::iter::once(head).chain(shares.iter().map(row)).collect();
    write_table(f, "    ", &rows)?;
    for share in shares {
        if let Some(error) = &share.usage_error {
            writeln!(f, "    {}/{} {}: {error}", share.namespace, share.pod, share.container)?;
        }
    }
    Ok(())
}

/// Rows with their columns in line.
pub(crate) fn write_table<const N: usize>(
    f: &mut fmt::Formatter<'_>,
    indent: &str,
    rows: &[[String; N]],
) -> fmt::Result {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    for row in rows {
        let cells: Vec<_> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        writeln!(f, "{indent}{}", cells.join("  ").trim_end())?;
    }
    Ok(())
}

/// Core, and how far it may go beyond; `low` where others come first there.
pub(crate) fn core(share: &ShareStatus) -> String {
    let mut text = share.core.to_string();
    if share.core_limit > share.core {
        text += &format!(" to {}", share.core_limit);
    }
    if share.priority == Priority::Low {
        text += " low";
    }
    text
}

/// Bytes as GiB with one digit.
pub(crate) fn gib(bytes: u64) -> String {
    /// Bytes of a tenth of a GiB, rounded down.
    const TENTH: u64 = (1 << 30) / 10;
    let tenths = bytes / TENTH;
    format!("{}.{} GiB", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use ledger::{ContainerRef, PodRef};
    use region::GpuLimit;

    use super::*;
    use crate::testing;

    fn uuid(n: u8) -> GpuUuid {
        GpuUuid::from_bytes([n; 16])
    }

    fn node_file(folder: &Path) -> NodeFile {
        let mut file = NodeFile::default();
        file.paths.state = folder.into();
        file.paths.run = folder.join("run");
        let gpu = |n: u8| Gpu { numa_node: Some(0), healthy: n == 1, ..testing::gpu(n, 320) };
        let inventory = testing::inventory(&ledger::boot_id().unwrap(), vec![gpu(1), gpu(2)]);
        inventory.store(&file.paths.inventory()).unwrap();
        file
    }

    fn share(file: &NodeFile, pod: &str, gpu: u8, kind: ShareKind) -> ShareFolder {
        let whole = kind == ShareKind::Whole;
        let held = GpuShare {
            uuid: uuid(gpu),
            minor: gpu.into(),
            core: if whole { 100 } else { 20 },
            memory_bytes: if whole { 80 << 30 } else { 8 << 30 },
            slots: region::Slots::NONE,
        };
        let record = ShareRecord {
            version: 1,
            pod: PodRef { uid: pod.into(), namespace: "ns".into(), name: pod.into(), sandbox_id: "s".into() },
            container: ContainerRef { name: "main".into(), id: "c".into() },
            boot_id: "b".into(),
            kind,
            gpus: vec![held.clone()],
            state: ShareState::Running,
            bound_at: 0,
            bound_uptime: 0,
            shim: !whole,
            terms: ledger::Terms::default(),
            set: ledger::Change::default(),
        };
        let folder = ShareFolder::new(&file.paths.shares(), &record.name().unwrap());
        fs::create_dir_all(folder.usage().parent().unwrap()).unwrap();
        fs::write(folder.record(), serde_json::to_vec(&record).unwrap()).unwrap();
        if !whole {
            let limit = GpuLimit {
                uuid: held.uuid.bytes(),
                memory_bytes: held.memory_bytes,
                core_percent: 20,
                core_limit_percent: 20,
                own_slots: region::Slots::NONE,
            };
            Limits::create(&folder.limits(), &[limit]).unwrap();
            region::Usage::create(&folder.usage()).unwrap();
        }
        folder
    }

    #[test]
    fn gpus_show_what_is_granted_free_and_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = node_file(folder.path());
        let usage = region::Usage::open(&share(&file, "train", 1, ShareKind::Share).usage()).unwrap();
        usage.count_refusal(0);
        share(&file, "big", 2, ShareKind::Whole);

        let status = Status::read(&file).unwrap();
        assert!(status.inventory_current && !status.plugin_running);
        assert_eq!(status.gpus[0].core, Amount { total: 100, granted: 20, free: Some(80) });
        assert_eq!(
            status.gpus[0].memory_bytes,
            Amount { total: 80 << 30, granted: 8 << 30, free: Some(72 << 30) }
        );
        assert_eq!(status.gpus[0].shares[0].usage, Some(Usage { refusals: 1, ..Usage::default() }));
        assert_eq!(status.gpus[0].shares[0].held_by, Some(HeldBy::Shim));
        assert_eq!(status.gpus[1].core.free, Some(0));
        assert_eq!((status.gpus[1].shares[0].usage, status.gpus[1].shares[0].held_by), (None, None));
        let text = status.to_string();
        for part in ["ns/train", "8.0 GiB", "takes no new shares", "20 of 100 granted, 80 free"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn a_cordoned_gpu_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let file = node_file(folder.path());
        let mut inventory = Inventory::load(&file.paths.inventory()).unwrap();
        inventory.cordoned = vec![uuid(1)];
        inventory.store(&file.paths.inventory()).unwrap();
        let status = Status::read(&file).unwrap();
        assert_eq!(status.gpus.iter().map(|gpu| gpu.cordoned).collect::<Vec<_>>(), [true, false]);
        let text = status.to_string();
        assert_eq!(text.matches("healthy, cordoned: takes no new shares\n").count(), 1, "{text}");
    }

    #[test]
    fn a_share_shows_what_holds_it_and_what_no_call_shows() {
        let folder = tempfile::tempdir().unwrap();
        let file = node_file(folder.path());
        let share = share(&file, "train", 1, ShareKind::Share);
        let hold = |container: &str| {
            ledger::Floor::new(container.into(), "/x".into(), [(uuid(1), 8 << 30)].into())
                .store(&share)
                .unwrap();
            Status::read(&file).unwrap()
        };
        assert_eq!(hold("earlier").gpus[0].shares[0].held_by, Some(HeldBy::Shim));
        let node = region::LimitsWriter::open(&share.limits()).unwrap();
        node.set_unseen(&uuid(1).bytes(), 1 << 29, monotonic_ns()).unwrap();
        let status = hold("c");
        assert_eq!(status.gpus[0].shares[0].held_by, Some(HeldBy::DriverAndShim));
        assert_eq!(status.gpus[0].shares[0].usage.unwrap().unseen_bytes, 1 << 29);
        let text = status.to_string();
        assert!(text.contains("driver+shim") && text.contains("0.5 GiB"), "{text}");
        node.set_unseen(&uuid(1).bytes(), 1 << 29, 1).unwrap();
        assert_eq!(hold("c").gpus[0].shares[0].usage.unwrap().unseen_bytes, 0, "nobody measures it any more");
    }

    /// Without it no container with a share starts, however well the device plugin runs.
    #[test]
    fn the_nri_plugin_is_told_of_beside_the_device_plugin() {
        let folder = tempfile::tempdir().unwrap();
        let file = node_file(folder.path());
        let told = || {
            let status = Status::read(&file).unwrap();
            (status.to_string(), serde_json::json!(status)["nriPlugin"].clone())
        };
        let (text, json) = told();
        assert!(text.contains("NRI plugin does not run: no container with a share starts"), "{text}");
        assert_eq!(json, serde_json::json!({ "state": "notRunning" }));

        fs::create_dir_all(&file.paths.run).unwrap();
        let lock = fs::File::create(file.paths.nri_plugin_lock()).unwrap();
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
        let (text, json) = told();
        assert!(text.contains("NRI plugin runs, but containerd does not ask it"), "{text}");
        assert_eq!(json, serde_json::json!({ "state": "notConnected" }));

        let ready = fs::File::create(file.paths.nri_plugin_ready()).unwrap();
        fs::write(file.paths.nri_plugin_ready(), format!("containerd v2.1.9\n{}\n", std::process::id()))
            .unwrap();
        ready
            .set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_millis(1_764_525_845_678))
            .unwrap();
        let (text, json) = told();
        let since = "2025-11-30T18:04:05Z";
        assert!(text.contains(&format!("NRI plugin connected to containerd v2.1.9 since {since}")), "{text}");
        assert_eq!(
            json,
            serde_json::json!({ "state": "connected", "runtime": "containerd v2.1.9", "since": since })
        );
    }

    /// A container can write whatever it likes into its usage.
    #[test]
    fn a_spoiled_usage_file_costs_its_own_figures_only() {
        let folder = tempfile::tempdir().unwrap();
        let file = node_file(folder.path());
        fs::write(share(&file, "liar", 1, ShareKind::Share).usage(), "nonsense").unwrap();
        share(&file, "honest", 1, ShareKind::Share);
        let status = Status::read(&file).unwrap();
        let shares = status.gpus[0].shares.iter();
        let figures: Vec<_> = shares.map(|share| (share.pod.as_str(), share.usage.is_some())).collect();
        assert_eq!(figures, [("honest", true), ("liar", false)]);
        assert!(status.to_string().contains("ns/liar main: usage:"), "{status}");
        assert_eq!(status.gpus[0].core.free, Some(60));
    }

    #[test]
    fn shares_that_cannot_be_read_or_have_no_gpu_are_not_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let file = node_file(folder.path());
        fs::write(share(&file, "odd", 1, ShareKind::Share).record(), "{").unwrap();
        share(&file, "lost", 7, ShareKind::Share);
        let status = Status::read(&file).unwrap();
        assert_eq!(status.gpus[0].core.free, None);
        assert_eq!(status.shares_elsewhere[0].pod, "lost");
        assert!(status.unreadable[0].contains("odd_main"));
    }

    #[test]
    fn no_inventory_says_who_writes_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = NodeFile::default();
        file.paths.state = folder.path().into();
        let error = Status::read(&file).unwrap_err().to_string();
        assert!(error.contains("inventory.json") && error.contains("vcuda-device-plugin"), "{error}");
    }
}
