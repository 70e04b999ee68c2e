//! What vcuda costs when a pod is created: the same pods with it and without it, turn by turn in one run, so that
//! what else the machine does hits both alike; with `pods`, many of them at once on a real cluster; with `share`, what
//! shares of a GPU's time are worth. Started by `integration/bench`.

#![forbid(unsafe_code)]

use std::{
    fs, io,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use clap::{Parser, Subcommand};
use integration::{
    burst, cache,
    host::Options,
    interrupt,
    node::Node,
    pod::{Container, Pod},
    share, twin,
};
use serde::Serialize;

/// Measures the creation of pods with vcuda and without it.
#[derive(Parser)]
#[command(name = "vcuda-bench", version, args_conflicts_with_subcommands = true)]
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

/// Times from the admission of a pod to its container's start.
#[derive(Serialize)]
struct Figures {
    containerd: String,
    rounds: usize,
    /// What a pod goes through.
    steps: [&'static str; STEPS.len()],
    pods: Vec<Line>,
}

/// Those of one kind of pod.
#[derive(Serialize)]
struct Line {
    name: &'static str,
    total_ms: Spread,
    /// Of the median, to that of pods without vcuda.
    ratio: f64,
    /// Median of each step, in milliseconds.
    steps_ms: [f64; STEPS.len()],
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
        Some(Other::Share(arguments)) => interrupt::run(async { share::run(arguments) }),
        None => interrupt::run(measure(&arguments)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// What is measured in each round.
const KINDS: [&str; 6] = [
    "no share, without vcuda",
    "a hook, without vcuda",
    "a share's devices, without vcuda",
    "no share, with vcuda",
    "share",
    "share, its hook does nothing",
];

async fn measure(arguments: &Arguments) -> Result<()> {
    ensure!(arguments.rounds > 0, "at least one round");
    let mut node = Node::start(&Options::on(cache::Line::from_env()?)).await?;
    let hook = Hook::install(&mut node)?;
    node.vcuda.start_device_plugin()?;
    node.vcuda.start_nri_plugin().await?;
    node.wait_for_offer().await?;
    let plain = Container::new("main", node.image());
    let share = plain.clone().share(20, 32);
    let twins = twins_of(&node, &plain, &share, &hook).await?;
    let [hooked, mounted] =
        [twins.hook, twins.share].map(|device| Container { cdi_devices: vec![device], ..plain.clone() });
    let mut all: [Vec<Times>; KINDS.len()] = Default::default();
    // The first pod of each kind reads files that the others find in memory.
    for round in 0..=arguments.rounds {
        node.vcuda.nri_plugin()?.terminate()?;
        let without = time(&node, &plain).await?;
        let hooked = time(&node, &hooked).await?;
        let mounted = time(&node, &mounted).await?;
        node.vcuda.start_nri_plugin().await?;
        // On a node the plugin runs for weeks: its first share is not the usual one.
        time(&node, &share).await?;
        let with = time(&node, &plain).await?;
        let shared = time(&node, &share).await?;
        hook.replace()?;
        let spawned = time(&node, &share).await?;
        hook.restore()?;
        if round > 0 {
            for (times, new) in all.iter_mut().zip([without, hooked, mounted, with, shared, spawned]) {
                times.push(new);
            }
        }
    }
    let spread = |times: &Vec<Times>| Spread::of(times.iter().map(|times| times.iter().sum()));
    let base = spread(&all[0]).median;
    let line = |(name, times): (&'static str, &Vec<Times>)| {
        let total_ms = spread(times);
        let step = |at: usize| Spread::of(times.iter().map(|times| times[at])).median;
        Line { name, total_ms, ratio: total_ms.median / base, steps_ms: std::array::from_fn(step) }
    };
    let figures = Figures {
        containerd: node.cri().version().await?,
        rounds: arguments.rounds,
        steps: STEPS,
        pods: KINDS.into_iter().zip(&all).map(line).collect(),
    };
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&figures)?);
        return Ok(());
    }
    println!("pod creation on {}, {} rounds, milliseconds, median", figures.containerd, figures.rounds);
    print!("{:<32} {:>7} {:>7} {:>6}", "", "median", "p90", "ratio");
    println!("{}", STEPS.map(|step| format!(" {step:>14}")).concat());
    for Line { name, total_ms, ratio, steps_ms } in &figures.pods {
        print!("{name:<32} {:>7.1} {:>7.1} {ratio:>6.3}", total_ms.median, total_ms.p90);
        println!("{}", steps_ms.map(|step| format!(" {step:>14.1}")).concat());
    }
    Ok(())
}

/// CDI devices that give a container what a share's has, but its guard.
async fn twins_of(node: &Node, plain: &Container, share: &Container, hook: &Hook) -> Result<twin::Devices> {
    let plain = node.kubelet.run(&Pod::new("plain", plain.clone())).await?;
    let share = node.kubelet.run(&Pod::new("share", share.clone())).await?;
    let devices = twin::write(node, share.id("main"), plain.id("main"), &hook.bin.join("nothing")).await?;
    node.kubelet.delete(&plain).await?;
    node.kubelet.delete(&share).await?;
    Ok(devices)
}

/// vcuda's hook on this node, and a program that does nothing to take its place: what is left of a share's time then is
/// what the runtime takes to start any hook, to make device nodes, and to ask the NRI plugin.
struct Hook {
    bin: PathBuf,
}

impl Hook {
    const NAME: &str = "vcuda-hook";
    const NOTHING: &str = "/bin/true";

    /// Gives the node an installation of its own, before its daemons start: others may use the built one.
    fn install(node: &mut Node) -> Result<Self> {
        let built = node.vcuda.file().paths.install.clone();
        let own = node.folder().join("install");
        for part in ["bin", "lib"] {
            fs::create_dir_all(own.join(part))?;
            for file in fs::read_dir(built.join(part))? {
                let file = file?;
                fs::copy(file.path(), own.join(part).join(file.file_name()))?;
            }
        }
        let bin = own.join("bin");
        fs::copy(bin.join(Self::NAME), bin.join("real"))?;
        fs::copy(Self::NOTHING, bin.join("nothing"))?;
        node.vcuda.change(|file| file.paths.install = own)?;
        Ok(Self { bin })
    }

    fn replace(&self) -> io::Result<()> {
        self.put("nothing")
    }

    fn restore(&self) -> io::Result<()> {
        self.put("real")
    }

    /// Puts another program in its place at once: one that runs cannot be written.
    fn put(&self, program: &str) -> io::Result<()> {
        let link = self.bin.join("next");
        fs::hard_link(self.bin.join(program), &link)?;
        fs::rename(&link, self.bin.join(Self::NAME))
    }
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

    /// It refuses what it does not know before it builds for minutes, and so has lists of its own.
    #[test]
    fn the_script_knows_every_option() {
        let script = include_str!("../../bench");
        let command = Arguments::command();
        let without = [("*", &command)];
        for (name, command) in
            without.into_iter().chain(command.get_subcommands().map(|it| (it.get_name(), it)))
        {
            let list = format!("{name}) usage \"");
            let known = script.lines().find_map(|line| line.strip_prefix(&list)).expect(&list);
            let known: Vec<_> = known.split('"').next().unwrap().split(' ').collect();
            assert!(name == "*" || known.contains(&name), "{name}");
            for argument in command.get_arguments() {
                let value = if argument.get_action().takes_values() { "=" } else { "" };
                let long = argument.get_long().map(|long| format!("--{long}{value}"));
                let short = argument.get_short().map(|short| format!("-{short}{value}"));
                let values: Vec<_> =
                    argument.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
                for option in long.into_iter().chain(short) {
                    // With its values, where the script knows them.
                    let with_values = format!("{option}{}", values.join("|"));
                    let number = format!("{option}N");
                    let is_known = |word: &&str| {
                        **word == option || !value.is_empty() && (**word == with_values || **word == number)
                    };
                    assert!(known.iter().any(is_known), "{name} {option}");
                }
            }
        }
    }
}
