//! What a node offers, as compact JSON in the node annotation [`crate::annotation::NODE_GPUS`]: the device plugin
//! writes it when it changes, the scheduler places by it.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::GpuUuid;

const VERSION: u32 = 1;

/// A node of 64 GPUs with all their groups is below this; all annotations of an object may have 256 KiB together.
const MAX_BYTES: usize = 64 << 10;

/// The GPUs that a node offers, in NVML's order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeGpus {
    /// Format version. Keys that a version adds are ignored by readers that do not know them.
    #[serde(rename = "v")]
    version: u32,
    /// GPUs on offer. GPUs that the node leaves alone are not in it; an unhealthy one is.
    pub gpus: Vec<NodeGpu>,
    /// How they are connected, from NVML; empty where nothing is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GpuGroup>,
}

/// One GPU on offer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeGpu {
    /// UUID.
    pub uuid: GpuUuid,
    /// Model name, as NVML says it.
    pub model: String,
    /// Number of the device node `/dev/nvidia<minor>`, by which gpu-admission names GPUs.
    pub minor: u32,
    /// Memory on offer, in units of 256 MiB.
    pub units: u32,
    /// NUMA node, where the platform tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<u32>,
    /// False while the GPU takes no new share.
    #[serde(default = "healthy", skip_serializing_if = "is_healthy")]
    pub healthy: bool,
}

/// GPUs that are equally well connected with each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuGroup {
    /// By what.
    pub link: Link,
    /// Its members, as positions in [`NodeGpus::gpus`].
    pub gpus: Vec<usize>,
}

/// What connects GPUs, the fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Link {
    /// NVLink, direct or through NVSwitch.
    NvLink,
    /// A PCIe switch.
    Pcie,
    /// A NUMA node.
    Numa,
}

/// Why a text is no list of a node's GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the node's annotation {key} cannot be read: {0}; vcuda-device-plugin writes it, see that it runs there in a version that fits", key = crate::annotation::NODE_GPUS)]
pub struct NodeGpusError(String);

impl NodeGpus {
    /// What the device plugin writes on its node.
    pub fn new(gpus: Vec<NodeGpu>, groups: Vec<GpuGroup>) -> Self {
        Self { version: VERSION, gpus, groups }
    }

    /// Reads the annotation's value.
    ///
    /// # Errors
    ///
    /// When it is no JSON of this version, names a GPU twice, or groups GPUs that it does not name.
    pub fn parse(text: &str) -> Result<Self, NodeGpusError> {
        if text.len() > MAX_BYTES {
            return Err(NodeGpusError(format!("{} bytes are more than {MAX_BYTES}", text.len())));
        }
        let node: Self = serde_json::from_str(text).map_err(|error| NodeGpusError(error.to_string()))?;
        if node.version != VERSION {
            return Err(NodeGpusError(format!("version {} is not known, only {VERSION}", node.version)));
        }
        for (at, gpu) in node.gpus.iter().enumerate() {
            if node.gpus[..at].iter().any(|other| other.uuid == gpu.uuid) {
                return Err(NodeGpusError(format!("{} is named twice", gpu.uuid)));
            }
        }
        if node.groups.iter().flat_map(|group| &group.gpus).any(|at| *at >= node.gpus.len()) {
            return Err(NodeGpusError("a group has a GPU that is not named".into()));
        }
        Ok(node)
    }

    /// The annotation's value.
    pub fn to_text(&self) -> String {
        // Strings, numbers and lists: there is nothing in it that JSON cannot say.
        serde_json::to_string(self).unwrap_or_default()
    }
}

fn healthy() -> bool {
    true
}

fn is_healthy(healthy: &bool) -> bool {
    *healthy
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn gpu(n: u8) -> NodeGpu {
        NodeGpu {
            uuid: GpuUuid::from_bytes([n; 16]),
            model: "NVIDIA A100-SXM4-40GB".into(),
            minor: n.into(),
            units: 158,
            numa: Some(0),
            healthy: n != 1,
        }
    }

    #[test]
    fn a_node_is_written_compactly() {
        let group = GpuGroup { link: Link::NvLink, gpus: vec![0, 1] };
        assert_eq!(
            NodeGpus::new(vec![gpu(0), gpu(1)], vec![group]).to_text(),
            "{\"v\":1,\"gpus\":[\
             {\"uuid\":\"GPU-00000000-0000-0000-0000-000000000000\",\"model\":\"NVIDIA A100-SXM4-40GB\",\
             \"minor\":0,\"units\":158,\"numa\":0},\
             {\"uuid\":\"GPU-01010101-0101-0101-0101-010101010101\",\"model\":\"NVIDIA A100-SXM4-40GB\",\
             \"minor\":1,\"units\":158,\"numa\":0,\"healthy\":false}],\
             \"groups\":[{\"link\":\"nvlink\",\"gpus\":[0,1]}]}"
        );
    }

    #[test]
    fn keys_of_a_newer_minor_format_are_ignored_and_other_versions_refused() {
        let text = NodeGpus::new(vec![gpu(0)], Vec::new()).to_text();
        let newer = text.replace("\"v\":1", "\"v\":1,\"since\":7");
        assert_eq!(NodeGpus::parse(&newer).unwrap(), NodeGpus::parse(&text).unwrap());
        let error = NodeGpus::parse(&text.replace("\"v\":1", "\"v\":2")).unwrap_err().to_string();
        assert!(error.contains("version 2"), "{error}");
    }

    #[test]
    fn contradictions_are_refused() {
        let twice = NodeGpus::new(vec![gpu(0), gpu(0)], Vec::new()).to_text();
        assert!(NodeGpus::parse(&twice).unwrap_err().to_string().contains("twice"));
        let group = GpuGroup { link: Link::Pcie, gpus: vec![1] };
        let stray = NodeGpus::new(vec![gpu(0)], vec![group]).to_text();
        assert!(NodeGpus::parse(&stray).unwrap_err().to_string().contains("group"));
        assert!(NodeGpus::parse(&" ".repeat(MAX_BYTES + 1)).is_err());
        assert!(NodeGpus::parse("").unwrap_err().to_string().contains("vcuda-device-plugin"));
    }

    proptest! {
        #[test]
        fn nodes_round_trip(count in 0..16_u8, pairs in proptest::collection::vec(0..16_usize, 0..8)) {
            let gpus: Vec<_> = (0..count).map(gpu).collect();
            let within = pairs.into_iter().filter(|at| *at < gpus.len()).collect();
            let node = NodeGpus::new(gpus, vec![GpuGroup { link: Link::Numa, gpus: within }]);
            prop_assert_eq!(NodeGpus::parse(&node.to_text()).unwrap(), node);
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in "\\PC{0,200}") {
            let _ = NodeGpus::parse(&text);
        }
    }
}
