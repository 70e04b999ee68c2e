//! Which GPUs a scheduler picked for a container, read from what it left on the pod. A pod's owner can write there,
//! too; all that comes of it is which GPU the pod's own share sits on, where the ledger has room.

use ledger::Inventory;
use vcuda_config::{GpuUuid, PodPlacement, annotation, gpu_admission_minors};

use crate::wire::PodSandbox;

/// What a scheduler picked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Chosen {
    /// Nothing: the node places the share.
    Nothing,
    /// These GPUs. vcuda-scheduler counts the share there, so it is there or nowhere.
    Must(Vec<GpuUuid>),
    /// These GPUs, by gpu-admission: there if possible.
    Should(Vec<GpuUuid>),
}

impl Chosen {
    /// Reads what was picked for `container`.
    ///
    /// # Errors
    ///
    /// A text that says why the choice cannot be read, and what to do.
    pub fn read(pod: &PodSandbox, container: &str, inventory: &Inventory) -> Result<Self, String> {
        if let Some(text) = pod.annotations.get(annotation::PLACEMENT) {
            let placement: PodPlacement = text.parse().map_err(|error| {
                format!(
                    "annotation {}: {error}; delete the pod to have it placed anew",
                    annotation::PLACEMENT
                )
            })?;
            return Ok(match placement.gpus(container) {
                [] => Self::Nothing,
                gpus => Self::Must(gpus.to_vec()),
            });
        }
        let pairs = pod.annotations.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let minors = gpu_admission_minors(None, pairs).unwrap_or_default();
        let gpu = |minor: &u32| inventory.gpus.iter().find(|gpu| gpu.minor == *minor);
        let gpus: Vec<_> = minors.iter().filter_map(gpu).map(|gpu| gpu.uuid.clone()).collect();
        Ok(if gpus.is_empty() { Self::Nothing } else { Self::Should(gpus) })
    }

    /// The GPUs, if any.
    pub fn gpus(&self) -> &[GpuUuid] {
        match self {
            Self::Nothing => &[],
            Self::Must(gpus) | Self::Should(gpus) => gpus,
        }
    }
}
