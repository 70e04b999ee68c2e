//! One device plugin a node: a second one would take the first one's place with kubelet.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Seek, Write},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

use crate::fatal::Fatal;

/// Held as long as the plugin runs; the kernel lets go of it when the process ends in whatever way.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

/// Where the lock is.
fn path(run: &Path) -> PathBuf {
    run.join("device-plugin.lock")
}

impl Lock {
    /// Takes the lock in the folder `run`.
    pub(crate) fn take(run: &Path) -> Result<Self, Fatal> {
        let path = path(run);
        let unwritable = |source| Fatal::Unwritable { key: "paths.run", path: run.into(), source };
        fs::create_dir_all(run).map_err(unwritable)?;
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(unwritable)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                file.set_len(0).map_err(unwritable)?;
                write!(file, "{}", std::process::id()).map_err(unwritable)?;
                Ok(Self { _file: file })
            }
            Err(Errno::WOULDBLOCK) => Err(Fatal::SecondInstance { lock: path, pid: pid(&mut file) }),
            Err(error) => Err(unwritable(error.into())),
        }
    }
}

/// Process ID of the plugin that runs, as it sees itself; none when none runs.
pub(crate) fn holder(run: &Path) -> Option<String> {
    let mut file = File::open(path(run)).ok()?;
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(Errno::WOULDBLOCK) => Some(pid(&mut file)),
        _ => None,
    }
}

fn pid(file: &mut File) -> String {
    let mut text = String::new();
    // A number has at most 20 digits; the file is ours, but it costs nothing to be careful.
    let read = file.rewind().and_then(|()| file.take(20).read_to_string(&mut text));
    if read.is_ok() && !text.is_empty() { text } else { "unknown".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_instance_is_told_of_the_first() {
        let run = tempfile::tempdir().unwrap();
        let run = run.path().join("vcuda");
        assert_eq!(holder(&run), None);
        let lock = Lock::take(&run).unwrap();
        let me = std::process::id().to_string();
        let error = Lock::take(&run).unwrap_err();
        assert!(error.to_string().contains(&me), "{error}");
        assert_eq!(holder(&run), Some(me));
        drop(lock);
        assert_eq!(holder(&run), None);
        Lock::take(&run).unwrap();
    }
}
