//! A question of kube-scheduler about a large cluster: 5,000 nodes with 8 GPUs with 10 shares each. What is timed is all
//! that a call costs but the sockets: JSON in, filter or prioritize, JSON out. Besides criterion's figures it prints the
//! 99th percentile over both calls together, in time on the processor, and the memory of the whole process.

#![expect(clippy::unwrap_used, reason = "a bench has nobody to report to")]

use std::{collections::BTreeMap, fs, time::Duration};

use criterion::{Criterion, criterion_group, criterion_main};
use k8s_openapi::api::core::v1::Pod;
use ledger::Policy;
use rustix::time::{ClockId, clock_gettime};
use scheduler::{
    BoundPod, Cluster, Demand, ResourceNames, Wanted, holds_of_bound,
    wire::{FilterAnswer, Question, Scores},
};
use serde_json::json;
use vcuda_config::{GpuGroup, GpuUuid, Link, NodeGpu, NodeGpus, PodPlacement, annotation};

const NODES: u32 = 5_000;
const GPUS: u32 = 8;
const SHARES: u32 = 10;

fn gpu(node: u32, gpu: u32) -> GpuUuid {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&node.to_be_bytes());
    bytes[12..].copy_from_slice(&gpu.to_be_bytes());
    GpuUuid::from_bytes(bytes)
}

fn node(at: u32) -> String {
    format!("ip-10-{}-{}.eu-central-1.compute.internal", at / 256, at % 256)
}

fn names() -> ResourceNames {
    ResourceNames { core: "tencent.com/vcuda-core".into(), memory: "tencent.com/vcuda-memory".into() }
}

fn pod(core: u32, memory: u32) -> Pod {
    let limits = json!({
        "tencent.com/vcuda-core": core.to_string(),
        "tencent.com/vcuda-memory": memory.to_string(),
        "cpu": "4",
        "memory": "16Gi",
    });
    let env: Vec<_> =
        (0..40).map(|n| json!({ "name": format!("SETTING_{n}"), "value": "x".repeat(40) })).collect();
    serde_json::from_value(json!({
        "metadata": { "name": "train", "namespace": "default", "uid": "7d8f0c0e-5f0f-4a54-8f3d-2f1f0a1e6c11" },
        "spec": { "containers": [{
            "name": "main", "image": "registry/train:1", "env": env,
            "resources": { "limits": limits, "requests": limits },
        }] },
    }))
    .unwrap()
}

/// Every GPU has 10 shares of 6 to 8 core and 7 units: 20 to 40 core and 88 units are left.
fn cluster() -> Cluster {
    let mut cluster = Cluster::default();
    cluster.begin_nodes();
    for at in 0..NODES {
        let one = |n| NodeGpu {
            uuid: gpu(at, n),
            model: "NVIDIA A100-SXM4-40GB".into(),
            minor: n,
            units: 158,
            numa: Some(n / 4),
            healthy: true,
        };
        let group = GpuGroup { link: Link::NvLink, gpus: (0..GPUS as usize).collect() };
        let text = NodeGpus::new((0..GPUS).map(one).collect(), vec![group]).to_text();
        cluster.set_node(&node(at), Some(&BTreeMap::from([(annotation::NODE_GPUS.to_owned(), text)])));
    }
    cluster.end_nodes();
    cluster.begin_pods();
    let demands: Vec<Demand> = (6..=8).map(|core| Demand::of(&pod(core, 7), &names()).unwrap()).collect();
    for at in 0..NODES {
        for n in 0..GPUS {
            let containers = BTreeMap::from([("main".to_owned(), vec![gpu(at, n)])]);
            let placement = PodPlacement { placed_at: 0, containers }.to_string();
            let annotations = BTreeMap::from([(annotation::PLACEMENT.to_owned(), placement)]);
            for share in 0..SHARES {
                cluster.set_pod(BoundPod {
                    uid: format!("{at:08x}-{n:04x}-{share:04x}-8f3d-2f1f0a1e6c11"),
                    node: node(at),
                    holds: holds_of_bound(&demands[((at + n) % 3) as usize], &node(at), Some(&annotations)),
                    priority: 0,
                    ending: false,
                });
            }
        }
    }
    cluster.end_pods();
    cluster
}

fn question(pod: &Pod) -> Vec<u8> {
    let names: Vec<String> = (0..NODES).map(node).collect();
    serde_json::to_vec(&json!({ "Pod": pod, "Nodes": null, "NodeNames": names })).unwrap()
}

fn filter(cluster: &Cluster, question: &[u8]) -> Vec<u8> {
    let question: Question<'_> = serde_json::from_slice(question).unwrap();
    let wanted = Wanted::of(&question.pod, &names(), Policy::Pack).unwrap();
    let uid = question.pod.metadata.uid.as_deref().unwrap();
    let filtered = cluster.filter(uid, &wanted, &question.node_names.unwrap());
    serde_json::to_vec(&FilterAnswer::filtered(&filtered)).unwrap()
}

fn prioritize(cluster: &Cluster, question: &[u8]) -> Vec<u8> {
    let question: Question<'_> = serde_json::from_slice(question).unwrap();
    let wanted = Wanted::of(&question.pod, &names(), Policy::Pack).unwrap();
    let uid = question.pod.metadata.uid.as_deref().unwrap();
    serde_json::to_vec(&Scores(cluster.prioritize(uid, &wanted, &question.node_names.unwrap()))).unwrap()
}

fn resident_mib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

fn percentile(cluster: &Cluster, what: &str, question: &[u8]) {
    let mut times: Vec<_> = (0..1_000)
        .map(|_| {
            let start = clock_gettime(ClockId::ThreadCPUTime);
            std::hint::black_box((filter(cluster, question), prioritize(cluster, question)));
            Duration::try_from(clock_gettime(ClockId::ThreadCPUTime) - start).unwrap()
        })
        .collect();
    times.sort_unstable();
    println!("{what}: filter + prioritize, median {:.2?}, 99th percentile {:.2?}", times[500], times[990]);
}

fn benches(criterion: &mut Criterion) {
    let cluster = cluster();
    println!("{:?}, {} MiB resident", cluster.figures(), resident_mib());
    let fits = question(&pod(20, 32));
    let full = question(&pod(60, 32));
    let whole = question(&pod(200, 0));
    percentile(&cluster, "a share that fits everywhere", &fits);
    percentile(&cluster, "a share that fits nowhere", &full);
    percentile(&cluster, "whole GPUs, of which there are none", &whole);
    let mut group = criterion.benchmark_group("5,000 nodes, 8 GPUs, 10 shares");
    group.sample_size(20);
    group.bench_function("filter", |bench| bench.iter(|| filter(&cluster, &fits)));
    group.bench_function("prioritize", |bench| bench.iter(|| prioritize(&cluster, &fits)));
    group.finish();
}

criterion_group!(all, benches);
criterion_main!(all);
