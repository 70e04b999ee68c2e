//! HTTPS for the verbs: certificates from files, read anew when they change, and callers known by theirs where a CA for
//! them is given.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use anyhow::{Context, Result};
use axum::serve::Listener;
use daemon::Told;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::AbortHandle,
    time::{interval, sleep, timeout},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        RootCertStore, ServerConfig,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
        server::WebPkiClientVerifier,
    },
    server::TlsStream,
};
use tracing::{debug, info, warn};
use vcuda_config::in_one_line;

/// How long a caller may take to introduce itself.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// How often the files are looked at, usually.
pub const REFRESH: Duration = Duration::from_secs(60);

/// Connections that have shaken hands and are not yet served.
const BACKLOG: usize = 64;

/// Callers that introduce themselves at a time. One more takes the place of the one that has taken longest: anybody can call
/// and say nothing. A burst of binds may come over so many new connections.
const STRANGERS_MAX: usize = 512;

/// Where the certificates are.
#[derive(Clone, Debug)]
pub struct Files {
    /// Certificate chain of this server, PEM.
    pub certificate: PathBuf,
    /// Its private key, PEM.
    pub key: PathBuf,
    /// Certificates of the CAs that callers must be known to, PEM; none to let in anyone.
    pub client_ca: Option<PathBuf>,
}

/// Accepts connections, and hands them out once they have shaken hands.
pub struct TlsListener {
    ready: mpsc::Receiver<Connection>,
    address: SocketAddr,
}

type Connection = (TlsStream<TcpStream>, SocketAddr);

/// The settings for new connections.
type Shared = Arc<RwLock<Arc<ServerConfig>>>;

impl Files {
    /// Reads them.
    pub fn read(&self) -> Result<ServerConfig> {
        let builder = ServerConfig::builder();
        let builder = match &self.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates(path)? {
                    roots.add(certificate).with_context(|| format!("{}: no CA", path.display()))?;
                }
                let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build();
                builder.with_client_cert_verifier(verifier.with_context(|| path.display().to_string())?)
            }
        };
        let key = PrivateKeyDer::from_pem_file(&self.key).with_context(|| {
            format!("{}: no private key in PEM form can be read there", self.key.display())
        })?;
        let chain = certificates(&self.certificate)?;
        let mut config = builder
            .with_single_cert(chain, key)
            .with_context(|| format!("{}: does not go with the key", self.certificate.display()))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let certificates =
        read.with_context(|| format!("{}: no certificate in PEM form can be read there", path.display()))?;
    anyhow::ensure!(!certificates.is_empty(), "{}: there is no certificate in it", path.display());
    Ok(certificates)
}

impl TlsListener {
    /// Serves TLS on `listener` with the certificates of `files`, which are looked at every `refresh`.
    pub fn new(listener: TcpListener, files: Files, refresh: Duration) -> Result<Self> {
        let address = listener.local_addr()?;
        let config = Arc::new(RwLock::new(Arc::new(files.read()?)));
        let (send, ready) = mpsc::channel(BACKLOG);
        tokio::spawn(keep_fresh(files, refresh, config.clone(), send.clone()));
        tokio::spawn(accept(listener, config, send));
        Ok(Self { ready, address })
    }
}

async fn accept(listener: TcpListener, config: Shared, send: mpsc::Sender<Connection>) {
    let mut strangers: VecDeque<AbortHandle> = VecDeque::new();
    let mut told = Told::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = send.closed() => return,
        };
        let (stream, from) = match accepted {
            Ok(accepted) => {
                told.forget();
                accepted
            }
            Err(error) => {
                // Out of file descriptors, most likely: others must end first.
                if told.is_news(&error.to_string()) {
                    warn!("a connection could not be accepted, and is tried again: {error}");
                }
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let acceptor = TlsAcceptor::from(config.read().unwrap_or_else(PoisonError::into_inner).clone());
        let send = send.clone();
        strangers.retain(|stranger| !stranger.is_finished());
        if strangers.len() >= STRANGERS_MAX
            && let Some(longest) = strangers.pop_front()
        {
            longest.abort();
        }
        // A caller that dawdles holds up nobody else.
        let introduction = tokio::spawn(async move {
            match timeout(HANDSHAKE, acceptor.accept(stream)).await {
                Ok(Ok(stream)) => drop(send.send((stream, from)).await),
                Ok(Err(error)) => debug!("{from} was turned away: {error}"),
                Err(_) => debug!("{from} did not introduce itself"),
            }
        });
        strangers.push_back(introduction.abort_handle());
    }
}

/// Reads the files again and again; what cannot be read leaves things as they are.
async fn keep_fresh(files: Files, refresh: Duration, config: Shared, send: mpsc::Sender<Connection>) {
    let modified = |files: &Files| {
        let paths = [Some(&files.certificate), Some(&files.key), files.client_ca.as_ref()];
        paths.map(|path| path.and_then(|path| path.metadata().ok()?.modified().ok()))
    };
    let mut last = modified(&files);
    let mut tick = interval(refresh);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = send.closed() => return,
        }
        let now = modified(&files);
        if now != last {
            match files.read() {
                Ok(new) => {
                    *config.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(new);
                    last = now;
                    info!(certificate = %files.certificate.display(), "the certificate was renewed");
                }
                Err(error) => warn!("the certificate stays as it was: {}", in_one_line(error.as_ref())),
            }
        }
    }
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.ready.recv().await {
            Some(connection) => connection,
            // The tasks that send end after this receiver does.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        Ok(self.address)
    }
}
