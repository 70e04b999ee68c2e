//! Where the log goes. containerd starts its plugins with their output closed, so those write a file.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Mutex,
};

use tracing_subscriber::EnvFilter;

/// At this size the file is put aside as `.1`, and a new one begun.
const FILE_MAX_BYTES: u64 = 4 << 20;

/// Logs to standard error, or to the file given.
pub fn start(filter: &str, file: Option<&Path>) -> io::Result<()> {
    let filter =
        EnvFilter::try_new(filter).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_target(false);
    match file {
        Some(path) => {
            let file = Rolling::open(path)?;
            builder.with_ansi(false).with_writer(Mutex::new(file)).init();
        }
        None => builder.with_ansi(io::IsTerminal::is_terminal(&io::stderr())).with_writer(io::stderr).init(),
    }
    Ok(())
}

/// A file that never grows past [`FILE_MAX_BYTES`].
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
            fs::rename(&self.path, aside)?;
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
}
