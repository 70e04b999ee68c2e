//! Devices: which there are and what they are like.

use std::ffi::{c_int, c_void};

use sim_gpud::state::Facts;

use crate::{
    address::trace,
    driver::{self, driver},
    ffi::{INVALID_DEVICE, INVALID_VALUE, In, NOT_SUPPORTED, Out, Outcome, Text, api, put_text},
};

fn facts(device: c_int) -> Outcome<&'static Facts> {
    let driver = driver()?;
    Ok(&driver.state(driver.gpu(device)?).facts)
}

fn signed(value: u64) -> c_int {
    c_int::try_from(value).unwrap_or(c_int::MAX)
}

/// Value of a device attribute (CUDA 13.5 has 1 to 161): what `deviceQuery` and data sheets tell, and 0 for what a GPU here does not have.
fn attribute(which: c_int, facts: &Facts) -> Outcome<u64> {
    let hopper = u64::from(facts.major >= 9);
    let (threads, shared_kib) = match (facts.major, facts.minor_capability) {
        (7, 5) => (1024, 64),
        (8, 0) => (2048, 164),
        (8, _) => (1536, 100),
        _ => (2048, 228),
    };
    Ok(match which {
        1..=3 => 1024,
        4 => 64,
        5 => 0x7fff_ffff,
        6 | 7 => 65535,
        8 => 48 << 10,
        9 => 64 << 10,
        10 => 32,
        11 => 0x7fff_ffff,
        12 | 82 => 65536,
        13 => u64::from(facts.clock_mhz) * 1000,
        14 | 30 => 512,
        15 | 19 | 31 | 32 | 41 | 44 | 78 | 79 | 80 | 83 | 89 | 90 | 91 | 92..=96 | 99 => 1,
        16 => facts.multiprocessors.into(),
        21 | 22 | 52 | 53 | 55..=57 | 61 | 63 | 64 | 66 | 67 | 73..=74 => 32768,
        23 => 65536,
        24..=26 | 47..=49 | 58..=60 | 77 => 16384,
        27 | 28 | 42 | 45 | 46 => 32768,
        29 | 43 | 62 | 65 => 2048,
        33 => facts.pci_bus.into(),
        34 => facts.pci_device.into(),
        36 => u64::from(facts.memory_clock_mhz) * 1000,
        37 => facts.bus_bits.into(),
        38 => u64::from(facts.l2_kib) << 10,
        39 => threads,
        40 => 3,
        50 => facts.pci_domain.into(),
        51 => 32,
        54 | 68 => 2046,
        69 => 1 << 28,
        70..=72 => 131_072,
        75 => facts.major.into(),
        76 => facts.minor_capability.into(),
        81 => shared_kib << 10,
        87 => {
            if facts.minor_capability == 0 {
                2
            } else {
                32
            }
        }
        97 => (shared_kib - 1) << 10,
        102 | 103 | 107 | 110 | 112..=117 | 121..=125 | 129 => 1,
        106 => 32,
        108 | 109 => u64::from(facts.l2_kib) << 9,
        111 => 1024,
        118 => 100,
        119 => 1,
        120 | 127 => hopper,
        126 => 1 + 3 * hopper,
        132 => hopper & u64::from(facts.links.contains(&sim_gpud::state::Peer::SWITCH)),
        134 => u64::try_from(facts.numa).unwrap_or(0),
        139 => facts.pci_id.into(),
        140 => facts.pci_subsystem.into(),
        141 | 142 | 144 | 145 => 1,
        ..1 | 162.. => return Err(INVALID_VALUE),
        _ => 0,
    })
}

api! {
    fn cuInit(flags: u32) { if flags == 0 { driver::init() } else { Err(INVALID_VALUE) } }

    // Works before cuInit.
    fn cuDriverGetVersion(version: Out<c_int>) { version.put(driver::version().1) }

    fn cuDeviceGetCount(count: Out<c_int>) { count.put(signed(driver()?.devices.len() as u64)) }

    fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) {
        driver()?.gpu(ordinal)?;
        device.put(ordinal)
    }

    fn cuDeviceGetName(name: Out<u8>, length: c_int, device: c_int) {
        put_text(name, length, facts(device)?.name().as_bytes())
    }

    fn cuDeviceGetUuid, cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) { uuid.put(facts(device)?.uuid) }

    fn cuDeviceGetLuid(luid: Out<u8>, mask: Out<u32>, device: c_int) {
        let _ = (luid, mask);
        facts(device)?;
        // There are none outside Windows.
        Err(NOT_SUPPORTED)
    }

    fn cuDeviceGetPCIBusId(id: Out<u8>, length: c_int, device: c_int) {
        let facts = facts(device)?;
        let text = format!("{:04X}:{:02X}:{:02X}.0", facts.pci_domain, facts.pci_bus, facts.pci_device);
        put_text(id, length, text.as_bytes())
    }

    fn cuDeviceGetByPCIBusId(device: Out<c_int>, id: Text) {
        let text = std::str::from_utf8(id.bytes()?).map_err(|_| INVALID_VALUE)?;
        let text = text.split('.').next().unwrap_or_default();
        let mut parts = text.rsplit(':').map(|part| u32::from_str_radix(part, 16));
        let (Some(Ok(slot)), Some(Ok(bus))) = (parts.next(), parts.next()) else { return Err(INVALID_VALUE) };
        let domain = parts.next().transpose().map_err(|_| INVALID_VALUE)?.unwrap_or(0);
        let driver = driver()?;
        let here = |gpu: &usize| {
            let facts = &driver.state(*gpu).facts;
            (facts.pci_domain, facts.pci_bus, facts.pci_device) == (domain, bus, slot)
        };
        let at = driver.devices.iter().position(here).ok_or(INVALID_DEVICE)?;
        device.put(signed(at as u64))
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) {
        bytes.put(usize::try_from(facts(device)?.usable()).unwrap_or(usize::MAX))
    }

    fn cuDeviceTotalMem(bytes: Out<u32>, device: c_int) {
        bytes.put(u32::try_from(facts(device)?.usable()).unwrap_or(u32::MAX))
    }

    fn cuDeviceGetAttribute(value: Out<c_int>, which: c_int, device: c_int) {
        let driver = driver()?;
        let gpu = driver.state(driver.gpu(device)?);
        let answer = attribute(which, &gpu.facts)?;
        value.put(if which == 131 { -1 } else { signed(answer) })
    }

    fn cuDeviceComputeCapability(major: Out<c_int>, minor: Out<c_int>, device: c_int) {
        let facts = facts(device)?;
        major.put(signed(facts.major.into()))?;
        minor.put(signed(facts.minor_capability.into()))
    }

    // CUdevprop: ten numbers.
    fn cuDeviceGetProperties(properties: Out<[c_int; 10]>, device: c_int) {
        let facts = facts(device)?;
        let of = |which| attribute(which, facts).map(signed);
        properties.put([
            of(1)?, of(2)?, of(3)?, of(4)?, of(5)?, of(6)?, of(7)?, of(8)?, of(9)?, of(10)?,
        ])
    }

    fn cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) {
        let (own, other) = (facts(device)?, facts(peer)?);
        can.put(c_int::from(own.uuid != other.uuid))
    }

    fn cuDeviceGetP2PAttribute(value: Out<c_int>, which: c_int, device: c_int, peer: c_int) {
        let (own, other) = (facts(device)?, facts(peer)?);
        let driver = driver()?;
        let peer = driver.gpu(peer)?;
        if own.uuid == other.uuid {
            return Err(INVALID_DEVICE);
        }
        let linked = own.links.iter().any(|link| link.as_gpu() == Some(peer) || *link == sim_gpud::state::Peer::SWITCH);
        value.put(match which {
            1 => c_int::from(!linked),
            2 | 4 => 1,
            3 => c_int::from(linked),
            5 => 0,
            _ => return Err(INVALID_VALUE),
        })
    }

    fn cuDeviceGetTexture1DLinearMaxWidth(width: Out<usize>, format: c_int, channels: u32, device: c_int) {
        let _ = (format, channels);
        facts(device)?;
        width.put(1 << 28)
    }

    fn cuDeviceGetExecAffinitySupport(supported: Out<c_int>, kind: c_int, device: c_int) {
        let _ = kind;
        facts(device)?;
        // Only under MPS.
        supported.put(0)
    }

    /// The vendor's undocumented tables are not forged; the answer is the real driver's for one that it does not know. A
    /// runtime that needs them says that it found no genuine driver.
    fn cuGetExportTable(table: Out<*const c_void>, id: In<[u8; 16]>) {
        let id = id.get()?;
        trace(|| format!("table\t{id:02x?}"));
        table.put(std::ptr::null())?;
        Err(INVALID_VALUE)
    }

    fn cuProfilerStart, cuProfilerStop() { crate::context::current().map(drop) }
}
