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

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::identity,
    ffi::{c_char, c_void},
    sync::atomic::Ordering::{Acquire, Release},
};

use crate::{
    cuda::{
        arguments::{Out, copy_of},
        memory,
        stream::{is_at_work, lane_of, per_thread},
        take, take_quietly,
        types::{
            CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, Context, Device, Exec, Graph, Node, Properties, Result,
            Stream,
        },
        whole,
    },
    lock::Locked,
    log,
    pace::{self, In, Lane},
    real::driver,
    share::{CU_STREAM_PER_THREAD, Place, Share, share},
};

/// Memory that this process's graphs hold.
#[derive(Default)]
pub(crate) struct Graphs {
    /// Per device that graphs have allocated on.
    devices: BTreeMap<Device, Account>,
    /// Executable graphs that allocate.
    execs: BTreeMap<Exec, Executable>,
    /// Executable graphs that there were; the number of the last.
    made: u64,
    /// Runs of graphs that allocate which have not come back from the driver, by number.
    under_way: BTreeMap<u64, Run>,
    /// Runs that there were; the number of the last.
    begun: u64,
    /// Calls under way that have the driver let go of memory of graphs.
    trimming: u32,
}

/// An executable graph that allocates.
#[derive(Clone)]
struct Executable {
    /// The handle may be another's later; this is not.
    number: u64,
    /// Bytes per device.
    wants: Vec<(Device, u64)>,
    /// It allocates what it does not free.
    leaves: bool,
    /// Where it has its memory, if it surely still does.
    has_memory_in: Option<Lane>,
}

/// A run, or upload, that has begun.
struct Run {
    of: Executable,
    /// None where there is no context, of which the driver will say more.
    lane: Option<Lane>,
    /// It has its memory from before; else what it may take is expected.
    relies: bool,
    /// Its memory may have become another's since it began.
    lost: bool,
}

struct Account {
    gpu: usize,
    /// Bytes that the share's account has for graphs on this device.
    charged: u64,
    /// Of these, taken for runs that have not come back from the driver.
    expected: u64,
}

impl Account {
    fn of(gpu: usize) -> Self {
        Self { gpu, charged: 0, expected: 0 }
    }
}

// CUgraphNodeType.
const NODE_GRAPH: i32 = 4;
const NODE_MEM_ALLOC: i32 = 10;
const NODE_MEM_FREE: i32 = 11;
/// CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT.
const RESERVED_MEM_CURRENT: i32 = 2;
/// Graphs within graphs: the driver allows few.
const MAX_DEPTH: u32 = 16;

/// `CUDA_MEM_ALLOC_NODE_PARAMS`, both versions.
#[repr(C)]
struct AllocParameters {
    pool: Properties,
    /// The rest of `CUmemPoolProps`.
    pool_rest: [u64; 9],
    access: *const c_void,
    access_count: usize,
    bytes: usize,
    address: u64,
}
const _: () = assert!(size_of::<AllocParameters>() == 120);

/// What nodes of a graph allocate and free.
#[derive(Default)]
struct Allocations {
    /// Device, bytes and address.
    made: Vec<(Device, u64, u64)>,
    /// Addresses.
    freed: BTreeSet<u64>,
}

impl Allocations {
    /// Those of `graph` and the graphs in it; the driver's error where it does not tell.
    fn of(graph: Graph) -> core::result::Result<Self, Result> {
        let mut all = Self::default();
        all.add(graph, 0)?;
        Ok(all)
    }

    fn add(&mut self, graph: Graph, depth: u32) -> core::result::Result<(), Result> {
        for node in nodes(graph)? {
            let mut kind = 0;
            // SAFETY: the node is of the graph, which lives; `kind` outlives the call.
            succeeded(unsafe { driver!(cuda::cuGraphNodeGetType(node => Node, &raw mut kind => *mut i32)) })?;
            match kind {
                NODE_GRAPH => {
                    if depth == MAX_DEPTH {
                        log::line(format_args!(
                            "a graph is refused: {MAX_DEPTH} graphs within each other are looked at"
                        ));
                        return Err(CUDA_ERROR_OUT_OF_MEMORY);
                    }
                    let mut inner = 0;
                    // SAFETY: as above.
                    succeeded(unsafe {
                        driver!(cuda::cuGraphChildGraphNodeGetGraph(node => Node, &raw mut inner => *mut Graph))
                    })?;
                    self.add(inner, depth + 1)?;
                }
                NODE_MEM_ALLOC => self.made.extend(allocation(node)?),
                NODE_MEM_FREE => {
                    let mut address = 0;
                    // SAFETY: as above.
                    succeeded(unsafe {
                        driver!(cuda::cuGraphMemFreeNodeGetParams(node => Node, &raw mut address => *mut u64))
                    })?;
                    self.freed.insert(address);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether something is left that the graph does not free.
    fn leave(&self) -> bool {
        self.made.iter().any(|(.., address)| !self.freed.contains(address))
    }
}

/// A result as one that can be handed on.
fn succeeded(result: Result) -> core::result::Result<(), Result> {
    if result == CUDA_SUCCESS { Ok(()) } else { Err(result) }
}

/// The nodes of a graph, which must live.
fn nodes(graph: Graph) -> core::result::Result<Vec<Node>, Result> {
    let mut count = 0_usize;
    // SAFETY: the caller's promise; without room the driver tells the number.
    succeeded(unsafe {
        driver!(cuda::cuGraphGetNodes(graph => Graph, std::ptr::null_mut() => *mut Node, &raw mut count => *mut usize))
    })?;
    loop {
        // With room for one more, that all were told is certain.
        let mut nodes: Vec<Node> = vec![0; count + 1];
        let room = nodes.len();
        count = room;
        // SAFETY: there is room for `count`.
        succeeded(unsafe {
            driver!(cuda::cuGraphGetNodes(graph => Graph, nodes.as_mut_ptr() => *mut Node, &raw mut count => *mut usize))
        })?;
        if count < room {
            nodes.truncate(count);
            return Ok(nodes);
        }
        count = room * 2;
    }
}

/// What a node allocates, which is one that allocates; none of a device's memory where it is the host's.
fn allocation(node: Node) -> core::result::Result<Option<(Device, u64, u64)>, Result> {
    // Later versions may have more to say.
    let mut room = [0_u64; 64];
    let parameters: *mut AllocParameters = room.as_mut_ptr().cast();
    // SAFETY: the room is aligned and larger than the structure.
    succeeded(unsafe {
        driver!(cuda::cuGraphMemAllocNodeGetParams(node => Node, parameters => *mut AllocParameters))
    })?;
    // SAFETY: written on success; any bits are a value.
    let AllocParameters { pool, bytes, address, .. } = unsafe { parameters.read() };
    Ok(pool.device().map(|device| (device, whole(bytes as u64), address)))
}

/// Bytes per device that such allocations take together: large ones whole pages of their own, small ones share theirs.
fn together(list: &[(Device, u64, u64)]) -> Vec<(Device, u64)> {
    let mut devices: BTreeMap<Device, (u64, u64)> = BTreeMap::new();
    for (device, bytes, _) in list {
        let (large, small) = devices.entry(*device).or_default();
        let sum = if *bytes > memory::SMALL { large } else { small };
        *sum = sum.saturating_add(memory::taken(*bytes));
    }
    let pages = |small: u64| small.checked_next_multiple_of(memory::PAGE).unwrap_or(u64::MAX);
    devices.into_iter().map(|(device, (large, small))| (device, large.saturating_add(pages(small)))).collect()
}

/// Bytes that the driver keeps for graphs on a device, if it says so.
fn reserved(device: Device) -> Option<u64> {
    let mut bytes = 0_u64;
    // SAFETY: `bytes` has the attribute's type and outlives the call.
    let result = unsafe {
        driver!(cuda::cuDeviceGetGraphMemAttribute(
            device => Device, RESERVED_MEM_CURRENT => i32, (&raw mut bytes).cast() => *mut c_void,
        ))
    };
    (result == CUDA_SUCCESS).then_some(whole(bytes))
}

impl Graphs {
    /// Brings the accounts in line with what the driver keeps, and what runs under way may still take.
    fn settle(&mut self, share: &Share) {
        let again: BTreeMap<Device, u64> =
            self.devices.keys().map(|device| (*device, self.taken_again(*device))).collect();
        for (device, account) in &mut self.devices {
            let Some(reserved) = reserved(*device) else { continue };
            let least = reserved.saturating_add(account.expected);
            if least > account.charged {
                share.charge(account.gpu, least - account.charged);
                account.charged = least;
            } else {
                // Of what is free, runs that have lost their memory may take as much again.
                let most = least.saturating_add(again.get(device).copied().unwrap_or(0));
                share.give(account.gpu, account.charged.saturating_sub(most));
                account.charged = account.charged.min(most);
            }
        }
    }

    /// Bytes of a device that runs under way relied on and may have lost. Those of one lane have the same memory.
    fn taken_again(&self, device: Device) -> u64 {
        let mut lanes: Vec<(Option<Lane>, u64)> = Vec::new();
        for run in self.under_way.values().filter(|run| run.relies && run.lost) {
            let bytes = run.of.bytes_of(device);
            match lanes.iter_mut().find(|(lane, _)| *lane == run.lane) {
                Some((_, most)) => *most = bytes.max(*most),
                None => lanes.push((run.lane, bytes)),
            }
        }
        lanes.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Whether a run of `exec` in `lane` has its memory there. One that leaves memory behind keeps what others of its lane have.
    fn has_memory(&self, exec: &Executable, lane: Option<Lane>) -> bool {
        let keeps_it =
            |run: &Run| run.lane == lane && run.of.number != exec.number && (run.of.leaves || exec.leaves);
        lane.is_some() && exec.has_memory_in == lane && !self.under_way.values().any(keeps_it)
    }

    /// A run begins; its number.
    fn begin(&mut self, of: Executable, lane: Option<Lane>, relies: bool) -> u64 {
        self.begun += 1;
        self.under_way.insert(self.begun, Run { of, lane, relies, lost: self.trimming > 0 });
        self.begun
    }

    /// What the driver keeps for graphs on a device may go from now on, until `trimming` is again what it was.
    fn begin_trim(&mut self, device: Device) {
        self.trimming += 1;
        let all = self.execs.values_mut().filter(|exec| exec.bytes_of(device) > 0);
        all.for_each(|exec| exec.has_memory_in = None);
        let all = self.under_way.values_mut().filter(|run| run.of.bytes_of(device) > 0);
        all.for_each(|run| run.lost = true);
    }

    /// What graphs have in a lane of which `lost` says so they may have no more.
    fn lose(&mut self, lost: impl Fn(Lane) -> bool) {
        let all = self.execs.values_mut();
        all.filter(|exec| exec.has_memory_in.is_some_and(&lost)).for_each(|exec| exec.has_memory_in = None);
        // A lane that is lost may be gone: it is not asked about again.
        let all = self.under_way.values_mut().filter(|run| !run.lost);
        all.filter(|run| run.lane.is_none_or(&lost)).for_each(|run| run.lost = true);
    }

    /// Bytes that the driver keeps for graphs.
    fn kept(&self) -> u64 {
        self.devices.keys().fold(0, |kept, device| kept + reserved(*device).unwrap_or(0))
    }
}

impl Executable {
    /// Bytes of a device that it wants.
    fn bytes_of(&self, device: Device) -> u64 {
        self.wants.iter().filter(|(of, _)| *of == device).map(|(_, bytes)| bytes).sum()
    }
}

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
    let (of, relying) = {
        let mut graphs = state.graphs.lock();
        let Some(graphs) = &mut *graphs else { return call() };
        let Some(of) = graphs.execs.get(&exec).cloned() else { return call() };
        let relying = graphs.has_memory(&of, lane).then(|| graphs.begin(of.clone(), lane, true));
        (of, relying)
    };
    let wanted: &[(Device, u64)] = if relying.is_some() { &[] } else { &of.wants };
    let Some(taken) = take_all(share, wanted) else { return CUDA_ERROR_OUT_OF_MEMORY };
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
        (number, alone, if taken.is_empty() { 0 } else { graphs.kept() })
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
    if !taken.is_empty() {
        let alone = alone && graphs.begun == number;
        let grown = graphs.kept().saturating_sub(before);
        if !alone || grown < taken.iter().map(|(.., bytes)| bytes).sum() {
            let _relaxed = pace::AnyCapture::new();
            graphs.lose(|other| Some(other) != lane && !is_at_work(other));
        }
    }
    if of.leaves {
        graphs.lose(|other| lane.is_none_or(|lane| lane == other));
    }
    if let Some(exec) = graphs.execs.get_mut(&exec).filter(|exec| exec.number == of.number) {
        exec.has_memory_in = lane.filter(|_| result == CUDA_SUCCESS && !lost);
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
            graphs.made += 1;
            let number = graphs.made;
            let (wants, leaves) = (together(&allocations.made), allocations.leave());
            graphs.execs.insert(exec, Executable { number, wants, leaves, has_memory_in: None });
        }
    });
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
