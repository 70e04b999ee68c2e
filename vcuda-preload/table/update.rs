//! Brings `cuda.tsv` and `nvml.tsv` up to date with public headers and with drivers' exports.
//!
//! ```text
//! cargo run -p vcuda-preload --example update-table -- [--check] WHAT...
//! ```
//!
//! WHAT is a folder with `cuda.h` and `cudaTypedefs.h` (of the packages nvidia-cuda-runtime), a file `nvml.h`, or a
//! driver's `libcuda.so.*` or `libnvidia-ml.so.*`. Symbols that are new get the kind `new` and the action `pass`: look at
//! each, and say what it does. Nothing is ever removed: old programs ask for old symbols. With `--check`, nothing is
//! written. Ends with 1 if the tables were not up to date.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    path::Path,
    process::ExitCode,
};

type Error = Box<dyn std::error::Error>;

/// What headers and exports tell of one library.
#[derive(Default)]
struct Found {
    symbols: BTreeSet<String>,
    /// Symbol → CUDA version that brought its ABI.
    since: BTreeMap<String, u32>,
}

/// A row: symbol, and the columns after it.
type Table = BTreeMap<String, Vec<String>>;

fn main() -> Result<ExitCode, Error> {
    let (mut cuda, mut nvml, mut check) = (Found::default(), Found::default(), false);
    for argument in env::args().skip(1) {
        let path = Path::new(&argument);
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if argument == "--check" {
            check = true;
        } else if path.is_dir() {
            read_cuda_headers(path, &mut cuda)?;
        } else if name == "nvml.h" {
            read_nvml_header(&fs::read_to_string(path)?, &mut nvml);
        } else if name.starts_with("libcuda.so") {
            read_exports(path, "cu", &mut cuda)?;
        } else if name.starts_with("libnvidia-ml.so") {
            read_exports(path, "nvml", &mut nvml)?;
        } else {
            return Err(
                format!("{argument}: no folder of headers, no nvml.h and no library of the driver").into()
            );
        }
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("table");
    let mut changed = false;
    for (file, found, is_cuda) in [("cuda.tsv", cuda, true), ("nvml.tsv", nvml, false)] {
        changed |= update(&folder.join(file), &found, is_cuda, check)?;
    }
    println!("{}", if changed { "the tables were not up to date" } else { "the tables are up to date" });
    Ok(ExitCode::from(u8::from(changed)))
}

/// Words of a C source: identifiers, and every other character for itself; comments left out.
fn words(source: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |at| at + 2)
        } else if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if first.is_ascii_alphanumeric() || first == '_' {
            let length = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            words.push(rest[..length].to_owned());
            length
        } else {
            if !first.is_whitespace() {
                words.push(first.to_string());
            }
            first.len_utf8()
        };
        rest = &rest[length..];
    }
    words
}

fn is_driver_symbol(word: &str) -> bool {
    word.strip_prefix("cu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
}

fn read_cuda_headers(folder: &Path, found: &mut Found) -> Result<(), Error> {
    // Base name and default stream → versions of its ABIs.
    let mut versions: BTreeMap<(String, String), BTreeSet<u32>> = BTreeMap::new();
    let mut symbols = BTreeSet::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.extension().is_none_or(|extension| extension != "h") || !name.starts_with("cuda") {
            continue;
        }
        let source = String::from_utf8_lossy(&fs::read(&path)?).into_owned();
        if name.ends_with("ypedefs.h") {
            read_typedefs(&source, &mut versions);
        } else {
            read_declarations(&source, &mut symbols);
        }
    }
    // The ABIs of a name are numbered in the order of their versions.
    let mut numbered: BTreeMap<(String, String), Vec<(u32, String)>> = BTreeMap::new();
    for symbol in &symbols {
        let (base, number, stream) = parts(symbol);
        numbered.entry((base.into(), stream.into())).or_default().push((number, symbol.clone()));
    }
    for (key, mut list) in numbered {
        list.sort();
        let versions = versions.get(&key).cloned().unwrap_or_default();
        if versions.len() == list.len() {
            for ((_, symbol), version) in list.into_iter().zip(versions) {
                let since = found.since.entry(symbol).or_insert(version);
                *since = version.min(*since);
            }
        }
    }
    found.symbols.extend(symbols);
    Ok(())
}

/// `cuMemcpyHtoD_v2_ptds` → `cuMemcpyHtoD`, 2, `_ptds`.
fn parts(symbol: &str) -> (&str, u32, &str) {
    let at = symbol.find("_ptds").or(symbol.find("_ptsz")).unwrap_or(symbol.len());
    let (name, stream) = symbol.split_at(at);
    match name.rsplit_once("_v").and_then(|(base, number)| Some((base, number.parse().ok()?))) {
        Some((base, number)) => (base, number, stream),
        None => (name, 1, stream),
    }
}

/// `typedef CUresult (CUDAAPI *PFN_cuMemAlloc_v3020)(…)`, with `_ptds` or `_ptsz` behind the version.
fn read_typedefs(source: &str, versions: &mut BTreeMap<(String, String), BTreeSet<u32>>) {
    for word in words(source) {
        let Some(name) = word.strip_prefix("PFN_") else { continue };
        let (base, version, stream) = parts(name);
        if version >= 1000 && is_driver_symbol(base) {
            versions.entry((base.into(), stream.into())).or_default().insert(version);
        }
    }
}

/// `CUresult CUDAAPI cuInit(`, and `#define cuMemcpyHtoD __CUDA_API_PTDS(cuMemcpyHtoD_v2)`.
fn read_declarations(source: &str, symbols: &mut BTreeSet<String>) {
    let words = words(source);
    for window in words.windows(3) {
        if let [marker, name, bracket] = window
            && marker == "CUDAAPI"
            && bracket == "("
            && is_driver_symbol(name)
        {
            symbols.insert(name.clone());
        }
    }
    for line in source.lines().map(str::trim).filter(|line| line.starts_with("#define")) {
        let defined: Vec<_> = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
        let mut names = defined.iter().filter(|word| is_driver_symbol(word));
        let (Some(_), Some(name)) = (names.next(), names.next()) else { continue };
        if name.contains("_ptds") || name.contains("_ptsz") {
            continue;
        }
        symbols.insert((*name).to_owned());
        for (macro_name, suffix) in [("__CUDA_API_PTDS", "_ptds"), ("__CUDA_API_PTSZ", "_ptsz")] {
            if defined.contains(&macro_name) {
                symbols.insert(format!("{name}{suffix}"));
            }
        }
    }
}

/// `nvmlReturn_t DECLDIR nvmlInit_v2(void);`
fn read_nvml_header(source: &str, found: &mut Found) {
    for window in words(source).windows(3) {
        if let [marker, name, bracket] = window
            && marker == "DECLDIR"
            && bracket == "("
            && name.starts_with("nvml")
        {
            found.symbols.insert(name.clone());
        }
    }
}

fn read_exports(path: &Path, prefix: &str, found: &mut Found) -> Result<(), Error> {
    let bytes = fs::read(path)?;
    let elf = goblin::elf::Elf::parse(&bytes)?;
    let exports = elf.dynsyms.iter().filter(|symbol| symbol.st_shndx != 0);
    let names = exports.filter_map(|symbol| elf.dynstrtab.get_at(symbol.st_name));
    let ours = names.filter(|name| name.starts_with(prefix) && !name.starts_with("cudbg"));
    found.symbols.extend(ours.map(str::to_owned));
    Ok(())
}

/// Merges what was found into a table; tells whether that changed it.
fn update(path: &Path, found: &Found, is_cuda: bool, check: bool) -> Result<bool, Error> {
    let old = fs::read_to_string(path)?;
    let (comments, rows): (Vec<_>, Vec<_>) = old.lines().partition(|line| line.starts_with('#'));
    let mut table: Table = rows
        .iter()
        .map(|row| {
            let mut columns = row.split('\t').map(str::to_owned);
            (columns.next().unwrap_or_default(), columns.collect())
        })
        .collect();
    for symbol in &found.symbols {
        let since = found.since.get(symbol).map_or("-".into(), u32::to_string);
        let row = table.entry(symbol.clone()).or_insert_with(|| {
            println!("{symbol}: new");
            let stream = if parts(symbol).2.is_empty() { "legacy" } else { "per-thread" };
            let columns = if is_cuda { vec!["-", stream, "new", "pass"] } else { vec!["-", "new", "pass"] };
            columns.into_iter().map(str::to_owned).collect()
        });
        if since != "-" && row[0] != since {
            println!("{symbol}: since {since}, was {}", row[0]);
            row[0] = since;
        }
    }
    let mut new = comments.join("\n") + "\n";
    for (symbol, columns) in &table {
        new += &format!("{symbol}\t{}\n", columns.join("\t"));
    }
    if new != old && !check {
        fs::write(path, &new)?;
    }
    Ok(new != old)
}
