//! The state of a stream on disk.
//!
//! Whoever reads a stream's state knows part of the noise to come and of the noise that was, so the state is
//! encrypted under a key derived from the stream's; a checkpoint may lie beside the model it belongs to. It
//! never holds the key.
//!
//! Format 3, little endian: `"DPMFCKPT"`, version, the binding, the next step; whether the row of that step is made and in the
//! file (8 bytes), SHA-256 of the ranges of coordinates; the state as `f32`, or `f64` in exact arithmetic, buffer after buffer,
//! then that row, AES-256 in counter mode; HMAC-SHA-256 of all before it. Where the row is in the file, the state is that after
//! it. Format 2 lacks the two fields: it is written for one range of coordinates and no row.

use super::binding::{BINDING, Binding};
use super::hmac::{Hmac, same};
use super::stream::NoiseStream;
use crate::disk::{Access, DiskPath, Fields, Layout};
use crate::error::{Error, Result};
use aes::cipher::{Array, BlockCipherEncrypt, KeyInit};
use aes::{Aes256, Block};
use sha2::{Digest, Sha256};
use std::io::{self, Read, Write};
use std::path::Path;

const MAGIC: &[u8; 8] = b"DPMFCKPT";
/// One range, and no row.
const PLAIN: u32 = 2;
const VERSION: u32 = 3;
/// As far as format 2 goes, and the two fields after it.
const SHORT: usize = 8 + 4 + BINDING + 8;
const HEADER: usize = SHORT + 8 + 32;
const TAG: usize = 32;

/// The place of a checkpoint that is not a file, in errors.
const MEMORY: &str = "<memory>";

/// Bytes handled at a time: whole cipher blocks.
const CHUNK: usize = 1 << 16;

impl NoiseStream {
    /// Writes the state to a file at once: after a crash the file is the old one or the new one, never a
    /// part.
    ///
    /// The state is encrypted under the stream's key, which is not in the file. A checkpoint alone does not
    /// keep a row from being released twice; a [`DurableStream`](super::DurableStream) does.
    ///
    /// Cost: one pass over the state, by one thread.
    ///
    /// Errors: [`Error::Io`]; [`Error::Halted`] after a torn step.
    pub fn checkpoint(&self, place: impl Into<DiskPath>) -> Result<()> {
        self.check_whole()?;
        let ahead = self.level()?;
        place.into().replace(Access::Owner, |file| self.write_checkpoint(ahead, file)).map(drop)
    }

    /// The bytes of [`NoiseStream::checkpoint`], for a program that keeps its state in one file of its own.
    ///
    /// Cost: one pass over the state, by one thread, and as much memory again.
    ///
    /// Errors: [`Error::Halted`] after a torn step; [`Error::Memory`].
    pub fn checkpoint_bytes(&self) -> Result<Vec<u8>> {
        self.check_whole()?;
        let ahead = self.level()?;
        let mut bytes = Vec::new();
        let length = (HEADER + TAG) as u64 + self.state_bytes(ahead);
        usize::try_from(length)
            .ok()
            .and_then(|length| bytes.try_reserve_exact(length).ok())
            .ok_or(Error::Memory { what: "a checkpoint", bytes: length.into() })?;
        self.write_checkpoint(ahead, &mut bytes)
            .map_err(|source| Error::Io { path: MEMORY.into(), source })?;
        Ok(bytes)
    }

    fn write_checkpoint(&self, ahead: bool, file: &mut impl Write) -> io::Result<()> {
        let header = header(self, ahead);
        let (mut cipher, mut tag) = keys(self, &header);
        tag.update(&header);
        file.write_all(&header)?;
        let mut chunk = Vec::with_capacity(CHUNK);
        let mut result = Ok(());
        let mut flush = |chunk: &mut Vec<u8>| {
            cipher.apply(chunk);
            tag.update(chunk);
            let written = file.write_all(chunk);
            chunk.clear();
            written
        };
        let visited = self.visit_state(ahead, |bytes| {
            let mut rest = bytes;
            while !rest.is_empty() {
                let (head, tail) = rest.split_at(rest.len().min(CHUNK - chunk.len()));
                chunk.extend_from_slice(head);
                rest = tail;
                if chunk.len() == CHUNK {
                    match result {
                        Ok(()) => result = flush(&mut chunk),
                        Err(_) => chunk.clear(),
                    }
                }
            }
        });
        visited.map_err(io::Error::other)?;
        result.and_then(|()| flush(&mut chunk))?;
        file.write_all(&tag.finish())
    }

    /// The stream as it was when a checkpoint was written.
    ///
    /// Errors: [`Error::Binding`] for the checkpoint of another key, mechanism, run, range or output;
    /// [`Error::Format`] for a damaged one; [`Error::Io`].
    pub fn restore(self, place: impl Into<DiskPath>) -> Result<Self> {
        let place = place.into();
        let file = place.open()?;
        let length = file.metadata()?.length;
        self.read_checkpoint(place.path(), file, length)
    }

    /// The stream as it was when [`NoiseStream::checkpoint_bytes`] was called.
    ///
    /// Errors: those of [`NoiseStream::restore`].
    pub fn restore_bytes(self, bytes: &[u8]) -> Result<Self> {
        self.read_checkpoint(Path::new(MEMORY), bytes, bytes.len() as u64)
    }

    fn read_checkpoint(mut self, path: &Path, mut file: impl Read, length: u64) -> Result<Self> {
        let io = |source| Error::Io { path: path.into(), source };
        let bad = |reason: &str| Error::Format { path: path.into(), reason: reason.into() };
        if length < (SHORT + TAG) as u64 {
            return Err(bad("it is too short for a checkpoint"));
        }
        let mut stored = vec![0; SHORT];
        file.read_exact(&mut stored).map_err(io)?;
        let mut fields = Fields(&stored);
        let (magic, version) = (fields.take(), u32::from_le_bytes(fields.take()));
        if &magic != MAGIC || !(PLAIN..=VERSION).contains(&version) {
            return Err(bad("it is not a checkpoint of this version"));
        }
        Binding::of(&self).check(&Binding::read(&mut fields), path)?;
        let step = usize::try_from(fields.number()).unwrap_or(usize::MAX);
        if step > self.steps() {
            return Err(bad("its step lies beyond the last one"));
        }
        let mut ahead = false;
        if version == VERSION {
            let mut more = [0; HEADER - SHORT];
            file.read_exact(&mut more).map_err(io)?;
            stored.extend(more);
            let mut fields = Fields(&more);
            ahead = match fields.number() {
                0 => false,
                1 if step < self.steps() => true,
                _ => return Err(bad("it has rows ahead of its step, which is not possible for this stream")),
            };
            if fields.take() != ranges(&self) {
                return Err(bad("it is for other ranges of coordinates"));
            }
        } else if !whole(&self) {
            return Err(bad("it is for one range of coordinates, but the stream has several"));
        }
        let (header, state) = (stored.len() as u64, self.state_bytes(ahead));
        let expected = header + TAG as u64 + state;
        if length != expected {
            return Err(bad(&format!("it has {length} bytes, but {expected} are needed: it is truncated")));
        }

        let (mut cipher, mut tag) = keys(&self, &stored);
        tag.update(&stored);
        let mut left = state;
        let mut chunk: Vec<u8> = Vec::with_capacity(CHUNK);
        let mut at = 0;
        let mut result = Ok(());
        let room = self.restore_state(step, ahead, |bytes| {
            let mut rest = bytes;
            while !rest.is_empty() && result.is_ok() {
                if at == chunk.len() {
                    chunk.resize(CHUNK.min(usize::try_from(left).unwrap_or(CHUNK)), 0);
                    result = file.read_exact(&mut chunk);
                    left -= chunk.len() as u64;
                    tag.update(&chunk);
                    cipher.apply(&mut chunk);
                    at = 0;
                }
                let count = rest.len().min(chunk.len() - at);
                let (head, tail) = std::mem::take(&mut rest).split_at_mut(count);
                head.copy_from_slice(&chunk[at..at + count]);
                (rest, at) = (tail, at + count);
            }
        });
        room?;
        let mut stored_tag = [0; TAG];
        result.and_then(|()| file.read_exact(&mut stored_tag)).map_err(io)?;
        if !same(&tag.finish(), &stored_tag) {
            return Err(bad("its tag does not match its content: it is damaged"));
        }
        Ok(self)
    }
}

fn header(stream: &NoiseStream, ahead: bool) -> Vec<u8> {
    let plain = !ahead && whole(stream);
    let mut layout = Layout::new(MAGIC, if plain { PLAIN } else { VERSION });
    Binding::of(stream).write(&mut layout);
    layout.push_number(stream.next_step() as u64);
    if !plain {
        layout.push_number(u64::from(ahead));
        layout.push(&ranges(stream));
    }
    layout.0
}

/// Whether the binding names all coordinates of a stream.
fn whole(stream: &NoiseStream) -> bool {
    stream.ranges().eq([stream.bound()])
}

/// Tells lists of ranges apart.
fn ranges(stream: &NoiseStream) -> [u8; 32] {
    let mut hash = Sha256::new();
    stream.ranges().for_each(|range| {
        hash.update(range.start.to_le_bytes());
        hash.update(range.end.to_le_bytes());
    });
    hash.finalize().into()
}

/// Cipher and tag of one state. The header names all that the state depends on, so one key meets one state
/// only.
fn keys(stream: &NoiseStream, header: &[u8]) -> (CounterMode, Hmac) {
    let cipher = Aes256::new((&*stream.key().purpose("dpmf 1 checkpoint cipher", &[header])).into());
    let tag = Hmac::new(&stream.key().purpose("dpmf 1 checkpoint tag", &[header]));
    (CounterMode { cipher, counter: 0 }, tag)
}

struct CounterMode {
    cipher: Aes256,
    counter: u128,
}

impl CounterMode {
    /// Encrypts or decrypts the next bytes; only the last call may be given a part of a block.
    fn apply(&mut self, bytes: &mut [u8]) {
        for part in bytes.chunks_mut(16 * 120) {
            let mut blocks: [Block; 120] =
                std::array::from_fn(|i| Array((self.counter + i as u128).to_le_bytes()));
            self.counter += part.len().div_ceil(16) as u128;
            self.cipher.encrypt_blocks(&mut blocks);
            part.iter_mut().zip(Array::slice_as_flattened(&blocks)).for_each(|(byte, key)| *byte ^= key);
        }
    }
}

#[cfg(test)]
mod tests;
