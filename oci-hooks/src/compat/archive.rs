//! An image in one file, as `docker save`, `ctr image export` or `skopeo copy` write it: its layers are gone through
//! once, in order, as a stream; what matters of each file is noted and nothing is unpacked. No root is needed.
//!
//! Formats: OCI image layout, Docker's archive. The file comes from anyone: every size is bounded, and what does not
//! fit is an error or makes the answer open.

mod index;
mod layer;
mod tree;

use std::{
    cell::{Cell, RefCell},
    fs::File,
    io,
    path::Path,
    time::{Duration, Instant},
};

use thiserror::Error;

use super::{
    check::{Seen, Unseen},
    start::Command,
    survey::Survey,
};
pub use tree::Tree;

/// How far an archive is gone through.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Entries in all layers together.
    pub entries: u64,
    /// Bytes of all layers together, decompressed.
    pub bytes: u64,
    /// Bytes of memory for what is noted of all files; a hundred for one, some thousand for a library.
    pub memory: u64,
    /// Time.
    pub time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { entries: 2_000_000, bytes: 64 << 30, memory: 512 << 20, time: Duration::from_secs(300) }
    }
}

/// Why an archive cannot be checked.
#[derive(Debug, Error)]
pub enum ArchiveError {
    /// It cannot be read.
    #[error("cannot be read")]
    Read(#[from] io::Error),
    /// It is compressed as a whole.
    #[error("it is compressed; decompress it first, its layers may stay as they are")]
    Compressed,
    /// It is no image.
    #[error(
        "no image of a form known: {0}; write it with `docker save`, `ctr image export` or `skopeo copy`"
    )]
    NoImage(String),
    /// It names something that is not in it.
    #[error("{0} is named in it and is not there; write the archive again, with all its layers")]
    Missing(String),
    /// It goes past a limit.
    #[error("{0}; nothing honest is so large")]
    TooLarge(&'static str),
}

/// Looks at all of the image in the archive at `path`. `progress` is told how many entries were seen, now and then.
///
/// # Errors
/// See [`ArchiveError`].
pub fn see(path: &Path, limits: Limits, progress: &mut dyn FnMut(u64)) -> Result<Seen<Tree>, ArchiveError> {
    let file = File::open(path)?;
    let image = index::Image::open(&file)?;
    let mut tree = Tree::default();
    let meter = Meter::new(limits, progress);
    let mut unseen = Unseen::None;
    for part in &image.layers {
        match layer::read(&file, part, &meter) {
            Ok(layer) => tree.apply(layer),
            Err(error) => {
                // A later layer may bring what is missing so far, and take away what is there.
                unseen = Unseen::Most(format!("layer {} cannot be read: {error}", part.name));
                break;
            }
        }
    }
    if let (Unseen::None, Some(refused)) = (&unseen, tree.refused()) {
        unseen = Unseen::Some(refused);
    }
    let mut survey = Survey::default();
    tree.each(&mut |path, facts| survey.take(path, facts));
    let command = Command { args: image.args, env: image.env, cwd: image.cwd };
    Ok(Seen::new(tree, path.display().to_string(), command, survey, unseen))
}

/// Counts what was read, and says when it is enough.
struct Meter<'a> {
    limits: Limits,
    start: Instant,
    entries: Cell<u64>,
    bytes: Cell<u64>,
    memory: Cell<u64>,
    progress: RefCell<&'a mut dyn FnMut(u64)>,
}

impl<'a> Meter<'a> {
    fn new(limits: Limits, progress: &'a mut dyn FnMut(u64)) -> Self {
        let [entries, bytes, memory] = [0, 0, 0].map(Cell::new);
        Self { limits, start: Instant::now(), entries, bytes, memory, progress: RefCell::new(progress) }
    }

    fn entry(&self) -> io::Result<()> {
        let entries = self.entries.get() + 1;
        self.entries.set(entries);
        if entries.is_multiple_of(256) {
            (self.progress.borrow_mut())(entries);
        }
        if entries > self.limits.entries {
            return Err(io::Error::other(format!("the image has more than {} entries", self.limits.entries)));
        }
        Ok(())
    }

    fn keep(&self, bytes: usize) -> io::Result<()> {
        self.memory.set(self.memory.get().saturating_add(bytes as u64));
        if self.memory.get() > self.limits.memory {
            let most = self.limits.memory;
            return Err(io::Error::other(format!(
                "what there is to note of its files takes more than {most} bytes"
            )));
        }
        Ok(())
    }

    fn take(&self, bytes: usize) -> io::Result<()> {
        self.bytes.set(self.bytes.get().saturating_add(bytes as u64));
        if self.bytes.get() > self.limits.bytes {
            return Err(io::Error::other(format!(
                "the image unpacks to more than {} bytes",
                self.limits.bytes
            )));
        }
        if self.start.elapsed() > self.limits.time {
            return Err(io::Error::other(format!("it takes more than {} s", self.limits.time.as_secs())));
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "archive/tests.rs"]
mod tests;
