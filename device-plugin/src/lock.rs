//! One device plugin a node: a second one would take the first one's place with kubelet.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Seek, Write},
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use vcuda_config::Paths;

use crate::fatal::Fatal;

/// Held as long as the plugin runs; the kernel lets go of it when the process ends in whatever way.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock of the node with these places.
    pub(crate) fn take(paths: &Paths) -> Result<Self, Fatal> {
        let (run, path) = (&paths.run, paths.device_plugin_lock());
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

fn pid(file: &mut File) -> String {
    let mut text = String::new();
    // A number has at most 20 digits; the file is ours, but it costs nothing to be careful.
    let read = file.rewind().and_then(|()| file.take(20).read_to_string(&mut text));
    if read.is_ok() && !text.is_empty() { text } else { "unknown".into() }
}

#[cfg(test)]
mod tests {
    use vcuda_config::daemons::is_held;

    use super::*;

    #[test]
    fn a_second_instance_is_told_of_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths { run: folder.path().join("vcuda"), ..Paths::default() };
        let held = || is_held(&paths.device_plugin_lock()).unwrap();
        assert!(!held());
        let lock = Lock::take(&paths).unwrap();
        let error = Lock::take(&paths).unwrap_err();
        assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
        assert!(held());
        drop(lock);
        assert!(!held());
        Lock::take(&paths).unwrap();
    }
}
