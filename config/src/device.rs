//! GPU UUIDs and the device IDs that kubelet counts.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A GPU's UUID as NVML prints it: `GPU-` and 32 hexadecimal digits in groups of 8-4-4-4-12.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct GpuUuid(String);

/// Why a text is no GPU UUID.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{0:?} is no GPU UUID; it must read GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, as `nvidia-smi -L` prints it"
)]
pub struct GpuUuidError(String);

impl GpuUuid {
    /// The UUID of a GPU whose sixteen UUID bytes are `bytes`, in the order of `CUuuid`.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        let mut text = String::from("GPU");
        for (at, byte) in bytes.iter().enumerate() {
            if matches!(at, 0 | 4 | 6 | 8 | 10) {
                text.push('-');
            }
            text.push_str(&format!("{byte:02x}"));
        }
        Self(text)
    }

    /// The sixteen bytes of the UUID, in the order of `CUuuid`.
    pub fn bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        let digits = self.0.bytes().skip("GPU-".len()).filter_map(|c| char::from(c).to_digit(16));
        for (at, digit) in digits.enumerate().take(32) {
            // A hexadecimal digit is below 16, so it fits a byte.
            bytes[at / 2] = bytes[at / 2] << 4 | u8::try_from(digit).unwrap_or(0);
        }
        bytes
    }

    /// The UUID as text, `GPU-…`.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for GpuUuid {
    type Err = GpuUuidError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let well_formed = text.strip_prefix("GPU-").is_some_and(|rest| {
            rest.len() == 36
                && rest.bytes().enumerate().all(|(at, c)| match at {
                    8 | 13 | 18 | 23 => c == b'-',
                    _ => c.is_ascii_hexdigit(),
                })
        });
        if well_formed {
            // NVML prints lower case; one spelling makes comparison of texts safe.
            Ok(Self(format!("GPU-{}", text["GPU-".len()..].to_ascii_lowercase())))
        } else {
            Err(GpuUuidError(text.chars().take(64).collect()))
        }
    }
}

impl TryFrom<String> for GpuUuid {
    type Error = GpuUuidError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<GpuUuid> for String {
    fn from(uuid: GpuUuid) -> Self {
        uuid.0
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One device ID as kubelet sees it: `<gpu-uuid>::<n>`, one unit of core or of memory. The `::` is what
/// dcgm-exporter takes apart to find the GPU.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId {
    /// The GPU that the unit belongs to.
    pub gpu: GpuUuid,
    /// Which of the GPU's units, from 0.
    pub index: u32,
}

/// Why a text is no device ID.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is no device ID of this plugin; it must read <gpu-uuid>::<number>")]
pub struct DeviceIdError(String);

impl FromStr for DeviceId {
    type Err = DeviceIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || DeviceIdError(text.chars().take(96).collect());
        let (gpu, index) = text.split_once("::").ok_or_else(bad)?;
        // `parse` alone would take "+1" and "01", which name the same unit twice.
        if index.is_empty()
            || !index.bytes().all(|c| c.is_ascii_digit())
            || (index.len() > 1 && index.starts_with('0'))
        {
            return Err(bad());
        }
        Ok(Self { gpu: gpu.parse().map_err(|_| bad())?, index: index.parse().map_err(|_| bad())? })
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}::{}", self.gpu, self.index)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UUID: &str = "GPU-4d4f434b-0000-1111-2222-00000000000a";

    #[test]
    fn uuid_text_and_bytes_are_the_same_thing() {
        let uuid: GpuUuid = UUID.parse().unwrap();
        assert_eq!(uuid.bytes()[..6], [0x4d, 0x4f, 0x43, 0x4b, 0, 0]);
        assert_eq!(uuid.bytes()[15], 0x0a);
        assert_eq!(GpuUuid::from_bytes(uuid.bytes()), uuid);
    }

    #[test]
    fn uuid_is_compared_without_case() {
        let upper = UUID.to_ascii_uppercase();
        assert_eq!(upper.parse::<GpuUuid>().unwrap().as_str(), UUID);
    }

    #[test]
    fn malformed_uuids_are_refused_with_the_right_form() {
        for bad in [
            "",
            "GPU-",
            "MIG-4d4f434b-0000-1111-2222-00000000000a",
            "GPU-4d4f434b-0000-1111-2222-00000000000g",
            "GPU-4d4f434b00001111222200000000000a",
        ] {
            let error = bad.parse::<GpuUuid>().unwrap_err().to_string();
            assert!(error.contains("nvidia-smi -L"), "{error}");
        }
    }

    #[test]
    fn device_ids_have_one_spelling() {
        for bad in [
            "",
            "::",
            "::1",
            UUID,
            &format!("{UUID}::"),
            &format!("{UUID}::01"),
            &format!("{UUID}::+1"),
            &format!("{UUID}::4294967296"),
            &format!("{UUID}:1"),
            &format!("{UUID}::1::2"),
        ] {
            assert!(bad.parse::<DeviceId>().is_err(), "{bad}");
        }
        assert_eq!(format!("{UUID}::0").parse::<DeviceId>().unwrap().index, 0);
    }

    proptest! {
        #[test]
        fn device_ids_round_trip(bytes: [u8; 16], index: u32) {
            let id = DeviceId { gpu: GpuUuid::from_bytes(bytes), index };
            prop_assert_eq!(id.to_string().parse::<DeviceId>().unwrap(), id);
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in ".{0,80}") {
            let _ = text.parse::<DeviceId>();
        }
    }
}
