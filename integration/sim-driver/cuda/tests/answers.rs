//! What the library answers about itself is what real drivers answer: exported names and proc addresses of 535, 550 and 555,
//! which load without a GPU, and all that real CUDA runtimes ask for. The real parts are in the tests' cache, from
//! `vcuda-preload/tests/fetch.sh`; a comparison without its real part is skipped, and says so.

#![expect(clippy::unwrap_used, reason = "a test")]

mod common;

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{CString, c_char, c_void},
    path::Path,
    process::Command,
};

use common::{Driver, real};
use sim_gpud::exports;

const DRIVERS: [(&str, &str); 3] = [("535", "535.261.03"), ("550", "550.163.01"), ("555", "555.58.02")];

type Old = unsafe extern "C" fn(*const c_char, *mut *const c_void, i32, u64) -> i32;
type New = unsafe extern "C" fn(*const c_char, *mut *const c_void, i32, u64, *mut i32) -> i32;

fn simulated(version: &str) -> Driver {
    Driver::start(&format!("version: 1\ndriver: {version}\ngpus: [{{}}]"))
}

fn symbols() -> Vec<&'static str> {
    let table = include_str!("../symbols.tsv");
    table.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split('\t').next()).collect()
}

/// A libcuda, and the names of its entries by address: some have several.
struct Library {
    old: Old,
    new: New,
    exports: BTreeSet<String>,
    names: BTreeMap<usize, BTreeSet<String>>,
}

impl Library {
    fn open(path: &Path) -> Self {
        let c_path = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: loads a library whose constructors may run anywhere.
        let handle = unsafe { libc::dlopen(c_path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "{} does not load", path.display());
        let find = |name: &str| {
            let name = CString::new(name).unwrap();
            // SAFETY: an open handle and a C string.
            unsafe { libc::dlsym(handle, name.as_ptr()) }
        };
        let exports = exports::of(&std::fs::read(path).unwrap()).unwrap();
        let mut names: BTreeMap<usize, BTreeSet<String>> = BTreeMap::new();
        for symbol in &exports {
            names.entry(find(symbol) as usize).or_default().insert(symbol.clone());
        }
        // SAFETY: the entries have these types (cuda.h, 11.3 and 12.0).
        unsafe {
            Self {
                old: std::mem::transmute::<*mut c_void, Old>(find("cuGetProcAddress")),
                new: std::mem::transmute::<*mut c_void, New>(find("cuGetProcAddress_v2")),
                exports,
                names,
            }
        }
    }

    /// What the two forms answer: status code, query result, and the entry's names; −1 and "untouched" where they wrote
    /// nothing.
    fn ask(&self, name: &str, version: i32, flags: u64) -> [(i32, i32, BTreeSet<String>); 2] {
        let name = CString::new(name).unwrap();
        let untouched = std::ptr::without_provenance::<c_void>(1);
        let named = |entry: *const c_void| {
            if entry == untouched {
                return BTreeSet::from(["untouched".to_owned()]);
            }
            self.names.get(&(entry as usize)).cloned().unwrap_or_default()
        };
        let (mut entry, mut result) = (untouched, -1);
        // SAFETY: all pointers are valid.
        let code = unsafe { (self.new)(name.as_ptr(), &raw mut entry, version, flags, &raw mut result) };
        let new = (code, result, named(entry));
        entry = untouched;
        // SAFETY: as above.
        let code = unsafe { (self.old)(name.as_ptr(), &raw mut entry, version, flags) };
        [new, (code, -1, named(entry))]
    }
}

fn base(symbol: &str) -> &str {
    let plain = symbol.trim_end_matches("_ptsz").trim_end_matches("_ptds");
    ["_v2", "_v3", "_v4"].iter().find_map(|version| plain.strip_suffix(version)).unwrap_or(plain)
}

fn questions() -> (BTreeSet<&'static str>, BTreeSet<i32>) {
    let mut names: BTreeSet<&str> = symbols().into_iter().flat_map(|symbol| [symbol, base(symbol)]).collect();
    names.extend(["", "cuNoSuchThing", "malloc"]);
    let mut versions = BTreeSet::from([-1, 0, 6999, 7000, 20_000, i32::MAX, i32::MIN]);
    for line in include_str!("../symbols.tsv").lines() {
        if let Some(Ok(since)) = line.split('\t').nth(1).map(str::parse::<i32>) {
            versions.extend([since - 1, since]);
        }
    }
    (names, versions)
}

#[test]
fn exports_and_proc_addresses_are_those_of_the_real_drivers() {
    let (names, versions) = questions();
    for (branch, version) in DRIVERS {
        let Some(real) = real(&format!("driver-{branch}"), "libcuda.so.") else {
            eprintln!(
                "skipped: the real driver {branch} is not in the cache; vcuda-preload/tests/fetch.sh brings it"
            );
            continue;
        };
        let driver = simulated(version);
        let (simulated, real) = (Library::open(driver.library()), Library::open(&real));
        assert_eq!(simulated.exports, real.exports, "exports of {version}");
        let (mut asked, mut wrong) = (0, Vec::new());
        for name in &names {
            for version in &versions {
                for flags in [0, 1, 2, 3, 4, 8, u64::MAX] {
                    asked += 1;
                    let (ours, theirs) =
                        (simulated.ask(name, *version, flags), real.ask(name, *version, flags));
                    for (ours, theirs) in ours.iter().zip(&theirs) {
                        let same_entry = ours.2 == theirs.2 || !ours.2.is_disjoint(&theirs.2);
                        if ours.0 != theirs.0 || ours.1 != theirs.1 || !same_entry {
                            wrong
                                .push(format!("{name}@{version}/{flags}: {ours:?}, the real one {theirs:?}"));
                        }
                    }
                }
            }
        }
        assert!(
            wrong.is_empty(),
            "{version}: {} of {asked} differ:\n{}",
            wrong.len(),
            wrong[..wrong.len().min(40)].join("\n")
        );
        println!("{version}: {asked} questions answered as the real driver does");
    }
}

/// Answers that need no GPU.
const CODES: [i32; 12] = [0, 1, 2, 100, 402, 500, 709, 801, 913, 916, 999, 12_345];

#[test]
fn error_texts_are_those_of_the_real_driver() {
    type Describe = unsafe extern "C" fn(i32, *mut *const c_char) -> i32;
    let Some(real) = real("driver-555", "libcuda.so.") else {
        eprintln!("skipped: the real driver 555 is not in the cache; vcuda-preload/tests/fetch.sh brings it");
        return;
    };
    let driver = simulated("555.58.02");
    let describe = |library: &Library, function: &str, code: i32| {
        let at = library.names.iter().find(|(_, names)| names.contains(function)).unwrap().0;
        let mut text = std::ptr::null();
        // SAFETY: the function's declaration in cuda.h; the text is a constant of the library's.
        unsafe {
            let ask = std::mem::transmute::<usize, Describe>(*at);
            let status = ask(code, &raw mut text);
            (status, (!text.is_null()).then(|| std::ffi::CStr::from_ptr(text).to_owned()))
        }
    };
    let (simulated, real) = (Library::open(driver.library()), Library::open(&real));
    for code in CODES {
        for function in ["cuGetErrorName", "cuGetErrorString"] {
            assert_eq!(
                describe(&simulated, function, code),
                describe(&real, function, code),
                "{function} {code}"
            );
        }
    }
}

/// Lets a real runtime count the devices. What it asked the driver for, with the answers; and what it said in the end.
fn runtime(driver: &Driver, runtime: &Path) -> (Vec<Vec<String>>, String) {
    let trace = driver.root().join("trace");
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "plays_a_runtime", "--nocapture"])
        .env("SIM_TEST_RUNTIME", runtime)
        .env("VCUDA_SIM_TRACE", &trace)
        .env("LD_LIBRARY_PATH", driver.library().parent().unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let trace = std::fs::read_to_string(trace).unwrap();
    let lines = trace.lines().map(|line| line.split('\t').map(str::to_owned).collect()).collect();
    (lines, String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn plays_a_runtime() {
    let Some(path) = std::env::var_os("SIM_TEST_RUNTIME") else { return };
    let path = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: loads a real CUDA runtime and calls a function of it as cuda_runtime_api.h declares it.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        assert!(!handle.is_null());
        let count = libc::dlsym(handle, c"cudaGetDeviceCount".as_ptr());
        let count = std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut i32) -> i32>(count);
        let mut devices = 0;
        println!("the runtime says {}", count(&raw mut devices));
    }
}

#[test]
fn real_runtimes_find_all_they_look_up_and_stop_where_they_ask_for_the_vendor_s_tables() {
    for (folder, driver, lookups) in [
        ("cudart-11.8", "driver: 550.163.01", 380),
        ("cudart-12.9", "{driver: 575.57.08, cuda: 12090}", 415),
        ("cudart-13", "{driver: 620.10, cuda: 13090}", 470),
    ] {
        let Some(path) = real(folder, "libcudart.so") else {
            eprintln!("skipped: {folder} is not in the cache; vcuda-preload/tests/fetch.sh brings it");
            continue;
        };
        let driver = driver.trim_matches(['{', '}']).replace(", ", "\n");
        let driver = Driver::start(&format!("version: 1\n{driver}\ngpus: [{{}}]"));
        let (asked, said) = runtime(&driver, &path);
        let addresses: Vec<_> = asked.iter().filter(|line| line[0] == "address").collect();
        assert!(addresses.len() >= lookups, "{folder} looked only {} names up", addresses.len());
        // One lookup has no name.
        let missing: Vec<_> = addresses.iter().filter(|line| line[4] != "0" && !line[1].is_empty()).collect();
        assert!(missing.is_empty(), "{folder}: {missing:?}");
        assert!(asked.iter().any(|line| line[0] == "table"), "{folder}: {said}");
        println!("{folder}: {} lookups answered", addresses.len());
    }
}
