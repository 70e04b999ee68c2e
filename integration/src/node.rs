//! A machine with kubelet's stand-in.

use std::{
    ops::{AsyncFn, Deref, DerefMut},
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

use crate::{
    host::{Host, Options},
    kubelet::Kubelet,
    pod::{Container, Pod},
    probe,
};

/// Both resources are offered within a second; a busy machine may need a while.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// What went away is gone from the books within milliseconds.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(10);

/// The release whose C library the tests' usual image has.
const RELEASE: &str = "bookworm";

/// A node.
#[derive(Debug)]
pub struct Node {
    /// kubelet's stand-in.
    pub kubelet: Kubelet,
    image: String,
    host: Host,
}

impl Node {
    /// Brings up containerd, the driver and kubelet's stand-in.
    pub async fn start(options: &Options) -> Result<Self> {
        let host = Host::start(options).await?;
        let folder = host.vcuda.file().paths.kubelet.clone();
        let kubelet = Kubelet::start(&folder, &host.cgroup(), host.cri().clone()).await?;
        let image = probe::image(RELEASE)?;
        host.import(&image)?;
        Ok(Self { kubelet, image: image.name().into(), host })
    }

    /// Brings up everything, and waits until shares are on offer.
    pub async fn with_vcuda(options: &Options) -> Result<Self> {
        let mut node = Self::start(options).await?;
        node.vcuda.start_device_plugin()?;
        node.vcuda.start_nri_plugin().await?;
        node.wait_for_offer().await?;
        Ok(node)
    }

    /// Waits until both resources are on offer.
    pub async fn wait_for_offer(&mut self) -> Result<()> {
        let resources = self.vcuda.resources();
        let offered = self.kubelet.wait_for(&resources, START_TIMEOUT).await;
        self.vcuda.device_plugin()?.check_running()?;
        let Err(error) = offered else { return Ok(()) };
        let words = self.vcuda.device_plugin()?.tail();
        Err(error.context(format!("vcuda-device-plugin's last words:\n{words}")))
    }

    /// Name of an image with the probe in it.
    pub fn image(&self) -> &str {
        &self.image
    }

    /// A pod of one container, `main`, with a share of a GPU: percent of its time, and memory in units. It has the probe in it.
    pub fn pod_with_share(&self, name: &str, core: u32, units: u32) -> Pod {
        Pod::new(name, Container::new("main", &self.image).share(core, units))
    }

    /// See [`probe::hold`].
    pub async fn hold(&self, container: &str, mib: u64) -> Result<String> {
        probe::hold(self.cri(), container, mib).await
    }

    /// Waits until `done` says so.
    pub async fn wait_until(&self, what: &str, within: Duration, done: impl AsyncFn() -> bool) -> Result<()> {
        let deadline = Instant::now() + within;
        while !done().await {
            if Instant::now() > deadline {
                bail!("not within {within:?}: {what}");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Fails unless nothing is left: no container runs, no share is on record, no GPU memory is in use.
    pub async fn assert_empty(&self) {
        let left = async || -> Result<String> {
            let running = self.cri().running().await?;
            let shares = self.vcuda.shares();
            let used = self.driver.used_bytes()?;
            let nothing = running.is_empty() && shares.is_empty() && used == 0;
            Ok(if nothing {
                String::new()
            } else {
                format!("containers {running:?}, shares {shares:?}, {used} bytes of GPU memory")
            })
        };
        let clean = self.wait_until("nothing is left", SETTLE_TIMEOUT, async || {
            left().await.is_ok_and(|left| left.is_empty())
        });
        if clean.await.is_err() {
            panic!("left over: {:?}", left().await);
        }
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
