//! Where the log of a plugin goes that containerd starts, and whose output it throws away: to a file in the node's run
//! folder, which is known only once containerd has passed the node file on.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    mem,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use vcuda_config::Paths;

/// At this size the file is put aside as `.1`, and a new one begun.
const FILE_MAX_BYTES: u64 = 4 << 20;

/// What is kept until the file's place is known.
const WAITING_MAX_BYTES: usize = 64 << 10;

/// What is logged where RUST_LOG says nothing.
pub const DEFAULT: &str = "info";

/// Logs to a file that has no place yet, see [`LogFile::place`].
pub fn to_file() -> LogFile {
    let file = LogFile(Arc::new(Mutex::new(Inner::Waiting(Vec::new()))));
    let writer = file.clone();
    let (filter, complaint) = daemon::filter(DEFAULT);
    let log = tracing_subscriber::fmt().with_env_filter(filter);
    log.with_ansi(false).with_writer(move || writer.clone()).init();
    if let Some(complaint) = complaint {
        tracing::warn!("{complaint}");
    }
    file
}

/// A log file that never grows past 4 MiB, with one predecessor.
#[derive(Clone, Debug)]
pub struct LogFile(Arc<Mutex<Inner>>);

#[derive(Debug)]
enum Inner {
    Waiting(Vec<u8>),
    Placed(Rolling),
}

impl LogFile {
    /// Puts the file into the node's run folder, with what was logged so far. A file that has its place stays there.
    pub fn place(&self, paths: &Paths) -> io::Result<()> {
        let mut inner = self.inner();
        if let Inner::Waiting(waiting) = &mut *inner {
            let waiting = mem::take(waiting);
            let mut file = Rolling::open(&paths.run.join("nri-plugin.log"))?;
            file.write_all(&waiting)?;
            *inner = Inner::Placed(file);
        }
        Ok(())
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Write for LogFile {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match &mut *self.inner() {
            Inner::Placed(file) => file.write(line),
            Inner::Waiting(waiting) => {
                if waiting.len() + line.len() <= WAITING_MAX_BYTES {
                    waiting.extend_from_slice(line);
                }
                Ok(line.len())
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut *self.inner() {
            Inner::Placed(file) => file.flush(),
            Inner::Waiting(_) => Ok(()),
        }
    }
}

#[derive(Debug)]
struct Rolling {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl Rolling {
    fn open(path: &Path) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let file = OpenOptions::new().append(true).create(true).mode(0o640).open(path)?;
        let bytes = file.metadata()?.len();
        Ok(Self { path: path.into(), file, bytes })
    }
}

impl Write for Rolling {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.bytes > FILE_MAX_BYTES {
            let mut aside = self.path.clone().into_os_string();
            aside.push(".1");
            match fs::rename(&self.path, aside) {
                // It was done, and there was no room for a new one; or somebody has removed it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                moved => moved?,
            }
            *self = Self::open(&self.path)?;
        }
        let written = self.file.write(line)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_file_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/plugin.log");
        let mut rolling = Rolling::open(&path).unwrap();
        let line = [b'x'; 64 << 10];
        for _ in 0..200 {
            rolling.write_all(&line).unwrap();
        }
        let sizes: u64 = fs::read_dir(path.parent().unwrap())
            .unwrap()
            .map(|entry| entry.unwrap().metadata().unwrap().len())
            .sum();
        assert!(sizes <= 2 * (FILE_MAX_BYTES + line.len() as u64) && sizes > FILE_MAX_BYTES, "{sizes}");
    }

    /// As when a full disk had no room for the new file after the old one was put aside.
    #[test]
    fn a_log_whose_file_is_gone_goes_on_in_a_new_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plugin.log");
        let mut rolling = Rolling::open(&path).unwrap();
        rolling.bytes = FILE_MAX_BYTES + 1;
        fs::remove_file(&path).unwrap();
        rolling.write_all(b"on\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "on\n");
    }

    #[test]
    fn what_was_logged_before_the_file_had_a_place_is_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = LogFile(Arc::new(Mutex::new(Inner::Waiting(Vec::new()))));
        log.write_all(b"early\n").unwrap();
        let paths = Paths { run: folder.path().join("run"), ..Paths::default() };
        log.place(&paths).unwrap();
        log.write_all(b"late\n").unwrap();
        assert_eq!(fs::read_to_string(paths.run.join("nri-plugin.log")).unwrap(), "early\nlate\n");
    }
}
