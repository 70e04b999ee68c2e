//! What a container gets back of what it paid: time that it was charged for and the driver says that others had. Pure.
//!
//! [`crate::Correction`] sets right what work costs from now on, once it has seen enough. What has been paid before, above all by
//! kernels of a container that has just started, would be a debt for as long as its neighbours' kernels lasted beside them.
//!
//! Only as much comes back as neither rounding nor lateness of the driver's figures explains, and it pays debts only: no budget
//! has more for it than one that was never charged too much ([`crate::Budget::take`]).

/// What was paid is remembered by ticks of at least [`TICK_NS`], for as long as the driver's figures can be late.
const TICKS: usize = 24;

/// See [`TICKS`], in nanoseconds.
const TICK_NS: u64 = 100_000_000;

/// What rounding to whole percents may leave of a process, in millionths of the time.
const ROUNDING: u64 = 5000;

/// What may be paid in one tick, in nanoseconds: a program that waits for a kernel counts it when it has ended.
const MOST_NS: u64 = 400_000_000;

/// How far what the driver saw may be ahead of what was paid, in nanoseconds: more than is paid in one tick, so that the time of
/// such a kernel is not forgotten before it is paid.
const LEAD_NS: i64 = 500_000_000;

/// The sums of one share on one GPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct Refund {
    /// What was paid, less what the driver saw, what it may have rounded off, and what has come back. At least -[`LEAD_NS`].
    surplus_ns: i64,
    /// The driver has seen something of this container.
    seen: bool,
    /// What was paid in the last ticks: the one that is filled at present is at `next`, the oldest after it.
    paid_ns: [u64; TICKS],
    next: usize,
    filled_ns: u64,
}

impl Refund {
    /// Takes in what the driver saw a container use in the last `passed_ns`, and what it was charged for. The driver's figures
    /// are `late_ns` old; more than two seconds count as two. Tells what of all that is to come back now, in nanoseconds of
    /// GPU time.
    ///
    /// The driver rounds what each of up to `processes` has used. Of those that have ended it tells nothing any more:
    /// with each that comes a new [`Refund`] begins.
    pub fn add(&mut self, passed_ns: u64, driver_ns: u64, paid_ns: u64, processes: u32, late_ns: u64) -> u64 {
        // Nobody uses a GPU for longer than time passes.
        let paid = paid_ns.min(passed_ns.saturating_mul(2)).min(MOST_NS);
        let rounded = (passed_ns / 1_000_000).saturating_mul(ROUNDING * u64::from(processes.max(1)));
        let used = i64::try_from(driver_ns.saturating_add(rounded)).unwrap_or(i64::MAX);
        self.surplus_ns = (self.surplus_ns + paid.cast_signed()).saturating_sub(used).max(-LEAD_NS);
        self.paid_ns[self.next] += paid;
        self.filled_ns = self.filled_ns.saturating_add(passed_ns);
        if self.filled_ns >= TICK_NS {
            self.filled_ns = 0;
            self.next = (self.next + 1) % TICKS;
            self.paid_ns[self.next] = 0;
        }
        self.seen |= driver_ns > 0;
        if !self.seen {
            // It says nothing about this container.
            return 0;
        }
        let back = u64::try_from(self.surplus_ns).unwrap_or(0).saturating_sub(self.unseen_ns(late_ns));
        self.surplus_ns -= back.cast_signed();
        back
    }

    /// What was paid so lately that the driver may not have told of it, in nanoseconds of GPU time.
    fn unseen_ns(&self, late_ns: u64) -> u64 {
        // The tick that is filled, and the one that such a moment is in.
        let ticks = usize::try_from(late_ns / TICK_NS).unwrap_or(TICKS).saturating_add(2).min(TICKS);
        (0..ticks).map(|ago| self.paid_ns[(self.next + TICKS - ago) % TICKS]).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TICK: u64 = 100_000_000;

    /// The driver does not say how old its figures are.
    const UNKNOWN: u64 = u64::MAX;

    /// What comes back in so many ticks of using and paying these percents of the time, in milliseconds.
    fn after(ticks: u32, driver: u64, paid: u64, processes: u32) -> u64 {
        let mut refund = Refund::default();
        (0..ticks)
            .map(|_| refund.add(TICK, TICK / 100 * driver, TICK / 100 * paid, processes, UNKNOWN))
            .sum::<u64>()
            / 1_000_000
    }

    #[test]
    fn what_neighbours_had_comes_back_when_the_driver_must_have_told_of_it() {
        // Ten kernels ran beside each other for two seconds, and each paid for all of it.
        let mut refund = Refund::default();
        let mut back = 0;
        for tick in 0..20 {
            back += refund.add(TICK, TICK / 10, TICK, 1, UNKNOWN);
            assert_eq!(back, 0, "tick {tick}: the driver may yet tell of it");
        }
        for _ in 20..45 {
            back += refund.add(TICK, 0, 0, 1, UNKNOWN);
        }
        // 200 ms were its own, and half a percent of the time may be rounding.
        assert!((1_750_000_000..1_800_000_000).contains(&back), "{back}");
        assert_eq!((0..100).map(|_| refund.add(TICK, 0, 0, 1, UNKNOWN)).sum::<u64>(), 0, "once");
    }

    #[test]
    fn what_the_driver_is_known_to_have_told_of_comes_back_at_once() {
        let mut refund = Refund::default();
        let back = (0..20).map(|_| refund.add(TICK, TICK / 10, TICK, 1, TICK)).sum::<u64>();
        // Nine tenths of what was paid and half a percent, but not of the last three ticks, which are paid in full.
        assert_eq!(back, (20 * TICK * 9 / 10 - 20 * TICK / 200) - 3 * TICK + TICK);
    }

    #[test]
    fn who_pays_for_what_it_has_gets_nothing_back() {
        for percent in [0, 1, 10, 30, 90, 100] {
            assert_eq!(after(600, percent, percent, 1), 0, "{percent}");
        }
        assert_eq!(after(600, 40, 30, 1), 0, "nor who pays for less");
        assert_eq!(after(600, 0, 30, 1), 0, "nor of whom the driver sees nothing");
    }

    #[test]
    fn rounding_of_many_processes_brings_nothing_back() {
        assert_eq!(after(600, 20, 30, 64), 0);
        // Of 10 % all but the last two seconds and a half, and half a percent.
        assert!((4_900..5_100).contains(&after(600, 20, 30, 1)), "{}", after(600, 20, 30, 1));
    }

    #[test]
    fn figures_that_come_late_or_in_lumps_bring_nothing_back() {
        for late in [1, 3, 10, 19] {
            let mut refund = Refund::default();
            let busy = |tick: i64| if (50..150).contains(&tick) || tick >= 300 { TICK / 100 * 70 } else { 0 };
            for tick in 0..400 {
                assert_eq!(
                    refund.add(TICK, busy(tick - late), busy(tick), 1, UNKNOWN),
                    0,
                    "tick {tick}, {late} late"
                );
            }
        }
        let mut refund = Refund::default();
        for tick in 0..400 {
            let lump = if tick % 10 == 9 { TICK * 3 } else { 0 };
            assert_eq!(refund.add(TICK, lump, TICK * 3 / 10, 1, UNKNOWN), 0, "tick {tick}");
        }
    }

    /// Nothing is counted before it has ended, and then all at once.
    #[test]
    fn long_kernels_that_are_waited_for_bring_nothing_back() {
        for kernel in [2, 5, 20, 100] {
            let mut refund = Refund::default();
            for tick in 1..1_000_u64 {
                let paid = if tick % (2 * kernel) == kernel { TICK * kernel } else { 0 };
                let used = if tick % (2 * kernel) < kernel { TICK } else { 0 };
                assert_eq!(refund.add(TICK, used, paid, 1, UNKNOWN), 0, "{kernel} ticks, tick {tick}");
            }
        }
    }

    proptest! {
        /// Never more than was paid, nor any of what the driver saw.
        #[test]
        fn no_more_comes_back_than_was_paid(steps in prop::collection::vec((1..300_000_000_u64, 0..=200_u64, 0..=200_u64), 1..200)) {
            let mut refund = Refund::default();
            let (mut driver, mut paid, mut back) = (0, 0, 0);
            for (passed, driver_percent, paid_percent) in steps {
                driver += passed / 100 * driver_percent;
                paid += passed / 100 * paid_percent;
                back += refund.add(passed, passed / 100 * driver_percent, passed / 100 * paid_percent, 1, UNKNOWN);
                prop_assert!(back <= paid);
            }
            prop_assert!(back == 0 || driver > 0);
        }

        #[test]
        fn any_figures_are_borne(steps in prop::collection::vec(any::<(u64, u64, u64, u32, u64)>(), 1..50)) {
            let mut refund = Refund::default();
            for (passed, driver, paid, processes, late) in steps {
                refund.add(passed, driver, paid, processes, late);
            }
        }
    }
}
