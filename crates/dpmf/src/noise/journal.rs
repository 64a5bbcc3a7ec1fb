//! A stream that never releases one noise row with two inputs, not even across a crash.
//!
//! Before a noisy row leaves, its step and a keyed digest of the clipped input are appended to a journal and
//! synced to disk. After a crash a journalled step is released again only for the very same input.
//!
//! Format 2, little endian. Header: `"DPMFJRNL"`, version, the binding, the hash of the plan, zeros up to 240 bytes,
//! 16 bytes of HMAC-SHA-256. Record, 64 bytes, so that none straddles a disk sector: kind (1 released, 2 burned), step,
//! 32 bytes of digest (zeros when burned), 16 bytes of HMAC-SHA-256 over the tag before it and the record.

use super::binding::Binding;
use super::hmac::{Hmac, same};
use super::key::{RunId, StreamKey};
use super::stream::NoiseStream;
use crate::disk::{self, Fields, Layout};
use crate::error::{Error, Result};
use crate::tensors::hex;
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

const MAGIC: &[u8; 8] = b"DPMFJRNL";
const VERSION: u32 = 2;
const HEADER: usize = 256;
const RECORD: usize = 64;
const TAG: usize = 16;

const RELEASED: u64 = 1;
const BURNED: u64 = 2;

/// Values digested at a time by one thread.
const LEAF: usize = 1 << 16;

/// A [`NoiseStream`] with a journal: what training that may crash should use.
///
/// Guarantee: over all processes that open the journal, every row is released with at most one input,
/// provided that the file system keeps what it has synced, that the journal is not exchanged for an older
/// copy, and that the key and run id are used with this journal alone.
///
/// Steps that were burned are passed over, here and after every restart.
pub struct DurableStream {
    stream: NoiseStream,
    journal: Journal,
    /// After a failed append it is not known what is on disk.
    halted: bool,
}

impl DurableStream {
    /// Begins a journal for a stream at its first step.
    ///
    /// `plan` is a hash of everything else that decides what is released: it goes into the header, and the journal
    /// opens for no other.
    ///
    /// Errors: a stream that has moved; a journal that exists already ([`Error::Io`]).
    pub fn create(stream: NoiseStream, path: impl AsRef<Path>, plan: [u8; 32]) -> Result<Self> {
        if stream.next_step() != 0 {
            let rule = "a journal begins with the first step: open the one that was begun then";
            return Err(Error::argument("next step", stream.next_step(), rule));
        }
        let journal = Journal::create(&stream, path.as_ref(), plan)?;
        Ok(Self { stream, journal, halted: false })
    }

    /// Opens the journal of a stream, new or restored from a checkpoint, after a stop or a crash.
    ///
    /// A torn last record is cut off: it was not synced, so its row was never released.
    ///
    /// Errors: [`Error::Binding`] for the journal of another stream or plan; [`Error::Locked`]; [`Error::Format`] for
    /// a damaged one, or one that lacks steps which the stream has passed; [`Error::Io`].
    pub fn open(stream: NoiseStream, path: impl AsRef<Path>, plan: [u8; 32]) -> Result<Self> {
        let journal = Journal::open(&stream, path.as_ref(), plan)?;
        let (reached, recorded) = (stream.next_step(), journal.digests.len());
        if reached > recorded {
            let reason = format!(
                "it records {recorded} steps, but the stream has passed {reached}: records are missing, and \
                 without them a row could be released twice"
            );
            return Err(Error::Format { path: path.as_ref().into(), reason });
        }
        let mut durable = Self { stream, journal, halted: false };
        durable.pass_burned()?;
        Ok(durable)
    }

    /// The run that a journal was begun for, so that a program which restarts need not keep its name elsewhere.
    ///
    /// The header is not verified, for want of the key; [`DurableStream::open`] does that.
    ///
    /// Errors: [`Error::Io`]; [`Error::Format`] for what is no journal, or one whose creation a crash cut short
    /// (nothing was released then: delete it and begin anew).
    pub fn run_of(path: impl AsRef<Path>) -> Result<RunId> {
        let path = path.as_ref();
        let io = |source| Error::Io { path: path.into(), source };
        let bad = |reason: &str| Error::Format { path: path.into(), reason: reason.into() };
        let mut header = Vec::with_capacity(HEADER);
        File::open(path).map_err(io)?.take(HEADER as u64).read_to_end(&mut header).map_err(io)?;
        if header.len() < HEADER {
            return Err(bad(
                "it ends before its first step, so nothing was released: delete it and begin anew",
            ));
        }
        let mut fields = Fields(&header);
        if &fields.take() != MAGIC {
            return Err(bad(NO_JOURNAL));
        }
        check_version(fields.take()).map_err(bad)?;
        Ok(Binding::read(&mut fields).run())
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
        self.journal.digests.len()
    }

    /// Steps that were burned, in order.
    pub fn burned(&self) -> impl Iterator<Item = usize> {
        self.journal.burned.iter().copied()
    }

    /// Journals the input, then adds the next row to it; returns the step, zero-based.
    ///
    /// Cost: that of [`NoiseStream::add_next`], a pass of SHA-256 over the input by all threads, and a disk
    /// sync.
    ///
    /// Errors, with nothing released and nothing moved: those of [`NoiseStream::add_next`];
    /// [`Error::StepReused`] when the step is journalled with another input; [`Error::Io`] when it cannot be
    /// journalled, after which the stream is [`Error::Halted`] and must be opened anew.
    pub fn release(&mut self, values: &mut [f32]) -> Result<usize> {
        self.check_running()?;
        self.stream.check_next()?;
        self.stream.check_values(values)?;
        let step = self.stream.next_step();
        let digest = self.journal.digest(step, values);
        match self.journal.digests.get(step) {
            Some(known) if same(known, &digest) => {}
            Some(_) => return Err(Error::StepReused { step }),
            None => self.append(RELEASED, step, digest)?,
        }
        self.stream.advance(Some(values));
        self.pass_burned()?;
        Ok(step)
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
        self.append(BURNED, step, [0; 32])?;
        self.pass_burned()?;
        Ok(step)
    }

    /// [`NoiseStream::checkpoint`].
    ///
    /// Errors: those of it.
    pub fn checkpoint(&self, path: impl AsRef<Path>) -> Result<()> {
        self.stream.checkpoint(path)
    }

    fn pass_burned(&mut self) -> Result<()> {
        while self.journal.burned.contains(&self.stream.next_step()) {
            self.stream.skip()?;
        }
        Ok(())
    }

    fn append(&mut self, kind: u64, step: usize, digest: [u8; 32]) -> Result<()> {
        self.halted = true;
        self.journal.append(kind, step, digest)?;
        self.halted = false;
        Ok(())
    }

    fn check_running(&self) -> Result<()> {
        if self.halted {
            let reason = "a record may or may not have reached the disk; open the journal again".into();
            return Err(Error::Halted { reason });
        }
        Ok(())
    }
}

struct Journal {
    path: PathBuf,
    plan: [u8; 32],
    /// Positioned behind the last whole record; locked as long as it is open.
    file: File,
    tag_key: Zeroizing<[u8; 32]>,
    digest_key: Zeroizing<[u8; 32]>,
    /// Tag of the last record, or of the header.
    last_tag: [u8; TAG],
    /// One a step, from the first; zeros for a step that was burned before it was ever released.
    digests: Vec<[u8; 32]>,
    burned: BTreeSet<usize>,
}

impl Journal {
    fn new(key: &StreamKey, path: &Path, plan: [u8; 32], file: File) -> Self {
        Self {
            path: path.into(),
            plan,
            file,
            tag_key: key.purpose("dpmf 1 journal tag", &[]),
            digest_key: key.purpose("dpmf 1 journal digest", &[]),
            last_tag: [0; TAG],
            digests: Vec::new(),
            burned: BTreeSet::new(),
        }
    }

    fn create(stream: &NoiseStream, path: &Path, plan: [u8; 32]) -> Result<Self> {
        // Header and directory entry are on disk before the first step can be released.
        let file = disk::create_new(path).map_err(|source| Error::Io { path: path.into(), source })?;
        let mut journal = Self::new(stream.key(), path, plan, file);
        journal.lock()?;
        journal.begin(stream)?;
        disk::sync_directory(path)?;
        Ok(journal)
    }

    fn open(stream: &NoiseStream, path: &Path, plan: [u8; 32]) -> Result<Self> {
        let io = |source| Error::Io { path: path.into(), source };
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(io)?;
        let mut journal = Self::new(stream.key(), path, plan, file);
        journal.lock()?;
        let mut bytes = Vec::new();
        journal.file.read_to_end(&mut bytes).map_err(io)?;
        let Some((header, records)) = bytes.split_at_checked(HEADER) else {
            // A crash while it was created: nothing was released yet.
            journal.cut(0)?;
            journal.begin(stream)?;
            return Ok(journal);
        };
        journal.read_header(stream, header)?;
        let (records, torn) = records.as_chunks();
        let mut whole = records.len();
        for (index, record) in records.iter().enumerate() {
            match journal.read_record(record, stream.steps()) {
                Ok(()) => {}
                // A file may grow before its new bytes arrive: then they read as zeros.
                Err(_) if index + 1 == records.len() && torn.is_empty() && *record == [0; RECORD] => {
                    whole = index
                }
                Err(reason) => return Err(journal.damaged(format!("record {index} {reason}"))),
            }
        }
        if whole < records.len() || !torn.is_empty() {
            journal.cut((HEADER + whole * RECORD) as u64)?;
        }
        Ok(journal)
    }

    fn lock(&self) -> Result<()> {
        self.file.try_lock().map_err(|cause| match cause {
            TryLockError::WouldBlock => Error::Locked { path: self.path.clone() },
            TryLockError::Error(source) => self.io(source),
        })
    }

    fn header(&self, stream: &NoiseStream) -> [u8; HEADER] {
        let mut layout = Layout::new(MAGIC, VERSION);
        Binding::of(stream).write(&mut layout);
        layout.push(&self.plan);
        let mut header = [0; HEADER];
        header[..layout.0.len()].copy_from_slice(&layout.0);
        let tag = self.tag(&[0; TAG], &header[..HEADER - TAG]);
        header[HEADER - TAG..].copy_from_slice(&tag);
        header
    }

    /// Writes the header into an empty file.
    fn begin(&mut self, stream: &NoiseStream) -> Result<()> {
        let header = self.header(stream);
        self.last_tag.copy_from_slice(&header[HEADER - TAG..]);
        self.write(&header)
    }

    fn read_header(&mut self, stream: &NoiseStream, header: &[u8]) -> Result<()> {
        let mut fields = Fields(header);
        if &fields.take() != MAGIC {
            return Err(self.damaged(NO_JOURNAL.into()));
        }
        check_version(fields.take())
            .map_err(|reason| Error::Format { path: self.path.clone(), reason: reason.into() })?;
        Binding::of(stream).check(&Binding::read(&mut fields), &self.path)?;
        let plan: [u8; 32] = fields.take();
        if plan != self.plan {
            let (expected, found) = (hex(&self.plan), hex(&plan));
            return Err(Error::Binding { path: self.path.clone(), what: "plan", expected, found });
        }
        if !same(&self.header(stream), header) {
            return Err(self.damaged("its header does not match its tag".into()));
        }
        self.last_tag.copy_from_slice(&header[HEADER - TAG..]);
        Ok(())
    }

    fn read_record(&mut self, record: &[u8; RECORD], steps: usize) -> Result<(), String> {
        let (body, tag) = record.split_at(RECORD - TAG);
        if !same(&self.tag(&self.last_tag, body), tag) {
            return Err("does not match its tag".into());
        }
        let mut fields = Fields(body);
        let (kind, step, digest) = (fields.number(), fields.number(), fields.take());
        let next = self.digests.len();
        match (kind, usize::try_from(step)) {
            (RELEASED, Ok(step)) if step == next && step < steps => {}
            (BURNED, Ok(step)) if step <= next && step < steps => {}
            _ => return Err(format!("is of kind {kind} for step {step}, where step {next} is due")),
        }
        self.last_tag.copy_from_slice(tag);
        self.take(kind, step as usize, digest);
        Ok(())
    }

    fn take(&mut self, kind: u64, step: usize, digest: [u8; 32]) {
        if step == self.digests.len() {
            self.digests.push(digest);
        }
        if kind == BURNED {
            self.burned.insert(step);
        }
    }

    /// Appends a record and waits until it is on disk.
    fn append(&mut self, kind: u64, step: usize, digest: [u8; 32]) -> Result<()> {
        let mut layout = Layout(Vec::with_capacity(RECORD));
        layout.push_number(kind);
        layout.push_number(step as u64);
        layout.push(&digest);
        let tag = self.tag(&self.last_tag, &layout.0);
        layout.push(&tag);
        self.write(&layout.0)?;
        self.last_tag = tag;
        self.take(kind, step, digest);
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).and_then(|()| self.file.sync_data()).map_err(|source| self.io(source))
    }

    /// Cuts a torn end off.
    fn cut(&mut self, length: u64) -> Result<()> {
        let cut = self.file.set_len(length).and_then(|()| self.file.seek(SeekFrom::Start(length)));
        cut.and_then(|_| self.file.sync_all()).map_err(|source| self.io(source))
    }

    fn tag(&self, before: &[u8; TAG], body: &[u8]) -> [u8; TAG] {
        let mut mac = Hmac::new(&self.tag_key);
        mac.update(before);
        mac.update(body);
        let mut tag = [0; TAG];
        tag.copy_from_slice(&mac.finish()[..TAG]);
        tag
    }

    /// HMAC of the HMACs of the parts of a row: it tells inputs apart and, without the key, nothing about
    /// them.
    fn digest(&self, step: usize, values: &[f32]) -> [u8; 32] {
        let begin = |place: u64| {
            let mut mac = Hmac::new(&self.digest_key);
            mac.update(&(step as u64).to_le_bytes());
            mac.update(&place.to_le_bytes());
            mac
        };
        let leaf = |(i, leaf): (usize, &[f32])| {
            let mut mac = begin(i as u64);
            for part in leaf.chunks(256) {
                let mut bytes = [0; 1024];
                let used = &mut bytes[..4 * part.len()];
                used.chunks_exact_mut(4).zip(part).for_each(|(to, x)| to.copy_from_slice(&x.to_le_bytes()));
                mac.update(used);
            }
            mac.finish()
        };
        let leaves: Vec<[u8; 32]> = values.par_chunks(LEAF).enumerate().map(leaf).collect();
        let mut mac = begin(u64::MAX);
        leaves.iter().for_each(|leaf| mac.update(leaf));
        mac.finish()
    }

    fn io(&self, source: std::io::Error) -> Error {
        Error::Io { path: self.path.clone(), source }
    }

    fn damaged(&self, reason: String) -> Error {
        let reason =
            format!("{reason}; the journal is damaged, and without it a row could be released twice");
        Error::Format { path: self.path.clone(), reason }
    }
}

const NO_JOURNAL: &str = "it is no journal of a noise stream";

fn check_version(version: [u8; 4]) -> Result<(), &'static str> {
    match u32::from_le_bytes(version) {
        VERSION => Ok(()),
        1 => Err(
            "it is a journal of version 0.1, whose noise this version does not make: end that run with 0.1",
        ),
        _ => Err("it is a journal of a newer version"),
    }
}

#[cfg(test)]
mod tests;
