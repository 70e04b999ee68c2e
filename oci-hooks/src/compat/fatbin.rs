//! GPU code in a program or library: for which GPUs it was compiled, and as PTX, which the driver compiles at run
//! time. Told from the headers of its fat binaries; the code itself is not read.
//!
//! The format is not published. What is relied on was seen in cuBLAS, cuDNN, NCCL, CuPy and PyTorch of CUDA 11 to 13: a
//! header of 16 bytes (magic, version, its size, bytes that follow), then parts with a header each (kind, version,
//! its size, bytes that follow, …, PTX version, GPU). What does not look so ends the reading, and nothing is said then.

use std::{collections::BTreeSet, fs::File, os::unix::fs::FileExt};

use serde::{Deserialize, Serialize};

use super::cuda::Cuda;

const MAGIC: u32 = 0xba55_ed50;
const HEADER: usize = 16;
const PART_HEADER: usize = 32;

/// Headers, of fat binaries and of their parts, that are looked at in one file. They repeat: cuBLAS has 1,780 parts, of 11
/// kinds, all of them in the first 22.
const MAX_HEADERS: usize = 1_024;

/// Bytes between two fat binaries, for alignment.
const MAX_GAP: u64 = 64;

/// For which GPUs a file has code. A GPU is named by its compute capability without the dot: 80 is 8.0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuCode {
    /// Compiled for these.
    pub compiled: BTreeSet<u32>,
    /// As PTX for these and all later ones.
    pub ptx: BTreeSet<u32>,
    /// The newest version of PTX in it, as major and minor.
    pub ptx_version: Option<(u16, u16)>,
}

/// How a file serves a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serves {
    /// It has compiled code.
    Compiled,
    /// It has PTX only, which the driver compiles at first use.
    Ptx,
    /// It has nothing that runs there.
    Nothing,
}

impl GpuCode {
    /// Reads the headers of the fat binaries at `places` (offset and length in bytes) in `file`; `None` where there
    /// are none.
    pub fn read(file: &File, places: &[(u64, u64)]) -> Option<Self> {
        let mut code = Self::default();
        let mut left = MAX_HEADERS;
        for (start, length) in places {
            code.read_place(file, *start, start.saturating_add(*length), &mut left);
        }
        (!code.compiled.is_empty() || !code.ptx.is_empty()).then_some(code)
    }

    fn read_place(&mut self, file: &File, start: u64, end: u64, left: &mut usize) -> Option<()> {
        let (mut at, mut gap) = (start, 0);
        while holds(at, HEADER, end) && gap <= MAX_GAP {
            let header: [u8; HEADER] = bytes(file, at)?;
            if word(&header, 0) != MAGIC {
                (at, gap) = (at + 8, gap + 8);
                continue;
            }
            gap = 0;
            let mut part = at.checked_add(size(half(&header, 6).into(), HEADER, left)?)?;
            at = part.checked_add(long(&header, 8))?;
            while holds(part, PART_HEADER, at.min(end)) {
                let header: [u8; PART_HEADER] = bytes(file, part)?;
                self.take(&header);
                let size = size(word(&header, 4), PART_HEADER, left)?;
                part = part.checked_add(size)?.checked_add(long(&header, 8))?;
            }
        }
        Some(())
    }

    fn take(&mut self, header: &[u8; PART_HEADER]) {
        let gpu = word(header, 28);
        // 3.0 to 99.9: anything else is not what it is taken for.
        if !(30..1_000).contains(&gpu) {
            return;
        }
        match half(header, 0) {
            1 => {
                self.ptx.insert(gpu);
                let version = (half(header, 26), half(header, 24));
                self.ptx_version = self.ptx_version.max(Some(version).filter(|(major, _)| *major < 100));
            }
            2 => {
                self.compiled.insert(gpu);
            }
            _ => {}
        }
    }

    /// How it serves the GPU. Compiled code runs on later GPUs of its generation, PTX on all later ones.
    pub fn serves(&self, gpu: u32) -> Serves {
        if self.compiled.iter().any(|code| code / 10 == gpu / 10 && *code <= gpu) {
            Serves::Compiled
        } else if self.ptx.iter().any(|code| *code <= gpu) {
            Serves::Ptx
        } else {
            Serves::Nothing
        }
    }

    /// The CUDA whose driver is the first to compile its PTX (PTX ISA, release notes): 8.0 to 8.5 came with 12.0 to
    /// 12.5, then 8.6 with 12.7.
    pub fn ptx_needs(&self) -> Option<Cuda> {
        let (major, minor) = self.ptx_version?;
        let (major, minor) = (u32::from(major), u32::from(minor));
        match major {
            7 => Some(Cuda(11_000 + minor * 10)),
            8 if minor <= 5 => Some(Cuda(12_000 + minor * 10)),
            8 => Some(Cuda(12_010 + minor * 10)),
            9 => Some(Cuda(13_000 + minor * 10)),
            _ => None,
        }
    }
}

/// The compute capability of a GPU by its model, as NVML names it; `None` for one not known here.
pub fn compute_capability(model: &str) -> Option<u32> {
    const MODELS: &[(u32, &[&str])] = &[
        (60, &["P100"]),
        (61, &["P4", "P40", "P6"]),
        (70, &["V100", "V100S"]),
        (75, &["T4", "T4G"]),
        (80, &["A100", "A100X", "A800", "A30", "A30X"]),
        (86, &["A10", "A10G", "A10M", "A16", "A2", "A40", "3090", "A4000", "A5000", "A6000"]),
        (89, &["L2", "L20", "L4", "L40", "L40S", "4090"]),
        (90, &["H100", "H200", "H800", "H20", "GH200"]),
        (100, &["B100", "B200", "GB200"]),
        (103, &["B300", "GB300"]),
        (120, &["5090"]),
    ];
    let mut words = model.split(|c: char| !c.is_ascii_alphanumeric());
    words.find_map(|word| MODELS.iter().find(|(_, models)| models.contains(&word)).map(|(gpu, _)| *gpu))
}

/// Whether that many bytes at `at` lie before `end`.
fn holds(at: u64, length: usize, end: u64) -> bool {
    at.checked_add(length as u64).is_some_and(|at| at <= end)
}

/// The size that a header says it has, where it can be true and `left` lets one more be looked at.
fn size(said: u32, least: usize, left: &mut usize) -> Option<u64> {
    *left = left.checked_sub(1)?;
    (said as usize >= least).then_some(said.into())
}

fn bytes<const N: usize>(file: &File, at: u64) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    file.read_exact_at(&mut bytes, at).ok()?;
    Some(bytes)
}

fn half(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from(half(bytes, at)) | u32::from(half(bytes, at + 2)) << 16
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

/// A fat binary with a part for each: kind, GPU.
#[cfg(test)]
pub(crate) fn fat_binary(parts: &[(u16, u32)], ptx: (u16, u16)) -> Vec<u8> {
    let mut body = Vec::new();
    for (kind, gpu) in parts {
        body.extend([kind.to_le_bytes(), [1, 1]].concat());
        body.extend(64_u32.to_le_bytes());
        body.extend(8_u64.to_le_bytes());
        body.extend([0; 8]);
        body.extend([ptx.1.to_le_bytes(), ptx.0.to_le_bytes()].concat());
        body.extend(gpu.to_le_bytes());
        body.extend([0; 32 + 8]);
    }
    let mut bytes = [MAGIC.to_le_bytes(), [1, 0, 16, 0]].concat();
    bytes.extend((body.len() as u64).to_le_bytes());
    bytes.extend(body);
    bytes
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    fn read(bytes: &[u8]) -> Option<GpuCode> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        GpuCode::read(&file, &[(0, bytes.len() as u64)])
    }

    #[test]
    fn parts_say_for_which_gpus_they_are() {
        let two =
            [fat_binary(&[(2, 80), (2, 86)], (0, 0)), vec![0; 8], fat_binary(&[(1, 90), (2, 90)], (8, 7))];
        let code = read(&two.concat()).unwrap();
        assert_eq!((code.compiled.clone(), code.ptx.clone()), ([80, 86, 90].into(), [90].into()));
        assert_eq!(code.ptx_needs(), Some(Cuda(12_080)));
        let serves = [70, 75, 80, 89, 90, 100].map(|gpu| code.serves(gpu));
        use Serves::{Compiled, Nothing, Ptx};
        assert_eq!(serves, [Nothing, Nothing, Compiled, Compiled, Compiled, Ptx]);
        assert_eq!(read(b"no such thing, and long enough to be one"), None);
    }

    #[test]
    fn versions_of_ptx_are_those_of_cuda() {
        let needs = |version| GpuCode { ptx_version: Some(version), ..GpuCode::default() }.ptx_needs();
        let seen = [(7, 8), (8, 0), (8, 5), (8, 6), (8, 8), (9, 0)].map(|version| needs(version).unwrap().0);
        assert_eq!(seen, [11_080, 12_000, 12_050, 12_070, 12_090, 13_000]);
        assert_eq!(needs((10, 0)), None);
    }

    #[test]
    fn models_are_known_by_a_word_of_their_name() {
        let known =
            ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "Tesla T4", "NVIDIA L40S", "NVIDIA A10"];
        assert_eq!(known.map(compute_capability), [80, 90, 75, 89, 86].map(Some));
        assert_eq!(compute_capability("NVIDIA Something 1000"), None);
    }

    /// A header that says of itself and of what follows that they have no bytes would be read again and again.
    #[test]
    fn sizes_that_lead_nowhere_or_around_end_the_reading() {
        let with = |at: usize, bytes: &[u8]| {
            let mut binary = [fat_binary(&[(2, 80)], (0, 0)), fat_binary(&[(2, 90)], (0, 0))].concat();
            binary[at..at + bytes.len()].copy_from_slice(bytes);
            read(&binary).map(|code| code.compiled)
        };
        assert_eq!(with(6, &[16, 0]), Some([80, 90].into()));
        // Of the fat binary: its header's size, and what follows it.
        assert_eq!(with(6, &[0; 10]), None);
        assert_eq!(with(8, &u64::MAX.to_le_bytes()), None);
        assert_eq!(with(8, &(u64::MAX - 16).to_le_bytes()), Some([80].into()));
        // The same of its first part.
        assert_eq!(with(20, &[0; 12]), Some([80].into()));
        assert_eq!(with(24, &u64::MAX.to_le_bytes()), Some([80].into()));
        // No end of fat binaries with nothing in them, and then one that would be found.
        let empty = fat_binary(&[], (0, 0)).repeat(MAX_HEADERS);
        assert_eq!(read(&[empty, fat_binary(&[(2, 80)], (0, 0))].concat()), None);
    }

    proptest! {
        #[test]
        fn any_sizes_are_read_to_an_end(sizes: [u8; 10], part: [u8; 12]) {
            let mut bytes = fat_binary(&[(2, 80), (1, 90)], (8, 7)).repeat(3);
            bytes[6..16].copy_from_slice(&sizes);
            bytes[20..32].copy_from_slice(&part);
            let _ = read(&bytes);
        }

        #[test]
        fn any_bytes_are_read_to_an_end(tail in proptest::collection::vec(any::<u8>(), 0..400), at in 0..200_usize, value: u8) {
            let mut bytes = [fat_binary(&[(2, 80), (1, 90)], (8, 7)), tail].concat();
            let at = at % bytes.len();
            bytes[at] = value;
            let _ = read(&bytes);
        }
    }
}
