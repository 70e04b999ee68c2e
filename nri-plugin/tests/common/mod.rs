//! A node in a folder, and the runtime's side of a session: the protocol's other half, in this process.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]
#![allow(dead_code, reason = "each test file uses its part")]

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use futures::{StreamExt, stream};
use ledger::{DeviceNode, Driver, Gpu, Inventory, Ledger, Shares};
use nri_plugin::{
    mux::Mux,
    node::Node,
    wire::{
        Container, ContainerRequest, ContainerState, CreateContainerResponse, Hook, Hooks, LinuxContainer,
        LinuxDevice, PluginClient, PodSandbox, RegisterPluginRequest, Runtime, create_runtime,
    },
};
use protobuf::MessageField;
use tempfile::TempDir;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::mpsc,
};
use ttrpc::{
    asynchronous::{
        Client, Server, TtrpcContext,
        transport::{Listener, Socket},
    },
    context::{Context, with_duration},
};
use vcuda_config::{GpuUuid, MEMORY_UNIT_BYTES, NodeFile, annotation};

/// Memory units of each GPU of the test's node: 10 GiB.
pub const UNITS: u32 = 40;

/// A node with two GPUs.
pub struct TestNode {
    pub folder: TempDir,
    pub file: NodeFile,
}

impl TestNode {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut file = NodeFile::default();
        file.paths.state = folder.path().join("state");
        file.paths.install = folder.path().join("install");
        file.paths.run = folder.path().join("run");
        file.paths.nri_socket = folder.path().join("nri.sock");
        fs::create_dir_all(file.paths.shim().parent().unwrap()).unwrap();
        fs::create_dir_all(&file.paths.state).unwrap();
        fs::write(file.paths.shim(), "a library").unwrap();
        let node = Self { folder, file };
        node.store(&node.inventory());
        node
    }

    pub fn inventory(&self) -> Inventory {
        let device = |path: &str, major, minor| DeviceNode {
            path: path.into(),
            major,
            minor,
            file_mode: 0o666,
            uid: 0,
            gid: 0,
        };
        let gpu = |n: u8| Gpu {
            uuid: gpu(n),
            name: "NVIDIA A100".into(),
            minor: n.into(),
            total_bytes: u64::from(UNITS) * MEMORY_UNIT_BYTES,
            memory_units: UNITS,
            numa_node: None,
            pci_bus_id: format!("00000000:{n:02x}:00.0"),
            healthy: true,
            device_nodes: vec![device(&format!("/dev/nvidia{n}"), 195, n.into())],
        };
        let driver = Driver { version: "550.163.01".into(), library_dir: "/usr/lib/x86_64-linux-gnu".into() };
        let control = vec![device("/dev/nvidiactl", 195, 255), device("/dev/nvidia-uvm", 510, 0)];
        Inventory::new(ledger::boot_id().unwrap(), driver, control, vec![gpu(0), gpu(1)])
    }

    pub fn store(&self, inventory: &Inventory) {
        inventory.store(&self.file.paths.inventory()).unwrap();
    }

    pub fn start(&self) -> Node {
        Node::start(&self.file).unwrap()
    }

    pub fn shares(&self) -> Shares {
        Shares::read(&self.file.paths.shares()).unwrap()
    }

    pub fn ready_file(&self) -> PathBuf {
        self.file.paths.nri_plugin_ready()
    }
}

impl Drop for TestNode {
    /// What containers write lies in file systems of their own, which go with the shares.
    fn drop(&mut self) {
        let Ok(ledger) = Ledger::open(&self.file.paths.shares()) else { return };
        let shares = ledger.shares().unwrap_or_default();
        let unreadable = shares.unreadable.into_iter().map(|share| share.name);
        for name in shares.records.into_keys().chain(unreadable) {
            let _ = ledger.release(&name);
        }
    }
}

pub fn gpu(n: u8) -> GpuUuid {
    GpuUuid::from_bytes([n; 16])
}

pub fn pod(n: u32) -> PodSandbox {
    PodSandbox {
        id: format!("sandbox-{n}"),
        name: format!("train-{n}"),
        uid: format!("uid-{n}"),
        namespace: "ml".into(),
        pid: 1,
        ..PodSandbox::default()
    }
}

/// A container as containerd shows it: nothing of ours on it.
pub fn container(pod: &PodSandbox, name: &str, attempt: u32) -> Container {
    Container {
        id: format!("{}-{name}-{attempt}", pod.id),
        pod_sandbox_id: pod.id.clone(),
        name: name.into(),
        state: ContainerState::CONTAINER_RUNNING.into(),
        env: vec!["PATH=/bin".into()],
        linux: MessageField::some(LinuxContainer::default()),
        ..Container::default()
    }
}

/// A container as containerd shows it after Allocate and CDI.
pub fn granted(pod: &PodSandbox, name: &str, attempt: u32, core: u32, units: u32) -> Container {
    let mut container = container(pod, name, attempt);
    let hook = Hook {
        path: "/usr/local/vcuda/0.1.0/bin/vcuda-hook".into(),
        args: vec!["vcuda-hook".into(), "create-container".into()],
        ..Hook::default()
    };
    container.hooks = MessageField::some(Hooks { create_container: vec![hook], ..Hooks::default() });
    let grants = [(annotation::CORE_GRANT, core), (annotation::MEMORY_GRANT, units)];
    for (key, units) in grants.into_iter().filter(|(_, units)| *units > 0) {
        container.annotations.insert(key.into(), format!("{}={units}", gpu(1)));
    }
    container
}

pub fn device(major: i64, minor: i64) -> LinuxDevice {
    LinuxDevice {
        path: format!("/dev/nvidia{minor}"),
        type_: "c".into(),
        major,
        minor,
        ..LinuxDevice::default()
    }
}

pub fn request(pod: &PodSandbox, container: Container) -> ContainerRequest {
    ContainerRequest {
        pod: MessageField::some(pod.clone()),
        container: MessageField::some(container),
        ..ContainerRequest::default()
    }
}

/// As long as a test waits for an answer that should come at once.
pub fn soon() -> Context {
    with_duration(Duration::from_secs(20))
}

/// The message of a call that failed.
pub fn message<T: std::fmt::Debug>(answer: ttrpc::Result<T>) -> String {
    match answer.unwrap_err() {
        ttrpc::Error::RpcStatus(status) => {
            assert_ne!(status.code(), ttrpc::Code::DEADLINE_EXCEEDED, "the runtime would drop the plugin");
            status.message
        }
        other => panic!("no answer: {other}"),
    }
}

/// The runtime's side of one session.
pub struct FakeRuntime {
    /// Calls the plugin.
    pub plugin: PluginClient,
    pub registered: mpsc::UnboundedReceiver<RegisterPluginRequest>,
    _server: Server,
    driver: tokio::task::JoinHandle<io::Result<()>>,
}

struct Register {
    registrations: mpsc::UnboundedSender<RegisterPluginRequest>,
    answer: Arc<tokio::sync::Semaphore>,
    refuse: Mutex<Option<String>>,
}

#[async_trait]
impl Runtime for Register {
    async fn register_plugin(
        &self,
        _: &TtrpcContext,
        request: RegisterPluginRequest,
    ) -> ttrpc::Result<nri_plugin::wire::Empty> {
        self.registrations.send(request).unwrap();
        let _ = self.answer.acquire().await;
        match self.refuse.lock().unwrap().take() {
            Some(reason) => Err(ttrpc::Error::RpcStatus(ttrpc::get_status(ttrpc::Code::UNKNOWN, reason))),
            None => Ok(nri_plugin::wire::Empty::default()),
        }
    }
}

impl FakeRuntime {
    /// Answers registrations at once.
    pub async fn start(trunk: impl AsyncRead + AsyncWrite + Send + 'static) -> Self {
        Self::start_with(trunk, Arc::new(tokio::sync::Semaphore::new(1)), None).await
    }

    /// Answers a registration when `answer` has a permit, and with the refusal where one is given.
    pub async fn start_with(
        trunk: impl AsyncRead + AsyncWrite + Send + 'static,
        answer: Arc<tokio::sync::Semaphore>,
        refuse: Option<&str>,
    ) -> Self {
        let Mux { plugin, runtime, driver } = Mux::new(trunk);
        let (registrations, registered) = mpsc::unbounded_channel();
        let service = Register { registrations, answer, refuse: Mutex::new(refuse.map(str::to_owned)) };
        let once = stream::once(async move { io::Result::Ok(runtime) }).chain(stream::pending());
        let mut server = Server::new()
            .add_listener(Listener::new(once))
            .register_service(create_runtime(Arc::new(service)));
        server.start().await.unwrap();
        let plugin = PluginClient::new(Client::new(Socket::new(plugin)));
        Self { plugin, registered, _server: server, driver: tokio::spawn(driver.run()) }
    }

    /// Has the plugin configured and synchronized with nothing.
    pub async fn admit(&mut self) {
        self.registered.recv().await.unwrap();
        let configure = nri_plugin::wire::ConfigureRequest {
            runtime_name: "containerd".into(),
            runtime_version: "v2.1.9".into(),
            ..Default::default()
        };
        self.plugin.configure(soon(), &configure).await.unwrap();
        self.plugin.synchronize(soon(), &Default::default()).await.unwrap();
    }

    pub async fn create(
        &self,
        pod: &PodSandbox,
        container: Container,
    ) -> ttrpc::Result<CreateContainerResponse> {
        self.plugin.create_container(soon(), &request(pod, container)).await
    }

    /// Closes the connection.
    pub fn close(self) {
        self.driver.abort();
    }
}

/// Waits until `condition` holds.
pub async fn eventually(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..2000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what} did not come about");
}

pub fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}
