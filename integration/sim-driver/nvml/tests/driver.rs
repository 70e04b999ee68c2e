//! NVML as the `nvml-wrapper` crate and the real `nvidia-smi` 550 see it.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::Ordering::Relaxed,
    thread,
    time::{Duration, Instant},
};

use nvml_wrapper::{
    Nvml,
    bitmasks::event::EventTypes,
    enum_wrappers::device::{ComputeMode, EccCounter, MemoryError, TemperatureSensor, TopologyLevel},
    enums::{
        device::{SampleValue, UsedGpuMemory},
        event::XidError,
    },
    error::NvmlError,
    structs::device::FieldId,
};
use sim_gpud::{
    config::Machine,
    daemon::{self, Daemon},
    layout::{Layout, Library},
    link::{Link, SOCKET},
    wire::kind,
};

const MIB: u64 = 1 << 20;

struct Driver {
    folder: tempfile::TempDir,
    library: PathBuf,
}

fn layout<'a>(root: &'a Path, machine: &'a Machine) -> Layout<'a> {
    let libraries = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    Layout { root, machine, libraries, nvidia_smi: None, plain_nodes: true }
}

impl Driver {
    fn start(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let machine = Machine::parse(text).unwrap();
        let layout = layout(folder.path(), &machine);
        let library = layout.library(Library::Nvml).unwrap();
        layout.nodes().unwrap();
        let daemon = Daemon::start(folder.path(), &machine).unwrap();
        thread::spawn(move || daemon.serve());
        Self { folder, library }
    }

    fn root(&self) -> &Path {
        self.folder.path()
    }

    fn nvml(&self) -> Result<Nvml, NvmlError> {
        Nvml::builder().lib_path(self.library.as_os_str()).init()
    }

    fn node(&self, name: &str) -> PathBuf {
        self.root().join("dev").join(name)
    }

    fn happen(&self, command: &daemon::Command) {
        daemon::ask(self.root(), command).unwrap();
    }

    /// Connects to the module as a process that uses CUDA does.
    fn link(&self) -> Link {
        Link::to(&self.root().join(SOCKET), self.root().into(), kind::CUDA).unwrap()
    }
}

const MACHINE: &str = "version: 1
gpus:
- {count: 2, model: NVIDIA H100 80GB HBM3, reservedMib: 559, numa: 0, cpus: 0-3, pciSwitch: 1}
- {count: 2, model: Tesla T4, numa: 1, cpus: 4-7}
links:
- {gpus: [0, 1], by: nvlink, each: 2}
";

#[test]
fn the_inventory_is_what_the_file_says() {
    let driver = Driver::start(MACHINE);
    let nvml = driver.nvml().unwrap();
    assert_eq!(nvml.device_count().unwrap(), 4);
    assert_eq!(nvml.sys_driver_version().unwrap(), "550.163.01");
    assert_eq!(nvml.sys_nvml_version().unwrap(), "12.550.163.01");
    assert_eq!(nvml.sys_cuda_driver_version().unwrap(), 12_040);
    let gpu = nvml.device_by_index(1).unwrap();
    let uuid = gpu.uuid().unwrap();
    assert_eq!(uuid, "GPU-53494d55-6770-7500-0000-000000000001");
    assert_eq!(gpu.name().unwrap(), "NVIDIA H100 80GB HBM3");
    assert_eq!(gpu.minor_number().unwrap(), 1);
    let pci = gpu.pci_info().unwrap();
    assert_eq!((pci.bus_id.as_str(), pci.pci_device_id), ("00000000:11:00.0", 0x2330_10de));
    for same in
        [nvml.device_by_uuid(uuid.as_str()).unwrap(), nvml.device_by_pci_bus_id("0000:11:00.0").unwrap()]
    {
        assert_eq!(same.index().unwrap(), 1);
    }
    assert!(matches!(nvml.device_by_uuid("GPU-0"), Err(NvmlError::NotFound)));
    assert!(matches!(nvml.device_by_index(4), Err(NvmlError::InvalidArg)));
    let capability = gpu.cuda_compute_capability().unwrap();
    assert_eq!((capability.major, capability.minor), (9, 0));
    assert_eq!(gpu.compute_mode().unwrap(), ComputeMode::Default);
    assert_eq!(gpu.mig_mode().unwrap().current, 0);
    assert!(matches!(nvml.device_by_index(3).unwrap().mig_mode(), Err(NvmlError::NotSupported)));
    assert!(gpu.temperature(TemperatureSensor::Gpu).unwrap() > 0);
    assert!(gpu.power_usage().unwrap() < gpu.enforced_power_limit().unwrap());
    assert_eq!(gpu.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile).unwrap(), 0);
    assert_eq!(gpu.cpu_affinity(1).unwrap(), [0xf]);
    assert_eq!(nvml.device_by_index(2).unwrap().cpu_affinity(1).unwrap(), [0xf0]);
}

#[test]
fn memory_adds_up() {
    let driver = Driver::start(MACHINE);
    let nvml = driver.nvml().unwrap();
    let memory = nvml.device_by_index(0).unwrap().memory_info().unwrap();
    assert_eq!((memory.total, memory.reserved), (81_559 * MIB, 559 * MIB));
    assert_eq!(memory.used + memory.free + memory.reserved, memory.total);
    assert_eq!(memory.used, 0);
}

#[test]
fn topology_tells_links_switches_and_nodes() {
    let driver = Driver::start(MACHINE);
    let nvml = driver.nvml().unwrap();
    let gpus: Vec<_> = (0..4).map(|index| nvml.device_by_index(index).unwrap()).collect();
    let level = |one: usize, other: usize| {
        gpus[one]
            .topology_common_ancestor(nvml.device_by_index(u32::try_from(other).unwrap()).unwrap())
            .unwrap()
    };
    assert_eq!(level(0, 1), TopologyLevel::Single);
    assert_eq!(level(2, 3), TopologyLevel::Node);
    assert_eq!(level(0, 2), TopologyLevel::System);
    for number in 0..2 {
        let link = gpus[0].link_wrapper_for(number);
        assert!(link.is_active().unwrap());
        assert_eq!(link.version().unwrap(), 4);
        assert_eq!(link.remote_pci_info().unwrap().bus_id, "00000000:11:00.0");
    }
    assert!(matches!(gpus[0].link_wrapper_for(2).is_active(), Err(NvmlError::NotSupported)));
    assert!(matches!(gpus[2].link_wrapper_for(0).is_active(), Err(NvmlError::NotSupported)));
}

#[test]
fn only_gpus_whose_nodes_can_be_opened_are_there() {
    let driver = Driver::start(MACHINE);
    fs::remove_file(driver.node("nvidia0")).unwrap();
    {
        let nvml = driver.nvml().unwrap();
        assert_eq!(nvml.device_count().unwrap(), 3);
        assert_eq!(nvml.device_by_index(0).unwrap().minor_number().unwrap(), 1);
    }
    fs::remove_file(driver.node("nvidiactl")).unwrap();
    assert!(matches!(driver.nvml(), Err(NvmlError::DriverNotLoaded)));
}

#[test]
fn without_the_module_no_driver_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let machine = Machine::parse("version: 1\ngpus: [{}]").unwrap();
    let layout = layout(folder.path(), &machine);
    let library = layout.library(Library::Nvml).unwrap();
    layout.nodes().unwrap();
    let answer = Nvml::builder().lib_path(library.as_os_str()).init();
    assert!(matches!(answer, Err(NvmlError::DriverNotLoaded)));
}

#[test]
fn a_library_of_another_version_than_the_module_is_refused() {
    let driver = Driver::start("version: 1\ngpus: [{}]");
    let other = Machine::parse("version: 1\ndriver: 550.90.07\ngpus: [{}]").unwrap();
    let library = layout(driver.root(), &other).library(Library::Nvml).unwrap();
    let answer = Nvml::builder().lib_path(library.as_os_str()).init();
    assert!(matches!(answer, Err(NvmlError::LibRmVersionMismatch)));
}

#[test]
fn events_reach_who_registered_for_them() {
    let driver = Driver::start(MACHINE);
    let nvml = driver.nvml().unwrap();
    driver.happen(&daemon::Command::Xid { gpu: "0".into(), code: 13 });
    let mut events = nvml.create_event_set().unwrap();
    for index in [0, 2] {
        let gpu = nvml.device_by_index(index).unwrap();
        assert!(gpu.supported_event_types().unwrap().contains(EventTypes::CRITICAL_XID_ERROR));
        events = gpu.register_events(EventTypes::CRITICAL_XID_ERROR, events).unwrap();
    }
    assert!(matches!(events.wait(0), Err(NvmlError::Timeout)), "what was before is not told");
    driver.happen(&daemon::Command::Xid { gpu: "1".into(), code: 48 });
    driver.happen(&daemon::Command::Xid { gpu: "2".into(), code: 79 });
    driver.happen(&daemon::Command::Xid { gpu: "0".into(), code: 31 });
    let xid = |code| Some(XidError::Value(code));
    for expected in [(2, xid(79)), (0, xid(31))] {
        let event = events.wait(10_000).unwrap();
        assert_eq!((event.device.minor_number().unwrap(), event.event_data), expected);
    }
    assert!(matches!(events.wait(0), Err(NvmlError::Timeout)));
    // A waiting thread is woken.
    let root = driver.root().to_path_buf();
    let teller = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        daemon::ask(&root, &daemon::Command::Xid { gpu: "2".into(), code: 43 }).unwrap();
    });
    assert_eq!(events.wait(600_000).unwrap().event_data, xid(43));
    teller.join().unwrap();
}

#[test]
fn memory_errors_count_until_the_gpu_is_reset() {
    let driver = Driver::start(MACHINE);
    let nvml = driver.nvml().unwrap();
    let errors =
        |at: u32, kind, since| nvml.device_by_index(at).unwrap().total_ecc_errors(kind, since).unwrap();
    let [now, ever] = [EccCounter::Volatile, EccCounter::Aggregate];
    driver.happen(&daemon::Command::Ecc { gpu: "1".into(), errors: 2, retires: false });
    driver.happen(&daemon::Command::Ecc { gpu: "1".into(), errors: 1, retires: true });
    let found = |at| [errors(at, MemoryError::Uncorrected, now), errors(at, MemoryError::Uncorrected, ever)];
    assert_eq!([found(0), found(1)], [[0, 0], [3, 3]]);
    assert_eq!(errors(1, MemoryError::Corrected, ever), 0);
    let waits = |at| nvml.device_by_index(at).unwrap().are_pages_pending_retired().unwrap();
    assert_eq!([waits(0), waits(1)], [false, true]);
    driver.happen(&daemon::Command::Reset { gpu: "1".into() });
    assert_eq!((found(1), waits(1)), ([0, 3], false));
}

#[test]
fn rows_with_errors_are_replaced_when_the_gpu_is_reset_unless_there_is_no_spare_one() {
    let driver = Driver::start(MACHINE);
    let nvml = driver.nvml().unwrap();
    let rows = |at: u32| {
        let ids = [142, 143, 144, 145, 1].map(FieldId);
        let samples = nvml.device_by_index(at).unwrap().field_values_for(&ids).unwrap();
        samples.into_iter().map(|sample| sample.unwrap().value.ok()).collect::<Vec<_>>()
    };
    let some = |values: [u32; 4]| values.map(|value| Some(SampleValue::U32(value))).into_iter().chain([None]);
    driver.happen(&daemon::Command::Row { gpu: "1".into(), failed: false });
    assert!(rows(0).into_iter().eq(some([0; 4])));
    assert!(rows(1).into_iter().eq(some([0, 0, 1, 0])));
    driver.happen(&daemon::Command::Row { gpu: "1".into(), failed: true });
    driver.happen(&daemon::Command::Reset { gpu: "1".into() });
    assert!(rows(1).into_iter().eq(some([0, 1, 0, 1])));
}

#[test]
fn a_gpu_that_fell_off_the_bus_is_lost_until_it_is_back() {
    let driver = Driver::start(MACHINE);
    let nvml = driver.nvml().unwrap();
    let gpu = nvml.device_by_index(1).unwrap();
    driver.happen(&daemon::Command::Lose { gpu: gpu.uuid().unwrap() });
    assert!(matches!(gpu.memory_info(), Err(NvmlError::GpuLost)));
    assert!(matches!(nvml.device_by_index(1), Err(NvmlError::GpuLost)));
    assert_eq!(nvml.device_count().unwrap(), 4);
    driver.happen(&daemon::Command::Recover { gpu: "1".into() });
    gpu.memory_info().unwrap();
}

#[test]
fn processes_are_told_with_their_memory() {
    let driver = Driver::start(MACHINE);
    let nvml = driver.nvml().unwrap();
    let gpu = nvml.device_by_index(2).unwrap();
    assert!(gpu.running_compute_processes().unwrap().is_empty());
    let link = driver.link();
    assert!(link.state.charge(link.slot, 2, 300 * MIB));
    assert!(gpu.running_compute_processes().unwrap().is_empty(), "it has no context yet");
    link.state.clients[link.slot].contexts[2].fetch_add(1, Relaxed);
    let running = gpu.running_compute_processes().unwrap();
    assert_eq!(running.len(), 1);
    assert_eq!(running[0].pid, std::process::id());
    assert!(matches!(running[0].used_gpu_memory, UsedGpuMemory::Used(bytes) if bytes == 300 * MIB));
    assert_eq!(gpu.memory_info().unwrap().used, 300 * MIB);
    assert!(nvml.device_by_index(1).unwrap().running_compute_processes().unwrap().is_empty());
    assert!(gpu.running_graphics_processes().unwrap().is_empty());
    drop(link);
    let deadline = Instant::now() + Duration::from_secs(20);
    while gpu.memory_info().unwrap().used > 0 {
        assert!(Instant::now() < deadline, "the connection's end gives it back");
    }
}

fn real_nvidia_smi() -> Option<PathBuf> {
    let cache = std::env::var_os("VCUDA_CACHE")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("XDG_CACHE_HOME").map(|cache| Path::new(&cache).join("vcuda")))
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache/vcuda")))?;
    Some(cache.join("real/driver-550/nvidia-smi")).filter(|file| file.exists())
}

#[test]
fn the_real_nvidia_smi_runs_on_it() {
    let Some(program) = real_nvidia_smi() else {
        eprintln!("skipped: nvidia-smi 550 is not in the cache; vcuda-preload/tests/fetch.sh brings it");
        return;
    };
    let driver = Driver::start(MACHINE);
    let link = driver.link();
    assert!(link.state.charge(link.slot, 3, 1234 * MIB));
    link.state.clients[link.slot].contexts[3].fetch_add(1, Relaxed);
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        command.args(arguments).env("LD_LIBRARY_PATH", driver.library.parent().unwrap());
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        text
    };
    let pid = std::process::id();
    assert!(run(&["-L"]).contains("GPU 3: Tesla T4 (UUID: GPU-53494d55-6770-7500-0000-000000000003)"));
    let table = run(&[]);
    for shown in ["Driver Version: 550.163.01", "1234MiB /  15360MiB", "00000000:13:00.0", &pid.to_string()] {
        assert!(table.contains(shown), "{shown:?} is not in\n{table}");
    }
    let asked = run(&["--query-gpu=index,memory.total,memory.reserved,memory.free", "--format=csv,noheader"]);
    assert!(asked.starts_with("0, 81559 MiB, 559 MiB, 81000 MiB"), "{asked}");
    let asked = run(&["--query-compute-apps=pid,used_memory", "--format=csv,noheader"]);
    assert_eq!(asked.trim(), format!("{pid}, 1234 MiB"));
    assert!(run(&["-q"]).contains("FB Memory Usage"));
    let topology = run(&["topo", "-m"]);
    for shown in ["NV2", "NODE", "SYS"] {
        assert!(topology.contains(shown), "{shown} is not in\n{topology}");
    }
}

#[test]
fn utilization_is_told_of_samples_that_are_over_for_each_busy_process() {
    let driver = Driver::start("version: 1\ngpus: [{count: 2}]");
    let nvml = driver.nvml().unwrap();
    let [gpu, other] = [0, 1].map(|index| nvml.device_by_index(index).unwrap());
    assert_eq!(gpu.utilization_rates().unwrap().gpu, 0);
    assert!(matches!(gpu.process_utilization_stats(None), Err(NvmlError::NotFound)));
    let link = Link::to(&driver.root().join(SOCKET), driver.root().into(), kind::CUDA).unwrap();
    // Work without an end.
    link.state.at_gpu(link.slot, 0, |turns| turns.want(link.slot, u64::MAX >> 1));
    let deadline = Instant::now() + Duration::from_secs(20);
    while gpu.utilization_rates().unwrap().gpu < 100 {
        assert!(Instant::now() < deadline, "the GPU is never busy");
        thread::sleep(Duration::from_millis(20));
    }
    let all = gpu.process_utilization_stats(None).unwrap();
    assert_eq!((all.len(), all[0].pid), (1, std::process::id()));
    assert!((1..=100).contains(&all[0].sm_util), "{all:?}");
    // A sample is told once to who asks for newer ones.
    let mut newest = all[0].timestamp;
    while Instant::now() < deadline {
        match gpu.process_utilization_stats(newest) {
            Err(NvmlError::NotFound) => thread::sleep(Duration::from_millis(20)),
            answer => {
                let next = &answer.unwrap()[0];
                assert!(next.timestamp > newest + 100_000, "{} after {newest}", next.timestamp);
                assert_eq!(next.sm_util, 100);
                newest = next.timestamp;
                break;
            }
        }
    }
    assert!(newest > all[0].timestamp);
    assert_eq!(other.utilization_rates().unwrap().gpu, 0);
    assert!(other.process_utilization_stats(None).is_err());
}
