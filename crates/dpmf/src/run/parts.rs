//! A run whose coordinates lie in several places that ask for their noise one by one, as the shards of a model on several
//! devices do.
//!
//! A step is committed once for all of them, with a mark of everything that is released in it; then each part of the sum is
//! released by itself. What goes into the journal is the mark.

use super::{Noise, PrivateRun};
use crate::accounting::Arithmetic;
use crate::disk::Place;
use crate::error::{Error, Result};
use crate::mechanism::Mechanism;
use crate::noise::{DurableStream, NoiseKey, NoiseStream, Output, RunId};
use std::collections::BTreeSet;
use std::ops::Range;

/// Numbers in the mark of a step.
pub const MARKS: usize = 8;

/// The noise of each part, and the steps in which parts may be released.
#[derive(Default)]
pub(super) struct Parts {
    streams: Vec<NoiseStream>,
    committed: BTreeSet<usize>,
}

impl PrivateRun {
    /// A run in memory at its first step, over parts of a model of `dimension` that are released one by one.
    ///
    /// `process` tells the journals of several processes with one key and run apart, each of which holds other parts.
    ///
    /// Errors: no parts; those of [`PrivateRun::new`].
    pub fn in_parts(
        mechanism: &Mechanism,
        key: &NoiseKey,
        run: RunId,
        parts: &[Range<u64>],
        dimension: u64,
        arithmetic: Arithmetic,
        process: u64,
    ) -> Result<Self> {
        if parts.is_empty() {
            return Err(Error::argument("coordinates", "none", "a run needs at least one part"));
        }
        let stream = |coordinates| mechanism.stream(key, run, coordinates, Output::Gradient, arithmetic);
        // Beyond the model, so that no noise of it is used for marks.
        let begin = process
            .checked_mul(MARKS as u64)
            .and_then(|offset| dimension.checked_add(offset))
            .ok_or_else(|| Error::argument("process", process, "it must be below the number of processes"))?;
        let marks = Noise::Stream(stream(begin..begin + MARKS as u64)?);
        let mut made = Self::assemble(mechanism, marks, dimension)?;
        made.parts.streams = parts.iter().cloned().map(stream).collect::<Result<_>>()?;
        Ok(made)
    }

    /// The same run as its journal left it, from a step on; rows before it are never shown.
    ///
    /// Errors: those of [`NoiseStream::skip_to`] and [`DurableStream::open`]; a run that has a journal.
    pub fn resumed_at(self, place: impl Into<Place>, plan: [u8; 32], step: usize) -> Result<Self> {
        self.journalled(plan, |mut stream, plan| {
            stream.skip_to(step)?;
            DurableStream::open(stream, place, plan)
        })
    }

    /// Commits the coming step for all parts, whose sums the mark stands for. Returns the step.
    ///
    /// Guarantee: if there is a journal, a step is committed again with the same mark only.
    ///
    /// Errors: those of [`PrivateRun::check_release`] and of [`DurableStream::release`]; a run that is not in parts.
    pub fn commit(&mut self, mark: &[f32; MARKS]) -> Result<usize> {
        if self.parts.streams.is_empty() {
            return Err(Error::argument(
                "mark",
                "one",
                "this run is not split into parts: release its whole sum",
            ));
        }
        self.check_release()?;
        let mut mark = *mark;
        let step = match &mut self.noise {
            Noise::Stream(stream) => stream.add_next(&mut mark),
            Noise::Durable(durable) => durable.release(&mut mark),
        }?;
        self.advance();
        let least = self.parts.streams.iter().map(NoiseStream::next_step).min().unwrap_or(0);
        self.parts.committed.retain(|committed| *committed >= least);
        self.parts.committed.insert(step);
        Ok(step)
    }

    /// Adds the noise of a committed step to one part of its sum, once: the noisy sum, not divided.
    ///
    /// Errors: [`Error::StepReused`] for a part that has had the step, or a step that was not committed; those of
    /// [`NoiseStream::add_next`]; a part that there is not.
    pub fn release_part(&mut self, part: usize, step: usize, values: &mut [f32]) -> Result<()> {
        let count = self.parts.streams.len();
        let stream = self.parts.streams.get_mut(part).ok_or_else(|| Error::WrongLength {
            name: "parts",
            actual: part.saturating_add(1),
            expected: count,
        })?;
        if !self.parts.committed.contains(&step) || stream.next_step() > step {
            return Err(Error::StepReused { step });
        }
        stream.skip_to(step)?;
        stream.add_next(values)?;
        Ok(())
    }

    /// The coordinates of each part; none for a run that is released as a whole.
    pub fn parts(&self) -> impl Iterator<Item = Range<u64>> {
        self.parts.streams.iter().map(NoiseStream::coordinates)
    }

    /// A secret of this run by which a device marks its sums, so that nobody can choose sums with equal marks.
    pub fn mark_salt(&self) -> [u32; 4] {
        let secret = self.stream().key().purpose("dpmf 1 mark salt", &[]);
        std::array::from_fn(|word| u32::from_le_bytes(std::array::from_fn(|byte| secret[4 * word + byte])))
    }
}
