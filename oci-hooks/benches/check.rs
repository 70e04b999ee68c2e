//! What a check costs: the guard's look at a container's start, and `vcuda-check` on a root of 5 GB with 50,000
//! files, cold, warm, and as a container's whose image is known. The root is made in a temporary folder: 1,500 copies of
//! this program and of libraries of this machine, large sparse libraries, and small files for the rest. For the guard's
//! verdicts there are a CUDA runtime, a driver and a shim beside it, with the names that real ones have.
//!
//! Figures: CPU time (user and system) and wall time; `cargo bench -p oci-hooks`. Dropping the page cache for the
//! cold figure needs root.

#![expect(clippy::unwrap_used, reason = "a bench that cannot go on ends")]

use std::{
    collections::BTreeSet,
    ffi::CString,
    fs::{self, File},
    hint::black_box,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process,
    time::{Duration, Instant},
};

use oci_hooks::{
    compat::{
        check::{self, Limits, Node},
        start::{self, Command},
    },
    guard::image,
    rootfs::Rootfs,
    scans::Scans,
};
use region::place;
use rustix::{
    io::Errno,
    mount::{MountFlags, UnmountFlags, mount, mount_bind},
    time::{ClockId, clock_gettime},
};

const FILES: usize = 50_000;
const FOLDERS: usize = 500;
const LIBRARIES: usize = 1_500;
const LARGE: usize = 10;
const LARGE_BYTES: u64 = 480 << 20;

fn main() {
    let folder = tempfile::tempdir().unwrap();
    let root = &folder.path().join("image");
    make(root);
    let rootfs = Rootfs::open(root).unwrap();
    let node = Node::without_shim();
    let command = Command { args: vec!["app".into()], env: vec!["PATH=/bin".into()], cwd: "/".into() };

    let whole = || {
        let rootfs = Rootfs::open(root).unwrap();
        let seen =
            check::rootfs(rootfs, String::new(), command.clone(), Limits::default(), None, &mut |_| {})
                .unwrap();
        let report = seen.report(&node);
        assert!(report.files >= FILES as u64 && report.bytes > 4 << 30, "{report:?}");
    };
    rustix::fs::sync();
    match fs::write("/proc/sys/vm/drop_caches", "3") {
        Ok(()) => println!("whole root, cold:  {}", measure(1, whole)),
        Err(error) => println!("whole root, cold:  not measured, the page cache cannot be dropped: {error}"),
    }
    println!("whole root, warm:  {}", measure(5, whole));
    println!("largest memory:    {} KiB resident", peak_memory());

    match overlay(&[root], folder.path()) {
        Ok(mounted) => {
            let scans = Scans::below(&folder.path().join("state"));
            let known = || {
                let rootfs = Rootfs::open(&mounted).unwrap();
                let command = command.clone();
                let seen = check::rootfs(
                    rootfs,
                    String::new(),
                    command,
                    Limits::default(),
                    Some(&scans),
                    &mut |_| {},
                );
                assert!(seen.unwrap().report(&node).files >= FILES as u64);
            };
            known();
            println!("image known:       {}", measure(500, known));
            rustix::mount::unmount(&mounted, UnmountFlags::DETACH).unwrap();
            for (what, runtime, finding) in [
                ("fits", "libcudart.so.11.0", None),
                ("warned of", "libcudart.so.12", Some("cuda-minor-newer")),
                ("refused", "libcudart.so.13", Some("cuda-driver-too-old")),
            ] {
                guards_verdict(root, folder.path(), &command, what, runtime, finding);
            }
        }
        Err(error) => println!("image known:       not measured, no overlay can be mounted: {error}"),
    }

    let at_start = || {
        black_box(start::judge(&rootfs, &command, node.shim).unwrap());
    };
    println!("guard's look:      {}", measure(2_000, at_start));
}

/// What the guard's look at an image costs that has `runtime` in a layer of its own: with what is in it known, and with its
/// verdict known too.
fn guards_verdict(
    image: &Path,
    folder: &Path,
    command: &Command,
    what: &str,
    runtime: &str,
    finding: Option<&str>,
) {
    let folder = folder.join(runtime);
    let layer = folder.join("layer");
    let real = layer.join(place::REAL_CUDA.trim_start_matches('/'));
    for path in [layer.join("opt"), real.parent().unwrap().to_owned()] {
        fs::create_dir_all(path).unwrap();
    }
    fs::write(&real, "").unwrap();
    let asks = "void *dlsym(void *, const char *); static const char text[] = \"libcuda.so.1\\0cuCtxCreate_v4\"; \
                void *f(int n) { return dlsym(0, text + n); }";
    library(&layer.join("opt").join(runtime), runtime, asks);
    let functions = |newest: u32| -> String {
        let rows = include_str!("../../vcuda-preload/table/cuda.tsv").lines();
        let names = rows.filter(|row| !row.starts_with('#')).filter_map(|row| {
            let mut columns = row.split('\t');
            let (name, introduced) = (columns.next()?, columns.next()?.parse::<u32>().ok()?);
            (introduced <= newest).then(|| format!("void {name}(void) {{}}\n"))
        });
        names.collect()
    };
    let (driver, shim) = (folder.join("driver.so"), folder.join("shim.so"));
    library(&driver, "libcuda.so.1", &functions(12_040));
    library(&shim, "libcuda.so.1", &functions(u32::MAX));
    let mounted = overlay(&[&layer, image], &folder).unwrap();
    let real = mounted.join(place::REAL_CUDA.trim_start_matches('/'));
    mount_bind(&driver, &real).unwrap();

    let state = folder.join("state");
    let look = || {
        let rootfs = Rootfs::open(&mounted).unwrap();
        let looked =
            image::look(&Scans::below(&state), &rootfs, command, &shim, "550.163.01", &BTreeSet::new());
        let findings = looked.unwrap().findings;
        assert_eq!(findings.first().map(|finding| &*finding.id), finding, "{findings:?}");
    };
    look();
    let judge = || {
        fs::remove_dir_all(state.join("judged")).unwrap();
        look();
    };
    println!("guard, {what}, image known:    {}", measure(200, judge));
    println!("guard, {what}, verdict known:  {}", measure(500, look));
    for path in [&real, &mounted] {
        rustix::mount::unmount(path, UnmountFlags::DETACH).unwrap();
    }
}

/// Builds a library of this text that calls itself `soname`.
fn library(path: &Path, soname: &str, text: &str) {
    let source = path.with_extension("c");
    fs::write(&source, text).unwrap();
    let status = process::Command::new("cc")
        .args(["-shared", "-fPIC", "-nostdlib", &format!("-Wl,-soname,{soname}"), "-o"])
        .arg(path)
        .arg(&source)
        .status();
    assert!(status.unwrap().success(), "{} does not build", source.display());
    fs::remove_file(source).unwrap();
}

/// A container of the image with these layers, the last one first, as a snapshotter mounts it.
fn overlay(layers: &[&Path], folder: &Path) -> Result<PathBuf, Errno> {
    let [upper, work, root] = ["upper", "work", "root"].map(|name| folder.join(name));
    for folder in [&upper, &work, &root] {
        fs::create_dir_all(folder).unwrap();
    }
    let lower = layers.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(":");
    let [upper, work] = [&upper, &work].map(|path| path.display().to_string());
    let options = CString::new(format!("lowerdir={lower},upperdir={upper},workdir={work}")).unwrap();
    mount("overlay", &root, "overlay", MountFlags::empty(), Some(options.as_c_str()))?;
    Ok(root)
}

fn make(root: &Path) {
    let program = fs::read(std::env::current_exe().unwrap()).unwrap();
    let libc = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/libc.so.6", "/lib/aarch64-linux-gnu/libc.so.6"]
        .iter()
        .find_map(|path| Some((PathBuf::from(path), fs::read(path).ok()?)));
    let (place, libc) = libc.unwrap();
    let place = root.join(place.strip_prefix("/").unwrap());
    fs::create_dir_all(place.parent().unwrap()).unwrap();
    fs::write(place, &libc).unwrap();
    fs::create_dir_all(root.join("bin")).unwrap();
    fs::write(root.join("bin/app"), &program).unwrap();
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(root.join("bin/app"), fs::Permissions::from_mode(0o755)).unwrap();

    for n in 0..FOLDERS {
        fs::create_dir_all(root.join(format!("opt/{n}"))).unwrap();
    }
    for n in 0..FILES {
        let path = |name: &str| root.join(format!("opt/{}/{n}{name}", n % FOLDERS));
        if n < LIBRARIES {
            fs::write(path(".so"), &libc).unwrap();
        } else if n < LIBRARIES + LARGE {
            let file = File::create(path("-large.so")).unwrap();
            file.write_all_at(&libc, 0).unwrap();
            file.set_len(LARGE_BYTES).unwrap();
        } else {
            fs::write(path(".py"), b"import os\n").unwrap();
        }
    }
}

/// CPU and wall time of one run, as the mean of `times`.
fn measure(times: u32, mut run: impl FnMut()) -> String {
    let (wall, cpu) = (Instant::now(), cpu_time());
    for _ in 0..times {
        run();
    }
    let (wall, cpu) = (wall.elapsed() / times, (cpu_time() - cpu) / times);
    format!("{:>9.3} ms CPU, {:>9.3} ms in all", cpu.as_secs_f64() * 1e3, wall.as_secs_f64() * 1e3)
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap(), u32::try_from(time.tv_nsec).unwrap())
}

/// The most that this process ever had in memory, in KiB (`VmHWM`, proc(5)).
fn peak_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
