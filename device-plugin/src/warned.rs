//! What the guard let pass or refused because of its image, told to the node's log and metrics: the guard is a hook that
//! ends before its container starts, and leaves a note in the share's folder and in the node's memory of images.

use std::{collections::BTreeSet, fmt::Write, path::Path, time::Duration};

use ledger::{ShareFolder, ShareName, ShareRecord, ShareState, Shares};
use oci_hooks::verdicts::{self, Warning};
use tokio::{sync::watch, task, time};
use tracing::warn;
use vcuda_config::Paths;

/// How often the shares are looked through.
const EACH: Duration = Duration::from_secs(5);

/// Says each warning once, until `stop` becomes true.
pub(crate) async fn follow(paths: Paths, mut stop: watch::Receiver<bool>) {
    let mut told = BTreeSet::new();
    loop {
        let folder = paths.shares();
        // Where the shares cannot be listed, others say so.
        let warnings = task::spawn_blocking(move || warnings(&folder)).await.unwrap_or_default();
        for (_, record, warning) in &warnings {
            if !told.contains(&warning.container) {
                warn!(
                    pod = %format_args!("{}/{}", record.pod.namespace, record.pod.name),
                    container = record.container.name,
                    "started by the policy for images: {}", warning.sentence
                );
            }
        }
        // Of containers that are gone nothing is kept.
        told = warnings.into_iter().map(|(_, _, warning)| warning.container).collect();
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return,
            () = time::sleep(EACH) => {}
        }
    }
}

/// Shares whose container runs in spite of a finding.
fn warnings(shares: &Path) -> Vec<(ShareName, ShareRecord, Warning)> {
    let Ok(read) = Shares::read(shares) else { return Vec::new() };
    let running = read.records.into_iter().filter(|(_, record)| record.state == ShareState::Running);
    running
        .filter_map(|(name, record)| {
            let warning = verdicts::warning(&ShareFolder::new(shares, &name))?;
            (warning.container == record.container.id).then_some((name, record, warning))
        })
        .collect()
}

/// The node's memory of images and the warnings, as metrics.
pub(crate) fn metrics(paths: &Paths) -> String {
    let mut text = verdicts::metrics(&verdicts::list(&paths.state).unwrap_or_default());
    text.push_str("# HELP vcuda_share_image_warning Containers that run in spite of what the guard found in their image.\n");
    text.push_str("# TYPE vcuda_share_image_warning gauge\n");
    for (_, record, warning) in warnings(&paths.shares()) {
        let quoted = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let (namespace, pod, container) = (&record.pod.namespace, &record.pod.name, &record.container.name);
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "vcuda_share_image_warning{{namespace=\"{}\",pod=\"{}\",container=\"{}\",finding=\"{}\"}} 1",
            quoted(namespace),
            quoted(pod),
            quoted(container),
            quoted(&warning.id)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_container_that_runs_with_a_warning_has_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths { state: folder.path().into(), ..Paths::default() };
        let share: ShareName = "7f3c_main".parse().unwrap();
        let share = ShareFolder::new(&paths.shares(), &share);
        fs::create_dir_all(share.path()).unwrap();
        let record = serde_json::json!({
            "version": 1, "bootId": "b", "kind": "share",
            "gpus": [{"uuid": "GPU-01010101-0101-0101-0101-010101010101", "minor": 0, "core": 20, "memoryBytes": 1 << 30}], "state": "running", "boundAt": 1, "shim": true,
            "pod": {"uid": "7f3c", "namespace": "team", "name": "train", "sandboxId": "5a"},
            "container": {"name": "main", "id": "c0ffee"},
        });
        fs::write(share.record(), record.to_string()).unwrap();
        let unreadable = Shares::read(&paths.shares()).unwrap().unreadable;
        assert!(unreadable.is_empty(), "{unreadable:?}");
        let line = "vcuda_share_image_warning{namespace=\"team\",pod=\"train\",container=\"main\",finding=\"libc-musl\"} 1\n";
        assert!(!metrics(&paths).contains(line));
        let warning = |container: &str| {
            let text =
                serde_json::json!({"container": container, "id": "libc-musl", "sentence": "it is musl"});
            fs::write(share.path().join("warning.json"), text.to_string()).unwrap();
        };
        warning("c0ffee");
        assert!(metrics(&paths).contains(line), "{}", metrics(&paths));
        // Of a container before this one.
        warning("another");
        assert!(!metrics(&paths).contains(line));
    }
}
