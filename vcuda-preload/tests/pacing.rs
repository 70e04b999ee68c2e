//! Pacing, with the shim as it is shipped in front of a driver in small whose kernels take time. Nothing here depends on
//! how fast this machine is: what is asserted is that a container gets no more than its share, and what is counted.
//! That it gets all of it is shown in virtual time (`src/pace/tests.rs`) and by `integration/bench share`.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

mod common;

use std::{
    thread,
    time::{Duration, Instant},
};

use common::{MIB, Model, Session, can_mount, limit};
use region::{GpuLimit, Lease, LimitsWriter, Slots, UsageReader};

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

/// A share of 20 percent, at any time of a period.
fn model() -> Model {
    Model::new(81920 * MIB, &[limit(0, 1024 * MIB)])
}

fn snapshot(model: &Model) -> region::UsageSnapshot {
    UsageReader::open(&model.room.usage()).unwrap().snapshot().unwrap()
}

/// Asserts that kernels of up to `longest_ns` took no more of GPU 0 since `since` than 20 percent, the burst, and one
/// that nobody knew yet for each of `processes`.
fn assert_held(model: &Model, since: Instant, longest_ns: u64, processes: u64) {
    let window = u64::try_from(since.elapsed().as_nanos()).unwrap();
    let terms = region::Terms {
        slots: Slots::ALL,
        slot_ns: region::SLOT_NS,
        rate_permille: 200,
        charge_permille: 1000,
        refund_ns: 0,
        governed: false,
    };
    let most = terms.most_in(window, longest_ns) + (1 + processes) * longest_ns;
    let busy = model.busy_ns(0);
    assert!(busy <= most, "{busy} ns of {window}, at most {most}");
    assert!(busy > 0);
}

#[test]
fn every_door_counts_and_is_held_to_the_share() {
    if !can_mount() {
        return;
    }
    for door in 0..=10 {
        let model = model();
        let mut session = model.ready();
        let since = Instant::now();
        let launches = session.must(&format!("spin {} 400 {door}", 300 * US));
        assert_held(&model, since, 300 * US, 1);
        let snapshot = snapshot(&model);
        assert_eq!(snapshot.launches, launches, "door {door}");
        assert!(snapshot.throttled_ns > 0, "door {door}");
        assert!(snapshot.gpus[0].charged_ns > 0 && snapshot.gpus[0].waiting_ns > 0, "door {door}");
    }
}

#[test]
fn queued_work_streams_and_waiting_make_no_difference() {
    if !can_mount() {
        return;
    }
    for (kernel, how) in
        [(20 * US, 0), (5 * MS, 0), (300 * US, 1600), (3 * MS, 1600), (300 * US, 10000), (40 * MS, 200)]
    {
        let model = model();
        let mut session = model.ready();
        let since = Instant::now();
        session.must(&format!("spin {kernel} 500 {how}"));
        assert_held(&model, since, kernel, 1);
    }
}

#[test]
fn many_processes_share_one_budget() {
    if !can_mount() {
        return;
    }
    let model = model();
    let mut sessions: Vec<Session> = (0..64).map(|_| model.ready()).collect();
    let since = Instant::now();
    for session in &mut sessions {
        session.send(&format!("spin {} 1000 0", 300 * US));
    }
    for session in &mut sessions {
        // The answer to what was sent comes before that to this.
        session.call("total 0");
    }
    assert_held(&model, since, 300 * US, 64);
}

#[test]
fn a_process_for_each_launch_gains_nothing() {
    if !can_mount() {
        return;
    }
    let model = model();
    let mut session = model.start();
    let since = Instant::now();
    let launches = session.must(&format!("fork-spin {} 1500 0", 4 * MS));
    assert_held(&model, since, 4 * MS, 4);
    assert_eq!(snapshot(&model).launches, launches);
}

#[test]
fn what_the_driver_answers_is_what_the_caller_gets_and_a_failed_launch_costs_nothing() {
    if !can_mount() {
        return;
    }
    let model = model();
    let mut session = model.start();
    session.call("only-init");
    // No context.
    for _ in 0..200 {
        assert_eq!(session.call(&format!("launch-by {} 0 0", 100 * MS)).0, 201);
    }
    assert_eq!(model.busy_ns(0), 0);
    assert_eq!(snapshot(&model).gpus[0].next_ns, 0);
}

#[test]
fn a_captured_stream_gets_no_mark_and_waits_for_nothing() {
    if !can_mount() {
        return;
    }
    let model = model();
    let mut session = model.ready();
    session.must(&format!("spin {} 100 0", 300 * US));
    let throttled = snapshot(&model).throttled_ns;
    let stream = session.must("stream");
    session.must(&format!("capture {stream}"));
    for _ in 0..1000 {
        session.must(&format!("launch-by {} {stream} 0", 100 * MS));
    }
    session.must(&format!("end-capture {stream}"));
    assert_eq!(session.must("marks-captured"), 0);
    assert_eq!(snapshot(&model).throttled_ns, throttled);
}

#[test]
fn contexts_and_streams_that_are_destroyed_at_work_take_their_marks_along() {
    if !can_mount() {
        return;
    }
    let model = model();
    let mut session = model.ready();
    for _ in 0..20 {
        let context = session.must("context 0");
        let stream = session.must("stream");
        for _ in 0..3 {
            session.must(&format!("launch-by {} {stream} 0", 200 * US));
        }
        session.must(&format!("destroy-stream {stream}"));
        session.must(&format!("launch-by {} 0 0", 200 * US));
        session.must(&format!("destroy {context}"));
    }
    let (_, _, events) = session.call(&format!("spin {} 20 0", 20 * US));
    assert!(events <= 2 * 64 + 2, "{events} events are alive");
    assert!(snapshot(&model).launches > 80);
}

#[test]
fn a_lease_of_the_whole_gpu_holds_nothing_back_and_ends() {
    if !can_mount() {
        return;
    }
    let own_slots = Slots::first(20);
    let share = GpuLimit { own_slots, core_limit_percent: 100, ..limit(0, 1024 * MIB) };
    let model = Model::new(81920 * MIB, &[share]);
    let node = LimitsWriter::open(&model.room.limits()).unwrap();
    let mut session = model.ready();
    let lend = |until_ns| {
        let lease = Lease { slots: Slots::ALL.difference(own_slots), rate_permille: 1000, until_ns };
        node.set_lease(&share.uuid, &lease).unwrap();
    };
    lend(u64::MAX);
    for _ in 0..2000 {
        session.must("launch-by 1000 0 0");
    }
    let snapshot_free = snapshot(&model);
    assert_eq!((snapshot_free.launches, snapshot_free.throttled_ns), (2000, 0));
    assert_eq!(snapshot_free.gpus[0].next_ns, 0, "nothing is charged");
    // It is over: the next launch asks.
    lend(1);
    session.must(&format!("spin {} 300 0", 300 * US));
    assert!(snapshot(&model).throttled_ns > 0);
    assert!(snapshot(&model).gpus[0].next_ns > 0);
}

#[test]
fn what_a_container_writes_over_its_budget_only_holds_itself() {
    if !can_mount() {
        return;
    }
    let model = model();
    let mut session = model.ready();
    session.must(&format!("spin {} 50 0", 300 * US));
    // All words of the GPU's line but the memory's, and each slot's: full.
    let file = std::fs::File::options().write(true).open(model.room.usage()).unwrap();
    use std::os::unix::fs::FileExt;
    file.write_all_at(&[0xff; 64], 4096 + 64).unwrap();
    session.send(&format!("spin {} 50 0", 300 * US));
    thread::sleep(Duration::from_millis(300));
    assert!(snapshot(&model).gpus[0].waiting_ns != 0);
    // Set right, it goes on.
    file.write_all_at(&[0; 64], 4096 + 64).unwrap();
    session.must("total 0");
}
