//! A few GPU models, with the facts that programs ask for (NVIDIA's data sheets and `deviceQuery` outputs).

/// What all GPUs of a model have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model {
    /// As NVML and CUDA print it.
    pub name: &'static str,
    /// Memory in MiB, as NVML tells it.
    pub memory_mib: u64,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Highest clock of the multiprocessors in MHz.
    pub clock_mhz: u32,
    /// Highest clock of the memory in MHz.
    pub memory_clock_mhz: u32,
    /// Width of the memory bus in bits.
    pub bus_bits: u32,
    /// L2 cache in KiB.
    pub l2_kib: u32,
    /// Power limit in watts.
    pub watts: u32,
    /// PCI device and vendor, as in a configuration header.
    pub pci_id: u32,
    /// PCI subsystem.
    pub pci_subsystem: u32,
    /// Whether it can be split into MIG instances.
    pub mig: bool,
}

const MODELS: [Model; 7] = [
    Model {
        name: "NVIDIA A100-SXM4-40GB",
        memory_mib: 40960,
        capability: (8, 0),
        multiprocessors: 108,
        clock_mhz: 1410,
        memory_clock_mhz: 1215,
        bus_bits: 5120,
        l2_kib: 40960,
        watts: 400,
        pci_id: 0x20b0_10de,
        pci_subsystem: 0x134f_10de,
        mig: true,
    },
    Model {
        name: "NVIDIA A100-SXM4-80GB",
        memory_mib: 81920,
        capability: (8, 0),
        multiprocessors: 108,
        clock_mhz: 1410,
        memory_clock_mhz: 1593,
        bus_bits: 5120,
        l2_kib: 40960,
        watts: 400,
        pci_id: 0x20b2_10de,
        pci_subsystem: 0x147f_10de,
        mig: true,
    },
    Model {
        name: "NVIDIA H100 80GB HBM3",
        memory_mib: 81559,
        capability: (9, 0),
        multiprocessors: 132,
        clock_mhz: 1980,
        memory_clock_mhz: 2619,
        bus_bits: 5120,
        l2_kib: 51200,
        watts: 700,
        pci_id: 0x2330_10de,
        pci_subsystem: 0x16c1_10de,
        mig: true,
    },
    Model {
        name: "NVIDIA H200",
        memory_mib: 143_771,
        capability: (9, 0),
        multiprocessors: 132,
        clock_mhz: 1980,
        memory_clock_mhz: 3201,
        bus_bits: 6144,
        l2_kib: 61440,
        watts: 700,
        pci_id: 0x2335_10de,
        pci_subsystem: 0x18be_10de,
        mig: true,
    },
    Model {
        name: "NVIDIA B200",
        memory_mib: 183_359,
        capability: (10, 0),
        multiprocessors: 148,
        clock_mhz: 1965,
        memory_clock_mhz: 3996,
        bus_bits: 8192,
        l2_kib: 129_536,
        watts: 1000,
        pci_id: 0x2901_10de,
        pci_subsystem: 0x1999_10de,
        mig: true,
    },
    Model {
        name: "NVIDIA L40S",
        memory_mib: 46068,
        capability: (8, 9),
        multiprocessors: 142,
        clock_mhz: 2520,
        memory_clock_mhz: 9001,
        bus_bits: 384,
        l2_kib: 98304,
        watts: 350,
        pci_id: 0x26b9_10de,
        pci_subsystem: 0x1851_10de,
        mig: false,
    },
    Model {
        name: "Tesla T4",
        memory_mib: 15360,
        capability: (7, 5),
        multiprocessors: 40,
        clock_mhz: 1590,
        memory_clock_mhz: 5001,
        bus_bits: 256,
        l2_kib: 4096,
        watts: 70,
        pci_id: 0x1eb8_10de,
        pci_subsystem: 0x12a2_10de,
        mig: false,
    },
];

/// The model of that name; of an unknown one, the facts of the first.
pub(crate) fn model(name: &str) -> Model {
    MODELS.into_iter().find(|model| model.name == name).unwrap_or(MODELS[0])
}
