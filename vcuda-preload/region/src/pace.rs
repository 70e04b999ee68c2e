//! How fast a container may go on a GPU, as the node has set it in `limits`.

use crate::Slots;

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

/// Pace of a container on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Slots that are its own; none for a share without a timetable.
    pub own: Slots,
    /// Share of the GPU's time that is its own, in percent.
    pub core_percent: u32,
    /// What is lent to it.
    pub lease: Lease,
    /// What the GPU was really used, in thousandths of what the container measured itself, as stored: 0 for 1000.
    pub charge_permille: u32,
}

impl Pace {
    /// Slots in which a launch may go at the moment `now_ns`.
    pub fn slots(&self, now_ns: u64) -> Slots {
        if self.own.is_empty() {
            return Slots::ALL;
        }
        if self.is_leased(now_ns) { self.own.union(self.lease.slots) } else { self.own }
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

    fn is_leased(&self, now_ns: u64) -> bool {
        now_ns < self.lease.until_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(lease: Lease) -> Pace {
        Pace { own: Slots::first(30), core_percent: 30, lease, charge_permille: 0 }
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
