//! `vcuda-hook`: the OCI hooks of a container with a GPU share. A runtime starts it as root of the host, for a
//! container whose image and annotations anyone may have written; so before all else it lets go of what it has
//! inherited. It prints nothing but one sentence on standard error, and that only when the container must not
//! start: the runtime carries it into the pod's events.

#![deny(unsafe_code)]

use std::{
    ffi::OsString,
    io::{self, Write},
    os::unix::ffi::OsStrExt,
    path::PathBuf,
    process::ExitCode,
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use clap::{Parser, Subcommand, error::ErrorKind};
use oci_hooks::{
    guard::{self, DriverFile, Refusal},
    ldcache, links,
    rootfs::Rootfs,
    state::Container,
};
use rustix::fs::Mode;
use vcuda_config::{Exit, NodeFile, Paths, annotation};

/// A hook takes milliseconds. One that hangs, on a volume whose server is gone, would keep the container in
/// creation without a word to anyone.
const TIME_LIMIT: Duration = Duration::from_secs(30);

/// How often it is looked at the time.
const EACH_LOOK: Duration = Duration::from_millis(500);

/// When the guard began, and the name of its container: it has a limit of its own.
static GUARD: OnceLock<(Instant, String)> = OnceLock::new();

/// What the help says of exit codes.
fn codes() -> String {
    let no = "it must not start, and the one line on standard error says why and what to do";
    Exit::help("the container may go on", no, &[])
}

/// Prepares and guards a container with a GPU share. Started by an OCI runtime as a createContainer hook, as the
/// CDI specification of tencent.com/vcuda says; the container's state (OCI runtime spec) is on standard input.
#[derive(Parser)]
#[command(name = "vcuda-hook", version, verbatim_doc_comment, after_help = codes())]
struct Cli {
    #[command(subcommand)]
    hook: Hook,
}

#[derive(Subcommand)]
enum Hook {
    /// Do all that follows, in this order, in one process.
    CreateContainer(CreateContainer),
    /// Create the symlinks under which programs look for the driver's libraries.
    Links(links::Args),
    /// Make the container's loader find the driver's libraries.
    Ldcache(ldcache::Args),
    /// Mount what holds a container to its GPU share; refuse to start one whose share is not bound or would not be
    /// enforced.
    Guard(GuardArgs),
}

#[derive(clap::Args)]
struct CreateContainer {
    #[command(flatten)]
    links: links::Args,
    #[command(flatten)]
    ldcache: ldcache::Args,
    #[command(flatten)]
    guard: GuardArgs,
}

#[derive(clap::Args)]
struct GuardArgs {
    /// Folder with the inventory and the records of shares, on the host.
    #[arg(long, value_name = "FOLDER")]
    state: PathBuf,
    /// Folder of the installed version, on the host; the shim is in it.
    #[arg(long, value_name = "FOLDER")]
    install: PathBuf,
    /// The node file, for what becomes of images that cannot run under a share.
    #[arg(long, value_name = "FILE", default_value = NodeFile::DEFAULT_PATH)]
    config: PathBuf,
    /// A file or socket of the driver for a container with a share: HOST::PATH, absolute on the host and in the container;
    /// below /usr/local/vcuda it is behind the shim. May be given many times.
    #[arg(long = "driver-file", value_name = "HOST::PATH")]
    driver_files: Vec<DriverFile>,
}

fn main() -> ExitCode {
    if let Err(error) = leave_inheritance() {
        return refuse(&format!("vcuda-hook cannot change to /: {error}"));
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => {
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            say(
                "no hook is named; an OCI runtime starts this program, as the CDI specification says; see --help",
            );
            return Exit::Usage.into();
        }
        Err(error) => {
            // The first paragraph is the sentence, over several lines where it lists something; usage and hints follow.
            let text = error.to_string();
            let paragraph = text.lines().map(str::trim).take_while(|line| !line.is_empty());
            say(&paragraph.collect::<Vec<_>>().join(" "));
            return Exit::Usage.into();
        }
    };
    limit_time();
    match run(cli.hook) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => refuse(&error.to_string()),
    }
}

fn run(hook: Hook) -> anyhow::Result<()> {
    // First what needs no container: runc's word of which it is can be milliseconds late, since its thread that writes it
    // waits for the one that waits for this process (Go's scheduler).
    let file = match &hook {
        Hook::CreateContainer(CreateContainer { guard, .. }) | Hook::Guard(guard) => {
            NodeFile::load_or_default(&guard.config)?
        }
        Hook::Links(_) | Hook::Ldcache(_) => NodeFile::default(),
    };
    let container = Container::read(io::stdin().lock())?;
    let rootfs = container.rootfs()?;
    match hook {
        Hook::CreateContainer(args) => {
            links::run(&args.links, &rootfs)?;
            ldcache::run(&args.ldcache, &rootfs)?;
            guard(args.guard, file, container, &rootfs)
        }
        Hook::Links(args) => Ok(links::run(&args, &rootfs)?),
        Hook::Ldcache(args) => Ok(ldcache::run(&args, &rootfs)?),
        Hook::Guard(args) => guard(args, file, container, &rootfs),
    }
}

fn guard(args: GuardArgs, file: NodeFile, container: Container, rootfs: &Rootfs) -> anyhow::Result<()> {
    let _ = GUARD.set((Instant::now(), container.name()));
    let paths = Paths { state: args.state, install: args.install, run: file.paths.run, ..Paths::default() };
    let container = guard::Container {
        name: container.name(),
        share: container.annotations.get(annotation::SHARE).cloned(),
        id: container.id,
        command: container.command,
        image: container.image,
        mount_label: container.mount_label,
    };
    guard::run(&paths, &file.images, file.memory.floor, &args.driver_files, &container, rootfs)?;
    Ok(())
}

/// Leaves the working directory, which is the container's root (runc, rootfs_linux.go: prepareRootfs), the
/// environment, which may be the image's (CVE-2025-23266), and the runtime's umask. Open files that were
/// inherited need no closing: nothing is executed that they could be passed on to.
fn leave_inheritance() -> io::Result<()> {
    std::env::set_current_dir("/")?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    // A name with '=' in it cannot be removed, nor would any code here ask for it.
    let removable = |name: &OsString| !name.as_bytes().contains(&b'=');
    let names: Vec<_> = std::env::vars_os().map(|(name, _)| name).filter(removable).collect();
    for name in names {
        #[expect(unsafe_code, reason = "the only way to change the environment")]
        // SAFETY: first thing in main; no other thread exists that could read the environment.
        unsafe {
            std::env::remove_var(name);
        }
    }
    Ok(())
}

/// Ends this process when a hook takes too long, from a thread that nothing can keep: what is left behind, in a read
/// that hangs, ends with the process.
fn limit_time() {
    let begun = Instant::now();
    let watch = move || {
        let late = loop {
            thread::sleep(EACH_LOOK);
            match GUARD.get() {
                Some((since, name)) if since.elapsed() >= guard::TIME_LIMIT => {
                    break Refusal::Timeout { name: name.clone() }.to_string();
                }
                _ if begun.elapsed() >= TIME_LIMIT => {
                    break format!(
                        "preparing the container took more than {} s; look at the load, the disks and the volumes of this node, the pod is tried again",
                        TIME_LIMIT.as_secs()
                    );
                }
                _ => {}
            }
        };
        say(&late);
        std::process::exit(Exit::No as i32);
    };
    // Where no thread can be had, the hook runs without a limit: the runtime and kubelet have their own.
    let _ = thread::Builder::new().name("time limit".into()).spawn(watch);
}

fn refuse(sentence: &str) -> ExitCode {
    say(sentence);
    Exit::No.into()
}

/// One line on standard error, whatever is in it. A closed one is no reason to panic.
fn say(sentence: &str) {
    let line: String = sentence.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let _ = writeln!(io::stderr(), "{line}");
}
