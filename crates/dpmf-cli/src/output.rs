//! Files that a command writes: looked at before work begins.

use anyhow::{Context, bail};
use std::path::Path;

/// Refuses a path that could not be written in the end.
///
/// Errors: a folder that is not there, and whatever is there but no regular file.
pub fn check(path: &Path) -> anyhow::Result<()> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => {
            let writable = std::fs::OpenOptions::new().append(true).open(path);
            writable.with_context(|| format!("{} cannot be written", path.display()))?;
        }
        Ok(_) => bail!("{} is not a regular file, and only such are replaced", path.display()),
        Err(_) => {
            let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            let folder = folder.unwrap_or(Path::new("."));
            if !folder.is_dir() {
                bail!("{} cannot be written: there is no folder {}", path.display(), folder.display());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_be_written() {
        let folder = tempfile::tempdir().unwrap();
        let refused = |path: &Path| check(path).unwrap_err().to_string();
        assert!(check(&folder.path().join("new")).is_ok() && check(Path::new("new")).is_ok());
        assert!(!folder.path().join("new").exists());
        std::fs::write(folder.path().join("old"), b"kept").unwrap();
        assert!(check(&folder.path().join("old")).is_ok());
        assert_eq!(std::fs::read(folder.path().join("old")).unwrap(), b"kept");
        assert!(refused(folder.path()).contains("not a regular file"));
        assert!(refused(Path::new("/dev/null")).contains("not a regular file"));
        assert!(refused(&folder.path().join("none").join("new")).contains("there is no folder"));
    }
}
