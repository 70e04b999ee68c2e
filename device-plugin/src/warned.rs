//! What the guard let pass because of its policy, told to the node's log, to metrics, and to the pods themselves as events:
//! the guard is a hook that ends before its container starts, and leaves a note in the share's folder. What it refuses
//! reaches the pod's events by itself.

use std::{
    collections::BTreeSet,
    fmt::Write,
    path::Path,
    time::{Duration, SystemTime},
};

use ledger::{ShareFolder, ShareRecord, ShareState, Shares};
use oci_hooks::verdicts::{self, Warning};
use tokio::{sync::watch, task, time};
use tracing::warn;
use vcuda_config::Paths;

use crate::cluster::{Events, Said};

/// How often the shares are looked through.
const EACH: Duration = Duration::from_secs(5);

/// From the making of a share, at which its folder appears, to the guard's end it takes far less. A container that
/// ends at once leaves its note behind for as long as its pod is there.
const GUARD: Duration = Duration::from_millis(500);

/// Says each warning once, until `stop` becomes true; `shares` tells of new ones.
pub(crate) async fn follow(
    paths: Paths,
    mut events: Events,
    mut shares: watch::Receiver<()>,
    mut stop: watch::Receiver<bool>,
) {
    let mut told = BTreeSet::new();
    loop {
        let folder = paths.shares();
        // Where the shares cannot be listed, others say so.
        let warned = task::spawn_blocking(move || warned(&folder)).await.unwrap_or_default();
        for Warned { record, warning, .. } in &warned {
            if !told.contains(&warning.container) {
                warn!(
                    pod = %format_args!("{}/{}", record.pod.namespace, record.pod.name),
                    container = record.container.name,
                    "started by the policy for images: {}", warning.sentence
                );
            }
        }
        let said: Vec<_> =
            warned.iter().map(|of| Said::image_warning(&of.record, &of.warning.sentence, of.at)).collect();
        // Of containers that are gone nothing is kept.
        told = warned.into_iter().map(|of| of.warning.container).collect();
        events.tell(&said).await;
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return,
            () = next(&mut shares) => {}
        }
    }
}

/// Waits until it is worth to look again.
async fn next(shares: &mut watch::Receiver<()>) {
    if let Ok(Ok(())) = time::timeout(EACH, shares.changed()).await {
        time::sleep(GUARD).await;
    }
}

/// A container that was started in spite of a finding.
struct Warned {
    record: ShareRecord,
    warning: Warning,
    at: SystemTime,
}

/// Shares whose last container was started in spite of a finding.
fn warned(shares: &Path) -> Vec<Warned> {
    let Ok(read) = Shares::read(shares) else { return Vec::new() };
    read.records
        .into_iter()
        .filter_map(|(name, record)| {
            let (warning, at) = verdicts::warning(&ShareFolder::new(shares, &name))?;
            (warning.container == record.container.id).then_some(Warned { record, warning, at })
        })
        .collect()
}

/// The node's memory of images and the warnings, as metrics.
pub(crate) fn metrics(paths: &Paths) -> String {
    let mut text = verdicts::metrics(&verdicts::list(&paths.state).unwrap_or_default());
    text.push_str("# HELP vcuda_share_image_warning Containers that run in spite of what the guard found in their image.\n");
    text.push_str("# TYPE vcuda_share_image_warning gauge\n");
    let running = |of: &Warned| of.record.state == ShareState::Running;
    for Warned { record, warning, .. } in warned(&paths.shares()).into_iter().filter(running) {
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

    use ledger::ShareName;

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
