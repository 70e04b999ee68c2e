//! Exports under every name of the table what is not modelled.

use std::{env, fmt::Write, fs, path::Path};

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo::rerun-if-changed=symbols.tsv");
    let table = fs::read_to_string("symbols.tsv").expect("the table");
    let mut out = String::new();
    for line in table.lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<&str> = line.split('\t').collect();
        let [symbol, .., model] = fields[..] else { panic!("{line}") };
        if model == "-" {
            writeln!(
                out,
                "#[unsafe(no_mangle)] extern \"C\" fn {symbol}() -> i32 {{ crate::ffi::NOT_SUPPORTED.0 }}"
            )
            .expect("text");
        }
    }
    let to = env::var_os("OUT_DIR").expect("cargo sets it");
    fs::write(Path::new(&to).join("symbols.rs"), out).expect("writable");
}
