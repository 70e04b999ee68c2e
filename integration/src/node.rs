//! A node in one folder.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Once,
        atomic::{AtomicU32, Ordering},
    },
};

use anyhow::{Context, Result};

use crate::{
    cache::{Cache, Line},
    containerd::{Containerd, Settings},
    cri::Cri,
    image::Image,
    kubelet::Kubelet,
    teardown,
};

/// How a node is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which containerd.
    pub line: Line,
    /// What containerd is told.
    pub containerd: Settings,
}

/// A node. Everything on it ends when it is dropped.
#[derive(Debug)]
pub struct Node {
    /// kubelet's stand-in.
    pub kubelet: Kubelet,
    /// containerd.
    pub containerd: Containerd,
    cache: Cache,
    folder: Folder,
}

/// The node's folder; dropped last, it takes everything down.
#[derive(Debug)]
struct Folder(PathBuf);

impl Options {
    /// A node as it should be, on the line that the environment names.
    pub fn from_env() -> Result<Self> {
        Ok(Self { line: Line::from_env()?, containerd: Settings { cdi: true, nri: true } })
    }
}

impl Folder {
    fn new() -> Result<Self> {
        static SWEEP: Once = Once::new();
        static NEXT: AtomicU32 = AtomicU32::new(1);
        SWEEP.call_once(teardown::stale);
        let name = format!(
            "{}{}-{}",
            teardown::FOLDER_PREFIX,
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
        Ok(Self(folder))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        teardown::node(&self.0);
    }
}

impl Node {
    /// Brings up containerd and kubelet's stand-in.
    pub async fn start(options: &Options) -> Result<Self> {
        let cache = Cache::find()?;
        let folder = Folder::new()?;
        let containerd = Containerd::start(&cache, options.line, &folder.0, options.containerd).await?;
        let cgroup = format!("/{}", folder.0.file_name().and_then(|name| name.to_str()).unwrap_or_default());
        let kubelet = Kubelet::start(&folder.0.join("kubelet"), &cgroup, containerd.cri().clone()).await?;
        let node = Self { kubelet, containerd, cache, folder };
        node.import(&Image::pause())?;
        Ok(node)
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder.0
    }

    /// containerd's CRI service.
    pub fn cri(&self) -> &Cri {
        self.containerd.cri()
    }

    /// Makes an image and imports it.
    pub fn import(&self, image: &Image) -> Result<()> {
        let archive = image.archive(&self.cache, &self.folder.0)?;
        self.containerd.import(&archive)?;
        Ok(fs::remove_file(archive)?)
    }
}
