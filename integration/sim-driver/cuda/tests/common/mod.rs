//! A driver root with the simulated libcuda and a running module, and parts of tests that are played by processes of their
//! own: one process has one driver.

#![allow(dead_code, reason = "each test program uses its part")]

use std::{
    ffi::{CString, c_void},
    fs,
    io::{BufRead, BufReader},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use sim_gpud::{
    config::Machine,
    daemon::{self, Daemon},
    layout::{Layout, Library},
};

pub const MIB: u64 = 1 << 20;

/// Which part of a test this process plays.
const PART: &str = "SIM_TEST_PART";
/// The driver's library.
const LIBRARY: &str = "SIM_TEST_LIBRARY";

/// A driver root and its module.
pub struct Driver {
    folder: tempfile::TempDir,
    library: PathBuf,
}

impl Driver {
    /// The driver of a machine that a file of this text describes.
    pub fn start(machine: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let machine = Machine::parse(machine).unwrap();
        let layout = Layout {
            root: folder.path(),
            machine: &machine,
            // Cargo builds the library beside its tests.
            libraries: std::env::current_exe().unwrap().parent().unwrap().to_path_buf(),
            nvidia_smi: None,
            plain_nodes: true,
        };
        let library = layout.library(Library::Cuda).unwrap();
        layout.nodes().unwrap();
        let daemon = Daemon::start(folder.path(), &machine).unwrap();
        thread::spawn(move || daemon.serve());
        Self { folder, library }
    }

    pub fn root(&self) -> &Path {
        self.folder.path()
    }

    pub fn library(&self) -> &Path {
        &self.library
    }

    pub fn node(&self, name: &str) -> PathBuf {
        self.root().join("dev").join(name)
    }

    /// What the module says of its state.
    pub fn show(&self) -> Value {
        daemon::ask(self.root(), &daemon::Command::Show).unwrap()
    }

    /// Bytes in use on a GPU.
    pub fn used(&self, gpu: usize) -> u64 {
        self.show()["gpus"][gpu]["usedBytes"].as_u64().unwrap()
    }

    /// A process that plays a part, not started yet.
    pub fn actor(&self, part: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "plays_a_part", "--nocapture"]).env(PART, part).env(LIBRARY, &self.library);
        command
    }

    /// Plays a part to its end.
    pub fn play(&self, part: &str) {
        let output = self.actor(part).output().unwrap();
        assert!(output.status.success(), "{part}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// The same, to be talked with.
    pub fn piped(&self, part: &str) -> Command {
        let mut command = self.actor(part);
        command.stdout(Stdio::piped()).stdin(Stdio::piped());
        command
    }

    /// Starts a process that plays a part, until it says "ready".
    pub fn begin(&self, part: &str) -> Actor {
        let mut actor = Actor::of(self.piped(part).spawn().unwrap());
        actor.hear("ready");
        actor
    }
}

/// A process that plays a part.
pub struct Actor {
    pub child: Child,
    lines: BufReader<ChildStdout>,
}

impl Actor {
    pub fn of(mut child: Child) -> Self {
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// Waits for a word of its, and gives the rest of the line.
    pub fn hear(&mut self, word: &str) -> String {
        read_until(&mut self.lines, word)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets it go on, until its next word.
    pub fn go_on(&mut self, word: &str) -> String {
        use std::io::Write;
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        read_until(&mut self.lines, word)
    }

    /// Kills it.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        assert_eq!(self.child.wait().unwrap().signal(), Some(9));
    }

    /// Lets it end by itself.
    pub fn end(mut self) {
        drop(self.child.stdin.take());
        succeeded("the process", self.child.wait().unwrap());
    }
}

/// The line that begins with a word; what the test harness prints around it does not matter.
fn read_until(lines: &mut BufReader<ChildStdout>, word: &str) -> String {
    let mut line = String::new();
    loop {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the process ended before {word:?}");
        if let Some(at) = line.find(word) {
            return line[at + word.len()..].trim().to_owned();
        }
    }
}

fn succeeded(part: &str, status: ExitStatus) {
    assert!(status.success(), "{part}: {status}");
}

/// In an actor: says a word, and waits to be let go on; false when it is to end.
pub fn say(word: &str) -> bool {
    println!("{word}");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap() > 0
}

/// The part that this process plays.
pub fn part() -> Option<String> {
    std::env::var(PART).ok()
}

/// Waits for something that happens soon.
pub fn eventually(what: &str, is: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Address of a function of the driver.
pub fn symbol(name: &str) -> *mut c_void {
    static HANDLE: OnceLock<usize> = OnceLock::new();
    let handle = *HANDLE.get_or_init(|| {
        let path = CString::new(std::env::var(LIBRARY).unwrap()).unwrap();
        // SAFETY: loads a library whose constructors may run anywhere.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "the library does not load");
        handle as usize
    });
    let name = CString::new(name).unwrap();
    // SAFETY: an open handle and a C string.
    let at = unsafe { libc::dlsym(handle as *mut c_void, name.as_ptr()) };
    assert!(!at.is_null(), "no {name:?}");
    at
}

/// Calls a function of the driver, and gives its status. All arguments are as wide as a register.
#[macro_export]
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {
        $crate::common::call(stringify!($name), &[$($crate::common::Word::word($argument)),*])
    };
}

/// Calls a function of the driver with up to twelve words.
pub fn call(name: &str, words: &[u64]) -> i32 {
    type Function = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) -> i32;
    let mut all = [0; 12];
    all[..words.len()].copy_from_slice(words);
    let [a, b, c, d, e, f, g, h, i, j, k, l] = all;
    // SAFETY: the test passes what the function's declaration in cuda.h asks for; the caller of a C function cleans
    // the stack up, so more words than it takes do no harm.
    unsafe {
        let function = std::mem::transmute::<*mut c_void, Function>(symbol(name));
        function(a, b, c, d, e, f, g, h, i, j, k, l)
    }
}

/// What can be an argument.
pub trait Word {
    fn word(self) -> u64;
}

macro_rules! words {
    ($($type:ty)*) => {
        $(impl Word for $type {
            fn word(self) -> u64 {
                self as u64
            }
        })*
    };
}
words! { u32 u64 usize *const c_void *mut c_void }

impl Word for i32 {
    fn word(self) -> u64 {
        i64::from(self).cast_unsigned()
    }
}

impl<T> Word for &mut T {
    fn word(self) -> u64 {
        std::ptr::from_mut(self) as u64
    }
}

impl<T> Word for &T {
    fn word(self) -> u64 {
        std::ptr::from_ref(self) as u64
    }
}

/// Asserts that a call succeeds.
#[macro_export]
macro_rules! ok {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        assert_eq!($crate::call!($name($($argument),*)), 0, stringify!($name($($argument),*)));
    }};
}

/// Initialises CUDA, and makes a context on a device.
pub fn context(device: i32) -> u64 {
    ok!(cuInit(0));
    let mut context = 0_u64;
    ok!(cuCtxCreate_v2(&mut context, 0, device));
    context
}

/// Free bytes of the current GPU.
pub fn free() -> u64 {
    let (mut free, mut total) = (0_usize, 0_usize);
    ok!(cuMemGetInfo_v2(&mut free, &mut total));
    free as u64
}

/// A file of the tests' cache of real parts, if it is there.
pub fn real(folder: &str, begins: &str) -> Option<PathBuf> {
    let home = |path: &str| std::env::var_os("HOME").map(|home| Path::new(&home).join(path));
    let cache = std::env::var_os("VCUDA_CACHE")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("XDG_CACHE_HOME").map(|cache| Path::new(&cache).join("vcuda")))
        .or_else(|| home(".cache/vcuda"))?;
    let files = fs::read_dir(cache.join("real").join(folder)).ok()?;
    let fits =
        |file: &PathBuf| file.file_name().is_some_and(|name| name.to_string_lossy().starts_with(begins));
    files.flatten().map(|file| file.path()).find(fits)
}
