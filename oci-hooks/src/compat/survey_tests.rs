use std::{collections::BTreeSet, io::Write};

use super::{judge::STUB_BYTES, *};
use crate::compat::{
    Finding, Severity,
    check::{Node, Verdict, remembered},
    cuda::{Covered, Driver},
    elf::Depth,
    elf_maker::Maker,
};

const MACHINE: u16 = goblin::elf::header::EM_X86_64;

fn facts(maker: &Maker) -> Facts {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&maker.make()).unwrap();
    Facts::of(&file, Depth::Symbols).unwrap()
}

fn survey(files: &[(&str, Maker)]) -> Survey {
    let mut survey = Survey::default();
    for (path, maker) in files {
        survey.take(Path::new(path), &facts(maker));
    }
    survey
}

fn driver(cuda: u32, exports: &[&str]) -> Driver {
    let exports = exports.iter().map(ToString::to_string).collect();
    Driver { version: "550.163.01".into(), cuda: Cuda(cuda), exports }
}

fn judge(survey: &Survey, driver: Option<&Driver>, covered: &[&str]) -> Vec<(&'static str, Severity)> {
    let covered = Covered(covered.iter().map(ToString::to_string).collect::<BTreeSet<_>>());
    survey
        .judge(Against {
            driver,
            covered: &covered,
            machine: MACHINE,
            started: Some(Path::new("/bin/app")),
            gpus: &BTreeSet::from([80]),
        })
        .iter()
        .inspect(|finding| assert!(finding.file.is_some(), "{finding:?}"))
        .map(|finding| (finding.name(), finding.severity))
        .collect()
}

fn cudart(soname: &'static str) -> Maker {
    Maker { soname: Some(soname), ..Maker::default() }
}

#[test]
fn a_runtime_of_a_newer_line_than_the_driver_is_refused() {
    let image = survey(&[("/lib/libcudart.so.13", cudart("libcudart.so.13"))]);
    let old = driver(12_040, &[]);
    assert_eq!(judge(&image, Some(&old), &[]), [("cuda-driver-too-old", Severity::Refuse)]);
    assert!(judge(&image, Some(&driver(13_000, &[])), &[]).is_empty());
    // A program that only needs the runtime, which some volume may bring, is as stuck.
    let needs =
        survey(&[("/lib/libtorch_cuda.so", Maker { needed: vec!["libcudart.so.13"], ..Maker::default() })]);
    assert_eq!(judge(&needs, Some(&old), &[]), [("cuda-driver-too-old", Severity::Refuse)]);
}

#[test]
fn a_runtime_too_new_beside_one_that_fits_is_only_a_warning() {
    let image = survey(&[
        ("/a/libcudart.so.13", cudart("libcudart.so.13")),
        ("/b/libcudart.so.12", cudart("libcudart.so.12")),
    ]);
    let judged = judge(&image, Some(&driver(12_040, &[])), &[]);
    assert_eq!(judged, [("cuda-runtime-too-new", Severity::Warn), ("cuda-runtimes-several", Severity::Info)]);
}

#[test]
fn without_a_driver_an_image_with_cuda_is_left_open() {
    let image = survey(&[("/a/libcudart.so.13", cudart("libcudart.so.13"))]);
    assert_eq!(judge(&image, None, &[]), [("driver-unknown", Severity::Info)]);
    assert!(judge(&survey(&[("/bin/app", Maker::program())]), None, &[]).is_empty());
}

#[test]
fn a_static_runtime_inside_a_library_is_found_by_what_it_asks_for() {
    let names = [
        "libcuda.so.1",
        "cuGetProcAddress",
        "cuMemAllocAsync",
        "cuMemPoolCreate",
        "cuGraphInstantiateWithFlags",
    ];
    let constants = names.iter().flat_map(|name| [b"\0", name.as_bytes(), b"\0"].concat()).collect();
    let cublas =
        Maker { soname: Some("libcublas.so.11"), imports: vec!["dlsym"], constants, ..Maker::default() };
    let image = survey(&[("/lib/libcublas.so.11", cublas)]);
    assert_eq!(image.runtimes().map(|(_, cuda)| cuda.major()).collect::<Vec<_>>(), [11]);
}

#[test]
fn a_linked_function_that_the_driver_lacks_is_told_by_when_it_fails() {
    let linked = Maker {
        needed: vec!["libcuda.so.1"],
        imports: vec!["cuInit", "cuLogsCurrent", "cuFileRead"],
        ..Maker::default()
    };
    let old = driver(12_040, &["cuInit"]);
    let image = survey(&[("/lib/liba.so", linked.clone())]);
    assert_eq!(judge(&image, Some(&old), &[]), [("symbol-missing", Severity::Warn)]);
    assert!(judge(&image, Some(&driver(12_090, &["cuInit", "cuLogsCurrent"])), &[]).is_empty());

    let mut facts = facts(&linked);
    if let Kind::Elf(elf, _) = &mut facts.kind {
        elf.bind_now = true;
    }
    let mut image = Survey::default();
    image.take(Path::new("/lib/liba.so"), &facts);
    assert_eq!(
        judge(&image, Some(&old), &[]),
        [("symbol-missing", Severity::Warn)],
        "it may never be loaded"
    );
    let mut image = Survey::default();
    image.take(Path::new("/bin/app"), &facts);
    assert_eq!(
        judge(&image, Some(&old), &[]),
        [("symbol-missing", Severity::Refuse)],
        "it is what is started"
    );

    // From memory, without its files: it is known what is started, so it is refused as the guard would refuse it.
    let mut node = Node::without_shim();
    node.driver = Some(old);
    let verdict = |started| remembered(&image, "image".into(), started, None, &node).verdict;
    assert_eq!(verdict(Some(Path::new("/bin/app"))), Verdict::DoesNotFit);
    assert_eq!(verdict(Some(Path::new("/bin/sh"))), Verdict::Fits);
    assert_eq!(verdict(None), Verdict::Fits);
}

#[test]
fn what_takes_memory_past_the_shim_is_warned_of() {
    assert!(function("cuMemAllocManaged").is_some());
    let linked = Maker {
        needed: vec!["libcuda.so.1"],
        imports: vec!["cuInit", "cuMemAlloc_v2", "cuMemAllocManaged"],
        ..Maker::default()
    };
    let image = survey(&[("/lib/liba.so", linked)]);
    let all = driver(12_040, &["cuInit", "cuMemAlloc_v2", "cuMemAllocManaged"]);
    assert_eq!(judge(&image, Some(&all), &["cuMemAlloc_v2"]), [("symbol-uncovered", Severity::Warn)]);
    assert!(judge(&image, Some(&all), &["cuMemAlloc_v2", "cuMemAllocManaged"]).is_empty());
}

#[test]
fn the_images_own_driver_is_told_from_a_stub_by_its_size() {
    let libcuda = Maker { exports: vec!["cuInit"], soname: Some("libcuda.so.1"), ..Maker::default() };
    let stub = survey(&[("/stubs/libcuda.so", libcuda.clone())]);
    assert_eq!(judge(&stub, Some(&driver(12_040, &[])), &[]), [("libcuda-stub", Severity::Info)]);
    let mut own = Survey::default();
    own.take(Path::new("/compat/libcuda.so.1"), &Facts { size: STUB_BYTES, ..facts(&libcuda) });
    assert_eq!(judge(&own, Some(&driver(12_040, &[])), &[]), [("libcuda-own", Severity::Warn)]);
}

#[test]
fn programs_out_of_reach_are_named() {
    let image = survey(&[
        ("/bin/tool", Maker::static_program()),
        (
            "/lib/libdirect.so",
            Maker { imports: vec!["dlsym"], constants: b"\0/dev/nvidia-uvm\0".to_vec(), ..Maker::default() },
        ),
        (
            "/lib/libspace.so",
            Maker {
                imports: vec!["dlsym", "dlmopen"],
                constants: b"\0libcuda.so.1\0".to_vec(),
                ..Maker::default()
            },
        ),
    ]);
    assert_eq!(
        judge(&image, Some(&driver(12_040, &[])), &[]),
        [
            ("driver-direct", Severity::Warn),
            ("cuda-namespace", Severity::Info),
            ("programs-static", Severity::Info)
        ]
    );
}

#[test]
fn an_image_full_of_one_kind_of_file_keeps_few_of_them() {
    let mut survey = Survey::default();
    let broken = Facts { mode: 0, size: 1, kind: Kind::Broken(crate::compat::elf::ElfError::NotElf) };
    for n in 0..KEPT * 2 {
        survey.take(Path::new(&format!("/{n}")), &broken);
    }
    assert_eq!((survey.broken.kept.len(), survey.broken.count), (KEPT, KEPT as u64 * 2));
    let findings = survey.judge(Against {
        driver: None,
        covered: &Covered::default(),
        machine: MACHINE,
        started: Some(Path::new("/bin/app")),
        gpus: &BTreeSet::new(),
    });
    assert!(findings[0].what.ends_with("more"), "{}", findings[0].what);
}

#[test]
fn code_for_other_gpus_and_ptx_that_the_driver_cannot_compile_are_told() {
    use crate::compat::fatbin::{GpuCode, fat_binary};
    let code = |parts: &[(u16, u32)]| {
        let bytes = fat_binary(parts, (8, 7));
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        let mut facts = facts(&Maker { soname: Some("liba.so"), ..Maker::default() });
        if let Kind::Elf(elf, _) = &mut facts.kind {
            elf.gpu_code = GpuCode::read(&file, &[(0, bytes.len() as u64)]);
        }
        let mut image = Survey::default();
        image.take(Path::new("/lib/liba.so"), &facts);
        image
    };
    let judged = |parts: &[(u16, u32)], cuda| judge(&code(parts), Some(&driver(cuda, &["cuInit"])), &[]);
    let unknown = code(&[(2, 80)]).judge(Against {
        driver: Some(&driver(12_040, &["cuInit"])),
        covered: &Covered::default(),
        machine: MACHINE,
        started: None,
        gpus: &BTreeSet::new(),
    });
    assert_eq!(unknown.iter().map(Finding::name).collect::<Vec<_>>(), ["gpu-unknown"]);
    // The GPU is of 8.0, PTX 8.7 came with CUDA 12.8.
    assert!(judged(&[(2, 80), (1, 90)], 12_040).is_empty());
    assert_eq!(judged(&[(2, 86), (1, 90)], 12_040), [("gpu-code-none", Severity::Warn)]);
    assert_eq!(judged(&[(2, 75), (1, 75)], 12_040), [("gpu-code-ptx-too-new", Severity::Warn)]);
    assert_eq!(judged(&[(2, 75), (1, 75)], 12_080), [("gpu-code-ptx", Severity::Info)]);
}

#[test]
fn what_is_asked_for_by_name_is_compared_with_the_driver_and_the_shim() {
    let asks = Maker {
        soname: Some("liba.so"),
        imports: vec!["dlsym"],
        constants: b"\0libcuda.so.1\0cuInit\0cuMemAllocManaged\0cuLogsCurrent\0".to_vec(),
        ..Maker::default()
    };
    let image = survey(&[("/lib/liba.so", asks)]);
    let new = driver(13_000, &["cuInit", "cuMemAllocManaged", "cuLogsCurrent"]);
    assert!(judge(&image, Some(&new), &[]).is_empty());
    let old = driver(12_040, &["cuInit", "cuMemAllocManaged"]);
    assert_eq!(judge(&image, Some(&old), &["cuMemAllocManaged"]), [("symbol-asked", Severity::Info)]);
    assert_eq!(judge(&image, Some(&new), &["cuInit"]), [("symbol-uncovered", Severity::Warn)]);
}

#[test]
fn runtimes_of_several_lines_are_told() {
    let runtime = |name| Maker { soname: Some(name), ..Maker::default() };
    let image = survey(&[("/a", runtime("libcudart.so.11.0")), ("/b", runtime("libcudart.so.12"))]);
    let judged = judge(&image, Some(&driver(12_040, &["cuInit"])), &[]);
    assert_eq!(judged, [("cuda-runtimes-several", Severity::Info)]);
}
