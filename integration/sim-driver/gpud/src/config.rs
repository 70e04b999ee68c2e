//! The machine that is simulated: a small YAML file, or a number of GPUs that are all alike. It becomes the list of
//! GPUs that the daemon serves.

use std::{fs, path::Path};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::{
    models::model,
    state::{Facts, MAX_GPUS, MAX_LINKS, Peer},
    time::Settings,
};

/// The one version of the file that this build reads.
const VERSION: u32 = 1;

/// A page of text is enough for any machine.
const MAX_BYTES: u64 = 1 << 20;

/// CUDA versions of driver branches (release notes of the CUDA toolkit, "CUDA Driver" table).
const BRANCHES: [(u32, i32); 9] = [
    (470, 11_040),
    (525, 12_000),
    (535, 12_020),
    (550, 12_040),
    (555, 12_050),
    (570, 12_080),
    (575, 12_090),
    (580, 13_000),
    (615, 13_040),
];

/// The file. Every key but `version` has a default.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Machine {
    /// Format version, 1.
    pub version: u32,
    /// Version of the driver, which ends the names of its library files.
    #[serde(default = "default_driver")]
    pub driver: String,
    /// CUDA version of the driver, such as 12040; by default that of the driver's branch.
    #[serde(default)]
    pub cuda: Option<i32>,
    /// The GPUs.
    #[serde(default)]
    pub gpus: Vec<Group>,
    /// How GPUs are connected.
    #[serde(default)]
    pub links: Vec<Links>,
}

/// One GPU, or several that are alike.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Group {
    /// How many.
    pub count: u32,
    /// Model name.
    pub model: String,
    /// Memory in MiB, as NVML tells it; by default the model's.
    pub memory_mib: Option<u64>,
    /// Memory in MiB that the driver keeps for itself: used from the start, and not in what CUDA tells.
    pub reserved_mib: u64,
    /// Memory in MiB that a process takes with its first context.
    pub context_mib: u64,
    /// Memory in KiB that a loaded module takes.
    pub module_kib: u64,
    /// A block of memory takes a multiple of this, in KiB; with 0, of 512 bytes.
    pub granularity_kib: u64,
    /// UUID; only for a single GPU. By default one that counts.
    pub uuid: Option<String>,
    /// Number of the device node; only for a single GPU. By default one that counts.
    pub minor: Option<u32>,
    /// PCI address, `00000000:3b:00.0`; only for a single GPU. By default one that counts.
    pub pci: Option<String>,
    /// NUMA node, if any.
    pub numa: Option<u32>,
    /// CPUs of that node, `0-15,32-47`; by default all of this machine.
    pub cpus: String,
    /// Number of the PCI switch that the GPU is behind, if any.
    pub pci_switch: Option<u32>,
    /// Microseconds that a process has the GPU while another one waits.
    pub time_slice_us: u32,
    /// Microseconds that it takes to go to another process.
    pub switch_us: u32,
}

/// A set of GPUs that are connected with each other.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Links {
    /// Indices of the GPUs.
    pub gpus: Vec<usize>,
    /// How.
    pub by: By,
    /// Links between each two GPUs, or of each GPU to the switches.
    pub each: u32,
    /// NVLink version: 3 for A100, 4 for H100.
    #[serde(default = "default_nvlink")]
    pub nvlink: u32,
}

/// How GPUs are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum By {
    /// Directly.
    Nvlink,
    /// Through switches.
    Nvswitch,
}

fn default_driver() -> String {
    "550.163.01".into()
}

fn default_nvlink() -> u32 {
    4
}

impl Default for Group {
    fn default() -> Self {
        Self {
            count: 1,
            model: "NVIDIA A100-SXM4-40GB".into(),
            memory_mib: None,
            reserved_mib: 0,
            context_mib: 0,
            module_kib: 0,
            granularity_kib: 2048,
            uuid: None,
            minor: None,
            pci: None,
            numa: Some(0),
            cpus: String::new(),
            pci_switch: None,
            time_slice_us: 2000,
            switch_us: 10,
        }
    }
}

impl Machine {
    /// A machine with these GPUs and the default driver.
    pub fn with(gpus: Vec<Group>) -> Self {
        Self { version: VERSION, driver: default_driver(), cuda: None, gpus, links: vec![] }
    }

    /// Reads the file.
    pub fn load(path: &Path) -> Result<Self> {
        let at = || path.display().to_string();
        let size = fs::metadata(path).with_context(at)?.len();
        ensure!(size <= MAX_BYTES, "{}: {size} bytes are too many for a machine", at());
        Self::parse(&fs::read_to_string(path).with_context(at)?).with_context(at)
    }

    /// Reads the file's text.
    pub fn parse(text: &str) -> Result<Self> {
        let machine: Self = serde_saphyr::from_str(text)?;
        ensure!(machine.version == VERSION, "version {} is not known, only {VERSION}", machine.version);
        machine.facts()?;
        Ok(machine)
    }

    /// CUDA version of the driver.
    pub fn cuda(&self) -> i32 {
        let branch = self.branch();
        self.cuda.unwrap_or_else(|| {
            let known = BRANCHES.iter().rev().find(|(from, _)| *from <= branch);
            known.map_or(BRANCHES[0].1, |(_, cuda)| *cuda)
        })
    }

    /// Branch of the driver, such as 550.
    pub fn branch(&self) -> u32 {
        self.driver.split('.').next().and_then(|first| first.parse().ok()).unwrap_or(0)
    }

    /// The GPUs, in the order of the file, or what is wrong with them.
    pub fn facts(&self) -> Result<Vec<Facts>> {
        ensure!(
            !self.driver.is_empty()
                && self.driver.len() < 32
                && self.driver.bytes().all(|c| c.is_ascii_digit() || c == b'.')
                && self.branch() > 0,
            "driver {:?} is no driver version, such as 550.163.01",
            self.driver
        );
        let mut all: Vec<Facts> = vec![];
        for group in &self.gpus {
            let single = group.uuid.is_some() || group.minor.is_some() || group.pci.is_some();
            ensure!(
                group.count == 1 || !single,
                "uuid, minor and pci are one GPU's own; leave count at 1 or let them count by themselves"
            );
            for _ in 0..group.count {
                ensure!(all.len() < MAX_GPUS, "more than {MAX_GPUS} GPUs");
                let facts = group.facts(u32::try_from(all.len())?)?;
                let twice = all.iter().find(|other| {
                    other.uuid == facts.uuid || other.minor == facts.minor || other.pci() == facts.pci()
                });
                ensure!(twice.is_none(), "two GPUs with the same uuid, minor or pci");
                all.push(facts);
            }
        }
        for links in &self.links {
            links.connect(&mut all)?;
        }
        Ok(all)
    }
}

impl Group {
    fn facts(&self, at: u32) -> Result<Facts> {
        let model = model(&self.model);
        let (total, reserved) =
            (self.memory_mib.unwrap_or(model.memory_mib) << 20, self.reserved_mib.saturating_mul(1 << 20));
        ensure!(reserved < total, "reservedMib leaves nothing of the memory");
        ensure!(self.time_slice_us > 0, "timeSliceUs must be at least 1");
        let (domain, bus, device) = match &self.pci {
            Some(text) => pci(text)?,
            None => (0, 0x10 + at, 0),
        };
        let mut facts = Facts {
            uuid: match &self.uuid {
                Some(text) => uuid(text)?,
                None => counted_uuid(at),
            },
            name: [0; 96],
            total,
            reserved,
            context: self.context_mib << 20,
            module: self.module_kib << 10,
            granularity: if self.granularity_kib == 0 { 512 } else { self.granularity_kib << 10 },
            minor: self.minor.unwrap_or(at),
            pci_domain: domain,
            pci_bus: bus,
            pci_device: device,
            pci_id: model.pci_id,
            pci_subsystem: model.pci_subsystem,
            pci_switch: self.pci_switch.map_or(-1, |n| i32::try_from(n).unwrap_or(-1)),
            numa: self.numa.map_or(-1, |n| i32::try_from(n).unwrap_or(-1)),
            cpus: cpus(&self.cpus)?,
            major: model.capability.0,
            minor_capability: model.capability.1,
            multiprocessors: model.multiprocessors,
            clock_mhz: model.clock_mhz,
            memory_clock_mhz: model.memory_clock_mhz,
            bus_bits: model.bus_bits,
            l2_kib: model.l2_kib,
            milliwatts: model.watts * 1000,
            mig_capable: u32::from(model.mig),
            nvlink: 0,
            links: [Peer::NONE; MAX_LINKS],
            turns: Settings {
                slice: u64::from(self.time_slice_us) * 1000,
                switch: u64::from(self.switch_us) * 1000,
            },
        };
        ensure!(
            !self.model.is_empty() && self.model.len() < facts.name.len() && self.model.is_ascii(),
            "model {:?} is empty or too long",
            self.model
        );
        facts.name[..self.model.len()].copy_from_slice(self.model.as_bytes());
        Ok(facts)
    }
}

impl Links {
    fn connect(&self, all: &mut [Facts]) -> Result<()> {
        ensure!(self.gpus.len() > 1 || self.by == By::Nvswitch, "links need at least two gpus");
        for (at, &gpu) in self.gpus.iter().enumerate() {
            ensure!(gpu < all.len(), "links name GPU {gpu}, there are {}", all.len());
            ensure!(!self.gpus[..at].contains(&gpu), "links name GPU {gpu} twice");
            let peers: Vec<Peer> = match self.by {
                By::Nvswitch => vec![Peer::SWITCH],
                By::Nvlink => {
                    self.gpus.iter().filter(|other| **other != gpu).map(|other| Peer::gpu(*other)).collect()
                }
            };
            let facts = &mut all[gpu];
            facts.nvlink = self.nvlink;
            for peer in peers.into_iter().flat_map(|peer| (0..self.each).map(move |_| peer)) {
                let free = facts.links.iter_mut().find(|link| **link == Peer::NONE);
                match free {
                    Some(link) => *link = peer,
                    None => bail!("GPU {gpu} has more than {MAX_LINKS} links"),
                }
            }
        }
        Ok(())
    }
}

/// The UUID that the GPU at this place gets when the file names none.
fn counted_uuid(at: u32) -> [u8; 16] {
    let mut uuid = *b"SIMUgpu\0\0\0\0\0\0\0\0\0";
    uuid[15] = u8::try_from(at).unwrap_or(u8::MAX);
    uuid
}

fn uuid(text: &str) -> Result<[u8; 16]> {
    let digits: Vec<u8> = text
        .strip_prefix("GPU-")
        .filter(|rest| rest.len() == 36)
        .into_iter()
        .flat_map(str::chars)
        .filter(|c| *c != '-')
        .filter_map(|c| c.to_digit(16).and_then(|digit| u8::try_from(digit).ok()))
        .collect();
    ensure!(digits.len() == 32, "uuid {text:?} must read GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx");
    let mut uuid = [0; 16];
    for (byte, pair) in uuid.iter_mut().zip(digits.chunks(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    Ok(uuid)
}

fn pci(text: &str) -> Result<(u32, u32, u32)> {
    let parse = || {
        let mut parts = text.strip_suffix(".0")?.split(':');
        let mut next = || u32::from_str_radix(parts.next()?, 16).ok();
        let address = (next()?, next()?, next()?);
        (parts.next().is_none() && address.1 < 256 && address.2 < 32).then_some(address)
    };
    parse().with_context(|| format!("pci {text:?} must read 00000000:3b:00.0"))
}

/// A list of CPUs as a bitmap of 256; of none, all that this machine has.
fn cpus(text: &str) -> Result<[u64; 4]> {
    let mut bits = [0; 4];
    if text.is_empty() {
        let all = std::thread::available_parallelism().map_or(1, usize::from);
        return cpus(&format!("0-{}", all.min(256) - 1));
    }
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let range = part.split_once('-').unwrap_or((part, part));
        let (Ok(from), Ok(to)) = (range.0.trim().parse::<usize>(), range.1.trim().parse::<usize>()) else {
            bail!("cpus {text:?} must read like 0-15,32-47");
        };
        ensure!(from <= to && to < 256, "cpus {text:?}: CPUs go from 0 to 255, lower before higher");
        for cpu in from..=to {
            bits[cpu / 64] |= 1 << (cpu % 64);
        }
    }
    Ok(bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_alone_is_a_machine_without_gpus() {
        let machine = Machine::parse("version: 1").unwrap();
        assert!(machine.facts().unwrap().is_empty());
        assert_eq!((machine.driver.as_str(), machine.cuda()), ("550.163.01", 12_040));
    }

    #[test]
    fn gpus_count_by_themselves_and_may_be_mixed() {
        let machine = Machine::parse(
            "version: 1\ndriver: 580.82.07\ngpus:\n- {count: 2, model: NVIDIA H100 80GB HBM3, reservedMib: 500}\n\
             - {model: Tesla T4, uuid: GPU-00112233-4455-6677-8899-aabbccddeeff, minor: 9, pci: '00000001:AF:00.0', cpus: '0-1,64', numa: 1}\n\
             links:\n- {gpus: [0, 1], by: nvlink, each: 4}\n",
        )
        .unwrap();
        assert_eq!(machine.cuda(), 13_000);
        let facts = machine.facts().unwrap();
        assert_eq!(facts[1].total - facts[1].usable(), 500 << 20);
        assert_eq!(facts.iter().map(|gpu| gpu.minor).collect::<Vec<_>>(), [0, 1, 9]);
        assert_eq!(facts[2].uuid[..3], [0, 0x11, 0x22]);
        assert_eq!(facts[2].pci(), "00000001:AF:00.0");
        assert_eq!((facts[2].cpus, facts[2].major), ([3, 1, 0, 0], 7));
        assert_eq!(facts[0].links.iter().filter(|link| **link == Peer::gpu(1)).count(), 4);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, named) in [
            ("version: 2", "version 2"),
            ("version: 1\ngpu: []", "gpu"),
            ("version: 1\ndriver: latest", "latest"),
            ("version: 1\ngpus: [{count: 17}]", "16 GPUs"),
            ("version: 1\ngpus: [{count: 2, minor: 1}]", "count"),
            ("version: 1\ngpus: [{minor: 1}, {minor: 1}]", "same"),
            ("version: 1\ngpus: [{uuid: GPU-1}]", "GPU-xxxxxxxx"),
            ("version: 1\ngpus: [{pci: '3b:00.0'}]", "00000000:3b:00.0"),
            ("version: 1\ngpus: [{cpus: 9-3}]", "lower"),
            ("version: 1\ngpus: [{memoryMib: 10, reservedMib: 10}]", "reservedMib"),
            ("version: 1\ngpus: [{timeSliceUs: 0}]", "timeSliceUs"),
            ("version: 1\ngpus: [{}]\nlinks: [{gpus: [0, 1], by: nvlink, each: 1}]", "GPU 1"),
            ("version: 1\ngpus: [{count: 2}]\nlinks: [{gpus: [0, 1], by: nvlink, each: 19}]", "18 links"),
        ] {
            let error = format!("{:#}", Machine::parse(text).unwrap_err());
            assert!(error.contains(named), "{text:?}: {error}");
        }
    }
}
