//! `/etc/ld.so.cache` in all its formats: which file the loader takes for a library's name. The file comes from
//! an image, so it is read as it would be from an enemy: bounded, and every offset checked.
//!
//! Format: glibc, `sysdeps/generic/dl-cache.h`. It knows nothing of files or roots.

/// Bytes of the largest cache that is read; a desktop's has 200 KiB.
pub const MAX_BYTES: u64 = 16 << 20;

const OLD_MAGIC: &[u8] = b"ld.so-1.7.0";
const NEW_MAGIC: &[u8] = b"glibc-ld.so.cache1.1";

/// Old header: magic, a byte of padding, the number of entries.
const OLD_HEADER: usize = 16;
/// Old entry: flags, key, value.
const OLD_ENTRY: usize = 12;
/// New header: magic and version, entries, bytes of strings, flags, extensions, reserved words.
const NEW_HEADER: usize = 48;
/// New entry: flags, key, value, OS version, hardware capabilities.
const NEW_ENTRY: usize = 24;

/// Alignment of a new cache that follows an old one.
const NEW_ALIGNMENT: usize = 8;

/// Byte of the new header that tells the byte order: 0 not told, 2 little endian, 3 big endian.
const FLAGS_AT: usize = 28;

/// `FLAG_ELF_LIBC6` with the bits of the architecture, `sysdeps/generic/ldconfig.h`.
const FLAGS_X86_64: u32 = 0x0303;
const FLAGS_AARCH64: u32 = 0x0a03;

/// One library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Kind of library and architecture, as `ldconfig` writes them.
    pub flags: u32,
    /// Name, such as `libcuda.so.1`.
    pub name: String,
    /// Path.
    pub path: String,
}

impl Entry {
    /// Whether the loader of programs for this machine (`e_machine`, 64 bit) would take it.
    pub fn fits(&self, machine: u16) -> bool {
        use goblin::elf::header::{EM_AARCH64, EM_X86_64};
        match machine {
            EM_X86_64 => self.flags == FLAGS_X86_64,
            EM_AARCH64 => self.flags == FLAGS_AARCH64,
            _ => false,
        }
    }
}

/// Reads the cache in `bytes`, in its own order.
///
/// # Errors
/// What is wrong with it; the loader ignores such a cache or worse.
pub fn parse(bytes: &[u8]) -> Result<Vec<Entry>, &'static str> {
    if bytes.starts_with(NEW_MAGIC) {
        return parse_new(bytes);
    }
    if !bytes.starts_with(OLD_MAGIC) {
        return Err("it is no cache of a format known");
    }
    let count = word(bytes, OLD_MAGIC.len() + 1, true)? as usize;
    let strings = OLD_HEADER
        + count.checked_mul(OLD_ENTRY).ok_or("it says that it has more entries than it can have")?;
    let strings_of_old = bytes.get(strings..).ok_or("it ends before its entries do")?;
    // A cache for both kinds of loaders: the new one follows the old entries, and its strings serve both.
    let aligned = strings.next_multiple_of(NEW_ALIGNMENT);
    if let Some(new) = bytes.get(aligned..).filter(|rest| rest.starts_with(NEW_MAGIC)) {
        return parse_new(new);
    }
    entries(bytes, OLD_HEADER, count, OLD_ENTRY, strings_of_old, true)
}

fn parse_new(bytes: &[u8]) -> Result<Vec<Entry>, &'static str> {
    let little = bytes.get(FLAGS_AT).is_none_or(|flags| flags & 3 != 3);
    let count = word(bytes, NEW_MAGIC.len(), little)? as usize;
    entries(bytes, NEW_HEADER, count, NEW_ENTRY, bytes, little)
}

fn entries(
    bytes: &[u8],
    start: usize,
    count: usize,
    each: usize,
    strings: &[u8],
    little: bool,
) -> Result<Vec<Entry>, &'static str> {
    let end = count.checked_mul(each).and_then(|size| size.checked_add(start));
    let table = end.and_then(|end| bytes.get(start..end)).ok_or("it ends before its entries do")?;
    // Entries may share a string of any length: what they hold together is bounded too.
    let mut text = MAX_BYTES;
    table
        .chunks_exact(each)
        .map(|entry| {
            let [name, path] = [4, 8].map(|at| string(strings, word(entry, at, little)?));
            let (name, path) = (name?, path?);
            text = text
                .checked_sub((name.len() + path.len()) as u64)
                .ok_or("its names are longer than the whole file")?;
            Ok(Entry { flags: word(entry, 0, little)?, name, path })
        })
        .collect()
}

fn string(strings: &[u8], at: u32) -> Result<String, &'static str> {
    let rest = strings.get(at as usize..).ok_or("a name in it lies outside of it")?;
    let end = memchr::memchr(0, rest).ok_or("a name in it has no end")?;
    Ok(String::from_utf8_lossy(&rest[..end]).into_owned())
}

fn word(bytes: &[u8], at: usize, little: bool) -> Result<u32, &'static str> {
    let word = bytes.get(at..at + 4).and_then(|word| word.try_into().ok()).ok_or("it is cut off")?;
    Ok(if little { u32::from_le_bytes(word) } else { u32::from_be_bytes(word) })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const X86_64: u16 = goblin::elf::header::EM_X86_64;

    fn new_format(libraries: &[(u32, &str, &str)]) -> Vec<u8> {
        let mut bytes = NEW_MAGIC.to_vec();
        bytes.extend(u32::try_from(libraries.len()).unwrap().to_le_bytes());
        bytes.resize(NEW_HEADER, 0);
        let mut strings = Vec::new();
        let base = NEW_HEADER + libraries.len() * NEW_ENTRY;
        for (flags, name, path) in libraries {
            bytes.extend(flags.to_le_bytes());
            for text in [name, path] {
                bytes.extend(u32::try_from(base + strings.len()).unwrap().to_le_bytes());
                strings.extend(text.bytes().chain([0]));
            }
            bytes.extend([0; 12]);
        }
        bytes.extend(strings);
        bytes
    }

    fn old_format(libraries: &[(u32, &str, &str)]) -> Vec<u8> {
        let mut bytes = [OLD_MAGIC, &[0]].concat();
        bytes.extend(u32::try_from(libraries.len()).unwrap().to_le_bytes());
        let mut strings = Vec::new();
        for (flags, name, path) in libraries {
            bytes.extend(flags.to_le_bytes());
            for text in [name, path] {
                bytes.extend(u32::try_from(strings.len()).unwrap().to_le_bytes());
                strings.extend(text.bytes().chain([0]));
            }
        }
        bytes.extend(strings);
        bytes
    }

    const CUDA: (u32, &str, &str) = (FLAGS_X86_64, "libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.1");
    const OTHER: (u32, &str, &str) = (3, "libcuda.so.1", "/usr/lib32/libcuda.so.1");

    #[test]
    fn all_three_formats_tell_the_same() {
        let libraries = [OTHER, CUDA];
        let mut both = old_format(&libraries[..1]);
        both.truncate(OLD_HEADER + OLD_ENTRY);
        both.resize(both.len().next_multiple_of(NEW_ALIGNMENT), 0);
        both.extend(new_format(&libraries));
        for bytes in [new_format(&libraries), old_format(&libraries), both] {
            let entries = parse(&bytes).unwrap();
            assert_eq!(entries.len(), 2);
            let fitting: Vec<_> = entries.iter().filter(|entry| entry.fits(X86_64)).collect();
            assert_eq!((fitting.len(), fitting[0].path.as_str()), (1, CUDA.2));
        }
    }

    #[test]
    fn a_cache_that_lies_is_refused() {
        let honest = new_format(&[CUDA]);
        for (at, lie) in
            [(20, u32::MAX), (20, 1 << 20), (NEW_HEADER + 4, u32::MAX), (NEW_HEADER + 8, 1 << 20)]
        {
            let mut lying = honest.clone();
            lying[at..at + 4].copy_from_slice(&lie.to_le_bytes());
            assert!(parse(&lying).is_err(), "{lie} at {at}");
        }
        for cut in 0..honest.len() {
            assert!(parse(&honest[..cut]).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn names_that_overlap_do_not_multiply() {
        let long = "x".repeat(1 << 20);
        let mut bytes = new_format(&[(FLAGS_X86_64, &long, &long)]);
        let entry = bytes[NEW_HEADER..NEW_HEADER + NEW_ENTRY].to_vec();
        let count = 1_000_u32;
        for _ in 1..count {
            bytes.splice(NEW_HEADER..NEW_HEADER, entry.iter().copied());
        }
        bytes[20..24].copy_from_slice(&count.to_le_bytes());
        assert!(parse(&bytes).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(tail in proptest::collection::vec(any::<u8>(), 0..400), old: bool) {
            let _ = parse(&[if old { OLD_MAGIC } else { NEW_MAGIC }, &tail].concat());
        }

        #[test]
        fn a_changed_cache_is_parsed_or_refused(at in 0..200_usize, value: u8, old: bool) {
            let mut bytes = if old { old_format(&[CUDA, OTHER]) } else { new_format(&[CUDA, OTHER]) };
            let at = at % bytes.len();
            bytes[at] = value;
            let _ = parse(&bytes);
        }
    }
}
