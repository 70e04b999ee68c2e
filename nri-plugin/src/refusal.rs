//! Why a container does not start: one sentence that kubelet shows in the pod's events.

use std::fmt;

use crate::wire::{Container, PodSandbox};

/// Longest name that is repeated in a message; names of pods and containers are shorter.
const NAME_SHOWN: usize = 80;

/// A refusal to create a container.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("vcuda: pod {pod}, container {container}: {reason}")]
pub struct Refusal {
    /// `namespace/name`.
    pub pod: String,
    /// Name of the container.
    pub container: String,
    /// What is wrong, and what to do.
    pub reason: String,
}

impl Refusal {
    /// A refusal of `container` in `pod`. `reason` says what is wrong and what to do.
    pub fn new(pod: &PodSandbox, container: &Container, reason: impl fmt::Display) -> Self {
        let short = |text: &str| text.chars().take(NAME_SHOWN).collect::<String>();
        Self {
            pod: format!("{}/{}", short(&pod.namespace), short(&pod.name)),
            container: short(&container.name),
            reason: reason.to_string(),
        }
    }
}
