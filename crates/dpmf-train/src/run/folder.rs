//! The directory of a run: its files, who holds it, and what is said when one of them is lost.

use super::{Binding, Pace};
use crate::checkpoint::Checkpoints;
use crate::error::{Error, Result};
use dpmf::disk::{self, Access, DiskPath, Lock};
use dpmf::noise::{DurableStream, RunId};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::PathBuf;

pub(super) const MANIFEST: &str = "run.json";
pub(super) const KEY: &str = "key";
pub(super) const PLAN: &str = "plan.safetensors";
pub(super) const JOURNAL: &str = "journal";
pub(super) const CURVE: &str = "curve.json";
pub(super) const MODEL: &str = "model.safetensors";
pub(super) const OUTCOME: &str = "outcome.json";
const LOCK: &str = "lock";

/// What is written down when a run begins, beside its plan.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    schema: u32,
    pub(super) binding: Binding,
    pub(super) run: String,
    pub(super) key_file: Option<PathBuf>,
    pub(super) pace: Pace,
}

const SCHEMA: u32 = 3;

/// The one field that every version of a manifest has.
#[derive(Deserialize)]
struct Schema {
    schema: u32,
}

impl Manifest {
    pub(super) fn new(binding: Binding, run: RunId, key_file: Option<PathBuf>, pace: Pace) -> Self {
        Self { schema: SCHEMA, binding, run: run.to_string(), key_file, pace }
    }
}

/// The directory of a run, which no other process works in as long as it is held.
pub(super) struct Folder {
    place: DiskPath,
    _lock: Lock,
}

impl Folder {
    /// Holds a directory that exists, before anything in it is read or removed.
    pub(super) fn hold(place: &DiskPath) -> Result<Self> {
        Ok(Self { _lock: place.join(LOCK).lock()?, place: place.clone() })
    }

    /// Holds a directory for a run that is to begin in it; the directory is made if there is none.
    pub(super) fn create(place: &DiskPath) -> Result<Self> {
        place.create_folders()?;
        let folder = Self::hold(place)?;
        if folder.file(MANIFEST).exists()? {
            let message = "it holds a run already: resume it, or choose another directory".into();
            return Err(Error::Run { path: place.path().into(), message });
        }
        Ok(folder)
    }

    pub(super) fn place(&self) -> &DiskPath {
        &self.place
    }

    pub(super) fn file(&self, name: &str) -> DiskPath {
        self.place.join(name)
    }

    /// A file that every run has.
    pub(super) fn needed(&self, name: &str, what: &str) -> Result<DiskPath> {
        needed(self.file(name), what)
    }

    pub(super) fn manifest(&self) -> Result<Manifest> {
        let place = self.file(MANIFEST);
        let path = place.path().to_owned();
        if !place.exists()? {
            let message = "there is no run here that could be resumed".into();
            return Err(Error::Run { path, message });
        }
        let Schema { schema } = read_json(&place)?;
        if schema != SCHEMA {
            let message = format!(
                "its schema is {schema}, but this version of dpmf resumes runs of schema {SCHEMA}: finish it with \
                 the version that began it"
            );
            return Err(Error::Run { path, message });
        }
        read_json(&place)
    }

    /// Removes what a crash before the manifest left: nothing was released from it. A run writes its plan first, so files
    /// beside none are somebody else's and stay; so do those of a run whose manifest was lost after it began.
    pub(super) fn discard_unfinished(&self) -> Result<()> {
        let refused = |place: &DiskPath, message: &str| {
            Err(Error::Run { path: place.path().into(), message: message.into() })
        };
        let (key, journal) = (self.file(KEY), self.file(JOURNAL));
        if !self.file(PLAN).exists()? {
            for place in [&key, &journal] {
                if place.exists()? {
                    let message = "it does not belong to a run here, and a new run would overwrite it: choose another directory";
                    return refused(place, message);
                }
            }
        }
        let released = DurableStream::steps_of(&journal)? > Some(0)
            || Checkpoints::new(&self.place).newest()? > Some(0)
            || self.file(OUTCOME).exists()?;
        if released {
            let message = "it is missing, but the run that it belongs to is still here, and a new run could repeat its noise: \
                           restore it, or begin a new run in another directory with a new key";
            return refused(&self.file(MANIFEST), message);
        }
        key.remove()?;
        journal.remove()?;
        Ok(())
    }
}

/// A file without which a run cannot go on.
pub(super) fn needed(place: DiskPath, what: &str) -> Result<DiskPath> {
    if place.exists()? { Ok(place) } else { Err(Error::lost(place.path(), what)) }
}

pub(super) fn write_json(place: &DiskPath, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_vec_pretty(value)
        .map_err(|error| Error::Run { path: place.path().into(), message: error.to_string() })?;
    // Scores of held-out users, marks of data, paths of keys: nobody but the owner needs them.
    Ok(disk::replace(place, Access::Owner, |file| file.write_all(&text))?)
}

pub(super) fn read_json<T: for<'d> Deserialize<'d>>(place: &DiskPath) -> Result<T> {
    serde_json::from_slice(&place.read()?)
        .map_err(|error| Error::Run { path: place.path().into(), message: format!("it is damaged: {error}") })
}
