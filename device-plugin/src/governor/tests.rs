//! The governor over real share folders: what containers read in their limits, tick by tick. Time is the test's.

use std::sync::atomic::Ordering::Relaxed;

use ledger::{Change, Inventory, Ledger, ShareFolder, Terms};
use region::{Limits, Pace, Slots, Usage};
use tempfile::TempDir;
use vcuda_config::Request;

use super::*;
use crate::{meter::Use, testing};

const TICK_NS: u64 = 100_000_000;

struct Node {
    folder: TempDir,
    inventory: Inventory,
    ledger: Ledger,
    meter: Arc<Meter>,
    governor: Governor,
    now: u64,
}

/// A container with a share, as its processes see it.
struct Container {
    limits: Limits,
    usage: Usage,
}

impl Node {
    fn new(work_conserving: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let inventory = testing::inventory("boot", vec![testing::gpu(1, 320)]);
        let shares = folder.path().join("shares");
        let meter = Arc::new(Meter::default());
        Self {
            inventory,
            ledger: Ledger::open_in_boot(&shares, "boot".into()).unwrap(),
            governor: Governor::new(shares, work_conserving, Arc::clone(&meter), folder.path().join("proc")),
            meter,
            folder,
            now: 5_000_000_000,
        }
    }

    fn bind(&self, pod: &str, core: u32, terms: Terms) -> Container {
        let claim = testing::claim(pod, pod, Request::new(core, 4).unwrap(), terms);
        let bound = self.ledger.bind(&self.inventory, &claim, &[], testing::fill).unwrap();
        Container {
            limits: Limits::open(&bound.folder.limits()).unwrap(),
            usage: Usage::open(&bound.folder.usage()).unwrap(),
        }
    }

    /// A tenth of a second later; these containers have launched something in it.
    fn tick(&mut self, active: &[&Container]) {
        for container in active {
            let me = container.usage.claim().unwrap();
            container.usage.counters(me).0.fetch_add(1, Relaxed);
        }
        self.now += TICK_NS;
        self.governor.tick(self.now);
    }

    fn ticks(&mut self, count: u32, active: &[&Container]) {
        (0..count).for_each(|_| self.tick(active));
    }

    /// A governor that knows nothing of what was.
    fn restart(&mut self) {
        let shares = self.folder.path().join("shares");
        self.governor =
            Governor::new(shares, false, Arc::clone(&self.meter), self.folder.path().join("proc"));
    }

    fn pace(&self, container: &Container) -> Pace {
        container.limits.pace(0).unwrap()
    }

    /// Rate and slots at this moment.
    fn may(&self, container: &Container) -> (u32, Slots) {
        let pace = self.pace(container);
        (pace.rate_permille(self.now), pace.slots(self.now))
    }
}

fn gpu() -> GpuUuid {
    GpuUuid::from_bytes([1; 16])
}

fn limit(core_limit: u32) -> Terms {
    Terms { core_limit: Some(core_limit), ..Terms::default() }
}

#[test]
fn two_shares_that_fill_a_gpu_keep_to_themselves() {
    let mut node = Node::new(false);
    let (a, b) = (node.bind("a", 30, Terms::default()), node.bind("b", 70, Terms::default()));
    node.ticks(5, &[&a, &b]);
    let ((rate_a, slots_a), (rate_b, slots_b)) = (node.may(&a), node.may(&b));
    assert_eq!((rate_a, rate_b), (300, 700));
    assert_eq!(slots_a.union(slots_b), Slots::ALL);
    assert!(slots_a.intersection(slots_b).is_empty());
    assert!(a.limits.heartbeat_ns() == node.now);
}

#[test]
fn a_limit_above_core_borrows_what_is_idle_and_gives_it_back_with_the_next_tick() {
    let mut node = Node::new(false);
    let (a, b) = (node.bind("a", 30, limit(50)), node.bind("b", 70, Terms::default()));
    node.ticks(5, &[&a, &b]);
    assert_eq!(node.may(&a).0, 300);
    node.ticks(4, &[&a]);
    let (rate, slots) = node.may(&a);
    assert_eq!(rate, 500);
    assert!(slots.count() >= 50);
    node.tick(&[&a, &b]);
    assert_eq!((node.may(&a).0, node.may(&a).1.intersection(node.pace(&b).own)), (300, Slots::NONE));
    assert_eq!(node.may(&b), (700, node.pace(&b).own));
}

#[test]
fn what_is_lent_ends_with_the_governor_and_a_new_one_lends_it_again() {
    let mut node = Node::new(false);
    let (a, b) = (node.bind("a", 30, limit(100)), node.bind("b", 70, Terms::default()));
    node.ticks(5, &[&a]);
    assert_eq!(node.may(&a).0, 999);
    // Killed.
    node.now += 250_000_000;
    assert_eq!(node.may(&a), (300, node.pace(&a).own));
    node.restart();
    // What it saw before it was killed it does not know; the first tick takes nothing for work that was there before.
    node.ticks(3, &[&a]);
    assert_eq!((node.may(&a).0, node.may(&b).0), (999, 700));
}

#[test]
fn a_work_conserving_node_divides_idle_time_but_a_pods_own_limit_holds() {
    let mut node = Node::new(true);
    let (a, b) = (node.bind("a", 20, Terms::default()), node.bind("b", 20, limit(30)));
    node.ticks(5, &[&a, &b]);
    assert_eq!((node.may(&a).0, node.may(&b).0), (700, 300));
    assert_eq!(a.limits.get(0).unwrap().core_limit_percent, 100);
}

#[test]
fn a_stopped_containers_time_is_lent_and_a_restarted_one_is_found_again() {
    let mut node = Node::new(false);
    let (a, b) = (node.bind("a", 30, limit(100)), node.bind("b", 70, Terms::default()));
    node.ticks(3, &[&a, &b]);
    node.ledger.mark_stopped("id-b").unwrap();
    node.ticks(2, &[&a, &b]);
    assert_eq!(node.may(&a).0, 1000, "whatever its usage says");
    let launches = |node: &Node| node.governor.figures().iter().find(|of| of.pod == "b").unwrap().launches;
    let before = launches(&node);
    let b = node.bind("b", 70, Terms::default());
    node.ticks(2, &[&a, &b]);
    assert_eq!((node.may(&a).0, node.may(&b).0), (300, 700), "by its new files");
    assert_eq!(launches(&node), before + 2, "a counter never falls");
}

#[test]
fn a_change_that_was_recorded_and_not_told_is_told() {
    let mut node = Node::new(false);
    let a = node.bind("a", 30, Terms::default());
    node.tick(&[&a]);
    let killed = |_: &_, _: &_| Err(io::Error::other("killed"));
    let change = Change { core: Some(40), memory_units: std::num::NonZeroU32::new(8), core_limit: None };
    assert!(node.ledger.change(&node.inventory, &"a_main".parse().unwrap(), change, killed).is_err());
    assert_eq!(a.limits.get(0).unwrap().core_percent, 30);
    node.tick(&[&a]);
    let limit = a.limits.get(0).unwrap();
    assert_eq!((limit.core_percent, limit.memory_bytes, limit.own_slots.count()), (40, 2 << 30, 40));
}

#[test]
fn a_share_of_an_earlier_version_gets_its_slots() {
    let mut node = Node::new(false);
    let a = node.bind("a", 30, Terms::default());
    let file = node.folder.path().join("shares/a_main/share.json");
    let mut record: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    record["gpus"][0].as_object_mut().unwrap().remove("slots");
    fs::write(&file, record.to_string()).unwrap();
    node.tick(&[&a]);
    assert_eq!(node.may(&a), (300, Slots::ALL), "by its budget alone");
    Ledger::open_in_boot(&node.folder.path().join("shares"), "boot".into()).unwrap();
    node.tick(&[&a]);
    assert_eq!(node.pace(&a).own.count(), 30);
}

#[test]
fn nothing_is_lent_while_a_record_cannot_be_read_and_own_shares_hold() {
    let mut node = Node::new(false);
    let a = node.bind("a", 30, limit(100));
    node.ticks(3, &[&a]);
    assert_eq!(node.may(&a).0, 1000);
    fs::create_dir(node.folder.path().join("shares/odd_main")).unwrap();
    fs::write(node.folder.path().join("shares/odd_main/share.json"), "{").unwrap();
    node.tick(&[&a]);
    assert_eq!(node.may(&a), (300, node.pace(&a).own));
}

#[test]
fn a_container_that_spoils_its_usage_loses_its_figures_and_harms_nobody() {
    let mut node = Node::new(false);
    let (a, b) = (node.bind("a", 30, Terms::default()), node.bind("b", 70, Terms::default()));
    node.ticks(2, &[&a, &b]);
    let folder = ShareFolder::new(&node.folder.path().join("shares"), &"a_main".parse().unwrap());
    fs::write(folder.usage(), vec![0xff; 8 << 10]).unwrap();
    node.ticks(3, &[&b]);
    assert_eq!((node.may(&a).0, node.may(&b).0), (300, 700));
    assert!(a.limits.heartbeat_ns() == node.now && b.limits.heartbeat_ns() == node.now);
    fs::remove_dir_all(node.folder.path().join("shares")).unwrap();
    node.tick(&[]);
    assert!(node.governor.figures().is_empty());
}

/// The driver tells of processes; whose they are, their cgroups tell.
#[test]
fn what_the_driver_sees_is_counted_for_the_container_of_the_process() {
    let mut node = Node::new(false);
    let (a, b) = (node.bind("a", 30, Terms::default()), node.bind("b", 70, Terms::default()));
    for (pid, path) in [
        (11, "0::/k8s.io/id-a"),
        (12, "0::/kubepods/pod1/cri-containerd-x.scope/id-b/deep"),
        (13, "0::/"),
        // In a cgroup that a container has made and named after another.
        (14, "0::/k8s.io/id-a/id-b"),
    ] {
        let proc = node.folder.path().join("proc").join(pid.to_string());
        fs::create_dir_all(&proc).unwrap();
        fs::write(proc.join("cgroup"), path).unwrap();
    }
    node.tick(&[&a, &b]);
    for _ in 0..30 {
        for (pid, percent) in [(11, 20), (12, 55), (13, 15), (14, 10), (99, 10)] {
            node.meter.add(Use { gpu: gpu(), pid, used_ns: TICK_NS / 100 * percent });
        }
        node.tick(&[&a, &b]);
    }
    let busy = |container: &Container| container.limits.busy_percent(0).unwrap();
    assert!((29..=31).contains(&busy(&a)) && (54..=56).contains(&busy(&b)), "{} {}", busy(&a), busy(&b));
    let figures = node.governor.figures();
    assert_eq!(figures.iter().map(|of| of.driver_ns).collect::<Vec<_>>(), [900_000_000, 1_650_000_000]);
}

/// The driver says nothing of a process that has ended, so it cannot prove that a container that starts one for every
/// launch used less than it says.
#[test]
fn what_overlapped_is_given_back_unless_processes_come_and_go() {
    use std::os::unix::fs::FileExt;
    let charge = |come_and_go: bool| {
        let mut node = Node::new(false);
        let (a, b) = (node.bind("a", 30, Terms::default()), node.bind("b", 70, Terms::default()));
        let proc = node.folder.path().join("proc/11");
        fs::create_dir_all(&proc).unwrap();
        fs::write(proc.join("cgroup"), "0::/k8s.io/id-a").unwrap();
        let folder = ShareFolder::new(&node.folder.path().join("shares"), &"a_main".parse().unwrap());
        let file = fs::File::options().write(true).open(folder.usage()).unwrap();
        for tick in 0..200_u64 {
            let busy = TICK_NS / 100 * 40;
            a.usage.budget(0).unwrap().count(node.now, node.now - busy, node.now);
            node.meter.add(Use { gpu: gpu(), pid: 11, used_ns: busy / 2 });
            let active = [&b, &a];
            node.tick(&active[..if tick == 0 { 2 } else { 1 }]);
            if come_and_go {
                // The process ID of the first slot.
                file.write_all_at(&(1000 + tick).to_le_bytes(), 8192).unwrap();
            }
        }
        (node.pace(&a).charge_permille(), node.pace(&a).refund_ns / 1_000_000)
    };
    let (permille, back_ms) = charge(false);
    assert!((490..=510).contains(&permille), "{permille}");
    // Half of what it paid in the seconds before that, but what may be rounding.
    assert!((800..1_500).contains(&back_ms), "{back_ms}");
    assert_eq!(charge(true), (1000, 0));
}

#[test]
fn low_work_yields_idle_time_to_normal_work_with_the_next_tick_and_has_it_back_when_that_ends() {
    let mut node = Node::new(false);
    let low = Terms { priority: ledger::Priority::Low, ..limit(100) };
    let (a, b) = (node.bind("a", 20, low), node.bind("b", 30, limit(100)));
    node.ticks(5, &[&a]);
    assert_eq!(node.may(&a), (999, Slots::ALL));
    node.tick(&[&a, &b]);
    assert_eq!((node.may(&a), node.may(&b).0), ((200, node.pace(&a).own), 800));
    node.ticks(4, &[&a]);
    assert_eq!(node.may(&a), (999, Slots::ALL));
}

/// A container whose kernels of `kernel_ns` take its whole share of each tick.
fn works(node: &Node, container: &Container, kernel_ns: u64) {
    let used = TICK_NS / 100 * u64::from(container.limits.get(0).unwrap().core_percent);
    container.usage.budget(0).unwrap().count(node.now, node.now - used, node.now);
    let me = container.usage.claim().unwrap();
    let launches = container.usage.counters(me).0;
    let before = launches.load(Relaxed);
    // As many as have ended by now.
    launches.store(before.max((node.now - 5_000_000_000) * used / TICK_NS / kernel_ns), Relaxed);
}

/// Ticks in which these containers work, with kernels of so many milliseconds.
fn work(node: &mut Node, ticks: u32, containers: &[(&Container, u64)]) {
    for _ in 0..ticks {
        containers.iter().for_each(|(container, ms)| works(node, container, ms * 1_000_000));
        node.tick(&[]);
    }
}

fn slot_ms(node: &Node, container: &Container) -> u64 {
    node.pace(container).slot_ns(node.now) / 1_000_000
}

#[test]
fn slots_last_longer_where_all_have_long_kernels_and_as_ever_once_one_has_short_ones() {
    let mut node = Node::new(false);
    let (a, b) = (node.bind("a", 10, Terms::default()), node.bind("b", 90, Terms::default()));
    work(&mut node, 20, &[(&a, 5), (&b, 5)]);
    assert_eq!((slot_ms(&node, &a), slot_ms(&node, &b)), (1, 1));
    work(&mut node, 30, &[(&a, 5), (&b, 5)]);
    assert_eq!((slot_ms(&node, &a), slot_ms(&node, &b)), (5, 5));
    assert_eq!(node.pace(&a).stretch, node.pace(&b).stretch);
    for _ in 0..10 {
        let me = b.usage.claim().unwrap();
        b.usage.counters(me).0.fetch_add(10_000, Relaxed);
        work(&mut node, 1, &[(&a, 5), (&b, 5)]);
    }
    assert_eq!((slot_ms(&node, &a), slot_ms(&node, &b)), (1, 1));
}

/// Time of longer slots would come back too late.
#[test]
fn nothing_of_idle_owners_is_lent_before_slots_are_as_ever() {
    let mut node = Node::new(false);
    let (a, b) = (node.bind("a", 10, limit(100)), node.bind("b", 90, Terms::default()));
    work(&mut node, 50, &[(&a, 20), (&b, 20)]);
    assert!(slot_ms(&node, &a) > 1);
    let mut lent = false;
    for _ in 0..40 {
        work(&mut node, 1, &[(&a, 20)]);
        lent |= node.may(&a).0 > 100;
        assert!(!lent || slot_ms(&node, &a) == 1);
    }
    assert_eq!(node.may(&a).0, 999);
}

#[test]
fn longer_slots_end_with_the_governor() {
    let mut node = Node::new(false);
    let (a, b) = (node.bind("a", 10, Terms::default()), node.bind("b", 90, Terms::default()));
    work(&mut node, 50, &[(&a, 5), (&b, 5)]);
    assert_eq!(slot_ms(&node, &a), 5);
    node.now += 250_000_000;
    assert_eq!((slot_ms(&node, &a), slot_ms(&node, &b)), (1, 1));
    node.restart();
    work(&mut node, 5, &[(&a, 5), (&b, 5)]);
    assert_eq!((slot_ms(&node, &a), slot_ms(&node, &b)), (1, 1), "it has yet to see what they do");
    work(&mut node, 50, &[(&a, 5), (&b, 5)]);
    assert_eq!((slot_ms(&node, &a), slot_ms(&node, &b)), (5, 5));
}

/// Its shim would launch at other times than its neighbours leave to it.
#[test]
fn slots_stay_as_they_are_beside_a_container_of_an_earlier_version() {
    use std::os::unix::fs::FileExt;
    let mut node = Node::new(false);
    let (a, b) = (node.bind("a", 10, Terms::default()), node.bind("b", 90, Terms::default()));
    let folder = ShareFolder::new(&node.folder.path().join("shares"), &"a_main".parse().unwrap());
    let file = fs::File::options().write(true).open(folder.limits()).unwrap();
    // Where that version left the four bytes that say that the shim knows of it.
    file.write_all_at(&[0; 4], 20).unwrap();
    work(&mut node, 100, &[(&a, 5), (&b, 5)]);
    assert_eq!((slot_ms(&node, &a), slot_ms(&node, &b)), (1, 1));
}
