//! What daemons do alike: where and how they log, and how often, which signals ask them to end, and how many connections
//! they hold open. It knows nothing of what they are for.

#![forbid(unsafe_code)]

#[cfg(feature = "http")]
mod connections;
mod told;

#[cfg(feature = "http")]
pub use connections::{Connection, Connections};
pub use told::Told;

use std::{
    env,
    io::{self, IsTerminal},
};

use clap::ValueEnum;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// How the log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people
    Text,
    /// JSON, for programs
    Json,
}

/// Logs to standard error what `RUST_LOG` says, or `default`.
pub fn start_log(format: LogFormat, default: &str) {
    let (filter, complaint) = filter(default);
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr);
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    if let Some(complaint) = complaint {
        tracing::warn!("{complaint}");
    }
}

/// The filter that `RUST_LOG` asks for, or `default`; and what is wrong with `RUST_LOG`.
pub fn filter(default: &str) -> (EnvFilter, Option<String>) {
    parse(env::var(EnvFilter::DEFAULT_ENV).ok(), default)
}

fn parse(wanted: Option<String>, default: &str) -> (EnvFilter, Option<String>) {
    match wanted.filter(|text| !text.is_empty()) {
        None => (EnvFilter::new(default), None),
        Some(text) => match EnvFilter::try_new(&text) {
            Ok(filter) => (filter, None),
            Err(error) => {
                let complaint = format!(
                    "{}={text}: {error}; {default} holds, set it to such as `debug` or `info,kube=debug`",
                    EnvFilter::DEFAULT_ENV
                );
                (EnvFilter::new(default), Some(complaint))
            }
        },
    }
}

/// The signals that ask for an end, caught from when this is made.
#[derive(Debug)]
pub struct End {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl End {
    /// Catches SIGTERM, SIGINT and SIGHUP. Who sends the last wants settings read anew, and whoever starts this process
    /// again does that.
    ///
    /// # Errors
    ///
    /// They cannot be caught.
    pub fn catch() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for one of them.
    pub async fn asked(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_is_none_is_told_and_the_default_holds() {
        for (wanted, filter) in [
            (None, "info"),
            (Some(""), "info"),
            (Some("debug"), "debug"),
            (Some("info,a=warn"), "a=warn,info"),
        ] {
            let (parsed, complaint) = parse(wanted.map(Into::into), "info");
            assert_eq!((parsed.to_string().as_str(), complaint), (filter, None), "{wanted:?}");
        }
        let (parsed, complaint) = parse(Some("a=loud".into()), "info");
        assert_eq!(parsed.to_string(), "info");
        assert!(complaint.unwrap().contains("RUST_LOG=a=loud"));
    }
}
