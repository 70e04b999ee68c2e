//! The hooks against the loaders and `ldconfig`s of three glibc releases, each in a root of its own: what the hooks
//! write without `ldconfig` is what the real programs read. Needs root (chroot, mounts) and the Debian roots that
//! `integration/setup.sh` unpacks.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

#[path = "material/table.rs"]
mod table;

const SUITES: [&str; 3] = ["bullseye", "bookworm", "trixie"];

/// A folder that no loader looks into by itself.
const DRIVER: &str = "/opt/driver/lib";

/// A bundle whose root is a Debian release's C library.
struct Container {
    bundle: tempfile::TempDir,
    suite: &'static str,
}

/// A fresh container of each release.
fn containers() -> Vec<Container> {
    let cache = table::cache();
    SUITES.into_iter().map(|suite| Container::new(&cache.join(format!("root-{suite}")), suite)).collect()
}

impl Container {
    fn new(from: &Path, suite: &'static str) -> Self {
        assert!(from.join(".complete").exists(), "{} is not there; run integration/setup.sh", from.display());
        let bundle = tempfile::tempdir().unwrap();
        let this = Self { bundle, suite };
        let copied = Command::new("cp").arg("-a").arg(from).arg(this.root()).status().unwrap();
        assert!(copied.success());
        fs::write(this.bundle.path().join("config.json"), r#"{"root":{"path":"rootfs"}}"#).unwrap();
        // The driver as the mounts bring it: a file under its versioned name.
        this.library(&format!("{DRIVER}/libcuda.so.550.1"), "libcuda.so.1");
        this
    }

    fn root(&self) -> PathBuf {
        self.bundle.path().join("rootfs")
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root().join(path.trim_start_matches('/'))
    }

    /// Makes an empty library that calls itself `soname`.
    fn library(&self, path: &str, soname: &str) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let made = Command::new("cc")
            .args(["-shared", "-nostdlib", &format!("-Wl,-soname,{soname}"), "-x", "c", "/dev/null", "-o"])
            .arg(path)
            .status()
            .unwrap();
        assert!(made.success());
    }

    /// Libraries of the image's own, in a folder of its own, one of them also for a newer processor, and the
    /// libcuda of another driver.
    fn with_image_libraries(&self) {
        self.library("/opt/image/libextra.so.2", "libextra.so.2");
        self.library("/opt/image/glibc-hwcaps/x86-64-v2/libextra.so.2", "libextra.so.2");
        self.library("/opt/image/libzoo.so.10", "libzoo.so.10");
        self.library("/opt/image/libcuda.so.1", "libcuda.so.1");
        fs::write(self.at("/etc/ld.so.conf.d/image.conf"), "/opt/image\n").unwrap();
    }

    /// Runs a script in the container and returns what it prints.
    fn sh(&self, script: &str) -> String {
        let output = Command::new("chroot")
            .arg(self.root())
            .args(["/bin/sh", "-ec", script])
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}: {script}: {output:?}", self.suite);
        String::from_utf8(output.stdout).unwrap()
    }

    /// Where the container's loader finds `name`, if anywhere.
    fn loads(&self, name: &str) -> Option<String> {
        let listed = self
            .sh(&format!("LD_PRELOAD={name} /lib64/ld-linux-x86-64.so.2 --list /usr/bin/getent 2>/dev/null"));
        let line = listed.lines().find_map(|line| line.trim().strip_prefix(&format!("{name} => ")))?;
        Some(line.split(' ').next().unwrap().to_owned())
    }

    /// The names in the cache, as the container's own `ldconfig` reads them, with their places.
    fn listed(&self) -> Vec<String> {
        let text = self.sh("ldconfig -p");
        text.lines().filter(|line| line.contains(" => ")).map(|line| line.trim().to_owned()).collect()
    }

    fn state(&self) -> String {
        format!(r#"{{"id":"c1","status":"creating","bundle":{:?}}}"#, self.bundle.path())
    }

    /// Runs both hooks, through `wrapper` if it is not empty, and returns the exit code and standard error of
    /// the first that fails.
    fn hooks_within(&self, wrapper: &str) -> Result<(), (i32, String)> {
        let link = format!("libcuda.so.550.1::{DRIVER}/libcuda.so.1");
        let library = format!("{DRIVER}/libcuda.so.1");
        for args in [["links", "--link", &link], ["ldcache", "--library", &library]] {
            let hook = env!("CARGO_BIN_EXE_vcuda-hook");
            let mut command = if wrapper.is_empty() {
                Command::new(hook)
            } else {
                let script = format!("{wrapper}; exec \"$0\" \"$@\"");
                let mut command = Command::new("unshare");
                command.args(["--mount", "sh", "-ec", &script, hook]).env("ROOT", self.root());
                command
            };
            let mut child = command.args(args).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            child.stdin.take().unwrap().write_all(self.state().as_bytes()).unwrap();
            let output = child.wait_with_output().unwrap();
            if !output.status.success() {
                let text = String::from_utf8(output.stderr).unwrap();
                return Err((output.status.code().unwrap(), text));
            }
        }
        Ok(())
    }

    fn hooks(&self) {
        self.hooks_within("").unwrap();
    }
}

#[test]
#[ignore = "needs root, and integration/setup.sh"]
fn a_loader_without_a_cache_finds_the_driver() {
    for container in containers() {
        assert_eq!(container.loads("libcuda.so.1"), None);
        container.hooks();
        assert_eq!(container.loads("libcuda.so.1").unwrap(), format!("{DRIVER}/libcuda.so.1"));
        assert_eq!(container.listed().len(), 1, "{}", container.suite);
    }
}

#[test]
#[ignore = "needs root, and integration/setup.sh"]
fn the_driver_replaces_the_images_own_and_all_else_is_found_as_before() {
    // ldconfig's formats: glibc 2.32 and later write `new` unless told otherwise, older ones `compat`.
    for format in ["new", "compat", "old"] {
        for container in containers() {
            container.with_image_libraries();
            container.sh(&format!("ldconfig -c {format}"));
            let names = ["libextra.so.2", "libzoo.so.10", "libc.so.6"];
            let before = names.map(|name| container.loads(name));
            assert_eq!(container.loads("libcuda.so.1").unwrap(), "/opt/image/libcuda.so.1");
            let mut listed = container.listed();

            container.hooks();
            let at = format!("{}, {format}", container.suite);
            assert_eq!(container.loads("libcuda.so.1").unwrap(), format!("{DRIVER}/libcuda.so.1"), "{at}");
            assert_eq!(names.map(|name| container.loads(name)), before, "{at}");
            // Every other entry is still there, in its place, with its hardware capabilities.
            let entry = listed.iter_mut().find(|entry| entry.starts_with("libcuda.so.1 ")).unwrap();
            *entry = entry.replace("/opt/image", DRIVER);
            assert_eq!(container.listed(), listed, "{at}");

            container.hooks();
            assert_eq!(container.listed(), listed, "{at}: a second run");
        }
    }
}

#[test]
#[ignore = "needs root, and integration/setup.sh"]
fn newer_processors_still_get_their_variants() {
    for container in containers() {
        if container.suite == "bullseye" {
            // glibc 2.33 brought these folders, bullseye has 2.31.
            continue;
        }
        container.with_image_libraries();
        container.sh("ldconfig");
        container.hooks();
        assert!(container.listed().iter().any(|entry| entry.contains("hwcap: \"x86-64-v2\"")));
    }
}

#[test]
#[ignore = "needs root, and integration/setup.sh"]
fn a_later_ldconfig_keeps_the_driver() {
    for container in containers() {
        container.with_image_libraries();
        container.hooks();
        container.sh("ldconfig");
        assert!(container.listed().len() > 1, "{}", container.suite);
        assert_eq!(container.loads("libcuda.so.1").unwrap(), format!("{DRIVER}/libcuda.so.1"));
    }
}

#[test]
#[ignore = "needs root, and integration/setup.sh"]
fn the_machines_own_ldconfig_reads_the_cache() {
    for container in containers() {
        container.hooks();
        let output = Command::new("ldconfig")
            .arg("-p")
            .arg("-C")
            .arg(container.at("/etc/ld.so.cache"))
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let line = format!("\tlibcuda.so.1 (libc6,x86-64) => {DRIVER}/libcuda.so.1");
        assert!(text.starts_with("1 libs found") && text.contains(&line), "{text}");
    }
}

#[test]
#[ignore = "needs root, and integration/setup.sh"]
fn a_root_that_cannot_be_written_is_one_sentence() {
    for container in containers() {
        let read_only = "mount --bind \"$ROOT\" \"$ROOT\"; mount -o remount,bind,ro \"$ROOT\"";
        let (code, text) = container.hooks_within(read_only).unwrap_err();
        assert_eq!((code, text.lines().count()), (1, 1), "{text}");
        assert!(text.contains("Read-only file system"), "{text}");

        // Where nothing is left to do, nothing is written.
        container.hooks();
        container.hooks_within(read_only).unwrap();
    }
}

#[test]
#[ignore = "needs root, and integration/setup.sh"]
fn volumes_are_not_written_to() {
    for container in containers() {
        let volume = container.bundle.path().join("volume");
        fs::create_dir(&volume).unwrap();
        for folder in ["etc", "opt/driver"] {
            let mount = format!("mount --bind \"$ROOT/../volume\" \"$ROOT/{folder}\"");
            let (code, text) = container.hooks_within(&mount).unwrap_err();
            assert_eq!(code, 1, "{text}");
            assert!(text.contains("on a volume"), "{text}");
            assert_eq!(fs::read_dir(&volume).unwrap().count(), 0, "{folder}");
        }
        // A file of the pod's own over the cache, or over a link.
        fs::write(volume.join("file"), "the pod's own").unwrap();
        container.hooks();
        fs::remove_file(container.at("/etc/ld.so.cache")).unwrap();
        fs::write(container.at("/etc/ld.so.cache"), "").unwrap();
        let mount = "mount --bind \"$ROOT/../volume/file\" \"$ROOT/etc/ld.so.cache\"";
        let (_, text) = container.hooks_within(mount).unwrap_err();
        assert!(text.contains("on a volume"), "{text}");
        assert_eq!(fs::read_to_string(volume.join("file")).unwrap(), "the pod's own");
    }
}
