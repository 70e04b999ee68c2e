//! Every file that this system keeps on a node, damaged in every way while its daemons are down: what runs goes on under
//! its ceiling, what can be rebuilt is, and nothing is left when the pods are gone.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

use std::{fs, path::Path};

use anyhow::{Context, Result};
use integration::{
    host::Options,
    kubelet::RunningPod,
    node::Node,
    probe::{self, OUT_OF_MEMORY},
};

/// A way to damage a file.
type Damage = fn(&Path) -> Result<()>;

/// All but a container's own mapping of the file, which is of the old one, sees something else.
fn replace(path: &Path, text: &[u8]) -> Result<()> {
    let aside = path.with_extension("aside");
    fs::write(&aside, text)?;
    Ok(fs::rename(aside, path)?)
}

const DAMAGES: [(&str, Damage); 6] = [
    ("missing", |path| Ok(fs::remove_file(path)?)),
    ("empty", |path| replace(path, b"")),
    ("truncated", |path| {
        let text = fs::read(path)?;
        replace(path, &text[..text.len() / 2])
    }),
    ("of another version", |path| {
        let text = fs::read(path)?;
        let mut other =
            String::from_utf8_lossy(&text).replace("\"version\": 1", "\"version\": 7").into_bytes();
        other = String::from_utf8_lossy(&other).replace("\"version\":1", "\"version\":7").into_bytes();
        if other == text {
            // No JSON: the version is a number near the start.
            other[8] = other[8].wrapping_add(6);
        }
        replace(path, &other)
    }),
    ("somebody else's", |path| replace(path, &b"\x7fELF\xff\xfe{\"a\":[1".repeat(1000))),
    ("a folder", |path| {
        fs::remove_file(path)?;
        fs::create_dir(path)?;
        Ok(fs::write(path.join("file"), "x")?)
    }),
];

/// The container has 8 GiB of one GPU; returns the GPU.
async fn enforced(node: &Node, running: &RunningPod) -> String {
    let report = probe::run(node.cri(), running.id("main"), &["--alloc", "9216"]).await.unwrap();
    assert_eq!(report.error, None);
    assert_eq!((report.gpus.len(), report.gpus[0].total_bytes), (1, 8 << 30), "{report:?}");
    assert_eq!(report.allocs[0].result, OUT_OF_MEMORY, "{report:?}");
    report.gpus[0].uuid.clone()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn whatever_has_become_of_a_state_file_what_runs_goes_on_and_what_can_be_rebuilt_is() {
    let mut node = Node::with_vcuda(&Options::from_env().unwrap()).await.unwrap();
    let paths = node.vcuda.file().paths.clone();
    for file in ["inventory.json", "share.json", "limits", "ld.so.preload", "why", "CDI spec"] {
        for (how, damage) in DAMAGES {
            if how == "a folder" && matches!(file, "inventory.json" | "CDI spec") {
                // Nobody makes it away: the device plugin ends, and its last line names it.
                continue;
            }
            let what = format!("{file}, {how}");
            let mut running =
                node.kubelet.run(&node.pod_with_share("before", 20, 32)).await.context(what.clone()).unwrap();
            let gpu = enforced(&node, &running).await;
            let path = match file {
                "inventory.json" => paths.inventory(),
                "CDI spec" => paths.cdi.join("tencent.com-vcuda.json"),
                of_share => {
                    let shares = node.vcuda.shares();
                    let [share] = &shares[..] else { panic!("{what}: {shares:?}") };
                    paths.shares().join(share).join(of_share)
                }
            };
            node.vcuda.nri_plugin().unwrap().kill();
            node.vcuda.device_plugin().unwrap().kill();
            damage(&path).context(what.clone()).unwrap();
            node.vcuda.start_device_plugin().unwrap();
            node.vcuda.start_nri_plugin().await.context(what.clone()).unwrap();
            node.wait_for_offer().await.context(what.clone()).unwrap();

            assert_eq!(enforced(&node, &running).await, gpu, "{what}");
            let after =
                node.kubelet.run(&node.pod_with_share("after", 20, 32)).await.context(what.clone()).unwrap();
            enforced(&node, &after).await;
            // Also a container that starts anew, from whatever there is of its share.
            node.kubelet.restart_container(&mut running, "main").await.context(what.clone()).unwrap();
            assert_eq!(enforced(&node, &running).await, gpu, "{what}");
            for running in [&running, &after] {
                node.kubelet.delete(running).await.unwrap();
            }
            node.assert_empty().await;
        }
    }
}
