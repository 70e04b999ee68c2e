//! Answers kubelet's calls for one resource.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::{
    sync::{mpsc, watch},
    time,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tracing::{info, warn};
use vcuda_config::{
    CDI_DEVICE_SHARE, CDI_DEVICE_WHOLE, CDI_KIND, CORE_PER_GPU, GpuUuid, Grant, Resources, annotation,
    in_one_line,
};

use super::api::{
    AllocateRequest, AllocateResponse, CdiDevice, ContainerAllocateResponse,
    ContainerPreferredAllocationResponse, DevicePluginOptions, Empty, ListAndWatchResponse,
    PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse, device_plugin_server::DevicePlugin,
};
use crate::{
    allocate,
    expected::{Expected, Granted},
    offer::{Offer, Resource},
    prefer::{self, Trail, Wish},
};

/// How long a wish waits for word of the container that it is for. Kubelet and this process hear of a pod from the same
/// API server at about the same time, and on a busy machine kubelet can be the first. It admits one pod after the other:
/// pods that nobody has placed must not each wait so long, so a wait in vain halves the next one.
const HEARD_WITHIN: Duration = Duration::from_millis(20);

/// A shorter wait is not worth it.
const SHORTEST_WAIT: Duration = Duration::from_millis(10);

/// How long a wish that would be refused waits for that word: kubelet fails its pod for good, and would have room for it
/// once it is known that its IDs are tokens.
const REFUSED_WITHIN: Duration = Duration::from_millis(500);

/// Makes sure that the CDI spec is on disk and fits the driver. It may block.
pub type EnsureCdi = dyn Fn() -> anyhow::Result<()> + Send + Sync;

/// What the services of both resources share.
pub struct Context {
    /// Names of the resources.
    pub names: Resources,
    /// What is on offer.
    pub offer: watch::Receiver<Arc<Offer>>,
    /// See [`EnsureCdi`].
    pub ensure_cdi: Arc<EnsureCdi>,
    /// Containers that are to come, see [`crate::expected`].
    pub expected: watch::Receiver<Arc<Vec<Expected>>>,
    trail: Mutex<Trail>,
    granted: Mutex<Granted>,
    /// How long the next wish waits.
    patience: Mutex<Duration>,
}

impl Context {
    /// Both services' common ground.
    pub fn new(
        names: Resources,
        offer: watch::Receiver<Arc<Offer>>,
        expected: watch::Receiver<Arc<Vec<Expected>>>,
        ensure_cdi: Arc<EnsureCdi>,
    ) -> Self {
        Self {
            names,
            offer,
            ensure_cdi,
            expected,
            trail: Mutex::default(),
            granted: Mutex::default(),
            patience: Mutex::new(HEARD_WITHIN),
        }
    }

    /// GPUs that were picked for the container that a wish for `units` is most likely for.
    fn placed(&self, resource: Resource, units: u32) -> Option<Vec<GpuUuid>> {
        let expected = Arc::clone(&self.expected.borrow());
        let granted = self.granted.lock().unwrap_or_else(PoisonError::into_inner);
        granted.guess(&expected, resource, units).map(|one| one.gpus.clone())
    }

    /// The same, after a wait for word of it. Who has the first resource of a pair is known by then, so a container that
    /// nobody has placed waits once.
    async fn placed_soon(&self, resource: Resource, units: u32) -> Option<Vec<GpuUuid>> {
        let patience = *self.patience.lock().unwrap_or_else(PoisonError::into_inner);
        let first = self
            .trail
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .near(resource, Instant::now())
            .is_empty();
        let waits = patience >= SHORTEST_WAIT && first;
        let placed = match waits {
            true => self.heard(resource, units, patience).await,
            false => self.placed(resource, units),
        };
        if placed.is_some() || waits {
            let next = if placed.is_some() { HEARD_WITHIN } else { patience / 2 };
            *self.patience.lock().unwrap_or_else(PoisonError::into_inner) = next;
        }
        placed
    }

    /// The same for a wish that would be refused, where a scheduler has placed a container since the start.
    async fn placed_at_last(&self, resource: Resource, units: u32) -> Option<Vec<GpuUuid>> {
        // This receiver never looks, so something new is all that there ever was.
        match self.expected.has_changed() {
            Ok(true) => self.heard(resource, units, REFUSED_WITHIN).await,
            _ => None,
        }
    }

    /// As [`Context::placed`], as soon as it is known.
    async fn heard(&self, resource: Resource, units: u32, within: Duration) -> Option<Vec<GpuUuid>> {
        let mut expected = self.expected.clone();
        let hear = async {
            loop {
                expected.mark_unchanged();
                let placed = self.placed(resource, units);
                if placed.is_some() || expected.changed().await.is_err() {
                    return placed;
                }
            }
        };
        time::timeout(within, hear).await.unwrap_or(None)
    }

    fn note(&self, resource: Resource, grant: &Grant) {
        let expected = Arc::clone(&self.expected.borrow());
        self.granted.lock().unwrap_or_else(PoisonError::into_inner).note(&expected, resource, grant);
        let mut trail = self.trail.lock().unwrap_or_else(PoisonError::into_inner);
        trail.granted(resource, grant, Instant::now());
    }

    /// Full name of `resource`.
    pub fn resource_name(&self, resource: Resource) -> String {
        resource.name(&self.names)
    }

    fn current(&self) -> Arc<Offer> {
        Arc::clone(&self.offer.borrow())
    }
}

/// What the plugin can do.
pub(super) const OPTIONS: DevicePluginOptions =
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true };

/// The service for one resource.
#[derive(Clone)]
pub struct Service {
    resource: Resource,
    context: Arc<Context>,
    /// How many ListAndWatch streams kubelet holds open; while it holds none, it takes this plugin for gone.
    streams: watch::Sender<usize>,
    /// Closes all streams when it becomes true.
    stop: watch::Receiver<bool>,
}

impl Service {
    /// A service for `resource`, that counts its open streams in `streams` and ends them when `stop` becomes true.
    pub fn new(
        resource: Resource,
        context: Arc<Context>,
        streams: watch::Sender<usize>,
        stop: watch::Receiver<bool>,
    ) -> Self {
        Self { resource, context, streams, stop }
    }

    async fn allocate_one(&self, ids: &[String]) -> Result<ContainerAllocateResponse, Status> {
        let context = &self.context;
        let offer = context.current();
        let units = u32::try_from(ids.len()).unwrap_or(u32::MAX);
        let (names, each) = (&context.names, ids.iter().map(String::as_str));
        let checked = match context.placed(self.resource, units) {
            Some(_) => allocate::tokens(self.resource, names, &offer, each),
            None => allocate::grant(self.resource, names, &offer, each),
        };
        let grant = checked.map_err(|refusal| {
            warn!(resource = %self.resource, %refusal, "refused");
            Status::failed_precondition(refusal.to_string())
        })?;
        if self.resource == Resource::Core {
            let shared = Arc::clone(context);
            let ensured = tokio::task::spawn_blocking(move || (shared.ensure_cdi)()).await;
            ensured.map_err(anyhow::Error::from).flatten().map_err(|error| {
                let error = in_one_line(error.as_ref());
                warn!(error, "no CDI spec");
                Status::internal(format!("{}: no CDI spec: {error}", context.resource_name(self.resource)))
            })?;
        }
        context.note(self.resource, &grant);
        info!(resource = %self.resource, %grant, "granted");
        Ok(self.answer(&grant))
    }

    /// The same grant, the same answer: kubelet keeps it and replays it for years.
    fn answer(&self, grant: &Grant) -> ContainerAllocateResponse {
        match self.resource {
            Resource::Core => {
                let whole = grant.units() >= CORE_PER_GPU;
                let device = if whole { CDI_DEVICE_WHOLE } else { CDI_DEVICE_SHARE };
                ContainerAllocateResponse {
                    annotations: HashMap::from([(annotation::CORE_GRANT.into(), grant.to_string())]),
                    cdi_devices: vec![CdiDevice { name: format!("{CDI_KIND}={device}") }],
                }
            }
            // No CDI device: the hooks come with that of core, and must not run twice.
            Resource::Memory => ContainerAllocateResponse {
                annotations: HashMap::from([(annotation::MEMORY_GRANT.into(), grant.to_string())]),
                cdi_devices: Vec::new(),
            },
        }
    }
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream = ReceiverStream<Result<ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(
        &self,
        _request: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(OPTIONS))
    }

    async fn list_and_watch(
        &self,
        _request: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let (lists, stream) = mpsc::channel(1);
        let (resource, mut offer, mut stop) = (self.resource, self.context.offer.clone(), self.stop.clone());
        let open = OpenStream::new(self.streams.clone());
        tokio::spawn(async move {
            let _open = open;
            let mut last = None;
            loop {
                // Kubelet writes its checkpoint for every list, so only what has changed is sent.
                let list = offer.borrow_and_update().list(resource);
                if last.as_ref() != Some(&list) {
                    last = Some(list.clone());
                    if lists.send(Ok(list)).await.is_err() {
                        return;
                    }
                }
                tokio::select! {
                    () = lists.closed() => return,
                    _ = stop.wait_for(|stop| *stop) => return,
                    changed = offer.changed() => if changed.is_err() { return },
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let context = &self.context;
        let offer = context.current();
        let mut container_responses = Vec::new();
        for asked in request.into_inner().container_requests {
            let wish = Wish {
                available: &asked.available_device_ids,
                must_include: &asked.must_include_device_ids,
                size: u32::try_from(asked.allocation_size).unwrap_or(0),
            };
            if let Some(gpus) = context.placed_soon(self.resource, wish.size).await {
                let device_ids = prefer::prefer_placed(self.resource, &offer, wish, &gpus);
                container_responses.push(ContainerPreferredAllocationResponse { device_ids });
                continue;
            }
            let near = {
                let trail = context.trail.lock().unwrap_or_else(PoisonError::into_inner);
                trail.near(self.resource, Instant::now()).to_vec()
            };
            let preferred = prefer::prefer(self.resource, &context.names, &offer, wish, &near);
            let device_ids = match preferred {
                Ok(device_ids) => device_ids,
                Err(refusal) => match context.placed_at_last(self.resource, wish.size).await {
                    Some(gpus) => prefer::prefer_placed(self.resource, &offer, wish, &gpus),
                    None => {
                        warn!(resource = %self.resource, %refusal, "refused");
                        return Err(Status::failed_precondition(refusal.to_string()));
                    }
                },
            };
            container_responses.push(ContainerPreferredAllocationResponse { device_ids });
        }
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let mut container_responses = Vec::new();
        for asked in request.into_inner().container_requests {
            container_responses.push(self.allocate_one(&asked.device_ids).await?);
        }
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        // Never asked for in the options; there is nothing to do.
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

/// Counts one open stream for as long as it lives.
struct OpenStream(watch::Sender<usize>);

impl OpenStream {
    fn new(streams: watch::Sender<usize>) -> Self {
        streams.send_modify(|open| *open += 1);
        Self(streams)
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open -= 1);
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, pin::pin};

    use futures::{FutureExt, poll};

    use super::*;
    use crate::{kubelet::api::ContainerPreferredAllocationRequest, offer::OfferedGpu};

    fn context() -> (Context, watch::Sender<Arc<Vec<Expected>>>) {
        let (expect, expected) = watch::channel(Arc::default());
        let (_, offer) = watch::channel(Arc::new(Offer::new(Vec::new(), BTreeSet::new())));
        (Context::new(Resources::default(), offer, expected, Arc::new(|| Ok(()))), expect)
    }

    fn placed(pod: &str, core: u32, n: u8) -> Expected {
        let gpus = vec![GpuUuid::from_bytes([n; 16])];
        Expected { pod: pod.into(), container: "main".into(), core, memory: 8, gpus }
    }

    #[tokio::test]
    async fn a_wish_waits_for_word_of_its_container() {
        let (context, expect) = context();
        // The first one since the start, too.
        let first = placed("a", 10, 1);
        let mut wish = pin!(context.placed_soon(Resource::Core, 10));
        assert!(poll!(&mut wish).is_pending());
        expect.send_replace(Arc::new(vec![first.clone()]));
        assert_eq!(wish.await, Some(first.gpus.clone()));

        let mut wish = pin!(context.placed_soon(Resource::Core, 20));
        assert!(poll!(&mut wish).is_pending());
        // Word of another one is not enough.
        expect.send_replace(Arc::new(vec![first.clone(), placed("b", 30, 2)]));
        assert!(poll!(&mut wish).is_pending());
        let ours = placed("c", 20, 3);
        expect.send_replace(Arc::new(vec![first, ours.clone()]));
        assert_eq!(wish.await, Some(ours.gpus.clone()));

        // One that nobody placed goes on without, and its second resource does not wait again.
        assert_eq!(context.placed_soon(Resource::Core, 40).await, None);
        context.note(
            Resource::Core,
            &Grant::from_ids(&[vcuda_config::DeviceId { gpu: ours.gpus[0].clone(), index: 0 }]),
        );
        assert_eq!(context.placed_soon(Resource::Memory, 4).now_or_never(), Some(None));
    }

    /// The GPU has room by the scheduler's books and by the ledger; kubelet's units of it are pieces.
    #[tokio::test(start_paused = true)]
    async fn a_placed_wish_that_kubelet_has_only_pieces_for_is_waited_for_before_it_is_refused() {
        let gpu = |n| OfferedGpu {
            uuid: GpuUuid::from_bytes([n; 16]),
            numa_node: None,
            memory_units: 8,
            trouble: None,
        };
        let (expect, expected) = watch::channel(Arc::default());
        let (_offer, offer) = watch::channel(Arc::new(Offer::new(vec![gpu(1), gpu(2)], BTreeSet::new())));
        let context = Context::new(Resources::default(), offer, expected, Arc::new(|| Ok(())));
        let (streams, stop) = (watch::channel(0).0, watch::channel(false).1);
        let service = Service::new(Resource::Core, Arc::new(context), streams, stop);
        let available_device_ids: Vec<String> = [1, 2]
            .into_iter()
            .flat_map(|n| (0..30).map(move |index| format!("{}::{index}", GpuUuid::from_bytes([n; 16]))))
            .collect();
        let ask = || {
            let asked = ContainerPreferredAllocationRequest {
                available_device_ids: available_device_ids.clone(),
                must_include_device_ids: Vec::new(),
                allocation_size: 40,
            };
            service.get_preferred_allocation(Request::new(PreferredAllocationRequest {
                container_requests: vec![asked],
            }))
        };
        // Where no scheduler has ever placed one, kubelet is told at once, but for the usual wait.
        let begun = time::Instant::now();
        assert!(ask().await.unwrap_err().message().contains("only the pieces"));
        assert!(begun.elapsed() <= HEARD_WITHIN);

        expect.send_replace(Arc::new(vec![placed("a", 10, 1)]));
        assert!(ask().await.is_err(), "nobody speaks of it");
        let mut wish = pin!(ask());
        assert!(poll!(&mut wish).is_pending());
        time::advance(HEARD_WITHIN * 2).await;
        assert!(poll!(&mut wish).is_pending());
        expect.send_replace(Arc::new(vec![placed("b", 40, 2)]));
        let answer = wish.await.unwrap().into_inner();
        let chosen = &answer.container_responses[0].device_ids;
        let of_the_second = chosen.iter().filter(|id| id.starts_with(GpuUuid::from_bytes([2; 16]).as_str()));
        assert_eq!((chosen.len(), of_the_second.count()), (40, 30), "all of its GPU, and tokens");
        // And Allocate takes them for what they are.
        assert!(service.allocate_one(chosen).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn many_that_nobody_placed_wait_less_and_less_until_a_placed_one_comes() {
        let (context, expect) = context();
        expect.send_replace(Arc::new(vec![placed("a", 10, 1)]));
        let begun = time::Instant::now();
        for _ in 0..40 {
            assert_eq!(context.placed_soon(Resource::Core, 20).await, None);
        }
        // On the clock that only these waits move on.
        assert!(begun.elapsed() <= 2 * HEARD_WITHIN, "{:?}", begun.elapsed());
        assert!(context.placed_soon(Resource::Core, 10).await.is_some());
        let begun = time::Instant::now();
        assert_eq!(context.placed_soon(Resource::Core, 20).await, None);
        assert!(begun.elapsed() >= HEARD_WITHIN);
    }
}
