//! Streams and events, and the one way that work goes: `submit`. What takes no time, and has nothing before it that does,
//! is done as soon as it is submitted, in the thread that submits it; the rest stands in its stream (`work`).

use std::{
    ffi::{c_int, c_void},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use crate::{
    capture::{Capture, capturing},
    context::{self, Context, current},
    copy::{Copy, Fill},
    driver::{Driver, Registry, Tables, driver, tables},
    ffi::{Error, INVALID_HANDLE, INVALID_VALUE, Out, Outcome, STREAM_CAPTURE_UNSUPPORTED, api},
    work::Lane,
};

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`.
const LEGACY: u64 = 1;
const PER_THREAD_DEFAULT: u64 = 2;

/// `CUDA_ERROR_CAPTURED_EVENT`.
const CAPTURED_EVENT: Error = Error(907);

/// A stream as a program names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stream(u64);

impl Stream {
    /// The stream of a handle; of none, the default stream that the called entry means.
    pub(crate) fn new(handle: u64, per_thread: bool) -> Self {
        Self(match handle {
            0 if per_thread => PER_THREAD_DEFAULT,
            0 => LEGACY,
            handle => handle,
        })
    }

    /// Whether it is one of the default streams.
    pub(crate) fn is_default(self) -> bool {
        matches!(self.0, LEGACY | PER_THREAD_DEFAULT)
    }

    /// The context that the stream belongs to.
    pub(crate) fn context(self) -> Outcome<&'static Context> {
        let current = current()?;
        if self.is_default() {
            return Ok(current);
        }
        let mut tables = tables()?;
        let context = tables.streams.all.get(self.0, INVALID_HANDLE)?.context;
        tables.contexts.get(context)
    }

    /// The stream, as what takes time knows it.
    pub(crate) fn lane(self, tables: &mut Tables, context: &'static Context) -> Outcome<Lane> {
        let (handle, gpu) = (context.handle(), context.gpu);
        let lane = |key, alone| Lane { key, context: handle, gpu, legacy: self.0 == LEGACY, alone };
        Ok(match self.0 {
            LEGACY => lane((LEGACY, handle, 0), false),
            PER_THREAD_DEFAULT => lane((PER_THREAD_DEFAULT, handle, own_thread()), false),
            // CU_STREAM_NON_BLOCKING.
            own => lane((own, 0, 0), tables.streams.all.get(own, INVALID_HANDLE)?.flags & 1 != 0),
        })
    }
}

/// A number of the calling thread.
fn own_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static OWN: u64 = NEXT.fetch_add(1, Relaxed);
    }
    // A thread that is ending has none any more.
    OWN.try_with(|own| *own).unwrap_or(0)
}

/// A program's callback (`CUhostFn`).
pub(crate) type HostFunction = extern "C" fn(*mut c_void);

/// The older kind (`CUstreamCallback`).
pub(crate) type Callback = extern "C" fn(u64, c_int, *mut c_void);

/// Work.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    /// Only its place in the order matters.
    Nothing,
    /// A kernel, with so many threads, that takes so many nanoseconds. What it computes is not simulated.
    Kernel {
        threads: u64,
        duration: u64,
    },
    Copy(Copy),
    Fill(Fill),
    /// Managed memory goes to a GPU, or to the host.
    Prefetch {
        address: u64,
        to: Option<usize>,
    },
    /// The program's function is called.
    Host {
        function: HostFunction,
        data: u64,
    },
    /// The same in the older way.
    Callback {
        stream: u64,
        function: Callback,
        data: u64,
    },
    /// An event happens.
    Record {
        event: u64,
    },
}

impl Operation {
    /// Nanoseconds of the whole GPU that it takes.
    pub(crate) fn duration(&self) -> u64 {
        match self {
            Self::Kernel { duration, .. } => *duration,
            _ => 0,
        }
    }
}

struct StreamState {
    context: context::Handle,
    flags: u32,
    priority: c_int,
    number: u64,
    capture: Option<Capture>,
}

struct Event {
    context: context::Handle,
    flags: u32,
    /// Recorded into a graph that is being made.
    captured: Option<Capture>,
}

/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIMING: u32 = 2;

/// The process's streams and events.
#[derive(Default)]
pub(crate) struct Streams {
    all: Registry<StreamState>,
    events: Registry<Event>,
}

impl Streams {
    pub(crate) fn forget_context(&mut self, context: context::Handle) {
        let of = |of: context::Handle| of == context;
        let streams: Vec<u64> =
            self.all.iter().filter(|(_, stream)| of(stream.context)).map(|(at, _)| at).collect();
        for stream in streams {
            let _ = self.all.remove(stream, INVALID_HANDLE);
        }
        let events: Vec<u64> =
            self.events.iter().filter(|(_, event)| of(event.context)).map(|(at, _)| at).collect();
        for event in events {
            let _ = self.events.remove(event, INVALID_HANDLE);
        }
    }

    /// Whether there is such an event.
    pub(crate) fn event(&mut self, event: u64) -> Outcome {
        self.events.get(event, INVALID_HANDLE).map(drop)
    }

    pub(crate) fn new_event(&mut self, context: &'static Context, flags: u32) -> u64 {
        self.events.add(Event { context: context.handle(), flags, captured: None })
    }

    /// Ends all parts in the making of a graph.
    pub(crate) fn end_captures_of(&mut self, graph: u64) {
        let of = |capture: &Option<Capture>| capture.as_ref().is_some_and(|capture| capture.graph == graph);
        for stream in self.all.values().filter(|stream| of(&stream.capture)) {
            stream.capture = None;
        }
        for event in self.events.values().filter(|event| of(&event.captured)) {
            event.captured = None;
        }
    }

    /// A stream's capture, if it has one.
    pub(crate) fn capture(&mut self, stream: Stream) -> Outcome<&mut Option<Capture>> {
        self.all.get(stream.0, INVALID_HANDLE).map(|state| &mut state.capture)
    }
}

/// Gives work to a stream.
pub(crate) fn submit(stream: Stream, operation: Operation) -> Outcome {
    let driver = driver()?;
    let context = stream.context()?;
    let mut tables = driver.tables();
    if let Some(capture) = capturing(&mut tables, stream)? {
        return tables.capture_operation(capture, context, operation);
    }
    let lane = stream.lane(&mut tables, context)?;
    drop(tables);
    driver.work.submit(driver, context, &lane, &operation)
}

/// Does work.
pub(crate) fn perform(context: &'static Context, operation: &Operation) -> Outcome {
    let driver = driver()?;
    match *operation {
        Operation::Nothing => Ok(()),
        Operation::Kernel { threads, .. } => {
            driver.count_kernel(context.gpu, threads);
            Ok(())
        }
        Operation::Copy(copy) => driver.tables().copy(&copy),
        Operation::Fill(fill) => driver.tables().fill(driver, context.gpu, &fill),
        Operation::Prefetch { address, to } => {
            driver.tables().migrate(driver, address, to);
            Ok(())
        }
        Operation::Host { function, data } => {
            function(data as *mut c_void);
            Ok(())
        }
        Operation::Callback { stream, function, data } => {
            function(stream, 0, data as *mut c_void);
            Ok(())
        }
        Operation::Record { event } => {
            driver.tables().streams.event(event)?;
            driver.work.happens(event);
            Ok(())
        }
    }
}

fn create(stream: Out<u64>, flags: u32, priority: c_int) -> Outcome {
    let context = current()?;
    stream.wanted()?;
    // CU_STREAM_NON_BLOCKING.
    if flags & !1 != 0 {
        return Err(INVALID_VALUE);
    }
    static NUMBER: AtomicU64 = AtomicU64::new(10);
    let state = StreamState {
        context: context.handle(),
        flags,
        priority: priority.clamp(-5, 0),
        number: NUMBER.fetch_add(1, Relaxed),
        capture: None,
    };
    stream.put(tables()?.streams.all.add(state))
}

/// Asks a stream of the program's own; of a default one, what is given.
fn ask<T>(stream: Stream, default: T, work: impl FnOnce(&StreamState) -> T) -> Outcome<T> {
    stream.context()?;
    if stream.is_default() {
        return Ok(default);
    }
    tables()?.streams.all.get(stream.0, INVALID_HANDLE).map(|state| work(state))
}

/// The stream's lane, to ask or wait for what is in it. A stream that is captured has nothing to wait for.
fn lane_of_work(driver: &Driver, stream: Stream) -> Outcome<Lane> {
    let context = stream.context()?;
    let mut tables = driver.tables();
    if capturing(&mut tables, stream)?.is_some() {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    stream.lane(&mut tables, context)
}

fn synchronize(stream: Stream) -> Outcome {
    let driver = driver()?;
    driver.work.wait_for_stream(driver, &lane_of_work(driver, stream)?)?;
    driver.tables().settle(driver);
    Ok(())
}

fn record(event: u64, stream: Stream) -> Outcome {
    stream.context()?;
    let mut tables = tables()?;
    tables.streams.event(event)?;
    let captured = if stream.is_default() { None } else { tables.streams.capture(stream)?.clone() };
    if captured.is_some() {
        let captured = captured.map(|capture| Capture { origin: false, ..capture });
        tables.streams.events.get(event, INVALID_HANDLE)?.captured = captured;
        return Ok(());
    }
    drop(tables);
    submit(stream, Operation::Record { event })
}

fn wait(stream: Stream, event: u64) -> Outcome {
    let context = stream.context()?;
    let driver = driver()?;
    let mut tables = driver.tables();
    let Some(from) = tables.streams.events.get(event, INVALID_HANDLE)?.captured.clone() else {
        if capturing(&mut tables, stream)?.is_some() {
            return Ok(());
        }
        let lane = stream.lane(&mut tables, context)?;
        drop(tables);
        return driver.work.order(driver, &lane, event);
    };
    if stream.is_default() {
        return Err(CAPTURED_EVENT);
    }
    // The stream joins the capture, or this part of it.
    match tables.streams.capture(stream)? {
        Some(own) if own.graph != from.graph => return Err(Error(902)),
        Some(own) => own.tail.extend(from.tail),
        none => *none = Some(from),
    }
    Ok(())
}

api! {
    fn cuStreamCreate(stream: Out<u64>, flags: u32) { create(stream, flags, 0) }

    fn cuStreamCreateWithPriority(stream: Out<u64>, flags: u32, priority: c_int) { create(stream, flags, priority) }

    fn cuStreamDestroy, cuStreamDestroy_v2(stream: u64) {
        driver()?;
        if Stream::new(stream, false).is_default() {
            return Err(INVALID_HANDLE);
        }
        tables()?.streams.all.remove(stream, INVALID_HANDLE)?;
        driver()?.work.forget_stream(stream);
        Ok(())
    }

    fn cuStreamSynchronize, cuStreamSynchronize_ptsz(stream: u64) { synchronize(Stream::new(stream, PER_THREAD)) }

    fn cuStreamQuery, cuStreamQuery_ptsz(stream: u64) {
        let stream = Stream::new(stream, PER_THREAD);
        let driver = driver()?;
        driver.work.query_stream(driver, &lane_of_work(driver, stream)?)
    }

    fn cuStreamGetFlags, cuStreamGetFlags_ptsz(stream: u64, flags: Out<u32>) {
        flags.put(ask(Stream::new(stream, PER_THREAD), 0, |state| state.flags)?)
    }

    fn cuStreamGetPriority, cuStreamGetPriority_ptsz(stream: u64, priority: Out<c_int>) {
        priority.put(ask(Stream::new(stream, PER_THREAD), 0, |state| state.priority)?)
    }

    fn cuStreamGetId, cuStreamGetId_ptsz(stream: u64, id: Out<u64>) {
        let stream = Stream::new(stream, PER_THREAD);
        id.put(ask(stream, stream.0, |state| state.number)?)
    }

    fn cuStreamGetCtx, cuStreamGetCtx_ptsz(stream: u64, context: Out<u64>) {
        context.put(Stream::new(stream, PER_THREAD).context()?.handle())
    }

    fn cuStreamGetCtx_v2, cuStreamGetCtx_v2_ptsz(stream: u64, context: Out<u64>, green: Out<u64>) {
        green.put_if_wanted(0);
        context.put(Stream::new(stream, PER_THREAD).context()?.handle())
    }

    fn cuStreamGetDevice, cuStreamGetDevice_ptsz(stream: u64, device: Out<c_int>) {
        device.put(driver()?.device(Stream::new(stream, PER_THREAD).context()?.gpu))
    }

    fn cuStreamWaitEvent, cuStreamWaitEvent_ptsz(stream: u64, event: u64, flags: u32) {
        let _ = flags;
        wait(Stream::new(stream, PER_THREAD), event)
    }

    fn cuStreamCopyAttributes, cuStreamCopyAttributes_ptsz(to: u64, from: u64) {
        Stream::new(to, PER_THREAD).context()?;
        Stream::new(from, PER_THREAD).context().map(drop)
    }

    fn cuStreamAddCallback, cuStreamAddCallback_ptsz(
        stream: u64, function: Callback, data: u64, flags: u32
    ) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        submit(Stream::new(stream, PER_THREAD), Operation::Callback { stream, function, data })
    }

    fn cuLaunchHostFunc, cuLaunchHostFunc_ptsz(stream: u64, function: HostFunction, data: u64) {
        submit(Stream::new(stream, PER_THREAD), Operation::Host { function, data })
    }

    fn cuEventCreate(event: Out<u64>, flags: u32) {
        let context = current()?;
        event.wanted()?;
        if flags & !7 != 0 {
            return Err(INVALID_VALUE);
        }
        event.put(tables()?.streams.new_event(context, flags))
    }

    fn cuEventDestroy, cuEventDestroy_v2(event: u64) {
        tables()?.streams.events.remove(event, INVALID_HANDLE)?;
        driver()?.work.forget_event(event);
        Ok(())
    }

    fn cuEventRecord, cuEventRecord_ptsz(event: u64, stream: u64) { record(event, Stream::new(stream, PER_THREAD)) }

    fn cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz(event: u64, stream: u64, flags: u32) {
        if flags & !1 != 0 {
            return Err(INVALID_VALUE);
        }
        record(event, Stream::new(stream, PER_THREAD))
    }

    fn cuEventQuery(event: u64) {
        if tables()?.streams.events.get(event, INVALID_HANDLE)?.captured.is_some() {
            return Err(CAPTURED_EVENT);
        }
        let driver = driver()?;
        driver.work.query_event(driver, event)
    }

    fn cuEventSynchronize(event: u64) {
        let driver = driver()?;
        let mut tables = driver.tables();
        if tables.streams.events.get(event, INVALID_HANDLE)?.captured.is_some() {
            return Err(CAPTURED_EVENT);
        }
        drop(tables);
        driver.work.wait_for_event(driver, event)?;
        driver.tables().settle(driver);
        Ok(())
    }

    fn cuEventElapsedTime, cuEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) {
        milliseconds.wanted()?;
        let driver = driver()?;
        let happened = |event: u64| {
            if driver.tables().streams.events.get(event, INVALID_HANDLE)?.flags & NO_TIMING != 0 {
                return Err(INVALID_HANDLE);
            }
            driver.work.event_time(driver, event)
        };
        let (start, end) = (happened(start)?, happened(end)?);
        let elapsed = Duration::from_nanos(end.abs_diff(start)).as_secs_f32() * 1000.0;
        milliseconds.put(if end >= start { elapsed } else { -elapsed })
    }
}
