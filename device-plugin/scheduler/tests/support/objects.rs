//! Nodes, pods and other objects of the API server, made, changed and read.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use serde_json::{Value, json};
use vcuda_config::{CORE_PER_GPU, GpuUuid, NodeGpu, NodeGpus, PodPlacement, annotation};

/// Memory on offer of each GPU, in units.
pub const UNITS: u32 = 160;

/// UUID of a GPU of a node.
pub fn gpu(node: u8, gpu: u8) -> GpuUuid {
    let mut bytes = [node; 16];
    bytes[15] = gpu;
    GpuUuid::from_bytes(bytes)
}

/// What a device plugin publishes of a node.
pub fn offer(node: u8, gpus: u8) -> NodeGpus {
    let one = |n: u8| NodeGpu {
        uuid: gpu(node, n),
        model: "NVIDIA A100-SXM4-40GB".into(),
        minor: n.into(),
        units: UNITS,
        numa: None,
        healthy: true,
    };
    NodeGpus::new((0..gpus).map(one).collect(), Vec::new())
}

/// Makes a node that is known to the API server only: `name`, with the label `test: <group>`.
pub async fn create_node(client: &Client, group: &str, name: &str, offer: &NodeGpus) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let node = json!({
        "metadata": {
            "name": name,
            "labels": { "test": group },
            "annotations": { annotation::NODE_GPUS: offer.to_text() },
        },
    });
    nodes.create(&PostParams::default(), &serde_json::from_value(node)?).await?;
    let gpus = u32::try_from(offer.gpus.len())?;
    let amount = json!({
        "cpu": "200",
        "memory": "1Ti",
        "pods": "250",
        "tencent.com/vcuda-core": (gpus * CORE_PER_GPU).to_string(),
        "tencent.com/vcuda-memory": (gpus * UNITS).to_string(),
    });
    let status = json!({ "status": {
        "capacity": amount,
        "allocatable": amount,
        "conditions": [{ "type": "Ready", "status": "True" }],
    } });
    nodes.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}

/// Sets annotations of a node.
pub async fn annotate_node(client: &Client, name: &str, annotations: Value) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let patch = json!({ "metadata": { "annotations": annotations } });
    nodes.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}

/// A pod of one container for the scheduler and the nodes of `group`.
pub fn pod(group: &str, name: &str, core: u32, memory: u32) -> Value {
    json!({
        "metadata": { "name": name, "namespace": "default", "annotations": {} },
        "spec": {
            "schedulerName": group,
            "nodeSelector": { "test": group },
            "terminationGracePeriodSeconds": 0,
            "containers": [container("main", core, memory)],
        },
    })
}

/// A container that asks for so much.
pub fn container(name: &str, core: u32, memory: u32) -> Value {
    let mut limits = BTreeMap::new();
    if core > 0 {
        limits.insert("tencent.com/vcuda-core", core.to_string());
    }
    if memory > 0 {
        limits.insert("tencent.com/vcuda-memory", memory.to_string());
    }
    json!({ "name": name, "image": "none", "resources": { "limits": limits } })
}

/// Creates a pod.
pub async fn create_pod(client: &Client, pod: Value) -> Result<Pod> {
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    Ok(pods.create(&PostParams::default(), &serde_json::from_value(pod)?).await?)
}

/// Pods of a scheduler.
pub async fn pods_of(client: &Client, group: &str) -> Result<Vec<Pod>> {
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let list = ListParams::default().fields(&format!("spec.schedulerName={group}"));
    Ok(pods.list(&list).await?.items)
}

/// One pod.
pub async fn get_pod(client: &Client, name: &str) -> Result<Pod> {
    Ok(Api::<Pod>::default_namespaced(client.clone()).get(name).await?)
}

/// Deletes a pod, as kubelet does when its containers have ended.
pub async fn delete_pod(client: &Client, name: &str) -> Result<()> {
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    pods.delete(name, &DeleteParams::default().grace_period(0)).await?;
    Ok(())
}

/// The pod's node, if it has one.
pub fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// What is written on the pod.
pub fn placement_of(pod: &Pod) -> Option<PodPlacement> {
    pod.metadata.annotations.as_ref()?.get(annotation::PLACEMENT)?.parse().ok()
}

/// Why a pod is not scheduled.
pub fn unschedulable(pod: &Pod) -> Option<String> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let condition = conditions.iter().find(|it| it.type_ == "PodScheduled" && it.status == "False")?;
    condition.message.clone()
}

/// The manifests of a file under `config/deploy`.
pub fn manifests(file: &str) -> Result<Vec<Value>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/deploy").join(file);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let parse = |text: &str| serde_saphyr::from_str(text).with_context(|| path.display().to_string());
    text.split("\n---\n").map(parse).collect()
}

/// Creates an object of any kind.
pub async fn create(client: &Client, object: &Value) -> Result<()> {
    let (version, kind) = (object["apiVersion"].as_str(), object["kind"].as_str());
    let (version, kind) = (version.context("no apiVersion")?, kind.context("no kind")?);
    let (group, version) = version.rsplit_once('/').unwrap_or(("", version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
    let object: DynamicObject = serde_json::from_value(object.clone())?;
    let api: Api<DynamicObject> = match &object.metadata.namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    };
    api.create(&PostParams::default(), &object)
        .await
        .with_context(|| format!("{kind} {:?}", object.metadata.name))?;
    Ok(())
}
