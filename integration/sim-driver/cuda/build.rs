//! Exports under every name of the table what is not modelled, and makes the proc-address table.

use std::{collections::BTreeMap, env, fmt::Write, fs, path::Path};

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo::rerun-if-changed=symbols.tsv");
    println!("cargo::rerun-if-changed=src");
    let modelled: String = ["device", "context", "memory", "work", "address"]
        .map(|file| fs::read_to_string(format!("src/{file}.rs")).expect("a source file"))
        .concat();
    let table = fs::read_to_string("symbols.tsv").expect("the table");
    let mut out = String::new();
    let mut names: BTreeMap<String, Vec<(u32, bool, &str)>> = BTreeMap::new();
    for line in table.lines().filter(|line| !line.starts_with('#')) {
        let mut fields = line.split('\t');
        let (Some(symbol), Some(version)) = (fields.next(), fields.next()) else { panic!("{line}") };
        if !modelled.contains(&format!("fn {symbol}(")) {
            writeln!(
                out,
                "#[unsafe(no_mangle)] extern \"C\" fn {symbol}() -> i32 {{ crate::NOT_SUPPORTED }}"
            )
            .expect("text");
        }
        // Exported, but nothing that the real driver resolves by name.
        if symbol.starts_with("cudbg")
            || ["cuEGLApiInit", "cuMemGetAttribute", "cuMemGetAttribute_v2"].contains(&symbol)
        {
            continue;
        }
        let version = version.parse().unwrap_or(7000);
        let (plain, per_thread) = match symbol.strip_suffix("_ptsz").or(symbol.strip_suffix("_ptds")) {
            Some(plain) => (plain, true),
            None => (symbol, false),
        };
        let base = plain
            .strip_suffix("_v2")
            .or(plain.strip_suffix("_v3"))
            .or(plain.strip_suffix("_v4"))
            .unwrap_or(plain);
        names.entry(base.into()).or_default().push((version, per_thread, symbol));
    }
    writeln!(out, "pub(crate) static NAMES: [(&str, &[Variant]); {}] = [", names.len()).expect("text");
    for (base, variants) in names {
        write!(out, "(\"{base}\", &[").expect("text");
        for (version, per_thread, symbol) in variants {
            write!(
                out,
                "Variant {{ version: {version}, per_thread: {per_thread}, entry: {symbol} as *const () }},"
            )
            .expect("text");
        }
        writeln!(out, "]),").expect("text");
    }
    out.push_str("];\n");
    let to = env::var_os("OUT_DIR").expect("cargo sets it");
    fs::write(Path::new(&to).join("symbols.rs"), out).expect("writable");
}
