//! What fuzzing runs, and `tests/seeds.rs` with what it began from and what it found: any bytes as each kind of file
//! that an image brings. They are read or refused, in bounded time and memory.

use std::{
    ffi::OsString,
    fs::File,
    io::Write,
    os::{fd::AsRawFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
    time::Duration,
};

use oci_hooks::{
    compat::{
        archive::{self, Limits},
        check::Node,
        cuda::Runtime,
        elf::Depth,
        files::{Facts, Files, Kind, Trouble},
        ldconf,
    },
    ldcache::cache::{Cache, Library},
};
use rustix::fs::{MemfdFlags, memfd_create};

const LIMITS: Limits =
    Limits { entries: 10_000, bytes: 8 << 20, memory: 32 << 20, time: Duration::from_secs(5) };

/// A program or library.
pub fn elf(bytes: &[u8]) {
    let (file, _) = in_memory(&[bytes]);
    for depth in [Depth::Linking, Depth::Symbols, Depth::Whole] {
        let facts = Facts::of(&file, depth).expect("memory can be read");
        if let Kind::Elf(elf, texts) = &facts.kind {
            let _ = Runtime::of(elf, texts.as_deref());
            let _ = (elf.newest_defined("GLIBC_"), elf.newest_needed("GLIBC_"), elf.is_static());
        }
    }
}

/// A loader's cache: what was added is found, also in what is written, and it does not grow past its entries.
pub fn ldcache(bytes: &[u8]) {
    let mut cache = Cache::parse(bytes).unwrap_or_default();
    let ours = [Library { name: c"libcuda.so.1".into(), path: c"/usr/lib64/libcuda.so.1".into() }];
    cache.add(&ours);
    assert!(cache.has(&ours));
    let written = cache.to_bytes();
    // An entry of the old format takes half of what one of the new takes.
    assert!(written.len() <= bytes.len() * 2 + 1024, "{} of {}", written.len(), bytes.len());
    let again = Cache::parse(&written).expect("what we write can be read");
    assert!(again.has(&ours));
    let libc = |cache: &Cache| cache.find(b"libc.so.6").map(<[u8]>::to_vec).collect::<Vec<_>>();
    assert_eq!(libc(&again), libc(&cache));
}

/// An image archive.
pub fn archive(bytes: &[u8]) {
    let (_file, path) = in_memory(&[bytes]);
    if let Ok(seen) = archive::see(&path, LIMITS, &mut |_| {}) {
        let _ = seen.report(&Node::without_shim());
    }
}

/// Two layers in an honest archive, so that what is changed is the layers and not the documents around them. The first
/// two bytes say where the first layer ends.
pub fn layer(bytes: &[u8]) {
    const MANIFEST: &[u8] = br#"[{"Config":"c","Layers":["a","b"]}]"#;
    const CONFIG: &[u8] = br#"{"config":{"Entrypoint":["/bin/app"],"Env":["LD_LIBRARY_PATH=/opt"]}}"#;
    let Some((at, layers)) = bytes.split_first_chunk::<2>() else { return };
    let (first, second) = layers.split_at(usize::from(u16::from_le_bytes(*at)).min(layers.len()));
    let mut parts: Vec<Vec<u8>> = Vec::new();
    for (name, contents) in [("manifest.json", MANIFEST), ("c", CONFIG), ("a", first), ("b", second)] {
        parts.push(header(name, contents.len()));
        let mut padded = contents.to_vec();
        padded.resize(contents.len().next_multiple_of(512), 0);
        parts.push(padded);
    }
    let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
    let (_file, path) = in_memory(&parts);
    let seen =
        archive::see(&path, LIMITS, &mut |_| {}).expect("the archive is honest, whatever its layers are");
    let _ = seen.report(&Node::without_shim());
}

/// `ldconfig`'s configuration: the bytes are its files, each ending with a byte of zero. What they include is always
/// among them.
pub fn ldconf(bytes: &[u8]) {
    let folders = ldconf::folders(&Conf(bytes.split(|byte| *byte == 0).collect()));
    assert!(folders.len() <= 256, "{}", folders.len());
    for folder in folders {
        assert!(
            folder.is_absolute() && !folder.as_os_str().as_bytes().contains(&b'\n'),
            "{}",
            folder.display()
        );
    }
}

/// Files of which any name that is asked for is one.
struct Conf<'a>(Vec<&'a [u8]>);

impl Files for Conf<'_> {
    fn look(&self, _: &Path, _: Depth) -> Result<Option<Facts>, Trouble> {
        Ok(None)
    }

    fn read(&self, path: &Path, limit: u64) -> Result<Option<Vec<u8>>, Trouble> {
        let bytes = path.as_os_str().as_bytes();
        let at = bytes.iter().fold(0, |sum, byte| sum + usize::from(*byte));
        let file = self.0[if path == Path::new(ldconf::CONF) { 0 } else { at % self.0.len() }];
        if file.len() as u64 > limit { Err(Trouble("too large".into())) } else { Ok(Some(file.to_vec())) }
    }

    fn list(&self, _: &Path) -> Result<Vec<OsString>, Trouble> {
        Ok(["a.conf", "b.conf", ".c.conf", "conf"].map(OsString::from).to_vec())
    }

    fn real(&self, path: &Path) -> Result<Option<PathBuf>, Trouble> {
        Ok(Some(path.to_owned()))
    }
}

/// The header of a regular file (POSIX ustar).
fn header(name: &str, size: usize) -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..108].copy_from_slice(b"0000644\0");
    header[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
    header[148..156].fill(b' ');
    header[156] = b'0';
    header[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

/// A file in memory: what is fuzzed reads files, not bytes.
fn in_memory(parts: &[&[u8]]) -> (File, PathBuf) {
    let mut file = File::from(memfd_create("input", MemfdFlags::CLOEXEC).expect("memory"));
    for part in parts {
        file.write_all(part).expect("memory");
    }
    let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
    (file, path)
}
