//! A run whose rows leave for devices before their sums are known: noise as data, like a batch.
//!
//! A row is handed over once, and it is on record before it leaves. The step that used it comes back with a mark of its sum,
//! which settles it. What was handed over and never settled is burned when the run goes on after a crash: nobody knows what it
//! was used with. A step that was settled is handed over again with the mark that its sum must have.

use super::{Noise, PrivateRun};
use crate::disk::DiskPath;
use crate::error::{Error, Result};
use crate::noise::{DurableStream, Mark, SplitRow};
use std::collections::{BTreeMap, BTreeSet};

/// Binary digits of the unit of sums that JAX keeps in single precision above [`Clip::unit`](crate::Clip::unit): `2⁻²⁴ζ < s ≤ 2⁻²³ζ`.
pub const SINGLE_DIGITS: i32 = 9;

/// The rows that have left.
#[derive(Default)]
pub(super) struct Handed {
    outstanding: BTreeSet<usize>,
    settled: BTreeMap<usize, Mark>,
    /// Set when a step came back with two sums.
    ended: bool,
}

impl PrivateRun {
    /// The same run as its journal left it, from a step on; rows before it are never shown.
    ///
    /// Errors: those of [`NoiseStream::skip_to`](crate::noise::NoiseStream::skip_to) and [`DurableStream::open`]; a run that has a
    /// journal.
    pub fn resumed_at(self, place: impl Into<DiskPath>, plan: [u8; 32], step: usize) -> Result<Self> {
        self.journalled(plan, |mut stream, plan| {
            stream.skip_to(step)?;
            DurableStream::open(stream, place, plan)
        })
    }

    /// How the coming rows are split for devices that have 32 bits: see [`SplitRow`].
    ///
    /// Errors: [`Error::Unsupported`] in float arithmetic, and for noise so small or so large beside the clip that 32 bits do not
    /// hold the difference.
    pub fn split_row(&self) -> Result<SplitRow> {
        self.stream().split(self.sum_exponent() + SINGLE_DIGITS).ok_or_else(|| Error::Unsupported {
            what: "this noise in words of 32 bits".into(),
            hint: "it is too small or too large beside the clip, or not exact: use float arithmetic",
        })
    }

    /// Takes the coming row out of the run: it is on record as handed over, and does not come again. Returns its step, and the mark
    /// that its sum must have where the journal has one.
    ///
    /// Whoever wants the row ships it from [`PrivateRun::coming_row`] before, and hands it on afterwards.
    ///
    /// Errors: [`Error::Exhausted`]; [`Error::StepReused`] for a step that another version released; those of a journal;
    /// [`Error::Halted`] after a step came back with two sums.
    pub fn hand_over(&mut self) -> Result<(usize, Option<Mark>)> {
        if self.handed.ended {
            let reason = "a row of noise was used with two sums; nothing more is handed over".into();
            return Err(Error::Halted { reason });
        }
        let step = self.next_step();
        let mark = match &mut self.noise {
            Noise::Stream(stream) => stream.skip().map(|_| None),
            Noise::Durable(durable) => durable.hand_over(),
        }?;
        self.handed.outstanding.insert(step);
        Ok((step, mark))
    }

    /// Settles the first step that is outstanding, whose contributions were counted: `mark` stands for its sum. Settling a step again
    /// with the same mark changes nothing.
    ///
    /// Errors: those of [`PrivateRun::check_release`] and of a journal; a step that is not the next one to be settled;
    /// [`Error::StepReused`] for a step that was settled with another mark, after which nothing is handed over any more.
    pub fn settle(&mut self, step: usize, mark: Mark) -> Result<()> {
        if let Some(before) = self.handed.settled.get(&step) {
            if *before == mark {
                return Ok(());
            }
            self.handed.ended = true;
            return Err(Error::StepReused { step });
        }
        if self.handed.outstanding.first() != Some(&step) {
            let rule = "steps are settled in the order in which they were handed over";
            return Err(Error::argument("step", step, rule));
        }
        self.check_release()?;
        if let Noise::Durable(durable) = &mut self.noise {
            durable.settle(step, mark)?;
        }
        self.handed.outstanding.remove(&step);
        self.handed.settled.insert(step, mark);
        self.advance();
        Ok(())
    }

    /// Burns the first step that is outstanding: it counts for nothing, also after a restart.
    ///
    /// Errors: none outstanding; those of a journal.
    pub fn give_up(&mut self) -> Result<usize> {
        let Some(step) = self.handed.outstanding.first().copied() else {
            return Err(Error::argument("step", "none", "no row is outstanding"));
        };
        if let Noise::Durable(durable) = &mut self.noise {
            durable.give_up(step)?;
        }
        self.clear();
        self.handed.outstanding.remove(&step);
        Ok(step)
    }

    /// Steps whose rows have left and which are not settled.
    pub fn outstanding(&self) -> impl Iterator<Item = usize> {
        self.handed.outstanding.iter().copied()
    }

    /// The step that contributions are counted for: the first that is outstanding, or the coming one.
    pub(super) fn due(&self) -> usize {
        self.handed.outstanding.first().copied().unwrap_or_else(|| self.next_step())
    }

    /// A secret of this run by which a device marks its sums, so that nobody can choose sums with equal marks.
    pub fn mark_salt(&self) -> [u32; 4] {
        let secret = self.stream().key().purpose("dpmf 1 mark salt", &[]);
        std::array::from_fn(|word| u32::from_le_bytes(std::array::from_fn(|byte| secret[4 * word + byte])))
    }
}
