//! `vcuda-check container` against real containerds and their shims, of both lines that are supported. They come from
//! the tests' cache (`integration/setup.sh`, `tests/material/get`).

#![expect(clippy::unwrap_used, reason = "in a test it is an assertion")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Long enough for a machine that does other things too.
const PATIENCE: Duration = Duration::from_secs(60);

fn cache() -> PathBuf {
    PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache/vcuda")
}

/// A containerd of its own, without CRI and NRI, in a folder of its own.
struct Containerd {
    folder: tempfile::TempDir,
    programs: PathBuf,
    path: std::ffi::OsString,
    process: Child,
}

impl Containerd {
    fn start(line: &str) -> Self {
        let programs = cache().join(format!("containerd-{line}/usr/bin"));
        let runc = cache().join("runc/usr/sbin");
        for needed in [programs.join("containerd"), runc.join("runc")] {
            assert!(needed.exists(), "{} is not there; run integration/setup.sh", needed.display());
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = [programs.clone(), runc].into_iter().chain(std::env::split_paths(&path));
        let path = std::env::join_paths(path).unwrap();
        let folder = tempfile::Builder::new().prefix("vc").tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let off = [
            "io.containerd.grpc.v1.cri",
            "io.containerd.cri.v1.images",
            "io.containerd.cri.v1.runtime",
            "io.containerd.nri.v1.nri",
        ];
        let version = if line.starts_with('1') { 2 } else { 3 };
        let config = format!(
            "version = {version}\nroot = {:?}\nstate = {:?}\ndisabled_plugins = {off:?}\n[grpc]\naddress = {:?}\n",
            at("root"),
            at("state"),
            at("c.sock")
        );
        fs::write(at("config.toml"), config).unwrap();
        let process = Command::new(programs.join("containerd"))
            .args(["-c", &at("config.toml")])
            .env("PATH", &path)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let containerd = Self { folder, programs, path, process };
        let start = Instant::now();
        while !containerd.ctr(&["version"]).status.success() {
            assert!(start.elapsed() < PATIENCE, "containerd {line} does not come up");
            thread::sleep(Duration::from_millis(50));
        }
        containerd
    }

    fn ctr(&self, args: &[&str]) -> Output {
        Command::new(self.programs.join("ctr"))
            .arg("-a")
            .arg(self.folder.path().join("c.sock"))
            .args(["-n", "k8s.io"])
            .args(args)
            .env("PATH", &self.path)
            .output()
            .unwrap()
    }

    fn check(&self, id: &str) -> (Option<i32>, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_vcuda-check"))
            .args(["container", id, "--containerd-state"])
            .arg(self.folder.path().join("state"))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        (output.status.code(), text.into_owned())
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        // The container first: its shim would outlive containerd.
        self.ctr(&["task", "kill", "-s", "9", "box"]);
        thread::sleep(Duration::from_millis(200));
        self.ctr(&["task", "rm", "-f", "box"]);
        self.ctr(&["container", "rm", "box"]);
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What README has people merge into containerd's configuration is all that its CDI and NRI need.
#[test]
#[ignore = "needs integration/setup.sh"]
fn containerd_with_the_settings_that_are_deployed_is_ready_for_shares() {
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/deploy/containerd");
    let check = |line: &str, config: &Path| {
        let output = Command::new(env!("CARGO_BIN_EXE_vcuda-check"))
            .args(["node", "-o", "json", "--containerd"])
            .arg(cache().join(format!("containerd-{line}/usr/bin/containerd")))
            .arg("--containerd-config")
            .arg(config)
            .output()
            .unwrap();
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let findings = report["findings"].as_array().unwrap().iter();
        let ids = findings.map(|finding| finding["id"].as_str().unwrap().to_owned());
        let settings = ["containerd-unknown", "cdi-off", "cdi-folder-unknown", "nri-off", "nri-socket-other"];
        ids.filter(|id| settings.contains(&id.as_str())).collect::<Vec<_>>()
    };
    for (line, file) in [("1.7", "1.7.toml"), ("2.1", "2.x.toml")] {
        assert_eq!(check(line, &deploy.join(file)), Vec::<String>::new(), "{file}");
    }
    assert_eq!(check("1.7", Path::new("/dev/null")), ["cdi-off", "nri-off"], "without them");
}

#[test]
#[ignore = "needs root, integration/setup.sh and tests/material/get"]
fn a_running_container_is_found_through_its_shim_on_both_lines() {
    let busybox = cache().join("material/roots/busybox");
    assert!(busybox.exists(), "{} is not there; run oci-hooks/tests/material/get", busybox.display());
    for line in ["2.1", "1.7"] {
        let containerd = Containerd::start(line);
        let root = containerd.folder.path().join("fs");
        copy(&busybox, &root);
        let run = containerd.ctr(&[
            "run",
            "-d",
            "--rootfs",
            &root.display().to_string(),
            "box",
            "/bin/sleep",
            "600",
        ]);
        assert!(run.status.success(), "containerd {line}: {run:?}");

        let (code, text) = containerd.check("bo");
        assert_eq!(code, Some(1), "containerd {line}: {text}");
        assert!(text.contains("container box: does not fit") && text.contains("libc-none"), "{text}");
        // What it runs is known from its bundle.
        assert!(text.contains("entry-static  /bin/sleep"), "{text}");

        containerd.ctr(&["task", "kill", "-s", "9", "box"]);
        let start = Instant::now();
        loop {
            let (code, text) = containerd.check("box");
            if text.contains("box is stopped") {
                assert_eq!(code, Some(2));
                break;
            }
            assert!(start.elapsed() < PATIENCE, "containerd {line}: {text}");
            thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(containerd.check("other").0, Some(2));
    }
}

fn copy(from: &Path, to: &Path) {
    let done = Command::new("cp").args(["-a", "--"]).arg(from).arg(to).status().unwrap();
    assert!(done.success());
    for folder in ["proc", "sys", "dev", "run"] {
        fs::create_dir_all(to.join(folder)).unwrap();
    }
}
