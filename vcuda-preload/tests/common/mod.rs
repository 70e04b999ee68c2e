//! A container in small: a mount namespace in which the shim, the driver's libraries and the share's files are in the
//! very places where the node mounts them, so the file that is shipped is the file that is tested.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::{
    env,
    fs::{self, File},
    hash::{DefaultHasher, Hasher},
    io::{BufRead, BufReader, Write},
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Output, Stdio},
    sync::OnceLock,
};

use region::{GpuLimit, Limits, Slots, Usage, UsageReader, place};
use tempfile::TempDir;

/// Where in the room libraries are looked up by name: the shim under the driver's names.
const SYSTEM: &str = "/usr/local/lib";

/// The shim: the one that `VCUDA_SHIM` names, such as a release build, or else built here. Nothing links to it, so
/// `cargo test` alone does not build it.
pub fn shim() -> PathBuf {
    static SHIM: OnceLock<PathBuf> = OnceLock::new();
    let built = || {
        let mut cargo = Command::new(env!("CARGO"));
        let status = cargo.args(["build", "--quiet", "--lib", "--package", env!("CARGO_PKG_NAME")]).status();
        assert!(status.unwrap().success(), "the shim does not build");
        // target/<profile>/deps/<this test>
        let target = env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned();
        target.join("debug/libvcuda_preload.so")
    };
    SHIM.get_or_init(|| env::var_os("VCUDA_SHIM").map_or_else(built, PathBuf::from)).clone()
}

/// The folder that `tests/fetch.sh` fills; none, and a line that says so, where it has not run.
pub fn real_parts() -> Option<PathBuf> {
    let base = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = base("VCUDA_CACHE")
        .or_else(|| base("XDG_CACHE_HOME").map(|dir| dir.join("vcuda")))
        .or_else(|| base("HOME").map(|home| home.join(".cache/vcuda")))?
        .join("real");
    if !folder.join("cudart-13/.complete").exists() {
        println!("skipped: no real driver here; run vcuda-preload/tests/fetch.sh");
        return None;
    }
    Some(folder)
}

/// Whether this machine lets us make mount namespaces; a line that says so where not.
pub fn can_mount() -> bool {
    let able = unshare().arg("true").output().is_ok_and(|output| output.status.success());
    if !able {
        println!("skipped: this user may make no mount namespace; run it as root");
    }
    able
}

fn unshare() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private"]);
    // SAFETY: no memory is involved.
    if unsafe { libc::geteuid() } != 0 {
        command.args(["--user", "--map-root-user"]);
    }
    command
}

/// The one file in `folder` whose name begins with `prefix`.
pub fn find(folder: &Path, prefix: &str) -> PathBuf {
    let mut found = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    found.find(|path| path.file_name().unwrap().to_str().unwrap().starts_with(prefix)).unwrap()
}

/// Builds a C program, or a library where `flags` say so, and returns its path.
pub fn compile(folder: &Path, name: &str, source: &Path, flags: &[&str]) -> PathBuf {
    let path = folder.join(name);
    let output = Command::new("cc")
        .args(["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&path)
        .arg(source)
        .args(flags)
        .output()
        .expect("a C compiler, which cargo needs too");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    path
}

/// Path of a source file of these tests.
pub fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/common").join(name)
}

/// A folder with an empty file for each function that a session has called by its name. The folder's own name is made of the
/// sources of the tests, so nothing is in it that is called by none of them any longer.
pub fn calls() -> &'static Path {
    static CALLS: OnceLock<PathBuf> = OnceLock::new();
    CALLS.get_or_init(|| {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
        let mut sources: Vec<_> = [tests.clone(), tests.join("common")]
            .iter()
            .flat_map(|folder| fs::read_dir(folder).unwrap())
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.is_file())
            .collect();
        sources.sort();
        let mut hasher = DefaultHasher::new();
        sources.iter().for_each(|source| hasher.write(&fs::read(source).unwrap()));
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("calls-{:016x}", hasher.finish()));
        fs::create_dir_all(&folder).unwrap();
        folder
    })
}

/// The container in small.
pub struct Room {
    pub folder: TempDir,
    cuda: PathBuf,
    nvml: PathBuf,
    preload: bool,
    share: bool,
    extra: Vec<(PathBuf, String)>,
}

impl Room {
    /// The driver's libraries are others.
    pub fn with_driver(self, cuda: &Path, nvml: &Path) -> Self {
        Self { cuda: cuda.into(), nvml: nvml.into(), ..self }
    }

    /// A room with these libraries as the driver's, and a share of the GPUs given.
    pub fn new(cuda: &Path, nvml: &Path, gpus: &[GpuLimit]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Limits::create(&folder.path().join("limits"), gpus).unwrap();
        Usage::create(&folder.path().join("usage")).unwrap();
        Self { folder, cuda: cuda.into(), nvml: nvml.into(), preload: true, share: true, extra: Vec::new() }
    }

    /// Nothing is preloaded; the shim is only where libraries are looked up.
    pub fn without_preload(mut self) -> Self {
        self.preload = false;
        self
    }

    /// The share's files are not there.
    pub fn without_share(mut self) -> Self {
        self.share = false;
        self
    }

    /// A file of the image.
    pub fn with_file(mut self, file: &Path, at: &str) -> Self {
        self.extra.push((file.into(), at.into()));
        self
    }

    pub fn limits(&self) -> PathBuf {
        self.folder.path().join("limits")
    }

    pub fn usage(&self) -> PathBuf {
        self.folder.path().join("usage")
    }

    /// A command that runs `program` in the room.
    pub fn command(&self, program: &Path) -> Command {
        // /usr/local of the host is hidden: nothing of it is needed, and nothing is left behind in it.
        let mut script = String::from(
            "set -e; mount -t tmpfs none /usr/local; \
             put() { mkdir -p \"${2%/*}\"; touch \"$2\"; mount --bind \"$1\" \"$2\"; }\n",
        );
        let mut put = |from: &Path, to: &str| script.push_str(&format!("put '{}' '{to}'\n", from.display()));
        let shim = shim();
        put(&shim, place::SHIM);
        for name in ["libcuda.so.1", "libcuda.so", "libcuda.so.550.1", "libnvidia-ml.so.1", "libnvidia-ml.so"]
        {
            put(&shim, &format!("{SYSTEM}/{name}"));
        }
        put(&self.cuda, place::REAL_CUDA);
        put(&self.nvml, place::REAL_NVML);
        if self.share {
            put(&self.limits(), place::LIMITS);
            put(&self.usage(), place::USAGE);
        }
        for (from, to) in &self.extra {
            put(from, to);
        }
        let preload = if self.preload { format!("LD_PRELOAD={}", place::SHIM) } else { String::new() };
        script.push_str(&format!(
            "mount -o remount,bind,ro '{limits}' 2>/dev/null || true; exec env LD_LIBRARY_PATH={SYSTEM} {preload} \"$@\"",
            limits = place::LIMITS
        ));
        let mut command = unshare();
        command
            .args(["sh", "-c", &script, "sh"])
            .arg(program)
            .env_remove("LD_PRELOAD")
            .env_remove("LD_LIBRARY_PATH")
            .env("SESSION_CALLS", calls())
            .env("CLIENT_CUDA", place::REAL_CUDA)
            .env("CLIENT_NVML", place::REAL_NVML)
            .env("CLIENT_SHIM", if self.preload { place::SHIM } else { "/usr/local/lib/libcuda.so.1" });
        command
    }

    /// A command that runs `program` with the driver, and no shim.
    pub fn bare_command(&self, program: &Path) -> Command {
        let mut script = String::from("set -e; mount -t tmpfs none /usr/local; mkdir -p /usr/local/lib\n");
        for (from, name) in [(&self.cuda, "libcuda.so.1"), (&self.nvml, "libnvidia-ml.so.1")] {
            let (from, to) = (from.display(), format!("{SYSTEM}/{name}"));
            script.push_str(&format!("touch {to}; mount --bind '{from}' {to}\n"));
        }
        script.push_str(&format!("exec env LD_LIBRARY_PATH={SYSTEM} \"$@\""));
        let mut command = unshare();
        command.args(["sh", "-c", &script, "sh"]).arg(program).env_remove("LD_PRELOAD");
        command
    }

    /// Runs `program` with `arguments` to its end; its standard output.
    pub fn run(&self, program: &Path, arguments: &[&str]) -> String {
        let output = self.command(program).args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs `program` with `arguments` to its end, however it ends.
    pub fn try_run(&self, program: &Path, arguments: &[&str]) -> Output {
        self.command(program).args(arguments).output().unwrap()
    }
}

// ---- sessions on the driver in small ---------------------------------------------------------------------------------

pub const MIB: u64 = 1 << 20;
/// CUDA_ERROR_OUT_OF_MEMORY.
pub const OUT_OF_MEMORY: i32 = 2;

/// Layout of `struct state` in model.c.
const GPUS: usize = 4;
const CLIENTS: usize = 512;
const CLIENT_BYTES: usize = 8 * (1 + GPUS);
const CLIENTS_USED_AT: usize = 8 * (3 * GPUS + 1);
const CLIENTS_AT: usize = CLIENTS_USED_AT + 8;
const BUSY_AT: usize = CLIENTS_AT + CLIENTS * CLIENT_BYTES + 8 * GPUS;
const SHARED_AT: usize = BUSY_AT + 8 * GPUS;
const SHARED: usize = 64;
const SHARED_BYTES: usize = 24 + CLIENTS;

/// UUID of a GPU of the driver in small.
pub fn model_uuid(gpu: u8) -> [u8; 16] {
    let mut uuid = [0; 16];
    (uuid[0], uuid[15]) = (0x67, gpu);
    uuid
}

/// A limit of a GPU of the driver in small.
pub fn limit(gpu: u8, memory_bytes: u64) -> GpuLimit {
    GpuLimit {
        uuid: model_uuid(gpu),
        memory_bytes,
        core_percent: 20,
        core_limit_percent: 20,
        own_slots: Slots::NONE,
    }
}

/// A room with the driver in small, and the program that does what it is told.
pub struct Model {
    pub room: Room,
    session: PathBuf,
    state: File,
}

/// The program, running.
pub struct Session {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Model {
    /// GPUs of `total` bytes, of which the container may use what `limits` say.
    pub fn new(total: u64, limits: &[GpuLimit]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let driver = compile(
            folder.path(),
            "model.so",
            &source("model.c"),
            &["-shared", "-fPIC", "-Wl,-Bsymbolic", "-ldl"],
        );
        let room = Room::new(&driver, &driver, limits);
        let driver_kept = room.folder.path().join("model.so");
        fs::copy(&driver, &driver_kept).unwrap();
        let room = room.with_driver(&driver_kept, &driver_kept);
        let flags = ["-Wno-strict-prototypes", "-rdynamic", "-ldl", "-lpthread", "-lm"];
        let session = compile(room.folder.path(), "session", &source("session.c"), &flags);
        let path = room.folder.path().join("state");
        let state = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        state.set_len((SHARED_AT + SHARED * SHARED_BYTES) as u64).unwrap();
        let model = Self { room, session, state };
        for (gpu, number) in (0..GPUS).zip(0..) {
            model.write(8 * gpu, total);
            let ceiling = limits.iter().find(|limit| limit.uuid == model_uuid(number));
            model.write(8 * (GPUS + gpu), ceiling.map_or(0, |limit| limit.memory_bytes));
        }
        model
    }

    /// Nanoseconds that kernels on a GPU have taken, or will have when they are done.
    pub fn busy_ns(&self, gpu: usize) -> u64 {
        self.read(BUSY_AT + 8 * gpu)
    }

    fn read(&self, at: usize) -> u64 {
        let mut word = [0; 8];
        self.state.read_exact_at(&mut word, at as u64).unwrap();
        u64::from_le_bytes(word)
    }

    fn write(&self, at: usize, value: u64) {
        self.state.write_all_at(&value.to_le_bytes(), at as u64).unwrap();
    }

    /// Bytes of a GPU that are really taken: by the living, and by the dead whose children keep them.
    pub fn held(&self, gpu: usize) -> u64 {
        let client = |n| CLIENTS_AT + n * CLIENT_BYTES;
        let kind = |of: libc::c_int| of.try_into().unwrap();
        let is_open = |n: usize| {
            // SAFETY: plain old data, for which zero is a value.
            let mut lock: libc::flock = unsafe { std::mem::zeroed() };
            (lock.l_type, lock.l_start, lock.l_len) = (kind(libc::F_WRLCK), n as i64, 1);
            // SAFETY: `lock` outlives the call.
            assert_eq!(unsafe { libc::fcntl(self.state.as_raw_fd(), libc::F_GETLK, &raw mut lock) }, 0);
            lock.l_type != kind(libc::F_UNLCK)
        };
        let own: u64 = (0..CLIENTS)
            .filter(|n| matches!(self.read(client(*n)), pid @ 1.. if pid == 1 || is_open(*n)))
            .map(|n| self.read(client(n) + 8 * (1 + gpu)))
            .sum();
        let shared = (0..SHARED).map(|n| SHARED_AT + n * SHARED_BYTES).filter(|at| {
            let mut holders = [0; CLIENTS];
            self.state.read_exact_at(&mut holders, *at as u64 + 24).unwrap();
            let is_held = holders.iter().enumerate().any(|(n, holds)| *holds == 1 && is_open(n));
            self.read(at + 8) == gpu as u64 && (self.read(at + 16) != 0 || is_held)
        });
        own + shared.map(|at| self.read(at)).sum::<u64>()
    }

    /// Has a process that is none of the container's hold memory of a GPU.
    pub fn neighbour(&self, gpu: usize, bytes: u64) {
        let client = CLIENTS_AT + (CLIENTS - 1) * CLIENT_BYTES;
        self.write(client, 1);
        self.write(CLIENTS_USED_AT, CLIENTS as u64);
        self.write(client + 8 * (1 + gpu), bytes);
        // Its memory is not the container's.
        self.write(8 * (GPUS + gpu), 0);
    }

    /// How often the ceiling was passed.
    pub fn passed(&self) -> u64 {
        self.read(8 * 3 * GPUS)
    }

    /// Most bytes of a GPU that were ever held.
    pub fn peak(&self, gpu: usize) -> u64 {
        self.read(8 * (2 * GPUS + gpu))
    }

    /// What the container's account says is in use of a GPU of the share.
    pub fn accounted(&self, gpu: usize) -> u64 {
        UsageReader::open(&self.room.usage()).unwrap().snapshot().unwrap().gpus[gpu].used_bytes
    }

    /// Refusals of a GPU of the share.
    pub fn refusals(&self, gpu: usize) -> u64 {
        UsageReader::open(&self.room.usage()).unwrap().snapshot().unwrap().gpus[gpu].refusals
    }

    /// The program, to be started in the room.
    pub fn command(&self) -> Command {
        let mut command = self.room.command(&self.session);
        command.env("MODEL_STATE", self.room.folder.path().join("state"));
        command
    }

    /// The program, to be started in the room by another one, such as a debugger.
    pub fn command_under(&self, debugger: &Path, arguments: &[&str]) -> Command {
        let mut command = self.room.command(debugger);
        command.args(arguments).arg(&self.session).env("MODEL_STATE", self.room.folder.path().join("state"));
        command
    }

    /// Starts the program.
    pub fn start(&self) -> Session {
        Session::of(&mut self.command())
    }

    /// Starts the program and initialises CUDA, with a context on device 0.
    pub fn ready(&self) -> Session {
        let mut session = self.start();
        assert_eq!(session.call("init 0").0, 0);
        session
    }
}

impl Session {
    pub fn of(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    /// Does a command: the driver's result, and up to two numbers.
    pub fn call(&mut self, command: &str) -> (i32, u64, u64) {
        self.send(command);
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        let mut numbers = line.split_whitespace();
        let mut next = || numbers.next().unwrap_or_else(|| panic!("{command}: {line:?}"));
        (next().parse().unwrap(), next().parse().unwrap(), next().parse().unwrap())
    }

    /// Does a command that must succeed, and gives its first number.
    pub fn must(&mut self, command: &str) -> u64 {
        let (result, value, _) = self.call(command);
        assert_eq!(result, 0, "{command}");
        value
    }

    pub fn send(&mut self, command: &str) {
        writeln!(self.input, "{command}").unwrap();
    }

    /// Free and total bytes, as CUDA says.
    pub fn info(&mut self) -> (u64, u64) {
        let (result, free, total) = self.call("info");
        assert_eq!(result, 0);
        (free, total)
    }

    /// The process in the room: `unshare` has turned into it.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the program has ended.
    pub fn wait(mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    /// Kills the program, and waits until it is gone.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The rows of `table/<library>.tsv`: symbol, version, action.
pub fn table(library: &str) -> Vec<(String, String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("table/{library}.tsv"));
    fs::read_to_string(path)
        .unwrap()
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let columns: Vec<_> = line.split('\t').collect();
            (columns[0].into(), columns[1].into(), (*columns.last().unwrap()).into())
        })
        .collect()
}

/// Whether a symbol with this action has a function of ours.
pub fn is_ours(action: &str) -> bool {
    matches!(action, "take" | "give" | "track" | "view" | "resolve" | "pace")
}
