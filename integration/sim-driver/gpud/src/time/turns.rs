//! Which process has a GPU when. Lies in memory that processes share, and is changed under the GPU's lock only; whoever
//! holds that lock brings it up to the time first. Nobody has to wake up for a slice to end.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Nanoseconds of a sample of utilization (NVML samples six times a second).
pub const SAMPLE: u64 = 166_666_667;

/// Busy nanoseconds of so many samples as NVML tells them, in whole percent.
pub fn percent(busy: u64, samples: u64) -> u32 {
    let all = (samples * SAMPLE).max(1);
    u32::try_from((busy * 100 + all / 2) / all).unwrap_or(100).min(100)
}

/// Samples that are kept.
const SAMPLES: usize = 8;

/// Stretches that are kept for a process.
const STRETCHES: usize = 64;

/// How a GPU goes from one process to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Settings {
    /// Nanoseconds that a process has the GPU while another one waits.
    pub slice: u64,
    /// Nanoseconds that nobody has it when it goes to another process.
    pub switch: u64,
}

impl Default for Settings {
    /// 2 ms is the driver's default time slice; a switch that saves and restores a GPU's registers takes some microseconds.
    fn default() -> Self {
        Self { slice: 2_000_000, switch: 10_000 }
    }
}

/// Time that a process had a GPU without a break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// When it began.
    pub from: u64,
    /// What the process had had before it, in nanoseconds of GPU time.
    pub before: u64,
    /// What it has had after it.
    pub after: u64,
}

impl Stretch {
    /// When it ended.
    pub fn until(&self) -> u64 {
        self.from.saturating_add(self.after.saturating_sub(self.before))
    }

    /// When the process had had so much.
    pub fn when(&self, had: u64) -> u64 {
        self.from.saturating_add(had.clamp(self.before, self.after.max(self.before)) - self.before)
    }
}

#[repr(C)]
struct Logged {
    from: AtomicU64,
    before: AtomicU64,
    after: AtomicU64,
}

#[repr(C)]
struct Samples([(AtomicU64, AtomicU64); SAMPLES]);

/// A process's place at one GPU.
#[repr(C, align(64))]
struct Place {
    /// GPU time that it will have had when all of its work is done.
    wanted: AtomicU64,
    /// GPU time that it has had.
    had: AtomicU64,
    /// Whether it stands in the queue, or has the GPU.
    queued: AtomicU32,
    logged: AtomicU64,
    log: [Logged; STRETCHES],
    samples: Samples,
}

/// The turns of up to `N` processes at a GPU. All zeroes is a GPU that nobody uses, with slices of no length.
#[repr(C)]
pub struct Turns<const N: usize> {
    slice: AtomicU64,
    switch: AtomicU64,
    now: AtomicU64,
    /// Who has it, plus one.
    holder: AtomicU32,
    /// Who had it last, plus one: its state is still on the GPU.
    last: AtomicU32,
    /// When it is switched to the holder.
    ready: AtomicU64,
    slice_end: AtomicU64,
    head: AtomicU32,
    waiting: AtomicU32,
    queue: [AtomicU32; N],
    samples: Samples,
    places: [Place; N],
}

impl Samples {
    const fn new() -> Self {
        Self([const { (AtomicU64::new(0), AtomicU64::new(0)) }; SAMPLES])
    }

    /// Notes that a time was busy.
    fn add(&self, from: u64, until: u64) {
        // What is so long ago would only be overwritten.
        let kept = (until / SAMPLE).saturating_sub(SAMPLES as u64) * SAMPLE;
        let mut at = from.max(kept);
        while at < until {
            let number = at / SAMPLE;
            let end = until.min((number + 1) * SAMPLE);
            let (which, busy) = self.place(number);
            if which.swap(number, Relaxed) != number {
                busy.store(0, Relaxed);
            }
            busy.fetch_add(end - at, Relaxed);
            at = end;
        }
    }

    fn place(&self, number: u64) -> &(AtomicU64, AtomicU64) {
        &self.0[usize::try_from(number).unwrap_or(0) % SAMPLES]
    }

    /// Busy nanoseconds of a sample.
    fn get(&self, number: u64) -> u64 {
        let (which, busy) = self.place(number);
        if which.load(Relaxed) == number { busy.load(Relaxed).min(SAMPLE) } else { 0 }
    }

    fn clear(&self) {
        for (which, busy) in &self.0 {
            which.store(0, Relaxed);
            busy.store(0, Relaxed);
        }
    }
}

impl Place {
    const fn new() -> Self {
        Self {
            wanted: AtomicU64::new(0),
            had: AtomicU64::new(0),
            queued: AtomicU32::new(0),
            logged: AtomicU64::new(0),
            log: [const { Logged { from: AtomicU64::new(0), before: AtomicU64::new(0), after: AtomicU64::new(0) } };
                STRETCHES],
            samples: Samples::new(),
        }
    }

    fn left(&self) -> u64 {
        self.wanted.load(Relaxed).saturating_sub(self.had.load(Relaxed))
    }

    fn stretch(&self, number: u64) -> Stretch {
        let at = &self.log[usize::try_from(number).unwrap_or(0) % STRETCHES];
        Stretch {
            from: at.from.load(Relaxed),
            before: at.before.load(Relaxed),
            after: at.after.load(Relaxed),
        }
    }

    /// Gives the process the GPU's time.
    fn credit(&self, from: u64, until: u64) {
        let before = self.had.load(Relaxed);
        let after = before + (until - from);
        self.samples.add(from, until);
        let logged = self.logged.load(Relaxed);
        if let Some(last) = logged.checked_sub(1) {
            let stretch = self.stretch(last);
            if stretch.after == before && stretch.until() == from {
                self.log[usize::try_from(last).unwrap_or(0) % STRETCHES].after.store(after, Relaxed);
                self.had.store(after, Relaxed);
                return;
            }
        }
        let at = &self.log[usize::try_from(logged).unwrap_or(0) % STRETCHES];
        at.from.store(from, Relaxed);
        at.before.store(before, Relaxed);
        at.after.store(after, Relaxed);
        self.logged.store(logged + 1, Relaxed);
        self.had.store(after, Relaxed);
    }
}

impl<const N: usize> Turns<N> {
    /// Those of a GPU that nobody uses.
    pub fn new(settings: Settings) -> Self {
        Self {
            slice: AtomicU64::new(settings.slice),
            switch: AtomicU64::new(settings.switch),
            now: AtomicU64::new(0),
            holder: AtomicU32::new(0),
            last: AtomicU32::new(0),
            ready: AtomicU64::new(0),
            slice_end: AtomicU64::new(0),
            head: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            queue: [const { AtomicU32::new(0) }; N],
            samples: Samples::new(),
            places: [const { Place::new() }; N],
        }
    }

    /// Sets how long slices and switches are.
    pub fn set(&self, settings: Settings) {
        self.slice.store(settings.slice, Relaxed);
        self.switch.store(settings.switch, Relaxed);
    }

    /// The time up to which everything is decided.
    pub fn now(&self) -> u64 {
        self.now.load(Relaxed)
    }

    /// GPU time that a process has had.
    pub fn had(&self, process: usize) -> u64 {
        self.places[process].had.load(Relaxed)
    }

    /// GPU time that a process will have had when all of its work is done.
    pub fn wanted(&self, process: usize) -> u64 {
        self.places[process].wanted.load(Relaxed)
    }

    /// Processes that wait for their turn.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Relaxed) as usize
    }

    /// Says at the present time how much GPU time a process will have had when all its work is done.
    pub fn want(&self, process: usize, wanted: u64) {
        let place = &self.places[process];
        place.wanted.store(wanted, Relaxed);
        if place.left() > 0 && place.queued.load(Relaxed) == 0 {
            self.enqueue(process);
        }
    }

    fn enqueue(&self, process: usize) {
        let waiting = self.waiting.load(Relaxed);
        if waiting as usize >= N {
            return;
        }
        self.places[process].queued.store(1, Relaxed);
        let at = (self.head.load(Relaxed) as usize + waiting as usize) % N;
        self.queue[at].store(u32::try_from(process).unwrap_or(0), Relaxed);
        self.waiting.store(waiting + 1, Relaxed);
    }

    /// The next in the queue that has work.
    fn dequeue(&self) -> Option<usize> {
        loop {
            let waiting = self.waiting.load(Relaxed).checked_sub(1)?;
            let head = self.head.load(Relaxed) as usize % N;
            let process = self.queue[head].load(Relaxed) as usize % N;
            self.head.store(u32::try_from((head + 1) % N).unwrap_or(0), Relaxed);
            self.waiting.store(waiting, Relaxed);
            let place = &self.places[process];
            if place.queued.load(Relaxed) != 0 {
                if place.left() > 0 {
                    return Some(process);
                }
                place.queued.store(0, Relaxed);
            }
        }
    }

    /// Who has the GPU.
    pub fn has_it(&self) -> Option<usize> {
        self.holder()
    }

    fn holder(&self) -> Option<usize> {
        (self.holder.load(Relaxed) as usize).checked_sub(1).filter(|process| *process < N)
    }

    fn seat(&self, process: usize, now: u64) {
        let number = u32::try_from(process + 1).unwrap_or(0);
        let stays = self.last.swap(number, Relaxed) == number;
        let ready = if stays { now } else { now + self.switch.load(Relaxed) };
        self.holder.store(number, Relaxed);
        self.ready.store(ready, Relaxed);
        self.slice_end.store(ready + self.slice.load(Relaxed).max(1), Relaxed);
    }

    /// Brings the GPU up to a time.
    pub fn advance(&self, to: u64) {
        let mut now = self.now();
        while now < to {
            let Some(process) = self.holder() else {
                match self.dequeue() {
                    Some(process) => self.seat(process, now),
                    None => now = to,
                }
                continue;
            };
            let place = &self.places[process];
            let ready = self.ready.load(Relaxed);
            if now < ready {
                now = ready.min(to);
                continue;
            }
            let slice_end = self.slice_end.load(Relaxed);
            let alone = self.waiting() == 0;
            let mut until = to.min(now.saturating_add(place.left()));
            if !alone {
                until = until.min(slice_end.max(now));
            }
            if until > now {
                place.credit(now, until);
                self.samples.add(now, until);
                now = until;
            }
            if place.left() == 0 {
                place.queued.store(0, Relaxed);
                self.holder.store(0, Relaxed);
            } else if now >= slice_end {
                if alone {
                    // One slice follows the other, so who comes now waits for the end of the present one.
                    let slice = self.slice.load(Relaxed).max(1);
                    self.slice_end.store(slice_end + ((now - slice_end) / slice + 1) * slice, Relaxed);
                } else {
                    self.enqueue(process);
                    self.holder.store(0, Relaxed);
                }
            }
        }
        self.now.store(now, Relaxed);
    }

    /// Where nobody comes with new work: when the present holder stops, by the end of its work or its turn.
    pub fn next_stop(&self) -> Option<u64> {
        let now = self.now();
        match self.holder() {
            Some(process) => {
                let from = now.max(self.ready.load(Relaxed));
                let done = from + self.places[process].left();
                let turn = self.slice_end.load(Relaxed).max(from);
                Some(if self.waiting() == 0 { done } else { done.min(turn) })
            }
            None => (self.waiting() > 0).then_some(now + 1),
        }
    }

    /// The soonest time at which a process can have had so much: when no other comes in between.
    pub fn soonest(&self, process: usize, had: u64) -> u64 {
        let from = match self.holder() {
            Some(holder) if holder == process => self.now().max(self.ready.load(Relaxed)),
            // Not before the holder stops.
            Some(_) if self.places[process].queued.load(Relaxed) != 0 => {
                self.next_stop().unwrap_or(0).max(self.now())
            }
            _ => self.now(),
        };
        from.saturating_add(had.saturating_sub(self.had(process)))
    }

    /// Ends a process at the present time: work of its that is not done is gone.
    pub fn end(&self, process: usize) {
        let place = &self.places[process];
        place.wanted.store(0, Relaxed);
        place.had.store(0, Relaxed);
        place.logged.store(0, Relaxed);
        place.samples.clear();
        self.drop_work(process);
    }

    /// Work of a process that is not done is gone; what it has had stays known.
    pub fn drop_work(&self, process: usize) {
        let place = &self.places[process];
        place.wanted.store(place.had.load(Relaxed), Relaxed);
        if self.holder() == Some(process) {
            self.holder.store(0, Relaxed);
        } else if place.queued.load(Relaxed) != 0 {
            // Out of the queue, so that it cannot stand in it twice.
            let (head, waiting) = (self.head.load(Relaxed) as usize, self.waiting.load(Relaxed) as usize);
            let others: Vec<u32> = (0..waiting)
                .map(|at| self.queue[(head + at) % N].load(Relaxed))
                .filter(|other| *other as usize != process)
                .collect();
            for (at, other) in others.iter().enumerate() {
                self.queue[(head + at) % N].store(*other, Relaxed);
            }
            self.waiting.store(u32::try_from(others.len()).unwrap_or(0), Relaxed);
        }
        place.queued.store(0, Relaxed);
    }

    /// Puts the queue right, where a process died in the middle of a change: whoever has work stands in it, once.
    pub fn repair(&self, processes: usize) {
        self.holder.store(0, Relaxed);
        self.waiting.store(0, Relaxed);
        for process in 0..processes.min(N) {
            self.places[process].queued.store(0, Relaxed);
            if self.places[process].left() > 0 {
                self.enqueue(process);
            }
        }
    }

    /// Stretches that a process had, from number `seen` on, as far as they are kept; and the number after the last. The
    /// last one may still become longer.
    pub fn stretches(&self, process: usize, seen: u64) -> (impl Iterator<Item = Stretch>, u64) {
        let place = &self.places[process];
        let logged = place.logged.load(Relaxed);
        let first = seen.max(logged.saturating_sub(STRETCHES as u64)).min(logged);
        ((first..logged).map(|number| place.stretch(number)), logged)
    }

    /// Nanoseconds of a sample, named by its number, in which a process had the GPU, or anyone had.
    pub fn sample(&self, process: Option<usize>, number: u64) -> u64 {
        match process {
            Some(process) => self.places[process].samples.get(number),
            None => self.samples.get(number),
        }
    }

    /// Numbers of the samples that are complete and kept.
    pub fn samples(&self) -> std::ops::Range<u64> {
        let now = self.now() / SAMPLE;
        now.saturating_sub(SAMPLES as u64 - 1)..now
    }
}
