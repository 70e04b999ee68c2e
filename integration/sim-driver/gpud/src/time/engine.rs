//! A whole GPU in virtual time: what processes submit, and when it is done. For tests and benches that step the time; the
//! driver uses the same two parts with the machine's clock.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

use super::{
    TURN_NS,
    timeline::{Point, Reached, Timeline},
    turns::{Settings, Stretch, Turns},
};

/// Processes of an engine.
pub const PROCESSES: usize = 128;

/// Something that was submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Work {
    process: usize,
    point: Point,
    token: u64,
}

#[derive(Default)]
struct Process {
    timeline: Timeline,
    streams: HashMap<u64, usize>,
    seen: u64,
}

impl Process {
    /// Goes through the times that the process had, and notes what was done when.
    fn collect(&mut self, now: u64, stretches: &[Stretch], done: &mut HashMap<u64, u64>) {
        for (reached, _) in self.timeline.take_reached() {
            if let Reached::Mark(token) = reached {
                done.insert(token, now);
            }
        }
        for stretch in stretches {
            self.timeline.advance(stretch.after);
            for (reached, at) in self.timeline.take_reached() {
                if let Reached::Mark(token) = reached {
                    done.insert(token, stretch.when(at));
                }
            }
        }
    }
}

/// A GPU, its processes and the time.
pub struct Engine {
    turns: Box<Turns<PROCESSES>>,
    processes: BTreeMap<usize, Process>,
    done: HashMap<u64, u64>,
    next: u64,
}

impl Engine {
    /// A GPU that nobody uses, at time 0.
    pub fn new(settings: Settings) -> Self {
        Self {
            turns: Box::new(Turns::new(settings)),
            processes: BTreeMap::new(),
            done: HashMap::new(),
            next: 0,
        }
    }

    /// The time.
    pub fn now(&self) -> u64 {
        self.turns.now()
    }

    /// Gives a stream of a process (below [`PROCESSES`]) a kernel that takes `duration` nanoseconds of the whole GPU. `now` is not
    /// before the present time. With a duration of 0 it is an event: it only marks its place in the stream.
    pub fn submit(&mut self, process: usize, stream: u64, duration: u64, now: u64) -> Work {
        self.submit_after(process, stream, duration, &[], now)
    }

    /// The same, for work that also waits for other work of the process: cross-stream waits, and the nodes of a graph.
    pub fn submit_after(
        &mut self,
        process: usize,
        stream: u64,
        duration: u64,
        after: &[Work],
        now: u64,
    ) -> Work {
        let after = after.iter().filter(|work| work.process == process).map(|work| work.point).collect();
        self.next += 1;
        let token = self.next;
        let point = self.give(process, stream, now, |timeline, stream, _| {
            timeline.work(stream, duration, after);
            timeline.mark(stream, token, vec![])
        });
        Work { process, point, token }
    }

    /// The same for a kernel of which nobody asks when it is done.
    pub fn launch(&mut self, process: usize, stream: u64, duration: u64, now: u64) {
        self.give(process, stream, now, |timeline, stream, _| timeline.work(stream, duration, vec![]));
    }

    /// Records an event, as the driver does: in a stream that has nothing to do it waits for its process's turn, where another
    /// one has the GPU.
    pub fn record(&mut self, process: usize, stream: u64, now: u64) -> Work {
        self.next += 1;
        let token = self.next;
        let point = self.give(process, stream, now, |timeline, stream, away| {
            if away && timeline.pending(stream) == 0 {
                timeline.work(stream, TURN_NS, vec![]);
            }
            timeline.mark(stream, token, vec![])
        });
        Work { process, point, token }
    }

    /// Gives a process's stream something, with word of whether another process has the GPU.
    fn give(
        &mut self,
        process: usize,
        stream: u64,
        now: u64,
        what: impl FnOnce(&mut Timeline, usize, bool) -> Point,
    ) -> Point {
        assert!(process < PROCESSES, "process {process}: an engine has {PROCESSES}");
        self.advance(now);
        let away = self.turns.has_it().is_some_and(|holder| holder != process);
        let own = self.processes.entry(process).or_default();
        let timeline = &mut own.timeline;
        let stream = *own.streams.entry(stream).or_insert_with(|| timeline.open());
        let point = what(timeline, stream, away);
        self.turns.want(process, timeline.now() + timeline.runnable());
        // What takes no time may be done already.
        own.collect(self.turns.now(), &[], &mut self.done);
        point
    }

    /// When work was done; none while it is not, and for work of a process that ended before.
    pub fn done(&self, work: Work) -> Option<u64> {
        self.done.get(&work.token).copied()
    }

    /// Nobody will ask for this work again, which is done.
    pub fn forget(&mut self, work: Work) {
        self.done.remove(&work.token);
    }

    /// Whether a process has anything to do.
    pub fn is_busy(&self, process: usize) -> bool {
        self.processes.get(&process).is_some_and(|own| !own.timeline.is_idle())
    }

    /// Numbers of the samples of utilization that are over and kept, as NVML tells them.
    pub fn samples(&self) -> Range<u64> {
        self.turns.samples()
    }

    /// Nanoseconds of a sample in which a process had the GPU.
    pub fn sample(&self, process: usize, number: u64) -> u64 {
        self.turns.sample(Some(process), number)
    }

    /// Work that a stream has to do of what was submitted, which has a mark behind it each.
    pub fn outstanding(&self, process: usize, stream: u64) -> usize {
        self.pending(process, stream).div_ceil(2)
    }

    /// Kernels and marks that a stream has to do; where this is `QUEUE`, a launch would have to wait.
    pub fn pending(&self, process: usize, stream: u64) -> usize {
        let pending = |own: &Process| Some(own.timeline.pending(*own.streams.get(&stream)?));
        self.processes.get(&process).and_then(pending).unwrap_or(0)
    }

    /// Nanoseconds of GPU time that a process has had.
    pub fn busy(&self, process: usize) -> u64 {
        self.turns.had(process)
    }

    /// The next time at which something happens, if nothing is submitted.
    pub fn next_event(&self) -> Option<u64> {
        let stop = self.turns.next_stop()?;
        let done = |(process, own): (&usize, &Process)| {
            let next = own.timeline.next()?;
            Some(self.turns.soonest(*process, own.timeline.now() + next))
        };
        // Of those that do not have the GPU, only a time that is too soon is known; its turn begins with a stop.
        let holder = self.turns.has_it();
        let first = holder.and_then(|holder| done((&holder, self.processes.get(&holder)?)));
        Some(first.map_or(stop, |first| first.min(stop)))
    }

    /// The time goes on; not before the present time.
    pub fn advance(&mut self, to: u64) {
        while self.now() < to {
            let stop = self.turns.next_stop().map_or(to, |stop| stop.clamp(self.now() + 1, to));
            self.turns.advance(stop);
            for (process, own) in &mut self.processes {
                // It has had nothing since.
                if self.turns.had(*process) == own.timeline.now() {
                    continue;
                }
                let (stretches, logged) = self.turns.stretches(*process, own.seen.saturating_sub(1));
                let stretches: Vec<_> = stretches.collect();
                own.seen = logged;
                own.collect(self.turns.now(), &stretches, &mut self.done);
            }
        }
    }

    /// A process dies: what it had not done is never done.
    pub fn end(&mut self, process: usize, now: u64) {
        self.advance(now);
        self.turns.drop_work(process);
        self.processes.remove(&process);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const US: u64 = 1_000;
    const MS: u64 = 1_000_000;

    fn engine() -> Engine {
        Engine::new(Settings { slice: 2 * MS, switch: 10 * US })
    }

    /// Steps from event to event until nothing happens any more.
    fn run(engine: &mut Engine) {
        while let Some(next) = engine.next_event() {
            engine.advance(next);
        }
    }

    #[test]
    fn a_stream_does_one_kernel_after_the_other() {
        let mut engine = engine();
        let all: Vec<Work> = (0..3).map(|_| engine.submit(0, 1, 5 * US, 0)).collect();
        assert_eq!(engine.outstanding(0, 1), 3);
        run(&mut engine);
        let done: Vec<_> = all.iter().map(|work| engine.done(*work).unwrap()).collect();
        // The first switch to the process comes before all.
        assert_eq!(done, [15 * US, 20 * US, 25 * US]);
        assert_eq!((engine.busy(0), engine.outstanding(0, 1)), (15 * US, 0));
    }

    #[test]
    fn streams_of_a_process_share_evenly_and_finish_together() {
        let mut engine = engine();
        let long = engine.submit(0, 1, 3 * MS, 0);
        let short = engine.submit(0, 2, MS, 0);
        run(&mut engine);
        assert_eq!(engine.done(short), Some(2 * MS + 10 * US));
        assert_eq!(engine.done(long), Some(4 * MS + 10 * US));
    }

    #[test]
    fn work_waits_for_work_of_another_stream() {
        let mut engine = engine();
        let first = engine.submit(0, 1, MS, 0);
        let second = engine.submit_after(0, 2, MS, &[first], 0);
        let event = engine.submit_after(0, 3, 0, &[second], 0);
        run(&mut engine);
        assert_eq!(engine.done(second), Some(2 * MS + 10 * US));
        assert_eq!(engine.done(event), engine.done(second));
    }

    #[test]
    fn processes_take_turns_and_pay_for_the_switch() {
        let mut engine = engine();
        let one = engine.submit(0, 1, 4 * MS, 0);
        let other = engine.submit(1, 1, 4 * MS, 0);
        run(&mut engine);
        // One has 10 µs + 2 ms, the other the same, and so on.
        assert_eq!(engine.done(one), Some(6 * MS + 30 * US));
        assert_eq!(engine.done(other), Some(8 * MS + 40 * US));
    }

    #[test]
    fn who_comes_to_a_busy_gpu_waits_for_the_end_of_a_slice() {
        let mut engine = engine();
        engine.submit(0, 1, 100 * MS, 0);
        let late = engine.submit(1, 1, MS, 10 * MS + 500 * US);
        run(&mut engine);
        assert_eq!(engine.done(late), Some(10 * US + 12 * MS + 10 * US + MS));
    }

    #[test]
    fn a_process_that_dies_leaves_the_gpu_at_once() {
        let mut engine = engine();
        let lost = engine.submit(0, 1, 1000 * MS, 0);
        let kept = engine.submit(1, 1, MS, 0);
        engine.end(0, MS);
        run(&mut engine);
        assert_eq!(engine.done(lost), None);
        assert_eq!(engine.done(kept), Some(2 * MS + 10 * US));
        assert_eq!(engine.busy(0), MS - 10 * US);
    }

    /// Process, stream, duration, pause before it in microseconds.
    fn submissions() -> impl Strategy<Value = Vec<(usize, u64, u64, u64)>> {
        prop::collection::vec((0..4_usize, 0..3_u64, 0..5_000_u64, 0..2_000_u64), 1..60)
    }

    proptest! {
        #[test]
        fn all_work_is_done_in_order_and_takes_just_its_time(
            all in submissions(), steps in prop::collection::vec(1..3_000_u64, 0..50),
        ) {
            let mut engine = engine();
            let mut now = 0;
            let mut given = [0_u64; 4];
            let mut submitted = vec![];
            let mut steps = steps.into_iter();
            for (process, stream, duration, pause) in all {
                now += pause * US;
                // Looking in between changes nothing but the rounding.
                if let Some(step) = steps.next() {
                    engine.advance(engine.now().max(now.saturating_sub(step)));
                }
                let work = engine.submit(process, stream, duration * US, now);
                given[process] += duration * US;
                submitted.push((process, stream, work, now));
            }
            run(&mut engine);
            for (process, given) in given.into_iter().enumerate() {
                prop_assert_eq!(engine.busy(process), given);
            }
            let mut last: HashMap<(usize, u64), u64> = HashMap::new();
            for (process, stream, work, at) in submitted {
                let done = engine.done(work).unwrap();
                prop_assert!(done >= at);
                let before = last.insert((process, stream), done).unwrap_or(0);
                prop_assert!(done >= before);
            }
            // No two processes at once, and never idle with work: it ends no later than all work and switches in a row.
            let end = last.values().max().copied().unwrap_or(0);
            let total: u64 = given.iter().sum();
            prop_assert!(end <= now + total + (total / (2 * MS) + 60) * 10 * US);
        }

        #[test]
        fn busy_processes_have_the_same_time(count in 2..8_usize, kernel in 1..3_000_u64) {
            let mut engine = engine();
            for process in 0..count {
                for _ in 0..(400_000 / kernel) {
                    engine.submit(process, 0, kernel * US, 0);
                }
            }
            engine.advance(300 * MS);
            let had: Vec<u64> = (0..count).map(|process| engine.busy(process)).collect();
            let (least, most) = (had.iter().min().unwrap(), had.iter().max().unwrap());
            prop_assert!(most - least <= 2 * MS, "{had:?}");
            // What is not theirs went to switches.
            let switches = (300 / 2 + 1) * 10 * US;
            prop_assert!(had.iter().sum::<u64>() + switches >= 300 * MS);
        }

        // Where whole microseconds meet, the nanoseconds that looking often shifts would decide who has the next turn; so
        // these are drawn to the nanosecond.
        #[test]
        fn looking_often_changes_times_by_less_than_a_microsecond(
            all in prop::collection::vec((0..4_usize, 0..3_u64, 0..5 * MS, 0..2 * MS), 1..60), step in 1..700_u64,
        ) {
            let (mut seldom, mut often) = (engine(), engine());
            let mut now = 0;
            let mut works = vec![];
            for (process, stream, duration, pause) in all {
                now += pause;
                while often.now() + step * US < now {
                    often.advance(often.now() + step * US);
                }
                let one = seldom.submit(process, stream, duration, now);
                works.push((one, often.submit(process, stream, duration, now)));
            }
            let end = now + 1_000 * MS;
            seldom.advance(end);
            while often.now() < end {
                often.advance((often.now() + step * US).min(end));
            }
            for (one, other) in works {
                let (one, other) = (seldom.done(one).unwrap(), often.done(other).unwrap());
                prop_assert!(one.abs_diff(other) < US, "{one} {other}");
            }
        }
    }
}
