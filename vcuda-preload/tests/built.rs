//! The library as it is shipped: it loads into old images, needs nothing unexpected, and exports just the table.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

mod common;

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use common::table;
use goblin::elf::{Elf, dynamic::DT_TEXTREL};

/// The build that is shipped; none, and a line that says so, where there is no linker with a glibc floor.
fn shipped() -> Option<&'static Path> {
    // Once: two builds at a time have the same linker's wrappers and caches.
    static SHIPPED: OnceLock<Option<PathBuf>> = OnceLock::new();
    SHIPPED.get_or_init(|| env::var_os("VCUDA_SHIM").map_or_else(build, |path| Some(path.into()))).as_deref()
}

fn build() -> Option<PathBuf> {
    let target = env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned();
    let package = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    // A test fetches nothing.
    let cache = Command::new(package.join("../integration/setup.sh")).arg("--where").output().unwrap();
    let cache = PathBuf::from(String::from_utf8(cache.stdout).unwrap().trim());
    if !cache.join("venv/bin/cargo-zigbuild").exists() {
        println!("skipped: no cargo-zigbuild here; vcuda-preload/build.sh fetches it");
        return None;
    }
    // What the build says is seen as it is said. It is no pipe that a process which the build leaves behind would keep open.
    let mut script = Command::new(package.join("build.sh"));
    let output = script.env("CARGO_TARGET_DIR", target).stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "vcuda-preload/build.sh: {}", output.status);
    Some(String::from_utf8(output.stdout).unwrap().trim().into())
}

#[test]
fn it_loads_into_images_of_glibc_2_17_and_needs_nothing_but_glibc() {
    let Some(path) = shipped() else { return };
    let bytes = fs::read(path).unwrap();
    let elf = Elf::parse(&bytes).unwrap();
    assert_eq!(elf.soname, Some("libcuda.so.1"));
    for library in &elf.libraries {
        // All of glibc itself.
        let known = ["libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"];
        assert!(known.contains(library), "{library}");
    }
    let needs = elf.verneed.as_ref().unwrap();
    for version in needs.iter().flat_map(|file| file.iter().collect::<Vec<_>>()) {
        let name = elf.dynstrtab.get_at(version.vna_name).unwrap();
        let numbers: Vec<u32> =
            name.strip_prefix("GLIBC_").unwrap().split('.').map(|number| number.parse().unwrap()).collect();
        assert!(numbers <= vec![2, 17], "{name}");
    }
    let dynamic = elf.dynamic.as_ref().unwrap();
    assert!(dynamic.dyns.iter().all(|entry| entry.d_tag != DT_TEXTREL));
    // Pointers into it are handed out for good (DF_1_NODELETE).
    assert!(dynamic.info.flags_1 & 0x8 != 0);
}

#[test]
fn it_exports_the_table_and_nothing_else() {
    let Some(path) = shipped() else { return };
    let bytes = fs::read(path).unwrap();
    let elf = Elf::parse(&bytes).unwrap();
    let exports: BTreeSet<String> = elf
        .dynsyms
        .iter()
        .filter(|symbol| symbol.st_shndx != 0)
        .map(|symbol| elf.dynstrtab.get_at(symbol.st_name).unwrap().to_owned())
        .collect();
    let mut expected: BTreeSet<String> =
        ["cuda", "nvml"].iter().flat_map(|library| table(library)).map(|(symbol, ..)| symbol).collect();
    expected.insert("dlsym".into());
    assert_eq!(exports, expected);
}
