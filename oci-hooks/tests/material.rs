//! `vcuda-check` on real material: Debian roots, musl, busybox, NVIDIA's libraries from their wheels, real drivers.
//! `tests/material/get` brings them into a cache outside the repository.

#![expect(clippy::unwrap_used, reason = "in a test it is an assertion")]

use std::{ffi::OsStr, fs, path::Path, process::Command};

#[path = "material/table.rs"]
mod table;

use table::{RUNTIMES, cases, check, compose, library_folder, material};

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
    let cache = material();
    let mut wrong = Vec::new();
    for case in cases().into_iter().filter(|case| case.is_large() == large) {
        let composed = compose(&cache, &case.root, &case.pieces);
        let root = composed.path().join("root");
        let driver = match &case.driver {
            Some(driver) => cache.join("drivers").join(driver),
            // An empty folder would be an error; a node file that names it is a node without a driver.
            None => composed.path().to_owned(),
        };
        let config = composed.path().join("config.yaml");
        fs::write(&config, format!("version: 1\npaths: {{driverRoot: {}}}\n", driver.display())).unwrap();
        let mut args: Vec<&OsStr> = [
            "rootfs".as_ref(),
            root.as_os_str(),
            "-o".as_ref(),
            "json".as_ref(),
            "--config".as_ref(),
            config.as_os_str(),
        ]
        .into();
        for gpu in &case.gpus {
            args.extend([OsStr::new("--gpu"), gpu.as_ref()]);
        }
        // Last: all that follows are arguments of the program.
        if let Some(program) = &case.program {
            args.extend([OsStr::new("--entry"), program.as_ref()]);
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
    let cache = material();
    for driver in ["535", "550"] {
        for (piece, library) in RUNTIMES {
            let driver = cache.join("drivers").join(driver);
            let said = device_count(&cache.join("wheels").join(piece).join(library), &driver);
            let composed = compose(&cache, "bookworm", &[piece.to_owned()]);
            let root = composed.path().join("root");
            let mut args: Vec<&OsStr> = vec!["rootfs".as_ref(), root.as_os_str(), "-o".as_ref()];
            args.extend::<[&OsStr; 3]>(["json".as_ref(), "--driver".as_ref(), driver.as_os_str()]);
            let (report, _) = check(&args);
            let expected = if report["verdict"] == "fits" { NO_DEVICE } else { INSUFFICIENT_DRIVER };
            assert_eq!(said, expected, "{piece} on {}: {report}", driver.display());
        }
    }
}
