//! A process's way to the simulated kernel module: how a library finds the daemon of its driver root, which GPUs the
//! process may use, and requests.

use std::{
    fs::File,
    io,
    os::fd::{BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::{
    state::{MAX_CLIENTS, Mapped},
    wire::{self, Frame, WORDS, kind, request},
};

/// Where a process finds the daemon, below the driver root: a real driver's persistence daemon has its socket there, so
/// whatever brings a real driver into a container brings it along.
pub const SOCKET: &str = "run/nvidia-persistenced/socket";

/// Names another socket, for a test.
const SOCKET_VARIABLE: &str = "VCUDA_SIM_SOCKET";

/// The driver root that the library at `library` belongs to: the nearest folder above it that has the daemon's socket.
pub fn root_of(library: &Path) -> Option<PathBuf> {
    let real = library.canonicalize().ok()?;
    real.ancestors().skip(1).find(|above| above.join(SOCKET).exists()).map(Into::into)
}

/// A connection to the daemon; the daemon takes its end for the end of the process.
pub struct Link {
    /// The state.
    pub state: Mapped,
    /// This process's slot; none for NVML.
    pub slot: usize,
    /// The driver root, as this process sees it.
    pub root: PathBuf,
    socket: Mutex<OwnedFd>,
}

impl Link {
    /// Connects a process that uses CUDA through the library at `library`.
    pub fn cuda(library: &Path) -> io::Result<Self> {
        Self::open(library, kind::CUDA)
    }

    /// Connects a process that uses NVML through the library at `library`.
    pub fn nvml(library: &Path) -> io::Result<Self> {
        Self::open(library, kind::NVML)
    }

    fn open(library: &Path, kind: u64) -> io::Result<Self> {
        if let Some(socket) = std::env::var_os(SOCKET_VARIABLE) {
            let socket = PathBuf::from(socket);
            let root = socket.ancestors().nth(3).unwrap_or(Path::new("/")).to_path_buf();
            return Self::to(&socket, root, kind);
        }
        let root = root_of(library).ok_or(io::ErrorKind::NotFound)?;
        Self::to(&root.join(SOCKET), root, kind)
    }

    /// Connects to the daemon at `socket`.
    pub fn to(socket: &Path, root: PathBuf, kind: u64) -> io::Result<Self> {
        let own = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        connect(&own, &SocketAddrUnix::new(socket)?)?;
        let (answer, state) = exchange(&own, [request::HELLO, kind, 0, 0, 0, 0, 0, 0], None)?;
        let state = Mapped::new(state.ok_or(io::ErrorKind::InvalidData)?)?;
        let slot = usize::try_from(answer[1]).unwrap_or(usize::MAX);
        if !state.known() || slot > MAX_CLIENTS {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self { state, slot, root, socket: Mutex::new(own) })
    }

    /// Asks the daemon, and waits for its answer; an error number as the answer is an error.
    pub fn ask(
        &self,
        words: &[u64],
        descriptor: Option<BorrowedFd<'_>>,
    ) -> io::Result<(Frame, Option<OwnedFd>)> {
        let mut frame = [0; WORDS];
        frame[..words.len()].copy_from_slice(words);
        exchange(&self.socket.lock().unwrap_or_else(PoisonError::into_inner), frame, descriptor)
    }

    /// GPUs that this process may use, in the order of their PCI addresses: their device nodes are there, and its
    /// permissions and cgroup let it open them.
    pub fn accessible(&self) -> Vec<usize> {
        let gpus = self.state.gpus();
        let mut there: Vec<usize> = (0..gpus.len())
            .filter(|gpu| self.node(&format!("nvidia{}", gpus[*gpu].facts.minor)).is_ok())
            .collect();
        there.sort_by_key(|gpu| {
            let facts = &gpus[*gpu].facts;
            (facts.pci_domain, facts.pci_bus, facts.pci_device)
        });
        there
    }

    /// Opens a device node as a real driver's library does.
    pub fn node(&self, name: &str) -> io::Result<()> {
        let opened = File::options().read(true).write(true).open(self.root.join("dev").join(name));
        match opened {
            // The node is there and may be opened, but no kernel module answers behind it.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV)) => Ok(()),
            other => other.map(drop),
        }
    }
}

fn exchange(
    socket: &OwnedFd,
    frame: Frame,
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<(Frame, Option<OwnedFd>)> {
    wire::send(socket, &frame, descriptor)?;
    let (answer, descriptor) = wire::receive(socket)?;
    match i32::try_from(answer[0]) {
        Ok(0) => Ok((answer, descriptor)),
        Ok(error) => Err(io::Error::from_raw_os_error(error)),
        Err(_) => Err(io::ErrorKind::InvalidData.into()),
    }
}
