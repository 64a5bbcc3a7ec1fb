//! The privacy game under sampling: one unit is in the data or not, and a sampler decides in secret when it takes part.
//!
//! The adversary knows the mechanism, the scheme, everybody else's contributions and the unit's own, and not the coins. Its score
//! is the logarithm of the likelihood ratio. With contributions `ζ u` at the turns, `Λ` the [`NoiseModel`]'s precision, answers `a`
//! and `x_t = ζ Σ_τ Λ_tτ ⟨u, a_τ⟩`, which is `⟨ζ C e_t, C a⟩/s²`:
//!
//! - balls in bins: `ln (1/b) Σ_p exp(Σ_{t ∈ p} x_t − ζ² Σ_{t,τ ∈ p} Λ_tτ / 2)` over the phases `p, p + b, …`;
//! - bins that are drawn anew: the mean of the same over all patterns with one step in every epoch or, where these are too many,
//!   over a chain of epochs in which only neighbours meet;
//! - cyclic Poisson: `Σ_t ln(1 − q + q exp(x_t − ζ² Λ_tt / 2))` over the steps of the unit's part, which is public. It is the
//!   likelihood ratio for an encoder of no more bands than there are parts, and some statistic for any other.
//!
//! The trade-off is not Gaussian, and nothing is presumed of it. A promise is a curve, of which several points are tested in both directions: at ε an optimal test names the
//! unit where the score exceeds ε, and denies it where the score is below −ε. One refuted point refutes the curve.

use super::empirical::{AuditOptions, Test, check_options, limit, tally};
use super::game::{Adversary, AuditRng, Draw, Lottery, Neighbours, Player, StreamMechanism};
use super::mechanism::{MatrixMechanism, NoiseModel};
use crate::accounting::{Adjacency, check_delta, check_epsilon};
use crate::error::{Error, Result};
use crate::form::Representation;
use crate::noise::{NoiseKey, RunId};
use crate::participation::Sampling;
use crate::sampler::Coins;
use rand::Rng;
use serde::Serialize;

/// Keeps a contribution below the clip in spite of rounding.
const SHRINK: f64 = 1.0 - 1e-12;

/// The deployed sampler as a lottery: a new run and some unit in every game.
pub struct Deployed {
    sampling: Sampling,
    steps: usize,
    key: NoiseKey,
}

impl Deployed {
    /// The lottery of a sampling over so many steps.
    ///
    /// Errors: those of [`crate::Sampler::new`] for the sampling.
    pub fn new(sampling: Sampling, steps: usize) -> Result<Self> {
        let key = NoiseKey::from_seed(0);
        Coins::new(&key, RunId([0; 16]), sampling)?;
        Ok(Self { sampling, steps, key })
    }
}

impl Lottery for Deployed {
    fn draw(&self, rng: &mut AuditRng) -> Result<Draw> {
        let mut run = RunId([0; 16]);
        rng.fill_bytes(&mut run.0);
        let coins = Coins::new(&self.key, run, self.sampling)?;
        let unit = rng.next_u32();
        let possible = match self.sampling {
            Sampling::CyclicPoisson { bands, .. } => {
                let part = usize::try_from(coins.part(unit, 0)).unwrap_or(usize::MAX);
                (part..self.steps).step_by(bands).collect()
            }
            _ => (0..self.steps).collect(),
        };
        Ok(Draw { possible, turns: coins.turns(unit, self.steps) })
    }
}

/// What an adversary takes the unit's turns to be.
#[derive(Clone, Debug)]
enum Belief {
    /// Each possible step, with a probability.
    Poisson { rate: f64 },
    /// One of several patterns, all as likely, each with `ζ² Σ Λ_tτ` over its steps.
    Patterns(Vec<(Vec<usize>, f64)>),
    /// One of some bins, another one in every epoch.
    Chain { bins: usize },
}

/// Most patterns that are looked at one by one.
const MOST_PATTERNS: usize = 1 << 12;

/// An adversary that knows the noise and the scheme, contributes as much as the clip allows whenever its unit takes part, in
/// one direction, and plays the likelihood ratio.
///
/// One direction throughout is the worst for encoders without negative entries.
#[derive(Clone, Debug)]
pub struct SampledAdversary<'a> {
    model: &'a NoiseModel,
    distance: f64,
    belief: Belief,
    /// How many more patterns there are in which the unit never takes part.
    idle: f64,
}

impl<'a> SampledAdversary<'a> {
    /// The adversary that believes in a sampling.
    ///
    /// Errors: [`Sampling::None`].
    pub fn of(sampling: Sampling, model: &'a NoiseModel, neighbours: &Neighbours) -> Result<Self> {
        match sampling {
            Sampling::None => {
                Err(Error::argument("sampling", sampling, "without it the adversary chooses the steps"))
            }
            Sampling::CyclicPoisson { rate, .. } => {
                let distance = neighbours.distance() * SHRINK;
                Ok(Self { model, distance, belief: Belief::Poisson { rate }, idle: 0.0 })
            }
            Sampling::BallsInBins { bins } => {
                let phases = bins.min(model.steps());
                let patterns: Vec<Vec<usize>> =
                    (0..phases).map(|phase| (phase..model.steps()).step_by(bins).collect()).collect();
                Ok(Self { idle: (bins - phases) as f64, ..Self::over(patterns, model, neighbours) })
            }
            Sampling::ReshuffledBins { bins } if bins >= model.steps() => {
                Self::of(Sampling::BallsInBins { bins }, model, neighbours)
            }
            Sampling::ReshuffledBins { bins } => {
                let steps = model.steps();
                let epochs = u32::try_from(steps.div_ceil(bins)).unwrap_or(u32::MAX);
                let Some(count) = bins.checked_pow(epochs).filter(|count| *count <= MOST_PATTERNS) else {
                    let distance = neighbours.distance() * SHRINK;
                    return Ok(Self { model, distance, belief: Belief::Chain { bins }, idle: 0.0 });
                };
                let pattern = |mut index: usize| {
                    let mut steps_of = Vec::new();
                    for start in (0..steps).step_by(bins) {
                        steps_of.extend(Some(start + index % bins).filter(|step| *step < steps));
                        index /= bins;
                    }
                    steps_of
                };
                Ok(Self::over((0..count).map(pattern).collect(), model, neighbours))
            }
        }
    }

    /// The adversary that believes in one of some patterns of turns, all as likely.
    pub fn over(patterns: Vec<Vec<usize>>, model: &'a NoiseModel, neighbours: &Neighbours) -> Self {
        let distance = neighbours.distance() * SHRINK;
        let strength = |steps: &[usize]| -> f64 {
            let column = |t: usize| steps.iter().map(|&at| model.weights(t)[at]).sum::<f64>();
            distance * distance * steps.iter().map(|&t| column(t)).sum::<f64>()
        };
        let patterns = patterns
            .into_iter()
            .map(|steps| {
                let strength = strength(&steps);
                (steps, strength)
            })
            .collect();
        Self { model, distance, belief: Belief::Patterns(patterns), idle: 0.0 }
    }

    /// `x_t` of the module's formula.
    fn evidence(&self, answers: &[f64], step: usize) -> f64 {
        self.distance * self.model.weights(step).iter().zip(answers).map(|(w, a)| w * a).sum::<f64>()
    }
}

impl Adversary for SampledAdversary<'_> {
    fn name(&self) -> &'static str {
        "sampled"
    }

    fn player(&self) -> Box<dyn Player + '_> {
        Box::new(SampledPlayer { adversary: self, possible: vec![], answers: vec![] })
    }
}

struct SampledPlayer<'a> {
    adversary: &'a SampledAdversary<'a>,
    possible: Vec<usize>,
    /// Along the direction of the contributions.
    answers: Vec<f64>,
}

impl Player for SampledPlayer<'_> {
    fn reset(&mut self) {
        self.possible.clear();
        self.answers.clear();
    }

    fn tell(&mut self, possible: &[usize]) {
        self.possible.extend_from_slice(possible);
    }

    fn choose(&mut self, _step: usize, _first: &mut [f64], second: &mut [f64]) {
        second[0] = self.adversary.distance;
    }

    fn observe(&mut self, _step: usize, answer: &[f64]) {
        self.answers.push(answer[0]);
    }

    fn score(&mut self) -> f64 {
        let SampledAdversary { model, distance, ref belief, idle } = *self.adversary;
        match belief {
            Belief::Poisson { rate } => {
                let (no, yes) = ((1.0 - rate).ln(), rate.ln());
                let one = |&step: &usize| {
                    let half = 0.5 * distance * distance * model.weights(step)[step];
                    log_sum(&[no, yes + self.adversary.evidence(&self.answers, step) - half])
                };
                self.possible.iter().map(one).sum()
            }
            Belief::Patterns(patterns) => {
                let evidence: Vec<f64> =
                    (0..model.steps()).map(|step| self.adversary.evidence(&self.answers, step)).collect();
                let one = |(steps, strength): &(Vec<usize>, f64)| {
                    steps.iter().map(|&step| evidence[step]).sum::<f64>() - 0.5 * strength
                };
                let terms: Vec<f64> = patterns.iter().map(one).chain([idle.ln()]).collect();
                log_sum(&terms) - (patterns.len() as f64 + idle).ln()
            }
            &Belief::Chain { bins } => {
                let (n, scale) = (model.steps(), distance * distance);
                let mut last: Vec<f64> = vec![];
                for start in (0..n).step_by(bins) {
                    let term = |step: usize| {
                        // A bin whose step is past the last takes no part.
                        let own = match step < n {
                            true => {
                                self.adversary.evidence(&self.answers, step)
                                    - 0.5 * scale * model.weights(step)[step]
                            }
                            false => 0.0,
                        };
                        let met = |(bin, so_far): (usize, &f64)| match step < n {
                            true => so_far - scale * model.weights(step)[start - bins + bin],
                            false => *so_far,
                        };
                        let before: Vec<f64> = last.iter().enumerate().map(met).collect();
                        own + if before.is_empty() { 0.0 } else { log_sum(&before) }
                    };
                    last = (start..start + bins).map(|step| term(step) - (bins as f64).ln()).collect();
                }
                log_sum(&last)
            }
        }
    }
}

/// `ln Σ exp x_i`, without overflow.
fn log_sum(terms: &[f64]) -> f64 {
    let largest = terms.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if largest.is_infinite() {
        largest
    } else {
        largest + terms.iter().map(|x| (x - largest).exp()).sum::<f64>().ln()
    }
}

/// A point of a promised curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CurvePoint {
    /// ε.
    pub epsilon: f64,
    /// δ that is promised there.
    pub delta: f64,
}

/// Most points that one audit tests.
pub const MOST_POINTS: usize = 8;

/// Points of a promised curve that games can tell something about: at the promised ε, where δ is small, and at smaller
/// ones, where it is not.
///
/// Errors: those of the curve.
pub fn promised_points(epsilon: f64, delta_at: impl Fn(f64) -> Result<f64>) -> Result<Vec<CurvePoint>> {
    const SHARES: [f64; MOST_POINTS] = [1.0, 0.75, 0.5, 0.375, 0.25, 0.125, 0.0625, 0.015625];
    SHARES
        .into_iter()
        .map(|share| share * epsilon)
        .map(|epsilon| Ok(CurvePoint { epsilon, delta: delta_at(epsilon)? }))
        .collect()
}

/// What was found at one point.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SampledRow {
    /// What is promised.
    #[serde(flatten)]
    pub promise: CurvePoint,
    /// Lower bound on δ at this ε, by either test.
    pub delta_lower: f64,
    /// The test that names the unit where the score exceeds ε.
    pub present: Test,
    /// The test that denies it where the score is below −ε.
    pub absent: Test,
}

/// What an audit of a sampled mechanism found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SampledReport {
    /// The adversary that played.
    pub adversary: &'static str,
    /// Steps of a game.
    pub steps: usize,
    /// Coordinates of an input.
    pub dimension: usize,
    /// How long and how strictly was looked.
    #[serde(flatten)]
    pub options: AuditOptions,
    /// The relation that the referee enforced.
    pub neighbours: Neighbours,
    /// The points of the curve, in the order given.
    pub rows: Vec<SampledRow>,
    /// Lower bound on ε at the δ of the first point, without any assumption.
    pub epsilon_lower: f64,
}

impl SampledReport {
    /// Whether the promise is refuted at some point, with the confidence asked for.
    pub fn refuted(&self) -> bool {
        self.rows.iter().any(|row| row.delta_lower > row.promise.delta)
    }
}

/// Plays the sampled game and bounds δ from below at the points of a promised curve.
///
/// Guarantee: with probability at least `confidence` over the simulation, all lower bounds are below the true values; it
/// presumes only that games are independent. The result depends on the seed, not on the number of threads.
/// Cost: `trials` games, on all cores.
/// Errors: no points or more than [`MOST_POINTS`], one outside its domain; no trials, confidence outside (0, 1); whatever
/// lottery and mechanism report.
pub fn audit_sampled(
    mechanism: &dyn StreamMechanism,
    adversary: &dyn Adversary,
    neighbours: &Neighbours,
    lottery: &dyn Lottery,
    promise: &[CurvePoint],
    options: AuditOptions,
) -> Result<SampledReport> {
    check_options(&options)?;
    if promise.is_empty() || promise.len() > MOST_POINTS {
        return Err(Error::argument("number of points", promise.len(), "it must lie between 1 and 8"));
    }
    for point in promise {
        check_epsilon(point.epsilon)?;
        // A curve may promise nothing where ε is small.
        if point.delta != 1.0 {
            check_delta(point.delta)?;
        }
    }
    // Fixed in advance: two thresholds a point, two limits a threshold.
    let thresholds: Vec<f64> = promise.iter().flat_map(|point| [point.epsilon, -point.epsilon]).collect();
    let tail = (1.0 - options.confidence) / (2 * thresholds.len()) as f64;
    let counts = tally(mechanism, adversary, neighbours, Some(lottery), &options, |outcome| {
        let mut counts = [0; 2 + 4 * MOST_POINTS];
        let absent = usize::from(!outcome.second);
        counts[absent] = 1;
        for (errors, threshold) in counts[2..].as_chunks_mut::<2>().0.iter_mut().zip(&thresholds) {
            // Positives that are false where the unit is absent, negatives where it is present.
            errors[1 - absent] = u64::from(outcome.second != (outcome.score > *threshold));
        }
        counts
    })?;
    let (second_games, first_games) = (counts[0], counts[1]);
    let test = |k: usize| {
        let (false_positives, false_negatives) = (counts[2 + 2 * k], counts[3 + 2 * k]);
        Test {
            threshold: thresholds[k],
            first_games,
            second_games,
            false_positives,
            false_negatives,
            false_positive_limit: limit(false_positives, first_games, tail),
            false_negative_limit: limit(false_negatives, second_games, tail),
        }
    };
    let rows: Vec<SampledRow> = promise
        .iter()
        .enumerate()
        .map(|(k, &promise)| {
            let (present, absent) = (test(2 * k), test(2 * k + 1));
            let delta_lower = present.delta_lower(promise.epsilon).max(absent.delta_lower(promise.epsilon));
            SampledRow { promise, delta_lower, present, absent }
        })
        .collect();
    let epsilon_lower = rows
        .iter()
        .flat_map(|row| [row.present, row.absent])
        .map(|test| test.epsilon_lower(promise[0].delta))
        .fold(0.0, f64::max);
    Ok(SampledReport {
        adversary: adversary.name(),
        steps: mechanism.steps(),
        dimension: mechanism.dimension(),
        options,
        neighbours: *neighbours,
        rows,
        epsilon_lower,
    })
}

/// Audits a form under the deployed sampler, with noise of a standard deviation, against a promised curve.
///
/// Cost: `trials` games of `n²` multiply-adds.
/// Errors: those of [`audit_sampled`], [`Deployed::new`], [`Neighbours::drawn`] and [`MatrixMechanism::new`].
///
/// ```
/// use dpmf::accounting::Adjacency;
/// use dpmf::audit::{AuditOptions, CurvePoint, audit_sampled_form};
/// use dpmf::form::StateSpace;
///
/// // Independent noise on four steps, each unit in one of them, and a promise that its noise does not keep.
/// let form = StateSpace::independent(4)?;
/// let promise = [CurvePoint { epsilon: 0.5, delta: 1e-3 }];
/// let options = AuditOptions { trials: 20_000, ..Default::default() };
/// let sampling = "balls-in-bins:4".parse()?;
/// let report = audit_sampled_form(&form, 0.8, sampling, Adjacency::default(), 1.0, &promise, options)?;
/// assert!(report.refuted());
/// # Ok::<(), dpmf::Error>(())
/// ```
pub fn audit_sampled_form(
    form: &dyn Representation,
    noise_std: f64,
    sampling: Sampling,
    adjacency: Adjacency,
    clip: f64,
    promise: &[CurvePoint],
    options: AuditOptions,
) -> Result<SampledReport> {
    let mechanism = MatrixMechanism::of(form, noise_std, 1)?;
    let model = mechanism.noise_model()?;
    let neighbours = Neighbours::drawn(form.steps(), adjacency, clip)?;
    let lottery = Deployed::new(sampling, form.steps())?;
    let adversary = SampledAdversary::of(sampling, &model, &neighbours)?;
    audit_sampled(&mechanism, &adversary, &neighbours, &lottery, promise, options)
}

#[cfg(test)]
mod tests;
