//! The socket at which the floor is asked for. Root only, by its mode and by what the kernel says of the peer; messages,
//! time and the number of peers are bounded.

use std::{fs, io, os::unix::fs::PermissionsExt, path::Path, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    sync::Semaphore,
    task, time,
};
use tracing::{debug, warn};
use vcuda_config::floor::{Answer, MESSAGE_MAX_BYTES, Question};

use super::Floor;

/// Who is asked at once. A node starts a few containers at a time.
const PEERS_MAX: usize = 32;

/// For the whole of one conversation. The guard waits less.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// Questions that the driver is asked at once, each on a thread. One that hangs keeps its thread for as long as it does, and
/// Allocate needs threads, too.
const CALLS_MAX: usize = 8;

/// For the answer to a question. The guard waits for two seconds, and says then that nobody answers.
const ANSWER: Duration = Duration::from_millis(1500);

/// After a failed accept, which is for want of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Listens at `socket`, in place of whoever did before; answers until dropped.
///
/// # Errors
///
/// The socket cannot be made.
pub(crate) fn serve(socket: &Path, floor: Arc<Floor>) -> io::Result<impl Future<Output = ()> + use<>> {
    // Made under another name, so that nobody reaches it before it has its mode.
    let fresh = socket.with_extension("new");
    match fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&fresh)?;
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o600))?;
    fs::rename(&fresh, socket)?;
    Ok(accept(listener, floor))
}

async fn accept(listener: UnixListener, floor: Arc<Floor>) {
    let room = Arc::new(Semaphore::new(PEERS_MAX));
    let calls = Arc::new(Semaphore::new(CALLS_MAX));
    loop {
        let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "nobody can ask for the driver's floor");
                time::sleep(PAUSE).await;
                continue;
            }
        };
        let (floor, calls) = (Arc::clone(&floor), Arc::clone(&calls));
        tokio::spawn(async move {
            let talk = time::timeout(TIME_LIMIT, talk(stream, floor, calls));
            match talk.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => debug!(%error, "a peer that asked nothing"),
                Err(_) => debug!("a peer that took too long"),
            }
            drop(place);
        });
    }
}

async fn talk(mut stream: UnixStream, floor: Arc<Floor>, calls: Arc<Semaphore>) -> io::Result<()> {
    let peer = stream.peer_cred()?;
    if peer.uid() != 0 {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is not root"));
    }
    let (reading, mut writing) = stream.split();
    let mut line = Vec::new();
    BufReader::new(reading.take(MESSAGE_MAX_BYTES)).read_until(b'\n', &mut line).await?;
    let question: Question = serde_json::from_slice(&line)?;
    let answer = async {
        let call = calls.acquire_owned().await.map_err(io::Error::other)?;
        let answer = task::spawn_blocking(move || {
            // Held until the driver has answered, whoever still waits for that.
            let _call = call;
            reply(&floor, question, peer.pid())
        });
        answer.await.map_err(io::Error::other)
    };
    let answer = match time::timeout(ANSWER, answer).await {
        Ok(answer) => answer?,
        Err(_) => Answer::Failed {
            reason: "the NVIDIA driver, or the disk with the shares, has not answered in time; see the kernel log (dmesg), \
                     and restart the node where it stays so"
                .into(),
        },
    };
    let mut text = serde_json::to_vec(&answer)?;
    text.push(b'\n');
    writing.write_all(&text).await
}

/// It may block for the driver.
fn reply(floor: &Floor, question: Question, pid: Option<i32>) -> Answer {
    match question {
        // No process ID: the peer is in a namespace of processes that this one does not see.
        Question::Hold { share } => match pid.filter(|pid| *pid > 0) {
            Some(pid) => floor.hold(&share, pid),
            None => {
                Answer::Failed { reason: "vcuda-device-plugin needs the host's process IDs (hostPID)".into() }
            }
        },
        Question::Renew { share } => floor.renew(&share),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        os::unix::net::UnixStream,
        path::PathBuf,
        sync::mpsc,
        thread,
        time::Instant,
    };

    use vcuda_config::{MemoryFloor, Paths, floor::ask};

    use super::*;

    /// A node without a driver, whose plugin listens.
    fn node(name: &'static str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let paths =
            Paths { state: at("state"), run: at("run"), driver_root: at("driver"), ..Paths::default() };
        fs::create_dir_all(&paths.run).unwrap();
        let socket = paths.floor_socket();
        // What an earlier one left, killed at whatever point.
        for left in [socket.clone(), socket.with_extension("new")] {
            drop(std::os::unix::net::UnixListener::bind(left).unwrap());
        }
        let floor = Floor::new(paths, MemoryFloor::Auto).unwrap();
        let (listens, listening) = mpsc::channel();
        let at = socket.clone();
        thread::spawn(move || {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = runtime.enable_all().thread_name(name).build().unwrap();
            runtime.block_on(async {
                let serve = serve(&at, floor).unwrap();
                listens.send(()).unwrap();
                serve.await;
            });
        });
        listening.recv().unwrap();
        (folder, socket)
    }

    fn hold(share: &str) -> Question {
        Question::Hold { share: share.into() }
    }

    #[test]
    fn a_share_that_is_not_on_record_is_refused_by_name() {
        let (_folder, socket) = node("refusing");
        assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
        for share in ["7f3c_main", "../../etc_x", ""] {
            let answer = ask(&socket, &hold(share), Duration::from_secs(10)).unwrap();
            assert!(matches!(answer, Answer::Failed { .. }), "{answer:?}");
        }
        let renewed = ask(&socket, &Question::Renew { share: "7f3c_main".into() }, Duration::from_secs(10));
        assert!(matches!(renewed.unwrap(), Answer::Failed { reason } if reason.contains("7f3c_main")));
    }

    /// A record that hangs when it is read, as on a disk that stands still; a driver hangs no other way.
    #[test]
    fn questions_that_hang_are_answered_and_hold_few_threads() {
        let (folder, socket) = node("hanging");
        let share = folder.path().join("state/shares/7f3c_main");
        fs::create_dir_all(&share).unwrap();
        let record = share.join("share.json");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &record,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        thread::scope(|scope| {
            let ask = || ask(&socket, &hold("7f3c_main"), Duration::from_secs(60));
            let asked: Vec<_> = (0..PEERS_MAX).map(|_| scope.spawn(ask)).collect();
            for answer in asked {
                let answer = answer.join().unwrap().unwrap();
                assert!(
                    matches!(&answer, Answer::Failed { reason } if reason.contains("has not answered")),
                    "{answer:?}"
                );
            }
        });
        let names = fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path().join("comm"));
        let hanging =
            names.filter(|name| fs::read_to_string(name).is_ok_and(|name| name.trim() == "hanging"));
        assert!(hanging.count() <= CALLS_MAX);
        // With the disk back, those that hang end, and the next question is answered.
        drop(fs::OpenOptions::new().write(true).open(&record).unwrap());
        fs::remove_file(&record).unwrap();
        let answer = ask(&socket, &hold("7f3c_main"), Duration::from_secs(60)).unwrap();
        assert!(
            matches!(&answer, Answer::Failed { reason } if !reason.contains("has not answered")),
            "{answer:?}"
        );
    }

    #[test]
    fn peers_that_babble_or_hang_keep_nobody_else_waiting() {
        let (_folder, socket) = node("babbled at");
        // Half as many as there is room for say nothing; as many again say too much, and nonsense.
        let silent: Vec<_> = (0..PEERS_MAX / 2).map(|_| UnixStream::connect(&socket).unwrap()).collect();
        let talk = |words: Vec<u8>| {
            let mut stream = UnixStream::connect(&socket).unwrap();
            let mut writing = stream.try_clone().unwrap();
            // It may be hung up on before all is said.
            let writer = thread::spawn(move || drop(writing.write_all(&words)));
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            writer.join().unwrap();
            answer
        };
        for words in [vec![b'x'; 1 << 20], b"{}\n".to_vec(), b"\n".to_vec(), vec![0xff; 10_000]] {
            assert!(talk(words).is_empty(), "no answer to no question");
        }
        let begun = Instant::now();
        assert!(ask(&socket, &hold("7f3c_main"), TIME_LIMIT).is_ok());
        assert!(begun.elapsed() < TIME_LIMIT);
        drop(silent);
    }
}
