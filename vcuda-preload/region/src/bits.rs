//! Sets of small numbers, a bit each.

use std::iter;

/// The numbers whose bits are set, from the lowest.
pub(crate) fn bits(set: u64) -> impl Iterator<Item = usize> {
    let some = |set: u64| (set != 0).then_some(set);
    // Each without the lowest bit of the one before.
    iter::successors(some(set), move |set| some(set & (set - 1))).map(|set| set.trailing_zeros() as usize)
}
