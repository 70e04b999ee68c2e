//! Graphs: work that is put together first and launched later, also by capturing streams. Memory that a graph allocates takes
//! room from its first launch on, and stays in reserve on the GPU until it is trimmed.

use std::{
    collections::{BTreeSet, HashMap},
    ffi::{c_char, c_int, c_void},
};

use crate::{
    capture::{Captured, capturing},
    context::{Context, context_of, current},
    copy::{Copy3d, Fill},
    driver::{Driver, Registry, Tables, driver, tables},
    ffi::{INVALID_VALUE, In, NOT_SUPPORTED, Out, Outcome, PoolProperties, api, location},
    graph_memory::{Allocation, GraphMemory},
    launch::kernel,
    managed::gpu_of,
    memory::Kind,
    stream::{HostFunction, Operation, Stream},
};

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`.
pub(crate) const AUTO_FREE: u64 = 1;

/// What a node does.
#[derive(Clone, Copy, Debug)]
pub(crate) enum What {
    Work(Operation),
    Wait,
    Child { graph: u64 },
    Allocate(Allocation),
    Free { address: u64 },
}

impl What {
    /// `CUgraphNodeType`.
    fn kind(&self) -> c_int {
        match self {
            Self::Work(Operation::Kernel { .. }) => 0,
            Self::Work(Operation::Copy(_)) => 1,
            Self::Work(Operation::Fill(_)) => 2,
            Self::Work(Operation::Host { .. } | Operation::Callback { .. }) => 3,
            Self::Child { .. } => 4,
            Self::Work(Operation::Nothing | Operation::Prefetch { .. }) => 5,
            Self::Wait => 6,
            Self::Work(Operation::Record { .. }) => 7,
            Self::Allocate(_) => 10,
            Self::Free { .. } => 11,
        }
    }
}

struct Node {
    graph: u64,
    what: What,
    context: Option<&'static Context>,
    after: BTreeSet<u64>,
}

#[derive(Default)]
struct Graph {
    nodes: Vec<u64>,
}

/// A graph that can be launched.
pub(crate) struct Executable {
    pub steps: Vec<(Option<&'static Context>, What)>,
    pub flags: u64,
    /// Addresses that a launch allocated and that are not freed.
    pub live: BTreeSet<u64>,
}

/// The process's graphs.
#[derive(Default)]
pub(crate) struct Graphs {
    all: Registry<Graph>,
    nodes: Registry<Node>,
    pub executables: Registry<Executable>,
    pub memory: GraphMemory,
}

impl Graphs {
    pub(crate) fn create(&mut self) -> u64 {
        self.all.add(Graph::default())
    }

    pub(crate) fn there(&mut self, graph: u64) -> Outcome {
        self.all.get(graph, INVALID_VALUE).map(drop)
    }

    fn add(
        &mut self,
        graph: u64,
        what: What,
        context: Option<&'static Context>,
        after: BTreeSet<u64>,
    ) -> Outcome<u64> {
        self.there(graph)?;
        for other in &after {
            if self.nodes.get(*other, INVALID_VALUE)?.graph != graph {
                return Err(INVALID_VALUE);
            }
        }
        let node = self.nodes.add(Node { graph, what, context, after });
        self.all.get(graph, INVALID_VALUE)?.nodes.push(node);
        Ok(node)
    }

    /// What a graph does, each node after those that it depends on, child graphs in their places.
    fn order(&mut self, graph: u64, steps: &mut Vec<(Option<&'static Context>, What)>) -> Outcome {
        let nodes = self.all.get(graph, INVALID_VALUE)?.nodes.clone();
        let mut done: BTreeSet<u64> = BTreeSet::new();
        while done.len() < nodes.len() {
            let before = done.len();
            for node in &nodes {
                if done.contains(node) {
                    continue;
                }
                let Node { what, context, after, .. } = self.nodes.get(*node, INVALID_VALUE)?;
                if !after.is_subset(&done) {
                    continue;
                }
                let (what, context) = (*what, *context);
                match what {
                    What::Child { graph } => self.order(graph, steps)?,
                    what => steps.push((context, what)),
                }
                done.insert(*node);
            }
            if done.len() == before {
                // A circle.
                return Err(INVALID_VALUE);
            }
        }
        Ok(())
    }

    fn copy_of(&mut self, graph: u64) -> Outcome<u64> {
        let nodes = self.all.get(graph, INVALID_VALUE)?.nodes.clone();
        let copy = self.create();
        let mut same: HashMap<u64, u64> = HashMap::new();
        for node in &nodes {
            let Node { what, context, .. } = self.nodes.get(*node, INVALID_VALUE)?;
            let (what, context) = (*what, *context);
            same.insert(*node, self.add(copy, what, context, BTreeSet::new())?);
        }
        for (node, other) in &same {
            let after = self.nodes.get(*node, INVALID_VALUE)?.after.clone();
            self.nodes.get(*other, INVALID_VALUE)?.after =
                after.iter().filter_map(|before| same.get(before).copied()).collect();
        }
        Ok(copy)
    }
}

impl Tables {
    /// Makes a node of what a captured stream was given.
    pub(crate) fn capture_operation(
        &mut self,
        capture: Captured,
        context: &'static Context,
        operation: Operation,
    ) -> Outcome {
        self.capture(capture, context, What::Work(operation))
    }

    /// Makes a node of an allocation in a captured stream, and tells its address.
    pub(crate) fn capture_allocation(
        &mut self,
        driver: &Driver,
        capture: Captured,
        context: &'static Context,
        bytes: u64,
    ) -> Outcome<u64> {
        let allocation = self.graph_allocation(driver, context.gpu, bytes)?;
        self.capture(capture, context, What::Allocate(allocation))?;
        Ok(allocation.address)
    }

    /// Makes a node of a free in a captured stream.
    pub(crate) fn capture_free(&mut self, capture: Captured, address: u64) -> Outcome {
        if !self.graphs.memory.knows(address) {
            return Err(INVALID_VALUE);
        }
        let context = current()?;
        self.capture(capture, context, What::Free { address })
    }

    fn capture(&mut self, capture: Captured, context: &'static Context, what: What) -> Outcome {
        let tail = self.captured_tail(capture)?.into_iter().collect();
        let node = self.graphs.add(capture.graph, what, Some(context), tail)?;
        self.captured_node(capture, node)
    }
}

fn launch(exec: u64, stream: Stream) -> Outcome {
    let driver = driver()?;
    let context = stream.context()?;
    let mut tables = driver.tables();
    if capturing(&mut tables, stream)?.is_some() {
        return Err(NOT_SUPPORTED);
    }
    tables.prepare(driver, exec)?;
    let steps = tables.graphs.executables.get(exec, INVALID_VALUE)?.steps.clone();
    let lane = stream.lane(&mut tables, context)?;
    drop(tables);
    if !steps.iter().any(|(_, what)| matches!(what, What::Allocate(_) | What::Free { .. })) {
        let work = |(of, what): &(Option<&'static Context>, What)| match what {
            What::Work(operation) => Some((of.unwrap_or(context), *operation)),
            _ => None,
        };
        let all: Vec<_> = steps.iter().filter_map(work).collect();
        return driver.work.submit_all(driver, context, &lane, &all);
    }
    // A graph with memory of its own goes step by step in the thread that launches it.
    for (of, what) in steps {
        driver.work.wait_for_stream(driver, &lane)?;
        match what {
            What::Work(operation) => {
                driver.work.submit(driver, of.unwrap_or(context), &lane, &operation)?;
            }
            What::Allocate(allocation) => driver.tables().allocate_in_graph(exec, of, allocation)?,
            What::Free { address } => {
                let mut tables = driver.tables();
                if let Some(Kind::Graph { exec }) = tables.blocks.at(address).map(|block| block.kind) {
                    tables.free_in_graph(exec, address);
                }
            }
            What::Wait | What::Child { .. } => {}
        }
    }
    Ok(())
}

fn add(
    node: Out<u64>,
    graph: u64,
    after: In<u64>,
    count: usize,
    context: Option<&'static Context>,
    what: What,
) -> Outcome {
    node.wanted()?;
    let after = (0..count).map(|at| after.get_at(at)).collect::<Outcome<BTreeSet<u64>>>()?;
    node.put(tables()?.graphs.add(graph, what, context, after)?)
}

fn depend(
    graph: u64,
    from: In<u64>,
    to: In<u64>,
    count: usize,
    work: fn(&mut BTreeSet<u64>, u64),
) -> Outcome {
    let mut tables = tables()?;
    tables.graphs.there(graph)?;
    for at in 0..count {
        let (from, to) = (from.get_at(at)?, to.get_at(at)?);
        tables.graphs.nodes.get(from, INVALID_VALUE)?;
        work(&mut tables.graphs.nodes.get(to, INVALID_VALUE)?.after, from);
    }
    Ok(())
}

fn instantiate(to: Out<u64>, graph: u64, flags: u64) -> Outcome {
    current()?;
    to.wanted()?;
    let mut tables = tables()?;
    let mut steps = vec![];
    tables.graphs.order(graph, &mut steps)?;
    to.put(tables.graphs.executables.add(Executable { steps, flags, live: BTreeSet::new() }))
}

/// `CUDA_KERNEL_NODE_PARAMS`, as far as it is read; the second version adds to the end.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct KernelParameters {
    function: u64,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    parameters: *const c_void,
    extra: *const c_void,
}

/// What version 2 of `CUDA_KERNEL_NODE_PARAMS` adds.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct KernelParametersV2 {
    first: KernelParameters,
    kernel: u64,
    context: u64,
}

/// `CUDA_MEMSET_NODE_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct FillParameters {
    address: u64,
    pitch: usize,
    value: u32,
    size: u32,
    width: usize,
    height: usize,
}

/// `CUDA_HOST_NODE_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct HostParameters {
    function: HostFunction,
    data: u64,
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct AllocationParameters {
    pool: PoolProperties,
    access: *const c_void,
    count: usize,
    bytes: usize,
    address: u64,
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Instantiation {
    flags: u64,
    upload: u64,
    node: u64,
    result: c_int,
}

/// Writes a list as the functions that ask twice do: first how long it is, then its elements.
fn list(all: &[u64], to: Out<u64>, count: Out<usize>) -> Outcome {
    if to.is_null() {
        return count.put(all.len());
    }
    let room = count.get()?;
    for at in 0..room {
        to.put_at(at, all.get(at).copied().unwrap_or(0))?;
    }
    count.put(all.len().min(room))
}

fn kernel_node(
    node: Out<u64>,
    graph: u64,
    after: In<u64>,
    count: usize,
    parameters: &KernelParameters,
    kern: u64,
) -> Outcome {
    let function = if parameters.function == 0 { kern } else { parameters.function };
    let operation = kernel(function, parameters.grid, parameters.block)?;
    add(node, graph, after, count, Some(current()?), What::Work(operation))
}

api! {
    fn cuGraphCreate(graph: Out<u64>, flags: u32) {
        graph.wanted()?;
        if flags != 0 { Err(INVALID_VALUE) } else { graph.put(tables()?.graphs.create()) }
    }

    fn cuGraphDestroy(graph: u64) {
        let mut tables = tables()?;
        for node in tables.graphs.all.remove(graph, INVALID_VALUE)?.nodes {
            let _ = tables.graphs.nodes.remove(node, INVALID_VALUE);
        }
        Ok(())
    }

    fn cuGraphClone(to: Out<u64>, graph: u64) {
        to.wanted()?;
        to.put(tables()?.graphs.copy_of(graph)?)
    }

    fn cuGraphAddEmptyNode(node: Out<u64>, graph: u64, after: In<u64>, count: usize) {
        add(node, graph, after, count, None, What::Work(Operation::Nothing))
    }

    fn cuGraphAddKernelNode(node: Out<u64>, graph: u64, after: In<u64>, count: usize, parameters: In<KernelParameters>) {
        kernel_node(node, graph, after, count, &parameters.get()?, 0)
    }

    fn cuGraphAddKernelNode_v2(
        node: Out<u64>, graph: u64, after: In<u64>, count: usize, parameters: In<KernelParametersV2>
    ) {
        let parameters = parameters.get()?;
        if parameters.context != 0 {
            context_of(parameters.context)?;
        }
        kernel_node(node, graph, after, count, &parameters.first, parameters.kernel)
    }

    fn cuGraphAddMemcpyNode(
        node: Out<u64>, graph: u64, after: In<u64>, count: usize, copy: In<Copy3d>, context: u64
    ) {
        let copy = copy.get()?.resolved()?;
        add(node, graph, after, count, Some(context_of(context)?), What::Work(Operation::Copy(copy)))
    }

    fn cuGraphAddMemsetNode(
        node: Out<u64>, graph: u64, after: In<u64>, count: usize, fill: In<FillParameters>, context: u64
    ) {
        let FillParameters { address, pitch, value, size, width, height } = fill.get()?;
        let (Ok(size @ (1 | 2 | 4)), true) = (u8::try_from(size), width > 0 && height > 0) else {
            return Err(INVALID_VALUE);
        };
        let fill = Fill {
            address,
            pitch: pitch as u64,
            element: value.to_le_bytes(),
            size,
            width: width as u64,
            height: height as u64,
        };
        add(node, graph, after, count, Some(context_of(context)?), What::Work(Operation::Fill(fill)))
    }

    fn cuGraphAddHostNode(node: Out<u64>, graph: u64, after: In<u64>, count: usize, host: In<HostParameters>) {
        let HostParameters { function, data } = host.get()?;
        add(node, graph, after, count, None, What::Work(Operation::Host { function, data }))
    }

    fn cuGraphAddChildGraphNode(node: Out<u64>, graph: u64, after: In<u64>, count: usize, child: u64) {
        let child = tables()?.graphs.copy_of(child)?;
        add(node, graph, after, count, None, What::Child { graph: child })
    }

    fn cuGraphAddEventRecordNode(node: Out<u64>, graph: u64, after: In<u64>, count: usize, event: u64) {
        tables()?.streams.event(event)?;
        add(node, graph, after, count, None, What::Work(Operation::Record { event }))
    }

    fn cuGraphAddEventWaitNode(node: Out<u64>, graph: u64, after: In<u64>, count: usize, event: u64) {
        tables()?.streams.event(event)?;
        add(node, graph, after, count, None, What::Wait)
    }

    fn cuGraphAddMemAllocNode(
        node: Out<u64>, graph: u64, after: In<u64>, count: usize, parameters: Out<AllocationParameters>
    ) {
        let driver = driver()?;
        let mut wanted = parameters.get()?;
        if wanted.pool.location.kind != location::DEVICE || wanted.pool.kind != 1 {
            return Err(INVALID_VALUE);
        }
        let gpu = gpu_of(wanted.pool.location)?.ok_or(INVALID_VALUE)?;
        let allocation = driver.tables().graph_allocation(driver, gpu, wanted.bytes as u64)?;
        wanted.address = allocation.address;
        add(node, graph, after, count, None, What::Allocate(allocation))?;
        parameters.put(wanted)
    }

    fn cuGraphAddMemFreeNode(node: Out<u64>, graph: u64, after: In<u64>, count: usize, address: u64) {
        if !tables()?.graphs.memory.knows(address) {
            return Err(INVALID_VALUE);
        }
        add(node, graph, after, count, None, What::Free { address })
    }

    fn cuGraphAddDependencies(graph: u64, from: In<u64>, to: In<u64>, count: usize) {
        depend(graph, from, to, count, |after, from| { after.insert(from); })
    }

    fn cuGraphAddDependencies_v2(graph: u64, from: In<u64>, to: In<u64>, edges: *const c_void, count: usize) {
        let _ = edges;
        depend(graph, from, to, count, |after, from| { after.insert(from); })
    }

    fn cuGraphRemoveDependencies(graph: u64, from: In<u64>, to: In<u64>, count: usize) {
        depend(graph, from, to, count, |after, from| { after.remove(&from); })
    }

    fn cuGraphRemoveDependencies_v2(graph: u64, from: In<u64>, to: In<u64>, edges: *const c_void, count: usize) {
        let _ = edges;
        depend(graph, from, to, count, |after, from| { after.remove(&from); })
    }

    fn cuGraphGetNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) {
        let all = tables()?.graphs.all.get(graph, INVALID_VALUE)?.nodes.clone();
        list(&all, nodes, count)
    }

    fn cuGraphGetRootNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) {
        let mut tables = tables()?;
        let mut all = tables.graphs.all.get(graph, INVALID_VALUE)?.nodes.clone();
        all.retain(|node| tables.graphs.nodes.get(*node, INVALID_VALUE).is_ok_and(|node| node.after.is_empty()));
        list(&all, nodes, count)
    }

    fn cuGraphNodeGetType(node: u64, kind: Out<c_int>) {
        kind.put(tables()?.graphs.nodes.get(node, INVALID_VALUE)?.what.kind())
    }

    fn cuGraphNodeGetDependencies(node: u64, before: Out<u64>, count: Out<usize>) {
        let all: Vec<u64> = tables()?.graphs.nodes.get(node, INVALID_VALUE)?.after.iter().copied().collect();
        list(&all, before, count)
    }

    fn cuGraphDestroyNode(node: u64) {
        let mut tables = tables()?;
        let Node { graph, .. } = tables.graphs.nodes.remove(node, INVALID_VALUE)?;
        tables.graphs.all.get(graph, INVALID_VALUE)?.nodes.retain(|other| *other != node);
        for other in tables.graphs.nodes.values() {
            other.after.remove(&node);
        }
        Ok(())
    }

    fn cuGraphChildGraphNodeGetGraph(node: u64, graph: Out<u64>) {
        match tables()?.graphs.nodes.get(node, INVALID_VALUE)?.what {
            What::Child { graph: child } => graph.put(child),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuGraphMemFreeNodeGetParams(node: u64, address: Out<u64>) {
        match tables()?.graphs.nodes.get(node, INVALID_VALUE)?.what {
            What::Free { address: freed } => address.put(freed),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuGraphInstantiate, cuGraphInstantiate_v2(
        exec: Out<u64>, graph: u64, node: Out<u64>, log: Out<c_char>, length: usize
    ) {
        let _ = length;
        node.put_if_wanted(0);
        log.put_if_wanted(0);
        instantiate(exec, graph, 0)
    }

    fn cuGraphInstantiateWithFlags(exec: Out<u64>, graph: u64, flags: u64) {
        if flags & !15 != 0 {
            return Err(INVALID_VALUE);
        }
        instantiate(exec, graph, flags)
    }

    fn cuGraphInstantiateWithParams, cuGraphInstantiateWithParams_ptsz(
        exec: Out<u64>, graph: u64, parameters: Out<Instantiation>
    ) {
        let wanted = parameters.get()?;
        instantiate(exec, graph, wanted.flags)?;
        parameters.put(Instantiation { node: 0, result: 0, ..wanted })
    }

    fn cuGraphExecGetFlags(exec: u64, flags: Out<u64>) {
        flags.put(tables()?.graphs.executables.get(exec, INVALID_VALUE)?.flags)
    }

    fn cuGraphUpload, cuGraphUpload_ptsz(exec: u64, stream: u64) {
        let driver = driver()?;
        Stream::new(stream, PER_THREAD).context()?;
        driver.tables().prepare(driver, exec)
    }

    fn cuGraphLaunch, cuGraphLaunch_ptsz(exec: u64, stream: u64) { launch(exec, Stream::new(stream, PER_THREAD)) }

    fn cuGraphExecDestroy(exec: u64) {
        // What its launches allocated stays until the program frees it.
        tables()?.graphs.executables.remove(exec, INVALID_VALUE).map(drop)
    }
}
