//! The files under `examples/` are what people copy, so they must be right.

use std::path::Path;

use vcuda_config::{MEMORY_UNIT_BYTES, NodeFile, Resources};

fn example(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name)
}

#[test]
fn the_example_node_file_shows_the_defaults() {
    let mut file = NodeFile::load(&example("config.yaml")).unwrap();
    file.paths.node_file = NodeFile::DEFAULT_PATH.into();
    assert_eq!(file, NodeFile::default());
}

#[test]
fn the_example_pod_asks_under_the_default_names() {
    let pod = std::fs::read_to_string(example("pod.yaml")).unwrap();
    let names = Resources::default();
    assert!(pod.contains(&format!("{}: \"20\"", names.core_name())));
    assert!(pod.contains(&format!("{}: \"32\"", names.memory_name())));
    assert_eq!(32 * MEMORY_UNIT_BYTES, 8 << 30);
}

#[test]
fn systemd_never_gives_up_on_a_daemon() {
    for unit in ["vcuda-device-plugin.service", "vcuda-nri-plugin.service"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/systemd").join(unit);
        let text = std::fs::read_to_string(path).unwrap();
        let (before, service) = text.split_once("[Service]").unwrap();
        // It is a key of [Unit]; anywhere else systemd ignores it.
        assert!(before.lines().any(|line| line == "StartLimitIntervalSec=0"), "{unit}");
        assert!(service.lines().any(|line| line == "Restart=always"), "{unit}");
    }
}

#[test]
fn the_manifests_install_this_version() {
    let install = NodeFile::default().paths.install.display().to_string();
    for file in ["daemonset.yaml", "systemd/vcuda-device-plugin.service", "systemd/vcuda-nri-plugin.service"]
    {
        let text =
            std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(file)).unwrap();
        let named = text.match_indices("/usr/local/vcuda/").map(|(at, _)| &text[at..]).collect::<Vec<_>>();
        assert!(!named.is_empty(), "{file}");
        assert!(named.iter().all(|rest| rest.starts_with(&install)), "{file} names another version");
    }
}
