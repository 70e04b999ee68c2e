//! A real kubelet, API server and scheduler over the same containerd and the same parts as the node tests.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::time::Duration;

use anyhow::{Context, Result};
use integration::{cluster::Cluster, host::Options, image::Image, probe};
use serde_json::{Value, json};
use vcuda_config::Policy;

const SOON: Duration = Duration::from_secs(90);

async fn cluster() -> Result<Cluster> {
    let binaries =
        Cluster::binaries().context("KUBE_BIN_DIR must name the folder with kubelet and its peers")?;
    Cluster::with_vcuda(&binaries, &Options::from_env()?).await
}

fn share(core: u32, memory: u32) -> Value {
    json!({"tencent.com/vcuda-core": core, "tencent.com/vcuda-memory": memory})
}

/// Creates a pod, waits until it runs, and returns its container's ID.
async fn runs(cluster: &mut Cluster, name: &str, limits: &Value) -> String {
    cluster.create_pod(name, cluster.image(), &["sleep", "inf"], limits).unwrap();
    cluster.wait_for_pod(name, SOON).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and Kubernetes: run integration/test with KUBE_BIN_DIR"]
async fn a_pod_goes_from_apply_to_a_refused_allocation() {
    let mut cluster = cluster().await.unwrap();
    let first = runs(&mut cluster, "first", &share(20, 32)).await;
    let second = runs(&mut cluster, "second", &share(50, 32)).await;
    let plain = runs(&mut cluster, "plain", &json!({})).await;
    assert_eq!(
        probe::holds_8_gib(cluster.cri(), &first).await.unwrap(),
        probe::holds_8_gib(cluster.cri(), &second).await.unwrap(),
        "both fit one GPU"
    );
    let seen = cluster.cri().exec(&plain, &["ls", "/dev"]).await.unwrap().stdout;
    assert!(!seen.contains("nvidia"), "{seen}");
    for pod in ["first", "second", "plain"] {
        cluster.delete_pod(pod).unwrap();
    }
    cluster
        .wait_until("no share is on record", SOON, |cluster| cluster.vcuda.shares().is_empty())
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and Kubernetes: run integration/test with KUBE_BIN_DIR"]
async fn a_refused_pod_says_why_in_its_events_and_starts_once_it_can() {
    let mut cluster = cluster().await.unwrap();
    cluster.vcuda.nri_plugin().unwrap().kill();
    cluster.create_pod("late", cluster.image(), &["sleep", "inf"], &share(20, 32)).unwrap();
    let told = |cluster: &Cluster| {
        cluster
            .events("late")
            .is_ok_and(|events| events.iter().any(|event| event.contains("vcuda-nri-plugin")))
    };
    cluster.wait_until("the pod's events name vcuda-nri-plugin", SOON, told).await.unwrap();
    let plain = runs(&mut cluster, "plain", &json!({})).await;
    assert_eq!(cluster.cri().exec(&plain, &["true"]).await.unwrap().code, 0);
    // kubelet tries again by itself.
    cluster.vcuda.start_nri_plugin().await.unwrap();
    let late = cluster.wait_for_pod("late", SOON).await.unwrap();
    probe::holds_8_gib(cluster.cri(), &late).await.unwrap();
    for pod in ["late", "plain"] {
        cluster.delete_pod(pod).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and Kubernetes: run integration/test with KUBE_BIN_DIR"]
async fn a_kubelet_restart_brings_both_resources_back_and_keeps_running_shares() {
    let mut cluster = cluster().await.unwrap();
    let resources = cluster.vcuda.resources();
    let offered = resources.clone().map(|resource| cluster.allocatable(&resource).unwrap());
    let before = runs(&mut cluster, "before", &share(20, 32)).await;
    let gpu = probe::holds_8_gib(cluster.cri(), &before).await.unwrap();

    cluster.restart_kubelet().unwrap();
    let registered = cluster.vcuda.file().paths.kubelet.join("kubelet.sock");
    cluster.wait_until("kubelet is back", SOON, |_| registered.exists()).await.unwrap();
    // A new pod with a share proves that both plugins have registered with the new kubelet.
    let after = runs(&mut cluster, "after", &share(20, 32)).await;
    probe::holds_8_gib(cluster.cri(), &after).await.unwrap();
    let back = resources.map(|resource| cluster.allocatable(&resource).unwrap());
    assert_eq!(back, offered);
    let (phase, id) = cluster.pod_state("before").unwrap();
    assert_eq!((phase.as_str(), id.as_deref()), ("Running", Some(before.as_str())), "the same container");
    assert_eq!(probe::holds_8_gib(cluster.cri(), &before).await.unwrap(), gpu, "the same GPU");
    for pod in ["before", "after"] {
        cluster.delete_pod(pod).unwrap();
    }
}

/// Events about the image of a pod's container.
fn image_warnings(cluster: &Cluster, pod: &str) -> Vec<Value> {
    let events = cluster.whole_events(pod).unwrap_or_default();
    events.into_iter().filter(|event| event["reason"] == "GpuShareImageWarning").collect()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and Kubernetes: run integration/test with KUBE_BIN_DIR"]
async fn what_the_guard_lets_pass_by_its_policy_is_one_event_of_the_pod() {
    let mut cluster = cluster().await.unwrap();
    cluster.import(&Image::busybox("local/busybox:1")).unwrap();
    cluster.vcuda.change(|file| file.images.policy = Policy::Warn).unwrap();
    let create = |cluster: &Cluster, pod: &str, command: &[&str]| {
        cluster.create_pod(pod, "local/busybox:1", command, &share(20, 4)).unwrap();
    };
    let told = |pod: &'static str| move |cluster: &Cluster| !image_warnings(cluster, pod).is_empty();
    create(&cluster, "lasting", &["sleep", "inf"]);
    cluster.wait_until("the pod's events say what the guard found", SOON, told("lasting")).await.unwrap();
    let event = image_warnings(&cluster, "lasting").pop().unwrap();
    let message = event["message"].as_str().unwrap();
    assert!(message.starts_with("container main was started") && message.contains("libc-none"), "{message}");
    assert_eq!((&event["type"], &event["count"]), (&json!("Warning"), &json!(1)));
    let pod = cluster.pod("lasting").unwrap();
    assert_eq!(event["involvedObject"]["uid"], pod["metadata"]["uid"]);
    let described = cluster.kubectl(&["describe", "pod", "lasting"], None).unwrap();
    assert!(described.contains("GpuShareImageWarning"), "{described}");

    // One that ends at once has it too, and another process, with kubelet's credentials, tells nothing twice.
    cluster.restart_device_plugin_as_kubelet().await.unwrap();
    create(&cluster, "brief", &["true"]);
    cluster.wait_until("a container that is gone has its event", SOON, told("brief")).await.unwrap();
    let events = image_warnings(&cluster, "lasting");
    assert_eq!((events.len(), &events[0]["count"]), (1, &json!(1)), "{events:?}");

    // A container that restarts all the time raises its event's count, and no faster than once a minute.
    let raised = |cluster: &Cluster| image_warnings(cluster, "brief").iter().any(|event| event["count"] == 2);
    cluster.wait_until("a restart raises the count", SOON * 2, raised).await.unwrap();
    assert_eq!(image_warnings(&cluster, "brief").len(), 1);
    for pod in ["lasting", "brief"] {
        cluster.delete_pod(pod).unwrap();
    }
}

/// The pods are kubelet's own. gpu-manager's checkpoint is as its `pkg/types` at 8cd842e has it: one line of JSON, device
/// nodes by path, memory in bytes, init containers not in it, and pods in it that have long ended.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and Kubernetes: run integration/test with KUBE_BIN_DIR"]
async fn a_migration_is_foretold_from_kubelets_pods_and_gpu_managers_checkpoint() {
    let mut cluster = cluster().await.unwrap();
    let mut uids = vec![];
    for (name, core) in [("small", 20), ("large", 70)] {
        runs(&mut cluster, name, &share(core, 32)).await;
        uids.push(cluster.pod(name).unwrap()["metadata"]["uid"].as_str().unwrap().to_owned());
    }
    let given = |device: &str, cores: u32, memory: u64| json!({"main": {"Devices": [format!("/dev/{device}")], "Cores": cores, "Memory": memory}});
    let checkpoint = |small: &str| {
        json!({"PodGPUMapping": {
            &uids[0]: given(small, 20, 8 << 30),
            &uids[1]: given("nvidia1", 70, 8 << 30),
            "5eed0000-0000-4000-8000-0000deadbeef": given("nvidia0", 100, 40 << 30),
        }})
        .to_string()
    };
    let file = cluster.folder().join("gpumanager_internal_checkpoint");
    let (kubeconfig, node) = cluster.access_of_device_plugin();
    let check = |cluster: &Cluster, more: &[&str]| {
        let mut command = cluster.vcuda.command("vcuda-device-plugin");
        command
            .args(["migrate", "--check", "--node-name", node, "-o", "json", "--kubeconfig"])
            .arg(&kubeconfig);
        let output = command.args(more).output().unwrap();
        let said: Option<Value> = serde_json::from_slice(&output.stdout).ok();
        (output.status.code(), said, String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let from_file = ["--checkpoint", file.to_str().unwrap()];

    std::fs::write(&file, checkpoint("nvidia0")).unwrap();
    let (code, said, error) = check(&cluster, &from_file);
    assert_eq!(code, Some(0), "{error}");
    let workloads = said.unwrap()["workloads"].as_array().unwrap().clone();
    let of = |pod: &str| {
        workloads.iter().find(|one| one["pod"] == pod).unwrap_or_else(|| panic!("{pod}: {workloads:?}"))
    };
    for (pod, core, on) in [("default/small", 20, 0), ("default/large", 70, 1)] {
        let one = of(pod);
        assert_eq!(
            (&one["core"], &one["memoryUnits"], &one["verdict"]),
            (&json!(core), &json!(32), &json!("runs"))
        );
        assert_eq!(one["on"], json!([on]), "{one}");
        assert_eq!(one["gpus"].as_array().unwrap().len(), 1, "{one}");
    }
    assert_ne!(of("default/small")["gpus"], of("default/large")["gpus"], "each stays where it is");
    assert_eq!(of("5eed0000-0000-4000-8000-0000deadbeef")["verdict"], "gone");
    assert_eq!(workloads.len(), 3, "{workloads:?}");

    // What asks for the impossible is there too, and the exit code says so. Kubelet has not started it.
    cluster.create_pod("odd", cluster.image(), &["sleep", "inf"], &share(0, 32)).unwrap();
    let (code, said, error) = check(&cluster, &from_file);
    assert_eq!(code, Some(11), "{error}");
    let said = said.unwrap().to_string();
    assert!(said.contains("default/odd") && said.contains("vcuda-core is missing"), "{said}");
    cluster.delete_pod("odd").unwrap();

    // Without gpu-manager's file, and with one that is none.
    let (code, said, error) = check(&cluster, &["--no-checkpoint"]);
    assert_eq!((code, said.unwrap()["workloads"].as_array().unwrap().len()), (Some(0), 2), "{error}");
    for text in ["", "{", "[]", "{\"PodGPUMapping\": 5}"] {
        std::fs::write(&file, text).unwrap();
        let (code, said, error) = check(&cluster, &from_file);
        assert!(
            code == Some(1) && said.is_none() && error.contains("no checkpoint of gpu-manager"),
            "{text:?}: {error}"
        );
    }
    std::fs::remove_file(&file).unwrap();
    let (code, _, error) = check(&cluster, &from_file);
    assert!(code == Some(1) && error.contains("--no-checkpoint"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and Kubernetes: run integration/test with KUBE_BIN_DIR"]
async fn the_manifests_are_accepted_by_the_api_server() {
    let cluster = cluster().await.unwrap();
    for file in
        ["deploy/daemonset.yaml", "deploy/scheduler.yaml", "deploy/admission.yaml", "examples/pod.yaml"]
    {
        let file = format!("{}/../config/{file}", env!("CARGO_MANIFEST_DIR"));
        cluster.kubectl(&["apply", "--dry-run=server", "--validate=strict", "-f", &file], None).unwrap();
    }
}
