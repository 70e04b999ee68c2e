//! Kubelet as a device plugin sees it: it clears the folder of sockets when it starts, dials back before it answers a
//! registration, and sends the authority `localhost`, as grpc-go does.

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use device_plugin::{
    kubelet::{
        KUBELET_SOCKET,
        api::{
            AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
            ContainerPreferredAllocationRequest, Device, Empty, PreferredAllocationRequest, RegisterRequest,
            device_plugin_client::DevicePluginClient,
            registration_server::{Registration, RegistrationServer},
        },
    },
    offer::Resource,
};
use hyper_util::rt::TokioIo;
use tokio::{
    net::{UnixListener, UnixStream},
    sync::watch,
    task::JoinHandle,
    time,
};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{
    Request, Response, Status,
    transport::{Channel, Endpoint, Server},
};
use vcuda_config::Resources;

use crate::PATIENCE;

/// One registered resource.
#[derive(Clone)]
pub struct Plugin {
    /// How it introduced itself.
    pub request: RegisterRequest,
    /// To call it.
    pub client: DevicePluginClient<Channel>,
    /// How many registrations there were before.
    pub serial: usize,
    /// All devices, as last told; none when the stream has ended.
    devices: watch::Receiver<Option<Vec<Device>>>,
    watcher: Arc<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    plugins: HashMap<String, Plugin>,
    count: usize,
    /// Registrations to refuse before one is taken.
    refuse: usize,
}

#[derive(Clone)]
struct Registry {
    folder: PathBuf,
    state: Arc<Mutex<State>>,
    count: watch::Sender<usize>,
}

/// A kubelet.
pub struct Kubelet {
    registry: Registry,
    count: watch::Receiver<usize>,
    server: JoinHandle<()>,
}

impl Kubelet {
    /// Starts in `folder`, as kubelet does: sockets that lie there are removed.
    pub fn start(folder: &Path) -> Self {
        Self::start_refusing(folder, 0)
    }

    /// As `start`; the first `refuse` registrations are refused.
    pub fn start_refusing(folder: &Path, refuse: usize) -> Self {
        fs::create_dir_all(folder).unwrap();
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if fs::symlink_metadata(&path).is_ok_and(|meta| meta.file_type().is_socket()) {
                fs::remove_file(path).unwrap();
            }
        }
        let (sender, count) = watch::channel(0);
        let state = Arc::new(Mutex::new(State { refuse, ..State::default() }));
        let registry = Registry { folder: folder.into(), state, count: sender };
        let listener = UnixListener::bind(folder.join(KUBELET_SOCKET)).unwrap();
        let service = RegistrationServer::new(registry.clone());
        let server = tokio::spawn(async move {
            let incoming = UnixListenerStream::new(listener);
            Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
        });
        Self { registry, count, server }
    }

    /// Dies as with SIGKILL: connections end, its socket file stays.
    pub async fn kill(self) {
        self.server.abort();
        let _ = self.server.await;
        let plugins = std::mem::take(&mut self.registry.state.lock().unwrap().plugins);
        for plugin in plugins.into_values() {
            plugin.watcher.abort();
        }
    }

    /// Drops the connection to a plugin, and tells it nothing. Its next registration is another plugin.
    pub fn forget(&self, plugin: &Plugin) {
        self.registry.state.lock().unwrap().plugins.remove(&plugin.request.resource_name);
        plugin.watcher.abort();
    }

    /// The plugin for `resource`, as soon as it has registered and told its devices.
    pub async fn plugin(&mut self, resource: Resource) -> Plugin {
        self.plugin_called(&resource.name(&Resources::default())).await
    }

    /// The plugin for the resource called `name`.
    pub async fn plugin_called(&mut self, name: &str) -> Plugin {
        let state = Arc::clone(&self.registry.state);
        let there = |_: &usize| state.lock().unwrap().plugins.contains_key(name);
        time::timeout(PATIENCE, self.count.wait_for(there)).await.expect("no registration").unwrap();
        let plugin = self.registry.state.lock().unwrap().plugins[name].clone();
        plugin.devices_where(|_| true).await;
        plugin
    }
}

#[tonic::async_trait]
impl Registration for Registry {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        {
            let mut state = self.state.lock().unwrap();
            if state.refuse > 0 {
                state.refuse -= 1;
                return Err(Status::unknown("not in the mood"));
            }
        }
        let path = self.folder.join(&request.endpoint);
        let channel =
            connect(&path).await.map_err(|error| Status::unknown(format!("failed to dial: {error}")))?;
        let mut client = DevicePluginClient::new(channel);
        client.get_device_plugin_options(Empty {}).await?;
        let mut stream = client.list_and_watch(Empty {}).await?.into_inner();
        let (sender, devices) = watch::channel(Some(Vec::new()));
        let watcher = tokio::spawn(async move {
            while let Ok(Some(list)) = stream.message().await {
                sender.send_replace(Some(list.devices));
            }
            sender.send_replace(None);
        });
        let mut state = self.state.lock().unwrap();
        let serial = state.count;
        state.count += 1;
        let name = request.resource_name.clone();
        state.plugins.insert(name, Plugin { request, client, serial, devices, watcher: Arc::new(watcher) });
        self.count.send_replace(state.count);
        Ok(Response::new(Empty {}))
    }
}

impl Plugin {
    /// The devices, as soon as `wanted` is true of them.
    pub async fn devices_where(&self, wanted: impl Fn(&[Device]) -> bool) -> Vec<Device> {
        let told = |devices: &Option<Vec<Device>>| {
            devices.as_ref().is_some_and(|all| !all.is_empty() && wanted(all))
        };
        let mut devices = self.devices.clone();
        let devices =
            time::timeout(PATIENCE, devices.wait_for(told)).await.expect("no such devices").unwrap();
        devices.clone().unwrap()
    }

    /// Returns when the plugin has closed the stream.
    pub async fn closed(&self) {
        let mut devices = self.devices.clone();
        let _ =
            time::timeout(PATIENCE, devices.wait_for(Option::is_none)).await.expect("the stream stays open");
    }

    /// Kubelet's Allocate for one container.
    pub async fn allocate(&self, device_ids: Vec<String>) -> Result<ContainerAllocateResponse, Status> {
        let request = AllocateRequest { container_requests: vec![ContainerAllocateRequest { device_ids }] };
        let answer = self.client.clone().allocate(request).await?.into_inner();
        let [container] = answer.container_responses.try_into().unwrap();
        Ok(container)
    }

    /// Kubelet's GetPreferredAllocation for one container.
    pub async fn prefer(&self, available: Vec<String>, size: i32) -> Result<Vec<String>, Status> {
        let request = PreferredAllocationRequest {
            container_requests: vec![ContainerPreferredAllocationRequest {
                available_device_ids: available,
                must_include_device_ids: vec![],
                allocation_size: size,
            }],
        };
        let answer = self.client.clone().get_preferred_allocation(request).await?.into_inner();
        let [container] = answer.container_responses.try_into().unwrap();
        Ok(container.device_ids)
    }
}

async fn connect(path: &Path) -> Result<Channel, tonic::transport::Error> {
    let path = path.to_owned();
    let dial = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost").connect_with_connector(dial).await
}
