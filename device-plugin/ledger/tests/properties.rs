//! Whatever is bound, stopped, ended, refused or interrupted, in any order: no GPU is promised twice, and the folder
//! is the whole truth.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

mod common;

use std::{collections::BTreeMap, fs, io, num::NonZeroU32};

use common::{UNITS, assert_not_overpromised, claim, inventory};
use ledger::{
    BindError, Change, ChangeError, Ledger, Live, PodLife, SandboxEnd, ShareKind, ShareName, ShareRecord,
    ShareState,
};
use proptest::prelude::*;
use region::Slots;
use vcuda_config::{GpuUuid, Request};

#[derive(Clone, Debug)]
enum Step {
    Bind {
        pod: u32,
        container: u32,
        core: u32,
        units: u32,
        prefer: u8,
    },
    /// The share's files cannot be made.
    Fail {
        pod: u32,
        container: u32,
    },
    Stop {
        pod: u32,
        container: u32,
    },
    /// An event about an earlier container of the same name.
    LateStop {
        pod: u32,
        container: u32,
    },
    EndSandbox {
        pod: u32,
        removed: bool,
    },
    Prune {
        alive: Vec<u32>,
        ended: Vec<u32>,
    },
    /// An operator changes what a share holds; its container may not be told.
    Change {
        pod: u32,
        container: u32,
        change: Change,
        told: bool,
    },
    /// Everything is forgotten but the folder, where a killed process left something. An upgraded one finds shares
    /// without slots.
    Restart {
        reboot: bool,
        upgrade: bool,
    },
    Health {
        gpu: usize,
        healthy: bool,
    },
}

fn change() -> impl Strategy<Value = Change> {
    (prop::option::of(0..=101_u32), prop::option::of(1..=UNITS + 1), prop::option::of(1..=101_u32)).prop_map(
        |(core, units, core_limit)| Change {
            core,
            memory_units: units.and_then(NonZeroU32::new),
            core_limit,
        },
    )
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pod = 0..6_u32;
    let container = 0..3_u32;
    let whole = prop_oneof![Just(100_u32), Just(200)];
    let core = prop_oneof![4 => 1..100_u32, 1 => whole];
    let step = prop_oneof![
        8 => (pod.clone(), container.clone(), core, 1..=UNITS, 0..5_u8)
            .prop_map(|(pod, container, core, units, prefer)| Step::Bind { pod, container, core, units, prefer }),
        1 => (pod.clone(), container.clone()).prop_map(|(pod, container)| Step::Fail { pod, container }),
        3 => (pod.clone(), container.clone()).prop_map(|(pod, container)| Step::Stop { pod, container }),
        1 => (pod.clone(), container.clone()).prop_map(|(pod, container)| Step::LateStop { pod, container }),
        2 => (pod.clone(), any::<bool>()).prop_map(|(pod, removed)| Step::EndSandbox { pod, removed }),
        1 => (prop::collection::vec(pod.clone(), 0..6), prop::collection::vec(pod.clone(), 0..3))
            .prop_map(|(alive, ended)| Step::Prune { alive, ended }),
        3 => (pod, container, change(), any::<bool>())
            .prop_map(|(pod, container, change, told)| Step::Change { pod, container, change, told }),
        1 => (any::<bool>(), any::<bool>())
            .prop_map(|(reboot, upgrade)| Step::Restart { reboot, upgrade }),
        1 => (0..3_usize, any::<bool>()).prop_map(|(gpu, healthy)| Step::Health { gpu, healthy }),
    ];
    prop::collection::vec(step, 1..60)
}

/// An empty list of the runtime's, made after all that the test has done so far.
fn listed() -> Live {
    Live { taken_at: ledger::uptime_ms() + 1, ..Live::default() }
}

/// What the folder should say.
type Model = BTreeMap<ShareName, ShareRecord>;

fn run(steps: Vec<Step>) {
    let folder = tempfile::tempdir().unwrap();
    let shares = folder.path().join("shares");
    let mut inventory = inventory(3);
    let mut boot = 0;
    let mut attempt = 0;
    let mut ledger = Ledger::open_in_boot(&shares, format!("boot-{boot}")).unwrap();
    let mut model = Model::new();

    for step in steps {
        match step {
            Step::Bind { pod, container, core, units, prefer } => {
                attempt += 1;
                let claim = claim(pod, boot, container, attempt, Request::new(core, units).unwrap());
                let prefer = [GpuUuid::from_bytes([prefer; 16])];
                let before =
                    model.get(&ShareName::new(&claim.pod.uid, &claim.container.name).unwrap()).cloned();
                match ledger.bind(&inventory, &claim, &prefer, |_, folder| fs::write(folder.limits(), "x")) {
                    Ok(bound) => {
                        for gpu in &bound.record.gpus {
                            assert!(inventory.gpu(&gpu.uuid).unwrap().healthy, "placed on an unhealthy GPU");
                        }
                        assert!(before.is_none() || bound.gave_way.is_empty());
                        if let (Some(before), Request::Share { core, .. }) = (&before, claim.request)
                            && before.kind == ShareKind::Share
                        {
                            let (was, is) = (&before.gpus[0], &bound.record.gpus[0]);
                            assert_eq!(bound.record.set, before.set, "what was set stays");
                            assert_eq!(is.core, before.set.core.unwrap_or(core));
                            assert!((&was.uuid, was.core) != (&is.uuid, is.core) || was.slots == is.slots);
                        }
                        for name in &bound.gave_way {
                            let given = model.remove(name).unwrap();
                            assert_eq!(given.state, ShareState::Stopped);
                            assert_eq!(given.pod.uid, claim.pod.uid);
                        }
                        assert!(bound.folder.limits().exists());
                        model.insert(bound.name, bound.record);
                    }
                    Err(BindError::NoRoom(no_room)) => assert!(!no_room.lacks.is_empty()),
                    Err(other) => panic!("{other}"),
                }
            }
            Step::Fail { pod, container } => {
                let claim = claim(pod, boot, container, u32::MAX, Request::new(1, 1).unwrap());
                let full = |_: &ShareRecord, _: &ledger::ShareFolder| Err(io::Error::other("no space left"));
                assert!(ledger.bind(&inventory, &claim, &[], full).is_err());
            }
            Step::Stop { pod, container } => {
                let name = ShareName::new(&format!("pod-{pod}"), &format!("c{container}")).unwrap();
                if let Some(record) = model.get_mut(&name) {
                    assert_eq!(ledger.mark_stopped(&record.container.id).unwrap(), Some(name));
                    record.state = ShareState::Stopped;
                }
            }
            Step::LateStop { pod, container } => {
                assert_eq!(ledger.mark_stopped(&format!("{pod}-{container}-0")).unwrap(), None);
            }
            Step::EndSandbox { pod, removed } => {
                let sandbox = format!("sandbox-{pod}-{boot}");
                let end = if removed { SandboxEnd::Removed } else { SandboxEnd::Stopped };
                let released = ledger.end_sandbox(&sandbox, end).unwrap();
                let expected: Vec<_> = model
                    .iter()
                    .filter(|(_, record)| record.pod.sandbox_id == sandbox)
                    .map(|(name, _)| name.clone())
                    .collect();
                assert_eq!(released, expected);
                model.retain(|_, record| record.pod.sandbox_id != sandbox);
            }
            Step::Prune { alive, ended } => {
                let mut live = listed();
                live.pods.extend(ended.iter().map(|pod| (format!("pod-{pod}"), PodLife::Ended)));
                live.pods.extend(alive.iter().map(|pod| (format!("pod-{pod}"), PodLife::Up)));
                let this_boot = format!("boot-{boot}");
                let keeps = |record: &ShareRecord| match live.pods.get(&record.pod.uid) {
                    None => false,
                    Some(PodLife::Ended) => record.boot_id != this_boot,
                    Some(PodLife::Up) => true,
                };
                ledger.prune(&live).unwrap();
                model.retain(|_, record| keeps(record));
                // Shares of this boot are too young to be missed, see the grace; those of an earlier one are not.
                for record in model.values_mut().filter(|record| record.boot_id != this_boot) {
                    record.state = ShareState::Stopped;
                }
            }
            Step::Change { pod, container, change, told } => {
                let name = ShareName::new(&format!("pod-{pod}"), &format!("c{container}")).unwrap();
                let tell = |record: &ShareRecord, _: &ledger::ShareFolder| {
                    assert_eq!(ledger.shares().unwrap().records[&name], *record, "it is recorded first");
                    if told { Ok(()) } else { Err(io::Error::other("gone")) }
                };
                match ledger.change(&inventory, &name, change, tell) {
                    Ok(changed) => {
                        assert!(told);
                        assert_eq!(model.insert(name, changed.after), Some(changed.before));
                    }
                    Err(ChangeError::Apply { .. }) => {
                        assert!(!told);
                        let record = ledger.shares().unwrap().records[&name].clone();
                        model.insert(name, record);
                    }
                    Err(ChangeError::Unknown(_)) => assert!(!model.contains_key(&name)),
                    Err(ChangeError::Whole) => assert_eq!(model[&name].kind, ShareKind::Whole),
                    Err(ChangeError::NoRoom { core, memory_bytes, .. }) => {
                        let was = &model[&name].gpus[0];
                        let grows = |now: Option<u64>, was: u64, free: u64| {
                            now.is_some_and(|now| now > was && now > free)
                        };
                        let units = change.memory_units.map(|units| u64::from(units.get()) << 28);
                        assert!(
                            grows(change.core.map(u64::from), was.core.into(), core.into())
                                || grows(units, was.memory_bytes, memory_bytes)
                        );
                    }
                    Err(ChangeError::Amount { .. }) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            Step::Restart { reboot, upgrade } => {
                boot += u32::from(reboot);
                for (name, record) in model.iter_mut().filter(|_| upgrade) {
                    record.gpus.iter_mut().for_each(|gpu| gpu.slots = Slots::NONE);
                    let file = ledger::ShareFolder::new(&shares, name).record();
                    fs::write(file, serde_json::to_vec(record).unwrap()).unwrap();
                }
                fs::create_dir(shares.join(format!(".pod-0.{attempt}.new"))).unwrap();
                fs::create_dir(shares.join(format!(".pod-0.{attempt}.old"))).unwrap();
                ledger = Ledger::open_in_boot(&shares, format!("boot-{boot}")).unwrap();
                let hidden = fs::read_dir(&shares).unwrap();
                let hidden = hidden
                    .filter(|entry| entry.as_ref().unwrap().file_name().as_encoded_bytes().starts_with(b"."));
                assert_eq!(hidden.count(), 0, "leftovers of a killed process stay");
                for (name, record) in ledger.shares().unwrap().records.into_iter().filter(|_| upgrade) {
                    model.get_mut(&name).unwrap().gpus = record.gpus;
                }
            }
            Step::Health { gpu, healthy } => inventory.gpus[gpu].healthy = healthy,
        }
        let now = ledger.shares().unwrap();
        assert!(now.unreadable.is_empty() && now.foreign.is_empty());
        assert_eq!(now.records, model);
        assert_not_overpromised(&now, &inventory);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn no_gpu_is_promised_twice_and_the_folder_is_the_truth(steps in steps()) {
        run(steps);
    }
}
