//! What is remembered of a root, on real overlays: each test runs in a mount namespace of its own.

use std::process::Command;

use rustix::{
    fs::{XattrFlags, removexattr, setxattr},
    mount::{MountFlags, mount},
};

use super::*;
use crate::compat::elf_maker::Maker;

/// An image of two layers and a container of it.
struct Rig {
    folder: tempfile::TempDir,
    scans: Scans,
}

impl Rig {
    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn with(body: impl FnOnce(&Self)) {
        let folder = tempfile::tempdir().unwrap();
        let rig = Self { scans: Scans::below(&folder.path().join("state")), folder };
        for name in ["1/bin", "2/opt", "upper", "work", "root"] {
            fs::create_dir_all(rig.at(name)).unwrap();
        }
        fs::write(rig.at("1/bin/app"), Maker::program().make()).unwrap();
        fs::write(rig.at("2/opt/libcudart.so.12"), runtime()).unwrap();
        let [one, two, upper, work] =
            ["1", "2", "upper", "work"].map(|name| rig.at(name).to_str().unwrap().to_owned());
        let options = format!("lowerdir={two}:{one},upperdir={upper},workdir={work}");
        let options = std::ffi::CString::new(options).unwrap();
        mount("overlay", rig.at("root"), "overlay", MountFlags::empty(), Some(options.as_c_str())).unwrap();
        body(&rig);
        let unmounted = Command::new("umount").arg(rig.at("root")).status().unwrap();
        assert!(unmounted.success());
    }

    fn root(&self) -> Rootfs {
        Rootfs::open(&self.at("root")).unwrap()
    }

    fn survey(&self) -> Survey {
        self.scans.survey(&self.root(), Limits::default(), &mut |_| {}).unwrap().survey
    }

    /// Whether the next look is one from memory.
    fn is_known(&self) -> bool {
        self.scans.layers(&self.root()).and_then(|layers| self.scans.known(&layers)).is_some()
    }
}

fn runtime() -> Vec<u8> {
    Maker { soname: Some("libcudart.so.12"), ..Maker::default() }.make()
}

#[test]
#[ignore = "mounts need root"]
fn an_image_is_known_again_in_another_container() {
    Rig::with(|rig| {
        assert!(!rig.is_known());
        let first = rig.survey();
        assert_eq!((first.elf, first.runtimes().count()), (2, 1));
        assert!(rig.is_known());
        // What a runtime and the hooks put there: mount points, links, the loader's cache.
        fs::create_dir(rig.at("root/etc")).unwrap();
        fs::write(rig.at("root/etc/hosts"), "").unwrap();
        fs::write(rig.at("root/etc/ld.so.cache"), "glibc-ld.so.cache1.1").unwrap();
        std::os::unix::fs::symlink("x", rig.at("root/opt/libcuda.so.1")).unwrap();
        assert!(rig.is_known());
        assert_eq!(rig.survey(), first);
        let id = rig.scans.layers(&rig.root()).unwrap().id();
        assert_eq!(rig.scans.by_id(&id), Some(first));
    });
}

#[test]
#[ignore = "mounts need root"]
fn a_container_that_changed_its_root_is_looked_at_anew() {
    Rig::with(|rig| {
        rig.survey();
        fs::write(rig.at("root/opt/new.so"), runtime()).unwrap();
        assert!(!rig.is_known());
        assert_eq!(rig.survey().runtimes().count(), 2);
        fs::remove_file(rig.at("root/opt/new.so")).unwrap();
        assert!(rig.is_known(), "the image itself is still the same");
        // In place, under its old name.
        fs::write(rig.at("root/bin/app"), runtime()).unwrap();
        assert!(!rig.is_known());
        assert_eq!(rig.survey().runtimes().count(), 2);
    });
    Rig::with(|rig| {
        rig.survey();
        fs::remove_file(rig.at("root/opt/libcudart.so.12")).unwrap();
        assert!(!rig.is_known());
        assert_eq!(rig.survey().runtimes().count(), 0);
    });
}

/// Emptied and made anew, a folder has no file and no whiteout in the upper layer, only a mark.
#[test]
#[ignore = "mounts need root"]
fn an_image_of_which_a_file_could_not_be_read_is_looked_at_anew() {
    Rig::with(|rig| {
        // The overlay opens no file whose contents it would have to look for elsewhere.
        let (file, name) = (rig.at("2/opt/libcudart.so.12"), "trusted.overlay.metacopy");
        setxattr(&file, name, b"", XattrFlags::empty()).unwrap();
        assert!(!rig.survey().is_whole() && !rig.is_known());
        removexattr(&file, name).unwrap();
        assert!(rig.survey().is_whole() && rig.is_known());
    });
}

#[test]
#[ignore = "mounts need root"]
fn an_opaque_folder_in_a_containers_own_layer_is_seen() {
    Rig::with(|rig| {
        assert_eq!(rig.survey().runtimes().count(), 1);
        fs::remove_dir_all(rig.at("root/opt")).unwrap();
        fs::create_dir(rig.at("root/opt")).unwrap();
        let mut value = [0; 8];
        let length = rustix::fs::getxattr(rig.at("upper/opt"), "trusted.overlay.opaque", &mut value).unwrap();
        assert_eq!((&value[..length], fs::read_dir(rig.at("upper/opt")).unwrap().count()), (&b"y"[..], 0));
        assert!(!rig.is_known());
        assert_eq!(rig.survey().runtimes().count(), 0);
    });
}

#[test]
#[ignore = "mounts need root"]
fn a_layer_that_was_unpacked_anew_is_another_one() {
    Rig::with(|rig| {
        rig.survey();
        let before = rig.scans.layers(&rig.root()).unwrap();
        fs::rename(rig.at("1"), rig.at("old")).unwrap();
        fs::create_dir(rig.at("1")).unwrap();
        let after = rig.scans.layers(&rig.root()).unwrap();
        assert_ne!(before, after);
        assert!(rig.scans.known(&after).is_none());
    });
}

#[test]
#[ignore = "mounts need root"]
fn what_is_remembered_and_broken_is_forgotten() {
    Rig::with(|rig| {
        rig.survey();
        let path = rig.scans.path(&rig.scans.layers(&rig.root()).unwrap().id());
        let whole = fs::read(&path).unwrap();
        let text = String::from_utf8(whole.clone()).unwrap();
        for broken in [
            text.replace("\"version\":1", "\"version\":0"),
            text.replace("\"inode\":", "\"inode\":1"),
            "{".into(),
        ] {
            assert_ne!(broken, text);
            fs::write(&path, broken).unwrap();
            assert!(!rig.is_known());
        }
        fs::write(&path, whole).unwrap();
        assert!(rig.is_known());
    });
}

#[test]
#[ignore = "mounts need root"]
fn of_many_that_start_at_once_one_looks_and_the_others_take_what_it_found() {
    Rig::with(|rig| {
        let turn = rig.scans.turn(Duration::ZERO).unwrap();
        let mut found = Survey::default();
        found.files = 12_345;
        thread::scope(|scope| {
            let others: Vec<_> = (0..3).map(|_| scope.spawn(|| rig.survey())).collect();
            // Long enough for them to look for themselves, if they did not wait.
            thread::sleep(Duration::from_millis(200));
            rig.scans.keep(&rig.scans.layers(&rig.root()).unwrap(), &found).unwrap();
            drop(turn);
            for other in others {
                assert_eq!(other.join().unwrap(), found);
            }
        });
    });
}

/// It would be written at each start and read at none, for each of many images.
#[test]
fn what_is_too_large_to_be_read_again_is_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let scans = Scans::below(folder.path());
    let layers = Layers(Vec::new());
    let mut survey = Survey::default();
    scans.keep(&layers, &survey).unwrap();
    assert_eq!(scans.known(&layers), Some(survey.clone()));
    let long = "x".repeat(16 << 10);
    (0..1_100).for_each(|_| survey.take_unreadable(Path::new("/x"), long.clone()));
    scans.keep(&layers, &survey).unwrap();
    let size = |entry: fs::DirEntry| entry.metadata().unwrap().len();
    let kept: u64 = fs::read_dir(folder.path().join("scans")).unwrap().flatten().map(size).sum();
    assert!(kept < MAX_BYTES, "{kept}");
}

#[test]
#[ignore = "mounts need root"]
fn a_folder_in_an_overlay_is_no_overlay() {
    Rig::with(|rig| {
        rig.survey();
        let part = Rootfs::open(&rig.at("root/opt")).unwrap();
        assert_eq!(rig.scans.layers(&part), None);
    });
}

#[test]
fn layers_are_found_in_every_form_of_mountinfo() {
    let find = |options: &str| {
        Overlay::find(
            42,
            format!(
                "7 1 0:1 / / rw - ext4 /dev/vda rw\n42 7 0:9 / /x rw,relatime shared:1 - overlay overlay {options}\n"
            )
            .as_bytes(),
        )
    };
    let paths = |paths: &[&str]| paths.iter().map(PathBuf::from).collect::<Vec<_>>();
    let usual = find("rw,lowerdir=/s/2/fs:/s/1/fs,upperdir=/s/3/fs,workdir=/s/3/work,uuid=on").unwrap();
    assert_eq!(usual.lower, paths(&["/s/2/fs", "/s/1/fs"]));
    assert_eq!(usual.upper, Some("/s/3/fs".into()));
    assert_eq!(find("rw,lowerdir+=/s/2/fs,lowerdir+=/s/1/fs,upperdir=/s/3/fs").unwrap(), usual);
    assert_eq!(find("rw,lowerdir=2/fs:1/fs,upperdir=/s/3/fs,workdir=/s/3/work").unwrap(), usual);
    assert_eq!(find("ro,lowerdir=/s/2/fs:/s/1/fs").unwrap().upper, None);
    for none in ["rw", "rw,lowerdir=2/fs", "rw,lowerdir=/a\\:b,upperdir=/s/3/fs", "rw,upperdir=/s/3/fs"] {
        assert_eq!(find(none), None, "{none}");
    }
    assert_eq!(Overlay::find(7, b"7 1 0:1 / / rw - ext4 /dev/vda rw,lowerdir=/a\n".as_slice()), None);
    assert_eq!(Overlay::find(7, b"7 1 0:1 /part /x rw - overlay o rw,lowerdir=/a\n".as_slice()), None);
    assert_eq!(Overlay::find(4, b"42 1 0:1 / /x rw - overlay o rw,lowerdir=/a\n".as_slice()), None);
    assert_eq!(Overlay::find(8, b"7 1 0:1 / /x rw - overlay o rw,lowerdir=/a\n".as_slice()), None);
}

#[test]
#[ignore = "mounts need root"]
fn a_judgement_holds_only_when_it_is_judged_by_the_same() {
    Rig::with(|rig| {
        let layers = rig.scans.layers(&rig.root()).unwrap();
        let stamp = |name: &str| Stamp::of(&rustix::fs::stat(rig.at(name)).unwrap());
        let grounds = Grounds {
            version: VERSION,
            layers: layers.clone(),
            shim: stamp("1/bin/app"),
            driver: [Some(stamp("2/opt/libcudart.so.12")), None],
            driver_version: "550.1".into(),
            gpus: BTreeSet::from([90]),
            started: Some("/bin/app".into()),
        };
        let warned = vec![Finding::warn("an-id", "what", "why", "remedy").at(Path::new("/opt/x"))];
        let refused = vec![Finding::refuse("another", "what", "why", "remedy")];
        assert_eq!(rig.scans.judgement(&grounds), None);
        for findings in [warned.clone(), refused, Vec::new(), warned.clone()] {
            rig.scans.note_judgement(grounds.clone(), findings.clone()).unwrap();
            assert_eq!(rig.scans.judgement(&grounds), Some(findings));
        }
        for other in [
            Grounds { version: VERSION + 1, ..grounds.clone() },
            Grounds { driver: [None; 2], ..grounds.clone() },
            Grounds { driver_version: "560.1".into(), ..grounds.clone() },
            Grounds { gpus: BTreeSet::from([80]), ..grounds.clone() },
            Grounds { started: Some("/bin/other".into()), ..grounds.clone() },
        ] {
            assert_eq!(rig.scans.judgement(&other), None, "{other:?}");
        }
        // The same file, rewritten in place.
        fs::write(rig.at("1/bin/app"), Maker::program().make()).unwrap();
        let rewritten = Grounds { shim: stamp("1/bin/app"), ..grounds.clone() };
        assert_eq!(rewritten.shim.inode, grounds.shim.inode);
        assert_eq!(rig.scans.judgement(&rewritten), None);
        rig.scans.note_judgement(rewritten.clone(), Vec::new()).unwrap();
        assert_eq!(rig.scans.judgement(&rewritten), Some(Vec::new()));
        assert_eq!(rig.scans.judgement(&grounds), None);

        // More than any honest image gives is not kept, and what is broken is forgotten.
        let long = "x".repeat(usize::try_from(MAX_JUDGEMENT_BYTES).unwrap());
        let many = vec![Finding::warn("an-id", long, "why", "remedy")];
        rig.scans.note_judgement(grounds.clone(), many).unwrap();
        assert_eq!(rig.scans.judgement(&grounds), None);
        fs::write(rig.scans.judgement_path(&layers), "{").unwrap();
        assert_eq!(rig.scans.judgement(&rewritten), None);
    });
}
