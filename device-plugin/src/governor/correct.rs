//! How far a container's own measure of its GPU time is to be trusted: what the driver measured against what the shim
//! measured, over some seconds. Pure.
//!
//! The driver's figures come in whole percents and up to a second late, the shim's are exact for what it sees. So a
//! difference counts only where it is larger than the driver's own error can be; and where the driver sees nothing of a
//! container, it has nothing to say about it.

/// Time constant of the sums in nanoseconds.
const MEMORY_NS: u64 = 10_000_000_000;

/// No correction before this much has been seen, in nanoseconds.
const EVIDENCE_NS: u64 = 4_000_000_000;

/// How far the driver's figures may be behind, in nanoseconds: what a sample covers, and as much until it is there.
const LATE_NS: u64 = 2_000_000_000;

/// Bounds of the correction, in thousandths.
const BOUNDS: (u64, u64) = (250, 4000);

/// Of 1000.
const TRUST: u64 = 1000;

/// The sums of one share on one GPU.
#[derive(Clone, Copy, Debug)]
pub struct Correction {
    driver_ns: u64,
    own_ns: u64,
    seen_ns: u64,
    permille: u64,
    /// The difference is larger than the driver's error.
    doubted: bool,
}

impl Default for Correction {
    fn default() -> Self {
        Self { driver_ns: 0, own_ns: 0, seen_ns: 0, permille: TRUST, doubted: false }
    }
}

impl Correction {
    /// Takes in what was used in the last `passed_ns`, as the driver and as the container measured it. Tells what a
    /// nanosecond of the container's own measure counts, in thousandths.
    pub fn add(&mut self, passed_ns: u64, driver_ns: u64, own_ns: u64) -> u32 {
        let passed = passed_ns.min(MEMORY_NS);
        let fade = |sum: u64| sum - sum / MEMORY_NS.div_ceil(1000) * (passed / 1000);
        // Nobody uses a GPU for longer than time passes; the driver's figures come in lumps of up to a second.
        self.driver_ns = fade(self.driver_ns).saturating_add(driver_ns.min(MEMORY_NS));
        self.own_ns = fade(self.own_ns).saturating_add(own_ns.min(passed.saturating_mul(2)));
        self.seen_ns = fade(self.seen_ns).saturating_add(passed);
        let wanted = self.wanted();
        // A tenth of the way each tick, so that no single figure makes a jump.
        self.permille = (self.permille * 9 + wanted).div_ceil(10).clamp(BOUNDS.0, BOUNDS.1);
        if self.permille.abs_diff(wanted) < 10 {
            self.permille = wanted;
        }
        u32::try_from(self.permille).unwrap_or(1000)
    }

    fn wanted(&mut self) -> u64 {
        if self.seen_ns < EVIDENCE_NS || self.driver_ns == 0 || self.own_ns < self.seen_ns / 100 {
            self.doubted = false;
            return TRUST;
        }
        // One percent of the time for rounding, and what may not have been told yet.
        let late = (self.own_ns.max(self.driver_ns) / (self.seen_ns / 1000)).saturating_mul(LATE_NS / 1000);
        let error = self.seen_ns / 100 + late;
        let difference = self.own_ns.abs_diff(self.driver_ns);
        self.doubted = difference > if self.doubted { error / 2 } else { error };
        if self.doubted {
            (self.driver_ns.saturating_mul(1000) / self.own_ns.max(1)).clamp(BOUNDS.0, BOUNDS.1)
        } else {
            TRUST
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TICK: u64 = 100_000_000;

    /// After `ticks` with these percents of the time.
    fn after(ticks: u32, driver: u64, own: u64) -> u32 {
        let mut correction = Correction::default();
        (0..ticks).map(|_| correction.add(TICK, TICK / 100 * driver, TICK / 100 * own)).last().unwrap()
    }

    #[test]
    fn a_container_that_measures_right_is_trusted_to_the_nanosecond() {
        for (driver, own) in [(10, 10), (10, 11), (30, 30), (29, 30), (90, 90), (0, 0)] {
            assert_eq!(after(200, driver, own), 1000, "{driver} {own}");
        }
    }

    #[test]
    fn work_that_the_shim_does_not_see_costs_double() {
        let charge = after(200, 60, 30);
        assert!((1980..=2020).contains(&charge), "{charge}");
        assert_eq!(after(30, 60, 30), 1000, "three seconds are no evidence");
    }

    #[test]
    fn time_in_which_others_ran_is_given_back() {
        let charge = after(200, 20, 40);
        assert!((490..=510).contains(&charge), "{charge}");
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
            assert_eq!(correction.add(TICK, lump, TICK * 3 / 10), 1000, "tick {tick}");
        }
    }

    proptest! {
        #[test]
        fn any_figures_stay_in_bounds(steps in prop::collection::vec(any::<(u64, u64, u64)>(), 1..50)) {
            let mut correction = Correction::default();
            for (passed, driver, own) in steps {
                let charge = correction.add(passed, driver, own);
                prop_assert!((250..=4000).contains(&charge));
            }
        }
    }
}
