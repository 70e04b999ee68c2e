//! `vcuda-cdi` as a person or a script runs it: what it prints, and its exit codes.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output},
};

const VALID: &str =
    r#"{"cdiVersion":"0.3.0","kind":"v/c","devices":[{"name":"d","containerEdits":{"env":["A=b"]}}]}"#;

struct Folder(tempfile::TempDir);

impl Folder {
    fn with(files: &[(&str, &str)]) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        for (name, text) in files {
            fs::write(folder.path(name), text).unwrap();
        }
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, args: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_vcuda-cdi")).args(args).current_dir(self.0.path()).output().unwrap()
    }
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn validate_tells_every_fault_and_exits_1() {
    let folder = Folder::with(&[
        ("good.json", VALID),
        ("bad.yaml", "cdiVersion: 0.3.0\nkind: v/c\ndevices:\n- name: \"0\"\n"),
        ("named.txt", VALID),
    ]);
    let output = folder.run(&["validate", "good.json"]);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), "good.json: valid\n"));

    let output = folder.run(&["validate", "good.json", "bad.yaml", "named.txt", "none.json"]);
    assert_eq!(output.status.code(), Some(1));
    let text = stdout(&output);
    for part in [
        "bad.yaml: cdiVersion:",
        "bad.yaml: devices[0].containerEdits:",
        "named.txt: file name:",
        "none.json: file: cannot be read",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }

    let output = folder.run(&["validate", "-o", "json", "bad.yaml"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(json(&output)[0]["valid"], false);
    assert_eq!(json(&output)[0]["faults"][0]["place"], "cdiVersion");
}

#[test]
fn list_shows_devices_and_tells_conflicts() {
    let folder = Folder::with(&[("a.json", VALID)]);
    let output = folder.run(&["list", "--folder", "."]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stdout(&output).contains("v/c=d"), "{}", stdout(&output));

    fs::write(folder.path("b.json"), VALID).unwrap();
    fs::write(folder.path("c.json"), "{").unwrap();
    let output = folder.run(&["list", "--folder", "."]);
    assert_eq!(output.status.code(), Some(1));
    let text = stdout(&output);
    assert!(text.contains("conflict: v/c=d") && text.contains("left out: ./c.json"), "{text}");
    let output = folder.run(&["list", "--folder", "gone"]);
    assert_eq!(stdout(&output), "no devices in gone (there is no such folder)\n");
    let output = folder.run(&["list", "--folder", ".", "-o", "json"]);
    assert_eq!(json(&output)["conflicts"]["v/c=d"].as_array().unwrap().len(), 2);
}

#[test]
fn generate_without_a_driver_is_one_sentence_that_says_what_to_do() {
    let folder = Folder::with(&[("config.yaml", "version: 1\n")]);
    let root = folder.path("");
    let output =
        folder.run(&["generate", "--config", "config.yaml", "--driver-root", root.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(4));
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("no NVIDIA driver") && text.contains("paths.driverRoot"), "{text}");
}

#[test]
fn a_wrong_node_file_has_the_exit_code_that_it_has_everywhere() {
    let folder = Folder::with(&[("config.yaml", "version: 1\ngpuz: 1\n")]);
    for command in ["generate", "list"] {
        let output = folder.run(&[command, "--config", "config.yaml"]);
        assert_eq!(output.status.code(), Some(3), "{command}");
    }
}

#[test]
fn arguments_that_make_no_sense_are_exit_code_2() {
    let folder = Folder::with(&[]);
    for args in [&[][..], &["nonsense"], &["validate"]] {
        assert_eq!(folder.run(args).status.code(), Some(2), "{args:?}");
    }
}
