//! What `vcuda-device-plugin migrate --check` shows: each workload that gpu-manager runs on this node, what it asked,
//! what it will get here, and what will not run and why. It changes nothing, and reads gpu-manager's checkpoint, the
//! pods of the node, and the GPUs.

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    path::{Path, PathBuf},
};

use k8s_openapi::api::core::v1::{Container, Pod};
use kube::ResourceExt;
use ledger::{GpuFree, Inventory, Shares, Terms, Wishes, place_by};
use serde::{Deserialize, Deserializer, Serialize};
use thiserror::Error;
use vcuda_config::{GpuUuid, MEMORY_UNIT_BYTES, Request, Resources, gpu_admission_minors};

/// Where gpu-manager keeps its checkpoint when nothing else is said (its `--checkpoint-path`).
pub const CHECKPOINT: &str = "/etc/gpu-manager/checkpoint/gpumanager_internal_checkpoint";

/// A node full of containers makes a checkpoint of some 100 KiB.
const CHECKPOINT_MAX_BYTES: u64 = 16 << 20;

/// gpu-manager's switch for 32-bit libraries.
const COMPAT32: &str = "compat32";

/// Why gpu-manager's checkpoint says nothing.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// It cannot be read.
    #[error("{path}: {source}; pass --checkpoint with gpu-manager's --checkpoint-path, or --no-checkpoint")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is none of gpu-manager's.
    #[error("{path}: no checkpoint of gpu-manager: {reason}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// gpu-manager's checkpoint (`pkg/types` at 8cd842e): by pod UID, by container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Checkpoint {
    // Without it, it is another program's file: kubelet's checkpoint is JSON, too.
    #[serde(rename = "PodGPUMapping", deserialize_with = "or_null")]
    pods: BTreeMap<String, BTreeMap<String, Allocated>>,
}

/// What gpu-manager has given a container.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Allocated {
    #[serde(default)]
    devices: Vec<String>,
    #[serde(default)]
    cores: u64,
    #[serde(default)]
    memory: u64,
}

/// All workloads of the node.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Migration {
    /// Each container that asks for a share.
    pub workloads: Vec<Workload>,
    /// What could not be looked at, and what follows from it.
    pub notes: Vec<String>,
}

/// One container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Workload {
    /// `<namespace>/<name>`, or the pod's UID where the API server was not asked.
    pub pod: String,
    /// The container.
    pub container: String,
    /// Core that it asked.
    pub core: u32,
    /// Memory units that it asked.
    pub memory_units: u32,
    /// Numbers of the device nodes that gpu-manager gave it or will give it.
    pub on: Vec<u32>,
    /// What becomes of it.
    pub verdict: Verdict,
    /// GPUs that it will get.
    pub gpus: Vec<GpuUuid>,
    /// What it will get, or why it will not run and what to do.
    pub reason: String,
}

/// What becomes of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Verdict {
    /// It runs.
    Runs,
    /// It can never run as it is.
    Refused,
    /// It does not fit beside the others.
    NoRoom,
    /// gpu-manager remembers it, but there is no such pod.
    Gone,
}

/// Go writes a map without entries as null.
fn or_null<'de, D, T>(from: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Option::deserialize(from).map(Option::unwrap_or_default)
}

impl Checkpoint {
    /// Reads gpu-manager's checkpoint.
    ///
    /// # Errors
    ///
    /// See [`CheckpointError`].
    pub fn load(path: &Path) -> Result<Self, CheckpointError> {
        let read = |source| CheckpointError::Read { path: path.into(), source };
        let invalid = |reason| CheckpointError::Invalid { path: path.into(), reason };
        if fs::metadata(path).map_err(read)?.len() > CHECKPOINT_MAX_BYTES {
            return Err(invalid(format!("larger than {CHECKPOINT_MAX_BYTES} bytes")));
        }
        serde_json::from_slice(&fs::read(path).map_err(read)?).map_err(|error| invalid(error.to_string()))
    }
}

impl Migration {
    /// Judges all that `checkpoint` and `pods` name. Without `pods`, the API server was not asked, and the checkpoint
    /// is all that is known.
    pub fn of(
        inventory: &Inventory,
        checkpoint: &Checkpoint,
        pods: Option<&[Pod]>,
        names: &Resources,
    ) -> Self {
        let mut left: Vec<GpuFree<'_>> = Shares::default().free(inventory).unwrap_or_default();
        let mut asking = match pods {
            Some(pods) => pods.iter().flat_map(|pod| asking(pod, checkpoint, names)).collect(),
            None => remembered(checkpoint, |_| true),
        };
        // What runs now goes first, each to the GPU where it is; of equals, the largest.
        asking.sort_by_key(|one| (one.on.is_empty(), std::cmp::Reverse(one.core)));
        let mut workloads: Vec<_> = asking.into_iter().map(|one| judge(one, inventory, &mut left)).collect();
        let mut notes = Vec::new();
        if let Some(pods) = pods {
            let known = |uid: &str| pods.iter().any(|pod| pod.uid().as_deref() == Some(uid));
            workloads.extend(remembered(checkpoint, |uid| !known(uid)).into_iter().map(|one| Workload {
                verdict: Verdict::Gone,
                reason: "no pod of this UID is on the node; the entry is gpu-manager's own leftover".into(),
                ..one.workload()
            }));
        } else {
            notes.push(
                "the API server was not asked (no --kubeconfig): pods have no names, and what annotations and requests \
                 say is not known"
                    .into(),
            );
        }
        Self { workloads, notes }
    }

    /// Whether everything that exists will run.
    pub fn all_run(&self) -> bool {
        self.workloads.iter().all(|one| matches!(one.verdict, Verdict::Runs | Verdict::Gone))
    }
}

/// A container that asks for a share.
struct Asking {
    pod: String,
    container: String,
    core: u32,
    memory_units: u32,
    on: Vec<u32>,
    annotations: BTreeMap<String, String>,
    compat32: bool,
}

impl Asking {
    fn workload(self) -> Workload {
        Workload {
            pod: self.pod,
            container: self.container,
            core: self.core,
            memory_units: self.memory_units,
            on: self.on,
            verdict: Verdict::Runs,
            gpus: Vec::new(),
            reason: String::new(),
        }
    }
}

fn judge(asking: Asking, inventory: &Inventory, left: &mut [GpuFree<'_>]) -> Workload {
    let annotation = |key: &str| asking.annotations.get(key).map(String::as_str);
    let read = Request::new(asking.core, asking.memory_units).map_err(|error| error.to_string());
    let read = read.and_then(|request| {
        Terms::read(&request, annotation).map_err(|error| error.to_string())?;
        let wishes = Wishes::read(annotation).map_err(|error| error.to_string())?;
        Ok((request, wishes))
    });
    let (request, wishes) = match read {
        Ok(read) => read,
        Err(reason) => return Workload { verdict: Verdict::Refused, reason, ..asking.workload() },
    };
    let on_minor = |minor: &u32| inventory.gpus.iter().find(|gpu| gpu.minor == *minor);
    let prefer: Vec<GpuUuid> = asking.on.iter().filter_map(on_minor).map(|gpu| gpu.uuid.clone()).collect();
    let cordoned = inventory.cordoned_at();
    let placement = match place_by(left, &request, &prefer, &wishes.rules(inventory, &cordoned)) {
        Ok(placement) => placement,
        Err(no_room) => {
            let reason = format!("{no_room}; ask for less, or move it to another node first");
            return Workload { verdict: Verdict::NoRoom, reason, ..asking.workload() };
        }
    };
    for share in &placement.gpus {
        if let Some(free) = left.iter_mut().find(|free| free.gpu.uuid == share.uuid) {
            free.core = free.core.saturating_sub(share.core);
            free.memory_bytes = free.memory_bytes.saturating_sub(share.memory_bytes);
            free.shares += 1;
        }
    }
    let mut said = match request {
        Request::Share { core, .. } => {
            vec![format!("{core} core and {} MiB of one GPU", request.memory_bytes().unwrap_or(0) >> 20)]
        }
        Request::Whole { gpus } => vec![format!("{gpus} whole GPU(s) with their whole memory")],
    };
    if !prefer.is_empty() && !placement.gpus.iter().all(|gpu| prefer.contains(&gpu.uuid)) {
        said.push("on another GPU than now".into());
    }
    if matches!(request, Request::Whole { .. }) && asking.memory_units > 0 {
        said.push("its memory request says nothing, as with gpu-manager".into());
    }
    if asking.compat32 {
        said.push("compat32 is not supported: no 32-bit driver libraries".into());
    }
    let gpus = placement.gpus.into_iter().map(|gpu| gpu.uuid).collect();
    Workload { gpus, reason: said.join("; "), ..asking.workload() }
}

/// Containers of the checkpoint whose pod `counts`.
fn remembered(checkpoint: &Checkpoint, counts: impl Fn(&str) -> bool) -> Vec<Asking> {
    let pods = checkpoint.pods.iter().filter(|(uid, _)| counts(uid));
    let each =
        pods.flat_map(|(uid, containers)| containers.iter().map(move |(name, given)| (uid, name, given)));
    each.map(|(uid, name, given)| Asking {
        pod: uid.clone(),
        container: name.clone(),
        core: u32::try_from(given.cores).unwrap_or(u32::MAX),
        memory_units: u32::try_from(given.memory.div_ceil(MEMORY_UNIT_BYTES)).unwrap_or(u32::MAX),
        on: given.minors(),
        annotations: BTreeMap::new(),
        compat32: false,
    })
    .collect()
}

/// Containers of a pod that ask for either resource.
fn asking(pod: &Pod, checkpoint: &Checkpoint, names: &Resources) -> Vec<Asking> {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let Some(spec) = pod.spec.as_ref().filter(|_| !matches!(phase, Some("Succeeded" | "Failed"))) else {
        return Vec::new();
    };
    let given = pod.uid().and_then(|uid| checkpoint.pods.get(&uid));
    let annotations = pod.annotations();
    let pairs = annotations.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    let predicted = gpu_admission_minors(spec.node_name.as_deref(), pairs).unwrap_or_default();
    let units = |container: &Container, name: &str| {
        let limits = container.resources.as_ref().and_then(|it| it.limits.as_ref());
        limits.and_then(|limits| limits.get(name)?.0.parse().ok()).unwrap_or(0)
    };
    let asks = spec.init_containers.iter().flatten().chain(&spec.containers).map(|container| {
        let given = given.and_then(|given| given.get(&container.name));
        Asking {
            pod: format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any()),
            container: container.name.clone(),
            core: units(container, &names.core_name()),
            memory_units: units(container, &names.memory_name()),
            on: given.map_or_else(|| predicted.clone(), Allocated::minors),
            annotations: annotations.clone(),
            compat32: container.env.iter().flatten().any(|it| it.name == COMPAT32),
        }
    });
    asks.filter(|one| one.core > 0 || one.memory_units > 0).collect()
}

impl Allocated {
    /// Numbers of its device nodes.
    fn minors(&self) -> Vec<u32> {
        self.devices.iter().filter_map(|path| path.strip_prefix("/dev/nvidia")?.parse().ok()).collect()
    }
}

impl fmt::Display for Migration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for one in &self.workloads {
            let verdict = match one.verdict {
                Verdict::Runs => "runs",
                Verdict::Refused => "WILL NOT RUN",
                Verdict::NoRoom => "DOES NOT FIT",
                Verdict::Gone => "gone",
            };
            let Workload { pod, container, core, memory_units, .. } = one;
            writeln!(f, "{pod} {container}: asked {core} core, {memory_units} memory units")?;
            let gpus: Vec<_> = one.gpus.iter().map(GpuUuid::as_str).collect();
            let on = if gpus.is_empty() { String::new() } else { format!(" on {}", gpus.join(", ")) };
            writeln!(f, "  {verdict}{on}: {}", one.reason)?;
        }
        let count = |verdict| self.workloads.iter().filter(|one| one.verdict == verdict).count();
        writeln!(
            f,
            "{} run, {} can never run, {} do not fit, {} are gone",
            count(Verdict::Runs),
            count(Verdict::Refused),
            count(Verdict::NoRoom),
            count(Verdict::Gone)
        )?;
        self.notes.iter().try_for_each(|note| writeln!(f, "note: {note}"))
    }
}

#[cfg(test)]
mod tests {
    use ledger::Gpu;
    use serde_json::json;

    use super::*;
    use crate::testing;

    fn inventory() -> Inventory {
        let gpu = |n: u8| Gpu { total_bytes: 40 << 30, ..testing::gpu(n, 159) };
        testing::inventory("boot", (0..2).map(gpu).collect())
    }

    /// As gpu-manager writes it: memory in bytes, device nodes by path.
    fn checkpoint() -> Checkpoint {
        let text = json!({ "PodGPUMapping": {
            "uid-a": { "main": { "Devices": ["/dev/nvidia1"], "Cores": 30, "Memory": 8_589_934_592_u64 } },
            "uid-old": { "main": { "Devices": ["/dev/nvidia0"], "Cores": 100, "Memory": 42_949_672_960_u64 } },
        } });
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gpumanager_internal_checkpoint");
        fs::write(&path, text.to_string()).unwrap();
        Checkpoint::load(&path).unwrap()
    }

    fn pod(name: &str, core: u32, memory: u32, more: serde_json::Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": { "name": name, "namespace": "ns", "uid": format!("uid-{name}"), "annotations": more },
            "spec": { "nodeName": "n", "containers": [{ "name": "main", "resources": { "limits": {
                "tencent.com/vcuda-core": core.to_string(), "tencent.com/vcuda-memory": memory.to_string(),
            } } }] },
        }))
        .unwrap()
    }

    #[test]
    fn each_workload_says_what_it_will_get_or_why_it_will_not_run() {
        let pods = [
            pod("a", 30, 32, json!({})),
            pod("b", 0, 8, json!({})),
            pod("c", 150, 8, json!({})),
            pod("d", 20, 160, json!({})),
            pod(
                "e",
                100,
                4,
                json!({
                    "tencent.com/predicate-gpu-idx-0": "0", "tencent.com/predicate-node": "n",
                }),
            ),
            pod("f", 20, 4, json!({ "tencent.com/vcuda-core-limit": "nonsense" })),
        ];
        let migration = Migration::of(&inventory(), &checkpoint(), Some(&pods), &Resources::default());
        let of = |name: &str| {
            migration.workloads.iter().find(|one| one.pod.ends_with(name)).unwrap_or_else(|| panic!("{name}"))
        };
        let gpu = |n: u8| GpuUuid::from_bytes([n; 16]);
        assert_eq!((of("/a").verdict, &of("/a").gpus[..]), (Verdict::Runs, &[gpu(1)][..]), "where it is now");
        assert_eq!((of("/e").verdict, &of("/e").gpus[..]), (Verdict::Runs, &[gpu(0)][..]));
        assert!(of("/e").reason.contains("as with gpu-manager"));
        for (name, verdict, said) in [
            ("/b", Verdict::Refused, "vcuda-core is missing"),
            ("/c", Verdict::Refused, "neither below 100"),
            ("/d", Verdict::NoRoom, "no GPU has 20 core"),
            ("/f", Verdict::Refused, "vcuda-core-limit"),
            ("uid-old", Verdict::Gone, "leftover"),
        ] {
            assert_eq!(of(name).verdict, verdict, "{name}");
            assert!(of(name).reason.contains(said), "{}", of(name).reason);
        }
        assert!(!migration.all_run());
        let text = migration.to_string();
        assert!(text.contains("2 run, 3 can never run, 1 do not fit, 1 are gone"), "{text}");
    }

    #[test]
    fn without_the_api_server_the_checkpoint_is_all_that_is_known() {
        let migration = Migration::of(&inventory(), &checkpoint(), None, &Resources::default());
        assert!(migration.all_run() && migration.notes.len() == 1);
        assert_eq!(migration.workloads.len(), 2);
    }

    #[test]
    fn what_is_no_checkpoint_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoint");
        assert!(Checkpoint::load(&path).unwrap_err().to_string().contains("--checkpoint"));
        let kubelets = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}"#;
        for text in ["", "[]", "{}", "{\"PodGPUMapping\":[]}", "{\"PodGPUMapping\":{\"uid\":", kubelets] {
            fs::write(&path, text).unwrap();
            assert!(matches!(Checkpoint::load(&path), Err(CheckpointError::Invalid { .. })), "{text}");
        }
        for text in ["{\"PodGPUMapping\":null}", "{\"PodGPUMapping\":{}}"] {
            fs::write(&path, text).unwrap();
            assert_eq!(Checkpoint::load(&path).unwrap(), Checkpoint::default(), "{text}");
        }
    }
}
