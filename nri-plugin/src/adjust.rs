//! What a container with a share gets: device nodes, the shim and where it is found, limits and usage, and the
//! annotation that the guard looks for. Pure functions; binding and files are elsewhere.

use std::path::{Path, PathBuf};

use ledger::{DeviceNode, Inventory, ShareFolder, ShareRecord};
use protobuf::MessageField;
use region::place;
use vcuda_config::{Paths, annotation, plain};

use crate::wire::{
    Container, ContainerAdjustment, KeyValue, LinuxContainerAdjustment, LinuxDevice, Mount, OptionalUInt32,
};

/// The variable that names libraries for the loader to load first.
const LD_PRELOAD: &str = "LD_PRELOAD";

/// A read-only file of ours. `exec` stays allowed, for libraries.
const READ_ONLY: [&str; 5] = ["bind", "ro", "nosuid", "nodev", "rprivate"];

/// A file of ours that the container writes.
const WRITABLE: [&str; 6] = ["bind", "rw", "nosuid", "nodev", "noexec", "rprivate"];

/// Folder in the container for what is ours alone. It is a file system of its own, in memory: on the image's a runtime
/// makes a file or folder for each mount, and that takes most of the time that a mount does.
const FOLDER: &str = "/usr/local/vcuda";

/// A runtime makes it read-only when all mounts are in place.
const FOLDER_OPTIONS: [&str; 6] = ["ro", "nosuid", "nodev", "noexec", "mode=0755", "size=64k"];

/// Where in the container our files go, for the driver of `inventory`.
fn mounts(
    inventory: &Inventory,
    folder: &ShareFolder,
    paths: &Paths,
) -> Vec<(PathBuf, PathBuf, &'static [&'static str])> {
    let library =
        |name: &str| inventory.driver.library_dir.join(format!("{name}.so.{}", inventory.driver.version));
    let shim = paths.shim();
    vec![
        (place::SHIM.into(), shim.clone(), &READ_ONLY),
        // The same file where the driver's own libraries are looked up: the loader knows it by its inode and loads it
        // once.
        (library("libcuda"), shim.clone(), &READ_ONLY),
        (library("libnvidia-ml"), shim, &READ_ONLY),
        (place::LD_SO_PRELOAD.into(), folder.preload(), &READ_ONLY),
        (place::LIMITS.into(), folder.limits(), &READ_ONLY),
        (place::USAGE.into(), folder.usage(), &WRITABLE),
    ]
}

/// The adjustment for a container whose share is `record`.
pub fn adjustment(
    record: &ShareRecord,
    folder: &ShareFolder,
    inventory: &Inventory,
    paths: &Paths,
    container: &Container,
) -> ContainerAdjustment {
    let mut adjustment = ContainerAdjustment::default();
    let name = format!("{}_{}", record.pod.uid, record.container.name);
    adjustment.annotations.insert(annotation::SHARE.into(), name);
    let gpu_nodes =
        record.gpus.iter().filter_map(|share| inventory.gpu(&share.uuid)).flat_map(|gpu| &gpu.device_nodes);
    let devices = inventory.control_nodes.iter().chain(gpu_nodes).map(device).collect();
    adjustment.linux =
        MessageField::some(LinuxContainerAdjustment { devices, ..LinuxContainerAdjustment::default() });
    if record.shim {
        let mount = |kind: &str, to: &Path, from: &Path, options: &[&str]| Mount {
            destination: text(to),
            source: text(from),
            type_: kind.into(),
            options: options.iter().map(|&option| option.into()).collect(),
            ..Mount::default()
        };
        let room = mount("tmpfs", Path::new(FOLDER), Path::new("tmpfs"), &FOLDER_OPTIONS);
        let files = mounts(inventory, folder, paths);
        let files = files.iter().map(|(to, from, options)| mount("bind", to, from, options));
        adjustment.mounts = [room].into_iter().chain(files).collect();
        adjustment.env =
            vec![KeyValue { key: LD_PRELOAD.into(), value: preload(&container.env), ..KeyValue::default() }];
    }
    adjustment
}

/// Why a container cannot be held to its share whatever it gets from us. The text says what to do.
pub fn unenforceable(
    record: &ShareRecord,
    folder: &ShareFolder,
    inventory: &Inventory,
    paths: &Paths,
    container: &Container,
) -> Option<String> {
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
    let ours = mounts(inventory, folder, paths);
    for mount in &container.mounts {
        let destination = plain(Path::new(&mount.destination));
        if destination == Path::new(FOLDER) || ours.iter().any(|(to, ..)| *to == destination) {
            return Some(format!(
                "it has a mount of its own at {}, where vcuda mounts its control file; remove that volume mount",
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
