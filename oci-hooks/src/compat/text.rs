//! Texts in a program's constants: the names of libraries that it opens, of driver functions that it asks for,
//! of device nodes that it opens itself. A CUDA runtime that was linked into a program statically shows only
//! here. Read in pieces, with a ceiling; it knows nothing of ELF.

use std::{collections::BTreeSet, fs::File, os::unix::fs::FileExt};

use memchr::memmem;
use rustix::fs::{Advice, fadvise};

use super::elf::is_driver_symbol;

/// Bytes of constants that are looked at in one file; cuBLASLt's, the largest seen, have 48 MiB.
const MAX_BYTES: u64 = 64 << 20;

/// Small enough to stay in a processor's cache between the kernel's copy and the search.
const PIECE_BYTES: usize = 64 << 10;

/// No text that is looked for is longer, so pieces overlap by this much.
const MAX_TEXT: usize = 80;

/// Names kept of one file; a runtime asks for about 500.
const MAX_NAMES: usize = 4096;

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Texts {
    /// `libcuda.so`, in any version: it opens the driver's library by itself.
    pub libcuda: bool,
    /// `libnvidia-ml.so`.
    pub nvml: bool,
    /// `/dev/nvidiactl` or `/dev/nvidia-uvm`: it may talk to the kernel driver past every library.
    pub kernel_driver: bool,
    /// Names of driver functions (`cuMemAlloc`, `nvmlInit`), each a text of its own.
    pub names: BTreeSet<String>,
    /// Whether there were more constants than are looked at.
    pub cut: bool,
}

impl Texts {
    /// Looks through the `places` (offset and length in bytes) of `file`. What cannot be read counts as cut.
    pub fn scan(file: &File, places: &[(u64, u64)]) -> Self {
        let _ = fadvise(file, 0, None, Advice::Sequential);
        let mut texts = Self::default();
        let finders = Finders::new();
        let mut piece = vec![0; PIECE_BYTES];
        let mut budget = MAX_BYTES;
        for (start, length) in places {
            let mut at = *start;
            let end = start.saturating_add((*length).min(budget));
            texts.cut |= *length > budget;
            budget -= (*length).min(budget);
            while at < end {
                let wanted = PIECE_BYTES.min(usize::try_from(end - at).unwrap_or(PIECE_BYTES));
                let read = match file.read_at(&mut piece[..wanted], at) {
                    Ok(0) => break,
                    Ok(read) => read,
                    Err(_) => {
                        texts.cut = true;
                        break;
                    }
                };
                texts.take(&finders, &piece[..read]);
                if read == wanted && wanted < PIECE_BYTES || read <= MAX_TEXT {
                    break;
                }
                at += (read - MAX_TEXT) as u64;
            }
        }
        texts
    }

    fn take(&mut self, finders: &Finders, bytes: &[u8]) {
        self.libcuda = self.libcuda || finders.libcuda.find(bytes).is_some();
        self.nvml = self.nvml || finders.nvml.find(bytes).is_some();
        self.kernel_driver = self.kernel_driver
            || finders.nodes.find_iter(bytes).any(|at| {
                let rest = &bytes[at + NODES.len()..];
                rest.starts_with(b"ctl\0") || rest.starts_with(b"-uvm\0")
            });
        for finder in [&finders.cuda_names, &finders.nvml_names] {
            for at in finder.find_iter(bytes) {
                let text = &bytes[at + 1..bytes.len().min(at + 1 + MAX_TEXT)];
                let Some(end) = memchr::memchr(0, text) else { continue };
                let name = &text[..end];
                if self.names.len() < MAX_NAMES
                    && is_driver_symbol(name)
                    && name.iter().all(|c| c.is_ascii_alphanumeric() || *c == b'_')
                {
                    self.names.insert(String::from_utf8_lossy(name).into_owned());
                }
            }
        }
    }
}

const NODES: &[u8] = b"/dev/nvidia";

struct Finders {
    libcuda: memmem::Finder<'static>,
    nvml: memmem::Finder<'static>,
    nodes: memmem::Finder<'static>,
    cuda_names: memmem::Finder<'static>,
    nvml_names: memmem::Finder<'static>,
}

impl Finders {
    fn new() -> Self {
        Self {
            libcuda: memmem::Finder::new(b"libcuda.so"),
            nvml: memmem::Finder::new(b"libnvidia-ml.so"),
            nodes: memmem::Finder::new(NODES),
            cuda_names: memmem::Finder::new(b"\0cu"),
            nvml_names: memmem::Finder::new(b"\0nvml"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    #[test]
    fn texts_are_found_wherever_pieces_meet() {
        let text = b"\0cuMemAlloc\0libcuda.so.1\0/dev/nvidiactl\0cublasCreate\0cux\0";
        for before in [0, 1, PIECE_BYTES - 60, PIECE_BYTES - 5, PIECE_BYTES, 2 * PIECE_BYTES - MAX_TEXT - 3] {
            let bytes = [&vec![b'.'; before], &text[..]].concat();
            let texts = Texts::scan(&file(&bytes), &[(0, bytes.len() as u64)]);
            assert_eq!(texts.names.iter().collect::<Vec<_>>(), ["cuMemAlloc"], "after {before} bytes");
            assert!(texts.libcuda && texts.kernel_driver && !texts.nvml && !texts.cut);
        }
    }

    #[test]
    fn only_the_places_named_are_looked_at() {
        let file = file(b"\0cuInit\0\0\0\0\0\0\0\0cuMemFree\0");
        assert_eq!(Texts::scan(&file, &[(0, 8)]).names.len(), 1);
        assert_eq!(Texts::scan(&file, &[(0, 8), (10, 16)]).names.len(), 2);
        // A place past the end is an empty one.
        assert_eq!(Texts::scan(&file, &[(1 << 40, 8), (0, u64::MAX)]).names.len(), 2);
    }

    #[test]
    fn a_device_node_of_a_gpu_alone_says_nothing() {
        assert!(!Texts::scan(&file(b"/dev/nvidia0\0/dev/nvidia%d\0"), &[(0, 100)]).kernel_driver);
        assert!(Texts::scan(&file(b"x/dev/nvidia-uvm\0"), &[(0, 100)]).kernel_driver);
    }
}
