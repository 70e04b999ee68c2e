//! Makes small ELF files for tests: whatever a test wants to say about a program or library, in a file that says
//! just that. One segment maps the whole file at address 0.

use goblin::elf::{
    dynamic as dt,
    header::{EM_X86_64, ET_DYN, ET_EXEC},
};

/// What the file is to say.
#[derive(Clone, Debug)]
pub(crate) struct Maker {
    pub machine: u16,
    pub fixed: bool,
    pub interpreter: Option<&'static str>,
    pub soname: Option<&'static str>,
    pub needed: Vec<&'static str>,
    pub runpath: Option<&'static str>,
    pub rpath: Option<&'static str>,
    pub needs: Vec<(&'static str, Vec<&'static str>)>,
    pub defines: Vec<&'static str>,
    pub imports: Vec<&'static str>,
    pub exports: Vec<&'static str>,
    pub constants: Vec<u8>,
}

impl Default for Maker {
    fn default() -> Self {
        Self {
            machine: EM_X86_64,
            fixed: false,
            interpreter: None,
            soname: None,
            needed: Vec::new(),
            runpath: None,
            rpath: None,
            needs: Vec::new(),
            defines: Vec::new(),
            imports: Vec::new(),
            exports: Vec::new(),
            constants: Vec::new(),
        }
    }
}

impl Maker {
    /// A dynamic program under glibc's loader.
    pub fn program() -> Self {
        Self {
            interpreter: Some("/lib64/ld-linux-x86-64.so.2"),
            needed: vec!["libc.so.6"],
            ..Self::default()
        }
    }

    /// A static program of fixed address.
    pub fn static_program() -> Self {
        Self { fixed: true, ..Self::default() }
    }

    /// glibc of the versions named.
    pub fn glibc(versions: &[&'static str]) -> Self {
        let defines = [&["libc.so.6"], versions].concat();
        Self { soname: Some("libc.so.6"), defines, ..Self::default() }
    }

    fn dynamic(&self) -> bool {
        self.soname.is_some() || !self.needed.is_empty() || !self.imports.is_empty()
    }

    pub fn make(&self) -> Vec<u8> {
        let mut strings = vec![0];
        let mut name = |text: &str| {
            let at = strings.len();
            strings.extend(text.bytes().chain([0]));
            at as u64
        };
        let mut tags: Vec<(u64, u64)> = Vec::new();
        for needed in &self.needed {
            tags.push((dt::DT_NEEDED, name(needed)));
        }
        for (tag, text) in
            [(dt::DT_SONAME, self.soname), (dt::DT_RPATH, self.rpath), (dt::DT_RUNPATH, self.runpath)]
        {
            tags.extend(text.map(|text| (tag, name(text))));
        }
        let needs: Vec<(u64, Vec<u64>)> = self
            .needs
            .iter()
            .map(|(library, versions)| (name(library), versions.iter().map(|text| name(text)).collect()))
            .collect();
        let defines: Vec<u64> = self.defines.iter().map(|text| name(text)).collect();
        let symbols: Vec<(u64, bool)> = (self.imports.iter().map(|text| (text, false)))
            .chain(self.exports.iter().map(|text| (text, true)))
            .map(|(text, defined)| (name(text), defined))
            .collect();

        let mut file = vec![0; 64 + 3 * 56];
        let place = |file: &mut Vec<u8>, bytes: &[u8]| {
            file.resize(file.len().next_multiple_of(8), 0);
            let at = file.len() as u64;
            file.extend(bytes);
            (at, bytes.len() as u64)
        };
        let mut segments = Vec::new();
        if let Some(interpreter) = self.interpreter {
            segments.push((3_u32, place(&mut file, format!("{interpreter}\0").as_bytes())));
        }
        if self.dynamic() {
            let (at, size) = place(&mut file, &strings);
            tags.extend([(dt::DT_STRTAB, at), (dt::DT_STRSZ, size)]);
            if !needs.is_empty() {
                let (at, _) = place(&mut file, &verneed(&needs));
                tags.extend([(dt::DT_VERNEED, at), (dt::DT_VERNEEDNUM, needs.len() as u64)]);
            }
            if !defines.is_empty() {
                let (at, _) = place(&mut file, &verdef(&defines));
                tags.extend([(dt::DT_VERDEF, at), (dt::DT_VERDEFNUM, defines.len() as u64)]);
            }
            let mut table = vec![0; 24];
            for (name, defined) in &symbols {
                table.extend(low(*name).to_le_bytes());
                table.extend([0x12, 0]);
                table.extend(u16::from(*defined).to_le_bytes());
                table.extend((u64::from(*defined) * 0x1000).to_le_bytes());
                table.extend([0; 8]);
            }
            tags.push((dt::DT_SYMTAB, place(&mut file, &table).0));
            let hash = gnu_hash(self.imports.len() as u32 + 1, self.exports.len() as u32);
            tags.push((dt::DT_GNU_HASH, place(&mut file, &hash).0));
            tags.push((dt::DT_NULL, 0));
            let bytes: Vec<u8> = tags
                .iter()
                .flat_map(|(tag, value)| [tag.to_le_bytes(), value.to_le_bytes()].concat())
                .collect();
            segments.push((2, place(&mut file, &bytes)));
        }
        let mut sections = (0, 0);
        if !self.constants.is_empty() {
            let constants = place(&mut file, &self.constants);
            let names = place(&mut file, b"\0.rodata\0.shstrtab\0");
            let table = [section(0, 0, (0, 0)), section(1, 1, constants), section(9, 3, names)].concat();
            sections = (place(&mut file, &table).0, 3);
        }
        let size = file.len() as u64;
        segments.push((1, (0, size)));

        file[..64].copy_from_slice(&self.header(segments.len(), sections));
        for (at, (kind, (offset, size))) in segments.into_iter().enumerate() {
            file[64 + at * 56..][..56].copy_from_slice(&segment(kind, offset, size));
        }
        file
    }

    fn header(&self, segments: usize, (sections_at, sections): (u64, u16)) -> Vec<u8> {
        let mut header = b"\x7fELF\x02\x01\x01".to_vec();
        header.resize(16, 0);
        header.extend(if self.fixed { ET_EXEC } else { ET_DYN }.to_le_bytes());
        header.extend(self.machine.to_le_bytes());
        header.extend(1_u32.to_le_bytes());
        for word in [0x1000_u64, 64, sections_at] {
            header.extend(word.to_le_bytes());
        }
        header.extend(0_u32.to_le_bytes());
        let names = if sections == 0 { 0 } else { sections - 1 };
        for half in [64, 56, segments as u16, 64, sections, names] {
            header.extend(half.to_le_bytes());
        }
        header
    }
}

fn segment(kind: u32, offset: u64, size: u64) -> Vec<u8> {
    let mut segment = [kind.to_le_bytes(), 4_u32.to_le_bytes()].concat();
    for word in [offset, offset, offset, size, size, 8] {
        segment.extend(word.to_le_bytes());
    }
    segment
}

fn section(name: u32, kind: u32, (offset, size): (u64, u64)) -> Vec<u8> {
    let mut section = [name.to_le_bytes(), kind.to_le_bytes()].concat();
    for word in [2, offset, offset, size, 0, 1, 0] {
        section.extend(u64::to_le_bytes(word));
    }
    section
}

fn verneed(needs: &[(u64, Vec<u64>)]) -> Vec<u8> {
    let mut table = Vec::new();
    for (at, (library, versions)) in needs.iter().enumerate() {
        let size = 16 + 16 * versions.len() as u32;
        let next = if at + 1 == needs.len() { 0 } else { size };
        table.extend([1_u16.to_le_bytes(), (versions.len() as u16).to_le_bytes()].concat());
        for word in [low(*library), 16, next] {
            table.extend(word.to_le_bytes());
        }
        for (at, version) in versions.iter().enumerate() {
            table.extend([0; 8]);
            table.extend(low(*version).to_le_bytes());
            table.extend(if at + 1 == versions.len() { 0 } else { 16_u32 }.to_le_bytes());
        }
    }
    table
}

fn verdef(defines: &[u64]) -> Vec<u8> {
    let mut table = Vec::new();
    for (at, name) in defines.iter().enumerate() {
        for half in [1, u16::from(at == 0), at as u16 + 1, 1] {
            table.extend(half.to_le_bytes());
        }
        for word in [0, 20, if at + 1 == defines.len() { 0 } else { 28 }, low(*name), 0] {
            table.extend(u32::to_le_bytes(word));
        }
    }
    table
}

/// One bucket that holds all exports.
fn gnu_hash(first: u32, exports: u32) -> Vec<u8> {
    let mut table = Vec::new();
    for word in [1, first, 1, 0] {
        table.extend(u32::to_le_bytes(word));
    }
    table.extend([0xff; 8]);
    table.extend(if exports == 0 { 0 } else { first }.to_le_bytes());
    for at in 0..exports {
        table.extend(u32::from(at + 1 == exports).to_le_bytes());
    }
    table
}

fn low(value: u64) -> u32 {
    u32::try_from(value).unwrap()
}
