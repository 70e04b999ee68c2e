//! Many processes that take and give memory of every kind at random, and are killed at random. `VCUDA_STRESS=full` runs
//! the full size: 64 processes at a time, a million allocations and frees.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

mod common;

use std::{env, path::Path, time::Duration};

use common::{MIB, Model, Session, can_mount, limit};

/// More than a process of `stress` can hold at a time: 256 blocks, the largest a pool of its own, and what its pool keeps.
const MOST_OF_ONE: u64 = 256 * 32 * MIB + 64 * MIB;

struct Size {
    at_a_time: u64,
    processes: u64,
    rounds: u64,
}

fn size() -> Size {
    if env::var("VCUDA_STRESS").is_ok_and(|size| size == "full") {
        Size { at_a_time: 64, processes: 160, rounds: 12_000 }
    } else {
        Size { at_a_time: 12, processes: 36, rounds: 1_500 }
    }
}

/// Runs the processes, kills every third; what those that ended by themselves have been refused.
fn run(model: &Model, Size { at_a_time, processes, rounds }: Size) -> (u64, u64) {
    let (mut running, mut made, mut refused) = (Vec::new(), 0, 0);
    for seed in 1..=processes + at_a_time {
        if seed <= processes {
            let arguments = [&seed.to_string(), &rounds.to_string(), &(MIB).to_string()];
            let mut command = model.command();
            command.arg("stress").args(arguments).stdout(std::process::Stdio::piped());
            running.push((seed, command.spawn().unwrap()));
        }
        if running.len() as u64 <= at_a_time && seed <= processes || running.is_empty() {
            continue;
        }
        let (number, mut child) = running.remove(0);
        if number % 3 == 0 {
            // Somewhere in the middle, wherever that is.
            std::thread::sleep(Duration::from_millis(number * 7 % 40));
            child.kill().unwrap();
            child.wait().unwrap();
            continue;
        }
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "process {number}: {text}");
        let mut words = text.split_whitespace();
        made += words.nth(1).and_then(|word| word.parse::<u64>().ok()).unwrap();
        refused += words.nth(1).and_then(|word| word.parse::<u64>().ok()).unwrap();
    }
    (made, refused)
}

/// Nothing is left, and all of it is to be had.
fn nothing_is_left(model: &Model, ceiling: u64) {
    assert_eq!((model.held(0), model.accounted(0), model.passed()), (0, 0, 0));
    let mut session = model.ready();
    session.must(&format!("alloc {ceiling}"));
    assert_eq!(model.passed(), 0);
}

#[test]
fn the_account_is_exact_after_every_step() {
    if !can_mount() {
        return;
    }
    let model = Model::new(81920 * MIB, &[limit(0, 160 * MIB)]);
    for seed in 1..=8_u64 {
        let mut command = model.command();
        command.args(["stress", &seed.to_string(), "4000", &MIB.to_string(), "alone"]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "seed {seed}: {}", String::from_utf8_lossy(&output.stdout));
    }
    assert_eq!(model.passed(), 0);
}

/// With what was released, copied and asked for in the same places as without.
#[test]
fn valgrind_finds_nothing_wrong() {
    let valgrind = Path::new("/usr/bin/valgrind");
    if !can_mount() {
        return;
    }
    if !valgrind.exists() {
        println!("skipped: no valgrind here; install it with apt-get");
        return;
    }
    let model = Model::new(81920 * MIB, &[limit(0, 160 * MIB)]);
    let arguments = ["--quiet", "--error-exitcode=9"];
    let mut stress = model.command_under(valgrind, &arguments);
    let output = stress.args(["stress", "5", "3000", &MIB.to_string(), "alone"]).output().unwrap();
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    // Threads, launches, forks, NVML.
    let mut session = Session::of(&mut model.command_under(valgrind, &arguments));
    session.must("init 0");
    for command in
        ["threads 8 200 4096", "launch-by 1000 0 0", "child-by-fork 0", "nvml 0", "nvml-processes 0", "sync"]
    {
        session.must(command);
    }
    session.send("end-by-exit");
    assert!(session.wait().success(), "valgrind ends a program with errors with 9");
}

#[test]
fn a_tight_ceiling_is_never_passed() {
    if !can_mount() {
        return;
    }
    let ceiling = 160 * MIB;
    let model = Model::new(81920 * MIB, &[limit(0, ceiling)]);
    let (made, refused) = run(&model, size());
    println!("made {made}, refused {refused}, peak {} of {ceiling}", model.peak(0));
    assert_eq!(model.passed(), 0);
    assert!(made > 1000 && refused > 100, "it was tight");
    assert!(model.peak(0) > ceiling * 9 / 10, "and it was used");
    nothing_is_left(&model, ceiling);
}

#[test]
fn where_there_is_room_nobody_is_refused_whoever_was_killed() {
    if !can_mount() {
        return;
    }
    let size = size();
    // Those at a time, one that is just killed, one that just starts.
    let ceiling = (size.at_a_time + 2) * MOST_OF_ONE;
    let model = Model::new(2 * ceiling, &[limit(0, ceiling)]);
    let (made, refused) = run(&model, size);
    println!("made {made}, refused {refused}");
    assert_eq!((refused, model.refusals(0)), (0, 0));
    nothing_is_left(&model, ceiling);
}
