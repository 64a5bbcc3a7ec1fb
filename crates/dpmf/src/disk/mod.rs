//! Files that survive a crash: all durable state passes through this layer.
//!
//! A [`DiskPath`] is a path on a [`Disk`]. Wherever one is asked for a plain path will do, and means the disk of this
//! machine; tests give a path on a [`Simulated`] one, which fails and loses power at any operation they choose.
//!
//! What holds after a crash or a power loss, if the disk keeps what it has synced:
//! - a file written by [`DiskPath::replace`] is the old one or the new one, never a part;
//! - bytes given to [`File::append`] and then synced are there; those not synced are there in part, as a whole or not
//!   at all, sector by sector;
//! - after a failed sync it is not known what is on disk, and no later sync of the same file settles it: Linux forgets
//!   that the pages were ever written. Only writing them anew does, as [`DiskPath::replace`] does.

mod layout;
mod real;
pub mod simulated;

pub(crate) use layout::{Fields, Layout};
pub use real::Real;
pub use simulated::Simulated;

use crate::error::{Error, Result};
use std::any::Any;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What durable state asks of a file system.
pub trait Disk: fmt::Debug + Send + Sync {
    /// A new file, to be read and written; an error if there is one.
    fn create_new(&self, path: &Path, access: Access) -> io::Result<Box<dyn Handle>>;
    /// A file, to be read.
    fn open(&self, path: &Path) -> io::Result<Box<dyn Handle>>;
    /// What a path leads to, links followed.
    fn find(&self, path: &Path) -> io::Result<Found>;
    /// Gives a file another name in its folder, in place of any file that has it.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// The names in a folder, in any order.
    fn list(&self, folder: &Path) -> io::Result<Vec<OsString>>;
    /// A new folder in one that exists.
    fn create_folder(&self, path: &Path) -> io::Result<()>;
    /// Waits until the names in a folder are on disk.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;
    /// Locks a file, made if there is none, for as long as the answer lives; nothing if it is locked already.
    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn Any + Send + Sync>>>;
}

/// An open file of a [`Disk`].
pub trait Handle: Read + Write + Send + Sync {
    /// Waits until what was written is on disk.
    fn sync(&self) -> io::Result<()>;
    /// What the file is.
    fn metadata(&self) -> io::Result<Metadata>;
    /// Locks the file itself, whatever its names, for as long as it is open; whether it was free.
    fn try_lock(&mut self) -> io::Result<bool>;
    /// Whether a path leads to this very file.
    fn is_at(&self, path: &Path) -> io::Result<bool>;
}

/// Who may read a file, where the system knows of owners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Its owner alone.
    Owner,
    /// Whoever the process lets read its files.
    Everyone,
}

/// What a path leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing.
    Nothing,
    /// A regular file, by its own path.
    File(PathBuf),
    /// A folder, a device, a link that leads nowhere or the like.
    Other,
}

/// What an open file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// Bytes in it.
    pub length: u64,
    /// No folder, device or the like.
    pub regular: bool,
    /// Permission bits, where the system knows of owners.
    pub mode: Option<u32>,
}

/// What is read of a device or a pipe, which may have no end.
const LONGEST_STREAM: u64 = 1 << 30;

/// A path on a disk. Its errors are [`Error::Io`] with the path.
#[derive(Clone, Debug)]
pub struct DiskPath {
    disk: Arc<dyn Disk>,
    path: PathBuf,
}

impl<P: AsRef<Path>> From<P> for DiskPath {
    fn from(path: P) -> Self {
        Self::on(Arc::new(Real), path.as_ref())
    }
}

impl From<&DiskPath> for DiskPath {
    fn from(place: &DiskPath) -> Self {
        place.clone()
    }
}

impl DiskPath {
    /// A path on a disk.
    pub fn on(disk: Arc<dyn Disk>, path: impl Into<PathBuf>) -> Self {
        Self { disk, path: path.into() }
    }

    /// Another path on the same disk.
    pub fn at(&self, path: impl Into<PathBuf>) -> Self {
        Self { disk: self.disk.clone(), path: path.into() }
    }

    /// A path below this one.
    pub fn join(&self, name: impl AsRef<Path>) -> Self {
        self.at(self.path.join(name))
    }

    /// The path beside this one whose name ends in `suffix` too.
    ///
    /// Errors: [`Error::InvalidArgument`] for a path without a name.
    pub fn beside(&self, suffix: &str) -> Result<Self> {
        let name = self.path.file_name();
        let name = name.ok_or_else(|| Error::argument("path", self.path.display(), "it must name a file"))?;
        let mut name = name.to_os_string();
        name.push(suffix);
        Ok(self.at(self.path.with_file_name(name)))
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn io(&self, source: io::Error) -> Error {
        Error::Io { path: self.path.clone(), source }
    }

    fn parent(&self) -> Self {
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        self.at(parent.unwrap_or(Path::new(".")))
    }

    /// Whether there is anything. A disk that does not answer is an error, never a no.
    pub fn exists(&self) -> Result<bool> {
        Ok(self.disk.find(&self.path).map_err(|cause| self.io(cause))? != Found::Nothing)
    }

    /// The place of the file itself, where links lead to it; of a file that is to be, its own.
    pub fn resolved(&self) -> Result<Self> {
        match self.disk.find(&self.path).map_err(|cause| self.io(cause))? {
            Found::File(path) => Ok(self.at(path)),
            _ => Ok(self.clone()),
        }
    }

    /// A new file; an error if there is one.
    pub fn create_new(&self, access: Access) -> Result<File> {
        let handle = self.disk.create_new(&self.path, access).map_err(|cause| self.io(cause))?;
        Ok(File { handle, place: self.clone() })
    }

    /// The file, to be read.
    pub fn open(&self) -> Result<File> {
        let handle = self.disk.open(&self.path).map_err(|cause| self.io(cause))?;
        Ok(File { handle, place: self.clone() })
    }

    /// All that the file holds.
    ///
    /// Errors: [`Error::Io`]; [`Error::Format`] for a device or a pipe that does not end.
    pub fn read(&self) -> Result<Vec<u8>> {
        let mut file = self.open()?;
        let most = if file.metadata()?.regular { u64::MAX } else { LONGEST_STREAM };
        let mut bytes = Vec::new();
        (&mut file).take(most).read_to_end(&mut bytes).map_err(|cause| self.io(cause))?;
        if bytes.len() as u64 == most {
            let reason = "it is not a regular file and does not end (a gigabyte was read)".into();
            return Err(Error::Format { path: self.path.clone(), reason });
        }
        Ok(bytes)
    }

    /// All that the file holds; nothing if there is none.
    pub fn read_if_any(&self) -> Result<Option<Vec<u8>>> {
        match self.read() {
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            read => read.map(Some),
        }
    }

    /// Replaces the file at once, and returns it open behind what was written: after a crash it is the old one, as long
    /// as this has not returned, or the new one, never a part.
    ///
    /// A link is followed; whatever else is no regular file (a device, a folder, a link that leads nowhere) is left alone.
    ///
    /// Errors: [`Error::Io`], with the old file in place, or the new one where only its name could not be made durable;
    /// [`Error::InvalidArgument`] for what is no regular file.
    pub fn replace(
        &self,
        access: Access,
        write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> Result<File> {
        self.put(access, false, write)
    }

    /// The same, with a lock on the new file that is held from before it has its name until it is closed.
    ///
    /// Errors: those of [`DiskPath::replace`]; [`Error::Locked`] where another process was faster.
    pub fn replace_locked(
        &self,
        access: Access,
        write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> Result<File> {
        let file = self.put(access, true, write)?;
        match file.is_at(self)? {
            true => Ok(file),
            false => Err(Error::Locked { path: self.path.clone() }),
        }
    }

    fn put(
        &self,
        access: Access,
        locked: bool,
        write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> Result<File> {
        let target = match self.disk.find(&self.path).map_err(|cause| self.io(cause))? {
            Found::Nothing => self.clone(),
            Found::File(path) => self.at(path),
            Found::Other => {
                return Err(Error::argument(
                    "path",
                    self.path.display(),
                    "only a regular file can be replaced",
                ));
            }
        };
        let partial = target.beside(".partial")?;
        // What a crash left of an earlier attempt.
        partial.remove()?;
        let written = partial.create_new(access).and_then(|mut file| {
            if locked {
                file.lock()?;
            }
            let mut writer = BufWriter::with_capacity(1 << 18, file);
            let whole = write(&mut writer).and_then(|()| writer.into_inner().map_err(|e| e.into_error()));
            let mut file = whole.map_err(|cause| self.io(cause))?;
            file.sync()?;
            self.disk.rename(&partial.path, &target.path).map_err(|cause| self.io(cause))?;
            file.place = target.clone();
            Ok(file)
        });
        if written.is_err() {
            // The error that counts is the first one.
            let _ = partial.remove();
        }
        let file = written?;
        target.sync_entry()?;
        Ok(file)
    }

    /// Removes the file; whether there was one.
    pub fn remove(&self) -> Result<bool> {
        match self.disk.remove(&self.path) {
            Ok(()) => Ok(true),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(cause) => Err(self.io(cause)),
        }
    }

    /// The names in the folder, in order.
    pub fn list(&self) -> Result<Vec<OsString>> {
        let mut names = self.disk.list(&self.path).map_err(|cause| self.io(cause))?;
        names.sort_unstable();
        Ok(names)
    }

    /// Makes the folder, and those above it, and waits until they are on disk.
    pub fn create_folders(&self) -> Result<()> {
        let mut folders: Vec<&Path> = self.path.ancestors().collect();
        folders.retain(|folder| folder.file_name().is_some_and(|name| name != OsStr::new(".")));
        for folder in folders.into_iter().rev().map(|folder| self.at(folder)) {
            let mut new = !folder.exists()?;
            if new {
                match self.disk.create_folder(&folder.path) {
                    Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => new = false,
                    made => made.map_err(|cause| folder.io(cause))?,
                }
            }
            // One that is there may be new all the same, of a process that was killed; but others' folders above ours may
            // not be ours to open.
            match folder.sync_entry() {
                Err(Error::Io { source, .. }) if !new && not_ours(&source) => {}
                synced => synced?,
            }
        }
        Ok(())
    }

    /// Waits until the name is on disk, or its removal.
    pub fn sync_entry(&self) -> Result<()> {
        self.parent().sync_names()
    }

    /// Waits until all names in the folder are on disk.
    pub fn sync_names(&self) -> Result<()> {
        self.disk.sync_folder(&self.path).map_err(|cause| self.io(cause))
    }

    /// Locks the file, made if there is none, against all other processes. It stays when the lock is gone: to remove it
    /// would let two processes hold a lock each.
    ///
    /// Errors: [`Error::Locked`].
    pub fn lock(&self) -> Result<Lock> {
        match self.disk.lock(&self.path).map_err(|cause| self.io(cause))? {
            Some(held) => Ok(Lock { _held: held }),
            None => Err(Error::Locked { path: self.path.clone() }),
        }
    }

    /// Locks a file `*.lock` beside this one, where links lead to it. This one may then be replaced: the lock of a file
    /// does not pass to its successor. It keeps out whoever comes by the same path; [`File::lock`] whoever comes by another.
    ///
    /// Errors: [`Error::Locked`], with the path of this one.
    pub fn lock_beside(&self) -> Result<Lock> {
        self.resolved()?.beside(".lock")?.lock().map_err(|error| match error {
            Error::Locked { .. } => Error::Locked { path: self.path.clone() },
            other => other,
        })
    }
}

fn not_ours(cause: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    matches!(cause.kind(), PermissionDenied | InvalidInput | Unsupported)
}

/// A lock, held until it is dropped.
pub struct Lock {
    _held: Box<dyn Any + Send + Sync>,
}

/// An open file.
pub struct File {
    place: DiskPath,
    handle: Box<dyn Handle>,
}

impl File {
    /// Writes at once or fails: a record that arrived in two parts could look damaged after a crash.
    ///
    /// Errors: [`Error::Io`], after which the file may hold a part.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        loop {
            let cause = match self.handle.write(bytes) {
                Ok(written) if written == bytes.len() => return Ok(()),
                Ok(written) => {
                    let reason = format!("only {written} of {} bytes were written", bytes.len());
                    io::Error::new(io::ErrorKind::WriteZero, reason)
                }
                // A signal came before anything was written.
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => continue,
                Err(cause) => cause,
            };
            return Err(self.place.io(cause));
        }
    }

    /// Waits until all that was written is on disk.
    ///
    /// Errors: [`Error::Io`], after which it is not known what is there; see [the module](self).
    pub fn sync(&self) -> Result<()> {
        self.handle.sync().map_err(|cause| self.place.io(cause))
    }

    /// Locks the file itself against whoever opens it, by whatever name, until this is dropped.
    ///
    /// Errors: [`Error::Locked`].
    pub fn lock(&mut self) -> Result<()> {
        match self.handle.try_lock().map_err(|cause| self.place.io(cause))? {
            true => Ok(()),
            false => Err(Error::Locked { path: self.place.path.clone() }),
        }
    }

    /// Whether a place leads to this very file, and not to one that has taken its name.
    pub fn is_at(&self, place: &DiskPath) -> Result<bool> {
        self.handle.is_at(&place.path).map_err(|cause| place.io(cause))
    }

    /// What the file is.
    pub fn metadata(&self) -> Result<Metadata> {
        self.handle.metadata().map_err(|cause| self.place.io(cause))
    }
}

impl Read for File {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.handle.read(bytes)
    }
}

impl Write for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.handle.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.handle.flush()
    }
}

/// [`DiskPath::replace`], for those who need the file no longer.
///
/// Errors: those of it.
pub fn replace(
    place: impl Into<DiskPath>,
    access: Access,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<()> {
    place.into().replace(access, write).map(drop)
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
        let nowhere = folder.path().join("nowhere");
        std::os::unix::fs::symlink(folder.path().join("nothing"), &nowhere).unwrap();
        for path in [Path::new("/dev/null"), folder.path(), &nowhere] {
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
        assert!(DiskPath::from(&path).create_new(Access::Owner).is_err());
    }
}
