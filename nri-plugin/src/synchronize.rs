//! Synchronize: the runtime lists its pods and containers, in one message or several, and the ledger is brought in
//! line with them.

use std::collections::BTreeMap;

use ledger::{Change, GpuShare, LedgerError, Live, PodLife, ShareKind, ShareName, ShareRecord, ShareState};
use region::Slots;
use vcuda_config::{Request, annotation};

use crate::{
    binding::terms,
    binding::{self, Binder},
    grant::{Granted, has_guard, is_granted},
    wire::{Container, ContainerState, PodSandbox},
};

/// What the runtime has listed so far.
#[derive(Debug, Default)]
pub struct Census {
    /// When its first part came, in milliseconds since 1970.
    taken_at: u64,
    pods: Vec<PodSandbox>,
    /// IDs, and the pod sandboxes they are in, of containers that are created or run.
    containers: Vec<(String, String)>,
    /// Those of them that have a grant.
    granted: Vec<Container>,
}

impl Census {
    /// Takes one part of the list. Of containers that do not concern us only the ID is kept.
    pub fn add(&mut self, pods: Vec<PodSandbox>, containers: Vec<Container>) {
        if self.taken_at == 0 {
            self.taken_at = ledger::milliseconds_since_1970();
        }
        self.pods.extend(pods);
        for container in containers {
            if container.state.enum_value() == Ok(ContainerState::CONTAINER_STOPPED) {
                continue;
            }
            self.containers.push((container.id.clone(), container.pod_sandbox_id.clone()));
            if is_granted(&container) {
                self.granted.push(container);
            }
        }
    }

    fn live(&self) -> Live {
        let mut pods = BTreeMap::new();
        for pod in &self.pods {
            // A sandbox that is no process of its own has no PID; it is up as long as something runs in it.
            let up = pod.pid != 0 || self.containers.iter().any(|(_, sandbox)| *sandbox == pod.id);
            let life = pods.entry(pod.uid.clone()).or_insert(PodLife::Ended);
            if up {
                *life = PodLife::Up;
            }
        }
        let containers = self.containers.iter().map(|(id, _)| id.clone()).collect();
        Live { taken_at: self.taken_at, pods, containers }
    }
}

impl Binder {
    /// Brings the ledger in line with the runtime's list: releases shares of pods that are gone, takes containers
    /// back in that run with a share and have no record, and says which run or wait without one.
    pub fn synchronize(&self, census: &Census) -> Result<(), LedgerError> {
        let pruned = self.ledger().prune(&census.live())?;
        for share in &pruned.released {
            tracing::info!(%share, "its pod ended while nobody looked; share released");
        }
        for share in &pruned.stopped {
            tracing::info!(%share, "its container ended while nobody looked; the share stays with its pod");
        }
        let shares = self.ledger().shares()?;
        for container in &census.granted {
            let Some(pod) = census.pods.iter().find(|pod| pod.id == container.pod_sandbox_id) else {
                continue;
            };
            if !container.annotations.contains_key(annotation::SHARE) {
                tracing::warn!(
                    pod = %format_args!("{}/{}", pod.namespace, pod.name),
                    container = container.name,
                    "has a grant and no share: it was created while this plugin was away, and has no GPU; restart it"
                );
                continue;
            }
            let known = ShareName::new(&pod.uid, &container.name)
                .is_ok_and(|name| shares.records.contains_key(&name));
            if !known {
                self.take_back(pod, container);
            }
        }
        self.reload(pruned.unseen)
    }

    fn take_back(&self, pod: &PodSandbox, container: &Container) {
        let pod_name = format!("{}/{}", pod.namespace, pod.name);
        let adopted = self.as_it_runs(pod, container).and_then(|record| {
            self.ledger().adopt(&record, binding::fill).map_err(|error| error.to_string())
        });
        match adopted {
            Ok(_) => tracing::error!(
                pod = pod_name,
                container = container.name,
                "ran with a share that had no record; the record was made anew, limits can be changed after a restart"
            ),
            Err(reason) => tracing::error!(
                pod = pod_name,
                container = container.name,
                reason,
                "runs with a share that has no record, and none can be made; restart it"
            ),
        }
    }

    /// The record of a container as it runs: the amounts from its grant, the GPUs from its device nodes.
    fn as_it_runs(&self, pod: &PodSandbox, container: &Container) -> Result<ShareRecord, String> {
        if !has_guard(container, self.paths()) {
            return Err("no guard of ours has seen it start".into());
        }
        let granted = Granted::read(pod, container, self.paths())?;
        let inventory = self.inventory()?;
        let on = inventory.gpus.iter().filter(|gpu| {
            gpu.device_nodes.iter().any(|node| {
                container
                    .linux
                    .devices
                    .iter()
                    .any(|device| (device.major, device.minor) == (node.major.into(), node.minor.into()))
            })
        });
        let (kind, count) = match granted.request {
            Request::Share { .. } => (ShareKind::Share, 1),
            Request::Whole { gpus } => (ShareKind::Whole, gpus.get() as usize),
        };
        let gpus: Vec<GpuShare> = on
            .map(|gpu| match granted.request {
                Request::Share { core, .. } => (gpu, core, granted.request.memory_bytes().unwrap_or(0)),
                Request::Whole { .. } => (gpu, vcuda_config::CORE_PER_GPU, gpu.usable_bytes()),
            })
            .map(|(gpu, core, memory_bytes)| GpuShare {
                uuid: gpu.uuid.clone(),
                minor: gpu.minor,
                core,
                memory_bytes,
                // Given to it when it is put back.
                slots: Slots::NONE,
            })
            .collect();
        if gpus.len() != count {
            return Err(format!("it was granted {count} GPU(s) and has the device nodes of {}", gpus.len()));
        }
        Ok(ShareRecord {
            version: ShareRecord::VERSION,
            pod: binding::pod_ref(pod),
            container: binding::container_ref(container),
            boot_id: self.ledger().boot_id().into(),
            kind,
            gpus,
            state: ShareState::Running,
            bound_at: 0,
            shim: kind == ShareKind::Share,
            terms: terms(pod, &granted.request)?,
            set: Change::default(),
        })
    }
}
