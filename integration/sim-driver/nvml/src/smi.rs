//! The table that `nvidia-smi` of driver 550 asks NVML for: without it, it has no PCI addresses, no list of processes and no topology.
//! Its slots are known from what the program does with them; the others are empty, which it minds.

use std::ffi::{c_char, c_int, c_void};

use crate::{
    device::{Device, SAME_NODE, SAME_SWITCH, at_pci, find, level},
    ffi::{NOT_FOUND, Out, Outcome, Text, api, put_text},
    memory::{Running, running},
    pointers::status,
    system::library,
};

/// c4fe3e6c-…: the rest of the ID is not looked at.
const TABLE: [u8; 4] = [0xc4, 0xfe, 0x3e, 0x6c];

/// Slots of the table of 550.163.01; the first holds its size in bytes.
const SLOTS: usize = 251;

/// A process, as slots 213 to 215 tell it.
#[derive(Clone, Copy)]
#[repr(C)]
struct Process {
    pid: u32,
    padding: u32,
    bytes: u64,
    gpu_instance: i32,
    compute_instance: i32,
    protected_bytes: u64,
    name: [u8; 4096],
}

/// What `nvidia-smi` takes from one entry to the next.
const _: () = assert!(size_of::<Process>() == 4128 && std::mem::offset_of!(Process, name) == 32);

/// Slot 81: PCI address of the GPU at an index.
extern "C" fn pci(index: u32, to: Out<u8>, length: u32) -> c_int {
    let answer = || -> Outcome {
        let library = library()?;
        let gpu = *library.gpus.get(index as usize).ok_or(NOT_FOUND)?;
        let facts = &library.state().gpus[gpu].facts;
        let text = format!("{:08x}:{:02x}:{:02x}.0", facts.pci_domain, facts.pci_bus, facts.pci_device);
        put_text(to, length, text.as_bytes())
    };
    status(answer())
}

/// Slot 23: how far two GPUs are from each other over PCI, by their addresses: 0 behind one switch, 3 on one NUMA node, 4
/// neither.
extern "C" fn distance(one: Text, other: Text, to: Out<u32>) -> c_int {
    let answer = || -> Outcome {
        let library = library()?;
        let (one, other) = (at_pci(&library, one)?, at_pci(&library, other)?);
        to.put(match level(one, other) {
            SAME_SWITCH => 0,
            SAME_NODE => 3,
            _ => 4,
        })
    };
    status(answer())
}

/// Slot 213: processes that compute.
extern "C" fn computing(device: Device, count: Out<u32>, to: Out<Process>) -> c_int {
    let answer = || -> Outcome {
        let processes = running(&find(device)?).into_iter().map(|process| {
            let mut name = [0; 4096];
            let line = std::fs::read(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
            let text = line.split(|byte| *byte == 0).next().unwrap_or_default();
            let length = text.len().min(name.len() - 1);
            name[..length].copy_from_slice(&text[..length]);
            let Running { pid, bytes } = process;
            Process {
                pid,
                padding: 0,
                bytes,
                gpu_instance: -1,
                compute_instance: -1,
                protected_bytes: 0,
                name,
            }
        });
        let processes: Vec<Process> = processes.collect();
        crate::ffi::put_list(count, to, &processes)
    };
    status(answer())
}

/// Slots 214 and 215: processes that draw.
extern "C" fn drawing(device: Device, count: Out<u32>, to: *const c_void) -> c_int {
    let _ = to;
    status(find(device).and_then(|_| count.put(0)))
}

/// The table.
#[repr(transparent)]
pub(crate) struct Table([usize; SLOTS]);

fn table() -> &'static Table {
    static MADE: std::sync::OnceLock<Table> = std::sync::OnceLock::new();
    MADE.get_or_init(|| {
        let mut slots = [0; SLOTS];
        slots[0] = size_of::<Table>();
        slots[23] = distance as *const c_char as usize;
        slots[81] = pci as *const c_char as usize;
        slots[213] = computing as *const c_char as usize;
        slots[214] = drawing as *const c_char as usize;
        slots[215] = drawing as *const c_char as usize;
        Table(slots)
    })
}

api! {
    fn nvmlInternalGetExportTable(to: Out<*const Table>, id: crate::ffi::In<[u8; 4]>) {
        if id.get()? != TABLE {
            return Err(NOT_FOUND);
        }
        to.put(table())
    }
}
