//! Streams, as those need them who left something in one: which it is, whether its work is done, and that it may be gone.

use std::{
    cell::Cell,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use crate::{
    cuda::{
        types::{CUDA_SUCCESS, Context, Result, Stream},
        with_current,
    },
    lock::Guard,
    pace::{AnyCapture, Lane},
    real::driver,
    share::{CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, Share, share},
};

/// To functions whose name ends in `_ptsz`, null is the thread's own default stream.
pub(super) fn per_thread(stream: Stream) -> Stream {
    if stream == 0 { CU_STREAM_PER_THREAD } else { stream }
}

/// The lane of a stream: a default stream is one of the current context, and the per-thread one of the calling thread, too.
/// None if there is no context, of which the driver will say more.
pub(super) fn lane_of(share: &Share, stream: Stream) -> Option<Lane> {
    let stream = if stream == 0 { CU_STREAM_LEGACY } else { stream };
    let thread = if stream == CU_STREAM_PER_THREAD { thread() } else { 0 };
    share.context_of(stream).map(|context| Lane { context, stream, thread })
}

/// A number of the calling thread that no other thread of the process ever has.
fn thread() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    thread_local!(static NUMBER: Cell<u64> = const { Cell::new(0) });
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(LAST.fetch_add(1, Relaxed) + 1);
        }
        number.get()
    })
}

/// Where work is that something was left to.
pub(super) enum At {
    /// A stream that lives.
    Lane(Lane),
    /// A stream of this context that is destroyed, though work was left in it: up to this event.
    Event(Context, Event),
}

/// An event of ours, in a context that lives; destroyed while in use, the driver keeps it as long as it needs it.
pub(super) struct Event(u64);

impl Event {
    /// Marks where a lane is now. None if it is captured, or the driver does not let us.
    fn record(lane: Lane) -> Option<Self> {
        /// Without time, which costs nothing.
        const CU_EVENT_DISABLE_TIMING: u32 = 2;
        // The default stream of the context comes after those of its threads (CUDA runtime API, stream synchronization behavior).
        let stream = if is_of_another_thread(lane) { CU_STREAM_LEGACY } else { lane.stream };
        let mut recorded = None;
        // An event is only recorded in streams of its own context.
        with_current(lane.context, || {
            let mut event: u64 = 0;
            // SAFETY: `event` outlives the call; a stream that lives.
            unsafe {
                if capture_status(stream) == Some(0)
                    && driver!(cuda::cuEventCreate(&raw mut event => *mut u64, CU_EVENT_DISABLE_TIMING => u32))
                        == CUDA_SUCCESS
                {
                    recorded = Some(Self(event)).filter(|event| {
                        driver!(cuda::cuEventRecord(event.0 => u64, stream => Stream)) == CUDA_SUCCESS
                    });
                }
            }
        });
        recorded
    }

    /// Has `stream` wait for it. False if it cannot.
    fn holds(&self, stream: Stream) -> bool {
        // SAFETY: the application's stream, for the driver to judge.
        unsafe { driver!(cuda::cuStreamWaitEvent(stream => Stream, self.0 => u64, 0 => u32)) == CUDA_SUCCESS }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: an event of ours that nobody uses any longer.
        unsafe { driver!(cuda::cuEventDestroy_v2(self.0 => u64)) };
    }
}

/// Whether the work that something was left to is known to be done.
pub(super) fn is_done(at: &At) -> bool {
    match at {
        At::Lane(lane) => ask(*lane) == Some(CUDA_SUCCESS),
        // SAFETY: an event of ours.
        At::Event(_, event) => unsafe { driver!(cuda::cuEventQuery(event.0 => u64)) == CUDA_SUCCESS },
    }
}

/// Has `stream` wait for the work that something was left to, as the driver does where it inserts a dependency. False if it
/// cannot.
pub(super) fn wait_for(at: &At, stream: Stream) -> bool {
    match at {
        At::Lane(lane) => Event::record(*lane).is_some_and(|event| event.holds(stream)),
        At::Event(_, event) => event.holds(stream),
    }
}

/// Whether a lane, which must live, is known to have work that is not done.
pub(super) fn is_at_work(lane: Lane) -> bool {
    const CUDA_ERROR_NOT_READY: Result = 600;
    ask(lane) == Some(CUDA_ERROR_NOT_READY)
}

/// What the driver says of work in a lane; none where only another thread could ask, or while it is captured, which the question
/// would end.
fn ask(lane: Lane) -> Option<Result> {
    let mut said = None;
    let mut ask = || {
        if capture_status(lane.stream) == Some(0) {
            // SAFETY: a stream that lives.
            said = Some(unsafe { driver!(cuda::cuStreamQuery(lane.stream => Stream)) });
        }
    };
    // Which stream a default stream is depends on what is current.
    if lane.stream > CU_STREAM_PER_THREAD {
        ask();
    } else if !is_of_another_thread(lane) {
        with_current(lane.context, ask);
    }
    said
}

fn is_of_another_thread(lane: Lane) -> bool {
    lane.thread != 0 && lane.thread != thread()
}

/// `CUstreamCaptureStatus`; none where the driver does not say.
fn capture_status(stream: Stream) -> Option<i32> {
    let mut status = 0;
    // SAFETY: `status` outlives the call; the stream is the application's, for the driver to judge.
    let result = unsafe { driver!(cuda::cuStreamIsCapturing(stream => Stream, &raw mut status => *mut i32)) };
    (result == CUDA_SUCCESS).then_some(status)
}

/// Whether the stream is being captured into a graph. What is allocated then takes its memory when the graph runs.
pub(super) fn is_capturing(stream: Stream) -> bool {
    capture_status(stream).is_some_and(|status| status != 0)
}

/// No capture ends elsewhere, and nothing is captured, until what this gives is dropped.
pub(super) fn end_capture() -> Option<Guard<'static, ()>> {
    share().map(|share| share.state().capture_ending.lock())
}

/// How what is in the streams of a context has ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Not,
    /// It is done.
    Done,
    /// The context is gone, and others may have its handle and those of its streams.
    Gone,
}

/// Default streams of so many threads are told apart; threads come and go.
const THREADS: usize = 64;

/// In a lane: a thread that none is, for all beyond those. What is there can be waited for in the context's default stream.
const ANY_THREAD: u64 = u64::MAX;

/// What was left to streams whose work may not have come to it.
pub(super) struct Lanes<T>(Vec<Left<T>>);

struct Left<T> {
    at: At,
    /// Calls under way with which all that is in streams of its context may end, and those too: it must not be asked about.
    ending: u32,
    what: T,
}

impl<T> Left<T> {
    fn is_in(&self, lane: Lane) -> bool {
        matches!(self.at, At::Lane(of) if of == lane)
    }

    fn context(&self) -> Context {
        match self.at {
            At::Lane(lane) => lane.context,
            At::Event(context, _) => context,
        }
    }
}

impl<T> Default for Lanes<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl Lanes<()> {
    /// Notes that something was left in `lane`.
    pub fn note(&mut self, lane: Lane) {
        let is_one_of_many = || lane.thread != 0 && self.0.len() >= THREADS;
        let lane = match lane {
            _ if self.has(lane) => return,
            _ if is_one_of_many() => Lane { thread: ANY_THREAD, ..lane },
            _ => lane,
        };
        if !self.has(lane) {
            self.leave(lane, ());
        }
    }
}

impl<T> Lanes<T> {
    pub fn leave(&mut self, lane: Lane, what: T) {
        self.0.push(Left { at: At::Lane(lane), ending: 0, what });
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether something was left in `lane`.
    pub fn has(&self, lane: Lane) -> bool {
        self.0.iter().any(|left| left.is_in(lane) && left.ending == 0)
    }

    /// Whether something was left elsewhere than in `lane`.
    pub fn has_others_than(&self, lane: Lane) -> bool {
        self.0.iter().any(|left| !left.is_in(lane))
    }

    /// Takes out what was left where `which` says so. There may be asked.
    pub fn take(&mut self, which: impl Fn(&At) -> bool) -> Vec<T> {
        let _relaxed = AnyCapture::new();
        self.extract(|left| left.ending == 0 && which(&left.at))
    }

    /// A stream is about to be destroyed: it can no longer be asked, but an event in it can. Takes out what cannot be known of
    /// any more, and what streams that were destroyed before have come to.
    pub fn forget_stream(&mut self, stream: Stream) -> Vec<T> {
        let _relaxed = AnyCapture::new();
        for left in &mut self.0 {
            if let At::Lane(lane) = left.at
                && lane.stream == stream
                && left.ending == 0
                && ask(lane) != Some(CUDA_SUCCESS)
                && let Some(event) = Event::record(lane)
            {
                left.at = At::Event(lane.context, event);
            }
        }
        self.take(|at| match at {
            At::Lane(lane) => lane.stream == stream,
            At::Event(..) => is_done(at),
        })
    }

    /// All that is in streams of a context is about to end, or may end.
    pub fn begin_end(&mut self, context: Context) {
        self.of(context).for_each(|left| left.ending += 1);
    }

    /// Takes out what was left there until then, if it has ended.
    pub fn end(&mut self, context: Context, how: End) -> Vec<T> {
        if how == End::Not {
            self.of(context).for_each(|left| left.ending = left.ending.saturating_sub(1));
            return Vec::new();
        }
        let ended = self.0.extract_if(.., |left| left.ending > 0 && left.context() == context);
        let what = |Left { at, what, .. }| {
            if how == End::Gone {
                // With its events, whose handles others may have.
                std::mem::forget(at);
            }
            what
        };
        ended.map(what).collect()
    }

    fn of(&mut self, context: Context) -> impl Iterator<Item = &mut Left<T>> {
        self.0.iter_mut().filter(move |left| left.context() == context)
    }

    fn extract(&mut self, which: impl Fn(&Left<T>) -> bool) -> Vec<T> {
        self.0.extract_if(.., |left| which(left)).map(|left| left.what).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_streams_of_very_many_threads_are_a_few_entries() {
        let mut lanes = Lanes::default();
        let lane = |context, thread| Lane { context, stream: CU_STREAM_PER_THREAD, thread };
        (1..=10_000).for_each(|thread| lanes.note(lane(7, thread)));
        assert_eq!(lanes.0.len(), THREADS + 1);
        assert!(lanes.has(lane(7, THREADS as u64)) && lanes.has(lane(7, ANY_THREAD)));
        // What the many left is elsewhere to each of them.
        assert!(!lanes.has(lane(7, 10_000)) && lanes.has_others_than(lane(7, 10_000)));

        lanes.note(lane(8, 10_001));
        lanes.note(Lane { context: 7, stream: 100, thread: 0 });
        lanes.note(Lane { context: 7, stream: 100, thread: 0 });
        assert_eq!(lanes.0.len(), THREADS + 3, "other contexts and streams are told apart");
    }
}
