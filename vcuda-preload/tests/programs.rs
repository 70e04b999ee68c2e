//! CUDA programs as they come from PyPI, unmodified, under the shim, on the simulated driver. `tests/fetch.sh programs`
//! brings them. Also what the driver in small of the other tests and the simulated one must agree on.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

mod common;

use std::{
    env,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use common::{MIB, Room, Session, can_mount, compile, find, limit, real_parts, source};
use region::{GpuLimit, Slots, UsageReader};

const CEILING: u64 = 1024 * MIB;

/// The simulated driver, running.
struct Driver {
    root: tempfile::TempDir,
    daemon: Child,
}

impl Driver {
    fn start() -> Self {
        Self::of_version("550.163.01")
    }

    /// With one GPU.
    fn of_version(version: &str) -> Self {
        let mut cargo = Command::new(env!("CARGO"));
        let status =
            cargo.args(["build", "--quiet", "-p", "sim-gpud", "-p", "sim-cuda", "-p", "sim-nvml"]).status();
        assert!(status.unwrap().success(), "the simulated driver does not build");
        let built = env::current_exe().unwrap().ancestors().nth(3).unwrap().join("debug");
        let root = tempfile::tempdir().unwrap();
        let mut command = Command::new(built.join("sim-gpud"));
        command
            .arg("--root")
            .arg(root.path())
            .args(["--driver-version", version, "--gpus", "1", "--plain-nodes", "--libraries"])
            .arg(&built);
        let mut daemon = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // It serves once it has said what.
        let mut line = String::new();
        BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("1 GPU"), "{line}");
        Self { root, daemon }
    }

    fn library(&self, name: &str) -> PathBuf {
        find(&self.root.path().join("usr/lib/x86_64-linux-gnu"), &format!("{name}.so.5"))
    }

    /// A container that has its GPU.
    fn room(&self) -> Room {
        // The first GPU, as `sim-gpud ctl show` tells.
        let uuid = *b"SIMUgpu\0\0\0\0\0\0\0\0\0";
        let gpu = GpuLimit {
            uuid,
            core_percent: 100,
            core_limit_percent: 100,
            own_slots: Slots::ALL,
            ..limit(0, CEILING)
        };
        Room::new(&self.library("libcuda"), &self.library("libnvidia-ml"), &[gpu])
    }

    /// Has a process in the container find it.
    fn for_process<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env("VCUDA_SIM_SOCKET", self.root.path().join("run/nvidia-persistenced/socket"))
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// What a program says, without the shim and with it; and the launches that the container was counted.
fn both(program: &str) -> Option<(String, String, u64)> {
    let python = real_parts().filter(|_| can_mount())?.join("programs/bin/python");
    if !python.exists() {
        println!("skipped: no CUDA programs here; run vcuda-preload/tests/fetch.sh programs");
        return None;
    }
    let driver = Driver::start();
    let room = driver.room();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(program);
    let said = |mut command: Command| {
        let command = driver.for_process(command.arg(&script));
        let output = command.env("PYTHONDONTWRITEBYTECODE", "1").output().unwrap();
        assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let (bare, shim) = (said(room.bare_command(&python)), said(room.command(&python)));
    println!("{program} without the shim:\n{bare}with it:\n{shim}");
    let usage = UsageReader::open(&room.usage()).unwrap().snapshot().unwrap();
    Some((bare, shim, usage.launches))
}

/// It sees its share's memory, is refused what is beyond it, and does all else as without.
fn runs_in_its_share(program: &str, launches: u64) {
    let Some((bare, shim, counted)) = both(program) else { return };
    let (total, rest) = shim.split_once('\n').unwrap();
    assert_eq!(total, format!("total {}", CEILING / MIB));
    assert_eq!(rest, "used by 64 MiB 64\ncopied True\ntoo much CUDA_ERROR_OUT_OF_MEMORY\nlaunched\n");
    let (total, bare_rest) = bare.split_once('\n').unwrap();
    assert_ne!(total, format!("total {}", CEILING / MIB));
    assert_eq!(bare_rest, rest);
    assert_eq!(counted, launches);
}

#[test]
fn nvidias_bindings_run_in_their_share() {
    // One of them is captured, and ten are of its graph.
    runs_in_its_share("with_bindings.py", 111);
}

#[test]
fn numba_compiles_and_launches_in_its_share() {
    runs_in_its_share("with_numba.py", 100);
}

/// CuPy, like JAX and PyTorch, has NVIDIA's runtime, which wants a genuine driver: on a simulated one it says the same with
/// the shim and without it.
#[test]
fn a_program_that_wants_a_genuine_driver_ends_as_without_the_shim() {
    if let Some((bare, shim, _)) = both("with_cupy.py") {
        assert_eq!(bare, shim);
        assert!(shim.contains("devices CUDARuntimeError"), "{shim}");
    }
}

/// Whatever such a pool prefers, the program's own and those that are there without one: any kernel may draw its memory to the GPU.
#[test]
fn managed_pools_of_a_driver_that_keeps_them_in_host_memory_count_in_full() {
    const OUT_OF_MEMORY: i32 = 2;
    let (pinned, managed) = (1, 2);
    if !can_mount() {
        return;
    }
    let driver = Driver::of_version("580.82.07");
    let room = driver.room();
    let flags = ["-Wno-strict-prototypes", "-rdynamic", "-ldl", "-lpthread", "-lm"];
    let program = compile(room.folder.path(), "session", &source("session.c"), &flags);
    let mut session = Session::of(driver.for_process(&mut room.command(&program)));
    session.must("init 0");
    let used = |session: &mut Session| {
        let (result, free, total) = session.call("info");
        assert_eq!((result, total), (0, CEILING));
        total - free
    };
    let before = used(&mut session);
    // Nothing, the GPU, the host, a node of the host.
    let places = (0..4).flat_map(|place| [(place, true), (place, false)]);
    for (place, own) in places {
        let make =
            if own { format!("managed-pool {place} 0") } else { format!("default-pool {managed} {place}") };
        let pool = session.must(&make);
        assert_eq!(used(&mut session), before);
        let block = session.must(&format!("from-pool {} {pool}", 600 * MIB));
        assert_eq!(used(&mut session), before + 600 * MIB, "{make}");
        assert_eq!(session.call(&format!("from-pool {} {pool}", 500 * MIB)).0, OUT_OF_MEMORY);
        assert_eq!(session.call(&format!("alloc {}", 500 * MIB)).0, OUT_OF_MEMORY);
        session.must(&format!("free-async {block}"));
        session.must("wait");
        assert_eq!(used(&mut session), before);
        if own {
            session.must(&format!("free-pool {pool}"));
        }
    }
    // Of what is pinned, the GPU's counts and the host's does not.
    let (gpu, host) = (1, 2);
    let pool = session.must(&format!("default-pool {pinned} {gpu}"));
    assert_eq!(session.call(&format!("from-pool {} {pool}", 2 * CEILING)).0, OUT_OF_MEMORY);
    let pool = session.must(&format!("default-pool {pinned} {host}"));
    session.must(&format!("from-pool {} {pool}", 2 * CEILING));
    assert_eq!(used(&mut session), before);
}
