//! NVLinks between GPUs, and to switches.

use sim_gpud::state::{MAX_LINKS, Peer};

use crate::{
    device::{Device, Found, PciInfo, find},
    ffi::{INVALID_VALUE, NOT_SUPPORTED, Out, Outcome, api},
};

/// A switch's PCI address: there is one for all.
const SWITCH: (u32, u32) = (0x00c4, 0x22a3_10de);

/// What a link leads to; an error where the GPU has no such link.
fn link(device: Device, link: u32) -> Outcome<(Found, Peer)> {
    let found = find(device)?;
    if link as usize >= MAX_LINKS {
        return Err(INVALID_VALUE);
    }
    let peer = found.facts().links[link as usize];
    if found.facts().nvlink == 0 || peer == Peer::NONE {
        return Err(NOT_SUPPORTED);
    }
    Ok((found, peer))
}

fn remote(device: Device, number: u32) -> Outcome<PciInfo> {
    let (found, peer) = link(device, number)?;
    Ok(match peer.as_gpu() {
        Some(gpu) => PciInfo::of(&found.library.state().gpus[gpu].facts),
        None => {
            let mut switch = *found.facts();
            (switch.pci_domain, switch.pci_device) = (0, 0);
            (switch.pci_bus, switch.pci_id) = SWITCH;
            PciInfo::of(&switch)
        }
    })
}

/// Whether two GPUs are connected by links, directly or over switches.
fn linked(one: &Found, other: &Found) -> bool {
    let direct = one.facts().links.iter().any(|link| link.as_gpu() == Some(other.index));
    let switched = |found: &Found| found.facts().links.contains(&Peer::SWITCH);
    direct || (switched(one) && switched(other))
}

api! {
    fn nvmlDeviceGetNvLinkState(device: Device, number: u32, active: Out<u32>) {
        link(device, number)?;
        active.put(1)
    }

    fn nvmlDeviceGetNvLinkVersion(device: Device, number: u32, version: Out<u32>) {
        version.put(link(device, number)?.0.facts().nvlink)
    }

    fn nvmlDeviceGetNvLinkCapability(device: Device, number: u32, which: u32, capability: Out<u32>) {
        link(device, number)?;
        match which {
            // P2P and its atomics, access to system memory and its atomics, validity.
            0..=3 | 5 => capability.put(1),
            4 => capability.put(0),
            _ => Err(INVALID_VALUE),
        }
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo, nvmlDeviceGetNvLinkRemotePciInfo_v2(
        device: Device, number: u32, to: Out<PciInfo>
    ) {
        to.put(remote(device, number)?)
    }

    fn nvmlDeviceGetNvLinkRemoteDeviceType(device: Device, number: u32, kind: Out<u32>) {
        kind.put(if link(device, number)?.1 == Peer::SWITCH { 2 } else { 0 })
    }

    fn nvmlDeviceGetNvLinkErrorCounter(device: Device, number: u32, which: u32, count: Out<u64>) {
        link(device, number)?;
        if which > 4 {
            return Err(INVALID_VALUE);
        }
        count.put(0)
    }

    fn nvmlDeviceGetP2PStatus(device: Device, other: Device, which: u32, status: Out<u32>) {
        let (one, other) = (find(device)?, find(other)?);
        status.put(match which {
            // Read, write, over PCI.
            0 | 1 | 4 => 0,
            // Over NVLink, atomics. "Not supported" is 5 (nvmlGpuP2PStatus_t).
            2 | 3 => if linked(&one, &other) { 0 } else { 5 },
            _ => return Err(INVALID_VALUE),
        })
    }
}
