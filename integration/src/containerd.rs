//! A containerd of our own beside the system's: everything it has lies in one folder. It knows nothing of GPUs;
//! CDI and NRI are switched by the caller.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::{
    cache::{Cache, Line},
    cri::Cri,
    image::PAUSE,
    process::{Process, run},
};

/// It answers within 100 ms here; a busy machine may need a while.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// What a test may switch.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Whether the CRI plugin expands CDI devices. containerd 1.7 needs it said, 2.x has it on.
    pub cdi: bool,
    /// Whether NRI plugins may connect. containerd 1.7 needs it said, 2.x has it on.
    pub nri: bool,
}

/// A running containerd.
#[derive(Debug)]
pub struct Containerd {
    folder: PathBuf,
    line: Line,
    bin: PathBuf,
    process: Process,
    cri: Cri,
}

impl Containerd {
    /// Writes a configuration into `folder` and starts containerd on it.
    pub async fn start(cache: &Cache, line: Line, folder: &Path, settings: Settings) -> Result<Self> {
        let bin = cache.containerd(line);
        for dir in [cdi(folder), nri_plugins(folder), nri_settings(folder)] {
            fs::create_dir_all(dir)?;
        }
        fs::write(folder.join("containerd.toml"), config(cache, line, folder, settings))?;
        let process = spawn(&bin, folder)?;
        let cri = Cri::new(&socket(folder))?;
        let mut containerd = Self { folder: folder.into(), line, bin, process, cri };
        containerd.wait_until_serving().await?;
        Ok(containerd)
    }

    /// Its CRI service.
    pub fn cri(&self) -> &Cri {
        &self.cri
    }

    /// Which line it is.
    pub fn line(&self) -> Line {
        self.line
    }

    /// Its process ID.
    pub fn process_id(&self) -> u32 {
        self.process.id()
    }

    /// Its log.
    pub fn log(&self) -> String {
        self.process.output()
    }

    /// Kills it with SIGKILL and starts it anew; containers run on under their shims.
    pub async fn restart(&mut self) -> Result<()> {
        self.process.kill();
        self.process = spawn(&self.bin, &self.folder)?;
        self.wait_until_serving().await
    }

    /// Imports an image archive.
    pub fn import(&self, archive: &Path) -> Result<()> {
        let mut ctr = Command::new(self.bin.join("ctr"));
        ctr.arg("--address")
            .arg(socket(&self.folder))
            .args(["-n", "k8s.io", "images", "import"])
            .arg(archive);
        run(ctr).with_context(|| format!("{}: cannot be imported", archive.display()))?;
        Ok(())
    }

    async fn wait_until_serving(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            let Err(error) = self.cri.version().await else { return Ok(()) };
            self.process.check_running()?;
            if Instant::now() > deadline {
                bail!("containerd does not serve CRI: {error:#}; its last words:\n{}", self.process.tail());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Its socket in `folder`.
pub fn socket(folder: &Path) -> PathBuf {
    folder.join("containerd.sock")
}

/// Where it looks for CDI specs.
pub fn cdi(folder: &Path) -> PathBuf {
    folder.join("cdi")
}

/// Its NRI socket.
pub fn nri_socket(folder: &Path) -> PathBuf {
    folder.join("nri/nri.sock")
}

/// Folder of NRI plugins that it starts itself.
pub fn nri_plugins(folder: &Path) -> PathBuf {
    folder.join("nri/plugins")
}

/// Folder of settings for the plugins that it starts.
pub fn nri_settings(folder: &Path) -> PathBuf {
    folder.join("nri/conf.d")
}

fn spawn(bin: &Path, folder: &Path) -> Result<Process> {
    let mut command = Command::new(bin.join("containerd"));
    // containerd finds its shim by PATH, and hands its own environment on to it and to runc.
    let path = format!("{}:{}", bin.display(), env::var("PATH").unwrap_or_default());
    command.env("PATH", path).arg("--config").arg(folder.join("containerd.toml"));
    Process::spawn("containerd", command, &folder.join("containerd.log"))
}

/// The configuration. Only what differs from the default, so that the rest is tested as it ships.
fn config(cache: &Cache, line: Line, folder: &Path, settings: Settings) -> String {
    let dir = folder.display();
    let runc = cache.runc();
    let runc = runc.display();
    let common = format!(
        r#"root = "{dir}/root"
state = "{dir}/state"

[grpc]
address = "{dir}/containerd.sock"

[plugins."io.containerd.internal.v1.opt"]
path = "{dir}/opt"

[plugins."io.containerd.nri.v1.nri"]
disable = {nri_off}
socket_path = "{dir}/nri/nri.sock"
plugin_path = "{dir}/nri/plugins"
plugin_config_path = "{dir}/nri/conf.d"
"#,
        nri_off = !settings.nri,
    );
    // Without CAP_SYS_RESOURCE no sandbox starts unless the OOM score is left as it is. CNI is not needed on the
    // host's network. AppArmor and SELinux are the machine's own business.
    let runtime = format!(
        r#"enable_cdi = {cdi}
cdi_spec_dirs = ["{dir}/cdi"]
restrict_oom_score_adj = {restrict}
disable_apparmor = true
"#,
        cdi = settings.cdi,
        restrict = !may_set_oom_score(),
    );
    match line {
        Line::V1 => format!(
            r#"version = 2
{common}
[plugins."io.containerd.grpc.v1.cri"]
{runtime}sandbox_image = "{PAUSE}"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = "{runc}"
"#
        ),
        Line::V2 => format!(
            r#"version = 3
{common}
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE}"

[plugins."io.containerd.cri.v1.runtime"]
{runtime}
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "{runc}"
"#
        ),
    }
}

/// CAP_SYS_RESOURCE, bit 24 of the effective set (`linux/capability.h`).
fn may_set_oom_score() -> bool {
    const CAP_SYS_RESOURCE: u32 = 24;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap_or_default();
    u64::from_str_radix(effective.trim(), 16).is_ok_and(|set| set & (1 << CAP_SYS_RESOURCE) != 0)
}

/// Makes `file` executable by all.
pub(crate) fn make_executable(file: &Path) -> Result<()> {
    Ok(fs::set_permissions(file, fs::Permissions::from_mode(0o755))?)
}
