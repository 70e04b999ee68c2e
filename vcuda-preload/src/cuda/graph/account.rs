//! What this process's graphs hold, and who of them has what: the books, which the driver's figure sets right.

use std::{collections::BTreeMap, ffi::c_void};

use crate::{
    cuda::{
        types::{CUDA_SUCCESS, Device, Exec},
        whole,
    },
    pace::Lane,
    real::driver,
    share::Share,
};

/// CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT.
const RESERVED_MEM_CURRENT: i32 = 2;

/// Memory that this process's graphs hold.
#[derive(Default)]
pub(crate) struct Graphs {
    /// Per device that graphs have allocated on.
    pub(super) devices: BTreeMap<Device, Account>,
    /// Executable graphs that allocate.
    pub(super) execs: BTreeMap<Exec, Executable>,
    /// Executable graphs that there were; the number of the last.
    pub(super) made: u64,
    /// Runs of graphs that allocate which have not come back from the driver, by number.
    pub(super) under_way: BTreeMap<u64, Run>,
    /// Runs that there were; the number of the last.
    pub(super) begun: u64,
    /// Calls under way that have the driver let go of memory of graphs.
    pub(super) trimming: u32,
}

/// An executable graph that allocates.
#[derive(Clone)]
pub(super) struct Executable {
    /// The handle may be another's later; this is not.
    pub number: u64,
    /// Bytes per device.
    pub wants: Vec<(Device, u64)>,
    /// Bytes of managed memory that need not be anywhere, until a kernel draws them to its GPU.
    pub drawn: u64,
    /// Where they are counted since it first ran, and how many.
    pub drawn_to: Option<(Device, u64)>,
    /// It allocates what it does not free.
    pub leaves: bool,
    /// Where it has its memory, if it surely still does.
    pub has_memory_in: Option<Lane>,
}

/// A run, or upload, that has begun.
pub(super) struct Run {
    pub of: Executable,
    /// None where there is no context, of which the driver will say more.
    pub lane: Option<Lane>,
    /// It has its memory from before; else what it may take is expected.
    pub relies: bool,
    /// Its memory may have become another's since it began.
    pub lost: bool,
}

pub(super) struct Account {
    pub gpu: usize,
    /// Bytes that the share's account has for graphs on this device.
    pub charged: u64,
    /// Of these, taken for runs that have not come back from the driver.
    pub expected: u64,
}

impl Account {
    pub fn of(gpu: usize) -> Self {
        Self { gpu, charged: 0, expected: 0 }
    }
}

/// Bytes that the driver keeps for graphs on a device, if it says so.
fn reserved(device: Device) -> Option<u64> {
    let mut bytes = 0_u64;
    // SAFETY: `bytes` has the attribute's type and outlives the call.
    let result = unsafe {
        driver!(cuda::cuDeviceGetGraphMemAttribute(
            device => Device, RESERVED_MEM_CURRENT => i32, (&raw mut bytes).cast() => *mut c_void,
        ))
    };
    (result == CUDA_SUCCESS).then_some(whole(bytes))
}

impl Graphs {
    /// Brings the accounts in line with what the driver keeps, and what runs under way may still take.
    pub(super) fn settle(&mut self, share: &Share) {
        let beyond: BTreeMap<Device, (u64, u64)> = self
            .devices
            .keys()
            .map(|device| (*device, (self.drawn_to(*device), self.taken_again(*device))))
            .collect();
        for (device, account) in &mut self.devices {
            let Some(reserved) = reserved(*device) else { continue };
            let (drawn, again) = beyond.get(device).copied().unwrap_or_default();
            let least = reserved.saturating_add(account.expected).saturating_add(drawn);
            if least > account.charged {
                share.charge(account.gpu, least - account.charged);
                account.charged = least;
            } else {
                // Of what is free, runs that have lost their memory may take as much again.
                let most = least.saturating_add(again);
                share.give(account.gpu, account.charged.saturating_sub(most));
                account.charged = account.charged.min(most);
            }
        }
    }

    /// Bytes of a device that runs under way relied on and may have lost. Those of one lane have the same memory.
    fn taken_again(&self, device: Device) -> u64 {
        let mut lanes: Vec<(Option<Lane>, u64)> = Vec::new();
        for run in self.under_way.values().filter(|run| run.relies && run.lost) {
            let bytes = run.of.bytes_of(device);
            match lanes.iter_mut().find(|(lane, _)| *lane == run.lane) {
                Some((_, most)) => *most = bytes.max(*most),
                None => lanes.push((run.lane, bytes)),
            }
        }
        lanes.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Bytes that executable graphs have had drawn to a device, of which the driver tells nothing.
    fn drawn_to(&self, device: Device) -> u64 {
        let on_it = self.execs.values().filter_map(|exec| exec.drawn_to).filter(|(to, _)| *to == device);
        on_it.fold(0, |sum, (_, bytes)| sum.saturating_add(bytes))
    }

    /// Notes what an executable graph that allocates is from now on. What it was before has left its managed memory where it is
    /// until it runs again.
    pub(super) fn enter(&mut self, exec: Exec, (wants, drawn): (Vec<(Device, u64)>, u64), leaves: bool) {
        self.made += 1;
        let drawn_to = self.execs.get(&exec).and_then(|before| before.drawn_to);
        let now = Executable { number: self.made, wants, drawn, drawn_to, leaves, has_memory_in: None };
        self.execs.insert(exec, now);
    }

    /// The driver has thrown away all of a device.
    pub(super) fn reset(&mut self, device: Device) {
        let on_it = |exec: &&mut Executable| exec.drawn_to.is_some_and(|(to, _)| to == device);
        self.execs.values_mut().filter(on_it).for_each(|exec| exec.drawn_to = None);
    }

    /// Whether a run of `exec` in `lane` has its memory there. One that leaves memory behind keeps what others of its lane have.
    pub(super) fn has_memory(&self, exec: &Executable, lane: Option<Lane>) -> bool {
        let keeps_it =
            |run: &Run| run.lane == lane && run.of.number != exec.number && (run.of.leaves || exec.leaves);
        lane.is_some() && exec.has_memory_in == lane && !self.under_way.values().any(keeps_it)
    }

    /// A run begins; its number.
    pub(super) fn begin(&mut self, of: Executable, lane: Option<Lane>, relies: bool) -> u64 {
        self.begun += 1;
        self.under_way.insert(self.begun, Run { of, lane, relies, lost: self.trimming > 0 });
        self.begun
    }

    /// What the driver keeps for graphs on a device may go from now on, until `trimming` is again what it was.
    pub(super) fn begin_trim(&mut self, device: Device) {
        self.trimming += 1;
        let all = self.execs.values_mut().filter(|exec| exec.bytes_of(device) > 0);
        all.for_each(|exec| exec.has_memory_in = None);
        let all = self.under_way.values_mut().filter(|run| run.of.bytes_of(device) > 0);
        all.for_each(|run| run.lost = true);
    }

    /// What graphs have in a lane of which `lost` says so they may have no more.
    pub(super) fn lose(&mut self, lost: impl Fn(Lane) -> bool) {
        let all = self.execs.values_mut();
        all.filter(|exec| exec.has_memory_in.is_some_and(&lost)).for_each(|exec| exec.has_memory_in = None);
        // A lane that is lost may be gone: it is not asked about again.
        let all = self.under_way.values_mut().filter(|run| !run.lost);
        all.filter(|run| run.lane.is_none_or(&lost)).for_each(|run| run.lost = true);
    }

    /// Bytes that the driver keeps for graphs.
    pub(super) fn kept(&self) -> u64 {
        self.devices.keys().fold(0, |kept, device| kept + reserved(*device).unwrap_or(0))
    }
}

impl Executable {
    /// What of its managed memory is yet to be counted for a run on `device`, and where.
    pub(super) fn to_draw(&self, device: Device) -> Option<(Device, u64)> {
        let (to, counted) = self.drawn_to.unwrap_or((device, 0));
        (self.drawn > counted).then(|| (to, self.drawn - counted))
    }

    /// Bytes of a device that it wants.
    fn bytes_of(&self, device: Device) -> u64 {
        self.wants.iter().filter(|(of, _)| *of == device).map(|(_, bytes)| bytes).sum()
    }
}
