//! A client of containerd's CRI service, with just the calls that kubelet needs to run a pod. It knows nothing of
//! GPUs.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;
use tonic::transport::{Channel, Endpoint};

#[expect(missing_docs, clippy::all, reason = "generated from proto/cri.proto, which says what each is")]
pub mod api {
    tonic::include_proto!("runtime.v1");
}

use api::{
    ContainerConfig, ContainerState, ContainerStatus, ContainerStatusRequest, CreateContainerRequest,
    ExecSyncRequest, ListContainersRequest, PodSandboxConfig, RemoveContainerRequest,
    RemovePodSandboxRequest, RunPodSandboxRequest, StartContainerRequest, StopContainerRequest,
    StopPodSandboxRequest, VersionRequest, runtime_service_client::RuntimeServiceClient,
};

/// A container that ends within this many seconds of SIGTERM is not killed.
const STOP_TIMEOUT_S: i64 = 1;

/// How long a command in a container may take, in seconds.
const EXEC_TIMEOUT_S: i64 = 60;

/// Connection to one containerd. It reconnects by itself when containerd restarts.
#[derive(Clone, Debug)]
pub struct Cri {
    runtime: RuntimeServiceClient<Channel>,
}

/// What a command in a container did.
#[derive(Clone, Debug)]
pub struct Exec {
    /// What it wrote to stdout.
    pub stdout: String,
    /// What it wrote to stderr.
    pub stderr: String,
    /// Its exit code.
    pub code: i32,
}

/// What containerd tells of a container when asked for more than its status.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerInfo {
    /// Process ID on the host; 0 when it does not run.
    #[serde(default)]
    pub pid: u32,
    /// The OCI spec that runc got.
    #[serde(rename = "runtimeSpec")]
    pub spec: serde_json::Value,
}

impl Cri {
    /// A client of the containerd that listens on `socket`. Connects on first use.
    pub fn new(socket: &Path) -> Result<Self> {
        let channel = Endpoint::try_from(format!("unix://{}", socket.display()))?.connect_lazy();
        Ok(Self { runtime: RuntimeServiceClient::new(channel) })
    }

    /// The runtime's name and version; succeeds once containerd serves CRI.
    pub async fn version(&self) -> Result<String> {
        let version = self.runtime.clone().version(VersionRequest::default()).await?.into_inner();
        Ok(format!("{} {}", version.runtime_name, version.runtime_version))
    }

    /// Starts a pod's sandbox; returns its ID.
    pub async fn run_sandbox(&self, config: &PodSandboxConfig) -> Result<String> {
        let request = RunPodSandboxRequest { config: Some(config.clone()) };
        Ok(self.runtime.clone().run_pod_sandbox(request).await.map_err(spoken)?.into_inner().pod_sandbox_id)
    }

    /// Stops a sandbox and all its containers.
    pub async fn stop_sandbox(&self, id: &str) -> Result<()> {
        let request = StopPodSandboxRequest { pod_sandbox_id: id.into() };
        self.runtime.clone().stop_pod_sandbox(request).await.map_err(spoken)?;
        Ok(())
    }

    /// Removes a stopped sandbox and its containers.
    pub async fn remove_sandbox(&self, id: &str) -> Result<()> {
        let request = RemovePodSandboxRequest { pod_sandbox_id: id.into() };
        self.runtime.clone().remove_pod_sandbox(request).await.map_err(spoken)?;
        Ok(())
    }

    /// Creates a container; returns its ID. NRI plugins are asked here.
    pub async fn create(
        &self,
        sandbox: &str,
        config: &ContainerConfig,
        sandbox_config: &PodSandboxConfig,
    ) -> Result<String> {
        let request = CreateContainerRequest {
            pod_sandbox_id: sandbox.into(),
            config: Some(config.clone()),
            sandbox_config: Some(sandbox_config.clone()),
        };
        Ok(self.runtime.clone().create_container(request).await.map_err(spoken)?.into_inner().container_id)
    }

    /// Starts a created container. OCI hooks run here.
    pub async fn start(&self, id: &str) -> Result<()> {
        let request = StartContainerRequest { container_id: id.into() };
        self.runtime.clone().start_container(request).await.map_err(spoken)?;
        Ok(())
    }

    /// Stops a container, by SIGKILL after a second.
    pub async fn stop(&self, id: &str) -> Result<()> {
        let request = StopContainerRequest { container_id: id.into(), timeout: STOP_TIMEOUT_S };
        self.runtime.clone().stop_container(request).await.map_err(spoken)?;
        Ok(())
    }

    /// Removes a stopped container.
    pub async fn remove(&self, id: &str) -> Result<()> {
        let request = RemoveContainerRequest { container_id: id.into() };
        self.runtime.clone().remove_container(request).await.map_err(spoken)?;
        Ok(())
    }

    /// IDs of all containers that run.
    pub async fn running(&self) -> Result<Vec<String>> {
        let list = self
            .runtime
            .clone()
            .list_containers(ListContainersRequest {})
            .await
            .map_err(spoken)?
            .into_inner();
        let runs = list.containers.into_iter().filter(|c| c.state() == ContainerState::ContainerRunning);
        Ok(runs.map(|c| c.id).collect())
    }

    /// A container's status.
    pub async fn status(&self, id: &str) -> Result<ContainerStatus> {
        let request = ContainerStatusRequest { container_id: id.into(), verbose: false };
        let response = self.runtime.clone().container_status(request).await.map_err(spoken)?.into_inner();
        response.status.context("containerd returned no status")
    }

    /// A container's process ID and OCI spec.
    pub async fn info(&self, id: &str) -> Result<ContainerInfo> {
        let request = ContainerStatusRequest { container_id: id.into(), verbose: true };
        let response = self.runtime.clone().container_status(request).await.map_err(spoken)?.into_inner();
        Ok(serde_json::from_str(response.info.get("info").context("containerd returned no info")?)?)
    }

    /// Runs a command in a container, to its end.
    pub async fn exec(&self, id: &str, command: &[&str]) -> Result<Exec> {
        let request = ExecSyncRequest {
            container_id: id.into(),
            cmd: command.iter().map(|&word| word.into()).collect(),
            timeout: EXEC_TIMEOUT_S,
        };
        let response = self.runtime.clone().exec_sync(request).await.map_err(spoken)?.into_inner();
        Ok(Exec {
            stdout: String::from_utf8_lossy(&response.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&response.stderr).into_owned(),
            code: response.exit_code,
        })
    }
}

/// Only what the runtime said: it is what kubelet puts into the pod's events.
fn spoken(status: tonic::Status) -> anyhow::Error {
    anyhow::Error::msg(status.message().to_owned())
}
