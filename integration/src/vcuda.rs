//! The product on a machine of ours: its node file, its daemons, started as they are on a real node.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use vcuda_config::{MetricsSettings, NodeFile, Paths};

use crate::{
    cache, containerd,
    process::{Process, run},
};

/// Both daemons are up in milliseconds.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Name of the node file.
const NODE_FILE: &str = "config.yaml";

/// The daemons of a node.
#[derive(Debug)]
pub struct Vcuda {
    folder: PathBuf,
    file: NodeFile,
    device_plugin: Option<Process>,
    nri_plugin: Option<Process>,
    /// The device plugin's way to the API server: a kubeconfig, and the node's name.
    cluster: Option<(PathBuf, String)>,
}

impl Vcuda {
    /// Writes a node file in which everything lies in `folder`. Nothing is started.
    pub fn new(folder: &Path, driver_root: &Path) -> Result<Self> {
        let file = NodeFile {
            paths: Paths {
                driver_root: driver_root.into(),
                state: folder.join("vcuda"),
                cdi: containerd::cdi(folder),
                install: cache::dist()?,
                kubelet: folder.join("kubelet/device-plugins"),
                nri_socket: containerd::nri_socket(folder),
                run: folder.join("run"),
                node_file: folder.join(NODE_FILE),
            },
            // One port for all nodes of a machine would be one too few.
            metrics: MetricsSettings { listen: None },
            ..NodeFile::default()
        };
        fs::create_dir_all(&file.paths.kubelet)?;
        let vcuda =
            Self { folder: folder.into(), file, device_plugin: None, nri_plugin: None, cluster: None };
        vcuda.write_node_file()?;
        Ok(vcuda)
    }

    /// The node file.
    pub fn file(&self) -> &NodeFile {
        &self.file
    }

    /// Changes the node file. Running daemons do not see it until they are started anew.
    pub fn change(&mut self, change: impl FnOnce(&mut NodeFile)) -> Result<()> {
        change(&mut self.file);
        self.write_node_file()
    }

    /// Path of the node file.
    pub fn config(&self) -> PathBuf {
        self.folder.join(NODE_FILE)
    }

    /// Names of both resources.
    pub fn resources(&self) -> [String; 2] {
        [self.file.resources.core_name(), self.file.resources.memory_name()]
    }

    /// Says how the device plugin reaches the API server, from its next start on, and as what node.
    pub fn join(&mut self, kubeconfig: PathBuf, node: &str) {
        self.cluster = Some((kubeconfig, node.into()));
    }

    /// Starts the device plugin. It registers by itself, whenever kubelet is there.
    pub fn start_device_plugin(&mut self) -> Result<&mut Process> {
        self.device_plugin = None;
        let mut command = self.command("vcuda-device-plugin");
        if let Some((kubeconfig, node)) = &self.cluster {
            command.arg("--kubeconfig").arg(kubeconfig).args(["--node-name", node]);
        }
        let process = Process::spawn("vcuda-device-plugin", command, &self.device_log())?;
        Ok(self.device_plugin.insert(process))
    }

    /// Starts the NRI plugin and waits until it is in service.
    pub async fn start_nri_plugin(&mut self) -> Result<&mut Process> {
        self.launch_nri_plugin()?;
        self.wait_for_nri_plugin().await?;
        self.nri_plugin.as_mut().context("it was just started")
    }

    /// Starts the NRI plugin and does not wait for it.
    pub fn launch_nri_plugin(&mut self) -> Result<()> {
        self.nri_plugin = None;
        let command = self.command("vcuda-nri-plugin");
        let process = Process::spawn("vcuda-nri-plugin", command, &self.nri_log())?;
        self.nri_plugin = Some(process);
        Ok(())
    }

    /// Waits until the NRI plugin is in service, as its own probe says.
    pub async fn wait_for_nri_plugin(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            let mut probe = self.command("vcuda-nri-plugin");
            probe.arg("--ready");
            if run(probe).is_ok() {
                return Ok(());
            }
            let plugin = self.nri_plugin.as_mut().context("vcuda-nri-plugin was not started")?;
            plugin.check_running()?;
            if Instant::now() > deadline {
                bail!("vcuda-nri-plugin is not in service; its last words:\n{}", plugin.tail());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// The device plugin, if it was started.
    pub fn device_plugin(&mut self) -> Result<&mut Process> {
        self.device_plugin.as_mut().context("vcuda-device-plugin was not started")
    }

    /// The NRI plugin, if it was started.
    pub fn nri_plugin(&mut self) -> Result<&mut Process> {
        self.nri_plugin.as_mut().context("vcuda-nri-plugin was not started")
    }

    /// Puts the NRI plugin where the next start of containerd finds and starts it.
    pub fn let_containerd_start_it(&self, folder: &Path) -> Result<()> {
        let plugins = containerd::nri_plugins(folder);
        let settings = containerd::nri_settings(folder);
        fs::create_dir_all(&plugins)?;
        fs::create_dir_all(&settings)?;
        let name = format!("{}-{}", self.file.nri.index, self.file.nri.name);
        symlink(self.file.paths.install.join("bin/vcuda-nri-plugin"), plugins.join(name))?;
        let settings = settings.join(format!("{}.conf", self.file.nri.name));
        Ok(fs::write(settings, self.config().display().to_string())?)
    }

    /// The device plugin's log.
    pub fn device_log(&self) -> PathBuf {
        self.folder.join("device-plugin.log")
    }

    /// The NRI plugin's log.
    pub fn nri_log(&self) -> PathBuf {
        self.folder.join("nri-plugin.log")
    }

    /// A command of the product, with this node's file.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.file.paths.install.join("bin").join(program));
        command.arg("--config").arg(self.config());
        command
    }

    /// Names of the share records on disk.
    pub fn shares(&self) -> Vec<String> {
        let entries = fs::read_dir(self.file.paths.shares()).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        // Files in the making start with a dot.
        let mut names: Vec<_> = names.filter(|name| !name.starts_with('.')).collect();
        names.sort();
        names
    }

    fn write_node_file(&self) -> Result<()> {
        // JSON is YAML.
        Ok(fs::write(self.config(), serde_json::to_vec_pretty(&self.file)?)?)
    }
}
