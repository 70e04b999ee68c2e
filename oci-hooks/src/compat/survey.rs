//! What all files of an image together have that matters to a share: its CUDA runtimes, its own copies of driver
//! libraries, who is linked to them, what no preload can reach. Files are taken one by one, in any order and from
//! anywhere; the judgement comes after, in `judge`.

mod judge;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{
    cuda::{Cuda, Runtime, function, is_libcuda, is_nvml},
    fatbin::GpuCode,
    files::{Facts, Kind},
};
pub use judge::Against;

/// Files of one kind that are kept by name; beyond it they are only counted.
const KEPT: usize = 2_000;

/// Driver functions to which files are linked that are kept, of all files together; beyond it files are counted only.
const KEPT_IMPORTS: usize = 50_000;

/// `PATH_MAX`: no program can name what lies deeper.
const MAX_PATH: usize = 4096;

/// What was found in an image's files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survey {
    /// Regular files.
    pub files: u64,
    /// Programs and libraries among them.
    pub elf: u64,
    /// Bytes of the files that were opened.
    pub bytes: u64,
    runtimes: Few<(PathBuf, Runtime)>,
    libcudas: Few<(PathBuf, u64)>,
    nvmls: Few<(PathBuf, u64)>,
    linked: Few<Linked>,
    statics: Few<PathBuf>,
    direct: Few<PathBuf>,
    namespaces: Few<PathBuf>,
    gpu_code: Few<(PathBuf, GpuCode)>,
    /// Driver functions that are asked for by name, and a file that does.
    asked: BTreeMap<String, PathBuf>,
    broken: Few<(PathBuf, String)>,
    unreadable: Few<(PathBuf, String)>,
}

/// A file that is linked to a driver library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Linked {
    path: PathBuf,
    bind_now: bool,
    imports: Vec<String>,
}

/// A list with a ceiling.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Few<T> {
    kept: Vec<T>,
    count: u64,
}

impl<T> Default for Few<T> {
    fn default() -> Self {
        Self { kept: Vec::new(), count: 0 }
    }
}

impl<T> Few<T> {
    fn push(&mut self, item: T) {
        self.count += 1;
        if self.kept.len() < KEPT {
            self.kept.push(item);
        }
    }
}

impl Survey {
    /// Takes what is known of one file.
    pub fn take(&mut self, path: &Path, facts: &Facts) {
        if path.as_os_str().len() > MAX_PATH {
            let short: PathBuf = path.iter().take(4).collect();
            return self.take_unreadable(&short, "its path is longer than any".into());
        }
        self.files += 1;
        self.bytes += facts.size;
        let here = || path.to_owned();
        let elf = match &facts.kind {
            Kind::Elf(elf, _) => elf,
            Kind::Broken(error) => return self.broken.push((here(), error.to_string())),
            Kind::Script(_) | Kind::Plain | Kind::Special => return,
        };
        self.elf += 1;
        let texts = facts.texts();
        if is_libcuda(elf) {
            return self.libcudas.push((here(), facts.size));
        }
        if is_nvml(elf) {
            return self.nvmls.push((here(), facts.size));
        }
        let runtime = Runtime::of(elf, texts);
        // A runtime asks for dlmopen itself, and leaves it at that.
        let namespaces = runtime.is_none() && elf.imports.iter().any(|name| name == "dlmopen");
        if namespaces && texts.is_some_and(|texts| texts.libcuda) {
            self.namespaces.push(here());
        }
        if let Some(code) = &elf.gpu_code {
            self.gpu_code.push((here(), code.clone()));
        }
        // Only of who opens libcuda: others have such names in tables of their own.
        for name in texts.filter(|texts| texts.libcuda).into_iter().flat_map(|texts| &texts.names) {
            if function(name).is_some() && !self.asked.contains_key(name) {
                self.asked.insert(name.clone(), here());
            }
        }
        if let Some(runtime) = runtime {
            self.runtimes.push((here(), runtime));
        }
        if elf.needs_library("libcuda.so") || elf.needs_library("libnvidia-ml.so") {
            let known = |name: &&String| function(name).is_some() || name.starts_with("nvml");
            let imports: BTreeSet<&String> = elf.imports.iter().filter(known).collect();
            let kept: usize = self.linked.kept.iter().map(|linked| linked.imports.len()).sum();
            if kept + imports.len() <= KEPT_IMPORTS {
                let imports = imports.into_iter().cloned().collect();
                self.linked.push(Linked { path: here(), bind_now: elf.bind_now, imports });
            } else {
                self.linked.count += 1;
            }
        }
        let kernel_driver = texts.is_some_and(|texts| texts.kernel_driver);
        if elf.is_static() && is_program(path) {
            self.statics.push(here());
        }
        if kernel_driver {
            self.direct.push(here());
        }
    }

    /// Takes that there is a file which cannot be a program or library.
    pub fn pass_by(&mut self) {
        self.files += 1;
    }

    /// Takes that a file could not be read.
    pub fn take_unreadable(&mut self, path: &Path, reason: String) {
        self.files += 1;
        self.unreadable.push((path.to_owned(), reason));
    }

    /// Whether every file could be read. One that could not may be another time.
    pub fn is_whole(&self) -> bool {
        self.unreadable.count == 0
    }

    /// Whether the image has anything to do with CUDA.
    pub fn has_cuda(&self) -> bool {
        self.runtimes.count + self.libcudas.count + self.linked.count > 0
    }

    /// CUDA runtimes: where, and the oldest CUDA that each can be of.
    pub fn runtimes(&self) -> impl Iterator<Item = (&Path, Cuda)> {
        self.runtimes.kept.iter().map(|(path, runtime)| (path.as_path(), runtime.cuda))
    }

    /// Files that are linked to the driver or run on it.
    pub fn users(&self) -> impl Iterator<Item = &Path> {
        let runtimes = self.runtimes.kept.iter().map(|(path, _)| path.as_path());
        self.linked.kept.iter().map(|linked| linked.path.as_path()).chain(runtimes)
    }
}

/// Programs are run by their path; what a static library archive or a `.o` holds is not.
fn is_program(path: &Path) -> bool {
    !path.extension().is_some_and(|extension| extension == "so" || extension == "o" || extension == "ko")
}

#[cfg(test)]
#[path = "survey_tests.rs"]
mod tests;
