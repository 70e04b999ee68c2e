//! What of a GPU's time is lent to whom, for one tick. Pure: the same answer for the same input, so a governor that
//! was killed and started again goes on as if nothing had been.
//!
//! A share's own slots and core are never touched here: they stand in `limits` and hold without anybody alive. What
//! is lent is the rest: slots that no share owns, and those of shares that have nothing to run.

use region::{SLOTS, Slots};

/// A share of the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The slots it owns, one for each core; none for a share without a timetable.
    pub own: Slots,
    /// Percent of the GPU's time that is its own.
    pub core: u32,
    /// Percent that it may use while others leave it idle, at least `core`.
    pub limit: u32,
    /// Comes after the others at idle time.
    pub low: bool,
    /// Its container runs.
    pub running: bool,
    /// It has had something to run a moment ago.
    pub active: bool,
}

/// What a share may use in the next ticks besides its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lent {
    /// Slots.
    pub slots: Slots,
    /// Its rate with its own included, in thousandths of the GPU: from core to limit.
    pub rate_permille: u32,
}

/// The highest rate beside another share that runs, in thousandths. One with all of the time is not held back by its shim, so it
/// could have as many launches queued as the driver takes, 1,024 in a stream, and all of them would run before an owner had its
/// own back.
const MOST_BESIDE_OTHERS: u32 = 999;

/// What is lent to each of the shares of one GPU, in their order.
///
/// 1. Those that are active share what is left; if none is, all that run, so that the first launch does not wait.
/// 2. Time that active shares do not own goes to those whose limit is above their core, by core; low ones come after
///    all others.
/// 3. With it go the slots that such a rate takes: those of idle owners first, then those of nobody.
/// 4. What nobody owns is lent in any case, by core: it leaves a share more choice of when, not more time.
/// 5. Beside another one that runs, at work or not, nobody has quite all of the time.
pub fn lend(shares: &[Share]) -> Vec<Lent> {
    let mut lent: Vec<Lent> =
        shares.iter().map(|share| Lent { slots: Slots::NONE, rate_permille: share.core * 10 }).collect();
    let active = |share: &Share| share.running && share.active;
    let any = shares.iter().any(active);
    let wants = |share: &Share| share.running && (share.active || !any);

    let own = |wanted: &dyn Fn(&Share) -> bool| {
        shares.iter().filter(|share| wanted(share)).fold(Slots::NONE, |all, share| all.union(share.own))
    };
    let mut unowned = Slots::ALL.difference(own(&|_| true));
    // A slot that two records claim, which the ledger never allows, is nobody's to lend.
    let mut idle = own(&|share| !wants(share)).difference(own(&|share| wants(share)));
    // In percent, which is in slots.
    let held: u32 = shares.iter().filter(|share| wants(share)).map(|share| share.core).sum();
    let mut time = SLOTS.saturating_sub(held);

    for low in [false, true] {
        let class: Vec<usize> =
            (0..shares.len()).filter(|at| wants(&shares[*at]) && shares[*at].low == low).collect();
        let caps: Vec<(u32, u32)> = class
            .iter()
            .map(|at| (shares[*at].core, shares[*at].limit.saturating_sub(shares[*at].core)))
            .collect();
        for (at, more) in class.iter().zip(divide(time, &caps)) {
            time -= more;
            lent[*at].rate_permille += more * 10;
        }
        // Slots for that time.
        let takers = |at: &&usize| !shares[**at].own.is_empty() && shares[**at].limit > shares[**at].core;
        let takers: Vec<usize> = class.iter().filter(takers).copied().collect();
        for from in [&mut idle, &mut unowned] {
            let caps: Vec<(u32, u32)> = takers
                .iter()
                .map(|at| {
                    let has = shares[*at].own.count() + lent[*at].slots.count();
                    (shares[*at].core, (lent[*at].rate_permille / 10).saturating_sub(has))
                })
                .collect();
            hand_out(from, &takers, &caps, &mut lent);
        }
    }
    // The rest: more room in the period, not more time.
    let normal = shares.iter().any(|share| wants(share) && !share.low && !share.own.is_empty());
    let class = |at: &usize| wants(&shares[*at]) && !shares[*at].own.is_empty() && shares[*at].low != normal;
    let class: Vec<usize> = (0..shares.len()).filter(class).collect();
    let borrowers: Vec<usize> =
        class.iter().filter(|at| shares[**at].limit > shares[**at].core).copied().collect();
    for (from, class) in [(&mut unowned, class), (&mut idle, borrowers)] {
        let caps: Vec<(u32, u32)> = class.iter().map(|at| (shares[*at].core, SLOTS)).collect();
        hand_out(from, &class, &caps, &mut lent);
    }
    if shares.iter().filter(|share| share.running).count() > 1 {
        lent.iter_mut().for_each(|lent| lent.rate_permille = lent.rate_permille.min(MOST_BESIDE_OTHERS));
    }
    lent
}

/// Gives slots of `from` to the shares at `takers`, to each at most its cap, in rows as long as can be.
fn hand_out(from: &mut Slots, takers: &[usize], caps: &[(u32, u32)], lent: &mut [Lent]) {
    for (at, count) in takers.iter().zip(divide(from.count(), caps)) {
        let mut given = Slots::NONE;
        for slot in from.iter().take(count as usize) {
            given = given.union(Slots::from_bits(1 << slot));
        }
        *from = from.difference(given);
        lent[*at].slots = lent[*at].slots.union(given);
    }
}

/// Divides `amount` by weight, with nobody getting more than its cap: pairs of weight (at least 1) and cap. All of it,
/// if the caps allow.
fn divide(amount: u32, caps: &[(u32, u32)]) -> Vec<u32> {
    let mut given = vec![0; caps.len()];
    let mut left = amount;
    loop {
        let open: Vec<usize> = (0..caps.len()).filter(|at| given[*at] < caps[*at].1).collect();
        let weights: u64 = open.iter().map(|at| u64::from(caps[*at].0.max(1))).sum();
        if left == 0 || open.is_empty() {
            return given;
        }
        let round = left;
        for at in open {
            let part = u64::from(round) * u64::from(caps[at].0.max(1)) / weights;
            // What rounding leaves over goes to the first.
            let part = u32::try_from(part).unwrap_or(left).max(1).min(left).min(caps[at].1 - given[at]);
            given[at] += part;
            left -= part;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn share(own: std::ops::Range<u32>, limit: u32, active: bool) -> Share {
        let core = own.end - own.start;
        let slots = own.fold(Slots::NONE, |all, slot| all.union(Slots::from_bits(1 << slot)));
        Share { own: slots, core, limit, low: false, running: true, active }
    }

    fn low(share: Share) -> Share {
        Share { low: true, ..share }
    }

    /// Shares as the ledger makes them: no slot has two owners. Some have no timetable, some do not run.
    fn shares() -> impl Strategy<Value = Vec<Share>> {
        let one = (1..=40_u32, 0..=100_u32, any::<bool>(), any::<bool>(), 0..10_u8, 0..10_u8);
        prop::collection::vec(one, 0..12).prop_map(|all| {
            let mut taken = Slots::NONE;
            let mut shares = Vec::new();
            for (core, more, low, active, stopped, without) in all {
                let Some(own) = Slots::place(core, taken) else { continue };
                taken = taken.union(own);
                let own = if without == 0 { Slots::NONE } else { own };
                let limit = (core + more).min(100);
                shares.push(Share { own, core, limit, low, running: stopped > 0, active });
            }
            shares
        })
    }

    fn wanting(shares: &[Share]) -> Vec<bool> {
        let any = shares.iter().any(|share| share.running && share.active);
        shares.iter().map(|share| share.running && (share.active || !any)).collect()
    }

    #[test]
    fn a_share_alone_may_launch_at_any_time_and_gets_its_core() {
        let lent = lend(&[share(0..20, 20, true)]);
        assert_eq!(lent, [Lent { slots: Slots::ALL.difference(Slots::first(20)), rate_permille: 200 }]);
    }

    #[test]
    fn a_share_alone_with_limit_100_has_the_gpu_whether_or_not_it_runs_anything() {
        for active in [true, false] {
            let lent = lend(&[share(0..20, 100, active)])[0];
            assert_eq!((lent.slots.union(Slots::first(20)), lent.rate_permille), (Slots::ALL, 1000));
        }
    }

    #[test]
    fn an_idle_neighbours_time_goes_to_the_one_with_a_limit_and_comes_back() {
        let mut shares = [share(0..30, 50, true), share(30..100, 70, false)];
        let lent = lend(&shares);
        assert_eq!((lent[0].rate_permille, lent[1].rate_permille), (500, 700));
        assert!(lent[0].slots.count() >= 20 && lent[1].slots.is_empty());
        shares[1].active = true;
        assert_eq!(lend(&shares).map_slots(), [Slots::NONE, Slots::NONE]);
        assert_eq!(lend(&shares)[0].rate_permille, 300);
    }

    #[test]
    fn idle_time_is_divided_by_share() {
        let lent = lend(&[share(0..10, 100, true), share(10..40, 100, true), share(40..100, 100, false)]);
        assert_eq!(lent.iter().map(|lent| lent.rate_permille).collect::<Vec<_>>(), [250, 750, 600]);
        assert_eq!((lent[0].slots.count(), lent[1].slots.count()), (15, 45));
    }

    #[test]
    fn low_work_gets_idle_time_only_when_normal_work_has_enough() {
        let normal = share(0..20, 100, true);
        let lent = lend(&[low(share(20..40, 100, true)), normal]);
        assert_eq!(lent[0], Lent { slots: Slots::NONE, rate_permille: 200 });
        assert_eq!((lent[1].rate_permille, lent[1].slots.count()), (800, 60));
        // The normal one is at its limit.
        let lent = lend(&[low(share(20..40, 100, true)), share(0..20, 20, true), share(40..100, 60, false)]);
        assert_eq!((lent[0].rate_permille, lent[0].slots.count()), (800, 60));
        // The normal one has nothing to run.
        let lent = lend(&[low(share(20..40, 100, true)), share(0..20, 100, false)]);
        assert_eq!(lent[0].rate_permille, 999);
    }

    #[test]
    fn nobody_goes_unpaced_beside_one_that_may_wake_up() {
        let mut shares = [share(0..30, 100, true), share(30..100, 70, false)];
        assert_eq!((lend(&shares)[0].rate_permille, lend(&shares)[0].slots.count()), (999, 70));
        // It has ended: its slots are kept for its next start, which takes the governor's tick with it.
        shares[1].running = false;
        assert_eq!(lend(&shares)[0].rate_permille, 1000);
    }

    trait Grants {
        fn map_slots(&self) -> Vec<Slots>;
    }

    impl Grants for Vec<Lent> {
        fn map_slots(&self) -> Vec<Slots> {
            self.iter().map(|lent| lent.slots).collect()
        }
    }

    proptest! {
        #[test]
        fn no_slot_is_lent_twice_or_taken_from_one_that_wants_it(shares in shares()) {
            let lent = lend(&shares);
            let wants = wanting(&shares);
            let mut seen = Slots::NONE;
            for (at, slots) in lent.map_slots().into_iter().enumerate() {
                prop_assert!(seen.intersection(slots).is_empty(), "lent twice");
                seen = seen.union(slots);
                prop_assert!(slots.is_empty() || wants[at], "lent to one that wants none");
            }
            for (share, wants) in shares.iter().zip(&wants) {
                prop_assert!(!wants || share.own.intersection(seen).is_empty(), "taken from an owner");
            }
        }

        #[test]
        fn rates_are_from_core_to_limit_and_sum_to_no_more_than_the_gpu(shares in shares()) {
            let lent = lend(&shares);
            let wants = wanting(&shares);
            let mut sum = 0;
            for ((share, lent), wants) in shares.iter().zip(&lent).zip(wants) {
                prop_assert!((share.core * 10..=share.limit * 10).contains(&lent.rate_permille));
                prop_assert!(wants || lent.rate_permille == share.core * 10);
                sum += if wants { lent.rate_permille } else { 0 };
            }
            prop_assert!(sum <= 1000, "{sum}");
        }

        /// Whoever wants its own back has it with the next tick.
        #[test]
        fn an_owner_that_wakes_up_has_all_its_slots_at_once(mut shares in shares(), who: prop::sample::Index) {
            prop_assume!(!shares.is_empty());
            let at = who.index(shares.len());
            (shares[at].active, shares[at].running) = (true, true);
            for (other, slots) in lend(&shares).map_slots().into_iter().enumerate() {
                prop_assert!(other == at || slots.intersection(shares[at].own).is_empty());
            }
        }

        #[test]
        fn low_work_gets_nothing_that_normal_work_wants(shares in shares()) {
            let lent = lend(&shares);
            let wants = wanting(&shares);
            let all = || shares.iter().zip(&lent).zip(&wants);
            let hungry = all().any(|((share, lent), wants)| {
                *wants && !share.low && lent.rate_permille < share.limit * 10
            });
            let lends = |((share, _), wants): ((&Share, &Lent), &bool)| *wants && !share.low && !share.own.is_empty();
            for ((share, lent), _) in all().filter(|((share, _), _)| share.low && hungry) {
                prop_assert_eq!(lent.rate_permille, share.core * 10);
                prop_assert!(lent.slots.is_empty() || !all().any(lends));
            }
        }

        /// A rate that nobody could use for want of slots would be worth nothing.
        #[test]
        fn who_has_a_rate_has_the_slots_for_it(shares in shares()) {
            // Shares without a timetable take time and leave their slots.
            prop_assume!(shares.iter().all(|share| !share.own.is_empty()));
            for (share, lent) in shares.iter().zip(lend(&shares)) {
                let slots = share.own.union(lent.slots).count();
                prop_assert!(slots * 10 >= lent.rate_permille, "{slots} slots, {lent:?}");
            }
        }

        #[test]
        fn slots_of_nobody_are_never_left_unused(shares in shares()) {
            let wants = wanting(&shares);
            let owned = shares.iter().fold(Slots::NONE, |all, share| all.union(share.own));
            let used = lend(&shares).map_slots().into_iter().fold(owned, Slots::union);
            let anybody = shares.iter().zip(wants).any(|(share, wants)| wants && !share.own.is_empty());
            prop_assert!(!anybody || used == Slots::ALL);
        }

        #[test]
        fn what_is_divided_is_given_as_far_as_the_caps_go(
            amount in 0..2000_u32,
            caps in prop::collection::vec((0..100_u32, 0..400_u32), 0..10),
        ) {
            let given = divide(amount, &caps);
            let sum: u32 = given.iter().sum();
            prop_assert_eq!(sum, amount.min(caps.iter().map(|(_, cap)| cap).sum()));
            prop_assert!(given.iter().zip(&caps).all(|(given, (_, cap))| given <= cap));
        }
    }
}
