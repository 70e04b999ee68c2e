//! Finds the driver again only where something has changed: an Allocate, for which a pod waits, takes a look at some
//! thirty folders and files instead of reading all of a driver's libraries.

use std::{
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use oci_hooks::{
    rootfs::{Rootfs, RootfsError},
    scans::Stamp,
};

use super::{
    Driver, DriverError, FIRMWARE_FOLDERS, OPENCL_VENDOR, PROGRAM_FOLDERS, PROGRAMS, PROGRAMS_BEHIND_LINKS,
    SOCKETS, library_folders,
};

/// A file system's clock ticks coarsely: a second change within its tick would not show. So nothing is kept that has
/// changed within this time.
const SETTLED_AFTER: Duration = Duration::from_secs(2);

/// The loader's list of libraries, in which the driver is looked up first.
const LOADER_CACHE: &str = "/etc/ld.so.cache";

/// A driver root, and the driver that was found there last.
#[derive(Debug)]
pub struct Finder {
    root: PathBuf,
    last: Option<(Driver, Vec<Seen>)>,
}

/// What was at a path, links followed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    path: PathBuf,
    what: Option<Stamp>,
}

impl Finder {
    /// For the driver below `root`. Nothing is looked at yet.
    pub fn new(root: &Path) -> Self {
        Self { root: root.into(), last: None }
    }

    /// The driver of this moment, as [`Driver::discover`] finds it. What is remembered holds as long as no folder that
    /// a driver's files may be in and no file of the driver has changed.
    ///
    /// # Errors
    /// Those of [`Driver::discover`].
    pub fn find(&mut self) -> Result<Driver, DriverError> {
        self.find_at(SystemTime::now())
    }

    fn find_at(&mut self, now: SystemTime) -> Result<Driver, DriverError> {
        if let Some(driver) = self.last() {
            return Ok(driver.clone());
        }
        self.last = None;
        let (before, looked_for) = Driver::look_for(&self.root)?;
        let seen = look(&self.root, &places(&before, looked_for));
        // Of what was seen after one look and before another that found the same, nothing had changed.
        let driver = Driver::discover(&self.root)?;
        if driver == before {
            self.last = seen.ok().filter(|seen| are_settled(seen, now)).map(|seen| (driver.clone(), seen));
        }
        Ok(driver)
    }

    /// The driver that was found last, where nothing has changed since.
    fn last(&self) -> Option<&Driver> {
        let (driver, seen) = self.last.as_ref()?;
        look(&self.root, seen).is_ok_and(|now| now == *seen).then_some(driver)
    }
}

/// Where a driver is looked for, libcuda at `looked_for`, and what it consists of.
fn places(driver: &Driver, looked_for: Vec<PathBuf>) -> Vec<Seen> {
    let parent = |path: &str| Path::new(path).parent().map(Path::to_owned);
    let mut places: Vec<PathBuf> = library_folders().chain(looked_for).collect();
    places.extend([PathBuf::from(LOADER_CACHE), driver.library_dir.clone()]);
    places.extend(PROGRAM_FOLDERS.map(PathBuf::from));
    places.extend(PROGRAMS.map(|program| Path::new(PROGRAMS_BEHIND_LINKS).join(program)));
    places.extend(FIRMWARE_FOLDERS.map(|folder| Path::new(folder).join(&driver.version)));
    places.extend(SOCKETS.into_iter().chain([OPENCL_VENDOR]).filter_map(parent));
    let libraries = [&driver.cuda, &driver.nvml].into_iter().chain(&driver.libraries);
    places.extend(libraries.chain(&driver.past_cuda).map(super::Library::path));
    let files = driver.files.iter().chain(&driver.sockets).chain(&driver.opencl_vendor);
    places.extend(files.map(|file| file.path.clone()));
    places.into_iter().map(|path| Seen { path, what: None }).collect()
}

/// The same places as they are now.
fn look(root: &Path, places: &[Seen]) -> Result<Vec<Seen>, RootfsError> {
    let root = Rootfs::open(root)?;
    let look = |place: &Seen| {
        let what = root.stat(&place.path)?.map(|stat| Stamp::of(&stat));
        Ok(Seen { path: place.path.clone(), what })
    };
    places.iter().map(look).collect()
}

fn are_settled(seen: &[Seen], now: SystemTime) -> bool {
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let latest = Duration::from_secs(now.saturating_sub(SETTLED_AFTER).as_secs());
    seen.iter().filter_map(|seen| seen.what.as_ref()).all(|what| what.changed_before(latest))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::{
        super::tests::{Root, VERSION},
        *,
    };

    const FOLDER: &str = "/usr/lib/x86_64-linux-gnu";

    type Change<'a> = &'a dyn Fn(&Root);

    /// Some time after all that the tests write.
    fn later() -> SystemTime {
        SystemTime::now() + Duration::from_secs(60)
    }

    fn found(root: &Root) -> Finder {
        let mut finder = Finder::new(root.path());
        assert_eq!(finder.find_at(later()).unwrap(), root.discover().unwrap());
        assert_eq!(finder.last(), Some(&root.discover().unwrap()), "remembered");
        finder
    }

    #[test]
    fn whatever_is_done_to_a_driver_it_is_found_anew() {
        let ptx = format!("{FOLDER}/libnvidia-ptxjitcompiler.so.{VERSION}");
        let cuda = format!("{FOLDER}/libcuda.so.{VERSION}");
        let changes: [(&str, Change<'_>); 7] = [
            ("a library is gone", &|root| fs::remove_file(root.at(&ptx)).unwrap()),
            ("there is one more", &|root| {
                fs::copy(root.at(&cuda), root.at(&format!("{FOLDER}/libnvidia-new.so.{VERSION}"))).unwrap();
            }),
            ("one is written over in its place", &|root| fs::write(root.at(&ptx), b"no library").unwrap()),
            ("one is replaced", &|root| {
                fs::write(root.at("/new"), b"no library").unwrap();
                fs::rename(root.at("/new"), root.at(&ptx)).unwrap();
            }),
            ("a program is gone", &|root| fs::remove_file(root.at("/usr/bin/nvidia-smi")).unwrap()),
            ("its folder is another one", &|root| {
                fs::rename(root.at("/usr/lib"), root.at("/usr/old")).unwrap();
                fs::create_dir(root.at("/usr/lib")).unwrap();
                symlink("../old/x86_64-linux-gnu", root.at(FOLDER)).unwrap();
                fs::remove_file(
                    root.at(&format!("/usr/old/x86_64-linux-gnu/libnvidia-gpucomp.so.{VERSION}")),
                )
                .unwrap();
            }),
            ("there is firmware", &|root| {
                root.write(&format!("/lib/firmware/nvidia/{VERSION}/gsp_new.bin"), b"");
            }),
        ];
        for (what, change) in changes {
            let root = Root::whole(FOLDER);
            let mut finder = found(&root);
            let before = root.discover().unwrap();
            change(&root);
            assert_eq!(finder.last(), None, "{what}");
            let after = finder.find_at(later()).unwrap();
            assert_eq!(after, root.discover().unwrap(), "{what}");
            assert_ne!(after, before, "{what}");
        }
        let root = Root::whole(FOLDER);
        let mut finder = found(&root);
        fs::remove_file(root.at(&cuda)).unwrap();
        assert_eq!(
            finder.find_at(later()).unwrap_err().to_string(),
            root.discover().unwrap_err().to_string()
        );
        root.write(&cuda, b"no library either");
        assert!(finder.find_at(later()).is_err());
    }

    #[test]
    fn another_driver_by_a_link_far_away_is_found() {
        let root = Root::whole("/opt/nvidia/550");
        let old = "535.261.03";
        for library in ["libcuda", "libnvidia-ml"] {
            let from = root.at(&format!("/opt/nvidia/550/{library}.so.{VERSION}"));
            root.write(&format!("/opt/nvidia/535/{library}.so.{old}"), &fs::read(from).unwrap());
        }
        symlink(format!("libcuda.so.{old}"), root.at("/opt/nvidia/535/libcuda.so.1")).unwrap();
        // As Debian's alternatives: the loader's folder has a link to a link.
        root.write("/etc/alternatives/readme", b"");
        let chosen = root.at("/etc/alternatives/nvidia");
        symlink("../../opt/nvidia/550", &chosen).unwrap();
        fs::create_dir_all(root.at(FOLDER)).unwrap();
        symlink("/etc/alternatives/nvidia/libcuda.so.1", root.at(&format!("{FOLDER}/libcuda.so.1"))).unwrap();
        let mut finder = found(&root);
        fs::remove_file(&chosen).unwrap();
        symlink("../../opt/nvidia/535", &chosen).unwrap();
        assert_eq!(finder.find_at(later()).unwrap().version, old);
        // Its folder is none of the usual ones.
        assert!(finder.last().is_some());
        let gpucomp = format!("libnvidia-gpucomp.so.{VERSION}");
        let from = root.at(&format!("/opt/nvidia/550/{gpucomp}"));
        fs::copy(from, root.at(&format!("/opt/nvidia/535/libnvidia-gpucomp.so.{old}"))).unwrap();
        assert_eq!(finder.find_at(later()).unwrap(), root.discover().unwrap());
    }

    #[test]
    fn what_has_just_changed_is_not_kept() {
        let root = Root::whole(FOLDER);
        let mut finder = Finder::new(root.path());
        assert_eq!(finder.find().unwrap(), root.discover().unwrap());
        assert_eq!(finder.last(), None);
    }
}
