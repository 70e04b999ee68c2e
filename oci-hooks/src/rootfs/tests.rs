use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
};

use super::*;

/// A root, and beside it what an image would like to reach: on the host a hook would have the right to.
struct Host {
    folder: tempfile::TempDir,
    root: Rootfs,
}

impl Host {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("root")).unwrap();
        fs::create_dir_all(folder.path().join("outside")).unwrap();
        fs::write(folder.path().join("outside/canary"), "alive").unwrap();
        let root = Rootfs::open(&folder.path().join("root")).unwrap();
        Self { folder, root }
    }

    /// `path` of the container, on the host.
    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join("root").join(path.trim_start_matches('/'))
    }

    fn outside(&self) -> PathBuf {
        self.folder.path().join("outside")
    }

    fn assert_outside_untouched(&self) {
        let names: Vec<_> =
            fs::read_dir(self.outside()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["canary"]);
        assert_eq!(fs::read_to_string(self.outside().join("canary")).unwrap(), "alive");
    }
}

#[test]
fn what_is_read_is_never_outside_the_root() {
    let host = Host::new();
    fs::create_dir(host.at("a")).unwrap();
    symlink(host.outside(), host.at("absolute")).unwrap();
    symlink("../../outside", host.at("a/relative")).unwrap();
    symlink("/../../../../../../../../etc/passwd", host.at("up")).unwrap();
    symlink("/proc/self/root/etc/passwd", host.at("magic")).unwrap();
    for path in ["/absolute/canary", "/a/relative/canary", "/../outside/canary", "/up", "/magic"] {
        assert!(host.root.read(Path::new(path), 99).unwrap().is_none(), "{path}");
        assert!(host.root.stat(Path::new(path)).unwrap().is_none(), "{path}");
    }
}

#[test]
fn absolute_and_relative_symlinks_mean_what_they_mean_in_the_container() {
    let host = Host::new();
    fs::create_dir_all(host.at("usr/lib")).unwrap();
    fs::write(host.at("usr/lib/file"), "text").unwrap();
    symlink("usr/lib", host.at("lib")).unwrap();
    symlink("/lib/file", host.at("file")).unwrap();
    for path in ["/lib/file", "/file", "/usr/../lib/file"] {
        assert_eq!(host.root.read(Path::new(path), 4).unwrap().unwrap(), b"text", "{path}");
    }
    assert_eq!(host.root.read_link(Path::new("/file")).unwrap().unwrap(), Path::new("/lib/file"));
    assert_eq!(host.root.read_link(Path::new("/usr/lib/file")).unwrap(), None);
    assert_eq!(host.root.read_link(Path::new("/none/file")).unwrap(), None);
}

#[test]
fn a_path_is_resolved_to_one_without_links() {
    let host = Host::new();
    fs::create_dir_all(host.at("usr/lib")).unwrap();
    fs::write(host.at("usr/lib/libx.so.1.2"), "").unwrap();
    symlink("usr/lib", host.at("lib")).unwrap();
    symlink("libx.so.1.2", host.at("usr/lib/libx.so.1")).unwrap();
    symlink("/lib/libx.so.1", host.at("usr/lib/libx.so")).unwrap();
    let resolve = |path: &str| host.root.resolve(Path::new(path)).unwrap();
    assert_eq!(resolve("/lib/libx.so").unwrap(), Path::new("/usr/lib/libx.so.1.2"));
    assert_eq!(resolve("/").unwrap(), Path::new("/"));
    assert_eq!(resolve("/lib/none"), None);
    symlink(host.outside().join("canary"), host.at("trap")).unwrap();
    assert_eq!(resolve("/trap"), None);
    let machine = Rootfs::open(Path::new("/")).unwrap();
    assert_eq!(machine.resolve(Path::new("/proc/../proc")).unwrap().unwrap(), Path::new("/proc"));
}

#[test]
fn magic_links_are_not_followed() {
    // The whole machine as the root: /proc/self/root would be a way out of a smaller one.
    let root = Rootfs::open(Path::new("/")).unwrap();
    let error = root.stat(Path::new("/proc/self/root/etc")).unwrap_err();
    assert!(matches!(error, RootfsError::Failed { reason: Errno::LOOP, .. }), "{error}");
}

#[test]
fn only_regular_files_are_opened() {
    let host = Host::new();
    fs::create_dir(host.at("folder")).unwrap();
    let fifo = host.at("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o666), 0).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(host.at("socket")).unwrap();
    for path in ["/folder", "/fifo", "/socket", "/"] {
        // A FIFO without a writer would block for ever.
        let error = host.root.file(Path::new(path)).unwrap_err();
        assert!(matches!(error, RootfsError::NotRegular { .. }), "{path}: {error}");
    }
    let error = Rootfs::open(Path::new("/")).unwrap().file(Path::new("/dev/null")).unwrap_err();
    assert!(matches!(error, RootfsError::NotRegular { .. }), "{error}");
}

#[test]
fn reading_stops_at_the_limit() {
    let host = Host::new();
    // A sparse file costs the image nothing.
    fs::File::create(host.at("huge")).unwrap().set_len(1 << 40).unwrap();
    fs::write(host.at("exact"), [7; 10]).unwrap();
    let error = host.root.read(Path::new("/huge"), 4096).unwrap_err();
    assert!(matches!(error, RootfsError::TooLarge { limit: 4096, .. }), "{error}");
    assert_eq!(host.root.read(Path::new("/exact"), 10).unwrap().unwrap(), [7; 10]);
    assert!(host.root.read(Path::new("/exact"), 9).is_err());
}

#[test]
fn a_loop_of_symlinks_is_an_error_and_not_the_end() {
    let host = Host::new();
    symlink("/b", host.at("a")).unwrap();
    symlink("/a", host.at("b")).unwrap();
    assert!(host.root.read(Path::new("/a"), 1).is_err());
    assert!(host.root.folder(Path::new("/a/c")).is_err());
}

#[test]
fn folders_are_created_inside_the_root_even_through_links_that_lead_out() {
    let host = Host::new();
    // Inside the container the target is <root>/<path of outside>, which does not exist: a broken link.
    symlink(host.outside(), host.at("trap")).unwrap();
    symlink("../outside", host.at("relative")).unwrap();
    for path in ["/trap/new", "/trap", "/relative/new"] {
        let error = host.root.folder(Path::new(path)).unwrap_err();
        assert!(error.to_string().contains("broken symlink"), "{path}: {error}");
    }
    host.assert_outside_untouched();

    // Where the target exists inside, it is used.
    let inside = host.at(host.outside().to_str().unwrap());
    fs::create_dir_all(&inside).unwrap();
    let folder = host.root.folder(Path::new("/trap/new")).unwrap();
    folder.replace_file(OsStr::new("file"), b"text", Mode::from_raw_mode(0o644)).unwrap();
    assert_eq!(fs::read(inside.join("new/file")).unwrap(), b"text");
    host.assert_outside_untouched();
}

#[test]
fn a_file_in_the_way_of_a_folder_is_named() {
    let host = Host::new();
    fs::write(host.at("file"), "").unwrap();
    let error = host.root.folder(Path::new("/file/folder")).unwrap_err().to_string();
    assert!(error.contains("/file/folder") && error.contains("in its way"), "{error}");
}

#[test]
fn volumes_are_never_changed() {
    let root = Rootfs::open(Path::new("/")).unwrap();
    let error = root.folder(Path::new("/proc/vcuda")).unwrap_err();
    assert!(matches!(error, RootfsError::OnVolume { .. }), "{error}");
}

#[test]
fn paths_of_mistaken_callers_are_refused() {
    let host = Host::new();
    for path in ["relative", "", "/a/../b", ".."] {
        let error = host.root.folder(Path::new(path)).unwrap_err();
        assert!(matches!(error, RootfsError::BadPath { .. }), "{path}: {error}");
    }
    assert!(matches!(host.root.read_link(Path::new("/")), Err(RootfsError::BadPath { .. })));
}

#[test]
fn a_replaced_file_takes_the_place_of_a_link_and_leaves_its_target_alone() {
    let host = Host::new();
    symlink(host.outside().join("canary"), host.at("file")).unwrap();
    let folder = host.root.folder(Path::new("/")).unwrap();
    folder.replace_file(OsStr::new("file"), b"new", Mode::from_raw_mode(0o644)).unwrap();
    assert!(!fs::symlink_metadata(host.at("file")).unwrap().is_symlink());
    assert_eq!(fs::read(host.at("file")).unwrap(), b"new");
    assert_eq!(fs::metadata(host.at("file")).unwrap().permissions().mode() & 0o7777, 0o644);
    host.assert_outside_untouched();
}

#[test]
fn a_replaced_link_leaves_the_old_file_to_those_who_hold_it() {
    let host = Host::new();
    fs::write(host.at("lib.so.1"), "old").unwrap();
    let held = fs::metadata(host.at("lib.so.1")).unwrap().ino();
    fs::hard_link(host.at("lib.so.1"), host.at("held")).unwrap();
    let folder = host.root.folder(Path::new("/")).unwrap();
    folder.replace_link(OsStr::new("lib.so.1"), Path::new("lib.so.1.2")).unwrap();
    assert_eq!(folder.read_link(OsStr::new("lib.so.1")).unwrap().unwrap(), Path::new("lib.so.1.2"));
    assert_eq!(fs::metadata(host.at("held")).unwrap().ino(), held);
    assert_eq!(fs::read(host.at("held")).unwrap(), b"old");
}

#[test]
fn a_failed_replacement_leaves_nothing_behind() {
    let host = Host::new();
    fs::create_dir_all(host.at("etc/name")).unwrap();
    let folder = host.root.folder(Path::new("/etc")).unwrap();
    assert!(folder.replace_file(OsStr::new("name"), b"x", Mode::from_raw_mode(0o644)).is_err());
    assert!(folder.replace_link(OsStr::new("name"), Path::new("x")).is_err());
    let names: Vec<_> =
        fs::read_dir(host.at("etc")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["name"]);
}
