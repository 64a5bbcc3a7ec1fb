//! What a journal says, and its bytes.
//!
//! Format 3, little endian. Header: `"DPMFJRNL"`, version, the binding, the hash of the plan, zeros up to 240 bytes,
//! 16 bytes of HMAC-SHA-256. Record, 64 bytes, so that none straddles a disk sector: kind (1 released, 2 burned, 3 a sum of whole
//! numbers released, 4 a row handed over, 5 its step settled), step, 32 bytes of digest (zeros when burned or handed over; when
//! settled, the mark of the sum under a mask), 16 bytes of HMAC-SHA-256 over the tag before it and the record. Version 0.2 wrote
//! records of kinds 1 and 2 only.

use super::super::binding::Binding;
use super::super::digest::SumDigest;
use super::super::engine::Value;
use super::super::hmac::{Hmac, same};
use super::super::key::{RunId, StreamKey};
use super::super::stream::NoiseStream;
use crate::disk::{Fields, Layout};
use crate::error::{Error, Result};
use crate::tensors::hex;
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::path::Path;
use zeroize::Zeroizing;

const MAGIC: &[u8; 8] = b"DPMFJRNL";
const VERSION: u32 = 3;
pub(super) const HEADER: usize = 256;
pub(super) const RECORD: usize = 64;
pub(super) const TAG: usize = 16;

/// Values digested at a time by one thread.
pub(super) const LEAF: usize = 1 << 16;

/// What became of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// With a digest of its values.
    Released,
    Burned,
    /// With the digest of its sum that a device can compute.
    Summed,
    /// Its row has left, and it is not known what it is used with.
    Handed,
    /// Its row had left, and its sum has this mark.
    Settled,
}

/// 128 bits that stand for a sum.
pub type Mark = [u8; 16];

impl Kind {
    fn code(self) -> u64 {
        match self {
            Kind::Released => 1,
            Kind::Burned => 2,
            Kind::Summed => 3,
            Kind::Handed => 4,
            Kind::Settled => 5,
        }
    }
}

/// The records of a journal, each tagged together with all before it.
pub(super) struct Records {
    plan: [u8; 32],
    tag_key: Zeroizing<[u8; 32]>,
    digest_key: Zeroizing<[u8; 32]>,
    /// Tag of the last record, or of the header.
    last_tag: [u8; TAG],
    /// One a step, from the first; zeros for a step that was burned before it was ever released.
    digests: Vec<(Kind, [u8; 32])>,
    burned: BTreeSet<usize>,
}

/// What ends a run whose files are lost or damaged, in errors.
const END: &str =
    "This run cannot be resumed, but what it released stays private. Begin a new run with a new key";

impl Records {
    /// None yet.
    pub(super) fn new(key: &StreamKey, plan: [u8; 32]) -> Self {
        Self {
            plan,
            tag_key: key.purpose("dpmf 1 journal tag", &[]),
            digest_key: key.purpose("dpmf 1 journal digest", &[]),
            last_tag: [0; TAG],
            digests: Vec::new(),
            burned: BTreeSet::new(),
        }
    }

    /// Number of steps on record.
    pub(super) fn steps(&self) -> usize {
        self.digests.len()
    }

    /// The digest that a step was journalled with, and what it is of.
    pub(super) fn known(&self, step: usize) -> Option<&(Kind, [u8; 32])> {
        self.digests.get(step)
    }

    pub(super) fn burned(&self) -> &BTreeSet<usize> {
        &self.burned
    }

    /// Whether the row of a step has left, and the step is neither settled nor burned.
    pub(super) fn is_handed(&self, step: usize) -> bool {
        self.known(step).is_some_and(|(kind, _)| *kind == Kind::Handed) && !self.burned.contains(&step)
    }

    /// A mark under the mask of a step, or back: a step has one mark, so that without the key it tells nothing.
    pub(super) fn mask(&self, step: usize, mark: Mark) -> Mark {
        let mut mac = Hmac::new(&self.digest_key);
        mac.update(b"mark");
        mac.update(&(step as u64).to_le_bytes());
        let mask = mac.finish();
        std::array::from_fn(|byte| mark[byte] ^ mask[byte])
    }

    /// The header of a stream's journal, which begins it.
    pub(super) fn begin(&mut self, stream: &NoiseStream) -> [u8; HEADER] {
        let header = self.header(stream);
        self.last_tag.copy_from_slice(&header[HEADER - TAG..]);
        header
    }

    /// Takes up all that a journal says, and returns how many of its bytes count: a torn last record does not, since it
    /// was not synced, so its row was never released.
    pub(super) fn read(&mut self, stream: &NoiseStream, bytes: &[u8], path: &Path) -> Result<usize> {
        let Some((header, records)) = bytes.split_at_checked(HEADER) else {
            let length = bytes.len();
            let reason = format!("its header has {HEADER} bytes, but the file has {length}");
            return Err(damaged(path, &reason));
        };
        self.read_header(stream, header, path)?;
        let (records, torn) = records.as_chunks();
        for (index, record) in records.iter().enumerate() {
            match self.read_record(record, stream.steps()) {
                Ok(()) => {}
                // A file may grow before its new bytes arrive: then they read as zeros.
                Err(_) if index + 1 == records.len() && torn.is_empty() && *record == [0; RECORD] => {
                    return Ok(HEADER + index * RECORD);
                }
                Err(reason) => return Err(damaged(path, &format!("its record {index} {reason}"))),
            }
        }
        Ok(HEADER + records.len() * RECORD)
    }

    fn header(&self, stream: &NoiseStream) -> [u8; HEADER] {
        let mut layout = Layout::new(MAGIC, VERSION);
        Binding::of(stream).write(&mut layout);
        layout.push(&self.plan);
        let mut header = [0; HEADER];
        header[..layout.0.len()].copy_from_slice(&layout.0);
        let tag = self.tag(&header[..HEADER - TAG]);
        header[HEADER - TAG..].copy_from_slice(&tag);
        header
    }

    fn read_header(&mut self, stream: &NoiseStream, header: &[u8], path: &Path) -> Result<()> {
        let found = open_header(header, path)?;
        let mut fields = Fields(found);
        Binding::of(stream).check(&Binding::read(&mut fields), path)?;
        let plan: [u8; 32] = fields.take();
        if plan != self.plan {
            let (expected, found) = (hex(&self.plan), hex(&plan));
            return Err(Error::Binding { path: path.into(), what: "plan", expected, found });
        }
        let expected = self.begin(stream);
        if same(&expected, header) { Ok(()) } else { Err(damaged(path, "its header does not match its tag")) }
    }

    fn read_record(&mut self, record: &[u8; RECORD], steps: usize) -> Result<(), String> {
        let (body, tag) = record.split_at(RECORD - TAG);
        if !same(&self.tag(body), tag) {
            return Err("does not match its tag".into());
        }
        let mut fields = Fields(body);
        let (code, number, digest) = (fields.number(), fields.number(), fields.take());
        let next = self.digests.len();
        let step = usize::try_from(number).ok().filter(|step| *step < steps);
        let (kind, step) = match (code, step) {
            (1, Some(step)) if step == next => (Kind::Released, step),
            (2, Some(step)) if step <= next => (Kind::Burned, step),
            (3, Some(step)) if step == next => (Kind::Summed, step),
            (4, Some(step)) if step == next => (Kind::Handed, step),
            (5, Some(step)) if self.is_handed(step) => (Kind::Settled, step),
            _ => return Err(format!("is of kind {code} for step {number}, where step {next} is due")),
        };
        self.push(kind, step, digest, record);
        Ok(())
    }

    /// The bytes of the next record.
    pub(super) fn encode(&self, kind: Kind, step: usize, digest: [u8; 32]) -> [u8; RECORD] {
        let mut layout = Layout(Vec::with_capacity(RECORD));
        layout.push_number(kind.code());
        layout.push_number(step as u64);
        layout.push(&digest);
        layout.push(&self.tag(&layout.0));
        Fields(&layout.0).take()
    }

    /// Takes up a record.
    pub(super) fn push(&mut self, kind: Kind, step: usize, digest: [u8; 32], record: &[u8; RECORD]) {
        self.last_tag.copy_from_slice(&record[RECORD - TAG..]);
        match kind {
            Kind::Settled => self.digests[step] = (kind, digest),
            _ if step == self.digests.len() => self.digests.push((kind, digest)),
            _ => {}
        }
        if kind == Kind::Burned {
            self.burned.insert(step);
        }
    }

    fn tag(&self, body: &[u8]) -> [u8; TAG] {
        let mut mac = Hmac::new(&self.tag_key);
        mac.update(&self.last_tag);
        mac.update(body);
        let mut tag = [0; TAG];
        tag.copy_from_slice(&mac.finish()[..TAG]);
        tag
    }

    /// HMAC of the HMACs of the parts of a row: it tells inputs apart and, without the key, nothing about
    /// them.
    pub(super) fn digest<V: Value>(&self, step: usize, values: &[V]) -> [u8; 32] {
        self.digest_as(step, values, |value| value)
    }

    /// The same of numbers that are converted first.
    pub(super) fn digest_as<T: Copy + Sync, V: Value>(
        &self,
        step: usize,
        values: &[T],
        convert: impl Fn(T) -> V + Sync,
    ) -> [u8; 32] {
        let begin = |place: u64| {
            let mut mac = Hmac::new(&self.digest_key);
            mac.update(&(step as u64).to_le_bytes());
            mac.update(&place.to_le_bytes());
            mac
        };
        let leaf = |(i, leaf): (usize, &[T])| {
            let mut mac = begin(i as u64);
            for part in leaf.chunks(256) {
                let mut bytes = [0; 2048];
                let used = &mut bytes[..V::BYTES * part.len()];
                used.chunks_exact_mut(V::BYTES).zip(part).for_each(|(to, x)| convert(*x).write(to));
                mac.update(used);
            }
            mac.finish()
        };
        let leaves: Vec<[u8; 32]> = values.par_chunks(LEAF).enumerate().map(leaf).collect();
        let mut mac = begin(u64::MAX);
        leaves.iter().for_each(|leaf| mac.update(leaf));
        mac.finish()
    }
}

impl Records {
    /// What is kept of the digest of a sum: without the key, it tells nothing about it.
    pub(super) fn seal(&self, step: usize, digest: SumDigest) -> [u8; 32] {
        let mut mac = Hmac::new(&self.digest_key);
        mac.update(b"sum");
        [step as u64, digest[0], digest[1]].iter().for_each(|word| mac.update(&word.to_le_bytes()));
        mac.finish()
    }
}

/// The run that a header names; not verified, for want of the key.
pub(super) fn run_of(header: &[u8], path: &Path) -> Result<RunId> {
    match header.len() < HEADER {
        true => Err(damaged(path, "it ends within its header")),
        false => Ok(Binding::read(&mut Fields(open_header(header, path)?)).run()),
    }
}

/// A header behind its magic word and version.
fn open_header<'a>(header: &'a [u8], path: &Path) -> Result<&'a [u8]> {
    let mut fields = Fields(header);
    if &fields.take() != MAGIC {
        return Err(damaged(path, "it is not the journal of a noise stream"));
    }
    let refused = |reason: &str| Err(Error::Format { path: path.into(), reason: reason.into() });
    match u32::from_le_bytes(fields.take()) {
        VERSION => Ok(fields.0),
        1 | 2 => refused(
            "it was written by version 0.1, or by a version without exact noise. This version cannot make that noise: finish the run with \
             the version that began it",
        ),
        _ => refused("it was written by a newer version of dpmf"),
    }
}

/// Refuses a journal: a row that it no longer shows could be released twice.
pub(super) fn damaged(path: &Path, what: &str) -> Error {
    let reason =
        format!("the journal is damaged: {what}. Without it, a row of noise could be released twice. {END}");
    Error::Format { path: path.into(), reason }
}

/// Refuses a stream whose journal is not there.
pub(super) fn gone(path: &Path) -> Error {
    let reason = format!("the journal is missing. Without it, a row of noise could be released twice. {END}");
    Error::Io { path: path.into(), source: std::io::Error::new(std::io::ErrorKind::NotFound, reason) }
}
