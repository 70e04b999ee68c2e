//! Where a container's dynamic loader would find a library, told from the image's files: environment, RPATH and
//! RUNPATH, `ld.so.cache`, default folders, in glibc's order (`ld.so(8)`), and in each folder what is for newer
//! processors first. Nothing is loaded.

use std::{
    cell::OnceCell,
    ffi::OsStr,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use vcuda_config::plain;

use super::{
    elf::{Depth, Elf},
    files::{Facts, Files, Trouble},
    ldconf,
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

/// Folders for newer processors within a folder, the newest first (glibc 2.33, `sysdeps/x86_64/dl-hwcap_subdirs.c`); arm64
/// has none. Which of them the node's processor has is not asked: a library that differs there is told all the same.
fn newer_processors(machine: u16) -> &'static [&'static str] {
    use goblin::elf::header::EM_X86_64;
    if machine == EM_X86_64 { &["x86-64-v4", "x86-64-v3", "x86-64-v2"] } else { &[] }
}

/// What `$LIB` and `$PLATFORM` can be: the loader's own folder as Debian and as others build it, and the processor's
/// name, which glibc before 2.37 made more of.
fn tokens(machine: u16) -> [(&'static str, &'static [&'static str]); 2] {
    use goblin::elf::header::EM_AARCH64;
    if machine == EM_AARCH64 {
        [("LIB", &["lib/aarch64-linux-gnu", "lib64"]), ("PLATFORM", &["aarch64"])]
    } else {
        [("LIB", &["lib/x86_64-linux-gnu", "lib64"]), ("PLATFORM", &["x86_64", "haswell"])]
    }
}

/// Folders that one search path may name; more is no honest one.
const MAX_FOLDERS: usize = 256;

/// Entries of the cache that one name may have: one for each kind of processor.
const MAX_CACHED: usize = 64;

/// Longest folder in which tokens are replaced (`PATH_MAX`).
const MAX_FOLDER_BYTES: usize = 4096;

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
        let library_path = folders(library_path, [':', ';'], None, machine);
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
                .map(|(text, path)| folders(text, [':', ':'], path.parent(), self.machine))
                .unwrap_or_default()
        };
        let runpath = path_of(|elf| elf.runpath.as_ref());
        // RUNPATH makes the loader forget RPATH.
        let rpath = if runpath.is_empty() { path_of(|elf| elf.rpath.as_ref()) } else { Vec::new() };
        for (by, folders) in
            [(By::Rpath, &rpath), (By::LibraryPath, &self.library_path), (By::Runpath, &runpath)]
        {
            for folder in folders {
                if let Some(found) = self.take_from(folder, name, by)? {
                    return Ok(Some(found));
                }
            }
        }
        // An unreadable cache is an empty one to the loader.
        if let Ok(cache) = self.load_cache() {
            for path in cache.find(name.as_bytes()).take(MAX_CACHED) {
                if let Some(found) = self.take(Path::new(OsStr::from_bytes(path)), By::Cache)? {
                    return Ok(Some(found));
                }
            }
        }
        for folder in default_folders(self.machine) {
            if let Some(found) = self.take_from(Path::new(folder), name, By::Default)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// The file that would be taken for `name` by the cache, were `ldconfig` run in the image as it is.
    ///
    /// # Errors
    /// A file on the way cannot be read.
    pub fn find_after_ldconfig(&self, name: &str) -> Result<Option<Found>, Trouble> {
        for folder in ldconf::folders(self.files) {
            if let Some(found) = self.take_from(&folder, name, By::Cache)? {
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

    fn take_from(&self, folder: &Path, name: &str, by: By) -> Result<Option<Found>, Trouble> {
        let newer = folder.join("glibc-hwcaps");
        // Hardly any folder has it.
        let levels = if self.files.real(&newer).is_ok_and(|real| real.is_some()) {
            newer_processors(self.machine)
        } else {
            &[]
        };
        for level in levels {
            if let Some(found) = self.take(&newer.join(level).join(name), by)? {
                return Ok(Some(found));
            }
        }
        self.take(&folder.join(name), by)
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
fn folders(text: &str, separators: [char; 2], origin: Option<&Path>, machine: u16) -> Vec<PathBuf> {
    let folders = text.split(separators).take(MAX_FOLDERS).flat_map(|folder| expand(folder, origin, machine));
    let absolute = folders.filter(|folder| folder.starts_with('/'));
    absolute.take(MAX_FOLDERS).map(|folder| plain(Path::new(&folder))).collect()
}

/// A folder with its `$ORIGIN`, `$LIB` and `$PLATFORM`, plain or in braces, in every way that they can be meant; none
/// where it needs an origin and there is none.
fn expand(folder: &str, origin: Option<&Path>, machine: u16) -> Vec<String> {
    let mut texts = vec![folder.to_owned()];
    if !folder.contains('$') || folder.len() > MAX_FOLDER_BYTES {
        return texts;
    }
    let origin = origin.and_then(Path::to_str);
    let [lib, platform] = tokens(machine);
    for (token, values) in [("ORIGIN", origin.as_slice()), lib, platform] {
        let (plain, braced) = (format!("${token}"), format!("${{{token}}}"));
        if texts.iter().any(|text| text.contains(&plain) || text.contains(&braced)) {
            let each = |text: &String| {
                let put = |value: &&str| text.replace(&braced, value).replace(&plain, value);
                values.iter().map(put).collect::<Vec<_>>()
            };
            texts = texts.iter().flat_map(each).collect();
        }
    }
    texts
}

#[cfg(test)]
mod tests {
    use std::fs;

    use goblin::elf::header::EM_X86_64;

    use super::*;
    use crate::{compat::elf_maker::Maker, rootfs::Rootfs};

    fn paths<const N: usize>(paths: [&str; N]) -> [PathBuf; N] {
        paths.map(PathBuf::from)
    }

    #[test]
    fn search_paths_become_folders_of_the_image() {
        let origin = Path::new("/opt/app/lib");
        let text = "$ORIGIN:$ORIGIN/../../nvidia/lib:${ORIGIN}/x:relative::/usr/./lib:/../../etc";
        assert_eq!(
            folders(text, [':', ':'], Some(origin), EM_X86_64),
            paths(["/opt/app/lib", "/opt/nvidia/lib", "/opt/app/lib/x", "/usr/lib", "/etc"])
        );
        assert_eq!(folders("$ORIGIN:/a;/b", [':', ';'], None, EM_X86_64), paths(["/a", "/b"]));
        assert_eq!(folders(&"/a:".repeat(10_000), [':', ':'], None, EM_X86_64).len(), MAX_FOLDERS);
    }

    #[test]
    fn tokens_in_any_place_and_form_stand_for_what_the_loader_makes_of_them() {
        let origin = Some(Path::new("/opt/app"));
        let of = |text: &str| folders(text, [':', ':'], origin, EM_X86_64);
        assert_eq!(of("/usr/$LIB/cuda"), paths(["/usr/lib/x86_64-linux-gnu/cuda", "/usr/lib64/cuda"]));
        assert_eq!(of("/x/${PLATFORM}"), paths(["/x/x86_64", "/x/haswell"]));
        assert_eq!(
            of("${ORIGIN}/../$LIB/$PLATFORM"),
            paths([
                "/opt/lib/x86_64-linux-gnu/x86_64",
                "/opt/lib/x86_64-linux-gnu/haswell",
                "/opt/lib64/x86_64",
                "/opt/lib64/haswell"
            ])
        );
        assert_eq!(of("/x/$OTHER"), paths(["/x/$OTHER"]), "as it is written");
        let arm = folders("/a/$LIB", [':', ':'], origin, goblin::elf::header::EM_AARCH64);
        assert_eq!(arm, paths(["/a/lib/aarch64-linux-gnu", "/a/lib64"]));
        // Hostile: each token doubles, and no path grows past what a file system takes.
        assert!(of(&"/$LIB$PLATFORM$LIB:".repeat(1_000)).len() <= MAX_FOLDERS);
        assert_eq!(of(&format!("/{}", "$LIB".repeat(10_000))).len(), 1);
    }

    /// A root with a library at each of these places.
    struct Root(tempfile::TempDir);

    impl Root {
        fn new(libraries: &[&str]) -> Self {
            let root = Self(tempfile::tempdir().unwrap());
            for path in libraries {
                root.write(path, &Maker { soname: Some("libx.so.1"), ..Maker::default() }.make());
            }
            root
        }

        fn write(&self, path: &str, bytes: &[u8]) {
            let path = self.0.path().join(path.trim_start_matches('/'));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }

        /// Where `libx.so.1` is found, and by what, when a program in `/opt/app` asks.
        fn find(&self, library_path: &str, asker: Elf) -> Option<(String, By)> {
            let files = Rootfs::open(self.0.path()).unwrap();
            let loader = Loader::new(&files, EM_X86_64, library_path);
            let found = loader.find("libx.so.1", Some((Path::new("/opt/app/run"), &asker))).unwrap();
            found.map(|found| (found.path.display().to_string(), found.by))
        }
    }

    #[test]
    fn runpath_silences_rpath_and_comes_after_the_environment() {
        let root = Root::new(&[
            "/opt/app/lib/libx.so.1",
            "/opt/run/libx.so.1",
            "/env/libx.so.1",
            "/usr/lib/libx.so.1",
        ]);
        let elf = |rpath: Option<&str>, runpath: Option<&str>| Elf {
            rpath: rpath.map(Into::into),
            runpath: runpath.map(Into::into),
            ..Elf::default()
        };
        let is = |path: &str, by| Some((path.to_owned(), by));
        let rpath = || elf(Some("$ORIGIN/lib"), None);
        assert_eq!(root.find("", elf(None, None)), is("/usr/lib/libx.so.1", By::Default));
        assert_eq!(root.find("/env", rpath()), is("/opt/app/lib/libx.so.1", By::Rpath));
        let both = || elf(Some("$ORIGIN/lib"), Some("$ORIGIN/../run"));
        assert_eq!(root.find("/env", both()), is("/env/libx.so.1", By::LibraryPath));
        assert_eq!(root.find("", both()), is("/opt/run/libx.so.1", By::Runpath));
    }

    #[test]
    fn what_is_for_newer_processors_is_found_first() {
        let v3 = "/usr/lib64/glibc-hwcaps/x86-64-v3/libx.so.1";
        let root = Root::new(&["/usr/lib64/libx.so.1", "/usr/lib64/glibc-hwcaps/x86-64-v2/libx.so.1", v3]);
        assert_eq!(root.find("", Elf::default()), Some((v3.to_owned(), By::Default)));
        let root = Root::new(&["/env/glibc-hwcaps/x86-64-v3/other.so", "/env/libx.so.1"]);
        assert_eq!(root.find("/env", Elf::default()), Some(("/env/libx.so.1".into(), By::LibraryPath)));
    }

    #[test]
    fn folders_of_ld_so_conf_count_for_ldconfig_and_not_for_the_loader() {
        let root = Root::new(&["/opt/own/libx.so.1"]);
        root.write("/etc/ld.so.conf", b"include /etc/ld.so.conf.d/*.conf\n");
        root.write("/etc/ld.so.conf.d/own.conf", b"/opt/own\n");
        assert_eq!(root.find("", Elf::default()), None);
        let files = Rootfs::open(root.0.path()).unwrap();
        let found = Loader::new(&files, EM_X86_64, "").find_after_ldconfig("libx.so.1").unwrap().unwrap();
        assert_eq!(found.path, Path::new("/opt/own/libx.so.1"));
    }
}
