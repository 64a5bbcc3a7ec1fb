//! A stream that never releases one noise row with two inputs, not even across a crash.
//!
//! Before a noisy row leaves, its step and a keyed digest of the clipped input are appended to a journal and
//! synced to disk. After a crash a journalled step is released again only for the very same input.
//!
//! Nothing rests on bytes that were merely read: an earlier process may have failed to sync them. So a journal that is
//! opened is written anew, synced and put in place of the old one before the first release. It is begun in the same
//! way, so that one shorter than its header was never left by a crash.

mod records;

use super::digest::SumDigest;
use super::hmac::same;
use super::key::RunId;
use super::stream::NoiseStream;
use crate::disk::{Access, DiskPath, File, Lock};
use crate::engine::{Sum, Value};
use crate::error::{Error, Result};
pub use records::Mark;
use records::{HEADER, Kind, RECORD, Records, damaged};
use std::io::{ErrorKind, Read, Write};

/// A [`NoiseStream`] with a journal: what training that may crash should use.
///
/// Guarantee: over all processes that open the journal, every row is released with at most one input,
/// provided that the file system keeps what it has synced, that the journal is not exchanged for an older
/// copy, and that the key and run id are used with this journal alone.
///
/// Steps that were burned are passed over, here and after every restart. A lock on the journal itself keeps a second process
/// away, by whatever name it comes, and a file `*.lock` beside it whoever comes before there is a journal.
pub struct DurableStream {
    stream: NoiseStream,
    journal: Box<Journal>,
    /// After a failed append it is not known what is on disk.
    halted: bool,
}

impl DurableStream {
    /// Begins a journal for a stream at its first step. After a crash it is there as a whole or not at all.
    ///
    /// `plan` is a hash of everything else that decides what is released: it goes into the header, and the journal
    /// opens for no other.
    ///
    /// Errors: a stream that has moved; a journal that exists already ([`Error::Io`]); [`Error::Locked`].
    pub fn create(stream: NoiseStream, place: impl Into<DiskPath>, plan: [u8; 32]) -> Result<Self> {
        if stream.next_step() != 0 {
            let rule = "a journal starts at the first step; open the existing one";
            return Err(Error::argument("next step", stream.next_step(), rule));
        }
        let journal = Journal::create(&stream, place.into(), plan)?;
        Ok(Self { stream, journal: Box::new(journal), halted: false })
    }

    /// Opens the journal of a stream, new or restored from a checkpoint, after a stop or a crash.
    ///
    /// A torn last record is cut off: it was not synced, so its row was never released.
    ///
    /// Errors: [`Error::Binding`] for the journal of another stream or plan; [`Error::Locked`]; [`Error::Format`] for
    /// a damaged one, or one that lacks steps which the stream has passed; [`Error::Io`], also for one that is gone.
    pub fn open(stream: NoiseStream, place: impl Into<DiskPath>, plan: [u8; 32]) -> Result<Self> {
        let journal = Journal::open(&stream, place.into(), plan)?;
        Self::resume(stream, journal)
    }

    fn resume(stream: NoiseStream, journal: Journal) -> Result<Self> {
        let mut durable = Self { stream, journal: Box::new(journal), halted: false };
        // Nobody knows what these rows were used with.
        let records = &durable.journal.records;
        let lost: Vec<usize> = (0..records.steps()).filter(|step| records.is_handed(*step)).collect();
        for step in lost {
            durable.append(Kind::Burned, step, [0; 32])?;
        }
        durable.pass_burned()?;
        Ok(durable)
    }

    /// [`NoiseStream::ahead`] for the same stream.
    pub fn ahead(mut self, threads: usize) -> Self {
        self.stream = self.stream.ahead(threads);
        self
    }

    /// The run that a journal was begun for, so that a program which restarts need not keep its name elsewhere.
    ///
    /// The header is not verified, for want of the key; [`DurableStream::open`] does that.
    ///
    /// Errors: [`Error::Io`]; [`Error::Format`] for what is no journal, or a damaged one.
    pub fn run_of(place: impl Into<DiskPath>) -> Result<RunId> {
        let place = place.into();
        let mut header = Vec::with_capacity(HEADER);
        let read = place.open()?.take(HEADER as u64).read_to_end(&mut header);
        read.map_err(|source| Error::Io { path: place.path().into(), source })?;
        records::run_of(&header, place.path())
    }

    /// Number of records in a journal, by its length alone; nothing if there is none.
    ///
    /// Errors: those of [`DurableStream::run_of`].
    pub fn steps_of(place: impl Into<DiskPath>) -> Result<Option<usize>> {
        let place = place.into();
        if !place.exists()? {
            return Ok(None);
        }
        Self::run_of(&place)?;
        let length = usize::try_from(place.open()?.metadata()?.length).unwrap_or(usize::MAX);
        Ok(Some(length.saturating_sub(HEADER).div_ceil(RECORD)))
    }

    /// The stream.
    pub fn stream(&self) -> &NoiseStream {
        &self.stream
    }

    /// The step of the next release, zero-based.
    pub fn next_step(&self) -> usize {
        self.stream.next_step()
    }

    /// Number of steps in the journal: below it, only a repetition or a burn is possible.
    pub fn recorded_steps(&self) -> usize {
        self.journal.records.steps()
    }

    /// Steps that were burned, in order.
    pub fn burned(&self) -> impl Iterator<Item = usize> {
        self.journal.records.burned().iter().copied()
    }

    /// Journals the input, then adds the next row to it; returns the step, zero-based.
    ///
    /// Cost: that of [`NoiseStream::add_next`], a pass of SHA-256 over the input by all threads, and a disk
    /// sync.
    ///
    /// Errors, with nothing released and nothing moved: those of [`NoiseStream::add_next`];
    /// [`Error::StepReused`] when the step is journalled with another input; [`Error::Io`] when it cannot be
    /// journalled, after which the stream is [`Error::Halted`] and must be opened anew.
    pub fn release<V: Value>(&mut self, values: &mut [V]) -> Result<usize> {
        self.check_running()?;
        self.stream.check_next()?;
        self.stream.check_values(values)?;
        let step = self.stream.next_step();
        let digest = self.journal.records.digest(step, values);
        self.record(Kind::Released, step, digest)?;
        self.stream.advance(Some(values))?;
        self.pass_burned()?;
        Ok(step)
    }

    /// [`DurableStream::release`] for a sum of whole numbers of magnitude at most 2⁵³, in units of a power of two, which becomes
    /// zero; what is released is written elsewhere. The lengths were checked.
    pub(crate) fn release_sum(&mut self, sum: Sum<'_>, digest: SumDigest) -> Result<usize> {
        self.check_running()?;
        self.stream.check_next()?;
        let step = self.stream.next_step();
        // Version 0.2 kept a digest of the sum as f64.
        match self.begun_by_values() {
            true => {
                let (records, unit) = (&self.journal.records, sum.unit);
                let digest = records.digest_as(step, sum.whole, |whole| whole as f64 * unit);
                self.record(Kind::Released, step, digest)?;
            }
            false => self.record(Kind::Summed, step, self.journal.records.seal(step, digest))?,
        }
        self.stream.advance(Some(sum))?;
        self.pass_burned()?;
        Ok(step)
    }

    /// Journals a sum that a device releases, by its digest, and moves past its row; returns the step.
    ///
    /// Errors: those of [`DurableStream::release`].
    pub(crate) fn commit_sum(&mut self, digest: SumDigest) -> Result<usize> {
        self.check_running()?;
        self.stream.check_next()?;
        let step = self.stream.next_step();
        self.record(Kind::Summed, step, self.journal.records.seal(step, digest))?;
        self.stream.skip()?;
        self.pass_burned()?;
        Ok(step)
    }

    /// Puts on record that the coming row leaves before its sum is known, and moves past it. Returns the mark that its sum must have
    /// where it was settled before.
    ///
    /// Errors: those of [`DurableStream::release`]; [`Error::StepReused`] for a step that was released otherwise.
    pub(crate) fn hand_over(&mut self) -> Result<Option<Mark>> {
        self.check_running()?;
        self.stream.check_next()?;
        let step = self.stream.next_step();
        let mark = match self.journal.records.known(step) {
            None => {
                self.append(Kind::Handed, step, [0; 32])?;
                None
            }
            Some((Kind::Settled, masked)) => {
                let masked = std::array::from_fn(|byte| masked[byte]);
                Some(self.journal.records.mask(step, masked))
            }
            Some(_) => return Err(Error::StepReused { step }),
        };
        self.stream.skip()?;
        self.pass_burned()?;
        Ok(mark)
    }

    /// Puts the mark of a step on record whose row was handed over, or finds that it is there.
    ///
    /// Errors: [`Error::StepReused`] for a step that is on record with another mark, or otherwise; [`Error::Io`]; [`Error::Halted`].
    pub(crate) fn settle(&mut self, step: usize, mark: Mark) -> Result<()> {
        self.check_running()?;
        let mut digest = [0; 32];
        digest[..mark.len()].copy_from_slice(&self.journal.records.mask(step, mark));
        match self.journal.records.known(step) {
            Some((Kind::Settled, before)) if same(before, &digest) => Ok(()),
            Some((Kind::Handed, _)) if self.journal.records.is_handed(step) => {
                self.append(Kind::Settled, step, digest)
            }
            _ => Err(Error::StepReused { step }),
        }
    }

    /// Burns a step whose row was handed over.
    ///
    /// Errors: [`Error::Io`]; [`Error::Halted`]; a step that is not on record.
    pub(crate) fn give_up(&mut self, step: usize) -> Result<()> {
        self.check_running()?;
        if self.journal.records.known(step).is_none() {
            return Err(Error::argument("step", step, "its row was not handed over"));
        }
        self.append(Kind::Burned, step, [0; 32])
    }

    /// Whether the coming step is on record with a digest that only the whole sum gives, as version 0.2 left it.
    pub(crate) fn begun_by_values(&self) -> bool {
        let known = self.journal.records.known(self.stream.next_step());
        known.is_some_and(|(kind, _)| *kind == Kind::Released)
    }

    /// Puts a release on record, or finds that it is there.
    fn record(&mut self, kind: Kind, step: usize, digest: [u8; 32]) -> Result<()> {
        match self.journal.records.known(step) {
            Some((known, before)) if *known == kind && same(before, &digest) => Ok(()),
            Some(_) => Err(Error::StepReused { step }),
            None => self.append(kind, step, digest),
        }
    }

    /// Gives up the next step: its row is never used, and the stream goes on with the one after it.
    ///
    /// For a step that a crash left journalled and whose input cannot be given again. The mechanism then
    /// serves one step less; its guarantee is unchanged.
    ///
    /// Errors: [`Error::Exhausted`]; [`Error::Io`] and [`Error::Halted`] as for [`DurableStream::release`].
    pub fn burn(&mut self) -> Result<usize> {
        self.check_running()?;
        self.stream.check_next()?;
        let step = self.stream.next_step();
        self.append(Kind::Burned, step, [0; 32])?;
        self.pass_burned()?;
        Ok(step)
    }

    /// [`NoiseStream::checkpoint`].
    ///
    /// Errors: those of it.
    pub fn checkpoint(&self, place: impl Into<DiskPath>) -> Result<()> {
        self.stream.checkpoint(place)
    }

    fn pass_burned(&mut self) -> Result<()> {
        while self.journal.records.burned().contains(&self.stream.next_step()) {
            self.stream.skip()?;
        }
        Ok(())
    }

    fn append(&mut self, kind: Kind, step: usize, digest: [u8; 32]) -> Result<()> {
        self.halted = true;
        self.journal.append(kind, step, digest)?;
        self.halted = false;
        Ok(())
    }

    fn check_running(&self) -> Result<()> {
        if self.halted {
            let reason =
                "a record may or may not have reached the disk; open the journal again to find out".into();
            return Err(Error::Halted { reason });
        }
        Ok(())
    }
}

/// The file of the records.
struct Journal {
    records: Records,
    /// Positioned behind the last record, durable up to there, and locked.
    file: File,
    /// The file that it was read from, locked too: another name may still lead to it.
    _before: Option<File>,
    _lock: Lock,
}

impl Journal {
    fn create(stream: &NoiseStream, place: DiskPath, plan: [u8; 32]) -> Result<Self> {
        let _lock = place.lock_beside()?;
        if place.exists()? {
            return Err(Error::Io { path: place.path().into(), source: ErrorKind::AlreadyExists.into() });
        }
        let mut records = Records::new(stream.key(), plan);
        let header = records.begin(stream);
        let file = place.replace_locked(Access::Owner, |file| file.write_all(&header))?;
        Ok(Self { records, file, _before: None, _lock })
    }

    fn open(stream: &NoiseStream, place: DiskPath, plan: [u8; 32]) -> Result<Self> {
        let _lock = place.lock_beside()?;
        let mut before = place.open().map_err(|error| match error {
            Error::Io { source, .. } if source.kind() == ErrorKind::NotFound => records::gone(place.path()),
            other => other,
        })?;
        before.lock()?;
        if !before.is_at(&place)? {
            // Whoever put another file in its place holds that one, or has just let it go.
            return Err(Error::Locked { path: place.path().into() });
        }
        let mut bytes = Vec::new();
        let read = before.read_to_end(&mut bytes);
        read.map_err(|source| Error::Io { path: place.path().into(), source })?;
        let mut records = Records::new(stream.key(), plan);
        let whole = records.read(stream, &bytes, place.path())?;
        let (reached, recorded) = (stream.next_step(), records.steps());
        if reached > recorded {
            let reason = format!("it records {recorded} steps, but the stream has passed {reached}");
            return Err(damaged(place.path(), &reason));
        }
        let file = place.replace_locked(Access::Owner, |file| file.write_all(&bytes[..whole]))?;
        Ok(Self { records, file, _before: Some(before), _lock })
    }

    /// Appends a record and waits until it is on disk.
    fn append(&mut self, kind: Kind, step: usize, digest: [u8; 32]) -> Result<()> {
        let record = self.records.encode(kind, step, digest);
        self.file.append(&record)?;
        self.file.sync()?;
        self.records.push(kind, step, digest, &record);
        Ok(())
    }
}

#[cfg(test)]
mod fault_injection;
#[cfg(test)]
mod tests;
