//! Memory of GPUs, and the processes that use it. Processes have the host's PIDs.

use std::{ffi::c_void, sync::atomic::Ordering::Relaxed};

use crate::{
    device::{Device, Found, find},
    ffi::{INVALID_VALUE, Out, Outcome, VERSION_MISMATCH, api, put_list, version_of},
};

/// `nvmlMemory_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlBAR1Memory_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Bar1 {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ProcessV1 {
    pid: u32,
    bytes: u64,
}

/// `nvmlProcessInfo_v2_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Process {
    pid: u32,
    bytes: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// `nvmlProcessDetail_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Detail {
    process: Process,
    protected_bytes: u64,
}

/// `nvmlProcessDetailList_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct DetailList {
    version: u32,
    mode: u32,
    count: u32,
    details: Out<Detail>,
}

/// A process with a context on a GPU, and the bytes of it that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Running {
    pub pid: u32,
    pub bytes: u64,
}

/// Processes with contexts on a GPU. One that is gone is not told, though memory may still be held in its name, by a child
/// that it left its connection to.
pub(crate) fn running(found: &Found) -> Vec<Running> {
    let gpu = found.index;
    let clients = found.library.state().clients();
    clients
        .filter(|(_, client)| client.contexts[gpu].load(Relaxed) > 0 && client.gone.load(Relaxed) == 0)
        .filter_map(|(_, client)| {
            let bytes = client.held(gpu) + client.shared[gpu].load(Relaxed);
            u32::try_from(client.pid.load(Relaxed)).ok().map(|pid| Running { pid, bytes })
        })
        .collect()
}

fn processes<T: Copy>(device: Device, count: Out<u32>, to: Out<T>, make: fn(Running) -> T) -> Outcome {
    let all: Vec<T> = running(&find(device)?).into_iter().map(make).collect();
    put_list(count, to, &all)
}

fn whole(Running { pid, bytes }: Running) -> Process {
    Process { pid, bytes, gpu_instance: u32::MAX, compute_instance: u32::MAX }
}

/// No process draws anything.
fn none(device: Device, count: Out<u32>) -> Outcome {
    find(device)?;
    count.put(0)
}

api! {
    fn nvmlDeviceGetMemoryInfo(device: Device, to: Out<Memory>) {
        let found = find(device)?;
        // The first version has no word for what the driver keeps, and counts it as used.
        let (total, free) = (found.facts().total, found.library.state().free(found.index));
        to.put(Memory { total, free, used: total - free })
    }

    fn nvmlDeviceGetMemoryInfo_v2(device: Device, to: Out<MemoryV2>) {
        const VERSION: u32 = version_of::<MemoryV2>(2);
        let found = find(device)?;
        if to.cast::<u32>().get()? != VERSION {
            return Err(VERSION_MISMATCH);
        }
        let (total, reserved) = (found.facts().total, found.facts().reserved);
        let free = found.library.state().free(found.index);
        to.put(MemoryV2 { version: VERSION, total, reserved, free, used: total - reserved - free })
    }

    fn nvmlDeviceGetBAR1MemoryInfo(device: Device, to: Out<Bar1>) {
        let total = find(device)?.facts().total.next_power_of_two();
        to.put(Bar1 { total, free: total - (1 << 20), used: 1 << 20 })
    }

    fn nvmlDeviceGetMemoryBusWidth(device: Device, to: Out<u32>) { to.put(find(device)?.facts().bus_bits) }

    fn nvmlDeviceGetComputeRunningProcesses(device: Device, count: Out<u32>, to: Out<ProcessV1>) {
        processes(device, count, to, |Running { pid, bytes }| ProcessV1 { pid, bytes })
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2, nvmlDeviceGetComputeRunningProcesses_v3(
        device: Device, count: Out<u32>, to: Out<Process>
    ) {
        processes(device, count, to, whole)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses_v2,
        nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlDeviceGetMPSComputeRunningProcesses,
        nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlDeviceGetMPSComputeRunningProcesses_v3(
        device: Device, count: Out<u32>, to: *const c_void
    ) {
        let _ = to;
        none(device, count)
    }

    fn nvmlDeviceGetRunningProcessDetailList(device: Device, list: Out<DetailList>) {
        let found = find(device)?;
        let wanted = list.get()?;
        if wanted.version != version_of::<DetailList>(1) {
            return Err(VERSION_MISMATCH);
        }
        let all: Vec<Detail> = match wanted.mode {
            0 => running(&found).into_iter().map(|one| Detail { process: whole(one), protected_bytes: 0 }).collect(),
            1 | 2 => vec![],
            _ => return Err(INVALID_VALUE),
        };
        let count = list.cast::<u32>().within(2);
        put_list(count, wanted.details, &all)
    }

    fn nvmlDeviceGetEncoderStats(device: Device, sessions: Out<u32>, rate: Out<u32>, latency: Out<u32>) {
        find(device)?;
        sessions.put(0)?;
        rate.put(0)?;
        latency.put(0)
    }

    fn nvmlDeviceGetEncoderSessions, nvmlDeviceGetFBCSessions(device: Device, count: Out<u32>, to: *const c_void) {
        let _ = to;
        none(device, count)
    }

    fn nvmlDeviceGetFBCStats(device: Device, to: Out<[u32; 3]>) {
        find(device)?;
        to.put([0; 3])
    }

    fn nvmlDeviceGetAccountingMode(device: Device, mode: Out<u32>) {
        find(device)?;
        mode.put(0)
    }

    fn nvmlDeviceGetAccountingBufferSize(device: Device, size: Out<u32>) {
        find(device)?;
        size.put(4000)
    }

    fn nvmlDeviceGetAccountingPids(device: Device, count: Out<u32>, to: *const c_void) {
        let _ = to;
        none(device, count)
    }
}
