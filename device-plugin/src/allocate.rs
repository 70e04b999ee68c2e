//! What Allocate may grant. A pure function of the device IDs and of what is on offer: it carries no pod, keeps no
//! state, and gives the same answer to the same question (design D1).

use std::collections::BTreeSet;

use thiserror::Error;
use vcuda_config::{CORE_PER_GPU, DeviceId, DeviceIdError, GpuUuid, Grant, Resources};

use crate::offer::{Offer, Resource};

/// Why an Allocate is refused. Kubelet shows the text on the pod, as `UnexpectedAdmissionError`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// No IDs at all.
    #[error("{0}: kubelet asked for no devices; restart kubelet, its device state is broken")]
    Nothing(String),
    /// An ID that is none of this plugin's.
    #[error("{resource}: {reason}; delete the pod, it holds devices of another plugin")]
    Malformed {
        /// Name of the resource.
        resource: String,
        /// What is wrong with the ID.
        reason: DeviceIdError,
    },
    /// The same unit twice.
    #[error("{resource}: {id} is named twice; restart kubelet, its device state is broken")]
    Twice {
        /// Name of the resource.
        resource: String,
        /// The ID.
        id: DeviceId,
    },
    /// A unit that is not on offer.
    #[error(
        "{resource}: {id} is not on offer on this node (any more); delete the pod, its successor gets what there is"
    )]
    Unknown {
        /// Name of the resource.
        resource: String,
        /// The ID.
        id: DeviceId,
    },
    /// The GPU takes no new shares.
    #[error("{resource}: {gpu} takes no new shares: {trouble}")]
    Sick {
        /// Name of the resource.
        resource: String,
        /// The GPU.
        gpu: GpuUuid,
        /// Why.
        trouble: String,
    },
    /// More than one GPU, but no whole number of them.
    #[error(
        "{resource}: {asked} is neither below {CORE_PER_GPU} nor a multiple of it; ask for a part of one GPU \
         (1 to 99) or for whole GPUs (100, 200, …)"
    )]
    BrokenGpus {
        /// Name of the resource.
        resource: String,
        /// Units asked.
        asked: u32,
    },
    /// A request that fits one GPU was pieced together from several.
    #[error(
        "{resource}: no single GPU of this node has {asked} free, only the pieces {pieces}, and a share is never split \
         over GPUs; ask for less, or let the pod be created anew when a GPU has room"
    )]
    Split {
        /// Name of the resource.
        resource: String,
        /// Units asked.
        asked: u32,
        /// What each GPU gave.
        pieces: Grant,
    },
    /// Memory beyond one GPU.
    #[error(
        "{resource}: {asked} is more than one GPU of this node has, and a share is never split over GPUs; whole GPUs \
         bring all their memory, so leave {resource} out beside 100 core or more"
    )]
    BeyondOneGpu {
        /// Name of the resource.
        resource: String,
        /// Units asked.
        asked: u32,
    },
    /// Whole GPUs are asked, and these are not.
    #[error(
        "{resource}: {asked} asks for whole GPUs, but this node has too few that are free, only {pieces}; let the pod \
         be created anew when GPUs are free"
    )]
    NotWhole {
        /// Name of the resource.
        resource: String,
        /// Units asked.
        asked: u32,
        /// What each GPU gave.
        pieces: Grant,
    },
}

/// Checks the IDs that kubelet has chosen for one container, and counts them per GPU.
///
/// Below 100 core, and for any memory, all IDs must be of one GPU. From 100 core on, the IDs must be all the IDs of
/// whole GPUs. Units that are withdrawn are granted all the same: kubelet may have chosen them a moment before it
/// learned.
///
/// # Errors
///
/// See [`Refusal`].
pub fn grant<'a>(
    resource: Resource,
    names: &Resources,
    offer: &Offer,
    ids: impl IntoIterator<Item = &'a str>,
) -> Result<Grant, Refusal> {
    let name = || resource.name(names);
    let mut units = BTreeSet::new();
    for id in ids {
        let id: DeviceId = id.parse().map_err(|reason| Refusal::Malformed { resource: name(), reason })?;
        let gpu = offer.place(&id.gpu).map(|at| &offer.gpus()[at]);
        let Some(gpu) = gpu.filter(|gpu| id.index < gpu.units(resource)) else {
            return Err(Refusal::Unknown { resource: name(), id });
        };
        if let Some(trouble) = &gpu.trouble {
            return Err(Refusal::Sick { resource: name(), gpu: id.gpu, trouble: trouble.clone() });
        }
        if let Some(id) = units.replace(id) {
            return Err(Refusal::Twice { resource: name(), id });
        }
    }
    let pieces = Grant::from_ids(&units);
    let asked = pieces.units();
    let resource_name = name();
    match (resource, asked) {
        (_, 0) => Err(Refusal::Nothing(resource_name)),
        (Resource::Core, CORE_PER_GPU..) if !asked.is_multiple_of(CORE_PER_GPU) => {
            Err(Refusal::BrokenGpus { resource: resource_name, asked })
        }
        (Resource::Core, CORE_PER_GPU..) if pieces.iter().any(|(_, piece)| piece != CORE_PER_GPU) => {
            Err(Refusal::NotWhole { resource: resource_name, asked, pieces })
        }
        (Resource::Core, CORE_PER_GPU..) => Ok(pieces),
        (_, _) if pieces.iter().len() == 1 => Ok(pieces),
        (Resource::Memory, _) if offer.gpus().iter().all(|gpu| gpu.memory_units < asked) => {
            Err(Refusal::BeyondOneGpu { resource: resource_name, asked })
        }
        (_, _) => Err(Refusal::Split { resource: resource_name, asked, pieces }),
    }
}

/// As [`grant`], for a container that a scheduler has placed: it gets its share where it was placed, so the IDs are
/// tokens, and may be of several GPUs.
///
/// # Errors
///
/// See [`Refusal`].
pub fn tokens<'a>(
    resource: Resource,
    names: &Resources,
    offer: &Offer,
    ids: impl IntoIterator<Item = &'a str>,
) -> Result<Grant, Refusal> {
    match grant(resource, names, offer, ids) {
        Err(Refusal::Split { pieces, .. } | Refusal::NotWhole { pieces, .. }) => Ok(pieces),
        granted => granted,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::offer::OfferedGpu;

    const UNITS: u32 = 8;

    fn gpu(n: u8) -> GpuUuid {
        GpuUuid::from_bytes([n; 16])
    }

    fn offer(gpus: u8) -> Offer {
        let offered = |n| OfferedGpu { uuid: gpu(n), numa_node: None, memory_units: UNITS, trouble: None };
        Offer::new((0..gpus).map(offered).collect(), BTreeSet::new())
    }

    fn ids(parts: &[(u8, std::ops::Range<u32>)]) -> Vec<String> {
        let part = |(n, range): &(u8, std::ops::Range<u32>)| {
            let gpu = gpu(*n);
            range.clone().map(move |index| format!("{gpu}::{index}")).collect::<Vec<_>>()
        };
        parts.iter().flat_map(part).collect()
    }

    fn ask(resource: Resource, ids: &[String]) -> Result<Grant, Refusal> {
        grant(resource, &Resources::default(), &offer(3), ids.iter().map(String::as_str))
    }

    #[test]
    fn tokens_of_a_placed_container_may_be_of_several_gpus() {
        let pieces = ids(&[(1, 0..10), (2, 0..10)]);
        let tokens = |ids: &[String]| {
            tokens(Resource::Core, &Resources::default(), &offer(3), ids.iter().map(String::as_str))
        };
        assert_eq!(tokens(&pieces).unwrap().units(), 20);
        assert_eq!(tokens(&ids(&[(1, 0..60), (2, 0..40)])).unwrap().units(), 100);
        assert!(matches!(tokens(&ids(&[(1, 0..100), (2, 0..50)])), Err(Refusal::BrokenGpus { .. })));
        assert!(matches!(tokens(&ids(&[(9, 0..5)])), Err(Refusal::Unknown { .. })));
    }

    #[test]
    fn a_part_of_one_gpu_is_granted() {
        let granted = ask(Resource::Core, &ids(&[(1, 40..60)])).unwrap();
        assert_eq!(granted.to_string(), format!("{}=20", gpu(1)));
        let granted = ask(Resource::Memory, &ids(&[(1, 0..UNITS)])).unwrap();
        assert_eq!(granted.to_string(), format!("{}={UNITS}", gpu(1)));
    }

    #[test]
    fn whole_gpus_are_granted_whole() {
        let granted = ask(Resource::Core, &ids(&[(2, 0..100), (0, 0..100)])).unwrap();
        assert_eq!(granted.to_string(), format!("{}=100,{}=100", gpu(0), gpu(2)));
    }

    #[test]
    fn every_refusal_says_what_to_do() {
        let sick = |trouble: &str| {
            let gpu =
                OfferedGpu { uuid: gpu(0), numa_node: None, memory_units: 1, trouble: Some(trouble.into()) };
            let offer = Offer::new(vec![gpu], BTreeSet::new());
            grant(Resource::Core, &Resources::default(), &offer, ids(&[(0, 0..1)]).iter().map(String::as_str))
        };
        for (answer, named) in [
            (ask(Resource::Core, &[]), "restart kubelet"),
            (ask(Resource::Core, &["nvidia0".into()]), "nvidia0"),
            (ask(Resource::Core, &ids(&[(9, 0..1)])), "not on offer"),
            (ask(Resource::Core, &ids(&[(0, 100..101)])), "::100 is not on offer"),
            (ask(Resource::Memory, &ids(&[(0, UNITS..UNITS + 1)])), "::8 is not on offer"),
            (ask(Resource::Core, &ids(&[(0, 3..4), (0, 3..4)])), "::3 is named twice"),
            (ask(Resource::Core, &ids(&[(0, 0..10), (1, 0..10)])), "no single GPU of this node has 20 free"),
            (ask(Resource::Core, &ids(&[(0, 0..100), (1, 0..50)])), "150 is neither below 100"),
            (ask(Resource::Core, &ids(&[(0, 0..60), (1, 0..40)])), "too few that are free"),
            (ask(Resource::Memory, &ids(&[(0, 0..2), (1, 0..2)])), "never split over GPUs"),
            (ask(Resource::Memory, &ids(&[(0, 0..5), (1, 0..5)])), "leave tencent.com/vcuda-memory out"),
            (sick("XID 79; see the kernel log"), "XID 79; see the kernel log"),
        ] {
            let text = answer.unwrap_err().to_string();
            assert!(text.starts_with("tencent.com/vcuda-"), "{text}");
            assert!(text.contains(named), "{text}");
        }
    }

    proptest! {
        /// Whatever kubelet sends: what is granted is on offer, sound by the rules, and all of what was asked.
        #[test]
        fn only_sound_grants_pass(
            memory: bool,
            picks in proptest::collection::vec((0..4_u8, 0..101_u32), 0..120),
            whole in proptest::collection::btree_set(0..3_u8, 0..3),
        ) {
            let resource = if memory { Resource::Memory } else { Resource::Core };
            let mut asked: Vec<_> = whole.iter().flat_map(|n| ids(&[(*n, 0..100)])).collect();
            asked.extend(picks.iter().flat_map(|(n, index)| ids(&[(*n, *index..*index + 1)])));
            if let Ok(granted) = ask(resource, &asked) {
                let distinct: BTreeSet<_> = asked.iter().collect();
                prop_assert_eq!(distinct.len(), asked.len());
                prop_assert_eq!(granted.units() as usize, asked.len());
                let most = if memory { UNITS } else { 100 };
                prop_assert!(granted.iter().all(|(uuid, units)| units <= most && offer(3).place(uuid).is_some()));
                let one = granted.iter().len() == 1;
                prop_assert!(one || !memory && granted.iter().all(|(_, units)| units == 100));
            }
        }

        /// The same IDs in any order are the same question.
        #[test]
        fn the_order_of_ids_says_nothing(
            (ordered, shuffled) in (0..3_u8, 1..101_u32).prop_flat_map(|(n, count)| {
                let all = ids(&[(n, 0..count)]);
                (Just(all.clone()), Just(all).prop_shuffle())
            }),
        ) {
            prop_assert_eq!(ask(Resource::Core, &ordered), ask(Resource::Core, &shuffled));
        }
    }
}
