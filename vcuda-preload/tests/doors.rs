//! Every way in which a program gets at the driver's functions leads to the shim, and whatever the shim does not stand
//! for is the driver's own. Against real drivers, which need no GPU for this.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use common::{Room, can_mount, compile, find, is_ours, real_parts, source, table};
use region::{GpuLimit, place};

const DRIVERS: [&str; 3] = ["driver-535", "driver-550", "driver-555"];

struct Setup {
    parts: PathBuf,
    room: Room,
    client: PathBuf,
}

fn any_gpu() -> [GpuLimit; 1] {
    let own_slots = region::Slots::first(20);
    [GpuLimit { uuid: [7; 16], memory_bytes: 1 << 30, core_percent: 20, core_limit_percent: 20, own_slots }]
}

fn room(driver: &str) -> Option<Setup> {
    let parts = real_parts().filter(|_| can_mount())?;
    let folder = parts.join(driver);
    let room = Room::new(&find(&folder, "libcuda.so."), &find(&folder, "libnvidia-ml.so."), &any_gpu());
    let client = compile(room.folder.path(), "client", &source("client.c"), &["-ldl"]);
    Some(Setup { parts, room, client })
}

/// What `client DOOR FILE NAME...` says: the owner of each name, and the error text where it has none.
fn behind(setup: &Setup, client: &Path, door: &str, file: &str, names: &[&str]) -> Vec<String> {
    let output = setup.room.run(client, &[&[door, file], names].concat());
    output
        .lines()
        .map(|line| line.strip_prefix(&format!("{door} ")).unwrap().split_once(' ').unwrap().1.to_owned())
        .collect()
}

/// A library that looks symbols up itself: by calls, since a jump would leave the program as the caller.
fn plugin(setup: &Setup) -> PathBuf {
    let flags = ["-DPLUGIN", "-shared", "-fPIC", "-Wno-unused", "-fno-optimize-sibling-calls"];
    compile(setup.room.folder.path(), "plugin.so", &source("client.c"), &flags)
}

const HANDLED: &str = "cuMemAlloc_v2";
const PASSED: &str = "cuEventCreate";

#[test]
fn every_symbol_of_every_driver_is_found_by_name_and_none_that_it_lacks() {
    for driver in DRIVERS {
        let Some(setup) = room(driver) else { return };
        for library in ["cuda", "nvml"] {
            let rows = table(library);
            let file = if library == "cuda" { "libcuda.so.1" } else { "libnvidia-ml.so.1" };
            let real = find(&setup.parts.join(driver), &file[..file.len() - 1]);
            let bytes = fs::read(real).unwrap();
            let elf = goblin::elf::Elf::parse(&bytes).unwrap();
            let exports: std::collections::BTreeSet<_> = elf
                .dynsyms
                .iter()
                .filter(|symbol| symbol.st_shndx != 0)
                .map(|symbol| elf.dynstrtab.get_at(symbol.st_name).unwrap())
                .collect();
            let names: Vec<_> = rows.iter().map(|(symbol, ..)| symbol.as_str()).collect();
            let owners = behind(&setup, &setup.client, "open", file, &names);
            assert_eq!(owners.len(), rows.len());
            for ((symbol, _, action), owner) in rows.iter().zip(owners) {
                match (exports.contains(symbol.as_str()), is_ours(action)) {
                    (true, true) => assert_eq!(owner, "shim", "{driver}: {symbol}"),
                    (true, false) => assert_eq!(owner, "driver", "{driver}: {symbol}"),
                    (false, _) => {
                        assert!(owner.contains("undefined symbol"), "{driver}: {symbol}: {owner}");
                    }
                }
            }
            // And the other way round: what the driver has and the table does not, but for the debugger's.
            let unknown: Vec<_> = exports
                .iter()
                .filter(|export| !names.contains(export) && !export.starts_with("cudbg"))
                .filter(|export| export.starts_with("cu") || export.starts_with("nvml"))
                .collect();
            assert!(unknown.is_empty(), "{driver}: {unknown:?} are not in the table; see table/update.rs");
        }
    }
}

#[test]
fn a_symbol_that_is_new_to_us_is_the_drivers() {
    let Some(setup) = room("driver-550") else { return };
    // In the driver and not in the table, as a function of a later driver would be.
    let new = "cudbgGetAPI";
    assert!(!table("cuda").iter().any(|(symbol, ..)| symbol == new));
    let names = [new, "cuNoSuchThing", "nvmlNoSuchThing"];
    let owners = behind(&setup, &setup.client, "open", "libcuda.so.1", &names);
    assert_eq!(owners[0], "driver");
    assert!(owners[1..].iter().all(|owner| owner.contains("undefined symbol")), "{owners:?}");
}

#[test]
fn every_door_leads_to_the_shim() {
    let Some(setup) = room("driver-550") else { return };
    let (client, plugin) = (&setup.client, plugin(&setup));
    let plugin_path = plugin.to_str().unwrap();
    for (door, file) in [
        ("default", "-"),
        ("open", "libcuda.so.1"),
        ("open", "libcuda.so"),
        ("open", "/usr/local/lib/libcuda.so.550.1"),
        ("open", place::SHIM),
        ("open", place::REAL_CUDA),
    ] {
        let owners = behind(&setup, client, door, file, &[HANDLED, PASSED, "cuGetProcAddress_v2"]);
        assert_eq!(owners, ["shim", "driver", "shim"], "{door} {file}");
    }
    for (door, file) in [("open", "libnvidia-ml.so.1"), ("open", place::REAL_NVML), ("default", "-")] {
        let owners = behind(&setup, client, door, file, &["nvmlDeviceGetMemoryInfo", "nvmlInit_v2"]);
        assert_eq!(owners, ["shim", "driver"], "{door} {file}");
    }
    // Again and again, from the program, which comes before the shim.
    assert_eq!(behind(&setup, client, "next", "-", &[HANDLED]), ["shim"; 3]);
    // From a library that comes after it.
    assert_eq!(behind(&setup, client, "plugin-next", plugin_path, &[HANDLED, PASSED]), ["shim", "driver"]);
    assert_eq!(behind(&setup, client, "plugin-default", plugin_path, &[HANDLED, PASSED]), ["shim", "driver"]);
    // Past the overridden dlsym, our exports are still all that libcuda.so.1 has.
    assert_eq!(behind(&setup, client, "own-dlsym", "libcuda.so.1", &[HANDLED, PASSED]), ["shim", "shim"]);
    assert_eq!(behind(&setup, client, "deep", plugin_path, &[HANDLED, PASSED]), ["shim", "shim"]);
    // The driver's symbols have no versions, so a look-up of one by version finds none, as in the driver itself.
    let owners = behind(&setup, client, "versioned", "libcuda.so.1", &[HANDLED]);
    assert!(owners[0].contains("undefined symbol"), "{owners:?}");
    // Another namespace of the loader gets a copy of the shim, which shares the process's slot.
    let system = "/usr/local/lib/libcuda.so.1";
    assert_eq!(behind(&setup, client, "namespace", system, &[HANDLED, PASSED]), ["shim", "driver"]);
    assert_eq!(behind(&setup, client, "own-namespace", system, &[HANDLED, PASSED]), ["copy 100", "copy 100"]);
}

#[test]
fn nvml_has_the_same_doors() {
    let Some(setup) = room("driver-550") else { return };
    let (client, plugin) = (&setup.client, plugin(&setup));
    let plugin = plugin.to_str().unwrap();
    let (handled, passed) = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetName");
    for (door, file, second) in [
        ("open", "libnvidia-ml.so.1", "driver"),
        ("open", "libnvidia-ml.so", "driver"),
        ("open", "/usr/local/lib/libnvidia-ml.so.1", "driver"),
        ("open", place::REAL_NVML, "driver"),
        ("default", "-", "driver"),
        ("plugin-next", plugin, "driver"),
        ("plugin-default", plugin, "driver"),
        ("own-dlsym", "libnvidia-ml.so.1", "shim"),
        ("deep", plugin, "shim"),
        ("namespace", "/usr/local/lib/libnvidia-ml.so.1", "driver"),
    ] {
        assert_eq!(behind(&setup, client, door, file, &[handled, passed]), ["shim", second], "{door} {file}");
    }
    assert_eq!(behind(&setup, client, "next", "-", &[handled]), ["shim"; 3]);
    let owners = behind(&setup, client, "versioned", "libnvidia-ml.so.1", &[handled]);
    assert!(owners[0].contains("undefined symbol"), "{owners:?}");
}

/// Nothing is preloaded into it, but the C library that it loads along with the driver looks in the same places.
#[test]
fn a_static_program_that_loads_the_driver_gets_the_shim() {
    let Some(setup) = room("driver-550") else { return };
    let client = compile(setup.room.folder.path(), "static", &source("static.c"), &["-static", "-ldl"]);
    let bare = setup.room.bare_command(&client).arg("libcuda.so.1").output().unwrap();
    let bare = String::from_utf8(bare.stdout).unwrap();
    let (library, answer) = bare.split_once(", ").unwrap();
    assert_eq!(library, "CUDA and NVML in one: 0");
    for file in ["libcuda.so.1", "/usr/local/lib/libcuda.so.550.1"] {
        // The driver behind it was asked.
        let said = setup.room.run(&client, &[file]);
        assert_eq!(said, format!("CUDA and NVML in one: 1, {answer}"), "{file}");
    }
}

#[test]
fn the_shim_is_loaded_once_under_all_its_names() {
    let Some(setup) = room("driver-550") else { return };
    let names = [
        "libcuda.so.1",
        "libcuda.so",
        "/usr/local/lib/libcuda.so.550.1",
        "libnvidia-ml.so.1",
        "libnvidia-ml.so",
    ];
    assert_eq!(behind(&setup, &setup.client, "same", place::SHIM, &names), ["once"; 5]);
}

#[test]
fn an_image_with_its_own_libcuda_gets_the_shim() {
    let Some(setup) = room("driver-550") else { return };
    let compat = "/usr/local/cuda/compat/libcuda.so.555.58.02";
    let room = setup.room.with_file(&find(&setup.parts.join("driver-555"), "libcuda.so."), compat);
    let setup = Setup { room, ..setup };
    let owners = behind(&setup, &setup.client, "open", compat, &[HANDLED, PASSED, "cuGetProcAddress_v2"]);
    assert_eq!(owners, ["shim", "driver", "shim"]);
    // What only the newer one has would not work with the functions of the older.
    let owners = behind(&setup, &setup.client, "open", compat, &["cuStreamGetCtx_v2"]);
    assert!(owners[0].contains("undefined symbol"), "{owners:?}");
}

#[test]
fn other_libraries_keep_their_own_functions() {
    let Some(setup) = room("driver-550") else { return };
    let plugin = plugin(&setup);
    let owners = behind(&setup, &setup.client, "open", plugin.to_str().unwrap(), &[HANDLED]);
    assert_eq!(owners, ["plugin.so"], "an interposer of the application's is asked for by its handle");
    let owners = behind(&setup, &setup.client, "open", "libc.so.6", &[HANDLED, "nvmlInit_v2"]);
    assert!(owners.iter().all(|owner| owner.contains("undefined symbol")), "{owners:?}");
    let owners = behind(&setup, &setup.client, "open", "libc.so.6", &["malloc"]);
    assert_eq!(owners, ["libc.so.6"]);
}

#[test]
fn linked_programs_get_the_shim_also_without_preload() {
    let Some(setup) = room("driver-550") else { return };
    for preload in [true, false] {
        let Setup { parts, room, .. } = self::room("driver-550").unwrap();
        let room = if preload { room } else { room.without_preload() };
        // To link, the driver's own libraries under their names.
        let libraries = room.folder.path().join("link");
        fs::create_dir(&libraries).unwrap();
        for (name, file) in [("libcuda.so.1", "libcuda.so."), ("libnvidia-ml.so.1", "libnvidia-ml.so.")] {
            std::os::unix::fs::symlink(find(&parts.join("driver-550"), file), libraries.join(name)).unwrap();
        }
        let link = format!("-L{}", libraries.display());
        let flags =
            ["-DLINKED", "-Wl,--no-as-needed", &link, "-l:libcuda.so.1", "-l:libnvidia-ml.so.1", "-ldl"];
        let client = compile(room.folder.path(), "linked", &source("client.c"), &flags);
        let setup = Setup { parts, room, client };
        let owners =
            behind(&setup, &setup.client, "linked", "-", &["cuInit", HANDLED, PASSED, "nvmlInit_v2"]);
        assert_eq!(owners, ["shim"; 4]);
        let said = setup.room.try_run(&setup.client, &["call", "-", "cuInit"]);
        // The real driver was asked: CUDA_ERROR_NO_DEVICE.
        assert_eq!(String::from_utf8(said.stdout).unwrap(), "cuInit 100\n");
        assert_eq!(String::from_utf8(said.stderr).unwrap(), "");
    }
    drop(setup);
}

#[test]
fn without_preload_every_look_up_by_name_still_leads_to_the_shim() {
    let Some(setup) = room("driver-550") else { return };
    let setup = Setup { room: setup.room.without_preload(), ..setup };
    for file in ["libcuda.so.1", "libcuda.so", "/usr/local/lib/libcuda.so.550.1", "libnvidia-ml.so.1"] {
        let names = [HANDLED, PASSED, "nvmlDeviceGetMemoryInfo"];
        let owners = behind(&setup, &setup.client, "open", file, &names);
        let here = file.rsplit('/').next().unwrap();
        // Under whichever name it was loaded.
        assert!(owners.iter().all(|owner| owner == "shim" || owner == here), "{file}: {owners:?}");
    }
}

#[test]
fn proc_addresses_are_the_drivers_for_every_name_version_and_flag() {
    for driver in DRIVERS {
        let Some(setup) = room(driver) else { return };
        let mut lines = String::new();
        let mut versions: Vec<i64> = vec![-1, 0, 1000, 13_060, 20_000];
        for (symbol, since, action) in table("cuda") {
            lines += &format!("{} {symbol}\n", if is_ours(&action) { "ours" } else { "pass" });
            versions.extend(since.parse::<i64>());
            // The name that applications ask by.
            let base = symbol.trim_end_matches("_ptsz").trim_end_matches("_ptds");
            lines += &format!("pass {}\n", base.rsplit_once("_v").map_or(base, |(base, _)| base));
        }
        versions.sort_unstable();
        versions.dedup();
        for version in versions {
            lines += &format!("version {version}\n");
        }
        let list = setup.room.folder.path().join("names");
        fs::write(&list, lines).unwrap();
        let said = setup.room.run(&setup.client, &["oracle", list.to_str().unwrap()]);
        let numbers: Vec<u64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        println!("{driver}: {said}");
        assert!(numbers[0] > 100_000 && numbers[1] > 1_000, "{said}");
    }
}

/// Slots 213 to 215 of it are the lists of processes; see `src/nvml/smi.rs`.
#[test]
fn nvidia_smis_table_is_the_drivers_but_for_its_lists_of_processes() {
    for driver in DRIVERS {
        let Some(setup) = room(driver) else { return };
        let client =
            compile(setup.room.folder.path(), "internal_table", &source("internal_table.c"), &["-ldl"]);
        let said = setup.room.run(&client, &[]);
        assert_eq!(said, "same table again: 1, slots: 213 214 215\n", "{driver}");
    }
}

#[test]
fn real_runtimes_find_all_they_look_for() {
    for driver in DRIVERS {
        let Some(setup) = room(driver) else { return };
        let folder = setup.room.folder.path();
        let shared = compile(folder, "shared", &source("runtime.c"), &["-ldl"]);
        for (version, file) in
            [("11.8", "libcudart.so.11.0"), ("12.9", "libcudart.so.12"), ("13", "libcudart.so.13")]
        {
            let parts = setup.parts.join(format!("cudart-{version}"));
            let library = parts.join(file);
            let mut programs = vec![(&shared, vec![library.to_str().unwrap()])];
            let archive = parts.join("libcudart_static.a");
            let linked = archive.exists().then(|| {
                let flags = ["-DSTATIC", archive.to_str().unwrap(), "-ldl", "-lrt", "-lpthread"];
                compile(folder, &format!("static-{version}"), &source("runtime.c"), &flags)
            });
            programs.extend(linked.iter().map(|program| (program, vec![])));
            for (program, arguments) in programs {
                let bare = setup.room.bare_command(program).args(&arguments).output().unwrap();
                let shim = setup.room.try_run(program, &arguments);
                let said = String::from_utf8_lossy(&bare.stdout);
                // Without a GPU: no device (100), or, to the newest runtime, a driver that is too old (35).
                assert!(
                    said.contains("100 devices") || said.contains("35 devices"),
                    "{driver} {version}: {bare:?}"
                );
                assert_eq!(
                    (bare.status, &bare.stdout, &bare.stderr),
                    (shim.status, &shim.stdout, &shim.stderr),
                    "{driver} {version}"
                );
            }
        }
    }
}

#[test]
fn a_share_that_is_not_there_turns_cuda_off_with_one_line() {
    let Some(setup) = room("driver-550") else { return };
    let room = setup.room.without_share();
    let Setup { parts, .. } = setup;
    let link = room.folder.path().join("libcuda.so.1");
    std::os::unix::fs::symlink(find(&parts.join("driver-550"), "libcuda.so."), &link).unwrap();
    let flags =
        ["-DLINKED", "-Wno-unused", link.to_str().unwrap(), "-Wl,--unresolved-symbols=ignore-all", "-ldl"];
    let client = compile(room.folder.path(), "linked", &source("client.c"), &flags);
    let said = room.try_run(&client, &["call", "-", "cuInit", "cuInit", "cuInit"]);
    assert!(said.status.success(), "{said:?}");
    // CUDA_ERROR_SYSTEM_NOT_READY.
    assert_eq!(String::from_utf8(said.stdout).unwrap(), "cuInit 802\n".repeat(3));
    let errors = String::from_utf8(said.stderr).unwrap();
    assert_eq!(errors.lines().count(), 1, "{errors}");
    assert!(errors.contains(place::LIMITS) && errors.contains("No such file"), "{errors}");
}

#[test]
fn a_program_that_never_touches_cuda_notices_nothing() {
    if !can_mount() {
        return;
    }
    // Not even a driver is there.
    let nothing = tempfile::NamedTempFile::new().unwrap();
    let room = Room::new(nothing.path(), nothing.path(), &any_gpu()).without_share();
    let program = PathBuf::from("/bin/ls");
    let plain = Command::new(&program).arg("/bin").output().unwrap();
    let preloaded = room.try_run(&program, &["/bin"]);
    assert_eq!(
        (plain.status, plain.stdout, plain.stderr),
        (preloaded.status, preloaded.stdout, preloaded.stderr)
    );
}
