//! A real control plane on loopback, without any node: etcd and kube-apiserver, and per test a kube-scheduler with
//! vcuda-scheduler as its extender. `KUBE_BIN_DIR` names the folder with Kubernetes' programs; etcd is the one that
//! `integration/setup.sh` fetched, or the one on the path.

mod objects;

use std::{
    env, fs,
    fs::File,
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::Mutex,
};

pub use self::objects::*;

/// kube-apiserver answers after 15 s on two cores, when nothing else runs.
const START: Duration = Duration::from_secs(180);

/// How long anything may take; how long it takes is nobody's concern here.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The administrator, the scheduler's service account as the manifests have it, and a user.
const TOKENS: &str = "admin,admin,admin,system:masters\n\
    scheduler,system:serviceaccount:kube-system:vcuda-scheduler,scheduler\n\
    tenant,tenant,tenant\n";

/// A child process that does not outlive its owner. Its output goes to a file.
pub struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    pub fn start(mut command: Command, log: PathBuf) -> Result<Self> {
        let file = File::create(&log)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let program = command.get_program().display().to_string();
        let child = command.spawn().with_context(|| format!("{program}: cannot be started"))?;
        Ok(Self { child, log })
    }

    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends SIGTERM and gives the exit code.
    pub async fn terminate(&mut self) -> Result<Option<i32>> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        self.ended().await
    }

    /// Waits for the end and gives the exit code.
    pub async fn ended(&mut self) -> Result<Option<i32>> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status.code());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        bail!("it still runs; its last words:\n{}", self.log())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// etcd and kube-apiserver.
pub struct ControlPlane {
    /// Where kube-apiserver listens.
    pub api_port: u16,
    api_server: Process,
    _etcd: Process,
    folder: TempDir,
    binaries: PathBuf,
}

static SHARED: Mutex<Weak<ControlPlane>> = Mutex::const_new(Weak::new());

impl ControlPlane {
    /// The one that tests of this process share while any of them runs, with the deployed access rules in place.
    pub async fn shared() -> Result<Arc<Self>> {
        let mut shared = SHARED.lock().await;
        if let Some(plane) = shared.upgrade() {
            return Ok(plane);
        }
        let plane = Arc::new(Self::start().await?);
        *shared = Arc::downgrade(&plane);
        Ok(plane)
    }

    async fn start() -> Result<Self> {
        let binaries = env::var_os("KUBE_BIN_DIR").context("KUBE_BIN_DIR is not set")?;
        let binaries = PathBuf::from(binaries);
        let folder = TempDir::with_prefix("vcuda-scheduler-")?;
        let [api_port, etcd_port, peer_port] = free_ports()?;
        let etcd_url = format!("http://127.0.0.1:{etcd_port}");
        let peer_url = format!("http://127.0.0.1:{peer_port}");
        let file = |name: &str| folder.path().join(name);
        fs::write(file("tokens.csv"), TOKENS)?;
        for user in ["admin", "scheduler", "tenant"] {
            fs::write(file(user), kubeconfig(api_port, user))?;
        }
        let (private, public) = (file("service-account.key"), file("service-account.pub"));
        let pair = rcgen::KeyPair::generate()?;
        fs::write(&private, pair.serialize_pem())?;
        fs::write(&public, pair.public_key_pem())?;

        let mut command = Command::new(etcd());
        command
            .arg("--data-dir")
            .arg(file("etcd"))
            .args(["--listen-client-urls", &etcd_url, "--advertise-client-urls", &etcd_url])
            .args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url])
            .args(["--initial-cluster", &format!("default={peer_url}")])
            // Nothing here outlives the test.
            .args(["--unsafe-no-fsync", "--log-level", "warn"]);
        let etcd = Process::start(command, file("etcd.log"))?;
        let mut command = Command::new(binaries.join("kube-apiserver"));
        command
            .args(["--etcd-servers", &etcd_url, "--bind-address", "127.0.0.1"])
            .args(["--secure-port", &api_port.to_string(), "--service-cluster-ip-range", "10.0.0.0/24"])
            .args(["--endpoint-reconciler-type", "none", "--authorization-mode", "RBAC"])
            .args(["--service-account-issuer", "https://kubernetes.default.svc"])
            // Service accounts and the taints that follow a node's conditions are a controller manager's work.
            .args(["--disable-admission-plugins", "ServiceAccount,TaintNodesByCondition"])
            .arg("--cert-dir")
            .arg(file("certificates"))
            .arg("--token-auth-file")
            .arg(file("tokens.csv"))
            .arg("--service-account-signing-key-file")
            .arg(&private)
            .arg("--service-account-key-file")
            .arg(&public);
        let api_server = Process::start(command, file("kube-apiserver.log"))?;
        let mut plane = Self { api_port, api_server, _etcd: etcd, folder, binaries };

        let client = plane.client("admin").await?;
        let deadline = Instant::now() + START;
        let ready = || async { client.request_text(request("/readyz")).await.is_ok() };
        while !ready().await {
            if Instant::now() > deadline || plane.api_server.child.try_wait()?.is_some() {
                bail!("kube-apiserver does not answer; its last words:\n{}", plane.api_server.log());
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let roles = manifests("scheduler.yaml")?;
        let roles = roles.iter().filter(|it| it["apiVersion"] == "rbac.authorization.k8s.io/v1");
        for role in roles {
            create(&client, role).await?;
        }
        Ok(plane)
    }

    /// A client of `admin`, `scheduler` or `tenant`.
    pub async fn client(&self, user: &str) -> Result<Client> {
        let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
        let file = Kubeconfig::read_from(self.kubeconfig(user))?;
        Ok(Client::try_from(Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?)?)
    }

    pub fn kubeconfig(&self, user: &str) -> PathBuf {
        self.folder.path().join(user)
    }

    /// vcuda-scheduler as the manifest starts it, listening on a port of its own; `name` is any.
    pub fn extender(&self, name: &str, arguments: &[&str]) -> Result<Extender> {
        self.extender_of(name, self.kubeconfig("scheduler"), arguments)
    }

    /// The same as `user`, who finds the API server at `api_port`.
    pub fn extender_at(&self, name: &str, user: &str, api_port: u16, arguments: &[&str]) -> Result<Extender> {
        let file = self.folder.path().join(format!("{name}-kubeconfig"));
        fs::write(&file, kubeconfig(api_port, user))?;
        self.extender_of(name, file, arguments)
    }

    fn extender_of(&self, name: &str, kubeconfig: PathBuf, arguments: &[&str]) -> Result<Extender> {
        let ports = free_ports()?;
        let mut extender = Extender {
            process: None,
            ports,
            arguments: arguments.iter().map(ToString::to_string).collect(),
            kubeconfig,
            log: self.folder.path().join(format!("{name}.log")),
        };
        extender.start()?;
        Ok(extender)
    }

    /// kube-scheduler with the configuration of the manifest, for pods with the scheduler name `name`.
    pub fn kube_scheduler(&self, name: &str, extender: &Extender) -> Result<Process> {
        self.kube_scheduler_over(name, extender, None)
    }

    /// The same, over HTTPS with the client's side of TLS as given.
    pub fn kube_scheduler_over(
        &self,
        name: &str,
        extender: &Extender,
        tls: Option<Value>,
    ) -> Result<Process> {
        let all = manifests("scheduler.yaml")?;
        let map = all.iter().find(|it| it["kind"] == "ConfigMap").context("no ConfigMap")?;
        let text = map["data"]["kube-scheduler.yaml"].as_str().context("no kube-scheduler.yaml in it")?;
        let mut config: Value = serde_saphyr::from_str(text)?;
        config["clientConnection"] = json!({ "kubeconfig": self.kubeconfig("scheduler") });
        config["leaderElection"]["leaderElect"] = false.into();
        config["profiles"][0]["schedulerName"] = name.into();
        config["extenders"][0]["urlPrefix"] = extender.url().into();
        if let Some(tls) = tls {
            config["extenders"][0]["urlPrefix"] = extender.url().replace("http:", "https:").into();
            config["extenders"][0]["enableHTTPS"] = true.into();
            config["extenders"][0]["tlsConfig"] = tls;
        }
        let file = self.folder.path().join(format!("{name}.yaml"));
        fs::write(&file, config.to_string())?;
        let mut command = Command::new(self.binaries.join("kube-scheduler"));
        command.arg("--config").arg(file).arg("--secure-port=0");
        Process::start(command, self.folder.path().join(format!("{name}-kube.log")))
    }
}

/// A vcuda-scheduler that can be killed and started again.
pub struct Extender {
    process: Option<Process>,
    ports: [u16; 2],
    arguments: Vec<String>,
    kubeconfig: PathBuf,
    log: PathBuf,
}

impl Extender {
    pub fn start(&mut self) -> Result<()> {
        let [verbs, health] = self.ports;
        let mut command = Command::new(env!("CARGO_BIN_EXE_vcuda-scheduler"));
        command
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .args(["--listen", &format!("127.0.0.1:{verbs}")])
            .args(["--health-listen", &format!("127.0.0.1:{health}")])
            .args(&self.arguments);
        self.process = Some(Process::start(command, self.log.clone())?);
        Ok(())
    }

    pub fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("it was started")
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.ports[0])
    }

    /// Posts `body` to a verb, as kube-scheduler does.
    pub async fn call(&self, verb: &str, body: &Value) -> Result<Value> {
        let (status, text) = http(self.ports[0], "POST", verb, &body.to_string()).await?;
        if status != 200 {
            bail!("{verb}: {status}: {text}");
        }
        Ok(serde_json::from_str(&text)?)
    }

    pub async fn is_ready(&self) -> bool {
        matches!(http(self.ports[1], "GET", "readyz", "").await, Ok((200, _)))
    }

    pub async fn wait_until_ready(&self) -> Result<()> {
        wait("the extender is ready", async || self.is_ready().await).await.with_context(|| self.log())
    }

    pub async fn metric(&self, line: &str) -> Result<u64> {
        let (_, text) = http(self.ports[1], "GET", "metrics", "").await?;
        let value = text.lines().find_map(|it| it.strip_prefix(line)?.trim().parse().ok());
        value.with_context(|| format!("there is no {line} in:\n{text}"))
    }

    /// Waits until it refuses `pod` on `node` with `text`: its watch has told it of what is new there.
    pub async fn wait_until_it_says(&self, pod: &Value, node: &str, text: &str) -> Result<()> {
        let question = json!({ "Pod": pod, "NodeNames": [node] });
        let says = async || {
            let answer = self.call("filter", &question).await;
            let why =
                answer.ok().and_then(|it| Some(it["FailedAndUnresolvableNodes"][node].as_str()?.to_owned()));
            why.is_some_and(|why| why.contains(text))
        };
        wait(&format!("vcuda-scheduler says of {node}: {text}"), says).await
    }

    pub fn log(&self) -> String {
        self.process.as_ref().map(Process::log).unwrap_or_default()
    }

    /// Binds a pod, and gives the error that kube-scheduler would show.
    pub async fn bind(&self, pod: &Pod, node: &str) -> Result<String> {
        let (name, uid) = (&pod.metadata.name, &pod.metadata.uid);
        let order = json!({ "PodName": name, "PodNamespace": "default", "PodUID": uid, "Node": node });
        let answer = self.call("bind", &order).await?;
        Ok(answer["Error"].as_str().context("no Error")?.to_owned())
    }
}

/// One HTTP request; gives status and body.
pub async fn http(port: u16, method: &str, path: &str, body: &str) -> Result<(u16, String)> {
    exchange(TcpStream::connect(("127.0.0.1", port)).await?, method, path, body).await
}

/// One HTTP request over a connection.
pub async fn exchange(
    mut stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    method: &str,
    path: &str,
    body: &str,
) -> Result<(u16, String)> {
    let request = format!(
        "{method} /{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    let answer = String::from_utf8(answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").with_context(|| format!("no HTTP: {answer:?}"))?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.context("no status")?, body.to_owned()))
}

/// Waits until `done`.
pub async fn wait(what: &str, done: impl AsyncFn() -> bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !done().await {
        if Instant::now() > deadline {
            bail!("in vain: {what}");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

fn etcd() -> PathBuf {
    let dir = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = dir("VCUDA_CACHE")
        .or_else(|| dir("XDG_CACHE_HOME").map(|dir| dir.join("vcuda")))
        .or_else(|| dir("HOME").map(|dir| dir.join(".cache/vcuda")));
    let cached = cache.map(|cache| cache.join("etcd/usr/bin/etcd"));
    cached.filter(|path| path.exists()).unwrap_or_else(|| "etcd".into())
}

fn kubeconfig(port: u16, user: &str) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
        // The certificate is made by the API server at its start; loopback is the whole network.
        "clusters": [{ "name": "test", "cluster": {
            "server": format!("https://127.0.0.1:{port}"),
            "insecure-skip-tls-verify": true,
        } }],
        "users": [{ "name": "test", "user": { "token": user } }],
    })
    .to_string()
}

/// Ports that nobody listens on.
pub fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let mut ports = [0; N];
    // All are held until all are known, so that they differ.
    let listeners: Vec<_> = (0..N).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<_, _>>()?;
    for (port, listener) in ports.iter_mut().zip(&listeners) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}

fn request(path: &str) -> axum::http::Request<Vec<u8>> {
    let mut request = axum::http::Request::new(Vec::new());
    *request.uri_mut() = path.parse().expect("a path");
    request
}
