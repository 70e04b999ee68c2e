//! Processes that fork, clone, exec and end in every way, and many at once: the account stays what the living hold, and
//! nothing of the process but its GPU memory is touched. On a driver in small (tests/common/model.c).

mod common;

use common::{MIB, Model, OUT_OF_MEMORY, Session, can_mount, limit};

const CEILING: u64 = 1024 * MIB;

fn model() -> Option<Model> {
    can_mount().then(|| Model::new(40960 * MIB, &[limit(0, CEILING)]))
}

/// The account of GPU 0 is what the driver gave out, and CUDA says so.
#[track_caller]
fn exact(model: &Model, session: &mut Session, bytes: u64) {
    assert_eq!((model.held(0), model.accounted(0)), (bytes, bytes), "held by the driver, accounted");
    assert_eq!(session.info(), (CEILING - bytes, CEILING));
}

#[test]
fn a_forked_child_neither_keeps_nor_loses_what_its_parent_has() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let block = session.must(&format!("alloc {MIB}"));
    for again in 0..3 {
        // The child frees the parent's block, allocates, initialises; the driver refuses most of it.
        session.must(&format!("fork {block} {again}"));
        session.must("vfork");
        exact(&model, &mut session, MIB);
    }
    session.must(&format!("free {block}"));
    exact(&model, &mut session, 0);
    // Before initialisation, a child is a process like any other.
    let mut fresh = model.start();
    fresh.must("fork 0 1");
    fresh.must("init 0");
    fresh.must(&format!("alloc {MIB}"));
    exact(&model, &mut session, MIB);
}

/// A worker of a data loader, say: it has copies of the driver's descriptors, through which the driver keeps what its dead
/// parent had (Megatron-LM#3684).
#[test]
fn what_a_child_keeps_of_its_dead_parent_stays_accounted() {
    let Some(model) = model() else { return };
    let (mut one, mut two) = (model.ready(), model.ready());
    one.must(&format!("alloc {}", CEILING / 4));
    let child = one.must("leave-child");
    one.kill();
    exact(&model, &mut two, CEILING / 4);
    assert_eq!(two.call("nvml-processes 0"), (0, 0, 0));
    assert_eq!(two.call(&format!("alloc {CEILING}")).0, OUT_OF_MEMORY);
    let block = two.must(&format!("alloc {}", CEILING * 3 / 4));
    assert_eq!(two.call("nvml-processes 0"), (0, 1, CEILING * 3 / 4));
    exact(&model, &mut two, CEILING);
    two.must(&format!("free {block}"));
    // SAFETY: no memory is involved.
    assert_eq!(unsafe { libc::kill(i32::try_from(child).unwrap(), libc::SIGKILL) }, 0);
    // Nobody here can wait for a grandchild.
    while two.info() != (CEILING, CEILING) {
        std::thread::yield_now();
    }
    exact(&model, &mut two, 0);
    two.must(&format!("alloc {CEILING}"));
    assert_eq!(model.passed(), 0);
}

#[test]
fn a_process_that_execs_gives_its_memory_back() {
    let Some(model) = model() else { return };
    let (mut one, mut two) = (model.ready(), model.ready());
    one.must(&format!("alloc {CEILING}"));
    assert_eq!(two.call("alloc 1").0, OUT_OF_MEMORY);
    // It turns into `cat`, which echoes.
    one.send("become");
    assert_eq!(one.call("0 0 0"), (0, 0, 0));
    assert_eq!(two.info(), (CEILING, CEILING));
}

#[test]
fn many_threads_and_many_processes_at_once() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    session.must("threads 1000 100 4096");
    exact(&model, &mut session, 0);
    let mut all: Vec<_> = (0..200).map(|_| model.start()).collect();
    all.iter_mut().for_each(|session| session.send("init 0"));
    for session in &mut all {
        // The answer to `init`, then to this.
        assert_eq!(session.call(&format!("alloc {MIB}")).0, 0);
    }
    for session in &mut all {
        assert_eq!(session.call("info").0, 0);
    }
    assert_eq!((model.held(0), model.accounted(0)), (200 * MIB, 200 * MIB));
    drop(all);
    exact(&model, &mut session, 0);
    assert_eq!(model.passed(), 0);
}

/// By every way that leads past the C library's fork: handlers that it runs are not enough, and memory that a child shares
/// with its parent is the parent's.
#[test]
fn however_a_child_is_made_it_takes_nothing_from_its_parent() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let block = session.must(&format!("alloc {MIB}"));
    for how in [
        "fork",
        "clone",
        "clone3",
        "clone-shared-files",
        "vfork",
        "clone-vm",
        "clone-vm-exit",
        "spawn",
        "thread",
    ] {
        session.must(&format!("child-by-{how} {block}"));
        exact(&model, &mut session, MIB);
        // What the child left behind, if anything, hinders nobody.
        let again = session.must(&format!("alloc {MIB}"));
        session.must(&format!("free {again}"));
        exact(&model, &mut session, MIB);
    }
    session.must(&format!("free {block}"));
    exact(&model, &mut session, 0);
}

/// HAMi-core clears the umask, takes SIGUSR1 and SIGUSR2, and starts a thread.
#[test]
fn signals_umask_environment_errno_and_threads_are_the_applications() {
    let Some(model) = model() else { return };
    let mut session = model.start();
    let (result, changed, threads) = session.call("untouched");
    assert_eq!((result, changed, threads), (0, 0, 1), "result, what was changed, threads");
    // And once more with all that is open and paced.
    assert_eq!(session.call("untouched"), (0, 0, 1));
}

/// Whichever way it ends, and whatever it still holds: nothing is done at exit, the kernel does it all.
#[test]
fn a_process_may_end_as_it_likes() {
    let Some(model) = model() else { return };
    let mut other = model.ready();
    for how in ["exit", "quick-exit", "raw-exit", "abort", "segfault", "exit-from-thread", "exit-in-handler"]
    {
        let mut session = model.ready();
        session.must(&format!("alloc {CEILING}"));
        assert_eq!(other.call("alloc 1").0, OUT_OF_MEMORY);
        session.send(&format!("end-by-{how}"));
        session.wait();
        exact(&model, &mut other, 0);
    }
}
