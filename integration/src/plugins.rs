//! The device plugins of a node, as kubelet knows them: who has registered, and what each offers. It serves
//! registration and follows the plugins' lists.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::task::JoinHandle;
use tokio_stream::StreamExt;
use tonic::{
    Request, Response, Status,
    transport::{Channel, Endpoint},
};

use crate::devices::{
    Devices,
    api::{
        DevicePluginOptions, Empty, RegisterRequest, device_plugin_client::DevicePluginClient,
        registration_server::Registration,
    },
};

/// The one version of the protocol.
const PROTOCOL: &str = "v1beta1";

/// What kubelet knows while it runs.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// Who has which device.
    pub(crate) devices: Devices,
    /// The plugin of each resource.
    pub(crate) plugins: HashMap<String, Plugin>,
    watchers: Vec<JoinHandle<()>>,
    registrations: u64,
}

impl Drop for State {
    fn drop(&mut self) {
        self.watchers.iter().for_each(JoinHandle::abort);
    }
}

/// A plugin that has registered.
#[derive(Clone, Debug)]
pub(crate) struct Plugin {
    /// Tells one registration from the next.
    serial: u64,
    /// Its service.
    pub(crate) client: DevicePluginClient<Channel>,
    /// What it said about itself.
    pub(crate) options: DevicePluginOptions,
}

/// The state, for kubelet and for what serves it.
#[derive(Debug, Default)]
pub(crate) struct Shared(Mutex<State>);

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves registration.
pub(crate) struct Registry {
    /// kubelet's device plugin folder.
    pub(crate) folder: PathBuf,
    /// Where a registration goes.
    pub(crate) shared: Arc<Shared>,
}

#[tonic::async_trait]
impl Registration for Registry {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        if request.version != PROTOCOL {
            return Err(Status::unknown(format!(
                "requested API version {:?} is not supported by kubelet; supported version is {PROTOCOL:?}",
                request.version
            )));
        }
        let resource = request.resource_name;
        let socket = self.folder.join(&request.endpoint);
        let channel = Endpoint::try_from(format!("unix://{}", socket.display()))
            .map_err(|error| Status::unknown(error.to_string()))?
            .connect()
            .await
            .map_err(|error| Status::unknown(format!("{}: {error}", socket.display())))?;
        let client = DevicePluginClient::new(channel);
        let options = request.options.unwrap_or_default();
        let mut state = self.shared.lock();
        state.registrations += 1;
        let plugin = Plugin { serial: state.registrations, client, options };
        let watcher = tokio::spawn(watch(Arc::clone(&self.shared), resource.clone(), plugin.clone()));
        state.watchers.push(watcher);
        state.plugins.insert(resource, plugin);
        Ok(Response::new(Empty {}))
    }
}

/// Follows a plugin's list until the plugin goes away. What another registration took over is left alone.
async fn watch(shared: Arc<Shared>, resource: String, mut plugin: Plugin) {
    let current =
        |state: &State| state.plugins.get(&resource).is_some_and(|known| known.serial == plugin.serial);
    if let Ok(response) = plugin.client.list_and_watch(Empty {}).await {
        let mut lists = response.into_inner();
        while let Some(Ok(list)) = lists.next().await {
            let mut state = shared.lock();
            if current(&state) {
                state.devices.update(&resource, list.devices);
            }
        }
    }
    let mut state = shared.lock();
    if current(&state) {
        state.devices.lose(&resource);
    }
}
