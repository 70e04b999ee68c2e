//! Whole containers in virtual time: the gate and the budget as they are shipped, on a GPU of a few lines.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod machine;

use region::{Pace, Slots};

use machine::{Load, MS, US, World};

/// The timetable of shares that are alone, or together on a GPU.
fn paces(cores: &[u32]) -> Vec<Pace> {
    let mut taken = Slots::NONE;
    let owns: Vec<_> = cores
        .iter()
        .map(|core| {
            let own = Slots::place(*core, taken).unwrap();
            taken = taken.union(own);
            own
        })
        .collect();
    // Slots that nobody owns are everybody's.
    let lent = Slots::ALL.difference(taken);
    let lent = if cores.len() == 1 { lent } else { Slots::NONE };
    cores
        .iter()
        .zip(owns)
        .map(|(core, own)| Pace {
            own,
            core_percent: *core,
            lease: region::Lease { slots: lent, rate_permille: core * 10, until_ns: u64::MAX },
            stretch: region::Stretch::default(),
            charge_permille: 1000,
            refund_ns: 0,
        })
        .collect()
}

/// Runs a load in shares of so many percent, with or without a governor, and gives their windows.
fn run(cores: &[u32], load: &Load, seconds: u64, governor: bool) -> (World, Vec<Vec<f64>>) {
    let mut world = World::new();
    world.governor = governor;
    for pace in paces(cores) {
        let alone = cores.len() == 1;
        let lease = if governor || alone { pace.lease } else { region::Lease::default() };
        world.add(Pace { lease, ..pace }, load);
    }
    world.run(seconds);
    let shares = world.shares();
    (world, shares)
}

/// Whether all loads run in all shares, or a few: `VCUDA_STRESS=full`, as in tests/stress.rs.
fn full() -> bool {
    std::env::var("VCUDA_STRESS").is_ok_and(|value| value == "full")
}

/// No container gets a point more than it asked for, nor three in any second; nor much less. How much less depends on
/// what neighbours run: their work that lasts into a share's slots is counted as its own, which is what the node's
/// governor sets right, and no governor is here.
fn assert_kept(cores: &[u32], load: &Case) {
    let (_, shares) = run(cores, &load.load, if full() { 8 } else { 4 }, false);
    for (core, windows) in cores.iter().zip(&shares) {
        let asked = f64::from(*core);
        let mean = windows.iter().sum::<f64>() / windows.len() as f64;
        let off = |share: &f64| share - asked;
        let (least, most) =
            (windows.iter().map(off).fold(0.0, f64::min), windows.iter().map(off).fold(0.0, f64::max));
        let what = load.what;
        println!("{cores:?} {what}: {core} asked, mean {mean:.2}, windows {least:+.2} to {most:+.2}");
        let short = if cores.len() == 1 { 0.3 } else { load.short };
        assert!(
            mean - asked <= 1.0 && asked - mean <= short,
            "{cores:?} {what}: mean {mean:.2}: {windows:.1?}"
        );
        assert!(most <= 3.0 && -least <= short + 2.0, "{cores:?} {what}: {windows:.1?}");
    }
}

struct Case {
    what: &'static str,
    load: Load,
    /// Points of the mean that neighbours may cost.
    short: f64,
}

fn cases() -> Vec<Case> {
    let case = |what, short, load| Case { what, load, short };
    let mix = [5 * US, 5 * US, 100 * US, 20 * US, 5 * US, 2 * MS, 5 * US, 400 * US];
    vec![
        case("5 us", 0.1, Load::of(&[5 * US])),
        case("100 us", 0.15, Load::of(&[100 * US])),
        case("400 us", 0.15, Load::of(&[400 * US])),
        case("5 ms", 0.75, Load::of(&[5 * MS])),
        case("mix", 1.25, Load::of(&mix)),
        case("graph", 0.1, Load::of(&[200 * 5 * US])),
        case("16 streams", 1.0, Load { streams: 16, ..Load::of(&[100 * US]) }),
        case("16 streams of long ones", 2.5, Load { streams: 16, ..Load::of(&[3 * MS]) }),
        case("sync per launch", 2.5, Load { syncs: true, ..Load::of(&[400 * US]) }),
    ]
}

#[test]
fn a_share_alone_gets_what_it_asked_for() {
    for load in cases() {
        for core in [10, 30, 50, 70, 90].into_iter().filter(|core| full() || *core == 30) {
            assert_kept(&[core], &load);
        }
    }
}

#[test]
fn shares_together_get_what_they_asked_for() {
    for load in cases() {
        assert_kept(&[30, 70], &load);
        if full() {
            for cores in [&[10, 90][..], &[25; 4], &[10; 10]] {
                assert_kept(cores, &load);
            }
        }
    }
}

#[test]
fn processes_of_a_container_get_its_share_and_no_more() {
    for (processes, short) in [(2, 1.0), (8, 4.0), (64, 3.0)] {
        let load = Load { processes, ..Load::of(&[100 * US]) };
        let load = Case { what: "processes", load, short };
        assert_kept(&[30], &load);
        assert_kept(&[30, 70], &load);
    }
}

/// Whoever of them comes first when the budget has room uses it up: chance, and nobody's privilege.
#[test]
fn processes_of_a_container_all_get_a_part_of_its_share() {
    for (processes, least) in [(8, 2), (64, 8)] {
        let (world, _) = run(&[30], &Load { processes, ..Load::of(&[100 * US]) }, 6, false);
        let got = world.of_processes(0);
        let equal = got.iter().sum::<u64>() / got.len() as u64;
        assert!(got.iter().all(|ns| *ns >= equal / least), "{equal} each if all were equal: {got:?}");
    }
}

/// Short kernels beside a long one must not hide it.
#[test]
fn a_long_kernel_is_counted_whatever_runs_beside_it() {
    let long = Load { streams: 2, ..Load::of(&[40 * MS, 20 * US]) };
    let (_, shares) = run(&[30], &long, 10, false);
    let mean = shares[0].iter().sum::<f64>() / shares[0].len() as f64;
    assert!((mean - 30.0).abs() <= 2.0, "{:.1?}", shares[0]);
}

fn mean(windows: &[f64]) -> f64 {
    windows.iter().sum::<f64>() / windows.len() as f64
}

/// What a neighbour's work took of the time between a kernel's start and its end, the shim cannot know; the driver does.
#[test]
fn with_the_governor_shares_get_what_they_asked_for_whatever_overlaps() {
    let long = Case { what: "200 ms", short: 0.0, load: Load::of(&[200 * MS]) };
    let beside = [&[30, 70][..], &[10, 90], &[25; 4], &[10; 10]];
    for load in cases().into_iter().chain([long]) {
        let is_long = load.what == "200 ms";
        // Others are right without it, or take long to simulate.
        if !is_long && !matches!(load.what, "mix" | "16 streams" | "sync per launch") {
            continue;
        }
        for cores in beside.into_iter().filter(|cores| is_long || full() || **cores == [30, 70]) {
            // What was charged too much before the first correction has come back by then.
            let (seconds, settled) = if is_long { (30, 2) } else { (18, 8) };
            // What launches take of the host is nobody's time.
            let unpaced = mean(&run(&[100], &load.load, 4, false).1[0]) / 100.0;
            let (_, shares) = run(cores, &load.load, seconds, true);
            for (core, windows) in cores.iter().zip(&shares) {
                let (most, mean) = (f64::from(*core), mean(&windows[settled..]));
                let asked = most * unpaced;
                let worst = windows[settled..].iter().map(|share| (share - asked).abs()).fold(0.0, f64::max);
                println!(
                    "{cores:?} {}: {core} asked, ideal {asked:.2}, mean {mean:.2}, a second off by {worst:.1}",
                    load.what
                );
                assert!(mean >= asked - 1.0 && mean <= most + 1.0, "{cores:?} {}: {windows:.1?}", load.what);
                // A window holds a kernel more or less, which is 20 points.
                let physics = if is_long { 20.0 } else { 0.0 };
                assert!(worst <= 3.0 + physics, "{cores:?} {}: {windows:.1?}", load.what);
            }
        }
    }
}

/// NVML's samples do not end with the governor's ticks. Charged for what they were ahead, a share of 90 beside one of 10 got 89.6.
#[test]
fn a_governor_takes_nothing_from_kernels_that_fit_their_slots() {
    for (what, load) in [("100 us", Load::of(&[100 * US])), ("graph", Load::of(&[200 * 5 * US]))] {
        let means = |governor| {
            let (_, shares) = run(&[10, 90], &load, 16, governor);
            shares.iter().map(|windows| mean(&windows[6..])).collect::<Vec<_>>()
        };
        let (with, without) = (means(true), means(false));
        println!("[10, 90] {what}: with a governor {with:.2?}, without {without:.2?}");
        let off = with.iter().zip(&without).map(|(with, without)| (with - without).abs());
        assert!(off.fold(0.0, f64::max) <= 0.1, "{what}: {with:.2?}, {without:.2?}");
    }
}

/// What is launched at the end of slots lasts into the next one's, and both are charged for the other's time, now more and now
/// less. Before what came back of that could be used for longer than one launch, and while what had met a neighbour's work was
/// thought to take longer from then on, ten shares of 10 left 3.2 % of the GPU idle with a mix and 3.8 % with 16 streams.
#[test]
fn ten_small_shares_leave_little_of_the_gpu_idle() {
    let mix = Load::of(&[5 * US, 100 * US, 2 * MS]);
    for (what, load) in [("mix", mix), ("16 streams", Load { streams: 16, ..Load::of(&[100 * US]) })] {
        let (_, shares) = run(&[10; 10], &load, 28, true);
        let means: Vec<_> = shares.iter().map(|windows| mean(&windows[8..])).collect();
        let sum: f64 = means.iter().sum();
        println!("ten of 10, {what}: {sum:.2}: {means:.2?}");
        assert!(sum >= 98.0 && means.iter().all(|mean| *mean >= 9.7), "{what}: {sum:.2}: {means:.2?}");
    }
}

/// Without it, a kernel that lasts into others' slots is charged for their time too: at worst all of them run beside it
/// all the time, and it gets that part of its share.
#[test]
fn without_the_governor_a_long_kernel_gets_no_more_than_its_share_and_at_least_an_equal_part_of_it() {
    let load = Load::of(&[200 * MS]);
    for core in [10, 30, 50, 70, 90] {
        let (_, shares) = run(&[core], &load, 80, false);
        let mean = mean(&shares[0]);
        assert!((mean - f64::from(core)).abs() <= 1.0, "{core} alone: {mean:.2}: {:.1?}", shares[0]);
    }
    for cores in [&[30, 70][..], &[10, 90], &[25; 4], &[10; 10]] {
        let (_, shares) = run(cores, &load, 80, false);
        for (core, windows) in cores.iter().zip(&shares) {
            let (asked, mean) = (f64::from(*core), mean(windows));
            println!("{cores:?} 200 ms without: {core} asked, mean {mean:.2}");
            assert!(mean <= asked + 1.0 && mean >= asked / cores.len() as f64, "{cores:?}: {mean:.2}");
        }
    }
}

/// The GPU gives each of the 64 turns of their own. What the neighbour still had queued behind them when its slots ended
/// must be little, and must not be taken for the time that its kernels take.
#[test]
fn a_container_of_64_processes_gets_no_more_than_its_share_and_its_neighbour_no_less() {
    let (attack, fair) = (Load { processes: 64, ..Load::of(&[100 * US]) }, Load::of(&[100 * US]));
    let mut world = World::new();
    world.governor = true;
    for (pace, load) in paces(&[30, 70]).into_iter().zip([attack, fair]) {
        world.add(pace, &load);
    }
    world.run(20);
    let means: Vec<f64> = world.shares().iter().map(|windows| mean(&windows[8..])).collect();
    println!("[30, 70] 64 processes beside one: {means:.2?}");
    assert!(means[0] <= 31.0 && (69.0..=71.0).contains(&means[1]), "{means:.2?}");
}

/// Runs loads beside each other under a governor that makes slots last longer where that is due: the world, and the mean of
/// each after `settled` seconds.
fn stretched(cores: &[u32], loads: &[&Load], seconds: u64, settled: usize) -> (World, Vec<f64>) {
    let mut world = World::new();
    world.governor = true;
    world.stretches = true;
    for (pace, load) in paces(cores).into_iter().zip(loads) {
        world.add(pace, load);
    }
    world.run(seconds);
    let means = world.shares().iter().map(|windows| mean(&windows[settled..])).collect();
    (world, means)
}

/// Of a millisecond each, a share's slots end in the middle of a kernel, whose time nobody can tell from a neighbour's.
#[test]
fn long_kernels_get_their_shares_in_longer_slots() {
    for (kernel_ms, seconds, settled) in [(5, 18, 6), (20, 24, 8), (50, 30, 14)] {
        let load = Load::of(&[kernel_ms * MS]);
        let beside = [&[10, 90][..], &[10; 10], &[30, 70], &[25; 4]];
        for cores in &beside[..if full() { 4 } else { 2 }] {
            let (world, means) = stretched(cores, &vec![&load; cores.len()], seconds, settled);
            println!("{cores:?} {kernel_ms} ms: {means:.2?} {:?}", world.stretching);
            let short = if kernel_ms == 5 { 0.3 } else { 1.0 };
            for ((core, got), windows) in cores.iter().zip(&means).zip(world.shares()) {
                let asked = f64::from(*core);
                assert!(
                    *got <= asked + 0.5 && *got >= asked - short,
                    "{cores:?} {kernel_ms} ms: {means:.2?}"
                );
                let worst = windows[settled..].iter().map(|share| (share - asked).abs()).fold(0.0, f64::max);
                assert!(kernel_ms > 5 || worst <= 3.0, "{cores:?} {kernel_ms} ms: {windows:.1?}");
            }
        }
    }
}

#[test]
fn slots_are_as_ever_where_one_container_has_short_kernels() {
    let (short, long) = (Load::of(&[100 * US]), Load::of(&[20 * MS]));
    for loads in [[&short, &long], [&long, &short], [&short, &short]] {
        let (world, means) = stretched(&[30, 70], &loads, 8, 4);
        assert!(!world.stretching.is_stretched(world.now()), "{means:.2?}");
    }
}

/// What a container has used too early or too late when slots change is made up for: none gets more than its share, nor
/// nothing.
#[test]
fn slots_that_change_at_work_give_nobody_more_and_starve_nobody() {
    let cores = [10, 30, 60];
    for kernel_ms in [5, 20, 60] {
        let long = Load::of(&[kernel_ms * MS]);
        let mut world = World::new();
        world.governor = true;
        for pace in paces(&cores) {
            world.add(pace, &long);
        }
        let changes = [1, 2, 10, 5, 1, 20, 2, 1, 10, 1];
        for (before, after) in changes.iter().zip(&changes[1..]) {
            world.change(*before, *after);
            world.run(4);
        }
        let shares = world.shares();
        println!("{kernel_ms} ms: {:.1?}", shares);
        for (core, windows) in cores.iter().zip(&shares) {
            let (asked, got) = (f64::from(*core), mean(windows));
            assert!(got <= asked + 0.5 && got >= asked * 0.85, "{kernel_ms} ms, {core}: {got:.2}");
            // Two seconds hold the longest period.
            let pairs = windows.windows(2).map(mean);
            assert!(pairs.clone().all(|share| share > 0.0), "{kernel_ms} ms, {core}: {windows:.1?}");
        }
    }
}
