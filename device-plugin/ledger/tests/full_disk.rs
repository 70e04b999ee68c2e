//! A file system without room, at whatever write it ends: nothing is bound half, promised twice or lost, what can be given
//! back is, and all goes on when there is room again.

#![expect(clippy::unwrap_used, reason = "in a test an unwrap is an assertion")]

mod common;

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::MetadataExt,
    path::Path,
    process::Command,
};

use common::{assert_not_overpromised, claim, inventory};
use ledger::{BindError, Change, Inventory, Ledger, SandboxEnd, ShareFolder, ShareRecord, ShareState};
use region::Limits;
use vcuda_config::Request;

const PAGE: u64 = 4096;

/// A file system of 64 pages, gone at the end.
struct Disk(tempfile::TempDir);

impl Disk {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=256k,mode=0700", "full-disk"])
            .arg(folder.path())
            .status();
        assert!(mounted.unwrap().success());
        Self(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Leaves room for `pages`.
    fn fill(&self, pages: u64) {
        let mut file = File::create(self.path().join("filler")).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
        let written = file.metadata().unwrap().blocks() * 512;
        file.set_len(written.saturating_sub(pages * PAGE)).unwrap();
    }

    fn free(&self) {
        fs::remove_file(self.path().join("filler")).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.path()).status();
    }
}

/// What the NRI plugin lays into a share's folder, of a few pages.
fn fill(record: &ShareRecord, folder: &ShareFolder) -> io::Result<()> {
    Limits::create(&folder.limits(), &record.limits(false))?;
    fs::write(folder.preload(), "/a.so\n")
}

#[test]
#[ignore = "needs root"]
fn a_disk_that_is_full_at_any_write_costs_the_new_share_and_nothing_else() {
    let disk = Disk::new();
    let shares = disk.path().join("shares");
    let inventory = inventory(1);
    let ledger = Ledger::open_in_boot(&shares, "boot".into()).unwrap();
    let request = Request::new(30, 4).unwrap();
    let bind = |pod, attempt| ledger.bind(&inventory, &claim(pod, 0, 0, attempt, request), &[], fill);
    let first = bind(0, 0).unwrap();
    let (mut refused, mut bound) = (0, 0);
    for pages in 0..12 {
        disk.fill(pages);
        match bind(1, u32::try_from(pages).unwrap()) {
            Ok(_) => bound += 1,
            Err(error @ (BindError::Fill { .. } | BindError::Ledger(_))) => {
                let said = error.to_string();
                assert!(said.contains("No space left on device") && said.contains("has room"), "{said}");
                refused += 1;
                // One that was not made leaves nothing, be it of the next start.
                assert_eq!(fs::read_dir(&shares).unwrap().count(), 1);
            }
            Err(other) => panic!("{other}"),
        }
        let now = ledger.shares().unwrap();
        assert!(now.unreadable.is_empty() && now.records.contains_key(&first.name), "{:?}", now.unreadable);
        assert_not_overpromised(&now, &inventory);
        for name in now.records.keys() {
            assert!(ShareFolder::new(&shares, name).limits().exists(), "{name} has all its files");
        }
        // What ends is given back on a full disk, too: that takes no room.
        ledger.end_sandbox("sandbox-1-0", SandboxEnd::Stopped).unwrap();
        assert_eq!(ledger.shares().unwrap().records.len(), 1);
        disk.free();
    }
    assert!(refused > 1 && bound > 1, "{refused} refused, {bound} bound");
}

#[test]
#[ignore = "needs root"]
fn what_cannot_be_noted_on_a_full_disk_is_as_it_was_and_is_noted_later() {
    let disk = Disk::new();
    let shares = disk.path().join("shares");
    let inventory = inventory(1);
    let ledger = Ledger::open_in_boot(&shares, "boot".into()).unwrap();
    let bound = ledger.bind(&inventory, &claim(0, 0, 0, 0, Request::new(30, 4).unwrap()), &[], fill).unwrap();
    let path = disk.path().join("inventory.json");
    inventory.store(&path).unwrap();
    let other = Inventory { boot_id: "another".into(), ..inventory.clone() };
    let change = Change { core: Some(40), ..Change::default() };

    disk.fill(0);
    let error = ledger.mark_stopped(&bound.record.container.id).unwrap_err().to_string();
    assert!(error.contains("No space left on device"), "{error}");
    ledger.change(&inventory, &bound.name, change, |_, _| panic!("nothing was recorded")).unwrap_err();
    other.store(&path).unwrap_err();
    let record = ledger.shares().unwrap().records.remove(&bound.name).unwrap();
    assert_eq!((record.state, record.gpus[0].core), (ShareState::Running, 30));
    assert_eq!(Inventory::load(&path).unwrap(), inventory);
    // A process that starts now goes by what is there.
    let again = Ledger::open_in_boot(&shares, "boot".into()).unwrap();
    assert_eq!(again.shares().unwrap().records.len(), 1);

    disk.free();
    ledger.change(&inventory, &bound.name, change, |_, _| Ok(())).unwrap();
    assert!(ledger.mark_stopped(&bound.record.container.id).unwrap().is_some());
    other.store(&path).unwrap();
    let record = ledger.shares().unwrap().records.remove(&bound.name).unwrap();
    assert_eq!((record.state, record.gpus[0].core), (ShareState::Stopped, 40));
    assert_eq!(Inventory::load(&path).unwrap(), other);
    let names = fs::read_dir(disk.path()).unwrap().count();
    assert_eq!(names, 2, "no half file is left");
}
