//! The two files, field by field. Offsets are fixed: a test pins them, [`LIMITS_VERSION`] and
//! [`USAGE_VERSION`] name them.

use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Relaxed, Release},
};

use crate::{
    LIMITS_VERSION, MAX_EXPORTS, MAX_GPUS, MAX_PROCESSES, USAGE_VERSION, pair::AtomicPair, stock::STOCKS,
};

pub(crate) const LIMITS_MAGIC: u64 = u64::from_le_bytes(*b"vcudalim");
pub(crate) const USAGE_MAGIC: u64 = u64::from_le_bytes(*b"vcudause");

/// Start of both files. `size` is the size of the whole file in bytes.
#[repr(C)]
pub(crate) struct Header {
    pub magic: AtomicU64,
    pub version: AtomicU32,
    pub size: AtomicU32,
}

/// `limits`: one page.
#[repr(C, align(4096))]
pub(crate) struct LimitsFile {
    pub header: Header,
    /// GPUs of this share; that many of `gpus` count.
    pub gpu_count: AtomicU32,
    /// 1 where the shim that is mounted with this file knows `stretch`; 0 from versions that did not.
    pub stretches: AtomicU32,
    /// CLOCK_MONOTONIC of the governor's last tick in nanoseconds; 0 before the first.
    pub heartbeat_ns: AtomicU64,
    _reserved: [AtomicU64; 12],
    pub gpus: [LimitEntry; MAX_GPUS],
}

/// One GPU of the share. The UUID never changes; every other field is updated in place, each by itself.
#[repr(C)]
pub(crate) struct LimitEntry {
    /// The sixteen bytes of `CUuuid`, as two little-endian words.
    pub uuid: [AtomicU64; 2],
    /// Ceiling in bytes.
    pub memory_bytes: AtomicU64,
    /// Core share in percent of the GPU in the low half, the limit it may reach in idle time in the high half.
    pub core: AtomicU64,
    /// Bytes that the node measured and the shim cannot see: contexts, modules, local memory.
    pub unseen_bytes: AtomicU64,
    /// Share of the GPU's time that the container used in the last tick, in percent of the GPU.
    pub busy_percent: AtomicU64,
    /// Slots that the share owns, a bit each; none for a share without a timetable.
    pub own_slots: [AtomicU64; 2],
    /// Slots lent to it, until `lease_until_ns`.
    pub lent_slots: [AtomicU64; 2],
    /// CLOCK_MONOTONIC in nanoseconds; 0 for no lease.
    pub lease_until_ns: AtomicU64,
    /// Share of the GPU's time that it may use until then, in thousandths; 0 for its core share.
    pub rate_permille: AtomicU64,
    /// What the GPU was really used, in thousandths of what the container measured itself; 0 for 1000.
    pub charge_permille: AtomicU64,
    /// CLOCK_MONOTONIC in nanoseconds when `unseen_bytes` was measured.
    pub unseen_at_ns: AtomicU64,
    /// See `pace::Stretch`.
    pub stretch: AtomicU64,
    /// GPU time that the container was charged for and others had, in nanoseconds, to be taken off its debt. Only grows.
    pub refund_ns: AtomicU64,
}

/// `usage`: header page, totals page, then one slot a process, then what processes let each other have, then the stocks of
/// each process.
#[repr(C, align(4096))]
pub(crate) struct UsageFile {
    pub header: Header,
    /// Bit per slot: set once a process has ever claimed the slot, never cleared. The others are all zero.
    pub claimed: [AtomicU64; MAX_PROCESSES / 64],
    /// Of `exports`, the first so many have ever been used.
    pub exports_used: AtomicU64,
    /// Exports since the file was made. Only grows.
    pub exports_made: AtomicU64,
    _reserved: [AtomicU64; 492],
    pub gpus: [GpuTotal; MAX_GPUS],
    _reserved_too: [AtomicU64; 256],
    pub slots: [Slot; MAX_PROCESSES],
    pub exports: [Export; MAX_EXPORTS],
    pub stocks: [[StockLine; STOCKS]; MAX_PROCESSES],
}

/// A stock of one process on each GPU, which one thread or few use: on cache lines of its own.
#[repr(C, align(128))]
pub(crate) struct StockLine {
    /// See `stock::Stock`.
    pub gpus: [AtomicU64; MAX_GPUS],
}

/// A piece of memory that more than one process may hold.
#[repr(C, align(64))]
pub(crate) struct Export {
    /// See `exports::Word`.
    pub word: AtomicU64,
    /// What others know it by, of a descriptor and of a handle; 0 for none.
    pub keys: [AtomicU64; 2],
    _reserved: [AtomicU64; 5],
    /// Bit per slot: set while its process holds what it imported.
    pub importers: [AtomicU64; MAX_PROCESSES / 64],
}

/// Total of one GPU, on cache lines of its own.
#[repr(C, align(128))]
pub(crate) struct GpuTotal {
    /// See `account::Total`.
    pub total: AtomicPair,
    /// Allocations that the ceiling refused.
    pub refusals: AtomicU64,
    /// So many frees are to go past the stocks, because an allocation needed what was in them.
    pub past_stocks: AtomicU64,
    _reserved: [AtomicU64; 4],
    /// CLOCK_MONOTONIC in nanoseconds up to which the share's time is used up: the budget. On another cache line than the
    /// total.
    pub next_ns: AtomicU64,
    /// CLOCK_MONOTONIC in nanoseconds up to which GPU time has been counted.
    pub frontier_ns: AtomicU64,
    /// GPU time that the container has measured itself, in nanoseconds. Only grows.
    pub charged_ns: AtomicU64,
    /// CLOCK_MONOTONIC in nanoseconds when last a launch was held back or work was under way.
    pub waiting_ns: AtomicU64,
    /// CLOCK_MONOTONIC in nanoseconds at which what the container has launched should be done.
    pub done_ns: AtomicU64,
    /// How much of `LimitEntry::refund_ns` the budget has had.
    pub refunded_ns: AtomicU64,
    _reserved_too: [AtomicU64; 2],
}

/// One process. Counters only grow and outlive the process, so that the sum over all slots never falls.
#[repr(C, align(512))]
pub(crate) struct Slot {
    /// Process ID as the process itself sees it.
    pub pid: AtomicU64,
    /// Start time of the process, in clock ticks since boot (field 22 of `/proc/<pid>/stat`).
    pub start: AtomicU64,
    /// Inode of the process's PID namespace.
    pub pid_namespace: AtomicU64,
    /// Differs from the program that the process ran before its last exec.
    pub program: AtomicU64,
    /// Kernel launches, but for those in `launches_of_one`.
    pub launches: AtomicU64,
    /// Time that launches were held back, in nanoseconds.
    pub throttled_ns: AtomicU64,
    /// Per GPU: CLOCK_MONOTONIC in nanoseconds since when work of the process is under way that is not counted; 0 if none.
    pub open_since_ns: [AtomicU64; MAX_GPUS],
    /// Bit per stock: set before anything is ever put into it on any GPU, never cleared. The others are all zero.
    pub stocks_used: AtomicU64,
    _reserved: AtomicU64,
    /// Kernel launches of one of its threads, which needs no locked instruction to count here. On another cache line
    /// than those of all others.
    pub launches_of_one: AtomicU64,
    _reserved_too: [AtomicU64; 7],
    /// Per GPU: see `account::Held`.
    pub held: [AtomicPair; MAX_GPUS],
}

pub(crate) const LIMITS_SIZE: usize = size_of::<LimitsFile>();
pub(crate) const USAGE_SIZE: usize = size_of::<UsageFile>();

/// What the header of a file must say.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    magic: u64,
    version: u32,
    size: usize,
}

pub(crate) const LIMITS: Kind = Kind { magic: LIMITS_MAGIC, version: LIMITS_VERSION, size: LIMITS_SIZE };
pub(crate) const USAGE: Kind = Kind { magic: USAGE_MAGIC, version: USAGE_VERSION, size: USAGE_SIZE };

/// `usage` of the shims before there were stocks. It ends where they begin, and is the same up to there.
pub(crate) const USAGE_WITHOUT_STOCKS: Kind =
    Kind { version: 2, size: std::mem::offset_of!(UsageFile, stocks), ..USAGE };

impl Kind {
    /// Says what is wrong with a header, if anything is.
    pub fn check(self, magic: u64, version: u32, size: u32) -> Result<(), String> {
        if magic != self.magic {
            return Err("is not what its name says (wrong magic number)".into());
        }
        if version != self.version {
            return Err(format!("has layout version {version}, this build knows {}", self.version));
        }
        if u64::from(size) != self.size as u64 {
            return Err(format!("says it has {size} bytes, layout {version} has {}", self.size));
        }
        Ok(())
    }

    /// Writes the header of a new file, the magic number last.
    pub fn stamp(self, header: &Header) {
        header.version.store(self.version, Relaxed);
        // Both files are far below 4 GiB.
        header.size.store(u32::try_from(self.size).unwrap_or(u32::MAX), Relaxed);
        header.magic.store(self.magic, Release);
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// Files outlive the programs that wrote them: whoever moves a field must raise the version.
    #[test]
    fn layouts_stay_as_they_are() {
        assert_eq!((LIMITS_VERSION, USAGE_VERSION), (2, 3));
        assert_eq!(USAGE_WITHOUT_STOCKS.size, 8192 + 1024 * 512 + 1024 * 192);
        assert_eq!((LIMITS_SIZE, USAGE_SIZE), (4096, USAGE_WITHOUT_STOCKS.size + 1024 * 15 * 128));
        assert_eq!((offset_of!(UsageFile, stocks) % 128, size_of::<StockLine>()), (0, 128));
        assert_eq!((offset_of!(LimitsFile, heartbeat_ns), offset_of!(LimitsFile, gpus)), (24, 128));
        assert_eq!(size_of::<LimitEntry>(), 128);
        assert_eq!(offset_of!(LimitEntry, memory_bytes), 16);
        assert_eq!((offset_of!(LimitEntry, core), offset_of!(LimitEntry, unseen_bytes)), (24, 32));
        assert_eq!((offset_of!(LimitEntry, own_slots), offset_of!(LimitEntry, lent_slots)), (48, 64));
        assert_eq!((offset_of!(LimitEntry, lease_until_ns), offset_of!(LimitEntry, rate_permille)), (80, 88));
        assert_eq!(
            (offset_of!(LimitEntry, charge_permille), offset_of!(LimitEntry, unseen_at_ns)),
            (96, 104)
        );
        assert_eq!((offset_of!(LimitEntry, stretch), offset_of!(LimitsFile, stretches)), (112, 20));
        assert_eq!((offset_of!(LimitEntry, refund_ns), offset_of!(GpuTotal, refunded_ns)), (120, 104));
        assert_eq!((offset_of!(UsageFile, claimed), offset_of!(UsageFile, gpus)), (16, 4096));
        assert_eq!((offset_of!(UsageFile, exports_used), offset_of!(UsageFile, exports_made)), (144, 152));
        assert_eq!((offset_of!(UsageFile, exports), offset_of!(Export, importers)), (8192 + 1024 * 512, 64));
        assert_eq!((offset_of!(UsageFile, slots), size_of::<Slot>()), (8192, 512));
        assert_eq!((size_of::<GpuTotal>(), offset_of!(GpuTotal, refusals)), (128, 16));
        assert_eq!(offset_of!(GpuTotal, past_stocks), 24);
        assert_eq!((offset_of!(GpuTotal, next_ns), offset_of!(GpuTotal, frontier_ns)), (64, 72));
        assert_eq!((offset_of!(GpuTotal, charged_ns), offset_of!(GpuTotal, waiting_ns)), (80, 88));
        assert_eq!(offset_of!(GpuTotal, done_ns), 96);
        assert_eq!((offset_of!(Slot, open_since_ns), offset_of!(Slot, stocks_used)), (48, 176));
        assert_eq!((offset_of!(Slot, launches), offset_of!(Slot, launches_of_one)), (32, 192));
        assert_eq!(offset_of!(Slot, held), 256);
    }
}
