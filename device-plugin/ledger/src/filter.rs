//! What a pod's owner says about the GPUs of the pod, in pod annotations. Its text is anyone's: bounded, and either
//! understood or refused with the annotation's name.

use thiserror::Error;
use vcuda_config::{GpuUuid, annotation};

use crate::{Gpu, Inventory, Policy, Rules};

/// A list longer than this is no list of models or GPUs.
const MAX_BYTES: usize = 8 << 10;

/// Which GPUs will do, by model and by UUID. Empty lists rule nothing out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuFilter {
    use_models: Vec<String>,
    avoid_models: Vec<String>,
    use_gpus: Vec<GpuUuid>,
    avoid_gpus: Vec<GpuUuid>,
}

/// All that a pod's owner says about its GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// How the GPU is picked, where the pod says it.
    pub policy: Option<Policy>,
    /// Which GPUs will do.
    pub filter: GpuFilter,
}

/// An annotation that cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("annotation {key}: {reason}; correct it or remove it")]
pub struct WishError {
    key: &'static str,
    reason: String,
}

impl WishError {
    pub(crate) fn new(key: &'static str, reason: String) -> Self {
        Self { key, reason }
    }
}

impl Wishes {
    /// Reads a pod's wishes; `annotation` gives the value of the pod's annotation of that name.
    ///
    /// # Errors
    ///
    /// When an annotation is there and cannot be understood. A wish is never ignored.
    pub fn read<'a>(annotation: impl Fn(&str) -> Option<&'a str>) -> Result<Self, WishError> {
        let error = |key, reason: &dyn ToString| WishError { key, reason: reason.to_string() };
        let list = |key: &'static str| {
            let Some(text) = annotation(key) else { return Ok(Vec::new()) };
            let names: Vec<&str> = text.split(',').map(str::trim).collect();
            if text.len() > MAX_BYTES || names.iter().any(|name| name.is_empty()) {
                return Err(error(
                    key,
                    &"must be a list with commas between its entries, none of them empty",
                ));
            }
            Ok(names)
        };
        let models = |key| Ok(list(key)?.into_iter().map(str::to_owned).collect());
        let gpus = |key| {
            let parsed = list(key)?.into_iter().map(|uuid| uuid.parse::<GpuUuid>());
            parsed.collect::<Result<Vec<_>, _>>().map_err(|reason| error(key, &reason))
        };
        let policy = annotation(annotation::POLICY).map(str::parse::<Policy>).transpose();
        Ok(Self {
            policy: policy.map_err(|reason| error(annotation::POLICY, &reason))?,
            filter: GpuFilter {
                use_models: models(annotation::USE_MODEL)?,
                avoid_models: models(annotation::AVOID_MODEL)?,
                use_gpus: gpus(annotation::USE_GPU)?,
                avoid_gpus: gpus(annotation::AVOID_GPU)?,
            },
        })
    }
}

impl Wishes {
    /// What decides between the GPUs of `inventory`, of which those at `cordoned` take nothing new.
    pub fn rules<'a>(&'a self, inventory: &'a Inventory, cordoned: &'a [usize]) -> Rules<'a> {
        Rules {
            policy: self.policy.unwrap_or_default(),
            filter: Some(&self.filter),
            cordoned,
            groups: &inventory.groups,
        }
    }
}

impl GpuFilter {
    /// Whether it rules nothing out.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The annotation that rules `gpu` out, if one does.
    pub fn rules_out(&self, gpu: &Gpu) -> Option<&'static str> {
        let of_model = |models: &[String]| models.iter().any(|model| contains(&gpu.name, model));
        if !self.use_models.is_empty() && !of_model(&self.use_models) {
            Some(annotation::USE_MODEL)
        } else if of_model(&self.avoid_models) {
            Some(annotation::AVOID_MODEL)
        } else if !self.use_gpus.is_empty() && !self.use_gpus.contains(&gpu.uuid) {
            Some(annotation::USE_GPU)
        } else if self.avoid_gpus.contains(&gpu.uuid) {
            Some(annotation::AVOID_GPU)
        } else {
            None
        }
    }
}

/// Whether `part`, which is not empty, is in `text`, upper or lower case. Allocates nothing: the scheduler asks it
/// for every GPU of a cluster.
fn contains(text: &str, part: &str) -> bool {
    text.as_bytes().windows(part.len()).any(|window| window.eq_ignore_ascii_case(part.as_bytes()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn gpu(n: u8, name: &str) -> Gpu {
        Gpu {
            uuid: GpuUuid::from_bytes([n; 16]),
            name: name.into(),
            minor: n.into(),
            total_bytes: 0,
            memory_units: 0,
            numa_node: None,
            pci_bus_id: String::new(),
            healthy: true,
            device_nodes: Vec::new(),
        }
    }

    fn read(annotations: &[(&str, &str)]) -> Result<Wishes, WishError> {
        let map: BTreeMap<_, _> = annotations.iter().copied().collect();
        Wishes::read(|key| map.get(key).copied())
    }

    #[test]
    fn no_wish_rules_nothing_out() {
        let wishes = read(&[("unrelated", "x")]).unwrap();
        assert_eq!(wishes, Wishes::default());
        assert_eq!(wishes.filter.rules_out(&gpu(0, "")), None);
    }

    #[test]
    fn models_and_gpus_can_be_asked_for_and_avoided() {
        let wishes = read(&[
            (annotation::USE_MODEL, "a100, h100"),
            (annotation::AVOID_MODEL, "PCIE"),
            (annotation::AVOID_GPU, "GPU-03030303-0303-0303-0303-030303030303"),
        ])
        .unwrap();
        for (gpu, by) in [
            (gpu(1, "NVIDIA A100-SXM4-40GB"), None),
            (gpu(1, "NVIDIA H100 NVL"), None),
            (gpu(1, "Tesla T4"), Some(annotation::USE_MODEL)),
            (gpu(1, "NVIDIA A100-PCIE-40GB"), Some(annotation::AVOID_MODEL)),
            (gpu(3, "NVIDIA H100 NVL"), Some(annotation::AVOID_GPU)),
        ] {
            assert_eq!(wishes.filter.rules_out(&gpu), by, "{}", gpu.name);
        }
        let wishes = read(&[(annotation::USE_GPU, gpu(3, "").uuid.as_str())]).unwrap();
        assert_eq!(wishes.filter.rules_out(&gpu(3, "")), None);
        assert_eq!(wishes.filter.rules_out(&gpu(4, "")), Some(annotation::USE_GPU));
    }

    #[test]
    fn a_wish_that_cannot_be_understood_is_refused_by_name() {
        for (key, text) in [
            (annotation::POLICY, "binpack"),
            (annotation::POLICY, ""),
            (annotation::USE_MODEL, ""),
            (annotation::USE_MODEL, "a100,,h100"),
            (annotation::AVOID_GPU, "0"),
            (annotation::USE_GPU, "GPU-1"),
        ] {
            let error = read(&[(key, text)]).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains("correct it or remove it"), "{error}");
        }
        assert_eq!(read(&[(annotation::POLICY, "spread")]).unwrap().policy, Some(Policy::Spread));
    }
}
