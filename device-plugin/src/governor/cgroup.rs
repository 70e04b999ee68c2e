//! From a process to its container: by the cgroup that the kernel says it is in, version 1 or 2, by whatever driver
//! the runtime names them. A process cannot choose the name of a cgroup outside its container, so who asks must know that
//! container, whether or not it wants to hear of it: the outermost that is known is taken.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read},
    path::PathBuf,
};

/// The file has a line for each hierarchy, of which version 1 has a dozen, with a path that Linux bounds at 4096 bytes.
const MAX_BYTES: u64 = 64 << 10;

/// Finds containers by process, and remembers those of a tick for the next: a process that has ended is still in the
/// driver's figures.
#[derive(Debug)]
pub struct Cgroups {
    proc: PathBuf,
    known: HashMap<u32, String>,
    before: HashMap<u32, String>,
}

impl Cgroups {
    /// Looks below `proc`, which is `/proc` where the node's processes are seen.
    pub fn new(proc: PathBuf) -> Self {
        Self { proc, known: HashMap::new(), before: HashMap::new() }
    }

    /// Begins a tick.
    pub fn tick(&mut self) {
        self.before = std::mem::take(&mut self.known);
    }

    /// ID of the container of process `pid`, if it is one that `is_ours` knows.
    pub fn container(&mut self, pid: u32, is_ours: impl Fn(&str) -> bool) -> Option<&str> {
        let id = match self.read(pid) {
            Ok(text) => container(&text, is_ours)?.to_owned(),
            Err(_) => self.before.get(&pid)?.clone(),
        };
        Some(self.known.entry(pid).insert_entry(id).into_mut())
    }

    fn read(&self, pid: u32) -> io::Result<String> {
        let mut text = String::new();
        File::open(self.proc.join(pid.to_string()).join("cgroup"))?
            .take(MAX_BYTES)
            .read_to_string(&mut text)?;
        Ok(text)
    }
}

/// The container in the text of a `/proc/<pid>/cgroup`, if it is one that `is_ours` knows.
///
/// Lines read `hierarchy:controllers:path` (cgroups(7)). On the way down the path one folder is the container's: its ID
/// alone (driver cgroupfs), or `<prefix>-<ID>.scope` (driver systemd), or with `:` before the ID.
fn container(text: &str, is_ours: impl Fn(&str) -> bool) -> Option<&str> {
    let folders = text.lines().filter_map(|line| line.splitn(3, ':').nth(2)).flat_map(|path| path.split('/'));
    let id = |folder: &'_ str| -> usize {
        let name = folder.strip_suffix(".scope").unwrap_or(folder);
        name.len() - name.rsplit(['-', ':']).next().unwrap_or(name).len()
    };
    for folder in folders {
        let name = folder.strip_suffix(".scope").unwrap_or(folder);
        for candidate in [name, &name[id(folder)..]] {
            if !candidate.is_empty() && is_ours(candidate) {
                return Some(candidate);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    const ID: &str = "5f1d0c6c3f2e4a5b8c7d9e0f1a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d";

    fn ours(text: &str) -> Option<&str> {
        container(text, |id| id == ID)
    }

    #[test]
    fn both_versions_and_both_drivers_are_understood() {
        for path in [
            format!("0::/kubepods.slice/kubepods-pod7f.slice/cri-containerd-{ID}.scope"),
            format!("0::/kubepods/burstable/pod7f3c/{ID}"),
            format!("0::/../../kubepods-pod7f.slice/cri-containerd-{ID}.scope/made/by/itself"),
            format!("12:devices:/kubepods/pod7f/{ID}\n11:memory:/kubepods/pod7f/{ID}\n1:name=systemd:/x"),
            format!(
                "3:cpu,cpuacct:/system.slice/containerd.service/kubepods-pod7f.slice:cri-containerd:{ID}"
            ),
            format!("0::/k8s.io/{ID}"),
        ] {
            assert_eq!(ours(&path), Some(ID), "{path}");
        }
    }

    #[test]
    fn others_are_not_ours() {
        for path in
            ["", "0::/", "0::/system.slice/sshd.service", "nonsense", "0::/kubepods/pod1/0123456789abcdef"]
        {
            assert_eq!(ours(path), None, "{path}");
        }
        assert_eq!(ours(&format!("0::/kubepods/pod7f/x{ID}")), None);
        assert_eq!(ours(&format!("5:{ID}:/")), None, "only the path counts");
    }

    #[test]
    fn one_that_has_ended_is_known_for_one_more_tick() {
        let proc = tempfile::tempdir().unwrap();
        let folder = proc.path().join("12");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("cgroup"), format!("0::/k8s.io/{ID}\n")).unwrap();
        let mut cgroups = Cgroups::new(proc.path().into());
        let mut look = |tick: bool| {
            if tick {
                cgroups.tick();
            }
            cgroups.container(12, |id| id == ID).map(str::to_owned)
        };
        assert_eq!(look(true).as_deref(), Some(ID));
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(look(true).as_deref(), Some(ID));
        look(true);
        assert_eq!(look(true).as_deref(), Some(ID), "as long as it is asked for");
    }

    #[test]
    fn a_number_that_is_used_again_is_another_process() {
        let proc = tempfile::tempdir().unwrap();
        fs::create_dir(proc.path().join("12")).unwrap();
        let write = |path: &str| fs::write(proc.path().join("12/cgroup"), path).unwrap();
        let mut cgroups = Cgroups::new(proc.path().into());
        write(&format!("0::/k8s.io/{ID}"));
        assert!(cgroups.container(12, |id| id == ID).is_some());
        cgroups.tick();
        write("0::/system.slice");
        assert_eq!(cgroups.container(12, |id| id == ID), None);
    }

    proptest! {
        #[test]
        fn any_text_is_looked_through(text in "\\PC{0,300}") {
            prop_assert_eq!(ours(&text), None);
        }
    }
}
