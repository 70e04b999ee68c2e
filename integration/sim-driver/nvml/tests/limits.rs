//! Memory limits of cgroups, as NVML 13.4 has them, on real cgroups of version 2. Needs root and a cgroup tree that can be
//! written: `cargo test -p sim-nvml -- --ignored`.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::{
    ffi::{CString, c_void},
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use sim_gpud::{
    config::Machine,
    daemon::Daemon,
    layout::{Layout, Library},
    link::{Link, SOCKET},
    wire::kind,
};

const MIB: u64 = 1 << 20;
const MAX: u64 = u64::MAX;

/// A cgroup of our own, removed in the end.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(above: &Path, name: &str) -> Self {
        let folder = above.join(format!("{name}-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        Self(folder)
    }

    fn top() -> PathBuf {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let of_two =
            mounts.lines().find(|line| line.contains(" - cgroup2 ")).expect("no cgroup tree of version 2");
        of_two.split(' ').nth(4).unwrap().into()
    }

    /// A process in it that takes so many MiB of GPU 0, says whether it could, and stays.
    fn process(&self, socket: &Path, mib: u64) -> (Child, bool) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "plays_a_process", "--nocapture"])
            .env("SIM_TEST_SOCKET", socket)
            .env("SIM_TEST_CGROUP", self.0.join("cgroup.procs"))
            .env("SIM_TEST_MIB", mib.to_string())
            .stdout(Stdio::piped())
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
        let word = lines.find_map(|line| line.unwrap().split("took ").nth(1).map(str::to_owned)).unwrap();
        (child, word == "true")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that just ended may still be in it.
        for _ in 0..200 {
            if fs::remove_dir(&self.0).is_ok() || !self.0.exists() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn plays_a_process() {
    let Some(socket) = std::env::var_os("SIM_TEST_SOCKET") else { return };
    fs::write(std::env::var_os("SIM_TEST_CGROUP").unwrap(), std::process::id().to_string()).unwrap();
    let mib: u64 = std::env::var("SIM_TEST_MIB").unwrap().parse().unwrap();
    let link = Link::to(Path::new(&socket), "/".into(), kind::CUDA).unwrap();
    println!("took {}", link.state.charge(link.slot, 0, mib * MIB));
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// The three functions of NVML that are asked for, as nvml.h 13.4 declares them.
struct Nvml {
    device: *mut c_void,
    set: unsafe extern "C" fn(*mut c_void, *mut SetLimits) -> i32,
    get: unsafe extern "C" fn(*mut c_void, *mut GetLimits) -> i32,
}

#[repr(C)]
struct SetLimits(*const std::ffi::c_char, u64, u64);

#[repr(C)]
struct GetLimits(*const std::ffi::c_char, u64, u64, u64);

impl Nvml {
    /// None where the library has no such functions.
    fn open(library: &Path) -> Option<Self> {
        let path = CString::new(library.as_os_str().as_bytes()).unwrap();
        // SAFETY: loads the simulated library and calls its functions as nvml.h declares them.
        unsafe {
            let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
            assert!(!handle.is_null());
            let find = |name: &str| libc::dlsym(handle, CString::new(name).unwrap().as_ptr());
            let (set, get) = (find("nvmlDeviceSetMemoryLimits_v1"), find("nvmlDeviceGetMemoryLimits_v1"));
            if set.is_null() || get.is_null() {
                return None;
            }
            let init = std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> i32>(find("nvmlInit_v2"));
            assert_eq!(init(), 0);
            let device = std::mem::transmute::<*mut c_void, unsafe extern "C" fn(u32, *mut *mut c_void) -> i32>(
                find("nvmlDeviceGetHandleByIndex_v2"),
            );
            let mut first = std::ptr::null_mut();
            assert_eq!(device(0, &raw mut first), 0);
            Some(Self {
                device: first,
                set: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*mut c_void, *mut SetLimits) -> i32,
                >(set),
                get: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*mut c_void, *mut GetLimits) -> i32,
                >(get),
            })
        }
    }

    fn set(&self, cgroup: &Path, soft: u64, hard: u64) -> i32 {
        let path = CString::new(cgroup.as_os_str().as_bytes()).unwrap();
        // SAFETY: as above.
        unsafe { (self.set)(self.device, &mut SetLimits(path.as_ptr(), soft, hard)) }
    }

    /// Status; soft, hard and used bytes.
    fn get(&self, cgroup: &Path) -> (i32, [u64; 3]) {
        let path = CString::new(cgroup.as_os_str().as_bytes()).unwrap();
        let mut limits = GetLimits(path.as_ptr(), 0, 0, 0);
        // SAFETY: as above.
        let code = unsafe { (self.get)(self.device, &raw mut limits) };
        (code, [limits.1, limits.2, limits.3])
    }
}

fn start(driver: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let text = format!("version: 1\ndriver: {driver}\ngpus: [{{memoryMib: 1024}}]");
    let machine = Machine::parse(&text).unwrap();
    let libraries = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let layout =
        Layout { root: folder.path(), machine: &machine, libraries, nvidia_smi: None, plain_nodes: true };
    let library = layout.library(Library::Nvml).unwrap();
    layout.nodes().unwrap();
    let daemon = Daemon::start(folder.path(), &machine).unwrap();
    thread::spawn(move || daemon.serve());
    (folder, library)
}

#[test]
fn older_drivers_have_no_memory_limits() {
    assert!(Nvml::open(&start("550.163.01").1).is_none());
}

#[test]
#[ignore = "needs root and a writable cgroup tree of version 2"]
fn a_cgroup_never_passes_its_limit_whoever_asks() {
    let (folder, library) = start("615.10");
    let socket = folder.path().join(SOCKET);
    let nvml = Nvml::open(&library).unwrap();
    let above = Cgroup::new(&Cgroup::top(), "sim-limits");
    let (pod, other) = (Cgroup::new(&above.0, "pod"), Cgroup::new(&above.0, "other"));
    assert_eq!(nvml.get(&pod.0).0, 6, "none is set");
    assert_eq!(nvml.set(Path::new("/no/such/cgroup"), 0, MIB), 17);
    assert_eq!(nvml.set(Path::new("/tmp"), 0, MIB), 17, "no cgroup");
    assert_eq!(nvml.set(&pod.0, 2 * MIB, MIB), 2, "more is guaranteed than allowed");
    assert_eq!(nvml.set(&pod.0, 0, 2000 * MIB), 2, "more than the GPU has");
    assert_eq!(nvml.set(&pod.0, 0, 100 * MIB), 0);

    let (one, took) = pod.process(&socket, 70);
    assert!(took);
    let (mut two, took) = pod.process(&socket, 31);
    assert!(!took, "the limit is the cgroup's, not a process's");
    let (three, took) = pod.process(&socket, 30);
    assert!(took);
    let (mut free, took) = other.process(&socket, 500);
    assert!(took, "another cgroup has no limit");
    assert_eq!(nvml.get(&pod.0), (0, [0, 100 * MIB, 100 * MIB]));

    // Above what is in use now: more fits at once. Below: what is in use stays, and no more fits.
    assert_eq!(nvml.set(&pod.0, 0, 90 * MIB), 0);
    assert_eq!(nvml.get(&pod.0), (0, [0, 90 * MIB, 100 * MIB]));
    let (mut four, took) = pod.process(&socket, 1);
    assert!(!took);
    assert_eq!(nvml.set(&pod.0, 0, 200 * MIB), 0);
    let (mut five, took) = pod.process(&socket, 100);
    assert!(took);

    for mut killed in [one, three] {
        killed.kill().unwrap();
        killed.wait().unwrap();
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    while nvml.get(&pod.0).1[2] != 100 * MIB {
        assert!(Instant::now() < deadline, "what the killed held is back");
    }
    // A limit above counts for all below it, also for what they had before it was set.
    assert_eq!(nvml.set(&above.0, 0, 600 * MIB), 0);
    assert_eq!(nvml.get(&above.0), (0, [0, 600 * MIB, 600 * MIB]));
    let (mut six, took) = other.process(&socket, 1);
    assert!(!took);
    assert_eq!(nvml.set(&above.0, 0, MAX), 0, "lifted");
    assert_eq!(nvml.get(&above.0).0, 6);
    let (mut seven, took) = other.process(&socket, 1);
    assert!(took);
    for process in [&mut two, &mut four, &mut five, &mut six, &mut seven, &mut free] {
        process.kill().unwrap();
        process.wait().unwrap();
    }
    let gone = pod.0.clone();
    drop(pod);
    fs::create_dir(&gone).unwrap();
    assert_eq!(nvml.get(&gone).0, 6, "a limit goes with its cgroup");
    fs::remove_dir(&gone).unwrap();
}
