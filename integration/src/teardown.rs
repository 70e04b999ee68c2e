//! Takes down whatever a node of ours left behind, knowing nothing but its folder: processes, containers, mounts,
//! cgroups, files. It works after a panic and after a kill -9 of the test, and it touches nothing of the system's.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    mount::{UnmountFlags, unmount},
    process::{Pid, Signal, kill_process, test_kill_process},
};

use crate::mountinfo::mount_point;

/// Folders of nodes are `/tmp/vcuda-node-<pid of the test>-<number>`; sockets below them stay short of the 108
/// bytes that a Unix socket's path may have.
pub const FOLDER_PREFIX: &str = "vcuda-node-";

/// Where shims and runc keep their sockets and states, whichever containerd they serve.
pub const RUN: &str = "/run/containerd";

/// File in a node's folder: what was missing of [`RUN`] before it came, a path a line, innermost first.
const MISSING: &str = "missing";

/// How long killed processes may take to be gone.
const DEATH_TIMEOUT: Duration = Duration::from_secs(10);

/// Notes in a node's `folder` what there is not yet of `run`, so that it goes with the node.
///
/// # Errors
/// The note cannot be written.
pub fn note_what_is_missing(folder: &Path, run: &Path) -> io::Result<()> {
    let parts = ["s", "runc/k8s.io", "runc", ""].map(|part| run.join(part));
    let missing = parts.iter().filter(|part| !part.exists());
    let lines: String = missing.map(|part| format!("{}\n", part.display())).collect();
    fs::write(folder.join(MISSING), lines)
}

/// Takes down the node in `folder`.
pub fn node(folder: &Path) {
    let Some(name) = folder.file_name().and_then(|name| name.to_str()) else { return };
    // containerd first, so that it does not tidy up against us; then the containers, then their shims.
    kill(|| processes_naming(folder, "containerd"));
    let groups = cgroups(name);
    kill(|| groups.iter().flat_map(|group| members(group)).collect());
    kill(|| processes_naming(folder, ""));
    remove_shim_sockets(folder);
    // Only what is empty: another containerd may have come to use it.
    for made in fs::read_to_string(folder.join(MISSING)).unwrap_or_default().lines() {
        let _ = fs::remove_dir(made);
    }
    for point in mounts_below(folder) {
        let _ = unmount(&point, UnmountFlags::DETACH);
    }
    for group in groups {
        remove_group(&group);
    }
    if let Err(error) = fs::remove_dir_all(folder)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!("{}: {error}; remove it by hand", folder.display());
    }
}

/// Takes down nodes whose test no longer runs.
pub fn stale() {
    let Ok(entries) = fs::read_dir(std::env::temp_dir()) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let owner = name
            .to_str()
            .and_then(|name| name.strip_prefix(FOLDER_PREFIX))
            .and_then(|rest| rest.split('-').next())
            .and_then(|pid| Pid::from_raw(pid.parse().ok()?));
        if owner.is_some_and(|pid| test_kill_process(pid).is_err()) {
            node(&entry.path());
        }
    }
}

/// Kills what `find` finds until it finds nothing.
fn kill(find: impl Fn() -> Vec<Pid>) {
    let deadline = Instant::now() + DEATH_TIMEOUT;
    loop {
        let found = find();
        if found.is_empty() || Instant::now() > deadline {
            return;
        }
        for pid in found {
            let _ = kill_process(pid, Signal::KILL);
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Processes whose command line names something in `folder`, and whose program is called `program` (any when
/// empty). Dead ones that nobody has reaped have no command line.
fn processes_naming(folder: &Path, program: &str) -> Vec<Pid> {
    let needle = format!("{}/", folder.display());
    let own = std::process::id();
    let Ok(entries) = fs::read_dir("/proc") else { return vec![] };
    let mut found = vec![];
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        if u32::try_from(pid) == Ok(own) {
            continue;
        }
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let words: Vec<_> = line.split(|&c| c == 0).map(String::from_utf8_lossy).collect();
        let called = words.first().and_then(|word| word.rsplit('/').next()).unwrap_or_default();
        if words.iter().any(|word| word.contains(&needle)) && (program.is_empty() || called == program) {
            found.extend(Pid::from_raw(pid));
        }
    }
    found
}

/// The node's cgroup in every hierarchy: `/sys/fs/cgroup/<name>` on version 2, one a controller on version 1.
fn cgroups(name: &str) -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let hierarchies = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    std::iter::once(root.to_owned())
        .chain(hierarchies)
        .map(|hierarchy| hierarchy.join(name))
        .filter(|group| group.is_dir())
        .collect()
}

fn members(group: &Path) -> Vec<Pid> {
    let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    let mut found: Vec<_> = text.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)).collect();
    for child in subgroups(group) {
        found.extend(members(&child));
    }
    found
}

fn subgroups(group: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(group).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

fn remove_group(group: &Path) {
    for child in subgroups(group) {
        remove_group(&child);
    }
    let _ = fs::remove_dir(group);
}

/// Mount points below `folder`, innermost first.
fn mounts_below(folder: &Path) -> Vec<PathBuf> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = text.lines().filter_map(mount_point).map(PathBuf::from);
    let mut below: Vec<_> = points.filter(|point| point.starts_with(folder)).collect();
    below.reverse();
    below
}

/// A killed shim leaves its socket in containerd's global run folder; its address is in the task's folder.
fn remove_shim_sockets(folder: &Path) {
    let tasks = folder.join("state/io.containerd.runtime.v2.task/k8s.io");
    for task in fs::read_dir(tasks).into_iter().flatten().flatten() {
        for file in ["address", "bootstrap.json"] {
            let text = fs::read_to_string(task.path().join(file)).unwrap_or_default();
            if let Some((_, rest)) = text.split_once("unix://") {
                let socket = rest.split(['"', '\n']).next().unwrap_or_default();
                let _ = fs::remove_file(socket);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_takes_along_what_it_made_of_the_run_folder_and_nothing_else() {
        let all = tempfile::tempdir().unwrap();
        let (run, folder) = (all.path().join("run"), all.path().join("vcuda-node-0-1"));
        fs::create_dir(&folder).unwrap();
        note_what_is_missing(&folder, &run).unwrap();
        for made in ["s", "runc/k8s.io"] {
            fs::create_dir_all(run.join(made)).unwrap();
        }
        node(&folder);
        assert!(!run.exists() && !folder.exists());

        // The system's own, and what another containerd has come to use.
        fs::create_dir_all(run.join("s")).unwrap();
        fs::create_dir(&folder).unwrap();
        note_what_is_missing(&folder, &run).unwrap();
        fs::create_dir_all(run.join("runc/k8s.io/of-another")).unwrap();
        node(&folder);
        assert!(run.join("s").exists() && run.join("runc/k8s.io/of-another").exists());
    }
}
