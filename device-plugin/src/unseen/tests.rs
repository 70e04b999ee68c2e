//! Over real share folders. What the driver says, and the time, are the test's.

use std::fs;

use ledger::{Floor, Inventory, Ledger, Terms};
use region::{Key, Limits, Process, UNSEEN_LASTS_NS, Usage};
use tempfile::TempDir;
use vcuda_config::Request;

use super::{rule::LOOKS, *};
use crate::testing;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

struct Node {
    folder: TempDir,
    inventory: Inventory,
    ledger: Ledger,
    unseen: Unseen,
    now: u64,
}

/// A container with a share of 1 GiB, as its processes see it.
struct Container {
    limits: Limits,
    usage: Usage,
    me: Process,
}

impl Node {
    fn new(floors: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let shares = folder.path().join("shares");
        Self {
            inventory: testing::inventory("boot", vec![testing::gpu(1, 320)]),
            ledger: Ledger::open_in_boot(&shares, "boot".into()).unwrap(),
            unseen: Unseen::new(shares, floors, folder.path().join("proc")),
            folder,
            now: 5_000_000_000,
        }
    }

    /// Its one process has this number on the host.
    fn bind(&self, pod: &str, pid: u32) -> Container {
        let claim = testing::claim(pod, pod, Request::new(10, 4).unwrap(), Terms::default());
        let bound = self.ledger.bind(&self.inventory, &claim, &[], testing::fill).unwrap();
        let proc = self.folder.path().join("proc").join(pid.to_string());
        fs::create_dir_all(&proc).unwrap();
        fs::write(proc.join("cgroup"), format!("0::/kubepods/pod1/id-{pod}/deep")).unwrap();
        let usage = Usage::open(&bound.folder.usage()).unwrap();
        let me = usage.claim().unwrap();
        Container { limits: Limits::open(&bound.folder.limits()).unwrap(), usage, me }
    }

    fn share(&self, pod: &str) -> ShareFolder {
        let name = format!("{pod}_main").parse().unwrap();
        ShareFolder::new(&self.folder.path().join("shares"), &name)
    }

    /// A look at which the driver says that processes hold so much.
    fn look(&mut self, held: &[(u32, u64)]) {
        self.look_while(held, || {});
    }

    fn look_while(&mut self, held: &[(u32, u64)], meanwhile: impl FnOnce()) {
        self.now += 500_000_000;
        let looks = self.unseen.begin(self.now);
        meanwhile();
        let held = [(gpu(), held.iter().copied().collect())].into();
        let held = self.unseen.by_share(&looks, &held);
        self.unseen.end(looks, &held, self.now);
    }

    /// A look at which the driver says that the cgroups which have its floor hold so much each.
    fn look_at_cgroups_while(&mut self, held: u64, meanwhile: impl FnOnce()) {
        self.now += 500_000_000;
        let looks = self.unseen.begin(self.now);
        meanwhile();
        let held = looks.iter().flat_map(Look::of_cgroup).map(|(key, ..)| (key, held)).collect();
        self.unseen.end(looks, &held, self.now);
    }

    fn looks(&mut self, held: &[(u32, u64)]) {
        (0..LOOKS).for_each(|_| self.look(held));
    }

    /// What counts against the container's ceiling at this moment.
    fn counted(&self, container: &Container) -> u64 {
        container.limits.unseen_bytes(0, || self.now)
    }
}

fn gpu() -> GpuUuid {
    GpuUuid::from_bytes([1; 16])
}

#[test]
fn what_a_containers_processes_hold_beyond_its_account_is_counted_until_they_end() {
    let mut node = Node::new(true);
    let (a, b) = (node.bind("a", 11), node.bind("b", 12));
    a.usage.take(a.me, 0, 100 * MIB, GIB).unwrap();
    let held = [(11, 350 * MIB), (12, 200 * MIB), (99, GIB)];
    node.look(&held);
    assert_eq!(node.counted(&a), 0, "one look proves nothing");
    node.looks(&held);
    assert_eq!((node.counted(&a), node.counted(&b)), (250 * MIB, 200 * MIB));
    a.usage.give(a.me, 0, 100 * MIB);
    node.look(&[(11, 250 * MIB)]);
    assert_eq!((node.counted(&a), node.counted(&b)), (250 * MIB, 0), "that of b has ended");
    node.look(&[]);
    assert_eq!(node.counted(&a), 0);
}

#[test]
fn an_allocation_while_the_driver_is_asked_counts_once() {
    let mut node = Node::new(true);
    let a = node.bind("a", 11);
    node.looks(&[(11, 200 * MIB)]);
    let taken = || a.usage.take(a.me, 0, 300 * MIB, GIB).unwrap();
    node.look_while(&[(11, 500 * MIB)], taken);
    assert_eq!(node.counted(&a), 200 * MIB);
    let given = || a.usage.give(a.me, 0, 300 * MIB);
    node.look_while(&[(11, 500 * MIB)], given);
    assert_eq!(node.counted(&a), 200 * MIB);
    // The driver still tells of it once more.
    node.look(&[(11, 500 * MIB)]);
    assert_eq!(node.counted(&a), 200 * MIB);
}

/// A block is there nearly whenever the driver is asked, and never before and after.
#[test]
fn what_is_taken_and_given_back_while_the_driver_is_asked_is_never_counted() {
    let mut node = Node::new(true);
    let a = node.bind("a", 11);
    node.looks(&[(11, 200 * MIB)]);
    let taken_and_given = || {
        a.usage.take(a.me, 0, 300 * MIB, GIB).unwrap();
        a.usage.give(a.me, 0, 300 * MIB);
    };
    for _ in 0..3 * LOOKS {
        node.look_while(&[(11, 500 * MIB)], taken_and_given);
        assert_eq!(node.counted(&a), 200 * MIB);
    }
    // What ends is gone with the next look all the same.
    node.look_while(&[(11, 50 * MIB)], taken_and_given);
    assert_eq!(node.counted(&a), 50 * MIB);
}

/// The driver keeps the pages that small blocks have left half free, and fills them again.
#[test]
fn small_blocks_that_are_used_again_lower_the_figure_with_the_next_look() {
    let mut node = Node::new(true);
    let a = node.bind("a", 11);
    a.usage.take(a.me, 0, 80 * MIB, GIB).unwrap();
    node.looks(&[(11, 800 * MIB)]);
    assert_eq!(node.counted(&a), 720 * MIB);
    a.usage.take(a.me, 0, 200 * MIB, GIB).unwrap();
    let taken = || a.usage.take(a.me, 0, 20 * MIB, GIB).unwrap();
    node.look_while(&[(11, 800 * MIB)], taken);
    assert_eq!(node.counted(&a), 520 * MIB);
}

#[test]
fn memory_that_several_processes_of_a_container_have_counts_once() {
    let mut node = Node::new(true);
    let a = node.bind("a", 11);
    a.usage.take(a.me, 0, 300 * MIB, GIB).unwrap();
    let exported = a.usage.export(a.me, 0, 300 * MIB).unwrap();
    a.usage.set_key(exported, Key::Handle(7));
    a.usage.import(a.me, Key::Handle(7)).unwrap();
    node.looks(&[(11, 650 * MIB)]);
    assert_eq!(node.counted(&a), 50 * MIB);
}

#[test]
fn no_more_is_counted_than_the_container_may_have() {
    let mut node = Node::new(true);
    let a = node.bind("a", 11);
    node.looks(&[(11, 9 * GIB)]);
    assert_eq!(node.counted(&a), GIB, "something passes the shim by");
}

#[test]
fn a_new_device_plugin_goes_on_with_what_is_known_and_finds_out_what_has_ended() {
    let mut node = Node::new(true);
    let a = node.bind("a", 11);
    node.looks(&[(11, 200 * MIB)]);
    let restart = |node: &mut Node| {
        let folder = node.folder.path();
        node.unseen = Unseen::new(folder.join("shares"), true, folder.join("proc"));
    };
    restart(&mut node);
    node.look(&[(11, 300 * MIB)]);
    assert_eq!(node.counted(&a), 200 * MIB);
    restart(&mut node);
    node.look(&[(11, 50 * MIB)]);
    assert_eq!(node.counted(&a), 50 * MIB);
    // Nobody has looked for long: what was known then is not gone by.
    node.now += UNSEEN_LASTS_NS;
    assert_eq!(node.counted(&a), 0);
    restart(&mut node);
    node.look(&[(11, 200 * MIB)]);
    assert_eq!(node.counted(&a), 0);
    node.looks(&[(11, 200 * MIB)]);
    assert_eq!(node.counted(&a), 200 * MIB);
}

#[test]
fn a_gpu_that_does_not_answer_keeps_its_figures_for_a_while() {
    let mut node = Node::new(true);
    let a = node.bind("a", 11);
    node.looks(&[(11, 200 * MIB)]);
    let last = node.now;
    while node.now < last + UNSEEN_LASTS_NS - 500_000_000 {
        node.now += 500_000_000;
        let looks = node.unseen.begin(node.now);
        node.unseen.end(looks, &OfShares::new(), node.now);
        assert_eq!(node.counted(&a), 200 * MIB);
    }
    node.now = last + UNSEEN_LASTS_NS;
    assert_eq!(node.counted(&a), 0);
}

fn hold_to_1_gib(node: &Node, pod: &str) {
    let floor = Floor::new(format!("id-{pod}"), "/x".into(), [(gpu(), GIB)].into());
    floor.store(&node.share(pod)).unwrap();
}

#[test]
fn of_a_share_with_the_drivers_floor_its_cgroup_tells_where_floors_are_seen_to() {
    for floors in [true, false] {
        let mut node = Node::new(floors);
        let _containers = (node.bind("a", 11), node.bind("b", 12));
        hold_to_1_gib(&node, "a");
        let looks = node.unseen.begin(node.now);
        let asked: Vec<_> = looks.iter().flat_map(Look::of_cgroup).collect();
        let of_a = (("a_main".parse().unwrap(), gpu()), &gpu(), Path::new("/x"));
        assert_eq!(asked, if floors { vec![of_a] } else { vec![] });
    }
}

/// One look may be torn, or at a moment at which a process has ended and the driver is not done with it.
#[test]
fn a_cgroup_is_beyond_the_account_by_what_all_looks_at_it_show() {
    let mut node = Node::new(true);
    let a = node.bind("a", 11);
    hold_to_1_gib(&node, "a");
    a.usage.take(a.me, 0, 100 * MIB, GIB).unwrap();
    node.look_at_cgroups_while(900 * MIB, || {});
    assert_eq!(node.counted(&a), 0, "its last process is on its way out");
    (0..LOOKS).for_each(|_| node.look_at_cgroups_while(300 * MIB, || {}));
    assert_eq!(node.counted(&a), 200 * MIB);
    let taken_and_given = || {
        a.usage.take(a.me, 0, 300 * MIB, GIB).unwrap();
        a.usage.give(a.me, 0, 300 * MIB);
    };
    for _ in 0..2 * LOOKS {
        node.look_at_cgroups_while(600 * MIB, taken_and_given);
        assert_eq!(node.counted(&a), 200 * MIB);
    }
    node.look_at_cgroups_while(150 * MIB, || {});
    assert_eq!(node.counted(&a), 50 * MIB);
}

#[test]
fn what_processes_share_is_in_a_cgroup_once() {
    let mut node = Node::new(true);
    let a = node.bind("a", 11);
    hold_to_1_gib(&node, "a");
    a.usage.take(a.me, 0, 300 * MIB, GIB).unwrap();
    let exported = a.usage.export(a.me, 0, 300 * MIB).unwrap();
    a.usage.set_key(exported, Key::Handle(7));
    a.usage.import(a.me, Key::Handle(7)).unwrap();
    (0..LOOKS).for_each(|_| node.look_at_cgroups_while(350 * MIB, || {}));
    assert_eq!(node.counted(&a), 50 * MIB);
}

/// By a cgroup that it makes and names after the other. What is looked at of a share is its own, whoever else is not.
#[test]
fn no_container_passes_its_processes_off_as_anothers() {
    let mut node = Node::new(true);
    let (a, b) = (node.bind("a", 11), node.bind("b", 12));
    fs::write(node.folder.path().join("proc/11/cgroup"), "0::/kubepods/pod1/id-a/id-b").unwrap();
    let held = [(11, 300 * MIB), (12, 200 * MIB)];
    node.looks(&held);
    assert_eq!((node.counted(&a), node.counted(&b)), (300 * MIB, 200 * MIB));
    for _ in 0..LOOKS {
        node.unseen.rest("a_main".parse().unwrap(), 10_000_000, node.now);
        node.look(&held);
    }
    assert_eq!(node.counted(&b), 200 * MIB, "the other rests");
    hold_to_1_gib(&node, "a");
    node.looks(&held);
    assert_eq!(node.counted(&b), 200 * MIB, "the other has the driver's floor");
    node.ledger.mark_stopped("id-a").unwrap();
    node.looks(&held);
    assert_eq!(node.counted(&b), 200 * MIB, "the other is on its way out");
}

#[test]
fn a_container_that_was_restarted_begins_anew() {
    let mut node = Node::new(true);
    let a = node.bind("a", 11);
    node.looks(&[(11, 200 * MIB)]);
    assert_eq!(node.counted(&a), 200 * MIB);
    node.ledger.mark_stopped("id-a").unwrap();
    node.look(&[]);
    let again = node.bind("a", 13);
    node.look(&[(13, 300 * MIB)]);
    assert_eq!(node.counted(&again), 0);
    node.looks(&[(13, 300 * MIB)]);
    assert_eq!(node.counted(&again), 300 * MIB);
}

#[test]
fn a_container_that_is_slow_to_look_at_is_looked_at_less_often_and_holds_up_nobody() {
    let mut node = Node::new(true);
    let (a, b) = (node.bind("a", 11), node.bind("b", 12));
    node.looks(&[(11, 200 * MIB), (12, 300 * MIB)]);
    // Half a look took 45 ms of a processor's time, so the whole one 90 ms: a fiftieth of 4.5 s.
    node.unseen.rest("a_main".parse().unwrap(), 45_000_000, node.now);
    for _ in 0..8 {
        node.look(&[]);
        assert_eq!((node.counted(&a), node.counted(&b)), (200 * MIB, 0));
    }
    node.look(&[]);
    assert_eq!(node.counted(&a), 0);
}

#[test]
fn a_container_that_spoils_its_account_spoils_its_own_figures_only() {
    let mut node = Node::new(true);
    let (a, b) = (node.bind("a", 11), node.bind("b", 12));
    // All that it may: its own loss.
    a.usage.take(a.me, 0, 300 * MIB, GIB).unwrap();
    a.usage.give(a.me, 0, 300 * MIB);
    node.looks(&[(11, 500 * MIB), (12, 200 * MIB)]);
    assert_eq!(node.counted(&a), 500 * MIB);
    fs::write(node.share("a").usage(), vec![0xff; 8 << 10]).unwrap();
    node.looks(&[(11, 600 * MIB), (12, 300 * MIB)]);
    assert_eq!((node.counted(&a), node.counted(&b)), (500 * MIB, 300 * MIB));
}
