//! Images that are made to hang, fill or crash whoever looks at them: each comes to an end, in bounded memory, with an
//! answer that is not "fits" where what decides could not be seen.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::{fs::symlink, net::UnixListener},
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;

use super::{
    Finding,
    check::{self, Limits, Node, Report, Verdict},
    elf::{Depth, ElfError},
    elf_maker::Maker,
    files::{Facts, Kind},
    start::Command,
    survey::Survey,
};
use crate::rootfs::Rootfs;

/// Far more than any look takes; a hang is what is waited for.
const HANG: Duration = Duration::from_secs(60);

const APP: &str = "bin/app";
const LIBC: &str = "lib/x86_64-linux-gnu/libc.so.6";

/// All that the check opens by its path, and one that it comes by.
const READ: &[&str] = &[
    APP,
    LIBC,
    "lib/x86_64-linux-gnu",
    "etc/ld.so.cache",
    "etc/ld.so.preload",
    "etc/ld.so.conf",
    "etc/ld.so.conf.d/a.conf",
    "usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "opt/libcudart.so.12",
];

struct Image(TempDir);

impl Image {
    fn new() -> Self {
        let image = Self(tempfile::tempdir().unwrap());
        image.write(APP, &Maker::program().make());
        image.write(LIBC, &Maker::glibc(&["GLIBC_2.36"]).make());
        image.write("etc/ld.so.conf", b"include ld.so.conf.d/*.conf\n");
        image
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn write(&self, path: &str, bytes: &[u8]) {
        fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        fs::write(self.at(path), bytes).unwrap();
    }

    /// Puts something else in the place of `path`.
    fn with(path: &str, put: impl Fn(&Path)) -> Self {
        let image = Self::new();
        let at = image.at(path);
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        if at.is_dir() {
            fs::remove_dir_all(&at).unwrap();
        } else {
            let _ = fs::remove_file(&at);
        }
        put(&at);
        image
    }

    /// The whole check, which must end; an error is an answer too.
    fn check(self) -> Option<Report> {
        let (done, wait) = mpsc::channel();
        let root = self.at("");
        thread::spawn(move || {
            let command =
                Command { args: vec!["app".into()], env: vec!["PATH=/bin".into()], cwd: "/".into() };
            let rootfs = Rootfs::open(&root).unwrap();
            let seen = check::rootfs(rootfs, "x".into(), command, Limits::default(), None, &mut |_| {});
            done.send(seen.ok().map(|seen| seen.report(&Node::without_shim()))).unwrap();
        });
        wait.recv_timeout(HANG).expect("it hangs")
    }
}

fn verdict(report: &Option<Report>) -> Verdict {
    report.as_ref().map_or(Verdict::Unknown, |report| report.verdict)
}

#[test]
fn whatever_stands_in_the_place_of_a_file_that_is_read_is_told_and_never_waited_for() {
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("secret"), Maker::glibc(&["GLIBC_2.99"]).make()).unwrap();
    let out = format!("../../../../../../../../../..{}", outside.path().join("secret").display());
    type Put = Box<dyn Fn(&Path)>;
    let kinds: [(&str, Put); 8] = [
        ("FIFO", Box::new(|at| mknodat(CWD, at, FileType::Fifo, Mode::from_raw_mode(0o644), 0).unwrap())),
        ("socket", Box::new(|at| drop(UnixListener::bind(at).unwrap()))),
        ("folder", Box::new(|at| fs::create_dir(at).unwrap())),
        ("link to itself", Box::new(|at| symlink(at.file_name().unwrap(), at).unwrap())),
        ("link to nowhere", Box::new(|at| symlink("/nowhere/at/all", at).unwrap())),
        ("link out of the root", Box::new(move |at| symlink(&out, at).unwrap())),
        ("link to a device of the host", Box::new(|at| symlink("/dev/zero", at).unwrap())),
        ("file of a terabyte", Box::new(|at| File::create(at).unwrap().set_len(1 << 40).unwrap())),
    ];
    for (kind, put) in &kinds {
        for path in READ {
            let image = Image::with(path, put);
            let report = image.check();
            let decides = [APP, LIBC, "lib/x86_64-linux-gnu"].contains(path);
            if decides && *path != APP {
                assert_ne!(verdict(&report), Verdict::Fits, "{kind} at {path}: {report:?}");
            }
            if *path == APP {
                let findings = &report.as_ref().unwrap().findings;
                let ids: Vec<_> = findings.iter().map(Finding::name).collect();
                let plain = *kind == "file of a terabyte";
                assert!(ids.contains(&"entry-missing") || plain, "{kind} at {path}: {ids:?}");
            }
            // Nothing outside of the root was taken for something in it.
            let text = format!("{report:?}");
            assert!(!text.contains("2.99"), "{kind} at {path}: {text}");
        }
    }
}

#[test]
#[ignore = "root: devices are made"]
fn a_device_in_the_place_of_a_file_is_never_opened() {
    for path in READ {
        // A terminal of the kernel's own, 5:2 makes a new one with each opening; 1:5 is zeros without end.
        for device in [rustix::fs::makedev(5, 2), rustix::fs::makedev(1, 5)] {
            let put = |at: &Path| {
                mknodat(CWD, at, FileType::CharacterDevice, Mode::from_raw_mode(0o666), device).unwrap();
            };
            let report = Image::with(path, put).check();
            if *path == LIBC {
                assert_ne!(verdict(&report), Verdict::Fits, "{report:?}");
            }
        }
    }
}

fn facts(bytes: &[u8], depth: Depth) -> Facts {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    Facts::of(&file, depth).unwrap()
}

/// Puts `value` in the place of the dynamic entry `tag`.
fn dynamic_entry(bytes: &mut [u8], tag: u64, value: u64) {
    let at = (0..bytes.len() - 16).step_by(8).find(|at| bytes[*at..at + 8] == tag.to_le_bytes()).unwrap();
    bytes[at + 8..at + 16].copy_from_slice(&value.to_le_bytes());
}

#[test]
fn tables_that_claim_or_repeat_without_end_are_broken() {
    use goblin::elf::dynamic as dt;
    let many = |tag, value| {
        let maker = Maker {
            needs: vec![("libc.so.6", vec!["GLIBC_2.17"])],
            defines: vec!["libx.so", "X_1"],
            imports: vec!["cuInit"],
            ..Maker::program()
        };
        let mut bytes = maker.make();
        dynamic_entry(&mut bytes, tag, value);
        facts(&bytes, Depth::Whole).kind
    };
    for (tag, value) in [
        (dt::DT_VERNEEDNUM, u64::MAX),
        (dt::DT_VERDEFNUM, u64::MAX),
        (dt::DT_STRSZ, u64::MAX),
        (dt::DT_STRSZ, 1 << 40),
        (dt::DT_SYMTAB, u64::MAX),
        (dt::DT_GNU_HASH, u64::MAX - 8),
        (dt::DT_STRTAB, u64::MAX),
    ] {
        let kind = many(tag, value);
        assert!(matches!(kind, Kind::Broken(ElfError::Broken(_))), "{tag} {value}: {kind:?}");
    }
}

/// A version that says it is followed by itself, over and over.
#[test]
fn versions_in_a_circle_are_counted_once_for_each_that_is_claimed() {
    let maker = Maker { needs: vec![("libc.so.6", vec!["GLIBC_2.17"])], ..Maker::program() };
    let mut bytes = maker.make();
    dynamic_entry(&mut bytes, goblin::elf::dynamic::DT_VERNEEDNUM, 4_000);
    // `vn_version` 1 and `vn_cnt`; the count is made large, and `vna_next` stays at nothing.
    let at = (0..bytes.len() - 16)
        .step_by(8)
        .find(|at| bytes[*at..at + 4] == [1, 0, 1, 0] && bytes[at + 8..at + 12] == 16_u32.to_le_bytes())
        .unwrap();
    bytes[at + 2..at + 4].copy_from_slice(&u16::MAX.to_le_bytes());
    match facts(&bytes, Depth::Whole).kind {
        Kind::Elf(elf, _) => assert!(elf.needs.len() <= 4_096, "{}", elf.needs.len()),
        kind => assert!(matches!(kind, Kind::Broken(_)), "{kind:?}"),
    }
}

/// Names that many symbols share are taken once for each.
#[test]
fn names_that_are_too_many_or_too_long_are_not_taken() {
    let long: &'static str = Box::leak(format!("cu{}", "X".repeat(300)).into_boxed_str());
    let file = Maker { imports: vec![long; 1_000], ..Maker::program() }.make();
    match facts(&file, Depth::Symbols).kind {
        Kind::Elf(elf, _) => assert!(elf.imports.is_empty(), "too long for any function"),
        kind => panic!("{kind:?}"),
    }
    let file = Maker { imports: vec!["cuMemAllocManaged"; 60_000], ..Maker::program() }.make();
    let kind = facts(&file, Depth::Symbols).kind;
    assert!(matches!(kind, Kind::Broken(ElfError::Broken("it has more names than any"))), "{kind:?}");
}

#[test]
fn many_files_with_many_names_keep_few_of_them() {
    let imports: Vec<&'static str> =
        (0..2_000).map(|n| &*Box::leak(format!("nvmlFunction{n:0>200}").into_boxed_str())).collect();
    let maker = Maker { needed: vec!["libnvidia-ml.so.1"], imports, ..Maker::default() };
    let facts = facts(&maker.make(), Depth::Symbols);
    assert!(facts.elf().is_some(), "{facts:?}");
    let mut survey = Survey::default();
    for n in 0..200 {
        survey.take(Path::new(&format!("/{n}.so")), &facts);
    }
    let kept = serde_json::to_vec(&survey).unwrap().len();
    assert!(kept < 32 << 20, "{kept}");
    survey.take(&PathBuf::from("/x".repeat(20_000)), &facts);
    assert!(serde_json::to_vec(&survey).unwrap().len() < kept + 1_000, "no path longer than any");
}
