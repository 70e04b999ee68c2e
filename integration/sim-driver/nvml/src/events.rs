//! Events: what the daemon is told to let happen, for who waits for it.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::{
    device::{Device, find},
    ffi::{INVALID_VALUE, NOT_SUPPORTED, Out, Outcome, TIMEOUT, api},
    system::library,
};

/// Types that are modelled: single-bit ECC, double-bit ECC, XID (`nvmlEventType…`). More can be asked for than happen.
const SUPPORTED: u64 = 1 | 2 | 8;

/// How long a wait goes on without looking whether its event set is still there.
const LOOK: Duration = Duration::from_millis(500);

#[derive(Default)]
struct EventSet {
    /// Types that are waited for, by GPU.
    wanted: BTreeMap<usize, u64>,
    /// Number of the last event that was looked at.
    seen: Option<u64>,
}

/// Event sets, by number.
static SETS: Mutex<BTreeMap<usize, EventSet>> = Mutex::new(BTreeMap::new());

fn sets<T>(work: impl FnOnce(&mut BTreeMap<usize, EventSet>) -> T) -> T {
    work(&mut SETS.lock().unwrap_or_else(PoisonError::into_inner))
}

/// `nvmlEventData_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct EventData {
    device: Device,
    kind: u64,
    data: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// The next event of a set, if it happened, and the number of the last one that was looked at.
fn next(set: usize) -> Outcome<Result<EventData, u64>> {
    let library = library()?;
    let last = library.state().last_event();
    sets(|sets| {
        let set = sets.get_mut(&set).ok_or(INVALID_VALUE)?;
        let mut seen = set.seen.unwrap_or(last);
        while seen < last {
            seen += 1;
            set.seen = Some(seen);
            // One that was overwritten is lost, as with the real library.
            let Some((gpu, kind, data)) = library.state().event(seen) else { continue };
            if set.wanted.get(&gpu).is_some_and(|wanted| wanted & kind != 0) {
                let device = gpu + 1;
                return Ok(Ok(EventData {
                    device,
                    kind,
                    data,
                    gpu_instance: u32::MAX,
                    compute_instance: u32::MAX,
                }));
            }
        }
        Ok(Err(seen))
    })
}

fn wait(set: usize, to: Out<EventData>, milliseconds: u32) -> Outcome {
    to.wanted()?;
    let deadline = Instant::now() + Duration::from_millis(milliseconds.into());
    loop {
        let seen = match next(set)? {
            Ok(event) => return to.put(event),
            Err(seen) => seen,
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(TIMEOUT);
        }
        library()?.state().wait_for_event(seen, left.min(LOOK));
    }
}

api! {
    fn nvmlEventSetCreate(set: Out<usize>) {
        library()?;
        set.wanted()?;
        set.put(sets(|sets| {
            let number = sets.keys().next_back().map_or(1, |last| last + 1);
            sets.insert(number, EventSet::default());
            number
        }))
    }

    fn nvmlEventSetFree(set: usize) { sets(|sets| sets.remove(&set).map(drop).ok_or(INVALID_VALUE)) }

    fn nvmlDeviceGetSupportedEventTypes(device: Device, types: Out<u64>) {
        find(device)?;
        types.put(SUPPORTED)
    }

    fn nvmlDeviceRegisterEvents(device: Device, types: u64, set: usize) {
        let found = find(device)?;
        if types & !SUPPORTED != 0 {
            return Err(NOT_SUPPORTED);
        }
        let last = found.library.state().last_event();
        sets(|sets| {
            let set = sets.get_mut(&set).ok_or(INVALID_VALUE)?;
            *set.wanted.entry(found.index).or_default() |= types;
            // What happened before is not told.
            set.seen.get_or_insert(last);
            Ok(())
        })
    }

    fn nvmlEventSetWait, nvmlEventSetWait_v2(set: usize, to: Out<EventData>, milliseconds: u32) {
        wait(set, to, milliseconds)
    }
}
