//! What a pod's image and environment bring along must go on working, and must not open a way past the share.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use integration::{
    host::Options,
    image::Image,
    kubelet::RunningPod,
    node::Node,
    pod::{Container, Pod},
    probe::{self, OUT_OF_MEMORY, PATH},
};
use vcuda_config::Policy;

const GIB: u64 = 1 << 30;

/// A library that every image has and that does nothing when it is preloaded.
const HARMLESS: &str = "/usr/lib/x86_64-linux-gnu/libgcc_s.so.1";

async fn node() -> anyhow::Result<Node> {
    Node::with_vcuda(&Options::from_env()?).await
}

fn asks(container: Container) -> Container {
    container.share(20, 32)
}

/// Runs a pod of one container and checks that it stands under its ceiling.
async fn runs_enforced(node: &Node, name: &str, container: Container) -> RunningPod {
    let running = node.kubelet.run(&Pod::new(name, asks(container))).await.unwrap();
    enforced(node, running.id("main")).await;
    running
}

async fn enforced(node: &Node, id: &str) {
    let report = probe::run(node.cri(), id, &["--alloc", "6144", "--alloc", "3072"]).await.unwrap();
    check(&report);
}

fn check(report: &probe::Report) {
    assert_eq!(report.error, None, "{report:?}");
    assert_eq!(report.gpus[0].total_bytes, 8 * GIB, "{report:?}");
    assert_eq!((report.allocs[0].result, report.allocs[1].result), (0, OUT_OF_MEMORY), "{report:?}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn images_of_three_debian_releases_run_enforced() {
    let node = node().await.unwrap();
    for release in ["bullseye", "bookworm", "trixie"] {
        let image = probe::image(release).unwrap();
        node.import(&image).unwrap();
        let running = runs_enforced(&node, release, Container::new("main", image.name())).await;
        node.kubelet.delete(&running).await.unwrap();
    }
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn the_pods_own_preload_and_library_path_stay() {
    let node = node().await.unwrap();
    let container = Container::new("main", node.image())
        .env("LD_PRELOAD", HARMLESS)
        .env("LD_LIBRARY_PATH", "/opt/mine/lib");
    let running = runs_enforced(&node, "own-env", container).await;
    let env = node.cri().exec(running.id("main"), &["env"]).await.unwrap().stdout;
    let value = |name: &str| {
        env.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).unwrap_or_default().to_owned()
    };
    assert!(value("LD_PRELOAD").contains(HARMLESS), "{env}");
    assert!(value("LD_PRELOAD").contains("libvcuda_preload.so"), "{env}");
    assert!(value("LD_LIBRARY_PATH").contains("/opt/mine/lib"), "{env}");
    let maps = r#"while read -r line; do echo "$line"; done </proc/self/maps"#;
    let maps = node.cri().exec(running.id("main"), &["/usr/bin/dash", "-c", maps]).await.unwrap().stdout;
    assert!(maps.contains("libgcc_s.so.1") && maps.contains("libvcuda_preload.so"), "{maps}");
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn a_preload_that_the_image_sets_stays() {
    let node = node().await.unwrap();
    let image = probe::image("bookworm").unwrap().env("LD_PRELOAD", HARMLESS);
    node.import(&image).unwrap();
    let running = runs_enforced(&node, "image-env", Container::new("main", image.name())).await;
    let env = node.cri().exec(running.id("main"), &["env"]).await.unwrap().stdout;
    let line = env.lines().find(|line| line.starts_with("LD_PRELOAD=")).unwrap_or_default();
    assert!(line.contains(HARMLESS) && line.contains("libvcuda_preload.so"), "{env}");
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn an_image_with_its_own_ld_so_preload_keeps_it() {
    let node = node().await.unwrap();
    let image = probe::image("bookworm").unwrap().text("/etc/ld.so.preload", &format!("{HARMLESS}\n"));
    node.import(&image).unwrap();
    let running = runs_enforced(&node, "own-preload", Container::new("main", image.name())).await;
    let file = node.cri().exec(running.id("main"), &["cat", "/etc/ld.so.preload"]).await.unwrap().stdout;
    assert!(file.contains(HARMLESS) && file.contains("libvcuda_preload.so"), "{file}");
    let written =
        node.cri().exec(running.id("main"), &["sh", "-c", "echo > /etc/ld.so.preload"]).await.unwrap();
    assert_ne!(written.code, 0, "it is read-only: {written:?}");
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn a_user_without_root_and_a_read_only_root_make_no_difference() {
    let node = node().await.unwrap();
    let container = Container::new("main", node.image()).user(1000).read_only();
    let running = runs_enforced(&node, "modest", container).await;
    let id = node.cri().exec(running.id("main"), &["id", "-u"]).await.unwrap().stdout;
    assert_eq!(id.trim(), "1000");
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn init_containers_and_sidecars_have_shares_of_their_own() {
    let node = node().await.unwrap();
    let init = Container::new("init", node.image())
        .share(20, 32)
        .command(&[PATH, "--alloc", "6144", "--alloc", "3072"]);
    let sidecar = Container::new("sidecar", node.image()).share(10, 4).sidecar();
    let main = Container::new("main", node.image()).share(20, 32);
    let running =
        node.kubelet.run(&Pod::new("family", main).with_init(init).with_init(sidecar)).await.unwrap();
    check(&probe::parse(&node.kubelet.log(&running, "init")).unwrap());
    enforced(&node, running.id("main")).await;
    let beside = probe::run(node.cri(), running.id("sidecar"), &["--alloc", "2048"]).await.unwrap();
    assert_eq!(beside.gpus[0].total_bytes, GIB, "{beside:?}");
    assert_eq!(beside.allocs[0].result, OUT_OF_MEMORY, "{beside:?}");
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn shells_and_cleared_environments_stand_under_the_same_ceiling() {
    let node = node().await.unwrap();
    let running = runs_enforced(&node, "shell", Container::new("main", node.image())).await;
    let probe = format!("{PATH} --alloc 6144 --alloc 3072");
    for command in [
        vec!["/usr/bin/dash", "-c", &probe],
        vec!["/usr/bin/dash", "-c", &format!("exec {probe}")],
        vec!["env", "-i", "/usr/bin/dash", "-c", &probe],
        vec!["env", "LD_PRELOAD=", PATH, "--alloc", "6144", "--alloc", "3072"],
        vec!["su", "user", "-c", &probe],
    ] {
        let exec = node.cri().exec(running.id("main"), &command).await.unwrap();
        check(&probe::parse(&exec.stdout).unwrap_or_else(|error| panic!("{command:?}: {error}: {exec:?}")));
    }
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn a_container_that_restarts_keeps_its_gpu_and_starts_empty() {
    let node = node().await.unwrap();
    let mut running = runs_enforced(&node, "restarts", Container::new("main", node.image())).await;
    let gpu = probe::run(node.cri(), running.id("main"), &[]).await.unwrap().gpus[0].uuid.clone();
    for _ in 0..3 {
        node.hold(running.id("main"), 6144).await.unwrap();
        node.kubelet.restart_container(&mut running, "main").await.unwrap();
        let report = probe::run(node.cri(), running.id("main"), &["--alloc", "6144"]).await.unwrap();
        assert_eq!(report.gpus[0].uuid, gpu, "the same GPU");
        assert_eq!(report.allocs[0].result, 0, "what the last run held is free: {report:?}");
    }
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn an_image_without_a_c_library_is_refused_with_the_reason() {
    let node = node().await.unwrap();
    node.import(&Image::busybox("local/busybox:1")).unwrap();
    let pod = Pod::new("static", asks(Container::new("main", "local/busybox:1")));
    let error = format!("{:#}", node.kubelet.run(&pod).await.expect_err("nothing would enforce the share"));
    assert!(error.to_lowercase().contains("c library") || error.contains("libc"), "{error}");
    let plain = Pod::new("plain", Container::new("main", "local/busybox:1"));
    let running = node.kubelet.run(&plain).await.unwrap();
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn an_image_that_the_node_has_seen_is_known_by_its_layers() {
    let node = node().await.unwrap();
    let state = node.vcuda.file().paths.state.clone();
    for name in ["first", "second"] {
        let pod = Pod::new(name, asks(Container::new("main", node.image())));
        let running = node.kubelet.run(&pod).await.unwrap();
        node.kubelet.delete(&running).await.unwrap();
    }
    let kept = std::fs::read_dir(state.join("scans")).unwrap().flatten();
    let kept =
        kept.filter(|entry| entry.path().extension().is_some_and(|extension| extension == "json")).count();
    assert_eq!(kept, 1, "one image, one look at its layers");
    let seen = std::fs::read_dir(state.join("verdicts")).unwrap().next().unwrap().unwrap();
    let seen = std::fs::read_to_string(seen.path()).unwrap();
    assert!(seen.contains("\"layers\":\"") && seen.contains("\"starts\":2"), "{seen}");

    // What a driver would break, from memory: no container of it runs any more.
    let check = node.vcuda.file().paths.install.join("bin/vcuda-check");
    let mut matrix = std::process::Command::new(check);
    let matrix = matrix.args(["matrix", "--seen", "--config"]).arg(node.vcuda.config()).output().unwrap();
    let text = String::from_utf8_lossy(&matrix.stdout);
    assert!(matrix.status.success() && text.contains("  fits"), "{matrix:?}");
    node.assert_empty().await;
}

/// What `vcuda-check` says on this node: its exit code and its report.
fn check_node(node: &Node, args: &[&str]) -> (Option<i32>, serde_json::Value) {
    let mut check = std::process::Command::new(node.vcuda.file().paths.install.join("bin/vcuda-check"));
    check.args(args).args(["-o", "json", "--config"]).arg(node.vcuda.config());
    let output = check.arg("--containerd-state").arg(node.folder().join("state")).output().unwrap();
    let report = serde_json::from_slice(&output.stdout);
    (output.status.code(), report.unwrap_or_else(|error| panic!("{error}: {output:?}")))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn running_shares_are_checked_as_they_run() {
    let mut node = node().await.unwrap();
    let fit = node.kubelet.run(&Pod::new("fit", asks(Container::new("main", node.image())))).await.unwrap();
    let (code, rows) = check_node(&node, &["matrix", "--running"]);
    assert_eq!((code, rows.as_array().unwrap().len()), (Some(0), 1), "{rows}");
    assert_eq!(rows[0]["subject"], "pod default/fit, container main");
    let report = &rows[0]["reports"][0];
    assert_eq!((&report["verdict"], report["driver"].is_string()), (&"fits".into(), true), "{report}");

    // By the beginning of its ID; the shim and the driver that are mounted into it are none of the image's.
    let (code, report) = check_node(&node, &["container", &fit.id("main")[..12]]);
    assert_eq!((code, &report["verdict"]), (Some(0), &"fits".into()), "{report}");
    let findings = report["findings"].as_array().unwrap().iter();
    let ids = findings.clone().map(|of| of["id"].as_str().unwrap());
    let ours = ids.filter(|id| ["preload-present", "preload-env", "libcuda-first"].contains(id));
    assert_eq!(ours.count(), 0, "{report}");
    let loud: Vec<_> =
        findings.filter(|of| of["severity"] != "info").map(|of| of["id"].as_str().unwrap()).collect();
    assert_eq!(loud, ["entry-static"], "busybox sleeps in it: {report}");

    // One that runs because the node says so is told all the same, and the others with it.
    node.import(&Image::busybox("local/busybox:1")).unwrap();
    node.vcuda.change(|file| file.images.policy = Policy::Warn).unwrap();
    let unfit = Pod::new("unfit", Container::new("main", "local/busybox:1").share(10, 4));
    let unfit = node.kubelet.run(&unfit).await.unwrap();
    let (code, rows) = check_node(&node, &["matrix", "--running", "--gpu", "9.0"]);
    let mut verdicts: Vec<_> =
        rows.as_array().unwrap().iter().map(|row| row["reports"][0]["verdict"].as_str().unwrap()).collect();
    verdicts.sort_unstable();
    assert_eq!((code, verdicts.as_slice()), (Some(1), &["does-not-fit", "fits"][..]), "{rows}");

    // What GPUs there are is NVML's word.
    let inventory = ledger::Inventory::load(&node.vcuda.file().paths.inventory()).unwrap();
    let capabilities: Vec<_> = inventory.capabilities.values().copied().collect();
    assert_eq!(capabilities, vec![80; inventory.gpus.len()], "A100s");
    for running in [&fit, &unfit] {
        node.kubelet.delete(running).await.unwrap();
    }
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn the_guard_goes_by_the_node_file_that_the_daemons_were_given() {
    let mut node = node().await.unwrap();
    node.import(&Image::busybox("local/busybox:1")).unwrap();
    node.vcuda.change(|file| file.images.policy = Policy::Off).unwrap();
    let pod = Pod::new("static", asks(Container::new("main", "local/busybox:1")));
    let running = node.kubelet.run(&pod).await.unwrap();
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn annotations_that_a_pod_makes_up_get_it_nothing() {
    let node = node().await.unwrap();
    let mut pod = Pod::new("liar", Container::new("main", node.image()));
    for name in [
        vcuda_config::annotation::CORE_GRANT,
        vcuda_config::annotation::MEMORY_GRANT,
        vcuda_config::annotation::SHARE,
    ] {
        pod.annotations.insert(name.into(), "GPU-00000000-0000-0000-0000-000000000000=50".into());
    }
    let running = node.kubelet.run(&pod).await.unwrap();
    let seen = node.cri().exec(running.id("main"), &["ls", "/dev"]).await.unwrap().stdout;
    assert!(!seen.contains("nvidia"), "{seen}");
    node.kubelet.delete(&running).await.unwrap();
    node.assert_empty().await;
}
