//! Memory of graphs. A graph that allocates takes its memory when it is first run or uploaded, and the driver keeps it
//! for the next run; how much it keeps it tells per device (CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT). What a graph may
//! take is in its allocation nodes. A process whose graphs do not allocate pays one look at a flag.

use std::{
    collections::BTreeMap,
    ffi::{c_char, c_void},
    sync::atomic::Ordering::{Acquire, Release},
};

use crate::{
    cuda::{
        memory, take,
        types::{
            CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, Device, Exec, Graph, Node, Properties, Result, Stream,
        },
        whole,
    },
    pace::{self, In},
    real::driver,
    share::{Place, Share, share},
};

/// Memory that this process's graphs hold.
#[derive(Default)]
pub(crate) struct Graphs {
    /// Per device that graphs have allocated on.
    devices: BTreeMap<Device, Account>,
    /// What an executable graph allocates, until it has been run.
    pending: BTreeMap<Exec, Vec<(Device, u64)>>,
    /// The same of those that have been run: their memory is among what the driver keeps.
    run: BTreeMap<Exec, Vec<(Device, u64)>>,
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
/// CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT.
const RESERVED_MEM_CURRENT: i32 = 2;
/// Graphs within graphs: the driver allows few.
const MAX_DEPTH: u32 = 16;

/// `CUDA_MEM_ALLOC_NODE_PARAMS`, both versions.
#[repr(C)]
pub(crate) struct AllocParameters {
    pool: Properties,
    /// The rest of `CUmemPoolProps`.
    pool_rest: [u64; 9],
    access: *const c_void,
    access_count: usize,
    bytes: usize,
    address: u64,
}
const _: () = assert!(size_of::<AllocParameters>() == 120);

/// Beginning of `CUgraphNodeParams`.
#[repr(C)]
pub(crate) struct NodeParameters {
    kind: i32,
}

/// Notes that this process makes graphs that allocate.
pub(super) fn will_allocate(share: &Share) {
    share.state().graphs_allocate.store(1, Release);
}

/// The share, if graphs of this process allocate.
fn allocating() -> Option<&'static Share> {
    share().filter(|share| share.state().graphs_allocate.load(Acquire) != 0)
}

/// What the nodes of a graph allocate.
fn allocations(graph: Graph, depth: u32, found: &mut Vec<(Device, u64)>) {
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
        let (mut kind, mut inner) = (0, 0);
        // SAFETY: the node is of the graph; `kind` outlives the call.
        unsafe { driver!(cuda::cuGraphNodeGetType(node => Node, &raw mut kind => *mut i32)) };
        if kind == NODE_GRAPH && depth < MAX_DEPTH {
            // SAFETY: the same of `inner`.
            let result = unsafe {
                driver!(cuda::cuGraphChildGraphNodeGetGraph(node => Node, &raw mut inner => *mut Graph))
            };
            if result == CUDA_SUCCESS {
                allocations(inner, depth + 1, found);
            }
        } else if kind == NODE_MEM_ALLOC {
            // Later versions may have more to say.
            let mut room = [0_u64; 64];
            let parameters: *mut AllocParameters = room.as_mut_ptr().cast();
            // SAFETY: the room is aligned and larger than the structure.
            let result = unsafe {
                driver!(cuda::cuGraphMemAllocNodeGetParams(node => Node, parameters => *mut AllocParameters))
            };
            // SAFETY: written on success; any bits are a value.
            let AllocParameters { pool, bytes, .. } = unsafe { parameters.read() };
            if let Some(device) = pool.device().filter(|_| result == CUDA_SUCCESS) {
                found.push((device, whole(bytes as u64)));
            }
        }
    }
}

/// Bytes per device that such allocations take together: large ones whole pages of their own, small ones share theirs.
fn together(list: &[(Device, u64)]) -> Vec<(Device, u64)> {
    let mut devices: BTreeMap<Device, (u64, u64)> = BTreeMap::new();
    for (device, bytes) in list {
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

    /// What the driver kept for graphs may be gone: each takes its memory anew when it runs next.
    fn forget_runs(&mut self, device: Device) {
        let gone: Vec<Exec> = self
            .run
            .iter()
            .filter(|(_, list)| list.iter().any(|(d, _)| *d == device))
            .map(|(e, _)| *e)
            .collect();
        for exec in gone {
            if let Some(list) = self.run.remove(&exec) {
                self.pending.insert(exec, list);
            }
        }
    }

    fn forget(&mut self, exec: Exec) {
        self.pending.remove(&exec);
        self.run.remove(&exec);
    }
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

/// Has the driver run or upload `exec`, if what it will take is to be had.
fn run(exec: Exec, call: impl FnOnce() -> Result) -> Result {
    let Some(share) = allocating() else { return call() };
    let state = share.state();
    let wanted = state.graphs.lock().get_or_insert_default().pending.get(&exec).cloned().unwrap_or_default();

    let mut taken: Vec<(Device, usize, u64)> = Vec::new();
    let mut refused = false;
    for (device, bytes) in wanted {
        match share.gpu_of_device(device).filter(|gpu| take(share, *gpu, bytes)) {
            Some(gpu) => taken.push((device, gpu, bytes)),
            None => {
                refused = true;
                break;
            }
        }
    }
    if refused {
        taken.iter().for_each(|(_, gpu, bytes)| share.give(*gpu, *bytes));
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if let Some(graphs) = &mut *state.graphs.lock() {
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
        if result == CUDA_SUCCESS
            && let Some(list) = graphs.pending.remove(&exec)
        {
            graphs.run.insert(exec, list);
        }
        graphs.settle(share);
    }
    result
}

/// Has the driver make an executable graph of `graph`, and notes what it allocates.
///
/// # Safety
/// `call` must be a driver's function that on success writes the handle through `exec`.
unsafe fn instantiate(exec: *mut Exec, graph: Graph, call: impl FnOnce() -> Result) -> Result {
    let Some(share) = allocating() else { return call() };
    let mut list = Vec::new();
    allocations(graph, 0, &mut list);
    let result = call();
    if result == CUDA_SUCCESS {
        let mut graphs = share.state().graphs.lock();
        let graphs = graphs.get_or_insert_default();
        // What it takes shows on this device even if its nodes keep it to themselves.
        if let Some(Place { gpu: Some(gpu), device, .. }) = share.here() {
            graphs.devices.entry(device).or_insert(Account::of(gpu));
        }
        // SAFETY: written on success.
        let exec = unsafe { *exec };
        graphs.forget(exec);
        if !list.is_empty() {
            graphs.pending.insert(exec, together(&list));
        }
        graphs.settle(share);
    }
    result
}

macro_rules! runs {
    ($($symbol:ident),*) => { $(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(exec: Exec, stream: Stream) -> Result {
            // SAFETY: the arguments are the application's, for the driver to judge.
            run(exec, || unsafe { driver!(cuda::$symbol(exec => Exec, stream => Stream)) })
        }
    )* };
}
runs!(cuGraphUpload, cuGraphUpload_ptsz);

macro_rules! launches_graph {
    ($($symbol:ident in $stream:path;)*) => { $(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(exec: Exec, stream: Stream) -> Result {
            // SAFETY: the arguments are the application's, for the driver to judge.
            let call = || unsafe { driver!(cuda::$symbol(exec => Exec, stream => Stream)) };
            run(exec, || pace::launch(exec, $stream(stream), call))
        }
    )* };
}
launches_graph! {
    cuGraphLaunch in In::legacy;
    cuGraphLaunch_ptsz in In::per_thread;
}

macro_rules! instantiates {
    ($($symbol:ident($($argument:ident: $type:ty),*);)*) => { $(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(exec: *mut Exec, graph: Graph, $($argument: $type),*) -> Result {
            // SAFETY: the arguments are the application's, for the driver to judge.
            unsafe {
                instantiate(exec, graph, || {
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
    cuGraphInstantiateWithParams(parameters: *mut c_void);
    cuGraphInstantiateWithParams_ptsz(parameters: *mut c_void);
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGraphExecDestroy(exec: Exec) -> Result {
    // SAFETY: the argument is the application's, for the driver to judge.
    let call = || unsafe { driver!(cuda::cuGraphExecDestroy(exec => Exec)) };
    let Some(share) = allocating() else { return call() };
    // Forgotten first: once it is destroyed, another thread may get the same handle.
    if let Some(graphs) = &mut *share.state().graphs.lock() {
        graphs.forget(exec);
    }
    let result = call();
    settle(share);
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGraphMemTrim(device: Device) -> Result {
    // SAFETY: the argument is the application's, for the driver to judge.
    let result = unsafe { driver!(cuda::cuDeviceGraphMemTrim(device => Device)) };
    if let Some(share) = allocating()
        && let Some(graphs) = &mut *share.state().graphs.lock()
    {
        graphs.forget_runs(device);
        graphs.settle(share);
    }
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGraphAddMemAllocNode(
    node: *mut Node,
    graph: Graph,
    dependencies: *const Node,
    count: usize,
    parameters: *mut AllocParameters,
) -> Result {
    if let Some(share) = share() {
        will_allocate(share);
    }
    // SAFETY: the arguments are the application's, for the driver to judge.
    unsafe {
        driver!(cuda::cuGraphAddMemAllocNode(
            node => *mut Node, graph => Graph, dependencies => *const Node, count => usize,
            parameters => *mut AllocParameters,
        ))
    }
}

/// Looks whether a node of any kind is one that allocates.
///
/// # Safety
/// `parameters` must be null or valid.
unsafe fn look_at(parameters: *const NodeParameters) {
    // SAFETY: the caller's promise.
    if unsafe { parameters.as_ref() }.is_some_and(|parameters| parameters.kind == NODE_MEM_ALLOC)
        && let Some(share) = share()
    {
        will_allocate(share);
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGraphAddNode(
    node: *mut Node,
    graph: Graph,
    dependencies: *const Node,
    count: usize,
    parameters: *mut NodeParameters,
) -> Result {
    // SAFETY: the arguments are the application's, for the driver to judge.
    unsafe {
        look_at(parameters);
        driver!(cuda::cuGraphAddNode(
            node => *mut Node, graph => Graph, dependencies => *const Node, count => usize,
            parameters => *mut NodeParameters,
        ))
    }
}

macro_rules! adds_node {
    ($($symbol:ident),*) => { $(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(
            node: *mut Node,
            graph: Graph,
            dependencies: *const Node,
            edges: *const c_void,
            count: usize,
            parameters: *mut NodeParameters,
        ) -> Result {
            // SAFETY: the arguments are the application's, for the driver to judge.
            unsafe {
                look_at(parameters);
                driver!(cuda::$symbol(
                    node => *mut Node, graph => Graph, dependencies => *const Node, edges => *const c_void,
                    count => usize, parameters => *mut NodeParameters,
                ))
            }
        }
    )* };
}
adds_node!(cuGraphAddNode_v2, cuGraphAddNode_v3);
