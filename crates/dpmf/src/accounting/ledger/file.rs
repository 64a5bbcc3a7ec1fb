//! A ledger in a file.

use super::{Ledger, Release};
use crate::disk::{Access, DiskPath, Lock};
use crate::error::{Error, Result};
use std::io::Write;

/// A ledger on disk, held by one process at a time.
pub struct LedgerFile {
    place: DiskPath,
    ledger: Ledger,
    _lock: Lock,
}

impl LedgerFile {
    /// Begins a ledger in a new file.
    ///
    /// Errors: a file that exists; [`Error::Io`]; [`Error::Locked`].
    pub fn create(place: impl Into<DiskPath>, ledger: Ledger) -> Result<Self> {
        let place = place.into();
        let lock = place.lock_beside()?;
        if place.exists()? {
            let rule = "it already exists, and a ledger is never overwritten";
            return Err(Error::argument("ledger", place.path().display(), rule));
        }
        let file = Self { place, ledger, _lock: lock };
        file.save(&file.ledger)?;
        Ok(file)
    }

    /// Opens a ledger.
    ///
    /// Errors: [`Error::Io`]; [`Error::Locked`]; [`Error::Format`] for what is no whole ledger.
    pub fn open(place: impl Into<DiskPath>) -> Result<Self> {
        let place = place.into();
        let lock = place.lock_beside()?;
        Ok(Self { ledger: Self::read(&place)?, place, _lock: lock })
    }

    /// Reads a ledger without holding it.
    ///
    /// Errors: [`Error::Io`]; [`Error::Format`].
    pub fn read(place: impl Into<DiskPath>) -> Result<Ledger> {
        let place = place.into();
        serde_json::from_slice(&place.read()?).map_err(|error| Error::Format {
            path: place.path().into(),
            reason: format!("it is not a valid ledger: {error}"),
        })
    }

    /// The ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// [`Ledger::record`], on disk before it returns: call it before the first release.
    ///
    /// Errors: those of it, with nothing recorded; [`Error::Io`], after which the releases may or may not be in the
    /// file: nothing is released on their account, and recording them again counts them once.
    pub fn record(&mut self, releases: Vec<Release>) -> Result<()> {
        self.change(|ledger| ledger.record(releases))
    }

    /// [`Ledger::record_together`], on disk before it returns.
    ///
    /// Errors: those of [`LedgerFile::record`].
    pub fn record_together(&mut self, releases: Vec<Release>) -> Result<()> {
        self.change(|ledger| ledger.record_together(releases))
    }

    fn change(&mut self, change: impl FnOnce(&mut Ledger) -> Result<()>) -> Result<()> {
        let mut ledger = self.ledger.clone();
        change(&mut ledger)?;
        self.save(&ledger)?;
        self.ledger = ledger;
        Ok(())
    }

    fn save(&self, ledger: &Ledger) -> Result<()> {
        let text = serde_json::to_vec_pretty(ledger)
            .map_err(|error| Error::Format { path: self.place.path().into(), reason: error.to_string() })?;
        self.place.replace(Access::Everyone, |file| file.write_all(&text)).map(drop)
    }
}
