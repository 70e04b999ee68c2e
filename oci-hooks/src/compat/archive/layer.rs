//! One layer, read as a stream: what each entry is, with the facts of programs and libraries, which are copied one at a
//! time to a nameless file to be looked at: in memory where they are small, as nearly all are, else in the temporary folder.

use std::{
    borrow::Cow,
    ffi::OsStr,
    fs::File,
    io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use rustix::fs::MemfdFlags;
use ruzstd::decoding::{
    BlockDecodingStrategy, FrameDecoder,
    errors::{FrameDecoderError, ReadFrameHeaderError},
};
use vcuda_config::plain;

use super::{
    super::{
        elf::{Depth, ElfError},
        files::{Facts, Kind, Trouble},
        ldconf,
    },
    Meter,
    index::Part,
};

/// Contents that decide who is loaded are kept whole, up to this.
const MAX_KEPT: u64 = 16 << 20;

/// What the loader reads, whatever folder it lies in: it may be the target of a link.
const KEPT: &[&str] = &["ld.so.cache", "ld.so.preload"];

/// Whether it is of `ldconfig`'s configuration: by the name that any file of it has.
fn is_conf(path: &Path, size: u64) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.ends_with(".conf")
        && size <= ldconf::MAX_BYTES
        && path
            .components()
            .any(|part| part.as_os_str() == "ld.so.conf.d" || part.as_os_str() == "ld.so.conf")
}

/// Enough to tell a script or a program from anything else.
const HEAD_BYTES: u64 = 256;

const PIECE_BYTES: usize = 256 << 10;

/// Programs and libraries up to this size in bytes are looked at in memory.
const IN_MEMORY: u64 = 32 << 20;

/// A program or library; PyTorch's largest have below 2 GiB. It is copied, and nobody's disk is to be filled by it.
const MAX_ELF: u64 = 8 << 30;

/// `PATH_MAX`.
const MAX_NAME: u64 = 4096;

/// Names and extended attributes of one entry.
const MAX_PAX: u64 = 1 << 20;

/// An entry of a layer.
#[derive(Debug)]
pub(super) enum Node {
    Folder,
    /// A file, and its contents where they are kept.
    File(Facts, Option<Vec<u8>>),
    /// A symlink.
    Link(PathBuf),
    /// Another name of a file in this layer or one below.
    Same(PathBuf),
    /// A device or FIFO.
    Special,
}

/// What a layer does, in its order.
#[derive(Debug, Default)]
pub(super) struct Layer {
    /// Names that it removes from the layers below.
    pub whiteouts: Vec<PathBuf>,
    /// Folders of which it hides everything below.
    pub opaque: Vec<PathBuf>,
    pub nodes: Vec<(PathBuf, Node)>,
    /// Entries whose names make no sense.
    pub refused: u64,
}

/// Reads the layer in `part`.
pub(super) fn read(file: &File, part: &Part, meter: &Meter<'_>) -> io::Result<Layer> {
    let mut raw = file;
    raw.seek(SeekFrom::Start(part.offset))?;
    let mut raw = BufReader::with_capacity(PIECE_BYTES, raw.take(part.size));
    let magic = raw.fill_buf()?;
    if magic.starts_with(&[0x1f, 0x8b]) {
        entries(Metered { reader: flate2::read::MultiGzDecoder::new(raw), meter })
    } else if magic.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        entries(Metered { reader: Frames::new(raw), meter })
    } else {
        entries(Metered { reader: raw, meter })
    }
}

/// A reader all of whose bytes are counted.
struct Metered<'a, 'b, R> {
    reader: R,
    meter: &'a Meter<'b>,
}

impl<R: Read> Read for Metered<'_, '_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        self.meter.take(read)?;
        Ok(read)
    }
}

/// All frames of a zstd file one after the other, as `zstd:chunked` layers have them.
struct Frames<R> {
    reader: R,
    decoder: FrameDecoder,
    started: bool,
}

impl<R: BufRead> Frames<R> {
    fn new(reader: R) -> Self {
        Self { reader, decoder: FrameDecoder::new(), started: false }
    }

    /// Starts the next frame that has contents; false at the end.
    fn start(&mut self) -> io::Result<bool> {
        while !self.reader.fill_buf()?.is_empty() {
            match self.decoder.init(&mut self.reader) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    io::copy(&mut (&mut self.reader).take(length.into()), &mut io::sink())?;
                }
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(false)
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.started {
                self.started = self.start()?;
                if !self.started {
                    return Ok(0);
                }
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                self.decoder
                    .decode_blocks(&mut self.reader, BlockDecodingStrategy::UptoBlocks(1))
                    .map_err(io::Error::other)?;
            }
            let read = self.decoder.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            self.started = false;
        }
    }
}

/// The long names of the next entry.
#[derive(Default)]
struct Names {
    path: Option<PathBuf>,
    target: Option<PathBuf>,
    /// It bears an overlay's own mark of a folder that hides what lower layers have in it: an extended attribute, which
    /// runtimes write as they find it.
    opaque: bool,
}

fn entries(reader: Metered<'_, '_, impl Read>) -> io::Result<Layer> {
    let meter = reader.meter;
    let mut layer = Layer::default();
    let mut archive = tar::Archive::new(reader);
    let mut names = Names::default();
    // Raw: the library would take a long name of any length into memory.
    for entry in archive.entries()?.raw(true) {
        let mut entry = entry?;
        meter.entry()?;
        let kind = entry.header().entry_type();
        if kind.is_gnu_longname() {
            names.path = Some(long_name(&mut entry)?);
            continue;
        }
        if kind.is_gnu_longlink() {
            names.target = Some(long_name(&mut entry)?);
            continue;
        }
        if kind.is_pax_local_extensions() {
            pax_names(&mut entry, &mut names)?;
            continue;
        }
        if kind.is_pax_global_extensions() {
            continue;
        }
        let Names { path, target, opaque } = std::mem::take(&mut names);
        let path = plain(&path.map_or_else(|| entry.path().map(Cow::into_owned), Ok)?);
        meter.keep(path.as_os_str().len() + size_of::<(PathBuf, Node)>())?;
        if whiteout(&path, &mut layer) {
            continue;
        }
        let target = match target {
            Some(target) => Some(target),
            None => entry.link_name()?.map(Cow::into_owned),
        };
        if opaque && kind.is_dir() {
            layer.opaque.push(path.clone());
        }
        let node = match target {
            _ if kind.is_dir() => Node::Folder,
            Some(target) if kind.is_symlink() => Node::Link(target),
            Some(target) if kind.is_hard_link() => Node::Same(plain(&target)),
            _ if kind.is_file() || kind.is_contiguous() || kind.is_gnu_sparse() => {
                let mode = entry.header().mode().unwrap_or(0) & 0o7777;
                let size = entry.size();
                let (facts, contents) = file(&mut entry, &path, mode, size)?;
                meter.keep(facts.weight() + contents.as_ref().map_or(0, Vec::len))?;
                Node::File(facts, contents)
            }
            _ => Node::Special,
        };
        layer.nodes.push((path, node));
    }
    Ok(layer)
}

fn long_name(entry: &mut impl Read) -> io::Result<PathBuf> {
    let bytes = bounded(entry, MAX_NAME)?;
    let name = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(OsStr::from_bytes(name).into())
}

/// `path`, `linkpath` and the mark of opaque folders of a pax header: records `<length> <key>=<value>\n` (pax(1)).
fn pax_names(entry: &mut impl Read, names: &mut Names) -> io::Result<()> {
    let bytes = bounded(entry, MAX_PAX)?;
    let mut rest = bytes.as_slice();
    while !rest.is_empty() {
        let bad = || io::Error::other("a pax header in it makes no sense");
        let space = memchr::memchr(b' ', rest).filter(|at| *at < 10).ok_or_else(bad)?;
        let length: usize =
            std::str::from_utf8(&rest[..space]).ok().and_then(|text| text.parse().ok()).ok_or_else(bad)?;
        let record =
            rest.get(space + 1..length).and_then(|record| record.strip_suffix(b"\n")).ok_or_else(bad)?;
        let value =
            |key: &[u8]| record.strip_prefix(key).map(|value| PathBuf::from(OsStr::from_bytes(value)));
        if let Some(path) = value(b"path=").filter(|path| path.as_os_str().len() as u64 <= MAX_NAME) {
            names.path = Some(path);
        }
        if let Some(target) = value(b"linkpath=").filter(|path| path.as_os_str().len() as u64 <= MAX_NAME) {
            names.target = Some(target);
        }
        if value(b"SCHILY.xattr.trusted.overlay.opaque=").is_some_and(|value| value == Path::new("y")) {
            names.opaque = true;
        }
        rest = &rest[length..];
    }
    Ok(())
}

fn bounded(reader: &mut impl Read, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reader.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::other("a name in it is longer than any"));
    }
    Ok(bytes)
}

/// Takes a whiteout (OCI image spec, layer.md), and says whether the entry was one.
fn whiteout(path: &Path, layer: &mut Layer) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    let Some(removed) = name.strip_prefix(".wh.") else { return false };
    let folder = path.parent().unwrap_or(Path::new("/"));
    match removed {
        ".wh..opq" => layer.opaque.push(folder.to_owned()),
        // AUFS' own files, which mean nothing here.
        _ if removed.starts_with(".wh.") => {}
        "" | "." | ".." => layer.refused += 1,
        removed => layer.whiteouts.push(folder.join(removed)),
    }
    true
}

/// A file for `size` bytes that is gone when it is closed.
fn nameless(size: u64) -> io::Result<File> {
    if size > IN_MEMORY {
        return tempfile::tempfile();
    }
    Ok(rustix::fs::memfd_create(c"vcuda-check", MemfdFlags::CLOEXEC)?.into())
}

fn file(reader: &mut impl Read, path: &Path, mode: u32, size: u64) -> io::Result<(Facts, Option<Vec<u8>>)> {
    let mut head = Vec::new();
    reader.take(HEAD_BYTES).read_to_end(&mut head)?;
    if head.starts_with(b"\x7fELF") || head.starts_with(b"#!") {
        if size > MAX_ELF {
            return Err(io::Error::other(format!(
                "{}: a program of more than {MAX_ELF} bytes",
                path.display()
            )));
        }
        let mut copy = nameless(size)?;
        copy.write_all(&head)?;
        if head.starts_with(b"\x7fELF") {
            io::copy(reader, &mut copy)?;
        }
        let facts = Facts::of(&copy, Depth::Whole).unwrap_or_else(|Trouble(reason)| Facts {
            mode,
            size,
            kind: Kind::Broken(ElfError::Unreadable(reason)),
        });
        return Ok((Facts { mode, size, ..facts }, None));
    }
    let kept = path.file_name().and_then(|name| name.to_str()).is_some_and(|name| KEPT.contains(&name));
    let contents = if (kept && size <= MAX_KEPT) || is_conf(path, size) {
        reader.take(MAX_KEPT).read_to_end(&mut head)?;
        Some(head)
    } else {
        None
    };
    Ok((Facts { mode, size, kind: Kind::Plain }, contents))
}
