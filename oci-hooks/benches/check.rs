//! What a check costs: the guard's look at a container's start, and `vcuda-check` on a root of 5 GB with 50,000
//! files, cold, warm, and as a container's whose image is known. The root is made in a temporary folder: 1,500 copies of this program and of libraries of
//! this machine, large sparse libraries, and small files for the rest.
//!
//! Figures: CPU time (user and system) and wall time; `cargo bench -p oci-hooks`. Dropping the page cache for the
//! cold figure needs root.

#![expect(clippy::unwrap_used, reason = "a bench that cannot go on ends")]

use std::{
    ffi::CString,
    fs::{self, File},
    hint::black_box,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use oci_hooks::{
    compat::{
        check::{self, Limits, Node},
        start::{self, Command},
    },
    rootfs::Rootfs,
    scans::Scans,
};
use rustix::{
    io::Errno,
    mount::{MountFlags, UnmountFlags, mount},
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

    match overlay(root, folder.path()) {
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
        }
        Err(error) => println!("image known:       not measured, no overlay can be mounted: {error}"),
    }

    let at_start = || {
        black_box(start::judge(&rootfs, &command, node.shim).unwrap());
    };
    println!("guard's look:      {}", measure(2_000, at_start));
}

/// A container of the image at `lower`, as a snapshotter mounts it.
fn overlay(lower: &Path, folder: &Path) -> Result<PathBuf, Errno> {
    let [upper, work, root] = ["upper", "work", "root"].map(|name| folder.join(name));
    for folder in [&upper, &work, &root] {
        fs::create_dir_all(folder).unwrap();
    }
    let [lower, upper, work] = [lower, &upper, &work].map(|path| path.display().to_string());
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
