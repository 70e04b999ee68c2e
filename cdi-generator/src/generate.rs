//! The specification that containers with a GPU share or with whole GPUs ask for. It is the same for all of them:
//! which GPU, how much of it, and every device node come later, through NRI, when the container is known
//! (design D2). So it holds no device node, and without the NRI plugin a container gets no GPU and the guard
//! refuses it.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use region::place;
use thiserror::Error;
use vcuda_config::{CDI_DEVICE_SHARE, CDI_DEVICE_WHOLE, CDI_KIND, Paths, hook};

use crate::{
    driver::{Driver, DriverFile, Library},
    file::{self, FileError},
    rules,
    spec::{ContainerEdits, Device, Hook, Mount, Spec},
};

/// Read-only bind mounts of the driver's files, as `nvidia-ctk` makes them.
const FILE_OPTIONS: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];

/// Bind mounts of sockets: writing to one is what it is for.
const SOCKET_OPTIONS: [&str; 5] = ["nosuid", "nodev", "rbind", "rprivate", "noexec"];

/// The name under which the hook's own arguments begin.
const HOOK: &str = "vcuda-hook";

/// The hooks' whole environment. It must not be empty: a hook without one inherits the image's from some
/// runtimes, `LD_PRELOAD` included (CVE-2025-23266).
const HOOK_ENV: &str = "VCUDA_HOOK=1";

const CUDA_SONAME: &str = "libcuda.so.1";
const CUDA_DEVELOPMENT: &str = "libcuda.so";

/// NVIDIA's own container runtime, where it is installed too, must not add GPUs of its own.
const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES=void";

/// Why the specification is not there.
#[derive(Debug, Error)]
pub enum EnsureError {
    /// The hooks' program is not installed, so every container would fail.
    #[error("{path}: the container hook is not there; install vcuda, or set paths.install in the node file")]
    NoHook {
        /// Where it should be.
        path: PathBuf,
    },
    /// The file cannot be written.
    #[error(transparent)]
    File(#[from] FileError),
}

/// The file that the specification is written to. The name is CDI's own for a kind, `vendor-class`.
pub fn spec_path(paths: &Paths) -> PathBuf {
    paths.cdi.join(format!("{}.json", CDI_KIND.replace('/', "-")))
}

/// Sees to it that the specification for `driver` is on disk. Says whether it had to be written; a file that
/// is current is left alone, so this may be asked at every Allocate.
pub fn ensure_spec(paths: &Paths, driver: &Driver) -> Result<bool, EnsureError> {
    let hook = paths.hook();
    if !hook.is_file() {
        return Err(EnsureError::NoHook { path: hook });
    }
    let (spec, path) = (spec(paths, driver), spec_path(paths));
    // A file that runtimes refuse would take the devices of running nodes away.
    if let Some(fault) = rules::faults(&spec).first() {
        return Err(FileError::Invalid { path, reason: fault.to_string() }.into());
    }
    Ok(file::write(&path, &spec.to_json())?)
}

/// The specification for `driver` on a node with these `paths`.
pub fn spec(paths: &Paths, driver: &Driver) -> Spec {
    let core = [&driver.cuda, &driver.nvml];
    let computing: Vec<_> = core.into_iter().chain(&driver.libraries).collect();
    let all: Vec<_> = computing.iter().copied().chain(&driver.past_cuda).collect();

    let sockets = driver.sockets.iter().map(|socket| mount(&socket.host, &socket.path, &SOCKET_OPTIONS));
    let beside: Vec<_> =
        driver.libraries.iter().map(usual).chain(driver.files.iter().map(same)).chain(sockets).collect();
    // The shim takes the place of these two, and finds them in its own folder. The hook mounts all that a share has: a
    // runtime takes up to half a millisecond for a file, and a driver has about ten of them.
    let behind = core.iter().zip([place::REAL_CUDA, place::REAL_NVML]);
    let behind = behind.map(|(library, place)| (text(&library.host), place.to_owned()));
    let files: Vec<_> = behind
        .chain(beside.iter().map(|mount| (mount.host_path.clone(), mount.container_path.clone())))
        .collect();
    let whole =
        core.into_iter().chain(&driver.past_cuda).map(usual).chain(driver.opencl_vendor.as_ref().map(same));
    let device =
        |name: &str, mounts: Vec<Mount>, libraries: &[&Library], files: &[(String, String)]| Device {
            name: name.into(),
            container_edits: ContainerEdits {
                mounts,
                hooks: vec![hook(paths, libraries, files)],
                ..ContainerEdits::default()
            },
            ..Device::default()
        };
    let mut spec = Spec {
        kind: CDI_KIND.into(),
        devices: vec![
            device(CDI_DEVICE_SHARE, Vec::new(), &computing, &files),
            device(CDI_DEVICE_WHOLE, whole.chain(beside).collect(), &all, &[]),
        ],
        container_edits: ContainerEdits { env: vec![VISIBLE_DEVICES.into()], ..ContainerEdits::default() },
        ..Spec::default()
    };
    spec.cdi_version = spec.minimum_version().to_string();
    spec
}

/// The hook for a container with these libraries, which mounts `files`, each by its path on the host and in the container:
/// links, loader cache and guard, in one process, for each process adds to the time that a pod takes to start.
fn hook(paths: &Paths, libraries: &[&Library], files: &[(String, String)]) -> Hook {
    let mut args: Vec<String> = vec![HOOK.into(), hook::CREATE_CONTAINER.into()];
    for (path, target) in links_of(libraries) {
        args.extend(["--link".into(), format!("{target}::{}", text(&path))]);
    }
    for path in lookups_of(libraries) {
        args.extend(["--library".into(), text(&path)]);
    }
    for (host, place) in files {
        args.extend(["--driver-file".into(), format!("{host}::{place}")]);
    }
    let node = [("--state", &paths.state), ("--install", &paths.install), ("--config", &paths.node_file)];
    args.extend(node.into_iter().flat_map(|(option, path)| [option.into(), text(path)]));
    Hook {
        hook_name: "createContainer".into(),
        path: text(&paths.hook()),
        args,
        env: vec![HOOK_ENV.into()],
        timeout: None,
    }
}

/// Symlinks beside the libraries, path to target. The targets' names are the same for a share, whose shim stands
/// under the driver's own names. Where a library is mounted there is no link: nothing can take a mount's place.
fn links_of(libraries: &[&Library]) -> BTreeMap<PathBuf, String> {
    let mut links = BTreeMap::new();
    for library in libraries {
        links.entry(library.folder.join(&library.soname)).or_insert_with(|| library.name.clone());
    }
    // For programs that look for the file that development packages have.
    if let Some(cuda) = libraries.iter().find(|library| library.soname == CUDA_SONAME) {
        links.insert(cuda.folder.join(CUDA_DEVELOPMENT), cuda.soname.clone());
    }
    for library in libraries {
        links.remove(&library.path());
    }
    links
}

/// What the loader is to find, by the file names of these paths.
fn lookups_of(libraries: &[&Library]) -> BTreeSet<PathBuf> {
    let sonames = libraries.iter().map(|library| library.folder.join(&library.soname));
    sonames.chain(links_of(libraries).into_keys()).collect()
}

/// A library at its usual place.
fn usual(library: &Library) -> Mount {
    mount(&library.host, &library.path(), &FILE_OPTIONS)
}

/// A file at the same place as on the host.
fn same(file: &DriverFile) -> Mount {
    mount(&file.host, &file.path, &FILE_OPTIONS)
}

fn mount(host: &Path, container: &Path, options: &[&str]) -> Mount {
    Mount {
        host_path: text(host),
        container_path: text(container),
        options: options.iter().map(|option| (*option).into()).collect(),
        kind: None,
    }
}

/// A path as text. Those here come from the node file and from names that were read as UTF-8.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests;
