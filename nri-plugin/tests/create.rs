//! What containers get, and why some are refused, over a whole session.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

mod common;

use std::{fs, sync::Arc, time::Duration};

use common::{FakeRuntime, TestNode, container, device, gpu, granted, message, pod, soon};
use ledger::{Priority, ShareState, Shares, Terms};
use nri_plugin::{
    service::{NodeSource, Service},
    session::{Identity, serve},
    wire::{
        Container, ContainerAdjustment, Event, LinuxDeviceCgroup, LinuxResources, Mount, PodRequest,
        PodSandbox, StateChangeEvent,
    },
};
use protobuf::{Message, MessageField};
use region::{Limits, Slots, Usage, place};
use tokio::net::UnixStream;
use vcuda_config::annotation;

struct Session {
    node: TestNode,
    runtime: FakeRuntime,
    service: Arc<Service>,
}

async fn session() -> Session {
    session_with(TestNode::new(), Duration::from_secs(10)).await
}

async fn session_with(node: TestNode, bind_deadline: Duration) -> Session {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let source = NodeSource::Here(Arc::new(node.start()));
    let service = Service::with_bind_deadline(source, bind_deadline);
    let identity = Identity { name: "vcuda".into(), index: "90".into() };
    let mut runtime = FakeRuntime::start(theirs).await;
    let serving = Arc::clone(&service);
    tokio::spawn(async move { serve(ours, &identity, &serving).await });
    runtime.admit().await;
    Session { node, runtime, service }
}

async fn adjustment(session: &Session, pod: &PodSandbox, container: Container) -> ContainerAdjustment {
    session.runtime.create(pod, container).await.unwrap().adjust.unwrap()
}

fn of_pod(pod: &PodSandbox) -> PodRequest {
    PodRequest { pod: MessageField::some(pod.clone()), ..PodRequest::default() }
}

fn devices(adjustment: &ContainerAdjustment) -> Vec<&str> {
    adjustment.linux.devices.iter().map(|device| device.path.as_str()).collect()
}

#[tokio::test]
async fn a_container_without_a_share_is_left_as_it_is_whatever_state_we_are_in() {
    let session = session().await;
    fs::remove_dir_all(&session.node.file.paths.state).unwrap();
    fs::write(&session.node.file.paths.state, "a file where a folder should be").unwrap();
    let answer = session.runtime.create(&pod(1), container(&pod(1), "main", 1)).await.unwrap();
    assert_eq!(answer.compute_size(), 0, "{answer}");
}

#[tokio::test]
async fn a_share_brings_device_nodes_and_the_guards_annotation_and_has_its_files_made() {
    let session = session().await;
    let mut asking = granted(&pod(1), "main", 1, 20, 32);
    asking.env = vec!["LD_PRELOAD=/opt/theirs.so /opt/more.so".into(), "PATH=/bin".into()];
    let adjustment = adjustment(&session, &pod(1), asking).await;

    assert_eq!(devices(&adjustment), ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1"]);
    let node = &adjustment.linux.devices[2];
    assert_eq!((node.major, node.minor, node.type_.as_str(), node.file_mode.value), (195, 1, "c", 0o666));
    assert_eq!(adjustment.annotations[annotation::SHARE], "uid-1_main");
    assert_eq!(adjustment.env.len(), 1);
    assert_eq!(adjustment.env[0].value, format!("{}:/opt/theirs.so:/opt/more.so", place::SHIM));

    // The guard mounts what the runtime would take long for.
    assert!(adjustment.mounts.is_empty(), "{adjustment}");
    let folder = session.node.file.paths.shares().join("uid-1_main");
    assert_eq!(fs::read_to_string(folder.join("ld.so.preload")).unwrap(), format!("{}\n", place::SHIM));
    let limits = Limits::open(&folder.join("limits")).unwrap();
    let limit = limits.get(limits.find(&gpu(1).bytes()).unwrap()).unwrap();
    assert_eq!((limits.gpu_count(), limit.memory_bytes, limit.core_percent), (1, 8 << 30, 20));
    assert_eq!((limit.own_slots, limit.core_limit_percent), (Slots::first(20), 20));
    Usage::open(&folder.join("writable/usage")).unwrap();
}

#[tokio::test]
async fn shares_of_a_gpu_get_slots_of_their_own_and_what_their_pods_say_about_idle_time() {
    let session = session().await;
    let limit = |name: &str| {
        let limits = session.node.file.paths.shares().join(name).join("limits");
        Limits::open(&limits).unwrap().get(0).unwrap()
    };
    let mut low = pod(2);
    low.annotations.insert(annotation::CORE_LIMIT.into(), "50".into());
    low.annotations.insert(annotation::PRIORITY.into(), "low".into());
    adjustment(&session, &pod(1), granted(&pod(1), "main", 1, 70, 16)).await;
    adjustment(&session, &low, granted(&low, "main", 1, 30, 16)).await;
    let (first, second) = (limit("uid-1_main"), limit("uid-2_main"));
    assert_eq!(first.own_slots.union(second.own_slots), Slots::ALL);
    assert_eq!((first.core_limit_percent, second.core_limit_percent), (70, 50));
    let shares = Shares::read(&session.node.file.paths.shares()).unwrap();
    let record = &shares.records[&"uid-2_main".parse().unwrap()];
    assert_eq!(record.terms, Terms { core_limit: Some(50), priority: Priority::Low });
}

#[tokio::test]
async fn a_pod_that_says_something_impossible_about_idle_time_is_refused_by_the_annotations_name() {
    let session = session().await;
    for (key, value) in
        [(annotation::CORE_LIMIT, "10"), (annotation::CORE_LIMIT, "all"), (annotation::PRIORITY, "urgent")]
    {
        let mut odd = pod(1);
        odd.annotations.insert(key.into(), value.into());
        let error = message(session.runtime.create(&odd, granted(&odd, "main", 1, 20, 32)).await);
        assert!(error.contains(key) && error.contains("correct it or remove it"), "{error}");
    }
    assert!(Shares::read(&session.node.file.paths.shares()).unwrap().records.is_empty());
}

#[tokio::test]
async fn whole_gpus_come_without_the_shim() {
    let session = session().await;
    let adjustment = adjustment(&session, &pod(1), granted(&pod(1), "main", 1, 200, 0)).await;
    assert_eq!(devices(&adjustment), ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1", "/dev/nvidia0"]);
    assert!(adjustment.mounts.is_empty() && adjustment.env.is_empty());
    assert_eq!(adjustment.annotations[annotation::SHARE], "uid-1_main");
    let error = message(session.runtime.create(&pod(2), granted(&pod(2), "main", 1, 1, 1)).await);
    assert!(error.contains("GPU-00000000") && error.contains("0 core"), "{error}");
}

#[tokio::test]
async fn refusals_name_pod_reason_and_remedy_and_leave_the_plugin_in_service() {
    let session = session().await;
    let with = |change: &dyn Fn(&mut Container)| {
        let mut asking = granted(&pod(1), "main", 1, 20, 32);
        change(&mut asking);
        asking
    };
    let mount = |destination: &str| Mount { destination: destination.into(), ..Mount::default() };
    let cases: Vec<(Container, &str)> = vec![
        (with(&|c| c.hooks = MessageField::none()), "enable_cdi"),
        (with(&|c| c.mounts = vec![mount("/etc//x/../ld.so.preload")]), "remove that volume mount"),
        (with(&|c| c.mounts = vec![mount(place::LIMITS)]), "remove that volume mount"),
        (with(&|c| c.mounts = vec![mount("/usr/local/vcuda/")]), "remove that volume mount"),
        (with(&|c| c.mounts = vec![mount("/usr/local/vcuda/own")]), "remove that volume mount"),
        (
            with(&|c| c.mounts = vec![mount("/usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01")]),
            "remove that volume mount",
        ),
        (
            with(&|c| c.linux.mut_or_insert_default().devices = vec![device(195, 0)]),
            "drop `privileged: true`",
        ),
        (
            with(&|c| {
                let all =
                    LinuxDeviceCgroup { allow: true, access: "rwm".into(), ..LinuxDeviceCgroup::default() };
                c.linux.mut_or_insert_default().resources =
                    MessageField::some(LinuxResources { devices: vec![all], ..LinuxResources::default() });
            }),
            "drop `privileged: true`",
        ),
        (with(&|c| c.name = "../../etc".into()), "names no share"),
        (granted(&pod(1), "main", 1, 20, 0), "vcuda-memory is missing"),
        (granted(&pod(1), "main", 1, 20, UNITS + 1), "use another node"),
    ];
    for (asking, remedy) in cases {
        let error = message(session.runtime.create(&pod(1), asking).await);
        assert!(error.starts_with("vcuda: pod ml/train-1, container "), "{error}");
        assert!(error.contains(remedy), "{remedy}: {error}");
        assert!(!error.contains('\n'), "one sentence: {error}");
    }
    assert!(session.node.shares().records.is_empty(), "a refused container holds nothing");
    adjustment(&session, &pod(1), granted(&pod(1), "main", 1, 20, 32)).await;
}

const UNITS: u32 = common::UNITS;

#[tokio::test]
async fn without_a_current_inventory_or_a_shim_there_are_no_shares() {
    let session = session().await;
    let paths = &session.node.file.paths;
    let refused =
        async || message(session.runtime.create(&pod(1), granted(&pod(1), "main", 1, 20, 32)).await);

    fs::remove_file(paths.shim()).unwrap();
    let error = refused().await;
    assert!(error.contains("libvcuda_preload.so") && error.contains("install vcuda"), "{error}");
    fs::write(paths.shim(), "a library").unwrap();

    fs::remove_file(paths.inventory()).unwrap();
    let error = refused().await;
    assert!(error.contains("vcuda-device-plugin"), "{error}");

    let mut inventory = session.node.inventory();
    inventory.boot_id = "an earlier boot".into();
    session.node.store(&inventory);
    let error = refused().await;
    assert!(error.contains("before the last reboot"), "{error}");

    // The device plugin runs again, and is noticed.
    session.node.store(&session.node.inventory());
    adjustment(&session, &pod(1), granted(&pod(1), "main", 1, 20, 32)).await;
}

#[tokio::test]
async fn a_late_event_of_an_old_container_leaves_its_successor_alone() {
    let session = session().await;
    let call = &session.runtime.plugin;
    for attempt in [1, 2] {
        adjustment(&session, &pod(1), granted(&pod(1), "main", attempt, 20, 32)).await;
        if attempt == 1 {
            call.stop_container(soon(), &common::request(&pod(1), container(&pod(1), "main", 1)))
                .await
                .unwrap();
            assert_eq!(session.node.shares().records.values().next().unwrap().state, ShareState::Stopped);
        }
    }
    // Removed when kubelet collects it, long after the second was made; once as its own call, once as StateChange.
    let old = container(&pod(1), "main", 1);
    call.remove_container(soon(), &common::request(&pod(1), old.clone())).await.unwrap();
    let event = |event: Event, container: Option<Container>| StateChangeEvent {
        event: event.into(),
        pod: MessageField::some(pod(1)),
        container: container.into(),
        ..StateChangeEvent::default()
    };
    call.state_change(soon(), &event(Event::REMOVE_CONTAINER, Some(old))).await.unwrap();
    let record = session.node.shares().records.into_values().next().unwrap();
    assert_eq!((record.state, record.container.id.as_str()), (ShareState::Running, "sandbox-1-main-2"));

    call.state_change(soon(), &event(Event::STOP_POD_SANDBOX, None)).await.unwrap();
    assert!(session.node.shares().records.is_empty());
}

#[tokio::test]
async fn a_pod_that_ends_gives_its_gpu_back_and_strangers_change_nothing() {
    let session = session().await;
    let call = &session.runtime.plugin;
    adjustment(&session, &pod(1), granted(&pod(1), "main", 1, 200, 0)).await;
    let sandbox = |n| PodRequest { pod: MessageField::some(pod(n)), ..PodRequest::default() };
    call.stop_pod_sandbox(soon(), &sandbox(7)).await.unwrap();
    call.remove_pod_sandbox(soon(), &sandbox(7)).await.unwrap();
    assert_eq!(session.node.shares().records.len(), 1);
    call.stop_pod_sandbox(soon(), &sandbox(1)).await.unwrap();
    call.remove_pod_sandbox(soon(), &sandbox(1)).await.unwrap();
    adjustment(&session, &pod(2), granted(&pod(2), "main", 1, 99, UNITS)).await;
}

#[tokio::test]
async fn every_method_of_the_interface_is_answered() {
    let session = session().await;
    let call = &session.runtime.plugin;
    let container = common::request(&pod(1), container(&pod(1), "main", 1));
    let sandbox = PodRequest { pod: MessageField::some(pod(1)), ..PodRequest::default() };
    call.run_pod_sandbox(soon(), &sandbox).await.unwrap();
    call.update_pod_sandbox(soon(), &sandbox).await.unwrap();
    call.post_update_pod_sandbox(soon(), &sandbox).await.unwrap();
    call.post_create_container(soon(), &container).await.unwrap();
    call.start_container(soon(), &container).await.unwrap();
    call.post_start_container(soon(), &container).await.unwrap();
    call.update_container(soon(), &container).await.unwrap();
    call.post_update_container(soon(), &container).await.unwrap();
    call.validate_container_adjustment(soon(), &container).await.unwrap();
    call.state_change(soon(), &StateChangeEvent::default()).await.unwrap();
    call.shutdown(soon(), &Default::default()).await.unwrap();
}

#[tokio::test]
async fn a_share_that_takes_too_long_is_refused_and_holds_nothing_running() {
    let session = session_with(TestNode::new(), Duration::from_millis(100)).await;
    let shares = session.node.file.paths.shares();
    let held = fs::File::open(&shares).unwrap();
    held.lock().unwrap();
    let error = message(session.runtime.create(&pod(1), granted(&pod(1), "main", 1, 20, 32)).await);
    assert!(error.contains("not bound within 100ms"), "{error}");
    // A container without a share does not wait for it.
    session.runtime.create(&pod(2), container(&pod(2), "main", 1)).await.unwrap();
    // And its pod is gone before the work comes to its turn.
    session.runtime.plugin.stop_pod_sandbox(soon(), &of_pod(&pod(1))).await.unwrap();
    held.unlock().unwrap();
    session.service.drain(Duration::from_secs(20)).await;
    assert!(session.node.shares().records.is_empty(), "a share of a pod that nobody will tell of again");
}

/// The runtime makes no other container while it waits for us.
#[tokio::test]
async fn a_disk_that_stands_still_holds_the_runtime_up_for_one_share_not_for_each() {
    let session = session_with(TestNode::new(), Duration::from_secs(1)).await;
    let held = fs::File::open(session.node.file.paths.shares()).unwrap();
    held.lock().unwrap();
    for (n, said) in
        [(1, "not bound within 1s;"), (2, "not bound within 100ms, as one before it"), (3, "100ms")]
    {
        let error = message(session.runtime.create(&pod(n), granted(&pod(n), "main", 1, 20, 2)).await);
        assert!(error.contains(said), "{error}");
    }
    held.unlock().unwrap();
    while session.runtime.create(&pod(1), granted(&pod(1), "main", 2, 20, 2)).await.is_err() {}
    assert_eq!(session.node.shares().records.len(), 1);
}

/// The one that was refused gets its turn when the next attempt's container is bound already.
#[tokio::test]
async fn a_share_that_comes_too_late_takes_nothing_from_the_container_that_came_after() {
    let session = session_with(TestNode::new(), Duration::from_millis(100)).await;
    let held = fs::File::open(session.node.file.paths.shares()).unwrap();
    held.lock().unwrap();
    let late = session.runtime.create(&pod(1), granted(&pod(1), "main", 1, 20, 32)).await;
    assert!(message(late).contains("not bound"));
    // As the plugin binds it, in the same place, before the late one has the lock.
    let path = session.node.file.paths.shares().join("uid-1_main");
    let record = r#"{"version":1,"pod":{"uid":"uid-1","namespace":"ml","name":"train-1","sandboxId":"sandbox-1"},
        "container":{"name":"main","id":"the-next"},"bootId":"BOOT","kind":"share","gpus":[{"uuid":"GPU",
        "minor":1,"core":20,"memoryBytes":8589934592,"slots":"0-19"}],"state":"running","boundAt":1,"shim":true}"#;
    let record =
        record.replace("BOOT", &ledger::boot_id().unwrap()).replace("GPU\"", &format!("{}\"", gpu(1)));
    fs::create_dir(&path).unwrap();
    fs::write(path.join("share.json"), record).unwrap();
    held.unlock().unwrap();
    session.service.drain(Duration::from_secs(20)).await;
    let records = session.node.shares().records;
    let record = records.values().next().unwrap();
    assert_eq!((record.container.id.as_str(), record.state), ("the-next", ShareState::Running));
}

/// The runtime tells of an end once. While the disk stands still more pods may end than calls are worked on at a time.
#[tokio::test]
async fn no_end_is_lost_of_many_that_come_while_the_disk_stands_still() {
    let session = session().await;
    let pods: Vec<_> = (1..=40).map(pod).collect();
    for pod in &pods {
        session.runtime.create(pod, granted(pod, "main", 1, 2, 1)).await.unwrap();
    }
    let held = fs::File::open(session.node.file.paths.shares()).unwrap();
    held.lock().unwrap();
    let ends = pods.iter().map(|pod| {
        let (plugin, request) = (&session.runtime.plugin, of_pod(pod));
        async move { plugin.stop_pod_sandbox(soon(), &request).await.unwrap() }
    });
    futures::future::join_all(ends).await;
    assert_eq!(session.node.shares().records.len(), pods.len());
    held.unlock().unwrap();
    common::eventually("all are released", || session.node.shares().records.is_empty()).await;
}

#[tokio::test]
async fn a_call_under_way_is_answered_before_the_end_and_later_ones_are_refused() {
    let session = session().await;
    let shares = session.node.file.paths.shares();
    let held = fs::File::open(&shares).unwrap();
    held.lock().unwrap();
    let first = pod(1);
    let under_way = session.runtime.create(&first, granted(&pod(1), "main", 1, 20, 32));
    let end = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let drain = session.service.drain(Duration::from_secs(10));
        tokio::join!(drain, async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            held.unlock().unwrap();
        });
    };
    let (answer, ()) = tokio::join!(under_way, end);
    answer.unwrap();
    let error = message(session.runtime.create(&pod(2), granted(&pod(2), "main", 1, 20, 2)).await);
    assert!(error.contains("being stopped"), "{error}");
}
