//! The stream of noise rows: each once, in order, none past the last.

use super::ahead::Workers;
use super::key::{NoiseKey, RunId, StreamKey};
use super::source::{Float, Kept, Motion, Source, no_room, torn};
use crate::accounting::Arithmetic;
use crate::engine::exact::engine::{ExactEngine, FixedPoint, Rounding, SplitRow};
use crate::engine::exact::field::{EXACT_FIELD_FORMAT, ExactField};
use crate::engine::exact::program::Program;
use crate::engine::{Engine, FIELD_FORMAT, Field, IterateStage, PACKET, Shard, Sum, Target, Value};
use crate::error::{Error, Result};
use crate::form::Representation;
use crate::identity::Identity;
use crate::mechanism::Mechanism;
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::ops::Range;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ScopedJoinHandle};

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

/// The rows of `scale · N Z` (or `scale · A N Z`) for ranges of coordinates, made by
/// [`Mechanism::stream`].
///
/// Guarantee: a row is emitted at most once by this object; row `i` of coordinate `j` is a function of the
/// stream key, the engine's coefficients and `(i, j)`, whatever range, thread count or restart produced it, and whether it was
/// made ahead. In exact arithmetic what is released is the ideal `g + noise`, correctly rounded.
///
/// A stream alone does not survive a crash safely: training that may restart needs a
/// [`DurableStream`](super::DurableStream), whose journal keeps a row from being released twice with
/// different data.
pub struct NoiseStream {
    /// Before the source, so that no thread is left when it goes.
    workers: Option<Workers>,
    source: Arc<Source>,
    key: StreamKey,
    shards: Vec<Shard>,
    /// The coordinates that its files are named after.
    bound: Range<u64>,
    scale: f32,
    step: usize,
    /// Set while a step is under way: still set at the next one, it was torn by a panic.
    moving: bool,
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
        let key = key.stream(self.identity(), run);
        NoiseStream::new(self, key, &[coordinates], self.noise_scale()?, output, arithmetic)
    }

    fn noise_scale(&self) -> Result<f64> {
        let statement = self.privacy().ok_or_else(|| Error::Unsupported {
            what: "noise of a mechanism that is not calibrated".into(),
            hint: "its noise has no scale yet: calibrate it first, or ask for unit noise explicitly",
        })?;
        Ok(statement.calibration().noise_std())
    }

    /// [`Mechanism::stream`] for the gradient noise of several ranges of coordinates, as one shard of a model that is cut
    /// parameter by parameter has them: numbers come range after range.
    ///
    /// Errors: those of [`Mechanism::stream`]; ranges that are not in order, or overlap.
    pub fn stream_over(
        &self,
        key: &NoiseKey,
        run: RunId,
        ranges: &[Range<u64>],
        arithmetic: Arithmetic,
    ) -> Result<NoiseStream> {
        let key = key.stream(self.identity(), run);
        NoiseStream::new(self, key, ranges, self.noise_scale()?, Output::Gradient, arithmetic)
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
        NoiseStream::new(self, key.stream(identity, run), &[coordinates], 1.0, output, arithmetic)
    }
}

impl NoiseStream {
    /// A stream at its first step: see [`Mechanism::stream`], which is the way to it.
    ///
    /// `scale` multiplies every row. It is rounded up to single precision, never down.
    pub(crate) fn new(
        mechanism: &Mechanism,
        key: StreamKey,
        ranges: &[Range<u64>],
        scale: f64,
        output: Output,
        arithmetic: Arithmetic,
    ) -> Result<Self> {
        let form = mechanism.form();
        let length = ranges.iter().map(|range| range.end.saturating_sub(range.start)).sum::<u64>();
        match (arithmetic, output) {
            (Arithmetic::Float, Output::Gradient) => {
                Self::assemble_over(form.engine(rows_ahead::<f32>(length))?, None, key, ranges, scale)
            }
            (Arithmetic::Float, Output::Iterate) => {
                let stage = IterateStage::new(mechanism.workload())?;
                Self::assemble_over(form.engine(rows_ahead::<f32>(length))?, Some(stage), key, ranges, scale)
            }
            (Arithmetic::Exact, Output::Gradient) => {
                let program = form.program(rows_ahead::<f64>(length))?;
                let exponent = mechanism.grid_exponent(scale)?;
                Self::assemble_exact(program, key, ranges, scale, exponent)
            }
            (Arithmetic::Exact, Output::Iterate) => Err(Error::Unsupported {
                what: "iterate noise in exact arithmetic".into(),
                hint: "add exact noise to the gradients and run the optimizer on them, which is just as private, or use float arithmetic",
            }),
        }
    }

    /// A stream in single precision from its parts.
    #[cfg(test)]
    pub(crate) fn assemble(
        engine: Box<dyn Engine>,
        stage: Option<IterateStage>,
        key: StreamKey,
        coordinates: Range<u64>,
        scale: f64,
    ) -> Result<Self> {
        Self::assemble_over(engine, stage, key, &[coordinates], scale)
    }

    fn assemble_over(
        engine: Box<dyn Engine>,
        stage: Option<IterateStage>,
        key: StreamKey,
        ranges: &[Range<u64>],
        scale: f64,
    ) -> Result<Self> {
        let motion = Motion::Float(Box::new(Float { field: Field::new(&key), engine, stage }));
        Self::over(motion, key, ranges, round_up(scale)?)
    }

    /// A stream in exact arithmetic from its parts, on the grid of `2^exponent`.
    pub(crate) fn assemble_exact(
        program: Box<dyn Program>,
        key: StreamKey,
        ranges: &[Range<u64>],
        scale: f64,
        exponent: i32,
    ) -> Result<Self> {
        let scale = round_up(scale)?;
        let exact = ExactEngine::new(program, ExactField::new(&key), Rounding { scale, exponent })?;
        Self::over(Motion::Exact(Box::new(exact)), key, ranges, scale)
    }

    fn over(motion: Motion, key: StreamKey, ranges: &[Range<u64>], scale: f32) -> Result<Self> {
        if ranges.is_empty() {
            return Err(Error::argument("coordinates", "none", "a stream has at least one range of them"));
        }
        if let Some(pair) = ranges.windows(2).find(|pair| pair[0].end > pair[1].start) {
            let rule = "ranges must be in order and must not overlap";
            return Err(Error::argument("coordinates", format!("{pair:?}"), rule));
        }
        let shards = ranges.iter().cloned().map(Shard::new).collect::<Result<Vec<_>>>()?;
        let source = Arc::new(Source::new(motion, scale, &shards)?);
        let bound = shards[0].coordinates().start..shards[shards.len() - 1].coordinates().end;
        Ok(Self { workers: None, source, key, shards, bound, scale, step: 0, moving: false })
    }

    /// The same stream as one of those that cover a model of `dimension` together, whose journals all say the same: each opens
    /// for any of them, however the model is cut.
    pub(crate) fn part_of(mut self, dimension: u64) -> Self {
        self.bound = 0..dimension;
        self
    }

    /// What its journal is bound to for a plan: to its ranges too, where the binding does not name them and it is no part of a
    /// larger whole.
    pub(crate) fn bound_plan(&self, plan: [u8; 32]) -> [u8; 32] {
        let hull = self.coordinates() == self.bound;
        if !hull || self.shards.len() == 1 {
            return plan;
        }
        let mut hash = Sha256::new_with_prefix(plan);
        self.ranges().for_each(|range| {
            hash.update(range.start.to_le_bytes());
            hash.update(range.end.to_le_bytes());
        });
        hash.finalize().into()
    }

    /// The coordinates that its files are named after: its own, or those of the model that it is a part of.
    pub(super) fn bound(&self) -> Range<u64> {
        self.bound.clone()
    }

    /// The same stream, whose coming row is made by so many threads of its own while nobody asks for it; none makes each row
    /// when it is asked for.
    ///
    /// Cost: 8 bytes a coordinate for the row in exact arithmetic, 4 in single precision. The threads end with the stream.
    pub fn ahead(mut self, threads: usize) -> Self {
        self.workers = (threads > 0).then(|| Workers::start(&self.source, threads));
        self.make_ahead();
        self
    }

    /// How many threads make rows ahead.
    pub fn threads_ahead(&self) -> usize {
        self.workers.as_ref().map_or(0, Workers::count)
    }

    fn make_ahead(&self) {
        if let Some(workers) = &self.workers {
            workers.make((self.step < self.steps()).then_some(self.step));
        }
    }

    /// Makes all of the coming row that is not made yet, so that a release only adds it.
    ///
    /// Errors: [`Error::Exhausted`]; [`Error::Halted`]; [`Error::Memory`].
    pub fn prepare(&self) -> Result<()> {
        self.check_next()?;
        let plan = self.source.plan(self.step);
        let all = (0..self.source.count()).into_par_iter().map(|index| self.source.keep(index, &plan));
        match all.try_reduce(|| true, |a, b| Ok(a && b))? {
            true => Ok(()),
            false => Err(no_room(self.len())),
        }
    }

    /// Bytes of state that it keeps from one step to the next.
    pub fn memory(&self) -> u128 {
        let rows = if self.workers.is_some() { self.len() * self.source.motion.number() } else { 0 };
        self.shards.iter().map(|shard| self.source.motion.bytes(shard)).sum::<u128>() + rows as u128
    }

    /// The numbers that it is made in.
    pub fn arithmetic(&self) -> Arithmetic {
        match self.source.motion {
            Motion::Float(_) => Arithmetic::Float,
            Motion::Exact(_) => Arithmetic::Exact,
        }
    }

    /// The grid `q` that releases are rounded to; nothing in single precision.
    pub fn grid(&self) -> Option<f64> {
        self.grid_exponent().map(|exponent| 2.0_f64.powi(exponent))
    }

    pub(super) fn grid_exponent(&self) -> Option<i32> {
        match &self.source.motion {
            Motion::Float(_) => None,
            Motion::Exact(exact) => Some(exact.rounding().exponent),
        }
    }

    /// Version of the field that the noise is drawn from.
    pub(super) fn field_format(&self) -> u32 {
        match self.source.motion {
            Motion::Float(_) => FIELD_FORMAT,
            Motion::Exact(_) => EXACT_FIELD_FORMAT,
        }
    }

    /// Coordinates that were so close to a tie that they took more digits than double precision has, so far.
    pub fn resolved(&self) -> u64 {
        match &self.source.motion {
            Motion::Float(_) => 0,
            Motion::Exact(exact) => exact.resolved(),
        }
    }

    /// The share of coordinates that take more digits at a step, at most in expectation.
    ///
    /// # Panics
    /// Past the last step.
    pub fn expected_resolved(&self, step: usize) -> f64 {
        match &self.source.motion {
            Motion::Float(_) => 0.0,
            Motion::Exact(exact) => exact.expected_doubtful(step),
        }
    }

    /// Number of rows in all.
    pub fn steps(&self) -> usize {
        self.source.motion.steps()
    }

    /// The next row, zero-based; equal to [`NoiseStream::steps`] at the end.
    pub fn next_step(&self) -> usize {
        self.step
    }

    /// The range of coordinates; of several ranges, from the first coordinate to the last.
    pub fn coordinates(&self) -> Range<u64> {
        let end = self.shards.last().map_or(0, |shard| shard.coordinates().end);
        self.shards.first().map_or(0, |shard| shard.coordinates().start)..end
    }

    /// The ranges of coordinates, in order: mostly one.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.shards.iter().map(|shard| shard.coordinates().clone())
    }

    /// How many coordinates there are.
    #[allow(clippy::len_without_is_empty, reason = "a stream is never empty")]
    pub fn len(&self) -> usize {
        self.shards.iter().map(Shard::len).sum()
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
        self.source.motion.output()
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

    /// Adds the next row to a sum of whole numbers of magnitude at most 2⁵³; the lengths were checked.
    pub(crate) fn add_sum(&mut self, sum: Sum<'_>) -> Result<usize> {
        self.check_next()?;
        self.advance(Some(sum))
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
            let rule = "a stream only moves forward, up to its last step";
            return Err(Error::argument("step", step, rule));
        }
        while self.step < step {
            self.skip()?;
        }
        Ok(())
    }

    pub(super) fn check_whole(&self) -> Result<()> {
        if self.moving { Err(torn()) } else { Ok(()) }
    }

    pub(super) fn check_next(&self) -> Result<()> {
        self.check_whole()?;
        if self.step >= self.steps() {
            return Err(Error::Exhausted { steps: self.steps() });
        }
        Ok(())
    }

    pub(super) fn check_values<V: Value>(&self, values: &[V]) -> Result<()> {
        let expected = self.len();
        if values.len() != expected {
            return Err(Error::WrongLength { name: "values", actual: values.len(), expected });
        }
        match first_not_finite(values) {
            Some(index) => {
                let rule = "it must be finite, because no noise can hide it: clip before adding noise";
                Err(Error::InvalidEntry { name: "values", index, value: values[index].into(), rule })
            }
            None => Ok(()),
        }
    }

    /// Moves past the coming step, on all threads; the lengths were checked.
    pub(super) fn advance<T: Target>(&mut self, values: Option<T>) -> Result<usize> {
        let step = self.step;
        // On an error the step stays torn: nothing more comes of this stream.
        self.moving = true;
        // What is not made by now is made here, on all cores, and goes where it is needed.
        if let Some(workers) = &self.workers {
            workers.make(None);
        }
        let (source, plan) = (&self.source, self.source.plan(step));
        match values {
            Some(values) => {
                let parts = source.cut(values).into_par_iter().enumerate();
                parts.try_for_each(|(index, values)| source.advance(index, &plan, Some(values)))?;
            }
            None => (0..source.count())
                .into_par_iter()
                .try_for_each(|index| source.advance(index, &plan, None::<&mut [f32]>))?,
        }
        drop(plan);
        self.moving = false;
        self.step = step + 1;
        self.make_ahead();
        Ok(step)
    }

    /// How the coming rows are shipped to a device that adds them to sums in units of `2^exponent`.
    pub(crate) fn fixed_point(&self, exponent: i32) -> Option<FixedPoint> {
        match &self.source.motion {
            Motion::Float(_) => None,
            Motion::Exact(exact) => exact.fixed_point(exponent),
        }
    }

    /// How the coming rows are split for a device that adds them to sums in units of `2^exponent`.
    pub(crate) fn split(&self, exponent: i32) -> Option<SplitRow> {
        match &self.source.motion {
            Motion::Float(_) => None,
            Motion::Exact(exact) => exact.split(exponent),
        }
    }

    /// The coming row, to be shipped elsewhere while its owner goes on.
    pub(crate) fn coming_row(&self, sums: i32, single: i32) -> Result<ComingRow> {
        self.check_next()?;
        let (source, step, length) = (self.source.clone(), self.step, self.len());
        let (fixed, split) = (self.fixed_point(sums), self.split(single));
        Ok(ComingRow { source, step, length, fixed, split, threads: None })
    }

    /// What one coordinate of a sum becomes at a step, in units of the grid.
    ///
    /// Errors: a stream in single precision; [`Error::Halted`] as good as never.
    pub(crate) fn resolve_sum(&self, step: usize, coordinate: u64, sum: i64, unit: f64) -> Result<i64> {
        match &self.source.motion {
            Motion::Float(_) => Err(Error::argument(
                "coordinate",
                coordinate,
                "only exact noise has coordinates that need resolving",
            )),
            Motion::Exact(exact) => exact.resolve_sum(step, coordinate, sum, unit),
        }
    }

    /// Whether a checkpoint holds the coming row: then all of it is kept now.
    ///
    /// Errors: those of [`NoiseStream::prepare`].
    pub(super) fn level(&self) -> Result<bool> {
        if self.step >= self.steps() {
            return Ok(false);
        }
        let mut any = self.workers.is_some();
        for index in 0..self.source.count() {
            any = any || self.source.lock(index)?.kept().is_some();
        }
        if any {
            self.prepare()?;
        }
        Ok(any)
    }

    /// [`Source::visit_state`].
    pub(super) fn visit_state(&self, ahead: bool, visit: impl FnMut(&[u8])) -> Result<()> {
        self.source.visit_state(ahead, visit)
    }

    /// [`Source::restore`] of a stream that has not begun to make rows ahead.
    pub(super) fn restore_state(
        &mut self,
        step: usize,
        ahead: bool,
        read: impl FnMut(&mut [u8]),
    ) -> Result<()> {
        let threads = self.threads_ahead();
        self.workers = None;
        let rule = "a stream that is shared cannot be restored";
        let source =
            Arc::get_mut(&mut self.source).ok_or_else(|| Error::argument("stream", "shared", rule))?;
        source.restore(step, ahead, read)?;
        self.step = step;
        if threads > 0 {
            self.workers = Some(Workers::start(&self.source, threads));
            self.make_ahead();
        }
        Ok(())
    }

    /// Model-sized buffers in all.
    pub(super) fn buffers(&self) -> usize {
        self.source.motion.buffers()
    }

    /// Bytes of state in all, without what pads the edges, and of the row if it is ahead.
    pub(super) fn state_bytes(&self, ahead: bool) -> u64 {
        let rows = self.buffers() + usize::from(ahead);
        self.len() as u64 * rows as u64 * self.source.motion.number() as u64
    }
}

/// The row of the coming step of a stream, as it is shipped to a device; of no use once the stream has passed that step.
///
/// It may be used by another thread than the stream's.
pub struct ComingRow {
    source: Arc<Source>,
    step: usize,
    length: usize,
    fixed: Option<FixedPoint>,
    split: Option<SplitRow>,
    threads: Option<usize>,
}

impl ComingRow {
    /// The step that it is for.
    pub fn step(&self) -> usize {
        self.step
    }

    /// The same row, shipped by the calling thread and others up to this number, instead of by all threads of the pool: for rows that
    /// are shipped while the pool's cores compute something else.
    pub fn on_threads(self, threads: usize) -> Self {
        Self { threads: Some(threads), ..self }
    }

    /// Writes numbers of the row as whole numbers, from the coordinate at `place` on; what is not made yet is made now.
    ///
    /// Errors: numbers beyond the row; a row that is not [exact](crate::run::PrivateRun::fixed_row); [`Error::StepReused`] where the
    /// stream has passed it; [`Error::Memory`]; [`Error::Halted`].
    pub fn ship_fixed(&self, place: usize, to: &mut [i64]) -> Result<()> {
        let (Motion::Exact(exact), Some(fixed)) = (&self.source.motion, &self.fixed) else {
            return Err(Error::argument(
                "row",
                "of whole numbers",
                "the noise does not fit into 64-bit integers, or is not exact",
            ));
        };
        self.ship(place, to, &mut [(); 0], |_, row, range, to, _| {
            if let Kept::Exact(row) = row {
                exact.ship(fixed, &row[range], to);
            }
            Ok(())
        })
    }

    /// Writes numbers of the row as two words each, from the coordinate at `place` on: see [`SplitRow`]. Every tie is decided, with
    /// as many digits as it takes.
    ///
    /// Errors: those of [`ComingRow::ship_fixed`]; slices of two lengths.
    pub fn ship_split(&self, place: usize, whole: &mut [i32], rest: &mut [u32]) -> Result<()> {
        let (Motion::Exact(exact), Some(split)) = (&self.source.motion, &self.split) else {
            return Err(Error::argument(
                "row",
                "of two words",
                "the noise does not fit them, or is not exact",
            ));
        };
        if whole.len() != rest.len() {
            return Err(Error::WrongLength { name: "rest", actual: rest.len(), expected: whole.len() });
        }
        self.ship(place, whole, rest, |first, row, range, whole, rest| match row {
            Kept::Exact(row) => exact.ship_split(split, self.step, first, &row[range], whole, rest),
            Kept::Float(_) => Ok(()),
        })
    }

    /// Writes numbers of the row in single precision, from the coordinate at `place` on: times [`NoiseStream::scale`] they are added
    /// to a sum in double precision.
    ///
    /// Errors: those of [`ComingRow::ship_fixed`], but for a row in exact arithmetic.
    pub fn ship_float(&self, place: usize, to: &mut [f32]) -> Result<()> {
        if matches!(self.source.motion, Motion::Exact(_)) {
            return Err(Error::argument("row", "of float32", "the stream is in exact arithmetic"));
        }
        self.ship(place, to, &mut [(); 0], |_, row, range, to, _| {
            if let Kept::Float(row) = row {
                to.copy_from_slice(&row[range]);
            }
            Ok(())
        })
    }

    /// Shows the row piece by piece, each with its first coordinate and its share of one or two slices.
    fn ship<N: Send, M: Send>(
        &self,
        place: usize,
        to: &mut [N],
        second: &mut [M],
        copy: impl Fn(u64, Kept<'_>, Range<usize>, &mut [N], &mut [M]) -> Result<()> + Sync,
    ) -> Result<()> {
        if place.checked_add(to.len()).is_none_or(|end| end > self.length) {
            let expected = self.length.saturating_sub(place);
            return Err(Error::WrongLength { name: "row", actual: to.len(), expected });
        }
        let plan = self.source.plan(self.step);
        let (mut rest, mut rest_of_second, mut begin, mut jobs) = (to, second, 0, Vec::new());
        for (index, length) in self.source.lengths().iter().enumerate() {
            let first = place.max(begin);
            if first < begin + length && !rest.is_empty() {
                let count = (begin + length - first).min(rest.len());
                let (part, others) = std::mem::take(&mut rest).split_at_mut(count);
                let cut = count.min(rest_of_second.len());
                let (pair, others_of_second) = std::mem::take(&mut rest_of_second).split_at_mut(cut);
                jobs.push((index, first - begin..first - begin + count, part, pair));
                (rest, rest_of_second) = (others, others_of_second);
            }
            begin += length;
        }
        let one = |(index, range, part, pair): (usize, Range<usize>, &mut [N], &mut [M])| {
            let (first, mut copied) = (self.source.start(index) + range.start as u64, Ok(()));
            match self.source.show(index, &plan, |row| copied = copy(first, row, range, part, pair))? {
                true => copied,
                false => Err(Error::StepReused { step: self.step }),
            }
        };
        match self.threads {
            None => jobs.into_par_iter().try_for_each(one),
            Some(threads) => on_threads(threads.min(jobs.len()), jobs, one),
        }
    }
}

/// Does all jobs, in order of their beginnings, on the calling thread and others up to a number; the first error.
fn on_threads<J: Send>(threads: usize, jobs: Vec<J>, one: impl Fn(J) -> Result<()> + Sync) -> Result<()> {
    let jobs = Mutex::new(jobs.into_iter());
    let next = || jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || std::iter::from_fn(next).try_for_each(&one);
    thread::scope(|scope| {
        // With fewer threads than asked for it only takes longer.
        let spawn = |_| thread::Builder::new().name("dpmf-ship".into()).spawn_scoped(scope, work).ok();
        let others: Vec<_> = (1..threads).map_while(spawn).collect();
        let mine = work();
        let join = |other: ScopedJoinHandle<'_, Result<()>>| other.join().unwrap_or_else(|_| Err(torn()));
        others.into_iter().map(join).fold(mine, Result::and)
    })
}

/// Rows that dense engines compute together, so that one draw serves them all: 16, as long as they fit 64 MiB.
fn rows_ahead<T>(coordinates: u64) -> usize {
    const MOST: u128 = 16;
    const BYTES: u128 = 64 << 20;
    let row = u128::from(coordinates.next_multiple_of(PACKET as u64)) * size_of::<T>() as u128;
    (BYTES / row.max(1)).clamp(1, MOST) as usize
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
#[allow(clippy::single_range_in_vec_init, reason = "streams take lists of ranges")]
mod tests {
    use super::*;
    use crate::form::tree::Decoder;
    use crate::form::{Representation, Tree};
    use crate::identity::Identity;
    use crate::noise::engine::{Kernel, Packet};
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
        let ahead = rows_ahead::<f32>;
        assert_eq!((ahead(1), ahead(1 << 20), ahead(1 << 21)), (16, 16, 8));
        assert_eq!(ahead(1 << 30), 1);
    }

    /// Streams of both arithmetics over some ranges.
    fn calibrated(arithmetic: Arithmetic, ranges: &[Range<u64>]) -> NoiseStream {
        let problem =
            crate::Problem::new(crate::Workload::prefix_sum(9).unwrap(), Default::default()).unwrap();
        let mechanism = problem.mechanism("optimal".parse().unwrap(), &mut crate::factorize::quiet).unwrap();
        let mechanism = mechanism.calibrated(2.0, 1e-6, 1.0, Default::default()).unwrap();
        mechanism.stream_over(&NoiseKey::from_seed(3), RunId([7; 16]), ranges, arithmetic).unwrap()
    }

    fn next(stream: &mut NoiseStream) -> Vec<u64> {
        let mut row: Vec<f64> = (0..stream.len()).map(|j| (j % 17) as f64 * 0.01).collect();
        stream.add_next(&mut row).unwrap();
        row.iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn rows_made_ahead_are_the_same_whatever_comes_between() {
        let ranges = [5..150_000, 160_000..160_001, 170_000..300_000];
        for arithmetic in [Arithmetic::Exact, Arithmetic::Float] {
            let mut plain = calibrated(arithmetic, &ranges);
            let expected: Vec<_> = (0..9).map(|_| next(&mut plain)).collect();
            for threads in [1, 3] {
                let mut stream = calibrated(arithmetic, &ranges).ahead(threads);
                assert_eq!(stream.threads_ahead(), threads);
                // At once, with a part of the row made; after all of it was made; after a row that is passed over.
                assert_eq!(
                    (next(&mut stream), next(&mut stream)),
                    (expected[0].clone(), expected[1].clone())
                );
                stream.prepare().unwrap();
                stream.prepare().unwrap();
                assert_eq!(next(&mut stream), expected[2]);
                stream.skip().unwrap();
                stream.prepare().unwrap();
                stream.skip_to(6).unwrap();
                assert_eq!(next(&mut stream), expected[6]);
                // A state with a row in flight goes on anywhere.
                let saved = stream.checkpoint_bytes().unwrap();
                assert_eq!(saved, stream.checkpoint_bytes().unwrap());
                drop(stream);
                for resumed in [0, 2] {
                    let fresh = calibrated(arithmetic, &ranges).ahead(resumed);
                    let mut restored = fresh.restore_bytes(&saved).unwrap().ahead(resumed);
                    assert_eq!(restored.next_step(), 7);
                    let again = restored.checkpoint_bytes().unwrap();
                    assert_eq!(again, saved);
                    assert_eq!(next(&mut restored), expected[7]);
                    assert_eq!(next(&mut restored), expected[8]);
                    assert!(matches!(restored.prepare(), Err(Error::Exhausted { steps: 9 })));
                    restored.checkpoint_bytes().unwrap();
                }
                let other = calibrated(arithmetic, &[5..150_001, 160_001..160_002, 170_001..300_000]);
                assert!(matches!(other.restore_bytes(&saved).err(), Some(Error::Format { .. })));
            }
        }
    }

    #[test]
    fn no_thread_outlives_its_stream() {
        for wait in [false, true] {
            let stream = calibrated(Arithmetic::Exact, &[0..3_000_000]).ahead(3);
            if wait {
                stream.prepare().unwrap();
            }
            // Every thread holds the source as long as it runs.
            let source = Arc::downgrade(&stream.source);
            drop(stream);
            assert!(source.upgrade().is_none());
        }
        let at_its_end = {
            let mut stream = calibrated(Arithmetic::Float, &[0..100]).ahead(1);
            stream.skip_to(9).unwrap();
            Arc::downgrade(&stream.source)
        };
        assert!(at_its_end.upgrade().is_none());
    }

    #[test]
    fn ranges_are_parts_of_the_whole_row_and_in_order() {
        let zero = |stream: &mut NoiseStream| {
            let mut row = vec![0.0_f64; stream.len()];
            stream.add_next(&mut row).unwrap();
            row
        };
        let whole = zero(&mut calibrated(Arithmetic::Float, &[0..400]));
        let parts = zero(&mut calibrated(Arithmetic::Float, &[3..70, 130..131, 250..400]));
        assert_eq!(parts, [&whole[3..70], &whole[130..131], &whole[250..400]].concat());
        let problem =
            crate::Problem::new(crate::Workload::prefix_sum(9).unwrap(), Default::default()).unwrap();
        let mechanism =
            problem.mechanism("independent".parse().unwrap(), &mut crate::factorize::quiet).unwrap();
        let mechanism = mechanism.calibrated(2.0, 1e-6, 1.0, Default::default()).unwrap();
        let over = |ranges: &[Range<u64>]| {
            mechanism.stream_over(&NoiseKey::from_seed(3), RunId([7; 16]), ranges, Arithmetic::Float).err()
        };
        for bad in [&[][..], &[3..5, 4..6], &[9..12, 1..2], &[1..2, 3..3]] {
            assert!(matches!(over(bad), Some(Error::InvalidArgument { .. })), "{bad:?}");
        }
    }

    #[test]
    fn a_panic_while_a_row_is_made_ahead_halts_the_stream() {
        struct Breaks;
        impl Engine for Breaks {
            fn steps(&self) -> usize {
                2
            }
            fn buffers(&self) -> usize {
                0
            }
            fn kernel<'a>(&'a self, _: &'a Field, step: usize) -> Box<dyn Kernel + 'a> {
                Box::new(BreaksAt(step))
            }
        }
        struct BreaksAt(usize);
        impl Kernel for BreaksAt {
            fn run(&self, _: u64, _: &mut [Packet], _: &mut [Packet]) {
                assert_eq!(self.0, 0, "torn on purpose");
            }
        }
        let stream = NoiseStream::assemble(Box::new(Breaks), None, key(), 0..10, 1.0).unwrap();
        let mut stream = stream.ahead(1);
        stream.add_next(&mut [0.0_f32; 10]).unwrap();
        // Nobody but the thread runs the second step.
        while stream.source.lock(0).is_ok() {
            std::thread::yield_now();
        }
        assert!(matches!(stream.add_next(&mut [0.0_f32; 10]), Err(Error::Halted { .. })));
        assert!(matches!(stream.skip(), Err(Error::Halted { .. })));
        assert!(matches!(stream.checkpoint_bytes(), Err(Error::Halted { .. })));
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
