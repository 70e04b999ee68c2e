use std::{io::Write, path::PathBuf};

use proptest::prelude::*;
use region::place;
use tempfile::TempDir;

use super::*;
use crate::compat::{
    Finding,
    check::{Node, Report, Verdict},
    elf_maker::Maker,
};

/// A tar file in the making.
struct Tar(tar::Builder<Vec<u8>>);

impl Tar {
    fn new() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }

    fn header(kind: tar::EntryType, size: usize) -> tar::Header {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o755);
        header.set_size(size as u64);
        header
    }

    fn file(mut self, path: &str, bytes: &[u8]) -> Self {
        let mut header = Self::header(tar::EntryType::Regular, bytes.len());
        self.0.append_data(&mut header, path, bytes).unwrap();
        self
    }

    fn link(mut self, path: &str, target: &str) -> Self {
        let mut header = Self::header(tar::EntryType::Symlink, 0);
        self.0.append_link(&mut header, path, target).unwrap();
        self
    }

    fn hard_link(mut self, path: &str, target: &str) -> Self {
        let mut header = Self::header(tar::EntryType::Link, 0);
        self.0.append_link(&mut header, path, target).unwrap();
        self
    }

    fn folder(mut self, path: &str) -> Self {
        let mut header = Self::header(tar::EntryType::Directory, 0);
        self.0.append_data(&mut header, path, std::io::empty()).unwrap();
        self
    }

    /// An entry that says something of the next one.
    fn special(mut self, kind: tar::EntryType, bytes: &[u8]) -> Self {
        let header = Self::header(kind, bytes.len());
        self.0.append_data(&mut header.clone(), "pax", bytes).unwrap();
        self
    }

    /// A name as a hostile archive has it, which the library would not write.
    fn raw_name(mut self, name: &[u8], bytes: &[u8]) -> Self {
        let mut header = Self::header(tar::EntryType::Regular, bytes.len());
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name);
        header.set_cksum();
        self.0.append(&header, bytes).unwrap();
        self
    }

    fn done(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Two frames with a skippable one between them.
fn zstd(bytes: &[u8]) -> Vec<u8> {
    let frame =
        |bytes: &[u8]| ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest);
    let (a, b) = bytes.split_at(bytes.len() / 2);
    [frame(a), vec![0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3], frame(b)].concat()
}

struct Archive(TempDir);

impl Archive {
    fn of(bytes: &[u8]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("image.tar"), bytes).unwrap();
        Self(folder)
    }

    fn docker(layers: &[Vec<u8>]) -> Self {
        let names: Vec<String> = (0..layers.len()).map(|n| format!("{n}/layer.tar")).collect();
        let mut tar = Tar::new().file("c.json", config().as_bytes());
        for (name, layer) in names.iter().zip(layers) {
            tar = tar.file(name, layer);
        }
        let manifest = serde_json::json!([{"Config": "c.json", "RepoTags": [], "Layers": names}]);
        Self::of(&tar.file("manifest.json", manifest.to_string().as_bytes()).done())
    }

    fn oci(layers: &[Vec<u8>]) -> Self {
        let mut tar = Tar::new().file("blobs/sha256/c0", config().as_bytes());
        let mut descriptors = Vec::new();
        for (n, layer) in layers.iter().enumerate() {
            tar = tar.file(&format!("blobs/sha256/a{n}"), layer);
            descriptors.push(serde_json::json!({"digest": format!("sha256:a{n}")}));
        }
        let manifest = serde_json::json!({"config": {"digest": "sha256:c0"}, "layers": descriptors});
        let index = serde_json::json!({"manifests": [
            {"digest": "sha256:bad", "platform": {"os": "windows", "architecture": "amd64"}},
            {"digest": "sha256:00", "platform": {"os": "linux", "architecture": "amd64"}},
        ]});
        let tar = tar.file("blobs/sha256/00", manifest.to_string().as_bytes());
        Self::of(&tar.file("index.json", index.to_string().as_bytes()).done())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("image.tar")
    }

    fn check(&self) -> Result<Report, ArchiveError> {
        self.check_within(Limits::default())
    }

    fn check_within(&self, limits: Limits) -> Result<Report, ArchiveError> {
        Ok(see(&self.path(), limits, &mut |_| {})?.report(&Node::without_shim()))
    }

    fn ids(&self) -> (Verdict, Vec<&'static str>) {
        let report = self.check().unwrap();
        (report.verdict, report.findings.iter().map(Finding::name).collect())
    }
}

fn config() -> String {
    serde_json::json!({"architecture": "amd64", "config": {"Entrypoint": ["app"], "Env": ["PATH=/bin"]}})
        .to_string()
}

fn base() -> Tar {
    Tar::new()
        .folder("./")
        .folder("usr/lib/x86_64-linux-gnu")
        .link("lib", "usr/lib")
        .file("usr/lib/x86_64-linux-gnu/libc.so.6", &Maker::glibc(&["GLIBC_2.36"]).make())
        .file("bin/app", &Maker::program().make())
}

#[test]
fn what_a_share_has_put_there_is_not_told_as_the_images() {
    let shim = Maker { soname: Some("libcuda.so.1"), exports: vec!["cuInit"], ..Maker::default() }.make();
    let other =
        Maker { soname: Some("libcuda.so.1"), exports: vec!["cuInit", "cuDeviceGet"], ..Maker::default() }
            .make();
    let told = |libcuda: &[u8], preload: &str| {
        let layer = base()
            .file(place::SHIM.trim_start_matches('/'), &shim)
            .file("usr/lib/x86_64-linux-gnu/libcuda.so.1", libcuda)
            .file("etc/ld.so.preload", preload.as_bytes());
        let findings = Archive::oci(&[layer.done()]).check().unwrap().findings;
        let kept: Vec<_> = findings
            .into_iter()
            .filter(|finding| ["preload-present", "libcuda-first"].contains(&finding.name()))
            .map(|finding| (finding.name(), finding.what))
            .collect();
        kept
    };
    assert_eq!(told(&shim, place::SHIM), []);
    let found = told(&other, &format!("{}\n/lib/libown.so\n", place::SHIM));
    let ids: Vec<_> = found.iter().map(|(id, _)| *id).collect();
    assert_eq!(ids, ["preload-present", "libcuda-first"]);
    assert_eq!(found[0].1, "the image preloads libraries: /lib/libown.so");
}

#[test]
fn both_forms_and_all_compressions_tell_the_same() {
    let layer = base().done();
    for layer in [layer.clone(), gzip(&layer), zstd(&layer)] {
        for archive in
            [Archive::docker(std::slice::from_ref(&layer)), Archive::oci(std::slice::from_ref(&layer))]
        {
            let report = archive.check().unwrap();
            assert_eq!((report.verdict, report.files, report.elf), (Verdict::Fits, 2, 2), "{report:?}");
        }
    }
}

#[test]
fn a_later_layer_replaces_what_an_earlier_one_has() {
    let older = Tar::new().file("lib/x86_64-linux-gnu/libc.so.6", &Maker::glibc(&["GLIBC_2.12"]).make());
    // The path goes through the link of the base, as on a disk.
    let archive = Archive::docker(&[base().done(), older.done()]);
    assert_eq!(archive.ids(), (Verdict::DoesNotFit, vec!["libc-too-old"]));
}

#[test]
fn whiteouts_remove_from_the_layers_below_only() {
    let removed = Tar::new().file("usr/lib/x86_64-linux-gnu/.wh.libc.so.6", b"");
    assert_eq!(Archive::oci(&[base().done(), removed.done()]).ids().1, ["libc-none"]);
    // Of a whole folder, by the name of a link to it too.
    for name in ["usr/.wh.lib", "usr/lib/.wh..wh..opq", "lib/.wh.x86_64-linux-gnu", "lib/.wh..wh..opq"] {
        let removed = Tar::new().file(name, b"").done();
        assert_eq!(Archive::oci(&[base().done(), removed]).ids().1, ["libc-none"], "{name}");
    }
    // What the same layer brings stays, whichever comes first.
    let libc = Maker::glibc(&["GLIBC_2.41"]).make();
    let path = "usr/lib/x86_64-linux-gnu/libc.so.6";
    let opaque = "usr/lib/.wh..wh..opq";
    for layer in
        [Tar::new().file(opaque, b"").file(path, &libc), Tar::new().file(path, &libc).file(opaque, b"")]
    {
        assert_eq!(Archive::oci(&[base().done(), layer.done()]).ids(), (Verdict::Fits, vec![]));
    }
}

/// containerd writes extended attributes of a layer as they are, so an overlay's own mark has its effect.
#[test]
fn a_folder_that_is_marked_opaque_hides_what_is_below_it_in_lower_layers() {
    let pax = |value: &str| {
        let key = "SCHILY.xattr.trusted.overlay.opaque=";
        let length = 2 + 1 + key.len() + value.len() + 1;
        Tar::new().special(tar::EntryType::XHeader, format!("{length} {key}{value}\n").as_bytes())
    };
    let folder = "usr/lib/x86_64-linux-gnu";
    let marked = pax("y").folder(folder).done();
    assert_eq!(Archive::oci(&[base().done(), marked]).ids().1, ["libc-none"]);
    let unmarked = pax("n").folder(folder).done();
    assert_eq!(Archive::oci(&[base().done(), unmarked]).ids(), (Verdict::Fits, vec![]));
    // Its mark is for the next entry alone.
    let other = pax("y").folder("opt").folder(folder).done();
    assert_eq!(Archive::oci(&[base().done(), other]).ids(), (Verdict::Fits, vec![]));
}

#[test]
fn what_decides_whose_libcuda_comes_first_is_kept_from_layers() {
    let own = Maker { soname: Some("libcuda.so.1"), exports: vec!["cuInit"], ..Maker::default() }.make();
    let app = Maker { runpath: Some("$ORIGIN/../opt/$LIB"), ..Maker::program() }.make();
    let layer = Tar::new()
        .file("etc/ld.so.conf", b"include ld.so.conf.d/*.conf\n")
        .file("etc/ld.so.conf.d/cuda.conf", b"/opt/compat\n")
        .file("opt/compat/libcuda.so.1", &own)
        .file("opt/lib64/libcuda.so.1", &own)
        .file("bin/app", &app);
    let report = Archive::oci(&[base().done(), layer.done()]).check().unwrap();
    let of = |id: &str| {
        let mut found = report.findings.iter().filter(|finding| finding.id == id);
        let path = found.next().and_then(|finding| finding.file.clone());
        (path, found.count())
    };
    assert_eq!(of("libcuda-first"), (Some("/opt/lib64/libcuda.so.1".into()), 0), "{report:?}");
    assert_eq!(of("libcuda-configured"), (Some("/opt/compat/libcuda.so.1".into()), 0), "{report:?}");
    let first = report.findings.iter().find(|finding| finding.id == "libcuda-first").unwrap();
    assert!(first.what.contains("the RUNPATH of /bin/app"), "{}", first.what);
}

#[test]
fn a_file_in_the_place_of_a_folder_takes_all_below_it_away() {
    let layer = Tar::new().file("usr/lib", b"a file").done();
    assert_eq!(Archive::oci(&[base().done(), layer]).ids().1, ["libc-none"]);
}

#[test]
fn hard_links_are_the_file_that_they_name() {
    let layer = Tar::new().hard_link("bin/other", "bin/app").hard_link("bin/none", "bin/missing").done();
    let report = Archive::oci(&[base().done(), layer]).check().unwrap();
    assert_eq!((report.files, report.verdict), (3, Verdict::Unknown), "one of the links leads nowhere");
}

#[test]
fn long_names_are_read_in_every_form() {
    let long = format!("opt/{}/app", "d".repeat(300));
    let archive = Archive::oci(&[base().file(&long, &Maker::static_program().make()).done()]);
    let report = archive.check().unwrap();
    assert!(report.findings[0].what.contains(&long), "{report:?}");
}

#[test]
fn hostile_names_and_links_stay_inside_and_end() {
    let layer = base()
        .raw_name(b"../../../../bin/app", &Maker::static_program().make())
        .raw_name(b"a/.wh...", b"")
        .raw_name(b"b/.wh..", b"")
        .raw_name(b".wh.", b"")
        .link("loop", "loop")
        .link("x/up", "../../../../../../..")
        .file("loop/y", b"")
        .done();
    let report = Archive::oci(&[layer]).check().unwrap();
    assert_eq!(report.verdict, Verdict::Unknown);
    assert!(report.incomplete.unwrap().contains("make no sense"));
    // `..` ends at the root, as it does for the runtime: that entry is the program that is started.
    assert_eq!(report.findings[0].id, "entry-static");
}

#[test]
fn bombs_end_at_the_limit_and_leave_the_answer_open() {
    let zeros = Tar::new().file("zeros", &vec![0; 8 << 20]).done();
    let limits = Limits { bytes: 1 << 20, ..Limits::default() };
    for layer in [gzip(&zeros), zeros.clone()] {
        let report = Archive::oci(&[base().done(), layer]).check_within(limits).unwrap();
        assert_eq!(report.verdict, Verdict::Unknown);
        assert!(report.incomplete.unwrap().contains("unpacks to more"));
    }
    let many = (0..100).fold(base(), |tar, n| tar.file(&n.to_string(), b"")).done();
    let limits = Limits { entries: 50, ..Limits::default() };
    assert_eq!(Archive::oci(&[many]).check_within(limits).unwrap().verdict, Verdict::Unknown);
    // A name without end.
    let mut header = Tar::header(tar::EntryType::GNULongName, 1 << 20);
    header.set_cksum();
    let mut tar = base();
    tar.0.append(&header, &vec![b'x'; 1 << 20][..]).unwrap();
    let report = Archive::oci(&[tar.done()]).check().unwrap();
    assert!(report.incomplete.unwrap().contains("longer than any"));
}

/// It is copied to be looked at, and zeros take next to no room in the archive.
#[test]
fn a_program_of_any_size_is_not_copied() {
    let mut header = Tar::header(tar::EntryType::Regular, 0);
    header.set_path("opt/huge").unwrap();
    header.set_size((8 << 30) + 1);
    header.set_cksum();
    let mut layer = base();
    layer.0.get_mut().extend([&header.as_bytes()[..], b"\x7fELF", &[0; 508]].concat());
    let report = Archive::oci(&[layer.0.into_inner().unwrap()]).check().unwrap();
    assert_eq!(report.verdict, Verdict::Unknown);
    let incomplete = report.incomplete.unwrap();
    assert!(incomplete.contains("/opt/huge: a program of more than 8589934592 bytes"), "{incomplete}");
}

#[test]
fn what_is_noted_of_many_files_is_bounded() {
    let limits = Limits { memory: 64 << 10, ..Limits::default() };
    let long = format!("{}/", "d".repeat(90)).repeat(10);
    let names = (0..100).fold(base(), |tar, n| tar.file(&format!("{long}{n}"), b"")).done();
    let kept = base().file("etc/ld.so.cache", &vec![0; 100 << 10]).done();
    let imports = vec!["cuMemAllocManaged"; 2_000];
    let library = base().file("opt/liba.so", &Maker { imports, ..Maker::program() }.make()).done();
    for layer in [names, kept, library] {
        let report = Archive::oci(&[gzip(&layer)]).check_within(limits).unwrap();
        assert_eq!(report.verdict, Verdict::Unknown);
        assert!(report.incomplete.unwrap().contains("takes more than"));
    }
    assert_eq!(Archive::oci(&[base().done()]).check_within(limits).unwrap().verdict, Verdict::Fits);
}

/// A frame may ask its reader for a window of any size.
#[test]
fn a_zstd_frame_that_wants_terabytes_of_memory_gets_none() {
    // Magic, a frame header without size, a window of 2^41 bytes (RFC 8878, 3.1.1.1.2), a block.
    let layer = [&[0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xf8][..], &[0; 64]].concat();
    let report = Archive::oci(&[base().done(), layer]).check().unwrap();
    assert_eq!(report.verdict, Verdict::Unknown);
    assert!(report.incomplete.unwrap().contains("layer"));
}

#[test]
fn whiteouts_of_all_that_is_above_leave_nothing() {
    for name in [".wh..wh..opq", "./.wh..wh..opq", "usr/../.wh..wh..opq"] {
        let layer = Tar::new().raw_name(name.as_bytes(), b"").done();
        let report = Archive::oci(&[base().done(), layer]).check().unwrap();
        assert_eq!((report.files, report.verdict), (0, Verdict::DoesNotFit), "{name}");
    }
    // A folder that the same layer fills goes with its parent, and what the layer brings stays.
    let layer = Tar::new().file("usr/.wh.lib", b"").file("usr/lib/x", b"").file("usr/lib/.wh.x", b"").done();
    let report = Archive::oci(&[base().done(), layer]).check().unwrap();
    assert_eq!((report.files, report.findings[0].name()), (2, "libc-none"), "the program and x");
    // Of the root, by names that mean it.
    let layer = Tar::new().file(".wh..", b"").file("usr/.wh...", b"").done();
    assert_eq!(Archive::oci(&[base().done(), layer]).check().unwrap().files, 2);
}

#[test]
fn what_is_no_image_is_told_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let error = |bytes: &[u8]| {
        let path = folder.path().join("x");
        std::fs::write(&path, bytes).unwrap();
        see(&path, Limits::default(), &mut |_| {}).err().unwrap().to_string()
    };
    assert!(error(&gzip(b"x")).contains("decompress it first"));
    assert!(error(&base().done()).contains("docker save"));
    for no_tar in [&[7; 4096][..], &[7; 100], b"a text"] {
        let said = error(no_tar);
        assert!(said.contains("it is no tar archive; write it with `docker save`"), "{said}");
    }
    let missing = Tar::new().file("manifest.json", br#"[{"Config":"c","Layers":["x"]}]"#).done();
    assert!(error(&missing).contains("not there"));
    let cyclic = serde_json::json!({"manifests": [{"digest": "sha256:00"}]}).to_string();
    let cyclic =
        Tar::new().file("index.json", cyclic.as_bytes()).file("blobs/sha256/00", cyclic.as_bytes()).done();
    assert!(error(&cyclic).contains("without end"));
    let escape = serde_json::json!({"manifests": [{"digest": "sha256:../../etc/passwd"}]}).to_string();
    assert!(error(&Tar::new().file("index.json", escape.as_bytes()).done()).contains("no digest"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_changed_archive_is_checked_or_refused(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..30),
        compressed in 0..3_u8,
        cut in proptest::option::of(any::<proptest::sample::Index>()),
    ) {
        let layer = base().done();
        let layer = match compressed { 0 => layer, 1 => gzip(&layer), _ => zstd(&layer) };
        let mut bytes = std::fs::read(Archive::oci(&[layer]).path()).unwrap();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let _ = Archive::of(&bytes).check();
    }
}

#[test]
fn progress_is_told_of_an_archive_as_of_a_folder() {
    let names: Vec<String> = (0..600).map(|n| format!("x/{n}")).collect();
    let layer = names.iter().fold(Tar::new(), |layer, name| layer.file(name, b"")).done();
    let archive = Archive::oci(&[layer]);
    let mut told = Vec::new();
    see(&archive.path(), Limits::default(), &mut |files| told.push(files)).unwrap();
    assert_eq!(told, [256, 512]);

    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("x")).unwrap();
    for name in &names {
        std::fs::write(folder.path().join(name), "").unwrap();
    }
    let root = crate::rootfs::Rootfs::open(folder.path()).unwrap();
    let mut told = Vec::new();
    crate::compat::check::survey(&root, Default::default(), &mut |files| told.push(files)).unwrap();
    assert_eq!(told, [256, 512]);
}
