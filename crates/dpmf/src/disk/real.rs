//! The disk of this machine.

use super::{Access, Disk, Found, Handle, Metadata};
use std::any::Any;
use std::ffi::OsString;
use std::fs::{self, OpenOptions, TryLockError};
use std::io;
use std::path::Path;

/// The disk of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Real;

fn restrict(options: &mut OpenOptions) {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    #[cfg(not(unix))]
    let _ = options;
}

impl Disk for Real {
    fn create_new(&self, path: &Path, access: Access) -> io::Result<Box<dyn Handle>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        if access == Access::Owner {
            restrict(&mut options);
        }
        Ok(Box::new(options.open(path)?))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Handle>> {
        Ok(Box::new(fs::File::open(path)?))
    }

    fn find(&self, path: &Path) -> io::Result<Found> {
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_file() => Ok(Found::File(fs::canonicalize(path)?)),
            Ok(_) => Ok(Found::Other),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
                Ok(if path.is_symlink() { Found::Other } else { Found::Nothing })
            }
            Err(cause) => Err(cause),
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<OsString>> {
        fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name())).collect()
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        // Elsewhere a directory is no file that could be synced.
        #[cfg(unix)]
        fs::File::open(path)?.sync_all()?;
        #[cfg(not(unix))]
        let _ = path;
        Ok(())
    }

    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn Any + Send + Sync>>> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false);
        restrict(&mut options);
        let mut file = options.open(path)?;
        Ok(Handle::try_lock(&mut file)?.then(|| Box::new(file) as Box<dyn Any + Send + Sync>))
    }
}

impl Handle for fs::File {
    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }

    fn metadata(&self) -> io::Result<Metadata> {
        let metadata = fs::File::metadata(self)?;
        #[cfg(unix)]
        let mode = Some(std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o7777);
        #[cfg(not(unix))]
        let mode = None;
        Ok(Metadata { length: metadata.len(), regular: metadata.is_file(), mode })
    }

    fn try_lock(&mut self) -> io::Result<bool> {
        match fs::File::try_lock(self) {
            Ok(()) => Ok(true),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(cause)) => Err(cause),
        }
    }

    fn is_at(&self, path: &Path) -> io::Result<bool> {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            let ours = fs::File::metadata(self)?;
            match fs::metadata(path) {
                Ok(there) => Ok((there.dev(), there.ino()) == (ours.dev(), ours.ino())),
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(false),
                Err(cause) => Err(cause),
            }
        }
        // Elsewhere a file that is open keeps its name.
        #[cfg(not(unix))]
        {
            let _ = path;
            Ok(true)
        }
    }
}
