//! Specification files on disk: read as runtimes read them, written so that a runtime which looks at any moment,
//! or after any crash, sees the old file or the new one and nothing between.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use thiserror::Error;
use vcuda_config::write_atomically;

use crate::spec::Spec;

/// The most that is read of a file, in bytes. NVIDIA's, for a node with 8 GPUs, has 30 KiB.
const MAX_BYTES: u64 = 4 << 20;

/// Runtimes and people may read it; it holds nothing secret.
const MODE: u32 = 0o644;

/// Why a specification file cannot be used.
#[derive(Debug, Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("{path}: cannot be read: {source}; check the path and its permissions")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is none.
    #[error("{path}: {reason}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// It cannot be written.
    #[error(
        "{path}: cannot be written: {source}; see that the folder is on a file system with space and can be written by root"
    )]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl FileError {
    /// What is wrong, without the file's name.
    pub fn reason(&self) -> String {
        match self {
            Self::Read { source, .. } => {
                format!("cannot be read: {source}; check the path and its permissions")
            }
            Self::Write { source, .. } => format!("cannot be written: {source}"),
            Self::Invalid { reason, .. } => reason.clone(),
        }
    }
}

/// Whether runtimes take a file of this name for a specification.
pub fn is_spec_name(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json" || extension == "yaml")
}

/// Reads the specification at `path`. It is well formed then; whether it keeps the rules is another question.
pub fn read(path: &Path) -> Result<Spec, FileError> {
    let invalid = |reason: String| FileError::Invalid { path: path.into(), reason };
    let text = String::from_utf8(read_bytes(path)?).map_err(|_| invalid("it is no UTF-8 text".into()))?;
    // JSON is YAML, and runtimes read both as YAML: a number is a text where a text is expected.
    serde_saphyr::from_str(&text).map_err(|error| {
        // The first line is the sentence; a picture of the place follows.
        let text = error.to_string();
        let sentence = text.lines().next().unwrap_or_default();
        invalid(sentence.trim_start_matches("error: ").into())
    })
}

fn read_bytes(path: &Path) -> Result<Vec<u8>, FileError> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|source| FileError::Read { path: path.into(), source })?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(FileError::Invalid {
            path: path.into(),
            reason: format!("it is larger than {MAX_BYTES} bytes"),
        });
    }
    Ok(bytes)
}

/// Makes `path` hold `text`, and creates its folder where it is missing. Says whether anything was written: a
/// file that holds it already, readable by all, is left alone.
pub fn write(path: &Path, text: &str) -> Result<bool, FileError> {
    let error = |source| FileError::Write { path: path.into(), source };
    if holds(path, text) {
        return Ok(false);
    }
    let folder = path.parent().ok_or_else(|| error(io::ErrorKind::InvalidInput.into()))?;
    fs::create_dir_all(folder).map_err(error)?;
    write_atomically(path, text.as_bytes(), MODE).map_err(error)?;
    Ok(true)
}

fn holds(path: &Path, text: &str) -> bool {
    let readable =
        |metadata: fs::Metadata| metadata.is_file() && metadata.permissions().mode() & 0o777 == MODE;
    fs::symlink_metadata(path).is_ok_and(readable)
        && read_bytes(path).is_ok_and(|bytes| bytes == text.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::{
        fs::Permissions,
        os::unix::fs::{MetadataExt, symlink},
    };

    use super::*;

    #[test]
    fn a_written_file_is_readable_by_all_and_alone_in_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cdi/spec.json");
        assert!(write(&path, "{}").unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), "{}");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, MODE);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn what_is_there_already_is_not_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("spec.json");
        write(&path, "{}").unwrap();
        let before = fs::metadata(&path).unwrap().ino();
        assert!(!write(&path, "{}").unwrap());
        assert_eq!(fs::metadata(&path).unwrap().ino(), before);
        assert!(write(&path, "[]").unwrap());
        // A file that nobody but root may read, as the CDI library writes them.
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert!(write(&path, "[]").unwrap());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, MODE);
    }

    #[test]
    fn a_link_is_replaced_and_its_target_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (target, path) = (folder.path().join("target"), folder.path().join("spec.json"));
        fs::write(&target, "other").unwrap();
        symlink(&target, &path).unwrap();
        assert!(write(&path, "{}").unwrap());
        assert_eq!(fs::read_to_string(&target).unwrap(), "other");
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
    }

    #[test]
    fn a_folder_that_cannot_be_had_is_named() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        let error = write(&folder.path().join("file/spec.json"), "{}").unwrap_err().to_string();
        assert!(error.contains("file/spec.json"), "{error}");
    }

    #[test]
    fn yaml_and_json_are_read_alike_and_mistakes_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let (json, yaml) = (folder.path().join("a.json"), folder.path().join("a.yaml"));
        fs::write(&json, r#"{"cdiVersion":"0.3.0","kind":"v/c","devices":[{"name":"0"}]}"#).unwrap();
        fs::write(&yaml, "cdiVersion: 0.3.0\nkind: v/c\ndevices:\n- name: \"0\"\n").unwrap();
        assert_eq!(read(&json).unwrap(), read(&yaml).unwrap());

        for (name, text, reason) in [
            ("b.json", r#"{"cdiVersion":"0.3.0","kind":"v/c","device":[]}"#, "device"),
            ("b.yaml", "cdiVersion: 0.3.0\nkind: v/c\ncontainerEdit: {}\n", "containerEdit"),
            ("c.json", r#"{"cdiVersion":"0.3.0"}"#, "kind"),
            ("d.json", r#"{"kind":"v/c","kind":"v/c"}"#, "kind"),
            ("e.yaml", "\u{0}", "e.yaml"),
        ] {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            let error = read(&path).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_file_of_any_size_takes_bounded_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.yaml");
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("larger"));
    }
}
