//! Stands for kubelet: serves device plugin registration, admits pods, and drives containerd as kubelet does. It
//! speaks the real protocols on both sides, so a device plugin cannot tell the difference.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use tokio::{net::UnixListener, task::JoinHandle};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Status, transport::Server};

use crate::{
    cri::{
        Cri,
        api::{
            CdiDevice, ContainerConfig, ContainerMetadata, ContainerState, Device, ImageSpec, Int64Value,
            KeyValue, LinuxContainerConfig, LinuxContainerSecurityContext, LinuxPodSandboxConfig,
            LinuxSandboxSecurityContext, Mount, NamespaceMode, NamespaceOption, PodSandboxConfig,
            PodSandboxMetadata,
        },
    },
    devices::{
        Choice, Devices, Ids,
        api::{
            AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest,
            PreStartContainerRequest, PreferredAllocationRequest, registration_server::RegistrationServer,
        },
    },
    plugins::{Plugin, Registry, Shared, State},
    pod::{Container, Pod},
};

/// Kubelet's name for the file with who has which device.
const CHECKPOINT: &str = "kubelet_internal_checkpoint";

/// An init container of a test is done in milliseconds.
const INIT_TIMEOUT: Duration = Duration::from_secs(60);

/// A kubelet stand-in.
#[derive(Debug)]
pub struct Kubelet {
    folder: PathBuf,
    cgroup: String,
    cri: Cri,
    shared: Arc<Shared>,
    /// Serves `kubelet.sock`; none while kubelet is down.
    server: Option<JoinHandle<()>>,
}

/// A pod that was admitted and started.
#[derive(Clone, Debug)]
pub struct RunningPod {
    /// What was asked for.
    pub pod: Pod,
    /// ID of its sandbox.
    pub sandbox: String,
    /// IDs of its containers by name, init containers included.
    pub containers: BTreeMap<String, String>,
    attempts: BTreeMap<String, u32>,
}

impl RunningPod {
    /// ID of the container called `name`.
    pub fn id(&self, name: &str) -> &str {
        self.containers.get(name).map_or("", String::as_str)
    }
}

impl Kubelet {
    /// Starts kubelet on a device plugin folder. `cgroup` is the cgroup its pods go under.
    pub async fn start(folder: &Path, cgroup: &str, cri: Cri) -> Result<Self> {
        let mut kubelet =
            Self { folder: folder.into(), cgroup: cgroup.into(), cri, shared: Arc::default(), server: None };
        kubelet.serve().await?;
        Ok(kubelet)
    }

    /// Stops kubelet. Containers run on.
    pub fn stop(&mut self) {
        if let Some(server) = self.server.take() {
            server.abort();
        }
        *self.shared.lock() = State::default();
    }

    /// Starts kubelet again: plugins have to register anew, the checkpoint says who has what.
    pub async fn serve(&mut self) -> Result<()> {
        fs::create_dir_all(&self.folder)?;
        // server.go Start: everything but the checkpoint goes, plugins' sockets included.
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            if entry.file_name() != CHECKPOINT && !entry.file_type()?.is_dir() {
                match fs::remove_file(entry.path()) {
                    // A plugin takes its own socket away when it sees kubelet's go.
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
                    _ => {}
                }
            }
        }
        self.shared.lock().devices = Devices::load(&self.folder.join(CHECKPOINT))?;
        let listener = UnixListener::bind(self.folder.join("kubelet.sock"))?;
        let service = RegistrationServer::new(Registry {
            folder: self.folder.clone(),
            shared: Arc::clone(&self.shared),
        });
        self.server = Some(tokio::spawn(async move {
            let incoming = UnixListenerStream::new(listener);
            let _ = Server::builder().add_service(service).serve_with_incoming(incoming).await;
        }));
        Ok(())
    }

    /// How many units of a resource the node offers.
    pub fn allocatable(&self, resource: &str) -> usize {
        self.shared.lock().devices.healthy(resource)
    }

    /// How many units of a resource are sick.
    pub fn unhealthy(&self, resource: &str) -> usize {
        self.shared.lock().devices.unhealthy(resource)
    }

    /// Device IDs that a container has.
    pub fn ids(&self, pod_uid: &str, container: &str, resource: &str) -> Ids {
        self.shared.lock().devices.ids(pod_uid, container, resource).cloned().unwrap_or_default()
    }

    /// Waits until the node offers some of each of `resources`.
    pub async fn wait_for(&self, resources: &[String], within: Duration) -> Result<()> {
        let deadline = Instant::now() + within;
        while resources.iter().any(|resource| self.allocatable(resource) == 0) {
            if Instant::now() > deadline {
                bail!("{}: not offered within {within:?}", resources.join(", "));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    /// Admits a pod and runs it: init containers to their end, then the others. An error reads as the pod's event
    /// would; what was started by then is taken down again.
    pub async fn run(&self, pod: &Pod) -> Result<RunningPod> {
        let mut running = self.begin(pod).await?;
        match self.run_containers(&mut running).await {
            Ok(()) => Ok(running),
            Err(error) => {
                self.delete(&running).await.context("cleaning up after a failed start")?;
                Err(error)
            }
        }
    }

    /// Admits a pod and starts its sandbox, but none of its containers.
    pub async fn begin(&self, pod: &Pod) -> Result<RunningPod> {
        self.admit(pod).await?;
        self.start_sandbox(pod).await
    }

    /// Starts the sandbox of a pod that was admitted.
    pub async fn start_sandbox(&self, pod: &Pod) -> Result<RunningPod> {
        match self.cri.run_sandbox(&self.sandbox_config(pod)).await {
            Ok(sandbox) => Ok(RunningPod {
                pod: pod.clone(),
                sandbox,
                containers: BTreeMap::new(),
                attempts: BTreeMap::new(),
            }),
            Err(error) => {
                self.forget(&pod.uid)?;
                Err(error)
            }
        }
    }

    /// Creates and starts a container of a running pod anew, with the cached answers of the device plugins.
    pub async fn restart_container(&self, running: &mut RunningPod, name: &str) -> Result<()> {
        let pod = running.pod.clone();
        let container = pod
            .init
            .iter()
            .chain(&pod.containers)
            .find(|container| container.name == name)
            .with_context(|| format!("pod {} has no container {name}", pod.name))?;
        if let Some(old) = running.containers.remove(name) {
            self.cri.stop(&old).await?;
            self.cri.remove(&old).await?;
        }
        self.start_container(running, container).await
    }

    /// Stops and removes a pod, and frees its devices.
    pub async fn delete(&self, running: &RunningPod) -> Result<()> {
        self.cri.stop_sandbox(&running.sandbox).await?;
        for id in running.containers.values() {
            self.cri.remove(id).await?;
        }
        self.cri.remove_sandbox(&running.sandbox).await?;
        self.forget(&running.pod.uid)
    }

    fn forget(&self, pod_uid: &str) -> Result<()> {
        let mut state = self.shared.lock();
        state.devices.remove_pod(pod_uid);
        state.devices.store(&self.folder.join(CHECKPOINT))
    }

    /// Admits a pod: has the device plugins allocate what its containers ask for.
    pub async fn admit(&self, pod: &Pod) -> Result<()> {
        match self.allocate_all(pod).await {
            Ok(()) => Ok(()),
            Err(error) => {
                self.forget(&pod.uid)?;
                Err(error)
            }
        }
    }

    /// Allocates devices for all containers, init containers first.
    async fn allocate_all(&self, pod: &Pod) -> Result<()> {
        let mut reusable: BTreeMap<String, Ids> = BTreeMap::new();
        for (container, finishes) in pod
            .init
            .iter()
            .map(|container| (container, !container.sidecar))
            .chain(pod.containers.iter().map(|container| (container, false)))
        {
            for (resource, &asked) in &container.resources {
                let free = reusable.entry(resource.clone()).or_default();
                let ids = self
                    .allocate(pod, container, resource, usize::try_from(asked)?, free)
                    .await
                    .with_context(|| "UnexpectedAdmissionError: Allocate failed".to_owned())?;
                if finishes {
                    free.extend(ids);
                } else {
                    free.retain(|id| !ids.contains(id));
                }
            }
        }
        self.shared.lock().devices.store(&self.folder.join(CHECKPOINT))
    }

    async fn allocate(
        &self,
        pod: &Pod,
        container: &Container,
        resource: &str,
        asked: usize,
        reusable: &Ids,
    ) -> Result<Ids> {
        let (choice, plugin) = {
            let state = self.shared.lock();
            let choice = state.devices.choice(&pod.uid, &container.name, resource, asked, reusable)?;
            (choice, state.plugins.get(resource).cloned())
        };
        let Choice::Choose { taken, available, missing } = choice else {
            return Ok(self.ids(&pod.uid, &container.name, resource));
        };
        let mut plugin = plugin.with_context(|| format!("unknown Device Plugin {resource}"))?;
        let mut ids = taken.clone();
        if missing > 0 {
            let preferred = preferred(&mut plugin, &available, &taken, asked).await?;
            // Kubelet takes what the plugin prefers, and makes up the rest from what is free.
            let candidates = preferred.intersection(&available).chain(available.difference(&preferred));
            for id in candidates {
                if ids.len() == asked {
                    break;
                }
                ids.insert(id.clone());
            }
        }
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest { devices_ids: ids.iter().cloned().collect() }],
        };
        let answer = plugin.client.allocate(request).await.map_err(spoken)?.into_inner();
        let answer =
            answer.container_responses.first().context("no containers return in allocation response")?;
        self.shared.lock().devices.insert(&pod.uid, &container.name, resource, ids.clone(), answer);
        Ok(ids)
    }

    async fn run_containers(&self, running: &mut RunningPod) -> Result<()> {
        let pod = running.pod.clone();
        for container in &pod.init {
            self.start_container(running, container).await?;
            if !container.sidecar {
                self.wait_for_success(running.id(&container.name)).await?;
            }
        }
        for container in &pod.containers {
            self.start_container(running, container).await?;
        }
        Ok(())
    }

    async fn start_container(&self, running: &mut RunningPod, container: &Container) -> Result<()> {
        let id = self.create_container(running, container).await?;
        self.cri.start(&id).await
    }

    /// Creates a container of a pod, without starting it; returns its ID.
    pub async fn create_container(&self, running: &mut RunningPod, container: &Container) -> Result<String> {
        let attempt = running.attempts.entry(container.name.clone()).or_default();
        let config = self.container_config(&running.pod, container, *attempt).await?;
        *attempt += 1;
        let sandbox_config = self.sandbox_config(&running.pod);
        let id = self.cri.create(&running.sandbox, &config, &sandbox_config).await?;
        running.containers.insert(container.name.clone(), id.clone());
        Ok(id)
    }

    async fn wait_for_success(&self, id: &str) -> Result<()> {
        let deadline = Instant::now() + INIT_TIMEOUT;
        loop {
            let status = self.cri.status(id).await?;
            if status.state() == ContainerState::ContainerExited {
                if status.exit_code == 0 {
                    return Ok(());
                }
                bail!("init container ended with {}: {} {}", status.exit_code, status.reason, status.message);
            }
            if Instant::now() > deadline {
                bail!("init container still runs after {INIT_TIMEOUT:?}");
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn sandbox_config(&self, pod: &Pod) -> PodSandboxConfig {
        PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: pod.name.clone(),
                uid: pod.uid.clone(),
                namespace: pod.namespace.clone(),
                attempt: 0,
            }),
            log_directory: self.logs(&pod.uid).display().to_string(),
            labels: pod_labels(pod),
            annotations: pod.annotations.clone().into_iter().collect(),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: format!("{}/pod{}", self.cgroup, pod.uid),
                security_context: Some(LinuxSandboxSecurityContext { namespace_options: Some(namespaces()) }),
            }),
        }
    }

    async fn container_config(
        &self,
        pod: &Pod,
        container: &Container,
        attempt: u32,
    ) -> Result<ContainerConfig> {
        // PreStartContainer is asked at every start of a container, the restarts included.
        for resource in container.resources.keys() {
            let plugin = self.shared.lock().plugins.get(resource).cloned();
            if let Some(mut plugin) = plugin.filter(|plugin| plugin.options.pre_start_required) {
                let ids = self.ids(&pod.uid, &container.name, resource);
                let request = PreStartContainerRequest { devices_ids: ids.into_iter().collect() };
                plugin.client.pre_start_container(request).await.map_err(spoken)?;
            }
        }
        let options = self.shared.lock().devices.run_options(&pod.uid, &container.name)?;

        let mut labels = pod_labels(pod);
        labels.insert("io.kubernetes.container.name".into(), container.name.clone());
        // labels.go newContainerAnnotations: kubelet's own come last and win.
        let mut annotations: HashMap<_, _> = options.annotations.into_iter().collect();
        annotations.insert("io.kubernetes.container.restartCount".into(), attempt.to_string());
        // kubelet_pods.go GenerateRunContainerOptions: the plugins' environment first, the pod's after it.
        let env = |(key, value): (String, String)| KeyValue { key, value: value.into_bytes() };
        let envs = options.envs.into_iter().chain(container.env.clone()).map(env).collect();
        let own_mounts = container.volumes.iter().map(|(host, path)| Mount {
            container_path: path.clone(),
            host_path: host.display().to_string(),
            readonly: false,
        });
        let mounts = options.mounts.into_iter().map(|mount| Mount {
            container_path: mount.container_path,
            host_path: mount.host_path,
            readonly: mount.read_only,
        });
        let devices = options.devices.into_iter().map(|device| Device {
            container_path: device.container_path,
            host_path: device.host_path,
            permissions: device.permissions,
        });
        let folder = self.logs(&pod.uid).join(&container.name);
        fs::create_dir_all(&folder)?;
        Ok(ContainerConfig {
            metadata: Some(ContainerMetadata { name: container.name.clone(), attempt }),
            image: Some(ImageSpec { image: container.image.clone() }),
            command: container.command.clone(),
            envs,
            mounts: mounts.chain(own_mounts).collect(),
            devices: devices.collect(),
            labels,
            annotations,
            log_path: format!("{}/{attempt}.log", container.name),
            linux: Some(LinuxContainerConfig {
                security_context: Some(LinuxContainerSecurityContext {
                    namespace_options: Some(namespaces()),
                    run_as_user: container.user.map(|value| Int64Value { value }),
                    run_as_group: container.user.map(|value| Int64Value { value }),
                    readonly_rootfs: container.read_only_root,
                }),
            }),
            cdi_devices: options
                .cdi_devices
                .into_iter()
                .chain(container.cdi_devices.clone())
                .map(|name| CdiDevice { name })
                .collect(),
        })
    }

    /// What a container wrote, without the runtime's prefixes.
    pub fn log(&self, running: &RunningPod, container: &str) -> String {
        let attempt = running.attempts.get(container).map_or(0, |next| next.saturating_sub(1));
        let file = self.logs(&running.pod.uid).join(container).join(format!("{attempt}.log"));
        // CRI log lines read "<time> stdout|stderr F|P <text>".
        let text = fs::read_to_string(file).unwrap_or_default();
        text.lines().map(|line| line.splitn(4, ' ').nth(3).unwrap_or("")).collect::<Vec<_>>().join("\n")
    }

    fn logs(&self, pod_uid: &str) -> PathBuf {
        self.folder.join("logs").join(pod_uid)
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn preferred(plugin: &mut Plugin, available: &Ids, taken: &Ids, asked: usize) -> Result<Ids> {
    if !plugin.options.get_preferred_allocation_available {
        return Ok(Ids::new());
    }
    let request = PreferredAllocationRequest {
        container_requests: vec![ContainerPreferredAllocationRequest {
            available_device_i_ds: available.union(taken).cloned().collect(),
            must_include_device_i_ds: taken.iter().cloned().collect(),
            allocation_size: i32::try_from(asked)?,
        }],
    };
    let answer = plugin.client.get_preferred_allocation(request).await.map_err(spoken)?.into_inner();
    Ok(answer.container_responses.into_iter().flat_map(|response| response.device_i_ds).collect())
}

fn pod_labels(pod: &Pod) -> HashMap<String, String> {
    HashMap::from([
        ("io.kubernetes.pod.name".into(), pod.name.clone()),
        ("io.kubernetes.pod.namespace".into(), pod.namespace.clone()),
        ("io.kubernetes.pod.uid".into(), pod.uid.clone()),
    ])
}

/// The host's network, which needs no CNI; the rest as usual.
fn namespaces() -> NamespaceOption {
    NamespaceOption {
        network: NamespaceMode::Node.into(),
        pid: NamespaceMode::Container.into(),
        ipc: NamespaceMode::Pod.into(),
    }
}

/// Only what the plugin said: kubelet puts it into the pod's events.
fn spoken(status: Status) -> anyhow::Error {
    anyhow::Error::msg(format!("rpc error: code = {:?} desc = {}", status.code(), status.message()))
}
