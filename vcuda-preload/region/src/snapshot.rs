//! The `usage` file as the node reads it. Every byte of it may be a lie or gone: it is read, never mapped, so that a
//! container that truncates it faults nobody here; sizes, counts and time are bounded; figures saturate.

use std::{
    array::from_fn,
    fs::{File, OpenOptions},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::Path,
    time::Duration,
};

use crate::{
    MAX_EXPORTS, MAX_GPUS, MAX_PROCESSES,
    account::{Held, Total, bytes},
    exports::owner,
    layout::{Export, GpuTotal, Header, Slot, StockLine, USAGE, USAGE_WITHOUT_STOCKS, UsageFile},
    mapping::{NEVER_WAITS, invalid},
    pair::whole,
    stock::{STOCKS, Stock},
    usage::{is_kept, locked},
};

/// An honest container's 1024 locks take a fraction of a millisecond to look at. One that sets a million locks on its
/// file makes every look slow; it loses its figures, not the node's time. Time of this thread's on a processor: a node that is
/// busy is no container's fault.
const LOCKS_TIME_LIMIT: Duration = Duration::from_millis(50);

/// How long the calling thread has been on a processor.
fn busy() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` outlives the call, which fails for no clock that every kernel has.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Of one process, by GPU.
type Stocks = [[Stock; STOCKS]; MAX_GPUS];

/// Reads a container's `usage`, time and again.
pub struct UsageReader {
    file: File,
}

/// What a container says of itself at one moment. Only the process IDs come from the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageSnapshot {
    /// Per GPU, in the order of `limits`; always [`MAX_GPUS`] long, zero where the share has no such GPU.
    pub gpus: Vec<GpuUsage>,
    /// Living processes that have used a GPU.
    pub processes: Vec<ProcessUsage>,
    /// Kernel launches since the file was made.
    pub launches: u64,
    /// Nanoseconds for which launches were held back since the file was made, summed over threads.
    pub throttled_ns: u64,
    /// The most processes that have used a GPU at a time since the file was made.
    pub most_processes: u32,
    /// Changes when a process begins to use GPUs.
    pub generation: u64,
}

/// One GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuUsage {
    /// Bytes that living processes hold, and that the dead left to their children or to who imported them.
    pub used_bytes: u64,
    /// Bytes that several living processes of the container hold, once for each of them but the first: so much may a sum over its
    /// processes be above what they hold together.
    pub shared_bytes: u64,
    /// The same at two moments if nothing was taken, given back or imported in between. What ends with its process, and an
    /// import that is let go, does not show here.
    pub changes: u64,
    /// Allocations that the ceiling has refused since the file was made.
    pub refusals: u64,
    /// CLOCK_MONOTONIC up to which the share's time is used up, in nanoseconds.
    pub next_ns: u64,
    /// CLOCK_MONOTONIC up to which GPU time has been counted, in nanoseconds.
    pub frontier_ns: u64,
    /// GPU time that the container has measured itself since the file was made, in nanoseconds.
    pub charged_ns: u64,
    /// CLOCK_MONOTONIC when last a launch was held back or work was under way, in nanoseconds.
    pub waiting_ns: u64,
}

/// One process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessUsage {
    /// Process ID in the reader's PID namespace, as the kernel tells it; 0 if the process is not visible there.
    pub pid: u32,
    /// Bytes held per GPU, [`MAX_GPUS`] long.
    pub bytes: Vec<u64>,
    /// Per GPU, [`MAX_GPUS`] long: CLOCK_MONOTONIC in nanoseconds since when work of the process is under way that is not
    /// counted; 0 if none.
    pub open_since_ns: Vec<u64>,
}

impl UsageReader {
    /// Opens the usage file at `path` for reading.
    ///
    /// # Errors
    /// The file cannot be opened. `WouldBlock` if the container holds a lease on it, which the kernel then ends.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { file: OpenOptions::new().read(true).custom_flags(NEVER_WAITS).open(path)? })
    }

    /// Reads the figures.
    ///
    /// # Errors
    /// `InvalidData` or `UnexpectedEof` if the container has spoiled the file: its figures are lost, nothing else is.
    pub fn snapshot(&self) -> io::Result<UsageSnapshot> {
        self.read(true)
    }

    /// Reads the figures without looking for who is alive, which takes a system call and more for each process: no
    /// processes, and no bytes held.
    ///
    /// # Errors
    /// As [`UsageReader::snapshot`].
    pub fn counters(&self) -> io::Result<UsageSnapshot> {
        self.read(false)
    }

    fn read(&self, locks: bool) -> io::Result<UsageSnapshot> {
        let mut head = [0; std::mem::offset_of!(UsageFile, slots)];
        self.file.read_exact_at(&mut head, 0)?;
        let magic = word(&head, std::mem::offset_of!(Header, magic));
        let [a, b, c, d, size @ ..] = word(&head, std::mem::offset_of!(Header, version)).to_le_bytes();
        let (version, size) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes(size));
        let stocks = USAGE_WITHOUT_STOCKS.check(magic, version, size).is_err();
        if stocks {
            USAGE.check(magic, version, size).map_err(invalid)?;
        }

        let mut snapshot = UsageSnapshot { gpus: vec![GpuUsage::default(); MAX_GPUS], ..Default::default() };
        let mut totals = [Total::default(); MAX_GPUS];
        for (gpu, (figures, total)) in snapshot.gpus.iter_mut().zip(&mut totals).enumerate() {
            let at = std::mem::offset_of!(UsageFile, gpus) + gpu * size_of::<GpuTotal>();
            *total = Total::unpack(pair(&head, at));
            figures.changes = total.sequence;
            figures.refusals = word(&head, at + std::mem::offset_of!(GpuTotal, refusals));
            figures.next_ns = word(&head, at + std::mem::offset_of!(GpuTotal, next_ns));
            figures.frontier_ns = word(&head, at + std::mem::offset_of!(GpuTotal, frontier_ns));
            figures.charged_ns = word(&head, at + std::mem::offset_of!(GpuTotal, charged_ns));
            figures.waiting_ns = word(&head, at + std::mem::offset_of!(GpuTotal, waiting_ns));
        }

        let begun = busy();
        let mut alive = vec![false; MAX_PROCESSES];
        for (slot, alive) in alive.iter_mut().enumerate() {
            let claimed = word(&head, std::mem::offset_of!(UsageFile, claimed) + slot / 64 * 8);
            if claimed >> (slot % 64) & 1 == 0 {
                continue;
            }
            if busy().saturating_sub(begun) > LOCKS_TIME_LIMIT {
                return Err(invalid("holds so many locks that its processes cannot be told apart"));
            }
            let stocks = if stocks && locks { self.stocks(slot)? } else { Stocks::default() };
            *alive = self.add_slot(slot, &totals, &stocks, locks, &mut snapshot)?;
        }
        let used = word(&head, std::mem::offset_of!(UsageFile, exports_used)).min(MAX_EXPORTS as u64);
        if locks && used > 0 {
            self.add_exports(usize::try_from(used).unwrap_or(0), &alive, &mut snapshot)?;
        }
        Ok(snapshot)
    }

    fn add_slot(
        &self,
        slot: usize,
        totals: &[Total; MAX_GPUS],
        stocks: &Stocks,
        locks: bool,
        snapshot: &mut UsageSnapshot,
    ) -> io::Result<bool> {
        let mut text = [0; size_of::<Slot>()];
        let at = std::mem::offset_of!(UsageFile, slots) + slot * size_of::<Slot>();
        self.file.read_exact_at(&mut text, at as u64)?;
        let add = |sum: &mut u64, at| *sum = sum.saturating_add(word(&text, at));
        add(&mut snapshot.launches, std::mem::offset_of!(Slot, launches));
        add(&mut snapshot.launches, std::mem::offset_of!(Slot, launches_of_one));
        add(&mut snapshot.throttled_ns, std::mem::offset_of!(Slot, throttled_ns));
        snapshot.most_processes += 1;
        for at in [
            std::mem::offset_of!(Slot, pid),
            std::mem::offset_of!(Slot, start),
            std::mem::offset_of!(Slot, pid_namespace),
            std::mem::offset_of!(Slot, program),
        ] {
            snapshot.generation = mixed(snapshot.generation, word(&text, at));
        }

        if !locks {
            return Ok(false);
        }
        let fd = self.file.as_raw_fd();
        let alive = locked(fd, slot)?;
        if alive.is_none() && !is_kept(fd, slot) {
            return Ok(false);
        }
        let held = |gpu: usize, total: Total| {
            let at = std::mem::offset_of!(Slot, held) + gpu * 16;
            let held = Held::unpack(pair(&text, at));
            let in_stock = |(number, stock): (usize, &Stock)| {
                // What the last change has drained counts no more, carried over or not.
                let drained = stock.draining
                    && (total.slot, total.drained) == (slot, Some(number))
                    && total.sequence != held.sequence;
                if drained { 0 } else { stock.units }
            };
            let in_stock = stocks[gpu].iter().enumerate().map(in_stock).sum();
            bytes(held.with(slot, total).units.saturating_sub(in_stock))
        };
        let bytes: Vec<_> = totals.iter().enumerate().map(|(gpu, total)| held(gpu, *total)).collect();
        for ((figures, held), stocks) in snapshot.gpus.iter_mut().zip(&bytes).zip(stocks) {
            figures.used_bytes = figures.used_bytes.saturating_add(*held);
            for (number, stock) in stocks.iter().enumerate().filter(|(_, stock)| stock.sequence > 0) {
                figures.changes = mixed(figures.changes, (slot * STOCKS + number) as u64);
                figures.changes = mixed(figures.changes, stock.sequence);
            }
        }
        let Some(pid) = alive else { return Ok(true) };
        let open = |gpu: usize| word(&text, std::mem::offset_of!(Slot, open_since_ns) + gpu * 8);
        snapshot.processes.push(ProcessUsage {
            pid,
            bytes,
            open_since_ns: (0..MAX_GPUS).map(open).collect(),
        });
        Ok(true)
    }

    /// What the process of `slot` has in stock.
    fn stocks(&self, slot: usize) -> io::Result<Stocks> {
        let mut text = [0; STOCKS * size_of::<StockLine>()];
        let at = std::mem::offset_of!(UsageFile, stocks) + slot * text.len();
        self.file.read_exact_at(&mut text, at as u64)?;
        let at = |gpu: usize, number: usize| number * size_of::<StockLine>() + gpu * size_of::<u64>();
        Ok(from_fn(|gpu| from_fn(|number| Stock::unpack(word(&text, at(gpu, number))))))
    }

    /// Adds what the dead exported and the living hold; takes off what the living are done with and nobody holds any more,
    /// which the next one who looks will give back. `used` is at most `MAX_EXPORTS`.
    fn add_exports(&self, used: usize, alive: &[bool], snapshot: &mut UsageSnapshot) -> io::Result<()> {
        let mut text = vec![0; used * size_of::<Export>()];
        self.file.read_exact_at(&mut text, std::mem::offset_of!(UsageFile, exports) as u64)?;
        let mut living = [0_u64; MAX_PROCESSES / 64];
        for slot in (0..MAX_PROCESSES).filter(|slot| alive[*slot]) {
            living[slot / 64] |= 1 << (slot % 64);
        }
        for entry in text.chunks_exact(size_of::<Export>()) {
            let of = word(entry, std::mem::offset_of!(Export, word));
            let Some((slot, gpu, held, left)) = owner(of) else { continue };
            let bits = |at: usize| word(entry, std::mem::offset_of!(Export, importers) + at * 8);
            let importers: u32 =
                living.iter().enumerate().map(|(at, living)| (bits(at) & living).count_ones()).sum();
            let (held, figures) = (bytes(held), &mut snapshot.gpus[gpu]);
            figures.changes = mixed(figures.changes, of);
            let holders = importers + u32::from(alive[slot] && !left);
            let again = held.saturating_mul(holders.saturating_sub(1).into());
            figures.shared_bytes = figures.shared_bytes.saturating_add(again);
            match (alive[slot], importers > 0) {
                (false, true) => figures.used_bytes = figures.used_bytes.saturating_add(held),
                (true, false) if left => figures.used_bytes = figures.used_bytes.saturating_sub(held),
                _ => {}
            }
        }
        Ok(())
    }
}

/// The little-endian word at `at`, which is below the length by at least eight.
fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// FNV-1a, a word at a time.
fn mixed(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x0100_0000_01b3)
}

fn pair(bytes: &[u8], at: usize) -> u128 {
    whole(word(bytes, at), word(bytes, at + 8))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;
    use crate::{GpuLimit, Limits, LimitsWriter, Refused, Slots, Usage, layout::USAGE_SIZE};

    fn usage() -> (tempfile::TempDir, std::path::PathBuf, Usage) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("usage");
        Usage::create(&path).unwrap();
        let usage = Usage::open(&path).unwrap();
        (folder, path, usage)
    }

    /// The kernel keeps whoever opens a leased file waiting for 45 s; for the node that is a thread that all shares need.
    #[test]
    fn a_container_that_leases_its_files_keeps_the_node_not_waiting() {
        let (folder, path, usage) = usage();
        drop(usage);
        let limits = folder.path().join("limits");
        let limit = GpuLimit {
            uuid: [1; 16],
            memory_bytes: 1,
            core_percent: 1,
            core_limit_percent: 1,
            own_slots: Slots::NONE,
        };
        Limits::create(&limits, &[limit]).unwrap();
        // SAFETY: no handler is set; the signal that tells of a lease's end would end this process.
        unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
        let lease = |path: &Path| {
            let file = File::open(path).unwrap();
            // SAFETY: the descriptor is open.
            let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) };
            assert_eq!(done, 0, "{}", io::Error::last_os_error());
            file
        };
        let _held = [lease(&path), lease(&limits)];
        for error in
            [UsageReader::open(&path).err(), Limits::open(&limits).err(), LimitsWriter::open(&limits).err()]
        {
            assert_eq!(error.unwrap().kind(), io::ErrorKind::WouldBlock);
        }
    }

    #[test]
    fn the_node_sees_what_a_process_holds() {
        let (_folder, path, usage) = usage();
        let me = usage.claim().unwrap();
        usage.take(me, 1, 3 << 20, 4 << 20).unwrap();
        assert_eq!(usage.take(me, 1, 2 << 20, 4 << 20), Err(Refused));
        usage.count_refusal(1);
        usage.counters(me).0.fetch_add(3, std::sync::atomic::Ordering::Relaxed);
        usage.launches_of_one(me).store(2, std::sync::atomic::Ordering::Relaxed);

        let snapshot = UsageReader::open(&path).unwrap().snapshot().unwrap();
        // A process's own locks never show to itself, those of its open files do; tests/processes.rs looks from another one.
        assert_eq!(
            snapshot.gpus[1],
            GpuUsage { used_bytes: 3 << 20, refusals: 1, changes: 1, ..Default::default() }
        );
        assert_eq!(snapshot.processes, []);
        assert_eq!(snapshot.launches, 5);
        let counters = UsageReader::open(&path).unwrap().counters().unwrap();
        assert_eq!((counters.gpus[1].refusals, counters.launches), (1, 5));
        assert_eq!((usage.used(Some(me), 1), usage.used(None, 1)), (3 << 20, 3 << 20));
    }

    #[test]
    fn what_several_processes_hold_is_told_as_often_as_a_sum_would_count_it_too_much() {
        let (_folder, path, usage) = usage();
        let me = usage.claim().unwrap();
        usage.take(me, 1, 3 << 20, 4 << 20).unwrap();
        let exported = usage.export(me, 1, 2 << 20).unwrap();
        usage.set_key(exported, crate::Key::Handle(7));
        let held = || {
            let gpu = UsageReader::open(&path).unwrap().snapshot().unwrap().gpus[1];
            (gpu.used_bytes, gpu.shared_bytes)
        };
        assert_eq!(held(), (3 << 20, 0), "nobody has imported it");
        // Two processes at most are needed to see it; one that imports its own is as good.
        usage.import(me, crate::Key::Handle(7)).unwrap();
        assert_eq!(held(), (3 << 20, 2 << 20));
        usage.unexport(me, exported);
        assert_eq!(held(), (3 << 20, 0), "its maker is done with it");
    }

    #[test]
    fn what_was_taken_and_given_back_between_two_looks_shows() {
        let (_folder, path, usage) = usage();
        let me = usage.claim().unwrap();
        usage.take(me, 1, 3 << 20, 4 << 20).unwrap();
        let exported = usage.export(me, 1, 2 << 20).unwrap();
        usage.set_key(exported, crate::Key::Handle(7));
        let look = || UsageReader::open(&path).unwrap().snapshot().unwrap().gpus[1];
        let before = look();
        assert_eq!(look(), before);
        usage.take(me, 0, 1 << 20, 4 << 20).unwrap();
        assert_eq!(look(), before, "of another GPU");
        usage.take(me, 1, 1 << 20, 4 << 20).unwrap();
        usage.give(me, 1, 1 << 20);
        let taken = look();
        assert_eq!(taken.used_bytes, before.used_bytes);
        assert_ne!(taken.changes, before.changes);
        let imported = usage.import(me, crate::Key::Handle(7)).unwrap();
        usage.unimport(me, imported);
        assert_eq!(look().shared_bytes, before.shared_bytes);
        assert_ne!(look().changes, taken.changes, "another process had it too");
    }

    #[test]
    fn what_is_in_stock_is_not_used_and_each_change_of_it_shows() {
        let (_folder, path, usage) = usage();
        let me = usage.claim().unwrap();
        let look = || UsageReader::open(&path).unwrap().snapshot().unwrap().gpus[1];
        let mut seen = std::collections::BTreeSet::from([look().changes]);
        for _ in 0..3 {
            usage.take(me, 1, 1 << 20, 4 << 20).unwrap();
            assert_eq!(look().used_bytes, 1 << 20);
            assert!(seen.insert(look().changes));
            usage.give(me, 1, 1 << 20);
            assert_eq!((look().used_bytes, usage.used(Some(me), 1), usage.held(me, 1)), (0, 0, 0));
            assert!(seen.insert(look().changes));
        }
        assert!(usage.account(1).total() > 0, "it is kept for the next allocation");
        usage.for_each_process(Some(me), 1, |pid, bytes| panic!("{pid} uses {bytes}"));
    }

    /// Containers go on while the node is upgraded.
    #[test]
    fn a_file_of_a_shim_without_stocks_is_read() {
        let (_folder, path, usage) = usage();
        let me = usage.claim().unwrap();
        usage.take(me, 1, 3 << 20, 4 << 20).unwrap();
        let mut content = fs::read(&path).unwrap();
        content.truncate(8192 + 1024 * 512 + 1024 * 192);
        content[8] = 2;
        let length = u32::try_from(content.len()).unwrap();
        content[12..16].copy_from_slice(&length.to_le_bytes());
        // Into the same file, which this process's locks are of.
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&content, 0).unwrap();
        file.set_len(length.into()).unwrap();
        let reader = UsageReader::open(&path).unwrap();
        assert_eq!(reader.snapshot().unwrap().gpus[1].used_bytes, 3 << 20);
        content[8] = 1;
        file.write_all_at(&content, 0).unwrap();
        let error = reader.snapshot().unwrap_err().to_string();
        assert!(error.contains("has layout version 1, this build knows 3"), "{error}");
    }

    #[test]
    fn a_truncated_file_is_an_error_and_not_a_fault() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("usage");
        Usage::create(&path).unwrap();
        let reader = UsageReader::open(&path).unwrap();
        reader.snapshot().unwrap();
        for size in [0, 1, 4096, 8191] {
            fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(size).unwrap();
            assert_eq!(reader.snapshot().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_content_is_read_or_refused(
            content in prop::collection::vec(any::<u8>(), 1..1 << 16),
            length in 0..=USAGE_SIZE,
            sound_header: bool,
        ) {
            let mut content: Vec<_> = content.into_iter().cycle().take(length).collect();
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("usage");
            if sound_header {
                Usage::create(&path).unwrap();
                let header = fs::read(&path).unwrap();
                let n = content.len().min(16);
                content[..n].copy_from_slice(&header[..n]);
            }
            fs::write(&path, content).unwrap();
            let reader = UsageReader::open(&path).unwrap();
            let counters = reader.counters();
            if let Ok(snapshot) = reader.snapshot() {
                prop_assert_eq!(counters.unwrap().launches, snapshot.launches);
                prop_assert!(snapshot.processes.len() <= MAX_PROCESSES);
                prop_assert_eq!(snapshot.gpus.len(), MAX_GPUS);
            }
        }
    }
}
