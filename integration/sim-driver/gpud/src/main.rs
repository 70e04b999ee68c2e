//! `sim-gpud`: stands for the kernel module of a simulated NVIDIA driver, and lays its driver root out.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::{
            fs::{PermissionsExt, symlink},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::Ordering::{Relaxed, SeqCst},
    },
    thread,
};

use anyhow::{Context, Result, bail};
use clap::Parser;
use sim_gpud::{Connection, MAX_CLIENTS, MAX_GPUS, Mapped, SOCKET, State, send};

/// Stands for the kernel module of a simulated NVIDIA driver.
///
/// With `--xid`, reports that error on a GPU to the sim-gpud that serves the driver root, and ends. Otherwise lays
/// a driver root out (device nodes, libcuda and NVML from the folder of this program), then serves the
/// processes that use it until it is stopped. Needs root, for device nodes.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Driver root to lay out and serve.
    #[arg(long, value_name = "DIR")]
    root: PathBuf,
    /// How many GPUs.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=16))]
    gpus: u32,
    /// Model of every GPU.
    #[arg(long, default_value = "NVIDIA A100-SXM4-40GB")]
    model: String,
    /// Memory of every GPU in MiB.
    #[arg(long, default_value_t = 40960)]
    memory_mib: u64,
    /// Memory that a process takes with its first context on a GPU, in MiB.
    #[arg(long, default_value_t = 0)]
    context_mib: u64,
    /// Version of the driver.
    #[arg(long, default_value = "550.163.01")]
    driver_version: String,
    /// CUDA version of the driver.
    #[arg(long, default_value_t = 12040)]
    cuda_version: i32,
    /// Let this XID error happen on the GPU that `--gpu` names, under a running sim-gpud.
    #[arg(long)]
    xid: Option<u64>,
    /// Index of the GPU that `--xid`, `--lose` and `--recover` are about.
    #[arg(long, default_value_t = 0)]
    gpu: usize,
    /// Let the GPU that `--gpu` names fall off the bus, under a running sim-gpud.
    #[arg(long)]
    lose: bool,
    /// Bring it back.
    #[arg(long)]
    recover: bool,
    /// A real nvidia-smi to put into the driver root.
    #[arg(long, value_name = "FILE")]
    nvidia_smi: Option<PathBuf>,
}

/// Character devices of NVIDIA's driver (nvidia-modprobe; devices.txt of Linux for 195).
const NVIDIA_MAJOR: u32 = 195;
const UVM_MAJOR: u32 = 510;

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if arguments.xid.is_some() || arguments.lose || arguments.recover {
        return happen(&arguments);
    }
    lay_out(&arguments)?;
    let memory = memory()?;
    let mut state = Mapped::new(memory.as_raw_fd())?;
    fill(state.get_mut(), &arguments);
    serve(&arguments.root.join(SOCKET), Arc::new(state), &memory)
}

/// Lets something happen to a GPU of the module that serves the driver root.
fn happen(arguments: &Arguments) -> Result<()> {
    let socket = arguments.root.join(SOCKET);
    let module = Connection::to(&socket)
        .with_context(|| format!("{}: no sim-gpud answers there; start it first", socket.display()))?;
    let gpu = module.state.gpus[..module.state.gpu_count as usize].get(arguments.gpu);
    let gpu = gpu.with_context(|| format!("GPU {}: there are {}", arguments.gpu, module.state.gpu_count))?;
    if arguments.lose || arguments.recover {
        gpu.lost.store(u32::from(arguments.lose), SeqCst);
    }
    if let Some(xid) = arguments.xid {
        gpu.last_xid.store(xid, SeqCst);
        gpu.xids.fetch_add(1, SeqCst);
    }
    Ok(())
}

fn fill(state: &mut State, arguments: &Arguments) {
    state.cuda_version = arguments.cuda_version;
    state.gpu_count = arguments.gpus;
    copy_text(&mut state.driver_version, &arguments.driver_version);
    for (minor, gpu) in (0..arguments.gpus).zip(&mut state.gpus) {
        gpu.uuid = *b"SIMUgpu\0\0\0\0\0\0\0\0\0";
        gpu.uuid[15] = u8::try_from(minor).unwrap_or(0);
        copy_text(&mut gpu.name, &arguments.model);
        gpu.total = arguments.memory_mib << 20;
        gpu.context = arguments.context_mib << 20;
        gpu.minor = minor;
        gpu.pci_bus = 0x10 + minor;
        gpu.numa = 0;
    }
}

fn copy_text(to: &mut [u8], text: &str) {
    let length = text.len().min(to.len() - 1);
    to[..length].copy_from_slice(&text.as_bytes()[..length]);
}

/// Lays the driver root out as an installed driver's.
fn lay_out(arguments: &Arguments) -> Result<()> {
    let libraries = arguments.root.join("usr/lib/x86_64-linux-gnu");
    let programs = std::env::current_exe()?.parent().context("no folder")?.to_path_buf();
    fs::create_dir_all(&libraries)?;
    for name in ["libcuda", "libnvidia-ml"] {
        let file = format!("{name}.so.{}", arguments.driver_version);
        let from = programs.join(format!("{name}.so"));
        let temporary = libraries.join(format!(".{file}"));
        fs::copy(&from, &temporary)
            .with_context(|| format!("{}: build the simulated driver", from.display()))?;
        fs::rename(&temporary, libraries.join(&file))?;
        for (link, target) in
            [(format!("{name}.so.1"), &file), (format!("{name}.so"), &format!("{name}.so.1"))]
        {
            let link = libraries.join(link);
            let _ = fs::remove_file(&link);
            symlink(target, link)?;
        }
    }
    if let Some(from) = &arguments.nvidia_smi {
        let to = arguments.root.join("usr/bin");
        fs::create_dir_all(&to)?;
        fs::copy(from, to.join("nvidia-smi"))?;
        fs::set_permissions(to.join("nvidia-smi"), fs::Permissions::from_mode(0o755))?;
    }
    let nodes = arguments.root.join("dev");
    fs::create_dir_all(&nodes)?;
    for minor in 0..arguments.gpus {
        node(&nodes.join(format!("nvidia{minor}")), NVIDIA_MAJOR, minor)?;
    }
    node(&nodes.join("nvidiactl"), NVIDIA_MAJOR, 255)?;
    node(&nodes.join("nvidia-uvm"), UVM_MAJOR, 0)?;
    node(&nodes.join("nvidia-uvm-tools"), UVM_MAJOR, 1)
}

fn node(path: &Path, major: u32, minor: u32) -> Result<()> {
    use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
    let _ = fs::remove_file(path);
    mknodat(CWD, path, FileType::CharacterDevice, Mode::from_raw_mode(0o666), makedev(major, minor))
        .with_context(|| format!("{}: device nodes need root", path.display()))?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o666))?)
}

fn memory() -> Result<File> {
    // SAFETY: a new descriptor, owned by the file made of it.
    let memory = unsafe {
        let fd = libc::memfd_create(c"sim-gpud".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error()).context("memfd_create");
        }
        File::from_raw_fd(fd)
    };
    memory.set_len(size_of::<State>() as u64)?;
    Ok(memory)
}

fn serve(socket: &Path, state: Arc<Mapped>, memory: &File) -> Result<()> {
    fs::create_dir_all(socket.parent().context("no folder")?)?;
    if UnixStream::connect(socket).is_ok() {
        bail!("{}: another sim-gpud serves this driver root; stop it first", socket.display());
    }
    let _ = fs::remove_file(socket);
    let listener = UnixListener::bind(socket).with_context(|| socket.display().to_string())?;
    fs::set_permissions(socket, fs::Permissions::from_mode(0o666))?;
    println!("sim-gpud: {} GPU(s) under {}", state.gpu_count, socket.display());
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        let Some((pid, slot)) = admit(&state, &stream) else { continue };
        if send(&stream, slot, memory).is_err() {
            state.clients[slot].pid.store(0, SeqCst);
            continue;
        }
        let state = Arc::clone(&state);
        thread::Builder::new().stack_size(64 << 10).spawn(move || {
            // Ends with the process, however that ends.
            let mut byte = [0];
            while !matches!(stream.read(&mut byte), Ok(0) | Err(_)) {}
            let client = &state.clients[slot];
            for used in &client.used[..MAX_GPUS] {
                used.store(0, SeqCst);
            }
            debug_assert_eq!(client.pid.load(Relaxed), pid);
            client.pid.store(0, SeqCst);
        })?;
    }
    Ok(())
}

fn admit(state: &State, stream: &UnixStream) -> Option<(i32, usize)> {
    let pid = rustix::net::sockopt::socket_peercred(stream).ok()?.pid.as_raw_nonzero().get();
    let free = (0..MAX_CLIENTS).find(|slot| state.clients[*slot].pid.load(SeqCst) == 0)?;
    state.clients[free].pid.store(pid, SeqCst);
    Some((pid, free))
}
