//! Whether this node's daemons run, by what they keep in `paths.run` while they do: a lock each, which the kernel lets go
//! of in whatever way a process ends, and the NRI plugin's word that it is in service. Files alone are read and no process
//! is asked, so one that hangs keeps nobody waiting.

use std::{
    env,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant, SystemTime},
};

use rustix::{
    fs::{FlockOperation, OFlags, flock},
    io::Errno,
    process::{Pid, test_kill_process},
};
use thiserror::Error;

use crate::Paths;

/// Bytes of the NRI plugin's word that are read; it is a name, a version and a number.
const MAX_WORD_BYTES: u64 = 4096;

/// How long a new daemon waits for one that is on its way out, or for whoever looks whether one runs: see [`is_held`].
const HANDOVER: Duration = Duration::from_millis(1500);

/// Pause between two attempts to take a lock.
const PAUSE: Duration = Duration::from_millis(20);

/// A daemon's hold on its node, until it is dropped or the process ends.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// Why a daemon has no hold on its node.
#[derive(Debug, Error)]
pub enum LockError {
    /// Another one has it.
    #[error("{lock} is held{}", holder.map(|process| format!(" by process {process}")).unwrap_or_default())]
    Held {
        /// The lock.
        lock: PathBuf,
        /// Its holder's process ID, as it sees itself, where it is known.
        holder: Option<u32>,
    },
    /// The lock cannot be taken.
    #[error("{path}: {source}")]
    Unusable {
        /// File or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl Lock {
    /// Takes the lock `path`, and its folder where there is none. Waits up to 1.5 s for another holder to let go of it.
    ///
    /// # Errors
    ///
    /// Another process holds it all that time, or the file or its folder cannot be used.
    pub fn take(path: &Path) -> Result<Self, LockError> {
        let unusable = |path: &Path, source| LockError::Unusable { path: path.into(), source };
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(|source| unusable(folder, source))?;
        }
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(|source| unusable(path, source))?;
        let until = Instant::now() + HANDOVER;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::WOULDBLOCK) if Instant::now() < until => thread::sleep(PAUSE),
                Err(Errno::WOULDBLOCK) => {
                    return Err(LockError::Held { lock: path.into(), holder: process_id(&mut file) });
                }
                Err(error) => return Err(unusable(path, error.into())),
            }
        }
        // The number is for people; the lock is what counts.
        let written = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
        written.map_err(|source| unusable(path, source))?;
        Ok(Self { _file: file })
    }
}

fn process_id(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    // A number of 32 bits has ten digits.
    file.take(16).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

/// What is wrong where the daemon that asks is not the installed one that the node file names: containers get the hook
/// and the shim of `paths.install`, whichever build they are of.
pub fn installed_elsewhere(paths: &Paths) -> Option<String> {
    elsewhere(&env::current_exe().ok()?, paths)
}

fn elsewhere(program: &Path, paths: &Paths) -> Option<String> {
    // A link to a folder is that folder.
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.into());
    let (program, named) = (real(program), real(&paths.install.join("bin")));
    let folder = program.parent()?;
    (folder != named).then(|| {
        format!(
            "{} runs, but containers get the hook and the shim below {}: start the program that is there, or set \
             paths.install in {} to where this one is installed",
            program.display(),
            paths.install.display(),
            paths.node_file.display(),
        )
    })
}

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

/// Whether a process holds the lock `path`; where there is no such file, none does. To see that, it is shared for a moment,
/// which [`Lock::take`] waits out.
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
    fn node() -> (tempfile::TempDir, Paths, Lock) {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths { run: folder.path().into(), ..Paths::default() };
        let lock = Lock::take(&paths.nri_plugin_lock()).unwrap();
        (folder, paths, lock)
    }

    #[test]
    fn a_daemon_that_is_not_of_the_installed_build_says_which_that_is() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| folder.path().join(path);
        for version in ["1", "2"] {
            fs::create_dir_all(at(version).join("bin")).unwrap();
            fs::write(at(version).join("bin/vcuda-device-plugin"), "").unwrap();
        }
        std::os::unix::fs::symlink("1", at("current")).unwrap();
        let told = |program: &str, install: &str| {
            let paths = Paths { install: at(install), ..Paths::default() };
            elsewhere(&at(program).join("bin/vcuda-device-plugin"), &paths)
        };
        for (program, install) in [("1", "1"), ("current", "1"), ("1", "current")] {
            assert_eq!(told(program, install), None, "{program} {install}");
        }
        for install in ["2", "none"] {
            let said = told("1", install).unwrap();
            assert!(said.starts_with(at("1/bin/vcuda-device-plugin").to_str().unwrap()), "{said}");
            assert!(said.contains(at(install).to_str().unwrap()) && said.contains("paths.install"), "{said}");
        }
    }

    #[test]
    fn a_second_instance_is_told_of_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vcuda/device-plugin.lock");
        assert!(!is_held(&path).unwrap());
        let lock = Lock::take(&path).unwrap();
        let me = std::process::id();
        let error = Lock::take(&path).unwrap_err();
        assert!(matches!(&error, LockError::Held { lock, holder } if *lock == path && *holder == Some(me)));
        assert_eq!(error.to_string(), format!("{} is held by process {me}", path.display()));
        assert!(is_held(&path).unwrap());
        drop(lock);
        assert!(!is_held(&path).unwrap());
        drop(Lock::take(&path).unwrap());

        let below_a_file = path.join("lock");
        let error = Lock::take(&below_a_file).unwrap_err();
        assert!(error.to_string().starts_with(path.to_str().unwrap()), "{error}");
    }

    #[test]
    fn who_looks_whether_a_daemon_runs_keeps_none_from_starting() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        drop(Lock::take(&path).unwrap());
        // In the midst of a look.
        let look = File::open(&path).unwrap();
        flock(&look, FlockOperation::NonBlockingLockShared).unwrap();
        thread::scope(|scope| {
            let daemon = scope.spawn(|| Lock::take(&path));
            thread::sleep(PAUSE);
            drop(look);
            daemon.join().unwrap().unwrap();
        });
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
