//! Room that a container can fill without harm. What a container writes lies on the node, so it gets a file system of
//! its own: small, in memory, and gone with the share. On the node's disk a container could make the file as large as
//! the disk is.

use std::{ffi::CString, fs, io, path::Path};

use rustix::{
    io::Errno,
    mount::{MountFlags, UnmountFlags, mount, unmount},
    process::geteuid,
};

/// Name of the file system's folder in a share's folder.
pub(crate) const FOLDER: &str = "writable";

/// Bytes that a container can write, and files: the usage file, and the one that it is renamed from.
const BYTES: u64 = 3 << 20;
const INODES: u32 = 4;

/// A process that writes to a part of its usage file for which there is no room ends with SIGBUS.
const _: () = assert!(region::USAGE_BYTES <= BYTES);

/// Makes the folder at `path` and mounts a file system of [`BYTES`] there.
///
/// A process that is not root cannot, and could not serve a container runtime either: it gets a plain folder.
pub(crate) fn make(path: &Path) -> io::Result<()> {
    fs::create_dir(path)?;
    let options = CString::new(format!("size={BYTES},nr_inodes={INODES},mode=0755"))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    match mount("vcuda", path, "tmpfs", flags, options.as_c_str()) {
        Err(Errno::PERM) if !geteuid().is_root() => Ok(()),
        Err(error) => Err(io::Error::new(
            io::Error::from(error).kind(),
            format!(
                "no file system can be mounted for what the container writes: {error}; vcuda-nri-plugin needs CAP_SYS_ADMIN in the node's mount namespace"
            ),
        )),
        Ok(()) => Ok(()),
    }
}

/// Removes a share's folder with the file system in it. Containers that still have it keep it until they end.
pub(crate) fn remove_share(folder: &Path) -> io::Result<()> {
    match unmount(folder.join(FOLDER), UnmountFlags::DETACH) {
        // None is mounted; or there is no folder, or no right to, of which the removal tells.
        Err(Errno::INVAL | Errno::NOENT | Errno::NOTDIR | Errno::PERM) | Ok(()) => {}
        Err(error) => return Err(error.into()),
    }
    fs::remove_dir_all(folder)
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::unix::fs::FileExt};

    use super::*;

    /// Needs root: who is not gets a plain folder.
    #[test]
    #[ignore = "needs root"]
    fn what_is_written_there_ends_at_its_size_and_goes_with_the_folder() {
        let shares = tempfile::tempdir().unwrap();
        let share = shares.path().join("uid_main");
        fs::create_dir(&share).unwrap();
        make(&share.join(FOLDER)).unwrap();
        let usage = share.join(FOLDER).join("usage");
        region::Usage::create(&usage).unwrap();
        let file = File::options().write(true).open(&usage).unwrap();
        let page = [1; 4096];
        let written = (0..1 << 20).take_while(|n| file.write_all_at(&page, n * 4096).is_ok()).count() as u64;
        assert!(written <= BYTES / 4096, "{written} pages fit");
        assert!(written >= region::USAGE_BYTES / 4096, "all of the usage file, and not {written} pages");
        assert!((0..100).any(|n| File::create(share.join(FOLDER).join(n.to_string())).is_err()));

        // Renamed first, as the ledger does, and open all the while, as containers have it.
        let retired = shares.path().join(".uid.0.old");
        fs::rename(&share, &retired).unwrap();
        remove_share(&retired).unwrap();
        assert!(!retired.exists());
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains(shares.path().to_str().unwrap()), "{mounts}");
        file.write_all_at(&page, 0).unwrap();
    }

    #[test]
    fn a_folder_without_a_file_system_is_removed_like_any_other() {
        let shares = tempfile::tempdir().unwrap();
        let share = shares.path().join("uid_main");
        fs::create_dir_all(share.join(FOLDER)).unwrap();
        remove_share(&share).unwrap();
        assert!(!share.exists());
        assert_eq!(remove_share(&share).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
