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
        let floor = Arc::clone(&floor);
        tokio::spawn(async move {
            let talk = time::timeout(TIME_LIMIT, talk(stream, floor));
            match talk.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => debug!(%error, "a peer that asked nothing"),
                Err(_) => debug!("a peer that took too long"),
            }
            drop(place);
        });
    }
}

async fn talk(mut stream: UnixStream, floor: Arc<Floor>) -> io::Result<()> {
    let peer = stream.peer_cred()?;
    if peer.uid() != 0 {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is not root"));
    }
    let (reading, mut writing) = stream.split();
    let mut line = Vec::new();
    BufReader::new(reading.take(MESSAGE_MAX_BYTES)).read_until(b'\n', &mut line).await?;
    let question: Question = serde_json::from_slice(&line)?;
    // The answer is waited for to its end, so that it is never given for another question.
    let answer = task::spawn_blocking(move || match question {
        // No process ID: the peer is in a namespace of processes that this one does not see.
        Question::Hold { share } => match peer.pid().filter(|pid| *pid > 0) {
            Some(pid) => floor.hold(&share, pid),
            None => {
                Answer::Failed { reason: "vcuda-device-plugin needs the host's process IDs (hostPID)".into() }
            }
        },
        Question::Renew { share } => floor.renew(&share),
    });
    let answer = answer.await.map_err(io::Error::other)?;
    let mut text = serde_json::to_vec(&answer)?;
    text.push(b'\n');
    writing.write_all(&text).await
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
    fn node() -> (tempfile::TempDir, PathBuf) {
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
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
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
        let (_folder, socket) = node();
        assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
        for share in ["7f3c_main", "../../etc_x", ""] {
            let answer = ask(&socket, &hold(share), Duration::from_secs(10)).unwrap();
            assert!(matches!(answer, Answer::Failed { .. }), "{answer:?}");
        }
        let renewed = ask(&socket, &Question::Renew { share: "7f3c_main".into() }, Duration::from_secs(10));
        assert!(matches!(renewed.unwrap(), Answer::Failed { reason } if reason.contains("7f3c_main")));
    }

    #[test]
    fn peers_that_babble_or_hang_keep_nobody_else_waiting() {
        let (_folder, socket) = node();
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
