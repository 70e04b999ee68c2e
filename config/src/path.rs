//! Paths in containers, as text alone: nothing is looked up.

use std::path::{Component, Path, PathBuf};

/// `path` from the root on, without `.` and `..`, as Go's `filepath.Clean` has it, which is how runtimes compare mounts.
/// Where a folder before `..` is a symlink, the kernel would go elsewhere.
pub fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(name) => plain.push(name),
            Component::ParentDir => {
                plain.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_path_starts_at_the_root_and_never_leaves_it() {
        for (path, expected) in
            [("/a//b/./c/", "/a/b/c"), ("a/../b", "/b"), ("/../../etc", "/etc"), ("", "/"), ("/a/..", "/")]
        {
            assert_eq!(plain(Path::new(path)), Path::new(expected), "{path}");
        }
    }
}
