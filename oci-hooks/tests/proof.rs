//! Proof in both directions of the table of expected verdicts: in every root that passes, the root's own loader loads the
//! shim and the shim holds the ceiling, and the CUDA runtimes in it take the driver; for every root that is refused it
//! is shown what would have happened. What cannot be shown without a GPU is said, and counted.
//!
//! A root is put together as `material.rs` does it, and its containers as a node does (`material/container.sh`): shim in
//! the driver's place and in `/etc/ld.so.preload`, the share's files, the driver behind it. Memory is asked of the driver in
//! small of the shim's tests, since a real one gives none without a GPU; runtimes are asked on the real drivers.

#![expect(clippy::unwrap_used, reason = "in a test it is an assertion")]

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use region::{GpuLimit, Limits, Slots, Usage, place};

#[path = "material/table.rs"]
mod table;

use table::{Case, RUNTIMES, cache, cases, compose, library_folder, material, shim};

/// The driver's folder in a container: one that no loader looks into by itself.
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu/nvidia/current";

/// Memory of the simulated GPU, of the share, and of the two blocks that are asked for: each fits, both do not.
const GPU_BYTES: u64 = 1 << 30;
const CEILING: u64 = 256 << 20;
const WITHIN: u64 = 96 << 20;
const PAST: u64 = 192 << 20;

/// CUDA's errors.
const OUT_OF_MEMORY: i32 = 2;
const INSUFFICIENT_DRIVER: i32 = 35;
const NO_DEVICE: i32 = 100;

/// The exit codes of `chroot` and of loaders where a program cannot be started.
const NOT_STARTED: i32 = 127;

/// Longest that a program may take until it waits for its input.
const PATIENCE: Duration = Duration::from_secs(30);

/// What all containers share: programs for old C libraries, and the driver in small.
struct Tools {
    folder: tempfile::TempDir,
    shim: PathBuf,
    material: PathBuf,
}

impl Tools {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let this = Self { folder, shim: shim(), material: material() };
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        fs::create_dir(this.at("proof")).unwrap();
        this.compile("proof/asks", &package.join("tests/material/asks.c"), &[]);
        let model = package.join("../vcuda-preload/tests/common/model.c");
        this.compile("libcuda.so.550.1", &model, &["-shared", "-fPIC", "-Wl,-Bsymbolic"]);
        // The first words of its state are the bytes of each GPU; no ceiling of its own: the shim's is what is tested.
        let mut state = vec![0; 1 << 20];
        state[..8].copy_from_slice(&GPU_BYTES.to_le_bytes());
        fs::write(this.at("proof/state"), state).unwrap();
        let mut uuid = [0; 16];
        uuid[0] = 0x67;
        let own_slots = Slots::first(20);
        let limit =
            GpuLimit { uuid, memory_bytes: CEILING, core_percent: 20, core_limit_percent: 20, own_slots };
        Limits::create(&this.at("limits"), &[limit]).unwrap();
        fs::write(this.at("preload"), format!("{}\n", place::SHIM)).unwrap();
        fs::write(this.at("preload-missing"), "/opt/missing.so\n").unwrap();
        this
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Builds for glibc 2.17, with the compiler that `integration/setup.sh` brings.
    fn compile(&self, name: &str, source: &Path, flags: &[&str]) {
        let python = cache().join("venv/bin/python");
        assert!(python.exists(), "{} is not there; run integration/setup.sh", python.display());
        let output = Command::new(python)
            .args(["-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.17", "-O2", "-o"])
            .arg(self.at(name))
            .arg(source)
            .args(flags)
            .args(["-ldl", "-lpthread"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// How a container is made.
#[derive(Clone, Copy)]
struct Container<'a> {
    tools: &'a Tools,
    root: &'a Path,
    /// A real driver; otherwise the one in small.
    driver: Option<&'a str>,
    shim: bool,
    preload: &'static str,
    /// `LD_PRELOAD` names the shim, as the NRI plugin has it.
    variable: bool,
    user: &'static str,
}

impl<'a> Container<'a> {
    fn new(tools: &'a Tools, root: &'a Path) -> Self {
        Self { tools, root, driver: None, shim: true, preload: "preload", variable: true, user: "" }
    }

    fn command(&self, program: &[&str]) -> (tempfile::TempDir, Command) {
        let tools = self.tools;
        let work = tempfile::tempdir().unwrap();
        let (room, usage) = (work.path().join("room"), work.path().join("usage"));
        fs::create_dir(&room).unwrap();
        Usage::create(&usage).unwrap();
        let (cuda, nvml) = match self.driver {
            None => (tools.at("libcuda.so.550.1"), tools.at("libcuda.so.550.1")),
            Some(driver) => {
                let folder = library_folder(&tools.material.join("drivers").join(driver));
                let real = |name: &str| fs::canonicalize(folder.join(name)).unwrap();
                (real("libcuda.so.1"), real("libnvidia-ml.so.1"))
            }
        };
        let mut command = Command::new("unshare");
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/material/container.sh");
        command
            .args(["--mount", "--propagation", "private", "bash", script])
            .args(program)
            .env("WORK", room)
            .env("ROOT", self.root)
            .env("TOOLS", tools.at("proof"))
            .env("HOOK", env!("CARGO_BIN_EXE_vcuda-hook"))
            .env("LIBRARIES", LIBRARIES)
            .env("CUDA", cuda)
            .env("NVML", nvml)
            .env("SHIM", if self.shim { tools.shim.as_path() } else { Path::new("") })
            .env("LIMITS", tools.at("limits"))
            .env("USAGE", usage)
            .env("PRELOAD", tools.at(self.preload))
            .env("AT_SHIM", place::SHIM)
            .env("AT_CUDA", place::REAL_CUDA)
            .env("AT_NVML", place::REAL_NVML)
            .env("AT_LIMITS", place::LIMITS)
            .env("AT_USAGE", place::USAGE)
            .env("AS", self.user);
        let variable = self.variable && self.shim;
        command
            .env("ENVIRONMENT", if variable { format!("LD_PRELOAD={}", place::SHIM) } else { String::new() });
        (work, command)
    }
}

impl Container<'_> {
    /// Runs a program to its end.
    fn run(&self, program: &[&str]) -> Said {
        let (_work, mut command) = self.command(program);
        let Output { status, stdout, stderr } = command.stdin(Stdio::null()).output().unwrap();
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        Said { code: status.code(), out: text(&stdout), err: text(&stderr) }
    }

    /// The answers to requests for memory, made by a program that `through` starts.
    fn asks_for_memory(&self, through: &[&str]) -> Said {
        let (within, past) = (WITHIN.to_string(), PAST.to_string());
        let asks = ["/proof/asks", "memory", &within, &past];
        self.run(&[through, &asks].concat())
    }

    /// What a CUDA runtime in the root says: 0, or one of CUDA's errors.
    fn asks_runtime(&self, file: &str) -> Result<i32, String> {
        let said = self.run(&["/proof/asks", "runtime", file]);
        said.out.trim().parse().map_err(|_| format!("{file}: {said:?}"))
    }
}

/// How a program ended, and what it wrote.
#[derive(Debug)]
struct Said {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Said {
    fn value(&self, name: &str) -> Option<&str> {
        self.out.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
    }
}

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}

/// What was shown of a row, and what of it could not be.
#[derive(Default)]
struct Shown {
    runtimes: usize,
    left_open: Vec<String>,
}

/// The shim is loaded and holds the ceiling, for what is started and for what it starts; the runtimes take the driver.
fn fits(tools: &Tools, root: &Path, case: &Case) -> Result<Shown, String> {
    let container = Container::new(tools, root);
    let mut shown = Shown::default();
    let program = case.program.as_deref().unwrap_or("/bin/bash");
    let mut through = Vec::new();
    let script = format!("[[ $(</proc/self/maps) == *{}* ]] && echo loaded; exec \"$@\"", place::SHIM);
    match program {
        "/bin/bash" => through = vec![program, "-c", &script, "bash"],
        "/bin/su" => setuid_is_loaded(&container, program)?,
        "/sbin/ldconfig" => static_has_no_shim(&container, &[program, "--version"])?,
        "/bin/nothing" => {
            let said = container.run(&[program]);
            ensure(said.code == Some(NOT_STARTED), || format!("{program} is started: {said:?}"))?;
        }
        // A program with a CUDA runtime inside, asked below.
        "/opt/static-12.9/app" => {}
        other => return Err(format!("{other}: no proof is known for it")),
    }
    let said = container.asks_for_memory(&through);
    let number = |name| said.value(name).and_then(|value| value.parse::<i64>().ok());
    let answers = said.value("answers").unwrap_or_default();
    let ours = answers == place::SHIM || answers.starts_with(LIBRARIES);
    let holds =
        [number("within"), number("past"), number("again")] == [Some(0), Some(OUT_OF_MEMORY.into()), Some(0)];
    ensure(through.is_empty() || said.out.starts_with("loaded\n"), || {
        format!("no shim in {program}: {said:?}")
    })?;
    ensure(ours && holds && number("total") == i64::try_from(CEILING).ok(), || {
        format!("the shim does not hold: {said:?}")
    })?;
    ensure(said.err.is_empty(), || format!("it complains: {said:?}"))?;

    let answers = runtimes(&container, case, &mut shown)?;
    let takes = |answer: &i32| *answer == NO_DEVICE;
    let too_old = |answer: &i32| *answer == INSUFFICIENT_DRIVER;
    if case.findings.iter().any(|id| id == "cuda-runtime-too-new") {
        ensure(answers.iter().any(takes) && answers.iter().any(too_old), || {
            format!("of its runtimes some take the driver, some do not: {answers:?}")
        })?;
    } else {
        ensure(answers.iter().all(takes), || format!("a runtime does not take the driver: {answers:?}"))?;
    }
    shown.runtimes = answers.len();
    if !case.gpus.is_empty() {
        shown.left_open.push(format!("kernels for {}: no GPU here", case.gpus.join(" and ")));
    }
    Ok(shown)
}

/// What would have happened, by kind of finding.
fn does_not_fit(tools: &Tools, root: &Path, case: &Case) -> Result<Shown, String> {
    let container = Container::new(tools, root);
    let mut shown = Shown::default();
    let program = case.program.as_deref().unwrap_or_default();
    for finding in &case.findings {
        match finding.as_str() {
            // Nothing that is dynamic starts at all: there is no loader.
            "libc-none" => {
                let said = container.asks_for_memory(&[]);
                let refused =
                    said.code == Some(NOT_STARTED) && said.err.contains("No such file or directory");
                ensure(refused, || format!("it starts without a C library: {said:?}"))?;
            }
            "entry-static" => static_has_no_shim(&container, &[program, "-c", "echo runs"])?,
            "libc-musl" => musl(&container, program)?,
            "cuda-driver-too-old" => {
                let answers = runtimes(&container, case, &mut shown)?;
                let all = !answers.is_empty() && answers.iter().all(|answer| *answer == INSUFFICIENT_DRIVER);
                ensure(all, || format!("a runtime takes the driver: {answers:?}"))?;
                shown.runtimes = answers.len();
            }
            other => return Err(format!("{other}: no proof is known for it")),
        }
    }
    ensure(!case.findings.is_empty(), || "refused for nothing".into())?;
    Ok(shown)
}

/// A static program starts, and has never looked for the shim: it would run unenforced.
fn static_has_no_shim(container: &Container<'_>, program: &[&str]) -> Result<(), String> {
    let missing = Container { preload: "preload-missing", variable: false, ..*container };
    let said = missing.run(program);
    ensure(said.code == Some(0) && !said.out.is_empty() && said.err.is_empty(), || {
        format!("it looks for what is preloaded: {said:?}")
    })?;
    // The same would be seen of one that looks.
    if container.root.join("bin/bash").exists() {
        let said = missing.run(&["/bin/bash", "-c", "echo runs"]);
        ensure(said.err.contains("/opt/missing.so"), || format!("bash does not look: {said:?}"))?;
    }
    Ok(())
}

/// musl's loader dies of the shim where a variable names it, and never looks where none does.
fn musl(container: &Container<'_>, program: &str) -> Result<(), String> {
    let said = container.run(&[program]);
    let dies = said.code == Some(NOT_STARTED) && said.err.contains("Error relocating");
    ensure(dies && said.err.contains(place::SHIM), || format!("musl loads the shim: {said:?}"))?;
    let unnamed = Container { variable: false, ..*container };
    let said = unnamed.run(&[program]);
    ensure(said.code == Some(0) && said.err.is_empty(), || format!("{program}: {said:?}"))?;
    let listed = unnamed.run(&["/lib/ld-musl-x86_64.so.1", "--list", program]);
    ensure(listed.code == Some(0) && !listed.out.contains("vcuda"), || {
        format!("musl loads the shim: {listed:?}")
    })
}

/// Started by somebody else than its owner, its loader ignores `LD_PRELOAD`; the shim is in it all the same.
fn setuid_is_loaded(container: &Container<'_>, program: &str) -> Result<(), String> {
    let (_work, mut command) = Container { user: "65534:65534", ..*container }.command(&[program]);
    // It waits for a password.
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let of = |child: &Child, file: &str| fs::read_to_string(format!("/proc/{}/{file}", child.id()));
    let start = Instant::now();
    let mut loaded = false;
    while !loaded && start.elapsed() < PATIENCE && child.try_wait().unwrap().is_none() {
        thread::sleep(Duration::from_millis(5));
        let status = of(&child, "status").unwrap_or_default();
        let setuid = status.lines().any(|line| line.starts_with("Uid:\t65534\t0\t"));
        loaded = setuid && of(&child, "maps").is_ok_and(|maps| maps.contains(place::SHIM));
    }
    let _ = child.kill();
    let status = child.wait().unwrap();
    ensure(loaded, || format!("{program}: the shim is not in it; it ended with {status}"))
}

/// What each runtime in the pieces of a row says on the row's real driver.
fn runtimes(container: &Container<'_>, case: &Case, shown: &mut Shown) -> Result<Vec<i32>, String> {
    let Some(driver) = &case.driver else { return Ok(Vec::new()) };
    let container = Container { driver: Some(driver), ..*container };
    let mut answers = Vec::new();
    for piece in &case.pieces {
        match piece.as_str() {
            "static-12.9" => {
                let said = container.run(&["/opt/static-12.9/app"]);
                answers.push(said.code.filter(|_| said.err.is_empty()).ok_or(format!("{said:?}"))?);
            }
            // They need a runtime and bring none; the check goes by what they need.
            "torch" => answers.push(needed(&container, piece, "cudart-13")?),
            "torch-12.4" => answers.push(needed(&container, piece, "cudart-12.9")?),
            // No runtime is in them.
            "stub" | "numba" | "jax-12" => {}
            "nccl-12" => answers.push(nccl(&container)?),
            // All that they say is that they cannot begin, whatever the reason.
            "cublas-12" | "cudnn-12" | "jax-pjrt-12" | "cupy-12" => {
                shown.left_open.push(format!("{piece}: its runtime is linked in, and says nothing itself"));
            }
            other => {
                let file = RUNTIMES.iter().find(|(piece, _)| *piece == other).map(|(_, file)| file);
                let file = file.ok_or_else(|| format!("{other}: no proof is known for it"))?;
                answers.push(container.asks_runtime(&format!("/opt/{other}/{file}"))?);
            }
        }
    }
    Ok(answers)
}

/// What the runtime in NCCL says: it is linked in, and NCCL tells its error by its text.
fn nccl(container: &Container<'_>) -> Result<i32, String> {
    let said = container.run(&["/proof/asks", "nccl", "/opt/nccl-12/nvidia/nccl/lib/libnccl.so.2"]);
    let line = said.out.lines().rfind(|line| line.contains("(ncclCommInitAll) NCCL WARN Cuda failure"));
    match line {
        Some(line) if line.contains("'no CUDA-capable device is detected'") => Ok(NO_DEVICE),
        Some(line) if line.contains("'CUDA driver version is insufficient") => Ok(INSUFFICIENT_DRIVER),
        _ => Err(format!("NCCL: {said:?}")),
    }
}

/// The answer of the runtime that a PyTorch needs and does not bring.
fn needed(container: &Container<'_>, torch: &str, piece: &str) -> Result<i32, String> {
    let file = RUNTIMES.iter().find(|(other, _)| *other == piece).map(|(_, file)| Path::new(file)).unwrap();
    let name = file.file_name().unwrap().to_str().unwrap();
    let library = format!("/opt/{torch}/torch/lib/libtorch_cuda.so");
    let listed = container.run(&["/lib64/ld-linux-x86-64.so.2", "--list", &library]);
    let needs = format!("error while loading shared libraries: {name}: cannot open shared object file");
    ensure(listed.err.contains(&needs), || format!("{library} does not need {name}: {listed:?}"))?;
    // TOOLS is one folder for all: the runtime is put there once.
    let put = container.tools.at("proof").join(name);
    if !put.exists() {
        fs::copy(container.tools.material.join("wheels").join(piece).join(file), &put).unwrap();
    }
    container.asks_runtime(&format!("/proof/{name}"))
}

#[test]
#[ignore = "needs root, tests/material/get, integration/setup.sh, and the shim of integration/build.sh"]
fn every_verdict_is_what_would_happen() {
    let tools = Tools::new();
    let mut roots: BTreeMap<(String, Vec<String>), Vec<Case>> = BTreeMap::new();
    for case in cases() {
        roots.entry((case.root.clone(), case.pieces.clone())).or_default().push(case);
    }
    let mut wrong = Vec::new();
    let mut left_open = Vec::new();
    let [mut fit, mut refused, mut open, mut missing, mut asked] = [0; 5];
    for ((root, pieces), cases) in roots {
        let is_there = |piece: &String| tools.material.join("wheels").join(piece).exists();
        if cases[0].is_large() && !pieces.iter().all(is_there) {
            missing += cases.len();
            continue;
        }
        let composed = compose(&tools.material, &root, &pieces);
        let root = composed.path().join("root");
        for case in &cases {
            let name =
                format!("{} + {:?}, driver {:?}, {:?}", case.root, case.pieces, case.driver, case.program);
            let shown = match case.verdict.as_str() {
                "fits" => fits(&tools, &root, case).inspect(|_| fit += 1),
                "does-not-fit" => does_not_fit(&tools, &root, case).inspect(|_| refused += 1),
                _ => {
                    open += 1;
                    continue;
                }
            };
            match shown {
                Ok(shown) => {
                    asked += shown.runtimes;
                    if !shown.left_open.is_empty() {
                        left_open.push(format!("{name}: {}", shown.left_open.join("; ")));
                    }
                }
                Err(what) => {
                    wrong.push(format!("{name}: {what}; expected {}: {}", case.verdict, case.reason))
                }
            }
        }
    }
    // Not by the macros: what a passing test says by them is hidden.
    let _ = writeln!(
        io::stderr(),
        "proof: {fit} rows fit, the shim is loaded and holds; {refused} do not, what would have happened was seen; \
         {asked} runtimes asked; {open} rows claim nothing; of {missing} the material is not here; in {} rows a part \
         cannot be shown without a GPU (--nocapture lists them)",
        left_open.len()
    );
    println!("not shown:\n{}", left_open.join("\n"));
    assert!(fit > 0 && refused > 0, "nothing was proven");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The same requests without the shim: what the proof would miss if it could not fail.
#[test]
#[ignore = "needs root, tests/material/get, integration/setup.sh, and the shim of integration/build.sh"]
fn without_the_shim_the_ceiling_is_passed() {
    let tools = Tools::new();
    let composed = compose(&tools.material, "bookworm", &[]);
    let root = composed.path().join("root");
    let said = Container { shim: false, ..Container::new(&tools, &root) }.asks_for_memory(&[]);
    let expected =
        format!("answers {LIBRARIES}/libcuda.so.1\ntotal {GPU_BYTES}\nwithin 0\npast 0\nagain 0\n");
    assert_eq!((said.out.as_str(), said.err.as_str()), (expected.as_str(), ""), "{said:?}");
}
