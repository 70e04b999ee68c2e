//! Who launches when: a fractional share owns as many slots of its GPU's period as it holds core. They are given out
//! when it is bound and kept as long as it is. As a GPU's shares hold at most 100 core, no two need the same slot.
//! Pure functions.

use std::collections::BTreeMap;

use region::Slots;
use vcuda_config::GpuUuid;

use crate::{GpuShare, ShareKind, ShareName, ShareRecord};

/// The slots of a share of `core`, none of them `taken`: of those that it had as many as can be, then others. None
/// where fewer are free: such a share goes without a timetable.
pub(crate) fn slots(core: u32, had: Slots, taken: Slots) -> Slots {
    let kept = had.difference(taken);
    if kept.count() >= core {
        return kept.iter().take(core as usize).fold(Slots::NONE, |all, slot| all.union(only(slot)));
    }
    match Slots::place(core - kept.count(), taken.union(kept)) {
        Some(more) => kept.union(more),
        None => Slots::NONE,
    }
}

/// Slots of each GPU that `records` own.
pub(crate) fn taken<'a>(records: impl Iterator<Item = &'a ShareRecord>) -> BTreeMap<GpuUuid, Slots> {
    let mut taken = BTreeMap::<GpuUuid, Slots>::new();
    for gpu in records.flat_map(|record| &record.gpus) {
        let of_gpu = taken.entry(gpu.uuid.clone()).or_default();
        *of_gpu = of_gpu.union(gpu.slots);
    }
    taken
}

/// Gives the shares in `gpus` their slots beside `taken`.
pub(crate) fn give(
    kind: ShareKind,
    gpus: &mut [GpuShare],
    had: &[GpuShare],
    taken: &BTreeMap<GpuUuid, Slots>,
) {
    for gpu in gpus {
        gpu.slots = Slots::NONE;
        if kind == ShareKind::Share {
            let had = had.iter().find(|had| had.uuid == gpu.uuid).map_or(Slots::NONE, |had| had.slots);
            gpu.slots = slots(gpu.core, had, taken.get(&gpu.uuid).copied().unwrap_or_default());
        }
    }
}

/// Gives slots to shares that have none, from an earlier version, or not as many as core, or another's. Who was bound
/// first keeps what he has. Tells which records have changed.
pub(crate) fn mend(records: &mut BTreeMap<ShareName, ShareRecord>) -> Vec<ShareName> {
    let mut order: Vec<(u64, ShareName)> =
        records.iter().map(|(name, record)| (record.bound_at, name.clone())).collect();
    order.sort();
    let mut taken = BTreeMap::<GpuUuid, Slots>::new();
    let mut lacking = Vec::new();
    for (_, name) in order {
        let Some(record) = records.get(&name) else { continue };
        let sound = record.gpus.iter().all(|gpu| {
            let of_others = taken.get(&gpu.uuid).copied().unwrap_or_default();
            let count = if record.kind == ShareKind::Share { gpu.core } else { 0 };
            gpu.slots.count() == count && gpu.slots.intersection(of_others).is_empty()
        });
        if sound {
            add(&mut taken, &record.gpus);
        } else {
            lacking.push(name);
        }
    }
    let mut changed = Vec::new();
    for name in lacking {
        let Some(record) = records.get_mut(&name) else { continue };
        let before = record.gpus.clone();
        give(record.kind, &mut record.gpus, &before, &taken);
        add(&mut taken, &record.gpus);
        if record.gpus != before {
            changed.push(name);
        }
    }
    changed
}

fn add(taken: &mut BTreeMap<GpuUuid, Slots>, gpus: &[GpuShare]) {
    for gpu in gpus {
        let of_gpu = taken.entry(gpu.uuid.clone()).or_default();
        *of_gpu = of_gpu.union(gpu.slots);
    }
}

fn only(slot: u32) -> Slots {
    Slots::from_bits(1 << slot)
}

/// Slots as rows of text, `0-29,50`: what a person reads in a record.
pub(crate) mod text {
    use region::{SLOTS, Slots};
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(crate) fn serialize<S: Serializer>(slots: &Slots, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(slots)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Slots, D::Error> {
        let text = String::deserialize(deserializer)?;
        parse(&text).ok_or_else(|| D::Error::custom("slots are rows of 0 to 99, such as 0-29,50"))
    }

    pub(super) fn parse(text: &str) -> Option<Slots> {
        let mut slots = Slots::NONE;
        for row in text.split(',').filter(|_| !text.is_empty()) {
            let (first, last) = row.split_once('-').unwrap_or((row, row));
            let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
            if first > last || last >= SLOTS {
                return None;
            }
            slots = (first..=last).fold(slots, |all, slot| all.union(super::only(slot)));
        }
        Some(slots)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_slots() -> impl Strategy<Value = Slots> {
        any::<u128>().prop_map(Slots::from_bits)
    }

    #[test]
    fn a_share_that_grows_keeps_what_it_has_and_one_that_shrinks_gives_back() {
        let had = Slots::first(20);
        let other = Slots::from_bits(0x3ff << 20);
        let grown = slots(40, had, other);
        assert_eq!(grown.count(), 40);
        assert_eq!((grown.intersection(had), grown.intersection(other)), (had, Slots::NONE));
        assert_eq!(slots(5, had, other), Slots::first(5));
        assert_eq!(slots(20, had, other), had);
    }

    #[test]
    fn text_that_names_no_slots_is_refused() {
        for text in ["100", "0-100", "5-4", "-", "1,", ",", "x", "0-1-2"] {
            assert_eq!(text::parse(text), None, "{text}");
        }
        assert_eq!(text::parse(""), Some(Slots::NONE));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(slots in any_slots()) {
            prop_assert_eq!(text::parse(&slots.to_string()), Some(slots));
        }

        #[test]
        fn given_slots_are_as_many_as_core_and_free(core in 1..=100_u32, had in any_slots(), taken in any_slots()) {
            let given = slots(core, had, taken);
            prop_assert!(given.intersection(taken).is_empty());
            let enough = 100 - taken.count() >= core;
            prop_assert_eq!(given.count(), if enough { core } else { 0 });
            // As many of the old ones as there can be.
            let kept = had.difference(taken).count().min(core);
            prop_assert!(!enough || given.intersection(had).count() >= kept);
        }
    }
}
