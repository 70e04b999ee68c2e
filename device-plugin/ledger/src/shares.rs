//! All shares of the node, as the folder shows them at one moment, and what they leave free. Reading needs no lock
//! and never fails as a whole: what cannot be read is reported one by one, and never counts as free.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use thiserror::Error;
use vcuda_config::{CORE_PER_GPU, GpuUuid};

use crate::{GpuFree, Inventory, RecordError, ShareName, ShareRecord};

/// The shares of the node.
#[derive(Debug, Default)]
pub struct Shares {
    /// Shares whose record could be read.
    pub records: BTreeMap<ShareName, ShareRecord>,
    /// Shares whose record could not be read. What they hold is unknown, so while there are any, nothing is free.
    pub unreadable: Vec<Unreadable>,
    /// Entries of the folder that are no shares. They hold nothing.
    pub foreign: Vec<PathBuf>,
}

/// A share that holds nobody knows what.
#[derive(Debug, Error)]
#[error(
    "share {name} cannot be read ({reason}), so what it holds is unknown and nothing new can be placed; \
     if its pod is gone remove {folder}, else delete the pod"
)]
pub struct Unreadable {
    /// The share.
    pub name: ShareName,
    /// Its folder.
    pub folder: PathBuf,
    /// Why.
    pub reason: RecordError,
}

impl Shares {
    /// Reads the folder of shares. A folder that does not exist holds none.
    ///
    /// # Errors
    ///
    /// When the folder itself cannot be listed.
    pub fn read(folder: &Path) -> io::Result<Self> {
        let mut shares = Self::default();
        let entries = match fs::read_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(shares),
            entries => entries?,
        };
        for entry in entries {
            let file_name = entry?.file_name();
            let Some(name) = file_name.to_str().and_then(|text| text.parse::<ShareName>().ok()) else {
                // Names with a leading dot are work in progress, see `Ledger::bind`.
                if !file_name.as_encoded_bytes().starts_with(b".") {
                    shares.foreign.push(folder.join(file_name));
                }
                continue;
            };
            match ShareRecord::load(folder, &name) {
                Ok(record) => {
                    shares.records.insert(name, record);
                }
                Err(reason) => {
                    let path = folder.join(name.as_str());
                    // Released while the folder was being read: gone is gone.
                    if fs::symlink_metadata(&path).is_ok() {
                        shares.unreadable.push(Unreadable { name, folder: path, reason });
                    }
                }
            }
        }
        Ok(shares)
    }

    /// What each GPU of `inventory` has left, in the inventory's order.
    ///
    /// # Errors
    ///
    /// A share that cannot be read may hold anything, so then nothing is known to be free.
    pub fn free<'a>(&self, inventory: &'a Inventory) -> Result<Vec<GpuFree<'a>>, &Unreadable> {
        match self.unreadable.first() {
            Some(unreadable) => Err(unreadable),
            None => Ok(free_beside(inventory, self.records.values())),
        }
    }
}

/// What `records` leave of each GPU. A GPU whose offer has shrunk below what was promised has nothing left.
pub(crate) fn free_beside<'a, 'r>(
    inventory: &'a Inventory,
    records: impl Iterator<Item = &'r ShareRecord>,
) -> Vec<GpuFree<'a>> {
    let mut held: BTreeMap<&GpuUuid, (u32, u64, usize)> = BTreeMap::new();
    for gpu in records.flat_map(|record| &record.gpus) {
        let (core, memory, shares) = held.entry(&gpu.uuid).or_default();
        *core = core.saturating_add(gpu.core);
        *memory = memory.saturating_add(gpu.memory_bytes);
        *shares += 1;
    }
    let left = |gpu: &'a crate::Gpu| {
        let (core, memory, shares) = held.get(&gpu.uuid).copied().unwrap_or_default();
        GpuFree {
            gpu,
            core: CORE_PER_GPU.saturating_sub(core),
            memory_bytes: gpu.usable_bytes().saturating_sub(memory),
            shares,
        }
    };
    inventory.gpus.iter().map(left).collect()
}
