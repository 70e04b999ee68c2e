//! What a container with a share gets through NRI: device nodes, the variable that preloads the shim, and the annotation
//! that the guard looks for, which mounts the rest. Pure functions; binding and files are elsewhere.

use std::path::{Path, PathBuf};

use ledger::{DeviceNode, Inventory, ShareRecord};
use protobuf::MessageField;
use region::place;
use vcuda_config::{annotation, plain};

use crate::wire::{
    Container, ContainerAdjustment, KeyValue, LinuxContainerAdjustment, LinuxDevice, OptionalUInt32,
};

/// The variable that names libraries for the loader to load first.
const LD_PRELOAD: &str = "LD_PRELOAD";

/// Files that the guard mounts for the driver of `inventory`, beside those in [`place::FOLDER`].
fn places(inventory: &Inventory) -> [PathBuf; 3] {
    let library =
        |name: &str| inventory.driver.library_dir.join(format!("{name}.so.{}", inventory.driver.version));
    [library("libcuda"), library("libnvidia-ml"), place::LD_SO_PRELOAD.into()]
}

/// The adjustment for a container whose share is `record`.
pub fn adjustment(record: &ShareRecord, inventory: &Inventory, container: &Container) -> ContainerAdjustment {
    let mut adjustment = ContainerAdjustment::default();
    let name = format!("{}_{}", record.pod.uid, record.container.name);
    adjustment.annotations.insert(annotation::SHARE.into(), name);
    let gpu_nodes =
        record.gpus.iter().filter_map(|share| inventory.gpu(&share.uuid)).flat_map(|gpu| &gpu.device_nodes);
    let devices = inventory.control_nodes.iter().chain(gpu_nodes).map(device).collect();
    adjustment.linux =
        MessageField::some(LinuxContainerAdjustment { devices, ..LinuxContainerAdjustment::default() });
    if record.shim {
        adjustment.env =
            vec![KeyValue { key: LD_PRELOAD.into(), value: preload(&container.env), ..KeyValue::default() }];
    }
    adjustment
}

/// Why a container cannot be held to its share whatever it gets from us. The text says what to do.
pub fn unenforceable(record: &ShareRecord, inventory: &Inventory, container: &Container) -> Option<String> {
    let owned = |at: &LinuxDevice| {
        inventory.gpus.iter().find(|gpu| {
            gpu.device_nodes.iter().any(|node| (node.major.into(), node.minor.into()) == (at.major, at.minor))
        })
    };
    for device in &container.linux.devices {
        if let Some(gpu) = owned(device)
            && !record.gpus.iter().any(|share| share.uuid == gpu.uuid)
        {
            return Some(format!(
                "it already has {} of {}, which is not its GPU; drop `privileged: true`, or whatever else gives it \
                 that device",
                shown(&device.path),
                gpu.uuid
            ));
        }
    }
    if !record.shim {
        return None;
    }
    let all_devices = container.linux.resources.devices.iter().any(|rule| {
        rule.allow && rule.major.is_none() && rule.minor.is_none() && rule.access.contains(['r', 'w'])
    });
    if all_devices {
        return Some(
            "it is privileged, so no limit on it can hold; drop `privileged: true`, or ask for whole GPUs \
             (vcuda-core: 100)"
                .into(),
        );
    }
    let ours = places(inventory);
    for mount in &container.mounts {
        let destination = plain(Path::new(&mount.destination));
        if destination.starts_with(place::FOLDER) || ours.contains(&destination) {
            return Some(format!(
                "it has a mount of its own at {}, where vcuda mounts its control files; remove that volume mount",
                shown(&mount.destination)
            ));
        }
    }
    None
}

/// The container's `LD_PRELOAD` with the shim before whatever it had. ld.so separates by colons and spaces.
fn preload(env: &[String]) -> String {
    let had = env.iter().filter_map(|variable| variable.strip_prefix("LD_PRELOAD="));
    let mut all = vec![place::SHIM];
    for library in had.flat_map(|value| value.split([':', ' '])) {
        if !library.is_empty() && !all.contains(&library) {
            all.push(library);
        }
    }
    all.join(":")
}

fn device(node: &DeviceNode) -> LinuxDevice {
    let number = |value| MessageField::some(OptionalUInt32 { value, ..OptionalUInt32::default() });
    LinuxDevice {
        path: text(&node.path),
        type_: "c".into(),
        major: node.major.into(),
        minor: node.minor.into(),
        file_mode: number(node.file_mode),
        uid: number(node.uid),
        gid: number(node.gid),
        ..LinuxDevice::default()
    }
}

/// Paths of ours come from the node file and the inventory, both of which are text.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn shown(text: &str) -> String {
    text.chars().take(200).collect()
}
