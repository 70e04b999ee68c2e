//! `vcuda-device-plugin set`: changes what a running container may use, within what its GPU has left.

use std::{fmt, io, time::Duration};

use ledger::{
    Change, ChangeError, Changed, GpuShare, Inventory, InventoryError, Ledger, LedgerError, ShareFolder,
    ShareKind, ShareName, ShareRecord, ShareState,
};
use region::{LimitsWriter, UsageReader};
use serde::Serialize;
use thiserror::Error;
use vcuda_config::{
    GpuUuid, MEMORY_UNIT_BYTES, MemoryFloor, NodeFile,
    floor::{Question, ask},
};

/// For the device plugin to have the driver follow; it takes milliseconds.
const FLOOR_WITHIN: Duration = Duration::from_secs(5);

/// Why nothing was set.
#[derive(Debug, Error)]
pub enum SetError {
    /// No inventory, so nothing is known of the GPUs.
    #[error(transparent)]
    Inventory(#[from] InventoryError),
    /// The shares cannot be read or changed.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// There is no such share on this node.
    #[error(
        "{pod}, container {container}: has no share on this node; `vcuda-device-plugin status` lists all"
    )]
    NoShare {
        /// `namespace/name`.
        pod: String,
        /// The container.
        container: String,
    },
    /// Pods of the same name, one after the other, and more than one is still here.
    #[error(
        "{pod}, container {container}: {count} pods of this name have such a share; wait until the old ones are gone"
    )]
    Ambiguous {
        /// `namespace/name`.
        pod: String,
        /// The container.
        container: String,
        /// How many.
        count: usize,
    },
    /// The ledger refuses.
    #[error("{pod}, container {container}: {reason}")]
    Change {
        /// `namespace/name`.
        pod: String,
        /// The container.
        container: String,
        /// Why.
        reason: ChangeError,
    },
}

impl SetError {
    /// Whether it is what was asked that cannot be, rather than the node that is in disorder.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Change {
                reason: ChangeError::Whole
                    | ChangeError::Amount { .. }
                    | ChangeError::NoRoom { .. }
                    | ChangeError::NoGpu { .. },
                ..
            }
        )
    }

    /// Whether there is nothing of that name.
    pub fn is_unknown(&self) -> bool {
        matches!(
            self,
            Self::NoShare { .. }
                | Self::Ambiguous { .. }
                | Self::Change { reason: ChangeError::Unknown(_), .. }
        )
    }
}

/// What was set.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
    /// The GPU.
    pub gpu: GpuUuid,
    /// As it was.
    pub before: Amounts,
    /// As it is.
    pub after: Amounts,
    /// Bytes that the container holds, where that is more than it may now: it keeps them, and gets no more until it is
    /// below.
    pub held_above: Option<u64>,
}

/// What a share holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Amounts {
    /// Percent of the GPU's compute time.
    pub core: u32,
    /// Percent that it may use while others leave it idle.
    pub core_limit: u32,
    /// Memory ceiling in bytes.
    pub memory_bytes: u64,
}

/// Sets `change` for the share of `container` in `pod` (`namespace/name`), and tells the container.
///
/// # Errors
///
/// See [`SetError`].
pub fn set(file: &NodeFile, pod: &PodName, container: &str, change: Change) -> Result<Report, SetError> {
    let inventory = Inventory::load(&file.paths.inventory())?;
    let ledger = Ledger::open(&file.paths.shares())?;
    let name = find(&ledger, pod, container)?;
    let tell =
        |record: &ShareRecord, folder: &ShareFolder| tell(record, folder, file.compute.work_conserving);
    let Changed { before, after } = ledger
        .change(&inventory, &name, change, tell)
        .map_err(|reason| SetError::Change { pod: pod.to_string(), container: container.into(), reason })?;
    if file.memory.floor != MemoryFloor::Shim {
        // Where the device plugin does not run, it sees to it when it does.
        let _ = ask(&file.paths.floor_socket(), &Question::Renew { share: name.to_string() }, FLOOR_WITHIN);
    }
    let amounts = |record: &ShareRecord, gpu: &GpuShare| Amounts {
        core: gpu.core,
        core_limit: record.limits(file.compute.work_conserving)[0].core_limit_percent,
        memory_bytes: gpu.memory_bytes,
    };
    // A share that can be changed spans one GPU.
    let (was, is) = (&before.gpus[0], &after.gpus[0]);
    Ok(Report {
        namespace: after.pod.namespace.clone(),
        pod: after.pod.name.clone(),
        container: after.container.name.clone(),
        gpu: is.uuid.clone(),
        before: amounts(&before, was),
        after: amounts(&after, is),
        held_above: held(&ShareFolder::new(&file.paths.shares(), &name))
            .filter(|held| *held > is.memory_bytes),
    })
}

fn find(ledger: &Ledger, pod: &PodName, container: &str) -> Result<ShareName, SetError> {
    let records = ledger.shares()?.records;
    let is_meant = |record: &ShareRecord| {
        record.pod.namespace == pod.namespace
            && record.pod.name == pod.name
            && record.container.name == container
    };
    let mut meant: Vec<_> = records.into_iter().filter(|(_, record)| is_meant(record)).collect();
    if meant.len() > 1 {
        meant.retain(|(_, record)| record.state == ShareState::Running);
    }
    let (pod, container) = (pod.to_string(), container.to_owned());
    match meant.len() {
        0 => Err(SetError::NoShare { pod, container }),
        1 => Ok(meant.remove(0).0),
        count => Err(SetError::Ambiguous { pod, container, count }),
    }
}

/// Writes into the `limits` that the container has mapped.
fn tell(record: &ShareRecord, folder: &ShareFolder, work_conserving: bool) -> io::Result<()> {
    if record.kind == ShareKind::Whole || !record.shim {
        return Ok(());
    }
    let writer = LimitsWriter::open(&folder.limits())?;
    record.limits(work_conserving).iter().try_for_each(|limit| writer.set(limit))
}

fn held(folder: &ShareFolder) -> Option<u64> {
    let usage = UsageReader::open(&folder.usage()).ok()?.snapshot().ok()?;
    usage.gpus.first().map(|gpu| gpu.used_bytes)
}

/// A pod, `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodName {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl std::str::FromStr for PodName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
                Ok(Self { namespace: namespace.into(), name: name.into() })
            }
            _ => Err("must read <namespace>/<name>, such as default/train".into()),
        }
    }
}

impl fmt::Display for PodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A percentage, or a multiple of 100 for whole GPUs, in a text. Which of them can be, is up to what it is for.
///
/// # Errors
///
/// A text for the command line.
pub fn percent(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "must be a whole number of percent, without a sign, such as 20".into())
}

/// Units of 256 MiB in a text: a size such as `16GiB` or `4096MiB`, or their number, as a pod asks for them.
///
/// # Errors
///
/// A text for the command line.
pub fn memory_units(text: &str) -> Result<std::num::NonZeroU32, String> {
    /// What is not of this form.
    const FORM: &str =
        "must be a size in MiB, GiB or TiB, such as 16GiB, or a number of units of 256 MiB, such as 64";
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let number: u64 = digits.parse().map_err(|_| FORM)?;
    let each = match &text[digits.len()..] {
        "" => MEMORY_UNIT_BYTES,
        "MiB" | "Mi" => 1 << 20,
        "GiB" | "Gi" => 1 << 30,
        "TiB" | "Ti" => 1 << 40,
        _ => return Err(FORM.into()),
    };
    if number == 0 {
        return Err("no memory is no share; must be at least 256MiB, which is 1 unit".into());
    }
    let bytes = number.checked_mul(each).ok_or("is more than any GPU has")?;
    if !bytes.is_multiple_of(MEMORY_UNIT_BYTES) {
        return Err("is no multiple of 256MiB, in which memory is given out".into());
    }
    let units = u32::try_from(bytes / MEMORY_UNIT_BYTES).ok().and_then(std::num::NonZeroU32::new);
    units.ok_or_else(|| "is more than any GPU has".into())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { namespace, pod, container, gpu, before, after, .. } = self;
        writeln!(f, "{namespace}/{pod} {container} on {gpu}:")?;
        let mut line = |name: &str, was: u64, is: u64, unit: &str| match was == is {
            true => writeln!(f, "  {name:10}  {is} {unit}"),
            false => writeln!(f, "  {name:10}  {was} -> {is} {unit}"),
        };
        line("core", before.core.into(), after.core.into(), "%")?;
        line("core limit", before.core_limit.into(), after.core_limit.into(), "%")?;
        line("memory", before.memory_bytes >> 20, after.memory_bytes >> 20, "MiB")?;
        if let Some(held) = self.held_above {
            writeln!(
                f,
                "  it holds {} MiB, and gets no more until it has given back what is above its new ceiling",
                held >> 20
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, num::NonZeroU32};

    use ledger::Terms;
    use region::Limits;
    use vcuda_config::Request;

    use super::*;
    use crate::testing;

    /// A node with one GPU of 80 GiB and a share of 20 core and 8 GiB on it.
    fn node() -> (tempfile::TempDir, NodeFile) {
        let folder = tempfile::tempdir().unwrap();
        let mut file = NodeFile::default();
        file.paths.state = folder.path().into();
        let inventory = testing::inventory(&ledger::boot_id().unwrap(), vec![testing::gpu(1, 320)]);
        inventory.store(&file.paths.inventory()).unwrap();
        bind(&file, "uid-1", "train", 20, 32);
        (folder, file)
    }

    fn bind(file: &NodeFile, uid: &str, pod: &str, core: u32, units: u32) -> ledger::Bound {
        let claim = testing::claim(uid, pod, Request::new(core, units).unwrap(), Terms::default());
        let ledger = Ledger::open(&file.paths.shares()).unwrap();
        let inventory = Inventory::load(&file.paths.inventory()).unwrap();
        ledger.bind(&inventory, &claim, &[], testing::fill).unwrap()
    }

    fn pod(text: &str) -> PodName {
        text.parse().unwrap()
    }

    fn change(core: Option<u32>, memory: Option<&str>, core_limit: Option<u32>) -> Change {
        Change { core, memory_units: memory.map(|text| memory_units(text).unwrap()), core_limit }
    }

    #[test]
    fn a_running_container_sees_the_change_at_once_and_a_restarted_one_still_has_it() {
        let (_folder, file) = node();
        let place = ShareFolder::new(&file.paths.shares(), &"uid-1_main".parse().unwrap());
        let inside = Limits::open(&place.limits()).unwrap();
        let report = set(&file, &pod("ns/train"), "main", change(Some(40), Some("16GiB"), Some(60))).unwrap();
        let limit = inside.get(0).unwrap();
        assert_eq!((limit.core_percent, limit.core_limit_percent, limit.memory_bytes), (40, 60, 16 << 30));
        assert_eq!(limit.own_slots.count(), 40);
        assert_eq!(report.before, Amounts { core: 20, core_limit: 20, memory_bytes: 8 << 30 });
        assert_eq!(report.after, Amounts { core: 40, core_limit: 60, memory_bytes: 16 << 30 });
        assert!(report.to_string().contains("20 -> 40 %"), "{report}");

        let again = bind(&file, "uid-1", "train", 20, 32).record;
        assert_eq!(
            (again.gpus[0].core, again.gpus[0].memory_bytes, again.core_limit()),
            (40, 16 << 30, Some(60))
        );
        // A later change of one amount leaves the others.
        set(&file, &pod("ns/train"), "main", change(Some(10), None, None)).unwrap();
        let record = ShareRecord::load(&file.paths.shares(), &again.name().unwrap()).unwrap();
        assert_eq!(
            (record.gpus[0].core, record.gpus[0].memory_bytes, record.core_limit()),
            (10, 16 << 30, Some(60))
        );
    }

    #[test]
    fn what_the_gpu_does_not_have_is_refused_and_changes_nothing() {
        let (_folder, file) = node();
        bind(&file, "uid-2", "other", 70, 256);
        let shares = file.paths.shares();
        let before = fs::read(shares.join("uid-1_main/share.json")).unwrap();
        for (wanted, named) in [
            (change(Some(31), None, None), "30 core"),
            (change(None, Some("17GiB"), None), "16 GiB left"),
            (change(Some(100), None, None), "1 to 99"),
            (change(Some(0), None, None), "1 to 99"),
            (change(None, None, Some(19)), "core limit of 19"),
            (change(None, None, Some(101)), "core limit of 101"),
        ] {
            let error = set(&file, &pod("ns/train"), "main", wanted).unwrap_err();
            assert!(error.is_refusal() && error.to_string().contains(named), "{error}");
        }
        assert_eq!(fs::read(shares.join("uid-1_main/share.json")).unwrap(), before);
        set(&file, &pod("ns/train"), "main", change(Some(30), Some("16GiB"), None)).unwrap();
    }

    #[test]
    fn a_share_that_is_not_there_is_named() {
        let (_folder, file) = node();
        for (name, container) in [("ns/train", "side"), ("other/train", "main"), ("ns/other", "main")] {
            let error = set(&file, &pod(name), container, change(Some(30), None, None)).unwrap_err();
            assert!(error.is_unknown() && error.to_string().contains(name), "{error}");
        }
        bind(&file, "uid-3", "train", 5, 1);
        let error = set(&file, &pod("ns/train"), "main", change(Some(30), None, None)).unwrap_err();
        assert!(error.is_unknown() && error.to_string().contains("2 pods"), "{error}");
        Ledger::open(&file.paths.shares()).unwrap().mark_stopped("id-uid-3").unwrap();
        set(&file, &pod("ns/train"), "main", change(Some(30), None, None)).unwrap();
    }

    #[test]
    fn whole_gpus_have_nothing_to_set() {
        let (_folder, file) = node();
        Ledger::open(&file.paths.shares()).unwrap().release(&"uid-1_main".parse().unwrap()).unwrap();
        bind(&file, "uid-4", "whole", 100, 0);
        let error = set(&file, &pod("ns/whole"), "main", change(Some(50), None, None)).unwrap_err();
        assert!(error.is_refusal() && error.to_string().contains("whole GPUs"), "{error}");
    }

    #[test]
    fn sizes_and_pods_are_read_as_people_write_them() {
        assert_eq!(memory_units("16GiB"), Ok(NonZeroU32::new(64).unwrap()));
        assert_eq!(memory_units("512Mi"), Ok(NonZeroU32::new(2).unwrap()));
        assert_eq!(memory_units("64"), Ok(NonZeroU32::new(64).unwrap()), "units, as a pod asks for them");
        for (odd, said) in [
            ("16GB", "such as 16GiB"),
            ("GiB", "such as 16GiB"),
            ("1.5GiB", "such as 16GiB"),
            ("-1GiB", "such as 16GiB"),
            ("", "units of 256 MiB, such as 64"),
            ("100MiB", "no multiple of 256MiB"),
            ("0GiB", "at least 256MiB"),
            ("0", "at least 256MiB"),
            ("4294967296", "more than any GPU has"),
            ("17179869184GiB", "more than any GPU has"),
        ] {
            let error = memory_units(odd).unwrap_err();
            assert!(error.contains(said), "{odd}: {error}");
        }
        assert_eq!((percent("20"), percent("300")), (Ok(20), Ok(300)));
        for odd in ["abc", "20%", "1.5", "-1", "", "4294967296"] {
            assert!(percent(odd).unwrap_err().contains("such as 20"), "{odd}");
        }
        for odd in ["train", "/train", "ns/", "a/b/c", ""] {
            assert!(odd.parse::<PodName>().is_err(), "{odd}");
        }
    }
}
