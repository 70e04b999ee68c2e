//! Kubelet's device manager: who has which device ID, and what the plugin answered. It follows
//! `pkg/kubelet/cm/devicemanager` of Kubernetes 1.36 (`manager.go`: `devicesToAllocate`, `Allocate`;
//! `pod_devices.go`: `deviceRunContainerOptions`), without NUMA alignment.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, io,
    path::Path,
};

use anyhow::{Context, Result, bail};
use prost::Message;
use serde::{Deserialize, Serialize};

#[expect(missing_docs, reason = "generated from proto/deviceplugin.proto, which says what each is")]
pub mod api {
    tonic::include_proto!("v1beta1");
}

use api::ContainerAllocateResponse;

/// Device IDs of one resource.
pub type Ids = BTreeSet<String>;

/// What one container got of one resource.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Entry {
    pod_uid: String,
    container: String,
    resource: String,
    ids: Ids,
    /// The plugin's answer, as protobuf. Kubelet keeps it and uses it for every later start of the container.
    answer: Vec<u8>,
}

/// Everything a container's start takes from the device plugins.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Environment.
    pub envs: BTreeMap<String, String>,
    /// Container annotations.
    pub annotations: BTreeMap<String, String>,
    /// Mounts.
    pub mounts: Vec<api::Mount>,
    /// Device nodes.
    pub devices: Vec<api::DeviceSpec>,
    /// CDI devices.
    pub cdi_devices: Vec<String>,
}

/// The books.
#[derive(Debug, Default)]
pub struct Devices {
    healthy: HashMap<String, Ids>,
    unhealthy: HashMap<String, Ids>,
    entries: Vec<Entry>,
}

/// Which IDs a container still needs, and out of which.
#[derive(Debug, PartialEq, Eq)]
pub enum Choice {
    /// It has what it asked for; the cached answer counts.
    Settled,
    /// These, given back by an init container of the same pod, plus `missing` of `available`.
    Choose {
        /// IDs taken already.
        taken: Ids,
        /// Free IDs.
        available: Ids,
        /// How many of them to take.
        missing: usize,
    },
}

impl Devices {
    /// Reads what an earlier kubelet wrote to `checkpoint`.
    pub fn load(checkpoint: &Path) -> Result<Self> {
        let entries = match fs::read(checkpoint) {
            Ok(bytes) => serde_json::from_slice(&bytes).context("checkpoint")?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => vec![],
            Err(error) => return Err(error.into()),
        };
        Ok(Self { entries, ..Self::default() })
    }

    /// Writes who has what to `checkpoint`.
    pub fn store(&self, checkpoint: &Path) -> Result<()> {
        let part = checkpoint.with_extension("part");
        fs::write(&part, serde_json::to_vec(&self.entries)?)?;
        Ok(fs::rename(part, checkpoint)?)
    }

    /// Takes over the plugin's list.
    pub fn update(&mut self, resource: &str, devices: Vec<api::Device>) {
        let (healthy, unhealthy): (Vec<_>, Vec<_>) =
            devices.into_iter().partition(|device| device.health == "Healthy");
        self.healthy.insert(resource.into(), healthy.into_iter().map(|device| device.id).collect());
        self.unhealthy.insert(resource.into(), unhealthy.into_iter().map(|device| device.id).collect());
    }

    /// Takes note that the plugin went away: what it offered counts as unhealthy.
    pub fn lose(&mut self, resource: &str) {
        let gone = self.healthy.insert(resource.into(), Ids::new()).unwrap_or_default();
        self.unhealthy.entry(resource.into()).or_default().extend(gone);
    }

    /// How many healthy devices a resource has: the node's allocatable.
    pub fn healthy(&self, resource: &str) -> usize {
        self.healthy.get(resource).map_or(0, Ids::len)
    }

    /// How many unhealthy devices a resource has.
    pub fn unhealthy(&self, resource: &str) -> usize {
        self.unhealthy.get(resource).map_or(0, Ids::len)
    }

    /// IDs that a container has of a resource.
    pub fn ids(&self, pod_uid: &str, container: &str, resource: &str) -> Option<&Ids> {
        self.entry(pod_uid, container, resource).map(|entry| &entry.ids)
    }

    /// What must be chosen so that the container has `asked` of `resource`. `reusable` are IDs that the pod's
    /// finished init containers had.
    pub fn choice(
        &self,
        pod_uid: &str,
        container: &str,
        resource: &str,
        asked: usize,
        reusable: &Ids,
    ) -> Result<Choice> {
        let Some(healthy) = self.healthy.get(resource) else {
            bail!("cannot allocate unregistered device {resource}");
        };
        if healthy.is_empty() {
            bail!("no healthy devices present; cannot allocate unhealthy devices {resource}");
        }
        if let Some(has) = self.ids(pod_uid, container, resource) {
            if has.len() != asked {
                bail!(
                    "pod {pod_uid:?} container {container:?} changed request for resource {resource:?} from {} to {asked}",
                    has.len()
                );
            }
            if !has.is_subset(healthy) {
                bail!(
                    "previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
                );
            }
            return Ok(Choice::Settled);
        }
        let taken: Ids = reusable.iter().take(asked).cloned().collect();
        let missing = asked - taken.len();
        let used: Ids =
            self.entries.iter().filter(|e| e.resource == resource).flat_map(|e| e.ids.clone()).collect();
        let available: Ids = healthy.difference(&used).cloned().collect();
        if available.len() < missing {
            bail!(
                "requested number of devices unavailable for {resource}. Requested: {missing}, Available: {}",
                available.len()
            );
        }
        Ok(Choice::Choose { taken, available, missing })
    }

    /// Books `ids` and the plugin's answer.
    pub fn insert(
        &mut self,
        pod_uid: &str,
        container: &str,
        resource: &str,
        ids: Ids,
        answer: &ContainerAllocateResponse,
    ) {
        self.entries.push(Entry {
            pod_uid: pod_uid.into(),
            container: container.into(),
            resource: resource.into(),
            ids,
            answer: answer.encode_to_vec(),
        });
    }

    /// Frees all that a pod has.
    pub fn remove_pod(&mut self, pod_uid: &str) {
        self.entries.retain(|entry| entry.pod_uid != pod_uid);
    }

    /// Merges the cached answers of all resources of a container. Kubelet goes through them in the random order of
    /// a Go map; where two answers set the same thing, whichever comes first wins.
    pub fn run_options(&self, pod_uid: &str, container: &str) -> Result<RunOptions> {
        let mut options = RunOptions::default();
        for entry in self.entries.iter().filter(|e| e.pod_uid == pod_uid && e.container == container) {
            let answer = ContainerAllocateResponse::decode(entry.answer.as_slice())?;
            for (name, value) in answer.envs {
                options.envs.entry(name).or_insert(value);
            }
            for (name, value) in answer.annotations {
                options.annotations.entry(name).or_insert(value);
            }
            for mount in answer.mounts {
                if !options.mounts.iter().any(|known| known.container_path == mount.container_path) {
                    options.mounts.push(mount);
                }
            }
            for device in answer.devices {
                if !options.devices.iter().any(|known| known.container_path == device.container_path) {
                    options.devices.push(device);
                }
            }
            for device in answer.cdi_devices {
                if !options.cdi_devices.contains(&device.name) {
                    options.cdi_devices.push(device.name);
                }
            }
        }
        Ok(options)
    }

    fn entry(&self, pod_uid: &str, container: &str, resource: &str) -> Option<&Entry> {
        self.entries
            .iter()
            .find(|e| e.pod_uid == pod_uid && e.container == container && e.resource == resource)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offered(count: usize) -> Devices {
        let mut devices = Devices::default();
        let list = (0..count).map(|n| api::Device { id: format!("g::{n}"), health: "Healthy".into() });
        devices.update("r", list.collect());
        devices
    }

    fn ids(numbers: &[usize]) -> Ids {
        numbers.iter().map(|n| format!("g::{n}")).collect()
    }

    #[test]
    fn a_restarted_container_keeps_its_answer() {
        let mut devices = offered(4);
        let answer = ContainerAllocateResponse {
            annotations: [("a".to_owned(), "first".to_owned())].into(),
            ..Default::default()
        };
        devices.insert("pod", "main", "r", ids(&[0, 1]), &answer);
        assert_eq!(devices.choice("pod", "main", "r", 2, &Ids::new()).unwrap(), Choice::Settled);
        assert_eq!(devices.run_options("pod", "main").unwrap().annotations["a"], "first");
    }

    #[test]
    fn app_containers_reuse_what_init_containers_had() {
        let mut devices = offered(3);
        devices.insert("pod", "init", "r", ids(&[0, 1]), &ContainerAllocateResponse::default());
        let choice = devices.choice("pod", "main", "r", 3, &ids(&[0, 1])).unwrap();
        assert_eq!(choice, Choice::Choose { taken: ids(&[0, 1]), available: ids(&[2]), missing: 1 });
    }

    #[test]
    fn nothing_is_promised_twice_or_without_a_plugin() {
        let mut devices = offered(3);
        devices.insert("one", "main", "r", ids(&[0, 1]), &ContainerAllocateResponse::default());
        let error = devices.choice("two", "main", "r", 2, &Ids::new()).unwrap_err().to_string();
        assert!(error.contains("Requested: 2, Available: 1"), "{error}");
        devices.lose("r");
        let error = devices.choice("two", "main", "r", 1, &Ids::new()).unwrap_err().to_string();
        assert!(error.contains("no healthy devices"), "{error}");
        assert!(devices.choice("two", "main", "other", 1, &Ids::new()).is_err());
    }

    #[test]
    fn the_books_survive_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("checkpoint");
        let mut devices = offered(2);
        devices.insert("pod", "main", "r", ids(&[1]), &ContainerAllocateResponse::default());
        devices.store(&file).unwrap();
        let devices = Devices::load(&file).unwrap();
        assert_eq!(devices.ids("pod", "main", "r"), Some(&ids(&[1])));
        assert_eq!(devices.healthy("r"), 0);
    }
}
