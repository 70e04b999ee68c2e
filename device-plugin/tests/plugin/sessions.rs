//! The plugin's sessions against a kubelet that speaks the real protocol over Unix sockets.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::net::UnixListener as StdUnixListener,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
};

use device_plugin::{
    folder,
    kubelet::{Context, EnsureCdi, Session},
    offer::{Offer, OfferedGpu, Resource},
};
use tokio::{sync::watch, task::JoinSet};
use vcuda_config::{GpuUuid, Resources, annotation};

use crate::kubelet::Kubelet;

const UNITS: u32 = 40;

fn gpu(n: u8) -> GpuUuid {
    GpuUuid::from_bytes([n; 16])
}

fn offered(n: u8) -> OfferedGpu {
    OfferedGpu { uuid: gpu(n), numa_node: Some(n.into()), memory_units: UNITS, trouble: None }
}

fn ids(n: u8, range: std::ops::Range<u32>) -> Vec<String> {
    range.map(|index| format!("{}::{index}", gpu(n))).collect()
}

/// Both sessions of a plugin that offers two GPUs.
struct Plugin {
    _folder: tempfile::TempDir,
    kubelet: PathBuf,
    offer: watch::Sender<Arc<Offer>>,
    stop: watch::Sender<bool>,
    sessions: JoinSet<()>,
}

impl Plugin {
    fn start() -> Self {
        Self::start_with(Arc::new(|| Ok(())))
    }

    fn start_with(ensure_cdi: Arc<EnsureCdi>) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), ensure_cdi)
    }

    fn start_in(root: tempfile::TempDir, ensure_cdi: Arc<EnsureCdi>) -> Self {
        let kubelet = root.path().join("device-plugins");
        let (offer, offers) =
            watch::channel(Arc::new(Offer::new(vec![offered(0), offered(1)], BTreeSet::new())));
        let (stop, stopped) = watch::channel(false);
        let (_, expected) = watch::channel(Arc::default());
        let context = Arc::new(Context::new(Resources::default(), offers, expected, ensure_cdi));
        let notices = folder::follow(kubelet.clone());
        let mut sessions = JoinSet::new();
        for resource in Resource::ALL {
            let (context, notices, stop) = (Arc::clone(&context), notices.clone(), stopped.clone());
            sessions.spawn(Session::new(resource, kubelet.clone(), context, notices, stop).run());
        }
        Self { _folder: root, kubelet, offer, stop, sessions }
    }

    async fn stop(mut self) {
        self.stop.send_replace(true);
        while let Some(ended) = self.sessions.join_next().await {
            ended.unwrap();
        }
        for resource in Resource::ALL {
            assert!(!socket(&self.kubelet, resource).exists());
        }
    }
}

fn socket(folder: &Path, resource: Resource) -> PathBuf {
    folder.join(resource.socket())
}

#[tokio::test]
async fn both_resources_are_registered_and_listed() {
    let plugin = Plugin::start();
    let mut kubelet = Kubelet::start(&plugin.kubelet);
    for (resource, name, units) in
        [(Resource::Core, "tencent.com/vcuda-core", 200), (Resource::Memory, "tencent.com/vcuda-memory", 80)]
    {
        let registered = kubelet.plugin(resource).await;
        assert_eq!(registered.request.version, "v1beta1");
        assert_eq!(registered.request.resource_name, name);
        assert_eq!(registered.request.endpoint, resource.socket());
        let options = registered.request.options.unwrap();
        assert!(options.get_preferred_allocation_available && !options.pre_start_required);
        let devices = registered.devices_where(|_| true).await;
        assert_eq!(devices.len(), units);
        assert!(devices.iter().all(|device| device.health == "Healthy"));
        assert_eq!(devices[units - 1].topology.as_ref().unwrap().nodes[0].id, 1);
    }
    plugin.stop().await;
}

#[tokio::test]
async fn a_grant_names_the_gpu_and_only_core_brings_the_cdi_device() {
    let plugin = Plugin::start();
    let mut kubelet = Kubelet::start(&plugin.kubelet);
    let (core, memory) = (kubelet.plugin(Resource::Core).await, kubelet.plugin(Resource::Memory).await);

    let answer = core.allocate(ids(1, 3..23)).await.unwrap();
    assert_eq!(answer.annotations, [(annotation::CORE_GRANT.into(), format!("{}=20", gpu(1)))].into());
    assert_eq!(answer.cdi_devices[0].name, "tencent.com/vcuda=share");
    assert_eq!(core.allocate(ids(1, 3..23)).await.unwrap(), answer);

    let answer = memory.allocate(ids(1, 0..32)).await.unwrap();
    assert_eq!(answer.annotations, [(annotation::MEMORY_GRANT.into(), format!("{}=32", gpu(1)))].into());
    assert!(answer.cdi_devices.is_empty());

    let answer = core.allocate([ids(0, 0..100), ids(1, 0..100)].concat()).await.unwrap();
    assert_eq!(answer.cdi_devices[0].name, "tencent.com/vcuda=whole");

    let refused = core.allocate([ids(0, 0..10), ids(1, 0..10)].concat()).await.unwrap_err();
    assert!(refused.message().contains("no single GPU"), "{refused}");
    plugin.stop().await;
}

#[tokio::test]
async fn both_resources_of_a_container_are_steered_to_one_gpu_in_either_order() {
    let plugin = Plugin::start();
    let mut kubelet = Kubelet::start(&plugin.kubelet);
    let (core, memory) = (kubelet.plugin(Resource::Core).await, kubelet.plugin(Resource::Memory).await);
    // By itself, each resource would go to another GPU: the fuller one.
    let free_core = [ids(0, 0..100), ids(1, 50..100)].concat();
    let free_memory = [ids(0, 20..40), ids(1, 0..40)].concat();
    let first = core.prefer(free_core.clone(), 10).await.unwrap();
    assert_eq!(first, ids(1, 50..60));
    core.allocate(first).await.unwrap();
    let second = memory.prefer(free_memory.clone(), 10).await.unwrap();
    assert_eq!(second, ids(1, 0..10));
    memory.allocate(second).await.unwrap();

    let first = memory.prefer(free_memory, 10).await.unwrap();
    assert_eq!(first, ids(0, 20..30));
    memory.allocate(first).await.unwrap();
    assert_eq!(core.prefer(free_core, 10).await.unwrap(), ids(0, 0..10));
    plugin.stop().await;
}

#[tokio::test]
async fn a_restarted_kubelet_gets_both_resources_again() {
    let plugin = Plugin::start();
    let mut kubelet = Kubelet::start(&plugin.kubelet);
    for resource in Resource::ALL {
        kubelet.plugin(resource).await;
    }
    for _ in 0..3 {
        kubelet.kill().await;
        kubelet = Kubelet::start(&plugin.kubelet);
        for resource in Resource::ALL {
            kubelet.plugin(resource).await.allocate(ids(0, 0..1)).await.unwrap();
        }
    }
    plugin.stop().await;
}

/// Kubelet drops a plugin when the end of an earlier stream is handled late, and tells it nothing.
#[tokio::test]
async fn a_plugin_that_kubelet_has_dropped_registers_again() {
    let plugin = Plugin::start();
    let mut kubelet = Kubelet::start(&plugin.kubelet);
    let first = kubelet.plugin(Resource::Core).await;
    kubelet.plugin(Resource::Memory).await;
    kubelet.forget(&first);
    let second = kubelet.plugin(Resource::Core).await;
    assert!(second.serial > first.serial);
    second.allocate(ids(0, 0..1)).await.unwrap();
    plugin.stop().await;
}

#[tokio::test]
async fn a_socket_that_was_removed_is_made_again() {
    let plugin = Plugin::start();
    let mut kubelet = Kubelet::start(&plugin.kubelet);
    let first = kubelet.plugin(Resource::Memory).await;
    fs::remove_file(socket(&plugin.kubelet, Resource::Memory)).unwrap();
    first.closed().await;
    kubelet.forget(&first);
    kubelet.plugin(Resource::Memory).await.allocate(ids(0, 0..1)).await.unwrap();
    plugin.stop().await;
}

#[tokio::test]
async fn the_loss_and_return_of_kubelets_folder_is_survived() {
    let plugin = Plugin::start();
    let mut kubelet = Kubelet::start(&plugin.kubelet);
    kubelet.plugin(Resource::Core).await;
    kubelet.kill().await;
    fs::remove_dir_all(&plugin.kubelet).unwrap();
    let mut kubelet = Kubelet::start(&plugin.kubelet);
    for resource in Resource::ALL {
        kubelet.plugin(resource).await.allocate(ids(0, 0..1)).await.unwrap();
    }
    plugin.stop().await;
}

#[tokio::test]
async fn a_refused_registration_is_tried_again() {
    let plugin = Plugin::start();
    let mut kubelet = Kubelet::start_refusing(&plugin.kubelet, 5);
    for resource in Resource::ALL {
        kubelet.plugin(resource).await;
    }
    plugin.stop().await;
}

#[tokio::test]
async fn a_stale_socket_is_no_hindrance() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("device-plugins");
    let mut kubelet = Kubelet::start(&folder);
    drop(StdUnixListener::bind(socket(&folder, Resource::Core)).unwrap());
    fs::write(socket(&folder, Resource::Memory), "").unwrap();
    let plugin = Plugin::start_in(root, Arc::new(|| Ok(())));
    for resource in Resource::ALL {
        kubelet.plugin(resource).await.allocate(ids(0, 0..1)).await.unwrap();
    }
    plugin.stop().await;
}

#[tokio::test]
async fn changes_of_health_reach_kubelet_through_the_open_stream() {
    let plugin = Plugin::start();
    let mut kubelet = Kubelet::start(&plugin.kubelet);
    let core = kubelet.plugin(Resource::Core).await;
    let sick = OfferedGpu { trouble: Some("XID 79".into()), ..offered(0) };
    plugin.offer.send_replace(Arc::new(Offer::new(vec![sick, offered(1)], BTreeSet::new())));
    let unhealthy = |count: usize| {
        move |devices: &[device_plugin::kubelet::api::Device]| {
            devices.iter().filter(|device| device.health == "Unhealthy").count() == count
        }
    };
    core.devices_where(unhealthy(100)).await;
    let refused = core.allocate(ids(0, 0..1)).await.unwrap_err();
    assert!(refused.message().contains("XID 79"), "{refused}");
    plugin.offer.send_replace(Arc::new(Offer::new(vec![offered(0), offered(1)], BTreeSet::new())));
    core.devices_where(unhealthy(0)).await;
    core.allocate(ids(0, 0..1)).await.unwrap();
    plugin.stop().await;
}

#[tokio::test]
async fn without_a_cdi_spec_nothing_is_granted() {
    let plugin = Plugin::start_with(Arc::new(|| Err(anyhow::anyhow!("/var/run/cdi is full"))));
    let mut kubelet = Kubelet::start(&plugin.kubelet);
    let refused = kubelet.plugin(Resource::Core).await.allocate(ids(0, 0..1)).await.unwrap_err();
    assert!(refused.message().contains("/var/run/cdi is full"), "{refused}");
    plugin.stop().await;
}

#[tokio::test]
async fn a_call_in_flight_ends_well_when_the_plugin_is_stopped() {
    let (entered, enters) = mpsc::channel();
    let (leave, leaves) = mpsc::channel();
    let leaves = std::sync::Mutex::new(leaves);
    let plugin = Plugin::start_with(Arc::new(move || {
        entered.send(())?;
        Ok(leaves.lock().unwrap().recv()?)
    }));
    let mut kubelet = Kubelet::start(&plugin.kubelet);
    let core = kubelet.plugin(Resource::Core).await;
    let call = tokio::spawn({
        let core = core.clone();
        async move { core.allocate(ids(0, 0..1)).await }
    });
    tokio::task::spawn_blocking(move || enters.recv()).await.unwrap().unwrap();
    let stopping = tokio::spawn(plugin.stop());
    core.closed().await;
    assert!(!call.is_finished());
    leave.send(()).unwrap();
    call.await.unwrap().unwrap();
    stopping.await.unwrap();
}
