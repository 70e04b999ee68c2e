//! What of a container's memory no call has shown: a pure rule over what the driver says that its processes hold and what they
//! account for. It may be too little, which is how it is where nobody looks; too much would refuse what fits.

use region::GpuUsage;

/// Looks that must all show it. What is taken or freed while one look lasts, or is not yet gone in the driver's eyes, shows in
/// one or two.
pub(super) const LOOKS: usize = 4;

/// What a single look shows beyond the account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Beyond {
    /// So much.
    Bytes(u64),
    /// The account changed meanwhile, and may have been higher when the driver looked than before and after. So this may hold
    /// what is on it, and is no reason to count any more; it is one to count no more than that.
    AtMost(u64),
}

/// `sampled` is what the driver says that the container's processes hold, read between `before` and `after`.
///
/// The driver's own source tells memory that a process owns from what it shares with the owner; which of them NVML adds up is
/// not known. So what may be in a sum over processes more than once is taken off.
pub(super) fn beyond(sampled: u64, before: GpuUsage, after: GpuUsage) -> Beyond {
    let shared = before.shared_bytes.max(after.shared_bytes);
    let besides = |accounted| sampled.saturating_sub(accounted).saturating_sub(shared);
    if before.changes == after.changes {
        // Where a process has ended meanwhile, only the first has what it held.
        Beyond::Bytes(besides(before.used_bytes.max(after.used_bytes)))
    } else {
        Beyond::AtMost(besides(before.used_bytes.min(after.used_bytes)))
    }
}

/// What the last looks have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Figure([u64; LOOKS]);

impl Figure {
    /// One that goes on where another device plugin left off: it can only fall until it is known anew.
    pub(super) fn known(bytes: u64) -> Self {
        Self([bytes; LOOKS])
    }

    /// Takes in what a look showed, and tells what is on the account from now on.
    pub(super) fn look(&mut self, beyond: Beyond) -> u64 {
        match beyond {
            Beyond::Bytes(bytes) => {
                self.0.rotate_left(1);
                self.0[LOOKS - 1] = bytes;
            }
            Beyond::AtMost(bytes) => self.0 = self.0.map(|shown| shown.min(bytes)),
        }
        self.0.into_iter().min().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Beyond::*, *};

    fn usage(used_bytes: u64, shared_bytes: u64) -> GpuUsage {
        GpuUsage { used_bytes, shared_bytes, ..GpuUsage::default() }
    }

    fn changed(usage: GpuUsage, changes: u64) -> GpuUsage {
        GpuUsage { changes, ..usage }
    }

    #[test]
    fn what_is_accounted_or_held_twice_is_not_beyond_the_account() {
        assert_eq!(beyond(700, usage(300, 0), usage(300, 0)), Bytes(400));
        assert_eq!(beyond(700, usage(500, 0), usage(300, 0)), Bytes(200), "a process ended meanwhile");
        assert_eq!(beyond(700, usage(300, 100), usage(300, 0)), Bytes(300), "held by two processes");
        assert_eq!(beyond(700, usage(900, 0), usage(0, 0)), Bytes(0), "managed memory that is not there now");
        assert_eq!(beyond(u64::MAX, usage(u64::MAX, u64::MAX), usage(0, 0)), Bytes(0));
    }

    #[test]
    fn what_the_account_did_while_the_driver_was_asked_is_not_known() {
        assert_eq!(beyond(700, usage(300, 0), changed(usage(300, 0), 2)), AtMost(400), "taken and freed");
        assert_eq!(beyond(700, usage(300, 0), changed(usage(500, 0), 1)), AtMost(400), "taken");
        assert_eq!(beyond(700, usage(500, 100), changed(usage(300, 0), 1)), AtMost(300), "freed");
    }

    #[test]
    fn it_takes_all_looks_to_rise_and_one_to_fall() {
        let mut figure = Figure::known(0);
        let seen: Vec<_> =
            [400, 410, 405, 400, 400, 200, 400].map(|beyond| figure.look(Bytes(beyond))).into();
        assert_eq!(seen, [0, 0, 0, 400, 400, 200, 200]);
        assert_eq!(figure.look(Bytes(0)), 0, "its processes are gone");
    }

    #[test]
    fn a_look_at_a_changing_account_lets_it_fall_and_never_rise() {
        let mut figure = Figure::known(0);
        let looks = [Bytes(400), Bytes(400), AtMost(500), Bytes(400), AtMost(900), Bytes(400)];
        assert_eq!(looks.map(|look| figure.look(look)), [0, 0, 0, 0, 0, 400], "four that show it");
        let looks = [AtMost(600), AtMost(600), AtMost(600), AtMost(600), AtMost(100), Bytes(400)];
        assert_eq!(looks.map(|look| figure.look(look)), [400, 400, 400, 400, 100, 100]);
        assert_eq!(figure.look(AtMost(0)), 0, "its processes are gone");
    }

    #[test]
    fn what_was_known_stays_until_a_look_shows_less() {
        let mut figure = Figure::known(300);
        assert_eq!([500, 250, 500].map(|beyond| figure.look(Bytes(beyond))), [300, 250, 250]);
    }

    proptest! {
        #[test]
        fn it_is_never_more_than_any_of_the_last_looks_showed(
            known: u64,
            looks in prop::collection::vec((0..1000_u64, 0..1000_u64, 0..1000_u64, 0..200_u64, 0..2_u64), 1..30),
        ) {
            let mut figure = Figure::known(known);
            let mut shown = Vec::new();
            for (sampled, before, after, shared, changes) in looks {
                let beyond = beyond(sampled, usage(before, shared), changed(usage(after, 0), changes));
                let now = figure.look(beyond);
                match beyond {
                    Bytes(bytes) => shown.push(bytes),
                    AtMost(bytes) => prop_assert!(now <= bytes),
                }
                let last = &shown[shown.len().saturating_sub(LOOKS)..];
                prop_assert!(last.iter().all(|shown| now <= *shown));
            }
        }

        /// The account holds a block from before the driver gives it until after the driver has it back. However blocks come and
        /// go, and whenever the driver looks: what is put on the account is never more than contexts and modules take. It is
        /// all of that after four looks in which nothing came or went.
        #[test]
        fn allocations_in_flight_are_not_counted_twice(
            context in 0..500_u64,
            // What is on the account one after the other during a look, of which the driver is asked at the highest; and what of
            // that it does not have yet.
            looks in prop::collection::vec(
                (prop::collection::vec(0..1000_u64, 1..6), prop_oneof![3 => Just(0), 1 => 0..1000_u64]),
                1..40,
            ),
        ) {
            let mut figure = Figure::known(0);
            let mut changes = 0;
            for (accounts, under_way) in looks {
                let before = changed(usage(accounts[0], 0), changes);
                changes += accounts.len() as u64 - 1;
                let after = changed(usage(accounts[accounts.len() - 1], 0), changes);
                let held = accounts.into_iter().max().unwrap_or(0).saturating_sub(under_way);
                let now = figure.look(beyond(context + held, before, after));
                prop_assert!(now <= context, "{now}");
            }
            let quiet = beyond(context + 700, changed(usage(700, 0), changes), changed(usage(700, 0), changes));
            let seen = [quiet; LOOKS].map(|quiet| figure.look(quiet));
            prop_assert_eq!(seen[LOOKS - 1], context);
        }
    }
}
