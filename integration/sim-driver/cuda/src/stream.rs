//! Streams and events, and the one way that work goes: `submit`. Work is done as soon as it is submitted, in the thread that
//! submits it; a model of the time that it takes would put it into a queue here, and do it from there.

use std::{
    ffi::{c_int, c_void},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Instant,
};

use crate::{
    capture::{Capture, capturing},
    context::{self, Context, current},
    copy::{Copy, Fill},
    driver::{Registry, driver, tables},
    ffi::{Error, INVALID_HANDLE, INVALID_VALUE, Out, Outcome, STREAM_CAPTURE_UNSUPPORTED, api},
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
}

/// A program's callback (`CUhostFn`).
pub(crate) type HostFunction = extern "C" fn(*mut c_void);

/// Work.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    /// Only its place in the order matters.
    Nothing,
    /// A kernel, with so many threads. What it computes is not simulated.
    Kernel {
        threads: u64,
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
    /// An event happens.
    Record {
        event: u64,
    },
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
    happened: Option<Instant>,
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
        self.events.add(Event { context: context.handle(), flags, happened: None, captured: None })
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
    drop(tables);
    perform(context, &operation)
}

/// Does work.
pub(crate) fn perform(context: &'static Context, operation: &Operation) -> Outcome {
    let driver = driver()?;
    match *operation {
        Operation::Nothing => Ok(()),
        Operation::Kernel { threads } => {
            let client = &driver.link.state.clients[driver.link.slot];
            client.launches[context.gpu].fetch_add(1, Relaxed);
            client.threads[context.gpu].fetch_add(threads, Relaxed);
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
        Operation::Record { event } => {
            driver.tables().streams.events.get(event, INVALID_HANDLE)?.happened = Some(Instant::now());
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

fn synchronize(stream: Stream) -> Outcome {
    stream.context()?;
    let driver = driver()?;
    let mut tables = driver.tables();
    if capturing(&mut tables, stream)?.is_some() {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    tables.settle(driver);
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
    stream.context()?;
    let mut tables = tables()?;
    let Some(from) = tables.streams.events.get(event, INVALID_HANDLE)?.captured.clone() else {
        return Ok(());
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
        tables()?.streams.all.remove(stream, INVALID_HANDLE).map(drop)
    }

    fn cuStreamSynchronize, cuStreamSynchronize_ptsz(stream: u64) { synchronize(Stream::new(stream, PER_THREAD)) }

    fn cuStreamQuery, cuStreamQuery_ptsz(stream: u64) {
        let stream = Stream::new(stream, PER_THREAD);
        stream.context()?;
        match capturing(&mut *tables()?, stream)? {
            Some(_) => Err(STREAM_CAPTURE_UNSUPPORTED),
            None => Ok(()),
        }
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
        stream: u64, function: extern "C" fn(u64, c_int, *mut c_void), data: *mut c_void, flags: u32
    ) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        submit(Stream::new(stream, PER_THREAD), Operation::Nothing)?;
        function(stream, 0, data);
        Ok(())
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
        tables()?.streams.events.remove(event, INVALID_HANDLE).map(drop)
    }

    fn cuEventRecord, cuEventRecord_ptsz(event: u64, stream: u64) { record(event, Stream::new(stream, PER_THREAD)) }

    fn cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz(event: u64, stream: u64, flags: u32) {
        if flags & !1 != 0 {
            return Err(INVALID_VALUE);
        }
        record(event, Stream::new(stream, PER_THREAD))
    }

    fn cuEventQuery(event: u64) {
        match tables()?.streams.events.get(event, INVALID_HANDLE)?.captured {
            Some(_) => Err(CAPTURED_EVENT),
            None => Ok(()),
        }
    }

    fn cuEventSynchronize(event: u64) {
        let driver = driver()?;
        let mut tables = driver.tables();
        if tables.streams.events.get(event, INVALID_HANDLE)?.captured.is_some() {
            return Err(CAPTURED_EVENT);
        }
        tables.settle(driver);
        Ok(())
    }

    fn cuEventElapsedTime, cuEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) {
        milliseconds.wanted()?;
        let mut tables = tables()?;
        let mut happened = |event: u64| {
            let event = tables.streams.events.get(event, INVALID_HANDLE)?;
            if event.flags & NO_TIMING != 0 { Err(INVALID_HANDLE) } else { event.happened.ok_or(INVALID_HANDLE) }
        };
        let (start, end) = (happened(start)?, happened(end)?);
        let elapsed = if end >= start { (end - start).as_secs_f32() } else { -(start - end).as_secs_f32() };
        milliseconds.put(elapsed * 1000.0)
    }
}
