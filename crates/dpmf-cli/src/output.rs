//! Files and folders that a command writes: looked at before work begins, and written whole or not at all.

use crate::interrupt::Unfinished;
use anyhow::{Context, bail};
use dpmf::disk::{self, Access, DiskPath, File};
use dpmf::{Mechanism, format};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Refuses a path that could not be written in the end. A link to a regular file is written through.
///
/// Errors: a folder that is not there or may not be written, and whatever is there but no regular file.
pub fn check(path: &Path) -> anyhow::Result<()> {
    let name = path.display();
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => {
            let writable = std::fs::OpenOptions::new().append(true).open(path);
            writable.with_context(|| format!("{name} cannot be written"))?;
            new_files(path)
        }
        Ok(_) => bail!("{name} is not a regular file, and only regular files are replaced"),
        Err(_) if path.is_symlink() => {
            bail!("{name} is a link to a missing file, and links are not replaced")
        }
        Err(_) => new_files(path),
    }
}

/// Whether the folder of a file takes new ones, as replacing needs.
fn new_files(path: &Path) -> anyhow::Result<()> {
    let name = path.display();
    let target = DiskPath::from(path).resolved()?;
    let folder = target.path().parent().filter(|parent| !parent.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    if !folder.is_dir() {
        bail!("{name} cannot be written: the folder {} does not exist", folder.display());
    }
    let partial = partial(target.path())?;
    let probe = || -> io::Result<()> {
        std::fs::OpenOptions::new().append(true).create(true).open(&partial)?;
        std::fs::remove_file(&partial)
    };
    probe().with_context(|| format!("{name} cannot be written"))
}

/// Where a file is written before it has its name.
fn partial(path: &Path) -> anyhow::Result<PathBuf> {
    Ok(DiskPath::from(path).beside(".partial")?.path().to_owned())
}

/// Refuses a folder that could not be made or written in the end; makes nothing.
pub fn check_folder(path: &Path) -> anyhow::Result<()> {
    let name = path.display();
    let absolute = std::path::absolute(path).with_context(|| format!("{name:?} is not a folder"))?;
    let there = absolute.ancestors().find(|folder| folder.exists() || folder.is_symlink());
    let Some(there) = there else { return Ok(()) };
    if !there.is_dir() {
        bail!("{name} cannot be created: {} is not a folder", there.display());
    }
    let probe = there.join(format!(".dpmf-{}", std::process::id()));
    let tried = std::fs::create_dir(&probe).and_then(|()| std::fs::remove_dir(&probe));
    tried.with_context(|| format!("{name} cannot be written"))
}

/// Writes a file whole or not at all, also if the program is interrupted meanwhile.
pub fn save(
    path: &Path,
    access: Access,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> anyhow::Result<()> {
    let _unfinished = Unfinished::new(&partial(DiskPath::from(path).resolved()?.path())?);
    Ok(disk::replace(path, access, write)?)
}

/// Writes a mechanism file.
pub fn save_mechanism(mechanism: &Mechanism, path: &Path) -> anyhow::Result<()> {
    let bytes = format::to_bytes(mechanism)?;
    save(path, Access::Everyone, |file| file.write_all(&bytes))
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
        #[cfg(unix)]
        assert!(refused(Path::new("/dev/null")).contains("not a regular file"));
        assert!(refused(&folder.path().join("none").join("new")).contains("does not exist"));
        assert!(check(Path::new("")).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[cfg(unix)]
    #[test]
    fn links_are_written_through_and_stay() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("file"), b"old").unwrap();
        symlink(at("file"), at("link")).unwrap();
        symlink(at("nothing"), at("dangling")).unwrap();
        symlink("/dev/null", at("device")).unwrap();
        check(&at("link")).unwrap();
        save(&at("link"), Access::Everyone, |file| file.write_all(b"new")).unwrap();
        assert!(at("link").is_symlink());
        assert_eq!(std::fs::read(at("file")).unwrap(), b"new");
        assert!(check(&at("dangling")).unwrap_err().to_string().contains("a link to a missing file"));
        assert!(check(&at("device")).unwrap_err().to_string().contains("not a regular file"));
    }

    #[test]
    fn folders_are_checked_and_not_made() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), b"").unwrap();
        check_folder(&folder.path().join("a").join("b")).unwrap();
        let refused = check_folder(&folder.path().join("file").join("b")).unwrap_err().to_string();
        assert!(refused.contains("is not a folder"), "{refused}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
