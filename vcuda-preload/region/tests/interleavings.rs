//! The accounting in every order in which the steps of some processes can come: the code itself, one thread at a time from one
//! fault point to the next, through all schedules.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::{
    collections::BTreeSet,
    fs::File,
    os::unix::fs::FileExt,
    path::Path,
    sync::{Arc, Condvar, Mutex},
    thread,
};

use region::{Process, Usage, fault};

const GPU: usize = 1;
const UNIT: u64 = 512;

/// What a thread does, in units. What it gives it keeps in its stock where it may.
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

/// A thread: whose, which stock it uses, what it does.
type Thread<'a> = (usize, usize, &'a [Step]);

/// Runs `threads` once, choosing by `schedule`, and after it the one that ran last. What was taken, and the choices that
/// there were: none where a thread that could go on was stopped `most` times before.
fn run(
    usage: &Usage,
    threads: &[Thread],
    schedule: &[usize],
    most: usize,
    ceiling: u64,
) -> (Vec<Vec<bool>>, Vec<usize>) {
    let turns =
        Arc::new(Turns { state: Mutex::new((None, (0..threads.len()).collect())), changed: Condvar::new() });
    thread::scope(|scope| {
        let threads: Vec<_> = threads
            .iter()
            .enumerate()
            .map(|(number, (slot, stock, steps))| {
                let turns = Arc::clone(&turns);
                scope.spawn(move || {
                    let me = Process::of_slot(*slot).unwrap();
                    fault::use_stock(*stock);
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
        let (mut choices, mut last, mut stopped) = (Vec::new(), None, 0);
        loop {
            let state = turns.state.lock().unwrap();
            let mut state = turns.changed.wait_while(state, |state| state.0.is_some()).unwrap();
            if state.1.is_empty() {
                break;
            }
            let chosen = schedule.get(choices.len()).copied().unwrap_or(0);
            // The one that ran last first.
            let goes_on = last.filter(|last| state.1.contains(last));
            let others = state.1.iter().copied().filter(|other| Some(*other) != goes_on);
            let can: Vec<usize> = goes_on.into_iter().chain(others).collect();
            choices.push(if goes_on.is_some() && stopped == most { 1 } else { can.len() });
            stopped += usize::from(goes_on.is_some() && chosen > 0);
            last = Some(can[chosen]);
            state.0 = last;
            turns.changed.notify_all();
        }
        (threads.into_iter().map(|thread| thread.join().unwrap()).collect(), choices)
    })
}

/// All schedules of `threads` in which at most `most` times one is stopped that could go on, each on a file in which each
/// slot uses some units and has some more in stock 0. `check` gets what was done and what each slot uses in the end. Tells
/// how many there were.
fn explore(
    before: &[(u64, u64)],
    threads: &[Thread],
    most: usize,
    ceiling: u64,
    check: impl Fn(&[Vec<bool>], &[u64]),
) -> usize {
    explore_from(&[], before, threads, most, ceiling, check)
}

/// The same of the schedules that begin with `begin`.
fn explore_from(
    begin: &[usize],
    before: &[(u64, u64)],
    threads: &[Thread],
    most: usize,
    ceiling: u64,
    check: impl Fn(&[Vec<bool>], &[u64]),
) -> usize {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("usage");
    let (mut schedule, mut count) = (begin.to_vec(), 0);
    let slots = || (0..before.len()).map(|slot| Process::of_slot(slot).unwrap());
    fault::use_stock(0);
    Usage::create(&path).unwrap();
    let usage = Usage::open(&path).unwrap();
    let file = claim_all(&usage, &path, before.len());
    loop {
        forget_all(&file, before.len());
        for (me, (held, stock)) in slots().zip(before) {
            usage.charge(me, GPU, (held + stock) * UNIT);
            usage.give(me, GPU, stock * UNIT);
        }
        let (did, choices) = run(&usage, threads, &schedule, most, ceiling);
        let used: Vec<u64> = slots().map(|me| usage.held(me, GPU) / UNIT).collect();
        let sum: u64 = used.iter().sum();
        assert_eq!(usage.used(Process::of_slot(0), GPU) / UNIT, sum, "{schedule:?}");
        check(&did, &used);
        // Nothing is left where nobody finds it.
        let me = Process::of_slot(0).unwrap();
        let rest = ceiling.saturating_sub(sum);
        assert!(rest == 0 || usage.take(me, GPU, rest * UNIT, ceiling * UNIT).is_ok(), "{schedule:?}");
        assert!(usage.take(me, GPU, UNIT, ceiling * UNIT).is_err(), "{schedule:?}");
        count += 1;
        // The last choice that has another one.
        schedule.resize(choices.len(), 0);
        let Some(at) = (begin.len()..choices.len()).rev().find(|at| schedule[*at] + 1 < choices[*at]) else {
            return count;
        };
        schedule[at] += 1;
        schedule.truncate(at + 1);
    }
}

// Of layout 3.
const CLAIMED: u64 = 16;
const TOTALS: u64 = 4096;
const SLOTS: u64 = 8192;
const SLOT: u64 = 512;
const STOCKS_USED: u64 = 176;
const HELD: u64 = 256;
const STOCKS: u64 = SLOTS + 1024 * SLOT + 1024 * 192;

/// Has this process look as if it had claimed the first `count` slots.
fn claim_all(usage: &Usage, path: &Path, count: usize) -> File {
    assert_eq!(usage.claim().unwrap().slot(), 0);
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut identity = [0; 32];
    file.read_exact_at(&mut identity, SLOTS).unwrap();
    for slot in 1..count as u64 {
        file.write_all_at(&identity, SLOTS + slot * SLOT).unwrap();
    }
    file.write_all_at(&((1_u64 << count) - 1).to_le_bytes(), CLAIMED).unwrap();
    file
}

/// Nobody holds anything, and never did.
fn forget_all(file: &File, count: usize) {
    file.write_all_at(&[0; 4096], TOTALS).unwrap();
    for slot in 0..count as u64 {
        file.write_all_at(&[0; 256], SLOTS + slot * SLOT + HELD).unwrap();
        file.write_all_at(&[0; 8], SLOTS + slot * SLOT + STOCKS_USED).unwrap();
    }
    file.write_all_at(&vec![0; count * 15 * 128], STOCKS).unwrap();
}

/// As often as there are steps.
const ALWAYS: usize = usize::MAX;

/// Each of two processes has one thread.
fn each<'a>(one: &'a [Step], two: &'a [Step]) -> [Thread<'a>; 2] {
    [(0, 0, one), (1, 0, two)]
}

#[test]
fn a_stock_is_taken_from_or_drained_in_every_order() {
    // Six of ten used or in stock, five more wanted: both fit only one after the other.
    let owner = [Step::Take(3), Step::Give(3)];
    let count = explore(&[(1, 5), (0, 0)], &each(&owner, &[Step::Take(6)]), 4, 10, |did, used| {
        assert!(did.iter().flatten().all(|did| *did), "four and six fit at any moment");
        assert_eq!(used, [1, 6]);
    });
    println!("{count} orders");
    assert!(count > 100);
}

#[test]
fn what_does_not_fit_beside_what_is_taken_from_stock_is_refused_in_every_order() {
    let count = explore(&[(1, 5), (0, 0)], &each(&[Step::Take(4)], &[Step::Take(6)]), 4, 10, |did, used| {
        assert_eq!(did.iter().filter(|did| did[0]).count(), 1);
        assert_eq!(used, [if did[0][0] { 5 } else { 1 }, if did[1][0] { 6 } else { 0 }]);
    });
    println!("{count} orders");
}

/// The owner puts into the stock again between two that drain it, one of which is late.
#[test]
fn two_that_drain_one_stock_lose_nothing_while_its_owner_uses_it() {
    let owner = [Step::Give(2), Step::Take(1), Step::Give(1), Step::Give(1)];
    let (takes, gives) = ([Step::Take(4), Step::Give(4)], [Step::Take(5), Step::Give(5)]);
    let threads = [(0, 0, &owner[..]), (1, 1, &takes[..]), (2, 2, &gives[..])];
    let count = explore(&[(3, 3), (0, 0), (0, 0)], &threads, 2, 13, |did, used| {
        assert!(did.iter().flatten().all(|did| *did), "{did:?}: three, four and five fit at any moment");
        assert_eq!(used, [0, 0, 0]);
    });
    println!("{count} orders");
    assert!(count > 1000);
}

/// The owner is about to put into the stock as two others begin to drain it. It may need what is then there itself.
#[test]
fn what_is_put_between_two_that_drain_one_stock_is_not_lost() {
    let other = [Step::Take(4)];
    let mut count = 0;
    for owner in [&[Step::Give(2), Step::Take(4)][..], &[Step::Give(2)]] {
        let threads = [(0, 0, owner), (1, 1, &other[..]), (2, 2, &other[..])];
        count += explore_from(&[0, 1], &[(4, 3), (0, 0), (0, 0)], &threads, 3, 10, |did, used| {
            let took = [did[0].get(1) == Some(&true), did[1][0], did[2][0]];
            assert!(took.iter().filter(|took| **took).count() >= owner.len(), "{did:?}");
            assert_eq!(used, [[2, 6][usize::from(took[0])], 4 * u64::from(took[1]), 4 * u64::from(took[2])]);
        });
    }
    println!("{count} orders");
    assert!(count > 1000);
}

/// What one thread frees into its stock, another of the process allocates from its own.
#[test]
fn what_fits_is_taken_while_units_move_from_stock_to_stock() {
    let (one, two) = ([Step::Give(3)], [Step::Take(3)]);
    let threads = [(0, 0, &one[..]), (0, 1, &two[..]), (1, 0, &[Step::Take(4)][..])];
    let count = explore(&[(3, 3), (0, 0)], &threads, 2, 10, |did, used| {
        assert!(did[2][0], "at most six of ten are used");
        assert_eq!(used, [if did[1][0] { 3 } else { 0 }, 4]);
    });
    println!("{count} orders");
}

/// Nothing was ever in the stock of the first thread, of which the second then needs what is left.
#[test]
fn what_is_first_put_into_a_stock_is_found_in_every_order() {
    let (one, two) = ([Step::Give(4)], [Step::Take(3), Step::Take(3)]);
    let count =
        explore(&[(6, 0)], &[(0, 1, &one[..]), (0, 1, &two[..])], 3, 8, |did, used| match did[1][..] {
            // Of six used, two are left, and three, and three more.
            [true, second] => assert!(second && used == [8]),
            [false, second] => assert_eq!(used, [if second { 5 } else { 2 }]),
            _ => unreachable!("two steps"),
        });
    println!("{count} orders");
    assert!(count > 100);
}

#[test]
fn of_two_that_do_not_fit_together_one_is_taken_in_every_order() {
    let count = explore(&[(0, 0); 2], &each(&[Step::Take(6)], &[Step::Take(5)]), ALWAYS, 10, |did, held| {
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
            count += explore(&[(5, 0); 2], &each(&[one], &[two]), ALWAYS, 100, |did, held| {
                assert!(did.iter().flatten().all(|did| *did));
                assert_eq!(held, [after(one, 5), after(two, 5)], "{one:?} {two:?}");
            });
        }
    }
    println!("{count} orders");
}

#[test]
fn what_one_gives_another_takes_or_is_refused_in_every_order() {
    let count =
        explore(&[(8, 0), (0, 0)], &each(&[Step::Give(8)], &[Step::Take(5)]), ALWAYS, 10, |did, held| {
            assert_eq!(held, [0, if did[1][0] { 5 } else { 0 }]);
        });
    println!("{count} orders");
}
