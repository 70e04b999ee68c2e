//! Memory that graphs allocate: at addresses that it has from the beginning, in room that is taken when a graph is launched
//! first, and kept in reserve afterwards.

use std::{collections::HashMap, ffi::c_int};

use crate::{
    context::Context,
    driver::{Driver, Tables, charge, driver, tables},
    ffi::{INVALID_VALUE, In, OUT_OF_MEMORY, Out, Outcome, api},
    graph::{AUTO_FREE, What},
    memory::{Block, Kind},
};

/// Memory that a graph allocates, at an address that it has from the beginning.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocation {
    pub gpu: usize,
    pub address: u64,
    pub bytes: u64,
    pub taken: u64,
}

/// Memory of graphs on a GPU.
#[derive(Clone, Copy, Default)]
struct Figures {
    used: u64,
    used_high: u64,
    reserved: u64,
    reserved_high: u64,
}

/// Memory of the process's graphs.
#[derive(Default)]
pub(crate) struct GraphMemory {
    by_gpu: HashMap<usize, Figures>,
    /// What graphs allocate, by address.
    allocations: HashMap<u64, Allocation>,
}

impl GraphMemory {
    /// Whether an address is one that a graph allocates.
    pub(crate) fn knows(&self, address: u64) -> bool {
        self.allocations.contains_key(&address)
    }

    fn on(&mut self, gpu: usize) -> &mut Figures {
        self.by_gpu.entry(gpu).or_default()
    }
}

impl Tables {
    /// Plans memory for a graph.
    pub(crate) fn graph_allocation(
        &mut self,
        driver: &Driver,
        gpu: usize,
        bytes: u64,
    ) -> Outcome<Allocation> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let taken = driver.rounded(gpu, bytes)?;
        let address = self.space.take(bytes, 512).ok_or(OUT_OF_MEMORY)?;
        let allocation = Allocation { gpu, address, bytes, taken };
        self.graphs.memory.allocations.insert(address, allocation);
        Ok(allocation)
    }

    /// Makes sure that there is room for what a launch allocates, and that nothing of it is live from before.
    pub(crate) fn prepare(&mut self, driver: &Driver, exec: u64) -> Outcome {
        let executable = self.graphs.executables.get(exec, INVALID_VALUE)?;
        let live: Vec<u64> = executable.live.iter().copied().collect();
        let allocates: Vec<Result<Allocation, u64>> = executable
            .steps
            .iter()
            .filter_map(|(_, what)| match what {
                What::Allocate(allocation) => Some(Ok(*allocation)),
                What::Free { address } => Some(Err(*address)),
                _ => None,
            })
            .collect();
        if !live.is_empty() {
            if executable.flags & AUTO_FREE == 0 {
                return Err(INVALID_VALUE);
            }
            for address in live {
                self.free_in_graph(exec, address);
            }
        }
        // The most that is in use at once, on each GPU.
        let mut now: HashMap<usize, (i128, i128)> = HashMap::new();
        for step in allocates {
            let (gpu, change) = match step {
                Ok(allocation) => (allocation.gpu, i128::from(allocation.taken)),
                Err(address) => {
                    let freed = self.graphs.memory.allocations.get(&address).ok_or(INVALID_VALUE)?;
                    (freed.gpu, -i128::from(freed.taken))
                }
            };
            let (used, most) = now.entry(gpu).or_default();
            *used += change;
            *most = (*most).max(*used);
        }
        for (gpu, (_, most)) in now {
            let memory = self.graphs.memory.on(gpu);
            let wanted = i128::from(memory.used) + most - i128::from(memory.reserved);
            if let Ok(more) = u64::try_from(wanted)
                && more > 0
            {
                charge(driver, self, gpu, more)?;
                let memory = self.graphs.memory.on(gpu);
                memory.reserved += more;
                memory.reserved_high = memory.reserved_high.max(memory.reserved);
            }
        }
        Ok(())
    }

    /// A launch allocates.
    pub(crate) fn allocate_in_graph(
        &mut self,
        exec: u64,
        context: Option<&'static Context>,
        allocation: Allocation,
    ) -> Outcome {
        let memory = self.graphs.memory.on(allocation.gpu);
        memory.used += allocation.taken;
        memory.used_high = memory.used_high.max(memory.used);
        let block = Block::new(allocation.bytes, allocation.gpu, context, Kind::Graph { exec });
        self.blocks.insert(allocation.address, block);
        self.graphs.executables.get(exec, INVALID_VALUE)?.live.insert(allocation.address);
        Ok(())
    }

    /// Frees memory that a launch allocated. It stays in reserve.
    pub(crate) fn free_in_graph(&mut self, exec: u64, address: u64) {
        if let Ok(executable) = self.graphs.executables.get(exec, INVALID_VALUE) {
            executable.live.remove(&address);
        }
        if self.blocks.remove(address).is_some()
            && let Some(allocation) = self.graphs.memory.allocations.get(&address).copied()
        {
            let memory = self.graphs.memory.on(allocation.gpu);
            memory.used = memory.used.saturating_sub(allocation.taken);
        }
    }

    /// Gives the reserve of graphs on a GPU back; true if there was any.
    pub(crate) fn trim_graphs(&mut self, driver: &Driver, gpu: usize) -> bool {
        let Some(memory) = self.graphs.memory.by_gpu.get_mut(&gpu) else { return false };
        let unused = memory.reserved.saturating_sub(memory.used);
        memory.reserved -= unused;
        driver.discharge(gpu, unused);
        unused > 0
    }
}

api! {
    fn cuDeviceGraphMemTrim(device: c_int) {
        let driver = driver()?;
        let gpu = driver.gpu(device)?;
        driver.tables().trim_graphs(driver, gpu);
        Ok(())
    }

    fn cuDeviceGetGraphMemAttribute(device: c_int, which: c_int, value: Out<u64>) {
        let gpu = driver()?.gpu(device)?;
        let memory = *tables()?.graphs.memory.on(gpu);
        value.put(match which {
            0 => memory.used,
            1 => memory.used_high,
            2 => memory.reserved,
            3 => memory.reserved_high,
            _ => return Err(INVALID_VALUE),
        })
    }

    fn cuDeviceSetGraphMemAttribute(device: c_int, which: c_int, value: In<u64>) {
        let gpu = driver()?.gpu(device)?;
        if value.get()? != 0 {
            return Err(INVALID_VALUE);
        }
        let mut tables = tables()?;
        let memory = tables.graphs.memory.on(gpu);
        match which {
            1 => memory.used_high = memory.used,
            3 => memory.reserved_high = memory.reserved,
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    }
}
