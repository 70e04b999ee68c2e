//! Where the check reads an image from: a root folder on this machine, or an archive that was read once. One
//! face for both, so that the same judgement is made of the same files however they came.

use std::{
    ffi::OsString,
    fs::File,
    io::Read,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
};

use rustix::io::Errno;
use thiserror::Error;

use super::{
    elf::{Depth, Elf, ElfError},
    text::Texts,
};
use crate::rootfs::{Rootfs, RootfsError};

/// `BINPRM_BUF_SIZE`, binfmts.h: the kernel looks no further for a script's interpreter.
const SCRIPT_LINE_BYTES: usize = 256;

/// Names of a folder that are told.
pub(super) const MAX_NAMES: usize = 4_096;

/// Bytes of a file without section headers that are looked at for texts.
const HEADERLESS_BYTES: u64 = 64 << 20;

/// What a file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Permission bits, with setuid and setgid.
    pub mode: u32,
    /// Bytes.
    pub size: u64,
    /// What it holds.
    pub kind: Kind,
}

/// What a file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A program or library, and its texts where they were asked for and matter.
    Elf(Box<Elf>, Option<Box<Texts>>),
    /// It begins like one and is none.
    Broken(ElfError),
    /// A script: what follows `#!` on its first line.
    Script(String),
    /// Anything else that has contents.
    Plain,
    /// A folder, device, FIFO or socket.
    Special,
}

/// Why something about an image cannot be told.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct Trouble(pub String);

impl From<RootfsError> for Trouble {
    fn from(error: RootfsError) -> Self {
        Self(error.to_string())
    }
}

/// An image's files. Paths are absolute, as in the container; symlinks are followed inside the image only.
pub trait Files {
    /// What `path` is; `None` where there is nothing.
    fn look(&self, path: &Path, depth: Depth) -> Result<Option<Facts>, Trouble>;

    /// The contents of `path`, at most `limit` bytes; `None` where there is nothing.
    fn read(&self, path: &Path, limit: u64) -> Result<Option<Vec<u8>>, Trouble>;

    /// Names in the folder `path`, in any order; none where it is no folder. Of very many some are left out.
    fn list(&self, path: &Path) -> Result<Vec<OsString>, Trouble>;

    /// `path` without a link in it; `None` where there is nothing.
    fn real(&self, path: &Path) -> Result<Option<PathBuf>, Trouble>;
}

impl Facts {
    /// Looks at an open file.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn of(file: &File, depth: Depth) -> Result<Self, Trouble> {
        let trouble = |error: std::io::Error| Trouble(format!("cannot be read: {error}"));
        let metadata = file.metadata().map_err(trouble)?;
        let kind = match Elf::read(file, depth) {
            Ok(elf) => {
                let texts = (depth != Depth::Linking && elf.looks_symbols_up())
                    .then(|| Box::new(Texts::scan(file, &constants(&elf, metadata.len()))));
                Kind::Elf(Box::new(elf), texts)
            }
            Err(ElfError::NotElf) => script(file).map_or(Kind::Plain, Kind::Script),
            Err(error @ ElfError::Broken(_)) => Kind::Broken(error),
            Err(error @ ElfError::Unreadable(_)) => return Err(Trouble(error.to_string())),
        };
        Ok(Self { mode: metadata.mode() & 0o7777, size: metadata.len(), kind })
    }

    /// The ELF file that it is.
    pub fn elf(&self) -> Option<&Elf> {
        if let Kind::Elf(elf, _) = &self.kind { Some(elf) } else { None }
    }

    /// Bytes that they take in memory, about.
    pub fn weight(&self) -> usize {
        let names = self.texts().into_iter().flat_map(|texts| &texts.names);
        let texts: usize = names.map(|name| name.len() + 2 * size_of::<String>()).sum();
        size_of::<Self>() + self.elf().map_or(0, Elf::weight) + texts
    }

    /// The texts that were found in it.
    pub fn texts(&self) -> Option<&Texts> {
        if let Kind::Elf(_, texts) = &self.kind { texts.as_deref() } else { None }
    }
}

fn constants(elf: &Elf, size: u64) -> Vec<(u64, u64)> {
    if elf.constants.is_empty() { vec![(0, size.min(HEADERLESS_BYTES))] } else { elf.constants.clone() }
}

fn script(file: &File) -> Option<String> {
    let mut head = [0; SCRIPT_LINE_BYTES];
    let read = file.read_at(&mut head, 0).ok()?;
    let line = head[..read].strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    Some(String::from_utf8_lossy(line).trim().to_owned())
}

impl Files for Rootfs {
    fn look(&self, path: &Path, depth: Depth) -> Result<Option<Facts>, Trouble> {
        match self.file(path) {
            Ok(Some(file)) => {
                let named = |Trouble(text)| Trouble(format!("{} in the container: {text}", path.display()));
                Facts::of(&file, depth).map(Some).map_err(named)
            }
            Ok(None) => Ok(None),
            // Links in a circle, a name that no file system has: the loader finds nothing either.
            Err(RootfsError::Failed { reason: Errno::LOOP | Errno::NAMETOOLONG, .. }) => Ok(None),
            Err(RootfsError::NotRegular { .. }) => Ok(Some(Facts { mode: 0, size: 0, kind: Kind::Special })),
            Err(error) => Err(error.into()),
        }
    }

    fn read(&self, path: &Path, limit: u64) -> Result<Option<Vec<u8>>, Trouble> {
        Ok(Rootfs::read(self, path, limit)?)
    }

    fn list(&self, path: &Path) -> Result<Vec<OsString>, Trouble> {
        Ok(Rootfs::list(self, path, MAX_NAMES)?)
    }

    fn real(&self, path: &Path) -> Result<Option<PathBuf>, Trouble> {
        Ok(self.resolve(path)?)
    }
}

/// A file of this machine, read as the image's are: the shim, the driver's libraries.
pub fn host_file(path: &Path, depth: Depth) -> Result<Facts, Trouble> {
    let named = |text: String| Trouble(format!("{}: {text}", path.display()));
    let file = File::open(path).map_err(|error| named(error.to_string()))?;
    if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
        return Err(named("no regular file".into()));
    }
    Facts::of(&file, depth).map_err(|Trouble(text)| named(text))
}

/// Reads a file of this machine, at most `limit` bytes.
pub fn host_read(path: &Path, limit: u64) -> Result<Vec<u8>, Trouble> {
    let named = |text: String| Trouble(format!("{}: {text}", path.display()));
    let file = File::open(path).map_err(|error| named(error.to_string()))?;
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|error| named(error.to_string()))?;
    if bytes.len() as u64 > limit {
        return Err(named(format!("larger than {limit} bytes")));
    }
    Ok(bytes)
}

/// `path` below `folder`, whatever it begins with: `folder` itself where it is absolute, as in a container.
pub fn in_folder(folder: &Path, path: &Path) -> PathBuf {
    if path.is_absolute() { path.to_owned() } else { folder.join(path) }
}
