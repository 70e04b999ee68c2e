//! What the scripts beside this crate answer to arguments that they do not know: at once, before they fetch and build for
//! minutes.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

/// Runs a script where it has nothing beside it that it could fetch and build with. Its exit code and what it said.
fn run(script: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let beside = folder.path().join("integration");
    for path in [&beside, &folder.path().join(".ci")] {
        fs::create_dir(path).unwrap();
    }
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
        ("bench", &["share", "--quick=1"], "--quick=1 is not known here"),
        ("bench", &["--quick"], "--quick is not known here"),
        ("bench", &["pods", "--windows", "3"], "--windows is not known here"),
        ("bench", &["--rounds", "3", "pods"], "pods is not known here"),
        ("bench", &["--rounds", "abc"], "--rounds cannot be abc; it is a number from 1"),
        ("bench", &["pods", "--pods=0"], "--pods cannot be 0; it is a number from 1"),
        ("bench", &["share", "--windows=-1"], "--windows cannot be -1; it is a number from 1"),
        ("bench", &["--rounds"], "--rounds has no value"),
        ("test", &["node"], "node is not known here"),
        ("../.ci/run", &["--quick"], "--quick is not known here"),
        ("apt.sh", &["--nope"], "--nope is not known here"),
        ("apt.sh", &["unpack", "/tmp"], "unpack needs a folder, a release and packages"),
        ("apt.sh", &[], "a command is missing"),
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
        ("bench", &["share", "--windows", "16", "--json"]),
        ("bench", &["pods", "--pods=40", "--rounds", "5"]),
        ("bench", &["--rounds", "08", "--json"]),
    ] {
        let (code, said) = run(script, arguments);
        assert_ne!(code, Some(2), "{script} {arguments:?}: {said}");
        assert!(said.contains("integration/setup.sh"), "the next step is missing here: {said}");
    }
}

#[test]
fn help_is_the_comment_at_the_head() {
    for script in
        ["demo", "bench", "test", "build.sh", "setup.sh", "zig.sh", "apt.sh", "kube/build.sh", "../.ci/run"]
    {
        let source = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(script)).unwrap();
        let first = source.lines().nth(1).unwrap().trim_start_matches("# ");
        let output =
            Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join(script)).arg("--help").output().unwrap();
        assert!(output.status.success(), "{script}");
        let told = String::from_utf8(output.stdout).unwrap();
        assert!(told.starts_with(first), "{script}");
        // apt.sh reads its arguments itself.
        let usage = source.lines().filter(|line| line.starts_with("usage \"") || line.contains(") usage \""));
        let words = usage.flat_map(|line| line.split(['"', ' ']));
        for option in words.filter(|word| word.starts_with("--")) {
            let name = option.split('=').next().unwrap();
            // -o and --output are one.
            assert!(name == "--output" || told.contains(name), "{script} --help: no {name}");
        }
    }
}

/// The names of tiers in its help are the words that it takes.
#[test]
fn the_help_of_test_lists_its_tiers() {
    let source = include_str!("../test");
    let list = source.lines().find_map(|line| line.strip_prefix("usage \"")).unwrap();
    let tiers: Vec<_> = list.split('"').next().unwrap().split(' ').collect();
    assert!(tiers.len() > 4, "{tiers:?}");
    for tier in tiers {
        assert!(source.contains(&format!("\n#   {tier:<8}   ")), "{tier}");
    }
}

#[test]
fn a_line_has_style_on_a_terminal_only() {
    let usage = Path::new(env!("CARGO_MANIFEST_DIR")).join("usage.sh");
    let line = format!(". '{}'; styled 2 'setup: all there'", usage.display());
    let said = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(said("bash", &["-c", &line]), "setup: all there\n");
    let on_terminal = said("script", &["-qec", &format!("bash -c \"{line}\""), "/dev/null"]);
    assert_eq!(on_terminal, "\x1b[2msetup: all there\x1b[0m\r\n");

    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let scripts = ["integration/test", "integration/setup.sh", "integration/build.sh", "integration/zig.sh"];
    let more = ["integration/kube/build.sh", "vcuda-preload/tests/fetch.sh", ".ci/run"];
    for script in scripts.into_iter().chain(more) {
        assert!(!fs::read_to_string(root.join(script)).unwrap().contains(r"\033"), "{script}");
    }
}

#[test]
fn a_disk_too_small_is_told_before_the_build_begins() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("target");
    let asked = |gigabytes: &str| {
        let line = format!(". '{}'; space {gigabytes}", source.join("usage.sh").display());
        let output = Command::new("bash")
            .args(["-c", &line, "test"])
            .env("CARGO_TARGET_DIR", &target)
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(asked("0"), (Some(0), String::new()));
    let (code, said) = asked("900000000");
    assert_eq!(code, Some(1));
    assert!(said.starts_with(&format!("test: {} can grow to ", target.display())), "{said}");
    assert!(said.contains(" GB, and needs to hold 900000000; free some disk"), "{said}");

    for script in ["demo", "test", "../.ci/run"] {
        let script = fs::read_to_string(source.join(script)).unwrap();
        let place = |line: &str| script.find(line).unwrap_or_else(|| panic!("{line} is missing in {script}"));
        assert!(place("\nspace ") < place("\nintegration/setup.sh"), "{script}");
    }
}

#[test]
fn what_a_build_caches_lies_in_the_cache() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    for script in ["integration/build.sh", "vcuda-preload/build.sh"] {
        let folder = tempfile::tempdir().unwrap();
        let place = |file: &str, text: &str| {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        };
        for file in [script, "integration/usage.sh"] {
            place(file, &fs::read_to_string(source.join("..").join(file)).unwrap());
        }
        place("integration/zig.sh", "#!/bin/sh\necho /cache/venv/bin\n");
        // In cargo's place: it only says where zig would cache.
        place(
            "bin/cargo",
            "#!/bin/sh\n[ \"$1\" = zigbuild ] && echo \"caches: $ZIG_GLOBAL_CACHE_DIR $CARGO_ZIGBUILD_CACHE_DIR\" >&2\n\
             exit 0\n",
        );
        let path = format!("{}:{}", folder.path().join("bin").display(), std::env::var("PATH").unwrap());
        let mut build = Command::new(folder.path().join(script));
        build.env("PATH", path).env("CARGO_TARGET_DIR", folder.path().join("target"));
        let output = build.env("VCUDA_DIST", folder.path().join("dist")).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("caches: /cache/zig /cache/cargo-zigbuild\n"), "{script}: {said}");
    }
}
