//! What becomes of images that do not fit: refused, let pass with a warning, or not looked at; and what of it is remembered.

use std::io::Write as _;

use super::*;
use crate::compat::check::Verdict;

#[test]
#[ignore = "mounts need root"]
fn an_image_that_the_shim_does_not_fit_is_refused() {
    with_own_mounts("images::an_image_that_the_shim_does_not_fit_is_refused", || {
        let rig = Rig::ready();
        rig.image("lib/x86_64-linux-gnu/libc.so.6", &Maker::glibc(&["GLIBC_2.12"]).make());
        let refusal = rig.refusal();
        assert!(refusal.contains("libc-too-old") && refusal.contains("pod team/train"), "{refusal}");
        fs::remove_file(rig.in_root("/lib/x86_64-linux-gnu/libc.so.6")).unwrap();
        assert!(rig.refusal().contains("libc-none"));
    });
}

#[test]
#[ignore = "mounts need root"]
fn policy_lets_an_unfit_image_start_and_the_node_remembers_it() {
    with_own_mounts("images::policy_lets_an_unfit_image_start_and_the_node_remembers_it", || {
        let rig = Rig::ready();
        let seen = || verdicts::list(&rig.paths.state).unwrap().pop();
        rig.guard().unwrap();
        assert_eq!(seen().unwrap().verdict, Verdict::Fits);

        rig.image("lib/x86_64-linux-gnu/libc.so.6", &Maker::glibc(&["GLIBC_2.12"]).make());
        rig.guard().unwrap_err();
        let refused = seen().unwrap();
        assert_eq!((refused.image.as_str(), refused.pod.as_str()), ("registry/app:1", "team/train"));
        assert_eq!(
            (refused.started, refused.starts, refused.findings),
            (false, 2, vec!["libc-too-old".into()])
        );

        assert_eq!(rig.guard_under(Policy::Warn).unwrap()[0].id, "libc-too-old");
        assert!(seen().unwrap().started);
        assert!(rig.guard_under(Policy::Off).unwrap().is_empty());
        assert_eq!(seen().unwrap().starts, 3, "off looks at nothing");

        // What makes a share hold is no matter of policy.
        fs::remove_file(rig.share().usage()).unwrap();
        assert!(matches!(rig.guard_under(Policy::Off), Err(Refusal::Mount { .. })));
    });
}

#[test]
#[ignore = "mounts need root"]
fn an_image_whose_cuda_is_too_new_for_the_driver_is_refused_or_let_pass_with_a_warning() {
    with_own_mounts(
        "images::an_image_whose_cuda_is_too_new_for_the_driver_is_refused_or_let_pass_with_a_warning",
        || {
            let mut rig = Rig::ready();
            let driver = rig.folder.path().join("libcuda");
            let exports = vec!["cuInit", "cuMemAlloc_v2", "cuLaunchKernelEx"];
            write(&driver, &Maker { soname: Some("libcuda.so.1"), exports, ..Maker::default() }.make());
            rig.driver = vec![DriverFile { host: driver, place: place::REAL_CUDA.into() }];
            let bring = |name: &'static str| {
                rig.image(&format!("opt/{name}"), &Maker { soname: Some(name), ..Maker::default() }.make());
            };
            bring("libcudart.so.11.0");
            assert!(
                rig.guard().unwrap().is_empty(),
                "the node's own files in the container are none of the image's"
            );
            fs::remove_file(rig.in_root("opt/libcudart.so.11.0")).unwrap();

            bring("libcudart.so.13");
            let refused = rig.refusal();
            assert!(
                refused.contains("[cuda-driver-too-old]") && refused.contains("580 or newer"),
                "{refused}"
            );
            assert_eq!(verdicts::warning(&rig.share()), None);

            assert_eq!(rig.guard_under(Policy::Warn).unwrap()[0].id, "cuda-driver-too-old");
            let (warning, _) = verdicts::warning(&rig.share()).unwrap();
            assert_eq!((warning.container.as_str(), warning.id.as_str()), (ID, "cuda-driver-too-old"));
            assert!(refused.ends_with(&warning.sentence), "{warning:?}");

            // Of another start: a warning that does not hold any more is gone.
            assert!(rig.guard_under(Policy::Off).unwrap().is_empty());
            assert_eq!(verdicts::warning(&rig.share()), None);
        },
    );
}

impl Rig {
    /// Brings a CUDA runtime into the image: of that line, and of CUDA 12.5 where it is of line 12.
    fn bring(&self, soname: &'static str) {
        let constants = b"\0libcuda.so.1\0cuCtxCreate_v4\0".to_vec();
        let runtime = Maker { soname: Some(soname), imports: vec!["dlsym"], constants, ..Maker::default() };
        self.image(&format!("opt/{soname}"), &runtime.make());
    }

    /// Brings a driver that serves CUDA up to 12.0.
    fn with_driver(mut self) -> Self {
        let driver = self.folder.path().join("libcuda");
        let exports = vec!["cuInit", "cuMemAlloc_v2", "cuLibraryLoadData"];
        write(&driver, &Maker { soname: Some("libcuda.so.1"), exports, ..Maker::default() }.make());
        self.driver = vec![DriverFile { host: driver, place: place::REAL_CUDA.into() }];
        self
    }

    fn seen(&self) -> verdicts::Seen {
        verdicts::list(&self.paths.state).unwrap().pop().unwrap()
    }

    /// The one judgement that the node remembers.
    fn judgement(&self) -> PathBuf {
        let mut files: Vec<_> = fs::read_dir(self.paths.state.join("judged")).unwrap().flatten().collect();
        assert_eq!(files.len(), 1, "{files:?}");
        files.pop().unwrap().path()
    }

    /// Makes the node's memory say what no look at files could find, and forget what is in the image.
    fn mark_memory(&self) {
        let text = fs::read_to_string(self.judgement()).unwrap();
        let marked = text.replace("the image brings", "it is remembered that the image brings");
        assert_ne!(marked, text);
        fs::write(self.judgement(), marked).unwrap();
        fs::remove_dir_all(self.paths.state.join("scans")).unwrap();
    }

    /// Nothing was gone through since [`Self::mark_memory`].
    fn assert_not_looked_at(&self) {
        assert!(!self.paths.state.join("scans").exists(), "the image was gone through again");
    }
}

/// The commonest of all findings: the image is a little newer than the driver.
#[test]
#[ignore = "mounts need root"]
fn a_warning_is_told_again_without_a_look_at_any_symbol() {
    with_own_mounts("images::a_warning_is_told_again_without_a_look_at_any_symbol", || {
        let rig = Rig::bare();
        rig.bring("libcudart.so.12");
        let rig = rig.overlay().with_driver();
        let first = rig.guard().unwrap();
        assert_eq!((first.len(), &*first[0].id), (1, "cuda-minor-newer"));
        assert_eq!(rig.guard().unwrap(), first, "from memory it is the same in every word");

        rig.mark_memory();
        let again = rig.guard().unwrap();
        assert_eq!((again.len(), &*again[0].id), (1, "cuda-minor-newer"));
        assert!(again[0].what.starts_with("it is remembered"), "{again:?}");
        rig.assert_not_looked_at();
        let seen = rig.seen();
        assert_eq!((seen.verdict, seen.starts, seen.started), (Verdict::Fits, 3, true));
        assert_eq!(seen.findings, ["cuda-minor-newer"]);
        assert!(seen.reason.unwrap().starts_with("it is remembered"));

        // Another driver: what was remembered holds no more.
        let rig = rig.with_driver();
        assert_eq!(rig.guard().unwrap(), first);
    });
}

#[test]
#[ignore = "mounts need root"]
fn a_refusal_is_told_again_and_the_policy_of_the_day_decides() {
    with_own_mounts("images::a_refusal_is_told_again_and_the_policy_of_the_day_decides", || {
        let rig = Rig::bare();
        rig.bring("libcudart.so.13");
        let rig = rig.overlay().with_driver();
        let refusal = rig.refusal();
        assert!(refusal.contains("[cuda-driver-too-old]"), "{refusal}");
        rig.mark_memory();
        assert!(rig.refusal().contains("it is remembered"), "{}", rig.refusal());
        assert_eq!(verdicts::warning(&rig.share()), None);

        assert_eq!(rig.guard_under(Policy::Warn).unwrap()[0].id, "cuda-driver-too-old");
        rig.assert_not_looked_at();
        let (warning, _) = verdicts::warning(&rig.share()).unwrap();
        assert_eq!((warning.container.as_str(), warning.id.as_str()), (ID, "cuda-driver-too-old"));
        assert!(warning.sentence.starts_with("it is remembered"), "{warning:?}");
        assert_eq!((rig.seen().verdict, rig.seen().started), (Verdict::DoesNotFit, true));
    });
}

#[test]
#[ignore = "mounts need root"]
fn an_image_that_fits_is_not_looked_at_again() {
    with_own_mounts("images::an_image_that_fits_is_not_looked_at_again", || {
        let rig = Rig::bare();
        rig.bring("libcudart.so.11.0");
        let rig = rig.overlay().with_driver();
        assert!(rig.guard().unwrap().is_empty());
        fs::remove_dir_all(rig.paths.state.join("scans")).unwrap();
        assert!(rig.guard().unwrap().is_empty());
        rig.assert_not_looked_at();

        // A library that the container's own layer brings is no part of what was judged.
        rig.bring("libcudart.so.13");
        assert_eq!(rig.guard().unwrap()[0].id, "cuda-runtime-too-new");
    });
}

/// What could not be read is no verdict: the next look may succeed.
#[test]
#[ignore = "mounts need root"]
fn a_verdict_on_a_driver_that_cannot_be_read_is_not_remembered() {
    with_own_mounts("images::a_verdict_on_a_driver_that_cannot_be_read_is_not_remembered", || {
        for (library, ids) in [(place::REAL_CUDA, &[][..]), (place::REAL_NVML, &["cuda-minor-newer"])] {
            let rig = Rig::bare();
            rig.bring("libcudart.so.12");
            let mut rig = rig.overlay().with_driver();
            let broken = rig.folder.path().join("broken");
            write(&broken, b"\x7fELF and no more");
            rig.driver.retain(|file| file.place != Path::new(library));
            rig.driver.push(DriverFile { host: broken, place: library.into() });
            let findings = rig.guard().unwrap();
            assert_eq!(findings.iter().map(|finding| &*finding.id).collect::<Vec<_>>(), ids, "{library}");
            assert!(!rig.paths.state.join("judged").exists(), "{library}");
        }
    });
}

#[test]
#[ignore = "mounts need root"]
fn the_node_file_says_by_namespace_what_becomes_of_an_image() {
    with_own_mounts("images::the_node_file_says_by_namespace_what_becomes_of_an_image", || {
        let mut rig = Rig::ready();
        rig.image("lib/x86_64-linux-gnu/libc.so.6", &Maker::glibc(&["GLIBC_2.12"]).make());
        let named = "namespaces: {strict: enforce, lenient: warn, blind: off}";
        for (policy, namespace, starts, warned) in [
            ("warn", "strict", false, false),
            ("warn", "lenient", true, true),
            ("warn", "blind", true, false),
            ("warn", "other", true, true),
            ("off", "strict", false, false),
            ("off", "lenient", true, true),
            ("off", "other", true, false),
            ("enforce", "blind", true, false),
            ("enforce", "other", false, false),
        ] {
            rig.record.pod.namespace = namespace.into();
            rig.store();
            let guarded = rig.guard_by(&format!("images: {{policy: {policy}, {named}}}\n"));
            let at = format!("{policy}, {namespace}: {guarded:?}");
            match &guarded {
                Ok(findings) => {
                    assert!(starts, "{at}");
                    assert_eq!(findings.iter().any(|finding| finding.id == "libc-too-old"), warned, "{at}");
                }
                Err(refusal) => {
                    assert!(!starts && refusal.to_string().contains("[libc-too-old]"), "{at}");
                    assert!(refusal.to_string().contains(&format!("pod {namespace}/train")), "{at}");
                }
            }
            assert_eq!(verdicts::warning(&rig.share()).is_some(), warned, "{at}");
        }
        // Without a word of it, every namespace is held to it.
        assert!(rig.guard_by("").unwrap_err().to_string().contains("[libc-too-old]"));
    });
}

/// What is remembered of images is no reason to keep a container from starting.
#[test]
#[ignore = "mounts need root"]
fn without_room_a_container_starts_and_its_image_is_remembered_once_there_is_some() {
    with_own_mounts(
        "images::without_room_a_container_starts_and_its_image_is_remembered_once_there_is_some",
        || {
            let rig = Rig::bare();
            rig.bring("libcudart.so.11.0");
            let state = &rig.paths.state;
            let before = rig.folder.path().join("before");
            fs::rename(state, &before).unwrap();
            fs::create_dir(state).unwrap();
            mount("tmpfs", state, "tmpfs", MountFlags::empty(), Some(c"size=8m")).unwrap();
            let copied = Process::new("cp").arg("-a").arg(before.join(".")).arg(state).status();
            assert!(copied.unwrap().success());
            for folder in ["verdicts", "scans", "judged"] {
                fs::create_dir_all(state.join(folder)).unwrap();
            }
            let filler = state.join("filler");
            let mut file = fs::File::create(&filler).unwrap();
            while file.write_all(&[1; 4096]).is_ok() {}
            drop(file);
            let rig = rig.overlay().with_driver();

            assert!(rig.guard().unwrap().is_empty());
            assert!(verdicts::list(&rig.paths.state).unwrap().is_empty());
            let left = |folder: &str| {
                let entries = fs::read_dir(rig.paths.state.join(folder)).unwrap();
                entries.map(|entry| entry.unwrap().file_name()).filter(|name| name != "turn").count()
            };
            assert_eq!(["verdicts", "scans", "judged"].map(left), [0; 3], "nothing half written is left");

            fs::remove_file(filler).unwrap();
            assert!(rig.guard().unwrap().is_empty());
            assert_eq!((rig.seen().verdict, rig.seen().starts), (Verdict::Fits, 1));
            assert_eq!(["verdicts", "scans", "judged"].map(left), [1; 3]);
        },
    );
}
