//! Containers that get from the runtime what one with a share gets, but by a CDI file alone: one a hook that does nothing,
//! another the device nodes and variables too. What the runtime takes for these is not vcuda's to save.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::Result;
use serde_json::{Value, json};

use crate::{containerd, node::Node};

const KIND: &str = "bench.local/twin";

/// CDI devices, by their full names.
pub struct Devices {
    /// Brings the hook.
    pub hook: String,
    /// Brings the hook, and all that a share brings.
    pub share: String,
}

/// Writes the CDI file, after two running containers of one image: the one with a share, and one without. The file
/// outlives both.
pub async fn write(node: &Node, with_share: &str, plain: &str, hook: &Path) -> Result<Devices> {
    let (share, plain) = (node.cri().info(with_share).await?.spec, node.cri().info(plain).await?.spec);
    let hooks =
        json!([{"hookName": "createContainer", "path": hook, "args": [hook], "env": ["PATH=/usr/bin"]}]);
    let edits = json!({
        "env": more(&share, &plain, "/process/env", variable),
        "deviceNodes": more(&share, &plain, "/linux/devices", |device| text(device, "path"))
            .into_iter()
            .map(device_node)
            .collect::<Vec<_>>(),
        "hooks": hooks,
    });
    let spec = json!({
        "cdiVersion": "0.6.0",
        "kind": KIND,
        "devices": [
            {"name": "hook", "containerEdits": {"hooks": hooks}},
            {"name": "share", "containerEdits": edits},
        ],
    });
    fs::write(containerd::cdi(node.folder()).join("twin.json"), spec.to_string())?;
    Ok(Devices { hook: format!("{KIND}=hook"), share: format!("{KIND}=share") })
}

/// What the first has in a list beyond the second, as told apart by `name`.
fn more<'a>(share: &'a Value, plain: &Value, list: &str, name: impl Fn(&Value) -> String) -> Vec<&'a Value> {
    fn of<'a>(spec: &'a Value, list: &str) -> impl Iterator<Item = &'a Value> {
        spec.pointer(list).and_then(Value::as_array).into_iter().flatten()
    }
    let had: BTreeSet<_> = of(plain, list).map(&name).collect();
    of(share, list).filter(|one| !had.contains(&name(one))).collect()
}

/// Most of these containers' variables name nothing that is of one container alone.
fn variable(variable: &Value) -> String {
    variable.as_str().and_then(|text| text.split_once('=')).map_or("", |(name, _)| name).into()
}

fn device_node(device: &Value) -> Value {
    json!({
        "path": device["path"],
        "type": device["type"],
        "major": device["major"],
        "minor": device["minor"],
        "permissions": "rw",
    })
}

fn text(value: &Value, key: &str) -> String {
    value[key].as_str().unwrap_or_default().into()
}
