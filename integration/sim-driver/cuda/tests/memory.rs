//! Memory of all kinds takes what it should of a GPU, and gives it back: within a process, across processes, and when
//! processes die.

#![expect(clippy::unwrap_used, reason = "a test")]

mod common;

use std::os::fd::{FromRawFd, OwnedFd};

use common::{Actor, Driver, MIB, context, eventually, free, say};

/// Blocks take whole pages, as with the real driver.
const PAGES: &str = "version: 1\ngpus: [{count: 2, memoryMib: 1024, reservedMib: 24}]";

fn alloc(bytes: u64) -> Option<u64> {
    let mut at = 0_u64;
    match call!(cuMemAlloc_v2(&mut at, bytes)) {
        0 => Some(at),
        2 => None,
        other => panic!("{other}"),
    }
}

/// `CUmemAllocationProp` and the like: a device, pinned, with a descriptor for a handle.
fn properties(location: i32, id: i32, handles: i32) -> [i32; 8] {
    [1, handles, location, id, 0, 0, 0, 0]
}

#[test]
fn plays_a_part() {
    let Some(part) = common::part() else { return };
    match part.as_str() {
        "exhaust" => exhaust(),
        "families" => families(),
        "pools" => pools(),
        "managed pools" => managed_pools(),
        "no managed pools" => no_managed_pools(),
        "default pools" => default_pools(),
        "graphs" => graphs(),
        "managed" => managed(),
        "contents" => contents(),
        "hold" => hold(),
        "contexts" => contexts(),
        "fork" => fork(),
        "churn" => churn(),
        "exporter" => exporter(),
        "owner" => owner(),
        "opener" => opener(),
        "modules" => modules(),
        other => panic!("{other}"),
    }
}

fn exhaust() {
    context(0);
    assert_eq!(free(), 1000 * MIB);
    let blocks: Vec<u64> = std::iter::from_fn(|| alloc(1)).collect();
    assert_eq!(blocks.len(), 500, "every block takes a page of 2 MiB");
    assert_eq!(free(), 0);
    ok!(cuMemFree_v2(blocks[7]));
    assert_eq!(alloc(2 * MIB + 1), None);
    assert!(alloc(2 * MIB).is_some());
    for at in &blocks[8..] {
        ok!(cuMemFree_v2(*at));
    }
    assert_eq!(free(), (500 - 8) * 2 * MIB);
    assert_eq!(call!(cuMemFree_v2(blocks[9])), 1, "freed twice");
    assert_eq!(call!(cuMemFree_v2(12_345)), 1);
    ok!(cuMemFree_v2(0));
    // Sizes that no GPU has are out of memory, not an overflow.
    for bytes in [u64::MAX, u64::MAX - (2 * MIB), 1 << 63] {
        assert_eq!(alloc(bytes), None);
    }
    let mut at = 0_u64;
    assert_eq!(call!(cuMemAlloc_v2(&mut at, 0)), 1);
    assert_eq!(call!(cuMemAlloc_v2(0, 1)), 1);
}

#[test]
fn memory_runs_out_exactly_and_comes_back() {
    let driver = Driver::start(PAGES);
    driver.play("exhaust");
    eventually("the process's memory is back", || driver.used(0) == 0);
}

fn families() {
    context(0);
    let all = free();
    let taken = |bytes: u64| assert_eq!(all - free(), bytes);
    let (mut at, mut pitch) = (0_u64, 0_usize);

    ok!(cuMemAllocPitch_v2(&mut at, &mut pitch, 1000_usize, 3000_usize, 4));
    assert_eq!(pitch, 1024);
    taken(4 * MIB);
    ok!(cuMemFree_v2(at));

    // Width, height, depth, then format (float) and channels, then flags.
    let shape: [u64; 5] = [1024, 512, 3, 0x20 | 4 << 32, 0];
    let mut array = 0_u64;
    ok!(cuArray3DCreate_v2(&mut array, &shape));
    taken(24 * MIB);
    ok!(cuArrayDestroy(array));
    taken(0);
    assert_eq!(call!(cuArrayDestroy(array)), 400);
    // Sparse, and mapped later: no memory of their own.
    for flags in [0x40, 0x80] {
        let shape: [u64; 5] = [1024, 512, 0, 0x20 | 4 << 32, flags];
        ok!(cuArray3DCreate_v2(&mut array, &shape));
        taken(0);
        ok!(cuArrayDestroy(array));
    }
    let shape: [u64; 5] = [1024, 1024, 0, 0x20 | 4 << 32, 0];
    ok!(cuMipmappedArrayCreate(&mut array, &shape, 11));
    // 16 MiB, and a third of it in the smaller levels, in whole pages.
    taken(22 * MIB);
    let mut level = 0_u64;
    ok!(cuMipmappedArrayGetLevel(&mut level, array, 10));
    assert_eq!(call!(cuArrayDestroy(level)), 400, "a level goes with its array");
    ok!(cuMipmappedArrayDestroy(array));
    taken(0);

    // Physical memory is there until its last handle and its last mapping are gone.
    let wanted = properties(1, 0, 0);
    let (mut handle, mut again, mut range) = (0_u64, 0_u64, 0_u64);
    assert_eq!(call!(cuMemCreate(&mut handle, 3 * MIB, &wanted, 0)), 1, "no multiple of the granularity");
    ok!(cuMemCreate(&mut handle, 8 * MIB, &wanted, 0));
    taken(8 * MIB);
    ok!(cuMemAddressReserve(&mut range, 16 * MIB, 0, 0, 0));
    ok!(cuMemMap(range, 8 * MIB, 0, handle, 0));
    assert_eq!(call!(cuMemMap(range, 8 * MIB, 0, handle, 0)), 1, "mapped already");
    ok!(cuMemMap(range + 8 * MIB, 4 * MIB, 4 * MIB, handle, 0));
    let access: [i32; 3] = [1, 0, 3];
    ok!(cuMemSetAccess(range, 12 * MIB, &access, 1));
    ok!(cuMemRetainAllocationHandle(&mut again, range + 5 * MIB));
    assert_eq!(again, handle);
    ok!(cuMemRelease(handle));
    ok!(cuMemRelease(handle));
    assert_eq!(call!(cuMemRelease(handle)), 1);
    taken(8 * MIB);
    assert_eq!(call!(cuMemAddressFree(range, 16 * MIB)), 1, "something is mapped there");
    ok!(cuMemUnmap(range, 12 * MIB));
    taken(0);
    ok!(cuMemAddressFree(range, 16 * MIB));
    // On the host it takes nothing of a GPU.
    for location in 2..=4 {
        ok!(cuMemCreate(&mut handle, 2048 * MIB, &properties(location, 0, 0), 0));
        taken(0);
        ok!(cuMemRelease(handle));
    }
    // Host memory neither, and the GPU reaches it at the same address.
    let (mut host, mut device) = (0_u64, 0_u64);
    ok!(cuMemHostAlloc(&mut host, 64 * MIB, 2));
    ok!(cuMemHostGetDevicePointer_v2(&mut device, host, 0));
    assert_eq!(host, device);
    taken(0);
    ok!(cuMemFreeHost(host));
    let own = vec![0_u8; 8192];
    ok!(cuMemHostRegister_v2(&own[0], 8192_usize, 0));
    assert_eq!(call!(cuMemHostRegister_v2(&own[100], 10_usize, 0)), 712);
    ok!(cuMemHostUnregister(&own[0]));
    assert_eq!(call!(cuMemHostUnregister(&own[0])), 713);
    taken(0);
}

#[test]
fn every_family_takes_its_true_size() {
    Driver::start(PAGES).play("families");
}

fn attribute(pool: u64, which: i32) -> u64 {
    let mut value = 0_u64;
    ok!(cuMemPoolGetAttribute(pool, which, &mut value));
    value
}

fn pools() {
    const THRESHOLD: i32 = 4;
    const RESERVED: i32 = 5;
    const USED: i32 = 7;
    context(0);
    let all = free();
    let (mut pool, mut one, mut other) = (0_u64, 0_u64, 0_u64);
    ok!(cuDeviceGetDefaultMemPool(&mut pool, 0));
    ok!(cuMemAllocAsync(&mut one, 1000_usize, 0));
    ok!(cuMemAllocAsync_ptsz(&mut other, 3 * MIB, 0));
    assert_eq!((attribute(pool, RESERVED), attribute(pool, USED)), (32 * MIB, 1024 + 3 * MIB));
    assert_eq!(all - free(), 32 * MIB);
    ok!(cuMemFreeAsync(one, 0));
    ok!(cuMemFree_v2(other));
    assert_eq!(all - free(), 32 * MIB, "what is freed stays with the pool");
    ok!(cuStreamSynchronize(0));
    assert_eq!(free(), all, "until the program synchronises");

    let threshold = 40 * MIB;
    ok!(cuMemPoolSetAttribute(pool, THRESHOLD, &threshold));
    ok!(cuMemAllocAsync(&mut one, 33 * MIB, 0));
    ok!(cuMemFreeAsync(one, 0));
    ok!(cuCtxSynchronize());
    assert_eq!(attribute(pool, RESERVED), 34 * MIB, "below its threshold it keeps what it has");
    // An allocation that would fail takes the reserve.
    let blocks: Vec<u64> = std::iter::from_fn(|| alloc(2 * MIB)).collect();
    assert_eq!(blocks.len() as u64, all / (2 * MIB));
    assert_eq!(call!(cuMemAllocAsync(&mut one, 1_usize, 0)), 2);
    ok!(cuMemFree_v2(blocks[0]));
    ok!(cuMemAllocAsync(&mut one, 2 * MIB, 0));
    ok!(cuMemFreeAsync(one, 0));
    ok!(cuMemPoolTrimTo(pool, 0_usize));
    for at in &blocks[1..] {
        ok!(cuMemFree_v2(*at));
    }
    assert_eq!(free(), all);

    // A pool of one's own, with a ceiling.
    let mut wanted = [0_u64; 11];
    wanted[0] = 1;
    wanted[1] = 1;
    wanted[3] = 64 * MIB;
    let mut own = 0_u64;
    ok!(cuMemPoolCreate(&mut own, &wanted));
    ok!(cuMemAllocFromPoolAsync(&mut one, 60 * MIB, own, 0));
    assert_eq!(call!(cuMemAllocFromPoolAsync(&mut other, 60 * MIB, own, 0)), 2);
    ok!(cuMemPoolDestroy(own));
    assert_eq!(call!(cuMemAllocFromPoolAsync(&mut other, 1_usize, own, 0)), 1);
    assert_eq!(all - free(), 60 * MIB, "what is in use outlives its pool");
    ok!(cuMemFreeAsync(one, 0));
    assert_eq!(free(), all);
    assert_eq!(call!(cuMemPoolDestroy(pool)), 1, "the default pool is not the program's");
}

/// `CUmemPoolProps`.
fn pool_properties(kind: u64, location: u64, id: u64) -> [u64; 11] {
    let mut wanted = [0_u64; 11];
    wanted[0] = kind;
    wanted[1] = location | id << 32;
    wanted
}

const MANAGED: u64 = 2;

fn managed_pools() {
    const RESERVED: i32 = 5;
    const KIND: i32 = 9;
    const IS_MANAGED: i32 = 8;
    const POOL: i32 = 17;
    context(0);
    let all = free();
    // What it prefers: nothing, GPU 1, the host, a node of the host.
    for (location, id) in [(0, 0), (1, 1), (2, 0), (3, 0)] {
        let (mut pool, mut block) = (0_u64, 0_u64);
        ok!(cuMemPoolCreate(&mut pool, &pool_properties(MANAGED, location, id)));
        assert_eq!(attribute(pool, KIND), 2);
        ok!(cuMemAllocFromPoolAsync(&mut block, 33 * MIB, pool, 0));
        assert_eq!((attribute(pool, RESERVED), all - free()), (34 * MIB, 0), "it is in host memory");
        let (mut is_managed, mut of) = (0_u32, 0_u64);
        ok!(cuPointerGetAttribute(&mut is_managed, IS_MANAGED, block));
        ok!(cuPointerGetAttribute(&mut of, POOL, block));
        assert_eq!((is_managed & 1, of), (1, pool));
        // The program reads and writes it.
        // SAFETY: the block is there until it is freed.
        unsafe { *(block as *mut u64) = 7 };
        ok!(cuMemPrefetchAsync(block, 33 * MIB, 0, 0));
        ok!(cuStreamSynchronize(0));
        assert_eq!(all - free(), 34 * MIB, "and on a GPU where it is sent there");
        // SAFETY: as above.
        assert_eq!(unsafe { *(block as *const u64) }, 7);
        ok!(cuMemFreeAsync(block, 0));
        assert_eq!(free(), all);
        ok!(cuStreamSynchronize(0));
        assert_eq!(attribute(pool, RESERVED), 0);
        ok!(cuMemPoolDestroy(pool));
    }
    let mut pool = 0_u64;
    assert_eq!(call!(cuMemPoolCreate(&mut pool, &pool_properties(MANAGED, 4, 0))), 1);
    assert_eq!(call!(cuMemPoolCreate(&mut pool, &pool_properties(1, 0, 0))), 1, "pinned memory is somewhere");
}

fn no_managed_pools() {
    context(0);
    let mut pool = 0_u64;
    assert_eq!(call!(cuMemPoolCreate(&mut pool, &pool_properties(MANAGED, 1, 0))), 1);
}

#[test]
fn managed_pools_take_room_where_their_memory_is_and_come_with_cuda_13() {
    Driver::start(&format!("{PAGES}\ndriver: 580.82.07")).play("managed pools");
    Driver::start(PAGES).play("no managed pools");
}

/// Of each kind of memory at each place, as CUDA 13 has them.
fn default_pools() {
    const PINNED: u64 = 1;
    context(0);
    let pool_at = |place: u64, kind: u64| {
        let (mut default, mut current) = (0_u64, 0_u64);
        ok!(cuMemGetDefaultMemPool(&mut default, &place, kind));
        ok!(cuMemGetMemPool(&mut current, &place, kind));
        (default, current)
    };
    let mut of_device = 0_u64;
    ok!(cuDeviceGetDefaultMemPool(&mut of_device, 0));
    assert_eq!(pool_at(1, PINNED), (of_device, of_device));
    let all = free();
    let mut seen = vec![of_device];
    // What it prefers, or is of: nothing, GPU 0, GPU 1, the host, nodes of the host.
    for (kind, location, id) in [
        (MANAGED, 0, 0),
        (MANAGED, 1, 0),
        (MANAGED, 1, 1),
        (MANAGED, 2, 0),
        (MANAGED, 3, 0),
        (MANAGED, 3, 1),
        (PINNED, 1, 1),
        (PINNED, 2, 0),
        (PINNED, 3, 0),
    ] {
        let place = location | id << 32;
        let (pool, current) = pool_at(place, kind);
        assert!(!seen.contains(&pool) && pool == current, "{kind} {location} {id}");
        seen.push(pool);
        assert_eq!([9, 12, 11].map(|which| attribute(pool, which)), [kind, location, id]);
        assert_eq!(call!(cuMemPoolDestroy(pool)), 1, "it is not the program's");
        let (mut own, mut block) = (0_u64, 0_u64);
        ok!(cuMemPoolCreate(&mut own, &pool_properties(kind, location, id)));
        ok!(cuMemSetMemPool(&place, kind, own));
        assert_eq!(pool_at(place, kind), (pool, own));
        ok!(cuMemAllocFromPoolAsync(&mut block, MIB, pool, 0));
        assert_eq!(all - free(), 0, "none of it is on this GPU");
        ok!(cuMemFreeAsync(block, 0));
        // Not of another place, and not of another kind.
        assert_eq!(call!(cuMemSetMemPool(&(3_u64 | 5 << 32), kind, own)), 1);
        assert_eq!(call!(cuMemSetMemPool(&1_u64, PINNED, own)), 1);
        // One that is gone is nobody's.
        ok!(cuMemPoolDestroy(own));
        assert_eq!(pool_at(place, kind), (pool, pool));
    }
    // A place for whichever number is given.
    assert_eq!(pool_at(2 | 7 << 32, MANAGED), pool_at(2, MANAGED));
    // What is allocated in a stream is the device's own.
    let mut block = 0_u64;
    ok!(cuMemAllocAsync(&mut block, MIB, 0));
    assert_eq!(all - free(), 32 * MIB);
    ok!(cuMemFreeAsync(block, 0));
    let mut pool = 0_u64;
    for (location, kind) in [(0, PINNED), (4, PINNED), (4, MANAGED), (1, 0), (1, 3)] {
        assert_eq!(call!(cuMemGetDefaultMemPool(&mut pool, &location, kind)), 1, "{location} {kind}");
    }
}

#[test]
fn every_kind_of_memory_has_its_default_pool_at_each_place() {
    Driver::start(&format!("{PAGES}\ndriver: 580.82.07")).play("default pools");
}

#[test]
fn pools_keep_reserves_and_give_them_back() {
    Driver::start(PAGES).play("pools");
}

fn graphs() {
    context(0);
    let all = free();
    let (mut graph, mut stream, mut exec) = (0_u64, 0_u64, 0_u64);
    ok!(cuStreamCreate(&mut stream, 1));
    ok!(cuStreamBeginCapture_v2(stream, 0));
    let (mut one, mut other) = (0_u64, 0_u64);
    ok!(cuMemAllocAsync(&mut one, 10 * MIB, stream));
    ok!(cuMemAllocAsync(&mut other, 20 * MIB, stream));
    ok!(cuMemFreeAsync(one, stream));
    ok!(cuMemsetD8Async(other, 7, 4_usize, stream));
    assert_eq!(call!(cuStreamSynchronize(stream)), 900);
    ok!(cuStreamEndCapture(stream, &mut graph));
    assert_eq!(free(), all, "nothing is taken while a graph is made");
    let mut count = 0_usize;
    ok!(cuGraphGetNodes(graph, 0, &mut count));
    assert_eq!(count, 4);
    ok!(cuGraphInstantiateWithFlags(&mut exec, graph, 0));
    ok!(cuGraphLaunch(exec, stream));
    assert_eq!(all - free(), 30 * MIB);
    let mut byte = 0_u8;
    ok!(cuMemcpyDtoH_v2(&mut byte, other + 3, 1_usize));
    assert_eq!(byte, 7);
    assert_eq!(call!(cuGraphLaunch(exec, stream)), 1, "its memory is still in use");
    ok!(cuMemFreeAsync(other, stream));
    assert_eq!(all - free(), 30 * MIB, "graphs keep their memory in reserve");
    ok!(cuGraphLaunch(exec, stream));
    assert_eq!(all - free(), 30 * MIB);
    ok!(cuMemFree_v2(other));
    ok!(cuDeviceGraphMemTrim(0));
    assert_eq!(free(), all);
    ok!(cuGraphExecDestroy(exec));
    ok!(cuGraphDestroy(graph));

    // By hand, freed within the graph: no more than the most at once.
    let mut nodes = [0_u64; 3];
    ok!(cuGraphCreate(&mut graph, 0));
    // CUDA_MEM_ALLOC_NODE_PARAMS: pool properties, access, count, bytes, address.
    let mut wanted = [0_u64; 15];
    (wanted[0], wanted[1], wanted[13]) = (1, 1, 6 * MIB);
    ok!(cuGraphAddMemAllocNode(&mut nodes[0], graph, 0, 0, &mut wanted));
    let address = wanted[14];
    assert_ne!(address, 0);
    let first = nodes[0];
    ok!(cuGraphAddMemFreeNode(&mut nodes[1], graph, &first, 1, address));
    ok!(cuGraphInstantiateWithFlags(&mut exec, graph, 0));
    for _ in 0..3 {
        ok!(cuGraphLaunch(exec, 0));
        assert_eq!(all - free(), 6 * MIB);
    }
    // An allocation that would fail takes the reserve of graphs, too.
    assert!(alloc(all).is_some());
}

#[test]
fn graphs_take_memory_when_they_are_launched() {
    Driver::start(PAGES).play("graphs");
}

fn managed() {
    context(0);
    let all = free();
    let mut at = 0_u64;
    // More than the GPU has: it is in host memory.
    ok!(cuMemAllocManaged(&mut at, 3 * all, 1));
    assert_eq!(free(), all);
    ok!(cuMemFree_v2(at));
    ok!(cuMemAllocManaged(&mut at, 10 * MIB, 1));
    // SAFETY: managed memory is the process's own, too.
    unsafe { (at as *mut u8).write(42) };
    ok!(cuMemPrefetchAsync(at, 10 * MIB, 0, 0));
    assert_eq!(all - free(), 10 * MIB);
    ok!(cuMemPrefetchAsync(at, 10 * MIB, 1, 0));
    assert_eq!(free(), all, "it went to the other GPU");
    ok!(cuMemPrefetchAsync(at, 10 * MIB, -1, 0));
    ok!(cuMemsetD8_v2(at + 1, 43, 1_usize));
    assert_eq!(all - free(), 10 * MIB, "a fill brings it to the GPU that does it");
    // SAFETY: as above.
    assert_eq!(unsafe { [(at as *const u8).read(), (at as *const u8).add(1).read()] }, [42, 43]);
    ok!(cuMemFree_v2(at));
    assert_eq!(free(), all);
}

#[test]
fn managed_memory_takes_room_where_it_is() {
    Driver::start(PAGES).play("managed");
}

fn contents() {
    context(0);
    let from: Vec<u8> = (0..3 * MIB).map(|at| (at % 251) as u8).collect();
    let mut to = vec![0_u8; from.len()];
    let at = alloc(from.len() as u64).unwrap();
    ok!(cuMemcpyHtoD_v2(at, &from[0], from.len()));
    ok!(cuMemcpyDtoH_v2(&mut to[0], at, to.len()));
    assert_eq!(from, to);
    let other = alloc(from.len() as u64).unwrap();
    ok!(cuMemcpyDtoD_v2(other + 5, at + 1000, 100_000_usize));
    ok!(cuMemsetD32_v2(other + 16, 0x0102_0304_u32, 2_usize));
    ok!(cuMemcpyDtoH_v2(&mut to[0], other, 100_005_usize));
    assert_eq!(to[..5], [0; 5]);
    assert_eq!(to[16..24], [4, 3, 2, 1, 4, 3, 2, 1]);
    assert_eq!(to[24..100_005], from[1000 + 19..1000 + 100_000]);
    // A copy must stay within its block, and device memory that is freed is none.
    assert_eq!(call!(cuMemcpyDtoH_v2(&mut to[0], at + 3 * MIB - 4, 5_usize)), 1);
    assert_eq!(call!(cuMemsetD8_v2(at + 3 * MIB - 4, 0, 5_usize)), 1);
    ok!(cuMemFree_v2(other));
    assert_eq!(call!(cuMemcpyDtoH_v2(&mut to[0], other, 1_usize)), 1);
    // A pitched box out of the block: 2 rows of 3 bytes.
    let mut copy = [0_u64; 16];
    (copy[0], copy[1], copy[2], copy[4], copy[6]) = (7, 2, 2, at, 512);
    (copy[9], copy[10], copy[13], copy[14], copy[15]) = (1, std::ptr::from_mut(&mut to[0]) as u64, 10, 3, 2);
    ok!(cuMemcpy2D_v2(&copy));
    assert_eq!(to[..3], from[1031..1034]);
    assert_eq!(to[10..13], from[1543..1546]);
    // Mapped memory is the physical allocation's, at every address.
    let (mut handle, mut range) = (0_u64, 0_u64);
    ok!(cuMemCreate(&mut handle, 2 * MIB, &properties(1, 0, 0), 0));
    ok!(cuMemAddressReserve(&mut range, 4 * MIB, 0, 0, 0));
    ok!(cuMemMap(range, 2 * MIB, 0, handle, 0));
    ok!(cuMemMap(range + 2 * MIB, 2 * MIB, 0, handle, 0));
    ok!(cuMemcpyHtoD_v2(range + 9, &from[0], 100_usize));
    ok!(cuMemcpyDtoH_v2(&mut to[0], range + 2 * MIB + 9, 100_usize));
    assert_eq!(to[..100], from[..100]);
    // What a pointer points to.
    let (mut kind, mut base, mut size) = (0_u32, 0_u64, 0_usize);
    ok!(cuPointerGetAttribute(&mut kind, 2, at + 5));
    ok!(cuMemGetAddressRange_v2(&mut base, &mut size, at + 5));
    assert_eq!((kind, base, size), (2, at, from.len()));
    assert_eq!(call!(cuPointerGetAttribute(&mut kind, 2, &from[0])), 1);
}

#[test]
fn what_is_written_can_be_read() {
    Driver::start(PAGES).play("contents");
}

/// Holds memory of three kinds, until it is killed or let go on.
fn hold() {
    context(0);
    alloc(100 * MIB).unwrap();
    let mut handle = 0_u64;
    ok!(cuMemCreate(&mut handle, 30 * MIB, &properties(1, 0, 0), 0));
    ok!(cuMemAllocAsync(&mut handle, 20 * MIB, 0));
    say("ready");
}

#[test]
fn processes_give_back_what_they_held_however_they_end() {
    let driver = Driver::start("version: 1\ngpus: [{memoryMib: 1024, contextMib: 18, granularityKib: 64}]");
    let each = (100 + 30 + 32 + 18) * MIB;
    let mut actors: Vec<_> = (0..5).map(|_| driver.begin("hold")).collect();
    assert_eq!(driver.used(0), 5 * each);
    let shown = driver.show();
    let pids: Vec<u64> =
        shown["processes"].as_array().unwrap().iter().map(|one| one["pid"].as_u64().unwrap()).collect();
    for actor in &actors {
        assert!(pids.contains(&actor.pid().into()), "a process has its own PID");
    }
    assert!(!driver.actor("hold").output().unwrap().status.success(), "a sixth does not fit");
    eventually("the sixth's memory is back", || driver.used(0) == 5 * each);
    actors.pop().unwrap().kill();
    actors.pop().unwrap().end();
    eventually("two processes' memory is back", || driver.used(0) == 3 * each);
    for actor in actors {
        actor.kill();
    }
    eventually("all memory is back", || driver.used(0) == 0);
}

fn contexts() {
    ok!(cuInit(0));
    let (mut primary, mut again, mut created) = (0_u64, 0_u64, 0_u64);
    ok!(cuDevicePrimaryCtxRetain(&mut primary, 0));
    ok!(cuDevicePrimaryCtxRetain(&mut again, 0));
    assert_eq!(primary, again);
    assert_eq!(call!(cuMemAlloc_v2(&mut again, 1_usize)), 201, "none is current");
    ok!(cuCtxPushCurrent_v2(primary));
    assert_eq!(free(), (1024 - 50) * MIB);
    ok!(cuCtxCreate_v2(&mut created, 0, 0));
    assert_eq!(free(), (1024 - 50) * MIB, "a process takes its overhead once");
    let lost = alloc(10 * MIB).unwrap();
    ok!(cuCtxDestroy_v2(created));
    assert_eq!(free(), (1024 - 50) * MIB, "what was allocated in a context goes with it");
    assert_eq!(call!(cuMemFree_v2(lost)), 1);
    assert_eq!(call!(cuCtxPushCurrent_v2(created)), 201);
    ok!(cuDevicePrimaryCtxRelease_v2(0));
    alloc(10 * MIB).unwrap();
    ok!(cuDevicePrimaryCtxRelease_v2(0));
    assert_eq!(call!(cuMemAlloc_v2(&mut again, 1_usize)), 709, "the current context is gone");
    assert_eq!(call!(cuDevicePrimaryCtxRelease_v2(0)), 201);
    say("ready");
}

#[test]
fn a_process_takes_its_overhead_with_its_first_context() {
    let driver = Driver::start("version: 1\ngpus: [{count: 2, memoryMib: 1024, contextMib: 50}]");
    let actor = driver.begin("contexts");
    assert_eq!(driver.used(0), 0, "and gives it back with its last");
    actor.end();
}

fn fork() {
    context(0);
    let at = alloc(64 * MIB).unwrap();
    // SAFETY: the child calls only the driver, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut more = 0_u64;
        let codes = [
            call!(cuInit(0)),
            call!(cuMemAlloc_v2(&mut more, 1_usize)),
            call!(cuMemFree_v2(at)),
            call!(cuCtxSynchronize()),
        ];
        // SAFETY: as above.
        unsafe { libc::_exit(i32::from(codes != [3; 4])) };
    }
    let mut status = 0;
    // SAFETY: waits for the child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "a forked child has nothing of its parent's driver");
    assert_eq!(free(), (1000 - 64) * MIB, "and its end takes nothing from the parent");
    ok!(cuMemFree_v2(at));
    alloc(32 * MIB).unwrap();
    // A child that lives on holds the connection, as it would hold a real driver's file descriptors.
    // SAFETY: the child only waits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above.
        unsafe {
            libc::pause();
            libc::_exit(0);
        }
    }
    println!("ready {child}");
    say("ready");
}

#[test]
fn a_forked_child_has_no_context_but_keeps_its_parents_memory() {
    let driver = Driver::start(PAGES);
    let mut actor = Actor::of(driver.piped("fork").spawn().unwrap());
    let child: i32 = actor.hear("ready").parse().unwrap();
    actor.kill();
    eventually("the process is known to be gone", || driver.show()["processes"][0]["gone"] == true);
    assert_eq!(driver.used(0), 32 * MIB);
    // SAFETY: a child of the killed process.
    unsafe { libc::kill(child, libc::SIGKILL) };
    eventually("the child's end gives it back", || driver.used(0) == 0);
}

/// Allocates and frees at random from several threads, until it is killed.
fn churn() {
    let context = context(0);
    let seed = std::process::id();
    println!("ready");
    std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            scope.spawn(move || {
                ok!(cuCtxSetCurrent(context));
                let mut random = u64::from(seed) << 8 | thread;
                let mut held: Vec<u64> = vec![];
                loop {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let choice = random >> 33;
                    if choice.is_multiple_of(3) && !held.is_empty() {
                        ok!(cuMemFree_v2(held.swap_remove(choice as usize % held.len())));
                    } else if let Some(at) = alloc(1 + choice % (8 * MIB)) {
                        held.push(at);
                    } else {
                        held.drain(..).for_each(|at| ok!(cuMemFree_v2(at)));
                    }
                    assert!(free() <= 1000 * MIB);
                }
            });
        }
    });
}

#[test]
fn killing_processes_at_any_instant_loses_no_byte() {
    let driver = Driver::start(PAGES);
    let mut actors: Vec<_> = (0..6).map(|_| driver.begin("churn")).collect();
    for round in 0..40 {
        let shown = driver.show();
        assert!(shown["gpus"][0]["usedBytes"].as_u64().unwrap() <= 1000 * MIB);
        actors.swap_remove(round % actors.len()).kill();
        actors.push(driver.begin("churn"));
    }
    for actor in actors {
        actor.kill();
    }
    eventually("everything is back", || driver.used(0) == 0);
    driver.play("exhaust");
}

fn exporter() {
    context(0);
    let wanted = properties(1, 0, 1);
    let mut handle = 0_u64;
    ok!(cuMemCreate(&mut handle, 64 * MIB, &wanted, 0));
    let mut descriptor = -1_i32;
    ok!(cuMemExportToShareableHandle(&mut descriptor, handle, 1, 0));
    // SAFETY: a descriptor that was just given to us.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let mut imported = 0_u64;
    ok!(cuMemImportFromShareableHandle(&mut imported, std::os::fd::AsRawFd::as_raw_fd(&descriptor), 1));
    assert_eq!(free(), (1000 - 64) * MIB, "a second handle takes no more");
    ok!(cuMemRelease(handle));
    ok!(cuMemRelease(imported));
    assert_eq!(free(), (1000 - 64) * MIB, "the descriptor keeps the memory");
    ok!(cuMemImportFromShareableHandle(&mut imported, std::os::fd::AsRawFd::as_raw_fd(&descriptor), 1));
    drop(descriptor);
    assert_eq!(free(), (1000 - 64) * MIB);
    ok!(cuMemRelease(imported));
    eventually("it is given back with its last user", || free() == 1000 * MIB);

    // Not asked for at creation, or no descriptor of ours.
    ok!(cuMemCreate(&mut handle, 2 * MIB, &properties(1, 0, 0), 0));
    let mut descriptor = -1_i32;
    assert_eq!(call!(cuMemExportToShareableHandle(&mut descriptor, handle, 1, 0)), 1);
    assert_eq!(call!(cuMemImportFromShareableHandle(&mut imported, 0, 1)), 1);
    assert_eq!(call!(cuMemImportFromShareableHandle(&mut imported, -1_i32, 1)), 1);
}

#[test]
fn exported_memory_lives_as_long_as_anyone_has_it() {
    let driver = Driver::start(PAGES);
    driver.play("exporter");
    eventually("everything is back", || driver.used(0) == 0);
}

/// `CUipcMemHandle`, which goes by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
struct IpcHandle([u64; 8]);

fn open_handle(handle: IpcHandle) -> (i32, u64) {
    let at = common::symbol("cuIpcOpenMemHandle_v2");
    let mut opened = 0_u64;
    // SAFETY: the function's declaration in cuda.h.
    let code = unsafe {
        let open = std::mem::transmute::<
            *mut std::ffi::c_void,
            unsafe extern "C" fn(*mut u64, IpcHandle, u32) -> i32,
        >(at);
        open(&raw mut opened, handle, 1)
    };
    (code, opened)
}

fn owner() {
    context(0);
    let at = alloc(10 * MIB).unwrap();
    let (mut handle, mut again) = (IpcHandle([0; 8]), IpcHandle([0; 8]));
    ok!(cuIpcGetMemHandle(&mut handle, at + 5));
    ok!(cuIpcGetMemHandle(&mut again, at));
    assert_eq!(handle, again);
    assert_eq!(open_handle(handle).0, 201, "not in the same process");
    let words = handle.0.map(|word| word.to_string()).join(" ");
    if say(&format!("handle {words}")) {
        ok!(cuMemFree_v2(at));
        say("freed");
    }
}

fn opener() {
    context(0);
    let handle = |line: &str| {
        let words: Vec<u64> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
        IpcHandle(words.try_into().unwrap())
    };
    let handle = handle(&std::env::var("SIM_TEST_HANDLE").unwrap());
    let before = free();
    let (code, at) = open_handle(handle);
    assert_eq!(code, 0);
    assert_eq!(open_handle(handle), (0, at), "the same block has the same address");
    assert_eq!(free(), before, "another's block takes nothing here");
    let (mut base, mut size) = (0_u64, 0_usize);
    ok!(cuMemGetAddressRange_v2(&mut base, &mut size, at + 100));
    assert_eq!((base, size as u64), (at, 10 * MIB));
    assert_eq!(call!(cuMemFree_v2(at)), 1, "it is not ours to free");
    ok!(cuIpcCloseMemHandle(at));
    ok!(cuIpcCloseMemHandle(at));
    assert_eq!(call!(cuIpcCloseMemHandle(at)), 1);
    assert_eq!(open_handle(IpcHandle([1; 8])).0, 1);
    say("ready");
    assert_eq!(open_handle(handle).0, 1, "its owner freed it");
}

#[test]
fn another_process_opens_a_block_without_owning_it() {
    let driver = Driver::start(PAGES);
    let mut owner = Actor::of(driver.piped("owner").spawn().unwrap());
    let handle = owner.hear("handle");
    let mut opener = Actor::of(driver.piped("opener").env("SIM_TEST_HANDLE", handle).spawn().unwrap());
    opener.hear("ready");
    assert_eq!(driver.used(0), 10 * MIB);
    owner.go_on("freed");
    assert_eq!(driver.used(0), 0);
    opener.end();
    owner.end();
}

fn modules() {
    context(0);
    let all = free();
    let text =
        c".version 8.0\n.target sm_80\n.address_size 64\n.visible .global .align 4 .b8 table[5000000];\n\
        .visible .entry work(.param .u64 a)\n{ ret; }\n";
    let (mut module, mut function, mut at, mut bytes) = (0_u64, 0_u64, 0_u64, 0_usize);
    let image: *const std::ffi::c_void = text.as_ptr().cast();
    ok!(cuModuleLoadData(&mut module, image));
    assert_eq!(all - free(), 6 * MIB + MIB / 2, "its variable, and what a module takes");
    let name = |text: &'static std::ffi::CStr| text.as_ptr().cast::<std::ffi::c_void>();
    ok!(cuModuleGetGlobal_v2(&mut at, &mut bytes, module, name(c"table")));
    assert_eq!(bytes, 5_000_000);
    assert_eq!(call!(cuMemFree_v2(at)), 1, "a variable is the module's");
    ok!(cuModuleGetFunction(&mut function, module, name(c"work")));
    assert_eq!(call!(cuModuleGetFunction(&mut at, module, name(c"play"))), 500);
    let none: *const std::ffi::c_void = std::ptr::null();
    ok!(cuLaunchKernel(function, 4, 1, 1, 256, 1, 1, 0, 0, none, none));
    assert_eq!(call!(cuLaunchKernel(function, 4, 1, 1, 2000, 1, 1, 0, 0, none, none)), 1);
    assert_eq!(call!(cuLaunchKernel(99, 4, 1, 1, 1, 1, 1, 0, 0, none, none)), 400);
    let (mut library, mut kernel) = (0_u64, 0_u64);
    ok!(cuLibraryLoadData(&mut library, image, none, none, 0, none, none, 0));
    ok!(cuLibraryGetKernel(&mut kernel, library, name(c"work")));
    ok!(cuLaunchKernel_ptsz(kernel, 2, 1, 1, 32, 1, 1, 0, 0, none, none));
    ok!(cuKernelGetFunction(&mut function, kernel));
    ok!(cuLibraryUnload(library));
    ok!(cuModuleUnload(module));
    assert_eq!(free(), all);
    assert_eq!(call!(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, none, none)), 400);
    say("ready");
}

#[test]
fn modules_take_memory_and_their_kernels_are_counted() {
    let driver = Driver::start("version: 1\ngpus: [{memoryMib: 1024, moduleKib: 512}]");
    let actor = driver.begin("modules");
    let shown = driver.show();
    assert_eq!(shown["processes"][0]["launches"][0], 2);
    assert_eq!(shown["processes"][0]["threads"][0], 4 * 256 + 2 * 32);
    actor.end();
}
