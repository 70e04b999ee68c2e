//! Why the device plugin ends by itself, and with which exit code.

use std::{io, path::PathBuf};

use rustix::process::geteuid;
use thiserror::Error;
use vcuda_config::{Exit, NodeFileError, daemons::LockError};

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
    #[error("another vcuda-device-plugin runs on this node: {0}; stop it first, one node has one")]
    SecondInstance(LockError),
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
    /// The exit code.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Set(error) if error.is_unknown() => Exit::NoShare,
            Self::Set(error) if error.is_refusal() => Exit::CannotBeSet,
            Self::System { .. }
            | Self::Status(_)
            | Self::Set(_)
            | Self::Checkpoint(_)
            | Self::ApiServer(_) => Exit::No,
            Self::Config(_) => Exit::NodeFile,
            Self::NoDriver(_) => Exit::NoDriver,
            Self::NoGpu(_) => Exit::NoGpu,
            Self::SecondInstance(_) => Exit::AlreadyRuns,
            Self::Unwritable { .. } => Exit::Unwritable,
        }
    }
}

impl From<LockError> for Fatal {
    fn from(error: LockError) -> Self {
        match error {
            LockError::Unusable { path, source } => Self::Unwritable { key: "paths.run", path, source },
            held @ LockError::Held { .. } => Self::SecondInstance(held),
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
    use super::*;

    #[test]
    fn who_is_not_root_is_told_to_be() {
        let denied = io::ErrorKind::PermissionDenied;
        assert_eq!(writable(denied, false, "paths.run"), "run it as root");
        for (why, root) in [(denied, true), (io::ErrorKind::ReadOnlyFilesystem, false)] {
            assert!(writable(why, root, "paths.run").contains("set paths.run in the node file"), "{why:?}");
        }
    }
}
