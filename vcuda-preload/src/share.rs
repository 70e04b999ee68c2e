//! This container's share as the process uses it: which GPU a device is, and taking and giving its memory.

use std::{
    io::{self, Write},
    path::Path,
    sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use region::{Exported, Limits, Process, Usage, place};

use crate::{
    cuda::{
        binding, current_context, ipc,
        types::{CUDA_SUCCESS, Context, Device, Stream},
    },
    errno, log,
    real::driver,
    state::{CONTEXTS, State, state},
};

/// The open share.
pub(crate) struct Share {
    limits: Limits,
    usage: Usage,
    state: &'static State,
}

/// Where an allocation goes: a device, the GPU of the share that it is, and the context that it dies with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// None for a device that is not of this share: it has no memory for us.
    pub gpu: Option<usize>,
    /// Number of the context; 0 where it has none.
    pub context: u16,
    /// The CUDA device.
    pub device: Device,
}

/// The last of the handles that stand for default streams: null, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD.
pub(crate) const CU_STREAM_PER_THREAD: Stream = 2;
/// The one before it: what null means to most functions.
pub(crate) const CU_STREAM_LEGACY: Stream = 1;

static SHARE: AtomicPtr<Share> = AtomicPtr::new(std::ptr::null_mut());

/// The share; none if it cannot be read, which has then been said on stderr, once.
pub(crate) fn share() -> Option<&'static Share> {
    let share = SHARE.load(Acquire);
    if share.is_null() {
        return open();
    }
    // SAFETY: made by `open` and never freed.
    Some(unsafe { &*share })
}

#[cold]
fn open() -> Option<&'static Share> {
    let _kept = errno::Keep::new();
    let Some(state) = state() else {
        complain("memory", &io::Error::from(io::ErrorKind::OutOfMemory));
        return None;
    };
    // The usage file must not be opened twice: closing either drops the locks of both.
    let _opening = state.opening.lock();
    let share = SHARE.load(Acquire);
    if !share.is_null() {
        // SAFETY: made below and never freed.
        return Some(unsafe { &*share });
    }
    let limits = Limits::open(Path::new(place::LIMITS)).inspect_err(|error| complain(place::LIMITS, error));
    let usage = Usage::open(Path::new(place::USAGE)).inspect_err(|error| complain(place::USAGE, error));
    let share = Box::leak(Box::new(Share { limits: limits.ok()?, usage: usage.ok()?, state }));
    SHARE.store(share, Release);
    Some(share)
}

/// CLOCK_MONOTONIC in nanoseconds as of the kernel's last tick: milliseconds behind, and a few nanoseconds to read.
fn coarse_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` outlives the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    time.tv_sec.cast_unsigned().wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec.cast_unsigned())
}

/// Says on stderr why there is no CUDA here, once a process.
fn complain(what: &str, error: &io::Error) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if SAID.swap(true, Relaxed) {
        return;
    }
    let _ = writeln!(
        log::Line::new(),
        "vcuda: {what}: {error}; CUDA stays off in this process, because its GPU share cannot be kept; have the pod \
         made anew"
    );
}

impl Share {
    /// The slot of this process, claimed if it has none yet.
    fn me(&self) -> Option<Process> {
        match self.state.slot.load(Acquire) {
            0 => self.claim(),
            slot => Process::of_slot(slot as usize - 1),
        }
    }

    #[cold]
    fn claim(&self) -> Option<Process> {
        let _kept = errno::Keep::new();
        let _opening = self.state.opening.lock();
        if let slot @ 1.. = self.state.slot.load(Acquire) {
            return Process::of_slot(slot as usize - 1);
        }
        let process = self.usage.claim().inspect_err(|error| complain(place::USAGE, error)).ok()?;
        self.state.slot.store(u32::try_from(process.slot()).unwrap_or(0) + 1, Release);
        Some(process)
    }

    /// Makes sure that this process can take memory.
    pub fn is_ready(&self) -> bool {
        self.me().is_some()
    }

    /// This process's slot, if it has claimed one.
    pub fn me_if_claimed(&self) -> Option<Process> {
        (self.state.slot.load(Acquire) as usize).checked_sub(1).and_then(Process::of_slot)
    }

    /// Bytes of GPU `gpu` that the container may use, and bytes that it uses, at most as many.
    pub fn memory(&self, gpu: usize) -> (u64, u64) {
        let _kept = errno::Keep::new();
        let ceiling = self.limits.memory_bytes(gpu);
        let used = self.usage.used(self.me_if_claimed(), gpu).saturating_add(self.unseen(gpu));
        (ceiling, used.min(ceiling))
    }

    /// Takes `bytes` of GPU `gpu`, if the ceiling allows; else counts a refusal. Whatever fails later gives them back.
    pub fn take(&self, gpu: usize, bytes: u64) -> bool {
        let taken = self.take_quietly(gpu, bytes);
        if !taken {
            self.count_refusal(gpu);
            log::line(format_args!(
                "{bytes} bytes of GPU {gpu} refused: the ceiling is {}",
                self.ceiling(gpu)
            ));
        }
        taken
    }

    /// Counts a refusal.
    pub fn count_refusal(&self, gpu: usize) {
        self.usage.count_refusal(gpu);
    }

    /// The same without a count, for who will try again.
    pub fn take_quietly(&self, gpu: usize, bytes: u64) -> bool {
        self.me().is_some_and(|me| self.usage.take(me, gpu, bytes, self.ceiling(gpu)).is_ok())
    }

    /// What allocations of GPU `gpu` may come to.
    fn ceiling(&self, gpu: usize) -> u64 {
        self.limits.memory_bytes(gpu).saturating_sub(self.unseen(gpu))
    }

    /// What the node says that the container holds beyond its account.
    fn unseen(&self, gpu: usize) -> u64 {
        self.limits.unseen_bytes(gpu, coarse_ns)
    }

    /// Puts bytes on the account that are taken already.
    pub fn charge(&self, gpu: usize, bytes: u64) {
        if let Some(me) = self.me() {
            self.usage.charge(me, gpu, bytes);
        }
    }

    /// Gives bytes back.
    pub fn give(&self, gpu: usize, bytes: u64) {
        // A forked child has no slot, and nothing to give back.
        if let Some(me) = self.me_if_claimed() {
            self.usage.give(me, gpu, bytes);
        }
    }

    /// Gives back bytes that others were let have, unless one of them still does: then it is given back when none does.
    pub fn give_exported(&self, exported: Exported, gpu: usize, bytes: u64) {
        if let Some(me) = self.me_if_claimed()
            && self.usage.unexport(me, exported)
        {
            self.usage.give(me, gpu, bytes);
        }
    }

    /// Calls `with` for every process of the container that holds memory of GPU `gpu`.
    pub fn for_each_process(&self, gpu: usize, with: impl FnMut(u32, u64)) {
        let _kept = errno::Keep::new();
        self.usage.for_each_process(self.me_if_claimed(), gpu, with);
    }

    /// What this process knows.
    pub fn state(&self) -> &'static State {
        self.state
    }

    /// The share's usage.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// The share's limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Which GPU of the share a CUDA device is, by its UUID: the order of devices is the application's to choose
    /// (CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER).
    pub fn gpu_of_device(&self, device: Device) -> Option<usize> {
        const FOREIGN: u8 = 255;
        let known = usize::try_from(device).ok().and_then(|at| self.state.devices.get(at));
        match known.map_or(0, |known| known.load(Relaxed)) {
            0 => {}
            FOREIGN => return None,
            gpu => return Some(usize::from(gpu) - 1),
        }
        let mut uuid = [0; 16];
        // SAFETY: `uuid` has the size of CUuuid and outlives the call.
        let result =
            unsafe { driver!(cuda::cuDeviceGetUuid(&raw mut uuid => *mut [u8; 16], device => Device)) };
        if result != CUDA_SUCCESS {
            return None;
        }
        let gpu = self.limits.find(&uuid);
        if let Some(known) = known {
            let remembered = gpu.and_then(|gpu| u8::try_from(gpu + 1).ok()).unwrap_or(FOREIGN);
            known.store(remembered, Relaxed);
        }
        gpu
    }

    /// Where allocations of the calling thread go now; none if it has no context, of which the driver will say more.
    pub fn here(&self) -> Option<Place> {
        let context = current_context()?;
        if let Some(place) = self.recent(context) {
            return Some(place);
        }
        let place = match self.state.contexts.get(context) {
            Some(word) => Some(Place::unpack(word)),
            None => self.learn_current(context),
        };
        if let Some((entry, key)) = self.recent_entry(context)
            && let Some(word) = place.and_then(Place::pack_short)
        {
            entry.store(key | word, Relaxed);
        }
        place
    }

    /// The place of a context that was asked for lately: without a lock, for it is on the way of every allocation.
    fn recent(&self, context: Context) -> Option<Place> {
        let (entry, key) = self.recent_entry(context)?;
        let word = entry.load(Relaxed);
        Place::unpack_short(word).filter(|_| word & !Place::SHORT_MASK == key)
    }

    /// Where a context is remembered, and the high bits of the word by which it is known there. Drivers' contexts are
    /// addresses, of 48 bits, aligned to 16; others are not remembered.
    fn recent_entry(&self, context: Context) -> Option<(&AtomicU64, u64)> {
        let entries = &self.state.recent_contexts;
        let at = usize::try_from((context >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60).unwrap_or(0);
        (context & 15 == 0 && context >> 48 == 0).then(|| (&entries[at % entries.len()], context << 16))
    }

    /// Where stream-ordered allocations in `stream` go now: to its device, whichever context is current.
    pub fn here_in(&self, stream: Stream) -> Option<Place> {
        // The default streams are those of the current context.
        if stream <= CU_STREAM_PER_THREAD {
            return self.here();
        }
        let mut context = 0;
        // SAFETY: `context` outlives the call; the stream is the application's, for the driver to judge.
        let result =
            unsafe { driver!(cuda::cuStreamGetCtx(stream => Stream, &raw mut context => *mut Context)) };
        if result != CUDA_SUCCESS || context == 0 {
            return self.here();
        }
        if let Some(word) = self.state.contexts.get(context) {
            return Some(Place::unpack(word));
        }
        let mut popped: Context = 0;
        // SAFETY: the driver's own context, current for the moment; `popped` outlives the call.
        unsafe {
            if driver!(cuda::cuCtxPushCurrent_v2(context => Context)) != CUDA_SUCCESS {
                return self.here();
            }
            let place = self.learn_current(context);
            driver!(cuda::cuCtxPopCurrent_v2(&raw mut popped => *mut Context));
            place
        }
    }

    /// The context of `stream`, which for a default stream is the current one; none if there is none, of which the driver will
    /// say more.
    pub fn context_of(&self, stream: Stream) -> Option<Context> {
        if stream > CU_STREAM_PER_THREAD {
            let mut context = 0;
            // SAFETY: `context` outlives the call; the stream is the application's, for the driver to judge.
            let result =
                unsafe { driver!(cuda::cuStreamGetCtx(stream => Stream, &raw mut context => *mut Context)) };
            if result == CUDA_SUCCESS && context != 0 {
                return Some(context);
            }
        }
        current_context()
    }

    /// The context of `stream`, and the GPU of the share that it is on; none if there is none, of which the driver will say
    /// more.
    pub fn lane_of(&self, stream: Stream) -> Option<(Context, usize)> {
        let context = self.context_of(stream)?;
        let place = self.recent(context).or_else(|| self.here_in(stream))?;
        Some((context, place.gpu?))
    }

    #[cold]
    fn learn_current(&self, context: Context) -> Option<Place> {
        let mut device = 0;
        // SAFETY: `device` outlives the call.
        if unsafe { driver!(cuda::cuCtxGetDevice(&raw mut device => *mut Device)) } != CUDA_SUCCESS {
            return None;
        }
        Some(self.enter_context(context, device))
    }

    /// Notes a context that is not known yet, of a device.
    fn enter_context(&self, context: Context, device: Device) -> Place {
        let place = Place { gpu: self.gpu_of_device(device), context: self.number_context(), device };
        // Without memory to remember it, it is learnt again the next time, under another number.
        if !self.state.contexts.insert(context, place.pack()) {
            self.free_context_number(place.context);
        }
        place
    }

    /// Number for a new context; 0 if all are in use. Its blocks are then given back when the process ends.
    fn number_context(&self) -> u16 {
        let mut numbers = self.state.context_numbers.lock();
        for at in 1..CONTEXTS {
            if numbers[at / 64] >> (at % 64) & 1 == 0 {
                numbers[at / 64] |= 1 << (at % 64);
                return u16::try_from(at).unwrap_or(0);
            }
        }
        0
    }

    fn free_context_number(&self, number: u16) {
        let number = usize::from(number);
        if number > 0 {
            self.state.context_numbers.lock()[number / 64] &= !(1 << (number % 64));
        }
    }

    /// Forgets a context that is about to be destroyed.
    pub fn forget_context(&self, context: Context) -> Option<Place> {
        if let Some((entry, _)) = self.recent_entry(context) {
            entry.store(0, Relaxed);
        }
        self.state.contexts.remove(context).map(Place::unpack)
    }

    /// The place of a context of a device.
    pub fn place_of(&self, context: Context, device: Device) -> Place {
        let known = self.state.contexts.get(context).map(Place::unpack);
        known.unwrap_or_else(|| self.enter_context(context, device))
    }

    /// Takes [`Share::forget_context`] back.
    pub fn remember_context(&self, context: Context, place: Place) {
        let _ = self.state.contexts.insert(context, place.pack());
    }

    /// The context at `place` is gone, and all that was allocated in it.
    pub fn give_all_of(&self, place: Place) {
        if place.context == 0 {
            return;
        }
        for map in [&self.state.blocks, &self.state.arrays] {
            // Given back when no part of the map is locked: who lets others have a block locks both the other way round.
            let mut gone = Vec::new();
            map.drain(
                |_, word| Block::unpack(word).part_of == PartOf::Context(place.context),
                |address, word| gone.push((address, word)),
            );
            for (key, word) in gone {
                ipc::give(self, key, Block::unpack(word));
                if std::ptr::eq(map, &raw const self.state.arrays) {
                    binding::forget_array(self, key);
                }
            }
        }
        ipc::forget_context(self, place.context);
        self.free_context_number(place.context);
    }

    /// The context at `place` is gone, and what was allocated in it is that of context number `heir` from now on.
    pub fn hand_over(&self, place: Place, heir: u16) {
        if place.context == 0 {
            return;
        }
        for map in [&self.state.blocks, &self.state.arrays] {
            map.change(|word| {
                let block = Block::unpack(word);
                let of_it = block.part_of == PartOf::Context(place.context);
                if of_it { Block { part_of: PartOf::Context(heir), ..block }.pack() } else { word }
            });
        }
        ipc::hand_over(self, place.context, heir);
        self.free_context_number(place.context);
    }
}

impl Place {
    /// Bits of [`Place::pack_short`].
    const SHORT_MASK: u64 = (1 << 20) - 1;

    /// In 20 bits: 5 of the GPU, 12 of the context, 3 of the device. None for what does not fit.
    fn pack_short(self) -> Option<u64> {
        let device = u64::try_from(self.device).ok().filter(|device| *device < 8)?;
        Some((self.gpu? as u64 + 1) | (u64::from(self.context) << 5) | (device << 17))
    }

    fn unpack_short(word: u64) -> Option<Self> {
        let gpu = usize::try_from(word & 31).ok()?.checked_sub(1)?;
        let (context, device) =
            (u16::try_from(word >> 5 & 0xfff).ok()?, Device::try_from(word >> 17 & 7).ok()?);
        Some(Self { gpu: Some(gpu), context, device })
    }

    fn pack(self) -> u64 {
        u64::from(self.device.cast_unsigned()) << 32
            | u64::from(self.context) << 8
            | self.gpu.map_or(0, |gpu| gpu as u64 + 1)
    }

    fn unpack(word: u64) -> Self {
        let [gpu, low, high, _, device @ ..] = word.to_le_bytes();
        Self {
            gpu: usize::from(gpu).checked_sub(1),
            context: u16::from_le_bytes([low, high]),
            device: Device::from_le_bytes(device),
        }
    }
}

/// A live allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// Bytes on the account, a multiple of the account's unit; below 2^45.
    pub bytes: u64,
    /// GPU of the share.
    pub gpu: usize,
    /// What it is part of.
    pub part_of: PartOf,
    /// Other processes may have it too.
    pub exported: bool,
}

/// What a block is part of, and goes away with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PartOf {
    /// A context, by number; 0 for none.
    Context(u16),
    /// A pool, by number, which has the bytes on its account.
    Pool(u16),
}

impl Block {
    /// In one word: 36 bits of units, 4 of the GPU, 12 of the number, 1 for pools, 1 for what is exported.
    pub fn pack(self) -> u64 {
        let (number, pool) = match self.part_of {
            PartOf::Context(number) => (number, 0),
            PartOf::Pool(number) => (number, 1),
        };
        (self.bytes / region::ACCOUNT_UNIT_BYTES)
            | ((self.gpu as u64) << 36)
            | (u64::from(number) << 40)
            | (pool << 52)
            | (u64::from(self.exported) << 53)
    }

    /// The opposite of [`Block::pack`].
    pub fn unpack(word: u64) -> Self {
        let number = u16::try_from(word >> 40 & 0xfff).unwrap_or(0);
        Self {
            bytes: (word & ((1 << 36) - 1)) * region::ACCOUNT_UNIT_BYTES,
            gpu: usize::try_from(word >> 36 & 0xf).unwrap_or(0),
            part_of: if word >> 52 & 1 == 1 { PartOf::Pool(number) } else { PartOf::Context(number) },
            exported: word >> 53 & 1 == 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_and_places_fit_a_word() {
        for part_of in [PartOf::Context(0), PartOf::Context(4095), PartOf::Pool(0), PartOf::Pool(4095)] {
            for (bytes, gpu) in [(0, 0), (512, 15), (1024, 7), ((1 << 45) - 512, 15)] {
                for exported in [false, true] {
                    let block = Block { bytes, gpu, part_of, exported };
                    assert_eq!(Block::unpack(block.pack()), block);
                }
            }
        }
        for place in [
            Place { gpu: None, context: 4095, device: i32::MAX },
            Place { gpu: Some(15), context: 0, device: 0 },
        ] {
            assert_eq!(Place::unpack(place.pack()), place);
            assert_eq!(place.pack_short().and_then(Place::unpack_short), place.gpu.map(|_| place));
        }
        assert_eq!(Place { gpu: Some(0), context: 1, device: 8 }.pack_short(), None);
    }
}
