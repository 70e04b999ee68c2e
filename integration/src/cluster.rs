//! A machine with a real kubelet, and a real control plane on its loopback: etcd, kube-apiserver, kube-scheduler.
//! There is no controller manager: tests create pods themselves, and nothing taints the node.

use std::{
    fs,
    io::Write,
    net::TcpListener,
    ops::{Deref, DerefMut},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::{
    containerd::socket,
    host::{Host, Options},
    mountinfo::mount_point,
    probe,
    process::{Process, run},
};

/// kube-apiserver answers after 15 s on two cores, when nothing else runs.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// The node's name in the cluster.
const NODE: &str = "gpu-node";

/// The administrator, and the service accounts of the manifests: each one's name is its token.
const ADMIN: &str = "admin";
const DEVICE_PLUGIN: &str = "device-plugin";
const SCHEDULER: &str = "scheduler";
/// What kubelet is on a real node, and the device plugin by kubelet's credentials.
const KUBELET: &str = "kubelet";
const TOKENS: &str = "admin,admin,admin,system:masters\n\
    device-plugin,system:serviceaccount:kube-system:vcuda,device-plugin\n\
    scheduler,system:serviceaccount:kube-system:vcuda-scheduler,scheduler\n\
    kubelet,system:node:gpu-node,kubelet,system:nodes\n";

/// The name under which pods ask for the scheduler of the manifests.
pub const SCHEDULER_NAME: &str = "vcuda";

/// A cluster of one node.
#[derive(Debug)]
pub struct Cluster {
    kubelet: Process,
    scheduler: Process,
    api_server: Process,
    api_port: u16,
    etcd: Process,
    /// vcuda-scheduler, and the kube-scheduler that asks it.
    extender: Option<[Process; 2]>,
    binaries: PathBuf,
    host: Host,
}

impl Cluster {
    /// Folder with the Kubernetes programs, if `KUBE_BIN_DIR` names one.
    pub fn binaries() -> Option<PathBuf> {
        std::env::var_os("KUBE_BIN_DIR").filter(|dir| !dir.is_empty()).map(PathBuf::from)
    }

    /// Brings up the control plane, and kubelet as its one node.
    pub async fn start(binaries: &Path, options: &Options) -> Result<Self> {
        let host = Host::start(options).await?;
        let folder = host.folder().join("kube");
        fs::create_dir(&folder)?;
        let [api_port, etcd_port, etcd_peer_port, kubelet_port] = free_ports()?;
        let api = format!("https://127.0.0.1:{api_port}");
        let etcd_url = format!("http://127.0.0.1:{etcd_port}");
        let etcd_peer = format!("http://127.0.0.1:{etcd_peer_port}");
        fs::write(folder.join("tokens.csv"), TOKENS)?;
        for user in [ADMIN, DEVICE_PLUGIN, SCHEDULER, KUBELET] {
            fs::write(folder.join(user), kubeconfig(&api, user))?;
        }
        fs::write(folder.join("kubelet.yaml"), kubelet_config(&host, &folder, kubelet_port)?)?;
        let key = folder.join("service-account.key");
        let mut openssl = Command::new("openssl");
        openssl.args(["genrsa", "-out"]).arg(&key).arg("2048");
        run(openssl)?;

        let mut command = Command::new(host.cache().etcd().join("etcd"));
        command
            .arg("--data-dir")
            .arg(folder.join("etcd"))
            .args(["--listen-client-urls", &etcd_url, "--advertise-client-urls", &etcd_url])
            .args(["--listen-peer-urls", &etcd_peer, "--initial-advertise-peer-urls", &etcd_peer])
            .args(["--initial-cluster", &format!("default={etcd_peer}")])
            // Nothing here outlives the test.
            .args(["--unsafe-no-fsync", "--log-level", "warn"]);
        let etcd = Process::spawn("etcd", command, &folder.join("etcd.log"))?;

        let mut command = Command::new(binaries.join("kube-apiserver"));
        command
            .args(["--etcd-servers", &etcd_url, "--bind-address", "127.0.0.1"])
            .args(["--secure-port", &api_port.to_string(), "--service-cluster-ip-range", "10.0.0.0/24"])
            .args([
                "--endpoint-reconciler-type",
                "none",
                "--authorization-mode",
                "Node,RBAC",
                "--allow-privileged",
            ])
            .args(["--service-account-issuer", "https://kubernetes.default.svc"])
            // Service accounts and the taints that follow a node's conditions are a controller manager's work.
            .args(["--disable-admission-plugins", "ServiceAccount,TaintNodesByCondition"])
            .args(["--enable-admission-plugins", "NodeRestriction"])
            .arg("--cert-dir")
            .arg(folder.join("certificates"))
            .arg("--token-auth-file")
            .arg(folder.join("tokens.csv"))
            .arg("--service-account-signing-key-file")
            .arg(&key)
            .arg("--service-account-key-file")
            .arg(&key);
        let api_server = Process::spawn("kube-apiserver", command, &folder.join("kube-apiserver.log"))?;

        let mut command = Command::new(binaries.join("kube-scheduler"));
        command.arg("--kubeconfig").arg(folder.join(ADMIN)).args(["--leader-elect=false", "--secure-port=0"]);
        let scheduler = Process::spawn("kube-scheduler", command, &folder.join("kube-scheduler.log"))?;

        let kubelet = spawn_kubelet(binaries, &host)?;
        let binaries = binaries.into();
        let mut cluster =
            Self { kubelet, scheduler, api_server, api_port, etcd, extender: None, binaries, host };
        cluster.wait_until("the node is registered", START_TIMEOUT, |cluster| cluster.node().is_ok()).await?;
        Ok(cluster)
    }

    /// Brings up everything, and waits until the node offers shares.
    pub async fn with_vcuda(binaries: &Path, options: &Options) -> Result<Self> {
        let mut cluster = Self::start(binaries, options).await?;
        // The DaemonSet starts nothing, there is no controller manager; its access rules count.
        cluster.apply_manifest("daemonset.yaml")?;
        let (kubeconfig, node) = cluster.access_of_device_plugin();
        cluster.vcuda.join(kubeconfig, node);
        cluster.vcuda.start_device_plugin()?;
        cluster.vcuda.start_nri_plugin().await?;
        cluster.import(&probe::image("bookworm")?)?;
        cluster.wait_for_offer().await?;
        Ok(cluster)
    }

    /// The same, with the scheduler of the manifests.
    pub async fn with_scheduler(binaries: &Path, options: &Options) -> Result<Self> {
        let mut cluster = Self::with_vcuda(binaries, options).await?;
        cluster.apply_manifest("scheduler.yaml")?;
        let folder = cluster.folder().join("kube");
        let [port, health_port] = free_ports()?;
        let program = cluster.vcuda.file().paths.install.join("bin/vcuda-scheduler");
        let mut command = Command::new(program);
        command
            .args(["--leader-elect=false", "--listen", &format!("127.0.0.1:{port}")])
            .args(["--health-listen", &format!("127.0.0.1:{health_port}"), "--kubeconfig"])
            .arg(folder.join(SCHEDULER));
        let extender = Process::spawn("vcuda-scheduler", command, &folder.join("vcuda-scheduler.log"))?;

        let config = ["get", "configmap", "-n", "kube-system", "vcuda-scheduler", "-o", "json"];
        let config: Value = serde_json::from_str(&cluster.kubectl(&config, None)?)?;
        let config = config["data"]["kube-scheduler.yaml"].as_str().context("no kube-scheduler.yaml")?;
        let config = config
            .replace("127.0.0.1:10280", &format!("127.0.0.1:{port}"))
            .replace("leaderElect: true", "leaderElect: false");
        let client = format!("clientConnection: {{kubeconfig: {}}}\n", folder.join(SCHEDULER).display());
        let file = folder.join("kube-scheduler.yaml");
        fs::write(&file, client + &config)?;
        let mut command = Command::new(binaries.join("kube-scheduler"));
        command.arg("--config").arg(file).arg("--secure-port=0");
        let log = folder.join("kube-scheduler-of-shares.log");
        cluster.extender = Some([extender, Process::spawn("kube-scheduler", command, &log)?]);
        Ok(cluster)
    }

    /// Waits until the node offers both resources.
    pub async fn wait_for_offer(&mut self) -> Result<()> {
        let resources = self.vcuda.resources();
        let offered = |cluster: &Self| {
            resources.iter().all(|resource| cluster.allocatable(resource).is_ok_and(|units| units > 0))
        };
        self.wait_until("both resources are on offer", START_TIMEOUT, offered).await
    }

    /// Name of an image with the probe in it.
    pub fn image(&self) -> &'static str {
        "local/cuda-bookworm:1"
    }

    /// Kills kubelet with SIGKILL and starts it anew; containers run on.
    pub fn restart_kubelet(&mut self) -> Result<()> {
        self.kubelet.kill();
        self.kubelet = spawn_kubelet(&self.binaries, &self.host)?;
        Ok(())
    }

    /// Kubelet's root folder.
    pub fn kubelet_root(&self) -> PathBuf {
        self.host.folder().join("kubelet")
    }

    /// A kubeconfig of the device plugin's, and the node's name.
    pub fn access_of_device_plugin(&self) -> (PathBuf, &'static str) {
        (self.host.folder().join("kube").join(DEVICE_PLUGIN), NODE)
    }

    /// Where the API server listens.
    pub fn api(&self) -> (&'static str, u16) {
        ("127.0.0.1", self.api_port)
    }

    /// Applies a file of `config/deploy`.
    pub fn apply_manifest(&self, name: &str) -> Result<()> {
        let path = format!("{}/../config/deploy/{name}", env!("CARGO_MANIFEST_DIR"));
        self.kubectl(&["apply", "-f", &path], None).map(drop)
    }

    /// Gives pods of `kube-system` the API server's certificate, as the controller manager does.
    pub fn publish_root_certificate(&self) -> Result<()> {
        let file = self.host.folder().join("kube/certificates/apiserver.crt");
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let map = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "kube-root-ca.crt", "namespace": "kube-system"},
            "data": {"ca.crt": text},
        });
        self.kubectl(&["apply", "-f", "-"], Some(&map)).map(drop)
    }

    /// Runs kubectl.
    pub fn kubectl(&self, arguments: &[&str], input: Option<&Value>) -> Result<String> {
        let mut command = self.kubectl_command();
        command.args(arguments);
        let Some(input) = input else { return run(command) };
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        child.stdin.take().context("kubectl has no stdin")?.write_all(input.to_string().as_bytes())?;
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!("kubectl {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// kubectl as the administrator, without arguments yet.
    pub fn kubectl_command(&self) -> Command {
        let mut command = Command::new(self.host.cache().kubectl());
        command.arg("--kubeconfig").arg(self.host.folder().join("kube").join(ADMIN));
        command
    }

    /// The processes of the cluster that run, by name.
    pub fn parts(&mut self) -> Vec<(&'static str, u32)> {
        let mut parts = vec![
            ("etcd", self.etcd.id()),
            ("kube-apiserver", self.api_server.id()),
            ("kube-scheduler", self.scheduler.id()),
            ("kubelet", self.kubelet.id()),
            ("containerd", self.host.containerd.process_id()),
        ];
        parts.extend(self.host.vcuda.device_plugin().ok().map(|plugin| ("vcuda-device-plugin", plugin.id())));
        parts.extend(self.host.vcuda.nri_plugin().ok().map(|plugin| ("vcuda-nri-plugin", plugin.id())));
        if let Some([extender, scheduler]) = &self.extender {
            parts.extend([("vcuda-scheduler", extender.id()), ("kube-scheduler of shares", scheduler.id())]);
        }
        parts
    }

    /// Creates a pod of one container that asks for `limits`.
    pub fn create_pod(&self, name: &str, image: &str, command: &[&str], limits: &Value) -> Result<()> {
        self.create_changed_pod(name, image, command, limits, |_| {})
    }

    /// The same, after `change`.
    pub fn create_changed_pod(
        &self,
        name: &str,
        image: &str,
        command: &[&str],
        limits: &Value,
        change: impl FnOnce(&mut Value),
    ) -> Result<()> {
        let mut pod = Self::pod_of(name, image, command, limits);
        change(&mut pod);
        self.kubectl(&["apply", "-f", "-"], Some(&pod)).map(drop)
    }

    /// A pod of one container that asks for `limits`.
    pub fn pod_of(name: &str, image: &str, command: &[&str], limits: &Value) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                // No CNI, no controller manager.
                "hostNetwork": true,
                "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 1,
                "restartPolicy": "Always",
                "containers": [{
                    "name": "main",
                    "image": image,
                    "imagePullPolicy": "Never",
                    "command": command,
                    "resources": {"limits": limits},
                }],
            },
        })
    }

    /// A pod, as the API server has it.
    pub fn pod(&self, name: &str) -> Result<Value> {
        Ok(serde_json::from_str(&self.kubectl(&["get", "pod", name, "-o", "json"], None)?)?)
    }

    /// A pod's phase, and the ID of its container while that runs.
    pub fn pod_state(&self, name: &str) -> Result<(String, Option<String>)> {
        let pod = self.pod(name)?;
        let status = &pod["status"]["containerStatuses"][0];
        let id = status["containerID"].as_str().and_then(|id| id.strip_prefix("containerd://"));
        let runs = status["state"]["running"].is_object();
        let phase = pod["status"]["phase"].as_str().unwrap_or_default().to_owned();
        Ok((phase, id.filter(|_| runs).map(Into::into)))
    }

    /// Waits until a pod's container runs; returns the container's ID.
    pub async fn wait_for_pod(&mut self, name: &str, within: Duration) -> Result<String> {
        let what = format!("pod {name} runs");
        let state = |cluster: &Self| cluster.pod_state(name).ok().and_then(|(_, id)| id);
        self.wait_until(&what, within, |cluster| state(cluster).is_some())
            .await
            .with_context(|| format!("pod {name}: {}", self.events(name).unwrap_or_default().join(" | ")))?;
        state(self).context("the pod runs no longer")
    }

    /// What the events of a pod say.
    pub fn events(&self, pod: &str) -> Result<Vec<String>> {
        let events = self.whole_events(pod)?;
        Ok(events.iter().filter_map(|event| event["message"].as_str()).map(Into::into).collect())
    }

    /// A pod's events, as the API server has them.
    pub fn whole_events(&self, pod: &str) -> Result<Vec<Value>> {
        let selector = format!("involvedObject.name={pod}");
        let list = self.kubectl(&["get", "events", "--field-selector", &selector, "-o", "json"], None)?;
        let list: Value = serde_json::from_str(&list)?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    /// Starts the device plugin anew, and waits until kubelet has both resources again: in between it refuses pods for
    /// good.
    pub async fn restart_device_plugin(&mut self) -> Result<()> {
        let registered =
            |cluster: &Self| cluster.kubelet.output().matches("Got registration request").count();
        let before = registered(self);
        self.vcuda.start_device_plugin()?;
        let both = |cluster: &Self| registered(cluster) >= before + 2;
        self.wait_until("the device plugin has registered again", START_TIMEOUT, both).await
    }

    /// The same with kubelet's credentials, as the systemd unit has it.
    pub async fn restart_device_plugin_as_kubelet(&mut self) -> Result<()> {
        let kubeconfig = self.folder().join("kube").join(KUBELET);
        self.vcuda.join(kubeconfig, NODE);
        self.restart_device_plugin().await
    }

    /// The node, as the API server has it.
    pub fn node(&self) -> Result<Value> {
        Ok(serde_json::from_str(&self.kubectl(&["get", "node", NODE, "-o", "json"], None)?)?)
    }

    /// How many units of a resource the node offers.
    pub fn allocatable(&self, resource: &str) -> Result<u64> {
        let node = self.node()?;
        let amount = node["status"]["allocatable"][resource].as_str().unwrap_or("0");
        Ok(amount.parse()?)
    }

    /// Deletes a pod and waits until it is gone.
    pub fn delete_pod(&self, name: &str) -> Result<()> {
        self.kubectl(&["delete", "pod", name, "--wait=true", "--timeout=60s"], None).map(drop)
    }

    /// Waits until `done`, while every part of the cluster runs.
    pub async fn wait_until(
        &mut self,
        what: &str,
        within: Duration,
        done: impl Fn(&Self) -> bool,
    ) -> Result<()> {
        let deadline = Instant::now() + within;
        while !done(self) {
            let parts = [&mut self.etcd, &mut self.api_server, &mut self.scheduler, &mut self.kubelet];
            for part in parts.into_iter().chain(self.extender.iter_mut().flatten()) {
                part.check_running()?;
            }
            if Instant::now() > deadline {
                bail!("not within {within:?}: {what}; kubelet's last words:\n{}", self.kubelet.tail());
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        Ok(())
    }
}

impl Deref for Cluster {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.host
    }
}

impl DerefMut for Cluster {
    fn deref_mut(&mut self) -> &mut Host {
        &mut self.host
    }
}

/// kubelet's device plugin folder is fixed (`k8s.io/kubelet` `constants.go`), so kubelet gets a mount namespace in
/// which that path is ours. The machine's own stays as it is. What kubelet mounts for pods below its own folder, such as
/// tokens, containerd has to see: that folder is a shared mount.
fn spawn_kubelet(binaries: &Path, host: &Host) -> Result<Process> {
    const FIXED: &str = "/var/lib/kubelet/device-plugins";
    let plugins = &host.vcuda.file().paths.kubelet;
    fs::create_dir_all(FIXED)?;
    let folder = host.folder().join("kube");
    let root = host.folder().join("kubelet");
    if !Command::new("mountpoint").arg("-q").arg(&root).status()?.success() {
        let mut mount = Command::new("mount");
        mount.args(["--bind", "--make-shared"]).args([&root, &root]);
        run(mount)?;
    }
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "unchanged", "sh", "-c"])
        .arg(format!(
            "mount --make-private \"$(findmnt -n -o TARGET -T {FIXED})\" && mount --bind \"$1\" {FIXED} \
             && shift && exec \"$@\""
        ))
        .arg("kubelet")
        .arg(plugins)
        .arg(binaries.join("kubelet"))
        .arg("--config")
        .arg(folder.join("kubelet.yaml"))
        .arg("--kubeconfig")
        .arg(folder.join(ADMIN))
        .arg("--root-dir")
        .arg(root)
        .arg("--cert-dir")
        .arg(folder.join("kubelet-certificates"))
        .args(["--hostname-override", NODE]);
    Process::spawn("kubelet", command, &folder.join("kubelet.log"))
}

fn kubelet_config(host: &Host, folder: &Path, port: u16) -> Result<String> {
    let cgroup = host.cgroup();
    for hierarchy in cgroup_hierarchies()? {
        fs::create_dir_all(hierarchy.join(cgroup.trim_start_matches('/')))?;
    }
    Ok(json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "127.0.0.1",
        "port": port,
        "healthzPort": 0,
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": format!("unix://{}", socket(host.folder()).display()),
        "podLogsDir": folder.join("pod-logs"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup,
        "enforceNodeAllocatable": [],
        "failCgroupV1": false,
        "failSwapOn": false,
        // A full disk is not what is tested.
        "evictionHard": {"imagefs.available": "0%", "nodefs.available": "0%"},
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "1s",
        "fileCheckFrequency": "5s",
    })
    .to_string())
}

/// Where cgroups are: the one hierarchy of version 2, or those of version 1.
fn cgroup_hierarchies() -> Result<Vec<PathBuf>> {
    let text = fs::read_to_string("/proc/self/mountinfo")?;
    let is_cgroup = |line: &&str| line.contains(" - cgroup ") || line.contains(" - cgroup2 ");
    Ok(text.lines().filter(is_cgroup).filter_map(mount_point).map(PathBuf::from).collect())
}

fn kubeconfig(api: &str, user: &str) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        // The certificate is made by the API server at its start; loopback is the whole network.
        "clusters": [{"name": "test", "cluster": {"server": api, "insecure-skip-tls-verify": true}}],
        "users": [{"name": "test", "user": {"token": user}}],
    })
    .to_string()
}

fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let mut ports = [0; N];
    // All are held until all are known, so that they differ.
    let listeners: Vec<_> = (0..N).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<_, _>>()?;
    for (port, listener) in ports.iter_mut().zip(&listeners) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}
