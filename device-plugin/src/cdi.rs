//! The CDI spec that Allocate's answers refer to. One file serves all shares; it only changes with the driver.

use std::sync::Arc;

use cdi_generator::{Driver, ensure_spec, spec_path};
use tracing::info;
use vcuda_config::Paths;

use crate::kubelet::EnsureCdi;

/// Makes sure that the spec is there and fits the driver that is there now.
pub(crate) fn ensure(paths: &Paths) -> Arc<EnsureCdi> {
    let paths = paths.clone();
    Arc::new(move || {
        let driver = Driver::discover(&paths.driver_root)?;
        if ensure_spec(&paths, &driver)? {
            info!(path = %spec_path(&paths).display(), driver = driver.version, "CDI spec written");
        }
        Ok(())
    })
}
