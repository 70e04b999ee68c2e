//! `vcuda-check` as people and pipelines call it: what each command prints as text and as JSON, and its exit codes.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "an assertion, in a test")]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use oci_hooks::verdicts::{self, Looked};
use serde_json::Value;

/// A node without anything on it, and images beside it.
struct Place(tempfile::TempDir);

/// A clock that goes on by three seconds whenever somebody looks at it.
const CLOCK: &str = "#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *at) {
    static time_t now = 1000;
    at->tv_sec = now += 3, at->tv_nsec = 0;
    return (void)clock, 0;
}
";

/// How it ended, and what it printed on standard output and standard error.
type Answer = (Option<i32>, String, String);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        let at = place.0.path().display();
        let config = format!(
            "version: 1\npaths: {{driverRoot: {at}/driver, state: {at}/state, cdi: {at}/cdi, install: {at}/install, \
             kubelet: {at}/kubelet, nriSocket: {at}/nri.sock, run: {at}/run}}\n"
        );
        fs::write(place.at("config.yaml"), config).unwrap();
        place
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn text(&self, path: &str) -> String {
        self.at(path).display().to_string()
    }

    fn write(&self, path: &str, bytes: &[u8]) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn check(&self, args: &[&str]) -> Answer {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vcuda-check"));
        // All that follows `--entry` is the program's.
        command.args(&args[..1]).arg("--config").arg(self.at("config.yaml")).args(&args[1..]);
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    /// The same as JSON.
    fn json(&self, args: &[&str]) -> (Option<i32>, Value) {
        let (code, out, error) = self.check(&[&args[..1], &["-o", "json"], &args[1..]].concat());
        (code, serde_json::from_str(&out).unwrap_or_else(|_| panic!("{args:?}: {out}{error}")))
    }

    /// The C library and the shell of the machine that the tests run on: what fits, and what is none of ours.
    fn with_glibc(self) -> Self {
        for file in ["lib/x86_64-linux-gnu/libc.so.6", "lib64/ld-linux-x86-64.so.2", "bin/sh"] {
            self.write(&format!("fits/{file}"), &fs::read(Path::new("/").join(file)).unwrap());
        }
        self
    }
}

#[test]
fn an_image_fits_does_not_or_is_left_open_and_the_exit_code_says_which() {
    let place = Place::new().with_glibc();
    let fits = place.text("fits");
    let (code, report) = place.json(&["rootfs", &fits]);
    assert_eq!((code, &report["verdict"]), (Some(0), &"fits".into()), "{report}");

    fs::create_dir_all(place.at("none")).unwrap();
    let (code, report) = place.json(&["rootfs", &place.text("none")]);
    assert_eq!((code, &report["verdict"]), (Some(1), &"does-not-fit".into()), "{report}");

    // What cannot be looked at at all is one sentence on standard error, and no report.
    for (what, file, said) in [
        ("rootfs", "gone", "No such file"),
        ("image", "gone.tar", "No such file"),
        ("image", "config.yaml", "config.yaml"),
        ("image", "fits", "is a folder; check an unpacked image with `vcuda-check rootfs`"),
        ("container", "c0ffee", "c0ffee"),
    ] {
        let file = if what == "container" { file.to_owned() } else { place.text(file) };
        let (code, out, error) = place.check(&[what, &file]);
        assert_eq!((code, out.as_str(), error.lines().count()), (Some(2), "", 1), "{what}: {error}");
        assert!(error.starts_with("vcuda-check: ") && error.contains(said), "{what}: {error}");
    }
    let (code, _, error) = place.check(&["rootfs", &fits, "--driver", &place.text("none")]);
    assert!(code == Some(2) && error.contains("name the root of an installed driver"), "{error}");

    place.write("config.yaml", b"version: 1\ngpuz: 1\n");
    for args in [&["rootfs", &fits][..], &["node"], &["list"]] {
        let (code, _, error) = place.check(args);
        assert!(code == Some(2) && error.contains("gpuz"), "{args:?}: {error}");
    }
}

/// Id, what, where, why, what to do: in both forms.
#[test]
fn both_forms_tell_all_of_every_finding() {
    let place = Place::new().with_glibc();
    place.write("fits/opt/broken", b"\x7fELF and no more");
    fs::create_dir_all(place.at("none")).unwrap();
    let fits = place.text("fits");
    for args in [
        &["rootfs", &place.text("none")][..],
        &["rootfs", &fits, "--env", "LD_PRELOAD=/opt/mine.so", "--entry", "/bin/none"],
        &["node", "--containerd", "/no/containerd"],
    ] {
        let (code, report) = place.json(args);
        let (code_of_text, text, _) = place.check(args);
        assert_eq!(code, code_of_text, "{args:?}");
        let findings = report["findings"].as_array().unwrap();
        assert!(!findings.is_empty(), "{args:?}");
        for finding in findings {
            for key in ["id", "what", "file", "why", "remedy"] {
                let part = finding[key].as_str().unwrap_or_default();
                assert!(!part.is_empty(), "{args:?}: {key} of {finding}");
                assert!(text.contains(part), "{args:?}: {key} of {finding} is not in the text:\n{text}");
            }
        }
    }
}

#[test]
fn a_matrix_tells_of_each_image_against_each_driver_and_of_those_that_cannot_be_read() {
    let place = Place::new().with_glibc();
    let (code, _, error) = place.check(&["matrix"]);
    assert!(code == Some(2) && error.contains("--list <FILE>|--running|--seen"), "{error}");

    let (code, _, error) = place.check(&["matrix", "--list", &place.text("gone")]);
    assert!(code == Some(2) && error.contains("cannot be read; name a file"), "{error}");

    fs::create_dir_all(place.at("none")).unwrap();
    let (fits, none, gone) = (place.text("fits"), place.text("none"), place.text("gone.tar"));
    let list = place.text("list");
    let matrix = ["matrix", "--list", &list];
    place.write("list", format!("# ours\n{fits}\n").as_bytes());
    assert_eq!(place.json(&matrix).0, Some(0));
    place.write("list", format!("{fits}\n{gone}\n").as_bytes());
    assert_eq!(place.json(&matrix).0, Some(2), "one is open");
    place.write("list", format!("{fits}\n\n{none}\n{gone}\n").as_bytes());
    let (code, rows) = place.json(&matrix);
    assert_eq!((code, rows.as_array().unwrap().len()), (Some(1), 3), "{rows}");
    assert_eq!(rows[0]["reports"][0]["verdict"], "fits");
    assert!(rows[2]["error"].as_str().unwrap().contains("gone.tar"), "{rows}");
    let (_, text, _) = place.check(&matrix);
    assert!(text.contains("does not fit       libc-none\n    the image has no libc.so.6"), "{text}");
    assert!(text.contains("build the image on one with glibc"), "what to do: {text}");
    assert!(text.contains("could not be told: "), "{text}");
}

#[test]
fn what_the_node_has_seen_is_listed_in_every_form() {
    let place = Place::new().with_glibc();
    assert_eq!(place.json(&["list"]), (Some(0), serde_json::json!([])));
    let (_, text, _) = place.check(&["list"]);
    assert_eq!(text, "no image with a share was seen\n");

    // As the guard notes it: what refused an image without glibc.
    fs::create_dir_all(place.at("none")).unwrap();
    let root = oci_hooks::rootfs::Rootfs::open(&place.at("none")).unwrap();
    let shim = oci_hooks::compat::check::Node::without_shim().shim;
    let findings = oci_hooks::compat::start::judge(&root, &Default::default(), shim).unwrap();
    let looked = Looked { image: "registry/app:1", pod: "team/train".into(), ..Looked::default() };
    verdicts::remember(&place.at("state"), looked, &findings, false).unwrap();

    let (code, seen) = place.json(&["list"]);
    assert_eq!((code, &seen[0]["findings"]), (Some(0), &serde_json::json!(["libc-none"])), "{seen}");
    let (_, text, _) = place.check(&["list"]);
    for part in [
        "registry/app:1",
        "refused once, last for pod",
        "team/train",
        "libc-none",
        "build the image on one with glibc",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let (code, metrics, _) = place.check(&["list", "--metrics"]);
    assert!(code == Some(0) && metrics.contains("finding=\"libc-none\"} 1\n"), "{metrics}");
    let (code, _, error) = place.check(&["list", "--metrics", "-o", "json"]);
    assert!(code == Some(2) && error.contains("cannot be used with"), "{error}");

    // Its layers are not known, so a matrix leaves it open, and says what helps.
    let (code, text, _) = place.check(&["matrix", "--seen"]);
    assert!(code == Some(2) && text.contains("check its file with --list"), "{text}");
}

#[test]
fn what_is_started_decides_and_scripts_are_followed() {
    let place = Place::new().with_glibc();
    place.write("fits/run", b"#!/bin/sh\n");
    let (code, report) = place.json(&["rootfs", &place.text("fits"), "--entry", "/run"]);
    assert_eq!((code, report["findings"].as_array().unwrap().len()), (Some(0), 0), "{report}");
}

#[test]
fn a_long_check_says_on_standard_error_how_far_it_is_and_the_answer_stays_whole() {
    let place = Place::new();
    for n in 0..600 {
        place.write(&format!("image/{n}.txt"), b"");
    }
    place.write("clock.c", CLOCK.as_bytes());
    let clock = place.text("clock.so");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o", &clock, &place.text("clock.c")]).status();
    assert!(built.unwrap().success());
    let check = |clock: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vcuda-check"));
        command.args(["rootfs", &place.text("image"), "-o", "json", "--config", &place.text("config.yaml")]);
        let output = command.env("LD_PRELOAD", clock).output().unwrap();
        (output.status, output.stdout, String::from_utf8(output.stderr).unwrap())
    };
    let (status, answer, errors) = check("");
    assert_eq!(errors, "");
    let told = "vcuda-check: 256 files so far\nvcuda-check: 512 files so far\n".to_owned();
    assert_eq!(check(&clock), (status, answer, told));
}
