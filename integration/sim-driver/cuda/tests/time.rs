//! Work takes its time: asynchronous calls return at once, streams and events are in order, queues fill, and processes take
//! turns. Nothing here asserts how long something took on the clock, only what the model promises.

#![expect(clippy::unwrap_used, reason = "a test")]

mod common;

use std::{
    ffi::CString,
    sync::atomic::{AtomicU64, Ordering::SeqCst},
    thread,
    time::Duration,
};

use common::{Driver, context, eventually, say};
use serde_json::Value;

const MACHINE: &str = "version: 1\ngpus: [{count: 1, timeSliceUs: 2000, switchUs: 10}]";

const MODULE: &str = "\
.version 8.0
.target sm_80
.address_size 64
.visible .entry none() { ret; }
.visible .entry k5us() { // sim: time 5us
ret; }
.visible .entry k200us() { // sim: time 200us
ret; }
.visible .entry k20ms() { // sim: time 20ms
ret; }
.visible .entry ever() { // sim: time 100000s
ret; }
";

const NOT_READY: i32 = 600;
const NONE: u64 = 0;

#[test]
fn plays_a_part() {
    let Some(part) = common::part() else { return };
    match part.as_str() {
        "asynchronous" => asynchronous(),
        "streams" => streams(),
        "host" => host(),
        "graph" => graph(),
        "queue" => queue(),
        "default_stream" => default_stream(),
        "busy" => busy(),
        "behind" => behind(),
        other => panic!("{other}"),
    }
}

struct Kernels(u64);

impl Kernels {
    fn load() -> Self {
        context(0);
        let text = CString::new(MODULE).unwrap();
        let mut module = 0_u64;
        ok!(cuModuleLoadData(&mut module, text.as_ptr() as u64));
        Self(module)
    }

    fn launch(&self, name: &str, stream: u64) {
        let name = CString::new(name).unwrap();
        let mut function = 0_u64;
        ok!(cuModuleGetFunction(&mut function, self.0, name.as_ptr() as u64));
        ok!(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, NONE, NONE));
    }
}

fn stream(flags: u32) -> u64 {
    let mut stream = 0_u64;
    ok!(cuStreamCreate(&mut stream, flags));
    stream
}

fn event() -> u64 {
    let mut event = 0_u64;
    ok!(cuEventCreate(&mut event, 0));
    event
}

fn elapsed(start: u64, end: u64) -> f32 {
    let mut milliseconds = 0_f32;
    ok!(cuEventElapsedTime(&mut milliseconds as *mut f32 as u64, start, end));
    milliseconds
}

fn asynchronous() {
    let kernels = Kernels::load();
    let (one, other) = (stream(1), stream(1));
    let (start, end, never) = (event(), event(), event());
    ok!(cuEventRecord(start, one));
    kernels.launch("k20ms", one);
    kernels.launch("none", one);
    kernels.launch("k20ms", one);
    ok!(cuEventRecord(end, one));
    ok!(cuEventSynchronize(end));
    ok!(cuEventQuery(end));
    ok!(cuStreamQuery(one));
    assert!(elapsed(start, end) >= 40.0, "{}", elapsed(start, end));
    assert!(elapsed(end, start) <= -40.0);
    // What never ends is never ready, and nobody but its stream has to wait for it.
    kernels.launch("ever", other);
    ok!(cuEventRecord(never, other));
    assert_eq!(call!(cuStreamQuery(other)), NOT_READY);
    assert_eq!(call!(cuEventQuery(never)), NOT_READY);
    let mut none = 0_f32;
    assert_eq!(call!(cuEventElapsedTime(&mut none as *mut f32 as u64, start, never)), NOT_READY);
    ok!(cuEventRecord(start, one));
    kernels.launch("k20ms", one);
    ok!(cuEventRecord(end, one));
    ok!(cuStreamSynchronize(one));
    assert!(elapsed(start, end) >= 40.0, "two streams share the GPU: {}", elapsed(start, end));
    // A stream that is destroyed does what it has to do; an event that is recorded anew stands for the new place.
    ok!(cuStreamDestroy_v2(other));
    ok!(cuEventRecord(never, one));
    ok!(cuEventSynchronize(never));
}

fn streams() {
    let kernels = Kernels::load();
    let (one, other) = (stream(1), stream(1));
    let (middle, end) = (event(), event());
    kernels.launch("k20ms", one);
    ok!(cuEventRecord(middle, one));
    ok!(cuStreamWaitEvent(other, middle, 0));
    kernels.launch("k5us", other);
    ok!(cuEventRecord(end, other));
    ok!(cuStreamSynchronize(other));
    ok!(cuEventQuery(middle));
    assert!(elapsed(middle, end) >= 0.005, "{}", elapsed(middle, end));
    // It did not wait for what the other stream got later.
    ok!(cuEventRecord(middle, one));
    kernels.launch("ever", one);
    ok!(cuStreamWaitEvent(other, middle, 0));
    kernels.launch("k5us", other);
    ok!(cuStreamSynchronize(other));
}

static CALLED: AtomicU64 = AtomicU64::new(0);

extern "C" fn called(word: u64) {
    // How many come before it.
    assert_eq!(CALLED.fetch_add(1, SeqCst), word);
}

extern "C" fn called_back(_stream: u64, status: i32, word: u64) {
    assert_eq!(status, 0);
    called(word);
}

fn host() {
    let kernels = Kernels::load();
    let one = stream(0);
    let (mut block, mut bytes) = (0_u64, [0_u8; 64]);
    ok!(cuMemAlloc_v2(&mut block, 64_u64));
    for round in 0..5_u64 {
        let value = u32::try_from(round + 1).unwrap();
        kernels.launch("k20ms", one);
        ok!(cuLaunchHostFunc(one, called as *const () as u64, round * 2));
        ok!(cuMemsetD8Async(block, value, 64_u64, one));
        kernels.launch("k5us", one);
        ok!(cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr() as u64, block, 64_u64, one));
        ok!(cuStreamAddCallback(one, called_back as *const () as u64, round * 2 + 1, 0));
        let (seen, copied) = (CALLED.load(SeqCst), bytes[0]);
        if call!(cuStreamQuery(one)) == NOT_READY && round == 0 {
            assert!(seen <= 1 && copied <= 1, "{seen} {copied}");
        }
        ok!(cuStreamSynchronize(one));
        assert_eq!(CALLED.load(SeqCst), (round + 1) * 2);
        assert_eq!(bytes, [bytes[0]; 64]);
        assert_eq!(u32::from(bytes[0]), value);
    }
    // A copy that waits is behind the kernel, and the block is not freed under it.
    kernels.launch("k20ms", one);
    ok!(cuMemsetD8Async(block, 77_u32, 64_u64, one));
    ok!(cuMemcpyDtoH_v2(bytes.as_mut_ptr() as u64, block, 64_u64));
    assert_eq!(bytes, [77; 64]);
    kernels.launch("k20ms", one);
    ok!(cuMemFree_v2(block));
    ok!(cuStreamQuery(one));
}

fn graph() {
    let kernels = Kernels::load();
    let one = stream(1);
    let (start, end) = (event(), event());
    ok!(cuStreamBeginCapture_v2(one, 0));
    for _ in 0..200 {
        kernels.launch("k5us", one);
    }
    let (mut graph, mut exec) = (0_u64, 0_u64);
    ok!(cuStreamEndCapture(one, &mut graph));
    ok!(cuGraphInstantiateWithFlags(&mut exec, graph, 0_u64));
    ok!(cuStreamQuery(one));
    ok!(cuEventRecord(start, one));
    for _ in 0..10 {
        ok!(cuGraphLaunch(exec, one));
    }
    ok!(cuEventRecord(end, one));
    ok!(cuCtxSynchronize());
    assert!(elapsed(start, end) >= 10.0, "{}", elapsed(start, end));
    say("launched");
}

fn queue() {
    let kernels = Kernels::load();
    let one = stream(1);
    let early = event();
    for _ in 0..900 {
        kernels.launch("k200us", one);
    }
    ok!(cuEventRecord(early, one));
    for _ in 0..1100 {
        kernels.launch("k200us", one);
    }
    // No more than 1024 can be waiting, so all of these launches could return only when the first ones were done.
    ok!(cuEventQuery(early));
}

fn default_stream() {
    let kernels = Kernels::load();
    let (blocking, alone) = (stream(0), stream(1));
    let mut block = 0_u64;
    ok!(cuMemAlloc_v2(&mut block, 64_u64));
    let bytes = [1_u8; 64];
    kernels.launch("ever", alone);
    kernels.launch("k20ms", blocking);
    ok!(cuMemcpyHtoD_v2(block, bytes.as_ptr() as u64, 64_u64));
    ok!(cuStreamQuery(blocking));
    // And the other way round.
    let (first, second) = (event(), event());
    kernels.launch("k20ms", 0);
    ok!(cuEventRecord(first, 0_u64));
    kernels.launch("k5us", blocking);
    ok!(cuEventRecord(second, blocking));
    ok!(cuStreamSynchronize(blocking));
    ok!(cuEventQuery(first));
    assert!(elapsed(first, second) >= 0.005);
    assert_eq!(call!(cuStreamQuery(alone)), NOT_READY);
}

fn busy() {
    let kernels = Kernels::load();
    kernels.launch("ever", stream(1));
    say("ready");
}

fn behind() {
    context(0);
    let event = event();
    ok!(cuEventRecord(event, stream(1)));
    assert_eq!(call!(cuEventQuery(event)), NOT_READY);
    say("ready");
    ok!(cuEventSynchronize(event));
    say("passed");
}

fn plays(part: &str) {
    Driver::start(MACHINE).play(part);
}

#[test]
fn launches_return_at_once_and_events_tell_the_time() {
    plays("asynchronous");
}

#[test]
fn a_stream_waits_for_another_ones_event() {
    plays("streams");
}

#[test]
fn copies_fills_and_host_functions_wait_for_the_kernels_before_them() {
    plays("host");
}

#[test]
fn a_graph_takes_the_time_of_its_kernels() {
    let driver = Driver::start(MACHINE);
    let mut actor = common::Actor::of(driver.piped("graph").spawn().unwrap());
    actor.hear("launched");
    let show = driver.show();
    assert_eq!(show["processes"][0]["launches"][0], 2000);
    assert_eq!(show["processes"][0]["busyNs"][0], 10_000_000);
    actor.end();
}

#[test]
fn a_launch_waits_while_its_stream_is_full() {
    plays("queue");
}

#[test]
fn the_default_stream_waits_for_blocking_streams_only_and_they_for_it() {
    plays("default_stream");
}

/// Nanoseconds that a process has had the GPU.
fn had(show: &Value, pid: u32) -> u64 {
    let all = show["processes"].as_array().unwrap();
    all.iter().find(|one| one["pid"] == pid).unwrap()["busyNs"][0].as_u64().unwrap()
}

#[test]
fn processes_share_a_gpu_evenly_and_a_killed_one_leaves_it() {
    let driver = Driver::start(MACHINE);
    let [one, other] = ["busy"; 2].map(|part| driver.begin(part));
    let before = driver.show();
    thread::sleep(Duration::from_millis(50));
    let after = driver.show();
    let gained = |pid| had(&after, pid) - had(&before, pid);
    let (mine, theirs) = (gained(one.pid()), gained(other.pid()));
    assert!(mine.abs_diff(theirs) <= 4_000_000, "{mine} and {theirs}");
    let passed = after["gpus"][0]["atNs"].as_u64().unwrap() - before["gpus"][0]["atNs"].as_u64().unwrap();
    assert!(mine + theirs <= passed && (mine + theirs) * 100 >= passed * 99, "{mine} + {theirs} of {passed}");
    one.kill();
    eventually("the killed one is gone", || driver.show()["processes"].as_array().unwrap().len() == 1);
    let before = driver.show();
    thread::sleep(Duration::from_millis(20));
    let after = driver.show();
    let passed = after["gpus"][0]["atNs"].as_u64().unwrap() - before["gpus"][0]["atNs"].as_u64().unwrap();
    assert_eq!(had(&after, other.pid()) - had(&before, other.pid()), passed, "alone, it has all of the time");
    let ended = after["ended"].as_array().unwrap();
    let ended: u64 = ended.iter().map(|group| group["busyNs"][0].as_u64().unwrap()).sum();
    assert!(ended >= mine, "what it had is not forgotten: {ended}");
    other.kill();
}

#[test]
fn an_event_waits_for_the_turn_of_its_process_though_nothing_is_before_it() {
    let driver = Driver::start("version: 1\ngpus: [{count: 1, timeSliceUs: 3000000}]");
    let busy = driver.begin("busy");
    let mut behind = driver.begin("behind");
    behind.go_on("passed");
    behind.end();
    busy.kill();
}
