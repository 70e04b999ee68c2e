//! The whole way of a share in a real cluster: vcuda-scheduler picks the GPU, kubelet and the node obey, and what does
//! not fit waits with the reason in its events.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context, Result};
use integration::{
    burst,
    cluster::{Cluster, SCHEDULER_NAME},
    driver::Wanted,
    host::Options,
    pod_resources, probe,
};
use serde_json::{Value, json};
use vcuda_config::{GpuUuid, NodeGpus, PodPlacement, annotation};

const SOON: Duration = Duration::from_secs(120);

/// GPUs of the node.
const GPUS: usize = 4;

async fn cluster() -> Result<Cluster> {
    let binaries =
        Cluster::binaries().context("KUBE_BIN_DIR must name the folder with kubelet and its peers")?;
    let options = Options { driver: Wanted::Simulated(GPUS.try_into()?), ..Options::from_env()? };
    let mut cluster = Cluster::with_scheduler(&binaries, &options).await?;
    let told = |cluster: &Cluster| gpus_on_node(cluster).is_some_and(|node| node.gpus.len() == GPUS);
    cluster.wait_until("the node tells the cluster of its GPUs", SOON, told).await?;
    Ok(cluster)
}

/// What the node's annotation says.
fn gpus_on_node(cluster: &Cluster) -> Option<NodeGpus> {
    let node = cluster.node().ok()?;
    NodeGpus::parse(node["metadata"]["annotations"][annotation::NODE_GPUS].as_str()?).ok()
}

/// Where a pod says that its container is.
fn placement(cluster: &Cluster, pod: &str) -> Option<GpuUuid> {
    let pod = cluster.pod(pod).ok()?;
    let placement: PodPlacement =
        pod["metadata"]["annotations"][annotation::PLACEMENT].as_str()?.parse().ok()?;
    placement.gpus("main").first().cloned()
}

/// Creates a pod for vcuda-scheduler.
fn create(cluster: &Cluster, name: &str, core: u32, annotations: &Value) {
    let limits = json!({"tencent.com/vcuda-core": core, "tencent.com/vcuda-memory": 8});
    cluster
        .create_changed_pod(name, cluster.image(), &["sleep", "inf"], &limits, |pod| {
            pod["spec"]["schedulerName"] = SCHEDULER_NAME.into();
            pod["metadata"]["annotations"] = annotations.clone();
        })
        .unwrap();
}

/// Waits until a pod runs; returns the GPU that its container sees, which must be the one that the pod names.
async fn runs(cluster: &mut Cluster, name: &str) -> GpuUuid {
    let container = cluster.wait_for_pod(name, SOON).await.unwrap();
    let report = probe::run(cluster.cri(), &container, &[]).await.unwrap();
    let seen: GpuUuid = report.gpus[0].uuid.parse().unwrap();
    assert_eq!(placement(cluster, name), Some(seen.clone()), "pod {name}");
    seen
}

fn says(cluster: &Cluster, pod: &str, words: &[&str]) -> bool {
    cluster
        .events(pod)
        .is_ok_and(|events| events.iter().any(|event| words.iter().all(|word| event.contains(word))))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and Kubernetes: run integration/test with KUBE_BIN_DIR"]
async fn the_schedulers_choice_is_where_the_container_runs_and_too_much_waits_with_the_reason() {
    let mut cluster = cluster().await.unwrap();
    let spread = json!({annotation::POLICY: "spread"});
    let mut of_spread = BTreeSet::new();
    for n in 0..GPUS {
        create(&cluster, &format!("spread-{n}"), 60, &spread);
        of_spread.insert(runs(&mut cluster, &format!("spread-{n}")).await);
    }
    assert_eq!(of_spread.len(), GPUS, "one on each GPU");
    // The node has 160 core free, and no GPU has 50.
    create(&cluster, "late", 50, &json!({}));
    let reason = ["no GPU has 50 core", "has 40 core"];
    cluster
        .wait_until("the event says what the GPUs lack", SOON, |cluster| says(cluster, "late", &reason))
        .await
        .unwrap();
    let freed = placement(&cluster, "spread-2").unwrap();
    cluster.delete_pod("spread-2").unwrap();
    assert_eq!(runs(&mut cluster, "late").await, freed);

    // A cordon is seen by the scheduler, and by the node for pods that it places itself.
    let gpus: Vec<_> = gpus_on_node(&cluster).unwrap().gpus.into_iter().map(|gpu| gpu.uuid).collect();
    let open = placement(&cluster, "spread-3").unwrap();
    let others: Vec<_> = gpus.iter().filter(|gpu| **gpu != open).map(GpuUuid::as_str).collect();
    let cordon = format!("{}={}", annotation::CORDON, others.join(","));
    cluster.kubectl(&["annotate", "node", "gpu-node", &cordon], None).unwrap();
    let core = cluster.vcuda.resources()[0].clone();
    cluster
        .wait_until("kubelet counts the cordoned GPUs no more", SOON, |cluster| {
            // What runs on them, and the whole of the other.
            cluster.allocatable(&core).is_ok_and(|units| units < 300)
        })
        .await
        .unwrap();
    create(&cluster, "beside", 20, &json!({}));
    assert_eq!(runs(&mut cluster, "beside").await, open);
    let limits = json!({"tencent.com/vcuda-core": 10, "tencent.com/vcuda-memory": 8});
    cluster.create_pod("unscheduled", cluster.image(), &["sleep", "inf"], &limits).unwrap();
    let container = cluster.wait_for_pod("unscheduled", SOON).await.unwrap();
    let report = probe::run(cluster.cri(), &container, &[]).await.unwrap();
    assert_eq!(report.gpus[0].uuid, open.as_str());
    cluster
        .wait_until("the node has told where it put a share", SOON, |cluster| {
            placement(cluster, "unscheduled") == Some(open.clone())
        })
        .await
        .unwrap();
    create(&cluster, "cordoned", 5, &json!({annotation::USE_GPU: others[0]}));
    cluster
        .wait_until("the event names the cordon", SOON, |cluster| says(cluster, "cordoned", &["is cordoned"]))
        .await
        .unwrap();
    cluster.kubectl(&["annotate", "node", "gpu-node", &format!("{}-", annotation::CORDON)], None).unwrap();
    assert_eq!(runs(&mut cluster, "cordoned").await.as_str(), others[0]);
}

/// What dcgm-exporter and others ask kubelet: device IDs are of the GPU that the container has. They are not where two
/// pods that are placed at once ask just as much, kubelet has no units of that GPU left, or kubelet has heard of the pod
/// long before the device plugin has, which happens on a busy machine (DESIGN.md); so a pod may be tried again.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and Kubernetes: run integration/test with KUBE_BIN_DIR"]
async fn kubelet_tells_monitors_the_gpu_that_the_container_has() {
    let mut cluster = cluster().await.unwrap();
    let resources = cluster.vcuda.resources();
    let root = cluster.kubelet_root();
    let mut unheard = 0;
    // By turns on all GPUs and on one; the third and the fourth ask the same, one after the other.
    for (name, core, policy) in [
        ("first", 60, "spread"),
        ("second", 50, "spread"),
        ("third", 30, "spread"),
        ("fourth", 30, "pack"),
        ("whole", 100, "pack"),
        ("last", 10, "pack"),
    ] {
        loop {
            create(&cluster, name, core, &json!({annotation::POLICY: policy}));
            let gpu = runs(&mut cluster, name).await;
            let mut told = vec![];
            for resource in &resources {
                told.push(pod_resources::gpus(&root, name, resource).await.unwrap());
            }
            assert_eq!([told[0].1, told[1].1], [core as usize, 8], "units of pod {name}");
            if told.iter().all(|(gpus, _)| *gpus == BTreeSet::from([gpu.clone()])) {
                break;
            }
            unheard += 1;
            assert!(unheard <= 2, "pod {name} is on {gpu}, and kubelet says {told:?}");
            cluster.delete_pod(name).unwrap();
        }
    }
    // A restart of kubelet, which reads its checkpoint, and of the device plugin changes nothing.
    cluster.restart_kubelet().unwrap();
    cluster.restart_device_plugin().await.unwrap();
    create(&cluster, "after", 20, &json!({}));
    runs(&mut cluster, "after").await;
    let first = runs(&mut cluster, "first").await;
    assert_eq!(
        pod_resources::gpus(&root, "first", &resources[0]).await.unwrap(),
        (BTreeSet::from([first]), 60)
    );
}

/// Half of the cluster still has gpu-admission: its choice is obeyed where it can be, and counted where the pod is.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and Kubernetes: run integration/test with KUBE_BIN_DIR"]
async fn what_gpu_admission_placed_runs_where_it_says_and_vcuda_scheduler_counts_it() {
    let mut cluster = cluster().await.unwrap();
    let gpu_of = |minor: u32| {
        let node = gpus_on_node(&cluster).unwrap();
        node.gpus.into_iter().find(|gpu| gpu.minor == minor).unwrap().uuid
    };
    let gpus: Vec<GpuUuid> = (0..4).map(gpu_of).collect();
    let theirs = |cluster: &Cluster, name: &str, core: u32, node: &str, gpu: &str| {
        let limits = json!({"tencent.com/vcuda-core": core, "tencent.com/vcuda-memory": 8});
        let change = |pod: &mut Value| {
            pod["metadata"]["annotations"] = json!({
                "tencent.com/predicate-node": node,
                "tencent.com/predicate-gpu-idx-0": gpu,
                "tencent.com/predicate-time": "1700000000000000000",
                "tencent.com/gpu-assigned": "false",
            });
        };
        cluster.create_changed_pod(name, cluster.image(), &["sleep", "inf"], &limits, change).unwrap();
    };
    theirs(&cluster, "theirs", 60, "gpu-node", "2");
    cluster.wait_for_pod("theirs", SOON).await.unwrap();
    // The node has said where it is; nobody counts it anywhere else any more.
    let told = |cluster: &Cluster| placement(cluster, "theirs").is_some();
    cluster.wait_until("the node has told of theirs", SOON, told).await.unwrap();
    assert_eq!(runs(&mut cluster, "theirs").await, gpus[2]);

    let spread = json!({annotation::POLICY: "spread"});
    let mut of_ours = BTreeSet::new();
    for n in 0..GPUS - 1 {
        create(&cluster, &format!("ours-{n}"), 60, &spread);
        of_ours.insert(runs(&mut cluster, &format!("ours-{n}")).await);
    }
    assert_eq!(of_ours, gpus.iter().filter(|gpu| **gpu != gpus[2]).cloned().collect());
    create(&cluster, "no-room", 50, &json!({}));
    cluster
        .wait_until("the event says what the GPUs lack", SOON, |cluster| {
            says(cluster, "no-room", &["no GPU has 50 core"])
        })
        .await
        .unwrap();

    // What cannot be read, or names no GPU of this node, or one that is full, is no reason not to run.
    for (name, node, gpu) in [
        ("nonsense", "gpu-node", "none"),
        ("no-such-gpu", "gpu-node", "77"),
        ("elsewhere", "another-node", "3"),
        ("full", "gpu-node", "2,2"),
    ] {
        theirs(&cluster, name, 10, node, gpu);
        cluster.wait_for_pod(name, SOON).await.unwrap();
        let told = |cluster: &Cluster| placement(cluster, name).is_some();
        cluster.wait_until(&format!("the node has told of {name}"), SOON, told).await.unwrap();
        runs(&mut cluster, name).await;
    }
    // gpu-admission does not see what vcuda-scheduler placed. The node does, and says so; the pod waits for its room.
    theirs(&cluster, "blind", 50, "gpu-node", "1");
    cluster
        .wait_until("the event says what the GPUs lack", SOON, |cluster| {
            says(cluster, "blind", &["no GPU has 50 core"])
        })
        .await
        .unwrap();
    cluster.delete_pod("no-room").unwrap();
    cluster.delete_pod("theirs").unwrap();
    let container = cluster.wait_for_pod("blind", SOON).await.unwrap();
    let report = probe::run(cluster.cri(), &container, &[]).await.unwrap();
    assert_eq!(report.gpus[0].uuid, gpus[2].as_str());
}

/// HAMi#1367: 40 pods took a quarter of an hour and more, for a lock on the node. What is asserted is that all of them
/// run, with a share each; `integration/bench pods` says how long it takes.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and Kubernetes: run integration/test with KUBE_BIN_DIR"]
async fn forty_pods_at_once_on_one_node_all_run() {
    let mut cluster = cluster().await.unwrap();
    for kind in [burst::Kind::Share, burst::Kind::Unscheduled] {
        let burst = burst::burst(&mut cluster, &format!("{kind:?}").to_lowercase(), kind, 40).await.unwrap();
        println!(
            "40 pods at once, {kind:?}: all have a node after {:.1?}, and run after {:.1?}",
            burst.scheduled, burst.running
        );
    }
}
