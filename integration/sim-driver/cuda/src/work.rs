//! Work that takes time. What a process's streams have to do is in its own timeline, one for each GPU; which process has
//! the GPU when is in the state that all share. Nobody wakes up when a kernel ends: who asks gets the answer that the
//! arithmetic gives, and who waits sleeps until the soonest time that it allows.
//!
//! Only what has an effect on the host's side and stands behind a kernel (a copy, a fill, a host function) is done by a
//! thread of the driver's, when its turn comes.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use sim_gpud::{
    state::{GpuTurns, now},
    time::{Point, QUEUE, TURN_NS, Timeline, timeline::Reached},
};

use crate::{
    context::{self, Context},
    driver::Driver,
    ffi::{Error, INVALID_HANDLE, NOT_READY, Outcome},
    sleep::sleep_until,
    stream::{Operation, perform},
};

/// A stream, by what it is called, and how it goes with the others of its context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane {
    /// Stream, context and thread, as far as they make it what it is.
    pub key: (u64, context::Handle, u64),
    pub context: context::Handle,
    pub gpu: usize,
    /// Whether it is the legacy default stream, which waits for the others and lets them wait.
    pub legacy: bool,
    /// Whether it does not take part in that.
    pub alone: bool,
}

#[derive(Clone, Copy)]
struct Known {
    stream: usize,
    lane: Lane,
}

/// What the process does on one GPU.
#[derive(Default)]
struct Lanes {
    timeline: Timeline,
    streams: HashMap<(u64, context::Handle, u64), Known>,
    seen: u64,
    /// From when on the GPU's time can next be the process's.
    from: u64,
    /// Another process has the GPU.
    away: bool,
    reached: Vec<(Reached, u64)>,
}

/// When an event was recorded last.
#[derive(Clone, Copy)]
struct Recorded {
    token: u64,
    /// While it has not happened: where it stands.
    place: Option<(usize, Point)>,
    at: u64,
}

/// Something that the driver's thread does when it is reached.
struct Gate {
    gpu: usize,
    point: Point,
    context: &'static Context,
    operation: Operation,
    reached: bool,
}

#[derive(Default)]
struct Inner {
    gpus: HashMap<usize, Lanes>,
    events: HashMap<u64, Recorded>,
    /// Events by the marks that stand for them.
    marks: HashMap<u64, u64>,
    gates: BTreeMap<u64, Gate>,
    next: u64,
    has_thread: bool,
    /// The first error of something that was done later than it was asked for.
    failed: Option<Error>,
}

/// The process's work.
#[derive(Default)]
pub(crate) struct Working {
    inner: Mutex<Inner>,
    changed: Condvar,
}

/// What became of something that was given to a stream.
enum Given {
    /// It stands in the stream.
    Queued,
    /// Nothing stands before it and it takes no time: it is to be done now.
    Now,
    /// The stream takes no more until it is here.
    Full(Point),
}

impl Lanes {
    /// Brings the timeline up to what the process has had of the GPU.
    fn catch_up(&mut self, turns: &GpuTurns, slot: usize) {
        let (stretches, logged) = turns.stretches(slot, self.seen.saturating_sub(1));
        self.seen = logged;
        for stretch in stretches {
            if stretch.before > self.timeline.now() {
                // What came before is not kept any more.
                self.timeline.advance(stretch.before);
                self.collect(|_| stretch.from);
            }
            self.timeline.advance(stretch.after);
            self.collect(|had| stretch.when(had));
        }
    }

    fn collect(&mut self, when: impl Fn(u64) -> u64) {
        for (reached, had) in self.timeline.take_reached() {
            self.reached.push((reached, when(had)));
        }
    }

    fn stream(&mut self, lane: &Lane) -> usize {
        let timeline = &mut self.timeline;
        let known = self.streams.entry(lane.key);
        known.or_insert_with(|| Known { stream: timeline.open(), lane: *lane }).stream
    }

    /// What the next thing in a stream waits for, beside what the stream has to do.
    fn before(&self, lane: &Lane) -> Vec<Point> {
        if lane.alone || self.timeline.is_idle() {
            return vec![];
        }
        let others = self.streams.values().filter(|other| {
            let other = &other.lane;
            other.context == lane.context
                && !other.alone
                && other.legacy != lane.legacy
                && other.key != lane.key
        });
        others.filter_map(|other| self.timeline.tail(other.stream)).collect()
    }

    /// What must be done for a stream to have nothing to do.
    fn tails(&self, lane: &Lane) -> Vec<Point> {
        let own = self.streams.get(&lane.key).and_then(|known| self.timeline.tail(known.stream));
        own.into_iter().chain(if lane.legacy { self.before(lane) } else { vec![] }).collect()
    }

    fn tails_of(&self, context: context::Handle) -> Vec<Point> {
        let of = self.streams.values().filter(|known| known.lane.context == context);
        of.filter_map(|known| self.timeline.tail(known.stream)).collect()
    }

    /// The soonest time at which all of these can be done; none where they are.
    fn soonest(&self, points: &[Point]) -> Option<u64> {
        let left = points.iter().filter(|point| !self.timeline.is_done(**point));
        left.map(|point| self.from + self.timeline.at_least(*point)).max()
    }
}

impl Inner {
    /// Looks at a GPU at the present time, and changes what it has to do.
    fn at<T>(&mut self, driver: &Driver, gpu: usize, change: impl FnOnce(&mut Lanes) -> T) -> T {
        let lanes = self.gpus.entry(gpu).or_default();
        let slot = driver.link.slot;
        let result = driver.link.state.at_gpu(slot, gpu, |turns| {
            lanes.catch_up(turns, slot);
            lanes.away = turns.has_it().is_some_and(|holder| holder != slot);
            let result = change(lanes);
            lanes.collect(|_| turns.now());
            let wanted = lanes.timeline.now() + lanes.timeline.runnable();
            if turns.wanted(slot) != wanted {
                turns.want(slot, wanted);
            }
            lanes.from = turns.soonest(slot, lanes.timeline.now());
            result
        });
        for (reached, at) in lanes.reached.drain(..) {
            match reached {
                Reached::Mark(token) => {
                    let event = self.marks.remove(&token).and_then(|event| self.events.get_mut(&event));
                    if let Some(recorded) = event.filter(|recorded| recorded.token == token) {
                        (recorded.place, recorded.at) = (None, at);
                    }
                }
                Reached::Gate(token) => {
                    if let Some(gate) = self.gates.get_mut(&token) {
                        gate.reached = true;
                    }
                }
            }
        }
        result
    }

    fn idle(&self, gpu: usize) -> bool {
        self.gpus.get(&gpu).is_none_or(|lanes| lanes.timeline.is_idle())
    }

    /// Puts something into a stream.
    fn give(
        &mut self,
        driver: &Driver,
        context: &'static Context,
        lane: &Lane,
        operation: &Operation,
    ) -> Given {
        self.next += 1;
        let (token, gpu) = (self.next, lane.gpu);
        let pushed = self.at(driver, gpu, |lanes| {
            let stream = lanes.stream(lane);
            let after = lanes.before(lane);
            let pending = lanes.timeline.pending(stream);
            let duration = operation.duration();
            if duration == 0 && pending == 0 && after.is_empty() {
                if !lanes.away || !matches!(operation, Operation::Record { .. }) {
                    return Err(Given::Now);
                }
                lanes.timeline.work(stream, TURN_NS, vec![]);
            }
            if pending >= QUEUE
                && let Some(point) = lanes.timeline.before_last(stream, QUEUE - 1)
            {
                return Err(Given::Full(point));
            }
            Ok(match operation {
                Operation::Kernel { .. } => lanes.timeline.work(stream, duration, after),
                Operation::Nothing => lanes.timeline.mark(stream, 0, after),
                Operation::Record { .. } => lanes.timeline.mark(stream, token, after),
                _ => lanes.timeline.gate(stream, token, after),
            })
        });
        let point = match pushed {
            Ok(point) => point,
            Err(given) => return given,
        };
        match *operation {
            Operation::Kernel { threads, .. } => driver.count_kernel(gpu, threads),
            Operation::Nothing => {}
            Operation::Record { event } => {
                let recorded = Recorded { token, place: Some((gpu, point)), at: 0 };
                if let Some(before) = self.events.insert(event, recorded) {
                    self.marks.remove(&before.token);
                }
                self.marks.insert(token, event);
            }
            operation => {
                let gate = Gate { gpu, point, context, operation, reached: false };
                self.gates.insert(token, gate);
            }
        }
        Given::Queued
    }
}

impl Working {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives an operation to a stream; one that takes no time, and has nothing before it, is done at once.
    pub(crate) fn submit(
        &self,
        driver: &'static Driver,
        context: &'static Context,
        lane: &Lane,
        operation: &Operation,
    ) -> Outcome {
        loop {
            let mut inner = self.lock();
            // Whether an event must wait, the GPU tells.
            let waits = matches!(operation, Operation::Record { .. });
            if operation.duration() == 0 && !waits && inner.idle(lane.gpu) {
                drop(inner);
                return perform(context, operation);
            }
            match inner.give(driver, context, lane, operation) {
                Given::Queued => {
                    if !inner.gates.is_empty() {
                        self.start(&mut inner, driver);
                    }
                    return Ok(());
                }
                Given::Now => {
                    drop(inner);
                    return perform(context, operation);
                }
                Given::Full(point) => self.wait_roughly(driver, inner, lane.gpu, point),
            }
        }
    }

    /// The same for all operations of a graph, one after the other.
    pub(crate) fn submit_all(
        &self,
        driver: &'static Driver,
        context: &'static Context,
        lane: &Lane,
        all: &[(&'static Context, Operation)],
    ) -> Outcome {
        let mut kernels = (0_u64, 0_u64);
        let flush = |kernels: &mut (u64, u64)| match std::mem::take(kernels) {
            (0, 0) => Ok(()),
            // Kernels in a row are one piece of work; they are counted one by one.
            (duration, _) => self.submit(driver, context, lane, &Operation::Kernel { threads: 0, duration }),
        };
        for (of, operation) in all {
            match *operation {
                Operation::Kernel { threads, duration } => {
                    driver.count_kernel(lane.gpu, threads);
                    kernels.0 += duration;
                }
                Operation::Nothing => {}
                operation => {
                    flush(&mut kernels)?;
                    self.submit(driver, of, lane, &operation)?;
                }
            }
        }
        if kernels.0 > 0 { flush(&mut kernels) } else { Ok(()) }
    }

    /// A stream has room again some time after this; nobody needs to know the microsecond.
    fn wait_roughly(&self, driver: &Driver, mut inner: MutexGuard<'_, Inner>, gpu: usize, point: Point) {
        let soonest = inner.at(driver, gpu, |lanes| lanes.soonest(&[point]));
        drop(inner);
        if let Some(soonest) = soonest {
            thread::sleep(
                Duration::from_nanos(soonest.saturating_sub(now())).max(Duration::from_micros(100)),
            );
        }
    }

    /// Waits until all of this is done, as `which` says it.
    fn wait(&self, driver: &Driver, gpu: usize, which: impl FnOnce(&Lanes) -> Vec<Point>) -> Outcome {
        let mut inner = self.lock();
        let points = if inner.idle(gpu) { vec![] } else { inner.at(driver, gpu, |lanes| which(lanes)) };
        loop {
            if points.is_empty() {
                break;
            }
            let (soonest, gates) =
                inner.at(driver, gpu, |lanes| (lanes.soonest(&points), lanes.timeline.has_gates()));
            let Some(soonest) = soonest else { break };
            if gates {
                // The driver's thread says when it has done something.
                let least = Duration::from_micros(50);
                let time = Duration::from_nanos(soonest.saturating_sub(now())).max(least);
                let waited = self.changed.wait_timeout(inner, time);
                inner = waited.unwrap_or_else(PoisonError::into_inner).0;
            } else {
                drop(inner);
                sleep_until(soonest);
                inner = self.lock();
            }
        }
        inner.failed.take().map_or(Ok(()), Err)
    }

    /// Waits until a stream has nothing to do.
    pub(crate) fn wait_for_stream(&self, driver: &Driver, lane: &Lane) -> Outcome {
        self.wait(driver, lane.gpu, |lanes| lanes.tails(lane))
    }

    /// Waits until all streams of a context have nothing to do.
    pub(crate) fn wait_for_context(&self, driver: &Driver, context: &'static Context) -> Outcome {
        self.wait(driver, context.gpu, |lanes| lanes.tails_of(context.handle()))
    }

    /// An error where a stream has something to do.
    pub(crate) fn query_stream(&self, driver: &Driver, lane: &Lane) -> Outcome {
        let mut inner = self.lock();
        let idle = inner.idle(lane.gpu) || inner.at(driver, lane.gpu, |lanes| lanes.tails(lane).is_empty());
        if idle { Ok(()) } else { Err(NOT_READY) }
    }

    /// An event happens now.
    pub(crate) fn happens(&self, event: u64) {
        let mut inner = self.lock();
        if let Some(before) = inner.events.insert(event, Recorded { token: 0, place: None, at: now() }) {
            inner.marks.remove(&before.token);
        }
    }

    /// Where an event stands that has not happened.
    fn pending(inner: &mut Inner, driver: &Driver, event: u64) -> Option<(usize, Point)> {
        let (gpu, _) = inner.events.get(&event)?.place?;
        inner.at(driver, gpu, |_| ());
        inner.events.get(&event)?.place
    }

    /// An error where an event was recorded and has not happened.
    pub(crate) fn query_event(&self, driver: &Driver, event: u64) -> Outcome {
        if Self::pending(&mut self.lock(), driver, event).is_some() { Err(NOT_READY) } else { Ok(()) }
    }

    /// When an event happened, in nanoseconds.
    pub(crate) fn event_time(&self, driver: &Driver, event: u64) -> Outcome<u64> {
        let mut inner = self.lock();
        if Self::pending(&mut inner, driver, event).is_some() {
            return Err(NOT_READY);
        }
        inner.events.get(&event).map(|recorded| recorded.at).ok_or(INVALID_HANDLE)
    }

    /// Waits until an event has happened.
    pub(crate) fn wait_for_event(&self, driver: &Driver, event: u64) -> Outcome {
        let place = Self::pending(&mut self.lock(), driver, event);
        place.map_or(Ok(()), |(gpu, point)| self.wait(driver, gpu, |_| vec![point]))
    }

    /// A stream goes on only after an event.
    pub(crate) fn order(&self, driver: &Driver, lane: &Lane, event: u64) -> Outcome {
        let mut inner = self.lock();
        let Some((gpu, point)) = Self::pending(&mut inner, driver, event) else { return Ok(()) };
        if gpu != lane.gpu {
            // Of another GPU's events, the calling thread waits for the end.
            drop(inner);
            return self.wait(driver, gpu, |_| vec![point]);
        }
        inner.at(driver, gpu, |lanes| {
            let stream = lanes.stream(lane);
            let mut after = lanes.before(lane);
            after.push(point);
            lanes.timeline.mark(stream, 0, after);
        });
        Ok(())
    }

    /// An event is no more.
    pub(crate) fn forget_event(&self, event: u64) {
        let mut inner = self.lock();
        if let Some(recorded) = inner.events.remove(&event) {
            inner.marks.remove(&recorded.token);
        }
    }

    /// The program gives a stream nothing more to do.
    pub(crate) fn forget_stream(&self, stream: u64) {
        self.forget(|lane| lane.key.0 == stream && lane.key.1 == 0);
    }

    /// A context is no more.
    pub(crate) fn forget_context(&self, context: context::Handle) {
        self.forget(|lane| lane.context == context);
    }

    fn forget(&self, which: impl Fn(&Lane) -> bool) {
        for lanes in self.lock().gpus.values_mut() {
            let timeline = &mut lanes.timeline;
            lanes.streams.retain(|_, known| {
                let goes = which(&known.lane);
                if goes {
                    timeline.close(known.stream);
                }
                !goes
            });
        }
    }

    /// Lets the driver's thread look.
    fn start(&self, inner: &mut Inner, driver: &'static Driver) {
        if !inner.has_thread {
            let thread = thread::Builder::new().name("cuda-sim".into());
            inner.has_thread = thread.spawn(move || driver.work.serve(driver)).is_ok();
        }
        self.changed.notify_all();
    }

    /// The driver's thread.
    fn serve(&self, driver: &'static Driver) {
        let mut inner = self.lock();
        loop {
            let mut gpus: Vec<usize> = inner.gates.values().map(|gate| gate.gpu).collect();
            gpus.dedup();
            for gpu in gpus {
                inner.at(driver, gpu, |_| ());
            }
            let reached = inner.gates.iter().find(|(_, gate)| gate.reached).map(|(token, _)| *token);
            if let Some(gate) = reached.and_then(|token| inner.gates.remove(&token)) {
                drop(inner);
                let outcome = perform(gate.context, &gate.operation);
                inner = self.lock();
                if let Err(error) = outcome {
                    inner.failed.get_or_insert(error);
                }
                inner.at(driver, gate.gpu, |lanes| lanes.timeline.pass(gate.point.stream));
                self.changed.notify_all();
                continue;
            }
            let soonest = |gate: &Gate| inner.gpus.get(&gate.gpu)?.soonest(&[gate.point]);
            let soonest = inner.gates.values().filter_map(soonest).min();
            inner = match soonest {
                Some(time) => {
                    let least = Duration::from_micros(100);
                    let time = Duration::from_nanos(time.saturating_sub(now())).max(least);
                    self.changed.wait_timeout(inner, time).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}
