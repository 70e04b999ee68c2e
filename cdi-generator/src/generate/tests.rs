use std::{fs, os::unix::net::UnixListener};

use super::*;
use crate::{
    driver::tests::{Root, VERSION},
    folders::Registry,
};

/// A node with a driver.
struct Node {
    root: Root,
    folder: tempfile::TempDir,
    paths: Paths,
}

impl Node {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths {
            cdi: folder.path().join("cdi"),
            install: folder.path().join("install"),
            state: "/var/lib/vcuda".into(),
            ..Paths::default()
        };
        fs::create_dir_all(paths.install.join("bin")).unwrap();
        fs::write(paths.hook(), "").unwrap();
        Self { root: Root::whole("/usr/lib64"), folder, paths }
    }

    fn spec(&self) -> Spec {
        spec(&self.paths, &self.root.discover().unwrap())
    }

    fn ensure(&self) -> Result<bool, EnsureError> {
        ensure_spec(&self.paths, &self.root.discover().unwrap())
    }
}

fn places(mounts: &[Mount]) -> Vec<&str> {
    mounts.iter().map(|mount| mount.container_path.as_str()).collect()
}

#[test]
fn the_specification_keeps_the_rules_and_needs_no_new_runtime() {
    let spec = Node::new().spec();
    assert_eq!(rules::faults(&spec), []);
    assert_eq!(spec.cdi_version, "0.3.0");
    assert_eq!(spec.kind, "tencent.com/vcuda");
}

// D2: without the NRI plugin a container has no GPU.
#[test]
fn there_is_no_device_node_in_it() {
    let spec = Node::new().spec();
    let edits = spec.devices.iter().map(|device| &device.container_edits).chain([&spec.container_edits]);
    assert_eq!(edits.map(|edits| edits.device_nodes.len()).sum::<usize>(), 0);
    assert!(!spec.to_json().contains("/dev/"));
}

#[test]
fn a_share_finds_the_drivers_own_libraries_behind_the_shim_and_whole_gpus_in_their_place() {
    let node = Node::new();
    let spec = node.spec();
    let [share, whole] = &spec.devices[..] else { panic!("{spec:?}") };
    assert_eq!((share.name.as_str(), whole.name.as_str()), ("share", "whole"));
    assert_eq!(
        places(&whole.container_edits.mounts)[..2],
        [format!("/usr/lib64/libcuda.so.{VERSION}"), format!("/usr/lib64/libnvidia-ml.so.{VERSION}")]
    );
    // Those of a share the hook mounts, with all else that a share has.
    assert!(share.container_edits.mounts.is_empty(), "{share:?}");
    let behind = |device: &Device| -> Vec<String> {
        let args = &device.container_edits.hooks[0].args;
        args.windows(2).filter(|pair| pair[0] == "--driver-file").map(|pair| pair[1].clone()).collect()
    };
    let host = |at: usize| whole.container_edits.mounts[at].host_path.clone();
    assert_eq!(host(0), node.root.at(&format!("/usr/lib64/libcuda.so.{VERSION}")).to_str().unwrap());
    let files = behind(share);
    assert_eq!(
        files[..2],
        [format!("{}::{}", host(0), place::REAL_CUDA), format!("{}::{}", host(1), place::REAL_NVML)]
    );
    // All else of the driver is where it is for whole GPUs.
    let smi = node.root.at("/usr/bin/nvidia-smi");
    assert!(files.contains(&format!("{}::/usr/bin/nvidia-smi", smi.display())), "{files:?}");
    for file in &files[2..] {
        let (host, place) = file.split_once("::").unwrap();
        let same = |mount: &&Mount| mount.host_path == host && mount.container_path == place;
        assert!(whole.container_edits.mounts.iter().any(|mount| same(&mount)), "{file}");
        // What stands in the shim's place is behind it alone.
        assert!(!place.contains("libcuda.so") && !place.contains("libnvidia-ml"), "{file}");
    }
    assert!(behind(whole).is_empty());
    assert!(spec.container_edits.mounts.is_empty());
}

#[test]
fn files_are_read_only_and_sockets_can_be_spoken_to() {
    let node = Node::new();
    fs::create_dir_all(node.root.at("run/nvidia-persistenced")).unwrap();
    let _daemon = UnixListener::bind(node.root.at("run/nvidia-persistenced/socket")).unwrap();
    let spec = node.spec();
    let edits = spec.devices.iter().map(|device| &device.container_edits).chain([&spec.container_edits]);
    let mounts: Vec<_> = edits.flat_map(|edits| &edits.mounts).collect();
    assert!(mounts.len() > 6);
    for mount in mounts {
        let options: Vec<_> = mount.options.iter().map(String::as_str).collect();
        for option in ["nosuid", "nodev", "rbind", "rprivate"] {
            assert!(options.contains(&option), "{mount:?}");
        }
        let socket = mount.container_path.ends_with("/socket");
        assert_eq!(options.contains(&"ro"), !socket, "{mount:?}");
        assert_eq!(options.contains(&"noexec"), socket, "{mount:?}");
    }
}

// OpenCL's library opens the device nodes itself: nothing could hold a share's memory ceiling.
#[test]
fn what_reaches_the_gpu_past_cuda_is_for_whole_gpus_only() {
    let spec = Node::new().spec();
    let has =
        |edits: &ContainerEdits| serde_json::to_string(edits).unwrap().to_lowercase().contains("opencl");
    assert!(!has(&spec.container_edits));
    assert!(!has(&spec.devices[0].container_edits));
    assert!(has(&spec.devices[1].container_edits));
    let places = places(&spec.devices[1].container_edits.mounts);
    assert_eq!(
        places[2..4],
        [&format!("/usr/lib64/libnvidia-opencl.so.{VERSION}"), "/etc/OpenCL/vendors/nvidia.icd"]
    );
}

fn all_hooks(spec: &Spec) -> Vec<Hook> {
    spec.devices.iter().flat_map(|device| device.container_edits.hooks.clone()).collect()
}

// CVE-2025-23266.
#[test]
fn every_hook_has_an_environment_of_its_own() {
    let hooks = all_hooks(&Node::new().spec());
    assert_eq!(hooks.len(), 2);
    for hook in hooks {
        assert!(!hook.env.is_empty(), "{hook:?}");
        assert_eq!(hook.hook_name, "createContainer");
        assert!(Path::new(&hook.path).is_absolute());
    }
}

#[test]
fn one_hook_gets_the_links_and_names_of_every_library_and_the_guards_places() {
    let node = Node::new();
    for device in node.spec().devices {
        let [hook] = &device.container_edits.hooks[..] else { panic!("{device:?}") };
        let args = hook.args.join(" ");
        assert!(args.starts_with("vcuda-hook create-container "), "{args}");
        for link in [
            format!("--link libcuda.so.{VERSION}::/usr/lib64/libcuda.so.1"),
            "--link libcuda.so.1::/usr/lib64/libcuda.so".into(),
            format!("--link libnvidia-ml.so.{VERSION}::/usr/lib64/libnvidia-ml.so.1"),
            format!("--link libnvidia-nvvm.so.{VERSION}::/usr/lib64/libnvidia-nvvm.so.4"),
        ] {
            assert!(args.contains(&link), "{link}: {args}");
        }
        // Its name is its soname: a link would be in the way of its own target.
        assert!(!args.contains("--link libnvidia-gpucomp"));
        for name in ["libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-gpucomp.so.550.163.01"] {
            assert!(args.contains(&format!("--library /usr/lib64/{name}")), "{name}: {args}");
        }
        let install = node.paths.install.display();
        let places = format!("--state /var/lib/vcuda --install {install} --config /etc/vcuda/config.yaml");
        assert!(args.ends_with(&places), "{args}");
    }
}

#[test]
fn no_link_is_where_a_library_is_mounted() {
    let library = |name: &str, soname: &str| Library {
        folder: "/usr/lib64".into(),
        name: name.into(),
        soname: soname.into(),
        host: "/".into(),
    };
    let (versioned, plain) = (library("libx.so.550.1", "libx.so.4"), library("libx.so.4", "libx.so.4"));
    assert_eq!(links_of(&[&versioned]).len(), 1);
    assert_eq!(links_of(&[&versioned, &plain]).len(), 0);
}

#[test]
fn the_hook_takes_the_arguments_that_are_written_for_it() {
    for hook in all_hooks(&Node::new().spec()) {
        for pair in hook.args[2..].chunks(2) {
            match pair[0].as_str() {
                "--link" => assert!(pair[1].parse::<oci_hooks::links::Link>().is_ok(), "{pair:?}"),
                "--library" => {
                    assert!(pair[1].parse::<oci_hooks::ldcache::LibraryPath>().is_ok(), "{pair:?}")
                }
                "--driver-file" => {
                    assert!(pair[1].parse::<oci_hooks::guard::DriverFile>().is_ok(), "{pair:?}")
                }
                "--state" | "--install" | "--config" => {
                    assert!(Path::new(&pair[1]).is_absolute(), "{pair:?}")
                }
                other => panic!("{other}"),
            }
        }
    }
}

#[test]
fn the_file_is_written_once_and_again_when_the_driver_changes() {
    let node = Node::new();
    assert!(node.ensure().unwrap());
    let path = node.folder.path().join("cdi/tencent.com-vcuda.json");
    assert_eq!(spec_path(&node.paths), path);
    assert_eq!(crate::file::read(&path).unwrap(), node.spec());
    assert!(!node.ensure().unwrap());

    let old = node.root.at(&format!("/usr/lib64/libnvidia-ptxjitcompiler.so.{VERSION}"));
    fs::remove_file(old).unwrap();
    assert!(node.ensure().unwrap());
    fs::remove_file(&path).unwrap();
    assert!(node.ensure().unwrap(), "/var/run is empty after a reboot");

    let registry = Registry::read(std::slice::from_ref(&node.paths.cdi)).unwrap();
    assert!(registry.is_sound());
    let names: Vec<_> = registry.devices.keys().map(String::as_str).collect();
    assert_eq!(names, ["tencent.com/vcuda=share", "tencent.com/vcuda=whole"]);
}

#[test]
fn without_the_hooks_program_no_specification_is_written() {
    let node = Node::new();
    fs::remove_file(node.paths.hook()).unwrap();
    let error = node.ensure().unwrap_err().to_string();
    assert!(error.contains("bin/vcuda-hook") && error.contains("install"), "{error}");
    assert!(!node.paths.cdi.exists());
}
