//! The scheduler extender: which node and which GPUs a pod's shares go to. kube-scheduler asks over HTTP; what is
//! decided is written on the pod in the same request that binds it. It knows nothing of containerd.

#![forbid(unsafe_code)]

mod bind;
mod cluster;
mod decide;
mod demand;
mod hold;
pub mod lease;
mod node;
mod nudge;
mod plan;
mod refused;
mod service;
mod standing;
#[cfg(test)]
mod testing;
pub mod tls;
pub mod verbs;
mod wanted;
mod watch;
pub mod wire;

pub use bind::BindError;
pub use cluster::{BoundPod, Claim, Cluster, Figures, Found, Refusal, Reservation, Seen};
pub use decide::{Filtered, Victims};
pub use demand::{ContainerDemand, Demand, DemandError, ResourceNames, Role};
pub use hold::{Held, Hold, On, holds_of_bound, holds_of_placement};
pub use node::Node;
pub use plan::{Misfit, plan};
pub use refused::{Due, Refused, RefusedPod};
pub use service::{Service, Settings};
pub use standing::{Lead, NotServing, Standing};
pub use wanted::{Wanted, WantedError};
pub use watch::client;
