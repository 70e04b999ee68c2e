//! Who a process is, and whether it is on its way out, from `/proc`. No allocation.

use std::{ffi::CStr, io::Write};

use crate::mapping::open;

/// A process: its ID, told apart from earlier ones of the same ID by its start time, in its PID namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub pid: u32,
    /// Clock ticks since boot; 0 if `/proc` does not tell.
    pub start: u64,
    /// Inode of the namespace; 0 if `/proc` does not tell.
    pub pid_namespace: u64,
    /// Random bytes that the kernel gives a program when it starts (AT_RANDOM of getauxval(3)): another after exec.
    pub program: u64,
}

/// PF_EXITING of `include/linux/sched.h`, field 9 of `/proc/<pid>/stat`.
const PF_EXITING: u64 = 0x4;

struct Stat {
    state: u8,
    flags: u64,
    start: u64,
}

impl Identity {
    pub fn of_caller() -> Self {
        let pid = std::process::id();
        let start = stat(pid).map_or(0, |stat| stat.start);
        Self { pid, start, pid_namespace: own_namespace(), program: own_program() }
    }

    /// Whether this may be the caller, without asking `/proc`. Only wrong for a process of the same number in another
    /// PID namespace that forked from the same program.
    pub fn may_be_caller(self) -> bool {
        self.pid == std::process::id() && self.program == own_program()
    }

    /// Whether this process has begun to exit and the kernel is not done with it. A zombie is done: its files are
    /// closed. Unknown where it runs in a PID namespace that is not the caller's; then false.
    pub fn is_exiting(self) -> bool {
        self.pid_namespace != 0
            && self.pid_namespace == own_namespace()
            && stat(self.pid).is_some_and(|stat| {
                stat.start == self.start && stat.flags & PF_EXITING != 0 && !matches!(stat.state, b'Z' | b'X')
            })
    }
}

impl Identity {
    /// Whether this is another living process that has its files in common with the caller (`clone` with CLONE_FILES): to the
    /// kernel, record locks of the one are the other's. False where kcmp(2) is not to be had.
    pub fn shares_files(self) -> bool {
        /// Of `include/uapi/linux/kcmp.h`.
        const KCMP_FILES: libc::c_long = 2;
        let own = std::process::id();
        let there = self.pid != 0
            && self.pid != own
            && stat(self.pid).is_some_and(|stat| stat.start == self.start)
            && self.pid_namespace == own_namespace();
        // SAFETY: no memory is involved.
        there && unsafe { libc::syscall(libc::SYS_kcmp, own, self.pid, KCMP_FILES, 0_usize, 0_usize) } == 0
    }
}

fn own_program() -> u64 {
    // SAFETY: no memory is involved.
    let random = unsafe { libc::getauxval(libc::AT_RANDOM) } as *const u64;
    // SAFETY: null, or sixteen bytes that stay for as long as the program runs.
    if random.is_null() { 0 } else { unsafe { random.read_unaligned() } }
}

fn own_namespace() -> u64 {
    // SAFETY: plain old data, for which zero is a value.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the path ends in NUL and `stat` outlives the call.
    let failed = unsafe { libc::stat(c"/proc/self/ns/pid".as_ptr(), &raw mut stat) } != 0;
    if failed { 0 } else { stat.st_ino }
}

fn stat(pid: u32) -> Option<Stat> {
    let mut path = [0; 32];
    // What is not written stays NUL, and the longest ID leaves room.
    write!(&mut path[..31], "/proc/{pid}/stat").ok()?;
    let fd = open(CStr::from_bytes_until_nul(&path).ok()?, libc::O_RDONLY).ok()?;
    // All fields up to the 22nd; a name of 64 bytes and 20 numbers of 20 digits fit.
    let mut text = [0; 640];
    // SAFETY: the buffer has that many bytes.
    let length = unsafe { libc::read(fd, text.as_mut_ptr().cast(), text.len()) };
    // SAFETY: the descriptor is ours.
    unsafe { libc::close(fd) };
    parse(text.get(..usize::try_from(length).ok()?)?)
}

/// `pid (name) state ppid … flags(9) … starttime(22) …`; the name may hold anything, also spaces and brackets.
fn parse(text: &[u8]) -> Option<Stat> {
    let name_end = text.iter().rposition(|c| *c == b')')?;
    let mut fields = text.get(name_end + 2..)?.split(|c| *c == b' ');
    let state = *fields.next()?.first()?;
    let mut number = |skip| std::str::from_utf8(fields.nth(skip)?).ok()?.parse().ok();
    Some(Stat { state, flags: number(5)?, start: number(12)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_behind_any_process_name() {
        let text = b"12 (a) b (c 1 2) R 1 12 12 0 -1 4194308 9 0 0 0 0 0 0 0 20 0 1 0 777 8 9 0";
        let stat = parse(text).unwrap();
        assert_eq!((stat.state, stat.flags, stat.start), (b'R', 4_194_308, 777));
        assert!(parse(b"12 (a").is_none());
        assert!(parse(b"").is_none());
        assert!(parse(b"12 (a) R 1 2 3").is_none());
    }

    #[test]
    fn the_caller_is_itself_and_not_exiting() {
        let me = Identity::of_caller();
        assert_ne!((me.start, me.pid_namespace), (0, 0));
        assert_eq!(me, Identity::of_caller());
        assert!(!me.is_exiting());
    }
}
