//! The demo: two pods share a GPU, each under its own ceiling, a third has none; then the NRI plugin is stopped, and
//! the next share is refused instead of running unenforced. Started by `integration/demo`.

#![forbid(unsafe_code)]

use std::{
    collections::HashMap,
    fmt::Write as _,
    fs,
    io::{IsTerminal, Write as _},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use integration::{
    cache::Line,
    cri::ContainerInfo,
    driver::Wanted,
    host::Options,
    interrupt,
    kubelet::RunningPod,
    mountinfo::mount_point,
    node::Node,
    pod::{Container, Pod},
    probe::{self, OUT_OF_MEMORY, Report},
};
use serde::Serialize;
use serde_json::Value;
use tokio::process::Command;
use vcuda_config::MEMORY_UNIT_BYTES;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// By then programs launch, and the shares' slots are dealt.
const SETTLES: Duration = Duration::from_secs(2);

/// Shows vcuda at work: pods that share a GPU, and one that is refused.
///
/// Exit codes: 0 all was as it should be, 1 something was not, 2 usage.
#[derive(Parser)]
#[command(name = "vcuda-demo", version)]
struct Arguments {
    /// Which driver.
    #[arg(long, value_enum, default_value = "simulated")]
    driver: DriverChoice,
    /// How to print: for people, or one JSON object.
    #[arg(short, long, value_enum, default_value = "text")]
    output: Output,
}

#[derive(Clone, Copy, ValueEnum)]
enum DriverChoice {
    Simulated,
    Real,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Text,
    Json,
}

/// What the demo saw.
#[derive(Serialize)]
struct Seen {
    /// Whether all was as it should be.
    ok: bool,
    /// "simulated" or "real", and the driver's version.
    driver: String,
    /// Name and version.
    containerd: String,
    gpus: Vec<GpuSeen>,
    pods: Vec<PodSeen>,
    inside: Inside,
    without_nri: Refusal,
}

/// A GPU of the node.
#[derive(Serialize)]
struct GpuSeen {
    uuid: String,
    name: String,
    memory_bytes: u64,
}

/// What a pod sees from inside.
#[derive(Serialize)]
struct PodSeen {
    name: &'static str,
    /// Percent of one GPU asked for.
    core: u32,
    /// Device memory asked for.
    memory_bytes: u64,
    gpus_visible: usize,
    /// UUID of the first GPU it sees.
    gpu: Option<String>,
    total_memory_bytes: u64,
    alloc_within: Option<Attempt>,
    alloc_over: Option<Attempt>,
    /// Percent of the GPU's time that it got while all with a share launched without pause, by the share's own account.
    measured_core: Option<f64>,
}

/// An allocation and CUDA's answer.
#[derive(Clone, Copy, Serialize)]
struct Attempt {
    bytes: u64,
    result: &'static str,
}

/// What vcuda put into the first pod's container.
#[derive(Serialize)]
struct Inside {
    /// Paths of device nodes.
    devices: Vec<String>,
    /// Where files are mounted.
    mounts: Vec<String>,
    /// `NAME=value`.
    env: Vec<String>,
    /// What `vcuda-hook` is told to do.
    hooks: Vec<String>,
}

/// What became of a share while the NRI plugin was stopped.
#[derive(Serialize)]
struct Refusal {
    started: bool,
    message: String,
    /// Whether a pod that asks for no share ran meanwhile.
    other_runs: bool,
}

/// One pod of the demo, before it runs.
struct Ask {
    name: &'static str,
    core: u32,
    units: u32,
}

const PODS: [Ask; 3] = [
    Ask { name: "trainer", core: 20, units: 32 },
    Ask { name: "server", core: 50, units: 30 },
    Ask { name: "website", core: 0, units: 0 },
];

impl Ask {
    fn memory_bytes(&self) -> u64 {
        u64::from(self.units) * MEMORY_UNIT_BYTES
    }

    /// Sizes of an allocation that fits the share, and of one that does not fit any more.
    fn attempts(&self) -> [u64; 2] {
        let memory = self.memory_bytes();
        [memory * 3 / 4, memory * 9 / 8]
    }

    /// Whether a pod's view is what its share says.
    fn is_met_by(&self, seen: &PodSeen) -> bool {
        if self.units == 0 {
            return seen.gpus_visible == 0 && seen.total_memory_bytes == 0;
        }
        let answer = |attempt: Option<Attempt>| attempt.map(|attempt| attempt.result);
        seen.gpus_visible == 1
            && seen.total_memory_bytes == self.memory_bytes()
            && answer(seen.alloc_within) == Some(result_name(0))
            && answer(seen.alloc_over) == Some(result_name(OUT_OF_MEMORY))
    }
}

/// Device memory of the GPU that the pods share.
fn needed_bytes() -> u64 {
    PODS.iter().map(Ask::memory_bytes).sum()
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match interrupt::run(show(&arguments)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the demo; says whether all was as it should be.
async fn show(arguments: &Arguments) -> Result<bool> {
    let page = Page { loud: arguments.output == Output::Text, color: std::io::stdout().is_terminal() };
    let driver = match arguments.driver {
        DriverChoice::Simulated => Wanted::Simulated(2),
        DriverChoice::Real => Wanted::Real,
    };
    let options = Options { driver, ..Options::on(Line::V2) };
    let mut node = Node::with_vcuda(&options).await?;
    let seen_driver = format!("{} {}", driver.name(), node.driver.version()?);
    let containerd = node.cri().version().await?;
    let gpus: Vec<_> = node
        .driver
        .gpus()?
        .into_iter()
        .map(|gpu| GpuSeen { uuid: gpu.uuid, name: gpu.name, memory_bytes: gpu.total_bytes })
        .collect();
    page.title("node", &format!("{containerd}, driver {seen_driver}, kubelet's protocol by a stand-in"));
    for gpu in &gpus {
        page.line(&format!("{}  {}  {}", short(&gpu.uuid), gpu.name, size(gpu.memory_bytes)));
    }
    let [core, memory] = node.vcuda.resources();
    anyhow::ensure!(
        gpus.iter().any(|gpu| gpu.memory_bytes >= needed_bytes()),
        "no GPU here has the {} that two of the demo's pods ask for together; run `integration/demo --driver simulated`",
        size(needed_bytes())
    );
    let offer = format!(
        "offers {} {core} and {} {memory}",
        node.kubelet.allocatable(&core),
        node.kubelet.allocatable(&memory)
    );
    page.line(&offer);

    page.title("pods", "side by side, what each sees from inside");
    page.line(&page.dim(&row(["POD", "ASKS FOR", "GPU", "SEES", "WITHIN", "PAST THE CEILING"])));
    let (mut pods, mut running) = (vec![], vec![]);
    for ask in &PODS {
        let container = Container::new("main", node.image()).share(ask.core, ask.units);
        running.push(node.kubelet.run(&Pod::new(ask.name, container)).await?);
    }
    for (ask, pod) in PODS.iter().zip(&running) {
        let seen = look(&node, ask, pod.id("main")).await?;
        page.line(&seen.row(&page, ask));
        pods.push(seen);
    }
    page.title(
        "compute",
        "both launch kernels for some seconds; what each gets of two, by vcuda-device-plugin top",
    );
    let got = measure(&node, &running).await?;
    for (ask, seen) in PODS.iter().zip(&mut pods).filter(|(ask, _)| ask.core > 0) {
        seen.measured_core = got.get(ask.name).copied();
        let percent = seen.measured_core.map_or("-".into(), |percent| format!("{percent:.1} %"));
        page.line(&format!("{:<9}{percent} of the GPU's time, of {} asked for", ask.name, ask.core));
    }

    page.title("inside", &format!("what vcuda gave {}", PODS[0].name));
    let inside = Inside::of(&node.cri().info(running[0].id("main")).await?)?;
    for line in inside.lines() {
        page.line(&line);
    }

    page.title("fail closed", "the same pod once more, with vcuda-nri-plugin stopped");
    node.vcuda.nri_plugin()?.terminate()?;
    let again = Pod::new("late", Container::new("main", node.image()).share(PODS[0].core, PODS[0].units));
    let refused = match node.kubelet.run(&again).await {
        Ok(pod) => {
            running.push(pod);
            page.line(&page.bad("late  started, unenforced"));
            None
        }
        Err(error) => {
            let message = sentence(&format!("{error:#}"));
            page.line(&format!("late  {}  {message}", page.good("refused")));
            Some(message)
        }
    };
    let plain = node.kubelet.run(&Pod::new("other", Container::new("main", node.image()))).await;
    page.line(&match &plain {
        Ok(_) => format!("other {}  it asked for no share", page.good("runs")),
        Err(error) => page.bad(&format!("other {error:#}")),
    });
    let without_nri = Refusal {
        started: refused.is_none(),
        message: refused.unwrap_or_default(),
        other_runs: plain.is_ok(),
    };
    running.extend(plain.ok());

    node.vcuda.start_nri_plugin().await?;
    for pod in &running {
        node.kubelet.delete(pod).await?;
    }
    node.assert_empty().await;
    drop(node);

    let met = PODS.iter().zip(&pods).all(|(ask, seen)| ask.is_met_by(seen));
    let shared = pods[0].gpu.is_some() && pods[0].gpu == pods[1].gpu;
    let refused = !without_nri.started && without_nri.message.contains("vcuda-nri-plugin");
    let ok = met && shared && refused && without_nri.other_runs;
    page.title(
        "done",
        if ok { "all as it should be; everything was removed" } else { "NOT as it should be" },
    );
    if arguments.output == Output::Json {
        let seen = Seen { ok, driver: seen_driver, containerd, gpus, pods, inside, without_nri };
        println!("{}", serde_json::to_string_pretty(&seen)?);
    }
    Ok(ok)
}

/// Looks at a pod from inside.
async fn look(node: &Node, ask: &Ask, container: &str) -> Result<PodSeen> {
    let sizes = ask.attempts().map(|bytes| (bytes / MIB).to_string());
    // Each attempt is a process of its own, so that the second stands alone.
    let mut reports: Vec<Report> = vec![];
    for mib in &sizes {
        let arguments: &[&str] = if ask.units == 0 { &[] } else { &["--alloc", mib] };
        reports.push(probe::run(node.cri(), container, arguments).await?);
    }
    let attempt = |report: &Report| {
        report.allocs.first().map(|alloc| Attempt { bytes: alloc.bytes, result: result_name(alloc.result) })
    };
    let gpu = reports[0].gpus.first();
    Ok(PodSeen {
        name: ask.name,
        core: ask.core,
        memory_bytes: ask.memory_bytes(),
        gpus_visible: reports[0].gpus.len(),
        gpu: gpu.map(|gpu| gpu.uuid.clone()),
        total_memory_bytes: gpu.map_or(0, |gpu| gpu.total_bytes),
        alloc_within: attempt(&reports[0]),
        alloc_over: attempt(&reports[1]),
        measured_core: None,
    })
}

/// Percent of a GPU's time that each pod with a share gets over two seconds in which all launch without pause. How near
/// that is to the share is up to how busy the machine is too: a program that comes late to launch gets less.
async fn measure(node: &Node, running: &[RunningPod]) -> Result<HashMap<String, f64>> {
    let mut spinning = vec![];
    for (_, pod) in PODS.iter().zip(running).filter(|(ask, _)| ask.core > 0) {
        spinning.push((pod, probe::spin(node.cri(), pod.id("main")).await?));
    }
    tokio::time::sleep(SETTLES).await;
    let mut top = Command::from(node.vcuda.command("vcuda-device-plugin"));
    let output = top.args(["top", "--count", "2", "--interval", "2", "-o", "json"]).output().await?;
    for (pod, process) in spinning {
        node.cri().exec(pod.id("main"), &["kill", "-9", &process]).await?;
    }
    measured(&String::from_utf8_lossy(&output.stdout))
}

/// Percent of its GPU's time that each pod got between the last two looks of `top`.
fn measured(looks: &str) -> Result<HashMap<String, f64>> {
    let last = looks.lines().last().context("vcuda-device-plugin top said nothing")?;
    let look: Value = serde_json::from_str(last).context("vcuda-device-plugin top")?;
    let of =
        |share: &Value| Some((share["pod"].as_str()?.to_owned(), share["measuredPermille"].as_f64()? / 10.0));
    Ok(look["shares"].as_array().into_iter().flatten().filter_map(of).collect())
}

impl PodSeen {
    fn row(&self, page: &Page, ask: &Ask) -> String {
        let asks = if ask.units == 0 {
            "nothing".into()
        } else {
            format!("{} core, {}", ask.core, size(ask.memory_bytes()))
        };
        let sees = match self.gpus_visible {
            0 => "no GPU".into(),
            count => format!("{count} GPU, {}", size(self.total_memory_bytes)),
        };
        let attempt = |attempt: Option<Attempt>| {
            attempt.map_or_else(
                || "-".into(),
                |attempt| {
                    let answer = if attempt.result == result_name(0) { "ok" } else { "out of memory" };
                    format!("{} {answer}", size(attempt.bytes))
                },
            )
        };
        let gpu = self.gpu.as_deref().map_or("-".into(), short);
        let text =
            row([self.name, &asks, &gpu, &sees, &attempt(self.alloc_within), &attempt(self.alloc_over)]);
        if ask.is_met_by(self) { text } else { page.bad(&text) }
    }
}

impl Inside {
    /// What a running container has of vcuda: by its OCI spec, and by its mounts, which are the hook's.
    fn of(info: &ContainerInfo) -> Result<Self> {
        let spec = &info.spec;
        let list = |value: &serde_json::Value, key: &str| -> Vec<String> {
            let items = value.as_array().into_iter().flatten();
            items.filter_map(|item| item[key].as_str()).map(Into::into).collect()
        };
        let devices = list(&spec["linux"]["devices"], "path");
        let devices: Vec<_> = devices.into_iter().filter(|path| path.contains("nvidia")).collect();
        let env = spec["process"]["env"].as_array().into_iter().flatten().filter_map(|entry| entry.as_str());
        let env: Vec<_> = env
            .filter(|entry| entry.starts_with("LD_") || entry.starts_with("NVIDIA_"))
            .map(String::from)
            .collect();
        let path = format!("/proc/{}/mountinfo", info.pid);
        let mounted = fs::read_to_string(&path).with_context(|| path.clone())?;
        let points = mounted.lines().filter_map(mount_point);
        let own = ["/usr/local/vcuda/", "/etc/ld.so.preload", "libcuda.so", "libnvidia-ml.so"];
        let mounts = points.filter(|point| own.iter().any(|part| point.contains(part)));
        let mounts = mounts.map(String::from).collect();
        let hooks = spec["hooks"]["createContainer"].as_array().into_iter().flatten();
        let hooks: Vec<_> = hooks.filter_map(|hook| hook["args"][1].as_str()).map(String::from).collect();
        Ok(Self { devices, mounts, env, hooks })
    }

    fn lines(&self) -> Vec<String> {
        let Self { devices, mounts, env, hooks } = self;
        let mut lines = vec![];
        for (name, items) in [("devices", devices), ("mounts", mounts), ("env", env), ("hooks", hooks)] {
            for (at, item) in items.iter().enumerate() {
                lines.push(format!("{:<8} {item}", if at == 0 { name } else { "" }));
            }
        }
        lines
    }
}

/// The guard's sentence out of what the runtime wraps around it.
fn sentence(error: &str) -> String {
    let said = error.rsplit_once("stderr: ").map_or(error, |(_, said)| said);
    said.trim().trim_end_matches(": unknown").trim().to_owned()
}

/// The name of a `CUresult` (cuda.h).
fn result_name(code: i32) -> &'static str {
    match code {
        0 => "CUDA_SUCCESS",
        OUT_OF_MEMORY => "CUDA_ERROR_OUT_OF_MEMORY",
        _ => "another error",
    }
}

/// The beginning and the end of a UUID.
fn short(uuid: &str) -> String {
    match (uuid.get(..8), uuid.len().checked_sub(4).and_then(|at| uuid.get(at..))) {
        (Some(first), Some(last)) => format!("{first}…{last}"),
        _ => uuid.into(),
    }
}

/// A size in GiB, with a decimal where it needs one.
fn size(bytes: u64) -> String {
    if bytes.is_multiple_of(GIB) {
        format!("{} GiB", bytes / GIB)
    } else {
        let tenths = bytes * 10 / GIB;
        format!("{}.{} GiB", tenths / 10, tenths % 10)
    }
}

fn row(cells: [&str; 6]) -> String {
    let mut line = String::new();
    for (cell, width) in cells.iter().zip([9, 18, 15, 16, 12, 0]) {
        let _ = write!(line, "{cell:<width$}");
    }
    line.trim_end().to_owned()
}

/// Where it is printed.
struct Page {
    loud: bool,
    color: bool,
}

impl Page {
    fn title(&self, what: &str, more: &str) {
        self.print(&self.titled(what, more));
    }

    fn titled(&self, what: &str, more: &str) -> String {
        if self.color {
            format!("\n{} {}", self.paint("1", what), self.dim(more))
        } else {
            format!("\n{what}: {more}")
        }
    }

    fn line(&self, text: &str) {
        self.print(&format!("  {text}"));
    }

    fn print(&self, text: &str) {
        if self.loud {
            // Whoever reads it may have seen enough; the node is still to be taken down.
            let _ = writeln!(std::io::stdout(), "{text}");
        }
    }

    fn dim(&self, text: &str) -> String {
        self.paint("2", text)
    }

    fn good(&self, text: &str) -> String {
        self.paint("32", text)
    }

    fn bad(&self, text: &str) -> String {
        self.paint("31", text)
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.into() }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_title_stands_apart_from_what_follows_with_color_and_without() {
        let page = |color| Page { loud: true, color };
        assert_eq!(page(false).titled("node", "containerd 2.1"), "\nnode: containerd 2.1");
        assert_eq!(page(true).titled("node", "containerd"), "\n\x1b[1mnode\x1b[0m \x1b[2mcontainerd\x1b[0m");
    }

    #[test]
    fn what_a_pod_got_is_of_the_last_look() {
        let looks = r#"{"passedMs":0,"shares":[{"pod":"server","measuredPermille":null}]}
            {"passedMs":2000,"shares":[{"pod":"server","measuredPermille":502},{"pod":"whole","measuredPermille":null}]}"#;
        assert_eq!(measured(looks).unwrap(), HashMap::from([("server".into(), 50.2)]));
    }

    #[test]
    fn json_has_all_that_the_text_has() {
        let strings = |list: &[&str]| list.iter().map(|&item| item.into()).collect();
        let inside = Inside {
            devices: strings(&["/dev/nvidia0"]),
            mounts: strings(&["/etc/ld.so.preload", "/usr/local/vcuda/lib"]),
            env: strings(&["LD_PRELOAD=/a.so"]),
            hooks: strings(&["guard"]),
        };
        let expected =
            ["devices  /dev/nvidia0", "mounts   /etc/ld.so.preload", "         /usr/local/vcuda/lib"];
        assert_eq!(inside.lines()[..3], expected);
        let seen = Seen {
            ok: false,
            driver: "simulated 1".into(),
            containerd: "containerd 2".into(),
            gpus: vec![],
            pods: vec![],
            inside,
            without_nri: Refusal { started: false, message: "refused".into(), other_runs: true },
        };
        let expected = json!({
            "ok": false,
            "driver": "simulated 1",
            "containerd": "containerd 2",
            "gpus": [],
            "pods": [],
            "inside": {
                "devices": ["/dev/nvidia0"],
                "mounts": ["/etc/ld.so.preload", "/usr/local/vcuda/lib"],
                "env": ["LD_PRELOAD=/a.so"],
                "hooks": ["guard"],
            },
            "without_nri": {"started": false, "message": "refused", "other_runs": true},
        });
        assert_eq!(serde_json::to_value(seen).unwrap(), expected);
    }
}
