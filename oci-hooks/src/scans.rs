//! What was found in whole roots, kept so that the next look at the same files costs next to nothing.
//!
//! A container's root is an overlay. Its lower layers are its image's: unpacked once, never changed after. What was
//! found in it is kept under the layers' identity, and holds for every container of that image, as long as its own
//! layer, the upper one, brings no program or library and hides no file. The guard's look at an image that the node
//! has seen is then a few `stat`s.
//!
//! What was found is judged against a shim and a driver. That judgement is remembered as well, with all that it came from,
//! whatever it was: an image that is refused comes again and again, since kubelet tries it for ever.
//!
//! It is a memory: what is missing, broken or not to be trusted is looked at anew. It knows nothing of shares.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, BufRead, BufReader},
    ops::ControlFlow,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, Stat, flock},
    io::Errno,
};
use serde::{Deserialize, Serialize};

use crate::{
    compat::{
        Finding,
        check::{self, Limits, Unseen},
        files::{Trouble, host_read},
        survey::Survey,
    },
    rootfs::{Entry, Rootfs},
    verdicts::{make_room, put},
};

/// A file has below 100 KiB, of the largest images.
const MAX_BYTES: u64 = 16 << 20;

/// A judgement has a few KiB, most of it the names of layers.
const MAX_JUDGEMENT_BYTES: u64 = 256 << 10;

/// Layers of an image; Docker allows 127.
const MAX_LAYERS: usize = 500;

/// What a container's own layer may have before it counts as changed: at its start there are some mount points.
const MAX_OWN_FILES: u64 = 2_000;

/// How often it is tried to have the turn.
const EACH_TRY: Duration = Duration::from_millis(5);

/// Raised when the same files would be understood or judged in another way.
pub const VERSION: u32 = 1;

/// Everything that was found in whole roots on this node.
#[derive(Clone, Debug)]
pub struct Scans {
    folder: PathBuf,
    /// What images were judged to be.
    judged: PathBuf,
    /// Mounts as the process sees them whose root is looked at.
    mountinfo: PathBuf,
}

/// A file of the store.
#[derive(Serialize, Deserialize)]
struct Kept {
    version: u32,
    /// Whose it is, in full: the file's name is a hash only.
    layers: Vec<Layer>,
    survey: Survey,
}

/// A lower layer of an overlay, and which folder it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Layer {
    path: PathBuf,
    device: u64,
    inode: u64,
    /// When it was unpacked, in nanoseconds since 1970.
    changed: i128,
}

/// The layers of an image, as they lie on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layers(Vec<Layer>);

/// Which file it is, and in which state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    /// When it, or anything about it, was last changed (`st_ctime`), in nanoseconds since 1970.
    changed: i128,
}

/// All that an image is judged by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grounds {
    /// How files are understood.
    pub version: u32,
    /// The image.
    pub layers: Layers,
    /// The shim.
    pub shim: Stamp,
    /// The driver's libcuda and NVML, as the container has them.
    pub driver: [Option<Stamp>; 2],
    /// Version of the driver.
    pub driver_version: String,
    /// Compute capabilities of the GPUs.
    pub gpus: BTreeSet<u32>,
    /// The program that is started.
    pub started: Option<PathBuf>,
}

/// A file of the store: what was found wrong with an image, and what it was judged by.
#[derive(Serialize, Deserialize)]
struct Judgement {
    grounds: Grounds,
    findings: Vec<Finding>,
}

/// What is in a root.
#[derive(Clone, Debug)]
pub struct Scanned {
    /// What was found.
    pub survey: Survey,
    /// What was not seen.
    pub unseen: Unseen,
    /// The image's layers, where the root is an overlay that is as it was made.
    pub layers: Option<Layers>,
}

/// What an overlay is made of.
#[derive(Debug, PartialEq, Eq)]
struct Overlay {
    lower: Vec<PathBuf>,
    upper: Option<PathBuf>,
}

impl Layers {
    /// A name for them that is the same for every container of the image on this node.
    pub fn id(&self) -> String {
        let mut hasher = DefaultHasher::new();
        (VERSION, &self.0).hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    }
}

impl Stamp {
    /// Of the file that says this about itself.
    pub fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            changed: nanoseconds(stat.st_ctime, i64::try_from(stat.st_ctime_nsec).unwrap_or(0)),
        }
    }

    /// Whether its last change was before this time since 1970, by a clock that was right then.
    pub fn changed_before(&self, time: Duration) -> bool {
        u128::try_from(self.changed).is_ok_and(|changed| changed < time.as_nanos())
    }
}

fn nanoseconds(seconds: i64, rest: i64) -> i128 {
    i128::from(seconds) * 1_000_000_000 + i128::from(rest)
}

impl Scans {
    /// The store below the state folder.
    pub fn below(state: &Path) -> Self {
        Self {
            folder: state.join("scans"),
            judged: state.join("judged"),
            mountinfo: "/proc/self/mountinfo".into(),
        }
    }

    /// The same for roots of the process `pid`.
    pub fn of_process(&self, pid: u32) -> Self {
        Self { mountinfo: format!("/proc/{pid}/mountinfo").into(), ..self.clone() }
    }

    /// What is in `rootfs`, from memory where it is known. What was seen whole is remembered.
    ///
    /// # Errors
    /// The root cannot be read at all.
    pub fn survey(
        &self,
        rootfs: &Rootfs,
        limits: Limits,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Scanned, Trouble> {
        self.survey_of(rootfs, self.layers(rootfs), limits, progress)
    }

    /// The same for a root of which [`Scans::layers`] are told.
    ///
    /// # Errors
    /// The root cannot be read at all.
    pub fn survey_of(
        &self,
        rootfs: &Rootfs,
        layers: Option<Layers>,
        limits: Limits,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Scanned, Trouble> {
        if let Some(survey) = layers.as_ref().and_then(|layers| self.known(layers)) {
            return Ok(Scanned { survey, unseen: Unseen::None, layers });
        }
        // Many pods of a new image start at once: one looks, the others take what it found.
        let _turn = layers.as_ref().and_then(|_| self.turn(limits.time));
        if let Some(survey) = layers.as_ref().and_then(|layers| self.known(layers)) {
            return Ok(Scanned { survey, unseen: Unseen::None, layers });
        }
        let (survey, unseen) = check::survey(rootfs, limits, progress)?;
        if let (Unseen::None, true, Some(layers)) = (&unseen, survey.is_whole(), &layers) {
            // A full disk costs the next look its time, no more.
            let _ = self.keep(layers, &survey);
        }
        Ok(Scanned { survey, unseen, layers })
    }

    /// The layers of which `rootfs` is made, if nothing in it but them can matter.
    pub fn layers(&self, rootfs: &Rootfs) -> Option<Layers> {
        let overlay = Overlay::find(rootfs.mount()?, BufReader::new(File::open(&self.mountinfo).ok()?))?;
        if overlay.lower.len() > MAX_LAYERS || !overlay.upper.is_none_or(|upper| is_harmless(&upper)) {
            return None;
        }
        let layer = |path: PathBuf| {
            let stat = fs::symlink_metadata(&path).ok().filter(fs::Metadata::is_dir)?;
            let changed = nanoseconds(stat.ctime(), stat.ctime_nsec());
            Some(Layer { device: stat.dev(), inode: stat.ino(), changed, path })
        };
        overlay.lower.into_iter().map(layer).collect::<Option<_>>().map(Layers)
    }

    /// What was found in these layers.
    pub fn known(&self, layers: &Layers) -> Option<Survey> {
        let bytes = host_read(&self.path(&layers.id()), MAX_BYTES).ok()?;
        let kept: Kept = serde_json::from_slice(&bytes).ok()?;
        (kept.version == VERSION && kept.layers == layers.0).then_some(kept.survey)
    }

    /// What was found in the layers that have this name.
    pub fn by_id(&self, id: &str) -> Option<Survey> {
        // A name in the folder and nothing else.
        let plain = !id.is_empty() && id.bytes().all(|c| c.is_ascii_hexdigit());
        let bytes = host_read(&self.path(id), MAX_BYTES).ok().filter(|_| plain)?;
        let kept: Kept = serde_json::from_slice(&bytes).ok()?;
        (kept.version == VERSION).then_some(kept.survey)
    }

    /// What was found wrong with an image when it was judged by just this: nothing, where it fits.
    pub fn judgement(&self, grounds: &Grounds) -> Option<Vec<Finding>> {
        let bytes = host_read(&self.judgement_path(&grounds.layers), MAX_JUDGEMENT_BYTES).ok()?;
        let kept: Judgement = serde_json::from_slice(&bytes).ok()?;
        (kept.grounds == *grounds).then_some(kept.findings)
    }

    /// Remembers what was found wrong with an image. What is too large to be an honest image's is left out, and found anew
    /// each time.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn note_judgement(&self, grounds: Grounds, findings: Vec<Finding>) -> io::Result<()> {
        let path = self.judgement_path(&grounds.layers);
        let bytes = serde_json::to_vec(&Judgement { grounds, findings })?;
        if bytes.len() as u64 > MAX_JUDGEMENT_BYTES {
            return Ok(());
        }
        fs::create_dir_all(&self.judged)?;
        make_room(&self.judged)?;
        put(&path, &bytes)
    }

    fn judgement_path(&self, layers: &Layers) -> PathBuf {
        self.judged.join(format!("{}.json", layers.id()))
    }

    /// Waits until nobody else on this node looks at an image, at most `within`; then it is done without.
    fn turn(&self, within: Duration) -> Option<File> {
        fs::create_dir_all(&self.folder).ok()?;
        let file =
            File::options().create(true).truncate(false).write(true).open(self.folder.join("turn")).ok()?;
        let start = Instant::now();
        while flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::AGAIN)
            && start.elapsed() < within
        {
            thread::sleep(EACH_TRY);
        }
        Some(file)
    }

    /// What is too large to be read again, and no honest image's, is left out.
    fn keep(&self, layers: &Layers, survey: &Survey) -> io::Result<()> {
        let kept = Kept { version: VERSION, layers: layers.0.clone(), survey: survey.clone() };
        let bytes = serde_json::to_vec(&kept)?;
        if bytes.len() as u64 > MAX_BYTES {
            return Ok(());
        }
        fs::create_dir_all(&self.folder)?;
        make_room(&self.folder)?;
        put(&self.path(&layers.id()), &bytes)
    }

    fn path(&self, id: &str) -> PathBuf {
        self.folder.join(format!("{id}.json"))
    }
}

/// Whether the upper layer of an overlay leaves what was found in the lower ones as it is: it hides nothing, and
/// brings neither program nor library.
fn is_harmless(upper: &Path) -> bool {
    let mut files = 0;
    let mut harmless = true;
    let mut visit = |entry: &Entry<'_>| {
        files += 1;
        harmless = files <= MAX_OWN_FILES && !is_elf(entry);
        if harmless { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    };
    let left = Rootfs::open(upper).and_then(|upper| upper.walk_upper(&mut visit));
    harmless && left.is_ok_and(|(left, hides)| !hides && left.unreadable + left.too_deep == 0)
}

/// Whether it begins like a program or library; one that cannot be read may be one.
fn is_elf(entry: &Entry<'_>) -> bool {
    use std::os::unix::fs::FileExt;
    let mut magic = [0; 4];
    match entry.open() {
        Ok(file) => file.read_at(&mut magic, 0).is_err() || magic == *b"\x7fELF",
        Err(_) => true,
    }
}

impl Overlay {
    /// The overlay that is the mount `id`, from a `mountinfo` (proc_pid_mountinfo(5)), of which no more is read than its
    /// line needs: the kernel writes a line as it is read. A part of an overlay is none.
    fn find(id: u64, mut mountinfo: impl BufRead) -> Option<Self> {
        let id = format!("{id} ");
        let mut line = String::new();
        while !line.starts_with(&id) {
            line.clear();
            if mountinfo.read_line(&mut line).ok()? == 0 {
                return None;
            }
        }
        let line = line.trim_end_matches('\n');
        let (mount, file_system) = line.split_once(" - ")?;
        let root = mount.split(' ').nth(3)?;
        let mut words = file_system.split(' ');
        if root != "/" || words.next()? != "overlay" {
            return None;
        }
        let options = words.nth(1)?;
        // Names that would have to be escaped: no snapshotter has such.
        if options.contains('\\') {
            return None;
        }
        let mut lower = Vec::new();
        let mut upper = None;
        for option in options.split(',') {
            match option.split_once('=') {
                Some(("lowerdir" | "lowerdir+", paths)) => {
                    lower.extend(paths.split(':').filter(|path| !path.is_empty()).map(PathBuf::from));
                }
                Some(("upperdir", path)) => upper = Some(PathBuf::from(path)),
                _ => {}
            }
        }
        // containerd shortens long lists: paths from the folder of all snapshots, as is the upper one's
        // (`compactLowerdirOption`).
        let snapshots = upper.as_deref().and_then(Path::parent).and_then(Path::parent).map(Path::to_owned);
        for path in &mut lower {
            if path.is_relative() {
                *path = snapshots.as_ref()?.join(&path);
            }
        }
        (!lower.is_empty() && lower.iter().chain(&upper).all(|path| path.is_absolute()))
            .then_some(Self { lower, upper })
    }
}

#[cfg(test)]
#[path = "scans/tests.rs"]
mod tests;
