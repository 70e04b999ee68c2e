//! The plugin's side of the NRI: answers every call at once, or within a bound. The runtime holds one lock over all
//! plugins and all containers while it waits for us, and drops a plugin that takes two seconds, after which
//! containers start without it.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU8, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use ledger::SandboxEnd;
use tokio::{
    sync::{Semaphore, watch},
    task::spawn_blocking,
    time::{sleep, timeout},
};
use ttrpc::{asynchronous::TtrpcContext, proto::Code};
use vcuda_config::NodeFile;

use crate::{
    binding::{Binder, Binding},
    grant::is_granted,
    node::{Node, NodeError},
    refusal::Refusal,
    synchronize::Census,
    wire::{
        ConfigureRequest, ConfigureResponse, Container, ContainerRequest, CreateContainerResponse, EVENTS,
        Empty, Event, LIST_ONLY, Plugin, PodRequest, PodSandbox, StateChangeEvent, SynchronizeRequest,
        SynchronizeResponse,
    },
};

/// Longest that a container's creation waits for its share. The runtime gives up on us after two seconds
/// (`DefaultPluginRequestTimeout`), and then the container starts unadjusted; so an error comes well before that.
const BIND_DEADLINE: Duration = Duration::from_secs(1);

/// Longest that an event or a census holds the runtime up; the work goes on behind the answer.
const EVENT_DEADLINE: Duration = Duration::from_millis(500);

/// How long after its binding a share's record is synced to disk: when its container has been created, and, where many
/// pods come at once, theirs too. containerd and kubelet sync at every step, and would wait for ours.
const SYNC_DELAY: Duration = Duration::from_secs(5);

/// Calls that do work at one time; the runtime makes one at a time.
const WORKERS: u32 = 16;

/// Where a session with the runtime stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// Not configured yet.
    #[default]
    Registering,
    /// Configured by the runtime with this name and version.
    Configured(String),
    /// Synchronized: from here on containers get their shares.
    Ready(String),
    /// The runtime's configuration cannot be used; there is no way on.
    Unusable(String),
}

/// One session's service.
#[derive(Debug)]
pub struct Service {
    purpose: Purpose,
    source: NodeSource,
    node: OnceLock<Arc<Node>>,
    census: Mutex<Census>,
    standing: watch::Sender<Standing>,
    work: Arc<Semaphore>,
    bind_deadline: Duration,
    /// Each bind that is being worked on holds a receiver, also one that nobody waits for any more.
    binds: watch::Sender<()>,
    /// Events that are still being worked on though they were answered.
    late: Arc<AtomicUsize>,
    /// Shares whose records are to be synced to disk.
    unsynced: Arc<Mutex<Vec<ledger::ShareName>>>,
}

/// What a session is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// To give containers their shares.
    Shares,
    /// To see the runtime's list once more, beside the session that gives containers their shares.
    List,
}

/// Where the session's node comes from.
#[derive(Clone, Debug)]
pub enum NodeSource {
    /// It is there already.
    Here(Arc<Node>),
    /// A plugin that the runtime starts gets its settings with Configure: the text of a node file, or the path of
    /// one, or nothing, which means this path.
    Configure(PathBuf),
}

impl Service {
    /// A service for one session.
    pub fn new(source: NodeSource) -> Arc<Self> {
        Self::with_bind_deadline(source, BIND_DEADLINE)
    }

    /// A service for a session that ends when it has seen the runtime's list of pods and containers.
    pub fn for_list(node: Arc<Node>) -> Arc<Self> {
        Arc::new(Self::build(Purpose::List, NodeSource::Here(node), BIND_DEADLINE))
    }

    /// As [`Service::new`], with another bound for the binding of a share.
    pub fn with_bind_deadline(source: NodeSource, bind_deadline: Duration) -> Arc<Self> {
        Arc::new(Self::build(Purpose::Shares, source, bind_deadline))
    }

    fn build(purpose: Purpose, source: NodeSource, bind_deadline: Duration) -> Self {
        let node = match &source {
            NodeSource::Here(node) => OnceLock::from(Arc::clone(node)),
            NodeSource::Configure(_) => OnceLock::new(),
        };
        Self {
            purpose,
            source,
            node,
            census: Mutex::default(),
            standing: watch::Sender::default(),
            work: Arc::new(Semaphore::new(WORKERS as usize)),
            bind_deadline,
            binds: watch::Sender::default(),
            late: Arc::default(),
            unsynced: Arc::default(),
        }
    }

    /// Where the session stands, now and from now on.
    pub fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.subscribe()
    }

    /// The node, once there is one.
    pub fn node(&self) -> Option<Arc<Node>> {
        self.node.get().cloned()
    }

    /// Takes no new work and waits, at most `limit`, for what is being done.
    pub async fn drain(&self, limit: Duration) {
        if timeout(limit, self.work.acquire_many(WORKERS)).await.is_err() {
            tracing::warn!(?limit, "a call was still being worked on at the end");
        }
        self.work.close();
    }

    /// Notes that the runtime's list has been seen in another session.
    pub(crate) fn listed(&self) {
        if let Some(node) = self.node.get() {
            node.binder().session_begins();
        }
        self.ready();
    }

    fn ready(&self) {
        self.standing.send_modify(|standing| {
            if let Standing::Configured(runtime) = standing {
                *standing = Standing::Ready(std::mem::take(runtime));
            }
        });
    }

    fn binder(&self) -> ttrpc::Result<Arc<Binder>> {
        let node = self.node.get();
        node.map(|node| Arc::clone(node.binder())).ok_or_else(|| refused("called before it was configured"))
    }

    async fn create(&self, pod: PodSandbox, container: Container) -> ttrpc::Result<CreateContainerResponse> {
        // The one thing that is done for every container of the node: no file, no lock.
        if !is_granted(&container) {
            return Ok(CreateContainerResponse::default());
        }
        let binder = self.binder()?;
        // The runtime asks for one at a time, so that is one it was refused. While the disk stands still for that, it
        // does for the next: the other containers that the runtime is to make would wait for each of them.
        let held_up = self.binds.receiver_count() > 0;
        let limit = if held_up { self.bind_deadline / 10 } else { self.bind_deadline };
        let late = Refusal::new(
            &pod,
            &container,
            format!(
                "its share was not bound within {limit:?}{}; see whether the disk of {} is slow or full",
                if held_up { ", as one before it still is not" } else { "" },
                binder.paths().state.display()
            ),
        );
        let attempt = Arc::new(Attempt::default());
        let work = {
            let (binder, attempt) = (Arc::clone(&binder), Arc::clone(&attempt));
            let under_way = self.binds.subscribe();
            in_turn(Arc::clone(&self.work), move || {
                let bound = bind(&binder, &pod, &container, &attempt);
                drop(under_way);
                bound
            })
        };
        tokio::pin!(work);
        let bound = match timeout(limit, &mut work).await {
            Ok(bound) => bound,
            Err(_) if attempt.give_up() => Err(refused(late.to_string())),
            // It came in at the last moment, and only has to be handed over.
            Err(_) => work.await,
        };
        let binding = bound?.map_err(|refusal| {
            tracing::warn!("{refusal}");
            refused(refusal.to_string())
        })?;
        self.sync_later(binder, binding.name);
        Ok(CreateContainerResponse { adjust: Some(binding.adjustment).into(), ..Default::default() })
    }

    /// The record's way to the disk is no reason for a container to wait, nor for containerd's own files to.
    fn sync_later(&self, binder: Arc<Binder>, name: ledger::ShareName) {
        {
            let mut unsynced = self.unsynced.lock().unwrap_or_else(PoisonError::into_inner);
            unsynced.push(name);
            if unsynced.len() > 1 {
                // It goes with the first.
                return;
            }
        }
        let unsynced = Arc::clone(&self.unsynced);
        tokio::spawn(async move {
            sleep(SYNC_DELAY).await;
            let names = std::mem::take(&mut *unsynced.lock().unwrap_or_else(PoisonError::into_inner));
            spawn_blocking(move || {
                if let Err(error) = binder.ledger().sync(&names) {
                    tracing::warn!(%error, "shares bound last may be lost with the machine's power");
                }
            })
            .await
        });
    }

    async fn container_ended(&self, container: &Container) -> ttrpc::Result<Empty> {
        let binder = self.binder()?;
        if binder.knows_container(&container.id) {
            let id = container.id.clone();
            self.event("container end", move || binder.container_ended(&id)).await;
        }
        Ok(Empty::default())
    }

    async fn sandbox_ended(&self, pod: &PodSandbox, end: SandboxEnd) -> ttrpc::Result<Empty> {
        let binder = self.binder()?;
        if binder.knows_sandbox(&pod.id) {
            let id = pod.id.clone();
            self.event("pod end", move || binder.sandbox_ended(&id, end)).await;
        }
        Ok(Empty::default())
    }

    /// Works on an event. The runtime could do nothing about an error, so it goes to the log.
    async fn event(
        &self,
        what: &'static str,
        work: impl FnOnce() -> Result<(), ledger::LedgerError> + Send + 'static,
    ) {
        let work = in_turn(Arc::clone(&self.work), move || {
            if let Err(error) = work() {
                tracing::error!(%error, "{what} not noted whole; containerd's list is asked for until it is");
            }
        });
        // A task of its own, which the end of the wait does not stop, be it still waiting for its turn.
        let mut work = tokio::spawn(work);
        // While the disk stands still for one, it does for the next: one wait is enough for the containers that the runtime
        // makes meanwhile.
        let stands_still = self.late.load(Ordering::Relaxed) > 0;
        let limit = if stands_still { Duration::ZERO } else { EVENT_DEADLINE };
        if timeout(limit, &mut work).await.is_ok() {
            return;
        }
        if !stands_still {
            tracing::warn!(what, limit = ?EVENT_DEADLINE, "slow disk; the work goes on, and the next is not waited for");
        }
        let late = Arc::clone(&self.late);
        late.fetch_add(1, Ordering::Relaxed);
        tokio::spawn(async move {
            let _ = work.await;
            late.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

/// Does blocking `work` off the runtime's threads. It is counted among `workers` until it is done, for [`Service::drain`].
async fn in_turn<T: Send + 'static>(
    workers: Arc<Semaphore>,
    work: impl FnOnce() -> T + Send + 'static,
) -> ttrpc::Result<T> {
    let permit = workers.acquire_owned().await;
    let permit = permit.map_err(|_| refused("this plugin is being stopped; the container is tried again"))?;
    let done = spawn_blocking(move || {
        let done = work();
        drop(permit);
        done
    });
    done.await.map_err(|error| refused(format!("this plugin failed ({error}); see its log")))
}

/// Who decides about a binding that takes long: the call that waits for it, or the work itself.
#[derive(Debug, Default)]
struct Attempt(AtomicU8);

impl Attempt {
    const GIVEN_UP: u8 = 1;
    const DONE: u8 = 2;

    /// The call waits no longer. False if the work was done first.
    fn give_up(&self) -> bool {
        self.0.compare_exchange(0, Self::GIVEN_UP, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn is_given_up(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::GIVEN_UP
    }

    /// The work is done. False if nobody waits for it any more.
    fn done(&self) -> bool {
        self.0.compare_exchange(0, Self::DONE, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

fn bind(
    binder: &Binder,
    pod: &PodSandbox,
    container: &Container,
    attempt: &Attempt,
) -> Result<Binding, Refusal> {
    let binding = binder.bind(pod, container, || !attempt.is_given_up())?;
    if !attempt.done() {
        // The container was refused, so nothing runs; its share waits for the next attempt.
        if let Err(error) = binder.container_ended(&container.id) {
            tracing::error!(%error, share = %binding.name, "bound too late and not noted as stopped");
        }
    }
    Ok(binding)
}

/// An error that fails the call and leaves the plugin registered. `DEADLINE_EXCEEDED` would drop it
/// (`isFatalError` in the runtime's plugin.go).
fn refused(reason: impl ToString) -> ttrpc::Error {
    ttrpc::Error::RpcStatus(ttrpc::get_status(Code::FAILED_PRECONDITION, reason))
}

impl NodeSource {
    fn configure(&self, config: &str) -> Result<Arc<Node>, NodeError> {
        let default = match self {
            Self::Here(node) => return Ok(Arc::clone(node)),
            Self::Configure(default) => default,
        };
        let config = config.trim();
        let file = if config.is_empty() {
            NodeFile::load_or_default(default)
        } else if config.starts_with('/') && !config.contains('\n') {
            NodeFile::load(Path::new(config))
        } else {
            NodeFile::from_text(config, Path::new("the NRI configuration of this plugin"))
        };
        Node::start(&file?).map(Arc::new)
    }
}

// Methods that we do not subscribe to are here all the same: the trait's own default answers NOT_FOUND, for which the
// runtime has no fallback (it knows UNIMPLEMENTED alone), so one stray call would fail a pod.
#[async_trait]
impl Plugin for Service {
    async fn configure(
        &self,
        _: &TtrpcContext,
        request: ConfigureRequest,
    ) -> ttrpc::Result<ConfigureResponse> {
        let runtime = format!("{} {}", request.runtime_name, request.runtime_version);
        if self.node.get().is_none() {
            let source = self.source.clone();
            let config = request.config.clone();
            let node = spawn_blocking(move || source.configure(&config)).await;
            let node = node.map_err(|error| error.to_string());
            match node.and_then(|node| node.map_err(|error| error.to_string())) {
                Ok(node) => drop(self.node.set(node)),
                Err(reason) => {
                    self.standing.send_replace(Standing::Unusable(reason.clone()));
                    return Err(refused(reason));
                }
            }
        }
        if request.request_timeout > 0
            && i64::try_from(self.bind_deadline.as_millis()).is_ok_and(|ours| request.request_timeout <= ours)
        {
            tracing::error!(
                "containerd waits only {} ms for plugins, so a slow share would start without limits but for the \
                 guard; set plugin_request_timeout to 2s or more",
                request.request_timeout
            );
        }
        self.standing.send_replace(Standing::Configured(runtime));
        let events = match self.purpose {
            Purpose::Shares => EVENTS,
            Purpose::List => LIST_ONLY,
        };
        Ok(ConfigureResponse { events, ..Default::default() })
    }

    async fn synchronize(
        &self,
        _: &TtrpcContext,
        request: SynchronizeRequest,
    ) -> ttrpc::Result<SynchronizeResponse> {
        let mut whole = {
            let mut census = self.census.lock().unwrap_or_else(PoisonError::into_inner);
            census.add(request.pods, request.containers);
            if request.more {
                return Ok(SynchronizeResponse { more: true, ..Default::default() });
            }
            std::mem::take(&mut *census)
        };
        if let Standing::Configured(runtime) | Standing::Ready(runtime) = &*self.standing.borrow() {
            whole.is_of(runtime);
        }
        let binder = self.binder()?;
        let begins = self.purpose == Purpose::Shares;
        let work = move || {
            let done = binder.synchronize(&whole);
            if begins {
                binder.session_begins();
            }
            done
        };
        self.event("the runtime's list of pods", work).await;
        self.ready();
        Ok(SynchronizeResponse::default())
    }

    async fn create_container(
        &self,
        _: &TtrpcContext,
        request: ContainerRequest,
    ) -> ttrpc::Result<CreateContainerResponse> {
        let (pod, container) = (request.pod, request.container);
        self.create(pod.into_option().unwrap_or_default(), container.into_option().unwrap_or_default()).await
    }

    async fn stop_container(&self, _: &TtrpcContext, request: ContainerRequest) -> ttrpc::Result<Empty> {
        self.container_ended(&request.container).await
    }

    async fn remove_container(&self, _: &TtrpcContext, request: ContainerRequest) -> ttrpc::Result<Empty> {
        self.container_ended(&request.container).await
    }

    async fn stop_pod_sandbox(&self, _: &TtrpcContext, request: PodRequest) -> ttrpc::Result<Empty> {
        self.sandbox_ended(&request.pod, SandboxEnd::Stopped).await
    }

    async fn remove_pod_sandbox(&self, _: &TtrpcContext, request: PodRequest) -> ttrpc::Result<Empty> {
        self.sandbox_ended(&request.pod, SandboxEnd::Removed).await
    }

    /// What runtimes before NRI 0.12 send in place of the four methods above.
    async fn state_change(&self, _: &TtrpcContext, request: StateChangeEvent) -> ttrpc::Result<Empty> {
        match request.event.enum_value() {
            Ok(Event::STOP_CONTAINER | Event::REMOVE_CONTAINER) => {
                self.container_ended(&request.container).await
            }
            Ok(Event::STOP_POD_SANDBOX) => self.sandbox_ended(&request.pod, SandboxEnd::Stopped).await,
            Ok(Event::REMOVE_POD_SANDBOX) => self.sandbox_ended(&request.pod, SandboxEnd::Removed).await,
            _ => Ok(Empty::default()),
        }
    }

    async fn shutdown(&self, _: &TtrpcContext, _: Empty) -> ttrpc::Result<Empty> {
        tracing::info!("the runtime goes down");
        Ok(Empty::default())
    }

    async fn run_pod_sandbox(&self, _: &TtrpcContext, _: PodRequest) -> ttrpc::Result<Empty> {
        Ok(Empty::default())
    }

    async fn update_pod_sandbox(&self, _: &TtrpcContext, _: PodRequest) -> ttrpc::Result<Empty> {
        Ok(Empty::default())
    }

    async fn post_update_pod_sandbox(&self, _: &TtrpcContext, _: PodRequest) -> ttrpc::Result<Empty> {
        Ok(Empty::default())
    }

    async fn post_create_container(&self, _: &TtrpcContext, _: ContainerRequest) -> ttrpc::Result<Empty> {
        Ok(Empty::default())
    }

    async fn start_container(&self, _: &TtrpcContext, _: ContainerRequest) -> ttrpc::Result<Empty> {
        Ok(Empty::default())
    }

    async fn post_start_container(&self, _: &TtrpcContext, _: ContainerRequest) -> ttrpc::Result<Empty> {
        Ok(Empty::default())
    }

    async fn update_container(&self, _: &TtrpcContext, _: ContainerRequest) -> ttrpc::Result<Empty> {
        Ok(Empty::default())
    }

    async fn post_update_container(&self, _: &TtrpcContext, _: ContainerRequest) -> ttrpc::Result<Empty> {
        Ok(Empty::default())
    }

    async fn validate_container_adjustment(
        &self,
        _: &TtrpcContext,
        _: ContainerRequest,
    ) -> ttrpc::Result<Empty> {
        Ok(Empty::default())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use vcuda_config::Paths;

    use super::*;

    /// The runtime makes no container while it waits for us.
    #[tokio::test]
    async fn a_disk_that_stands_still_holds_the_runtime_up_for_one_event() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let paths = Paths { state: at("state"), run: at("run"), ..Paths::default() };
        let file = NodeFile { paths, ..NodeFile::default() };
        let node = Node::start(&file).unwrap();
        let service = Service::new(NodeSource::Here(Arc::new(node)));
        let (go_on, stands_still) = mpsc::channel::<()>();
        let stands_still = Arc::new(Mutex::new(stands_still));
        let (done, mut all_done) = tokio::sync::mpsc::unbounded_channel();
        let work = || {
            let (stands_still, done) = (Arc::clone(&stands_still), done.clone());
            move || {
                let _ = stands_still.lock().unwrap().recv();
                let _ = done.send(());
                Ok(())
            }
        };
        service.event("a first end", work()).await;
        for _ in 0..WORKERS {
            // Without the first wait: nothing but a yield is between its call and its end.
            let answered = timeout(EVENT_DEADLINE / 2, service.event("another end", work())).await;
            assert!(answered.is_ok(), "it is waited for, too");
        }
        drop(go_on);
        for _ in 0..=WORKERS {
            all_done.recv().await.unwrap();
        }
        while service.late.load(Ordering::Relaxed) > 0 {
            tokio::task::yield_now().await;
        }
        let (go_on, stands_still) = mpsc::channel::<()>();
        drop(go_on);
        service
            .event("one when it is back", move || {
                let _ = stands_still.recv();
                Ok(())
            })
            .await;
        assert_eq!(service.late.load(Ordering::Relaxed), 0);
    }
}
