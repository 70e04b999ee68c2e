//! The machine of the bench: a simulated GPU, shares bound by the real ledger, the device plugin's governor, and
//! containers, which are a mount namespace and a cgroup each.

use std::{
    env, fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use device_plugin::{governor, meter::Meter, nvml::Surveyor};
use ledger::{Claim, ContainerRef, Inventory, Ledger, PodRef, ShareFolder, ShareRecord, Terms};
use region::{Limits, Usage, place};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use vcuda_config::{GpuUuid, Request};

use super::Work;
use crate::{
    cache,
    driver::{Driver, Wanted},
    interrupt,
};

/// Until all containers launch, before the first window.
const WARM_UP: Duration = Duration::from_millis(1500);

/// Until the governor has seen enough to tell what of the containers' time was their neighbours'.
const SETTLE: Duration = Duration::from_secs(9);

/// About how long it takes to start containers and to end them.
const STARTS: Duration = Duration::from_millis(500);

/// A container that has not launched by then never will.
const START: Duration = Duration::from_secs(30);

/// What the ledger takes for the machine's boot.
const BOOT: &str = "bench";

/// Where a container's programs find the driver.
const SYSTEM: &str = "/usr/local/lib";

/// The simulated machine and what is installed on it.
pub(super) struct Bench {
    driver: Driver,
    inventory: Inventory,
    meter: Arc<Meter>,
    _surveyor: Surveyor,
    pub shim: PathBuf,
    probe: PathBuf,
    folder: tempfile::TempDir,
    count: usize,
}

/// A running container; killed when dropped, with all processes that it started.
struct Container {
    child: Child,
    cgroup: PathBuf,
}

/// How long so many containers run before the first window.
fn settles(containers: usize, governed: bool) -> Duration {
    if governed && containers > 1 { SETTLE } else { WARM_UP }
}

/// About how long a measurement takes.
pub(super) fn takes(containers: usize, windows: usize, governed: bool) -> Duration {
    let seconds = Duration::from_secs(windows.try_into().unwrap_or(u64::MAX));
    settles(containers, governed) + seconds + STARTS
}

impl Drop for Container {
    fn drop(&mut self) {
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
        // Until the last of its processes is gone.
        let deadline = Instant::now() + Duration::from_secs(5);
        while fs::remove_dir(&self.cgroup).is_err() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A new cgroup of this name, in whatever hierarchy this machine has.
fn cgroup(name: &str) -> Result<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let unified = root.join("cgroup.controllers").exists();
    let folder = if unified { root.join(name) } else { root.join("pids").join(name) };
    fs::create_dir(&folder).with_context(|| folder.display().to_string())?;
    Ok(folder)
}

impl Bench {
    pub fn new() -> Result<Self> {
        let dist = cache::dist()?;
        let folder = tempfile::tempdir()?;
        let driver = Driver::start(folder.path(), Wanted::Simulated(1))?;
        let gpu = driver.gpus()?.into_iter().next().context("no simulated GPU")?;
        let gpu = ledger::Gpu {
            uuid: GpuUuid::try_from(gpu.uuid)?,
            name: gpu.name,
            minor: 0,
            total_bytes: gpu.total_bytes,
            memory_units: u32::try_from(gpu.total_bytes >> 28)?,
            numa_node: None,
            pci_bus_id: "00000000:10:00.0".into(),
            healthy: true,
            device_nodes: vec![],
        };
        let of =
            ledger::Driver { version: driver.version()?, library_dir: "/usr/lib/x86_64-linux-gnu".into() };
        let inventory = Inventory::new(BOOT.into(), of, vec![], vec![gpu]);
        let meter = Arc::new(Meter::default());
        let surveyor = Surveyor::start(driver.root().into(), &[], Arc::clone(&meter))?;
        let shim =
            env::var_os("VCUDA_SHIM").map_or_else(|| dist.join("lib/libvcuda_preload.so"), PathBuf::from);
        let probe = dist.join("test/cuda-probe");
        Ok(Self { driver, inventory, meter, _surveyor: surveyor, shim, probe, folder, count: 0 })
    }

    /// Runs containers at once, each with a share or with the bare driver, and gives what each got of the GPU in every
    /// window, in percent.
    pub fn measure(
        &mut self,
        all: &[(&Work, Option<u32>)],
        windows: usize,
        governed: bool,
    ) -> Result<Vec<Vec<f64>>> {
        let (ledger, shares) = self.node()?;
        let names: Vec<String> = (0..all.len()).map(|at| self.name(at)).collect();
        let mut folders = vec![];
        for ((_, share), name) in all.iter().zip(&names) {
            let share = share.map(|core| self.share(&ledger, name, core, Terms::default()));
            folders.push(share.transpose()?);
        }
        let start = || governor::start(shares, false, Arc::clone(&self.meter));
        let _governor = governed.then(start).transpose()?;
        let mut running = vec![];
        for (((work, _), name), share) in all.iter().zip(&names).zip(&folders) {
            running.push(self.start(work, name, share.as_ref())?);
        }
        self.wait_until_all_launch(&mut running)?;
        interrupt::sleep(settles(all.len(), governed))?;
        let mut got = vec![vec![]; running.len()];
        let first = Instant::now();
        let mut before = self.busy(&running)?;
        for window in 1..=windows {
            let end = first + Duration::from_secs(1) * u32::try_from(window)?;
            interrupt::sleep(end.saturating_duration_since(Instant::now()))?;
            let after = self.busy(&running)?;
            let passed = after.0.saturating_sub(before.0).max(1) as f64;
            for (at, windows) in got.iter_mut().enumerate() {
                windows.push(after.1[at].saturating_sub(before.1[at]) as f64 * 100.0 / passed);
            }
            before = after;
        }
        Ok(got)
    }

    /// A new node without shares, and where they will be.
    fn node(&mut self) -> Result<(Ledger, PathBuf)> {
        self.count += 1;
        let shares = self.folder.path().join(format!("run-{}", self.count)).join("shares");
        fs::create_dir_all(&shares)?;
        Ok((Ledger::open_in_boot(&shares, BOOT.into())?, shares))
    }

    /// Name of a container on that node.
    fn name(&self, at: usize) -> String {
        format!("vcudabench{}x{}x{at}", std::process::id(), self.count)
    }

    /// Starts a container, with a share or with the bare driver.
    fn start(&self, work: &Work, name: &str, share: Option<&ShareFolder>) -> Result<Container> {
        let cgroup = cgroup(name)?;
        let child = self.command(work, &cgroup, share).and_then(|mut command| Ok(command.spawn()?));
        match child.context("setpriv") {
            Ok(child) => Ok(Container { child, cgroup }),
            Err(error) => {
                let _ = fs::remove_dir(&cgroup);
                Err(error)
            }
        }
    }

    fn wait_until_all_launch(&self, running: &mut [Container]) -> Result<()> {
        let begin = Instant::now();
        while self.busy(running)?.1.contains(&0) {
            for container in &mut *running {
                if let Some(status) = container.child.try_wait()? {
                    bail!("a container ended ({status}) before it had launched; its words are above");
                }
            }
            ensure!(begin.elapsed() < START, "a container launches nothing");
            interrupt::sleep(Duration::from_millis(20))?;
        }
        Ok(())
    }

    /// A share of 30 borrows the time of one of 70, which then begins to launch: milliseconds from then on until the
    /// borrower uses no more than its share for good.
    pub fn give_back(&mut self, work: &Work, terms: Terms) -> Result<f64> {
        /// How long the two are watched, in nanoseconds.
        const WATCHED_NS: u64 = 1_500_000_000;
        /// What a share of 30 may use at once, as it has whole slots: 0.3 * 0.7 of a period, and a kernel or two.
        const AT_ONCE_NS: u64 = 23_000_000;
        let (ledger, shares) = self.node()?;
        let (borrower, owner) = (self.name(0), self.name(1));
        let borrowers = self.share(&ledger, &borrower, 30, terms)?;
        let owners = self.share(&ledger, &owner, 70, Terms::default())?;
        let _governor = governor::start(shares, false, Arc::clone(&self.meter))?;
        let mut running = vec![self.start(work, &borrower, Some(&borrowers))?];
        self.wait_until_all_launch(&mut running)?;
        interrupt::sleep(WARM_UP)?;
        let (from, to) = (self.busy(&running)?, {
            interrupt::sleep(Duration::from_millis(500))?;
            self.busy(&running)?
        });
        let lent = (to.1[0] - from.1[0]) * 100 / (to.0 - from.0).max(1);
        ensure!(lent > 60, "the borrower got {lent} % of an idle GPU");
        running.push(self.start(work, &owner, Some(&owners))?);
        let (begin, mut looks) = (Instant::now(), vec![]);
        let mut first = None;
        loop {
            interrupt::check()?;
            let (at, busy) = self.busy(&running)?;
            if busy[1] > 0 {
                looks.push((at, busy[0]));
                if at.saturating_sub(*first.get_or_insert(at)) > WATCHED_NS {
                    break;
                }
            }
            ensure!(begin.elapsed() < START, "the owner launches nothing");
        }
        let keeps = |from: usize| {
            let (at, had) = looks[from];
            let more = |look: &(u64, u64)| look.1.saturating_sub(had) > (look.0 - at) * 3 / 10 + AT_ONCE_NS;
            !looks[from..].iter().any(more)
        };
        let given = (0..looks.len()).find(|from| keeps(*from)).context("what was lent was not given back")?;
        Ok((looks[given].0 - looks[0].0) as f64 / 1e6)
    }

    /// The simulator's time, and the GPU time that each container has had, in nanoseconds.
    fn busy(&self, all: &[Container]) -> Result<(u64, Vec<u64>)> {
        let mut ask = Command::new(cache::dist()?.join("sim/sim-gpud"));
        ask.args(["ctl", "--root"]).arg(self.driver.root()).arg("show");
        let output = ask.output().context("sim-gpud ctl")?;
        ensure!(output.status.success(), "sim-gpud ctl: {}", String::from_utf8_lossy(&output.stderr));
        let show: Value = serde_json::from_slice(&output.stdout)?;
        let at = show["gpus"][0]["atNs"].as_u64().context("sim-gpud tells no time")?;
        let lists = ["processes", "ended"].map(|list| show[list].as_array().cloned().unwrap_or_default());
        let of = |container: &Container| {
            let own = |one: &&Value| one["group"].as_u64() == Some(container.child.id().into());
            lists.iter().flatten().filter(own).filter_map(|one| one["busyNs"][0].as_u64()).sum()
        };
        Ok((at, all.iter().map(of).collect()))
    }

    /// A new share.
    fn share(&self, ledger: &Ledger, name: &str, core: u32, terms: Terms) -> Result<ShareFolder> {
        let claim = Claim {
            pod: PodRef {
                uid: name.into(),
                namespace: "bench".into(),
                name: name.into(),
                sandbox_id: format!("sandbox-{name}"),
            },
            container: ContainerRef { name: "main".into(), id: name.into() },
            request: Request::new(core, 4)?,
            terms,
            wishes: ledger::Wishes::default(),
        };
        let fill = |record: &ShareRecord, folder: &ShareFolder| {
            Limits::create(&folder.limits(), &record.limits(false))?;
            fs::create_dir_all(folder.usage().parent().unwrap_or(Path::new("/")))?;
            Usage::create(&folder.usage())
        };
        Ok(ledger.bind(&self.inventory, &claim, &[], fill)?.folder)
    }

    /// A container's first process. What it mounts is only in its own namespace; `/usr/local` of the host is hidden there.
    fn command(&self, work: &Work, cgroup: &Path, share: Option<&ShareFolder>) -> Result<Command> {
        let library =
            |name: &str| self.driver.root().join("usr/lib/x86_64-linux-gnu").join(name).canonicalize();
        let (cuda, nvml) = (library("libcuda.so.1")?, library("libnvidia-ml.so.1")?);
        let mut script = format!(
            "set -e; echo $$ > '{}/cgroup.procs'; mount --make-rprivate /; mount -t tmpfs none /usr/local; \
             put() {{ mkdir -p \"${{2%/*}}\"; touch \"$2\"; mount --bind \"$1\" \"$2\"; }}\n",
            cgroup.display()
        );
        let mut put = |from: &Path, to: &str| script.push_str(&format!("put '{}' '{to}'\n", from.display()));
        let mut preload = String::new();
        if let Some(folder) = share {
            put(&self.shim, place::SHIM);
            for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
                put(&self.shim, &format!("{SYSTEM}/{name}"));
            }
            put(&cuda, place::REAL_CUDA);
            put(&nvml, place::REAL_NVML);
            put(&folder.limits(), place::LIMITS);
            put(&folder.usage(), place::USAGE);
            preload = format!("LD_PRELOAD={}", place::SHIM);
        } else {
            put(&cuda, &format!("{SYSTEM}/libcuda.so.1"));
            put(&nvml, &format!("{SYSTEM}/libnvidia-ml.so.1"));
        }
        script.push_str(&format!("exec env LD_LIBRARY_PATH={SYSTEM} {preload} \"$@\""));
        // Should the bench be killed, nobody else ends it: it is in a process group of its own.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "unshare", "--mount", "sh", "-c", &script, "sh"]);
        command.arg(&self.probe).args(["spin", "--seconds", "3600"]).args(work.arguments);
        command.env("VCUDA_SIM_SOCKET", self.driver.root().join("run/nvidia-persistenced/socket"));
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
        Ok(command)
    }
}
