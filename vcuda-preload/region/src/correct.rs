//! How far a container's own measure of its GPU time is to be trusted: what the driver measured against what the shim
//! measured, over some time. Pure.
//!
//! The shim's figures are exact for what it sees, but it cannot see whether the GPU was a neighbour's for a part of the
//! time between a kernel's start and its end. The driver's come in whole percents and up to two seconds late. So only
//! as much of a difference counts as neither rounding nor lateness explains; and where the driver sees nothing of a
//! container, it has nothing to say about it.

/// Time constant of the sums in nanoseconds.
const MEMORY_NS: u64 = 20_000_000_000;

/// No correction before this much has been seen, in nanoseconds.
const EVIDENCE_NS: u64 = 4_000_000_000;

/// How old the driver's figures may be, in nanoseconds: what a sample covers, and as much until it is there.
const LATE_NS: u64 = 2_000_000_000;

/// Work after so long a pause is other work. Kernels of seconds in a small share come so far apart.
const PAUSE_NS: u64 = 10_000_000_000;

/// Use of the last while, noted once every so many nanoseconds, and for a little longer than figures can be late.
const KEPT: usize = 24;
const KEPT_EVERY_NS: u64 = LATE_NS / 20;

/// Bounds of the correction, in thousandths. Of twenty shares that all have work on the GPU, each has a twentieth of it.
pub(crate) const BOUNDS: (u32, u32) = (50, 4000);

/// What rounding to whole percents may leave of a process when many samples have been averaged, in millionths of the
/// time.
const ROUNDING: u64 = 2500;

/// By so much time, in nanoseconds, the driver's sum may be ahead: its samples end when they do, not with a tick.
const AHEAD_NS: u64 = 166_666_667;

/// Of 1000.
const TRUST: u64 = 1000;

/// The sums of one share on one GPU.
#[derive(Clone, Copy, Debug)]
pub struct Correction {
    driver_ns: u64,
    own_ns: u64,
    seen_ns: u64,
    /// What the container has said since the driver last said anything of it, and for how long.
    waiting_ns: (u64, u64),
    /// For how long the container has said nothing.
    idle_ns: u64,
    /// So much longer nothing is summed up: the driver does not yet tell of work that began.
    skip_ns: u64,
    /// Millionths of the time that the container said it used, as of the last while; the next one to be overwritten,
    /// and how long ago the last was.
    kept: [u64; KEPT],
    next: usize,
    kept_ago_ns: u64,
    permille: u64,
    /// The difference is larger than the driver's error.
    doubted: bool,
}

impl Default for Correction {
    fn default() -> Self {
        Self {
            driver_ns: 0,
            own_ns: 0,
            seen_ns: 0,
            waiting_ns: (0, 0),
            idle_ns: PAUSE_NS,
            skip_ns: 0,
            kept: [0; KEPT],
            next: 0,
            kept_ago_ns: 0,
            permille: TRUST,
            doubted: false,
        }
    }
}

impl Correction {
    /// Takes in what was used in the last `passed_ns`, as the driver and as the container measured it. Tells what a
    /// nanosecond of the container's own measure counts, in thousandths. The driver's figures are `late_ns` old; more than two
    /// seconds count as two.
    ///
    /// The driver rounds what each of up to `processes` has used. Of those that have ended it tells nothing any more:
    /// with each that comes a new [`Correction`] begins.
    pub fn add(&mut self, passed_ns: u64, driver_ns: u64, own_ns: u64, processes: u32, late_ns: u64) -> u32 {
        let (passed, late_ns) = (passed_ns.min(MEMORY_NS), late_ns.min(LATE_NS));
        // Nobody uses a GPU for longer than time passes; the driver's figures come in lumps of up to a second.
        self.sum(passed, driver_ns.min(MEMORY_NS), own_ns.min(passed.saturating_mul(2)), late_ns);
        if self.idle_ns >= LATE_NS {
            // Nothing is decided while nothing runs.
            return u32::try_from(self.permille).unwrap_or(1000);
        }
        let wanted = self.wanted(ROUNDING * u64::from(processes.max(1)), late_ns);
        // A tenth of the way each tick, so that no single figure makes a jump.
        let (least, most) = (u64::from(BOUNDS.0), u64::from(BOUNDS.1));
        self.permille = (self.permille * 9 + wanted).div_ceil(10).clamp(least, most);
        if self.permille.abs_diff(wanted) < 10 {
            self.permille = wanted;
        }
        u32::try_from(self.permille).unwrap_or(1000)
    }

    fn sum(&mut self, passed: u64, driver_ns: u64, own_ns: u64, late_ns: u64) {
        if own_ns == 0 {
            self.idle_ns = self.idle_ns.saturating_add(passed);
        } else if std::mem::take(&mut self.idle_ns) >= PAUSE_NS {
            let before = *self;
            *self = Self { idle_ns: 0, skip_ns: late_ns, permille: before.permille, ..Self::default() };
        }
        if self.skip_ns > 0 {
            self.skip_ns = self.skip_ns.saturating_sub(passed);
            return;
        }
        let fade = |sum: u64| sum - sum / MEMORY_NS.div_ceil(1000) * (passed / 1000);
        self.driver_ns = fade(self.driver_ns).saturating_add(driver_ns);
        self.own_ns = fade(self.own_ns);
        self.seen_ns = fade(self.seen_ns).saturating_add(passed);
        // Where the driver's figures come in lumps, so do the container's.
        self.waiting_ns =
            (self.waiting_ns.0.saturating_add(own_ns), self.waiting_ns.1.saturating_add(passed));
        if driver_ns > 0 || self.waiting_ns.1 >= LATE_NS {
            self.own_ns = self.own_ns.saturating_add(std::mem::take(&mut self.waiting_ns).0);
        }
        self.kept_ago_ns = self.kept_ago_ns.saturating_add(passed);
        if self.kept_ago_ns >= KEPT_EVERY_NS {
            self.kept_ago_ns = 0;
            self.kept[self.next] = self.of_the_time(self.own_ns);
            self.next = (self.next + 1) % KEPT;
        }
    }

    /// Millionths of the time.
    fn of_the_time(&self, ns: u64) -> u64 {
        ns.saturating_mul(1000) / (self.seen_ns / 1000).max(1)
    }

    fn wanted(&mut self, error: u64, late_ns: u64) -> u64 {
        let (own, driver) = (self.of_the_time(self.own_ns), self.of_the_time(self.driver_ns));
        if self.seen_ns < EVIDENCE_NS || driver == 0 || own < 10_000 {
            self.doubted = false;
            return TRUST;
        }
        // As far back as the figures are old, and a little longer.
        let count = usize::try_from(late_ns / KEPT_EVERY_NS).unwrap_or(KEPT).saturating_add(4).min(KEPT);
        let kept = (1..=count).map(|ago| self.kept[(self.next + KEPT - ago) % KEPT]);
        let (low, high) = kept.fold((own, own), |(low, high), kept| (low.min(kept), high.max(kept)));
        let more = error.saturating_add(self.of_the_time(AHEAD_NS).saturating_mul(own) / 1_000_000);
        self.doubted = if self.doubted {
            own > driver.saturating_add(error / 2) || driver > own.saturating_add(more / 2)
        } else {
            driver.saturating_add(error) < low || driver > high.saturating_add(more)
        };
        if !self.doubted {
            return TRUST;
        }
        (driver * 1000 / own).clamp(BOUNDS.0.into(), BOUNDS.1.into())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TICK: u64 = 100_000_000;

    /// The driver does not say how old its figures are.
    const UNKNOWN: u64 = u64::MAX;

    /// After `ticks` with these percents of the time.
    fn after(ticks: u32, driver: u64, own: u64) -> u32 {
        let mut correction = Correction::default();
        (0..ticks)
            .map(|_| correction.add(TICK, TICK / 100 * driver, TICK / 100 * own, 1, UNKNOWN))
            .last()
            .unwrap()
    }

    #[test]
    fn a_container_that_measures_right_is_trusted_to_the_nanosecond() {
        for percent in [0, 1, 10, 30, 90, 100] {
            assert_eq!(after(200, percent, percent), 1000, "{percent}");
        }
        let mut correction = Correction::default();
        for tick in 0..400 {
            let rounded = if tick % 2 == 0 { 29 } else { 31 };
            assert_eq!(
                correction.add(TICK, TICK / 100 * rounded, TICK / 100 * 30, 1, UNKNOWN),
                1000,
                "tick {tick}"
            );
        }
    }

    #[test]
    fn work_that_the_shim_does_not_see_costs_double() {
        let charge = after(200, 60, 30);
        assert!((1980..=2020).contains(&charge), "{charge}");
        assert_eq!(after(30, 60, 30), 1000, "three seconds are no evidence");
    }

    #[test]
    fn fresh_figures_are_believed_after_four_seconds_late_ones_after_six() {
        let after = |ticks: u64, late_ns: u64| {
            let mut correction = Correction::default();
            (0..ticks).map(|_| correction.add(TICK, TICK / 10, TICK / 2, 1, late_ns)).last().unwrap()
        };
        assert_eq!((after(39, TICK), after(59, UNKNOWN)), (1000, 1000));
        assert!(
            after(55, TICK) < 900 && after(80, UNKNOWN) < 900,
            "{} {}",
            after(55, TICK),
            after(80, UNKNOWN)
        );
    }

    #[test]
    fn time_in_which_others_ran_is_given_back() {
        for (driver, own, least, most) in [(20, 40, 490, 510), (29, 30, 960, 970), (10, 100, 95, 105)] {
            let charge = after(200, driver, own);
            assert!((least..=most).contains(&charge), "{driver} {own}: {charge}");
        }
    }

    /// Of 64 processes that use half a percent each, it may say that each used none, or one.
    #[test]
    fn rounding_of_many_processes_proves_nothing() {
        let charge = |driver: u64, processes| {
            let mut correction = Correction::default();
            let mut charge = 0;
            for _ in 0..200 {
                charge = correction.add(TICK, TICK / 100 * driver, TICK / 100 * 30, processes, UNKNOWN);
            }
            charge
        };
        assert_eq!((charge(20, 64), charge(40, 64)), (1000, 1000));
        assert!(charge(20, 1) < 700 && charge(40, 1) > 1300);
    }

    /// Six a second, of which two begin within a tick. A container that used 89.9 % was charged for up to 1.3 % more.
    #[test]
    fn samples_that_are_ahead_of_the_containers_figures_cost_nothing() {
        let mut correction = Correction::default();
        let samples = [(156_666_666, 0), (0, 100), (146_666_666, 33), (0, 133), (146_666_666, 66)];
        for (tick, (driver, late_ms)) in samples.into_iter().cycle().take(400).enumerate() {
            let charge = correction.add(TICK, driver, TICK / 1000 * 899, 1, late_ms * 1_000_000);
            assert_eq!(charge, 1000, "tick {tick}");
        }
        assert!(after(200, 92, 90) > 1000, "two percent of it are not that");
    }

    #[test]
    fn a_driver_that_sees_nothing_of_a_container_says_nothing_about_it() {
        assert_eq!(after(200, 0, 30), 1000);
        assert_eq!(after(200, 30, 0), 1000);
    }

    /// The driver tells a second's use at the end of that second.
    #[test]
    fn late_figures_in_lumps_change_nothing() {
        let mut correction = Correction::default();
        for tick in 0..400_u64 {
            let lump = if tick % 10 == 9 && tick > 10 { TICK * 3 } else { 0 };
            assert_eq!(correction.add(TICK, lump, TICK * 3 / 10, 1, UNKNOWN), 1000, "tick {tick}");
        }
    }

    /// The driver's figures come up to two seconds later.
    #[test]
    fn a_load_that_begins_or_ends_changes_nothing() {
        for late in [1, 3, 10, 19] {
            let mut correction = Correction::default();
            let busy = |tick: i64| if (50..150).contains(&tick) || tick >= 300 { TICK / 100 * 70 } else { 0 };
            for tick in 0..400 {
                let charge = correction.add(TICK, busy(tick - late), busy(tick), 1, UNKNOWN);
                assert_eq!(charge, 1000, "tick {tick}, {late} late");
            }
        }
    }

    proptest! {
        #[test]
        fn any_figures_stay_in_bounds(steps in prop::collection::vec(any::<(u64, u64, u64, u32, u64)>(), 1..50)) {
            let mut correction = Correction::default();
            for (passed, driver, own, processes, late) in steps {
                let charge = correction.add(passed, driver, own, processes, late);
                prop_assert!((BOUNDS.0..=BOUNDS.1).contains(&charge));
            }
        }
    }
}
