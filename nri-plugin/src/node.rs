//! What the plugin holds on its node for as long as it runs: the one-plugin lock, the binder, and the sign that it
//! is ready.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use ledger::LedgerError;
use rustix::fs::FlockOperation;
use thiserror::Error;
use vcuda_config::{NodeFile, NodeFileError, Paths};

use crate::binding::Binder;

/// How long a new plugin waits for an old one that is on its way out.
const HANDOVER: Duration = Duration::from_millis(1500);

/// The running plugin's hold on its node.
#[derive(Debug)]
pub struct Node {
    binder: Arc<Binder>,
    ready: PathBuf,
    /// Held until the process ends.
    _lock: File,
}

/// Why the plugin cannot run on this node.
#[derive(Debug, Error)]
pub enum NodeError {
    /// The node file cannot be used.
    #[error(transparent)]
    Config(#[from] NodeFileError),
    /// Another plugin runs.
    #[error(
        "vcuda-nri-plugin already runs on this node{holder} and holds {lock}; stop it first, or leave it and do not \
         start this one"
    )]
    AlreadyRunning {
        /// ` (process n)`, where it is known.
        holder: String,
        /// The lock file.
        lock: PathBuf,
    },
    /// The lock cannot be taken.
    #[error("{path}: {source}; the plugin runs as root and needs this folder")]
    Run {
        /// File or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The ledger cannot be opened.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

impl Node {
    /// Takes hold of the node that `file` describes.
    pub fn start(file: &NodeFile) -> Result<Self, NodeError> {
        let lock = lock(&file.paths)?;
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

fn lock(paths: &Paths) -> Result<File, NodeError> {
    let path = paths.nri_plugin_lock();
    let failed = |path: &Path, source| NodeError::Run { path: path.into(), source };
    fs::create_dir_all(&paths.run).map_err(|source| failed(&paths.run, source))?;
    let mut options = OpenOptions::new();
    let mut file = options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(|source| failed(&path, source))?;
    let until = Instant::now() + HANDOVER;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => {
                thread::sleep(Duration::from_millis(50))
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut pid = String::new();
                let _ = (&mut file).take(16).read_to_string(&mut pid);
                let holder = match pid.trim() {
                    "" => String::new(),
                    pid => format!(" (process {pid})"),
                };
                return Err(NodeError::AlreadyRunning { holder, lock: path });
            }
            Err(source) => return Err(failed(&path, source.into())),
        }
    }
    // The number is for people; the lock is what counts.
    let written = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    written.map_err(|source| failed(&path, source))?;
    Ok(file)
}
