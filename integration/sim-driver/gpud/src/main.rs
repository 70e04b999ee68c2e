//! `sim-gpud`: stands for the kernel module of a simulated NVIDIA driver, lays its driver root out, and lets things happen
//! to its GPUs.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use sim_gpud::{
    config::{Group, Machine},
    daemon::{Command, Daemon, ask},
    layout::Layout,
};

/// A simulated NVIDIA driver.
///
/// Without a subcommand, lays a driver root out and serves the processes that use it until it is stopped. Exits with 1
/// and a sentence on stderr when something is wrong, with 2 for wrong arguments.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct Arguments {
    #[command(subcommand)]
    what: Option<What>,
    #[command(flatten)]
    driver: Option<Driver>,
}

#[derive(Subcommand)]
enum What {
    /// Lays the driver root out, and ends.
    Install(Driver),
    /// Serves a driver root that is laid out.
    Serve(Driver),
    /// Lets something happen to a GPU, under a running sim-gpud, or shows its state as JSON. Root only.
    Ctl {
        /// Driver root that the running one serves.
        #[arg(long, alias = "driver-root", value_name = "DIR")]
        root: PathBuf,
        #[command(subcommand)]
        event: Event,
    },
}

#[derive(Args)]
struct Driver {
    /// Driver root.
    #[arg(long, alias = "driver-root", value_name = "DIR")]
    root: PathBuf,
    /// The machine, a YAML file; instead of the GPUs' options here.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["gpus", "model", "memory_mib", "context_mib"])]
    config: Option<PathBuf>,
    /// How many GPUs.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=16))]
    gpus: u32,
    /// Model of every GPU.
    #[arg(long, default_value = "NVIDIA A100-SXM4-40GB")]
    model: String,
    /// Memory of every GPU in MiB; by default the model's.
    #[arg(long)]
    memory_mib: Option<u64>,
    /// Memory that a process takes with its first context on a GPU, in MiB.
    #[arg(long, default_value_t = 0)]
    context_mib: u64,
    /// Version of the driver; by default the file's, or 550.163.01.
    #[arg(long)]
    driver_version: Option<String>,
    /// CUDA version of the driver, such as 12040; by default that of the driver's branch.
    #[arg(long)]
    cuda_version: Option<i32>,
    /// Folder of libsim_cuda.so and libsim_nvml.so (or libcuda.so and libnvidia-ml.so); by default this program's.
    #[arg(long, value_name = "DIR")]
    libraries: Option<PathBuf>,
    /// A real nvidia-smi to put into the driver root.
    #[arg(long, value_name = "FILE")]
    nvidia_smi: Option<PathBuf>,
    /// Make regular files instead of device nodes, which need root.
    #[arg(long)]
    plain_nodes: bool,
}

#[derive(Subcommand)]
enum Event {
    /// An XID error.
    Xid {
        /// The GPU, by index or UUID.
        #[arg(long, default_value = "0")]
        gpu: String,
        /// The error, such as 48.
        code: u64,
    },
    /// The GPU falls off the bus: XID 79, and from then on it is lost.
    Lose {
        /// The GPU, by index or UUID.
        #[arg(long, default_value = "0")]
        gpu: String,
    },
    /// The GPU is back.
    Recover {
        /// The GPU, by index or UUID.
        #[arg(long, default_value = "0")]
        gpu: String,
    },
    /// Memory errors that ECC cannot correct; no event tells of them.
    Ecc {
        /// The GPU, by index or UUID.
        #[arg(long, default_value = "0")]
        gpu: String,
        /// The memory waits to be retired.
        #[arg(long)]
        retires: bool,
        /// How many more.
        #[arg(default_value_t = 1)]
        errors: u64,
    },
    /// A row of memory is to be replaced by a spare one; no event tells of it.
    Row {
        /// The GPU, by index or UUID.
        #[arg(long, default_value = "0")]
        gpu: String,
        /// There is no spare one.
        #[arg(long)]
        failed: bool,
    },
    /// The GPU is reset: it counts memory errors from nought, and has retired or replaced what was to be.
    Reset {
        /// The GPU, by index or UUID.
        #[arg(long, default_value = "0")]
        gpu: String,
    },
    /// Switches MIG mode.
    Mig {
        /// The GPU, by index or UUID.
        #[arg(long, default_value = "0")]
        gpu: String,
        /// `on` or `off`.
        #[arg(value_parser = ["on", "off"])]
        mode: String,
    },
    /// Shows GPUs and processes.
    Show,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    match (arguments.what, arguments.driver) {
        (Some(What::Install(driver)), _) => driver.install(),
        (Some(What::Serve(driver)), _) => driver.serve(),
        (Some(What::Ctl { root, event }), _) => {
            let answer = ask(&root, &event.into())?;
            if answer.as_object().is_some_and(|fields| !fields.is_empty()) {
                println!("{answer:#}");
            }
            Ok(())
        }
        (None, Some(driver)) => {
            driver.install()?;
            driver.serve()
        }
        (None, None) => Ok(<Arguments as clap::CommandFactory>::command().print_help()?),
    }
}

impl From<Event> for Command {
    fn from(event: Event) -> Self {
        match event {
            Event::Xid { gpu, code } => Self::Xid { gpu, code },
            Event::Lose { gpu } => Self::Lose { gpu },
            Event::Recover { gpu } => Self::Recover { gpu },
            Event::Ecc { gpu, errors, retires } => Self::Ecc { gpu, errors, retires },
            Event::Row { gpu, failed } => Self::Row { gpu, failed },
            Event::Reset { gpu } => Self::Reset { gpu },
            Event::Mig { gpu, mode } => Self::Mig { gpu, on: mode == "on" },
            Event::Show => Self::Show,
        }
    }
}

impl Driver {
    fn machine(&self) -> Result<Machine> {
        let mut machine = match &self.config {
            Some(file) => Machine::load(file)?,
            None => Machine::with(vec![Group {
                count: self.gpus,
                model: self.model.clone(),
                memory_mib: self.memory_mib,
                context_mib: self.context_mib,
                ..Group::default()
            }]),
        };
        if let Some(version) = &self.driver_version {
            machine.driver.clone_from(version);
        }
        machine.cuda = self.cuda_version.or(machine.cuda);
        machine.facts()?;
        Ok(machine)
    }

    fn install(&self) -> Result<()> {
        let libraries = match &self.libraries {
            Some(folder) => folder.clone(),
            None => std::env::current_exe()?.parent().context("no folder")?.to_path_buf(),
        };
        Layout {
            root: &self.root,
            machine: &self.machine()?,
            libraries,
            nvidia_smi: self.nvidia_smi.as_deref(),
            plain_nodes: self.plain_nodes,
        }
        .apply()
    }

    fn serve(&self) -> Result<()> {
        let machine = self.machine()?;
        let daemon = Daemon::start(&self.root, &machine)?;
        let (gpus, root) = (machine.facts()?.len(), self.root.display());
        println!("sim-gpud: {gpus} GPU(s), driver {}, below {root}", machine.driver);
        daemon.serve()
    }
}
