//! One share on disk: its name, its folder, its record. The record is what this node promised to one container;
//! nothing in it comes from a file that a container can write.

use std::{
    fmt,
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    str::FromStr,
};

use region::{GpuLimit, Slots};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use vcuda_config::{CORE_PER_GPU, GpuUuid};

use crate::{Change, Terms, files, room, timetable};

/// The one version of `share.json` that this build writes and reads.
const RECORD_VERSION: u32 = 1;

/// A record of 16 GPUs is below 4 KiB.
const RECORD_MAX_BYTES: u64 = 64 << 10;

/// What 64 GPUs lack is below this.
const WHY_MAX_BYTES: u64 = 16 << 10;

/// Longest pod UID that is taken. Kubernetes' own are 36 characters, those of static pods 32.
const POD_UID_MAX: usize = 128;

/// Longest container name: a DNS label.
const CONTAINER_MAX: usize = 63;

/// Name of a share, `<pod-uid>_<container>`, which is also the name of its folder. It holds neither `/` nor a
/// leading `.`, so it can never lead out of the shares folder or hide in it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ShareName {
    text: String,
    /// Length of the pod UID.
    uid: usize,
}

/// Why a text names no share.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{0:?} names no share; it must read <pod-uid>_<container>, of letters, digits, '-', '.' and (in the container) '_'"
)]
pub struct ShareNameError(String);

impl ShareName {
    /// The name of the share of `container` in the pod with this UID.
    pub fn new(pod_uid: &str, container: &str) -> Result<Self, ShareNameError> {
        format!("{pod_uid}_{container}").parse()
    }

    /// UID of the pod.
    pub fn pod_uid(&self) -> &str {
        &self.text[..self.uid]
    }

    /// Name of the container.
    pub fn container(&self) -> &str {
        &self.text[self.uid + 1..]
    }

    /// The whole name.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl FromStr for ShareName {
    type Err = ShareNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || ShareNameError(text.chars().take(96).collect());
        // A pod UID holds no '_', so the first one ends it.
        let (uid, container) = text.split_once('_').ok_or_else(bad)?;
        let plain = |part: &str, max: usize, more: &[u8]| {
            part.len() <= max
                && part.bytes().next().is_some_and(|c| c.is_ascii_alphanumeric())
                && part.bytes().all(|c| c.is_ascii_alphanumeric() || more.contains(&c))
        };
        if plain(uid, POD_UID_MAX, b"-.") && plain(container, CONTAINER_MAX, b"-._") {
            Ok(Self { text: text.to_owned(), uid: uid.len() })
        } else {
            Err(bad())
        }
    }
}

impl TryFrom<String> for ShareName {
    type Error = ShareNameError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<ShareName> for String {
    fn from(name: ShareName) -> Self {
        name.text
    }
}

impl fmt::Display for ShareName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The folder of one share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareFolder(PathBuf);

impl ShareFolder {
    /// The folder of the share `name` below the shares folder.
    pub fn new(shares: &Path, name: &ShareName) -> Self {
        Self(shares.join(name.as_str()))
    }

    pub(crate) fn at(path: PathBuf) -> Self {
        Self(path)
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The record, `share.json`.
    pub fn record(&self) -> PathBuf {
        self.0.join("share.json")
    }

    /// The limits that the node writes and the container maps read-only.
    pub fn limits(&self) -> PathBuf {
        self.0.join("limits")
    }

    /// The usage that the container writes, in a file system of its own: see [`Self::make_room`].
    pub fn usage(&self) -> PathBuf {
        self.0.join(room::FOLDER).join("usage")
    }

    /// Makes the room that [`Self::usage`] lies in: 3 MiB, in memory, which the container can fill without harm. It
    /// goes when the ledger removes the share.
    ///
    /// # Errors
    /// It is there already, or cannot be mounted.
    pub fn make_room(&self) -> io::Result<()> {
        room::make(&self.0.join(room::FOLDER))
    }

    /// Why the share is where it is, in words, for people.
    pub fn why(&self) -> PathBuf {
        self.0.join("why")
    }

    /// What [`ShareFolder::why`] says; none where nobody noted it.
    pub fn reason(&self) -> Option<String> {
        let text = String::from_utf8(files::read_bounded(&self.why(), WHY_MAX_BYTES).ok()?).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    /// What the driver holds the container to, see [`crate::Floor`].
    pub fn floor(&self) -> PathBuf {
        self.0.join("floor.json")
    }

    /// What the container sees as `/etc/ld.so.preload`.
    pub fn preload(&self) -> PathBuf {
        self.0.join("ld.so.preload")
    }
}

/// What `share.json` says: which container holds which part of which GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ShareRecord {
    /// Format version.
    pub version: u32,
    /// The pod.
    pub pod: PodRef,
    /// The container that the share was last bound to.
    pub container: ContainerRef,
    /// The boot during which it was bound, see [`crate::boot_id`].
    pub boot_id: String,
    /// Part of a GPU, or whole GPUs.
    pub kind: ShareKind,
    /// What it holds, one entry a GPU, in the order of the request's placement.
    pub gpus: Vec<GpuShare>,
    /// Whether its container runs.
    pub state: ShareState,
    /// When it was bound to this container, in milliseconds since 1970.
    pub bound_at: u64,
    /// The same, in milliseconds since the start of `boot_id`: by this it is compared, since nobody sets that clock. 0 in
    /// the records of an earlier version.
    #[serde(default)]
    pub bound_uptime: u64,
    /// Whether the container was given the shim, with limits and usage. Whole GPUs go without.
    pub shim: bool,
    /// What the pod's owner says about compute time.
    #[serde(default, skip_serializing_if = "Terms::is_default")]
    pub terms: Terms,
    /// What an operator has changed since. `gpus` has it already.
    #[serde(default, skip_serializing_if = "Change::is_empty")]
    pub set: Change,
}

/// The pod of a share, as the runtime names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodRef {
    /// UID.
    pub uid: String,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// ID of the pod's sandbox; a pod whose sandbox is made anew gets another one.
    pub sandbox_id: String,
}

/// The container of a share, as the runtime names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerRef {
    /// Name in the pod.
    pub name: String,
    /// ID in the runtime; a restarted container gets another one.
    pub id: String,
}

/// What a share holds of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuShare {
    /// The GPU.
    pub uuid: GpuUuid,
    /// Number of its device node `/dev/nvidia<minor>` when the share was bound.
    pub minor: u32,
    /// Percent of its compute time, 1 to 100.
    pub core: u32,
    /// Device memory in bytes.
    pub memory_bytes: u64,
    /// Slots of the GPU's period that are its own, one for each core; none for whole GPUs, and for a share that an
    /// earlier version bound and that has not got its own yet.
    #[serde(default, skip_serializing_if = "no_slots", with = "timetable::text")]
    pub slots: Slots,
}

fn no_slots(slots: &Slots) -> bool {
    slots.is_empty()
}

/// Kind of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShareKind {
    /// Part of one GPU.
    Share,
    /// Whole GPUs.
    Whole,
}

/// Whether a share's container runs. A stopped one keeps its GPU for the next start of the same container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShareState {
    /// Bound to a container that was created and has not ended.
    Running,
    /// Its container has ended.
    Stopped,
}

/// Why a record cannot be read.
#[derive(Debug, Error)]
pub enum RecordError {
    /// The file cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is no record of this version.
    #[error("{path}: {reason}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

impl ShareRecord {
    /// The format version that this build writes and reads.
    pub const VERSION: u32 = RECORD_VERSION;

    /// Reads the record of share `name` below the shares folder. Needs no lock: a record is replaced whole.
    pub fn load(shares: &Path, name: &ShareName) -> Result<Self, RecordError> {
        let path = ShareFolder::new(shares, name).record();
        let bytes = files::read_bounded(&path, RECORD_MAX_BYTES)
            .map_err(|source| RecordError::Read { path: path.clone(), source })?;
        Self::parse(&bytes, name).map_err(|reason| RecordError::Invalid { path, reason })
    }

    /// The share's name.
    pub fn name(&self) -> Result<ShareName, ShareNameError> {
        ShareName::new(&self.pod.uid, &self.container.name)
    }

    /// Percent of the GPU's time that it may use while others leave it idle, if its pod or an operator says it; never
    /// below its core.
    pub fn core_limit(&self) -> Option<u32> {
        let core = self.gpus.iter().map(|gpu| gpu.core).max().unwrap_or(CORE_PER_GPU);
        self.set.core_limit.or(self.terms.core_limit).map(|limit| limit.clamp(core, CORE_PER_GPU))
    }

    /// What its container is held to. On a node that is `work_conserving`, a share whose pod says nothing may use all
    /// that others leave idle.
    pub fn limits(&self, work_conserving: bool) -> Vec<GpuLimit> {
        let limit = |gpu: &GpuShare| GpuLimit {
            uuid: gpu.uuid.bytes(),
            memory_bytes: gpu.memory_bytes,
            core_percent: gpu.core,
            core_limit_percent: self.core_limit().unwrap_or(if work_conserving {
                CORE_PER_GPU
            } else {
                gpu.core
            }),
            own_slots: gpu.slots,
        };
        self.gpus.iter().map(limit).collect()
    }

    fn parse(bytes: &[u8], name: &ShareName) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        // The version is asked first: a newer format may differ in everything else.
        let Version { version } =
            serde_json::from_slice(bytes).map_err(|error| format!("no share record: {error}"))?;
        if version != RECORD_VERSION {
            return Err(format!("version {version} is not known to this build, only {RECORD_VERSION}"));
        }
        let record: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if record.pod.uid != name.pod_uid() || record.container.name != name.container() {
            return Err(format!(
                "the record is about container {:?} of pod {:?}, its folder about another one",
                record.container.name, record.pod.uid
            ));
        }
        if record.gpus.is_empty() {
            return Err("the record names no GPU".into());
        }
        if let Some(gpu) = record.gpus.iter().find(|gpu| !(1..=CORE_PER_GPU).contains(&gpu.core)) {
            return Err(format!("{}: {} core is not 1 to {CORE_PER_GPU}", gpu.uuid, gpu.core));
        }
        let odd = |gpu: &&GpuShare| !gpu.slots.is_empty() && gpu.slots.count() != gpu.core;
        if let Some(gpu) = record.gpus.iter().find(odd) {
            return Err(format!("{}: {} core with {} slots", gpu.uuid, gpu.core, gpu.slots.count()));
        }
        Ok(record)
    }

    /// Writes the record into `folder`: whole or not at all for any reader and any kill. It is not synced; see
    /// [`crate::Ledger::sync`].
    pub(crate) fn store(&self, folder: &ShareFolder) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        let temporary = folder.path().join(".share.json.new");
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600).open(&temporary)?.write_all(&text)?;
        fs::rename(&temporary, folder.record())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record() -> ShareRecord {
        ShareRecord {
            version: RECORD_VERSION,
            pod: PodRef {
                uid: "7f3c".into(),
                namespace: "default".into(),
                name: "train".into(),
                sandbox_id: "5a".into(),
            },
            container: ContainerRef { name: "main".into(), id: "c0ffee".into() },
            boot_id: "b".into(),
            kind: ShareKind::Share,
            gpus: vec![GpuShare {
                uuid: GpuUuid::from_bytes([1; 16]),
                minor: 0,
                core: 20,
                memory_bytes: 8 << 30,
                slots: Slots::first(20),
            }],
            state: ShareState::Running,
            bound_at: 1,
            bound_uptime: 1,
            shim: true,
            terms: Terms { core_limit: Some(50), ..Terms::default() },
            set: Change::default(),
        }
    }

    #[test]
    fn names_cannot_leave_or_hide_in_the_shares_folder() {
        for bad in [
            "", "_", "a", "a_", "_a", "../x_y", "a_../b", "a/b_c", ".a_b", "a_.b", "a\0_b", "-a_b", "a_b/",
            "ä_b",
        ] {
            assert!(bad.parse::<ShareName>().is_err(), "{bad:?}");
        }
        assert!(ShareName::new(&"a".repeat(POD_UID_MAX + 1), "c").is_err());
        assert!(ShareName::new("a", &"c".repeat(CONTAINER_MAX + 1)).is_err());
    }

    #[test]
    fn a_name_knows_its_pod_and_container() {
        let name = ShareName::new("1b4e28ba-2fa1-11d2-883f-0016d3cca427", "side_car").unwrap();
        assert_eq!(name.pod_uid(), "1b4e28ba-2fa1-11d2-883f-0016d3cca427");
        assert_eq!(name.container(), "side_car");
    }

    #[test]
    fn a_record_speaks_of_its_own_folder_only() {
        let bytes = serde_json::to_vec(&record()).unwrap();
        assert_eq!(ShareRecord::parse(&bytes, &record().name().unwrap()).unwrap(), record());
        let other = ShareName::new("7f3c", "other").unwrap();
        assert!(ShareRecord::parse(&bytes, &other).unwrap_err().contains("another one"));
    }

    #[test]
    fn a_record_of_an_earlier_version_has_no_slots_and_no_terms() {
        let mut text = serde_json::to_value(record()).unwrap();
        text.as_object_mut().unwrap().remove("terms");
        text["gpus"][0].as_object_mut().unwrap().remove("slots");
        let bytes = serde_json::to_vec(&text).unwrap();
        let read = ShareRecord::parse(&bytes, &record().name().unwrap()).unwrap();
        assert_eq!((read.gpus[0].slots, read.terms), (Slots::NONE, Terms::default()));
        assert_eq!(serde_json::to_value(read).unwrap(), text, "and is written as it was");
    }

    #[test]
    fn the_core_limit_is_the_operators_the_pods_or_the_nodes() {
        let limit = |record: &ShareRecord, conserving| record.limits(conserving)[0].core_limit_percent;
        let mut record = record();
        assert_eq!((limit(&record, false), limit(&record, true)), (50, 50));
        record.set.core_limit = Some(70);
        assert_eq!(limit(&record, true), 70);
        record.set.core_limit = None;
        record.terms.core_limit = None;
        assert_eq!((limit(&record, false), limit(&record, true)), (20, 100));
        record.terms.core_limit = Some(10);
        assert_eq!(limit(&record, false), 20, "never below what the share owns");
    }

    #[test]
    fn unknown_keys_versions_and_amounts_are_refused() {
        let name = record().name().unwrap();
        let text = serde_json::to_string(&record()).unwrap();
        for (from, to, named) in [
            ("\"version\":1", "\"version\":2", "version 2"),
            ("\"version\":1", "\"version\":1,\"extra\":0", "extra"),
            ("\"core\":20", "\"core\":0", "0 core"),
            ("\"core\":20", "\"core\":101", "101 core"),
            ("\"core\":20", "\"core\":-1", "-1"),
            ("\"0-19\"", "\"0-18\"", "20 core with 19 slots"),
            ("\"0-19\"", "\"90-109\"", "0 to 99"),
        ] {
            let changed = text.replacen(from, to, 1);
            assert_ne!(changed, text);
            let error = ShareRecord::parse(changed.as_bytes(), &name).unwrap_err();
            assert!(error.contains(named), "{to}: {error}");
        }
    }

    proptest! {
        #[test]
        fn a_truncated_record_is_an_error(cut in 0..500_usize) {
            let bytes = serde_json::to_vec(&record()).unwrap();
            let cut = cut.min(bytes.len() - 1);
            prop_assert!(ShareRecord::parse(&bytes[..cut], &record().name().unwrap()).is_err());
        }

        #[test]
        fn any_text_is_a_name_or_refused(text in "\\PC{0,80}") {
            if let Ok(name) = text.parse::<ShareName>() {
                let path = Path::new("/x").join(name.as_str());
                prop_assert_eq!(path.parent(), Some(Path::new("/x")));
                prop_assert_eq!(ShareName::new(name.pod_uid(), name.container()).unwrap(), name);
            }
        }
    }
}
