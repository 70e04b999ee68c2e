//! What a pointer points to.

use std::ffi::{c_int, c_void};

use crate::{
    driver::{Tables, driver, tables},
    ffi::{Error, INVALID_VALUE, In, NOT_SUPPORTED, Out, Outcome, POSIX_FILE_DESCRIPTOR, api},
    memory::Kind,
};

/// `CUmemorytype`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;

/// The last attribute of CUDA 13.5.
const LAST: c_int = 22;

fn attribute(tables: &mut Tables, to: Out<c_void>, which: c_int, address: u64) -> Outcome {
    let driver = driver()?;
    if !(1..=LAST).contains(&which) {
        return Err(INVALID_VALUE);
    }
    to.wanted()?;
    let (start, block) = tables.blocks.around(address).ok_or(INVALID_VALUE)?;
    let kind = block.kind;
    let (number, long, flag) = (to.cast::<u32>(), to.cast::<u64>(), to.cast::<u8>());
    let host = kind.in_host_memory();
    match which {
        1 => long.put(block.context.map_or(0, |context| context.handle())),
        2 => number.put(if matches!(kind, Kind::Host { .. } | Kind::Registered { .. }) {
            HOST
        } else {
            DEVICE
        }),
        3 => long.put(address),
        4 if host => long.put(address),
        6 => flag.put(0),
        7 | 20 => long.put(block.id),
        8 => flag.put(u8::from(matches!(kind, Kind::Managed { .. }))),
        9 => to.cast::<c_int>().put(driver.device(block.gpu)),
        10 => flag.put(u8::from(kind == Kind::Device)),
        11 | 19 => long.put(start),
        12 | 18 => long.put(block.bytes),
        13 => flag.put(1),
        14 => {
            let Kind::Mapped { physical, .. } = kind else { return long.put(0) };
            let types = tables.physicals.handle_types(physical) & POSIX_FILE_DESCRIPTOR;
            long.put(u64::from(types.cast_unsigned()))
        }
        15 => flag.put(u8::from(!host)),
        16 => number.put(3),
        17 => long.put(match kind {
            Kind::Pooled { pool } | Kind::Managed { pool: Some(pool), .. } => pool,
            _ => 0,
        }),
        21 => flag.put(0),
        4 | 5 => Err(INVALID_VALUE),
        _ => Err(NOT_SUPPORTED),
    }
}

/// What `cuPointerGetAttributes` gives for a pointer that the driver does not know.
fn unknown(to: Out<c_void>, which: c_int) -> Outcome {
    match which {
        2 | 16 => to.cast::<u32>().put(0),
        6 | 8 | 10 | 13 | 15 | 21 => to.cast::<u8>().put(0),
        9 => to.cast::<c_int>().put(-2),
        1..=LAST => to.cast::<u64>().put(0),
        _ => Err(INVALID_VALUE),
    }
}

api! {
    fn cuPointerGetAttribute(to: Out<c_void>, which: c_int, address: u64) {
        attribute(&mut *tables()?, to, which, address)
    }

    fn cuPointerGetAttributes(count: u32, which: In<c_int>, to: In<Out<c_void>>, address: u64) {
        let mut tables = tables()?;
        for at in 0..count as usize {
            let (which, to) = (which.get_at(at)?, to.get_at(at)?);
            match attribute(&mut tables, to, which, address) {
                Err(Error(1)) => unknown(to, which)?,
                other => other?,
            }
        }
        Ok(())
    }

    fn cuPointerSetAttribute(value: *const c_void, which: c_int, address: u64) {
        let _ = value;
        // CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: all operations are synchronous.
        match tables()?.blocks.around(address) {
            Some(_) if which == 6 => Ok(()),
            _ => Err(INVALID_VALUE),
        }
    }
}
