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
    driver::{Driver, Wanted},
    image::Image,
    teardown,
    vcuda::Vcuda,
};

/// How much of each log is printed when a test fails.
const LOG_LINES: usize = 40;

/// How a machine is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which containerd.
    pub line: Line,
    /// What containerd is told.
    pub containerd: Settings,
    /// Which driver it has.
    pub driver: Wanted,
    /// Whether containerd starts the NRI plugin itself, as it does with what lies in `/opt/nri/plugins`.
    pub nri_by_containerd: bool,
}

/// A machine. Everything on it ends when it is dropped.
#[derive(Debug)]
pub struct Host {
    /// containerd.
    pub containerd: Containerd,
    /// The driver.
    pub driver: Driver,
    /// The product's daemons; none run until they are started.
    pub vcuda: Vcuda,
    cache: Cache,
    folder: Folder,
}

/// A machine's folder; when it goes, all that lives in it goes.
#[derive(Debug)]
struct Folder(PathBuf);

impl Options {
    /// A machine as it should be, on the line of containerd that the environment names.
    pub fn from_env() -> Result<Self> {
        Ok(Self::on(Line::from_env()?))
    }

    /// A machine as it should be, with two simulated GPUs.
    pub fn on(line: Line) -> Self {
        Self {
            line,
            containerd: Settings { cdi: true, nri: true },
            driver: Wanted::Simulated(2),
            nri_by_containerd: false,
        }
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
        let folder = Self(folder);
        teardown::note_what_is_missing(&folder, Path::new(teardown::RUN))?;
        Ok(folder)
    }
}

impl Folder {
    /// The ends of all logs, for whoever reads why a test failed: the folder is about to go.
    fn print_logs(&self) {
        let logs = fs::read_dir(&self.0).into_iter().flatten().flatten().map(|entry| entry.path());
        for log in logs.filter(|path| path.extension().is_some_and(|kind| kind == "log")) {
            let text = String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned();
            let lines: Vec<_> = text.lines().collect();
            let last = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n");
            eprintln!("--- {}\n{last}", log.display());
        }
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
        if std::thread::panicking() {
            self.print_logs();
        }
        teardown::node(&self.0);
    }
}

impl Host {
    /// Brings up containerd and the driver.
    pub async fn start(options: &Options) -> Result<Self> {
        let cache = Cache::find()?;
        let folder = Folder::new()?;
        let driver = Driver::start(&folder, options.driver)?;
        let vcuda = Vcuda::new(&folder, driver.root())?;
        if options.nri_by_containerd {
            vcuda.let_containerd_start_it(&folder)?;
        }
        let containerd = Containerd::start(&cache, options.line, &folder, options.containerd).await?;
        let host = Self { containerd, driver, vcuda, cache, folder };
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
