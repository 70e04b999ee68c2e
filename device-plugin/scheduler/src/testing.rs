//! For the unit tests of several modules.

use kube::{Client, Config};

/// A client of the API server that a test has on a port of this machine. It asks once.
pub(crate) fn client(port: u16) -> Client {
    // Another test may have been first.
    let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    let mut config = Config::new(format!("http://127.0.0.1:{port}").parse().unwrap());
    config.default_retry = false;
    Client::try_from(config).unwrap()
}
