//! Memory of graphs. The driver takes it when a graph is launched or uploaded, from what it keeps for graphs of the same stream,
//! and keeps it for the next run; how much it keeps it tells per device (CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT). What a graph may
//! take is in its allocation nodes, which stay what they are once they are added. A process whose graphs do not allocate pays one
//! look at a flag for a launch.
//!
//! A graph that runs again has its memory where it ran last, except (CUDA programming guide, graph memory nodes, performance):
//! in another stream, after a trim, and where a graph of the same stream has left memory behind that it does not free. And a graph
//! that takes memory may pull it from streams that are idle. Then it wants all of it anew before it runs, and what it did not take is
//! given back.

use std::{
    collections::BTreeMap,
    convert::identity,
    ffi::{c_char, c_void},
    sync::atomic::Ordering::{Acquire, Release},
};

use crate::{
    cuda::{
        arguments::{Out, copy_of},
        memory, pool, take, take_quietly,
        types::{
            CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, Device, Exec, Graph, Node, Properties, Result, Stream,
        },
        whole,
    },
    pace::{self, In},
    real::driver,
    share::{CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, Place, Share, share},
};

/// Memory that this process's graphs hold.
#[derive(Default)]
pub(crate) struct Graphs {
    /// Per device that graphs have allocated on.
    devices: BTreeMap<Device, Account>,
    /// Executable graphs that allocate.
    execs: BTreeMap<Exec, Executable>,
    /// How often the driver was told to let go of memory of graphs.
    trims: u64,
    /// How often a graph began to run that wanted memory.
    takes: u64,
}

/// An executable graph that allocates.
struct Executable {
    /// Bytes per device.
    wants: Vec<(Device, u64)>,
    /// It allocates what it does not free.
    leaves: bool,
    /// The stream in which it has its memory, if it surely still does.
    has_memory_in: Option<Stream>,
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
    freed: Vec<u64>,
}

impl Allocations {
    /// Those of `graph` and the graphs in it.
    fn of(graph: Graph) -> Self {
        let mut all = Self::default();
        all.add(graph, 0);
        all
    }

    fn add(&mut self, graph: Graph, depth: u32) {
        let mut count = 0_usize;
        // SAFETY: the graph is the application's; without room the driver tells the number.
        unsafe {
            driver!(cuda::cuGraphGetNodes(graph => Graph, std::ptr::null_mut() => *mut Node, &raw mut count => *mut usize));
        }
        let mut nodes: Vec<Node> = vec![0; count];
        // SAFETY: there is room for `count`.
        let result = unsafe {
            driver!(cuda::cuGraphGetNodes(graph => Graph, nodes.as_mut_ptr() => *mut Node, &raw mut count => *mut usize))
        };
        if result != CUDA_SUCCESS {
            return;
        }
        for node in nodes.into_iter().take(count) {
            let mut kind = 0;
            // SAFETY: the node is of the graph; `kind` outlives the call.
            unsafe { driver!(cuda::cuGraphNodeGetType(node => Node, &raw mut kind => *mut i32)) };
            match kind {
                NODE_GRAPH if depth < MAX_DEPTH => {
                    let mut inner = 0;
                    // SAFETY: as above.
                    let result = unsafe {
                        driver!(cuda::cuGraphChildGraphNodeGetGraph(node => Node, &raw mut inner => *mut Graph))
                    };
                    if result == CUDA_SUCCESS {
                        self.add(inner, depth + 1);
                    }
                }
                NODE_MEM_ALLOC => self.made.extend(allocation(node)),
                NODE_MEM_FREE => {
                    let mut address = 0;
                    // SAFETY: as above.
                    unsafe {
                        driver!(cuda::cuGraphMemFreeNodeGetParams(node => Node, &raw mut address => *mut u64));
                    }
                    self.freed.push(address);
                }
                _ => {}
            }
        }
    }

    /// Whether something is left that the graph does not free.
    fn leave(&self) -> bool {
        self.made.iter().any(|(.., address)| !self.freed.contains(address))
    }
}

/// What a node allocates, which is one that allocates.
fn allocation(node: Node) -> Option<(Device, u64, u64)> {
    // Later versions may have more to say.
    let mut room = [0_u64; 64];
    let parameters: *mut AllocParameters = room.as_mut_ptr().cast();
    // SAFETY: the room is aligned and larger than the structure.
    let result = unsafe {
        driver!(cuda::cuGraphMemAllocNodeGetParams(node => Node, parameters => *mut AllocParameters))
    };
    // SAFETY: written on success; any bits are a value.
    let AllocParameters { pool, bytes, address, .. } = unsafe { parameters.read() };
    let device = pool.device().filter(|_| result == CUDA_SUCCESS)?;
    Some((device, whole(bytes as u64), address))
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
        for (device, account) in &mut self.devices {
            let Some(reserved) = reserved(*device) else { continue };
            let wanted = reserved.saturating_add(account.expected);
            if wanted > account.charged {
                share.charge(account.gpu, wanted - account.charged);
            } else {
                share.give(account.gpu, account.charged - wanted);
            }
            account.charged = wanted;
        }
    }

    /// Bytes per device that a run of `exec` in `stream` may take, and how often graphs were trimmed so far; none for a graph
    /// that does not allocate.
    fn wants(&self, exec: Exec, stream: Stream) -> Option<(Vec<(Device, u64)>, u64)> {
        let exec = self.execs.get(&exec)?;
        let has_it = exec.has_memory_in == Some(stream);
        Some((if has_it { Vec::new() } else { exec.wants.clone() }, self.trims))
    }

    /// What the driver kept for graphs on a device may be gone.
    fn trimmed(&mut self, device: Device) {
        self.trims += 1;
        let on_device = |exec: &&mut Executable| exec.wants.iter().any(|(of, _)| *of == device);
        self.execs.values_mut().filter(on_device).for_each(|exec| exec.has_memory_in = None);
    }

    /// Executable graphs that have their memory in a stream of which `lost` says so may have it no more.
    fn lose(&mut self, lost: impl Fn(Stream) -> bool) {
        let all = self.execs.values_mut();
        all.filter(|exec| exec.has_memory_in.is_some_and(&lost)).for_each(|exec| exec.has_memory_in = None);
    }

    /// Bytes that the driver keeps for graphs, and those that runs may be about to take.
    fn kept_and_expected(&self) -> (u64, u64) {
        self.devices.iter().fold((0, 0), |(kept, expected), (device, account)| {
            (kept + reserved(*device).unwrap_or(0), expected + account.expected)
        })
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
    note(|graphs, _| graphs.lose(|of| of == stream));
}

/// A context is gone, and its streams with it.
pub(super) fn forget_streams() {
    note(|graphs, _| graphs.lose(|_| true));
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
    let stream = if stream == 0 { CU_STREAM_LEGACY } else { stream };
    let wants = state.graphs.lock().as_ref().and_then(|graphs| graphs.wants(exec, stream));
    let Some((wanted, trims)) = wants else { return call() };
    let Some(taken) = take_all(share, &wanted) else { return CUDA_ERROR_OUT_OF_MEMORY };
    let (mut before, mut others_expect, mut takes) = (0, 0, 0);
    if !taken.is_empty()
        && let Some(graphs) = &mut *state.graphs.lock()
    {
        (before, others_expect) = graphs.kept_and_expected();
        graphs.takes += 1;
        takes = graphs.takes;
        for (device, gpu, bytes) in &taken {
            let account = graphs.devices.entry(*device).or_insert(Account::of(*gpu));
            account.charged += bytes;
            account.expected += bytes;
        }
    }
    // No lock is held while the driver runs it: that may wait for work of another thread's.
    let result = call();
    if let Some(graphs) = &mut *state.graphs.lock() {
        for (device, _, bytes) in &taken {
            if let Some(account) = graphs.devices.get_mut(device) {
                account.expected = account.expected.saturating_sub(*bytes);
            }
        }
        if !taken.is_empty() {
            let grown = graphs.kept_and_expected().0.saturating_sub(before);
            let alone = others_expect == 0 && graphs.takes == takes;
            if !alone || grown < taken.iter().map(|(.., bytes)| bytes).sum() {
                graphs.lose(|of| of != stream && !pool::is_at_work(of));
            }
        }
        if graphs.execs.get(&exec).is_some_and(|exec| exec.leaves) {
            graphs.lose(|of| of == stream);
        }
        if result == CUDA_SUCCESS
            && let Some(exec) = graphs.execs.get_mut(&exec)
        {
            // Each thread has a stream of its own by that handle.
            let known = stream != CU_STREAM_PER_THREAD && graphs.trims == trims;
            exec.has_memory_in = known.then_some(stream);
        }
        graphs.settle(share);
    }
    result
}

/// Has the driver make an executable graph of `graph`, and notes what it allocates before anybody can run it.
///
/// # Safety
/// `exec` must be null or the application's, and `call` a driver's function that on success writes the handle where it is told.
unsafe fn instantiate(exec: *mut Exec, graph: Graph, call: impl FnOnce(*mut Exec) -> Result) -> Result {
    // SAFETY: the caller's promise.
    let exec = unsafe { Out::new(exec) };
    let result = call(exec.room());
    if result == CUDA_SUCCESS
        && let Some(share) = share()
    {
        // Of a graph that allocates no node can be taken away, so none is missed that was added before.
        let allocations = Allocations::of(graph);
        if !allocations.made.is_empty() {
            share.state().graphs_allocate.store(1, Release);
        }
        note(|graphs, share| {
            graphs.execs.remove(&exec.value());
            if !allocations.made.is_empty() {
                // What it takes shows on this device even if its nodes keep it to themselves.
                if let Some(Place { gpu: Some(gpu), device, .. }) = share.here() {
                    graphs.devices.entry(device).or_insert(Account::of(gpu));
                }
                let (wants, leaves) = (together(&allocations.made), allocations.leave());
                graphs.execs.insert(exec.value(), Executable { wants, leaves, has_memory_in: None });
            }
        });
    }
    exec.hand_over(result)
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
    cuGraphUpload_ptsz in pool::per_thread;
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
    cuGraphLaunch_ptsz in In::per_thread, pool::per_thread;
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
    // Forgotten first: once it is destroyed, another thread may get the same handle.
    note(|graphs, _| _ = graphs.execs.remove(&exec));
    // SAFETY: the argument is the application's, for the driver to judge.
    let result = unsafe { driver!(cuda::cuGraphExecDestroy(exec => Exec)) };
    if let Some(share) = share() {
        settle(share);
    }
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGraphMemTrim(device: Device) -> Result {
    trim(device)
}

fn trim(device: Device) -> Result {
    // SAFETY: the argument is for the driver to judge.
    let result = unsafe { driver!(cuda::cuDeviceGraphMemTrim(device => Device)) };
    note(|graphs, share| {
        graphs.trimmed(device);
        graphs.settle(share);
    });
    result
}
