//! Failures of what talks to the API server: each reason is said once, in words, and each pause is longer.

use std::time::Duration;

use daemon::Told;
use kube::{core::Status, runtime::watcher};
use vcuda_config::in_one_line;

/// First and longest pause after a failure.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// What has failed since it last went well.
#[derive(Debug)]
pub(super) struct Failures {
    told: Told,
    pause: Duration,
}

impl Failures {
    /// None yet.
    pub(super) fn none() -> Self {
        Self { told: Told::default(), pause: PAUSE.0 }
    }

    /// Whether `reason` is one that was not told yet.
    pub(super) fn is_news(&mut self, reason: &str) -> bool {
        self.told.is_news(reason)
    }

    /// How long to wait before the next try.
    pub(super) fn pause(&mut self) -> Duration {
        let longer = (self.pause * 2).min(PAUSE.1);
        std::mem::replace(&mut self.pause, longer)
    }
}

/// Why `error` came, in one line. What the API server refuses is told in its own words, once: kube's texts for it hold the
/// whole answer as Rust writes it, and those of its watches hold that text again.
pub(super) fn in_words(error: &anyhow::Error) -> String {
    let Some(status) = answered(error) else { return in_one_line(error.as_ref()) };
    let ours = error.chain().take_while(|cause| !cause.is::<kube::Error>() && !cause.is::<watcher::Error>());
    let mut told: Vec<String> = ours.map(ToString::to_string).collect();
    told.push(status.message.clone());
    in_one_line(anyhow::Error::msg(told.join(": ")).as_ref())
}

/// Whether the API server refuses it to these credentials.
pub(super) fn is_forbidden(error: &anyhow::Error) -> bool {
    answered(error).is_some_and(Status::is_forbidden)
}

/// What the API server answered, where it did.
fn answered(error: &anyhow::Error) -> Option<&Status> {
    error.chain().find_map(|cause| match (cause.downcast_ref(), cause.downcast_ref()) {
        (Some(kube::Error::Api(status)), _) | (_, Some(watcher::Error::WatchError(status))) => {
            Some(&**status)
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn what_the_api_server_refuses_is_told_once_and_in_its_words() {
        const SAID: &str = "nodes is forbidden: node 'worker' cannot read all nodes";
        let refused = || kube::Error::Api(Status::failure(SAID, "Forbidden").with_code(403).boxed());
        let listed: anyhow::Error = watcher::Error::InitialListFailed(refused()).into();
        let watched: anyhow::Error =
            watcher::Error::WatchError(Status::failure(SAID, "Forbidden").with_code(403).boxed()).into();
        let written = Err::<(), _>(refused()).context("node a: it cannot be written").unwrap_err();
        for (error, told) in [
            (listed, SAID.to_owned()),
            (watched, SAID.to_owned()),
            (refused().into(), SAID.to_owned()),
            (written, format!("node a: it cannot be written: {SAID}")),
        ] {
            assert_eq!(in_words(&error), told);
            assert!(is_forbidden(&error), "{error:?}");
        }
        let other = anyhow::anyhow!("no route").context("not reached");
        assert_eq!(in_words(&other), "not reached: no route");
        assert!(!is_forbidden(&other));
    }
}
