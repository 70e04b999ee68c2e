//! Files that survive being killed: a reader, or a restart after a crash, finds the old content or the new one.

use std::{
    fs::{self, File, Permissions},
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::Path,
    time::{Duration, SystemTime},
};

/// The ending of a file that is yet to get its name; no runtime takes it for a CDI specification.
const ENDING: &str = ".tmp";

/// How long a file is written at most. An older one is what a killed process has left.
const WRITING: Duration = Duration::from_secs(60);

/// Puts a file with `bytes` and the permissions `mode` at `path`, in one step, and syncs it and its folder to disk. What
/// processes that were killed while they did the same have left in the folder is cleared away.
///
/// # Errors
///
/// It cannot be written; then what was at `path` is there still.
pub fn write_atomically(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let prefix = format!(".{}.", name.to_string_lossy());
    // First: on a full disk it makes room.
    clear(folder, &prefix);
    let mut file = tempfile::Builder::new().prefix(&prefix).suffix(ENDING).tempfile_in(folder)?;
    file.write_all(bytes)?;
    // Before the rename: nobody must see a file that it, or `cat`, may not read.
    file.as_file().set_permissions(Permissions::from_mode(mode))?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    File::open(folder)?.sync_all()
}

/// Removes files of such a name that nobody writes any more. What cannot be removed holds nothing.
fn clear(folder: &Path, prefix: &str) {
    let now = SystemTime::now();
    // The clock may have been set back since.
    let apart = |then: SystemTime| now.duration_since(then).unwrap_or_else(|error| error.duration());
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let is_ours =
            entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix) && name.ends_with(ENDING));
        if is_ours && entry.metadata().and_then(|it| it.modified()).is_ok_and(|then| apart(then) > WRITING) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_killed_writers_left_goes_with_the_next_write_and_nothing_else_does() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let made = |name: &str, modified: SystemTime| {
            fs::write(at(name), "half").unwrap();
            File::options().write(true).open(at(name)).unwrap().set_modified(modified).unwrap();
        };
        let now = SystemTime::now();
        let (old, future) = (now - WRITING * 2, now + Duration::from_secs(86_400));
        made(".inventory.json.aB3.tmp", old);
        made(".inventory.json.set-back.tmp", future);
        // Another process writes it now, and what is not ours.
        made(".inventory.json.now.tmp", now);
        for other in [".other.json.x.tmp", "inventory.json.x.tmp", ".inventory.json.x"] {
            made(other, old);
        }
        write_atomically(&at("inventory.json"), b"whole", 0o600).unwrap();
        let mut names: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(
            names,
            [
                ".inventory.json.now.tmp",
                ".inventory.json.x",
                ".other.json.x.tmp",
                "inventory.json",
                "inventory.json.x.tmp"
            ]
        );
        assert_eq!(fs::read(at("inventory.json")).unwrap(), b"whole");
        assert_eq!(fs::metadata(at("inventory.json")).unwrap().permissions().mode() & 0o7777, 0o600);
    }

    #[test]
    fn what_cannot_be_written_leaves_what_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::create_dir(&path).unwrap();
        assert!(write_atomically(&path, b"x", 0o600).is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "and nothing beside it");
        assert!(write_atomically(Path::new("/"), b"x", 0o600).is_err());
    }
}
