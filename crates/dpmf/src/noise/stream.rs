//! The stream of noise rows: each once, in order, none past the last.

use super::engines::{Engine, IterateStage, Packet, Shard, StepOf};
use super::field::Field;
use super::key::StreamKey;
use crate::error::{Error, Result};
use crate::simd::dispatch;
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

    /// The number that stands for it in files.
    pub(super) fn code(&self) -> u32 {
        match self {
            Output::Gradient => 0,
            Output::Iterate(_) => 1,
        }
    }
}

/// The rows of `scale · N Z` (or `scale · A N Z`) for a range of coordinates.
///
/// Guarantee: a row is emitted at most once by this object; row `i` of coordinate `j` is a function of the
/// stream key, the engine's coefficients and `(i, j)`, whatever range, thread count or restart produced it.
///
/// A stream alone does not survive a crash safely: training that may restart needs a
/// [`DurableStream`](super::DurableStream), whose journal keeps a row from being released twice with
/// different data.
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
    /// `scale` multiplies every row: σγζ for a calibrated mechanism, 1 for unit noise. It is rounded up to
    /// single precision, never down.
    ///
    /// Errors: no steps, an empty range, a scale that is not positive and finite in single precision, a
    /// recurrence of another length; [`Error::Memory`].
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
    /// Errors, all before anything moves: a length that is not that of the range; a value that is not finite,
    /// which would show through the noise; [`Error::Exhausted`] after the last row.
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

    pub(super) fn check_whole(&self) -> Result<()> {
        if self.moving {
            return Err(Error::Halted { reason: "a step was torn by a panic; restore a checkpoint".into() });
        }
        Ok(())
    }

    pub(super) fn check_next(&self) -> Result<()> {
        self.check_whole()?;
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

    /// Calls `visit` with the state, buffer after buffer in the order of coordinates: the engine's, then the
    /// output's.
    pub(super) fn visit_state(&self, mut visit: impl FnMut(&[f32])) {
        let parts = [(&self.state, self.engine.buffers()), (&self.stage_state, self.output.buffers())];
        for (state, buffers) in parts {
            for b in 0..buffers {
                self.shard.places(buffers, b).for_each(|(packet, lanes)| visit(&state[packet][lanes]));
            }
        }
    }

    /// [`NoiseStream::visit_state`], to be written.
    pub(super) fn visit_state_mut(&mut self, mut visit: impl FnMut(&mut [f32])) {
        let parts =
            [(&mut self.state, self.engine.buffers()), (&mut self.stage_state, self.output.buffers())];
        for (state, buffers) in parts {
            for b in 0..buffers {
                self.shard.places(buffers, b).for_each(|(packet, lanes)| visit(&mut state[packet][lanes]));
            }
        }
    }

    /// Model-sized buffers in all.
    pub(super) fn buffers(&self) -> usize {
        self.engine.buffers() + self.output.buffers()
    }

    /// Numbers of state in all.
    pub(super) fn state_len(&self) -> u64 {
        self.shard.len() as u64 * self.buffers() as u64
    }

    pub(super) fn set_step(&mut self, step: usize) {
        self.step = step;
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
        if largest_magnitude(chunk) < f32::INFINITY.to_bits() {
            return None;
        }
        chunk.iter().position(|x| !x.is_finite()).map(|at| i * CHUNK + at)
    })
}

/// The largest of the bits of `|x|`: the order of numbers, with infinity and NaN above all.
#[inline(always)]
fn largest_magnitude_any(values: &[f32]) -> u32 {
    values.iter().fold(0, |largest, x| largest.max(x.to_bits() & !(1 << 31)))
}

dispatch! {
    fn largest_magnitude / largest_magnitude_portable / largest_magnitude_avx2 = largest_magnitude_any(
        values: &[f32]
    ) -> u32;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::factorization::{Factorization, Independent, Tree, tree::Decoder};
    use crate::noise::engines::{Kernel, engine};
    use crate::noise::{NoiseKey, RunId};
    use crate::workload::Workload;

    fn key() -> StreamKey {
        NoiseKey::from_seed(3).stream([0; 32], RunId([0; 16]))
    }

    fn tree(steps: usize) -> Box<dyn Engine> {
        let tree = Tree::new(steps, Decoder::HonakerOnline).unwrap().rounded().unwrap();
        engine(&Factorization::Tree(tree)).unwrap()
    }

    fn stream(steps: usize, coordinates: Range<u64>) -> NoiseStream {
        NoiseStream::new(tree(steps), key(), coordinates, 1.0, Output::Gradient).unwrap()
    }

    #[test]
    fn rows_come_once_in_order_and_none_past_the_last() {
        let mut stream = stream(3, 0..10);
        let mut seen = Vec::new();
        for i in 0..3 {
            assert_eq!(stream.next_step(), i);
            let mut row = vec![0.0; 10];
            assert_eq!(stream.add_next(&mut row).unwrap(), i);
            assert!(!seen.contains(&row));
            seen.push(row);
        }
        let mut row = vec![0.0; 10];
        assert!(matches!(stream.add_next(&mut row), Err(Error::Exhausted { steps: 3 })));
        assert!(matches!(stream.skip(), Err(Error::Exhausted { steps: 3 })));
        assert_eq!(row, vec![0.0; 10]);
    }

    #[test]
    fn noise_is_added_and_scaled() {
        let coordinates = 5..300;
        let mut plain = vec![0.0; 295];
        stream(2, coordinates.clone()).add_next(&mut plain).unwrap();
        let mut scaled = NoiseStream::new(tree(2), key(), coordinates, 0.3, Output::Gradient).unwrap();
        let values: Vec<f32> = (0..295).map(|i| 0.01 * i as f32).collect();
        let mut noisy = values.clone();
        scaled.add_next(&mut noisy).unwrap();
        for ((noisy, value), noise) in noisy.iter().zip(&values).zip(&plain) {
            assert_eq!(*noisy, value + scaled.scale() * noise);
        }
    }

    #[test]
    fn a_scale_is_never_rounded_down() {
        for scale in [0.1, 0.3, 1.0 / 3.0, 1.0, 1e-30, 1e30] {
            let rounded = round_up(scale).unwrap();
            assert!(f64::from(rounded) >= scale && f64::from(rounded.next_down()) < scale, "{scale}");
        }
        for scale in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e39, 1e-40] {
            assert!(matches!(round_up(scale), Err(Error::InvalidArgument { .. })), "{scale}");
        }
    }

    #[test]
    fn bad_input_is_refused_before_the_state_moves() {
        let (mut touched, mut untouched) = (stream(8, 0..40_000), stream(8, 0..40_000));
        for (at, bad) in [(0, f32::NAN), (39_999, f32::INFINITY), (20_000, f32::NEG_INFINITY)] {
            let mut values = vec![0.5; 40_000];
            values[at] = bad;
            match touched.add_next(&mut values) {
                Err(Error::InvalidEntry { index, .. }) => assert_eq!(index, at),
                other => panic!("{other:?}"),
            }
            assert!(values.iter().enumerate().all(|(i, x)| i == at || *x == 0.5));
        }
        // The first of several.
        let mut values = vec![0.5; 40_000];
        (values[777], values[33_333]) = (f32::NAN, f32::NAN);
        assert!(matches!(touched.add_next(&mut values), Err(Error::InvalidEntry { index: 777, .. })));
        assert!(matches!(touched.add_next(&mut [0.0; 3]), Err(Error::WrongLength { expected: 40_000, .. })));

        for _ in 0..8 {
            let (mut a, mut b) = (vec![0.0; 40_000], vec![0.0; 40_000]);
            assert_eq!(touched.add_next(&mut a).unwrap(), untouched.add_next(&mut b).unwrap());
            assert_eq!(a, b);
        }
    }

    #[test]
    fn skipped_rows_move_the_state_like_shown_ones() {
        let (mut shown, mut skipped) = (stream(16, 3..200), stream(16, 3..200));
        let mut row = vec![0.0; 197];
        for _ in 0..11 {
            shown.add_next(&mut row).unwrap();
        }
        skipped.skip_to(11).unwrap();
        let (mut a, mut b) = (vec![0.0; 197], vec![0.0; 197]);
        assert_eq!((shown.add_next(&mut a).unwrap(), skipped.add_next(&mut b).unwrap()), (11, 11));
        assert_eq!(a, b);
        for step in [11, 17] {
            assert!(matches!(skipped.skip_to(step), Err(Error::InvalidArgument { .. })));
        }
        skipped.skip_to(16).unwrap();
        assert!(matches!(skipped.add_next(&mut a), Err(Error::Exhausted { .. })));
    }

    #[test]
    fn constructors_refuse_what_makes_no_stream() {
        let new =
            |coordinates, scale, output| NoiseStream::new(tree(4), key(), coordinates, scale, output).err();
        #[allow(clippy::reversed_empty_ranges)]
        for coordinates in [3..3, 5..3, 7..(1 << 62) + 1, u64::MAX - 3..u64::MAX] {
            assert!(matches!(new(coordinates, 1.0, Output::Gradient), Some(Error::InvalidArgument { .. })));
        }
        assert!(matches!(new(0..4, 0.0, Output::Gradient), Some(Error::InvalidArgument { .. })));
        let stage = IterateStage::new(&Workload::prefix_sum(5).unwrap()).unwrap();
        assert!(matches!(new(0..4, 1.0, Output::Iterate(stage)), Some(Error::WrongLength { .. })));
        let none = engine(&Factorization::Independent(Independent::new(0))).unwrap();
        let none = NoiseStream::new(none, key(), 0..4, 1.0, Output::Gradient);
        assert!(matches!(none.err(), Some(Error::InvalidArgument { .. })));
    }

    #[test]
    fn a_torn_step_halts_the_stream() {
        struct Breaks;
        impl Engine for Breaks {
            fn steps(&self) -> usize {
                2
            }
            fn buffers(&self) -> usize {
                0
            }
            fn kernel<'a>(&'a self, _: &'a Field, _: usize) -> Box<dyn Kernel + 'a> {
                Box::new(Breaks)
            }
        }
        impl Kernel for Breaks {
            fn run(&self, _: u64, _: &mut [Packet], _: &mut [Packet]) {
                panic!("torn on purpose");
            }
        }
        let mut stream = NoiseStream::new(Box::new(Breaks), key(), 0..10, 1.0, Output::Gradient).unwrap();
        let torn = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| stream.skip()));
        assert!(torn.is_err());
        assert!(matches!(stream.skip(), Err(Error::Halted { .. })));
        assert!(matches!(stream.add_next(&mut [0.0; 10]), Err(Error::Halted { .. })));
        assert!(matches!(stream.checkpoint("never"), Err(Error::Halted { .. })));
    }
}
