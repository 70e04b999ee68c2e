//! What kubelet tells monitors, such as dcgm-exporter: which device IDs each container has.

use std::{collections::BTreeSet, path::Path};

use anyhow::{Context, Result};
use tonic::transport::Endpoint;
use vcuda_config::{DeviceId, GpuUuid};

mod api {
    tonic::include_proto!("v1");
}

use api::{ListPodResourcesRequest, pod_resources_lister_client::PodResourcesListerClient};

/// The GPUs of which kubelet, with its root in `root`, says that container `main` of a pod has units of `resource`, and
/// how many units.
///
/// # Errors
///
/// Kubelet does not answer, or an ID of the container's names no GPU.
pub async fn gpus(root: &Path, pod: &str, resource: &str) -> Result<(BTreeSet<GpuUuid>, usize)> {
    let socket = root.join("pod-resources/kubelet.sock");
    let channel = Endpoint::try_from(format!("unix://{}", socket.display()))?.connect().await;
    let channel = channel.with_context(|| socket.display().to_string())?;
    let answer = PodResourcesListerClient::new(channel).list(ListPodResourcesRequest {}).await?.into_inner();
    let pods = answer.pod_resources.into_iter().filter(|it| it.name == pod);
    let devices = pods.flat_map(|it| it.containers).filter(|it| it.name == "main").flat_map(|it| it.devices);
    let ids = devices.filter(|it| it.resource_name == resource).flat_map(|it| it.device_ids);
    let (mut gpus, mut units) = (BTreeSet::new(), 0);
    for id in ids {
        let id: DeviceId = id.parse()?;
        gpus.insert(id.gpu);
        units += 1;
    }
    Ok((gpus, units))
}
