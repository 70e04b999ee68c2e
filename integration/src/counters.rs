//! Device plugins that offer as many devices as vcuda's does, under IDs as long, and give a container nothing for them.
//! What kubelet and the API server take for such devices is not vcuda's to save, but by counting in fewer of them.

use std::path::Path;

use anyhow::{Context, Result};
use tokio::{net::UnixListener, task::JoinHandle};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{
    Request, Response, Status,
    transport::{Endpoint, Server},
};
use vcuda_config::{DeviceId, GpuUuid};

use crate::devices::api::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, Device, DevicePluginOptions, Empty,
    ListAndWatchResponse, PreStartContainerRequest, PreferredAllocationRequest, PreferredAllocationResponse,
    RegisterRequest,
    device_plugin_server::{DevicePlugin, DevicePluginServer},
    registration_client::RegistrationClient,
};

/// A plugin of one resource. It ends when it is dropped.
#[derive(Debug)]
pub struct Counter(JoinHandle<()>);

impl Drop for Counter {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Counter {
    /// Offers `units` of `resource` on each of `gpus` GPUs to the kubelet whose device plugin folder is `folder`.
    ///
    /// # Errors
    ///
    /// The socket cannot be made, or kubelet does not take the plugin.
    pub async fn start(folder: &Path, resource: &str, gpus: u8, units: u32) -> Result<Self> {
        let of_gpu = |gpu: u8| {
            (0..units).map(move |index| DeviceId { gpu: GpuUuid::from_bytes([gpu; 16]), index }.to_string())
        };
        let device = |id| Device { id, health: "Healthy".into() };
        let list = ListAndWatchResponse { devices: (0..gpus).flat_map(of_gpu).map(device).collect() };
        let endpoint = format!("{}.sock", resource.replace('/', "-"));
        let listener = UnixListener::bind(folder.join(&endpoint)).context(endpoint.clone())?;
        let server = Server::builder().add_service(DevicePluginServer::new(Service { list }));
        let serving = server.serve_with_incoming(UnixListenerStream::new(listener));
        let counter = Self(tokio::spawn(async { drop(serving.await) }));
        let kubelet = Endpoint::try_from(format!("unix://{}", folder.join("kubelet.sock").display()))?;
        let request = RegisterRequest {
            version: "v1beta1".into(),
            endpoint,
            resource_name: resource.into(),
            options: Some(DevicePluginOptions::default()),
        };
        RegistrationClient::new(kubelet.connect().await?).register(request).await?;
        Ok(counter)
    }
}

struct Service {
    list: ListAndWatchResponse,
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream = ReceiverStream<Result<ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(
        &self,
        _request: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    async fn list_and_watch(
        &self,
        _request: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let (lists, stream) = tokio::sync::mpsc::channel(1);
        let list = self.list.clone();
        tokio::spawn(async move {
            if lists.send(Ok(list)).await.is_ok() {
                lists.closed().await;
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn get_preferred_allocation(
        &self,
        _request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("kubelet is told that there is no such call"))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let containers = request.into_inner().container_requests.len();
        let container_responses = vec![ContainerAllocateResponse::default(); containers];
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _request: Request<PreStartContainerRequest>,
    ) -> Result<Response<Empty>, Status> {
        Err(Status::unimplemented("kubelet is told that there is no such call"))
    }
}
