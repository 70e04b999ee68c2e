//! Clocks, power, temperature, PCIe: the figures of a healthy GPU with nothing to do. ECC: the errors that the daemon
//! was told to let happen.

use std::{
    ffi::{c_int, c_void},
    sync::atomic::Ordering::SeqCst,
};

use crate::{
    device::{Device, find},
    ffi::{INVALID_VALUE, NOT_SUPPORTED, Out, Outcome, api},
};

/// Clock of an idle GPU in MHz.
const IDLE_MHZ: u32 = 345;

/// Power of an idle GPU, as a part of its limit.
const IDLE_PART: u32 = 8;

/// Degrees Celsius of an idle GPU.
const IDLE_CELSIUS: u32 = 31;

/// NVML_PSTATE_0: all here can run at full speed at any time.
const FULL_SPEED: u32 = 0;

/// `nvmlClocksEventReasonGpuIdle`.
const IDLE: u64 = 1;

fn clock(device: Device, which: u32, idle: bool) -> Outcome<u32> {
    let found = find(device)?;
    match which {
        // Graphics, multiprocessors.
        0 | 1 => Ok(if idle { IDLE_MHZ } else { found.facts().clock_mhz }),
        2 => Ok(found.facts().memory_clock_mhz),
        3 => Ok(if idle { IDLE_MHZ } else { found.facts().clock_mhz * 9 / 10 }),
        _ => Err(INVALID_VALUE),
    }
}

fn constant<T>(device: Device, to: Out<T>, value: T) -> Outcome {
    find(device)?;
    to.put(value)
}

api! {
    fn nvmlDeviceGetClockInfo(device: Device, which: u32, mhz: Out<u32>) { mhz.put(clock(device, which, true)?) }

    fn nvmlDeviceGetMaxClockInfo, nvmlDeviceGetMaxCustomerBoostClock, nvmlDeviceGetApplicationsClock,
        nvmlDeviceGetDefaultApplicationsClock(device: Device, which: u32, mhz: Out<u32>) {
        mhz.put(clock(device, which, false)?)
    }

    fn nvmlDeviceGetClock(device: Device, which: u32, id: u32, mhz: Out<u32>) {
        // Now, or as set.
        mhz.put(clock(device, which, id == 0)?)
    }

    fn nvmlDeviceGetSupportedMemoryClocks(device: Device, count: Out<u32>, mhz: Out<u32>) {
        let clock = find(device)?.facts().memory_clock_mhz;
        crate::ffi::put_list(count, mhz, &[clock])
    }

    fn nvmlDeviceGetSupportedGraphicsClocks(device: Device, memory_mhz: u32, count: Out<u32>, mhz: Out<u32>) {
        let found = find(device)?;
        if memory_mhz != found.facts().memory_clock_mhz {
            return Err(crate::ffi::NOT_FOUND);
        }
        let all: Vec<u32> = (0..found.facts().clock_mhz / 15).map(|step| found.facts().clock_mhz - step * 15).collect();
        crate::ffi::put_list(count, mhz, &all)
    }

    fn nvmlDeviceGetCurrentClocksThrottleReasons, nvmlDeviceGetCurrentClocksEventReasons(
        device: Device, reasons: Out<u64>
    ) {
        constant(device, reasons, IDLE)
    }

    fn nvmlDeviceGetSupportedClocksThrottleReasons, nvmlDeviceGetSupportedClocksEventReasons(
        device: Device, reasons: Out<u64>
    ) {
        constant(device, reasons, 0x1ff)
    }

    fn nvmlDeviceGetPerformanceState, nvmlDeviceGetPowerState(device: Device, state: Out<u32>) {
        constant(device, state, FULL_SPEED)
    }

    fn nvmlDeviceGetPowerUsage(device: Device, milliwatts: Out<u32>) {
        milliwatts.put(find(device)?.facts().milliwatts / IDLE_PART)
    }

    fn nvmlDeviceGetPowerManagementMode(device: Device, mode: Out<u32>) { constant(device, mode, 1) }

    fn nvmlDeviceGetPowerManagementLimit, nvmlDeviceGetEnforcedPowerLimit, nvmlDeviceGetPowerManagementDefaultLimit(
        device: Device, milliwatts: Out<u32>
    ) {
        milliwatts.put(find(device)?.facts().milliwatts)
    }

    fn nvmlDeviceGetPowerManagementLimitConstraints(device: Device, least: Out<u32>, most: Out<u32>) {
        let limit = find(device)?.facts().milliwatts;
        least.put(limit / 4)?;
        most.put(limit)
    }

    fn nvmlDeviceGetTemperature(device: Device, sensor: u32, celsius: Out<u32>) {
        if sensor != 0 {
            return Err(INVALID_VALUE);
        }
        constant(device, celsius, IDLE_CELSIUS)
    }

    fn nvmlDeviceGetTemperatureThreshold(device: Device, which: u32, celsius: Out<u32>) {
        constant(device, celsius, match which {
            0 => 92,
            1 => 89,
            2 => 95,
            3 => 85,
            4..=7 => return Err(NOT_SUPPORTED),
            _ => return Err(INVALID_VALUE),
        })
    }

    fn nvmlDeviceGetEccMode(device: Device, now: Out<u32>, pending: Out<u32>) {
        constant(device, now, 1)?;
        pending.put(1)
    }

    fn nvmlDeviceGetDefaultEccMode(device: Device, mode: Out<u32>) { constant(device, mode, 1) }

    fn nvmlDeviceGetTotalEccErrors(device: Device, error: u32, counter: u32, count: Out<u64>) {
        if error > 1 || counter > 1 {
            return Err(INVALID_VALUE);
        }
        // NVML_MEMORY_ERROR_TYPE_CORRECTED: those that are corrected do not happen here.
        let found = find(device)?;
        count.put(if error == 0 { 0 } else { found.gpu().errors[counter as usize].load(SeqCst) })
    }

    fn nvmlDeviceGetDetailedEccErrors(device: Device, error: u32, counter: u32, counts: Out<[u64; 4]>) {
        if error > 1 || counter > 1 {
            return Err(INVALID_VALUE);
        }
        constant(device, counts, [0; 4])
    }

    fn nvmlDeviceGetMemoryErrorCounter(device: Device, error: u32, counter: u32, place: u32, count: Out<u64>) {
        if error > 1 || counter > 1 || place > 7 {
            return Err(INVALID_VALUE);
        }
        constant(device, count, 0)
    }

    fn nvmlDeviceGetRetiredPages(device: Device, cause: u32, count: Out<u32>, addresses: *const c_void) {
        let _ = (cause, addresses);
        constant(device, count, 0)
    }

    fn nvmlDeviceGetRetiredPages_v2(
        device: Device, cause: u32, count: Out<u32>, addresses: *const c_void, times: *const c_void
    ) {
        let _ = (cause, addresses, times);
        constant(device, count, 0)
    }

    fn nvmlDeviceGetRetiredPagesPendingStatus(device: Device, pending: Out<u32>) {
        pending.put(find(device)?.gpu().retires.load(SeqCst))
    }

    fn nvmlDeviceGetRemappedRows(
        device: Device, correctable: Out<u32>, uncorrectable: Out<u32>, pending: Out<u32>, failed: Out<u32>
    ) {
        let found = find(device)?;
        let rows = &found.gpu().rows;
        correctable.put(0)?;
        uncorrectable.put(rows.remapped.load(SeqCst))?;
        pending.put(u32::from(rows.pending.load(SeqCst) > 0))?;
        failed.put(u32::from(rows.failed.load(SeqCst) > 0))
    }

    fn nvmlDeviceGetRowRemapperHistogram(device: Device, to: Out<[u32; 5]>) {
        // All banks have all their spare rows.
        constant(device, to, [640, 0, 0, 0, 0])
    }

    fn nvmlDeviceGetMaxPcieLinkGeneration, nvmlDeviceGetGpuMaxPcieLinkGeneration,
        nvmlDeviceGetCurrPcieLinkGeneration(device: Device, generation: Out<u32>) {
        generation.put(match find(device)?.facts().major { ..8 => 3, 8 => 4, _ => 5 })
    }

    fn nvmlDeviceGetMaxPcieLinkWidth, nvmlDeviceGetCurrPcieLinkWidth(device: Device, width: Out<u32>) {
        constant(device, width, 16)
    }

    fn nvmlDeviceGetPcieThroughput(device: Device, which: u32, kib_a_second: Out<u32>) {
        if which > 1 {
            return Err(INVALID_VALUE);
        }
        constant(device, kib_a_second, 0)
    }

    fn nvmlDeviceGetPcieReplayCounter(device: Device, count: Out<u32>) { constant(device, count, 0) }

    fn nvmlDeviceGetDisplayMode, nvmlDeviceGetDisplayActive(device: Device, state: Out<u32>) {
        constant(device, state, 0)
    }

    fn nvmlDeviceGetAPIRestriction(device: Device, which: u32, restricted: Out<u32>) {
        if which > 1 {
            return Err(INVALID_VALUE);
        }
        constant(device, restricted, 1)
    }

    fn nvmlDeviceGetViolationStatus(device: Device, which: u32, to: Out<[u64; 2]>) {
        if which > 11 {
            return Err(INVALID_VALUE);
        }
        constant(device, to, [0; 2])
    }

    fn nvmlDeviceGetGspFirmwareMode(device: Device, on: Out<u32>, by_default: Out<u32>) {
        constant(device, on, 1)?;
        by_default.put(1)
    }

    fn nvmlDeviceGetGspFirmwareVersion(device: Device, to: Out<u8>) {
        let found = find(device)?;
        let version = sim_gpud::state::text(&found.library.state().driver).to_owned();
        crate::ffi::put_text(to, 0x40, version.as_bytes())
    }

    fn nvmlDeviceGetFieldValues(device: Device, count: c_int, values: Out<FieldValue>) {
        let found = find(device)?;
        let rows = &found.gpu().rows;
        let count = usize::try_from(count).map_err(|_| INVALID_VALUE)?;
        for at in 0..count {
            let place = values.within(at);
            let asked = place.get()?;
            // NVML_FI_DEV_REMAPPED_COR, _UNC, _PENDING, _FAILURE (nvml.h).
            let value = match asked.field {
                142 => Some(0),
                143 => Some(rows.remapped.load(SeqCst)),
                144 => Some(u32::from(rows.pending.load(SeqCst) > 0)),
                145 => Some(u32::from(rows.failed.load(SeqCst) > 0)),
                _ => None,
            };
            // Each value has a status of its own.
            place.put(match value {
                Some(value) => FieldValue { kind: UNSIGNED_INT, status: 0, value: value.into(), ..asked },
                None => FieldValue { status: NOT_SUPPORTED.0, ..asked },
            })?;
        }
        Ok(())
    }
}

/// `NVML_VALUE_TYPE_UNSIGNED_INT` (nvml.h).
const UNSIGNED_INT: u32 = 1;

/// `nvmlFieldValue_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct FieldValue {
    field: u32,
    scope: u32,
    time: i64,
    latency: i64,
    kind: u32,
    status: i32,
    value: u64,
}
