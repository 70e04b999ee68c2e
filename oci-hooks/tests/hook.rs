//! `vcuda-hook` as a runtime starts it: state on standard input, working directory and environment not to be
//! trusted, one sentence on standard error. The binary is the static one that goes onto nodes.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::OnceLock,
};

use goblin::elf::{Elf, program_header::PT_INTERP};

/// The static hook, built once, beside the other builds of this workspace.
fn hook() -> &'static Path {
    static HOOK: OnceLock<PathBuf> = OnceLock::new();
    HOOK.get_or_init(|| {
        let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("static");
        let built = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--package", "oci-hooks", "--bin", "vcuda-hook", "--target", &triple])
            .arg("--target-dir")
            .arg(&target)
            .env("RUSTFLAGS", "-C target-feature=+crt-static")
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .unwrap();
        assert!(built.success(), "the static hook does not build");
        target.join(triple).join("debug/vcuda-hook")
    })
}

/// A bundle with a root, and room beside it for what must not be touched.
struct Bundle(tempfile::TempDir);

impl Bundle {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("rootfs/etc")).unwrap();
        fs::write(folder.path().join("config.json"), r#"{"ociVersion":"1.2.0","root":{"path":"rootfs"}}"#)
            .unwrap();
        Self(folder)
    }

    fn root(&self) -> PathBuf {
        self.0.path().join("rootfs")
    }

    fn state(&self) -> String {
        let bundle = self.0.path();
        format!(r#"{{"ociVersion":"1.2.0","id":"c1","status":"creating","pid":1,"bundle":{bundle:?}}}"#)
    }

    /// Runs the hook where runc does: in the root.
    fn run(&self, args: &[&str]) -> Output {
        run(Command::new(hook()).args(args).current_dir(self.root()), &self.state())
    }
}

fn run(command: &mut Command, input: &str) -> Output {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A hook that refuses before it has read everything closes the pipe.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

/// The one line that a refusal consists of.
fn sentence(output: &Output, code: i32) -> String {
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

fn assert_silent_success(output: &Output) {
    assert!(output.status.success() && output.stdout.is_empty() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn the_hook_is_static() {
    let bytes = fs::read(hook()).unwrap();
    let elf = Elf::parse(&bytes).unwrap();
    assert!(elf.program_headers.iter().all(|header| header.p_type != PT_INTERP), "it asks for a loader");
    assert_eq!(elf.libraries, Vec::<&str>::new(), "it needs libraries");
}

#[test]
fn links_and_cache_are_made_in_the_containers_root() {
    let bundle = Bundle::new();
    assert_silent_success(&bundle.run(&["links", "--link", "libcuda.so.550.1::/opt/driver/libcuda.so.1"]));
    assert_silent_success(&bundle.run(&["ldcache", "--library", "/opt/driver/libcuda.so.1"]));
    let link = bundle.root().join("opt/driver/libcuda.so.1");
    assert_eq!(fs::read_link(link).unwrap(), Path::new("libcuda.so.550.1"));
    assert!(bundle.root().join("etc/ld.so.cache").is_file());
}

#[test]
fn create_container_makes_links_and_cache_and_ends_with_the_guard() {
    let bundle = Bundle::new();
    let output = bundle.run(&[
        "create-container",
        "--link",
        "libcuda.so.550.1::/opt/driver/libcuda.so.1",
        "--library",
        "/opt/driver/libcuda.so.1",
        "--state",
        "/nowhere",
        "--install",
        "/nowhere",
    ]);
    let text = sentence(&output, 1);
    assert!(text.contains("not bound"), "{text}");
    assert!(bundle.root().join("opt/driver/libcuda.so.1").is_symlink());
    assert!(bundle.root().join("etc/ld.so.cache").is_file());
}

// CVE-2025-23266: a hook that inherits the image's environment runs the image's code as root of the host.
#[test]
fn the_images_environment_and_folder_have_no_effect() {
    let bundle = Bundle::new();
    fs::write(bundle.root().join("evil.so"), "not even a library").unwrap();
    let output = run(
        Command::new(hook())
            .args(["links", "--link", "a::/b"])
            .current_dir(bundle.root())
            .env("LD_PRELOAD", "./evil.so")
            .env("LD_LIBRARY_PATH", ".")
            .env("GLIBC_TUNABLES", "glibc.malloc.check=3")
            .env("=strange", "x"),
        &bundle.state(),
    );
    // The loader of a dynamic program would say on standard error that evil.so cannot be preloaded.
    assert_silent_success(&output);
}

#[test]
fn a_refusal_is_one_sentence_with_the_file_in_it() {
    let bundle = Bundle::new();
    fs::create_dir_all(bundle.root().join("lib/libcuda.so.1/folder")).unwrap();
    let text = sentence(&bundle.run(&["links", "--link", "x::/lib/libcuda.so.1"]), 1);
    assert!(text.contains("/lib/libcuda.so.1"), "{text}");

    // What comes from a container cannot break the line.
    fs::write(bundle.root().join("li\nne"), "").unwrap();
    let text = sentence(&bundle.run(&["links", "--link", "x::/li\nne/a"]), 1);
    assert!(text.contains("in its way"), "{text}");
}

#[test]
fn input_that_is_no_state_is_refused() {
    let endless = " ".repeat(2 << 20);
    for input in ["", "{}", "nonsense", &endless] {
        let text = sentence(&run(Command::new(hook()).args(["links", "--link", "a::/b"]), input), 1);
        assert!(text.contains("standard input"), "{text}");
    }
}

#[test]
fn an_unbound_share_is_refused() {
    let bundle = Bundle::new();
    let text = sentence(&bundle.run(&["guard", "--state", "/nowhere", "--install", "/nowhere"]), 1);
    assert!(text.contains("c1") && text.contains("not bound"), "{text}");
}

#[test]
fn arguments_that_make_no_sense_are_one_sentence_and_exit_code_2() {
    for args in [
        &[][..],
        &["nonsense"],
        &["links"],
        &["links", "--link", "x"],
        &["ldcache", "--library", "x"],
        &["create-container"],
    ] {
        sentence(&run(Command::new(hook()).args(args), ""), 2);
    }
    let text = sentence(&run(Command::new(hook()).arg("guard"), ""), 2);
    assert!(text.contains("--state") && text.contains("--install"), "what is missing is named: {text}");
    let text = sentence(&run(&mut Command::new(hook()), ""), 2);
    assert!(text.contains("no hook is named"), "{text}");
}

#[test]
fn help_says_what_the_exit_codes_mean() {
    let output = run(Command::new(hook()).arg("--help"), "");
    assert!(output.status.success());
    assert!(String::from_utf8(output.stdout).unwrap().contains("Exit codes"));
}

#[test]
fn every_command_of_the_check_says_what_its_exit_codes_mean() {
    for command in ["", "rootfs", "image", "container", "node", "list", "matrix"] {
        let mut check = Command::new(env!("CARGO_BIN_EXE_vcuda-check"));
        let output = run(check.args([command, "--help"].iter().filter(|text| !text.is_empty())), "");
        assert!(output.status.success(), "{command}");
        assert!(String::from_utf8(output.stdout).unwrap().contains("Exit codes"), "{command}");
    }
}
