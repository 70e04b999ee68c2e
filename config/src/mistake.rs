//! What people are told of a node file that cannot be used. It knows the parser's words, and no key.

use std::io;

/// What to do about a node file that cannot be read.
pub(crate) fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "run as root, or let this user read it",
        io::ErrorKind::NotFound => "create it, or pass --config with the right path",
        _ => "pass --config with the path of a node file",
    }
}

/// What is wrong with the text, in one line: where, the line itself, the reason, and where to look it up.
pub(crate) fn mistake(text: &str, error: &serde_saphyr::Error) -> String {
    let error = error.without_snippet();
    let mut reason = error.to_string();
    // The parser's words for a value of the wrong kind.
    for (said, meant) in [
        ("invalid u64", "this must be a whole number, without a unit"),
        ("invalid u32", "this must be a whole number, without a unit"),
        ("expected sequence start", "this must be a list, such as [a, b]"),
        ("expected mapping start", "this must hold keys of its own"),
        ("invalid socket address syntax", "this must be an address and a port, such as 0.0.0.0:10282"),
        ("unexpected end of input", "there is nothing in it; its first line must be `version: 1`"),
    ] {
        reason = reason.replace(said, meant);
    }
    // What follows is for whoever calls the parser.
    if let Some((said, _)) = reason.split_once(", set DuplicateKeyPolicy") {
        let key = said.trim_start_matches("duplicate mapping key: ");
        reason = format!("{key} is there already; keep one of them");
    }
    // A parser's text may have many lines, and a part of the file.
    let mut reason = reason.lines().next().unwrap_or_default();
    let mut place = String::new();
    if let Some(at) = error.location() {
        reason =
            reason.strip_suffix(&format!(" at line {}, column {}", at.line(), at.column())).unwrap_or(reason);
        let line = usize::try_from(at.line()).ok().and_then(|line| text.lines().nth(line.checked_sub(1)?));
        let line: String = line.unwrap_or_default().trim().chars().take(80).collect();
        if !line.is_empty() {
            place = format!("line {}, `{line}`: ", at.line());
        }
    }
    format!("{place}{reason}; config/examples/config.yaml explains every setting")
}
