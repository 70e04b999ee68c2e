//! Images of modules: what can be told of PTX text, and of binaries. A comment `// sim: time 5us` in the text of a function
//! says how long a launch of it takes on an otherwise idle GPU (ns, us, ms or s); without one it takes no time.

use std::{
    ffi::{CStr, c_char},
    fs,
};

use crate::ffi::{Error, FILE_NOT_FOUND, INVALID_IMAGE, In, OUT_OF_MEMORY, Outcome, Text};

/// `CUDA_ERROR_INVALID_PTX`.
const INVALID_PTX: Error = Error(218);

/// The first bytes of images: ELF, fat binary, and the wrapper that the compiler puts around one.
const BINARIES: [[u8; 4]; 3] = [[0x7f, b'E', b'L', b'F'], [0x50, 0xed, 0x55, 0xba], [0xb1, 0x43, 0x62, 0x46]];

/// A file with an image is at most this long.
const MAX_FILE: u64 = 1 << 30;

/// What is known of an image.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Image {
    /// All names are taken to be there.
    Binary,
    /// Functions, and variables with their bytes.
    Text { functions: Vec<String>, variables: Vec<(String, u64)>, durations: Vec<(String, u64)> },
}

/// What begins a comment that says how long a function takes.
const TIME: &str = "sim: time ";

/// The same in a form that a comment cannot have, between statements.
const TIME_WORD: &str = ".sim_time";

/// Nanoseconds of `5us`.
fn nanoseconds(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

/// A line without its comment, or with what the comment says of time.
fn stripped(line: &str) -> String {
    let (code, comment) = line.split_once("//").unwrap_or((line, ""));
    match comment.trim_start().strip_prefix(TIME) {
        Some(time) => format!("{code};{TIME_WORD} {};\n", time.split_whitespace().next().unwrap_or_default()),
        None => format!("{code}\n"),
    }
}

impl Image {
    /// Reads the text of a PTX module.
    fn parse(text: &str) -> Outcome<Self> {
        if !text.contains(".version") || !text.contains(".target") {
            return Err(INVALID_PTX);
        }
        let text: String =
            text.lines().map(stripped).fold(String::with_capacity(text.len()), |all, line| all + &line);
        let (mut functions, mut variables) = (Vec::<String>::new(), vec![]);
        let mut durations = vec![];
        for statement in text.split([';', '{', '}']) {
            let words: Vec<&str> = statement
                .split(|c: char| c.is_whitespace() || "()".contains(c))
                .filter(|word| !word.is_empty())
                .collect();
            if let Some(at) = words.iter().position(|word| *word == ".entry") {
                functions.extend(words.get(at + 1).map(|name| (*name).to_owned()));
            } else if let [TIME_WORD, rest @ ..] = &words[..] {
                let function = functions.last().ok_or(INVALID_PTX)?.clone();
                let time = rest.first().ok_or(INVALID_PTX)?;
                durations.push((function, nanoseconds(time).ok_or(INVALID_PTX)?));
            } else if let Some(at) = words.iter().position(|word| [".global", ".const"].contains(word)) {
                variables.extend(variable(&words[at..]));
            }
        }
        Ok(Self::Text { functions, variables, durations })
    }

    /// What a program passes by address: a binary image, or text that ends with a NUL.
    pub(crate) fn at(address: In<[u8; 4]>) -> Outcome<Self> {
        let first = address.get()?;
        if BINARIES.contains(&first) {
            return Ok(Self::Binary);
        }
        if !first.iter().all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace()) {
            return Err(INVALID_IMAGE);
        }
        // SAFETY: what is no binary image is a C string (cuModuleLoadData).
        let text = unsafe { CStr::from_ptr(address.address() as *const c_char) };
        Self::parse(text.to_str().map_err(|_| INVALID_IMAGE)?)
    }

    /// What is in a file.
    pub(crate) fn file(path: Text) -> Outcome<Self> {
        let path = std::str::from_utf8(path.bytes()?).map_err(|_| FILE_NOT_FOUND)?;
        let length = fs::metadata(path).map_err(|_| FILE_NOT_FOUND)?.len();
        if length > MAX_FILE {
            return Err(OUT_OF_MEMORY);
        }
        let bytes = fs::read(path).map_err(|_| FILE_NOT_FOUND)?;
        match bytes.first_chunk() {
            Some(first) if BINARIES.contains(first) => Ok(Self::Binary),
            Some(_) => Self::parse(std::str::from_utf8(&bytes).map_err(|_| INVALID_IMAGE)?),
            None => Err(INVALID_IMAGE),
        }
    }

    /// Nanoseconds that a launch of a function takes.
    pub(crate) fn duration(&self, name: &str) -> u64 {
        let Self::Text { durations, .. } = self else { return 0 };
        durations.iter().find(|(of, _)| of == name).map_or(0, |(_, duration)| *duration)
    }

    /// Whether there is a function of that name.
    pub(crate) fn has(&self, name: &str) -> bool {
        match self {
            Self::Binary => !name.is_empty(),
            Self::Text { functions, .. } => functions.iter().any(|function| function == name),
        }
    }
}

/// Name and bytes of a variable: `.visible .global .align 4 .b8 name[256]`.
fn variable(words: &[&str]) -> Option<(String, u64)> {
    let kind = words.iter().find_map(|word| {
        let bits = word.strip_prefix('.')?.strip_prefix(['b', 'u', 's', 'f'])?;
        bits.parse::<u64>().ok().filter(|bits| matches!(bits, 8 | 16 | 32 | 64))
    })?;
    let text = words.iter().skip_while(|word| word.starts_with('.') || word.parse::<u64>().is_ok());
    let text: String = text.take_while(|word| **word != "=").copied().collect();
    let (name, count) = match text.split_once('[') {
        Some((name, rest)) => (name, rest.split(']').next()?.parse().ok()?),
        None => (text.as_str(), 1),
    };
    Some((name.to_owned(), (kind / 8).checked_mul(count)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_sizes_are_read_from_ptx() {
        let text = "// .entry not_this\n.version 8.0\n.target sm_80\n.address_size 64\n\
            .visible .global .align 4 .b8 table[256];\n.global .f64 pi = 0d400921FB54442D18;\n\
            .const .align 8 .u64 pair[2] = {1, 2};\n\
            .visible .entry add(\n\t.param .u64 a,\n\t.param .u32 n\n)\n{ ret; }\n.entry empty ()\n{\nret;\n}\n";
        let Image::Text { functions, variables, .. } = Image::parse(text).unwrap() else { panic!() };
        assert_eq!(functions, ["add", "empty"]);
        let sizes: Vec<_> = variables.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect();
        assert_eq!(sizes, [("table", 256), ("pi", 8), ("pair", 16)]);
    }

    #[test]
    fn a_comment_says_how_long_a_function_takes() {
        let head = ".version 8.0\n.target sm_80\n.address_size 64\n";
        let text = format!(
            "{head}.visible .entry short()\n{{ // sim: time 5us\n ret; }}\n.entry none() {{ ret; }}\n\
             .visible .entry long(\n .param .u64 a // sim: time 200ms as measured\n)\n{{ ret; }}\n"
        );
        let image = Image::parse(&text).unwrap();
        let times = ["short", "none", "long", "other"].map(|name| image.duration(name));
        assert_eq!(times, [5_000, 0, 200_000_000, 0]);
        for wrong in
            ["// sim: time 5us\n", ".entry a() {{ // sim: time fast\n}}", ".entry a() {{ // sim: time \n}}"]
        {
            assert_eq!(Image::parse(&format!("{head}{wrong}")), Err(INVALID_PTX), "{wrong}");
        }
    }

    #[test]
    fn what_is_no_ptx_is_refused() {
        assert_eq!(Image::parse("hello"), Err(INVALID_PTX));
        assert_eq!(Image::parse(""), Err(INVALID_PTX));
    }
}
