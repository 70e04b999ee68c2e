//! The table of real roots, wheels and drivers, and how a root of it is put together from what `get` brought.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

/// One line of the table of expected verdicts.
pub struct Case {
    pub root: String,
    pub pieces: Vec<String>,
    pub driver: Option<String>,
    pub program: Option<String>,
    pub gpus: Vec<String>,
    pub verdict: String,
    pub findings: Vec<String>,
    pub reason: String,
}

/// CUDA runtimes that are libraries of their own: the piece, and where it is in it.
pub const RUNTIMES: [(&str, &str); 4] = [
    ("cudart-11.8", "nvidia/cuda_runtime/lib/libcudart.so.11.0"),
    ("cudart-12.1", "nvidia/cuda_runtime/lib/libcudart.so.12"),
    ("cudart-12.9", "nvidia/cuda_runtime/lib/libcudart.so.12"),
    ("cudart-13", "nvidia/cu13/lib/libcudart.so.13"),
];

/// Pieces that `get` brings only when it is asked for the large ones.
const LARGE: &[&str] =
    &["numba", "cupy-12", "jax-12", "jax-pjrt-12", "nccl-12", "cublas-12", "cudnn-12", "torch", "torch-12.4"];

pub fn cases() -> Vec<Case> {
    let list = |text: &str| -> Vec<String> {
        if text == "-" { Vec::new() } else { text.split(',').map(str::to_owned).collect() }
    };
    let lines = include_str!("expected.tsv").lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let columns: Vec<&str> = line.split('\t').collect();
            let [root, pieces, driver, program, gpus, verdict, findings, reason] = columns[..] else {
                panic!("{line}: not eight columns")
            };
            Case {
                root: root.into(),
                pieces: list(pieces),
                driver: list(driver).pop(),
                program: list(program).pop(),
                gpus: list(gpus),
                verdict: verdict.into(),
                findings: list(findings),
                reason: reason.into(),
            }
        })
        .collect()
}

impl Case {
    pub fn is_large(&self) -> bool {
        self.pieces.iter().any(|piece| LARGE.contains(&piece.as_str()))
    }
}

/// The folder that `integration/setup.sh` fills; the same as its `--where`.
pub fn cache() -> PathBuf {
    let base = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    base("VCUDA_CACHE")
        .or_else(|| base("XDG_CACHE_HOME").map(|dir| dir.join("vcuda")))
        .unwrap_or_else(|| base("HOME").unwrap_or_else(|| "/root".into()).join(".cache/vcuda"))
}

/// The folder that `get` fills.
pub fn material() -> PathBuf {
    let own = env::var_os("VCUDA_MATERIAL").filter(|value| !value.is_empty());
    own.map_or_else(|| cache().join("material"), PathBuf::from)
}

/// A root with pieces added, as hard links beside the cache.
pub fn compose(material: &Path, root: &str, pieces: &[String]) -> tempfile::TempDir {
    let sources: Vec<PathBuf> = pieces.iter().map(|piece| material.join("wheels").join(piece)).collect();
    let root = material.join("roots").join(root);
    let missing = sources.iter().chain([&root]).find(|source| !source.exists());
    assert!(missing.is_none(), "{missing:?} is not there; run oci-hooks/tests/material/get large");
    let composed = tempfile::tempdir_in(material).unwrap();
    let link = |from: &Path, to: &Path| {
        let done = Command::new("cp").args(["-al", "--"]).arg(from).arg(to).status().unwrap();
        assert!(done.success(), "cp -al {}", from.display());
    };
    link(&root, &composed.path().join("root"));
    let opt = composed.path().join("root/opt");
    fs::create_dir_all(&opt).unwrap();
    for (piece, source) in pieces.iter().zip(&sources) {
        link(source, &opt.join(piece));
    }
    composed
}

/// What `vcuda-check` says, and its exit code.
pub fn check(args: &[&OsStr]) -> (Value, Option<i32>) {
    let output = Command::new(env!("CARGO_BIN_EXE_vcuda-check")).args(args).output().unwrap();
    let report = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    (report, output.status.code())
}

/// The driver's libraries below a root of it.
pub fn library_folder(driver: &Path) -> PathBuf {
    ["usr/lib/x86_64-linux-gnu/nvidia/current", "usr/lib/x86_64-linux-gnu"]
        .iter()
        .map(|folder| driver.join(folder))
        .find(|folder| folder.join("libcuda.so.1").exists())
        .unwrap()
}

/// The shim that goes onto nodes.
pub fn shim() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/node/lib/libvcuda_preload.so");
    let shim = env::var_os("VCUDA_SHIM").map_or(built, PathBuf::from);
    assert!(shim.exists(), "{} is not there; run integration/build.sh, or set VCUDA_SHIM", shim.display());
    shim
}
