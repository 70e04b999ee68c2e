//! Commands to the running daemon: what happens to its GPUs, and a look at its state. JSON over a socket that only root
//! can open; one command a connection.

use std::{
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::Path,
    sync::atomic::Ordering::{Relaxed, SeqCst},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::state::{MAX_GPUS, State};

/// `nvmlEventTypeXidCriticalError`.
const XID: u64 = 8;

/// "GPU has fallen off the bus" (NVIDIA's XID catalog).
const FALLEN_OFF: u64 = 79;

/// A command is a line.
const MAX_BYTES: u64 = 64 << 10;

/// A peer that does not finish its command.
const PATIENCE: Duration = Duration::from_secs(1);

/// A daemon that does not answer.
const ANSWER: Duration = Duration::from_secs(10);

/// What `sim-gpud ctl` can let happen. A GPU is named by index or UUID.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Command {
    /// An XID error.
    Xid {
        /// The GPU.
        gpu: String,
        /// Which.
        code: u64,
    },
    /// The GPU falls off the bus: XID 79, and NVML and CUDA find it lost.
    Lose {
        /// The GPU.
        gpu: String,
    },
    /// A lost GPU is back.
    Recover {
        /// The GPU.
        gpu: String,
    },
    /// Memory errors that ECC cannot correct. As on a node where XIDs are not reported, no event tells of them.
    Ecc {
        /// The GPU.
        gpu: String,
        /// How many more.
        errors: u64,
        /// Whether the memory waits to be retired.
        retires: bool,
    },
    /// A row of memory had an error that ECC cannot correct, and is to be replaced by a spare one.
    Row {
        /// The GPU.
        gpu: String,
        /// Whether there is no spare one; no reset helps.
        failed: bool,
    },
    /// The GPU is reset: it counts memory errors from nought, and has retired or replaced what was to be.
    Reset {
        /// The GPU.
        gpu: String,
    },
    /// Switches MIG mode.
    Mig {
        /// The GPU.
        gpu: String,
        /// On or off.
        on: bool,
    },
    /// Shows GPUs and processes.
    Show,
}

/// Gives a command to the daemon that serves a driver root, and returns its answer.
pub fn ask(root: &Path, command: &Command) -> Result<Value> {
    let socket = root.join(super::CONTROL);
    let mut stream = UnixStream::connect(&socket)
        .with_context(|| format!("{}: no sim-gpud answers there; start it, and be root", socket.display()))?;
    stream.set_read_timeout(Some(ANSWER))?;
    serde_json::to_writer(&stream, command)?;
    stream.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("sim-gpud does not answer")?;
    match serde_json::from_str(&answer).context("sim-gpud gave no answer")? {
        Value::Object(fields) if fields.contains_key("error") => {
            bail!("{}", fields["error"].as_str().unwrap_or("unknown"))
        }
        answer => Ok(answer),
    }
}

pub(super) struct Control<'a> {
    pub state: &'a State,
    pub ended: &'a super::Ended,
}

impl Control<'_> {
    /// Hears one command and answers.
    pub(super) fn serve(&self, mut stream: UnixStream) {
        let heard = || -> Result<Value> {
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            let mut text = String::new();
            (&stream).take(MAX_BYTES).read_to_string(&mut text)?;
            self.obey(&serde_json::from_str(&text)?)
        };
        let answer = heard().unwrap_or_else(|error| json!({ "error": format!("{error:#}") }));
        // Whoever does not wait for the answer does not get it.
        let _ = stream.write_all(answer.to_string().as_bytes());
    }

    fn obey(&self, command: &Command) -> Result<Value> {
        match command {
            Command::Xid { gpu, code } => self.state.happen(self.find(gpu)?, XID, *code),
            Command::Lose { gpu } => {
                let gpu = self.find(gpu)?;
                self.state.gpus[gpu].lost.store(1, SeqCst);
                self.state.happen(gpu, XID, FALLEN_OFF);
            }
            Command::Recover { gpu } => self.state.gpus[self.find(gpu)?].lost.store(0, SeqCst),
            Command::Ecc { gpu, errors, retires } => {
                let gpu = &self.state.gpus[self.find(gpu)?];
                for count in &gpu.errors {
                    count.fetch_add(*errors, SeqCst);
                }
                gpu.retires.fetch_or(u32::from(*retires), SeqCst);
            }
            Command::Row { gpu, failed } => {
                let rows = &self.state.gpus[self.find(gpu)?].rows;
                if *failed { &rows.failed } else { &rows.pending }.fetch_add(1, SeqCst);
            }
            Command::Reset { gpu } => {
                let gpu = &self.state.gpus[self.find(gpu)?];
                gpu.errors[0].store(0, SeqCst);
                gpu.retires.store(0, SeqCst);
                gpu.rows.remapped.fetch_add(gpu.rows.pending.swap(0, SeqCst), SeqCst);
            }
            Command::Mig { gpu, on } => {
                let gpu = self.find(gpu)?;
                if self.state.gpus[gpu].facts.mig_capable == 0 {
                    bail!("GPU {gpu} has no MIG mode");
                }
                self.state.gpus[gpu].mig.store(u32::from(*on), SeqCst);
            }
            Command::Show => return Ok(self.show()),
        }
        Ok(json!({}))
    }

    fn find(&self, name: &str) -> Result<usize> {
        let gpus = self.state.gpus();
        let at = match name.parse() {
            Ok(index) => Some(index).filter(|index| *index < gpus.len()),
            Err(_) => gpus.iter().position(|gpu| gpu.facts.uuid_text() == name),
        };
        at.with_context(|| format!("GPU {name}: there are {}", gpus.len()))
    }

    fn show(&self) -> Value {
        let gpus: Vec<Value> = self
            .state
            .gpus()
            .iter()
            .enumerate()
            .map(|(at, gpu)| {
                json!({
                    "uuid": gpu.facts.uuid_text(),
                    "minor": gpu.facts.minor,
                    "totalBytes": gpu.facts.total,
                    "usableBytes": gpu.facts.usable(),
                    "usedBytes": self.state.used(at),
                    "lost": gpu.lost.load(SeqCst) != 0,
                    "atNs": self.state.turns(at).now(),
                })
            })
            .collect();
        let processes: Vec<Value> = self
            .state
            .clients()
            .map(|(slot, client)| {
                let of = |what: &dyn Fn(usize) -> u64| (0..gpus.len()).map(what).collect::<Vec<_>>();
                json!({
                    "pid": client.pid.load(Relaxed),
                    "group": client.group.load(Relaxed),
                    "gone": client.gone.load(Relaxed) != 0,
                    "contexts": of(&|gpu| client.contexts[gpu].load(Relaxed).into()),
                    "launches": of(&|gpu| client.launches[gpu].load(Relaxed)),
                    "threads": of(&|gpu| client.threads[gpu].load(Relaxed)),
                    "busyNs": of(&|gpu| self.state.turns(gpu).had(slot)),
                    "heldBytes": of(&|gpu| client.held(gpu)),
                    "sharedBytes": of(&|gpu| client.shared[gpu].load(Relaxed)),
                })
            })
            .collect();
        let of =
            |(group, busy): (&i32, &[u64; MAX_GPUS])| json!({ "group": group, "busyNs": busy[..gpus.len()] });
        let ended: Vec<Value> = self.ended.iter().map(of).collect();
        json!({ "gpus": gpus, "processes": processes, "ended": ended })
    }
}
