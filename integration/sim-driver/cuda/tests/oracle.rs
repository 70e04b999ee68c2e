//! The simulated `cuGetProcAddress` against the real driver's, which answers without a GPU too: every exported name
//! and every base name, at every version that brought an ABI and just below, with all flags.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{CString, c_char, c_void},
    fs,
    path::{Path, PathBuf},
};

type Old = unsafe extern "C" fn(*const c_char, *mut *const c_void, i32, u64) -> i32;
type New = unsafe extern "C" fn(*const c_char, *mut *const c_void, i32, u64, *mut i32) -> i32;

/// A libcuda, and the names of its entries by address: some have several.
struct Library {
    old: Old,
    new: New,
    names: BTreeMap<usize, BTreeSet<String>>,
}

impl Library {
    fn open(path: &Path, symbols: &[String]) -> Self {
        let c_path = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: loads a library whose constructors may run anywhere.
        let handle = unsafe { libc::dlopen(c_path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "{} does not load", path.display());
        let find = |name: &str| {
            let name = CString::new(name).unwrap();
            // SAFETY: an open handle and a C string.
            unsafe { libc::dlsym(handle, name.as_ptr()) }
        };
        let mut names: BTreeMap<usize, BTreeSet<String>> = BTreeMap::new();
        for symbol in symbols {
            let at = find(symbol);
            assert!(!at.is_null(), "{} lacks {symbol}", path.display());
            names.entry(at as usize).or_default().insert(symbol.clone());
        }
        // SAFETY: the entries have these types (cuda.h, 11.3 and 12.0).
        unsafe {
            Self {
                old: std::mem::transmute::<*mut c_void, Old>(find("cuGetProcAddress")),
                new: std::mem::transmute::<*mut c_void, New>(find("cuGetProcAddress_v2")),
                names,
            }
        }
    }

    /// What the two forms answer: status code, query result, and the entry's names; -1 and "untouched" where they
    /// wrote nothing.
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

fn built() -> PathBuf {
    // target/<profile>/deps/<this test>: cargo builds the library beside its tests.
    std::env::current_exe().unwrap().with_file_name("libsim_cuda.so")
}

fn real() -> Option<PathBuf> {
    let home = |path: &str| std::env::var_os("HOME").map(|home| Path::new(&home).join(path));
    let cache = std::env::var_os("VCUDA_CACHE").map(PathBuf::from).or_else(|| {
        std::env::var_os("XDG_CACHE_HOME")
            .map(|cache| Path::new(&cache).join("vcuda"))
            .or_else(|| home(".cache/vcuda"))
    })?;
    let files = fs::read_dir(cache.join("real/driver-550")).ok()?;
    files.flatten().map(|file| file.path()).find(|path| path.to_string_lossy().contains("/libcuda.so."))
}

#[test]
fn proc_addresses_are_the_real_driver_s() {
    let Some(real) = real() else {
        eprintln!("skipped: the real driver 550 is not in the cache; vcuda-preload/tests/fetch.sh brings it");
        return;
    };
    let table = include_str!("../symbols.tsv");
    let rows: Vec<Vec<&str>> =
        table.lines().filter(|line| !line.starts_with('#')).map(|line| line.split('\t').collect()).collect();
    let symbols: Vec<String> = rows.iter().map(|row| row[0].to_owned()).collect();
    let (simulated, real) = (Library::open(&built(), &symbols), Library::open(&real, &symbols));

    let mut names: BTreeSet<String> = symbols.iter().cloned().collect();
    for symbol in &symbols {
        let plain = symbol.trim_end_matches("_ptsz").trim_end_matches("_ptds");
        names
            .insert(plain.trim_end_matches("_v2").trim_end_matches("_v3").trim_end_matches("_v4").to_owned());
    }
    names.extend(["", "cuNoSuchThing", "malloc"].map(str::to_owned));
    let mut versions: BTreeSet<i32> = BTreeSet::from([0, 6999, 7000, 12_040, 12_041, 13_050, i32::MAX]);
    for version in rows.iter().filter_map(|row| row[1].parse::<i32>().ok()) {
        versions.extend([version - 1, version]);
    }
    let (mut asked, mut wrong) = (0, Vec::new());
    for name in &names {
        for version in &versions {
            for flags in [0, 1, 2, 3, 4, 8] {
                asked += 1;
                let (ours, theirs) = (simulated.ask(name, *version, flags), real.ask(name, *version, flags));
                for (ours, theirs) in ours.iter().zip(&theirs) {
                    let same_entry = ours.2 == theirs.2 || !ours.2.is_disjoint(&theirs.2);
                    if ours.0 != theirs.0 || ours.1 != theirs.1 || !same_entry {
                        wrong.push(format!("{name}@{version}/{flags}: {ours:?}, the real one {theirs:?}"));
                    }
                }
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {asked} differ:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(40)].join("\n")
    );
    println!("{asked} questions answered as the real driver does");
}
