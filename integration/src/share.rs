//! Measures what compute shares are worth: containers that each launch as fast as they can, on one simulated GPU, with
//! the shim in its real form in front of them, and what the simulator itself says each of them got in every second.
//!
//! A container here is what matters to the shim and the governor: a mount namespace with its own `limits` and `usage`,
//! a cgroup with its ID, and processes in both. Its share is bound by the real ledger, and the governor is the device
//! plugin's own, run in this process. No runtime is needed for that, and no kubelet.

mod machine;

use std::{fs, path::PathBuf, thread, time::Duration};

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use ledger::{Priority, Terms};
use serde::Serialize;

use machine::Bench;

/// Windows where a kernel fills a good part of one.
const LONG_WINDOWS: usize = 16;

/// How often time is lent and wanted back.
const GIVE_BACKS: usize = 5;

/// Measures shares of a simulated GPU's time over windows of one second.
#[derive(Args)]
pub struct Arguments {
    /// Windows of one second for each line of the table; for kernels of 200 ms at least 16.
    #[arg(long, default_value_t = 4)]
    windows: usize,
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
    Work {
        name: "attack: 64 processes",
        arguments: &["--kernel-us", "100", "--processes", "64"],
        longest_us: 100.0,
    },
    Work {
        name: "attack: ignores errors",
        arguments: &["--kernel-us", "100", "--streams", "8", "--ignore-errors"],
        longest_us: 100.0,
    },
    Work {
        name: "attack: process a launch",
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
    shim: String,
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

/// What is borrowed and given back: the borrower's terms.
fn borrowers() -> [(&'static str, Terms); 2] {
    let terms = |priority| Terms { core_limit: Some(100), priority };
    [("give back", terms(Priority::Normal)), ("give back, low", terms(Priority::Low))]
}

/// Measures everything, and prints it.
pub fn run(arguments: &Arguments) -> Result<()> {
    let least = if arguments.quick { arguments.windows.min(3) } else { arguments.windows };
    ensure!(least > 0, "at least one window");
    let quiet = arguments.json || arguments.output == Output::Json;
    let wanted = |name: &str| arguments.wants(name);
    let save = |table: &Table| arguments.save.as_ref().map_or(Ok(()), |file| write(file, table));
    let borrowers = borrowers();
    let mut names = WORK.iter().chain(&ATTACKS).map(|work| work.name).chain(borrowers.iter().map(|of| of.0));
    ensure!(names.any(wanted), "no such work; `--help` lists them");
    let mut bench = Bench::new()?;
    let mut table = Table {
        shim: bench.shim.display().to_string(),
        windows: least,
        cpus: thread::available_parallelism().map_or(1, usize::from),
        alone: vec![],
        lines: vec![],
        given_back: vec![],
    };
    let (lines, time) = expected(arguments, least);
    say(quiet, &format!("{ASSUMPTIONS}\nshim {}, {} CPUs", table.shim, table.cpus));
    say(
        quiet,
        &format!("About {} minutes, until {} lines are measured.\n", time.as_secs().div_ceil(60), lines),
    );
    say(
        quiet,
        &format!(
            "{:<24} {:<14} {:<8} {:>5} {:>7} {:>7} {:>7} {:>7} {:>7} {:>8}",
            "work", "shares", "governor", "asked", "ideal", "paced", "mean", "worst", "lost %", "physics"
        ),
    );
    for work in WORK.iter().filter(|work| wanted(work.name)) {
        let windows = work.windows(least);
        let alone = alone(&mut bench, work, least.min(3))?;
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
    let attacks: Vec<&Work> = ATTACKS.iter().filter(|work| wanted(work.name)).collect();
    if !attacks.is_empty() && arguments.shares.is_none() {
        let neighbour = alone(&mut bench, fair, 2)?;
        for attack in attacks {
            let attacker = alone(&mut bench, attack, 2)?;
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
        if self.longest_us >= 100_000.0 { least.max(LONG_WINDOWS) } else { least }
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
        time += machine::takes(containers, work.windows(windows), governor == Some(true));
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
fn alone(bench: &mut Bench, work: &Work, windows: usize) -> Result<Alone> {
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
        physics_percent: work.longest_us / 10_000.0,
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
