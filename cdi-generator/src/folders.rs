//! All specification files of a node, put together as a runtime does it (`pkg/cdi/cache.go`): which devices a
//! container can ask for, and what takes others away.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::{file, rules, spec::Spec};

/// What the folders hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Registry {
    /// Devices that a container can ask for, by their full names.
    pub devices: BTreeMap<String, Entry>,
    /// Full names that two files of one folder define: runtimes then know no device of that name at all.
    pub conflicts: BTreeMap<String, BTreeSet<PathBuf>>,
    /// Files that runtimes leave out, with all that is wrong with each.
    pub broken: BTreeMap<PathBuf, Vec<String>>,
}

/// A device and where it is from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// The file that defines it.
    pub file: PathBuf,
    /// Files of earlier folders that define it too, and do not count.
    pub hidden: Vec<PathBuf>,
    /// Device nodes that a container gets for it, with the file's global ones.
    pub device_nodes: usize,
    /// Mounts, likewise.
    pub mounts: usize,
    /// Hooks, likewise.
    pub hooks: usize,
}

impl Registry {
    /// Reads the files of `folders`, of which later ones win. A folder that does not exist is an empty one.
    ///
    /// # Errors
    /// A folder cannot be listed.
    pub fn read(folders: &[PathBuf]) -> io::Result<Self> {
        let mut registry = Self::default();
        for folder in folders {
            let mut seen = BTreeMap::<String, PathBuf>::new();
            for path in spec_files(folder)? {
                match sound(&path) {
                    Ok(spec) => registry.add(&spec, &path, &mut seen),
                    Err(reasons) => {
                        registry.broken.insert(path, reasons);
                    }
                }
            }
        }
        // A conflict in any folder takes the name away, even where a later folder defines it.
        let conflicts = &registry.conflicts;
        registry.devices.retain(|name, _| !conflicts.contains_key(name));
        Ok(registry)
    }

    /// Adds the devices of one file. `seen` is what earlier files of the same folder define.
    fn add(&mut self, spec: &Spec, path: &Path, seen: &mut BTreeMap<String, PathBuf>) {
        for device in &spec.devices {
            let name = format!("{}={}", spec.kind, device.name);
            if let Some(other) = seen.get(&name) {
                let files = self.conflicts.entry(name).or_default();
                files.extend([other.clone(), path.to_owned()]);
                continue;
            }
            seen.insert(name.clone(), path.into());
            let edits = [&spec.container_edits, &device.container_edits];
            let mut entry = Entry {
                file: path.into(),
                hidden: Vec::new(),
                device_nodes: edits.iter().map(|edits| edits.device_nodes.len()).sum(),
                mounts: edits.iter().map(|edits| edits.mounts.len()).sum(),
                hooks: edits.iter().map(|edits| edits.hooks.len()).sum(),
            };
            if let Some(earlier) = self.devices.remove(&name) {
                entry.hidden = earlier.hidden;
                entry.hidden.push(earlier.file);
            }
            self.devices.insert(name, entry);
        }
    }

    /// Whether every file counts.
    pub fn is_sound(&self) -> bool {
        self.conflicts.is_empty() && self.broken.is_empty()
    }
}

/// The specification at `path`, if runtimes take it; else all that is wrong with it.
pub fn sound(path: &Path) -> Result<Spec, Vec<String>> {
    let spec = file::read(path).map_err(|error| vec![error.to_string()])?;
    let faults = rules::faults(&spec);
    if faults.is_empty() {
        return Ok(spec);
    }
    Err(faults.iter().map(|fault| format!("{}: {fault}", path.display())).collect())
}

/// The specification files directly in `folder`, by name.
fn spec_files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if file::is_spec_name(&path) && !path.is_dir() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folders(tempfile::TempDir);

    impl Folders {
        fn new(files: &[(&str, &str)]) -> Self {
            let folders = Self(tempfile::tempdir().unwrap());
            for (name, text) in files {
                let path = folders.path(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            folders
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn read(&self) -> Registry {
            Registry::read(&["etc", "run"].map(|name| self.path(name))).unwrap()
        }
    }

    fn spec(devices: &[&str]) -> String {
        let devices: Vec<_> = devices
            .iter()
            .map(|name| format!(r#"{{"name":"{name}","containerEdits":{{"env":["A=b"]}}}}"#))
            .collect();
        format!(r#"{{"cdiVersion":"0.3.0","kind":"v/c","devices":[{}]}}"#, devices.join(","))
    }

    fn names(registry: &Registry) -> Vec<&str> {
        registry.devices.keys().map(String::as_str).collect()
    }

    #[test]
    fn later_folders_win() {
        let folders = Folders::new(&[("etc/a.json", &spec(&["x", "y"])), ("run/b.json", &spec(&["y"]))]);
        let registry = folders.read();
        assert_eq!(names(&registry), ["v/c=x", "v/c=y"]);
        assert_eq!(registry.devices["v/c=y"].file, folders.path("run/b.json"));
        assert_eq!(registry.devices["v/c=y"].hidden, [folders.path("etc/a.json")]);
        assert!(registry.is_sound());
    }

    // Seen with the CDI library: "Found 0 CDI devices".
    #[test]
    fn two_files_of_one_folder_take_a_device_away() {
        let a = spec(&["x", "y"]);
        let folders =
            Folders::new(&[("etc/a.json", &a), ("etc/b.json", &spec(&["y"])), ("run/c.json", &spec(&["y"]))]);
        let registry = folders.read();
        assert_eq!(names(&registry), ["v/c=x"]);
        let files: Vec<_> = registry.conflicts["v/c=y"].iter().cloned().collect();
        assert_eq!(files, [folders.path("etc/a.json"), folders.path("etc/b.json")]);
        assert!(!registry.is_sound());
    }

    #[test]
    fn a_broken_file_is_left_out_whole_and_others_stay() {
        let broken = spec(&["x", "y z"]);
        let folders = Folders::new(&[
            ("etc/a.json", &broken),
            ("etc/b.json", &spec(&["w"]).replace("kind", "kin")),
            ("run/c.json", &spec(&["w"])),
        ]);
        let registry = folders.read();
        assert_eq!(names(&registry), ["v/c=w"]);
        assert_eq!(registry.broken.len(), 2);
        assert!(registry.broken[&folders.path("etc/a.json")][0].contains("devices[1].name"));
    }

    #[test]
    fn other_files_and_missing_folders_do_not_count() {
        let text = spec(&["x"]);
        let folders =
            Folders::new(&[("etc/a.json.tmp", &text), ("etc/a.yml", &text), ("etc/b/c.json", &text)]);
        fs::create_dir(folders.path("etc/folder.json")).unwrap();
        assert_eq!(folders.read(), Registry::default());
    }
}
