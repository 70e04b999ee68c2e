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
use vcuda_config::{CDI_DEVICE_SHARE, CDI_DEVICE_WHOLE, CDI_KIND, Paths};

use crate::{
    driver::{Driver, Library},
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
    let usual = |library: &Library| mount(&library.host, &driver.library_path(&library.name), &FILE_OPTIONS);
    let core = [(&driver.cuda, place::REAL_CUDA), (&driver.nvml, place::REAL_NVML)];
    let device = |name: &str, mounts: [Mount; 2]| Device {
        name: name.into(),
        container_edits: ContainerEdits { mounts: mounts.into(), ..ContainerEdits::default() },
        ..Device::default()
    };
    let mut spec = Spec {
        kind: CDI_KIND.into(),
        devices: vec![
            // The shim takes their usual place, through NRI, and finds them in the private folder.
            device(
                CDI_DEVICE_SHARE,
                core.map(|(library, place)| mount(&library.host, Path::new(place), &FILE_OPTIONS)),
            ),
            device(CDI_DEVICE_WHOLE, core.map(|(library, _)| usual(library))),
        ],
        container_edits: ContainerEdits {
            env: vec![VISIBLE_DEVICES.into()],
            mounts: other_mounts(driver, usual),
            hooks: hooks(paths, driver),
            ..ContainerEdits::default()
        },
        ..Spec::default()
    };
    spec.cdi_version = spec.minimum_version().to_string();
    spec
}

fn other_mounts(driver: &Driver, usual: impl Fn(&Library) -> Mount) -> Vec<Mount> {
    let libraries = driver.libraries.iter().map(usual);
    let files = driver.files.iter().map(|file| mount(&file.host, &file.path, &FILE_OPTIONS));
    let sockets = driver.sockets.iter().map(|socket| mount(&socket.host, &socket.path, &SOCKET_OPTIONS));
    libraries.chain(files).chain(sockets).collect()
}

/// The hooks, in the order in which they run: the guard looks at what the others left.
fn hooks(paths: &Paths, driver: &Driver) -> Vec<Hook> {
    let mut links = vec!["links".into()];
    for (name, target) in links_of(driver) {
        links.extend(["--link".into(), format!("{target}::{}", text(&driver.library_path(&name)))]);
    }
    let mut ldcache = vec!["ldcache".into()];
    for name in names_of(driver) {
        ldcache.extend(["--library".into(), text(&driver.library_path(&name))]);
    }
    let guard =
        vec!["guard".into(), "--state".into(), text(&paths.state), "--install".into(), text(&paths.install)];
    let hook = |mut args: Vec<String>| {
        args.insert(0, HOOK.into());
        Hook {
            hook_name: "createContainer".into(),
            path: text(&paths.hook()),
            args,
            env: vec![HOOK_ENV.into()],
            timeout: None,
        }
    };
    [links, ldcache, guard].map(hook).into()
}

/// Symlinks in the library folder, name to target. The targets' names are the same for a share, whose shim stands
/// under the driver's own names. Where a library is mounted there is no link: nothing can take a mount's place.
fn links_of(driver: &Driver) -> BTreeMap<String, String> {
    let mut links = BTreeMap::new();
    for library in driver.all_libraries() {
        links.entry(library.soname.clone()).or_insert_with(|| library.name.clone());
    }
    // For programs that look for the file that development packages have.
    links.entry("libcuda.so".into()).or_insert_with(|| driver.cuda.soname.clone());
    for library in driver.all_libraries() {
        links.remove(&library.name);
    }
    links
}

/// Names that the loader is to find.
fn names_of(driver: &Driver) -> BTreeSet<String> {
    let names = driver.all_libraries().map(|library| library.soname.clone());
    names.chain(["libcuda.so".into()]).collect()
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

