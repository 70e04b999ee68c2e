//! Where a container's dynamic loader would find a library, told from the image's files: environment, RPATH and
//! RUNPATH, `ld.so.cache`, default folders, in glibc's order (`ld.so(8)`). Nothing is loaded.

use std::{
    cell::OnceCell,
    ffi::OsStr,
    os::unix::ffi::OsStrExt,
    path::{Component, Path, PathBuf},
};

use super::{
    elf::{Depth, Elf},
    files::{Facts, Files, Trouble},
};
use crate::ldcache::cache::{self, Cache};

/// Where glibc's cache is.
pub const CACHE: &str = "/etc/ld.so.cache";

/// Folders that loaders search without being told: Debian's multiarch ones, then those of other distributions.
fn default_folders(machine: u16) -> &'static [&'static str] {
    use goblin::elf::header::EM_AARCH64;
    if machine == EM_AARCH64 {
        &["/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"]
    } else {
        &["/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"]
    }
}

/// Folders that one search path may name; more is no honest one.
const MAX_FOLDERS: usize = 256;

/// The loader of one image.
pub struct Loader<'a, F: ?Sized> {
    files: &'a F,
    machine: u16,
    library_path: Vec<PathBuf>,
    cache: OnceCell<Result<Cache, Trouble>>,
}

/// A library that the loader would take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Where it is.
    pub path: PathBuf,
    /// What made the loader look there.
    pub by: By,
    /// What it is.
    pub facts: Facts,
}

/// What makes a loader look in a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// `DT_RPATH` of who asks.
    Rpath,
    /// `LD_LIBRARY_PATH` of the container.
    LibraryPath,
    /// `DT_RUNPATH` of who asks.
    Runpath,
    /// `ld.so.cache`.
    Cache,
    /// The loader's own folders.
    Default,
}

impl<'a, F: Files + ?Sized> Loader<'a, F> {
    /// The loader of programs for `machine` (`e_machine`), with this `LD_LIBRARY_PATH`.
    pub fn new(files: &'a F, machine: u16, library_path: &str) -> Self {
        let library_path = folders(library_path, [':', ';'], None);
        Self { files, machine, library_path, cache: OnceCell::new() }
    }

    /// The file that is taken for `name` when `asker` asks: the file at that path, or the first that fits.
    ///
    /// # Errors
    /// A file on the way cannot be read.
    pub fn find(&self, name: &str, asker: Option<(&Path, &Elf)>) -> Result<Option<Found>, Trouble> {
        let path_of = |tag: fn(&Elf) -> Option<&String>| {
            asker
                .and_then(|(path, elf)| Some((tag(elf)?, path)))
                .map(|(text, path)| folders(text, [':', ':'], path.parent()))
                .unwrap_or_default()
        };
        let runpath = path_of(|elf| elf.runpath.as_ref());
        // RUNPATH makes the loader forget RPATH.
        let rpath = if runpath.is_empty() { path_of(|elf| elf.rpath.as_ref()) } else { Vec::new() };
        for (by, folders) in
            [(By::Rpath, &rpath), (By::LibraryPath, &self.library_path), (By::Runpath, &runpath)]
        {
            for folder in folders {
                if let Some(found) = self.take(&folder.join(name), by)? {
                    return Ok(Some(found));
                }
            }
        }
        // An unreadable cache is an empty one to the loader.
        if let Ok(cache) = self.load_cache() {
            for path in cache.find(name.as_bytes()) {
                if let Some(found) = self.take(Path::new(OsStr::from_bytes(path)), By::Cache)? {
                    return Ok(Some(found));
                }
            }
        }
        for folder in default_folders(self.machine) {
            if let Some(found) = self.take(&Path::new(folder).join(name), By::Default)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Why the image's `ld.so.cache` cannot be used, if it cannot.
    pub fn cache_trouble(&self) -> Option<&Trouble> {
        self.load_cache().as_ref().err()
    }

    fn load_cache(&self) -> &Result<Cache, Trouble> {
        self.cache.get_or_init(|| match self.files.read(Path::new(CACHE), cache::MAX_BYTES)? {
            Some(bytes) => Cache::parse(&bytes).ok_or_else(|| Trouble("it is none, or cut off".into())),
            None => Ok(Cache::default()),
        })
    }

    fn take(&self, path: &Path, by: By) -> Result<Option<Found>, Trouble> {
        let Some(facts) = self.files.look(path, Depth::Linking)? else { return Ok(None) };
        // Of another machine or broken: the loader goes on, and so do we.
        let fits = facts.elf().is_some_and(|elf| elf.machine == self.machine && elf.bits == 64);
        Ok(fits.then(|| Found { path: path.to_owned(), by, facts }))
    }
}

/// The absolute folders of a search path; `$ORIGIN` is `origin`. Relative ones depend on the process's working
/// folder and are left out.
fn folders(text: &str, separators: [char; 2], origin: Option<&Path>) -> Vec<PathBuf> {
    text.split(separators)
        .take(MAX_FOLDERS)
        .filter_map(|folder| {
            let after = folder.strip_prefix("$ORIGIN").or_else(|| folder.strip_prefix("${ORIGIN}"));
            match (after, origin) {
                (Some(rest), Some(origin)) => Some(plain(&origin.join(rest.trim_start_matches('/')))),
                (Some(_), None) => None,
                (None, _) => folder.starts_with('/').then(|| plain(Path::new(folder))),
            }
        })
        .collect()
}

/// `path` without `.` and `..`, so that files can be looked up below a root. Where a folder before `..` is a
/// symlink the kernel would go elsewhere; no search path seen relies on that.
pub fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(name) => plain.push(name),
            Component::ParentDir => {
                plain.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn search_paths_become_folders_of_the_image() {
        let origin = Path::new("/opt/app/lib");
        let text = "$ORIGIN:$ORIGIN/../../nvidia/lib:${ORIGIN}/x:relative::/usr/./lib:/../../etc";
        assert_eq!(
            folders(text, [':', ':'], Some(origin)),
            ["/opt/app/lib", "/opt/nvidia/lib", "/opt/app/lib/x", "/usr/lib", "/etc"].map(PathBuf::from)
        );
        assert_eq!(folders("$ORIGIN:/a;/b", [':', ';'], None), ["/a", "/b"].map(PathBuf::from));
        assert_eq!(folders(&"/a:".repeat(10_000), [':', ':'], None).len(), MAX_FOLDERS);
    }
}
