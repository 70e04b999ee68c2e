//! `/etc/ld.so.preload` of a container with a share: the shim first, then what the image has there. Our file is
//! mounted over the image's, so that is read before, and its entries are added to ours.

use std::{
    collections::BTreeSet,
    fs::OpenOptions,
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use ledger::ShareFolder;
use region::place;
use rustix::fs::OFlags;
use thiserror::Error;

use crate::rootfs::{Rootfs, RootfsError};

/// An honest one has a line or two.
const MAX_BYTES: u64 = 64 << 10;

/// Libraries that an image may preload.
const MAX_ENTRIES: usize = 64;

/// `PATH_MAX`.
const MAX_ENTRY_BYTES: usize = 4096;

/// Why the image's list cannot be kept. Dropping it silently would change what the image does.
#[derive(Debug, Error)]
pub enum PreloadError {
    /// It cannot be read.
    #[error("the image's own /etc/ld.so.preload cannot be kept: {0}")]
    Image(#[from] RootfsError),
    /// It is no list that a loader could use.
    #[error("{} in the image: {reason}; remove or correct it in the image", place::LD_SO_PRELOAD)]
    Malformed {
        /// What is wrong.
        reason: &'static str,
    },
    /// The node's file cannot be written.
    #[error("{path}: {source}; look at this node's disk")]
    Node {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The list of a share whose image has its own at `rootfs`, where ours is not mounted yet. `/etc` may be a volume; then
/// the list on it is what the container would have had.
pub fn compose(rootfs: &Rootfs) -> Result<String, PreloadError> {
    let image = rootfs.read(Path::new(place::LD_SO_PRELOAD), MAX_BYTES)?.unwrap_or_default();
    let mut text = format!("{}\n", place::SHIM);
    for entry in entries(&image)? {
        text.push_str(entry);
        text.push('\n');
    }
    Ok(text)
}

/// Makes the list that of the share in `folder`, whose file is mounted in the container: in place, so that the mount
/// shows it.
pub fn write(list: &str, folder: &ShareFolder) -> Result<(), PreloadError> {
    let path = folder.preload();
    write_in_place(&path, list.as_bytes()).map_err(|source| PreloadError::Node { path, source })
}

/// The libraries named in a list, as glibc reads it (`do_preload` in `elf/rtld.c`): separated by white space and
/// colons, `#` to the end of a line is a comment. Each once, the shim left out.
fn entries(list: &[u8]) -> Result<Vec<&str>, PreloadError> {
    let malformed = |reason| PreloadError::Malformed { reason };
    let text = std::str::from_utf8(list).map_err(|_| malformed("it is no text"))?;
    let mut seen = BTreeSet::from([place::SHIM]);
    let mut entries = Vec::new();
    for line in text.split('\n') {
        let line = line.split('#').next().unwrap_or_default();
        for entry in line.split([' ', '\t', ':', '\r']).filter(|entry| !entry.is_empty()) {
            if entry.len() > MAX_ENTRY_BYTES {
                return Err(malformed("it names a library whose name is longer than a path can be"));
            }
            if entry.chars().any(char::is_control) {
                return Err(malformed("it holds control characters"));
            }
            if seen.insert(entry) {
                entries.push(entry);
            }
            if entries.len() > MAX_ENTRIES {
                return Err(malformed("it names more libraries than any"));
            }
        }
    }
    Ok(entries)
}

fn write_in_place(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let nofollow = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or(0);
    let file = OpenOptions::new().write(true).custom_flags(nofollow).open(path)?;
    file.write_all_at(bytes, 0)?;
    file.set_len(bytes.len() as u64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_list_is_read_as_glibc_reads_it() {
        let list = format!("# comment\n/a.so /b.so:libc.so\t/d.so#x\n\n{}\n/a.so\n/e.so", place::SHIM);
        assert_eq!(entries(list.as_bytes()).unwrap(), ["/a.so", "/b.so", "libc.so", "/d.so", "/e.so"]);
        assert!(entries(b"").unwrap().is_empty());
    }

    #[test]
    fn a_list_that_is_none_is_refused() {
        let many = (0..=MAX_ENTRIES).map(|n| format!("/{n}.so ")).collect::<String>();
        let long = "x".repeat(MAX_ENTRY_BYTES + 1);
        for bad in [&b"\xff\xfe"[..], b"/a\0b", b"/a\x1b[31m", many.as_bytes(), long.as_bytes()] {
            let error = entries(bad).unwrap_err().to_string();
            assert!(error.contains("in the image"), "{error}");
        }
    }

    #[test]
    fn a_file_is_rewritten_in_place_whatever_its_length_was() {
        use std::os::unix::fs::MetadataExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("list");
        std::fs::write(&path, "a much longer list than the next\n").unwrap();
        let before = std::fs::metadata(&path).unwrap().ino();
        write_in_place(&path, b"short\n").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"short\n");
        assert_eq!(std::fs::metadata(&path).unwrap().ino(), before);
    }

    proptest! {
        #[test]
        fn any_list_gives_sane_lines_or_none(list in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(entries) = entries(&list) {
                for entry in entries {
                    prop_assert!(!entry.is_empty() && !entry.contains(['\n', ' ', ':', '#', '\0']));
                }
            }
        }
    }
}
