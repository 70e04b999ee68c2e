//! Notices that something may have changed in a folder, also when the folder itself comes and goes. It says no more
//! than "look again": whoever is told looks at the files themselves, so a lost or needless notice does no harm.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use inotify::{EventMask, EventStream, Inotify, WatchMask};
use tokio::{sync::watch, time};
use tokio_stream::StreamExt;
use tracing::{debug, warn};

/// How long a notice may take where inotify gives none: the folder is missing, or the node is out of inotify
/// instances.
const WITHOUT_INOTIFY: Duration = Duration::from_secs(1);

/// How long it may take in any case.
const AT_THE_LATEST: Duration = Duration::from_secs(10);

/// Follows the folder at `path` as long as anybody holds the receiver.
pub fn follow(path: PathBuf) -> watch::Receiver<()> {
    let (notice, notices) = watch::channel(());
    tokio::spawn(async move {
        let mut told = false;
        loop {
            match Watch::new(&path) {
                Ok(mut watch) => {
                    told = false;
                    notice.send_replace(());
                    tokio::select! {
                        () = notice.closed() => return,
                        () = watch.run(&notice) => debug!(folder = %path.display(), "folder is gone"),
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if !told => {
                    told = true;
                    warn!(
                        folder = %path.display(), %error,
                        "inotify does not work, looking every second; raise fs.inotify.max_user_instances"
                    );
                }
                Err(_) => {}
            }
            notice.send_replace(());
            tokio::select! {
                () = notice.closed() => return,
                () = time::sleep(WITHOUT_INOTIFY) => {}
            }
        }
    });
    notices
}

/// Passes on notices, and those that come within `pause` of one together with it: for whoever looks at everything then.
pub fn gather(mut notices: watch::Receiver<()>, pause: Duration) -> watch::Receiver<()> {
    let (notice, gathered) = watch::channel(());
    tokio::spawn(async move {
        loop {
            tokio::select! {
                () = notice.closed() => return,
                changed = notices.changed() => if changed.is_err() { return },
            }
            time::sleep(pause).await;
            // What comes from here on is told once more.
            notices.mark_unchanged();
            notice.send_replace(());
        }
    });
    gathered
}

/// The folder that is at the path at the moment.
struct Watch<'a> {
    path: &'a Path,
    identity: (u64, u64),
    events: EventStream<[u8; 4096]>,
}

impl<'a> Watch<'a> {
    fn new(path: &'a Path) -> io::Result<Self> {
        let inotify = Inotify::init()?;
        let entries = WatchMask::CREATE | WatchMask::DELETE | WatchMask::MOVE;
        let itself = WatchMask::DELETE_SELF | WatchMask::MOVE_SELF | WatchMask::ONLYDIR;
        inotify.watches().add(path, entries | itself)?;
        Ok(Self { path, identity: identity(path)?, events: inotify.into_event_stream([0; 4096])? })
    }

    /// Tells of changes until the path leads elsewhere.
    async fn run(&mut self, notice: &watch::Sender<()>) {
        loop {
            let gone = match time::timeout(AT_THE_LATEST, self.changed()).await {
                Ok(Ok(gone)) => gone,
                Ok(Err(error)) => {
                    debug!(folder = %self.path.display(), %error, "inotify failed");
                    true
                }
                // Not every file system tells of its end.
                Err(_) => identity(self.path).ok() != Some(self.identity),
            };
            if gone {
                return;
            }
            notice.send_replace(());
        }
    }

    /// Waits for an event; true when the folder itself is no longer there.
    async fn changed(&mut self) -> io::Result<bool> {
        let end = EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::UNMOUNT | EventMask::IGNORED;
        match self.events.next().await {
            Some(event) => Ok(event?.mask.intersects(end)),
            None => Ok(true),
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let meta = fs::metadata(path)?;
    Ok((meta.dev(), meta.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits for the next notice; they may be more than there are changes.
    async fn noticed(notices: &mut watch::Receiver<()>) {
        time::timeout(Duration::from_secs(30), notices.changed()).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn changes_are_noticed_through_the_end_and_return_of_the_folder() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("device-plugins");
        let mut notices = follow(folder.clone());
        noticed(&mut notices).await;

        for _ in 0..2 {
            fs::create_dir(&folder).unwrap();
            noticed(&mut notices).await;
            fs::write(folder.join("kubelet.sock"), "").unwrap();
            noticed(&mut notices).await;
            fs::remove_dir_all(&folder).unwrap();
            noticed(&mut notices).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn notices_that_come_together_are_passed_on_as_one_and_a_later_one_is_not_lost() {
        const PAUSE: Duration = Duration::from_millis(100);
        let (notice, notices) = watch::channel(());
        let mut gathered = gather(notices, PAUSE);
        for _ in 0..2 {
            for _ in 0..5 {
                notice.send_replace(());
                time::sleep(PAUSE / 10).await;
            }
            gathered.changed().await.unwrap();
            let more = time::timeout(10 * PAUSE, gathered.changed()).await;
            assert!(more.is_err(), "what came within the pause was told before");
        }
        drop(gathered);
        notice.closed().await;
    }

    #[tokio::test]
    async fn nobody_is_told_when_nobody_listens() {
        let folder = tempfile::tempdir().unwrap();
        let notices = follow(folder.path().into());
        let before = tokio::runtime::Handle::current().metrics().num_alive_tasks();
        drop(notices);
        while tokio::runtime::Handle::current().metrics().num_alive_tasks() >= before {
            tokio::task::yield_now().await;
        }
    }
}
