//! When a launch may go, and what it took: the part of pacing that is only thought. It knows no driver and no clock;
//! the time is a parameter, and marks in streams are what [`Marks`] says of them.
//!
//! Launches in a stream form *batches*. A mark in the stream behind each batch tells when it ended; one before it when it
//! began, unless the batch before it was still under way: then it began when that one ended. What a batch takes is
//! learnt by function, never guessed from its grid. A batch is short; a function that is not known yet gets one of its
//! own. Where launches come one by one, so do batches: a mark that is only made at the next launch would count the
//! time in between.

#![forbid(unsafe_code)]

use region::{Budget, SLOT_NS, Terms};

/// Batches under way at a time, in one process on one GPU.
pub const BATCHES: usize = 64;

/// Work that may be queued, in nanoseconds of GPU time, where two kernels are not longer.
const QUEUED_NS: u64 = 2 * SLOT_NS;

/// So long queued work may last beyond the slots where a kernel that is too long for them follows it.
const LAST_NS: u64 = SLOT_NS / 10;

/// What a batch may be expected to take before it is closed.
const BATCH_NS: u64 = 250_000;

/// Launches of a batch.
const BATCH_LAUNCHES: u32 = 64;

/// Launches further apart are not of one batch: the GPU may have been idle in between.
const GAP_NS: u64 = 100_000;

/// What a function that has never been measured is thought to take.
const UNKNOWN_NS: u64 = 100_000;

/// So long a launch waits for queued work that does not end, besides twice what that should take: it may wait for this
/// very launch.
const PATIENCE_NS: u64 = 20_000_000;

/// So long a launch waits for another of the same function of which nobody knows how long it takes.
const UNSURE_PATIENCE_NS: u64 = 1_000_000_000;

/// So long a launch waits for a budget that queued work without an end uses up: the same.
const LONG_PATIENCE_NS: u64 = 5_000_000_000;

/// Launches beside others that a function's time is the mean of.
const MEAN_OF: u32 = 64;

/// Functions whose times are remembered.
const FUNCTIONS: usize = 512;

/// A mark that was put into a stream, if `event` is not 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// What the driver knows it by.
    pub event: u64,
    /// CLOCK_MONOTONIC in nanoseconds right before it was put there; 0 if it was not.
    pub put_ns: u64,
}

/// What becomes of marks.
pub trait Marks {
    /// CLOCK_MONOTONIC in nanoseconds at which work in the stream passed the mark; none if it had not at the moment
    /// `now_ns`, or not when it was looked at, which may be later.
    fn passed(&mut self, context: u64, mark: &mut Mark, now_ns: u64) -> Option<u64>;
}

/// Where work is done in order: a stream of a context, and where the stream has a different meaning in each thread, a
/// thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lane {
    /// The stream's context.
    pub context: u64,
    /// The stream.
    pub stream: u64,
    /// 0 for a stream that all threads mean.
    pub thread: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
enum Stage {
    #[default]
    Free = 0,
    /// A launch is on its way to the driver.
    Launching,
    /// The next launch may join.
    Open,
    /// Its end is about to be marked.
    Closing,
    Closed,
}

/// All zero is a free one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Batch {
    stage: Stage,
    /// Number of the batch before it in its lane, plus one, while that is under way.
    after: u8,
    /// Where its work is.
    pub lane: Lane,
    /// Context that the marks' events belong to, if there are any.
    pub events_of: u64,
    /// Before its first launch, where it does not follow a batch that is under way.
    pub start: Mark,
    /// Behind its last launch.
    pub end: Mark,
    /// When it began; 0 while that is not known.
    begun_ns: u64,
    /// When its first launch had been made; 0 before. Until then a driver that loads the function has the GPU do nothing.
    first_ns: u64,
    /// When its last launch was made.
    last_ns: u64,
    launches: u32,
    /// What it was thought to take.
    expected_ns: u64,
    /// What has been counted of it.
    counted_ns: u64,
    /// What is left of that taken from the budget for it.
    taken: u64,
    /// The function of it that takes the longest, how often, and what all others should take.
    function: u64,
    function_ns: u64,
    function_launches: u32,
    others_ns: u64,
    /// Batches count up.
    number: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Function {
    key: u64,
    /// GPU time that a launch takes, in nanoseconds.
    ns: u64,
    /// Nanoseconds from its start to its end, which is longer where others run beside it.
    wall_ns: u64,
}

/// A batch that lasted longer than the slots in which it began.
#[derive(Clone, Copy, Debug)]
struct Beyond {
    /// How much of its time was within its container's slots.
    within_ns: u64,
    /// The longest row of them.
    row_ns: u64,
}

/// A launch that wants to go.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Where.
    pub lane: Lane,
    /// What is launched: a function, or a graph.
    pub function: u64,
    /// When it first asked.
    pub asked_ns: u64,
}

/// What holds around a question.
pub struct Around<'a, M, O> {
    /// CLOCK_MONOTONIC in nanoseconds.
    pub now_ns: u64,
    /// What holds for the container.
    pub terms: &'a Terms,
    /// The container's.
    pub budget: Budget<'a>,
    /// What became of the process's marks.
    pub marks: &'a mut M,
    /// Since when other processes of the container have work under way.
    pub others: O,
}

/// An answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Launch, and say so by [`Gate::launched`]; before that mark the start of the batch, if it `starts`.
    Go {
        /// Number of its batch.
        batch: usize,
        /// It is the first of that, and no other is under way before it.
        starts: bool,
        /// What was taken from the budget for it.
        taken: u64,
        /// Whether its function has been measured.
        known: bool,
    },
    /// Launch; there is no telling what it takes.
    GoUnmeasured,
    /// Mark the end of this batch, say so by [`Gate::closed`], and ask again.
    Close(usize),
    /// Ask again after so many nanoseconds. Batches should be closed meanwhile.
    Wait(u64),
}

/// What a process knows of its work on one GPU. All zero at first.
pub struct Gate {
    batches: [Batch; BATCHES],
    functions: [Function; FUNCTIONS],
    /// Batches that were ever used: the first so many.
    used: usize,
    /// Of these, the ones that are not free.
    active: u32,
    /// Launches that make a batch now.
    length: u32,
    last_number: u64,
    /// When a batch last ended.
    moved_ns: u64,
    /// The budget has refused a launch, and has let none go since.
    rests: bool,
    /// When the dead were last looked for.
    pub reaped_ns: u64,
}

impl Default for Gate {
    /// One that has seen nothing.
    fn default() -> Self {
        Self {
            batches: [Batch::default(); BATCHES],
            functions: [Function::default(); FUNCTIONS],
            used: 0,
            active: 0,
            length: 0,
            last_number: 0,
            moved_ns: 0,
            rests: false,
            reaped_ns: 0,
        }
    }
}

impl Gate {
    /// Whether any work may be under way.
    pub fn is_active(&self) -> bool {
        self.active > 0
    }

    /// A batch that [`Answer`] named.
    pub fn batch(&mut self, batch: usize) -> &mut Batch {
        &mut self.batches[batch % BATCHES]
    }

    /// All of them.
    pub fn batches(&mut self) -> impl Iterator<Item = &mut Batch> {
        self.batches.iter_mut()
    }

    /// Those that are not free.
    fn under_way(&self) -> impl Iterator<Item = (usize, &Batch)> {
        self.batches[..self.used].iter().enumerate().filter(|(_, batch)| batch.stage != Stage::Free)
    }

    fn under_way_mut(&mut self) -> impl Iterator<Item = (usize, &mut Batch)> {
        self.batches[..self.used].iter_mut().enumerate().filter(|(_, batch)| batch.stage != Stage::Free)
    }

    /// May `launch` go?
    pub fn ask<M: Marks, O: Fn() -> Option<u64>>(
        &mut self,
        launch: &Launch,
        around: &mut Around<'_, M, O>,
    ) -> Answer {
        let (now, terms) = (around.now_ns, around.terms);
        match terms.slots.wait_from(now, terms.slot_ns) {
            Some(0) => {}
            wait => {
                self.poll(around);
                return Answer::Wait(wait.unwrap_or(SLOT_NS));
            }
        }
        let function = self.function(launch.function);
        let (known, expected, wall) = function
            .map_or((false, UNKNOWN_NS, UNKNOWN_NS), |function| (true, function.ns, function.wall_ns));

        let mut current = self.last_in(launch.lane);
        let joins = current.is_some_and(|at| {
            let batch = &self.batches[at];
            batch.stage == Stage::Open
                && known
                && batch.launches < self.length
                && batch.expected_ns + expected <= BATCH_NS
                && now.saturating_sub(batch.last_ns) < GAP_NS
        });
        let mut polled = false;
        if !joins || self.queued_ns() + expected > most_queued(wall) {
            self.poll(around);
            polled = true;
            current = self.last_in(launch.lane);
        }
        let stuck_ns = now.saturating_sub(launch.asked_ns.max(self.moved_ns));
        if self.active > 0 {
            let queued = self.queued_ns();
            let surplus = (queued + expected).saturating_sub(most_queued(wall));
            // What nobody has measured yet is not launched twice, nor what takes much longer than it ever did.
            let unsure = self.under_way().any(|(_, batch)| {
                batch.function == launch.function
                    && (!known || batch.counted_ns > batch.expected_ns.saturating_mul(2) + UNKNOWN_NS)
            });
            let patience = PATIENCE_NS.saturating_add(2 * queued);
            if surplus > 0 && stuck_ns < patience || unsure && stuck_ns < UNSURE_PATIENCE_NS {
                // Work is looked at about twice before there should be room.
                return Answer::Wait((surplus / 2).clamp(20_000, SLOT_NS));
            }
        }
        // It should be done when the slots end: what lasts longer shares the GPU with a neighbour, and no mark tells which
        // time was whose. Unless it never could be, or is so long that the slots would stay empty for a good part, and all
        // of it is owed to the share.
        let mut queued = around.budget.queued_ns(now);
        if queued > 0 && self.active == 0 && (around.others)().is_none() {
            // It took less than was thought.
            around.budget.none_queued(now);
            queued = 0;
        }
        let left = terms.slots.left_from(now, terms.slot_ns);
        if queued.saturating_add(expected) > left {
            let fits_some_time = expected <= terms.slots.longest_ns(terms.slot_ns);
            let owed = || expected > BATCH_NS && around.budget.covers(now, terms, expected);
            if queued > LAST_NS || fits_some_time && !owed() {
                if !polled {
                    self.poll(around);
                }
                // Work may turn out shorter.
                return Answer::Wait(left.clamp(20_000, BATCH_NS));
            }
        }
        let batch = match current {
            Some(at) if joins => Some(at),
            Some(at) if self.batches[at].stage == Stage::Open => {
                // That it was still open means that nothing told its end in time.
                if now.saturating_sub(self.batches[at].last_ns) >= GAP_NS {
                    self.length = 1;
                }
                self.batches[at].stage = Stage::Closing;
                return Answer::Close(at);
            }
            _ => self.free_for(launch.lane.context),
        };
        if batch.is_none() && stuck_ns < PATIENCE_NS {
            return Answer::Wait(BATCH_NS / 5);
        }
        let taken = match around.budget.take(now, terms, expected, &mut self.rests) {
            Ok(taken) => taken,
            Err(_) if self.active > 0 && stuck_ns >= LONG_PATIENCE_NS => 0,
            Err(wait) => {
                if !polled {
                    self.poll(around);
                }
                // Until it has looked at its own work, the container's other processes take that for busy.
                let done = if self.active > 0 { self.queued_ns().max(BATCH_NS) } else { u64::MAX };
                return Answer::Wait(wait.min(done));
            }
        };
        let Some(at) = batch else { return Answer::GoUnmeasured };
        if joins {
            self.batches[at].stage = Stage::Launching;
            return Answer::Go { batch: at, starts: false, taken, known };
        }
        // Behind a batch that is under way, this one begins when that one ends. One that is just being launched by
        // another thread tells nothing.
        let after = current.filter(|at| matches!(self.batches[*at].stage, Stage::Closing | Stage::Closed));
        self.last_number += 1;
        self.active += 1;
        self.used = self.used.max(at + 1);
        let batch = &mut self.batches[at];
        *batch = Batch {
            stage: Stage::Launching,
            after: after.and_then(|at| u8::try_from(at + 1).ok()).unwrap_or(0),
            lane: launch.lane,
            number: self.last_number,
            last_ns: now,
            events_of: batch.events_of,
            start: Mark { event: batch.start.event, put_ns: 0 },
            end: Mark { event: batch.end.event, put_ns: 0 },
            ..Batch::default()
        };
        Answer::Go { batch: at, starts: batch.after == 0, taken, known }
    }

    /// The launch for which [`Answer::Go`] was given has been made, or failed. True: mark the end of its batch now, and
    /// say so by [`Gate::closed`].
    pub fn launched(
        &mut self,
        at: usize,
        launch: &Launch,
        (taken, known): (u64, bool),
        went: bool,
        now_ns: u64,
        budget: Budget<'_>,
    ) -> bool {
        let expected = self.function(launch.function).map_or(UNKNOWN_NS, |function| function.ns);
        let length = self.length.max(1);
        let batch = &mut self.batches[at];
        if batch.stage != Stage::Launching {
            // Its context is gone.
            return false;
        }
        if !went {
            budget.give(taken);
            budget.correct(now_ns, expected, 0);
            if batch.launches == 0 {
                self.free(at);
            } else {
                batch.stage = Stage::Open;
            }
            return false;
        }
        if batch.launches == 0 {
            batch.first_ns = now_ns;
        }
        batch.launches += 1;
        batch.taken = batch.taken.saturating_add(taken);
        batch.last_ns = now_ns;
        batch.expected_ns += expected;
        if launch.function == batch.function {
            batch.function_launches += 1;
        } else if batch.function == 0 || expected > batch.function_ns {
            batch.others_ns = batch.expected_ns - expected;
            (batch.function, batch.function_ns, batch.function_launches) = (launch.function, expected, 1);
        } else {
            batch.others_ns += expected;
        }
        let full = batch.launches >= length;
        let closes = full || !known || batch.expected_ns + expected > BATCH_NS || batch.lane.thread != 0;
        batch.stage = if closes { Stage::Closing } else { Stage::Open };
        if full && known {
            self.length = (length * 2).min(BATCH_LAUNCHES);
        }
        closes
    }

    /// An open batch of those that `which` wants, for its end to be marked.
    pub fn open_batch(&mut self, which: impl Fn(&Batch) -> bool) -> Option<usize> {
        let at = self.batches.iter().position(|batch| batch.stage == Stage::Open && which(batch))?;
        self.batches[at].stage = Stage::Closing;
        Some(at)
    }

    /// The end of a batch has been marked, or could not be: then what was taken for it stands for what it took.
    pub fn closed(&mut self, at: usize, end: Mark, marked: bool, now_ns: u64) {
        let batch = &mut self.batches[at];
        if batch.stage != Stage::Closing {
            return;
        }
        if marked {
            batch.end = end;
            batch.stage = Stage::Closed;
        } else {
            self.ended(at, now_ns);
        }
    }

    /// The start of a batch could not be marked: what was taken for it stands for what it takes.
    pub fn abandon(&mut self, at: usize, now_ns: u64) {
        if self.batches[at].stage == Stage::Launching {
            self.ended(at, now_ns);
        }
    }

    /// Looks which work has ended, counts it, and pays for it.
    pub fn poll<M: Marks, O: Fn() -> Option<u64>>(&mut self, around: &mut Around<'_, M, O>) {
        let now = around.now_ns;
        // Each round ends a batch.
        for _ in 0..BATCHES {
            if self.active == 0 {
                return;
            }
            for (_, batch) in self.under_way_mut() {
                if batch.after == 0 && batch.begun_ns == 0 && batch.start.put_ns != 0 {
                    let began = around.marks.passed(batch.lane.context, &mut batch.start, now);
                    batch.begun_ns = began.map_or(0, |at| at.max(1));
                }
            }
            let ended = self.under_way_mut().find_map(|(at, batch)| {
                let endable = batch.stage == Stage::Closed && batch.after == 0;
                let end =
                    if endable { around.marks.passed(batch.lane.context, &mut batch.end, now) } else { None };
                Some((at, end?))
            });
            let Some((at, end)) = ended else { break };
            if self.batches[at].begun_ns == 0 {
                let batch = &mut self.batches[at];
                // The start was not passed a moment ago.
                let began = around.marks.passed(batch.lane.context, &mut batch.start, now);
                batch.begun_ns = began.unwrap_or(end).clamp(1, end.max(1));
            }
            let since = self.busy_since(&around.others).unwrap_or(end);
            let counted = around.budget.count(now.max(end), since, end);
            let batch = &mut self.batches[at];
            batch.counted_ns += counted;
            around.budget.pay(around.terms, counted, &mut batch.taken);
            around.budget.give(batch.taken);
            around.budget.correct(now, batch.expected_ns, batch.counted_ns);
            let batch = *batch;
            let beside = self.under_way().any(|(_, other)| other.lane != batch.lane)
                || (around.others)().is_some_and(|since| since < end);
            let Terms { slots, slot_ns, .. } = *around.terms;
            let left = slots.left_from(batch.begun_ns, slot_ns);
            let beyond = (left < end.saturating_sub(batch.begun_ns)).then(|| Beyond {
                within_ns: slots.within(batch.begun_ns, end, slot_ns),
                row_ns: slots.longest_ns(slot_ns),
            });
            self.learn(&batch, end, beside, beyond);
            self.ended(at, end);
            self.moved_ns = now;
        }
        // What has begun and not ended is busy until now, and since other work of the container is: what is counted ends
        // where it is counted from next.
        let since = self.busy_since(&around.others).unwrap_or(now);
        let running = self.under_way_mut().map(|(_, batch)| batch).filter(|batch| batch.begun_ns != 0);
        if let Some(batch) = running.min_by_key(|batch| batch.begun_ns) {
            // An open batch may have ended: nothing tells.
            if matches!(batch.stage, Stage::Closed | Stage::Closing) {
                let counted = around.budget.count(now, since, now);
                batch.counted_ns += counted;
                around.budget.pay(around.terms, counted, &mut batch.taken);
            }
        }
        if self.active > 0 {
            around.budget.wants(now);
        }
    }

    /// Since when work has been under way, as far as known; 0 if none is.
    pub fn open_since(&self) -> u64 {
        let since = |batch: &Batch| if batch.begun_ns == 0 { batch.first_ns } else { batch.begun_ns };
        self.under_way().map(|(_, batch)| since(batch)).filter(|since| *since != 0).min().unwrap_or(0)
    }

    /// A context is about to be destroyed: its work ends here.
    pub fn forget(
        &mut self,
        context: u64,
        now_ns: u64,
        terms: &Terms,
        budget: Budget<'_>,
        others: impl Fn() -> Option<u64>,
    ) {
        let since = self.busy_since(&others).unwrap_or(now_ns);
        for at in 0..BATCHES {
            let batch = &mut self.batches[at];
            if batch.stage == Stage::Free || batch.lane.context != context {
                continue;
            }
            if batch.begun_ns != 0 {
                let counted = budget.count(now_ns, since, now_ns);
                budget.pay(terms, counted, &mut batch.taken);
            }
            self.ended(at, now_ns);
        }
    }

    /// Work that is queued, in nanoseconds of GPU time.
    fn queued_ns(&self) -> u64 {
        // What has been counted is over, unless it takes longer than it should.
        let rest = |batch: &Batch| {
            batch.expected_ns.saturating_sub(batch.counted_ns).max(batch.expected_ns / 8).max(1_000)
        };
        self.under_way().map(|(_, batch)| rest(batch)).sum()
    }

    /// Since when work of the container has been under way, as far as known.
    pub fn busy_since(&self, others: &impl Fn() -> Option<u64>) -> Option<u64> {
        let begun = self.under_way().map(|(_, batch)| batch.begun_ns).filter(|begun| *begun != 0);
        begun.chain(others()).min()
    }

    fn last_in(&self, lane: Lane) -> Option<usize> {
        let of_lane = self.under_way().filter(|(_, batch)| batch.lane == lane);
        of_lane.max_by_key(|(_, batch)| batch.number).map(|(at, _)| at)
    }

    /// A free batch: one that has its events in this context, else one that has none, else any.
    fn free_for(&self, context: u64) -> Option<usize> {
        let rank = |batch: &Batch| match batch.events_of {
            of if of == context => 0,
            0 => 1,
            _ => 2,
        };
        let free = self.batches.iter().enumerate().filter(|(_, batch)| batch.stage == Stage::Free);
        free.min_by_key(|(_, batch)| rank(batch)).map(|(at, _)| at)
    }

    fn ended(&mut self, at: usize, end_ns: u64) {
        for (_, batch) in self.under_way_mut() {
            if usize::from(batch.after) == at + 1 {
                batch.after = 0;
                batch.begun_ns = end_ns.max(1);
            }
        }
        self.free(at);
    }

    fn free(&mut self, at: usize) {
        self.batches[at].stage = Stage::Free;
        self.active -= 1;
    }

    fn function(&self, key: u64) -> Option<&Function> {
        Some(&self.functions[place(key)]).filter(|function| function.key == key && key != 0)
    }

    /// Remembers what the longest function of an ended batch took: an average of the last few. What batches that ran
    /// beside each other took counts for the one that is looked at first, so only the mean of many launches says something. A
    /// batch that lasted out of the slots had to wait for neighbours. What fits into the slots took no longer than before, as
    /// long as it was not longer within them; what does not may have taken twice as long as before, not a hundred times.
    fn learn(&mut self, batch: &Batch, end_ns: u64, beside: bool, beyond: Option<Beyond>) {
        if batch.function == 0 || batch.function_launches == 0 {
            return;
        }
        let took = end_ns.saturating_sub(batch.begun_ns);
        let one =
            |ns: u64| (ns.saturating_sub(batch.others_ns) / u64::from(batch.function_launches)).max(100);
        let (ns, wall) = (one(batch.counted_ns.min(took)), one(took));
        let function = &mut self.functions[place(batch.function)];
        if function.key != batch.function {
            // Beside other work most of it may have been counted elsewhere. Until a mean of several tells, it is not thought
            // to be shorter than what is not known, or else as many launches would go as the mean pays for, and from each
            // process that is new.
            let ns = if beside { ns.max(wall.min(UNKNOWN_NS)) } else { ns };
            *function = Function { key: batch.function, ns, wall_ns: wall };
            return;
        }
        let (ns, wall) = match beyond {
            Some(Beyond { within_ns, row_ns }) if !beside => {
                let fits = function.ns <= row_ns;
                let most = |before: u64| {
                    if fits { function.ns.max(one(within_ns)) } else { before.saturating_mul(2) }
                };
                (ns.min(most(function.ns)), wall.min(most(function.wall_ns)))
            }
            _ => (ns, wall),
        };
        let towards =
            |old: u64, new: u64| if new > old { old + (new - old) / 2 + 1 } else { old - (old - new) / 8 };
        let short = function.wall_ns < 2 * QUEUED_NS || function.ns < QUEUED_NS / 2;
        function.ns = if beside && short {
            let weight = u64::from(batch.function_launches.min(MEAN_OF / 2));
            let part = |ns: u64| ns / u64::from(MEAN_OF) * weight;
            function.ns - part(function.ns) + part(ns)
        } else {
            towards(function.ns, ns)
        };
        function.wall_ns = towards(function.wall_ns, wall);
    }
}

/// Work that may be queued before a launch that takes so long from its start to its end.
fn most_queued(wall_ns: u64) -> u64 {
    QUEUED_NS.max(wall_ns.saturating_mul(2))
}

fn place(key: u64) -> usize {
    usize::try_from((key >> 3).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 55).unwrap_or(0) % FUNCTIONS
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One launch of function 8 that took 3 ms from mark to mark, of which `counted_ns` were counted by this process.
    fn learnt(counted_ns: u64, beside: bool, gate: &mut Gate) -> u64 {
        let batch =
            Batch { function: 8, function_launches: 1, begun_ns: 1_000_000, counted_ns, ..Batch::default() };
        gate.learn(&batch, 4_000_000, beside, None);
        gate.function(8).unwrap().ns
    }

    #[test]
    fn what_others_may_have_counted_is_no_first_measure() {
        let mut gate = Gate::default();
        assert_eq!(learnt(0, true, &mut gate), UNKNOWN_NS, "as long as before it was measured");
        // And no more than a little of what comes next, which may be the sum of several.
        let next = learnt(640_000, true, &mut gate);
        assert_eq!(next, UNKNOWN_NS - UNKNOWN_NS / 64 + 10_000);
        assert_eq!(
            learnt(2_500_000, true, &mut Gate::default()),
            2_500_000,
            "at least what it has measured itself"
        );
        assert_eq!(learnt(7_000, false, &mut Gate::default()), 7_000, "alone it is all its own");
    }

    /// What was measured first is 2 ms; then a launch lasts so long, so much of it within slots of ten in a row.
    fn learnt_beyond(ns: u64, within_ns: u64, row_ns: u64) -> u64 {
        let batch = |ns| Batch {
            function: 8,
            function_launches: 1,
            begun_ns: 1_000_000,
            counted_ns: ns,
            ..Batch::default()
        };
        let mut gate = Gate::default();
        gate.learn(&batch(2_000_000), 3_000_000, false, None);
        gate.learn(&batch(ns), 1_000_000 + ns, false, Some(Beyond { within_ns, row_ns }));
        gate.function(8).unwrap().ns
    }

    /// Half of it was a neighbour's time. Learnt as its own, the next launches would be held back at the end of the slots as if
    /// they did not fit.
    #[test]
    fn a_launch_that_lasted_out_of_its_slots_did_not_become_longer() {
        assert_eq!(learnt_beyond(4_000_000, 1_400_000, 10_000_000), 2_000_000);
        assert_eq!(learnt_beyond(1_600_000, 1_400_000, 10_000_000), 1_950_000, "it may have become shorter");
        // Three milliseconds of its own slots, and what were others'.
        assert_eq!(learnt_beyond(9_000_000, 3_000_000, 10_000_000), 2_500_001);
        assert_eq!(learnt_beyond(90_000_000, 1_000_000, 1_000_000), 3_000_001, "it fits nowhere");
    }
}
