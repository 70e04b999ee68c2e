//! Many pods at once to one node, or one, and how long it takes until all are scheduled, have started and are known to
//! run: with shares and without, turn by turn on one cluster; and on one without vcuda, with as many devices of plugins
//! that do nothing and without, which tells what kubelet and the API server take for such devices.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, SCHEDULER_NAME},
    counters::Counter,
    driver::Wanted,
    host::Options,
    interrupt, probe,
};

/// Until all pods run. HAMi#1367: 40 took a quarter of an hour.
const PATIENCE: Duration = Duration::from_secs(600);

/// How long it waits for a change until it looks whether it is to end.
const LOOK: Duration = Duration::from_millis(50);

/// What the shares' GPUs hold together: 20 shares of 5 core each.
const PER_GPU: usize = 20;

/// Core and memory units of a share.
const SHARE: [u32; 2] = [5, 4];

/// What plugins that do nothing offer in the place of core and memory units.
const PLAIN_DEVICES: [&str; 2] = ["bench.local/core", "bench.local/memory"];

/// Creates pods at once on a real cluster of one node, with shares and without, and compares the times.
#[derive(Args)]
pub struct Arguments {
    /// Pods that come at once.
    #[arg(long, default_value_t = 40)]
    pods: usize,
    /// How many times each kind of burst is made.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Prints one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// What pods of a burst are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// No share, the cluster's own scheduler.
    Plain,
    /// A share each, the cluster's own scheduler: the node picks the GPU.
    Unscheduled,
    /// A share each, and vcuda-scheduler picks the GPU.
    Share,
    /// No share, on a cluster without vcuda.
    Bare,
    /// There, as many devices each of plugins that do nothing.
    Devices,
}

impl Kind {
    const WITH_VCUDA: [Self; 3] = [Self::Plain, Self::Unscheduled, Self::Share];
    const WITHOUT: [Self; 2] = [Self::Bare, Self::Devices];

    /// What it is compared with.
    fn base(self) -> Self {
        match self {
            Self::Plain | Self::Unscheduled | Self::Share => Self::Plain,
            Self::Bare | Self::Devices => Self::Bare,
        }
    }

    fn has_share(self) -> bool {
        matches!(self, Self::Unscheduled | Self::Share)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Unscheduled => "unscheduled",
            Self::Share => "share",
            Self::Bare => "bare",
            Self::Devices => "devices",
        }
    }

    fn described(self) -> &'static str {
        match self {
            Self::Plain => "no share",
            Self::Unscheduled => "share, placed by the node",
            Self::Share => "share, placed by vcuda-scheduler",
            Self::Bare => "no share, without vcuda",
            Self::Devices => "as many devices, without vcuda",
        }
    }
}

/// How one burst went.
#[derive(Clone, Debug)]
pub struct Burst {
    /// Until the last pod had its node.
    pub scheduled: Duration,
    /// Until containerd had started the last container.
    pub started: Duration,
    /// Until the last pod ran, as the API server has it: kubelet looks once a second.
    pub running: Duration,
    /// Processor time that each part of the cluster took until then, in seconds.
    pub cpu: BTreeMap<&'static str, f64>,
}

/// Creates `count` pods at once, waits until all run, and deletes them.
pub async fn burst(cluster: &mut Cluster, name: &str, kind: Kind, count: usize) -> Result<Burst> {
    let resources = match kind {
        Kind::Plain | Kind::Bare => None,
        Kind::Unscheduled | Kind::Share => Some(cluster.vcuda.resources()),
        Kind::Devices => Some(PLAIN_DEVICES.map(Into::into)),
    };
    let limits: BTreeMap<String, u32> =
        resources.into_iter().flat_map(|names| names.into_iter().zip(SHARE)).collect();
    let limits = json!(limits);
    let label = format!("burst={name}");
    let pods: Vec<Value> = (0..count)
        .map(|n| {
            let mut pod =
                Cluster::pod_of(&format!("{name}-{n}"), cluster.image(), &["sleep", "inf"], &limits);
            pod["metadata"]["labels"] = json!({"burst": name});
            if kind == Kind::Share {
                pod["spec"]["schedulerName"] = SCHEDULER_NAME.into();
            }
            pod
        })
        .collect();
    let watch = Watch::start(cluster.kubectl_command(), &label)?;
    let before = cpu(cluster)?;
    let begun = Instant::now();
    let begun_at = SystemTime::now();
    let list = json!({"apiVersion": "v1", "kind": "List", "items": pods});
    cluster.kubectl(&["create", "-f", "-"], Some(&list))?;
    let (scheduled, running) = watch.follow(count, begun).with_context(|| {
        let events = ["get", "events", "-o", "custom-columns=P:.involvedObject.name,M:.message"];
        cluster.kubectl(&events, None).unwrap_or_default()
    })?;
    let mut cpu = cpu(cluster)?;
    for (part, seconds) in &mut cpu {
        *seconds -= before.get(part).copied().unwrap_or_default();
    }
    let started = last_start(cluster).await?.duration_since(begun_at)?;
    let shares = if kind.has_share() { count } else { 0 };
    ensure!(cluster.vcuda.shares().len() == shares, "{name}: {} shares", cluster.vcuda.shares().len());
    cluster.kubectl(&["delete", "pods", "-l", &label, "--wait=true", "--timeout=600s"], None)?;
    cluster
        .wait_until("no share is on record", PATIENCE, |cluster| cluster.vcuda.shares().is_empty())
        .await?;
    Ok(Burst { scheduled, started, running, cpu })
}

/// When the youngest container that runs was started.
async fn last_start(cluster: &Cluster) -> Result<SystemTime> {
    let mut last = 0;
    for id in cluster.cri().running().await? {
        last = last.max(cluster.cri().status(&id).await?.started_at);
    }
    Ok(UNIX_EPOCH + Duration::from_nanos(last.try_into()?))
}

/// Seconds of processor time of each part so far. What they start (containers, and what makes them) is not in it.
fn cpu(cluster: &mut Cluster) -> Result<BTreeMap<&'static str, f64>> {
    let tick = rustix::param::clock_ticks_per_second() as f64;
    let of = |process: u32| -> Result<f64> {
        let stat = fs::read_to_string(format!("/proc/{process}/stat"))?;
        // After the name, which may hold anything, the state is the first field.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let at = |field: usize| fields.get(field).and_then(|text| text.parse::<f64>().ok());
        Ok((at(11).context("no utime")? + at(12).context("no stime")?) / tick)
    };
    cluster.parts().into_iter().map(|(name, process)| Ok((name, of(process)?))).collect()
}

/// `kubectl get --watch`: a line for each change of a pod, with its node and its phase.
struct Watch {
    child: Child,
    lines: Receiver<String>,
}

impl Watch {
    fn start(mut kubectl: Command, label: &str) -> Result<Self> {
        let columns = "custom-columns=POD:.metadata.name,NODE:.spec.nodeName,PHASE:.status.phase";
        kubectl.args(["get", "pods", "-l", label, "--watch", "--no-headers", "-o", columns]);
        let mut child = kubectl.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let output = BufReader::new(child.stdout.take().context("kubectl has no stdout")?);
        let (send, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, lines })
    }

    /// How long after `begun` the last of `count` pods had a node, and ran.
    fn follow(&self, count: usize, begun: Instant) -> Result<(Duration, Duration)> {
        let mut seen: BTreeMap<String, (bool, bool)> = BTreeMap::new();
        let mut all_scheduled = None;
        loop {
            interrupt::check()?;
            let line = match self.lines.recv_timeout(LOOK) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) if begun.elapsed() < PATIENCE => continue,
                Err(RecvTimeoutError::Timeout) => {
                    let run = seen.values().filter(|(_, runs)| *runs).count();
                    bail!("{run} of {count} pods run after {PATIENCE:?}");
                }
                Err(RecvTimeoutError::Disconnected) => bail!("kubectl's watch ended"),
            };
            let mut words = line.split_whitespace();
            let (Some(pod), Some(node), Some(phase)) = (words.next(), words.next(), words.next()) else {
                bail!("kubectl said {line:?}");
            };
            let runs = phase == "Running";
            seen.insert(pod.into(), (node != "<none>", runs));
            let all = |test: fn(&(bool, bool)) -> bool| seen.values().filter(|it| test(it)).count() >= count;
            if all_scheduled.is_none() && all(|it| it.0) {
                all_scheduled = Some(begun.elapsed());
            }
            if all(|it| it.1) {
                return Ok((all_scheduled.unwrap_or_default(), begun.elapsed()));
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The figures of one kind of burst.
#[derive(Serialize)]
struct Line {
    kind: Kind,
    /// Medians, in seconds.
    scheduled_s: f64,
    started_s: f64,
    running_s: f64,
    /// Slowest round, in seconds.
    slowest_s: f64,
    /// Medians of the rounds' ratios to the burst without shares, on the same cluster, of the same round.
    started_ratio: f64,
    ratio: f64,
    /// Processor time of each part, in seconds, mean of a burst.
    cpu_s: BTreeMap<&'static str, f64>,
}

#[derive(Serialize)]
struct Figures {
    pods: usize,
    rounds: usize,
    bursts: Vec<Line>,
}

/// Runs the bench.
///
/// # Errors
///
/// The cluster does not come up, or pods do not run.
pub fn run(arguments: &Arguments) -> Result<()> {
    let figures = interrupt::run(measure(arguments))?;
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&figures)?);
        return Ok(());
    }
    println!("{} pods at once to one node, {} rounds, seconds", figures.pods, figures.rounds);
    println!(
        "{:<34} {:>9} {:>9} {:>7} {:>9} {:>9} {:>7}",
        "", "scheduled", "started", "ratio", "running", "slowest", "ratio"
    );
    for line in &figures.bursts {
        let Line { kind, scheduled_s, started_s, started_ratio, running_s, slowest_s, ratio, .. } = line;
        println!(
            "{:<34} {scheduled_s:>9.3} {started_s:>9.3} {started_ratio:>7.3} {running_s:>9.2} {slowest_s:>9.2} {ratio:>7.3}",
            kind.described()
        );
    }
    println!("processor time until all ran, seconds");
    let parts: Vec<&str> = figures.bursts.iter().flat_map(|line| line.cpu_s.keys().copied()).collect();
    let parts: std::collections::BTreeSet<&str> = parts.into_iter().collect();
    for part in parts {
        let all = figures.bursts.iter().map(|line| {
            format!("{:>12} {:>6.2}", line.kind.name(), line.cpu_s.get(part).copied().unwrap_or_default())
        });
        println!("  {part:<26} {}", all.collect::<Vec<_>>().join(" "));
    }
    Ok(())
}

/// Makes bursts of `kinds`, turn by turn.
async fn rounds(
    cluster: &mut Cluster,
    kinds: &[Kind],
    arguments: &Arguments,
    bursts: &mut BTreeMap<&str, Vec<Burst>>,
) -> Result<()> {
    // What is done for the first time is slower, so the first round does not count.
    for round in 0..=arguments.rounds {
        // Whoever comes first in a round has an advantage or a drawback: each has it in turn.
        let first = round % kinds.len();
        for &kind in kinds[first..].iter().chain(&kinds[..first]) {
            let name = format!("{}-{round}", kind.name());
            let burst = burst(cluster, &name, kind, arguments.pods).await?;
            eprintln!("bench: {name}: scheduled {:.1?}, running {:.1?}", burst.scheduled, burst.running);
            if round > 0 {
                bursts.entry(kind.name()).or_default().push(burst);
            }
        }
    }
    Ok(())
}

/// A cluster without vcuda, whose node offers `units` of each of [`PLAIN_DEVICES`] on each of `gpus` GPUs that there are
/// not; and the plugins, which serve as long as they are held.
async fn without_vcuda(
    binaries: &Path,
    options: &Options,
    gpus: u8,
    units: [u32; 2],
) -> Result<(Cluster, Vec<Counter>)> {
    let mut cluster = Cluster::start(binaries, options).await?;
    cluster.import(&probe::image("bookworm")?)?;
    let folder = cluster.vcuda.file().paths.kubelet.clone();
    let mut counters = Vec::new();
    for (resource, units) in PLAIN_DEVICES.into_iter().zip(units) {
        counters.push(Counter::start(&folder, resource, gpus, units).await?);
    }
    let offered = |cluster: &Cluster| {
        PLAIN_DEVICES.iter().all(|resource| cluster.allocatable(resource).is_ok_and(|units| units > 0))
    };
    cluster.wait_until("the plain devices are on offer", PATIENCE, offered).await?;
    Ok((cluster, counters))
}

async fn measure(arguments: &Arguments) -> Result<Figures> {
    ensure!(arguments.rounds > 0, "at least one round");
    let binaries = Cluster::binaries()
        .context("KUBE_BIN_DIR must name the folder with kubelet and its peers: integration/kube/build.sh")?;
    let gpus = u8::try_from(arguments.pods.div_ceil(PER_GPU).max(1))?;
    let options = Options { driver: Wanted::Simulated(gpus.into()), ..Options::from_env()? };
    let mut bursts: BTreeMap<&str, Vec<Burst>> = BTreeMap::new();
    let mut cluster = Cluster::with_scheduler(&binaries, &options).await?;
    let mut units = [0; 2];
    for (units, resource) in units.iter_mut().zip(cluster.vcuda.resources()) {
        *units = u32::try_from(cluster.allocatable(&resource)?)? / u32::from(gpus);
    }
    rounds(&mut cluster, &Kind::WITH_VCUDA, arguments, &mut bursts).await?;
    drop(cluster);
    let (mut cluster, _counters) = without_vcuda(&binaries, &options, gpus, units).await?;
    rounds(&mut cluster, &Kind::WITHOUT, arguments, &mut bursts).await?;
    let ratio = |kind: Kind, of: fn(&Burst) -> Duration| {
        let seconds = |kind: Kind| bursts[kind.name()].iter().map(move |burst| of(burst).as_secs_f64());
        median(seconds(kind).zip(seconds(kind.base())).map(|(with, without)| with / without).collect())
    };
    let line = |kind: Kind| {
        let bursts = &bursts[kind.name()];
        let seconds = |of: fn(&Burst) -> Duration| bursts.iter().map(move |burst| of(burst).as_secs_f64());
        let running: Vec<f64> = seconds(|burst| burst.running).collect();
        let mut cpu_s: BTreeMap<&'static str, f64> = BTreeMap::new();
        for (part, taken) in bursts.iter().flat_map(|burst| &burst.cpu) {
            *cpu_s.entry(part).or_default() += taken / bursts.len() as f64;
        }
        Line {
            kind,
            scheduled_s: median(seconds(|burst| burst.scheduled).collect()),
            slowest_s: running.iter().copied().fold(0.0, f64::max),
            started_s: median(seconds(|burst| burst.started).collect()),
            started_ratio: ratio(kind, |burst| burst.started),
            ratio: ratio(kind, |burst| burst.running),
            running_s: median(running),
            cpu_s,
        }
    };
    let bursts = Kind::WITH_VCUDA.into_iter().chain(Kind::WITHOUT).map(line).collect();
    Ok(Figures { pods: arguments.pods, rounds: arguments.rounds, bursts })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
