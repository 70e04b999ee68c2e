//! What the node offers, as kubelet counts it: two resources, and for each GPU the device IDs that stand for its
//! units. Pure data; it knows neither where GPUs come from nor how kubelet is spoken to.

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
};

use vcuda_config::{CORE_PER_GPU, DeviceId, GpuUuid, Resources};

use crate::kubelet::api::{Device, ListAndWatchResponse, NumaNode, TopologyInfo};

/// Kubelet's words for the health of a device (deviceplugin/v1beta1, constants.go).
const HEALTHY: &str = "Healthy";
const UNHEALTHY: &str = "Unhealthy";

/// One of the two resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Resource {
    /// Compute time; 100 units a GPU.
    Core,
    /// Device memory; as many units of 256 MiB as the GPU has.
    Memory,
}

impl Resource {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Core, Self::Memory];

    /// The resource's full name, such as `tencent.com/vcuda-core`.
    pub fn name(self, names: &Resources) -> String {
        match self {
            Self::Core => names.core_name(),
            Self::Memory => names.memory_name(),
        }
    }

    /// File name of its socket in kubelet's folder. The same whatever the resource is called, so that a renamed
    /// resource leaves no socket behind.
    pub fn socket(self) -> &'static str {
        match self {
            Self::Core => "vcuda-core.sock",
            Self::Memory => "vcuda-memory.sock",
        }
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Core => "core",
            Self::Memory => "memory",
        })
    }
}

/// One GPU on offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferedGpu {
    /// UUID.
    pub uuid: GpuUuid,
    /// NUMA node, where known.
    pub numa_node: Option<u32>,
    /// Memory units of 256 MiB.
    pub memory_units: u32,
    /// Why it takes no new shares at the moment; none when it is healthy.
    pub trouble: Option<String>,
}

impl OfferedGpu {
    /// How many units of `resource` the GPU has.
    pub fn units(&self, resource: Resource) -> u32 {
        match resource {
            Resource::Core => CORE_PER_GPU,
            Resource::Memory => self.memory_units,
        }
    }
}

/// Everything on offer at one moment. The order of GPUs, and with it that of all IDs, is that of the PCI addresses.
#[derive(Clone, Debug, Default)]
pub struct Offer {
    gpus: Vec<OfferedGpu>,
    places: HashMap<GpuUuid, usize>,
    /// Units that nobody could use, see [`crate::withdraw`].
    withdrawn: BTreeSet<(Resource, DeviceId)>,
}

impl PartialEq for Offer {
    fn eq(&self, other: &Self) -> bool {
        self.gpus == other.gpus && self.withdrawn == other.withdrawn
    }
}

impl Offer {
    /// An offer of `gpus`, of which `withdrawn` are kept back.
    pub fn new(gpus: Vec<OfferedGpu>, withdrawn: BTreeSet<(Resource, DeviceId)>) -> Self {
        let places = gpus.iter().enumerate().map(|(at, gpu)| (gpu.uuid.clone(), at)).collect();
        Self { gpus, places, withdrawn }
    }

    /// The GPUs.
    pub fn gpus(&self) -> &[OfferedGpu] {
        &self.gpus
    }

    /// Units that are kept back.
    pub fn withdrawn(&self) -> &BTreeSet<(Resource, DeviceId)> {
        &self.withdrawn
    }

    /// The place of a GPU among the GPUs.
    pub fn place(&self, uuid: &GpuUuid) -> Option<usize> {
        self.places.get(uuid).copied()
    }

    /// All units of `resource` as kubelet wants them: those of sick GPUs and withdrawn ones as unhealthy. 8 GPUs with
    /// 288 GiB each make 9216 devices of memory, about 600 kB; grpc-go, which is kubelet's, takes 4 MiB.
    pub fn list(&self, resource: Resource) -> ListAndWatchResponse {
        let units = |gpu: &OfferedGpu| {
            let (uuid, sick) = (gpu.uuid.clone(), gpu.trouble.is_some());
            let topology =
                gpu.numa_node.map(|node| TopologyInfo { nodes: vec![NumaNode { id: i64::from(node) }] });
            (0..gpu.units(resource))
                .map(move |index| (DeviceId { gpu: uuid.clone(), index }, sick, topology.clone()))
        };
        let device = |(id, sick, topology): (DeviceId, bool, Option<TopologyInfo>)| {
            let text = id.to_string();
            let unhealthy = sick || self.withdrawn.contains(&(resource, id));
            Device { id: text, health: if unhealthy { UNHEALTHY } else { HEALTHY }.into(), topology }
        };
        ListAndWatchResponse { devices: self.gpus.iter().flat_map(units).map(device).collect() }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    fn gpu(n: u8, memory_units: u32) -> OfferedGpu {
        OfferedGpu { uuid: GpuUuid::from_bytes([n; 16]), numa_node: Some(1), memory_units, trouble: None }
    }

    #[test]
    fn every_unit_has_an_id_in_a_stable_order() {
        let offer = Offer::new(vec![gpu(2, 3), gpu(1, 2)], BTreeSet::new());
        assert_eq!(offer.list(Resource::Core).devices.len(), 200);
        let ids: Vec<_> = offer.list(Resource::Memory).devices.into_iter().map(|device| device.id).collect();
        let (a, b) = (GpuUuid::from_bytes([2; 16]), GpuUuid::from_bytes([1; 16]));
        let expected = [(&a, 0), (&a, 1), (&a, 2), (&b, 0), (&b, 1)].map(|(gpu, n)| format!("{gpu}::{n}"));
        assert_eq!(ids, expected);
        // Kubelet takes IDs of up to 63 characters (deviceplugin/v1beta1, api.proto).
        assert!(ids.iter().all(|id| id.len() <= 63));
    }

    /// NVIDIA's plugin marks one replica of a sick GPU and leaves the others (k8s-device-plugin v0.20,
    /// parentToDeviceMap).
    #[test]
    fn all_units_of_a_sick_gpu_are_unhealthy_and_no_other() {
        let mut sick = gpu(1, 4);
        sick.trouble = Some("XID 79".into());
        let offer = Offer::new(vec![sick, gpu(2, 4)], BTreeSet::new());
        for resource in Resource::ALL {
            let devices = offer.list(resource).devices;
            let unhealthy = devices.iter().filter(|device| device.health == UNHEALTHY).count();
            assert_eq!(unhealthy, devices.len() / 2);
            assert!(devices[..unhealthy].iter().all(|device| device.health == UNHEALTHY));
        }
    }

    #[test]
    fn a_withdrawn_unit_is_unhealthy_in_its_own_resource_only() {
        let id = DeviceId { gpu: GpuUuid::from_bytes([1; 16]), index: 2 };
        let offer = Offer::new(vec![gpu(1, 4)], BTreeSet::from([(Resource::Memory, id.clone())]));
        let unhealthy = |resource| -> Vec<String> {
            let devices = offer.list(resource).devices.into_iter();
            devices.filter(|device| device.health == UNHEALTHY).map(|device| device.id).collect()
        };
        assert_eq!(unhealthy(Resource::Memory), [id.to_string()]);
        assert!(unhealthy(Resource::Core).is_empty());
    }

    #[test]
    fn the_largest_node_stays_far_below_the_message_limit() {
        let gpus = (0..16).map(|n| gpu(n, 1152)).collect();
        let list = Offer::new(gpus, BTreeSet::new()).list(Resource::Memory);
        assert!(list.encoded_len() < 2 << 20, "{}", list.encoded_len());
    }
}
