//! The main job: a pod asks for a share and gets it, no more and no less.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::{os::unix::fs::MetadataExt, time::Duration};

use integration::{
    driver::Wanted,
    host::Options,
    kubelet::RunningPod,
    node::Node,
    pod::{Container, Pod},
    probe::{self, OUT_OF_MEMORY},
};
use serde_json::Value;

const GIB: u64 = 1 << 30;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn a_pod_gets_its_share_and_no_more() {
    let node = Node::with_vcuda(&Options::from_env().unwrap()).await.unwrap();
    let pod = node.pod_with_share("share", 20, 32);
    let running = node.kubelet.run(&pod).await.unwrap();

    let report =
        probe::run(node.cri(), running.id("main"), &["--alloc", "6144", "--alloc", "3072", "--free"]);
    let report = report.await.unwrap();
    assert_eq!(report.error, None);
    assert_eq!(report.gpus.len(), 1, "{report:?}");
    assert_eq!(report.gpus[0].total_bytes, 8 * GIB);
    assert_eq!(report.memory.unwrap().total_bytes, 8 * GIB);
    assert_eq!(report.allocs[0].result, 0, "6 of 8 GiB: {report:?}");
    assert_eq!(report.allocs[1].result, OUT_OF_MEMORY, "9 of 8 GiB: {report:?}");
    let after = report.memory_after.unwrap();
    assert!(after.free_bytes <= 2 * GIB, "{report:?}");
    assert_eq!(report.memory_freed, report.memory, "freed memory comes back: {report:?}");
    assert_eq!(report.nvml.len(), 1, "{report:?}");
    assert_eq!(report.nvml[0].total_bytes, 8 * GIB);
    assert_eq!(report.nvml[0].uuid, report.gpus[0].uuid);
    assert_eq!(report.nvml[0].used_bytes + report.nvml[0].free_bytes, 8 * GIB, "{report:?}");

    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

/// I7: on the node's disk it could write until the disk is full.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn what_a_container_can_write_of_ours_is_bounded_and_goes_with_it() {
    let node = Node::with_vcuda(&Options::from_env().unwrap()).await.unwrap();
    let pod = node.pod_with_share("writer", 20, 32);
    let mut running = node.kubelet.run(&pod).await.unwrap();
    let script = format!(
        "i=0; while [ $i -lt 8000 ]; do printf '%01000d' 0 || exit 9; i=$((i+1)); done >> {}",
        "/usr/local/vcuda/share/usage"
    );
    let exec = node.cri().exec(running.id("main"), &["/usr/bin/dash", "-c", &script]).await.unwrap();
    assert_eq!(exec.code, 9, "{exec:?}");
    for change in [
        "mv /usr/local/vcuda/share/usage /usr/local/vcuda/share/other",
        "rm /usr/local/vcuda/share/usage",
        "mv /usr/local/vcuda/share /usr/local/vcuda/other",
        "mv /usr/local/vcuda /usr/local/other",
        "touch /usr/local/vcuda/lib/other",
        "truncate -s 0 /usr/local/vcuda/share/limits",
        "truncate -s 0 /usr/local/vcuda/lib/libvcuda_preload.so",
        "truncate -s 0 /etc/ld.so.preload",
        "mv /etc/ld.so.preload /etc/other",
    ] {
        let command: Vec<&str> = ["/usr/bin/busybox"].into_iter().chain(change.split(' ')).collect();
        let exec = node.cri().exec(running.id("main"), &command).await.unwrap();
        let kept = exec.stderr.contains("Read-only file system") || exec.stderr.contains("busy");
        assert!(exec.code == 1 && kept, "{change}: {exec:?}");
    }
    let shares = node.vcuda.file().paths.shares();
    let [share] = &node.vcuda.shares()[..] else { panic!("{:?}", node.vcuda.shares()) };
    let mounted = || {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        mounts.lines().filter(|line| line.contains(shares.to_str().unwrap())).count()
    };
    let usage = std::fs::metadata(shares.join(share).join("writable/usage")).unwrap();
    // The file is sparse: its length says nothing.
    assert!(usage.blocks() * 512 <= 3 << 20, "{usage:?}");
    assert_eq!(mounted(), 1);
    node.kubelet.restart_container(&mut running, "main").await.unwrap();
    assert_eq!(mounted(), 1, "that of the earlier container is gone");
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
    assert_eq!(mounted(), 0);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn two_pods_share_one_gpu_side_by_side() {
    let node = Node::with_vcuda(&Options::from_env().unwrap()).await.unwrap();
    let small = node.pod_with_share("small", 20, 32);
    let large = node.pod_with_share("large", 50, 30);
    let small = node.kubelet.run(&small).await.unwrap();
    let large = node.kubelet.run(&large).await.unwrap();

    node.hold(small.id("main"), 6144).await.unwrap();
    let fill = probe::run(node.cri(), large.id("main"), &["--fill", "256"]).await.unwrap();
    assert_eq!(fill.gpus[0].total_bytes, 30 * (GIB / 4));
    assert_eq!(fill.filled.unwrap().result, OUT_OF_MEMORY);
    assert!(fill.filled.unwrap().bytes > 6 * GIB, "{fill:?}");
    assert!(fill.filled.unwrap().bytes <= 30 * (GIB / 4), "{fill:?}");
    let view = probe::run(node.cri(), small.id("main"), &[]).await.unwrap();
    assert_eq!(view.gpus[0].uuid, fill.gpus[0].uuid, "both fit one GPU, so both get one GPU");
    assert!(view.memory.unwrap().free_bytes <= 2 * GIB, "its own 6 GiB count: {view:?}");

    for running in [&small, &large] {
        node.kubelet.delete(running).await.unwrap();
    }
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn a_killed_process_gives_its_memory_back() {
    let node = Node::with_vcuda(&Options::from_env().unwrap()).await.unwrap();
    let pod = node.pod_with_share("killed", 20, 32);
    let running = node.kubelet.run(&pod).await.unwrap();
    for _ in 0..5 {
        let process = node.hold(running.id("main"), 6144).await.unwrap();
        let refused = probe::run(node.cri(), running.id("main"), &["--alloc", "6144"]).await.unwrap();
        assert_eq!(refused.allocs[0].result, OUT_OF_MEMORY, "{refused:?}");
        node.cri().exec(running.id("main"), &["kill", "-9", &process]).await.unwrap();
        node.wait_until("the memory is back", Duration::from_secs(5), async || {
            let again = probe::run(node.cri(), running.id("main"), &["--alloc", "6144"]).await;
            again.is_ok_and(|report| report.allocs[0].result == 0)
        })
        .await
        .unwrap();
    }
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

/// The real `nvidia-smi` 550 in each of two containers on one GPU.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn nvidia_smi_shows_the_share_and_its_own_processes() {
    let node = Node::with_vcuda(&Options::from_env().unwrap()).await.unwrap();
    assert!(node.cache().nvidia_smi().is_some(), "run vcuda-preload/tests/fetch.sh first");
    let one = node.pod_with_share("one", 20, 32);
    let other = node.pod_with_share("other", 50, 30);
    let one = node.kubelet.run(&one).await.unwrap();
    let other = node.kubelet.run(&other).await.unwrap();
    let first = node.hold(one.id("main"), 1024).await.unwrap();
    let second = node.hold(one.id("main"), 512).await.unwrap();
    node.hold(other.id("main"), 6144).await.unwrap();

    let smi = async |pod: &RunningPod, arguments: &[&str]| {
        let command = [&["nvidia-smi"], arguments].concat();
        let done = node.cri().exec(pod.id("main"), &command).await.unwrap();
        assert_eq!(done.code, 0, "{done:?}");
        done.stdout
    };
    let apps = ["--query-compute-apps=pid,used_memory,name", "--format=csv,noheader"];
    let mut rows: Vec<_> = smi(&one, &apps).await.lines().map(str::to_owned).collect();
    rows.sort();
    let mut expected = [(&first, 1024), (&second, 512)]
        .map(|(process, mib)| format!("{process}, {mib} MiB, {}", probe::PATH));
    expected.sort();
    assert_eq!(rows, expected);
    let table = smi(&one, &[]).await;
    assert!(table.contains("1536MiB /   8192MiB"), "{table}");
    for process in [&first, &second] {
        let mut rows = table.lines().filter(|line| line.contains(probe::PATH));
        let listed = rows.any(|line| line.split_whitespace().any(|word| word == process));
        assert!(listed, "{process} is not in\n{table}");
    }
    assert_eq!(table.lines().filter(|line| line.contains("cuda-probe")).count(), 2, "{table}");
    let others = smi(&other, &apps).await;
    assert_eq!(others.lines().count(), 1, "{others}");
    assert!(others.contains("6144 MiB"), "{others}");

    for running in [&one, &other] {
        node.kubelet.delete(running).await.unwrap();
    }
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn a_whole_gpu_comes_whole_and_without_the_shim() {
    let node = Node::with_vcuda(&Options::from_env().unwrap()).await.unwrap();
    let whole = node.pod_with_share("whole", 100, 0);
    let whole = node.kubelet.run(&whole).await.unwrap();
    let share = node.pod_with_share("share", 20, 32);
    let share = node.kubelet.run(&share).await.unwrap();

    let report = probe::run(node.cri(), whole.id("main"), &["--alloc", "20480"]).await.unwrap();
    assert_eq!(report.gpus.len(), 1, "{report:?}");
    assert_eq!(report.allocs[0].result, 0, "{report:?}");
    let env = node.cri().exec(whole.id("main"), &["env"]).await.unwrap().stdout;
    assert!(!env.contains("LD_PRELOAD"), "{env}");
    let other = probe::run(node.cri(), share.id("main"), &[]).await.unwrap();
    assert_ne!(other.gpus[0].uuid, report.gpus[0].uuid, "a whole GPU is nobody else's");

    for running in [&whole, &share] {
        node.kubelet.delete(running).await.unwrap();
    }
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn a_container_with_a_share_has_the_device_nodes_of_its_gpu_alone() {
    let node = Node::with_vcuda(&Options::from_env().unwrap()).await.unwrap();
    let pod = node.pod_with_share("nodes", 20, 32);
    let running = node.kubelet.run(&pod).await.unwrap();
    let spec = node.cri().info(running.id("main")).await.unwrap().spec;
    let devices: Vec<_> = spec["linux"]["devices"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|device| device["path"].as_str())
        .filter(|path| path.starts_with("/dev/nvidia"))
        .collect();
    assert!(devices.contains(&"/dev/nvidiactl"), "{devices:?}");
    assert!(devices.contains(&"/dev/nvidia-uvm"), "{devices:?}");
    let gpus = devices.iter().filter(|path| path["/dev/nvidia".len()..].parse::<u32>().is_ok()).count();
    assert_eq!(gpus, 1, "{devices:?}");
    let privileged = spec["process"]["capabilities"]["bounding"].to_string();
    assert!(!privileged.contains("CAP_SYS_ADMIN"), "{privileged}");
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn a_pod_without_a_share_is_what_it_is_without_vcuda() {
    let mut options = Options::from_env().unwrap();
    options.driver = Wanted::None;
    let plain = Node::start(&options).await.unwrap();
    let pod = Pod::new(
        "plain",
        Container::new("main", plain.image()).env("LD_PRELOAD", "").command(&["sleep", "inf"]),
    );
    let before = spec_of(&plain, &pod).await;
    drop(plain);
    let node = Node::with_vcuda(&Options::from_env().unwrap()).await.unwrap();
    let after = spec_of(&node, &pod).await;
    assert_eq!(before, after);
    node.assert_empty().await;
}

/// A container's OCI spec without what differs from one container to the next: IDs and the node's folder.
async fn spec_of(node: &Node, pod: &Pod) -> Value {
    let running = node.kubelet.run(pod).await.unwrap();
    let id = running.id("main").to_owned();
    let spec = node.cri().info(&id).await.unwrap().spec.to_string();
    let sandbox_pid =
        spec.split("/proc/").nth(1).and_then(|rest| rest.split('/').next()).unwrap_or("-").to_owned();
    node.kubelet.delete(&running).await.unwrap();
    let spec = spec
        .replace(&id, "CONTAINER")
        .replace(&running.sandbox, "SANDBOX")
        .replace(&format!("/proc/{sandbox_pid}/"), "/proc/PID/")
        .replace(&node.folder().display().to_string(), "FOLDER")
        .replace(&node.cgroup(), "/CGROUP");
    serde_json::from_str(&spec).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn requests_that_can_never_be_met_are_refused_with_field_and_remedy() {
    let node = Node::with_vcuda(&Options::from_env().unwrap()).await.unwrap();
    for (core, memory, says) in [
        (150, 0, ["150", "whole GPUs (100, 200"]),
        (20, 0, ["vcuda-memory is missing", "256 MiB"]),
        (0, 32, ["vcuda-core is missing", "at least 1 core"]),
    ] {
        let pod = node.pod_with_share("impossible", core, memory);
        let error = node.kubelet.run(&pod).await.expect_err("it can never be met");
        let error = format!("{error:#}");
        assert!(says.iter().all(|word| error.contains(word)), "{core} core, {memory} memory: {error}");
    }
    let pod = node.pod_with_share("after", 20, 32);
    let running = node.kubelet.run(&pod).await.unwrap();
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}
