//! What an ELF file says about itself, as far as the loader and a GPU share care: its machine, its loader, the
//! libraries and versions it asks for, those it offers, its CUDA symbols. Only the parts that the dynamic loader
//! would read are read, by `pread` and never by `mmap` (a file that someone truncates meanwhile must not raise
//! SIGBUS), and each is bounded: a file that lies is [`ElfError::Broken`], never a crash or a full memory.
//!
//! It knows nothing of paths, roots or policy.

mod reader;

use std::fs::File;

use goblin::error::Error as GoblinError;
use thiserror::Error;

use super::fatbin::GpuCode;
use reader::Reader;

/// Parts of a file: offset and length in bytes.
pub type Places = Vec<(u64, u64)>;

/// How much of a file is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// What the loader needs to find libraries, with versions: enough to say whether a file can start.
    Linking,
    /// Symbols and section headers instead of versions: enough to say what a file is to a share.
    Symbols,
    /// All of it.
    Whole,
}

/// What an ELF file says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Elf {
    /// `e_machine`, such as 62 for x86-64.
    pub machine: u16,
    /// 32 or 64.
    pub bits: u8,
    /// Byte order.
    pub little_endian: bool,
    /// Path of the loader, for programs that have one.
    pub interpreter: Option<String>,
    /// Whether it has a dynamic section; a program without one, or without a loader, is static.
    pub dynamic: bool,
    /// Whether it is a program: it has a fixed address, a loader, or says that it is a static one (`DF_1_PIE`).
    pub executable: bool,
    /// Name under which the loader knows it.
    pub soname: Option<String>,
    /// Names of the libraries that it needs.
    pub needed: Vec<String>,
    /// `DT_RPATH`, which the loader ignores where there is a `DT_RUNPATH`.
    pub rpath: Option<String>,
    /// `DT_RUNPATH`.
    pub runpath: Option<String>,
    /// Whether all symbols are bound when it is loaded, so that a missing one keeps it from loading.
    pub bind_now: bool,
    /// Versions that it needs, with the library that is to have them.
    pub needs: Vec<(String, String)>,
    /// Versions that it defines.
    pub defines: Vec<String>,
    /// CUDA driver and NVML symbols, and the loader's own doors (`dlopen` and kin), that it imports.
    pub imports: Vec<String>,
    /// CUDA driver, runtime and NVML symbols that it exports, where its name says that it is one of those.
    pub exports: Vec<String>,
    /// Where constant text and data lie in the file, where it can look symbols up by their names.
    pub constants: Places,
    /// For which GPUs it has code.
    pub gpu_code: Option<GpuCode>,
}

/// Why a file's own word cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ElfError {
    /// It does not begin as an ELF file does.
    #[error("no ELF file")]
    NotElf,
    /// It begins as one and then does not hold what it says, or holds more than any honest file.
    #[error("broken ELF file: {0}")]
    Broken(&'static str),
    /// It cannot be read.
    #[error("cannot be read: {0}")]
    Unreadable(String),
}

impl From<GoblinError> for ElfError {
    fn from(error: GoblinError) -> Self {
        match error {
            GoblinError::BadMagic(_) => Self::NotElf,
            _ => Self::Broken("a header or table does not fit the file"),
        }
    }
}

impl Elf {
    /// Reads what `file` says about itself.
    ///
    /// # Errors
    /// See [`ElfError`].
    pub fn read(file: &File, depth: Depth) -> Result<Self, ElfError> {
        Reader::open(file)?.elf(depth)
    }

    /// Whether it runs without a loader, so that nothing can be loaded ahead of it.
    pub fn is_static(&self) -> bool {
        self.executable && self.interpreter.is_none() && (!self.dynamic || self.needed.is_empty())
    }

    /// Whether it can reach the driver without being linked to it.
    pub fn looks_symbols_up(&self) -> bool {
        self.is_static() || self.imports.iter().any(|name| name == "dlsym" || name == "dlvsym")
    }

    /// Whether it may have code for GPUs: it has to do with CUDA, or hides what it has to do with.
    fn may_have_gpu_code(&self) -> bool {
        self.looks_symbols_up() || self.needs_library("libcudart.so") || self.needs_library("libcuda.so")
    }

    /// Whether `name`, in any version, is among the libraries that it needs.
    pub fn needs_library(&self, name: &str) -> bool {
        self.needed.iter().any(|needed| needed.starts_with(name))
    }

    /// Bytes that it takes in memory, about.
    pub fn weight(&self) -> usize {
        let lists = [&self.needed, &self.defines, &self.imports, &self.exports].into_iter().flatten();
        let pairs = self.needs.iter().flat_map(|(library, version)| [library, version]);
        let single = [&self.interpreter, &self.soname, &self.rpath, &self.runpath].into_iter().flatten();
        let texts: usize =
            lists.chain(pairs).chain(single).map(|text| text.len() + size_of::<String>()).sum();
        size_of::<Self>() + texts
    }

    /// The newest `<prefix>a.b` among the versions it defines.
    pub fn newest_defined(&self, prefix: &str) -> Option<Version> {
        self.defines.iter().filter_map(|name| name.strip_prefix(prefix)).filter_map(Version::parse).max()
    }

    /// The newest `<prefix>a.b` among the versions it needs.
    pub fn newest_needed(&self, prefix: &str) -> Option<Version> {
        self.needs.iter().filter_map(|(_, name)| name.strip_prefix(prefix)).filter_map(Version::parse).max()
    }
}

/// A version such as glibc's `2.17`; missing parts are 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub u32, pub u32, pub u32);

impl Version {
    /// Parses `1`, `1.2` or `1.2.3`.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = [0; 3];
        let mut given = text.split('.');
        for (at, part) in given.by_ref().take(3).enumerate() {
            if part.is_empty() || !part.bytes().all(|c| c.is_ascii_digit()) {
                return None;
            }
            parts[at] = part.parse().ok()?;
        }
        given.next().is_none().then_some(Self(parts[0], parts[1], parts[2]))
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.2 {
            0 => write!(f, "{}.{}", self.0, self.1),
            patch => write!(f, "{}.{}.{patch}", self.0, self.1),
        }
    }
}

/// `cuInit`, `nvmlInit_v2`: what a driver library exports.
pub fn is_driver_symbol(name: &[u8]) -> bool {
    let after = |prefix: &[u8]| name.strip_prefix(prefix).and_then(<[u8]>::first);
    after(b"cu").is_some_and(u8::is_ascii_uppercase) || after(b"nvml").is_some_and(u8::is_ascii_uppercase)
}

fn is_runtime_symbol(name: &[u8]) -> bool {
    name.strip_prefix(b"cuda").and_then(<[u8]>::first).is_some_and(u8::is_ascii_uppercase)
}

fn is_loader_door(name: &[u8]) -> bool {
    [&b"dlopen"[..], b"dlmopen", b"dlsym", b"dlvsym"].contains(&name)
}

#[cfg(test)]
#[path = "elf_tests.rs"]
mod tests;
