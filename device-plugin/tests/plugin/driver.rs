//! The real program with the simulated driver and a kubelet that speaks the real protocol. Device nodes need root, so
//! these tests are run on request: `cargo test -p device-plugin -- --ignored`.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use crate::daemon::{Daemon, Node, verdict};
use crate::kubelet::{Kubelet, Plugin};
use device_plugin::{kubelet::api::Device, offer::Resource};
use ledger::Inventory;
use vcuda_config::Link;

/// Where the simulated driver's programs are, built when they are first asked for: this crate does not depend on
/// them, so Cargo does not build them for it. The folder is this test's own.
fn programs() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sim-driver");
        let built = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--locked", "-p", "sim-gpud", "-p", "sim-cuda", "-p", "sim-nvml"])
            .arg("--target-dir")
            .arg(&folder)
            .status();
        assert!(built.unwrap().success());
        let folder = folder.join("debug");
        // The names by which sim-gpud finds them.
        for (name, built) in [("libcuda.so", "libsim_cuda.so"), ("libnvidia-ml.so", "libsim_nvml.so")] {
            let _ = fs::remove_file(folder.join(name));
            symlink(built, folder.join(name)).unwrap();
        }
        folder
    })
}

/// A module that does not answer by then never will.
const PATIENCE: Duration = Duration::from_secs(60);

/// The simulated kernel module under a node's driver root.
struct Module {
    root: PathBuf,
    process: Child,
}

impl Module {
    fn load(node: &Node, gpus: u32) -> Self {
        Self::load_with(node, &["--gpus", &gpus.to_string()])
    }

    fn load_with(node: &Node, arguments: &[&str]) -> Self {
        let root = node.path("driver");
        fs::create_dir_all(&root).unwrap();
        let mut command = Command::new(programs().join("sim-gpud"));
        command.arg("--root").arg(&root).args(arguments);
        Self { root, process: command.stdout(Stdio::null()).spawn().unwrap() }
    }

    fn happens(&self, what: &[&str]) {
        // It may just have been started.
        let deadline = Instant::now() + PATIENCE;
        while !self.root.join("run/sim-gpud/control").exists() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
        }
        let mut command = Command::new(programs().join("sim-gpud"));
        assert!(command.arg("ctl").arg("--root").arg(&self.root).args(what).status().unwrap().success());
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Devices of the GPU number `gpu` (of 2) are all unhealthy, and no other.
fn sick(gpu: Option<usize>) -> impl Fn(&[Device]) -> bool {
    move |devices| {
        let half = devices.len() / 2;
        (0..devices.len()).all(|at| (devices[at].health == "Unhealthy") == (gpu == Some(at / half)))
    }
}

/// Stops the program; kubelet goes on meanwhile.
async fn stop(daemon: Daemon) {
    assert!(tokio::task::spawn_blocking(|| daemon.stop()).await.unwrap().success());
}

async fn both(kubelet: &mut Kubelet) -> [Plugin; 2] {
    [kubelet.plugin(Resource::Core).await, kubelet.plugin(Resource::Memory).await]
}

#[tokio::test]
#[ignore = "needs root: device nodes"]
async fn a_share_is_granted_from_what_nvml_sees() {
    let node = Node::new();
    let _module = Module::load(&node, 2);
    let mut kubelet = Kubelet::start(&node.kubelet());
    let daemon = node.start();
    let [core, memory] = both(&mut kubelet).await;
    let devices = core.devices_where(sick(None)).await;
    assert_eq!(devices.len(), 200);
    // 40960 MiB a GPU.
    assert_eq!(memory.devices_where(sick(None)).await.len(), 2 * 160);

    // What kubelet was told is on disk before.
    let inventory = Inventory::load(&node.path("state/inventory.json")).unwrap();
    assert_eq!(inventory.driver.library_dir, Path::new("/usr/lib/x86_64-linux-gnu"));
    let nodes: Vec<_> = inventory.control_nodes.iter().map(|node| node.path.to_str().unwrap()).collect();
    assert_eq!(nodes, ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]);
    let gpu = &inventory.gpus[1];
    assert_eq!(gpu.device_nodes[0].path, Path::new("/dev/nvidia1"));
    assert_eq!((gpu.device_nodes[0].major, gpu.device_nodes[0].minor), (195, 1));
    assert!(devices[100].id.starts_with(gpu.uuid.as_str()) && gpu.healthy);

    let spec = node.path("cdi/tencent.com-vcuda.json");
    fs::remove_file(&spec).unwrap();
    let ids = devices[100..120].iter().map(|device| device.id.clone()).collect();
    let answer = core.allocate(ids).await.unwrap();
    assert_eq!(answer.cdi_devices[0].name, "tencent.com/vcuda=share");
    assert!(spec.exists());

    let shown = node.run(&["status", "-o", "json"]);
    let status: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(status["pluginRunning"], true);
    assert_eq!(status["gpus"][1]["core"]["free"], 100);

    stop(daemon).await;
    core.closed().await;
    assert!(!node.kubelet().join(Resource::Core.socket()).exists());
}

#[tokio::test]
#[ignore = "needs root: device nodes"]
async fn links_between_gpus_are_in_the_inventory() {
    let node = Node::new();
    let machine = node.path("machine.yaml");
    let text = "version: 1\ngpus:\n- {count: 2, numa: 0, pciSwitch: 0}\n- {count: 2, numa: 1, pciSwitch: 1}\n\
                links:\n- {gpus: [0, 1], by: nvlink, each: 2}\n";
    fs::write(&machine, text).unwrap();
    let _module = Module::load_with(&node, &["--config", machine.to_str().unwrap()]);
    let mut kubelet = Kubelet::start(&node.kubelet());
    let daemon = node.start();
    let [core, _] = both(&mut kubelet).await;
    core.devices_where(sick(None)).await;
    let inventory = Inventory::load(&node.path("state/inventory.json")).unwrap();
    let groups: Vec<_> = inventory.groups.into_iter().map(|group| (group.link, group.gpus)).collect();
    for group in [(Link::NvLink, vec![0, 1]), (Link::Pcie, vec![0, 1]), (Link::Pcie, vec![2, 3])] {
        assert!(groups.contains(&group), "{group:?} in {groups:?}");
    }
    let fits = node.run(&["explain", "--core", "200"]);
    assert!(
        fits.status.success() && String::from_utf8_lossy(&fits.stdout).contains("NVLink connects"),
        "{fits:?}"
    );
    let too_much = node.run(&["explain", "--core", "500", "-o", "json"]);
    assert_eq!(too_much.status.code(), Some(10));
    let said: serde_json::Value = serde_json::from_slice(&too_much.stdout).unwrap();
    assert_eq!(said["each"].as_array().unwrap().len(), 4);
    stop(daemon).await;
}

#[tokio::test]
#[ignore = "needs root: device nodes"]
async fn a_driver_that_comes_late_is_picked_up() {
    let node = Node::new();
    let mut kubelet = Kubelet::start(&node.kubelet());
    let mut daemon = node.start();
    daemon.says("waiting for it");
    let _module = Module::load(&node, 2);
    let [core, _] = both(&mut kubelet).await;
    core.devices_where(sick(None)).await;
    stop(daemon).await;
}

#[tokio::test]
#[ignore = "needs root: device nodes"]
async fn an_xid_and_the_loss_of_a_gpu_keep_shares_off_it_until_it_is_well() {
    let node = Node::new();
    let module = Module::load(&node, 2);
    let mut kubelet = Kubelet::start(&node.kubelet());
    let mut daemon = node.start();
    let [core, memory] = both(&mut kubelet).await;
    let devices = core.devices_where(sick(None)).await;

    module.happens(&["xid", "--gpu", "1", "31"]);
    daemon.says("XID of an application, ignored");
    core.devices_where(sick(None)).await;
    module.happens(&["xid", "--gpu", "1", "79"]);
    for resource in [&core, &memory] {
        resource.devices_where(sick(Some(1))).await;
    }
    let refused = core.allocate(vec![devices[100].id.clone()]).await.unwrap_err();
    assert!(refused.message().contains("XID 79"), "{refused}");
    core.allocate(vec![devices[0].id.clone()]).await.unwrap();

    module.happens(&["lose", "--gpu", "0"]);
    // The other one has been quiet by then.
    core.devices_where(sick(Some(0))).await;
    let refused = core.allocate(vec![devices[0].id.clone()]).await.unwrap_err();
    assert!(refused.message().contains("it is lost"), "{refused}");
    let inventory = Inventory::load(&node.path("state/inventory.json")).unwrap();
    assert_eq!(inventory.gpus.iter().map(|gpu| gpu.healthy).collect::<Vec<_>>(), [false, true]);

    module.happens(&["recover", "--gpu", "0"]);
    for resource in [&core, &memory] {
        resource.devices_where(sick(None)).await;
    }
    core.allocate(vec![devices[0].id.clone()]).await.unwrap();
    stop(daemon).await;
}

#[tokio::test]
#[ignore = "needs root: device nodes"]
async fn shares_that_run_on_a_gpu_that_falls_ill_are_named() {
    let node = Node::new();
    let module = Module::load(&node, 2);
    let mut kubelet = Kubelet::start(&node.kubelet());
    let mut daemon = node.start();
    let [core, _] = both(&mut kubelet).await;
    core.devices_where(sick(None)).await;
    let inventory = Inventory::load(&node.path("state/inventory.json")).unwrap();
    for (at, pod) in [(0, "well"), (1, "ill")] {
        let share = node.path(&format!("state/shares/{pod}_main"));
        fs::create_dir_all(&share).unwrap();
        let record = serde_json::json!({
            "version": 1, "pod": {"uid": pod, "namespace": "ns", "name": pod, "sandboxId": pod},
            "container": {"name": "main", "id": pod}, "bootId": "b", "kind": "share",
            "gpus": [{"uuid": inventory.gpus[at].uuid, "minor": at, "core": 20, "memoryBytes": 1 << 30}],
            "state": "running", "boundAt": 0, "shim": true,
        });
        fs::write(share.join("share.json"), record.to_string()).unwrap();
    }
    module.happens(&["xid", "--gpu", "1", "79"]);
    core.devices_where(sick(Some(1))).await;
    daemon.says(r#"running="ns/ill main""#);
    stop(daemon).await;
}

/// As after an upgrade of the driver's packages, until the node is rebooted.
#[tokio::test]
#[ignore = "needs root: device nodes"]
async fn a_library_of_another_version_than_the_module_is_told_with_the_remedy() {
    let node = Node::new();
    let module = Module::load(&node, 2);
    module.happens(&["xid", "--gpu", "0", "31"]);
    let library = node.path("driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.550.163.01");
    let right = fs::read(&library).unwrap();
    let mut upgraded = right.clone();
    let at = upgraded.windows(30).position(|at| at.starts_with(b"sim-driver-version=550.163.01/")).unwrap();
    upgraded[at + 28] = b'2';
    // The file is replaced, as a package's is.
    let put = |bytes: &[u8]| {
        fs::write(node.path("fresh"), bytes).unwrap();
        fs::rename(node.path("fresh"), &library).unwrap();
    };
    put(&upgraded);
    let mut kubelet = Kubelet::start(&node.kubelet());
    let mut daemon = node.start();
    daemon.says("the driver was upgraded; reboot the node, or reload the kernel modules");
    put(&right);
    let [core, _] = both(&mut kubelet).await;
    core.devices_where(sick(None)).await;
    stop(daemon).await;
}

#[tokio::test]
#[ignore = "needs root: device nodes"]
async fn memory_errors_that_ecc_cannot_correct_keep_shares_off_their_gpu() {
    let node = Node::new();
    let module = Module::load(&node, 2);
    // What happened before anybody looked is the past's: the counter starts with the driver.
    module.happens(&["ecc", "--gpu", "0", "7"]);
    let mut kubelet = Kubelet::start(&node.kubelet());
    let mut daemon = node.start();
    let [core, memory] = both(&mut kubelet).await;
    let devices = core.devices_where(sick(None)).await;

    module.happens(&["ecc", "--gpu", "1", "1"]);
    for resource in [&core, &memory] {
        resource.devices_where(sick(Some(1))).await;
    }
    daemon.says("memory errors that could not be corrected");
    let refused = core.allocate(vec![devices[100].id.clone()]).await.unwrap_err();
    assert!(refused.message().contains("XID 48"), "{refused}");
    core.allocate(vec![devices[0].id.clone()]).await.unwrap();
    // No further one, so it comes back by itself.
    for resource in [&core, &memory] {
        resource.devices_where(sick(None)).await;
    }

    // Where the memory waits to be retired it does not, however quiet it is.
    module.happens(&["ecc", "--gpu", "1", "--retires", "0"]);
    core.devices_where(sick(Some(1))).await;
    let refused = core.allocate(vec![devices[100].id.clone()]).await.unwrap_err();
    assert!(refused.message().contains("nvidia-smi --gpu-reset"), "{refused}");
    module.happens(&["reset", "--gpu", "1"]);
    for resource in [&core, &memory] {
        resource.devices_where(sick(None)).await;
    }
    core.allocate(vec![devices[100].id.clone()]).await.unwrap();
    stop(daemon).await;
}

#[tokio::test]
#[ignore = "needs root: device nodes"]
async fn memory_rows_that_wait_to_be_replaced_or_cannot_be_keep_shares_off_their_gpu() {
    let node = Node::new();
    let module = Module::load(&node, 2);
    let mut kubelet = Kubelet::start(&node.kubelet());
    let daemon = node.start();
    let [core, memory] = both(&mut kubelet).await;
    let devices = core.devices_where(sick(None)).await;

    module.happens(&["row", "--gpu", "1"]);
    for resource in [&core, &memory] {
        resource.devices_where(sick(Some(1))).await;
    }
    let refused = core.allocate(vec![devices[100].id.clone()]).await.unwrap_err();
    assert!(refused.message().contains("nvidia-smi --gpu-reset"), "{refused}");
    module.happens(&["reset", "--gpu", "1"]);
    for resource in [&core, &memory] {
        resource.devices_where(sick(None)).await;
    }

    module.happens(&["row", "--gpu", "0", "--failed"]);
    core.devices_where(sick(Some(0))).await;
    let refused = core.allocate(vec![devices[0].id.clone()]).await.unwrap_err();
    assert!(refused.message().contains("have the GPU replaced"), "{refused}");
    // No reset helps. That it was looked at after the reset is told by the other one.
    module.happens(&["reset", "--gpu", "0"]);
    module.happens(&["row", "--gpu", "1"]);
    core.devices_where(|devices| devices.iter().all(|device| device.health == "Unhealthy")).await;
    module.happens(&["reset", "--gpu", "1"]);
    core.devices_where(sick(Some(0))).await;
    core.allocate(vec![devices[100].id.clone()]).await.unwrap();
    stop(daemon).await;
}

#[tokio::test]
#[ignore = "needs root: device nodes"]
async fn a_missing_device_node_and_missing_files_keep_shares_off_until_they_are_back() {
    let node = Node::new();
    let _module = Module::load(&node, 2);
    let mut kubelet = Kubelet::start(&node.kubelet());
    let daemon = node.start();
    let [core, _] = both(&mut kubelet).await;
    let devices = core.devices_where(sick(None)).await;

    let (device, aside) = (node.path("driver/dev/nvidia1"), node.path("driver/dev/aside"));
    fs::rename(&device, &aside).unwrap();
    core.devices_where(sick(Some(1))).await;
    fs::rename(&aside, &device).unwrap();
    core.devices_where(sick(None)).await;

    let (libraries, aside) = (node.path("driver/usr"), node.path("driver/aside"));
    fs::rename(&libraries, &aside).unwrap();
    core.devices_where(|devices| devices.iter().all(|device| device.health == "Unhealthy")).await;
    let refused = core.allocate(vec![devices[0].id.clone()]).await.unwrap_err();
    assert!(refused.message().contains("the driver does not answer"), "{refused}");
    fs::rename(&aside, &libraries).unwrap();
    core.devices_where(sick(None)).await;
    core.allocate(vec![devices[0].id.clone()]).await.unwrap();
    stop(daemon).await;
}

/// A small file system in memory at a folder of a node, as `/var/run` is, and nothing is free of it.
struct Full(PathBuf);

impl Full {
    fn mount(path: PathBuf) -> Self {
        fs::create_dir_all(&path).unwrap();
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k", "full"]).arg(&path).status();
        assert!(mount.unwrap().success());
        let full = Self(path);
        full.fill();
        full
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }

    fn fill(&self) {
        let mut file = File::create(self.filler()).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
    }

    fn make_room(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[tokio::test]
#[ignore = "needs root: device nodes"]
async fn without_room_for_the_cdi_spec_nothing_is_offered_or_granted_until_there_is_some() {
    const NO_ROOM: &str = "No space left on device";
    let node = Node::new();
    let _module = Module::load(&node, 2);
    let full = Full::mount(node.path("cdi"));
    let spec = node.path("cdi/tencent.com-vcuda.json");
    let mut kubelet = Kubelet::start(&node.kubelet());
    let mut daemon = node.start();
    daemon.says("no CDI spec; trying again");
    let log = daemon.log();
    assert!(log.contains(NO_ROOM) && log.contains(spec.to_str().unwrap()), "{log}");
    assert!(!node.kubelet().join(Resource::Core.socket()).exists());
    full.make_room();
    let [core, _] = both(&mut kubelet).await;
    let devices = core.devices_where(sick(None)).await;

    // One that no longer fits the driver, in the same blocks.
    full.fill();
    let right = fs::read(&spec).unwrap();
    File::options().write(true).open(&spec).unwrap().write_all(b"old").unwrap();
    let ids = || devices[..20].iter().map(|device| device.id.clone()).collect();
    let refused = core.allocate(ids()).await.unwrap_err();
    let said = refused.message();
    assert!(said.contains("tencent.com/vcuda-core: no CDI spec") && said.contains(NO_ROOM), "{said}");
    assert!(said.contains(spec.to_str().unwrap()), "{said}");
    assert_eq!(fs::read_dir(node.path("cdi")).unwrap().count(), 2, "nothing half written is left");
    full.make_room();
    core.allocate(ids()).await.unwrap();
    assert_eq!(fs::read(&spec).unwrap(), right);
    stop(daemon).await;
}

#[tokio::test]
#[ignore = "needs root: device nodes"]
async fn a_killed_plugin_comes_back_with_the_same_devices() {
    let node = Node::new();
    let _module = Module::load(&node, 2);
    let mut kubelet = Kubelet::start(&node.kubelet());
    let daemon = node.start();
    let [core, memory] = both(&mut kubelet).await;
    let devices = memory.devices_where(sick(None)).await;
    // SIGKILL.
    drop(daemon);
    core.closed().await;
    memory.closed().await;
    kubelet.forget(&core);
    kubelet.forget(&memory);

    let daemon = node.start();
    let [_, memory] = both(&mut kubelet).await;
    assert_eq!(memory.devices_where(sick(None)).await, devices);
    stop(daemon).await;
}

#[tokio::test]
#[ignore = "needs root: device nodes"]
async fn free_memory_of_a_gpu_that_is_taken_whole_is_withdrawn_and_comes_back() {
    let node = Node::new();
    let _module = Module::load(&node, 2);
    let mut kubelet = Kubelet::start(&node.kubelet());
    let daemon = node.start();
    let [core, memory] = both(&mut kubelet).await;
    let units = memory.devices_where(sick(None)).await;
    let gpu = Inventory::load(&node.path("state/inventory.json")).unwrap().gpus[1].clone();

    // The container has asked for memory, too, so two units are in use: they must stay healthy.
    let entry = |resource: &str, ids: &[String]| {
        serde_json::json!({"PodUID": "7f", "ContainerName": "main", "ResourceName": resource,
            "DeviceIDs": {"0": ids}, "AllocResp": ""})
    };
    let cores: Vec<_> = (0..100).map(|index| format!("{}::{index}", gpu.uuid)).collect();
    let in_use = [units[160].id.clone(), units[319].id.clone()];
    let checkpoint = serde_json::json!({"Data": {"PodDeviceEntries": [
        entry("tencent.com/vcuda-core", &cores), entry("tencent.com/vcuda-memory", &in_use),
    ], "RegisteredDevices": {}}, "Checksum": 1});
    fs::write(node.kubelet().join("kubelet_internal_checkpoint"), checkpoint.to_string()).unwrap();
    let share = node.path("state/shares/7f_main");
    fs::create_dir_all(&share).unwrap();
    let record = serde_json::json!({
        "version": 1, "pod": {"uid": "7f", "namespace": "ns", "name": "whole", "sandboxId": "s"},
        "container": {"name": "main", "id": "c"}, "bootId": "b", "kind": "whole",
        "gpus": [{"uuid": gpu.uuid, "minor": 1, "core": 100, "memoryBytes": gpu.usable_bytes()}],
        "state": "running", "boundAt": 0, "shim": false,
    });
    fs::write(share.join("share.json"), record.to_string()).unwrap();

    let withdrawn =
        memory.devices_where(|devices| devices.iter().any(|device| device.health == "Unhealthy")).await;
    let healthy: Vec<_> = withdrawn[160..]
        .iter()
        .filter(|device| device.health == "Healthy")
        .map(|device| device.id.clone())
        .collect();
    assert_eq!(healthy, in_use);
    assert!(withdrawn[..160].iter().all(|device| device.health == "Healthy"));
    core.devices_where(sick(None)).await;

    fs::remove_dir_all(&share).unwrap();
    memory.devices_where(sick(None)).await;
    stop(daemon).await;
}

#[test]
#[ignore = "needs root: device nodes"]
fn a_driver_without_a_gpu_to_offer_is_told_apart_from_none() {
    let node = Node::new();
    let module = Module::load(&node, 0);
    let (code, said) = wait_for_module(&node);
    assert_eq!(code, Some(5), "{said}");
    assert!(said.contains("NVML sees no GPU"), "{said}");
    drop(module);

    let uuid = "GPU-53494d55-6770-7500-0000-000000000000";
    let node = Node::with(&format!("gpus: {{exclude: [{uuid}]}}"));
    let _module = Module::load(&node, 1);
    let (code, said) = wait_for_module(&node);
    assert_eq!(code, Some(5), "{said}");
    assert!(said.contains(uuid) && said.contains("gpus.exclude"), "{said}");
}

/// The program's verdict, once the module is up: until then, there is no driver.
fn wait_for_module(node: &Node) -> (Option<i32>, String) {
    loop {
        let (code, said) = verdict(&node.run(&["--fail-without-driver"]));
        if code != Some(4) {
            return (code, said);
        }
    }
}
