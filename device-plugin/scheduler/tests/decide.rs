//! What kube-scheduler is told: why not, how well, and who would have to go; and of whom it is reminded.

#![expect(clippy::unwrap_used, reason = "an assertion, in a test")]

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use ledger::Policy;
use proptest::prelude::*;
use scheduler::{
    BoundPod, Claim, Cluster, ContainerDemand, Demand, Due, Refused, RefusedPod, Role, Seen, Victims, Wanted,
    holds_of_bound,
};
use vcuda_config::{GpuGroup, GpuUuid, Link, NodeGpu, NodeGpus, PodPlacement, Request, annotation};

const UNITS: u32 = 100;

fn gpu(node: u8, gpu: u8) -> GpuUuid {
    GpuUuid::from_bytes([node * 16 + gpu; 16])
}

fn wanted(core: u32, memory: u32) -> Wanted {
    let request = Request::new(core, memory).unwrap();
    let containers = vec![ContainerDemand { name: "main".into(), request, role: Role::App }];
    Wanted { demand: Demand { containers }, ..Wanted::default() }
}

fn name(node: u8) -> String {
    format!("node-{node}")
}

fn offer(node: u8, gpus: u8, groups: Vec<GpuGroup>) -> NodeGpus {
    let one = |n| NodeGpu {
        uuid: gpu(node, n),
        model: "A100".into(),
        minor: n.into(),
        units: UNITS,
        numa: None,
        healthy: true,
    };
    NodeGpus::new((0..gpus).map(one).collect(), groups)
}

fn set_node(cluster: &mut Cluster, node: u8, offer: &NodeGpus, cordon: &str) {
    let gpus = (annotation::NODE_GPUS.to_owned(), offer.to_text());
    let cordon = (annotation::CORDON.to_owned(), cordon.to_owned());
    cluster.set_node(&name(node), Some(&BTreeMap::from([gpus, cordon])));
}

fn add_node(cluster: &mut Cluster, node: u8, gpus: u8, groups: Vec<GpuGroup>) {
    set_node(cluster, node, &offer(node, gpus, groups), "");
}

/// A pod of one container on one GPU.
fn pod(uid: &str, node: u8, on: u8, core: u32, priority: i32) -> BoundPod {
    let containers = BTreeMap::from([("main".to_owned(), vec![gpu(node, on)])]);
    let text = PodPlacement { placed_at: 0, containers }.to_string();
    let annotations = BTreeMap::from([(annotation::PLACEMENT.to_owned(), text)]);
    BoundPod {
        uid: uid.into(),
        node: name(node),
        holds: holds_of_bound(&wanted(core, core).demand, &name(node), Some(&annotations)),
        priority,
        ending: false,
    }
}

fn add_pod(cluster: &mut Cluster, uid: &str, node: u8, on: u8, core: u32, priority: i32) {
    cluster.set_pod(pod(uid, node, on, core, priority));
}

/// Reserves room for a pod of one container and priority 0.
fn reserve(cluster: &mut Cluster, uid: &str, node: u8, core: u32) -> Claim {
    let claim = Claim { uid: uid.into(), node: name(node) };
    cluster.reserve(&claim, "default", uid, &wanted(core, core), 0, Instant::now()).unwrap();
    claim
}

fn scores(cluster: &Cluster, wanted: &Wanted, nodes: u8) -> Vec<u64> {
    let names: Vec<String> = (0..nodes).map(name).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    cluster.prioritize("new", wanted, &names).into_iter().map(|(_, score)| score).collect()
}

#[test]
fn some_nodes_say_what_each_gpu_lacks_and_the_rest_of_a_large_cluster_one_text() {
    let mut cluster = Cluster::default();
    let names: Vec<String> = (0..15).map(name).collect();
    for node in 0..15 {
        add_node(&mut cluster, node, 1, Vec::new());
        add_pod(&mut cluster, &format!("pod-{node}"), node, 0, 50 + u32::from(node), 0);
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let filtered = cluster.filter("new", &wanted(60, 40), &names);
    assert!(filtered.fit.is_empty());
    let texts: BTreeSet<&str> = filtered.unfit.iter().map(|(_, why)| &**why).collect();
    assert_eq!(texts.len(), 9, "{texts:?}");
    assert!(texts.contains("no GPU has 60 core and 10 GiB free"), "{texts:?}");
    assert!(filtered.unfit[3].1.contains("has 47 core"), "{}", filtered.unfit[3].1);

    let filtered = cluster.filter("new", &wanted(60, 40), &["stranger"]);
    assert!(filtered.unfit[0].1.contains("not seen the node yet"));
}

#[test]
fn packing_prefers_full_gpus_and_nodes_and_spreading_empty_ones() {
    let mut cluster = Cluster::default();
    for node in 0..3 {
        add_node(&mut cluster, node, 2, Vec::new());
    }
    add_pod(&mut cluster, "a", 0, 0, 70, 0);
    // As much in all, but the GPU that is taken is the empty one.
    add_pod(&mut cluster, "b", 1, 0, 90, 0);
    let packed = scores(&cluster, &wanted(20, 20), 3);
    assert!(packed[0] > packed[1] && packed[1] >= packed[2], "{packed:?}");
    let spread = scores(&cluster, &Wanted { policy: Policy::Spread, ..wanted(20, 20) }, 3);
    assert!(spread[2] >= spread[1] && spread[2] > spread[0], "{spread:?}");
    // What asks for nothing has no preference.
    assert_eq!(scores(&cluster, &Wanted::default(), 3), [0, 0, 0]);
}

#[test]
fn whole_gpus_prefer_a_node_that_links_them_fast() {
    let mut cluster = Cluster::default();
    let group = |link| vec![GpuGroup { link, gpus: vec![0, 1] }];
    add_node(&mut cluster, 0, 4, group(Link::Numa));
    add_node(&mut cluster, 1, 4, group(Link::NvLink));
    add_node(&mut cluster, 2, 4, Vec::new());
    let linked = scores(&cluster, &wanted(200, 0), 3);
    assert!(linked[1] > linked[0] && linked[0] > linked[2], "{linked:?}");
}

#[test]
fn a_pod_may_have_to_go_once_the_api_server_has_bound_it_though_the_watch_is_late() {
    let mut cluster = Cluster::default();
    add_node(&mut cluster, 0, 1, Vec::new());
    let node = name(0);
    let high = Wanted { priority: 1, ..wanted(80, 10) };
    let bound = reserve(&mut cluster, "bound", 0, 30);
    let found = reserve(&mut cluster, "found", 0, 30);
    // kube-scheduler may have forgotten a pod that is being bound, and gives up the preemption if it is named.
    assert_eq!(cluster.victims(&high, &node, Vec::new()), None);

    cluster.bound(&bound);
    // A bind whose answer was lost, and which the API server was asked about.
    cluster.book(&found, Seen::Bound(pod("found", 0, 0, 30, 0)));
    let both = Victims { node: &node, uids: vec!["bound".into(), "found".into()] };
    assert_eq!(cluster.victims(&high, &node, Vec::new()).map(sorted), Some(both.clone()));
    // A list that was begun before they were bound leaves them where they are.
    cluster.begin_pods();
    cluster.end_pods();
    assert_eq!(cluster.victims(&high, &node, Vec::new()).map(sorted), Some(both));
}

fn sorted(mut victims: Victims<'_>) -> Victims<'_> {
    victims.uids.sort();
    victims
}

#[test]
fn a_node_has_come_to_have_room_when_a_pod_or_a_hindrance_is_gone() {
    let mut cluster = Cluster::default();
    let mut expect = |what: &str, roomier: bool, change: &mut dyn FnMut(&mut Cluster)| {
        change(&mut cluster);
        assert_eq!(cluster.take_roomier().contains(&*name(0)), roomier, "{what}");
        assert!(cluster.take_roomier().is_empty());
    };
    let (whole, none) = (offer(0, 1, Vec::new()), NodeGpus::new(Vec::new(), Vec::new()));
    let mut ill = whole.clone();
    ill.gpus[0].healthy = false;
    let cordon = gpu(0, 0);
    expect("it came", true, &mut |it| set_node(it, 0, &whole, ""));
    expect("it is as it was", false, &mut |it| set_node(it, 0, &whole, ""));
    expect("a pod came", false, &mut |it| add_pod(it, "a", 0, 0, 50, 0));
    expect("it holds less", true, &mut |it| add_pod(it, "a", 0, 0, 40, 0));
    expect("it is gone", true, &mut |it| it.remove_pod("a", &name(0)));
    let claim = Claim { uid: "b".into(), node: name(0) };
    expect("room was reserved", false, &mut |it| drop(reserve(it, "b", 0, 50)));
    expect("the bind failed", true, &mut |it| it.refused(&claim));
    expect("it was cordoned", false, &mut |it| set_node(it, 0, &whole, cordon.as_str()));
    expect("the cordon was lifted", true, &mut |it| set_node(it, 0, &whole, ""));
    expect("it fell ill", false, &mut |it| set_node(it, 0, &ill, ""));
    expect("it is well again", true, &mut |it| set_node(it, 0, &whole, ""));
    set_node(&mut cluster, 0, &none, "");
    cluster.take_roomier();
    set_node(&mut cluster, 0, &offer(0, 2, Vec::new()), "");
    assert!(cluster.take_roomier().contains(&*name(0)), "its GPUs came");
}

/// Notes a pod that fitted on none of `nodes`.
fn note(refused: &mut Refused, uid: &str, wanted: Wanted, nodes: &[&str], since: Instant) {
    refused.note(RefusedPod::new(uid, ("default", uid), Arc::new(wanted), Some(nodes), since));
}

/// The pods that are to be tried again, by UID, and their nodes, once there is word of what has changed.
fn due(refused: &mut Refused, cluster: &mut Cluster, now: Instant, most: usize) -> Vec<(String, String)> {
    refused.hear(cluster.take_roomier(), now);
    let pods = refused.due(cluster, now, most).pods;
    pods.into_iter().map(|(pod, node)| (pod.uid, node.into())).collect()
}

/// A cluster whose nodes have a GPU with 80 core and memory taken by pods of priority 0, which is no news.
fn full(nodes: u8) -> Cluster {
    let mut cluster = Cluster::default();
    for node in 0..nodes {
        add_node(&mut cluster, node, 1, Vec::new());
        add_pod(&mut cluster, &format!("old-{node}"), node, 0, 80, 0);
    }
    cluster.take_roomier();
    cluster
}

#[test]
fn a_pod_is_tried_again_where_it_was_refused_and_fits_by_now() {
    let mut cluster = full(3);
    let (mut refused, now) = (Refused::default(), Instant::now());
    note(&mut refused, "small", wanted(50, 50), &["node-0", "node-1"], now);
    note(&mut refused, "large", wanted(100, 100), &["node-0", "node-1"], now);
    assert_eq!(due(&mut refused, &mut cluster, now, 9), []);
    // kube-scheduler would not have them there.
    cluster.remove_pod("old-2", "node-2");
    assert_eq!(due(&mut refused, &mut cluster, now, 9), []);
    // Of two GPUs' room that came, the large one needs all.
    add_pod(&mut cluster, "old-0", 0, 0, 10, 0);
    assert_eq!(due(&mut refused, &mut cluster, now, 9), [("small".into(), "node-0".into())]);
    cluster.remove_pod("old-1", "node-1");
    let both = [("large".to_owned(), "node-1".to_owned()), ("small".to_owned(), "node-1".to_owned())];
    assert_eq!(due(&mut refused, &mut cluster, now, 9), both);
    // Room that was there before is no news.
    assert_eq!(due(&mut refused, &mut cluster, now, 9), []);
    refused.remove("small");
    refused.remove("large");
    assert!(refused.is_empty());
}

#[test]
fn a_pod_that_was_refused_in_spite_of_word_of_room_is_not_tried_again_for_it() {
    let mut cluster = full(1);
    let (mut refused, now) = (Refused::default(), Instant::now());
    let later = now + Duration::from_millis(1);
    note(&mut refused, "a", wanted(50, 50), &["node-0"], later);
    cluster.remove_pod("old-0", "node-0");
    refused.hear(cluster.take_roomier(), now);
    assert_eq!(refused.due(&cluster, later, 9), Due::default());
    // Nobody leads, or nobody waits: what was heard is dropped.
    refused.hear(BTreeSet::from(["node-0".into()]), later);
    refused.drop_word();
    assert_eq!(refused.due(&cluster, later, 9), Due::default());
}

#[test]
fn a_pod_for_which_others_were_to_end_is_tried_again_when_one_that_had_ended_already_is_out_of_the_way() {
    let mut cluster = full(1);
    add_node(&mut cluster, 1, 1, Vec::new());
    add_pod(&mut cluster, "gone", 1, 0, 40, 0);
    add_pod(&mut cluster, "other", 1, 0, 50, 0);
    cluster.take_roomier();
    let (mut refused, now) = (Refused::default(), Instant::now());
    let high = || Wanted { priority: 1, ..wanted(80, 80) };
    // Asked about one node, and then whose end would make room on the other.
    note(&mut refused, "high", high(), &["node-0"], now);
    note(&mut refused, "equal", wanted(80, 80), &["node-0"], now);
    note(&mut refused, "elsewhere", high(), &["node-0"], now);
    for uid in ["high", "equal", "stranger"] {
        refused.note_preemption(uid, ["node-1"]);
    }
    assert_eq!(cluster.victims(&high(), "node-1", Vec::new()).map(|it| it.uids.len()), Some(2));
    cluster.remove_pod("gone", "node-1");
    assert_eq!(due(&mut refused, &mut cluster, now, 9), [("high".into(), "node-1".into())]);
    // kube-scheduler hears by itself when what it had end has ended.
    cluster.set_pod(BoundPod { ending: true, ..pod("other", 1, 0, 50, 0) });
    refused.hear(BTreeSet::from(["node-1".into()]), now);
    assert_eq!(due(&mut refused, &mut cluster, now, 9), []);
}

#[test]
fn a_pod_of_which_nobody_knows_where_it_was_refused_is_tried_again_wherever_it_fits() {
    let mut cluster = full(2);
    let (mut refused, now) = (Refused::default(), Instant::now());
    let unknown =
        |uid: &str, core| RefusedPod::new(uid, ("default", uid), Arc::new(wanted(core, core)), None, now);
    refused.note_if_new(unknown("a", 20));
    refused.note_if_new(unknown("large", 30));
    // kube-scheduler has asked about it since: that is what counts.
    note(&mut refused, "b", wanted(20, 20), &["node-0"], now);
    refused.note_if_new(unknown("b", 20));
    refused.hear(BTreeSet::from(["node-1".into()]), now);
    assert_eq!(due(&mut refused, &mut cluster, now, 9), [("a".into(), "node-1".into())]);
}

#[test]
fn of_pods_that_fit_by_now_a_few_are_tried_again_the_most_important_and_then_the_oldest_first() {
    const FLUSH: Duration = Duration::from_secs(5 * 60);
    let mut cluster = Cluster::default();
    add_node(&mut cluster, 0, 1, Vec::new());
    let (mut refused, start) = (Refused::default(), Instant::now());
    let now = start + FLUSH;
    // kube-scheduler has asked again about the first, and been told the same, or is about to.
    for (uid, priority, since) in [("gone", 9, 0), ("c", 0, 2), ("b", 0, 1), ("a", 5, 3)] {
        let wanted = Wanted { priority, ..wanted(10, 10) };
        note(&mut refused, uid, wanted, &["node-0"], start + Duration::from_secs(since));
    }
    let roomier = cluster.take_roomier();
    let order = |refused: &mut Refused, most| -> Vec<String> {
        refused.hear(roomier.clone(), now);
        let pods = refused.due(&cluster, now, most).pods;
        pods.into_iter().map(|(pod, _)| pod.uid).collect()
    };
    assert_eq!(order(&mut refused, 2), ["a", "b"]);
    // The others are next, and then all for what was heard since.
    refused.drop_word();
    assert_eq!(order(&mut refused, 9), ["a", "b", "c"]);

    // It was tried again, and refused once more before the answer to the nudge came.
    refused.hear(roomier.clone(), now);
    let (pod, _) = refused.due(&cluster, now, 1).pods.remove(0);
    note(&mut refused, "a", wanted(10, 10), &["node-0"], now);
    refused.forget(&pod);
    refused.drop_word();
    assert_eq!(order(&mut refused, 9), ["b", "c", "a"]);
    refused.hear(roomier.clone(), now);
    let (pod, _) = refused.due(&cluster, now, 1).pods.remove(0);
    refused.forget(&pod);
    refused.drop_word();
    assert_eq!(order(&mut refused, 9), ["c", "a"]);
}

#[test]
fn a_pod_that_could_not_be_made_known_is_tried_once_more_after_a_pause_that_grows_while_it_has_room() {
    let mut cluster = full(1);
    let (mut refused, start) = (Refused::default(), Instant::now());
    note(&mut refused, "a", wanted(50, 50), &["node-0"], start);
    cluster.remove_pod("old-0", "node-0");
    refused.hear(cluster.take_roomier(), start);
    let (mut now, mut pauses) = (start, Vec::new());
    let (pod, node) = refused.due(&cluster, now, 9).pods.remove(0);
    for _ in 0..7 {
        refused.postpone(&pod, &node, now);
        // Word of room elsewhere does not shorten it.
        refused.hear(BTreeSet::from(["node-0".into()]), now);
        let failed = now;
        while refused.due(&cluster, now, 9).pods.is_empty() {
            now += Duration::from_secs(1);
        }
        pauses.push((now - failed).as_secs());
    }
    assert_eq!(pauses, [2, 4, 8, 16, 32, 64, 64]);

    // Its room was taken meanwhile: it waits for word like any other.
    refused.postpone(&pod, &node, now);
    add_pod(&mut cluster, "new", 0, 0, 80, 0);
    now += Duration::from_secs(64);
    assert_eq!(due(&mut refused, &mut cluster, now, 9), []);
    cluster.remove_pod("new", "node-0");
    assert_eq!(due(&mut refused, &mut cluster, now, 9), [("a".into(), "node-0".into())]);
}

#[test]
fn one_go_looks_at_few_pods_and_nodes_and_the_next_goes_on_from_there() {
    let mut cluster = Cluster::default();
    let offer = offer(0, 1, Vec::new()).to_text();
    let annotations = BTreeMap::from([(annotation::NODE_GPUS.to_owned(), offer)]);
    let names: Vec<String> = (0..900).map(|n| format!("node-{n:03}")).collect();
    for name in &names {
        cluster.set_node(name, Some(&annotations));
    }
    let nodes: Vec<&str> = names.iter().map(String::as_str).collect();
    let (mut refused, now) = (Refused::default(), Instant::now());
    for n in 0..5 {
        note(&mut refused, &format!("large-{n}"), Wanted { priority: 2, ..wanted(200, 0) }, &nodes, now);
    }
    // It fits on the last node alone.
    note(&mut refused, "last", Wanted { priority: 1, ..wanted(10, 10) }, &nodes[899..], now);
    note(&mut refused, "small", wanted(10, 10), &nodes, now);
    refused.hear(cluster.take_roomier(), now);
    // 5 × 900 pairs, 900, and 1.
    for _ in 0..2 {
        assert_eq!(refused.due(&cluster, now, 9), Due { pods: Vec::new(), more: true });
    }
    let found = |due: &Due| -> Vec<(String, String)> {
        due.pods.iter().map(|(pod, node)| (pod.uid.clone(), node.to_string())).collect()
    };
    let due = refused.due(&cluster, now, 1);
    assert_eq!((found(&due), due.more), (vec![("last".into(), "node-899".into())], true));
    let due = refused.due(&cluster, now, 1);
    assert_eq!((found(&due), due.more), (vec![("small".into(), "node-000".into())], false));
    assert_eq!(refused.due(&cluster, now, 9), Due::default());
}

#[test]
fn of_too_many_pods_that_were_refused_the_least_important_and_then_the_oldest_are_forgotten() {
    let mut cluster = Cluster::default();
    add_node(&mut cluster, 0, 1, Vec::new());
    let (mut refused, start) = (Refused::default(), Instant::now());
    for n in 0..1200 {
        let priority = if n < 100 { 1 } else { 0 };
        let wanted = Wanted { priority, ..wanted(10, 10) };
        let since = start + Duration::from_millis(n);
        note(&mut refused, &format!("pod-{n:04}"), wanted, &["node-0"], since);
    }
    let due = due(&mut refused, &mut cluster, start + Duration::from_secs(2), 9999);
    assert_eq!(due.len(), 1000);
    assert_eq!((&*due[0].0, &*due[99].0, &*due[100].0), ("pod-0000", "pod-0099", "pod-0300"));
}

proptest! {
    /// Whoever has to go is less important, is enough, and is needed.
    #[test]
    fn victims_make_room_and_no_one_goes_in_vain(
        pods in proptest::collection::vec((0..3_u8, 1..60_u32, 0..4_i32), 0..14),
        asked in prop_oneof![1..100_u32, (1..4_u32).prop_map(|gpus| gpus * 100)],
        priority in 0..4_i32,
        named in proptest::collection::btree_set(0..14_usize, 0..3),
    ) {
        let build = |gone: &BTreeSet<String>| {
            let mut cluster = Cluster::default();
            add_node(&mut cluster, 0, 3, Vec::new());
            let mut left = [100_u32; 3];
            for (at, (on, core, priority)) in pods.iter().enumerate() {
                let uid = format!("pod-{at:02}");
                if left[usize::from(*on)] >= *core {
                    left[usize::from(*on)] -= core;
                    if !gone.contains(&uid) {
                        add_pod(&mut cluster, &uid, 0, *on, *core, *priority);
                    }
                }
            }
            cluster
        };
        let wanted = Wanted { priority, ..wanted(asked, 10) };
        let fits = |gone: &BTreeSet<String>| !build(gone).filter("new", &wanted, &["node-0"]).fit.is_empty();
        let named: Vec<String> = named.iter().map(|at| format!("pod-{at:02}")).collect();
        let cluster = build(&BTreeSet::new());
        let node = name(0);
        let found = cluster.victims(&wanted, &node, named.iter().map(|uid| uid.as_str().into()).collect());
        match found {
            Some(victims) => {
                let uids: BTreeSet<String> = victims.uids.iter().map(ToString::to_string).collect();
                prop_assert_eq!(uids.len(), victims.uids.len());
                prop_assert!(named.iter().all(|uid| uids.contains(uid)));
                prop_assert!(fits(&uids));
                for uid in uids.iter().filter(|uid| !named.contains(uid)) {
                    let at: usize = uid["pod-".len()..].parse().unwrap();
                    prop_assert!(pods[at].2 < priority, "{uid} is as important");
                    let spared = uids.iter().filter(|other| *other != uid).cloned().collect();
                    prop_assert!(!fits(&spared), "{uid} went in vain");
                }
            }
            None => {
                let lesser = (0..pods.len()).filter(|at| pods[*at].2 < priority).map(|at| format!("pod-{at:02}"));
                prop_assert!(!fits(&lesser.chain(named).collect()));
            }
        }
    }
}
