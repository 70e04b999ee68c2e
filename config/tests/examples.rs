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
