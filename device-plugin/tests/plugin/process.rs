//! The real program where there is no driver: what it says, and with which code it ends.

use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
};

use ledger::{Driver, Inventory};
use rustix::process::Signal;

use crate::{
    PATIENCE,
    daemon::{Node, verdict},
};

#[test]
fn help_names_the_exit_codes_of_each_command() {
    let node = Node::new();
    for (arguments, codes) in [
        (&["--help"][..], &[0, 1, 2, 3, 4, 5, 6, 7][..]),
        (&["run", "--help"], &[0, 1, 2, 3, 4, 5, 6, 7]),
        (&["explain", "--help"], &[0, 1, 2, 3, 10]),
        (&["migrate", "--help"], &[0, 1, 2, 3, 4, 11]),
        (&["set", "--help"], &[0, 1, 2, 3, 8, 9]),
        (&["status", "--help"], &[0, 1, 2, 3]),
        (&["top", "--help"], &[0, 1, 2, 3]),
    ] {
        let help = String::from_utf8(node.run(arguments).stdout).unwrap();
        let (_, listed) = help.split_once("Exit codes:\n").unwrap();
        let listed = listed.lines().map_while(|line| line.split_whitespace().next()?.parse::<u8>().ok());
        assert_eq!(listed.collect::<Vec<_>>(), codes, "{help}");
    }
}

#[test]
fn what_cannot_be_answered_says_so_by_its_exit_code() {
    let node = Node::new();
    for (arguments, expected, text) in [
        (&["migrate"][..], 2, "--check"),
        (&["migrate", "--check", "--checkpoint", "/x", "--no-checkpoint"], 2, "cannot be used with"),
        (&["migrate", "--check"], 4, "the NVIDIA driver cannot be used"),
        (&["explain"], 2, "explain [OPTIONS] <POD | --core <PERCENT> [--memory <SIZE>]>"),
        (&["explain", "--core", "20", "--memory", "8GB"], 2, "such as 16GiB"),
        (&["explain", "--core", "20", "--memory", "8GiB"], 1, "inventory.json"),
        (&["explain", "--core", "150"], 10, "neither below 100"),
        (&["explain", "--core", "20", "--memory", "4"], 1, "inventory.json"),
        (&["explain", "ns/nobody"], 1, "inventory.json"),
        (&["nonsense"], 2, "nonsense"),
        (&["status", "-o", "yaml"], 2, "yaml"),
        (&["status"], 1, "vcuda-device-plugin: "),
        (&["top", "--count", "0"], 2, "--count"),
    ] {
        let output = node.run(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(expected), "{arguments:?}: {said}");
        assert!(said.contains(text) && output.stdout.is_empty(), "{arguments:?}: {said}");
    }
}

#[test]
fn a_wrong_node_file_is_named_with_its_key() {
    let node = Node::with("gpuz: {}");
    for arguments in [&["run"][..], &["status"]] {
        let (code, said) = verdict(&node.run(arguments));
        assert_eq!(code, Some(3), "{said}");
        assert!(said.contains("gpuz"), "{said}");
    }
}

#[test]
fn a_missing_driver_names_where_it_was_looked_for() {
    let node = Node::new();
    let (code, said) = verdict(&node.run(&["--fail-without-driver"]));
    assert_eq!(code, Some(4), "{said}");
    for part in [
        "the NVIDIA driver cannot be used",
        node.path("driver").to_str().unwrap(),
        "/usr/lib64",
        "paths.driverRoot",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn a_driver_that_is_none_is_named() {
    let node = Node::new();
    let folder = node.path("driver/usr/lib64");
    fs::create_dir_all(&folder).unwrap();
    for library in ["libcuda.so.550.1", "libnvidia-ml.so.550.1"] {
        fs::write(folder.join(library), "no library").unwrap();
    }
    let (code, said) = verdict(&node.run(&["--fail-without-driver"]));
    assert_eq!(code, Some(4), "{said}");
    assert!(said.contains("libcuda.so.550.1"), "{said}");
}

#[test]
fn a_missing_driver_is_waited_for_and_told_of_once() {
    let node = Node::new();
    let mut daemon = node.start();
    daemon.says("waiting for it");
    // A change of anything makes it look again.
    fs::create_dir_all(node.kubelet()).unwrap();
    daemon.says("still nothing to offer");
    assert_eq!(daemon.log().matches("the NVIDIA driver cannot be used").count(), 1);
    assert!(daemon.stop().success());
}

#[test]
fn every_signal_that_asks_for_an_end_gets_an_orderly_one() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let node = Node::new();
        let mut daemon = node.start();
        daemon.says("waiting for it");
        assert_eq!(daemon.end_with(signal).code(), Some(0), "{signal:?}");
    }
}

#[test]
fn a_second_instance_names_the_first() {
    let node = Node::new();
    let mut daemon = node.start();
    daemon.says("waiting for it");
    let (code, said) = verdict(&node.run(&["run"]));
    assert_eq!(code, Some(6), "{said}");
    assert!(said.contains("device-plugin.lock") && said.contains("stop it first"), "{said}");
    assert!(daemon.stop().success());
    let (code, said) = verdict(&node.run(&["run", "--fail-without-driver"]));
    assert_eq!(code, Some(4), "{said}");
}

#[test]
fn folders_that_cannot_be_written_are_named_with_their_key() {
    for (folder, key) in [("cdi", "paths.cdi"), ("state", "paths.state"), ("run", "paths.run")] {
        let node = Node::new();
        fs::write(node.path(folder), "a file in its place").unwrap();
        let (code, said) = verdict(&node.run(&["run"]));
        assert_eq!(code, Some(7), "{said}");
        assert!(said.contains(key) && said.contains("cannot be written"), "{said}");
    }
}

#[test]
fn status_without_an_inventory_says_who_writes_it() {
    let node = Node::new();
    let output = node.run(&["status", "-o", "json"]);
    let (code, said) = verdict(&output);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("inventory.json") && output.stdout.is_empty(), "{said}");
}

#[test]
fn set_says_by_its_exit_code_what_is_wrong() {
    let node = Node::new();
    let set = |more: &[&str]| {
        let arguments = [&["set", "--pod", "ns/train", "--container", "main"], more].concat();
        verdict(&node.run(&arguments))
    };
    assert_eq!(set(&[]).0, Some(2), "nothing to set");
    assert_eq!(set(&["--memory", "100MiB"]).0, Some(2), "no multiple");
    let (code, said) = set(&["--core", "40"]);
    assert!(code == Some(1) && said.contains("inventory.json"), "{said}");
    let driver = Driver { version: "550".into(), library_dir: "/usr/lib64".into() };
    fs::create_dir_all(node.path("state")).unwrap();
    Inventory::new("boot".into(), driver, vec![], vec![]).store(&node.path("state/inventory.json")).unwrap();
    let (code, said) = set(&["--core", "40"]);
    assert!(code == Some(8) && said.contains("ns/train") && said.contains("status"), "{said}");
    let help = String::from_utf8(node.run(&["set", "--help"]).stdout).unwrap();
    assert!(help.contains("kubelet and the scheduler go on counting") && help.contains("\n  9  "), "{help}");
}

#[test]
fn metrics_are_served_and_an_address_that_is_taken_costs_nothing_else() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let node = Node::with(&format!("metrics: {{listen: '{address}'}}\n"));
    let mut daemon = node.start();
    daemon.says("no metrics; free the address");
    daemon.says("waiting for it");
    drop(taken);
    daemon.says("serving metrics");
    let get = |path: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    assert!(get("/healthz").starts_with("HTTP/1.1 200"));
    // Nothing is known of the node's GPUs yet.
    let answer = get("/metrics");
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("inventory.json"), "{answer}");
    let driver = Driver { version: "550".into(), library_dir: "/usr/lib64".into() };
    Inventory::new("boot".into(), driver, vec![], vec![]).store(&node.path("state/inventory.json")).unwrap();
    let answer = get("/metrics");
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("\nvcuda_shares_unreadable 0\n"),
        "{answer}"
    );

    // Whoever opens connections and says nothing keeps nobody from reading, and costs a bounded number of open files.
    let idle: Vec<_> = (0..200).map(|_| TcpStream::connect(address).unwrap()).collect();
    assert!(get("/metrics").starts_with("HTTP/1.1 200"));
    let mut first = &idle[0];
    first.set_read_timeout(Some(PATIENCE)).unwrap();
    let closed = first.read(&mut [0]);
    let is_closed = |error: &std::io::Error| error.kind() == ErrorKind::ConnectionReset;
    assert!(matches!(&closed, Ok(0)) || closed.as_ref().is_err_and(is_closed), "{closed:?}");
    assert!(daemon.stop().success());
}
