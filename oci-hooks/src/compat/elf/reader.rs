//! Reading the parts of an ELF file that the loader would read, each bounded.

use std::{cell::Cell, fs::File, num::NonZeroU64, os::unix::fs::FileExt};

use goblin::{
    container::Ctx,
    elf::{
        Elf as Goblin, dynamic as dt,
        dynamic::{Dyn, Dynamic},
        header::{ELFMAG, Header},
        program_header::{PT_DYNAMIC, PT_INTERP, PT_LOAD, ProgramHeader},
        section_header::{SHT_GNU_VERDEF, SHT_GNU_VERNEED, SHT_PROGBITS, SectionHeader},
        sym::Symtab,
        symver::{VerdefSection, VerneedSection},
    },
};
use rustix::fs::{Advice, fadvise};

use super::{
    super::fatbin::GpuCode, Depth, Elf, ElfError, Places, is_driver_symbol, is_loader_door, is_runtime_symbol,
};

/// Bytes of the first read: header, program headers and mostly the loader's name are in it.
const HEAD_BYTES: usize = 4096;

/// What is mostly at the front: headers, hash tables, symbols, names. Read at one go.
const FRONT_BYTES: u64 = 64 << 10;

/// Program headers of the largest libraries are below 20.
const MAX_PROGRAM_HEADERS: usize = 256;

/// Section headers; large C++ libraries have below 100.
const MAX_SECTIONS: usize = 4096;

/// 4096 entries; the largest seen have 60.
const MAX_DYNAMIC_BYTES: u64 = 64 << 10;

/// Names of symbols and libraries. PyTorch's, the largest seen, are 6 MiB.
const MAX_STRINGS_BYTES: u64 = 32 << 20;

/// Symbols: a million of them.
const MAX_SYMBOLS_BYTES: u64 = 24 << 20;

/// Version needs or definitions; libc.so.6 has 40.
const MAX_VERSIONS: usize = 4096;

/// Bytes of the largest version tables, and of most.
const MAX_VERSION_BYTES: u64 = 256 << 10;
const USUAL_VERSION_BYTES: u64 = 4 << 10;

/// Libraries that one file may need.
const MAX_NEEDED: usize = 1024;

/// A library's or version's name, and a search path.
const MAX_NAME_BYTES: usize = 16 << 10;

/// A function's name; the driver's longest has 60.
const MAX_SYMBOL_BYTES: usize = 256;

/// All names that are taken from one file; libcuda's exports have 50 KiB.
const MAX_KEPT_BYTES: usize = 1 << 20;

/// Libraries whose exports matter. The shim has the name of the first.
const CUDA_LIBRARIES: &[&str] = &["libcuda.so", "libnvidia-ml.so", "libcudart.so"];

/// Sections with text that is never written, and with code for GPUs (the second is linked again at build time).
const CONSTANTS: &[&str] = &[".rodata", ".lrodata"];
const FAT_BINARIES: &[&str] = &[".nv_fatbin", "__nv_relfatbin"];

/// `PATH_MAX`.
const MAX_INTERPRETER_BYTES: u64 = 4096;

/// One file being read.
pub(super) struct Reader<'a> {
    file: &'a File,
    size: u64,
    header: Header,
    ctx: Ctx,
    segments: Vec<ProgramHeader>,
    head: Vec<u8>,
}

impl<'a> Reader<'a> {
    pub(super) fn open(file: &'a File) -> Result<Self, ElfError> {
        // Small parts all over the file are read: what lies between would only be read ahead in vain.
        let _ = fadvise(file, 0, None, Advice::Random);
        let _ = fadvise(file, 0, NonZeroU64::new(FRONT_BYTES), Advice::WillNeed);
        let size = file.metadata().map_err(|error| ElfError::Unreadable(error.to_string()))?.len();
        let head = read_at(file, 0, HEAD_BYTES)?;
        if !head.starts_with(ELFMAG) {
            return Err(ElfError::NotElf);
        }
        let header = Goblin::parse_header(&head)?;
        let ctx = Ctx::new(header.container()?, header.endianness()?);
        let mut reader = Self { file, size, header, ctx, segments: Vec::new(), head };
        reader.segments = reader.program_headers()?;
        Ok(reader)
    }

    fn program_headers(&self) -> Result<Vec<ProgramHeader>, ElfError> {
        let count = usize::from(self.header.e_phnum);
        if count == 0 {
            return Ok(Vec::new());
        }
        let each = ProgramHeader::size(self.ctx);
        if usize::from(self.header.e_phentsize) != each || count > MAX_PROGRAM_HEADERS {
            return Err(ElfError::Broken("its program headers are none"));
        }
        let bytes = self.exactly(self.header.e_phoff, (each * count) as u64)?;
        Ok(ProgramHeader::parse(&bytes, 0, count, self.ctx)?)
    }

    pub(super) fn elf(&self, depth: Depth) -> Result<Elf, ElfError> {
        use goblin::elf::header::{EI_CLASS, ELFCLASS64, ET_EXEC};
        let mut elf = Elf {
            machine: self.header.e_machine,
            bits: if self.header.e_ident[EI_CLASS] == ELFCLASS64 { 64 } else { 32 },
            little_endian: self.header.endianness()?.is_little(),
            executable: self.header.e_type == ET_EXEC,
            interpreter: self.interpreter()?,
            ..Elf::default()
        };
        elf.executable |= elf.interpreter.is_some();
        if let Some(dynamic) = self.dynamic()? {
            elf.dynamic = true;
            self.fill_linking(&mut elf, &dynamic, depth)?;
        }
        if depth != Depth::Linking && elf.may_have_gpu_code() {
            // Section headers are not needed to run, so what is missing or broken there only means that less is known.
            let sections = self.named_sections().unwrap_or_default();
            if elf.looks_symbols_up() {
                elf.constants = self.places(&sections, CONSTANTS);
            }
            elf.gpu_code = GpuCode::read(self.file, &self.places(&sections, FAT_BINARIES));
        }
        Ok(elf)
    }

    fn interpreter(&self) -> Result<Option<String>, ElfError> {
        let Some(segment) = self.segments.iter().find(|segment| segment.p_type == PT_INTERP) else {
            return Ok(None);
        };
        if segment.p_filesz > MAX_INTERPRETER_BYTES {
            return Err(ElfError::Broken("the name of its loader is longer than a path can be"));
        }
        let bytes = self.exactly(segment.p_offset, segment.p_filesz)?;
        let name = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        match std::str::from_utf8(name) {
            Ok(name) if name.starts_with('/') => Ok(Some(name.to_owned())),
            _ => Err(ElfError::Broken("the name of its loader is no absolute path")),
        }
    }

    fn dynamic(&self) -> Result<Option<Dynamic>, ElfError> {
        // Of several the loader goes by the last.
        let Some(segment) = self.segments.iter().rfind(|segment| segment.p_type == PT_DYNAMIC) else {
            return Ok(None);
        };
        if segment.p_filesz > MAX_DYNAMIC_BYTES {
            return Err(ElfError::Broken("its dynamic section is larger than any"));
        }
        let bytes = self.exactly(segment.p_offset, segment.p_filesz)?;
        let here = ProgramHeader { p_offset: 0, ..segment.clone() };
        Ok(Dynamic::parse(&bytes, &[here], self.ctx)?)
    }

    fn fill_linking(&self, elf: &mut Elf, dynamic: &Dynamic, depth: Depth) -> Result<(), ElfError> {
        let entries = Entries(&dynamic.dyns);
        let flags = entries.value(dt::DT_FLAGS).unwrap_or(0);
        let flags_1 = entries.value(dt::DT_FLAGS_1).unwrap_or(0);
        elf.bind_now = entries.value(dt::DT_BIND_NOW).is_some()
            || flags & dt::DF_BIND_NOW != 0
            || flags_1 & dt::DF_1_NOW != 0;
        elf.executable |= flags_1 & dt::DF_1_PIE != 0;

        let Some(strings) = self.strings(&entries)? else {
            return Ok(());
        };
        let needed = dynamic.dyns.iter().filter(|entry| entry.d_tag == dt::DT_NEEDED);
        for entry in needed {
            if elf.needed.len() == MAX_NEEDED {
                return Err(ElfError::Broken("it needs more libraries than any"));
            }
            elf.needed.push(strings.get(entry.d_val)?);
        }
        let text = |tag| entries.value(tag).map(|at| strings.get(at)).transpose();
        elf.soname = text(dt::DT_SONAME)?;
        elf.rpath = text(dt::DT_RPATH)?;
        elf.runpath = text(dt::DT_RUNPATH)?;
        if depth != Depth::Symbols {
            elf.needs = self.needs(&entries, &strings)?;
            elf.defines = self.defines(&entries, &strings)?;
        }
        if depth != Depth::Linking {
            self.fill_symbols(elf, &entries, &strings)?;
        }
        Ok(())
    }

    fn strings(&self, entries: &Entries<'_>) -> Result<Option<Strings>, ElfError> {
        let (Some(at), Some(size)) = (entries.value(dt::DT_STRTAB), entries.value(dt::DT_STRSZ)) else {
            return Ok(None);
        };
        if size > MAX_STRINGS_BYTES {
            return Err(ElfError::Broken("its table of names is larger than any"));
        }
        Ok(Some(Strings::new(self.exactly(self.offset(at)?, size)?)))
    }

    fn needs(&self, entries: &Entries<'_>, strings: &Strings) -> Result<Vec<(String, String)>, ElfError> {
        let (Some(at), Some(count)) = (entries.value(dt::DT_VERNEED), entries.value(dt::DT_VERNEEDNUM))
        else {
            return Ok(Vec::new());
        };
        let mut needs = Vec::new();
        self.version_table(SHT_GNU_VERNEED, at, count, |bytes, header| {
            needs.clear();
            let Some(table) = VerneedSection::parse(bytes, header, self.ctx)? else { return Ok(true) };
            let mut libraries = 0;
            for need in table.iter() {
                libraries += 1;
                let library = strings.get(need.vn_file as u64)?;
                let mut versions = 0;
                for version in need.iter() {
                    versions += 1;
                    if needs.len() == MAX_VERSIONS {
                        return Err(ElfError::Broken("it needs more versions than any"));
                    }
                    needs.push((strings.keep(library.as_bytes())?, strings.get(version.vna_name as u64)?));
                }
                if versions < need.vn_cnt {
                    return Ok(false);
                }
            }
            Ok(libraries == count)
        })?;
        Ok(needs)
    }

    fn defines(&self, entries: &Entries<'_>, strings: &Strings) -> Result<Vec<String>, ElfError> {
        let (Some(at), Some(count)) = (entries.value(dt::DT_VERDEF), entries.value(dt::DT_VERDEFNUM)) else {
            return Ok(Vec::new());
        };
        let mut defines = Vec::new();
        self.version_table(SHT_GNU_VERDEF, at, count, |bytes, header| {
            defines.clear();
            let Some(table) = VerdefSection::parse(bytes, header, self.ctx)? else { return Ok(true) };
            for definition in table.iter() {
                // The first name is the version's own, the others are its parents.
                let Some(name) = definition.iter().next() else { return Ok(false) };
                if defines.len() == MAX_VERSIONS {
                    return Err(ElfError::Broken("it defines more versions than any"));
                }
                defines.push(strings.get(name.vda_name as u64)?);
            }
            Ok(defines.len() as u64 == count)
        })?;
        Ok(defines)
    }

    /// Has `parse` look at a version table, as a section header tells goblin of it. The loader knows no section
    /// headers, so those of the file are not asked. How long the table is nobody says: `parse` is given a little,
    /// and more where it says that this was not all.
    fn version_table(
        &self,
        kind: u32,
        at: u64,
        count: u64,
        mut parse: impl FnMut(&[u8], &[SectionHeader]) -> Result<bool, ElfError>,
    ) -> Result<(), ElfError> {
        if count > MAX_VERSIONS as u64 {
            return Err(ElfError::Broken("its version table is larger than any"));
        }
        let offset = self.offset(at)?;
        for most in [USUAL_VERSION_BYTES, MAX_VERSION_BYTES] {
            let size = self.size.saturating_sub(offset).min(most);
            let header = SectionHeader {
                sh_type: kind,
                sh_size: size,
                sh_info: u32::try_from(count).unwrap_or(0),
                ..SectionHeader::default()
            };
            if parse(&self.exactly(offset, size)?, &[header])? || size < most {
                break;
            }
        }
        Ok(())
    }

    fn fill_symbols(&self, elf: &mut Elf, entries: &Entries<'_>, strings: &Strings) -> Result<(), ElfError> {
        let Some(at) = entries.value(dt::DT_SYMTAB) else { return Ok(()) };
        let each: u64 = if elf.bits == 64 { 24 } else { 16 };
        let offers = elf
            .soname
            .as_deref()
            .is_some_and(|name| CUDA_LIBRARIES.iter().any(|cuda| name.starts_with(cuda)));
        let count = self.symbol_count(entries, offers)?;
        let size = count.checked_mul(each).filter(|size| *size <= MAX_SYMBOLS_BYTES);
        let size = size.ok_or(ElfError::Broken("it has more symbols than any"))?;
        if size == 0 {
            return Ok(());
        }
        let bytes = self.exactly(self.offset(at)?, size)?;
        let count = usize::try_from(count).unwrap_or(0);
        for symbol in &Symtab::parse(&bytes, 0, count, self.ctx)? {
            // C++ has names of any length; the driver has not.
            let Some(name) = strings.bytes(symbol.st_name as u64, MAX_SYMBOL_BYTES)? else { continue };
            if symbol.is_import() {
                if is_driver_symbol(name) || is_loader_door(name) {
                    elf.imports.push(strings.keep(name)?);
                }
            } else if symbol.st_shndx != 0 && (is_driver_symbol(name) || is_runtime_symbol(name)) {
                elf.exports.push(strings.keep(name)?);
            }
        }
        Ok(())
    }

    /// How many dynamic symbols there are, with the exports or, where the table tells them apart, without: nothing
    /// says so but the hash tables.
    fn symbol_count(&self, entries: &Entries<'_>, exports: bool) -> Result<u64, ElfError> {
        if !exports && let Some(at) = entries.value(dt::DT_GNU_HASH) {
            let head = self.exactly(self.offset(at)?, 8)?;
            return Ok(u64::from(self.word(&head, 4)));
        }
        if let Some(at) = entries.value(dt::DT_HASH) {
            let head = self.exactly(self.offset(at)?, 8)?;
            return Ok(u64::from(self.word(&head, 4)));
        }
        let Some(at) = entries.value(dt::DT_GNU_HASH) else { return Ok(0) };
        // Header of four words, Bloom filter, buckets, chains; a chain ends with the low bit set.
        let start = self.offset(at)?;
        let head = self.exactly(start, 16)?;
        let [buckets, first, filter] = [0, 4, 8].map(|offset| u64::from(self.word(&head, offset)));
        let filter_bytes = filter * if self.ctx.is_big() { 8 } else { 4 };
        if buckets * 4 > MAX_SYMBOLS_BYTES || filter_bytes > MAX_SYMBOLS_BYTES {
            return Err(ElfError::Broken("its symbol hash table is larger than any"));
        }
        let buckets_at = start + 16 + filter_bytes;
        let table = self.exactly(buckets_at, buckets * 4)?;
        let last = table.chunks_exact(4).map(|word| u64::from(self.word(word, 0))).max().unwrap_or(0);
        if last < first {
            // Nothing is exported; symbols below `first` are imports.
            return Ok(first);
        }
        let mut at = buckets_at + buckets * 4 + (last - first) * 4;
        let mut count = last;
        loop {
            let chunk = self.at_most(at, 4096)?;
            if chunk.len() < 4 || count * 16 > MAX_SYMBOLS_BYTES {
                return Err(ElfError::Broken("its symbol hash table has no end"));
            }
            for word in chunk.chunks_exact(4) {
                count += 1;
                if self.word(word, 0) & 1 == 1 {
                    return Ok(count);
                }
            }
            at += 4096;
        }
    }

    /// Where the sections of these names are.
    fn places(&self, sections: &[(String, SectionHeader)], names: &[&str]) -> Places {
        sections
            .iter()
            .filter(|(name, section)| {
                let end = section.sh_offset.checked_add(section.sh_size);
                names.contains(&name.as_str())
                    && section.sh_type == SHT_PROGBITS
                    && end.is_some_and(|end| end <= self.size)
            })
            .map(|(_, section)| (section.sh_offset, section.sh_size))
            .collect()
    }

    fn named_sections(&self) -> Result<Vec<(String, SectionHeader)>, ElfError> {
        let count = usize::from(self.header.e_shnum);
        let each = SectionHeader::size(self.ctx);
        if count == 0 || count > MAX_SECTIONS || usize::from(self.header.e_shentsize) != each {
            return Ok(Vec::new());
        }
        let bytes = self.exactly(self.header.e_shoff, (each * count) as u64)?;
        // goblin takes the count from the first header where it is told 0, so it is never told 0.
        let headers = SectionHeader::parse_from(&bytes, 0, count, self.ctx)?;
        let Some(names) = headers.get(usize::from(self.header.e_shstrndx)) else { return Ok(Vec::new()) };
        if names.sh_size > MAX_STRINGS_BYTES {
            return Err(ElfError::Broken("its section names are larger than any"));
        }
        let names = Strings::new(self.exactly(names.sh_offset, names.sh_size)?);
        headers.into_iter().map(|header| Ok((names.get(header.sh_name as u64)?, header))).collect()
    }

    /// Offset in the file of what the loader maps at `address`.
    fn offset(&self, address: u64) -> Result<u64, ElfError> {
        self.segments
            .iter()
            .filter(|segment| segment.p_type == PT_LOAD)
            .find_map(|segment| {
                let inside = address.checked_sub(segment.p_vaddr)?;
                (inside < segment.p_filesz).then(|| segment.p_offset.checked_add(inside))?
            })
            .ok_or(ElfError::Broken("an address in it is in none of its segments"))
    }

    fn exactly(&self, offset: u64, length: u64) -> Result<Vec<u8>, ElfError> {
        let end = offset.checked_add(length).filter(|end| *end <= self.size);
        let end = end.ok_or(ElfError::Broken("it ends before what it says it holds"))?;
        let length = usize::try_from(length).map_err(|_| ElfError::Broken("a part of it is too large"))?;
        if let Some(bytes) = usize::try_from(end).ok().and_then(|end| self.head.get(end - length..end)) {
            return Ok(bytes.to_vec());
        }
        let bytes = read_at(self.file, offset, length)?;
        if bytes.len() == length { Ok(bytes) } else { Err(ElfError::Broken("it shrank while it was read")) }
    }

    fn at_most(&self, offset: u64, length: u64) -> Result<Vec<u8>, ElfError> {
        self.exactly(offset, self.size.saturating_sub(offset).min(length))
    }

    /// The 32-bit word at `at`; 0 where there is none.
    fn word(&self, bytes: &[u8], at: usize) -> u32 {
        let word = bytes.get(at..at + 4).and_then(|word| word.try_into().ok()).unwrap_or_default();
        if self.ctx.le.is_little() { u32::from_le_bytes(word) } else { u32::from_be_bytes(word) }
    }
}

struct Entries<'a>(&'a [Dyn]);

impl Entries<'_> {
    /// Of several with one tag the loader goes by the last (glibc's `elf_get_dynamic_info`).
    fn value(&self, tag: u64) -> Option<u64> {
        self.0.iter().rfind(|entry| entry.d_tag == tag).map(|entry| entry.d_val)
    }
}

/// A file's names. Many entries may share one, so what is taken of them is bounded, not only what there is.
struct Strings {
    bytes: Vec<u8>,
    left: Cell<usize>,
}

impl Strings {
    fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, left: Cell::new(MAX_KEPT_BYTES) }
    }

    /// The name at that place, if it has at most `most` bytes; no more of it is looked at.
    fn bytes(&self, at: u64, most: usize) -> Result<Option<&[u8]>, ElfError> {
        let rest = usize::try_from(at).ok().and_then(|at| self.bytes.get(at..));
        let rest = rest.ok_or(ElfError::Broken("a name in it lies outside of its table of names"))?;
        match memchr::memchr(0, &rest[..rest.len().min(most + 1)]) {
            Some(end) => Ok(Some(&rest[..end])),
            None => Ok((rest.len() <= most).then_some(rest)),
        }
    }

    fn get(&self, at: u64) -> Result<String, ElfError> {
        match self.bytes(at, MAX_NAME_BYTES)? {
            Some(name) => self.keep(name),
            None => Err(ElfError::Broken("a name in it is longer than any")),
        }
    }

    fn keep(&self, name: &[u8]) -> Result<String, ElfError> {
        let left = self.left.get().checked_sub(name.len() + size_of::<String>());
        self.left.set(left.ok_or(ElfError::Broken("it has more names than any"))?);
        Ok(String::from_utf8_lossy(name).into_owned())
    }
}

fn read_at(file: &File, offset: u64, length: usize) -> Result<Vec<u8>, ElfError> {
    let mut bytes = vec![0; length];
    let mut filled = 0;
    while filled < length {
        match file.read_at(&mut bytes[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ElfError::Unreadable(error.to_string())),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}
