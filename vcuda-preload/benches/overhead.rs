//! What the shim adds to a call, in one run against the same program without it, on the driver in small of the tests.
//! `cargo bench -p vcuda-preload`. With `VCUDA_SHIM` a build as it is shipped can be measured, which is what counts.

#![expect(clippy::unwrap_used, reason = "a bench that cannot run has nothing to say")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use common::{MIB, Model, can_mount, compile, limit, model_uuid, source};
use region::{GpuLimit, LimitsWriter};

struct Bench {
    model: Model,
    program: PathBuf,
}

impl Bench {
    fn command(&self, shim: bool, arguments: &[&str]) -> Command {
        let mut command = if shim {
            self.model.room.command(&self.program)
        } else {
            self.model.room.bare_command(&self.program)
        };
        command.args(arguments).env("MODEL_STATE", self.model.room.folder.path().join("state"));
        command
    }

    /// Nanoseconds a call, without and with the shim: the best of three, taken in turn.
    fn pair(&self, arguments: &[&str]) -> (f64, f64) {
        let run = |shim| -> f64 {
            let output = self.command(shim, arguments).output().unwrap();
            assert!(output.status.success(), "{arguments:?}: {output:?}");
            String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
        };
        (0..3).fold((f64::MAX, f64::MAX), |(bare, shim), _| (bare.min(run(false)), shim.min(run(true))))
    }

    /// Nanoseconds until that many programs, started at once by a shell, have all made their first allocation.
    fn start_many(&self, shim: bool, count: usize) -> f64 {
        let script = format!(
            "begun=$(date +%s%N); for n in $(seq {count}); do '{}' >/dev/null & done; wait; echo $(($(date +%s%N) - begun))",
            self.program.display()
        );
        let shell = Path::new("/bin/sh");
        let room = &self.model.room;
        let mut command = if shim { room.command(shell) } else { room.bare_command(shell) };
        let output = command
            .args(["-c", &script])
            .env("MODEL_STATE", room.folder.path().join("state"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    }
}

fn row(what: &str, (bare, shim): (f64, f64), target: &str) {
    println!("{what:<44} {bare:>11.1} {shim:>11.1} {:>+10.1}   {:>6.2}   {target}", shim - bare, shim / bare);
}

fn main() {
    if !can_mount() {
        return;
    }
    let model = Model::new(81920 * MIB, &[limit(0, 40960 * MIB)]);
    let program =
        compile(model.room.folder.path(), "bench", &source("bench.c"), &["-Wno-unused", "-ldl", "-lpthread"]);
    let bench = Bench { model, program };
    println!("shim: {}\n", common::shim().display());
    println!("{:<44} {:>11} {:>11} {:>10}   {:>6}   target", "ns", "without", "with", "added", "ratio");
    let node = LimitsWriter::open(&bench.model.room.limits()).unwrap();
    // Alone on the GPU, with leave to use all of it.
    node.set(&GpuLimit { core_percent: 100, core_limit_percent: 100, ..limit(0, 40960 * MIB) }).unwrap();
    row("launch, unpaced", bench.pair(&["launch", "0"]), "adds at most 5");
    node.set(&GpuLimit { core_percent: 99, core_limit_percent: 99, ..limit(0, 40960 * MIB) }).unwrap();
    row("launch of 100 ns, paced to 99 %", bench.pair(&["launch", "100"]), "");
    row("cuMemGetInfo", bench.pair(&["info"]), "adds at most 50");
    // As it is in most containers: contexts are counted, and the figure has its time.
    node.set_unseen(&model_uuid(0), 400 * MIB, u64::MAX).unwrap();
    row("cuMemGetInfo, contexts counted", bench.pair(&["info"]), "adds at most 50");
    for live in [1, 1_000, 50_000, 1_000_000] {
        let what = format!("allocation and free, {live} live");
        row(&what, bench.pair(&["alloc", &live.to_string(), "1"]), "adds at most 150");
    }
    for threads in [2, 4, 16] {
        let what = format!("allocation and free, {threads} threads");
        row(&what, bench.pair(&["alloc", "1000", &threads.to_string()]), "adds at most 150");
    }
    row("dlopen, cuInit, first allocation", bench.pair(&[]), "at most 1,000,000");
    let many = (0..3).fold((f64::MAX, f64::MAX), |(bare, shim), _| {
        (bare.min(bench.start_many(false, 200)), shim.min(bench.start_many(true, 200)))
    });
    row("200 processes at once", many, "at most twice");
}
