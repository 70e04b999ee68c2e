//! The daemon that stands for the kernel module: it hands the shared state to every process that connects, keeps what
//! belongs to more than one of them, and cleans up after those that end. One thread, one loop.

mod ceilings;
mod control;

use std::{
    collections::HashMap,
    fs,
    io::{self, Read},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::PermissionsExt, net::UnixListener},
    },
    path::Path,
    sync::Arc,
};

use anyhow::{Context, Result, bail};
use rustix::{
    event::{PollFd, PollFlags, Timespec, epoll, poll},
    fs::{MemfdFlags, fstat, ftruncate, memfd_create},
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
        socketpair, sockopt::socket_peercred,
    },
    process::{Pid, PidfdFlags, pidfd_open},
};

pub use self::control::{Command, ask};
use self::{ceilings::Ceilings, control::Control};
use crate::{
    config::Machine,
    link::SOCKET,
    state::{MAX_GPUS, Mapped, State},
    wire::{self, Frame, WORDS, kind, request},
};

/// Where `sim-gpud ctl` finds the daemon, below the driver root. Root only.
const CONTROL: &str = "run/sim-gpud/control";

/// What the loop listens to.
enum Source {
    /// New processes.
    Listener(OwnedFd),
    /// New commands.
    Control(UnixListener),
    /// A process's connection.
    Client(Client),
    /// The end of the process in this slot.
    Process { slot: usize },
    /// Our end of a descriptor that stands for memory.
    Memory { number: u64, _end: OwnedFd },
}

struct Client {
    socket: Arc<OwnedFd>,
    /// None until it has said what it is, and for NVML.
    slot: Option<usize>,
    pid: i32,
    root: bool,
    /// The source that tells its process's end.
    process: Option<u64>,
}

/// Memory that several processes may use. It stands in the daemon's own slot.
struct Memory {
    gpu: usize,
    bytes: u64,
    /// Slot that it came from, while that process uses it.
    owner: Option<usize>,
    ceilings: Vec<usize>,
    /// Times that each process uses it.
    users: HashMap<usize, u32>,
    /// The descriptor's inode, while a copy of it is open anywhere.
    descriptor: Option<u64>,
}

/// A block that others may open while its owner lives.
struct Published {
    slot: usize,
    gpu: u64,
    bytes: u64,
}

/// The daemon.
pub struct Daemon {
    state: Mapped,
    memory_file: OwnedFd,
    epoll: OwnedFd,
    sources: HashMap<u64, Source>,
    next: u64,
    memories: HashMap<u64, Memory>,
    published: HashMap<(u64, u64), Published>,
    ceilings: Ceilings,
    /// The processes in the slots.
    processes: HashMap<usize, Process>,
    ended: Ended,
}

/// Nanoseconds of each GPU that processes had which are gone, by process group.
type Ended = HashMap<i32, [u64; MAX_GPUS]>;

/// A process, by what tells its end: the process itself, and its connection, which also ends with an `exec`.
struct Process {
    pidfd: OwnedFd,
    socket: Arc<OwnedFd>,
}

/// Whether the process in a slot is gone: it can do nothing any more, though the daemon may not have heard of it yet.
fn gone(processes: &HashMap<usize, Process>, slot: usize) -> bool {
    let Some(process) = processes.get(&slot) else { return true };
    let mut wanted =
        [PollFd::new(&process.pidfd, PollFlags::IN), PollFd::new(&process.socket, PollFlags::empty())];
    poll(&mut wanted, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ended| ended > 0)
}

impl Daemon {
    /// The daemon of a driver root, which from now on answers at its sockets.
    pub fn start(root: &Path, machine: &Machine) -> Result<Self> {
        let memory_file = memfd_create("sim-gpud", MemfdFlags::CLOEXEC)?;
        ftruncate(&memory_file, size_of::<State>() as u64)?;
        let mut state = Mapped::new(&memory_file)?;
        state.fill(&machine.driver, machine.cuda(), &machine.facts()?);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut daemon = Self {
            state,
            memory_file,
            epoll,
            sources: HashMap::new(),
            next: 0,
            memories: HashMap::new(),
            published: HashMap::new(),
            ceilings: Ceilings::default(),
            processes: HashMap::new(),
            ended: HashMap::new(),
        };
        let control = root.join(CONTROL);
        free(&control, SocketType::STREAM)?;
        let listener = UnixListener::bind(&control).with_context(|| control.display().to_string())?;
        fs::set_permissions(&control, fs::Permissions::from_mode(0o600))?;
        daemon.add(Source::Control(listener))?;

        let socket = root.join(SOCKET);
        free(&socket, SocketType::SEQPACKET)?;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        bind(&listener, &SocketAddrUnix::new(&socket)?).with_context(|| socket.display().to_string())?;
        fs::set_permissions(&socket, fs::Permissions::from_mode(0o666))?;
        listen(&listener, 4096)?;
        daemon.add(Source::Listener(listener))?;
        Ok(daemon)
    }

    /// Serves until an error that concerns not just one process.
    pub fn serve(mut self) -> Result<()> {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Err(rustix::io::Errno::INTR) => continue,
                other => other?,
            };
            for event in &events {
                self.turn(event.data.u64())?;
            }
        }
    }

    fn add(&mut self, source: Source) -> io::Result<u64> {
        self.next += 1;
        let number = self.next;
        let descriptor = match &source {
            Source::Listener(socket) => socket.as_fd(),
            Source::Control(listener) => listener.as_fd(),
            Source::Client(client) => client.socket.as_fd(),
            Source::Process { slot } => self.processes[slot].pidfd.as_fd(),
            Source::Memory { _end: end, .. } => end.as_fd(),
        };
        // Of a descriptor that stands for memory, only its end matters, which is always told.
        let flags = match &source {
            Source::Memory { .. } => epoll::EventFlags::empty(),
            _ => epoll::EventFlags::IN,
        };
        epoll::add(&self.epoll, descriptor, epoll::EventData::new_u64(number), flags)?;
        self.sources.insert(number, source);
        Ok(number)
    }

    fn turn(&mut self, number: u64) -> Result<()> {
        // Gone since this round began.
        let Some(source) = self.sources.get(&number) else { return Ok(()) };
        match source {
            Source::Listener(listener) => match accept_with(listener, SocketFlags::CLOEXEC) {
                Ok(socket) => self.admit(socket)?,
                // Its process is gone already.
                Err(rustix::io::Errno::CONNABORTED | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("no connection can be accepted"),
            },
            Source::Control(listener) => {
                if let Ok((stream, _)) = listener.accept() {
                    self.state.catch_up(&|slot| gone(&self.processes, slot));
                    Control { state: &self.state, ended: &self.ended }.serve(stream);
                }
            }
            Source::Client(_) => self.hear(number),
            Source::Process { slot } => {
                // Its connection may live on in a forked child, as a real driver's file descriptors do.
                self.state.clients[*slot].gone.store(1, std::sync::atomic::Ordering::Relaxed);
                self.state.unlock(*slot, &|slot| gone(&self.processes, slot));
                self.state.drop_work(*slot, &|slot| gone(&self.processes, slot));
                // The descriptor stays, to be asked; it has told its end.
                epoll::delete(&self.epoll, &self.processes[slot].pidfd)?;
                self.sources.remove(&number);
            }
            Source::Memory { number: memory, .. } => {
                let memory = *memory;
                self.sources.remove(&number);
                if let Some(at) = self.memories.get_mut(&memory) {
                    at.descriptor = None;
                }
                self.sweep(memory);
            }
        }
        Ok(())
    }

    fn admit(&mut self, socket: OwnedFd) -> Result<()> {
        // The process that connected, as the kernel knows it on this side: the host's PID of a container's process.
        let Ok(peer) = socket_peercred(&socket) else { return Ok(()) };
        let (pid, root) = (peer.pid.as_raw_nonzero().get(), peer.uid.is_root());
        self.add(Source::Client(Client { socket: Arc::new(socket), slot: None, pid, root, process: None }))?;
        Ok(())
    }

    fn hear(&mut self, number: u64) {
        let Some(Source::Client(client)) = self.sources.get(&number) else { return };
        let Ok((frame, descriptor)) = wire::receive(&*client.socket) else {
            self.farewell(number);
            return;
        };
        let answer = self.answer(number, &frame, descriptor);
        let Some(Source::Client(client)) = self.sources.get(&number) else { return };
        let (mut words, mut along) = ([0; WORDS], None);
        match answer {
            Ok((answer, descriptor)) => {
                words[1..=answer.len()].copy_from_slice(&answer);
                along = descriptor;
            }
            Err(error) => {
                let error = error.raw_os_error().unwrap_or(libc::EINVAL);
                words[0] = u64::try_from(error).unwrap_or(1);
            }
        }
        // One that does not take its answers must not hold up the others.
        let _ = rustix::io::ioctl_fionbio(&*client.socket, true);
        if wire::send(&*client.socket, &words, along.as_ref().map(AsFd::as_fd)).is_err() {
            self.farewell(number);
        } else {
            let _ = rustix::io::ioctl_fionbio(&*client.socket, false);
        }
    }

    fn farewell(&mut self, number: u64) {
        let Some(Source::Client(client)) = self.sources.remove(&number) else { return };
        if let Some(process) = client.process {
            self.sources.remove(&process);
        }
        let Some(slot) = client.slot else { return };
        // Whoever lets its connection go uses the driver no more, by its end or by an exec.
        self.processes.remove(&slot);
        self.published.retain(|_, published| published.slot != slot);
        let used: Vec<u64> = self
            .memories
            .iter_mut()
            .filter_map(|(number, memory)| {
                memory.owner = memory.owner.filter(|owner| *owner != slot);
                memory.users.remove(&slot).map(|_| *number)
            })
            .collect();
        for memory in used {
            self.sweep(memory);
        }
        self.state.drop_work(slot, &|slot| gone(&self.processes, slot));
        let group = self.state.clients[slot].group.load(std::sync::atomic::Ordering::Relaxed);
        let ended = self.ended.entry(group).or_default();
        for (sum, busy) in ended.iter_mut().zip(self.state.busy(slot)) {
            *sum += busy;
        }
        self.state.dismiss(slot, &|slot| gone(&self.processes, slot));
    }

    fn answer(
        &mut self,
        number: u64,
        frame: &Frame,
        descriptor: Option<OwnedFd>,
    ) -> io::Result<([u64; 3], Option<OwnedFd>)> {
        let refuse = |errno: i32| Err(io::Error::from_raw_os_error(errno));
        let Some(Source::Client(client)) = self.sources.get(&number) else { return refuse(libc::ENOTCONN) };
        let (slot, root) = (client.slot, client.root);
        let [what, a, b, c, ..] = *frame;
        let gpu = usize::try_from(a).ok().filter(|gpu| *gpu < self.state.gpus().len());
        match (what, slot, gpu) {
            (request::HELLO, None, _) => {
                let slot = if a == kind::CUDA { Some(self.enter(number)?) } else { None };
                let state = self.memory_file.try_clone()?;
                Ok(([slot.map_or(0, |slot| slot as u64), 0, 0], Some(state)))
            }
            (request::SHARE, Some(slot), Some(gpu)) => self.share(slot, gpu, b),
            (request::ADOPT, Some(slot), _) => self.adopt(slot, descriptor),
            (request::DROP, Some(slot), _) => {
                let Some(memory) = self.memories.get_mut(&a) else { return refuse(libc::ENOENT) };
                let Some(times) = memory.users.get_mut(&slot) else { return refuse(libc::ENOENT) };
                *times -= 1;
                if *times == 0 {
                    memory.users.remove(&slot);
                    if memory.owner == Some(slot) {
                        memory.owner = None;
                        let shared = &self.state.clients[slot].shared[memory.gpu];
                        shared.fetch_sub(memory.bytes, std::sync::atomic::Ordering::Relaxed);
                    }
                }
                self.sweep(a);
                Ok(([0; 3], None))
            }
            (request::PUBLISH, Some(slot), _) => {
                let mut name = [0; 16];
                fs::File::open("/dev/urandom")?.read_exact(&mut name)?;
                let (one, other) = name.split_at(8);
                let word = |half: &[u8]| half.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
                let name = (word(one), word(other));
                self.published.insert(name, Published { slot, gpu: a, bytes: b });
                Ok(([name.0, name.1, 0], None))
            }
            (request::WITHDRAW, Some(slot), _) => {
                if self.published.get(&(a, b)).is_some_and(|published| published.slot == slot) {
                    self.published.remove(&(a, b));
                }
                Ok(([0; 3], None))
            }
            (request::OPEN, Some(_), _) => match self.published.get(&(a, b)) {
                // One's own block is not opened a second time: cuIpcOpenMemHandle refuses that as well.
                Some(published) if Some(published.slot) != slot => {
                    Ok(([published.slot as u64, published.gpu, published.bytes], None))
                }
                _ => refuse(libc::ENOENT),
            },
            (request::CATCH_UP, _, _) => {
                Ok(([self.state.catch_up(&|slot| gone(&self.processes, slot)), 0, 0], None))
            }
            (request::SET_CEILING, _, Some(gpu)) => {
                if !root {
                    return refuse(libc::EPERM);
                }
                let Some(folder) = descriptor else { return refuse(libc::EBADF) };
                let gone = |slot| gone(&self.processes, slot);
                self.ceilings.set(&self.state, gpu, &folder, (b, c), &gone)?;
                Ok(([0; 3], None))
            }
            (request::GET_CEILING, _, Some(gpu)) => {
                let Some(folder) = descriptor else { return refuse(libc::EBADF) };
                Ok((self.ceilings.get(&self.state, gpu, &folder)?, None))
            }
            _ => refuse(libc::EINVAL),
        }
    }

    /// Gives a process its slot.
    fn enter(&mut self, number: u64) -> io::Result<usize> {
        let Some(Source::Client(client)) = self.sources.get(&number) else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let (pid, socket) = (client.pid, Arc::clone(&client.socket));
        let pidfd = Pid::from_raw(pid)
            .ok_or(io::ErrorKind::NotConnected.into())
            .and_then(|pid| Ok::<_, io::Error>(pidfd_open(pid, PidfdFlags::empty())?))?;
        // A process that is just ending has none any more.
        let group =
            rustix::process::getpgid(Pid::from_raw(pid)).map_or(0, |group| group.as_raw_nonzero().get());
        let slot = self.state.admit(pid, group).ok_or(io::Error::from_raw_os_error(libc::EAGAIN))?;
        self.processes.insert(slot, Process { pidfd, socket });
        self.ceilings.bind(&self.state, slot, pid, &|slot| gone(&self.processes, slot));
        let process = self.add(Source::Process { slot })?;
        if let Some(Source::Client(client)) = self.sources.get_mut(&number) {
            (client.slot, client.process) = (Some(slot), Some(process));
        }
        Ok(slot)
    }

    fn share(&mut self, slot: usize, gpu: usize, bytes: u64) -> io::Result<([u64; 3], Option<OwnedFd>)> {
        let (own, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let ceilings: Vec<usize> = self.state.clients[slot].ceilings(gpu).collect();
        if !self.state.take_over(slot, gpu, bytes, &|slot| gone(&self.processes, slot)) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        self.state.clients[slot].shared[gpu].fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
        self.next += 1;
        let number = self.next;
        let memory = Memory {
            gpu,
            bytes,
            owner: Some(slot),
            ceilings,
            users: HashMap::from([(slot, 1)]),
            descriptor: Some(fstat(&theirs)?.st_ino),
        };
        self.memories.insert(number, memory);
        self.add(Source::Memory { number, _end: own })?;
        Ok(([number, 0, 0], Some(theirs)))
    }

    fn adopt(&mut self, slot: usize, end: Option<OwnedFd>) -> io::Result<([u64; 3], Option<OwnedFd>)> {
        let inode = Some(fstat(end.ok_or(io::ErrorKind::InvalidInput)?)?.st_ino);
        let known = self.memories.iter_mut().find(|(_, memory)| memory.descriptor == inode);
        let (number, memory) = known.ok_or(io::Error::from_raw_os_error(libc::ENOENT))?;
        *memory.users.entry(slot).or_default() += 1;
        Ok(([*number, memory.gpu as u64, memory.bytes], None))
    }

    /// Gives memory back that nobody can reach any more.
    fn sweep(&mut self, number: u64) {
        let Some(memory) = self.memories.get(&number) else { return };
        if memory.users.is_empty() && memory.descriptor.is_none() {
            let gone = |slot| gone(&self.processes, slot);
            self.state.let_go(memory.gpu, memory.bytes, &memory.ceilings, &gone);
            self.memories.remove(&number);
        }
    }
}

/// Makes room for a socket, unless someone answers at it.
fn free(socket: &Path, kind: SocketType) -> Result<()> {
    fs::create_dir_all(socket.parent().context("no folder")?)?;
    let probe = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    let address = SocketAddrUnix::new(socket).with_context(|| socket.display().to_string())?;
    if rustix::net::connect(&probe, &address).is_ok() {
        bail!("{}: another sim-gpud serves this driver root; stop it first", socket.display());
    }
    match fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| socket.display().to_string())
        }
        _ => Ok(()),
    }
}
