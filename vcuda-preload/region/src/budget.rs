//! GPU time of a container: how much of it has been used, and when the next work may go. One budget a GPU, which all
//! processes of the container draw on, in words of `usage`.
//!
//! The budget is one word, `next_ns`: the moment up to which the share's time is used up (a generic cell rate
//! algorithm). Work of c nanoseconds moves it by c divided by the share's rate. Work may go while the word is at most
//! as far ahead of the clock as a share that has used the whole of its slots is at their end. What a launch will take is
//! taken when it goes, by an estimate, and set right when it has been measured; so however many processes launch at
//! once, together they get what one would.
//!
//! Busy time is counted by `frontier_ns`: time up to there is counted, by whoever measured it; an interval that ends
//! later counts from there on. So work of several streams and processes at the same time counts once.
//!
//! There is no lock. A process that is killed between two steps loses the container at most what it was about to
//! settle. Every word can be overwritten by any process of the container: what is read is a number that saturates,
//! waits are bounded, and only the container itself is held back too much or too little.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed},
};

use crate::{MAX_GPUS, PERIOD_NS, Pace, Process, SLOT_NS, SLOTS, Slots, Usage, fault, layout::GpuTotal};

/// Further ahead the budget's word never counts: one kernel of half a minute at ten percent.
const MAX_DEBT_NS: u64 = 300_000_000_000;

/// GPU time that a share may catch up, if it came too late to use it in its slots; or one launch, if that is longer.
const CREDIT_NS: u64 = SLOT_NS;

/// The same where a governor sets right what neighbours' time cost; or two launches. What is charged too much in one period is
/// made up for over many, at the end of slots, where there is room for a launch or not. With less, a share that has work all
/// the time would lose it again before it could use it. Where nobody makes up for it, what lasts out of the slots because
/// there is credit for it costs more than it brings.
const GOVERNED_CREDIT_NS: u64 = 10 * SLOT_NS;

/// GPU time that a used-up budget must have again before work goes on, where the budget and not the slots ends it. If
/// launches went as soon as it has room for one, each would be measured by itself, and charged from its mark to its launch.
const REST_NS: u64 = SLOT_NS;

/// So long an open process counts as busy for others. Longer, and it has more likely forgotten to look.
const OPEN_FRESH_NS: u64 = 1_000_000_000;

/// Attempts before a launch is told to come again. Each failed one means that another process got ahead.
const MAX_ATTEMPTS: u32 = 1 << 12;

/// What holds for a container on a GPU at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Slots in which a launch may go.
    pub slots: Slots,
    /// How long a slot lasts, in nanoseconds: not 0.
    pub slot_ns: u64,
    /// Share of the GPU's time, in thousandths: 1 to 1000.
    pub rate_permille: u32,
    /// What a measured nanosecond costs, in thousandths: 50 to 4000.
    pub charge_permille: u32,
    /// What has come off the container's debt so far, in nanoseconds of GPU time.
    pub refund_ns: u64,
    /// A governor sets right what is charged.
    pub governed: bool,
}

impl Pace {
    /// What holds at the moment `now_ns`.
    pub fn terms(&self, now_ns: u64) -> Terms {
        Terms {
            slots: self.slots(now_ns),
            slot_ns: self.slot_ns(now_ns),
            rate_permille: self.rate_permille(now_ns),
            charge_permille: self.charge_permille(),
            refund_ns: self.refund_ns,
            governed: self.is_leased(now_ns),
        }
    }
}

impl Terms {
    fn rate(&self) -> u64 {
        u64::from(self.rate_permille.clamp(1, 1000))
    }

    fn period(&self) -> u64 {
        self.slot_ns * u64::from(SLOTS)
    }

    /// By how much `ns` of measured GPU time move the budget.
    pub fn cost(&self, ns: u64) -> u64 {
        let cost = u128::from(ns) * u128::from(self.charge_permille) / u128::from(self.rate());
        u64::try_from(cost).unwrap_or(u64::MAX)
    }

    /// How far ahead of the clock the budget may be for work to go.
    fn ahead(&self) -> u64 {
        self.period() * (1000 - self.rate()) / 1000
    }

    /// How much further back the budget must be for a process to go on that it has refused. Nothing where the slots end
    /// before the budget does: what is not used in them is lost.
    fn rest(&self) -> u64 {
        if u64::from(self.slots.count()) * 10 <= self.rate() {
            return 0;
        }
        self.cost(REST_NS).min(self.period())
    }

    /// How far behind the clock it can be, for work of `estimate_ns`: what has not been used longer ago is gone.
    fn behind(&self, estimate_ns: u64) -> u64 {
        let period = self.period();
        let (credit, launches) = if self.governed { (GOVERNED_CREDIT_NS, 2) } else { (CREDIT_NS, 1) };
        (estimate_ns.saturating_mul(launches).clamp(credit, period) * 1000 / self.rate()).min(period)
    }

    /// The most GPU time that can be used within `window_ns` by launches that are thought to take up to `estimate_ns`,
    /// beyond what they turn out to take longer than was thought. In nanoseconds, at a charge of 1000.
    pub fn most_in(&self, window_ns: u64, estimate_ns: u64) -> u64 {
        let ns = u128::from(window_ns) + u128::from(self.ahead()) + u128::from(self.behind(estimate_ns));
        u64::try_from(ns * u128::from(self.rate()) / 1000 + 1).unwrap_or(u64::MAX)
    }
}

/// The budget of a container on one GPU.
#[derive(Clone, Copy)]
pub struct Budget<'a> {
    words: &'a GpuTotal,
}

impl Budget<'_> {
    /// Takes what work of about `estimate_ns` costs, if work may go at the moment `now_ns`: what was taken, for
    /// [`Budget::pay`]. `rests` is the process's own, false at first: that it was refused, and goes on when there is room
    /// for more than one launch. Of several processes that rest, whoever comes first then uses that room, the others wait
    /// for the next: fewer switches of the GPU than if each launched a little.
    ///
    /// # Errors
    /// Nanoseconds after which it may go, if nothing else happens: at least one, at most five minutes.
    pub fn take(self, now_ns: u64, terms: &Terms, estimate_ns: u64, rests: &mut bool) -> Result<u64, u64> {
        self.refund(terms);
        let cost = terms.cost(estimate_ns);
        for _ in 0..MAX_ATTEMPTS {
            let word = self.words.next_ns.load(Acquire);
            let next = word.min(now_ns.saturating_add(MAX_DEBT_NS));
            let room_at = next.saturating_sub(terms.ahead());
            let rested_at = room_at.saturating_add(terms.rest()).min(now_ns.saturating_add(MAX_DEBT_NS));
            if room_at > now_ns || *rests && rested_at > now_ns {
                *rests = true;
                return Err(rested_at - now_ns);
            }
            let taken = next.max(now_ns.saturating_sub(terms.behind(estimate_ns))).saturating_add(cost);
            fault::point();
            if self.words.next_ns.compare_exchange_weak(word, taken, AcqRel, Relaxed).is_ok() {
                fault::point();
                *rests = false;
                self.change(&self.words.done_ns, |done| {
                    sane(done, now_ns).max(now_ns).saturating_add(estimate_ns)
                });
                return Ok(cost);
            }
        }
        Err(SLOT_NS)
    }

    /// Takes off what the node has said since it was last asked that others had. What then is further back than
    /// [`Terms::behind`] is gone like all that was not used.
    fn refund(self, terms: &Terms) {
        let had = self.words.refunded_ns.load(Relaxed);
        if had >= terms.refund_ns {
            return;
        }
        fault::point();
        if self.words.refunded_ns.compare_exchange(had, terms.refund_ns, AcqRel, Relaxed).is_ok() {
            fault::point();
            let cost = Terms { charge_permille: 1000, ..*terms }.cost(terms.refund_ns - had);
            self.change(&self.words.next_ns, |next| next.saturating_sub(cost));
        }
    }

    /// Whether the budget pays for all of a launch of about `estimate_ns` at the moment `now_ns`, so that none of it is owed.
    pub fn covers(self, now_ns: u64, terms: &Terms, estimate_ns: u64) -> bool {
        let next = self.words.next_ns.load(Relaxed).max(now_ns.saturating_sub(terms.behind(estimate_ns)));
        next.saturating_add(terms.cost(estimate_ns)) <= now_ns.saturating_add(terms.ahead())
    }

    /// Nanoseconds from `now_ns` until what the container has launched should be done, if it has the GPU to itself.
    pub fn queued_ns(self, now_ns: u64) -> u64 {
        sane(self.words.done_ns.load(Relaxed), now_ns).saturating_sub(now_ns)
    }

    /// Work that was launched as one of `estimate_ns` took `counted_ns`, or was not launched after all.
    pub fn correct(self, now_ns: u64, estimate_ns: u64, counted_ns: u64) {
        self.change(&self.words.done_ns, |done| {
            sane(done, now_ns).saturating_add(counted_ns).saturating_sub(estimate_ns)
        });
    }

    /// All that the container has launched is done at the moment `now_ns`.
    pub fn none_queued(self, now_ns: u64) {
        self.change(&self.words.done_ns, |done| done.min(now_ns));
    }

    /// Counts the GPU as busy from `start_ns` to `end_ns`, at the moment `now_ns`; nanoseconds of it that were not counted
    /// before. They are to be paid.
    pub fn count(self, now_ns: u64, start_ns: u64, end_ns: u64) -> u64 {
        let end = end_ns.min(now_ns);
        for _ in 0..MAX_ATTEMPTS {
            let word = self.words.frontier_ns.load(Acquire);
            // Nobody has measured what is yet to come.
            let frontier = if word > now_ns.saturating_add(PERIOD_NS) { 0 } else { word };
            let counted = end.saturating_sub(start_ns.max(frontier));
            if counted == 0 && frontier == word {
                return 0;
            }
            fault::point();
            if self.words.frontier_ns.compare_exchange_weak(word, end.max(frontier), AcqRel, Relaxed).is_ok()
            {
                fault::point();
                self.words.charged_ns.fetch_add(counted, Relaxed);
                return counted;
            }
        }
        0
    }

    /// Pays for `counted_ns` of GPU time: first from what was taken for it, which is then less; the rest from the
    /// budget.
    pub fn pay(self, terms: &Terms, counted_ns: u64, taken: &mut u64) {
        let cost = terms.cost(counted_ns);
        let from_taken = cost.min(*taken);
        *taken -= from_taken;
        fault::point();
        self.change(&self.words.next_ns, |next| next.saturating_add(cost - from_taken));
    }

    /// Gives back what was taken and turned out not to be needed.
    pub fn give(self, taken: u64) {
        fault::point();
        self.change(&self.words.next_ns, |next| next.saturating_sub(taken));
    }

    /// Says that a launch is held back, or work under way.
    pub fn wants(self, now_ns: u64) {
        self.words.waiting_ns.store(now_ns, Relaxed);
    }

    /// GPU time that the container has measured, in nanoseconds.
    pub fn charged_ns(self) -> u64 {
        self.words.charged_ns.load(Relaxed)
    }

    fn change(self, of: &AtomicU64, by: impl Fn(u64) -> u64) {
        let mut word = of.load(Relaxed);
        for _ in 0..MAX_ATTEMPTS {
            let changed = by(word);
            if changed == word {
                return;
            }
            match of.compare_exchange_weak(word, changed, AcqRel, Relaxed) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }
}

/// Nothing that is queued takes as long as all that.
fn sane(done_ns: u64, now_ns: u64) -> u64 {
    done_ns.min(now_ns.saturating_add(10 * PERIOD_NS))
}

impl Usage {
    /// The container's budget on GPU number `gpu`, if there can be such a GPU.
    pub fn budget(&self, gpu: usize) -> Option<Budget<'_>> {
        self.file().gpus.get(gpu).map(|words| Budget { words })
    }

    /// Says since when work of `me` has been under way on GPU `gpu`; 0 for none.
    pub fn set_open(&self, me: Process, gpu: usize, since_ns: u64) {
        if let Some(word) = self.open_word(me.slot(), gpu) {
            word.store(since_ns, Relaxed);
        }
    }

    /// Since when work of a process before in the slot of `me` was under way, on which it died; 0 for none. Forgotten
    /// with this call.
    pub fn inherited_open(&self, me: Process, gpu: usize) -> u64 {
        self.open_word(me.slot(), gpu).map_or(0, |word| word.swap(0, AcqRel))
    }

    /// Since when work of any other process has been under way on GPU `gpu`, at the moment `now_ns`. One that said so
    /// more than a second ago no longer counts.
    pub fn open_elsewhere(&self, me: Process, gpu: usize, now_ns: u64) -> Option<u64> {
        let others = self.claimed().filter(|slot| *slot != me.slot());
        let since = others.filter_map(|slot| Some(self.open_word(slot, gpu)?.load(Relaxed)));
        since.filter(|since| is_fresh(*since, now_ns)).min()
    }

    /// Since when work of processes was under way that are dead at the moment `now_ns`, of those who said so longer than
    /// `for_ns` ago. Forgotten with this call: who makes it counts that time. Costs a system call for each such process.
    pub fn reap_open(&self, me: Process, gpu: usize, now_ns: u64, for_ns: u64) -> Option<u64> {
        let mut earliest: Option<u64> = None;
        for slot in self.claimed().filter(|slot| *slot != me.slot()) {
            let Some(word) = self.open_word(slot, gpu) else { continue };
            let since = word.load(Acquire);
            if since == 0 || now_ns.saturating_sub(since) < for_ns || !self.is_over(Some(me), slot) {
                continue;
            }
            fault::point();
            if word.compare_exchange(since, 0, AcqRel, Relaxed).is_ok() && since < now_ns {
                let since = since.max(now_ns.saturating_sub(OPEN_FRESH_NS));
                earliest = Some(earliest.map_or(since, |earliest| earliest.min(since)));
            }
        }
        earliest
    }

    fn open_word(&self, slot: usize, gpu: usize) -> Option<&AtomicU64> {
        (gpu < MAX_GPUS).then(|| &self.file().slots[slot].open_since_ns[gpu])
    }
}

fn is_fresh(since_ns: u64, now_ns: u64) -> bool {
    since_ns != 0 && since_ns <= now_ns && now_ns - since_ns < OPEN_FRESH_NS
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::*;

    const MS: u64 = 1_000_000;

    fn usage() -> (TempDir, Usage) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("usage");
        Usage::create(&path).unwrap();
        (folder, Usage::open(&path).unwrap())
    }

    fn terms(rate_permille: u32) -> Terms {
        Terms {
            slots: Slots::ALL,
            slot_ns: SLOT_NS,
            rate_permille,
            charge_permille: 1000,
            refund_ns: 0,
            governed: false,
        }
    }

    #[test]
    fn a_share_that_starts_with_its_slots_is_used_up_with_them() {
        let (_folder, usage) = usage();
        let (budget, terms) = (usage.budget(0).unwrap(), terms(300));
        let start = 50 * PERIOD_NS;
        let mut all = 0;
        for period in 0..20 {
            let begun = start + period * PERIOD_NS;
            let mut now = begun;
            while budget.take(now, &terms, MS / 2, &mut false).is_ok() {
                now += MS / 2;
                assert!(now < begun + PERIOD_NS);
            }
            let used = now - begun;
            // The first has the credit besides, and the last launch of each may pass the end; the next makes up for it.
            let most = if period == 0 { 31 * MS + MS / 2 } else { 30 * MS + MS / 2 };
            assert!((30 * MS - 3 * MS / 2..=most).contains(&used), "period {period}: {used}");
            all += used;
        }
        assert!((600 * MS..=601 * MS + MS / 2).contains(&all), "{all}");
    }

    #[test]
    fn a_process_that_was_refused_goes_on_when_there_is_a_millisecond_to_give() {
        let (_folder, usage) = usage();
        let (budget, all) = (usage.budget(0).unwrap(), terms(250));
        let own = Terms { slots: Slots::first(25), ..all };
        let now = 50 * PERIOD_NS;
        while budget.take(now, &all, MS, &mut false).is_ok() {}
        // The burst, the credit, and the one that uses them up.
        let (room, rested) = (MS, 5 * MS);
        let (mut mine, mut slotted) = (false, false);
        assert_eq!((budget.take(now, &all, MS, &mut mine), mine), (Err(rested), true));
        assert_eq!(budget.take(now, &own, MS, &mut slotted), Err(room), "it has its slots and no more");
        assert_eq!(budget.take(now + room, &all, MS, &mut mine), Err(rested - room));
        assert_eq!(
            budget.take(now + room, &own, MS / 100, &mut slotted),
            Ok(MS / 25),
            "others need not wait for it"
        );
        let rested = rested + MS / 25;
        assert_eq!(budget.take(now + rested - 1, &all, MS, &mut mine), Err(1));
        assert_eq!((budget.take(now + rested, &all, MS / 100, &mut mine), mine), (Ok(MS / 25), false));
        assert!(budget.take(now + rested, &all, MS / 100, &mut mine).is_ok(), "the rest at once");
    }

    #[test]
    fn work_at_the_same_time_counts_once_and_gaps_do_not() {
        let (_folder, usage) = usage();
        let budget = usage.budget(0).unwrap();
        assert_eq!(budget.count(100, 10, 30), 20);
        assert_eq!(budget.count(100, 20, 40), 10, "another stream's, half of it at the same time");
        assert_eq!(budget.count(100, 15, 25), 0);
        assert_eq!(budget.count(100, 60, 70), 10);
        assert_eq!(budget.count(100, 95, 120), 5, "what is yet to come is not counted");
        assert_eq!(budget.charged_ns(), 45);
    }

    #[test]
    fn an_estimate_is_set_right_both_ways() {
        let (_folder, usage) = usage();
        let (budget, terms) = (usage.budget(0).unwrap(), terms(500));
        let now = 50 * PERIOD_NS;
        let next = || usage.file().gpus[0].next_ns.load(Relaxed);
        // A launch may use what has been left unused for as long as it takes.
        let mut taken = budget.take(now, &terms, 5 * MS, &mut false).unwrap();
        assert_eq!((taken, next()), (10 * MS, now));
        budget.pay(&terms, 2 * MS, &mut taken);
        budget.give(taken);
        assert_eq!(next(), now - 6 * MS);
        let mut taken = budget.take(now, &terms, MS, &mut false).unwrap();
        budget.pay(&terms, 7 * MS, &mut taken);
        assert_eq!((taken, next()), (0, now + 12 * MS));
    }

    #[test]
    fn what_others_had_comes_off_a_debt_once_and_makes_no_credit() {
        let (_folder, usage) = usage();
        let (budget, terms) = (usage.budget(0).unwrap(), terms(100));
        let now = 50 * PERIOD_NS;
        let next = || usage.file().gpus[0].next_ns.load(Relaxed);
        budget.take(now, &terms, MS, &mut false).unwrap();
        // A kernel of 200 ms was charged two seconds, for those of nine neighbours ran beside it.
        budget.pay(&terms, 2_000 * MS, &mut 0);
        let owed = next() - now;
        let wait = budget.take(now, &terms, MS, &mut false).unwrap_err();
        let refunded = Terms { refund_ns: 1_800 * MS, ..terms };
        // Whatever it pays from now on.
        budget.take(now, &Terms { charge_permille: 500, ..refunded }, MS, &mut false).unwrap_err();
        assert_eq!(next() - now, owed - 18_000 * MS);
        assert_eq!(budget.take(now, &refunded, MS, &mut false), Err(wait - 18_000 * MS), "once");
        // What is more than it owes is no more than if it had used nothing.
        let more = Terms { refund_ns: 9_000 * MS, ..terms };
        budget.take(now, &more, MS, &mut false).unwrap();
        assert_eq!(next(), now - terms.behind(MS) + terms.cost(MS));
    }

    #[test]
    fn what_a_governor_gives_back_lasts_for_ten_slots_or_two_launches() {
        let (_folder, usage) = usage();
        let budget = usage.budget(0).unwrap();
        let now = 50 * PERIOD_NS;
        for (governed, estimate, credit) in
            [(false, MS / 10, MS), (true, MS / 10, 10 * MS), (true, 9 * MS, 18 * MS)]
        {
            let terms = Terms { governed, ..terms(500) };
            usage.file().gpus[0].next_ns.store(0, Relaxed);
            let mut all = 0;
            while budget.take(now, &terms, estimate, &mut false).is_ok() {
                all += estimate;
            }
            // The burst, the credit, and the one that uses it up.
            assert_eq!(all / estimate, (25 * MS + credit) / estimate + 1, "{governed} {estimate}");
        }
    }

    #[test]
    fn a_process_that_died_at_work_is_counted_once() {
        let (_folder, usage) = usage();
        let me = usage.claim().unwrap();
        let other = Process::of_slot(5).unwrap();
        usage.file().claimed[0].fetch_or(1 << 5, Relaxed);
        let now = 3_000 * MS;
        usage.set_open(other, 0, now - 100 * MS);
        assert_eq!(usage.open_elsewhere(me, 0, now), Some(now - 100 * MS));
        assert_eq!(usage.open_elsewhere(me, 1, now), None);
        assert_eq!(usage.open_elsewhere(other, 0, now), None, "its own");
        assert_eq!(usage.reap_open(me, 0, now, 200 * MS), None, "too early to ask");
        // Nobody has the lock of that slot.
        assert_eq!(usage.reap_open(me, 0, now, 50 * MS), Some(now - 100 * MS));
        assert_eq!(usage.reap_open(me, 0, now, 50 * MS), None);
        usage.set_open(other, 0, 7);
        assert_eq!(
            usage.open_elsewhere(me, 0, now),
            None,
            "who has not looked for so long is not waited for"
        );
        assert_eq!(usage.reap_open(me, 0, now, 50 * MS), Some(now - 1_000 * MS));
    }

    proptest! {
        /// Many launchers, estimates that are wrong in both directions, idle times: within any window the container gets
        /// its rate, the burst, and the last launch.
        #[test]
        fn in_any_window_a_container_gets_its_rate_and_the_stated_burst(
            rate in 1..=1000_u32,
            times in 1..=20_u64,
            governed: bool,
            steps in prop::collection::vec((0..30_000_000_u64, 1..40_000_000_u64, 0..400_u64), 1..120),
        ) {
            let (_folder, usage) = usage();
            let terms = Terms { slot_ns: times * SLOT_NS, governed, ..terms(rate) };
            let budget = usage.budget(0).unwrap();
            let mut now = 77 * PERIOD_NS;
            let mut longest = 0;
            let mut done: Vec<(u64, u64)> = Vec::new();
            for (idle, kernel, estimate_percent) in steps {
                now += idle;
                loop {
                    match budget.take(now, &terms, kernel * estimate_percent / 100, &mut false) {
                        Ok(mut taken) => {
                            done.push((now, now + kernel));
                            longest = longest.max(kernel);
                            now += kernel;
                            let counted = budget.count(now, now - kernel, now);
                            prop_assert_eq!(counted, kernel);
                            budget.pay(&terms, counted, &mut taken);
                            budget.give(taken);
                            break;
                        }
                        Err(wait) => {
                            prop_assert!(wait > 0 && wait <= MAX_DEBT_NS);
                            now += wait;
                        }
                    }
                }
            }
            for from in 0..done.len() {
                let mut used = 0;
                for to in from..done.len() {
                    used += done[to].1 - done[to].0;
                    let most = terms.most_in(done[to].1 - done[from].0, 4 * longest);
                    prop_assert!(used <= most + longest, "{} in {}", used, done[to].1 - done[from].0);
                }
            }
        }

        #[test]
        fn garbage_neither_hangs_nor_crashes(
            next: u64, frontier: u64, open: u64, now: u64, estimate: u64, start: u64, end: u64, rate: u32, charge: u32,
        ) {
            let (_folder, usage) = usage();
            let me = usage.claim().unwrap();
            usage.file().claimed[0].store(u64::MAX, Relaxed);
            let words = &usage.file().gpus[0];
            words.next_ns.store(next, Relaxed);
            words.frontier_ns.store(frontier, Relaxed);
            words.charged_ns.store(next, Relaxed);
            words.done_ns.store(frontier, Relaxed);
            usage.file().slots[9].open_since_ns[0].store(open, Relaxed);
            let budget = usage.budget(0).unwrap();
            let terms = Terms {
                slots: Slots::NONE,
                slot_ns: SLOT_NS,
                rate_permille: rate,
                charge_permille: charge,
                refund_ns: estimate,
                governed: open % 2 == 0,
            };
            words.refunded_ns.store(start, Relaxed);
            if let Err(wait) = budget.take(now, &terms, estimate, &mut false) {
                prop_assert!(wait > 0 && wait <= MAX_DEBT_NS);
            }
            let counted = budget.count(now, start, end);
            prop_assert!(counted <= end.min(now).saturating_sub(start));
            let mut taken = next;
            budget.pay(&terms, counted, &mut taken);
            budget.give(taken);
            budget.correct(now, estimate, counted);
            budget.none_queued(now);
            prop_assert!(budget.queued_ns(now) <= 10 * PERIOD_NS);
            budget.covers(now, &terms, estimate);
            usage.open_elsewhere(me, 0, now);
            usage.reap_open(me, 0, now, 0);
        }
    }

    #[test]
    fn processes_that_launch_at_once_get_together_what_one_would() {
        let (_folder, usage) = usage();
        let (budget, terms) = (usage.budget(0).unwrap(), terms(100));
        let now = 50 * PERIOD_NS;
        let went: usize = std::thread::scope(|scope| {
            let launchers: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        (0..1000).filter(|_| budget.take(now, &terms, MS / 10, &mut false).is_ok()).count()
                    })
                })
                .collect();
            launchers.into_iter().map(|launcher| launcher.join().unwrap()).sum()
        });
        // The burst, the credit, and the one that uses it up.
        assert_eq!(went, 90 + 10 + 1);
    }
}
