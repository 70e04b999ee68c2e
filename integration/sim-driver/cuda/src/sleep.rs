//! Waiting for a time, to the microsecond, with as little of the CPU as that takes: sleeping until shortly before it, with
//! the thread's timers set to fire on time, and looking at the clock for the rest.

use sim_gpud::state::now;

/// What is left to look at the clock for: waking up takes about as long.
const REST: u64 = 30_000;

/// Below this, a sleep would be over too late.
const LEAST: u64 = 50_000;

/// Waits until a time in nanoseconds of `CLOCK_MONOTONIC`, or a signal.
pub(crate) fn sleep_until(time: u64) {
    let left = time.saturating_sub(now());
    if left > LEAST {
        sleep(left - REST);
    }
    while now() < time {
        std::thread::yield_now();
    }
}

fn sleep(time: u64) {
    let second = 1_000_000_000;
    let time = libc::timespec {
        tv_sec: i64::try_from(time / second).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(time % second).unwrap_or(0),
    };
    // SAFETY: plain numbers, and a live `timespec`. The thread's timer slack is put back to what it was.
    unsafe {
        let slack = libc::prctl(libc::PR_GET_TIMERSLACK);
        libc::prctl(libc::PR_SET_TIMERSLACK, 1);
        libc::nanosleep(&raw const time, std::ptr::null_mut());
        if slack > 0 {
            libc::prctl(libc::PR_SET_TIMERSLACK, slack);
        }
    }
}
