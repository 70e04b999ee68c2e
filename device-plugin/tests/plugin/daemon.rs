//! The real program, on a node that lies in a temporary folder.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Output},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::PATIENCE;

const PROGRAM: &str = env!("CARGO_BIN_EXE_vcuda-device-plugin");

/// A node: its files, and the programs started on it.
pub struct Node {
    folder: tempfile::TempDir,
    /// More keys of the node file.
    more: String,
}

impl Node {
    /// A node without anything.
    pub fn new() -> Self {
        Self::with("")
    }

    /// A node whose node file has these further lines.
    pub fn with(more: &str) -> Self {
        let node = Self { folder: tempfile::tempdir().unwrap(), more: more.into() };
        fs::create_dir_all(node.path("install/bin")).unwrap();
        fs::write(node.path("install/bin/vcuda-hook"), "").unwrap();
        node
    }

    /// A path on the node.
    pub fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    /// Kubelet's device plugin folder.
    pub fn kubelet(&self) -> PathBuf {
        self.path("kubelet/device-plugins")
    }

    fn config(&self) -> PathBuf {
        let path = self.path("config.yaml");
        let root = self.folder.path().display();
        let text = format!(
            "version: 1\npaths: {{driverRoot: {root}/driver, state: {root}/state, cdi: {root}/cdi, \
             install: {root}/install, kubelet: {root}/kubelet/device-plugins, run: {root}/run}}\n\
             {}\n{}",
            // One port for all tests of a machine would be one too few.
            if self.more.contains("metrics:") { "" } else { "metrics: {listen: null}" },
            self.more
        );
        fs::write(&path, text).unwrap();
        path
    }

    /// The program with these arguments; it ends by itself.
    pub fn run(&self, arguments: &[&str]) -> Output {
        fs::create_dir_all(self.path("driver")).unwrap();
        Command::new(PROGRAM).arg("--config").arg(self.config()).args(arguments).output().unwrap()
    }

    /// The program as a daemon that tells all.
    pub fn start(&self) -> Daemon {
        self.daemon(|command| command.env("RUST_LOG", "debug"))
    }

    /// The program as a daemon with these arguments, which tells what it tells if nobody says what to write.
    pub fn start_with(&self, arguments: &[&str]) -> Daemon {
        self.daemon(|command| command.args(arguments).env_remove("RUST_LOG"))
    }

    fn daemon(&self, with: impl FnOnce(&mut Command) -> &mut Command) -> Daemon {
        fs::create_dir_all(self.path("driver")).unwrap();
        let log = self.path("log");
        let mut command = Command::new(PROGRAM);
        command.arg("--config").arg(self.config()).stderr(File::create(&log).unwrap());
        let child = with(&mut command).spawn().unwrap();
        Daemon { child, log }
    }
}

/// The running program; it is killed when this is dropped.
pub struct Daemon {
    child: Child,
    log: PathBuf,
}

impl Daemon {
    /// Returns when the log holds `text`.
    pub fn says(&mut self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !fs::read_to_string(&self.log).unwrap().contains(text) {
            assert_eq!(self.child.try_wait().unwrap(), None, "ended: {}", self.log());
            assert!(Instant::now() < deadline, "{text:?} is not in the log: {}", self.log());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// The log so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    /// Ends it with SIGTERM.
    pub fn stop(self) -> ExitStatus {
        self.end_with(Signal::TERM)
    }

    /// Ends it with a signal.
    pub fn end_with(mut self, signal: Signal) -> ExitStatus {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        self.child.wait().unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The exit code and what was said last.
pub fn verdict(output: &Output) -> (Option<i32>, String) {
    let said = String::from_utf8_lossy(&output.stderr);
    (output.status.code(), said.lines().last().unwrap_or_default().into())
}
