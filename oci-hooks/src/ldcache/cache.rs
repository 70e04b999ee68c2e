//! The loader's cache, `/etc/ld.so.cache`, read and written without `ldconfig`: adds libraries to what an image
//! has and keeps the rest byte for byte. The bytes come from an image, so nothing in them is believed: what the
//! loader would skip is dropped, and neither time nor size grows past a small multiple of the input's.
//!
//! Format: glibc `sysdeps/generic/dl-cache.h`; order: `elf/cache.c`; look-up: `elf/dl-cache.c`. Three kinds of file
//! are read, as the loader does: the new format (glibc 2.32 and later write it, 2.2 and later read it), the old
//! one with the new one inside, and the old one alone. The new format is written.

use std::{
    cmp::Ordering,
    ffi::{CString, c_char},
};

/// The most that is read of a cache, in bytes. A desktop's has a quarter of a megabyte.
pub const MAX_BYTES: u64 = 4 << 20;

/// `FLAG_ELF_LIBC6` with the bits of this machine's 64-bit ABI (`sysdeps/generic/ldconfig.h`): the loader takes
/// entries with exactly these flags. Driver, hook and container are of one architecture.
#[cfg(target_arch = "x86_64")]
pub const NATIVE_FLAGS: u32 = 0x0303;
/// See above.
#[cfg(target_arch = "aarch64")]
pub const NATIVE_FLAGS: u32 = 0x0a03;

const OLD_MAGIC: &[u8] = b"ld.so-1.7.0";
/// `struct cache_file`: the magic, padded to four bytes, and the number of entries.
const OLD_HEADER: usize = 16;
/// `struct file_entry`: flags, key, value.
const OLD_ENTRY: usize = 12;

const NEW_MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
/// `struct cache_file_new`: magic, entries, bytes of strings, flags, offset of extensions, three words.
const NEW_HEADER: usize = 48;
/// `struct file_entry_new`: flags, key, value, least version of Linux (until glibc 2.36), hardware capabilities
/// (8 bytes).
const NEW_ENTRY: usize = 24;
/// `ALIGN_CACHE`: where a new cache starts after the old entries.
const NEW_ALIGN: usize = 8;

/// Place of the byte that tells the byte order; 0 is not told, 2 is little endian.
const ORDER_AT: usize = 28;
const LITTLE_ENDIAN: u8 = 2;
/// Place of the extensions' offset.
const EXTENSIONS_AT: usize = 32;

/// `cache_extension_magic`, -358342284.
const EXTENSION_MAGIC: u32 = 0xeaa4_2174;
/// Header of the extensions: magic and number of sections; a section: tag, flags, offset, size.
const EXTENSION_HEADER: usize = 8;
const EXTENSION_SECTION: usize = 16;
const TAG_GENERATOR: u32 = 0;
const TAG_GLIBC_HWCAPS: u32 = 1;
/// Sections that are looked at; the format has two.
const EXTENSION_SECTIONS_MAX: usize = 16;

/// What `ldconfig -p` of glibc 2.33 and later shows below the list.
const GENERATOR: &str = concat!("vcuda-hook ", env!("CARGO_PKG_VERSION"));

/// Longest name that is looked for in a cache: no file has a longer one (`NAME_MAX`).
const KEY_MAX_BYTES: usize = 255;

/// A cache: its entries in their order, and the bytes that they point into.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cache {
    entries: Vec<Entry>,
    /// Strings, and whatever else followed the entries in the file; ends with NUL unless empty.
    strings: Vec<u8>,
    /// Places in `strings` of the names of hardware capabilities, which entries mention by their index here.
    hwcaps: Vec<u32>,
}

/// One library. `key` and `value` are places in the strings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    flags: u32,
    key: u32,
    value: u32,
    /// Least version of Linux; 0 is any.
    os: u32,
    hwcap: u64,
}

/// A library to be in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// What programs ask for, such as `libcuda.so.1`: at most 255 bytes, without NUL.
    pub name: CString,
    /// Where it is in the container.
    pub path: CString,
}

impl Cache {
    /// Reads a cache as the loader would: an entry that it cannot use is left out. `None` is a file that the
    /// loader ignores, because it is none or cut short.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.starts_with(NEW_MAGIC) {
            Self::parse_new(bytes, 0)
        } else if bytes.starts_with(OLD_MAGIC) {
            Self::parse_old(bytes)
        } else {
            None
        }
    }

    /// Paths of the libraries of this name for this machine, in the order in which the loader takes them.
    pub fn find<'a>(&'a self, name: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        self.native(name).map(|entry| self.string(entry.value))
    }

    fn parse_old(bytes: &[u8]) -> Option<Self> {
        let end = table_end(bytes, OLD_HEADER, word(bytes, OLD_HEADER - 4)?, OLD_ENTRY)?;
        let new = end.next_multiple_of(NEW_ALIGN);
        if bytes.get(new..).is_some_and(|rest| rest.len() >= NEW_HEADER && rest.starts_with(NEW_MAGIC)) {
            return Self::parse_new(bytes, new);
        }
        let strings = terminated(&bytes[end..]);
        let entries = bytes[OLD_HEADER..end].chunks_exact(OLD_ENTRY).filter_map(|entry| {
            let entry = Entry {
                flags: word(entry, 0)?,
                key: word(entry, 4)?,
                value: word(entry, 8)?,
                os: 0,
                hwcap: 0,
            };
            entry.usable(&strings)
        });
        Some(Self { entries: entries.collect(), strings, hwcaps: Vec::new() })
    }

    /// Reads the new format at `start`. Places of strings count from there, places of extensions from the start
    /// of the file.
    fn parse_new(bytes: &[u8], start: usize) -> Option<Self> {
        let new = bytes.get(start..)?;
        if !matches!(new.get(ORDER_AT)?, 0 | &LITTLE_ENDIAN) {
            return None;
        }
        let end = table_end(new, NEW_HEADER, word(new, NEW_MAGIC.len())?, NEW_ENTRY)?;
        let strings = terminated(&new[end..]);
        let shift = u32::try_from(end).ok()?;
        let entries = new[NEW_HEADER..end].chunks_exact(NEW_ENTRY).filter_map(|entry| {
            let hwcap = u64::from(word(entry, 16)?) | u64::from(word(entry, 20)?) << 32;
            let key = word(entry, 4)?.checked_sub(shift)?;
            let value = word(entry, 8)?.checked_sub(shift)?;
            Entry { flags: word(entry, 0)?, key, value, os: word(entry, 12)?, hwcap }.usable(&strings)
        });
        let entries = entries.collect();
        let shift = u32::try_from(start + end).ok()?;
        let hwcaps = hwcap_names(bytes, start)
            .unwrap_or_default()
            .iter()
            // One that cannot be read keeps its index: the end of the strings, an empty name that fits no machine.
            .map(|name| {
                let place = name.checked_sub(shift).filter(|place| (*place as usize) < strings.len());
                place.unwrap_or(u32::try_from(strings.len().saturating_sub(1)).unwrap_or(0))
            })
            .collect();
        Some(Self { entries, strings, hwcaps })
    }

    /// Whether the loader finds exactly these libraries under their names already.
    pub fn has(&self, libraries: &[Library]) -> bool {
        libraries.iter().all(|library| {
            let mut found = self.find(library.name.as_bytes());
            found.next() == Some(library.path.as_bytes()) && found.next().is_none()
        })
    }

    /// Puts `libraries` in, each in the place of all that the cache has under its name for this machine.
    pub fn add(&mut self, libraries: &[Library]) {
        for library in libraries {
            let name = library.name.as_bytes();
            let strings = &self.strings;
            self.entries
                .retain(|entry| entry.flags != NATIVE_FLAGS || !starts_string(strings, entry.key, name));

            let value = self.push_string(library.path.as_bytes());
            let key = self.push_string(name);
            // ldconfig's order: names from high to low, of equal names the higher flags first. The rest of the
            // entries stay in the order that they have, whatever it is.
            let after = |entry: &Entry| match libcmp(c_string(&self.strings, entry.key), name) {
                Ordering::Less => true,
                Ordering::Equal => entry.flags < NATIVE_FLAGS,
                Ordering::Greater => false,
            };
            let at = self.entries.iter().position(after).unwrap_or(self.entries.len());
            self.entries.insert(at, Entry { flags: NATIVE_FLAGS, key, value, os: 0, hwcap: 0 });
        }
    }

    /// The cache as a file in the new format.
    pub fn to_bytes(&self) -> Vec<u8> {
        let table = NEW_HEADER + self.entries.len() * NEW_ENTRY;
        let extensions = (table + self.strings.len()).next_multiple_of(4);
        // MAX_BYTES of input and a few libraries: far below 4 GiB.
        let shift = small(table);

        let mut bytes = Vec::with_capacity(extensions + 256);
        bytes.extend(NEW_MAGIC);
        push(&mut bytes, small(self.entries.len()));
        push(&mut bytes, small(self.strings.len()));
        push(&mut bytes, u32::from(LITTLE_ENDIAN));
        push(&mut bytes, small(extensions));
        bytes.resize(NEW_HEADER, 0);
        for entry in &self.entries {
            push(&mut bytes, entry.flags);
            push(&mut bytes, entry.key + shift);
            push(&mut bytes, entry.value + shift);
            push(&mut bytes, entry.os);
            bytes.extend(entry.hwcap.to_le_bytes());
        }
        bytes.extend(&self.strings);
        bytes.resize(extensions, 0);

        let sections: u32 = if self.hwcaps.is_empty() { 1 } else { 2 };
        let hwcaps = extensions + EXTENSION_HEADER + sections as usize * EXTENSION_SECTION;
        let generator = hwcaps + self.hwcaps.len() * 4;
        push(&mut bytes, EXTENSION_MAGIC);
        push(&mut bytes, sections);
        for (tag, at, size) in
            [(TAG_GENERATOR, generator, GENERATOR.len()), (TAG_GLIBC_HWCAPS, hwcaps, self.hwcaps.len() * 4)]
        {
            if size > 0 {
                push(&mut bytes, tag);
                push(&mut bytes, 0);
                push(&mut bytes, small(at));
                push(&mut bytes, small(size));
            }
        }
        for name in &self.hwcaps {
            push(&mut bytes, name + shift);
        }
        bytes.extend(GENERATOR.as_bytes());
        bytes
    }

    /// Entries with this name for this machine.
    fn native<'a>(&'a self, name: &'a [u8]) -> impl Iterator<Item = &'a Entry> {
        self.entries
            .iter()
            .filter(move |entry| entry.flags == NATIVE_FLAGS && starts_string(&self.strings, entry.key, name))
    }

    fn string(&self, at: u32) -> &[u8] {
        c_string(&self.strings, at)
    }

    fn push_string(&mut self, text: &[u8]) -> u32 {
        let at = small(self.strings.len());
        self.strings.extend(text);
        self.strings.push(0);
        at
    }
}

impl Entry {
    /// The entry, if both its strings exist and its name can be one.
    fn usable(self, strings: &[u8]) -> Option<Self> {
        let name = strings.get(self.key as usize..)?;
        let named = name.iter().take(KEY_MAX_BYTES + 1).any(|byte| *byte == 0);
        (named && (self.value as usize) < strings.len()).then_some(self)
    }
}

/// The places of the names of hardware capabilities in the file, or `None` where the extensions are broken; then
/// the loader uses none of the entries that need them.
fn hwcap_names(bytes: &[u8], start: usize) -> Option<Vec<u32>> {
    let directory = word(bytes, start + EXTENSIONS_AT)? as usize;
    if directory == 0 || word(bytes, directory)? != EXTENSION_MAGIC {
        return None;
    }
    let count = word(bytes, directory.checked_add(4)?)? as usize;
    for section in 0..count.min(EXTENSION_SECTIONS_MAX) {
        let section = directory.checked_add(EXTENSION_HEADER + section * EXTENSION_SECTION)?;
        if word(bytes, section)? == TAG_GLIBC_HWCAPS {
            let at = word(bytes, section.checked_add(8)?)? as usize;
            let size = word(bytes, section.checked_add(12)?)? as usize;
            let names = bytes.get(at..at.checked_add(size)?)?;
            return size
                .is_multiple_of(4)
                .then(|| names.chunks_exact(4).filter_map(|name| word(name, 0)).collect());
        }
    }
    None
}

/// Where a table of `count` entries ends; `None` if that is past the end of `bytes`.
fn table_end(bytes: &[u8], header: usize, count: u32, entry: usize) -> Option<usize> {
    let end = (count as usize).checked_mul(entry)?.checked_add(header)?;
    (end <= bytes.len()).then_some(end)
}

/// The strings with a NUL after the last one, whatever the file ends with.
fn terminated(strings: &[u8]) -> Vec<u8> {
    let mut strings = strings.to_vec();
    strings.push(0);
    strings
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at.checked_add(4)?)?.try_into().ok().map(u32::from_le_bytes)
}

fn push(bytes: &mut Vec<u8>, word: u32) {
    bytes.extend(word.to_le_bytes());
}

/// A size or place in a file of a few megabytes.
fn small(size: usize) -> u32 {
    u32::try_from(size).expect("a cache is a few megabytes")
}

/// Whether the string at `at` is `text`.
fn starts_string(strings: &[u8], at: u32, text: &[u8]) -> bool {
    let rest = strings.get(at as usize..).unwrap_or_default();
    rest.get(text.len()) == Some(&0) && rest.starts_with(text)
}

fn c_string(strings: &[u8], at: u32) -> &[u8] {
    let rest = strings.get(at as usize..).unwrap_or_default();
    rest.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// `_dl_cache_libcmp`: characters by their value, runs of digits by their number, so that `x.so.10` is above
/// `x.so.9`. As in C, a long number wraps and a character may be signed.
fn libcmp(left: &[u8], right: &[u8]) -> Ordering {
    let (mut left, mut right) = (left, right);
    loop {
        match (left.first().copied(), right.first().copied()) {
            (None, None) => return Ordering::Equal,
            (l, r) if l.is_some_and(|c| c.is_ascii_digit()) && r.is_some_and(|c| c.is_ascii_digit()) => {
                let difference = number(&mut left).wrapping_sub(number(&mut right));
                if difference != 0 {
                    return difference.cmp(&0);
                }
            }
            (Some(l), _) if l.is_ascii_digit() => return Ordering::Greater,
            // At the end of the left one C compares no digits any more, only the two bytes.
            (Some(_), Some(r)) if r.is_ascii_digit() => return Ordering::Less,
            (l, r) if l == r => (left, right) = (&left[1..], &right[1..]),
            (l, r) => return character(l).cmp(&character(r)),
        }
    }
}

/// Takes a run of digits off `text`.
fn number(text: &mut &[u8]) -> i32 {
    let digits = text.iter().take_while(|c| c.is_ascii_digit()).count();
    let (run, rest) = text.split_at(digits);
    *text = rest;
    run.iter().fold(0_i32, |value, c| value.wrapping_mul(10).wrapping_add(i32::from(c - b'0')))
}

fn character(c: Option<u8>) -> c_char {
    c_char::from_ne_bytes([c.unwrap_or(0)])
}

#[cfg(test)]
mod tests;
