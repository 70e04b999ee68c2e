//! The driver's floor: the guard runs in the container's cgroup before the container's first process does, so it is the
//! one to ask the device plugin to have the driver hold that cgroup. What comes of it is the node file's to say.

use std::time::Duration;

use ledger::ShareName;
use thiserror::Error;
use vcuda_config::{
    MemoryFloor, Paths,
    floor::{Answer, Question, ask},
};

/// It answers in milliseconds. Below the guard's own limit.
const WITHIN: Duration = Duration::from_secs(2);

/// Why a container that must stand on the driver's floor does not start.
#[derive(Debug, Error)]
pub enum FloorError {
    /// There is none on this node.
    #[error(
        "this node wants GPU memory held by the driver (memory.floor: driver in its node file), which it cannot: {0}; \
         use a node that can, or set memory.floor: auto"
    )]
    NotOffered(String),
    /// It could not be had.
    #[error(
        "this node wants GPU memory held by the driver (memory.floor: driver in its node file), and that failed: {0}; \
         the pod is tried again"
    )]
    Failed(String),
    /// Nobody there to ask.
    #[error(
        "this node wants GPU memory held by the driver (memory.floor: driver in its node file), and \
         vcuda-device-plugin, which sees to it, does not answer: {0}; see that it runs on this node"
    )]
    NoAnswer(std::io::Error),
}

/// The first driver that holds a cgroup to its memory: NVML 13.4 came with it.
const FIRST_DRIVER: u32 = 615;

/// Puts the floor under `share`, on a node with the driver of this version.
///
/// # Errors
///
/// Only where the node demands it: else the shim holds the container, and the device plugin makes up for a floor that
/// it was not there to put.
pub(super) fn hold(
    paths: &Paths,
    wanted: MemoryFloor,
    share: &ShareName,
    driver: &str,
) -> Result<(), FloorError> {
    let branch = driver.split('.').next().and_then(|branch| branch.parse::<u32>().ok());
    // Nobody need be asked for what the driver does not have, where it is not demanded.
    let too_old = branch.is_some_and(|branch| branch < FIRST_DRIVER);
    if wanted == MemoryFloor::Shim || wanted == MemoryFloor::Auto && too_old {
        return Ok(());
    }
    let answer = ask(&paths.floor_socket(), &Question::Hold { share: share.to_string() }, WITHIN);
    let error = match answer {
        Ok(Answer::Held) => return Ok(()),
        Ok(Answer::NotOffered { reason }) => FloorError::NotOffered(reason),
        Ok(Answer::Failed { reason }) => FloorError::Failed(reason),
        Err(error) => FloorError::NoAnswer(error),
    };
    if wanted == MemoryFloor::Driver { Err(error) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader, Write},
        os::unix::net::UnixListener,
        thread,
    };

    use super::*;

    /// A node whose device plugin gives this answer, or is not there.
    fn node(answer: Option<Answer>) -> (tempfile::TempDir, Paths) {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths { run: folder.path().into(), ..Paths::default() };
        if let Some(answer) = answer {
            let listener = UnixListener::bind(paths.floor_socket()).unwrap();
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let mut line = String::new();
                    BufReader::new(&stream).read_line(&mut line).unwrap();
                    assert_eq!(line, "{\"hold\":{\"share\":\"7f3c_main\"}}\n");
                    writeln!(&stream, "{}", serde_json::to_string(&answer).unwrap()).unwrap();
                }
            });
        }
        (folder, paths)
    }

    #[test]
    fn nobody_is_asked_for_what_an_older_driver_does_not_have() {
        let share: ShareName = "7f3c_main".parse().unwrap();
        for (driver, asked) in [("614.99", false), ("550.163.01", false), ("615.0", true), ("odd", true)] {
            let folder = tempfile::tempdir().unwrap();
            let paths = Paths { run: folder.path().into(), ..Paths::default() };
            let listener = UnixListener::bind(paths.floor_socket()).unwrap();
            listener.set_nonblocking(true).unwrap();
            let answers = thread::spawn(move || {
                // An answer that only comes when there is a question.
                for _ in 0..50 {
                    if let Ok((stream, _)) = listener.accept() {
                        stream.set_nonblocking(false).unwrap();
                        writeln!(&stream, "{}", serde_json::to_string(&Answer::Held).unwrap()).unwrap();
                        return true;
                    }
                    thread::sleep(Duration::from_millis(10));
                }
                false
            });
            hold(&paths, MemoryFloor::Auto, &share, driver).unwrap();
            assert_eq!(answers.join().unwrap(), asked, "{driver}");
        }
    }

    #[test]
    fn only_a_node_that_demands_the_floor_refuses_without() {
        let share: ShareName = "7f3c_main".parse().unwrap();
        for (answer, refusal) in [
            (Some(Answer::Held), None),
            (
                Some(Answer::NotOffered { reason: "an old driver".into() }),
                Some("an old driver; use a node that can"),
            ),
            (Some(Answer::Failed { reason: "no memory".into() }), Some("that failed: no memory")),
            (None, Some("vcuda-device-plugin, which sees to it, does not answer")),
        ] {
            let (_folder, paths) = node(answer);
            hold(&paths, MemoryFloor::Shim, &share, "615.71").unwrap();
            hold(&paths, MemoryFloor::Auto, &share, "615.71").unwrap();
            let demanded =
                hold(&paths, MemoryFloor::Driver, &share, "550.1").map_err(|error| error.to_string());
            match refusal {
                None => demanded.unwrap(),
                Some(words) => {
                    let said = demanded.unwrap_err();
                    assert!(said.contains(words) && said.contains("memory.floor: driver"), "{said}");
                }
            }
        }
    }
}
