//! The machine of the bench in virtual time, where nobody waits for a processor: the same every time, on every machine.
//!
//! Real are the ledger and the files of its shares, the governor and its arithmetic on NVML's samples, what decides in the
//! shim when a launch may go and what it took (`pacing`, and the budget in `region`), and the time of the simulated
//! driver's GPU (`sim_gpud::time`). Played are programs, the calls between them and the driver, of which each takes the host a
//! fixed time, and the clocks that the shim reads in events, which are exact here.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::PathBuf,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use device_plugin::{
    governor::Governor,
    meter::{Meter, Reading, TICK},
};
use ledger::{ShareFolder, Terms};
use pacing::{Answer, Around, Gate, Lane, Launch, Mark, Marks};
use region::{Limits, Process, Usage};
use sim_gpud::time::{
    Engine, QUEUE, Settings, Work as Item,
    engine::PROCESSES,
    turns::{SAMPLE, percent},
};
use tempfile::TempDir;
use vcuda_config::GpuUuid;

use super::{
    Machine, Pattern, WARM_UP, WATCHED_NS, Work, ensure_lent, given_back,
    node::{self, Node},
    settles,
};
use crate::interrupt;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;

/// When it begins: at no round time of anything, and not so early that a time could be 0.
const BEGIN_NS: u64 = 5 * SECOND + 12_345;

/// What a launch, a mark, and a look at a batch's two marks take of the host, and how late a sleeper wakes at most.
const LAUNCH_NS: u64 = 3 * US;
const MARK_NS: u64 = US;
const LOOK_NS: u64 = 2 * US;
const LATE_NS: u64 = 60 * US;

/// A program that waits in the driver looks so often whether it may go on, and then needs so long until it launches.
const WAIT_NS: u64 = 2 * US;
const RETURN_NS: u64 = 5 * US;

/// The shim's longest sleep.
const LONGEST_SLEEP_NS: u64 = 10 * MS;

/// Until a new process launches.
const START_NS: u64 = 3 * MS;

/// The NVML thread reads so long before the governor's tick.
const READ_BEFORE_NS: u64 = 30 * MS;

/// The process ID of the first process.
const FIRST_PID: u32 = 1000;

/// A process that launches as fast as it can.
struct Thread {
    container: usize,
    /// Its number on the GPU.
    process: usize,
    gate: Gate,
    slot: Process,
    /// When it goes on.
    ready: u64,
    launched: usize,
    asked: Option<u64>,
    going: Option<Going>,
    /// It waits until all that it has launched is done.
    waits: bool,
}

/// A launch that may go, once the start of its batch has been marked.
struct Going {
    batch: usize,
    launch: Launch,
    taken: u64,
    known: bool,
}

struct Container {
    work: &'static Work,
    /// None for one with the bare driver.
    share: Option<(Limits, Usage)>,
    /// Its processes' numbers on the GPU.
    processes: std::ops::Range<usize>,
}

/// The GPU, and the events in its streams.
struct Gpu {
    engine: Engine,
    events: Vec<Item>,
}

impl Gpu {
    /// Puts a mark into a stream, with an event that was used before or, where that is 0, a new one.
    fn mark(&mut self, process: usize, stream: u64, event: u64, now: u64) -> Mark {
        let item = self.engine.record(process, stream, now);
        let event = match event.checked_sub(1).and_then(|at| usize::try_from(at).ok()) {
            Some(at) => {
                self.engine.forget(std::mem::replace(&mut self.events[at], item));
                event
            }
            None => {
                self.events.push(item);
                self.events.len() as u64
            }
        };
        Mark { event, put_ns: now }
    }

    fn close(&mut self, process: usize, gate: &mut Gate, batch: usize, now: u64) {
        let (stream, event) =
            (gate.batch(batch).lane.stream, std::mem::take(&mut gate.batch(batch).end.event));
        let end = self.mark(process, stream, event, now);
        gate.closed(batch, end, true, now);
    }

    fn close_all(&mut self, process: usize, gate: &mut Gate, now: u64) {
        while let Some(open) = gate.open_batch(|_| true) {
            self.close(process, gate, open, now);
        }
    }
}

impl Marks for &Gpu {
    fn passed(&mut self, _: u64, mark: &mut Mark, now_ns: u64) -> Option<u64> {
        let item = *self.events.get(usize::try_from(mark.event.checked_sub(1)?).ok()?)?;
        self.engine.done(item).filter(|at| *at <= now_ns)
    }
}

/// A GPU, and who uses it.
struct World {
    gpu: Gpu,
    node: Node,
    folder: TempDir,
    containers: Vec<Container>,
    threads: Vec<Thread>,
    random: u64,
    governor: Option<Governor>,
    meter: Arc<Meter>,
    reading: Reading,
    next_read: u64,
    next_tick: u64,
}

fn uuid() -> GpuUuid {
    GpuUuid::from_bytes([1; 16])
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl World {
    fn new(governed: bool) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let inventory = node::inventory("550.163.01".into(), uuid(), "simulated".into(), 80 << 30)?;
        let node = Node::new(folder.path(), inventory)?;
        let meter = Arc::new(Meter::default());
        let governor =
            || Governor::new(node.shares.clone(), false, Arc::clone(&meter), folder.path().join("proc"));
        let governor = governed.then(governor);
        let mut engine = Engine::new(Settings::default());
        engine.advance(BEGIN_NS);
        Ok(Self {
            gpu: Gpu { engine, events: vec![] },
            node,
            folder,
            containers: vec![],
            threads: vec![],
            random: 88_172_645_463_325_252,
            governor,
            meter,
            reading: Reading::default(),
            next_read: BEGIN_NS,
            next_tick: BEGIN_NS + READ_BEFORE_NS,
        })
    }

    fn now(&self) -> u64 {
        self.gpu.engine.now()
    }

    /// Starts a container with a share of so many percent, or with the bare driver.
    fn add(&mut self, work: &'static Work, share: Option<(u32, Terms)>) -> Result<()> {
        let id = self.next_id();
        let share = share.map(|(core, terms)| self.node.share(&id, core, terms)).transpose()?;
        self.start(&id, work, share.as_ref())
    }

    /// ID of the container that is started next.
    fn next_id(&self) -> String {
        format!("virtual{}", self.containers.len())
    }

    /// Starts the container of a share, or one with the bare driver.
    fn start(&mut self, id: &str, work: &'static Work, share: Option<&ShareFolder>) -> Result<()> {
        let container = self.containers.len();
        let share = match share {
            Some(folder) => {
                claim_slots(folder, work.processes)?;
                Some((Limits::open(&folder.limits())?, Usage::open(&folder.usage())?))
            }
            None => None,
        };
        let first = self.threads.len();
        for number in 0..work.processes {
            let process = first + number;
            let pid = self.folder.path().join("proc").join(pid(process).to_string());
            fs::create_dir_all(&pid)?;
            fs::write(pid.join("cgroup"), format!("0::/kubepods/{id}"))?;
            self.threads.push(Thread {
                container,
                process,
                gate: Gate::default(),
                slot: Process::of_slot(number).context("more processes than a container may have")?,
                ready: self.now() + number as u64 * US,
                launched: 0,
                asked: None,
                going: None,
                waits: false,
            });
        }
        let processes = first..self.threads.len();
        ensure!(processes.end <= PROCESSES, "a GPU has {PROCESSES} processes here");
        self.containers.push(Container { work, share, processes });
        Ok(())
    }

    /// From 0 to below `below`, always the same in the same order (xorshift).
    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    /// Goes on until this time.
    fn run(&mut self, until: u64) {
        while self.now() < until {
            let next = (0..self.threads.len()).min_by_key(|at| self.threads[*at].ready);
            let at = next.map_or(until, |next| self.threads[next].ready).max(self.now());
            if self.governor.is_some() && self.next_read.min(self.next_tick) <= at.min(until) {
                self.gpu.engine.advance(self.next_read.min(self.next_tick).max(self.now()));
                self.govern();
                continue;
            }
            self.gpu.engine.advance(at.min(until));
            if let Some(next) = next.filter(|_| at < until) {
                self.step(next);
            }
        }
    }

    /// The NVML thread's reading, or the governor's tick, whichever is due.
    fn govern(&mut self) {
        let now = self.now();
        if self.next_read <= now {
            self.next_read += nanoseconds(TICK);
            self.read();
        } else if let Some(governor) = &mut self.governor {
            self.next_tick += nanoseconds(TICK);
            governor.tick(now);
        }
    }

    /// What NVML tells: whole percents of the samples that are over, of processes that were busy.
    fn read(&mut self) {
        let (now, engine) = (self.now(), &self.gpu.engine);
        let end_us = |number: u64| (number + 1) * SAMPLE / 1000;
        let since = self.reading.since(now / 1000);
        let samples = engine.samples();
        let newer =
            samples.clone().find(|number| end_us(*number) > since).unwrap_or(samples.end)..samples.end;
        let told = (0..self.threads.len()).filter_map(|process| {
            let busy: u64 = newer.clone().map(|number| engine.sample(process, number)).sum();
            let percent = percent(busy, newer.end - newer.start);
            (busy > 0).then(|| (pid(process), end_us(newer.end - 1), percent))
        });
        let told: Vec<_> = told.collect();
        self.meter.take_in(&uuid(), &mut self.reading, now / 1000, now, told.into_iter());
    }

    /// A process goes on.
    fn step(&mut self, at: usize) {
        let late = self.random(LATE_NS);
        let now = self.now();
        let Self { gpu, containers, threads, .. } = self;
        let thread = &mut threads[at];
        let Container { work, share, .. } = &containers[thread.container];
        // In the order in which the program launches: kernels, and streams.
        let stream = (thread.launched % work.streams) as u64;
        let kernel_us = work.kernels_us[thread.launched % work.kernels_us.len()];
        let kernel_ns = kernel_us * US * if work.pattern == Pattern::Graph { super::NODES } else { 1 };
        let paced = share.as_ref().and_then(|(limits, usage)| Some((limits.pace(0)?, usage)));
        let Some((pace, usage)) = paced.filter(|(pace, _)| !pace.is_unpaced(now)) else {
            if thread.waits && gpu.engine.is_busy(thread.process) {
                thread.ready = now + WAIT_NS;
            } else if std::mem::take(&mut thread.waits) {
                thread.ready = now + if work.launches_a_process.is_some() { START_NS } else { RETURN_NS };
            } else if gpu.engine.pending(thread.process, stream) >= QUEUE {
                thread.ready = now + LATE_NS;
            } else {
                gpu.engine.launch(thread.process, stream, kernel_ns, now);
                thread.went(work, now);
                if let Some((_, usage)) = share {
                    usage.counters(thread.slot).0.fetch_add(1, Relaxed);
                }
            }
            return;
        };
        let terms = pace.terms(now);
        let Some(budget) = usage.budget(0) else { return };
        let others = || usage.open_elsewhere(thread.slot, 0, now);
        if thread.waits {
            gpu.close_all(thread.process, &mut thread.gate, now);
            if gpu.engine.is_busy(thread.process) {
                thread.ready = now + WAIT_NS;
                return;
            }
            thread.gate.poll(&mut Around { now_ns: now, terms: &terms, budget, marks: &mut &*gpu, others });
            thread.waits = false;
            thread.ready = now + LOOK_NS + RETURN_NS;
            if work.launches_a_process.is_some() {
                // Another process, which knows nothing.
                thread.gate = Gate::default();
                thread.ready = now + START_NS;
            }
        } else if let Some(Going { batch, launch, taken, known }) = thread.going.take() {
            gpu.engine.launch(thread.process, stream, kernel_ns, now);
            let closes = thread.gate.launched(batch, &launch, (taken, known), true, now, budget);
            thread.went(work, now);
            if closes {
                gpu.close(thread.process, &mut thread.gate, batch, now);
                thread.ready += MARK_NS;
            }
        } else {
            let first = thread.asked.is_none();
            let asked_ns = *thread.asked.get_or_insert(now);
            if first {
                usage.counters(thread.slot).0.fetch_add(1, Relaxed);
            }
            let lane = Lane { context: 1, stream, thread: 0 };
            let launch = Launch { lane, function: 8 + 8 * kernel_us, asked_ns };
            let around = &mut Around { now_ns: now, terms: &terms, budget, marks: &mut &*gpu, others };
            let answer = thread.gate.ask(&launch, around);
            if !matches!(answer, Answer::Go { .. } | Answer::Close(_)) {
                budget.wants(now);
            }
            match answer {
                Answer::Go { batch, starts, taken, known } => {
                    if starts {
                        let event = std::mem::take(&mut thread.gate.batch(batch).start.event);
                        thread.gate.batch(batch).start = gpu.mark(thread.process, stream, event, now);
                        thread.ready = now + MARK_NS;
                    }
                    thread.going = Some(Going { batch, launch, taken, known });
                }
                Answer::GoUnmeasured => {
                    gpu.engine.launch(thread.process, stream, kernel_ns, now);
                    thread.went(work, now);
                }
                Answer::Close(batch) => gpu.close(thread.process, &mut thread.gate, batch, now),
                Answer::Wait(wait) => {
                    gpu.close_all(thread.process, &mut thread.gate, now);
                    // The last part of a wait is not slept, so it ends as good as in time.
                    let late = late / if wait > 100 * US { 12 } else { 2 };
                    thread.ready = now + wait.min(LONGEST_SLEEP_NS) + late;
                }
            }
        }
        usage.set_open(thread.slot, 0, thread.gate.open_since());
    }

    /// GPU time that each container has had, in nanoseconds.
    fn busy(&self) -> Vec<u64> {
        let of = |container: &Container| {
            container.processes.clone().map(|process| self.gpu.engine.busy(process)).sum()
        };
        self.containers.iter().map(of).collect()
    }
}

impl Thread {
    /// It has launched.
    fn went(&mut self, work: &Work, now: u64) {
        self.launched += 1;
        self.asked = None;
        self.waits = work.pattern == Pattern::Sync || work.launches_a_process.is_some();
        self.ready = now + LAUNCH_NS;
    }
}

fn pid(process: usize) -> u32 {
    FIRST_PID + u32::try_from(process).unwrap_or(0)
}

/// Has the first slots of a `usage` file claimed, as so many processes would have them that are one here.
fn claim_slots(folder: &ShareFolder, processes: usize) -> Result<()> {
    // Where the bits are is a part of the file's format.
    let bits = if processes < 64 { (1_u64 << processes) - 1 } else { u64::MAX };
    let file = File::options().write(true).open(folder.usage())?;
    Ok(file.write_all_at(&bits.to_ne_bytes(), 16)?)
}

/// The machine in virtual time.
#[derive(Default)]
pub(super) struct Virtual {
    /// How often something was given back.
    given_back: u64,
}

impl Machine for Virtual {
    fn shim(&self) -> Option<PathBuf> {
        None
    }

    fn measure(
        &mut self,
        all: &[(&'static Work, Option<u32>)],
        windows: usize,
        governed: bool,
    ) -> Result<Vec<Vec<f64>>> {
        let mut world = World::new(governed)?;
        for (work, share) in all {
            world.add(work, share.map(|core| (core, Terms::default())))?;
        }
        world.run(BEGIN_NS + nanoseconds(settles(all.len(), governed)));
        let mut got = vec![vec![]; all.len()];
        for _ in 0..windows {
            let before = world.busy();
            world.run(world.now() + SECOND);
            interrupt::check()?;
            for ((windows, before), after) in got.iter_mut().zip(before).zip(world.busy()) {
                windows.push((after - before) as f64 * 100.0 / SECOND as f64);
            }
        }
        Ok(got)
    }
    fn give_back(&mut self, work: &'static Work, terms: Terms) -> Result<f64> {
        let mut world = World::new(true)?;
        world.add(work, Some((30, terms)))?;
        let owner = world.next_id();
        let owners = world.node.share(&owner, 70, Terms::default())?;
        // Now at one time between the governor's ticks, and now at another.
        self.given_back += 1;
        world.run(BEGIN_NS + nanoseconds(WARM_UP) + self.given_back * 23 * MS);
        let (from, had) = (world.now(), world.busy()[0]);
        world.run(from + SECOND / 2);
        ensure_lent((world.busy()[0] - had) * 100 / (world.now() - from))?;
        world.start(&owner, work, Some(&owners))?;
        let mut looks = vec![];
        let first = loop {
            world.run(world.now() + MS);
            let busy = world.busy();
            if busy[1] > 0 {
                break world.now();
            }
        };
        while world.now() < first + WATCHED_NS {
            looks.push((world.now(), world.busy()[0]));
            world.run(world.now() + MS);
        }
        given_back(&looks)
    }
}
