//! The table is whole: every symbol of the headers and drivers is in it, and everything that can take device memory is
//! accounted, or has a reason why not.

mod common;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
};

use common::{calls, can_mount, find, is_ours, real_parts, table};

#[test]
fn every_symbol_of_the_headers_and_drivers_is_in_the_table() {
    let Some(parts) = real_parts() else { return };
    let mut command = Command::new(env!("CARGO"));
    command.args([
        "run",
        "--quiet",
        "--package",
        env!("CARGO_PKG_NAME"),
        "--example",
        "update-table",
        "--",
        "--check",
    ]);
    command.args(["11.8", "12.9", "13"].map(|version| parts.join(format!("cudart-{version}/include"))));
    for driver in ["driver-535", "driver-550", "driver-555"] {
        command.args(["libcuda.so.", "libnvidia-ml.so."].map(|name| find(&parts.join(driver), name)));
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn rows_are_whole_and_everybody_knows_the_actions() {
    for (library, columns, actions) in [
        ("cuda", 5, &["take", "give", "track", "view", "resolve", "pace", "unseen", "imported", "pass"][..]),
        ("nvml", 4, &["view", "pass"]),
    ] {
        let path = format!("{}/table/{library}.tsv", env!("CARGO_MANIFEST_DIR"));
        for line in fs::read_to_string(path).unwrap().lines().filter(|line| !line.starts_with('#')) {
            assert_eq!(line.split('\t').count(), columns, "{line}");
        }
        for (symbol, _, action) in table(library) {
            assert!(actions.contains(&action.as_str()), "{symbol}: {action}");
        }
    }
}

/// Why names that sound like taking memory take none of a device.
const TAKE_NONE: &[(&str, &str)] = &[
    ("cuCoredumpRegister", "notes a function"),
    ("cuGetExportTable", "hands out functions"),
    ("cuIpcGetEventHandle", "an event"),
    ("cuLogicalEndpointExport", "what is bound to it is accounted where it was bound"),
    ("cuMemDiscardAndPrefetch", "managed memory, accounted in full where it was made"),
    ("cuMemPoolExport", "the pool's, accounted where it was made"),
    ("cuMemPrefetch", "managed memory, accounted in full where it was made"),
    ("cuCtxAttach", "one more use of a context that is there"),
    ("cuDeviceRegisterAsyncNotification", "notes a function"),
    ("cuFuncIsLoaded", "asks"),
    ("cuGLSetBufferObjectMapFlags", "sets flags"),
    ("cuGraphConditionalHandleCreate", "a number within a graph"),
    ("cuGraphCreate", "a description, on the host"),
    ("cuGraphAddMemAllocNode", "accounted when the graph runs"),
    ("cuGraphMemAllocNodeGetParams", "asks"),
    ("cuGraphRetainUserObject", "counts uses of a host object"),
    ("cuGraphicsResourceSetMapFlags", "sets flags"),
    ("cuImportExternalSemaphore", "a semaphore"),
    ("cuIpcOpenEventHandle", "an event"),
    ("cuLogicalEndpointIdReserve", "a number"),
    ("cuLogsRegisterCallback", "notes a function"),
    ("cuMemAddressReserve", "addresses without memory"),
    ("cuMemAllocHost", "the host's memory"),
    ("cuMemGetAllocation", "asks"),
    ("cuMemHostAlloc", "the host's memory"),
    ("cuMemHostRegister", "the host's memory"),
    ("cuModuleGetLoadingMode", "asks"),
    ("cuStreamAttachMemAsync", "managed memory, accounted in full where it was made"),
    ("cuTensorMap", "a descriptor, on the host"),
    ("cuUserObject", "host objects"),
];

#[test]
fn everything_that_can_take_device_memory_is_accounted_or_has_a_reason() {
    let sounds_so = |symbol: &str| {
        [
            "Alloc",
            "Create",
            "Import",
            "Load",
            "Instantiate",
            "Reserve",
            "Retain",
            "Open",
            "Register",
            "Map",
            "Attach",
            "Bind",
            "Handle",
            "Export",
            "Prefetch",
        ]
        .iter()
        .any(|word| symbol.contains(word))
    };
    let mut counts: BTreeMap<String, u32> = BTreeMap::new();
    for (symbol, _, action) in table("cuda") {
        let what = match action.as_str() {
            "take" | "track" => "accounted",
            "unseen" => "charged as the driver tells",
            "imported" => "owned elsewhere",
            "pass" | "pace" if sounds_so(&symbol) => {
                let reason = TAKE_NONE.iter().any(|(beginning, _)| symbol.starts_with(beginning));
                assert!(reason, "{symbol} may take device memory; say what it does in table/cuda.tsv");
                "sounds like it, takes none"
            }
            _ => "takes none",
        };
        *counts.entry(what.into()).or_default() += 1;
    }
    println!("symbols of libcuda: {counts:?}");
    for (beginning, _) in TAKE_NONE {
        let used =
            table("cuda").iter().any(|(symbol, _, action)| action == "pass" && symbol.starts_with(beginning));
        assert!(used, "{beginning}: no such symbol passes");
    }
}

/// By sessions, which leave the names of what they call; what becomes of each call is for their tests to look at. Cargo runs those
/// before this one.
#[test]
fn every_row_that_the_shim_acts_on_is_called() {
    if !can_mount() {
        return;
    }
    let called: BTreeSet<_> = fs::read_dir(calls())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    // Only `nvidia-smi` asks for it: doors.rs does as it does, and in containers node_share.rs has the real one ask.
    let elsewhere = "nvmlInternalGetExportTable";
    let acting = ["cuda", "nvml"].iter().flat_map(|library| table(library));
    let acting: Vec<_> = acting.filter(|(.., action)| is_ours(action)).map(|(symbol, ..)| symbol).collect();
    let never: Vec<_> =
        acting.iter().filter(|symbol| *symbol != elsewhere && !called.contains(*symbol)).collect();
    assert!(
        acting.len() > 100 && never.is_empty(),
        "of {} no test calls {never:?}; since a test was changed, all must have run: cargo test -p vcuda-preload",
        acting.len()
    );
}
