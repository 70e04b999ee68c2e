//! The daemon in the kernel module's place: memory runs out exactly, and comes back with the process that held it.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use sim_gpud::{Connection, SOCKET};

const MIB: u64 = 1 << 20;

/// Set for a copy of this program that plays a process with a GPU: takes so many MiB, says so, waits.
const PLAY: &str = "SIM_GPUD_TEST_TAKES_MIB";
const AT: &str = "SIM_GPUD_TEST_SOCKET";

struct Module {
    folder: tempfile::TempDir,
    daemon: Child,
}

impl Module {
    /// None where this is not root, who alone may make device nodes.
    fn start(arguments: &[&str]) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: device nodes need root");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("sim-gpud");
        fs::copy(env!("CARGO_BIN_EXE_sim-gpud"), &program).unwrap();
        for library in ["libcuda.so", "libnvidia-ml.so"] {
            fs::write(folder.path().join(library), b"stands for a library").unwrap();
        }
        let mut daemon = Command::new(program)
            .arg("--root")
            .arg(folder.path().join("root"))
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("GPU(s)"), "{line}");
        Some(Self { folder, daemon })
    }

    fn socket(&self) -> std::path::PathBuf {
        self.folder.path().join("root").join(SOCKET)
    }

    fn connect(&self) -> Connection {
        Connection::to(&self.socket()).unwrap()
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// A process of its own that holds memory until it is killed.
fn holder(socket: &Path, mib: u64) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "plays_a_process", "--nocapture"])
        .env(PLAY, mib.to_string())
        .env(AT, socket)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("HOLDS")), "the process ended early");
    child
}

#[test]
fn plays_a_process() {
    let (Ok(mib), Some(socket)) = (std::env::var(PLAY), std::env::var_os(AT)) else { return };
    let module = Connection::to(Path::new(&socket)).unwrap();
    assert!(module.state.take(module.slot, 0, mib.parse::<u64>().unwrap() * MIB));
    println!("HOLDS");
    std::io::stdout().flush().unwrap();
    thread::sleep(Duration::from_secs(60));
}

fn eventually(what: &str, is: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !is() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_killed_process_gives_its_memory_back() {
    let Some(module) = Module::start(&["--gpus", "1", "--memory-mib", "100"]) else { return };
    let own = module.connect();
    let mut others: Vec<Child> = (0..3).map(|_| holder(&module.socket(), 30)).collect();
    assert_eq!(own.state.used(0), 90 * MIB);
    assert!(!own.state.take(own.slot, 0, 11 * MIB), "90 of 100 MiB are held");
    assert!(own.state.take(own.slot, 0, 10 * MIB));
    others[1].kill().unwrap();
    others[1].wait().unwrap();
    eventually("the killed process's memory is back", || own.state.used(0) == 70 * MIB);
    let pids: Vec<i32> = own
        .state
        .clients
        .iter()
        .map(|client| client.pid.load(std::sync::atomic::Ordering::SeqCst))
        .filter(|pid| *pid != 0)
        .collect();
    assert!(pids.contains(&i32::try_from(others[0].id()).unwrap()), "processes are known by their own PIDs");
    for mut other in others {
        let _ = other.kill();
        other.wait().unwrap();
    }
    eventually("all others' memory is back", || own.state.used(0) == 10 * MIB);
}

#[test]
fn many_threads_and_connections_never_get_more_than_there_is() {
    let Some(module) = Module::start(&["--gpus", "1", "--memory-mib", "64"]) else { return };
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let own = module.connect();
                for round in 0..5_000_u64 {
                    let bytes = (1 + round % 16) * MIB;
                    if own.state.take(own.slot, 0, bytes) {
                        own.state.give(own.slot, 0, bytes);
                    }
                }
                // Sixteen MiB, held by all at once, fit four times.
                own.state.take(own.slot, 0, 16 * MIB)
            });
        }
    });
    let own = module.connect();
    eventually("every connection is closed", || own.state.used(0) == 0);
    let held: Vec<Connection> = (0..8).map(|_| module.connect()).collect();
    let got = held.iter().filter(|each| each.state.take(each.slot, 0, 16 * MIB)).count();
    assert_eq!(got, 4);
    assert_eq!(own.state.used(0), 64 * MIB);
}

#[test]
fn what_happens_to_a_gpu_is_told_to_the_running_module() {
    let Some(module) = Module::start(&["--gpus", "2"]) else { return };
    let root = module.folder.path().join("root");
    let tell = |more: &[&str]| {
        let program = env!("CARGO_BIN_EXE_sim-gpud");
        Command::new(program).arg("--root").arg(&root).args(more).output().unwrap()
    };
    assert!(tell(&["--xid", "79", "--gpu", "1", "--lose"]).status.success());
    let own = module.connect();
    let gpu = &own.state.gpus[1];
    let order = std::sync::atomic::Ordering::SeqCst;
    assert_eq!((gpu.last_xid.load(order), gpu.xids.load(order), gpu.lost.load(order)), (79, 1, 1));
    assert!(tell(&["--recover", "--gpu", "1"]).status.success());
    assert_eq!(gpu.lost.load(order), 0);
    let refused = tell(&["--xid", "79", "--gpu", "2"]);
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("GPU 2: there are 2"));
}
