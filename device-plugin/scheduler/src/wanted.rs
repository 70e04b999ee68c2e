//! What a pod wants of the scheduler, all in one: its demand, its wishes, and who it is.

use k8s_openapi::api::core::v1::Pod;
use ledger::{GpuFilter, Policy, WishError, Wishes};
use thiserror::Error;

use crate::{Demand, DemandError, ResourceNames};

/// What a pod wants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// What it asks for.
    pub demand: Demand,
    /// How its GPUs are picked.
    pub policy: Policy,
    /// Which GPUs will do.
    pub filter: GpuFilter,
    /// Its priority.
    pub priority: i32,
}

/// Why a pod can be placed nowhere, and waiting does not help.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum WantedError {
    /// It asks for what can never be given.
    #[error(transparent)]
    Demand(#[from] DemandError),
    /// It wishes for what cannot be understood.
    #[error(transparent)]
    Wish(#[from] WishError),
}

impl Wanted {
    /// What `pod` wants; `policy` is the scheduler's own, for pods that name none.
    pub fn of(pod: &Pod, names: &ResourceNames, policy: Policy) -> Result<Self, WantedError> {
        let annotations = pod.metadata.annotations.as_ref();
        let wishes = Wishes::read(|key| annotations.and_then(|map| map.get(key)).map(String::as_str))?;
        Ok(Self {
            demand: Demand::of(pod, names)?,
            policy: wishes.policy.unwrap_or(policy),
            filter: wishes.filter,
            priority: pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0),
        })
    }
}
