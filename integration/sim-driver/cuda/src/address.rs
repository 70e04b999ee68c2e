//! `cuGetProcAddress` in both forms: the answers of the real driver, as seen on 535, 550 and 555. Base names only; the newest
//! ABI that is not newer than asked, the version read as an unsigned number; flags 0 to 3.

use std::{
    ffi::{c_int, c_void},
    fs::File,
    io::Write,
    path::PathBuf,
    sync::OnceLock,
};

use crate::{
    driver,
    ffi::{Error, INVALID_VALUE, NOT_FOUND, Out, Text, api},
    symbols::{NAMES, Variant},
};

/// `CUdriverProcAddressQueryResult`.
const FOUND: c_int = 0;
const UNKNOWN: Error = Error(1);
const TOO_OLD: Error = Error(2);

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD_DEFAULT: u64 = 2;

/// The highest flags that are accepted.
const LAST_FLAGS: u64 = 3;

impl Variant {
    /// Whether a driver of this branch and CUDA version has it.
    fn there(&self, (branch, cuda): (u32, i32)) -> bool {
        match branch {
            ..550 => self.seen[0],
            550..555 => self.seen[1],
            555..560 => self.seen[2],
            _ => self.seen[2] || u32::try_from(cuda).is_ok_and(|cuda| self.since <= cuda),
        }
    }
}

fn find(name: &[u8], version: c_int, flags: u64) -> Result<&'static Variant, Error> {
    let at = NAMES.binary_search_by(|(known, _)| known.as_bytes().cmp(name)).map_err(|_| UNKNOWN)?;
    let of_driver = driver::version();
    let there = || NAMES[at].1.iter().filter(|variant| variant.there(of_driver));
    if there().next().is_none() {
        return Err(UNKNOWN);
    }
    // A name that has entries for per-thread default streams has nothing else for who asks for them.
    let per_thread = flags & PER_THREAD_DEFAULT != 0 && there().any(|variant| variant.per_thread);
    let fits =
        |variant: &&Variant| variant.per_thread == per_thread && variant.since <= version.cast_unsigned();
    there().filter(fits).max_by_key(|variant| variant.since).ok_or(TOO_OLD)
}

/// Names a file that is told what programs ask for, for tests: what, with which answer.
const TRACE: &str = "VCUDA_SIM_TRACE";

/// Tells that file a line.
pub(crate) fn trace(line: impl FnOnce() -> String) {
    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let Some(path) = FILE.get_or_init(|| std::env::var_os(TRACE).map(PathBuf::from)) else { return };
    if let Ok(mut file) = File::options().append(true).create(true).open(path) {
        let _ = writeln!(file, "{}", line());
    }
}

fn traced(name: &[u8], version: c_int, flags: u64, code: c_int) {
    trace(|| format!("address\t{}\t{version}\t{flags}\t{code}", String::from_utf8_lossy(name)));
}

fn entry(found: &Variant) -> *const c_void {
    found.entry.cast()
}

api! {
    fn cuGetProcAddress(name: Text, to: Out<*const c_void>, version: c_int, flags: u64) {
        let name = name.bytes()?;
        if to.is_null() || flags > LAST_FLAGS {
            return Err(INVALID_VALUE);
        }
        let found = find(name, version, flags);
        traced(name, version, flags, found.as_ref().err().map_or(FOUND, |why| why.0));
        to.put(entry(found.map_err(|_| NOT_FOUND)?))
    }

    fn cuGetProcAddress_v2(name: Text, to: Out<*const c_void>, version: c_int, flags: u64, result: Out<c_int>) {
        let name = name.bytes()?;
        if to.is_null() || flags > LAST_FLAGS {
            return Err(INVALID_VALUE);
        }
        let found = find(name, version, flags);
        traced(name, version, flags, found.as_ref().err().map_or(FOUND, |why| why.0));
        match found {
            Ok(found) => {
                result.put_if_wanted(FOUND);
                to.put(entry(found))
            }
            Err(why) => {
                result.put_if_wanted(why.0);
                to.put(std::ptr::null())
            }
        }
    }
}
