//! Which GPUs a process has as CUDA devices, and in which order: those whose device nodes it may open, as
//! `CUDA_DEVICE_ORDER` and `CUDA_VISIBLE_DEVICES` say.

use std::cmp::Reverse;

use sim_gpud::link::Link;

/// The module's numbers of this process's CUDA devices.
pub(crate) fn devices(link: &Link) -> Vec<usize> {
    let gpus = link.state.gpus();
    let mut all = link.accessible();
    if std::env::var("CUDA_DEVICE_ORDER").as_deref() != Ok("PCI_BUS_ID") {
        // FASTEST_FIRST; equals stay in the order of their addresses.
        all.sort_by_key(|gpu| {
            let facts = &gpus[*gpu].facts;
            Reverse(u64::from(facts.multiprocessors) * u64::from(facts.clock_mhz))
        });
    }
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(wanted) => {
            let uuids: Vec<String> = all.iter().map(|gpu| gpus[*gpu].facts.uuid_text()).collect();
            pick(&wanted, &uuids).into_iter().map(|at| all[at]).collect()
        }
        Err(_) => all,
    }
}

/// Places in `uuids` that `wanted` names: indices, or beginnings of UUIDs. The first that names nothing ends the list; one
/// that is named twice empties it.
fn pick(wanted: &str, uuids: &[String]) -> Vec<usize> {
    let by_uuid = wanted.starts_with("GPU-");
    let mut picked = vec![];
    for word in wanted.split(',') {
        let found = if by_uuid { by_beginning(word, uuids) } else { by_index(word, uuids.len()) };
        match found {
            Some(at) if picked.contains(&at) => return vec![],
            Some(at) => picked.push(at),
            None => break,
        }
    }
    picked
}

/// What C's `strtoul` reads, so `1gpu` is 1.
fn by_index(word: &str, count: usize) -> Option<usize> {
    let digits: String = word.trim_start().chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok().filter(|index| *index < count)
}

fn by_beginning(word: &str, uuids: &[String]) -> Option<usize> {
    let mut fitting = (0..uuids.len()).filter(|at| word.starts_with("GPU-") && uuids[*at].starts_with(word));
    let first = fitting.next();
    first.filter(|_| fitting.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_are_picked_as_the_real_driver_does() {
        let uuids = ["GPU-aa10", "GPU-aa20", "GPU-bb30"].map(str::to_owned);
        for (wanted, picked) in [
            ("", vec![]),
            ("0,1,2", vec![0, 1, 2]),
            ("2,0", vec![2, 0]),
            ("1gpu, 2x", vec![1, 2]),
            ("0,-1,1", vec![0]),
            ("-1", vec![]),
            ("NoDevFiles", vec![]),
            ("0,3,1", vec![0]),
            ("0,1,0", vec![]),
            ("GPU-bb30,GPU-aa10", vec![2, 0]),
            ("GPU-bb", vec![2]),
            ("GPU-aa", vec![]),
            ("GPU-bb,GPU-bb30", vec![]),
            ("GPU-bb,0", vec![2]),
            ("GPU-bb,GPU-cc,GPU-aa10", vec![2]),
        ] {
            assert_eq!(pick(wanted, &uuids), picked, "{wanted:?}");
        }
    }
}
