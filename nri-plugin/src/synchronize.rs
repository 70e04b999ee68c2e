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
    /// When its first part came, by [`ledger::uptime_ms`].
    taken_at: u64,
    pods: Vec<PodSandbox>,
    /// IDs, and the pod sandboxes they are in, of containers that are created or run.
    containers: Vec<(String, String)>,
    /// Those of them that have a grant.
    granted: Vec<Container>,
    /// See [`Live::complete`].
    complete: bool,
}

impl Census {
    /// Takes one part of the list. Of containers that do not concern us only the ID is kept.
    pub fn add(&mut self, pods: Vec<PodSandbox>, containers: Vec<Container>) {
        if self.taken_at == 0 {
            self.taken_at = ledger::uptime_ms();
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

    /// Notes which runtime the list is of, as it configured us.
    pub fn is_of(&mut self, runtime: &str) {
        self.complete = lists_while_nothing_is_created(runtime);
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
        let share =
            |container: &Container| ShareName::new(&self.pod_of(container)?.uid, &container.name).ok();
        let granted = self.granted.iter().filter_map(share).collect();
        Live { taken_at: self.taken_at, pods, containers, granted, complete: self.complete }
    }

    fn pod_of(&self, container: &Container) -> Option<&PodSandbox> {
        self.pods.iter().find(|pod| pod.id == container.pod_sandbox_id)
    }
}

/// Whether a runtime makes its list while it creates no container: containerd does from 1.7.26, 2.0.3 and 2.1 on
/// (`BlockPluginSync`). Until then a container may be bound, and not be on the list yet.
fn lists_while_nothing_is_created(runtime: &str) -> bool {
    let Some(version) = runtime.strip_prefix("containerd ") else { return false };
    // What follows the third number is of a distribution, or of a version before a release.
    let mut numbers = version.trim_start_matches('v').split(|c: char| !c.is_ascii_digit());
    let mut next = || numbers.next().and_then(|number| number.parse::<u32>().ok());
    match (next(), next(), next()) {
        (Some(1), Some(7), Some(patch)) => patch >= 26,
        (Some(2), Some(0), Some(patch)) => patch >= 3,
        (Some(major), Some(_), Some(_)) => major >= 2,
        _ => false,
    }
}

impl Binder {
    /// Brings the ledger in line with the runtime's list: releases shares of pods that are gone, takes containers
    /// back in that run with a share and have no record, and says which run or wait without one.
    ///
    /// # Errors
    ///
    /// Something of it could not be done; all else was. See [`Binder::is_behind`].
    pub fn synchronize(&self, census: &Census) -> Result<(), LedgerError> {
        // Before anything is done: what fails meanwhile, in another call, is behind this list.
        self.set_behind(false);
        self.noted(self.follow(census))
    }

    fn follow(&self, census: &Census) -> Result<(), LedgerError> {
        let pruned = self.ledger().prune(&census.live())?;
        for share in &pruned.released {
            tracing::info!(%share, "its pod ended while nobody looked; share released");
        }
        for share in &pruned.stopped {
            tracing::info!(%share, "its container ended while nobody looked; the share stays with its pod");
        }
        let shares = self.ledger().shares()?;
        for container in &census.granted {
            let Some(pod) = census.pod_of(container) else { continue };
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
        self.reload(pruned.unseen)?;
        pruned.failed.into_iter().next().map_or(Ok(()), Err)
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
            bound_uptime: 0,
            shim: kind == ShareKind::Share,
            terms: terms(pod, &granted.request)?,
            set: Change::default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_runtimes_that_are_known_to_list_everything_are_believed() {
        for runtime in [
            "containerd v1.7.26",
            "containerd 1.7.30~ds1-6+deb13u1",
            "containerd v2.0.3",
            "containerd 2.1.9+unknown",
            "containerd v2.1.0-beta.0",
            "containerd v3.0.0",
        ] {
            assert!(lists_while_nothing_is_created(runtime), "{runtime}");
        }
        for runtime in [
            "containerd v1.7.25",
            "containerd v2.0.2",
            "containerd 1.7.24~ds1",
            "containerd 1.6.26",
            "containerd 2",
            "containerd 99999999999999999999.1.1",
            "containerd ",
            "cri-o 1.34.0",
            "",
        ] {
            assert!(!lists_while_nothing_is_created(runtime), "{runtime}");
        }
    }
}
