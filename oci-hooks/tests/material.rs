//! `vcuda-check` on real material: Debian roots, musl, busybox, NVIDIA's libraries from their wheels, real drivers.
//! `tests/material/get` brings them into a cache outside the repository; what is not there is skipped by name.

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
            let [root, pieces, driver, program, verdict, findings, reason] = columns[..] else {
                panic!("{line}: not seven columns")
            };
            Case {
                root: root.into(),
                pieces: list(pieces),
                driver: list(driver).pop(),
                program: list(program).pop(),
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
fn compose(cache: &Path, case: &Case) -> Option<tempfile::TempDir> {
    let sources: Vec<PathBuf> = case.pieces.iter().map(|piece| cache.join("wheels").join(piece)).collect();
    let root = cache.join("roots").join(&case.root);
    let missing = sources.iter().chain([&root]).find(|source| !source.exists());
    if let Some(missing) = missing {
        eprintln!("skipped: {} is not there; run oci-hooks/tests/material/get large", missing.display());
        return None;
    }
    let composed = tempfile::tempdir_in(cache).unwrap();
    let link = |from: &Path, to: &Path| {
        let done = Command::new("cp").args(["-al", "--"]).arg(from).arg(to).status().unwrap();
        assert!(done.success(), "cp -al {}", from.display());
    };
    link(&root, &composed.path().join("root"));
    let opt = composed.path().join("root/opt");
    fs::create_dir_all(&opt).unwrap();
    for (piece, source) in case.pieces.iter().zip(&sources) {
        link(source, &opt.join(piece));
    }
    Some(composed)
}

fn check(args: &[&std::ffi::OsStr]) -> (Value, Option<i32>) {
    let output = Command::new(env!("CARGO_BIN_EXE_vcuda-check")).args(args).output().unwrap();
    let report = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    (report, output.status.code())
}

#[test]
fn real_material_gets_the_verdicts_that_it_deserves() {
    let cache = cache();
    if !cache.is_dir() {
        eprintln!("skipped: no material in {}; run oci-hooks/tests/material/get large", cache.display());
        return;
    }
    let mut wrong = Vec::new();
    for case in cases() {
        let Some(composed) = compose(&cache, &case) else { continue };
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

/// For every root that passes: the shim is really loaded there, by the root's own loader. For the one that is refused
/// for its C library: what would have happened.
#[test]
fn the_shim_loads_where_the_check_says_so_and_nowhere_else() {
    let cache = cache();
    let Some(shim) = std::env::var_os("VCUDA_SHIM").map(PathBuf::from) else {
        eprintln!("skipped: VCUDA_SHIM names no built shim");
        return;
    };
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: chroot needs root");
        return;
    }
    let case = |root: &str| Case {
        root: root.into(),
        pieces: Vec::new(),
        driver: None,
        program: None,
        verdict: String::new(),
        findings: Vec::new(),
        reason: String::new(),
    };
    for root in ["bullseye", "bookworm", "trixie"] {
        let Some(composed) = compose(&cache, &case(root)) else { continue };
        let root = composed.path().join("root");
        let (report, _) = check(&[
            "rootfs".as_ref(),
            root.as_os_str(),
            "-o".as_ref(),
            "json".as_ref(),
            "--shim".as_ref(),
            shim.as_os_str(),
        ]);
        assert_eq!(report["verdict"], "fits", "{report}");
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
    if let Some(composed) = compose(&cache, &case("musl")) {
        let root = composed.path().join("root");
        fs::copy(&shim, root.join("opt/shim.so")).unwrap();
        let run = |preload: &str| {
            let mut command = Command::new("chroot");
            command.arg(&root).arg("/bin/hello").env("LD_PRELOAD", preload).output().unwrap()
        };
        assert!(run("").status.success());
        let died = run("/opt/shim.so");
        assert_eq!(died.status.code(), Some(127), "musl's loader gives up");
        assert!(String::from_utf8_lossy(&died.stderr).contains("Error relocating"), "{died:?}");
    }
}
