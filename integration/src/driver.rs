//! The NVIDIA driver of a machine: simulated, the real one, or none. From here on nobody asks which.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nvml_wrapper::Nvml;

use crate::{
    cache::{self, Cache},
    process::Process,
};

/// It is up in milliseconds.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Which driver a machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// No driver at all.
    None,
    /// A simulated one with this many GPUs.
    Simulated(u32),
    /// A simulated one of this version, such as `615.71`, with this many GPUs, of which each process takes 400 MiB.
    SimulatedAs(&'static str, u32),
    /// The one that is installed on this machine.
    Real,
}

/// A machine's driver.
#[derive(Debug)]
pub struct Driver {
    wanted: Wanted,
    root: PathBuf,
    /// The simulated kernel module.
    process: Option<Process>,
    folder: PathBuf,
}

/// A GPU, as NVML tells it to the host.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// UUID.
    pub uuid: String,
    /// Model.
    pub name: String,
    /// Memory in bytes.
    pub total_bytes: u64,
    /// Memory in use, in bytes.
    pub used_bytes: u64,
}

impl Wanted {
    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Simulated(_) | Self::SimulatedAs(..) => "simulated",
            Self::Real => "real",
        }
    }
}

impl Driver {
    /// Brings the driver up; a simulated one lies below `folder`.
    pub fn start(folder: &Path, wanted: Wanted) -> Result<Self> {
        let root = if wanted == Wanted::Real { "/".into() } else { folder.join("driver") };
        fs::create_dir_all(&root)?;
        let mut driver = Self { wanted, root, process: None, folder: folder.into() };
        match wanted {
            Wanted::Simulated(gpus) => driver.simulate(None, gpus)?,
            Wanted::SimulatedAs(version, gpus) => driver.simulate(Some(version), gpus)?,
            Wanted::None | Wanted::Real => {}
        }
        Ok(driver)
    }

    /// The driver root, as the node file names it.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The driver's version.
    pub fn version(&self) -> Result<String> {
        Ok(self.nvml()?.sys_driver_version()?)
    }

    /// The GPUs.
    pub fn gpus(&self) -> Result<Vec<Gpu>> {
        if self.wanted == Wanted::None {
            return Ok(vec![]);
        }
        let nvml = self.nvml()?;
        (0..nvml.device_count()?)
            .map(|index| {
                let gpu = nvml.device_by_index(index)?;
                let memory = gpu.memory_info()?;
                Ok(Gpu {
                    uuid: gpu.uuid()?,
                    name: gpu.name()?,
                    total_bytes: memory.total,
                    used_bytes: memory.used,
                })
            })
            .collect()
    }

    /// Memory that processes hold on all GPUs together, in bytes. Others may use a real driver's GPUs, so there it
    /// is not looked at.
    pub fn used_bytes(&self) -> Result<u64> {
        match self.wanted {
            Wanted::Simulated(_) | Wanted::SimulatedAs(..) => {
                Ok(self.gpus()?.iter().map(|gpu| gpu.used_bytes).sum())
            }
            Wanted::None | Wanted::Real => Ok(0),
        }
    }

    fn nvml(&self) -> Result<Nvml> {
        let library = if self.wanted == Wanted::Real {
            "libnvidia-ml.so.1".into()
        } else {
            self.root.join("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").into_os_string()
        };
        Nvml::builder().lib_path(&library).init().context("NVML")
    }

    fn simulate(&mut self, version: Option<&str>, gpus: u32) -> Result<()> {
        let programs = cache::dist()?.join("sim");
        let mut command = Command::new(programs.join("sim-gpud"));
        command.arg("--root").arg(&self.root);
        match version {
            None => command.arg("--gpus").arg(gpus.to_string()),
            Some(version) => {
                let file = self.folder.join("machine.yaml");
                fs::write(
                    &file,
                    format!("version: 1\ndriver: {version}\ngpus: [{{count: {gpus}, contextMib: 400}}]\n"),
                )?;
                command.arg("--config").arg(file)
            }
        };
        if let Some(program) = Cache::find()?.nvidia_smi() {
            command.arg("--nvidia-smi").arg(program);
        }
        let mut process = Process::spawn("sim-gpud", command, &self.folder.join("sim-gpud.log"))?;
        let deadline = Instant::now() + START_TIMEOUT;
        while self.gpus().is_err() {
            process.check_running()?;
            if Instant::now() > deadline {
                bail!("sim-gpud does not answer: {:?}; its last words:\n{}", self.gpus(), process.tail());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.process = Some(process);
        Ok(())
    }
}
