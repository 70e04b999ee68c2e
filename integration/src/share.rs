//! Measures what compute shares are worth: containers that each launch as fast as they can, on one simulated GPU, with
//! the shim in its real form in front of them, and what the simulator itself says each of them got in every second.
//!
//! A container here is what matters to the shim: a mount namespace with its own `limits` and `usage`, and processes in
//! it. No runtime is needed for that, and no node daemon.

use std::{
    env, fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use region::{GpuLimit, Limits, Slots, Usage, place};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Serialize;
use serde_json::Value;

use crate::{
    cache,
    driver::{Driver, Wanted},
};

/// Until all containers launch, before the first window.
const WARM_UP: Duration = Duration::from_millis(1500);

/// A container that has not launched by then never will.
const START: Duration = Duration::from_secs(30);

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
    /// Prints one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
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
streams share it evenly; copies take no time. Windows of 1 s by the simulator's own account. No governor: a share has its
own slots and nothing lent. `ideal` is the asked share of what the work gets alone and unpaced; `physics` is what a
window can be off because the longest kernel or graph, once launched, runs to its end.";

/// The simulated machine and what is installed on it.
struct Bench {
    driver: Driver,
    uuid: String,
    shim: PathBuf,
    probe: PathBuf,
    folder: tempfile::TempDir,
    count: usize,
}

/// A running container; killed when dropped, with all processes that it started.
struct Container {
    child: Child,
}

impl Drop for Container {
    fn drop(&mut self) {
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
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
            "{:<18} {:<16} {:>6} {:>7} {:>7} {:>7} {:>7} {:>8}",
            "work", "shares", "asked", "ideal", "mean", "worst", "lost %", "physics"
        );
    }
    for work in WORK.iter().filter(|work| wanted(work.name)) {
        let unpaced = mean(&bench.measure(&[(work, None)], arguments.windows.min(3))?[0]);
        table.unpaced.push((work.name.into(), unpaced));
        for shares in SHARES {
            let named = shares.iter().map(u32::to_string).collect::<Vec<_>>().join("/");
            if arguments.shares.as_ref().is_some_and(|shares| *shares != named) {
                continue;
            }
            let all: Vec<_> = shares.iter().map(|share| (work, Some(*share))).collect();
            let windows = bench.measure(&all, arguments.windows)?;
            table.lines.push(line(work, &named, shares, &[unpaced], windows, arguments.json));
        }
    }
    let fair = &WORK[1];
    let attacks: Vec<&Work> = ATTACKS.iter().filter(|work| wanted(work.name)).collect();
    if !attacks.is_empty() && arguments.shares.is_none() {
        let alone = mean(&bench.measure(&[(fair, None)], 2)?[0]);
        for attack in attacks {
            let unpaced = mean(&bench.measure(&[(attack, None)], 2)?[0]);
            table.unpaced.push((attack.name.into(), unpaced));
            let windows = bench.measure(&[(attack, Some(30)), (fair, Some(70))], arguments.windows)?;
            let named = "30 attacks 70";
            table.lines.push(line(attack, named, &[30, 70], &[unpaced, alone], windows, arguments.json));
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

fn line(work: &Work, named: &str, shares: &[u32], unpaced: &[f64], all: Vec<Vec<f64>>, quiet: bool) -> Line {
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
        physics_percent: work.longest_us / 10_000.0,
        containers,
    };
    if !quiet {
        for (at, got) in line.containers.iter().enumerate() {
            let (name, shares) = if at == 0 { (line.work.as_str(), line.shares.as_str()) } else { ("", "") };
            println!(
                "{name:<18} {shares:<16} {:>6.0} {:>7.2} {:>7.2} {:>7.2} {:>7.2} {:>8.2}",
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
        let uuid = driver.gpus()?.first().context("no simulated GPU")?.uuid.clone();
        let shim =
            env::var_os("VCUDA_SHIM").map_or_else(|| dist.join("lib/libvcuda_preload.so"), PathBuf::from);
        Ok(Self { driver, uuid, shim, probe: dist.join("test/cuda-probe"), folder, count: 0 })
    }

    /// Runs containers at once, each with a share or with the bare driver, and gives what each got of the GPU in every
    /// window, in percent.
    fn measure(&mut self, all: &[(&Work, Option<u32>)], windows: usize) -> Result<Vec<Vec<f64>>> {
        let mut taken = Slots::NONE;
        let mut running = vec![];
        for (work, share) in all {
            let share = match share {
                Some(core) => {
                    let own =
                        Slots::place(*core, taken).with_context(|| format!("{core} slots are not free"))?;
                    taken = taken.union(own);
                    Some(self.share(*core, own)?)
                }
                None => None,
            };
            running
                .push(Container { child: self.command(work, share.as_deref())?.spawn().context("unshare")? });
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

    /// The files of a new share.
    fn share(&mut self, core: u32, own_slots: Slots) -> Result<PathBuf> {
        self.count += 1;
        let folder = self.folder.path().join(format!("share-{}", self.count));
        fs::create_dir(&folder)?;
        let limit = GpuLimit {
            uuid: bytes(&self.uuid)?,
            memory_bytes: 4 << 30,
            core_percent: core,
            core_limit_percent: core,
            own_slots,
        };
        Limits::create(&folder.join("limits"), &[limit])?;
        Usage::create(&folder.join("usage"))?;
        Ok(folder)
    }

    /// A container's first process. What it mounts is only in its own namespace; `/usr/local` of the host is hidden there.
    fn command(&self, work: &Work, share: Option<&Path>) -> Result<Command> {
        let library =
            |name: &str| self.driver.root().join("usr/lib/x86_64-linux-gnu").join(name).canonicalize();
        let (cuda, nvml) = (library("libcuda.so.1")?, library("libnvidia-ml.so.1")?);
        let mut script = String::from(
            "set -e; mount --make-rprivate /; mount -t tmpfs none /usr/local; \
             put() { mkdir -p \"${2%/*}\"; touch \"$2\"; mount --bind \"$1\" \"$2\"; }\n",
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
            put(&folder.join("limits"), place::LIMITS);
            put(&folder.join("usage"), place::USAGE);
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

/// The bytes of `GPU-…`.
fn bytes(uuid: &str) -> Result<[u8; 16]> {
    let digits: String = uuid.trim_start_matches("GPU-").chars().filter(char::is_ascii_hexdigit).collect();
    ensure!(digits.len() == 32, "{uuid} is no UUID");
    let mut bytes = [0; 16];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[at * 2..at * 2 + 2], 16)?;
    }
    Ok(bytes)
}
