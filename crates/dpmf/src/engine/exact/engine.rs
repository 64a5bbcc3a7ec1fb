//! Correctly rounded rows: double precision for all coordinates, more digits for the few that are close to a tie.

use super::elementary::{Length, Tables};
use super::field::{ExactField, ExactRow};
use super::fixed::{Ball, Fixed};
use super::fused::{Arithmetic, dispatch_fused};
use super::normal::GROUP;
use super::program::{Assignment, DoubleStep, OUTPUT, Place, Program, StepBound, analyse};
use crate::engine::{PACKET, Shard, Sink, Target};
use crate::error::{Error, Result};
use crate::simd::dispatch;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One buffer's share of a packet.
pub(crate) type Packet = [f64; PACKET];

/// Packets that are drawn and moved on together, as long as their draws are few.
const PIECE: usize = 8;

/// Bytes of draws that a thread holds at a time.
const DRAWN: usize = 1 << 18;

/// Packets in a tile, the unit that threads take.
const TILE: u64 = 64;

/// Numbers that are split into words together.
const SPLIT: usize = 256;

/// Share of coordinates that may need more digits at a step.
const MOST_DOUBTFUL: f64 = 1.0 / 64.0;

/// How noise becomes what is released: `y = q ⌊(g + scale · u)/q⌉`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rounding {
    /// The factor of the noise, exactly.
    pub(crate) scale: f32,
    /// `q = 2^exponent`.
    pub(crate) exponent: i32,
}

impl Rounding {
    /// `scale/q`.
    fn factor(self) -> f64 {
        f64::from(self.scale) * 2.0_f64.powi(-self.exponent)
    }

    /// Distance from a tie, in units of `q`, within which double precision decides nothing at a step.
    ///
    /// `x = φ + factor · u` for a fraction `φ` of at most ½: the error of `u`, and one unit roundoff of the product and
    /// of the sum.
    fn doubt(self, bound: StepBound) -> f64 {
        let factor = self.factor();
        (factor * bound.error + f64::EPSILON * (factor * bound.size + 1.0)) * (1.0 + 1e-9)
    }
}

/// The rows of a program, rounded to a grid; whoever runs it has the state.
pub(crate) struct ExactEngine {
    program: Box<dyn Program>,
    field: ExactField,
    rounding: Rounding,
    /// For every step, the size of the noise and of its error, and how single errors add up.
    bounds: Vec<StepBound>,
    /// For every step, [`Rounding::doubt`].
    doubts: Vec<f64>,
    /// Coordinates that took the slow path so far.
    resolved: AtomicU64,
    /// Added to the noise in double precision, in units of the grid: for tests that plant an error.
    #[cfg(test)]
    pub(super) planted: f64,
}

/// What all segments of a step share.
pub(crate) struct ExactStep {
    index: usize,
    double: DoubleStep,
    rows: Vec<ExactRow>,
}

impl ExactEngine {
    /// Errors: [`Error::Unsupported`] where the coefficients are such that double precision would decide little.
    pub(crate) fn new(program: Box<dyn Program>, field: ExactField, rounding: Rounding) -> Result<Self> {
        let bounds = analyse(&*program)?;
        let doubts: Vec<f64> = bounds.iter().map(|bound| rounding.doubt(*bound)).collect();
        let most = doubts.iter().copied().fold(0.0, f64::max);
        if most.is_nan() || most > 0.5 * MOST_DOUBTFUL {
            return Err(Error::Unsupported {
                what: format!(
                    "exact noise for these coefficients, which double precision only knows to within {most:.1e}"
                ),
                hint: "rounding errors add up to too much relative to the noise; use float arithmetic",
            });
        }
        Ok(Self {
            program,
            field,
            rounding,
            bounds,
            doubts,
            resolved: AtomicU64::new(0),
            #[cfg(test)]
            planted: 0.0,
        })
    }

    pub(crate) fn steps(&self) -> usize {
        self.program.steps()
    }

    pub(crate) fn buffers(&self) -> usize {
        self.program.buffers()
    }

    pub(crate) fn rounding(&self) -> Rounding {
        self.rounding
    }

    /// Coordinates that were computed again with more digits so far.
    pub(crate) fn resolved(&self) -> u64 {
        self.resolved.load(Relaxed)
    }

    /// The share of coordinates that a step may be expected to compute again, at most.
    pub(crate) fn expected_doubtful(&self, step: usize) -> f64 {
        2.0 * self.doubts[step]
    }

    /// What all segments of a step share.
    pub(crate) fn step(&self, t: usize) -> ExactStep {
        let step = self.program.step(t);
        let rows = step.draws.iter().map(|draw| self.field.row(draw.row)).collect();
        ExactStep { index: t, double: DoubleStep::from(&step), rows }
    }

    /// Moves the state of a segment past a step, on the calling thread.
    ///
    /// Errors: [`Error::Halted`] where 512 binary digits do not tell a number from a tie, whose probability is below
    /// 2⁻⁴⁰⁰ unless a coefficient is out of all proportion.
    pub(crate) fn advance<T: Target>(
        &self,
        step: &ExactStep,
        segment: &Shard,
        state: &mut [Packet],
        mut sink: Sink<'_, T, f64>,
    ) -> Result<()> {
        let (rows, buffers) = (&step.rows, self.program.buffers());
        let piece = (DRAWN / size_of::<Packet>() / rows.len().max(1)).clamp(1, PIECE);
        let work = self.work(step.index);
        let zeros = |count: usize| vec![[0.0; PACKET]; count];
        let (mut draws, mut scratch) = (zeros(piece * rows.len().max(1)), zeros(self.program.scratch()));
        for tile in segment.tiles(TILE) {
            let mut place = tile.place;
            for (p, state) in packets(tile.of(state, buffers), tile.count, buffers).enumerate() {
                if p % piece == 0 {
                    let count = piece.min(tile.count - p);
                    for (row, draws) in rows.iter().zip(draws.chunks_exact_mut(piece)) {
                        let (groups, _) = draws[..count].as_flattened_mut().as_chunks_mut();
                        row.fill_groups((tile.first + p as u64) * (PACKET / GROUP) as u64, groups);
                    }
                }
                let sources = Sources { draws: &draws, piece, at: p % piece };
                combine(&step.double, sources, state, &mut scratch);
                let lanes = tile.lanes(p);
                let (noise, length) = (&scratch[0][lanes.clone()], lanes.len());
                match &mut sink {
                    Sink::Skip => {}
                    Sink::Keep(row) => row[place..][..length].copy_from_slice(noise),
                    Sink::Add(values) => {
                        let first = (tile.first + p as u64) * PACKET as u64 + lanes.start as u64;
                        self.release(&work, noise, first, values, place)?;
                    }
                }
                place += length;
            }
        }
        Ok(())
    }

    /// Adds a row that was kept to the numbers of a segment.
    ///
    /// Errors: those of [`ExactEngine::advance`].
    pub(crate) fn add_kept<T: Target>(
        &self,
        t: usize,
        segment: &Shard,
        row: &[f64],
        values: &mut T,
    ) -> Result<()> {
        let work = self.work(t);
        for (index, noise) in row.chunks(PACKET).enumerate() {
            let place = index * PACKET;
            self.release(&work, noise, segment.coordinates().start + place as u64, values, place)?;
        }
        Ok(())
    }

    fn work(&self, t: usize) -> Work {
        #[cfg(test)]
        let planted = self.planted / self.rounding.factor();
        #[cfg(not(test))]
        let planted = 0.0;
        Work { index: t, rounding: self.rounding, doubt: self.doubts[t], planted }
    }

    /// Adds noise to a packet of numbers or less.
    fn release<T: Target>(
        &self,
        work: &Work,
        noise: &[f64],
        first: u64,
        values: &mut T,
        place: usize,
    ) -> Result<()> {
        let mut numbers = [0.0; PACKET];
        values.load(place, 2.0_f64.powi(-self.rounding.exponent), &mut numbers[..noise.len()]);
        let again = work.release(noise, &mut numbers, |lane, fraction| {
            self.resolve(work.index, first + lane as u64, fraction)
        })?;
        values.store(place, &numbers[..noise.len()]);
        if again > 0 {
            self.resolved.fetch_add(again, Relaxed);
        }
        Ok(())
    }

    /// How rows are shipped as whole numbers, to be added to sums in units of `2^exponent`; nothing where they do not fit.
    pub(crate) fn fixed_point(&self, exponent: i32) -> Option<FixedPoint> {
        FixedPoint::new(self.rounding, &self.bounds, exponent)
    }

    /// Noise in units of `2^fixed.exponent`, rounded.
    pub(crate) fn ship(&self, fixed: &FixedPoint, noise: &[f64], to: &mut [i64]) {
        let factor = f64::from(self.rounding.scale) * 2.0_f64.powi(-fixed.exponent);
        to.iter_mut().zip(noise).for_each(|(to, noise)| *to = (noise * factor).round_ties_even() as i64);
    }

    /// How rows are split into words of 32 bits, to be added to sums in units of `2^exponent`; nothing where they do not fit.
    pub(crate) fn split(&self, exponent: i32) -> Option<SplitRow> {
        SplitRow::new(self.rounding, &self.bounds, exponent)
    }

    /// Noise of consecutive coordinates from `first` on as the two words of a [`SplitRow`].
    ///
    /// Errors: those of [`ExactEngine::advance`].
    pub(crate) fn ship_split(
        &self,
        split: &SplitRow,
        t: usize,
        first: u64,
        noise: &[f64],
        whole: &mut [i32],
        rest: &mut [u32],
    ) -> Result<()> {
        let unit = Rounding { exponent: split.exponent, ..self.rounding };
        let (factor, doubt) = (unit.factor(), unit.doubt(self.bounds[t]));
        let mut again = 0;
        let blocks = noise.chunks(SPLIT).zip(whole.chunks_mut(SPLIT)).zip(rest.chunks_mut(SPLIT));
        for (block, ((noise, whole), rest)) in blocks.enumerate() {
            if split_block(noise, factor, doubt, split.shift, whole, rest) == 0 {
                continue;
            }
            let doubtful = |lane: &usize| !clear(noise[*lane] * factor, doubt);
            for lane in (0..noise.len()).filter(doubtful) {
                again += 1;
                // ⌊x⌋ = ⌊x − ½⌉ for what is not whole.
                let floor = self.resolve_in(unit, t, first + (block * SPLIT + lane) as u64, -0.5)?;
                whole[lane] = (floor >> split.shift) as i32;
                rest[lane] = (floor & ((1 << split.shift) - 1)) as u32;
            }
        }
        if again > 0 {
            self.resolved.fetch_add(again, Relaxed);
        }
        Ok(())
    }

    /// What one coordinate of a sum becomes at a step, in units of the grid; the sum is in units of `unit`.
    ///
    /// Errors: those of [`ExactEngine::advance`].
    pub(crate) fn resolve_sum(&self, t: usize, coordinate: u64, sum: i64, unit: f64) -> Result<i64> {
        let mut parts = Parts { whole: [0.0; PACKET], fraction: [0.0; PACKET], nearest: [0.0; PACKET] };
        parts.whole[0] = sum as f64 * unit * 2.0_f64.powi(-self.rounding.exponent);
        round(&[0.0; PACKET], 0.0, &mut parts);
        self.resolved.fetch_add(1, Relaxed);
        Ok(parts.whole[0] as i64 + self.resolve(t, coordinate, parts.fraction[0])?)
    }

    /// `⌊φ + scale/q · u⌉` of one coordinate, with as many digits as it takes.
    fn resolve(&self, t: usize, coordinate: u64, fraction: f64) -> Result<i64> {
        self.resolve_in(self.rounding, t, coordinate, fraction)
    }

    /// The same on any grid.
    #[cold]
    fn resolve_in(&self, rounding: Rounding, t: usize, coordinate: u64, fraction: f64) -> Result<i64> {
        if let Some(whole) = self.nearest::<3>(rounding, t, coordinate, fraction) {
            return Ok(whole);
        }
        if let Some(whole) = self.nearest::<5>(rounding, t, coordinate, fraction) {
            return Ok(whole);
        }
        self.nearest::<9>(rounding, t, coordinate, fraction).ok_or_else(|| Error::Halted {
            reason: format!("512 digits do not decide how to round coordinate {coordinate} of step {t}"),
        })
    }

    pub(super) fn nearest<const L: usize>(
        &self,
        rounding: Rounding,
        t: usize,
        coordinate: u64,
        fraction: f64,
    ) -> Option<i64>
    where
        Tables<L>: Length,
    {
        let noise = replay::<L>(&*self.program, &self.field, self.bounds[t].gain, t, coordinate);
        let scaled =
            Ball::from_f64(f64::from(rounding.scale)).times(&noise).times_power_of_two(-rounding.exponent);
        scaled.plus(&Ball::from_f64(fraction)).nearest()
    }
}

/// The noise of one coordinate at step `t`, drawn and computed again from the first step on that it depends on; `gain` is
/// that of [`StepBound`].
pub(super) fn replay<const L: usize>(
    program: &dyn Program,
    field: &ExactField,
    gain: f64,
    t: usize,
    coordinate: u64,
) -> Ball<L>
where
    Tables<L>: Length,
{
    let mut buffers = vec![Fixed::<L>::ZERO; program.buffers()];
    let mut scratch = vec![Fixed::<L>::ZERO; program.scratch()];
    // The largest error of a draw, or of an assignment whose sources are as they stand: how errors travel further is known.
    let mut single = 0.0_f64;
    for i in program.origin(t)..=t {
        let step = program.step(i);
        let draws: Vec<Ball<L>> =
            step.draws.iter().map(|draw| field.row(draw.row).number(coordinate)).collect();
        single = draws.iter().fold(single, |single, draw| single.max(draw.radius));
        for Assignment { to, terms } in &step.assignments {
            let mut sum = Ball::ZERO;
            for (place, weight) in terms {
                let value = match *place {
                    Place::Draw(k) => draws[k].middle,
                    Place::Buffer(k) => buffers[k],
                    Place::Scratch(k) => scratch[k],
                };
                sum = sum.plus(&weight.ball().times(&Ball::exact(value)));
            }
            single = single.max(sum.radius);
            match *to {
                Place::Buffer(k) => buffers[k] = sum.middle,
                // No step assigns to a draw.
                Place::Scratch(k) | Place::Draw(k) => scratch[k] = sum.middle,
            }
        }
    }
    let Place::Scratch(output) = OUTPUT else { return Ball::ZERO };
    Ball { middle: scratch[output], radius: gain * single * (1.0 + 1e-9) }
}

/// The state of a tile, packet by packet; of one without buffers, empty ones.
fn packets(state: &mut [Packet], count: usize, buffers: usize) -> impl Iterator<Item = &mut [Packet]> {
    let mut rest = state;
    (0..count).map(move |_| {
        let (own, tail) = std::mem::take(&mut rest).split_at_mut(buffers);
        rest = tail;
        own
    })
}

/// The draws of a packet among those of a piece.
#[derive(Clone, Copy)]
struct Sources<'a> {
    draws: &'a [Packet],
    piece: usize,
    at: usize,
}

/// Lanes that are combined at a time: eight vectors of four.
const LANES: usize = 32;

#[inline(always)]
fn combine_any<A: Arithmetic>(
    step: &DoubleStep,
    sources: Sources<'_>,
    state: &mut [Packet],
    scratch: &mut [Packet],
) {
    for (to, terms) in &step.assignments {
        for begin in (0..PACKET).step_by(LANES) {
            let mut sum = [0.0; LANES];
            for (place, weight) in terms {
                let from = match *place {
                    Place::Draw(k) => &sources.draws[k * sources.piece + sources.at],
                    Place::Buffer(k) => &state[k],
                    Place::Scratch(k) => &scratch[k],
                };
                let from = &from[begin..begin + LANES];
                for l in 0..LANES {
                    sum[l] = A::mul_add(*weight, from[l], sum[l]);
                }
            }
            let to = match *to {
                Place::Buffer(k) => &mut state[k],
                Place::Scratch(k) | Place::Draw(k) => &mut scratch[k],
            };
            to[begin..begin + LANES].copy_from_slice(&sum);
        }
    }
}

dispatch_fused! {
    fn combine / combine_portable / combine_wide = combine_any(
        step: &DoubleStep, sources: Sources<'_>, state: &mut [Packet], scratch: &mut [Packet],
    );
}

/// The rounding of one step.
struct Work {
    index: usize,
    rounding: Rounding,
    doubt: f64,
    planted: f64,
}

impl Work {
    /// Replaces a packet's numbers, in units of the grid, by what is released, and says how many were resolved with more
    /// digits.
    fn release(
        &self,
        noise: &[f64],
        numbers: &mut Packet,
        resolve: impl Fn(usize, f64) -> Result<i64>,
    ) -> Result<u64> {
        let factor = self.rounding.factor();
        let mut parts = Parts { whole: *numbers, fraction: [0.0; PACKET], nearest: [0.0; PACKET] };
        let mut padded = [0.0; PACKET];
        padded[..noise.len()].copy_from_slice(noise);
        if self.planted != 0.0 {
            padded.iter_mut().for_each(|u| *u += self.planted);
        }
        let farthest = round(&padded, factor, &mut parts);
        let mut again = 0;
        if farthest >= 0.5 - self.doubt {
            for lane in 0..noise.len() {
                let x = parts.fraction[lane] + factor * padded[lane];
                if (x - parts.nearest[lane]).abs() >= 0.5 - self.doubt {
                    parts.nearest[lane] = resolve(lane, parts.fraction[lane])? as f64;
                    again += 1;
                }
            }
        }
        let q = 2.0_f64.powi(self.rounding.exponent);
        for (l, number) in numbers.iter_mut().enumerate() {
            // A sum beyond 2⁵³ is rounded once more: a function of the whole number, so nothing is lost.
            *number = (parts.whole[l] + parts.nearest[l]) * q;
        }
        Ok(again)
    }
}

/// Rows of noise as whole numbers `W` in units of `2^exponent`, for a device that adds them to a sum `S` and rounds with
/// integers alone.
///
/// With `T = S·2^lift + W`, the release is `⌊T/2^shift⌉` in units of the grid wherever `T` is farther than
/// [`FixedPoint::doubt`] from an odd multiple of `2^(shift−1)`; elsewhere it takes more digits.
///
/// Guarantee: `|S| ≤ 2⁵³` implies `|T| + 2^shift < 2⁶³`, and a release is below 2⁵³ in units of the grid.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FixedPoint {
    /// `u = 2^exponent`.
    pub(crate) exponent: i32,
    /// `s = 2^lift u` for the unit `s` of sums.
    pub(crate) lift: u32,
    /// `q = 2^shift u` for the grid `q`.
    pub(crate) shift: u32,
    doubts: Vec<i64>,
}

impl FixedPoint {
    /// Bits that sums leave in an `i64`.
    const MOST_LIFT: i32 = 9;

    fn new(rounding: Rounding, bounds: &[StepBound], sums: i32) -> Option<Self> {
        let scale = f64::from(rounding.scale);
        let largest = scale * bounds.iter().map(|bound| bound.size + bound.error).fold(0.0, f64::max);
        let fits = |lift: &i32| largest * 2.0_f64.powi(lift - sums) <= 2.0_f64.powi(61);
        let lift = (0..=Self::MOST_LIFT).rev().find(fits)?;
        let (exponent, shift) = (sums - lift, rounding.exponent - sums + lift);
        // Sums are on a grid eight times finer at least, and releases in f64 are exact.
        if !(lift + 3..=60).contains(&shift) || shift < 11 {
            return None;
        }
        let factor = scale * 2.0_f64.powi(-exponent);
        // The error of the noise, one rounding of the product, and half a unit; one more for comparisons.
        let doubt = |bound: &StepBound| {
            (factor * bound.error + f64::EPSILON * factor * bound.size + 0.5) * (1.0 + 1e-9) + 1.0
        };
        let doubts: Vec<i64> = bounds.iter().map(|bound| doubt(bound).ceil() as i64).collect();
        let most = doubts.iter().copied().max().unwrap_or(0);
        (most as f64 * 2.0_f64.powi(-(shift)) <= 0.5 * MOST_DOUBTFUL).then_some(Self {
            exponent,
            lift: lift as u32,
            shift: shift as u32,
            doubts,
        })
    }

    /// Distance from a tie, in units of `u`, within which a step is in doubt.
    pub(crate) fn doubt(&self, t: usize) -> i64 {
        self.doubts[t]
    }
}

/// Rows of noise `w` as two words `A` and `R`, `⌊w/s⌋ = A·2^shift + R` with `0 ≤ R < 2^shift`, for a device that adds them to a sum
/// `S` in units of `s = 2^exponent` and rounds to the grid `q = 2^shift s`.
///
/// The release is `⌊(Ss + w)/q⌉ = ⌊(S + ⌊w/s⌋)/2^shift + ½⌋`, whatever `S` is: ties are at whole multiples of `s`, since `shift ≥ 3`,
/// and `w/s`, which is whole with probability zero, lies strictly between two whole numbers, as does `S + w/s`. So all ties are decided
/// by `⌊w/s⌋`, before the sum is known, and a device needs no digit more. With `S = G·2^shift + φ` it is
///
/// ```text
/// A + G + [φ + R ≥ 2^(shift−1)],    −2^(shift−1) ≤ φ ≤ 2^(shift−1).
/// ```
///
/// Guarantee: `3 ≤ shift ≤ 31` and `|A| < 2²⁹`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SplitRow {
    /// `s = 2^exponent`.
    pub exponent: i32,
    /// `q = 2^shift s`.
    pub shift: u32,
}

impl SplitRow {
    fn new(rounding: Rounding, bounds: &[StepBound], exponent: i32) -> Option<Self> {
        let shift = rounding.exponent - exponent;
        let unit = Rounding { exponent, ..rounding };
        let doubt = bounds.iter().map(|bound| unit.doubt(*bound)).fold(0.0, f64::max);
        let largest = bounds.iter().map(|bound| bound.size + bound.error).fold(0.0, f64::max);
        let fits = (3..=31).contains(&shift)
            && doubt <= 0.5 * MOST_DOUBTFUL
            && largest * rounding.factor() < 2.0_f64.powi(29);
        fits.then_some(Self { exponent, shift: shift as u32 })
    }
}

/// Whether double precision tells which whole numbers `x` lies between.
#[inline(always)]
fn clear(x: f64, doubt: f64) -> bool {
    let fraction = x - x.floor();
    fraction > doubt && fraction < 1.0 - doubt
}

/// The two words of noise that is clear, in double precision throughout: `⌊⌊x⌋/2^shift⌋` and what is left over are exact, and both
/// fit in 32 bits. Returns how many numbers are not clear.
#[inline(always)]
fn split_block_any(
    noise: &[f64],
    factor: f64,
    doubt: f64,
    shift: u32,
    whole: &mut [i32],
    rest: &mut [u32],
) -> u32 {
    let (grid, over) = ((1_u64 << shift) as f64, 1.0 / (1_u64 << shift) as f64);
    let mut doubtful = 0;
    for ((noise, whole), rest) in noise.iter().zip(whole).zip(rest) {
        let x = noise * factor;
        let below = x.floor();
        let upper = (below * over).floor();
        doubtful += u32::from(!clear(x, doubt));
        *whole = upper as i32;
        *rest = (below - upper * grid) as i32 as u32;
    }
    doubtful
}

dispatch! {
    fn split_block / split_block_portable / split_block_avx2 = split_block_any(
        noise: &[f64], factor: f64, doubt: f64, shift: u32, whole: &mut [i32], rest: &mut [u32],
    ) -> u32;
}

/// `g/q` as a whole number and a fraction, and `⌊fraction + noise⌉`.
struct Parts {
    whole: Packet,
    fraction: Packet,
    nearest: Packet,
}

/// Nearest whole number for |x| < 2⁵¹, in vectors on every machine.
#[inline(always)]
fn whole(x: f64) -> f64 {
    const SHIFT: f64 = 6_755_399_441_055_744.0; // 1.5·2⁵²
    (x + SHIFT) - SHIFT
}

/// Splits `g/q`, given in `whole`, adds the noise and rounds. Returns the largest distance from a whole number.
#[inline(always)]
fn round_any<A: Arithmetic>(noise: &Packet, factor: f64, parts: &mut Parts) -> f64 {
    const LARGE: f64 = 1_125_899_906_842_624.0; // 2⁵⁰
    let mut farthest = [0.0_f64; 4];
    for l in 0..PACKET {
        // Pulling a coordinate back into a range brings no two inputs further apart.
        let g = parts.whole[l].clamp(-LARGE, LARGE);
        let near = whole(g);
        let fraction = g - near;
        let x = fraction + factor * noise[l];
        let nearest = whole(x);
        let distance = (x - nearest).abs();
        farthest[l % 4] = if distance > farthest[l % 4] { distance } else { farthest[l % 4] };
        parts.whole[l] = near;
        parts.fraction[l] = fraction;
        parts.nearest[l] = nearest;
    }
    farthest.iter().copied().fold(0.0, f64::max)
}

dispatch_fused! {
    fn round / round_portable / round_wide = round_any(noise: &Packet, factor: f64, parts: &mut Parts) -> f64;
}
