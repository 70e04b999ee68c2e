//! The node's side of the cluster: what the node offers goes into an annotation of the node, where the node put a pod's
//! shares by itself goes into an annotation of the pod, and the administrator's cordons come back. All of it can be
//! missing: without a way to the API server the node works as before, and vcuda-scheduler does not know of it.

mod books;
mod connection;
mod events;
mod failures;
mod settle;

use std::{
    collections::{BTreeMap, BTreeSet},
    future, mem,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt, pin_mut};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, Client, ResourceExt,
    api::{ListParams, Patch, PatchParams},
    runtime::watcher::{self, Event, watcher},
};
use ledger::Shares;
use serde_json::json;
use tokio::{
    sync::watch,
    task,
    time::{self, MissedTickBehavior},
};
use tracing::{debug, info, warn};
use vcuda_config::{GpuUuid, NodeGpus, PodPlacement, Resources, annotation};

pub(crate) use self::events::{Events, Said};

use self::{
    books::{Containers, PodOnNode},
    failures::{Failures, in_words, is_forbidden},
    settle::Settle,
};
use crate::expected::Expected;

/// How often shares are compared with what their pods say, whether or not something called for it.
const COMPARE_EVERY: Duration = Duration::from_secs(10);

/// How this process reaches the API server, and as what node.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// A kubeconfig, such as kubelet's own. Without one, the service account of the pod that this process runs in.
    pub kubeconfig: Option<PathBuf>,
    /// The node's name. Without one, the host's name in lower case, as kubelet has it.
    pub node: Option<String>,
}

/// GPUs that an administrator has cordoned; none as long as nobody has asked the API server.
pub type Cordon = Option<BTreeSet<GpuUuid>>;

/// What the cluster is told, and what it says.
pub(crate) struct Ports {
    /// What the node offers; none as long as that is not known.
    pub(crate) gpus: watch::Receiver<Option<Arc<NodeGpus>>>,
    /// Says that something may have changed in the folder of shares.
    pub(crate) shares: watch::Receiver<()>,
    /// Takes what is cordoned.
    pub(crate) cordon: watch::Sender<Cordon>,
    /// Takes the containers that a scheduler has placed here and that have no share yet.
    pub(crate) expect: watch::Sender<Arc<Vec<Expected>>>,
}

/// Tells the cluster of the node, and follows what it says. Never returns.
pub(crate) async fn follow(access: Access, names: Resources, shares: PathBuf, mut ports: Ports) {
    let mut failures = Failures::none();
    let mut missing = false;
    loop {
        let reason = match connection::open(&access).await {
            Ok(None) => {
                info!(
                    "no way to the API server, so vcuda-scheduler does not know this node's GPUs and cordons are not \
                     seen; pass --kubeconfig, or run as a pod with a service account"
                );
                return std::future::pending().await;
            }
            Ok(Some((client, node))) => {
                let mut session = Session { missing, ..Session::new(client, node, &names, &shares) };
                let failed = session.run(&mut ports).await;
                if session.in_step {
                    failures = Failures::none();
                }
                missing = session.missing;
                let mut reason = in_words(&failed);
                if is_forbidden(&failed) {
                    reason += &format!(
                        "; where this node is not {:?}, set NODE_NAME or --node-name; else give these credentials the \
                         access that config/deploy/daemonset.yaml has",
                        session.node
                    );
                }
                reason
            }
            Err(error) => in_words(&error),
        };
        if failures.is_news(&reason) {
            warn!(%reason, "the API server is not kept up to date with this node's GPUs; trying again");
        } else {
            debug!(%reason, "still no talk with the API server");
        }
        time::sleep(failures.pause()).await;
    }
}

/// One connection's worth of knowledge.
struct Session {
    client: Client,
    node: String,
    names: Resources,
    shares: PathBuf,
    /// The node's annotation as the API server has it; none as long as the node was not seen.
    annotation: Option<Option<String>>,
    /// The node was not in the cluster when that was last looked at, which has been said.
    missing: bool,
    /// Pods on this node, by the UID that kubelet knows them by.
    pods: BTreeMap<String, PodOnNode>,
    pods_read: bool,
    /// Where the shares of this node's pods are, as it was read last; none where something may have changed since. A
    /// node tells of many events of its pods, and of few changes of their shares.
    bound: Option<BTreeMap<String, Containers>>,
    /// Says when pods are to be told where their shares are.
    settle: Settle,
    /// Pods that are to be told so now, by the UID that kubelet knows them by.
    untold: Vec<String>,
    /// Everything was once as it should be.
    in_step: bool,
    told_cordon: Option<String>,
}

impl Session {
    fn new(client: Client, node: String, names: &Resources, shares: &Path) -> Self {
        Self {
            client,
            node,
            names: names.clone(),
            shares: shares.into(),
            annotation: None,
            missing: false,
            pods: BTreeMap::new(),
            pods_read: false,
            bound: None,
            settle: Settle::default(),
            untold: Vec::new(),
            in_step: false,
            told_cordon: None,
        }
    }

    /// Works until something fails; returns what.
    async fn run(&mut self, ports: &mut Ports) -> anyhow::Error {
        let of_this = watcher::Config::default()
            .timeout(connection::WATCH)
            .fields(&format!("metadata.name={}", self.node));
        let nodes = watcher(Api::<Node>::all(self.client.clone()), of_this);
        let on_this = watcher::Config::default()
            .timeout(connection::WATCH)
            .fields(&format!("spec.nodeName={}", self.node));
        let pods = watcher(Api::<Pod>::all(self.client.clone()), on_this);
        pin_mut!(nodes, pods);
        let mut tick = time::interval(COMPARE_EVERY);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let done = tokio::select! {
                Some(event) = nodes.next() => self.node_event(event, &ports.cordon),
                // The node first, so that it is the same each time what is refused to who has another node's name.
                Some(event) = pods.next(), if self.missing || self.annotation.is_some() => self.pod_event(event),
                // Their senders live as long as this process.
                Ok(()) = ports.gpus.changed() => Ok(()),
                Ok(()) = ports.shares.changed() => {
                    self.compare();
                    Ok(())
                }
                _ = tick.tick() => {
                    self.compare();
                    Ok(())
                }
                () = self.settle.settled(), if self.pods_read => {
                    self.untold = self.to_tell();
                    Ok(())
                }
                // One at a time: who is placed meanwhile is heard of in between.
                () = future::ready(()), if !self.untold.is_empty() => Ok(()),
            };
            let wanted = ports.gpus.borrow_and_update().clone();
            let written = async {
                done?;
                self.write_node(wanted).await?;
                self.tell_expected(&ports.expect).await;
                match self.untold.pop() {
                    Some(uid) => self.write_pod(&uid).await,
                    None => Ok(()),
                }
            };
            if let Err(error) = written.await {
                return error;
            }
        }
    }

    fn node_event(
        &mut self,
        event: watcher::Result<Event<Node>>,
        cordon: &watch::Sender<Cordon>,
    ) -> anyhow::Result<()> {
        match event? {
            Event::InitApply(node) | Event::Apply(node) => {
                self.missing = false;
                let value = |key| node.annotations().get(key).cloned();
                self.annotation = Some(value(annotation::NODE_GPUS));
                let text = value(annotation::CORDON).unwrap_or_default();
                let told = cordon.borrow().clone();
                let (cordoned, misread) = books::cordoned(&text);
                if misread.is_some() && misread != self.told_cordon {
                    warn!(
                        annotation = annotation::CORDON,
                        reason = misread,
                        "an entry is not understood and cordons nothing"
                    );
                }
                self.told_cordon = misread;
                if told.as_ref() != Some(&cordoned) {
                    cordon.send_replace(Some(cordoned));
                }
            }
            Event::Init => self.annotation = None,
            Event::InitDone if self.annotation.is_some() => {}
            Event::InitDone | Event::Delete(_) => {
                self.annotation = None;
                if !mem::replace(&mut self.missing, true) {
                    warn!(
                        "node {:?} is not in the cluster, so vcuda-scheduler does not see its GPUs; set NODE_NAME or \
                         --node-name, unless kubelet is yet to register it",
                        self.node
                    );
                }
            }
        }
        Ok(())
    }

    fn pod_event(&mut self, event: watcher::Result<Event<Pod>>) -> anyhow::Result<()> {
        match event? {
            Event::Init => self.pods.clear(),
            Event::InitApply(pod) | Event::Apply(pod) => {
                if let Some((uid, pod)) = PodOnNode::read(&pod, &self.names) {
                    if self.correction(&uid, &pod).is_some() {
                        self.settle.stir();
                    }
                    self.pods.insert(uid, pod);
                }
            }
            Event::InitDone => self.pods_read = true,
            Event::Delete(pod) => {
                if let Some((uid, _)) = PodOnNode::read(&pod, &self.names) {
                    self.pods.remove(&uid);
                }
            }
        }
        Ok(())
    }

    /// Writes the node's annotation where it differs. A node that is not registered yet is told of by the watch.
    async fn write_node(&mut self, wanted: Option<Arc<NodeGpus>>) -> anyhow::Result<()> {
        let (Some(wanted), Some(there)) = (wanted, &self.annotation) else { return Ok(()) };
        let text = wanted.to_text();
        if there.as_ref() != Some(&text) {
            let annotations = json!({ "metadata": { "annotations": { annotation::NODE_GPUS: &text } } });
            let nodes: Api<Node> = Api::all(self.client.clone());
            let (params, change) = (PatchParams::default(), Patch::Merge(&annotations));
            match connection::answer(nodes.patch_metadata(&self.node, &params, &change)).await? {
                Ok(_) => {
                    info!(node = self.node, gpus = wanted.gpus.len(), "told the cluster of this node's GPUs");
                    self.annotation = Some(Some(text));
                }
                // It has just gone, and may come back.
                Err(kube::Error::Api(status)) if status.code == 404 => self.annotation = None,
                Err(error) => {
                    return Err(anyhow::Error::from(error)
                        .context(format!("node {}: its annotation cannot be written", self.node)));
                }
            }
        }
        self.in_step = true;
        Ok(())
    }

    /// Has shares read anew, and compared with what pods say once nothing more comes.
    fn compare(&mut self) {
        self.bound = None;
        self.settle.stir();
    }

    /// What `pod` should say and does not.
    fn correction(&self, uid: &str, pod: &PodOnNode) -> Option<PodPlacement> {
        let containers = self.bound.as_ref()?.get(uid)?;
        books::corrected(pod.placement.as_ref(), containers)
    }

    /// Pods that do not say where their shares are.
    fn to_tell(&self) -> Vec<String> {
        let bound = self.bound.iter().flat_map(BTreeMap::keys);
        let says_other =
            |uid: &&String| self.pods.get(*uid).is_some_and(|pod| self.correction(uid, pod).is_some());
        bound.filter(says_other).cloned().collect()
    }

    /// Notes which containers are to come.
    async fn tell_expected(&mut self, expect: &watch::Sender<Arc<Vec<Expected>>>) {
        if !self.pods_read {
            return;
        }
        if self.bound.is_none() {
            let folder = self.shares.clone();
            // What cannot be read now is read at the next event.
            let Ok(Ok(shares)) = task::spawn_blocking(move || Shares::read(&folder)).await else { return };
            self.bound = Some(books::by_pod(&shares));
        }
        let Some(bound) = &self.bound else { return };
        let expected = books::expected(&self.pods, bound);
        expect.send_if_modified(|last| {
            let changed = **last != expected;
            if changed {
                *last = Arc::new(expected);
            }
            changed
        });
    }

    /// Writes on a pod where the node has put its shares, if it does not say so yet.
    async fn write_pod(&mut self, uid: &str) -> anyhow::Result<()> {
        let Some(pod) = self.pods.get(uid) else { return Ok(()) };
        let Some(placement) = self.correction(uid, pod) else { return Ok(()) };
        let text = placement.to_string();
        // The UID makes it fail where another pod has the name by now.
        let change = json!({ "metadata": {
            "uid": pod.api_uid,
            "annotations": { annotation::PLACEMENT: &text },
        } });
        let named = format!("{}/{}", pod.namespace, pod.name);
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace);
        // Through the status, for which less access is needed: kubelet's own will do.
        let (params, change) = (PatchParams::default(), Patch::Merge(&change));
        match connection::answer(pods.patch_status(&pod.name, &params, &change)).await? {
            Ok(_) => {
                debug!(pod = named, text, "placement written");
                if let Some(pod) = self.pods.get_mut(uid) {
                    pod.placement = Some(placement);
                }
                Ok(())
            }
            // It is gone, or another has its name, which is answered as an attempt to change its UID (422,
            // `ValidateObjectMetaAccessorUpdate` in Kubernetes' objectmeta.go); the watch will tell.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409 | 422) => {
                debug!(pod = named, status.message, "placement not written");
                Ok(())
            }
            Err(error) => {
                Err(anyhow::Error::from(error)
                    .context(format!("pod {named}: its annotation cannot be written")))
            }
        }
    }
}

/// The pods of this node, asked once; none where there is no way to the API server.
///
/// # Errors
///
/// The API server does not answer.
pub async fn pods_of_node(access: &Access) -> anyhow::Result<Option<Vec<Pod>>> {
    let Some((client, node)) = connection::open(access).await? else { return Ok(None) };
    let on_this = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let pods = connection::answer(Api::<Pod>::all(client).list(&on_this)).await?;
    pods.map(|pods| Some(pods.items)).map_err(|error| anyhow::Error::msg(in_words(&error.into())))
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        future::IntoFuture,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use axum::{
        Router,
        body::Body,
        extract::RawQuery,
        http::StatusCode,
        routing::{get, patch},
    };
    use futures::stream;
    use kube::Config;
    use tokio::net::TcpListener;
    use tokio_rustls::rustls::crypto::ring;
    use vcuda_config::NodeFile;

    use super::*;

    fn session(port: u16, shares: &Path) -> Session {
        let _ = ring::default_provider().install_default();
        let config = Config::new(format!("http://127.0.0.1:{port}").parse().unwrap());
        let client = connection::client(config).unwrap();
        Session::new(client, "node".into(), &NodeFile::default().resources, shares)
    }

    /// While it is waited for, cordons are not seen and nothing else is told.
    #[tokio::test(start_paused = true)]
    async fn an_api_server_that_takes_a_request_and_hangs_ends_the_session() {
        let folder = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut session = session(listener.local_addr().unwrap().port(), folder.path());
        tokio::spawn(async move {
            let mut held = Vec::new();
            while let Ok((connection, _)) = listener.accept().await {
                held.push(connection);
            }
        });
        session.annotation = Some(None);
        let wanted = Some(Arc::new(NodeGpus::new(Vec::new(), Vec::new())));
        let written = time::timeout(connection::PATIENCE * 10, session.write_node(wanted)).await;
        let error = written.expect("it is not waited for any longer").unwrap_err();
        assert!(error.to_string().contains("does not answer"), "{error}");
    }

    /// Ports whose other ends are held, since the session counts on them.
    fn ports() -> (Ports, impl Sized) {
        let (gpus, shares) = (watch::channel(None), watch::channel(()));
        let (cordon, expect) = (watch::channel(None), watch::channel(Arc::default()));
        let ports = Ports { gpus: gpus.1, shares: shares.1, cordon: cordon.0, expect: expect.0 };
        (ports, (gpus.0, shares.0, cordon.1, expect.1))
    }

    #[tokio::test(start_paused = true)]
    async fn an_api_server_that_takes_a_list_and_hangs_ends_the_session() {
        let folder = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut session = session(listener.local_addr().unwrap().port(), folder.path());
        let router = Router::new().route("/api/v1/nodes", get(future::pending::<StatusCode>));
        tokio::spawn(axum::serve(listener, router).into_future());
        let (mut ports, _ends) = ports();
        let ended = time::timeout(connection::SILENCE + Duration::from_secs(1), session.run(&mut ports));
        let error = ended.await.expect("it is not waited for any longer");
        assert!(in_words(&error).contains("timed out"), "{error:?}");
    }

    /// Meanwhile cordons and placed pods are not heard of. A watch of which nothing changes looks the same.
    #[tokio::test(start_paused = true)]
    async fn watches_that_an_api_server_has_forgotten_are_opened_anew() {
        let folder = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut session = session(listener.local_addr().unwrap().port(), folder.path());
        let answer = |kind: &'static str, watches: Arc<AtomicUsize>| {
            get(move |RawQuery(query): RawQuery| async move {
                if query.is_some_and(|query| query.contains("watch=true")) {
                    watches.fetch_add(1, Ordering::Relaxed);
                    return Body::from_stream(stream::pending::<Result<&str, Infallible>>());
                }
                let metadata = json!({ "resourceVersion": "1" });
                Body::from(json!({ "kind": kind, "metadata": metadata, "items": [] }).to_string())
            })
        };
        let (nodes, pods) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let router = Router::new()
            .route("/api/v1/nodes", answer("NodeList", nodes.clone()))
            .route("/api/v1/pods", answer("PodList", pods.clone()));
        tokio::spawn(axum::serve(listener, router).into_future());
        let (mut ports, _ends) = ports();
        let open = Duration::from_secs(connection::WATCH.into());
        let ended = time::timeout(open + Duration::from_secs(10), session.run(&mut ports)).await;
        assert!(ended.is_err(), "it is nothing that the session should end for: {ended:?}");
        assert_eq!([nodes, pods].map(|watches| watches.load(Ordering::Relaxed)), [2, 2]);
    }

    /// The pod of a StatefulSet that has gone, while its share is still there, and one of the same name that has come.
    #[tokio::test]
    async fn a_pod_whose_name_another_has_by_now_keeps_nobody_from_being_told_of() {
        let folder = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut session = session(listener.local_addr().unwrap().port(), folder.path());
        let status = json!({ "kind": "Status", "status": "Failure", "code": 422, "message": "metadata.uid: field is immutable" });
        let answer = (StatusCode::UNPROCESSABLE_ENTITY, status.to_string());
        let router = Router::new().route("/api/v1/namespaces/ns/pods/train/status", patch(answer));
        tokio::spawn(axum::serve(listener, router).into_future());
        let pod: Pod = serde_json::from_value(json!({
            "metadata": { "name": "train", "namespace": "ns", "uid": "old" },
            "spec": { "nodeName": "node", "containers": [{ "name": "main", "resources": { "limits": {
                "tencent.com/vcuda-core": "20", "tencent.com/vcuda-memory": "4" } } }] },
        }))
        .unwrap();
        let (uid, pod) = PodOnNode::read(&pod, &session.names).unwrap();
        let gpu = GpuUuid::from_bytes([1; 16]);
        session.bound = Some(BTreeMap::from([(
            uid.clone(),
            Containers { since: 1, gpus: BTreeMap::from([("main".into(), vec![gpu])]) },
        )]));
        session.pods.insert(uid, pod);
        let [told] = session.to_tell().try_into().unwrap();
        session.write_pod(&told).await.unwrap();
    }
}
