//! Measures what compute shares are worth: containers that each launch as fast as they can, on one simulated GPU, and what
//! the simulator itself says each of them got in every second.
//!
//! By the machine's clock the shim in its real form is in front of them. A container there is what matters to the shim and the
//! governor: a mount namespace with its own `limits` and `usage`, a cgroup with its ID, and processes in both. Its share is
//! bound by the real ledger, and the governor is the device plugin's own, run in this process. No runtime is needed for
//! that, and no kubelet. In virtual time the same containers are played, see `virtual_time`.

mod machine;
mod node;
#[cfg(test)]
mod tests;
mod virtual_time;

use std::{fs, path::PathBuf, thread, time::Duration};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use ledger::{Priority, Terms};
use serde::Serialize;

use machine::Bench;
use virtual_time::Virtual;

/// Until all containers launch, before the first window.
const WARM_UP: Duration = Duration::from_millis(1500);

/// Until the governor has seen enough to tell what of the containers' time was their neighbours'.
const SETTLE: Duration = Duration::from_secs(9);

/// About how long it takes to start containers and to end them.
const STARTS: Duration = Duration::from_millis(500);

/// Windows where a kernel fills a good part of one.
const LONG_WINDOWS: usize = 16;

/// How often time is lent and wanted back.
const GIVE_BACKS: usize = 5;

/// Measures shares of a simulated GPU's time over windows of one second.
#[derive(Args)]
pub struct Arguments {
    /// Windows of one second for each line of the table, in virtual time 20 where this is not given, else 4; for kernels
    /// of 200 ms at least 16.
    #[arg(long)]
    windows: Option<usize>,
    /// Only kinds of work whose name contains this: "5 us", "100 us", "5 ms", "200 ms", "mix", "graph of 200",
    /// "sync each", "16 streams"; "attack: 64 processes", "attack: ignores errors", "attack: process a launch";
    /// "give back", "give back, low".
    #[arg(long, value_name = "TEXT")]
    work: Option<String>,
    /// Three windows, and of the shares only 30, 30/70 and 10/90.
    #[arg(long)]
    quick: bool,
    /// Only these shares, such as 30/70: no attacks, nothing given back.
    #[arg(long, value_name = "SHARES")]
    shares: Option<String>,
    /// By which clock: the machine's, on which the shim and all processes run, or none, in which only what decides runs:
    /// the same every time, however busy the machine is.
    #[arg(long, value_enum, default_value = "machine")]
    clock: Clock,
    /// With the governor, without it, or one after the other.
    #[arg(long, value_enum, default_value = "both")]
    governor: Governed,
    /// Writes the table so far to this file as JSON, after each line: it is there though the bench is interrupted.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// How it is printed.
    #[arg(short, long, value_enum, default_value = "table")]
    output: Output,
    /// The same as `-o json`.
    #[arg(long)]
    json: bool,
}

/// How the table is printed.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// Line by line as they are measured.
    Table,
    /// One object at the end; lines on stderr as they are measured.
    Json,
}

/// What time is measured by.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Clock {
    /// The machine's.
    Machine,
    /// Virtual time.
    Virtual,
}

/// Where containers are measured.
trait Machine {
    /// The shim, where the real one is in front of the containers.
    fn shim(&self) -> Option<PathBuf>;

    /// Runs containers at once, each with a share of so many percent or with the bare driver, and gives what each got of the GPU
    /// in every window, in percent.
    fn measure(
        &mut self,
        all: &[(&'static Work, Option<u32>)],
        windows: usize,
        governed: bool,
    ) -> Result<Vec<Vec<f64>>>;

    /// A share of 30 borrows the time of one of 70, which then begins to launch: milliseconds from then on until the
    /// borrower uses no more than its share for good.
    fn give_back(&mut self, work: &'static Work, terms: Terms) -> Result<f64>;
}

/// How long a borrower and an owner are watched, in nanoseconds.
const WATCHED_NS: u64 = 1_500_000_000;

/// From so many looks at the time, and what the borrower has had of the GPU by then, in nanoseconds: how long after the first look
/// it began to use no more than its share of 30, in milliseconds.
fn given_back(looks: &[(u64, u64)]) -> Result<f64> {
    /// What a share of 30 may use at once, as it has whole slots: 0.3 * 0.7 of a period, and a kernel or two.
    const AT_ONCE_NS: u64 = 23_000_000;
    let keeps = |from: usize| {
        let (at, had) = looks[from];
        let more = |look: &(u64, u64)| look.1.saturating_sub(had) > (look.0 - at) * 3 / 10 + AT_ONCE_NS;
        !looks[from..].iter().any(more)
    };
    let given = (0..looks.len()).find(|from| keeps(*from)).context("what was lent was not given back")?;
    Ok((looks[given].0 - looks[0].0) as f64 / 1e6)
}

/// Whether a borrower has what an idle GPU has to lend.
fn ensure_lent(percent: u64) -> Result<()> {
    ensure!(percent > 60, "the borrower got {percent} % of an idle GPU");
    Ok(())
}

/// How long so many containers run before the first window.
fn settles(containers: usize, governed: bool) -> Duration {
    if governed && containers > 1 { SETTLE } else { WARM_UP }
}

/// About how long a measurement takes by the machine's clock.
fn takes(containers: usize, windows: usize, governed: bool) -> Duration {
    let seconds = Duration::from_secs(windows.try_into().unwrap_or(u64::MAX));
    settles(containers, governed) + seconds + STARTS
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

/// What a container does: it launches as fast as it can.
struct Work {
    name: &'static str,
    /// Microseconds of its kernels, which it launches by turns.
    kernels_us: &'static [u64],
    pattern: Pattern,
    streams: usize,
    processes: usize,
    /// Launches after which a process ends and another one begins.
    launches_a_process: Option<u64>,
    ignores_errors: bool,
}

/// How it launches.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pattern {
    /// Without waiting.
    Queue,
    /// It waits after each launch.
    Sync,
    /// Graphs of [`NODES`] kernels.
    Graph,
}

/// Kernels of a graph.
const NODES: u64 = 200;

impl Work {
    const fn of(name: &'static str, kernels_us: &'static [u64]) -> Self {
        Self {
            name,
            kernels_us,
            pattern: Pattern::Queue,
            streams: 1,
            processes: 1,
            launches_a_process: None,
            ignores_errors: false,
        }
    }

    /// How `cuda-probe spin` is told of it.
    fn arguments(&self) -> Vec<String> {
        let kernels: Vec<_> = self.kernels_us.iter().map(u64::to_string).collect();
        let pattern = match self.pattern {
            Pattern::Queue => "queue",
            Pattern::Sync => "sync",
            Pattern::Graph => "graph",
        };
        let [streams, processes] = [self.streams, self.processes].map(|count| count.to_string());
        let mut all = vec!["--kernel-us", &kernels.join(","), "--pattern", pattern]
            .into_iter()
            .chain(["--streams", &streams, "--processes", &processes])
            .map(str::to_owned)
            .collect::<Vec<_>>();
        if let Some(launches) = self.launches_a_process {
            all.extend(["--launches-a-process".into(), launches.to_string()]);
        }
        if self.ignores_errors {
            all.push("--ignore-errors".into());
        }
        all
    }

    /// Microseconds of the longest thing that, once launched, runs to its end.
    fn longest_us(&self) -> f64 {
        let longest = self.kernels_us.iter().copied().max().unwrap_or(0);
        (longest * if self.pattern == Pattern::Graph { NODES } else { 1 }) as f64
    }
}

static WORK: [Work; 8] = [
    Work::of("5 us", &[5]),
    Work::of("100 us", &[100]),
    Work::of("5 ms", &[5_000]),
    Work::of("200 ms", &[200_000]),
    Work::of("mix", &[5, 100, 2_000]),
    Work { pattern: Pattern::Graph, ..Work::of("graph of 200", &[5]) },
    Work { pattern: Pattern::Sync, ..Work::of("sync each", &[100]) },
    Work { streams: 16, ..Work::of("16 streams", &[100]) },
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
static ATTACKS: [Work; 3] = [
    Work { processes: 64, ..Work::of("attack: 64 processes", &[100]) },
    Work { streams: 8, ignores_errors: true, ..Work::of("attack: ignores errors", &[100]) },
    Work { launches_a_process: Some(1), ..Work::of("attack: process a launch", &[1_000]) },
];

/// What one container got.
#[derive(Serialize)]
struct Got {
    asked_percent: f64,
    /// Of what the same work gets of the GPU with nothing in its way.
    ideal_percent: f64,
    /// Of what it gets paced and alone: here is lost what a paced launch takes of the host's time, and nothing else.
    paced_percent: f64,
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

/// How long an owner waits for time that was lent to another.
#[derive(Serialize)]
struct GivenBack {
    work: &'static str,
    /// From the owner's first launch until the borrower keeps to its own share, each time in milliseconds.
    milliseconds: Vec<f64>,
    worst_milliseconds: f64,
}

/// What work gets of the GPU alone, in percent.
#[derive(Clone, Serialize)]
struct Alone {
    work: &'static str,
    /// With the bare driver.
    unpaced_percent: f64,
    /// In a share of [`NEARLY_ALL`].
    paced_percent: f64,
}

/// A share of so much, in percent, is paced, and as good as never held back.
const NEARLY_ALL: u32 = 99;

/// The table.
#[derive(Serialize)]
struct Table {
    clock: Clock,
    /// None in virtual time.
    shim: Option<PathBuf>,
    windows: usize,
    cpus: usize,
    /// What each kind of work gets of the GPU alone.
    alone: Vec<Alone>,
    lines: Vec<Line>,
    given_back: Vec<GivenBack>,
}

/// What is assumed, and printed with the table.
const ASSUMPTIONS: &str = "\
simulated GPU: one process at a time, 2 ms slices by turns, 10 us to switch; a kernel fills the GPU, those of several
streams share it evenly; copies take no time. Windows of 1 s by the simulator's own account. Without the governor a share
has its own slots and nothing lent. `ideal` is the asked share of what the work gets alone and unpaced,
`paced` of what it gets alone in a share of 99: less what this host needs for each paced launch. `physics` is what a window
can be off because the longest kernel or graph, once launched, runs to its end. `lost` is the throughput lost to pacing, in
percent of the ideal. With the governor and neighbours, measuring begins after nine seconds.";

/// What more is assumed in virtual time.
const PLAYED: &str = "\
virtual time: programs, their calls and the driver are played; what decides in shim and governor, the shares' files and the
simulated GPU are real. A launch takes 3 us of the host, a mark 1; nobody waits for a processor.";

/// What is borrowed and given back: the borrower's terms.
fn borrowers() -> [(&'static str, Terms); 2] {
    let terms = |priority| Terms { core_limit: Some(100), priority };
    [("give back", terms(Priority::Normal)), ("give back, low", terms(Priority::Low))]
}

/// Measures everything, and prints it.
pub fn run(arguments: &Arguments) -> Result<()> {
    let windows = arguments.windows.unwrap_or(match arguments.clock {
        Clock::Machine => 4,
        Clock::Virtual => 20,
    });
    let least = if arguments.quick { windows.min(3) } else { windows };
    ensure!(least > 0, "at least one window");
    let quiet = arguments.json || arguments.output == Output::Json;
    let wanted = |name: &str| arguments.wants(name);
    let save = |table: &Table| arguments.save.as_ref().map_or(Ok(()), |file| write(file, table));
    let borrowers = borrowers();
    let mut names = WORK.iter().chain(&ATTACKS).map(|work| work.name).chain(borrowers.iter().map(|of| of.0));
    ensure!(names.any(wanted), "no such work; `--help` lists them");
    let mut machine = None;
    let mut played = Virtual::default();
    let bench: &mut dyn Machine = match arguments.clock {
        Clock::Machine => machine.insert(Bench::new()?),
        Clock::Virtual => &mut played,
    };
    let mut table = Table {
        clock: arguments.clock,
        shim: bench.shim(),
        windows: least,
        cpus: thread::available_parallelism().map_or(1, usize::from),
        alone: vec![],
        lines: vec![],
        given_back: vec![],
    };
    let (lines, time) = expected(arguments, least);
    say(quiet, ASSUMPTIONS);
    if let Some(shim) = &table.shim {
        say(quiet, &format!("shim {}, {} CPUs", shim.display(), table.cpus));
        let minutes = time.as_secs().div_ceil(60);
        say(quiet, &format!("About {minutes} minutes, until {lines} lines are measured.\n"));
    } else {
        say(quiet, &format!("{PLAYED}\n{lines} lines.\n"));
    }
    say(
        quiet,
        &format!(
            "{:<24} {:<14} {:<8} {:>5} {:>7} {:>7} {:>7} {:>7} {:>7} {:>8}",
            "work", "shares", "governor", "asked", "ideal", "paced", "mean", "worst", "lost %", "physics"
        ),
    );
    for work in WORK.iter().filter(|work| wanted(work.name)) {
        let windows = work.windows(least);
        let alone = alone(bench, work, least.min(3))?;
        table.alone.push(alone.clone());
        for shares in SHARES {
            let named = named(shares);
            if !arguments.measures(&named) {
                continue;
            }
            let all: Vec<_> = shares.iter().map(|share| (work, Some(*share))).collect();
            for governor in arguments.governor.all() {
                let windows = bench.measure(&all, windows, *governor)?;
                let of = Of { work, named: &named, shares, governor: *governor };
                table.lines.push(line(&of, &[&alone], windows, quiet));
                save(&table)?;
            }
        }
    }
    let fair = &WORK[1];
    let attacks: Vec<&'static Work> = ATTACKS.iter().filter(|work| wanted(work.name)).collect();
    if !attacks.is_empty() && arguments.shares.is_none() {
        let neighbour = alone(bench, fair, 2)?;
        for attack in attacks {
            let attacker = alone(bench, attack, 2)?;
            table.alone.push(attacker.clone());
            for governor in arguments.governor.all() {
                let both = [(attack, Some(30)), (fair, Some(70))];
                let windows = bench.measure(&both, least, *governor)?;
                let named = "30 attacks 70";
                let of = Of { work: attack, named, shares: &[30, 70], governor: *governor };
                table.lines.push(line(&of, &[&attacker, &neighbour], windows, quiet));
                save(&table)?;
            }
        }
    }
    let borrowers = borrowers.into_iter().filter(|(name, _)| wanted(name) && arguments.shares.is_none());
    for (work, terms) in borrowers {
        let times = (0..GIVE_BACKS).map(|_| bench.give_back(fair, terms));
        let milliseconds = times.collect::<Result<Vec<f64>>>()?;
        let worst_milliseconds = milliseconds.iter().copied().fold(0.0, f64::max);
        say(
            quiet,
            &format!("{work:<24} within {worst_milliseconds:.0} ms, {GIVE_BACKS} times: {milliseconds:.0?}"),
        );
        table.given_back.push(GivenBack { work, milliseconds, worst_milliseconds });
        save(&table)?;
    }
    if quiet {
        println!("{}", serde_json::to_string_pretty(&table)?);
    }
    Ok(())
}

impl Arguments {
    fn wants(&self, work: &str) -> bool {
        self.work.as_ref().is_none_or(|text| work.contains(text.as_str()))
    }

    fn measures(&self, shares: &str) -> bool {
        self.shares.as_ref().is_none_or(|only| only == shares)
            && (!self.quick || ["30", "30/70", "10/90"].contains(&shares))
    }
}

impl Work {
    fn windows(&self, least: usize) -> usize {
        if self.longest_us() >= 100_000.0 { least.max(LONG_WINDOWS) } else { least }
    }
}

fn named(shares: &[u32]) -> String {
    shares.iter().map(u32::to_string).collect::<Vec<_>>().join("/")
}

/// How many lines there will be, and about how long they take.
fn expected(arguments: &Arguments, least: usize) -> (usize, Duration) {
    let (mut lines, mut time) = (0, Duration::ZERO);
    let mut add = |work: &Work, containers: usize, windows: usize, governor: Option<bool>| {
        lines += usize::from(governor.is_some());
        time += takes(containers, work.windows(windows), governor == Some(true));
    };
    for work in WORK.iter().filter(|work| arguments.wants(work.name)) {
        add(work, 1, 1, None);
        add(work, 1, 1, None);
        for shares in SHARES.iter().filter(|shares| arguments.measures(&named(shares))) {
            arguments.governor.all().iter().for_each(|with| add(work, shares.len(), least, Some(*with)));
        }
    }
    if arguments.shares.is_none() {
        for work in ATTACKS.iter().filter(|work| arguments.wants(work.name)) {
            add(work, 1, 2, None);
            add(work, 1, 2, None);
            arguments.governor.all().iter().for_each(|with| add(work, 2, least, Some(*with)));
        }
    }
    (lines, time)
}

/// What work gets of the GPU alone.
fn alone(bench: &mut dyn Machine, work: &'static Work, windows: usize) -> Result<Alone> {
    Ok(Alone {
        work: work.name,
        unpaced_percent: mean(&bench.measure(&[(work, None)], windows, false)?[0]),
        paced_percent: mean(&bench.measure(&[(work, Some(NEARLY_ALL))], windows, true)?[0]),
    })
}

/// A line of the table; where its JSON has stdout, on stderr.
fn say(quiet: bool, text: &str) {
    if quiet { eprintln!("{text}") } else { println!("{text}") }
}

/// Writes the table so far, whole or not at all.
fn write(file: &PathBuf, table: &Table) -> Result<()> {
    let part = file.with_extension("part");
    fs::write(&part, serde_json::to_vec_pretty(table)?)?;
    Ok(fs::rename(part, file)?)
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

fn line(of: &Of<'_>, alone: &[&Alone], all: Vec<Vec<f64>>, quiet: bool) -> Line {
    let Of { work, named, shares, governor } = *of;
    let got = |(at, windows): (usize, Vec<f64>)| {
        let asked = f64::from(shares[at]);
        let alone = alone[at.min(alone.len() - 1)];
        let ideal = asked * alone.unpaced_percent / 100.0;
        let mean = mean(&windows);
        let farther = |a: &&f64, b: &&f64| (**a - ideal).abs().total_cmp(&(**b - ideal).abs());
        Got {
            asked_percent: asked,
            ideal_percent: ideal,
            paced_percent: asked * alone.paced_percent / f64::from(NEARLY_ALL),
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
        physics_percent: work.longest_us() / 10_000.0,
        containers,
    };
    for (at, got) in line.containers.iter().enumerate() {
        let governor = if line.governor { "with" } else { "without" };
        let [name, shares, governor] =
            if at == 0 { [line.work.as_str(), line.shares.as_str(), governor] } else { [""; 3] };
        say(
            quiet,
            &format!(
                "{name:<24} {shares:<14} {governor:<8} {:>5.0} {:>7.2} {:>7.2} {:>7.2} {:>7.2} {:>7.2} {:>8.2}",
                got.asked_percent,
                got.ideal_percent,
                got.paced_percent,
                got.mean_percent,
                got.worst_percent,
                got.lost_percent,
                line.physics_percent,
            ),
        );
    }
    line
}
