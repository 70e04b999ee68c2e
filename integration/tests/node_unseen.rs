//! Memory that no call shows, on a driver without memory limits for cgroups (550): what each process takes for its context, here
//! 400 MiB, is on its share's account as NVML tells it, and comes back with the process.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::time::Duration;

use integration::{
    driver::Wanted,
    host::Options,
    kubelet::RunningPod,
    node::Node,
    probe::{self, Memory, OUT_OF_MEMORY, Report},
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
    let pod = node.kubelet.run(&node.pod_with_share("contexts", 20, 8)).await.unwrap();
    let mut processes = Vec::new();
    for _ in 0..2 {
        processes.push(node.hold(pod.id("main"), 32).await.unwrap());
    }
    counted(&node, 2 * CONTEXT).await;
    assert_eq!(status(&node)["heldBy"], "shim");
    let total = 2048 * MIB;
    let free = total - 2 * CONTEXT - 64 * MIB;
    let more_than_free = free / MIB + 1;
    let rest = async || {
        let report = ask(&node, &pod, &[more_than_free, 128]).await;
        let nvml = &report.nvml[0];
        assert_eq!((nvml.used_bytes + nvml.free_bytes, nvml.total_bytes), (total, total));
        let results = [report.allocs[0].result, report.allocs[1].result];
        // Where the probe took its time, its own context counts by then.
        let is = |memory: Option<Memory>, free| {
            [free, free - CONTEXT]
                .map(|free_bytes| Some(Memory { free_bytes, total_bytes: total }))
                .contains(&memory)
        };
        let shown = is(report.memory, free) && is(report.memory_after, free - 128 * MIB);
        (results == [OUT_OF_MEMORY, 0] && shown, report)
    };
    // A look that falls on what the probe does may make the figure less for a moment.
    if node.wait_until("the rest", SOON, async || rest().await.0).await.is_err() {
        panic!("not what is left beside the contexts, {free}: {:?}", rest().await.1);
    }

    end(&node, &pod, &processes[..1]).await;
    counted(&node, CONTEXT).await;
    end(&node, &pod, &processes[1..]).await;
    counted(&node, 0).await;
    let all = total / MIB;
    node.wait_until("all is back", SOON, async || ask(&node, &pod, &[all]).await.allocs[0].result == 0)
        .await
        .unwrap();
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
    let free = 1024 * MIB - CONTEXT - 32 * MIB;
    let mut seen = Vec::new();
    loop {
        node.vcuda.device_plugin().unwrap().kill();
        seen.push(ask(&node, &pod, &[]).await.memory.unwrap().free_bytes);
        if seen.ends_with(&[free]) {
            break;
        }
        // Where the machine is busy, twenty seconds may have gone by until the probe has asked.
        assert!(seen.len() < 5, "nobody notices a restart, so {free} bytes are free, not {seen:?}");
        node.vcuda.start_device_plugin().unwrap();
        counted(&node, CONTEXT).await;
    }
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
