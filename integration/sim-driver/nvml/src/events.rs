//! Events: XID errors, as the daemon is told to let them happen.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError, atomic::Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

use crate::{
    INVALID_ARGUMENT, Outcome, TIMEOUT,
    device::{Device, gpu},
    put, status,
    system::with,
};

/// `nvmlEventTypeXidCriticalError`.
const XID: u64 = 8;

/// Event sets: per GPU, how many XIDs were told already.
static SETS: Mutex<BTreeMap<usize, BTreeMap<usize, u64>>> = Mutex::new(BTreeMap::new());

fn sets<T>(work: impl FnOnce(&mut BTreeMap<usize, BTreeMap<usize, u64>>) -> T) -> T {
    work(&mut SETS.lock().unwrap_or_else(PoisonError::into_inner))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetCreate(set: *mut usize) -> u32 {
    status(sets(|sets| {
        let number = sets.keys().next_back().map_or(1, |last| last + 1);
        put(set, number)?;
        sets.insert(number, BTreeMap::new());
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetFree(set: usize) -> u32 {
    status(sets(|sets| sets.remove(&set).map(drop).ok_or(INVALID_ARGUMENT)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetSupportedEventTypes(device: Device, types: *mut u64) -> u32 {
    status(with(|library| gpu(library, device).and_then(|_| put(types, XID))))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceRegisterEvents(device: Device, types: u64, set: usize) -> u32 {
    if types & !XID != 0 {
        return crate::NOT_SUPPORTED;
    }
    status(with(|library| {
        let gpu = gpu(library, device)?;
        let told = library.connection.state.gpus[gpu].xids.load(SeqCst);
        sets(|sets| sets.get_mut(&set).map(|set| set.insert(gpu, told)).ok_or(INVALID_ARGUMENT).map(|_| ()))
    }))
}

/// `nvmlEventData_t`.
#[repr(C)]
pub struct EventData {
    device: Device,
    kind: u64,
    data: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

fn next(set: usize) -> Outcome<Option<EventData>> {
    with(|library| {
        sets(|sets| {
            let set = sets.get_mut(&set).ok_or(INVALID_ARGUMENT)?;
            for (gpu, told) in set {
                let facts = &library.connection.state.gpus[*gpu];
                if facts.xids.load(SeqCst) > *told {
                    *told += 1;
                    return Ok(Some(EventData {
                        device: gpu + 1,
                        kind: XID,
                        data: facts.last_xid.load(SeqCst),
                        gpu_instance: u32::MAX,
                        compute_instance: u32::MAX,
                    }));
                }
            }
            Ok(None)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetWait_v2(set: usize, to: *mut EventData, milliseconds: u32) -> u32 {
    let deadline = Instant::now() + Duration::from_millis(milliseconds.into());
    loop {
        match next(set) {
            Ok(Some(event)) => return status(put(to, event)),
            Ok(None) if Instant::now() >= deadline => return TIMEOUT,
            Ok(None) => thread::sleep(Duration::from_millis(5)),
            Err(error) => return error,
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetWait(set: usize, to: *mut EventData, milliseconds: u32) -> u32 {
    nvmlEventSetWait_v2(set, to, milliseconds)
}
