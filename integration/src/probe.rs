//! What `cuda-probe` reports from inside a container. Sizes in bytes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::{cri::Cri, image::Image};

/// Where the tests' images have it.
pub const PATH: &str = "/usr/local/bin/cuda-probe";

/// The probe has its memory within milliseconds; a busy machine may need a while.
const HELD_WITHIN: Duration = Duration::from_secs(10);

/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub const OUT_OF_MEMORY: i32 = 2;

/// One report.
#[derive(Clone, Debug, Deserialize)]
pub struct Report {
    /// The first call that failed, if one did.
    pub error: Option<String>,
    /// CUDA version of the driver, such as 12040.
    pub cuda_version: i32,
    /// GPUs as CUDA shows them.
    pub gpus: Vec<Gpu>,
    /// `cuMemGetInfo` before anything was allocated.
    pub memory: Option<Memory>,
    /// What was asked for with `--alloc`.
    pub allocs: Vec<Allocation>,
    /// What `--fill` got.
    pub filled: Option<Allocation>,
    /// `cuMemGetInfo` after all allocations.
    pub memory_after: Option<Memory>,
    /// `cuMemGetInfo` after everything was freed.
    pub memory_freed: Option<Memory>,
    /// GPUs as NVML shows them.
    pub nvml: Vec<NvmlGpu>,
}

/// A GPU as CUDA shows it.
#[derive(Clone, Debug, Deserialize)]
pub struct Gpu {
    /// Model.
    pub name: String,
    /// UUID.
    pub uuid: String,
    /// `cuDeviceTotalMem`.
    pub total_bytes: u64,
}

/// Memory as `cuMemGetInfo` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Memory {
    /// Free.
    pub free_bytes: u64,
    /// All.
    pub total_bytes: u64,
}

/// A GPU as NVML shows it.
#[derive(Clone, Debug, Deserialize)]
pub struct NvmlGpu {
    /// UUID.
    pub uuid: String,
    /// All.
    pub total_bytes: u64,
    /// Free.
    pub free_bytes: u64,
    /// In use.
    pub used_bytes: u64,
}

/// An attempt to get memory.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Allocation {
    /// How much.
    pub bytes: u64,
    /// `CUresult`.
    pub result: i32,
}

/// An image with the C library of a Debian release, and the probe.
pub fn image(release: &str) -> Result<Image> {
    let probe = crate::cache::dist()?.join("test/cuda-probe");
    Ok(Image::debian(&format!("local/cuda-{release}:1"), release).copy(PATH, &probe))
}

/// Runs the probe in a container.
pub async fn run(cri: &Cri, container: &str, arguments: &[&str]) -> Result<Report> {
    let mut command = vec![PATH];
    command.extend(arguments);
    let exec = cri.exec(container, &command).await?;
    parse(&exec.stdout).with_context(|| format!("cuda-probe: {exec:?}"))
}

/// Sees that a container with a share of 8 GiB has it, and no more; its GPU.
///
/// # Errors
/// It has not, or the probe did not run.
pub async fn holds_8_gib(cri: &Cri, container: &str) -> Result<String> {
    let report = run(cri, container, &["--alloc", "6144", "--alloc", "3072"]).await?;
    let results: Vec<i32> = report.allocs.iter().map(|alloc| alloc.result).collect();
    match report.gpus.as_slice() {
        [gpu, ..]
            if report.error.is_none() && gpu.total_bytes == 8 << 30 && results == [0, OUT_OF_MEMORY] =>
        {
            Ok(gpu.uuid.clone())
        }
        _ => bail!("no share of 8 GiB: {report:?}"),
    }
}

/// Has a process in a container keep its GPU busy for an hour, with kernels of 1 ms; returns its process ID there.
pub async fn spin(cri: &Cri, container: &str) -> Result<String> {
    let script = format!("{PATH} spin --kernel-us 1000 --seconds 3600 >/dev/null 2>&1 & echo $!");
    Ok(cri.exec(container, &["sh", "-c", &script]).await?.stdout.trim().to_owned())
}

/// Has a process in a container take `mib` MiB of device memory and keep them; returns its process ID there.
pub async fn hold(cri: &Cri, container: &str, mib: u64) -> Result<String> {
    let script = format!("{PATH} --alloc {mib} --hold >/tmp/held 2>&1 & echo $!");
    let process = cri.exec(container, &["sh", "-c", &script]).await?.stdout.trim().to_owned();
    let deadline = Instant::now() + HELD_WITHIN;
    loop {
        let line = cri.exec(container, &["cat", "/tmp/held"]).await?.stdout;
        if line.ends_with('\n') {
            let report = parse(&line).with_context(|| line.clone())?;
            if report.allocs.first().is_none_or(|alloc| alloc.result != 0) {
                bail!("{mib} MiB were refused: {line}");
            }
            return Ok(process);
        }
        if Instant::now() > deadline {
            bail!("cuda-probe --hold printed nothing: {line}");
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Reads the line that the probe prints.
pub fn parse(line: &str) -> Result<Report> {
    Ok(serde_json::from_str(line.trim())?)
}
