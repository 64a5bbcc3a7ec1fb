//! The stream of noise rows: each once, in order, none past the last.

use super::key::{NoiseKey, RunId, StreamKey};
use crate::accounting::Arithmetic;
use crate::engine::exact::engine::{ExactEngine, Rounding};
use crate::engine::exact::field::{EXACT_FIELD_FORMAT, ExactField};
use crate::engine::exact::program::Program;
use crate::engine::{Engine, FIELD_FORMAT, Field, IterateStage, PACKET, Packet, Shard, StepOf, Value};
use crate::error::{Error, Result};
use crate::form::Representation;
use crate::identity::Identity;
use crate::mechanism::Mechanism;
use rayon::prelude::*;
use std::ops::Range;
use std::str::FromStr;

/// What the rows of a stream are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Output {
    /// `N Z`: noise to be added to the gradients.
    #[default]
    Gradient,
    /// `A N Z`: the noise that the same gradients leave in the iterates `θ₀ − θ`.
    Iterate,
}

impl Output {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Output::Gradient => "gradient",
            Output::Iterate => "iterate",
        }
    }

    /// The number that stands for it in files.
    pub(super) fn code(self) -> u32 {
        match self {
            Output::Gradient => 0,
            Output::Iterate => 1,
        }
    }
}

impl FromStr for Output {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [Output::Gradient, Output::Iterate]
            .into_iter()
            .find(|output| output.name() == text)
            .ok_or_else(|| Error::argument("output", text, "it must be gradient or iterate"))
    }
}

/// The rows of `scale · N Z` (or `scale · A N Z`) for a range of coordinates, made by
/// [`Mechanism::stream`].
///
/// Guarantee: a row is emitted at most once by this object; row `i` of coordinate `j` is a function of the
/// stream key, the engine's coefficients and `(i, j)`, whatever range, thread count or restart produced it. In exact
/// arithmetic what is released is the ideal `g + noise`, correctly rounded.
///
/// A stream alone does not survive a crash safely: training that may restart needs a
/// [`DurableStream`](super::DurableStream), whose journal keeps a row from being released twice with
/// different data.
pub struct NoiseStream {
    motion: Motion,
    key: StreamKey,
    shard: Shard,
    scale: f32,
    step: usize,
    /// Set while a step is under way: still set at the next one, it was torn by a panic.
    moving: bool,
}

/// What makes the rows.
enum Motion {
    Float(Box<Float>),
    Exact(Box<ExactEngine>),
}

/// Rows in single precision.
struct Float {
    engine: Box<dyn Engine>,
    /// What turns gradient noise into iterate noise, where that is asked for.
    stage: Option<IterateStage>,
    field: Field,
    state: Vec<Packet>,
    stage_state: Vec<Packet>,
}

impl Mechanism {
    /// The noise of one run, at its first step: the rows of `N Z` with `Z` of standard deviation σγζ.
    ///
    /// This and [`Mechanism::unit_stream`] are the only ways to noise, so that scale and identity always fit.
    ///
    /// Guarantee: streams of other keys, runs, mechanisms or arithmetics are computationally independent.
    /// Errors: [`Error::Unsupported`] for a mechanism that is not calibrated, for iterates of a matrix, and for iterates in
    /// exact arithmetic; an empty range; [`Error::Memory`].
    ///
    /// ```
    /// use dpmf::noise::{Arithmetic, NoiseKey, Output, RunId};
    /// use dpmf::{Participation, Problem, Workload};
    ///
    /// let problem = Problem::new(Workload::prefix_sum(100)?, Participation::default())?;
    /// let mechanism = problem.mechanism("honaker-online".parse()?, &mut dpmf::factorize::quiet)?;
    /// let mechanism = mechanism.calibrated(2.0, 1e-6, 1.0, Default::default())?;
    /// let (key, run) = (NoiseKey::generate()?, RunId::generate()?);
    /// let mut stream = mechanism.stream(&key, run, 0..1000, Output::Gradient, Arithmetic::Exact)?;
    ///
    /// let mut gradient = vec![0.0_f32; 1000]; // a sum of clipped contributions
    /// stream.add_next(&mut gradient)?;
    /// assert_eq!(stream.next_step(), 1);
    /// # Ok::<(), dpmf::Error>(())
    /// ```
    pub fn stream(
        &self,
        key: &NoiseKey,
        run: RunId,
        coordinates: Range<u64>,
        output: Output,
        arithmetic: Arithmetic,
    ) -> Result<NoiseStream> {
        let statement = self.privacy().ok_or_else(|| Error::Unsupported {
            what: "noise of a mechanism that is not calibrated".into(),
            hint: "its scale is not known yet: calibrate it first, or ask for unit noise by name",
        })?;
        let scale = statement.calibration().noise_std();
        NoiseStream::new(self, key.stream(self.identity(), run), coordinates, scale, output, arithmetic)
    }

    /// The rows of `N Z` with `Z` of unit variance, before σ, sensitivity and clip: for those who look at noise, not
    /// for a release. It is independent of what [`Mechanism::stream`] makes under the same key and run.
    ///
    /// Errors: those of [`Mechanism::stream`] but for the first.
    pub fn unit_stream(
        &self,
        key: &NoiseKey,
        run: RunId,
        coordinates: Range<u64>,
        output: Output,
        arithmetic: Arithmetic,
    ) -> Result<NoiseStream> {
        let identity =
            Identity::new(self.workload(), self.form(), self.participation(), self.sampling(), None);
        NoiseStream::new(self, key.stream(identity, run), coordinates, 1.0, output, arithmetic)
    }
}

impl NoiseStream {
    /// A stream at its first step: see [`Mechanism::stream`], which is the way to it.
    ///
    /// `scale` multiplies every row. It is rounded up to single precision, never down.
    pub(crate) fn new(
        mechanism: &Mechanism,
        key: StreamKey,
        coordinates: Range<u64>,
        scale: f64,
        output: Output,
        arithmetic: Arithmetic,
    ) -> Result<Self> {
        let shard = Shard::new(coordinates.clone())?;
        let form = mechanism.form();
        match (arithmetic, output) {
            (Arithmetic::Float, Output::Gradient) => {
                Self::assemble(form.engine(rows_ahead::<f32>(&shard))?, None, key, coordinates, scale)
            }
            (Arithmetic::Float, Output::Iterate) => {
                let stage = IterateStage::new(mechanism.workload())?;
                Self::assemble(form.engine(rows_ahead::<f32>(&shard))?, Some(stage), key, coordinates, scale)
            }
            (Arithmetic::Exact, Output::Gradient) => {
                let program = form.program(rows_ahead::<f64>(&shard))?;
                let exponent = mechanism.grid_exponent(scale)?;
                Self::assemble_exact(program, key, coordinates, scale, exponent)
            }
            (Arithmetic::Exact, Output::Iterate) => Err(Error::Unsupported {
                what: "iterate noise in exact arithmetic".into(),
                hint: "add exact noise to the gradients and let the optimizer run over them, which is as private; or use float arithmetic",
            }),
        }
    }

    /// A stream in single precision from its parts.
    pub(crate) fn assemble(
        engine: Box<dyn Engine>,
        stage: Option<IterateStage>,
        key: StreamKey,
        coordinates: Range<u64>,
        scale: f64,
    ) -> Result<Self> {
        let shard = Shard::new(coordinates)?;
        let float = Float {
            field: Field::new(&key),
            state: shard.allocate(engine.buffers())?,
            stage_state: shard.allocate(stage.as_ref().map_or(0, IterateStage::buffers))?,
            engine,
            stage,
        };
        let scale = round_up(scale)?;
        Ok(Self { motion: Motion::Float(Box::new(float)), key, shard, scale, step: 0, moving: false })
    }

    /// A stream in exact arithmetic from its parts, on the grid of `2^exponent`.
    pub(crate) fn assemble_exact(
        program: Box<dyn Program>,
        key: StreamKey,
        coordinates: Range<u64>,
        scale: f64,
        exponent: i32,
    ) -> Result<Self> {
        let shard = Shard::new(coordinates)?;
        let scale = round_up(scale)?;
        let exact = ExactEngine::new(program, ExactField::new(&key), &shard, Rounding { scale, exponent })?;
        Ok(Self { motion: Motion::Exact(Box::new(exact)), key, shard, scale, step: 0, moving: false })
    }

    /// Bytes of state that it keeps from one step to the next.
    pub fn memory(&self) -> u128 {
        match &self.motion {
            Motion::Float(_) => self.shard.bytes::<Packet>(self.buffers()),
            Motion::Exact(_) => self.shard.bytes::<crate::engine::exact::engine::Packet>(self.buffers()),
        }
    }

    /// The numbers that it is made in.
    pub fn arithmetic(&self) -> Arithmetic {
        match self.motion {
            Motion::Float(_) => Arithmetic::Float,
            Motion::Exact(_) => Arithmetic::Exact,
        }
    }

    /// The grid `q` that releases are rounded to; nothing in single precision.
    pub fn grid(&self) -> Option<f64> {
        self.grid_exponent().map(|exponent| 2.0_f64.powi(exponent))
    }

    pub(super) fn grid_exponent(&self) -> Option<i32> {
        match &self.motion {
            Motion::Float(_) => None,
            Motion::Exact(exact) => Some(exact.rounding().exponent),
        }
    }

    /// Version of the field that the noise is drawn from.
    pub(super) fn field_format(&self) -> u32 {
        match self.motion {
            Motion::Float(_) => FIELD_FORMAT,
            Motion::Exact(_) => EXACT_FIELD_FORMAT,
        }
    }

    /// Coordinates that were so close to a tie that they took more digits than double precision has, so far.
    pub fn resolved(&self) -> u64 {
        match &self.motion {
            Motion::Float(_) => 0,
            Motion::Exact(exact) => exact.resolved(),
        }
    }

    /// The share of coordinates that take more digits at a step, at most in expectation.
    ///
    /// # Panics
    /// Past the last step.
    pub fn expected_resolved(&self, step: usize) -> f64 {
        match &self.motion {
            Motion::Float(_) => 0.0,
            Motion::Exact(exact) => exact.expected_doubtful(step),
        }
    }

    /// Number of rows in all.
    pub fn steps(&self) -> usize {
        match &self.motion {
            Motion::Float(float) => float.engine.steps(),
            Motion::Exact(exact) => exact.steps(),
        }
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
    pub fn output(&self) -> Output {
        match &self.motion {
            Motion::Float(float) if float.stage.is_some() => Output::Iterate,
            _ => Output::Gradient,
        }
    }

    /// Adds the next row to `values`, f32 or f64, and returns its number, zero-based.
    ///
    /// In exact arithmetic the values are taken as the real numbers they are, and what comes back is on the
    /// [grid](NoiseStream::grid), or the nearest f32 to it.
    ///
    /// Cost: one pass over `values` to check it, then one over it and the state.
    ///
    /// Errors, all before anything moves: a length that is not that of the range; a value that is not finite,
    /// which would show through the noise; [`Error::Exhausted`] after the last row. [`Error::Halted`] as good as never.
    pub fn add_next<V: Value>(&mut self, values: &mut [V]) -> Result<usize> {
        self.check_next()?;
        self.check_values(values)?;
        self.advance(Some(values))
    }

    /// Moves past the next row without showing it, and returns its number.
    ///
    /// Errors: [`Error::Exhausted`].
    pub fn skip(&mut self) -> Result<usize> {
        self.check_next()?;
        self.advance(None::<&mut [f32]>)
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

    pub(super) fn check_values<V: Value>(&self, values: &[V]) -> Result<()> {
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

    pub(super) fn advance<V: Value>(&mut self, values: Option<&mut [V]>) -> Result<usize> {
        let step = self.step;
        self.moving = true;
        match &mut self.motion {
            Motion::Float(float) => {
                let Float { engine, stage, field, state, stage_state } = &mut **float;
                let kernel = engine.kernel(field, step);
                let work = StepOf {
                    index: step,
                    kernel: &*kernel,
                    state,
                    buffers: engine.buffers(),
                    stage: stage.as_ref(),
                    stage_state,
                    scale: self.scale,
                };
                self.shard.run(work, values);
            }
            // On an error the step stays torn: nothing more comes of this stream.
            Motion::Exact(exact) => exact.advance(step, &self.shard, values)?,
        }
        self.moving = false;
        self.step = step + 1;
        Ok(step)
    }

    /// Calls `visit` with the bytes of the state, little endian, buffer after buffer in the order of coordinates: the
    /// engine's, then the output's.
    pub(super) fn visit_state(&self, mut visit: impl FnMut(&[u8])) {
        match &self.motion {
            Motion::Float(float) => {
                let stage = float.stage.as_ref().map_or(0, IterateStage::buffers);
                visit_packets(&self.shard, &float.state, float.engine.buffers(), &mut visit);
                visit_packets(&self.shard, &float.stage_state, stage, &mut visit);
            }
            Motion::Exact(exact) => visit_packets(&self.shard, exact.state(), exact.buffers(), &mut visit),
        }
    }

    /// Calls `visit` for the bytes of [`NoiseStream::visit_state`], to be written.
    pub(super) fn visit_state_mut(&mut self, mut visit: impl FnMut(&mut [u8])) {
        match &mut self.motion {
            Motion::Float(float) => {
                let (buffers, stage) =
                    (float.engine.buffers(), float.stage.as_ref().map_or(0, IterateStage::buffers));
                let single = |bytes: &[u8]| f32::from_le_bytes(std::array::from_fn(|i| bytes[i]));
                write_packets(&self.shard, &mut float.state, buffers, single, &mut visit);
                write_packets(&self.shard, &mut float.stage_state, stage, single, &mut visit);
            }
            Motion::Exact(exact) => {
                let buffers = exact.buffers();
                let double = |bytes: &[u8]| f64::from_le_bytes(std::array::from_fn(|i| bytes[i]));
                write_packets(&self.shard, exact.state_mut(), buffers, double, &mut visit);
            }
        }
    }

    /// Model-sized buffers in all.
    pub(super) fn buffers(&self) -> usize {
        match &self.motion {
            Motion::Float(float) => {
                float.engine.buffers() + float.stage.as_ref().map_or(0, IterateStage::buffers)
            }
            Motion::Exact(exact) => exact.buffers(),
        }
    }

    /// Bytes of state in all, without what pads the edges.
    pub(super) fn state_bytes(&self) -> u64 {
        let number = match self.motion {
            Motion::Float(_) => f32::BYTES,
            Motion::Exact(_) => f64::BYTES,
        };
        self.shard.len() as u64 * self.buffers() as u64 * number as u64
    }

    pub(super) fn set_step(&mut self, step: usize) {
        self.step = step;
    }
}

/// Shows the numbers of a state, buffer after buffer, packet by packet.
fn visit_packets<V: Value>(
    shard: &Shard,
    state: &[[V; PACKET]],
    buffers: usize,
    visit: &mut impl FnMut(&[u8]),
) {
    let mut bytes = [0; PACKET * 8];
    for (packet, lanes) in (0..buffers).flat_map(|b| shard.places(buffers, b)) {
        let used = &mut bytes[..lanes.len() * V::BYTES];
        used.chunks_exact_mut(V::BYTES).zip(&state[packet][lanes]).for_each(|(to, value)| value.write(to));
        visit(used);
    }
}

/// Takes the numbers of a state in the order of [`visit_packets`].
fn write_packets<V: Value>(
    shard: &Shard,
    state: &mut [[V; PACKET]],
    buffers: usize,
    read: impl Fn(&[u8]) -> V,
    visit: &mut impl FnMut(&mut [u8]),
) {
    let mut bytes = [0; PACKET * 8];
    for (packet, lanes) in (0..buffers).flat_map(|b| shard.places(buffers, b)) {
        let used = &mut bytes[..lanes.len() * V::BYTES];
        visit(used);
        let numbers = used.chunks_exact(V::BYTES).map(&read);
        state[packet][lanes].iter_mut().zip(numbers).for_each(|(to, number)| *to = number);
    }
}

/// Rows that dense engines compute together, so that one draw serves them all: 16, as long as they fit 64 MiB.
fn rows_ahead<T>(shard: &Shard) -> usize {
    const MOST: u128 = 16;
    const BYTES: u128 = 64 << 20;
    (BYTES / shard.bytes::<[T; PACKET]>(1).max(1)).clamp(1, MOST) as usize
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

fn first_not_finite<V: Value>(values: &[V]) -> Option<usize> {
    const CHUNK: usize = 1 << 14;
    values.par_chunks(CHUNK).enumerate().find_map_first(|(i, chunk)| {
        if V::all_finite(chunk) {
            return None;
        }
        let bad = |x: &V| !Into::<f64>::into(*x).is_finite();
        chunk.iter().position(bad).map(|at| i * CHUNK + at)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::form::tree::Decoder;
    use crate::form::{Representation, Tree};
    use crate::identity::Identity;
    use crate::noise::engine::Kernel;
    use crate::noise::{NoiseKey, RunId};

    fn key() -> StreamKey {
        NoiseKey::from_seed(3).stream(Identity([0; 32]), RunId([0; 16]))
    }

    fn tree(steps: usize) -> Box<dyn Engine> {
        Tree::new(steps, Decoder::HonakerOnline).unwrap().rounded().unwrap().engine(1).unwrap()
    }

    fn stream(steps: usize, coordinates: Range<u64>) -> NoiseStream {
        NoiseStream::assemble(tree(steps), None, key(), coordinates, 1.0).unwrap()
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
        let mut scaled = NoiseStream::assemble(tree(2), None, key(), coordinates, 0.3).unwrap();
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
        let new = |coordinates, scale| NoiseStream::assemble(tree(4), None, key(), coordinates, scale).err();
        #[allow(clippy::reversed_empty_ranges)]
        for coordinates in [3..3, 5..3, 7..(1 << 62) + 1, u64::MAX - 3..u64::MAX] {
            assert!(matches!(new(coordinates, 1.0), Some(Error::InvalidArgument { .. })));
        }
        assert!(matches!(new(0..4, 0.0), Some(Error::InvalidArgument { .. })));
    }

    #[test]
    fn dense_rows_are_computed_ahead_while_they_fit() {
        let ahead = |coordinates| rows_ahead::<f32>(&Shard::new(coordinates).unwrap());
        assert_eq!((ahead(0..1), ahead(0..1 << 20), ahead(0..1 << 21)), (16, 16, 8));
        assert_eq!(ahead(0..1 << 30), 1);
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
        let mut stream = NoiseStream::assemble(Box::new(Breaks), None, key(), 0..10, 1.0).unwrap();
        let torn = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| stream.skip()));
        assert!(torn.is_err());
        assert!(matches!(stream.skip(), Err(Error::Halted { .. })));
        assert!(matches!(stream.add_next(&mut [0.0; 10]), Err(Error::Halted { .. })));
        assert!(matches!(stream.checkpoint("never"), Err(Error::Halted { .. })));
    }
}
