//! How fast a container may go on a GPU, as the node has set it in `limits`.

use crate::{PERIOD_NS, SLOT_NS, Slots};

/// What a share may use besides its own for a while. All zero: nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lease {
    /// Slots besides its own.
    pub slots: Slots,
    /// Share of the GPU's time, in thousandths; 0 for its core share.
    pub rate_permille: u32,
    /// CLOCK_MONOTONIC in nanoseconds at which the lease ends.
    pub until_ns: u64,
}

/// Slots last at most so many times [`SLOT_NS`]: what the governors of earlier versions went up to.
pub const MAX_STRETCH: u32 = 20;

/// How many times [`SLOT_NS`] a GPU's slots last. It changes at a moment, and all containers of the GPU are told of it
/// before, so that at no time two timetables hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Before that moment: 1 to [`MAX_STRETCH`].
    pub before: u32,
    /// From that moment on: 1 to [`MAX_STRETCH`].
    pub after: u32,
    /// CLOCK_MONOTONIC in nanoseconds, a multiple of [`PERIOD_NS`].
    pub from_ns: u64,
}

impl Default for Stretch {
    fn default() -> Self {
        Self { before: 1, after: 1, from_ns: 0 }
    }
}

impl Stretch {
    /// What holds at the moment `now_ns`.
    pub fn at(self, now_ns: u64) -> u32 {
        if now_ns < self.from_ns { self.before } else { self.after }
    }

    /// All of it in one word, so that it is never half old and half new: from the lowest bit on a byte each for `after` and
    /// `before`, then the number of the period of [`PERIOD_NS`].
    pub(crate) fn word(self) -> u64 {
        ((self.from_ns / PERIOD_NS) << 16) | (u64::from(self.before) << 8) | u64::from(self.after)
    }

    /// The same from whatever is in the file. 0, which is also what a version that knew of none left there, counts as 1.
    pub(crate) fn from_word(word: u64) -> Self {
        let [after, before, ..] = word.to_le_bytes();
        let bounded = |times: u8| u32::from(times).clamp(1, MAX_STRETCH);
        let from_ns = (word >> 16).saturating_mul(PERIOD_NS);
        Self { before: bounded(before), after: bounded(after), from_ns }
    }
}

/// Pace of a container on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Slots that are its own; none for a share without a timetable.
    pub own: Slots,
    /// Share of the GPU's time that is its own, in percent.
    pub core_percent: u32,
    /// What is lent to it.
    pub lease: Lease,
    /// How long slots last while the lease does; after it, [`SLOT_NS`].
    pub stretch: Stretch,
    /// What the GPU was really used, in thousandths of what the container measured itself, as stored: 0 for 1000.
    pub charge_permille: u32,
    /// What comes off its debt, in nanoseconds of GPU time, since `limits` was made.
    pub refund_ns: u64,
}

impl Pace {
    /// Slots in which a launch may go at the moment `now_ns`.
    pub fn slots(&self, now_ns: u64) -> Slots {
        if self.own.is_empty() {
            return Slots::ALL;
        }
        if self.is_leased(now_ns) { self.own.union(self.lease.slots) } else { self.own }
    }

    /// How long a slot lasts at the moment `now_ns`, in nanoseconds.
    pub fn slot_ns(&self, now_ns: u64) -> u64 {
        let times = if self.is_leased(now_ns) && !self.own.is_empty() { self.stretch.at(now_ns) } else { 1 };
        u64::from(times.clamp(1, MAX_STRETCH)) * SLOT_NS
    }

    /// Share of the GPU's time that may be used at the moment `now_ns`, in thousandths: 1 to 1000.
    pub fn rate_permille(&self, now_ns: u64) -> u32 {
        let rate = if self.is_leased(now_ns) { self.lease.rate_permille } else { 0 };
        let rate = if rate == 0 { self.core_percent.saturating_mul(10) } else { rate };
        rate.clamp(1, 1000)
    }

    /// Whether nothing is held back at the moment `now_ns`: the whole GPU, at any time.
    pub fn is_unpaced(&self, now_ns: u64) -> bool {
        self.rate_permille(now_ns) == 1000 && self.slots(now_ns) == Slots::ALL
    }

    /// What a nanosecond that the container measured costs it, in thousandths: within 50 and 4000.
    pub fn charge_permille(&self) -> u32 {
        if self.charge_permille == 0 {
            1000
        } else {
            self.charge_permille.clamp(crate::correct::BOUNDS.0, crate::correct::BOUNDS.1)
        }
    }

    /// Whether the node has lately said how the container may go on.
    pub(crate) fn is_leased(&self, now_ns: u64) -> bool {
        now_ns < self.lease.until_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(lease: Lease) -> Pace {
        Pace {
            own: Slots::first(30),
            core_percent: 30,
            lease,
            stretch: Stretch::default(),
            charge_permille: 0,
            refund_ns: 0,
        }
    }

    #[test]
    fn what_is_lent_is_lent_until_the_lease_ends() {
        let lent = Slots::ALL.difference(Slots::first(30));
        let pace = pace(Lease { slots: lent, rate_permille: 1000, until_ns: 100 });
        assert_eq!((pace.slots(99), pace.rate_permille(99), pace.is_unpaced(99)), (Slots::ALL, 1000, true));
        assert_eq!((pace.slots(100), pace.rate_permille(100)), (Slots::first(30), 300));
        assert!(!pace.is_unpaced(100));
    }

    #[test]
    fn slots_last_longer_from_the_told_moment_on_and_while_the_lease_holds() {
        let lease = Lease { until_ns: 1000 * PERIOD_NS, ..Lease::default() };
        let stretch = Stretch { before: 2, after: 10, from_ns: 40 * PERIOD_NS };
        let pace = Pace { stretch, ..pace(lease) };
        assert_eq!(pace.slot_ns(40 * PERIOD_NS - 1), 2 * SLOT_NS);
        assert_eq!(pace.slot_ns(40 * PERIOD_NS), 10 * SLOT_NS);
        assert_eq!(pace.slot_ns(1000 * PERIOD_NS), SLOT_NS, "alone, nobody can agree on more");
        assert_eq!(Pace { own: Slots::NONE, ..pace }.slot_ns(40 * PERIOD_NS), SLOT_NS);
        assert_eq!(Stretch::from_word(stretch.word()), stretch);
        assert_eq!(Stretch::from_word(0), Stretch::default());
        let garbage = Stretch::from_word(u64::MAX);
        assert_eq!((garbage.before, garbage.after), (MAX_STRETCH, MAX_STRETCH));
    }

    #[test]
    fn without_a_timetable_only_the_budget_holds() {
        let pace = Pace { own: Slots::NONE, ..pace(Lease::default()) };
        assert_eq!((pace.slots(0), pace.rate_permille(0)), (Slots::ALL, 300));
    }

    #[test]
    fn no_figure_in_the_file_stops_a_container_or_lets_it_pass_the_gpu() {
        let lease = |rate_permille| Lease { slots: Slots::NONE, rate_permille, until_ns: u64::MAX };
        assert_eq!(pace(lease(0)).rate_permille(5), 300);
        assert_eq!(pace(lease(u32::MAX)).rate_permille(5), 1000);
        assert_eq!(Pace { core_percent: 0, ..pace(lease(0)) }.rate_permille(5), 1);
        assert_eq!(Pace { core_percent: u32::MAX, ..pace(lease(0)) }.rate_permille(5), 1000);
        let charge = |charge_permille| Pace { charge_permille, ..pace(lease(0)) }.charge_permille();
        assert_eq!((charge(0), charge(1), charge(900), charge(u32::MAX)), (1000, 50, 900, 4000));
    }
}
