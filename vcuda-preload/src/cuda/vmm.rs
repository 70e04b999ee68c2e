//! Physical memory: made, mapped, shared, released. It is in use as long as a handle to it is, or an address it is
//! mapped at; the account follows both. What others hold too is on its maker's account until they let go (`ipc.rs`).

use std::collections::BTreeMap;

use region::Exported;

use crate::{
    cuda::{
        arguments::{Out, copy_of},
        binding::Uses,
        ipc::Others,
        take,
        types::{
            AllocationProperties, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_SYSTEM_NOT_READY, CUDA_SUCCESS,
            DevicePtr, Handle, Result,
        },
        whole,
    },
    real::driver,
    share::{Share, share},
};

/// What this process holds of physical memory.
#[derive(Default)]
pub(crate) struct Physical {
    memory: BTreeMap<Number, Memory>,
    last: Number,
    /// What a handle stands for, and how often it must be released.
    handles: BTreeMap<Handle, (Number, u32)>,
    /// Address → bytes, and what is mapped there.
    mappings: BTreeMap<DevicePtr, (u64, Number)>,
    /// What is used without an address.
    pub uses: Uses,
    /// What this process lets others have, and has of them.
    pub others: Others,
}

/// Number of a piece of memory: a handle may come back for another one while the first is still mapped.
pub(crate) type Number = u64;

struct Memory {
    gpu: usize,
    /// Bytes on the account of this process.
    bytes: u64,
    handles: usize,
    /// At addresses and elsewhere.
    mappings: usize,
    with_others: WithOthers,
    /// Number of the mark on descriptors that stand for it.
    mark: Option<u64>,
}

/// What is to be given back when this process is done with it.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub gpu: usize,
    /// Bytes on the account of this process.
    pub bytes: u64,
    pub with_others: WithOthers,
    /// Number of the mark on descriptors that stand for it.
    pub mark: Option<u64>,
}

/// How memory is shared with other processes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WithOthers {
    No,
    /// By its maker, this process.
    Exported(Exported),
    /// By another process; so many bytes, which are on that one's account.
    Imported(Exported, u64),
}

impl Memory {
    fn piece(&self) -> Piece {
        Piece { gpu: self.gpu, bytes: self.bytes, with_others: self.with_others, mark: self.mark }
    }
}

impl Physical {
    pub fn insert(&mut self, handle: Handle, gpu: usize, bytes: u64, with_others: WithOthers) -> Number {
        self.last += 1;
        let mark = None;
        self.memory.insert(self.last, Memory { gpu, bytes, handles: 1, mappings: 0, with_others, mark });
        self.handles.insert(handle, (self.last, 1));
        self.last
    }

    /// What a handle stands for.
    pub fn piece(&self, handle: Handle) -> Option<Piece> {
        self.memory.get(&self.number_of(handle)?).map(Memory::piece)
    }

    /// Notes how what a handle stands for is shared, and the mark on its descriptors.
    pub fn set_sharing(&mut self, handle: Handle, with_others: WithOthers, mark: Option<u64>) {
        let memory = self.number_of(handle).and_then(|number| self.memory.get_mut(&number));
        if let Some(memory) = memory {
            (memory.with_others, memory.mark) = (with_others, mark);
        }
    }

    /// Has `mark` make the mark, if there is none, of each piece that is mapped in a range; then calls `put` with each.
    pub fn mark_all(
        &mut self,
        address: DevicePtr,
        bytes: u64,
        mark: impl Fn(usize) -> u64,
        put: impl Fn(u64, u64),
    ) {
        let before = self.mappings.range(..=address).next_back().map_or(address, |(start, _)| *start);
        for (start, (length, number)) in self.mappings.range(before..address.saturating_add(bytes)) {
            if let Some(memory) =
                self.memory.get_mut(number).filter(|_| start.saturating_add(*length) > address)
            {
                put(*memory.mark.get_or_insert_with(|| mark(memory.gpu)), memory.bytes);
            }
        }
    }

    /// What a handle stands for, if we saw it made.
    pub fn number_of(&self, handle: Handle) -> Option<Number> {
        self.handles.get(&handle).map(|(number, _)| *number)
    }

    /// What is mapped at `address`.
    fn number_at(&self, address: DevicePtr) -> Option<Number> {
        let (start, (bytes, number)) = self.mappings.range(..=address).next_back()?;
        (address - start < *bytes).then_some(*number)
    }

    /// One more use of what a handle stands for.
    pub fn use_of(&mut self, handle: Handle) -> Option<Number> {
        self.used(self.number_of(handle)?)
    }

    /// One more use of what is mapped at `address`.
    pub fn use_at(&mut self, address: DevicePtr) -> Option<Number> {
        self.used(self.number_at(address)?)
    }

    fn used(&mut self, number: Number) -> Option<Number> {
        self.memory.get_mut(&number)?.mappings += 1;
        Some(number)
    }

    /// One use less.
    pub fn unused(&mut self, share: &Share, number: Number) {
        self.let_go(share, number, |memory| memory.mappings -= 1);
    }

    pub fn gpu_of(&self, number: Number) -> Option<usize> {
        self.memory.get(&number).map(|memory| memory.gpu)
    }

    /// A handle to what is mapped at `address` was handed out.
    fn retain(&mut self, handle: Handle, address: DevicePtr) {
        let Some(number) = self.number_at(address) else { return };
        if let Some(memory) = self.memory.get_mut(&number) {
            memory.handles += 1;
            self.handles.entry(handle).or_insert((number, 0)).1 += 1;
        }
    }

    pub fn release(&mut self, share: &Share, handle: Handle) {
        let Some((number, times)) = self.handles.get_mut(&handle) else { return };
        let number = *number;
        *times -= 1;
        if *times == 0 {
            self.handles.remove(&handle);
        }
        self.let_go(share, number, |memory| memory.handles -= 1);
    }

    fn map(&mut self, address: DevicePtr, bytes: u64, handle: Handle) {
        let Some((number, _)) = self.handles.get(&handle) else { return };
        if let Some(memory) = self.memory.get_mut(number) {
            memory.mappings += 1;
            self.mappings.insert(address, (bytes, *number));
        }
    }

    /// The driver unmaps whole mappings only, one or several in a row.
    fn unmap(&mut self, share: &Share, address: DevicePtr, bytes: u64) {
        let range = address..address.saturating_add(bytes);
        while let Some((start, (_, number))) = self.mappings.range(range.clone()).next() {
            let (start, number) = (*start, *number);
            self.mappings.remove(&start);
            self.let_go(share, number, |memory| memory.mappings -= 1);
        }
    }

    fn let_go(&mut self, share: &Share, number: Number, of: impl FnOnce(&mut Memory)) {
        let Some(memory) = self.memory.get_mut(&number) else { return };
        of(memory);
        if memory.handles == 0 && memory.mappings == 0 {
            let piece = memory.piece();
            self.memory.remove(&number);
            self.others.done_with(share, piece);
            // A multicast object takes its bindings along.
            for bound in self.uses.take_bound(number, None) {
                self.unused(share, bound);
            }
        }
    }
}

/// Has the driver do something to handles or mappings, then follows. No other thread comes in between: a handle or an
/// address that is free may be given to it at once.
pub(super) fn follow(
    call: impl FnOnce() -> Result,
    then: impl FnOnce(&mut Physical, &'static Share),
) -> Result {
    let Some(share) = share() else { return CUDA_ERROR_SYSTEM_NOT_READY };
    let mut physical = share.state().physical.lock();
    let result = call();
    if result == CUDA_SUCCESS
        && let Some(physical) = &mut *physical
    {
        then(physical, share);
    }
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemCreate(
    handle: *mut Handle,
    bytes: usize,
    properties: *const AllocationProperties,
    flags: u64,
) -> Result {
    // SAFETY: the arguments are the application's, for the driver to judge.
    let call = |handle, properties| unsafe {
        driver!(cuda::cuMemCreate(
            handle => *mut Handle, bytes => usize, properties => *const AllocationProperties, flags => u64,
        ))
    };
    // SAFETY: null or the application's.
    let Some(copy) = (unsafe { copy_of(properties) }) else { return call(handle, properties) };
    let Some(device) = copy.begin.device() else { return call(handle, &raw const copy) };
    let Some(share) = share() else { return CUDA_ERROR_SYSTEM_NOT_READY };
    let bytes = whole(bytes as u64);
    let Some(gpu) = share.gpu_of_device(device) else {
        // No device of this share. If it is none at all, the driver says so.
        return if is_device(device) { CUDA_ERROR_OUT_OF_MEMORY } else { call(handle, &raw const copy) };
    };
    if !take(share, gpu, bytes) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    // SAFETY: null or the application's.
    let handle = unsafe { Out::new(handle) };
    let result = call(handle.room(), &raw const copy);
    if result == CUDA_SUCCESS {
        let mut physical = share.state().physical.lock();
        physical.get_or_insert_default().insert(handle.value(), gpu, bytes, WithOthers::No);
    } else {
        share.give(gpu, bytes);
    }
    handle.hand_over(result)
}

fn is_device(device: i32) -> bool {
    let mut count = 0;
    // SAFETY: `count` outlives the call.
    let result = unsafe { driver!(cuda::cuDeviceGetCount(&raw mut count => *mut i32)) };
    result == CUDA_SUCCESS && (0..count).contains(&device)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemRelease(handle: Handle) -> Result {
    follow(
        // SAFETY: the argument is the application's, for the driver to judge.
        || unsafe { driver!(cuda::cuMemRelease(handle => Handle)) },
        |physical, share| physical.release(share, handle),
    )
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemRetainAllocationHandle(
    handle: *mut Handle,
    address: DevicePtr,
) -> Result {
    // SAFETY: null or the application's.
    let handle = unsafe { Out::new(handle) };
    let result = follow(
        // SAFETY: the arguments are the application's, for the driver to judge.
        || unsafe {
            driver!(cuda::cuMemRetainAllocationHandle(handle.room() => *mut Handle, address => DevicePtr))
        },
        |physical, _| physical.retain(handle.value(), address),
    );
    handle.hand_over(result)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemMap(
    address: DevicePtr,
    bytes: usize,
    offset: usize,
    handle: Handle,
    flags: u64,
) -> Result {
    follow(
        // SAFETY: the arguments are the application's, for the driver to judge.
        || unsafe {
            driver!(cuda::cuMemMap(
                address => DevicePtr, bytes => usize, offset => usize, handle => Handle, flags => u64,
            ))
        },
        |physical, _| physical.map(address, bytes as u64, handle),
    )
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemUnmap(address: DevicePtr, bytes: usize) -> Result {
    follow(
        // SAFETY: the arguments are the application's, for the driver to judge.
        || unsafe { driver!(cuda::cuMemUnmap(address => DevicePtr, bytes => usize)) },
        |physical, share| physical.unmap(share, address, bytes as u64),
    )
}
