//! What vcuda costs when a pod is created: the same pods with it and without it, turn by turn in one run, so that
//! what else the machine does hits both alike; with `pods`, many of them at once on a real cluster; with `share`, what
//! shares of a GPU's time are worth. Started by `integration/bench`.

#![forbid(unsafe_code)]

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use integration::{
    burst,
    cache::Line,
    host::Options,
    node::Node,
    pod::{Container, Pod},
    share,
};
use serde::Serialize;

/// Measures the creation of pods with vcuda and without it.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    other: Option<Other>,
    /// How many times each kind of pod is created.
    #[arg(long, default_value_t = 40)]
    rounds: usize,
    /// Prints one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// What else there is to measure.
#[derive(Subcommand)]
enum Other {
    Pods(burst::Arguments),
    Share(share::Arguments),
}

/// Time from the admission of a pod to its container's start, in milliseconds.
#[derive(Serialize)]
struct Figures {
    containerd: String,
    rounds: usize,
    /// No share asked for, no NRI plugin connected.
    without_ms: Spread,
    /// No share asked for, NRI plugin connected.
    plain_ms: Spread,
    /// A share asked for and given.
    share_ms: Spread,
    /// Medians of the latter two over the first.
    plain_ratio: f64,
    share_ratio: f64,
    /// Medians of each step, in milliseconds.
    steps: Vec<Step>,
}

/// A step on a pod's way, for each kind of pod.
#[derive(Serialize)]
struct Step {
    name: &'static str,
    without_ms: f64,
    plain_ms: f64,
    share_ms: f64,
}

/// What kubelet does to start a pod, one after the other.
const STEPS: [&str; 4] = ["admission", "RunPodSandbox", "CreateContainer", "StartContainer"];

/// How long a pod took for each of [`STEPS`].
type Times = [Duration; STEPS.len()];

#[derive(Clone, Copy, Serialize)]
struct Spread {
    median: f64,
    p90: f64,
}

impl Spread {
    fn of(times: impl Iterator<Item = Duration>) -> Self {
        let mut times: Vec<_> = times.collect();
        times.sort();
        let at = |part: usize| times[(times.len() * part / 100).min(times.len() - 1)].as_secs_f64() * 1e3;
        Self { median: at(50), p90: at(90) }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = match &arguments.other {
        Some(Other::Pods(arguments)) => burst::run(arguments),
        Some(Other::Share(arguments)) => share::run(arguments),
        None => tokio::runtime::Runtime::new()
            .context("tokio")
            .and_then(|runtime| runtime.block_on(measure(&arguments))),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn measure(arguments: &Arguments) -> Result<()> {
    ensure!(arguments.rounds > 0, "at least one round");
    let mut node = Node::with_vcuda(&Options::on(Line::from_env()?)).await?;
    let plain = Container::new("main", node.image());
    let share = plain.clone().share(20, 32);
    let (mut without, mut with, mut shares) = (vec![], vec![], vec![]);
    // The first pod of each kind reads files that the others find in memory.
    for round in 0..=arguments.rounds {
        node.vcuda.nri_plugin()?.terminate()?;
        let bare = time(&node, &plain).await?;
        node.vcuda.start_nri_plugin().await?;
        let beside = time(&node, &plain).await?;
        let shared = time(&node, &share).await?;
        if round > 0 {
            without.push(bare);
            with.push(beside);
            shares.push(shared);
        }
    }
    let kinds = [&without, &with, &shares];
    let [without_ms, plain_ms, share_ms] =
        kinds.map(|kind| Spread::of(kind.iter().map(|times| times.iter().sum())));
    let step = |(at, name): (usize, &&'static str)| {
        let [without_ms, plain_ms, share_ms] =
            kinds.map(|kind| Spread::of(kind.iter().map(|times| times[at])).median);
        Step { name, without_ms, plain_ms, share_ms }
    };
    let figures = Figures {
        containerd: node.cri().version().await?,
        rounds: arguments.rounds,
        without_ms,
        plain_ms,
        share_ms,
        plain_ratio: plain_ms.median / without_ms.median,
        share_ratio: share_ms.median / without_ms.median,
        steps: STEPS.iter().enumerate().map(step).collect(),
    };
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&figures)?);
        return Ok(());
    }
    println!("pod creation on {}, {} rounds, milliseconds", figures.containerd, figures.rounds);
    println!("{:<28} {:>8} {:>8} {:>8}", "", "median", "p90", "ratio");
    for (name, spread, ratio) in [
        ("no share, without vcuda", without_ms, 1.0),
        ("no share, with vcuda", plain_ms, figures.plain_ratio),
        ("share", share_ms, figures.share_ratio),
    ] {
        println!("{name:<28} {:>8.1} {:>8.1} {ratio:>8.3}", spread.median, spread.p90);
    }
    println!("\n{:<28} {:>8} {:>8} {:>8}", "median of each step", "without", "with", "share");
    for Step { name, without_ms, plain_ms, share_ms } in &figures.steps {
        println!("{name:<28} {without_ms:>8.1} {plain_ms:>8.1} {share_ms:>8.1}");
    }
    Ok(())
}

/// Creates a pod, and removes it again outside the measured time.
async fn time(node: &Node, container: &Container) -> Result<Times> {
    let pod = Pod::new("bench", container.clone());
    let kubelet = &node.kubelet;
    let begin = Instant::now();
    kubelet.admit(&pod).await?;
    let admitted = Instant::now();
    let mut running = kubelet.start_sandbox(&pod).await?;
    let sandboxed = Instant::now();
    let id = kubelet.create_container(&mut running, container).await?;
    let created = Instant::now();
    node.cri().start(&id).await?;
    let started = Instant::now();
    kubelet.delete(&running).await?;
    Ok([admitted - begin, sandboxed - admitted, created - sandboxed, started - created])
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// It refuses what it does not know before it builds for minutes, and so has a list of its own.
    #[test]
    fn the_script_knows_every_option() {
        let script = include_str!("../../bench");
        let known = script.lines().find_map(|line| line.strip_prefix("usage \"")).unwrap();
        let known: Vec<_> = known.split('"').next().unwrap().split(' ').collect();
        let command = Arguments::command();
        for command in [&command].into_iter().chain(command.get_subcommands()) {
            for argument in command.get_arguments() {
                let value = if argument.get_action().takes_values() { "=" } else { "" };
                let long = argument.get_long().map(|long| format!("--{long}{value}"));
                let short = argument.get_short().map(|short| format!("-{short}{value}"));
                for option in long.into_iter().chain(short) {
                    assert!(known.contains(&option.as_str()), "{option}");
                }
            }
        }
        for command in command.get_subcommands() {
            assert!(known.contains(&command.get_name()), "{}", command.get_name());
        }
    }
}
