//! Memory that processes let each other have: physical memory by descriptors and fabric handles, blocks by IPC handles. The
//! driver frees it when the last of them lets go of it, so the account keeps it until then (`region`, `exports.rs`).
//!
//! Handles are the same bytes on both sides. A descriptor is not, and tells nothing of what it stands for; so it is marked: with a
//! lock of its open file, which goes with it wherever it is sent, disturbs nobody, and is read back from `/proc/self/fdinfo`
//! (fcntl(2), F_OFD_SETLK). The lock begins at a number of the memory and is as long as that has pages. One whose maker ended
//! before anybody imported it is on nobody's account meanwhile; who imports it then takes it like new memory. What this process
//! is done with, but has a descriptor of, a `dma-buf`'s too, stays on the account until that is closed.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::c_void,
    fs,
    io::Write,
    os::fd::RawFd,
    sync::atomic::Ordering::Relaxed,
};

use region::{Exported, Key};

use crate::{
    cuda::{
        arguments::{Out, copy_of},
        memory, take,
        types::{
            CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_SYSTEM_NOT_READY, CUDA_SUCCESS, DevicePtr, Handle, Result,
        },
        vmm::{Physical, Piece, WithOthers, follow},
    },
    errno,
    real::driver,
    share::{Block, PartOf, Place, Share, share},
};

/// What this process lets others have, and has of them.
#[derive(Default)]
pub(crate) struct Others {
    /// How often this process has imported a piece and not let go of it.
    imported: BTreeMap<Exported, u32>,
    /// Blocks that others may have opened.
    blocks: BTreeMap<DevicePtr, Exported>,
    /// Blocks of others that are open here, how often, and in which context.
    opened: BTreeMap<DevicePtr, (Exported, u32, u16)>,
    /// Numbers of the marks of blocks' descriptors.
    marks: BTreeMap<DevicePtr, u64>,
    /// What this process is done with but has descriptors of, which keep it.
    described: Vec<Piece>,
}

impl Others {
    /// Notes an import before it happens. None if nobody has it on the account.
    fn import(&mut self, share: &Share, key: Key) -> Option<Exported> {
        let exported = share.usage().import(share.me_if_claimed()?, key)?;
        *self.imported.entry(exported).or_default() += 1;
        Some(exported)
    }

    /// Gives back what this process is done with, unless it has a descriptor left that stands for it.
    pub fn done_with(&mut self, share: &Share, piece: Piece) {
        if piece.mark.is_some_and(|mark| open_marks().contains(&mark)) {
            self.described.push(piece);
            share.state().described.store(1, Relaxed);
        } else {
            self.give_back(share, piece);
        }
    }

    fn give_back(&mut self, share: &Share, piece: Piece) {
        match piece.with_others {
            WithOthers::No => share.give(piece.gpu, piece.bytes),
            WithOthers::Exported(exported) => share.give_exported(exported, piece.gpu, piece.bytes),
            WithOthers::Imported(exported, _) => self.let_go(share, exported),
        }
    }

    /// Takes out what is on this process's account alone and known by a mark.
    fn take_described(&mut self, mark: Mark) -> Option<Piece> {
        let is_it = |piece: &Piece| piece.mark == Some(mark.number) && piece.with_others == WithOthers::No;
        let at = self.described.iter().position(is_it)?;
        Some(self.described.swap_remove(at))
    }

    /// One import less.
    pub fn let_go(&mut self, share: &Share, exported: Exported) {
        let Some(times) = self.imported.get_mut(&exported) else { return };
        *times -= 1;
        if *times == 0 {
            self.imported.remove(&exported);
            if let Some(me) = share.me_if_claimed() {
                share.usage().unimport(me, exported);
            }
        }
    }
}

// ---- marks of descriptors ------------------------------------------------------------------------------------------

/// Bytes that a mark counts in: those of a page of physical memory.
const PAGE: u64 = memory::PAGE;
/// Bits of the number of pages, which are 32 TiB.
const PAGE_BITS: u32 = 24;

/// A descriptor's mark: the number of the memory, and its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    number: u64,
    bytes: u64,
}

impl Mark {
    fn put(self, fd: RawFd) {
        let _kept = errno::Keep::new();
        // SAFETY: plain old data, for which zero is a value.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        // A reader's lock: it is in nobody's way but a writer's, and several descriptors may have the same.
        lock.l_type = libc::F_RDLCK.try_into().unwrap_or(0);
        lock.l_start = i64::try_from(self.number << PAGE_BITS).unwrap_or(0);
        lock.l_len = i64::try_from(self.bytes.div_ceil(PAGE)).unwrap_or(1);
        // SAFETY: `lock` outlives the call. Where it fails the descriptor has no mark.
        unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const lock) };
    }

    fn of(fd: RawFd) -> Option<Self> {
        Self::all_of(fd).first().copied()
    }

    /// One for each piece of memory that a descriptor stands for.
    fn all_of(fd: RawFd) -> Vec<Self> {
        Self::read(fd).unwrap_or_default()
    }

    fn read(fd: RawFd) -> Option<Vec<Self>> {
        let _kept = errno::Keep::new();
        let mut path = [0; 32];
        write!(&mut path[..31], "/proc/self/fdinfo/{fd}").ok()?;
        // SAFETY: the path ends in NUL.
        let info = unsafe { libc::open(path.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC) };
        let mut text = [0; 1024];
        // SAFETY: the buffer has that many bytes; the descriptor is ours, or none.
        let length = unsafe { libc::read(info, text.as_mut_ptr().cast(), text.len()) };
        if info >= 0 {
            // SAFETY: as above.
            unsafe { libc::close(info) };
        }
        Some(Self::parse(std::str::from_utf8(text.get(..usize::try_from(length).ok()?)?).ok()?))
    }

    /// `lock:\t1: OFDLCK ADVISORY  READ -1 00:06:3 <first> <last>`, whatever locks there are besides.
    fn parse(info: &str) -> Vec<Self> {
        let marks = info.lines().filter_map(|line| {
            let mut words = line.strip_prefix("lock:")?.split_whitespace().skip(1);
            if words.next()? != "OFDLCK" || words.nth(1)? != "READ" {
                return None;
            }
            let (first, last): (u64, u64) = (words.nth(2)?.parse().ok()?, words.next()?.parse().ok()?);
            let pages = last.checked_sub(first)?.checked_add(1)?;
            (pages < 1 << PAGE_BITS && first.trailing_zeros() >= PAGE_BITS)
                .then_some(Self { number: first >> PAGE_BITS, bytes: pages * PAGE })
        });
        marks.collect()
    }
}

/// The numbers of all marks on this process's descriptors.
fn open_marks() -> BTreeSet<u64> {
    let _kept = errno::Keep::new();
    let Ok(open) = fs::read_dir("/proc/self/fd") else { return BTreeSet::new() };
    let descriptors = open.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    descriptors.flat_map(Mark::all_of).map(|mark| mark.number).collect()
}

/// Gives back what no descriptor of this process stands for any more.
pub(super) fn settle(share: &Share) {
    if share.state().described.load(Relaxed) != 0
        && let Some(physical) = &mut *share.state().physical.lock()
    {
        // Looked at once for all of them.
        let (open, others) = (open_marks(), &mut physical.others);
        let is_open = |piece: &Piece| piece.mark.is_some_and(|mark| open.contains(&mark));
        let (kept, gone): (Vec<_>, Vec<_>) =
            std::mem::take(&mut others.described).into_iter().partition(is_open);
        share.state().described.store((!kept.is_empty()).into(), Relaxed);
        others.described = kept;
        gone.into_iter().for_each(|piece| others.give_back(share, piece));
    }
}

/// What the driver's handle of 64 bytes is known by (FNV-1a).
fn key_of(handle: &[u8; 64]) -> Key {
    Key::Handle(
        handle.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        }),
    )
}

// ---- physical memory -----------------------------------------------------------------------------------------------

// CUmemAllocationHandleType.
const POSIX_FILE_DESCRIPTOR: i32 = 1;
const FABRIC: i32 = 8;

/// By what others get physical memory.
enum By {
    Descriptor(RawFd),
    Fabric([u8; 64]),
}

/// Notes that others may have what `handle` stands for.
fn exported(physical: &mut Physical, share: &Share, handle: Handle, by: &By) {
    let Some(Piece { gpu, bytes: held, mut with_others, mark }) = physical.piece(handle) else { return };
    if with_others == WithOthers::No {
        let exported = share.me_if_claimed().and_then(|me| share.usage().export(me, gpu, held));
        let Some(exported) = exported else { return };
        with_others = WithOthers::Exported(exported);
        physical.set_sharing(handle, with_others, mark);
    }
    let (exported, bytes) = match with_others {
        WithOthers::Exported(exported) => (exported, held),
        WithOthers::Imported(exported, bytes) => (exported, bytes),
        WithOthers::No => return,
    };
    match by {
        By::Descriptor(fd) => {
            let number = share.usage().descriptor_of(exported).unwrap_or_else(|| {
                let number = mark.unwrap_or_else(|| share.usage().new_mark(gpu));
                share.usage().set_key(exported, Key::Descriptor(number));
                number
            });
            physical.set_sharing(handle, with_others, Some(number));
            Mark { number, bytes }.put(*fd);
        }
        By::Fabric(handle) => share.usage().set_key(exported, key_of(handle)),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemExportToShareableHandle(
    to: *mut c_void,
    handle: Handle,
    kind: i32,
    flags: u64,
) -> Result {
    // SAFETY: the arguments are the application's, for the driver to judge.
    let call = |to: *mut c_void| unsafe {
        driver!(cuda::cuMemExportToShareableHandle(
            to => *mut c_void, handle => Handle, kind => i32, flags => u64,
        ))
    };
    match kind {
        POSIX_FILE_DESCRIPTOR => {
            // SAFETY: null or the application's.
            let fd = unsafe { Out::<RawFd>::new(to.cast()) };
            let by = || By::Descriptor(fd.value());
            let result =
                follow(|| call(fd.room().cast()), |physical, share| exported(physical, share, handle, &by()));
            fd.hand_over(result)
        }
        FABRIC => {
            // SAFETY: null or the application's.
            let fabric = unsafe { Out::<[u8; 64]>::new(to.cast()) };
            let by = || By::Fabric(fabric.value());
            let result = follow(
                || call(fabric.room().cast()),
                |physical, share| exported(physical, share, handle, &by()),
            );
            fabric.hand_over(result)
        }
        _ => call(to),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemImportFromShareableHandle(
    handle: *mut Handle,
    from: *mut c_void,
    kind: i32,
) -> Result {
    let Some(share) = share() else { return CUDA_ERROR_SYSTEM_NOT_READY };
    let (mut key, mut mark, mut fabric) = (None, None, None);
    match kind {
        POSIX_FILE_DESCRIPTOR => {
            mark = RawFd::try_from(from.addr()).ok().and_then(Mark::of);
            key = mark.map(|mark| Key::Descriptor(mark.number));
        }
        FABRIC => {
            // SAFETY: null or the application's handle.
            fabric = unsafe { copy_of(from.cast::<[u8; 64]>()) };
            key = fabric.as_ref().map(key_of);
        }
        _ => {}
    }
    let from = fabric.as_mut().map_or(from, |copy| copy.as_mut_ptr().cast());
    // SAFETY: null or the application's.
    let handle = unsafe { Out::new(handle) };
    let mut physical = share.state().physical.lock();
    let imported = key.and_then(|key| physical.get_or_insert_default().others.import(share, key));
    let mut taken = None;
    if imported.is_none()
        && let Some(mark) = mark
        && let Some(gpu) = share.usage().gpu_of_mark(mark.number)
    {
        // The container's own, and on nobody's account, or on this process's since it had it before.
        let had = physical.as_mut().and_then(|physical| physical.others.take_described(mark));
        if had.is_none() {
            drop(physical);
            if !take(share, gpu, mark.bytes) {
                return CUDA_ERROR_OUT_OF_MEMORY;
            }
            physical = share.state().physical.lock();
        }
        let new = Piece { gpu, bytes: mark.bytes, with_others: WithOthers::No, mark: Some(mark.number) };
        taken = Some(had.unwrap_or(new));
    }
    // SAFETY: the arguments are the application's, for the driver to judge.
    let result = unsafe {
        driver!(cuda::cuMemImportFromShareableHandle(
            handle.room() => *mut Handle, from => *mut c_void, kind => i32,
        ))
    };
    let known = physical.get_or_insert_default();
    if result == CUDA_SUCCESS {
        let (gpu, bytes, with_others) = match (imported, taken) {
            (Some(exported), _) => {
                let bytes = mark.map_or(0, |mark| mark.bytes);
                (share.usage().gpu_of_export(exported), 0, WithOthers::Imported(exported, bytes))
            }
            (None, Some(piece)) => (piece.gpu, piece.bytes, WithOthers::No),
            // Of another container, or unmarked: on its maker's account.
            (None, None) => return handle.hand_over(result),
        };
        known.insert(handle.value(), gpu, bytes, with_others);
        known.set_sharing(handle.value(), with_others, mark.map(|mark| mark.number));
    } else if let Some(exported) = imported {
        known.others.let_go(share, exported);
    } else if let Some(piece) = taken {
        known.others.done_with(share, piece);
    }
    handle.hand_over(result)
}

// ---- blocks --------------------------------------------------------------------------------------------------------

/// `CUipcMemHandle`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IpcHandle([u8; 64]);

/// Gives back a block that is freed, unless another process still has it, or this one a descriptor of it.
pub(crate) fn give(share: &Share, address: DevicePtr, block: Block) {
    let Block { gpu, bytes, exported, .. } = block;
    if !exported {
        return share.give(gpu, bytes);
    }
    let mut physical = share.state().physical.lock();
    let others = &mut physical.get_or_insert_default().others;
    let with_others = others.blocks.remove(&address).map_or(WithOthers::No, WithOthers::Exported);
    let mark = others.marks.remove(&address);
    others.done_with(share, Piece { gpu, bytes, with_others, mark });
}

/// The block in which `address` is, and where it begins; none if it is none of ours, or a pool's.
fn block_at(share: &'static Share, address: DevicePtr) -> Option<(DevicePtr, Block)> {
    let (mut base, mut bytes) = (0, 0_usize);
    // SAFETY: both outlive the call.
    let result = unsafe {
        driver!(cuda::cuMemGetAddressRange_v2(
            &raw mut base => *mut DevicePtr, &raw mut bytes => *mut usize, address => DevicePtr,
        ))
    };
    let block = Block::unpack(memory::blocks(share).get(base).filter(|_| result == CUDA_SUCCESS)?);
    matches!(block.part_of, PartOf::Context(_)).then_some((base, block))
}

/// A `dma-buf` keeps the memory of its range, whatever becomes of the range, until its last descriptor is closed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetHandleForAddressRange(
    to: *mut c_void,
    address: DevicePtr,
    bytes: usize,
    kind: i32,
    flags: u64,
) -> Result {
    /// CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD.
    const DMA_BUF: i32 = 1;
    // SAFETY: the arguments are the application's, for the driver to judge.
    let call = |to: *mut c_void| unsafe {
        driver!(cuda::cuMemGetHandleForAddressRange(
            to => *mut c_void, address => DevicePtr, bytes => usize, kind => i32, flags => u64,
        ))
    };
    let Some(share) = share() else { return CUDA_ERROR_SYSTEM_NOT_READY };
    if kind != DMA_BUF {
        return call(to);
    }
    let mut physical = share.state().physical.lock();
    // SAFETY: null or the application's.
    let fd = unsafe { Out::<RawFd>::new(to.cast()) };
    let result = call(fd.room().cast());
    if result != CUDA_SUCCESS {
        return result;
    }
    let physical = physical.get_or_insert_default();
    let new = |gpu| share.usage().new_mark(gpu);
    if let Some((base, block)) = block_at(share, address) {
        let number = *physical.others.marks.entry(base).or_insert_with(|| new(block.gpu));
        let _ = memory::blocks(share).insert(base, Block { exported: true, ..block }.pack());
        Mark { number, bytes: block.bytes }.put(fd.value());
    } else {
        physical.mark_all(address, bytes as u64, new, |number, bytes| Mark { number, bytes }.put(fd.value()));
    }
    fd.hand_over(result)
}

/// A context is gone, and with it what was opened in it.
pub(crate) fn forget_context(share: &Share, context: u16) {
    if let Some(physical) = &mut *share.state().physical.lock() {
        let others = &mut physical.others;
        let gone: Vec<_> = others.opened.extract_if(.., |_, (_, _, of)| *of == context).collect();
        gone.into_iter().for_each(|(_, (exported, ..))| others.let_go(share, exported));
    }
}

/// A context is gone, and what was opened in it is another's from now on.
pub(crate) fn hand_over(share: &Share, context: u16, heir: u16) {
    if let Some(physical) = &mut *share.state().physical.lock() {
        let opened = physical.others.opened.values_mut();
        opened.filter(|(_, _, of)| *of == context).for_each(|(_, _, of)| *of = heir);
    }
}

/// Notes that others may open the block in which `address` is, by `handle`.
fn exported_block(share: &'static Share, address: DevicePtr, handle: &IpcHandle) -> Option<()> {
    let (base, block) = block_at(share, address)?;
    let mut physical = share.state().physical.lock();
    let others = &mut physical.get_or_insert_default().others;
    let exported = match others.blocks.get(&base) {
        Some(exported) => *exported,
        None => {
            let exported = share.usage().export(share.me_if_claimed()?, block.gpu, block.bytes)?;
            others.blocks.insert(base, exported);
            let _ = memory::blocks(share).insert(base, Block { exported: true, ..block }.pack());
            exported
        }
    };
    share.usage().set_key(exported, key_of(&handle.0));
    Some(())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcGetMemHandle(handle: *mut IpcHandle, address: DevicePtr) -> Result {
    // SAFETY: null or the application's.
    let handle = unsafe { Out::new(handle) };
    // SAFETY: the arguments are the application's, for the driver to judge.
    let result =
        unsafe { driver!(cuda::cuIpcGetMemHandle(handle.room() => *mut IpcHandle, address => DevicePtr)) };
    if result == CUDA_SUCCESS
        && let Some(share) = share()
    {
        let _ = exported_block(share, address, &handle.value());
    }
    handle.hand_over(result)
}

/// # Safety
/// `address` must be null or the application's, and `call` a driver's function that on success writes the address where it is
/// told.
unsafe fn open(
    address: *mut DevicePtr,
    handle: &IpcHandle,
    call: impl FnOnce(*mut DevicePtr) -> Result,
) -> Result {
    let Some(share) = share() else { return CUDA_ERROR_SYSTEM_NOT_READY };
    let context = share.here().map_or(0, |Place { context, .. }| context);
    let mut physical = share.state().physical.lock();
    let imported = physical.get_or_insert_default().others.import(share, key_of(&handle.0));
    // SAFETY: the caller's promise.
    let address = unsafe { Out::new(address) };
    let result = call(address.room());
    if let Some(exported) = imported {
        let others = &mut physical.get_or_insert_default().others;
        if result == CUDA_SUCCESS {
            let opened = others.opened.entry(address.value()).or_insert((exported, 0, context));
            opened.1 += 1;
            if opened.1 > 1 {
                // Opened once more, it is the same, and goes when it is closed as often.
                others.let_go(share, exported);
            }
        } else {
            others.let_go(share, exported);
        }
    }
    address.hand_over(result)
}

macro_rules! opens {
    ($($symbol:ident),*) => { $(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(address: *mut DevicePtr, handle: IpcHandle, flags: u32) -> Result {
            // SAFETY: the arguments are the application's, for the driver to judge.
            unsafe {
                open(address, &handle, |address| {
                    driver!(cuda::$symbol(address => *mut DevicePtr, handle => IpcHandle, flags => u32))
                })
            }
        }
    )* };
}
opens!(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2);

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcCloseMemHandle(address: DevicePtr) -> Result {
    follow(
        // SAFETY: the argument is the application's, for the driver to judge.
        || unsafe { driver!(cuda::cuIpcCloseMemHandle(address => DevicePtr)) },
        |physical, share| {
            let others = &mut physical.others;
            if let Some(opened) = others.opened.get_mut(&address) {
                opened.1 -= 1;
                if opened.1 == 0
                    && let Some((exported, ..)) = others.opened.remove(&address)
                {
                    others.let_go(share, exported);
                }
            }
        },
    )
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::fd::AsRawFd};

    use super::*;

    #[test]
    fn a_mark_goes_with_the_descriptor_and_its_copies() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().read(true).write(true).open(file.path()).unwrap();
        let (one, other) = (open(), open());
        assert_eq!(Mark::of(one.as_raw_fd()), None);
        let mark = Mark { number: (1 << 39) - 1, bytes: ((1 << 24) - 1) * PAGE };
        mark.put(one.as_raw_fd());
        Mark { number: 5, bytes: 6 * PAGE }.put(other.as_raw_fd());
        assert_eq!(Mark::of(one.try_clone().unwrap().as_raw_fd()), Some(mark));
        assert_eq!(Mark::of(other.as_raw_fd()), Some(Mark { number: 5, bytes: 6 * PAGE }));
        assert_eq!(Mark::of(open().as_raw_fd()), None);
        assert_eq!(Mark::of(-1), None);
        let more = Mark { number: 7, bytes: PAGE };
        more.put(other.as_raw_fd());
        assert_eq!(Mark::all_of(other.as_raw_fd()), [Mark { number: 5, bytes: 6 * PAGE }, more]);
        let open = open_marks();
        assert!(open.contains(&7) && open.contains(&mark.number) && !open.contains(&8));
        drop(other);
        assert!(!open_marks().contains(&7));
    }

    #[test]
    fn locks_of_others_are_no_marks() {
        for line in [
            "lock:\t1: POSIX  ADVISORY  READ 5 00:06:3 16777216 16777216",
            "lock:\t1: OFDLCK ADVISORY  WRITE -1 00:06:3 16777216 16777216",
            "lock:\t1: OFDLCK ADVISORY  READ -1 00:06:3 0 EOF",
            "lock:\t1: OFDLCK ADVISORY  READ -1 00:06:3 5 6",
            "lock:\t1: OFDLCK ADVISORY  READ -1 00:06:3 16777216 5",
            "lock:",
            "pos:\t0",
        ] {
            assert_eq!(Mark::parse(line), [], "{line}");
        }
    }
}
