use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
};

use super::*;

/// A root with a C library's loader, and beside it a folder that nothing may touch.
struct Host {
    folder: tempfile::TempDir,
    root: Rootfs,
}

impl Host {
    fn new(loaders: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("outside")).unwrap();
        fs::write(folder.path().join("outside/canary"), "alive").unwrap();
        for loader in loaders {
            let path = folder.path().join("root").join(loader.trim_start_matches('/'));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        fs::create_dir_all(folder.path().join("root")).unwrap();
        let root = Rootfs::open(&folder.path().join("root")).unwrap();
        Self { folder, root }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join("root").join(path.trim_start_matches('/'))
    }

    fn run(&self, libraries: &[&str]) -> Result<(), RootfsError> {
        run(&args(libraries), &self.root)
    }

    fn assert_finds(&self, libraries: &[&str]) {
        let cache = Cache::parse(&fs::read(self.at(CACHE)).unwrap()).unwrap();
        let libraries: Vec<_> = libraries.iter().map(|path| library(Path::new(path)).unwrap()).collect();
        assert!(cache.has(&libraries));
    }

    fn assert_outside_untouched(&self) {
        let names: Vec<_> = fs::read_dir(self.folder.path().join("outside"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(names, ["canary"]);
        assert_eq!(fs::read_to_string(self.folder.path().join("outside/canary")).unwrap(), "alive");
    }
}

fn args(libraries: &[&str]) -> Args {
    Args { libraries: libraries.iter().map(|path| path.parse().unwrap()).collect() }
}

const CUDA: &str = "/usr/lib/x86_64-linux-gnu/libcuda.so.1";
const NVML: &str = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1";

#[test]
fn an_image_without_a_cache_gets_one() {
    let host = Host::new(&[GLIBC_LOADER]);
    host.run(&[CUDA, NVML]).unwrap();
    host.assert_finds(&[CUDA, NVML]);
    assert_eq!(fs::metadata(host.at(CACHE)).unwrap().permissions().mode() & 0o7777, 0o644);
    // No folder for configuration, no ldconfig: distroless.
    assert!(!host.at(CONFIG_FOLDER).exists());
}

#[test]
fn a_second_run_changes_nothing() {
    let host = Host::new(&[GLIBC_LOADER, LDCONFIG[0]]);
    fs::create_dir_all(host.at(CONFIG_FOLDER)).unwrap();
    host.run(&[CUDA, NVML]).unwrap();
    // Held, so that their numbers are not given out again.
    let held = [CACHE.to_owned(), format!("{CONFIG_FOLDER}/{CONFIG_NAME}")].map(|path| {
        fs::hard_link(host.at(&path), host.at(&format!("{path}.held"))).unwrap();
        (fs::metadata(host.at(&path)).unwrap().ino(), path)
    });
    host.run(&[CUDA, NVML]).unwrap();
    for (inode, path) in held {
        assert_eq!(fs::metadata(host.at(&path)).unwrap().ino(), inode, "{path}");
    }
}

#[test]
fn a_later_ldconfig_is_told_the_folders() {
    let host = Host::new(&[GLIBC_LOADER, LDCONFIG[1]]);
    fs::create_dir_all(host.at(CONFIG_FOLDER)).unwrap();
    host.run(&[CUDA, NVML, "/opt/driver/libnvoptix.so.1"]).unwrap();
    let text = fs::read_to_string(host.at(CONFIG_FOLDER).join(CONFIG_NAME)).unwrap();
    assert_eq!(text, "/opt/driver\n/usr/lib/x86_64-linux-gnu\n");
}

#[test]
fn an_image_without_ldconfig_gets_no_configuration_for_it() {
    let host = Host::new(&[GLIBC_LOADER]);
    fs::create_dir_all(host.at(CONFIG_FOLDER)).unwrap();
    host.run(&[CUDA]).unwrap();
    host.assert_finds(&[CUDA]);
    assert_eq!(fs::read_dir(host.at(CONFIG_FOLDER)).unwrap().count(), 0);
}

#[test]
fn a_musl_root_is_left_alone_and_one_with_both_is_not() {
    let host = Host::new(&[MUSL_LOADER]);
    host.run(&[CUDA]).unwrap();
    assert!(!host.at("/etc").exists());
    let host = Host::new(&[MUSL_LOADER, GLIBC_LOADER]);
    host.run(&[CUDA]).unwrap();
    host.assert_finds(&[CUDA]);
}

#[test]
fn a_cache_that_is_none_is_replaced() {
    for garbage in [&b"garbage"[..], b"", b"glibc-ld.so.cache1.1", &[0xff; 4096]] {
        let host = Host::new(&[GLIBC_LOADER]);
        fs::create_dir(host.at("/etc")).unwrap();
        fs::write(host.at(CACHE), garbage).unwrap();
        host.run(&[CUDA]).unwrap();
        host.assert_finds(&[CUDA]);
    }
}

#[test]
fn a_huge_cache_is_refused_and_kept() {
    let host = Host::new(&[GLIBC_LOADER]);
    fs::create_dir(host.at("/etc")).unwrap();
    fs::File::create(host.at(CACHE)).unwrap().set_len(1 << 40).unwrap();
    let error = host.run(&[CUDA]).unwrap_err();
    assert!(matches!(error, RootfsError::TooLarge { .. }), "{error}");
    assert_eq!(fs::metadata(host.at(CACHE)).unwrap().len(), 1 << 40);
}

#[test]
fn links_in_the_place_of_the_cache_are_replaced_and_not_followed_out() {
    let traps: [&dyn Fn(&Host) -> PathBuf; 4] = [
        &|host| host.folder.path().join("outside/canary"),
        &|_| "../../outside/canary".into(),
        &|_| "/etc/ld.so.cache".into(),
        &|_| "nowhere".into(),
    ];
    for trap in traps {
        let host = Host::new(&[GLIBC_LOADER]);
        fs::create_dir(host.at("/etc")).unwrap();
        symlink(trap(&host), host.at(CACHE)).unwrap();
        host.run(&[CUDA]).unwrap();
        assert!(fs::symlink_metadata(host.at(CACHE)).unwrap().is_file());
        host.assert_finds(&[CUDA]);
        host.assert_outside_untouched();
    }
}

#[test]
fn a_linked_etc_is_followed_within_the_root_only() {
    let host = Host::new(&[GLIBC_LOADER]);
    fs::create_dir_all(host.at("/usr/etc")).unwrap();
    symlink("/usr/etc", host.at("/etc")).unwrap();
    host.run(&[CUDA]).unwrap();
    assert!(host.at("/usr/etc/ld.so.cache").exists());

    let host = Host::new(&[GLIBC_LOADER]);
    symlink(host.folder.path().join("outside"), host.at("/etc")).unwrap();
    assert!(host.run(&[CUDA]).is_err());
    host.assert_outside_untouched();
}

#[test]
fn a_linked_configuration_is_followed_within_the_root_only() {
    let host = Host::new(&[GLIBC_LOADER, LDCONFIG[0]]);
    fs::create_dir_all(host.at(CONFIG_FOLDER)).unwrap();
    symlink(host.folder.path().join("outside/canary"), host.at(CONFIG_FOLDER).join(CONFIG_NAME)).unwrap();
    host.run(&[CUDA]).unwrap();
    assert!(fs::symlink_metadata(host.at(CONFIG_FOLDER).join(CONFIG_NAME)).unwrap().is_file());
    host.assert_outside_untouched();

    let host = Host::new(&[GLIBC_LOADER, LDCONFIG[0]]);
    fs::create_dir_all(host.at("/etc")).unwrap();
    symlink(host.folder.path().join("outside"), host.at(CONFIG_FOLDER)).unwrap();
    // In the container the link leads nowhere: there is no such folder.
    host.run(&[CUDA]).unwrap();
    host.assert_outside_untouched();
}

#[test]
fn arguments_that_name_no_library_are_refused() {
    let long = format!("/{}", "x".repeat(256));
    for text in ["", "/", "libcuda.so.1", "/a/../libcuda.so.1", "/usr/lib/", "/a\nb/libcuda.so.1", &long] {
        assert!(text.parse::<LibraryPath>().is_err(), "{text}");
    }
}
