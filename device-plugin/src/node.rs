//! From what NVML sees to what the node offers: which GPUs are left alone, how many units each has, which device
//! nodes belong to it, and what keeps new shares off it. A GPU that was once on offer stays listed, as sick, when it
//! is gone, so that its loss shows.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
    sync::Arc,
    time::Duration,
};

use ledger::{DeviceNode, Gpu, Inventory};
use rustix::fs::{major, minor};
use vcuda_config::{GpuGroup, GpuPolicy, GpuUuid, Link, MEMORY_UNIT_BYTES, NodeFile};

use crate::{
    nvml::{Found, SeenGpu, Survey, Surveyor},
    offer::OfferedGpu,
};

/// Control nodes, and whether CUDA works without (`nvidia-uvm-tools` serves profilers only).
const CONTROL_NODES: [(&str, bool); 3] =
    [("/dev/nvidiactl", true), ("/dev/nvidia-uvm", true), ("/dev/nvidia-uvm-tools", false)];

/// NVML takes seconds to start on a node without nvidia-persistenced.
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);

/// What the node has and offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// For the NRI plugin, and on disk.
    pub inventory: Inventory,
    /// For kubelet; the same GPUs in the same order.
    pub gpus: Vec<OfferedGpu>,
    /// GPUs that are there and not on offer, and why.
    pub left_alone: BTreeMap<GpuUuid, String>,
}

impl Node {
    /// The node as `found` shows it. GPUs that `before` had and that are gone now stay, as sick ones.
    pub fn new(
        found: &Found,
        driver_root: &Path,
        policy: &GpuPolicy,
        boot_id: &str,
        before: Option<&Self>,
    ) -> Self {
        let (control_nodes, control_trouble) = control_nodes(driver_root);
        let mut inventory = Inventory::new(boot_id.into(), found.driver.clone(), control_nodes, Vec::new());
        let mut gpus = Vec::new();
        let mut left_alone = BTreeMap::new();
        for seen in &found.gpus {
            let known = before.and_then(|node| node.inventory.gpu(&seen.uuid));
            let reason = reason_to_leave_alone(seen, policy);
            if let (Some(reason), None) = (&reason, known) {
                left_alone.insert(seen.uuid.clone(), reason.clone());
                continue;
            }
            let (device_nodes, node_trouble) =
                match device_node(driver_root, &format!("/dev/nvidia{}", seen.minor)) {
                    Ok(node) => (vec![node], None),
                    Err(trouble) => (Vec::new(), Some(trouble)),
                };
            // What helps all GPUs of the node comes first.
            let trouble =
                reason.or_else(|| control_trouble.clone()).or(node_trouble).or_else(|| seen.trouble.clone());
            let memory_units = memory_units(seen.total_bytes, policy.reserved_mib);
            inventory.capabilities.extend(seen.capability.map(|capability| (seen.uuid.clone(), capability)));
            inventory.gpus.push(Gpu {
                uuid: seen.uuid.clone(),
                name: seen.name.clone(),
                minor: seen.minor,
                total_bytes: seen.total_bytes,
                memory_units,
                numa_node: seen.numa_node,
                pci_bus_id: seen.pci_bus_id.clone(),
                healthy: trouble.is_none(),
                device_nodes,
            });
            gpus.push(OfferedGpu {
                uuid: seen.uuid.clone(),
                numa_node: seen.numa_node,
                memory_units,
                trouble,
            });
        }
        let mut node = Self { inventory, gpus, left_alone };
        if let Some(before) = before {
            node.keep_lost(before, found);
        }
        node.connect(found);
        node
    }

    /// What is there at this moment, asked of NVML itself, for where no device plugin has written it down.
    ///
    /// # Errors
    ///
    /// There is no driver, or it does not answer in time.
    pub fn ask(file: &NodeFile) -> Result<Self, String> {
        let surveyor =
            Surveyor::start(file.paths.driver_root.clone(), &file.gpus.ignored_xids, Arc::default())
                .map_err(|error| error.to_string())?;
        let mut surveys = surveyor.surveys();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.map_err(|error| error.to_string())?;
        let answer = runtime.block_on(async {
            let answered = surveys.wait_for(|survey| !matches!(survey, Survey::Pending));
            tokio::time::timeout(ANSWERS_WITHIN, answered).await.ok()?.ok().map(|survey| survey.clone())
        });
        match answer {
            Some(Survey::Found(found)) => {
                let boot_id = ledger::boot_id().map_err(|error| error.to_string())?;
                Ok(Self::new(&found, &file.paths.driver_root, &file.gpus, &boot_id, None))
            }
            Some(Survey::NoDriver(reason)) => Err(reason),
            Some(Survey::Pending) | None => Err(format!("NVML does not answer within {ANSWERS_WITHIN:?}")),
        }
    }

    /// The same node when the driver is gone: nothing takes new shares.
    pub fn without_driver(mut self, reason: &str) -> Self {
        for (gpu, offered) in self.inventory.gpus.iter_mut().zip(&mut self.gpus) {
            gpu.healthy = false;
            offered.trouble = Some(format!("the driver does not answer: {reason}"));
        }
        self
    }

    /// Notes how the GPUs are connected, by their final places. Those that are left alone belong to no group.
    fn connect(&mut self, found: &Found) {
        let gpus = &self.inventory.gpus;
        let place = |uuid: &GpuUuid| gpus.iter().position(|gpu| gpu.uuid == *uuid);
        let group = |(link, members): &(Link, Vec<GpuUuid>)| {
            let gpus: Vec<usize> = members.iter().filter_map(place).collect();
            (gpus.len() > 1).then_some(GpuGroup { link: *link, gpus })
        };
        self.inventory.groups = found.groups.iter().filter_map(group).collect();
    }

    fn keep_lost(&mut self, before: &Self, found: &Found) {
        for (gpu, offered) in before.inventory.gpus.iter().zip(&before.gpus) {
            if self.inventory.gpu(&gpu.uuid).is_some() {
                continue;
            }
            let reason =
                found.silent.clone().unwrap_or_else(|| "NVML lists it no more; see the kernel log".into());
            let capability = before.inventory.capabilities.get(&gpu.uuid);
            self.inventory.capabilities.extend(capability.map(|of| (gpu.uuid.clone(), *of)));
            self.inventory.gpus.push(Gpu { healthy: false, ..gpu.clone() });
            self.gpus.push(OfferedGpu { trouble: Some(format!("it is lost: {reason}")), ..offered.clone() });
        }
        // NVML's order is that of the PCI addresses; a lost GPU keeps its place.
        let place: BTreeMap<_, _> =
            self.inventory.gpus.iter().map(|gpu| (gpu.uuid.clone(), gpu.pci_bus_id.clone())).collect();
        self.inventory.gpus.sort_by(|a, b| a.pci_bus_id.cmp(&b.pci_bus_id));
        self.gpus.sort_by(|a, b| place.get(&a.uuid).cmp(&place.get(&b.uuid)));
    }
}

fn reason_to_leave_alone(gpu: &SeenGpu, policy: &GpuPolicy) -> Option<String> {
    if policy.exclude.contains(&gpu.uuid) {
        Some("it is in gpus.exclude of the node file".into())
    } else if gpu.mig {
        Some("it is in MIG mode; turn that off with `nvidia-smi -mig 0` to share it".into())
    } else {
        None
    }
}

/// Memory on offer: ⌊(total − reserved) / 256 MiB⌋, of each GPU by itself, so that remainders of two GPUs never add
/// up to a unit.
fn memory_units(total_bytes: u64, reserved_mib: u64) -> u32 {
    let offered = total_bytes.saturating_sub(reserved_mib.saturating_mul(1 << 20));
    u32::try_from(offered / MEMORY_UNIT_BYTES).unwrap_or(u32::MAX)
}

fn control_nodes(root: &Path) -> (Vec<DeviceNode>, Option<String>) {
    let mut nodes = Vec::new();
    let mut trouble = None;
    for (path, needed) in CONTROL_NODES {
        match device_node(root, path) {
            Ok(node) => nodes.push(node),
            Err(reason) if needed => trouble = trouble.or(Some(reason)),
            Err(_) => {}
        }
    }
    (nodes, trouble)
}

/// Looks at the device node `path` below the driver root. Neither the kernel nor udev makes the driver's nodes; its
/// own tools do, when something first needs them.
fn device_node(root: &Path, path: &str) -> Result<DeviceNode, String> {
    let host = root.join(path.trim_start_matches('/'));
    let remedy = "make it with `nvidia-modprobe -c 0 -u`, or start nvidia-persistenced";
    let meta = fs::metadata(&host).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => format!("the device node {} is missing; {remedy}", host.display()),
        _ => format!("the device node {} cannot be looked at: {error}", host.display()),
    })?;
    if !meta.file_type().is_char_device() {
        return Err(format!("{} is no character device; remove it, then {remedy}", host.display()));
    }
    Ok(DeviceNode {
        path: path.into(),
        major: major(meta.rdev()),
        minor: minor(meta.rdev()),
        file_mode: meta.mode() & 0o777,
        uid: meta.uid(),
        gid: meta.gid(),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use ledger::Driver;

    use super::*;

    fn uuid(n: u8) -> GpuUuid {
        GpuUuid::from_bytes([n; 16])
    }

    fn seen(n: u8) -> SeenGpu {
        SeenGpu {
            uuid: uuid(n),
            name: "H100".into(),
            minor: n.into(),
            total_bytes: 81559 << 20,
            capability: Some(90),
            numa_node: Some(0),
            pci_bus_id: format!("00000000:{n:02x}:00.0"),
            mig: false,
            trouble: None,
        }
    }

    fn found(gpus: Vec<SeenGpu>) -> Found {
        let driver = Driver { version: "550.163.01".into(), library_dir: "/usr/lib64".into() };
        Found { driver, gpus, silent: None, groups: Vec::new() }
    }

    /// A driver root with the nodes that are named. Links to /dev/null stand for them: a test may not make nodes.
    fn root(nodes: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("dev")).unwrap();
        for node in nodes {
            symlink("/dev/null", root.path().join("dev").join(node)).unwrap();
        }
        root
    }

    fn node(found: &Found, root: &Path, policy: &GpuPolicy, before: Option<&Node>) -> Node {
        Node::new(found, root, policy, "boot", before)
    }

    #[test]
    fn what_nvml_says_of_a_gpus_capability_outlives_the_gpu() {
        let root = root(&ALL);
        let both = found(vec![seen(1), SeenGpu { capability: None, ..seen(2) }]);
        let before = node(&both, root.path(), &GpuPolicy::default(), None);
        assert_eq!(before.inventory.capabilities, BTreeMap::from([(uuid(1), 90)]));
        let after = node(&found(vec![]), root.path(), &GpuPolicy::default(), Some(&before));
        assert_eq!(after.inventory.capabilities, before.inventory.capabilities);
    }

    #[test]
    fn groups_are_of_what_is_on_offer() {
        let root = root(&ALL);
        let mut found = found(vec![seen(1), seen(2)]);
        found.groups = vec![(Link::NvLink, vec![uuid(2), uuid(1)]), (Link::Pcie, vec![uuid(2), uuid(3)])];
        let all = node(&found, root.path(), &GpuPolicy::default(), None);
        assert_eq!(all.inventory.groups, [GpuGroup { link: Link::NvLink, gpus: vec![1, 0] }]);
        let policy = GpuPolicy { exclude: vec![uuid(1)], ..GpuPolicy::default() };
        assert_eq!(node(&found, root.path(), &policy, None).inventory.groups, []);
    }

    const ALL: [&str; 5] = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia1", "nvidia2"];

    #[test]
    fn a_gpu_offers_its_own_memory_less_the_reserve() {
        let root = root(&ALL);
        let units = |reserved_mib| {
            let policy = GpuPolicy { reserved_mib, ..GpuPolicy::default() };
            node(&found(vec![seen(1)]), root.path(), &policy, None).inventory.gpus[0].memory_units
        };
        assert_eq!(units(0), 318);
        // 81559 MiB are 318 units and 151 MiB.
        assert_eq!(units(151), 318);
        assert_eq!(units(152), 317);
        assert_eq!(units(u64::MAX), 0);
    }

    #[test]
    fn gpus_in_mig_mode_and_excluded_ones_are_left_alone() {
        let root = root(&ALL);
        let policy = GpuPolicy { exclude: vec![uuid(1)], ..GpuPolicy::default() };
        let found = found(vec![seen(1), SeenGpu { mig: true, ..seen(2) }]);
        let node = node(&found, root.path(), &policy, None);
        assert!(node.gpus.is_empty() && node.inventory.gpus.is_empty());
        assert!(node.left_alone[&uuid(1)].contains("gpus.exclude"));
        assert!(node.left_alone[&uuid(2)].contains("MIG"));
    }

    #[test]
    fn nodes_are_recorded_as_a_container_will_see_them() {
        let root = root(&ALL);
        let node = node(&found(vec![seen(1)]), root.path(), &GpuPolicy::default(), None);
        let null = device_node(Path::new("/"), "/dev/null").unwrap();
        let expected = DeviceNode { path: "/dev/nvidia1".into(), ..null };
        assert_eq!(node.inventory.gpus[0].device_nodes, [expected]);
        assert_eq!(node.inventory.control_nodes.len(), 3);
        assert!(node.inventory.gpus[0].healthy);
    }

    #[test]
    fn a_missing_node_makes_its_gpu_sick_and_says_which() {
        let root = root(&["nvidiactl", "nvidia-uvm", "nvidia1"]);
        let node = node(&found(vec![seen(1), seen(2)]), root.path(), &GpuPolicy::default(), None);
        assert_eq!(node.gpus[0].trouble, None);
        let trouble = node.gpus[1].trouble.as_ref().unwrap();
        assert!(
            trouble.contains("/dev/nvidia2 is missing") && trouble.contains("nvidia-modprobe"),
            "{trouble}"
        );
        assert!(!node.inventory.gpus[1].healthy && node.inventory.gpus[1].device_nodes.is_empty());
    }

    #[test]
    fn a_missing_control_node_makes_all_gpus_sick() {
        let root = root(&["nvidiactl", "nvidia1", "nvidia2"]);
        let node = node(&found(vec![seen(1), seen(2)]), root.path(), &GpuPolicy::default(), None);
        assert!(node.gpus.iter().all(|gpu| gpu.trouble.as_ref().unwrap().contains("nvidia-uvm is missing")));
    }

    #[test]
    fn a_file_in_the_place_of_a_node_is_no_node() {
        let root = root(&["nvidiactl", "nvidia-uvm"]);
        fs::write(root.path().join("dev/nvidia1"), "").unwrap();
        let node = node(&found(vec![seen(1)]), root.path(), &GpuPolicy::default(), None);
        assert!(node.gpus[0].trouble.as_ref().unwrap().contains("no character device"));
    }

    #[test]
    fn a_lost_gpu_stays_listed_in_its_place_and_comes_back() {
        let root = root(&ALL);
        let policy = GpuPolicy::default();
        let both = node(&found(vec![seen(1), seen(2)]), root.path(), &policy, None);
        let silent = Some("GPU 0 does not answer: it fell off the bus".into());
        let one = node(&Found { silent, ..found(vec![seen(2)]) }, root.path(), &policy, Some(&both));
        assert_eq!(one.gpus.iter().map(|gpu| &gpu.uuid).collect::<Vec<_>>(), [&uuid(1), &uuid(2)]);
        assert!(one.gpus[0].trouble.as_ref().unwrap().contains("fell off the bus"));
        assert!(!one.inventory.gpus[0].healthy && one.inventory.gpus[1].healthy);
        assert_eq!(node(&found(vec![seen(1), seen(2)]), root.path(), &policy, Some(&one)), both);
    }

    #[test]
    fn a_gpu_that_is_put_into_mig_mode_stays_listed_as_sick() {
        let root = root(&ALL);
        let before = node(&found(vec![seen(1)]), root.path(), &GpuPolicy::default(), None);
        let mig = found(vec![SeenGpu { mig: true, ..seen(1) }]);
        let after = node(&mig, root.path(), &GpuPolicy::default(), Some(&before));
        assert!(after.gpus[0].trouble.as_ref().unwrap().contains("MIG"));
    }

    #[test]
    fn without_a_driver_no_gpu_takes_shares() {
        let root = root(&ALL);
        let node =
            node(&found(vec![seen(1)]), root.path(), &GpuPolicy::default(), None).without_driver("gone");
        assert!(node.gpus[0].trouble.as_ref().unwrap().contains("gone") && !node.inventory.gpus[0].healthy);
    }
}
