//! Compute time on a node: what an operator and a pod's owner may say about it, and what becomes of that whatever
//! part is killed.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::{process::Output, time::Duration};

use integration::{
    host::Options,
    node::Node,
    pod::{Container, Pod},
    probe,
};
use ledger::Shares;
use serde_json::Value;
use vcuda_config::annotation;

const GIB: u64 = 1 << 30;
const SOON: Duration = Duration::from_secs(20);

async fn node() -> Node {
    Node::with_vcuda(&Options::from_env().unwrap()).await.unwrap()
}

fn share(node: &Node, name: &str, core: u32, memory: u32) -> Pod {
    Pod::new(name, Container::new("main", node.image()).share(core, memory))
}

/// `vcuda-device-plugin set` for the container `main` of a pod.
fn set(node: &Node, pod: &str, what: &[&str]) -> Output {
    let mut command = node.vcuda.command("vcuda-device-plugin");
    command.args(["set", "--pod", &format!("default/{pod}"), "--container", "main", "-o", "json"]).args(what);
    command.output().unwrap()
}

/// What `status` says of the share of a pod.
fn status(node: &Node, pod: &str) -> Value {
    let output = node.vcuda.command("vcuda-device-plugin").args(["status", "-o", "json"]).output().unwrap();
    let status: Value = serde_json::from_slice(&output.stdout).unwrap();
    let shares = status["gpus"].as_array().unwrap().iter().flat_map(|gpu| gpu["shares"].as_array().unwrap());
    shares.into_iter().find(|share| share["pod"] == pod).unwrap().clone()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn an_operator_changes_a_running_container_and_it_stays_changed() {
    let mut node = node().await;
    let pod = share(&node, "train", 20, 32);
    let mut running = node.kubelet.run(&pod).await.unwrap();
    let other = node.kubelet.run(&share(&node, "other", 50, 32)).await.unwrap();
    let process = node.hold(running.id("main"), 6144).await.unwrap();

    let output = set(&node, "train", &["--core", "40", "--memory", "16GiB", "--core-limit", "45"]);
    assert!(output.status.success(), "{output:?}");
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (said["before"]["core"].as_u64(), said["after"]["core"].as_u64()),
        (Some(20), Some(40)),
        "{said}"
    );
    let total = async |container: &str| {
        let report = probe::run(node.cri(), container, &[]).await.unwrap();
        (report.gpus[0].total_bytes, report.nvml[0].total_bytes)
    };
    assert_eq!(total(running.id("main")).await, (16 * GIB, 16 * GIB));
    let alive = node.cri().exec(running.id("main"), &["kill", "-0", &process]).await.unwrap();
    assert_eq!(alive.code, 0, "the process that was there goes on");

    // More than the GPU has.
    let output = set(&node, "train", &["--core", "51", "--core-limit", "60"]);
    assert_eq!(output.status.code(), Some(9), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("50 core") && said.contains("ask for less"), "{said}");
    assert_eq!(set(&node, "nobody", &["--core", "5"]).status.code(), Some(8));

    // Every part is killed and started again, and so is the container.
    node.vcuda.device_plugin().unwrap().kill();
    node.vcuda.nri_plugin().unwrap().kill();
    node.vcuda.start_device_plugin().unwrap();
    node.vcuda.start_nri_plugin().await.unwrap();
    node.wait_for_offer().await.unwrap();
    node.kubelet.restart_container(&mut running, "main").await.unwrap();
    let report = probe::run(node.cri(), running.id("main"), &[]).await.unwrap();
    assert_eq!(report.gpus[0].total_bytes, 16 * GIB);
    let share = status(&node, "train");
    assert_eq!((share["core"].as_u64(), share["coreLimit"].as_u64()), (Some(40), Some(45)), "{share}");

    // The next pod of the same name has what it asks for.
    node.kubelet.delete(&running).await.unwrap();
    let again = node.kubelet.run(&self::share(&node, "train", 20, 32)).await.unwrap();
    assert_eq!(status(&node, "train")["core"], 20);
    for running in [&again, &other] {
        node.kubelet.delete(running).await.unwrap();
    }
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn what_a_pod_says_about_idle_time_is_taken_or_refused_in_its_event() {
    let node = node().await;
    let with = |name: &str, key: &str, value: &str| {
        let mut pod = share(&node, name, 20, 8);
        pod.annotations.insert(key.into(), value.into());
        pod
    };
    for (key, value, reason) in [
        (annotation::CORE_LIMIT, "10", "below the 20 core"),
        (annotation::CORE_LIMIT, "much", "no percentage"),
        (annotation::PRIORITY, "high", "neither low nor normal"),
    ] {
        let error = node.kubelet.run(&with("odd", key, value)).await.expect_err("it cannot be met");
        let error = format!("{error:#}");
        assert!(error.contains(key) && error.contains(reason) && error.contains("correct it"), "{error}");
    }
    let alone = node.kubelet.run(&with("alone", annotation::CORE_LIMIT, "100")).await.unwrap();
    let low = node.kubelet.run(&with("low", annotation::PRIORITY, "low")).await.unwrap();
    assert_eq!(
        (status(&node, "alone")["coreLimit"].as_u64(), status(&node, "low")["priority"].as_str()),
        (Some(100), Some("low"))
    );
    for running in [&alone, &low] {
        node.kubelet.delete(running).await.unwrap();
    }
    node.assert_empty().await;
}

/// A share of a version that gave out no slots.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn a_running_share_without_slots_gets_its_own_at_the_next_start() {
    let mut node = node().await;
    let running = node.kubelet.run(&share(&node, "old", 30, 8)).await.unwrap();
    node.vcuda.nri_plugin().unwrap().kill();
    let folder = node.vcuda.file().paths.shares();
    let name = node.vcuda.shares().remove(0);
    let file = folder.join(&name).join("share.json");
    let mut record: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(record["gpus"][0].as_object_mut().unwrap().remove("slots"), Some("0-29".into()));
    let new = folder.join(".new-record");
    std::fs::write(&new, record.to_string()).unwrap();
    std::fs::rename(&new, &file).unwrap();
    let own = || {
        region::Limits::open(&folder.join(&name).join("limits")).unwrap().get(0).unwrap().own_slots.count()
    };
    node.wait_until("the governor follows the record", SOON, async || own() == 0).await.unwrap();
    node.vcuda.start_nri_plugin().await.unwrap();
    let shares = Shares::read(&folder).unwrap();
    assert_eq!(shares.records.values().next().unwrap().gpus[0].slots.count(), 30);
    node.wait_until("the running container has its slots", SOON, async || own() == 30).await.unwrap();
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}
