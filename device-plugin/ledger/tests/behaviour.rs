//! What the ledger promises to pods, case by case.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

mod common;

use std::{
    fs, io,
    os::unix::fs::{PermissionsExt, symlink},
};

use common::{assert_not_overpromised, claim, inventory};
use ledger::{
    BindError, Bound, Change, ChangeError, Claim, Inventory, Ledger, Live, PodLife, SandboxEnd, ShareFolder,
    ShareName, ShareState,
};
use tempfile::TempDir;
use vcuda_config::{GpuUuid, Request};

fn share(core: u32, units: u32) -> Request {
    Request::new(core, units).unwrap()
}

fn open() -> (TempDir, Ledger) {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger::open_in_boot(&folder.path().join("shares"), "boot".into()).unwrap();
    (folder, ledger)
}

fn bind(ledger: &Ledger, inventory: &Inventory, claim: &Claim) -> Result<Bound, BindError> {
    ledger.bind(inventory, claim, &[], |_, _| Ok(()))
}

fn minor(bound: &Bound) -> u32 {
    bound.record.gpus[0].minor
}

/// An empty list of the runtime's, made after all that the test has done so far.
fn listed() -> Live {
    Live { taken_at: ledger::uptime_ms() + 1, ..Live::default() }
}

#[test]
fn a_restarted_container_keeps_its_gpu_and_gets_fresh_files() {
    let (_folder, ledger) = open();
    let inventory = inventory(3);
    let on = GpuUuid::from_bytes([2; 16]);
    let fill = |_: &_, folder: &ledger::ShareFolder| fs::write(folder.preload(), "first");
    let first = ledger.bind(&inventory, &claim(1, 0, 0, 1, share(20, 4)), &[on], fill).unwrap();
    assert_eq!(minor(&first), 2);
    ledger.mark_stopped(&first.record.container.id).unwrap();

    let second = ledger
        .bind(&inventory, &claim(1, 0, 0, 2, share(20, 4)), &[GpuUuid::from_bytes([0; 16])], |_, _| Ok(()))
        .unwrap();
    assert_eq!((minor(&second), second.record.state), (2, ShareState::Running));
    assert!(!second.folder.preload().exists(), "files of the earlier container are gone");
    assert_eq!(ledger.mark_stopped(&first.record.container.id).unwrap(), None, "a late event finds nothing");
    assert_eq!(ledger.shares().unwrap().records[&second.name].state, ShareState::Running);
}

#[test]
fn a_share_outlives_a_reboot_until_its_pod_is_gone() {
    let (folder, ledger) = open();
    let inventory = inventory(2);
    let on = [GpuUuid::from_bytes([1; 16])];
    let bound = ledger.bind(&inventory, &claim(1, 0, 0, 1, share(60, 4)), &on, |_, _| Ok(())).unwrap();
    drop(ledger);

    let ledger = Ledger::open_in_boot(&folder.path().join("shares"), "next boot".into()).unwrap();
    let live = Live { pods: [("pod-1".to_owned(), PodLife::Ended)].into(), ..listed() };
    assert_eq!(ledger.prune(&live).unwrap().stopped, std::slice::from_ref(&bound.name));
    assert!(ledger.end_sandbox("sandbox-1-0", SandboxEnd::Stopped).unwrap().is_empty());
    // Another pod comes first and finds the GPU held.
    assert_eq!(minor(&bind(&ledger, &inventory, &claim(2, 0, 0, 1, share(60, 4))).unwrap()), 0);
    let again = bind(&ledger, &inventory, &claim(1, 1, 0, 2, share(60, 4))).unwrap();
    assert_eq!(minor(&again), 1);
    // The old sandbox is collected late, and takes nothing along.
    assert!(ledger.end_sandbox("sandbox-1-0", SandboxEnd::Removed).unwrap().is_empty());
    assert_eq!(ledger.prune(&listed()).unwrap().released.len(), 2);
}

#[test]
fn an_init_containers_share_gives_way_but_a_restart_takes_nothing() {
    let (_folder, ledger) = open();
    let inventory = inventory(1);
    let init = bind(&ledger, &inventory, &claim(1, 0, 0, 1, share(80, 4))).unwrap();
    let error = bind(&ledger, &inventory, &claim(1, 0, 1, 1, share(80, 4))).unwrap_err();
    assert!(matches!(error, BindError::NoRoom(_)), "a running one does not give way");
    ledger.mark_stopped(&init.record.container.id).unwrap();
    let error = bind(&ledger, &inventory, &claim(2, 0, 0, 1, share(80, 4))).unwrap_err();
    assert!(matches!(error, BindError::NoRoom(_)), "another pod does not get it");
    let main = bind(&ledger, &inventory, &claim(1, 0, 1, 1, share(80, 4))).unwrap();
    assert_eq!(main.gave_way, [init.name]);

    bind(&ledger, &inventory, &claim(1, 0, 2, 1, share(20, 4))).unwrap();
    ledger.mark_stopped(&main.record.container.id).unwrap();
    let side = bind(&ledger, &inventory, &claim(1, 0, 2, 2, share(20, 4))).unwrap();
    assert!(side.gave_way.is_empty(), "a restarting container leaves its stopped neighbour alone");
}

#[test]
fn an_ended_sandbox_gives_its_shares_back() {
    let (_folder, ledger) = open();
    let inventory = inventory(1);
    let bound = bind(&ledger, &inventory, &claim(1, 0, 0, 1, share(100, 0))).unwrap();
    assert_eq!(bound.record.gpus[0].memory_bytes, inventory.gpus[0].usable_bytes());
    assert!(!bound.record.shim);
    assert!(bind(&ledger, &inventory, &claim(2, 0, 0, 1, share(1, 1))).is_err());
    assert_eq!(ledger.end_sandbox("sandbox-1-0", SandboxEnd::Stopped).unwrap(), [bound.name]);
    assert!(bind(&ledger, &inventory, &claim(2, 0, 0, 1, share(1, 1))).is_ok());
}

#[test]
fn what_cannot_be_read_is_named_and_nothing_is_free_beside_it() {
    let (folder, ledger) = open();
    let inventory = inventory(2);
    let shares = folder.path().join("shares");
    let kept = bind(&ledger, &inventory, &claim(1, 0, 0, 1, share(10, 1))).unwrap();
    for (name, content) in [
        ("pod-2_main", "{\"version\":1,\"pod\""),
        ("pod-3_main", "{\"version\":9}"),
        ("pod-4_main", ""),
        ("pod-5_main", "[]"),
    ] {
        fs::create_dir(shares.join(name)).unwrap();
        fs::write(shares.join(name).join("share.json"), content).unwrap();
    }
    fs::create_dir(shares.join("pod-6_main")).unwrap();
    fs::write(shares.join("pod-7_main"), "a file").unwrap();
    fs::write(shares.join("README"), "foreign").unwrap();

    let now = ledger.shares().unwrap();
    assert_eq!(now.records.len(), 1);
    assert_eq!(now.unreadable.len(), 6);
    assert_eq!(now.foreign, [shares.join("README")]);
    let said: Vec<_> = now.unreadable.iter().map(ToString::to_string).collect();
    assert!(said.iter().any(|text| text.contains("pod-3_main") && text.contains("version 9")), "{said:?}");
    assert!(said.iter().all(|text| text.contains("remove") && text.contains("delete the pod")), "{said:?}");
    assert!(now.free(&inventory).is_err());

    let error = bind(&ledger, &inventory, &claim(8, 0, 0, 1, share(1, 1))).unwrap_err();
    assert!(matches!(error, BindError::Unreadable(_)), "{error}");

    // The runtime says which of them are gone; that heals it.
    let live = Live {
        pods: [("pod-1".to_owned(), PodLife::Up)].into(),
        containers: [kept.record.container.id].into(),
        ..listed()
    };
    assert_eq!(ledger.prune(&live).unwrap().released.len(), 6);
    assert!(bind(&ledger, &inventory, &claim(8, 0, 0, 1, share(1, 1))).is_ok());
}

#[test]
fn a_container_replaces_its_own_unreadable_record() {
    let (folder, ledger) = open();
    let inventory = inventory(1);
    let own = folder.path().join("shares/pod-1_c0");
    fs::create_dir(&own).unwrap();
    fs::write(own.join("share.json"), "{").unwrap();
    bind(&ledger, &inventory, &claim(1, 0, 0, 1, share(10, 1))).unwrap();
    assert!(ledger.shares().unwrap().unreadable.is_empty());
}

/// A loss of power may leave several records empty that were written last. Each alone keeps the others' containers from
/// being bound anew, so without the list none of them would ever start again.
#[test]
fn shares_that_a_loss_of_power_left_unreadable_do_not_keep_each_others_pods_from_starting() {
    let (folder, ledger) = open();
    let inventory = inventory(1);
    let bound = [1, 2].map(|pod| bind(&ledger, &inventory, &claim(pod, 0, 0, 1, share(40, 4))).unwrap());
    bound.iter().for_each(|bound| fs::write(bound.folder.record(), "").unwrap());
    drop(ledger);
    let ledger = Ledger::open_in_boot(&folder.path().join("shares"), "next boot".into()).unwrap();
    let error = bind(&ledger, &inventory, &claim(1, 1, 0, 2, share(40, 4))).unwrap_err();
    assert!(matches!(error, BindError::Unreadable(_)), "{error}");

    // Kubelet has their sandboxes, and no container of them runs.
    let pods = [("pod-1".to_owned(), PodLife::Ended), ("pod-2".to_owned(), PodLife::Up)];
    let pruned = ledger.prune(&Live { pods: pods.into(), ..listed() }).unwrap();
    assert_eq!(pruned.released.len(), 2);
    bind(&ledger, &inventory, &claim(1, 1, 0, 2, share(40, 4))).unwrap();
    bind(&ledger, &inventory, &claim(2, 1, 0, 2, share(40, 4))).unwrap();
    assert_not_overpromised(&ledger.shares().unwrap(), &inventory);
}

#[test]
fn an_unreadable_share_stays_as_long_as_its_container_may_run() {
    let (_folder, ledger) = open();
    let inventory = inventory(1);
    let bound = bind(&ledger, &inventory, &claim(1, 0, 0, 1, share(40, 4))).unwrap();
    fs::write(bound.folder.record(), "").unwrap();
    let live = Live {
        pods: [("pod-1".to_owned(), PodLife::Up)].into(),
        containers: [bound.record.container.id.clone()].into(),
        granted: [bound.name.clone()].into(),
        ..listed()
    };
    assert!(ledger.prune(&live).unwrap().released.is_empty());
    assert!(bind(&ledger, &inventory, &claim(2, 0, 0, 1, share(10, 1))).is_err());
    assert!(ledger.adopt(&bound.record, |_, _| Ok(())).unwrap(), "it is put back as it runs");
    bind(&ledger, &inventory, &claim(2, 0, 0, 1, share(10, 1))).unwrap();
}

/// A record cannot be written on a full disk, but a share can always be released: it is a rename.
#[test]
fn what_cannot_be_written_keeps_nothing_else_from_being_released() {
    let (_folder, ledger) = open();
    let inventory = inventory(1);
    let bound = [1, 2, 3].map(|pod| bind(&ledger, &inventory, &claim(pod, 0, 0, 1, share(20, 4))).unwrap());
    // Where the record of the second is written before it gets its name.
    let full = bound[1].folder.path().join(".share.json.new");
    fs::create_dir(&full).unwrap();
    let live = Live { pods: [("pod-2".to_owned(), PodLife::Up)].into(), complete: true, ..listed() };
    let pruned = ledger.prune(&live).unwrap();
    assert_eq!(pruned.released, [bound[0].name.clone(), bound[2].name.clone()]);
    assert!(pruned.stopped.is_empty());
    assert!(matches!(&pruned.failed[..], [error] if error.to_string().contains("pod-2_c0")));

    fs::remove_dir(&full).unwrap();
    let pruned = ledger.prune(&live).unwrap();
    assert!(pruned.failed.is_empty() && pruned.stopped == [bound[1].name.clone()], "{pruned:?}");
}

#[test]
fn of_a_sandbox_that_ended_all_is_released_that_can_be() {
    let (folder, ledger) = open();
    let inventory = inventory(1);
    let old = bind(&ledger, &inventory, &claim(1, 0, 0, 1, share(20, 4))).unwrap();
    drop(ledger);
    let ledger = Ledger::open_in_boot(&folder.path().join("shares"), "next boot".into()).unwrap();
    bind(&ledger, &inventory, &claim(1, 0, 1, 1, share(20, 4))).unwrap();
    fs::create_dir(old.folder.path().join(".share.json.new")).unwrap();
    let error = ledger.end_sandbox("sandbox-1-0", SandboxEnd::Stopped).unwrap_err();
    assert!(error.to_string().contains("pod-1_c0"), "{error}");
    let left: Vec<_> = ledger.shares().unwrap().records.into_keys().collect();
    assert_eq!(left, [old.name]);
}

#[test]
fn a_refused_share_leaves_nothing_behind() {
    let (folder, ledger) = open();
    let inventory = inventory(1);
    let error = ledger
        .bind(&inventory, &claim(1, 0, 0, 1, share(10, 1)), &[], |_, _| Err(io::Error::other("disk full")))
        .unwrap_err();
    assert!(error.to_string().contains("disk full"), "{error}");
    assert!(bind(&ledger, &inventory, &claim(1, 0, 0, 1, share(10, 41))).is_err());
    let record = bind(&ledger, &inventory, &claim(1, 0, 0, 1, share(10, 1))).unwrap().record;
    ledger.release(&record.name().unwrap()).unwrap();
    let error = ledger.adopt(&record, |_, _| Err(io::Error::other("disk full"))).unwrap_err();
    assert!(error.to_string().contains("disk full"), "{error}");
    assert_eq!(fs::read_dir(folder.path().join("shares")).unwrap().count(), 0);
}

/// Such as one in which something is mounted, or that a file system with errors does not let go of.
#[test]
#[ignore = "needs root"]
fn a_leftover_that_cannot_be_cleared_away_does_not_keep_the_ledger_closed() {
    let (folder, ledger) = open();
    drop(ledger);
    let shares = folder.path().join("shares");
    let stuck = shares.join(".pod-1.0.old/stuck");
    fs::create_dir_all(&stuck).unwrap();
    fs::create_dir(shares.join(".pod-2.0.new")).unwrap();
    rustix::mount::mount("none", &stuck, "tmpfs", rustix::mount::MountFlags::empty(), None).unwrap();
    let opened = Ledger::open_in_boot(&shares, "boot".into());
    rustix::mount::unmount(&stuck, rustix::mount::UnmountFlags::DETACH).unwrap();
    bind(&opened.unwrap(), &inventory(1), &claim(1, 0, 0, 1, share(10, 1))).unwrap();
    assert!(!shares.join(".pod-2.0.new").exists());
}

#[test]
fn hostile_names_are_refused() {
    let (_folder, ledger) = open();
    let mut claim = claim(1, 0, 0, 1, share(10, 1));
    claim.container.name = "../../etc".into();
    assert!(matches!(bind(&ledger, &inventory(1), &claim), Err(BindError::Name(_))));
}

#[test]
fn only_root_reads_the_ledger() {
    let (folder, ledger) = open();
    let bound = bind(&ledger, &inventory(1), &claim(1, 0, 0, 1, share(10, 1))).unwrap();
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&folder.path().join("shares")), 0o700);
    assert_eq!(mode(bound.folder.path()), 0o700);
    assert_eq!(mode(&bound.folder.record()), 0o600);
    ledger.sync(&[bound.name, ShareName::new("gone", "c").unwrap()]).unwrap();
}

#[test]
fn a_running_container_without_a_record_is_taken_back_in() {
    let (_folder, ledger) = open();
    let inventory = inventory(1);
    let bound = bind(&ledger, &inventory, &claim(1, 0, 0, 1, share(70, 4))).unwrap();
    assert!(!ledger.adopt(&bound.record, |_, _| Ok(())).unwrap(), "there is a record");
    ledger.release(&bound.name).unwrap();
    assert!(ledger.adopt(&bound.record, |_, _| Ok(())).unwrap());
    assert!(bind(&ledger, &inventory, &claim(2, 0, 0, 1, share(70, 4))).is_err());
    assert_not_overpromised(&ledger.shares().unwrap(), &inventory);
}

#[test]
fn two_processes_never_promise_the_same_gpu() {
    let (folder, first) = open();
    let second = Ledger::open_in_boot(&folder.path().join("shares"), "boot".into()).unwrap();
    let inventory = inventory(2);
    std::thread::scope(|scope| {
        for (at, ledger) in [&first, &second, &first, &second].into_iter().enumerate() {
            let inventory = &inventory;
            scope.spawn(move || {
                for n in 0..20 {
                    let pod = u32::try_from(at).unwrap() * 100 + n;
                    let _ = bind(ledger, inventory, &claim(pod, 0, 0, 1, share(15, 5)));
                }
            });
        }
    });
    let shares = first.shares().unwrap();
    assert_not_overpromised(&shares, &inventory);
    assert_eq!(shares.records.len(), 12, "6 shares of 15 core fit a GPU");
}

#[test]
fn a_list_says_nothing_about_what_was_bound_after_it_was_made() {
    let (_folder, ledger) = open();
    let live = Live { taken_at: ledger::uptime_ms(), ..Live::default() };
    let bound = bind(&ledger, &inventory(1), &claim(1, 0, 0, 1, share(10, 1))).unwrap();
    assert!(ledger.prune(&live).unwrap().released.is_empty());
    assert_eq!(ledger.prune(&listed()).unwrap().released, [bound.name]);
}

#[test]
fn a_share_bound_a_moment_before_the_list_was_made_goes_with_its_pod() {
    let (_folder, ledger) = open();
    let bound = bind(&ledger, &inventory(1), &claim(1, 0, 0, 1, share(10, 1))).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(2));
    let live = Live { taken_at: ledger::uptime_ms(), ..Live::default() };
    assert_eq!(ledger.prune(&live).unwrap().released, [bound.name]);
}

/// As NTP, or an administrator, sets it back by an hour: what was bound before has a time that is yet to come.
#[test]
fn a_share_goes_with_its_pod_although_the_clock_was_set_back_since() {
    let (_folder, ledger) = open();
    let bound = bind(&ledger, &inventory(1), &claim(1, 0, 0, 1, share(10, 1))).unwrap();
    let mut record = bound.record.clone();
    record.bound_at += 3_600_000;
    fs::write(bound.folder.record(), serde_json::to_vec(&record).unwrap()).unwrap();
    assert_eq!(ledger.prune(&listed()).unwrap().released, [bound.name]);

    // A day forward: it is no younger and no older than it is, so a list that may lack it does not end it.
    let bound = bind(&ledger, &inventory(1), &claim(2, 0, 0, 1, share(10, 1))).unwrap();
    let mut record = bound.record.clone();
    record.bound_at -= 24 * 3_600_000;
    fs::write(bound.folder.record(), serde_json::to_vec(&record).unwrap()).unwrap();
    let mut live = listed();
    live.pods.insert("pod-2".into(), PodLife::Up);
    assert_eq!(ledger.prune(&live).unwrap().unseen, [bound.name]);
}

/// The ledger, the container and whoever asked must agree on what holds.
#[test]
fn a_change_that_is_not_on_the_disk_yet_is_told_as_one_that_holds() {
    let (_folder, ledger) = open();
    let inventory = inventory(1);
    let bound = bind(&ledger, &inventory, &claim(1, 0, 0, 1, share(20, 4))).unwrap();
    let mut told = None;
    // What cannot be opened cannot be synced.
    let aside = |folder: &ShareFolder| {
        fs::rename(folder.record(), folder.path().join("aside")).unwrap();
        symlink("share.json", folder.record()).unwrap();
    };
    let change = Change { core: Some(40), ..Change::default() };
    let error = ledger.change(&inventory, &bound.name, change, |record, folder| {
        told = Some(record.gpus[0].core);
        aside(folder);
        Ok(())
    });
    let error = error.unwrap_err();
    assert!(matches!(error, ChangeError::Unsynced { .. }), "{error}");
    assert!(error.to_string().starts_with("the change holds"), "{error}");
    fs::rename(bound.folder.path().join("aside"), bound.folder.record()).unwrap();
    assert_eq!((told, ledger.shares().unwrap().records[&bound.name].gpus[0].core), (Some(40), 40));
}
