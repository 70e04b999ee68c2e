//! Which of the free device IDs a container should get: all of one GPU, so that its share lies on one GPU, and of
//! the GPUs that fit the fullest, so that whole ones stay free. A wish only: kubelet decides, and Allocate checks.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use vcuda_config::{CORE_PER_GPU, DeviceId, GpuUuid, Grant, Resources};

use crate::{
    allocate::Refusal,
    offer::{Offer, Resource},
};

/// Kubelet asks for the second resource of a container as soon as it has the first, milliseconds later. What came
/// longer ago was for another container.
const TRAIL_LASTS: Duration = Duration::from_secs(1);

/// What kubelet asks for one container.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    /// IDs to choose from.
    pub available: &'a [String],
    /// IDs that the choice must hold; they are among the available ones.
    pub must_include: &'a [String],
    /// How many IDs to choose.
    pub size: u32,
}

/// Chooses IDs for one container, those of the GPUs in `near` first. The lowest free numbers of a GPU are taken.
///
/// # Errors
///
/// When no choice would pass Allocate. It is said here because only here one knows what each GPU has free. But not
/// when there are IDs that must be included: those kubelet has marked as taken, and it would not unmark them if this
/// call failed (kubelet 1.36, manager.go, devicesToAllocate). They are answered alone then, and Allocate refuses.
pub fn prefer(
    resource: Resource,
    names: &Resources,
    offer: &Offer,
    wish: Wish<'_>,
    near: &[GpuUuid],
) -> Result<Vec<String>, Refusal> {
    let free = Free::new(resource, offer, wish);
    let chosen = if resource == Resource::Core && wish.size >= CORE_PER_GPU {
        free.whole_gpus(wish.size, near)
    } else {
        free.one_gpu(wish.size, near)
    };
    match chosen {
        Some(places) => Ok(free.take(&places, wish)),
        None if !wish.must_include.is_empty() => Ok(wish.must_include.to_vec()),
        None => {
            let (asked, pieces) = (wish.size, free.pieces());
            let most = offer.gpus().iter().map(|gpu| gpu.memory_units).max().unwrap_or(0);
            let resource_name = resource.name(names);
            Err(match resource {
                Resource::Memory if asked > most => Refusal::BeyondOneGpu { resource: resource_name, asked },
                Resource::Core if asked > CORE_PER_GPU && !asked.is_multiple_of(CORE_PER_GPU) => {
                    Refusal::BrokenGpus { resource: resource_name, asked }
                }
                Resource::Core if asked >= CORE_PER_GPU => {
                    Refusal::NotWhole { resource: resource_name, asked, pieces }
                }
                _ => Refusal::Split { resource: resource_name, asked, pieces },
            })
        }
    }
}

/// Chooses IDs for a container that was placed on `gpus`: those of these GPUs first, and tokens of the others, the
/// fullest first, where kubelet counts too little free on them.
pub fn prefer_placed(resource: Resource, offer: &Offer, wish: Wish<'_>, gpus: &[GpuUuid]) -> Vec<String> {
    let free = Free::new(resource, offer, wish);
    let mut places: Vec<usize> = free.units.keys().copied().collect();
    places.sort_by_key(|place| (!free.is_near(*place, gpus), free.count(*place), *place));
    free.take(&places, wish)
}

/// The free units of each GPU.
struct Free<'a> {
    offer: &'a Offer,
    /// By the GPU's place in the offer: its free units by number, and the spelling that kubelet used.
    units: BTreeMap<usize, BTreeMap<u32, &'a str>>,
    /// Places of the GPUs that must be part of the choice.
    must: BTreeSet<usize>,
}

impl<'a> Free<'a> {
    fn new(resource: Resource, offer: &'a Offer, wish: Wish<'a>) -> Self {
        // IDs that are not on offer cannot be granted, so they are no choice.
        let known = |text: &'a String| {
            let id: DeviceId = text.parse().ok()?;
            let place = offer.place(&id.gpu)?;
            let gpu = &offer.gpus()[place];
            (id.index < gpu.units(resource) && gpu.trouble.is_none()).then_some((
                place,
                id.index,
                text.as_str(),
            ))
        };
        let mut units: BTreeMap<usize, BTreeMap<u32, &str>> = BTreeMap::new();
        for (place, index, text) in wish.available.iter().chain(wish.must_include).filter_map(known) {
            units.entry(place).or_default().insert(index, text);
        }
        let must = wish.must_include.iter().filter_map(known).map(|(place, ..)| place).collect();
        Self { offer, units, must }
    }

    /// Units free at this place.
    fn count(&self, place: usize) -> usize {
        self.units.get(&place).map_or(0, BTreeMap::len)
    }

    /// The fullest GPU that has `size` units free.
    fn one_gpu(&self, size: u32, near: &[GpuUuid]) -> Option<Vec<usize>> {
        let fits = |place: &&usize| {
            self.count(**place) >= size as usize && self.must.iter().all(|must| must == *place)
        };
        let rank = |place: &&usize| (!self.is_near(**place, near), self.count(**place), **place);
        self.units.keys().filter(fits).min_by_key(rank).map(|place| vec![*place])
    }

    /// GPUs that are free as a whole.
    fn whole_gpus(&self, size: u32, near: &[GpuUuid]) -> Option<Vec<usize>> {
        let (gpus, rest) = ((size / CORE_PER_GPU) as usize, size % CORE_PER_GPU);
        let whole = |place: &usize| self.count(*place) == CORE_PER_GPU as usize;
        let mut places: Vec<usize> = self.units.keys().copied().filter(whole).collect();
        places.sort_by_key(|place| (!self.must.contains(place), !self.is_near(*place, near), *place));
        places.truncate(gpus);
        let sound = rest == 0 && places.len() == gpus && self.must.iter().all(|must| places.contains(must));
        sound.then_some(places)
    }

    fn is_near(&self, place: usize, near: &[GpuUuid]) -> bool {
        near.contains(&self.offer.gpus()[place].uuid)
    }

    /// `wish.size` units of these GPUs, those that must be included first, then by number.
    fn take(&self, places: &[usize], wish: Wish<'_>) -> Vec<String> {
        let must: BTreeSet<&str> = wish.must_include.iter().map(String::as_str).collect();
        let units = || places.iter().filter_map(|place| self.units.get(place)).flat_map(BTreeMap::values);
        let (included, others) =
            (units().filter(|id| must.contains(**id)), units().filter(|id| !must.contains(**id)));
        included.chain(others).take(wish.size as usize).map(|id| (*id).to_owned()).collect()
    }

    fn pieces(&self) -> Grant {
        let id = |(place, index): (&usize, &u32)| DeviceId {
            gpu: self.offer.gpus()[*place].uuid.clone(),
            index: *index,
        };
        let ids: Vec<_> = self
            .units
            .iter()
            .flat_map(|(place, units)| units.keys().map(move |index| id((place, index))))
            .collect();
        Grant::from_ids(&ids)
    }
}

/// The GPUs of the last Allocate. Kubelet asks for the two resources of one container one right after the other, in
/// either order, and never says for whom; so the GPUs of the first are the best guess for the second. A wrong guess
/// costs a preference, nothing else.
#[derive(Debug, Default)]
pub struct Trail(Option<(Resource, Vec<GpuUuid>, Instant)>);

impl Trail {
    /// GPUs that a wish for `resource` should be near.
    pub fn near(&self, resource: Resource, now: Instant) -> &[GpuUuid] {
        match &self.0 {
            Some((other, gpus, at)) if *other != resource && now.duration_since(*at) < TRAIL_LASTS => gpus,
            _ => &[],
        }
    }

    /// Notes a grant. The second of a pair ends the trail: the next container is another one.
    pub fn granted(&mut self, resource: Resource, grant: &Grant, now: Instant) {
        let pair_is_complete = !self.near(resource, now).is_empty();
        self.0 =
            (!pair_is_complete).then(|| (resource, grant.iter().map(|(gpu, _)| gpu.clone()).collect(), now));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{allocate, offer::OfferedGpu};

    const UNITS: u32 = 40;

    fn gpu(n: u8) -> GpuUuid {
        GpuUuid::from_bytes([n; 16])
    }

    fn offer() -> Offer {
        let offered = |n| OfferedGpu { uuid: gpu(n), numa_node: None, memory_units: UNITS, trouble: None };
        Offer::new((0..4).map(offered).collect(), BTreeSet::new())
    }

    #[test]
    fn a_placed_container_gets_the_ids_of_its_gpu_and_tokens_for_the_rest() {
        let available: Vec<_> =
            ids(0, 0..100).into_iter().chain(ids(1, 40..100)).chain(ids(2, 95..100)).collect();
        let wish = |size| Wish { available: &available, must_include: &[], size };
        let placed = |size, on| prefer_placed(Resource::Core, &offer(), wish(size), &[gpu(on)]);
        assert_eq!(placed(20, 1), ids(1, 40..60));
        let pieces: Vec<_> = ids(2, 95..100).into_iter().chain(ids(1, 40..55)).collect();
        assert_eq!(placed(20, 2), pieces);
        assert_eq!(placed(100, 0), ids(0, 0..100));
    }

    fn ids(n: u8, range: std::ops::Range<u32>) -> Vec<String> {
        range.map(|index| format!("{}::{index}", gpu(n))).collect()
    }

    fn ask(resource: Resource, wish: Wish<'_>, near: &[GpuUuid]) -> Result<Vec<String>, Refusal> {
        prefer(resource, &Resources::default(), &offer(), wish, near)
    }

    fn wish<'a>(available: &'a [String], must_include: &'a [String], size: u32) -> Wish<'a> {
        Wish { available, must_include, size }
    }

    #[test]
    fn the_fullest_gpu_that_fits_is_taken() {
        let available = [ids(0, 0..100), ids(1, 70..100), ids(2, 50..100), ids(3, 90..100)].concat();
        assert_eq!(ask(Resource::Core, wish(&available, &[], 20), &[]).unwrap(), ids(1, 70..90));
        assert_eq!(ask(Resource::Core, wish(&available, &[], 60), &[]).unwrap(), ids(0, 0..60));
    }

    #[test]
    fn the_gpu_of_the_other_resource_is_taken_before_a_fuller_one() {
        let available = [ids(0, 0..40), ids(1, 20..40)].concat();
        assert_eq!(ask(Resource::Memory, wish(&available, &[], 10), &[gpu(0)]).unwrap(), ids(0, 0..10));
        // Unless it has no room.
        assert_eq!(ask(Resource::Memory, wish(&available, &[], 30), &[gpu(1)]).unwrap(), ids(0, 0..30));
    }

    #[test]
    fn whole_gpus_are_those_wholly_free() {
        let available = [ids(0, 1..100), ids(1, 0..100), ids(2, 0..100), ids(3, 0..100)].concat();
        let chosen = ask(Resource::Core, wish(&available, &[], 200), &[gpu(3)]).unwrap();
        assert_eq!(chosen, [ids(3, 0..100), ids(1, 0..100)].concat());
    }

    #[test]
    fn what_cannot_be_granted_is_refused_with_what_is_free() {
        let available = [ids(0, 0..30), ids(1, 0..20)].concat();
        for (resource, size, named) in [
            (Resource::Core, 40, format!("{}=30,{}=20", gpu(0), gpu(1))),
            (Resource::Core, 100, format!("{}=30,{}=20", gpu(0), gpu(1))),
            (Resource::Core, 150, "150 is neither".into()),
            (Resource::Memory, 35, format!("{}=30,{}=20", gpu(0), gpu(1))),
            (Resource::Memory, 41, "leave tencent.com/vcuda-memory out".into()),
        ] {
            let text = ask(resource, wish(&available, &[], size), &[]).unwrap_err().to_string();
            assert!(text.contains(&named), "{text}");
        }
    }

    /// Kubelet would keep the included IDs marked as taken if the call failed.
    #[test]
    fn a_wish_with_included_ids_is_never_refused() {
        let must = [ids(0, 0..1), ids(1, 0..1)].concat();
        let available = [ids(0, 0..30), ids(1, 0..20)].concat();
        assert_eq!(ask(Resource::Core, wish(&available, &must, 10), &[]).unwrap(), must);
    }

    #[test]
    fn foreign_and_sick_ids_are_no_choice() {
        let mut gpus = offer().gpus().to_vec();
        gpus[0].trouble = Some("XID 79".into());
        let offer = Offer::new(gpus, BTreeSet::new());
        let available = [vec!["nonsense".into()], ids(9, 0..50), ids(0, 0..5), ids(1, 0..50)].concat();
        let chosen =
            prefer(Resource::Core, &Resources::default(), &offer, wish(&available, &[], 5), &[]).unwrap();
        assert_eq!(chosen, ids(1, 0..5));
    }

    #[test]
    fn a_trail_leads_from_one_resource_to_the_other_once_and_soon() {
        let now = Instant::now();
        let parsed: Vec<DeviceId> = ids(1, 0..5).iter().map(|id| id.parse().unwrap()).collect();
        let grant = Grant::from_ids(&parsed);
        let mut trail = Trail::default();
        assert!(trail.near(Resource::Memory, now).is_empty());
        trail.granted(Resource::Core, &grant, now);
        assert!(trail.near(Resource::Core, now).is_empty());
        assert_eq!(trail.near(Resource::Memory, now), [gpu(1)]);
        assert!(trail.near(Resource::Memory, now + TRAIL_LASTS).is_empty());
        trail.granted(Resource::Memory, &grant, now);
        assert!(trail.near(Resource::Core, now).is_empty());
        // A lone grant of the same resource starts over.
        trail.granted(Resource::Core, &grant, now);
        trail.granted(Resource::Core, &grant, now);
        assert_eq!(trail.near(Resource::Memory, now), [gpu(1)]);
    }

    proptest! {
        /// What is preferred has the right size, holds what it must, is available, and passes Allocate; and where it
        /// is refused, no GPU has room.
        #[test]
        fn a_preference_always_passes_allocate(
            memory: bool,
            free in proptest::collection::vec(proptest::collection::btree_set(0..100_u32, 0..100), 4),
            must in proptest::option::of((0..4_usize, 1..20_usize)),
            size in prop_oneof![1..100_u32, Just(100), Just(200)],
            near in proptest::collection::vec(0..5_u8, 0..2),
            full in 0..5_u8,
        ) {
            let resource = if memory { Resource::Memory } else { Resource::Core };
            let units = if memory { UNITS } else { 100 };
            let available: Vec<Vec<String>> = (0..4_u8).map(|n| {
                let free = &free[n as usize];
                (0..units)
                    .zip(ids(n, 0..units))
                    .filter(|(index, _)| n < full || free.contains(index))
                    .map(|(_, id)| id)
                    .collect()
            }).collect();
            let must: Vec<String> = must.map_or(vec![], |(n, count)| {
                available[n].iter().take(count.min(size as usize)).cloned().collect()
            });
            let near: Vec<_> = near.into_iter().map(gpu).collect();
            let all = available.concat();
            let room = if resource == Resource::Core && size >= 100 {
                available.iter().filter(|ids| ids.len() == 100).count() >= (size / 100) as usize
            } else {
                available.iter().any(|ids| ids.len() >= size as usize)
            };
            match ask(resource, wish(&all, &must, size), &near) {
                Ok(chosen) => {
                    let distinct: BTreeSet<_> = chosen.iter().collect();
                    prop_assert_eq!(distinct.len(), chosen.len());
                    prop_assert!(must.iter().all(|id| distinct.contains(id)));
                    prop_assert!(chosen.iter().all(|id| all.contains(id)));
                    if chosen.len() == size as usize {
                        let names = Resources::default();
                        let granted =
                            allocate::grant(resource, &names, &offer(), chosen.iter().map(String::as_str));
                        prop_assert!(granted.is_ok(), "{:?}", granted);
                    } else {
                        prop_assert_eq!(chosen, must);
                    }
                }
                Err(_) => prop_assert!(must.is_empty() && !room),
            }
        }
    }
}
