//! A stream as arithmetic: what a form computes at a step, said once, for every precision.
//!
//! The steps of all forms are sequences of linear assignments over rows of noise that are drawn, buffers that stay, and
//! scratch that does not. Said so, one step can be run in double precision for a whole model, in fixed-point arithmetic
//! of any length for one coordinate, and over bounds, for all coordinates at once.

use super::fixed::Ball;
use super::normal;
use crate::error::{Error, Result};

/// Where a number of a coordinate stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// One of the draws of a step.
    Draw(usize),
    /// What stays from one step to the next; zero at first.
    Buffer(usize),
    /// What is forgotten after the step; the noise of the step ends in [`OUTPUT`].
    Scratch(usize),
}

/// The scratch place in which a step leaves its noise.
pub const OUTPUT: Place = Place::Scratch(0);

/// A real number made of deployed coefficients.
#[derive(Clone, Debug, PartialEq)]
pub enum Weight {
    /// A coefficient.
    Single(f32),
    /// A sum of products of coefficients over a coefficient.
    Ratio(Box<Ratio>),
}

/// `Σ a b c / over`.
#[derive(Clone, Debug, PartialEq)]
pub struct Ratio {
    /// Three factors each.
    pub products: Vec<[f32; 3]>,
    /// What their sum is divided by; not zero.
    pub over: f32,
}

impl Weight {
    /// The weight in double precision, and how far that may be off.
    fn rounded(&self) -> (f64, f64) {
        match self {
            Weight::Single(weight) => (f64::from(*weight), 0.0),
            Weight::Ratio(ratio) => {
                let product = |p: &[f32; 3]| p.iter().map(|x| f64::from(*x)).product::<f64>();
                let over = f64::from(ratio.over);
                let sum: f64 = ratio.products.iter().map(product).sum();
                let size: f64 = ratio.products.iter().map(|p| product(p).abs()).sum();
                // Two roundings a product, one a sum, one the quotient; each 2⁻⁵³ of something below the size.
                let error = size / over.abs() * (ratio.products.len() + 4) as f64 * f64::EPSILON;
                (sum / over, error)
            }
        }
    }

    /// The weight with more digits.
    pub(super) fn ball<const L: usize>(&self) -> Ball<L> {
        match self {
            Weight::Single(weight) => Ball::from_f64(f64::from(*weight)),
            Weight::Ratio(ratio) => {
                let product = |p: &[f32; 3]| {
                    // The product of two coefficients is a double-precision number.
                    let two = Ball::from_f64(f64::from(p[0]) * f64::from(p[1]));
                    two.times(&Ball::from_f64(f64::from(p[2])))
                };
                let sum = ratio.products.iter().fold(Ball::ZERO, |sum, p| sum.plus(&product(p)));
                let over = f64::from(ratio.over);
                let exponent = ((over.abs().to_bits() >> 52) as i32) - 1023;
                let reciprocal = Ball::from_f64(over.abs()).times_power_of_two(-exponent).reciprocal();
                let quotient = sum.times(&reciprocal).times_power_of_two(-exponent);
                if over < 0.0 { quotient.negated() } else { quotient }
            }
        }
    }
}

/// `to ← Σ weight · place`, added up in this order.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    /// What changes: a buffer or a scratch place.
    pub to: Place,
    /// What it becomes the sum of; it may be among them.
    pub terms: Vec<(Place, Weight)>,
}

/// A row of noise that a step draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// Its number.
    pub row: u64,
    /// Which time it is drawn: rows that come again have another number here, and within one number no buffer joins a row
    /// that it has seen before.
    pub time: usize,
}

impl Draw {
    /// A row that is drawn for the first time.
    pub fn first(row: usize) -> Self {
        Self { row: row as u64, time: 0 }
    }
}

/// One step: the assignments one after the other, each seeing what those before have left.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// The rows of noise.
    pub draws: Vec<Draw>,
    /// What is done with them.
    pub assignments: Vec<Assignment>,
}

impl Step {
    /// Adds `to ← Σ weight · place` with coefficients as weights, those that are zero left out.
    pub fn assign(&mut self, to: Place, terms: impl IntoIterator<Item = (Place, f32)>) {
        let terms = terms.into_iter().filter(|(_, weight)| *weight != 0.0);
        let terms = terms.map(|(place, weight)| (place, Weight::Single(weight))).collect();
        self.assignments.push(Assignment { to, terms });
    }
}

/// The steps of a form.
pub trait Program: Send + Sync {
    /// Number of steps `n`.
    fn steps(&self) -> usize;

    /// Buffers that stay.
    fn buffers(&self) -> usize;

    /// Scratch places that a step uses, [`OUTPUT`] included.
    fn scratch(&self) -> usize {
        1
    }

    /// What is computed at step `t`.
    fn step(&self, t: usize) -> Step;

    /// The first step whose computation the noise of step `t` depends on.
    fn origin(&self, t: usize) -> usize {
        let _ = t;
        0
    }
}

/// What is known of the noise of a step, for every coordinate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepBound {
    /// The noise in double precision is within this of the real number.
    pub(crate) error: f64,
    /// No real number is larger, nor in double precision.
    pub(crate) size: f64,
    /// The noise is off by at most this times `ι`, where every draw, and every assignment on its own, is off by at most `ι`.
    pub(crate) gain: f64,
}

/// Standard deviations within which every number is taken to lie.
///
/// That one does not has a probability below 2⁻¹⁹⁸; for ten numbers of each of 10⁹ coordinates at each of 10⁶ steps
/// together, below 2⁻¹⁴⁴. It is the only event in which a bound here may fail.
const DEVIATIONS: f64 = 16.5;

/// Bounds on every step of a program.
///
/// Two recursions run beside each other. One is that of the covariances of all places, of which the standard deviations,
/// and with [`DEVIATIONS`] of them sizes, follow. The other is that of the [errors](Errors): what an assignment inherits by
/// its weights, and one unit roundoff of every product and of every partial sum.
///
/// Rows that are regenerated are correlated with what the buffers hold. The noise is then the sum of what it would be with
/// each [time](Draw::time) alone, each free of such correlations; their deviations are added.
///
/// Cost: a few products of matrices as large as the buffers are many, at every step.
/// Errors: [`Error::Numerical`] where a bound is not finite.
pub(crate) fn analyse(program: &dyn Program) -> Result<Vec<StepBound>> {
    let kept = program.buffers() + program.scratch();
    let index = |place: Place| match place {
        Place::Buffer(k) => k,
        Place::Scratch(k) => program.buffers() + k,
        Place::Draw(i) => kept + i,
    };
    let mut covariances: Vec<Covariance> = Vec::new();
    let (mut double, mut unit) = (Errors::new(kept, normal::ERROR), Errors::new(kept, 1.0));
    let mut bounds = Vec::with_capacity(program.steps());
    let mut terms: Vec<(usize, f64)> = Vec::new();
    for t in 0..program.steps() {
        let step = program.step(t);
        let times = step.draws.iter().map(|draw| draw.time + 1).max().unwrap_or(0);
        while covariances.len() < times {
            covariances.push(Covariance::new(kept));
        }
        covariances.iter_mut().for_each(|covariance| covariance.begin(step.draws.len()));
        double.begin(step.draws.len());
        unit.begin(step.draws.len());
        let mut bound = StepBound { error: 0.0, size: 0.0, gain: 0.0 };
        for assignment in &step.assignments {
            let to = index(assignment.to);
            let (mut own, mut rounding, mut partial) = (0.0, 0.0, 0.0);
            terms.clear();
            for (place, weight) in &assignment.terms {
                let (weight, uncertain) = weight.rounded();
                let at = index(*place);
                let size = match place {
                    Place::Draw(_) => normal::LARGEST,
                    _ => DEVIATIONS * covariances.iter().map(|c| c.deviations[at]).sum::<f64>(),
                } + double.of(at);
                own += uncertain * size;
                partial += weight.abs() * size;
                // A product with a power of two is exact.
                let product = if weight.to_bits() << 12 == 0 { 0.0 } else { weight.abs() * size };
                rounding += product + partial;
                terms.push((at, weight));
            }
            let mut deviation = 0.0;
            for (time, covariance) in covariances.iter_mut().enumerate() {
                let fresh = |i: usize| if step.draws[i].time == time { 1.0 } else { 0.0 };
                deviation += covariance.assign(to, &terms, fresh, 0.0);
            }
            // The last partial sum is the result, of which more is known.
            let inherited = double.inherited(&terms);
            let result = (DEVIATIONS * deviation + inherited + own).min(partial);
            own += 0.5 * f64::EPSILON * (rounding + result - partial);
            // Double precision itself rounds, and very small numbers lose more than their last place.
            let error = double.assign(to, &terms, own * (1.0 + 1e-9) + 1e-290);
            let gain = unit.assign(to, &terms, 1.0);
            if assignment.to == OUTPUT {
                bound = StepBound { error, size: (result + error) * (1.0 + 1e-9), gain };
            }
        }
        if !(bound.error.is_finite() && bound.size.is_finite() && bound.gain.is_finite()) {
            return Err(Error::Numerical {
                what: "bound on the rounding of the noise",
                index: t,
                reason: "the coefficients leave the range of double precision",
            });
        }
        bounds.push(bound);
    }
    Ok(bounds)
}

/// Bounds on the errors of all places, each a sum `Σ_s r_s e_s` of single errors `e_s`, of which sizes are known.
///
/// The triangle inequality, place by place, is one bound. It grows without limit where weights of both signs hold a recursion
/// together. Cauchy's inequality is the other: `√(number of errors) · √(Σ_s r_s² e_s²)`, and the second root is the
/// deviation that the errors would have if they were independent, which a covariance recursion gives.
struct Errors {
    /// That of a draw.
    draw: f64,
    largest: Vec<f64>,
    spread: Covariance,
    count: f64,
    net: Vec<f64>,
}

impl Errors {
    fn new(kept: usize, draw: f64) -> Self {
        Self {
            draw,
            largest: vec![0.0; kept],
            spread: Covariance::new(kept),
            count: 0.0,
            net: vec![0.0; kept],
        }
    }

    fn begin(&mut self, draws: usize) {
        self.spread.begin(draws);
        self.net.resize(self.largest.len() + draws, 0.0);
        self.count += draws as f64;
    }

    /// The bound for a place.
    fn of(&self, at: usize) -> f64 {
        self.largest.get(at).copied().unwrap_or(self.draw)
    }

    /// What the places of a sum hand on to it, by the triangle inequality.
    fn inherited(&mut self, terms: &[(usize, f64)]) -> f64 {
        // A place that comes twice, such as a state and its increment, hands its error on by the sum of its weights.
        terms.iter().for_each(|(at, weight)| self.net[*at] += weight);
        let handed =
            |at: usize, net: &mut f64| std::mem::take(net).abs() * self.largest.get(at).unwrap_or(&self.draw);
        terms.iter().map(|(at, _)| handed(*at, &mut self.net[*at])).sum()
    }

    /// `to ← Σ weight · place`, which adds an error of its own; returns the bound for it.
    fn assign(&mut self, to: usize, terms: &[(usize, f64)], own: f64) -> f64 {
        self.count += 1.0;
        let triangle = self.inherited(terms) + own;
        let draw = self.draw;
        let cauchy = self.spread.assign(to, terms, |_| draw, own * own) * self.count.sqrt();
        self.largest[to] = triangle.min(cauchy) * (1.0 + 1e-9);
        self.largest[to]
    }
}

/// Covariances of the kept places with each other and with the draws of the step.
struct Covariance {
    kept: usize,
    columns: usize,
    entries: Vec<f64>,
    deviations: Vec<f64>,
    row: Vec<f64>,
}

impl Covariance {
    fn new(kept: usize) -> Self {
        Self {
            kept,
            columns: kept,
            entries: vec![0.0; kept * kept],
            deviations: vec![0.0; kept],
            row: vec![],
        }
    }

    /// Forgets the draws of the last step.
    fn begin(&mut self, draws: usize) {
        let (kept, columns) = (self.kept, self.kept + draws);
        if columns != self.columns {
            let mut entries = vec![0.0; kept * columns];
            for (to, from) in entries.chunks_exact_mut(columns).zip(self.entries.chunks_exact(self.columns)) {
                to[..kept].copy_from_slice(&from[..kept]);
            }
            (self.entries, self.columns) = (entries, columns);
        } else if draws > 0 {
            self.entries.chunks_exact_mut(columns).for_each(|row| row[kept..].fill(0.0));
        }
    }

    /// `to ← Σ weight · place` and something independent of the given variance; `draw` is the deviation of each draw.
    /// Returns the deviation of the result, rounded up.
    fn assign(
        &mut self,
        to: usize,
        terms: &[(usize, f64)],
        draw: impl Fn(usize) -> f64,
        variance: f64,
    ) -> f64 {
        let (kept, columns) = (self.kept, self.columns);
        self.row.clear();
        self.row.resize(columns, 0.0);
        // What rounding of the covariances may hide, against the sizes of what was added up.
        let mut size = 0.0;
        for &(at, weight) in terms {
            if at < kept {
                let from = &self.entries[at * columns..][..columns];
                self.row.iter_mut().zip(from).for_each(|(row, from)| *row += weight * from);
                size += weight.abs() * self.deviations[at];
                continue;
            }
            let scaled = weight * draw(at - kept);
            if scaled != 0.0 {
                self.row[at] += scaled;
                for (x, row) in self.row[..kept].iter_mut().enumerate() {
                    *row += scaled * self.entries[x * columns + at];
                }
                size += scaled.abs();
            }
        }
        let share = |&(at, weight): &(usize, f64)| {
            let scale = if at < kept { 1.0 } else { draw(at - kept) };
            weight * scale * self.row[at]
        };
        let sum: f64 = terms.iter().map(share).sum();
        let deviation = (sum.max(0.0) + variance + 1e-9 * size * size).sqrt() * (1.0 + 1e-9);
        self.deviations[to] = deviation;
        self.row[to] = deviation * deviation;
        for x in 0..kept {
            self.entries[x * columns + to] = self.row[x];
        }
        self.entries[to * columns..][..columns].copy_from_slice(&self.row);
        deviation
    }
}

/// A step in double precision.
pub(crate) struct DoubleStep {
    pub(crate) assignments: Vec<(Place, Vec<(Place, f64)>)>,
}

impl From<&Step> for DoubleStep {
    fn from(step: &Step) -> Self {
        let double = |(place, weight): &(Place, Weight)| (*place, weight.rounded().0);
        let assignments =
            step.assignments.iter().map(|a| (a.to, a.terms.iter().map(double).collect())).collect();
        Self { assignments }
    }
}
