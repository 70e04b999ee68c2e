//! Which GPUs a pod's containers were given, as one line of text in the pod annotation
//! [`crate::annotation::PLACEMENT`].

use std::{collections::BTreeMap, fmt, str::FromStr};

use thiserror::Error;

use crate::GpuUuid;

/// First field of the text: the format's version.
const VERSION: &str = "1";

/// 20 containers of 16 GPUs each are below this.
const MAX_BYTES: usize = 16 << 10;

/// GPUs per container, and when they were picked. The text is
/// `1;<seconds since 1970>;<container>=<gpu-uuid>,…;<container>=…`, containers in the order of their names.
/// Containers without a share are not in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodPlacement {
    /// When the choice was made, in seconds since 1970.
    pub placed_at: u64,
    /// The GPUs of each container, in the order in which the container is to see them.
    pub containers: BTreeMap<String, Vec<GpuUuid>>,
}

/// Why a text is no placement.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{0:?} is no placement; it must read 1;<seconds since 1970>;<container>=<gpu-uuid>,…;…, as the scheduler writes it"
)]
pub struct PodPlacementError(String);

impl PodPlacement {
    /// The GPUs of `container`; none when it has no share.
    pub fn gpus(&self, container: &str) -> &[GpuUuid] {
        self.containers.get(container).map_or(&[], Vec::as_slice)
    }
}

impl fmt::Display for PodPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{VERSION};{}", self.placed_at)?;
        for (container, gpus) in &self.containers {
            write!(f, ";{container}")?;
            for (at, gpu) in gpus.iter().enumerate() {
                write!(f, "{}{gpu}", if at == 0 { '=' } else { ',' })?;
            }
        }
        Ok(())
    }
}

impl FromStr for PodPlacement {
    type Err = PodPlacementError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || PodPlacementError(text.chars().take(128).collect());
        let mut fields = text.split(';');
        if text.len() > MAX_BYTES || fields.next() != Some(VERSION) {
            return Err(bad());
        }
        let time = fields.next().filter(|time| time.bytes().all(|c| c.is_ascii_digit())).ok_or_else(bad)?;
        let mut placement = Self { placed_at: time.parse().map_err(|_| bad())?, ..Self::default() };
        for field in fields {
            let (container, gpus) = field.split_once('=').ok_or_else(bad)?;
            if !is_container_name(container) {
                return Err(bad());
            }
            let mut of_container: Vec<GpuUuid> = Vec::new();
            for gpu in gpus.split(',') {
                let gpu = gpu.parse().map_err(|_| bad())?;
                if of_container.contains(&gpu) {
                    return Err(bad());
                }
                of_container.push(gpu);
            }
            if placement.containers.insert(container.into(), of_container).is_some() {
                return Err(bad());
            }
        }
        Ok(placement)
    }
}

/// A DNS label, which is what Kubernetes takes for a container's name.
fn is_container_name(text: &str) -> bool {
    (1..=63).contains(&text.len())
        && text.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn gpu(n: u8) -> GpuUuid {
        GpuUuid::from_bytes([n; 16])
    }

    #[test]
    fn a_placement_is_one_readable_line() {
        let text = format!("1;1764432000;main={},{};side={}", gpu(1), gpu(2), gpu(1));
        let placement: PodPlacement = text.parse().unwrap();
        assert_eq!(placement.placed_at, 1_764_432_000);
        assert_eq!(placement.gpus("main"), [gpu(1), gpu(2)]);
        assert_eq!(placement.gpus("side"), [gpu(1)]);
        assert_eq!(placement.gpus("other"), []);
        assert_eq!(placement.to_string(), text);
    }

    #[test]
    fn malformed_placements_are_refused() {
        let gpu = gpu(1);
        for bad in [
            "",
            "1",
            "1;",
            "1;x",
            "1;-1",
            "2;1",
            "1;1;",
            "1;1;main",
            "1;1;main=",
            &format!("1;1;={gpu}"),
            &format!("1;1;main={gpu},"),
            &format!("1;1;main={gpu},{gpu}"),
            &format!("1;1;main={gpu};main={gpu}"),
            &format!("1;1;../main={gpu}"),
            &format!("1;1;main={gpu};"),
            &format!("1;99999999999999999999;main={gpu}"),
        ] {
            assert!(bad.parse::<PodPlacement>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn placements_round_trip(
            placed_at: u64,
            containers in proptest::collection::btree_map(
                "[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", proptest::collection::btree_set(any::<[u8; 16]>(), 1..9), 0..5),
        ) {
            let containers = containers
                .into_iter()
                .map(|(name, gpus)| (name, gpus.into_iter().map(GpuUuid::from_bytes).collect()))
                .collect();
            let placement = PodPlacement { placed_at, containers };
            prop_assert_eq!(placement.to_string().parse::<PodPlacement>().unwrap(), placement);
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in "\\PC{0,200}") {
            let _ = text.parse::<PodPlacement>();
        }
    }
}
