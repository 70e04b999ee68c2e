//! How an error is told to people: in one line, each of its causes once.

use std::{error::Error, fmt::Write as _};

/// `error` and what caused it, in one line. Many an error has its cause's words in its own, which are not said again; and
/// what it quotes of a file is no news for the terminal, so control characters are escaped.
pub fn in_one_line(error: &(dyn Error + 'static)) -> String {
    let mut told = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        if !told.contains(&text) {
            let _ = write!(told, ": {text}");
        }
        next = cause.source();
    }
    let mut line = String::with_capacity(told.len());
    for char in told.chars() {
        match char.is_control() {
            true => line.extend(char.escape_default()),
            false => line.push(char),
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use std::io;

    use thiserror::Error;

    use super::*;

    #[derive(Debug, Error)]
    #[error("{path}: {source}; pass another")]
    struct Outer {
        path: &'static str,
        source: Inner,
    }

    #[derive(Debug, Error)]
    #[error("it does not open")]
    struct Inner(#[source] io::Error);

    #[test]
    fn every_cause_is_told_once_and_in_one_line() {
        let system = io::Error::other("no room\nroot:\u{1b}[31m");
        let error = Outer { path: "/x", source: Inner(system) };
        assert_eq!(in_one_line(&error), "/x: it does not open; pass another: no room\\nroot:\\u{1b}[31m");
    }
}
