//! Writes that survive a crash.

use crate::error::{Error, Result};
use std::fs::File;
use std::path::Path;

/// Makes the entry of `path` in its directory durable.
pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    #[cfg(unix)]
    {
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let io = |source| Error::Io { path: parent.into(), source };
        File::open(parent).and_then(|directory| directory.sync_all()).map_err(io)?;
    }
    Ok(())
}
