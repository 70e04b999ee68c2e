//! Streams of pods, generated or read from a recorded one.

use std::time::Duration;

use super::{GPUS, Pod, UNITS};

/// A generator of numbers that anybody can repeat (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

/// Pods of these kinds, each as likely as its weight, one after the other; each stays for a time of up to `stay`.
pub(super) fn generated(seed: u64, pods: usize, stay: u64, kinds: &[(u32, u32, u64)]) -> Vec<Pod> {
    let mut random = Random(seed);
    let all: u64 = kinds.iter().map(|(.., weight)| weight).sum();
    let pod = |from| {
        let mut at = random.below(all);
        let (core, units, _) = kinds
            .iter()
            .find(|(.., weight)| {
                let hit = at < *weight;
                at = at.saturating_sub(*weight);
                hit
            })
            .unwrap();
        Pod { core: *core, units: *units, from, to: from + 1 + random.below(stay) }
    };
    (0..pods as u64).map(pod).collect()
}

/// As clusters of a company are used: services that stay, notebooks by day, trainings of whole GPUs by night.
pub(super) fn days(seed: u64) -> Vec<Pod> {
    let mut random = Random(seed);
    let mut pods = Vec::new();
    for day in 0..14_u64 {
        for minute in (0..1440).step_by(10) {
            let now = day * 1440 + minute;
            let by_day = (480..1080).contains(&minute);
            let mut add = |core: u32, units: u32, stay: u64, random: &mut Random| {
                let to = now + stay / 2 + random.below(stay);
                pods.push(Pod { core, units, from: now, to });
            };
            if by_day && random.below(2) == 0 {
                let (core, units) = [(10, 16), (20, 32), (25, 40)][usize::try_from(random.below(3)).unwrap()];
                add(core, units, 360, &mut random);
            }
            if random.below(6) == 0 {
                let (core, units) = [(30, 64), (15, 60), (50, 40)][usize::try_from(random.below(3)).unwrap()];
                add(core, units, 2880, &mut random);
            }
            if !by_day && random.below(12) == 0 {
                add([100, 200, 400, 800][usize::try_from(random.below(4)).unwrap()], 0, 600, &mut random);
            }
        }
    }
    pods
}

/// How long the tasks of Alibaba's cluster-trace-gpu-v2023 stayed, in seconds: the part of all that was over by then, in
/// percent.
const STAYS: [(u64, u64); 8] =
    [(0, 1), (5, 43), (25, 175), (50, 545), (75, 1990), (90, 6260), (95, 14_700), (100, 114_000)];

/// What they asked: core of shares and whole GPUs, and how many of its 7,064 tasks with a GPU did so. Of 24 sizes, those
/// that more than ten asked. (Weng et al., "Beware of Fragmentation", USENIX ATC 2023, is about this cluster.)
const SIZES: [(u32, u64); 17] = [
    (100, 3911),
    (81, 1078),
    (47, 750),
    (32, 328),
    (65, 253),
    (23, 140),
    (46, 128),
    (59, 75),
    (16, 74),
    (55, 72),
    (22, 62),
    (37, 47),
    (800, 44),
    (11, 24),
    (48, 19),
    (200, 16),
    (400, 15),
];

/// A stream of such tasks, with `gap` seconds between two on average.
pub(super) fn production(seed: u64, pods: u64, gap: u64) -> Vec<Pod> {
    let mut random = Random(seed);
    let all: u64 = SIZES.iter().map(|(_, weight)| weight).sum();
    let mut from = 0;
    let pod = |_| {
        from += random.below(2 * gap + 1);
        let mut at = random.below(all);
        let size = SIZES.iter().find(|(_, weight)| {
            let hit = at < *weight;
            at = at.saturating_sub(*weight);
            hit
        });
        let (core, _) = *size.unwrap();
        let part = random.below(10_000);
        let above = STAYS.iter().position(|(percent, _)| percent * 100 > part).unwrap();
        let ((p0, t0), (p1, t1)) = (STAYS[above - 1], STAYS[above]);
        // Between two known points it grows as a power of itself.
        let way = (part as f64 / 100.0 - p0 as f64) / (p1 - p0) as f64;
        let stay = t0 as f64 * (t1 as f64 / t0 as f64).powf(way);
        Pod { core, units: units_of(core), from, to: from + 1 + Duration::from_secs_f64(stay).as_secs() }
    };
    (0..pods).map(pod).collect()
}

/// As large a part of the memory as `core` is of the time; whole GPUs ask for none.
fn units_of(core: u32) -> u32 {
    if core < 100 { (UNITS * core).div_ceil(100) } else { 0 }
}

/// Reads a recorded stream, see the head of this file. `times` makes every pod stay so much longer.
pub(super) fn recorded(text: &str, times: u64) -> Result<Vec<Pod>, String> {
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().unwrap_or_default().split(',').map(str::trim).collect();
    let column = |name: &str| names.iter().position(|other| *other == name);
    let needed = |name: &str| column(name).ok_or_else(|| format!("there is no column {name}"));
    let (gpus, milli) = (needed("num_gpu")?, needed("gpu_milli")?);
    let (from, to) = (needed("creation_time")?, needed("deletion_time")?);
    let memory = column("gpu_memory_mib");
    let mut pods = Vec::new();
    for (number, line) in (2..).zip(lines) {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let field = |at: usize| fields.get(at).copied().filter(|text| !text.is_empty());
        // Some tools write whole numbers as `12.0`.
        let whole = |text: &str| text.split_once('.').map_or(text, |(whole, _)| whole).parse::<u32>();
        let amount = |at: usize| match field(at).map(whole) {
            None => Ok(None),
            Some(Ok(amount)) => Ok(Some(u64::from(amount))),
            Some(Err(_)) => Err(format!("line {number}: {:?} is no amount", fields[at])),
        };
        let (Some(gpus), Some(milli)) = (amount(gpus)?, amount(milli)?) else { continue };
        let (Some(from), Some(to)) = (amount(from)?, amount(to)?) else { continue };
        let core = if gpus == 1 && milli < 1000 { milli.div_ceil(10) } else { gpus * 100 };
        if core == 0 || gpus > GPUS as u64 || to <= from {
            continue;
        }
        let core = u32::try_from(core).map_err(|error| error.to_string())?;
        let units = match memory.map(amount).transpose()?.flatten() {
            Some(mib) if core < 100 => u32::try_from(mib.div_ceil(256)).unwrap_or(u32::MAX).clamp(1, UNITS),
            _ => units_of(core),
        };
        pods.push(Pod { core, units, from, to: from + (to - from) * times });
    }
    pods.sort_by_key(|pod| pod.from);
    if pods.is_empty() { Err("no pod in it asks for a GPU".into()) } else { Ok(pods) }
}

#[test]
fn a_recorded_stream_is_read_as_it_is_described() {
    let text = "name,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time\n\
        late,1,455,,200,300\n\
        no-gpu,0,0,,0,5\n\
        whole,1,1000,A|B,100.0,160\n\
        eight,8,1000,,100,150\n\
        endless,1,500,,7,\n\
        too-many,9,1000,,1,2\n";
    let pods: Vec<_> =
        recorded(text, 2).unwrap().into_iter().map(|pod| (pod.core, pod.units, pod.from, pod.to)).collect();
    assert_eq!(pods, [(100, 0, 100, 220), (800, 0, 100, 200), (46, 74, 200, 400)]);
    let with_memory = "gpu_memory_mib,deletion_time,creation_time,gpu_milli,num_gpu\n1000,9,1,10,1\n";
    let [pod] = recorded(with_memory, 1).unwrap()[..] else { panic!() };
    assert_eq!((pod.core, pod.units), (1, 4));
    for (text, said) in [
        ("", "no column num_gpu"),
        ("num_gpu,gpu_milli,creation_time,deletion_time\n", "no pod"),
        ("num_gpu,gpu_milli,creation_time,deletion_time\n1,half,1,2\n", "line 2: \"half\""),
        ("num_gpu,gpu_milli,creation_time,deletion_time\n1,-5,1,2\n", "line 2"),
        ("num_gpu,gpu_milli,creation_time,deletion_time\n1,5\n", "no pod"),
    ] {
        let error = recorded(text, 1).unwrap_err();
        assert!(error.contains(said), "{error}");
    }
}
