//! XIDs of GPUs, as NVML tells of them.

use std::time::Duration;

use nvml_wrapper::{EventSet, Nvml, bitmasks::event::EventTypes, enums::event::XidError, error::NvmlError};
use tracing::{debug, warn};
use vcuda_config::GpuUuid;

use super::SeenGpu;

/// NVML's number for an XID that it does not know (nvml.h, nvmlEventData_t).
const XID_UNKNOWN: u64 = 999;

/// What came of waiting for an event.
pub(super) enum Wait {
    Nothing,
    /// It failed; what is lost shows in the next survey.
    Unable,
    Xid(GpuUuid, u64),
}

/// The subscription to events of all GPUs that have any.
#[derive(Default)]
pub(super) struct Events<'nvml> {
    set: Option<EventSet<'nvml>>,
    /// The GPUs for which it was made: one that was lost and is back must be subscribed to again.
    gpus: Vec<GpuUuid>,
    /// A failure was told of; it may go on for hours.
    told: bool,
}

impl<'nvml> Events<'nvml> {
    pub(super) fn follow(&mut self, nvml: &'nvml Nvml, gpus: &[SeenGpu]) {
        if self.set.is_some() && self.gpus.iter().eq(gpus.iter().map(|gpu| &gpu.uuid)) {
            return;
        }
        self.gpus = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let mut without = Vec::new();
        // A failed registration takes the whole set with it, so the set is made anew without that GPU.
        self.set = loop {
            match subscribe(nvml, self.gpus.iter().filter(|gpu| !without.contains(*gpu))) {
                Ok(set) => break Some(set),
                Err((Some(gpu), error)) => {
                    if !self.told {
                        warn!(%gpu, %error, "reports no XIDs; that it does not answer is noticed all the same");
                    }
                    without.push(gpu);
                }
                Err((None, error)) => {
                    if !self.told {
                        warn!(%error, "no XIDs are reported; only a GPU that does not answer is noticed");
                    }
                    self.told = true;
                    break None;
                }
            }
        };
        self.told |= !without.is_empty();
    }

    pub(super) fn wait(&mut self, longest: Duration) -> Wait {
        let Some(set) = &self.set else { return Wait::Unable };
        match set.wait(longest.as_millis().try_into().unwrap_or(u32::MAX)) {
            Ok(event) => {
                let xid = match event.event_data {
                    Some(XidError::Value(xid)) => xid,
                    Some(XidError::Unknown) => XID_UNKNOWN,
                    None => return Wait::Nothing,
                };
                match event.device.uuid().map(|uuid| uuid.parse()) {
                    Ok(Ok(gpu)) => Wait::Xid(gpu, xid),
                    _ => {
                        debug!(xid, "XID of a GPU that does not say its UUID");
                        Wait::Unable
                    }
                }
            }
            Err(NvmlError::Timeout) => {
                self.told = false;
                Wait::Nothing
            }
            Err(error) => {
                if !std::mem::replace(&mut self.told, true) {
                    warn!(%error, "no XIDs are reported; until they are, only a GPU that does not answer is noticed");
                }
                self.set = None;
                Wait::Unable
            }
        }
    }
}

fn subscribe<'a, 'nvml>(
    nvml: &'nvml Nvml,
    gpus: impl Iterator<Item = &'a GpuUuid>,
) -> Result<EventSet<'nvml>, (Option<GpuUuid>, NvmlError)> {
    let mut set = nvml.create_event_set().map_err(|error| (None, error))?;
    for gpu in gpus {
        let failed = |error| (Some(gpu.clone()), error);
        let device = nvml.device_by_uuid(gpu.as_str()).map_err(failed)?;
        set = device
            .register_events(EventTypes::CRITICAL_XID_ERROR, set)
            .map_err(|error| (Some(gpu.clone()), error.error))?;
    }
    Ok(set)
}
