//! A real kubelet, API server and scheduler over the same containerd and the same parts as the node tests.

use std::time::Duration;

use anyhow::{Context, Result};
use integration::{cluster::Cluster, host::Options, image::Image};
use serde_json::json;

const SOON: Duration = Duration::from_secs(60);

async fn cluster() -> Result<Cluster> {
    let binaries =
        Cluster::binaries().context("KUBE_BIN_DIR must name the folder with kubelet and its peers")?;
    Cluster::start(&binaries, &Options::from_env()?).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and Kubernetes: run integration/test with KUBE_BIN_DIR"]
async fn a_pod_without_a_share_runs() {
    let mut cluster = cluster().await.unwrap();
    cluster.import(&Image::busybox("local/busybox:1")).unwrap();
    cluster.create_pod("plain", "local/busybox:1", &["sleep", "inf"], &json!({})).unwrap();
    let id = cluster.wait_for_pod("plain", SOON).await.unwrap();
    assert_eq!(cluster.cri().exec(&id, &["true"]).await.unwrap().code, 0);
    cluster.delete_pod("plain").unwrap();
}
