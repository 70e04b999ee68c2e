//! Container images made on the spot, as `docker save` archives: containerd imports them, and no registry is needed.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use serde_json::json;

use crate::{cache::Cache, containerd::make_executable, process::run};

/// Name of the image that holds a sandbox's namespaces.
pub const PAUSE: &str = "local/pause:1";

/// Shell commands that busybox offers in every image.
const APPLETS: [&str; 14] = [
    "cat", "chmod", "env", "grep", "id", "kill", "ls", "mkdir", "mount", "ps", "sleep", "stat", "su", "true",
];

/// An image to be made.
#[derive(Clone, Debug)]
pub struct Image {
    name: String,
    base: Base,
    files: Vec<(PathBuf, Content)>,
    env: Vec<String>,
    user: Option<String>,
    command: Vec<String>,
}

#[derive(Clone, Debug)]
enum Base {
    /// The C library and linked shell of a Debian release.
    Debian(String),
    /// Nothing but a busybox that needs no library.
    Busybox,
}

#[derive(Clone, Debug)]
enum Content {
    Copy(PathBuf),
    Text(String),
}

impl Image {
    /// An image with the C library of Debian `release`, a shell linked against it, and busybox's commands.
    pub fn debian(name: &str, release: &str) -> Self {
        Self::new(name, Base::Debian(release.into()))
    }

    /// An image without any C library.
    pub fn busybox(name: &str) -> Self {
        Self::new(name, Base::Busybox)
    }

    /// The image of sandboxes: a process that sleeps.
    pub fn pause() -> Self {
        Self::new(PAUSE, Base::Busybox).command(&["/bin/busybox", "sleep", "inf"])
    }

    fn new(name: &str, base: Base) -> Self {
        Self { name: name.into(), base, files: vec![], env: vec![], user: None, command: vec![] }
    }

    /// Adds a copy of the host's `file` at `path`, executable.
    #[must_use]
    pub fn copy(mut self, path: &str, file: &Path) -> Self {
        self.files.push((path.into(), Content::Copy(file.into())));
        self
    }

    /// Adds a file at `path`.
    #[must_use]
    pub fn text(mut self, path: &str, text: &str) -> Self {
        self.files.push((path.into(), Content::Text(text.into())));
        self
    }

    /// Adds a variable to the image's environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push(format!("{name}={value}"));
        self
    }

    /// Sets the image's user.
    #[must_use]
    pub fn user(mut self, user: &str) -> Self {
        self.user = Some(user.into());
        self
    }

    /// Sets the image's command.
    #[must_use]
    pub fn command(mut self, words: &[&str]) -> Self {
        self.command = words.iter().map(|&word| word.into()).collect();
        self
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes the archive in `folder` and returns its path. Base layers are kept in the cache.
    pub fn archive(&self, cache: &Cache, folder: &Path) -> Result<PathBuf> {
        let work = tempfile::tempdir_in(folder)?;
        let base = base_layer(cache, &self.base)?;
        let mut layers = vec![base];
        if !self.files.is_empty() {
            layers.push(self.top_layer(work.path())?);
        }

        let mut names = vec![];
        let mut diff_ids = vec![];
        for (at, layer) in layers.iter().enumerate() {
            let name = format!("{at}.tar");
            fs::hard_link(layer, work.path().join(&name))
                .or_else(|_| fs::copy(layer, work.path().join(&name)).map(drop))?;
            diff_ids.push(format!("sha256:{}", sha256(layer)?));
            names.push(name);
        }
        let mut env = vec!["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned()];
        env.extend(self.env.iter().cloned());
        let config = json!({
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": env, "User": self.user.as_deref().unwrap_or(""), "Cmd": self.command},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let manifest = json!([{"Config": "config.json", "RepoTags": [self.name], "Layers": names}]);
        fs::write(work.path().join("config.json"), config.to_string())?;
        fs::write(work.path().join("manifest.json"), manifest.to_string())?;

        let archive = folder.join(format!("{}.tar", self.name.replace(['/', ':'], "-")));
        let mut tar = Command::new("tar");
        tar.arg("-C")
            .arg(work.path())
            .arg("-cf")
            .arg(&archive)
            .args(["manifest.json", "config.json"])
            .args(names);
        run(tar)?;
        Ok(archive)
    }

    fn top_layer(&self, work: &Path) -> Result<PathBuf> {
        let root = work.join("top");
        for (path, content) in &self.files {
            let file = root.join(path.strip_prefix("/").unwrap_or(path));
            fs::create_dir_all(file.parent().context("a file in an image has a folder")?)?;
            match content {
                Content::Copy(from) => {
                    fs::copy(from, &file).with_context(|| format!("{}: cannot be copied", from.display()))?;
                    make_executable(&file)?;
                }
                Content::Text(text) => fs::write(&file, text)?,
            }
        }
        let layer = work.join("top.tar");
        pack(&root, &layer)?;
        Ok(layer)
    }
}

/// The layer every image of this base starts with.
fn base_layer(cache: &Cache, base: &Base) -> Result<PathBuf> {
    let name = match base {
        Base::Debian(release) => release,
        Base::Busybox => "busybox",
    };
    let made = cache.made();
    fs::create_dir_all(&made)?;
    let layer = made.join(format!("base-{name}.tar"));
    if layer.exists() {
        return Ok(layer);
    }
    let work = tempfile::tempdir_in(&made)?;
    let root = work.path().join("root");
    match base {
        Base::Debian(release) => {
            let mut copy = Command::new("cp");
            copy.arg("-a").arg(cache.root(release)).arg(&root);
            run(copy)?;
            let _ = fs::remove_file(root.join(".complete"));
        }
        Base::Busybox => {
            for dir in ["bin", "dev", "etc", "proc", "sys", "tmp"] {
                fs::create_dir_all(root.join(dir))?;
            }
            symlink("busybox", root.join("bin/sh"))?;
        }
    }
    let busybox = root.join("bin/busybox");
    fs::copy(cache.busybox(), &busybox).context("busybox cannot be copied; run integration/setup.sh")?;
    make_executable(&busybox)?;
    for applet in APPLETS {
        symlink("busybox", root.join("bin").join(applet))?;
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n")?;
    fs::write(root.join("etc/group"), "root:x:0:\nuser:x:1000:\n")?;
    let part = work.path().join("layer.tar");
    pack(&root, &part)?;
    fs::rename(part, &layer)?;
    Ok(layer)
}

fn pack(root: &Path, archive: &Path) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(root).args(["--owner=0", "--group=0", "--numeric-owner", "-cf"]).arg(archive).arg(".");
    run(tar)?;
    Ok(())
}

fn sha256(file: &Path) -> Result<String> {
    let mut command = Command::new("sha256sum");
    command.arg(file);
    Ok(run(command)?.split_whitespace().next().context("sha256sum printed nothing")?.to_owned())
}
