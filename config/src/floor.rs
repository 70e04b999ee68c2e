//! How the guard, and whoever changes a share, ask the device plugin to have the driver hold a container to its memory:
//! one line of JSON each way over a Unix socket of the node, for root only. The question names a share and nothing else;
//! what the share may use, and which cgroup is meant, the device plugin finds out by itself.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

/// The most that either side reads, in bytes.
pub const MESSAGE_MAX_BYTES: u64 = 4096;

/// Whose question it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Question {
    /// The peer is in the cgroup of the share's container, which has not started yet: hold that cgroup.
    Hold {
        /// Name of the share's folder.
        share: String,
    },
    /// The share has changed: hold its container to what it may use now.
    Renew {
        /// Name of the share's folder.
        share: String,
    },
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Answer {
    /// The driver holds the container, whatever its processes do.
    Held,
    /// The driver of this node cannot.
    NotOffered {
        /// Why, and what would help.
        reason: String,
    },
    /// It could not be done, though the driver can.
    Failed {
        /// Why, and what would help.
        reason: String,
    },
}

/// Asks the device plugin that listens at `socket`, for at most `within`.
///
/// # Errors
///
/// It does not listen, does not answer in time, or says something else than an [`Answer`].
pub fn ask(socket: &Path, question: &Question, within: Duration) -> io::Result<Answer> {
    let until = Instant::now() + within;
    // A listener whose backlog is full keeps `connect` waiting, without a limit; then it is asked no more.
    let mut stream = UnixStream::connect(socket)?;
    let mut line = serde_json::to_vec(question)?;
    line.push(b'\n');
    stream.set_write_timeout(Some(within))?;
    stream.write_all(&line)?;
    let mut text = Vec::new();
    let mut chunk = [0; 512];
    while !text.ends_with(b"\n") {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no answer within {} s", within.as_secs_f32()),
            ));
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut chunk) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it ended without an answer")),
            Ok(count) => text.extend(&chunk[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // The time has run out, which the next round says.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if text.len() as u64 > MESSAGE_MAX_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "its answer is too long"));
        }
    }
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        os::unix::net::UnixListener,
        thread,
    };

    use super::*;

    fn question() -> Question {
        Question::Hold { share: "7f3c_main".into() }
    }

    /// Somebody listens, and says `answer` or nothing for as long as it is asked.
    fn listener(answer: Option<&'static [u8]>) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("floor.sock");
        let listener = UnixListener::bind(&path).unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut question = String::new();
            BufReader::new(&stream).read_line(&mut question).unwrap();
            if let Some(answer) = answer {
                let _ = stream.write_all(answer);
            } else {
                let _ = stream.read_to_end(&mut Vec::new());
            }
        });
        (folder, path)
    }

    #[test]
    fn answers_are_read_as_they_were_meant() {
        for answer in [
            Answer::Held,
            Answer::NotOffered { reason: "an old driver".into() },
            Answer::Failed { reason: "x\ny".into() },
        ] {
            let mut text = serde_json::to_vec(&answer).unwrap();
            text.push(b'\n');
            let (_folder, path) = listener(Some(text.leak()));
            assert_eq!(ask(&path, &question(), Duration::from_secs(10)).unwrap(), answer);
        }
    }

    #[test]
    fn a_plugin_that_is_away_silent_or_babbles_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let gone = ask(&folder.path().join("none"), &question(), Duration::from_secs(1)).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
        for (answer, kind) in [
            (None, io::ErrorKind::TimedOut),
            (Some(&b""[..]), io::ErrorKind::UnexpectedEof),
            (Some(b"\"held\""), io::ErrorKind::UnexpectedEof),
            (Some(b"\"sure\"\n"), io::ErrorKind::InvalidData),
            (Some(&[b'x'; 1 << 20]), io::ErrorKind::InvalidData),
        ] {
            let (_folder, path) = listener(answer);
            let error = ask(&path, &question(), Duration::from_millis(200)).unwrap_err();
            assert_eq!(error.kind(), kind, "{answer:?}: {error:?}");
        }
    }
}
