//! How busy GPUs are, and with whom. As with the real library, a figure is the share of a sample of a sixth of a second, and
//! only samples that are over are told: what happens now is seen up to two sixths of a second later.

use std::{
    ops::Range,
    sync::atomic::Ordering::Relaxed,
    time::{SystemTime, UNIX_EPOCH},
};

use sim_gpud::{
    state::{GpuTurns, now},
    time::turns::{SAMPLE, percent},
    wire::request,
};

use crate::{
    device::{Device, Found, find},
    ffi::{
        NO_DATA, NOT_FOUND, NOT_SUPPORTED, Out, Outcome, UNKNOWN, VERSION_MISMATCH, api, put_list, version_of,
    },
};

/// `nvmlUtilization_t`, in percent.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Utilization {
    gpu: u32,
    memory: u32,
}

/// `nvmlProcessUtilizationSample_t`. Time in microseconds since 1970, shares in percent.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct ProcessSample {
    pid: u32,
    time: u64,
    sm: u32,
    memory: u32,
    encoder: u32,
    decoder: u32,
}

/// `nvmlProcessUtilizationInfo_v1_t`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct ProcessInfo {
    time: u64,
    pid: u32,
    sm: u32,
    memory: u32,
    encoder: u32,
    decoder: u32,
    jpeg: u32,
    flow: u32,
}

/// `nvmlProcessesUtilizationInfo_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ProcessInfos {
    version: u32,
    count: u32,
    since: u64,
    all: Out<ProcessInfo>,
}

/// `nvmlSample_t`, with a value of type `unsigned int`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Sample {
    time: u64,
    value: u64,
}

/// `NVML_GPU_UTILIZATION_SAMPLES`.
const GPU_SAMPLES: u32 = 1;

/// A GPU's turns, up to the present time.
fn turns(found: &Found) -> Outcome<&GpuTurns> {
    // The module brings them up to it: who only looks has no slot, and cannot close a GPU's lock.
    found.library.link.ask(&[request::CATCH_UP], None).map_err(|_| UNKNOWN)?;
    Ok(found.library.state().turns(found.index))
}

/// Microseconds since 1970 of the end of a sample.
fn end_of(number: u64) -> u64 {
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let ago = now().saturating_sub((number + 1) * SAMPLE);
    u64::try_from(unix.as_micros()).unwrap_or(u64::MAX).saturating_sub(ago / 1000)
}

/// Numbers of the samples that ended after a time.
fn newer(turns: &GpuTurns, since: u64) -> Range<u64> {
    let all = turns.samples();
    // What was told as the time of a sample is found again within the clocks' difference.
    let first = all.clone().find(|number| end_of(*number) > since + SAMPLE / 2000);
    first.unwrap_or(all.end)..all.end
}

/// Processes that were busy after a time: their PIDs, and their shares in percent; and the end of the last sample.
fn busy(found: &Found, since: u64) -> Outcome<(Vec<(u32, u32)>, u64)> {
    let turns = turns(found)?;
    let samples = newer(turns, since);
    let mut all = vec![];
    for (slot, client) in found.library.state().clients() {
        let busy: u64 = samples.clone().map(|number| turns.sample(Some(slot), number)).sum();
        if busy > 0
            && client.gone.load(Relaxed) == 0
            && let Ok(pid) = u32::try_from(client.pid.load(Relaxed))
        {
            all.push((pid, percent(busy, samples.end - samples.start)));
        }
    }
    // As the real library answers while no process is busy.
    if all.is_empty() { Err(NOT_FOUND) } else { Ok((all, end_of(samples.end - 1))) }
}

/// Nothing encodes or decodes.
fn idle(device: Device, busy: Out<u32>, period: Out<u32>) -> Outcome {
    find(device)?;
    busy.put(0)?;
    // Microseconds of a sample.
    period.put(167_000)
}

api! {
    fn nvmlDeviceGetUtilizationRates(device: Device, to: Out<Utilization>) {
        let found = find(device)?;
        let turns = turns(&found)?;
        let busy = turns.samples().last().map_or(0, |last| turns.sample(None, last));
        to.put(Utilization { gpu: percent(busy, 1), memory: 0 })
    }

    fn nvmlDeviceGetEncoderUtilization, nvmlDeviceGetDecoderUtilization, nvmlDeviceGetJpgUtilization,
        nvmlDeviceGetOfaUtilization(device: Device, busy: Out<u32>, period: Out<u32>) {
        idle(device, busy, period)
    }

    fn nvmlDeviceGetProcessUtilization(device: Device, to: Out<ProcessSample>, count: Out<u32>, since: u64) {
        let found = find(device)?;
        count.wanted()?;
        let (all, time) = busy(&found, since).inspect_err(|_| count.put_if_wanted(0))?;
        let sample = |(pid, sm)| ProcessSample { pid, time, sm, ..ProcessSample::default() };
        let all: Vec<ProcessSample> = all.into_iter().map(sample).collect();
        if to.is_null() {
            count.put(0)?;
        }
        put_list(count, to, &all)
    }

    fn nvmlDeviceGetProcessesUtilizationInfo(device: Device, to: Out<ProcessInfos>) {
        let found = find(device)?;
        let wanted = to.get()?;
        if wanted.version != version_of::<ProcessInfos>(1) {
            return Err(VERSION_MISMATCH);
        }
        let count = to.cast::<u32>().within(1);
        let (all, time) = busy(&found, wanted.since).inspect_err(|_| count.put_if_wanted(0))?;
        let info = |(pid, sm)| ProcessInfo { pid, time, sm, ..ProcessInfo::default() };
        let all: Vec<ProcessInfo> = all.into_iter().map(info).collect();
        if wanted.all.is_null() {
            count.put(0)?;
        }
        put_list(count, wanted.all, &all)
    }

    fn nvmlDeviceGetSamples(
        device: Device, kind: u32, since: u64, value_type: Out<u32>, count: Out<u32>, to: Out<Sample>
    ) {
        let found = find(device)?;
        if kind > 9 {
            return Err(NOT_SUPPORTED);
        }
        // Unsigned numbers.
        value_type.put(1)?;
        count.wanted()?;
        let turns = turns(&found)?;
        let samples = if kind == GPU_SAMPLES { newer(turns, since) } else { 0..0 };
        let sample = |number| Sample { time: end_of(number), value: percent(turns.sample(None, number), 1).into() };
        let all: Vec<Sample> = samples.map(sample).collect();
        if all.is_empty() {
            count.put(0)?;
            return Err(NO_DATA);
        }
        if to.is_null() {
            return count.put(u32::try_from(all.len()).unwrap_or(0));
        }
        put_list(count, to, &all)
    }
}
