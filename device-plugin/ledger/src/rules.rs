//! What decides between GPUs that all have room: the policy, what the pod's owner and the node's administrator rule
//! out, and how the GPUs are connected. Nothing here makes a request fit, or not.

use std::{cmp::Reverse, fmt, str::FromStr};

use thiserror::Error;
use vcuda_config::{GpuGroup, Link, Request};

use crate::{GpuFilter, GpuFree};

/// How the GPU is picked among those that have room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// The fullest, so that whole GPUs stay free.
    #[default]
    Pack,
    /// The emptiest, so that shares disturb each other least.
    Spread,
}

/// A text that names no policy.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is no policy; it must be pack or spread")]
pub struct PolicyError(String);

/// What decides between GPUs. The default is to pack, whatever the GPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rules<'a> {
    /// How the GPU is picked.
    pub policy: Policy,
    /// What the pod's owner wants and does not want.
    pub filter: Option<&'a GpuFilter>,
    /// GPUs that take no new share, as positions in the list of the node's GPUs.
    pub cordoned: &'a [usize],
    /// How the GPUs are connected, as positions in the list of the node's GPUs. Whole GPUs of one request stay
    /// within the best-connected group that holds them; shares go where they leave the most of a group whole.
    pub groups: &'a [GpuGroup],
}

impl FromStr for Policy {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "pack" => Ok(Self::Pack),
            "spread" => Ok(Self::Spread),
            _ => Err(PolicyError(text.chars().take(64).collect())),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pack => "pack",
            Self::Spread => "spread",
        })
    }
}

impl Rules<'_> {
    /// Orders `fit`, positions of GPUs that can take `request`: the one to take comes first. Of equals, the one that
    /// breaks the fewest groups, then the first.
    pub(crate) fn order(&self, free: &[GpuFree<'_>], request: &Request, fit: &mut [usize]) {
        fit.sort_by_key(|at| {
            let (pack, spread) = match self.policy {
                Policy::Pack => (free[*at].looseness(request), Reverse(0)),
                Policy::Spread => (0, Reverse(free[*at].emptiness())),
            };
            (pack, spread, self.broken_by(free, *at))
        });
    }

    /// The `wanted` of `fit`, positions of free whole GPUs, that are connected best, and what connects them. Those
    /// in `prefer` are among them.
    pub(crate) fn connected(
        &self,
        free: &[GpuFree<'_>],
        fit: &[usize],
        prefer: &[usize],
        wanted: usize,
    ) -> (Vec<usize>, Option<Link>) {
        let mut members = fit.to_vec();
        let mut closest = None;
        for link in [Link::NvLink, Link::Pcie, Link::Numa] {
            // The smallest group that will do, which leaves larger ones whole.
            let within = self
                .groups
                .iter()
                .filter(|group| group.link == link && prefer.iter().all(|at| group.gpus.contains(at)))
                .map(|group| members.iter().copied().filter(|at| group.gpus.contains(at)).collect::<Vec<_>>())
                .filter(|within| within.len() >= wanted)
                .min_by_key(Vec::len);
            if let Some(within) = within {
                members = within;
                closest = closest.or(Some(link));
            }
        }
        let rank = |at: &usize| prefer.iter().position(|other| other == at).unwrap_or(usize::MAX);
        members.sort_by_key(|at| (rank(at), self.broken_by(free, *at)));
        members.truncate(wanted);
        (members, closest)
    }

    /// What is lost of the groups around an untouched GPU when it is taken: how many other untouched GPUs they
    /// hold. Nothing is lost by a GPU that carries shares already.
    fn broken_by(&self, free: &[GpuFree<'_>], at: usize) -> usize {
        if free[at].shares > 0 {
            return 0;
        }
        let untouched =
            |other: &&usize| **other != at && free.get(**other).is_some_and(|gpu| gpu.shares == 0);
        let around = self.groups.iter().filter(|group| group.gpus.contains(&at));
        around.map(|group| group.gpus.iter().filter(untouched).count()).sum()
    }
}
