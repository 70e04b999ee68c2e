//! Registration, configuration, synchronization, and coming back after the runtime was restarted.

mod common;

use std::{fs, path::Path, sync::Arc, time::Duration};

use common::{
    FakeRuntime, TestNode, container, device, eventually, exists, granted, message, pod, request, soon,
};
use ledger::ShareState;
use nri_plugin::{
    connect::Way,
    node::{Node, NodeError},
    service::{NodeSource, Service},
    session::{Identity, SessionError, serve},
    wire::{ConfigureRequest, EVENTS, SynchronizeRequest},
};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::{Semaphore, oneshot},
    task::JoinHandle,
};
use vcuda_config::{
    annotation,
    daemons::{LockError, NriPlugin},
};

/// Runs the plugin of a node until the second is told, or dropped.
fn run(node: &TestNode) -> (JoinHandle<Result<(), SessionError>>, oneshot::Sender<()>) {
    let (stop, stopped) = oneshot::channel();
    let way = Way::external(&node.file, node.start());
    let plugin = tokio::spawn(way.go(async move {
        let _ = stopped.await;
    }));
    (plugin, stop)
}

/// The runtime that a plugin dials next.
async fn dialled(listener: &UnixListener) -> FakeRuntime {
    let (trunk, _) = listener.accept().await.expect("the plugin dials");
    FakeRuntime::start(trunk).await
}

fn identity() -> Identity {
    Identity { name: "vcuda".into(), index: "90".into() }
}

#[tokio::test]
async fn configure_may_come_before_the_registration_is_answered() {
    let node = TestNode::new();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let answer = Arc::new(Semaphore::new(0));
    let mut runtime = FakeRuntime::start_with(theirs, Arc::clone(&answer), None).await;
    let service = Service::new(NodeSource::Here(Arc::new(node.start())));
    let session = tokio::spawn(async move { serve(ours, &identity(), &service).await });
    let registration = runtime.registered.recv().await.unwrap();
    assert_eq!((registration.plugin_name.as_str(), registration.plugin_idx.as_str()), ("vcuda", "90"));
    let configured = runtime.plugin.configure(soon(), &ConfigureRequest::default()).await.unwrap();
    assert_eq!(configured.events, EVENTS);
    answer.add_permits(1);
    runtime.plugin.synchronize(soon(), &SynchronizeRequest::default()).await.unwrap();
    runtime.close();
    session.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_refused_registration_is_told_in_the_runtimes_words() {
    let node = TestNode::new();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let _runtime =
        FakeRuntime::start_with(theirs, Arc::new(Semaphore::new(1)), Some("invalid plugin index")).await;
    let service = Service::new(NodeSource::Here(Arc::new(node.start())));
    let error = serve(ours, &identity(), &service).await.unwrap_err().to_string();
    assert!(error.contains("invalid plugin index"), "{error}");
}

#[tokio::test]
async fn a_list_in_parts_is_acted_on_when_it_is_whole() {
    let node = TestNode::new();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut runtime = FakeRuntime::start(theirs).await;
    let service = Service::new(NodeSource::Here(Arc::new(node.start())));
    tokio::spawn(async move { serve(ours, &identity(), &service).await });
    runtime.admit().await;
    for n in [1, 2, 3] {
        runtime.create(&pod(n), granted(&pod(n), "main", 1, 20, 4)).await.unwrap();
        runtime.create(&pod(n), container(&pod(n), "side", 1)).await.unwrap();
    }
    // The list is as old as its first part, and what is bound in that millisecond is not its business.
    tokio::time::sleep(Duration::from_millis(10)).await;
    let part = |n, more| SynchronizeRequest {
        pods: vec![pod(n)],
        containers: vec![granted(&pod(n), "main", 1, 20, 4), container(&pod(n), "side", 1)],
        more,
        ..SynchronizeRequest::default()
    };
    let answer = runtime.plugin.synchronize(soon(), &part(1, true)).await.unwrap();
    assert!(answer.more);
    assert_eq!(node.shares().records.len(), 3, "half a list says nothing about what is not on it");
    let answer = runtime.plugin.synchronize(soon(), &part(3, false)).await.unwrap();
    assert!(!answer.more);
    let left: Vec<_> = node.shares().records.into_keys().map(String::from).collect();
    assert_eq!(left, ["uid-1_main", "uid-3_main"]);
}

#[tokio::test]
async fn what_runs_without_a_record_is_taken_back_in_if_it_is_really_ours() {
    let node = TestNode::new();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut runtime = FakeRuntime::start(theirs).await;
    let service = Service::new(NodeSource::Here(Arc::new(node.start())));
    tokio::spawn(async move { serve(ours, &identity(), &service).await });
    runtime.admit().await;

    let running = |n, minor| {
        let mut running = granted(&pod(n), "main", 1, 60, 4);
        running.annotations.insert(annotation::SHARE.into(), format!("uid-{n}_main"));
        running.linux.mut_or_insert_default().devices = vec![device(195, 255), device(195, minor)];
        running
    };
    let mut forged = running(2, 0);
    forged.hooks.clear();
    let mut without_node = running(3, 0);
    without_node.linux.mut_or_insert_default().devices.clear();
    let unbound = granted(&pod(4), "main", 1, 60, 4);
    let list = SynchronizeRequest {
        pods: vec![pod(1), pod(2), pod(3), pod(4)],
        containers: vec![running(1, 0), forged, without_node, unbound],
        ..SynchronizeRequest::default()
    };
    runtime.plugin.synchronize(soon(), &list).await.unwrap();
    let records = node.shares().records;
    assert_eq!(records.len(), 1, "{records:?}");
    let record = records.into_values().next().unwrap();
    assert_eq!((record.gpus[0].minor, record.gpus[0].core, record.gpus[0].memory_bytes), (0, 60, 1 << 30));
    assert_eq!(
        (record.state, record.shim, record.container.id.as_str()),
        (ShareState::Running, true, "sandbox-1-main-1")
    );
    // Its room is taken: the next goes to the other GPU, the one after nowhere.
    for (n, fits) in [(5, true), (6, false)] {
        assert_eq!(runtime.create(&pod(n), granted(&pod(n), "main", 1, 60, 4)).await.is_ok(), fits);
    }
}

#[tokio::test]
async fn a_plugin_that_containerd_starts_is_configured_by_it() {
    let node = TestNode::new();
    let text = format!(
        "version: 1\npaths: {{state: {0}/state, run: {0}/run, install: {0}/install}}\n",
        node.folder.path().display()
    );
    let file = node.folder.path().join("node.yaml");
    fs::write(&file, &text).unwrap();
    for config in [text.as_str(), file.to_str().unwrap()] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut runtime = FakeRuntime::start(theirs).await;
        let service = Service::new(NodeSource::Configure("/nowhere/config.yaml".into()));
        let serving = Arc::clone(&service);
        let session = tokio::spawn(async move { serve(ours, &identity(), &serving).await });
        runtime.registered.recv().await.unwrap();
        let configure = ConfigureRequest { config: config.into(), ..ConfigureRequest::default() };
        runtime.plugin.configure(soon(), &configure).await.unwrap();
        assert_eq!(service.node().unwrap().binder().paths().state, node.file.paths.state);
        runtime.close();
        assert!(matches!(session.await.unwrap(), Err(SessionError::Early)));
    }
}

#[tokio::test]
async fn a_node_file_that_cannot_be_used_ends_the_plugin_and_is_told_to_containerd() {
    for (config, named) in [
        ("version: 1\nnonsense: 1", "nonsense"),
        ("/nowhere/node.yaml", "/nowhere"),
        ("", "/nowhere/config.yaml"),
    ] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut runtime = FakeRuntime::start(theirs).await;
        let service = Service::new(NodeSource::Configure("/nowhere/config.yaml".into()));
        let session = tokio::spawn(async move { serve(ours, &identity(), &service).await });
        runtime.registered.recv().await.unwrap();
        let configure = ConfigureRequest { config: config.into(), ..ConfigureRequest::default() };
        let told = message(runtime.plugin.configure(soon(), &configure).await);
        assert!(told.contains(named), "{told}");
        match session.await.unwrap() {
            Err(SessionError::Unusable(reason)) => assert_eq!(reason, told),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_plugin_comes_back_whenever_containerd_does_and_shows_whether_it_serves() {
    let node = TestNode::new();
    let socket = node.file.paths.nri_socket.clone();
    let (plugin, stop) = run(&node);
    let ready = node.ready_file();
    for _ in 0..3 {
        let listener = UnixListener::bind(&socket).unwrap();
        let mut runtime = dialled(&listener).await;
        assert!(!exists(&ready), "not in service before it is synchronized");
        runtime.admit().await;
        eventually("ready", || exists(&ready)).await;
        let asked = NriPlugin::of(&node.file.paths).unwrap();
        assert!(matches!(asked, NriPlugin::Connected { runtime, .. } if runtime == "containerd v2.1.9"));
        runtime.create(&pod(1), granted(&pod(1), "main", 1, 20, 4)).await.unwrap();
        runtime.close();
        drop(listener);
        fs::remove_file(&socket).unwrap();
        eventually("no longer ready", || !exists(&ready)).await;
    }
    // A peer that is no containerd, and one that hangs up at once, are got over.
    let listener = UnixListener::bind(&socket).unwrap();
    let (trunk, _) = listener.accept().await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut &mut { trunk }, b"HTTP/1.1 400 Bad Request\r\n\r\n")
        .await
        .unwrap();
    drop(listener.accept().await.unwrap());
    dialled(&listener).await.admit().await;

    stop.send(()).unwrap();
    plugin.await.unwrap().unwrap();
    assert!(!exists(&ready));
}

#[tokio::test]
async fn a_pod_whose_end_containerd_does_not_tell_is_noticed_from_its_list() {
    let node = TestNode::new();
    let listener = UnixListener::bind(&node.file.paths.nri_socket).unwrap();
    let (plugin, stop) = run(&node);
    // containerd is restarted under a running share.
    let mut runtime = dialled(&listener).await;
    runtime.admit().await;
    for n in [1, 2] {
        runtime.create(&pod(n), granted(&pod(n), "main", 1, 20, 4)).await.unwrap();
    }
    runtime.close();
    let mut runtime = dialled(&listener).await;
    assert_eq!(runtime.registered.recv().await.unwrap().plugin_name, "vcuda");
    runtime.plugin.configure(soon(), &ConfigureRequest::default()).await.unwrap();
    let list = |pods: &[u32]| SynchronizeRequest {
        pods: pods.iter().map(|n| pod(*n)).collect(),
        containers: pods.iter().map(|n| granted(&pod(*n), "main", 1, 20, 4)).collect(),
        ..SynchronizeRequest::default()
    };
    runtime.plugin.synchronize(soon(), &list(&[1, 2])).await.unwrap();
    // Of pod 1 only its container's end is told.
    runtime.plugin.stop_container(soon(), &request(&pod(1), container(&pod(1), "main", 1))).await.unwrap();

    let mut asking = dialled(&listener).await;
    assert_eq!(asking.registered.recv().await.unwrap().plugin_name, "vcuda-list");
    let configured = asking.plugin.configure(soon(), &ConfigureRequest::default()).await.unwrap();
    assert_eq!(configured.events.count_ones(), 1, "nothing would mean everything");
    assert_eq!(configured.events & EVENTS, 0, "or it would be asked for shares, too");
    asking.plugin.synchronize(soon(), &list(&[2])).await.unwrap();
    let left: Vec<_> = node.shares().records.into_keys().map(String::from).collect();
    assert_eq!(left, ["uid-2_main"]);
    // The session in service goes on.
    runtime.create(&pod(3), granted(&pod(3), "main", 1, 20, 4)).await.unwrap();
    stop.send(()).unwrap();
    plugin.await.unwrap().unwrap();
}

/// As on a full disk. containerd tells of an end once.
#[tokio::test]
async fn an_end_that_could_not_be_noted_is_noted_from_the_list() {
    let node = TestNode::new();
    let listener = UnixListener::bind(&node.file.paths.nri_socket).unwrap();
    let (plugin, stop) = run(&node);
    let mut runtime = dialled(&listener).await;
    runtime.admit().await;
    runtime.create(&pod(1), granted(&pod(1), "main", 1, 20, 4)).await.unwrap();
    // Where a record is written before it gets its name.
    let full = node.file.paths.shares().join("uid-1_main/.share.json.new");
    fs::create_dir(&full).unwrap();
    runtime.plugin.stop_container(soon(), &request(&pod(1), container(&pod(1), "main", 1))).await.unwrap();
    fs::remove_dir(&full).unwrap();

    let asked = tokio::time::timeout(Duration::from_secs(60), dialled(&listener));
    let mut asking = asked.await.expect("the list is asked for");
    assert_eq!(asking.registered.recv().await.unwrap().plugin_name, "vcuda-list");
    let configure = ConfigureRequest {
        runtime_name: "containerd".into(),
        runtime_version: "v2.1.9".into(),
        ..ConfigureRequest::default()
    };
    asking.plugin.configure(soon(), &configure).await.unwrap();
    let list = SynchronizeRequest { pods: vec![pod(1)], ..SynchronizeRequest::default() };
    asking.plugin.synchronize(soon(), &list).await.unwrap();
    assert_eq!(node.shares().records.into_values().next().unwrap().state, ShareState::Stopped);
    stop.send(()).unwrap();
    plugin.await.unwrap().unwrap();
}

/// Kubelet hands an init container's devices on, so its share has to give way, also when nobody heard its end.
#[tokio::test]
async fn an_init_container_that_ended_while_the_plugin_was_away_gives_way_where_the_list_is_complete() {
    for (version, gives_way) in [("v2.1.9", true), ("1.7.24~ds1", false)] {
        let node = TestNode::new();
        let shared = Arc::new(node.start());
        let session = async |version: &str, list: SynchronizeRequest| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let mut runtime = FakeRuntime::start(theirs).await;
            let service = Service::new(NodeSource::Here(Arc::clone(&shared)));
            tokio::spawn(async move { serve(ours, &identity(), &service).await });
            runtime.registered.recv().await.unwrap();
            let configure = ConfigureRequest {
                runtime_name: "containerd".into(),
                runtime_version: version.into(),
                ..ConfigureRequest::default()
            };
            runtime.plugin.configure(soon(), &configure).await.unwrap();
            runtime.plugin.synchronize(soon(), &list).await.unwrap();
            runtime
        };
        let before = session(version, SynchronizeRequest::default()).await;
        before.create(&pod(1), granted(&pod(1), "setup", 1, 60, 4)).await.unwrap();
        before.close();
        // What is bound in the millisecond of a list is not its business.
        tokio::time::sleep(Duration::from_millis(10)).await;

        let list = SynchronizeRequest { pods: vec![pod(1)], ..SynchronizeRequest::default() };
        let after = session(version, list).await;
        after.create(&pod(1), granted(&pod(1), "main", 1, 60, 4)).await.unwrap();
        let left: Vec<_> = node.shares().records.into_keys().map(String::from).collect();
        let expected = if gives_way { vec!["uid-1_main"] } else { vec!["uid-1_main", "uid-1_setup"] };
        assert_eq!(left, expected, "{version}");
    }
}

#[test]
fn a_second_plugin_on_the_node_says_who_runs_already() {
    let node = TestNode::new();
    let first = node.start();
    let error = Node::start(&node.file).unwrap_err();
    assert!(matches!(error, NodeError::Lock(LockError::Held { .. })));
    let text = error.to_string();
    assert!(text.contains(&format!("process {}", std::process::id())) && text.contains("stop it"), "{text}");
    drop(first);
    node.start();
}

#[test]
fn a_ready_file_that_a_killed_plugin_left_is_not_believed() {
    let node = TestNode::new();
    drop(node.start());
    fs::write(node.ready_file(), "containerd v2.1.9").unwrap();
    assert_eq!(NriPlugin::of(&node.file.paths).unwrap(), NriPlugin::NotRunning);
    let running = node.start();
    assert!(!exists(&node.ready_file()), "cleared at the next start");
    drop(running);
    assert!(!exists(Path::new(&node.ready_file())));
}

/// The list is asked for every few minutes for as long as the node runs, beside the session that serves containers.
#[tokio::test]
async fn sessions_that_ask_for_the_list_leave_nothing_behind() {
    let node = TestNode::new();
    let started = Arc::new(node.start());
    let look = async || {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let service = Service::for_list(Arc::clone(&started));
        let session = tokio::spawn(async move { serve(ours, &identity(), &service).await });
        let mut runtime = FakeRuntime::start(theirs).await;
        runtime.admit().await;
        // As when the list has been seen: the session is dropped.
        session.abort();
        let _ = session.await;
        runtime.close();
    };
    let alive = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    for _ in 0..3 {
        look().await;
    }
    eventually("a session's tasks end", || alive() == 0).await;
    for _ in 0..50 {
        look().await;
    }
    eventually("the tasks of many end", || alive() == 0).await;
}
