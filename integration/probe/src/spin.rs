//! Keeps a GPU busy: kernels of given length, launched in one of the ways that programs launch them.

use std::{
    error::Error,
    ffi::CString,
    fmt::Write as _,
    io::Write as _,
    process::{Child, Command},
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};

use crate::driver::{Cuda, Failure, Function, Stream};

/// Kernels of a graph.
const NODES: usize = 200;

/// Launches kernels, and prints once a second how many: a line of JSON with the seconds since the first launch and the
/// launches and nanoseconds of kernels that were begun until then.
#[derive(Args)]
pub struct Spin {
    /// How long a kernel takes, in microseconds; several for a mix of them in turn.
    #[arg(long, value_delimiter = ',', default_value = "100")]
    kernel_us: Vec<u64>,
    /// How it launches.
    #[arg(long, value_enum, default_value = "queue")]
    pattern: Pattern,
    /// Streams that it launches to, in turn.
    #[arg(long, default_value_t = 1)]
    streams: usize,
    /// Blocks of a launch, each of 256 threads.
    #[arg(long, default_value_t = 1024)]
    blocks: u32,
    /// How long it does so.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Does it in so many processes.
    #[arg(long, default_value_t = 1)]
    processes: usize,
    /// Starts a new process for every so many launches.
    #[arg(long)]
    launches_a_process: Option<u64>,
    /// Goes on after errors.
    #[arg(long)]
    ignore_errors: bool,
    /// Ends after so many launches.
    #[arg(long, hide = true)]
    launches: Option<u64>,
    /// Ends with the process of this ID, which started it.
    #[arg(long, hide = true)]
    parent: Option<u32>,
}

/// How kernels are launched.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Pattern {
    /// As many as the driver takes, without waiting.
    Queue,
    /// Waits after each launch.
    Sync,
    /// As a graph of 200 kernels, again and again.
    Graph,
}

/// The module's text: one kernel for each duration. On a real GPU each block runs until that time has passed on its
/// multiprocessor's clock, at about 1.4 GHz; the simulated one reads the comment.
fn text(durations: &[u64]) -> String {
    let mut text = String::from(".version 7.0\n.target sm_50\n.address_size 64\n");
    for (at, us) in durations.iter().enumerate() {
        let cycles = us.saturating_mul(1400);
        let _ = write!(
            text,
            ".visible .entry spin{at}()\n{{ // sim: time {us}us\n\
             .reg .u64 %rd<4>;\n.reg .pred %p1;\n\
             mov.u64 %rd1, %clock64;\n\
             again{at}:\nmov.u64 %rd2, %clock64;\nsub.u64 %rd3, %rd2, %rd1;\n\
             setp.lt.u64 %p1, %rd3, {cycles};\n@%p1 bra again{at};\nret;\n}}\n"
        );
    }
    text
}

/// What was launched.
#[derive(Default)]
struct Count {
    launches: u64,
    kernel_ns: u64,
}

impl Spin {
    /// Does it, until the time is over.
    pub fn run(&self) -> Result<(), Box<dyn Error>> {
        if let Some(parent) = self.parent {
            end_with(parent)?;
        }
        if self.processes > 1 {
            return self.several();
        }
        if let Some(launches) = self.launches_a_process {
            return self.again_and_again(launches);
        }
        let cuda = Cuda::load(c"libcuda.so.1")?;
        cuda.use_device(0)?;
        let module = cuda.module(&CString::new(text(&self.kernel_us))?)?;
        let functions: Vec<Function> = (0..self.kernel_us.len())
            .map(|at| cuda.function(&module, &CString::new(format!("spin{at}")).unwrap_or_default()))
            .collect::<Result<_, _>>()?;
        let streams: Vec<Stream> =
            (0..self.streams.max(1)).map(|_| cuda.stream()).collect::<Result<_, _>>()?;
        let graph = match self.pattern {
            Pattern::Graph => Some(cuda.graph(&streams[0], || {
                let mut nodes = (0..NODES).map(|node| &functions[node % functions.len()]);
                nodes.try_for_each(|function| cuda.launch(function, self.blocks, &streams[0]))
            })?),
            _ => None,
        };
        let of_graph: u64 = (0..NODES).map(|node| self.kernel_us[node % functions.len()] * 1000).sum();
        let begin = Instant::now();
        let (mut count, mut told) = (Count::default(), 0.0);
        let end = Duration::from_secs_f64(self.seconds.max(0.0));
        for turn in 0_usize.. {
            let passed = begin.elapsed();
            if passed >= end || self.launches.is_some_and(|most| count.launches >= most) {
                break;
            }
            if passed.as_secs_f64() >= told + 1.0 {
                told = passed.as_secs_f64();
                tell(told, &count);
            }
            let stream = &streams[turn % streams.len()];
            let outcome = match &graph {
                Some(graph) => cuda.launch_graph(graph, stream),
                None => cuda.launch(&functions[turn % functions.len()], self.blocks, stream),
            };
            match self.forgiven(outcome)? {
                Some(()) if graph.is_some() => {
                    count.launches += NODES as u64;
                    count.kernel_ns += of_graph;
                }
                Some(()) => {
                    count.launches += 1;
                    count.kernel_ns += self.kernel_us[turn % functions.len()] * 1000;
                }
                None => {}
            }
            if self.pattern == Pattern::Sync {
                self.forgiven(cuda.synchronize(stream))?;
            }
        }
        if self.launches.is_some() {
            self.forgiven(cuda.synchronize_all())?;
        } else {
            tell(begin.elapsed().as_secs_f64(), &count);
        }
        Ok(())
    }

    fn forgiven(&self, outcome: Result<(), Failure>) -> Result<Option<()>, Failure> {
        match outcome {
            Ok(()) => Ok(Some(())),
            Err(_) if self.ignore_errors => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The same options for another process.
    fn another(&self, more: &[String]) -> Result<Child, Box<dyn Error>> {
        let list: Vec<String> = self.kernel_us.iter().map(u64::to_string).collect();
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["spin", "--kernel-us", &list.join(","), "--pattern"]);
        command
            .arg(self.pattern.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned()));
        command.args(["--streams", &self.streams.to_string(), "--blocks", &self.blocks.to_string()]);
        command.args(["--parent", &std::process::id().to_string()]);
        if self.ignore_errors {
            command.arg("--ignore-errors");
        }
        Ok(command.args(more).spawn()?)
    }

    fn several(&self) -> Result<(), Box<dyn Error>> {
        let mut more = vec!["--seconds".to_owned(), self.seconds.to_string()];
        if let Some(launches) = self.launches_a_process {
            more.extend(["--launches-a-process".to_owned(), launches.to_string()]);
        }
        let all: Vec<Child> = (0..self.processes).map(|_| self.another(&more)).collect::<Result<_, _>>()?;
        for mut child in all {
            child.wait()?;
        }
        Ok(())
    }

    fn again_and_again(&self, launches: u64) -> Result<(), Box<dyn Error>> {
        let begin = Instant::now();
        while begin.elapsed().as_secs_f64() < self.seconds {
            self.another(&["--launches".to_owned(), launches.to_string()])?.wait()?;
        }
        Ok(())
    }
}

/// Has this process killed when its parent ends, however that comes about.
fn end_with(parent: u32) -> Result<(), Box<dyn Error>> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    // It may have ended before that.
    if std::os::unix::process::parent_id() != parent {
        return Err("the process that started this one is gone".into());
    }
    Ok(())
}

fn tell(seconds: f64, count: &Count) {
    let Count { launches, kernel_ns } = count;
    println!("{{\"seconds\":{seconds:.3},\"launches\":{launches},\"kernel_ns\":{kernel_ns}}}");
    let _ = std::io::stdout().flush();
}
