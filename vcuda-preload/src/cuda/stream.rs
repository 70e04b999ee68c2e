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
    pace::Lane,
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

/// Whether all work in a lane, which must live, is known to be done.
pub(super) fn is_done(lane: Lane) -> bool {
    ask(lane) == Some(CUDA_SUCCESS)
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
    if !is_of_another_thread(lane) {
        with_lane(lane, || {
            if capture_status(lane.stream) == Some(0) {
                // SAFETY: a stream that lives.
                said = Some(unsafe { driver!(cuda::cuStreamQuery(lane.stream => Stream)) });
            }
        });
    }
    said
}

fn is_of_another_thread(lane: Lane) -> bool {
    lane.thread != 0 && lane.thread != thread()
}

/// Does something where a lane's stream means what it meant: which stream a default stream is depends on what is current.
fn with_lane(lane: Lane, act: impl FnOnce()) {
    if lane.stream <= CU_STREAM_PER_THREAD { with_current(lane.context, act) } else { act() }
}

/// Has `stream` wait for what is in a lane, which must live, now, as the driver does where it inserts a dependency. False if it
/// cannot.
pub(super) fn wait_for(lane: Lane, stream: Stream) -> bool {
    /// Without time, which costs nothing.
    const CU_EVENT_DISABLE_TIMING: u32 = 2;
    // The default stream of the context comes after those of its threads (CUDA runtime API, stream synchronization behavior).
    let other = if is_of_another_thread(lane) { CU_STREAM_LEGACY } else { lane.stream };
    let (mut event, mut recorded): (u64, bool) = (0, false);
    // An event is only recorded in streams of its own context.
    with_current(lane.context, || {
        // SAFETY: `event` outlives the call; a stream that lives.
        recorded = capture_status(other) == Some(0)
            && unsafe {
                driver!(cuda::cuEventCreate(&raw mut event => *mut u64, CU_EVENT_DISABLE_TIMING => u32))
                    == CUDA_SUCCESS
                    && driver!(cuda::cuEventRecord(event => u64, other => Stream)) == CUDA_SUCCESS
            };
    });
    // SAFETY: the application's stream, for the driver to judge. An event that is destroyed while in use the driver keeps as long
    // as it needs it.
    unsafe {
        let waits = recorded
            && driver!(cuda::cuStreamWaitEvent(stream => Stream, event => u64, 0 => u32)) == CUDA_SUCCESS;
        if event != 0 {
            driver!(cuda::cuEventDestroy_v2(event => u64));
        }
        waits
    }
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

/// What was left in lanes whose work may not have come to it.
pub(super) struct Lanes<T>(Vec<Left<T>>);

struct Left<T> {
    lane: Lane,
    /// Calls under way with which all that is in streams of its context may end, and those too: it must not be asked about.
    ending: u32,
    what: T,
}

impl<T> Default for Lanes<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Lanes<T> {
    pub fn leave(&mut self, lane: Lane, what: T) {
        self.0.push(Left { lane, ending: 0, what });
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether something was left in `lane`.
    pub fn has(&self, lane: Lane) -> bool {
        self.0.iter().any(|left| left.lane == lane && left.ending == 0)
    }

    /// Whether something was left in a lane other than `lane`.
    pub fn has_others_than(&self, lane: Lane) -> bool {
        self.0.iter().any(|left| left.lane != lane)
    }

    /// Takes out what was left in lanes of which `which` says so. These may be asked about.
    pub fn take(&mut self, which: impl Fn(Lane) -> bool) -> Vec<T> {
        self.extract(|left| left.ending == 0 && which(left.lane))
    }

    /// All that is in streams of a context is about to end, or may end.
    pub fn begin_end(&mut self, context: Context) {
        self.of(context).for_each(|left| left.ending += 1);
    }

    /// Takes out what was left there until then, if it has ended. Another context may have got its handle, and others those of its
    /// streams.
    pub fn end(&mut self, context: Context, has_ended: bool) -> Vec<T> {
        if has_ended {
            return self.extract(|left| left.ending > 0 && left.lane.context == context);
        }
        self.of(context).for_each(|left| left.ending = left.ending.saturating_sub(1));
        Vec::new()
    }

    fn of(&mut self, context: Context) -> impl Iterator<Item = &mut Left<T>> {
        self.0.iter_mut().filter(move |left| left.lane.context == context)
    }

    fn extract(&mut self, which: impl Fn(&Left<T>) -> bool) -> Vec<T> {
        self.0.extract_if(.., |left| which(left)).map(|left| left.what).collect()
    }
}
