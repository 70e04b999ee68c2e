//! The books of a GPU's memory, kept by many processes and threads at once, and by some that are killed in the middle of an
//! entry: never a byte too much, no refusal of what fits, everything back at the end.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use sim_gpud::{
    config::Machine,
    daemon::{self, Daemon},
    link::{Link, SOCKET},
    wire::kind,
};

/// Set for a copy of this program that plays a process with a GPU: the daemon's socket.
const PLAYS: &str = "SIM_TEST_SOCKET";

/// Memory of the GPU, in the smallest unit.
const TOTAL: u64 = 64 << 20;

struct Module {
    folder: tempfile::TempDir,
}

impl Module {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let machine = Machine::parse("version: 1\ngpus: [{count: 2, memoryMib: 64}]").unwrap();
        let daemon = Daemon::start(folder.path(), &machine).unwrap();
        thread::spawn(move || daemon.serve());
        Self { folder }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join(SOCKET)
    }

    fn link(&self) -> Link {
        connect(&self.socket())
    }

    fn process(&self) -> Child {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "plays_a_process", "--nocapture"])
            .env(PLAYS, self.socket())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("ready")), "the process ended early");
        child
    }
}

fn connect(socket: &Path) -> Link {
    Link::to(socket, PathBuf::from("/"), kind::CUDA).unwrap()
}

fn eventually(what: &str, is: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Takes and gives back as fast as it can from four threads, so that it is likely to be killed while it has a lock.
#[test]
fn plays_a_process() {
    let Some(socket) = std::env::var_os(PLAYS) else { return };
    let link = connect(Path::new(&socket));
    println!("ready");
    thread::scope(|scope| {
        for thread in 0..4 {
            let link = &link;
            scope.spawn(move || {
                for round in 0_u64.. {
                    let (gpu, bytes) = (thread % 2, 1 + round % (8 << 20));
                    if link.state.charge(link.slot, gpu, bytes) {
                        assert!(link.state.used(gpu) <= TOTAL);
                        link.state.discharge(link.slot, gpu, bytes);
                    }
                }
            });
        }
    });
}

#[test]
fn processes_killed_while_they_hold_a_lock_hold_nobody_up() {
    let module = Module::start();
    let own = module.link();
    let mut others: Vec<Child> = (0..4).map(|_| module.process()).collect();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        // Someone must always get on.
        let steady = scope.spawn(|| {
            let mut entries = 0_u64;
            while !done.load(Relaxed) {
                if own.state.charge(own.slot, 0, 4096) {
                    own.state.discharge(own.slot, 0, 4096);
                    entries += 1;
                }
            }
            entries
        });
        for round in 0..100 {
            let at = round % others.len();
            others[at].kill().unwrap();
            others[at].wait().unwrap();
            others[at] = module.process();
            // The daemon, too, must get on.
            daemon::ask(module.folder.path(), &daemon::Command::Show).unwrap();
        }
        done.store(true, Relaxed);
        assert!(steady.join().unwrap() > 0);
    });
    for other in &mut others {
        other.kill().unwrap();
        other.wait().unwrap();
    }
    for gpu in 0..2 {
        eventually("everything is back", || own.state.used(gpu) == 0);
        assert!(own.state.charge(own.slot, gpu, TOTAL), "and can be had again, to the last byte");
        assert!(!own.state.charge(own.slot, gpu, 1));
    }
}

#[test]
fn what_fits_is_never_refused() {
    let module = Module::start();
    let links: Vec<Link> = (0..8).map(|_| module.link()).collect();
    thread::scope(|scope| {
        for link in &links {
            scope.spawn(|| {
                // All eight together fit exactly.
                for _ in 0..20_000 {
                    assert!(link.state.charge(link.slot, 1, TOTAL / 8));
                    link.state.discharge(link.slot, 1, TOTAL / 8);
                }
                assert!(link.state.charge(link.slot, 1, TOTAL / 8));
            });
        }
    });
    let own = module.link();
    assert_eq!(own.state.used(1), TOTAL);
    assert!(!own.state.charge(own.slot, 1, 1));
    drop(links);
    eventually("connections that close give it back", || own.state.used(1) == 0);
}

#[test]
fn books_that_a_process_scribbled_over_are_put_right() {
    let module = Module::start();
    let (own, other) = (module.link(), module.link());
    assert!(own.state.charge(own.slot, 0, 1 << 20));
    // More is given back than was taken.
    own.state.discharge(own.slot, 0, u64::MAX);
    assert_eq!(own.state.used(0), 0);
    assert!(!own.state.charge(own.slot, 0, u64::MAX));
    assert!(other.state.charge(other.slot, 0, TOTAL));
    drop(other);
    eventually("it is given back", || own.state.used(0) == 0);
}

#[test]
fn a_second_daemon_does_not_take_the_driver_root_over() {
    let module = Module::start();
    let machine = Machine::parse("version: 1").unwrap();
    let error = Daemon::start(module.folder.path(), &machine).err().unwrap().to_string();
    assert!(error.contains("another sim-gpud"), "{error}");
    module.link();
}

#[test]
fn sockets_of_a_daemon_that_was_killed_are_taken_over() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join(SOCKET);
    fs::create_dir_all(socket.parent().unwrap()).unwrap();
    // Nobody listens any more.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let machine = Machine::parse("version: 1\ngpus: [{}]").unwrap();
    let daemon = Daemon::start(folder.path(), &machine).unwrap();
    thread::spawn(move || daemon.serve());
    assert_eq!(connect(&socket).state.gpus().len(), 1);
}

#[test]
fn commands_name_what_is_wrong_with_them() {
    let module = Module::start();
    for gpu in ["2", "GPU-00000000-0000-0000-0000-000000000000", "x"] {
        let command = daemon::Command::Lose { gpu: gpu.into() };
        let error = daemon::ask(module.folder.path(), &command).unwrap_err().to_string();
        assert!(error.contains(gpu) && error.contains("there are 2"), "{error}");
    }
}

/// Frames that no library sends.
#[test]
fn nonsense_on_the_socket_harms_nobody() {
    use rustix::net::{
        AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send,
        socket_with,
    };
    let module = Module::start();
    let own = module.link();
    assert!(own.state.charge(own.slot, 0, 4096));
    let mut random = 1_u64;
    for round in 0..300_usize {
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(module.socket()).unwrap()).unwrap();
        for _ in 0..5 {
            let mut frame = [0_u8; 64];
            for word in frame.chunks_exact_mut(8) {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                word.copy_from_slice(
                    &(random >> 33 & if random & 1 == 0 { 15 } else { u64::MAX }).to_le_bytes(),
                );
            }
            // Whole frames and parts of them, with and without a greeting first.
            let length = if round.is_multiple_of(3) { 64 } else { 1 + round % 64 };
            if send(&socket, &frame[..length], SendFlags::NOSIGNAL).is_err() {
                break;
            }
            let _ = recv(&socket, &mut [0; 64], RecvFlags::DONTWAIT);
        }
    }
    assert_eq!(own.state.used(0), 4096);
    assert_eq!(module.link().state.used(0), 4096);
}
