//! A real API server, kube-scheduler with the configuration as it is deployed, and vcuda-scheduler under the access
//! rules as they are deployed. Nodes are known to the API server only. Each test has its own scheduler and nodes.

#![expect(clippy::unwrap_used, reason = "an assertion, in a test")]

#[expect(dead_code, reason = "other tests need more")]
mod support;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, api::PostParams};
use serde_json::json;
use support::{
    ControlPlane, UNITS, annotate_node, container, create_node, create_pod, delete_pod, get_pod, gpu,
    node_of, offer, placement_of, pod, pods_of, unschedulable, wait,
};
use vcuda_config::{GpuUuid, annotation};

/// Containers' core and memory on each GPU, as the pods say it.
fn taken(pods: &[Pod]) -> BTreeMap<GpuUuid, (u32, u32)> {
    let mut taken: BTreeMap<GpuUuid, (u32, u32)> = BTreeMap::new();
    for pod in pods.iter().filter(|pod| node_of(pod).is_some()) {
        let placement = placement_of(pod).expect("a bound pod says where it is");
        for container in &pod.spec.as_ref().unwrap().containers {
            let limits = container.resources.as_ref().unwrap().limits.as_ref().unwrap();
            let amount = |name: &str| limits.get(name).map_or(0, |amount| amount.0.parse().unwrap());
            let gpus = placement.gpus(&container.name);
            for gpu in gpus {
                let entry = taken.entry(gpu.clone()).or_default();
                entry.0 += amount("tencent.com/vcuda-core") / u32::try_from(gpus.len()).unwrap();
                entry.1 += amount("tencent.com/vcuda-memory");
            }
        }
    }
    taken
}

async fn wait_for_node(client: &Client, name: &str) -> Result<Pod> {
    let bound = async || get_pod(client, name).await.is_ok_and(|pod| node_of(&pod).is_some());
    if let Err(error) = wait(&format!("{name} is bound"), bound).await {
        let pod = get_pod(client, name).await?;
        return Err(error.context(format!("{:?}", unschedulable(&pod))));
    }
    get_pod(client, name).await
}

async fn wait_for_refusal(client: &Client, name: &str, text: &str) -> Result<String> {
    let refusal = async || unschedulable(&get_pod(client, name).await.ok()?);
    let refused = async || refusal().await.is_some_and(|said| said.contains(text));
    if let Err(error) = wait(&format!("{name} is refused with {text:?}"), refused).await {
        return Err(error.context(format!("it says {:?}", refusal().await)));
    }
    refusal().await.context("it changed its mind")
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Kubernetes: run with KUBE_BIN_DIR, and -- --ignored"]
async fn a_burst_fills_every_gpu_and_overbooks_none_though_the_extender_is_killed_in_it() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let client = plane.client("admin").await?;
    for n in 1..=3 {
        create_node(&client, "burst", &format!("burst-{n}"), &offer(n, 4)).await?;
    }
    let mut extender = plane.extender("burst", &["--leader-elect=false"])?;
    extender.wait_until_ready().await?;
    let kube_scheduler = plane.kube_scheduler("burst", &extender)?;

    // Twelve GPUs, four pods each.
    let pods = (0..48).map(|n| create_pod(&client, pod("burst", &format!("burst-{n}"), 25, 40)));
    try_join_all(pods).await?;
    let bound = async || {
        let pods = pods_of(&client, "burst").await.unwrap_or_default();
        pods.iter().filter(|pod| node_of(pod).is_some()).count()
    };
    for part in [6, 20] {
        wait("some are bound", async || bound().await >= part).await.with_context(|| kube_scheduler.log())?;
        extender.process().kill();
        extender.start()?;
    }
    wait("all are bound", async || bound().await == 48).await.with_context(|| extender.log())?;

    let taken = taken(&pods_of(&client, "burst").await?);
    assert_eq!(taken.len(), 12);
    assert!(taken.values().all(|all| *all == (100, 160)), "{taken:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Kubernetes: run with KUBE_BIN_DIR, and -- --ignored"]
async fn a_pod_that_no_gpu_can_take_is_told_why_and_runs_once_one_can() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let client = plane.client("admin").await?;
    create_node(&client, "told", "told-1", &offer(11, 2)).await?;
    let extender = plane.extender("told", &["--leader-elect=false"])?;
    let _kube_scheduler = plane.kube_scheduler("told", &extender)?;

    create_pod(&client, pod("told", "told-a", 60, 32)).await?;
    create_pod(&client, pod("told", "told-b", 60, 32)).await?;
    let first = wait_for_node(&client, "told-a").await?;
    wait_for_node(&client, "told-b").await?;

    // The node has 80 core left, but no GPU has 60.
    create_pod(&client, pod("told", "told-c", 60, 32)).await?;
    let said = wait_for_refusal(&client, "told-c", "no GPU has 60 core and 8 GiB free").await?;
    for n in 0..2 {
        assert!(said.contains(&format!("{} has 40 core and 32 GiB free", gpu(11, n))), "{said}");
    }
    delete_pod(&client, "told-a").await?;
    let third = wait_for_node(&client, "told-c").await?;
    assert_eq!(placement_of(&third).unwrap().containers, placement_of(&first).unwrap().containers);

    // An administrator keeps new shares away, and lets them in again.
    let both = format!("{}, {}", gpu(11, 0), gpu(11, 1));
    annotate_node(&client, "told-1", json!({ annotation::CORDON: both })).await?;
    extender.wait_until_it_says(&pod("told", "told-d", 10, 4), "told-1", "is cordoned").await?;
    create_pod(&client, pod("told", "told-d", 10, 4)).await?;
    let said = wait_for_refusal(&client, "told-d", "is cordoned").await?;
    assert!(said.contains(gpu(11, 1).as_str()), "{said}");
    annotate_node(&client, "told-1", json!({ annotation::CORDON: gpu(11, 1).as_str() })).await?;
    let placed = placement_of(&wait_for_node(&client, "told-d").await?).unwrap();
    assert_eq!(placed.gpus("main"), [gpu(11, 0)]);

    // A GPU falls ill.
    annotate_node(&client, "told-1", json!({ annotation::CORDON: null })).await?;
    let mut ill = offer(11, 2);
    ill.gpus[0].healthy = false;
    annotate_node(&client, "told-1", json!({ annotation::NODE_GPUS: ill.to_text() })).await?;
    let is_ill = format!("{} is unhealthy", gpu(11, 0));
    extender.wait_until_it_says(&pod("told", "told-e", 200, 0), "told-1", &is_ill).await?;
    create_pod(&client, pod("told", "told-e", 39, 4)).await?;
    assert_eq!(placement_of(&wait_for_node(&client, "told-e").await?).unwrap().gpus("main"), [gpu(11, 1)]);

    // What a pod wishes is heard, or refused by name.
    let mut picky = pod("told", "told-f", 1, 1);
    picky["metadata"]["annotations"] = json!({ annotation::USE_MODEL: "H100" });
    create_pod(&client, picky).await?;
    wait_for_refusal(
        &client,
        "told-f",
        "(NVIDIA A100-SXM4-40GB) is ruled out by tencent.com/vcuda-use-model",
    )
    .await?;
    let mut wrong = pod("told", "told-g", 1, 1);
    wrong["metadata"]["annotations"] = json!({ annotation::POLICY: "binpack" });
    create_pod(&client, wrong).await?;
    wait_for_refusal(&client, "told-g", "annotation tencent.com/vcuda-policy: \"binpack\" is no policy")
        .await?;

    // A node whose device plugin is not there yet.
    annotate_node(&client, "told-1", json!({ annotation::NODE_GPUS: null })).await?;
    let remedy = "see that vcuda-device-plugin runs there";
    extender.wait_until_it_says(&pod("told", "told-h", 1, 1), "told-1", remedy).await?;
    create_pod(&client, pod("told", "told-h", 1, 1)).await?;
    wait_for_refusal(&client, "told-h", remedy).await?;
    annotate_node(&client, "told-1", json!({ annotation::NODE_GPUS: offer(11, 2).to_text() })).await?;
    wait_for_node(&client, "told-h").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Kubernetes: run with KUBE_BIN_DIR, and -- --ignored"]
async fn all_containers_of_a_pod_find_room_together_and_init_containers_use_it_before() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let client = plane.client("admin").await?;
    create_node(&client, "several", "several-1", &offer(21, 2)).await?;
    let extender = plane.extender("several", &["--leader-elect=false"])?;
    let _kube_scheduler = plane.kube_scheduler("several", &extender)?;

    let mut several = pod("several", "several-a", 70, 32);
    let mut sidecar = container("sidecar", 20, 8);
    sidecar["restartPolicy"] = "Always".into();
    several["spec"]["initContainers"] = json!([container("setup", 100, 0), sidecar]);
    several["spec"]["containers"] =
        json!([container("main", 70, 32), { "name": "log", "image": "none" }, container("far", 60, 16)]);
    create_pod(&client, several).await?;
    let placement = placement_of(&wait_for_node(&client, "several-a").await?).unwrap();
    let named: Vec<_> = placement.containers.keys().map(String::as_str).collect();
    assert_eq!(named, ["far", "main", "setup", "sidecar"]);
    assert_ne!(placement.gpus("main"), placement.gpus("far"));

    // The init container had a whole GPU, so that one is the pod's alone; the other has what is left.
    let held = placement.gpus("setup")[0].clone();
    create_pod(&client, pod("several", "several-b", 10, 4)).await?;
    let other = placement_of(&wait_for_node(&client, "several-b").await?).unwrap();
    assert_ne!(other.gpus("main")[0], held);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Kubernetes: run with KUBE_BIN_DIR, and -- --ignored"]
async fn pods_of_other_schedulers_count_where_they_are_or_else_everywhere() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let client = plane.client("admin").await?;
    create_node(&client, "foreign", "foreign-1", &offer(31, 2)).await?;
    create_node(&client, "foreign", "foreign-2", &offer(32, 2)).await?;
    let bound = |name: &str, node: &str, annotations: serde_json::Value| {
        let mut pod = pod("foreign", name, 60, 32);
        pod["spec"]["nodeName"] = node.into();
        pod["metadata"]["annotations"] = annotations;
        pod
    };
    // gpu-admission put one on the second GPU.
    let choice = json!({ "tencent.com/predicate-node": "foreign-1", "tencent.com/predicate-gpu-idx-0": "1" });
    create_pod(&client, bound("foreign-a", "foreign-1", choice)).await?;
    // Nobody says where the other one is.
    create_pod(&client, bound("foreign-b", "foreign-2", json!({}))).await?;
    let extender = plane.extender("foreign", &["--leader-elect=false"])?;
    extender.wait_until_ready().await?;
    assert_eq!(extender.metric("vcuda_scheduler_unplaced_containers").await?, 1);

    let asked = create_pod(&client, pod("foreign", "foreign-c", 50, 32)).await?;
    let question = json!({ "Pod": asked, "NodeNames": ["foreign-1", "foreign-2"] });
    let answer = extender.call("filter", &question).await?;
    assert_eq!(answer["NodeNames"], json!(["foreign-1"]), "{answer}");
    let why = answer["FailedAndUnresolvableNodes"]["foreign-2"].as_str().unwrap();
    assert!(why.contains("1 container(s) there do not say which GPU they are on"), "{why}");
    assert_eq!(extender.bind(&asked, "foreign-1").await?, "");
    assert_eq!(placement_of(&get_pod(&client, "foreign-c").await?).unwrap().gpus("main"), [gpu(31, 0)]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Kubernetes: run with KUBE_BIN_DIR, and -- --ignored"]
async fn a_bind_that_fails_leaves_nothing_behind_and_one_that_succeeded_can_be_asked_for_again() -> Result<()>
{
    let plane = ControlPlane::shared().await?;
    let client = plane.client("admin").await?;
    create_node(&client, "bind", "bind-1", &offer(41, 1)).await?;
    create_node(&client, "bind", "bind-2", &offer(42, 1)).await?;
    let mut extender = plane.extender("bind", &["--leader-elect=false"])?;
    extender.wait_until_ready().await?;

    // Deleted in flight, and its name taken by another pod.
    let gone = create_pod(&client, pod("bind", "bind-a", 100, 0)).await?;
    let question = json!({ "Pod": gone, "NodeNames": ["bind-1"] });
    extender.call("filter", &question).await?;
    delete_pod(&client, "bind-a").await?;
    let same_name = create_pod(&client, pod("bind", "bind-a", 100, 0)).await?;
    let error = extender.bind(&gone, "bind-1").await?;
    assert!(!error.is_empty());
    assert_eq!(node_of(&get_pod(&client, "bind-a").await?), None);
    assert_eq!(extender.metric("vcuda_scheduler_reservations").await?, 0);

    // Its room is free. What an earlier attempt, or a user, wrote on the pod is written over.
    delete_pod(&client, "bind-a").await?;
    let mut stale = pod("bind", "bind-b", 100, 0);
    stale["metadata"]["annotations"] = json!({ annotation::PLACEMENT: format!("1;1;main={}", gpu(9, 9)) });
    let stale = create_pod(&client, stale).await?;
    assert_eq!(extender.bind(&stale, "bind-1").await?, "");
    assert_eq!(placement_of(&get_pod(&client, "bind-b").await?).unwrap().gpus("main"), [gpu(41, 0)]);

    // A retry to the same node is no error; one to another node is, and costs that node nothing.
    let again = extender.bind(&stale, "bind-1").await?;
    assert!(again.is_empty() || again.contains("has the pod already"), "{again}");
    assert!(!extender.bind(&stale, "bind-2").await?.is_empty());
    let other = create_pod(&client, pod("bind", "bind-c", 100, 0)).await?;
    // A pod that does not fit any more is refused with the reason.
    let error = extender.bind(&other, "bind-1").await?;
    assert!(error.contains("1 whole GPU(s) asked, 0 free") && error.contains(gpu(41, 0).as_str()), "{error}");
    // This one was never filtered by this process.
    extender.process().kill();
    extender.start()?;
    extender.wait_until_ready().await?;
    assert_eq!(extender.bind(&other, "bind-2").await?, "");
    assert!(!extender.bind(&same_name, "bind-2").await?.is_empty());
    assert_eq!(extender.process().terminate().await?, Some(0));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Kubernetes: run with KUBE_BIN_DIR, and -- --ignored"]
async fn a_standby_answers_only_once_the_leader_is_gone_and_knows_what_it_bound() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let client = plane.client("admin").await?;
    create_node(&client, "lead", "lead-1", &offer(51, 1)).await?;
    // Renewals must not come too late beside all other tests.
    let lease = ["--lease-duration=40"];
    let mut first = plane.extender("lead-first", &lease)?;
    first.wait_until_ready().await?;
    let mut second = plane.extender("lead-second", &lease)?;

    let pod_a = create_pod(&client, pod("lead", "lead-a", 60, 32)).await?;
    let question = json!({ "Pod": pod_a, "NodeNames": ["lead-1"] });
    let answers = async || second.call("filter", &question).await.is_ok();
    wait("the standby is up", answers).await?;
    let answer = second.call("filter", &question).await?;
    assert!(answer["Error"].as_str().unwrap().contains("does not lead"), "{answer}");
    assert!(!second.is_ready().await);
    assert!(second.bind(&pod_a, "lead-1").await?.contains("does not lead"));
    assert_eq!(first.bind(&pod_a, "lead-1").await?, "");

    first.process().kill();
    second.wait_until_ready().await?;
    let pod_b = create_pod(&client, pod("lead", "lead-b", 60, 32)).await?;
    let answer = second.call("filter", &json!({ "Pod": pod_b, "NodeNames": ["lead-1"] })).await?;
    assert_eq!(answer["NodeNames"], json!([]), "{answer}");

    // One that is stopped gives the lease up, so the other need not wait for it to run out.
    first.start()?;
    assert_eq!(second.process().terminate().await?, Some(0));
    assert!(second.log().contains("was given up"), "{}", second.log());
    first.wait_until_ready().await?;

    // One that loses the lease ends, and says so.
    let leases: Api<k8s_openapi::api::coordination::v1::Lease> = Api::namespaced(client, "kube-system");
    let taken_over = async || {
        let Ok(mut lease) = leases.get("vcuda-scheduler").await else { return false };
        lease.spec.as_mut().unwrap().holder_identity = Some("somebody else".into());
        leases.replace("vcuda-scheduler", &PostParams::default(), &lease).await.is_ok()
    };
    wait("the lease is taken over", taken_over).await?;
    assert_eq!(first.process().ended().await?, Some(12));
    assert!(first.log().contains("it is held by somebody else"), "{}", first.log());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Kubernetes: run with KUBE_BIN_DIR, and -- --ignored"]
async fn preemption_makes_room_on_one_gpu_and_spares_whom_it_can() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let client = plane.client("admin").await?;
    create_node(&client, "preempt", "preempt-1", &offer(61, 2)).await?;
    for (name, value) in [("preempt-low", 10), ("preempt-high", 1000)] {
        let class = json!({
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": { "name": name },
            "value": value,
        });
        support::create(&client, &class).await?;
    }
    let extender = plane.extender("preempt", &["--leader-elect=false"])?;
    extender.wait_until_ready().await?;
    let _kube_scheduler = plane.kube_scheduler("preempt", &extender)?;

    // Both GPUs are full, and the youngest two pods, which kube-scheduler would evict, are on different ones.
    for n in 0..4_u8 {
        let mut low = pod("preempt", &format!("preempt-{n}"), 50, 80);
        low["spec"]["priorityClassName"] = "preempt-low".into();
        low["metadata"]["annotations"] = json!({ annotation::USE_GPU: gpu(61, n % 2).as_str() });
        create_pod(&client, low).await?;
        wait_for_node(&client, &format!("preempt-{n}")).await?;
    }
    let mut high = pod("preempt", "preempt-high", 80, 32);
    high["spec"]["priorityClassName"] = "preempt-high".into();
    create_pod(&client, high).await?;
    // There is no kubelet to end the victims; those that end leave the API server by themselves, without grace.
    let placement =
        placement_of(&wait_for_node(&client, "preempt-high").await.with_context(|| extender.log())?);
    let pods = pods_of(&client, "preempt").await?;
    let left: Vec<_> = pods.iter().filter_map(|pod| pod.metadata.name.as_deref()).collect();
    let taken = taken(&pods);
    assert!(taken.values().all(|(core, memory)| *core <= 100 && *memory <= UNITS), "{taken:?}");
    assert_eq!(taken[&placement.unwrap().gpus("main")[0]].0, 80, "{left:?}");
    assert_eq!(left.len(), 2, "one more was evicted than kube-scheduler's two: {left:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Kubernetes: run with KUBE_BIN_DIR, and -- --ignored"]
async fn many_pods_are_bound_to_one_node_at_once() -> Result<()> {
    const PODS: usize = 400;
    let plane = ControlPlane::shared().await?;
    let client = plane.client("admin").await?;
    create_node(&client, "many", "many-1", &offer(71, 8)).await?;
    let extender = plane.extender("many", &["--leader-elect=false"])?;
    extender.wait_until_ready().await?;
    let pods = (0..PODS).map(|n| create_pod(&client, pod("many", &format!("many-{n}"), 2, 3)));
    let pods = try_join_all(pods).await?;

    let start = Instant::now();
    let errors = try_join_all(pods.iter().map(|pod| extender.bind(pod, "many-1"))).await?;
    let time = start.elapsed().max(Duration::from_millis(1));
    assert!(errors.iter().all(String::is_empty), "{errors:?}");
    println!("{PODS} pods bound to one node in {time:.2?}: {:.0} a second", PODS as f64 / time.as_secs_f64());

    let taken = taken(&pods_of(&client, "many").await?);
    assert_eq!(taken.values().map(|(core, _)| core).sum::<u32>(), 800);
    assert!(taken.values().all(|all| *all == (100, 150)), "{taken:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Kubernetes: run with KUBE_BIN_DIR, and -- --ignored"]
async fn kube_scheduler_is_served_over_https_by_its_client_certificate() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let client = plane.client("admin").await?;
    create_node(&client, "https", "https-1", &offer(81, 1)).await?;
    // One CA signs the certificate that both sides show.
    let files = tempfile::tempdir()?;
    let file = |name: &str| files.path().join(name).display().to_string();
    let ca_key = rcgen::KeyPair::generate()?;
    let mut ca = rcgen::CertificateParams::new(Vec::new())?;
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate()?;
    let certificate = rcgen::CertificateParams::new(vec!["127.0.0.1".into()])?;
    std::fs::write(file("ca.crt"), ca.self_signed(&ca_key)?.pem())?;
    let certificate = certificate.signed_by(&key, &rcgen::Issuer::new(ca, ca_key))?;
    std::fs::write(file("tls.crt"), certificate.pem())?;
    std::fs::write(file("tls.key"), key.serialize_pem())?;

    let [certificate, key, ca] = ["tls.crt", "tls.key", "ca.crt"].map(file);
    let arguments = ["--tls-certificate", &certificate, "--tls-key", &key, "--client-ca", &ca];
    let extender = plane.extender("https", &[&["--leader-elect=false"][..], &arguments].concat())?;
    extender.wait_until_ready().await?;
    let tls = json!({ "certFile": certificate, "keyFile": key, "caFile": ca });
    let _kube_scheduler = plane.kube_scheduler_over("https", &extender, Some(tls))?;
    create_pod(&client, pod("https", "https-a", 20, 4)).await?;
    wait_for_node(&client, "https-a").await.with_context(|| extender.log())?;
    Ok(())
}

/// A figure, for people: how many pods a second are bound, and how many the same API server creates. What is asserted is
/// that all of them are, each GPU filled and none overbooked.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Kubernetes: run with KUBE_BIN_DIR, and -- --ignored"]
async fn binds_without_pause_are_as_fast_as_the_api_server_writes() -> Result<()> {
    const PODS: usize = 800;
    const AT_ONCE: usize = 16;
    let plane = ControlPlane::shared().await?;
    let client = plane.client("admin").await?;
    // One node takes half of it, so that a lock on a node would show.
    create_node(&client, "rate", "rate-big", &offer(71, 40)).await?;
    create_node(&client, "rate", "rate-small", &offer(72, 40)).await?;
    let extender = plane.extender("rate", &["--leader-elect=false"])?;
    extender.wait_until_ready().await?;
    let each = |n: usize| (0..PODS).skip(n).step_by(AT_ONCE);
    let begun = Instant::now();
    let create = |n: usize| {
        let client = client.clone();
        async move {
            let mut pods = Vec::new();
            for n in each(n) {
                pods.push((
                    n,
                    create_pod(&client, pod("rate-unscheduled", &format!("rate-{n}"), 10, 16)).await?,
                ));
            }
            Ok::<_, anyhow::Error>(pods)
        }
    };
    let created = try_join_all((0..AT_ONCE).map(create)).await?;
    let creating = begun.elapsed();
    let begun = Instant::now();
    let bind = |pods: Vec<(usize, Pod)>| {
        let extender = &extender;
        async move {
            for (n, pod) in pods {
                let node = if n % 2 == 0 { "rate-big" } else { "rate-small" };
                let error = extender.bind(&pod, node).await?;
                anyhow::ensure!(error.is_empty(), "rate-{n}: {error}");
            }
            Ok(())
        }
    };
    try_join_all(created.into_iter().map(bind)).await?;
    let binding = begun.elapsed();
    let rate = |took: Duration| PODS as f64 / took.as_secs_f64();
    println!("{:.0} binds/s; the API server created {:.0} pods/s", rate(binding), rate(creating));
    let taken = taken(&pods_of(&client, "rate-unscheduled").await?);
    assert!(taken.len() == 80 && taken.values().all(|all| *all == (100, 160)), "{taken:?}");
    Ok(())
}
