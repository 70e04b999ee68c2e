//! Which GPUs a process has, what it learns of them, and what becomes of it when one is lost.

#![expect(clippy::unwrap_used, reason = "a test")]

mod common;

use std::{fs, os::unix::fs::PermissionsExt};

use common::{Driver, MIB, context, free, say};
use sim_gpud::daemon::{self, Command};

const MACHINE: &str = "version: 1
gpus:
- {model: Tesla T4, numa: 1}
- {model: NVIDIA H100 80GB HBM3, count: 2, reservedMib: 559}
links: [{gpus: [1, 2], by: nvlink, each: 4}]
";

#[test]
fn plays_a_part() {
    let Some(part) = common::part() else { return };
    match part.as_str() {
        "devices" => devices(),
        "list" => list(),
        "init" => println!("init {}", call!(cuInit(0))),
        "lost" => lost(),
        other => panic!("{other}"),
    }
}

fn text(bytes: &[u8]) -> &str {
    std::ffi::CStr::from_bytes_until_nul(bytes).unwrap().to_str().unwrap()
}

fn devices() {
    let mut count = 7_i32;
    assert_eq!(call!(cuDeviceGetCount(&mut count)), 3, "before cuInit");
    assert_eq!(count, 7);
    assert_eq!(call!(cuInit(1)), 1);
    ok!(cuInit(0));
    ok!(cuDeviceGetCount(&mut count));
    assert_eq!(count, 3);
    let (mut name, mut bytes, mut value) = ([0_u8; 64], 0_usize, 0_i32);
    // The fastest first.
    ok!(cuDeviceGetName(&mut name[0], 64, 0));
    assert_eq!(text(&name), "NVIDIA H100 80GB HBM3");
    ok!(cuDeviceGetName(&mut name[0], 5, 2));
    assert_eq!(text(&name), "Tesl");
    ok!(cuDeviceTotalMem_v2(&mut bytes, 0));
    assert_eq!(bytes as u64, 81_000 * MIB, "without what the driver keeps");
    for which in 1..=161 {
        ok!(cuDeviceGetAttribute(&mut value, which, 0));
    }
    assert_eq!(call!(cuDeviceGetAttribute(&mut value, 0, 0)), 1);
    assert_eq!(call!(cuDeviceGetAttribute(&mut value, 1000, 0)), 1);
    assert_eq!(call!(cuDeviceGetAttribute(&mut value, 1, 3)), 101);
    let mut id = [0_u8; 32];
    ok!(cuDeviceGetPCIBusId(&mut id[0], 32, 1));
    assert_eq!(text(&id), "0000:12:00.0");
    ok!(cuDeviceGetByPCIBusId(&mut value, &id[0]));
    assert_eq!(value, 1);
    // Over NVLink, then over PCI.
    ok!(cuDeviceGetP2PAttribute(&mut value, 3, 0, 1));
    assert_eq!(value, 1);
    ok!(cuDeviceGetP2PAttribute(&mut value, 3, 0, 2));
    assert_eq!(value, 0);
}

#[test]
fn devices_are_what_the_file_says() {
    Driver::start(MACHINE).play("devices");
}

/// Says the last byte of each device's UUID, or why there is none.
fn list() {
    let code = call!(cuInit(0));
    if code != 0 {
        println!("devices error {code}");
        return;
    }
    let mut count = 0_i32;
    ok!(cuDeviceGetCount(&mut count));
    let last = (0..count).map(|device| {
        let mut uuid = [0_u8; 16];
        ok!(cuDeviceGetUuid_v2(&mut uuid, device));
        uuid[15].to_string()
    });
    println!("devices {}", last.collect::<Vec<_>>().join(" "));
}

fn listed(driver: &Driver, variables: &[(&str, &str)]) -> String {
    let output = driver.actor("list").envs(variables.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().find_map(|line| line.split("devices ").nth(1)).unwrap_or_else(|| panic!("{text}")).to_owned()
}

#[test]
fn variables_and_device_nodes_pick_the_devices() {
    let driver = Driver::start(MACHINE);
    assert_eq!(listed(&driver, &[]), "1 2 0");
    let order = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID");
    assert_eq!(listed(&driver, &[order]), "0 1 2");
    assert_eq!(listed(&driver, &[order, ("CUDA_VISIBLE_DEVICES", "2,0")]), "2 0");
    assert_eq!(listed(&driver, &[("CUDA_VISIBLE_DEVICES", "2,0")]), "0 1");
    let uuid = "GPU-53494d55-6770-7500-0000-000000000002";
    assert_eq!(listed(&driver, &[("CUDA_VISIBLE_DEVICES", uuid)]), "2");
    for none in ["", "-1", "GPU-5", "0,0", "3"] {
        assert_eq!(listed(&driver, &[("CUDA_VISIBLE_DEVICES", none)]), "error 100", "{none:?}");
    }
    fs::remove_file(driver.node("nvidia1")).unwrap();
    assert_eq!(listed(&driver, &[]), "2 0");
    if !is_root() {
        fs::set_permissions(driver.node("nvidia2"), fs::Permissions::from_mode(0o0)).unwrap();
        assert_eq!(listed(&driver, &[]), "0");
    }
    fs::remove_file(driver.node("nvidiactl")).unwrap();
    assert_eq!(listed(&driver, &[]), "error 100");
}

fn is_root() -> bool {
    // SAFETY: asks for a number.
    unsafe { libc::geteuid() == 0 }
}

#[test]
fn a_library_of_another_version_than_the_module_is_refused() {
    let driver = Driver::start(MACHINE);
    let library = driver.library().with_file_name("libcuda.so.1.2.3");
    let mut bytes = fs::read(driver.library()).unwrap();
    sim_gpud::stamp::Stamp { driver: "550.90.07".into(), cuda: 12_040 }.apply(&mut bytes).unwrap();
    fs::write(&library, bytes).unwrap();
    let output = driver.actor("init").env("SIM_TEST_LIBRARY", library).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("init 803"), "{output:?}");
}

fn lost() {
    let one = context(0);
    let mut at = 0_u64;
    ok!(cuMemAlloc_v2(&mut at, 10 * MIB));
    say("ready");
    assert_eq!(call!(cuMemAlloc_v2(&mut at, 1_usize)), 999);
    assert_eq!(call!(cuCtxSynchronize()), 999);
    let mut other = 0_u64;
    assert_eq!(call!(cuCtxCreate_v2(&mut other, 0, 0)), 46);
    ok!(cuCtxCreate_v2(&mut other, 0, 1));
    assert!(free() > 0, "the others are well");
    ok!(cuCtxSetCurrent(one));
    say("noticed");
    ok!(cuMemAlloc_v2(&mut at, 1_usize));
}

#[test]
fn calls_on_a_lost_gpu_fail_until_it_is_back() {
    let driver = Driver::start(MACHINE);
    let mut actor = driver.begin("lost");
    let happen = |command| daemon::ask(driver.root(), &command).unwrap();
    happen(Command::Lose { gpu: "1".into() });
    actor.go_on("noticed");
    happen(Command::Recover { gpu: "1".into() });
    actor.end();
}
