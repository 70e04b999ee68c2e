//! Changing a share while its container runs: checked against everything else on its GPU, written into its record,
//! and so kept over restarts. How the container learns of it is the caller's matter.

use std::io;

use thiserror::Error;
use vcuda_config::{CORE_PER_GPU, GpuUuid, MEMORY_UNIT_BYTES};

use crate::{
    Change, Inventory, Ledger, LedgerError, Memory, ShareFolder, ShareKind, ShareName, ShareRecord,
    shares::free_beside, timetable,
};

/// A share before and after a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// As it was.
    pub before: ShareRecord,
    /// As it is.
    pub after: ShareRecord,
}

/// Why a share was not changed, or not for its container.
#[derive(Debug, Error)]
pub enum ChangeError {
    /// There is no such share.
    #[error("share {0}: there is none of this name; see `vcuda-device-plugin status`")]
    Unknown(ShareName),
    /// Whole GPUs have all there is.
    #[error(
        "its share is of whole GPUs, which have neither core nor memory to set; set shares of a GPU only"
    )]
    Whole,
    /// The amounts make no share.
    #[error("{reason}")]
    Amount {
        /// What is wrong, and what would do.
        reason: String,
    },
    /// The GPU has less left.
    #[error(
        "{gpu} has {core} core and {} left for it beside its other shares, less than is to be set; \
         ask for less, or make the others smaller first",
        Memory(*memory_bytes)
    )]
    NoRoom {
        /// Its GPU.
        gpu: GpuUuid,
        /// Core that it could have.
        core: u32,
        /// Bytes that it could have.
        memory_bytes: u64,
    },
    /// Its GPU is not on offer any more, so nothing is known to be free there.
    #[error("{gpu} is not on offer any more, so it can only be made smaller")]
    NoGpu {
        /// Its GPU.
        gpu: GpuUuid,
    },
    /// Another share cannot be read, so nothing is known to be free.
    #[error("{0}")]
    Unreadable(String),
    /// The record says it, the container has not been told.
    #[error(
        "the change is recorded, but its container could not be told of it ({source}); a running \
         vcuda-device-plugin tells it within a second, or its next start does"
    )]
    Apply {
        /// Why.
        source: io::Error,
    },
    /// The container was told, the disk was not.
    #[error("the change holds, but a loss of power may undo it: {source}")]
    Unsynced {
        /// Why.
        source: LedgerError,
    },
    /// The folder of shares could not be read or changed.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

impl Ledger {
    /// Changes a fractional share. What grows must have room beside the other shares of the GPU; what shrinks is free
    /// for others at once, but memory that is in use stays until it is given back. `apply` tells the container, before
    /// anyone else can be given what it loses.
    ///
    /// # Errors
    ///
    /// See [`ChangeError`]. But for `Apply` and `Unsynced`, nothing has changed.
    pub fn change(
        &self,
        inventory: &Inventory,
        name: &ShareName,
        change: Change,
        apply: impl FnOnce(&ShareRecord, &ShareFolder) -> io::Result<()>,
    ) -> Result<Changed, ChangeError> {
        let lock = self.lock()?;
        let shares = self.shares()?;
        if let Some(unreadable) = shares.unreadable.first() {
            return Err(ChangeError::Unreadable(unreadable.to_string()));
        }
        let before = shares.records.get(name).ok_or_else(|| ChangeError::Unknown(name.clone()))?;
        let others = || shares.records.iter().filter(|(other, _)| *other != name).map(|(_, record)| record);
        let mut after = changed(before, change)?;
        for (gpu, was) in after.gpus.iter().zip(&before.gpus) {
            if gpu.core <= was.core && gpu.memory_bytes <= was.memory_bytes {
                continue;
            }
            let free = free_beside(inventory, others());
            let Some(free) = free.iter().find(|free| free.gpu.uuid == gpu.uuid) else {
                return Err(ChangeError::NoGpu { gpu: gpu.uuid.clone() });
            };
            let fits = |now, was, free| now <= was || now <= free;
            if !fits(gpu.core.into(), was.core.into(), free.core.into())
                || !fits(gpu.memory_bytes, was.memory_bytes, free.memory_bytes)
            {
                return Err(ChangeError::NoRoom {
                    gpu: gpu.uuid.clone(),
                    core: free.core,
                    memory_bytes: free.memory_bytes,
                });
            }
        }
        timetable::give(after.kind, &mut after.gpus, &before.gpus, &timetable::taken(others()));
        let folder = ShareFolder::new(self.folder(), name);
        let failed = |source| LedgerError { path: folder.record(), source };
        after.store(&folder).map_err(failed)?;
        let applied = apply(&after, &folder);
        drop(lock);
        let synced = self.sync(std::slice::from_ref(name));
        applied.map_err(|source| ChangeError::Apply { source })?;
        synced.map_err(|source| ChangeError::Unsynced { source })?;
        Ok(Changed { before: before.clone(), after })
    }
}

/// The record with the change, whatever room there is.
fn changed(before: &ShareRecord, change: Change) -> Result<ShareRecord, ChangeError> {
    if before.kind == ShareKind::Whole {
        return Err(ChangeError::Whole);
    }
    let wrong = |reason: String| Err(ChangeError::Amount { reason });
    let mut after = ShareRecord { set: change.over(before.set), ..before.clone() };
    for gpu in &mut after.gpus {
        gpu.core = change.core.unwrap_or(gpu.core);
        if !(1..CORE_PER_GPU).contains(&gpu.core) {
            return wrong(format!(
                "{} core is no part of a GPU; ask for 1 to {}",
                gpu.core,
                CORE_PER_GPU - 1
            ));
        }
        if let Some(units) = change.memory_units {
            gpu.memory_bytes = u64::from(units.get()).saturating_mul(MEMORY_UNIT_BYTES);
        }
        let limit = after.set.core_limit.or(after.terms.core_limit);
        if let Some(limit) = limit
            && !(gpu.core..=CORE_PER_GPU).contains(&limit)
        {
            return wrong(format!(
                "a core limit of {limit} is not between its {} core and {CORE_PER_GPU}; set both",
                gpu.core
            ));
        }
    }
    Ok(after)
}
