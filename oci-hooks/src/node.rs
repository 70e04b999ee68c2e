//! Whether this node is fit for GPU shares: its driver, containerd's settings, what is installed and who may change
//! it, the specification that containers are given, whether the daemons run. It reads what each part reads, and asks
//! containerd's own program for its settings as it understands them. It changes nothing and talks to no socket.

mod containerd;

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use ledger::{Gpu, Inventory};
use serde::{Deserialize, Serialize};
use vcuda_config::{
    CDI_DEVICE_SHARE, CDI_DEVICE_WHOLE, CDI_KIND, NodeFile, Paths,
    daemons::{NriPlugin, is_held},
};

use crate::{
    compat::{
        Finding, Severity,
        check::Verdict,
        cuda::{Covered, Driver, function},
        elf::{Depth, Version},
        fatbin::compute_capability,
        files::{Trouble, host_file, host_read},
    },
    guard::DriverFile,
};

pub use containerd::Settings;

/// Oldest glibc that the shim may need, so that images of ten years can run under it.
const GLIBC_FLOOR: Version = Version(2, 17, 0);

/// A specification has a few KiB.
const MAX_SPEC_BYTES: u64 = 4 << 20;

/// Where containerd's configuration is unless it is told otherwise (containerd(8)).
const CONTAINERD_CONFIG: &str = "/etc/containerd/config.toml";

/// Names that a finding shows.
const SHOWN: usize = 8;

/// What was found about a node.
#[derive(Clone, Debug, Serialize)]
pub struct NodeReport {
    /// Whether containers with shares can run.
    pub verdict: Verdict,
    /// Version of the driver.
    pub driver: Option<String>,
    /// Newest CUDA that it serves.
    pub driver_cuda: Option<String>,
    /// Version of containerd.
    pub containerd: Option<String>,
    /// GPUs on offer.
    pub gpus: usize,
    /// What was found, the worst first.
    pub findings: Vec<Finding>,
}

/// The part of a CDI specification that is looked at.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    kind: String,
    #[serde(default)]
    devices: Vec<Device>,
    #[serde(default)]
    container_edits: Edits,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    name: String,
    #[serde(default)]
    container_edits: Edits,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Edits {
    mounts: Vec<Mount>,
    hooks: Vec<Hook>,
    device_nodes: Vec<serde_json::Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mount {
    host_path: PathBuf,
}

#[derive(Deserialize)]
struct Hook {
    path: PathBuf,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    env: Vec<String>,
}

impl Hook {
    /// Files of the node that it mounts.
    fn driver_files(&self) -> impl Iterator<Item = PathBuf> {
        let pairs = self.args.windows(2).filter(|pair| pair[0] == "--driver-file");
        pairs.filter_map(|pair| pair[1].parse::<DriverFile>().ok()).map(|file| file.host)
    }
}

/// Looks at the node that `file` describes. `containerd` is the program to ask, with its configuration file where
/// it is not the usual one.
pub fn check(file: &NodeFile, containerd: &Path, containerd_config: Option<&Path>) -> NodeReport {
    let paths = &file.paths;
    let mut findings = Vec::new();
    let installed = check_installed(paths, &mut findings);
    // First of what is installed, since nothing else lets a share start while they are down.
    let mut unknown = !check_daemons(paths, &mut findings);

    let driver = match Driver::find(&paths.driver_root, None) {
        Ok(driver) => Some(driver),
        Err(Trouble(reason)) => {
            findings.push(
                Finding::refuse(
                    "driver-missing",
                    reason,
                    "without it no container can use a GPU",
                    "install the driver, or name its root as paths.driverRoot in the node file",
                )
                .at(&paths.driver_root),
            );
            None
        }
    };
    if installed {
        check_shim(paths, driver.as_ref(), &mut findings);
        check_hook(paths, &mut findings);
        check_owners(paths, &mut findings);
    }
    check_spec(paths, &mut findings);
    let gpus = check_inventory(paths, &mut findings);
    let settings = containerd::ask(containerd, containerd_config);
    let version = match &settings {
        Ok(settings) => {
            settings.judge(paths, containerd_config.unwrap_or(Path::new(CONTAINERD_CONFIG)), &mut findings);
            Some(settings.version.clone())
        }
        Err(reason) => {
            unknown = true;
            findings.push(
                Finding::warn(
                    "containerd-unknown",
                    format!("containerd's settings cannot be told: {reason}"),
                    "whether CDI and NRI are on is left open",
                    "name its program with --containerd and its configuration with --containerd-config",
                )
                .at(containerd),
            );
            None
        }
    };
    check_sockets(paths, &mut findings);

    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    let verdict = if findings.iter().any(|finding| finding.severity == Severity::Refuse) {
        Verdict::DoesNotFit
    } else if unknown {
        Verdict::Unknown
    } else {
        Verdict::Fits
    };
    NodeReport {
        verdict,
        driver: driver.as_ref().map(|driver| driver.version.clone()),
        driver_cuda: driver.as_ref().map(|driver| driver.cuda.to_string()),
        containerd: version,
        gpus,
        findings,
    }
}

/// The compute capability of one of the node's GPUs, without the dot: what NVML said of it, else what its model is known
/// to have.
pub fn capability(inventory: &Inventory, gpu: &Gpu) -> Option<u32> {
    inventory.capabilities.get(&gpu.uuid).copied().or_else(|| compute_capability(&gpu.name))
}

/// A daemon of this node, as units and the DaemonSet name it, and what is lost without it.
struct Daemon {
    down: &'static str,
    unknown: &'static str,
    unit: &'static str,
    /// Its container in the DaemonSet.
    container: &'static str,
    why: &'static str,
}

const NRI_PLUGIN: Daemon = Daemon {
    down: "nri-plugin-down",
    unknown: "nri-plugin-unknown",
    unit: "vcuda-nri-plugin",
    container: "nri-plugin",
    why: "containerd asks nobody for a share, and the guard refuses every container that has one",
};

const DEVICE_PLUGIN: Daemon = Daemon {
    down: "device-plugin-down",
    unknown: "device-plugin-unknown",
    unit: "vcuda-device-plugin",
    container: "device-plugin",
    why: "the node offers no shares to the cluster, so no pod with one is placed here",
};

impl Daemon {
    fn not_running(&self) -> Finding {
        let what = format!("{} does not run: no process holds this lock", self.unit);
        let remedy = format!(
            "start it: systemctl start {}, or for the DaemonSet label the node tencent.com/vcuda=true; where it ends again, {}",
            self.unit,
            self.log()
        );
        Finding::refuse(self.down, what, self.why, remedy)
    }

    fn cannot_be_told(&self, error: &io::Error) -> Finding {
        let what = format!("whether {} runs cannot be told: {error}", self.unit);
        Finding::warn(self.unknown, what, self.why, "run this as root")
    }

    fn log(&self) -> String {
        format!(
            "see its log: journalctl -u {}, or that of container {} in this node's pod of the DaemonSet",
            self.unit, self.container
        )
    }
}

/// Whether there is a folder of vcuda's at all.
fn check_installed(paths: &Paths, findings: &mut Vec<Finding>) -> bool {
    let installed = paths.install.is_dir();
    if !installed {
        findings.push(
            Finding::refuse(
                "not-installed",
                "there is no such folder",
                "its programs and the shim are to be in it",
                "copy bin and lib of `integration/build.sh` into it, or run the DaemonSet, which does that; \
                 or correct paths.install in the node file",
            )
            .at(&paths.install),
        );
    }
    installed
}

/// By what they hold and leave while they run. False where it cannot be told.
fn check_daemons(paths: &Paths, findings: &mut Vec<Finding>) -> bool {
    let nri = match NriPlugin::of(paths) {
        Ok(NriPlugin::Connected { .. }) => None,
        Ok(NriPlugin::NotRunning) => Some(NRI_PLUGIN.not_running().at(&paths.nri_plugin_lock())),
        Ok(NriPlugin::NotConnected) => {
            let what = "vcuda-nri-plugin runs, but is not in service: containerd does not ask it";
            let remedy = format!("see that containerd runs with NRI on; if it does, {}", NRI_PLUGIN.log());
            Some(Finding::refuse(NRI_PLUGIN.down, what, NRI_PLUGIN.why, remedy).at(&paths.nri_plugin_ready()))
        }
        Err(error) => Some(NRI_PLUGIN.cannot_be_told(&error).at(&paths.nri_plugin_lock())),
    };
    let device = match is_held(&paths.device_plugin_lock()) {
        Ok(true) => None,
        Ok(false) => Some(DEVICE_PLUGIN.not_running().at(&paths.device_plugin_lock())),
        Err(error) => Some(DEVICE_PLUGIN.cannot_be_told(&error).at(&paths.device_plugin_lock())),
    };
    let found = [nri, device].into_iter().flatten();
    let before = findings.len();
    findings.extend(found);
    findings[before..].iter().all(|finding| finding.severity == Severity::Refuse)
}

fn check_shim(paths: &Paths, driver: Option<&Driver>, findings: &mut Vec<Finding>) {
    let path = paths.shim();
    let facts = match host_file(&path, Depth::Symbols) {
        Ok(facts) => facts,
        Err(Trouble(reason)) => {
            return findings.push(
                Finding::refuse(
                    "shim-missing",
                    reason,
                    "no share can be enforced without it",
                    "install vcuda on this node, or correct paths.install in the node file",
                )
                .at(&path),
            );
        }
    };
    let Some(elf) = facts.elf() else {
        return findings.push(
            Finding::refuse(
                "shim-broken",
                "it is no library",
                "no share can be enforced",
                "install vcuda again",
            )
            .at(&path),
        );
    };
    if let Some(needed) = elf.newest_needed("GLIBC_").filter(|needed| *needed > GLIBC_FLOOR) {
        findings.push(
            Finding::warn(
                "shim-glibc",
                format!("it needs glibc {needed}"),
                "images with an older one are refused",
                format!("build it for glibc {GLIBC_FLOOR} with vcuda-preload/build.sh"),
            )
            .at(&path),
        );
    }
    if let Some(driver) = driver {
        let covered = Covered::of(&facts);
        findings.extend(news(driver, &covered, &LIBCUDA).map(|finding| finding.at(&path)));
        findings.extend(news(driver, &covered, &NVML).map(|finding| finding.at(&path)));
    }
}

/// A library of the driver, and what its functions' names tell of what they do: a guess, to say how pressing it is.
struct Library {
    /// Stable name of the finding.
    id: &'static str,
    is_of_it: fn(&str) -> bool,
    /// Kinds of functions that matter, each with parts of their names.
    kinds: [(&'static str, &'static [&'static str]); 2],
    why: &'static str,
}

const LIBCUDA: Library = Library {
    id: "driver-newer-than-shim",
    // The debugger's interface is none of the shim's.
    is_of_it: |name| name.starts_with("cu") && !name.starts_with("cudbg"),
    kinds: [("take memory", &["Alloc", "Create", "Reserve", "Import"]), ("launch", &["Launch"])],
    why: "they are passed through; those that take memory or launch work are not counted",
};

const NVML: Library = Library {
    id: "nvml-newer-than-shim",
    is_of_it: |name| name.starts_with("nvml"),
    kinds: [("tell of memory", &["Memory", "Bar1"]), ("tell of processes", &["Process", "Accounting"])],
    why: "they are passed through; those that tell of memory or processes tell of the whole GPU, not of the share",
};

/// What the driver has in `library` that the shim does not know.
fn news(driver: &Driver, covered: &Covered, library: &Library) -> Option<Finding> {
    let exports = driver.exports.iter().filter(|name| (library.is_of_it)(name));
    let new: Vec<&String> =
        exports.filter(|name| function(name).is_none() && !covered.0.contains(*name)).collect();
    let is_any = |name: &str, parts: &[&str]| parts.iter().any(|part| name.contains(part));
    let counts = library.kinds.map(|(_, parts)| new.iter().filter(|name| is_any(name, parts)).count());
    // Those that matter first.
    let (mut shown, others): (Vec<&String>, Vec<&String>) =
        new.iter().partition(|name| library.kinds.iter().any(|(_, parts)| is_any(name, parts)));
    shown.extend(others);
    let names = shown.iter().take(SHOWN).map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
    let what = format!(
        "driver {} has {} functions that this version does not know: {names}{}",
        driver.version,
        new.len(),
        if new.len() > SHOWN { ", …" } else { "" }
    );
    let [(first, _), (second, _)] = library.kinds;
    let remedy = format!(
        "install a newer version of vcuda; {} may {first}, {} may {second}, by their names",
        counts[0], counts[1]
    );
    let severity = if counts.iter().sum::<usize>() > 0 { Severity::Warn } else { Severity::Info };
    (!new.is_empty()).then(|| Finding::new(severity, library.id, what, library.why, remedy))
}

fn check_hook(paths: &Paths, findings: &mut Vec<Finding>) {
    let path = paths.hook();
    match host_file(&path, Depth::Linking) {
        Err(Trouble(reason)) => findings.push(
            Finding::refuse(
                "hook-missing",
                reason,
                "containers with shares do not start",
                "install vcuda on this node, or correct paths.install in the node file",
            )
            .at(&path),
        ),
        Ok(facts) => {
            if !facts.elf().is_some_and(crate::compat::elf::Elf::is_static) {
                findings.push(
                    Finding::warn(
                        "hook-dynamic",
                        "it is no static program",
                        "a loader's environment could reach into it (CVE-2025-23266)",
                        "build it with -C target-feature=+crt-static",
                    )
                    .at(&path),
                );
            }
            if facts.mode & 0o111 == 0 {
                findings.push(
                    Finding::refuse(
                        "hook-not-executable",
                        "it cannot be executed",
                        "containers with shares do not start",
                        "chmod 0755",
                    )
                    .at(&path),
                );
            }
        }
    }
}

/// Root alone may change what runs as root, or enforces: each file, and every folder above it.
fn check_owners(paths: &Paths, findings: &mut Vec<Finding>) {
    let mut looked_at = std::collections::BTreeSet::new();
    for path in [paths.hook(), paths.shim(), paths.shares(), paths.cdi.clone()] {
        for path in path.ancestors() {
            if !looked_at.insert(path.to_owned()) {
                continue;
            }
            let Ok(metadata) = fs::metadata(path) else { continue };
            // A sticky folder such as /tmp lets nobody replace what is another's.
            let writable = metadata.mode() & 0o022 != 0 && metadata.mode() & 0o1000 == 0;
            if metadata.uid() != 0 || writable {
                findings.push(
                    Finding::refuse(
                        "owner-unsafe",
                        format!(
                            "user {} or others may change it (mode {:o})",
                            metadata.uid(),
                            metadata.mode() & 0o7777
                        ),
                        "who changes it is root on this node at the next start of a container",
                        "chown root and chmod go-w",
                    )
                    .at(path),
                );
            }
        }
    }
    if let Ok(metadata) = fs::metadata(paths.shares())
        && metadata.mode() & 0o005 != 0
    {
        findings.push(
            Finding::warn(
                "shares-readable",
                format!("others may list it (mode {:o})", metadata.mode() & 0o7777),
                "it says which pods have which GPUs",
                "chmod 0711 or less",
            )
            .at(&paths.shares()),
        );
    }
}

fn check_spec(paths: &Paths, findings: &mut Vec<Finding>) {
    let path = paths.cdi.join("tencent.com-vcuda.json");
    let refuse = |id, what: String| {
        Finding::refuse(
            id,
            what,
            "containerd refuses containers with shares, or starts them without what they need",
            "start vcuda-device-plugin, which writes it anew",
        )
        .at(&path)
    };
    let text = match host_read(&path, MAX_SPEC_BYTES) {
        Ok(text) => text,
        Err(Trouble(reason)) => return findings.push(refuse("cdi-spec-missing", reason)),
    };
    let spec: Spec = match serde_json::from_slice(&text) {
        Ok(spec) => spec,
        Err(error) => {
            return findings.push(refuse("cdi-spec-broken", format!("no CDI specification: {error}")));
        }
    };
    if spec.kind != CDI_KIND {
        findings.push(refuse("cdi-spec-broken", format!("its kind is {:?}, not {CDI_KIND}", spec.kind)));
    }
    for device in [CDI_DEVICE_SHARE, CDI_DEVICE_WHOLE] {
        if !spec.devices.iter().any(|found| found.name == device) {
            findings.push(refuse("cdi-spec-broken", format!("it has no device {device}")));
        }
    }
    let edits = || spec.devices.iter().map(|device| &device.container_edits).chain([&spec.container_edits]);
    if edits().any(|edits| !edits.device_nodes.is_empty()) {
        findings.push(refuse(
            "cdi-spec-device-nodes",
            "it gives out device nodes, which only vcuda-nri-plugin may".into(),
        ));
    }
    let hooks: Vec<&Hook> = edits().flat_map(|edits| &edits.hooks).collect();
    let by_hooks = hooks.iter().flat_map(|hook| hook.driver_files());
    let by_runtime = edits().flat_map(|edits| &edits.mounts).map(|mount| mount.host_path.clone());
    let lost: BTreeSet<PathBuf> = by_runtime.chain(by_hooks).filter(|path| !path.exists()).collect();
    if let Some(first) = lost.first() {
        findings.push(refuse(
            "cdi-spec-stale",
            format!("{} of the files that it mounts are not there, such as {}", lost.len(), first.display()),
        ));
    }
    if !hooks.iter().any(|hook| vcuda_config::hook::guards(&hook.args)) {
        findings.push(refuse("cdi-spec-unguarded", "it has no guard hook".into()));
    }
    if hooks.iter().any(|hook| hook.env.is_empty()) {
        findings.push(refuse(
            "cdi-spec-hook-env",
            "one of its hooks has no environment of its own and inherits the image's (CVE-2025-23266)".into(),
        ));
    }
    if let Some(hook) = hooks.iter().find(|hook| !hook.path.exists()) {
        findings.push(refuse("cdi-spec-stale", format!("its hook {} is not there", hook.path.display())));
    }
}

fn check_inventory(paths: &Paths, findings: &mut Vec<Finding>) -> usize {
    let inventory = match Inventory::load(&paths.inventory()) {
        Ok(inventory) => inventory,
        Err(error) => {
            findings.push(
                Finding::refuse(
                    "inventory-missing",
                    error.to_string(),
                    "vcuda-nri-plugin binds no share without it",
                    "start vcuda-device-plugin on this node",
                )
                .at(&paths.inventory()),
            );
            return 0;
        }
    };
    if ledger::boot_id().is_ok_and(|boot| boot != inventory.boot_id) {
        findings.push(
            Finding::warn(
                "inventory-old",
                "it is from before this node's last start",
                "GPUs may have changed since",
                "see that vcuda-device-plugin runs",
            )
            .at(&paths.inventory()),
        );
    }
    if inventory.gpus.is_empty() {
        findings.push(
            Finding::refuse(
                "gpus-none",
                "no GPU is on offer",
                "no pod with a share can run here",
                "see `nvidia-smi -L`, and gpus.exclude in the node file",
            )
            .at(&paths.inventory()),
        );
    }
    inventory.gpus.len()
}

fn check_sockets(paths: &Paths, findings: &mut Vec<Finding>) {
    let is_socket = |path: &Path| -> io::Result<bool> { Ok(fs::metadata(path)?.file_type().is_socket()) };
    if !is_socket(&paths.nri_socket).unwrap_or(false) {
        findings.push(
            Finding::refuse(
                "nri-socket-missing",
                "it is no socket, or not there",
                "vcuda-nri-plugin cannot reach containerd, so no container with a share starts",
                "turn NRI on in containerd's configuration and restart it, or correct paths.nriSocket in the node file",
            )
            .at(&paths.nri_socket),
        );
    }
    let kubelet = paths.kubelet.join("kubelet.sock");
    if !is_socket(&kubelet).unwrap_or(false) {
        findings.push(
            Finding::warn(
                "kubelet-socket-missing",
                "it is no socket, or not there",
                "the node offers no shares to the cluster while kubelet is away",
                "start kubelet, or correct paths.kubelet in the node file",
            )
            .at(&kubelet),
        );
    }
}

#[cfg(test)]
#[path = "node/tests.rs"]
mod tests;
