//! A GPU and the containers on it, in virtual time. The GPU runs one process at a time, in slices, as the simulated driver
//! has it: a switch takes time, and marks wait for their process's turn. Containers ask the gate and the budget that are
//! shipped.

use std::{collections::VecDeque, fs::File, os::unix::fs::FileExt, path::Path};

use region::{
    Correction, Demand, KernelLength, PERIOD_NS, Pace, Refund, SLOT_NS, Stretch, Stretching, Usage,
};
use tempfile::TempDir;

use pacing::{Answer, Around, Gate, Lane, Launch, Mark, Marks};

pub(super) const US: u64 = 1_000;
pub(super) const MS: u64 = 1_000_000;
pub(super) const SECOND: u64 = 1_000_000_000;
const SLICE_NS: u64 = 2 * MS;
const SWITCH_NS: u64 = 10 * US;
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
    /// Time that the switch to the running process takes yet.
    switch_left: u64,
    /// Who had it last.
    last: Option<usize>,
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
        if self.running == process {
            self.pass_marks();
        }
        mark
    }

    /// Marks wait for their process's turn.
    fn pass_marks(&mut self) {
        if !self.has_gpu() {
            return;
        }
        for stream in &mut self.processes[self.running].streams {
            while let Some(Item::Mark(mark)) = stream.front() {
                self.passed[usize::try_from(*mark).unwrap() - 1] = self.now;
                stream.pop_front();
            }
        }
    }

    fn has_gpu(&self) -> bool {
        self.last == Some(self.running) && self.switch_left == 0
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
                if self.last.replace(next) != Some(next) {
                    self.switch_left = SWITCH_NS;
                }
            }
            if self.switch_left > 0 {
                let step = self.switch_left.min(to - self.now);
                self.switch_left -= step;
                self.now += step;
                continue;
            }
            self.pass_marks();
            if !self.is_busy(self.running) {
                continue;
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
pub(super) struct Load {
    /// Nanoseconds of each kernel in turn.
    pub kernels: Vec<u64>,
    pub streams: usize,
    /// Waits for every launch.
    pub syncs: bool,
    pub processes: usize,
}

impl Load {
    pub fn of(kernels: &[u64]) -> Self {
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
    /// What goes to the driver next: its batch has been marked.
    going: Option<Going>,
    syncing: bool,
}

struct Going {
    batch: usize,
    launch: Launch,
    taken: u64,
    known: bool,
}

struct Container {
    usage: Usage,
    pace: Pace,
    correction: Correction,
    refund: Refund,
    charged_ns: u64,
    launches: u64,
    length: KernelLength,
    _folder: TempDir,
}

pub(super) struct World {
    gpu: Gpu,
    containers: Vec<Container>,
    threads: Vec<Thread>,
    random: u64,
    /// Whether a governor looks once a period, and the number of the first of NVML's samples that it has not seen.
    pub governor: bool,
    /// Whether it makes slots last longer.
    pub stretches: bool,
    pub stretching: Stretching,
    next_tick: u64,
    seen: usize,
}

/// Has the first slots claimed, as so many processes would have them.
fn claim_slots(usage: &Path, processes: usize) {
    // Where the bits are is a part of the file's format.
    let bits = if processes < 64 { (1_u64 << processes) - 1 } else { u64::MAX };
    File::options().write(true).open(usage).unwrap().write_all_at(&bits.to_ne_bytes(), 16).unwrap();
}

/// What a launch and a mark cost the host, and how late a sleeper wakes at most.
const LAUNCH_NS: u64 = 3 * US;
const MARK_NS: u64 = US;
const LATE_NS: u64 = 60 * US;

impl World {
    pub fn new() -> Self {
        let gpu = Gpu { now: 7 * PERIOD_NS + 12_345, ..Gpu::default() };
        Self {
            gpu,
            containers: Vec::new(),
            threads: Vec::new(),
            random: 88_172_645_463_325_252,
            governor: false,
            stretches: false,
            stretching: Stretching::default(),
            next_tick: 0,
            seen: 0,
        }
    }

    pub fn add(&mut self, pace: Pace, load: &Load) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("usage");
        Usage::create(&path).unwrap();
        claim_slots(&path, load.processes);
        let usage = Usage::open(&path).unwrap();
        let container = self.containers.len();
        for number in 0..load.processes {
            let process = self.gpu.add(container, load.streams);
            // Slots that this one process pretends to be.
            let slot = region::Process::of_slot(number).unwrap();
            self.threads.push(Thread {
                process,
                load: load.clone(),
                gate: Gate::default(),
                slot,
                ready: self.gpu.now + number as u64 * US,
                launched: 0,
                asked: None,
                going: None,
                syncing: false,
            });
        }
        self.containers.push(Container {
            usage,
            pace,
            correction: Correction::default(),
            refund: Refund::default(),
            charged_ns: 0,
            launches: 0,
            length: KernelLength::default(),
            _folder: folder,
        });
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    pub fn run(&mut self, seconds: u64) {
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
        let late = self.gpu.now - complete as u64 * SAMPLE_NS;
        for (at, container) in self.containers.iter_mut().enumerate() {
            let (mut driver, mut processes) = (0, 0);
            for process in self.gpu.processes.iter().filter(|process| process.container == at) {
                let busy: u64 = (seen..complete).filter_map(|sample| process.samples.get(sample)).sum();
                processes += 1;
                driver += (busy * 100 + span / 2).checked_div(span).unwrap_or(0) * span / 100;
            }
            let charged = container.usage.budget(0).unwrap().charged_ns();
            let own = charged - std::mem::replace(&mut container.charged_ns, charged);
            let paid = own * u64::from(container.pace.charge_permille) / 1000;
            container.pace.refund_ns += container.refund.add(PERIOD_NS, driver, paid, processes, late);
            container.pace.charge_permille =
                container.correction.add(PERIOD_NS, driver, own, processes, late);
            let of_this =
                self.threads.iter().filter(|thread| self.gpu.processes[thread.process].container == at);
            let launches = of_this.map(|thread| thread.launched as u64).sum::<u64>();
            let more = launches - std::mem::replace(&mut container.launches, launches);
            container.length.add(own * u64::from(container.pace.charge_permille) / 1000, more);
        }
        if self.stretches {
            let demand = |container: &Container| Demand {
                row: u32::try_from(container.pace.own.longest_ns(SLOT_NS) / SLOT_NS).unwrap_or(100),
                kernel_ns: container.length.ns(),
            };
            let demands: Vec<_> = self.containers.iter().map(demand).collect();
            let stretch = self.stretching.tick(self.gpu.now, Some(&demands));
            self.containers.iter_mut().for_each(|container| container.pace.stretch = stretch);
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
        if let Some(Going { batch, launch, taken, known }) = thread.going.take() {
            self.gpu.processes[thread.process].streams[stream].push_back(Item::Kernel(kernel));
            thread.ready = now + LAUNCH_NS;
            if thread.gate.launched(batch, &launch, (taken, known), true, now, budget) {
                let event = self.gpu.mark(thread.process, stream);
                thread.gate.closed(batch, Mark { event, put_ns: now }, true, now);
                thread.ready += MARK_NS;
            }
            thread.launched += 1;
            thread.asked = None;
            thread.syncing = thread.load.syncs;
            container.usage.set_open(thread.slot, 0, thread.gate.open_since());
            return;
        }
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
                    thread.ready = now + MARK_NS;
                }
                thread.going = Some(Going { batch, launch, taken, known });
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
                thread.ready = now + wait.min(10 * MS) + late / if wait > 100 * US { 12 } else { 2 };
            }
        }
        container.usage.set_open(thread.slot, 0, thread.gate.open_since());
    }

    pub fn now(&self) -> u64 {
        self.gpu.now
    }

    /// Has slots last `after` instead of `before` times a millisecond, from where both periods begin.
    pub fn change(&mut self, before: u32, after: u32) {
        let both =
            (1..).find(|times| times % before == 0 && times % after == 0).map_or(0, u64::from) * PERIOD_NS;
        let stretch = Stretch { before, after, from_ns: (self.gpu.now + 1).div_ceil(both) * both };
        self.containers.iter_mut().for_each(|container| container.pace.stretch = stretch);
    }

    /// GPU time of each process of a container.
    pub fn of_processes(&self, container: usize) -> Vec<u64> {
        let processes = self.gpu.processes.iter().filter(|process| process.container == container);
        processes.map(|process| process.used.iter().sum()).collect()
    }

    /// Of each container: percent of the GPU in each whole second but the first.
    pub fn shares(&self) -> Vec<Vec<f64>> {
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
