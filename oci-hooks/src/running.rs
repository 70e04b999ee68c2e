//! A container that runs on this node: its process, bundle and command, from the shim that keeps it (containerd's
//! task service, over ttrpc) and the bundle that containerd made. Where the shim is and which container it keeps is
//! told by containerd's state folder, which belongs to root; what runs in the container is not asked.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use containerd_shim_protos::{
    Client,
    protobuf::{EnumOrUnknown, Message},
    shim::shim::{StateRequest, StateResponse},
    types::task::Status,
};
use serde::Deserialize;
use thiserror::Error;

use crate::{
    compat::{
        files::{Trouble, host_read},
        start::Command,
    },
    rootfs::{Rootfs, RootfsError},
};

/// A shim answers in a millisecond.
const TIME_LIMIT: Duration = Duration::from_secs(2);

/// `config.json`, `bootstrap.json`.
const MAX_BYTES: u64 = 16 << 20;

/// A container that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    /// Its ID.
    pub id: String,
    /// Its first process, as this node sees it.
    pub pid: u32,
    /// Its bundle.
    pub bundle: PathBuf,
    /// What it runs.
    pub command: Command,
}

/// Why a container cannot be looked at.
#[derive(Debug, Error)]
pub enum RunningError {
    /// No such container.
    #[error("container {id} is not in {folder}; see `crictl ps`, and --containerd-state")]
    None {
        /// What was asked for.
        id: String,
        /// Where it was looked for.
        folder: PathBuf,
    },
    /// More than one.
    #[error("{count} containers have IDs that begin with {id}; give more of it")]
    Several {
        /// What was asked for.
        id: String,
        /// How many.
        count: usize,
    },
    /// It does not run.
    #[error("container {id} is {status}; only one that runs can be looked at")]
    NotRunning {
        /// Its ID.
        id: String,
        /// What it is.
        status: String,
    },
    /// Its shim does not answer.
    #[error("the shim of container {id} does not answer: {reason}; run as root, and look at containerd")]
    Shim {
        /// Its ID.
        id: String,
        /// Why.
        reason: String,
    },
    /// Its files cannot be read.
    #[error("container {id}: {reason}; run as root")]
    Files {
        /// Its ID.
        id: String,
        /// Why.
        reason: String,
    },
    /// Its root cannot be opened.
    #[error(transparent)]
    Root(#[from] RootfsError),
}

/// containerd 2.x's `bootstrap.json`.
#[derive(Deserialize)]
struct Bootstrap {
    address: String,
    protocol: String,
}

#[derive(Deserialize)]
struct Config {
    process: Option<Command>,
}

impl Running {
    /// The container whose ID begins with `id`, of `namespace`, kept by a containerd whose state folder is `state`
    /// (`/run/containerd`).
    ///
    /// # Errors
    /// See [`RunningError`].
    pub fn find(state: &Path, namespace: &str, id: &str) -> Result<Self, RunningError> {
        let folder = state.join("io.containerd.runtime.v2.task").join(namespace);
        let none = || RunningError::None { id: id.into(), folder: folder.clone() };
        // An ID is a name in that folder and nothing else.
        if id.is_empty() || !id.bytes().all(|c| c.is_ascii_alphanumeric() || b"-_.".contains(&c)) {
            return Err(none());
        }
        let names = fs::read_dir(&folder).map_err(|_| none())?.flatten();
        let mut found: Vec<String> = names
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| name.starts_with(id))
            .collect();
        if found.iter().any(|name| name == id) {
            found = vec![id.to_owned()];
        }
        let full = match found.as_slice() {
            [] => return Err(none()),
            [one] => one.clone(),
            several => return Err(RunningError::Several { id: id.into(), count: several.len() }),
        };
        Self::ask(&folder.join(&full), full)
    }

    fn ask(bundle: &Path, id: String) -> Result<Self, RunningError> {
        let shim = |reason: String| RunningError::Shim { id: id.clone(), reason };
        let files = |Trouble(reason): Trouble| RunningError::Files { id: id.clone(), reason };
        let address = address(bundle).map_err(|error| shim(error.to_string()))?;
        let client = Client::connect(&address).map_err(|error| shim(format!("{address}: {error}")))?;
        let state = state(&client, &id).map_err(shim)?;
        if state.status != EnumOrUnknown::new(Status::RUNNING) {
            let status = format!("{:?}", state.status).to_lowercase();
            return Err(RunningError::NotRunning { id, status });
        }
        let config = host_read(&bundle.join("config.json"), MAX_BYTES).map_err(files)?;
        let config: Config = serde_json::from_slice(&config)
            .map_err(|error| files(Trouble(format!("config.json: no OCI configuration: {error}"))))?;
        let command = config.process.unwrap_or_default();
        Ok(Self { pid: state.pid, bundle: bundle.to_owned(), command, id })
    }

    /// Its root, as it sees it, with everything that is mounted there.
    ///
    /// # Errors
    /// It ended, or this is not root.
    pub fn rootfs(&self) -> Result<Rootfs, RootfsError> {
        Rootfs::open(Path::new(&format!("/proc/{}/root", self.pid)))
    }
}

/// What a shim says of its container. The service has another name on each line of containerd, and the same messages.
fn state(client: &Client, id: &str) -> Result<StateResponse, String> {
    let request = StateRequest { id: id.to_owned(), ..StateRequest::default() };
    let payload = request.write_to_bytes().map_err(|error| error.to_string())?;
    let ask = |service: &str| {
        client.request(ttrpc::Request {
            service: service.into(),
            method: "State".into(),
            timeout_nano: i64::try_from(TIME_LIMIT.as_nanos()).unwrap_or(i64::MAX),
            payload: payload.clone(),
            ..ttrpc::Request::default()
        })
    };
    let answer = match ask("containerd.task.v3.Task") {
        Err(ttrpc::Error::RpcStatus(status)) if status.code() == ttrpc::Code::UNIMPLEMENTED => {
            ask("containerd.task.v2.Task")
        }
        answer => answer,
    };
    match answer {
        Ok(response) => StateResponse::parse_from_bytes(&response.payload).map_err(|error| error.to_string()),
        Err(ttrpc::Error::RpcStatus(status)) => Err(status.message),
        Err(error) => Err(error.to_string()),
    }
}

/// Where the shim of a bundle listens: containerd 2.x says it in `bootstrap.json`, 1.x in `address`. Containers of a
/// pod share the sandbox's shim; each bundle tells.
fn address(bundle: &Path) -> io::Result<String> {
    let other = |reason: String| io::Error::other(reason);
    if let Ok(text) = host_read(&bundle.join("bootstrap.json"), MAX_BYTES) {
        let bootstrap: Bootstrap = serde_json::from_slice(&text).map_err(|error| other(error.to_string()))?;
        if bootstrap.protocol != "ttrpc" {
            return Err(other(format!("it speaks {}, not ttrpc", bootstrap.protocol)));
        }
        return Ok(bootstrap.address);
    }
    let text = host_read(&bundle.join("address"), MAX_BYTES).map_err(|Trouble(reason)| other(reason))?;
    Ok(String::from_utf8_lossy(&text).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_is_named_by_enough_of_its_id() {
        let state = tempfile::tempdir().unwrap();
        let folder = state.path().join("io.containerd.runtime.v2.task/k8s.io");
        for id in ["abc1", "abc2", "abc"] {
            fs::create_dir_all(folder.join(id)).unwrap();
        }
        let find = |id: &str| Running::find(state.path(), "k8s.io", id).unwrap_err();
        assert!(matches!(find("ab"), RunningError::Several { count: 3, .. }));
        for id in ["", "x", "../k8s.io", "abc/../abc1"] {
            assert!(matches!(find(id), RunningError::None { .. }), "{id:?}");
        }
        // Found, and it has no shim.
        for id in ["abc", "abc1"] {
            assert!(matches!(find(id), RunningError::Shim { id: found, .. } if found == id));
        }
    }

    #[test]
    fn both_lines_say_where_the_shim_is() {
        let bundle = tempfile::tempdir().unwrap();
        fs::write(bundle.path().join("address"), "unix:///run/a.sock\n").unwrap();
        assert_eq!(address(bundle.path()).unwrap(), "unix:///run/a.sock");
        let text = r#"{"version":3,"address":"unix:///run/b.sock","protocol":"ttrpc"}"#;
        fs::write(bundle.path().join("bootstrap.json"), text).unwrap();
        assert_eq!(address(bundle.path()).unwrap(), "unix:///run/b.sock");
        fs::write(bundle.path().join("bootstrap.json"), text.replace("ttrpc", "grpc")).unwrap();
        assert!(address(bundle.path()).is_err());
    }
}
