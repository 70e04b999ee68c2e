//! Says that a long check goes on: a line when it has taken two seconds, and every two seconds from then on.

use std::{
    io::{self, Write},
    time::{Duration, Instant},
};

/// When to say that it goes on, and how often.
const PATIENCE: Duration = Duration::from_secs(2);

/// A check's progress, told to `out`.
struct Progress<W> {
    out: W,
    last: Instant,
}

impl<W: Write> Progress<W> {
    /// Of a check that begins at `now`.
    fn new(out: W, now: Instant) -> Self {
        Self { out, last: now }
    }

    /// At `now`, so many files were seen.
    fn seen(&mut self, files: u64, now: Instant) {
        if now.duration_since(self.last) > PATIENCE {
            self.last = now;
            // Who closed standard error wants no line, and still an answer.
            let _ = writeln!(self.out, "vcuda-check: {files} files so far");
        }
    }
}

/// Tells on standard error what a check that begins now has seen.
pub(super) fn progress() -> impl FnMut(u64) {
    let mut progress = Progress::new(io::stderr(), Instant::now());
    move |files| progress.seen(files, Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is told of a check that has seen so many files after so many milliseconds.
    fn told(seen: &[(u64, u64)]) -> String {
        let begun = Instant::now();
        let mut out = Vec::new();
        let mut progress = Progress::new(&mut out, begun);
        for (files, after) in seen {
            progress.seen(*files, begun + Duration::from_millis(*after));
        }
        String::from_utf8_lossy(&out).into_owned()
    }

    #[test]
    fn a_short_check_says_nothing() {
        assert_eq!(told(&[(256, 0), (512, 1_000), (768, 2_000)]), "");
    }

    #[test]
    fn a_long_check_says_how_far_it_is_every_two_seconds() {
        let seen =
            [(256, 1_900), (512, 2_100), (768, 3_000), (1_024, 4_100), (1_280, 4_101), (1_536, 60_000)];
        assert_eq!(
            told(&seen),
            "vcuda-check: 512 files so far\nvcuda-check: 1280 files so far\nvcuda-check: 1536 files so far\n"
        );
    }
}
