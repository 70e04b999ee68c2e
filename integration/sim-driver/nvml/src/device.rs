//! GPUs: handles, identity, and where they are in the machine.

use std::{
    ffi::{c_int, c_ulong},
    sync::{Arc, atomic::Ordering::SeqCst},
};

use sim_gpud::state::{Facts, Gpu};

use crate::{
    ffi::{
        GPU_IS_LOST, INVALID_VALUE, In, NOT_FOUND, NOT_SUPPORTED, Out, Outcome, Text, VERSION_MISMATCH, api,
        put_list, put_text, version_of,
    },
    system::{Library, library},
};

/// A device's handle: one more than the module's number of its GPU.
pub(crate) type Device = usize;

/// A GPU of this process.
pub(crate) struct Found {
    pub library: Arc<Library>,
    pub index: usize,
}

impl Found {
    pub(crate) fn gpu(&self) -> &Gpu {
        &self.library.state().gpus[self.index]
    }

    pub(crate) fn facts(&self) -> &Facts {
        &self.gpu().facts
    }
}

/// The GPU of a handle. One that fell off the bus is told as lost, whatever is asked.
pub(crate) fn find(device: Device) -> Outcome<Found> {
    let library = library()?;
    let index = device.wrapping_sub(1);
    if !library.gpus.contains(&index) {
        return Err(INVALID_VALUE);
    }
    if library.state().gpus[index].lost.load(SeqCst) != 0 {
        return Err(GPU_IS_LOST);
    }
    Ok(Found { library, index })
}

/// The handle of the first GPU that fits.
fn handle(to: Out<Device>, fits: impl Fn(&Facts) -> bool) -> Outcome {
    to.wanted()?;
    let library = library()?;
    let fits = |gpu: &&usize| fits(&library.state().gpus[**gpu].facts);
    let device = library.gpus.iter().find(fits).ok_or(NOT_FOUND)? + 1;
    find(device)?;
    to.put(device)
}

fn same(text: Text, other: &str) -> Outcome<bool> {
    Ok(text.bytes()?.eq_ignore_ascii_case(other.as_bytes()))
}

/// A serial number that counts as the UUID does.
pub(crate) fn serial(facts: &Facts) -> String {
    let tail = facts.uuid[12..].iter().fold(0_u64, |all, byte| all << 8 | u64::from(*byte));
    format!("{:013}", 1_650_000_000_000 + tail)
}

/// A PCI address in any of its spellings, as domain, bus and device.
fn parse_pci(text: Text) -> Outcome<(u32, u32, u32)> {
    let text = std::str::from_utf8(text.bytes()?).map_err(|_| INVALID_VALUE)?;
    let mut parts =
        text.split('.').next().unwrap_or_default().rsplit(':').map(|part| u32::from_str_radix(part, 16));
    let (Some(Ok(device)), Some(Ok(bus))) = (parts.next(), parts.next()) else { return Err(INVALID_VALUE) };
    match parts.next() {
        None => Ok((0, bus, device)),
        Some(Ok(domain)) => Ok((domain, bus, device)),
        Some(Err(_)) => Err(INVALID_VALUE),
    }
}

/// `nvmlPciInfo_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PciInfo {
    legacy: [u8; 16],
    domain: u32,
    bus: u32,
    device: u32,
    id: u32,
    subsystem: u32,
    text: [u8; 32],
}

/// `nvmlPciInfoExt_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PciInfoExt {
    version: u32,
    domain: u32,
    bus: u32,
    device: u32,
    id: u32,
    subsystem: u32,
    class: u32,
    subclass: u32,
    text: [u8; 32],
}

fn text_field<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [0; N];
    let length = text.len().min(N - 1);
    field[..length].copy_from_slice(&text.as_bytes()[..length]);
    field
}

impl PciInfo {
    pub(crate) fn of(facts: &Facts) -> Self {
        Self {
            // Four digits of the domain, as it once was.
            legacy: text_field(&facts.pci()[4..]),
            domain: facts.pci_domain,
            bus: facts.pci_bus,
            device: facts.pci_device,
            id: facts.pci_id,
            subsystem: facts.pci_subsystem,
            text: text_field(&facts.pci()),
        }
    }
}

/// Levels of `nvmlGpuTopologyLevel_t`.
pub(crate) const SAME_SWITCH: u32 = 10;
pub(crate) const SAME_NODE: u32 = 40;
const SYSTEM: u32 = 50;

/// How two GPUs are connected over PCI.
pub(crate) fn level(one: &Facts, other: &Facts) -> u32 {
    if one.pci_switch >= 0 && one.pci_switch == other.pci_switch {
        SAME_SWITCH
    } else if one.numa >= 0 && one.numa == other.numa {
        SAME_NODE
    } else {
        SYSTEM
    }
}

/// The GPU at a PCI address.
pub(crate) fn at_pci(library: &Library, id: Text) -> Outcome<&Facts> {
    let wanted = parse_pci(id)?;
    let mut all = library.gpus.iter().map(|gpu| &library.state().gpus[*gpu].facts);
    all.find(|facts| (facts.pci_domain, facts.pci_bus, facts.pci_device) == wanted).ok_or(NOT_FOUND)
}

fn others(found: &Found, fits: impl Fn(&Facts) -> bool) -> Vec<Device> {
    let gpus = found.library.gpus.iter().filter(|gpu| **gpu != found.index);
    gpus.filter(|gpu| fits(&found.library.state().gpus[**gpu].facts)).map(|gpu| gpu + 1).collect()
}

/// Writes a bitmap, as far as the caller has room.
fn put_bits(to: Out<c_ulong>, words: u32, bits: &[u64]) -> Outcome {
    to.wanted()?;
    if words == 0 {
        return Err(INVALID_VALUE);
    }
    (0..words as usize).try_for_each(|at| to.put_at(at, bits.get(at).copied().unwrap_or(0)))
}

fn cpu_affinity(device: Device, words: u32, to: Out<c_ulong>) -> Outcome {
    let found = find(device)?;
    let cpus = found.facts().cpus;
    if cpus == [0; 4] {
        return Err(NOT_SUPPORTED);
    }
    put_bits(to, words, &cpus)
}

api! {
    fn nvmlDeviceGetCount, nvmlDeviceGetCount_v2(count: Out<u32>) {
        count.put(u32::try_from(library()?.gpus.len()).unwrap_or(0))
    }

    fn nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2(index: u32, to: Out<Device>) {
        to.wanted()?;
        let device = library()?.gpus.get(index as usize).ok_or(INVALID_VALUE)? + 1;
        find(device)?;
        to.put(device)
    }

    fn nvmlDeviceGetHandleByUUID(uuid: Text, to: Out<Device>) {
        uuid.bytes()?;
        handle(to, |facts| same(uuid, &facts.uuid_text()) == Ok(true))
    }

    fn nvmlDeviceGetHandleBySerial(text: Text, to: Out<Device>) {
        text.bytes()?;
        handle(to, |facts| same(text, &serial(facts)) == Ok(true))
    }

    fn nvmlDeviceGetHandleByPciBusId, nvmlDeviceGetHandleByPciBusId_v2(id: Text, to: Out<Device>) {
        let wanted = parse_pci(id)?;
        handle(to, |facts| (facts.pci_domain, facts.pci_bus, facts.pci_device) == wanted)
    }

    fn nvmlDeviceGetName(device: Device, to: Out<u8>, length: u32) {
        put_text(to, length, find(device)?.facts().name().as_bytes())
    }

    fn nvmlDeviceGetUUID(device: Device, to: Out<u8>, length: u32) {
        put_text(to, length, find(device)?.facts().uuid_text().as_bytes())
    }

    fn nvmlDeviceGetSerial(device: Device, to: Out<u8>, length: u32) {
        put_text(to, length, serial(find(device)?.facts()).as_bytes())
    }

    fn nvmlDeviceGetIndex(device: Device, to: Out<u32>) {
        let found = find(device)?;
        let at = found.library.gpus.iter().position(|gpu| *gpu == found.index).ok_or(INVALID_VALUE)?;
        to.put(u32::try_from(at).unwrap_or(0))
    }

    fn nvmlDeviceGetMinorNumber(device: Device, to: Out<u32>) { to.put(find(device)?.facts().minor) }

    fn nvmlDeviceGetModuleId(device: Device, to: Out<u32>) {
        to.put(u32::try_from(find(device)?.index).unwrap_or(0) + 1)
    }

    fn nvmlDeviceGetPciInfo, nvmlDeviceGetPciInfo_v2, nvmlDeviceGetPciInfo_v3(device: Device, to: Out<PciInfo>) {
        to.put(PciInfo::of(find(device)?.facts()))
    }

    fn nvmlDeviceGetPciInfoExt(device: Device, to: Out<PciInfoExt>) {
        const VERSION: u32 = version_of::<PciInfoExt>(1);
        let found = find(device)?;
        if to.cast::<u32>().get()? != VERSION {
            return Err(VERSION_MISMATCH);
        }
        let PciInfo { domain, bus, device, id, subsystem, text, .. } = PciInfo::of(found.facts());
        // A 3D controller.
        to.put(PciInfoExt { version: VERSION, domain, bus, device, id, subsystem, class: 3, subclass: 2, text })
    }

    fn nvmlDeviceGetBrand(device: Device, to: Out<u32>) {
        // TESLA for those with that name, NVIDIA for their successors.
        to.put(if find(device)?.facts().name().starts_with("Tesla") { 2 } else { 14 })
    }

    fn nvmlDeviceGetArchitecture(device: Device, to: Out<u32>) {
        let found = find(device)?;
        let facts = found.facts();
        to.put(match (facts.major, facts.minor_capability) {
            (7, 0..=2) => 5,
            (7, _) => 6,
            (8, 9) => 8,
            (8, _) => 7,
            (9, _) => 9,
            (10.., _) => 10,
            _ => u32::MAX,
        })
    }

    fn nvmlDeviceGetCudaComputeCapability(device: Device, major: Out<c_int>, minor: Out<c_int>) {
        let found = find(device)?;
        let number = |value: u32| c_int::try_from(value).unwrap_or(0);
        major.put(number(found.facts().major))?;
        minor.put(number(found.facts().minor_capability))
    }

    fn nvmlDeviceGetNumGpuCores(device: Device, to: Out<u32>) {
        let found = find(device)?;
        let each = if found.facts().major == 8 && found.facts().minor_capability == 0 { 64 } else { 128 };
        to.put(found.facts().multiprocessors * each)
    }

    fn nvmlDeviceGetBoardId(device: Device, to: Out<u32>) { to.put(find(device)?.facts().pci_bus << 8) }

    fn nvmlDeviceGetMultiGpuBoard(device: Device, to: Out<u32>) {
        find(device)?;
        to.put(0)
    }

    fn nvmlDeviceOnSameBoard(device: Device, other: Device, to: Out<c_int>) {
        to.put(c_int::from(find(device)?.index == find(other)?.index))
    }

    fn nvmlDeviceGetBoardPartNumber(device: Device, to: Out<u8>, length: u32) {
        put_text(to, length, format!("900-2{:04X}-0000-000", find(device)?.facts().pci_subsystem >> 16).as_bytes())
    }

    fn nvmlDeviceGetVbiosVersion(device: Device, to: Out<u8>, length: u32) {
        find(device)?;
        put_text(to, length, b"92.00.45.00.03")
    }

    fn nvmlDeviceGetInforomImageVersion(device: Device, to: Out<u8>, length: u32) {
        find(device)?;
        put_text(to, length, b"G500.0200.00.05")
    }

    fn nvmlDeviceGetInforomVersion(device: Device, object: u32, to: Out<u8>, length: u32) {
        find(device)?;
        match object {
            0..=2 => put_text(to, length, [b"2.0" as &[u8], b"7.16", b"N/A"][object as usize]),
            _ => Err(INVALID_VALUE),
        }
    }

    fn nvmlDeviceGetNumaNodeId(device: Device, to: Out<u32>) {
        to.put(u32::try_from(find(device)?.facts().numa).map_err(|_| NOT_SUPPORTED)?)
    }

    fn nvmlDeviceGetMemoryAffinity(device: Device, words: u32, to: Out<c_ulong>, scope: u32) {
        let found = find(device)?;
        let node = u32::try_from(found.facts().numa).map_err(|_| NOT_SUPPORTED)?;
        if scope > 1 {
            return Err(INVALID_VALUE);
        }
        let mut bits = [0; 4];
        if let Some(word) = bits.get_mut(node as usize / 64) {
            *word = 1 << (node % 64);
        }
        put_bits(to, words, &bits)
    }

    fn nvmlDeviceGetCpuAffinity(device: Device, words: u32, to: Out<c_ulong>) { cpu_affinity(device, words, to) }

    fn nvmlDeviceGetCpuAffinityWithinScope(device: Device, words: u32, to: Out<c_ulong>, scope: u32) {
        if scope > 1 {
            return Err(INVALID_VALUE);
        }
        cpu_affinity(device, words, to)
    }

    fn nvmlDeviceGetTopologyCommonAncestor(device: Device, other: Device, to: Out<u32>) {
        let (one, other) = (find(device)?, find(other)?);
        to.put(if one.index == other.index { 0 } else { level(one.facts(), other.facts()) })
    }

    fn nvmlDeviceGetTopologyNearestGpus(device: Device, wanted: u32, count: Out<u32>, to: Out<Device>) {
        let found = find(device)?;
        let own = *found.facts();
        let near = others(&found, |other| level(&own, other) == wanted);
        if to.is_null() {
            return count.put(u32::try_from(near.len()).unwrap_or(0));
        }
        put_list(count, to, &near)
    }

    fn nvmlSystemGetTopologyGpuSet(cpu: u32, count: Out<u32>, to: Out<Device>) {
        let library = library()?;
        let near = |gpu: &&usize| {
            let cpus = library.state().gpus[**gpu].facts.cpus;
            cpus.get(cpu as usize / 64).is_some_and(|word| word >> (cpu % 64) & 1 == 1)
        };
        let near: Vec<Device> = library.gpus.iter().filter(near).map(|gpu| gpu + 1).collect();
        if to.is_null() {
            return count.put(u32::try_from(near.len()).unwrap_or(0));
        }
        put_list(count, to, &near)
    }

    fn nvmlDeviceGetComputeMode(device: Device, mode: Out<u32>) {
        find(device)?;
        mode.put(0)
    }

    fn nvmlDeviceGetPersistenceMode(device: Device, mode: Out<u32>) {
        find(device)?;
        mode.put(1)
    }

    fn nvmlDeviceGetMigMode(device: Device, now: Out<u32>, pending: Out<u32>) {
        let found = find(device)?;
        if found.facts().mig_capable == 0 {
            return Err(NOT_SUPPORTED);
        }
        let mode = found.gpu().mig.load(SeqCst);
        now.put(mode)?;
        pending.put(mode)
    }

    fn nvmlDeviceIsMigDeviceHandle(device: Device, is: Out<u32>) {
        find(device)?;
        is.put(0)
    }

    fn nvmlDeviceGetMaxMigDeviceCount(device: Device, count: Out<u32>) {
        let found = find(device)?;
        count.put(if found.gpu().mig.load(SeqCst) == 1 { 7 } else { 0 })
    }

    fn nvmlDeviceGetMigDeviceHandleByIndex(device: Device, index: u32, to: Out<Device>) {
        let _ = (index, to);
        // Instances are not modelled: MIG mode has none.
        let found = find(device)?;
        Err(if found.gpu().mig.load(SeqCst) == 1 { NOT_FOUND } else { NOT_SUPPORTED })
    }

    fn nvmlDeviceGetVirtualizationMode(device: Device, mode: Out<u32>) {
        find(device)?;
        mode.put(0)
    }

    fn nvmlDeviceGetHandleByUUIDV(uuid: In<[u32; 2]>, to: Out<Device>) {
        // nvmlUUID_v1_t: version, type (1 for text), and 41 bytes of it.
        let [_, kind] = uuid.get()?;
        if kind != 1 {
            return Err(NOT_SUPPORTED);
        }
        let text = Text::at(uuid.address() + 8);
        handle(to, |facts| same(text, &facts.uuid_text()) == Ok(true))
    }
}
