//! Compute time on a node: what an operator and a pod's owner may say about it, and what becomes of that whatever
//! part is killed.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::{
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use integration::{
    host::Options,
    node::Node,
    probe::{self, OUT_OF_MEMORY},
};
use ledger::Shares;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use vcuda_config::annotation;

const GIB: u64 = 1 << 30;
const SOON: Duration = Duration::from_secs(20);

/// What settles does so within a second or two; a busy machine may need a while.
const SETTLED: Duration = Duration::from_secs(60);

async fn node() -> Node {
    Node::with_vcuda(&Options::from_env().unwrap()).await.unwrap()
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
    let mut node = Node::start(&Options::from_env().unwrap()).await.unwrap();
    let at = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    node.vcuda.change(|file| file.metrics.listen = Some(at)).unwrap();
    node.vcuda.start_device_plugin().unwrap();
    node.vcuda.start_nri_plugin().await.unwrap();
    node.wait_for_offer().await.unwrap();
    let pod = node.pod_with_share("train", 20, 32);
    let mut running = node.kubelet.run(&pod).await.unwrap();
    let other = node.kubelet.run(&node.pod_with_share("other", 50, 32)).await.unwrap();
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

    // Less memory than it holds: that stays, nothing more is to be had, and the metrics tell.
    let said = |name: &str| metric(at, &format!("vcuda_share_memory_{name}"), "train");
    let mib = |mib: u64| Some((mib << 20) as f64);
    assert_eq!((said("limit_bytes"), said("refusals_total")), (mib(16 << 10), Some(0.0)));
    assert!(set(&node, "train", &["--memory", "4GiB"]).status.success());
    let report = probe::run(node.cri(), running.id("main"), &["--alloc", "1"]).await.unwrap();
    assert_eq!(report.allocs[0].result, OUT_OF_MEMORY, "{report:?}");
    assert_eq!((report.gpus[0].total_bytes, report.memory.unwrap().free_bytes), (4 * GIB, 0));
    assert_eq!((said("limit_bytes"), said("used_bytes")), (mib(4 << 10), mib(6144)));
    assert_eq!(said("refusals_total"), Some(1.0));
    let alive = node.cri().exec(running.id("main"), &["kill", "-0", &process]).await.unwrap();
    assert_eq!(alive.code, 0, "the process that was there goes on");
    assert!(set(&node, "train", &["--memory", "16GiB"]).status.success());
    let report = probe::run(node.cri(), running.id("main"), &["--alloc", "8192"]).await.unwrap();
    assert_eq!(report.allocs[0].result, 0, "raised at once: {report:?}");

    // More than the GPU has.
    let output = set(&node, "train", &["--core", "51", "--core-limit", "60"]);
    assert_eq!(output.status.code(), Some(9), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.starts_with("vcuda-device-plugin: default/train, container main: "), "{said}");
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
    let again = node.kubelet.run(&node.pod_with_share("train", 20, 32)).await.unwrap();
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
        let mut pod = node.pod_with_share(name, 20, 8);
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
    let running = node.kubelet.run(&node.pod_with_share("old", 30, 8)).await.unwrap();
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

/// Percent of its GPU's time that the container of a pod uses, by its own measure, over two seconds. It asks no daemon.
fn measured(node: &Node, pod: &str) -> f64 {
    let mut command = node.vcuda.command("vcuda-device-plugin");
    let output = command.args(["top", "--count", "2", "--interval", "2", "-o", "json"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let look: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    let shares = look["shares"].as_array().unwrap();
    let share = shares.iter().find(|share| share["pod"] == pod).unwrap();
    share["measuredPermille"].as_f64().unwrap() / 10.0
}

/// Whether `found` may be a share of `percent`: never more, and less only as far as a busy machine lets a program come
/// late to launch. `integration/bench share` measures how exact shares are.
fn is_share(found: f64, percent: f64) -> bool {
    (percent * 0.7..=percent + 4.0).contains(&found)
}

/// Waits until the container of each pod uses so many percent of its GPU's time. How long that takes is the machine's
/// matter, so it is not asserted.
async fn settles(node: &Node, what: &str, wanted: &[(&str, f64)]) {
    let near = |(pod, percent): &(&str, f64)| is_share(measured(node, pod), *percent);
    let settled = node.wait_until(what, SETTLED, async || wanted.iter().all(near)).await;
    if settled.is_err() {
        let found: Vec<_> = wanted.iter().map(|(pod, _)| (pod, measured(node, pod))).collect();
        panic!("{what}: {wanted:?}, found {found:?}");
    }
}

/// Keeps the GPU of a container busy; returns the process there.
async fn spin(node: &Node, container: &str) -> String {
    probe::spin(node.cri(), container).await.unwrap()
}

async fn stop(node: &Node, container: &str, process: &str) {
    assert_eq!(node.cri().exec(container, &["kill", "-9", process]).await.unwrap().code, 0);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn time_is_shared_lent_given_back_and_changed_whoever_is_alive() {
    let mut node = node().await;
    let mut small = node.pod_with_share("small", 30, 8);
    small.annotations.insert(annotation::CORE_LIMIT.into(), "50".into());
    let small = node.kubelet.run(&small).await.unwrap();
    let large = node.kubelet.run(&node.pod_with_share("large", 70, 8)).await.unwrap();
    assert_eq!(status(&node, "small")["gpu"], status(&node, "large")["gpu"], "one GPU");
    let (a, b) = (small.id("main"), large.id("main"));

    spin(&node, a).await;
    settles(&node, "an idle neighbour's time is lent up to the limit", &[("small", 50.0)]).await;
    let busy = spin(&node, b).await;
    settles(&node, "it goes back when the neighbour wants it", &[("small", 30.0), ("large", 70.0)]).await;
    let used = |pod: &str| status(&node, pod)["usedPercent"].as_f64().unwrap_or_default();
    let seen = async || is_share(used("small"), 30.0) && is_share(used("large"), 70.0);
    let seen = node.wait_until("the driver sees the same", SETTLED, seen).await;
    assert!(seen.is_ok(), "the driver sees {} and {}", used("small"), used("large"));

    // Shares hold without anybody alive, and nothing more is lent.
    node.vcuda.device_plugin().unwrap().kill();
    node.vcuda.nri_plugin().unwrap().kill();
    settles(&node, "shares hold without daemons", &[("small", 30.0), ("large", 70.0)]).await;
    stop(&node, b, &busy).await;
    settles(&node, "nobody lends", &[("small", 30.0)]).await;
    node.vcuda.start_device_plugin().unwrap();
    node.vcuda.start_nri_plugin().await.unwrap();
    settles(&node, "the new governor lends", &[("small", 50.0)]).await;

    let output = set(&node, "large", &["--core", "20"]);
    assert!(output.status.success(), "{output:?}");
    let output = set(&node, "small", &["--core", "60", "--core-limit", "60"]);
    assert!(output.status.success(), "{output:?}");
    spin(&node, b).await;
    settles(&node, "what an operator sets holds at once", &[("small", 60.0), ("large", 20.0)]).await;
    for running in [&small, &large] {
        node.kubelet.delete(running).await.unwrap();
    }
    node.assert_empty().await;
}

/// A value of `/metrics`, of the share of a pod.
fn metric(at: SocketAddr, name: &str, pod: &str) -> Option<f64> {
    let mut stream = TcpStream::connect(at).ok()?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let of_pod = format!("pod=\"{pod}\"");
    let of = |line: &&str| line.starts_with(&format!("{name}{{")) && line.contains(&of_pod);
    text.lines().find(of)?.rsplit(' ').next()?.parse().ok()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn a_work_conserving_node_divides_idle_time_by_share_low_work_comes_last_and_metrics_tell() {
    let mut node = Node::start(&Options::from_env().unwrap()).await.unwrap();
    let at = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let change = |file: &mut vcuda_config::NodeFile| {
        file.compute.work_conserving = true;
        file.metrics.listen = Some(at);
    };
    node.vcuda.change(change).unwrap();
    node.vcuda.start_device_plugin().unwrap();
    node.vcuda.start_nri_plugin().await.unwrap();
    node.wait_for_offer().await.unwrap();
    let one = node.kubelet.run(&node.pod_with_share("one", 20, 8)).await.unwrap();
    let two = node.kubelet.run(&node.pod_with_share("two", 10, 8)).await.unwrap();
    let mut low = node.pod_with_share("low", 10, 8);
    low.annotations.insert(annotation::PRIORITY.into(), "low".into());
    let low = node.kubelet.run(&low).await.unwrap();
    let gpu = |pod: &str| status(&node, pod)["gpu"].clone();
    assert!(gpu("one") == gpu("two") && gpu("two") == gpu("low"), "one GPU");

    // As good as all of it: what is queued is bounded, for the others may wake up.
    let alone = spin(&node, low.id("main")).await;
    let rate = |pod: &str| metric(at, "vcuda_share_rate_percent", pod).unwrap_or_default();
    let seen = |pod: &str| metric(at, "vcuda_share_used_percent", pod).unwrap_or_default();
    let whole = node
        .wait_until("low work has an idle GPU", SETTLED, async || rate("low") == 99.9 && seen("low") > 70.0);
    assert!(whole.await.is_ok(), "rate {}, used {}", rate("low"), seen("low"));

    // Of the 60 that nobody owns, normal shares get all: two thirds and one third.
    for container in [one.id("main"), two.id("main")] {
        spin(&node, container).await;
    }
    let divided = node.wait_until("idle time is divided by share", SETTLED, async || {
        (rate("one"), rate("two"), rate("low")) == (60.0, 30.0, 10.0)
    });
    assert!(divided.await.is_ok(), "{} {} {}", rate("one"), rate("two"), rate("low"));
    settles(&node, "and used", &[("one", 60.0), ("two", 30.0), ("low", 10.0)]).await;

    stop(&node, low.id("main"), &alone).await;
    let total = |name: &str| metric(at, name, "low").unwrap_or_default();
    for name in [
        "vcuda_share_launches_total",
        "vcuda_share_throttled_seconds_total",
        "vcuda_share_driver_gpu_seconds_total",
    ] {
        assert!(total(name) > 0.0, "{name}");
    }
    assert_eq!(
        (metric(at, "vcuda_share_core_percent", "low"), metric(at, "vcuda_share_core_limit_percent", "low")),
        (Some(10.0), Some(100.0))
    );
    for running in [&one, &two, &low] {
        node.kubelet.delete(running).await.unwrap();
    }
    node.assert_empty().await;
}

/// Processes in the cgroups of a bench's containers.
fn in_containers_of(bench: u32) -> usize {
    let mine = format!("/vcudabench{bench}x");
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let groups = processes.filter_map(|entry| fs::read_to_string(entry.path().join("cgroup")).ok());
    groups.filter(|groups| groups.contains(&mine)).count()
}

/// Their cgroups, and the processes whose command line names something in `folder`.
fn left_of(bench: u32, folder: &Path) -> (Vec<PathBuf>, Vec<Pid>) {
    let mine = format!("vcudabench{bench}x");
    let roots =
        ["/sys/fs/cgroup", "/sys/fs/cgroup/pids"].into_iter().filter_map(|root| fs::read_dir(root).ok());
    let groups =
        roots.flatten().flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(&mine));
    let names_it = |pid: &Pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(folder.to_str().unwrap())
    };
    let all = fs::read_dir("/proc").unwrap().flatten();
    let all = all.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?));
    (groups.map(|entry| entry.path()).collect(), all.filter(names_it).collect())
}

/// Containers are in process groups of their own, so no terminal's interrupt reaches them.
#[test]
#[ignore = "needs root: run integration/test"]
fn a_bench_that_is_interrupted_leaves_nothing_and_one_that_is_killed_no_container() {
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_vcuda-bench"));
        command.args(["share", "--work", "attack: 64 processes", "--governor", "without"]);
        // Not a pipe: whoever is left behind would hold it open.
        let words = tempfile::NamedTempFile::new().unwrap();
        command.env("TMPDIR", folder.path()).stdout(Stdio::null()).stderr(words.reopen().unwrap());
        let mut bench = command.spawn().unwrap();
        let id = bench.id();
        eventually("64 processes run", || in_containers_of(id) > 64);
        kill_process(Pid::from_raw(id.try_into().unwrap()).unwrap(), signal).unwrap();
        let status = bench.wait().unwrap();
        if signal == Signal::KILL {
            eventually("none runs", || in_containers_of(id) == 0);
            eventually("what a killed bench cannot take down is gone", || {
                let (groups, processes) = left_of(id, folder.path());
                // One that has just ended cannot be killed, nor a group removed that it is still in.
                for process in &processes {
                    let _ = kill_process(*process, Signal::KILL);
                }
                for group in &groups {
                    let _ = fs::remove_dir(group);
                }
                groups.is_empty() && processes.is_empty()
            });
            continue;
        }
        let said = fs::read_to_string(words.path()).unwrap();
        assert_eq!((status.code(), said.contains("interrupted")), (Some(1), true), "{said}");
        assert_eq!((in_containers_of(id), left_of(id, folder.path())), (0, (vec![], vec![])));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + SETTLED;
    while !is_so() {
        assert!(Instant::now() < deadline, "not within {SETTLED:?}: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}
