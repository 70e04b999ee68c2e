//! Memory that more than one process holds: one made it, others imported it. The driver frees it with the last of them, so it
//! stays on the account of its maker, be that dead or done with it, until nobody has it any more.
//!
//! Each piece has an [`Export`]: whose account it is on, under which keys others know it, and a bit for each process that
//! imported it. Who imports sets its bit, then confirms that the piece is still there by a change of its word; who takes a
//! piece that nobody holds off the table does it by a change of the same word, made from what it was before the bits were
//! looked at. So one of the two fails and sees why.
//!
//! A piece that its maker is done with while others hold it is given back by whoever finds it so, once. Killed between the
//! two steps of that, it stays on the account until the maker has ended, never the other way round.

use std::sync::atomic::Ordering::SeqCst;

use crate::{
    MAX_EXPORTS, MAX_GPUS, MAX_PROCESSES,
    account::units,
    fault,
    layout::Export,
    usage::{Process, Usage},
};

/// A piece of memory in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Exported {
    entry: usize,
}

/// How others know a piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// A mark of the descriptor that stands for it.
    Descriptor(u64),
    /// What the driver's own handle holds, hashed.
    Handle(u64),
}

impl Key {
    /// Which of an entry's keys it is, and the key, which is never 0.
    fn place(self) -> (usize, u64) {
        match self {
            Self::Descriptor(key) => (0, key.max(1)),
            Self::Handle(key) => (1, key.max(1)),
        }
    }
}

/// Whose account a piece is on. 0 is a free entry; one without units is being made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Word {
    /// 36 bits.
    units: u64,
    /// 4 bits.
    gpu: usize,
    /// 10 bits.
    slot: usize,
    /// The maker is done with it.
    left: bool,
    /// Changes with every import; 13 bits, never 0.
    turn: u64,
}

impl Word {
    fn unpack(word: u64) -> Option<Self> {
        let field = |at: u32, bits: u32| word >> at & ((1 << bits) - 1);
        (word != 0).then(|| Self {
            units: field(0, 36),
            gpu: usize::try_from(field(36, 4)).unwrap_or(0),
            slot: usize::try_from(field(40, 10)).unwrap_or(0),
            left: field(50, 1) == 1,
            turn: field(51, 13),
        })
    }

    fn pack(self) -> u64 {
        self.units
            | (self.gpu as u64) << 36
            | (self.slot as u64) << 40
            | u64::from(self.left) << 50
            | self.turn << 51
    }

    fn next(self) -> Self {
        Self { turn: self.turn % ((1 << 13) - 1) + 1, ..self }
    }
}

/// Slot, GPU and units of an entry with this word, below `MAX_PROCESSES`, `MAX_GPUS` and 2^36; and whether its maker is done
/// with it.
pub(crate) fn owner(word: u64) -> Option<(usize, usize, u64, bool)> {
    Word::unpack(word).map(|word| (word.slot, word.gpu, word.units, word.left))
}

impl Export {
    fn word(&self) -> Option<Word> {
        Word::unpack(self.word.load(SeqCst))
    }

    fn change(&self, from: Word, to: Option<Word>) -> bool {
        let to = to.map_or(0, Word::pack);
        self.word.compare_exchange(from.pack(), to, SeqCst, SeqCst).is_ok()
    }

    fn bit(slot: usize) -> (usize, u64) {
        (slot / 64, 1 << (slot % 64))
    }

    fn set(&self, slot: usize) {
        let (word, bit) = Self::bit(slot);
        self.importers[word].fetch_or(bit, SeqCst);
    }

    fn clear(&self, slot: usize) {
        let (word, bit) = Self::bit(slot);
        if self.importers[word].load(SeqCst) & bit != 0 {
            self.importers[word].fetch_and(!bit, SeqCst);
        }
    }
}

impl Usage {
    /// Entries that any process ever used.
    fn exports(&self) -> &[Export] {
        let used = usize::try_from(self.file().exports_used.load(SeqCst)).unwrap_or(MAX_EXPORTS);
        &self.file().exports[..used.min(MAX_EXPORTS)]
    }

    /// A mark for descriptors of memory of GPU `gpu`, below 2^39, that no other of this container had lately: 15 bits of the
    /// container, 4 of the GPU, 20 that count.
    pub fn new_mark(&self, gpu: usize) -> u64 {
        let number = self.file().exports_made.fetch_add(1, SeqCst);
        self.tag() << 24 | (gpu as u64 & 0xf) << 20 | number & 0xf_ffff
    }

    /// The GPU whose memory a mark stands for; none if it is another container's.
    pub fn gpu_of_mark(&self, mark: u64) -> Option<usize> {
        (mark >> 24 == self.tag()).then_some(usize::try_from(mark >> 20 & 0xf).ok()?)
    }

    /// Notes that `me` lets others have `bytes` that it holds of GPU `gpu`. None if there is no room to note it: it is then on
    /// the account of `me` alone.
    pub fn export(&self, me: Process, gpu: usize, bytes: u64) -> Option<Exported> {
        if gpu >= MAX_GPUS || bytes == 0 {
            return None;
        }
        let making = Word { units: 0, gpu, slot: me.slot(), left: false, turn: 1 };
        for (entry, export) in self.file().exports.iter().enumerate() {
            if export.word.compare_exchange(0, making.pack(), SeqCst, SeqCst).is_err() {
                continue;
            }
            fault::point();
            self.file().exports_used.fetch_max(entry as u64 + 1, SeqCst);
            export.importers.iter().for_each(|word| word.store(0, SeqCst));
            export.keys.iter().for_each(|key| key.store(0, SeqCst));
            export.word.store(Word { units: units(bytes), ..making }.pack(), SeqCst);
            return Some(Exported { entry });
        }
        None
    }

    /// Has others know `exported` by `key` too.
    pub fn set_key(&self, exported: Exported, key: Key) {
        let (which, key) = key.place();
        self.file().exports[exported.entry].keys[which].store(key, SeqCst);
    }

    /// The GPU that `exported` is memory of, below [`MAX_GPUS`].
    pub fn gpu_of_export(&self, exported: Exported) -> usize {
        self.file().exports[exported.entry].word().map_or(0, |word| word.gpu)
    }

    /// The mark by which the descriptors of `exported` are known, if it has one.
    pub fn descriptor_of(&self, exported: Exported) -> Option<u64> {
        Some(self.file().exports[exported.entry].keys[0].load(SeqCst)).filter(|key| *key != 0)
    }

    /// Notes that `me` holds what others know by `key`, before it has it. None if nobody has that on the account.
    pub fn import(&self, me: Process, key: Key) -> Option<Exported> {
        let (which, key) = key.place();
        for (entry, export) in self.exports().iter().enumerate() {
            // Each failure means that another process imported it or is done with it meanwhile.
            for _ in 0..MAX_PROCESSES {
                let word = export.word().filter(|word| word.units > 0);
                let Some(word) = word.filter(|_| export.keys[which].load(SeqCst) == key) else { break };
                export.set(me.slot());
                fault::point();
                if export.change(word, Some(word.next())) {
                    return Some(Exported { entry });
                }
                export.clear(me.slot());
            }
        }
        None
    }

    /// `me` holds no more of what it imported.
    pub fn unimport(&self, me: Process, exported: Exported) {
        self.file().exports[exported.entry].clear(me.slot());
        self.settle_exports(me);
    }

    /// `me` is done with what it exported. Whether it is to give it back: else somebody else still holds it.
    pub fn unexport(&self, me: Process, exported: Exported) -> bool {
        let export = &self.file().exports[exported.entry];
        for _ in 0..MAX_PROCESSES {
            let Some(word) = export.word().filter(|word| word.slot == me.slot() && !word.left) else {
                // Somebody has spoilt the table.
                return true;
            };
            let held = self.is_held(Some(me), export);
            fault::point();
            if export.change(word, held.then_some(Word { left: true, ..word.next() })) {
                fault::point();
                return !held;
            }
        }
        true
    }

    /// Gives back what makers are done with and nobody holds any more.
    pub(crate) fn settle_exports(&self, me: Process) {
        for export in self.exports() {
            if let Some(word) = export.word().filter(|word| word.left)
                && !self.is_held(Some(me), export)
                && export.change(word, None)
            {
                fault::point();
                // What the dead have is given back with all the rest.
                let alive = || !self.dead(Some(me), word.slot);
                self.account(word.gpu).give_if(word.slot, word.units, alive);
            }
        }
    }

    /// Units of what the dead process of `slot` exported on GPU `gpu` that others still hold. What nobody holds is off the
    /// table then.
    pub(crate) fn kept_exports(&self, me: Option<Process>, slot: usize, gpu: usize) -> u64 {
        let mut kept: u64 = 0;
        for export in self.exports() {
            let Some(word) = export.word().filter(|word| (word.slot, word.gpu) == (slot, gpu)) else {
                continue;
            };
            if self.is_held(me, export) || !export.change(word, None) {
                kept = kept.saturating_add(word.units);
            }
        }
        kept
    }

    /// Slot `slot` has a new process, which has nothing of what the one before exported or imported.
    pub(crate) fn forget_exports(&self, slot: usize) {
        for export in self.exports() {
            export.clear(slot);
            if let Some(word) = export.word().filter(|word| word.slot == slot) {
                export.change(word, None);
            }
        }
    }

    /// Whether a living process has imported it.
    fn is_held(&self, me: Option<Process>, export: &Export) -> bool {
        export.importers.iter().enumerate().any(|(at, bits)| {
            let bits = bits.load(SeqCst);
            (0..64).any(|bit| bits >> bit & 1 == 1 && !self.dead(me, at * 64 + bit))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{path::PathBuf, sync::atomic::AtomicU64};

    use proptest::prelude::*;

    use super::*;

    const CEILING: u64 = 1 << 30;

    fn open() -> (tempfile::TempDir, PathBuf, Usage) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("usage");
        Usage::create(&path).unwrap();
        let usage = Usage::open_beside(&path, &folder.path().join("device")).unwrap();
        (folder, path, usage)
    }

    proptest! {
        #[test]
        fn words_round_trip(word: u64) {
            prop_assert_eq!(Word::unpack(word).map_or(0, Word::pack), word);
        }

        /// A container may write anything there: calls end, and give no more back than there is.
        #[test]
        fn garbage_neither_hangs_nor_crashes(words in prop::collection::vec(any::<u64>(), 8), key: u64, used: u64) {
            let (_folder, _, usage) = open();
            let me = usage.claim().unwrap();
            usage.take(me, 1, 4096, CEILING).unwrap();
            usage.file().exports_used.store(used, SeqCst);
            for (export, word) in usage.file().exports.iter().zip(&words) {
                export.word.store(*word, SeqCst);
                export.keys[0].store(key, SeqCst);
                export.importers[3].store(*word, SeqCst);
            }
            if let Some(imported) = usage.import(me, Key::Descriptor(key)) {
                usage.unimport(me, imported);
            }
            let exported = usage.export(me, 1, 512);
            usage.settle_exports(me);
            if let Some(exported) = exported {
                usage.unexport(me, exported);
            }
            usage.forget_exports(5);
            prop_assert!(usage.held(me, 1) <= 4096);
        }
    }

    #[test]
    fn what_is_exported_is_given_back_by_its_maker_unless_somebody_holds_it() {
        let (_folder, _, usage) = open();
        let me = usage.claim().unwrap();
        usage.take(me, 1, 8192, CEILING).unwrap();
        let one = usage.export(me, 1, 4096).unwrap();
        assert_eq!(usage.import(me, Key::Descriptor(7)), None);
        usage.set_key(one, Key::Descriptor(7));
        usage.set_key(one, Key::Handle(8));
        assert_eq!((usage.descriptor_of(one), usage.import(me, Key::Handle(7))), (Some(7), None));
        assert_eq!(usage.import(me, Key::Handle(8)), Some(one));
        assert!(!usage.unexport(me, one), "this process holds it by its import");
        assert_eq!(usage.used(Some(me), 1), 8192);
        usage.unimport(me, one);
        assert_eq!(usage.used(Some(me), 1), 4096);
        assert_eq!(usage.import(me, Key::Handle(8)), None);
        let two = usage.export(me, 1, 4096).unwrap();
        assert_eq!(two, one, "entries are used again");
        assert_eq!(usage.import(me, Key::Handle(8)), None, "under other keys");
        assert!(usage.unexport(me, two));
        assert_eq!(usage.used(Some(me), 1), 4096, "the maker gives it back itself");
    }

    #[test]
    fn of_taking_off_and_importing_at_once_one_fails() {
        let (_folder, _, usage) = open();
        let me = usage.claim().unwrap();
        let wins = [const { AtomicU64::new(0) }; 2];
        for round in 0..2000_u64 {
            let exported = usage.export(me, 1, 512).unwrap();
            usage.set_key(exported, Key::Handle(round));
            // The maker has ended, one looks for what it left, another has its handle.
            std::thread::scope(|scope| {
                let kept = scope.spawn(|| usage.kept_exports(None, me.slot(), 1));
                let imported = usage.import(me, Key::Handle(round)).is_some();
                let kept = kept.join().unwrap();
                // Who has it in the end pays for it; a piece that was seen as kept may still have to be looked at again.
                assert!(!imported || kept > 0, "round {round}");
                wins[usize::from(imported)].fetch_add(1, SeqCst);
            });
            usage.forget_exports(me.slot());
        }
        println!("taken off first {wins:?}");
    }

    #[test]
    fn marks_tell_containers_and_gpus() {
        let ((_one, _, one), (_two, _, two)) = (open(), open());
        let marks = [one.new_mark(15), one.new_mark(15), one.new_mark(0)];
        assert_eq!(marks.map(|mark| one.gpu_of_mark(mark)), [Some(15), Some(15), Some(0)]);
        assert_ne!(marks[0], marks[1]);
        assert!(marks.iter().all(|mark| *mark < 1 << 39));
        assert!(one.tag() == two.tag() || two.gpu_of_mark(marks[0]).is_none());
    }

    #[test]
    fn a_full_table_notes_no_more() {
        let (_folder, _, usage) = open();
        let me = usage.claim().unwrap();
        usage.take(me, 1, 1 << 20, CEILING).unwrap();
        assert!((0..MAX_EXPORTS).all(|_| usage.export(me, 1, 512).is_some()));
        assert_eq!(usage.export(me, 1, 512), None);
        usage.forget_exports(me.slot());
        assert!(usage.export(me, 1, 512).is_some());
    }
}
