//! What the command line takes.

use std::path::PathBuf;

use anyhow::Result;
use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use oci_hooks::compat::start::Command;
use vcuda_config::{Exit, NodeFile};

/// What could not be told.
const OPEN: &str = "it could not be told, or the arguments are wrong; standard error or the report says why";

/// What the help says of exit codes.
fn codes() -> String {
    Exit::help_of_check("it fits", "it does not", OPEN)
}

/// The same of a command that judges nothing.
fn list_codes() -> String {
    format!("Exit codes:\n  0  listed, whatever became of the images\n  2  {OPEN}")
}

/// Says whether an image can run with a share of a GPU, from its files alone, and whether a node can give it one.
#[derive(Parser)]
#[command(name = "vcuda-check", version, after_help = codes())]
pub(super) struct Cli {
    #[command(subcommand)]
    pub(super) what: What,
}

#[derive(Subcommand)]
pub(super) enum What {
    /// Check a root folder: an unpacked image, a chroot.
    #[command(after_help = codes())]
    Rootfs {
        /// The folder.
        #[arg(value_name = "FOLDER")]
        dir: PathBuf,
        #[command(flatten)]
        started: Started,
        #[command(flatten)]
        against: Against,
        #[command(flatten)]
        common: Common,
    },
    /// Check an image in a file, as `docker save`, `ctr image export` or `skopeo copy` write it. Needs no root and
    /// unpacks nothing; its layers may be compressed, the file as a whole may not.
    #[command(after_help = codes())]
    Image {
        /// The file.
        file: PathBuf,
        #[command(flatten)]
        against: Against,
        #[command(flatten)]
        common: Common,
    },
    /// Check a container that runs on this node, by its ID or the beginning of it.
    #[command(after_help = codes())]
    Container {
        /// The ID.
        id: String,
        #[command(flatten)]
        containerd: Containerd,
        #[command(flatten)]
        against: Against,
        #[command(flatten)]
        common: Common,
    },
    /// Check this node: driver, containerd's settings, what is installed.
    #[command(after_help = codes())]
    Node {
        /// containerd's program, which is asked for its settings.
        #[arg(long, value_name = "FILE", default_value = "containerd")]
        containerd: PathBuf,
        /// Its configuration, where it is not the usual one.
        #[arg(long, value_name = "FILE")]
        containerd_config: Option<PathBuf>,
        /// Root of another driver than the installed one, or the folder of its libraries: what it has that the shim does
        /// not know.
        #[arg(long, value_name = "FOLDER")]
        driver: Option<PathBuf>,
        #[command(flatten)]
        common: Common,
    },
    /// List the images with shares that this node has seen, and how they fared.
    #[command(after_help = list_codes())]
    List {
        /// Write metrics, as node_exporter's textfile collector reads them.
        #[arg(long, conflicts_with = "output")]
        metrics: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Check many images against many drivers: which workloads a new driver would break.
    #[command(
        after_help = codes(),
        group = ArgGroup::new("images").required(true).multiple(true).args(["list", "running", "seen"])
    )]
    Matrix {
        /// A file with one root folder or image file a line; # begins a comment.
        #[arg(long, value_name = "FILE")]
        list: Option<PathBuf>,
        /// All containers with a share that run on this node, as its ledger has them.
        #[arg(long)]
        running: bool,
        /// All images with a share that this node has seen (`list`), from memory.
        #[arg(long)]
        seen: bool,
        /// Root of a driver, or a folder of its libraries; may be given more than once. Default: this node's.
        #[arg(long, value_name = "FOLDER")]
        driver: Vec<PathBuf>,
        /// The shim to check against. Default: the one installed on this node, else glibc 2.17 is assumed.
        #[arg(long, value_name = "FILE")]
        shim: Option<PathBuf>,
        /// Compute capability of the GPUs to check against, such as 8.0; may be given more than once. Default: of this
        /// node's GPUs.
        #[arg(long, value_name = "N.N", value_parser = capability)]
        gpu: Vec<u32>,
        #[command(flatten)]
        containerd: Containerd,
        #[command(flatten)]
        common: Common,
    },
}

#[derive(Args)]
pub(super) struct Started {
    /// The program that is started, with its arguments after it.
    #[arg(long, value_name = "PROGRAM", num_args = 1.., allow_hyphen_values = true, value_terminator = ";")]
    pub(super) entry: Vec<String>,
    /// A variable of its environment, NAME=value; may be given more than once.
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    pub(super) env: Vec<String>,
    /// Its working folder.
    #[arg(long, value_name = "FOLDER", default_value = "/")]
    pub(super) cwd: PathBuf,
}

#[derive(Args)]
pub(super) struct Against {
    /// Root of the driver to check against, or the folder of its libraries. Default: the node file's driverRoot,
    /// where a driver is there.
    #[arg(long, value_name = "FOLDER")]
    pub(super) driver: Option<PathBuf>,
    /// The shim to check against. Default: the one installed on this node, else glibc 2.17 is assumed.
    #[arg(long, value_name = "FILE")]
    pub(super) shim: Option<PathBuf>,
    /// Compute capability of the GPUs to check against, such as 8.0; may be given more than once. Default: of this
    /// node's GPUs.
    #[arg(long, value_name = "N.N", value_parser = capability)]
    pub(super) gpu: Vec<u32>,
}

#[derive(Args)]
pub(super) struct Containerd {
    /// containerd's state folder.
    #[arg(long, value_name = "FOLDER", default_value = "/run/containerd")]
    pub(super) containerd_state: PathBuf,
    /// containerd's namespace; Kubernetes has its own.
    #[arg(long, value_name = "NAME", default_value = "k8s.io")]
    pub(super) namespace: String,
}

#[derive(Args)]
pub(super) struct Common {
    /// Node file. Without it, the default file may be absent.
    #[arg(long, value_name = "FILE", default_value = NodeFile::DEFAULT_PATH)]
    pub(super) config: PathBuf,
    /// How the answer is written.
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub(super) output: Output,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Output {
    /// For people.
    Text,
    /// JSON, for programs.
    Json,
}

impl Common {
    pub(super) fn load(&self) -> Result<NodeFile> {
        Ok(NodeFile::load_or_default(&self.config)?)
    }
}

impl Started {
    pub(super) fn command(&self) -> Command {
        Command { args: self.entry.clone(), env: self.env.clone(), cwd: self.cwd.clone() }
    }
}

fn variable(text: &str) -> Result<String, String> {
    match text.split_once('=') {
        Some((name, _)) if !name.is_empty() => Ok(text.into()),
        _ => Err("it must be like NAME=value".into()),
    }
}

/// A compute capability such as 8.0, as 80.
fn capability(text: &str) -> Result<u32, String> {
    let parse = || {
        let (major, minor) = text.split_once('.')?;
        Some(
            major.parse::<u32>().ok().filter(|major| *major < 100)? * 10
                + minor.parse::<u32>().ok().filter(|minor| *minor < 10)?,
        )
    };
    parse().ok_or_else(|| "it must be like 8.0 or 12.0".to_owned())
}
