//! One image, checked whole: what it starts, its C library, all its files, against a shim and a driver. The report
//! says what was found and how much was looked at; what could not be looked at makes it open, never fit.

use std::{
    collections::BTreeSet,
    ops::ControlFlow,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use region::place;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::{
    Finding, Severity,
    cuda::{Covered, Driver},
    elf::{Depth, Version},
    files::{Facts, Files, Trouble, host_file},
    loader::{By, Found, Loader},
    start::{self, Command, Shim},
    survey::{Against, Survey},
};
use crate::{
    rootfs::{Entry, Rootfs},
    scans::Scans,
};

/// What an image is checked against.
#[derive(Clone, Debug)]
pub struct Node {
    /// What the shim asks.
    pub shim: Shim,
    /// What the shim covers.
    pub covered: Covered,
    /// The driver, where one is known.
    pub driver: Option<Driver>,
    /// Its GPUs, by compute capability without the dot (80 is 8.0), where they are known.
    pub gpus: BTreeSet<u32>,
}

/// How an image fares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It runs under a share.
    Fits,
    /// It would die, or run unenforced.
    DoesNotFit,
    /// Too little could be seen.
    Unknown,
}

/// What a check found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What was checked.
    pub subject: String,
    /// How it fares.
    pub verdict: Verdict,
    /// Version of the driver that it was checked against.
    pub driver: Option<String>,
    /// Newest CUDA that the driver serves.
    pub driver_cuda: Option<String>,
    /// Oldest glibc that the shim runs on.
    pub shim_glibc: String,
    /// CUDA versions of the runtimes in it.
    pub runtimes: Vec<String>,
    /// What was found, the worst first.
    pub findings: Vec<Finding>,
    /// Regular files seen.
    pub files: u64,
    /// Programs and libraries among them.
    pub elf: u64,
    /// Bytes of the files that were opened.
    pub bytes: u64,
    /// Why it was not seen whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub incomplete: Option<String>,
}

/// How far a check goes before it says that it does not know.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Files.
    pub files: u64,
    /// Time.
    pub time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { files: 2_000_000, time: Duration::from_secs(300) }
    }
}

impl Node {
    /// The shim at `shim`, without a driver.
    ///
    /// # Errors
    /// The shim cannot be read.
    pub fn with_shim(shim: &Path) -> Result<Self, Trouble> {
        let facts = host_file(shim, Depth::Whole)?;
        let elf = facts.elf().ok_or_else(|| Trouble(format!("{}: no library", shim.display())))?;
        Ok(Self { shim: Shim::of(elf), covered: Covered::of(&facts), driver: None, gpus: BTreeSet::new() })
    }

    /// The shim as it is built where no file of it is at hand: for this machine, glibc 2.17, which a test of the
    /// shim holds it to. What it covers is not known then.
    pub fn without_shim() -> Self {
        let machine = if cfg!(target_arch = "aarch64") {
            goblin::elf::header::EM_AARCH64
        } else {
            goblin::elf::header::EM_X86_64
        };
        Self {
            shim: Shim { machine, glibc: Version(2, 17, 0) },
            covered: Covered::default(),
            driver: None,
            gpus: BTreeSet::new(),
        }
    }
}

/// What was seen of an image, to be judged against any number of nodes.
pub struct Seen<F> {
    /// Its files.
    pub files: F,
    /// What was checked.
    pub subject: String,
    /// What it starts.
    pub command: Command,
    survey: Survey,
    unseen: Unseen,
}

/// What was not seen of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unseen {
    /// Nothing.
    None,
    /// Some files; a single one can still be looked at by its path.
    Some(String),
    /// So much that nothing can be said of what is there and what is missing.
    Most(String),
}

impl<F: Files> Seen<F> {
    pub(super) fn new(files: F, subject: String, command: Command, survey: Survey, unseen: Unseen) -> Self {
        Self { files, subject, command, survey, unseen }
    }

    /// Says what it means on `node`.
    pub fn report(&self, node: &Node) -> Report {
        let (mut incomplete, most) = match &self.unseen {
            Unseen::None => (None, false),
            Unseen::Some(reason) => (Some(reason.clone()), false),
            Unseen::Most(reason) => (Some(reason.clone()), true),
        };
        let mut findings = Vec::new();
        if !most {
            match start::judge(&self.files, &self.command, node.shim) {
                Ok(found) => findings = found,
                Err(Trouble(reason)) => {
                    incomplete.get_or_insert(reason);
                }
            }
            let driver = node.driver.as_ref();
            let started = start::started(&self.files, &self.command);
            let (covered, machine) = (&node.covered, node.shim.machine);
            let against = Against { driver, covered, machine, started: started.as_deref(), gpus: &node.gpus };
            findings.extend(self.survey.judge(against));
            findings.extend(loaded_first(&self.files, &self.command, started.as_deref(), &self.survey, node));
        }
        report(&self.survey, self.subject.clone(), node, findings, incomplete)
    }
}

/// What is known of an image without its files: what was found in it once, which program was `started` from it, and why
/// it was refused then for a reason that no driver changes.
pub fn remembered(
    survey: &Survey,
    subject: String,
    started: Option<&Path>,
    refused: Option<String>,
    node: &Node,
) -> Report {
    let machine = node.shim.machine;
    let against =
        Against { driver: node.driver.as_ref(), covered: &node.covered, machine, started, gpus: &node.gpus };
    let mut findings = survey.judge(against);
    findings.extend(refused.map(|reason| {
        let why = "this node's guard found so at its last start, and no driver changes it";
        let remedy = "as it says; `vcuda-check image` on its file tells all that is in it";
        Finding::refuse("image-unfit", reason, why, remedy).at(started.unwrap_or(Path::new("/")))
    }));
    report(survey, subject, node, findings, None)
}

fn report(
    survey: &Survey,
    subject: String,
    node: &Node,
    mut findings: Vec<Finding>,
    incomplete: Option<String>,
) -> Report {
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    let refused = findings.iter().any(|finding| finding.severity == Severity::Refuse);
    let verdict = match (&incomplete, refused) {
        (_, true) => Verdict::DoesNotFit,
        (Some(_), false) => Verdict::Unknown,
        (None, false) if node.driver.is_none() && survey.has_cuda() => Verdict::Unknown,
        (None, false) => Verdict::Fits,
    };
    let mut runtimes: Vec<_> = survey.runtimes().map(|(_, cuda)| cuda).collect();
    runtimes.sort_unstable();
    runtimes.dedup();
    Report {
        subject,
        verdict,
        driver: node.driver.as_ref().map(|driver| driver.version.clone()),
        driver_cuda: node.driver.as_ref().map(|driver| driver.cuda.to_string()),
        shim_glibc: node.shim.glibc.to_string(),
        runtimes: runtimes.iter().map(ToString::to_string).collect(),
        findings,
        files: survey.files,
        elf: survey.elf,
        bytes: survey.bytes,
        incomplete,
    }
}

/// Looks at all of the root folder `rootfs`, from which `command` is started. `scans` may know it already;
/// `progress` is told how many files were seen, now and then.
///
/// # Errors
/// The root cannot be read at all.
pub fn rootfs(
    rootfs: Rootfs,
    subject: String,
    command: Command,
    limits: Limits,
    scans: Option<&Scans>,
    progress: &mut dyn FnMut(u64),
) -> Result<Seen<Rootfs>, Trouble> {
    let (survey, unseen) = match scans {
        Some(scans) => {
            let scanned = scans.survey(&rootfs, limits, progress)?;
            (scanned.survey, scanned.unseen)
        }
        None => survey(&rootfs, limits, progress)?,
    };
    Ok(Seen::new(rootfs, subject, command, survey, unseen))
}

/// Looks at all of the root folder `rootfs`, and says what was left out.
///
/// # Errors
/// The root cannot be read at all.
pub fn survey(
    rootfs: &Rootfs,
    limits: Limits,
    progress: &mut dyn FnMut(u64),
) -> Result<(Survey, Unseen), Trouble> {
    let start = Instant::now();
    let mut survey = Survey::default();
    let mut cut = false;
    let mut visit = |entry: &Entry<'_>| {
        take(&mut survey, entry);
        if survey.files.is_multiple_of(256) {
            progress(survey.files);
            if survey.files >= limits.files || start.elapsed() > limits.time {
                cut = true;
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    };
    let left = rootfs.walk(&mut visit)?;
    let unseen = if cut {
        let (files, time) = (limits.files, limits.time.as_secs());
        Unseen::Some(format!("it has more than {files} files, or takes more than {time} s"))
    } else if left.unreadable + left.too_deep > 0 {
        let (unreadable, too_deep) = (left.unreadable, left.too_deep);
        Unseen::Some(format!("{unreadable} of its folders cannot be read, {too_deep} lie too deep"))
    } else {
        Unseen::None
    };
    Ok((survey, unseen))
}

fn take(survey: &mut Survey, entry: &Entry<'_>) {
    if !may_be_elf(entry.path) {
        return survey.pass_by();
    }
    let facts = match entry.open() {
        // A file of the node or of a volume on its place: none of the image's.
        Err(Errno::XDEV) => return survey.pass_by(),
        opened => opened.map_err(|reason| reason.to_string()),
    };
    match facts.and_then(|file| Facts::of(&file, Depth::Symbols).map_err(|Trouble(reason)| reason)) {
        Ok(facts) => survey.take(entry.path, &facts),
        Err(reason) => survey.take_unreadable(entry.path, reason),
    }
}

/// Whether a file's name lets it be a program or library. Most files of an image are text by their name; to open
/// each would take most of the time.
pub(crate) fn may_be_elf(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extension.is_none_or(|extension| !TEXT_OR_DATA.contains(&extension))
}

/// Endings that no loader, kernel or `dlopen` is ever given.
#[rustfmt::skip]
const TEXT_OR_DATA: &[&str] = &[
    "py", "pyc", "pyi", "pyx", "pxd", "pl", "pm", "rb", "js", "ts", "map", "css", "html", "htm", "xml", "xsl", "json",
    "yaml", "yml", "toml", "ini", "cfg", "conf", "list", "md5sums", "txt", "md", "rst", "tex", "csv", "tsv", "log",
    "h", "hpp", "hh", "hxx", "cuh", "c", "cc", "cpp", "cxx", "cu", "inl", "inc", "f", "f90", "go", "rs", "java",
    "cmake", "pc", "la", "m4", "ac", "am", "po", "mo", "gmo", "pot", "png", "jpg", "jpeg", "gif", "svg", "ico", "ttf",
    "woff", "woff2", "afm", "pdf", "gz", "xz", "bz2", "zst", "zip", "whl", "jar", "tgz", "npy", "npz", "parquet", "pt",
    "safetensors", "onnx", "pem", "crt", "service", "timer", "socket", "rules",
];

/// What decides who is loaded first.
fn loaded_first<F: Files + ?Sized>(
    files: &F,
    command: &Command,
    started: Option<&Path>,
    survey: &Survey,
    node: &Node,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let path = Path::new("/etc/ld.so.preload");
    if let Ok(Some(list)) = files.read(path, 64 << 10) {
        let list = String::from_utf8_lossy(&list);
        let own = list.split_whitespace().filter(|library| !is_shim(library));
        let list = own.take(5).collect::<Vec<_>>().join(" ");
        if !list.is_empty() {
            findings.push(
                Finding::info(
                    "preload-present",
                    format!("the image preloads libraries: {list}"),
                    "they are kept, and loaded after the shim",
                    "nothing",
                )
                .at(path),
            );
        }
    }
    if let Some(preload) = command.variable("LD_PRELOAD") {
        let own = preload.split([':', ' ']).filter(|library| !library.is_empty() && !is_shim(library));
        let preload: String = own.collect::<Vec<_>>().join(":").chars().take(200).collect();
        if !preload.is_empty() {
            findings.push(
                Finding::info(
                    "preload-env",
                    format!("LD_PRELOAD is set: {preload}"),
                    "it is kept; the shim is put before it",
                    "nothing",
                )
                .at(started.unwrap_or(Path::new("/"))),
            );
        }
    }
    let loader =
        Loader::new(files, node.shim.machine, command.variable("LD_LIBRARY_PATH").unwrap_or_default());
    if let Some(Trouble(reason)) = loader.cache_trouble() {
        findings.push(
            Finding::warn(
                "ldcache-broken",
                format!("the loader's cache cannot be read: {reason}"),
                "libraries outside of the default folders are not found",
                "run ldconfig when the image is built",
            )
            .at(Path::new(super::loader::CACHE)),
        );
    }
    let usual = loader.find(LIBCUDA, None).ok().flatten();
    // Where a container has its share already, the shim is in the driver's place.
    let linking = |path: &Path| files.look(path, Depth::Linking).ok().flatten();
    let shim = linking(Path::new(place::SHIM));
    let is_ours = |found: &Found| shim.is_some() && linking(&found.path) == shim;
    if let Some(found) = usual.as_ref().filter(|found| !is_ours(found)) {
        findings.push(libcuda_first(found, None));
    }
    // What is started, and who is linked to the driver or runs on it: each may have a way of its own.
    let mut told: BTreeSet<PathBuf> = usual.iter().map(|found| found.path.clone()).collect();
    for asker in started.into_iter().chain(survey.users()).take(ASKERS) {
        let Ok(Some(facts)) = files.look(asker, Depth::Linking) else { continue };
        let Some(elf) = facts.elf() else { continue };
        let Ok(Some(found)) = loader.find(LIBCUDA, Some((asker, elf))) else { continue };
        if matches!(found.by, By::Rpath | By::Runpath) && told.insert(found.path.clone()) {
            findings.push(libcuda_first(&found, Some(asker)));
        }
    }
    if let Ok(Some(found)) = loader.find_after_ldconfig(LIBCUDA)
        && told.insert(found.path.clone())
    {
        findings.push(
            Finding::info(
                "libcuda-configured",
                "ld.so.conf names the folder of the image's own libcuda.so.1, and the loader's cache does not know it",
                "once ldconfig runs in the container it is found; with a share the shim is preloaded under that name",
                "remove the driver's libraries (cuda-compat, libcuda1) from the image, or the folder from ld.so.conf.d",
            )
            .at(&found.path),
        );
    }
    findings
}

/// Whether a name that is preloaded is the shim's: a container with a share has it there by us.
fn is_shim(library: &str) -> bool {
    library == place::SHIM
}

/// By this name programs ask for the driver.
const LIBCUDA: &str = "libcuda.so.1";

/// Files whose own search paths are followed.
const ASKERS: usize = 64;

fn libcuda_first(found: &Found, asker: Option<&Path>) -> Finding {
    let by = match found.by {
        By::LibraryPath => "LD_LIBRARY_PATH",
        By::Cache => "the loader's cache",
        By::Default => "a default folder",
        By::Rpath => "RPATH",
        By::Runpath => "RUNPATH",
    };
    let (by, who) = match asker {
        Some(asker) => (format!("the {by} of {}", asker.display()), "it"),
        None => (by.to_owned(), "programs"),
    };
    Finding::info(
        "libcuda-first",
        format!("without the shim, {by} would make {who} take the image's own libcuda.so.1"),
        "with a share the shim is preloaded under that name, so this one is not taken",
        "nothing for shares; without them, the node's driver and this file must be of one version",
    )
    .at(&found.path)
}
