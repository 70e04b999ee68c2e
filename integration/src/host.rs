//! A machine in one folder, without a kubelet: containerd, the driver, and the product's own daemons. Each part can
//! be started, killed and started again by itself.

use std::{
    fs,
    ops::Deref,
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
    teardown,
};

/// How a machine is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which containerd.
    pub line: Line,
    /// What containerd is told.
    pub containerd: Settings,
}

/// A machine. Everything on it ends when it is dropped.
#[derive(Debug)]
pub struct Host {
    /// containerd.
    pub containerd: Containerd,
    cache: Cache,
    folder: Folder,
}

/// A machine's folder; when it goes, all that lives in it goes.
#[derive(Debug)]
struct Folder(PathBuf);

impl Options {
    /// A machine as it should be, on the line of containerd that the environment names.
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

impl Deref for Folder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        teardown::node(&self.0);
    }
}

impl Host {
    /// Brings up containerd.
    pub async fn start(options: &Options) -> Result<Self> {
        let cache = Cache::find()?;
        let folder = Folder::new()?;
        let containerd = Containerd::start(&cache, options.line, &folder, options.containerd).await?;
        let host = Self { containerd, cache, folder };
        host.import(&Image::pause())?;
        Ok(host)
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What the setup fetched.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The cgroup that all its pods go under: it is how the teardown finds them.
    pub fn cgroup(&self) -> String {
        format!("/{}", self.folder.file_name().and_then(|name| name.to_str()).unwrap_or_default())
    }

    /// containerd's CRI service.
    pub fn cri(&self) -> &Cri {
        self.containerd.cri()
    }

    /// Makes an image and imports it.
    pub fn import(&self, image: &Image) -> Result<()> {
        let archive = image.archive(&self.cache, &self.folder)?;
        self.containerd.import(&archive)?;
        Ok(fs::remove_file(archive)?)
    }
}
