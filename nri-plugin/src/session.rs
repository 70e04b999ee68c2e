//! One session with the runtime over one socket: register, be configured and synchronized, then serve until either
//! side ends it.

use std::{io, sync::Arc, time::Duration};

use futures::stream::{self, StreamExt};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use ttrpc::{
    asynchronous::{
        Client, Server,
        transport::{Listener, Socket},
    },
    context,
};

use crate::{
    mux::Mux,
    service::{Service, Standing},
    wire::{RegisterPluginRequest, RuntimeClient, create_plugin},
};

/// How long the runtime may take to let us register. It takes plugins one after another, each for up to five seconds.
const REGISTRATION: Duration = Duration::from_secs(60);

/// Who we are to the runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Name.
    pub name: String,
    /// Two digits that order plugins.
    pub index: String,
}

/// Why a session did not come about, or broke.
#[derive(Debug, Error)]
pub enum SessionError {
    /// The runtime did not let us register.
    #[error("containerd did not register this plugin: {0}")]
    Register(String),
    /// The runtime registered us and gave us up before it had synchronized.
    #[error("containerd closed the connection before this plugin was in service; its log says why")]
    Early,
    /// The connection broke.
    #[error("the connection to containerd broke: {0}")]
    Broken(#[from] io::Error),
    /// What the runtime configured cannot be used.
    #[error("{0}")]
    Unusable(String),
}

/// Serves one session on `trunk` until the runtime ends it, which is `Ok` once containers have been served.
pub async fn serve<T>(trunk: T, identity: &Identity, service: &Arc<Service>) -> Result<(), SessionError>
where
    T: AsyncRead + AsyncWrite + Send + 'static,
{
    let Mux { plugin, runtime, driver } = Mux::new(trunk);
    // The server must see its connection before anything is sent: Configure may come before our registration is
    // answered. And the stream must not end, or the server's shutdown panics (ttrpc 0.10 server.rs, stop_listen).
    let connection = stream::once(async move { io::Result::Ok(plugin) }).chain(stream::pending());
    let mut server = Server::new()
        .add_listener(Listener::new(connection))
        .register_service(create_plugin(Arc::clone(service) as Arc<_>));
    server.start().await.map_err(|error| SessionError::Register(error.to_string()))?;
    let client = RuntimeClient::new(Client::new(Socket::new(runtime)));

    let driver = driver.run();
    tokio::pin!(driver);
    let request = RegisterPluginRequest {
        plugin_name: identity.name.clone(),
        plugin_idx: identity.index.clone(),
        ..Default::default()
    };
    let registered = tokio::select! {
        ended = &mut driver => Err(match ended {
            Ok(()) => "it closed the connection".into(),
            Err(error) => error.to_string(),
        }),
        answer = client.register_plugin(context::with_duration(REGISTRATION), &request) => {
            answer.map(drop).map_err(|error| match error {
                ttrpc::Error::RpcStatus(status) => status.message,
                other => other.to_string(),
            })
        }
    };
    registered.map_err(SessionError::Register)?;

    let mut standing = service.standing();
    let unusable = async {
        let found = standing.wait_for(|now| matches!(now, Standing::Unusable(_))).await;
        match found.map(|now| now.clone()) {
            Ok(Standing::Unusable(reason)) => reason,
            // The sender lives as long as the service, which we borrow.
            _ => std::future::pending().await,
        }
    };
    // ttrpc tells nobody that a connection has ended; the multiplexer does.
    let ended = tokio::select! {
        ended = &mut driver => ended,
        reason = unusable => {
            // The refusal is still on its way to the runtime; without the driver it would not arrive.
            let _ = tokio::time::timeout(Duration::from_millis(200), &mut driver).await;
            return Err(SessionError::Unusable(reason));
        }
    };
    ended?;
    let standing = service.standing().borrow().clone();
    match standing {
        Standing::Ready(_) => Ok(()),
        Standing::Unusable(reason) => Err(SessionError::Unusable(reason)),
        Standing::Registering | Standing::Configured(_) => Err(SessionError::Early),
    }
}
