use std::{
    fs::File,
    os::unix::{fs::PermissionsExt, net::UnixListener},
};

use ledger::{Driver as InventoryDriver, Gpu};
use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;
use vcuda_config::GpuUuid;

use super::*;
use crate::compat::elf_maker::Maker;

/// A node on which all is well but containerd, which no test of this file has.
struct Node {
    folder: TempDir,
    file: NodeFile,
    /// Held open.
    _sockets: Vec<UnixListener>,
    /// What the daemons hold while they run: NRI plugin, device plugin.
    locks: Vec<File>,
}

fn paths_in(folder: &Path) -> Paths {
    Paths {
        driver_root: folder.join("driver"),
        state: folder.join("state"),
        cdi: folder.join("cdi"),
        install: folder.join("install"),
        kubelet: folder.join("kubelet"),
        nri_socket: folder.join("nri.sock"),
        run: folder.join("run"),
        ..Paths::default()
    }
}

impl Node {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let paths = paths_in(folder.path());
        let libcuda = Maker {
            soname: Some("libcuda.so.1"),
            exports: vec!["cuInit", "cuDeviceGet"],
            ..Maker::default()
        };
        write(&at("driver/usr/lib64/libcuda.so.550.1"), &libcuda.make());
        let needs = vec![("libc.so.6", vec!["GLIBC_2.17"])];
        write(&paths.shim(), &Maker { needs, ..libcuda }.make());
        write(&paths.hook(), &Maker::static_program().make());
        fs::create_dir_all(paths.shares()).unwrap();
        fs::set_permissions(paths.shares(), fs::Permissions::from_mode(0o700)).unwrap();
        fs::create_dir_all(&paths.kubelet).unwrap();
        let sockets = [paths.nri_socket.clone(), paths.kubelet.join("kubelet.sock")]
            .map(|path| UnixListener::bind(path).unwrap());
        let gpu = Gpu {
            uuid: GpuUuid::from_bytes([1; 16]),
            name: "x".into(),
            minor: 0,
            total_bytes: 1 << 30,
            memory_units: 4,
            numa_node: None,
            pci_bus_id: "0".into(),
            healthy: true,
            device_nodes: Vec::new(),
        };
        let driver = InventoryDriver { version: "550.1".into(), library_dir: "/usr/lib64".into() };
        Inventory::new(ledger::boot_id().unwrap(), driver, Vec::new(), vec![gpu])
            .store(&paths.inventory())
            .unwrap();
        fs::create_dir_all(&paths.run).unwrap();
        let locks = [paths.nri_plugin_lock(), paths.device_plugin_lock()].map(|path| {
            let lock = File::create(path).unwrap();
            flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
            lock
        });
        fs::write(paths.nri_plugin_ready(), format!("containerd v2.1.9\n{}\n", std::process::id())).unwrap();
        let file = NodeFile { paths, ..NodeFile::default() };
        let node = Self { file, folder, _sockets: sockets.into(), locks: locks.into() };
        node.spec(|_| {});
        node
    }

    /// Writes the specification, after `change`.
    fn spec(&self, change: impl FnOnce(&mut serde_json::Value)) {
        let hook = self.file.paths.hook();
        let mut spec = serde_json::json!({
            "cdiVersion": "0.6.0",
            "kind": CDI_KIND,
            "devices": [
                {"name": "share", "containerEdits": {"mounts": [{"hostPath": hook, "containerPath": "/x"}]}},
                {"name": "whole", "containerEdits": {}},
            ],
            "containerEdits": {"hooks": [
                {"hookName": "createContainer", "path": hook, "args": ["vcuda-hook", "create-container"], "env": ["A=1"]},
            ]},
        });
        change(&mut spec);
        write(&self.file.paths.cdi.join("tencent.com-vcuda.json"), spec.to_string().as_bytes());
    }

    fn ids(&self) -> Vec<&'static str> {
        let report = check(&self.file, Path::new("/no/containerd"), None);
        report.findings.iter().map(Finding::name).filter(|id| *id != "containerd-unknown").collect()
    }
}

fn write(path: &Path, bytes: &[u8]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
#[ignore = "root: what is checked must belong to it"]
fn a_node_on_which_all_is_well_is_left_open_only_for_containerd() {
    let node = Node::new();
    let report = check(&node.file, Path::new("/no/containerd"), None);
    let ids: Vec<_> = report.findings.iter().map(Finding::name).collect();
    assert_eq!(
        (ids.as_slice(), report.verdict, report.gpus),
        (&["containerd-unknown"][..], Verdict::Unknown, 1)
    );
}

#[test]
#[ignore = "root: what is checked must belong to it"]
fn whatever_is_missing_is_named() {
    let without = |remove: fn(&Node)| {
        let node = Node::new();
        remove(&node);
        node.ids()
    };
    assert_eq!(without(|node| fs::remove_dir_all(&node.file.paths.driver_root).unwrap()), ["driver-missing"]);
    assert_eq!(without(|node| fs::remove_file(node.file.paths.shim()).unwrap()), ["shim-missing"]);
    assert_eq!(without(|node| fs::remove_file(node.file.paths.inventory()).unwrap()), ["inventory-missing"]);
    assert_eq!(without(|node| fs::remove_file(&node.file.paths.nri_socket).unwrap()), ["nri-socket-missing"]);
    assert_eq!(
        without(|node| fs::remove_dir_all(&node.file.paths.kubelet).unwrap()),
        ["kubelet-socket-missing"]
    );
    assert_eq!(without(|node| fs::remove_dir_all(&node.file.paths.cdi).unwrap()), ["cdi-spec-missing"]);
    let ids = without(|node| fs::remove_dir_all(&node.file.paths.install).unwrap());
    assert_eq!(ids, ["not-installed", "cdi-spec-stale", "cdi-spec-stale"]);
    let ids = without(|node| fs::remove_file(node.file.paths.hook()).unwrap());
    assert_eq!(ids, ["hook-missing", "cdi-spec-stale", "cdi-spec-stale"]);
}

/// With one of them down no share starts, whatever else is well: it comes first.
#[test]
#[ignore = "root: what is checked must belong to it"]
fn a_daemon_that_is_down_is_told_first_and_refused() {
    let told = |change: fn(&mut Node)| {
        let mut node = Node::new();
        change(&mut node);
        let report = check(&node.file, Path::new("/no/containerd"), None);
        let told = report.findings.iter().map(|finding| {
            assert!(
                finding.file.as_ref().is_some_and(|file| file.starts_with(&node.file.paths.run))
                    || finding.name() == "containerd-unknown"
            );
            format!("{}: {}", finding.name(), finding.what)
        });
        (report.verdict, told.take_while(|told| !told.starts_with("containerd-unknown")).collect::<Vec<_>>())
    };
    let nri = "nri-plugin-down: vcuda-nri-plugin does not run: no process holds this lock";
    let device = "device-plugin-down: vcuda-device-plugin does not run: no process holds this lock";
    // Killed: what it left is of nobody. Stopped in order; never started, as before a rollout.
    let refused =
        |ids: &[&str]| (Verdict::DoesNotFit, ids.iter().map(ToString::to_string).collect::<Vec<_>>());
    assert_eq!(told(|node| drop(node.locks.remove(0))), refused(&[nri]));
    assert_eq!(told(|node| drop(node.locks.pop())), refused(&[device]));
    assert_eq!(told(|node| fs::remove_dir_all(&node.file.paths.run).unwrap()), refused(&[nri, device]));
    assert_eq!(
        told(|node| fs::remove_file(node.file.paths.nri_plugin_ready()).unwrap()),
        refused(&[
            "nri-plugin-down: vcuda-nri-plugin runs, but is not in service: containerd does not ask it"
        ])
    );
    // A folder in the place of a lock.
    let odd = |node: &mut Node| {
        fs::remove_file(node.file.paths.device_plugin_lock()).unwrap();
        fs::create_dir(node.file.paths.device_plugin_lock()).unwrap();
    };
    let (verdict, found) = told(odd);
    assert_eq!((verdict, found.len()), (Verdict::Unknown, 1));
    assert!(
        found[0].starts_with("device-plugin-unknown: ") && found[0].ends_with("no regular file"),
        "{found:?}"
    );
}

#[test]
fn a_driver_root_that_is_not_there_is_told_from_one_without_a_driver() {
    let node = Node::new();
    let root = node.file.paths.driver_root.clone();
    let told = || {
        let report = check(&node.file, Path::new("/no/containerd"), None);
        let finding = report.findings.into_iter().find(|finding| finding.id == "driver-missing").unwrap();
        assert!(finding.remedy.contains("paths.driverRoot in the node file"), "{finding:?}");
        assert!(finding.what.starts_with(&root.display().to_string()), "{finding:?}");
        finding.what
    };
    fs::remove_dir_all(root.join("usr")).unwrap();
    assert!(told().contains("no libcuda.so.<version> in it"), "{}", told());
    fs::remove_dir(&root).unwrap();
    assert!(told().contains("there is no such folder"), "{}", told());
    fs::write(&root, "").unwrap();
    assert!(told().contains("it is no folder"), "{}", told());
}

#[test]
#[ignore = "root: what is checked must belong to it"]
fn a_specification_that_would_let_a_container_run_unguarded_is_refused() {
    let node = Node::new();
    let with = |change: fn(&mut serde_json::Value)| {
        node.spec(change);
        node.ids()
    };
    assert_eq!(
        with(|spec| spec["containerEdits"]["hooks"][0]["args"][1] = "links".into()),
        ["cdi-spec-unguarded"]
    );
    assert_eq!(
        with(|spec| spec["containerEdits"]["hooks"][0]["env"] = serde_json::json!([])),
        ["cdi-spec-hook-env"]
    );
    assert_eq!(with(|spec| spec["devices"][0]["name"] = "x".into()), ["cdi-spec-broken"]);
    assert_eq!(with(|spec| spec["kind"] = "a/b".into()), ["cdi-spec-broken"]);
    assert_eq!(with(|spec| *spec = "x".into()), ["cdi-spec-broken"]);
    let nodes = |spec: &mut serde_json::Value| {
        spec["devices"][0]["containerEdits"]["deviceNodes"] = serde_json::json!([{"path": "/dev/nvidia0"}]);
    };
    assert_eq!(with(nodes), ["cdi-spec-device-nodes"]);
    // What the hook mounts counts as what the runtime does.
    let gone = |spec: &mut serde_json::Value| {
        let args = &mut spec["containerEdits"]["hooks"][0]["args"];
        args.as_array_mut().unwrap().extend(["--driver-file".into(), "/gone::/usr/bin/x".into()]);
    };
    assert_eq!(with(gone), ["cdi-spec-stale"]);
}

#[test]
#[ignore = "root: what is checked must belong to it"]
fn what_others_than_root_may_change_is_refused() {
    let node = Node::new();
    fs::set_permissions(node.file.paths.install.join("lib"), fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(node.ids(), ["owner-unsafe"]);
    fs::set_permissions(node.file.paths.install.join("lib"), fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::chown(node.file.paths.hook(), Some(1000), None).unwrap();
    assert_eq!(node.ids(), ["owner-unsafe"]);
}

#[test]
fn a_gpus_capability_is_what_nvml_says_before_what_its_model_has() {
    let mut inventory = Inventory::load(&Node::new().file.paths.inventory()).unwrap();
    let of = |inventory: &Inventory| capability(inventory, &inventory.gpus[0]);
    assert_eq!(of(&inventory), None, "no model of that name");
    inventory.gpus[0].name = "NVIDIA A100".into();
    assert_eq!(of(&inventory), Some(80), "from a file of before NVML was asked");
    inventory.capabilities.insert(inventory.gpus[0].uuid.clone(), 103);
    assert_eq!(of(&inventory), Some(103));
}

#[test]
#[ignore = "root: what is checked must belong to it"]
fn functions_of_the_driver_that_the_shim_does_not_know_are_told() {
    let node = Node::new();
    let newer =
        Maker { soname: Some("libcuda.so.1"), exports: vec!["cuInit", "cuQuantumAlloc"], ..Maker::default() };
    write(&node.folder.path().join("driver/usr/lib64/libcuda.so.550.1"), &newer.make());
    let report = check(&node.file, Path::new("/no/containerd"), None);
    let finding = report.findings.iter().find(|finding| finding.id == "driver-newer-than-shim").unwrap();
    assert_eq!(finding.severity, Severity::Warn);
    assert!(
        finding.what.contains("cuQuantumAlloc") && finding.remedy.contains("1 may take memory"),
        "{finding:?}"
    );

    // NVML's come with their own categories, those that matter first.
    let nvml = |exports| Maker { soname: Some("libnvidia-ml.so.1"), exports, ..Maker::default() };
    let library = node.folder.path().join("driver/usr/lib64/libnvidia-ml.so.550.1");
    let told = |exports: Vec<&'static str>| {
        write(&library, &nvml(exports).make());
        let report = check(&node.file, Path::new("/no/containerd"), None);
        report.findings.into_iter().find(|finding| finding.id == "nvml-newer-than-shim")
    };
    let finding =
        told(vec!["nvmlDeviceGetFan", "nvmlDeviceGetMemoryInfo_v9", "nvmlDeviceGetProcesses"]).unwrap();
    assert_eq!(finding.severity, Severity::Warn);
    assert!(
        finding
            .what
            .contains("not know: nvmlDeviceGetMemoryInfo_v9, nvmlDeviceGetProcesses, nvmlDeviceGetFan")
    );
    assert!(finding.remedy.contains("1 may tell of memory, 1 may tell of processes"), "{finding:?}");
    assert_eq!(told(vec!["nvmlDeviceGetFan"]).unwrap().severity, Severity::Info);
    assert_eq!(told(vec![]), None);
}

/// Whoever reads a report, a person or a program, is told of each finding all that there is.
#[test]
fn every_finding_says_what_where_why_and_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let paths = paths_in(folder.path());
    // Nothing is there, and containerd answers that all is off.
    let containerd = at("containerd");
    let answer = "#!/bin/sh\n[ \"$1\" = --version ] && echo 'containerd github.com/x v1.7.1 y' && exit\n\
        echo 'version = 2\n[plugins]\n[plugins.\"io.containerd.nri.v1.nri\"]\ndisable = true\n\
        socket_path = \"/x\"'\n";
    write(&containerd, answer.as_bytes());
    let file = NodeFile { paths, ..NodeFile::default() };
    let mut findings = check(&file, &containerd, None).findings;
    findings.extend(check(&file, Path::new("/no/containerd"), None).findings);
    for id in [
        "not-installed",
        "nri-plugin-down",
        "device-plugin-down",
        "driver-missing",
        "inventory-missing",
        "containerd-unknown",
        "nri-off",
        "nri-socket-other",
    ] {
        assert!(findings.iter().any(|finding| finding.id == id), "{id}: {findings:?}");
    }
    for finding in findings {
        assert!(finding.file.is_some(), "{finding:?}");
        assert!(![finding.what.as_str(), &finding.why, &finding.remedy].contains(&""), "{finding:?}");
    }
}
