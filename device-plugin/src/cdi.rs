//! The CDI spec that Allocate's answers refer to. One file serves all shares; it only changes with the driver.

use std::sync::{Arc, Mutex, PoisonError};

use cdi_generator::{Finder, ensure_spec, spec_path};
use tracing::info;
use vcuda_config::Paths;

use crate::kubelet::EnsureCdi;

/// Makes sure that the spec is there and fits the driver that is there now.
pub(crate) fn ensure(paths: &Paths) -> Arc<EnsureCdi> {
    let paths = paths.clone();
    let finder = Mutex::new(Finder::new(&paths.driver_root));
    Arc::new(move || {
        let driver = finder.lock().unwrap_or_else(PoisonError::into_inner).find()?;
        if ensure_spec(&paths, &driver)? {
            info!(path = %spec_path(&paths).display(), driver = driver.version, "CDI spec written");
        }
        Ok(())
    })
}
