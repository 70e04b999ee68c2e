//! When an XID event keeps new shares off a GPU, and for how long. Pure; events and time come from outside. That a
//! GPU answers no more is not a matter of memory: the survey of the moment says so.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::{Duration, Instant},
};

use vcuda_config::GpuUuid;

/// For how long a GPU must answer without another XID until it takes new shares again.
pub const QUIET: Duration = Duration::from_secs(30);

/// What an XID means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noted {
    /// It is one to ignore.
    Ignored,
    /// The GPU is known to be in this trouble; a sick one can report the same a thousand times a second.
    Again,
    /// New shares must be kept off the GPU, or for another reason than before.
    New,
}

/// The XIDs of the recent past.
#[derive(Debug)]
pub struct XidBook {
    ignored: BTreeSet<u64>,
    quiet: Duration,
    /// Of each GPU, when each of its XIDs came last.
    last: HashMap<GpuUuid, BTreeMap<u64, Instant>>,
}

impl XidBook {
    /// A book that takes no note of the XIDs in `ignored`, and forgets the others after `quiet`.
    pub fn new(ignored: impl IntoIterator<Item = u64>, quiet: Duration) -> Self {
        Self { ignored: ignored.into_iter().collect(), quiet, last: HashMap::new() }
    }

    /// Notes an XID of a GPU.
    pub fn note(&mut self, gpu: GpuUuid, xid: u64, now: Instant) -> Noted {
        if self.ignored.contains(&xid) {
            return Noted::Ignored;
        }
        match self.last.entry(gpu).or_default().insert(xid, now) {
            Some(at) if now.duration_since(at) < self.quiet => Noted::Again,
            _ => Noted::New,
        }
    }

    /// Why the GPU should take no new shares, although it answers.
    pub fn trouble(&mut self, gpu: &GpuUuid, now: Instant) -> Option<String> {
        self.last.retain(|_, xids| {
            xids.retain(|_, at| now.duration_since(*at) < self.quiet);
            !xids.is_empty()
        });
        // In the order of their numbers: the same words as long as they are the same, however they alternate.
        self.last.get(gpu).map(|xids| {
            let xids: Vec<_> = xids.keys().map(u64::to_string).collect();
            format!(
                "it reported XID {}, see \"NVRM: Xid\" in the kernel log; it is back when it has answered without \
                 another one for {} s",
                xids.join(", "),
                self.quiet.as_secs()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use vcuda_config::GpuPolicy;

    use super::*;

    fn gpu(n: u8) -> GpuUuid {
        GpuUuid::from_bytes([n; 16])
    }

    #[test]
    fn an_xid_keeps_shares_off_its_gpu_until_it_has_been_quiet() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut book = XidBook::new(GpuPolicy::default().ignored_xids, QUIET);
        assert_eq!(book.note(gpu(1), 79, start), Noted::New);
        assert_eq!(book.note(gpu(1), 79, start), Noted::Again);
        assert!(book.trouble(&gpu(1), start).unwrap().contains("XID 79"));
        assert_eq!(book.trouble(&gpu(2), start), None);
        assert_eq!(book.note(gpu(1), 48, start + QUIET - second), Noted::New);
        assert!(book.trouble(&gpu(1), start + QUIET).unwrap().contains("XID 48"));
        assert_eq!(book.trouble(&gpu(1), start + QUIET + QUIET), None);
        assert_eq!(book.note(gpu(1), 48, start + QUIET + QUIET), Noted::New);
    }

    /// A sick GPU reports two of them in turn, a thousand times a second: each is worth one line.
    #[test]
    fn xids_that_alternate_are_told_once_each() {
        let start = Instant::now();
        let mut book = XidBook::new(GpuPolicy::default().ignored_xids, QUIET);
        assert_eq!((book.note(gpu(1), 119, start), book.note(gpu(1), 79, start)), (Noted::New, Noted::New));
        let told = book.trouble(&gpu(1), start);
        assert!(told.as_ref().unwrap().contains("XID 79, 119"), "{told:?}");
        for _ in 0..3 {
            assert_eq!(
                (book.note(gpu(1), 119, start), book.note(gpu(1), 79, start)),
                (Noted::Again, Noted::Again)
            );
            assert_eq!(book.trouble(&gpu(1), start), told);
        }
        assert_eq!(book.note(gpu(2), 79, start), Noted::New, "another GPU");
    }

    #[test]
    fn xids_of_applications_are_ignored() {
        let mut book = XidBook::new(GpuPolicy::default().ignored_xids, QUIET);
        let now = Instant::now();
        for xid in [13, 31, 43, 45, 68, 109] {
            assert_eq!(book.note(gpu(1), xid, now), Noted::Ignored);
        }
        assert_eq!(book.trouble(&gpu(1), now), None);
    }
}
