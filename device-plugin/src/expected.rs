//! Containers that a scheduler has placed and that have no share yet. Kubelet never says for whom it asks for devices;
//! but whoever asks for just as much as such a container, is most likely that container. So the IDs are taken from the
//! GPUs that were picked for it, and kubelet's books name the GPU that the container gets. A wrong guess does no harm:
//! the NRI plugin, which knows the container, gives it the GPUs that were picked for it, and the IDs are tokens.

use std::collections::BTreeSet;

use vcuda_config::{GpuUuid, Grant};

use crate::offer::Resource;

/// A container that is to come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// UID of its pod.
    pub pod: String,
    /// Its name.
    pub container: String,
    /// Core units that it asks.
    pub core: u32,
    /// Memory units that it asks.
    pub memory: u32,
    /// The GPUs that were picked for it.
    pub gpus: Vec<GpuUuid>,
}

impl Expected {
    fn units(&self, resource: Resource) -> u32 {
        match resource {
            Resource::Core => self.core,
            Resource::Memory => self.memory,
        }
    }

    fn key(&self, resource: Resource) -> Key {
        (self.pod.clone(), self.container.clone(), resource)
    }
}

type Key = (String, String, Resource);

/// Of the containers that are to come, what they have been granted already. From Allocate to the share it can take
/// minutes: the image is pulled in between.
#[derive(Debug, Default)]
pub struct Granted(BTreeSet<Key>);

impl Granted {
    /// The container that a wish for `units` of `resource` is most likely for: one that has the other resource
    /// already, or else the one that was placed first; `expected` are in that order.
    pub fn guess<'a>(
        &self,
        expected: &'a [Expected],
        resource: Resource,
        units: u32,
    ) -> Option<&'a Expected> {
        self.candidates(expected, resource, units).min_by_key(|one| !self.has_other(one, resource))
    }

    /// Notes that kubelet was granted `grant`.
    pub fn note(&mut self, expected: &[Expected], resource: Resource, grant: &Grant) {
        self.0.retain(|(pod, container, _)| {
            expected.iter().any(|one| one.pod == *pod && one.container == *container)
        });
        let on = |one: &Expected| grant.iter().all(|(gpu, _)| one.gpus.contains(gpu));
        let rank = |one: &&Expected| (!on(one), !self.has_other(one, resource));
        let key =
            self.candidates(expected, resource, grant.units()).min_by_key(rank).map(|it| it.key(resource));
        self.0.extend(key);
    }

    fn candidates<'a>(
        &self,
        expected: &'a [Expected],
        resource: Resource,
        units: u32,
    ) -> impl Iterator<Item = &'a Expected> {
        expected
            .iter()
            .filter(move |one| one.units(resource) == units && !self.0.contains(&one.key(resource)))
    }

    fn has_other(&self, one: &Expected, resource: Resource) -> bool {
        Resource::ALL.into_iter().any(|other| other != resource && self.0.contains(&one.key(other)))
    }
}

#[cfg(test)]
mod tests {
    use vcuda_config::DeviceId;

    use super::*;

    fn gpu(n: u8) -> GpuUuid {
        GpuUuid::from_bytes([n; 16])
    }

    fn expected(pod: &str, core: u32, memory: u32, on: u8) -> Expected {
        Expected { pod: pod.into(), container: "main".into(), core, memory, gpus: vec![gpu(on)] }
    }

    fn grant(n: u8, units: u32) -> Grant {
        let ids: Vec<_> = (0..units).map(|index| DeviceId { gpu: gpu(n), index }).collect();
        Grant::from_ids(&ids)
    }

    #[test]
    fn containers_of_one_size_come_in_the_order_in_which_they_were_placed_and_stay_whole() {
        let expected = [expected("a", 20, 8, 3), expected("b", 20, 4, 1), expected("c", 30, 4, 2)];
        let mut granted = Granted::default();
        let guess = |granted: &Granted, resource, units| {
            granted.guess(&expected, resource, units).map(|one| one.pod.clone())
        };
        assert_eq!(guess(&granted, Resource::Core, 21), None);
        assert_eq!(guess(&granted, Resource::Core, 20).as_deref(), Some("a"));
        granted.note(&expected, Resource::Core, &grant(3, 20));
        assert_eq!(guess(&granted, Resource::Core, 20).as_deref(), Some("b"));
        granted.note(&expected, Resource::Core, &grant(1, 20));
        assert_eq!(guess(&granted, Resource::Core, 20), None);
        // Four units are asked by the one that has its core, although another was to have as much.
        assert_eq!(guess(&granted, Resource::Memory, 4).as_deref(), Some("b"));
        granted.note(&expected, Resource::Memory, &grant(1, 4));
        assert_eq!(guess(&granted, Resource::Memory, 4).as_deref(), Some("c"));
        // What came is forgotten.
        granted.note(&expected[2..], Resource::Memory, &grant(2, 4));
        assert_eq!(guess(&granted, Resource::Core, 20).as_deref(), Some("a"));
    }
}
