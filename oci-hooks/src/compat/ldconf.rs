//! The folders that `/etc/ld.so.conf` names: where an `ldconfig` would look for libraries, glibc's `elf/ldconfig.c`
//! (`parse_conf`). The loader itself reads the cache that comes of it, and never this file.

use std::{
    ffi::OsStr,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use vcuda_config::plain;

use super::files::Files;

/// The file.
pub const CONF: &str = "/etc/ld.so.conf";

/// Folders that are told; a distribution's have a dozen.
const MAX_FOLDERS: usize = 256;

/// Files that are read.
const MAX_FILES: usize = 256;

/// Folders that are listed for patterns; a distribution has one.
const MAX_LISTS: usize = 32;

/// Most that is read of each.
pub const MAX_BYTES: u64 = 64 << 10;

/// Files that include files.
const MAX_DEPTH: usize = 8;

/// The folders that an `ldconfig` would search before its own, in their order. What cannot be read is left out, as
/// `ldconfig` does.
pub fn folders<F: Files + ?Sized>(files: &F) -> Vec<PathBuf> {
    let mut conf = Conf { files, folders: Vec::new(), read: 0, listed: 0 };
    conf.read(Path::new(CONF), MAX_DEPTH);
    conf.folders
}

struct Conf<'a, F: ?Sized> {
    files: &'a F,
    folders: Vec<PathBuf>,
    read: usize,
    listed: usize,
}

impl<F: Files + ?Sized> Conf<'_, F> {
    fn read(&mut self, path: &Path, depth: usize) {
        if self.read == MAX_FILES || depth == 0 {
            return;
        }
        self.read += 1;
        let Ok(Some(text)) = self.files.read(path, MAX_BYTES) else { return };
        for line in text.split(|byte| *byte == b'\n') {
            let line = line.split(|byte| *byte == b'#').next().unwrap_or_default().trim_ascii();
            if let Some(patterns) = word(line, b"include") {
                for pattern in patterns.split(u8::is_ascii_whitespace).filter(|pattern| !pattern.is_empty()) {
                    self.include(path, Path::new(OsStr::from_bytes(pattern)), depth);
                }
            } else if word(line, b"hwcap").is_none()
                && line.starts_with(b"/")
                && self.folders.len() < MAX_FOLDERS
            {
                // `/usr/lib=libc6`: a type of library, of times long gone.
                let folder = line.split(|byte| *byte == b'=').next().unwrap_or_default().trim_ascii();
                let folder = plain(Path::new(OsStr::from_bytes(folder)));
                if !self.folders.contains(&folder) {
                    self.folders.push(folder);
                }
            }
        }
    }

    /// Reads what a pattern names, which is relative to the file that has it. Wildcards count in its last name only;
    /// no distribution has others.
    fn include(&mut self, from: &Path, pattern: &Path, depth: usize) {
        let pattern = plain(&from.parent().unwrap_or(Path::new("/")).join(pattern));
        let (Some(folder), Some(name)) = (pattern.parent(), pattern.file_name()) else { return };
        if !name.as_bytes().iter().any(|byte| b"*?[".contains(byte)) {
            return self.read(&pattern, depth - 1);
        }
        if self.read == MAX_FILES || self.listed == MAX_LISTS {
            return;
        }
        self.listed += 1;
        let mut names = self.files.list(folder).unwrap_or_default();
        // glob(3) sorts, and leaves hidden ones to patterns that begin with a dot.
        names.sort();
        let hidden = name.as_bytes().starts_with(b".");
        for found in names {
            let bytes = found.as_bytes();
            if matches(name.as_bytes(), bytes) && (hidden || !bytes.starts_with(b".")) {
                self.read(&folder.join(&found), depth - 1);
            }
        }
    }
}

/// What follows the word that begins a line.
fn word<'a>(line: &'a [u8], word: &[u8]) -> Option<&'a [u8]> {
    line.strip_prefix(word).filter(|rest| rest.first().is_some_and(u8::is_ascii_whitespace))
}

/// `*` and `?` as in fnmatch(3); a bracket is taken as any one character.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut in_name) = (0, 0);
    // Where to go on after the last `*` took one character more.
    let mut back = None;
    while in_name < name.len() {
        let (fits, length) = match pattern.get(at) {
            Some(b'*') => {
                back = Some((at + 1, in_name));
                at += 1;
                continue;
            }
            Some(b'?') => (true, 1),
            Some(b'[') => {
                let end = pattern[at + 1..].iter().position(|byte| *byte == b']');
                end.map_or((name[in_name] == b'[', 1), |end| (true, end + 2))
            }
            Some(byte) => (*byte == name[in_name], 1),
            None => (false, 0),
        };
        if fits {
            (at, in_name) = (at + length, in_name + 1);
        } else if let Some((after, taken)) = back {
            (at, in_name) = (after, taken + 1);
            back = Some((after, taken + 1));
        } else {
            return false;
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, ffi::OsString, fs, os::unix::fs::symlink};

    use super::*;
    use crate::{
        compat::{
            elf::Depth,
            files::{Facts, Trouble},
        },
        rootfs::Rootfs,
    };

    fn folders_of(files: &[(&str, &str)]) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let folders = folders(&Rootfs::open(root.path()).unwrap());
        folders.iter().map(|folder| folder.display().to_string()).collect()
    }

    #[test]
    fn folders_come_in_the_order_of_the_file_and_of_the_names_of_what_it_includes() {
        let files = [
            (
                "etc/ld.so.conf",
                "include /etc/ld.so.conf.d/*.conf  # these\n/opt/own\n\n/opt/typed=libc6\nhwcap 0 x\nrelative\n",
            ),
            ("etc/ld.so.conf.d/b.conf", "/opt/b/\n"),
            ("etc/ld.so.conf.d/a.conf", "# none\n/opt/a\n/opt/own\ninclude more/x.list\n"),
            ("etc/ld.so.conf.d/more/x.list", "\t/opt/../opt/x \r\n"),
            ("etc/ld.so.conf.d/readme", "/opt/no"),
            ("etc/ld.so.conf.d/.hidden.conf", "/opt/no"),
        ];
        assert_eq!(folders_of(&files), ["/opt/a", "/opt/own", "/opt/x", "/opt/b", "/opt/typed"]);
        assert!(folders_of(&[]).is_empty());
    }

    #[test]
    fn what_includes_itself_what_is_endless_and_what_is_no_file_come_to_an_end() {
        assert_eq!(folders_of(&[("etc/ld.so.conf", "include ld.so.conf\ninclude *\n/opt/a\n")]), ["/opt/a"]);
        let many: String = (0..2 * MAX_FOLDERS).map(|n| format!("/opt/{n}\n")).collect();
        assert_eq!(folders_of(&[("etc/ld.so.conf", &many)]).len(), MAX_FOLDERS);
        let large = "/opt/a\n".repeat(20_000);
        assert!(folders_of(&[("etc/ld.so.conf", &large)]).is_empty());

        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join("etc").join(name);
        fs::create_dir_all(at("d/folder.conf")).unwrap();
        fs::write(at("ld.so.conf"), "include d/*.conf\n/opt/a").unwrap();
        symlink("loop.conf", at("d/loop.conf")).unwrap();
        symlink("../../../../../../../../etc/hostname", at("d/out.conf")).unwrap();
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, at("d/fifo.conf"), fifo, 0o644.into(), 0).unwrap();
        assert_eq!(folders(&Rootfs::open(root.path()).unwrap()), [PathBuf::from("/opt/a")]);
        fs::remove_file(at("ld.so.conf")).unwrap();
        symlink("ld.so.conf", at("ld.so.conf")).unwrap();
        assert!(folders(&Rootfs::open(root.path()).unwrap()).is_empty());
    }

    /// Files of which it is counted how often a folder is listed.
    struct Counted(Rootfs, Cell<usize>);

    impl Files for Counted {
        fn look(&self, path: &Path, depth: Depth) -> Result<Option<Facts>, Trouble> {
            self.0.look(path, depth)
        }

        fn read(&self, path: &Path, limit: u64) -> Result<Option<Vec<u8>>, Trouble> {
            Files::read(&self.0, path, limit)
        }

        fn list(&self, path: &Path) -> Result<Vec<OsString>, Trouble> {
            self.1.set(self.1.get() + 1);
            Files::list(&self.0, path)
        }

        fn real(&self, path: &Path) -> Result<Option<PathBuf>, Trouble> {
            self.0.real(path)
        }
    }

    #[test]
    fn few_folders_are_listed_however_many_patterns_there_are() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        let patterns = "include /etc/*none*\n".repeat(3_000);
        fs::write(root.path().join("etc/ld.so.conf"), format!("/opt/a\n{patterns}/opt/b\n")).unwrap();
        let files = Counted(Rootfs::open(root.path()).unwrap(), Cell::new(0));
        assert_eq!(folders(&files), ["/opt/a", "/opt/b"].map(PathBuf::from));
        assert_eq!(files.1.get(), MAX_LISTS);
    }

    #[test]
    fn patterns_match_as_the_shells_do() {
        for (pattern, name, fits) in [
            ("*.conf", "a.conf", true),
            ("*.conf", "a.conf.bak", false),
            ("a*b*c", "aXbYbZc", true),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("x[0-9].conf", "x7.conf", true),
            ("*", "", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), fits, "{pattern} {name}");
        }
        // Bounded for any pattern.
        assert!(!matches("*a".repeat(2_000).as_bytes(), "a".repeat(1_999).as_bytes()));
    }
}
