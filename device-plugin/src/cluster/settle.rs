//! When something that changes again and again is looked at: once it has been quiet for a while, and from time to time if it
//! never is.

use std::{future, time::Duration};

use tokio::time::{self, Instant};

/// How long it must be quiet.
const QUIET: Duration = Duration::from_secs(2);

/// Longest time from the first change to the look at it.
const LONGEST: Duration = Duration::from_secs(10);

/// Changes that nobody has looked at yet.
#[derive(Debug, Default)]
pub(super) struct Settle(Option<Unseen>);

#[derive(Debug)]
struct Unseen {
    first: Instant,
    last: Instant,
}

impl Settle {
    /// Notes a change.
    pub(super) fn stir(&mut self) {
        let now = Instant::now();
        let first = self.0.as_ref().map_or(now, |unseen| unseen.first);
        self.0 = Some(Unseen { first, last: now });
    }

    /// Returns when it is time to look at what has changed, once for all of it; never where nothing has.
    pub(super) async fn settled(&mut self) {
        match &self.0 {
            None => future::pending().await,
            Some(unseen) => time::sleep_until((unseen.last + QUIET).min(unseen.first + LONGEST)).await,
        }
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn changes_are_looked_at_once_it_is_quiet_and_in_bounded_time_where_it_never_is() {
        let mut settle = Settle::default();
        assert!(settle.settled().now_or_never().is_none());
        let begun = Instant::now();
        settle.stir();
        time::advance(QUIET / 2).await;
        settle.stir();
        settle.settled().await;
        assert_eq!(begun.elapsed(), QUIET / 2 + QUIET);
        assert!(settle.settled().now_or_never().is_none(), "all of it was looked at");

        let begun = Instant::now();
        settle.stir();
        while time::timeout(QUIET / 2, settle.settled()).await.is_err() {
            settle.stir();
        }
        assert_eq!(begun.elapsed(), LONGEST);
    }
}
