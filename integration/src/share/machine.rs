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
use ledger::{Inventory, ShareFolder, Terms};
use region::place;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use vcuda_config::GpuUuid;

use super::{
    Machine, WARM_UP, WATCHED_NS, Work, ensure_lent, given_back,
    node::{self, Node},
    settles,
};
use crate::{
    cache,
    driver::{Driver, Wanted},
    interrupt,
};

/// A container that has not launched by then never will.
const START: Duration = Duration::from_secs(30);

/// Where a container's programs find the driver.
const SYSTEM: &str = "/usr/local/lib";

/// The simulated machine and what is installed on it.
pub(super) struct Bench {
    driver: Driver,
    inventory: Inventory,
    meter: Arc<Meter>,
    _surveyor: Surveyor,
    shim: PathBuf,
    probe: PathBuf,
    folder: tempfile::TempDir,
    count: usize,
}

/// A running container; killed when dropped, with all processes that it started.
struct Container {
    child: Child,
    cgroup: PathBuf,
}

impl Machine for Bench {
    fn shim(&self) -> Option<PathBuf> {
        Some(self.shim.clone())
    }

    fn measure(
        &mut self,
        all: &[(&'static Work, Option<u32>)],
        windows: usize,
        governed: bool,
    ) -> Result<Vec<Vec<f64>>> {
        let node = self.node()?;
        let names: Vec<String> = (0..all.len()).map(|at| self.name(at)).collect();
        let mut folders = vec![];
        for ((_, share), name) in all.iter().zip(&names) {
            let share = share.map(|core| node.share(name, core, Terms::default()));
            folders.push(share.transpose()?);
        }
        let start = || governor::start(node.shares.clone(), false, Arc::clone(&self.meter));
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

    fn give_back(&mut self, work: &'static Work, terms: Terms) -> Result<f64> {
        let node = self.node()?;
        let (borrower, owner) = (self.name(0), self.name(1));
        let borrowers = node.share(&borrower, 30, terms)?;
        let owners = node.share(&owner, 70, Terms::default())?;
        let _governor = governor::start(node.shares.clone(), false, Arc::clone(&self.meter))?;
        let mut running = vec![self.start(work, &borrower, Some(&borrowers))?];
        self.wait_until_all_launch(&mut running)?;
        interrupt::sleep(WARM_UP)?;
        let (from, to) = (self.busy(&running)?, {
            interrupt::sleep(Duration::from_millis(500))?;
            self.busy(&running)?
        });
        let lent = (to.1[0] - from.1[0]) * 100 / (to.0 - from.0).max(1);
        ensure_lent(lent)?;
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
        given_back(&looks)
    }
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
        let inventory =
            node::inventory(driver.version()?, GpuUuid::try_from(gpu.uuid)?, gpu.name, gpu.total_bytes)?;
        let meter = Arc::new(Meter::default());
        let surveyor = Surveyor::start(driver.root().into(), &[], Arc::clone(&meter))?;
        let shim =
            env::var_os("VCUDA_SHIM").map_or_else(|| dist.join("lib/libvcuda_preload.so"), PathBuf::from);
        let probe = dist.join("test/cuda-probe");
        Ok(Self { driver, inventory, meter, _surveyor: surveyor, shim, probe, folder, count: 0 })
    }

    /// A new node without shares.
    fn node(&mut self) -> Result<Node> {
        self.count += 1;
        Node::new(&self.folder.path().join(format!("run-{}", self.count)), self.inventory.clone())
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
        command.arg(&self.probe).args(["spin", "--seconds", "3600"]).args(work.arguments());
        command.env("VCUDA_SIM_SOCKET", self.driver.root().join("run/nvidia-persistenced/socket"));
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
        Ok(command)
    }
}
