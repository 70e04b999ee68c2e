//! A process that is killed at any instant (SIGKILL) while it binds, stops and releases leaves a ledger that reads
//! whole and promises no GPU twice.

mod common;

use std::{
    env,
    io::Read,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use common::{assert_not_overpromised, claim, inventory};
use ledger::{Ledger, SandboxEnd};
use vcuda_config::Request;

const FOLDER: &str = "LEDGER_TEST_FOLDER";

/// Churns until it is killed. It is no test of its own; the test below starts this same program for it.
#[test]
fn churn() {
    let Some(folder) = env::var_os(FOLDER) else { return };
    let inventory = inventory(2);
    let ledger = Ledger::open_in_boot(Path::new(&folder), "boot".into()).unwrap();
    println!("ready");
    for n in 0_u32.. {
        let claim = claim(n % 7, 0, n % 2, n, Request::new(1 + n * 13 % 60, 1 + n % 20).unwrap());
        let fill = |_: &_, folder: &ledger::ShareFolder| std::fs::write(folder.limits(), [0; 4096]);
        if let Ok(bound) = ledger.bind(&inventory, &claim, &[], fill) {
            if n % 3 == 0 {
                ledger.mark_stopped(&bound.record.container.id).unwrap();
            }
        } else {
            ledger.end_sandbox(&format!("sandbox-{}-0", n % 5), SandboxEnd::Stopped).unwrap();
        }
    }
}

#[test]
fn a_kill_at_any_instant_loses_nothing_and_promises_nothing_twice() {
    let folder = tempfile::tempdir().unwrap();
    let shares = folder.path().join("shares");
    let inventory = inventory(2);
    for round in 0..40_u64 {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "churn", "--nocapture"])
            .env(FOLDER, &shares)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = child.stdout.take().unwrap();
        let mut seen = Vec::new();
        while !seen.ends_with(b"ready\n") {
            let mut byte = [0];
            output.read_exact(&mut byte).unwrap();
            seen.push(byte[0]);
        }
        // Rounds end at different points of the churn, which takes a fraction of a millisecond a step.
        thread::sleep(Duration::from_micros(500 + round * 137));
        child.kill().unwrap();
        child.wait().unwrap();

        let ledger = Ledger::open_in_boot(&shares, "boot".into()).unwrap();
        let now = ledger.shares().unwrap();
        assert!(now.unreadable.is_empty(), "{:?}", now.unreadable);
        assert_not_overpromised(&now, &inventory);
        for name in now.records.keys() {
            assert!(ledger::ShareFolder::new(&shares, name).limits().exists(), "{name} has all its files");
        }
        let entries = std::fs::read_dir(&shares).unwrap().count();
        assert_eq!(entries, now.records.len(), "nothing else is left in the folder");
    }
}
