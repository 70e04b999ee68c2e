//! The one place where NVML is called. A thread of its own holds the library, looks at all GPUs every few seconds and
//! in between waits for events; everybody else sees the last survey and never waits for the driver. A driver that is
//! missing, goes away or is replaced is looked for again and again.

mod events;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use ledger::Driver;
use nvml_wrapper::{
    Device, Nvml,
    enum_wrappers::{
        device::{EccCounter, MemoryError, TopologyLevel},
        nv_link::IntDeviceType,
    },
    enums::device::SampleValue,
    error::NvmlError,
    structs::device::FieldId,
    sys_exports::field_id,
};
use tokio::sync::watch;
use tracing::{debug, warn};
use vcuda_config::{GpuUuid, Link};

use self::events::{Events, Wait};
use crate::{
    health::{Noted, QUIET, XidBook},
    holders::Holders,
    meter::{Meter, Readings, TICK},
    topology::{self, Between},
};

/// How often all GPUs are asked whether they are well.
const SURVEY_EVERY: Duration = Duration::from_secs(5);

/// First and longest pause between two looks for a missing driver. A driver that does not fit its kernel module
/// leaves a line in the kernel log each time it is asked.
const DRIVER_EVERY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(15));

/// How often NVML is loaded anew while a GPU is missing. It takes seconds on a node without nvidia-persistenced.
const RELOAD_EVERY: Duration = Duration::from_secs(30);

/// Longest wait for an event, and so for this thread to notice that it should end. Also the pause where waiting fails.
const EVENT_WAIT: Duration = Duration::from_millis(500);

/// How often it is asked how GPUs are connected, while they are the same: links to NVSwitches come up when the fabric
/// manager has started.
const CONNECTIONS_EVERY: Duration = Duration::from_secs(60);

/// For how long NVML may keep this thread waiting. It starts in seconds a GPU on a node without nvidia-persistenced. A call that
/// does not come back, as into a kernel module that waits for a dead GPU, never does.
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);

/// NVLinks of a GPU at most (nvml.h, NVML_NVLINK_MAX_LINKS).
const MAX_LINKS: u32 = 18;

/// XID of a memory error that ECC cannot correct.
const XID_DOUBLE_BIT: u64 = 48;

/// PCI vendor NVIDIA, as sysfs writes it.
const NVIDIA: &str = "0x10de";

/// What NVML says at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Survey {
    /// Nothing yet.
    Pending,
    /// There is no driver to ask; why, and what helps.
    NoDriver(String),
    /// The driver answers.
    Found(Found),
}

/// The driver and its GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The driver; its files and the kernel module are of one version.
    pub driver: Driver,
    /// GPUs that answer, in the order of NVML, which is that of the PCI addresses.
    pub gpus: Vec<SeenGpu>,
    /// GPUs that NVML counts and that do not even say their UUID: what they answered instead.
    pub silent: Option<String>,
    /// Groups of GPUs that are connected with each other, the best connected first.
    pub groups: Vec<(Link, Vec<GpuUuid>)>,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenGpu {
    /// UUID.
    pub uuid: GpuUuid,
    /// Model.
    pub name: String,
    /// Number of its device node.
    pub minor: u32,
    /// Memory in bytes.
    pub total_bytes: u64,
    /// Compute capability without the dot, 80 for 8.0, where NVML tells it.
    pub capability: Option<u32>,
    /// NUMA node.
    pub numa_node: Option<u32>,
    /// PCI address.
    pub pci_bus_id: String,
    /// Divided into MIG devices.
    pub mig: bool,
    /// Why it should take no new shares.
    pub trouble: Option<String>,
}

/// The surveying thread; it ends when this is dropped.
#[derive(Debug)]
pub struct Surveyor {
    surveys: watch::Receiver<Survey>,
    holders: Arc<Holders>,
    pulse: Arc<Pulse>,
    _stop: Sender<()>,
}

/// When the surveying thread last came back from NVML.
#[derive(Debug)]
struct Pulse(Mutex<Instant>);

impl Pulse {
    fn beat(&self, now: Instant) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = now;
    }

    fn is_gone(&self, now: Instant) -> bool {
        let last = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        now.saturating_duration_since(last) >= ANSWERS_WITHIN
    }
}

impl Surveyor {
    /// Starts to look for the driver below `driver_root`. XIDs in `ignored_xids` are no trouble. What `meter` wants
    /// measured is measured every tick.
    ///
    /// # Errors
    ///
    /// No thread could be started.
    pub fn start(driver_root: PathBuf, ignored_xids: &[u64], meter: Arc<Meter>) -> io::Result<Self> {
        let (publish, surveys) = watch::channel(Survey::Pending);
        let (stop, stopped) = channel();
        let holders = Arc::new(Holders::default());
        let pulse = Arc::new(Pulse(Mutex::new(Instant::now())));
        let xids = XidBook::new(ignored_xids.iter().copied(), QUIET);
        let mut survey = Surveying {
            publish,
            stopped,
            xids,
            meter,
            holders: Arc::clone(&holders),
            pulse: Arc::clone(&pulse),
            pause: DRIVER_EVERY.0,
            seen: BTreeSet::new(),
            connections: None,
            ecc: BTreeMap::new(),
        };
        thread::Builder::new()
            .name("nvml".into())
            .spawn(move || while survey.look_for_driver(&driver_root) {})?;
        Ok(Self { surveys, holders, pulse, _stop: stop })
    }

    /// The surveys; a new one is there when something has changed.
    pub fn surveys(&self) -> watch::Receiver<Survey> {
        self.surveys.clone()
    }

    /// What NVML says at this moment: the last survey, or, where it has kept the thread waiting for too long, that it says nothing.
    pub(crate) fn now(&self) -> Survey {
        if self.pulse.is_gone(Instant::now()) {
            return Survey::NoDriver(format!(
                "NVML has not come back for {} s or more; see the kernel log, the node may need a reboot",
                ANSWERS_WITHIN.as_secs()
            ));
        }
        self.surveys.borrow().clone()
    }

    /// For who wants to know what processes hold of the GPUs' memory.
    pub(crate) fn holders(&self) -> Arc<Holders> {
        Arc::clone(&self.holders)
    }
}

/// Why the thread goes on to look for a driver.
enum Over {
    Stopped,
    DriverGone(String),
    /// A GPU is missing; NVML finds one that comes back only when it is loaded anew.
    GpuMissing,
}

struct Surveying {
    publish: watch::Sender<Survey>,
    stopped: Receiver<()>,
    xids: XidBook,
    /// Until a missing driver is looked for again.
    pause: Duration,
    /// All GPUs that were ever there.
    seen: BTreeSet<GpuUuid>,
    meter: Arc<Meter>,
    holders: Arc<Holders>,
    pulse: Arc<Pulse>,
    connections: Option<Connections>,
    /// Uncorrected memory errors, as they were last counted.
    ecc: BTreeMap<GpuUuid, u64>,
}

impl Surveying {
    /// Uses the driver as long as it is there. False when the thread should end.
    fn look_for_driver(&mut self, root: &Path) -> bool {
        let missing = match open(root) {
            Ok((nvml, files)) => match self.use_driver(&nvml, &files) {
                Over::Stopped => return false,
                Over::GpuMissing => return true,
                Over::DriverGone(reason) => reason,
            },
            Err(reason) => reason,
        };
        self.publish(Survey::NoDriver(missing));
        let pause = self.pause;
        self.pause = (pause * 2).min(DRIVER_EVERY.1);
        !self.sleep(pause)
    }

    fn use_driver(&mut self, nvml: &Nvml, files: &cdi_generator::Driver) -> Over {
        let mut events = Events::default();
        let mut readings = Readings::default();
        let begun = Instant::now();
        loop {
            let found = match self.survey(nvml, files) {
                Ok(found) => found,
                Err(reason) => return Over::DriverGone(reason),
            };
            self.pause = DRIVER_EVERY.0;
            events.follow(nvml, &found.gpus);
            self.seen.extend(found.gpus.iter().map(|gpu| gpu.uuid.clone()));
            let missing = found.silent.is_some() || found.gpus.len() < self.seen.len();
            self.publish(Survey::Found(found));
            if missing && begun.elapsed() > RELOAD_EVERY {
                return Over::GpuMissing;
            }
            let until = Instant::now() + SURVEY_EVERY;
            while Instant::now() < until {
                if self.sleep(Duration::ZERO) {
                    return Over::Stopped;
                }
                let wait = if self.meter.is_wanted() {
                    self.meter.read(nvml, &mut readings);
                    self.holders.answer(nvml);
                    TICK
                } else {
                    EVENT_WAIT
                };
                match events.wait(wait) {
                    Wait::Nothing => {}
                    Wait::Xid(gpu, xid) => {
                        if self.note(gpu, xid) {
                            break;
                        }
                    }
                    Wait::Unable => {
                        if self.sleep(wait) {
                            return Over::Stopped;
                        }
                    }
                }
            }
        }
    }

    /// True when the XID calls for a survey at once.
    fn note(&mut self, gpu: GpuUuid, xid: u64) -> bool {
        match self.xids.note(gpu.clone(), xid, Instant::now()) {
            Noted::New => {
                warn!(%gpu, xid, "XID");
                true
            }
            Noted::Again => {
                debug!(%gpu, xid, "XID again");
                false
            }
            Noted::Ignored => {
                debug!(%gpu, xid, "XID of an application, ignored");
                false
            }
        }
    }

    fn survey(&mut self, nvml: &Nvml, files: &cdi_generator::Driver) -> Result<Found, String> {
        // The files may be replaced at any time; those in memory then no longer fit what containers would get.
        let now_there = discover(&files.root)?;
        if (&now_there.version, &now_there.nvml) != (&files.version, &files.nvml) {
            return Err(format!("its files were replaced by those of {}", now_there.version));
        }
        let failed = |error| explain(&error);
        let running = nvml.sys_driver_version().map_err(failed)?;
        if running != files.version {
            return Err(format!(
                "its files are of version {} and the kernel module of {running}; reboot the node, or reload the \
                 kernel modules",
                files.version
            ));
        }
        let driver = Driver { version: running, library_dir: files.library_dir.clone() };
        let now = Instant::now();
        let mut found = Found { driver, gpus: Vec::new(), silent: None, groups: Vec::new() };
        for index in 0..nvml.device_count().map_err(failed)? {
            match nvml.device_by_index(index).and_then(|device| see(&device)) {
                Ok(Some(mut gpu)) => {
                    self.look_at_memory(&mut gpu, nvml, now);
                    gpu.trouble = self.xids.trouble(&gpu.uuid, now).or(gpu.trouble);
                    found.gpus.push(gpu);
                }
                Ok(None) => {}
                Err(error) => {
                    found.silent = Some(format!("GPU {index} does not answer: {}", explain(&error)))
                }
            }
        }
        found.groups = self.groups(nvml, &found.gpus, now);
        Ok(found)
    }

    /// Memory errors that cannot be corrected are XID 48, also where no XIDs are reported. Memory that waits to be retired
    /// or replaced keeps new shares off until the GPU is reset: an error there would end whoever is given it. Memory that
    /// no spare row replaces keeps them off for good.
    fn look_at_memory(&mut self, gpu: &mut SeenGpu, nvml: &Nvml, now: Instant) {
        let Ok(device) = nvml.device_by_uuid(gpu.uuid.as_str()) else { return };
        // GPUs without ECC, or with ECC off, have no such counter, and nothing is known of them.
        if let Ok(errors) = device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile) {
            let before = self.ecc.insert(gpu.uuid.clone(), errors);
            // The counter starts at nought with the driver, and after a reset.
            if errors > before.unwrap_or(errors)
                && self.xids.note(gpu.uuid.clone(), XID_DOUBLE_BIT, now) == Noted::New
            {
                warn!(gpu = %gpu.uuid, errors, "memory errors that could not be corrected");
            }
        }
        // Pages are retired up to Volta, rows remapped from Ampere on; each has only one of them.
        let [pending, failed] = remapped_rows(&device);
        if failed {
            gpu.trouble = Some(
                "memory with errors could not be replaced by a spare row; have the GPU replaced, `nvidia-smi -q -d \
                 ROW_REMAPPER` tells more"
                    .into(),
            );
        } else if pending || matches!(device.are_pages_pending_retired(), Ok(true)) {
            gpu.trouble = Some(
                "memory with errors waits to be retired; let its shares end, then reset it with `nvidia-smi --gpu-reset`"
                    .into(),
            );
        }
    }

    fn groups(&mut self, nvml: &Nvml, gpus: &[SeenGpu], now: Instant) -> Vec<(Link, Vec<GpuUuid>)> {
        let same = |known: &Connections| {
            now.duration_since(known.at) < CONNECTIONS_EVERY
                && known.of.iter().eq(gpus.iter().map(|gpu| &gpu.uuid))
        };
        if let Some(known) = self.connections.as_ref().filter(|known| same(known)) {
            return known.groups.clone();
        }
        let groups = connections(nvml, gpus);
        let of = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        self.connections = Some(Connections { at: now, of, groups: groups.clone() });
        groups
    }

    fn publish(&self, survey: Survey) {
        self.publish.send_if_modified(|last| {
            let changed = *last != survey;
            *last = survey;
            changed
        });
    }

    /// True when the thread should end.
    fn sleep(&self, time: Duration) -> bool {
        self.pulse.beat(Instant::now());
        self.stopped.recv_timeout(time) == Err(RecvTimeoutError::Disconnected)
    }
}

fn discover(root: &Path) -> Result<cdi_generator::Driver, String> {
    cdi_generator::Driver::discover(root).map_err(|error| error.to_string())
}

fn open(root: &Path) -> Result<(Nvml, cdi_generator::Driver), String> {
    let files = discover(root)?;
    let library = &files.nvml.host;
    let nvml = Nvml::builder()
        .lib_path(library.as_os_str())
        .init()
        .map_err(|error| format!("{}: {}", library.display(), explain(&error)))?;
    debug!(library = %library.display(), "NVML loaded");
    Ok((nvml, files))
}

/// The GPU, or none when it is of a kind that this system does not know, such as one without a node of its own.
fn see(device: &Device<'_>) -> Result<Option<SeenGpu>, NvmlError> {
    let uuid = device.uuid()?;
    let Ok(uuid) = uuid.parse::<GpuUuid>() else {
        debug!(uuid, "not a GPU of the usual kind, left alone");
        return Ok(None);
    };
    let pci = device.pci_info()?;
    let mig = match device.mig_mode() {
        Ok(mode) => mode.current == MIG_ENABLED,
        Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)) => false,
        Err(error) => return Err(error),
    };
    Ok(Some(SeenGpu {
        uuid,
        name: device.name()?,
        minor: device.minor_number()?,
        total_bytes: device.memory_info()?.total,
        capability: capability(device),
        numa_node: sysfs_numa_node(pci.domain, pci.bus, pci.device).or_else(|| nvml_numa_node(device)),
        pci_bus_id: pci.bus_id,
        mig,
        trouble: None,
    }))
}

/// Whether rows of memory wait for a spare row, and whether there was none for one. False where there are none to replace.
fn remapped_rows(device: &Device<'_>) -> [bool; 2] {
    [field_id::NVML_FI_DEV_REMAPPED_PENDING, field_id::NVML_FI_DEV_REMAPPED_FAILURE].map(|id| {
        let sample = device.field_values_for(&[FieldId(id)]).ok().and_then(|mut samples| samples.pop());
        let value = sample.and_then(Result::ok).and_then(|sample| sample.value.ok());
        matches!(value, Some(SampleValue::U32(1..) | SampleValue::U64(1..)))
    })
}

/// Nothing is refused for want of it.
fn capability(device: &Device<'_>) -> Option<u32> {
    let told = device.cuda_compute_capability().ok()?;
    let (major, minor) = (u32::try_from(told.major).ok()?, u32::try_from(told.minor).ok()?);
    (major > 0 && minor < 10).then(|| major.saturating_mul(10) + minor)
}

/// How these GPUs are connected, as it was at that time.
struct Connections {
    at: Instant,
    of: Vec<GpuUuid>,
    groups: Vec<(Link, Vec<GpuUuid>)>,
}

/// How `gpus` are connected. What NVML does not tell is no connection.
fn connections(nvml: &Nvml, gpus: &[SeenGpu]) -> Vec<(Link, Vec<GpuUuid>)> {
    let devices: Vec<_> = gpus.iter().map(|gpu| nvml.device_by_uuid(gpu.uuid.as_str()).ok()).collect();
    let mut switched = vec![false; gpus.len()];
    let mut nvlinks = vec![vec![0; gpus.len()]; gpus.len()];
    for (at, device) in devices.iter().enumerate() {
        let Some(device) = device else { continue };
        for number in 0..MAX_LINKS {
            let link = device.link_wrapper_for(number);
            if !matches!(link.is_active(), Ok(true)) {
                continue;
            }
            switched[at] |= matches!(link.remote_device_type(number), Ok(IntDeviceType::Switch));
            let far = link.remote_pci_info().ok();
            let other = far.and_then(|far| gpus.iter().position(|gpu| gpu.pci_bus_id == far.bus_id));
            if let Some(other) = other {
                nvlinks[at][other] += 1;
            }
        }
    }
    let numa: Vec<_> = gpus.iter().map(|gpu| gpu.numa_node).collect();
    let between = |one: usize, other: usize| {
        // The call takes the other device by value, and a device cannot be copied.
        let level = match (&devices[one], nvml.device_by_uuid(gpus[other].uuid.as_str())) {
            (Some(device), Ok(other)) => device.topology_common_ancestor(other).ok(),
            _ => None,
        };
        Between {
            nvlinks: nvlinks[one][other].min(nvlinks[other][one]),
            one_switch: matches!(level, Some(TopologyLevel::Internal | TopologyLevel::Single)),
            switches: matches!(
                level,
                Some(TopologyLevel::Internal | TopologyLevel::Single | TopologyLevel::Multiple)
            ),
        }
    };
    let pairs = (0..gpus.len()).flat_map(|one| (one + 1..gpus.len()).map(move |other| (one, other)));
    let known: BTreeMap<_, _> = pairs.map(|(one, other)| ((one, other), between(one, other))).collect();
    let of =
        |one: usize, other: usize| known.get(&(one.min(other), one.max(other))).copied().unwrap_or_default();
    let groups = topology::groups(gpus.len(), &switched, &numa, of);
    let named = |members: Vec<usize>| members.into_iter().map(|at| gpus[at].uuid.clone()).collect();
    groups.into_iter().map(|(link, members)| (link, named(members))).collect()
}

/// `NVML_DEVICE_MIG_ENABLE` (nvml.h).
const MIG_ENABLED: u32 = 1;

/// The kernel's word for where the device is, which is also the numbering that kubelet uses.
fn sysfs_numa_node(domain: u32, bus: u32, device: u32) -> Option<u32> {
    let folder = PathBuf::from(format!("/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0"));
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).ok();
    if read("vendor")?.trim() != NVIDIA {
        return None;
    }
    // -1 where the platform does not tell.
    read("numa_node")?.trim().parse().ok()
}

/// NVML's word for it, where that is a single node.
fn nvml_numa_node(device: &Device<'_>) -> Option<u32> {
    /// `NVML_AFFINITY_SCOPE_NODE` (nvml.h).
    const SCOPE_NODE: u32 = 0;
    /// Enough for 256 NUMA nodes.
    const WORDS: usize = 4;
    let words = device.memory_affinity(WORDS, SCOPE_NODE).ok()?;
    let mut nodes = (0..).zip(words).flat_map(|(at, word): (u32, _)| {
        (0..u64::BITS).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at * u64::BITS + bit)
    });
    nodes.next().filter(|_| nodes.next().is_none())
}

/// What an NVML error means for the one who has to mend it.
fn explain(error: &NvmlError) -> String {
    let remedy = match error {
        NvmlError::LibRmVersionMismatch => {
            "the driver was upgraded; reboot the node, or reload the kernel modules"
        }
        NvmlError::DriverNotLoaded => "load it with `modprobe nvidia`, and see the kernel log",
        NvmlError::NoPermission | NvmlError::OperatingSystem => {
            "this process needs /dev/nvidiactl and the device nodes of all GPUs"
        }
        NvmlError::GpuLost => "see the kernel log; it may need a reset or a reboot",
        NvmlError::ResetRequired => "reset it with `nvidia-smi --gpu-reset`",
        _ => return error.to_string(),
    };
    format!("{error}; {remedy}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvml_that_does_not_come_back_is_no_driver_until_it_does() {
        let start = Instant::now();
        let pulse = Pulse(Mutex::new(start));
        assert!(!pulse.is_gone(start + ANSWERS_WITHIN - Duration::from_millis(1)));
        assert!(pulse.is_gone(start + ANSWERS_WITHIN));
        pulse.beat(start + ANSWERS_WITHIN);
        assert!(!pulse.is_gone(start + ANSWERS_WITHIN));
    }
}
