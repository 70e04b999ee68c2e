//! The only words of this library: the one line that says why CUDA is off, and what `VCUDA_LOG` asks for. Written
//! straight to stderr, without allocation.

use std::{
    fmt, io,
    sync::atomic::{AtomicU8, Ordering::Relaxed},
};

use crate::errno;

/// One line for stderr, written in one piece when dropped; what does not fit is cut.
pub(crate) struct Line {
    text: [u8; 512],
    length: usize,
}

impl Line {
    pub fn new() -> Self {
        Self { text: [0; 512], length: 0 }
    }
}

impl io::Write for Line {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let room = &mut self.text[self.length..];
        let fitting = text.len().min(room.len());
        room[..fitting].copy_from_slice(&text[..fitting]);
        self.length += fitting;
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.length == self.text.len() {
            self.text[self.length - 1] = b'\n';
        }
        let _kept = errno::Keep::new();
        // SAFETY: the buffer has that many bytes. A closed stderr is nobody's business.
        unsafe { libc::write(libc::STDERR_FILENO, self.text.as_ptr().cast(), self.length) };
    }
}

/// Writes a line if `VCUDA_LOG` is set and not empty.
pub(crate) fn line(text: fmt::Arguments<'_>) {
    const ON: u8 = 1;
    const OFF: u8 = 2;
    static ASKED: AtomicU8 = AtomicU8::new(0);
    let asked = match ASKED.load(Relaxed) {
        0 => {
            let asked =
                if std::env::var_os("VCUDA_LOG").is_some_and(|text| !text.is_empty()) { ON } else { OFF };
            ASKED.store(asked, Relaxed);
            asked
        }
        asked => asked,
    };
    if asked == ON {
        use io::Write as _;
        let _ = writeln!(Line::new(), "vcuda[{}]: {text}", std::process::id());
    }
}
