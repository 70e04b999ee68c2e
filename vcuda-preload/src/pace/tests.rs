//! Whole containers in virtual time: the gate and the budget as they are shipped, on a GPU of a few lines that runs one
//! process at a time, in slices, and the streams of a process side by side, each an equal part.

use std::collections::VecDeque;

use region::{Correction, PERIOD_NS, Pace, Slots, Usage};
use tempfile::TempDir;

use super::gate::{Answer, Around, Gate, Lane, Launch, Mark, Marks};

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;
const SLICE_NS: u64 = 2 * MS;
/// Of NVML's utilization of processes.
const SAMPLE_NS: u64 = 166_666_667;

enum Item {
    Kernel(u64),
    Mark(u64),
}

/// A GPU.
#[derive(Default)]
struct Gpu {
    now: u64,
    processes: Vec<GpuProcess>,
    running: usize,
    slice_left: u64,
    passed: Vec<u64>,
}

#[derive(Default)]
struct GpuProcess {
    container: usize,
    streams: Vec<VecDeque<Item>>,
    /// GPU time in each window of a second, and in each sample of NVML's.
    used: Vec<u64>,
    samples: Vec<u64>,
    done: u64,
}

impl Gpu {
    fn add(&mut self, container: usize, streams: usize) -> usize {
        let streams = (0..streams).map(|_| VecDeque::new()).collect();
        self.processes.push(GpuProcess { container, streams, ..GpuProcess::default() });
        self.processes.len() - 1
    }

    fn mark(&mut self, process: usize, stream: usize) -> u64 {
        self.passed.push(0);
        let mark = self.passed.len() as u64;
        self.processes[process].streams[stream].push_back(Item::Mark(mark));
        self.pass_marks();
        mark
    }

    fn pass_marks(&mut self) {
        for process in &mut self.processes {
            for stream in &mut process.streams {
                while let Some(Item::Mark(mark)) = stream.front() {
                    self.passed[usize::try_from(*mark).unwrap() - 1] = self.now;
                    stream.pop_front();
                }
            }
        }
    }

    fn is_busy(&self, process: usize) -> bool {
        self.processes[process].streams.iter().any(|stream| !stream.is_empty())
    }

    fn advance(&mut self, to: u64) {
        while self.now < to {
            let count = self.processes.len();
            if self.slice_left == 0 || !self.is_busy(self.running) {
                let next =
                    (1..=count).map(|n| (self.running + n) % count).find(|process| self.is_busy(*process));
                let Some(next) = next else {
                    self.now = to;
                    return;
                };
                (self.running, self.slice_left) = (next, SLICE_NS);
            }
            let process = &mut self.processes[self.running];
            let heads = process.streams.iter_mut().filter_map(|stream| match stream.front_mut() {
                Some(Item::Kernel(left)) => Some(left),
                _ => None,
            });
            let heads: Vec<_> = heads.collect();
            let side_by_side = heads.len() as u64;
            let shortest = heads.iter().map(|left| **left).min().unwrap();
            let window = usize::try_from(self.now / SECOND).unwrap();
            let to_window = (window as u64 + 1) * SECOND - self.now;
            let sample = usize::try_from(self.now / SAMPLE_NS).unwrap();
            let to_sample = (sample as u64 + 1) * SAMPLE_NS - self.now;
            let most = self.slice_left.min(to - self.now).min(to_window).min(to_sample);
            let step = (shortest * side_by_side).min(most).max(1);
            for left in heads {
                *left = left.saturating_sub(step.div_ceil(side_by_side));
            }
            self.now += step;
            self.slice_left -= step.min(self.slice_left);
            process.used.resize(window + 1, 0);
            process.used[window] += step;
            process.samples.resize(sample + 1, 0);
            process.samples[sample] += step;
            for stream in &mut process.streams {
                if let Some(Item::Kernel(0)) = stream.front() {
                    stream.pop_front();
                    process.done += 1;
                }
            }
            self.pass_marks();
        }
    }
}

impl Marks for &mut Gpu {
    fn passed(&mut self, _: u64, mark: &mut Mark, now_ns: u64) -> Option<u64> {
        let at = self.passed[usize::try_from(mark.event).unwrap() - 1];
        (at != 0 && at <= now_ns).then_some(at)
    }
}

/// How a process launches.
#[derive(Clone)]
struct Load {
    /// Nanoseconds of each kernel in turn.
    kernels: Vec<u64>,
    streams: usize,
    /// Waits for every launch.
    syncs: bool,
    processes: usize,
}

impl Load {
    fn of(kernels: &[u64]) -> Self {
        Self { kernels: kernels.to_vec(), streams: 1, syncs: false, processes: 1 }
    }
}

struct Thread {
    process: usize,
    load: Load,
    gate: Gate,
    slot: region::Process,
    ready: u64,
    launched: usize,
    asked: Option<u64>,
    syncing: bool,
}

struct Container {
    usage: Usage,
    pace: Pace,
    correction: Correction,
    charged_ns: u64,
    _folder: TempDir,
}

struct World {
    gpu: Gpu,
    containers: Vec<Container>,
    threads: Vec<Thread>,
    random: u64,
    /// Whether a governor looks once a period, and the number of the first of NVML's samples that it has not seen.
    governor: bool,
    next_tick: u64,
    seen: usize,
}

/// What a launch costs the host, and how late a sleeper wakes at most.
const LAUNCH_NS: u64 = 3 * US;
const LATE_NS: u64 = 60 * US;

impl World {
    fn new() -> Self {
        let gpu = Gpu { now: 7 * PERIOD_NS + 12_345, ..Gpu::default() };
        Self {
            gpu,
            containers: Vec::new(),
            threads: Vec::new(),
            random: 88_172_645_463_325_252,
            governor: false,
            next_tick: 0,
            seen: 0,
        }
    }

    fn add(&mut self, pace: Pace, load: &Load) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("usage");
        Usage::create(&path).unwrap();
        let usage = Usage::open(&path).unwrap();
        let container = self.containers.len();
        for number in 0..load.processes {
            let process = self.gpu.add(container, load.streams);
            // Slots that this one process pretends to be.
            let slot = region::Process::of_slot(number).unwrap();
            self.threads.push(Thread {
                process,
                load: load.clone(),
                gate: Gate::new(),
                slot,
                ready: self.gpu.now + number as u64 * US,
                launched: 0,
                asked: None,
                syncing: false,
            });
        }
        self.containers.push(Container {
            usage,
            pace,
            correction: Correction::default(),
            charged_ns: 0,
            _folder: folder,
        });
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    fn run(&mut self, seconds: u64) {
        let end = self.gpu.now / SECOND * SECOND + seconds * SECOND;
        while self.gpu.now < end {
            let next = (0..self.threads.len()).min_by_key(|at| self.threads[*at].ready).unwrap();
            let at = self.threads[next].ready.max(self.gpu.now);
            if self.governor && self.next_tick <= at {
                self.gpu.advance(self.next_tick);
                self.tick();
                self.next_tick = self.gpu.now + PERIOD_NS;
                continue;
            }
            self.gpu.advance(at.min(end));
            if at < end {
                self.step(next);
            }
        }
    }

    /// What the governor does once a period: it compares what containers say with what NVML says, in whole percents of
    /// samples that are over.
    fn tick(&mut self) {
        let complete = usize::try_from(self.gpu.now / SAMPLE_NS).unwrap();
        let seen = std::mem::replace(&mut self.seen, complete);
        let span = (complete - seen) as u64 * SAMPLE_NS;
        for (at, container) in self.containers.iter_mut().enumerate() {
            let (mut driver, mut processes) = (0, 0);
            for process in self.gpu.processes.iter().filter(|process| process.container == at) {
                let busy: u64 = (seen..complete).filter_map(|sample| process.samples.get(sample)).sum();
                processes += 1;
                driver += (busy * 100 + span / 2).checked_div(span).unwrap_or(0) * span / 100;
            }
            let charged = container.usage.budget(0).unwrap().charged_ns();
            let own = charged - std::mem::replace(&mut container.charged_ns, charged);
            container.pace.charge_permille = container.correction.add(PERIOD_NS, driver, own, processes);
        }
    }

    fn step(&mut self, at: usize) {
        let late = self.random(LATE_NS);
        let thread = &mut self.threads[at];
        let container = &self.containers[self.gpu.processes[thread.process].container];
        let now = self.gpu.now;
        let terms = container.pace.terms(now);
        let budget = container.usage.budget(0).unwrap();
        let others = || container.usage.open_elsewhere(thread.slot, 0, now);
        if thread.syncing {
            while let Some(open) = thread.gate.open_batch(|_| true) {
                let stream = usize::try_from(thread.gate.batch(open).lane.stream).unwrap();
                let event = self.gpu.mark(thread.process, stream);
                thread.gate.closed(open, Mark { event, put_ns: now }, true, now);
            }
            // The driver's own wait, in small steps.
            if self.gpu.is_busy(thread.process) {
                thread.ready = now + 2 * US;
                return;
            }
            thread.syncing = false;
            thread.gate.poll(&mut Around {
                now_ns: now,
                terms: &terms,
                budget,
                marks: &mut (&mut self.gpu),
                others,
            });
            thread.ready = now + 8 * US;
            return;
        }
        let stream = thread.launched % thread.load.streams;
        let kernel = thread.load.kernels[thread.launched % thread.load.kernels.len()];
        let asked_ns = *thread.asked.get_or_insert(now);
        let lane = Lane { context: 1, stream: stream as u64, thread: 0 };
        let launch = Launch { lane, function: 8 + 8 * kernel, asked_ns };
        let answer = thread.gate.ask(
            &launch,
            &mut Around { now_ns: now, terms: &terms, budget, marks: &mut (&mut self.gpu), others },
        );
        match answer {
            Answer::Go { batch, starts, taken, known } => {
                if starts {
                    let event = self.gpu.mark(thread.process, stream);
                    thread.gate.batch(batch).start = Mark { event, put_ns: now };
                }
                self.gpu.processes[thread.process].streams[stream].push_back(Item::Kernel(kernel));
                if thread.gate.launched(batch, &launch, (taken, known), true, now, budget) {
                    let event = self.gpu.mark(thread.process, stream);
                    thread.gate.closed(batch, Mark { event, put_ns: now }, true, now);
                }
                thread.launched += 1;
                thread.asked = None;
                thread.syncing = thread.load.syncs;
                thread.ready = now + LAUNCH_NS;
            }
            Answer::GoUnmeasured => panic!("all marks are to be had"),
            Answer::Close(batch) => {
                let stream = usize::try_from(thread.gate.batch(batch).lane.stream).unwrap();
                let event = self.gpu.mark(thread.process, stream);
                thread.gate.closed(batch, Mark { event, put_ns: now }, true, now);
            }
            Answer::Wait(wait) => {
                while let Some(open) = thread.gate.open_batch(|_| true) {
                    let stream = usize::try_from(thread.gate.batch(open).lane.stream).unwrap();
                    let event = self.gpu.mark(thread.process, stream);
                    thread.gate.closed(open, Mark { event, put_ns: now }, true, now);
                }
                thread.ready = now + wait.min(10 * MS) + if wait > 100 * US { 5 * US } else { late / 2 };
            }
        }
        container.usage.set_open(thread.slot, 0, thread.gate.open_since());
    }

    /// Of each container: percent of the GPU in each whole second but the first.
    fn shares(&self) -> Vec<Vec<f64>> {
        let seconds = usize::try_from(self.gpu.now / SECOND).unwrap();
        let of = |container| {
            let processes = self.gpu.processes.iter().filter(move |process| process.container == container);
            let in_window = move |window| {
                processes.clone().map(|process| process.used.get(window).copied().unwrap_or(0)).sum::<u64>()
            };
            (2..seconds).map(|window| in_window(window) as f64 / SECOND as f64 * 100.0).collect()
        };
        (0..self.containers.len()).map(of).collect()
    }
}

/// The timetable of shares that are alone, or together on a GPU.
fn paces(cores: &[u32]) -> Vec<Pace> {
    let mut taken = Slots::NONE;
    let owns: Vec<_> = cores
        .iter()
        .map(|core| {
            let own = Slots::place(*core, taken).unwrap();
            taken = taken.union(own);
            own
        })
        .collect();
    // Slots that nobody owns are everybody's.
    let lent = Slots::ALL.difference(taken);
    let lent = if cores.len() == 1 { lent } else { Slots::NONE };
    cores
        .iter()
        .zip(owns)
        .map(|(core, own)| Pace {
            own,
            core_percent: *core,
            lease: region::Lease { slots: lent, rate_permille: core * 10, until_ns: u64::MAX },
            charge_permille: 1000,
        })
        .collect()
}

/// Runs a load in shares of so many percent, with or without a governor, and gives their windows.
fn run(cores: &[u32], load: &Load, seconds: u64, governor: bool) -> (World, Vec<Vec<f64>>) {
    let mut world = World { governor, ..World::new() };
    for pace in paces(cores) {
        world.add(pace, load);
    }
    world.run(seconds);
    let shares = world.shares();
    (world, shares)
}

/// Whether all loads run in all shares, or a few: `VCUDA_STRESS=full`, as in tests/stress.rs.
fn full() -> bool {
    std::env::var("VCUDA_STRESS").is_ok_and(|value| value == "full")
}

/// No container gets a point more than it asked for, nor three in any second; nor much less. How much less depends on
/// what neighbours run: their work that lasts into a share's slots is counted as its own, which is what the node's
/// governor sets right, and no governor is here.
fn assert_kept(cores: &[u32], load: &Case) {
    let (_, shares) = run(cores, &load.load, if full() { 8 } else { 4 }, false);
    for (core, windows) in cores.iter().zip(&shares) {
        let asked = f64::from(*core);
        let mean = windows.iter().sum::<f64>() / windows.len() as f64;
        let off = |share: &f64| share - asked;
        let (least, most) =
            (windows.iter().map(off).fold(0.0, f64::min), windows.iter().map(off).fold(0.0, f64::max));
        let what = load.what;
        println!("{cores:?} {what}: {core} asked, mean {mean:.2}, windows {least:+.2} to {most:+.2}");
        let short = if cores.len() == 1 { 1.0 } else { load.short };
        assert!(
            mean - asked <= 1.0 && asked - mean <= short,
            "{cores:?} {what}: mean {mean:.2}: {windows:.1?}"
        );
        assert!(most <= 3.0 && -least <= short + 2.0, "{cores:?} {what}: {windows:.1?}");
    }
}

struct Case {
    what: &'static str,
    load: Load,
    /// Points of the mean that neighbours may cost.
    short: f64,
}

fn cases() -> Vec<Case> {
    let case = |what, short, load| Case { what, load, short };
    let mix = [5 * US, 5 * US, 100 * US, 20 * US, 5 * US, 2 * MS, 5 * US, 400 * US];
    vec![
        case("5 us", 1.0, Load::of(&[5 * US])),
        case("100 us", 1.0, Load::of(&[100 * US])),
        case("5 ms", 1.0, Load::of(&[5 * MS])),
        case("mix", 1.5, Load::of(&mix)),
        case("graph", 1.0, Load::of(&[200 * 10 * US])),
        case("16 streams", 2.5, Load { streams: 16, ..Load::of(&[100 * US]) }),
        case("16 streams of long ones", 3.0, Load { streams: 16, ..Load::of(&[3 * MS]) }),
        case("sync per launch", 2.5, Load { syncs: true, ..Load::of(&[400 * US]) }),
    ]
}

#[test]
fn a_share_alone_gets_what_it_asked_for() {
    for load in cases() {
        for core in [10, 30, 50, 70, 90].into_iter().filter(|core| full() || *core == 30) {
            assert_kept(&[core], &load);
        }
    }
}

#[test]
fn shares_together_get_what_they_asked_for() {
    for load in cases() {
        assert_kept(&[30, 70], &load);
        if full() {
            for cores in [&[10, 90][..], &[25; 4], &[10; 10]] {
                assert_kept(cores, &load);
            }
        }
    }
}

#[test]
fn processes_of_a_container_get_its_share_and_no_more() {
    for (processes, short) in [(2, 2.0), (8, 9.0), (64, 12.0)] {
        let load = Load { processes, ..Load::of(&[100 * US]) };
        let load = Case { what: "processes", load, short };
        assert_kept(&[30], &load);
        assert_kept(&[30, 70], &load);
    }
}

/// Short kernels beside a long one must not hide it.
#[test]
fn a_long_kernel_is_counted_whatever_runs_beside_it() {
    let long = Load { streams: 2, ..Load::of(&[40 * MS, 20 * US]) };
    let (_, shares) = run(&[30], &long, 10, false);
    let mean = shares[0].iter().sum::<f64>() / shares[0].len() as f64;
    assert!((mean - 30.0).abs() <= 2.0, "{:.1?}", shares[0]);
}

fn mean(windows: &[f64]) -> f64 {
    windows.iter().sum::<f64>() / windows.len() as f64
}

/// What a neighbour's work took of the time between a kernel's start and its end, the shim cannot know; the driver does.
#[test]
fn with_the_governor_shares_get_what_they_asked_for_whatever_overlaps() {
    let long = Case { what: "200 ms", short: 0.0, load: Load::of(&[200 * MS]) };
    let beside = [&[30, 70][..], &[10, 90], &[25; 4], &[10; 10]];
    for load in cases().into_iter().chain([long]) {
        let is_long = load.what == "200 ms";
        // Others are right without it, or take long to simulate.
        if !is_long && !matches!(load.what, "mix" | "16 streams" | "sync per launch") {
            continue;
        }
        for cores in beside.into_iter().filter(|cores| is_long || full() || **cores == [30, 70]) {
            // Debts from before the first correction are paid off by then.
            let (seconds, settled) = if is_long { (240, 100) } else { (18, 8) };
            // Of ten kernels that run at once, each a tenth of the time, NVML's whole percents tell less.
            let off = if cores.len() == 10 { 2.0 } else { 1.0 };
            // What launches take of the host is nobody's time.
            let unpaced = mean(&run(&[100], &load.load, 4, false).1[0]) / 100.0;
            let (_, shares) = run(cores, &load.load, seconds, true);
            for (core, windows) in cores.iter().zip(&shares) {
                let (most, mean) = (f64::from(*core), mean(&windows[settled..]));
                let asked = most * unpaced;
                println!("{cores:?} {}: {core} asked, ideal {asked:.2}, mean {mean:.2}", load.what);
                assert!(mean >= asked - off && mean <= most + off, "{cores:?} {}: {windows:.1?}", load.what);
                // A window holds a kernel more or less, which is 20 points; of many containers, some more.
                let physics = if is_long { 20.0 * cores.len().min(4) as f64 / 2.0 } else { 0.0 };
                let worst = windows[settled..].iter().map(|share| (share - asked).abs()).fold(0.0, f64::max);
                assert!(worst <= 3.0 + physics, "{cores:?} {}: {windows:.1?}", load.what);
            }
        }
    }
}

/// Without it, a kernel that lasts into others' slots is charged for their time too: at worst all of them run beside it
/// all the time, and it gets that part of its share.
#[test]
fn without_the_governor_a_long_kernel_gets_no_more_than_its_share_and_at_least_an_equal_part_of_it() {
    let load = Load::of(&[200 * MS]);
    for core in [10, 30, 50, 70, 90] {
        let (_, shares) = run(&[core], &load, 80, false);
        let mean = mean(&shares[0]);
        assert!((mean - f64::from(core)).abs() <= 1.0, "{core} alone: {mean:.2}: {:.1?}", shares[0]);
    }
    for cores in [&[30, 70][..], &[10, 90], &[25; 4], &[10; 10]] {
        let (_, shares) = run(cores, &load, 80, false);
        for (core, windows) in cores.iter().zip(&shares) {
            let (asked, mean) = (f64::from(*core), mean(windows));
            println!("{cores:?} 200 ms without: {core} asked, mean {mean:.2}");
            assert!(mean <= asked + 1.0 && mean >= asked / cores.len() as f64, "{cores:?}: {mean:.2}");
        }
    }
}

/// The host has a CPU for each process here: what the neighbour lacks is lost on the GPU, which gives each of the 64 turns
/// of their own at the end of their slots.
#[test]
fn a_container_of_64_processes_gets_no_more_than_its_share_and_takes_little_of_its_neighbours() {
    let (attack, fair) = (Load { processes: 64, ..Load::of(&[100 * US]) }, Load::of(&[100 * US]));
    let mut world = World { governor: true, ..World::new() };
    for (pace, load) in paces(&[30, 70]).into_iter().zip([attack, fair]) {
        world.add(pace, &load);
    }
    world.run(20);
    let means: Vec<f64> = world.shares().iter().map(|windows| mean(&windows[8..])).collect();
    println!("[30, 70] 64 processes beside one: {means:.2?}");
    assert!(means[0] <= 31.0 && (64.0..=71.0).contains(&means[1]), "{means:.2?}");
}
