//! Makes the library's names from the table: exports for what is not modelled, and the table behind cuGetProcAddress.

use std::{collections::BTreeMap, env, fmt::Write, fs, path::Path};

/// A name that is exported, but that cuGetProcAddress does not know.
const EXPORTED_ONLY: &str = "0";

/// Names under which the real library exports data for debuggers.
const DATA: [&str; 20] = [
    "cudbgApiClientPid",
    "cudbgApiClientRevision",
    "cudbgAttachHandlerAvailable",
    "cudbgDebuggerCapabilities",
    "cudbgDebuggerInitialized",
    "cudbgDetachSuspendedDevicesMask",
    "cudbgEnableIntegratedMemcheck",
    "cudbgEnableLaunchBlocking",
    "cudbgEnablePreemptionDebugging",
    "cudbgInjectionPath",
    "cudbgIpcFlag",
    "cudbgReportDriverApiErrorFlags",
    "cudbgReportedDriverApiErrorCode",
    "cudbgReportedDriverApiErrorFuncNameAddr",
    "cudbgReportedDriverApiErrorFuncNameSize",
    "cudbgReportedDriverInternalErrorCode",
    "cudbgResumeForAttachDetach",
    "cudbgRpcEnabled",
    "cudbgSessionId",
    "cudbgUseExternalDebugger",
];

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo::rerun-if-changed=symbols.tsv");
    let table = fs::read_to_string("symbols.tsv").expect("the table");
    let mut out = String::new();
    let mut names: BTreeMap<&str, String> = BTreeMap::new();
    for line in table.lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<&str> = line.split('\t').collect();
        let [symbol, since, in_535, in_550, in_555, model] = fields[..] else { panic!("{line}") };
        if DATA.contains(&symbol) {
            writeln!(
                out,
                "#[unsafe(no_mangle)] static {symbol}: crate::ffi::Data = crate::ffi::Data::zero();"
            )
        } else if model == "-" {
            writeln!(
                out,
                "#[unsafe(no_mangle)] extern \"C\" fn {symbol}() -> i32 {{ crate::ffi::NOT_SUPPORTED.0 }}"
            )
        } else {
            Ok(())
        }
        .expect("text");
        if since == EXPORTED_ONLY {
            continue;
        }
        let (plain, per_thread) = match symbol.strip_suffix("_ptsz").or(symbol.strip_suffix("_ptds")) {
            Some(plain) => (plain, true),
            None => (symbol, false),
        };
        let base =
            ["_v2", "_v3", "_v4"].iter().find_map(|version| plain.strip_suffix(version)).unwrap_or(plain);
        let seen = [in_535, in_550, in_555].map(|field| field == "1");
        write!(
            names.entry(base).or_default(),
            "Variant {{ since: {since}, per_thread: {per_thread}, seen: {seen:?}, entry: {symbol} as *const () }}, "
        )
        .expect("text");
    }
    writeln!(out, "pub(crate) static NAMES: [(&str, &[Variant]); {}] = [", names.len()).expect("text");
    for (base, variants) in names {
        writeln!(out, "(\"{base}\", &[{variants}]),").expect("text");
    }
    out.push_str("];\n");
    let to = env::var_os("OUT_DIR").expect("cargo sets it");
    fs::write(Path::new(&to).join("symbols.rs"), out).expect("writable");
}
