//! The program that libFuzzer runs: FUZZ_TARGET says what the bytes are taken for. Unsafe code is in what
//! `fuzz_target!` expands to, which libFuzzer, in C++, calls.
#![no_main]

use std::sync::LazyLock;

mod targets;

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| match std::env::var("FUZZ_TARGET").as_deref() {
    Ok("elf") => targets::elf,
    Ok("ldcache") => targets::ldcache,
    Ok("ldconf") => targets::ldconf,
    Ok("layer") => targets::layer,
    Ok("archive") => targets::archive,
    _ => panic!("FUZZ_TARGET must be elf, ldcache, ldconf, layer or archive"),
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| TARGET(bytes));
