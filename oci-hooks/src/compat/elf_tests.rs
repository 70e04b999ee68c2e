use std::{fs::File, io::Write};

use proptest::prelude::*;

use super::*;
use crate::compat::{elf_maker::Maker, files::Facts};

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn read(bytes: &[u8]) -> Result<Elf, ElfError> {
    Elf::read(&file(bytes), Depth::Whole)
}

fn full() -> Maker {
    Maker {
        soname: Some("libcuda.so.1"),
        needed: vec!["libcuda.so.1", "libc.so.6"],
        runpath: Some("$ORIGIN/../lib"),
        needs: vec![("libc.so.6", vec!["GLIBC_2.2.5", "GLIBC_2.17"]), ("libm.so.6", vec!["GLIBC_2.29"])],
        defines: vec!["libcuda.so.1", "X_1.0", "X_1.10"],
        imports: vec!["cuInit", "dlsym", "puts"],
        exports: vec!["nvmlInit_v2", "cudaMalloc", "other"],
        constants: b"\0cuMemAlloc\0libcuda.so.1\0".to_vec(),
        ..Maker::program()
    }
}

#[test]
fn a_file_says_what_the_loader_would_ask() {
    let elf = read(&full().make()).unwrap();
    assert_eq!((elf.machine, elf.bits, elf.little_endian, elf.executable), (62, 64, true, true));
    assert_eq!(elf.interpreter.as_deref(), Some("/lib64/ld-linux-x86-64.so.2"));
    assert_eq!(elf.needed, ["libcuda.so.1", "libc.so.6"]);
    assert_eq!(
        (elf.soname.as_deref(), elf.runpath.as_deref()),
        (Some("libcuda.so.1"), Some("$ORIGIN/../lib"))
    );
    assert_eq!(elf.newest_needed("GLIBC_"), Some(Version(2, 29, 0)));
    assert_eq!(elf.newest_defined("X_"), Some(Version(1, 10, 0)));
    assert_eq!(elf.imports, ["cuInit", "dlsym"], "others are nobody's business here");
    assert_eq!(elf.exports, ["nvmlInit_v2", "cudaMalloc"]);
    assert_eq!(elf.constants.len(), 1, "it has dlsym");
    assert!(!elf.is_static());
    // Of a library that is none of CUDA's, only what it asks for is of interest.
    let other = read(&Maker { soname: Some("libx.so.1"), ..full() }.make()).unwrap();
    assert_eq!((other.imports.len(), other.exports.len()), (2, 0));
}

/// The loader goes by the last of several entries of one kind, and so what stands before it is nobody's word.
#[test]
fn of_two_entries_of_one_kind_the_last_counts() {
    use goblin::elf::dynamic as dt;
    let mut bytes = full().make();
    let at = (0..bytes.len())
        .step_by(8)
        .find(|at| bytes[*at..].starts_with(&dt::DT_RUNPATH.to_le_bytes()))
        .unwrap();
    bytes[at..at + 8].copy_from_slice(&dt::DT_SONAME.to_le_bytes());
    let elf = read(&bytes).unwrap();
    assert_eq!((elf.soname.as_deref(), elf.runpath), (Some("$ORIGIN/../lib"), None));
}

#[test]
fn texts_are_read_where_a_file_looks_symbols_up() {
    let facts = Facts::of(&file(&full().make()), Depth::Symbols).unwrap();
    assert!(facts.texts().unwrap().libcuda);
    assert!(facts.texts().unwrap().names.contains("cuMemAlloc"));
    let linked = Maker { imports: vec!["cuInit"], ..full() };
    assert_eq!(Facts::of(&file(&linked.make()), Depth::Symbols).unwrap().texts(), None);
}

#[test]
fn this_very_program_is_understood() {
    let elf = Elf::read(&File::open(std::env::current_exe().unwrap()).unwrap(), Depth::Whole).unwrap();
    assert!(elf.executable && elf.dynamic && !elf.is_static());
    assert!(elf.needs_library("libc.so"), "{:?}", elf.needed);
    assert!(elf.newest_needed("GLIBC_") >= Some(Version(2, 17, 0)));
}

#[test]
fn static_programs_are_told_from_libraries_without_needs() {
    assert!(read(&Maker::static_program().make()).unwrap().is_static());
    assert!(!read(&Maker::glibc(&["GLIBC_2.2.5"]).make()).unwrap().is_static());
}

#[test]
fn what_is_no_elf_file_is_told_from_a_broken_one() {
    assert_eq!(read(b""), Err(ElfError::NotElf));
    assert_eq!(read(b"#!/bin/sh"), Err(ElfError::NotElf));
    let whole = full().make();
    for cut in [5, 20, 63, 64, 100, 300, whole.len() / 2] {
        assert!(matches!(read(&whole[..cut]), Err(ElfError::Broken(_))), "cut at {cut}");
    }
}

#[test]
fn a_hash_chain_without_end_is_broken() {
    let maker = full();
    let bytes = maker.make();
    // The last word with the low bit set ends the chain: clear every chain word.
    let hash = bytes.windows(8).rposition(|window| window == [0xff; 8]).unwrap();
    let mut endless = bytes.clone();
    for word in endless[hash + 12..hash + 12 + 4 * maker.exports.len()].chunks_exact_mut(4) {
        word.fill(0);
    }
    endless.truncate(hash + 12 + 4 * maker.exports.len());
    assert!(matches!(read(&endless), Err(ElfError::Broken(_))));
}

#[test]
fn versions_are_compared_as_numbers() {
    let version = |text| Version::parse(text).unwrap();
    assert!(version("2.9") < version("2.17") && version("2.2.5") < version("2.17"));
    assert_eq!(version("2.17").to_string(), "2.17");
    assert_eq!(version("12.2.1").to_string(), "12.2.1");
    for bad in ["", ".", "2.", "2.a", "PRIVATE", "1.2.3.4", "99999999999"] {
        assert_eq!(Version::parse(bad), None, "{bad}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_truncated_file_is_read_or_refused(cut in 0..4096_usize) {
        let bytes = full().make();
        let _ = read(&bytes[..cut.min(bytes.len())]);
    }

    #[test]
    fn a_changed_file_is_read_or_refused(changes in proptest::collection::vec((0..4096_usize, any::<u8>()), 1..12)) {
        let mut bytes = full().make();
        for (at, value) in changes {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        let _ = Facts::of(&file(&bytes), Depth::Symbols);
    }

    #[test]
    fn lying_words_are_read_or_refused(at in 0..4096_usize, lie in prop_oneof![
        Just(u64::MAX), Just(1 << 63), Just(u64::from(u32::MAX)), Just(1 << 40), Just(0), any::<u64>(),
    ]) {
        let mut bytes = full().make();
        let at = at % (bytes.len() - 8);
        bytes[at..at + 8].copy_from_slice(&lie.to_le_bytes());
        let _ = Facts::of(&file(&bytes), Depth::Symbols);
    }

    #[test]
    fn any_tail_is_read_or_refused(tail in proptest::collection::vec(any::<u8>(), 0..600), class in 1..3_u8, order in 1..3_u8) {
        let _ = read(&[&b"\x7fELF"[..], &[class, order, 1], &tail].concat());
    }
}
