//! Our functions that stand for the driver's, under the driver's names and with its arguments. The table says which;
//! the build fails if one is missing.
//!
//! Those that allocate all do the same: take from the share before the driver allocates, give back what the driver did not
//! allocate, and leave every other judgement of arguments, and every return code but out-of-memory, to the driver.

mod arguments;
mod array;
pub(crate) mod binding;
mod context;
pub(crate) mod graph;
pub(crate) mod ipc;
mod launch;
mod memory;
pub(crate) mod pool;
mod stream;
mod sync;
pub(crate) mod types;
mod view;
pub(crate) mod vmm;

pub(crate) use array::*;
pub(crate) use binding::*;
pub(crate) use context::*;
pub(crate) use graph::*;
pub(crate) use ipc::*;
pub(crate) use launch::*;
pub(crate) use memory::*;
pub(crate) use pool::*;
pub(crate) use sync::*;
pub(crate) use view::*;
pub(crate) use vmm::*;

pub(crate) use crate::door::{cuGetProcAddress, cuGetProcAddress_v2};

use crate::{
    map::Map,
    share::{Block, PartOf, Place, Share, share},
};
use types::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_SYSTEM_NOT_READY, CUDA_SUCCESS, Result};

/// Takes `bytes` of GPU `gpu`. Before it is refused, what this process's pools no longer hold is given back.
fn take(share: &'static Share, gpu: usize, bytes: u64) -> bool {
    take_quietly(share, gpu, bytes) || share.take(gpu, bytes)
}

/// The same without the count of a refusal, for who will try again.
fn take_quietly(share: &'static Share, gpu: usize, bytes: u64) -> bool {
    share.take_quietly(gpu, bytes) || {
        settle(share);
        share.take_quietly(gpu, bytes)
    }
}

/// Gives back what the driver has taken back without a call that says so.
fn settle(share: &'static Share) {
    pool::settle(share);
    graph::settle(share);
    binding::settle(share);
    ipc::settle(share);
}

/// Bytes in whole units of the account, so that differences of what was taken and given come out even.
fn whole(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(region::ACCOUNT_UNIT_BYTES).unwrap_or(u64::MAX)
}

/// What an allocation came to.
struct Allocated {
    /// Address or handle by which it is freed.
    key: u64,
    /// Bytes that it really takes; at most what was asked for beforehand, or a little more where only the driver
    /// knows how it rounds.
    bytes: u64,
}

/// Has the driver allocate up to `bytes` where the calling thread is, if the ceiling allows it, and remembers the block
/// in the map that `map` names.
///
/// `call` runs the driver's function and `outcome` reads what it made. Where a block turns out larger than `bytes` and
/// the rest is not to be had, `undo` frees it.
fn allocate(
    map: impl Fn(&'static Share) -> &'static Map,
    bytes: u64,
    call: impl FnOnce() -> Result,
    outcome: impl FnOnce() -> Allocated,
    undo: impl FnOnce(u64),
) -> Result {
    let Some(share) = share() else { return CUDA_ERROR_SYSTEM_NOT_READY };
    // Without a context nothing is allocated; the driver says so better than we could.
    let Some(Place { gpu, context, .. }) = share.here() else { return call() };
    let bytes = whole(bytes);
    let Some(gpu) = gpu.filter(|gpu| take(share, *gpu, bytes)) else { return CUDA_ERROR_OUT_OF_MEMORY };
    let result = call();
    if result != CUDA_SUCCESS {
        share.give(gpu, bytes);
        return result;
    }
    let Allocated { key, bytes: made } = outcome();
    let made = whole(made);
    if made > bytes {
        if !take(share, gpu, made - bytes) {
            undo(key);
            share.give(gpu, bytes);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    } else {
        share.give(gpu, bytes - made);
    }
    // If there is no memory to remember it, the block is given back when the process ends.
    let block = Block { bytes: made, gpu, part_of: PartOf::Context(context), exported: false };
    let _ = map(share).insert(key, block.pack());
    CUDA_SUCCESS
}

/// Has the driver free what `key` stands for. It is forgotten first: once freed, another thread may get the same
/// address. What we never saw is the driver's business alone.
fn free(map: impl Fn(&'static Share) -> &'static Map, key: u64, call: impl FnOnce() -> Result) -> Result {
    let Some(share) = share() else { return call() };
    let block = map(share).remove(key);
    let result = call();
    if let Some(word) = block {
        if result == CUDA_SUCCESS {
            let block = Block::unpack(word);
            match block.part_of {
                PartOf::Context(_) => ipc::give(share, key, block),
                PartOf::Pool(number) => pool::returned(share, number, block.bytes),
            }
        } else {
            let _ = map(share).insert(key, word);
        }
    }
    result
}
