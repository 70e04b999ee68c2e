//! What the driver holds a share's container to, beside the shim: `floor.json` in the share's folder, written by the
//! device plugin, which alone talks to the driver. The folder of a share is made anew with each container, so a floor
//! never outlives the container that it is about.

use std::{
    collections::BTreeMap,
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
};

use serde::{Deserialize, Serialize};
use vcuda_config::GpuUuid;

use crate::{ShareFolder, files};

const VERSION: u32 = 1;

/// A path and a few numbers.
const MAX_BYTES: u64 = 64 << 10;

/// The driver's floor under one share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Floor {
    version: u32,
    /// The container that is held, by its ID in the runtime.
    pub container: String,
    /// Folder of its cgroup, version 2.
    pub cgroup: PathBuf,
    /// What it is held to, in bytes by GPU.
    pub bytes: BTreeMap<GpuUuid, u64>,
}

impl Floor {
    /// The floor under `container`.
    pub fn new(container: String, cgroup: PathBuf, bytes: BTreeMap<GpuUuid, u64>) -> Self {
        Self { version: VERSION, container, cgroup, bytes }
    }

    /// The floor under `container`, whose share has this folder; none where none is on record.
    pub fn load(folder: &ShareFolder, container: &str) -> Option<Self> {
        let bytes = files::read_bounded(&folder.floor(), MAX_BYTES).ok()?;
        let floor: Self = serde_json::from_slice(&bytes).ok()?;
        (floor.version == VERSION && floor.container == container).then_some(floor)
    }

    /// Writes it down: whole or not at all for any reader and any kill. It is not synced, for it ends with the boot.
    ///
    /// # Errors
    ///
    /// The folder is gone, since its share is, or cannot be written.
    pub fn store(&self, folder: &ShareFolder) -> io::Result<()> {
        let temporary = folder.path().join(".floor.json.new");
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600).open(&temporary)?.write_all(&text)?;
        fs::rename(&temporary, folder.floor())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_floor_is_about_one_container() {
        let shares = tempfile::tempdir().unwrap();
        let folder = ShareFolder::new(shares.path(), &"7f3c_main".parse().unwrap());
        let bytes = BTreeMap::from([(GpuUuid::from_bytes([1; 16]), 8 << 30)]);
        let floor = Floor::new("c0ffee".into(), "/sys/fs/cgroup/kubepods/c0ffee".into(), bytes);
        assert!(floor.store(&folder).is_err(), "the share is gone");
        fs::create_dir(folder.path()).unwrap();
        assert_eq!(Floor::load(&folder, "c0ffee"), None);
        floor.store(&folder).unwrap();
        assert_eq!(Floor::load(&folder, "c0ffee"), Some(floor));
        assert_eq!(Floor::load(&folder, "other"), None, "a container that was restarted is not held yet");
        fs::write(folder.floor(), "{}").unwrap();
        assert_eq!(Floor::load(&folder, "c0ffee"), None);
    }
}
