//! For the unit tests of several modules.

use std::{collections::BTreeMap, time::Duration};

use kube::{Client, Config};
use ledger::Policy;
use vcuda_config::{GpuUuid, NodeGpu, NodeGpus, annotation};

use crate::{Lead, ResourceNames, Service, Settings, Standing, watch};

/// A client of the API server that a test has on a port of this machine. It asks once.
pub(crate) fn client(port: u16) -> Client {
    // Another test may have been first.
    let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    watch::client(Config::new(format!("http://127.0.0.1:{port}").parse().unwrap())).unwrap()
}

/// A service that leads, knows a node of one GPU, and asks the API server that a test has on a port of this machine. It
/// waits five seconds for an answer.
pub(crate) fn service(port: u16) -> Service {
    let names =
        ResourceNames { core: "tencent.com/vcuda-core".into(), memory: "tencent.com/vcuda-memory".into() };
    let settings = Settings {
        names,
        policy: Policy::Pack,
        bind_timeout: Duration::from_secs(5),
        expiry: Duration::from_secs(60),
    };
    let service = Service::new(client(port), settings, Standing::new(Lead::Alone));
    let gpu = NodeGpu {
        uuid: GpuUuid::from_bytes([1; 16]),
        model: "A100".into(),
        minor: 0,
        units: 100,
        numa: None,
        healthy: true,
    };
    let text = NodeGpus::new(vec![gpu], Vec::new()).to_text();
    let annotations = BTreeMap::from([(annotation::NODE_GPUS.to_owned(), text)]);
    service.cluster_mut().set_node("node", Some(&annotations));
    service
}
