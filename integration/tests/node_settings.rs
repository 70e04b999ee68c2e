//! A node that is not set up as it must be says so, once, clearly, with what to do, and harms no one.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::time::Duration;

use integration::{
    driver::Wanted,
    host::Options,
    node::Node,
    pod::{Container, Pod},
};

const SOON: Duration = Duration::from_secs(20);

/// Waits until a daemon's log has all of `words` in one line, and returns that line.
async fn says(node: &Node, log: impl Fn() -> String, words: &[&str]) -> String {
    let find = || log().lines().find(|line| words.iter().all(|word| line.contains(word))).map(String::from);
    if node.wait_until("it says so", SOON, async || find().is_some()).await.is_err() {
        panic!("no line has all of {words:?}:\n{}", log());
    }
    find().unwrap()
}

async fn plain_pod_starts(node: &Node) {
    let pod = Pod::new("plain", Container::new("main", node.image()));
    let running = node.kubelet.run(&pod).await.unwrap();
    node.kubelet.delete(&running).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn with_cdi_off_a_share_is_refused_and_the_rest_runs() {
    let mut options = Options::from_env().unwrap();
    options.containerd.cdi = false;
    let node = Node::with_vcuda(&options).await.unwrap();
    let pod = node.pod_with_share("share", 20, 32);
    let error = format!("{:#}", node.kubelet.run(&pod).await.expect_err("nothing would enforce the share"));
    assert!(error.contains("CDI") || error.contains("cdi"), "{error}");
    plain_pod_starts(&node).await;
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn with_nri_off_a_share_is_refused_and_the_plugin_says_what_to_turn_on() {
    let mut options = Options::from_env().unwrap();
    options.containerd.nri = false;
    let mut node = Node::start(&options).await.unwrap();
    node.vcuda.start_device_plugin().unwrap();
    node.vcuda.launch_nri_plugin().unwrap();
    node.wait_for_offer().await.unwrap();
    let socket = node.vcuda.file().paths.nri_socket.display().to_string();
    let log = node.vcuda.nri_log();
    let line = says(&node, || std::fs::read_to_string(&log).unwrap_or_default(), &[&socket]).await;
    assert!(line.contains("NRI"), "{line}");
    let pod = node.pod_with_share("share", 20, 32);
    let error = format!("{:#}", node.kubelet.run(&pod).await.expect_err("nothing would enforce the share"));
    assert!(error.contains("pod default/share, container main: its GPU share was not bound"), "{error}");
    assert!(error.contains("vcuda-nri-plugin"), "{error}");
    plain_pod_starts(&node).await;
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn without_a_driver_the_device_plugin_says_where_it_looked() {
    let mut options = Options::from_env().unwrap();
    options.driver = Wanted::None;
    let mut node = Node::start(&options).await.unwrap();
    node.vcuda.start_device_plugin().unwrap();
    let root = node.driver.root().display().to_string();
    let log = node.vcuda.device_log();
    says(&node, || std::fs::read_to_string(&log).unwrap_or_default(), &["no NVIDIA driver below", &root])
        .await;
    for resource in node.vcuda.resources() {
        assert_eq!(node.kubelet.allocatable(&resource), 0);
    }
    plain_pod_starts(&node).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn a_driver_without_gpus_is_said_to_have_none() {
    let mut options = Options::from_env().unwrap();
    options.driver = Wanted::Simulated(0);
    let mut node = Node::start(&options).await.unwrap();
    node.vcuda.start_device_plugin().unwrap();
    let log = node.vcuda.device_log();
    says(&node, || std::fs::read_to_string(&log).unwrap_or_default(), &["no GPU"]).await;
    plain_pod_starts(&node).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn a_second_instance_of_either_daemon_ends_and_names_the_first() {
    let node = Node::with_vcuda(&Options::from_env().unwrap()).await.unwrap();
    for program in ["vcuda-device-plugin", "vcuda-nri-plugin"] {
        let output = node.vcuda.command(program).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{program}: {said}");
        assert!(said.contains("another") || said.contains("already"), "{program}: {said}");
    }
    let pod = node.pod_with_share("share", 20, 32);
    let running = node.kubelet.run(&pod).await.unwrap();
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn containerd_can_start_the_nri_plugin_itself() {
    let mut options = Options::from_env().unwrap();
    options.nri_by_containerd = true;
    let mut node = Node::start(&options).await.unwrap();
    node.vcuda.start_device_plugin().unwrap();
    node.wait_for_offer().await.unwrap();
    let pod = node.pod_with_share("share", 20, 32);
    let running = node.kubelet.run(&pod).await.unwrap();
    let report = integration::probe::run(node.cri(), running.id("main"), &[]).await.unwrap();
    assert_eq!(report.gpus[0].total_bytes, 8 << 30, "{report:?}");
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}
