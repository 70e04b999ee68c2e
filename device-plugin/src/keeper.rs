//! Keeps three things in step with what NVML and the ledger say: the inventory on disk, the CDI spec, and what kubelet
//! is offered. Each step looks at everything anew and changes what differs, so it does not matter what called for it.

use std::{collections::BTreeSet, fs::DirBuilder, os::unix::fs::DirBuilderExt, path::Path, sync::Arc};

use daemon::Told;
use ledger::{Inventory, Shares};
use rustix::fs::{Access, access};
use tokio::sync::watch;
use tracing::{debug, error, info, warn};
use vcuda_config::{GpuUuid, NodeFile, NodeGpus, in_one_line};

use crate::{
    fatal::Fatal,
    kubelet::EnsureCdi,
    node::Node,
    nvml::{Found, Survey},
    offer::{Offer, Resource},
    withdraw::{self, CheckpointError},
};

/// What is kept in step, and with what.
pub(crate) struct Keeper {
    file: NodeFile,
    boot_id: String,
    /// Ending is wanted where there is nothing to offer at the start.
    fail_without_driver: bool,
    ensure_cdi: Arc<EnsureCdi>,
    offer: watch::Sender<Arc<Offer>>,
    /// What the cluster is told.
    tell: watch::Sender<Option<Arc<NodeGpus>>>,
    /// GPUs that take no new share, as an administrator last said.
    cordon: BTreeSet<GpuUuid>,
    node: Option<Node>,
    /// The inventory was on disk once.
    stored: bool,
    /// The CDI spec was there once.
    spec_made: bool,
    /// What was said about what is missing, about the inventory, and about the CDI spec.
    told: Told,
    told_inventory: Told,
    told_spec: Told,
    told_checkpoint: bool,
}

impl Keeper {
    pub(crate) fn new(
        file: NodeFile,
        boot_id: String,
        fail_without_driver: bool,
        ensure_cdi: Arc<EnsureCdi>,
        offer: watch::Sender<Arc<Offer>>,
        tell: watch::Sender<Option<Arc<NodeGpus>>>,
    ) -> Self {
        // A cordon holds until the API server says otherwise, whoever is restarted.
        let cordon = Inventory::load(&file.paths.inventory()).map(|last| last.cordoned.into_iter().collect());
        Self {
            cordon: cordon.unwrap_or_default(),
            tell,
            file,
            boot_id,
            fail_without_driver,
            ensure_cdi,
            offer,
            node: None,
            stored: false,
            spec_made: false,
            told: Told::default(),
            told_inventory: Told::default(),
            told_spec: Told::default(),
            told_checkpoint: false,
        }
    }

    /// Takes in the last survey. It may block for a disk. True when everything is in place for kubelet to be told.
    pub(crate) fn step(
        &mut self,
        survey: &Survey,
        cordon: Option<&BTreeSet<GpuUuid>>,
    ) -> Result<bool, Fatal> {
        if let Some(cordon) = cordon.filter(|cordon| **cordon != self.cordon) {
            info!(?cordon, "GPUs that take no new share, by the node's annotation");
            self.cordon.clone_from(cordon);
        }
        let Some(mut node) = self.look(survey)? else { return Ok(false) };
        node.inventory.cordoned = self.cordon.iter().cloned().collect();
        self.tell_changes(&node);
        // While there is no driver, the last one's is as good as any.
        let driver_there = matches!(survey, Survey::Found(_));
        let ready =
            self.store(&node.inventory)? & if driver_there { self.make_spec() } else { self.spec_made };
        let withdrawn = self.withdrawn(&node.inventory);
        let offer = Offer::new(node.gpus.clone(), withdrawn);
        let told = node.inventory.node_gpus(node.inventory.groups.clone());
        self.tell(told);
        self.node = Some(node);
        self.offer.send_if_modified(|last| {
            let changed = **last != offer;
            if changed {
                *last = Arc::new(offer);
            }
            changed
        });
        Ok(ready)
    }

    fn tell(&self, gpus: NodeGpus) {
        self.tell.send_if_modified(|last| {
            let changed = last.as_deref() != Some(&gpus);
            if changed {
                *last = Some(Arc::new(gpus));
            }
            changed
        });
    }

    /// The node of this moment; none as long as it has never had anything to offer.
    fn look(&mut self, survey: &Survey) -> Result<Option<Node>, Fatal> {
        let found = match (survey, &self.node) {
            (Survey::Pending, _) => return Ok(None),
            (Survey::NoDriver(reason), Some(node)) => return Ok(Some(node.clone().without_driver(reason))),
            (Survey::NoDriver(reason), None) => {
                return self.nothing(Fatal::NoDriver(reason.clone())).map(|()| None);
            }
            (Survey::Found(found), _) => found,
        };
        let node = Node::new(
            found,
            &self.file.paths.driver_root,
            &self.file.gpus,
            &self.boot_id,
            self.node.as_ref(),
        );
        if node.gpus.is_empty() {
            return self.nothing(Fatal::NoGpu(why_nothing(found, &node))).map(|()| None);
        }
        Ok(Some(node))
    }

    fn nothing(&mut self, why: Fatal) -> Result<(), Fatal> {
        if self.fail_without_driver {
            return Err(why);
        }
        // What the cluster was told before the last boot is no longer true.
        self.tell(NodeGpus::new(Vec::new(), Vec::new()));
        let why = why.to_string();
        if self.told.is_news(&why) {
            warn!("{why}; waiting for it, nothing is offered to kubelet until then");
        } else {
            debug!("still nothing to offer");
        }
        Ok(())
    }

    fn tell_changes(&mut self, node: &Node) {
        let before = self.node.as_ref();
        if before.is_none() {
            self.told.forget();
            info!(driver = node.inventory.driver.version, gpus = node.gpus.len(), "driver found");
        }
        for (gpu, why) in &node.left_alone {
            if before.is_none_or(|before| before.left_alone.get(gpu) != Some(why)) {
                info!(%gpu, why, "left alone");
            }
        }
        for (gpu, offered) in node.inventory.gpus.iter().zip(&node.gpus) {
            let known = before.and_then(|before| before.gpus.iter().find(|known| known.uuid == gpu.uuid));
            if known.is_none() {
                info!(gpu = %gpu.uuid, name = gpu.name, memory_units = gpu.memory_units, "on offer");
            }
            let trouble_before = known.and_then(|known| known.trouble.as_ref());
            match &offered.trouble {
                Some(why) if trouble_before != Some(why) => {
                    let on_it = self.shares_on(&gpu.uuid);
                    warn!(gpu = %gpu.uuid, why, running = on_it, "takes no new shares")
                }
                None if trouble_before.is_some() => info!(gpu = %gpu.uuid, "healthy again"),
                _ => {}
            }
        }
    }

    /// Shares on a GPU, for the log.
    fn shares_on(&self, gpu: &GpuUuid) -> String {
        let shares = Shares::read(&self.file.paths.shares()).unwrap_or_default();
        let on_it =
            shares.records.values().filter(|record| record.gpus.iter().any(|share| share.uuid == *gpu));
        let named = on_it.map(|it| format!("{}/{} {}", it.pod.namespace, it.pod.name, it.container.name));
        named.collect::<Vec<_>>().join(", ")
    }

    /// Sees to it that the inventory is on disk, whoever has removed it. What is there already needs no room. False when it must
    /// be tried again.
    fn store(&mut self, inventory: &Inventory) -> Result<bool, Fatal> {
        let path = self.file.paths.inventory();
        let there = Inventory::load(&path).is_ok_and(|there| there == *inventory);
        match if there { Ok(()) } else { inventory.store(&path) } {
            Ok(()) => {
                self.stored = true;
                self.told_inventory.forget();
                Ok(true)
            }
            Err(source) if !self.stored => {
                Err(Fatal::Unwritable { key: "paths.state", path: self.file.paths.state.clone(), source })
            }
            Err(error) => {
                let error = error.to_string();
                if self.told_inventory.is_news(&error) {
                    error!(path = %path.display(), error, "the inventory is out of date; trying again");
                }
                Ok(false)
            }
        }
    }

    /// Sees to it that the CDI spec is there and fits the driver, whoever has removed it: containers that start again need it,
    /// for which kubelet asks nobody. False when it must be tried again.
    fn make_spec(&mut self) -> bool {
        match (self.ensure_cdi)() {
            Ok(()) => {
                self.spec_made = true;
                self.told_spec.forget();
                true
            }
            Err(error) => {
                let error = in_one_line(error.as_ref());
                if self.told_spec.is_news(&error) {
                    let then = if self.spec_made {
                        "the CDI spec is out of date; trying again"
                    } else {
                        "no CDI spec; trying again, kubelet is told of the GPUs when there is one"
                    };
                    error!(error, "{then}");
                }
                false
            }
        }
    }

    fn withdrawn(&mut self, inventory: &Inventory) -> BTreeSet<(Resource, vcuda_config::DeviceId)> {
        let shares = match Shares::read(&self.file.paths.shares()) {
            Ok(shares) => shares,
            Err(error) => {
                debug!(%error, "shares cannot be read, so nothing is withdrawn");
                return BTreeSet::new();
            }
        };
        // A share that cannot be read holds nobody knows what; the NRI plugin refuses new ones and says why.
        let useless = withdraw::useless(&inventory.gpus, &self.cordon, shares.records.values());
        if useless.is_empty() || !shares.unreadable.is_empty() {
            return BTreeSet::new();
        }
        match withdraw::taken(&self.file.paths.kubelet, &self.file.resources) {
            Ok(taken) => withdraw::withdraw(&useless, &taken),
            Err(error @ CheckpointError::Invalid { .. }) => {
                if !std::mem::replace(&mut self.told_checkpoint, true) {
                    warn!(%error, "kubelet's checkpoint is not understood, so nothing is withdrawn");
                }
                BTreeSet::new()
            }
            Err(error @ CheckpointError::Read { .. }) => {
                debug!(%error, "nothing is withdrawn");
                BTreeSet::new()
            }
        }
    }
}

fn why_nothing(found: &Found, node: &Node) -> String {
    let alone = node.left_alone.iter().map(|(gpu, why)| format!("{gpu} is left alone: {why}"));
    let mut reasons: Vec<_> = alone.chain(found.silent.clone()).collect();
    if reasons.is_empty() {
        reasons.push("NVML sees no GPU on this node; see `lspci -d 10de:` and the kernel log".into());
    }
    reasons.join("; ")
}

/// Makes sure of a folder and that it can be written: at the start, before there is a driver, so that it shows on a
/// node whose driver comes late, too.
pub(crate) fn check_writable(key: &'static str, path: &Path, mode: u32) -> Result<(), Fatal> {
    let made = DirBuilder::new().recursive(true).mode(mode).create(path);
    made.and_then(|()| Ok(access(path, Access::WRITE_OK | Access::EXEC_OK)?))
        .map_err(|source| Fatal::Unwritable { key, path: path.into(), source })
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt};

    use ledger::Driver;

    use super::*;
    use crate::nvml::SeenGpu;

    fn survey() -> Survey {
        let gpu = SeenGpu {
            uuid: GpuUuid::from_bytes([1; 16]),
            name: "H100".into(),
            minor: 0,
            total_bytes: 80 << 30,
            capability: Some(90),
            numa_node: None,
            pci_bus_id: "00000000:01:00.0".into(),
            mig: false,
            trouble: None,
        };
        let driver = Driver { version: "550.163.01".into(), library_dir: "/usr/lib64".into() };
        Survey::Found(Found { driver, gpus: vec![gpu], silent: None, groups: Vec::new() })
    }

    fn keeper(folder: &Path) -> Keeper {
        let mut file = NodeFile::default();
        file.paths.state = folder.into();
        file.paths.driver_root = folder.join("driver");
        let spec = folder.join("spec");
        let ensure: Arc<EnsureCdi> = Arc::new(move || Ok(fs::write(&spec, "")?));
        let (offer, tell) = (watch::channel(Arc::default()).0, watch::channel(None).0);
        Keeper::new(file, "boot".into(), false, ensure, offer, tell)
    }

    /// A container that starts again needs both, and nobody calls for them: kubelet has the answer to Allocate.
    #[test]
    fn what_was_removed_or_spoiled_is_made_again_with_the_next_step() {
        let folder = tempfile::tempdir().unwrap();
        let (inventory, spec) = (folder.path().join("inventory.json"), folder.path().join("spec"));
        let mut keeper = keeper(folder.path());
        assert!(keeper.step(&survey(), None).unwrap());
        let whole = fs::read(&inventory).unwrap();
        fs::write(&inventory, &whole[..whole.len() / 2]).unwrap();
        fs::remove_file(&spec).unwrap();
        assert!(keeper.step(&survey(), None).unwrap());
        assert!(fs::read(&inventory).unwrap() == whole && spec.exists());
    }

    /// Also where it hangs, see `nvml::Surveyor::now`.
    #[test]
    fn while_the_driver_does_not_answer_its_gpus_take_nothing_and_the_last_spec_stays() {
        let folder = tempfile::tempdir().unwrap();
        let mut keeper = keeper(folder.path());
        assert!(keeper.step(&survey(), None).unwrap());
        let spec = folder.path().join("spec");
        fs::remove_file(&spec).unwrap();
        assert!(keeper.step(&Survey::NoDriver("it hangs".into()), None).unwrap());
        let inventory = Inventory::load(&folder.path().join("inventory.json")).unwrap();
        assert!(!inventory.gpus[0].healthy && !spec.exists());
        assert!(keeper.node.as_ref().unwrap().gpus[0].trouble.as_ref().unwrap().contains("it hangs"));
    }

    /// So a plugin that is started again on a full disk serves as before.
    #[test]
    fn an_inventory_that_is_right_is_not_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let inode = || fs::metadata(folder.path().join("inventory.json")).unwrap().ino();
        keeper(folder.path()).step(&survey(), None).unwrap();
        let first = inode();
        keeper(folder.path()).step(&survey(), None).unwrap();
        assert_eq!(inode(), first);
    }
}
