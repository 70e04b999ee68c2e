//! Exports under every name of the table what is not modelled.

use std::{env, fmt::Write, fs, path::Path};

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo::rerun-if-changed=symbols.tsv");
    println!("cargo::rerun-if-changed=src");
    let modelled: String = ["system", "device", "events"]
        .map(|file| fs::read_to_string(format!("src/{file}.rs")).expect("a file"))
        .concat();
    let table = fs::read_to_string("symbols.tsv").expect("the table");
    let mut out = String::new();
    for symbol in table.lines().filter(|line| !line.starts_with('#')) {
        if !modelled.contains(&format!("fn {symbol}(")) {
            writeln!(
                out,
                "#[unsafe(no_mangle)] extern \"C\" fn {symbol}() -> u32 {{ crate::NOT_SUPPORTED }}"
            )
            .expect("text");
        }
    }
    let to = env::var_os("OUT_DIR").expect("cargo sets it");
    fs::write(Path::new(&to).join("symbols.rs"), out).expect("writable");
}
