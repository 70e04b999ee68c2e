//! The NVIDIA driver's files below a driver root: which version it is, and what of it a container needs to compute.
//! Symlinks mean what they mean inside that root, so a driver container's root works like the host's. It looks at
//! files only: whether a GPU answers is NVML's to say.
//!
//! Libraries for graphics, video and displays are left out. All else comes along, also what a driver newer than this
//! list brings: CUDA needed `libnvidia-gpucomp` from one release to the next. OpenCL is for whole GPUs only: its
//! library opens the device nodes itself, past any limit that the CUDA driver's interface can hold (seen in 550).

mod finder;

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use goblin::elf::header::{EM_AARCH64, EM_X86_64};
use oci_hooks::{
    compat::elf::{Depth, Elf},
    ldcache::cache::{self, Cache},
    rootfs::{Rootfs, RootfsError},
};
use rustix::fs::FileType;
use thiserror::Error;

pub use finder::Finder;

/// Machine of the libraries that containers on this node load.
const MACHINE: u16 = if cfg!(target_arch = "x86_64") { EM_X86_64 } else { EM_AARCH64 };

/// Debian's name for the architecture.
const TRIPLET: &str = if cfg!(target_arch = "x86_64") { "x86_64-linux-gnu" } else { "aarch64-linux-gnu" };

/// Folders that distributions and NVIDIA's installer put the libraries into; `{}` is [`TRIPLET`].
const LIBRARY_FOLDERS: [&str; 9] = [
    "/usr/lib/{}",
    "/usr/lib64",
    "/lib/{}",
    "/lib64",
    "/usr/lib",
    "/usr/lib/{}/nvidia/current",
    "/usr/lib64/nvidia",
    "/usr/local/nvidia/lib64",
    "/usr/local/lib",
];

const PROGRAM_FOLDERS: [&str; 6] =
    ["/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/local/bin", "/usr/local/nvidia/bin"];

/// Where Debian keeps programs that its alternatives link into `/usr/bin`.
const PROGRAMS_BEHIND_LINKS: &str = "/usr/lib/nvidia/current";

const PROGRAMS: [&str; 5] = [
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
];

/// Sockets of the driver's daemons.
const SOCKETS: [&str; 2] = ["/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/socket"];

const FIRMWARE_FOLDERS: [&str; 2] = ["/lib/firmware/updates/nvidia", "/lib/firmware/nvidia"];

/// Libraries that are left out, by the beginning of their names: OpenGL, EGL and Vulkan, displays, ray tracing and
/// image scaling for games, video.
const LEFT_OUT: [&str; 32] = [
    "libEGL",
    "libGL",
    "libOpenGL",
    "libglxserver_nvidia",
    "libnvcuvid",
    "libnvidia-api",
    "libnvidia-egl",
    "libnvidia-encode",
    "libnvidia-fbc",
    "libnvidia-glcore",
    "libnvidia-glsi",
    "libnvidia-glvkspirv",
    "libnvidia-glx",
    "libnvidia-gtk",
    "libnvidia-ifr",
    "libnvidia-ngx",
    "libnvidia-opticalflow",
    "libnvidia-present",
    "libnvidia-rtcore",
    "libnvidia-cbl",
    "libnvidia-tls",
    "libnvidia-vkspirv",
    "libnvidia-vksc",
    "libnvidia-vulkan",
    "libnvidia-wayland",
    "libnvidia-wfb",
    "libnvidia-xcfg",
    "libnvoptix",
    "libvdpau",
    "libwfb",
    "libxnvctrl",
    "libXNVCtrl",
];

/// Libraries that reach the GPU without libcuda and yet are for computing, by the beginning of their names.
const PAST_CUDA: [&str; 2] = ["libnvidia-allocator", "libnvidia-opencl"];

/// Where OpenCL's loader reads which library to take.
const OPENCL_VENDOR: &str = "/etc/OpenCL/vendors/nvidia.icd";

const CUDA: &str = "libcuda.so.";
const NVML: &str = "libnvidia-ml.so.";

/// The driver's compiler for intermediate code, which has a version of its own in some releases.
const NVVM: &str = "libnvidia-nvvm";

/// A driver, as it lies below its root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// The driver root, on the host.
    pub root: PathBuf,
    /// Version, such as `550.163.01`: what the names of its libraries end with.
    pub version: String,
    /// Folder of its libraries, as containers see it, such as `/usr/lib/x86_64-linux-gnu`. `libcuda.so.<version>` and
    /// `libnvidia-ml.so.<version>` are both in it.
    pub library_dir: PathBuf,
    /// `libcuda.so.<version>`.
    pub cuda: Library,
    /// `libnvidia-ml.so.<version>`.
    pub nvml: Library,
    /// The other libraries that CUDA and its tools need, by name.
    pub libraries: Vec<Library>,
    /// Libraries that reach the GPU's memory by a way of their own: for containers with whole GPUs.
    pub past_cuda: Vec<Library>,
    /// The file that says where OpenCL is, which is one of these.
    pub opencl_vendor: Option<DriverFile>,
    /// Programs and firmware.
    pub files: Vec<DriverFile>,
    /// Sockets of daemons that run now.
    pub sockets: Vec<DriverFile>,
    /// Libraries that computing needs and containers on this node cannot load, as the root sees them, and why.
    pub left_out: BTreeMap<PathBuf, String>,
}

/// A library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// Its folder, as containers see it. Debian spreads a driver's libraries over two.
    pub folder: PathBuf,
    /// File name, such as `libcuda.so.550.163.01`.
    pub name: String,
    /// Name that programs ask for, such as `libcuda.so.1`; the file name where it has no other.
    pub soname: String,
    /// The file on the host, no symlink.
    pub host: PathBuf,
}

/// A file of the driver, at the same place in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFile {
    /// Where containers get it.
    pub path: PathBuf,
    /// The file on the host, no symlink.
    pub host: PathBuf,
}

/// Why there is no driver to be given to containers.
#[derive(Debug, Error)]
pub enum DriverError {
    /// The driver root cannot be looked at.
    #[error(
        "driver root {root}: {reason}; set paths.driverRoot in the node file to where the driver is installed"
    )]
    Root {
        /// The driver root.
        root: PathBuf,
        /// Why.
        reason: String,
    },
    /// There is no whole driver.
    #[error(
        "no NVIDIA driver below {root}: {tried}; install the driver, or set paths.driverRoot in the node file to where it is installed (/run/nvidia/driver for a driver container)"
    )]
    NotFound {
        /// The driver root.
        root: PathBuf,
        /// Where it was looked for, and what is wrong with what is there.
        tried: String,
    },
    /// A file of the driver cannot be looked at.
    #[error("driver root {root}: {reason}")]
    Failed {
        /// The driver root.
        root: PathBuf,
        /// Which file, and why.
        reason: RootfsError,
    },
}

impl Driver {
    /// Finds the driver below `root`, an absolute path on the host. Reads a few headers of each library, so it
    /// can be asked often.
    pub fn discover(root: &Path) -> Result<Self, DriverError> {
        Self::look_for(root).map(|(driver, _)| driver)
    }

    /// The driver, and every path at which libcuda was looked for, links not followed.
    fn look_for(root: &Path) -> Result<(Self, Vec<PathBuf>), DriverError> {
        let rootfs = Rootfs::open(root).map_err(|error| {
            let reason = match error {
                RootfsError::Root { reason, .. } => reason.to_string(),
                other => other.to_string(),
            };
            DriverError::Root { root: root.into(), reason }
        })?;
        let failed = |reason| DriverError::Failed { root: root.into(), reason };
        let search = Search { root, rootfs };
        let mut tried = Vec::new();
        let places = search.places().map_err(failed)?;
        for candidate in search.candidates(&places).map_err(failed)? {
            match search.core(&candidate).map_err(failed)? {
                Ok(core) => return Ok((search.rest(core).map_err(failed)?, places)),
                Err(reason) => tried.push(reason),
            }
        }
        let tried = if tried.is_empty() {
            let folders: Vec<_> = library_folders().map(|folder| folder.display().to_string()).collect();
            format!("no libcuda.so.1 in its /etc/ld.so.cache nor in {}", folders.join(", "))
        } else {
            tried.join(", ")
        };
        Err(DriverError::NotFound { root: root.into(), tried })
    }
}

impl Library {
    /// Where containers get it.
    pub fn path(&self) -> PathBuf {
        self.folder.join(&self.name)
    }
}

/// Looking about below a driver root. Its own paths are as containers see them.
struct Search<'a> {
    root: &'a Path,
    rootfs: Rootfs,
}

/// The two libraries without which there is no driver.
struct Core {
    library_dir: PathBuf,
    version: String,
    cuda: Library,
    nvml: Library,
}

impl Search<'_> {
    /// Where libcuda may be: where the root's own loader finds it, then the well-known folders.
    fn places(&self) -> Result<Vec<PathBuf>, RootfsError> {
        let mut places = Vec::new();
        if let Some(bytes) = self.rootfs.read(Path::new("/etc/ld.so.cache"), cache::MAX_BYTES)? {
            // One that cannot be read is the loader's trouble; the folders are looked through all the same.
            let cache = Cache::parse(&bytes).unwrap_or_default();
            places.extend(cache.find(b"libcuda.so.1").map(|path| PathBuf::from(OsStr::from_bytes(path))));
        }
        for folder in library_folders() {
            places.push(folder.join("libcuda.so.1"));
            // That link is made by ldconfig, which nobody need have run in a driver container.
            let names = self.names(&folder)?;
            let versioned = names.iter().filter(|name| version_of(name, CUDA).is_some());
            places.extend(versioned.map(|name| folder.join(name)));
        }
        Ok(places)
    }

    /// The files at these places, each once, no symlinks.
    fn candidates(&self, places: &[PathBuf]) -> Result<Vec<PathBuf>, RootfsError> {
        let mut candidates = Vec::new();
        for place in places {
            if let Some(file) = self.rootfs.resolve(place)?
                && !candidates.contains(&file)
            {
                candidates.push(file);
            }
        }
        Ok(candidates)
    }

    /// The driver whose libcuda is at `path`, if NVML of the same version is beside it; else what is wrong.
    fn core(&self, path: &Path) -> Result<Result<Core, String>, RootfsError> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let folder = path.parent().unwrap_or(Path::new("/"));
        let Some(version) = version_of(name, CUDA) else {
            return Ok(Err(format!("{} has no driver version at the end of its name", path.display())));
        };
        let cuda = match self.library(folder, name)? {
            Ok(library) => library,
            Err(reason) => return Ok(Err(format!("{} {reason}", path.display()))),
        };
        let nvml = match self.library(folder, &format!("{NVML}{version}"))? {
            Ok(library) => library,
            Err(reason) => {
                return Ok(Err(format!(
                    "{} is there, but {NVML}{version} beside it {reason}",
                    path.display()
                )));
            }
        };
        Ok(Ok(Core { library_dir: folder.into(), version: version.into(), cuda, nvml }))
    }

    /// The driver with everything else that belongs to it.
    fn rest(&self, core: Core) -> Result<Driver, RootfsError> {
        let Core { library_dir, version, cuda, nvml } = core;
        let (mut libraries, mut left_out) = (BTreeMap::new(), BTreeMap::new());
        let mut folders = vec![library_dir.clone()];
        for folder in library_folders() {
            folders.extend(self.rootfs.resolve(&folder)?.filter(|folder| !folders.contains(folder)));
        }
        for folder in folders {
            for name in self.names(&folder)? {
                if [&cuda.name, &nvml.name].contains(&&name) || libraries.contains_key(&name) {
                    continue;
                }
                match self.other(&folder, &name, &version)? {
                    Some(Ok(library)) => _ = libraries.insert(name, library),
                    Some(Err(reason)) => _ = left_out.insert(folder.join(name), reason),
                    None => {}
                }
            }
        }
        let past_cuda = |library: &Library| PAST_CUDA.iter().any(|stem| library.name.starts_with(stem));
        let (past_cuda, libraries) = libraries.into_values().partition(past_cuda);
        Ok(Driver {
            root: self.root.into(),
            files: [self.programs()?, self.firmware(&version)?].concat(),
            sockets: self.sockets()?,
            opencl_vendor: self.there(Path::new(OPENCL_VENDOR), FileType::RegularFile)?,
            past_cuda,
            libraries,
            library_dir,
            version,
            cuda,
            nvml,
            left_out,
        })
    }

    /// The library `name` in `folder`, if it is one of driver `version` that computing needs; or why containers cannot load it.
    fn other(
        &self,
        folder: &Path,
        name: &str,
        version: &str,
    ) -> Result<Option<Result<Library, String>>, RootfsError> {
        if !is_wanted(name, version) {
            return Ok(None);
        }
        // A symlink to one that comes along under its own name, such as libnvidia-nvvm.so.4.
        let path = folder.join(name);
        let target = self.rootfs.read_link(&path)?;
        if target.is_some_and(|target| target.to_str().is_some_and(|target| is_wanted(target, version))) {
            return Ok(None);
        }
        self.library(folder, name).map(Some)
    }

    /// The library `name` in `folder`, if containers on this node can load it.
    fn library(&self, folder: &Path, name: &str) -> Result<Result<Library, String>, RootfsError> {
        let path = folder.join(name);
        let (file, real) = match (self.rootfs.file(&path), self.rootfs.resolve(&path)) {
            (Ok(Some(file)), Ok(Some(real))) => (file, real),
            (Ok(_), Ok(_)) => return Ok(Err("does not exist".into())),
            (Err(RootfsError::NotRegular { .. }), _) => return Ok(Err("is no regular file".into())),
            (Err(error), _) | (_, Err(error)) => return Err(error),
        };
        let elf = match Elf::read(&file, Depth::Linking) {
            Ok(elf) => elf,
            Err(error) => return Ok(Err(format!("cannot be used: {error}"))),
        };
        if (elf.bits, elf.machine) != (64, MACHINE) {
            return Ok(Err(format!(
                "is for another machine ({} bit, ELF machine {})",
                elf.bits, elf.machine
            )));
        }
        let named = |soname: &String| !soname.is_empty() && !soname.contains('/');
        let soname = elf.soname.filter(named).unwrap_or_else(|| match name {
            name if name.starts_with(CUDA) => format!("{CUDA}1"),
            name if name.starts_with(NVML) => format!("{NVML}1"),
            name => name.into(),
        });
        Ok(Ok(Library { folder: folder.into(), name: name.into(), soname, host: self.on_host(&real) }))
    }

    fn programs(&self) -> Result<Vec<DriverFile>, RootfsError> {
        let mut programs = Vec::new();
        for name in PROGRAMS {
            for folder in PROGRAM_FOLDERS.into_iter().chain([PROGRAMS_BEHIND_LINKS]) {
                let place = Path::new(folder).join(name);
                if let Some(mut program) = self.there(&place, FileType::RegularFile)? {
                    if folder == PROGRAMS_BEHIND_LINKS {
                        program.path = Path::new("/usr/bin").join(name);
                    }
                    programs.push(program);
                    break;
                }
            }
        }
        Ok(programs)
    }

    fn firmware(&self, version: &str) -> Result<Vec<DriverFile>, RootfsError> {
        for folder in FIRMWARE_FOLDERS {
            let folder = Path::new(folder).join(version);
            let mut names = self.names(&folder)?;
            names.retain(|name| name.starts_with("gsp") && name.ends_with(".bin"));
            let files = names.iter().map(|name| self.there(&folder.join(name), FileType::RegularFile));
            let files: Vec<_> = files.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
            if !files.is_empty() {
                return Ok(files);
            }
        }
        Ok(Vec::new())
    }

    fn sockets(&self) -> Result<Vec<DriverFile>, RootfsError> {
        let sockets = SOCKETS.iter().map(|path| self.there(Path::new(path), FileType::Socket));
        Ok(sockets.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
    }

    /// The file at `path`, if it is of that kind.
    fn there(&self, path: &Path, kind: FileType) -> Result<Option<DriverFile>, RootfsError> {
        let stat = self.rootfs.stat(path)?;
        if !stat.is_some_and(|stat| FileType::from_raw_mode(stat.st_mode) == kind) {
            return Ok(None);
        }
        let real = self.rootfs.resolve(path)?;
        Ok(real.map(|real| DriverFile { path: path.into(), host: self.on_host(&real) }))
    }

    /// Names in a folder, sorted; none if it does not exist.
    fn names(&self, folder: &Path) -> Result<Vec<String>, RootfsError> {
        let Some(real) = self.rootfs.resolve(folder)? else { return Ok(Vec::new()) };
        // The host's administrator installs drivers, and nobody else: paths stay true here.
        let Ok(entries) = fs::read_dir(self.on_host(&real)) else { return Ok(Vec::new()) };
        let mut names: Vec<_> =
            entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
        names.sort();
        Ok(names)
    }

    /// A resolved path of the root, on the host.
    fn on_host(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }
}

fn library_folders() -> impl Iterator<Item = PathBuf> {
    LIBRARY_FOLDERS.iter().map(|folder| folder.replace("{}", TRIPLET).into())
}

/// The driver version at the end of `name`, which begins with `stem`: numbers, at least two, as in `535.261.03`.
fn version_of<'a>(name: &'a str, stem: &str) -> Option<&'a str> {
    let version = name.strip_prefix(stem)?;
    let parts: Vec<_> = version.split('.').collect();
    let number = |part: &&str| !part.is_empty() && part.bytes().all(|c| c.is_ascii_digit());
    (parts.len() >= 2 && parts.iter().all(number)).then_some(version)
}

/// Whether a file of this name is a library of driver `version` that computing needs.
fn is_wanted(name: &str, version: &str) -> bool {
    let stem = name.strip_suffix(version).and_then(|name| name.strip_suffix(".so."));
    let drivers =
        stem.is_some_and(|stem| stem.starts_with("lib")) || name.starts_with(NVVM) && name.contains(".so.");
    drivers && !LEFT_OUT.iter().any(|left_out| name.starts_with(left_out))
}

#[cfg(test)]
pub(crate) mod tests;
