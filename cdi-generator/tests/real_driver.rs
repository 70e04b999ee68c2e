//! NVIDIA's own driver packages, as Debian has them, unpacked as a driver root. They are fetched by
//! `oci-hooks/tests/material/get`; without them the test says that it is skipped.

use std::{
    env,
    path::{Path, PathBuf},
};

use cdi_generator::{Driver, rules, spec};
use vcuda_config::Paths;

fn driver_root(line: &str) -> Option<PathBuf> {
    let base = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    // The same as `integration/setup.sh --where`.
    let cache = || {
        base("VCUDA_CACHE")
            .or_else(|| base("XDG_CACHE_HOME").map(|dir| dir.join("vcuda")))
            .unwrap_or_else(|| base("HOME").unwrap_or_else(|| "/root".into()).join(".cache/vcuda"))
    };
    let material = base("VCUDA_MATERIAL").unwrap_or_else(|| cache().join("material"));
    let root = material.join("drivers").join(line);
    if !root.exists() {
        eprintln!("driver {line}: skipped, run oci-hooks/tests/material/get");
        return None;
    }
    Some(root)
}

#[test]
fn debians_driver_packages_are_a_driver() {
    for line in ["535", "550"] {
        let Some(root) = driver_root(line) else { continue };
        let driver = Driver::discover(&root).unwrap();
        assert!(driver.version.starts_with(&format!("{line}.")), "{}", driver.version);
        assert_eq!(driver.library_dir, Path::new("/usr/lib/x86_64-linux-gnu/nvidia/current"));
        assert_eq!(
            (driver.cuda.soname.as_str(), driver.nvml.soname.as_str()),
            ("libcuda.so.1", "libnvidia-ml.so.1")
        );
        let sonames: Vec<_> = driver.libraries.iter().map(|library| library.soname.as_str()).collect();
        assert!(sonames.contains(&"libnvidia-ptxjitcompiler.so.1"), "{sonames:?}");
        let spec = spec(&Paths::default(), &driver);
        assert_eq!(rules::faults(&spec), []);
        for device in &spec.devices {
            for mount in device.container_edits.mounts.iter().chain(&spec.container_edits.mounts) {
                assert!(Path::new(&mount.host_path).exists(), "{mount:?}");
            }
            let args = &device.container_edits.hooks[0].args;
            for pair in args.windows(2).filter(|pair| pair[0] == "--driver-file") {
                let (host, _) = pair[1].split_once("::").unwrap();
                assert!(Path::new(host).exists(), "{pair:?}");
            }
        }
    }
}
