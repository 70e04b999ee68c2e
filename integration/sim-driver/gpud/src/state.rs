//! The simulated driver's state: what the kernel module keeps for a real driver. The daemon owns it, in a memory file
//! that every process of the driver maps; so that taking and giving memory back costs a few atomic operations.
//!
//! Who holds what is written in the holder's own slot, and only under the GPU's lock, which names its owner. When a
//! process dies at any instruction, the daemon sees its connection close, opens what the dead one had locked, and gives
//! back exactly what its slot says. What is in use on a GPU is always the sum over all slots.
//!
//! Whoever maps the state can write to all of it. That is the one thing that a real kernel module would not let happen.

mod facts;
mod lock;
mod time;

use std::{
    io,
    mem::size_of,
    ops::Deref,
    os::fd::AsFd,
    ptr::NonNull,
    sync::atomic::{
        AtomicI32, AtomicU32, AtomicU64,
        Ordering::{Acquire, Relaxed, Release, SeqCst},
    },
};

use rustix::{
    mm::{MapFlags, ProtFlags, mmap},
    thread::futex,
};

pub use self::facts::{Facts, Peer, text};
pub use self::lock::Gone;
use self::lock::{Lock, Locked};
pub use self::time::{GpuTurns, now};

/// GPUs at most.
pub const MAX_GPUS: usize = 16;

/// Processes at most.
pub const MAX_CLIENTS: usize = 4096;

/// The daemon's own slot, for memory that belongs to no single process.
pub const MODULE: usize = MAX_CLIENTS;

/// NVLinks of a GPU at most (NVML_NVLINK_MAX_LINKS).
pub const MAX_LINKS: usize = 18;

/// Ceilings of cgroups at most.
pub const MAX_CEILINGS: usize = 1024;

/// Ceilings that can apply to one process on one GPU: its own cgroup's and those above.
pub const CEILINGS_DEEP: usize = 4;

/// Events that are remembered.
pub const EVENTS: usize = 256;

const MAGIC: u64 = u64::from_le_bytes(*b"simgpud5");

/// One GPU.
#[repr(C, align(64))]
pub struct Gpu {
    lock: Lock,
    /// Set when the GPU has fallen off the bus.
    pub lost: AtomicU32,
    /// MIG mode.
    pub mig: AtomicU32,
    /// Memory errors that could not be corrected: since the last reset, and ever.
    pub errors: [AtomicU64; 2],
    /// Whether memory with errors waits to be retired.
    pub retires: AtomicU32,
    /// Rows of memory with errors: those that spare ones replace, that wait for it, and whether there was no spare one.
    pub rows: Rows,
    used: AtomicU64,
    /// What it is.
    pub facts: Facts,
}

/// Rows of a GPU's memory that had errors which could not be corrected.
#[repr(C)]
pub struct Rows {
    /// That a spare row has replaced.
    pub remapped: AtomicU32,
    /// That a reset will replace.
    pub pending: AtomicU32,
    /// Not 0 once there was no spare row for one.
    pub failed: AtomicU32,
}

/// One process.
#[repr(C, align(64))]
pub struct Client {
    /// Its process ID on the host; 0 for a free slot.
    pub pid: AtomicI32,
    /// Its process group, when it came.
    pub group: AtomicI32,
    /// Set when the process is gone, but something still holds its connection: a forked child.
    pub gone: AtomicU32,
    /// Contexts that it has on each GPU.
    pub contexts: [AtomicU32; MAX_GPUS],
    /// Kernels that it launched on each GPU, and their threads together.
    pub launches: [AtomicU64; MAX_GPUS],
    /// Threads of those.
    pub threads: [AtomicU64; MAX_GPUS],
    held: [AtomicU64; MAX_GPUS],
    /// Bytes of each GPU that were first its own and that others may now use too; the module holds them.
    pub shared: [AtomicU64; MAX_GPUS],
    /// Numbers of the ceilings that apply to it on each GPU, plus one; 0 for none.
    bound: [[AtomicU32; CEILINGS_DEEP]; MAX_GPUS],
}

impl Client {
    /// Bytes of a GPU that are its own.
    pub fn held(&self, gpu: usize) -> u64 {
        self.held[gpu].load(Relaxed)
    }

    /// The ceilings that apply to it on a GPU.
    pub fn ceilings(&self, gpu: usize) -> impl Iterator<Item = usize> {
        self.bound[gpu].iter().filter_map(|bound| (bound.load(Relaxed) as usize).checked_sub(1))
    }
}

/// What the processes of a cgroup may have of a GPU together (NVML 13.4).
#[repr(C)]
pub struct Ceiling {
    /// The GPU, plus one; 0 for a free place.
    gpu: AtomicU32,
    /// Bytes that are guaranteed.
    pub soft: AtomicU64,
    /// Bytes that are never passed.
    pub hard: AtomicU64,
    /// Bytes in use.
    pub used: AtomicU64,
    /// Those of them that the module holds.
    module: AtomicU64,
}

/// Something that happened.
#[repr(C)]
pub struct Event {
    /// Which one it is, counted from 1; others find here whether the place was used again.
    pub number: AtomicU64,
    /// The GPU.
    pub gpu: AtomicU32,
    /// NVML's type of event.
    pub kind: AtomicU64,
    /// NVML's event data: the XID.
    pub data: AtomicU64,
}

/// All of it.
#[repr(C)]
pub struct State {
    magic: u64,
    /// CUDA version of the driver, such as 12040.
    pub cuda: i32,
    /// GPUs.
    pub gpu_count: u32,
    /// Version of the driver, NUL-terminated.
    pub driver: [u8; 32],
    /// One more than the highest slot that was ever used.
    high: AtomicU32,
    bell: AtomicU32,
    last_event: AtomicU64,
    /// The GPUs.
    pub gpus: [Gpu; MAX_GPUS],
    events: [Event; EVENTS],
    /// Ceilings of cgroups.
    pub ceilings: [Ceiling; MAX_CEILINGS],
    /// The processes, and the daemon's own slot.
    pub clients: [Client; MAX_CLIENTS + 1],
    /// Whose turn it is at each GPU. Large; pages of it that nobody touches take no memory.
    turns: [GpuTurns; MAX_GPUS],
}

/// The mapped state.
pub struct Mapped(NonNull<State>);

// SAFETY: what changes in `State` is atomic; the rest is written before anyone else maps it.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps the state in `file`, which must be of the state's size.
    pub fn new(file: impl AsFd) -> io::Result<Self> {
        let length = rustix::fs::fstat(&file)?.st_size;
        if u64::try_from(length).ok() != Some(size_of::<State>() as u64) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: a new mapping of a file that is as long; it is never unmapped.
        let at = unsafe {
            mmap(
                std::ptr::null_mut(),
                size_of::<State>(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )?
        };
        NonNull::new(at.cast()).map(Self).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Fills the state in, before it is shared.
    pub fn fill(&mut self, driver: &str, cuda: i32, facts: &[Facts]) {
        // SAFETY: the mapping lives as long as the process, and nobody else has it yet.
        let state = unsafe { self.0.as_mut() };
        state.magic = MAGIC;
        state.cuda = cuda;
        state.driver[..driver.len()].copy_from_slice(driver.as_bytes());
        state.gpu_count = u32::try_from(facts.len()).unwrap_or(0);
        for (gpu, facts) in state.gpus.iter_mut().zip(facts) {
            gpu.facts = *facts;
        }
        for (turns, facts) in state.turns.iter().zip(facts) {
            turns.set(facts.turns);
        }
    }

    /// Whether this is a state of this version.
    pub fn known(&self) -> bool {
        self.magic == MAGIC && self.gpu_count as usize <= MAX_GPUS
    }
}

impl Deref for Mapped {
    type Target = State;

    fn deref(&self) -> &State {
        // SAFETY: the mapping lives as long as the process; zeroes and any other bytes are a valid State.
        unsafe { self.0.as_ref() }
    }
}

impl State {
    /// Slots that may be in use.
    pub fn clients(&self) -> impl Iterator<Item = (usize, &Client)> {
        let high = (self.high.load(Acquire) as usize).min(MAX_CLIENTS);
        self.clients[..high].iter().enumerate().filter(|(_, client)| client.pid.load(Relaxed) != 0)
    }

    /// GPUs that exist.
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus[..(self.gpu_count as usize).min(MAX_GPUS)]
    }

    /// Bytes that processes have of a GPU.
    pub fn used(&self, gpu: usize) -> u64 {
        self.gpus[gpu].used.load(Acquire)
    }

    /// Bytes of a GPU that the process in `slot` can still have.
    pub fn free(&self, gpu: usize) -> u64 {
        self.gpus[gpu].facts.usable().saturating_sub(self.used(gpu))
    }

    /// Takes `bytes` of a GPU for the process in `slot`; false, and nothing is taken, where there is not that much,
    /// or a ceiling that applies to the process does not allow it.
    pub fn charge(&self, slot: usize, gpu: usize, bytes: u64) -> bool {
        let (at, client) = (&self.gpus[gpu], &self.clients[slot]);
        let _locked = at.lock.acquire(slot);
        let Some(sum) = at.used.load(Relaxed).checked_add(bytes) else { return false };
        let within = |ceiling: usize| {
            let Some(ceiling) = self.ceilings.get(ceiling) else { return true };
            let sum = ceiling.used.load(Relaxed).checked_add(bytes);
            sum.is_some_and(|sum| sum <= ceiling.hard.load(Relaxed))
        };
        if sum > at.facts.usable() || !client.ceilings(gpu).all(within) {
            return false;
        }
        // The slot first: it is what counts when this process ends here.
        client.held[gpu].fetch_add(bytes, Release);
        at.used.store(sum, Release);
        for ceiling in client.ceilings(gpu).filter_map(|ceiling| self.ceilings.get(ceiling)) {
            ceiling.used.fetch_add(bytes, Release);
        }
        true
    }

    /// Gives `bytes` of a GPU back.
    pub fn discharge(&self, slot: usize, gpu: usize, bytes: u64) {
        let (at, client) = (&self.gpus[gpu], &self.clients[slot]);
        let _locked = at.lock.acquire(slot);
        let held = client.held[gpu].load(Relaxed);
        let bytes = bytes.min(held);
        client.held[gpu].store(held - bytes, Release);
        at.used.store(at.used.load(Relaxed).saturating_sub(bytes), Release);
        for ceiling in client.ceilings(gpu).filter_map(|ceiling| self.ceilings.get(ceiling)) {
            ceiling.used.store(ceiling.used.load(Relaxed).saturating_sub(bytes), Release);
        }
    }

    /// Waits for an event after number `seen`, at most so long, and gives the number of the last one.
    pub fn wait_for_event(&self, seen: u64, at_most: std::time::Duration) -> u64 {
        let rung = self.bell.load(SeqCst);
        let last = self.last_event.load(SeqCst);
        if last != seen || at_most.is_zero() {
            return last;
        }
        let timeout = futex::Timespec {
            tv_sec: i64::try_from(at_most.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: at_most.subsec_nanos().into(),
        };
        // Woken, timed out or interrupted: the caller looks again.
        let _ = futex::wait(&self.bell, futex::Flags::empty(), rung, Some(&timeout));
        self.last_event.load(SeqCst)
    }

    /// Number of the last event.
    pub fn last_event(&self) -> u64 {
        self.last_event.load(SeqCst)
    }

    /// GPU, type and data of an event, while it is remembered.
    pub fn event(&self, number: u64) -> Option<(usize, u64, u64)> {
        let event = &self.events[usize::try_from(number).ok()? % EVENTS];
        let read = (event.gpu.load(Acquire) as usize, event.kind.load(Acquire), event.data.load(Acquire));
        (event.number.load(Acquire) == number && read.0 < MAX_GPUS).then_some(read)
    }
}

/// What only the daemon does.
impl State {
    /// Lets something happen on a GPU.
    pub fn happen(&self, gpu: usize, kind: u64, data: u64) {
        let number = self.last_event.load(SeqCst) + 1;
        let event = &self.events[usize::try_from(number).unwrap_or(0) % EVENTS];
        event.number.store(0, SeqCst);
        event.gpu.store(u32::try_from(gpu).unwrap_or(0), SeqCst);
        event.kind.store(kind, SeqCst);
        event.data.store(data, SeqCst);
        event.number.store(number, SeqCst);
        self.last_event.store(number, SeqCst);
        self.bell.fetch_add(1, SeqCst);
        let _ = futex::wake(&self.bell, futex::Flags::empty(), u32::MAX >> 1);
    }

    /// Gives a free slot to the process `pid`.
    pub fn admit(&self, pid: i32, group: i32) -> Option<usize> {
        let slot = (0..MAX_CLIENTS).find(|slot| self.clients[*slot].pid.load(Relaxed) == 0)?;
        let client = &self.clients[slot];
        client.gone.store(0, Relaxed);
        client.group.store(group, Relaxed);
        client.pid.store(pid, Release);
        let high = u32::try_from(slot + 1).unwrap_or(u32::MAX);
        self.high.fetch_max(high, Release);
        Some(slot)
    }

    /// Closes a GPU's lock for the daemon. Where a process died in the middle of its work, the books are put right.
    fn lock_for_module(&self, gpu: usize, gone: Gone<'_>) -> Locked<'_> {
        let locked = self.gpus[gpu].lock.acquire_for_module(gone);
        if locked.stolen {
            self.recount(gpu);
            self.repair_turns(gpu);
        }
        locked
    }

    /// Opens what a process that is gone had closed.
    pub fn unlock(&self, slot: usize, gone: Gone<'_>) {
        for (gpu, at) in self.gpus.iter().enumerate() {
            if at.lock.owner() == Some(slot) {
                drop(self.lock_for_module(gpu, gone));
            }
        }
    }

    /// Takes a slot back, and everything that its process held.
    pub fn dismiss(&self, slot: usize, gone: Gone<'_>) {
        let client = &self.clients[slot];
        for gpu in 0..MAX_GPUS {
            let _locked = self.lock_for_module(gpu, gone);
            for counted in [&client.launches, &client.threads] {
                counted[gpu].store(0, Relaxed);
            }
            client.contexts[gpu].store(0, Relaxed);
            client.shared[gpu].store(0, Relaxed);
            client.held[gpu].store(0, Relaxed);
            for bound in &client.bound[gpu] {
                bound.store(0, Relaxed);
            }
            if gpu < self.gpus().len() {
                self.turns[gpu].advance(now());
                self.turns[gpu].end(slot);
            }
            self.recount(gpu);
        }
        client.pid.store(0, Release);
    }

    /// Moves `bytes` that the process in `slot` holds to the daemon's own slot, under the same ceilings: several
    /// processes are going to use them. False where the process does not hold so much.
    pub fn take_over(&self, slot: usize, gpu: usize, bytes: u64, gone: Gone<'_>) -> bool {
        let (client, own) = (&self.clients[slot], &self.clients[MODULE]);
        let _locked = self.lock_for_module(gpu, gone);
        let held = client.held[gpu].load(Relaxed);
        if held < bytes {
            return false;
        }
        client.held[gpu].store(held - bytes, Release);
        own.held[gpu].fetch_add(bytes, Release);
        for ceiling in client.ceilings(gpu).filter_map(|ceiling| self.ceilings.get(ceiling)) {
            ceiling.module.fetch_add(bytes, Release);
        }
        true
    }

    /// Gives back `bytes` that the daemon took over, to the GPU and to `ceilings`.
    pub fn let_go(&self, gpu: usize, bytes: u64, ceilings: &[usize], gone: Gone<'_>) {
        let _locked = self.lock_for_module(gpu, gone);
        let (at, own) = (&self.gpus[gpu], &self.clients[MODULE]);
        own.held[gpu].store(own.held[gpu].load(Relaxed).saturating_sub(bytes), Release);
        at.used.store(at.used.load(Relaxed).saturating_sub(bytes), Release);
        for ceiling in ceilings.iter().filter_map(|ceiling| self.ceilings.get(*ceiling)) {
            ceiling.used.store(ceiling.used.load(Relaxed).saturating_sub(bytes), Release);
            ceiling.module.store(ceiling.module.load(Relaxed).saturating_sub(bytes), Release);
        }
    }

    /// Sets the ceilings that apply to the process in `slot` on a GPU.
    pub fn bind(&self, slot: usize, gpu: usize, ceilings: &[usize], gone: Gone<'_>) {
        let _locked = self.lock_for_module(gpu, gone);
        for (at, bound) in self.clients[slot].bound[gpu].iter().enumerate() {
            let number = ceilings.get(at).and_then(|ceiling| u32::try_from(ceiling + 1).ok());
            bound.store(number.unwrap_or(0), Relaxed);
        }
        self.recount(gpu);
    }

    /// A new ceiling on a GPU, without limits; none where there are too many.
    pub fn new_ceiling(&self, gpu: usize) -> Option<usize> {
        let free = self.ceilings.iter().position(|ceiling| ceiling.gpu.load(Relaxed) == 0)?;
        let ceiling = &self.ceilings[free];
        ceiling.soft.store(0, Relaxed);
        ceiling.hard.store(u64::MAX, Relaxed);
        ceiling.used.store(0, Relaxed);
        ceiling.module.store(0, Relaxed);
        ceiling.gpu.store(u32::try_from(gpu + 1).unwrap_or(0), Release);
        Some(free)
    }

    /// Forgets a ceiling that no process is bound to any more.
    pub fn drop_ceiling(&self, ceiling: usize) {
        self.ceilings[ceiling].gpu.store(0, Release);
    }

    /// Counts anew what is in use on a GPU. Under its lock.
    fn recount(&self, gpu: usize) {
        let held = |client: &Client| client.held[gpu].load(Relaxed);
        let high = (self.high.load(Acquire) as usize).min(MAX_CLIENTS);
        let all = self.clients[..high].iter().chain(&self.clients[MODULE..]);
        let mut used: u64 = 0;
        let number = u32::try_from(gpu + 1).unwrap_or(0);
        let here = |ceiling: &&Ceiling| ceiling.gpu.load(Relaxed) == number;
        for ceiling in self.ceilings.iter().filter(here) {
            ceiling.used.store(ceiling.module.load(Relaxed), Relaxed);
        }
        for client in all {
            let own = held(client);
            used = used.saturating_add(own);
            for ceiling in client.ceilings(gpu).filter_map(|ceiling| self.ceilings.get(ceiling)) {
                ceiling.used.fetch_add(own, Relaxed);
            }
        }
        self.gpus[gpu].used.store(used, Release);
    }
}
