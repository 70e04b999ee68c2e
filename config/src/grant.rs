//! What Allocate granted, as one line of text: units per GPU.

use std::{collections::BTreeMap, fmt, str::FromStr};

use thiserror::Error;

use crate::{DeviceId, GpuUuid};

/// Units of one resource per GPU, written `GPU-…=20` or `GPU-…=100,GPU-…=100`, in the order of the UUIDs.
/// It travels as a container annotation from Allocate to the NRI plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Grant(BTreeMap<GpuUuid, u32>);

/// Why a text is no grant.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is no grant; it must read <gpu-uuid>=<units>, separated by commas")]
pub struct GrantError(String);

impl Grant {
    /// Counts `ids` per GPU. The same ID named twice counts once.
    pub fn from_ids<'a>(ids: impl IntoIterator<Item = &'a DeviceId>) -> Self {
        let distinct: std::collections::BTreeSet<_> = ids.into_iter().collect();
        let mut units = BTreeMap::new();
        for id in distinct {
            *units.entry(id.gpu.clone()).or_insert(0_u32) += 1;
        }
        Self(units)
    }

    /// Units per GPU, in the order of the UUIDs.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&GpuUuid, u32)> {
        self.0.iter().map(|(gpu, units)| (gpu, *units))
    }

    /// All units together.
    pub fn units(&self) -> u32 {
        self.0.values().fold(0, |sum, units| sum.saturating_add(*units))
    }

    /// The GPU that holds most of the grant; of equals, the first.
    pub fn main_gpu(&self) -> Option<&GpuUuid> {
        self.0.iter().max_by(|a, b| a.1.cmp(b.1).then(b.0.cmp(a.0))).map(|(gpu, _)| gpu)
    }
}

impl fmt::Display for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (gpu, units)) in self.0.iter().enumerate() {
            write!(f, "{}{gpu}={units}", if at == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl FromStr for Grant {
    type Err = GrantError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || GrantError(text.chars().take(128).collect());
        let mut units = BTreeMap::new();
        for part in text.split(',') {
            let (gpu, count) = part.split_once('=').ok_or_else(bad)?;
            if !count.bytes().all(|c| c.is_ascii_digit()) {
                return Err(bad());
            }
            let count: u32 = count.parse().map_err(|_| bad())?;
            if count == 0 || units.insert(gpu.parse().map_err(|_| bad())?, count).is_some() {
                return Err(bad());
            }
        }
        Ok(Self(units))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn gpu(n: u8) -> GpuUuid {
        GpuUuid::from_bytes([n; 16])
    }

    #[test]
    fn ids_are_counted_once_each() {
        let ids: Vec<_> =
            [(1, 0), (1, 1), (2, 0), (1, 1)].map(|(g, index)| DeviceId { gpu: gpu(g), index }).into();
        let grant = Grant::from_ids(&ids);
        assert_eq!(grant.iter().collect::<Vec<_>>(), [(&gpu(1), 2), (&gpu(2), 1)]);
        assert_eq!(grant.units(), 3);
        assert_eq!(grant.main_gpu(), Some(&gpu(1)));
    }

    #[test]
    fn malformed_grants_are_refused() {
        let uuid = gpu(1);
        for bad in [
            "",
            "=",
            "GPU-1=2",
            &format!("{uuid}=0"),
            &format!("{uuid}=1,"),
            &format!("{uuid}=1,{uuid}=1"),
            &format!("{uuid}=-1"),
            &format!("{uuid}=+1"),
        ] {
            assert!(bad.parse::<Grant>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn grants_round_trip(units in proptest::collection::btree_map(any::<[u8; 16]>(), 1..10_000_u32, 1..9)) {
            let grant = Grant(units.into_iter().map(|(bytes, n)| (GpuUuid::from_bytes(bytes), n)).collect());
            prop_assert_eq!(grant.to_string().parse::<Grant>().unwrap(), grant);
        }
    }
}
