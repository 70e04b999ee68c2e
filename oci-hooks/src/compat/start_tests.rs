use std::{fs, os::unix::fs::PermissionsExt};

use tempfile::TempDir;

use super::*;
use crate::{
    compat::{Severity, elf_maker::Maker},
    rootfs::Rootfs,
};

const SHIM: Shim = Shim { machine: goblin::elf::header::EM_X86_64, glibc: Version(2, 17, 0) };

struct Image(TempDir);

impl Image {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// An image with a dynamic program at `/bin/app` and this glibc.
    fn glibc(versions: &[&'static str]) -> Self {
        Self::new()
            .with("bin/app", &Maker::program().make())
            .with("lib/x86_64-linux-gnu/libc.so.6", &Maker::glibc(versions).make())
    }

    fn with(self, path: &str, bytes: &[u8]) -> Self {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    fn judge(&self, args: &[&str], env: &[&str]) -> Vec<Finding> {
        let command = Command {
            args: args.iter().map(ToString::to_string).collect(),
            env: env.iter().map(ToString::to_string).collect(),
            cwd: "/".into(),
        };
        judge(&Rootfs::open(self.0.path()).unwrap(), &command, SHIM).unwrap()
    }

    fn ids(&self, args: &[&str]) -> Vec<&'static str> {
        self.judge(args, &[]).iter().map(Finding::name).collect()
    }
}

#[test]
fn a_glibc_image_of_the_floor_or_newer_fits() {
    assert!(Image::glibc(&["GLIBC_2.2.5", "GLIBC_2.17"]).ids(&["/bin/app"]).is_empty());
    assert!(Image::glibc(&["GLIBC_2.2.5", "GLIBC_2.41", "GLIBC_PRIVATE"]).ids(&["app"]).is_empty());
}

#[test]
fn an_older_glibc_is_refused_with_both_versions() {
    let findings = Image::glibc(&["GLIBC_2.2.5", "GLIBC_2.12"]).judge(&["/bin/app"], &[]);
    assert_eq!((findings[0].name(), findings[0].severity), ("libc-too-old", Severity::Refuse));
    let sentence = findings[0].sentence();
    assert!(sentence.contains("2.12") && sentence.contains("2.17"), "{sentence}");
}

#[test]
fn musl_is_refused_whether_the_program_or_only_the_image_shows_it() {
    let musl =
        Maker { interpreter: Some("/lib/ld-musl-x86_64.so.1"), needed: vec!["libc.so"], ..Maker::program() };
    let image = Image::new().with("bin/app", &musl.make()).with("lib/ld-musl-x86_64.so.1", &musl.make());
    assert_eq!(image.ids(&["app"]), ["libc-musl"]);
    // The program is not there to be looked at: the image still is musl's.
    assert_eq!(image.ids(&["other"]), ["entry-missing", "libc-musl"]);
    // A musl program beside a glibc is as lost.
    let both = Image::glibc(&["GLIBC_2.36"]).with("bin/app", &musl.make());
    assert_eq!(both.ids(&["app"]), ["libc-musl"]);
}

#[test]
fn without_a_c_library_nothing_can_use_a_gpu() {
    let image = Image::new().with("bin/app", &Maker::static_program().make());
    assert_eq!(image.ids(&["/bin/app"]), ["entry-static", "libc-none"]);
}

#[test]
fn a_static_launcher_is_let_pass_and_one_that_opens_the_driver_is_not() {
    let image = Image::glibc(&["GLIBC_2.36"]);
    let launcher = image.with("bin/tini", &Maker::static_program().make());
    assert_eq!(launcher.ids(&["tini", "--", "app"]), ["entry-static"]);
    let direct = Maker { constants: b"\0/dev/nvidiactl\0".to_vec(), ..Maker::static_program() };
    let findings = launcher.with("bin/direct", &direct.make()).judge(&["direct"], &[]);
    assert_eq!((findings[0].name(), findings[0].severity), ("entry-static-direct", Severity::Refuse));
}

#[test]
fn another_architecture_is_refused() {
    let arm = Maker { machine: goblin::elf::header::EM_AARCH64, ..Maker::program() };
    let findings = Image::glibc(&["GLIBC_2.36"]).with("bin/app", &arm.make()).judge(&["app"], &[]);
    assert_eq!(findings[0].id, "arch-mismatch");
    assert!(findings[0].what.contains("arm64"));
}

#[test]
fn scripts_are_followed_to_the_program_that_runs_them() {
    let musl = Maker { interpreter: Some("/lib/ld-musl-x86_64.so.1"), ..Maker::program() };
    let image = Image::glibc(&["GLIBC_2.36"])
        .with("bin/python3", &musl.make())
        .with("usr/bin/env", &Maker::program().make())
        .with("run.py", b"#!/usr/bin/env -S python3 -u\nprint()\n")
        .with("run.sh", b"#! /bin/app -x\n")
        .with("loop", b"#!/loop\n");
    assert_eq!(image.ids(&["/run.py"]), ["libc-musl"]);
    assert!(image.ids(&["/run.sh"]).is_empty());
    assert!(image.ids(&["./run.sh"]).is_empty());
    assert_eq!(image.ids(&["/loop"]), ["entry-missing"]);
}

#[test]
fn links_are_followed_inside_the_image_only() {
    let image = Image::new().with("bin/app", &Maker::program().make());
    fs::create_dir_all(image.0.path().join("lib64")).unwrap();
    // The host's own libc is at the end of this link, if it were followed out of the image.
    std::os::unix::fs::symlink("/lib/x86_64-linux-gnu/libc.so.6", image.0.path().join("lib64/libc.so.6"))
        .unwrap();
    std::os::unix::fs::symlink("../../../../../../../../bin/sh", image.0.path().join("bin/sh")).unwrap();
    assert_eq!(image.ids(&["app"]), ["libc-none"]);
    assert_eq!(image.ids(&["/bin/sh"]), ["entry-missing", "libc-none"]);
}

#[test]
fn a_fifo_in_the_way_is_not_opened() {
    let image = Image::glibc(&["GLIBC_2.36"]);
    let fifo = image.0.path().join("bin/fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o755.into(), 0).unwrap();
    assert_eq!(image.ids(&["/bin/fifo"]), ["entry-missing"]);
}

#[test]
fn the_last_of_two_equal_variables_counts() {
    let image = Image::glibc(&["GLIBC_2.36"]).with("opt/app", &Maker::static_program().make());
    let findings = image.judge(&["app"], &["PATH=/bin", "PATH=/opt"]);
    assert_eq!(findings[0].id, "entry-static");
}
