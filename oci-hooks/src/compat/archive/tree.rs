//! An image's files as its layers leave them: each layer removes, hides and adds, and names go through the links of
//! what is there already, as they would on a disk.

use std::{
    collections::{BTreeMap, VecDeque},
    ffi::OsString,
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use super::{
    super::{
        elf::Depth,
        files::{Facts, Files, Kind, MAX_NAMES, Trouble},
    },
    layer::{Layer, Node},
};

/// Links on the way of one path, as the kernel's `MAXSYMLINKS`.
const MAX_LINKS: usize = 40;

/// The files of an image.
#[derive(Debug, Default)]
pub struct Tree {
    nodes: BTreeMap<PathBuf, Held>,
    refused: u64,
}

#[derive(Clone, Debug)]
enum Held {
    Folder,
    File(Arc<(Facts, Option<Vec<u8>>)>),
    Link(PathBuf),
    Special,
}

impl Tree {
    /// Puts a layer on what is there.
    pub(super) fn apply(&mut self, layer: Layer) {
        self.refused += layer.refused;
        // They speak of the layers below, wherever they stand in this one.
        for path in layer.opaque {
            if let Some(path) = self.followed(&path) {
                self.remove_below(&path);
            }
        }
        for path in layer.whiteouts {
            if let Some(path) = self.place(&path) {
                self.remove(&path);
            }
        }
        for (path, node) in layer.nodes {
            // Many layers have an entry for the root itself.
            if path == Path::new("/") {
                continue;
            }
            let Some(path) = self.place(&path) else {
                self.refused += 1;
                continue;
            };
            let held = match node {
                Node::Folder => Held::Folder,
                Node::File(facts, contents) => Held::File(Arc::new((facts, contents))),
                Node::Link(target) => Held::Link(target),
                Node::Special => Held::Special,
                Node::Same(other) => match self.place(&other).and_then(|other| self.nodes.get(&other)) {
                    Some(held) => held.clone(),
                    None => {
                        self.refused += 1;
                        continue;
                    }
                },
            };
            let stays = matches!((&held, self.nodes.get(&path)), (Held::Folder, Some(Held::Folder)));
            if !stays {
                self.remove(&path);
                self.nodes.insert(path, held);
            }
        }
    }

    /// Calls `visit` with every file.
    pub fn each(&self, visit: &mut dyn FnMut(&Path, &Facts)) {
        for (path, held) in &self.nodes {
            if let Held::File(file) = held {
                visit(path, &file.0);
            }
        }
    }

    /// How many entries made no sense, if any.
    pub(super) fn refused(&self) -> Option<String> {
        (self.refused > 0).then(|| format!("{} entries of its layers make no sense", self.refused))
    }

    /// Where an entry of that name goes: its folder with links followed, its last name as it is.
    fn place(&self, path: &Path) -> Option<PathBuf> {
        let name = path.file_name()?;
        Some(self.followed(path.parent()?)?.join(name))
    }

    fn remove(&mut self, path: &Path) {
        self.nodes.remove(path);
        self.remove_below(path);
    }

    fn remove_below(&mut self, path: &Path) {
        // Paths are ordered by their names, so all below a folder follow it.
        let below: Vec<PathBuf> = self
            .nodes
            .range::<Path, _>((std::ops::Bound::Excluded(path), std::ops::Bound::Unbounded))
            .map(|(below, _)| below)
            .take_while(|below| below.starts_with(path))
            .cloned()
            .collect();
        for below in below {
            self.nodes.remove(&below);
        }
    }

    /// `path` with all links followed; `None` where they have no end. What is not there is taken as it is named.
    fn followed(&self, path: &Path) -> Option<PathBuf> {
        let mut left: VecDeque<OsString> = VecDeque::new();
        let push = |left: &mut VecDeque<OsString>, path: &Path| {
            for part in path.components().rev() {
                match part {
                    Component::Normal(name) => left.push_front(name.to_owned()),
                    Component::ParentDir => left.push_front("..".into()),
                    _ => {}
                }
            }
        };
        push(&mut left, path);
        let (mut real, mut links) = (PathBuf::from("/"), 0);
        while let Some(name) = left.pop_front() {
            if name == ".." {
                real.pop();
                continue;
            }
            let next = real.join(&name);
            match self.nodes.get(&next) {
                Some(Held::Link(target)) => {
                    links += 1;
                    if links > MAX_LINKS || left.len() > 4096 {
                        return None;
                    }
                    if target.is_absolute() {
                        real = "/".into();
                    }
                    push(&mut left, target);
                }
                _ => real = next,
            }
        }
        Some(real)
    }
}

impl Files for Tree {
    fn look(&self, path: &Path, _: Depth) -> Result<Option<Facts>, Trouble> {
        let held = self.followed(path).and_then(|path| self.nodes.get(&path));
        Ok(held.map(|held| match held {
            Held::File(file) => file.0.clone(),
            Held::Folder | Held::Special | Held::Link(_) => Facts { mode: 0, size: 0, kind: Kind::Special },
        }))
    }

    fn read(&self, path: &Path, limit: u64) -> Result<Option<Vec<u8>>, Trouble> {
        let Some(real) = self.followed(path) else { return Ok(None) };
        match self.nodes.get(&real) {
            None => Ok(None),
            Some(Held::File(file)) => match &file.1 {
                Some(contents) if contents.len() as u64 <= limit => Ok(Some(contents.clone())),
                _ => Err(Trouble(format!(
                    "{}: larger than {limit} bytes, or under another name",
                    path.display()
                ))),
            },
            Some(_) => Err(Trouble(format!("{}: no regular file", path.display()))),
        }
    }

    fn list(&self, path: &Path) -> Result<Vec<OsString>, Trouble> {
        let Some(folder) = self.followed(path) else { return Ok(Vec::new()) };
        let below = (std::ops::Bound::Excluded(folder.as_path()), std::ops::Bound::Unbounded);
        let below = self.nodes.range::<Path, _>(below).map(|(path, _)| path);
        let inside = below.take_while(|path| path.starts_with(&folder));
        let own = inside.filter(|path| path.parent() == Some(&folder));
        Ok(own.filter_map(|path| path.file_name()).take(MAX_NAMES).map(ToOwned::to_owned).collect())
    }

    fn real(&self, path: &Path) -> Result<Option<PathBuf>, Trouble> {
        Ok(self.followed(path).filter(|path| self.nodes.contains_key(path)))
    }
}
