//! vcuda-scheduler hears of room later than kube-scheduler does: what the API server says to it goes through a relay
//! that holds it back for a while. Nothing else happens in the cluster, so nothing else wakes a pod that was refused.

#[expect(dead_code, reason = "other tests need more")]
mod support;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kube::Client;
use serde_json::{Value, json};
use support::{
    ControlPlane, Extender, annotate_node, create, create_node, create_pod, delete_pod, get_pod, gpu,
    node_of, offer, placement_of, pod, unschedulable, wait,
};
use tokio::{
    io::{self, AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Mutex, watch},
    time::sleep,
};
use vcuda_config::annotation;

/// One test at a time: a vcuda-scheduler that starts makes all pods be tried again that have room.
static ALONE: Mutex<()> = Mutex::const_new(());

/// Passes bytes on between a client and the API server, and those of the API server not while it is to hold them back.
struct Relay {
    port: u16,
    held: watch::Sender<bool>,
}

impl Relay {
    async fn start(api_port: u16) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let port = listener.local_addr()?.port();
        let held = watch::Sender::new(false);
        let holding = held.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(client, api_port, holding.subscribe()));
            }
        });
        Ok(Self { port, held })
    }

    fn hold(&self) {
        self.held.send_replace(true);
    }

    fn go_on(&self) {
        self.held.send_replace(false);
    }
}

/// One connection.
async fn pass(client: TcpStream, api_port: u16, mut held: watch::Receiver<bool>) -> Result<()> {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = TcpStream::connect(("127.0.0.1", api_port)).await?.into_split();
    let down = async {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let read = from_server.read(&mut buffer).await?;
            held.wait_for(|held| !held).await?;
            if read == 0 {
                return anyhow::Ok(());
            }
            to_client.write_all(&buffer[..read]).await?;
        }
    };
    tokio::select! {
        down = down => down,
        up = io::copy(&mut from_client, &mut to_server) => Ok(up.map(drop)?),
    }
}

async fn asked(extender: &Extender) -> Result<u64> {
    extender.metric("vcuda_scheduler_filtered_total").await
}

async fn nudges(extender: &Extender) -> Result<u64> {
    extender.metric("vcuda_scheduler_nudges_total").await
}

/// Waits until kube-scheduler has asked about a pod since it had asked `before` times, and asks no more.
async fn wait_until_refused(extender: &Extender, before: u64) -> Result<()> {
    let asked = async || asked(extender).await.unwrap_or(before);
    let settled = async || {
        let first = asked().await;
        sleep(Duration::from_secs(2)).await;
        first > before && first == asked().await
    };
    wait("kube-scheduler asks in vain", settled).await
}

async fn create_refused(client: &Client, extender: &Extender, pod: Value) -> Result<()> {
    let before = asked(extender).await?;
    create_pod(client, pod).await?;
    wait_until_refused(extender, before).await
}

async fn wait_for_node(client: &Client, extender: &Extender, name: &str) -> Result<()> {
    let bound = async || get_pod(client, name).await.is_ok_and(|pod| node_of(&pod).is_some());
    let waited = wait(&format!("{name} is bound"), bound).await;
    let pod = get_pod(client, name).await?;
    waited.with_context(|| format!("{:?}\n{}", unschedulable(&pod), extender.log()))?;
    // The watch has told of it.
    let told = async || extender.metric("vcuda_scheduler_reservations").await.is_ok_and(|pods| pods == 0);
    wait("no pod is being bound", told).await
}

/// Waits until a pod is bound that nothing but a nudge can have had bound, since there had been `before` of them.
async fn wait_for_nudge(client: &Client, extender: &Extender, name: &str, before: u64) -> Result<()> {
    wait_for_node(client, extender, name).await?;
    let now = nudges(extender).await?;
    ensure!(now > before, "{name} was bound without a nudge:\n{}", extender.log());
    Ok(())
}

async fn create_priority(client: &Client, name: &str) -> Result<()> {
    let class = json!({
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": { "name": name },
        "value": 1000,
    });
    create(client, &class).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Kubernetes: run with KUBE_BIN_DIR, and -- --ignored"]
async fn a_pod_that_was_refused_because_the_watch_is_late_is_tried_again_once_that_tells_of_room()
-> Result<()> {
    let _alone = ALONE.lock().await;
    let plane = ControlPlane::shared().await?;
    let client = plane.client("admin").await?;
    // Of all access rules only those of vcuda-scheduler itself.
    let own_rules = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": { "name": "late" },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "vcuda-scheduler" },
        "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "tenant" }],
    });
    create(&client, &own_rules).await?;
    create_priority(&client, "late-high").await?;
    create_node(&client, "late", "late-1", &offer(91, 2)).await?;
    let relay = Relay::start(plane.api_port).await?;
    let mut extender = plane.extender_at("late", "tenant", relay.port, &["--leader-elect=false"])?;
    extender.wait_until_ready().await?;
    let _kube_scheduler = plane.kube_scheduler("late", &extender)?;

    // A pod ends. Of those that wait for it one was created anew under its name, as a StatefulSet does.
    for name in ["late-a", "late-b"] {
        create_pod(&client, pod("late", name, 60, 32)).await?;
        wait_for_node(&client, &extender, name).await?;
    }
    create_refused(&client, &extender, pod("late", "late-c", 60, 32)).await?;
    delete_pod(&client, "late-c").await?;
    create_refused(&client, &extender, pod("late", "late-c", 60, 32)).await?;
    relay.hold();
    let (before, nudged) = (asked(&extender).await?, nudges(&extender).await?);
    delete_pod(&client, "late-a").await?;
    wait_until_refused(&extender, before).await?;
    relay.go_on();
    wait_for_nudge(&client, &extender, "late-c", nudged).await?;
    // The API server was asked about the one that is gone, and its answer to that stopped nothing.
    assert!(extender.log().contains("field is immutable"), "{}", extender.log());

    // A cordon is lifted.
    let both = format!("{},{}", gpu(91, 0), gpu(91, 1));
    annotate_node(&client, "late-1", json!({ annotation::CORDON: both })).await?;
    extender.wait_until_it_says(&pod("late", "late-d", 10, 4), "late-1", "is cordoned").await?;
    create_refused(&client, &extender, pod("late", "late-d", 10, 4)).await?;
    relay.hold();
    let (before, nudged) = (asked(&extender).await?, nudges(&extender).await?);
    annotate_node(&client, "late-1", json!({ annotation::CORDON: null })).await?;
    wait_until_refused(&extender, before).await?;
    relay.go_on();
    wait_for_nudge(&client, &extender, "late-d", nudged).await?;

    // A pod makes others end, and kube-scheduler hears of their end first.
    let mut high = pod("late", "late-high", 80, 32);
    high["spec"]["priorityClassName"] = "late-high".into();
    relay.hold();
    let nudged = nudges(&extender).await?;
    create_refused(&client, &extender, high).await?;
    relay.go_on();
    wait_for_nudge(&client, &extender, "late-high", nudged).await?;
    assert!(placement_of(&get_pod(&client, "late-high").await?).is_some());

    // vcuda-scheduler dies before word comes, and the next one knows of no refusal. Of two pods that kube-scheduler has given
    // up and that have room, one is for nodes that are not there.
    create_refused(&client, &extender, pod("late", "late-e", 45, 32)).await?;
    let mut elsewhere = pod("late", "late-elsewhere", 1, 1);
    elsewhere["spec"]["nodeSelector"] = json!({ "test": "another" });
    create_pod(&client, elsewhere).await?;
    let given_up =
        async || get_pod(&client, "late-elsewhere").await.is_ok_and(|it| unschedulable(&it).is_some());
    wait("kube-scheduler has given late-elsewhere up", given_up).await?;
    relay.hold();
    let before = asked(&extender).await?;
    delete_pod(&client, "late-high").await?;
    wait_until_refused(&extender, before).await?;
    extender.process().kill();
    relay.go_on();
    extender.start()?;
    extender.wait_until_ready().await?;
    wait_for_nudge(&client, &extender, "late-e", 0).await?;
    // Each once.
    wait("both were tried again", async || nudges(&extender).await.is_ok_and(|nudges| nudges >= 2)).await?;
    sleep(Duration::from_secs(4)).await;
    assert_eq!(nudges(&extender).await?, 2, "{}", extender.log());
    delete_pod(&client, "late-elsewhere").await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Kubernetes: run with KUBE_BIN_DIR, and -- --ignored"]
async fn a_preemption_that_was_given_up_because_the_watch_is_late_is_tried_again() -> Result<()> {
    let _alone = ALONE.lock().await;
    let plane = ControlPlane::shared().await?;
    let client = plane.client("admin").await?;
    create_priority(&client, "contested-high").await?;
    let relay = Relay::start(plane.api_port).await?;
    let extender = plane.extender_at("contested", "scheduler", relay.port, &["--leader-elect=false"])?;
    extender.wait_until_ready().await?;
    let _kube_scheduler = plane.kube_scheduler("contested", &extender)?;
    let high = |name: &str, core| {
        let mut pod = pod("contested", name, core, 32);
        pod["spec"]["priorityClassName"] = "contested-high".into();
        pod
    };
    let bind = async |pod: Value, name: &str| {
        create_pod(&client, pod).await?;
        wait_for_node(&client, &extender, name).await
    };
    // A node of which kube-scheduler asks, since it has 80 core in all, but on two GPUs.
    create_node(&client, "contested", "contested-1", &offer(92, 2)).await?;
    for name in ["contested-a", "contested-b"] {
        bind(high(name, 60), name).await?;
    }
    // A node where it would have others end, but does not know any more of one that vcuda-scheduler still counts.
    let cordon = format!("{},{}", gpu(92, 0), gpu(92, 1));
    annotate_node(&client, "contested-1", json!({ annotation::CORDON: cordon })).await?;
    extender.wait_until_it_says(&pod("contested", "other", 10, 4), "contested-1", "is cordoned").await?;
    create_node(&client, "contested", "contested-2", &offer(93, 1)).await?;
    for (name, core) in [("contested-gone", 50), ("contested-low", 40)] {
        bind(pod("contested", name, core, 32), name).await?;
    }
    relay.hold();
    delete_pod(&client, "contested-gone").await?;
    // kube-scheduler has heard of it.
    sleep(Duration::from_secs(3)).await;
    let nudged = nudges(&extender).await?;
    create_refused(&client, &extender, high("contested-high", 80)).await?;
    relay.go_on();
    wait_for_nudge(&client, &extender, "contested-high", nudged).await?;
    assert_eq!(node_of(&get_pod(&client, "contested-high").await?), Some("contested-2"));
    Ok(())
}
