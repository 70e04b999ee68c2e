//! Pacing: every launch comes by here, is counted, and waits for its turn. What decides is in `pacing` and in `region`;
//! here is what asks it, sleeps, and puts marks into the application's streams.
//!
//! No thread, no signal, no allocation. Nothing is held while the driver launches or a mark is put, both of which may
//! wait for work of another thread's. Streams that are being captured are left alone: what is captured runs when its
//! graph is launched.

mod events;

use std::{
    ffi::c_int,
    sync::atomic::{
        AtomicPtr, AtomicU64,
        Ordering::{Relaxed, Release},
    },
};

pub(crate) use pacing::Lane;
use pacing::{Answer, Around, Batch, Gate, Launch};
use region::{MAX_GPUS, Process, Terms, Usage};

use crate::{
    cuda::types::{CUDA_SUCCESS, Context, Result, Stream},
    errno, jump,
    lock::Locked,
    real::driver,
    share::{CU_STREAM_PER_THREAD, Share, share},
};
use events::Clocks;

/// Longest sleep: `limits` may change meanwhile.
const LONGEST_SLEEP_NS: u64 = 10_000_000;

/// The last part of a wait is not slept: the kernel wakes sleepers some fifty microseconds late.
const AWAKE_NS: u64 = 60_000;

/// How often processes that died at work are looked for, in nanoseconds.
const REAP_EVERY_NS: u64 = 50_000_000;

/// What pacing knows in a process. All zero at first.
#[repr(C)]
pub(crate) struct Pacing {
    pub free: Free,
    /// A bit for each GPU with work under way.
    active: AtomicU64,
    gates: [Locked<Paced>; MAX_GPUS],
}

/// What a launch looks at first (`jump::launches`): whether it may just go.
#[repr(C, align(64))]
pub(crate) struct Free {
    /// Number of the thread that counts in `launches_of_one`; 0 as long as there is none. Once there is, it stays the same,
    /// and all below is set.
    pub counts_alone: AtomicU64,
    /// The word of `limits` that changes with the next lease; null before the first.
    pub lease: AtomicPtr<AtomicU64>,
    /// What is in that word while launches may go at any time; else [`NEVER`].
    pub until: AtomicU64,
    /// Where launches are counted.
    pub launches: AtomicPtr<AtomicU64>,
    /// Where one thread counts its own.
    pub launches_of_one: AtomicPtr<AtomicU64>,
}

/// The end of no lease.
const NEVER: u64 = u64::MAX;

/// The process's [`Free`]; before it has one, one that lets nothing go.
pub(crate) static FREE: AtomicPtr<Free> = AtomicPtr::new((&raw const NOT_FREE).cast_mut());
static NOT_FREE: Free = Free {
    counts_alone: AtomicU64::new(0),
    lease: AtomicPtr::new(std::ptr::null_mut()),
    until: AtomicU64::new(NEVER),
    launches: AtomicPtr::new(std::ptr::null_mut()),
    launches_of_one: AtomicPtr::new(std::ptr::null_mut()),
};

impl Free {
    /// Launches may go until `until` is no longer what is in `word`.
    fn open(&self, word: &AtomicU64, until: u64, usage: &Usage, me: Process) {
        let to = |counter: &AtomicU64| std::ptr::from_ref(counter).cast_mut();
        self.launches.store(to(usage.counters(me).0), Relaxed);
        self.launches_of_one.store(to(usage.launches_of_one(me)), Relaxed);
        self.until.store(until, Relaxed);
        self.lease.store(to(word), Release);
        if self.counts_alone.load(Relaxed) == 0 {
            let _ = self.counts_alone.compare_exchange(0, jump::thread(), Release, Relaxed);
        }
    }

    fn close(&self) {
        self.until.store(NEVER, Release);
    }

    /// Counts a launch of this thread.
    fn count(&self, usage: &Usage, me: Process) {
        if self.counts_alone.load(Relaxed) == jump::thread() {
            let own = usage.launches_of_one(me);
            own.store(own.load(Relaxed).wrapping_add(1), Relaxed);
        } else {
            usage.counters(me).0.fetch_add(1, Relaxed);
        }
    }
}

struct Paced {
    gate: Gate,
    clocks: Clocks,
    /// Not false once what a predecessor in this process's slot left is counted.
    succeeded: bool,
}

/// A stream as a launch names it.
#[derive(Clone, Copy)]
pub(crate) struct In {
    /// Where null means the thread's own default stream, the handle that says so.
    stream: Stream,
}

impl In {
    pub fn legacy(stream: Stream) -> Self {
        Self { stream }
    }

    pub fn per_thread(stream: Stream) -> Self {
        Self { stream: if stream == 0 { CU_STREAM_PER_THREAD } else { stream } }
    }
}

/// A launch that may go, or goes unpaced; to be told how it went.
#[must_use]
pub(crate) enum Turn {
    Free,
    Paced { gpu: usize, batch: usize, launch: Launch, taken: u64, known: bool },
}

/// Has the driver launch `function` in a stream when it is its turn.
pub(crate) fn launch(function: u64, stream: In, call: impl FnOnce() -> Result) -> Result {
    let turn = await_turn(function, stream);
    let result = call();
    turn.over(result);
    result
}

/// Waits until `function` may be launched in a stream.
pub(crate) fn await_turn(function: u64, stream: In) -> Turn {
    let _kept = errno::Keep::new();
    let Some((share, me)) = share().and_then(|share| Some((share, share.me_if_claimed()?))) else {
        // The driver is not initialised, or will say why not.
        return Turn::Free;
    };
    share.state().pacing.free.count(share.usage(), me);
    let Some((context, gpu)) = share.lane_of(stream.stream) else { return Turn::Free };
    let mut now = now_ns();
    if is_free(share, me, gpu, now) || is_captured(stream.stream) {
        return Turn::Free;
    }
    let lane = Lane {
        context,
        stream: stream.stream,
        thread: if stream.stream == CU_STREAM_PER_THREAD { jump::thread() } else { 0 },
    };
    let launch = Launch { lane, function, asked_ns: now };
    let _relaxed = AnyCapture::new();
    let mut waited = false;
    let turn = loop {
        let Some(terms) = share.limits().pace(gpu).map(|pace| pace.terms(now)) else { break Turn::Free };
        match ask(share, me, gpu, &launch, &terms, now) {
            Answer::Go { batch, starts, taken, known } => {
                if starts && !mark_start(share, gpu, batch) {
                    // Measured by nothing: what was taken for it stands.
                    abandon(share, gpu, batch, now);
                    break Turn::Free;
                }
                break Turn::Paced { gpu, batch, launch, taken, known };
            }
            Answer::GoUnmeasured => break Turn::Free,
            Answer::Close(batch) => mark_end(share, gpu, batch),
            Answer::Wait(ns) => {
                waited = true;
                close_open(share, gpu, |_| true);
                sleep_until(now.saturating_add(ns.min(LONGEST_SLEEP_NS)));
            }
        }
        now = now_ns();
        if is_free(share, me, gpu, now) {
            break Turn::Free;
        }
    };
    if waited {
        share.usage().counters(me).1.fetch_add(now.saturating_sub(launch.asked_ns), Relaxed);
    }
    turn
}

impl Turn {
    /// The driver has answered the launch with `result`.
    pub fn over(self, result: Result) {
        let Self::Paced { gpu, batch, launch, taken, known } = self else { return };
        let _kept = errno::Keep::new();
        let Some(share) = share() else { return };
        let Some(budget) = share.usage().budget(gpu) else { return };
        let went = result == CUDA_SUCCESS;
        let closes = share.state().pacing.gates[gpu].lock().gate.launched(
            batch,
            &launch,
            (taken, known),
            went,
            now_ns(),
            budget,
        );
        if closes {
            let _relaxed = AnyCapture::new();
            mark_end(share, gpu, batch);
        }
    }
}

/// Whether launches on `gpu` are not held back at all now. Then the next ones need not even ask.
fn is_free(share: &Share, me: Process, gpu: usize, now: u64) -> bool {
    let pacing = &share.state().pacing;
    let Some(pace) = share.limits().pace(gpu) else { return true };
    if !pace.is_unpaced(now) {
        pacing.free.close();
        return false;
    }
    if share.limits().gpu_count() == 1
        && let Some(word) = share.limits().lease_word(gpu)
    {
        pacing.free.open(word, pace.lease.until_ns, share.usage(), me);
    }
    true
}

fn ask(share: &Share, me: Process, gpu: usize, launch: &Launch, terms: &Terms, now: u64) -> Answer {
    let usage = share.usage();
    let Some(budget) = usage.budget(gpu) else { return Answer::GoUnmeasured };
    let mut paced = share.state().pacing.gates[gpu].lock();
    let Paced { gate, clocks, succeeded } = &mut *paced;
    let mut left: Option<u64> = None;
    if !*succeeded {
        *succeeded = true;
        left = Some(usage.inherited_open(me, gpu)).filter(|since| *since != 0 && *since < now);
    }
    if now.saturating_sub(gate.reaped_ns) >= REAP_EVERY_NS {
        gate.reaped_ns = now;
        left = left.into_iter().chain(usage.reap_open(me, gpu, now, REAP_EVERY_NS)).min();
    }
    let others = || usage.open_elsewhere(me, gpu, now);
    if let Some(since) = left {
        let since = gate.busy_since(&others).map_or(since, |busy| busy.min(since));
        let counted = budget.count(now, since.max(now.saturating_sub(1_000_000_000)), now);
        budget.pay(terms, counted, &mut 0);
    }
    let answer = gate.ask(launch, &mut Around { now_ns: now, terms, budget, marks: clocks, others });
    if !matches!(answer, Answer::Go { .. } | Answer::Close(_)) {
        budget.wants(now);
    }
    if let Answer::Go { batch, .. } = answer {
        events::adopt(gate.batch(batch));
    }
    publish(share, me, gpu, gate);
    answer
}

/// Says in `usage` and to ourselves whether work is under way.
fn publish(share: &Share, me: Process, gpu: usize, gate: &Gate) {
    share.usage().set_open(me, gpu, gate.open_since());
    let active = &share.state().pacing.active;
    if gate.is_active() {
        active.fetch_or(1 << gpu, Relaxed);
    } else if active.load(Relaxed) >> gpu & 1 == 1 {
        active.fetch_and(!(1 << gpu), Relaxed);
    }
}

/// Marks the start of a batch that this thread is launching.
fn mark_start(share: &Share, gpu: usize, at: usize) -> bool {
    let gate = &share.state().pacing.gates[gpu];
    let (lane, event) = {
        let mut paced = gate.lock();
        let batch = paced.gate.batch(at);
        (batch.lane, std::mem::take(&mut batch.start.event))
    };
    let mark = events::put(lane.context, lane.stream, event, now_ns());
    gate.lock().gate.batch(at).start = mark.unwrap_or_default();
    mark.is_some()
}

/// Marks the end of a batch that was given to this thread to close.
fn mark_end(share: &Share, gpu: usize, at: usize) {
    let gate = &share.state().pacing.gates[gpu];
    let (lane, event) = {
        let mut paced = gate.lock();
        let batch = paced.gate.batch(at);
        (batch.lane, std::mem::take(&mut batch.end.event))
    };
    let now = now_ns();
    let mark = events::put(lane.context, lane.stream, event, now);
    gate.lock().gate.closed(at, mark.unwrap_or_default(), mark.is_some(), now);
}

fn abandon(share: &Share, gpu: usize, at: usize, now: u64) {
    share.state().pacing.gates[gpu].lock().gate.abandon(at, now);
}

/// Marks the end of open batches: of those that `which` wants, and this thread can.
fn close_open(share: &Share, gpu: usize, which: impl Fn(&Batch) -> bool) {
    loop {
        let open = share.state().pacing.gates[gpu].lock().gate.open_batch(&which);
        let Some(at) = open else { return };
        mark_end(share, gpu, at);
    }
}

/// The application waits for work in `stream`, or in all: what is open there ends now.
pub(crate) fn before_waiting(stream: Option<In>) {
    let Some(share) = share() else { return };
    let pacing = &share.state().pacing;
    // Whoever waits has time: whether a lease has ended is looked at with the next launch.
    pacing.free.close();
    each_active(share, |gpu| {
        let _relaxed = AnyCapture::new();
        close_open(share, gpu, |batch| stream.is_none_or(|stream| batch.lane.stream == stream.stream));
    });
}

/// The application has waited: what has ended is counted.
pub(crate) fn after_waiting() {
    let Some((share, me)) = share().and_then(|share| Some((share, share.me_if_claimed()?))) else { return };
    each_active(share, |gpu| {
        let now = now_ns();
        let usage = share.usage();
        let Some((terms, budget)) =
            share.limits().pace(gpu).map(|pace| pace.terms(now)).zip(usage.budget(gpu))
        else {
            return;
        };
        let _relaxed = AnyCapture::new();
        let mut paced = share.state().pacing.gates[gpu].lock();
        let Paced { gate, clocks, .. } = &mut *paced;
        let others = || usage.open_elsewhere(me, gpu, now);
        gate.poll(&mut Around { now_ns: now, terms: &terms, budget, marks: clocks, others });
        publish(share, me, gpu, gate);
    });
}

fn each_active(share: &Share, act: impl Fn(usize)) {
    let active = share.state().pacing.active.load(Relaxed);
    if active == 0 {
        return;
    }
    let _kept = errno::Keep::new();
    (0..MAX_GPUS).filter(|gpu| active >> gpu & 1 == 1).for_each(act);
}

/// A stream is about to be destroyed, and its handle may be given to another.
pub(crate) fn forget_stream(stream: Stream) {
    if stream > CU_STREAM_PER_THREAD {
        before_waiting(Some(In::legacy(stream)));
    }
}

/// A context is about to be destroyed, with its events; or it may be.
pub(crate) fn forget_context(context: Context) {
    let Some((share, me)) = share().and_then(|share| Some((share, share.me_if_claimed()?))) else { return };
    let _kept = errno::Keep::new();
    let now = now_ns();
    for gpu in 0..share.limits().gpu_count() {
        let usage = share.usage();
        let Some((terms, budget)) =
            share.limits().pace(gpu).map(|pace| pace.terms(now)).zip(usage.budget(gpu))
        else {
            continue;
        };
        let mut paced = share.state().pacing.gates[gpu].lock();
        let Paced { gate, clocks, .. } = &mut *paced;
        gate.forget(context, now, &terms, budget, || usage.open_elsewhere(me, gpu, now));
        gate.batches().for_each(|batch| events::disown(batch, context));
        clocks.forget(context);
        publish(share, me, gpu, gate);
    }
}

/// Lets this thread look at events while another thread captures in a mode that forbids it.
pub(crate) struct AnyCapture {
    before: Option<c_int>,
}

impl AnyCapture {
    pub fn new() -> Self {
        // CU_STREAM_CAPTURE_MODE_RELAXED.
        let mut mode: c_int = 2;
        // SAFETY: `mode` outlives the call.
        let result = unsafe { driver!(cuda::cuThreadExchangeStreamCaptureMode(&raw mut mode => *mut c_int)) };
        Self { before: (result == CUDA_SUCCESS).then_some(mode) }
    }
}

impl Drop for AnyCapture {
    fn drop(&mut self) {
        if let Some(mut mode) = self.before {
            // SAFETY: `mode` outlives the call.
            unsafe { driver!(cuda::cuThreadExchangeStreamCaptureMode(&raw mut mode => *mut c_int)) };
        }
    }
}

/// Whether what is launched in the stream is recorded instead of run. Where the driver does not say, a launch would fail,
/// or is none of ours to hold.
fn is_captured(stream: Stream) -> bool {
    let mut status: c_int = 0;
    // SAFETY: `status` outlives the call; the stream is the application's, for the driver to judge.
    let result =
        unsafe { driver!(cuda::cuStreamIsCapturing(stream => Stream, &raw mut status => *mut c_int)) };
    result != CUDA_SUCCESS || status != 0
}

/// CLOCK_MONOTONIC in nanoseconds.
fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` outlives the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec.cast_unsigned().wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec.cast_unsigned())
}

/// Sleeps until a moment of CLOCK_MONOTONIC, or until a signal is handled.
fn sleep_until(end_ns: u64) {
    let asleep_ns = end_ns.saturating_sub(AWAKE_NS);
    if asleep_ns > now_ns() {
        let (seconds, rest) = (asleep_ns / 1_000_000_000, asleep_ns % 1_000_000_000);
        let time = libc::timespec { tv_sec: seconds.cast_signed(), tv_nsec: rest.cast_signed() };
        // SAFETY: `time` outlives the call.
        unsafe {
            libc::clock_nanosleep(
                libc::CLOCK_MONOTONIC,
                libc::TIMER_ABSTIME,
                &raw const time,
                std::ptr::null_mut(),
            )
        };
    }
    while now_ns() < end_ns {
        // SAFETY: no memory is involved.
        unsafe { libc::sched_yield() };
    }
}
