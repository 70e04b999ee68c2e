//! The accounting among real processes that die, stop, fork and exec at the worst moments. Every worker is this test
//! binary, started again with a task in its environment.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::{
    env,
    fs::File,
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use region::{Key, Process, Slots, Terms, Usage, UsageReader, fault};
use tempfile::TempDir;

const GPU: usize = 2;
const CEILING: u64 = 1 << 20;
const BATCH_NS: u64 = 1_000_000;
const PACED: u64 = 5;
const PACED_FROM_NS: u64 = 1_000 * BATCH_NS;
const HALF: Terms = Terms {
    slots: Slots::ALL,
    slot_ns: region::SLOT_NS,
    rate_permille: 500,
    charge_permille: 1000,
    refund_ns: 0,
    governed: false,
};
const TASK: &str = "REGION_TEST_TASK";
const FILE: &str = "REGION_TEST_FILE";
/// No task passes more fault points than this many before it is done.
const POINTS: i64 = 60;

// ---- workers ------------------------------------------------------------------------------------------------------

/// Not a test by itself: what a worker does, if this process is one.
#[test]
fn worker() {
    let Ok(task) = env::var(TASK) else { return };
    let file = PathBuf::from(env::var(FILE).unwrap());
    let usage = Usage::open_beside(&file, &file.with_file_name("device")).unwrap();
    let (name, number) = task.split_once(' ').unwrap();
    let number: i64 = number.parse().unwrap();
    match name {
        "hold" => hold(&usage, u64::try_from(number).unwrap()),
        "die-at" => churn_until(&usage, number, libc::SIGKILL),
        "stop-at" => churn_until(&usage, number, libc::SIGSTOP),
        "pace-until" => pace_until(&usage, number),
        "stock" => {
            let me = usage.claim().unwrap();
            usage.take(me, GPU, 2 * u64::try_from(number).unwrap(), CEILING).unwrap();
            usage.give(me, GPU, u64::try_from(number).unwrap());
            say("held");
            wait_for_line();
            // Its own, whoever drains it.
            usage.take(me, GPU, u64::try_from(number).unwrap(), CEILING).unwrap();
            say("taken");
            wait_for_end_of_input();
        }
        "drain-die-at" => drain_until(&usage, number, libc::SIGKILL),
        "drain-stop-at" => drain_until(&usage, number, libc::SIGSTOP),
        "share-until" => share_until(&usage, number),
        "claim-die-at" => claim_until(&usage, number, libc::SIGKILL),
        "claim-stop-at" => claim_until(&usage, number, libc::SIGSTOP),
        "churn" => churn_at_random(&usage, u64::try_from(number).unwrap()),
        "exec" => {
            hold_first(&usage, u64::try_from(number).unwrap());
            // The process stays, its memory goes.
            panic!("{}", Command::new("cat").exec());
        }
        "twice" => {
            let bytes = u64::try_from(number).unwrap();
            let me = hold_first(&usage, bytes);
            // Another copy of the shim, with nothing of the first but the process.
            let again = Usage::open(Path::new(&env::var(FILE).unwrap())).unwrap();
            assert_eq!(again.claim().unwrap(), me);
            again.take(me, GPU, bytes, CEILING).unwrap();
            say("held twice");
            wait_for_end_of_input();
        }
        "fork" => {
            let bytes = u64::try_from(number).unwrap();
            hold_first(&usage, bytes);
            // SAFETY: the child only makes system calls and touches the mapping.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let me = usage.claim().unwrap();
                usage.take(me, GPU, bytes / 2, CEILING).unwrap();
                say("forked");
                wait_for_line();
                // As programs do that want no child to keep their memory.
                for fd in 3..64 {
                    let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
                    if link.is_ok_and(|link| link.ends_with("device")) {
                        // SAFETY: a copy of the parent's, of which this child knows nothing; and its own, which it may lose.
                        unsafe { libc::close(fd) };
                    }
                }
                say("closed");
                wait_for_end_of_input();
            }
            // The parent dies, the child lives on with what is its own.
            // SAFETY: no memory is involved.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        _ => panic!("no such task: {name}"),
    }
}

fn say(word: &str) {
    println!("{word}");
    std::io::stdout().flush().unwrap();
}

fn wait_for_line() {
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

fn wait_for_end_of_input() -> ! {
    std::io::stdin().lines().for_each(drop);
    std::process::exit(0)
}

fn hold_first(usage: &Usage, bytes: u64) -> Process {
    let me = usage.claim().unwrap();
    usage.take(me, GPU, bytes, CEILING).unwrap();
    say("held");
    me
}

fn hold(usage: &Usage, bytes: u64) {
    hold_first(usage, bytes);
    wait_for_end_of_input();
}

/// Takes and gives; the signal comes at fault point `point`.
fn churn_until(usage: &Usage, point: i64, signal: i32) {
    let me = usage.claim().unwrap();
    fault::after(point, signal);
    for round in 1..=POINTS.unsigned_abs() {
        usage.take(me, GPU, 512 * round, CEILING).unwrap();
        if round % 3 == 0 {
            usage.give(me, GPU, 512 * (round - 1));
        }
    }
    say("done");
    wait_for_end_of_input();
}

/// Claims a slot and takes 4 KiB; the signal comes at fault point `point`, or at the end.
fn claim_until(usage: &Usage, point: i64, signal: i32) {
    fault::after(point, signal);
    hold_first(usage, 4096);
    // SAFETY: no memory is involved.
    unsafe { libc::kill(libc::getpid(), signal) };
    wait_for_end_of_input();
}

/// Takes what is only there when others' stocks are drained, and gives it back; the signal comes at fault point `point`.
fn drain_until(usage: &Usage, point: i64, signal: i32) {
    let me = usage.claim().unwrap();
    fault::after(point, signal);
    let _ = usage.take(me, GPU, CEILING - 8192 - 5 * 512, CEILING);
    usage.give(me, GPU, CEILING - 8192 - 5 * 512);
    fault::after(-1, 0);
    say("done");
    wait_for_end_of_input();
}

/// Batches of a millisecond, at half a GPU, by a clock of the test's; the end comes at fault point `point`.
fn pace_until(usage: &Usage, point: i64) {
    let me = usage.claim().unwrap();
    let budget = usage.budget(GPU).unwrap();
    fault::after(point, libc::SIGKILL);
    for batch in 0..PACED {
        let now = PACED_FROM_NS + batch * 2 * BATCH_NS;
        usage.set_open(me, GPU, now);
        let mut taken = budget.take(now, &HALF, BATCH_NS / 2, &mut false).unwrap();
        let counted = budget.count(now + BATCH_NS, now, now + BATCH_NS);
        budget.pay(&HALF, counted, &mut taken);
        budget.give(taken);
        usage.set_open(me, GPU, 0);
    }
    say("done");
}

/// Exports, imports and lets go in every order; the end comes at fault point `point`.
fn share_until(usage: &Usage, point: i64) {
    let me = usage.claim().unwrap();
    fault::after(point, libc::SIGKILL);
    for round in 0..3 {
        usage.take(me, GPU, 4096, CEILING).unwrap();
        let exported = usage.export(me, GPU, 4096).unwrap();
        usage.set_key(exported, Key::Handle(round));
        assert_eq!(usage.import(me, Key::Handle(round)), Some(exported));
        if round == 0 {
            usage.unimport(me, exported);
            assert!(usage.unexport(me, exported));
            usage.give(me, GPU, 4096);
        } else {
            assert!(!usage.unexport(me, exported));
            usage.unimport(me, exported);
        }
        assert_eq!(usage.held(me, GPU), 0);
    }
    say("done");
}

fn churn_at_random(usage: &Usage, seed: u64) {
    let me = usage.claim().unwrap();
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    fault::after(i64::try_from(next() % 6000).unwrap(), libc::SIGKILL);
    let mut held = Vec::new();
    for _ in 0..20_000 {
        if next() % 2 == 0 || held.is_empty() {
            let bytes = next() % (CEILING / 8);
            if usage.take(me, GPU, bytes, CEILING).is_ok() {
                held.push(bytes);
            }
        } else {
            let at = usize::try_from(next()).unwrap() % held.len();
            usage.give(me, GPU, held.swap_remove(at));
        }
        assert!(usage.used(Some(me), GPU) <= CEILING);
    }
}

// ---- the other side -----------------------------------------------------------------------------------------------

struct Share {
    _folder: TempDir,
    path: PathBuf,
    usage: Usage,
}

struct Worker {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Share {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("usage");
        Usage::create(&path).unwrap();
        let usage = Usage::open_beside(&path, &path.with_file_name("device")).unwrap();
        Self { _folder: folder, path, usage }
    }

    fn command(&self, task: &str, number: impl std::fmt::Display) -> Command {
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args(["worker", "--exact", "--nocapture", "--test-threads=1"])
            .env(TASK, format!("{task} {number}"))
            .env(FILE, &self.path);
        command
    }

    fn start(&self, task: &str, number: impl std::fmt::Display) -> Worker {
        let mut child = self
            .command(task, number)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Worker { child, input, output }
    }

    /// Bytes that the living hold, as the node sees it and as a process of the container does.
    fn used(&self) -> u64 {
        let by_node = UsageReader::open(&self.path).unwrap().snapshot().unwrap().gpus[GPU].used_bytes;
        let by_container = self.usage.used(None, GPU);
        assert_eq!(by_node, by_container);
        by_container
    }
}

impl Worker {
    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn wait_for(&mut self, word: &str) {
        assert!(self.said(word), "the worker never said {word}");
    }

    /// Whether it says so before it ends.
    fn said(&mut self, word: &str) -> bool {
        (&mut self.output).lines().map_while(Result::ok).any(|line| line.ends_with(word))
    }

    fn signal(&self, signal: i32) {
        // SAFETY: no memory is involved.
        unsafe { libc::kill(self.pid().cast_signed(), signal) };
    }

    fn wait_until_stopped(&self) -> bool {
        let mut status = 0;
        // SAFETY: `status` outlives the call.
        unsafe { libc::waitpid(self.pid().cast_signed(), &raw mut status, libc::WUNTRACED) };
        libc::WIFSTOPPED(status)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn memory_of_a_killed_process_comes_back_with_its_death() {
    let share = Share::new();
    let mut worker = share.start("hold", 4096);
    worker.wait_for("held");
    assert_eq!(share.used(), 4096);
    let snapshot = UsageReader::open(&share.path).unwrap().snapshot().unwrap();
    assert_eq!(snapshot.processes.len(), 1);
    assert_eq!((snapshot.processes[0].pid, snapshot.processes[0].bytes[GPU]), (worker.pid(), 4096));
    let mut seen = Vec::new();
    share.usage.for_each_process(None, GPU, |pid, bytes| seen.push((pid, bytes)));
    assert_eq!(seen, [(worker.pid(), 4096)]);

    worker.child.kill().unwrap();
    worker.child.wait().unwrap();
    assert_eq!(UsageReader::open(&share.path).unwrap().snapshot().unwrap().gpus[GPU].used_bytes, 0);
    assert_eq!(share.used(), 0);
}

#[test]
fn a_kill_at_any_step_loses_nothing() {
    for point in 0..POINTS {
        let share = Share::new();
        let me = share.usage.claim().unwrap();
        share.usage.take(me, GPU, 5 * 512, CEILING).unwrap();
        let mut worker = share.start("die-at", point);
        worker.child.wait().unwrap();
        assert_eq!(share.usage.used(Some(me), GPU), 5 * 512, "killed at point {point}");
        // The whole ceiling is to be had again.
        share.usage.take(me, GPU, CEILING - 5 * 512, CEILING).unwrap();
        assert!(share.usage.take(me, GPU, 1, CEILING).is_err());
    }
}

/// Two processes hold 8 KiB and have as much in stock; this one uses 2.5 KiB.
#[test]
fn a_kill_at_any_step_of_draining_others_stocks_loses_nothing() {
    drain_at_any_step("drain-die-at", |worker, _| {
        worker.child.wait().unwrap();
    });
}

#[test]
fn who_stops_at_any_step_of_draining_others_stocks_blocks_nobody() {
    drain_at_any_step("drain-stop-at", |worker, share| {
        if worker.wait_until_stopped() {
            // What it holds, whether it has come to the end or not.
            let its = share.usage.used(None, GPU) - 8192 - 5 * 512;
            assert!(its == 0 || its == CEILING - 8192 - 5 * 512, "{its}");
            worker.child.kill().unwrap();
            worker.child.wait().unwrap();
        }
    });
}

fn drain_at_any_step(task: &str, ends: impl Fn(&mut Worker, &Share)) {
    for point in 0..40 {
        let share = Share::new();
        let me = share.usage.claim().unwrap();
        share.usage.take(me, GPU, 5 * 512, CEILING).unwrap();
        let mut owners: Vec<_> = (0..2).map(|_| share.start("stock", 4096)).collect();
        owners.iter_mut().for_each(|owner| owner.wait_for("held"));
        let mut worker = share.start(task, point);
        drop(worker.input.take());
        ends(&mut worker, &share);
        assert_eq!(share.usage.used(Some(me), GPU), 8192 + 5 * 512, "at point {point}");
        let rest = CEILING - 2 * 8192 - 5 * 512;
        share.usage.take(me, GPU, rest, CEILING).unwrap();
        for owner in &mut owners {
            owner.input.as_mut().unwrap().write_all(b"\n").unwrap();
            owner.wait_for("taken");
        }
        assert!(share.usage.take(me, GPU, 1, CEILING).is_err(), "at point {point}");
        drop(owners);
        share.usage.take(me, GPU, 2 * 8192, CEILING).unwrap();
        assert!(share.usage.take(me, GPU, 1, CEILING).is_err());
    }
}

#[test]
fn a_kill_at_any_step_of_claiming_a_slot_loses_nothing() {
    claim_at_any_step("claim-die-at", |worker| _ = worker.child.wait().unwrap(), &[0]);
}

#[test]
fn who_stops_at_any_step_of_claiming_a_slot_blocks_nobody() {
    claim_at_any_step("claim-stop-at", |worker| assert!(worker.wait_until_stopped()), &[8192, 0, 4096]);
}

/// The slot is that of a process which is dead and held 8 KiB. Those stay where they are while somebody has stopped who is about to
/// give them back. `ends` waits for the worker.
fn claim_at_any_step(task: &str, ends: impl Fn(&mut Worker), may_hold: &[u64]) {
    let mut completed = false;
    for point in 0..POINTS {
        let share = Share::new();
        let me = share.usage.claim().unwrap();
        share.usage.take(me, GPU, 5 * 512, CEILING).unwrap();
        let mut dead = share.start("hold", 8192);
        dead.wait_for("held");
        drop(dead);
        let mut worker = share.start(task, point);
        ends(&mut worker);
        // Beside whoever is at it: the slot is that one's, or it gets another.
        let mut next = share.start("hold", 1024);
        next.wait_for("held");
        let its = share.usage.used(Some(me), GPU) - 5 * 512 - 1024;
        assert!(may_hold.contains(&its), "{its} at point {point}");
        let seen = UsageReader::open(&share.path).unwrap().snapshot().unwrap();
        let mut held = seen.processes.iter().map(|process| (process.pid, process.bytes[GPU]));
        assert!(held.any(|held| held == (next.pid(), 1024)), "at point {point}: {seen:?}");
        worker.child.kill().unwrap();
        completed |= worker.said("held");
        drop(worker);
        share.usage.take(me, GPU, CEILING - 5 * 512 - 1024, CEILING).unwrap();
        assert!(share.usage.take(me, GPU, 1, CEILING).is_err(), "at point {point}");
        drop(next);
        share.usage.take(me, GPU, 1024, CEILING).unwrap();
    }
    assert!(completed, "all points were passed");
}

#[test]
fn a_kill_at_any_step_of_sharing_leaves_nothing() {
    let mut completed = false;
    for point in 0..POINTS {
        let share = Share::new();
        let me = share.usage.claim().unwrap();
        let mut worker = share.start("share-until", point);
        completed |= worker.child.wait().unwrap().success();
        share.usage.take(me, GPU, CEILING, CEILING).unwrap();
        assert_eq!(share.usage.used(Some(me), GPU), CEILING, "killed at point {point}");
        assert_eq!(share.usage.import(me, Key::Handle(0)), None);
    }
    assert!(completed, "all points were passed");
}

/// What was measured and not paid, or paid and not measured, is never more than one batch; and what the dead had begun is
/// seen by the next.
#[test]
fn a_kill_at_any_step_of_pacing_loses_at_most_a_batch() {
    let mut completed = false;
    for point in 0..POINTS {
        let share = Share::new();
        let me = share.usage.claim().unwrap();
        let mut worker = share.start("pace-until", point);
        completed |= worker.child.wait().unwrap().success();
        let gpu = UsageReader::open(&share.path).unwrap().snapshot().unwrap().gpus[GPU];
        // At half the rate a nanosecond costs two, from where the first was taken: two milliseconds of credit before.
        let paid = gpu.next_ns.saturating_sub(PACED_FROM_NS - 2 * BATCH_NS) / 2;
        assert!(paid.abs_diff(gpu.charged_ns) <= BATCH_NS, "killed at point {point}: {gpu:?}");
        let now = PACED_FROM_NS + PACED * 2 * BATCH_NS;
        let open = share.usage.reap_open(me, GPU, now, 0);
        assert_eq!(share.usage.reap_open(me, GPU, now, 0), None, "counted once");
        assert!(open.is_some() || completed, "killed at point {point}");
        // Nobody is held up for longer than what is owed.
        let wait = share.usage.budget(GPU).unwrap().take(now, &HALF, BATCH_NS, &mut false).err().unwrap_or(0);
        assert!(wait <= PACED * 2 * BATCH_NS);
    }
    assert!(completed, "all points were passed");
}

#[test]
fn a_process_stopped_at_any_step_blocks_nobody_and_keeps_its_own() {
    for point in 0..POINTS {
        let share = Share::new();
        let me = share.usage.claim().unwrap();
        let worker = share.start("stop-at", point);
        assert!(worker.wait_until_stopped(), "point {point} is reached");
        let its = share.usage.used(Some(me), GPU);
        for _ in 0..3 {
            share.usage.take(me, GPU, CEILING - its, CEILING).unwrap();
            assert!(share.usage.take(me, GPU, 1, CEILING).is_err());
            assert_eq!(share.usage.used(Some(me), GPU), CEILING);
            share.usage.give(me, GPU, CEILING - its);
        }
        assert_eq!(share.usage.used(Some(me), GPU), its);

        worker.signal(libc::SIGCONT);
        let mut worker = worker;
        worker.wait_for("done");
        let taken: u64 = (1..=POINTS.unsigned_abs()).sum();
        let given: u64 =
            (1..=POINTS.unsigned_abs()).filter(|round| round % 3 == 0).map(|round| round - 1).sum();
        assert_eq!(share.usage.used(Some(me), GPU), 512 * (taken - given), "stopped at point {point}");
    }
}

#[test]
fn many_processes_killed_at_random_never_pass_the_ceiling_and_leave_nothing() {
    let share = Share::new();
    let me = share.usage.claim().unwrap();
    let mut running: Vec<_> = Vec::new();
    for seed in 1..=60 {
        running.push(share.start("churn", seed));
        if running.len() == 12 {
            let mut ended = running.remove(0);
            assert!(share.usage.used(Some(me), GPU) <= CEILING);
            let status = ended.child.wait().unwrap();
            use std::os::unix::process::ExitStatusExt;
            assert!(status.success() || status.signal() == Some(libc::SIGKILL), "{status}");
        }
    }
    for worker in &mut running {
        worker.child.wait().unwrap();
    }
    assert_eq!(share.usage.used(Some(me), GPU), 0);
    share.usage.take(me, GPU, CEILING, CEILING).unwrap();
}

#[test]
fn memory_of_a_process_comes_back_when_it_execs() {
    let share = Share::new();
    let mut worker = share.start("exec", 8192);
    worker.wait_for("held");
    // `cat` holds the pipe open and echoes, so after this line the program has been replaced.
    worker.input.as_mut().unwrap().write_all(b"replaced\n").unwrap();
    worker.wait_for("replaced");
    assert_eq!(share.used(), 0);
}

#[test]
fn two_copies_of_the_shim_in_a_process_share_its_slot() {
    let share = Share::new();
    let mut worker = share.start("twice", 4096);
    worker.wait_for("held twice");
    assert_eq!(share.used(), 8192);
}

/// The driver frees a process's memory when the last copy of its descriptors is closed (Megatron-LM#3684).
#[test]
fn a_forked_child_owns_nothing_of_its_parent_and_keeps_its_memory() {
    for device in [false, true] {
        let share = Share::new();
        if device {
            File::create(share.path.with_file_name("device")).unwrap();
        }
        let mut worker = share.start("fork", 8192);
        worker.wait_for("forked");
        worker.child.wait().unwrap();
        assert_eq!(share.used(), 8192 + 4096, "the parent's, and the child's own");
        // From here on nobody in this process closes the file, which would drop this lock.
        let me = share.usage.claim().unwrap();
        let rest = CEILING - 8192 - 4096;
        share.usage.take(me, GPU, rest, CEILING).unwrap();
        assert!(share.usage.take(me, GPU, 1, CEILING).is_err());
        share.usage.give(me, GPU, rest);
        let mut other = share.start("hold", 512);
        other.wait_for("held");
        assert_eq!(share.usage.used(Some(me), GPU), 8192 + 4096 + 512, "nobody takes the parent's slot");
        drop(other);
        if device {
            // A child that drops the driver's descriptors keeps nothing.
            worker.input.as_mut().unwrap().write_all(b"\n").unwrap();
            worker.wait_for("closed");
            assert_eq!(share.usage.used(Some(me), GPU), 4096);
        }
        drop(worker.input.take());
        // Nobody can wait for a grandchild.
        while share.usage.used(Some(me), GPU) != 0 {
            std::thread::yield_now();
        }
    }
}

#[test]
fn every_process_gets_a_slot_of_its_own_until_all_are_taken() {
    let share = Share::new();
    let workers: Vec<_> = (0..20)
        .map(|_| {
            let mut worker = share.start("hold", 512);
            worker.wait_for("held");
            worker
        })
        .collect();
    assert_eq!(share.used(), 20 * 512);
    let snapshot = UsageReader::open(&share.path).unwrap().snapshot().unwrap();
    let pids: Vec<_> = snapshot.processes.iter().map(|process| process.pid).collect();
    assert_eq!(pids, workers.iter().map(Worker::pid).collect::<Vec<_>>());
    drop(workers);
    assert_eq!(share.usage.claim().unwrap().slot(), 0, "slots of the dead are used again");
}
