//! containerd's settings, as containerd itself understands them: its own `config dump` has read the file, what it
//! imports and the defaults, in the form of its version.

use std::{
    io::Read,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use vcuda_config::Paths;

use crate::compat::Finding;

/// containerd answers in a few milliseconds.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// Settings of every plugin are below 20 KiB.
const MAX_BYTES: u64 = 4 << 20;

/// Plugin names of CRI, 2.x and 1.x.
const CRI: [&str; 2] = ["io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"];
const NRI: &str = "io.containerd.nri.v1.nri";

/// The oldest containerd with NRI, major and minor.
const OLDEST: (u32, u32) = (1, 7);

/// The settings that a share depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// containerd's version.
    pub version: String,
    /// Whether CRI resolves CDI devices.
    pub cdi: bool,
    /// Folders of CDI specifications.
    pub cdi_folders: Vec<PathBuf>,
    /// Whether plugins are asked.
    pub nri: bool,
    /// Where they are asked.
    pub nri_socket: Option<PathBuf>,
}

/// Asks `program` for its settings.
pub(super) fn ask(program: &Path, config: Option<&Path>) -> Result<Settings, String> {
    let version = run(program, &["--version".as_ref()])?;
    let version = version.split_whitespace().nth(2).unwrap_or("?").trim_start_matches('v').to_owned();
    let dump = match config {
        Some(config) => {
            run(program, &["--config".as_ref(), config.as_os_str(), "config".as_ref(), "dump".as_ref()])?
        }
        // Without a file, the defaults hold.
        None => run(program, &["config".as_ref(), "dump".as_ref()])
            .or_else(|_| run(program, &["config".as_ref(), "default".as_ref()]))?,
    };
    parse(version, &dump)
}

fn run(program: &Path, args: &[&std::ffi::OsStr]) -> Result<String, String> {
    let named = |reason: String| format!("{}: {reason}", program.display());
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| named(error.to_string()))?;
    let Some(out) = child.stdout.take() else { return Err(named("it has no output".into())) };
    let reader = thread::spawn(move || {
        let mut text = String::new();
        out.take(MAX_BYTES).read_to_string(&mut text).map(|_| text)
    });
    let start = Instant::now();
    let status = loop {
        match child.try_wait().map_err(|error| named(error.to_string()))? {
            Some(status) => break status,
            None if start.elapsed() > TIME_LIMIT => {
                // It may have ended this very moment.
                let _ = child.kill();
                let _ = child.wait();
                return Err(named(format!("no answer in {} s", TIME_LIMIT.as_secs())));
            }
            None => thread::sleep(Duration::from_millis(5)),
        }
    };
    if !status.success() {
        return Err(named(format!("{status}")));
    }
    match reader.join() {
        Ok(Ok(text)) => Ok(text),
        Ok(Err(error)) => Err(named(error.to_string())),
        Err(_) => Err(named("its output cannot be read".into())),
    }
}

fn parse(version: String, dump: &str) -> Result<Settings, String> {
    let dump: toml::Table = toml::from_str(dump).map_err(|error| format!("its settings: {error}"))?;
    let plugins =
        dump.get("plugins").and_then(toml::Value::as_table).ok_or("its settings name no plugins")?;
    let setting = |plugin: &str, key: &str| plugins.get(plugin).and_then(|plugin| plugin.get(key)).cloned();
    let of_cri = |key: &str| CRI.iter().find_map(|plugin| setting(plugin, key));
    let folders = of_cri("cdi_spec_dirs").and_then(|folders| {
        let folders = folders.as_array()?.iter().filter_map(toml::Value::as_str);
        Some(folders.map(PathBuf::from).collect())
    });
    let disabled = dump
        .get("disabled_plugins")
        .and_then(toml::Value::as_array)
        .is_some_and(|disabled| disabled.iter().any(|plugin| plugin.as_str() == Some(NRI)));
    let nri_off = setting(NRI, "disable").and_then(|off| off.as_bool());
    // From 2.4 on there is no switch for CDI any more: it is on.
    let has_no_switch = numbers(&version).is_some_and(|numbers| numbers >= (2, 0));
    let cdi = of_cri("enable_cdi").and_then(|on| on.as_bool()).unwrap_or(has_no_switch);
    Ok(Settings {
        cdi,
        cdi_folders: folders.unwrap_or_default(),
        nri: !disabled && nri_off.is_some_and(|off| !off),
        nri_socket: setting(NRI, "socket_path").and_then(|path| path.as_str().map(PathBuf::from)),
        version,
    })
}

/// Major and minor; none where it does not begin with two numbers.
fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split(['.', '-', '~', '+']).map(str::parse);
    Some((parts.next()?.ok()?, parts.next()?.ok()?))
}

impl Settings {
    pub(super) fn judge(&self, paths: &Paths, config: &Path, findings: &mut Vec<Finding>) {
        if numbers(&self.version).is_some_and(|numbers| numbers < OLDEST) {
            // What the settings would have to be is of no use to it.
            return findings.push(
                Finding::refuse(
                    "containerd-old",
                    format!("containerd {} has no NRI", self.version),
                    "no share is ever bound without it, and the guard refuses every container with one",
                    format!("install containerd {}.{} or newer", OLDEST.0, OLDEST.1),
                )
                .at(config),
            );
        }
        if !self.cdi {
            findings.push(Finding::refuse(
                "cdi-off",
                format!("CDI is off in containerd {}", self.version),
                "containers with shares get neither driver nor guard: kubelet's CDI devices are not resolved",
                "set enable_cdi = true in containerd's CRI section and restart it",
            ).at(config));
        }
        let same = |folder: &PathBuf| real(folder) == real(&paths.cdi);
        if self.cdi && !self.cdi_folders.iter().any(same) {
            findings.push(
                Finding::refuse(
                    "cdi-folder-unknown",
                    format!("{} is not among containerd's cdi_spec_dirs", paths.cdi.display()),
                    "it does not find the specification of shares, and containers with shares fail",
                    "add it there and restart containerd, or correct paths.cdi in the node file",
                )
                .at(config),
            );
        }
        if !self.nri {
            findings.push(
                Finding::refuse(
                    "nri-off",
                    format!("NRI is off in containerd {}", self.version),
                    "no share is ever bound, and the guard refuses every container with one",
                    "set disable = false in the section io.containerd.nri.v1.nri and restart containerd",
                )
                .at(config),
            );
        }
        if let Some(socket) =
            self.nri_socket.as_ref().filter(|socket| real(socket) != real(&paths.nri_socket))
        {
            findings.push(
                Finding::refuse(
                    "nri-socket-other",
                    format!(
                        "containerd's NRI socket is {}, the node file has {}",
                        socket.display(),
                        paths.nri_socket.display()
                    ),
                    "vcuda-nri-plugin waits at the wrong door",
                    "set paths.nriSocket in the node file",
                )
                .at(config),
            );
        }
    }
}

/// `/var/run` and `/run` are one folder by two names.
fn real(path: &Path) -> PathBuf {
    let parent = path.parent().unwrap_or(path);
    match (parent.canonicalize(), path.file_name()) {
        (Ok(parent), Some(name)) => parent.join(name),
        _ => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From `containerd config dump` of 2.1.9 and `config default` of 1.7.24, cut to what matters.
    const V2: &str = "version = 3\n[plugins]\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = true\n\
        cdi_spec_dirs = ['/etc/cdi', '/var/run/cdi']\n[plugins.'io.containerd.nri.v1.nri']\ndisable = false\n\
        socket_path = '/var/run/nri/nri.sock'\n";
    const V1: &str = "version = 2\n[plugins]\n[plugins.\"io.containerd.grpc.v1.cri\"]\n\
        cdi_spec_dirs = [\"/etc/cdi\", \"/var/run/cdi\"]\nenable_cdi = false\n\
        [plugins.\"io.containerd.nri.v1.nri\"]\ndisable = true\nsocket_path = \"/var/run/nri/nri.sock\"\n";

    fn ids(settings: &Settings) -> Vec<&'static str> {
        let mut findings = Vec::new();
        settings.judge(&Paths::default(), Path::new("/etc/containerd/config.toml"), &mut findings);
        findings.iter().map(Finding::name).collect()
    }

    #[test]
    fn the_defaults_of_both_lines_are_understood() {
        assert!(ids(&parse("2.1.9+unknown".into(), V2).unwrap()).is_empty());
        assert_eq!(ids(&parse("1.7.24~ds1".into(), V1).unwrap()), ["cdi-off", "nri-off"]);
    }

    #[test]
    fn a_version_without_a_switch_for_cdi_has_it_on() {
        let dump = V2.replace("enable_cdi = true\n", "");
        assert!(ids(&parse("2.4.0".into(), &dump).unwrap()).is_empty());
        assert_eq!(ids(&parse("1.7.1".into(), &dump).unwrap()), ["cdi-off"]);
    }

    #[test]
    fn a_version_before_nri_is_told_to_be_too_old_and_one_that_is_no_number_is_not() {
        assert_eq!(ids(&parse("1.6.33-k3s1".into(), V1).unwrap()), ["containerd-old"]);
        for version in ["1.7.0", "2.0.0-beta.1", "10.0", "?", "main", ""] {
            assert!(ids(&parse(version.into(), V2).unwrap()).is_empty(), "{version}");
        }
    }

    #[test]
    fn places_that_do_not_meet_are_named() {
        let dump = V2.replace("'/var/run/cdi'", "'/opt/cdi'").replace("/var/run/nri/nri.sock", "/x/nri.sock");
        assert_eq!(ids(&parse("2.1.0".into(), &dump).unwrap()), ["cdi-folder-unknown", "nri-socket-other"]);
        let dump = format!("disabled_plugins = ['io.containerd.nri.v1.nri']\n{V2}");
        assert_eq!(ids(&parse("2.1.0".into(), &dump).unwrap()), ["nri-off"]);
    }

    #[test]
    fn a_program_that_is_none_or_hangs_is_no_answer() {
        assert!(ask(Path::new("/no/containerd"), None).is_err());
        assert!(ask(Path::new("/bin/false"), None).unwrap_err().contains("exit status: 1"));
        assert!(parse("2".into(), "x").is_err() && parse("2".into(), "x = 1").is_err());
    }
}
