//! What a pod's author writes: containers, images, what they ask for.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::atomic::{AtomicU32, Ordering},
};

/// A pod.
#[derive(Clone, Debug)]
pub struct Pod {
    /// Name.
    pub name: String,
    /// Namespace.
    pub namespace: String,
    /// UID, as the API server would give it.
    pub uid: String,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
    /// Containers that run before the others: one after the other to their end, sidecars to stay.
    pub init: Vec<Container>,
    /// Containers.
    pub containers: Vec<Container>,
}

/// A container.
#[derive(Clone, Debug)]
pub struct Container {
    /// Name, unique in the pod.
    pub name: String,
    /// Image.
    pub image: String,
    /// Command; the image's when empty.
    pub command: Vec<String>,
    /// Environment, added to the image's.
    pub env: Vec<(String, String)>,
    /// Extended resources asked for, by full name.
    pub resources: BTreeMap<String, u32>,
    /// CDI devices beside those that device plugins name, by full name, as a DRA driver has them added.
    pub cdi_devices: Vec<String>,
    /// User ID.
    pub user: Option<i64>,
    /// Whether its root file system is read-only.
    pub read_only_root: bool,
    /// Host folders mounted: host path, container path.
    pub volumes: Vec<(PathBuf, String)>,
    /// For an init container: whether it goes on beside the others (`restartPolicy: Always`).
    pub sidecar: bool,
}

impl Pod {
    /// A pod of one container.
    pub fn new(name: &str, container: Container) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let uid = format!(
            "5eed0000-{:04x}-4000-8000-{:012x}",
            std::process::id() & 0xffff,
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        Self {
            name: name.into(),
            namespace: "default".into(),
            uid,
            annotations: BTreeMap::new(),
            init: vec![],
            containers: vec![container],
        }
    }

    /// With one more container.
    #[must_use]
    pub fn with(mut self, container: Container) -> Self {
        self.containers.push(container);
        self
    }

    /// With one more init container.
    #[must_use]
    pub fn with_init(mut self, container: Container) -> Self {
        self.init.push(container);
        self
    }
}

impl Container {
    /// A container that asks for nothing and sleeps.
    pub fn new(name: &str, image: &str) -> Self {
        Self {
            name: name.into(),
            image: image.into(),
            command: ["sleep", "inf"].map(Into::into).into(),
            env: vec![],
            resources: BTreeMap::new(),
            cdi_devices: vec![],
            user: None,
            read_only_root: false,
            volumes: vec![],
            sidecar: false,
        }
    }

    /// Asks for `core` percent of one GPU and `memory` units of 256 MiB, under the default names.
    #[must_use]
    pub fn share(mut self, core: u32, memory: u32) -> Self {
        let names = vcuda_config::Resources::default();
        for (name, units) in [(names.core_name(), core), (names.memory_name(), memory)] {
            if units > 0 {
                self.resources.insert(name, units);
            }
        }
        self
    }

    /// Runs `words` instead of sleeping.
    #[must_use]
    pub fn command(mut self, words: &[&str]) -> Self {
        self.command = words.iter().map(|&word| word.into()).collect();
        self
    }

    /// Adds a variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Runs as `user`.
    #[must_use]
    pub fn user(mut self, user: i64) -> Self {
        self.user = Some(user);
        self
    }

    /// With a read-only root file system.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.read_only_root = true;
        self
    }

    /// As a sidecar.
    #[must_use]
    pub fn sidecar(mut self) -> Self {
        self.sidecar = true;
        self
    }
}
