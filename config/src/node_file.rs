//! The node file, `/etc/vcuda/config.yaml`: everything on a node that can be set. Versioned; a key that it does
//! not know is an error, so that a typing mistake never turns into a default.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read as _},
    net::SocketAddr,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{
    GpuUuid,
    mistake::{mistake, remedy},
};

/// The one version of the node file that this build reads.
const NODE_FILE_VERSION: u32 = 1;

/// A node file is a page of text; anything larger is a mistake.
const NODE_FILE_MAX_BYTES: u64 = 1 << 20;

/// The node file. Every key has a default, so an empty node needs none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeFile {
    /// Format version, always 1.
    pub version: u32,
    /// Names of the two resources.
    #[serde(default)]
    pub resources: Resources,
    /// Well-known places.
    #[serde(default)]
    pub paths: Paths,
    /// Which GPUs are offered, and how much of them.
    #[serde(default)]
    pub gpus: GpuPolicy,
    /// What becomes of compute time that its owners leave idle.
    #[serde(default)]
    pub compute: ComputePolicy,
    /// Where the device plugin serves its figures.
    #[serde(default)]
    pub metrics: MetricsSettings,
    /// Who holds containers to the memory of their shares.
    #[serde(default)]
    pub memory: MemoryPolicy,
    /// How the NRI plugin presents itself.
    #[serde(default)]
    pub nri: NriSettings,
    /// What becomes of a container whose image cannot run under a share.
    #[serde(default)]
    pub images: ImagePolicy,
}

/// Names under which the node offers its shares.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Resources {
    /// Domain of both names.
    pub domain: String,
    /// Name of the core resource; one unit is 1 % of one GPU.
    pub core: String,
    /// Name of the memory resource; one unit is 256 MiB.
    pub memory: String,
}

/// Well-known places. All are absolute.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Paths {
    /// Root of the NVIDIA driver: `/` when it is installed on the host, `/run/nvidia/driver` when a driver
    /// container installs it. Libraries and device nodes are looked up below it.
    pub driver_root: PathBuf,
    /// State of this system: the inventory and the `shares` folder.
    pub state: PathBuf,
    /// Folder of CDI specs; containerd must list it in `cdi_spec_dirs`.
    pub cdi: PathBuf,
    /// Installed files: `bin` and `lib` of this version.
    pub install: PathBuf,
    /// Kubelet's device plugin folder, with `kubelet.sock`.
    pub kubelet: PathBuf,
    /// containerd's NRI socket.
    pub nri_socket: PathBuf,
    /// Sockets and locks of this system.
    pub run: PathBuf,
    /// The node file itself, for programs that others start. Known to who has read it.
    #[serde(skip, default = "default_node_file")]
    pub node_file: PathBuf,
}

/// Which GPUs are offered, and how much of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct GpuPolicy {
    /// GPUs that this system leaves alone, by UUID.
    pub exclude: Vec<GpuUuid>,
    /// Memory of each GPU that is never offered, in MiB (driver contexts, other users of the node).
    pub reserved_mib: u64,
    /// XID errors that keep no new shares off a GPU.
    pub ignored_xids: Vec<u64>,
}

/// What becomes of compute time that its owners leave idle.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ComputePolicy {
    /// Idle time is divided by share among those that want it, but for pods that set a core limit of their own.
    /// Otherwise a share is all that a container gets, unless its pod sets a core limit.
    pub work_conserving: bool,
}

/// Where the device plugin serves its figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MetricsSettings {
    /// Address for `/metrics` and `/healthz` over HTTP; null for none.
    pub listen: Option<SocketAddr>,
}

/// Who holds containers to the memory of their shares.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MemoryPolicy {
    /// What else there is besides the shim.
    pub floor: MemoryFloor,
}

/// What holds a container to its memory if it passes the shim by. Drivers from 615 on can (NVML 13.4), on nodes with
/// cgroup version 2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryFloor {
    /// The driver, where it can.
    #[default]
    Auto,
    /// The driver; where it cannot, containers with a share do not start.
    Driver,
    /// Nothing.
    Shim,
}

/// How the NRI plugin presents itself to containerd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct NriSettings {
    /// Name of the plugin.
    pub name: String,
    /// Two digits that order plugins; we come late, to see what others did.
    pub index: String,
}

/// What becomes of a container with a share whose image would die under it, or run unenforced (musl, no glibc, one
/// too old, another architecture). Whether a share is bound and mounted is not a matter of policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ImagePolicy {
    /// For all namespaces that are not named.
    pub policy: Policy,
    /// By namespace of the pod.
    pub namespaces: BTreeMap<String, Policy>,
}

/// What is done about an image that does not fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// It does not start.
    #[default]
    Enforce,
    /// It starts, and the node keeps what was found (`vcuda-check list`).
    Warn,
    /// It starts unseen.
    Off,
}

impl ImagePolicy {
    /// What holds in this namespace.
    pub fn of(&self, namespace: &str) -> Policy {
        self.namespaces.get(namespace).copied().unwrap_or(self.policy)
    }
}

/// Why a node file was refused.
#[derive(Debug, Error)]
pub enum NodeFileError {
    /// It could not be read.
    #[error("{path}: cannot be read: {source}; {remedy}", remedy = remedy(source))]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is no node file.
    #[error("{path}: {reason}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong, where, and what would be right.
        reason: String,
    },
}

impl NodeFile {
    /// Where the node file is looked for when nothing else is said.
    pub const DEFAULT_PATH: &'static str = "/etc/vcuda/config.yaml";

    /// Reads and checks the node file at `path`.
    pub fn load(path: &Path) -> Result<Self, NodeFileError> {
        let read = |source| NodeFileError::Read { path: path.into(), source };
        let invalid = |reason: String| NodeFileError::Invalid { path: path.into(), reason };
        let mut text = String::new();
        // One byte more than is allowed; what has no length of its own, such as a device, ends there too.
        File::open(path)
            .and_then(|file| file.take(NODE_FILE_MAX_BYTES + 1).read_to_string(&mut text))
            .map_err(read)?;
        if text.len() as u64 > NODE_FILE_MAX_BYTES {
            return Err(invalid("larger than 1 MiB, which no node file is; check the path".into()));
        }
        let mut file = Self::parse(&text).map_err(invalid)?;
        file.paths.node_file = std::path::absolute(path).map_err(read)?;
        Ok(file)
    }

    /// The node file at `path`, or all defaults where the default file does not exist. A file that was asked
    /// for by name (`path` is not the default path) must exist.
    pub fn load_or_default(path: &Path) -> Result<Self, NodeFileError> {
        match Self::load(path) {
            Err(NodeFileError::Read { source, .. })
                if source.kind() == io::ErrorKind::NotFound && path == Path::new(Self::DEFAULT_PATH) =>
            {
                Ok(Self::default())
            }
            other => other,
        }
    }

    /// Checks the node file `text`; errors name `origin` as the place it came from.
    pub fn from_text(text: &str, origin: &Path) -> Result<Self, NodeFileError> {
        Self::parse(text).map_err(|reason| NodeFileError::Invalid { path: origin.into(), reason })
    }

    fn parse(text: &str) -> Result<Self, String> {
        let file: Self = serde_saphyr::from_str(text).map_err(|error| mistake(text, &error))?;
        file.check()?;
        Ok(file)
    }

    fn check(&self) -> Result<(), String> {
        if self.version != NODE_FILE_VERSION {
            return Err(format!(
                "version: {} is not known to this build; it reads version {NODE_FILE_VERSION}",
                self.version
            ));
        }
        for (key, path) in self.paths.named() {
            if !path.is_absolute() {
                return Err(format!("paths.{key}: {path:?} must be absolute, and so begin with /"));
            }
        }
        let resources = &self.resources;
        if !is_dns_subdomain(&resources.domain) {
            return Err(format!(
                "resources.domain: {:?} must be a DNS name such as tencent.com",
                resources.domain
            ));
        }
        for (key, name) in [("core", &resources.core), ("memory", &resources.memory)] {
            if !is_resource_name(name) {
                return Err(format!(
                    "resources.{key}: {name:?} must be 1 to 63 letters, digits, '-', '_' or '.', with a letter or digit at both ends"
                ));
            }
        }
        if resources.core == resources.memory {
            return Err("resources: core and memory must have different names".into());
        }
        if self.nri.index.len() != 2 || !self.nri.index.bytes().all(|c| c.is_ascii_digit()) {
            return Err(format!("nri.index: {:?} must be two digits, \"00\" to \"99\"", self.nri.index));
        }
        let nri_name = |c: u8| c.is_ascii_alphanumeric() || b"_.+-".contains(&c);
        if self.nri.name.is_empty() || !self.nri.name.bytes().all(nri_name) {
            return Err(format!(
                "nri.name: {:?} may hold letters, digits, '_', '.', '+' and '-' only",
                self.nri.name
            ));
        }
        Ok(())
    }
}

impl Default for NodeFile {
    fn default() -> Self {
        Self {
            version: NODE_FILE_VERSION,
            resources: Resources::default(),
            paths: Paths::default(),
            gpus: GpuPolicy::default(),
            compute: ComputePolicy::default(),
            metrics: MetricsSettings::default(),
            memory: MemoryPolicy::default(),
            nri: NriSettings::default(),
            images: ImagePolicy::default(),
        }
    }
}

impl Resources {
    /// Full name of the core resource, such as `tencent.com/vcuda-core`.
    pub fn core_name(&self) -> String {
        format!("{}/{}", self.domain, self.core)
    }

    /// Full name of the memory resource, such as `tencent.com/vcuda-memory`.
    pub fn memory_name(&self) -> String {
        format!("{}/{}", self.domain, self.memory)
    }
}

impl Default for Resources {
    fn default() -> Self {
        Self { domain: "tencent.com".into(), core: "vcuda-core".into(), memory: "vcuda-memory".into() }
    }
}

impl Paths {
    /// Folder of share records, one folder a share.
    pub fn shares(&self) -> PathBuf {
        self.state.join("shares")
    }

    /// What the device plugin found on this node, for the NRI plugin: GPUs, device nodes, driver.
    pub fn inventory(&self) -> PathBuf {
        self.state.join("inventory.json")
    }

    /// The shim on the host.
    pub fn shim(&self) -> PathBuf {
        self.install.join("lib/libvcuda_preload.so")
    }

    /// The OCI hook on the host.
    pub fn hook(&self) -> PathBuf {
        self.install.join("bin/vcuda-hook")
    }

    /// Where the device plugin is asked for the driver's floor, see [`crate::floor`].
    pub fn floor_socket(&self) -> PathBuf {
        self.run.join("floor.sock")
    }

    /// Lock that the device plugin holds as long as it runs, see [`crate::daemons`].
    pub fn device_plugin_lock(&self) -> PathBuf {
        self.run.join("device-plugin.lock")
    }

    /// Lock that the NRI plugin holds as long as it runs, see [`crate::daemons`].
    pub fn nri_plugin_lock(&self) -> PathBuf {
        self.run.join("nri-plugin.lock")
    }

    /// There while the NRI plugin is in service: for which runtime, and its process ID, a line each.
    pub fn nri_plugin_ready(&self) -> PathBuf {
        self.run.join("nri-plugin.ready")
    }

    fn named(&self) -> [(&'static str, &Path); 7] {
        [
            ("driverRoot", &self.driver_root),
            ("state", &self.state),
            ("cdi", &self.cdi),
            ("install", &self.install),
            ("kubelet", &self.kubelet),
            ("nriSocket", &self.nri_socket),
            ("run", &self.run),
        ]
    }
}

impl Default for Paths {
    fn default() -> Self {
        Self {
            driver_root: "/".into(),
            state: "/var/lib/vcuda".into(),
            cdi: "/var/run/cdi".into(),
            install: Path::new("/usr/local/vcuda").join(crate::VERSION),
            kubelet: "/var/lib/kubelet/device-plugins".into(),
            nri_socket: "/var/run/nri/nri.sock".into(),
            run: "/run/vcuda".into(),
            node_file: default_node_file(),
        }
    }
}

impl Default for GpuPolicy {
    fn default() -> Self {
        // XIDs that an application causes by itself, as NVIDIA's device plugin has them (k8s-device-plugin v0.20): 13
        // graphics engine exception, 31 page fault, 43 stopped processing, 45 preemptive cleanup, 68 video processor
        // exception, 109 context switch timeout.
        Self { exclude: Vec::new(), reserved_mib: 0, ignored_xids: vec![13, 31, 43, 45, 68, 109] }
    }
}

impl Default for MetricsSettings {
    fn default() -> Self {
        Self { listen: Some(SocketAddr::from(([0, 0, 0, 0], 10282))) }
    }
}

impl Default for NriSettings {
    fn default() -> Self {
        Self { name: "vcuda".into(), index: "90".into() }
    }
}

fn default_node_file() -> PathBuf {
    NodeFile::DEFAULT_PATH.into()
}

fn is_dns_subdomain(text: &str) -> bool {
    text.len() <= 253
        && text.split('.').all(|label| {
            !label.is_empty()
                && label.len() <= 63
                && label.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-')
                && !label.starts_with('-')
                && !label.ends_with('-')
        })
}

/// The name part of a Kubernetes qualified name.
fn is_resource_name(text: &str) -> bool {
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    (1..=63).contains(&text.len())
        && text.bytes().all(|c| c.is_ascii_alphanumeric() || b"-_.".contains(&c))
        && ends(text.chars().next())
        && ends(text.chars().last())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_alone_means_all_defaults() {
        assert_eq!(NodeFile::parse("version: 1").unwrap(), NodeFile::default());
    }

    #[test]
    fn what_is_set_is_kept() {
        let file = NodeFile::parse(
            "version: 1\nresources: {domain: gpu.example.org}\npaths: {driverRoot: /run/nvidia/driver}\n\
             gpus: {exclude: [GPU-4d4f434b-0000-0000-0000-000000000000], reservedMib: 512, ignoredXids: [63]}",
        )
        .unwrap();
        assert_eq!(file.resources.core_name(), "gpu.example.org/vcuda-core");
        assert_eq!(file.paths.driver_root, Path::new("/run/nvidia/driver"));
        assert_eq!(file.paths.state, Path::new("/var/lib/vcuda"));
        assert_eq!(file.gpus.reserved_mib, 512);
        assert_eq!(file.gpus.ignored_xids, [63]);
    }

    #[test]
    fn mistakes_are_named_with_their_key() {
        for (text, named) in [
            ("", "nothing in it"),
            ("resources: {}", "version"),
            ("version: 2", "version"),
            ("version: 1\nressources: {}", "ressources"),
            ("version: 1\npaths: {state: var/lib}", "paths.state"),
            ("version: 1\npaths: {stat: /var}", "stat"),
            ("version: 1\nresources: {domain: UPPER}", "resources.domain"),
            ("version: 1\nresources: {core: a b}", "resources.core"),
            ("version: 1\nresources: {core: x, memory: x}", "resources"),
            ("version: 1\nimages: {policy: maybe}", "policy"),
            ("version: 1\ncompute: {workConserving: maybe}", "compute"),
            ("version: 1\nmetrics: {listen: here}", "metrics"),
            ("version: 1\nmemory: {floor: maybe}", "floor"),
            ("version: 1\nnri: {index: '9'}", "nri.index"),
            ("version: 1\nnri: {name: ''}", "nri.name"),
            ("version: 1\ngpus: {exclude: [0]}", "GPU UUID"),
        ] {
            let error = NodeFile::parse(text).unwrap_err();
            assert!(error.contains(named), "{text:?}: {error}");
            assert!(!error.contains('\n'), "{text:?}: {error}");
        }
    }

    #[test]
    fn a_value_of_the_wrong_kind_is_shown_with_what_it_must_be() {
        for (value, shown, wanted) in [
            ("gpus: {reservedMib: 1GiB}", "line 2", "must be a whole number"),
            ("gpus: {reservedMib: -5}", "reservedMib: -5", "must be a whole number"),
            ("images: {}\nimages: {}", "line 3", "images is there already; keep one of them; config/"),
            ("gpus: {exclude: GPU-1}", "exclude: GPU-1", "must be a list"),
            ("metrics: {listen: 10282}", "listen: 10282", "an address and a port"),
        ] {
            let error = NodeFile::parse(&format!("version: 1\n{value}")).unwrap_err();
            assert!(error.contains(shown) && error.contains(wanted), "{value}: {error}");
        }
    }

    #[test]
    fn a_node_file_without_an_end_is_too_large() {
        let error = NodeFile::load(Path::new("/dev/zero")).unwrap_err().to_string();
        assert!(error.contains("larger than 1 MiB"), "{error}");
    }

    #[test]
    fn a_namespace_may_have_a_policy_of_its_own() {
        let file =
            NodeFile::parse("version: 1\nimages: {policy: warn, namespaces: {prod: enforce, lab: 'off'}}");
        let images = file.unwrap().images;
        assert_eq!(
            ["prod", "lab", "x"].map(|name| images.of(name)),
            [Policy::Enforce, Policy::Off, Policy::Warn]
        );
        assert_eq!(NodeFile::default().images.of("x"), Policy::Enforce);
    }

    #[test]
    fn a_node_file_knows_where_it_is_and_names_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vcuda.yaml");
        std::fs::write(&path, "version: 1\n").unwrap();
        assert_eq!(NodeFile::load(&path).unwrap().paths.node_file, path);
        assert_eq!(NodeFile::default().paths.node_file, Path::new(NodeFile::DEFAULT_PATH));
        let error = NodeFile::parse("version: 1\npaths: {nodeFile: /x}").unwrap_err();
        assert!(error.contains("nodeFile"), "{error}");
    }

    #[test]
    fn only_the_default_file_may_be_absent() {
        let folder = tempfile::tempdir().unwrap();
        let error = NodeFile::load_or_default(&folder.path().join("config.yaml")).unwrap_err().to_string();
        assert!(error.contains("--config"), "{error}");
    }
}
