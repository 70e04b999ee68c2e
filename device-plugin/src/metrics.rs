//! `/metrics` and `/healthz` over HTTP, for Prometheus and probes: the shares as `status` shows them, and what the
//! governor has seen. An address that cannot be had costs the figures and nothing else.

use std::{fmt::Write, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
};
use daemon::Connections;
use tokio::{
    net::TcpListener,
    sync::{Semaphore, watch},
    task, time,
};
use tracing::{info, warn};
use vcuda_config::NodeFile;

use crate::{
    governor::{Figures, Published},
    status::{HeldBy, ShareStatus, Status, StatusError},
    warned,
};

/// How long after a failure the address is tried again: another process may be on its way out.
const AGAIN: Duration = Duration::from_secs(10);

/// Connections that are open at a time. Whoever reaches the address can open as many as it likes, and each is one of the open
/// files that this process may have; without one it can serve neither kubelet nor shares.
const READERS_MAX: usize = 64;

/// Looks at the shares at a time, each on a thread; the others wait.
const LOOKS_MAX: usize = 4;

/// The format that Prometheus calls text 0.0.4.
const TEXT: &str = "text/plain; version=0.0.4";

/// Serves `listen` until `stop` becomes true.
pub(crate) async fn serve(
    listen: SocketAddr,
    file: NodeFile,
    figures: Arc<Published>,
    mut stop: watch::Receiver<bool>,
) {
    let file = Arc::new(file);
    let looks = Arc::new(Semaphore::new(LOOKS_MAX));
    let metrics = move || {
        let (file, figures, looks) = (Arc::clone(&file), Arc::clone(&figures), Arc::clone(&looks));
        async move {
            // Never closed.
            let look = looks.acquire_owned().await;
            // It reads files.
            match task::spawn_blocking(move || {
                let _look = look;
                let status = Status::read(&file)?;
                Ok::<_, StatusError>(text(&status, &figures.read()) + &warned::metrics(&file.paths))
            })
            .await
            {
                Ok(Ok(text)) => (StatusCode::OK, [(CONTENT_TYPE, TEXT)], text).into_response(),
                Ok(Err(error)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")).into_response(),
                Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
            }
        }
    };
    let router = Router::new().route("/metrics", get(metrics)).route("/healthz", get(|| async { "ok\n" }));
    let mut told = false;
    let listener = loop {
        match TcpListener::bind(listen).await {
            Ok(listener) => break listener,
            Err(error) if !told => {
                warn!(%listen, %error, "no metrics; free the address, or set metrics.listen in the node file");
                told = true;
            }
            Err(_) => {}
        }
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return,
            () = time::sleep(AGAIN) => {}
        }
    };
    info!(%listen, "serving metrics");
    let stopped = async move { drop(stop.wait_for(|stop| *stop).await) };
    if let Err(error) =
        axum::serve(Connections::new(listener, READERS_MAX), router).with_graceful_shutdown(stopped).await
    {
        warn!(%error, "metrics are served no more");
    }
}

/// The figures in Prometheus' text format.
fn text(status: &Status, figures: &[Figures]) -> String {
    let mut out = Text { text: String::new(), name: "" };
    let gpus = || status.gpus.iter().map(|gpu| (format!("gpu=\"{}\"", gpu.uuid), gpu));
    let flag = |value: bool| f64::from(u8::from(value));
    out.family("vcuda_gpu_healthy", "gauge", "Whether the GPU takes new shares.");
    gpus().for_each(|(labels, gpu)| out.sample(&labels, flag(gpu.healthy)));
    out.family(
        "vcuda_gpu_core_granted_percent",
        "gauge",
        "Percent of the GPU's compute time that shares hold.",
    );
    gpus().for_each(|(labels, gpu)| out.sample(&labels, count(gpu.core.granted)));
    out.family("vcuda_gpu_memory_bytes", "gauge", "Memory of the GPU on offer.");
    gpus().for_each(|(labels, gpu)| out.sample(&labels, count(gpu.memory_bytes.total)));
    out.family("vcuda_gpu_memory_granted_bytes", "gauge", "Memory of the GPU that shares hold.");
    gpus().for_each(|(labels, gpu)| out.sample(&labels, count(gpu.memory_bytes.granted)));
    out.family(
        "vcuda_shares_unreadable",
        "gauge",
        "Shares whose record cannot be read; while there are any, nothing is placed.",
    );
    out.sample("", count(status.unreadable.len() as u64));

    let shares = || status.gpus.iter().flat_map(|gpu| &gpu.shares).chain(&status.shares_elsewhere);
    let of_share = |share: &ShareStatus| labels(&share.gpu, &share.namespace, &share.pod, &share.container);
    out.family("vcuda_share_memory_limit_bytes", "gauge", "Memory ceiling of the container on the GPU.");
    shares().for_each(|share| out.sample(&of_share(share), count(share.memory_bytes)));
    let used = || shares().filter_map(|share| Some((of_share(share), share.usage?)));
    out.family(
        "vcuda_share_memory_used_bytes",
        "gauge",
        "Memory that the container holds, by its own account.",
    );
    used().for_each(|(labels, usage)| out.sample(&labels, count(usage.memory_bytes)));
    out.family(
        "vcuda_share_memory_unseen_bytes",
        "gauge",
        "Memory that the container holds beyond that, as the driver says: contexts, modules.",
    );
    used().for_each(|(labels, usage)| out.sample(&labels, count(usage.unseen_bytes)));
    out.family(
        "vcuda_share_memory_driver_floor",
        "gauge",
        "1 where the driver holds the container to its memory too (driver+shim), 0 where the shim alone does.",
    );
    let held = || shares().filter_map(|share| Some((of_share(share), share.held_by?)));
    held().for_each(|(labels, by)| out.sample(&labels, count((by == HeldBy::DriverAndShim).into())));
    out.family("vcuda_share_memory_refusals_total", "counter", "Allocations that the ceiling refused.");
    used().for_each(|(labels, usage)| out.sample(&labels, count(usage.refusals)));

    type Figure = fn(&Figures) -> f64;
    let families: [(&'static str, &str, &str, Figure); 9] = [
        (
            "vcuda_share_core_percent",
            "gauge",
            "Percent of the GPU's compute time that is the container's own.",
            |of| of.core.into(),
        ),
        (
            "vcuda_share_core_limit_percent",
            "gauge",
            "Percent that it may use while others leave it idle.",
            |of| of.core_limit.into(),
        ),
        ("vcuda_share_rate_percent", "gauge", "Percent that it may use at this moment.", |of| {
            f64::from(of.rate_permille) / 10.0
        }),
        (
            "vcuda_share_used_percent",
            "gauge",
            "Percent that it has used in the last second, as the driver sees it.",
            |of| f64::from(of.busy_permille) / 10.0,
        ),
        (
            "vcuda_share_correction_ratio",
            "gauge",
            "What the driver saw it use, by what it measured itself.",
            |of| f64::from(of.charge_permille) / 1000.0,
        ),
        ("vcuda_share_gpu_seconds_total", "counter", "GPU time used, as the container measures it.", |of| {
            seconds(of.charged_ns)
        }),
        ("vcuda_share_driver_gpu_seconds_total", "counter", "GPU time used, as the driver sees it.", |of| {
            seconds(of.driver_ns)
        }),
        ("vcuda_share_launches_total", "counter", "Kernel launches, on all GPUs of the share.", |of| {
            count(of.launches)
        }),
        (
            "vcuda_share_throttled_seconds_total",
            "counter",
            "Time that launches were held back, summed over threads, on all GPUs of the share.",
            |of| seconds(of.throttled_ns),
        ),
    ];
    for (name, kind, help, figure) in families {
        out.family(name, kind, help);
        for of in figures {
            out.sample(&labels(&of.gpu, &of.namespace, &of.pod, &of.container), figure(of));
        }
    }
    out.text
}

struct Text {
    text: String,
    name: &'static str,
}

impl Text {
    fn family(&mut self, name: &'static str, kind: &str, help: &str) {
        self.name = name;
        let _ = write!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    /// A sample of the last family.
    fn sample(&mut self, labels: &str, value: f64) {
        let labels = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let _ = writeln!(self.text, "{}{labels} {value}", self.name);
    }
}

fn labels(gpu: &vcuda_config::GpuUuid, namespace: &str, pod: &str, container: &str) -> String {
    let quoted = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!(
        "gpu=\"{gpu}\",namespace=\"{}\",pod=\"{}\",container=\"{}\"",
        quoted(namespace),
        quoted(pod),
        quoted(container)
    )
}

/// Exact up to 2^53; beyond that nobody counts.
#[expect(clippy::cast_precision_loss, reason = "a figure for a graph")]
fn count(value: u64) -> f64 {
    value as f64
}

fn seconds(ns: u64) -> f64 {
    count(ns) / 1e9
}

#[cfg(test)]
mod tests {
    use vcuda_config::GpuUuid;

    use super::*;

    fn figures() -> Figures {
        Figures {
            gpu: GpuUuid::from_bytes([1; 16]),
            namespace: "ns".into(),
            pod: "train".into(),
            container: "main".into(),
            core: 20,
            core_limit: 50,
            low: false,
            rate_permille: 355,
            busy_permille: 198,
            charge_permille: 1000,
            charged_ns: 1_500_000_000,
            driver_ns: 1_400_000_000,
            launches: 12,
            throttled_ns: 250_000_000,
        }
    }

    #[test]
    fn every_share_has_its_figures_under_their_names() {
        let status = Status {
            driver_version: "550".into(),
            plugin_running: true,
            nri_plugin: crate::status::NriPluginStatus::NotRunning,
            inventory_current: true,
            gpus: Vec::new(),
            shares_elsewhere: Vec::new(),
            unreadable: vec!["x".into()],
        };
        let text = text(&status, &[figures()]);
        let of = "{gpu=\"GPU-01010101-0101-0101-0101-010101010101\",namespace=\"ns\",pod=\"train\",container=\"main\"}";
        for line in [
            format!("vcuda_share_core_percent{of} 20"),
            format!("vcuda_share_core_limit_percent{of} 50"),
            format!("vcuda_share_rate_percent{of} 35.5"),
            format!("vcuda_share_used_percent{of} 19.8"),
            format!("vcuda_share_gpu_seconds_total{of} 1.5"),
            format!("vcuda_share_launches_total{of} 12"),
            format!("vcuda_share_throttled_seconds_total{of} 0.25"),
            "vcuda_shares_unreadable 1".into(),
        ] {
            assert!(text.lines().any(|there| there == line), "{line}:\n{text}");
        }
        // Every sample stands below its own family.
        let mut family = "";
        for line in text.lines() {
            match line.strip_prefix("# TYPE ") {
                Some(rest) => family = rest.split(' ').next().unwrap_or(""),
                None if line.starts_with('#') => {}
                None => assert!(line.split(['{', ' ']).next() == Some(family), "{line}"),
            }
        }
    }

    #[test]
    fn names_cannot_break_out_of_their_quotes() {
        let odd = labels(&GpuUuid::from_bytes([1; 16]), "a\"b", "c\\d", "e\nf");
        assert!(odd.contains("a\\\"b") && odd.contains("c\\\\d") && odd.contains("e\\nf"), "{odd}");
    }
}
