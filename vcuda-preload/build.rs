//! Turns `table/*.tsv` into the shim's exports and look-up tables, and names the library as the driver's is named.

use std::{env, fs, path::PathBuf};

/// Actions that a function of ours answers. Every other symbol jumps to the driver's own.
const HANDLED: [&str; 6] = ["take", "give", "track", "view", "resolve", "pace"];

fn main() {
    // Whoever looks for libcuda.so.1 by name finds the preloaded shim, also past an overridden `dlsym`.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Pointers into it are handed out for good.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");

    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    for library in ["cuda", "nvml"] {
        let path = format!("table/{library}.tsv");
        println!("cargo::rerun-if-changed={path}");
        let table = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        fs::write(out.join(format!("{library}.rs")), generate(library, &table)).expect("OUT_DIR is writable");
    }
}

fn generate(library: &str, table: &str) -> String {
    let rows: Vec<(&str, &str)> = table
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split_once('\t').expect("columns are separated by tabs"))
        .collect();
    assert!(rows.is_sorted(), "table/{library}.tsv: not in the order of its symbols");

    let (mut names, mut starts) = (String::new(), Vec::new());
    let (mut indices, mut handled, mut forwarded) = (Vec::new(), Vec::new(), Vec::new());
    for (index, (symbol, columns)) in rows.iter().enumerate() {
        starts.push(names.len().to_string());
        names += symbol;
        names.push('\0');
        indices.push(format!("pub const {symbol}: usize = {index};"));
        let action = columns.rsplit('\t').next().unwrap_or_default();
        if HANDLED.contains(&action) {
            handled.push(format!("({index}, Ours(crate::{library}::{symbol} as *const ())),"));
        } else {
            forwarded.push(format!("crate::jump::forward!({library}, {symbol}, {index});"));
        }
    }
    format!(
        "/// Symbols in the table.
pub(crate) const COUNT: usize = {count};
/// Their names in order, each ended by NUL.
pub(crate) static NAMES: &str = {names:?};
/// Where in `NAMES` each begins.
pub(crate) static STARTS: [u16; COUNT] = [{starts}];
/// Our functions, with their numbers.
pub(crate) static HANDLED: &[(usize, Ours)] = &[
{handled}
];
/// Number of each symbol.
#[allow(non_upper_case_globals, reason = \"the driver's names\")]
pub(crate) mod index {{
{indices}
}}
{forwarded}
",
        count = rows.len(),
        starts = starts.join(", "),
        handled = handled.join("\n"),
        indices = indices.join("\n"),
        forwarded = forwarded.join("\n"),
    )
}
