//! Which container a hook runs for: the OCI state on standard input and the root's place in the bundle. Bounded,
//! for annotations come from pods. It says what the runtime said; what of it may be believed is the caller's
//! question.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use oci_spec::runtime::State;
use serde::Deserialize;
use thiserror::Error;

use crate::{
    compat::start::Command,
    rootfs::{Rootfs, RootfsError},
};

/// The most that is read of the OCI state, in bytes. Most of a state is annotations, of which Kubernetes allows a
/// pod 256 KiB.
const STATE_MAX_BYTES: u64 = 1 << 20;

/// The most that is read of the bundle's `config.json`, in bytes; environments are at most some megabytes (`ARG_MAX`).
const CONFIG_MAX_BYTES: u64 = 16 << 20;

/// The container that a hook was started for.
#[derive(Clone, Debug)]
pub struct Container {
    /// The runtime's ID of it.
    pub id: String,
    /// Its annotations. Pods write some of them: they prove nothing.
    pub annotations: HashMap<String, String>,
    /// Its root folder, on the host.
    pub root: PathBuf,
    /// What it starts.
    pub command: Command,
    /// Name of its image, where the runtime tells.
    pub image: Option<String>,
    /// The pod's namespace and name, and the container's name in it, where the runtime tells.
    pub pod: Option<[String; 3]>,
    /// SELinux context of what is mounted for it, where the node has such.
    pub mount_label: Option<String>,
}

/// Annotation with the image's name, set by containerd (`pkg/cri/annotations`).
const IMAGE_NAME: &str = "io.kubernetes.cri.image-name";

/// Annotations with the names of pod and container, set by containerd (`pkg/cri/annotations`).
const POD: [&str; 3] = [
    "io.kubernetes.cri.sandbox-namespace",
    "io.kubernetes.cri.sandbox-name",
    "io.kubernetes.cri.container-name",
];

/// Why a hook does not know its container.
#[derive(Debug, Error)]
pub enum StateError {
    /// Standard input is not what a runtime writes.
    #[error(
        "standard input holds no OCI container state: {reason}; an OCI runtime starts this hook, not a person"
    )]
    State {
        /// What is wrong with it.
        reason: String,
    },
    /// The bundle is not what a runtime makes.
    #[error("{path}: {reason}; this hook needs the bundle of an OCI runtime")]
    Bundle {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// What a hook needs of `config.json`. All else is left alone: the file may be newer than any type for it.
#[derive(Deserialize)]
struct Config {
    root: ConfigRoot,
    process: Option<Command>,
    #[serde(default)]
    annotations: HashMap<String, String>,
    #[serde(default)]
    linux: ConfigLinux,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ConfigLinux {
    mount_label: Option<String>,
}

#[derive(Deserialize)]
struct ConfigRoot {
    path: PathBuf,
}

impl Container {
    /// Reads the OCI state from `input` and the bundle that it names.
    pub fn read(input: impl Read) -> Result<Self, StateError> {
        let invalid = |reason: String| StateError::State { reason };
        let text = read_bounded(input, STATE_MAX_BYTES).map_err(invalid)?;
        let state: State = serde_json::from_slice(&text).map_err(|error| invalid(error.to_string()))?;
        if state.id().is_empty() {
            return Err(invalid("it has no container ID".into()));
        }
        if !state.bundle().is_absolute() {
            return Err(invalid(format!("bundle {:?} is no absolute path", state.bundle())));
        }
        let mut config = config(state.bundle())?;
        Ok(Self {
            id: state.id().clone(),
            annotations: state.annotations().clone().unwrap_or_default(),
            // A relative one is relative to the bundle (OCI runtime spec, config.md).
            root: state.bundle().join(config.root.path),
            command: config.process.unwrap_or_default(),
            image: config.annotations.remove(IMAGE_NAME),
            pod: match POD.map(|key| config.annotations.remove(key)) {
                [Some(namespace), Some(pod), Some(container)] => Some([namespace, pod, container]),
                _ => None,
            },
            mount_label: config.linux.mount_label.filter(|label| !label.is_empty()),
        })
    }

    /// What it is called in messages: by its pod, or else by its ID.
    pub fn name(&self) -> String {
        match &self.pod {
            Some([namespace, pod, container]) => format!("pod {namespace}/{pod}, container {container}"),
            None => format!("container {}", self.id),
        }
    }

    /// Opens the container's root.
    pub fn rootfs(&self) -> Result<Rootfs, RootfsError> {
        Rootfs::open(&self.root)
    }
}

/// What the bundle says.
fn config(bundle: &Path) -> Result<Config, StateError> {
    let path = bundle.join("config.json");
    let text = File::open(&path)
        .map_err(|error| error.to_string())
        .and_then(|file| read_bounded(file, CONFIG_MAX_BYTES));
    let config = text.and_then(|text| serde_json::from_slice(&text).map_err(|error| error.to_string()));
    config.map_err(|reason| StateError::Bundle { path, reason })
}

fn read_bounded(input: impl Read, limit: u64) -> Result<Vec<u8>, String> {
    let mut text = Vec::new();
    input
        .take(limit + 1)
        .read_to_end(&mut text)
        .map_err(|error: io::Error| format!("it cannot be read: {error}"))?;
    if text.len() as u64 > limit {
        return Err(format!("it is larger than {limit} bytes"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What runc 1.1 writes to a createContainer hook, with its bundle at `bundle`.
    fn state(bundle: &Path) -> String {
        format!(
            r#"{{"ociVersion":"1.0.2-dev","id":"c1","status":"creating","pid":1,"bundle":{bundle:?},
                "annotations":{{"tencent.com/vcuda-share":"a_b"}}}}"#
        )
    }

    fn bundle(config: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        folder
    }

    #[test]
    fn a_relative_root_lies_in_the_bundle_and_unknown_keys_are_no_matter() {
        let folder = bundle(r#"{"ociVersion":"9.9","root":{"path":"rootfs","new":[]},"linux":{"new":1}}"#);
        let container = Container::read(state(folder.path()).as_bytes()).unwrap();
        assert_eq!(container.root, folder.path().join("rootfs"));
        assert_eq!(container.name(), "container c1");
        assert_eq!((container.id.as_str(), container.image, container.mount_label), ("c1", None, None));
        assert_eq!(container.annotations["tencent.com/vcuda-share"], "a_b");
    }

    #[test]
    fn what_is_started_of_which_image_and_for_which_pod_is_in_the_bundle() {
        let folder = bundle(
            r#"{"root":{"path":"rootfs"},"process":{"args":["app"],"env":["A=b"],"cwd":"/x","new":1},
                "linux":{"mountLabel":"system_u:object_r:container_file_t:s0","seccomp":{}},
                "annotations":{"io.kubernetes.cri.image-name":"registry/app:1",
                "io.kubernetes.cri.sandbox-namespace":"team","io.kubernetes.cri.sandbox-name":"train",
                "io.kubernetes.cri.container-name":"main"}}"#,
        );
        let container = Container::read(state(folder.path()).as_bytes()).unwrap();
        assert_eq!(container.name(), "pod team/train, container main");
        let command = Command { args: vec!["app".into()], env: vec!["A=b".into()], cwd: "/x".into() };
        assert_eq!((container.command, container.image.as_deref()), (command, Some("registry/app:1")));
        assert_eq!(container.mount_label.as_deref(), Some("system_u:object_r:container_file_t:s0"));
    }

    #[test]
    fn an_absolute_root_is_taken_as_it_is() {
        let folder = bundle(r#"{"root":{"path":"/somewhere/else"}}"#);
        let container = Container::read(state(folder.path()).as_bytes()).unwrap();
        assert_eq!(container.root, Path::new("/somewhere/else"));
    }

    #[test]
    fn what_is_no_state_is_refused_with_its_reason() {
        let endless = format!("{{\"id\":\"{}\"}}", "x".repeat(1 << 20));
        for (text, reason) in [
            ("", "EOF"),
            ("{}", "container ID"),
            ("[]", "container ID"),
            ("1", "invalid type"),
            (r#"{"id":"c1","bundle":"relative"}"#, "absolute"),
            (&endless, "larger than"),
        ] {
            let error = Container::read(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_bundle_without_a_root_is_named() {
        let folder = bundle(r#"{"ociVersion":"1.0.2"}"#);
        let error = Container::read(state(folder.path()).as_bytes()).unwrap_err().to_string();
        assert!(error.contains("config.json") && error.contains("root"), "{error}");
        let error = Container::read(state(Path::new("/nowhere")).as_bytes()).unwrap_err().to_string();
        assert!(error.contains("/nowhere/config.json"), "{error}");
    }
}
