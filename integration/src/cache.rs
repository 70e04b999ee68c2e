//! Where `integration/setup.sh` put the real parts, and where `integration/build.sh` put ours.

use std::{
    env,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail};

/// What the setup fetched.
#[derive(Clone, Debug)]
pub struct Cache(PathBuf);

/// The two lines of containerd that every test runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// containerd 1.7, of Debian trixie: NRI 0.6, CRI config version 2, CDI off unless asked for.
    V1,
    /// containerd 2.1, of Debian forky: NRI 0.8, CRI config version 3.
    V2,
}

impl Line {
    /// The line that `VCUDA_CONTAINERD` names, `1.7` or `2.1`; 2.1 when it names none.
    pub fn from_env() -> Result<Self> {
        match env::var("VCUDA_CONTAINERD").as_deref() {
            Ok("1.7") => Ok(Self::V1),
            Ok("2.1") | Err(_) => Ok(Self::V2),
            Ok(other) => bail!("VCUDA_CONTAINERD={other}: only 1.7 and 2.1 are there"),
        }
    }

    /// Its version, as far as it matters.
    pub fn version(self) -> &'static str {
        match self {
            Self::V1 => "1.7",
            Self::V2 => "2.1",
        }
    }
}

impl Cache {
    /// The cache, which must be filled.
    pub fn find() -> Result<Self> {
        let base = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let folder = base("VCUDA_CACHE")
            .or_else(|| base("XDG_CACHE_HOME").map(|dir| dir.join("vcuda")))
            .or_else(|| base("HOME").map(|home| home.join(".cache/vcuda")))
            .unwrap_or_else(|| PathBuf::from("/root/.cache/vcuda"));
        if !folder.join("containerd-2.1").is_dir() {
            bail!("{}: there is no containerd in it; run integration/setup.sh", folder.display());
        }
        Ok(Self(folder))
    }

    /// Folder with `containerd`, its shim and `ctr`.
    pub fn containerd(&self, line: Line) -> PathBuf {
        self.0.join(format!("containerd-{}/usr/bin", line.version()))
    }

    /// runc for this machine.
    pub fn runc(&self) -> PathBuf {
        self.0.join("runc/usr/sbin/runc")
    }

    /// A busybox that needs no library.
    pub fn busybox(&self) -> PathBuf {
        // Debian moved it from /bin when it merged /usr.
        ["busybox/usr/bin/busybox", "busybox/bin/busybox"]
            .map(|file| self.0.join(file))
            .into_iter()
            .find(|file| file.exists())
            .unwrap_or_else(|| self.0.join("busybox/usr/bin/busybox"))
    }

    /// Root file system with the C library of a Debian release.
    pub fn root(&self, release: &str) -> PathBuf {
        self.0.join(format!("root-{release}"))
    }

    /// Folder with `etcd`.
    pub fn etcd(&self) -> PathBuf {
        self.0.join("etcd/usr/bin")
    }

    /// kubectl.
    pub fn kubectl(&self) -> PathBuf {
        self.0.join("kubectl/usr/bin/kubectl")
    }

    /// The real `nvidia-smi` of driver 550, where `vcuda-preload/tests/fetch.sh` has been.
    pub fn nvidia_smi(&self) -> Option<PathBuf> {
        Some(self.0.join("real/driver-550/nvidia-smi")).filter(|file| file.exists())
    }

    /// Folder for what is made from the rest, such as image layers.
    pub fn made(&self) -> PathBuf {
        self.0.join("made")
    }
}

/// Folder with `bin` and `lib` as they are installed on a node: what `VCUDA_DIST` names, else `target/node` of the
/// workspace, where `integration/build.sh` puts them.
pub fn dist() -> Result<PathBuf> {
    let folder = env::var_os("VCUDA_DIST")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/node"), PathBuf::from);
    if !folder.join("bin").is_dir() {
        bail!("{}: vcuda is not built; run integration/build.sh", folder.display());
    }
    Ok(folder.canonicalize()?)
}
