//! What the plugin holds on its node for as long as it runs: the one-plugin lock, the binder, and the sign that it
//! is ready.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use ledger::LedgerError;
use thiserror::Error;
use vcuda_config::{
    NodeFile, NodeFileError,
    daemons::{Lock, LockError, installed_elsewhere},
};

use crate::binding::Binder;

/// The running plugin's hold on its node.
#[derive(Debug)]
pub struct Node {
    binder: Arc<Binder>,
    ready: PathBuf,
    /// Held until the process ends.
    _lock: Lock,
}

/// Why the plugin cannot run on this node.
#[derive(Debug, Error)]
pub enum NodeError {
    /// The node file cannot be used.
    #[error(transparent)]
    Config(#[from] NodeFileError),
    /// Another plugin runs, or it cannot be told.
    #[error("{}", unlocked(.0))]
    Lock(#[from] LockError),
    /// The ledger cannot be opened.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

fn unlocked(error: &LockError) -> String {
    match error {
        LockError::Held { .. } => format!(
            "vcuda-nri-plugin already runs on this node: {error}; stop it first, or leave it and do not start this one"
        ),
        LockError::Unusable { .. } => format!("{error}; the plugin runs as root and needs this folder"),
    }
}

impl Node {
    /// Takes hold of the node that `file` describes.
    pub fn start(file: &NodeFile) -> Result<Self, NodeError> {
        let lock = Lock::take(&file.paths.nri_plugin_lock())?;
        if let Some(another) = installed_elsewhere(&file.paths) {
            tracing::warn!("{another}");
        }
        // What a killed predecessor left.
        let ready = file.paths.nri_plugin_ready();
        show_ready(&ready, None);
        Ok(Self { binder: Arc::new(Binder::open(file.paths.clone())?), ready, _lock: lock })
    }

    /// The binder.
    pub fn binder(&self) -> &Arc<Binder> {
        &self.binder
    }

    /// Shows in `<run>/nri-plugin.ready` that containers get their shares from the runtime named, or, with None,
    /// that they do not.
    pub fn set_ready(&self, runtime: Option<&str>) {
        show_ready(&self.ready, runtime);
    }
}

fn show_ready(file: &Path, runtime: Option<&str>) {
    let done = match runtime {
        Some(runtime) => fs::write(file, format!("{runtime}\n{}\n", std::process::id())),
        None => match fs::remove_file(file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        },
    };
    if let Err(error) = done {
        tracing::warn!(path = %file.display(), %error, "readiness cannot be shown");
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.set_ready(None);
    }
}
