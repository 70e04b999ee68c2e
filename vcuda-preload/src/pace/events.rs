//! Marks in streams: the driver's events, and what a clock of theirs says in terms of CLOCK_MONOTONIC.
//!
//! The driver tells how far two events of a context are apart, not when they were. A reference event a context gives the
//! scale; where it lies is bounded by every mark that is looked at: no mark is passed before it is put, or after it is
//! seen passed. On an idle GPU a mark is passed as soon as it is put, so the lower bound is soon right to microseconds.

use pacing::{Batch, Mark, Marks};

use crate::{
    cuda::{
        types::{CUDA_SUCCESS, Context, Result, Stream},
        with_current,
    },
    real::driver,
    share::CU_STREAM_PER_THREAD,
};

/// Contexts of a GPU that are known at a time.
const CLOCKS: usize = 16;

/// CUDA_ERROR_NOT_READY.
const NOT_READY: Result = 600;

/// The driver tells distances in 32-bit floating-point milliseconds: beyond this they get coarse.
const NEAR_NS: i64 = 2_000_000_000;

/// Two clocks drift apart by at most one part in so many.
const DRIFT: i64 = 5_000;

/// `CUevent`, a pointer that is never followed here, so a number.
pub(crate) type Event = u64;

/// The reference of a context; none if `event` is 0.
#[derive(Clone, Copy, Default)]
struct Clock {
    context: Context,
    event: Event,
    /// It was passed at or after this moment of CLOCK_MONOTONIC in nanoseconds,
    low_ns: i64,
    /// and at or before this one.
    high_ns: i64,
}

/// References. All zero: none.
#[derive(Clone, Copy, Default)]
pub(crate) struct Clocks {
    clocks: [Clock; CLOCKS],
}

impl Clocks {
    /// The context is about to be destroyed, and its events.
    pub fn forget(&mut self, context: Context) {
        for clock in &mut self.clocks {
            if clock.event != 0 && clock.context == context {
                destroy(clock.event);
                *clock = Clock::default();
            }
        }
    }
}

impl Marks for Clocks {
    fn passed(&mut self, context: u64, mark: &mut Mark, now_ns: u64) -> Option<u64> {
        // SAFETY: an event of ours, which lives as long as its context.
        match unsafe { driver!(cuda::cuEventQuery(mark.event => Event)) } {
            CUDA_SUCCESS => {}
            NOT_READY => return None,
            // The context is broken: nothing in it goes on.
            _ => return Some(now_ns),
        }
        // This thread may have been off the processor since it was asked, and the mark been passed meanwhile.
        let now_ns = super::now_ns().max(now_ns);
        let (put, now) = (mark.put_ns.cast_signed(), now_ns.cast_signed());
        let known = self.clocks.iter().position(|clock| clock.event != 0 && clock.context == context);
        let Some(at) = known else {
            let at = self.clocks.iter().position(|clock| clock.event == 0).unwrap_or_else(|| {
                destroy(self.clocks[0].event);
                0
            });
            self.clocks[at] = Clock { context, event: mark.event, low_ns: put, high_ns: now };
            mark.event = 0;
            return Some(mark.put_ns);
        };
        let clock = &mut self.clocks[at];
        let mut milliseconds = 0_f32;
        // SAFETY: two events of ours that have been passed; `milliseconds` outlives the call.
        let result = unsafe {
            driver!(cuda::cuEventElapsedTime(
                &raw mut milliseconds => *mut f32, clock.event => Event, mark.event => Event,
            ))
        };
        if result != CUDA_SUCCESS {
            return Some(now_ns);
        }
        #[expect(
            clippy::cast_possible_truncation,
            reason = "saturates; what is no time of this year is bounded below"
        )]
        let distance = (f64::from(milliseconds) * 1e6) as i64;
        clock.low_ns = clock.low_ns.max(put.saturating_sub(distance));
        clock.high_ns = clock.high_ns.min(now.saturating_sub(distance)).max(put.saturating_sub(distance));
        clock.low_ns = clock.low_ns.min(clock.high_ns);
        let passed = clock.low_ns.saturating_add(distance).clamp(put, now.max(put));
        if distance > NEAR_NS {
            let slack = distance / DRIFT;
            clock.low_ns = clock.low_ns.saturating_add(distance - slack);
            clock.high_ns = clock.high_ns.saturating_add(distance + slack);
            std::mem::swap(&mut clock.event, &mut mark.event);
        }
        Some(passed.cast_unsigned().min(now_ns))
    }
}

/// An event for a mark in `context`; 0 if there is none to be had.
fn create(context: Context) -> Event {
    let mut event = 0;
    with_current(context, || {
        // SAFETY: `event` outlives the call.
        let result = unsafe { driver!(cuda::cuEventCreate(&raw mut event => *mut Event, 0 => u32)) };
        if result != CUDA_SUCCESS {
            event = 0;
        }
    });
    event
}

fn destroy(event: Event) {
    if event != 0 {
        // SAFETY: an event of ours that nobody uses any longer; the driver keeps it until it is passed.
        unsafe { driver!(cuda::cuEventDestroy_v2(event => Event)) };
    }
}

/// Makes the events of a batch ones of the context of its lane.
pub(crate) fn adopt(batch: &mut Batch) {
    if batch.events_of != batch.lane.context {
        for mark in [&mut batch.start, &mut batch.end] {
            destroy(mark.event);
            mark.event = 0;
        }
        batch.events_of = batch.lane.context;
    }
}

/// The context is about to be destroyed.
pub(crate) fn disown(batch: &mut Batch, context: Context) {
    if batch.events_of == context {
        for mark in [&mut batch.start, &mut batch.end] {
            destroy(mark.event);
            mark.event = 0;
        }
        batch.events_of = 0;
    }
}

/// Puts a mark into a stream of `context`, with `event` or one made for it. None if the driver does not let us.
pub(crate) fn put(context: Context, stream: Stream, event: Event, now_ns: u64) -> Option<Mark> {
    let event = if event == 0 { create(context) } else { event };
    if event == 0 {
        return None;
    }
    let mut result = CUDA_SUCCESS;
    // SAFETY: an event of ours in a stream of its context.
    let mut record = || result = unsafe { driver!(cuda::cuEventRecord(event => Event, stream => Stream)) };
    // Which stream a default stream is depends on what is current.
    if stream <= CU_STREAM_PER_THREAD {
        with_current(context, record)
    } else {
        record()
    }
    if result != CUDA_SUCCESS {
        destroy(event);
        return None;
    }
    Some(Mark { event, put_ns: now_ns })
}
