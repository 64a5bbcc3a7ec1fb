//! Privacy loss distributions: the Poisson-subsampled Gaussian, composed.
//!
//! A step that takes each record with probability `q`, in secret, and adds noise of multiplier σ is dominated by the
//! pair `P = (1 − q)N(0, σ²) + qN(1, σ²)` and `Q = N(0, σ²)`: by (P, Q) where a record is removed, by (Q, P) where one is
//! added. Rounds, adaptively chosen, are dominated by the products of their pairs. With the loss `S = Σ ln(P/Q)`,
//! `δ(ε) = E_P (1 − e^{ε − S})₊`, the larger of both directions.
//!
//! Every answer is a [`Bracket`]. The loss of a round is put on a grid from above and from below (`round`), both to
//! second order in the grid's width; it is tilted to where δ is decided (`saddle`), composed by a fast Fourier
//! transform, and read off with all errors counted (`compose`).
//!
//! Reference: \[ZDW22\] for dominating pairs, their products and subsampling; \[KJH20\] for Fourier transforms.

mod compose;
mod round;
mod saddle;

use super::interval::Interval;
use super::{check_delta, check_epsilon, check_positive, gaussian, shown};
use crate::error::{Error, Result};
use compose::{Composition, Window};
use round::Round;
use saddle::Saddle;
use std::sync::Arc;

/// Default width of a bracket of ε.
pub const DEFAULT_WIDTH: f64 = 1e-3;
/// How near the upper end alone comes to where finer grids would take it, relative to ε.
const FINE: f64 = 5e-5;
/// The least of it, since ε near zero needs no more digits than that.
const FINEST: f64 = 5e-6;
/// Largest transform: 64 MB.
const LARGEST: usize = 1 << 21;
/// Smallest noise multiplier of a sampled round: with less, numbers of one round leave the range of f64, and bounds would be false.
pub const LEAST_NOISE: f64 = 0.05;
const MOST_NOISE: f64 = 1e9;
const MOST_ROUNDS: u64 = 1_000_000_000;
/// Largest μ of a Gaussian taken as one round; a larger one is cut into equal rounds, which compose to it exactly.
const LARGEST_MU: f64 = 8.0;
/// δ below this is only bounded by it.
const LN_LEAST_DELTA: f64 = -230.0;

/// Some rounds of one kind: each takes every record with probability `rate` and adds noise.
///
/// A rate of 1 is the Gaussian mechanism without sampling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Phase {
    /// σ: standard deviation of the noise over sensitivity times clip.
    pub noise_multiplier: f64,
    /// q: probability to take part in a round.
    pub rate: f64,
    /// How many rounds.
    pub rounds: u64,
}

/// A number known to lie between two others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bracket {
    /// At most the number.
    pub lower: f64,
    /// At least the number.
    pub upper: f64,
}

impl Bracket {
    /// The distance between the ends.
    pub fn width(&self) -> f64 {
        if self.upper == self.lower { 0.0 } else { self.upper - self.lower }
    }

    fn intersected(self, other: Self) -> Self {
        Self { lower: self.lower.max(other.lower), upper: self.upper.min(other.upper) }
    }
}

/// The privacy of rounds of Poisson-subsampled Gaussians together, for records added or removed, or replaced with zero.
///
/// ```
/// use dpmf::accounting::pld::{Phase, PoissonCurve};
///
/// // DP-SGD: 1000 steps, each record in each with probability 1/100.
/// let curve = PoissonCurve::new(&[Phase { noise_multiplier: 1.0, rate: 0.01, rounds: 1000 }])?;
/// let epsilon = curve.epsilon_bracket(1e-5, 1e-3)?;
/// assert!(epsilon.width() <= 1e-3);
/// assert!(epsilon.lower < 1.8282 && 1.8281 < epsilon.upper);
/// # Ok::<(), dpmf::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct PoissonCurve {
    phases: Arc<[Phase]>,
    /// What is composed: equal phases together, Gaussians as one.
    merged: Arc<[Phase]>,
}

/// What is asked.
#[derive(Clone, Copy)]
enum Question {
    Epsilon { delta: f64 },
    Delta { epsilon: f64 },
}

impl PoissonCurve {
    /// The curve of all phases together.
    ///
    /// Errors: no phase; a noise multiplier that is not positive and finite, or, with sampling, outside 0.05…1e9; a rate
    /// outside (0, 1]; no rounds, or more than 10⁹.
    pub fn new(phases: &[Phase]) -> Result<Self> {
        if phases.is_empty() {
            return Err(Error::argument("phases", 0, "at least one is needed"));
        }
        for phase in phases {
            phase.check()?;
        }
        Ok(Self { phases: phases.into(), merged: merged(phases)?.into() })
    }

    /// The phases as given.
    pub fn phases(&self) -> &[Phase] {
        &self.phases
    }

    /// μ, where no phase samples: the mechanism is Gaussian then.
    ///
    /// Guarantee: rounded up.
    pub fn mu(&self) -> Option<f64> {
        if self.phases.iter().any(|p| p.rate < 1.0) {
            return None;
        }
        Some(gaussian_mu(&self.phases).hi)
    }

    /// ε at δ, within a bracket narrower than `width`, or the narrowest that 2²¹ grid points and f64 allow.
    ///
    /// Guarantee: the lower end is at most ε, the upper at least.
    /// Cost: two transforms of some `√(rounds/width)` points, and again on a finer grid until the bracket is narrow.
    /// Errors: δ outside (0, 1); a width that is not positive and finite.
    pub fn epsilon_bracket(&self, delta: f64, width: f64) -> Result<Bracket> {
        check_delta(delta)?;
        check_positive("width", width)?;
        Ok(self.bracket(Question::Epsilon { delta }, width))
    }

    /// δ at ε, as narrow as an ε-bracket of `width` makes it.
    ///
    /// Guarantee: the lower end is at most δ, the upper at least. Below about 1e-100 the lower end is 0.
    /// Errors: ε or the width not positive and finite.
    pub fn delta_bracket(&self, epsilon: f64, width: f64) -> Result<Bracket> {
        check_epsilon(epsilon)?;
        check_positive("width", width)?;
        Ok(self.bracket(Question::Delta { epsilon }, width))
    }

    /// ε at δ: the upper end alone, to about 5e-5 of ε.
    ///
    /// Guarantee: rounded up.
    /// Errors: δ outside (0, 1); an ε too large to be a number.
    pub fn epsilon(&self, delta: f64) -> Result<f64> {
        check_delta(delta)?;
        let upper = self.upper(Question::Epsilon { delta });
        if upper.is_infinite() {
            let rule = "no finite epsilon can be proved for it with this noise";
            return Err(Error::argument("delta", shown(delta), rule));
        }
        Ok(upper)
    }

    /// δ at ε: the upper end alone, as near as that makes it.
    ///
    /// Guarantee: rounded up.
    /// Errors: ε not positive and finite.
    pub fn delta(&self, epsilon: f64) -> Result<f64> {
        check_epsilon(epsilon)?;
        Ok(self.upper(Question::Delta { epsilon }))
    }

    /// About ε at δ, by the saddle point: a guess within a few percent, without a guarantee.
    pub(super) fn guess(&self, delta: f64) -> f64 {
        let guess = |remove| {
            Saddle::new(&self.merged, remove, delta * 1e-3 / self.rounds()).at_delta(libm::log(delta)).1
        };
        guess(true).max(0.0)
    }

    fn rounds(&self) -> f64 {
        self.merged.iter().map(|p| p.rounds as f64).sum()
    }

    /// Answers in both directions.
    fn bracket(&self, question: Question, width: f64) -> Bracket {
        let removed = Direction::new(&self.merged, true, question, |_| width).bracket(0.0);
        // A direction that promises more from the start needs no narrow bracket.
        let added = Direction::new(&self.merged, false, question, |_| width).bracket(removed.upper);
        let lower = removed.lower.max(added.lower) * (1.0 - 1e-12);
        let upper = removed.upper.max(added.upper).min(self.unsampled(question));
        Bracket { lower: lower.min(upper), upper }
    }

    fn upper(&self, question: Question) -> f64 {
        let width = |epsilon: f64| (FINE * epsilon).max(FINEST);
        let removed = Direction::new(&self.merged, true, question, width).upper(0.0);
        let upper = removed.max(Direction::new(&self.merged, false, question, width).upper(removed));
        upper.min(self.unsampled(question))
    }

    /// The answer for the same rounds without sampling, from above: sampling only hides. It is what is left where ε or δ is
    /// too small for 64-bit compositions.
    fn unsampled(&self, question: Question) -> f64 {
        let mu = gaussian_mu(&self.phases).hi;
        match question {
            Question::Epsilon { delta } => gaussian::epsilon(mu, delta).unwrap_or(f64::INFINITY),
            Question::Delta { epsilon } => gaussian::delta(mu, epsilon).unwrap_or(1.0),
        }
    }
}

impl Phase {
    fn check(&self) -> Result<()> {
        check_positive("noise multiplier", self.noise_multiplier)?;
        if !(self.rate > 0.0 && self.rate <= 1.0) {
            return Err(Error::argument("rate", shown(self.rate), "it must be above 0 and at most 1"));
        }
        if self.rate < 1.0 && !(LEAST_NOISE..=MOST_NOISE).contains(&self.noise_multiplier) {
            let rule = "with sampling it must lie between 0.05 and 1e9";
            return Err(Error::argument("noise multiplier", shown(self.noise_multiplier), rule));
        }
        if self.rounds == 0 || self.rounds > MOST_ROUNDS {
            return Err(Error::argument("rounds", self.rounds, "there must be at least one and at most 1e9"));
        }
        Ok(())
    }
}

/// μ of all the phases as Gaussians, whatever their rates.
fn gaussian_mu(phases: &[Phase]) -> Interval {
    // Scaled by the smallest multiplier, so that no square overflows.
    let least = phases.iter().map(|p| p.noise_multiplier).fold(f64::INFINITY, f64::min);
    let sum = phases.iter().fold(Interval::exact(0.0), |sum, p| {
        sum + (Interval::exact(least) / p.noise_multiplier).square() * p.rounds as f64
    });
    sum.sqrt() / least
}

/// Phases of one kind together, and all Gaussians as equal rounds of a moderate μ.
fn merged(phases: &[Phase]) -> Result<Vec<Phase>> {
    let mut merged: Vec<Phase> = Vec::new();
    let (gaussian, sampled): (Vec<Phase>, Vec<Phase>) = phases.iter().partition(|p| p.rate == 1.0);
    for phase in sampled {
        let alike = |p: &&mut Phase| p.noise_multiplier == phase.noise_multiplier && p.rate == phase.rate;
        match merged.iter_mut().find(alike) {
            Some(same) => same.rounds += phase.rounds,
            None => merged.push(phase),
        }
    }
    if !gaussian.is_empty() {
        let mu = gaussian_mu(&gaussian).hi;
        let rounds = (mu / LARGEST_MU).powi(2).ceil().max(1.0);
        if rounds > MOST_ROUNDS as f64 {
            return Err(Error::argument("mu", shown(mu), "it is too large for any guarantee"));
        }
        let noise_multiplier = (Interval::exact(rounds).sqrt() / mu).lo;
        merged.push(Phase { noise_multiplier, rate: 1.0, rounds: rounds as u64 });
    }
    Ok(merged)
}

/// What one evaluation neglects.
#[derive(Clone, Copy)]
struct Attempt {
    /// How much one cell may widen the bracket.
    negligible: f64,
    /// ln of the tilted mass outside the window.
    ln_mass: f64,
}

/// One direction of one question.
struct Direction<'a> {
    phases: &'a [Phase],
    saddle: Saddle,
    remove: bool,
    question: Question,
    /// Whether δ is asked at a smaller ε than the caller does, for an upper bound.
    replaced: bool,
    /// The saddle point, and the tilt taken.
    theta: f64,
    tilt: f64,
    /// ln of the tilted mass that may lie outside the window.
    ln_mass: f64,
    /// Mass that a round may leave out at either end.
    tail: f64,
    /// The width wanted, in ε.
    wanted: f64,
}

impl<'a> Direction<'a> {
    fn new(phases: &'a [Phase], remove: bool, question: Question, width: impl Fn(f64) -> f64) -> Self {
        let rounds: f64 = phases.iter().map(|p| p.rounds as f64).sum();
        let rough = match question {
            Question::Epsilon { delta } => delta,
            Question::Delta { .. } => libm::exp(LN_LEAST_DELTA),
        };
        // As far out as the dots will reach.
        let saddle = Saddle::new(phases, remove, rough * 1e-12 / rounds);
        let (mut question, mut replaced) = (question, false);
        let (theta, epsilon, ln_delta) = match question {
            Question::Epsilon { delta } => {
                let (theta, epsilon) = saddle.at_delta(libm::log(delta));
                (theta, epsilon, libm::log(delta))
            }
            Question::Delta { epsilon } => {
                let (theta, ln_delta) = saddle.at_epsilon(epsilon);
                if ln_delta >= LN_LEAST_DELTA {
                    (theta, epsilon, ln_delta)
                } else {
                    // δ at a smaller ε is an upper bound.
                    let (theta, epsilon) = saddle.at_delta(LN_LEAST_DELTA);
                    question = Question::Delta { epsilon };
                    replaced = true;
                    (theta, epsilon, LN_LEAST_DELTA)
                }
            }
        };
        let wanted = width(epsilon.max(0.0));
        // A loss that is bounded has no saddle beyond its bound; this much tilt tells ε apart from ε + width.
        let theta = theta.min(40.0 / wanted);
        let relative = (0.05 * theta * wanted).clamp(1e-8, 1e-2);
        // Less tilt than the saddle point's has lighter tails and needs a smaller window, but leaves less mass at ε: it
        // may take what the transform's rounding can spare.
        let noise = libm::log(rounds * 3e-13);
        let (mut tilt, mut ln_mass, mut least) = (theta, libm::log(relative), f64::INFINITY);
        for share in [1.0, 0.85, 0.7, 0.55, 0.4, 0.3, 0.2] {
            let candidate = share * theta;
            let [k, ..] = saddle.cumulants(candidate);
            // ln of the sum that e^{K − θε} makes δ.
            let ln_sum = (ln_delta - (k - candidate * epsilon)).min(-0.5);
            let mass = (libm::log(relative * (1.0 + candidate)) + ln_sum).min(-1.0);
            let [(above, _), (below, _)] = saddle.window(candidate, mass);
            if above + below < 0.9 * least && (share == 1.0 || ln_sum + libm::log(relative) > noise) {
                (tilt, ln_mass, least) = (candidate, mass, above + below);
            }
        }
        // The last cell below the tail weighs more than the tail, by a factor that this leaves room for.
        let tail = (1e-4 * relative * libm::exp(ln_delta) / rounds).max(1e-200);
        Self { phases, saddle, remove, question, replaced, theta, tilt, ln_mass, tail, wanted }
    }

    /// How far the tilted total reaches above and below its mean, but for a mass, and the exponents that show it.
    fn reach(&self, ln_mass: f64) -> [(f64, f64); 2] {
        self.saddle.window(self.tilt, ln_mass).map(|(reach, t)| (reach.max(20.0 / self.theta), t))
    }

    /// The bracket on a window of `size` points, on the grid of the `attempt`; without the lower end unless asked for.
    fn evaluate(&self, size: usize, attempt: Attempt, lower: bool) -> Bracket {
        let Attempt { negligible, ln_mass } = attempt;
        let [(above, up), (below, down)] = self.reach(ln_mass);
        let span = above + below;
        let h = span / (size as f64 - 4.0);
        let tilts = self.saddle.tilts(self.tilt, self.theta, negligible);
        let atoms: Vec<_> = self
            .phases
            .iter()
            .zip(&tilts)
            .map(|(phase, tilt)| (Round::new(phase).atoms(h, tilt, self.tail, lower), phase.rounds))
            .collect();
        let window = Window { size, below: below / span, exponents: (up, down) };
        let composition = Composition::new(&atoms, self.tilt, h, window);
        match self.question {
            Question::Epsilon { delta } => composition.epsilon(delta),
            Question::Delta { epsilon } => {
                let found = composition.delta(epsilon);
                Bracket { lower: if self.replaced { 0.0 } else { found.lower }, ..found }
            }
        }
    }

    fn first(&self) -> Attempt {
        Attempt { negligible: 2e-3 * self.wanted, ln_mass: self.ln_mass }
    }

    /// What is known beforehand.
    fn whole(&self) -> Bracket {
        // Where a record is added, no loss exceeds −ln(1 − q).
        let most = || {
            let sum: f64 = self.phases.iter().map(|p| -libm::log1p(-p.rate) * p.rounds as f64).sum();
            sum * (1.0 + 1e-12)
        };
        let upper = match self.question {
            Question::Epsilon { .. } if self.remove => f64::INFINITY,
            Question::Epsilon { .. } => most(),
            Question::Delta { epsilon } if !self.remove && epsilon >= most() => 0.0,
            Question::Delta { .. } => 1.0,
        };
        Bracket { lower: 0.0, upper }
    }

    /// Points at which the grid's error is about the width wanted: rounds·θh²/`divisor`.
    fn size(&self, divisor: f64, most: f64) -> usize {
        let rounds: f64 = self.phases.iter().map(|p| p.rounds as f64).sum();
        let h = (divisor * self.wanted / (rounds * self.theta)).sqrt();
        let [(above, _), (below, _)] = self.reach(self.ln_mass);
        round_up(((above + below) / h).clamp(256.0, most))
    }

    /// How many times the width wanted lies between two answers.
    fn distance(&self, a: f64, b: f64) -> f64 {
        match self.question {
            _ if a == b => 0.0,
            Question::Epsilon { .. } => (a - b).abs() / self.wanted,
            Question::Delta { .. } => libm::log(a / b).abs() / (self.theta * self.wanted).max(1e-7),
        }
    }

    /// Refines the grid until the bracket is as narrow as wanted, or lies below `enough`.
    fn bracket(&self, enough: f64) -> Bracket {
        let mut best = self.whole();
        if best.upper <= enough {
            return best;
        }
        let mut size = if enough > 0.0 { 256 } else { self.size(5.0, 32768.0) };
        let mut attempt = self.first();
        let mut stalled = 0;
        loop {
            let before = self.distance(best.upper, best.lower);
            best = best.intersected(self.evaluate(size, attempt, true));
            let after = self.distance(best.upper, best.lower);
            if after <= 1.0 || best.upper <= enough || size >= LARGEST {
                return best;
            }
            stalled = if after > 0.9 * before && best.lower > 0.0 { stalled + 1 } else { 0 };
            if stalled > 2 {
                return best;
            }
            // A lower end of zero says nothing about how far it is to go.
            let known = after.is_finite() && best.lower > 0.0;
            let factor = if known { (1.2 * after.sqrt()).clamp(1.4, 8.0) } else { 4.0 };
            attempt.negligible /= factor * factor;
            // Where there is little tilted mass at ε itself, what wraps around counts for more.
            attempt.ln_mass -= if known { 5.0 } else { 12.0 };
            size = round_up((size as f64 * factor).min(LARGEST as f64));
        }
    }

    /// Refines the grid until the upper end moves by less than the width wanted, or lies below `enough`.
    fn upper(&self, enough: f64) -> f64 {
        let mut best = self.whole().upper;
        let mut size = if enough > 0.0 { 256 } else { self.size(24.0, 131_072.0) / 2 };
        let attempt = self.first();
        while best > enough {
            let found = self.evaluate(size, attempt, false).upper;
            let moved = self.distance(best, found);
            best = best.min(found);
            // Errors of second order: a step to twice the points leaves a third of what it moved.
            if moved <= 2.0 || size >= LARGEST {
                break;
            }
            let factor = if moved.is_finite() { (0.6 * moved.sqrt()).clamp(2.0, 4.0) } else { 2.0 };
            size = round_up((factor * size as f64).min(LARGEST as f64));
        }
        best
    }
}

/// The next number of points of which a transform is quick: 2ᵏ or 3·2ᵏ.
fn round_up(size: f64) -> usize {
    let power = (size.ceil() as usize).next_power_of_two();
    if power / 4 * 3 >= size as usize { power / 4 * 3 } else { power }
}

#[cfg(test)]
mod tests;
