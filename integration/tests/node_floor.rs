//! The driver's floor: where NVML has memory limits for cgroups (simulated drivers from 615 on, on a cgroup tree of
//! version 2), a container that passes the shim by still gets no more memory than its share. Where the driver has none,
//! the shim alone holds, and what passes it by is not held: that is tested too, so that nobody believes otherwise.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::{fs, process::Output, time::Duration};

use integration::{
    driver::Wanted,
    host::Options,
    kubelet::RunningPod,
    node::Node,
    pod::{Container, Pod},
    probe::{self, OUT_OF_MEMORY},
};
use serde_json::Value;
use vcuda_config::{
    MemoryFloor,
    floor::{Answer, Question, ask},
};

const SOON: Duration = Duration::from_secs(20);
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A driver that has memory limits for cgroups.
const NEW: Wanted = Wanted::SimulatedAs("615.71", 2);

/// Where the driver's real library is in a container with a share. A copy of it under another name is none that the shim
/// knows: what it is asked, nobody else sees.
const COPY: &str = "cat /usr/local/vcuda/driver/libcuda.so.1 >/tmp/mine.so";

async fn node(driver: Wanted) -> Node {
    Node::with_vcuda(&Options { driver, ..Options::from_env().unwrap() }).await.unwrap()
}

/// What `vcuda-device-plugin status` says of the one share there is.
fn status(node: &Node) -> Value {
    let Output { stdout, stderr, .. } =
        node.vcuda.command("vcuda-device-plugin").args(["status", "-o", "json"]).output().unwrap();
    let all: Value = serde_json::from_slice(&stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&stderr)));
    let gpus = all["gpus"].as_array().unwrap();
    gpus.iter().flat_map(|gpu| gpu["shares"].as_array().unwrap()).next().unwrap().clone()
}

async fn becomes(node: &Node, what: &str, done: impl Fn(&Value) -> bool) {
    if node.wait_until(what, SOON, async || done(&status(node))).await.is_err() {
        panic!("not {what}: {:#}", status(node));
    }
}

/// Asks a copy of the driver for memory, past the shim: CUDA's answer.
async fn bypass(node: &Node, pod: &RunningPod, mib: u64) -> i32 {
    let copied = node.cri().exec(pod.id("main"), &["sh", "-c", COPY]).await.unwrap();
    assert_eq!(copied.code, 0, "{copied:?}");
    let arguments = ["--cuda", "/tmp/mine.so", "--alloc", &mib.to_string()];
    let report = probe::run(node.cri(), pod.id("main"), &arguments).await.unwrap();
    assert_eq!(report.error, None, "{report:?}");
    report.allocs[0].result
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn the_driver_holds_a_container_from_its_first_process_on() {
    let node = node(NEW).await;
    let probe = probe::PATH;
    let first = format!(
        "{COPY}; {probe} --cuda /tmp/mine.so --alloc 6144 --alloc 3072 >/tmp/first; \
         sleep 1000000"
    );
    let container = Container::new("main", node.image()).share(20, 32).command(&["sh", "-c", &first]);
    let pod = node.kubelet.run(&Pod::new("first", container)).await.unwrap();
    assert_eq!(status(&node)["heldBy"], "driver+shim", "at once, not some time after the start");
    let said = async || node.cri().exec(pod.id("main"), &["cat", "/tmp/first"]).await.unwrap().stdout;
    node.wait_until("the first process has asked", SOON, async || said().await.ends_with('\n'))
        .await
        .unwrap();
    let report = probe::parse(&said().await).unwrap();
    assert_eq!(report.allocs[0].result, 0, "6 of 8 GiB: {report:?}");
    assert_eq!(report.allocs[1].result, OUT_OF_MEMORY, "9 of 8 GiB: {report:?}");
    assert!(report.memory.unwrap().total_bytes > 8 * GIB, "it passed the shim by: {report:?}");

    // Several processes together, and those that are started into the container later.
    node.hold(pod.id("main"), 5 * 1024).await.unwrap();
    assert_eq!(bypass(&node, &pod, 4096).await, OUT_OF_MEMORY);
    assert_eq!(bypass(&node, &pod, 1024).await, 0);
    assert_eq!(bypass(&node, &pod, 4096).await, OUT_OF_MEMORY, "what ended is not counted, what lives is");

    // What it holds beyond its own account, a context, is known from the driver, and the shim counts it.
    becomes(&node, "the context shows", |share| share["usage"]["unseenBytes"].as_u64().unwrap() >= 64 * MIB)
        .await;
    let view = probe::run(node.cri(), pod.id("main"), &[]).await.unwrap().memory.unwrap();
    assert!(view.free_bytes < 3 * GIB - 64 * MIB, "{view:?}");
    node.kubelet.delete(&pod).await.unwrap();
    node.assert_empty().await;
}

/// What the README names as not covered.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn on_a_driver_without_memory_limits_the_shim_alone_holds() {
    let node = node(Wanted::Simulated(2)).await;
    let pod = node.kubelet.run(&node.pod_with_share("old", 20, 32)).await.unwrap();
    assert_eq!(status(&node)["heldBy"], "shim");
    let report = probe::run(node.cri(), pod.id("main"), &["--alloc", "9216"]).await.unwrap();
    assert_eq!(report.allocs[0].result, OUT_OF_MEMORY);
    let by_its_path = ["--cuda", "/usr/local/vcuda/driver/libcuda.so.1", "--alloc", "9216"];
    let report = probe::run(node.cri(), pod.id("main"), &by_its_path).await.unwrap();
    assert_eq!(report.allocs[0].result, OUT_OF_MEMORY, "the real library in its place is guarded");
    assert_eq!(bypass(&node, &pod, 9216).await, 0, "a copy under another name is not");
    node.kubelet.delete(&pod).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn a_node_that_demands_the_drivers_floor_refuses_shares_without_it() {
    let demand = async |driver| {
        let options = Options { driver, ..Options::from_env().unwrap() };
        let mut node = Node::start(&options).await.unwrap();
        node.vcuda.change(|file| file.memory.floor = MemoryFloor::Driver).unwrap();
        node.vcuda.start_device_plugin().unwrap();
        node.vcuda.start_nri_plugin().await.unwrap();
        node.wait_for_offer().await.unwrap();
        node
    };
    let node = demand(Wanted::Simulated(2)).await;
    let error = format!(
        "{:#}",
        node.kubelet.run(&node.pod_with_share("none", 20, 32)).await.expect_err("there is no floor")
    );
    for words in ["memory.floor: driver", "drivers from 615 on", "use a node that can"] {
        assert!(error.contains(words), "{words:?} is not in {error}");
    }
    let whole = node.pod_with_share("whole", 100, 0);
    for pod in [whole, Pod::new("plain", Container::new("main", node.image()))] {
        let running = node.kubelet.run(&pod).await.unwrap();
        node.kubelet.delete(&running).await.unwrap();
    }

    let mut node = demand(NEW).await;
    let mut running = node.kubelet.run(&node.pod_with_share("held", 20, 32)).await.unwrap();
    assert_eq!(bypass(&node, &running, 9216).await, OUT_OF_MEMORY);
    node.vcuda.device_plugin().unwrap().kill();
    let error = node.kubelet.restart_container(&mut running, "main").await;
    let error = format!("{:#}", error.expect_err("nobody puts the floor"));
    assert!(error.contains("vcuda-device-plugin") && error.contains("does not answer"), "{error}");
    node.vcuda.start_device_plugin().unwrap();
    node.wait_until("it starts again", SOON, async || {
        let mut again = running.clone();
        node.kubelet.restart_container(&mut again, "main").await.is_ok()
    })
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn a_container_that_started_while_the_plugin_was_down_is_held_when_it_is_back() {
    let mut node = node(NEW).await;
    let mut running = node.kubelet.run(&node.pod_with_share("restarted", 20, 32)).await.unwrap();
    node.vcuda.device_plugin().unwrap().kill();
    assert_eq!(bypass(&node, &running, 9216).await, OUT_OF_MEMORY, "the driver does not need the plugin");
    node.kubelet.restart_container(&mut running, "main").await.unwrap();
    assert_eq!(status(&node)["heldBy"], "shim");
    node.vcuda.start_device_plugin().unwrap();
    becomes(&node, "held by the driver", |share| share["heldBy"] == "driver+shim").await;
    assert_eq!(bypass(&node, &running, 9216).await, OUT_OF_MEMORY);
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn the_floor_follows_the_share() {
    let node = node(NEW).await;
    let running = node.kubelet.run(&node.pod_with_share("changed", 20, 32)).await.unwrap();
    let set = |size: &str| {
        let mut command = node.vcuda.command("vcuda-device-plugin");
        let output = command
            .args(["set", "--pod", "default/changed", "--container", "main", "--memory", size])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    assert_eq!(bypass(&node, &running, 9216).await, OUT_OF_MEMORY);
    set("12GiB");
    assert_eq!(bypass(&node, &running, 9216).await, 0, "raised at once");
    set("4GiB");
    assert_eq!(bypass(&node, &running, 5120).await, OUT_OF_MEMORY, "lowered at once");

    // Whoever asks without being in the container's cgroup is told so, and nothing is held by mistake.
    let socket = node.vcuda.file().paths.floor_socket();
    let name = node.vcuda.shares().pop().unwrap();
    let hold = ask(&socket, &Question::Hold { share: name.clone() }, SOON).unwrap();
    assert!(matches!(&hold, Answer::Failed { reason } if reason.contains("cgroup")), "{hold:?}");
    assert_eq!(ask(&socket, &Question::Renew { share: name.clone() }, SOON).unwrap(), Answer::Held);
    let floor = node.vcuda.file().paths.shares().join(name).join("floor.json");
    let floor: Value = serde_json::from_slice(&fs::read(floor).unwrap()).unwrap();
    assert_eq!(floor["bytes"].as_object().unwrap().values().next().unwrap(), 4 * GIB);
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}
