//! What fuzzing begins from and what it found, run through what it fuzzes (`fuzz/run`): none of it crashes, hangs or
//! takes more than is given.

use std::{fs, path::Path};

#[path = "../fuzz/targets.rs"]
mod targets;

fn replay(name: &str, target: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(name);
    let mut count = 0;
    for entry in fs::read_dir(folder).expect("the seeds are there") {
        target(&fs::read(entry.expect("a file").path()).expect("it can be read"));
        count += 1;
    }
    assert!(count >= 3, "{count} seeds");
}

#[test]
fn programs_that_fuzzing_found_are_read_or_refused() {
    replay("elf", targets::elf);
}

#[test]
fn loader_caches_that_fuzzing_found_can_be_added_to() {
    replay("ldcache", targets::ldcache);
}

#[test]
fn configurations_of_the_loader_that_fuzzing_found_come_to_an_end() {
    replay("ldconf", targets::ldconf);
}

#[test]
fn archives_that_fuzzing_found_are_read_or_refused() {
    replay("archive", targets::archive);
}

#[test]
fn layers_that_fuzzing_found_are_read_or_refused() {
    replay("layer", targets::layer);
}
