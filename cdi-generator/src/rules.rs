//! The rules that CDI runtimes hold a specification file to (`pkg/cdi` and `pkg/parser` of the CDI library, 1.1.0),
//! each with a sentence for the person whose file breaks it. A runtime tells the first fault at best; here all
//! are told.

use std::{collections::HashSet, fmt};

use serde::Serialize;

use crate::spec::{ContainerEdits, Device, Spec, Version};

/// Hooks that the OCI runtime specification has.
const HOOK_NAMES: [&str; 6] =
    ["prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"];

/// A rule that a file breaks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fault {
    /// Where in the file, such as `devices[0].containerEdits.mounts[2].hostPath`.
    pub place: String,
    /// What is wrong, and what would be right.
    pub reason: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.reason)
    }
}

/// What `spec` breaks; nothing if runtimes take it.
pub fn faults(spec: &Spec) -> Vec<Fault> {
    let mut faults = Faults(Vec::new());
    faults.version(spec);
    faults.kind(&spec.kind);
    faults.edits("containerEdits", &spec.container_edits);
    if spec.devices.is_empty() {
        faults.add("devices", "there is none; a file needs at least one device");
    }
    let mut names = HashSet::new();
    for (at, device) in spec.devices.iter().enumerate() {
        let place = format!("devices[{at}]");
        faults.device(&place, device);
        if !names.insert(&device.name) {
            faults.add(
                &format!("{place}.name"),
                &format!("{:?} is the name of another device too; give each its own", device.name),
            );
        }
    }
    faults.0
}

struct Faults(Vec<Fault>);

impl Faults {
    fn add(&mut self, place: &str, reason: &str) {
        self.0.push(Fault { place: place.into(), reason: reason.into() });
    }

    fn version(&mut self, spec: &Spec) {
        let minimum = spec.minimum_version();
        match Version::parse(&spec.cdi_version) {
            None => self.add(
                "cdiVersion",
                &format!("{:?} was never released; this file needs {minimum}", spec.cdi_version),
            ),
            Some(version) if version < minimum => {
                self.add(
                    "cdiVersion",
                    &format!("{version} lacks fields that this file uses; it needs {minimum}"),
                );
            }
            Some(_) => {}
        }
    }

    fn kind(&mut self, kind: &str) {
        match kind.split_once('/') {
            None => self.add("kind", &format!("{kind:?} must be VENDOR/CLASS, such as nvidia.com/gpu")),
            Some((vendor, class)) => {
                for (part, name) in [("vendor", vendor), ("class", class)] {
                    if let Err(reason) = check_name(name, |c| c.is_ascii_alphabetic(), "a letter", "_-.") {
                        self.add("kind", &format!("the {part} {name:?} {reason}"));
                    }
                }
            }
        }
    }

    fn device(&mut self, place: &str, device: &Device) {
        if let Err(reason) =
            check_name(&device.name, |c| c.is_ascii_alphanumeric(), "a letter or digit", "_-.:")
        {
            self.add(&format!("{place}.name"), &format!("{:?} {reason}", device.name));
        }
        let edits = format!("{place}.containerEdits");
        if device.container_edits.is_empty() {
            self.add(
                &edits,
                "they are empty, for which runtimes refuse the whole file; add an edit or remove the device",
            );
        }
        self.edits(&edits, &device.container_edits);
    }

    fn edits(&mut self, place: &str, edits: &ContainerEdits) {
        self.env(place, &edits.env);
        for (at, node) in edits.device_nodes.iter().enumerate() {
            let place = format!("{place}.deviceNodes[{at}]");
            self.not_empty(&format!("{place}.path"), &node.path);
            let kind = node.kind.as_deref().unwrap_or_default();
            if !["", "b", "c", "u", "p"].contains(&kind) {
                self.add(&format!("{place}.type"), &format!("{kind:?} must be b, c, u or p"));
            }
            for (field, number) in [("major", node.major), ("minor", node.minor)] {
                if number.is_some_and(|number| number < 0) {
                    self.add(&format!("{place}.{field}"), "it is negative");
                }
            }
            let permissions = node.permissions.as_deref().unwrap_or_default();
            if permissions != "none" && permissions.chars().any(|c| !"rwm".contains(c)) {
                self.add(
                    &format!("{place}.permissions"),
                    &format!("{permissions:?} may hold r, w and m only"),
                );
            }
        }
        for (at, hook) in edits.hooks.iter().enumerate() {
            let place = format!("{place}.hooks[{at}]");
            if !HOOK_NAMES.contains(&hook.hook_name.as_str()) {
                self.add(
                    &format!("{place}.hookName"),
                    &format!("{:?} must be one of {}", hook.hook_name, HOOK_NAMES.join(", ")),
                );
            }
            self.not_empty(&format!("{place}.path"), &hook.path);
            self.env(&place, &hook.env);
        }
        for (at, mount) in edits.mounts.iter().enumerate() {
            let place = format!("{place}.mounts[{at}]");
            self.not_empty(&format!("{place}.hostPath"), &mount.host_path);
            self.not_empty(&format!("{place}.containerPath"), &mount.container_path);
        }
        if let Some(clos) = edits.intel_rdt.as_ref().and_then(|rdt| rdt.clos_id.as_deref())
            && clos != "/"
            && (clos.len() >= 4096 || [".", ".."].contains(&clos) || clos.contains(['/', '\n']))
        {
            self.add(&format!("{place}.intelRdt.closID"), &format!("{clos:?} must be a file name, or /"));
        }
        self.net_devices(place, edits);
    }

    fn net_devices(&mut self, place: &str, edits: &ContainerEdits) {
        let (mut hosts, mut names) = (HashSet::new(), HashSet::new());
        for (at, device) in edits.net_devices.iter().enumerate() {
            let place = format!("{place}.netDevices[{at}]");
            for (field, value, seen) in [
                ("hostInterfaceName", &device.host_interface_name, &mut hosts),
                ("name", &device.name, &mut names),
            ] {
                let place = format!("{place}.{field}");
                self.not_empty(&place, value);
                if !seen.insert(value) {
                    self.add(&place, &format!("{value:?} is used twice; give each network device its own"));
                }
            }
        }
    }

    fn env(&mut self, place: &str, env: &[String]) {
        for (at, variable) in env.iter().enumerate() {
            if variable.find('=').unwrap_or(0) == 0 {
                self.add(&format!("{place}.env[{at}]"), &format!("{variable:?} must be NAME=value"));
            }
        }
    }

    fn not_empty(&mut self, place: &str, value: &str) {
        if value.is_empty() {
            self.add(place, "it is empty");
        }
    }
}

/// Vendors, classes and devices: what they begin with, then letters, digits and `punctuation`, and no punctuation
/// at the end.
fn check_name(name: &str, first: fn(char) -> bool, begins: &str, punctuation: &str) -> Result<(), String> {
    let Some(begin) = name.chars().next() else { return Err("is empty".into()) };
    if !first(begin) {
        return Err(format!("must begin with {begins}"));
    }
    if let Some(bad) = name.chars().find(|c| !c.is_ascii_alphanumeric() && !punctuation.contains(*c)) {
        return Err(format!("may hold letters, digits and {punctuation} only, not {bad:?}"));
    }
    if name.ends_with(|c: char| !c.is_ascii_alphanumeric()) {
        return Err("must end with a letter or digit".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Vec<Fault> {
        faults(&serde_json::from_str(text).unwrap())
    }

    const VALID: &str = r#"{"cdiVersion":"0.3.0","kind":"v.example/c","devices":[{"name":"d","containerEdits":{
        "env":["A=b","C="],
        "deviceNodes":[{"path":"/dev/null","type":"c","permissions":"rw"},{"path":"/dev/zero","permissions":"none"}],
        "hooks":[{"hookName":"createContainer","path":"/bin/hook","env":["A=b"]}],
        "mounts":[{"hostPath":"/a","containerPath":"/b","options":["ro"]}]}}]}"#;

    #[test]
    fn a_valid_file_has_no_fault() {
        assert_eq!(of(VALID), []);
    }

    #[test]
    fn each_broken_rule_is_told_with_its_place() {
        for (from, to, place) in [
            ("0.3.0", "0.9.0", "cdiVersion"),
            ("\"0.3.0\"", "\"\"", "cdiVersion"),
            ("v.example/c", "v.example", "kind"),
            ("v.example/c", "1v/c", "kind"),
            ("v.example/c", "v./c", "kind"),
            ("v.example/c", "v/c d", "kind"),
            ("v.example/c", "v/", "kind"),
            ("\"d\"", "\"\"", "devices[0].name"),
            ("\"d\"", "\":d\"", "devices[0].name"),
            ("\"d\"", "\"d/e\"", "devices[0].name"),
            ("\"d\"", "\"d-\"", "devices[0].name"),
            ("\"A=b\",\"C=\"", "\"A\"", "devices[0].containerEdits.env[0]"),
            ("\"A=b\",\"C=\"", "\"=b\"", "devices[0].containerEdits.env[0]"),
            ("/dev/null", "", "devices[0].containerEdits.deviceNodes[0].path"),
            ("\"c\",", "\"x\",", "devices[0].containerEdits.deviceNodes[0].type"),
            ("\"c\",", "\"c\",\"minor\":-1,", "devices[0].containerEdits.deviceNodes[0].minor"),
            ("\"rw\"", "\"rx\"", "devices[0].containerEdits.deviceNodes[0].permissions"),
            ("createContainer", "createcontainer", "devices[0].containerEdits.hooks[0].hookName"),
            ("/bin/hook", "", "devices[0].containerEdits.hooks[0].path"),
            ("[\"A=b\"]}],", "[\"A\"]}],", "devices[0].containerEdits.hooks[0].env[0]"),
            ("\"/a\"", "\"\"", "devices[0].containerEdits.mounts[0].hostPath"),
            ("\"/b\"", "\"\"", "devices[0].containerEdits.mounts[0].containerPath"),
        ] {
            let text = VALID.replace(from, to);
            assert_ne!(text, VALID, "{from}");
            let faults = of(&text);
            assert_eq!(faults.len(), 1, "{from} -> {to}: {faults:?}");
            assert_eq!(faults[0].place, place, "{from} -> {to}");
        }
    }

    #[test]
    fn all_faults_are_told_and_not_the_first_only() {
        let text = r#"{"cdiVersion":"0","kind":"x","devices":[{"name":"d"},{"name":"d"}]}"#;
        let places: Vec<_> = of(text).into_iter().map(|fault| fault.place).collect();
        assert_eq!(
            places,
            [
                "cdiVersion",
                "kind",
                "devices[0].containerEdits",
                "devices[1].containerEdits",
                "devices[1].name"
            ]
        );
    }

    #[test]
    fn a_file_without_devices_is_no_file() {
        let faults = of(r#"{"cdiVersion":"0.3.0","kind":"v/c","devices":[]}"#);
        assert_eq!(faults[0].place, "devices");
    }

    #[test]
    fn network_devices_and_rdt_have_rules_too() {
        let edits = r#"{"netDevices":[{"hostInterfaceName":"a","name":"b"},{"hostInterfaceName":"a","name":""}],
            "intelRdt":{"closID":"a/b"}}"#;
        let text = format!(
            r#"{{"cdiVersion":"1.1.0","kind":"v/c","devices":[{{"name":"d","containerEdits":{edits}}}]}}"#
        );
        let places: Vec<_> =
            of(&text).into_iter().map(|fault| fault.place.rsplit('.').next().unwrap().to_owned()).collect();
        assert_eq!(places, ["closID", "hostInterfaceName", "name"]);
    }
}
