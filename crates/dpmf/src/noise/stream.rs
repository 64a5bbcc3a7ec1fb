//! The stream of noise rows: each once, in order, none past the last.

use super::engines::{Engine, IterateStage, Packet, Shard, StepOf};
use super::field::Field;
use super::key::StreamKey;
use crate::error::{Error, Result};
use rayon::prelude::*;
use std::ops::Range;

/// What the rows of a stream are.
#[derive(Clone, Debug, Default)]
pub enum Output {
    /// `N Z`: noise to be added to the gradients.
    #[default]
    Gradient,
    /// `A N Z`: the noise that the same gradients leave in the iterates `θ₀ − θ`.
    Iterate(IterateStage),
}

impl Output {
    fn stage(&self) -> Option<&IterateStage> {
        match self {
            Output::Gradient => None,
            Output::Iterate(stage) => Some(stage),
        }
    }

    pub(super) fn buffers(&self) -> usize {
        self.stage().map_or(0, IterateStage::buffers)
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Output::Gradient => "gradient",
            Output::Iterate(_) => "iterate",
        }
    }
}

/// The rows of `scale · N Z` (or `scale · A N Z`) for a range of coordinates.
///
/// Guarantee: a row is emitted at most once by this object; row `i` of coordinate `j` is a function of the stream key, the
/// engine's coefficients and `(i, j)`, whatever range, thread count or restart produced it.
///
/// A stream alone does not survive a crash safely: training that may restart needs a
/// [`DurableStream`](super::DurableStream), whose journal keeps a row from being released twice with different data.
pub struct NoiseStream {
    engine: Box<dyn Engine>,
    output: Output,
    key: StreamKey,
    field: Field,
    shard: Shard,
    scale: f32,
    step: usize,
    state: Vec<Packet>,
    stage_state: Vec<Packet>,
    /// Set while a step is under way: still set at the next one, it was torn by a panic.
    moving: bool,
}

impl NoiseStream {
    /// A stream at its first step.
    ///
    /// `scale` multiplies every row: σγζ for a calibrated mechanism, 1 for unit noise. It is rounded up to single
    /// precision, never down.
    ///
    /// Errors: no steps, an empty range, a scale that is not positive and finite in single precision, a recurrence of
    /// another length; [`Error::Memory`].
    pub fn new(
        engine: Box<dyn Engine>,
        key: StreamKey,
        coordinates: Range<u64>,
        scale: f64,
        output: Output,
    ) -> Result<Self> {
        let steps = engine.steps();
        if steps == 0 {
            return Err(Error::argument("steps", 0, "at least one step is needed"));
        }
        if let Some(stage) = output.stage()
            && stage.steps() != steps
        {
            return Err(Error::WrongLength { name: "recurrence", actual: stage.steps(), expected: steps });
        }
        let shard = Shard::new(coordinates)?;
        Ok(Self {
            field: Field::new(&key),
            scale: round_up(scale)?,
            state: shard.allocate(engine.buffers())?,
            stage_state: shard.allocate(output.buffers())?,
            engine,
            output,
            key,
            shard,
            step: 0,
            moving: false,
        })
    }

    /// Bytes of state that [`NoiseStream::new`] will ask for.
    ///
    /// Errors: an empty range.
    pub fn memory(engine: &dyn Engine, output: &Output, coordinates: Range<u64>) -> Result<u128> {
        Ok(Shard::new(coordinates)?.bytes(engine.buffers() + output.buffers()))
    }

    /// Number of rows in all.
    pub fn steps(&self) -> usize {
        self.engine.steps()
    }

    /// The next row, zero-based; equal to [`NoiseStream::steps`] at the end.
    pub fn next_step(&self) -> usize {
        self.step
    }

    /// The range of coordinates.
    pub fn coordinates(&self) -> Range<u64> {
        self.shard.coordinates().clone()
    }

    /// The factor of every row, as it is applied.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// The key of the stream.
    pub fn key(&self) -> &StreamKey {
        &self.key
    }

    /// What the rows are.
    pub fn output(&self) -> &Output {
        &self.output
    }

    /// Adds the next row to `values` and returns its number, zero-based.
    ///
    /// Cost: one pass over `values` to check it, then one over it and the state.
    ///
    /// Errors, all before anything moves: a length that is not that of the range; a value that is not finite, which would
    /// show through the noise; [`Error::Exhausted`] after the last row.
    pub fn add_next(&mut self, values: &mut [f32]) -> Result<usize> {
        self.check_next()?;
        self.check_values(values)?;
        Ok(self.advance(Some(values)))
    }

    /// Moves past the next row without showing it, and returns its number.
    ///
    /// Errors: [`Error::Exhausted`].
    pub fn skip(&mut self) -> Result<usize> {
        self.check_next()?;
        Ok(self.advance(None))
    }

    /// Moves to a later row; the rows between are never shown.
    ///
    /// Cost: that of the rows between.
    ///
    /// Errors: a step that has passed, or one beyond the last.
    pub fn skip_to(&mut self, step: usize) -> Result<()> {
        if step < self.step || step > self.steps() {
            let rule = "a stream moves forward only, up to its last step";
            return Err(Error::argument("step", step, rule));
        }
        while self.step < step {
            self.skip()?;
        }
        Ok(())
    }

    pub(super) fn check_next(&self) -> Result<()> {
        if self.moving {
            return Err(Error::Halted {
                reason: "a step of the noise stream was torn; restore a checkpoint".into(),
            });
        }
        if self.step >= self.steps() {
            return Err(Error::Exhausted { steps: self.steps() });
        }
        Ok(())
    }

    pub(super) fn check_values(&self, values: &[f32]) -> Result<()> {
        let expected = self.shard.len();
        if values.len() != expected {
            return Err(Error::WrongLength { name: "values", actual: values.len(), expected });
        }
        match first_not_finite(values) {
            Some(index) => {
                let rule = "what is not finite shows through any noise: clip before adding noise";
                Err(Error::InvalidEntry { name: "values", index, value: values[index].into(), rule })
            }
            None => Ok(()),
        }
    }

    pub(super) fn advance(&mut self, values: Option<&mut [f32]>) -> usize {
        let step = self.step;
        self.moving = true;
        let kernel = self.engine.kernel(&self.field, step);
        let work = StepOf {
            index: step,
            kernel: &*kernel,
            state: &mut self.state,
            buffers: self.engine.buffers(),
            stage: self.output.stage(),
            stage_state: &mut self.stage_state,
            scale: self.scale,
        };
        self.shard.run(work, values);
        self.moving = false;
        self.step = step + 1;
        step
    }

    /// Calls `visit` with the state, buffer after buffer in the order of coordinates: the engine's, then the output's.
    pub(super) fn visit_state(&mut self, mut visit: impl FnMut(&mut [f32])) {
        let parts =
            [(&mut self.state, self.engine.buffers()), (&mut self.stage_state, self.output.buffers())];
        for (state, buffers) in parts {
            for b in 0..buffers {
                self.shard.visit(state, buffers, b, &mut visit);
            }
        }
    }

    /// Numbers of state in all.
    pub(super) fn state_len(&self) -> usize {
        self.shard.len() * (self.engine.buffers() + self.output.buffers())
    }

    pub(super) fn set_step(&mut self, step: usize) {
        self.step = step;
        self.moving = false;
    }
}

/// The least single-precision number that is not below `scale`.
fn round_up(scale: f64) -> Result<f32> {
    let nearest = scale as f32;
    let rounded = if f64::from(nearest) < scale { nearest.next_up() } else { nearest };
    if rounded.is_normal() && rounded > 0.0 {
        Ok(rounded)
    } else {
        Err(Error::argument("scale", scale, "it must be positive and finite in single precision"))
    }
}

fn first_not_finite(values: &[f32]) -> Option<usize> {
    const CHUNK: usize = 1 << 14;
    values.par_chunks(CHUNK).enumerate().find_map_first(|(i, chunk)| {
        // Without a way out the first loop becomes vectors; a second one finds the place.
        let all = chunk.iter().fold(true, |all, x| all & x.is_finite());
        if all { None } else { chunk.iter().position(|x| !x.is_finite()).map(|at| i * CHUNK + at) }
    })
}
