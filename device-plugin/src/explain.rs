//! What `vcuda-device-plugin explain` shows: where a request would go at this moment and what each GPU lacks for it, or
//! why a pod's shares are where they are. It reads files only, and decides as the NRI plugin does.

use std::fmt;

use ledger::{
    GpuFree, Inventory, Lack, Memory, Policy, ShareFolder, ShareName, ShareRecord, Shares, Wishes, place_by,
};
use serde::Serialize;
use vcuda_config::{GpuUuid, NodeFile, Request};

use crate::status::StatusError;

/// Where a request would go.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explained {
    /// The GPUs that it would get; none when it fits nowhere.
    pub gpus: Vec<GpuUuid>,
    /// Why these, or why none.
    pub reason: String,
    /// Every GPU of the node.
    pub each: Vec<GpuExplained>,
}

/// What one GPU has or lacks for a request.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuExplained {
    /// The GPU.
    pub gpu: GpuUuid,
    /// Its model.
    pub model: String,
    /// Whether it can take the request, or its part of it.
    pub fits: bool,
    /// What it has free, or what it lacks.
    pub says: String,
}

/// Why the shares of a pod are where they are.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareExplained {
    /// `<namespace>/<pod> <container>`.
    pub share: String,
    /// Its GPUs.
    pub gpus: Vec<GpuUuid>,
    /// Why these, as noted when it was bound.
    pub reason: String,
}

impl Explained {
    /// Where `request` would go now, by `policy`.
    ///
    /// # Errors
    ///
    /// When inventory or shares cannot be read.
    pub fn read(file: &NodeFile, request: &Request, policy: Policy) -> Result<Self, StatusError> {
        let (inventory, shares) = read(file)?;
        let free = shares.free(&inventory).map_err(|error| StatusError::Unreadable(error.to_string()))?;
        Ok(Self::of(&inventory, &free, request, policy))
    }

    fn of(inventory: &Inventory, free: &[GpuFree<'_>], request: &Request, policy: Policy) -> Self {
        let wishes = Wishes { policy: Some(policy), ..Wishes::default() };
        let cordoned = inventory.cordoned_at();
        let rules = wishes.rules(inventory, &cordoned);
        let has = |at: usize| {
            let lack = ledger::lack(free, at, request, &rules);
            let this = &free[at];
            let fits = lack.is_none();
            let says = match &lack {
                None => format!("{} fits: it {this}", this.gpu.uuid),
                Some(lack @ Lack::Room { .. }) => format!("{lack}{}", Missing::of(this, request)),
                Some(lack) => lack.to_string(),
            };
            GpuExplained { gpu: this.gpu.uuid.clone(), model: this.gpu.name.clone(), fits, says }
        };
        let each = (0..free.len()).map(has).collect();
        match place_by(free, request, &[], &rules) {
            Ok(placement) => Self {
                gpus: placement.gpus.into_iter().map(|gpu| gpu.uuid).collect(),
                reason: placement.choice.to_string(),
                each,
            },
            Err(no_room) => Self { gpus: Vec::new(), reason: no_room.headline(), each },
        }
    }
}

/// What a GPU has too little of for a part of it; empty for whole GPUs.
struct Missing {
    core: u32,
    memory_bytes: u64,
}

impl Missing {
    fn of(free: &GpuFree<'_>, request: &Request) -> Self {
        let (core, memory_bytes) = match request {
            Request::Share { core, .. } => (*core, request.memory_bytes().unwrap_or(0)),
            Request::Whole { .. } => (0, 0),
        };
        Self {
            core: core.saturating_sub(free.core),
            memory_bytes: memory_bytes.saturating_sub(free.memory_bytes),
        }
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = Memory(self.memory_bytes);
        match (self.core, self.memory_bytes) {
            (0, 0) => Ok(()),
            (core, 0) => write!(f, "; lacks {core} core"),
            (0, _) => write!(f, "; lacks {memory}"),
            (core, _) => write!(f, "; lacks {core} core and {memory}"),
        }
    }
}

/// Why the shares of `pod` are where they are: `<namespace>/<name>`, a name, or a UID.
///
/// # Errors
///
/// When the shares cannot be read, or none is of such a pod.
pub fn shares_of(file: &NodeFile, pod: &str) -> Result<Vec<ShareExplained>, StatusError> {
    let (_, shares) = read(file)?;
    let is_meant = |record: &ShareRecord| {
        let of = &record.pod;
        pod == of.uid || pod == of.name || pod.split_once('/') == Some((&of.namespace, &of.name))
    };
    let folder = file.paths.shares();
    let explain = |(name, record): (&ShareName, &ShareRecord)| ShareExplained {
        share: format!("{}/{} {}", record.pod.namespace, record.pod.name, record.container.name),
        gpus: record.gpus.iter().map(|gpu| gpu.uuid.clone()).collect(),
        reason: ShareFolder::new(&folder, name)
            .reason()
            .unwrap_or_else(|| "it was not noted; the share was put back after its record was lost".into()),
    };
    let found: Vec<_> = shares.records.iter().filter(|(_, record)| is_meant(record)).map(explain).collect();
    if found.is_empty() {
        return Err(StatusError::NoSuchPod(pod.into()));
    }
    Ok(found)
}

fn read(file: &NodeFile) -> Result<(Inventory, Shares), StatusError> {
    let inventory = Inventory::load(&file.paths.inventory())?;
    let path = file.paths.shares();
    let shares = Shares::read(&path).map_err(|source| StatusError::Shares { path, source })?;
    Ok((inventory, shares))
}

impl fmt::Display for Explained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.gpus.as_slice() {
            [] => writeln!(f, "it fits nowhere on this node: {}", self.reason)?,
            gpus => {
                let gpus: Vec<_> = gpus.iter().map(GpuUuid::as_str).collect();
                writeln!(f, "it would go to {}: {}", gpus.join(", "), self.reason)?;
            }
        }
        for gpu in &self.each {
            writeln!(f, "  {} ({})", gpu.says, gpu.model)?;
        }
        Ok(())
    }
}

impl fmt::Display for ShareExplained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gpus: Vec<_> = self.gpus.iter().map(GpuUuid::as_str).collect();
        writeln!(f, "{} is on {}: {}", self.share, gpus.join(", "), self.reason)
    }
}

#[cfg(test)]
mod tests {
    use ledger::Gpu;

    use super::*;
    use crate::testing;

    fn gpu(n: u8) -> Gpu {
        Gpu { name: "NVIDIA A100".into(), healthy: n != 3, ..testing::gpu(n, 160) }
    }

    #[test]
    fn every_gpu_says_what_it_has_or_lacks_in_the_words_of_a_refusal() {
        let mut inventory = testing::inventory("boot", (1..=4).map(gpu).collect());
        inventory.cordoned = vec![gpu(2).uuid];
        let mut free: Vec<_> = Shares::default().free(&inventory).unwrap();
        (free[3].core, free[3].memory_bytes, free[3].shares) = (30, 8 << 30, 2);
        let of = |core, memory| {
            Explained::of(&inventory, &free, &Request::new(core, memory).unwrap(), Policy::Pack)
        };
        let fits = of(20, 32);
        assert_eq!(fits.gpus, [gpu(4).uuid]);
        let text = fits.to_string();
        for part in
            ["the fullest", "is cordoned", "is unhealthy", "has 100 core and 40 GiB free", "has 30 core"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        for (core, memory, lacks) in [
            (90, 32, "has 30 core and 8 GiB free; lacks 60 core ("),
            (30, 33, "has 30 core and 8 GiB free; lacks 0.25 GiB ("),
            (31, 40, "has 30 core and 8 GiB free; lacks 1 core and 2 GiB ("),
        ] {
            let text = of(core, memory).to_string();
            assert!(text.contains(lacks), "{lacks}: {text}");
        }
        let too_much = of(200, 0);
        assert!(too_much.gpus.is_empty() && too_much.reason.contains("2 whole GPU(s) asked, 1 free"));
        assert!(too_much.to_string().contains("carries 2 shares"), "{too_much}");
    }

    #[test]
    fn a_share_says_why_it_is_where_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = NodeFile::default();
        file.paths.state = folder.path().into();
        let inventory = testing::inventory("boot", vec![gpu(1), gpu(2)]);
        inventory.store(&file.paths.inventory()).unwrap();
        let ledger = ledger::Ledger::open(&file.paths.shares()).unwrap();
        let bind = |pod: &str, core, prefer: &[GpuUuid]| {
            let pod = ledger::PodRef {
                uid: format!("uid-{pod}"),
                namespace: "ns".into(),
                name: pod.into(),
                sandbox_id: "s".into(),
            };
            let container = ledger::ContainerRef { name: "main".into(), id: "c".into() };
            let request = Request::new(core, 4).unwrap();
            let claim = ledger::Claim {
                pod,
                container,
                request,
                terms: ledger::Terms::default(),
                wishes: Wishes::default(),
            };
            ledger.bind(&inventory, &claim, prefer, |_, _| Ok(())).unwrap();
        };
        bind("a", 80, &[gpu(2).uuid]);
        bind("b", 30, &[gpu(2).uuid]);
        let of =
            |pod: &str| shares_of(&file, pod).unwrap().iter().map(ToString::to_string).collect::<String>();
        assert!(of("ns/a").contains("asked for"), "{}", of("ns/a"));
        assert!(of("uid-b").contains("the fullest") && of("b").contains("has 20 core"), "{}", of("b"));
        assert!(matches!(shares_of(&file, "c"), Err(StatusError::NoSuchPod(_))));
    }
}
