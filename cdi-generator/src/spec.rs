//! The Container Device Interface's specification file: its types, as CDI 1.1.0 has them (`specs-go/config.go`),
//! and the lowest version that a file needs. Runtimes refuse a file with one field that they do not know, so
//! nothing else is ever written, and nothing else is read.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Deserializer, Serialize};

/// A specification file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Spec {
    /// Version of the format that the file needs.
    pub cdi_version: String,
    /// Kind of its devices, `vendor/class`.
    pub kind: String,
    /// Notes for people and tools; they do not reach the container. Since 0.6.0.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// The devices that a container can ask for.
    #[serde(default, deserialize_with = "or_default")]
    pub devices: Vec<Device>,
    /// Edits of every container that asks for at least one of the devices, applied once.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "ContainerEdits::is_empty")]
    pub container_edits: ContainerEdits,
}

/// A device: a name, and what a container gets that asks for it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// Name within the kind; the full one is `vendor/class=name`.
    pub name: String,
    /// See [`Spec::annotations`].
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// What the container gets; empty edits make runtimes refuse the whole file.
    #[serde(default, deserialize_with = "or_default")]
    pub container_edits: ContainerEdits,
}

/// Edits of a container's OCI specification.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerEdits {
    /// Environment, `NAME=value`; replaces a variable of the same name.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Network devices. Since 1.1.0.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub net_devices: Vec<NetDevice>,
    /// Hooks, added behind those that the container has.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Mounts; replace one at the same place.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Cache and memory bandwidth. Since 0.7.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intel_rdt: Option<IntelRdt>,
    /// Groups of the container's process. Since 0.7.0.
    #[serde(
        default,
        rename = "additionalGids",
        deserialize_with = "or_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub additional_gids: Vec<u32>,
}

/// A device node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceNode {
    /// Path in the container.
    pub path: String,
    /// Path on the host, where it is another one. Since 0.5.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// `b`, `c`, `u` or `p`; the runtime looks at the host's where it is not said.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Major number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    /// Minor number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    /// Permission bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// What the device cgroup allows: some of `rwm`, or `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
    /// Owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

/// A mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    /// What is mounted.
    pub host_path: String,
    /// Where it is mounted.
    pub container_path: String,
    /// Options as in fstab.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// File system, for what is no bind mount. Since 0.4.0.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
}

/// An OCI hook.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Hook {
    /// When it runs, such as `createContainer`.
    pub hook_name: String,
    /// The program, on the host.
    pub path: String,
    /// Arguments, the first of which is the program's name.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Environment. Where it is empty, the hook inherits the runtime's, and with some the image's
    /// (CVE-2025-23266).
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Seconds after which the runtime ends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
}

/// Intel Resource Director Technology.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct IntelRdt {
    /// Class of service.
    #[serde(default, rename = "closID", skip_serializing_if = "Option::is_none")]
    pub clos_id: Option<String>,
    /// Schema of the L3 cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l3_cache_schema: Option<String>,
    /// Schema of the memory bandwidth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_bw_schema: Option<String>,
    /// Lines of the schemata file. Since 1.1.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schemata: Option<Vec<String>>,
    /// Whether there is a monitoring group. Since 1.1.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable_monitoring: Option<bool>,
}

/// A network device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NetDevice {
    /// Name on the host.
    pub host_interface_name: String,
    /// Name in the container.
    pub name: String,
}

/// A released version of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(u32, u32, u32);

impl Version {
    /// All that were released; 0.8.0 and 1.0.0 brought no field.
    pub const KNOWN: [Self; 10] = [
        Self(0, 1, 0),
        Self(0, 2, 0),
        Self(0, 3, 0),
        Self(0, 4, 0),
        Self(0, 5, 0),
        Self(0, 6, 0),
        Self(0, 7, 0),
        Self(0, 8, 0),
        Self(1, 0, 0),
        Self(1, 1, 0),
    ];

    /// The lowest that a file is given (`vEarliest`).
    const EARLIEST: Self = Self(0, 3, 0);

    /// The version that `text` names, if it was released; a leading `v` is let pass.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.strip_prefix('v').unwrap_or(text);
        Self::KNOWN.into_iter().find(|version| version.to_string() == text)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

impl Spec {
    /// The lowest version of the format that has all that this file uses (`specs-go/version.go`). A runtime
    /// refuses a file that says less, and one that says more than the runtime knows.
    pub fn minimum_version(&self) -> Version {
        let devices = self.devices.iter().map(|device| &device.container_edits);
        let edits = devices.chain([&self.container_edits]).map(ContainerEdits::minimum_version);
        let digit_first = |device: &Device| device.name.starts_with(|c: char| c.is_ascii_digit());
        let annotated = |device: &Device| !device.annotations.is_empty();
        let dotted_class = || self.kind.split_once('/').is_some_and(|(_, class)| class.contains('.'));
        let own = if !self.annotations.is_empty() || self.devices.iter().any(annotated) || dotted_class() {
            Version(0, 6, 0)
        } else if self.devices.iter().any(digit_first) {
            Version(0, 5, 0)
        } else {
            Version::EARLIEST
        };
        edits.fold(own, Ord::max)
    }

    /// The file's text: JSON, by the rules of `specs-go/config.go`, with a line break at its end.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("strings and numbers are always JSON");
        text.push('\n');
        text
    }
}

impl ContainerEdits {
    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn minimum_version(&self) -> Version {
        let newer_rdt = |rdt: &IntelRdt| rdt.schemata.is_some() || rdt.enable_monitoring == Some(true);
        let given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        if !self.net_devices.is_empty() || self.intel_rdt.as_ref().is_some_and(newer_rdt) {
            Version(1, 1, 0)
        } else if self.intel_rdt.is_some() || !self.additional_gids.is_empty() {
            Version(0, 7, 0)
        } else if self.device_nodes.iter().any(|node| given(&node.host_path)) {
            Version(0, 5, 0)
        } else if self.mounts.iter().any(|mount| given(&mount.kind)) {
            Version(0, 4, 0)
        } else {
            Version::EARLIEST
        }
    }
}

/// `null` is a default, as it is to the runtimes.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(input: D) -> Result<T, D::Error> {
    Option::deserialize(input).map(Option::unwrap_or_default)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn minimum(text: &str) -> String {
        serde_json::from_str::<Spec>(text).unwrap().minimum_version().to_string()
    }

    fn with_edits(edits: &str) -> String {
        format!(r#"{{"cdiVersion":"","kind":"v/c","devices":[{{"name":"d","containerEdits":{edits}}}]}}"#)
    }

    #[test]
    fn the_version_is_the_lowest_that_has_all_fields() {
        let mount = |more: &str| {
            with_edits(&format!(r#"{{"mounts":[{{"hostPath":"/a","containerPath":"/b"{more}}}]}}"#))
        };
        let node = |more: &str| with_edits(&format!(r#"{{"deviceNodes":[{{"path":"/dev/a"{more}}}]}}"#));
        for (version, text) in [
            ("0.3.0", mount("")),
            ("0.3.0", mount(r#","type":"""#)),
            ("0.4.0", mount(r#","type":"tmpfs""#)),
            ("0.3.0", node("")),
            ("0.5.0", node(r#","hostPath":"/dev/b""#)),
            ("0.5.0", with_edits("{}").replace("\"d\"", "\"0\"")),
            ("0.6.0", with_edits("{}").replace("v/c", "v/c.d")),
            ("0.3.0", with_edits("{}").replace("v/c", "v.w/c")),
            ("0.6.0", with_edits("{}").replace("\"devices\"", r#""annotations":{"a":"b"},"devices""#)),
            ("0.7.0", with_edits(r#"{"additionalGids":[44]}"#)),
            ("0.7.0", with_edits(r#"{"intelRdt":{"closID":"a"}}"#)),
            ("1.1.0", with_edits(r#"{"intelRdt":{"schemata":[]}}"#)),
            ("1.1.0", with_edits(r#"{"netDevices":[{"hostInterfaceName":"a","name":"b"}]}"#)),
        ] {
            assert_eq!(minimum(&text), version, "{text}");
        }
    }

    #[test]
    fn global_edits_count_for_the_version() {
        let text = r#"{"cdiVersion":"","kind":"v/c","devices":[{"name":"d"}],"containerEdits":{"additionalGids":[44]}}"#;
        assert_eq!(minimum(text), "0.7.0");
    }

    #[test]
    fn a_field_that_is_not_known_is_an_error_everywhere() {
        for text in [
            with_edits("{}").replace("\"kind\"", "\"extra\":1,\"kind\""),
            with_edits("{}").replace("\"name\"", "\"extra\":1,\"name\""),
            with_edits(r#"{"extra":1}"#),
            with_edits(r#"{"deviceNodes":[{"path":"/a","extra":1}]}"#),
            with_edits(r#"{"mounts":[{"hostPath":"/a","containerPath":"/b","extra":1}]}"#),
            with_edits(r#"{"hooks":[{"hookName":"prestart","path":"/a","extra":1}]}"#),
        ] {
            let error = serde_json::from_str::<Spec>(&text).unwrap_err().to_string();
            assert!(error.contains("extra"), "{error}");
        }
    }

    #[test]
    fn null_is_nothing() {
        let text = with_edits(r#"{"env":null,"mounts":null,"intelRdt":null}"#);
        assert!(serde_json::from_str::<Spec>(&text).unwrap().devices[0].container_edits.is_empty());
    }
}
