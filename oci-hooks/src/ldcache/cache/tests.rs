use proptest::prelude::*;

use super::*;

/// An entry as `ldconfig` would have it, for files of the tests' own making.
type Row<'a> = (u32, &'a str, &'a str, u64);

const I386: u32 = 0x0003;
const X32: u32 = 0x0803;
const HWCAP: u64 = 1 << 62;

fn new_format(rows: &[Row], hwcaps: &[&str]) -> Vec<u8> {
    let mut cache = Cache::default();
    for (flags, name, path, hwcap) in rows {
        let value = cache.push_string(path.as_bytes());
        let key = cache.push_string(name.as_bytes());
        cache.entries.push(Entry { flags: *flags, key, value, os: 0, hwcap: *hwcap });
    }
    cache.hwcaps = hwcaps.iter().map(|name| cache.push_string(name.as_bytes())).collect();
    cache.to_bytes()
}

fn old_format(rows: &[Row]) -> Vec<u8> {
    let mut bytes = [OLD_MAGIC, &[0]].concat();
    push(&mut bytes, small(rows.len()));
    let mut strings = Vec::new();
    for (flags, name, path, _) in rows {
        push(&mut bytes, *flags);
        for text in [name, path] {
            push(&mut bytes, small(strings.len()));
            strings.extend(text.bytes().chain([0]));
        }
    }
    bytes.extend(strings);
    bytes
}

/// Old entries, then the whole new cache, as `ldconfig` before 2.32 writes it. Places in extensions count from the
/// start of the file, all others from the new header.
fn combined_format(rows: &[Row], hwcaps: &[&str]) -> Vec<u8> {
    let mut bytes = old_format(rows);
    bytes.truncate(OLD_HEADER + rows.len() * OLD_ENTRY);
    bytes.resize(bytes.len().next_multiple_of(NEW_ALIGN), 0);
    let start = bytes.len();
    let new = new_format(rows, hwcaps);
    let shifted = |at: usize| word(&new, at).unwrap() + small(start);
    let directory = word(&new, EXTENSIONS_AT).unwrap() as usize;
    let sections = word(&new, directory + 4).unwrap() as usize;
    let mut patches = vec![(EXTENSIONS_AT, shifted(EXTENSIONS_AT))];
    for section in 0..sections {
        let at = directory + EXTENSION_HEADER + section * EXTENSION_SECTION + 8;
        patches.push((at, shifted(at)));
    }
    let names = directory + EXTENSION_HEADER + sections * EXTENSION_SECTION;
    patches.extend((0..hwcaps.len()).map(|name| (names + name * 4, shifted(names + name * 4))));
    bytes.extend(&new);
    for (at, value) in patches {
        bytes[start + at..start + at + 4].copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

fn read(bytes: &[u8]) -> Cache {
    Cache::parse(bytes).unwrap_or_default()
}

fn rows(cache: &Cache) -> Vec<(u32, String, String, u64)> {
    let text = |at| String::from_utf8(cache.string(at).to_vec()).unwrap();
    cache.entries.iter().map(|entry| (entry.flags, text(entry.key), text(entry.value), entry.hwcap)).collect()
}

fn library(path: &str) -> Library {
    let name = path.rsplit('/').next().unwrap();
    Library { name: CString::new(name).unwrap(), path: CString::new(path).unwrap() }
}

/// The loader's own search (`search_cache`, elf/dl-cache.c), without hardware capabilities.
fn search(cache: &Cache, name: &str) -> Option<String> {
    let key = |at: usize| cache.string(cache.entries[at].key);
    let (mut left, mut right) = (0_isize, cache.entries.len().cast_signed() - 1);
    while left <= right {
        let middle = (left + right) / 2;
        match libcmp(name.as_bytes(), key(middle.cast_unsigned())) {
            Ordering::Less => left = middle + 1,
            Ordering::Greater => right = middle - 1,
            Ordering::Equal => {
                let mut at = middle.cast_unsigned();
                while at > 0 && libcmp(name.as_bytes(), key(at - 1)).is_eq() {
                    at -= 1;
                }
                return cache.entries[at..]
                    .iter()
                    .take_while(|entry| libcmp(name.as_bytes(), cache.string(entry.key)).is_eq())
                    .find(|entry| entry.flags == NATIVE_FLAGS && entry.hwcap == 0)
                    .map(|entry| String::from_utf8(cache.string(entry.value).to_vec()).unwrap());
            }
        }
    }
    None
}

const SOME: [Row; 4] = [
    (NATIVE_FLAGS, "libz.so.1", "/usr/lib/libz.so.1", 0),
    (NATIVE_FLAGS, "libfoo.so.10", "/opt/v3/libfoo.so.10", HWCAP | 1),
    (NATIVE_FLAGS, "libfoo.so.10", "/opt/libfoo.so.10", 0),
    (I386, "libc.so.6", "/lib32/libc.so.6", 0),
];

#[test]
fn all_three_formats_are_read_alike() {
    let expected: Vec<_> = SOME
        .iter()
        .map(|(flags, name, path, hwcap)| (*flags, (*name).to_owned(), (*path).to_owned(), *hwcap))
        .collect();
    let caps = ["x86-64-v2", "x86-64-v3"];
    for bytes in [new_format(&SOME, &caps), combined_format(&SOME, &caps)] {
        let cache = read(&bytes);
        assert_eq!(rows(&cache), expected);
        let names: Vec<_> = cache.hwcaps.iter().map(|name| cache.string(*name)).collect();
        assert_eq!(names, caps.map(str::as_bytes));
    }
    // The old one alone knows no hardware capabilities.
    let plain = read(&old_format(&SOME));
    assert_eq!(
        rows(&plain).iter().map(|row| &row.1).collect::<Vec<_>>(),
        expected.iter().map(|row| &row.1).collect::<Vec<_>>()
    );
    assert!(plain.entries.iter().all(|entry| entry.hwcap == 0));
}

#[test]
fn what_was_there_stays_and_what_is_added_is_found() {
    let mut cache = read(&new_format(&SOME, &["x86-64-v2", "x86-64-v3"]));
    let before = rows(&cache);
    let added = ["/d/libcuda.so.1", "/d/libnvidia-ml.so.1", "/d/libzz.so", "/d/liba.so.3"].map(library);
    cache.add(&added);
    let cache = read(&cache.to_bytes());
    assert!(cache.has(&added));
    for library in &added {
        let name = library.name.to_str().unwrap();
        assert_eq!(search(&cache, name).unwrap(), library.path.to_str().unwrap());
    }
    assert_eq!(search(&cache, "libfoo.so.10").unwrap(), "/opt/libfoo.so.10");
    let kept: Vec<_> = rows(&cache).into_iter().filter(|row| !row.2.starts_with("/d/")).collect();
    assert_eq!(kept, before);
    let names: Vec<_> = cache.hwcaps.iter().map(|name| cache.string(*name)).collect();
    assert_eq!(names, ["x86-64-v2".as_bytes(), b"x86-64-v3"]);
}

// libnvidia-container#266: images bring driver libraries of another version, and the loader took those.
#[test]
fn the_drivers_libraries_replace_the_images_own_for_this_machine_only() {
    let image = [
        (X32, "libcuda.so.1", "/libx32/libcuda.so.1", 0),
        (NATIVE_FLAGS, "libcuda.so.1", "/image/v3/libcuda.so.1", HWCAP),
        (NATIVE_FLAGS, "libcuda.so.1", "/image/libcuda.so.1", 0),
        (NATIVE_FLAGS, "libcuda.so.1", "/usr/local/cuda/compat/libcuda.so.1", 0),
        (I386, "libcuda.so.1", "/lib32/libcuda.so.1", 0),
    ];
    let mut cache = read(&new_format(&image, &["x86-64-v3"]));
    let ours = [library("/d/libcuda.so.1")];
    assert!(!cache.has(&ours));
    cache.add(&ours);
    let paths: Vec<_> = rows(&cache).into_iter().map(|row| row.2).collect();
    assert_eq!(paths, ["/libx32/libcuda.so.1", "/d/libcuda.so.1", "/lib32/libcuda.so.1"]);
}

#[test]
fn the_right_library_behind_another_one_is_not_yet_right() {
    let rows = [
        (NATIVE_FLAGS, "libcuda.so.1", "/d/libcuda.so.1", 0),
        (NATIVE_FLAGS, "libcuda.so.1", "/image/libcuda.so.1", HWCAP),
    ];
    assert!(!read(&new_format(&rows, &[])).has(&[library("/d/libcuda.so.1")]));
    assert!(read(&new_format(&rows[..1], &[])).has(&[library("/d/libcuda.so.1")]));
}

#[test]
fn names_are_ordered_as_the_loader_orders_them() {
    // From high to low, as `ldconfig -p` prints them.
    let descending = [
        "lib2.so",
        "libz.so",
        "libfoo.so.10",
        "libfoo.so.9",
        "libfoo.so",
        "libc++.so.1",
        "libLLVM.so.1",
        "lib-x.so",
        "ld.so",
    ];
    for pair in descending.windows(2) {
        assert_eq!(libcmp(pair[0].as_bytes(), pair[1].as_bytes()), Ordering::Greater, "{pair:?}");
        assert_eq!(libcmp(pair[1].as_bytes(), pair[0].as_bytes()), Ordering::Less, "{pair:?}");
    }
    assert_eq!(libcmp(b"a.so.01", b"a.so.1"), Ordering::Equal);
    assert_eq!(libcmp(b"a.so.4294967297", b"a.so.1"), Ordering::Equal, "C's int wraps");
}

#[test]
fn a_file_that_the_loader_ignores_is_an_empty_cache() {
    let honest = new_format(&SOME, &[]);
    let mut many = honest.clone();
    many[20..24].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut big_endian = honest.clone();
    big_endian[ORDER_AT] = 3;
    for bytes in [
        &b""[..],
        b"garbage",
        NEW_MAGIC,
        OLD_MAGIC,
        &honest[..NEW_HEADER - 1],
        &honest[..NEW_HEADER + 1],
        &many,
        &big_endian,
    ] {
        assert_eq!(Cache::parse(bytes), None);
    }
}

#[test]
fn entries_that_lie_are_dropped_and_the_others_stay() {
    for (field, lie) in [(4, 0), (4, u32::MAX), (8, 12), (8, u32::MAX)] {
        let mut bytes = new_format(&SOME, &[]);
        let at = NEW_HEADER + NEW_ENTRY + field;
        bytes[at..at + 4].copy_from_slice(&lie.to_le_bytes());
        let names: Vec<_> = rows(&read(&bytes)).into_iter().map(|row| row.2).collect();
        assert_eq!(names, [SOME[0].2, SOME[2].2, SOME[3].2], "{lie} in {field}");
    }
}

#[test]
fn a_name_without_an_end_is_dropped() {
    let long = "x".repeat(KEY_MAX_BYTES + 1);
    let exact = "x".repeat(KEY_MAX_BYTES);
    let rows = [(NATIVE_FLAGS, long.as_str(), "/a", 0), (NATIVE_FLAGS, exact.as_str(), "/b", 0)];
    assert_eq!(read(&new_format(&rows, &[])).entries.len(), 1);
}

// A few bytes that make a reader copy gigabytes: many entries that share one long string.
#[test]
fn a_cache_of_overlapping_strings_does_not_grow() {
    let long = "y".repeat(1 << 20);
    let mut bytes = new_format(&[(NATIVE_FLAGS, "x", &long, 0)], &[]);
    let entry = bytes[NEW_HEADER..NEW_HEADER + NEW_ENTRY].to_vec();
    let count = 100_000;
    let shift = small((count - 1) * NEW_ENTRY);
    let mut table = Vec::new();
    for _ in 0..count {
        push(&mut table, NATIVE_FLAGS);
        push(&mut table, word(&entry, 4).unwrap() + shift);
        push(&mut table, word(&entry, 8).unwrap() + shift);
        table.extend([0; 12]);
    }
    bytes.splice(NEW_HEADER..NEW_HEADER + NEW_ENTRY, table);
    bytes[20..24].copy_from_slice(&small(count).to_le_bytes());
    let mut cache = read(&bytes);
    assert_eq!(cache.entries.len(), count);
    cache.add(&[library("/d/libcuda.so.1")]);
    assert!(cache.to_bytes().len() < bytes.len() + 1024);
}

#[test]
fn broken_extensions_cost_the_hardware_capabilities_only() {
    let honest = new_format(&SOME, &["x86-64-v2", "x86-64-v3"]);
    let directory = word(&honest, EXTENSIONS_AT).unwrap() as usize;
    for at in [EXTENSIONS_AT, directory, directory + 4, directory + EXTENSION_HEADER + EXTENSION_SECTION + 8]
    {
        let mut bytes = honest.clone();
        bytes[at..at + 4].copy_from_slice(&0x7fff_fff0_u32.to_le_bytes());
        let cache = read(&bytes);
        assert_eq!(cache.entries.len(), SOME.len(), "at {at}");
        // Written again it is whole.
        assert_eq!(rows(&read(&cache.to_bytes())), rows(&cache));
    }
}

fn row() -> impl Strategy<Value = (u32, String, u64)> {
    let name = prop_oneof!["lib[a-c]{0,2}\\.so(\\.[0-9]{1,2}){0,2}", "[ -~]{0,6}"];
    (prop_oneof![Just(NATIVE_FLAGS), Just(I386), Just(X32)], name, prop_oneof![Just(0), Just(HWCAP)])
}

proptest! {
    #[test]
    fn any_bytes_can_be_added_to(head in 0..3_usize, tail in proptest::collection::vec(any::<u8>(), 0..600)) {
        let head = [&[][..], NEW_MAGIC, &[OLD_MAGIC, &[0]].concat()][head].to_vec();
        check_any(&[head, tail].concat())?;
    }

    #[test]
    fn a_damaged_cache_can_be_added_to(
        combined: bool,
        damage in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..8),
        cut: proptest::sample::Index,
    ) {
        let caps = ["x86-64-v2", "x86-64-v3"];
        let mut bytes = if combined { combined_format(&SOME, &caps) } else { new_format(&SOME, &caps) };
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        check_any(&bytes)?;
        check_any(&bytes[..cut.index(bytes.len())])?;
    }

    /// Whatever `ldconfig` sorted, our additions are found by the loader's search, and so is all else.
    #[test]
    fn the_loader_finds_everything_in_a_sorted_cache(
        image in proptest::collection::vec(row(), 0..40),
        ours in proptest::collection::btree_set("lib[a-c]{0,2}\\.so(\\.[0-9]{1,2}){0,2}", 1..6),
    ) {
        let mut image = image;
        image.sort_by(|a, b| {
            libcmp(b.1.as_bytes(), a.1.as_bytes()).then(b.0.cmp(&a.0)).then(b.2.cmp(&a.2))
        });
        let paths: Vec<_> = (0..image.len()).map(|n| format!("/image/{n}")).collect();
        let rows: Vec<Row> =
            image.iter().zip(&paths).map(|(row, path)| (row.0, row.1.as_str(), path.as_str(), row.2)).collect();
        let before = read(&new_format(&rows, &["x86-64-v3"]));
        let ours: Vec<_> = ours.iter().map(|name| library(&format!("/d/{name}"))).collect();
        let mut after = before.clone();
        after.add(&ours);
        let after = read(&after.to_bytes());
        // "a.so.01" and "a.so.1" are the same to the loader; which of the two it takes is its own affair.
        let distinct = |name: &str, all: &[&str]| {
            all.iter().filter(|other| libcmp(other.as_bytes(), name.as_bytes()).is_eq()).all(|other| *other == name)
        };
        let names: Vec<_> = ours.iter().map(|library| library.name.to_str().unwrap())
            .chain(rows.iter().map(|row| row.1)).collect();
        for library in &ours {
            let name = library.name.to_str().unwrap();
            if distinct(name, &names) {
                prop_assert_eq!(search(&after, name), Some(library.path.to_str().unwrap().to_owned()));
            }
        }
        for row in &rows {
            if distinct(row.1, &names) && ours.iter().all(|library| library.name.to_str() != Ok(row.1)) {
                prop_assert_eq!(search(&after, row.1), search(&before, row.1));
            }
        }
    }
}

fn check_any(bytes: &[u8]) -> Result<(), TestCaseError> {
    let mut cache = read(bytes);
    let ours = ["/d/libcuda.so.1", "/d/libnvidia-ml.so.1"].map(library);
    cache.add(&ours);
    let written = cache.to_bytes();
    // Twice the input: an old entry of 12 bytes becomes a new one of 24.
    prop_assert!(written.len() <= bytes.len() * 2 + 1024);
    let again = read(&written);
    prop_assert!(again.has(&ours));
    prop_assert_eq!(again.entries.len(), cache.entries.len());
    Ok(())
}
