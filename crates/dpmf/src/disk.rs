//! Writes that survive a crash, and fixed layouts of bytes.

use crate::error::{Error, Result};
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};

/// A new file that only its owner may read or write, where the system knows of owners.
pub fn create_new(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// Makes the entry of `path` in its directory durable.
pub fn sync_directory(path: &Path) -> Result<()> {
    #[cfg(unix)]
    {
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let io = |source| Error::Io { path: parent.into(), source };
        File::open(parent).and_then(|directory| directory.sync_all()).map_err(io)?;
    }
    Ok(())
}

/// Who may read a file, where the system knows of owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Its owner alone.
    Owner,
    /// Whoever the process lets read its files.
    Everyone,
}

/// Replaces a file at once: after a crash it holds either what it held before or all that `write` wrote.
///
/// A link is followed; whatever else is no regular file (a device, a directory) is left alone.
///
/// Errors: [`Error::Io`], with the file as it was before; [`Error::InvalidArgument`] for what is no regular file.
pub fn replace(
    path: &Path,
    access: Access,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<()> {
    let io = |source| Error::Io { path: path.into(), source };
    let target = match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => std::fs::canonicalize(path).map_err(io)?,
        Ok(_) => {
            return Err(Error::argument("path", path.display(), "only a regular file is replaced"));
        }
        Err(_) => path.to_owned(),
    };
    let partial = partial_path(&target)?;
    // What a crash left of an earlier attempt.
    match std::fs::remove_file(&partial) {
        Err(cause) if cause.kind() != io::ErrorKind::NotFound => return Err(io(cause)),
        _ => {}
    }
    let create = match access {
        Access::Owner => create_new,
        Access::Everyone => |path: &Path| OpenOptions::new().write(true).create_new(true).open(path),
    };
    let written = create(&partial).and_then(|file| {
        let mut writer = BufWriter::with_capacity(1 << 18, file);
        write(&mut writer)?;
        writer.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        std::fs::rename(&partial, &target)
    });
    if let Err(source) = written {
        // The error that counts is the first one.
        let _ = std::fs::remove_file(&partial);
        return Err(io(source));
    }
    sync_directory(&target)
}

fn partial_path(path: &Path) -> Result<PathBuf> {
    let name =
        path.file_name().ok_or_else(|| Error::argument("path", path.display(), "it must name a file"))?;
    let mut partial = name.to_os_string();
    partial.push(".partial");
    Ok(path.with_file_name(partial))
}

/// Appends fields to a layout of bytes.
pub(crate) struct Layout(pub(crate) Vec<u8>);

impl Layout {
    pub(crate) fn new(magic: &[u8; 8], version: u32) -> Self {
        let mut layout = Self(magic.to_vec());
        layout.push(&version.to_le_bytes());
        layout
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub(crate) fn push_number(&mut self, number: u64) {
        self.push(&number.to_le_bytes());
    }
}

/// Takes fields off a layout of bytes.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    /// The next `N` bytes; zeros once the layout is used up, which callers exclude by its length.
    pub(crate) fn take<const N: usize>(&mut self) -> [u8; N] {
        let (head, tail) = self.0.split_at(N.min(self.0.len()));
        self.0 = tail;
        let mut field = [0; N];
        field[..head.len()].copy_from_slice(head);
        field
    }

    pub(crate) fn number(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Write;

    #[test]
    fn a_replaced_file_is_the_old_or_the_new_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let names = || fs::read_dir(folder.path()).unwrap().count();
        replace(&path, Access::Owner, |file| file.write_all(b"old")).unwrap();
        assert_eq!((fs::read(&path).unwrap().as_slice(), names()), (&b"old"[..], 1));

        // A failure half-way changes nothing and leaves nothing.
        let failed = replace(&path, Access::Owner, |file| {
            file.write_all(b"ne")?;
            Err(io::Error::other("the disk is full"))
        });
        assert!(matches!(failed, Err(Error::Io { .. })));
        assert_eq!((fs::read(&path).unwrap().as_slice(), names()), (&b"old"[..], 1));

        // Remains of a crash are no obstacle.
        fs::write(folder.path().join("state.partial"), b"rubbish").unwrap();
        replace(&path, Access::Owner, |file| file.write_all(b"new")).unwrap();
        assert_eq!((fs::read(&path).unwrap().as_slice(), names()), (&b"new"[..], 1));
        assert!(matches!(
            replace(Path::new("/"), Access::Owner, |_| Ok(())),
            Err(Error::InvalidArgument { .. })
        ));
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_and_devices_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, b"old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        replace(&link, Access::Everyone, |file| file.write_all(b"new")).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"new");
        for path in [Path::new("/dev/null"), folder.path()] {
            let message = replace(path, Access::Everyone, |_| Ok(())).unwrap_err().to_string();
            assert!(message.contains("only a regular file"), "{message}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn new_files_are_open_to_their_owner_alone() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        replace(&path, Access::Owner, |_| Ok(())).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(create_new(&path).is_err());
    }
}
