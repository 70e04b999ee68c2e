//! The memory ceiling, over every kind of allocation: what the account says is what the driver gave out, to the byte, and
//! never more than the ceiling. On a driver in small (tests/common/model.c) that hands memory out by the real one's rules.

mod common;

use std::{fs::File, io::Write, os::unix::fs::FileExt, process::Stdio};

use common::{MIB, Model, OUT_OF_MEMORY, Session, can_mount, limit, model_uuid};
use region::{GpuLimit, LimitsWriter};

const CEILING: u64 = 1024 * MIB;
const TOTAL: u64 = 40960 * MIB;

fn model() -> Option<Model> {
    can_mount().then(|| Model::new(TOTAL, &[limit(0, CEILING), limit(1, CEILING / 2)]))
}

/// The account of GPU 0 is what the driver gave out, and CUDA and NVML both say so.
#[track_caller]
fn exact(model: &Model, session: &mut Session, bytes: u64) {
    assert_eq!((model.held(0), model.accounted(0)), (bytes, bytes), "held by the driver, accounted");
    assert_eq!(session.info(), (CEILING - bytes, CEILING));
    assert_eq!(session.call("nvml 0"), (0, CEILING - bytes, CEILING));
}

/// One process has another get a descriptor of physical memory, through socket number `socket`.
fn hand_over(handle: u64, from: &mut Session, to: &mut Session, socket: u32) {
    to.must(&format!("listen {socket}"));
    from.must(&format!("export {handle}"));
    from.must(&format!("send {socket}"));
    to.must("receive");
}

#[test]
fn the_ceiling_holds_and_what_is_freed_is_to_be_had_again() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    exact(&model, &mut session, 0);
    assert_eq!(session.call("total 0").1, CEILING);
    assert_eq!(session.call("total 1").1, CEILING / 2);
    let first = session.must(&format!("alloc {}", CEILING / 2));
    exact(&model, &mut session, CEILING / 2);
    assert_eq!(session.call(&format!("alloc {}", CEILING / 2 + 1)).0, OUT_OF_MEMORY);
    assert_eq!(model.refusals(0), 1);
    exact(&model, &mut session, CEILING / 2);
    session.must(&format!("alloc {}", CEILING / 2));
    assert_eq!(session.call("alloc 1").0, OUT_OF_MEMORY);
    session.must(&format!("free {first}"));
    exact(&model, &mut session, CEILING / 2);
    // Freed already, and never ours: the driver's answer, and no change.
    assert_eq!(session.call(&format!("free {first}")).0, 1);
    assert_eq!(session.call("free 4096").0, 1);
    session.must("free 0");
    exact(&model, &mut session, CEILING / 2);
    // Small blocks take what the driver takes for them.
    session.must("alloc 1");
    exact(&model, &mut session, CEILING / 2 + 512);
    assert_eq!(session.call(&format!("alloc {}", usize::MAX)).0, OUT_OF_MEMORY);
    assert_eq!(session.call("alloc 0").0, 1);
    exact(&model, &mut session, CEILING / 2 + 512);
    // Large ones take whole pages.
    session.must(&format!("alloc {}", 3 * MIB + 1));
    exact(&model, &mut session, CEILING / 2 + 512 + 4 * MIB);
    assert_eq!(model.passed(), 0);
}

#[test]
fn a_program_that_resolves_as_a_runtime_does_is_held_as_well() {
    let Some(model) = model() else { return };
    for version in ["11080", "12040", "13000"] {
        let mut session = Session::of(model.command().env("SESSION_RESOLVES", version));
        session.must("init 0");
        for (make, end, bytes) in [
            (format!("alloc {MIB}"), "free", MIB),
            (format!("managed {MIB}"), "free", MIB),
            ("pitch 512 100".into(), "free", 51200),
            ("array 128 128".into(), "free-array", 65536),
            (format!("create {}", 2 * MIB), "release", 2 * MIB),
            (format!("async {MIB}"), "free-async", 32 * MIB),
            (format!("async-thread {MIB}"), "free-async", 32 * MIB),
        ] {
            let key = session.must(&make);
            exact(&model, &mut session, bytes);
            session.must(&format!("{end} {key}"));
            session.must("wait");
            exact(&model, &mut session, 0);
        }
        assert_eq!(session.call(&format!("alloc {}", CEILING + 1)).0, OUT_OF_MEMORY, "{version}");
        session.kill();
    }
    assert_eq!(model.passed(), 0);
}

/// A copy of the shim, with maps of its own, has the driver's copy behind it and the process's slot.
#[test]
fn another_namespace_of_the_loader_is_under_the_same_ceiling() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let here = session.must(&format!("alloc {}", 600 * MIB));
    assert_eq!(session.call(&format!("elsewhere {}", 425 * MIB)).0, OUT_OF_MEMORY);
    let there = session.must(&format!("elsewhere {}", 424 * MIB));
    exact(&model, &mut session, CEILING);
    assert_eq!(session.call("elsewhere"), (0, 0, CEILING));
    assert_eq!(session.call("alloc 1").0, OUT_OF_MEMORY);
    session.must(&format!("free {here}"));
    exact(&model, &mut session, 424 * MIB);
    session.must(&format!("elsewhere 0 {there}"));
    exact(&model, &mut session, 0);
    session.must(&format!("elsewhere {CEILING}"));
    assert_eq!(model.passed(), 0);
    session.kill();
    assert_eq!((model.held(0), model.accounted(0)), (0, 0));
}

#[test]
fn a_refusal_is_said_on_stderr_only_if_asked() {
    let Some(model) = model() else { return };
    for asked in [false, true] {
        let mut command = model.command();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if asked {
            command.env("VCUDA_LOG", "1");
        }
        let mut child = command.spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        writeln!(input, "init 0\nalloc {}", 2 * CEILING).unwrap();
        drop(input);
        let output = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "0 0 0\n2 0 0\n");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(said.lines().count(), usize::from(asked), "{said}");
        assert_eq!(said.contains(&CEILING.to_string()), asked, "{said}");
    }
}

#[test]
fn a_container_that_scribbles_over_its_usage_spoils_its_figures_and_nothing_else() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let file = File::options().write(true).open(model.room.usage()).unwrap();
    let mut random = 0x1234_5678_9abc_def1_u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for round in 0..300 {
        // Totals, the first slots, the header, anything; whole pages or single words.
        let at = match round % 4 {
            0 => 4096 + next() % 2048 / 8 * 8,
            1 => 8192 + next() % 4096 / 8 * 8,
            2 => next() % 4096 / 8 * 8,
            _ => next() % (8192 + 1024 * 512 + 1024 * 192 - 4096),
        };
        let words = if round % 3 == 0 { 512 } else { 1 };
        let garbage: Vec<u8> = (0..words).flat_map(|_| next().to_le_bytes()).collect();
        file.write_all_at(&garbage, at).unwrap();
        // Whatever it answers, it answers, and what is freed is the driver's to free.
        let (result, block, _) = session.call("alloc 4096");
        assert!(matches!(result, 0 | OUT_OF_MEMORY), "{result}");
        if result == 0 {
            session.must(&format!("free {block}"));
        }
        let (free, total) = session.info();
        assert!(free <= total && total == CEILING);
        assert!(matches!(session.call("nvml-processes 0").0, 0 | 7));
    }
    assert_eq!(model.held(0), 0);
}

#[test]
fn null_outputs_are_the_drivers_business() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    session.must(&format!("alloc {MIB}"));
    assert_eq!(session.call("info 1 0"), (0, 0, CEILING));
    assert_eq!(session.call("info 0 1"), (0, CEILING - MIB, 0));
    session.must("info 1 1");
    // No context is current.
    session.must("current 0");
    assert_eq!(session.call("info").0, 201);
    assert_eq!(session.call("alloc 512").0, 201);
    assert_eq!(model.accounted(0), MIB);
}

#[test]
fn pitched_managed_and_arrays_count_as_they_are() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let pitched = session.must("pitch 5000 100");
    exact(&model, &mut session, 5120 * 100);
    session.must(&format!("free {pitched}"));
    let managed = session.must(&format!("managed {}", 10 * MIB));
    exact(&model, &mut session, 10 * MIB);
    session.must(&format!("free {managed}"));
    let array = session.must("array 1000 1000");
    exact(&model, &mut session, (4_000_000_u64).next_multiple_of(65536));
    session.must(&format!("free-array {array}"));
    let array = session.must("array2 100 100");
    exact(&model, &mut session, 65536);
    session.must(&format!("free-array {array}"));
    let mipmap = session.must("mipmap 512 512 4");
    let levels = (0..4).map(|level| (512_u64 >> level).pow(2) * 16).map(|size| size.next_multiple_of(65536));
    exact(&model, &mut session, levels.sum());
    session.must(&format!("free-mipmap {mipmap}"));
    // Sparse ones, and those to be mapped later, take nothing yet.
    session.must("array 100000 100000 64");
    session.must("array 100000 100000 128");
    exact(&model, &mut session, 0);
    // None of them gets past the ceiling.
    for command in ["pitch 1000000 2000", "managed 2000000000", "array 100000 10000", "mipmap 10000 10000 1"]
    {
        assert_eq!(session.call(command).0, OUT_OF_MEMORY, "{command}");
    }
}

#[test]
fn a_pitched_block_that_turns_out_larger_counts_as_it_is_or_is_not_had() {
    let Some(model) = model() else { return };
    let mut session = Session::of(model.command().env("MODEL_LONG_ROWS", "1"));
    session.must("init 0");
    let pitched = session.must("pitch 5000 100");
    exact(&model, &mut session, (5120 + 512) * 100);
    session.must(&format!("free {pitched}"));
    // All but room for what was to be expected.
    for bytes in [CEILING - 2 * MIB, MIB, MIB - 5120 * 100] {
        session.must(&format!("alloc {bytes}"));
    }
    assert_eq!(session.call("pitch 5000 100").0, OUT_OF_MEMORY);
    exact(&model, &mut session, CEILING - 5120 * 100);
}

#[test]
fn physical_memory_counts_while_a_handle_or_a_mapping_lives() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let handle = session.must(&format!("create {}", 64 * MIB));
    exact(&model, &mut session, 64 * MIB);
    let here = session.must(&format!("map {handle} {}", 64 * MIB));
    let there = session.must(&format!("map {handle} {}", 64 * MIB));
    session.must(&format!("release {handle}"));
    session.must(&format!("unmap {here} {}", 64 * MIB));
    exact(&model, &mut session, 64 * MIB);
    let again = session.must(&format!("retain {}", there + 5 * MIB));
    session.must(&format!("unmap {there} {}", 64 * MIB));
    exact(&model, &mut session, 64 * MIB);
    session.must(&format!("release {again}"));
    exact(&model, &mut session, 0);
    assert_eq!(session.call(&format!("release {again}")).0, 1);
    // Several mappings in a row go at once.
    let [one, two] = [0, 1].map(|_| session.must(&format!("create {}", 2 * MIB)));
    let base = session.must(&format!("map {one} {}", 4 * MIB));
    session.must(&format!("unmap {base} {}", 4 * MIB));
    session.must(&format!("map-at {base} {} {one}", 2 * MIB));
    session.must(&format!("map-at {} {} {two}", base + 2 * MIB, 2 * MIB));
    session.must(&format!("release {one}"));
    session.must(&format!("release {two}"));
    exact(&model, &mut session, 4 * MIB);
    session.must(&format!("unmap {base} {}", 4 * MIB));
    exact(&model, &mut session, 0);
    // The host's memory is not the share's, whatever number stands where a device would (HAMi-core#187).
    session.must(&format!("create-host {}", 4096 * MIB));
    exact(&model, &mut session, 0);
    // Of another device, and of none.
    session.must(&format!("create {} 1", 256 * MIB));
    assert_eq!((model.accounted(1), model.held(1)), (256 * MIB, 256 * MIB));
    assert_eq!(session.call(&format!("create {} 1", 512 * MIB)).0, OUT_OF_MEMORY);
    assert_eq!(session.call(&format!("create {} 17", 2 * MIB)).0, 101);
    assert_eq!(session.call("create 1").0, 1);
    exact(&model, &mut session, 0);
}

#[test]
fn physical_memory_counts_while_a_sparse_array_uses_it() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let array = session.must("array 4096 4096 64");
    let [one, two] = [0, 1].map(|_| session.must(&format!("create {}", 64 * MIB)));
    session.must(&format!("tile {array} {one} 0"));
    session.must(&format!("tile {array} {one} 1"));
    session.must(&format!("tile {array} {two} 2"));
    session.must(&format!("release {one}"));
    session.must(&format!("release {two}"));
    exact(&model, &mut session, 128 * MIB);
    // Nothing in the place of the one, something else in that of the other.
    session.must(&format!("tile {array} 0 0"));
    exact(&model, &mut session, 128 * MIB);
    let three = session.must(&format!("create {}", 2 * MIB));
    session.must(&format!("tile {array} {three} 1"));
    session.must(&format!("release {three}"));
    exact(&model, &mut session, 66 * MIB);
    // Unmapped in a stream that is at work, it goes when that has come to it.
    let stream = session.must("stream");
    session.must(&format!("launch-by 200000000 {stream} 0"));
    session.must(&format!("tile {array} 0 {}", 2 + stream * 100));
    exact(&model, &mut session, 66 * MIB);
    session.must(&format!("wait {stream}"));
    exact(&model, &mut session, 2 * MIB);
    session.must(&format!("free-array {array}"));
    exact(&model, &mut session, 0);
    assert_eq!(model.passed(), 0);
}

/// The default stream in which a tile is unmapped is the one of that context, and of that thread.
#[test]
fn a_tile_leaves_when_its_own_default_stream_has_come_to_it() {
    let Some(model) = model() else { return };
    for (stream, elsewhere) in [(0, "context 0"), (2, "context 0"), (2, "thread")] {
        let mut session = model.ready();
        let array = session.must("array 4096 4096 64");
        let memory = session.must(&format!("create {}", 64 * MIB));
        session.must(&format!("tile {array} {memory} 0"));
        session.must(&format!("release {memory}"));
        session.must("clock 0");
        session.must(&format!("launch-by 1000 {stream} 0"));
        session.must(&format!("tile {array} 0 {}", stream * 100));
        if elsewhere == "thread" {
            session.must("beside-info");
            session.must("go-on");
        } else {
            session.must(elsewhere);
        }
        exact(&model, &mut session, 64 * MIB);
        session.must("clock 1");
        session.must("primary 0");
        // All of a context is waited for by any thread.
        session.must("beside-sync");
        session.must("go-on");
        exact(&model, &mut session, 0);
        session.kill();
    }
}

#[test]
fn a_tile_leaves_when_its_stream_has_come_to_it_though_that_is_destroyed() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let (stream, array) = (session.must("stream"), session.must("array 4096 4096 64"));
    let memory = session.must(&format!("create {}", 64 * MIB));
    session.must(&format!("tile {array} {memory} 0"));
    session.must(&format!("release {memory}"));
    session.must("clock 0");
    session.must(&format!("launch-by 1000 {stream} 0"));
    session.must(&format!("tile {array} 0 {}", stream * 100));
    session.must(&format!("destroy-stream {stream}"));
    exact(&model, &mut session, 64 * MIB);
    assert_eq!(session.call(&format!("alloc {}", CEILING - 32 * MIB)).0, OUT_OF_MEMORY);
    session.must("clock 1");
    session.must("wait");
    exact(&model, &mut session, 0);
    assert_eq!((model.passed(), session.must("dead-asked")), (0, 0));
}

#[test]
fn a_context_takes_its_sparse_arrays_along_and_what_leaves_them() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let context = session.must("context 0");
    let (stream, array) = (session.must("stream"), session.must("array 4096 4096 64"));
    for tile in [0, 1] {
        let memory = session.must(&format!("create {}", 64 * MIB));
        session.must(&format!("tile {array} {memory} {tile}"));
        session.must(&format!("release {memory}"));
    }
    session.must("clock 0");
    session.must(&format!("launch-by 1000 {stream} 0"));
    session.must(&format!("tile {array} 0 {}", stream * 100));
    exact(&model, &mut session, 128 * MIB);
    session.must(&format!("destroy {context}"));
    session.must("primary 0");
    exact(&model, &mut session, 0);
    assert_eq!(session.must("dead-asked"), 0);
}

#[test]
fn physical_memory_counts_while_a_multicast_object_uses_it() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    for (bind, bind_address) in [("bind", "bind-address"), ("bind-2", "bind-address-2")] {
        let object = session.must("multicast");
        let [one, two] = [0, 1].map(|_| session.must(&format!("create {}", 2 * MIB)));
        let address = session.must(&format!("map {two} {}", 2 * MIB));
        session.must(&format!("{bind} {object} {one} 0"));
        session.must(&format!("{bind_address} {object} {address} {}", 2 * MIB));
        session.must(&format!("unmap {address} {}", 2 * MIB));
        session.must(&format!("release {one}"));
        session.must(&format!("release {two}"));
        exact(&model, &mut session, 4 * MIB);
        session.must(&format!("unbind {object} 1 0"));
        exact(&model, &mut session, 4 * MIB);
        session.must(&format!("unbind {object} 0 0"));
        exact(&model, &mut session, 2 * MIB);
        // A mapping keeps the object, and the object what is bound to it.
        let window = session.must(&format!("map {object} {}", 64 * MIB));
        session.must(&format!("release {object}"));
        exact(&model, &mut session, 2 * MIB);
        session.must(&format!("unmap {window} {}", 64 * MIB));
        exact(&model, &mut session, 0);
    }
    assert_eq!(model.passed(), 0);
}

/// The same of logical endpoints, which are numbers.
#[test]
fn physical_memory_counts_while_a_logical_endpoint_uses_it() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    session.must("endpoint 3");
    let [one, two] = [0, 1].map(|_| session.must(&format!("create {}", 2 * MIB)));
    let address = session.must(&format!("map {two} {}", 2 * MIB));
    session.must(&format!("endpoint-bind 3 {one} 0"));
    session.must(&format!("endpoint-bind-address 3 {address} {}", 2 * MIB));
    session.must(&format!("unmap {address} {}", 2 * MIB));
    session.must(&format!("release {one}"));
    session.must(&format!("release {two}"));
    exact(&model, &mut session, 4 * MIB);
    session.must("endpoint-unbind 3 1 0");
    exact(&model, &mut session, 4 * MIB);
    session.must("endpoint-unbind 3 0 0");
    exact(&model, &mut session, 2 * MIB);
    session.must("endpoint-destroy 3");
    exact(&model, &mut session, 0);
    // Its number may be another's.
    session.must("endpoint 3");
    let three = session.must(&format!("create {}", 2 * MIB));
    session.must(&format!("endpoint-bind 3 {three} 0"));
    session.must(&format!("release {three}"));
    exact(&model, &mut session, 2 * MIB);
    session.must("endpoint-destroy 3");
    exact(&model, &mut session, 0);
    assert_eq!(model.passed(), 0);
}

/// The driver frees memory with the last process that has it. So its maker pays until then, alive or dead.
#[test]
fn what_others_have_stays_accounted_until_they_let_go() {
    let Some(model) = model() else { return };
    let size = 512 * MIB;
    let refused = format!("alloc {}", size + 1);
    for door in ["descriptor", "fabric", "ipc"] {
        for (dies, maps) in [(false, false), (false, true), (true, false), (true, true)] {
            let (mut one, mut two, mut three) = (model.ready(), model.ready(), model.ready());
            let make = if door == "ipc" { "alloc" } else { "create" };
            let made = one.must(&format!("{make} {size}"));
            let imported = match door {
                "descriptor" => {
                    hand_over(made, &mut one, &mut two, 1);
                    let imported = two.must("import");
                    two.must("close-descriptors");
                    std::fs::remove_file(model.room.folder.path().join("state.1")).unwrap();
                    imported
                }
                "fabric" => {
                    let handle = one.must(&format!("export-fabric {made}"));
                    two.must(&format!("import-fabric {handle}"))
                }
                _ => {
                    let handle = one.must(&format!("ipc-get {}", made + 5));
                    two.must(&format!("ipc-open {handle}"))
                }
            };
            // Imported is not owned.
            exact(&model, &mut three, size);
            if dies {
                one.kill();
            } else {
                one.must(&format!("{} {made}", if door == "ipc" { "free" } else { "release" }));
            }
            let what = format!("{door}, dies {dies}, maps {maps}");
            assert_eq!(three.call(&refused).0, OUT_OF_MEMORY, "{what}");
            exact(&model, &mut three, size);
            if door == "ipc" {
                two.must(&format!("ipc-close {imported}"));
            } else if maps {
                let address = two.must(&format!("map {imported} {size}"));
                two.must(&format!("release {imported}"));
                exact(&model, &mut three, size);
                two.must(&format!("unmap {address} {size}"));
            } else {
                two.kill();
            }
            exact(&model, &mut three, 0);
            three.must(&format!("alloc {CEILING}"));
            assert_eq!(model.passed(), 0, "{what}");
        }
    }
}

/// The driver keeps what a descriptor stands for, a `dma-buf`'s too, though nothing else is left of it.
#[test]
fn what_only_a_descriptor_stands_for_stays_accounted_while_this_process_has_it() {
    let Some(model) = model() else { return };
    let size = 512 * MIB;
    let refused = format!("alloc {}", size + 2 * MIB);
    let mut session = model.ready();
    for door in ["descriptor", "dma-buf of a block", "dma-buf of physical memory"] {
        match door {
            "descriptor" => {
                let made = session.must(&format!("create {size}"));
                session.must(&format!("export {made}"));
                session.must(&format!("release {made}"));
                // It may come back, and go again.
                exact(&model, &mut session, size);
                let again = session.must("import");
                session.must(&format!("release {again}"));
            }
            "dma-buf of a block" => {
                let made = session.must(&format!("alloc {size}"));
                session.must(&format!("dma-buf {made} {size}"));
                session.must(&format!("free {made}"));
            }
            _ => {
                let made = session.must(&format!("create {size}"));
                let address = session.must(&format!("map {made} {size}"));
                session.must(&format!("dma-buf {address} {size}"));
                session.must(&format!("unmap {address} {size}"));
                session.must(&format!("release {made}"));
            }
        }
        exact(&model, &mut session, size);
        assert_eq!(session.call(&refused).0, OUT_OF_MEMORY, "{door}");
        session.must("close-descriptors");
        let block = session.must(&refused);
        session.must(&format!("free {block}"));
        exact(&model, &mut session, 0);
    }
    // Who imported it when its maker was gone has it the same way.
    session.must("listen 1");
    let mut maker = model.ready();
    let made = maker.must(&format!("create {size}"));
    maker.must(&format!("export {made}"));
    maker.must("send 1");
    maker.kill();
    session.must("receive");
    for _ in 0..2 {
        let imported = session.must("import");
        exact(&model, &mut session, size);
        session.must(&format!("release {imported}"));
        exact(&model, &mut session, size);
    }
    assert_eq!(session.call(&refused).0, OUT_OF_MEMORY);
    session.must("close-descriptors");
    // No call tells of that; it is looked at when the process asks for memory, or how much there is.
    session.info();
    exact(&model, &mut session, 0);
    assert_eq!(model.passed(), 0);
}

/// Who imports what nobody answers for takes it.
#[test]
fn a_descriptor_whose_maker_is_gone_stands_for_memory_that_is_to_be_taken() {
    let Some(model) = model() else { return };
    let (size, mut two) = (512 * MIB, model.ready());
    two.must("listen 1");
    let mut one = model.ready();
    let made = one.must(&format!("create {size}"));
    one.must(&format!("export {made}"));
    one.must("send 1");
    one.kill();
    two.must("receive");
    let block = two.must(&format!("alloc {}", size + 2 * MIB));
    assert_eq!(two.call("import").0, OUT_OF_MEMORY);
    two.must(&format!("free {block}"));
    let imported = two.must("import");
    exact(&model, &mut two, size);
    assert_eq!(two.call(&format!("alloc {}", size + 1)).0, OUT_OF_MEMORY);
    // What is handed on keeps its mark.
    let mut three = model.ready();
    two.must("close-descriptors");
    hand_over(imported, &mut two, &mut three, 2);
    let again = three.must("import");
    three.must("close-descriptors");
    two.must(&format!("release {imported}"));
    exact(&model, &mut two, size);
    three.must(&format!("release {again}"));
    exact(&model, &mut two, 0);
    // An import that fails takes nothing.
    assert_ne!(three.call("import").0, 0);
    assert_eq!(three.call("import-fabric 77").0, 1);
    exact(&model, &mut two, 0);
}

#[test]
fn what_is_imported_time_and_again_goes_with_the_last() {
    let Some(model) = model() else { return };
    let (mut one, mut two) = (model.ready(), model.ready());
    let block = one.must(&format!("alloc {}", 64 * MIB));
    let handle = one.must(&format!("ipc-get {block}"));
    assert_eq!(one.must(&format!("ipc-get {block}")), handle);
    let opened = ["ipc-open", "ipc-open-1", "ipc-open"].map(|open| two.must(&format!("{open} {handle}")));
    one.must(&format!("free {block}"));
    for address in &opened {
        exact(&model, &mut one, 64 * MIB);
        two.must(&format!("ipc-close {address}"));
    }
    exact(&model, &mut one, 0);
    assert_eq!(two.call(&format!("ipc-close {}", opened[0])).0, 1);
    // The same of a context that is destroyed.
    let context = one.must("context 0");
    let block = one.must(&format!("alloc {}", 64 * MIB));
    let handle = one.must(&format!("ipc-get {block}"));
    let address = two.must(&format!("ipc-open {handle}"));
    one.must(&format!("destroy {context}"));
    one.must("primary 0");
    exact(&model, &mut one, 64 * MIB);
    two.must(&format!("ipc-close {address}"));
    exact(&model, &mut one, 0);
    // Its maker may import it as well.
    let made = one.must(&format!("create {}", 2 * MIB));
    let handle = one.must(&format!("export-fabric {made}"));
    let again = one.must(&format!("import-fabric {handle}"));
    one.must(&format!("release {made}"));
    exact(&model, &mut one, 2 * MIB);
    one.must(&format!("release {again}"));
    exact(&model, &mut one, 0);
}

#[test]
fn pools_count_what_they_hold() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    // The driver in small lets pools grow by 32 MiB.
    let small = session.must("async 1000");
    exact(&model, &mut session, 32 * MIB);
    let large = session.must(&format!("async {}", 40 * MIB));
    exact(&model, &mut session, 64 * MIB);
    // Freed, but kept until somebody waits.
    session.must(&format!("free-async {large}"));
    assert_eq!((model.held(0), model.accounted(0)), (64 * MIB, 64 * MIB));
    session.must("wait");
    exact(&model, &mut session, 2 * MIB);
    let large = session.must(&format!("async {}", 40 * MIB));
    session.must(&format!("free-async {large}"));
    assert!(model.held(0) > 2 * MIB);
    session.must("wait-event");
    exact(&model, &mut session, 2 * MIB);
    // The plain free works as well.
    session.must(&format!("free {small}"));
    session.must("wait-context");
    exact(&model, &mut session, 0);
    // A pool that is told to keep more keeps it, until it is trimmed.
    session.must(&format!("keep 0 {}", 512 * MIB));
    let block = session.must(&format!("async-thread {}", 200 * MIB));
    session.must(&format!("free-async {block}"));
    session.must("wait");
    exact(&model, &mut session, 224 * MIB);
    session.must(&format!("trim 0 0 {}", 64 * MIB));
    exact(&model, &mut session, 64 * MIB);
    session.must("trim 0 0 0");
    exact(&model, &mut session, 0);
    // Of a pool of one's own; it goes with its last allocation.
    let pool = session.must("pool 1 0");
    let block = session.must(&format!("from-pool {} {pool}", 10 * MIB));
    exact(&model, &mut session, 32 * MIB);
    session.must(&format!("free-pool {pool}"));
    exact(&model, &mut session, 32 * MIB);
    session.must(&format!("free-async {block}"));
    exact(&model, &mut session, 0);
    // A pool of host memory.
    let pool = session.must("pool 3 0");
    session.must(&format!("from-pool {} {pool}", 4096 * MIB));
    exact(&model, &mut session, 0);
}

#[test]
fn a_pool_that_would_grow_past_the_ceiling_does_not() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    session.must(&format!("alloc {}", CEILING - 20 * MIB));
    // 1 MiB would fit; the 32 MiB by which pools grow do not.
    assert_eq!(session.call(&format!("async {MIB}")).0, OUT_OF_MEMORY);
    exact(&model, &mut session, CEILING - 20 * MIB);
    // What a pool keeps for later is no reason to refuse: it is looked at again first.
    let mut other = model.ready();
    assert_eq!(other.call(&format!("alloc {}", 20 * MIB)).0, 0);
}

/// The driver uses what was freed in another stream only when that has come to it, and rather lets the pool grow. On a GPU
/// of the ceiling's size it could not, and would have the stream wait.
#[test]
fn a_pool_does_not_grow_past_the_ceiling_for_what_another_stream_still_uses() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let (one, two) = (session.must("stream"), session.must("stream"));
    let most = CEILING - 32 * MIB;
    for round in 0..3 {
        let block = session.must(&format!("async {most} {one}"));
        session.must(&format!("launch-by 200000000 {one} 0"));
        session.must(&format!("free-async {block} {one}"));
        let block = session.must(&format!("async {most} {two}"));
        assert_eq!((model.passed(), model.refusals(0)), (0, 0), "round {round}");
        session.must(&format!("free-async {block} {two}"));
        session.must(&format!("wait {two}"));
        exact(&model, &mut session, 0);
    }
    // While there is room it may grow, which costs nobody any waiting.
    let (one, two) = (session.must("stream"), session.must("stream"));
    let block = session.must(&format!("async {} {one}", 100 * MIB));
    session.must(&format!("launch-by 200000000 {one} 0"));
    session.must(&format!("free-async {block} {one}"));
    let block = session.must(&format!("async {} {two}", 100 * MIB));
    // Of the 128 MiB there, 100 are not usable yet.
    exact(&model, &mut session, 224 * MIB);
    session.must(&format!("free-async {block} {two}"));
    session.must("wait-context");
    // An application that forbids such waiting is out of memory until the work is done, as it would be there.
    session.must("no-dependencies 0");
    let (one, two) = (session.must("stream"), session.must("stream"));
    let block = session.must(&format!("async {most} {one}"));
    session.must(&format!("launch-by 200000000 {one} 0"));
    session.must(&format!("free-async {block} {one}"));
    assert_eq!(session.call(&format!("async {most} {two}")).0, OUT_OF_MEMORY);
    session.must(&format!("async 1000 {one}"));
    session.must(&format!("wait {one}"));
    session.must(&format!("async {} {two}", most - 32 * MIB));
    assert_eq!((model.passed(), model.refusals(0)), (0, 1));
    // A stream that is gone is not asked.
    let three = session.must("stream");
    session.must(&format!("async 1000 {three}"));
    for (destroy, stream) in [("destroy-stream", one), ("destroy-stream-1", three)] {
        session.must(&format!("{destroy} {stream}"));
        assert_eq!(session.call(&format!("async {} {two}", 64 * MIB)).0, OUT_OF_MEMORY);
    }
    assert_eq!(model.passed(), 0);
}

/// A default stream is another one in each context, and the per-thread one in each thread.
#[test]
fn a_pool_does_not_grow_past_the_ceiling_for_what_a_default_stream_of_others_still_uses() {
    let Some(model) = model() else { return };
    let most = CEILING - 32 * MIB;
    for (stream, elsewhere) in [(0, "context 0"), (1, "context 0"), (2, "context 0"), (2, "thread")] {
        for may_wait in [true, false] {
            let mut session = model.ready();
            if !may_wait {
                session.must("no-dependencies 0");
            }
            let block = session.must(&format!("async {most} {stream}"));
            session.must(&format!("launch-by 200000000 {stream} 0"));
            session.must(&format!("free-async {block} {stream}"));
            let result = if elsewhere == "thread" {
                session.must(&format!("beside-async {most} {stream}"));
                session.call("go-on").0
            } else {
                session.must(elsewhere);
                session.call(&format!("async {most} {stream}")).0
            };
            let what = format!("stream {stream}, {elsewhere}, may wait: {may_wait}");
            assert_eq!(result, if may_wait { 0 } else { OUT_OF_MEMORY }, "{what}");
            assert_eq!(model.passed(), 0, "{what}");
            session.kill();
        }
    }
}

/// Pools are a device's, so contexts share them.
#[test]
fn a_stream_waits_for_what_a_stream_of_another_context_still_uses() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let most = CEILING - 32 * MIB;
    let one = session.must("stream");
    let block = session.must(&format!("async {most} {one}"));
    session.must(&format!("launch-by 200000000 {one} 0"));
    session.must(&format!("free-async {block} {one}"));
    session.must("context 0");
    let two = session.must("stream");
    session.must(&format!("async {most} {two}"));
    assert_eq!((model.passed(), model.refusals(0)), (0, 0));
}

/// With a context its streams are gone, and their work is done. Another stream may have their handles.
#[test]
fn what_was_freed_in_a_context_that_is_gone_is_of_use() {
    let Some(model) = model() else { return };
    let most = CEILING - 32 * MIB;
    for (make, end) in [("context 0", "destroy"), ("primary 1", "reset"), ("primary 1", "release-primary")] {
        let mut session = model.ready();
        session.must("no-dependencies 0");
        let pool = session.must("pool-of 0");
        let context = session.must(make);
        let one = session.must("stream");
        let block = session.must(&format!("from-pool {most} {pool} {one}"));
        session.must("clock 0");
        session.must(&format!("launch-by 1000 {one} 0"));
        session.must(&format!("free-async {block} {one}"));
        session.must("primary 0");
        session.must(&format!("{end} {}", if end == "destroy" { context } else { 1 }));
        let two = session.must("stream");
        assert_eq!(two, one, "the driver in small gives the handle again");
        session.must(&format!("launch-by 1000 {two} 0"));
        let three = session.must("stream");
        session.must(&format!("from-pool {most} {pool} {three}"));
        assert_eq!((model.passed(), model.refusals(0)), (0, 0), "{end}");
        assert_eq!(session.must("dead-asked"), 0, "{end}");
        session.kill();
    }
}

/// The driver lets a stream that is destroyed come to its end.
#[test]
fn what_was_freed_in_a_stream_that_is_destroyed_is_free_when_that_has_come_to_it() {
    let Some(model) = model() else { return };
    let most = CEILING - 32 * MIB;
    for may_wait in [true, false] {
        let mut session = model.ready();
        if !may_wait {
            session.must("no-dependencies 0");
        }
        let (one, two) = (session.must("stream"), session.must("stream"));
        let block = session.must(&format!("async {most} {one}"));
        session.must("clock 0");
        session.must(&format!("launch-by 1000 {one} 0"));
        session.must(&format!("free-async {block} {one}"));
        session.must(&format!("destroy-stream {one}"));
        assert_eq!(session.must("stream"), one, "the driver in small gives the handle again");
        let result = session.call(&format!("async {most} {two}")).0;
        assert_eq!(result, if may_wait { 0 } else { OUT_OF_MEMORY });
        session.must("clock 1");
        if !may_wait {
            session.must(&format!("async {most} {two}"));
        }
        assert_eq!((model.passed(), session.must("dead-asked")), (0, 0));
        session.kill();
    }
}

/// Where a primary context has other users its streams live, and what they work with is not free.
#[test]
fn what_was_freed_in_a_context_that_others_use_is_not_free_yet() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    session.must("primary 0");
    session.must("no-dependencies 0");
    let (one, two) = (session.must("stream"), session.must("stream"));
    let block = session.must(&format!("async {} {one}", CEILING - 32 * MIB));
    session.must("clock 0");
    session.must(&format!("launch-by 1000 {one} 0"));
    session.must(&format!("free-async {block} {one}"));
    session.must("release-primary 0");
    assert_eq!(session.call(&format!("async {} {two}", CEILING - 32 * MIB)).0, OUT_OF_MEMORY);
    session.must("clock 1");
    session.must(&format!("async {} {two}", CEILING - 32 * MIB));
    assert_eq!((model.passed(), model.refusals(0)), (0, 1));
}

/// No call tells what of a pool's free memory is of use. What has grown past the ceiling goes before anybody can use it.
#[test]
fn a_pool_that_grows_though_it_has_enough_counts_as_it_is_or_is_not_had() {
    let Some(model) = model() else { return };
    let mut session = Session::of(model.command().env("MODEL_POOL_PIECES", "1"));
    session.must("init 0");
    session.must(&format!("keep 0 {CEILING}"));
    let blocks: Vec<_> = (0..4).map(|_| session.must(&format!("async {}", 64 * MIB))).collect();
    exact(&model, &mut session, 256 * MIB);
    session.must(&format!("free-async {}", blocks[0]));
    session.must(&format!("async {}", 32 * MIB));
    exact(&model, &mut session, 288 * MIB);
    // 32 MiB of the pool are free, and none is left beside it.
    let rest = CEILING - 288 * MIB;
    session.must(&format!("alloc {rest}"));
    assert_eq!(session.call(&format!("async {}", 32 * MIB)).0, OUT_OF_MEMORY);
    assert_eq!((model.passed(), model.refusals(0)), (1, 1), "for the length of that call");
    assert_eq!(model.peak(0), CEILING + 32 * MIB);
    // The pool has let go of what was free.
    exact(&model, &mut session, rest + 224 * MIB);
}

/// A pool may be another device's than the stream is of, and need not have been made by the application.
#[test]
fn memory_of_a_pool_is_that_of_its_device_whatever_the_stream() {
    let Some(model) = model() else { return };
    for location in [false, true] {
        let mut command = model.command();
        if location {
            // Since CUDA 13.0 a pool tells.
            command.env("MODEL_POOL_LOCATION", "1");
        }
        let mut session = Session::of(&mut command);
        session.must("init 0");
        let stream = session.must("stream");
        let pool = session.must("pool-of 1");
        session.must(&format!("from-pool {} {pool} {stream}", 100 * MIB));
        assert_eq!((model.held(1), model.accounted(1), model.accounted(0)), (128 * MIB, 128 * MIB, 0));
        // Of the rest of that GPU's ceiling nothing more is to be had, though the other's would have room.
        assert_eq!(session.call(&format!("from-pool {} {pool} {stream}", CEILING / 2)).0, OUT_OF_MEMORY);
        session.must(&format!("async {MIB} {stream}"));
        exact(&model, &mut session, 32 * MIB);
        session.kill();
    }
    assert_eq!(model.passed(), 0);
}

/// Of CUDA 2.0: addresses and sizes have 32 bits.
#[test]
fn the_oldest_names_count_as_their_successors_do() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let block = session.must(&format!("alloc-32 {}", 3 * MIB));
    exact(&model, &mut session, 4 * MIB);
    let pitched = session.must("pitch-32 1000 1024");
    exact(&model, &mut session, 5 * MIB);
    let array = session.must("array-32 512 512");
    exact(&model, &mut session, 6 * MIB);
    let flat = session.must("array2-32 512 512");
    exact(&model, &mut session, 7 * MIB);
    let (free, total) = (CEILING - 7 * MIB, CEILING);
    assert_eq!(session.call("info-32"), (0, free, total));
    assert_eq!(session.call("total-32 0"), (0, CEILING, 0));
    for command in
        ["alloc-32 2000000000", "pitch-32 2000000 1000", "array-32 100000 10000", "array2-32 100000 10000"]
    {
        assert_eq!(session.call(command).0, OUT_OF_MEMORY, "{command}");
    }
    for (command, of) in
        [("free-32", block), ("free-32", pitched), ("free-array", array), ("free-array", flat)]
    {
        session.must(&format!("{command} {of}"));
    }
    exact(&model, &mut session, 0);
    for (make, end) in [("exec-1", "reset-1 0"), ("exec-2", "release-primary-1 0")] {
        let graph = session.must("graph");
        session.must(&format!("graph-alloc {graph} {} 0", 10 * MIB));
        let exec = session.must(&format!("{make} {graph}"));
        session.must(&format!("launch {exec}"));
        exact(&model, &mut session, 10 * MIB);
        session.must("wait-context-2 0");
        session.must(&format!("free-exec {exec}"));
        session.must("trim-graphs 0");
        // What is made in a context goes with it.
        for destroy in ["destroy-1", "detach"] {
            let context = session.must("context 0");
            session.must(&format!("alloc {MIB}"));
            exact(&model, &mut session, MIB);
            session.must(&format!("{destroy} {context}"));
            assert_eq!((model.held(0), model.accounted(0)), (0, 0), "{destroy}");
        }
        session.must(&format!("alloc {MIB}"));
        exact(&model, &mut session, MIB);
        session.must(end);
        assert_eq!((model.held(0), model.accounted(0)), (0, 0), "{end}");
        session.kill();
        session = model.ready();
    }
    assert_eq!(model.passed(), 0);
}

/// As it is at its first run, which then finds it there.
#[test]
fn a_graph_that_is_uploaded_has_its_memory() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let stream = session.must("stream");
    let [small, past] = [100, 2 * CEILING / MIB].map(|mib| executable(&mut session, "graph-alloc", mib));
    session.must(&format!("upload {small} {stream}"));
    exact(&model, &mut session, 100 * MIB);
    let block = session.must(&format!("alloc {}", CEILING - 100 * MIB));
    session.must(&format!("launch {small} {stream}"));
    exact(&model, &mut session, CEILING);
    session.must(&format!("free {block}"));
    // What graphs have and do not use is let go of before one is refused.
    assert_eq!(session.call(&format!("upload {past} {stream}")).0, OUT_OF_MEMORY);
    exact(&model, &mut session, 0);
    assert_eq!((model.passed(), model.refusals(0)), (0, 1));
}

/// What a program calls that is built with `--default-stream per-thread`.
#[test]
fn names_for_per_thread_streams_count_as_the_others_do() {
    let Some(model) = model() else { return };
    let mut session = Session::of(model.command().env("SESSION_PER_THREAD", "1"));
    session.must("init 0");
    let pool = session.must("pool-of 0");
    let block = session.must(&format!("from-pool {} {pool}", 10 * MIB));
    exact(&model, &mut session, 32 * MIB);
    assert_eq!(session.call(&format!("from-pool {} {pool}", 2 * CEILING)).0, OUT_OF_MEMORY);
    session.must(&format!("free-async {block}"));
    session.must("wait");
    exact(&model, &mut session, 0);
    let array = session.must("array 4096 4096 64");
    let tile = session.must(&format!("create {}", 2 * MIB));
    exact(&model, &mut session, 2 * MIB);
    session.must(&format!("tile {array} {tile} 0"));
    session.must(&format!("release {tile}"));
    exact(&model, &mut session, 2 * MIB);
    session.must(&format!("tile {array} 0 0"));
    session.must("wait");
    exact(&model, &mut session, 0);
    // What is captured takes its memory when the graph is uploaded or first runs.
    let stream = session.must("stream");
    session.must(&format!("capture {stream}"));
    session.must(&format!("from-pool {} {pool} {stream}", 20 * MIB));
    let graph = session.must(&format!("end-capture {stream}"));
    exact(&model, &mut session, 0);
    let exec = session.must(&format!("exec {graph}"));
    session.must(&format!("upload {exec} {stream}"));
    exact(&model, &mut session, 20 * MIB);
    session.must(&format!("exec-uploaded {graph} {stream}"));
    exact(&model, &mut session, 40 * MIB);
    assert_eq!(model.passed(), 0);
}

/// As managed memory does that is allocated by itself: any kernel may draw it to a GPU.
#[test]
fn managed_pools_count_in_full_wherever_they_prefer_to_be() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let (none, device, host, host_node) = (0, 1, 2, 3);
    for kind in [none, host, host_node] {
        let pool = session.must(&format!("managed-pool {kind} 0"));
        exact(&model, &mut session, 0);
        let block = session.must(&format!("from-pool {} {pool}", 600 * MIB));
        exact(&model, &mut session, 600 * MIB);
        let small = session.must(&format!("from-pool 1000 {pool}"));
        exact(&model, &mut session, 600 * MIB + 1024);
        assert_eq!(session.call(&format!("from-pool {} {pool}", 500 * MIB)).0, OUT_OF_MEMORY);
        assert_eq!(session.call(&format!("alloc {}", 500 * MIB)).0, OUT_OF_MEMORY);
        session.must(&format!("free-async {small}"));
        session.must(&format!("free-async {block}"));
        session.must("wait");
        exact(&model, &mut session, 0);
        session.must(&format!("free-pool {pool}"));
    }
    // On the GPU of the stream, where none is preferred, and else on that.
    let stream = session.must("stream");
    session.must("primary 1");
    let pool = session.must(&format!("managed-pool {host} 0"));
    session.must(&format!("from-pool {} {pool}", 10 * MIB));
    assert_eq!((model.held(1), model.accounted(1)), (10 * MIB, 10 * MIB));
    let pool = session.must(&format!("managed-pool {device} 1"));
    session.must(&format!("from-pool {} {pool} {stream}", 10 * MIB));
    assert_eq!((model.held(1), model.accounted(1)), (42 * MIB, 42 * MIB));
    assert_eq!((model.held(0), model.accounted(0), model.passed()), (0, 0, 0));
}

/// The same of one that another library has made, which tells of itself since CUDA 13.0.
#[test]
fn managed_pools_that_are_found_count_in_full() {
    let Some(model) = model() else { return };
    let mut session = Session::of(model.command().env("MODEL_POOL_LOCATION", "1"));
    session.must("init 0");
    let pool = session.must("managed-pool-past 2 0");
    session.must(&format!("from-pool {} {pool}", 600 * MIB));
    exact(&model, &mut session, 600 * MIB);
    assert_eq!(session.call(&format!("from-pool {} {pool}", 500 * MIB)).0, OUT_OF_MEMORY);
    assert_eq!(model.passed(), 0);
}

/// What a pool keeps after all was freed is on the account however many pools there are.
#[test]
fn pools_are_told_apart_or_not_had() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let mut last = 0;
    let made = (0..5000).take_while(|_| {
        let (result, pool, _) = session.call("pool 1 0");
        last = if result == 0 { pool } else { last };
        assert!(result == 0 || result == OUT_OF_MEMORY, "{result}");
        result == 0
    });
    assert_eq!(made.count(), 4096);
    session.must(&format!("keep-in {last} {CEILING}"));
    let block = session.must(&format!("from-pool {} {last}", 100 * MIB));
    session.must(&format!("free-async {block}"));
    session.must("wait");
    exact(&model, &mut session, 128 * MIB);
    assert_eq!(session.call(&format!("alloc {CEILING}")).0, OUT_OF_MEMORY);
    // The current one of a device would be one too many as well.
    assert_eq!(session.call("async 1000").0, OUT_OF_MEMORY);
    session.must(&format!("free-pool {last}"));
    exact(&model, &mut session, 0);
    session.must("async 1000");
    exact(&model, &mut session, 32 * MIB);
}

#[test]
fn what_a_pool_gave_back_is_to_be_had() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    for _ in 0..20 {
        let block = session.must(&format!("async {}", CEILING - 32 * MIB));
        session.must(&format!("free-async {block}"));
        session.must("wait");
        let block = session.must(&format!("alloc {CEILING}"));
        session.must(&format!("free {block}"));
    }
    assert_eq!((model.passed(), model.refusals(0)), (0, 0));
}

#[test]
fn graphs_count_what_they_take_when_they_first_run() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let inner = session.must("graph");
    session.must(&format!("graph-alloc {inner} {} 0", 10 * MIB));
    let graph = session.must("graph");
    session.must(&format!("graph-alloc {graph} {} 0", 100 * MIB));
    session.must(&format!("graph-inner {graph} {inner}"));
    let exec = session.must(&format!("exec {graph}"));
    exact(&model, &mut session, 0);
    for _ in 0..3 {
        session.must(&format!("launch {exec}"));
        exact(&model, &mut session, 110 * MIB);
    }
    // The driver keeps it for the next run, until it is told to let go.
    session.must("wait");
    exact(&model, &mut session, 110 * MIB);
    session.must("trim-graphs 0");
    exact(&model, &mut session, 0);
    session.must(&format!("launch {exec}"));
    exact(&model, &mut session, 110 * MIB);
    session.must(&format!("free-exec {exec}"));
    exact(&model, &mut session, 110 * MIB);
    session.must("trim-graphs 0");
    // What was allocated while a stream was captured.
    let stream = session.must("stream");
    session.must(&format!("capture {stream}"));
    let block = session.must(&format!("async {} {stream}", 200 * MIB));
    exact(&model, &mut session, 0);
    session.must(&format!("free-async {block} {stream}"));
    let (_, graph, _) = session.call(&format!("end-capture {stream}"));
    let exec = session.must(&format!("exec {graph}"));
    session.must(&format!("launch {exec}"));
    exact(&model, &mut session, 200 * MIB);
    session.must("trim-graphs 0");
    // Small allocations share whole pages; those are taken before it runs, and there may be none.
    let graph = session.must("graph");
    for _ in 0..3 {
        session.must(&format!("graph-alloc {graph} 1000 0"));
    }
    session.must(&format!("graph-alloc {graph} {} 0", MIB + 1));
    let exec = session.must(&format!("exec {graph}"));
    session.must(&format!("launch {exec}"));
    exact(&model, &mut session, 4 * MIB);
    session.must("trim-graphs 0");
    let block = session.must(&format!("alloc {}", CEILING - 3 * MIB - MIB / 2));
    assert_eq!(session.call(&format!("launch {exec}")).0, OUT_OF_MEMORY);
    session.must(&format!("free {block}"));
    session.must(&format!("alloc {}", 200 * MIB));
    // Past the ceiling a graph does not run.
    let graph = session.must("graph");
    session.must(&format!("graph-alloc {graph} {CEILING} 0"));
    let exec = session.must(&format!("exec {graph}"));
    assert_eq!(session.call(&format!("launch {exec}")).0, OUT_OF_MEMORY);
    exact(&model, &mut session, 200 * MIB);
    assert_eq!(model.passed(), 0);
}

/// No figure of the driver's tells where it is: it counts where the graph first runs, until that is destroyed.
#[test]
fn managed_memory_of_a_graph_that_prefers_no_device_counts_from_its_first_run() {
    let Some(model) = model() else { return };
    let (none, device, host, host_node) = (0, 1, 2, 3);
    for kind in [none, host, host_node] {
        let mut session = model.ready();
        let [small, large] = [300, 600].map(|mib| {
            let graph = session.must("graph");
            session.must(&format!("graph-managed {graph} {} {kind}", mib * MIB));
            session.must(&format!("graph-alloc {graph} {} 0", 100 * MIB));
            graph
        });
        let exec = session.must(&format!("exec {small}"));
        exact(&model, &mut session, 0);
        let block = session.must(&format!("alloc {}", CEILING - 398 * MIB));
        assert_eq!(session.call(&format!("launch {exec}")).0, OUT_OF_MEMORY);
        exact(&model, &mut session, CEILING - 398 * MIB);
        session.must(&format!("free {block}"));
        let stream = session.must("stream");
        for launch in [format!("upload {exec}"), format!("launch {exec}"), format!("launch {exec}")] {
            session.must(&launch);
            exact(&model, &mut session, 400 * MIB);
        }
        // It is one and the same for all streams, which have the rest each for itself.
        session.must(&format!("launch {exec} {stream}"));
        exact(&model, &mut session, 500 * MIB);
        session.must("trim-graphs 0");
        exact(&model, &mut session, 300 * MIB);
        // What it was before stays until it is run as what it is now.
        session.must(&format!("update {exec} {large}"));
        exact(&model, &mut session, 300 * MIB);
        session.must("fail 1");
        assert_eq!(session.call(&format!("launch {exec}")).0, 999);
        session.must(&format!("launch {exec}"));
        exact(&model, &mut session, 700 * MIB);
        assert_eq!(session.call(&format!("alloc {}", CEILING - 600 * MIB + 1)).0, OUT_OF_MEMORY);
        session.must(&format!("launch {exec}"));
        session.must(&format!("free-exec {exec}"));
        session.must("trim-graphs 0");
        exact(&model, &mut session, 0);
        session.kill();
    }
    // Of the device that a context is of, and gone with all that is there.
    let mut session = model.ready();
    let graph = session.must("graph");
    session.must(&format!("graph-managed {graph} {} {host}", 100 * MIB));
    session.must("primary 1");
    let exec = session.must(&format!("exec {graph}"));
    session.must(&format!("launch {exec}"));
    assert_eq!((model.held(1), model.accounted(1)), (100 * MIB, 100 * MIB));
    assert_eq!((model.held(0), model.accounted(0)), (0, 0));
    session.must("reset 1");
    assert_eq!((model.held(1), model.accounted(1)), (0, 0));
    // One that prefers a device is among what the driver tells of graphs there.
    let mut session = model.ready();
    let graph = session.must("graph");
    session.must(&format!("graph-managed {graph} {} {device}", 100 * MIB));
    let exec = session.must(&format!("exec {graph}"));
    session.must(&format!("launch {exec}"));
    exact(&model, &mut session, 100 * MIB);
    assert_eq!(model.passed(), 0);
}

#[test]
fn a_graph_that_is_updated_allocates_what_the_new_one_does() {
    let Some(model) = model() else { return };
    for update in ["update", "update-2"] {
        let mut session = model.ready();
        let [small, large, past] = [100 * MIB, 600 * MIB, 2 * CEILING].map(|bytes| {
            let graph = session.must("graph");
            session.must(&format!("graph-alloc {graph} {bytes} 0"));
            graph
        });
        let exec = session.must(&format!("exec {small}"));
        session.must(&format!("launch {exec}"));
        exact(&model, &mut session, 100 * MIB);
        session.must(&format!("{update} {exec} {past}"));
        assert_eq!(session.call(&format!("launch {exec}")).0, OUT_OF_MEMORY);
        session.must(&format!("{update} {exec} {large}"));
        session.must(&format!("launch {exec}"));
        exact(&model, &mut session, 600 * MIB);
        // One that is not like it: the driver's answer, and no change.
        session.must(&format!("graph-alloc {past} {MIB} 0"));
        assert_eq!(session.call(&format!("{update} {exec} {past}")).0, 910);
        session.must(&format!("launch {exec}"));
        exact(&model, &mut session, 600 * MIB);
        session.kill();
    }
    assert_eq!(model.passed(), 0);
}

/// The driver sets no bound to how many graphs lie within each other.
#[test]
fn a_graph_counts_what_lies_however_deep_in_it() {
    let Some(model) = model() else { return };
    for depth in [1, 16, 17, 300] {
        let mut session = model.ready();
        let mut graph = session.must("graph");
        session.must(&format!("graph-alloc {graph} {} 0", 400 * MIB));
        for _ in 0..depth {
            let outer = session.must("graph");
            session.must(&format!("graph-inner {outer} {graph}"));
            graph = outer;
        }
        let exec = session.must(&format!("exec {graph}"));
        let block = session.must(&format!("alloc {}", CEILING - 398 * MIB));
        assert_eq!(session.call(&format!("launch {exec}")).0, OUT_OF_MEMORY, "{depth}");
        session.must(&format!("free {block}"));
        session.must(&format!("launch {exec}"));
        exact(&model, &mut session, 400 * MIB);
        session.kill();
    }
    assert_eq!(model.passed(), 0);
}

/// Of one stream, graphs have the same memory, one after the other; of several, each its own.
#[test]
fn graphs_of_several_streams_count_each_their_own() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let executable = |session: &mut Session, make: &str| {
        let graph = session.must("graph");
        session.must(&format!("{make} {graph} {} 0", 400 * MIB));
        session.must(&format!("exec {graph}"))
    };
    let (one, other) = (executable(&mut session, "graph-alloc"), executable(&mut session, "graph-alloc"));
    let (here, there) = (session.must("stream"), session.must("stream"));
    for exec in [one, other, one, other] {
        session.must(&format!("launch {exec} {here}"));
        exact(&model, &mut session, 400 * MIB);
    }
    // At once they are two.
    let block = session.must(&format!("alloc {}", 400 * MIB));
    session.must("clock 0");
    session.must(&format!("launch-by 1000 {here} 0"));
    session.must(&format!("launch {one} {here}"));
    assert_eq!(session.call(&format!("launch {other} {there}")).0, OUT_OF_MEMORY);
    session.must("clock 1");
    session.must(&format!("free {block}"));
    session.must(&format!("launch {other} {there}"));
    exact(&model, &mut session, 800 * MIB);
    session.must(&format!("launch {one} {here}"));
    session.must(&format!("launch {other} {there}"));
    exact(&model, &mut session, 800 * MIB);
    session.must("wait");
    // What a stream keeps and does not use is let go of before another one is refused.
    session.must(&format!("launch {other} {here}"));
    session.must(&format!("launch {one} {there}"));
    session.must("wait");
    exact(&model, &mut session, 800 * MIB);
    let third = executable(&mut session, "graph-alloc");
    let stream = session.must("stream");
    session.must(&format!("launch {third} {stream}"));
    exact(&model, &mut session, 400 * MIB);
    assert_eq!((model.passed(), model.refusals(0)), (0, 1));
}

#[test]
fn what_the_driver_pulls_from_an_idle_stream_is_wanted_anew() {
    let Some(model) = model() else { return };
    let mut session = Session::of(model.command().env("MODEL_GRAPHS_PULL", "1"));
    session.must("init 0");
    let [one, other] = [(); 2].map(|()| {
        let graph = session.must("graph");
        session.must(&format!("graph-alloc {graph} {} 0", 400 * MIB));
        session.must(&format!("exec {graph}"))
    });
    let (here, there) = (session.must("stream"), session.must("stream"));
    session.must(&format!("launch {one} {here}"));
    session.must(&format!("launch {other} {there}"));
    exact(&model, &mut session, 400 * MIB);
    // That is at work now, so there is nothing to pull.
    session.must("clock 0");
    session.must(&format!("launch-by 1000 {there} 0"));
    let block = session.must(&format!("alloc {}", 400 * MIB));
    assert_eq!(session.call(&format!("launch {one} {here}")).0, OUT_OF_MEMORY);
    session.must(&format!("free {block}"));
    session.must(&format!("launch {one} {here}"));
    session.must("clock 1");
    exact(&model, &mut session, 800 * MIB);
    assert_eq!(model.passed(), 0);
}

#[test]
fn a_graph_has_no_memory_that_another_has_left_something_in() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let [frees, leaves] = ["graph-alloc", "graph-leave"].map(|make| {
        let graph = session.must("graph");
        session.must(&format!("{make} {graph} {} 0", 400 * MIB));
        session.must(&format!("exec {graph}"))
    });
    session.must(&format!("launch {frees}"));
    session.must(&format!("launch {leaves}"));
    exact(&model, &mut session, 400 * MIB);
    let block = session.must(&format!("alloc {}", 400 * MIB));
    assert_eq!(session.call(&format!("launch {frees}")).0, OUT_OF_MEMORY);
    session.must(&format!("free {block}"));
    session.must(&format!("launch {frees}"));
    exact(&model, &mut session, 800 * MIB);
    assert_eq!(model.passed(), 0);
}

/// An executable graph that allocates `mib` MiB, made by `make` of the session's commands.
fn executable(session: &mut Session, make: &str, mib: u64) -> u64 {
    let graph = session.must("graph");
    session.must(&format!("{make} {graph} {} 0", mib * MIB));
    session.must(&format!("exec {graph}"))
}

/// Also where the program means the stream of its own thread.
#[test]
fn a_graph_that_runs_again_while_it_is_at_work_has_its_memory() {
    let Some(model) = model() else { return };
    for (launch, given, stream) in [("launch", 0, 0), ("launch", 2, 2), ("launch-thread", 0, 2)] {
        let mut session = model.ready();
        let exec = executable(&mut session, "graph-alloc", 600);
        let launch = format!("{launch} {exec} {given}");
        session.must(&launch);
        session.must("clock 0");
        session.must(&format!("launch-by 1000 {stream} 0"));
        session.must(&launch);
        exact(&model, &mut session, 600 * MIB);
        assert_eq!((model.passed(), model.refusals(0)), (0, 0), "{launch}");
        session.must("clock 1");
        session.kill();
    }
}

#[test]
fn default_streams_are_their_contexts_and_their_threads() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let exec = executable(&mut session, "graph-alloc", 600);
    session.must(&format!("launch {exec}"));
    // The other context's has none, and what the first one keeps is let go of for it.
    session.must("context 0");
    session.must(&format!("launch {exec}"));
    exact(&model, &mut session, 600 * MIB);
    session.must(&format!("launch-thread {exec}"));
    exact(&model, &mut session, 600 * MIB);
    session.must(&format!("launch-thread {exec}"));
    for _ in 0..2 {
        session.must(&format!("beside-launch-thread {exec}"));
        session.must("go-on");
        exact(&model, &mut session, 600 * MIB);
    }
    assert_eq!((model.passed(), model.refusals(0)), (0, 0));
}

/// A launch may wait for its turn while others take the memory that it relies on.
#[test]
fn what_a_run_relies_on_stays_charged_until_it_has_run() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let [one, other] = [600, 500].map(|mib| executable(&mut session, "graph-alloc", mib));
    let (here, there) = (session.must("stream"), session.must("stream"));
    for _ in 0..2 {
        session.must(&format!("launch {one} {here}"));
        session.must("hold 1");
        session.must(&format!("beside-launch {one} {here}"));
        assert_eq!(session.call(&format!("launch {other} {there}")).0, OUT_OF_MEMORY);
        session.must("go-on");
        exact(&model, &mut session, 600 * MIB);
        session.must(&format!("launch {other} {there}"));
        exact(&model, &mut session, 500 * MIB);
    }
    session.kill();
    // The same where the driver pulls it from the idle stream.
    let mut session = Session::of(model.command().env("MODEL_GRAPHS_PULL", "1"));
    session.must("init 0");
    let [one, other] = [600, 400].map(|mib| executable(&mut session, "graph-alloc", mib));
    let (here, there) = (session.must("stream"), session.must("stream"));
    session.must(&format!("launch {one} {here}"));
    session.must("hold 1");
    session.must(&format!("beside-launch {one} {here}"));
    session.must(&format!("launch {other} {there}"));
    assert_eq!(session.call(&format!("alloc {}", 400 * MIB)).0, OUT_OF_MEMORY);
    // That one is at work now, so it is not pulled back.
    session.must("clock 0");
    session.must(&format!("launch-by 1000 {there} 0"));
    session.must("go-on");
    session.must("clock 1");
    exact(&model, &mut session, 1000 * MIB);
    assert_eq!(model.passed(), 0);
}

#[test]
fn a_run_that_loses_its_memory_before_it_has_come_back_wants_it_anew() {
    let Some(model) = model() else { return };
    let mut session = Session::of(model.command().env("MODEL_GRAPHS_PULL", "1"));
    session.must("init 0");
    let [one, other] = [200, 200].map(|mib| executable(&mut session, "graph-alloc", mib));
    let (here, there) = (session.must("stream"), session.must("stream"));
    session.must("hold 2");
    session.must(&format!("beside-launch {one} {here}"));
    session.must(&format!("launch {other} {there}"));
    session.must("go-on");
    exact(&model, &mut session, 200 * MIB);
    // The other one is at work now, so nothing is pulled back.
    session.must("clock 0");
    session.must(&format!("launch-by 1000 {there} 0"));
    let block = session.must(&format!("alloc {}", CEILING - 200 * MIB));
    assert_eq!(session.call(&format!("launch {one} {here}")).0, OUT_OF_MEMORY);
    session.must(&format!("free {block}"));
    session.must(&format!("launch {one} {here}"));
    session.must("clock 1");
    exact(&model, &mut session, 400 * MIB);
    assert_eq!(model.passed(), 0);
}

#[test]
fn streams_of_a_context_that_is_destroyed_are_not_asked() {
    let Some(model) = model() else { return };
    let mut session = Session::of(model.command().env("MODEL_GRAPHS_PULL", "1"));
    session.must("init 0");
    let [one, other] = [200, 200].map(|mib| executable(&mut session, "graph-alloc", mib));
    let context = session.must("context 0");
    let stream = session.must("stream");
    session.must(&format!("launch {one} {stream}"));
    session.must("primary 0");
    session.must("hold 5");
    session.must(&format!("beside-destroy {context}"));
    // It takes less than it wants, so that others are asked whether it has theirs.
    session.must(&format!("launch {other}"));
    assert_eq!(session.must("dead-asked"), 0);
    session.must("go-on");
}

#[test]
fn an_executable_graph_is_known_until_it_is_destroyed() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let exec = executable(&mut session, "graph-alloc", 100);
    session.must("hold 4");
    session.must(&format!("beside-free-exec {exec}"));
    session.must(&format!("launch {exec}"));
    exact(&model, &mut session, 100 * MIB);
    session.must("fail 1");
    assert_eq!(session.call("go-on").0, 999);
    session.must("trim-graphs 0");
    session.must(&format!("launch {exec}"));
    exact(&model, &mut session, 100 * MIB);
    session.must(&format!("free-exec {exec}"));
    session.must("trim-graphs 0");
    exact(&model, &mut session, 0);
    assert_eq!(model.passed(), 0);
}

#[test]
fn a_graph_that_is_uploaded_when_it_is_made_has_its_memory_or_is_not_made() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let stream = session.must("stream");
    for (bytes, result) in [(2 * CEILING, OUT_OF_MEMORY), (100 * MIB, 0)] {
        let graph = session.must("graph");
        session.must(&format!("graph-alloc {graph} {bytes} 0"));
        let (got, exec, said) = session.call(&format!("exec-uploaded {graph} {stream}"));
        // The driver's words for it reach the caller.
        assert_eq!((got, exec == 0, said), (result, result != 0, u64::from(result != 0)));
    }
    exact(&model, &mut session, 100 * MIB);
    assert_eq!(model.passed(), 0);
}

// ---- arguments that another thread changes while the driver is at it -------------------------------------------------

#[test]
fn what_is_taken_is_what_was_looked_at() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    // The host's memory becomes a device's.
    session.must("change-in 8 1 8");
    session.must(&format!("create-host {}", 2 * CEILING));
    exact(&model, &mut session, 0);
    // Something small becomes wide.
    for (make, end, bytes) in [
        ("array 64 64", "free-array", 65536),
        ("array2 64 64", "free-array", 65536),
        ("mipmap 64 64 1", "free-mipmap", 65536),
    ] {
        session.must(&format!("change-in 0 {} 8", 100 * MIB));
        let array = session.must(make);
        exact(&model, &mut session, bytes);
        session.must(&format!("{end} {array}"));
    }
    // A pool of a device looks as if it were the host's, when it is made.
    session.must("change-in-after 8 2 8");
    let pool = session.must("pool 1 0");
    session.must(&format!("from-pool {MIB} {pool} 0"));
    exact(&model, &mut session, 32 * MIB);
    assert_eq!(session.call(&format!("from-pool {CEILING} {pool} 0")).0, OUT_OF_MEMORY);
    // A tile looks as if it had been unmapped.
    let (array, memory) = (session.must("array 4096 4096 64"), session.must(&format!("create {}", 2 * MIB)));
    session.must("change-in-after 56 2 4");
    session.must(&format!("tile {array} {memory}"));
    session.must(&format!("release {memory}"));
    exact(&model, &mut session, 34 * MIB);
    assert_eq!(model.passed(), 0);
}

#[test]
fn what_the_driver_made_is_what_is_accounted() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    for (small, large, end, calls, bytes) in [
        ("alloc 512", "alloc 104857600", "free", 0, [512, 100 * MIB]),
        ("managed 512", "managed 104857600", "free", 0, [512, 100 * MIB]),
        ("pitch 512 1", "pitch 1048576 100", "free", 0, [512, 100 * MIB]),
        // The first call asks how large it is.
        ("array 64 64", "array 1024 1024", "free-array", 1, [65536, 4 * MIB]),
        ("array2 64 64", "array2 1024 1024", "free-array", 1, [65536, 4 * MIB]),
        ("mipmap 64 64 1", "mipmap 512 512 1", "free-mipmap", 1, [65536, 4 * MIB]),
        ("create 2097152", "create 104857600", "release", 0, [2 * MIB, 100 * MIB]),
    ] {
        let first = session.must(small);
        exact(&model, &mut session, bytes[0]);
        // The large one looks as if it were the small one.
        session.must(&format!("change-out {first} {calls}"));
        let second = session.must(large);
        session.must(&format!("{end} {first}"));
        exact(&model, &mut session, bytes[1]);
        session.must(&format!("{end} {second}"));
        exact(&model, &mut session, 0);
    }
    // A descriptor looks as if it were another one.
    let memory = session.must(&format!("create {}", 2 * MIB));
    session.must("change-out 0 0 4");
    session.must(&format!("export {memory}"));
    session.must(&format!("release {memory}"));
    exact(&model, &mut session, 2 * MIB);
}

#[test]
fn a_graph_allocates_what_is_in_it_when_it_is_made_executable() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let (small, large) = (session.must("graph"), session.must("graph"));
    session.must(&format!("graph-alloc {small} {MIB} 0"));
    session.must(&format!("graph-alloc {large} {} 0", 2 * CEILING));
    // Nodes are added meanwhile.
    session.must(&format!("hide-nodes {large}"));
    let exec = session.must(&format!("exec {large}"));
    assert_eq!(session.call(&format!("launch {exec}")).0, OUT_OF_MEMORY);
    // The large one looks as if it were the small one.
    let first = session.must(&format!("exec {small}"));
    session.must(&format!("change-out {first}"));
    let second = session.must(&format!("exec {large}"));
    for exec in [second, session.must("was")].into_iter().filter(|exec| *exec != 0) {
        session.call(&format!("launch {exec}"));
    }
    assert_eq!(model.passed(), 0);
}

/// It is read when the driver has made it executable, and may be destroyed by then for all the program knows.
#[test]
fn a_graph_that_is_destroyed_meanwhile_allocates_what_was_in_it() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let graph = session.must("graph");
    session.must(&format!("graph-alloc {graph} {} 0", 2 * CEILING));
    session.must("hold 3");
    session.must(&format!("beside-exec {graph}"));
    session.must(&format!("beside-destroy-graph {graph}"));
    let exec = session.must("go-on");
    assert_eq!(session.call(&format!("launch {exec}")).0, OUT_OF_MEMORY);
    exact(&model, &mut session, 0);
    assert_eq!(model.passed(), 0);
}

#[test]
fn what_is_allocated_while_a_capture_ends_is_in_the_graph() {
    let Some(model) = model() else { return };
    for (end, per_thread) in
        ["end-capture", "end-capture-to-cig"].into_iter().flat_map(|end| [(end, false), (end, true)])
    {
        let mut command = model.command();
        if per_thread {
            command.env("SESSION_PER_THREAD", "1");
        }
        let mut session = Session::of(&mut command);
        session.must("init 0");
        let stream = session.must("stream");
        session.must(&format!("capture {stream}"));
        session.must("hold 6");
        session.must(&format!("beside-async {} {stream}", 2 * CEILING));
        session.must(&format!("beside-{end} {stream}"));
        let (allocated, _, ended) = session.call("go-on");
        assert_eq!((allocated, ended), (0, 0), "{end}");
        exact(&model, &mut session, 0);
        // It has ended: what comes now is no part of a graph.
        assert_eq!(session.call(&format!("async {} {stream}", 2 * CEILING)).0, OUT_OF_MEMORY, "{end}");
        assert_eq!(model.passed(), 0, "{end}");
        session.kill();
    }
}

/// A capture may begin after we have looked: what the driver then puts into the graph is not in use of the pool.
#[test]
fn what_is_allocated_while_a_capture_begins_is_in_the_graph() {
    let Some(model) = model() else { return };
    for pool_of in ["pool-of 0", "managed-pool 2 0"] {
        let mut session = model.ready();
        let (pool, stream) = (session.must(pool_of), session.must("stream"));
        session.must("hold 6");
        session.must(&format!("beside-from-pool {} {pool} {stream}", 100 * MIB));
        session.must(&format!("capture {stream}"));
        let block = session.must("go-on");
        exact(&model, &mut session, 0);
        session.must(&format!("free-async {block} {stream}"));
        let graph = session.must(&format!("end-capture {stream}"));
        let exec = session.must(&format!("exec {graph}"));
        session.must(&format!("launch {exec} {stream}"));
        exact(&model, &mut session, 100 * MIB);
        // What the pool takes and gives back after that is accounted as ever.
        let block = session.must(&format!("from-pool {} {pool} {stream}", 10 * MIB));
        session.must(&format!("free-async {block} {stream}"));
        session.must(&format!("wait {stream}"));
        exact(&model, &mut session, 100 * MIB);
        session.must("trim-graphs 0");
        session.must(&format!("alloc {CEILING}"));
        assert_eq!(model.passed(), 0);
        session.kill();
    }
}

/// With a context end the captures in its streams.
#[test]
fn what_is_allocated_while_a_captured_stream_goes_with_its_context_is_in_the_graph() {
    let Some(model) = model() else { return };
    for (make, end) in [("context 0", "destroy"), ("primary 0", "reset"), ("primary 0", "release-primary")] {
        let mut session = model.start();
        session.must("only-init");
        let context = session.must(make);
        let stream = session.must("stream");
        session.must(&format!("capture {stream}"));
        session.must("hold 6");
        session.must(&format!("beside-async {} {stream}", 2 * CEILING));
        session.must(&format!("beside-{end} {context}"));
        assert_eq!(session.call("go-on").0, 0);
        assert_eq!((model.passed(), model.held(0)), (0, 0), "{end}");
        session.kill();
    }
}

/// A capture may end while something is freed in its stream: then the graph frees it, or it is free.
#[test]
fn what_is_freed_while_a_capture_ends_is_freed_by_the_graph() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let stream = session.must("stream");
    let block = session.must(&format!("async {} {stream}", 100 * MIB));
    session.must(&format!("capture {stream}"));
    session.must("hold 7");
    session.must(&format!("beside-free-async {block} {stream}"));
    session.must(&format!("beside-end-capture {stream}"));
    assert_eq!(session.call("go-on"), (0, 0, 0));
    session.must(&format!("free-async {block} {stream}"));
    session.must("wait");
    exact(&model, &mut session, 0);
}

#[test]
fn what_the_driver_fails_to_allocate_is_given_back() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let graph = session.must("graph");
    session.must(&format!("graph-alloc {graph} {MIB} 0"));
    let exec = session.must(&format!("exec {graph}"));
    for command in [
        "alloc 1000000".into(),
        "managed 1000000".into(),
        "pitch 1000 1000".into(),
        "array 1000 1000".into(),
        "mipmap 100 100 2".into(),
        format!("create {}", 2 * MIB),
        "async 1000000".into(),
        format!("launch {exec}"),
    ] {
        session.must("fail 1");
        assert_eq!(session.call(&command).0, 999, "{command}");
        exact(&model, &mut session, 0);
    }
    assert_eq!(model.refusals(0), 0);
}

#[test]
fn a_context_takes_its_blocks_along() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    session.must(&format!("alloc {MIB}"));
    let context = session.must("context 0");
    for _ in 0..100 {
        session.must(&format!("alloc {MIB}"));
    }
    let other = session.must("context 0");
    session.must(&format!("alloc {MIB}"));
    session.must(&format!("destroy {context}"));
    session.must(&format!("current {other}"));
    exact(&model, &mut session, 2 * MIB);
    session.must(&format!("destroy {other}"));
    assert_eq!(session.call(&format!("destroy {other}")).0, 201);
    session.must("primary 0");
    exact(&model, &mut session, MIB);
    // Physical memory and pools are the device's.
    session.must(&format!("create {}", 2 * MIB));
    // The primary context was retained three times.
    session.must("release-primary 0");
    exact(&model, &mut session, 3 * MIB);
    session.must("release-primary 0");
    session.must("release-primary 0");
    session.must("primary 0");
    exact(&model, &mut session, 2 * MIB);
    session.must(&format!("alloc {MIB}"));
    session.must("async 1000");
    session.must("reset 0");
    session.must("primary 0");
    exact(&model, &mut session, 2 * MIB);
}

/// Whoever asks for it at that moment gets a new one.
#[test]
fn a_primary_context_that_is_made_anew_at_once_has_no_blocks_of_the_one_before() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    session.must(&format!("alloc {}", 100 * MIB));
    session.must("hold 5");
    session.must("beside-release-primary 0");
    session.must("beside-retain-primary 0");
    session.must("go-on");
    session.must("primary 0");
    exact(&model, &mut session, 0);
}

/// The device's context need not have been current before.
#[test]
fn blocks_of_a_green_context_go_with_the_device_that_has_no_others() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let green = session.must("green 0");
    session.must(&format!("alloc {}", 2 * MIB));
    session.must(&format!("destroy-green {green}"));
    session.must("reset 0");
    session.must("primary 0");
    exact(&model, &mut session, 0);
}

/// What is allocated where a green context is current is the device's, and the green context's address may be another's later.
#[test]
fn a_green_context_leaves_its_blocks_to_the_device() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    session.must(&format!("alloc {MIB}"));
    let (result, green, context) = session.call("green 0");
    assert_eq!(result, 0);
    let block = session.must(&format!("alloc {}", 2 * MIB));
    session.must(&format!("alloc {}", 4 * MIB));
    session.must("primary 0");
    session.must(&format!("destroy-green {green}"));
    exact(&model, &mut session, 7 * MIB);
    // The driver in small gives the same address again, on another device.
    assert_eq!(session.must("context 1"), context);
    session.must(&format!("alloc {}", 8 * MIB));
    assert_eq!((model.held(1), model.accounted(1)), (8 * MIB, 8 * MIB));
    session.must(&format!("destroy {context}"));
    assert_eq!((model.held(1), model.accounted(1)), (0, 0));
    session.must("primary 0");
    exact(&model, &mut session, 7 * MIB);
    session.must(&format!("free {block}"));
    exact(&model, &mut session, 5 * MIB);
    assert_ne!(session.call(&format!("destroy-green {green}")).0, 0);
    session.must("reset 0");
    session.must("primary 0");
    exact(&model, &mut session, 0);
}

/// The heap and the stacks of kernels can be made as large as a GPU by one call that allocates nothing by name.
#[test]
fn limits_of_a_context_count_as_what_they_take() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let (stack, fifo, heap) = (0, 1, 2);
    // What every context begins with is the node's to measure.
    session.must(&format!("limit {heap} {}", 8 * MIB));
    session.must(&format!("limit {stack} 1000"));
    exact(&model, &mut session, 0);
    session.must(&format!("limit {heap} {}", 108 * MIB));
    exact(&model, &mut session, 100 * MIB);
    session.must(&format!("limit {fifo} {}", 3 * MIB));
    exact(&model, &mut session, 102 * MIB);
    // One for each of 10,000 threads; the driver rounds.
    session.must(&format!("limit {stack} 8000"));
    let stacks = (8192 - 1024) * 10_000;
    exact(&model, &mut session, 102 * MIB + stacks);
    session.must(&format!("limit {heap} {}", 58 * MIB));
    exact(&model, &mut session, 52 * MIB + stacks);
    for (limit, value) in [(heap, CEILING), (fifo, 2 * CEILING), (stack, CEILING), (heap, u64::MAX)] {
        assert_eq!(session.call(&format!("limit {limit} {value}")).0, OUT_OF_MEMORY);
        exact(&model, &mut session, 52 * MIB + stacks);
    }
    session.must("fail 1");
    assert_eq!(session.call(&format!("limit {heap} {}", 88 * MIB)).0, 999);
    exact(&model, &mut session, 52 * MIB + stacks);
    // Of a context each, and gone with it.
    let context = session.must("context 0");
    session.must(&format!("limit {heap} {}", 208 * MIB));
    exact(&model, &mut session, 252 * MIB + stacks);
    session.must(&format!("destroy {context}"));
    session.must("primary 0");
    exact(&model, &mut session, 52 * MIB + stacks);
    session.must(&format!("limit {stack} 0"));
    session.must("limit 5 128");
    exact(&model, &mut session, 52 * MIB);
    assert_eq!(model.passed(), 0);
}

#[test]
fn processes_of_a_container_share_one_ceiling() {
    let Some(model) = model() else { return };
    let (mut one, mut two) = (model.ready(), model.ready());
    one.must(&format!("alloc {}", CEILING * 3 / 4));
    exact(&model, &mut two, CEILING * 3 / 4);
    assert_eq!(two.call(&format!("alloc {}", CEILING / 2)).0, OUT_OF_MEMORY);
    two.must(&format!("alloc {}", CEILING / 4));
    assert_eq!(two.call("nvml-processes 0"), (0, 2, CEILING));
    // Killed, it gives everything back at once.
    one.kill();
    exact(&model, &mut two, CEILING / 4);
    assert_eq!(two.call("nvml-processes 0"), (0, 1, CEILING / 4));
    two.must(&format!("alloc {}", CEILING * 3 / 4));
    assert_eq!(model.passed(), 0);
}

#[test]
fn neighbours_are_not_seen() {
    let Some(model) = model() else { return };
    model.neighbour(0, 20_000 * MIB);
    let mut session = model.ready();
    assert_eq!(session.call("nvml-processes 0"), (0, 0, 0));
    session.must(&format!("alloc {MIB}"));
    assert_eq!(session.info(), (CEILING - MIB, CEILING));
    assert_eq!(session.call("nvml 0"), (0, CEILING - MIB, CEILING));
    assert_eq!(session.call("nvml-processes 0"), (0, 1, MIB));
    // The model's neighbour is process 1.
    assert_eq!(session.call("nvml-lists 0 1"), (0, 1, MIB));
    // Of those that the driver saw at work, only its own; and the card's busy time until the node measures the share's.
    assert_eq!(session.call("nvml-utilization 0"), (0, 1, 90_080));
    let node = LimitsWriter::open(&model.room.limits()).unwrap();
    node.set_busy_percent(&model_uuid(0), 17).unwrap();
    node.beat(1);
    assert_eq!(session.call("nvml-utilization 0"), (0, 1, 17_017));
}

#[test]
fn ceilings_are_found_by_uuid_whatever_the_order_of_devices() {
    let Some(model) = model() else { return };
    let uuid = |gpu| format!("GPU-67000000-0000-0000-0000-00000000000{gpu}");
    for visible in ["1,0".into(), format!("{},{}", uuid(1), uuid(0)), format!("1,{}", uuid(0))] {
        let mut session = Session::of(model.command().env("CUDA_VISIBLE_DEVICES", &visible));
        session.must("init 0");
        // Device 0 is GPU 1.
        let totals = (session.call("total 0").1, session.call("total 1").1);
        assert_eq!(totals, (CEILING / 2, CEILING), "{visible}");
        session.must(&format!("alloc {}", CEILING / 2));
        assert_eq!(session.call("alloc 1").0, OUT_OF_MEMORY, "{visible}");
        assert_eq!((model.held(1), model.accounted(1)), (CEILING / 2, CEILING / 2), "{visible}");
        // NVML knows nothing of it: there GPU 0 is GPU 0.
        assert_eq!(session.call("nvml 0"), (0, CEILING, CEILING), "{visible}");
        session.must("primary 1");
        session.must(&format!("alloc {CEILING}"));
        assert_eq!((model.held(0), model.accounted(0)), (CEILING, CEILING), "{visible}");
        session.kill();
    }
    // One alone, which is device 0.
    let mut session = Session::of(model.command().env("CUDA_VISIBLE_DEVICES", uuid(1)));
    session.must("init 0");
    assert_eq!(session.call("total 0").1, CEILING / 2);
    assert_ne!(session.call("total 1").0, 0);
    assert_eq!(model.passed(), 0);
}

#[test]
fn a_gpu_that_is_not_of_the_share_has_no_memory_for_it() {
    if !can_mount() {
        return;
    }
    let model = Model::new(TOTAL, &[limit(0, CEILING)]);
    let mut session = model.start();
    session.must("init 1");
    assert_eq!(session.call("total 1"), (0, 0, 0));
    assert_eq!(session.info(), (0, 0));
    for command in ["alloc 512", "managed 512", "array 10 10", "async 512", "create 2097152 1"] {
        assert_eq!(session.call(command).0, OUT_OF_MEMORY, "{command}");
    }
    assert_eq!(model.held(1), 0);
}

#[test]
fn a_ceiling_that_is_changed_holds_at_once() {
    let Some(model) = model() else { return };
    let mut session = model.ready();
    let node = LimitsWriter::open(&model.room.limits()).unwrap();
    session.must(&format!("alloc {CEILING}"));
    node.set(&limit(0, 2 * CEILING)).unwrap();
    assert_eq!(session.info(), (CEILING, 2 * CEILING));
    let second = session.must(&format!("alloc {CEILING}"));
    // Below what is in use: nothing is taken away, and nothing more is given.
    node.set(&limit(0, CEILING / 2)).unwrap();
    assert_eq!(session.info(), (0, CEILING / 2));
    assert_eq!(session.call("nvml 0"), (0, 0, CEILING / 2));
    assert_eq!(session.call("alloc 1").0, OUT_OF_MEMORY);
    session.must(&format!("free {second}"));
    assert_eq!(session.call("alloc 1").0, OUT_OF_MEMORY);
    assert_eq!(model.refusals(0), 2);
    // What the node measured besides counts too, as long as that is not long ago.
    let (now, long_ago) = (u64::MAX, 1);
    node.set(&limit(0, CEILING + 300 * MIB)).unwrap();
    node.set_unseen(&model_uuid(0), 299 * MIB, now).unwrap();
    assert_eq!(session.info(), (MIB, CEILING + 300 * MIB));
    assert_eq!(session.call("nvml 0"), (0, MIB, CEILING + 300 * MIB));
    assert_eq!(session.call(&format!("alloc {}", MIB + 1)).0, OUT_OF_MEMORY);
    let third = session.must(&format!("alloc {MIB}"));
    // More than is left of the ceiling: nothing is taken away, and nothing more is given.
    node.set_unseen(&model_uuid(0), 350 * MIB, now).unwrap();
    assert_eq!(session.info(), (0, CEILING + 300 * MIB));
    session.must(&format!("free {third}"));
    assert_eq!(session.call("alloc 1").0, OUT_OF_MEMORY);
    node.set_unseen(&model_uuid(0), 350 * MIB, long_ago).unwrap();
    assert_eq!(session.info(), (300 * MIB, CEILING + 300 * MIB));
    session.must(&format!("alloc {}", 300 * MIB));
    assert!(node.set(&GpuLimit { uuid: [9; 16], ..limit(0, 1) }).is_err());
}
