//! What a container starts, and whether the shim can be with it from the first instruction: the entry point with
//! its scripts followed, its loader, its C library. This is the part of the check that the guard runs at every
//! start, so it looks at single files by their path and never walks the image.
//!
//! Policy on static programs. One alone is no reason to refuse: most are launchers (`tini`, a Go entry point) whose
//! children are dynamic and get the shim through `/etc/ld.so.preload`, and one that opens `libcuda.so.1` finds
//! the shim in its place. Refused is a static program that names the driver's control nodes, since it can talk
//! to the kernel driver past every library, and any program in an image without glibc, where neither the driver's
//! libraries nor the shim can be loaded.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use vcuda_config::plain;

use super::{
    Finding,
    elf::{Depth, Elf, Version},
    files::{Facts, Files, Kind, Trouble, in_folder},
    loader::Loader,
};

/// What the shim asks of an image, told from its own file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shim {
    /// Machine that it is built for (`e_machine`).
    pub machine: u16,
    /// Oldest glibc that has all the versions it needs.
    pub glibc: Version,
}

/// What a container starts: the part of `process` in an OCI `config.json` that matters here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Command {
    /// Program and arguments, as in the OCI config's `process.args`.
    pub args: Vec<String>,
    /// Environment, `NAME=value`.
    pub env: Vec<String>,
    /// Working folder.
    pub cwd: PathBuf,
}

/// Scripts that name scripts: the kernel gives up after five (`exec_binprm`).
const MAX_SCRIPTS: usize = 5;

/// What execvp(3) searches when there is no `PATH`.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Folders of `PATH` that are searched.
const MAX_PATH_FOLDERS: usize = 64;

const S_ISUID: u32 = 0o4000;
const S_ISGID: u32 = 0o2000;

impl Shim {
    /// What the shim, whose file says `elf`, asks of an image.
    pub fn of(elf: &Elf) -> Self {
        Self { machine: elf.machine, glibc: elf.newest_needed("GLIBC_").unwrap_or(Version(2, 0, 0)) }
    }
}

impl Command {
    /// The value of an environment variable; the last one, as most programs see it.
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.env.iter().rev().find_map(|entry| entry.strip_prefix(name)?.strip_prefix('='))
    }
}

/// Says what is wrong with starting `command` from `files` under `shim`; where it starts nothing, with the image's
/// C library alone.
///
/// # Errors
/// A file that decides cannot be read.
pub fn judge<F: Files + ?Sized>(files: &F, command: &Command, shim: Shim) -> Result<Vec<Finding>, Trouble> {
    let mut findings = Vec::new();
    let program = if command.args.is_empty() {
        None
    } else {
        program(files, command)?.map_err(|finding| findings.push(finding)).ok()
    };
    if let Some((path, facts)) = &program {
        judge_program(files, path, facts, shim, &mut findings)?;
    }
    if findings.iter().all(|finding| finding.id != "libc-musl") {
        findings.extend(judge_libc(files, command, shim)?.map(|finding| match (&finding.file, &program) {
            (None, Some((path, _))) => finding.at(path),
            (None, None) => finding.at(Path::new("/")),
            (Some(_), _) => finding,
        }));
    }
    Ok(findings)
}

/// The program that the kernel ends up starting for `command`, without a link in its path.
pub fn started<F: Files + ?Sized>(files: &F, command: &Command) -> Option<PathBuf> {
    let (path, _) = program(files, command).ok()?.ok()?;
    files.real(&path).ok()?
}

fn judge_program<F: Files + ?Sized>(
    files: &F,
    path: &Path,
    facts: &Facts,
    shim: Shim,
    findings: &mut Vec<Finding>,
) -> Result<(), Trouble> {
    let elf = match &facts.kind {
        Kind::Elf(elf, _) => elf,
        Kind::Broken(error) => {
            findings.push(
                Finding::warn(
                    "entry-broken",
                    format!("the program that is started is a {error}"),
                    "the kernel will not start it",
                    "build the image again",
                )
                .at(path),
            );
            return Ok(());
        }
        // The kernel refuses it (ENOEXEC), or a shell reads it as a script: nothing that could reach a GPU itself.
        Kind::Script(_) | Kind::Plain | Kind::Special => return Ok(()),
    };
    if elf.machine != shim.machine || elf.bits != 64 {
        findings.push(
            Finding::refuse(
                "arch-mismatch",
                format!(
                    "the program that is started is for {}, the shim for {}",
                    machine(elf.machine, elf.bits),
                    machine(shim.machine, 64)
                ),
                "a library of another architecture cannot be loaded into it, so it would run unenforced",
                "use the image built for this node's architecture, or ask for whole GPUs (vcuda-core 100)",
            )
            .at(path),
        );
        return Ok(());
    }
    if elf.is_static() {
        // A second look, at its texts, which only this case needs.
        let full = files.look(path, Depth::Symbols)?;
        let direct = full.as_ref().and_then(Facts::texts).is_some_and(|texts| texts.kernel_driver);
        findings.push(if direct {
            Finding::refuse(
                "entry-static-direct",
                "the program that is started is static and names the driver's control nodes",
                "it can use the GPU past every library, so its ceiling would not hold",
                "link it dynamically, or ask for whole GPUs (vcuda-core 100)",
            )
            .at(path)
        } else {
            Finding::warn(
                "entry-static",
                "the program that is started is static",
                "the shim cannot be loaded into it, only into dynamic programs that it starts",
                "nothing, if it only starts others; else link it dynamically",
            )
            .at(path)
        });
    }
    if let Some(interpreter) = &elf.interpreter
        && is_musl(interpreter)
    {
        findings.push(musl(interpreter).at(path));
    }
    if facts.mode & (S_ISUID | S_ISGID) != 0 {
        findings.push(
            Finding::info(
                "entry-setuid",
                "the program that is started is setuid or setgid",
                "its loader ignores LD_PRELOAD; /etc/ld.so.preload still loads the shim",
                "nothing",
            )
            .at(path),
        );
    }
    Ok(())
}

fn judge_libc<F: Files + ?Sized>(
    files: &F,
    command: &Command,
    shim: Shim,
) -> Result<Option<Finding>, Trouble> {
    let loader = Loader::new(files, shim.machine, command.variable("LD_LIBRARY_PATH").unwrap_or_default());
    let Some(found) = loader.find("libc.so.6", None)? else {
        for name in ["ld-musl-x86_64.so.1", "ld-musl-aarch64.so.1"] {
            let path = Path::new("/lib").join(name);
            if files.look(&path, Depth::Linking)?.is_some() {
                return Ok(Some(musl(&path.display().to_string()).at(&path)));
            }
        }
        return Ok(Some(Finding::refuse(
            "libc-none",
            format!("the image has no libc.so.6 for {}", machine(shim.machine, 64)),
            "without glibc neither the driver's libraries nor the shim can be loaded, so no program in it can use a GPU",
            "build the image on one with glibc (Debian, Ubuntu, RHEL, UBI, Wolfi)",
        )));
    };
    let Some(version) = found.facts.elf().and_then(|elf| elf.newest_defined("GLIBC_")) else {
        return Ok(Some(
            Finding::refuse(
                "libc-none",
                "libc.so.6 in the image is no glibc: it defines no GLIBC version",
                "without glibc neither the driver's libraries nor the shim can be loaded",
                "build the image on one with glibc (Debian, Ubuntu, RHEL, UBI, Wolfi)",
            )
            .at(&found.path),
        ));
    };
    if version < shim.glibc {
        return Ok(Some(
            Finding::refuse(
                "libc-too-old",
                format!("the image's glibc goes up to GLIBC_{version}, the shim needs GLIBC_{}", shim.glibc),
                "its loader would refuse the shim, and every program would run unenforced or not at all",
                format!("use an image with glibc {} or newer", shim.glibc),
            )
            .at(&found.path),
        ));
    }
    Ok(None)
}

fn is_musl(interpreter: &str) -> bool {
    interpreter.rsplit('/').next().is_some_and(|name| name.starts_with("ld-musl-"))
}

fn musl(interpreter: &str) -> Finding {
    Finding::refuse(
        "libc-musl",
        format!("the image's C library is musl ({interpreter})"),
        "the driver's libraries and the shim are made for glibc and fail to load under musl",
        "build the image on one with glibc (Debian, Ubuntu, RHEL, UBI, Wolfi)",
    )
}

/// The program that the kernel ends up starting for `command`, scripts followed to their interpreters.
fn program<F: Files + ?Sized>(
    files: &F,
    command: &Command,
) -> Result<Result<(PathBuf, Facts), Finding>, Trouble> {
    let missing = |name: &str| {
        Finding::warn(
            "entry-missing",
            format!("{name:?} is not in the image"),
            "what is started could not be looked at; the runtime will not find it either, unless a volume brings it",
            "check the container's command",
        )
        .at(Path::new(if name.is_empty() { "/" } else { name }))
    };
    let Some(name) = command.args.first() else { return Ok(Err(missing(""))) };
    let mut name = name.clone();
    for _ in 0..=MAX_SCRIPTS {
        let Some((path, facts)) = find_program(files, command, &name)? else {
            return Ok(Err(missing(&name)));
        };
        let Kind::Script(line) = &facts.kind else { return Ok(Ok((path, facts))) };
        match interpreter(line) {
            Some(next) => name = next,
            None => return Ok(Ok((path, facts))),
        }
    }
    Ok(Err(missing(&name)))
}

/// What a script's first line makes the kernel start; through `env`, what that starts.
fn interpreter(line: &str) -> Option<String> {
    let mut words = line.split_ascii_whitespace();
    let program = words.next()?;
    let through_env = program.rsplit('/').next() == Some("env");
    let named = words.find(|word| !word.starts_with('-') && !word.contains('='));
    if through_env && let Some(named) = named { Some(named.to_owned()) } else { Some(program.to_owned()) }
}

fn find_program<F: Files + ?Sized>(
    files: &F,
    command: &Command,
    name: &str,
) -> Result<Option<(PathBuf, Facts)>, Trouble> {
    let look = |path: PathBuf| {
        let path = plain(&path);
        Ok(files
            .look(&path, Depth::Linking)?
            .filter(|facts| facts.kind != Kind::Special)
            .map(|facts| (path, facts)))
    };
    let cwd = in_folder(Path::new("/"), &command.cwd);
    if name.contains('/') {
        return look(cwd.join(name));
    }
    let path = command.variable("PATH").unwrap_or(DEFAULT_PATH);
    for folder in path.split(':').take(MAX_PATH_FOLDERS) {
        if let Some(found) = look(cwd.join(folder).join(name))?
            && found.1.mode & 0o111 != 0
        {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// A machine's usual name.
pub fn machine(machine: u16, bits: u8) -> String {
    use goblin::elf::header::{EM_386, EM_AARCH64, EM_ARM, EM_X86_64};
    match (machine, bits) {
        (EM_X86_64, 64) => "x86-64".into(),
        (EM_X86_64, _) => "x32".into(),
        (EM_386, _) => "32-bit x86".into(),
        (EM_AARCH64, _) => "arm64".into(),
        (EM_ARM, _) => "32-bit arm".into(),
        (other, bits) => format!("machine {other} ({bits} bit)"),
    }
}

#[cfg(test)]
#[path = "start_tests.rs"]
mod tests;
