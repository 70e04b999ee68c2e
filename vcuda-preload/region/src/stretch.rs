//! How long the slots of a GPU should last. Pure.
//!
//! A kernel that is long against its share's slots lasts into those of neighbours, where nobody can tell whose time it was. Slots
//! that last longer hold it, and everybody waits longer for theirs. So they last longer only where every container of the
//! GPU has long kernels, none so long that even such slots do not hold it: whoever has others, or none, keeps all at
//! [`SLOT_NS`], and what one says of itself makes nobody wait whose own kernels are not as long.

use crate::{PERIOD_NS, SLOT_NS, Stretch};

/// What slots may last, in [`SLOT_NS`]. A second holds whole periods of each, so that a share is exact in every second.
const STEPS: [u32; 4] = [1, 2, 5, 10];

/// Kernels that are shorter, in nanoseconds, are no reason to wait longer for a slot.
const LONG_NS: u64 = 2_000_000;

/// Kernels from this length on, in nanoseconds, fill the longest slots of many shares or do not fit. They run beside others' in
/// slots of [`SLOT_NS`], where the driver tells whose time it was ([`crate::Refund`]).
const VERY_LONG_NS: u64 = 100_000_000;

/// Kernels that the shortest row of slots is to hold.
const KERNELS: u64 = 5;

/// For so long slots must be too short before they last longer, in nanoseconds.
const RISE_NS: u64 = 2_000_000_000;

/// What kernels of a container last on average, of the last second of GPU time or so.
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelLength {
    used_ns: u64,
    /// In [`PART`]s, which halve well.
    launches: u64,
}

const PART: u64 = 1 << 16;

impl KernelLength {
    /// Takes in GPU time and launches.
    pub fn add(&mut self, used_ns: u64, launches: u64) {
        self.used_ns = self.used_ns.saturating_add(used_ns);
        self.launches = self.launches.saturating_add(launches.saturating_mul(PART));
        while self.used_ns > 1_000_000_000 && self.launches > 8 * PART || self.launches > 100_000 * PART {
            self.used_ns /= 2;
            self.launches /= 2;
        }
    }

    /// Nanoseconds; 0 if that is not known.
    pub fn ns(self) -> u64 {
        let ns = u128::from(self.used_ns) * u128::from(PART) / u128::from(self.launches.max(PART));
        u64::try_from(ns).unwrap_or(u64::MAX)
    }
}

/// What of a container says how long slots should last.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// The longest row of slots that are its own.
    pub row: u32,
    /// What its kernels last, in nanoseconds.
    pub kernel_ns: u64,
}

/// How many times [`SLOT_NS`] slots should last for these containers of one GPU.
fn wanted(containers: &[Demand]) -> u32 {
    let row = containers.iter().map(|container| u64::from(container.row)).min().unwrap_or(0);
    let lengths = containers.iter().map(|container| container.kernel_ns);
    let (kernel_ns, longest_ns) = (lengths.clone().min().unwrap_or(0), lengths.max().unwrap_or(0));
    if containers.len() < 2 || row == 0 || kernel_ns < LONG_NS || longest_ns >= VERY_LONG_NS {
        return 1;
    }
    let holds = |times: &&u32| u64::from(**times) * row * SLOT_NS >= KERNELS.saturating_mul(kernel_ns);
    STEPS.iter().find(holds).or(STEPS.last()).copied().unwrap_or(1)
}

/// How long the slots of one GPU last, from tick to tick.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stretching {
    told: Stretch,
    /// CLOCK_MONOTONIC in nanoseconds since when slots have been too short; none if they are not.
    short_since_ns: Option<u64>,
}

impl Stretching {
    /// What its containers are told at the moment `now_ns`, if they are what they should be: none to keep slots at
    /// [`SLOT_NS`].
    ///
    /// Slots change where a period of the old length and one of the new begin: then each share has just had its slots,
    /// whichever those are, and no period is cut short.
    pub fn tick(&mut self, now_ns: u64, containers: Option<&[Demand]>) -> Stretch {
        if now_ns < self.told.from_ns {
            // Told, and not yet begun.
            return self.told;
        }
        let now = self.told.after;
        let times = |by: u64, containers: &[Demand]| {
            let times = |one: &Demand| Demand { kernel_ns: one.kernel_ns.saturating_mul(by) / 6, ..*one };
            wanted(&containers.iter().map(times).collect::<Vec<_>>())
        };
        let next = match containers.map(|containers| (wanted(containers), containers)) {
            None => 1,
            // An average that wavers about a step, or about what is very long, changes nothing.
            Some((exact, containers)) if exact < now => {
                times(9, containers).max(times(4, containers)).min(now)
            }
            Some((exact, _)) => exact,
        };
        if next <= now {
            self.short_since_ns = None;
        } else if now_ns.saturating_sub(*self.short_since_ns.get_or_insert(now_ns)) < RISE_NS {
            return self.told;
        }
        if next != now {
            self.short_since_ns = None;
            let both = u64::from(lcm(now, next)) * PERIOD_NS;
            // Not before all have been told.
            let from_ns = (now_ns + PERIOD_NS).div_ceil(both) * both;
            self.told = Stretch { before: now, after: next, from_ns };
        }
        self.told
    }

    /// Whether slots last, or are about to last, longer than [`SLOT_NS`] at the moment `now_ns`.
    pub fn is_stretched(&self, now_ns: u64) -> bool {
        self.told.after > 1 || self.told.at(now_ns) > 1
    }
}

fn lcm(a: u32, b: u32) -> u32 {
    let (mut rest, mut divisor) = (a, b);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a / divisor.max(1) * b
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;
    const TICK: u64 = PERIOD_NS;

    fn demands(rows: &[u32], kernel_ns: u64) -> Vec<Demand> {
        rows.iter().map(|row| Demand { row: *row, kernel_ns }).collect()
    }

    #[test]
    fn slots_last_longer_where_the_shortest_row_holds_too_few_kernels() {
        for (rows, kernel_ns, times) in [
            (&[30, 70][..], 5 * MS, 1),
            (&[10, 90], 4 * MS, 2),
            (&[10; 10], 5 * MS, 5),
            (&[10; 10], 20 * MS, 10),
            (&[25; 4], 5 * MS, 1),
            (&[25; 4], 20 * MS, 5),
            (&[10; 10], 99 * MS, 10),
            // Not even the longest would hold it.
            (&[10; 10], 100 * MS, 1),
            (&[30, 70], u64::MAX, 1),
            // What is short fits.
            (&[1; 10], 1_999_999, 1),
            (&[10; 10], 5_000, 1),
            (&[10; 10], 0, 1),
            // Nobody is beside it.
            (&[10], 200 * MS, 1),
            (&[], 200 * MS, 1),
            (&[0, 10], 200 * MS, 1),
        ] {
            assert_eq!(wanted(&demands(rows, kernel_ns)), times, "{rows:?} {kernel_ns}");
        }
    }

    #[test]
    fn launches_are_averaged_and_few_long_ones_do_not_hide_many_short_ones() {
        let mut length = KernelLength::default();
        assert_eq!(length.ns(), 0);
        for _ in 0..20 {
            length.add(200 * MS, 1);
        }
        assert_eq!(length.ns(), 200 * MS);
        length.add(MS, 1_000);
        assert!(length.ns() < 2 * MS, "{}", length.ns());
        length.add(u64::MAX, u64::MAX);
        length.add(u64::MAX, 0);
    }

    /// Ticks until `until_ns`; what was told last.
    fn run(
        stretching: &mut Stretching,
        now: &mut u64,
        until_ns: u64,
        containers: Option<&[Demand]>,
    ) -> Stretch {
        let mut told = stretching.told;
        while *now < until_ns {
            *now += TICK;
            told = stretching.tick(*now, containers);
        }
        told
    }

    #[test]
    fn slots_grow_after_two_seconds_and_shrink_at_once_where_both_periods_begin() {
        let (mut stretching, mut now) = (Stretching::default(), 7 * TICK + 12_345);
        let long = demands(&[10; 10], 20 * MS);
        let begin = now;
        assert_eq!(run(&mut stretching, &mut now, begin + RISE_NS, Some(&long)), Stretch::default());
        let told = run(&mut stretching, &mut now, begin + RISE_NS + TICK, Some(&long));
        assert_eq!((told.before, told.after, told.from_ns), (1, 10, 3_000 * MS));
        assert_eq!(
            stretching.tick(now + TICK, None),
            told,
            "who has been told is told nothing else before it holds"
        );
        now = 3_000 * MS;
        assert!(stretching.is_stretched(now));
        let told = stretching.tick(now + TICK, None);
        assert_eq!((told.before, told.after, told.from_ns), (10, 1, 4_000 * MS));
        assert!(stretching.is_stretched(4_000 * MS - 1) && !stretching.is_stretched(4_000 * MS));
        // Longer for a moment is no reason.
        for tick in 0..100 {
            let containers = if tick % 15 == 0 { None } else { Some(&long[..]) };
            assert_eq!(stretching.tick(4_000 * MS + tick * TICK, containers), told);
        }
    }

    #[test]
    fn a_length_that_wavers_about_a_step_changes_nothing() {
        let (mut stretching, mut now) = (Stretching::default(), 0);
        let told = run(&mut stretching, &mut now, 10_000 * MS, Some(&demands(&[10, 90], 6 * MS)));
        assert_eq!(told.after, 5);
        for tick in 0..100 {
            now += TICK;
            let kernel_ns = if tick % 2 == 0 { 4 * MS } else { 6 * MS };
            assert_eq!(stretching.tick(now, Some(&demands(&[10, 90], kernel_ns))), told);
        }
        let told = run(&mut stretching, &mut now, 40_000 * MS, Some(&demands(&[10, 90], 90 * MS)));
        assert_eq!(told.after, 10);
        for tick in 0..100 {
            now += TICK;
            let kernel_ns = if tick % 2 == 0 { 90 * MS } else { 110 * MS };
            assert_eq!(stretching.tick(now, Some(&demands(&[10, 90], kernel_ns))), told);
        }
        assert_eq!(
            run(&mut stretching, &mut now, 80_000 * MS, Some(&demands(&[10, 90], MS * 5 / 2))).after,
            2
        );
    }

    fn any_demands() -> impl Strategy<Value = Vec<Demand>> {
        let kernel_ns = prop_oneof![0..4_000_000_u64, 0..400_000_000_u64, any::<u64>()];
        prop::collection::vec((0..=100_u32, kernel_ns), 0..12)
            .prop_map(|all| all.into_iter().map(|(row, kernel_ns)| Demand { row, kernel_ns }).collect())
    }

    proptest! {
        /// Whatever a container says of its kernels, slots last no longer than its neighbours' kernels are reason for.
        #[test]
        fn no_container_makes_others_wait_by_what_it_says(mut all in any_demands(), said: u64) {
            prop_assume!(all.len() > 2);
            let others = wanted(&all[1..].iter().map(|one| Demand { row: all.iter().map(|one| one.row).min().unwrap(), ..*one }).collect::<Vec<_>>());
            all[0].kernel_ns = said;
            prop_assert!(wanted(&all) <= others);
        }

        /// At no moment does one length end within a period of its own, or another begin within one.
        #[test]
        fn lengths_change_where_both_begin(steps in prop::collection::vec((prop::option::of(any_demands()), 1..400_u64), 1..40)) {
            let (mut stretching, mut now, mut before) = (Stretching::default(), 0, Stretch::default());
            for (demands, ticks) in steps {
                for _ in 0..ticks {
                    now += TICK + 1_234;
                    let told = stretching.tick(now, demands.as_deref());
                    if told != before {
                        prop_assert_eq!(told.before, before.after, "what held holds until then");
                        prop_assert!(before.from_ns <= now && told.from_ns >= now + TICK);
                        prop_assert!(told.from_ns <= now + TICK + 2_000_000_000);
                        for times in [told.before, told.after] {
                            prop_assert!(STEPS.contains(&times));
                            prop_assert_eq!(told.from_ns % (u64::from(times) * PERIOD_NS), 0);
                        }
                        before = told;
                    }
                }
            }
        }
    }
}
