//! What this process knows: its slot in the container's `usage`, its live blocks, its contexts. A forked child starts
//! with none of it: the kernel wipes the memory (MADV_WIPEONFORK), raw `clone` included, so nothing of the parent is
//! given back by the child and no lock of the parent is held in it.

use std::{
    ptr::NonNull,
    sync::atomic::{
        AtomicPtr, AtomicU8, AtomicU32, AtomicU64,
        Ordering::{AcqRel, Acquire, Release},
    },
};

use crate::{
    cuda::{
        graph::Graphs,
        pool::{POOLS, Pool},
        vmm::Physical,
    },
    errno,
    lock::Locked,
    map::Map,
    pace::{self, Pacing},
};

/// Devices whose place in the share is remembered.
pub(crate) const DEVICES: usize = 64;

/// All zero at the start of a process and of a forked child.
#[repr(C)]
pub(crate) struct State {
    /// Held while files are opened and the slot is claimed.
    pub opening: Locked<()>,
    /// Slot in `usage` plus one; 0 before it is claimed.
    pub slot: AtomicU32,
    /// Per CUDA device: 0 unknown, else what `share::Gpu` says.
    pub devices: [AtomicU8; DEVICES],
    /// NVML handle → GPU.
    pub nvml_handles: Map,
    /// Device pointer → block.
    pub blocks: Map,
    /// Array or mipmapped array → block.
    pub arrays: Map,
    /// Context → GPU and number.
    pub contexts: Map,
    /// The same of some, without a lock; see `Share::recent`.
    pub recent_contexts: [AtomicU64; 16],
    /// Device plus one → its primary context.
    pub primary_contexts: Map,
    /// Held while a primary context is made or given up.
    pub primary_changing: Locked<()>,
    /// Held while a limit of a context is set.
    pub limits_setting: Locked<()>,
    /// Physical memory (VMM): handles, mappings.
    pub physical: Locked<Option<Box<Physical>>>,
    /// Not 0 if some of it is leaving sparse arrays.
    pub leaving: AtomicU32,
    /// Not 0 if this process may be done with memory that it has descriptors of.
    pub described: AtomicU32,
    /// Pools of stream-ordered memory.
    pub pools: [Pool; POOLS],
    /// How many of them have ever been used.
    pub pools_used: AtomicU32,
    /// Held while one is entered.
    pub pool_making: Locked<()>,
    /// Held while a capture ends, and while something is captured that must not be anything else.
    pub capture_ending: Locked<()>,
    /// Held while an executable graph is made of a graph, and while that is destroyed; which of them, its handle says.
    pub graphs_kept: [Locked<()>; 16],
    /// Memory of graphs.
    pub graphs: Locked<Option<Box<Graphs>>>,
    /// Not 0 if this process may have memory in pools that the driver gives back when it is next waited for.
    pub slack: AtomicU32,
    /// Not 0 if this process has ever made an executable graph that allocates.
    pub graphs_allocate: AtomicU32,
    /// What pacing knows.
    pub pacing: Pacing,
    /// Numbers of contexts in use.
    pub context_numbers: Locked<[u64; CONTEXTS / 64]>,
}

/// Contexts that can be told apart at a time.
pub(crate) const CONTEXTS: usize = 4096;

pub(crate) static STATE: AtomicPtr<State> = AtomicPtr::new(std::ptr::null_mut());

/// This process's state; none if there is no memory for it.
pub(crate) fn state() -> Option<&'static State> {
    let mut state = STATE.load(Acquire);
    if state.is_null() {
        state = create()?.as_ptr();
    }
    // SAFETY: mapped for good; all zero is a valid state, and every change is atomic or under a lock.
    Some(unsafe { &*state })
}

#[cold]
fn create() -> Option<NonNull<State>> {
    let _kept = errno::Keep::new();
    let new = map_zeroed(size_of::<State>())?;
    // SAFETY: our own mapping of that size. Kernels before 4.14 do not know the advice; containerd's needs are newer.
    if unsafe { libc::madvise(new.as_ptr().cast(), size_of::<State>(), libc::MADV_WIPEONFORK) } != 0 {
        return None;
    }
    let new = new.cast::<State>();
    match STATE.compare_exchange(std::ptr::null_mut(), new.as_ptr(), AcqRel, Acquire) {
        Ok(_) => {
            // SAFETY: mapped for good.
            pace::FREE.store(unsafe { &raw mut (*new.as_ptr()).pacing.free }, Release);
            Some(new)
        }
        Err(theirs) => {
            // SAFETY: nobody has seen this one.
            unsafe { libc::munmap(new.as_ptr().cast(), size_of::<State>()) };
            NonNull::new(theirs)
        }
    }
}

/// Memory of `size` bytes, zero, of whole pages.
pub(crate) fn map_zeroed(size: usize) -> Option<NonNull<u8>> {
    let _kept = errno::Keep::new();
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at a place of the kernel's choice disturbs nothing.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), size, access, kind, -1, 0) };
    if at == libc::MAP_FAILED { None } else { NonNull::new(at.cast()) }
}
