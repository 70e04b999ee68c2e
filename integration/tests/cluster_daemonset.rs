//! The daemons as one pod of the DaemonSet, run by a real kubelet: its image, its mounts in both directions, its
//! service account, an update of it.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::{env, fs, path::PathBuf, process::Command, time::Duration};

use anyhow::{Context, Result};
use integration::{cache, cluster::Cluster, host::Options, image::Image, probe};
use serde_json::{Value, json};
use vcuda_config::{NodeGpus, annotation};

const SOON: Duration = Duration::from_secs(120);

/// Set where the test runs in a mount namespace of its own.
const INSIDE: &str = "VCUDA_TEST_IN_OWN_MOUNTS";

/// Where the DaemonSet installs; on this machine, a folder of the test's.
const INSTALL: &str = "/usr/local/vcuda";

/// The tools that the manifest asks of its image, beside the shell.
const TOOLS: [&str; 6] =
    ["/bin/cp", "/bin/mv", "/bin/rm", "/bin/sync", "/usr/bin/sha256sum", "/usr/sbin/chroot"];

/// A volume that is propagated both ways needs a root that is a shared mount, as systemd makes it. So the test runs
/// itself again, in a mount namespace in which it is one, shared with nobody else: all that is mounted ends with it.
fn again_in_own_mounts(test: &str) {
    let output = Command::new("unshare")
        .args([
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            "mount --make-rshared / && exec \"$@\"",
            "sh",
        ])
        .arg(env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    // Indented, so that who counts results does not count its too.
    assert!(output.status.success() && text.contains("1 passed"), "{}", text.replace('\n', "\n    "));
}

/// The image that an operator builds for the manifests: a shell, six tools, and what `integration/build.sh` makes.
fn image(cluster: &Cluster) -> Result<Image> {
    let busybox = cluster.cache().busybox();
    let mut image = Image::debian("local/vcuda:1", "bookworm");
    for tool in TOOLS {
        image = image.copy(tool, &busybox);
    }
    let dist = cache::dist()?;
    for part in ["bin", "lib"] {
        for file in fs::read_dir(dist.join(part))? {
            let file = file?;
            let name = file.file_name().into_string().ok().context("a file's name is not UTF-8")?;
            image = image.copy(&format!("/vcuda/{part}/{name}"), &file.path());
        }
    }
    Ok(image)
}

/// The pod that a DaemonSet's controller would make of the manifest for `version`, changed only in what differs on this
/// machine.
fn daemon_pod(cluster: &Cluster, name: &str, version: &str) -> Result<Value> {
    let set = cluster.kubectl(&["get", "daemonset", "-n", "kube-system", "vcuda", "-o", "json"], None)?;
    let of_manifest = format!("{INSTALL}/{}", env!("CARGO_PKG_VERSION"));
    let set = set.replace(&of_manifest, &install(cluster, version).display().to_string());
    let set = set.replace(INSTALL, &install(cluster, "").display().to_string());
    let set: Value = serde_json::from_str(&set)?;
    let mut pod = set["spec"]["template"].clone();
    pod["apiVersion"] = "v1".into();
    pod["kind"] = "Pod".into();
    pod["metadata"]["name"] = name.into();
    pod["metadata"]["namespace"] = "kube-system".into();
    let config = [json!("--config"), json!(cluster.vcuda.config())];
    let containers = pod["spec"]["initContainers"].as_array().into_iter().flatten();
    assert_eq!(containers.count(), 1, "install");
    pod["spec"]["initContainers"][0]["image"] = "local/vcuda:1".into();
    for container in pod["spec"]["containers"].as_array_mut().context("no containers")? {
        container["image"] = "local/vcuda:1".into();
        container["command"].as_array_mut().context("no command")?.extend(config.clone());
        if let Some(probe) =
            container.pointer_mut("/readinessProbe/exec/command").and_then(Value::as_array_mut)
        {
            probe.extend(config.clone());
        }
        // There is no kube-proxy, so the API server's service has no address that answers.
        if let Some(env) = container.pointer_mut("/env").and_then(Value::as_array_mut) {
            let (host, port) = cluster.api();
            env.push(json!({"name": "KUBERNETES_SERVICE_HOST", "value": host}));
            env.push(json!({"name": "KUBERNETES_SERVICE_PORT", "value": port.to_string()}));
        }
    }
    Ok(pod)
}

/// Folder of an installed version.
fn install(cluster: &Cluster, version: &str) -> PathBuf {
    cluster.folder().join("usr-local-vcuda").join(version)
}

/// Creates the DaemonSet's pod for a version, with the node file that goes with it, and waits until its containers are
/// ready and shares are on offer.
async fn serve(cluster: &mut Cluster, name: &str, version: &str) -> Result<()> {
    let folder = install(cluster, version);
    cluster.vcuda.change(|file| file.paths.install = folder)?;
    let pod = daemon_pod(cluster, name, version)?;
    cluster.kubectl(&["apply", "-f", "-"], Some(&pod))?;
    let ready = |cluster: &Cluster| {
        let of = "jsonpath={.status.conditions[?(@.type=='Ready')].status}";
        cluster
            .kubectl(&["get", "pod", "-n", "kube-system", name, "-o", of], None)
            .is_ok_and(|status| status == "True")
    };
    let came = cluster.wait_until(&format!("pod {name} is ready"), SOON, ready).await;
    came.with_context(|| {
        let told = ["describe", "pod", "-n", "kube-system", name];
        cluster.kubectl(&told, None).unwrap_or_default()
    })?;
    cluster.wait_for_offer().await
}

async fn runs(cluster: &mut Cluster, name: &str) -> String {
    let limits = json!({"tencent.com/vcuda-core": 20, "tencent.com/vcuda-memory": 32});
    cluster.create_pod(name, cluster.image(), &["sleep", "inf"], &limits).unwrap();
    cluster.wait_for_pod(name, SOON).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and Kubernetes: run integration/test with KUBE_BIN_DIR"]
async fn the_daemonsets_pod_serves_shares_and_an_update_of_it_disturbs_none() {
    if env::var_os(INSIDE).is_none() {
        return again_in_own_mounts("the_daemonsets_pod_serves_shares_and_an_update_of_it_disturbs_none");
    }
    let binaries =
        Cluster::binaries().context("KUBE_BIN_DIR must name the folder with kubelet and its peers");
    let options = Options::from_env().unwrap();
    let mut cluster = Cluster::start(&binaries.unwrap(), &options).await.unwrap();
    cluster.import(&image(&cluster).unwrap()).unwrap();
    cluster.import(&probe::image("bookworm").unwrap()).unwrap();
    cluster.apply_manifest("daemonset.yaml").unwrap();
    cluster.publish_root_certificate().unwrap();
    let node = cluster.node().unwrap()["metadata"]["name"].as_str().unwrap().to_owned();
    cluster.kubectl(&["label", "node", &node, "tencent.com/vcuda=true"], None).unwrap();

    serve(&mut cluster, "vcuda-1", env!("CARGO_PKG_VERSION")).await.unwrap();
    let before = runs(&mut cluster, "before").await;
    probe::holds_8_gib(cluster.cri(), &before).await.unwrap();
    let held = probe::hold(cluster.cri(), &before, 1024).await.unwrap();
    // Written with the account of the manifest, whose token only the device plugin's container has.
    let told = |cluster: &Cluster| {
        let node = cluster.node().unwrap_or_default();
        let gpus = node["metadata"]["annotations"][annotation::NODE_GPUS].as_str().map(NodeGpus::parse);
        gpus.is_some_and(|gpus| gpus.is_ok_and(|node| node.gpus.len() == 2))
    };
    cluster.wait_until("the node tells the cluster of its GPUs", SOON, told).await.unwrap();

    // As the controller does it: the old pod goes, then the new one comes.
    cluster.kubectl(&["delete", "pod", "-n", "kube-system", "vcuda-1", "--timeout=60s"], None).unwrap();
    probe::holds_8_gib(cluster.cri(), &before).await.unwrap();
    serve(&mut cluster, "vcuda-2", "next").await.unwrap();
    let spec = fs::read_to_string(cluster.vcuda.file().paths.cdi.join("tencent.com-vcuda.json")).unwrap();
    let hook = install(&cluster, "next").join("bin/vcuda-hook");
    assert!(hook.exists() && spec.contains(hook.to_str().unwrap()), "{spec}");
    let after = runs(&mut cluster, "after").await;
    probe::holds_8_gib(cluster.cri(), &after).await.unwrap();
    let (phase, id) = cluster.pod_state("before").unwrap();
    assert_eq!((phase.as_str(), id.as_deref()), ("Running", Some(before.as_str())), "the same container");
    probe::holds_8_gib(cluster.cri(), &before).await.unwrap();
    let alive = cluster.cri().exec(&before, &["sh", "-c", &format!("kill -0 {}", held)]).await.unwrap();
    assert_eq!(alive.code, 0, "what ran through the update: {alive:?}");
    for pod in ["before", "after"] {
        cluster.delete_pod(pod).unwrap();
    }
    let none = |cluster: &Cluster| cluster.vcuda.shares().is_empty();
    cluster.wait_until("no share is on record", SOON, none).await.unwrap();
    cluster.kubectl(&["delete", "pod", "-n", "kube-system", "vcuda-2", "--timeout=60s"], None).unwrap();
    // The mount point of the token, which runc made on the machine; only where it is empty.
    for folder in ["/run/secrets/kubernetes.io/serviceaccount", "/run/secrets/kubernetes.io", "/run/secrets"]
    {
        let _ = fs::remove_dir(folder);
    }
}
