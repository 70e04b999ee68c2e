//! What the scripts beside this crate answer to arguments that they do not know: at once, before they fetch and build for
//! minutes.

use std::{fs, path::Path, process::Command};

/// Runs a script where it has nothing beside it that it could fetch and build with. Its exit code and what it said.
fn run(script: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let beside = folder.path().join("integration");
    fs::create_dir(&beside).unwrap();
    for file in [script, "usage.sh"] {
        fs::copy(source.join(file), beside.join(file)).unwrap();
    }
    let output = Command::new(beside.join(script)).args(arguments).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn what_a_script_does_not_know_is_told_before_it_begins() {
    for (script, arguments, told) in [
        ("demo", &["-o", "xml"][..], "-o cannot be xml; it is text or json"),
        ("demo", &["--output=yaml"], "--output cannot be yaml; it is text or json"),
        ("demo", &["-o", "js"], "-o cannot be js"),
        ("demo", &["-o=text|json"], "-o cannot be text|json"),
        ("demo", &["-o"], "-o has no value"),
        ("demo", &["--output"], "--output has no value"),
        ("demo", &["-o", "json", "now"], "now is not known here"),
        ("demo", &["--outputs=json"], "--outputs=json is not known here"),
        ("bench", &["share", "-o", "text"], "-o cannot be text; it is table or json"),
        ("bench", &["share", "--governor", "off"], "--governor cannot be off; it is with or without or both"),
        ("bench", &["--quick=1"], "--quick=1 is not known here"),
        ("bench", &["--rounds"], "--rounds has no value"),
        ("test", &["node"], "node is not known here"),
    ] {
        let (code, said) = run(script, arguments);
        assert_eq!(code, Some(2), "{script} {arguments:?}: {said}");
        assert!(said.contains(told), "{script} {arguments:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{script} {arguments:?}: {said}");
    }
}

#[test]
fn what_a_script_knows_gets_past_its_arguments() {
    for (script, arguments) in [
        ("demo", &[][..]),
        ("demo", &["-o", "json"]),
        ("demo", &["--output=json"]),
        ("bench", &["share", "--shares", "30/70", "--work=5 µs", "-o=json", "--quick"]),
    ] {
        let (code, said) = run(script, arguments);
        assert_ne!(code, Some(2), "{script} {arguments:?}: {said}");
        assert!(said.contains("integration/setup.sh"), "the next step is missing here: {said}");
    }
}

#[test]
fn help_is_the_comment_at_the_head() {
    for script in ["demo", "bench", "test", "build.sh", "setup.sh", "zig.sh", "apt.sh"] {
        let source = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(script)).unwrap();
        let first = source.lines().nth(1).unwrap().trim_start_matches("# ");
        let output =
            Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join(script)).arg("--help").output().unwrap();
        assert!(output.status.success(), "{script}");
        let told = String::from_utf8(output.stdout).unwrap();
        assert!(told.starts_with(first), "{script}");
        // apt.sh reads its arguments itself.
        let usage = source.lines().find_map(|line| line.strip_prefix("usage ")).unwrap_or_default();
        for option in usage.split(['"', ' ']).filter(|word| word.starts_with("--")) {
            let name = option.split('=').next().unwrap();
            // -o and --output are one.
            assert!(name == "--output" || told.contains(name), "{script} --help: no {name}");
        }
    }
}
