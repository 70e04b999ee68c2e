//! What this node has seen of images with shares: one small file an image, written by the guard at every start,
//! read by `vcuda-check list` and whoever exports metrics. It is a memory, no authority: the guard looks anew each
//! time, and losing a file loses a line of a list.

use std::{
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use ledger::ShareFolder;
use rustix::{
    fs::{CWD, Mode, OFlags, RenameFlags},
    io::Errno,
};
use serde::{Deserialize, Serialize};

use crate::compat::{Finding, Severity, check::Verdict, files::host_read};

/// Images that are remembered; the one not seen for longest gives way.
const MAX_IMAGES: usize = 1_000;

/// A file has below 10 KiB.
const MAX_BYTES: u64 = 256 << 10;

/// The length of a file is a multiple of this.
const PIECE: usize = 1 << 10;

/// Longest image name that is kept: references have at most 255 + 128 characters and a digest.
const MAX_NAME: usize = 512;

/// What was seen of one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Seen {
    /// The image, as the runtime names it.
    pub image: String,
    /// Its layers as they lie on this node, by name, where they are known: a tag may have moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<String>,
    /// The program that was started, without links in its path, where it was found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<PathBuf>,
    /// How it fared the last time.
    pub verdict: Verdict,
    /// Whether its container was started all the same.
    pub started: bool,
    /// What was found that refuses or warns: stable names.
    pub findings: Vec<String>,
    /// The worst finding as a sentence.
    pub reason: Option<String>,
    /// The last pod with it, `namespace/name`.
    pub pod: String,
    /// First and last time, in seconds since 1970.
    pub first_seen: u64,
    /// See `first_seen`.
    pub last_seen: u64,
    /// How often it was looked at.
    pub starts: u64,
}

/// Findings that another driver may change.
const OF_THE_DRIVER: &[&str] = &["cuda-driver-too-old", "symbol-missing"];

impl Seen {
    /// Why it was refused, if it was for something that no driver changes.
    pub fn unfit_on_any_driver(&self) -> Option<String> {
        let own = self.findings.first().is_some_and(|id| !OF_THE_DRIVER.contains(&id.as_str()));
        self.reason.clone().filter(|_| own && self.verdict == Verdict::DoesNotFit)
    }
}

/// What was seen, as metrics in the text format of Prometheus. The last start of each image tells its verdict.
pub fn metrics(seen: &[Seen]) -> String {
    let mut text = String::from(
        "# HELP vcuda_image_starts_total Starts of containers with a GPU share that the guard looked at.\n\
         # TYPE vcuda_image_starts_total counter\n",
    );
    let label = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let image = |seen: &Seen| {
        format!(
            "image=\"{}\",layers=\"{}\"",
            label(&seen.image),
            seen.layers.as_deref().map(label).unwrap_or_default()
        )
    };
    for seen in seen {
        let verdict = match seen.verdict {
            Verdict::Fits => "fits",
            Verdict::DoesNotFit => "does-not-fit",
            Verdict::Unknown => "unknown",
        };
        let (image, started, starts) = (image(seen), seen.started, seen.starts);
        text.push_str(&format!(
            "vcuda_image_starts_total{{{image},verdict=\"{verdict}\",started=\"{started}\"}} {starts}\n"
        ));
    }
    text.push_str(
        "# HELP vcuda_image_finding What the guard found in an image at its last start.\n\
         # TYPE vcuda_image_finding gauge\n",
    );
    for seen in seen {
        for finding in &seen.findings {
            text.push_str(&format!(
                "vcuda_image_finding{{{},finding=\"{}\"}} 1\n",
                image(seen),
                label(finding)
            ));
        }
    }
    text
}

/// The folder of verdicts, below the state folder.
pub fn folder(state: &Path) -> PathBuf {
    state.join("verdicts")
}

/// An image that was looked at. What its fields mean: [`Seen`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Looked<'a> {
    /// Its name.
    pub image: &'a str,
    /// Its layers.
    pub layers: Option<String>,
    /// What is started.
    pub program: Option<PathBuf>,
    /// For which pod.
    pub pod: String,
}

/// Remembers what was found in an image, and whether its container was started.
///
/// # Errors
/// The folder cannot be written.
pub fn remember(state: &Path, looked: Looked<'_>, findings: &[Finding], started: bool) -> io::Result<()> {
    let Looked { image, layers, program, pod } = looked;
    let folder = folder(state);
    let image: String = image.chars().filter(|c| !c.is_control()).take(MAX_NAME).collect();
    let path = folder.join(file_name(&image, layers.as_deref()));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let before = read(&path).filter(|seen: &Seen| seen.image == image && seen.layers == layers);
    if before.is_none() {
        fs::create_dir_all(&folder)?;
        make_room(&folder)?;
    }
    let refused = findings.iter().any(|finding| finding.severity == Severity::Refuse);
    let worst = findings.iter().filter(|finding| finding.severity > Severity::Info);
    let mut ids: Vec<String> = worst.clone().map(|finding| finding.id.clone().into_owned()).collect();
    ids.dedup();
    let seen = Seen {
        verdict: if refused { Verdict::DoesNotFit } else { Verdict::Fits },
        started,
        findings: ids,
        reason: worst.max_by_key(|finding| finding.severity).map(Finding::sentence),
        pod,
        first_seen: before.as_ref().map_or(now, |seen| seen.first_seen),
        last_seen: now,
        starts: before.as_ref().map_or(0, |seen| seen.starts).saturating_add(1),
        image,
        layers,
        program,
    };
    let bytes = serde_json::to_vec(&seen)?;
    if before.is_some() { put_over(&path, bytes) } else { put(&path, &bytes) }
}

/// Writes over the file that is there, in one piece: a new file each time, and the old one's end, are a good part of what a
/// known image costs at a container's start. Two that write at once leave the text of one, and a longer one's end behind
/// it, see [`read`].
fn put_over(path: &Path, mut bytes: Vec<u8>) -> io::Result<()> {
    // Mostly of one length then, so that nothing of an older text is left.
    bytes.resize((bytes.len() + 1).next_multiple_of(PIECE) - 1, b' ');
    bytes.push(b'\n');
    match rustix::fs::open(path, OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()) {
        Ok(file) => File::from(file).write_all_at(&bytes, 0),
        Err(Errno::NOENT) => put(path, &bytes),
        Err(error) => Err(error.into()),
    }
}

/// Puts a file there, whole or not at all, and not synced: a crash may forget it.
pub(crate) fn put(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let put = fs::write(&temporary, bytes).and_then(|()| exchange(&temporary, path));
    if put.is_err() {
        // On a full disk each start would leave one behind.
        let _ = fs::remove_file(&temporary);
    }
    put
}

fn exchange(temporary: &Path, path: &Path) -> io::Result<()> {
    // Exchanged, not renamed over the old one: at that ext4 writes the new one to the disk (`auto_da_alloc`), and a
    // container waits for it.
    match rustix::fs::renameat_with(CWD, temporary, CWD, path, RenameFlags::EXCHANGE) {
        Ok(()) => fs::remove_file(temporary),
        // There is no old one, or the file system knows no exchange.
        Err(Errno::NOENT | Errno::INVAL) => fs::rename(temporary, path),
        Err(error) => Err(error.into()),
    }
}

/// All images seen, the last one first. What cannot be read is left out.
///
/// # Errors
/// The folder is there and cannot be listed.
pub fn list(state: &Path) -> io::Result<Vec<Seen>> {
    let entries = match fs::read_dir(folder(state)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let paths = entries.flatten().map(|entry| entry.path());
    let verdicts = paths.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    let mut seen: Vec<Seen> = verdicts.filter_map(|path| read(&path)).collect();
    seen.sort_by(|a, b| b.last_seen.cmp(&a.last_seen).then_with(|| a.image.cmp(&b.image)));
    Ok(seen)
}

/// What is behind the first value does not count. One that is just being written over can be half of each text; not twice.
fn read(path: &Path) -> Option<Seen> {
    let look = || {
        let bytes = host_read(path, MAX_BYTES).ok()?;
        serde_json::Deserializer::from_slice(&bytes).into_iter().next()?.ok()
    };
    look().or_else(look)
}

/// An image's name may hold anything; its file's name does not. Two with one hash share a file in turn.
fn file_name(image: &str, layers: Option<&str>) -> String {
    let mut hasher = DefaultHasher::new();
    (image, layers).hash(&mut hasher);
    format!("{:016x}.json", hasher.finish())
}

/// What was let pass in a container that runs, for its owner to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Warning {
    /// The container.
    pub container: String,
    /// Stable name of the worst finding.
    pub id: String,
    /// It as a sentence.
    pub sentence: String,
}

/// Leaves a warning in the folder of a share, and with it gone.
///
/// # Errors
/// It cannot be written.
pub fn warn(share: &ShareFolder, container: &str, finding: &Finding) -> io::Result<()> {
    let warning = Warning {
        container: container.into(),
        id: finding.id.clone().into_owned(),
        sentence: finding.sentence(),
    };
    fs::write(warning_path(share), serde_json::to_vec(&warning)?)
}

/// The warning of a share, if its container was started with one, and when.
pub fn warning(share: &ShareFolder) -> Option<(Warning, SystemTime)> {
    let path = warning_path(share);
    let at = fs::metadata(&path).ok()?.modified().ok()?;
    Some((serde_json::from_slice(&host_read(&path, MAX_BYTES).ok()?).ok()?, at))
}

pub(crate) fn forget_warning(share: &ShareFolder) {
    // There is none, mostly.
    let _ = fs::remove_file(warning_path(share));
}

fn warning_path(share: &ShareFolder) -> PathBuf {
    share.path().join("warning.json")
}

/// Removes the oldest files of a folder that has [`MAX_IMAGES`].
pub(crate) fn make_room(folder: &Path) -> io::Result<()> {
    let mut files: Vec<(SystemTime, PathBuf)> = fs::read_dir(folder)?
        .flatten()
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    if files.len() < MAX_IMAGES {
        return Ok(());
    }
    files.sort();
    for (_, path) in &files[..=files.len() - MAX_IMAGES] {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn musl() -> Finding {
        Finding::refuse("libc-musl", "it is musl", "that is no good", "use another")
    }

    fn note(
        state: &tempfile::TempDir,
        image: &str,
        layers: Option<&str>,
        pod: &str,
        findings: &[Finding],
        started: bool,
    ) -> io::Result<()> {
        let layers = layers.map(Into::into);
        remember(state.path(), Looked { image, layers, program: None, pod: pod.into() }, findings, started)
    }

    #[test]
    fn an_image_is_remembered_with_its_last_verdict() {
        let state = tempfile::tempdir().unwrap();
        assert!(list(state.path()).unwrap().is_empty());
        note(&state, "a:1", None, "x/p", &[musl()], false).unwrap();
        note(&state, "b:1", None, "x/q", &[], true).unwrap();
        note(&state, "a:1", None, "x/r", &[musl()], true).unwrap();
        let seen = list(state.path()).unwrap();
        assert_eq!(seen.len(), 2);
        let a = seen.iter().find(|seen| seen.image == "a:1").unwrap();
        assert_eq!((a.verdict, a.started, a.starts, a.pod.as_str()), (Verdict::DoesNotFit, true, 2, "x/r"));
        assert_eq!(
            (a.findings.as_slice(), a.first_seen <= a.last_seen),
            (&["libc-musl".to_owned()][..], true)
        );
        assert!(a.reason.as_deref().unwrap().contains("libc-musl"));
    }

    #[test]
    fn a_verdict_is_written_over_the_one_before_and_nothing_behind_it_counts() {
        let state = tempfile::tempdir().unwrap();
        note(&state, "a:1", None, &"x".repeat(3 * PIECE), &[musl()], false).unwrap();
        let path = fs::read_dir(folder(state.path())).unwrap().next().unwrap().unwrap().path();
        let (inode, long) = (fs::metadata(&path).unwrap().ino(), fs::read(&path).unwrap().len());
        note(&state, "a:1", None, "x/q", &[], true).unwrap();
        let after = fs::metadata(&path).unwrap();
        assert_eq!((after.ino(), after.len()), (inode, long as u64), "the same file");
        let seen = list(state.path()).unwrap();
        assert_eq!((seen.len(), seen[0].pod.as_str(), seen[0].starts), (1, "x/q", 2));
        // A longer one again, and one of the length before.
        note(&state, "a:1", None, &"y".repeat(5 * PIECE), &[], true).unwrap();
        note(&state, "a:1", None, "x/r", &[], true).unwrap();
        assert_eq!(list(state.path()).unwrap()[0].starts, 4);
    }

    #[test]
    fn one_name_with_other_layers_is_another_image() {
        let state = tempfile::tempdir().unwrap();
        note(&state, "a:1", Some("0a"), "x/p", &[musl()], false).unwrap();
        note(&state, "a:1", Some("0b"), "x/p", &[], true).unwrap();
        note(&state, "a:1", Some("0b"), "x/p", &[], true).unwrap();
        let mut seen = list(state.path()).unwrap();
        seen.sort_by_key(|seen| seen.starts);
        let of: Vec<_> = seen.iter().map(|seen| (seen.layers.as_deref().unwrap(), seen.starts)).collect();
        assert_eq!(of, [("0a", 1), ("0b", 2)]);
        assert!(seen[0].unfit_on_any_driver().unwrap().contains("libc-musl"));
        assert_eq!(seen[1].unfit_on_any_driver(), None);
    }

    #[test]
    fn metrics_hold_whatever_an_image_is_called() {
        let state = tempfile::tempdir().unwrap();
        note(&state, "a\"b\\c", Some("0a"), "x/p", &[musl()], false).unwrap();
        let text = metrics(&list(state.path()).unwrap());
        let image = r#"image="a\"b\\c",layers="0a""#;
        let starts =
            format!("vcuda_image_starts_total{{{image},verdict=\"does-not-fit\",started=\"false\"}} 1\n");
        assert!(text.contains(&starts), "{text}");
        assert!(
            text.contains(&format!("vcuda_image_finding{{{image},finding=\"libc-musl\"}} 1\n")),
            "{text}"
        );
    }

    #[test]
    fn names_of_any_kind_stay_in_the_folder_and_their_number_is_bounded() {
        let state = tempfile::tempdir().unwrap();
        for image in ["../../etc/passwd", "", "a\nb", &"x".repeat(10_000)] {
            note(&state, image, None, "x/p", &[], true).unwrap();
        }
        let seen = list(state.path()).unwrap();
        assert_eq!(seen.len(), 4);
        assert!(seen.iter().all(|seen| seen.image.len() <= MAX_NAME && !seen.image.contains('\n')));
        for n in 0..MAX_IMAGES + 20 {
            note(&state, &n.to_string(), None, "x/p", &[], true).unwrap();
        }
        assert_eq!(list(state.path()).unwrap().len(), MAX_IMAGES);
    }

    #[test]
    fn files_that_are_none_are_left_out() {
        let state = tempfile::tempdir().unwrap();
        note(&state, "a", None, "x/p", &[], true).unwrap();
        fs::write(folder(state.path()).join("0000000000000000.json"), "{").unwrap();
        fs::write(folder(state.path()).join("x.tmp"), "{}").unwrap();
        assert_eq!(list(state.path()).unwrap().len(), 1);
    }
}
