//! What the table in virtual time must say. All of it with `VCUDA_STRESS=full`, as in the shim's stress test; else of each kind
//! of work the shares that are hardest for it.

use super::{virtual_time::Virtual, *};

/// Seconds that are measured. The governor sets right what is too much or too little within some, so a mean of few is off.
const SECONDS: usize = 12;

fn full() -> bool {
    std::env::var("VCUDA_STRESS").is_ok_and(|value| value == "full")
}

#[test]
fn shares_are_what_they_say_and_little_is_lost() {
    for work in &WORK {
        let hardest: &[&[u32]] = match work.name {
            "5 us" => &[],
            "mix" | "16 streams" => &[&[30, 70], &[10, 90]],
            "200 ms" | "graph of 200" => &[&[10, 90]],
            _ => &[&[25; 4]],
        };
        if !full() && hardest.is_empty() {
            continue;
        }
        let alone = alone(&mut Virtual::default(), work, 1).unwrap();
        for shares in if full() { &SHARES } else { hardest } {
            let all: Vec<_> = shares.iter().map(|share| (work, Some(*share))).collect();
            let got = Virtual::default().measure(&all, SECONDS, true).unwrap();
            // Who waits after each launch is late by what a paced one takes of the host.
            let whole = match work.pattern {
                Pattern::Sync => alone.paced_percent * 100.0 / f64::from(NEARLY_ALL),
                _ => alone.unpaced_percent,
            };
            // A kernel that has begun runs to its end: a second has one more or less, and so has the mean.
            let kernel = work.longest_us() / 10_000.0;
            let mut had = 0.0;
            for (share, windows) in shares.iter().zip(&got) {
                let (ideal, mean) = (f64::from(*share) * whole / 100.0, mean(windows));
                let most = if shares.len() == 1 { f64::from(*share) } else { ideal };
                let worst = windows.iter().map(|window| (window - ideal).abs()).fold(0.0, f64::max);
                println!(
                    "{} {shares:?}: {share} asked, ideal {ideal:.2}, mean {mean:.2}, off by {worst:.2}",
                    work.name
                );
                let slack = 1.0 + kernel / SECONDS as f64;
                assert!(
                    (ideal - slack..=most + slack).contains(&mean),
                    "{} {shares:?}: {windows:.2?}",
                    work.name
                );
                assert!(worst <= 3.0 + kernel + (most - ideal), "{} {shares:?}: {windows:.2?}", work.name);
                had += mean;
            }
            let ideal = f64::from(shares.iter().sum::<u32>()) * whole / 100.0;
            assert!(had >= ideal * 0.98, "{} {shares:?}: {had:.2} of {ideal:.2}", work.name);
        }
    }
}

#[test]
fn attackers_get_no_more_than_their_share_and_their_neighbours_no_less() {
    let fair = &WORK[1];
    for attack in &ATTACKS {
        let both = [(attack, Some(30)), (fair, Some(70))];
        let got = Virtual::default().measure(&both, 4, true).unwrap();
        let means: Vec<_> = got.iter().map(|windows| mean(windows)).collect();
        println!("{}: {means:.2?}", attack.name);
        assert!(means[0] <= 31.0 && (69.0..=71.0).contains(&means[1]), "{}: {got:.2?}", attack.name);
    }
}

/// A borrower that nothing held back had 1,024 launches queued when the owner woke up: up to 262 ms of 100 us, and of longer ones
/// seconds.
#[test]
fn what_was_lent_is_back_in_time_however_long_the_borrowers_kernels_are() {
    let mut machine = Virtual::default();
    for work in WORK.iter().filter(|work| matches!(work.name, "100 us" | "5 ms" | "16 streams")) {
        for (name, terms) in borrowers() {
            let times: Vec<_> = (0..4).map(|_| machine.give_back(work, terms).unwrap()).collect();
            println!("{} {name}: {times:?} ms", work.name);
            assert!(times.iter().all(|ms| *ms <= 250.0), "{}: {times:?}", work.name);
        }
    }
}
