//! A child process whose output goes to a log file, and which never outlives its owner.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

/// How long a process that was asked to end may take.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// A running part of the node. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command`, with both outputs appended to `log`.
    pub fn spawn(name: &str, mut command: Command, log: &Path) -> Result<Self> {
        let file = File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("{}: cannot be written", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("{name}: {} cannot be started", command.get_program().display()))?;
        Ok(Self { name: name.into(), child, log: log.into() })
    }

    /// Its process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it wrote so far, over all its starts with the same log file.
    pub fn output(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Its exit status, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Sends `signal`.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("no process ID")?;
        kill_process(pid, signal).with_context(|| format!("{}: cannot be signalled", self.name))
    }

    /// Kills it with SIGKILL and reaps it.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Ends it with SIGTERM and returns how it ended.
    pub fn terminate(&mut self) -> Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        self.wait_for_end(END_TIMEOUT)
    }

    /// Waits until it ends by itself.
    pub fn wait_for_end(&mut self, within: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("{}: still runs after {within:?}; its last words:\n{}", self.name, self.tail());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Fails with the last lines of its log if it has ended.
    pub fn check_running(&mut self) -> Result<()> {
        match self.ended() {
            None => Ok(()),
            Some(status) => bail!("{}: ended, {status}; its last words:\n{}", self.name, self.tail()),
        }
    }

    /// The last lines of its log.
    pub fn tail(&self) -> String {
        let output = self.output();
        let lines: Vec<_> = output.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs `command` to its end and returns its output; a failure carries what it wrote to stderr.
pub fn run(mut command: Command) -> Result<String> {
    let program = command.get_program().display().to_string();
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("{program}: cannot be started"))?;
    if !output.status.success() {
        bail!("{program}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
