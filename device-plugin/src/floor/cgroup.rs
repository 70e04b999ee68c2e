//! Where a container's cgroup of version 2 is: by a process in it, or by the container's ID. The last part of its path
//! holds that ID with every runtime and cgroup driver (`<id>`, `cri-containerd-<id>.scope`), so a process that is
//! elsewhere, as a hook would be that a runtime does not run in the container's cgroup, is never taken for it.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// How deep below the top containers are: kubepods, class, pod, container, and what a nested kubelet adds.
const DEPTH_MAX: usize = 8;

/// Cgroups that are looked at in a search. A node has a few thousand at most.
const SEARCH_MAX: usize = 50_000;

/// The folder of the cgroup of the container `id`, which process `pid` is in.
///
/// # Errors
///
/// Why it is not known, and what would help.
pub(super) fn of_process(pid: i32, id: &str) -> Result<PathBuf, String> {
    let file = format!("/proc/{pid}/cgroup");
    let text = fs::read_to_string(&file)
        .map_err(|error| format!("{file}: {error}; vcuda-device-plugin needs the host's process IDs"))?;
    let path = of_version_2(&text).ok_or("this node has no cgroup version 2; boot it with one")?;
    let within = cut_at(path, id)?;
    Ok(top()?.join(within))
}

/// The folder of the cgroup of the container `id`, found by its name; none where there is none.
pub(super) fn of_container(id: &str) -> Result<Option<PathBuf>, String> {
    Ok(search(&top()?, id))
}

/// The path of a process's cgroup, version 2, below the top: from the line `0::/…` of proc_pid_cgroup(5).
fn of_version_2(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("0::/"))
}

/// The part of `path` up to the container's own cgroup.
fn cut_at(path: &str, id: &str) -> Result<PathBuf, String> {
    if path.split('/').any(|part| part == "..") {
        return Err(
            "vcuda-device-plugin is in a cgroup namespace of its own; run it in the host's, as its manifests do"
                .into(),
        );
    }
    let mut within = PathBuf::new();
    for part in path.split('/') {
        within.push(part);
        if is_of(part, id) {
            return Ok(within);
        }
    }
    Err(format!("the process that asks is in the cgroup /{path}, which is not that of container {id}"))
}

/// Whether a cgroup of this name is the container's. IDs are 64 hexadecimal digits, so no other has it by chance.
fn is_of(name: &str, id: &str) -> bool {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    !id.is_empty() && name.strip_suffix(id).is_some_and(|before| before.is_empty() || before.ends_with('-'))
}

/// Where the whole tree of version 2 is mounted.
fn top() -> Result<PathBuf, String> {
    let file = "/proc/self/mountinfo";
    let mounts = fs::read_to_string(file).map_err(|error: io::Error| format!("{file}: {error}"))?;
    mounted(&mounts).ok_or_else(|| "cgroup version 2 is not mounted; boot this node with it".into())
}

/// proc_pid_mountinfo(5): ID, parent, device, root, mount point, options, optional fields up to "-", type.
fn mounted(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        (root == "/" && kind.starts_with("cgroup2 ")).then(|| Path::new(point).to_path_buf())
    })
}

fn search(top: &Path, id: &str) -> Option<PathBuf> {
    let mut level = vec![top.to_path_buf()];
    let mut looked_at = 0;
    for _ in 0..DEPTH_MAX {
        let mut below = Vec::new();
        for folder in level {
            // One that is gone by now held nothing.
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    continue;
                }
                if entry.file_name().to_str().is_some_and(|name| is_of(name, id)) {
                    return Some(entry.path());
                }
                looked_at += 1;
                if looked_at > SEARCH_MAX {
                    return None;
                }
                below.push(entry.path());
            }
        }
        level = below;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "c0ffee";

    #[test]
    fn a_containers_cgroup_is_found_under_every_driver_and_nothing_else_is_taken_for_it() {
        for (path, expected) in [
            ("kubepods/burstable/pod1/c0ffee", Some("kubepods/burstable/pod1/c0ffee")),
            (
                "kubepods.slice/pod1.slice/cri-containerd-c0ffee.scope",
                Some("kubepods.slice/pod1.slice/cri-containerd-c0ffee.scope"),
            ),
            // A process that the container has moved into a cgroup of its own.
            ("kubepods/pod1/c0ffee/init", Some("kubepods/pod1/c0ffee")),
            ("system.slice/containerd.service", None),
            ("kubepods/pod1/xc0ffee", None),
            ("kubepods/pod1/c0ffee2", None),
            ("../../kubepods/pod1/c0ffee", None),
            ("", None),
        ] {
            assert_eq!(cut_at(path, ID).ok(), expected.map(PathBuf::from), "{path}");
        }
        assert!(cut_at("anything", "").is_err());
    }

    #[test]
    fn the_line_of_version_2_is_read_on_both_kinds_of_nodes() {
        assert_eq!(of_version_2("0::/a/b\n"), Some("a/b"));
        assert_eq!(of_version_2("12:memory:/x\n1:name=systemd:/y\n0::/a\n"), Some("a"));
        assert_eq!(of_version_2("12:memory:/x\n"), None);
        let mounts = "24 1 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                      25 24 0:23 /part /elsewhere rw shared:3 - cgroup2 cgroup2 rw\n\
                      26 24 0:23 / /sys/fs/cgroup/unified rw shared:3 - cgroup2 cgroup2 rw\n";
        assert_eq!(mounted(mounts), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(mounted(&mounts[..60]), None);
    }

    #[test]
    fn a_search_finds_the_container_and_ends() {
        let top = tempfile::tempdir().unwrap();
        let there = top.path().join("kubepods/pod1/cri-containerd-c0ffee.scope");
        fs::create_dir_all(&there).unwrap();
        fs::create_dir_all(top.path().join("1/2/3/4/5/6/7/8/9/c0ffee2")).unwrap();
        assert_eq!(search(top.path(), ID), Some(there));
        assert_eq!(search(top.path(), "c0ffee2"), None, "too deep for a container");
        assert_eq!(search(&top.path().join("gone"), ID), None);
    }
}
