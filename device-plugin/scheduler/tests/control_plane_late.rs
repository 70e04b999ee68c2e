//! vcuda-scheduler hears of room later than kube-scheduler does: what the API server says to it goes through a relay
//! that holds it back for a while. Nothing else happens in the cluster, so nothing else wakes a pod that was refused.

#[expect(dead_code, reason = "other tests need more")]
mod support;

use std::time::Duration;

use anyhow::{Context, Result};
use kube::Client;
use serde_json::json;
use support::{
    ControlPlane, Extender, annotate_node, create, create_node, create_pod, delete_pod, get_pod, gpu,
    node_of, offer, placement_of, pod, unschedulable, wait,
};
use tokio::{
    io::{self, AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    time::sleep,
};
use vcuda_config::annotation;

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

/// Waits until kube-scheduler has asked about a pod since it had asked `before` times, and asks no more.
async fn wait_until_refused(extender: &Extender, before: u64) -> Result<()> {
    let asked = async || extender.metric("vcuda_scheduler_filtered_total").await.unwrap_or(before);
    let settled = async || {
        let first = asked().await;
        sleep(Duration::from_secs(2)).await;
        first > before && first == asked().await
    };
    wait("kube-scheduler asks in vain", settled).await
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

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Kubernetes: run with KUBE_BIN_DIR, and -- --ignored"]
async fn a_pod_that_was_refused_because_the_watch_is_late_is_tried_again_once_that_tells_of_room()
-> Result<()> {
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
    let important = json!({
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": { "name": "late-high" },
        "value": 1000,
    });
    create(&client, &important).await?;
    create_node(&client, "late", "late-1", &offer(91, 2)).await?;
    let relay = Relay::start(plane.api_port).await?;
    let extender = plane.extender_at("late", "tenant", relay.port, &["--leader-elect=false"])?;
    extender.wait_until_ready().await?;
    let _kube_scheduler = plane.kube_scheduler("late", &extender)?;
    let asked = async || extender.metric("vcuda_scheduler_filtered_total").await;

    // A pod ends.
    for name in ["late-a", "late-b"] {
        create_pod(&client, pod("late", name, 60, 32)).await?;
        wait_for_node(&client, &extender, name).await?;
    }
    let before = asked().await?;
    create_pod(&client, pod("late", "late-c", 60, 32)).await?;
    wait_until_refused(&extender, before).await?;
    relay.hold();
    let before = asked().await?;
    delete_pod(&client, "late-a").await?;
    wait_until_refused(&extender, before).await?;
    relay.go_on();
    wait_for_node(&client, &extender, "late-c").await?;

    // A cordon is lifted.
    let both = format!("{},{}", gpu(91, 0), gpu(91, 1));
    annotate_node(&client, "late-1", json!({ annotation::CORDON: both })).await?;
    extender.wait_until_it_says(&pod("late", "late-d", 10, 4), "late-1", "is cordoned").await?;
    let before = asked().await?;
    create_pod(&client, pod("late", "late-d", 10, 4)).await?;
    wait_until_refused(&extender, before).await?;
    relay.hold();
    let before = asked().await?;
    annotate_node(&client, "late-1", json!({ annotation::CORDON: null })).await?;
    wait_until_refused(&extender, before).await?;
    relay.go_on();
    wait_for_node(&client, &extender, "late-d").await?;

    // A pod makes others end, and kube-scheduler hears of their end first.
    let mut high = pod("late", "late-high", 80, 32);
    high["spec"]["priorityClassName"] = "late-high".into();
    relay.hold();
    let before = asked().await?;
    create_pod(&client, high).await?;
    wait_until_refused(&extender, before).await?;
    relay.go_on();
    wait_for_node(&client, &extender, "late-high").await?;

    assert!(extender.metric("vcuda_scheduler_nudges_total").await? > 0, "{}", extender.log());
    assert!(placement_of(&get_pod(&client, "late-high").await?).is_some());
    Ok(())
}
