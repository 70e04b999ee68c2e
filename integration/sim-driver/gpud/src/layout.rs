//! Lays a driver root out as an installed driver's: libraries with their links, device nodes, and nvidia-smi where a
//! real one is given.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

use crate::{config::Machine, exports, stamp::Stamp};

/// Character devices of NVIDIA's driver (devices.txt of Linux for 195; the other is assigned when the module loads).
const NVIDIA_MAJOR: u32 = 195;
const UVM_MAJOR: u32 = 510;

/// Folder of the libraries below the driver root.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// What to lay out.
#[derive(Debug)]
pub struct Layout<'a> {
    /// Driver root.
    pub root: &'a Path,
    /// The machine that is simulated.
    pub machine: &'a Machine,
    /// Folder of the two simulated libraries.
    pub libraries: PathBuf,
    /// A real nvidia-smi.
    pub nvidia_smi: Option<&'a Path>,
    /// Regular files stand for device nodes, where those are not permitted.
    pub plain_nodes: bool,
}

/// A library of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// `libcuda.so.1`.
    Cuda,
    /// `libnvidia-ml.so.1`.
    Nvml,
}

impl Layout<'_> {
    /// Lays everything out, over what is there.
    pub fn apply(&self) -> Result<()> {
        self.library(Library::Cuda)?;
        self.library(Library::Nvml)?;
        if let Some(from) = self.nvidia_smi {
            let to = self.root.join("usr/bin/nvidia-smi");
            fs::create_dir_all(to.with_file_name(""))?;
            fs::copy(from, &to).with_context(|| from.display().to_string())?;
            fs::set_permissions(&to, fs::Permissions::from_mode(0o755))?;
        }
        self.nodes()
    }

    /// Lays a library out, and returns its path.
    pub fn library(&self, library: Library) -> Result<PathBuf> {
        let (name, built, table) = match library {
            Library::Cuda => ("libcuda", "libsim_cuda.so", exports::cuda()),
            Library::Nvml => ("libnvidia-ml", "libsim_nvml.so", exports::nvml()),
        };
        let from = [format!("{name}.so").as_str(), built]
            .map(|file| self.libraries.join(file))
            .into_iter()
            .find(|file| file.exists())
            .with_context(|| {
                format!("{}: no {built} there; build sim-cuda and sim-nvml", self.libraries.display())
            })?;
        let (branch, cuda) = (self.machine.branch(), self.machine.cuda());
        let stamp = Stamp { driver: self.machine.driver.clone(), cuda };
        let mut bytes = fs::read(&from).with_context(|| from.display().to_string())?;
        exports::keep(&mut bytes, |symbol| table.has(symbol, branch, cuda))
            .and_then(|()| stamp.apply(&mut bytes))
            .with_context(|| from.display().to_string())?;

        let folder = self.root.join(LIBRARIES);
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let file = format!("{name}.so.{}", self.machine.driver);
        // A library that a process has mapped is never written to.
        let temporary = folder.join(format!(".{file}.new"));
        fs::write(&temporary, bytes).with_context(|| temporary.display().to_string())?;
        fs::set_permissions(&temporary, fs::Permissions::from_mode(0o755))?;
        fs::rename(&temporary, folder.join(&file))?;
        let major = format!("{name}.so.1");
        link(&file, &folder.join(&major))?;
        link(&major, &folder.join(format!("{name}.so")))?;
        Ok(folder.join(file))
    }

    /// Makes the device nodes.
    pub fn nodes(&self) -> Result<()> {
        let folder = self.root.join("dev");
        fs::create_dir_all(&folder)?;
        for gpu in self.machine.facts()? {
            self.node(&folder.join(format!("nvidia{}", gpu.minor)), NVIDIA_MAJOR, gpu.minor)?;
        }
        self.node(&folder.join("nvidiactl"), NVIDIA_MAJOR, 255)?;
        self.node(&folder.join("nvidia-uvm"), UVM_MAJOR, 0)?;
        self.node(&folder.join("nvidia-uvm-tools"), UVM_MAJOR, 1)
    }

    fn node(&self, path: &Path, major: u32, minor: u32) -> Result<()> {
        let _ = fs::remove_file(path);
        if self.plain_nodes {
            fs::write(path, b"").with_context(|| path.display().to_string())?;
        } else {
            let mode = Mode::from_raw_mode(0o666);
            mknodat(CWD, path, FileType::CharacterDevice, mode, makedev(major, minor)).with_context(
                || format!("{}: device nodes need root; --plain-nodes makes files instead", path.display()),
            )?;
        }
        Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o666))?)
    }
}

fn link(target: &str, at: &Path) -> Result<()> {
    let temporary = at.with_extension("new");
    let _ = fs::remove_file(&temporary);
    symlink(target, &temporary).with_context(|| temporary.display().to_string())?;
    Ok(fs::rename(&temporary, at)?)
}
