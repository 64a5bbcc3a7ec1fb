//! A disk in memory that fails when told to, so that tests see everything a crash can leave.
//!
//! Reads see every write at once. A write is on disk after a sync of its file; a name that was made, moved or removed,
//! after a sync of its folder. Until then a power loss decides, from the seed:
//! - for each sector of 512 bytes, how many of its unsynced writes arrived, in order; what never arrived is zero;
//! - apart from that, which of the lengths that the file has had it keeps;
//! - for each name made, moved or removed, whether that arrived; a rename arrives whole.
//!
//! A failed sync of a file does the same to it, and from then on its sectors count as clean: reads see the new bytes,
//! later syncs pass over them, and a power loss uncovers the old ones, as on Linux. A failed sync of a folder leaves its
//! names to the next one, since file systems keep a journal of them.

mod trials;

pub use trials::{Trials, schedule};

use super::{Access, Disk, DiskPath, Found, Handle, Metadata};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const SECTOR: usize = 512;

/// What happens at an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// It fails in a way that it can: a write with nothing or a part written, a sync with anything on disk, all others
    /// with an error though it may have been done.
    Fail,
    /// There is no room left, for so many operations.
    Full(u64),
    /// The process ends; the operation may have been done. The disk goes on with [`Simulated::restart`].
    Kill,
    /// The power goes, with what was not synced. The disk goes on with [`Simulated::restart`].
    PowerLoss,
}

/// A disk in memory, empty but for its root `/`. Copies are the same disk; equal seeds and operations give equal bytes.
#[derive(Clone)]
pub struct Simulated(Arc<Mutex<State>>);

impl std::fmt::Debug for Simulated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Simulated({} operations)", self.operations())
    }
}

struct State {
    seed: u64,
    /// Handles and locks of processes that ended are of an earlier one.
    generation: u64,
    operations: u64,
    events: BTreeMap<u64, Event>,
    full_until: u64,
    stopped: Option<Event>,
    ignored: Option<OsString>,
    counts: BTreeMap<&'static str, u64>,
    files: Vec<Content>,
    /// Names as processes see them.
    names: BTreeMap<PathBuf, Node>,
    /// Names as they are on disk.
    durable: BTreeMap<PathBuf, Node>,
    /// What leads from one to the other.
    changes: Vec<Change>,
    locked: BTreeSet<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Node {
    Folder,
    File(usize),
}

struct Change {
    folder: PathBuf,
    names: Vec<(PathBuf, Option<Node>)>,
}

/// A file; its bytes as processes see them, as they are on disk, and the unsynced writes.
struct Content {
    bytes: Vec<u8>,
    durable: Vec<u8>,
    writes: Vec<(usize, Vec<u8>)>,
    mode: u32,
    ignores_sync: bool,
}

/// What becomes of an operation.
#[derive(Clone, Copy)]
enum Fate {
    Done,
    Failed,
    Full,
    Stopped,
}

impl Simulated {
    /// An empty disk on which nothing fails.
    pub fn new(seed: u64) -> Self {
        let root = BTreeMap::from([(PathBuf::from("/"), Node::Folder)]);
        Self(Arc::new(Mutex::new(State {
            seed,
            generation: 0,
            operations: 0,
            events: BTreeMap::new(),
            full_until: 0,
            stopped: None,
            ignored: None,
            counts: BTreeMap::new(),
            files: Vec::new(),
            names: root.clone(),
            durable: root,
            changes: Vec::new(),
            locked: BTreeSet::new(),
        })))
    }

    /// A path on this disk.
    pub fn at(&self, path: impl Into<PathBuf>) -> DiskPath {
        DiskPath::on(Arc::new(self.clone()), path)
    }

    /// Lets something happen at an operation, counted from zero over the life of the disk.
    pub fn schedule(&self, operation: u64, event: Event) {
        self.state().events.insert(operation, event);
    }

    /// Lets syncs of files that are made under this name do nothing, like a drive that lies.
    pub fn ignore_syncs_of(&self, name: impl Into<OsString>) {
        self.state().ignored = Some(name.into());
    }

    /// Operations so far.
    pub fn operations(&self) -> u64 {
        self.state().operations
    }

    /// How often each kind of event struck.
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.state().counts.clone()
    }

    /// Whether the process was killed or the power is gone.
    pub fn is_stopped(&self) -> bool {
        self.state().stopped.is_some()
    }

    /// Goes on with what a kill or a power loss has left. Without either before, the process is killed.
    pub fn restart(&self) {
        let mut state = self.state();
        if state.stopped.take() == Some(Event::PowerLoss) {
            state.lose();
        }
        state.generation += 1;
        state.locked.clear();
    }

    /// Cuts the power now.
    pub fn lose_power(&self) {
        self.state().stopped = Some(Event::PowerLoss);
        self.restart();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An operation that is done or not.
    fn operation<T>(
        &self,
        failure: &'static str,
        takes_room: bool,
        act: impl FnOnce(&mut State) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut state = self.state();
        match state.fate()? {
            Fate::Full if takes_room => Err(state.no_room()),
            Fate::Done | Fate::Full => act(&mut state),
            fate => {
                if state.random(2) == 0 {
                    act(&mut state)?;
                }
                Err(state.failure(fate, failure))
            }
        }
    }
}

impl State {
    /// A number below `bound`, the next of a splitmix64 sequence.
    fn random(&mut self, bound: usize) -> usize {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }

    fn count(&mut self, kind: &'static str) {
        *self.counts.entry(kind).or_default() += 1;
    }

    fn fate(&mut self) -> io::Result<Fate> {
        if self.stopped.is_some() {
            return Err(stopped());
        }
        let index = self.operations;
        self.operations += 1;
        match self.events.remove(&index) {
            Some(Event::Fail) => return Ok(Fate::Failed),
            Some(event @ (Event::Kill | Event::PowerLoss)) => {
                self.stopped = Some(event);
                self.count(if event == Event::Kill { "kill" } else { "power loss" });
                return Ok(Fate::Stopped);
            }
            Some(Event::Full(length)) => self.full_until = index + length,
            None => {}
        }
        Ok(if index < self.full_until { Fate::Full } else { Fate::Done })
    }

    fn failure(&mut self, fate: Fate, kind: &'static str) -> io::Error {
        match fate {
            Fate::Stopped => stopped(),
            _ => {
                self.count(kind);
                io::Error::other(format!("{kind}, as the schedule has it"))
            }
        }
    }

    fn no_room(&mut self) -> io::Error {
        self.count("full disk");
        ErrorKind::StorageFull.into()
    }

    fn file(&self, path: &Path) -> io::Result<usize> {
        match self.names.get(path) {
            Some(Node::File(file)) => Ok(*file),
            Some(Node::Folder) => Err(ErrorKind::IsADirectory.into()),
            None => Err(ErrorKind::NotFound.into()),
        }
    }

    fn change(&mut self, names: Vec<(PathBuf, Option<Node>)>) -> io::Result<()> {
        let folder = names[0].0.parent().ok_or(ErrorKind::InvalidInput)?.to_owned();
        if self.names.get(&folder) != Some(&Node::Folder) {
            return Err(ErrorKind::NotFound.into());
        }
        apply(&mut self.names, &names);
        self.changes.push(Change { folder, names });
        Ok(())
    }

    fn create(&mut self, path: &Path, access: Access) -> io::Result<usize> {
        if self.names.contains_key(path) {
            return Err(ErrorKind::AlreadyExists.into());
        }
        let file = self.files.len();
        self.change(vec![(path.to_owned(), Some(Node::File(file)))])?;
        let mode = if access == Access::Owner { 0o600 } else { 0o644 };
        let ignores_sync = self.ignored.as_deref().is_some_and(|name| path.file_name() == Some(name));
        let (bytes, durable, writes) = Default::default();
        self.files.push(Content { bytes, durable, writes, mode, ignores_sync });
        Ok(file)
    }

    /// How many of some unsynced changes arrive: all, none, or any number of them.
    fn luck(&mut self) -> fn(&mut Self, usize) -> usize {
        match self.random(4) {
            0 => |_, changes| changes,
            1 => |_, _| 0,
            _ => |state, changes| state.random(changes + 1),
        }
    }

    fn lose(&mut self) {
        let arriving = self.luck();
        for change in std::mem::take(&mut self.changes) {
            if arriving(self, 1) == 1 {
                apply(&mut self.durable, &change.names);
            }
        }
        for file in 0..self.files.len() {
            self.settle(file, arriving);
            self.files[file].bytes = self.files[file].durable.clone();
        }
        // What lay in a folder that is lost.
        let durable = &self.durable;
        let reached = |path: &PathBuf| path.ancestors().all(|part| durable.contains_key(part));
        self.names = durable.iter().filter(|(path, _)| reached(path)).map(|(p, n)| (p.clone(), *n)).collect();
        self.durable = self.names.clone();
    }

    /// Ends the unsynced writes of a file with what arrives of them.
    fn settle(&mut self, file: usize, arriving: fn(&mut Self, usize) -> usize) {
        let writes = std::mem::take(&mut self.files[file].writes);
        let mut durable = std::mem::take(&mut self.files[file].durable);
        let mut left: BTreeMap<usize, usize> = BTreeMap::new();
        let mut lengths = vec![durable.len()];
        for (start, bytes) in &writes {
            lengths.push((start + bytes.len()).max(lengths[lengths.len() - 1]));
            let (mut start, mut bytes) = (*start, bytes.as_slice());
            while !bytes.is_empty() {
                let (part, rest) = bytes.split_at((SECTOR - start % SECTOR).min(bytes.len()));
                let left = left.entry(start / SECTOR).or_insert_with(|| arriving(self, writes.len()));
                if *left > 0 {
                    *left -= 1;
                    overwrite(&mut durable, start, part);
                }
                (start, bytes) = (start + part.len(), rest);
            }
        }
        durable.resize(lengths[arriving(self, writes.len())], 0);
        self.files[file].durable = durable;
    }
}

impl Content {
    /// The sectors that were written go to disk as they are now; those of a failed sync were not.
    fn sync(&mut self) {
        for (start, bytes) in std::mem::take(&mut self.writes) {
            let end = (start + bytes.len()).next_multiple_of(SECTOR).min(self.bytes.len());
            let start = start - start % SECTOR;
            overwrite(&mut self.durable, start, &self.bytes[start..end]);
        }
        self.durable.resize(self.bytes.len(), 0);
    }
}

fn apply(names: &mut BTreeMap<PathBuf, Node>, change: &[(PathBuf, Option<Node>)]) {
    for (path, node) in change {
        match node {
            Some(node) => names.insert(path.clone(), *node),
            None => names.remove(path),
        };
    }
}

fn overwrite(bytes: &mut Vec<u8>, start: usize, part: &[u8]) {
    let end = start + part.len();
    bytes.resize(bytes.len().max(end), 0);
    bytes[start..end].copy_from_slice(part);
}

fn stopped() -> io::Error {
    io::Error::other("the process is gone")
}

impl Disk for Simulated {
    fn create_new(&self, path: &Path, access: Access) -> io::Result<Box<dyn Handle>> {
        let (file, generation) = self
            .operation("create error", true, |state| Ok((state.create(path, access)?, state.generation)))?;
        Ok(Box::new(Open { disk: self.clone(), file, generation, position: 0, lock: None }))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Handle>> {
        let (file, generation) =
            self.operation("open error", false, |state| Ok((state.file(path)?, state.generation)))?;
        Ok(Box::new(Open { disk: self.clone(), file, generation, position: 0, lock: None }))
    }

    fn find(&self, path: &Path) -> io::Result<Found> {
        self.operation("find error", false, |state| {
            Ok(match state.names.get(path) {
                None => Found::Nothing,
                Some(Node::Folder) => Found::Other,
                Some(Node::File(_)) => Found::File(path.to_owned()),
            })
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.operation("rename error", false, |state| {
            let file = state.file(from)?;
            if from.parent() != to.parent() {
                return Err(ErrorKind::CrossesDevices.into());
            }
            state.change(vec![(from.to_owned(), None), (to.to_owned(), Some(Node::File(file)))])
        })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.operation("remove error", false, |state| {
            state.file(path)?;
            state.change(vec![(path.to_owned(), None)])
        })
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<OsString>> {
        self.operation("list error", false, |state| {
            if state.names.get(folder) != Some(&Node::Folder) {
                return Err(ErrorKind::NotFound.into());
            }
            let below = state.names.keys().filter(|path| path.parent() == Some(folder));
            Ok(below.filter_map(|path| path.file_name().map(OsString::from)).collect())
        })
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.operation("create error", true, |state| match state.names.contains_key(path) {
            true => Err(ErrorKind::AlreadyExists.into()),
            false => state.change(vec![(path.to_owned(), Some(Node::Folder))]),
        })
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        match state.fate()? {
            fate @ (Fate::Failed | Fate::Stopped) => Err(state.failure(fate, "folder sync error")),
            Fate::Done | Fate::Full => {
                let changes = std::mem::take(&mut state.changes);
                let (synced, rest) = changes.into_iter().partition(|change| change.folder == path);
                state.changes = rest;
                let synced: Vec<Change> = synced;
                synced.iter().for_each(|change| apply(&mut state.durable, &change.names));
                Ok(())
            }
        }
    }

    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn Any + Send + Sync>>> {
        let mut state = self.state();
        let file = match (state.fate()?, state.file(path)) {
            (fate @ (Fate::Failed | Fate::Stopped), _) => return Err(state.failure(fate, "lock error")),
            (Fate::Full, Err(_)) => return Err(state.no_room()),
            (Fate::Done, Err(cause)) if cause.kind() == ErrorKind::NotFound => {
                state.create(path, Access::Owner)?
            }
            (_, file) => file?,
        };
        let (free, generation) = (state.locked.insert(file), state.generation);
        drop(state);
        Ok(free
            .then(|| Box::new(Held { disk: self.clone(), file, generation }) as Box<dyn Any + Send + Sync>))
    }
}

struct Held {
    disk: Simulated,
    file: usize,
    generation: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut state = self.disk.state();
        if state.generation == self.generation {
            state.locked.remove(&self.file);
        }
    }
}

struct Open {
    disk: Simulated,
    file: usize,
    generation: u64,
    position: usize,
    lock: Option<Held>,
}

impl Open {
    fn state(&self) -> io::Result<MutexGuard<'_, State>> {
        let state = self.disk.state();
        if state.generation == self.generation { Ok(state) } else { Err(stopped()) }
    }
}

impl Read for Open {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut state = self.state()?;
        if let fate @ (Fate::Failed | Fate::Stopped) = state.fate()? {
            return Err(state.failure(fate, "read error"));
        }
        let read = state.files[self.file].bytes.get(self.position..).unwrap_or(&[]).read(bytes)?;
        drop(state);
        self.position += read;
        Ok(read)
    }
}

impl Write for Open {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.state()?;
        let fate = state.fate()?;
        let length = match fate {
            Fate::Done => bytes.len(),
            Fate::Stopped => [0, bytes.len()][state.random(2)],
            Fate::Failed | Fate::Full => state.random(bytes.len().max(1)) * state.random(2),
        };
        let written = &bytes[..length];
        if length > 0 {
            let position = self.position;
            let content = &mut state.files[self.file];
            overwrite(&mut content.bytes, position, written);
            content.writes.push((position, written.to_vec()));
        }
        let answer = match fate {
            Fate::Stopped => Err(stopped()),
            Fate::Done => Ok(length),
            _ if length > 0 => {
                state.count("short write");
                Ok(length)
            }
            Fate::Full => Err(state.no_room()),
            Fate::Failed => Err(state.failure(fate, "write error")),
        };
        drop(state);
        self.position += length;
        answer
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Handle for Open {
    fn sync(&self) -> io::Result<()> {
        let mut state = self.state()?;
        match state.fate()? {
            Fate::Stopped => Err(stopped()),
            fate @ Fate::Failed => {
                let arriving = state.luck();
                state.settle(self.file, arriving);
                Err(state.failure(fate, "sync error"))
            }
            Fate::Done | Fate::Full => {
                let content = &mut state.files[self.file];
                if !content.ignores_sync {
                    content.sync();
                }
                Ok(())
            }
        }
    }

    fn metadata(&self) -> io::Result<Metadata> {
        let state = self.state()?;
        let content = &state.files[self.file];
        Ok(Metadata { length: content.bytes.len() as u64, regular: true, mode: Some(content.mode) })
    }

    fn try_lock(&mut self) -> io::Result<bool> {
        let mut state = self.state()?;
        if let fate @ (Fate::Failed | Fate::Stopped) = state.fate()? {
            return Err(state.failure(fate, "lock error"));
        }
        let free = state.locked.insert(self.file);
        drop(state);
        if free {
            self.lock = Some(Held { disk: self.disk.clone(), file: self.file, generation: self.generation });
        }
        Ok(free)
    }

    fn is_at(&self, path: &Path) -> io::Result<bool> {
        Ok(self.state()?.names.get(path) == Some(&Node::File(self.file)))
    }
}

#[cfg(test)]
mod tests;
