//! Physical memory: made, mapped, shared, released. It is in use as long as a handle to it is, or an address it is
//! mapped at; the account follows both. What others hold too is on its maker's account until they let go (`ipc.rs`).

use std::collections::BTreeMap;

use region::Exported;

use crate::{
    cuda::{
        binding::Uses,
        ipc::Others,
        take,
        types::{
            CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_SYSTEM_NOT_READY, CUDA_SUCCESS, DevicePtr, Handle,
            Properties, Result,
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

impl Physical {
    pub fn insert(&mut self, handle: Handle, gpu: usize, bytes: u64, with_others: WithOthers) -> Number {
        self.last += 1;
        self.memory.insert(self.last, Memory { gpu, bytes, handles: 1, mappings: 0, with_others });
        self.handles.insert(handle, (self.last, 1));
        self.last
    }

    /// The GPU and bytes of what a handle stands for, and how it is shared, to be changed.
    pub fn sharing(&mut self, handle: Handle) -> Option<(usize, u64, &mut WithOthers)> {
        let memory = self.memory.get_mut(&self.number_of(handle)?)?;
        Some((memory.gpu, memory.bytes, &mut memory.with_others))
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

    fn release(&mut self, share: &Share, handle: Handle) {
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
            match memory.with_others {
                WithOthers::No => share.give(memory.gpu, memory.bytes),
                WithOthers::Exported(exported) => share.give_exported(exported, memory.gpu, memory.bytes),
                WithOthers::Imported(exported, _) => self.others.let_go(share, exported),
            }
            self.memory.remove(&number);
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
    properties: *const Properties,
    flags: u64,
) -> Result {
    // SAFETY: the arguments are the application's, for the driver to judge.
    let call = || unsafe {
        driver!(cuda::cuMemCreate(
            handle => *mut Handle, bytes => usize, properties => *const Properties, flags => u64,
        ))
    };
    // SAFETY: null or the application's.
    let Some(device) = unsafe { properties.as_ref() }.and_then(Properties::device) else { return call() };
    let Some(share) = share() else { return CUDA_ERROR_SYSTEM_NOT_READY };
    let bytes = whole(bytes as u64);
    let Some(gpu) = share.gpu_of_device(device) else {
        // No device of this share. If it is none at all, the driver says so.
        return if is_device(device) { CUDA_ERROR_OUT_OF_MEMORY } else { call() };
    };
    if !take(share, gpu, bytes) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    let result = call();
    if result != CUDA_SUCCESS {
        share.give(gpu, bytes);
        return result;
    }
    let mut physical = share.state().physical.lock();
    // SAFETY: written on success.
    physical.get_or_insert_default().insert(unsafe { *handle }, gpu, bytes, WithOthers::No);
    result
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
    follow(
        // SAFETY: the arguments are the application's, for the driver to judge.
        || unsafe { driver!(cuda::cuMemRetainAllocationHandle(handle => *mut Handle, address => DevicePtr)) },
        // SAFETY: written on success.
        |physical, _| physical.retain(unsafe { *handle }, address),
    )
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
