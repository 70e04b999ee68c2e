use std::os::unix::{fs::symlink, net::UnixListener};

use super::*;

pub(crate) const VERSION: &str = "550.163.01";

/// A driver root of the tests' own making.
pub(crate) struct Root(tempfile::TempDir);

impl Root {
    pub(crate) fn empty() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// What NVIDIA's installer leaves on Debian: libraries, their links, programs, firmware.
    pub(crate) fn whole(folder: &str) -> Self {
        let root = Self::empty();
        for link in ["lib", "bin"] {
            fs::create_dir_all(root.at("usr").join(link)).unwrap();
            symlink(format!("usr/{link}"), root.at(link)).unwrap();
        }
        for (stem, soname) in [
            ("libcuda", "libcuda.so.1"),
            ("libnvidia-ml", "libnvidia-ml.so.1"),
            ("libnvidia-ptxjitcompiler", "libnvidia-ptxjitcompiler.so.1"),
            ("libnvidia-nvvm", "libnvidia-nvvm.so.4"),
            ("libnvidia-gpucomp", "libnvidia-gpucomp.so.550.163.01"),
            ("libGLX_nvidia", "libGLX_nvidia.so.0"),
            ("libnvidia-glcore", "libnvidia-glcore.so.550.163.01"),
            ("libnvidia-encode", "libnvidia-encode.so.1"),
            ("libnvidia-opencl", "libnvidia-opencl.so.1"),
        ] {
            root.write(&format!("{folder}/{stem}.so.{VERSION}"), &elf(soname, MACHINE, 2));
            symlink(format!("{stem}.so.{VERSION}"), root.at(&format!("{folder}/{soname}"))).ok();
        }
        root.write(&format!("{folder}/libc.so.6"), &elf("libc.so.6", MACHINE, 2));
        root.write("/usr/bin/nvidia-smi", b"");
        root.write(OPENCL_VENDOR, b"libnvidia-opencl.so.1");
        root.write(&format!("/usr/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"), b"");
        root.write(&format!("/usr/lib/firmware/nvidia/{VERSION}/readme"), b"");
        root
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn at(&self, path: &str) -> PathBuf {
        self.path().join(path.trim_start_matches('/'))
    }

    pub(crate) fn write(&self, path: &str, bytes: &[u8]) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    pub(crate) fn discover(&self) -> Result<Driver, DriverError> {
        Driver::discover(self.path())
    }

    fn refusal(&self) -> String {
        self.discover().unwrap_err().to_string()
    }
}

/// A library with nothing in it but its name. `class` is 1 for 32 bits and 2 for 64 bits; only the latter has more
/// than a header.
fn elf(soname: &str, machine: u16, class: u8) -> Vec<u8> {
    let word = |value: usize| (value as u64).to_le_bytes();
    let half = |value: u16| value.to_le_bytes();
    let int = |value: u32| value.to_le_bytes();
    let (headers, dynamic, strings) = (64, 64 + 2 * 56, 64 + 2 * 56 + 4 * 16);
    let text = format!("\0{soname}\0");
    let end = strings + text.len();
    let mut bytes = vec![0x7f, b'E', b'L', b'F', class, 1, 1, 0];
    bytes.resize(16, 0);
    bytes.extend([half(3), half(machine)].concat());
    bytes.extend(int(1));
    bytes.extend([word(0), word(headers), word(0)].concat());
    bytes.extend(int(0));
    bytes.extend([half(64), half(56), half(2), half(64), half(0), half(0)].concat());
    for (kind, at, size) in [(1, 0, end), (2, dynamic, 4 * 16)] {
        bytes.extend([int(kind), int(4)].concat());
        bytes.extend([word(at), word(at), word(at), word(size), word(size), word(8)].concat());
    }
    for (tag, value) in [(5, strings), (10, text.len()), (14, 1), (0, 0)] {
        bytes.extend([word(tag), word(value)].concat());
    }
    bytes.extend(text.as_bytes());
    bytes
}

/// `/etc/ld.so.cache` with one library in it, in the new format.
fn cache_of(name: &str, path: &str) -> Vec<u8> {
    let flags: u32 = if cfg!(target_arch = "x86_64") { 0x0303 } else { 0x0a03 };
    let mut bytes = b"glibc-ld.so.cache1.1".to_vec();
    bytes.extend(1_u32.to_le_bytes());
    bytes.resize(48, 0);
    let place = u32::try_from(48 + 24).unwrap();
    for word in [flags, place, place + u32::try_from(name.len()).unwrap() + 1, 0, 0, 0] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(format!("{name}\0{path}\0").bytes());
    bytes
}

fn names(driver: &Driver) -> Vec<&str> {
    driver.libraries.iter().map(|library| library.name.as_str()).collect()
}

fn usual() -> String {
    format!("/usr/lib/{TRIPLET}")
}

#[test]
fn a_driver_is_found_with_all_that_computing_needs_and_nothing_that_draws() {
    let root = Root::whole(&usual());
    let driver = root.discover().unwrap();
    assert_eq!(driver.version, VERSION);
    assert_eq!(driver.library_dir, Path::new(&usual()));
    assert_eq!(driver.cuda.host, root.at(&format!("{}/libcuda.so.{VERSION}", usual())));
    assert_eq!(driver.nvml.soname, "libnvidia-ml.so.1");
    assert_eq!(
        names(&driver),
        [
            "libnvidia-gpucomp.so.550.163.01",
            "libnvidia-nvvm.so.550.163.01",
            "libnvidia-ptxjitcompiler.so.550.163.01"
        ]
    );
    assert_eq!(
        driver.past_cuda.iter().map(|library| &library.name).collect::<Vec<_>>(),
        ["libnvidia-opencl.so.550.163.01"]
    );
    assert_eq!(driver.opencl_vendor.as_ref().unwrap().path, Path::new(OPENCL_VENDOR));
    let files: Vec<_> = driver.files.iter().map(|file| file.path.to_str().unwrap()).collect();
    assert_eq!(files, ["/usr/bin/nvidia-smi", "/lib/firmware/nvidia/550.163.01/gsp_ga10x.bin"]);
    assert_eq!(driver.files[1].host, root.at("/usr/lib/firmware/nvidia/550.163.01/gsp_ga10x.bin"));
}

#[test]
fn every_distributions_folder_is_known() {
    for folder in library_folders() {
        let driver = Root::whole(folder.to_str().unwrap()).discover().unwrap();
        // /lib is a link to /usr/lib here: the folder is told without links.
        let told =
            folder.strip_prefix("/lib").map_or(folder.clone(), |rest| Path::new("/usr/lib").join(rest));
        assert_eq!(driver.library_dir, told);
    }
}

#[test]
fn the_roots_own_cache_leads_to_a_folder_that_is_not_known() {
    let root = Root::whole("/opt/nvidia/lib");
    assert!(root.refusal().contains("no libcuda.so.1"));
    root.write("/etc/ld.so.cache", &cache_of("libcuda.so.1", "/opt/nvidia/lib/libcuda.so.1"));
    assert_eq!(root.discover().unwrap().library_dir, Path::new("/opt/nvidia/lib"));
    // A cache that is none is no reason to give up.
    let root = Root::whole(&usual());
    root.write("/etc/ld.so.cache", b"garbage");
    assert_eq!(root.discover().unwrap().library_dir, Path::new(&usual()));
}

// CUDA's forward compatibility package: a libcuda of another version, without NVML.
#[test]
fn a_libcuda_without_nvml_beside_it_is_passed_over() {
    let root = Root::whole(&usual());
    root.write("/usr/local/cuda/compat/libcuda.so.570.1.2", &elf("libcuda.so.1", MACHINE, 2));
    root.write("/etc/ld.so.cache", &cache_of("libcuda.so.1", "/usr/local/cuda/compat/libcuda.so.570.1.2"));
    assert_eq!(root.discover().unwrap().version, VERSION);
}

#[test]
fn links_mean_what_they_mean_inside_the_root() {
    // Debian's alternatives, in a root that is not the host's.
    let root = Root::whole("/usr/lib/nvidia/current");
    fs::create_dir_all(root.at("etc/alternatives")).unwrap();
    symlink("/usr/lib/nvidia/current/libcuda.so.1", root.at("etc/alternatives/cuda")).unwrap();
    fs::create_dir_all(root.at(&usual())).unwrap();
    symlink("/etc/alternatives/cuda", root.at(&format!("{}/libcuda.so.1", usual()))).unwrap();
    let driver = root.discover().unwrap();
    assert_eq!(driver.library_dir, Path::new("/usr/lib/nvidia/current"));
    assert!(driver.cuda.host.starts_with(root.path()));
}

// As Debian's packages of 535 and 550 have it.
#[test]
fn a_drivers_libraries_may_lie_in_two_folders_and_its_programs_behind_links() {
    let root = Root::whole(&format!("{}/nvidia/current", usual()));
    root.write(
        &format!("{}/libnvidia-pkcs11.so.{VERSION}", usual()),
        &elf("libnvidia-pkcs11.so.1", MACHINE, 2),
    );
    root.write(&format!("{}/libnvidia-glsi.so.{VERSION}", usual()), &elf("x", MACHINE, 2));
    // The same library in both folders comes along once, from where libcuda is.
    root.write(&format!("{}/libnvidia-gpucomp.so.{VERSION}", usual()), &elf("x", MACHINE, 2));
    fs::rename(root.at("usr/bin/nvidia-smi"), root.at("usr/bin/other")).unwrap();
    root.write("/usr/lib/nvidia/current/nvidia-smi", b"");
    let driver = root.discover().unwrap();
    let folders: Vec<_> = driver
        .libraries
        .iter()
        .map(|library| (library.name.as_str(), library.folder.to_str().unwrap()))
        .collect();
    let (current, above) = (format!("{}/nvidia/current", usual()), usual());
    assert_eq!(
        folders,
        [
            ("libnvidia-gpucomp.so.550.163.01", current.as_str()),
            ("libnvidia-nvvm.so.550.163.01", &current),
            ("libnvidia-pkcs11.so.550.163.01", &above),
            ("libnvidia-ptxjitcompiler.so.550.163.01", &current),
        ]
    );
    assert_eq!(driver.files[0].path, Path::new("/usr/bin/nvidia-smi"));
    assert_eq!(driver.files[0].host, root.at("usr/lib/nvidia/current/nvidia-smi"));
}

#[test]
fn libraries_of_other_machines_are_left_out() {
    let root = Root::whole(&usual());
    root.write(&format!("{}/libnvidia-pkcs11.so.{VERSION}", usual()), &elf("x", 3, 2));
    root.write(&format!("{}/libnvidia-cfg.so.{VERSION}", usual()), b"no library");
    let driver = root.discover().unwrap();
    assert!(!names(&driver).iter().any(|name| name.contains("pkcs11") || name.contains("cfg")));
    let left_out: Vec<_> = driver.left_out.into_iter().collect();
    let [(cfg, no_library), (pkcs11, foreign)] = &left_out[..] else { panic!("{left_out:?}") };
    assert!(cfg.ends_with(format!("libnvidia-cfg.so.{VERSION}")) && no_library.contains("cannot be used"));
    assert!(
        pkcs11.ends_with(format!("libnvidia-pkcs11.so.{VERSION}")) && foreign.contains("another machine")
    );

    root.write(&format!("{}/libcuda.so.{VERSION}", usual()), &elf("libcuda.so.1", 3, 2));
    assert!(root.refusal().contains("another machine"));
}

#[test]
fn a_driver_that_is_half_there_is_refused_with_what_is_missing() {
    let root = Root::whole(&usual());
    fs::remove_file(root.at(&format!("{}/libnvidia-ml.so.{VERSION}", usual()))).unwrap();
    let refusal = root.refusal();
    assert!(refusal.contains("libnvidia-ml.so.550.163.01 beside it does not exist"), "{refusal}");

    // A stub, as the CUDA toolkit has one.
    let root = Root::empty();
    root.write(&format!("{}/libcuda.so.1", usual()), &elf("libcuda.so.1", MACHINE, 2));
    let refusal = root.refusal();
    assert!(refusal.contains("no driver version"), "{refusal}");
}

#[test]
fn where_there_is_no_driver_it_is_said_where_it_was_looked_for_and_what_to_do() {
    let root = Root::empty();
    let refusal = root.refusal();
    for part in [root.path().to_str().unwrap(), "/usr/lib64", "/etc/ld.so.cache", "paths.driverRoot"] {
        assert!(refusal.contains(part), "{refusal}");
    }
    let refusal = Driver::discover(Path::new("/nowhere")).unwrap_err().to_string();
    assert!(refusal.contains("/nowhere") && refusal.contains("paths.driverRoot"), "{refusal}");
}

#[test]
fn left_overs_of_an_older_driver_do_not_count() {
    let root = Root::whole(&usual());
    for name in ["libcuda", "libnvidia-ml", "libnvidia-cfg"] {
        root.write(&format!("{}/{name}.so.470.1.2", usual()), &elf("x.so.1", MACHINE, 2));
    }
    let driver = root.discover().unwrap();
    assert_eq!(driver.version, VERSION, "the one that libcuda.so.1 leads to");
    assert!(names(&driver).iter().all(|name| !name.contains("470")));
}

#[test]
fn sockets_come_along_while_their_daemons_run() {
    let root = Root::whole(&usual());
    let folder = root.at("run/nvidia-persistenced");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("socket"), "no socket").unwrap();
    assert_eq!(root.discover().unwrap().sockets, []);
    fs::remove_file(folder.join("socket")).unwrap();
    let _daemon = UnixListener::bind(folder.join("socket")).unwrap();
    let sockets = root.discover().unwrap().sockets;
    assert_eq!(sockets.len(), 1);
    assert_eq!(sockets[0].path, Path::new("/run/nvidia-persistenced/socket"));
    assert_eq!(sockets[0].host, folder.join("socket"));
}

#[test]
fn a_compiler_with_a_version_of_its_own_comes_along_once() {
    let root = Root::whole(&usual());
    root.write(&format!("{}/libnvidia-nvvm70.so.4", usual()), &elf("libnvidia-nvvm70.so.4", MACHINE, 2));
    let driver = root.discover().unwrap();
    let nvvm: Vec<_> = names(&driver).into_iter().filter(|name| name.starts_with(NVVM)).collect();
    assert_eq!(nvvm, ["libnvidia-nvvm.so.550.163.01", "libnvidia-nvvm70.so.4"]);
}

#[test]
fn versions_are_numbers_with_dots() {
    assert_eq!(version_of("libcuda.so.535.261.03", CUDA), Some("535.261.03"));
    assert_eq!(version_of("libcuda.so.525.60", CUDA), Some("525.60"));
    for name in
        ["libcuda.so.1", "libcuda.so.", "libcuda.so.1.", "libcuda.so.a.b", "libcuda.so", "libcudart.so.12.4"]
    {
        assert_eq!(version_of(name, CUDA), None, "{name}");
    }
}

#[test]
fn a_driver_root_that_is_not_there_is_named_once_with_its_setting() {
    let error = Driver::discover(Path::new("/nonexistent/driver")).unwrap_err().to_string();
    assert_eq!(error.matches("/nonexistent/driver").count(), 1, "{error}");
    assert!(error.contains("paths.driverRoot") && !error.contains("container"), "{error}");
}
