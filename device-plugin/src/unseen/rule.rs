//! What of a container's memory no call has shown: a pure rule over what the driver says that its processes hold and what they
//! account for. It may be too little, which is how it is where nobody looks; too much would refuse what fits.

use region::GpuUsage;

/// Looks that must all show it. What is taken or freed while one look lasts, or is not yet gone in the driver's eyes, shows in
/// one or two.
pub(super) const LOOKS: usize = 4;

/// What a single look shows beyond the account: `sampled` is the sum over the container's processes, read between `before` and
/// `after`.
///
/// The driver's own source tells memory that a process owns from what it shares with the owner; which of them NVML adds up is
/// not known. So what may be in the sum more than once is taken off.
pub(super) fn beyond(sampled: u64, before: GpuUsage, after: GpuUsage) -> u64 {
    let accounted = before.used_bytes.max(after.used_bytes);
    let shared = before.shared_bytes.max(after.shared_bytes);
    sampled.saturating_sub(accounted).saturating_sub(shared)
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
    pub(super) fn look(&mut self, beyond: u64) -> u64 {
        self.0.rotate_left(1);
        self.0[LOOKS - 1] = beyond;
        self.0.into_iter().min().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn usage(used_bytes: u64, shared_bytes: u64) -> GpuUsage {
        GpuUsage { used_bytes, shared_bytes, ..GpuUsage::default() }
    }

    #[test]
    fn what_is_accounted_or_held_twice_is_not_beyond_the_account() {
        assert_eq!(beyond(700, usage(300, 0), usage(300, 0)), 400);
        assert_eq!(beyond(700, usage(300, 0), usage(500, 0)), 200, "taken while the driver was asked");
        assert_eq!(beyond(700, usage(500, 0), usage(300, 0)), 200, "freed meanwhile");
        assert_eq!(beyond(700, usage(300, 100), usage(300, 0)), 300, "held by two processes");
        assert_eq!(beyond(700, usage(900, 0), usage(0, 0)), 0, "managed memory that is not there now");
        assert_eq!(beyond(u64::MAX, usage(u64::MAX, u64::MAX), usage(0, 0)), 0);
    }

    #[test]
    fn it_takes_all_looks_to_rise_and_one_to_fall() {
        let mut figure = Figure::known(0);
        let seen: Vec<_> = [400, 410, 405, 400, 400, 200, 400].map(|beyond| figure.look(beyond)).into();
        assert_eq!(seen, [0, 0, 0, 400, 400, 200, 200]);
        assert_eq!(figure.look(0), 0, "its processes are gone");
    }

    #[test]
    fn what_was_known_stays_until_a_look_shows_less() {
        let mut figure = Figure::known(300);
        assert_eq!((figure.look(500), figure.look(250), figure.look(500)), (300, 250, 250));
    }

    proptest! {
        #[test]
        fn it_is_never_more_than_any_of_the_last_looks_showed(
            known: u64,
            looks in prop::collection::vec((0..1000_u64, 0..1000_u64, 0..1000_u64, 0..200_u64), 1..20),
        ) {
            let mut figure = Figure::known(known);
            let mut shown = Vec::new();
            for (sampled, before, after, shared) in looks {
                shown.push(sampled.saturating_sub(before.max(after)).saturating_sub(shared));
                let now = figure.look(beyond(sampled, usage(before, shared), usage(after, 0)));
                let last = &shown[shown.len().saturating_sub(LOOKS)..];
                prop_assert!(last.iter().all(|shown| now <= *shown));
                prop_assert!(shown.len() < LOOKS || Some(now) == last.iter().copied().min());
            }
        }

        /// The account holds a block from before the driver gives it until after the driver has it back. Blocks come and go,
        /// and the driver's word is of a moment while one of them may already be freed: what is put on the account is
        /// never more than contexts and modules take, but where four looks in a row fall into such moments.
        #[test]
        fn allocations_in_flight_are_not_counted_twice(
            context in 0..500_u64,
            moments in prop::collection::vec((0..1000_u64, 0..1000_u64, 0..1000_u64), 4..40),
            quiet in 0..LOOKS,
        ) {
            let mut figure = Figure::known(0);
            for (at, (before, during, after)) in moments.into_iter().enumerate() {
                // One look in four has no block that is there only while the driver is asked.
                let during = if at % LOOKS == quiet { during.min(before.max(after)) } else { during };
                let now = figure.look(beyond(context + during, usage(before, 0), usage(after, 0)));
                prop_assert!(now <= context, "{now}");
            }
        }
    }
}
