//! What the nodes of a graph allocate.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::c_void,
};

use crate::{
    cuda::{
        memory,
        types::{CUDA_SUCCESS, Device, Graph, Node, Properties, Result},
        whole,
    },
    real::driver,
};

// CUgraphNodeType.
const NODE_GRAPH: i32 = 4;
const NODE_MEM_ALLOC: i32 = 10;
const NODE_MEM_FREE: i32 = 11;
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
pub(super) struct Allocations {
    /// Device, bytes and address; no device for managed memory that need not be anywhere.
    pub made: Vec<(Option<Device>, u64, u64)>,
    /// Addresses.
    freed: BTreeSet<u64>,
}

impl Allocations {
    /// Those of `graph` and the graphs in it, however deep; the driver's error where it does not tell.
    pub fn of(graph: Graph) -> core::result::Result<Self, Result> {
        let mut all = Self::default();
        let mut graphs = vec![graph];
        while let Some(graph) = graphs.pop() {
            for node in nodes(graph)? {
                all.add(node, &mut graphs)?;
            }
        }
        Ok(all)
    }

    /// Adds what a node allocates or frees; of one that is a graph, that goes to `graphs`.
    fn add(&mut self, node: Node, graphs: &mut Vec<Graph>) -> core::result::Result<(), Result> {
        let mut kind = 0;
        // SAFETY: the node is of a graph, which lives; `kind` outlives the call.
        succeeded(unsafe { driver!(cuda::cuGraphNodeGetType(node => Node, &raw mut kind => *mut i32)) })?;
        match kind {
            NODE_GRAPH => {
                let mut inner = 0;
                // SAFETY: as above.
                succeeded(unsafe {
                    driver!(cuda::cuGraphChildGraphNodeGetGraph(node => Node, &raw mut inner => *mut Graph))
                })?;
                graphs.push(inner);
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
        Ok(())
    }

    /// Whether something is left that the graph does not free.
    pub fn leave(&self) -> bool {
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

/// What a node allocates, which is one that allocates; nothing where it is the host's memory.
fn allocation(node: Node) -> core::result::Result<Option<(Option<Device>, u64, u64)>, Result> {
    // Later versions may have more to say.
    let mut room = [0_u64; 64];
    let parameters: *mut AllocParameters = room.as_mut_ptr().cast();
    // SAFETY: the room is aligned and larger than the structure.
    succeeded(unsafe {
        driver!(cuda::cuGraphMemAllocNodeGetParams(node => Node, parameters => *mut AllocParameters))
    })?;
    // SAFETY: written on success; any bits are a value.
    let AllocParameters { pool, bytes, address, .. } = unsafe { parameters.read() };
    let device = pool.device();
    Ok((device.is_some() || pool.is_managed()).then_some((device, whole(bytes as u64), address)))
}

/// Bytes that such allocations take together of each device, and of whichever kernels draw them to (last): large ones whole pages
/// of their own, small ones share theirs.
pub(super) fn together(list: &[(Option<Device>, u64, u64)]) -> (Vec<(Device, u64)>, u64) {
    let mut devices: BTreeMap<Option<Device>, (u64, u64)> = BTreeMap::new();
    for (device, bytes, _) in list {
        let (large, small) = devices.entry(*device).or_default();
        let sum = if *bytes > memory::SMALL { large } else { small };
        *sum = sum.saturating_add(memory::taken(*bytes));
    }
    let pages = |small: u64| small.checked_next_multiple_of(memory::PAGE).unwrap_or(u64::MAX);
    let sum = |(large, small): (u64, u64)| large.saturating_add(pages(small));
    let drawn = devices.remove(&None).map_or(0, sum);
    (devices.into_iter().filter_map(|(device, parts)| Some((device?, sum(parts)))).collect(), drawn)
}
