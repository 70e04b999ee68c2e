//! Virtual memory management: reserved addresses, physical allocations, and mappings of the one to the other. A physical
//! allocation takes room until nobody has a handle or a mapping of it, in any process.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::{c_int, c_void},
    os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd},
};

use sim_gpud::wire::request;

use crate::{
    driver::{Driver, Tables, charge, driver, new_handle, refused, tables},
    ffi::{
        AccessDescription, AllocationProperties, INVALID_DEVICE, INVALID_VALUE, In, Location, NOT_SUPPORTED,
        OUT_OF_MEMORY, Out, Outcome, POSIX_FILE_DESCRIPTOR, api, location,
    },
    managed::gpu_of,
    memory::{Block, Contents, Kind},
};

/// Sizes and addresses are multiples of this.
const PAGE: u64 = 2 << 20;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: c_int = 1;

/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: u64 = 3;

/// A physical allocation.
struct Physical {
    bytes: u64,
    /// Its GPU; none where it is in host memory.
    gpu: Option<usize>,
    properties: AllocationProperties,
    handles: u32,
    mappings: u32,
    /// Its number at the module, and a descriptor that stands for it, once other processes may have it.
    shared: Option<(u64, OwnedFd)>,
    contents: Contents,
}

// SAFETY: the pointer in the properties is only given back to the program.
unsafe impl Send for Physical {}

/// The process's physical allocations and reserved addresses.
#[derive(Default)]
pub(crate) struct Physicals {
    all: HashMap<u64, Physical>,
    reserved: BTreeMap<u64, u64>,
}

impl Physicals {
    fn with_handle(&mut self, handle: u64) -> Outcome<&mut Physical> {
        self.all.get_mut(&handle).filter(|physical| physical.handles > 0).ok_or(INVALID_VALUE)
    }

    /// Works on a physical allocation's contents and length.
    pub(crate) fn contents(&mut self, handle: u64, work: impl FnOnce(&mut Contents, u64)) -> Outcome {
        let physical = self.all.get_mut(&handle).ok_or(INVALID_VALUE)?;
        work(&mut physical.contents, physical.bytes);
        Ok(())
    }

    /// What kinds of handles a physical allocation can be exported as.
    pub(crate) fn handle_types(&self, handle: u64) -> c_int {
        self.all.get(&handle).map_or(0, |physical| physical.properties.handle_types)
    }

    fn reserved(&self, from: u64, length: u64) -> bool {
        let around = self.reserved.range(..=from).next_back();
        let end = from.checked_add(length);
        around.zip(end).is_some_and(|((at, size), end)| end <= at + size)
    }
}

impl Tables {
    /// Gives a physical allocation back that nobody here has any more.
    fn sweep_physical(&mut self, driver: &Driver, handle: u64) {
        let Some(physical) = self.physicals.all.get(&handle) else { return };
        if physical.handles > 0 || physical.mappings > 0 {
            return;
        }
        match self.physicals.all.remove(&handle) {
            // The module gives it back when no other process uses it either.
            Some(Physical { shared: Some((number, _)), .. }) => {
                let _ = driver.link.ask(&[request::DROP, number], None);
            }
            Some(Physical { gpu: Some(gpu), bytes, .. }) => driver.discharge(gpu, bytes),
            _ => {}
        }
    }

    /// Mappings within a range, which must cover it.
    fn mappings(&mut self, from: u64, length: u64) -> Outcome<Vec<u64>> {
        let end = from.checked_add(length).ok_or(INVALID_VALUE)?;
        let mut found = vec![];
        let mut at = from;
        while at < end {
            let block = self.blocks.at(at).filter(|block| matches!(block.kind, Kind::Mapped { .. }));
            let block = block.filter(|block| at + block.bytes <= end).ok_or(INVALID_VALUE)?;
            found.push(at);
            at += block.bytes;
        }
        Ok(found)
    }

    fn add_physical(&mut self, physical: Physical) -> u64 {
        let handle = new_handle();
        self.physicals.all.insert(handle, physical);
        handle
    }
}

fn export(handle: u64) -> Outcome<OwnedFd> {
    let driver = driver()?;
    let mut tables = driver.tables();
    let physical = tables.physicals.with_handle(handle)?;
    if physical.properties.handle_types & POSIX_FILE_DESCRIPTOR == 0 {
        return Err(INVALID_VALUE);
    }
    // Memory on the host is not the module's.
    let gpu = physical.gpu.ok_or(NOT_SUPPORTED)?;
    let (_, descriptor) = match &mut physical.shared {
        Some(shared) => shared,
        unshared => {
            let words = [request::SHARE, gpu as u64, physical.bytes];
            let (answer, descriptor) = driver.link.ask(&words, None).map_err(|error| refused(&error))?;
            unshared.insert((answer[1], descriptor.ok_or(NOT_SUPPORTED)?))
        }
    };
    descriptor.try_clone().map_err(|_| OUT_OF_MEMORY)
}

fn import(descriptor: BorrowedFd<'_>) -> Outcome<u64> {
    let driver = driver()?;
    let kept = descriptor.try_clone_to_owned().map_err(|_| INVALID_VALUE)?;
    let (answer, _) =
        driver.link.ask(&[request::ADOPT], Some(kept.as_fd())).map_err(|error| refused(&error))?;
    let [_, number, gpu, bytes, ..] = answer;
    let gpu = usize::try_from(gpu).ok().filter(|gpu| driver.devices.contains(gpu));
    let Some(gpu) = gpu else {
        let _ = driver.link.ask(&[request::DROP, number], None);
        return Err(INVALID_DEVICE);
    };
    let properties = AllocationProperties {
        kind: PINNED,
        handle_types: POSIX_FILE_DESCRIPTOR,
        location: Location { kind: location::DEVICE, id: driver.device(gpu) },
        win32: std::ptr::null(),
        flags: [0; 8],
    };
    let physical = Physical {
        bytes,
        gpu: Some(gpu),
        properties,
        handles: 1,
        mappings: 0,
        shared: Some((number, kept)),
        contents: Contents::default(),
    };
    Ok(driver.tables().add_physical(physical))
}

api! {
    fn cuMemGetAllocationGranularity(size: Out<usize>, properties: In<AllocationProperties>, option: c_int) {
        let wanted = properties.get()?;
        if wanted.kind != PINNED || !matches!(option, 0 | 1) {
            return Err(INVALID_VALUE);
        }
        gpu_of(wanted.location)?;
        size.put(usize::try_from(PAGE).unwrap_or(0))
    }

    fn cuMemCreate(handle: Out<u64>, bytes: usize, properties: In<AllocationProperties>, flags: u64) {
        let driver = driver()?;
        handle.wanted()?;
        let (properties, bytes) = (properties.get()?, bytes as u64);
        if properties.kind != PINNED || flags != 0 || bytes == 0 || !bytes.is_multiple_of(PAGE) {
            return Err(INVALID_VALUE);
        }
        if properties.handle_types & !POSIX_FILE_DESCRIPTOR != 0 {
            return Err(NOT_SUPPORTED);
        }
        let gpu = gpu_of(properties.location)?;
        let mut tables = driver.tables();
        if let Some(gpu) = gpu {
            charge(driver, &mut tables, gpu, bytes)?;
        }
        let contents = Contents::default();
        let physical = Physical { bytes, gpu, properties, handles: 1, mappings: 0, shared: None, contents };
        handle.put(tables.add_physical(physical))
    }

    fn cuMemRelease(handle: u64) {
        let driver = driver()?;
        let mut tables = driver.tables();
        tables.physicals.with_handle(handle)?.handles -= 1;
        tables.sweep_physical(driver, handle);
        Ok(())
    }

    fn cuMemRetainAllocationHandle(handle: Out<u64>, address: u64) {
        handle.wanted()?;
        let mut tables = tables()?;
        let Some(Kind::Mapped { physical, .. }) = tables.blocks.around(address).map(|(_, block)| block.kind) else {
            return Err(INVALID_VALUE);
        };
        tables.physicals.all.get_mut(&physical).ok_or(INVALID_VALUE)?.handles += 1;
        handle.put(physical)
    }

    fn cuMemGetAllocationPropertiesFromHandle(properties: Out<AllocationProperties>, handle: u64) {
        properties.put(tables()?.physicals.with_handle(handle)?.properties)
    }

    fn cuMemAddressReserve(address: Out<u64>, bytes: usize, alignment: usize, near: u64, flags: u64) {
        // Where it is put is only a wish.
        let _ = near;
        let (bytes, alignment) = (bytes as u64, alignment as u64);
        address.wanted()?;
        if bytes == 0 || !bytes.is_multiple_of(PAGE) || flags != 0 || (alignment != 0 && !alignment.is_power_of_two()) {
            return Err(INVALID_VALUE);
        }
        let mut tables = tables()?;
        let at = tables.space.take(bytes, alignment.max(PAGE)).ok_or(OUT_OF_MEMORY)?;
        tables.physicals.reserved.insert(at, bytes);
        address.put(at)
    }

    fn cuMemAddressFree(address: u64, bytes: usize) {
        let mut tables = tables()?;
        let bytes = bytes as u64;
        if tables.physicals.reserved.get(&address) != Some(&bytes) || tables.blocks.overlaps(address, address + bytes) {
            return Err(INVALID_VALUE);
        }
        tables.physicals.reserved.remove(&address);
        tables.space.give(address, bytes);
        Ok(())
    }

    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) {
        let mut tables = tables()?;
        let (bytes, offset) = (bytes as u64, offset as u64);
        let aligned = [address, bytes, offset].iter().all(|value| value.is_multiple_of(PAGE));
        if !aligned || bytes == 0 || flags != 0 || !tables.physicals.reserved(address, bytes)
            || tables.blocks.overlaps(address, address + bytes)
        {
            return Err(INVALID_VALUE);
        }
        let physical = tables.physicals.with_handle(handle)?;
        if offset.checked_add(bytes).is_none_or(|end| end > physical.bytes) {
            return Err(INVALID_VALUE);
        }
        physical.mappings += 1;
        let gpu = physical.gpu.unwrap_or(usize::MAX);
        tables.blocks.insert(address, Block::new(bytes, gpu, None, Kind::Mapped { physical: handle, offset }));
        Ok(())
    }

    fn cuMemUnmap(address: u64, bytes: usize) {
        let driver = driver()?;
        let mut tables = driver.tables();
        for at in tables.mappings(address, bytes as u64)? {
            if let Some(Block { kind: Kind::Mapped { physical, .. }, .. }) = tables.blocks.remove(at) {
                if let Some(physical) = tables.physicals.all.get_mut(&physical) {
                    physical.mappings -= 1;
                }
                tables.sweep_physical(driver, physical);
            }
        }
        Ok(())
    }

    fn cuMemSetAccess(address: u64, bytes: usize, description: In<AccessDescription>, count: usize) {
        let mut tables = tables()?;
        tables.mappings(address, bytes as u64)?;
        for at in 0..count {
            gpu_of(description.get_at(at)?.location)?;
        }
        Ok(())
    }

    fn cuMemGetAccess(flags: Out<u64>, place: In<Location>, address: u64) {
        gpu_of(place.get()?)?;
        let mut tables = tables()?;
        match tables.blocks.around(address).map(|(_, block)| block.kind) {
            Some(Kind::Mapped { .. }) => flags.put(READ_WRITE),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuMemExportToShareableHandle(to: Out<c_void>, handle: u64, kind: c_int, flags: u64) {
        to.wanted()?;
        if kind != POSIX_FILE_DESCRIPTOR {
            return Err(NOT_SUPPORTED);
        }
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        to.cast::<c_int>().put(export(handle)?.into_raw_fd())
    }

    fn cuMemImportFromShareableHandle(handle: Out<u64>, from: usize, kind: c_int) {
        handle.wanted()?;
        if kind != POSIX_FILE_DESCRIPTOR {
            return Err(NOT_SUPPORTED);
        }
        // The descriptor itself stands in the pointer's place.
        let descriptor = c_int::try_from(from).ok().filter(|descriptor| *descriptor >= 0).ok_or(INVALID_VALUE)?;
        // SAFETY: the program says that it has this descriptor open; it is only duplicated here.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        handle.put(import(descriptor)?)
    }
}
