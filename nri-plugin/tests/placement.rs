//! The GPU that a scheduler picked is the GPU that the container gets, or it does not start.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

mod common;

use std::sync::Arc;

use common::{TestNode, UNITS, gpu, granted, pod};
use nri_plugin::{
    binding::Binder,
    wire::{Container, PodSandbox},
};
use vcuda_config::annotation;

fn placed(n: u32, placement: &str) -> PodSandbox {
    let mut pod = pod(n);
    pod.annotations.insert(annotation::PLACEMENT.into(), placement.into());
    pod
}

/// GPUs of the container's share, or the refusal.
fn bound(
    node: &TestNode,
    binder: &Binder,
    pod: &PodSandbox,
    container: Container,
) -> Result<Vec<u32>, String> {
    let binding = binder.bind(pod, &container, || true).map_err(|refusal| refusal.to_string())?;
    Ok(node.shares().records[&binding.name].gpus.iter().map(|gpu| gpu.minor).collect())
}

fn node() -> (TestNode, Arc<Binder>) {
    let node = TestNode::new();
    let binder = Binder::open(node.file.paths.clone()).unwrap();
    (node, Arc::new(binder))
}

#[test]
fn the_schedulers_choice_goes_before_the_device_ids() {
    let (node, binder) = node();
    // The IDs are of GPU 1.
    let pod_1 = placed(1, &format!("1;1;main={};side={}", gpu(0), gpu(1)));
    assert_eq!(bound(&node, &binder, &pod_1, granted(&pod_1, "main", 1, 20, 4)), Ok(vec![0]));
    assert_eq!(bound(&node, &binder, &pod_1, granted(&pod_1, "side", 1, 20, 4)), Ok(vec![1]));
    // Restarted, it is still there.
    assert_eq!(bound(&node, &binder, &pod_1, granted(&pod_1, "main", 2, 20, 4)), Ok(vec![0]));
    // A container of which the choice says nothing goes by its IDs.
    assert_eq!(bound(&node, &binder, &pod_1, granted(&pod_1, "late", 1, 20, 4)), Ok(vec![1]));
}

#[test]
fn a_choice_that_the_node_cannot_give_is_refused_with_reason_and_remedy_and_holds_nothing() {
    let (node, binder) = node();
    let first = placed(1, &format!("1;1;main={}", gpu(0)));
    assert_eq!(bound(&node, &binder, &first, granted(&first, "main", 1, 70, UNITS)), Ok(vec![0]));
    for (placement, reason) in [
        (format!("1;1;main={}", gpu(0)), "has 30 core and 0 GiB free"),
        (format!("1;1;main={}", gpu(9)), "is not on offer here"),
        (format!("1;1;main={},{}", gpu(0), gpu(1)), "bound elsewhere"),
        ("main=0".into(), "is no placement"),
    ] {
        let pod = placed(2, &placement);
        let error = bound(&node, &binder, &pod, granted(&pod, "main", 1, 50, 4)).unwrap_err();
        assert!(error.contains(reason) && error.contains("delete the pod to have it placed anew"), "{error}");
        assert_eq!(node.shares().records.len(), 1, "{placement}");
    }
}

#[test]
fn the_choice_of_gpu_admission_is_taken_where_it_can_be() {
    let (node, binder) = node();
    let chosen = |n| {
        let mut pod = pod(n);
        pod.annotations.insert("tencent.com/predicate-gpu-idx-0".into(), "0".into());
        pod
    };
    let asking = |n| granted(&chosen(n), "main", 1, 60, 4);
    assert_eq!(bound(&node, &binder, &chosen(1), asking(1)), Ok(vec![0]));
    assert_eq!(bound(&node, &binder, &chosen(2), asking(2)), Ok(vec![1]));
}
