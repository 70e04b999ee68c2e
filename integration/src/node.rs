//! A machine with kubelet's stand-in.

use std::ops::{Deref, DerefMut};

use anyhow::Result;

use crate::{
    host::{Host, Options},
    kubelet::Kubelet,
};

/// A node.
#[derive(Debug)]
pub struct Node {
    /// kubelet's stand-in.
    pub kubelet: Kubelet,
    host: Host,
}

impl Node {
    /// Brings up containerd and kubelet's stand-in.
    pub async fn start(options: &Options) -> Result<Self> {
        let host = Host::start(options).await?;
        let kubelet =
            Kubelet::start(&host.folder().join("kubelet"), &host.cgroup(), host.cri().clone()).await?;
        Ok(Self { kubelet, host })
    }
}

impl Deref for Node {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.host
    }
}

impl DerefMut for Node {
    fn deref_mut(&mut self) -> &mut Host {
        &mut self.host
    }
}
