//! What CUDA asks of a node: which runtimes an image brings, shared or linked into something else, which driver
//! they need, and what a driver offers. Told from names alone: a runtime asks the driver for its functions by
//! name, so the names in it say which line of CUDA it is of, and those that a driver exports say which it serves.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use serde::{Deserialize, Serialize};

use super::{
    elf::{Depth, Elf},
    files::{Facts, Trouble},
    text::Texts,
};

/// What a driver function does to what a share limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It takes device memory.
    Takes,
    /// It gives device memory back.
    Gives,
    /// It launches work.
    Launches,
    /// Neither.
    None,
}

/// One function of the driver library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function {
    /// CUDA that brought it.
    pub introduced: Cuda,
    /// What it does.
    pub effect: Effect,
}

/// A version of CUDA as its API counts: 12040 is 12.4.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Cuda(pub u32);

impl Cuda {
    /// 12 of 12.4.
    pub fn major(self) -> u32 {
        self.0 / 1000
    }

    /// Oldest driver, by the number of its branch, that runs programs of this major version at all: NVIDIA's
    /// minor version compatibility.
    pub fn oldest_driver(self) -> Option<u32> {
        match self.major() {
            11 => Some(450),
            12 => Some(525),
            13 => Some(580),
            _ => None,
        }
    }
}

impl fmt::Display for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major(), self.0 % 1000 / 10)
    }
}

/// All functions known, by name.
fn functions() -> &'static BTreeMap<&'static str, Function> {
    static TABLE: OnceLock<BTreeMap<&'static str, Function>> = OnceLock::new();
    TABLE.get_or_init(|| {
        // The shim's own table: symbol, CUDA version that brought it, stream, kind, action.
        include_str!("../../../vcuda-preload/table/cuda.tsv")
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| {
                let columns: Vec<&'static str> = line.split('\t').collect();
                let [name, since, _, _, action] = columns[..] else { return None };
                let effect = match action {
                    "take" => Effect::Takes,
                    "give" => Effect::Gives,
                    "pace" => Effect::Launches,
                    _ => Effect::None,
                };
                // No header tells of some: they are as old as any.
                Some((name, Function { introduced: Cuda(since.parse().unwrap_or(0)), effect }))
            })
            .collect()
    })
}

/// The driver function of this name, where it is one known.
pub fn function(name: &str) -> Option<Function> {
    functions().get(name).copied()
}

/// Names that every runtime of a line asks for, from its first release on, and no runtime of an earlier line does.
const ASKED_BY_13: &[&str] = &[
    "cuCtxGetDevice_v2",
    "cuCtxSynchronize_v2",
    "cuDeviceGetHostAtomicCapabilities",
    "cuLogsCurrent",
    "cuMemGetDefaultMemPool",
    "cuMemPrefetchBatchAsync",
    "cuMemcpyBatchAsync_v2",
];
const ASKED_BY_12: &[&str] = &[
    "cuGetProcAddress_v2",
    "cuGraphExecGetFlags",
    "cuKernelGetFunction",
    "cuKernelSetCacheConfig",
    "cuLibraryGetManaged",
    "cuLibraryLoadFromFile",
    "cuStreamGetId",
];
const ASKED_BY_11: &[&str] =
    &["cuGetProcAddress", "cuMemAllocAsync", "cuMemPoolCreate", "cuGraphInstantiateWithFlags"];

/// A CUDA runtime that an image brings or needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Runtime {
    /// The oldest CUDA that it can be of.
    pub cuda: Cuda,
    /// How a file has to do with it.
    pub how: How,
}

/// How a file has to do with a runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum How {
    /// It is `libcudart.so`.
    Shared,
    /// It has the runtime linked into it.
    Static,
    /// It needs `libcudart.so` of this line.
    Needs,
}

impl Runtime {
    /// The runtime that a file is, holds or needs.
    pub fn of(elf: &Elf, texts: Option<&Texts>) -> Option<Self> {
        // A driver answers to all those names, and asks for none.
        if is_libcuda(elf) {
            return None;
        }
        let named = |name: &str| name.strip_prefix("libcudart.so.")?.split('.').next()?.parse::<u32>().ok();
        let texts = texts.filter(|texts| texts.libcuda);
        let shared = elf.soname.as_deref().and_then(named).map(|major| (major, How::Shared));
        let linked = || texts.and_then(line_asked_for).map(|major| (major, How::Static));
        let needed = || elf.needed.iter().find_map(|name| named(name)).map(|major| (major, How::Needs));
        let (major, how) = shared.or_else(linked).or_else(needed).filter(|(major, _)| *major < 1_000)?;
        let newest = texts
            .into_iter()
            .flat_map(|texts| &texts.names)
            .filter_map(|name| function(name))
            .map(|function| function.introduced)
            .filter(|cuda| cuda.major() == major && how != How::Needs)
            .max();
        Some(Self { cuda: newest.unwrap_or(Cuda(major * 1000)), how })
    }
}

fn line_asked_for(texts: &Texts) -> Option<u32> {
    let asks = |names: &[&str]| names.iter().all(|name| texts.names.contains(*name));
    [(13, ASKED_BY_13), (12, ASKED_BY_12), (11, ASKED_BY_11)]
        .into_iter()
        .find_map(|(major, names)| asks(names).then_some(major))
}

/// Whether a file is a driver's libcuda, or stands in its place.
pub fn is_libcuda(elf: &Elf) -> bool {
    elf.soname.as_deref().is_some_and(|name| name.starts_with("libcuda.so"))
        && elf.exports.iter().any(|name| name == "cuInit")
}

/// Whether a file is a driver's NVML, or stands in its place.
pub fn is_nvml(elf: &Elf) -> bool {
    elf.soname.as_deref().is_some_and(|name| name.starts_with("libnvidia-ml.so"))
}

/// A driver, as far as programs see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Driver {
    /// Version, such as `550.163.01`, from its files' names.
    pub version: String,
    /// Newest CUDA that it serves.
    pub cuda: Cuda,
    /// Functions that its libcuda and its NVML export.
    pub exports: BTreeSet<String>,
}

/// Folders below a driver's root, besides the loader's, that its libraries are in; Debian's first.
const DRIVER_FOLDERS: &[&str] = &[
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "lib/x86_64-linux-gnu",
    "lib64",
    "usr/lib/aarch64-linux-gnu",
    "usr/local/lib",
    ".",
];

impl Driver {
    /// The driver below `root`: where `folder`, a path in it, is given, only there.
    ///
    /// # Errors
    /// There is none, or its files cannot be read.
    pub fn find(root: &Path, folder: Option<&Path>) -> Result<Self, Trouble> {
        match fs::metadata(root) {
            Ok(metadata) if metadata.is_dir() => {}
            Ok(_) => return Err(no_root(root, "it is no folder")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(no_root(root, "there is no such folder"));
            }
            Err(error) => return Err(no_root(root, &error.to_string())),
        }
        let named = folder.map(|folder| root.join(folder.strip_prefix("/").unwrap_or(folder)));
        let folders: Vec<PathBuf> = match named {
            Some(folder) => vec![folder],
            None => DRIVER_FOLDERS.iter().map(|folder| root.join(folder)).collect(),
        };
        for folder in &folders {
            if let Some((version, libcuda)) = versioned(folder, "libcuda.so.") {
                let nvml = folder.join(format!("libnvidia-ml.so.{version}"));
                return Self::read(version, &libcuda, &nvml);
            }
        }
        Err(no_root(root, "no libcuda.so.<version> in it"))
    }

    fn read(version: String, libcuda: &Path, nvml: &Path) -> Result<Self, Trouble> {
        let library = |path: &Path| {
            let named = |reason: String| Trouble(format!("{}: {reason}", path.display()));
            let file = File::open(path).map_err(|error| named(error.to_string()))?;
            Elf::read(&file, Depth::Symbols).map_err(|error| named(error.to_string()))
        };
        // A driver without NVML is incomplete and still runs CUDA.
        Ok(Self::of(version, library(libcuda)?, library(nvml).ok()))
    }

    /// The driver of which these are the libraries.
    pub fn of(version: String, libcuda: Elf, nvml: Option<Elf>) -> Self {
        let mut exports: BTreeSet<String> = libcuda.exports.into_iter().collect();
        let cuda = exports.iter().filter_map(|name| function(name)).map(|function| function.introduced).max();
        exports.extend(nvml.map(|nvml| nvml.exports).unwrap_or_default());
        Self { version, cuda: cuda.unwrap_or_default(), exports }
    }

    /// Whether it answers to a function asked for by its plain name, in any version (`cuGetProcAddress`).
    pub fn answers(&self, name: &str) -> bool {
        self.exports.contains(name)
            || (2..=4).any(|version| self.exports.contains(&format!("{name}_v{version}")))
    }
}

fn no_root(root: &Path, reason: &str) -> Trouble {
    Trouble(format!("{}: {reason}; name the root of an installed driver", root.display()))
}

/// The file `<prefix><version>` in `folder`, with a version of digits and dots that has a dot: the file itself, not
/// the link `libcuda.so.1`.
fn versioned(folder: &Path, prefix: &str) -> Option<(String, PathBuf)> {
    let mut found: Vec<(String, PathBuf)> = fs::read_dir(folder)
        .ok()?
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let version = name.strip_prefix(prefix)?;
            let plain = version.contains('.') && version.bytes().all(|c| c.is_ascii_digit() || c == b'.');
            plain.then(|| (version.to_owned(), entry.path()))
        })
        .collect();
    found.sort();
    found.pop()
}

/// What the shim covers: its exports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Covered(pub BTreeSet<String>);

impl Covered {
    /// What the shim, whose file says this, covers.
    pub fn of(facts: &Facts) -> Self {
        Self(facts.elf().map(|elf| elf.exports.iter().cloned().collect()).unwrap_or_default())
    }

    /// Whether a function that takes memory or launches work would pass the shim by.
    pub fn misses(&self, name: &str) -> bool {
        let limited = function(name)
            .is_some_and(|function| matches!(function.effect, Effect::Takes | Effect::Launches));
        limited && !self.0.contains(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(names: &[&[&str]]) -> Texts {
        let names = names.iter().flat_map(|names| names.iter().map(ToString::to_string)).collect();
        Texts { libcuda: true, names, ..Texts::default() }
    }

    #[test]
    fn the_table_of_functions_is_whole() {
        assert!(functions().len() > 700, "{}", functions().len());
        assert_eq!(function("cuMemAlloc_v2").unwrap().effect, Effect::Takes);
        assert_eq!(function("cuMemFree_v2").unwrap().effect, Effect::Gives);
        assert_eq!(function("cuLaunchKernel").unwrap().effect, Effect::Launches);
        assert_eq!(function("cuInit").unwrap().effect, Effect::None);
        for name in [ASKED_BY_11, ASKED_BY_12, ASKED_BY_13].concat() {
            assert!(function(name).is_some(), "{name}");
        }
    }

    #[test]
    fn the_line_of_a_runtime_shows_in_what_it_asks_for() {
        let static_in =
            |texts: &Texts| Runtime::of(&Elf::default(), Some(texts)).map(|runtime| runtime.cuda.major());
        assert_eq!(static_in(&texts(&[ASKED_BY_11])), Some(11));
        assert_eq!(static_in(&texts(&[ASKED_BY_11, ASKED_BY_12])), Some(12));
        assert_eq!(static_in(&texts(&[ASKED_BY_11, ASKED_BY_12, ASKED_BY_13])), Some(13));
        // XLA looks many functions up by itself, some of 13, and needs no 13.
        assert_eq!(static_in(&texts(&[ASKED_BY_11, ASKED_BY_12, &ASKED_BY_13[..3]])), Some(12));
        assert_eq!(static_in(&texts(&[&["cuInit"]])), None);
        assert_eq!(static_in(&Texts { libcuda: false, ..texts(&[ASKED_BY_11]) }), None);
    }

    #[test]
    fn a_shared_runtime_says_its_line_in_its_name() {
        let elf = Elf { soname: Some("libcudart.so.11.0".into()), ..Elf::default() };
        assert_eq!(Runtime::of(&elf, None), Some(Runtime { cuda: Cuda(11_000), how: How::Shared }));
        let newest = texts(&[&["cuCtxCreate_v4", "cuCtxSynchronize_v2"]]);
        let elf = Elf { soname: Some("libcudart.so.12".into()), ..Elf::default() };
        let cuda = Runtime::of(&elf, Some(&newest)).unwrap().cuda;
        assert_eq!((cuda.to_string().as_str(), cuda.oldest_driver()), ("12.5", Some(525)));
        let needs = Elf { needed: vec!["libm.so.6".into(), "libcudart.so.13".into()], ..Elf::default() };
        assert_eq!(Runtime::of(&needs, None), Some(Runtime { cuda: Cuda(13_000), how: How::Needs }));
    }

    #[test]
    fn what_takes_memory_and_is_not_exported_is_missed() {
        let covered = Covered(BTreeSet::from(["cuMemAlloc_v2".into()]));
        assert!(!covered.misses("cuMemAlloc_v2") && !covered.misses("cuInit") && !covered.misses("cuNew"));
        assert!(covered.misses("cuMemAllocManaged") && covered.misses("cuLaunchKernel"));
    }
}
