//! Which GPU is picked when several have room.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use ledger::{
    Choice, Driver, Gpu, GpuFilter, GpuFree, Inventory, Lack, Policy, Rules, Wishes, place_by, takes,
};
use proptest::prelude::*;
use vcuda_config::{CORE_PER_GPU, GpuGroup, GpuUuid, Link, MEMORY_UNIT_BYTES, NodeGpus, Request, annotation};

const UNITS: u32 = 160;

fn gpu(n: u8, name: &str) -> Gpu {
    Gpu {
        uuid: GpuUuid::from_bytes([n; 16]),
        name: name.into(),
        minor: n.into(),
        total_bytes: u64::from(UNITS) * MEMORY_UNIT_BYTES,
        memory_units: UNITS,
        numa_node: None,
        pci_bus_id: String::new(),
        healthy: true,
        device_nodes: Vec::new(),
    }
}

fn gpus(count: u8) -> Vec<Gpu> {
    (0..count).map(|n| gpu(n, "NVIDIA A100")).collect()
}

/// What is left when each GPU has the `core` given, and as much of its memory.
fn left<'a>(gpus: &'a [Gpu], core: &[u32]) -> Vec<GpuFree<'a>> {
    let free = |(gpu, core): (&'a Gpu, &u32)| GpuFree {
        gpu,
        core: *core,
        memory_bytes: gpu.usable_bytes() * u64::from(*core) / u64::from(CORE_PER_GPU),
        shares: usize::from(*core < CORE_PER_GPU),
    };
    gpus.iter().zip(core).map(free).collect()
}

fn picked(free: &[GpuFree<'_>], core: u32, prefer: &[GpuUuid], rules: &Rules<'_>) -> (Vec<u32>, Choice) {
    let placement = place_by(free, &Request::new(core, 1).unwrap(), prefer, rules).unwrap();
    (placement.gpus.iter().map(|gpu| gpu.minor).collect(), placement.choice)
}

fn group(link: Link, gpus: &[usize]) -> GpuGroup {
    GpuGroup { link, gpus: gpus.into() }
}

#[test]
fn the_cluster_is_told_what_the_node_places_by() {
    let mut inventory = Inventory::new(
        "boot".into(),
        Driver { version: "550.163.01".into(), library_dir: "/usr/lib".into() },
        Vec::new(),
        gpus(2),
    );
    inventory.gpus[1].healthy = false;
    let told = inventory.node_gpus(vec![group(Link::NvLink, &[0, 1])]);
    let read = NodeGpus::parse(&told.to_text()).unwrap();
    assert_eq!(read.groups.len(), 1);
    for (gpu, told) in inventory.gpus.iter().zip(&read.gpus) {
        assert_eq!((&told.uuid, &told.model, told.minor), (&gpu.uuid, &gpu.name, gpu.minor));
        assert_eq!((told.units, told.numa, told.healthy), (gpu.memory_units, gpu.numa_node, gpu.healthy));
    }
}

#[test]
fn pack_takes_the_fullest_and_spread_the_emptiest() {
    let gpus = gpus(3);
    let free = left(&gpus, &[50, 100, 30]);
    assert_eq!(picked(&free, 20, &[], &Rules::default()), (vec![2], Choice::Packed));
    let spread = Rules { policy: Policy::Spread, ..Rules::default() };
    assert_eq!(picked(&free, 20, &[], &spread), (vec![1], Choice::Spread));
}

#[test]
fn whole_gpus_stay_in_the_fastest_and_smallest_group_that_holds_them() {
    let gpus = gpus(8);
    let groups = [
        group(Link::Numa, &[0, 1, 2, 3]),
        group(Link::Numa, &[4, 5, 6, 7]),
        group(Link::Pcie, &[0, 1]),
        group(Link::Pcie, &[2, 3]),
        group(Link::Pcie, &[4, 5]),
        group(Link::Pcie, &[6, 7]),
        group(Link::NvLink, &[1, 2]),
    ];
    let rules = Rules { groups: &groups, ..Rules::default() };
    let all = left(&gpus, &[100; 8]);
    assert_eq!(picked(&all, 200, &[], &rules), (vec![1, 2], Choice::Connected(Link::NvLink)));
    assert_eq!(picked(&all, 400, &[], &rules).1, Choice::Connected(Link::Numa));
    assert_eq!(picked(&all, 600, &[], &rules).1, Choice::Packed);
    // One of the linked pair is in use: next best is a switch, and a GPU of a broken pair is left out.
    let used = left(&gpus, &[100, 90, 100, 100, 100, 100, 100, 100]);
    assert_eq!(picked(&used, 200, &[], &rules), (vec![2, 3], Choice::Connected(Link::Pcie)));
    // Three GPUs: the NUMA node that is broken already holds them just so.
    assert_eq!(picked(&used, 300, &[], &rules).0.iter().max(), Some(&3));
    // A preferred GPU draws the others to its side.
    assert_eq!(picked(&all, 200, &[gpus[7].uuid.clone()], &rules).0, [7, 6]);
}

#[test]
fn a_share_goes_where_it_breaks_the_fewest_groups() {
    let gpus = gpus(4);
    let groups = [group(Link::Pcie, &[0, 1]), group(Link::Pcie, &[2, 3])];
    let rules = Rules { groups: &groups, ..Rules::default() };
    // GPU 2 is full, so its pair is broken already: an untouched GPU is taken there.
    assert_eq!(picked(&left(&gpus, &[100, 100, 0, 100]), 20, &[], &rules).0, [3]);
    assert_eq!(picked(&left(&gpus, &[100, 100, 0, 100]), 100, &[], &rules).0, [3]);
}

#[test]
fn cordoned_and_unwanted_gpus_take_nothing_and_say_so() {
    let gpus = [gpu(0, "Tesla T4"), gpu(1, "NVIDIA A100"), gpu(2, "NVIDIA A100")];
    let free = left(&gpus, &[100; 3]);
    let wishes = Wishes::read(|key| (key == annotation::AVOID_MODEL).then_some("t4")).unwrap();
    let rules = Rules { filter: Some(&wishes.filter), cordoned: &[1], ..Rules::default() };
    assert_eq!(picked(&free, 20, &[], &rules).0, [2]);
    // Not even where they are preferred.
    assert_eq!(picked(&free, 20, &[gpus[0].uuid.clone(), gpus[1].uuid.clone()], &rules).0, [2]);

    let refusal = place_by(&free, &Request::new(200, 0).unwrap(), &[], &rules).unwrap_err();
    assert_eq!(refusal.lacks[1], Lack::Cordoned(gpus[1].uuid.clone()));
    let said = refusal.to_string();
    assert!(said.contains("(Tesla T4) is ruled out by tencent.com/vcuda-avoid-model"), "{said}");
    assert!(said.contains("is cordoned"), "{said}");
}

fn links() -> impl Strategy<Value = Link> {
    prop_oneof![Just(Link::NvLink), Just(Link::Pcie), Just(Link::Numa)]
}

proptest! {
    /// Rules pick between GPUs that have room; they never make room, nor hide it.
    #[test]
    fn rules_change_the_choice_but_never_whether_there_is_one(
        core in proptest::collection::vec(prop_oneof![Just(100_u32), 0..100_u32], 1..9),
        asked in prop_oneof![1..100_u32, (1..9_u32).prop_map(|gpus| gpus * 100)],
        groups in proptest::collection::vec((links(), proptest::collection::btree_set(0..8_usize, 1..8)), 0..6),
        prefer in proptest::collection::vec(0..10_u8, 0..3),
        cordoned in proptest::collection::vec(0..8_usize, 0..2),
        spread: bool,
    ) {
        let gpus = gpus(u8::try_from(core.len()).unwrap());
        let free = left(&gpus, &core);
        let groups: Vec<_> = groups
            .into_iter()
            .map(|(link, gpus)| GpuGroup { link, gpus: gpus.into_iter().collect() })
            .collect();
        let policy = if spread { Policy::Spread } else { Policy::Pack };
        let filter = GpuFilter::default();
        let rules = Rules { policy, filter: Some(&filter), cordoned: &cordoned, groups: &groups };
        let prefer: Vec<_> = prefer.into_iter().map(|n| GpuUuid::from_bytes([n; 16])).collect();
        let request = Request::new(asked, 1).unwrap();

        let fit: Vec<u32> =
            (0..free.len()).filter(|at| takes(&free, *at, &request, &rules)).map(|at| gpus[at].minor).collect();
        let wanted = match request { Request::Share { .. } => 1, Request::Whole { gpus } => gpus.get() as usize };
        match place_by(&free, &request, &prefer, &rules) {
            Ok(placement) => {
                let mut minors: Vec<u32> = placement.gpus.iter().map(|gpu| gpu.minor).collect();
                prop_assert!(minors.iter().all(|minor| fit.contains(minor)));
                minors.sort_unstable();
                minors.dedup();
                prop_assert_eq!(minors.len(), wanted);
                // A group that could hold all is not passed over, unless something else was preferred.
                let holds = |group: &GpuGroup| {
                    fit.iter().filter(|minor| group.gpus.contains(&(**minor as usize))).count() >= wanted
                };
                if wanted > 1 && prefer.is_empty() && groups.iter().any(holds) {
                    prop_assert!(matches!(placement.choice, Choice::Connected(_)));
                    let within = |group: &GpuGroup| minors.iter().all(|at| group.gpus.contains(&(*at as usize)));
                    prop_assert!(groups.iter().any(within));
                }
            }
            Err(no_room) => {
                prop_assert!(fit.len() < wanted);
                prop_assert_eq!(no_room.free, fit.len());
            }
        }
    }
}
