//! Measures what compute shares are worth: containers that each launch as fast as they can, on one simulated GPU, with
//! the shim in its real form in front of them, and what the simulator itself says each of them got in every second.
//!
//! A container here is what matters to the shim and the governor: a mount namespace with its own `limits` and `usage`,
//! a cgroup with its ID, and processes in both. Its share is bound by the real ledger, and the governor is the device
//! plugin's own, run in this process. No runtime is needed for that, and no kubelet.

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
use clap::{Args, ValueEnum};
use device_plugin::{governor, meter::Meter, nvml::Surveyor};
use ledger::{Claim, ContainerRef, Inventory, Ledger, PodRef, ShareFolder, ShareRecord, Terms};
use region::{Limits, Usage, place};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Serialize;
use serde_json::Value;
use vcuda_config::{GpuUuid, Request};

use crate::{
    cache,
    driver::{Driver, Wanted},
};

/// Until all containers launch, before the first window.
const WARM_UP: Duration = Duration::from_millis(1500);

/// A container that has not launched by then never will.
const START: Duration = Duration::from_secs(30);

/// What the ledger takes for the machine's boot.
const BOOT: &str = "bench";

/// Where a container's programs find the driver.
const SYSTEM: &str = "/usr/local/lib";

/// Measures shares of a simulated GPU's time over windows of one second.
#[derive(Args)]
pub struct Arguments {
    /// Windows of one second for each line of the table.
    #[arg(long, default_value_t = 5)]
    windows: usize,
    /// Only kinds of work whose name contains this.
    #[arg(long, value_name = "TEXT")]
    work: Option<String>,
    /// Only these shares, such as 30/70.
    #[arg(long, value_name = "SHARES")]
    shares: Option<String>,
    /// With the governor, without it, or one after the other.
    #[arg(long, value_enum, default_value = "both")]
    governor: Governed,
    /// Prints one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// Whether the governor runs.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Governed {
    With,
    Without,
    Both,
}

impl Governed {
    fn all(self) -> &'static [bool] {
        match self {
            Self::With => &[true],
            Self::Without => &[false],
            Self::Both => &[false, true],
        }
    }
}

/// What a container does.
struct Work {
    name: &'static str,
    arguments: &'static [&'static str],
    /// Microseconds of the longest thing that, once launched, runs to its end.
    longest_us: f64,
}

const WORK: [Work; 8] = [
    Work { name: "5 us", arguments: &["--kernel-us", "5"], longest_us: 5.0 },
    Work { name: "100 us", arguments: &["--kernel-us", "100"], longest_us: 100.0 },
    Work { name: "5 ms", arguments: &["--kernel-us", "5000"], longest_us: 5000.0 },
    Work { name: "200 ms", arguments: &["--kernel-us", "200000"], longest_us: 200_000.0 },
    Work { name: "mix", arguments: &["--kernel-us", "5,100,2000"], longest_us: 2000.0 },
    Work { name: "graph of 200", arguments: &["--kernel-us", "5", "--pattern", "graph"], longest_us: 1000.0 },
    Work { name: "sync each", arguments: &["--kernel-us", "100", "--pattern", "sync"], longest_us: 100.0 },
    Work { name: "16 streams", arguments: &["--kernel-us", "100", "--streams", "16"], longest_us: 100.0 },
];

/// Shares of one GPU, in percent.
const SHARES: [&[u32]; 9] = [
    &[10],
    &[30],
    &[50],
    &[70],
    &[90],
    &[30, 70],
    &[10, 90],
    &[25, 25, 25, 25],
    &[10, 10, 10, 10, 10, 10, 10, 10, 10, 10],
];

/// Ways to want more than one's share, beside a fair neighbour of 70.
const ATTACKS: [Work; 3] = [
    Work { name: "64 processes", arguments: &["--kernel-us", "100", "--processes", "64"], longest_us: 100.0 },
    Work {
        name: "ignores errors",
        arguments: &["--kernel-us", "100", "--streams", "8", "--ignore-errors"],
        longest_us: 100.0,
    },
    Work {
        name: "process a launch",
        arguments: &["--kernel-us", "1000", "--launches-a-process", "1"],
        longest_us: 1000.0,
    },
];

/// What one container got.
#[derive(Serialize)]
struct Got {
    asked_percent: f64,
    /// Of what the same work gets of the GPU with nothing in its way.
    ideal_percent: f64,
    mean_percent: f64,
    /// The window that is farthest from the ideal.
    worst_percent: f64,
    lost_percent: f64,
    windows: Vec<f64>,
}

/// A line of the table.
#[derive(Serialize)]
struct Line {
    work: String,
    shares: String,
    /// Whether the governor ran.
    governor: bool,
    /// How far a window can be off because a kernel that began runs to its end, in percent of the GPU.
    physics_percent: f64,
    containers: Vec<Got>,
}

/// The table.
#[derive(Serialize)]
struct Table {
    shim: String,
    windows: usize,
    cpus: usize,
    /// What each kind of work gets of the GPU unpaced and alone, in percent.
    unpaced: Vec<(String, f64)>,
    lines: Vec<Line>,
}

/// What is assumed, and printed with the table.
const ASSUMPTIONS: &str = "\
simulated GPU: one process at a time, 2 ms slices by turns, 10 us to switch; a kernel fills the GPU, those of several
streams share it evenly; copies take no time. Windows of 1 s by the simulator's own account. Without the governor a share
has its own slots and nothing lent. `ideal` is the asked share of what the work gets alone and unpaced; `physics` is what a
window can be off because the longest kernel or graph, once launched, runs to its end.";

/// The simulated machine and what is installed on it.
struct Bench {
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

/// Measures everything, and prints it.
pub fn run(arguments: &Arguments) -> Result<()> {
    ensure!(arguments.windows > 0, "at least one window");
    let mut bench = Bench::new()?;
    let wanted = |name: &str| arguments.work.as_ref().is_none_or(|work| name.contains(work.as_str()));
    let mut table = Table {
        shim: bench.shim.display().to_string(),
        windows: arguments.windows,
        cpus: thread::available_parallelism().map_or(1, usize::from),
        unpaced: vec![],
        lines: vec![],
    };
    if !arguments.json {
        println!("{ASSUMPTIONS}\nshim {}, {} CPUs\n", table.shim, table.cpus);
        println!(
            "{:<16} {:<14} {:<8} {:>5} {:>7} {:>7} {:>7} {:>7} {:>8}",
            "work", "shares", "governor", "asked", "ideal", "mean", "worst", "lost %", "physics"
        );
    }
    for work in WORK.iter().filter(|work| wanted(work.name)) {
        let unpaced = mean(&bench.measure(&[(work, None)], arguments.windows.min(3), false)?[0]);
        table.unpaced.push((work.name.into(), unpaced));
        for shares in SHARES {
            let named = shares.iter().map(u32::to_string).collect::<Vec<_>>().join("/");
            if arguments.shares.as_ref().is_some_and(|shares| *shares != named) {
                continue;
            }
            let all: Vec<_> = shares.iter().map(|share| (work, Some(*share))).collect();
            for governor in arguments.governor.all() {
                let windows = bench.measure(&all, arguments.windows, *governor)?;
                let of = Of { work, named: &named, shares, governor: *governor };
                table.lines.push(line(&of, &[unpaced], windows, arguments.json));
            }
        }
    }
    let fair = &WORK[1];
    let attacks: Vec<&Work> = ATTACKS.iter().filter(|work| wanted(work.name)).collect();
    if !attacks.is_empty() && arguments.shares.is_none() {
        let alone = mean(&bench.measure(&[(fair, None)], 2, false)?[0]);
        for attack in attacks {
            let unpaced = mean(&bench.measure(&[(attack, None)], 2, false)?[0]);
            table.unpaced.push((attack.name.into(), unpaced));
            for governor in arguments.governor.all() {
                let both = [(attack, Some(30)), (fair, Some(70))];
                let windows = bench.measure(&both, arguments.windows, *governor)?;
                let named = "30 attacks 70";
                let of = Of { work: attack, named, shares: &[30, 70], governor: *governor };
                table.lines.push(line(&of, &[unpaced, alone], windows, arguments.json));
            }
        }
    }
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&table)?);
    }
    Ok(())
}

fn mean(windows: &[f64]) -> f64 {
    windows.iter().sum::<f64>() / windows.len().max(1) as f64
}

/// What a line is of.
struct Of<'a> {
    work: &'a Work,
    named: &'a str,
    shares: &'a [u32],
    governor: bool,
}

fn line(of: &Of<'_>, unpaced: &[f64], all: Vec<Vec<f64>>, quiet: bool) -> Line {
    let Of { work, named, shares, governor } = *of;
    let got = |(at, windows): (usize, Vec<f64>)| {
        let asked = f64::from(shares[at]);
        let ideal = asked * unpaced[at.min(unpaced.len() - 1)] / 100.0;
        let mean = mean(&windows);
        let farther = |a: &&f64, b: &&f64| (**a - ideal).abs().total_cmp(&(**b - ideal).abs());
        Got {
            asked_percent: asked,
            ideal_percent: ideal,
            mean_percent: mean,
            worst_percent: windows.iter().max_by(farther).copied().unwrap_or(0.0),
            lost_percent: if ideal > 0.0 { (1.0 - mean / ideal) * 100.0 } else { 0.0 },
            windows,
        }
    };
    let containers: Vec<Got> = all.into_iter().enumerate().map(got).collect();
    let line = Line {
        work: work.name.into(),
        shares: named.into(),
        governor,
        physics_percent: work.longest_us / 10_000.0,
        containers,
    };
    if !quiet {
        for (at, got) in line.containers.iter().enumerate() {
            let governor = if line.governor { "with" } else { "without" };
            let [name, shares, governor] =
                if at == 0 { [line.work.as_str(), line.shares.as_str(), governor] } else { [""; 3] };
            println!(
                "{name:<16} {shares:<14} {governor:<8} {:>5.0} {:>7.2} {:>7.2} {:>7.2} {:>7.2} {:>8.2}",
                got.asked_percent,
                got.ideal_percent,
                got.mean_percent,
                got.worst_percent,
                got.lost_percent,
                line.physics_percent,
            );
        }
    }
    line
}

impl Bench {
    fn new() -> Result<Self> {
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
    fn measure(
        &mut self,
        all: &[(&Work, Option<u32>)],
        windows: usize,
        governed: bool,
    ) -> Result<Vec<Vec<f64>>> {
        self.count += 1;
        let shares = self.folder.path().join(format!("run-{}", self.count)).join("shares");
        fs::create_dir_all(&shares)?;
        let ledger = Ledger::open_in_boot(&shares, BOOT.into())?;
        let names = (0..all.len()).map(|at| format!("vcudabench{}x{}x{at}", std::process::id(), self.count));
        let names: Vec<String> = names.collect();
        let mut folders = vec![];
        for ((_, share), name) in all.iter().zip(&names) {
            folders.push(share.map(|core| self.share(&ledger, name, core)).transpose()?);
        }
        let start = || governor::start(shares, false, Arc::clone(&self.meter));
        let _governor = governed.then(start).transpose()?;
        let mut running = vec![];
        for (((work, _), name), share) in all.iter().zip(&names).zip(&folders) {
            let cgroup = cgroup(name)?;
            let child =
                self.command(work, &cgroup, share.as_ref()).and_then(|mut command| Ok(command.spawn()?));
            match child.context("unshare") {
                Ok(child) => running.push(Container { child, cgroup }),
                Err(error) => {
                    let _ = fs::remove_dir(&cgroup);
                    return Err(error);
                }
            }
        }
        let begin = Instant::now();
        while self.busy(&running)?.1.contains(&0) {
            for container in &mut running {
                if let Some(status) = container.child.try_wait()? {
                    bail!("a container ended ({status}) before it had launched; its words are above");
                }
            }
            ensure!(begin.elapsed() < START, "a container launches nothing");
            thread::sleep(Duration::from_millis(20));
        }
        thread::sleep(WARM_UP);
        let mut got = vec![vec![]; running.len()];
        let first = Instant::now();
        let mut before = self.busy(&running)?;
        for window in 1..=windows {
            let end = first + Duration::from_secs(1) * u32::try_from(window)?;
            thread::sleep(end.saturating_duration_since(Instant::now()));
            let after = self.busy(&running)?;
            let passed = after.0.saturating_sub(before.0).max(1) as f64;
            for (at, windows) in got.iter_mut().enumerate() {
                windows.push(after.1[at].saturating_sub(before.1[at]) as f64 * 100.0 / passed);
            }
            before = after;
        }
        Ok(got)
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
    fn share(&self, ledger: &Ledger, name: &str, core: u32) -> Result<ShareFolder> {
        let claim = Claim {
            pod: PodRef {
                uid: name.into(),
                namespace: "bench".into(),
                name: name.into(),
                sandbox_id: format!("sandbox-{name}"),
            },
            container: ContainerRef { name: "main".into(), id: name.into() },
            request: Request::new(core, 4)?,
            terms: Terms::default(),
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
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script, "sh"]).arg(&self.probe).arg("spin");
        command.args(["--seconds", "3600"]).args(work.arguments);
        command.env("VCUDA_SIM_SOCKET", self.driver.root().join("run/nvidia-persistenced/socket"));
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
        Ok(command)
    }
}
