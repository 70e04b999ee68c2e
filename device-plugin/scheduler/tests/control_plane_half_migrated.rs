//! A cluster of which one half still runs gpu-manager and gpu-admission: the pods that gpu-admission placed, on a real
//! API server, as vcuda-scheduler counts them.

#[expect(dead_code, reason = "other tests need more")]
mod support;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use support::{ControlPlane, container, create_node, create_pod, get_pod, gpu, offer, placement_of, pod};
use vcuda_config::annotation;

/// What gpu-admission writes for one container, as it was before gpu-manager took it up.
fn chosen(node: &str, gpus: &str) -> Value {
    json!({
        "tencent.com/predicate-node": node,
        "tencent.com/predicate-gpu-idx-0": gpus,
        "tencent.com/predicate-time": "1700000000000000000",
        "tencent.com/gpu-assigned": "false",
    })
}

/// What is on a pod of the node of that name.
type Annotations = dyn Fn(&str) -> Value;

/// The same with something else in one place.
fn changed(node: &str, gpus: &str, key: &str, value: &str) -> Value {
    let mut annotations = chosen(node, gpus);
    annotations[key] = value.into();
    annotations
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Kubernetes: run with KUBE_BIN_DIR, and -- --ignored"]
async fn what_gpu_admission_placed_counts_where_it_is_and_anything_doubtful_everywhere() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let client = plane.client("admin").await?;
    let name = |n: usize| format!("half-{n}");
    let long = "1,".repeat(20_000);
    // Annotations of the pod on the node of that number, and the GPU that is left for another.
    let cases: Vec<(Box<Annotations>, Option<u8>)> = vec![
        (Box::new(|node| chosen(node, "0")), Some(1)),
        (Box::new(|node| chosen(node, "1")), Some(0)),
        // gpu-manager has started it.
        (Box::new(|node| changed(node, "1", "tencent.com/gpu-assigned", "true")), Some(0)),
        // Neither says where the pod is.
        (Box::new(|node| changed(node, "1", "tencent.com/gpu-assigned", "perhaps")), Some(0)),
        (Box::new(|node| changed(node, "1", "tencent.com/predicate-time", "yesterday")), Some(0)),
        // Of a container that the pod does not have, and the same GPU.
        (Box::new(|node| changed(node, "1", "tencent.com/predicate-gpu-idx-1", "1")), Some(0)),
        // Our own choice goes before theirs.
        (
            Box::new(|node| {
                let here = node.trim_start_matches("half-").parse().unwrap_or(0);
                changed(node, "1", annotation::PLACEMENT, &format!("1;1;main={}", gpu(60 + here, 0)))
            }),
            Some(1),
        ),
        // Left by a bind to another node that failed.
        (Box::new(|_| chosen("half-0", "1")), None),
        (Box::new(|_| json!({ "tencent.com/predicate-gpu-idx-0": "1" })), None),
        (Box::new(|node| json!({ "tencent.com/predicate-node": node })), None),
        // Two containers' GPUs, and nobody knows which is whose.
        (Box::new(|node| changed(node, "1", "tencent.com/predicate-gpu-idx-1", "0")), None),
        // No GPU of the node, or none at all.
        (Box::new(|node| chosen(node, "2")), None),
        (Box::new(|node| chosen(node, "0,1")), None),
        (Box::new(|node| chosen(node, "0,0")), None),
        (Box::new(|node| chosen(node, "")), None),
        (Box::new(|node| chosen(node, "1,")), None),
        (Box::new(|node| chosen(node, " 1")), None),
        (Box::new(|node| chosen(node, "+1")), None),
        (Box::new(|node| chosen(node, "-1")), None),
        (Box::new(|node| chosen(node, "0x1")), None),
        (Box::new(|node| chosen(node, "\u{661}")), None),
        (Box::new(|node| chosen(node, "4294967296")), None),
        (Box::new(move |node| chosen(node, &long)), None),
    ];
    for (n, (annotations, _)) in cases.iter().enumerate() {
        let node = name(n);
        create_node(&client, "half", &node, &offer(u8::try_from(60 + n)?, 2)).await?;
        let mut pod = pod("half", &format!("theirs-{n}"), 60, 32);
        pod["spec"]["nodeName"] = node.as_str().into();
        pod["metadata"]["annotations"] = annotations(&node);
        create_pod(&client, pod).await?;
    }
    // Two containers on one GPU count together.
    let both = name(cases.len());
    create_node(&client, "half", &both, &offer(u8::try_from(60 + cases.len())?, 2)).await?;
    let mut two = pod("half", "theirs-two", 30, 32);
    two["spec"]["containers"] = json!([container("main", 30, 32), container("side", 30, 32)]);
    two["spec"]["nodeName"] = both.as_str().into();
    two["metadata"]["annotations"] = changed(&both, "0", "tencent.com/predicate-gpu-idx-1", "0");
    create_pod(&client, two).await?;

    let extender = plane.extender("half", &["--leader-elect=false"])?;
    extender.wait_until_ready().await?;
    let doubtful = cases.iter().filter(|(_, left)| left.is_none()).count();
    assert_eq!(extender.metric("vcuda_scheduler_unplaced_containers").await?, doubtful as u64);

    let left = cases.iter().map(|(_, left)| *left).chain([Some(1)]);
    for (n, left) in left.enumerate() {
        let node = name(n);
        let ours = create_pod(&client, pod("half", &format!("ours-{n}"), 50, 32)).await?;
        let question = json!({ "Pod": ours, "NodeNames": [node] });
        let answer = extender.call("filter", &question).await?;
        let Some(left) = left else {
            let why = answer["FailedAndUnresolvableNodes"][&node].as_str();
            let why = why.with_context(|| format!("{node} has room for 50 core: {answer}"))?;
            assert!(why.contains("do not say which GPU they are on"), "{node}: {why}");
            continue;
        };
        assert_eq!(answer["NodeNames"], json!([node]), "{answer}");
        assert_eq!(extender.bind(&ours, &node).await?, "", "{node}");
        let placement = placement_of(&get_pod(&client, &format!("ours-{n}")).await?);
        let placement = placement.with_context(|| format!("{node}: no placement"))?;
        assert_eq!(placement.gpus("main"), [gpu(u8::try_from(60 + n)?, left)], "{node}");
    }
    Ok(())
}
