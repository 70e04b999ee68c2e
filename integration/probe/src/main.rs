//! A CUDA program for the tests' containers. It reaches the driver as most programs do, by `dlopen` of `libcuda.so.1`
//! and `libnvidia-ml.so.1`, says in one line of JSON what it sees, and takes as much memory as it is told to; `spin`
//! keeps a GPU busy instead. It knows nothing of shares: what it prints is what any program would find.

#![deny(unsafe_code)]

#[expect(unsafe_code, reason = "it calls the driver, which is C")]
mod driver;
mod spin;

use std::{ffi::CString, io::Write, process::ExitCode, str::FromStr, thread};

use clap::{Parser, Subcommand};
use serde::Serialize;

use driver::{Cuda, Failure, Nvml};

const MIB: u64 = 1 << 20;

/// Says what a CUDA program sees of the GPUs, and allocates device memory.
///
/// Exit codes: 0 all calls worked (a refused allocation is an answer, not a failure), 2 usage, 3 the driver could
/// not be loaded or refused to initialise.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Options {
    #[command(subcommand)]
    work: Option<Work>,
    /// Allocates this many MiB of device memory on the first GPU, and keeps them. Repeatable, in order.
    #[arg(long, value_name = "MIB")]
    alloc: Vec<u64>,
    /// Allocates blocks of this many MiB until one is refused.
    #[arg(long, value_name = "MIB")]
    fill: Option<u64>,
    /// Frees everything again and looks once more.
    #[arg(long)]
    free: bool,
    /// Which libcuda to load: a name that is looked up, or a path.
    #[arg(long, value_name = "FILE", default_value = "libcuda.so.1", value_parser = CString::from_str)]
    cuda: CString,
    /// After printing, keeps the memory until killed.
    #[arg(long)]
    hold: bool,
}

#[derive(Subcommand)]
enum Work {
    /// Launches kernels until told to stop.
    Spin(spin::Spin),
}

/// What there is to see. Sizes in bytes.
#[derive(Default, Serialize)]
struct Report {
    /// The first call that failed, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// CUDA version of the driver, such as 12040.
    cuda_version: i32,
    gpus: Vec<GpuView>,
    /// `cuMemGetInfo` on the first GPU, before anything is allocated.
    memory: Option<MemoryView>,
    allocs: Vec<Allocation>,
    /// How much `--fill` got, and the CUDA error that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    filled: Option<Allocation>,
    /// `cuMemGetInfo` with everything allocated.
    memory_after: Option<MemoryView>,
    /// `cuMemGetInfo` with everything freed again.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_freed: Option<MemoryView>,
    nvml: Vec<NvmlView>,
}

/// A GPU as CUDA shows it.
#[derive(Serialize)]
struct GpuView {
    name: String,
    uuid: String,
    total_bytes: u64,
}

/// A GPU's memory as CUDA shows it.
#[derive(Clone, Copy, Serialize)]
struct MemoryView {
    free_bytes: u64,
    total_bytes: u64,
}

/// A GPU as NVML shows it.
#[derive(Serialize)]
struct NvmlView {
    uuid: String,
    total_bytes: u64,
    free_bytes: u64,
    used_bytes: u64,
}

/// An attempt to get memory.
#[derive(Serialize)]
struct Allocation {
    bytes: u64,
    /// `CUresult`; 0 is success, 2 out of memory.
    result: i32,
}

fn main() -> ExitCode {
    let options = Options::parse();
    if let Some(Work::Spin(spin)) = &options.work {
        return match spin.run() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("cuda-probe: {error}");
                ExitCode::from(3)
            }
        };
    }
    let mut report = Report::default();
    let mut held = vec![];
    let outcome = look(&options, &mut report, &mut held);
    if let Err(failure) = &outcome {
        report.error = Some(failure.to_string());
    }
    let line = serde_json::to_string(&report).unwrap_or_default();
    println!("{line}");
    let _ = std::io::stdout().flush();
    if outcome.is_err() {
        return ExitCode::from(3);
    }
    if options.hold {
        loop {
            thread::park();
        }
    }
    ExitCode::SUCCESS
}

fn look(options: &Options, report: &mut Report, held: &mut Vec<u64>) -> Result<(), Failure> {
    let cuda = Cuda::load(&options.cuda)?;
    report.cuda_version = cuda.version()?;
    for ordinal in 0..cuda.count()? {
        let (name, uuid, total_bytes) = cuda.device(ordinal)?;
        report.gpus.push(GpuView { name, uuid, total_bytes });
    }
    if !report.gpus.is_empty() {
        cuda.use_device(0)?;
        let memory = || cuda.memory().map(|(free_bytes, total_bytes)| MemoryView { free_bytes, total_bytes });
        report.memory = Some(memory()?);
        let mut take = |bytes| match cuda.alloc(bytes) {
            Ok(pointer) => {
                held.push(pointer);
                0
            }
            Err(code) => code,
        };
        for mib in &options.alloc {
            let bytes = mib.saturating_mul(MIB);
            let result = take(bytes);
            report.allocs.push(Allocation { bytes, result });
        }
        if let Some(mib) = options.fill {
            let block = mib.saturating_mul(MIB).max(1);
            let mut filled = Allocation { bytes: 0, result: 0 };
            while filled.result == 0 {
                filled.result = take(block);
                if filled.result == 0 {
                    filled.bytes += block;
                }
            }
            report.filled = Some(filled);
        }
        report.memory_after = Some(memory()?);
    }
    let nvml = Nvml::load()?;
    for index in 0..nvml.count()? {
        let (uuid, total_bytes, free_bytes, used_bytes) = nvml.device(index)?;
        report.nvml.push(NvmlView { uuid, total_bytes, free_bytes, used_bytes });
    }
    if options.free && report.memory.is_some() {
        for pointer in held.drain(..) {
            cuda.free(pointer)?;
        }
        report.memory_freed =
            Some(cuda.memory().map(|(free_bytes, total_bytes)| MemoryView { free_bytes, total_bytes })?);
    }
    Ok(())
}
