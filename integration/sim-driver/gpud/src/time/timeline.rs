//! What happens in the time that one process has a GPU. The time here is the GPU's time that the process has had, in
//! nanoseconds: it stands still while others have the GPU.
//!
//! A stream does one thing after the other. Streams run at once; those with a kernel to run share the time evenly, to the
//! nanosecond: in sum they get exactly what the process gets.

use std::collections::VecDeque;

/// A place in a stream's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Point {
    /// The stream.
    pub stream: usize,
    /// How many things the stream has done when this one is done.
    pub number: u64,
}

#[derive(Debug)]
enum Kind {
    /// Takes so much time.
    Work { left: u64 },
    /// Is told when it is reached.
    Mark { token: u64 },
    /// Is told when it is reached, and stops the stream until it is opened.
    Gate { token: u64, told: bool },
}

#[derive(Debug)]
struct Item {
    kind: Kind,
    after: Vec<Point>,
    /// All work of the stream up to this.
    total: u64,
}

#[derive(Debug, Default)]
struct Stream {
    queue: VecDeque<Item>,
    done: u64,
    /// All work that it was given, and what of it is done.
    given: u64,
    worked: u64,
    /// Whether its first item is work that runs.
    running: bool,
    closed: bool,
}

/// What was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// A mark.
    Mark(u64),
    /// A gate, which must be opened.
    Gate(u64),
}

/// A process's streams on a GPU.
#[derive(Debug, Default)]
pub struct Timeline {
    now: u64,
    streams: Vec<Stream>,
    free: Vec<usize>,
    /// Streams whose first item is work that runs.
    running: Vec<usize>,
    /// Streams that have something to do and cannot.
    stalled: Vec<usize>,
    /// Work that is not done.
    left: u64,
    gates: usize,
    items: usize,
    reached: Vec<(Reached, u64)>,
}

impl Timeline {
    /// A new stream.
    pub fn open(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.streams.push(Stream::default());
            self.streams.len() - 1
        })
    }

    /// A stream gets nothing more to do. What it has is done.
    pub fn close(&mut self, stream: usize) {
        self.streams[stream].closed = true;
        self.forget(stream);
    }

    fn forget(&mut self, stream: usize) {
        let at = &mut self.streams[stream];
        if at.closed && at.queue.is_empty() {
            // Its numbers go on, so that old points stay done.
            at.closed = false;
            self.free.push(stream);
        }
    }

    /// GPU time that the process has had.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Whether nothing is to be done.
    pub fn is_idle(&self) -> bool {
        self.items == 0
    }

    /// Whether a gate is among what is to be done.
    pub fn has_gates(&self) -> bool {
        self.gates > 0
    }

    /// Things that a stream has to do.
    pub fn pending(&self, stream: usize) -> usize {
        self.streams[stream].queue.len()
    }

    /// The place of the last thing that a stream was given; none where it has nothing to do.
    pub fn tail(&self, stream: usize) -> Option<Point> {
        let at = &self.streams[stream];
        (!at.queue.is_empty()).then(|| Point { stream, number: at.done + at.queue.len() as u64 })
    }

    /// The place that leaves `items` things to do in a stream.
    pub fn before_last(&self, stream: usize, items: usize) -> Option<Point> {
        let at = &self.streams[stream];
        let behind = at.queue.len().checked_sub(items).filter(|behind| *behind > 0)?;
        Some(Point { stream, number: at.done + behind as u64 })
    }

    /// Whether a place is reached and done.
    pub fn is_done(&self, point: Point) -> bool {
        self.streams.get(point.stream).is_none_or(|stream| stream.done >= point.number)
    }

    /// The least GPU time that the process must still have for a place to be done.
    pub fn at_least(&self, point: Point) -> u64 {
        let Some(stream) = self.streams.get(point.stream) else { return 0 };
        let Some(behind) = point.number.checked_sub(stream.done + 1) else { return 0 };
        let item = usize::try_from(behind).ok().and_then(|behind| stream.queue.get(behind));
        item.map_or(0, |item| item.total - stream.worked)
    }

    /// Gives a stream work, to be done after what it has to do, and after other places.
    pub fn work(&mut self, stream: usize, duration: u64, after: Vec<Point>) -> Point {
        self.push(stream, Kind::Work { left: duration }, after)
    }

    /// Gives a stream a mark.
    pub fn mark(&mut self, stream: usize, token: u64, after: Vec<Point>) -> Point {
        self.push(stream, Kind::Mark { token }, after)
    }

    /// Gives a stream a gate.
    pub fn gate(&mut self, stream: usize, token: u64, after: Vec<Point>) -> Point {
        self.gates += 1;
        self.push(stream, Kind::Gate { token, told: false }, after)
    }

    fn push(&mut self, stream: usize, kind: Kind, mut after: Vec<Point>) -> Point {
        after.retain(|point| point.stream != stream && !self.is_done(*point));
        let at = &mut self.streams[stream];
        if let Kind::Work { left } = kind {
            at.given += left;
            self.left += left;
        }
        at.queue.push_back(Item { kind, after, total: at.given });
        self.items += 1;
        let point = Point { stream, number: at.done + at.queue.len() as u64 };
        if at.queue.len() == 1 {
            self.settle(stream);
        }
        point
    }

    /// Opens the gate that a stream stands before.
    pub fn pass(&mut self, stream: usize) {
        if let Some(Item { kind: Kind::Gate { told: true, .. }, .. }) = self.streams[stream].queue.front() {
            self.gates -= 1;
            self.complete(stream);
            self.settle(stream);
        }
    }

    fn complete(&mut self, stream: usize) {
        let at = &mut self.streams[stream];
        at.queue.pop_front();
        at.done += 1;
        self.items -= 1;
    }

    /// Does what takes no time, in a stream and in those that wait for it.
    fn settle(&mut self, stream: usize) {
        self.settle_one(stream);
        while !self.stalled.is_empty() {
            let mut moved = false;
            for stream in std::mem::take(&mut self.stalled) {
                moved |= self.settle_one(stream);
            }
            if !moved {
                break;
            }
        }
    }

    /// The same in one stream; true where it has done something.
    fn settle_one(&mut self, stream: usize) -> bool {
        let begun = self.streams[stream].done;
        loop {
            let at = &self.streams[stream];
            let Some(item) = at.queue.front() else {
                self.forget(stream);
                break;
            };
            if !item.after.iter().all(|point| self.is_done(*point)) {
                self.stalled.push(stream);
                break;
            }
            let at = &mut self.streams[stream];
            match &mut at.queue[0].kind {
                Kind::Work { left: 0 } => self.complete(stream),
                Kind::Work { .. } => {
                    if !at.running {
                        at.running = true;
                        self.running.push(stream);
                    }
                    break;
                }
                Kind::Mark { token } => {
                    let reached = Reached::Mark(*token);
                    self.reached.push((reached, self.now));
                    self.complete(stream);
                }
                Kind::Gate { token, told } => {
                    if !std::mem::replace(told, true) {
                        self.reached.push((Reached::Gate(*token), self.now));
                    }
                    break;
                }
            }
        }
        self.streams[stream].done != begun
    }

    /// What is left of the kernel that runs and has the least left.
    fn least(&self) -> Option<u64> {
        let left = |at: &usize| match self.streams[*at].queue.front() {
            Some(Item { kind: Kind::Work { left }, .. }) => *left,
            _ => 0,
        };
        self.running.iter().map(left).min()
    }

    /// GPU time after which the next kernel is done.
    pub fn next(&self) -> Option<u64> {
        Some(self.least()?.saturating_mul(self.running.len() as u64))
    }

    /// The process has had so much GPU time.
    pub fn advance(&mut self, to: u64) {
        while self.now < to {
            let Some(least) = self.least() else {
                self.now = to;
                return;
            };
            let (count, time) = (self.running.len() as u64, to - self.now);
            // All get the same; what is left of a nanosecond for each goes to the first of them.
            let (each, rest) = match least.checked_mul(count) {
                Some(whole) if whole <= time => (least, 0),
                _ => (time / count, time % count),
            };
            let mut ended = false;
            for (at, stream) in self.running.iter().enumerate() {
                let share = each + u64::from((at as u64) < rest);
                let stream = &mut self.streams[*stream];
                stream.worked += share;
                if let Some(Item { kind: Kind::Work { left }, .. }) = stream.queue.front_mut() {
                    *left -= share;
                    ended |= *left == 0;
                }
            }
            let passed = each * count + rest;
            self.now += passed;
            self.left -= passed;
            if ended {
                self.retire();
            } else {
                // Who was first is last the next time.
                let turn = usize::try_from(rest).unwrap_or(0);
                self.running.rotate_left(turn);
            }
        }
    }

    /// Takes out what has run to its end, and lets what follows begin.
    fn retire(&mut self) {
        let mut ended = vec![];
        let streams = &mut self.streams;
        self.running.retain(|at| {
            let done = matches!(streams[*at].queue.front(), Some(Item { kind: Kind::Work { left: 0 }, .. }));
            if done {
                streams[*at].running = false;
                ended.push(*at);
            }
            !done
        });
        for stream in ended {
            self.complete(stream);
            self.settle(stream);
        }
    }

    /// What was reached since the last call, and at what time.
    pub fn take_reached(&mut self) -> Vec<(Reached, u64)> {
        std::mem::take(&mut self.reached)
    }

    /// GPU time that the process can use before something from outside must happen: all its work, but for what stands
    /// behind a gate.
    pub fn runnable(&self) -> u64 {
        if self.gates == 0 {
            return self.left;
        }
        // How many items of each stream can be done with all gates shut.
        let mut free: Vec<usize> = vec![0; self.streams.len()];
        loop {
            let mut moved = false;
            for (at, stream) in self.streams.iter().enumerate() {
                while let Some(item) = stream.queue.get(free[at]) {
                    let reachable = |point: &Point| {
                        let stream = &self.streams[point.stream];
                        stream.done + free[point.stream] as u64 >= point.number
                    };
                    if matches!(item.kind, Kind::Gate { .. }) || !item.after.iter().all(reachable) {
                        break;
                    }
                    free[at] += 1;
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        let of = |(stream, free): (&Stream, &usize)| {
            let last = free.checked_sub(1).and_then(|last| stream.queue.get(last));
            last.map_or(0, |item| item.total - stream.worked)
        };
        self.streams.iter().zip(&free).map(of).sum()
    }

    /// All work that is not done.
    pub fn left(&self) -> u64 {
        self.left
    }
}
