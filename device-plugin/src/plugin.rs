//! The running plugin: the surveying thread, the keeper, and a session for each resource, started in the order in
//! which they need each other and ended together.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    sync::watch,
    task::{self, AbortHandle, JoinError, JoinHandle, JoinSet},
    time,
};
use tracing::info;
use vcuda_config::{NodeFile, daemons::Lock};

use crate::{
    cdi,
    cluster::{self, Access, Events, Ports},
    fatal::Fatal,
    floor::{self, Floor},
    folder, governor,
    keeper::{Keeper, check_writable},
    kubelet::{Context, EnsureCdi, Session},
    meter::Meter,
    metrics,
    nvml::Surveyor,
    offer::{Offer, Resource},
    unseen, warned,
};

/// How often everything is looked at, whether or not something called for it: device nodes come without a word.
const STEP_EVERY: Duration = Duration::from_secs(5);

/// How long is waited for more after a change in a folder, before all is looked at. When many pods come at once kubelet
/// writes its checkpoint for each, and each is a share; what kubelet is told of then reaches its node's status seconds later.
const GATHER: Duration = Duration::from_millis(500);

/// Pause between two looks at the driver's floor of all shares. The guard asks for that of a container that starts, so what
/// is left for a look is rare, while each opens NVML.
const TEND_EVERY: Duration = Duration::from_secs(5);

/// Longest that a reader of the metrics delays the end.
const LAST_READER: Duration = Duration::from_secs(1);

/// Runs the plugin until `stop` becomes true; `access` is its way to the cluster.
///
/// # Errors
///
/// See [`Fatal`]. Without `fail_without_driver`, a missing driver is none: it is waited for.
pub async fn run(
    file: NodeFile,
    access: Access,
    fail_without_driver: bool,
    mut stop: watch::Receiver<bool>,
) -> Result<(), Fatal> {
    let paths = file.paths.clone();
    let _lock = Lock::take(&paths.device_plugin_lock())?;
    // The ledger makes the folder of shares the same way; made now, it can be watched from the start.
    check_writable("paths.state", &paths.shares(), 0o700)?;
    check_writable("paths.state", &paths.state, 0o700)?;
    check_writable("paths.cdi", &paths.cdi, 0o755)?;
    let system = |what| move |source| Fatal::System { what, source };
    let boot_id = ledger::boot_id().map_err(system("the boot ID cannot be read"))?;
    let meter = Arc::new(Meter::default());
    let surveyor = Surveyor::start(paths.driver_root.clone(), &file.gpus.ignored_xids, Arc::clone(&meter))
        .map_err(system("no thread for NVML could be started"))?;
    let mut governor = governor::start(paths.shares(), file.compute.work_conserving, meter)
        .map_err(system("no thread for the governor could be started"))?;

    let serving = file
        .metrics
        .listen
        .map(|listen| tokio::spawn(metrics::serve(listen, file.clone(), governor.figures(), stop.clone())));

    let floor = Floor::new(paths.clone(), file.memory.floor);
    let mut unseen = unseen::start(paths.shares(), floor.clone(), surveyor.holders())
        .map_err(system("no thread for memory that no call shows could be started"))?;
    let _floor = match &floor {
        None => None,
        Some(floor) => {
            let socket = paths.floor_socket();
            let serve = floor::serve(&socket, Arc::clone(floor)).map_err(|source| Fatal::Unwritable {
                key: "paths.run",
                path: socket,
                source,
            })?;
            Some(AbortOnDrop(tokio::spawn(serve).abort_handle()))
        }
    };
    let ensure_cdi: Arc<EnsureCdi> = cdi::ensure(&paths);
    let (publish, offer) = watch::channel(Arc::new(Offer::default()));
    let (expect, expected) = watch::channel(Arc::default());
    let context = Arc::new(Context::new(file.resources.clone(), offer, expected, Arc::clone(&ensure_cdi)));
    let names = file.resources.clone();
    let (tell, gpus) = watch::channel(None);
    let (cordon, mut cordons) = watch::channel(None);
    let mut keeper = Keeper::new(file, boot_id, fail_without_driver, ensure_cdi, publish, tell);

    let mut surveys = surveyor.surveys();
    let mut shares = folder::follow(paths.shares());
    let mut kubelet = folder::follow(paths.kubelet.clone());
    let events = Events::new(access.clone());
    let warned = tokio::spawn(warned::follow(paths.clone(), events, shares.clone(), stop.clone()));
    let ports = Ports { gpus, shares: folder::gather(shares.clone(), GATHER), cordon, expect };
    let _cluster =
        AbortOnDrop(tokio::spawn(cluster::follow(access, names, paths.shares(), ports)).abort_handle());
    let mut sessions = JoinSet::new();
    let mut tending: Option<JoinHandle<()>> = None;
    let mut tend_at = Instant::now();
    loop {
        surveys.mark_unchanged();
        let survey = surveyor.now();
        let cordon = cordons.borrow_and_update().clone();
        // By itself: a driver that does not come back must keep nobody from saying so.
        if let Some(tended) = tending.take_if(|tending| tending.is_finished()) {
            tended.await.unwrap_or_else(go_down);
        }
        if let (Some(floor), None) = (&floor, &tending)
            && tend_at <= Instant::now()
        {
            tend_at = Instant::now() + TEND_EVERY;
            let floor = Arc::clone(floor);
            tending = Some(task::spawn_blocking(move || floor.tend()));
        }
        let step = task::spawn_blocking(move || {
            let ready = keeper.step(&survey, cordon.as_ref());
            (keeper, ready)
        });
        let stepped = tokio::select! {
            stepped = step => stepped,
            // What a disk that stands still leaves half done is done by the next one.
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let ready;
        (keeper, ready) = match stepped {
            Ok((keeper, ready)) => (keeper, ready?),
            Err(error) => go_down(error),
        };
        if ready && sessions.is_empty() {
            for resource in Resource::ALL {
                let (context, notices, stop) = (Arc::clone(&context), kubelet.clone(), stop.clone());
                sessions.spawn(Session::new(resource, paths.kubelet.clone(), context, notices, stop).run());
            }
        }
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => break,
            survey = surveys.changed() => survey.map_err(|_| ended("the NVML thread"))?,
            Some(ended) = sessions.join_next(), if !sessions.is_empty() => ended.unwrap_or_else(go_down),
            () = governor.ended() => return Err(ended("the governor's thread")),
            () = unseen.ended() => return Err(ended("the thread for memory that no call shows")),
            () = changed(&mut shares, &mut kubelet) => {}
            Ok(()) = cordons.changed() => {}
            () = time::sleep(STEP_EVERY) => {}
        }
    }
    info!("stopping");
    while sessions.join_next().await.is_some() {}
    warned.abort();
    if let Some(serving) = serving {
        // A reader that does not go away is no reason to stay.
        let _ = time::timeout(LAST_READER, serving).await;
    }
    Ok(())
}

/// Waits for a change in one of the folders, and for what comes with it. Their senders live as long as this process.
async fn changed(shares: &mut watch::Receiver<()>, kubelet: &mut watch::Receiver<()>) {
    tokio::select! {
        _ = shares.changed() => {}
        _ = kubelet.changed() => {}
    }
    time::sleep(GATHER).await;
}

/// A task that ends with what it serves.
struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// These threads never end by themselves, so one has panicked, and said why.
fn ended(what: &'static str) -> Fatal {
    Fatal::System { what, source: io::Error::other("ended by itself; restart vcuda-device-plugin") }
}

/// A part that has panicked takes the whole down, to be started again: half a plugin is worse than none.
fn go_down<T>(error: JoinError) -> T {
    match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(cancelled) => panic!("{cancelled}"),
    }
}
