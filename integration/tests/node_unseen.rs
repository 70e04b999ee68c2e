//! Memory that no call shows, on a driver without memory limits for cgroups (550): what each process takes for its context, here
//! 400 MiB, is on its share's account as NVML tells it, and comes back with the process.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::time::Duration;

use integration::{
    driver::Wanted,
    host::Options,
    kubelet::RunningPod,
    node::Node,
    probe::{self, OUT_OF_MEMORY, Report},
};
use serde_json::Value;

/// It takes the node's four looks, of half a second each, or twenty seconds to forget what nobody looks at any more.
const SOON: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
const CONTEXT: u64 = 400 * MIB;

async fn node() -> Node {
    let driver = Wanted::SimulatedAs("550.163.01", 1);
    Node::with_vcuda(&Options { driver, ..Options::from_env().unwrap() }).await.unwrap()
}

/// What `vcuda-device-plugin status` says of the one share there is.
fn status(node: &Node) -> Value {
    let output = node.vcuda.command("vcuda-device-plugin").args(["status", "-o", "json"]).output().unwrap();
    let all: Value = serde_json::from_slice(&output.stdout).unwrap();
    all["gpus"][0]["shares"][0].clone()
}

async fn counted(node: &Node, bytes: u64) {
    let done = || status(node)["usage"]["unseenBytes"] == bytes;
    if node.wait_until("counted", SOON, async || done()).await.is_err() {
        panic!("{bytes} are not counted: {:#}", status(node));
    }
}

async fn ask(node: &Node, pod: &RunningPod, mib: &[u64]) -> Report {
    let sizes: Vec<_> = mib.iter().map(u64::to_string).collect();
    let arguments: Vec<_> = sizes.iter().flat_map(|mib| ["--alloc", mib]).collect();
    probe::run(node.cri(), pod.id("main"), &arguments).await.unwrap()
}

async fn end(node: &Node, pod: &RunningPod, processes: &[String]) {
    let command: Vec<_> = ["kill", "-9"].into_iter().chain(processes.iter().map(String::as_str)).collect();
    assert_eq!(node.cri().exec(pod.id("main"), &command).await.unwrap().code, 0);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn contexts_are_on_a_shares_account_as_long_as_their_processes_live() {
    let node = node().await;
    let pod = node.kubelet.run(&node.pod_with_share("contexts", 20, 4)).await.unwrap();
    let mut processes = Vec::new();
    for _ in 0..2 {
        processes.push(node.hold(pod.id("main"), 32).await.unwrap());
    }
    counted(&node, 2 * CONTEXT).await;
    assert_eq!(status(&node)["heldBy"], "shim");
    let free = 1024 * MIB - 2 * CONTEXT - 64 * MIB;
    let report = ask(&node, &pod, &[192, 128]).await;
    let before = report.memory.unwrap();
    assert_eq!((before.free_bytes, before.total_bytes), (free, 1024 * MIB), "{report:?}");
    assert_eq!(report.allocs[0].result, OUT_OF_MEMORY, "more than is left beside the contexts: {report:?}");
    assert_eq!(report.allocs[1].result, 0, "{report:?}");
    assert_eq!(report.memory_after.unwrap().free_bytes, free - 128 * MIB);
    let nvml = &report.nvml[0];
    assert_eq!((nvml.used_bytes + nvml.free_bytes, nvml.total_bytes), (1024 * MIB, 1024 * MIB));

    end(&node, &pod, &processes[..1]).await;
    counted(&node, CONTEXT).await;
    end(&node, &pod, &processes[1..]).await;
    counted(&node, 0).await;
    assert_eq!(ask(&node, &pod, &[1024]).await.allocs[0].result, 0, "all is back");
    node.kubelet.delete(&pod).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn what_nobody_measures_any_more_is_refused_for_a_while_only() {
    let mut node = node().await;
    let pod = node.kubelet.run(&node.pod_with_share("alone", 20, 4)).await.unwrap();
    let process = node.hold(pod.id("main"), 32).await.unwrap();
    counted(&node, CONTEXT).await;
    node.vcuda.device_plugin().unwrap().kill();
    let free = ask(&node, &pod, &[]).await.memory.unwrap().free_bytes;
    assert_eq!(free, 1024 * MIB - CONTEXT - 32 * MIB, "nobody notices a restart");
    end(&node, &pod, &[process]).await;
    node.wait_until("all is back", SOON, async || ask(&node, &pod, &[1024]).await.allocs[0].result == 0)
        .await
        .unwrap();
    node.hold(pod.id("main"), 32).await.unwrap();
    node.vcuda.start_device_plugin().unwrap();
    counted(&node, CONTEXT).await;
    node.kubelet.delete(&pod).await.unwrap();
    node.assert_empty().await;
}
