//! The accounting in every order in which the steps of some processes can come: the code itself, one thread at a time from one
//! fault point to the next, through all schedules.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::{
    collections::BTreeSet,
    sync::{Arc, Condvar, Mutex},
    thread,
};

use region::{Process, Usage, fault};

const GPU: usize = 1;
const UNIT: u64 = 512;

/// What a process does, in units.
#[derive(Clone, Copy, Debug)]
enum Step {
    Take(u64),
    Give(u64),
    Charge(u64),
}

/// Who runs, and who is not done.
struct Turns {
    state: Mutex<(Option<usize>, BTreeSet<usize>)>,
    changed: Condvar,
}

impl Turns {
    /// Hands the turn back, and waits for the next one of thread `me`.
    fn pass(&self, me: usize) {
        let mut state = self.state.lock().unwrap();
        state.0 = None;
        self.changed.notify_all();
        drop(self.changed.wait_while(state, |state| state.0 != Some(me)).unwrap());
    }

    fn end(&self, me: usize) {
        let mut state = self.state.lock().unwrap();
        state.0 = None;
        state.1.remove(&me);
        self.changed.notify_all();
    }
}

/// Runs `processes` once, each in a slot of its own, choosing by `schedule` and the first one after it. What was taken, and
/// the choices that there were.
fn run(
    usage: &Usage,
    processes: &[&[Step]],
    schedule: &[usize],
    ceiling: u64,
) -> (Vec<Vec<bool>>, Vec<usize>) {
    let turns = Arc::new(Turns {
        state: Mutex::new((None, (0..processes.len()).collect())),
        changed: Condvar::new(),
    });
    thread::scope(|scope| {
        let threads: Vec<_> = processes
            .iter()
            .enumerate()
            .map(|(number, steps)| {
                let turns = Arc::clone(&turns);
                scope.spawn(move || {
                    let me = Process::of_slot(number).unwrap();
                    let state = turns.state.lock().unwrap();
                    drop(turns.changed.wait_while(state, |state| state.0 != Some(number)).unwrap());
                    let passed = Arc::clone(&turns);
                    fault::hook(move || passed.pass(number));
                    let did = steps.iter().map(|step| match *step {
                        Step::Take(units) => usage.take(me, GPU, units * UNIT, ceiling * UNIT).is_ok(),
                        Step::Give(units) => {
                            usage.give(me, GPU, units * UNIT);
                            true
                        }
                        Step::Charge(units) => {
                            usage.charge(me, GPU, units * UNIT);
                            true
                        }
                    });
                    let did = did.collect();
                    fault::hook(|| ());
                    turns.end(number);
                    did
                })
            })
            .collect();
        let mut choices = Vec::new();
        loop {
            let state = turns.state.lock().unwrap();
            let mut state = turns.changed.wait_while(state, |state| state.0.is_some()).unwrap();
            if state.1.is_empty() {
                break;
            }
            let chosen = schedule.get(choices.len()).copied().unwrap_or(0);
            choices.push(state.1.len());
            state.0 = state.1.iter().nth(chosen).copied();
            turns.changed.notify_all();
        }
        (threads.into_iter().map(|thread| thread.join().unwrap()).collect(), choices)
    })
}

/// All schedules of `processes`, each on a file of its own that holds `before` units per slot. `check` gets what was done and
/// what each slot holds in the end. Tells how many there were.
fn explore(
    before: &[u64],
    processes: &[&[Step]],
    ceiling: u64,
    check: impl Fn(&[Vec<bool>], &[u64]),
) -> usize {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("usage");
    let (mut schedule, mut count) = (Vec::new(), 0);
    Usage::create(&path).unwrap();
    let usage = Usage::open(&path).unwrap();
    loop {
        for (number, units) in before.iter().enumerate() {
            let me = Process::of_slot(number).unwrap();
            usage.give(me, GPU, usage.held(me, GPU));
            usage.charge(me, GPU, units * UNIT);
        }
        let (did, choices) = run(&usage, processes, &schedule, ceiling);
        let held: Vec<u64> = (0..processes.len())
            .map(|slot| usage.held(Process::of_slot(slot).unwrap(), GPU) / UNIT)
            .collect();
        assert_eq!(usage.used(None, GPU) / UNIT, held.iter().sum::<u64>(), "{schedule:?}");
        check(&did, &held);
        count += 1;
        // The last choice that has another one.
        schedule.resize(choices.len(), 0);
        let Some(at) = (0..choices.len()).rev().find(|at| schedule[*at] + 1 < choices[*at]) else {
            return count;
        };
        schedule[at] += 1;
        schedule.truncate(at + 1);
    }
}

#[test]
fn of_two_that_do_not_fit_together_one_is_taken_in_every_order() {
    let count = explore(&[0, 0], &[&[Step::Take(6)], &[Step::Take(5)]], 10, |did, held| {
        assert_eq!(did.iter().filter(|did| did[0]).count(), 1);
        assert_eq!(held, [if did[0][0] { 6 } else { 0 }, if did[1][0] { 5 } else { 0 }]);
    });
    println!("{count} orders");
    assert!(count > 100);
}

#[test]
fn every_two_changes_add_up_in_every_order() {
    let changes = [Step::Take(3), Step::Give(2), Step::Give(9), Step::Charge(4)];
    let after = |step, held: u64| match step {
        Step::Take(units) | Step::Charge(units) => held + units,
        Step::Give(units) => held - units.min(held),
    };
    let mut count = 0;
    for (at, one) in changes.into_iter().enumerate() {
        for &two in &changes[at..] {
            count += explore(&[5, 5], &[&[one], &[two]], 100, |did, held| {
                assert!(did.iter().flatten().all(|did| *did));
                assert_eq!(held, [after(one, 5), after(two, 5)], "{one:?} {two:?}");
            });
        }
    }
    println!("{count} orders");
}

#[test]
fn what_one_gives_another_takes_or_is_refused_in_every_order() {
    let count = explore(&[8, 0], &[&[Step::Give(8)], &[Step::Take(5)]], 10, |did, held| {
        assert_eq!(held, [0, if did[1][0] { 5 } else { 0 }]);
    });
    println!("{count} orders");
}
