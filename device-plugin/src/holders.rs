//! What processes hold of the GPUs' memory, as the driver says. Who puts it on shares' accounts asks; the NVML thread, which
//! alone calls NVML, answers when it comes by. Neither holds the other up.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
};

use nvml_wrapper::{
    Nvml, enums::device::UsedGpuMemory, error::NvmlError, struct_wrappers::device::ProcessInfo,
};
use tracing::debug;
use vcuda_config::GpuUuid;

/// Bytes by process, as this PID namespace numbers it, of each GPU that answered.
pub(crate) type Held = BTreeMap<GpuUuid, BTreeMap<u32, u64>>;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Holders(Mutex<Option<Asked>>);

#[derive(Debug)]
struct Asked {
    gpus: BTreeSet<GpuUuid>,
    answer: Sender<Held>,
}

impl Holders {
    /// Asks of these GPUs; a question that nobody has answered yet is withdrawn.
    pub(crate) fn ask(&self, gpus: BTreeSet<GpuUuid>) -> Receiver<Held> {
        let (answer, answered) = channel();
        *self.asked() = Some(Asked { gpus, answer });
        answered
    }

    /// Answers, if somebody has asked.
    pub(crate) fn answer(&self, nvml: &Nvml) {
        // Never held while the driver is asked.
        let Some(Asked { gpus, answer }) = self.asked().take() else { return };
        let mut held = Held::new();
        for gpu in gpus {
            match holders(nvml, &gpu) {
                Ok(of_gpu) => {
                    held.insert(gpu, of_gpu);
                }
                Err(error) => debug!(%gpu, %error, "the driver does not tell who holds its memory"),
            }
        }
        // Who asked may have gone on without it.
        let _ = answer.send(held);
    }

    fn asked(&self) -> MutexGuard<'_, Option<Asked>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn holders(nvml: &Nvml, gpu: &GpuUuid) -> Result<BTreeMap<u32, u64>, NvmlError> {
    let device = nvml.device_by_uuid(gpu.as_str())?;
    let compute = device.running_compute_processes()?;
    let graphics = match device.running_graphics_processes() {
        // A GPU that draws nothing.
        Err(NvmlError::NotSupported) => Vec::new(),
        graphics => graphics?,
    };
    Ok(by_process(compute.into_iter().chain(graphics)))
}

/// One that computes and draws is in both lists, with all that it holds. Processes of MIG devices, and those of which nothing is
/// told, are left out: too little on an account refuses nothing that fits.
fn by_process(processes: impl Iterator<Item = ProcessInfo>) -> BTreeMap<u32, u64> {
    let mut held = BTreeMap::new();
    for process in processes.filter(|process| process.gpu_instance_id.is_none()) {
        if let UsedGpuMemory::Used(bytes) = process.used_gpu_memory {
            let known: &mut u64 = held.entry(process.pid).or_default();
            *known = bytes.max(*known);
        }
    }
    held
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, used_gpu_memory: UsedGpuMemory) -> ProcessInfo {
        ProcessInfo { pid, used_gpu_memory, gpu_instance_id: None, compute_instance_id: None }
    }

    #[test]
    fn a_process_counts_once_and_only_what_is_told_of_it() {
        use UsedGpuMemory::{Unavailable, Used};
        let in_mig = ProcessInfo { gpu_instance_id: Some(1), ..process(5, Used(100)) };
        let all = [process(3, Used(100)), process(4, Unavailable), in_mig, process(3, Used(120))];
        assert_eq!(by_process(all.into_iter()), [(3, 120)].into());
    }

    #[test]
    fn a_question_that_was_withdrawn_gets_no_answer() {
        let holders = Holders::default();
        let first = holders.ask(BTreeSet::new());
        let second = holders.ask(BTreeSet::new());
        let Asked { answer, .. } = holders.asked().take().unwrap();
        answer.send(Held::new()).unwrap();
        assert!(first.recv().is_err() && second.recv().is_ok());
    }
}
