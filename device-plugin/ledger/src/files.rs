//! Reading the ledger's files and the kernel's.

use std::{fs, io, path::Path};

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
