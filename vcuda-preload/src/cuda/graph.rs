//! Memory of graphs. The driver takes it when a graph is launched or uploaded, from what it keeps for graphs of the same stream,
//! and keeps it for the next run; how much it keeps it tells per device (CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT). What a graph may
//! take is in its allocation nodes, which stay what they are once they are added. A process whose graphs do not allocate pays one
//! look at a flag for a launch.
//!
//! A graph that runs again has its memory where it ran last, except (CUDA programming guide, graph memory nodes, performance):
//! in another stream, after a trim, and where a graph of the same stream has left memory behind that it does not free. And a graph
//! that takes memory may pull it from streams that are idle. Then it wants all of it anew before it runs, and what it did not take is
//! given back. A run that relies on memory from before may lose it while it waits for its turn, and take it again: until it has run,
//! what it relied on stays charged.
//!
//! Of managed memory that prefers no device the driver's figure of a device knows nothing. It counts where the graph first runs,
//! until the executable graph is destroyed.

mod account;
mod nodes;

use std::{
    convert::identity,
    ffi::{c_char, c_void},
    sync::atomic::Ordering::{Acquire, Release},
};

use crate::{
    cuda::{
        arguments::{Out, copy_of},
        stream::{is_at_work, lane_of, per_thread},
        take, take_quietly,
        types::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, Context, Device, Exec, Graph, Node, Result, Stream},
    },
    lock::Locked,
    pace::{self, In},
    real::driver,
    share::{CU_STREAM_PER_THREAD, Place, Share, share},
};

use account::Account;
pub(crate) use account::Graphs;
use nodes::{Allocations, together};

/// Notes a change of what graphs have, in a process whose graphs allocate.
fn note(change: impl FnOnce(&mut Graphs, &'static Share)) {
    if let Some(share) = allocating() {
        change(share.state().graphs.lock().get_or_insert_default(), share);
    }
}

/// A stream is about to be destroyed. Another may get its handle.
pub(super) fn forget_stream(stream: Stream) {
    if stream > CU_STREAM_PER_THREAD {
        note(|graphs, _| graphs.lose(|of| of.stream == stream));
    }
}

/// A context is about to be destroyed, or may be, and its streams with it; 0 for one that is not known.
pub(super) fn forget_context(context: Context) {
    note(|graphs, _| graphs.lose(|of| context == 0 || of.context == context));
}

/// Gives back what the driver no longer keeps for this process's graphs.
pub(super) fn settle(share: &'static Share) {
    if share.state().graphs_allocate.load(Acquire) == 0 {
        return;
    }
    if let Some(mut graphs) = share.state().graphs.try_lock()
        && let Some(graphs) = &mut *graphs
    {
        graphs.settle(share);
    }
}

/// The driver has thrown away all of a device.
pub(super) fn reset(device: Device) {
    note(|graphs, share| {
        graphs.reset(device);
        graphs.settle(share);
    });
}

/// The share, if graphs of this process allocate.
fn allocating() -> Option<&'static Share> {
    share().filter(|share| share.state().graphs_allocate.load(Acquire) != 0)
}

/// Takes what a run wants, or nothing. Before it is refused, the driver lets go of what graphs have and do not use now.
fn take_all(share: &'static Share, wanted: &[(Device, u64)]) -> Option<Vec<(Device, usize, u64)>> {
    let mut taken = Vec::new();
    for (device, bytes) in wanted {
        let is_had = |gpu: &usize| {
            take_quietly(share, *gpu, *bytes) || {
                let _relaxed = pace::AnyCapture::new();
                trim(*device);
                take(share, *gpu, *bytes)
            }
        };
        let Some(gpu) = share.gpu_of_device(*device).filter(is_had) else {
            taken.iter().for_each(|(_, gpu, bytes)| share.give(*gpu, *bytes));
            return None;
        };
        taken.push((*device, gpu, *bytes));
    }
    Some(taken)
}

/// Has the driver run or upload `exec` in `stream`, if what it will take is to be had.
fn run(exec: Exec, stream: Stream, call: impl FnOnce() -> Result) -> Result {
    let Some(share) = allocating() else { return call() };
    let state = share.state();
    let lane = lane_of(share, stream);
    let (of, draws, relying) = {
        let mut graphs = state.graphs.lock();
        let Some(graphs) = &mut *graphs else { return call() };
        let Some(of) = graphs.execs.get(&exec).cloned() else { return call() };
        let draws =
            (of.drawn > 0).then(|| share.here_in(stream)).flatten().and_then(|here| of.to_draw(here.device));
        let has_all = draws.is_none() && graphs.has_memory(&of, lane);
        let relying = has_all.then(|| graphs.begin(of.clone(), lane, true));
        (of, draws, relying)
    };
    let mut wanted = if relying.is_some() { Vec::new() } else { of.wants.clone() };
    let of_driver: u64 = wanted.iter().map(|(_, bytes)| bytes).sum();
    wanted.extend(draws);
    let Some(taken) = take_all(share, &wanted) else { return CUDA_ERROR_OUT_OF_MEMORY };
    let (number, alone, before) = {
        let mut graphs = state.graphs.lock();
        let graphs = graphs.get_or_insert_default();
        let alone = graphs.under_way.is_empty();
        let number = relying.unwrap_or_else(|| graphs.begin(of.clone(), lane, false));
        for (device, gpu, bytes) in &taken {
            let account = graphs.devices.entry(*device).or_insert(Account::of(*gpu));
            account.charged += bytes;
            account.expected += bytes;
        }
        (number, alone, if of_driver == 0 { 0 } else { graphs.kept() })
    };
    // No lock is held while the driver runs it: that may wait for work of another thread's.
    let result = call();
    let mut graphs = state.graphs.lock();
    let graphs = graphs.get_or_insert_default();
    let lost = graphs.under_way.remove(&number).is_none_or(|run| run.lost);
    for (device, _, bytes) in &taken {
        if let Some(account) = graphs.devices.get_mut(device) {
            account.expected = account.expected.saturating_sub(*bytes);
        }
    }
    if of_driver != 0 {
        let alone = alone && graphs.begun == number;
        let grown = graphs.kept().saturating_sub(before);
        if !alone || grown < of_driver {
            let _relaxed = pace::AnyCapture::new();
            graphs.lose(|other| Some(other) != lane && !is_at_work(other));
        }
    }
    if of.leaves {
        graphs.lose(|other| lane.is_none_or(|lane| lane == other));
    }
    if let Some(exec) = graphs.execs.get_mut(&exec).filter(|exec| exec.number == of.number) {
        exec.has_memory_in = lane.filter(|_| result == CUDA_SUCCESS && !lost);
        if result == CUDA_SUCCESS
            && let Some((device, _)) = exec.drawn_to.or(draws)
        {
            exec.drawn_to = Some((device, exec.drawn));
        }
    }
    graphs.settle(share);
    result
}

/// The lock that keeps `graph` from being destroyed.
fn keeping(share: &'static Share, graph: Graph) -> &'static Locked<()> {
    let locks = &share.state().graphs_kept;
    &locks[usize::try_from(graph.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60).unwrap_or(0) % locks.len()]
}

/// Has the driver make an executable graph of `graph`, and notes what it allocates before anybody can run it.
///
/// # Safety
/// `exec` must be null or the application's, and `call` a driver's function that on success writes the handle where it is told.
unsafe fn instantiate(exec: *mut Exec, graph: Graph, call: impl FnOnce(*mut Exec) -> Result) -> Result {
    // SAFETY: the caller's promise.
    let exec = unsafe { Out::new(exec) };
    let Some(share) = share() else {
        let result = call(exec.room());
        return exec.hand_over(result);
    };
    // Of a graph that allocates no node can be taken away, so none is missed that was added before.
    let kept = keeping(share, graph).lock();
    let mut result = call(exec.room());
    if result == CUDA_SUCCESS {
        let allocations = Allocations::of(graph);
        drop(kept);
        result = match allocations {
            Ok(allocations) => {
                enter(share, exec.value(), &allocations);
                CUDA_SUCCESS
            }
            Err(error) => {
                // SAFETY: just made, and known to nobody.
                unsafe { driver!(cuda::cuGraphExecDestroy(exec.value() => Exec)) };
                error
            }
        };
    }
    exec.hand_over(result)
}

/// Notes what a new executable graph allocates.
fn enter(share: &'static Share, exec: Exec, allocations: &Allocations) {
    let allocates = !allocations.made.is_empty();
    if allocates {
        share.state().graphs_allocate.store(1, Release);
    }
    note(|graphs, share| {
        graphs.execs.remove(&exec);
        if allocates {
            // What it takes shows on this device even if its nodes keep it to themselves.
            if let Some(Place { gpu: Some(gpu), device, .. }) = share.here() {
                graphs.devices.entry(device).or_insert(Account::of(gpu));
            }
            graphs.enter(exec, together(&allocations.made), allocations.leave());
        }
    });
}

/// Has the driver make `exec` do what `graph` does, which then allocates what that does. Both have the same nodes, so one that
/// allocates does so before and after.
fn update(exec: Exec, graph: Graph, call: impl FnOnce() -> Result) -> Result {
    let Some(share) = allocating() else { return call() };
    let _kept = keeping(share, graph).lock();
    let mut graphs = share.state().graphs.lock();
    let graphs = graphs.get_or_insert_default();
    if !graphs.execs.contains_key(&exec) {
        return call();
    }
    let allocations = match Allocations::of(graph) {
        Ok(allocations) => allocations,
        Err(error) => return error,
    };
    let result = call();
    if result == CUDA_SUCCESS {
        graphs.enter(exec, together(&allocations.made), allocations.leave());
    }
    result
}

macro_rules! updates {
    ($($symbol:ident($($argument:ident: $type:ty),*);)*) => { $(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(exec: Exec, graph: Graph, $($argument: $type),*) -> Result {
            // SAFETY: the arguments are the application's, for the driver to judge.
            update(exec, graph, || unsafe {
                driver!(cuda::$symbol(exec => Exec, graph => Graph, $($argument => $type),*))
            })
        }
    )* };
}
updates! {
    cuGraphExecUpdate(error_node: *mut Node, outcome: *mut i32);
    cuGraphExecUpdate_v2(outcome: *mut c_void);
}

/// Once it is read for an executable graph, which is made of it at this moment.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGraphDestroy(graph: Graph) -> Result {
    let _not_kept = share().map(|share| keeping(share, graph).lock());
    // SAFETY: the argument is the application's, for the driver to judge.
    unsafe { driver!(cuda::cuGraphDestroy(graph => Graph)) }
}

macro_rules! runs {
    ($($symbol:ident in $meant:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(exec: Exec, stream: Stream) -> Result {
            // SAFETY: the arguments are the application's, for the driver to judge.
            run(exec, $meant(stream), || unsafe { driver!(cuda::$symbol(exec => Exec, stream => Stream)) })
        }
    )* };
}
runs! {
    cuGraphUpload in identity;
    cuGraphUpload_ptsz in per_thread;
}

macro_rules! launches_graph {
    ($($symbol:ident in $stream:path, $meant:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(exec: Exec, stream: Stream) -> Result {
            // SAFETY: the arguments are the application's, for the driver to judge.
            let call = || unsafe { driver!(cuda::$symbol(exec => Exec, stream => Stream)) };
            run(exec, $meant(stream), || pace::launch(exec, $stream(stream), call))
        }
    )* };
}
launches_graph! {
    cuGraphLaunch in In::legacy, identity;
    cuGraphLaunch_ptsz in In::per_thread, per_thread;
}

macro_rules! instantiates {
    ($($symbol:ident($($argument:ident: $type:ty),*);)*) => { $(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(exec: *mut Exec, graph: Graph, $($argument: $type),*) -> Result {
            // SAFETY: the arguments are the application's, for the driver to judge.
            unsafe {
                instantiate(exec, graph, |exec| {
                    driver!(cuda::$symbol(exec => *mut Exec, graph => Graph, $($argument => $type),*))
                })
            }
        }
    )* };
}
instantiates! {
    cuGraphInstantiate(node: *mut Node, log: *mut c_char, size: usize);
    cuGraphInstantiate_v2(node: *mut Node, log: *mut c_char, size: usize);
    cuGraphInstantiateWithFlags(flags: u64);
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct InstantiateParameters {
    flags: u64,
    upload_stream: Stream,
    error_node: Node,
    result: i32,
}
const _: () = assert!(size_of::<InstantiateParameters>() == 32);

macro_rules! instantiates_and_uploads {
    ($($symbol:ident by $upload:ident;)*) => { $(
        /// With CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD it takes the graph's memory, so that is done when it is known how much.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(
            exec: *mut Exec,
            graph: Graph,
            parameters: *mut InstantiateParameters,
        ) -> Result {
            const UPLOAD: u64 = 2;
            const CUDA_GRAPH_INSTANTIATE_ERROR: i32 = 1;
            // SAFETY: the arguments are the application's, for the driver to judge.
            let call = |exec, parameters| unsafe {
                driver!(cuda::$symbol(
                    exec => *mut Exec, graph => Graph, parameters => *mut InstantiateParameters,
                ))
            };
            // SAFETY: null or the application's.
            let Some(given) = (unsafe { copy_of(parameters) }) else { return call(exec, parameters) };
            let mut copy = InstantiateParameters { flags: given.flags & !UPLOAD, ..given };
            // SAFETY: null or the application's.
            let out = unsafe { Out::new(exec) };
            // SAFETY: there is room, and nobody else can run it yet.
            let mut result = unsafe {
                instantiate(out.room(), graph, |exec| call(exec, &raw mut copy))
            };
            if result == CUDA_SUCCESS && given.flags & UPLOAD != 0 {
                // SAFETY: the driver's, and the application's stream, for the driver to judge.
                unsafe {
                    result = $upload(out.value(), given.upload_stream);
                    if result != CUDA_SUCCESS {
                        cuGraphExecDestroy(out.value());
                        copy.result = CUDA_GRAPH_INSTANTIATE_ERROR;
                    }
                }
            }
            // SAFETY: as they were read.
            unsafe {
                (*parameters).error_node = copy.error_node;
                (*parameters).result = copy.result;
            }
            out.hand_over(result)
        }
    )* };
}
instantiates_and_uploads! {
    cuGraphInstantiateWithParams by cuGraphUpload;
    cuGraphInstantiateWithParams_ptsz by cuGraphUpload_ptsz;
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGraphExecDestroy(exec: Exec) -> Result {
    let number_of = |graphs: &Graphs| graphs.execs.get(&exec).map(|exec| exec.number);
    let mut number = None;
    note(|graphs, _| number = number_of(graphs));
    // SAFETY: the argument is the application's, for the driver to judge.
    let result = unsafe { driver!(cuda::cuGraphExecDestroy(exec => Exec)) };
    if result == CUDA_SUCCESS {
        note(|graphs, share| {
            // Another thread may have got the same handle for another one.
            if number_of(graphs) == number {
                graphs.execs.remove(&exec);
            }
            graphs.settle(share);
        });
    }
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGraphMemTrim(device: Device) -> Result {
    trim(device)
}

fn trim(device: Device) -> Result {
    let mut begun = false;
    note(|graphs, _| {
        graphs.begin_trim(device);
        begun = true;
    });
    // SAFETY: the argument is for the driver to judge.
    let result = unsafe { driver!(cuda::cuDeviceGraphMemTrim(device => Device)) };
    note(|graphs, share| {
        graphs.trimming -= u32::from(begun);
        graphs.settle(share);
    });
    result
}
