//! Whether this node's daemons run, by what they keep in `paths.run` while they do: a lock each, which the kernel lets go
//! of in whatever way a process ends, and the NRI plugin's word that it is in service. Files alone are read and no process
//! is asked, so one that hangs keeps nobody waiting.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::SystemTime,
};

use rustix::{
    fs::{FlockOperation, OFlags, flock},
    io::Errno,
    process::{Pid, test_kill_process},
};

use crate::Paths;

/// Bytes of the NRI plugin's word that are read; it is a name, a version and a number.
const MAX_WORD_BYTES: u64 = 4096;

/// How the NRI plugin of a node stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NriPlugin {
    /// None runs.
    NotRunning,
    /// One runs, and containerd does not ask it.
    NotConnected,
    /// containerd asks it for each container that it creates.
    Connected {
        /// The runtime, with its version.
        runtime: String,
        /// From when on.
        since: SystemTime,
    },
}

impl NriPlugin {
    /// The plugin of the node with these places.
    ///
    /// # Errors
    ///
    /// One of its files cannot be read, which the error names.
    pub fn of(paths: &Paths) -> io::Result<Self> {
        if !is_held(&paths.nri_plugin_lock())? {
            // Whatever a killed one has left.
            return Ok(Self::NotRunning);
        }
        let path = paths.nri_plugin_ready();
        let Some(file) = open(&path)? else { return Ok(Self::NotConnected) };
        let mut text = String::new();
        let read = || {
            let since = file.metadata()?.modified()?;
            file.take(MAX_WORD_BYTES).read_to_string(&mut text)?;
            Ok(since)
        };
        let since = read().map_err(|error| named(&path, &error))?;
        // The lock may be a successor's, who has not taken the file away yet.
        Ok(match text.trim().split_once('\n') {
            Some((runtime, process)) if runs(process) => Self::Connected { runtime: runtime.into(), since },
            _ => Self::NotConnected,
        })
    }
}

/// Whether a process holds the lock `path`; where there is no such file, none does.
///
/// # Errors
///
/// That cannot be told, such as by a user who may not open it.
pub fn is_held(path: &Path) -> io::Result<bool> {
    let Some(file) = open(path)? else { return Ok(false) };
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(false),
        Err(Errno::WOULDBLOCK) => Ok(true),
        Err(error) => Err(named(path, &error.into())),
    }
}

/// A regular file, if there is one; opening anything else, such as a FIFO, keeps nobody waiting.
fn open(path: &Path) -> io::Result<Option<File>> {
    let nonblocking = i32::try_from(OFlags::NONBLOCK.bits()).map_err(io::Error::other)?;
    let file = match OpenOptions::new().read(true).custom_flags(nonblocking).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(named(path, &error)),
    };
    match file.metadata() {
        Ok(metadata) if metadata.is_file() => Ok(Some(file)),
        Ok(_) => Err(named(path, &io::Error::new(io::ErrorKind::InvalidData, "no regular file"))),
        Err(error) => Err(named(path, &error)),
    }
}

fn runs(process: &str) -> bool {
    let process = process.parse().ok().and_then(Pid::from_raw);
    process.is_some_and(|process| matches!(test_kill_process(process), Ok(()) | Err(Errno::PERM)))
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    /// Places below a folder, with a daemon's lock held for as long as the file is.
    fn node() -> (tempfile::TempDir, Paths, File) {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths { run: folder.path().into(), ..Paths::default() };
        let lock = File::create(paths.nri_plugin_lock()).unwrap();
        flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
        (folder, paths, lock)
    }

    #[test]
    fn a_lock_that_nobody_holds_belongs_to_nobody_whatever_was_left() {
        let (_folder, paths, lock) = node();
        fs::write(paths.nri_plugin_ready(), format!("containerd v2.1.9\n{}\n", std::process::id())).unwrap();
        let NriPlugin::Connected { runtime, since } = NriPlugin::of(&paths).unwrap() else {
            panic!("it is connected")
        };
        assert_eq!(runtime, "containerd v2.1.9");
        assert_eq!(since, fs::metadata(paths.nri_plugin_ready()).unwrap().modified().unwrap());
        drop(lock);
        assert_eq!(NriPlugin::of(&paths).unwrap(), NriPlugin::NotRunning);
        fs::remove_file(paths.nri_plugin_lock()).unwrap();
        assert_eq!(NriPlugin::of(&paths).unwrap(), NriPlugin::NotRunning, "before it ever ran");
    }

    #[test]
    fn one_that_runs_and_has_no_word_of_its_own_is_not_connected() {
        let (_folder, paths, _lock) = node();
        assert_eq!(NriPlugin::of(&paths).unwrap(), NriPlugin::NotConnected);
        // Half written; a number that is none; a process that cannot be (PID_MAX_LIMIT is 4194304).
        for word in ["", "containerd v2.1.9", "containerd v2.1.9\nx\n", "containerd v2.1.9\n2147483647\n"] {
            fs::write(paths.nri_plugin_ready(), word).unwrap();
            assert_eq!(NriPlugin::of(&paths).unwrap(), NriPlugin::NotConnected, "{word:?}");
        }
    }

    #[test]
    fn what_is_no_file_of_a_daemon_is_an_error_that_names_it_and_keeps_nobody_waiting() {
        let (_folder, paths, _lock) = node();
        fs::write(paths.nri_plugin_ready(), [0xff; 64]).unwrap();
        assert!(NriPlugin::of(&paths).unwrap_err().to_string().contains("nri-plugin.ready"));
        fs::write(paths.nri_plugin_ready(), "x".repeat(1 << 20)).unwrap();
        assert_eq!(NriPlugin::of(&paths).unwrap(), NriPlugin::NotConnected);
        for path in [paths.nri_plugin_ready(), paths.nri_plugin_lock()] {
            fs::remove_file(&path).unwrap();
            mknodat(CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
            let error = NriPlugin::of(&paths).unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()) && error.contains("no regular file"), "{error}");
        }
    }
}
