//! The files under `examples/` are what people copy, so they must be right.

use std::{fs, os::unix::fs::MetadataExt, path::Path, process::Command};

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
    let pod = fs::read_to_string(example("pod.yaml")).unwrap();
    let names = Resources::default();
    assert!(pod.contains(&format!("{}: \"20\"", names.core_name())));
    assert!(pod.contains(&format!("{}: \"32\"", names.memory_name())));
    assert_eq!(32 * MEMORY_UNIT_BYTES, 8 << 30);
}

#[test]
fn systemd_never_gives_up_on_a_daemon() {
    for unit in ["vcuda-device-plugin.service", "vcuda-nri-plugin.service"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/systemd").join(unit);
        let text = fs::read_to_string(path).unwrap();
        let (before, service) = text.split_once("[Service]").unwrap();
        // It is a key of [Unit]; anywhere else systemd ignores it.
        assert!(before.lines().any(|line| line == "StartLimitIntervalSec=0"), "{unit}");
        assert!(service.lines().any(|line| line == "Restart=always"), "{unit}");
    }
}

/// The DaemonSet's init container puts a build's folder there whole, whatever an earlier attempt has left, never touches
/// one that is there, and does not pass another build under the same version off as installed.
#[test]
fn the_daemonset_installs_a_build_whole_and_once() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/daemonset.yaml");
    let text = fs::read_to_string(manifest).unwrap();
    let (_, script) = text.split_once("            - |\n").unwrap();
    let script: Vec<&str> = script.lines().map_while(|line| line.strip_prefix("              ")).collect();
    let first = "from=/vcuda to=/host/usr/local/vcuda/";
    assert!(script.first().unwrap().starts_with(first), "{script:?}");

    let folder = tempfile::tempdir().unwrap();
    let (host, image) = (folder.path().join("host"), folder.path().join("image"));
    for (file, content) in [("bin/vcuda-hook", "hook"), ("lib/libvcuda_preload.so", "shim")] {
        fs::create_dir_all(image.join(file).parent().unwrap()).unwrap();
        fs::write(image.join(file), content).unwrap();
    }
    let script = script.join("\n");
    let script = script.replace("to=/host/", &format!("to={}/", host.display()));
    let script = script.replace("from=/vcuda ", &format!("from={} ", image.display()));
    let install = || {
        let output = Command::new("sh").args(["-euc", &script]).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let installed = host.join(NodeFile::default().paths.install.strip_prefix("/").unwrap());
    let part = installed.with_file_name("0.1.0.part");

    // An attempt that was killed half-way.
    fs::create_dir_all(part.join("bin")).unwrap();
    fs::write(part.join("bin/vcuda-hook"), "ho").unwrap();
    assert_eq!(install(), (Some(0), String::new()));
    assert_eq!(fs::read_to_string(installed.join("bin/vcuda-hook")).unwrap(), "hook");
    assert_eq!(fs::read_to_string(installed.join("lib/libvcuda_preload.so")).unwrap(), "shim");
    assert!(!part.exists());

    // Containers map what is there, so it stays as it is.
    let inode = || fs::metadata(installed.join("lib/libvcuda_preload.so")).unwrap().ino();
    let before = inode();
    assert_eq!(install(), (Some(0), String::new()), "the same build once more");
    let refused = |why| {
        let (code, said) = install();
        assert_eq!(code, Some(1), "{why}: {said}");
        assert!(said.contains("is of another build than this image"), "{why}: {said}");
        assert_eq!(said.lines().count(), 1, "{why}: {said}");
        assert_eq!((inode(), fs::read_dir(&installed).unwrap().count()), (before, 2), "{why}");
        assert_eq!(fs::read_to_string(installed.join("lib/libvcuda_preload.so")).unwrap(), "shim", "{why}");
    };
    fs::write(image.join("lib/libvcuda_preload.so"), "another").unwrap();
    refused("a file is another");
    fs::write(image.join("lib/libvcuda_preload.so"), "shim").unwrap();
    fs::write(image.join("bin/vcuda-check"), "check").unwrap();
    refused("a file is more");
    fs::remove_file(image.join("bin/vcuda-check")).unwrap();
    assert_eq!(install(), (Some(0), String::new()), "back again");
}

/// What is beside `bin` and `lib` in the folder that is built is for tests, and large.
#[test]
fn the_image_has_what_goes_onto_a_node_and_no_more() {
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    let recipe = fs::read_to_string(deploy.join("Dockerfile")).unwrap();
    let copies: Vec<_> = recipe.lines().filter_map(|line| line.strip_prefix("COPY ")).collect();
    assert_eq!(copies, ["bin /vcuda/bin", "lib /vcuda/lib"]);
    let image = format!("/vcuda:{}", vcuda_config::VERSION);
    for file in ["Dockerfile", "daemonset.yaml", "scheduler.yaml"] {
        assert!(fs::read_to_string(deploy.join(file)).unwrap().contains(&image), "{file}");
    }
}

#[test]
fn the_manifests_install_this_version() {
    let install = NodeFile::default().paths.install.display().to_string();
    for file in ["daemonset.yaml", "systemd/vcuda-device-plugin.service", "systemd/vcuda-nri-plugin.service"]
    {
        let text =
            fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(file)).unwrap();
        let named = text.match_indices("/usr/local/vcuda/").map(|(at, _)| &text[at..]).collect::<Vec<_>>();
        assert!(!named.is_empty(), "{file}");
        assert!(named.iter().all(|rest| rest.starts_with(&install)), "{file} names another version");
    }
}
