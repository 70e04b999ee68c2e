//! Capturing: streams whose work becomes a graph instead of being done.

use std::{
    ffi::{c_int, c_void},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use crate::{
    driver::{Tables, driver, tables},
    ffi::{
        ILLEGAL_STATE, INVALID_VALUE, In, Out, Outcome, STREAM_CAPTURE_UNMATCHED, STREAM_CAPTURE_UNSUPPORTED,
        api,
    },
    stream::Stream,
};

/// A stream's part in the making of a graph.
#[derive(Clone, Debug)]
pub(crate) struct Capture {
    pub graph: u64,
    pub number: u64,
    /// What the next node depends on.
    pub tail: Vec<u64>,
    /// Whether the capture began in this stream.
    pub origin: bool,
}

/// Where work goes while a stream is captured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Captured {
    pub graph: u64,
    stream: Stream,
}

/// Where work that is submitted to a stream goes, if that is being captured.
pub(crate) fn capturing(tables: &mut Tables, stream: Stream) -> Outcome<Option<Captured>> {
    if stream.is_default() {
        return Ok(None);
    }
    let capture = tables.streams.capture(stream)?;
    Ok(capture.as_ref().map(|capture| Captured { graph: capture.graph, stream }))
}

impl Tables {
    /// What the next node of a captured stream depends on.
    pub(crate) fn captured_tail(&mut self, capture: Captured) -> Outcome<Vec<u64>> {
        let state = self.streams.capture(capture.stream)?.as_ref();
        Ok(state.map(|capture| capture.tail.clone()).unwrap_or_default())
    }

    /// A node was made of what a captured stream was given.
    pub(crate) fn captured_node(&mut self, capture: Captured, node: u64) -> Outcome {
        if let Some(state) = self.streams.capture(capture.stream)? {
            state.tail = vec![node];
        }
        Ok(())
    }

    fn end_capture(&mut self, stream: Stream) -> Outcome<u64> {
        let capture = self.streams.capture(stream)?.take().ok_or(ILLEGAL_STATE)?;
        if !capture.origin {
            *self.streams.capture(stream)? = Some(capture);
            return Err(STREAM_CAPTURE_UNMATCHED);
        }
        self.streams.end_captures_of(capture.graph);
        Ok(capture.graph)
    }
}

fn begin_capture(stream: u64, per_thread: bool, graph: Option<(u64, Vec<u64>)>) -> Outcome {
    let stream = Stream::new(stream, per_thread);
    stream.context()?;
    if stream.is_default() {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    let mut tables = tables()?;
    if tables.streams.capture(stream)?.is_some() {
        return Err(ILLEGAL_STATE);
    }
    let (graph, tail) = match graph {
        Some(graph) => graph,
        None => (tables.graphs.create(), vec![]),
    };
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    let number = NUMBER.fetch_add(1, Relaxed);
    *tables.streams.capture(stream)? = Some(Capture { graph, number, tail, origin: true });
    Ok(())
}

/// Status (0 none, 1 active), number and graph of a stream's capture.
fn capture_info(stream: Stream) -> Outcome<(c_int, u64, u64)> {
    stream.context()?;
    if stream.is_default() {
        return Ok((0, 0, 0));
    }
    let mut tables = tables()?;
    let capture = tables.streams.capture(stream)?;
    Ok(capture.as_ref().map_or((0, 0, 0), |capture| (1, capture.number, capture.graph)))
}

api! {
    fn cuStreamBeginCapture, cuStreamBeginCapture_ptsz(stream: u64) { begin_capture(stream, PER_THREAD, None) }

    fn cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz(stream: u64, mode: c_int) {
        if !(0..=2).contains(&mode) {
            return Err(INVALID_VALUE);
        }
        begin_capture(stream, PER_THREAD, None)
    }

    fn cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz(
        stream: u64, graph: u64, after: In<u64>, edges: *const c_void, count: usize, mode: c_int
    ) {
        let _ = edges;
        if !(0..=2).contains(&mode) {
            return Err(INVALID_VALUE);
        }
        let tail = (0..count).map(|at| after.get_at(at)).collect::<Outcome<Vec<u64>>>()?;
        tables()?.graphs.there(graph)?;
        begin_capture(stream, PER_THREAD, Some((graph, tail)))
    }

    fn cuStreamEndCapture, cuStreamEndCapture_ptsz(stream: u64, graph: Out<u64>) {
        let stream = Stream::new(stream, PER_THREAD);
        stream.context()?;
        graph.wanted()?;
        if stream.is_default() {
            return Err(ILLEGAL_STATE);
        }
        graph.put(tables()?.end_capture(stream)?)
    }

    fn cuStreamIsCapturing, cuStreamIsCapturing_ptsz(stream: u64, capturing: Out<c_int>) {
        capturing.put(capture_info(Stream::new(stream, PER_THREAD))?.0)
    }

    fn cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_ptsz(stream: u64, capturing: Out<c_int>, id: Out<u64>) {
        let (active, number, _) = capture_info(Stream::new(stream, PER_THREAD))?;
        id.put_if_wanted(number);
        capturing.put(active)
    }

    // The lists of dependencies stay empty: nodes are added through the stream.
    fn cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2_ptsz(
        stream: u64, capturing: Out<c_int>, id: Out<u64>, graph: Out<u64>, after: Out<*const u64>, count: Out<usize>
    ) {
        let (active, number, of) = capture_info(Stream::new(stream, PER_THREAD))?;
        id.put_if_wanted(number);
        graph.put_if_wanted(of);
        after.put_if_wanted(std::ptr::null());
        count.put_if_wanted(0);
        capturing.put(active)
    }

    fn cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo_v3_ptsz(
        stream: u64, capturing: Out<c_int>, id: Out<u64>, graph: Out<u64>, after: Out<*const u64>,
        edges: Out<*const c_void>, count: Out<usize>
    ) {
        let (active, number, of) = capture_info(Stream::new(stream, PER_THREAD))?;
        id.put_if_wanted(number);
        graph.put_if_wanted(of);
        after.put_if_wanted(std::ptr::null());
        edges.put_if_wanted(std::ptr::null());
        count.put_if_wanted(0);
        capturing.put(active)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: Out<c_int>) {
        driver()?;
        let wanted = mode.get()?;
        if !(0..=2).contains(&wanted) {
            return Err(INVALID_VALUE);
        }
        // Modes only forbid; here nothing is forbidden by them.
        mode.put(0)
    }
}
