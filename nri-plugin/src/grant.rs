//! What kubelet granted a container, read from what the device plugin's Allocate left on it.
//!
//! Allocate's annotations reach us through kubelet, which puts them on the container and not on the pod, and
//! through containerd, which adds them to the container that NRI sees. A pod cannot write them there, with one
//! exception: a containerd configured with `pod_annotations` copies annotations of the pod into its containers. So a
//! grant counts only beside our guard hook, which nothing but our CDI spec puts into a container and which kubelet
//! asks for in the same answer; and a pod that carries one of our keys itself is refused.

use std::path::Path;

use vcuda_config::{GpuUuid, Grant, Paths, Request, annotation};

use crate::wire::{Container, PodSandbox};

/// Longest grant that is read. Sixteen GPUs need 800 bytes.
const GRANT_MAX_BYTES: usize = 4096;

/// What kubelet granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Granted {
    /// What it amounts to.
    pub request: Request,
    /// The GPUs that kubelet counted it on, the one with most of it first.
    pub gpus: Vec<GpuUuid>,
}

/// Whether anything was granted. Looks at nothing but the container's annotations.
pub fn is_granted(container: &Container) -> bool {
    container.annotations.contains_key(annotation::CORE_GRANT)
        || container.annotations.contains_key(annotation::MEMORY_GRANT)
}

impl Granted {
    /// Reads the grant of `container`, which must have one.
    ///
    /// # Errors
    ///
    /// A text that says why the grant does not count, and what to do.
    pub fn read(pod: &PodSandbox, container: &Container, paths: &Paths) -> Result<Self, String> {
        for key in [annotation::CORE_GRANT, annotation::MEMORY_GRANT, annotation::SHARE] {
            if pod.annotations.contains_key(key) {
                return Err(format!(
                    "the pod carries the annotation {key}, which vcuda alone sets; remove it from the pod"
                ));
            }
        }
        let core = grant(container, annotation::CORE_GRANT)?;
        let memory = grant(container, annotation::MEMORY_GRANT)?;
        let units = |grant: &Option<Grant>| grant.as_ref().map_or(0, Grant::units);
        let request = Request::new(units(&core), units(&memory)).map_err(|error| error.to_string())?;
        // After the request: memory without core brings no CDI device, and the reason for that is the request.
        if !has_guard(container, paths) {
            return Err(format!(
                "its CDI device was not expanded, so it has neither driver libraries nor guard; see that CDI is on \
                 in containerd (enable_cdi) and that cdi_spec_dirs lists {}",
                paths.cdi.display()
            ));
        }
        let mut gpus = Vec::new();
        for grant in [core, memory].iter().flatten() {
            let mut of_grant: Vec<_> = grant.iter().collect();
            // A stable sort: of equals, the first.
            of_grant.sort_by_key(|(_, units)| std::cmp::Reverse(*units));
            for (gpu, _) in of_grant {
                if !gpus.contains(gpu) {
                    gpus.push(gpu.clone());
                }
            }
        }
        Ok(Self { request, gpus })
    }
}

/// Whether our guard will look at the container before it starts. Hooks come from CDI specs and NRI plugins, never
/// from a pod.
pub fn has_guard(container: &Container, paths: &Paths) -> bool {
    let hook = paths.hook();
    container.hooks.create_container.iter().any(|other| {
        // During an upgrade the CDI spec may name the hook of another version's folder.
        Path::new(&other.path).file_name() == hook.file_name() && vcuda_config::hook::guards(&other.args)
    })
}

fn grant(container: &Container, key: &str) -> Result<Option<Grant>, String> {
    let Some(text) = container.annotations.get(key) else { return Ok(None) };
    if text.len() > GRANT_MAX_BYTES {
        return Err(format!("the annotation {key} is longer than {GRANT_MAX_BYTES} bytes; delete the pod"));
    }
    let wrong = |error| format!("annotation {key}: {error}; see that all parts of vcuda are of one version");
    text.parse().map(Some).map_err(wrong)
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;
    use protobuf::MessageField;

    use super::*;
    use crate::wire::{Hook, Hooks};

    pub(crate) fn gpu(n: u8) -> GpuUuid {
        GpuUuid::from_bytes([n; 16])
    }

    /// A container as containerd shows it after Allocate and CDI.
    pub(crate) fn granted(core: &str, memory: &str) -> Container {
        let hook = Hook {
            path: "/usr/local/vcuda/0.0.9/bin/vcuda-hook".into(),
            args: vec!["vcuda-hook".into(), "create-container".into()],
            ..Hook::default()
        };
        let mut container = Container { id: "c0ffee".into(), name: "main".into(), ..Container::default() };
        container.hooks = MessageField::some(Hooks { create_container: vec![hook], ..Hooks::default() });
        for (key, value) in [(annotation::CORE_GRANT, core), (annotation::MEMORY_GRANT, memory)] {
            if !value.is_empty() {
                container.annotations.insert(key.into(), value.into());
            }
        }
        container
    }

    fn read(container: &Container) -> Result<Granted, String> {
        Granted::read(&PodSandbox::default(), container, &Paths::default())
    }

    #[test]
    fn ids_that_straddle_gpus_add_up_and_prefer_the_one_with_most() {
        let core = format!("{}=5,{}=15", gpu(1), gpu(2));
        let memory = format!("{}=32", gpu(3));
        let granted = read(&granted(&core, &memory)).unwrap();
        assert_eq!(granted.request, Request::new(20, 32).unwrap());
        assert_eq!(granted.gpus, [gpu(2), gpu(1), gpu(3)]);
    }

    #[test]
    fn what_can_never_run_is_refused_with_the_remedy() {
        let core = format!("{}=20", gpu(1));
        let memory = format!("{}=32", gpu(1));
        for (core, memory, named) in [
            (core.as_str(), "", "vcuda-memory is missing"),
            ("", memory.as_str(), "vcuda-core is missing"),
            ("junk", memory.as_str(), "no grant"),
            (&"x".repeat(5000), memory.as_str(), "longer than"),
        ] {
            let error = read(&granted(core, memory)).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn a_grant_without_the_guard_does_not_count() {
        let mut container = granted(&format!("{}=20", gpu(1)), &format!("{}=32", gpu(1)));
        for (path, command) in
            [("/usr/local/vcuda/0.1.0/bin/vcuda-hook", "links"), ("/bin/true", "create-container")]
        {
            let hooks = MessageField::some(Hooks {
                create_container: vec![Hook {
                    path: path.into(),
                    args: vec!["vcuda-hook".into(), command.into()],
                    ..Hook::default()
                }],
                ..Hooks::default()
            });
            container.hooks = hooks;
            let error = read(&container).unwrap_err();
            assert!(error.contains("enable_cdi"), "{error}");
        }
    }

    #[test]
    fn a_pod_that_writes_our_annotations_is_refused() {
        let container = granted(&format!("{}=20", gpu(1)), &format!("{}=32", gpu(1)));
        for key in [annotation::CORE_GRANT, annotation::MEMORY_GRANT, annotation::SHARE] {
            let mut pod = PodSandbox::default();
            pod.annotations.insert(key.into(), "forged".into());
            let error = Granted::read(&pod, &container, &Paths::default()).unwrap_err();
            assert!(error.contains(key) && error.contains("remove it"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_annotation_is_read_or_refused(core in "\\PC{0,200}", memory in "\\PC{0,200}") {
            if let Err(error) = read(&granted(&core, &memory)) {
                prop_assert!(error.len() < 2000);
            }
        }
    }
}
