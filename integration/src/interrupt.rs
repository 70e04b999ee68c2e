//! A signal that is to end a bench or the demo. What they started is taken down when it is dropped, so a signal must
//! end the work, not the process.

use std::{
    future::Future,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use daemon::End;
use tokio::runtime::Runtime;

/// How long work that waits on a thread goes on after a signal.
const STEP: Duration = Duration::from_millis(50);

static CAUGHT: AtomicBool = AtomicBool::new(false);

/// Does `work` to its end, or until SIGINT, SIGTERM or SIGHUP comes.
///
/// # Errors
///
/// Those of the work; that it was interrupted, once what it held is dropped.
pub fn run<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    Runtime::new().context("tokio")?.block_on(async {
        let mut end = End::catch().context("signals cannot be caught")?;
        // On a thread of its own: work that blocks asks by `check`.
        let mut caught = tokio::spawn(async move {
            end.asked().await;
            CAUGHT.store(true, Relaxed);
        });
        tokio::select! {
            outcome = work => outcome,
            _ = &mut caught => check().and_then(|()| bail!("signals are no longer caught")),
        }
    })
}

/// Fails if a signal has come.
///
/// # Errors
///
/// That the work is interrupted.
pub fn check() -> Result<()> {
    if CAUGHT.load(Relaxed) {
        bail!("interrupted; everything was removed");
    }
    Ok(())
}

/// Sleeps on this thread, not beyond a signal.
///
/// # Errors
///
/// That the work is interrupted.
pub fn sleep(time: Duration) -> Result<()> {
    let end = Instant::now() + time;
    loop {
        check()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(STEP));
    }
}
