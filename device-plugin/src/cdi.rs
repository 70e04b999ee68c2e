//! The CDI spec that Allocate's answers refer to. One file serves all shares; it only changes with the driver.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use cdi_generator::{Finder, ensure_spec, spec_path};
use tracing::{info, warn};
use vcuda_config::Paths;

use crate::kubelet::EnsureCdi;

/// Makes sure that the spec is there and fits the driver that is there now.
pub(crate) fn ensure(paths: &Paths) -> Arc<EnsureCdi> {
    let paths = paths.clone();
    let looking = Mutex::new((Finder::new(&paths.driver_root), BTreeMap::new()));
    Arc::new(move || {
        let driver = {
            let mut looking = looking.lock().unwrap_or_else(PoisonError::into_inner);
            let (finder, told) = &mut *looking;
            let driver = finder.find()?;
            for (library, reason) in news(told, &driver.left_out) {
                warn!(library = %library.display(), reason, "left out of containers");
            }
            driver
        };
        if ensure_spec(&paths, &driver)? {
            info!(path = %spec_path(&paths).display(), driver = driver.version, "CDI spec written");
        }
        Ok(())
    })
}

/// What of `left_out` was not told before. It is asked for every few seconds, for as long as the node runs.
fn news<'a>(
    told: &mut BTreeMap<PathBuf, String>,
    left_out: &'a BTreeMap<PathBuf, String>,
) -> Vec<(&'a Path, &'a str)> {
    let news = left_out.iter().filter(|(library, reason)| told.get(*library) != Some(*reason));
    let news = news.map(|(library, reason)| (library.as_path(), reason.as_str())).collect();
    told.clone_from(left_out);
    news
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_left_out_is_told_of_once_for_each_reason() {
        let left_out =
            |reason: &str| BTreeMap::from([("/usr/lib/libnvidia-cfg.so.550.1".into(), reason.into())]);
        let mut told = BTreeMap::new();
        assert_eq!(news(&mut told, &left_out("is no library")).len(), 1);
        assert_eq!(news(&mut told, &left_out("is no library")), []);
        assert_eq!(news(&mut told, &left_out("does not exist")).len(), 1);
        assert_eq!(news(&mut told, &BTreeMap::new()), []);
        assert_eq!(news(&mut told, &left_out("does not exist")).len(), 1);
    }
}
