//! Kubelet's side of the plugin: the protocol, the service that answers kubelet, and the session that keeps it
//! registered. It knows no NVML.

mod service;
mod session;

pub use service::{Context, EnsureCdi, Service};
pub use session::Session;

/// Kubelet's device plugin protocol, made from `proto/deviceplugin.proto`.
pub mod api {
    tonic::include_proto!("v1beta1");
}

/// The one version of the protocol (deviceplugin/v1beta1, constants.go).
pub const API_VERSION: &str = "v1beta1";

/// File name of kubelet's socket in its device plugin folder.
pub const KUBELET_SOCKET: &str = "kubelet.sock";
