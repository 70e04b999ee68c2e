//! Which driver version a library belongs to. A real driver's libraries have it compiled in; here it is written into the file
//! when a driver root is laid out.

use anyhow::{Context, Result, ensure};

const LENGTH: usize = 64;
const MARK: &[u8] = b"sim-driver-version=";

/// In the library's file: the mark, the version, a slash, the CUDA version, a NUL.
#[used]
static STAMP: [u8; LENGTH] =
    *b"sim-driver-version=550.163.01/12040\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// The driver's version and its CUDA version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Such as `550.163.01`.
    pub driver: String,
    /// Such as 12040.
    pub cuda: i32,
}

impl Stamp {
    /// The stamp of the library that this code is in.
    pub fn own() -> Self {
        // SAFETY: an initialised static. Volatile, because the file may have been stamped after it was compiled.
        let bytes = unsafe { (&raw const STAMP).read_volatile() };
        Self::read(&bytes).unwrap_or(Self { driver: String::new(), cuda: 0 })
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let end = bytes.iter().position(|byte| *byte == 0)?;
        let text = std::str::from_utf8(bytes.get(MARK.len()..end)?).ok()?;
        let (driver, cuda) = text.split_once('/')?;
        Some(Self { driver: driver.into(), cuda: cuda.parse().ok()? })
    }

    /// Branch of the driver, such as 550.
    pub fn branch(&self) -> u32 {
        self.driver.split('.').next().and_then(|first| first.parse().ok()).unwrap_or(0)
    }

    /// Stamps a library's file.
    pub fn apply(&self, library: &mut [u8]) -> Result<()> {
        let text = format!("{}/{}\0", self.driver, self.cuda);
        ensure!(MARK.len() + text.len() <= LENGTH, "driver version {:?} is too long", self.driver);
        // The mark also stands for itself, in the code above; the stamp is the one with a version behind it.
        let found = library
            .windows(MARK.len() + 1)
            .position(|at| at.starts_with(MARK) && at[MARK.len()].is_ascii_digit());
        let at = found.context("no library of the simulated driver")? + MARK.len();
        let room = library.get_mut(at..at + LENGTH - MARK.len()).context("the file is cut off")?;
        room.fill(0);
        room[..text.len()].copy_from_slice(text.as_bytes());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_says_what_was_written_into_its_file() {
        assert_eq!(Stamp::own().branch(), 550);
        let mut file = [b"before sim-driver-version=\0" as &[u8], &STAMP, b"after"].concat();
        let stamp = Stamp { driver: "580.82.07".into(), cuda: 13_000 };
        stamp.apply(&mut file).unwrap();
        let at = file.windows(LENGTH).position(|at| at.starts_with(b"sim-driver-version=5")).unwrap();
        assert_eq!(Stamp::read(&file[at..at + LENGTH]), Some(stamp));
        assert!(file.ends_with(b"after"));
    }

    #[test]
    fn other_files_are_refused() {
        let stamp = Stamp { driver: "1".into(), cuda: 1 };
        assert!(stamp.apply(&mut [0; 200]).is_err());
        assert!(Stamp { driver: "5".repeat(50), cuda: 1 }.apply(&mut STAMP.to_vec()).is_err());
    }
}
