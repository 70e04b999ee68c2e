//! How long the runtime waits for this plugin when it creates a container: the call itself, and the call over the
//! whole protocol (ttrpc, multiplexer, socket), with a share and without. The runtime holds up the whole node
//! meanwhile. Criterion gives the mean; the 50th and 99th percentiles are printed after it.

#![expect(clippy::unwrap_used, reason = "a benchmark that cannot run has nothing to say")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::{
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

use common::{FakeRuntime, TestNode, container, granted, pod};
use criterion::{Criterion, criterion_group, criterion_main};
use ledger::{Claim, ContainerRef, PodRef, Terms};
use nri_plugin::{
    binding::Binder,
    service::{NodeSource, Service},
    session::{Identity, serve},
    wire::{Container, Mount, PodSandbox},
};
use tokio::{net::UnixStream, runtime::Runtime};
use vcuda_config::Request;

/// Shares that others hold meanwhile, on two GPUs: a busy node.
const NEIGHBOURS: u32 = 16;

/// A container the size of a usual one: containerd sends its mounts and environment along.
fn usual(mut container: Container) -> Container {
    container.env = (0..40).map(|n| format!("SERVICE_{n}_PORT=tcp://10.0.0.{n}:443")).collect();
    container.mounts = (0..20)
        .map(|n| Mount {
            destination: format!("/var/lib/data/{n}"),
            type_: "bind".into(),
            source: format!("/var/lib/kubelet/pods/0/volumes/{n}"),
            options: vec!["rbind".into(), "rprivate".into(), "rw".into()],
            ..Mount::default()
        })
        .collect();
    container
}

struct Node {
    _test: TestNode,
    binder: Arc<Binder>,
    runtime: FakeRuntime,
    tokio: Runtime,
}

impl Node {
    fn new() -> Self {
        let test = TestNode::new();
        let node = Arc::new(test.start());
        let binder = Arc::clone(node.binder());
        let inventory = test.inventory();
        for n in 0..NEIGHBOURS {
            let claim = Claim {
                pod: PodRef {
                    uid: format!("neighbour-{n}"),
                    namespace: "ml".into(),
                    name: format!("neighbour-{n}"),
                    sandbox_id: format!("neighbour-{n}"),
                },
                container: ContainerRef { name: "main".into(), id: format!("neighbour-{n}") },
                request: Request::new(5, 2).unwrap(),
                terms: Terms::default(),
                wishes: ledger::Wishes::default(),
            };
            binder.ledger().bind(&inventory, &claim, &[], |_, _| Ok(())).unwrap();
        }
        let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let runtime = tokio.block_on(async {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let mut runtime = FakeRuntime::start(theirs).await;
            let service = Service::new(NodeSource::Here(node));
            let identity = Identity { name: "vcuda".into(), index: "90".into() };
            tokio::spawn(async move { serve(ours, &identity, &service).await });
            runtime.admit().await;
            runtime
        });
        Self { _test: test, binder, runtime, tokio }
    }

    fn call(&self, pod: &PodSandbox, container: &Container) {
        let answer = self.tokio.block_on(self.runtime.create(pod, container.clone()));
        black_box(answer.unwrap());
    }

    /// The pod ends between two measurements, so that each binds anew.
    fn end(&self, pod: &PodSandbox) {
        self.binder.sandbox_ended(&pod.id, ledger::SandboxEnd::Removed).unwrap();
    }
}

fn percentiles(name: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    println!("{name}: 50 % within {:?}, 99 % within {:?} ({} calls)\n", at(50), at(99), times.len());
}

fn create_container(criterion: &mut Criterion) {
    let node = Node::new();
    let pod = pod(1);
    let stranger = usual(container(&pod, "main", 1));
    let sharer = usual(granted(&pod, "main", 1, 10, 4));

    let mut measure = |name: &str, work: &dyn Fn(), after: &dyn Fn()| {
        let mut all = Vec::new();
        criterion.bench_function(name, |bencher| {
            bencher.iter_custom(|rounds| {
                let mut sum = Duration::ZERO;
                for _ in 0..rounds {
                    let start = Instant::now();
                    work();
                    let took = start.elapsed();
                    sum += took;
                    all.push(took);
                    after();
                }
                sum
            });
        });
        percentiles(name, all);
    };
    measure("without a share, over the protocol", &|| node.call(&pod, &stranger), &|| {});
    measure("with a share, over the protocol", &|| node.call(&pod, &sharer), &|| node.end(&pod));
    measure(
        "with a share, binding alone",
        &|| drop(black_box(node.binder.bind(&pod, &sharer, || true).unwrap())),
        &|| {
            node.end(&pod);
        },
    );
}

criterion_group!(benches, create_container);
criterion_main!(benches);
