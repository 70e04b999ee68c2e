//! Growing pauses between attempts, with jitter, so that the nodes of a fleet do not move in step.

use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};

/// The pauses of one series of attempts.
#[derive(Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    /// Pauses that double from `first` to `longest`.
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: first }
    }

    /// The pause before the next attempt: half of what is due, and a random part of the other half.
    pub fn pause(&mut self) -> Duration {
        let due = self.next;
        self.next = (due * 2).min(self.longest);
        // A fresh `RandomState` is seeded by the system; its top byte is as good a die as is needed here.
        let die = RandomState::new().hash_one(()) >> 56;
        due / 2 + due / 2 * u32::try_from(die).unwrap_or(0) / 255
    }

    /// An attempt went well: the next series starts anew.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_start_anew_after_success() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(100), ms(5000));
        for due in [100, 200, 400, 800, 1600, 3200, 5000, 5000] {
            let pause = backoff.pause();
            assert!((ms(due / 2)..=ms(due)).contains(&pause), "{pause:?} for {due}");
        }
        backoff.reset();
        assert!(backoff.pause() <= ms(100));
    }
}
