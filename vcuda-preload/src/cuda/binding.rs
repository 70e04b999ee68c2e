//! Physical memory that is used without an address: as tiles of sparse arrays, and bound to multicast objects. It lives as
//! long as that, whether or not there is still a handle to it, so the account follows it here.

use std::{convert::identity, ffi::c_uint, sync::atomic::Ordering::Relaxed};

use crate::{
    cuda::{
        arguments::{Out, copy_of},
        stream::{At, End, Lanes, is_done, lane_of, per_thread},
        types::{
            Array, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, Context, Device, DevicePtr, Handle, Result, Stream,
        },
        vmm::{Number, Physical, WithOthers, follow},
    },
    pace::Lane,
    real::driver,
    share::{Share, share},
};

/// What this process uses so.
#[derive(Default)]
pub(crate) struct Uses {
    tiles: Vec<(Part, Number)>,
    bindings: Vec<Binding>,
    /// What is no longer mapped once the stream has come to it.
    leaving: Lanes<Number>,
}

/// A part of a sparse array: a box of elements in one level and layer, or bytes of a mip tail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    array: Array,
    /// Which kind it is, and in which level and layer.
    place: [u32; 3],
    from: [u64; 3],
    to: [u64; 3],
}

/// Memory of one GPU bound to a multicast object at an offset.
struct Binding {
    object: Number,
    gpu: usize,
    from: u64,
    to: u64,
    of: Number,
}

/// `CUarrayMapInfo`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MapInfo {
    resource_kind: u32,
    array: Array,
    kind: u32,
    /// Level, layer, three offsets and three extents in elements; of a mip tail its layer, and offset and size in bytes.
    part: PartWords,
    operation: u32,
    handle_kind: u32,
    handle: Handle,
    offset: u64,
    devices: u32,
    flags: u32,
    reserved: [u32; 2],
}
const _: () = assert!(size_of::<MapInfo>() == 96 && std::mem::offset_of!(MapInfo, part) == 24);

#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct PartWords([u32; 8]);

impl Part {
    fn of(info: &MapInfo) -> Self {
        // CUarraySparseSubresourceType.
        const MIP_TAIL: u32 = 1;
        let words = info.part.0;
        if info.kind == MIP_TAIL {
            let long = |at: usize| u64::from(words[at]) | u64::from(words[at + 1]) << 32;
            let (from, bytes) = (long(2), long(4));
            return Self {
                array: info.array,
                place: [MIP_TAIL, 0, words[0]],
                from: [from, 0, 0],
                to: [from.saturating_add(bytes), 1, 1],
            };
        }
        let from = [2, 3, 4].map(|at| u64::from(words[at]));
        let extent = [5, 6, 7].map(|at| u64::from(words[at]).max(1));
        let to = [0, 1, 2].map(|n: usize| from[n] + extent[n]);
        Self { array: info.array, place: [info.kind, words[0], words[1]], from, to }
    }

    fn is_within(&self, other: &Self) -> bool {
        let inside = |n: usize| other.from[n] <= self.from[n] && self.to[n] <= other.to[n];
        (self.array, self.place) == (other.array, other.place) && (0..3).all(inside)
    }
}

impl Uses {
    /// Something is mapped at `part`, or nothing is any more. What is there only in part counts until the rest goes too.
    fn replace(&mut self, part: Part, by: Option<Number>, lane: Lane) {
        let leaving = &mut self.leaving;
        self.tiles.retain(|(tile, number)| {
            let goes = tile.is_within(&part);
            if goes {
                leaving.leave(lane, *number);
            }
            !goes
        });
        self.tiles.extend(by.map(|number| (part, number)));
    }

    /// Takes out what is mapped in `array`, which is destroyed.
    fn take_array(&mut self, array: Array) -> Vec<Number> {
        let goes = |(part, _): &mut (Part, Number)| part.array == array;
        self.tiles.extract_if(.., goes).map(|(_, number)| number).collect()
    }

    /// Takes out what has left, as far as `done` says so of where it was unmapped.
    fn take_left(&mut self, done: impl Fn(&At) -> bool) -> Vec<Number> {
        self.leaving.take(done)
    }

    /// Takes out what is bound to `object`, on one GPU and between two offsets, or all of it.
    pub fn take_bound(&mut self, object: Number, within: Option<(usize, u64, u64)>) -> Vec<Number> {
        let goes = |binding: &mut Binding| {
            let inside = |(gpu, from, to)| binding.gpu == gpu && from <= binding.from && binding.to <= to;
            binding.object == object && within.is_none_or(inside)
        };
        self.bindings.extract_if(.., goes).map(|binding| binding.of).collect()
    }
}

/// Changes what arrays and objects use; then gives back what nothing uses any more.
fn change(physical: &mut Physical, share: &Share, change: impl FnOnce(&mut Uses) -> Vec<Number>) {
    let gone = change(&mut physical.uses);
    gone.into_iter().for_each(|number| physical.unused(share, number));
    share.state().leaving.store(u32::from(!physical.uses.leaving.is_empty()), Relaxed);
}

fn change_if_any(share: &Share, what: impl FnOnce(&mut Uses) -> Vec<Number>) {
    if let Some(physical) = &mut *share.state().physical.lock() {
        change(physical, share, what);
    }
}

/// Gives back what has left since.
pub(super) fn settle(share: &Share) {
    if share.state().leaving.load(Relaxed) != 0 {
        change_if_any(share, |uses| uses.take_left(is_done));
    }
}

/// A stream is about to be destroyed.
pub(super) fn forget_stream(stream: Stream) {
    if let Some(share) = share()
        && share.state().leaving.load(Relaxed) != 0
    {
        change_if_any(share, |uses| uses.leaving.forget_stream(stream));
    }
}

/// All that is in streams of a context is about to end, or may end, as where that is destroyed: they cannot be asked.
pub(super) fn begin_end(share: &Share, context: Context) {
    if share.state().leaving.load(Relaxed) != 0
        && let Some(physical) = &mut *share.state().physical.lock()
    {
        physical.uses.leaving.begin_end(context);
    }
}

/// It has ended so.
pub(super) fn end(share: &Share, context: Context, how: End) {
    if share.state().leaving.load(Relaxed) != 0 {
        change_if_any(share, |uses| uses.leaving.end(context, how));
    }
}

/// An array is gone, and what is mapped in it.
pub(crate) fn forget_array(share: &Share, array: Array) {
    change_if_any(share, |uses| uses.take_array(array));
}

/// Has the driver destroy an array, with what is mapped in it. Once it is, another thread may get the same handle.
pub(super) fn destroy_array(array: Array, call: impl FnOnce() -> Result) -> Result {
    follow(call, |physical, share| change(physical, share, |uses| uses.take_array(array)))
}

/// A copy of a list, empty where that is null; none where there is no memory for it.
///
/// # Safety
/// `list` must be null or have `count` entries.
unsafe fn copy_of_list(list: *const MapInfo, count: c_uint) -> Option<Vec<MapInfo>> {
    let count = if list.is_null() { 0 } else { usize::try_from(count).ok()? };
    let mut copy = Vec::new();
    copy.try_reserve_exact(count).ok()?;
    // SAFETY: the caller's promise.
    copy.extend((0..count).filter_map(|at| unsafe { copy_of(list.add(at)) }));
    Some(copy)
}

macro_rules! maps_arrays {
    ($symbol:ident, $meant:expr) => {
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(list: *mut MapInfo, count: c_uint, stream: Stream) -> Result {
            // CUmemOperationType.
            const MAP: u32 = 1;
            // SAFETY: null or the application's.
            let Some(mut copy) = (unsafe { copy_of_list(list, count) }) else { return CUDA_ERROR_OUT_OF_MEMORY };
            let list = if list.is_null() { list } else { copy.as_mut_ptr() };
            follow(
                // SAFETY: the other arguments are the application's, for the driver to judge.
                || unsafe {
                    driver!(cuda::$symbol(list => *mut MapInfo, count => c_uint, stream => Stream))
                },
                |physical, share| {
                    let lane = lane_of(share, $meant(stream)).unwrap_or_default();
                    for info in &copy {
                        let by = if info.operation == MAP { physical.use_of(info.handle) } else { None };
                        physical.uses.replace(Part::of(info), by, lane);
                    }
                    change(physical, share, |uses| uses.take_left(is_done));
                },
            )
        }
    };
}
maps_arrays!(cuMemMapArrayAsync, identity);
maps_arrays!(cuMemMapArrayAsync_ptsz, per_thread);

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMulticastCreate(object: *mut Handle, properties: *const u64) -> Result {
    // SAFETY: null or the application's.
    let object = unsafe { Out::new(object) };
    // SAFETY: the arguments are the application's, for the driver to judge.
    let result =
        unsafe { driver!(cuda::cuMulticastCreate(object.room() => *mut Handle, properties => *const u64)) };
    if result == CUDA_SUCCESS
        && let Some(share) = share()
    {
        // Handles and mappings of it come and go as those of memory do; it has none itself.
        let mut physical = share.state().physical.lock();
        physical.get_or_insert_default().insert(object.value(), 0, 0, WithOthers::No);
    }
    object.hand_over(result)
}

/// Notes that `bytes` of memory are bound to `object`.
fn bound(physical: &mut Physical, object: Handle, from: u64, of: Option<Number>, bytes: u64) {
    let Some((of, gpu)) = of.and_then(|of| Some((of, physical.gpu_of(of)?))) else { return };
    // One that was imported is first seen here.
    let object = physical.number_of(object).unwrap_or_else(|| physical.insert(object, 0, 0, WithOthers::No));
    physical.uses.bindings.push(Binding { object, gpu, from, to: from.saturating_add(bytes), of });
}

/// The handle by which a logical endpoint (CUDA 13.3), which has a number, is known here. The driver's handles are addresses.
fn endpoint(id: u32) -> Handle {
    1 << 63 | u64::from(id)
}

macro_rules! binds {
    ($($symbol:ident($known:ident $object:ident: $handle:ty, [$($device:ident: $kind:ty)?] $memory:ident: $type:ty $(, $offset:ident)?) by $used:ident;)*) => { $(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $symbol(
            $object: $handle,
            $($device: $kind,)?
            at: usize,
            $memory: $type,
            $($offset: usize,)?
            bytes: usize,
            flags: u64,
        ) -> Result {
            follow(
                // SAFETY: the arguments are the application's, for the driver to judge.
                || unsafe {
                    driver!(cuda::$symbol(
                        $object => $handle, $($device => $kind,)? at => usize, $memory => $type, $($offset => usize,)?
                        bytes => usize, flags => u64,
                    ))
                },
                |physical, _| {
                    let of = physical.$used($memory);
                    bound(physical, $known($object), at as u64, of, bytes as u64);
                },
            )
        }
    )* };
}
binds! {
    cuMulticastBindMem(identity object: Handle, [] memory: Handle, offset) by use_of;
    cuMulticastBindMem_v2(identity object: Handle, [device: Device] memory: Handle, offset) by use_of;
    cuMulticastBindAddr(identity object: Handle, [] address: DevicePtr) by use_at;
    cuMulticastBindAddr_v2(identity object: Handle, [device: Device] address: DevicePtr) by use_at;
    cuLogicalEndpointBindMem(endpoint id: u32, [device: Device] memory: Handle, offset) by use_of;
    cuLogicalEndpointBindAddr(endpoint id: u32, [device: Device] address: DevicePtr) by use_at;
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLogicalEndpointUnbind(
    id: u32,
    device: Device,
    at: u64,
    bytes: u64,
) -> Result {
    follow(
        // SAFETY: the arguments are the application's, for the driver to judge.
        || unsafe {
            driver!(cuda::cuLogicalEndpointUnbind(id => u32, device => Device, at => u64, bytes => u64))
        },
        |physical, share| unbound(physical, share, endpoint(id), device, at, bytes),
    )
}

/// It lets go of what this process bound to it.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLogicalEndpointDestroy(id: u32) -> Result {
    follow(
        // SAFETY: the argument is the application's, for the driver to judge.
        || unsafe { driver!(cuda::cuLogicalEndpointDestroy(id => u32)) },
        |physical, share| physical.release(share, endpoint(id)),
    )
}

/// Notes that nothing is bound to `object` any more on one GPU and between two offsets.
fn unbound(physical: &mut Physical, share: &Share, object: Handle, device: Device, from: u64, bytes: u64) {
    let within = share.gpu_of_device(device).map(|gpu| (gpu, from, from.saturating_add(bytes)));
    if let Some((object, within)) = physical.number_of(object).zip(within) {
        change(physical, share, |uses| uses.take_bound(object, Some(within)));
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMulticastUnbind(
    object: Handle,
    device: Device,
    at: usize,
    bytes: usize,
) -> Result {
    follow(
        // SAFETY: the arguments are the application's, for the driver to judge.
        || unsafe {
            driver!(cuda::cuMulticastUnbind(
                object => Handle, device => Device, at => usize, bytes => usize,
            ))
        },
        |physical, share| unbound(physical, share, object, device, at as u64, bytes as u64),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(kind: u32, part: [u32; 8]) -> Part {
        Part::of(&MapInfo {
            resource_kind: 0,
            array: 7,
            kind,
            part: PartWords(part),
            operation: 1,
            handle_kind: 0,
            handle: 0,
            offset: 0,
            devices: 1,
            flags: 0,
            reserved: [0; 2],
        })
    }

    #[test]
    fn a_tile_goes_with_what_covers_it_and_not_with_a_part_of_it() {
        let tile = info(0, [0, 0, 64, 0, 0, 64, 64, 1]);
        assert!(tile.is_within(&tile));
        assert!(tile.is_within(&info(0, [0, 0, 0, 0, 0, 256, 64, 1])));
        assert!(!tile.is_within(&info(0, [0, 0, 64, 0, 0, 32, 64, 1])));
        assert!(!tile.is_within(&info(0, [1, 0, 64, 0, 0, 64, 64, 1])), "another level");
        assert!(!tile.is_within(&info(0, [0, 1, 64, 0, 0, 64, 64, 1])), "another layer");
        let tail = info(1, [0, 0, 0, 1, 4096, 0, 0, 0]);
        assert_eq!((tail.from[0], tail.to[0]), (1 << 32, (1 << 32) + 4096));
        assert!(!tail.is_within(&tile) && !tile.is_within(&tail));
        // What a program makes up is bounded.
        assert!(info(1, [u32::MAX; 8]).to[0] == u64::MAX);
    }

    #[test]
    fn what_is_unmapped_leaves_when_its_stream_has_come_to_it() {
        let mut uses = Uses::default();
        let part = |x| info(0, [0, 0, x, 0, 0, 64, 64, 1]);
        let [one, other] = [5, 6].map(|stream| Lane { context: 3, stream, thread: 0 });
        uses.replace(part(0), Some(1), one);
        uses.replace(part(64), Some(2), one);
        uses.replace(part(0), Some(3), other);
        uses.replace(part(64), None, other);
        let is = |lane| move |at: &At| matches!(at, At::Lane(of) if *of == lane);
        assert_eq!(uses.take_left(is(one)), []);
        assert_eq!(uses.take_left(is(other)), [1, 2]);
        assert_eq!(uses.take_array(7), [3]);
        assert!(uses.tiles.is_empty() && uses.leaving.is_empty());
    }
}
