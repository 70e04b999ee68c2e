//! A container in small: a mount namespace in which the shim, the driver's libraries and the share's files are in the
//! very places where the node mounts them, so the file that is shipped is the file that is tested.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::OnceLock,
};

use region::{GpuLimit, Limits, Usage, place};
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
            .env("CLIENT_CUDA", place::REAL_CUDA)
            .env("CLIENT_NVML", place::REAL_NVML)
            .env("CLIENT_SHIM", if self.preload { place::SHIM } else { "/usr/local/lib/libcuda.so.1" });
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
    matches!(action, "take" | "give" | "track" | "view" | "resolve")
}
