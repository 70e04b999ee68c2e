//! Blocks of memory by address: device memory, plain and pitched, and host memory that the driver knows. A device block takes
//! room on its GPU; its contents are kept where it is small enough, and only once something was written to it.

use std::collections::BTreeMap;

use crate::{
    context::{Context, current},
    driver::{Driver, Tables, charge, driver},
    ffi::{
        HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, INVALID_VALUE, OUT_OF_MEMORY, Out,
        Outcome, api,
    },
};

/// Contents of larger blocks are not kept: they read as zeroes.
const KEPT: u64 = 64 << 20;

/// Rows of pitched memory begin at multiples of this.
const PITCH: u64 = 512;

/// From this size on, a block begins at a multiple of the GPU's page size.
const LARGE: u64 = 1 << 20;
const PAGE: u64 = 2 << 20;

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Of `cuMemAlloc` and the like.
    Device,
    /// Managed: in host memory, and in a GPU's while it is resident there. Of `cuMemAllocManaged`, or of a pool.
    Managed { resident: Option<usize>, pool: Option<u64> },
    /// Of `cuMemHostAlloc`; with its flags.
    Host { flags: u32 },
    /// The program's own memory, registered; with the flags.
    Registered { flags: u32 },
    /// Of a pool, which has taken the room.
    Pooled { pool: u64 },
    /// Of a graph's allocation node, which has taken the room.
    Graph { exec: u64 },
    /// Another process's block; with the handle that it was opened by.
    Imported { name: (u64, u64) },
    /// A part of a physical allocation, mapped.
    Mapped { physical: u64, offset: u64 },
    /// A variable of a module, which has taken the room.
    Variable,
}

impl Kind {
    /// Whether its bytes are in this process's memory, at the same address.
    pub(crate) fn in_host_memory(self) -> bool {
        matches!(self, Self::Managed { .. } | Self::Host { .. } | Self::Registered { .. })
    }
}

/// A block.
pub(crate) struct Block {
    pub bytes: u64,
    /// Bytes that it takes of its GPU by itself.
    pub taken: u64,
    pub gpu: usize,
    pub context: Option<&'static Context>,
    pub kind: Kind,
    /// A number that no other block of the process ever has.
    pub id: u64,
    pub contents: Contents,
}

/// What was written to a block, once something was.
#[derive(Default)]
pub(crate) struct Contents(Option<Box<[u8]>>);

impl Contents {
    /// Reads at an offset.
    pub(crate) fn read(&self, offset: u64, to: &mut [u8]) {
        match &self.0 {
            Some(bytes) => to.copy_from_slice(&bytes[index(offset)..][..to.len()]),
            None => to.fill(0),
        }
    }

    /// Writes at an offset of a block that is `length` bytes long.
    pub(crate) fn write(&mut self, length: u64, offset: u64, from: &[u8]) {
        if length <= KEPT {
            let bytes = self.0.get_or_insert_with(|| vec![0; index(length)].into());
            bytes[index(offset)..][..from.len()].copy_from_slice(from);
        }
    }
}

fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

/// All blocks, by address.
#[derive(Default)]
pub(crate) struct Blocks {
    by_address: BTreeMap<u64, Block>,
    last_id: u64,
}

impl Blocks {
    /// The block that an address is in, and where that begins.
    pub(crate) fn around(&mut self, address: u64) -> Option<(u64, &mut Block)> {
        let (at, block) = self.by_address.range_mut(..=address).next_back()?;
        (address - at < block.bytes).then_some((*at, block))
    }

    /// The block that begins at an address.
    pub(crate) fn at(&mut self, address: u64) -> Option<&mut Block> {
        self.by_address.get_mut(&address)
    }

    pub(crate) fn insert(&mut self, address: u64, mut block: Block) {
        self.last_id += 1;
        block.id = self.last_id;
        self.by_address.insert(address, block);
    }

    pub(crate) fn remove(&mut self, address: u64) -> Option<Block> {
        self.by_address.remove(&address)
    }

    /// Addresses of the blocks that fit.
    pub(crate) fn which(&self, fits: impl Fn(&Block) -> bool) -> Vec<u64> {
        self.by_address.iter().filter(|(_, block)| fits(block)).map(|(at, _)| *at).collect()
    }

    /// Whether a block touches a range.
    pub(crate) fn overlaps(&self, from: u64, to: u64) -> bool {
        let before = self.by_address.range(..to).next_back();
        before.is_some_and(|(at, block)| at + block.bytes > from)
    }
}

impl Block {
    pub(crate) fn new(bytes: u64, gpu: usize, context: Option<&'static Context>, kind: Kind) -> Self {
        Self { bytes, taken: 0, gpu, context, kind, id: 0, contents: Contents::default() }
    }

    /// Whether what is written to it can be read again.
    pub(crate) fn keeps_contents(&self) -> bool {
        self.kind.in_host_memory() || matches!(self.kind, Kind::Mapped { .. }) || self.bytes <= KEPT
    }
}

impl Tables {
    /// A block of device memory in a context, at a new address.
    pub(crate) fn allocate(
        &mut self,
        driver: &Driver,
        context: &'static Context,
        bytes: u64,
    ) -> Outcome<u64> {
        let taken = driver.rounded(context.gpu, bytes)?;
        charge(driver, self, context.gpu, taken)?;
        match self.place(Block { taken, ..Block::new(bytes, context.gpu, Some(context), Kind::Device) }) {
            Ok(at) => Ok(at),
            Err(error) => {
                driver.discharge(context.gpu, taken);
                Err(error)
            }
        }
    }

    /// Gives a block an address.
    pub(crate) fn place(&mut self, block: Block) -> Outcome<u64> {
        let alignment = if block.bytes >= LARGE { PAGE } else { PITCH };
        let at = self.space.take(block.bytes, alignment).ok_or(OUT_OF_MEMORY)?;
        self.blocks.insert(at, block);
        Ok(at)
    }

    /// Forgets a block, and gives back what it took by itself.
    pub(crate) fn forget_block(&mut self, driver: &Driver, address: u64) {
        let Some(block) = self.blocks.remove(address) else { return };
        self.withdraw(driver, address);
        if block.taken > 0 {
            driver.discharge(block.gpu, block.taken);
        }
        match block.kind {
            Kind::Managed { .. } | Kind::Host { .. } => unmap(address, block.bytes),
            // Not of our making.
            Kind::Registered { .. } => {}
            // Within a range that was reserved for it.
            Kind::Mapped { .. } => {}
            _ => self.space.give(address, block.bytes),
        }
    }

    /// Forgets the blocks that were made in a context.
    pub(crate) fn release_blocks_of(&mut self, driver: &Driver, context: &'static Context) {
        let of_context = |block: &Block| block.context.is_some_and(|of| std::ptr::eq(of, context));
        for address in self.blocks.which(of_context) {
            self.release_block(driver, address);
        }
    }

    /// Forgets a block of any kind.
    fn release_block(&mut self, driver: &Driver, address: u64) {
        match self.blocks.at(address).map(|block| block.kind) {
            Some(Kind::Pooled { pool } | Kind::Managed { pool: Some(pool), .. }) => {
                self.give_to_pool(driver, pool, address);
            }
            Some(Kind::Graph { exec }) => self.free_in_graph(exec, address),
            Some(_) => self.forget_block(driver, address),
            None => {}
        }
    }

    /// Reads device memory, or host memory that the driver knows; what it does not know is the program's own.
    pub(crate) fn read(&mut self, address: u64, to: &mut [u8]) -> Outcome {
        let Some((at, block)) = self.known(address, to.len() as u64)? else {
            copy_bytes(to.as_mut_ptr() as u64, address, to.len());
            return Ok(());
        };
        let offset = address - at;
        if let Kind::Mapped { physical, offset: from } = block.kind {
            return self.physicals.contents(physical, |contents, _| contents.read(from + offset, to));
        }
        block.contents.read(offset, to);
        Ok(())
    }

    /// Writes to it.
    pub(crate) fn write(&mut self, address: u64, from: &[u8]) -> Outcome {
        let Some((at, block)) = self.known(address, from.len() as u64)? else {
            copy_bytes(address, from.as_ptr() as u64, from.len());
            return Ok(());
        };
        let offset = address - at;
        if let Kind::Mapped { physical, offset: to } = block.kind {
            return self
                .physicals
                .contents(physical, |contents, length| contents.write(length, to + offset, from));
        }
        let length = block.bytes;
        block.contents.write(length, offset, from);
        Ok(())
    }

    /// The block of a range that is device memory; none for host memory. A range that leaves its block, or is in no block
    /// though its address is one for device memory, is an error.
    fn known(&mut self, address: u64, length: u64) -> Outcome<Option<(u64, &mut Block)>> {
        let device = self.space.covers(address);
        match self.blocks.around(address) {
            Some((_, block)) if block.kind.in_host_memory() => Ok(None),
            Some((at, block)) if address - at + length <= block.bytes => Ok(Some((at, block))),
            Some(_) => Err(INVALID_VALUE),
            None if device => Err(INVALID_VALUE),
            None => Ok(None),
        }
    }
}

/// A block that the program gives back with `cuMemFree`.
pub(crate) fn free(address: u64) -> Outcome {
    let driver = driver()?;
    let context = current()?;
    if address == 0 {
        return Ok(());
    }
    // As the real one does; kernels may still use the block.
    driver.work.wait_for_context(driver, context)?;
    let mut tables = driver.tables();
    match tables.blocks.at(address).map(|block| block.kind).ok_or(INVALID_VALUE)? {
        Kind::Device | Kind::Managed { .. } | Kind::Pooled { .. } | Kind::Graph { .. } => {
            tables.release_block(driver, address);
            Ok(())
        }
        _ => Err(INVALID_VALUE),
    }
}

fn allocate(to: Out<u64>, bytes: u64) -> Outcome {
    let driver = driver()?;
    let context = current()?;
    to.wanted()?;
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let at = driver.tables().allocate(driver, context, bytes)?;
    to.put(at)
}

/// Copies `length` bytes between addresses of this process.
fn copy_bytes(to: u64, from: u64, length: usize) {
    // SAFETY: the program passes addresses of host memory that is as long; `copy` minds overlaps.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, length) };
}

/// Host memory of our own, zeroed, committed as it is touched.
pub(crate) fn map(bytes: u64) -> Outcome<u64> {
    let length = usize::try_from(bytes).map_err(|_| OUT_OF_MEMORY)?;
    // SAFETY: a new mapping at an address that the kernel picks.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if at == libc::MAP_FAILED { Err(OUT_OF_MEMORY) } else { Ok(at as u64) }
}

pub(crate) fn unmap(address: u64, bytes: u64) {
    // SAFETY: a block that `map` made, which is forgotten.
    unsafe { libc::munmap(address as *mut _, index(bytes)) };
}

fn allocate_host(to: Out<u64>, bytes: u64, flags: u32) -> Outcome {
    let driver = driver()?;
    let context = current()?;
    to.wanted()?;
    if bytes == 0 || flags & !7 != 0 {
        return Err(INVALID_VALUE);
    }
    let at = map(bytes)?;
    let block = Block::new(bytes, context.gpu, Some(context), Kind::Host { flags });
    driver.tables().blocks.insert(at, block);
    to.put(at)
}

api! {
    fn cuMemAlloc_v2(address: Out<u64>, bytes: usize) { allocate(address, bytes as u64) }

    fn cuMemAllocPitch_v2(address: Out<u64>, pitch: Out<usize>, width: usize, height: usize, element: u32) {
        current()?;
        pitch.wanted()?;
        if width == 0 || height == 0 || !matches!(element, 4 | 8 | 16) {
            return Err(INVALID_VALUE);
        }
        let row = (width as u64).checked_next_multiple_of(PITCH).ok_or(OUT_OF_MEMORY)?;
        allocate(address, row.checked_mul(height as u64).ok_or(OUT_OF_MEMORY)?)?;
        pitch.put(index(row))
    }

    fn cuMemFree_v2(address: u64) { free(address) }

    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let driver = driver()?;
        let gpu = current()?.gpu;
        free.put_if_wanted(index(driver.link.state.free(gpu)));
        total.put_if_wanted(index(driver.state(gpu).facts.usable()));
        Ok(())
    }

    fn cuMemGetInfo(free: Out<u32>, total: Out<u32>) {
        let driver = driver()?;
        let gpu = current()?.gpu;
        let narrow = |bytes| u32::try_from(bytes).unwrap_or(u32::MAX);
        free.put_if_wanted(narrow(driver.link.state.free(gpu)));
        total.put_if_wanted(narrow(driver.state(gpu).facts.usable()));
        Ok(())
    }

    fn cuMemGetAddressRange_v2(base: Out<u64>, size: Out<usize>, address: u64) {
        current()?;
        let mut tables = crate::driver::tables()?;
        let (at, block) = tables.blocks.around(address).ok_or(INVALID_VALUE)?;
        base.put_if_wanted(at);
        size.put_if_wanted(index(block.bytes));
        Ok(())
    }

    fn cuMemHostAlloc(address: Out<u64>, bytes: usize, flags: u32) { allocate_host(address, bytes as u64, flags) }

    fn cuMemAllocHost_v2(address: Out<u64>, bytes: usize) { allocate_host(address, bytes as u64, 0) }

    fn cuMemFreeHost(address: u64) {
        let driver = driver()?;
        current()?;
        if address == 0 {
            return Ok(());
        }
        let mut tables = driver.tables();
        match tables.blocks.at(address).map(|block| block.kind) {
            Some(Kind::Host { .. }) => {
                tables.forget_block(driver, address);
                Ok(())
            }
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuMemHostRegister, cuMemHostRegister_v2(address: u64, bytes: usize, flags: u32) {
        let driver = driver()?;
        let context = current()?;
        let bytes = bytes as u64;
        if address == 0 || bytes == 0 || address.checked_add(bytes).is_none() || flags & !15 != 0 {
            return Err(INVALID_VALUE);
        }
        let mut tables = driver.tables();
        if tables.blocks.overlaps(address, address + bytes) {
            return Err(HOST_MEMORY_ALREADY_REGISTERED);
        }
        let block = Block::new(bytes, context.gpu, Some(context), Kind::Registered { flags });
        tables.blocks.insert(address, block);
        Ok(())
    }

    fn cuMemHostUnregister(address: u64) {
        let driver = driver()?;
        current()?;
        let mut tables = driver.tables();
        match tables.blocks.at(address).map(|block| block.kind) {
            Some(Kind::Registered { .. }) => {
                tables.forget_block(driver, address);
                Ok(())
            }
            _ => Err(HOST_MEMORY_NOT_REGISTERED),
        }
    }

    fn cuMemHostGetDevicePointer_v2(device: Out<u64>, address: u64, flags: u32) {
        current()?;
        device.wanted()?;
        let mut tables = crate::driver::tables()?;
        match tables.blocks.around(address) {
            Some((_, block)) if flags == 0 && block.kind.in_host_memory() => device.put(address),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuMemHostGetFlags(to: Out<u32>, address: u64) {
        current()?;
        let mut tables = crate::driver::tables()?;
        match tables.blocks.around(address).map(|(_, block)| block.kind) {
            Some(Kind::Host { flags } | Kind::Registered { flags }) => to.put(flags),
            _ => Err(INVALID_VALUE),
        }
    }
}
