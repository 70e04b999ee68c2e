//! Failures in a row of what talks to the API server: each reason is said once, and each pause is longer.

use std::time::Duration;

/// First and longest pause after a failure.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// What has failed since it last went well.
#[derive(Debug)]
pub(super) struct Failures {
    told: Option<String>,
    pause: Duration,
}

impl Failures {
    /// None yet.
    pub(super) fn none() -> Self {
        Self { told: None, pause: PAUSE.0 }
    }

    /// Whether `reason` is another than the last one.
    pub(super) fn is_news(&mut self, reason: &str) -> bool {
        let news = self.told.as_deref() != Some(reason);
        if news {
            self.told = Some(reason.to_owned());
        }
        news
    }

    /// How long to wait before the next try.
    pub(super) fn pause(&mut self) -> Duration {
        let longer = (self.pause * 2).min(PAUSE.1);
        std::mem::replace(&mut self.pause, longer)
    }
}
