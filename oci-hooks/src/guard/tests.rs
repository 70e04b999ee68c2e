//! The guard on real mounts: each test runs itself again in a mount namespace of its own, where a container's root
//! is put together as runc does it.

use std::{fs, os::unix::fs::symlink, path::Path, process::Command as Process};

use ledger::{ContainerRef, DeviceNode, Driver, GpuShare, PodRef, ShareState};
use region::{GpuLimit, Slots, Usage, place};
use rustix::{
    fs::{StatVfsMountFlags, statvfs},
    mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change},
};
use tempfile::TempDir;
use vcuda_config::GpuUuid;

use super::*;
use crate::compat::elf_maker::Maker;

#[path = "tests/images.rs"]
mod images;

const ID: &str = "c0ffee";
const SHARE: &str = "7f3c_main";
const MARK: &str = "VCUDA_TEST_OWN_MOUNTS";
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

/// Runs `body` in a mount namespace of its own.
fn with_own_mounts(test: &str, body: impl FnOnce()) {
    if std::env::var_os(MARK).is_some() {
        mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE).unwrap();
        return body();
    }
    let name = format!("guard::tests::{test}");
    // What is mounted in there cannot be removed in there; it can when the namespace is gone.
    let folder = tempfile::tempdir().unwrap();
    let output = Process::new("unshare")
        .arg("--mount")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &name, "--nocapture", "--include-ignored"])
        .env(MARK, "1")
        .env("TMPDIR", folder.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    // Indented, so that who counts results does not count its too.
    assert!(output.status.success() && text.contains("1 passed"), "{}", text.replace('\n', "\n    "));
}

/// A node with one share, and a container that is about to start on it.
struct Rig {
    folder: TempDir,
    root: PathBuf,
    paths: Paths,
    container: Container,
    record: ShareRecord,
    driver: Vec<DriverFile>,
}

fn gpu() -> GpuUuid {
    GpuUuid::from_bytes([7; 16])
}

impl Rig {
    /// All is as it should be, except that the root is a plain folder.
    fn bare() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let paths = Paths { state: at("state"), install: at("install"), ..Paths::default() };
        let record = ShareRecord {
            version: 1,
            pod: PodRef {
                uid: "7f3c".into(),
                namespace: "team".into(),
                name: "train".into(),
                sandbox_id: "5a".into(),
            },
            container: ContainerRef { name: "main".into(), id: ID.into() },
            boot_id: ledger::boot_id().unwrap(),
            kind: ShareKind::Share,
            gpus: vec![GpuShare {
                uuid: gpu(),
                minor: 0,
                core: 20,
                memory_bytes: 8 << 30,
                slots: Slots::first(20),
            }],
            state: ShareState::Running,
            bound_at: 1,
            bound_uptime: 1,
            shim: true,
            terms: ledger::Terms::default(),
            set: ledger::Change::default(),
        };
        let command = Command { args: vec!["app".into()], env: vec!["PATH=/bin".into()], cwd: "/".into() };
        let container = Container {
            id: ID.into(),
            name: "pod team/train, container main".into(),
            share: Some(SHARE.into()),
            command,
            image: Some("registry/app:1".into()),
            mount_label: None,
        };
        let rig = Self { root: at("root"), folder, paths, container, record, driver: Vec::new() };

        fs::create_dir_all(rig.share().usage().parent().unwrap()).unwrap();
        rig.store();
        rig.limit(gpu(), 8 << 30);
        Usage::create(&rig.share().usage()).unwrap();
        fs::write(rig.share().preload(), format!("{}\n", place::SHIM)).unwrap();
        let driver = Driver { version: "550.1".into(), library_dir: LIBRARIES.into() };
        let none: Vec<DeviceNode> = Vec::new();
        Inventory::new(rig.record.boot_id.clone(), driver, none, Vec::new())
            .store(&rig.paths.inventory())
            .unwrap();
        let shim = Maker {
            soname: Some("libcuda.so.1"),
            needs: vec![("libc.so.6", vec!["GLIBC_2.2.5", "GLIBC_2.17"])],
            ..Maker::default()
        };
        write(&rig.paths.shim(), &shim.make());
        rig.image("bin/app", &Maker::program().make());
        rig.image("lib/x86_64-linux-gnu/libc.so.6", &Maker::glibc(&["GLIBC_2.17", "GLIBC_2.36"]).make());
        rig
    }

    /// Makes the root so far a layer, and the root an overlay on it, as a snapshotter has them.
    fn overlay(self) -> Self {
        let at = |name: &str| self.folder.path().join(name);
        fs::rename(&self.root, at("image")).unwrap();
        for folder in ["root", "upper", "work"] {
            fs::create_dir(at(folder)).unwrap();
        }
        let [lower, upper, work] = ["image", "upper", "work"].map(|name| at(name).display().to_string());
        let options =
            std::ffi::CString::new(format!("lowerdir={lower},upperdir={upper},workdir={work}")).unwrap();
        mount("overlay", &self.root, "overlay", MountFlags::empty(), Some(options.as_c_str())).unwrap();
        self.mount_root();
        self
    }

    /// All is as it should be.
    fn ready() -> Self {
        let rig = Self::bare();
        rig.mount_root();
        rig
    }

    fn share(&self) -> ShareFolder {
        ShareFolder::new(&self.paths.shares(), &SHARE.parse().unwrap())
    }

    fn store(&self) {
        fs::write(self.share().record(), serde_json::to_vec(&self.record).unwrap()).unwrap();
    }

    fn limit(&self, gpu: GpuUuid, memory_bytes: u64) {
        let own_slots = Slots::first(20);
        let limit = GpuLimit {
            uuid: gpu.bytes(),
            memory_bytes,
            core_percent: 20,
            core_limit_percent: 100,
            own_slots,
        };
        Limits::create(&self.share().limits(), &[limit]).unwrap();
    }

    fn image(&self, path: &str, bytes: &[u8]) {
        use std::os::unix::fs::PermissionsExt;
        let path = self.root.join(path);
        write(&path, bytes);
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn places(&self) -> Vec<(PathBuf, String, bool)> {
        let library = |name: &str| format!("{LIBRARIES}/{name}.so.550.1");
        vec![
            (self.paths.shim(), place::SHIM.into(), true),
            (self.paths.shim(), library("libcuda"), true),
            (self.paths.shim(), library("libnvidia-ml"), true),
            (self.share().limits(), place::LIMITS.into(), true),
            (self.share().preload(), place::LD_SO_PRELOAD.into(), true),
            (self.share().usage(), place::USAGE.into(), false),
        ]
    }

    /// The root on itself, as runc does it.
    fn mount_root(&self) {
        mount_bind(&self.root, &self.root).unwrap();
    }

    /// A volume of the pod's, as runc mounts it.
    fn volume(&self, host: &Path, place: &str) {
        let target = self.in_root(place);
        if host.is_dir() {
            fs::create_dir_all(&target).unwrap();
        } else if !target.exists() {
            write(&target, b"");
        }
        mount_bind(host, &target).unwrap();
    }

    fn in_root(&self, place: &str) -> PathBuf {
        self.root.join(place.trim_start_matches('/'))
    }

    fn guard(&self) -> Result<Vec<Finding>, Refusal> {
        self.guard_under(Policy::Enforce)
    }

    /// Under this policy for the pod's namespace, and another for all others.
    fn guard_under(&self, policy: Policy) -> Result<Vec<Finding>, Refusal> {
        let other = if policy == Policy::Enforce { Policy::Off } else { Policy::Enforce };
        let images = ImagePolicy { policy: other, namespaces: [("team".to_owned(), policy)].into() };
        self.run(&images, MemoryFloor::Shim)
    }

    /// As the node file says whose text is `images`.
    fn guard_by(&self, images: &str) -> Result<Vec<Finding>, Refusal> {
        let path = self.folder.path().join("config.yaml");
        fs::write(&path, format!("version: 1\n{images}")).unwrap();
        let file = vcuda_config::NodeFile::load_or_default(&path).unwrap();
        self.run(&file.images, file.memory.floor)
    }

    fn run(&self, images: &ImagePolicy, floor: MemoryFloor) -> Result<Vec<Finding>, Refusal> {
        let rootfs = Rootfs::open(&self.root).unwrap();
        run(&self.paths, images, floor, &self.driver, &self.container, &rootfs)
    }

    fn refusal(&self) -> String {
        self.guard().unwrap_err().to_string()
    }

    fn preload(&self) -> String {
        fs::read_to_string(self.in_root(place::LD_SO_PRELOAD)).unwrap()
    }
}

fn write(path: &Path, bytes: &[u8]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
#[ignore = "mounts need root"]
fn a_share_with_all_in_place_starts() {
    with_own_mounts("a_share_with_all_in_place_starts", || {
        let mut rig = Rig::bare();
        let driver = rig.folder.path().join("libcuda");
        write(&driver, b"the driver's own");
        rig.driver = vec![DriverFile { host: driver.clone(), place: place::REAL_CUDA.into() }];
        rig.mount_root();
        assert!(rig.guard().unwrap().is_empty());
        assert_eq!(rig.preload(), format!("{}\n", place::SHIM));
        assert_eq!(fs::read(rig.in_root(place::REAL_CUDA)).unwrap(), b"the driver's own");
        let folder = (PathBuf::new(), place::FOLDER.to_owned(), true);
        let driver = (driver, place::REAL_CUDA.to_owned(), true);
        for (host, place, read_only) in rig.places().into_iter().chain([driver, folder]) {
            let flags = statvfs(rig.in_root(&place)).unwrap().f_flag;
            assert_eq!(flags.contains(StatVfsMountFlags::RDONLY), read_only, "{place}");
            assert!(flags.contains(StatVfsMountFlags::NOSUID | StatVfsMountFlags::NODEV), "{place}");
            let data = !read_only || place == place::FOLDER;
            assert_eq!(flags.contains(StatVfsMountFlags::NOEXEC), data, "{place}");
            // What the node mounts later over its own file is no matter of the container's.
            if place != place::FOLDER {
                mount_bind("/proc/self/status", &host).unwrap();
                assert_ne!(fs::metadata(rig.in_root(&place)).unwrap().len(), 0, "{place}");
                rustix::mount::unmount(&host, rustix::mount::UnmountFlags::DETACH).unwrap();
            }
        }
        // A ceiling that is changed later is that of the container at once.
        let inside = Limits::open(&rig.in_root(place::LIMITS)).unwrap();
        let limit = GpuLimit { memory_bytes: 4 << 30, ..inside.get(0).unwrap() };
        region::LimitsWriter::open(&rig.share().limits()).unwrap().set(&limit).unwrap();
        assert_eq!(inside.get(0).unwrap().memory_bytes, 4 << 30);
    });
}

/// An image's links can lead a file of the driver anywhere, but not over what enforces the share, nor into `/proc`, where
/// the runtime has yet to write.
#[test]
#[ignore = "mounts need root"]
fn the_drivers_other_files_are_beside_and_under_what_enforces_the_share() {
    with_own_mounts("the_drivers_other_files_are_beside_and_under_what_enforces_the_share", || {
        let rig = || {
            let mut rig = Rig::bare();
            let (program, socket) = (rig.folder.path().join("smi"), rig.folder.path().join("socket"));
            write(&program, b"a program");
            drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
            rig.driver = vec![
                DriverFile { host: program, place: "/usr/bin/nvidia-smi".into() },
                DriverFile { host: socket, place: "/run/driver/socket".into() },
            ];
            rig
        };
        let link = |rig: &Rig, target: &str| {
            fs::create_dir_all(rig.in_root("/usr/bin")).unwrap();
            std::os::unix::fs::symlink(target, rig.in_root("/usr/bin/nvidia-smi")).unwrap();
            rig.mount_root();
        };
        let plain = rig();
        plain.mount_root();
        plain.guard().unwrap();
        let flags = |place: &str| statvfs(plain.in_root(place)).unwrap().f_flag;
        let no_surprises = StatVfsMountFlags::NOSUID | StatVfsMountFlags::NODEV;
        let (program, socket) = (flags("/usr/bin/nvidia-smi"), flags("/run/driver/socket"));
        assert!(program.contains(no_surprises | StatVfsMountFlags::RDONLY));
        assert!(!program.contains(StatVfsMountFlags::NOEXEC));
        assert!(socket.contains(no_surprises | StatVfsMountFlags::NOEXEC));
        assert!(!socket.contains(StatVfsMountFlags::RDONLY));
        assert_eq!(fs::read(plain.in_root("/usr/bin/nvidia-smi")).unwrap(), b"a program");

        let over = rig();
        write(&over.in_root(place::LD_SO_PRELOAD), b"");
        link(&over, place::LD_SO_PRELOAD);
        over.guard().unwrap();
        assert_eq!(over.preload(), format!("{}\n", place::SHIM));

        let into_proc = rig();
        link(&into_proc, "/proc/sys/kernel/hostname");
        fs::create_dir_all(into_proc.in_root("/proc")).unwrap();
        rustix::mount::mount_bind_recursive("/proc", into_proc.in_root("/proc")).unwrap();
        let refusal = into_proc.refusal();
        assert!(refusal.contains("it leads into /proc"), "{refusal}");
    });
}

#[test]
fn a_container_without_a_claim_says_that_nri_did_not_see_it() {
    let mut rig = Rig::bare();
    rig.container.share = None;
    let refusal = rig.refusal();
    assert!(refusal.contains("vcuda-nri-plugin runs") && refusal.contains("NRI is on"), "{refusal}");
}

#[test]
fn a_claim_is_looked_up_and_never_believed() {
    let mut rig = Rig::bare();
    rig.container.id = "another".into();
    assert!(matches!(rig.guard(), Err(Refusal::BoundToAnother { bound, .. }) if bound == ID));
    for claim in ["../../etc_x", "7f3c", "", "7f3c_main/../x", "\n"] {
        rig.container.share = Some(claim.into());
        assert!(matches!(rig.guard(), Err(Refusal::BadClaim { .. })), "{claim:?}");
    }
    rig.container.share = Some("7f3c_other".into());
    assert!(matches!(rig.guard(), Err(Refusal::NoRecord { .. })));
}

#[test]
fn a_record_that_is_old_or_broken_binds_nothing() {
    let mut rig = Rig::bare();
    rig.record.boot_id = "an earlier one".into();
    rig.store();
    assert!(matches!(rig.guard(), Err(Refusal::BoundBeforeBoot { .. })));
    fs::write(rig.share().record(), b"{}").unwrap();
    assert!(matches!(rig.guard(), Err(Refusal::BadRecord { .. })));
}

#[test]
fn whole_gpus_need_their_record_and_nothing_else() {
    let mut rig = Rig::bare();
    rig.record.kind = ShareKind::Whole;
    rig.store();
    rig.image("bin/app", b"whatever it is");
    assert!(rig.guard().unwrap().is_empty());
    rig.container.id = "another".into();
    assert!(matches!(rig.guard(), Err(Refusal::BoundToAnother { .. })));
}

#[test]
#[ignore = "mounts need root"]
fn what_the_node_lacks_is_named() {
    with_own_mounts("what_the_node_lacks_is_named", || {
        for at in 0..6 {
            let rig = Rig::ready();
            let (host, ..) = rig.places().swap_remove(at);
            fs::remove_file(&host).unwrap();
            let (refusal, host) = (rig.refusal(), host.to_string_lossy());
            assert!(
                refusal.contains(&*host) && refusal.contains("pod team/train, container main"),
                "{refusal}"
            );
        }
    });
}

#[test]
#[ignore = "mounts need root"]
fn what_image_and_volumes_have_in_a_place_is_covered() {
    with_own_mounts("what_image_and_volumes_have_in_a_place_is_covered", || {
        for at in 0..6 {
            let rig = Rig::bare();
            let (host, place, _) = rig.places().swap_remove(at);
            rig.image(place.trim_start_matches('/'), b"the image's");
            rig.mount_root();
            let copy = rig.folder.path().join("copy");
            fs::copy(&host, &copy).unwrap();
            if place != place::LD_SO_PRELOAD {
                rig.volume(&copy, &place);
            }
            let refused = rig.guard();
            assert!(refused.is_ok(), "{refused:?}");
            assert_eq!(fs::read(rig.in_root(&place)).unwrap(), fs::read(&host).unwrap(), "{place}");
        }
        // Their folder is a volume, which other containers have, too.
        let rig = Rig::ready();
        let volume = rig.folder.path().join("volume");
        fs::create_dir(&volume).unwrap();
        rig.volume(&volume, LIBRARIES);
        assert!(rig.guard().unwrap().is_empty());
        assert_eq!(
            fs::read(volume.join("libcuda.so.550.1")).unwrap(),
            b"",
            "only a mount point is made there"
        );
    });
}

/// A link of the image's from one place to another would have one mount over the other, or lead out of the root.
#[test]
#[ignore = "mounts need root"]
fn links_in_the_image_lead_neither_out_of_it_nor_one_mount_over_another() {
    with_own_mounts("links_in_the_image_lead_neither_out_of_it_nor_one_mount_over_another", || {
        let rig = Rig::bare();
        fs::create_dir_all(rig.in_root("/etc")).unwrap();
        symlink(format!("{LIBRARIES}/libcuda.so.550.1"), rig.in_root(place::LD_SO_PRELOAD)).unwrap();
        rig.mount_root();
        let refusal = rig.refusal();
        assert!(refusal.contains("the shim in libcuda's place is not what is at"), "{refusal}");

        let rig = Rig::bare();
        let outside = rig.folder.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::create_dir_all(rig.in_root("/usr/local")).unwrap();
        symlink(&outside, rig.in_root(place::FOLDER)).unwrap();
        rig.mount_root();
        assert!(rig.refusal().contains("broken symlink is in its way"), "{}", rig.refusal());
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);

        let rig = Rig::bare();
        fs::create_dir_all(rig.in_root("/etc")).unwrap();
        symlink("../../outside", rig.in_root(place::LD_SO_PRELOAD)).unwrap();
        rig.mount_root();
        assert!(rig.refusal().contains("broken symlink is in its way"), "{}", rig.refusal());
        assert!(!rig.folder.path().join("outside").exists());
    });
}

#[test]
#[ignore = "mounts need root"]
fn a_fifo_in_the_place_of_the_shim_is_refused_at_once() {
    with_own_mounts("a_fifo_in_the_place_of_the_shim_is_refused_at_once", || {
        let rig = Rig::ready();
        let at = rig.in_root(&rig.places()[1].1);
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &at, rustix::fs::FileType::Fifo, 0o666.into(), 0).unwrap();
        assert!(rig.refusal().contains("no regular file"), "{}", rig.refusal());
    });
}

#[test]
#[ignore = "mounts need root"]
fn limits_that_are_not_those_of_the_share_are_refused() {
    with_own_mounts("limits_that_are_not_those_of_the_share_are_refused", || {
        let rig = Rig::bare();
        rig.limit(GpuUuid::from_bytes([8; 16]), 1 << 30);
        rig.mount_root();
        assert!(matches!(rig.guard(), Err(Refusal::Limits { .. })), "{}", rig.refusal());

        let rig = Rig::bare();
        fs::write(rig.share().limits(), b"nothing of the kind").unwrap();
        rig.mount_root();
        assert!(matches!(rig.guard(), Err(Refusal::Limits { .. })), "{}", rig.refusal());

        let rig = Rig::bare();
        rig.limit(gpu(), 0);
        rig.mount_root();
        assert!(rig.refusal().contains("leaves nothing"), "{}", rig.refusal());
    });
}

#[test]
#[ignore = "mounts need root"]
fn the_images_own_preloads_are_kept_behind_the_shim() {
    with_own_mounts("the_images_own_preloads_are_kept_behind_the_shim", || {
        let expected = format!("{}\n/opt/jemalloc.so\nlibfoo.so\n", place::SHIM);
        let list = b"/opt/jemalloc.so libfoo.so\n";

        let rig = Rig::bare();
        rig.image("etc/ld.so.preload", list);
        rig.mount_root();
        rig.guard().unwrap();
        assert_eq!(rig.preload(), expected);

        // The list is a link inside the image, absolute as images have them.
        let rig = Rig::bare();
        rig.image("opt/list", list);
        fs::create_dir_all(rig.in_root("/etc")).unwrap();
        symlink("/opt/list", rig.in_root("/etc/ld.so.preload")).unwrap();
        rig.mount_root();
        rig.guard().unwrap();
        assert_eq!(fs::read_to_string(rig.in_root("/opt/list")).unwrap(), expected);
        assert_eq!(fs::read_to_string(rig.share().preload()).unwrap(), expected);

        // All of /etc is a volume.
        let rig = Rig::bare();
        let volume = rig.folder.path().join("volume");
        write(&volume.join("ld.so.preload"), list);
        rig.mount_root();
        rig.volume(&volume, "/etc");
        rig.guard().unwrap();
        assert_eq!(rig.preload(), expected);
        assert_eq!(fs::read(volume.join("ld.so.preload")).unwrap(), list, "the volume keeps its own");
    });
}

#[test]
#[ignore = "mounts need root"]
fn a_preload_list_that_cannot_be_kept_is_refused() {
    with_own_mounts("a_preload_list_that_cannot_be_kept_is_refused", || {
        for bad in [&b"/a\x07.so"[..], &[b'x'; 100_000]] {
            let rig = Rig::bare();
            rig.image("etc/ld.so.preload", bad);
            rig.mount_root();
            assert!(rig.refusal().contains("/etc/ld.so.preload"), "{}", rig.refusal());
        }
    });
}

#[test]
#[ignore = "mounts need root"]
fn a_node_without_its_own_files_is_named_as_the_cause() {
    with_own_mounts("a_node_without_its_own_files_is_named_as_the_cause", || {
        let rig = Rig::ready();
        fs::remove_file(rig.paths.inventory()).unwrap();
        assert!(rig.refusal().contains("vcuda-device-plugin"), "{}", rig.refusal());
    });
}
