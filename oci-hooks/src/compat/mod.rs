//! The compatibility check: whether what is in an image can run under the shim, said before it starts. It reads
//! the files themselves, in a container's root or an archive, and executes nothing. The guard asks it at every
//! start; `vcuda-check` asks it more, at leisure.
//!
//! It must not know about shares, NRI or kubelet: it is told the shim, the driver and what is to be started.

pub mod archive;
pub mod check;
pub mod cuda;
pub mod elf;
#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "test files are small")]
pub(crate) mod elf_maker;
pub mod fatbin;
pub mod files;
#[cfg(test)]
mod hostile_tests;
pub mod ldconf;
pub mod loader;
pub mod start;
pub mod survey;
pub mod text;

use std::{
    borrow::Cow,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Good to know.
    Info,
    /// May surprise; a share still holds.
    Warn,
    /// It would die, or run unenforced.
    Refuse,
}

/// Something that the check has to say about an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Stable name for scripts and dashboards, such as `libc-musl`.
    pub id: Cow<'static, str>,
    /// How bad it is.
    pub severity: Severity,
    /// What was found.
    pub what: String,
    /// In which file or folder, as the container sees it, or the node where it is about that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// Why it matters.
    pub why: Cow<'static, str>,
    /// What to do about it.
    pub remedy: String,
}

impl Finding {
    pub(crate) fn new(
        severity: Severity,
        id: &'static str,
        what: impl Into<String>,
        why: &'static str,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            id: id.into(),
            severity,
            what: what.into(),
            file: None,
            why: why.into(),
            remedy: remedy.into(),
        }
    }

    pub(crate) fn refuse(
        id: &'static str,
        what: impl Into<String>,
        why: &'static str,
        remedy: impl Into<String>,
    ) -> Self {
        Self::new(Severity::Refuse, id, what, why, remedy)
    }

    pub(crate) fn warn(
        id: &'static str,
        what: impl Into<String>,
        why: &'static str,
        remedy: impl Into<String>,
    ) -> Self {
        Self::new(Severity::Warn, id, what, why, remedy)
    }

    pub(crate) fn info(
        id: &'static str,
        what: impl Into<String>,
        why: &'static str,
        remedy: impl Into<String>,
    ) -> Self {
        Self::new(Severity::Info, id, what, why, remedy)
    }

    /// Its stable name, where it was found just now and is none from memory.
    #[cfg(test)]
    pub(crate) fn name(&self) -> &'static str {
        match &self.id {
            Cow::Borrowed(id) => id,
            Cow::Owned(id) => panic!("{id} is from memory"),
        }
    }

    pub(crate) fn at(mut self, file: &Path) -> Self {
        self.file = Some(file.to_owned());
        self
    }

    /// One sentence: thing and where it is, reason, remedy.
    pub fn sentence(&self) -> String {
        let file = self.file.as_deref().map(|file| file.display().to_string());
        // Many a thing is named by its file, and what is about the whole image by none.
        let file = file.filter(|file| file != "/" && !self.what.contains(file.as_str()));
        let file = file.map(|file| format!(" ({file})")).unwrap_or_default();
        format!("{}{file}; {} [{}]; {}", self.what, self.why, self.id, self.remedy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_says_where_a_thing_is_once() {
        let of =
            |what: &str, file: &str| Finding::warn("an-id", what, "why", "do").at(Path::new(file)).sentence();
        assert_eq!(of("it is broken", "/lib/x.so"), "it is broken (/lib/x.so); why [an-id]; do");
        assert_eq!(of("/lib/x.so is broken", "/lib/x.so"), "/lib/x.so is broken; why [an-id]; do");
        assert_eq!(of("there is none", "/"), "there is none; why [an-id]; do");
    }
}
