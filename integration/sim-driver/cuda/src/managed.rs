//! Managed memory. It is in host memory, and takes no room on a GPU until it goes there: by a prefetch, or by a copy or fill
//! that a GPU does. A whole block moves at a time; one that finds no room stays where it is.

use std::ffi::{c_int, c_void};

use crate::{
    context::current,
    driver::{Driver, Tables, driver, tables},
    ffi::{INVALID_VALUE, In, Location, NOT_SUPPORTED, Out, Outcome, api, location},
    memory::{Block, Kind, map},
    stream::{Operation, Stream, submit},
};

/// `CU_DEVICE_CPU`.
const CPU: c_int = -1;

impl Tables {
    /// Moves the managed block at an address to a GPU, or to the host. Other blocks stay where they are.
    pub(crate) fn migrate(&mut self, driver: &Driver, address: u64, to: Option<usize>) {
        let Some((_, block)) = self.blocks.around(address) else { return };
        let Kind::Managed { resident, pool } = block.kind else { return };
        if resident == to {
            return;
        }
        let taken = match to.map(|gpu| (gpu, driver.rounded(gpu, block.bytes))) {
            Some((gpu, Ok(bytes))) if driver.charge(gpu, bytes).is_ok() => bytes,
            Some(_) => return,
            None => 0,
        };
        if let Some(gpu) = resident {
            driver.discharge(gpu, block.taken);
        }
        block.taken = taken;
        block.kind = Kind::Managed { resident: to, pool };
        block.gpu = to.unwrap_or(block.gpu);
    }
}

fn prefetch(address: u64, bytes: usize, to: Option<usize>, stream: Stream) -> Outcome {
    let driver = driver()?;
    managed(&mut driver.tables(), address, bytes)?;
    submit(stream, Operation::Prefetch { address, to })
}

fn managed(tables: &mut Tables, address: u64, bytes: usize) -> Outcome<Option<usize>> {
    let (at, block) = tables.blocks.around(address).ok_or(INVALID_VALUE)?;
    match block.kind {
        Kind::Managed { resident, .. } if address - at + bytes as u64 <= block.bytes && bytes > 0 => {
            Ok(resident)
        }
        _ => Err(INVALID_VALUE),
    }
}

/// The GPU of a location; none for the host.
pub(crate) fn gpu_of(place: Location) -> Outcome<Option<usize>> {
    match place.kind {
        location::DEVICE => driver()?.gpu(place.id).map(Some),
        location::HOST | location::HOST_NUMA | location::HOST_NUMA_CURRENT => Ok(None),
        _ => Err(INVALID_VALUE),
    }
}

fn device(device: c_int) -> Outcome<Option<usize>> {
    if device == CPU { Ok(None) } else { driver()?.gpu(device).map(Some) }
}

fn range_attribute(
    tables: &mut Tables,
    data: Out<c_void>,
    size: usize,
    which: c_int,
    address: u64,
    bytes: usize,
) -> Outcome {
    let resident = managed(tables, address, bytes)?;
    let number = match which {
        // READ_MOSTLY, PREFERRED_LOCATION (none is CU_DEVICE_INVALID), ACCESSED_BY, LAST_PREFETCH_LOCATION.
        1 => 0,
        2 | 3 => -2,
        4 => match resident {
            Some(gpu) => driver()?.device(gpu),
            None => CPU,
        },
        _ => return Err(NOT_SUPPORTED),
    };
    if size < size_of::<c_int>() {
        return Err(INVALID_VALUE);
    }
    for at in 0..size / size_of::<c_int>() {
        data.cast::<c_int>().put_at(at, if at == 0 { number } else { -2 })?;
    }
    Ok(())
}

api! {
    fn cuMemAllocManaged(address: Out<u64>, bytes: usize, flags: u32) {
        let driver = driver()?;
        let context = current()?;
        address.wanted()?;
        // CU_MEM_ATTACH_GLOBAL or _HOST.
        if bytes == 0 || !matches!(flags, 1 | 2) {
            return Err(INVALID_VALUE);
        }
        let at = map(bytes as u64)?;
        let kind = Kind::Managed { resident: None, pool: None };
        driver.tables().blocks.insert(at, Block::new(bytes as u64, context.gpu, Some(context), kind));
        address.put(at)
    }

    fn cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz(address: u64, bytes: usize, to: c_int, stream: u64) {
        prefetch(address, bytes, device(to)?, Stream::new(stream, PER_THREAD))
    }

    fn cuMemPrefetchAsync_v2, cuMemPrefetchAsync_v2_ptsz(
        address: u64, bytes: usize, to: Location, flags: u32, stream: u64
    ) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        prefetch(address, bytes, gpu_of(to)?, Stream::new(stream, PER_THREAD))
    }

    fn cuMemAdvise(address: u64, bytes: usize, advice: c_int, to: c_int) {
        let _ = to;
        if !(1..=6).contains(&advice) {
            return Err(INVALID_VALUE);
        }
        managed(&mut *tables()?, address, bytes).map(drop)
    }

    fn cuMemAdvise_v2(address: u64, bytes: usize, advice: c_int, to: Location) {
        let _ = to;
        if !(1..=6).contains(&advice) {
            return Err(INVALID_VALUE);
        }
        managed(&mut *tables()?, address, bytes).map(drop)
    }

    fn cuMemRangeGetAttribute(data: Out<c_void>, size: usize, which: c_int, address: u64, bytes: usize) {
        range_attribute(&mut *tables()?, data, size, which, address, bytes)
    }

    fn cuMemRangeGetAttributes(
        data: In<Out<c_void>>, sizes: In<usize>, which: In<c_int>, count: usize, address: u64, bytes: usize
    ) {
        let mut tables = tables()?;
        for at in 0..count {
            range_attribute(&mut tables, data.get_at(at)?, sizes.get_at(at)?, which.get_at(at)?, address, bytes)?;
        }
        Ok(())
    }

    fn cuStreamAttachMemAsync, cuStreamAttachMemAsync_ptsz(stream: u64, address: u64, length: usize, flags: u32) {
        let _ = (length, flags);
        managed(&mut *tables()?, address, 1)?;
        submit(Stream::new(stream, PER_THREAD), Operation::Nothing)
    }
}
