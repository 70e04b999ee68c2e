//! What a pod asks for: its containers with a share, and when each of them runs. It knows nothing of nodes.

use k8s_openapi::{
    api::core::v1::{Container, Pod},
    apimachinery::pkg::api::resource::Quantity,
};
use thiserror::Error;
use vcuda_config::{Request, RequestError};

/// Full names of the two resources, such as `tencent.com/vcuda-core`.
#[derive(Clone, Debug)]
pub struct ResourceNames {
    /// Percent of one GPU.
    pub core: String,
    /// 256 MiB each.
    pub memory: String,
}

/// What a pod asks for. A pod without shares asks for nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Containers with a share, in the order in which kubelet starts them.
    pub containers: Vec<ContainerDemand>,
}

/// What one container asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerDemand {
    /// Its name, unique in the pod.
    pub name: String,
    /// Its request.
    pub request: Request,
    /// When it runs.
    pub role: Role,
}

/// When a container runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Before the next container starts; then its share is free for others of the pod.
    Init,
    /// From its turn among the init containers to the end of the pod (`restartPolicy: Always`).
    Sidecar,
    /// After all init containers, together with all others.
    App,
}

/// Why a pod can run nowhere.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DemandError {
    /// A request that no GPU can meet.
    #[error("container {container}: {source}")]
    Request {
        /// The container.
        container: String,
        /// What is wrong.
        source: RequestError,
    },
    /// An amount that is no whole number.
    #[error("container {container}: {resource} is {amount:?}; it must be a whole number, 0 to 4294967295")]
    Amount {
        /// The container.
        container: String,
        /// The resource.
        resource: String,
        /// What it says.
        amount: String,
    },
}

impl Demand {
    /// What `pod` asks for.
    ///
    /// # Errors
    ///
    /// When a container asks for what can never be given.
    pub fn of(pod: &Pod, names: &ResourceNames) -> Result<Self, DemandError> {
        let Some(spec) = &pod.spec else { return Ok(Self::default()) };
        let init = spec.init_containers.iter().flatten().map(|container| {
            let sidecar = container.restart_policy.as_deref() == Some("Always");
            (container, if sidecar { Role::Sidecar } else { Role::Init })
        });
        let app = spec.containers.iter().map(|container| (container, Role::App));
        let mut containers = Vec::new();
        for (container, role) in init.chain(app) {
            if let Some(request) = request_of(container, names)? {
                containers.push(ContainerDemand { name: container.name.clone(), request, role });
            }
        }
        Ok(Self { containers })
    }

    /// Whether the pod asks for nothing.
    pub fn is_empty(&self) -> bool {
        self.containers.is_empty()
    }

    /// The times in the pod's life that differ in who runs: each init container's turn, then the apps' time. Each is
    /// a list of positions in [`Demand::containers`].
    pub fn phases(&self) -> impl Iterator<Item = Vec<usize>> {
        let runs_on = |at: &usize| self.containers[*at].role != Role::Init;
        let turns = (0..self.containers.len()).filter(|at| self.containers[*at].role == Role::Init);
        let turn = move |at: usize| {
            let beside = (0..at).filter(|other| self.containers[*other].role == Role::Sidecar);
            beside.chain([at]).collect()
        };
        turns.map(turn).chain([(0..self.containers.len()).filter(runs_on).collect()])
    }
}

/// What `container` asks for; none when it asks for neither resource.
fn request_of(container: &Container, names: &ResourceNames) -> Result<Option<Request>, DemandError> {
    let Some(resources) = &container.resources else { return Ok(None) };
    let amount = |resource: &String| {
        // The API server copies the limit of an extended resource into the request.
        let of = |list: &'_ Option<_>| {
            list.as_ref().and_then(|list: &std::collections::BTreeMap<_, _>| list.get(resource).cloned())
        };
        match of(&resources.requests).or_else(|| of(&resources.limits)) {
            None => Ok(0),
            Some(quantity) => whole_number(&quantity).ok_or_else(|| DemandError::Amount {
                container: container.name.clone(),
                resource: resource.clone(),
                amount: quantity.0.chars().take(64).collect(),
            }),
        }
    };
    match (amount(&names.core)?, amount(&names.memory)?) {
        (0, 0) => Ok(None),
        (core, memory) => Request::new(core, memory)
            .map(Some)
            .map_err(|source| DemandError::Request { container: container.name.clone(), source }),
    }
}

/// A quantity as the API server writes whole numbers: digits, then a decimal or binary suffix or an exponent.
fn whole_number(quantity: &Quantity) -> Option<u32> {
    let text = quantity.0.as_str();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, suffix) = text.split_at(digits);
    let number: u32 = number.parse().ok()?;
    let factor = match suffix {
        "" => 1,
        "k" => 1000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        exponent => 10_u32.checked_pow(exponent.strip_prefix(['e', 'E'])?.parse().ok()?)?,
    };
    number.checked_mul(factor)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn names() -> ResourceNames {
        ResourceNames { core: "tencent.com/vcuda-core".into(), memory: "tencent.com/vcuda-memory".into() }
    }

    fn of(spec: serde_json::Value) -> Result<Demand, DemandError> {
        let pod = serde_json::from_value(json!({ "spec": spec })).unwrap();
        Demand::of(&pod, &names())
    }

    fn container(name: &str, core: &str, memory: &str) -> serde_json::Value {
        let limits =
            json!({ "tencent.com/vcuda-core": core, "tencent.com/vcuda-memory": memory, "cpu": "1500m" });
        json!({ "name": name, "resources": { "limits": limits, "requests": limits } })
    }

    #[test]
    fn containers_without_a_share_ask_for_nothing() {
        let demand = of(json!({ "containers": [
            { "name": "a" },
            { "name": "b", "resources": { "limits": { "cpu": "2", "nvidia.com/gpu": "1" } } },
            container("c", "0", "0"),
        ] }));
        assert!(demand.unwrap().is_empty());
        assert!(Demand::of(&Pod::default(), &names()).unwrap().is_empty());
    }

    #[test]
    fn init_containers_run_one_by_one_sidecars_stay() {
        let mut sidecar = container("sidecar", "10", "4");
        sidecar["restartPolicy"] = "Always".into();
        let demand = of(json!({
            "initContainers": [container("first", "50", "8"), sidecar, container("second", "100", "0")],
            "containers": [container("main", "20", "32"), { "name": "log" }, container("other", "1k", "0")],
        }))
        .unwrap();
        let named: Vec<_> =
            demand.containers.iter().map(|container| (container.name.as_str(), container.role)).collect();
        assert_eq!(
            named,
            [
                ("first", Role::Init),
                ("sidecar", Role::Sidecar),
                ("second", Role::Init),
                ("main", Role::App),
                ("other", Role::App)
            ]
        );
        assert_eq!(demand.containers[4].request, Request::new(1000, 0).unwrap());
        assert_eq!(demand.phases().collect::<Vec<_>>(), [vec![0], vec![1, 2], vec![1, 3, 4]]);
    }

    #[test]
    fn what_can_never_be_given_is_refused_by_container() {
        for (core, memory, said) in [
            ("150", "1", "neither below 100"),
            ("0", "4", "vcuda-core is missing"),
            ("20", "0", "vcuda-memory is missing"),
            ("500m", "4", "whole number"),
            ("-1", "4", "whole number"),
            ("5G", "4", "whole number"),
        ] {
            let error = of(json!({ "containers": [container("main", core, memory)] })).unwrap_err();
            let text = error.to_string();
            assert!(text.starts_with("container main: ") && text.contains(said), "{text}");
        }
    }

    #[test]
    fn amounts_are_read_as_the_api_server_writes_them() {
        for (text, number) in [
            ("0", Some(0)),
            ("100", Some(100)),
            ("2k", Some(2000)),
            ("1Ki", Some(1024)),
            ("3e2", Some(300)),
            ("4294967295", Some(u32::MAX)),
            ("4294967296", None),
            ("5M", Some(5_000_000)),
            ("1500m", None),
            ("1.5", None),
            ("", None),
            ("k", None),
            ("1e", None),
            ("1e-1", None),
            ("1e99", None),
        ] {
            assert_eq!(whole_number(&Quantity(text.into())), number, "{text:?}");
        }
    }
}
