//! `vcuda-hook links`: the symlinks under which programs look for the driver's libraries, `libcuda.so.1` and the
//! like, in a container's root. The libraries themselves are mounted there under their versioned names. It
//! knows nothing of what the links are for.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
};

use thiserror::Error;

use crate::rootfs::{Rootfs, RootfsError, split};

/// Arguments of `vcuda-hook links`.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Args {
    /// A symlink to create, and what it points at: TARGET::PATH. TARGET is written as it is, PATH is absolute in
    /// the container. May be given many times.
    #[arg(long = "link", value_name = "TARGET::PATH", required = true)]
    pub links: Vec<Link>,
}

/// A symlink in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// What it points at, written as it is: a symlink's text means something only to who follows it, and the
    /// container follows it in its own root.
    pub target: PathBuf,
    /// Where it is, absolute in the container.
    pub path: PathBuf,
}

/// Why a text names no link.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is no TARGET::PATH with an absolute PATH")]
pub struct LinkError(String);

impl FromStr for Link {
    type Err = LinkError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || LinkError(text.into());
        let (target, path) = text.split_once("::").ok_or_else(bad)?;
        if target.is_empty() || split(Path::new(path)).is_err() {
            return Err(bad());
        }
        Ok(Self { target: target.into(), path: path.into() })
    }
}

/// Creates the links. One that is there already is left alone; a file or another link in its place is replaced,
/// for an image that brought its own driver libraries brought the wrong ones.
pub fn run(args: &Args, rootfs: &Rootfs) -> Result<(), RootfsError> {
    for link in &args.links {
        // Looked at first: a link that is right needs no right to write, and may lie on a volume.
        if rootfs.read_link(&link.path)?.as_ref() == Some(&link.target) {
            continue;
        }
        let (folder, name) = split(&link.path)?;
        rootfs.folder(folder)?.replace_link(name, &link.target)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, symlink},
    };

    use super::*;

    fn args(links: &[&str]) -> Args {
        Args { links: links.iter().map(|link| link.parse().unwrap()).collect() }
    }

    fn root() -> (tempfile::TempDir, Rootfs) {
        let folder = tempfile::tempdir().unwrap();
        let root = Rootfs::open(folder.path()).unwrap();
        (folder, root)
    }

    #[test]
    fn links_are_created_with_the_folders_above_them() {
        let (folder, root) = root();
        let links =
            args(&["libcuda.so.550.1::/usr/lib64/libcuda.so.1", "libcuda.so.1::/usr/lib64/libcuda.so"]);
        run(&links, &root).unwrap();
        let at = |name| fs::read_link(folder.path().join("usr/lib64").join(name)).unwrap();
        assert_eq!(at("libcuda.so.1"), Path::new("libcuda.so.550.1"));
        assert_eq!(at("libcuda.so"), Path::new("libcuda.so.1"));
    }

    #[test]
    fn a_second_run_changes_nothing() {
        let (folder, root) = root();
        let links = args(&["libcuda.so.550.1::/lib/libcuda.so.1"]);
        run(&links, &root).unwrap();
        let inode = || fs::symlink_metadata(folder.path().join("lib/libcuda.so.1")).unwrap().ino();
        let before = inode();
        // Held, so that its number is not given out again.
        fs::hard_link(folder.path().join("lib/libcuda.so.1"), folder.path().join("held")).unwrap();
        run(&links, &root).unwrap();
        assert_eq!(inode(), before);
    }

    #[test]
    fn what_the_image_has_in_the_place_of_a_link_gives_way() {
        let (folder, root) = root();
        let lib = folder.path().join("lib");
        fs::create_dir(&lib).unwrap();
        fs::write(lib.join("file"), "the image's own libcuda").unwrap();
        symlink("elsewhere", lib.join("link")).unwrap();
        run(&args(&["new::/lib/file", "new::/lib/link"]), &root).unwrap();
        assert_eq!(fs::read_link(lib.join("file")).unwrap(), Path::new("new"));
        assert_eq!(fs::read_link(lib.join("link")).unwrap(), Path::new("new"));
    }

    #[test]
    fn a_folder_in_the_place_of_a_link_is_an_error() {
        let (folder, root) = root();
        fs::create_dir_all(folder.path().join("lib/libcuda.so.1/x")).unwrap();
        let error = run(&args(&["new::/lib/libcuda.so.1"]), &root).unwrap_err().to_string();
        assert!(error.contains("/lib/libcuda.so.1"), "{error}");
        assert!(folder.path().join("lib/libcuda.so.1/x").exists());
    }

    #[test]
    fn no_link_is_made_outside_of_the_root() {
        let host = tempfile::tempdir().unwrap();
        let outside = host.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::create_dir_all(host.path().join("root/usr")).unwrap();
        symlink(&outside, host.path().join("root/usr/lib64")).unwrap();
        symlink("../../outside", host.path().join("root/lib")).unwrap();
        let root = Rootfs::open(&host.path().join("root")).unwrap();
        assert!(run(&args(&["x::/usr/lib64/libcuda.so.1"]), &root).is_err());
        assert!(run(&args(&["x::/lib/libcuda.so.1"]), &root).is_err());
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    }

    #[test]
    fn arguments_that_name_no_link_are_refused() {
        for text in ["", "a", "a:/b", "::/b", "a::b", "a::/", "a::/b/../c", "a::"] {
            assert!(text.parse::<Link>().is_err(), "{text}");
        }
    }
}
