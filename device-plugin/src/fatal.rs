//! Why the device plugin ends by itself, and with which exit code.

use std::{io, path::PathBuf};

use rustix::process::geteuid;
use thiserror::Error;
use vcuda_config::NodeFileError;

use crate::{migrate::CheckpointError, set::SetError, status::StatusError};

/// Why the device plugin ends by itself. One sentence each: the thing, the reason, the remedy.
#[derive(Debug, Error)]
pub enum Fatal {
    /// The node file is wrong.
    #[error("{0}")]
    Config(#[from] NodeFileError),
    /// There is no driver, and waiting for one was not wanted.
    #[error("the NVIDIA driver cannot be used: {0}")]
    NoDriver(String),
    /// The driver is there and offers nothing, and waiting was not wanted.
    #[error("no GPU to offer: {0}")]
    NoGpu(String),
    /// Another device plugin runs on this node.
    #[error(
        "another vcuda-device-plugin runs on this node (process {pid} holds {lock}); stop it first, one node has one"
    )]
    SecondInstance {
        /// The lock.
        lock: PathBuf,
        /// Its holder.
        pid: String,
    },
    /// A folder that must be written cannot be.
    #[error("{path} cannot be written: {source}; {}", writable(source.kind(), geteuid().is_root(), key))]
    Unwritable {
        /// Key in the node file.
        key: &'static str,
        /// The folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// gpu-manager's checkpoint says nothing.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The API server does not answer.
    #[error("the API server does not tell this node's pods: {0}; pass another --kubeconfig")]
    ApiServer(String),
    /// There is nothing to show of the node.
    #[error(transparent)]
    Status(#[from] StatusError),
    /// A share could not be changed.
    #[error(transparent)]
    Set(#[from] SetError),
    /// The system refuses something that no setting can mend.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

impl Fatal {
    /// What `--help` says about exit codes.
    pub const HELP: &'static str = "Exit codes:\n  \
        0  done, or stopped as asked (SIGTERM, SIGINT or SIGHUP)\n  \
        1  the system refused something, or there is no state to show\n  \
        2  wrong command line\n  \
        3  the node file is wrong or missing\n  \
        4  no NVIDIA driver (only with --fail-without-driver, and from migrate)\n  \
        5  no GPU to offer (only with --fail-without-driver)\n  \
        6  another device plugin runs on this node\n  \
        7  a folder cannot be written (CDI specs, state, or run)\n  \
        8  no such share (only from set)\n  \
        9  that cannot be set: not enough room, or no such amount (only from set)\n  \
        10  it fits nowhere on this node (explain)\n  \
        11  some of what gpu-manager runs will not run (migrate)";

    /// The exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Set(error) if error.is_unknown() => 8,
            Self::Set(error) if error.is_refusal() => 9,
            Self::System { .. }
            | Self::Status(_)
            | Self::Set(_)
            | Self::Checkpoint(_)
            | Self::ApiServer(_) => 1,
            Self::Config(_) => 3,
            Self::NoDriver(_) => 4,
            Self::NoGpu(_) => 5,
            Self::SecondInstance { .. } => 6,
            Self::Unwritable { .. } => 7,
        }
    }
}

/// What to do where a folder cannot be written.
fn writable(why: io::ErrorKind, root: bool, key: &str) -> String {
    match (why, root) {
        (io::ErrorKind::PermissionDenied, false) => "run it as root".into(),
        _ => format!("mount it writable, or set {key} in the node file"),
    }
}

#[cfg(test)]
mod tests {
    use ledger::ChangeError;

    use super::*;

    #[test]
    fn every_exit_code_is_in_the_help() {
        let io = || io::Error::other("x");
        for fatal in [
            Fatal::System { what: "x", source: io() },
            Fatal::Config(NodeFileError::Read { path: "/x".into(), source: io() }),
            Fatal::NoDriver(String::new()),
            Fatal::NoGpu(String::new()),
            Fatal::SecondInstance { lock: "/x".into(), pid: "1".into() },
            Fatal::Set(SetError::NoShare { pod: "ns/x".into(), container: "x".into() }),
            Fatal::Set(SetError::Change(ChangeError::Whole("7f_x".parse().unwrap()))),
            Fatal::Unwritable { key: "paths.cdi", path: "/x".into(), source: io() },
        ] {
            assert!(Fatal::HELP.contains(&format!("\n  {}  ", fatal.exit_code())), "{fatal}");
        }
    }

    #[test]
    fn who_is_not_root_is_told_to_be() {
        let denied = io::ErrorKind::PermissionDenied;
        assert_eq!(writable(denied, false, "paths.run"), "run it as root");
        for (why, root) in [(denied, true), (io::ErrorKind::ReadOnlyFilesystem, false)] {
            assert!(writable(why, root, "paths.run").contains("set paths.run in the node file"), "{why:?}");
        }
    }
}
