//! Files that survive being killed: whole or absent, never half.

use std::{
    fs::{self, File, Permissions},
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::Path,
};

/// Writes `bytes` to `path` so that a reader, or a restart after a crash, sees the old content or the new one.
/// The file and its folder are synced.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let mut file = tempfile::Builder::new().prefix(".").suffix(".tmp").tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.as_file().set_permissions(Permissions::from_mode(mode))?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    File::open(folder)?.sync_all()
}

/// Reads at most `limit` bytes; a larger file is an error, not a reason to run out of memory.
pub(crate) fn read_bounded(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    if fs::metadata(path)?.len() > limit {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("larger than {limit} bytes")));
    }
    fs::read(path)
}

/// The kernel's name for this boot of the machine: what ran under another one runs no longer.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}
