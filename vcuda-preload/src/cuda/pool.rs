//! Stream-ordered memory. A pool holds more than was asked of it, and keeps it for a while after it was freed; what it
//! holds is what counts, and the driver tells it (CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT). So a pool's account is brought
//! in line with the driver's figure after everything that may change it: an allocation, a trim, a wait.

mod whose;

use std::{
    ffi::c_void,
    sync::atomic::{
        AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use crate::{
    cuda::{
        arguments::{Out, copy_of},
        free, memory,
        stream::{self, At, End, Lanes, is_capturing, lane_of, per_thread},
        take, take_quietly,
        types::{
            CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_SYSTEM_NOT_READY, CUDA_SUCCESS, Context, Device, DevicePtr,
            Graph, Pool as Handle, PoolProperties, Result, Stream,
        },
        whole,
    },
    lock::{Guard, Locked},
    pace::Lane,
    real::driver,
    share::{Block, CU_STREAM_PER_THREAD, PartOf, Place, Share, share},
};

use whose::Memory;

/// Pools that can be told apart at a time, which is what the number of a block's pool has bits for. There are no more: what a
/// pool keeps after it was freed would be on no account.
pub(crate) const POOLS: usize = 4096;

// CUmemPool_attribute.
const REUSE_FOLLOW_EVENT_DEPENDENCIES: i32 = 1;
const REUSE_ALLOW_INTERNAL_DEPENDENCIES: i32 = 3;
const RESERVED_MEM_CURRENT: i32 = 5;
const USED_MEM_CURRENT: i32 = 7;

/// Pools of today's drivers grow by 32 MiB (seen) until one is found to do with less.
const FIRST_STEP: u64 = 32 << 20;

/// One pool. All zero is an unused entry.
#[derive(Default)]
#[repr(C)]
pub(crate) struct Pool {
    /// The driver's handle; 0 for none, or for a pool that is destroyed.
    handle: AtomicU64,
    /// Its lock is held while the driver allocates from the pool.
    account: Locked<Account>,
}

#[derive(Default)]
#[repr(C)]
struct Account {
    memory: Memory,
    /// Bytes that the share's account has for the pool.
    charged: u64,
    /// Bytes that its live allocations asked for.
    used: u64,
    /// Bytes in multiples of which it grows.
    step: u64,
    /// Where memory was freed that the pool may still hold. To other lanes it is only free when the driver sees that work there
    /// has come to it, and until then it rather lets the pool grow.
    freed_in: Option<Box<Lanes<()>>>,
}

impl Account {
    /// Takes what the pool will grow by for an allocation of `bytes` in `stream`.
    fn expect(
        &mut self,
        share: &'static Share,
        gpu: usize,
        pool: Handle,
        stream: Stream,
        bytes: u64,
    ) -> bool {
        let free = self.charged.saturating_sub(self.used);
        if free > 0
            && let Some(freed_in) = &mut self.freed_in
            && let Some(lane) = lane_of(share, stream)
            && freed_in.has_others_than(lane)
        {
            let growth = growth(self.step, bytes, 0);
            if take_quietly(share, gpu, growth) {
                self.charged += growth;
                return true;
            }
            // On a GPU of this size the driver would now fail to let the pool grow, and use what is free.
            make_usable(freed_in, pool, lane, stream);
            if freed_in.has_others_than(lane) {
                share.count_refusal(gpu);
                return false;
            }
        }
        let growth = growth(self.step, bytes, free);
        if growth > 0 {
            if !take(share, gpu, growth) {
                return false;
            }
            self.charged += growth;
        }
        true
    }

    /// The pool is destroyed, and its last allocation is gone: with it goes all that the pool held.
    fn close(&mut self, share: &Share) {
        if let Some(gpu) = self.memory.gpu() {
            share.give(gpu, std::mem::take(&mut self.charged));
        }
    }

    /// Learns the step from growth by `bytes` where `expected` was expected: the largest power of two in it.
    fn learn(&mut self, expected: u64, bytes: u64) {
        let step = bytes & bytes.wrapping_neg();
        if bytes > expected || (bytes > 0 && step < self.step) {
            self.step = step.min(FIRST_STEP);
        }
    }

    /// Brings the account in line with what the pool holds. False, with the account left as it is, if the pool holds
    /// more than is to be had.
    fn settle(&mut self, share: &Share, handle: Handle, by_force: bool) -> bool {
        let (Some(gpu), Some(mut holds)) = (self.memory.gpu(), reserved(handle)) else { return true };
        if let Memory::Managed(_) = self.memory {
            // Wherever it is now, a kernel may draw it to the GPU.
            holds = holds.max(self.used);
        }
        if holds <= self.charged {
            share.give(gpu, self.charged - holds);
        } else {
            let grown = holds - self.charged;
            if by_force {
                share.charge(gpu, grown);
            } else if !share.take_quietly(gpu, grown) {
                return false;
            }
        }
        self.charged = holds;
        if self.charged <= self.used {
            self.freed_in = None;
        }
        true
    }
}

/// Bytes that a pool which grows in steps will grow by for an allocation of `bytes` of which `free` are there, as far as is known:
/// better to refuse the last few bytes below the ceiling than to pass it.
fn growth(step: u64, bytes: u64, free: u64) -> u64 {
    bytes.saturating_sub(free).checked_next_multiple_of(step.max(1)).unwrap_or(u64::MAX)
}

/// Makes what was freed in other lanes usable in `stream`, which is `here`: where work there has come to it, it is; else `stream`
/// waits for it, if the application lets the driver do so. What stays in `freed_in` of other lanes is not usable.
fn make_usable(freed_in: &mut Lanes<()>, pool: Handle, here: Lane, stream: Stream) {
    let may_wait = is_allowed(pool, REUSE_FOLLOW_EVENT_DEPENDENCIES)
        && is_allowed(pool, REUSE_ALLOW_INTERNAL_DEPENDENCIES);
    freed_in.take(|at| {
        !matches!(at, At::Lane(lane) if *lane == here)
            && (stream::is_done(at) || may_wait && stream::wait_for(at, stream))
    });
}

/// Bytes that a pool holds, if the driver says so.
fn reserved(handle: Handle) -> Option<u64> {
    bytes_of(handle, RESERVED_MEM_CURRENT)
}

/// An attribute that is a number of bytes, if the driver tells it.
fn bytes_of(handle: Handle, which: i32) -> Option<u64> {
    let mut bytes = 0_u64;
    attribute(handle, which, (&raw mut bytes).cast()).then_some(whole(bytes))
}

fn attribute(handle: Handle, which: i32, value: *mut c_void) -> bool {
    // SAFETY: the value has the attribute's type, and outlives the call.
    let result =
        unsafe { driver!(cuda::cuMemPoolGetAttribute(handle => Handle, which => i32, value => *mut c_void)) };
    result == CUDA_SUCCESS
}

/// The entry of a pool that has one.
fn find(share: &'static Share, handle: Handle) -> Option<(usize, &'static Pool)> {
    let used = share.state().pools_used.load(Acquire) as usize;
    share.state().pools.iter().take(used).enumerate().find(|(_, pool)| pool.handle.load(Acquire) == handle)
}

/// The entry of a pool, made if it has none, with the memory given; none if there are too many.
fn find_or_make(share: &'static Share, handle: Handle, memory: Memory) -> Option<(usize, &'static Pool)> {
    if let Some(found) = find(share, handle) {
        return Some(found);
    }
    let state = share.state();
    let _making = state.pool_making.lock();
    if let Some(found) = find(share, handle) {
        return Some(found);
    }
    for (number, pool) in state.pools.iter().enumerate() {
        if pool.handle.load(Relaxed) != 0 {
            continue;
        }
        let mut account = pool.account.lock();
        // Of a pool that is destroyed, allocations may still live.
        if account.used == 0 {
            *account = Account { memory, step: FIRST_STEP, ..Account::default() };
            pool.handle.store(handle, Release);
            let used = u32::try_from(number + 1).unwrap_or(0);
            state.pools_used.fetch_max(used, Release);
            return Some((number, pool));
        }
    }
    None
}

/// The pool that stream-ordered allocations of a device come from now.
fn current(device: Device) -> Option<Handle> {
    let mut pool = 0;
    // SAFETY: `pool` outlives the call.
    let result = unsafe { driver!(cuda::cuDeviceGetMemPool(&raw mut pool => *mut Handle, device => Device)) };
    (result == CUDA_SUCCESS).then_some(pool)
}

/// Whether an attribute that allows something does. The driver's default is that it does.
fn is_allowed(handle: Handle, which: i32) -> bool {
    let mut allowed = 0_i32;
    !attribute(handle, which, (&raw mut allowed).cast()) || allowed != 0
}

/// Has the driver allocate `bytes` from `pool`, or from the one that is current for the device of `stream`.
///
/// # Safety
/// `address` must be null or the application's, and `call` a driver's function that on success writes the address where it is
/// told.
unsafe fn allocate(
    address: *mut DevicePtr,
    bytes: usize,
    pool: Option<Handle>,
    stream: Stream,
    call: impl FnOnce(*mut DevicePtr) -> Result,
) -> Result {
    let Some(share) = share() else { return CUDA_ERROR_SYSTEM_NOT_READY };
    if is_capturing(stream) {
        // What is captured takes its memory when the graph runs; if the capture had ended, it would now.
        let _ends_later = stream::end_capture();
        if is_capturing(stream) {
            return call(address);
        }
    }
    let Some(Place { gpu, device, .. }) = share.here_in(stream) else { return call(address) };
    let Some(handle) = pool.or_else(|| current(device)) else {
        // SAFETY: the caller's promise.
        return unsafe { memory::allocate_linear(address, bytes, call) };
    };
    let entry =
        find(share, handle).or_else(|| find_or_make(share, handle, Memory::of_pool(share, handle, device)));
    let Some((number, pool)) = entry else {
        gpu.inspect(|gpu| share.count_refusal(*gpu));
        return CUDA_ERROR_OUT_OF_MEMORY;
    };
    let mut account: Guard<'_, Account> = pool.account.lock();
    let gpu_of_pool = match account.memory {
        Memory::Gpu(gpu) | Memory::Managed(Some(gpu)) => gpu,
        Memory::Managed(None) => {
            let Some(gpu) = gpu else { return CUDA_ERROR_OUT_OF_MEMORY };
            account.memory = Memory::Managed(Some(gpu));
            gpu
        }
        Memory::Foreign => return CUDA_ERROR_OUT_OF_MEMORY,
        Memory::Host => {
            drop(account);
            return call(address);
        }
    };

    let (bytes, before) = (whole(bytes as u64), account.charged);
    if !account.expect(share, gpu_of_pool, handle, stream, bytes) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    let expected = account.charged - before;
    // SAFETY: the caller's promise.
    let address = unsafe { Out::new(address) };
    let result = call(address.room());
    if result != CUDA_SUCCESS {
        account.settle(share, handle, true);
        return result;
    }
    let made = address.value();
    // A capture may have begun since we looked. What the driver has put into its graph is not in use of the pool.
    if is_capturing(stream)
        && bytes_of(handle, USED_MEM_CURRENT).is_some_and(|used| used < account.used + bytes)
    {
        account.settle(share, handle, true);
        return address.hand_over(result);
    }
    account.used += bytes;
    if !account.settle(share, handle, false) {
        // It grew by more than was expected, and than there is.
        // SAFETY: just allocated, and known to nobody; pool and stream are the application's.
        unsafe {
            driver!(cuda::cuMemFreeAsync(made => DevicePtr, stream => Stream));
            driver!(cuda::cuStreamSynchronize(stream => Stream));
            driver!(cuda::cuMemPoolTrimTo(handle => Handle, 0 => usize));
        }
        account.used -= bytes;
        account.settle(share, handle, true);
        share.count_refusal(gpu_of_pool);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    let grown = account.charged.saturating_sub(before);
    account.learn(expected, grown);
    if account.charged > account.used {
        // What nobody uses the driver gives back when it is next waited for.
        share.state().slack.store(1, Relaxed);
    }
    let part_of = PartOf::Pool(u16::try_from(number).unwrap_or(0));
    let block = Block { bytes, gpu: gpu_of_pool, part_of, exported: false };
    let _ = share.state().blocks.insert(made, block.pack());
    address.hand_over(result)
}

/// What is at `address` is about to be freed in `stream`.
fn note_free(address: DevicePtr, stream: Stream) {
    if let Some(share) = share()
        && let Some(word) = share.state().blocks.get(address)
        && let PartOf::Pool(number) = Block::unpack(word).part_of
        && let Some(pool) = share.state().pools.get(usize::from(number))
        && let Some(lane) = lane_of(share, stream)
    {
        let mut account = pool.account.lock();
        account.freed_in.get_or_insert_default().note(lane);
    }
}

fn for_each_freed_in(share: &'static Share, act: impl Fn(&mut Lanes<()>)) {
    let state = share.state();
    for pool in state.pools.iter().take(state.pools_used.load(Acquire) as usize) {
        pool.account.lock().freed_in.as_deref_mut().into_iter().for_each(&act);
    }
}

/// A stream is about to be destroyed.
pub(super) fn forget_stream(stream: Stream) {
    if let Some(share) = share().filter(|_| stream > CU_STREAM_PER_THREAD) {
        for_each_freed_in(share, |freed_in| _ = freed_in.forget_stream(stream));
    }
}

/// A context is about to be destroyed, or may be: its streams cannot be asked or waited for.
pub(super) fn begin_end(share: &'static Share, context: Context) {
    for_each_freed_in(share, |freed_in| freed_in.begin_end(context));
}

/// What is in its streams has ended so.
pub(super) fn end(share: &'static Share, context: Context, how: End) {
    for_each_freed_in(share, |freed_in| _ = freed_in.end(context, how));
}

/// An allocation of `bytes` of pool `number` was freed. The pool keeps its memory for now.
pub(super) fn returned(share: &'static Share, number: u16, bytes: u64) {
    let Some(pool) = share.state().pools.get(usize::from(number)) else { return };
    let mut account = pool.account.lock();
    account.used = account.used.saturating_sub(bytes);
    if pool.handle.load(Acquire) != 0 {
        share.state().slack.store(1, Relaxed);
    } else if account.used == 0 {
        account.close(share);
    }
}

/// Gives back what this process's pools no longer hold. Pools that another thread is allocating from settle themselves.
pub(super) fn settle(share: &'static Share) {
    let state = share.state();
    if state.slack.swap(0, Relaxed) == 0 {
        return;
    }
    for pool in state.pools.iter().take(state.pools_used.load(Acquire) as usize) {
        let handle = pool.handle.load(Acquire);
        let mut account = pool.account.try_lock();
        if let Some(account) = &mut account
            && handle != 0
            && account.charged > account.used
        {
            account.settle(share, handle, true);
        }
        // There may be more to give back at the next wait.
        if account.is_none_or(|account| account.charged > account.used) {
            state.slack.store(1, Relaxed);
        }
    }
}

/// The driver has thrown away all of a device of GPU `gpu`, allocations of pools included.
pub(super) fn reset(share: &'static Share, gpu: Option<usize>) {
    let state = share.state();
    for (number, pool) in (0_u16..).zip(state.pools.iter().take(state.pools_used.load(Acquire) as usize)) {
        let mut account = pool.account.lock();
        if account.memory.gpu().is_none_or(|of| Some(of) != gpu) {
            continue;
        }
        state.blocks.drain(|_, word| Block::unpack(word).part_of == PartOf::Pool(number), |_, _| {});
        account.used = 0;
        account.settle(share, pool.handle.load(Acquire), true);
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolCreate(
    pool: *mut Handle,
    properties: *const PoolProperties,
) -> Result {
    // SAFETY: the arguments are the application's, for the driver to judge.
    let call = |pool, properties| unsafe {
        driver!(cuda::cuMemPoolCreate(pool => *mut Handle, properties => *const PoolProperties))
    };
    // SAFETY: null or the application's.
    let Some(copy) = (unsafe { copy_of(properties) }) else { return call(pool, properties) };
    // SAFETY: null or the application's.
    let pool = unsafe { Out::new(pool) };
    let result = call(pool.room(), &raw const copy);
    if result == CUDA_SUCCESS
        && let Some(share) = share()
        && find_or_make(share, pool.value(), Memory::of(share, copy.begin)).is_none()
    {
        // SAFETY: just made, and known to nobody.
        unsafe { driver!(cuda::cuMemPoolDestroy(pool.value() => Handle)) };
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pool.hand_over(result)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolDestroy(pool: Handle) -> Result {
    // SAFETY: the argument is the application's, for the driver to judge.
    let call = || unsafe { driver!(cuda::cuMemPoolDestroy(pool => Handle)) };
    let Some(share) = share() else { return call() };
    let Some((_, entry)) = find(share, pool) else { return call() };
    let mut account = entry.account.lock();
    let result = call();
    if result == CUDA_SUCCESS {
        entry.handle.store(0, Release);
        if account.used == 0 {
            account.close(share);
        }
    }
    result
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolTrimTo(pool: Handle, keep: usize) -> Result {
    // SAFETY: the arguments are the application's, for the driver to judge.
    let result = unsafe { driver!(cuda::cuMemPoolTrimTo(pool => Handle, keep => usize)) };
    if let Some(share) = share()
        && let Some((_, entry)) = find(share, pool)
    {
        entry.account.lock().settle(share, pool, true);
    }
    result
}

macro_rules! allocates {
    ($from_current:ident, $from_pool:ident, $meant:expr) => {
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $from_current(
            address: *mut DevicePtr,
            bytes: usize,
            stream: Stream,
        ) -> Result {
            // SAFETY: the arguments are the application's, for the driver to judge.
            unsafe {
                allocate(address, bytes, None, $meant(stream), |address| {
                    driver!(cuda::$from_current(address => *mut DevicePtr, bytes => usize, stream => Stream))
                })
            }
        }

        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $from_pool(
            address: *mut DevicePtr,
            bytes: usize,
            pool: Handle,
            stream: Stream,
        ) -> Result {
            // SAFETY: the arguments are the application's, for the driver to judge.
            unsafe {
                allocate(address, bytes, Some(pool), $meant(stream), |address| {
                    driver!(cuda::$from_pool(
                        address => *mut DevicePtr, bytes => usize, pool => Handle, stream => Stream,
                    ))
                })
            }
        }
    };
}
allocates!(cuMemAllocAsync, cuMemAllocFromPoolAsync, std::convert::identity);
allocates!(cuMemAllocAsync_ptsz, cuMemAllocFromPoolAsync_ptsz, per_thread);

macro_rules! ends_capture {
    ($($symbol:ident($($graph:ident: $type:ty)?);)*) => { $(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(stream: Stream, $($graph: $type)?) -> Result {
            let _captured = stream::end_capture();
            // SAFETY: the arguments are the application's, for the driver to judge.
            unsafe { driver!(cuda::$symbol(stream => Stream, $($graph => $type)?)) }
        }
    )* };
}
ends_capture! {
    cuStreamEndCapture(graph: *mut Graph);
    cuStreamEndCapture_ptsz(graph: *mut Graph);
    cuStreamEndCaptureToCig();
    cuStreamEndCaptureToCig_ptsz();
}

macro_rules! frees {
    ($symbol:ident, $meant:expr) => {
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(address: DevicePtr, stream: Stream) -> Result {
            // SAFETY: the arguments are the application's, for the driver to judge.
            let call = || unsafe { driver!(cuda::$symbol(address => DevicePtr, stream => Stream)) };
            if is_capturing($meant(stream)) {
                // A graph that is captured frees it when it runs; if the capture had ended, it would be free now.
                let _ends_later = stream::end_capture();
                if is_capturing($meant(stream)) {
                    return call();
                }
            }
            note_free(address, $meant(stream));
            free(memory::blocks, address, call)
        }
    };
}
frees!(cuMemFreeAsync, std::convert::identity);
frees!(cuMemFreeAsync_ptsz, per_thread);
