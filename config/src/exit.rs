//! With which code a program of vcuda ends: a number means the same in all of them, and `--help` lists those that a program
//! or a command can end with.

use std::{fmt::Write, process::ExitCode};

/// An exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Exit {
    /// It is done, or the answer is yes.
    Done = 0,
    /// It failed, or the answer is no.
    No = 1,
    /// The arguments are wrong; clap ends with it, too. Of `vcuda-check` also that what was asked could not be told.
    Usage = 2,
    /// The node file is wrong or missing.
    NodeFile = 3,
    /// There is no NVIDIA driver.
    NoDriver = 4,
    /// There is no GPU to offer.
    NoGpu = 5,
    /// Another process of this kind runs on the node.
    AlreadyRuns = 6,
    /// A folder cannot be written.
    Unwritable = 7,
    /// There is no such share.
    NoShare = 8,
    /// What was to be set cannot be.
    CannotBeSet = 9,
    /// The request fits nowhere on the node.
    FitsNowhere = 10,
    /// Some workloads will not run.
    SomeWillNotRun = 11,
    /// The scheduler lost its lease.
    LeaseLost = 12,
}

impl Exit {
    /// What `--help` says of a program or a command that ends with `Done` and `No` for these reasons, with wrong arguments,
    /// and with `others`.
    pub fn help(done: &str, no: &str, others: &[Self]) -> String {
        let mut help = Self::help_of_check(done, no, Self::Usage.meaning());
        for other in others {
            let _ = write!(help, "\n  {:<2} {}", *other as u8, other.meaning());
        }
        help
    }

    /// The same where all else, wrong arguments among it, is `open`.
    pub fn help_of_check(yes: &str, no: &str, open: &str) -> String {
        format!("Exit codes:\n  0  {yes}\n  1  {no}\n  2  {open}")
    }

    const fn meaning(self) -> &'static str {
        match self {
            Self::Done => "done, or yes",
            Self::No => "it failed, or no",
            Self::Usage => "wrong arguments",
            Self::NodeFile => "the node file is wrong or missing",
            Self::NoDriver => "no NVIDIA driver that can be used",
            Self::NoGpu => "no GPU to offer",
            Self::AlreadyRuns => "another one runs on this node",
            Self::Unwritable => "a folder cannot be written",
            Self::NoShare => "no such share",
            Self::CannotBeSet => "that cannot be set: not enough room, or no such amount",
            Self::FitsNowhere => "it fits nowhere on this node",
            Self::SomeWillNotRun => "some of what runs will not run",
            Self::LeaseLost => "the lease was lost: another replica may lead",
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_has_a_line_for_each_code() {
        let help = Exit::help("sent", "not sent", &[Exit::NodeFile, Exit::SomeWillNotRun]);
        assert_eq!(
            help,
            "Exit codes:\n  0  sent\n  1  not sent\n  2  wrong arguments\n  3  the node file is wrong or missing\n  11 \
             some of what runs will not run"
        );
    }
}
