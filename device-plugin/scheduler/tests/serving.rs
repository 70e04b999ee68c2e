//! How vcuda-scheduler meets its callers, its probes and its operator. There is no API server.

#![expect(clippy::unwrap_used, reason = "an assertion, in a test")]

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use scheduler::tls::{Files, TlsListener};
use tempfile::TempDir;
use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    },
};

const PATIENCE: Duration = Duration::from_secs(60);

/// A kubeconfig for an API server that nobody is.
fn kubeconfig(folder: &Path) -> PathBuf {
    let path = folder.join("kubeconfig");
    let text = r#"{"apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {}}]}"#;
    fs::write(&path, text).unwrap();
    path
}

fn command(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vcuda-scheduler"));
    command.arg("--kubeconfig").arg(kubeconfig(folder)).args(["--health-listen", "127.0.0.1:0"]);
    command.stdin(Stdio::null());
    command
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn http(port: u16, head: &str, body: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    let length = body.len();
    write!(
        stream,
        "{head} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One that lives, and the port at which it answers.
fn living(folder: &Path) -> (Killed, u16) {
    let port = free_port();
    let mut command = command(folder);
    command.args(["--leader-elect=false", "--listen", &format!("127.0.0.1:{port}")]);
    let child = Killed(command.stderr(Stdio::null()).spawn().unwrap());
    let start = Instant::now();
    while http(port, "GET /healthz", "").is_err() {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(20));
    }
    (child, port)
}

#[test]
fn before_it_knows_the_cluster_it_lives_is_not_ready_and_says_why() {
    let folder = TempDir::new().unwrap();
    let (mut child, port) = living(folder.path());
    let ready = http(port, "GET /readyz", "").unwrap();
    assert!(ready.starts_with("HTTP/1.1 503") && ready.contains("still reading"), "{ready}");
    // kube-scheduler shows the text of the field, and nothing of an answer that is not 200.
    let question = r#"{"Pod": {"metadata": {"name": "p"}}, "NodeNames": ["n"]}"#;
    let answer = http(port, "POST /filter", question).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains(r#""NodeNames":null"#) && answer.contains("still reading"), "{answer}");
    let order = r#"{"PodName": "p", "PodNamespace": "d", "PodUID": "u", "Node": "n"}"#;
    let answer = http(port, "POST /bind", order).unwrap();
    assert!(answer.contains("still reading"), "{answer}");
    let metrics = http(port, "GET /metrics", "").unwrap();
    assert!(metrics.contains("\nvcuda_scheduler_serving 0\n"), "{metrics}");

    end(&mut child, Signal::TERM);
}

/// Any pod reaches the address of probes, and can open connections there and say nothing.
#[test]
fn whoever_holds_connections_open_keeps_nobody_from_asking_and_costs_few_open_files() {
    let files = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files }).unwrap();
    let folder = TempDir::new().unwrap();
    let (listen, health) = (free_port(), free_port());
    let mut command = Command::new(env!("CARGO_BIN_EXE_vcuda-scheduler"));
    command.arg("--kubeconfig").arg(kubeconfig(folder.path())).arg("--leader-elect=false");
    command.args(["--listen", &format!("127.0.0.1:{listen}"), "--health-listen"]);
    command.arg(format!("127.0.0.1:{health}")).stdin(Stdio::null()).stderr(Stdio::null());
    let mut child = Killed(command.spawn().unwrap());
    let start = Instant::now();
    while http(listen, "GET /healthz", "").is_err() {
        assert!(start.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(20));
    }
    let open = |pid: u32| fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let before = open(child.0.id());
    for (port, most) in [(health, 64), (listen, 4096)] {
        let mut idle = Vec::new();
        for n in 0..most + 100 {
            idle.push(TcpStream::connect(("127.0.0.1", port)).unwrap());
            if n % 100 == 0 {
                // Then all before are accepted, and none is lost in the kernel's queue, to be tried again a second later.
                http(port, "GET /healthz", "").unwrap();
            }
        }
        assert!(http(port, "GET /healthz", "").unwrap().starts_with("HTTP/1.1 200"));
        // Each that gives way is closed a moment later.
        let start = Instant::now();
        while open(child.0.id()) > before + most + 1 {
            assert!(start.elapsed() < PATIENCE, "{} open files, {before} before", open(child.0.id()));
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    end(&mut child, Signal::TERM);
}

fn end(child: &mut Killed, signal: Signal) {
    kill_process(Pid::from_child(&child.0), signal).unwrap();
    assert_eq!(child.0.wait().unwrap().code(), Some(0), "{signal:?}");
}

#[test]
fn every_signal_that_asks_for_an_end_gets_an_orderly_one() {
    for signal in [Signal::INT, Signal::HUP] {
        let folder = TempDir::new().unwrap();
        let (mut child, _) = living(folder.path());
        end(&mut child, signal);
    }
}

fn ends(command: &mut Command) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = command.output().unwrap();
    (status.code(), String::from_utf8(stderr).unwrap())
}

#[test]
fn what_cannot_work_is_one_clear_line_and_an_exit_code() {
    let folder = TempDir::new().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for (arguments, code, said) in [
        (&["--listen", "0.0.0.0:0"][..], 2, "whoever reaches it could bind pods; pass --client-ca"),
        (&["--listen", &address], 1, "cannot be listened at; pass another address"),
        (&["--kubeconfig", "/nonexistent"], 1, "--kubeconfig /nonexistent: cannot be used"),
        (
            &["--tls-certificate", "/nonexistent", "--tls-key", "/nonexistent"],
            1,
            "/nonexistent: no private key",
        ),
        (&["--tls-certificate", "/nonexistent"], 2, "--tls-key"),
        (&["--policy", "binpack"], 2, "it must be pack or spread"),
        (&["--lease-duration", "1"], 2, "3..=600"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vcuda-scheduler"));
        command.args(["--health-listen", "127.0.0.1:0"]);
        if !arguments.contains(&"--kubeconfig") {
            command.arg("--kubeconfig").arg(kubeconfig(folder.path()));
        }
        if !arguments.contains(&"--listen") {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        let (ended, text) = ends(command.args(arguments));
        assert_eq!(ended, Some(code), "{arguments:?}: {text}");
        assert!(text.contains(said), "{arguments:?}: {text}");
        assert!(!text.contains('\u{1b}'), "colours in what is no terminal: {text:?}");
    }
}

/// A CA, and what it signs.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), certificate }
    }

    /// Certificate and key.
    fn sign(&self) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".into()]).unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

/// What a caller gets that trusts `server` and shows a certificate of `client`.
async fn call(address: SocketAddr, server: &Authority, client: Option<&Authority>) -> anyhow::Result<String> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(server.certificate.as_bytes())?)?;
    let config = ClientConfig::builder().with_root_certificates(roots);
    let config = match client {
        None => config.with_no_client_auth(),
        Some(client) => {
            let (certificate, key) = client.sign();
            let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes())?];
            config.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(key.as_bytes())?)?
        }
    };
    let stream = tokio::net::TcpStream::connect(address).await?;
    let connector = TlsConnector::from(Arc::new(config));
    let mut stream = connector.connect(ServerName::try_from("localhost")?, stream).await?;
    tokio::io::AsyncWriteExt::write_all(
        &mut stream,
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    )
    .await?;
    let mut answer = String::new();
    tokio::io::AsyncReadExt::read_to_string(&mut stream, &mut answer).await?;
    anyhow::ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    Ok(answer)
}

#[tokio::test]
async fn over_https_only_known_callers_are_let_in_and_certificates_are_renewed() {
    let _ = ring::default_provider().install_default();
    let folder = TempDir::new().unwrap();
    let (servers, callers, strangers) = (Authority::new(), Authority::new(), Authority::new());
    let files = Files {
        certificate: folder.path().join("tls.crt"),
        key: folder.path().join("tls.key"),
        client_ca: Some(folder.path().join("ca.crt")),
    };
    let write = |authority: &Authority| {
        let (certificate, key) = authority.sign();
        fs::write(&files.certificate, certificate).unwrap();
        fs::write(&files.key, key).unwrap();
    };
    write(&servers);
    fs::write(files.client_ca.as_ref().unwrap(), &callers.certificate).unwrap();

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let listener = TlsListener::new(listener, files.clone(), Duration::from_millis(20)).unwrap();
    let router = axum::Router::new().route("/", axum::routing::get(async || "in"));
    let server = tokio::spawn(axum::serve(listener, router).into_future());

    // One that says nothing holds up nobody.
    let _silent = TcpStream::connect(address).unwrap();
    assert!(call(address, &servers, Some(&callers)).await.unwrap().ends_with("in"));
    assert!(call(address, &servers, None).await.is_err());
    assert!(call(address, &servers, Some(&strangers)).await.is_err());

    // Half a renewal, then a whole one.
    let renewed = Authority::new();
    fs::write(&files.key, "").unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(call(address, &servers, Some(&callers)).await.is_ok());
    write(&renewed);
    let start = Instant::now();
    while call(address, &renewed, Some(&callers)).await.is_err() {
        assert!(start.elapsed() < PATIENCE, "the new certificate is not used");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    server.abort();
}

#[tokio::test]
async fn strangers_that_do_not_introduce_themselves_give_way() {
    let _ = ring::default_provider().install_default();
    let folder = TempDir::new().unwrap();
    let authority = Authority::new();
    let (certificate, key) = authority.sign();
    let files = Files {
        certificate: folder.path().join("tls.crt"),
        key: folder.path().join("tls.key"),
        client_ca: None,
    };
    fs::write(&files.certificate, certificate).unwrap();
    fs::write(&files.key, key).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let listener = TlsListener::new(listener, files, Duration::from_secs(60)).unwrap();
    let router = axum::Router::new().route("/", axum::routing::get(async || "in"));
    tokio::spawn(axum::serve(listener, router).into_future());

    let mut strangers = Vec::new();
    for _ in 0..518 {
        strangers.push(tokio::net::TcpStream::connect(address).await.unwrap());
    }
    assert!(call(address, &authority, None).await.unwrap().ends_with("in"));
    // Far below the time that each may take; the last ones are still waited for.
    let mut is_closed = Vec::new();
    for stranger in &mut strangers[..10] {
        let mut byte = [0];
        let read = tokio::io::AsyncReadExt::read(stranger, &mut byte);
        is_closed.push(tokio::time::timeout(Duration::from_millis(20), read).await.is_ok());
    }
    assert_eq!(is_closed, [true, true, true, true, true, true, true, false, false, false]);
}
