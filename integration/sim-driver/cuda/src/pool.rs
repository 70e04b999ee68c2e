//! Stream-ordered memory. A pool takes room on its GPU in chunks and hands parts of them out; what is freed stays with the
//! pool, and goes back to the GPU when the program synchronises, down to the pool's release threshold, or when it is
//! trimmed, or when another allocation of the process finds no room.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::{c_int, c_void},
    sync::MutexGuard,
};

use crate::{
    capture::capturing,
    context::Context,
    driver::{Driver, Registry, Tables, driver, tables, version},
    ffi::{
        AccessDescription, INVALID_VALUE, In, Location, OUT_OF_MEMORY, Out, Outcome, PoolProperties, api,
        location,
    },
    managed::gpu_of,
    memory::{Block, Kind, map, unmap},
    stream::Stream,
};

/// A pool grows by this, unless that is more than there is.
const CHUNK: u64 = 32 << 20;

/// Parts of a chunk begin at multiples of this.
const PART: u64 = 512;

/// Chunks are multiples of this.
const PAGE: u64 = 2 << 20;

/// `CU_MEM_ALLOCATION_TYPE_PINNED` and `_MANAGED`.
const PINNED: c_int = 1;
const MANAGED: c_int = 2;

/// The first CUDA version with managed pools.
const MANAGED_SINCE: c_int = 13_000;

/// Memory that a pool has taken.
struct Chunk {
    at: u64,
    size: u64,
    /// Bytes that it takes of the GPU.
    taken: u64,
    /// Free parts: where they begin, and their length.
    free: BTreeMap<u64, u64>,
}

impl Chunk {
    fn unused(&self) -> bool {
        self.free.get(&self.at) == Some(&self.size)
    }

    fn take(&mut self, size: u64) -> Option<u64> {
        let (at, length) =
            self.free.iter().find(|(_, length)| **length >= size).map(|(at, length)| (*at, *length))?;
        self.free.remove(&at);
        if length > size {
            self.free.insert(at + size, length - size);
        }
        Some(at)
    }

    fn give(&mut self, mut at: u64, mut size: u64) {
        if let Some((before, length)) =
            self.free.range(..at).next_back().map(|(before, length)| (*before, *length))
            && before + length == at
        {
            self.free.remove(&before);
            (at, size) = (before, size + length);
        }
        if let Some(length) = self.free.remove(&(at + size)) {
            size += length;
        }
        self.free.insert(at, size);
    }
}

/// A pool.
struct Pool {
    /// Its GPU; none for one in host memory, where managed memory is until it moves.
    gpu: Option<usize>,
    managed: bool,
    place: Location,
    handle_types: c_int,
    max_size: u64,
    chunks: Vec<Chunk>,
    used: u64,
    used_high: u64,
    reserved: u64,
    reserved_high: u64,
    threshold: u64,
    /// The three attributes about reuse.
    reuse: [c_int; 3],
    /// Destroyed, but parts of it are still in use.
    destroyed: bool,
}

impl Pool {
    fn new(gpu: Option<usize>, place: Location, handle_types: c_int, max_size: u64) -> Self {
        Self {
            gpu,
            managed: false,
            place,
            handle_types,
            max_size,
            chunks: vec![],
            used: 0,
            used_high: 0,
            reserved: 0,
            reserved_high: 0,
            threshold: 0,
            reuse: [1; 3],
            destroyed: false,
        }
    }
}

/// Memory of which there is a default pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Memory {
    managed: bool,
    /// Kind and number of the location.
    place: (c_int, c_int),
    /// The GPU that it is of; none for the host's, and for managed memory.
    gpu: Option<usize>,
}

impl Memory {
    /// That of a GPU.
    fn of_gpu(driver: &Driver, gpu: usize) -> Self {
        Self { managed: false, place: (location::DEVICE, driver.device(gpu)), gpu: Some(gpu) }
    }

    /// That of a kind (`CUmemAllocationType`) at a location.
    fn at(place: Location, kind: c_int) -> Outcome<Self> {
        let managed = is_managed(kind)?;
        let gpu = match place.kind {
            location::NONE if managed => None,
            location::HOST_NUMA_CURRENT => return Err(INVALID_VALUE),
            _ => gpu_of(place)?,
        };
        // Of these there is one, whatever number is given.
        let id = if matches!(place.kind, location::NONE | location::HOST) { 0 } else { place.id };
        Ok(Self { managed, place: (place.kind, id), gpu: gpu.filter(|_| !managed) })
    }
}

/// Whether an allocation type is that of managed memory.
fn is_managed(kind: c_int) -> Outcome<bool> {
    match kind {
        PINNED => Ok(false),
        MANAGED if version().1 >= MANAGED_SINCE => Ok(true),
        _ => Err(INVALID_VALUE),
    }
}

/// The process's pools.
#[derive(Default)]
pub(crate) struct Pools {
    all: Registry<Pool>,
    /// The default pools, and those in use in their stead.
    default: HashMap<Memory, u64>,
    current: HashMap<Memory, u64>,
}

impl Pools {
    fn default_of(&mut self, memory: Memory) -> u64 {
        let Memory { managed, place: (kind, id), gpu } = memory;
        let new = || Pool { managed, ..Pool::new(gpu, Location { kind, id }, 0, 0) };
        *self.default.entry(memory).or_insert_with(|| self.all.add(new()))
    }

    fn current_of(&mut self, memory: Memory) -> u64 {
        let default = self.default_of(memory);
        *self.current.get(&memory).unwrap_or(&default)
    }

    fn get(&mut self, pool: u64) -> Outcome<&mut Pool> {
        self.all
            .get(pool, INVALID_VALUE)
            .and_then(|pool| if pool.destroyed { Err(INVALID_VALUE) } else { Ok(pool) })
    }
}

impl Tables {
    /// Gives reserves of all pools on a GPU back; true if that gave anything.
    pub(crate) fn trim(&mut self, driver: &Driver, gpu: usize) -> bool {
        let pools: Vec<u64> =
            self.pools.all.iter().filter(|(_, pool)| pool.gpu == Some(gpu)).map(|(at, _)| at).collect();
        let mut given = false;
        for pool in pools {
            given |= self.trim_pool(driver, pool, 0);
        }
        given |= self.trim_graphs(driver, gpu);
        given
    }

    /// Gives unused chunks of a pool back while it has more than `keep` bytes.
    fn trim_pool(&mut self, driver: &Driver, handle: u64, keep: u64) -> bool {
        let Ok(pool) = self.pools.all.get(handle, INVALID_VALUE) else { return false };
        let mut given = false;
        let mut at = 0;
        while at < pool.chunks.len() {
            if pool.reserved > keep && pool.chunks[at].unused() {
                let chunk = pool.chunks.swap_remove(at);
                pool.reserved -= chunk.size;
                if let Some(gpu) = pool.gpu {
                    driver.discharge(gpu, chunk.taken);
                }
                if pool.managed {
                    unmap(chunk.at, chunk.size);
                } else {
                    self.space.give(chunk.at, chunk.size);
                }
                given = true;
            } else {
                at += 1;
            }
        }
        if pool.destroyed && pool.chunks.is_empty() {
            let _ = self.pools.all.remove(handle, INVALID_VALUE);
        }
        given
    }

    /// What happens when the program synchronises: pools shrink to their thresholds.
    pub(crate) fn settle(&mut self, driver: &Driver) {
        let above: Vec<(u64, u64)> = self
            .pools
            .all
            .iter()
            .filter(|(_, pool)| pool.reserved > pool.threshold)
            .map(|(at, pool)| (at, pool.threshold))
            .collect();
        for (pool, threshold) in above {
            self.trim_pool(driver, pool, threshold);
        }
    }

    /// Takes everything from all pools on a GPU: the process has no context there any more.
    pub(crate) fn empty_pools(&mut self, driver: &Driver, gpu: usize) {
        let of_pools = |block: &Block| matches!(block.kind, Kind::Pooled { .. }) && block.gpu == gpu;
        for address in self.blocks.which(of_pools) {
            if let Some(Kind::Pooled { pool }) = self.blocks.at(address).map(|block| block.kind) {
                self.give_to_pool(driver, pool, address);
            }
        }
        self.trim(driver, gpu);
    }

    /// A block from a pool.
    pub(crate) fn allocate_from(
        &mut self,
        driver: &Driver,
        context: &'static Context,
        pool: u64,
        bytes: u64,
    ) -> Outcome<u64> {
        let size = bytes.checked_next_multiple_of(PART).ok_or(OUT_OF_MEMORY)?;
        let gpu = self.pools.get(pool)?.gpu;
        let fits = self.pools.get(pool)?.chunks.iter_mut().find_map(|chunk| chunk.take(size));
        let at = match fits {
            Some(at) => at,
            None => {
                self.grow(driver, pool, size)?;
                let pool = self.pools.get(pool)?;
                pool.chunks.last_mut().and_then(|chunk| chunk.take(size)).ok_or(OUT_OF_MEMORY)?
            }
        };
        let pool_state = self.pools.get(pool)?;
        pool_state.used += size;
        pool_state.used_high = pool_state.used_high.max(pool_state.used);
        let kind = if pool_state.managed {
            Kind::Managed { resident: None, pool: Some(pool) }
        } else {
            Kind::Pooled { pool }
        };
        let block = Block::new(bytes, gpu.unwrap_or(context.gpu), Some(context), kind);
        self.blocks.insert(at, block);
        Ok(at)
    }

    fn grow(&mut self, driver: &Driver, handle: u64, size: u64) -> Outcome {
        let pool = self.pools.get(handle)?;
        let (gpu, managed, reserved) = (pool.gpu, pool.managed, pool.reserved);
        let limit = if pool.max_size == 0 { u64::MAX } else { pool.max_size };
        let exact = size.checked_next_multiple_of(PAGE).ok_or(OUT_OF_MEMORY)?;
        let fits = |size: &u64| reserved.checked_add(*size).is_some_and(|sum| sum <= limit);
        for size in [exact.max(CHUNK), exact].into_iter().filter(fits) {
            let taken = match gpu {
                Some(gpu) => driver.rounded(gpu, size)?,
                None => 0,
            };
            let charged = match gpu {
                // A last try gives reserves back first.
                Some(gpu) if size == exact => crate::driver::charge(driver, self, gpu, taken),
                Some(gpu) => driver.charge(gpu, taken),
                None => Ok(()),
            };
            if charged.is_err() {
                continue;
            }
            let at = if managed { map(size).ok() } else { self.space.take(size, PAGE) };
            let at = match (at, gpu) {
                (Some(at), _) => at,
                (None, Some(gpu)) => {
                    driver.discharge(gpu, taken);
                    return Err(OUT_OF_MEMORY);
                }
                (None, None) => return Err(OUT_OF_MEMORY),
            };
            let pool = self.pools.get(handle)?;
            pool.chunks.push(Chunk { at, size, taken, free: BTreeMap::from([(at, size)]) });
            pool.reserved += size;
            pool.reserved_high = pool.reserved_high.max(pool.reserved);
            return Ok(());
        }
        Err(OUT_OF_MEMORY)
    }

    /// Gives a block back to its pool.
    pub(crate) fn give_to_pool(&mut self, driver: &Driver, handle: u64, address: u64) {
        let Some(block) = self.blocks.remove(address) else { return };
        // Managed memory that has moved to a GPU.
        if block.taken > 0 {
            driver.discharge(block.gpu, block.taken);
        }
        let Ok(pool) = self.pools.all.get(handle, INVALID_VALUE) else { return };
        let size = block.bytes.next_multiple_of(PART);
        pool.used -= size;
        let holds = |chunk: &&mut Chunk| (chunk.at..chunk.at + chunk.size).contains(&address);
        if let Some(chunk) = pool.chunks.iter_mut().find(holds) {
            chunk.give(address, size);
        }
        if pool.destroyed && pool.used == 0 {
            self.trim_pool(driver, handle, 0);
        }
    }
}

/// `cuMemAllocAsync`, from a pool or from the one that the stream's GPU uses now.
fn allocate(to: Out<u64>, bytes: usize, pool: Option<u64>, stream: Stream) -> Outcome {
    let driver = driver()?;
    let context = stream.context()?;
    to.wanted()?;
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let mut tables = driver.tables();
    if let Some(capture) = capturing(&mut tables, stream)? {
        return to.put(tables.capture_allocation(driver, capture, context, bytes as u64)?);
    }
    let pool = match pool {
        Some(pool) => pool,
        None => tables.pools.current_of(Memory::of_gpu(driver, context.gpu)),
    };
    to.put(tables.allocate_from(driver, context, pool, bytes as u64)?)
}

fn free(address: u64, stream: Stream) -> Outcome {
    let driver = driver()?;
    stream.context()?;
    let mut tables = driver.tables();
    if let Some(capture) = capturing(&mut tables, stream)? {
        return tables.capture_free(capture, address);
    }
    drop(tables);
    crate::memory::free(address)
}

fn with_pool<T>(pool: u64, work: impl FnOnce(&mut Pool) -> Outcome<T>) -> Outcome<T> {
    let mut tables: MutexGuard<'_, Tables> = tables()?;
    work(tables.pools.get(pool)?)
}

fn get_attribute(pool: &Pool, which: c_int, value: Out<c_void>) -> Outcome {
    let (number, long) = (value.cast::<c_int>(), value.cast::<u64>());
    match which {
        1..=3 => number.put(pool.reuse[usize::try_from(which - 1).unwrap_or(0)]),
        4 => long.put(pool.threshold),
        5 => long.put(pool.reserved),
        6 => long.put(pool.reserved_high),
        7 => long.put(pool.used),
        8 => long.put(pool.used_high),
        9 => number.put(if pool.managed { MANAGED } else { PINNED }),
        10 => number.put(pool.handle_types),
        11 => number.put(pool.place.id),
        12 => number.put(pool.place.kind),
        13 => long.put(pool.max_size),
        14 => number.put(0),
        _ => Err(INVALID_VALUE),
    }
}

fn set_attribute(pool: &mut Pool, which: c_int, value: Out<c_void>) -> Outcome {
    match which {
        1..=3 => pool.reuse[usize::try_from(which - 1).unwrap_or(0)] = value.cast::<c_int>().get()?,
        4 => pool.threshold = value.cast::<u64>().get()?,
        // The high-water marks can only be set to 0, which means to what is now.
        6 if value.cast::<u64>().get()? == 0 => pool.reserved_high = pool.reserved,
        8 if value.cast::<u64>().get()? == 0 => pool.used_high = pool.used,
        _ => return Err(INVALID_VALUE),
    }
    Ok(())
}

fn set_pool(memory: Memory, pool: u64) -> Outcome {
    let mut tables = tables()?;
    let of = tables.pools.get(pool)?;
    let (place, kind) = (of.place, if of.managed { MANAGED } else { PINNED });
    if Memory::at(place, kind)? != memory {
        return Err(INVALID_VALUE);
    }
    tables.pools.current.insert(memory, pool);
    Ok(())
}

api! {
    fn cuMemAllocAsync, cuMemAllocAsync_ptsz(address: Out<u64>, bytes: usize, stream: u64) {
        allocate(address, bytes, None, Stream::new(stream, PER_THREAD))
    }

    fn cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz(
        address: Out<u64>, bytes: usize, pool: u64, stream: u64
    ) {
        allocate(address, bytes, Some(pool), Stream::new(stream, PER_THREAD))
    }

    fn cuMemFreeAsync, cuMemFreeAsync_ptsz(address: u64, stream: u64) {
        free(address, Stream::new(stream, PER_THREAD))
    }

    fn cuDeviceGetDefaultMemPool(pool: Out<u64>, device: c_int) {
        let driver = driver()?;
        let gpu = driver.gpu(device)?;
        pool.put(driver.tables().pools.default_of(Memory::of_gpu(driver, gpu)))
    }

    fn cuDeviceGetMemPool(pool: Out<u64>, device: c_int) {
        let driver = driver()?;
        let gpu = driver.gpu(device)?;
        pool.put(driver.tables().pools.current_of(Memory::of_gpu(driver, gpu)))
    }

    fn cuDeviceSetMemPool(device: c_int, pool: u64) {
        let driver = driver()?;
        set_pool(Memory::of_gpu(driver, driver.gpu(device)?), pool)
    }

    fn cuMemGetDefaultMemPool(pool: Out<u64>, place: In<Location>, kind: c_int) {
        let memory = Memory::at(place.get()?, kind)?;
        pool.put(tables()?.pools.default_of(memory))
    }

    fn cuMemGetMemPool(pool: Out<u64>, place: In<Location>, kind: c_int) {
        let memory = Memory::at(place.get()?, kind)?;
        pool.put(tables()?.pools.current_of(memory))
    }

    fn cuMemSetMemPool(place: In<Location>, kind: c_int, pool: u64) {
        set_pool(Memory::at(place.get()?, kind)?, pool)
    }

    fn cuMemPoolCreate(pool: Out<u64>, properties: In<PoolProperties>) {
        let driver = driver()?;
        pool.wanted()?;
        let wanted = properties.get()?;
        let Memory { managed, gpu, .. } = Memory::at(wanted.location, wanted.kind)?;
        // Other processes cannot have the host's.
        if wanted.location.kind == location::HOST && wanted.handle_types != 0 {
            return Err(INVALID_VALUE);
        }
        // A handle that others import is not modelled.
        let new = Pool {
            managed,
            ..Pool::new(gpu, wanted.location, wanted.handle_types, wanted.max_size as u64)
        };
        pool.put(driver.tables().pools.all.add(new))
    }

    fn cuMemPoolDestroy(pool: u64) {
        let driver = driver()?;
        let mut tables = driver.tables();
        if tables.pools.default.values().any(|default| *default == pool) {
            return Err(INVALID_VALUE);
        }
        tables.pools.get(pool)?.destroyed = true;
        tables.pools.current.retain(|_, current| *current != pool);
        tables.trim_pool(driver, pool, 0);
        Ok(())
    }

    fn cuMemPoolTrimTo(pool: u64, keep: usize) {
        let driver = driver()?;
        let mut tables = driver.tables();
        tables.pools.get(pool)?;
        tables.trim_pool(driver, pool, keep as u64);
        Ok(())
    }

    fn cuMemPoolGetAttribute(pool: u64, which: c_int, value: Out<c_void>) {
        with_pool(pool, |pool| get_attribute(pool, which, value))
    }

    fn cuMemPoolSetAttribute(pool: u64, which: c_int, value: Out<c_void>) {
        with_pool(pool, |pool| set_attribute(pool, which, value))
    }

    fn cuMemPoolSetAccess(pool: u64, map: In<AccessDescription>, count: usize) {
        for at in 0..count {
            gpu_of(map.get_at(at)?.location)?;
        }
        with_pool(pool, |_| Ok(()))
    }

    fn cuMemPoolGetAccess(flags: Out<c_int>, pool: u64, place: In<Location>) {
        let place = place.get()?;
        let own = with_pool(pool, |pool| Ok(pool.place.kind == place.kind && pool.place.id == place.id))?;
        // CU_MEM_ACCESS_FLAGS_PROT_READWRITE.
        flags.put(if own { 3 } else { 0 })
    }
}
