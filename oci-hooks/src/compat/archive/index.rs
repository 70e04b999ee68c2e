//! What is where in an image archive: the outer tar file is listed without reading its contents, then the image's
//! own documents say which parts are layers, in which order, and what is started.

use std::{
    collections::HashMap,
    fs::File,
    io::{Read, Seek, SeekFrom},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use vcuda_config::plain;

use super::ArchiveError;

/// Files in an archive: a few a layer.
const MAX_PARTS: usize = 100_000;

/// A document: manifest, index, configuration.
const MAX_DOCUMENT: u64 = 8 << 20;

/// Docker allows 127 layers.
const MAX_LAYERS: usize = 1_000;

/// An index may name an index (attestations, platforms).
const MAX_NESTED: usize = 4;

/// Links from layer to layer in old Docker archives.
const MAX_LINKS: usize = 8;

/// A file in the archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Its name there.
    pub name: String,
    /// Where its contents start.
    pub offset: u64,
    /// Bytes of its contents.
    pub size: u64,
}

/// An image in an archive.
#[derive(Debug)]
pub(super) struct Image {
    pub layers: Vec<Part>,
    pub args: Vec<String>,
    pub env: Vec<String>,
    pub cwd: PathBuf,
}

enum Place {
    File(Part),
    Link(PathBuf),
}

/// Docker's `manifest.json`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerManifest {
    config: String,
    layers: Vec<String>,
}

/// An OCI index or manifest: the same file can be asked for both.
#[derive(Deserialize)]
struct Document {
    #[serde(default)]
    manifests: Vec<Descriptor>,
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Vec<Descriptor>,
}

#[derive(Deserialize)]
struct Descriptor {
    digest: String,
    platform: Option<Platform>,
}

#[derive(Deserialize)]
struct Platform {
    architecture: String,
    os: String,
}

/// The image's configuration, in both forms.
#[derive(Deserialize)]
struct Config {
    config: Option<Started>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Started {
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    env: Option<Vec<String>>,
    working_dir: Option<PathBuf>,
}

struct Parts<'a> {
    file: &'a File,
    places: HashMap<PathBuf, Place>,
}

impl Image {
    pub fn open(file: &File) -> Result<Self, ArchiveError> {
        let parts = Parts::list(file)?;
        let (config, layers) = if parts.has("index.json") { parts.oci()? } else { parts.docker()? };
        if layers.len() > MAX_LAYERS {
            return Err(ArchiveError::TooLarge("it has more layers than any image"));
        }
        let config: Config = parts.json(&config)?;
        let started = config.config.unwrap_or_default();
        let args = [started.entrypoint.unwrap_or_default(), started.cmd.unwrap_or_default()].concat();
        let cwd = started.working_dir.filter(|cwd| cwd.is_absolute()).unwrap_or_else(|| "/".into());
        Ok(Self { layers, args, env: started.env.unwrap_or_default(), cwd })
    }
}

impl<'a> Parts<'a> {
    fn list(file: &'a File) -> Result<Self, ArchiveError> {
        let mut magic = [0; 4];
        let read = file.read_at(&mut magic, 0)?;
        if magic[..read].starts_with(&[0x1f, 0x8b]) || magic[..read] == [0x28, 0xb5, 0x2f, 0xfd] {
            return Err(ArchiveError::Compressed);
        }
        let mut reader = file;
        reader.seek(SeekFrom::Start(0))?;
        let mut places = HashMap::new();
        let mut archive = tar::Archive::new(reader);
        // Raw: the library would take a long name of any length into memory, and no part has one.
        for entry in archive.entries_with_seek()?.raw(true) {
            let entry = entry.map_err(|error| match places.is_empty() {
                true => ArchiveError::NoImage("it is no tar archive".into()),
                false => {
                    ArchiveError::NoImage(format!("it breaks off after {} files: {error}", places.len()))
                }
            })?;
            if places.len() == MAX_PARTS {
                return Err(ArchiveError::TooLarge("it has more files than any image archive"));
            }
            let path = plain(&entry.path()?);
            let kind = entry.header().entry_type();
            let place = if kind.is_file() {
                let (offset, size) = (entry.raw_file_position(), entry.size());
                Place::File(Part { name: path.display().to_string(), offset, size })
            } else if kind.is_symlink() || kind.is_hard_link() {
                let Some(target) = entry.link_name()? else { continue };
                let folder = if kind.is_symlink() { path.parent() } else { None };
                Place::Link(plain(&folder.unwrap_or(Path::new("/")).join(target)))
            } else {
                continue;
            };
            places.insert(path, place);
        }
        Ok(Self { file, places })
    }

    fn has(&self, name: &str) -> bool {
        self.places.contains_key(&plain(Path::new(name)))
    }

    fn part(&self, name: &str) -> Result<&Part, ArchiveError> {
        let mut path = plain(Path::new(name));
        for _ in 0..MAX_LINKS {
            match self.places.get(&path) {
                Some(Place::File(part)) => return Ok(part),
                Some(Place::Link(target)) => path.clone_from(target),
                None => break,
            }
        }
        Err(ArchiveError::Missing(name.chars().take(200).collect()))
    }

    fn json<T: for<'de> Deserialize<'de>>(&self, name: &str) -> Result<T, ArchiveError> {
        let part = self.part(name)?;
        if part.size > MAX_DOCUMENT {
            return Err(ArchiveError::TooLarge("one of its documents is larger than any"));
        }
        let mut reader = self.file;
        reader.seek(SeekFrom::Start(part.offset))?;
        let mut text = Vec::new();
        reader.take(part.size).read_to_end(&mut text)?;
        serde_json::from_slice(&text).map_err(|error| ArchiveError::NoImage(format!("{name}: {error}")))
    }

    fn docker(&self) -> Result<(String, Vec<Part>), ArchiveError> {
        if !self.has("manifest.json") {
            return Err(ArchiveError::NoImage("it has neither index.json nor manifest.json".into()));
        }
        let manifests: Vec<DockerManifest> = self.json("manifest.json")?;
        let Some(manifest) = manifests.into_iter().next() else {
            return Err(ArchiveError::NoImage("manifest.json names no image".into()));
        };
        let layers = manifest.layers.iter().map(|name| self.part(name).cloned()).collect::<Result<_, _>>()?;
        Ok((manifest.config, layers))
    }

    fn oci(&self) -> Result<(String, Vec<Part>), ArchiveError> {
        let mut name = "index.json".to_owned();
        for _ in 0..MAX_NESTED {
            let document: Document = self.json(&name)?;
            if let Some(config) = &document.config {
                let layers = document
                    .layers
                    .iter()
                    .map(|layer| self.part(&blob(&layer.digest)?).cloned())
                    .collect::<Result<_, _>>()?;
                return Ok((blob(&config.digest)?, layers));
            }
            let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
            let ours = |descriptor: &&Descriptor| {
                descriptor
                    .platform
                    .as_ref()
                    .is_some_and(|platform| platform.os == "linux" && platform.architecture == architecture)
            };
            // Where no platform is told there is one image.
            let chosen = document
                .manifests
                .iter()
                .find(ours)
                .or_else(|| document.manifests.iter().find(|descriptor| descriptor.platform.is_none()));
            let Some(chosen) = chosen.or(document.manifests.first()) else {
                return Err(ArchiveError::NoImage(format!("{name} names no image")));
            };
            name = blob(&chosen.digest)?;
        }
        Err(ArchiveError::NoImage("its indexes name each other without end".into()))
    }
}

/// Where the blob of a digest is: `blobs/<algorithm>/<hex>`.
fn blob(digest: &str) -> Result<String, ArchiveError> {
    let sane = |part: &str| !part.is_empty() && part.bytes().all(|c| c.is_ascii_alphanumeric());
    match digest.split_once(':') {
        Some((algorithm, hex)) if sane(algorithm) && sane(hex) => Ok(format!("blobs/{algorithm}/{hex}")),
        _ => Err(ArchiveError::NoImage(format!(
            "{:?} is no digest",
            digest.chars().take(100).collect::<String>()
        ))),
    }
}
