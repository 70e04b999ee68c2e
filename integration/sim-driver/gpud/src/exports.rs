//! Which names a driver's libraries export. The simulated ones are built with the names of all drivers; laid out as a
//! certain one, they keep those that it has.

use std::collections::{BTreeSet, HashMap};

use anyhow::{Context, Result, ensure};
use goblin::elf::{Elf, Sym, program_header::PT_LOAD};

/// Which drivers have a name.
#[derive(Clone, Copy, Debug)]
struct Presence {
    /// In 535, 550 and 555, as those libraries' own symbol tables say.
    seen: [bool; 3],
    /// The CUDA version that brought it, for drivers newer than those.
    since: i32,
}

/// The names of one library.
#[derive(Debug)]
pub struct Table(HashMap<&'static str, Presence>);

/// The names of libcuda.
pub fn cuda() -> Table {
    Table::parse(include_str!("../../cuda/symbols.tsv"))
}

/// The names of NVML.
pub fn nvml() -> Table {
    Table::parse(include_str!("../../nvml/symbols.tsv"))
}

impl Table {
    fn parse(text: &'static str) -> Self {
        // symbol, since, in_535, in_550, in_555, …
        let rows = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
            let mut fields = line.split('\t');
            let symbol = fields.next()?;
            let since = fields.next()?.parse().unwrap_or(0);
            let mut seen = || fields.next().map(|field| field == "1");
            Some((symbol, Presence { seen: [seen()?, seen()?, seen()?], since }))
        });
        Self(rows.collect())
    }

    /// Whether a driver of this branch, with this CUDA version, exports a name. Names that the table does not know are
    /// the build's own.
    pub fn has(&self, symbol: &str, branch: u32, cuda: i32) -> bool {
        self.0.get(symbol).is_none_or(|presence| match branch {
            ..550 => presence.seen[0],
            550..555 => presence.seen[1],
            555..560 => presence.seen[2],
            // What was dropped is no more; what is newer came with its CUDA version.
            _ => presence.seen[2] || (!presence.seen[1] && presence.since <= cuda),
        })
    }
}

/// Takes from a library's exports those that are not to be kept. A loader finds them no more, as it finds no symbol that
/// is undefined.
pub fn keep(library: &mut [u8], keep: impl Fn(&str) -> bool) -> Result<()> {
    let (table, drop) = {
        let elf = Elf::parse(library).context("no ELF file")?;
        ensure!(elf.is_64 && elf.little_endian, "not for this machine");
        let address = elf.dynamic.as_ref().context("no dynamic section")?.info.symtab as u64;
        let segment = elf
            .program_headers
            .iter()
            .find(|header| header.p_type == PT_LOAD && header.vm_range().contains(&usize_of(address)))
            .context("no symbol table")?;
        let table = usize_of(address - segment.p_vaddr + segment.p_offset);
        let drop: Vec<(usize, Sym)> = elf
            .dynsyms
            .iter()
            .enumerate()
            .filter(|(_, symbol)| symbol.st_shndx != 0)
            .filter(|(_, symbol)| elf.dynstrtab.get_at(symbol.st_name).is_some_and(|name| !keep(name)))
            .collect();
        (table, drop)
    };
    for (index, symbol) in drop {
        // Elf64_Sym: name u32, info u8, other u8, section u16, value u64, size u64. Weak, undefined, at no address.
        const SIZE: usize = 24;
        const WEAK: u8 = 2 << 4;
        let at = table + index * SIZE;
        let entry = library.get_mut(at..at + SIZE).context("the symbol table is cut off")?;
        entry[4] = WEAK | (symbol.st_info & 0xf);
        entry[6..].fill(0);
    }
    Ok(())
}

/// Names that a library exports.
pub fn of(library: &[u8]) -> Result<BTreeSet<String>> {
    let elf = Elf::parse(library).context("no ELF file")?;
    let defined = elf.dynsyms.iter().filter(|symbol| symbol.st_shndx != 0);
    Ok(defined.filter_map(|symbol| elf.dynstrtab.get_at(symbol.st_name)).map(str::to_owned).collect())
}

fn usize_of(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
