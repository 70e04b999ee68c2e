//! The `limits` file: written by the node, at creation and while the container runs; read by the shim.

use std::{
    ffi::CString,
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Write},
    os::{
        fd::AsRawFd,
        unix::{ffi::OsStrExt, fs::OpenOptionsExt, fs::PermissionsExt},
    },
    path::Path,
    sync::atomic::{
        AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use crate::{
    Lease, MAX_GPUS, Pace, Slots, Stretch,
    layout::{Header, LIMITS, LIMITS_SIZE, LimitEntry, LimitsFile},
    mapping::{Mapping, NEVER_WAITS, invalid, open},
    pair::{halves, whole},
};

/// How long bytes that the node measured and no call shows count, in nanoseconds: four of its looks, of which the slowest comes
/// every five seconds. When nobody looks any more, what its processes hold when they end is back after that.
pub const UNSEEN_LASTS_NS: u64 = 20_000_000_000;

/// What a container may use of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuLimit {
    /// UUID of the GPU: the sixteen bytes of `CUuuid`.
    pub uuid: [u8; 16],
    /// Memory ceiling in bytes.
    pub memory_bytes: u64,
    /// Share of the GPU's compute time in percent.
    pub core_percent: u32,
    /// What it may use while the GPU has idle time, in percent; at least `core_percent`.
    pub core_limit_percent: u32,
    /// Slots of the GPU's period that are its own; none for a share without a timetable, which is held by its budget only.
    pub own_slots: Slots,
}

/// A share's limits as a process of the container sees them. Every call reads the file as it is at that moment.
pub struct Limits {
    file: Mapping<LimitsFile>,
}

impl Limits {
    /// Writes a new `limits` file at `path`, readable by all: whole or not at all, replacing what was there. GPUs
    /// keep the order given; it is the order of the figures in `usage`.
    ///
    /// A container that has the replaced file mounted keeps that one. To change the limits of a running container,
    /// use [`LimitsWriter`].
    ///
    /// # Errors
    /// More than [`MAX_GPUS`] GPUs, none, or one twice; or the file cannot be written.
    pub fn create(path: &Path, gpus: &[GpuLimit]) -> io::Result<()> {
        if !(1..=MAX_GPUS).contains(&gpus.len()) {
            return Err(invalid(format!("a share spans 1 to {MAX_GPUS} GPUs, not {}", gpus.len())));
        }
        let count = u32::try_from(gpus.len()).unwrap_or(0);
        let distinct: std::collections::BTreeSet<_> = gpus.iter().map(|gpu| gpu.uuid).collect();
        if distinct.len() != gpus.len() {
            return Err(invalid("a share has one limit a GPU; one GPU is named twice"));
        }
        replace(path, 0o644, |file| {
            take_room(file, LIMITS_SIZE)?;
            let map = Mapping::<LimitsFile>::new(file.as_raw_fd(), true)?;
            for (entry, gpu) in map.gpus.iter().zip(gpus) {
                let (low, high) = words(&gpu.uuid);
                entry.uuid[0].store(low, Relaxed);
                entry.uuid[1].store(high, Relaxed);
                entry.set(gpu);
            }
            map.gpu_count.store(count, Relaxed);
            map.stretches.store(1, Relaxed);
            LIMITS.stamp(&map.header);
            Ok(())
        })
    }

    /// Maps the limits at `path`.
    ///
    /// # Errors
    /// The file cannot be opened, or is none of this layout.
    pub fn open(path: &Path) -> io::Result<Self> {
        let path = CString::new(path.as_os_str().as_bytes())?;
        let fd = open(&path, libc::O_RDONLY | NEVER_WAITS)?;
        let file = Mapping::new(fd, false);
        // SAFETY: the descriptor is ours; the mapping needs it no longer.
        unsafe { libc::close(fd) };
        let file: Mapping<LimitsFile> = file?;
        check(&file)?;
        Ok(Self { file })
    }

    /// GPUs of the share.
    pub fn gpu_count(&self) -> usize {
        (self.file.gpu_count.load(Relaxed) as usize).min(MAX_GPUS)
    }

    /// The place of the GPU with this UUID among the share's GPUs: the index of its figures here and in `usage`.
    pub fn find(&self, uuid: &[u8; 16]) -> Option<usize> {
        let wanted = words(uuid);
        (0..self.gpu_count()).find(|at| {
            let entry = &self.file.gpus[*at];
            (entry.uuid[0].load(Relaxed), entry.uuid[1].load(Relaxed)) == wanted
        })
    }

    /// The limit of GPU number `gpu`, if the share has so many.
    pub fn get(&self, gpu: usize) -> Option<GpuLimit> {
        (gpu < self.gpu_count()).then(|| self.file.gpus[gpu].get())
    }

    /// Memory ceiling of GPU number `gpu` in bytes; 0 where the share has no such GPU.
    pub fn memory_bytes(&self, gpu: usize) -> u64 {
        self.file.gpus.get(gpu).map_or(0, |entry| entry.memory_bytes.load(Relaxed))
    }

    /// Bytes in use on GPU number `gpu` that the node measured and no call shows: contexts, modules, local memory. 0 where
    /// that is long ago. `now_ns` tells CLOCK_MONOTONIC in nanoseconds; it is asked only where there are any.
    pub fn unseen_bytes(&self, gpu: usize, now_ns: impl FnOnce() -> u64) -> u64 {
        let Some(entry) = self.file.gpus.get(gpu) else { return 0 };
        let at_ns = entry.unseen_at_ns.load(Acquire);
        match entry.unseen_bytes.load(Relaxed) {
            0 => 0,
            bytes => {
                if now_ns().saturating_sub(at_ns) < UNSEEN_LASTS_NS {
                    bytes
                } else {
                    0
                }
            }
        }
    }

    /// Share of the time of GPU number `gpu` that the container used in the node's last tick, in percent of the GPU; none
    /// before the node's first sign of life.
    pub fn busy_percent(&self, gpu: usize) -> Option<u32> {
        let entry = self.file.gpus.get(gpu).filter(|_| self.heartbeat_ns() != 0)?;
        Some(u32::try_from(entry.busy_percent.load(Relaxed)).unwrap_or(u32::MAX).min(100))
    }

    /// How fast the container may go on GPU number `gpu`, if the share has so many.
    pub fn pace(&self, gpu: usize) -> Option<Pace> {
        (gpu < self.gpu_count()).then(|| self.file.gpus[gpu].pace())
    }

    /// The word that changes with every lease of GPU number `gpu`: the end of the lease. For who only wants to know whether
    /// there is another.
    pub fn lease_word(&self, gpu: usize) -> Option<&AtomicU64> {
        (gpu < self.gpu_count()).then(|| &self.file.gpus[gpu].lease_until_ns)
    }

    /// Whether the container's shim knows slots that last longer: that which was installed when this file was made, with
    /// which it is mounted.
    pub fn stretches(&self) -> bool {
        self.file.stretches.load(Relaxed) == 1
    }

    /// CLOCK_MONOTONIC of the node's last sign of life in nanoseconds; 0 before the first.
    pub fn heartbeat_ns(&self) -> u64 {
        self.file.heartbeat_ns.load(Acquire)
    }
}

/// A share's limits as the node changes them while the container runs. Every change is seen at once by every process
/// of the container; there is no moment at which a figure is half old and half new.
pub struct LimitsWriter {
    limits: Limits,
}

impl LimitsWriter {
    /// Opens the limits at `path` for changes.
    ///
    /// # Errors
    /// The file cannot be opened for writing, or is none of this layout.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(NEVER_WAITS).open(path)?;
        let file: Mapping<LimitsFile> = Mapping::new(file.as_raw_fd(), true)?;
        check(&file)?;
        Ok(Self { limits: Limits { file } })
    }

    /// The limits as they are.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Changes the limit of the GPU with this UUID.
    ///
    /// # Errors
    /// The share does not have that GPU.
    pub fn set(&self, limit: &GpuLimit) -> io::Result<()> {
        self.entry(&limit.uuid)?.set(limit);
        Ok(())
    }

    /// Says how many bytes on the GPU with this UUID no call shows, as measured at `now_ns` of CLOCK_MONOTONIC. They count
    /// against the ceiling for [`UNSEEN_LASTS_NS`].
    ///
    /// # Errors
    /// The share does not have that GPU.
    pub fn set_unseen(&self, uuid: &[u8; 16], bytes: u64, now_ns: u64) -> io::Result<()> {
        let entry = self.entry(uuid)?;
        entry.unseen_bytes.store(bytes, Relaxed);
        // Last: who sees the time sees the bytes, and old ones are never taken for new.
        entry.unseen_at_ns.store(now_ns, Release);
        Ok(())
    }

    /// Says what share of the time of the GPU with this UUID the container used in the last tick, in percent of the GPU.
    ///
    /// # Errors
    /// The share does not have that GPU.
    pub fn set_busy_percent(&self, uuid: &[u8; 16], percent: u32) -> io::Result<()> {
        self.entry(uuid)?.busy_percent.store(percent.into(), Relaxed);
        Ok(())
    }

    /// Lends slots and a rate on the GPU with this UUID, in place of what was lent before.
    ///
    /// # Errors
    /// The share does not have that GPU.
    pub fn set_lease(&self, uuid: &[u8; 16], lease: &Lease) -> io::Result<()> {
        let entry = self.entry(uuid)?;
        let store = |word: &AtomicU64, value| word.store(value, Relaxed);
        let (low, high) = lease.slots.words();
        store(&entry.lent_slots[0], low);
        store(&entry.lent_slots[1], high);
        store(&entry.rate_permille, lease.rate_permille.into());
        // Last: whoever sees a lease's new end sees what it lends.
        entry.lease_until_ns.store(lease.until_ns, Release);
        Ok(())
    }

    /// Says how long slots of the GPU with this UUID last, while the lease does.
    ///
    /// # Errors
    /// The share does not have that GPU.
    pub fn set_stretch(&self, uuid: &[u8; 16], stretch: Stretch) -> io::Result<()> {
        self.entry(uuid)?.stretch.store(stretch.word(), Relaxed);
        Ok(())
    }

    /// Says what the GPU with this UUID was really used, in thousandths of what the container measured itself.
    ///
    /// # Errors
    /// The share does not have that GPU.
    pub fn set_charge(&self, uuid: &[u8; 16], permille: u32) -> io::Result<()> {
        self.entry(uuid)?.charge_permille.store(permille.into(), Relaxed);
        Ok(())
    }

    /// Takes `ns` more nanoseconds of the time of the GPU with this UUID off what the container owes.
    ///
    /// # Errors
    /// The share does not have that GPU.
    pub fn refund(&self, uuid: &[u8; 16], ns: u64) -> io::Result<()> {
        self.entry(uuid)?.refund_ns.fetch_add(ns, Relaxed);
        Ok(())
    }

    /// A sign of life: `now_ns` is CLOCK_MONOTONIC in nanoseconds.
    pub fn beat(&self, now_ns: u64) {
        self.limits.file.heartbeat_ns.store(now_ns, Release);
    }

    fn entry(&self, uuid: &[u8; 16]) -> io::Result<&LimitEntry> {
        self.limits
            .find(uuid)
            .map(|at| &self.limits.file.gpus[at])
            .ok_or_else(|| invalid("the share has no such GPU; its GPUs were fixed when it was bound"))
    }
}

impl LimitEntry {
    fn set(&self, limit: &GpuLimit) {
        self.memory_bytes.store(limit.memory_bytes, Relaxed);
        let core = u64::from(limit.core_limit_percent) << 32 | u64::from(limit.core_percent);
        self.core.store(core, Relaxed);
        let (low, high) = limit.own_slots.words();
        self.own_slots[0].store(low, Relaxed);
        self.own_slots[1].store(high, Relaxed);
    }

    fn pace(&self) -> Pace {
        let until_ns = self.lease_until_ns.load(Acquire);
        let slots =
            |words: &[AtomicU64; 2]| Slots::from_words(words[0].load(Relaxed), words[1].load(Relaxed));
        let short = |word: &AtomicU64| u32::try_from(word.load(Relaxed)).unwrap_or(u32::MAX);
        let [core @ .., _, _, _, _] = self.core.load(Relaxed).to_le_bytes();
        Pace {
            own: slots(&self.own_slots),
            core_percent: u32::from_le_bytes(core),
            lease: Lease {
                slots: slots(&self.lent_slots),
                rate_permille: short(&self.rate_permille),
                until_ns,
            },
            stretch: Stretch::from_word(self.stretch.load(Relaxed)),
            charge_permille: short(&self.charge_permille),
            refund_ns: self.refund_ns.load(Relaxed),
        }
    }

    fn get(&self) -> GpuLimit {
        let [a, b, c, d, core_limit @ ..] = self.core.load(Relaxed).to_le_bytes();
        GpuLimit {
            uuid: whole(self.uuid[0].load(Relaxed), self.uuid[1].load(Relaxed)).to_le_bytes(),
            memory_bytes: self.memory_bytes.load(Relaxed),
            core_percent: u32::from_le_bytes([a, b, c, d]),
            core_limit_percent: u32::from_le_bytes(core_limit),
            own_slots: Slots::from_words(self.own_slots[0].load(Relaxed), self.own_slots[1].load(Relaxed)),
        }
    }
}

fn words(uuid: &[u8; 16]) -> (u64, u64) {
    halves(u128::from_le_bytes(*uuid))
}

fn check(file: &LimitsFile) -> io::Result<()> {
    let Header { magic, version, size } = &file.header;
    LIMITS.check(magic.load(Acquire), version.load(Relaxed), size.load(Relaxed)).map_err(invalid)
}

/// Writes `size` zeros into the new `file`. Where a disk has no room, that is an error; to write a part of a mapped file that
/// takes none yet would be SIGBUS, and the end of the process.
pub(crate) fn take_room(file: &mut File, size: usize) -> io::Result<()> {
    file.write_all(&vec![0; size])
}

/// Has `fill` write a new file and puts it at `path` in one step, so that a reader, or a restart after a kill, finds
/// the old file or the new one. Nothing is synced to disk, for which a container's creation would wait: a container
/// does not outlive a loss of power, and its next start gets files of its own.
pub(crate) fn replace(
    path: &Path,
    mode: u32,
    fill: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"));
    };
    let new = folder.join(format!(".{}.{}.tmp", name.to_string_lossy(), std::process::id()));
    // What a process of the same number left when it was killed.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let written = (|| {
        let mut file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&new)?;
        fill(&mut file)?;
        file.flush()?;
        file.set_permissions(Permissions::from_mode(mode))?;
        fs::rename(&new, path)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LIMITS_VERSION;

    fn gpu(n: u8, memory_bytes: u64) -> GpuLimit {
        GpuLimit {
            uuid: [n; 16],
            memory_bytes,
            core_percent: 20,
            core_limit_percent: 50,
            own_slots: Slots::first(20),
        }
    }

    #[test]
    fn what_is_written_is_what_the_container_reads() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("limits");
        let gpus = [gpu(1, 8 << 30), gpu(2, u64::MAX)];
        Limits::create(&path, &gpus).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o644);

        let limits = Limits::open(&path).unwrap();
        assert_eq!((0..3).map(|n| limits.get(n)).collect::<Vec<_>>(), [Some(gpus[0]), Some(gpus[1]), None]);
        assert_eq!((limits.find(&[2; 16]), limits.find(&[3; 16])), (Some(1), None));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file stays");
    }

    #[test]
    fn a_change_reaches_a_running_container() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("limits");
        Limits::create(&path, &[gpu(1, 1 << 30), gpu(2, 1 << 30)]).unwrap();
        let (inside, outside) = (Limits::open(&path).unwrap(), LimitsWriter::open(&path).unwrap());

        let own_slots = Slots::from_bits(0xff << 60);
        let changed = GpuLimit { memory_bytes: 2 << 30, core_percent: 40, own_slots, ..gpu(2, 0) };
        outside.set(&changed).unwrap();
        outside.set_unseen(&[2; 16], 300 << 20, 5).unwrap();
        outside.set_busy_percent(&[2; 16], 37).unwrap();
        assert_eq!(inside.busy_percent(1), None, "nobody measures yet");
        assert_eq!(inside.pace(0).unwrap().lease, Lease::default());
        let lease = Lease { slots: Slots::from_bits(0xf << 62), rate_permille: 500, until_ns: 99 };
        outside.set_lease(&[2; 16], &lease).unwrap();
        outside.set_charge(&[2; 16], 1100).unwrap();
        assert_eq!(inside.pace(1).unwrap().stretch, Stretch::default());
        let stretch = Stretch { before: 1, after: 10, from_ns: 3_000_000_000 };
        outside.set_stretch(&[2; 16], stretch).unwrap();
        assert!(outside.limits().stretches());
        outside.refund(&[2; 16], 7).unwrap();
        outside.refund(&[2; 16], 8).unwrap();
        let pace =
            Pace { own: own_slots, core_percent: 40, lease, stretch, charge_permille: 1100, refund_ns: 15 };
        assert_eq!((inside.pace(1), inside.pace(2)), (Some(pace), None));
        outside.beat(77);
        assert_eq!((inside.busy_percent(1), inside.busy_percent(0)), (Some(37), Some(0)));

        assert_eq!(inside.get(1), Some(changed));
        assert_eq!(inside.get(0), Some(gpu(1, 1 << 30)), "the other GPU keeps its limit");
        let unseen = |gpu, now_ns| inside.unseen_bytes(gpu, || now_ns);
        assert_eq!((unseen(1, 5), unseen(1, 4 + UNSEEN_LASTS_NS), unseen(0, 5)), (300 << 20, 300 << 20, 0));
        assert_eq!(unseen(1, 5 + UNSEEN_LASTS_NS), 0, "nobody looks any more");
        outside.set_unseen(&[2; 16], 0, 6).unwrap();
        assert_eq!(inside.unseen_bytes(1, || unreachable!("on the way of every allocation")), 0);
        assert_eq!(inside.heartbeat_ns(), 77);
        assert!(outside.set(&gpu(9, 1)).is_err());
        assert!(outside.set_lease(&[9; 16], &lease).is_err());
    }

    #[test]
    fn a_file_that_is_no_limits_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("limits");
        assert_eq!(Limits::open(&path).err().unwrap().kind(), io::ErrorKind::NotFound);
        for content in [Vec::new(), vec![0; 100], vec![0; LIMITS_SIZE], vec![0xff; LIMITS_SIZE]] {
            fs::write(&path, content).unwrap();
            assert_eq!(Limits::open(&path).err().unwrap().kind(), io::ErrorKind::InvalidData);
            assert!(LimitsWriter::open(&path).is_err());
        }
        Limits::create(&path, &[gpu(1, 1)]).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        bytes[8] += 1;
        fs::write(&path, bytes).unwrap();
        let error = Limits::open(&path).err().unwrap().to_string();
        assert!(error.contains(&format!("version {}", LIMITS_VERSION + 1)), "{error}");
    }

    #[test]
    fn a_share_without_gpus_or_with_one_twice_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("limits");
        let many: Vec<_> = (0..17).map(|n| gpu(n, 1)).collect();
        for gpus in [&[][..], &[gpu(1, 1), gpu(1, 2)], &many] {
            assert!(Limits::create(&path, gpus).is_err());
            assert!(!path.exists());
        }
    }
}
