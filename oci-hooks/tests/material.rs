//! `vcuda-check` on real material: Debian roots, musl, busybox, NVIDIA's libraries from their wheels, real drivers.
//! `tests/material/get` brings them into a cache outside the repository.

#![expect(clippy::unwrap_used, reason = "in a test it is an assertion")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

/// One line of the table of expected verdicts.
struct Case {
    root: String,
    pieces: Vec<String>,
    driver: Option<String>,
    program: Option<String>,
    gpus: Vec<String>,
    verdict: String,
    findings: Vec<String>,
    reason: String,
}

fn cases() -> Vec<Case> {
    let list = |text: &str| -> Vec<String> {
        if text == "-" { Vec::new() } else { text.split(',').map(str::to_owned).collect() }
    };
    let lines = include_str!("material/expected.tsv").lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let columns: Vec<&str> = line.split('\t').collect();
            let [root, pieces, driver, program, gpus, verdict, findings, reason] = columns[..] else {
                panic!("{line}: not eight columns")
            };
            Case {
                root: root.into(),
                pieces: list(pieces),
                driver: list(driver).pop(),
                program: list(program).pop(),
                gpus: list(gpus),
                verdict: verdict.into(),
                findings: list(findings),
                reason: reason.into(),
            }
        })
        .collect()
}

fn cache() -> PathBuf {
    std::env::var_os("VCUDA_MATERIAL").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache/vcuda/material"),
        PathBuf::from,
    )
}

/// A root with pieces added, as hard links beside the cache.
fn compose(cache: &Path, root: &str, pieces: &[String]) -> tempfile::TempDir {
    let sources: Vec<PathBuf> = pieces.iter().map(|piece| cache.join("wheels").join(piece)).collect();
    let root = cache.join("roots").join(root);
    let missing = sources.iter().chain([&root]).find(|source| !source.exists());
    assert!(missing.is_none(), "{missing:?} is not there; run oci-hooks/tests/material/get large");
    let composed = tempfile::tempdir_in(cache).unwrap();
    let link = |from: &Path, to: &Path| {
        let done = Command::new("cp").args(["-al", "--"]).arg(from).arg(to).status().unwrap();
        assert!(done.success(), "cp -al {}", from.display());
    };
    link(&root, &composed.path().join("root"));
    let opt = composed.path().join("root/opt");
    fs::create_dir_all(&opt).unwrap();
    for (piece, source) in pieces.iter().zip(&sources) {
        link(source, &opt.join(piece));
    }
    composed
}

fn check(args: &[&std::ffi::OsStr]) -> (Value, Option<i32>) {
    let output = Command::new(env!("CARGO_BIN_EXE_vcuda-check")).args(args).output().unwrap();
    let report = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    (report, output.status.code())
}

/// Pieces that `get` brings only when it is asked for the large ones.
const LARGE: &[&str] =
    &["numba", "cupy-12", "jax-12", "jax-pjrt-12", "nccl-12", "cublas-12", "cudnn-12", "torch", "torch-12.4"];

#[test]
#[ignore = "needs root, and tests/material/get"]
fn real_material_gets_the_verdicts_that_it_deserves() {
    judge(false);
}

#[test]
#[ignore = "large: needs root, and 5 GB of tests/material/get large"]
fn large_material_gets_the_verdicts_that_it_deserves() {
    judge(true);
}

fn judge(large: bool) {
    let cache = cache();
    let is_large = |case: &Case| case.pieces.iter().any(|piece| LARGE.contains(&piece.as_str()));
    let mut wrong = Vec::new();
    for case in cases().into_iter().filter(|case| is_large(case) == large) {
        let composed = compose(&cache, &case.root, &case.pieces);
        let root = composed.path().join("root");
        let driver = match &case.driver {
            Some(driver) => cache.join("drivers").join(driver),
            // An empty folder would be an error; a node file that names it is a node without a driver.
            None => composed.path().to_owned(),
        };
        let config = composed.path().join("config.yaml");
        fs::write(&config, format!("version: 1\npaths: {{driverRoot: {}}}\n", driver.display())).unwrap();
        let mut args: Vec<&std::ffi::OsStr> = [
            "rootfs".as_ref(),
            root.as_os_str(),
            "-o".as_ref(),
            "json".as_ref(),
            "--config".as_ref(),
            config.as_os_str(),
        ]
        .into();
        for gpu in &case.gpus {
            args.extend([std::ffi::OsStr::new("--gpu"), gpu.as_ref()]);
        }
        // Last: all that follows are arguments of the program.
        if let Some(program) = &case.program {
            args.extend([std::ffi::OsStr::new("--entry"), program.as_ref()]);
        }
        let (report, code) = check(&args);
        let mut found: Vec<&str> = report["findings"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|finding| finding["severity"] != "info")
            .map(|finding| finding["id"].as_str().unwrap())
            .collect();
        found.dedup();
        let expected_code = match case.verdict.as_str() {
            "fits" => 0,
            "does-not-fit" => 1,
            _ => 2,
        };
        if report["verdict"] != case.verdict.as_str() || found != case.findings || code != Some(expected_code)
        {
            wrong.push(format!(
                "{} + {:?}, driver {:?}: {} {found:?} exit {code:?}, expected {} {:?}: {}",
                case.root,
                case.pieces,
                case.driver,
                report["verdict"],
                case.verdict,
                case.findings,
                case.reason
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The driver's libraries below a root of it.
fn library_folder(driver: &Path) -> PathBuf {
    ["usr/lib/x86_64-linux-gnu/nvidia/current", "usr/lib/x86_64-linux-gnu"]
        .iter()
        .map(|folder| driver.join(folder))
        .find(|folder| folder.join("libcuda.so.1").exists())
        .unwrap()
}

/// What a real runtime says on a real driver, without a GPU: it compares versions before it looks for one.
fn device_count(runtime: &Path, driver: &Path) -> i32 {
    let script = format!(
        "import ctypes; n = ctypes.c_int(); print(ctypes.CDLL({:?}).cudaGetDeviceCount(ctypes.byref(n)))",
        runtime.display().to_string()
    );
    let folder = library_folder(driver);
    let output =
        Command::new("python3").args(["-c", &script]).env("LD_LIBRARY_PATH", folder).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.trim().parse().unwrap_or_else(|_| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)))
}

/// Where the check says that a driver is too old, the runtime itself says so, and nowhere else.
#[test]
#[ignore = "needs root, and tests/material/get"]
fn real_runtimes_agree_on_which_driver_is_too_old() {
    const INSUFFICIENT_DRIVER: i32 = 35;
    const NO_DEVICE: i32 = 100;
    let cache = cache();
    let runtimes = [
        ("cudart-11.8", "nvidia/cuda_runtime/lib/libcudart.so.11.0"),
        ("cudart-12.1", "nvidia/cuda_runtime/lib/libcudart.so.12"),
        ("cudart-12.9", "nvidia/cuda_runtime/lib/libcudart.so.12"),
        ("cudart-13", "nvidia/cu13/lib/libcudart.so.13"),
    ];
    for driver in ["535", "550"] {
        for (piece, library) in runtimes {
            let driver = cache.join("drivers").join(driver);
            let said = device_count(&cache.join("wheels").join(piece).join(library), &driver);
            let composed = compose(&cache, "bookworm", &[piece.to_owned()]);
            let root = composed.path().join("root");
            let mut args: Vec<&std::ffi::OsStr> = vec!["rootfs".as_ref(), root.as_os_str(), "-o".as_ref()];
            args.extend::<[&std::ffi::OsStr; 3]>(["json".as_ref(), "--driver".as_ref(), driver.as_os_str()]);
            let (report, _) = check(&args);
            let expected = if report["verdict"] == "fits" { NO_DEVICE } else { INSUFFICIENT_DRIVER };
            assert_eq!(said, expected, "{piece} on {}: {report}", driver.display());
        }
    }
}

/// For every root that passes: the shim is really loaded there, by the root's own loader. For those that are refused
/// for their C library: what would have happened.
#[test]
#[ignore = "needs root, tests/material/get, and the shim of integration/build.sh"]
fn the_shim_loads_where_the_check_says_so_and_nowhere_else() {
    let cache = cache();
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/node/lib/libvcuda_preload.so");
    let shim = std::env::var_os("VCUDA_SHIM").map_or(built, PathBuf::from);
    assert!(shim.exists(), "{} is not there; run integration/build.sh, or set VCUDA_SHIM", shim.display());
    let verdict = |root: &Path, program: &str| {
        let shim = shim.as_os_str();
        let args =
            ["rootfs".as_ref(), root.as_os_str(), "-o".as_ref(), "json".as_ref(), "--shim".as_ref(), shim];
        let started = ["--entry".as_ref(), program.as_ref()];
        check(&[&args[..], &started[..]].concat()).0["verdict"].as_str().unwrap().to_owned()
    };
    for root in ["bullseye", "bookworm", "trixie"] {
        let composed = compose(&cache, root, &[]);
        let root = composed.path().join("root");
        assert_eq!(verdict(&root, "/bin/bash"), "fits");
        fs::copy(&shim, root.join("opt/shim.so")).unwrap();
        fs::write(root.join("etc/ld.so.preload"), "/opt/shim.so\n").unwrap();
        let list = ["/lib64/ld-linux-x86-64.so.2", "--list", "/bin/bash"];
        let output = Command::new("chroot").arg(&root).args(list).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("/opt/shim.so (0x"), "{text}");
        let run = Command::new("chroot").arg(&root).args(["/bin/bash", "-c", "echo runs"]).output().unwrap();
        assert_eq!(
            (run.stdout.as_slice(), run.stderr.as_slice()),
            (&b"runs\n"[..], &b""[..]),
            "no complaint"
        );
    }

    let run = |root: &Path, program: &[&str], preload: &str| {
        let mut command = Command::new("chroot");
        command.arg(root).args(program).env("LD_PRELOAD", preload).output().unwrap()
    };
    let composed = compose(&cache, "musl", &[]);
    let root = composed.path().join("root");
    assert_eq!(verdict(&root, "/bin/hello"), "does-not-fit");
    fs::copy(&shim, root.join("opt/shim.so")).unwrap();
    assert!(run(&root, &["/bin/hello"], "").status.success());
    let died = run(&root, &["/bin/hello"], "/opt/shim.so");
    assert_eq!(died.status.code(), Some(127), "musl's loader gives up");
    assert!(String::from_utf8_lossy(&died.stderr).contains("Error relocating"), "{died:?}");

    // A static program knows no preload: it would run as if there was no shim.
    let composed = compose(&cache, "busybox", &[]);
    let root = composed.path().join("root");
    assert_eq!(verdict(&root, "/bin/sh"), "does-not-fit");
    let with_missing_preload = |root: &Path, shell: &str| {
        fs::write(root.join("etc/ld.so.preload"), "/opt/missing.so\n").unwrap();
        let ran = run(root, &[shell, "-c", "echo runs"], "");
        assert_eq!(ran.stdout, b"runs\n");
        String::from_utf8(ran.stderr).unwrap()
    };
    assert_eq!(with_missing_preload(&root, "/bin/sh"), "", "it never looked: unenforced");
    let dynamic = compose(&cache, "bookworm", &[]);
    let complaint = with_missing_preload(&dynamic.path().join("root"), "/bin/bash");
    assert!(complaint.contains("/opt/missing.so"), "one with a loader does look: {complaint}");
}
