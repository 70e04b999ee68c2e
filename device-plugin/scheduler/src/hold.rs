//! What a pod holds of a node's GPUs, worked out from what it asks for and where it was put. A pod that does not say
//! where counts on every GPU of its node: it may be on any.

use std::collections::BTreeMap;

use vcuda_config::{CORE_PER_GPU, GpuUuid, PodPlacement, Request, annotation, gpu_admission_minors};

use crate::{Demand, Role};

/// Part of a GPU that is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Percent of the GPU's compute time.
    pub core: u32,
    /// Bytes of its memory; `u64::MAX` for all of it.
    pub memory_bytes: u64,
    /// Containers.
    pub shares: u32,
}

/// Which GPU is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// The one with this UUID, see [`GpuUuid::bytes`].
    Gpu([u8; 16]),
    /// The one with this device node, as gpu-admission says it.
    Minor(u32),
    /// Nobody said. It may be any.
    Anywhere,
}

/// What a pod holds of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The GPU.
    pub on: On,
    /// How much of it.
    pub held: Held,
}

impl Held {
    /// What `request` takes of each of its GPUs.
    pub fn by(request: &Request) -> Self {
        let (core, memory_bytes) = match request {
            Request::Share { core, .. } => (*core, request.memory_bytes().unwrap_or(u64::MAX)),
            Request::Whole { .. } => (CORE_PER_GPU, u64::MAX),
        };
        Self { core, memory_bytes, shares: 1 }
    }

    /// Both together. It saturates: more than all is all.
    pub fn and(self, other: Self) -> Self {
        Self {
            core: self.core.saturating_add(other.core),
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
            shares: self.shares.saturating_add(other.shares),
        }
    }

    /// What covers the one as well as the other.
    fn or(self, other: Self) -> Self {
        Self {
            core: self.core.max(other.core),
            memory_bytes: self.memory_bytes.max(other.memory_bytes),
            shares: self.shares.max(other.shares),
        }
    }
}

/// What a pod holds that asks for `demand` and was put on `placement`; see [`PodPlacement`].
///
/// A node that placed the pod itself tells what it sees: of an init container that was over before it looked, nothing
/// but the containers after it. Such a one holds nothing any more.
pub fn holds_of_placement(demand: &Demand, placement: &PodPlacement) -> Option<Box<[Hold]>> {
    let lasting = || demand.containers.iter().filter(|it| it.role != Role::Init);
    let begun = lasting().next().is_some() && lasting().all(|it| !placement.gpus(&it.name).is_empty());
    let on = |at: usize| {
        let container = &demand.containers[at];
        let gpus = placement.gpus(&container.name);
        if gpus.is_empty() && container.role == Role::Init && begun {
            return Some(Vec::new());
        }
        let all = gpus.len() == gpus_of(&container.request);
        all.then(|| gpus.iter().map(|gpu: &GpuUuid| On::Gpu(gpu.bytes())).collect())
    };
    let on: Option<Vec<Vec<On>>> = (0..demand.containers.len()).map(on).collect();
    on.map(|on| footprint(demand, &on))
}

/// What a pod on `node` holds that asks for `demand` and carries `annotations`.
pub fn holds_of_bound(
    demand: &Demand,
    node: &str,
    annotations: Option<&BTreeMap<String, String>>,
) -> Box<[Hold]> {
    let none = BTreeMap::new();
    let annotations = annotations.unwrap_or(&none);
    let ours = annotations.get(annotation::PLACEMENT).and_then(|text| text.parse().ok());
    if let Some(holds) = ours.and_then(|placement| holds_of_placement(demand, &placement)) {
        return holds;
    }
    let pairs = annotations.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    if let Some(minors) = gpu_admission_minors(Some(node), pairs)
        && demand.containers.iter().all(|container| gpus_of(&container.request) == minors.len())
    {
        let on: Vec<On> = minors.into_iter().map(On::Minor).collect();
        return footprint(demand, &vec![on; demand.containers.len()]);
    }
    footprint(demand, &vec![vec![On::Anywhere]; demand.containers.len()])
}

/// How many GPUs a container with this request is put on.
pub fn gpus_of(request: &Request) -> usize {
    match request {
        Request::Share { .. } => 1,
        Request::Whole { gpus } => gpus.get() as usize,
    }
}

/// What the pod holds of each GPU over its whole life, when container `at` of `demand` is on the GPUs `on[at]`: the
/// most that it needs there at any time. So do kube-scheduler and kubelet count init containers.
fn footprint(demand: &Demand, on: &[Vec<On>]) -> Box<[Hold]> {
    let mut most: Vec<Hold> = Vec::new();
    for phase in demand.phases() {
        let mut now: Vec<Hold> = Vec::new();
        for at in phase {
            let held = Held::by(&demand.containers[at].request);
            for on in &on[at] {
                match now.iter_mut().find(|hold| hold.on == *on) {
                    Some(hold) => hold.held = hold.held.and(held),
                    None => now.push(Hold { on: *on, held }),
                }
            }
        }
        for hold in now {
            match most.iter_mut().find(|other| other.on == hold.on) {
                Some(other) => other.held = other.held.or(hold.held),
                None => most.push(hold),
            }
        }
    }
    most.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ContainerDemand, Role};

    fn demand(containers: &[(&str, u32, u32, Role)]) -> Demand {
        let one = |(name, core, memory, role): &(&str, u32, u32, Role)| ContainerDemand {
            name: (*name).into(),
            request: Request::new(*core, *memory).unwrap(),
            role: *role,
        };
        Demand { containers: containers.iter().map(one).collect() }
    }

    fn gpu(n: u8) -> GpuUuid {
        GpuUuid::from_bytes([n; 16])
    }

    fn placed(text: &str) -> BTreeMap<String, String> {
        BTreeMap::from([(annotation::PLACEMENT.into(), text.into())])
    }

    #[test]
    fn containers_that_run_together_add_up_and_turns_do_not() {
        let demand = demand(&[
            ("init", 50, 4, Role::Init),
            ("sidecar", 10, 4, Role::Sidecar),
            ("second", 60, 2, Role::Init),
            ("main", 20, 16, Role::App),
            ("far", 30, 1, Role::App),
        ]);
        let text = format!("1;0;far={};init={1};main={1};second={1};sidecar={1}", gpu(2), gpu(1));
        let holds = holds_of_bound(&demand, "n", Some(&placed(&text)));
        let held = |core, units: u64, shares| Held { core, memory_bytes: units << 28, shares };
        assert_eq!(
            holds.as_ref(),
            [
                // 50, 10 + 60 and 10 + 20 core; 4, 4 + 2 and 4 + 16 units.
                Hold { on: On::Gpu([1; 16]), held: held(70, 20, 2) },
                Hold { on: On::Gpu([2; 16]), held: held(30, 1, 1) },
            ]
        );
    }

    #[test]
    fn an_init_container_that_was_over_before_the_node_looked_holds_nothing() {
        let demand = demand(&[("init", 50, 4, Role::Init), ("main", 20, 2, Role::App)]);
        let holds = holds_of_bound(&demand, "n", Some(&placed(&format!("1;0;main={}", gpu(1)))));
        assert_eq!(
            holds.as_ref(),
            [Hold { on: On::Gpu([1; 16]), held: Held { core: 20, memory_bytes: 2 << 28, shares: 1 } }]
        );
        // The other way round, nobody knows where the main container will be.
        let holds = holds_of_bound(&demand, "n", Some(&placed(&format!("1;0;init={}", gpu(1)))));
        assert_eq!(holds[0].on, On::Anywhere);
    }

    #[test]
    fn a_whole_gpu_holds_all_of_it() {
        let demand = demand(&[("main", 200, 0, Role::App)]);
        let text = format!("1;0;main={},{}", gpu(1), gpu(2));
        let holds = holds_of_bound(&demand, "n", Some(&placed(&text)));
        assert_eq!(holds.len(), 2);
        assert!(holds.iter().all(|hold| hold.held.core == 100 && hold.held.memory_bytes == u64::MAX));
    }

    #[test]
    fn a_placement_that_does_not_fit_the_pod_counts_everywhere() {
        let two = demand(&[("main", 200, 0, Role::App)]);
        for text in [format!("1;0;main={}", gpu(1)), "1;0".into(), "rubbish".into()] {
            let holds = holds_of_bound(&two, "n", Some(&placed(&text)));
            assert_eq!((holds.len(), holds[0].on), (1, On::Anywhere), "{text}");
        }
        assert_eq!(holds_of_bound(&two, "n", None)[0].on, On::Anywhere);
    }

    #[test]
    fn a_choice_of_gpu_admission_for_this_node_counts() {
        let one = demand(&[("main", 20, 4, Role::App)]);
        let annotations = BTreeMap::from([
            ("tencent.com/predicate-gpu-idx-0".to_owned(), "3".to_owned()),
            ("tencent.com/predicate-node".to_owned(), "n".to_owned()),
        ]);
        assert_eq!(holds_of_bound(&one, "n", Some(&annotations))[0].on, On::Minor(3));
        assert_eq!(holds_of_bound(&one, "other", Some(&annotations))[0].on, On::Anywhere);
        let two = demand(&[("main", 200, 0, Role::App)]);
        assert_eq!(holds_of_bound(&two, "n", Some(&annotations))[0].on, On::Anywhere);
    }
}
