//! What holds of a share beside its core and memory: how far it may go into time that others leave idle, and who
//! comes first there. A pod's owner says it in annotations; an operator changes it while the container runs.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};
use vcuda_config::{CORE_PER_GPU, Request, annotation};

use crate::WishError;

/// What a pod's owner says about compute time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Terms {
    /// Percent of the GPU's time that the share may use while others leave it idle. None leaves it to the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub core_limit: Option<u32>,
    /// Who comes first at idle time.
    #[serde(skip_serializing_if = "Priority::is_normal")]
    pub priority: Priority,
}

/// Who comes first at time that others leave idle. What a share owns is its own, whatever its priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// As all others.
    #[default]
    Normal,
    /// After all normal ones.
    Low,
}

/// What an operator has changed of a share. It holds until the share ends, over restarts of its container, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Change {
    /// Percent of the GPU's compute time, 1 to 99.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub core: Option<u32>,
    /// Memory in units of 256 MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_units: Option<NonZeroU32>,
    /// Percent of the GPU's time that it may use while others leave it idle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub core_limit: Option<u32>,
}

impl Terms {
    /// Whether nothing is said.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Reads what a pod's owner says about a container that asks for `request`; `annotation` gives the value of the
    /// pod's annotation of that name.
    ///
    /// # Errors
    ///
    /// When an annotation is there and cannot be understood, or cannot be met.
    pub fn read<'a>(
        request: &Request,
        annotation: impl Fn(&str) -> Option<&'a str>,
    ) -> Result<Self, WishError> {
        let core_limit = match annotation(annotation::CORE_LIMIT) {
            None => None,
            Some(text) => {
                Some(core_limit(text, request).map_err(|why| WishError::new(annotation::CORE_LIMIT, why))?)
            }
        };
        let priority = match annotation(annotation::PRIORITY) {
            None | Some("normal") => Priority::Normal,
            Some("low") => Priority::Low,
            Some(other) => {
                let why = format!("{:?} is neither low nor normal", short(other));
                return Err(WishError::new(annotation::PRIORITY, why));
            }
        };
        Ok(Self { core_limit, priority })
    }
}

fn core_limit(text: &str, request: &Request) -> Result<u32, String> {
    let core = match request {
        Request::Share { core, .. } => *core,
        Request::Whole { .. } => CORE_PER_GPU,
    };
    // Digits only: `parse` takes a sign, too.
    let digits = !text.is_empty() && text.len() <= 3 && text.bytes().all(|c| c.is_ascii_digit());
    match text.parse::<u32>() {
        Ok(limit) if digits && (core..=CORE_PER_GPU).contains(&limit) => Ok(limit),
        Ok(limit) if digits && limit < core => {
            Err(format!("{limit} is below the {core} core that the container asks for"))
        }
        _ => Err(format!(
            "{:?} is no percentage of one GPU, from the container's {core} core to {CORE_PER_GPU}",
            short(text)
        )),
    }
}

fn short(text: &str) -> String {
    text.chars().take(32).collect()
}

impl Priority {
    fn is_normal(&self) -> bool {
        *self == Self::Normal
    }
}

impl Change {
    /// Whether nothing is changed.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// This change on top of an earlier one.
    #[must_use]
    pub fn over(self, earlier: Self) -> Self {
        Self {
            core: self.core.or(earlier.core),
            memory_units: self.memory_units.or(earlier.memory_units),
            core_limit: self.core_limit.or(earlier.core_limit),
        }
    }

    /// What a container that asks for `request` gets. Whole GPUs cannot be changed.
    pub(crate) fn of(&self, request: Request) -> Request {
        match request {
            Request::Share { core, memory_units } => Request::Share {
                core: self.core.unwrap_or(core),
                memory_units: self.memory_units.unwrap_or(memory_units),
            },
            Request::Whole { .. } => request,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn read(core: u32, annotations: &[(&str, &str)]) -> Result<Terms, String> {
        let map: BTreeMap<_, _> = annotations.iter().copied().collect();
        let request = Request::new(core, 4).unwrap();
        Terms::read(&request, |key| map.get(key).copied()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_pod_that_says_nothing_gets_its_share_and_no_more() {
        assert_eq!(read(20, &[("unrelated", "x")]), Ok(Terms::default()));
    }

    #[test]
    fn what_a_pod_says_is_taken() {
        let terms = read(20, &[(annotation::CORE_LIMIT, "50"), (annotation::PRIORITY, "low")]).unwrap();
        assert_eq!(terms, Terms { core_limit: Some(50), priority: Priority::Low });
        assert_eq!(read(20, &[(annotation::CORE_LIMIT, "20")]).unwrap().core_limit, Some(20));
        assert_eq!(read(20, &[(annotation::PRIORITY, "normal")]), Ok(Terms::default()));
        assert_eq!(read(200, &[(annotation::CORE_LIMIT, "100")]).unwrap().core_limit, Some(100));
    }

    #[test]
    fn what_cannot_be_met_is_refused_by_name() {
        for (core, key, text, named) in [
            (20, annotation::CORE_LIMIT, "19", "below the 20 core"),
            (200, annotation::CORE_LIMIT, "50", "below the 100 core"),
            (20, annotation::CORE_LIMIT, "101", "no percentage"),
            (20, annotation::CORE_LIMIT, "+50", "no percentage"),
            (20, annotation::CORE_LIMIT, "50%", "no percentage"),
            (20, annotation::CORE_LIMIT, "", "no percentage"),
            (20, annotation::CORE_LIMIT, "00000050", "no percentage"),
            (20, annotation::PRIORITY, "high", "neither low nor normal"),
            (20, annotation::PRIORITY, "", "neither low nor normal"),
        ] {
            let error = read(core, &[(key, text)]).unwrap_err();
            assert!(
                error.contains(key) && error.contains(named) && error.contains("correct it or remove it"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_later_change_leaves_what_it_does_not_name() {
        let earlier = Change { core: Some(30), core_limit: Some(60), ..Change::default() };
        let later = Change { core: Some(40), memory_units: NonZeroU32::new(8), ..Change::default() };
        let both = later.over(earlier);
        assert_eq!(both, Change { core: Some(40), memory_units: NonZeroU32::new(8), core_limit: Some(60) });
        assert_eq!(both.of(Request::new(20, 4).unwrap()), Request::new(40, 8).unwrap());
    }

    proptest! {
        #[test]
        fn any_annotation_is_taken_or_refused_in_a_sentence(limit in "\\PC{0,300}", priority in "\\PC{0,300}") {
            if let Err(error) = read(20, &[(annotation::CORE_LIMIT, &limit), (annotation::PRIORITY, &priority)]) {
                prop_assert!(error.len() < 1000, "{}", error);
            }
        }
    }
}
