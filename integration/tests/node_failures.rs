//! Every part is killed at every time. What must hold: a container with a share runs enforced or does not run, one
//! without a share always starts, and what runs never notices.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::time::Duration;

use integration::{
    cache::Line,
    host::Options,
    kubelet::RunningPod,
    node::Node,
    pod::{Container, Pod},
    probe::{self, OUT_OF_MEMORY},
};
use rustix::process::Signal;

const GIB: u64 = 1 << 30;
const SOON: Duration = Duration::from_secs(20);

/// What the guard says when nri-plugin did not do its work.
const NOT_BOUND: &str = "vcuda-nri-plugin";

async fn node() -> anyhow::Result<Node> {
    Node::with_vcuda(&Options::from_env()?).await
}

/// A pod without a share starts, whatever else is the matter.
async fn plain_pod_starts(node: &Node) {
    let pod = Pod::new("plain", Container::new("main", node.image()));
    let running = node.kubelet.run(&pod).await.unwrap();
    node.kubelet.delete(&running).await.unwrap();
}

/// A running share of 8 GiB still is one: same process, same ceiling.
async fn still_enforced(node: &Node, running: &RunningPod, gpu: &str) {
    let report = probe::run(node.cri(), running.id("main"), &["--alloc", "9216"]).await.unwrap();
    assert_eq!(report.error, None);
    assert_eq!(report.gpus[0].uuid, gpu, "the same GPU");
    assert_eq!(report.gpus[0].total_bytes, 8 * GIB);
    assert_eq!(report.allocs[0].result, OUT_OF_MEMORY, "{report:?}");
}

async fn gpu_of(node: &Node, running: &RunningPod) -> String {
    probe::run(node.cri(), running.id("main"), &[]).await.unwrap().gpus[0].uuid.clone()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn without_nri_plugin_a_share_is_refused_in_one_sentence_and_the_rest_runs() {
    let mut node = node().await.unwrap();
    let running = node.kubelet.run(&node.pod_with_share("before", 20, 32)).await.unwrap();
    let gpu = gpu_of(&node, &running).await;

    node.vcuda.nri_plugin().unwrap().kill();
    let error = node.kubelet.run(&node.pod_with_share("refused", 20, 32)).await.expect_err("unenforced");
    let error = format!("{error:#}");
    assert!(error.contains(NOT_BOUND), "{error}");
    plain_pod_starts(&node).await;
    still_enforced(&node, &running, &gpu).await;

    node.vcuda.start_nri_plugin().await.unwrap();
    let after = node.kubelet.run(&node.pod_with_share("after", 20, 32)).await.unwrap();
    still_enforced(&node, &running, &gpu).await;
    for running in [&running, &after] {
        node.kubelet.delete(running).await.unwrap();
    }
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn nri_plugin_killed_while_it_is_asked_leaves_no_container_unenforced() {
    let mut node = node().await.unwrap();
    for round in 0..3 {
        // Stopped, it cannot answer; killed, the connection closes in the middle of the request.
        node.vcuda.nri_plugin().unwrap().signal(Signal::STOP).unwrap();
        let pod = node.pod_with_share(&format!("during-{round}"), 20, 32);
        let plugin = node.vcuda.nri_plugin().unwrap().id();
        let killer = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(300)).await;
            let pid = i32::try_from(plugin).ok().and_then(rustix::process::Pid::from_raw);
            rustix::process::kill_process(pid.expect("a process ID"), Signal::KILL).expect("it is there");
        });
        let outcome = node.kubelet.run(&pod).await;
        killer.await.unwrap();
        let error = format!("{:#}", outcome.expect_err("nobody bound the share"));
        assert!(error.contains(NOT_BOUND), "{error}");
        plain_pod_starts(&node).await;
        node.vcuda.start_nri_plugin().await.unwrap();
    }
    let after = node.kubelet.run(&node.pod_with_share("after", 20, 32)).await.unwrap();
    node.kubelet.delete(&after).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn an_nri_plugin_that_hangs_delays_pods_and_lets_none_run_unenforced() {
    let mut node = node().await.unwrap();
    node.vcuda.nri_plugin().unwrap().signal(Signal::STOP).unwrap();
    // containerd waits two seconds for it, drops it, and starts the container unadjusted.
    let error = node.kubelet.run(&node.pod_with_share("hangs", 20, 32)).await.expect_err("unenforced");
    let error = format!("{error:#}");
    assert!(error.contains(NOT_BOUND), "{error}");
    plain_pod_starts(&node).await;
    // When it wakes up it finds that it was dropped, and comes back by itself.
    node.vcuda.nri_plugin().unwrap().signal(Signal::CONT).unwrap();
    node.wait_until("a share starts again", SOON, async || {
        let pod = node.pod_with_share("again", 20, 32);
        match node.kubelet.run(&pod).await {
            Ok(running) => {
                node.kubelet.delete(&running).await.unwrap();
                true
            }
            Err(_) => false,
        }
    })
    .await
    .unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn nri_plugin_killed_after_it_answered_changes_nothing() {
    let mut node = node().await.unwrap();
    let pod = node.pod_with_share("after", 20, 32);
    let mut running = node.kubelet.begin(&pod).await.unwrap();
    let id = node.kubelet.create_container(&mut running, &pod.containers[0]).await.unwrap();
    node.vcuda.nri_plugin().unwrap().kill();
    node.cri().start(&id).await.unwrap();
    let gpu = gpu_of(&node, &running).await;
    still_enforced(&node, &running, &gpu).await;
    plain_pod_starts(&node).await;
    node.vcuda.start_nri_plugin().await.unwrap();
    still_enforced(&node, &running, &gpu).await;
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn nri_plugin_killed_at_any_instant_of_a_start_leaves_the_pod_enforced_or_refused() {
    let mut node = node().await.unwrap();
    let (mut enforced, mut refused) = (0, 0);
    for delay in (0..150).step_by(10) {
        let plugin = node.vcuda.nri_plugin().unwrap().id();
        let killer = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(delay)).await;
            let pid = i32::try_from(plugin).ok().and_then(rustix::process::Pid::from_raw);
            rustix::process::kill_process(pid.expect("a process ID"), Signal::KILL).expect("it is there");
        });
        let outcome = node.kubelet.run(&node.pod_with_share(&format!("at-{delay}"), 20, 32)).await;
        killer.await.unwrap();
        match outcome {
            Ok(running) => {
                enforced += 1;
                let gpu = gpu_of(&node, &running).await;
                still_enforced(&node, &running, &gpu).await;
                node.kubelet.delete(&running).await.unwrap();
            }
            Err(error) => {
                refused += 1;
                let error = format!("{error:#}");
                assert!(error.contains(NOT_BOUND), "after {delay} ms: {error}");
            }
        }
        node.vcuda.start_nri_plugin().await.unwrap();
    }
    assert_eq!(enforced + refused, 15);
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn a_containerd_restart_leaves_running_shares_and_serves_new_ones() {
    let mut node = node().await.unwrap();
    let running = node.kubelet.run(&node.pod_with_share("before", 20, 32)).await.unwrap();
    let gpu = gpu_of(&node, &running).await;
    let process = node.hold(running.id("main"), 4096).await.unwrap();
    for round in 0..3 {
        node.containerd.restart().await.unwrap();
        plain_pod_starts(&node).await;
        still_enforced(&node, &running, &gpu).await;
        // The plugin comes back by itself; until then shares are refused, never unenforced.
        node.wait_until("a share starts again", SOON, async || {
            match node.kubelet.run(&node.pod_with_share(&format!("new-{round}"), 20, 32)).await {
                Ok(new) => {
                    still_enforced(&node, &new, &gpu_of(&node, &new).await).await;
                    node.kubelet.delete(&new).await.unwrap();
                    true
                }
                Err(error) => {
                    let error = format!("{error:#}");
                    assert!(error.contains(NOT_BOUND), "{error}");
                    false
                }
            }
        })
        .await
        .unwrap();
    }
    let alive = node.cri().exec(running.id("main"), &["kill", "-0", &process]).await.unwrap();
    assert_eq!(alive.code, 0, "the program that held memory never noticed: {alive:?}");
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn pods_deleted_while_nri_plugin_is_down_are_found_when_it_is_back() {
    let mut node = node().await.unwrap();
    let gone = node.kubelet.run(&node.pod_with_share("gone", 60, 32)).await.unwrap();
    let stays = node.kubelet.run(&node.pod_with_share("stays", 20, 32)).await.unwrap();
    let gpu = gpu_of(&node, &stays).await;
    node.vcuda.nri_plugin().unwrap().kill();
    node.kubelet.delete(&gone).await.unwrap();
    node.vcuda.start_nri_plugin().await.unwrap();
    assert_eq!(node.vcuda.shares().len(), 1, "{:?}", node.vcuda.shares());
    still_enforced(&node, &stays, &gpu).await;
    // What the lost pod had is free again: all GPUs together hold this.
    let again = node.kubelet.run(&node.pod_with_share("again", 60, 32)).await.unwrap();
    for running in [&stays, &again] {
        node.kubelet.delete(running).await.unwrap();
    }
    node.assert_empty().await;
}

/// Kubelet hands its devices on, so nothing may be left of it beside the container that comes after it.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn an_init_container_that_ended_while_nri_plugin_was_down_gives_way() {
    let mut node = node().await.unwrap();
    let setup = Container::new("setup", node.image()).share(60, 32).command(&["sleep", "1"]);
    let pod = node.pod_with_share("two-steps", 60, 32).with_init(setup);
    let mut running = node.kubelet.begin(&pod).await.unwrap();
    let id = node.kubelet.create_container(&mut running, &pod.init[0]).await.unwrap();
    node.cri().start(&id).await.unwrap();
    node.vcuda.nri_plugin().unwrap().kill();
    node.wait_until("the init container has ended", SOON, async || {
        !node.cri().running().await.unwrap().contains(&id)
    })
    .await
    .unwrap();
    node.vcuda.start_nri_plugin().await.unwrap();
    let id = node.kubelet.create_container(&mut running, &pod.containers[0]).await.unwrap();
    node.cri().start(&id).await.unwrap();
    // containerd before 1.7.26 lists its containers while it creates others, so that one which is not on the list
    // may be on its way. There the share stays until the pod ends.
    let left = if node.containerd.line() == Line::V1 { 2 } else { 1 };
    assert_eq!(node.vcuda.shares().len(), left, "{:?}", node.vcuda.shares());
    still_enforced(&node, &running, &gpu_of(&node, &running).await).await;
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn a_killed_device_plugin_loses_nothing_and_offers_both_resources_again() {
    let mut node = node().await.unwrap();
    let resources = node.vcuda.resources();
    let offered = resources.clone().map(|resource| node.kubelet.allocatable(&resource));
    let running = node.kubelet.run(&node.pod_with_share("before", 20, 32)).await.unwrap();
    let gpu = gpu_of(&node, &running).await;

    node.vcuda.device_plugin().unwrap().kill();
    node.wait_until("kubelet misses it", SOON, async || {
        resources.iter().all(|resource| node.kubelet.allocatable(resource) == 0)
    })
    .await
    .unwrap();
    still_enforced(&node, &running, &gpu).await;
    plain_pod_starts(&node).await;
    node.kubelet.run(&node.pod_with_share("refused", 20, 32)).await.expect_err("nothing is offered");

    node.vcuda.start_device_plugin().unwrap();
    node.kubelet.wait_for(&resources, SOON).await.unwrap();
    assert_eq!(resources.clone().map(|resource| node.kubelet.allocatable(&resource)), offered);
    still_enforced(&node, &running, &gpu).await;
    let after = node.kubelet.run(&node.pod_with_share("after", 20, 32)).await.unwrap();
    for running in [&running, &after] {
        node.kubelet.delete(running).await.unwrap();
    }
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn a_kubelet_restart_brings_both_resources_back_and_keeps_every_gpu() {
    let mut node = node().await.unwrap();
    let resources = node.vcuda.resources();
    let mut running = node.kubelet.run(&node.pod_with_share("before", 20, 32)).await.unwrap();
    let gpu = gpu_of(&node, &running).await;
    let process = node.hold(running.id("main"), 4096).await.unwrap();

    for _ in 0..3 {
        node.kubelet.stop();
        node.kubelet.serve().await.unwrap();
        node.kubelet.wait_for(&resources, SOON).await.unwrap();
        still_enforced(&node, &running, &gpu).await;
    }
    let alive = node.cri().exec(running.id("main"), &["kill", "-0", &process]).await.unwrap();
    assert_eq!(alive.code, 0, "{alive:?}");

    // The container starts anew with the answers that the earlier kubelet had got.
    node.kubelet.restart_container(&mut running, "main").await.unwrap();
    still_enforced(&node, &running, &gpu).await;
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn everything_killed_at_once_comes_back_with_the_same_shares() {
    let mut node = node().await.unwrap();
    let resources = node.vcuda.resources();
    let first = node.kubelet.run(&node.pod_with_share("first", 60, 32)).await.unwrap();
    let second = node.kubelet.run(&node.pod_with_share("second", 60, 32)).await.unwrap();
    let gpus = [gpu_of(&node, &first).await, gpu_of(&node, &second).await];
    assert_ne!(gpus[0], gpus[1], "60 and 60 core do not fit one GPU");

    node.kubelet.stop();
    node.vcuda.device_plugin().unwrap().kill();
    node.vcuda.nri_plugin().unwrap().kill();
    node.containerd.restart().await.unwrap();
    node.kubelet.serve().await.unwrap();
    node.vcuda.start_device_plugin().unwrap();
    node.vcuda.start_nri_plugin().await.unwrap();
    node.kubelet.wait_for(&resources, SOON).await.unwrap();

    still_enforced(&node, &first, &gpus[0]).await;
    still_enforced(&node, &second, &gpus[1]).await;
    assert_eq!(node.vcuda.shares().len(), 2);
    for running in [&first, &second] {
        node.kubelet.delete(running).await.unwrap();
    }
    node.assert_empty().await;
}
