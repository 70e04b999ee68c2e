//! The simulated driver's shared state: what the kernel module keeps for a real driver. The daemon owns it; the two
//! libraries map it.
//!
//! A process connects to the daemon's socket and gets a slot and the state's memory. Its memory on every GPU is one
//! word in its slot, and what is in use on a GPU is the sum over all slots: an allocation adds to its own word first
//! and takes it back where the sum is too much. So nothing a process does can be lost when it is killed: the daemon
//! sees its connection close, as the kernel would see its file descriptor, and clears the slot.

use std::{
    fs::File,
    io,
    mem::{self, size_of},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering::SeqCst},
};

/// GPUs at most.
pub const MAX_GPUS: usize = 16;

/// Processes at most.
pub const MAX_CLIENTS: usize = 4096;

/// Where a process finds the daemon, below the driver root. A real driver has its persistence daemon there.
pub const SOCKET: &str = "run/nvidia-persistenced/socket";

const MAGIC: u64 = u64::from_le_bytes(*b"simgpud1");

/// One GPU.
#[repr(C)]
pub struct Gpu {
    /// UUID bytes.
    pub uuid: [u8; 16],
    /// Model, NUL-terminated.
    pub name: [u8; 64],
    /// Memory in bytes.
    pub total: u64,
    /// Bytes that a process takes with its first context.
    pub context: u64,
    /// Number of the device node.
    pub minor: u32,
    /// PCI bus.
    pub pci_bus: u32,
    /// NUMA node, −1 for none.
    pub numa: i32,
    /// Set when the GPU has fallen off the bus.
    pub lost: AtomicU32,
    /// Number of XID events so far.
    pub xids: AtomicU64,
    /// The last of them.
    pub last_xid: AtomicU64,
}

/// One process.
#[repr(C)]
pub struct Client {
    /// Its process ID on the host; 0 for a free slot.
    pub pid: AtomicI32,
    /// Bytes it holds on each GPU.
    pub used: [AtomicU64; MAX_GPUS],
}

/// All of it.
#[repr(C)]
pub struct State {
    magic: u64,
    /// CUDA version of the driver, such as 12040.
    pub cuda_version: i32,
    /// GPUs.
    pub gpu_count: u32,
    /// Version of the driver, NUL-terminated.
    pub driver_version: [u8; 32],
    /// The GPUs.
    pub gpus: [Gpu; MAX_GPUS],
    /// The processes.
    pub clients: [Client; MAX_CLIENTS],
}

/// The mapped state.
pub struct Mapped(NonNull<State>);

// SAFETY: what changes in `State` is atomic; the rest is written before anyone else maps it.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps the state in `fd`.
    pub fn new(fd: RawFd) -> io::Result<Self> {
        // SAFETY: a new mapping of a file that is at least this long; it is never unmapped.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<State>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(at.cast()).map(Self).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Before the state is shared.
    pub fn get_mut(&mut self) -> &mut State {
        // SAFETY: the mapping lives as long as the process, and nobody else has it yet.
        let state = unsafe { self.0.as_mut() };
        state.magic = MAGIC;
        state
    }
}

impl std::ops::Deref for Mapped {
    type Target = State;

    fn deref(&self) -> &State {
        // SAFETY: the mapping lives as long as the process.
        unsafe { self.0.as_ref() }
    }
}

impl State {
    /// Bytes in use on a GPU.
    pub fn used(&self, gpu: usize) -> u64 {
        self.clients.iter().map(|client| client.used[gpu].load(SeqCst)).sum()
    }

    /// Takes `bytes` of a GPU for the process in `slot`; false where it has not that much.
    pub fn take(&self, slot: usize, gpu: usize, bytes: u64) -> bool {
        let own = &self.clients[slot].used[gpu];
        // Two that collide at the edge both step back; one gets through when it tries again.
        for attempt in 0..64_u32 {
            own.fetch_add(bytes, SeqCst);
            if self.used(gpu) <= self.gpus[gpu].total {
                return true;
            }
            own.fetch_sub(bytes, SeqCst);
            if self.used(gpu).saturating_add(bytes) > self.gpus[gpu].total {
                return false;
            }
            for _ in 0..attempt * 16 * (1 + u32::try_from(slot).unwrap_or(0) % 7) {
                std::hint::spin_loop();
            }
        }
        false
    }

    /// Gives `bytes` back.
    pub fn give(&self, slot: usize, gpu: usize, bytes: u64) {
        self.clients[slot].used[gpu].fetch_sub(bytes, SeqCst);
    }
}

/// A connection to the daemon; the daemon takes its end for the end of the process.
pub struct Connection {
    /// The state.
    pub state: Mapped,
    /// This process's slot.
    pub slot: usize,
    stream: UnixStream,
}

impl Connection {
    /// Connects to the daemon that belongs to the driver root that the library at `library` was loaded from.
    pub fn open(library: &Path) -> io::Result<Self> {
        let socket = match std::env::var_os("VCUDA_SIM_SOCKET") {
            Some(socket) => PathBuf::from(socket),
            None => root_of(library).join(SOCKET),
        };
        Self::to(&socket)
    }

    /// Connects to the daemon at `socket`.
    pub fn to(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        let (slot, fd) = receive(&stream)?;
        let state = Mapped::new(fd.as_raw_fd())?;
        if state.magic != MAGIC || slot >= MAX_CLIENTS {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self { state, slot, stream })
    }

    /// Descriptor of the connection; a forked child closes it.
    pub fn fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }
}

/// The driver root of a library at `<root>/usr/lib/…/lib….so`; `/` for one that lies elsewhere.
pub fn root_of(library: &Path) -> PathBuf {
    let real = library.canonicalize().unwrap_or_else(|_| library.into());
    let mut at = real.as_path();
    while let Some(parent) = at.parent() {
        if at.file_name().is_some_and(|name| name == "usr") && parent.join(SOCKET).exists() {
            return parent.into();
        }
        at = parent;
    }
    "/".into()
}

/// Sends a process its slot and the state.
pub fn send(stream: &UnixStream, slot: usize, state: &File) -> io::Result<()> {
    let mut bytes = (slot as u64).to_le_bytes();
    let mut iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = [0_u64; 4];
    // SAFETY: plain data; all pointers are to locals that outlive the call, and `control` holds one descriptor.
    unsafe {
        let mut message: libc::msghdr = mem::zeroed();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(4) as usize;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(state.as_raw_fd());
        if libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

fn receive(stream: &UnixStream) -> io::Result<(usize, OwnedFd)> {
    let mut bytes = [0_u8; 8];
    let mut iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = [0_u64; 4];
    // SAFETY: as in `send`; the descriptor is ours once received.
    unsafe {
        let mut message: libc::msghdr = mem::zeroed();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = mem::size_of_val(&control);
        let got = libc::recvmsg(stream.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC);
        if got != 8 {
            return Err(io::Error::last_os_error());
        }
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if header.is_null() || (*header).cmsg_type != libc::SCM_RIGHTS {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let fd = libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned();
        let slot = usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(usize::MAX);
        Ok((slot, OwnedFd::from_raw_fd(fd)))
    }
}
