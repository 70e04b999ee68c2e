//! The program as systemd, containerd and people start it.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

mod common;

use std::{
    fs,
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::{Child, Command, Stdio},
};

use common::{FakeRuntime, TestNode, eventually, exists, granted, pod, soon};
use nri_plugin::wire::ConfigureRequest;
use rustix::process::{Pid, Signal, kill_process};
use tokio::net::UnixListener;

const PROGRAM: &str = env!("CARGO_BIN_EXE_vcuda-nri-plugin");

/// The node's settings as a node file.
fn node_file(node: &TestNode) -> String {
    format!(
        "version: 1\npaths: {{state: {0}/state, run: {0}/run, install: {0}/install, nriSocket: {0}/nri.sock}}\n",
        node.folder.path().display()
    )
}

fn program(node: &TestNode) -> Command {
    let config = node.folder.path().join("config.yaml");
    fs::write(&config, node_file(node)).unwrap();
    let mut command = Command::new(PROGRAM);
    command.arg("--config").arg(config).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Started as containerd does it: nothing in the environment but the three variables, and the socket as file 3.
fn launch(socket: UnixStream) -> Child {
    Command::new("/bin/sh")
        .args(["-c", "exec 3<&0 </dev/null; exec \"$0\"", PROGRAM])
        .env_clear()
        .envs([("NRI_PLUGIN_NAME", "vcuda"), ("NRI_PLUGIN_IDX", "90"), ("NRI_PLUGIN_SOCKET", "3")])
        .stdin(OwnedFd::from(socket))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// The runtime's socket.
fn listen(node: &TestNode) -> UnixListener {
    UnixListener::bind(&node.file.paths.nri_socket).unwrap()
}

fn terminate(child: &Child) {
    kill_process(Pid::from_child(child), Signal::TERM).unwrap();
}

#[tokio::test]
async fn every_signal_that_asks_for_an_end_gets_an_orderly_one() {
    let node = TestNode::new();
    let listener = listen(&node);
    for signal in [Signal::INT, Signal::HUP] {
        let child = program(&node).spawn().unwrap();
        let (trunk, _) = listener.accept().await.unwrap();
        let mut runtime = FakeRuntime::start(trunk).await;
        runtime.admit().await;
        eventually("ready", || exists(&node.ready_file())).await;
        kill_process(Pid::from_child(&child), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{signal:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(!exists(&node.ready_file()), "{signal:?}");
    }
}

#[tokio::test]
async fn it_serves_until_sigterm_and_shows_when_it_is_ready() {
    let node = TestNode::new();
    let listener = listen(&node);
    let ready = |node: &TestNode| program(node).arg("--ready").output().unwrap();
    let asked = ready(&node);
    assert_eq!(asked.status.code(), Some(1));
    let said = String::from_utf8_lossy(&asked.stdout).into_owned();
    assert!(said.starts_with("not in service") && said.contains("vcuda-check node"), "{said}");

    let child = program(&node).spawn().unwrap();
    let (trunk, _) = listener.accept().await.unwrap();
    let mut runtime = FakeRuntime::start(trunk).await;
    assert_eq!(ready(&node).status.code(), Some(1), "connected is not in service");
    runtime.admit().await;
    eventually("ready", || exists(&node.ready_file())).await;
    let asked = ready(&node);
    assert_eq!(asked.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&asked.stdout), "in service for containerd v2.1.9\n");

    let second = program(&node).output().unwrap();
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(6), "{said}");
    assert_eq!(said.lines().count(), 1, "one sentence: {said}");
    assert!(said.contains(&format!("process {}", child.id())), "{said}");

    terminate(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(!exists(&node.ready_file()));
}

#[tokio::test]
async fn started_by_containerd_it_takes_its_settings_from_there_and_logs_to_the_nodes_run_folder() {
    let node = TestNode::new();
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let child = launch(ours);
    let mut runtime = FakeRuntime::start(tokio::net::UnixStream::from_std(theirs).unwrap()).await;
    let registration = runtime.registered.recv().await.unwrap();
    assert_eq!((registration.plugin_name.as_str(), registration.plugin_idx.as_str()), ("vcuda", "90"));
    let configure = ConfigureRequest { config: node_file(&node), ..ConfigureRequest::default() };
    runtime.plugin.configure(soon(), &configure).await.unwrap();
    runtime.plugin.synchronize(soon(), &Default::default()).await.unwrap();
    runtime.create(&pod(1), granted(&pod(1), "main", 1, 20, 4)).await.unwrap();
    assert_eq!(node.shares().records.len(), 1);

    // The connection goes, containerd does not: it comes back by itself.
    let listener = listen(&node);
    runtime.close();
    let (trunk, _) = listener.accept().await.unwrap();
    FakeRuntime::start(trunk).await.admit().await;

    terminate(&child);
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(0));
    let log = fs::read_to_string(node.file.paths.run.join("nri-plugin.log")).unwrap();
    assert!(log.contains("bound") && log.contains("uid-1_main"), "{log}");
}

/// Or the next plugin would wait for it, and no share start on the node meanwhile.
#[tokio::test]
async fn a_call_that_hangs_does_not_keep_it_from_ending() {
    let node = TestNode::new();
    let listener = listen(&node);
    let mut child = program(&node).spawn().unwrap();
    let (trunk, _) = listener.accept().await.unwrap();
    let mut runtime = FakeRuntime::start(trunk).await;
    runtime.admit().await;
    let held = fs::File::open(node.file.paths.shares()).unwrap();
    held.lock().unwrap();
    runtime.create(&pod(1), granted(&pod(1), "main", 1, 20, 4)).await.unwrap_err();
    terminate(&child);
    for _ in 0..2000 {
        if let Some(status) = child.try_wait().unwrap() {
            return assert_eq!(status.code(), Some(0));
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    held.unlock().unwrap();
    child.wait().unwrap();
    panic!("it waits for the disk");
}

#[test]
fn what_it_cannot_work_with_is_said_in_one_sentence() {
    let node = TestNode::new();
    let config = node.folder.path().join("bad.yaml");
    fs::write(&config, "version: 1\nnonsense: 1\n").unwrap();
    let run = |arguments: &[&str], socket: Option<&str>| {
        let mut command = Command::new(PROGRAM);
        command.args(arguments).env_clear();
        if let Some(socket) = socket {
            command.env("NRI_PLUGIN_SOCKET", socket);
        }
        let output = command.output().unwrap();
        (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = run(&["--config", config.to_str().unwrap()], None);
    assert!(code == 3 && said.contains("nonsense"), "{code}: {said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    let (code, said) = run(&["--config", "/nowhere/config.yaml"], None);
    assert!(
        code == 3 && said.contains("/nowhere/config.yaml") && said.contains("--config"),
        "{code}: {said}"
    );
    assert_eq!(said.matches("No such file").count(), 1, "{said}");
    let (code, said) = run(&["--nonsense"], None);
    assert_eq!(code, 2, "{said}");
    for socket in ["77", "x", "0", ""] {
        let (code, said) = run(&[], Some(socket));
        assert!(code == 1 && said.contains("NRI_PLUGIN_SOCKET"), "{code}: {said}");
    }
}

#[test]
fn help_teaches() {
    let output = Command::new(PROGRAM).arg("--help").output().unwrap();
    let help = String::from_utf8_lossy(&output.stdout);
    for taught in ["/opt/nri/plugins", "--ready", "Exit codes", "another one runs on this node", "RUST_LOG"] {
        assert!(help.contains(taught), "{taught}: {help}");
    }
}
