//! A large cluster: a thousand nodes with eight GPUs each, known to a real API server only, and a stream of pods of all
//! sizes through a real kube-scheduler. What is asserted is that all are bound where there is room, and how much memory
//! vcuda-scheduler has; how long it takes is printed.

#![forbid(unsafe_code)]

#[expect(dead_code, reason = "other tests need more")]
mod support;

use std::{collections::BTreeMap, fs, time::Instant};

use anyhow::{Context, Result};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use support::{
    ControlPlane, UNITS, create_node, create_pod, delete_pod, node_of, placement_of, pod, pods_of, wait,
};
use vcuda_config::{GpuGroup, GpuUuid, Link, NodeGpu, NodeGpus};

const GROUP: &str = "scale";
const NODES: usize = 1_000;
const GPUS: usize = 8;

/// Requests that are under way at once.
const AT_ONCE: usize = 16;

/// Core and memory of the pods, by turns; whole GPUs bring their memory.
const SIZES: [(u32, u32); 6] = [(20, 32), (50, 80), (100, 0), (5, 8), (400, 0), (33, 50)];

/// Pods of the first wave, and of the second, after half of the first has gone.
const PODS: [usize; 2] = [480, 240];

/// What vcuda-scheduler may have, in MiB.
const MEMORY_MAX: u64 = 200;

fn gpu(node: usize, gpu: usize) -> Result<GpuUuid> {
    let mut bytes = [7; 16];
    bytes[..8].copy_from_slice(&u64::try_from(node)?.to_be_bytes());
    bytes[15] = u8::try_from(gpu)?;
    Ok(GpuUuid::from_bytes(bytes))
}

/// Half of each node's GPUs are linked to each other.
fn offer(node: usize) -> Result<NodeGpus> {
    let one = |n: usize| {
        anyhow::Ok(NodeGpu {
            uuid: gpu(node, n)?,
            model: "NVIDIA H100 80GB HBM3".into(),
            minor: u32::try_from(n)?,
            units: UNITS,
            numa: Some(u32::from(n >= GPUS / 2)),
            healthy: true,
        })
    };
    let half = |from: usize| GpuGroup { link: Link::NvLink, gpus: (from..from + GPUS / 2).collect() };
    Ok(NodeGpus::new((0..GPUS).map(one).collect::<Result<_>>()?, vec![half(0), half(GPUS / 2)]))
}

/// Does `what` for each of `numbers`, several at a time.
async fn each<F: Future<Output = Result<()>>>(
    numbers: std::ops::Range<usize>,
    what: impl Fn(usize) -> F,
) -> Result<()> {
    let what = &what;
    let lane = |first: usize| {
        let numbers = numbers.clone().skip(first).step_by(AT_ONCE);
        async move {
            for n in numbers {
                what(n).await?;
            }
            anyhow::Ok(())
        }
    };
    try_join_all((0..AT_ONCE).map(lane)).await.map(drop)
}

async fn create(client: &Client, numbers: std::ops::Range<usize>) -> Result<()> {
    each(numbers, async |n| {
        let (core, memory) = SIZES[n % SIZES.len()];
        create_pod(client, pod(GROUP, &format!("{GROUP}-{n}"), core, memory)).await.map(drop)
    })
    .await
}

/// Every pod has as many GPUs as it asks, all of its node, and no GPU has more than it can hold.
fn check(pods: &[Pod]) -> Result<()> {
    let mut taken: BTreeMap<GpuUuid, (u32, u32)> = BTreeMap::new();
    for pod in pods {
        let name = pod.metadata.name.as_deref().context("no name")?;
        let n: usize = name.rsplit('-').next().context("no number")?.parse()?;
        let (core, memory) = SIZES[n % SIZES.len()];
        let node: usize =
            node_of(pod).context("no node")?.rsplit('-').next().context("no number")?.parse()?;
        let placement = placement_of(pod).with_context(|| format!("{name} does not say where it is"))?;
        let gpus = placement.gpus("main");
        assert_eq!(gpus.len(), usize::try_from(core.div_ceil(100))?, "{name}");
        let mut of_node = (0..GPUS).map(|at| gpu(node, at)).collect::<Result<Vec<_>>>()?;
        of_node.retain(|one| gpus.contains(one));
        assert_eq!(of_node.len(), gpus.len(), "{name}: GPUs of another node, or one twice");
        if core == 400 {
            let halves = [of_node == offer_half(node, 0)?, of_node == offer_half(node, GPUS / 2)?];
            assert!(halves.contains(&true), "{name}: four GPUs that are not linked: {of_node:?}");
        }
        for one in of_node {
            let sum = taken.entry(one).or_default();
            sum.0 += core.min(100);
            sum.1 += if memory == 0 { UNITS } else { memory };
        }
    }
    let over: Vec<_> = taken.iter().filter(|(_, sum)| sum.0 > 100 || sum.1 > UNITS).collect();
    assert!(over.is_empty(), "{over:?}");
    Ok(())
}

fn offer_half(node: usize, from: usize) -> Result<Vec<GpuUuid>> {
    (from..from + GPUS / 2).map(|at| gpu(node, at)).collect()
}

/// The most memory that a process ever had, in MiB.
fn peak_mib(process: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    Ok(line.split_whitespace().next().context("no number")?.parse::<u64>()? / 1024)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Kubernetes: run with KUBE_BIN_DIR, and -- --ignored"]
async fn a_thousand_nodes_take_a_stream_of_pods_and_no_gpu_is_overbooked() -> Result<()> {
    let plane = ControlPlane::shared().await?;
    let client = plane.client("admin").await?;
    each(0..NODES, async |n| create_node(&client, GROUP, &format!("{GROUP}-{n}"), &offer(n)?).await).await?;
    let mut extender = plane.extender(GROUP, &["--leader-elect=false"])?;
    extender.wait_until_ready().await?;
    assert_eq!(extender.metric("vcuda_scheduler_gpus").await?, (NODES * GPUS) as u64);
    let kube_scheduler = plane.kube_scheduler(GROUP, &extender)?;

    let bound = async || {
        let pods = pods_of(&client, GROUP).await.unwrap_or_default();
        pods.iter().filter(|pod| node_of(pod).is_some()).count()
    };
    let [first, second] = PODS;
    let begun = Instant::now();
    create(&client, 0..first).await?;
    let all = async |count: usize| {
        let what = format!("{count} pods are bound");
        wait(&what, async || bound().await == count)
            .await
            .with_context(|| format!("{}\n{}", extender.log(), kube_scheduler.log()))
    };
    all(first).await?;
    println!("{first} pods created and bound on {NODES} nodes in {:.1?}", begun.elapsed());
    check(&pods_of(&client, GROUP).await?)?;

    // Half of them go, and others come into the gaps.
    each(0..first / 2, async |n| delete_pod(&client, &format!("{GROUP}-{n}")).await).await?;
    create(&client, first..first + second).await?;
    all(first - first / 2 + second).await?;
    check(&pods_of(&client, GROUP).await?)?;

    let memory = peak_mib(extender.process().id())?;
    println!("vcuda-scheduler has had {memory} MiB at most");
    assert!(memory <= MEMORY_MAX, "{memory} MiB");
    Ok(())
}
