//! Which free units nobody could use, so that the node should not promise them: memory of a GPU whose core is gone,
//! and core of a GPU whose memory is gone. Withdrawn units are shown to kubelet as unhealthy, which takes them out of
//! what the node can allocate.
//!
//! A unit that a container has must stay healthy: when kubelet restarts it admits pods anew and fails a pod of which
//! any unit, be it one of a finished init container, is unhealthy (kubelet 1.36, manager.go, devicesToAllocate). The
//! ledger says how much nobody can use, but not which numbers; those are in kubelet's own checkpoint, which names the
//! units of every container, and is written again whenever kubelet gives some out. Where that file cannot be read or
//! understood, nothing is withdrawn. A unit that kubelet gives out at the same moment is put back as soon as the
//! checkpoint shows it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use ledger::{Gpu, ShareKind, ShareRecord};
use serde::Deserialize;
use thiserror::Error;
use vcuda_config::{CORE_PER_GPU, DeviceId, GpuUuid, MEMORY_UNIT_BYTES, Resources};

use crate::offer::Resource;

/// Kubelet's checkpoint in its device plugin folder (kubelet, types.go, kubeletDeviceManagerCheckpoint).
const CHECKPOINT: &str = "kubelet_internal_checkpoint";

/// A node full of our units makes a checkpoint of 2 MiB.
const CHECKPOINT_MAX_BYTES: u64 = 64 << 20;

/// Units that kubelet has given to containers.
pub type Taken = BTreeSet<(Resource, DeviceId)>;

/// Why kubelet's checkpoint says nothing.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// It cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Its form is none that is known.
    #[error("{path}: {reason}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// Units that nobody can use.
#[derive(Debug)]
pub struct Useless<'a> {
    gpu: &'a Gpu,
    resource: Resource,
    count: u32,
}

/// What nobody can use of each GPU while `shares` are there. All that is free of a cordoned GPU is such.
pub fn useless<'a, 's>(
    gpus: &'a [Gpu],
    cordon: &BTreeSet<GpuUuid>,
    shares: impl Iterator<Item = &'s ShareRecord> + Clone,
) -> Vec<Useless<'a>> {
    let useless = |gpu: &'a Gpu| {
        let (mut core, mut memory) = (0_u32, 0_u32);
        for share in shares.clone() {
            for held in share.gpus.iter().filter(|held| held.uuid == gpu.uuid) {
                core = core.saturating_add(held.core);
                // A container with whole GPUs has their memory without a unit of it.
                if share.kind == ShareKind::Share {
                    let units = held.memory_bytes.div_ceil(MEMORY_UNIT_BYTES);
                    memory = memory.saturating_add(u32::try_from(units).unwrap_or(u32::MAX));
                }
            }
        }
        let (core, memory) = (CORE_PER_GPU.saturating_sub(core), gpu.memory_units.saturating_sub(memory));
        let of = |resource, count| Useless { gpu, resource, count };
        match (core, memory) {
            _ if cordon.contains(&gpu.uuid) => {
                vec![of(Resource::Core, core), of(Resource::Memory, memory)]
            }
            (0, 1..) => vec![of(Resource::Memory, memory)],
            // A GPU with all its core can still be taken whole.
            (1..CORE_PER_GPU, 0) => vec![of(Resource::Core, core)],
            _ => Vec::new(),
        }
    };
    gpus.iter().flat_map(useless).collect()
}

/// The units to withdraw: of what nobody can use as many as are not taken, the highest numbers first, since the
/// lowest are given out first.
pub fn withdraw(useless: &[Useless<'_>], taken: &Taken) -> BTreeSet<(Resource, DeviceId)> {
    let mut withdrawn = BTreeSet::new();
    for Useless { gpu, resource, count } in useless {
        let units = if *resource == Resource::Core { CORE_PER_GPU } else { gpu.memory_units };
        let ids = (0..units).rev().map(|index| (*resource, DeviceId { gpu: gpu.uuid.clone(), index }));
        withdrawn.extend(ids.filter(|id| !taken.contains(id)).take(*count as usize));
    }
    withdrawn
}

/// Reads from kubelet's checkpoint which units containers have. Entries of pods that are gone may still be there.
///
/// # Errors
///
/// See [`CheckpointError`]. There is no such file before kubelet has first given out a device.
pub fn taken(kubelet: &Path, names: &Resources) -> Result<Taken, CheckpointError> {
    let path = kubelet.join(CHECKPOINT);
    let read = |source| CheckpointError::Read { path: path.clone(), source };
    if fs::metadata(&path).map_err(read)?.len() > CHECKPOINT_MAX_BYTES {
        return Err(CheckpointError::Invalid {
            path,
            reason: format!("larger than {CHECKPOINT_MAX_BYTES} bytes"),
        });
    }
    let text = fs::read(&path).map_err(read)?;
    parse(&text, names).map_err(|error| CheckpointError::Invalid { path, reason: error.to_string() })
}

/// Kubelet's file, as far as it is of use: `{"Data":{"PodDeviceEntries":[{"ResourceName":…,"DeviceIDs":…}]}}`.
#[derive(Deserialize)]
struct Checkpoint {
    #[serde(rename = "Data")]
    data: Data,
}

#[derive(Deserialize)]
struct Data {
    #[serde(rename = "PodDeviceEntries")]
    entries: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    resource_name: String,
    #[serde(rename = "DeviceIDs")]
    device_ids: Option<DeviceIds>,
}

/// A list up to kubelet 1.19, a list for each NUMA node since.
#[derive(Deserialize)]
#[serde(untagged)]
enum DeviceIds {
    List(Vec<String>),
    PerNumaNode(BTreeMap<String, Option<Vec<String>>>),
}

fn parse(text: &[u8], names: &Resources) -> serde_json::Result<Taken> {
    let checkpoint: Checkpoint = serde_json::from_slice(text)?;
    let resource = |name: &str| Resource::ALL.into_iter().find(|resource| resource.name(names) == name);
    let mut taken = Taken::new();
    for entry in checkpoint.data.entries.unwrap_or_default() {
        let Some(resource) = resource(&entry.resource_name) else { continue };
        let ids = match entry.device_ids {
            Some(DeviceIds::List(ids)) => ids,
            Some(DeviceIds::PerNumaNode(nodes)) => nodes.into_values().flatten().flatten().collect(),
            None => Vec::new(),
        };
        // IDs of another form are left from another plugin of the same name; they are none of ours to withdraw.
        taken.extend(ids.iter().filter_map(|id| Some((resource, id.parse().ok()?))));
    }
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use ledger::{ContainerRef, GpuShare, PodRef, ShareState};
    use proptest::prelude::*;
    use vcuda_config::GpuUuid;

    use super::*;
    use crate::testing;

    fn gpu(n: u8) -> Gpu {
        testing::gpu(n, 40)
    }

    /// A share of GPU `n`.
    fn share(n: u8, kind: ShareKind, core: u32, units: u32) -> ShareRecord {
        ShareRecord {
            version: 1,
            pod: PodRef {
                uid: "7f".into(),
                namespace: "ns".into(),
                name: "pod".into(),
                sandbox_id: "s".into(),
            },
            container: ContainerRef { name: "main".into(), id: "c".into() },
            boot_id: "b".into(),
            kind,
            gpus: vec![GpuShare {
                uuid: GpuUuid::from_bytes([n; 16]),
                minor: n.into(),
                core,
                memory_bytes: u64::from(units) * MEMORY_UNIT_BYTES,
                slots: region::Slots::NONE,
            }],
            state: ShareState::Running,
            bound_at: 0,
            bound_uptime: 0,
            shim: kind == ShareKind::Share,
            terms: ledger::Terms::default(),
            set: ledger::Change::default(),
        }
    }

    fn id(n: u8, index: u32) -> DeviceId {
        DeviceId { gpu: GpuUuid::from_bytes([n; 16]), index }
    }

    fn withdrawn(gpus: &[Gpu], shares: &[ShareRecord], taken: &Taken) -> BTreeSet<(Resource, DeviceId)> {
        withdraw(&useless(gpus, &BTreeSet::new(), shares.iter()), taken)
    }

    #[test]
    fn a_cordoned_gpu_keeps_what_containers_have_and_offers_nothing() {
        let shares = [share(1, ShareKind::Share, 60, 30)];
        let mut taken: Taken = (0..60).map(|index| (Resource::Core, id(1, index))).collect();
        taken.extend((0..30).map(|index| (Resource::Memory, id(1, index))));
        let cordon = BTreeSet::from([GpuUuid::from_bytes([1; 16])]);
        let gone = withdraw(&useless(&[gpu(1), gpu(2)], &cordon, shares.iter()), &taken);
        let core = (60..100).map(|index| (Resource::Core, id(1, index)));
        let memory = (30..40).map(|index| (Resource::Memory, id(1, index)));
        assert_eq!(gone, core.chain(memory).collect());
    }

    #[test]
    fn memory_goes_with_the_last_core_and_core_with_the_last_memory() {
        let shares = [
            share(1, ShareKind::Share, 60, 30),
            share(1, ShareKind::Share, 40, 8),
            share(2, ShareKind::Share, 70, 40),
            share(3, ShareKind::Share, 70, 38),
        ];
        let gone = withdrawn(&[gpu(1), gpu(2), gpu(3)], &shares, &Taken::new());
        let memory = [39, 38].map(|index| (Resource::Memory, id(1, index)));
        let core = (70..100).map(|index| (Resource::Core, id(2, index)));
        assert_eq!(gone, memory.into_iter().chain(core).collect());
    }

    #[test]
    fn all_memory_of_a_gpu_that_is_taken_whole_goes() {
        let gone = withdrawn(&[gpu(1)], &[share(1, ShareKind::Whole, 100, 40)], &Taken::new());
        assert_eq!(gone, (0..40).map(|index| (Resource::Memory, id(1, index))).collect());
    }

    #[test]
    fn a_gpu_with_all_its_core_stays_on_offer_as_a_whole_one() {
        let small = Gpu { memory_units: 0, ..gpu(1) };
        assert!(withdrawn(&[small], &[], &Taken::new()).is_empty());
    }

    /// Both forms that kubelet has written, with what it writes around them.
    #[test]
    fn units_of_containers_are_read_from_kubelets_checkpoint() {
        let (a, b) = (id(1, 7), id(2, 0));
        for ids in [format!(r#"["{a}","{b}"]"#), format!(r#"{{"-1":["{a}"],"1":["{b}"],"2":null}}"#)] {
            let text = format!(
                r#"{{"Data":{{"PodDeviceEntries":[
                    {{"PodUID":"7f","ContainerName":"c","ResourceName":"tencent.com/vcuda-core","DeviceIDs":{ids},"AllocResp":"EgA="}},
                    {{"PodUID":"7f","ContainerName":"c","ResourceName":"nvidia.com/gpu","DeviceIDs":{ids},"AllocResp":""}}],
                    "RegisteredDevices":{{"tencent.com/vcuda-core":["{b}"]}}}},"Checksum":1}}"#
            );
            let taken = parse(text.as_bytes(), &Resources::default()).unwrap();
            assert_eq!(taken, Taken::from([(Resource::Core, a.clone()), (Resource::Core, b.clone())]));
        }
        let empty = br#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}"#;
        assert!(parse(empty, &Resources::default()).unwrap().is_empty());
    }

    #[test]
    fn an_unknown_checkpoint_is_an_error_and_not_an_empty_one() {
        for text in ["", "{}", r#"{"Data":{"PodDeviceEntries":[{"ResourceName":"r","DeviceIDs":"x"}]}}"#] {
            assert!(parse(text.as_bytes(), &Resources::default()).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_unit_that_a_container_has_is_ever_withdrawn(
            shares in proptest::collection::vec((any::<bool>(), 1..101_u32, 0..41_u32), 0..4),
            taken in proptest::collection::btree_set((any::<bool>(), 0..100_u32), 0..150),
        ) {
            let taken: Taken = taken
                .into_iter()
                .map(|(memory, index)| (if memory { Resource::Memory } else { Resource::Core }, id(1, index)))
                .collect();
            let shares: Vec<_> = shares
                .into_iter()
                .map(|(whole, core, units)| match whole {
                    true => share(1, ShareKind::Whole, 100, 40),
                    false => share(1, ShareKind::Share, core, units),
                })
                .collect();
            let gpus = [gpu(1)];
            let gone = withdrawn(&gpus, &shares, &taken);
            prop_assert!(gone.is_disjoint(&taken));
            // Never more than nobody can use.
            let most: u32 = useless(&gpus, &BTreeSet::new(), shares.iter()).iter().map(|useless| useless.count).sum();
            prop_assert!(gone.len() <= most as usize);
        }
    }
}
