//! Lower bounds on ε and μ from games that were actually played.
//!
//! One threshold on the score, fixed before the first game, turns it into a test with error rates α and β.
//! Exact binomial limits `α⁺`, `β⁺` bound both at once, and then, with that confidence:
//!
//! - no (ε, δ) with `ε < ln((1 − β⁺ − δ)/α⁺)` is true, whatever the mechanism (and the same with α and β exchanged);
//! - a mechanism whose trade-off is Gaussian, as every matrix mechanism's is, has `μ ≥ Φ⁻¹(1 − α⁺) − Φ⁻¹(β⁺)`.
//!
//! The second is far sharper: it needs the frequent errors to be measured, not the rare ones.

use super::binomial::upper_limit;
use super::game::{self, Adversary, Lottery, Neighbours, Outcome, StreamMechanism};
use crate::accounting::{Calibration, check_delta, check_epsilon, check_positive, gaussian, normal};
use crate::error::{Error, Result};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// What a mechanism claims.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Promise {
    /// ε at δ.
    pub epsilon: f64,
    /// δ.
    pub delta: f64,
    /// μ of Gaussian differential privacy.
    pub mu: f64,
}

impl TryFrom<&Calibration> for Promise {
    type Error = Error;

    fn try_from(calibration: &Calibration) -> Result<Self> {
        let mu = calibration.mu().ok_or_else(|| Error::Unsupported {
            what: "the game against a mechanism that is not Gaussian".into(),
            hint: "with sampling, play the sampled game",
        })?;
        Ok(Self { epsilon: calibration.epsilon(), delta: calibration.delta(), mu })
    }
}

/// How long and how strictly to look.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AuditOptions {
    /// Games to play.
    pub trials: u64,
    /// Confidence of each lower bound.
    pub confidence: f64,
    /// Seed of the simulated noise and of the referee's bits.
    pub seed: u64,
}

impl Default for AuditOptions {
    fn default() -> Self {
        Self { trials: 1_000_000, confidence: 0.999, seed: 0 }
    }
}

/// A test of "second stream" against "first stream" at one threshold, with its measured errors.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Test {
    /// The score above which the second stream is named.
    pub threshold: f64,
    /// Games in which the mechanism was given the first stream.
    pub first_games: u64,
    /// Games in which it was given the second.
    pub second_games: u64,
    /// First-stream games that were taken for second ones.
    pub false_positives: u64,
    /// Second-stream games that were taken for first ones.
    pub false_negatives: u64,
    /// Upper confidence limit of the false positive rate.
    pub false_positive_limit: f64,
    /// Upper confidence limit of the false negative rate; the two hold together.
    pub false_negative_limit: f64,
}

impl Test {
    /// Measured false positive rate; NaN if the first stream was never played.
    pub fn false_positive_rate(&self) -> f64 {
        self.false_positives as f64 / self.first_games as f64
    }

    /// Measured false negative rate; NaN if the second stream was never played.
    pub fn false_negative_rate(&self) -> f64 {
        self.false_negatives as f64 / self.second_games as f64
    }

    /// Lower bound on μ, if the trade-off is Gaussian for some μ; zero when the errors show nothing.
    pub fn mu_lower(&self) -> f64 {
        let (alpha, beta) = (self.false_positive_limit, self.false_negative_limit);
        if alpha >= 1.0 || beta >= 1.0 {
            return 0.0;
        }
        // Both quantiles rounded down.
        (normal::upper_quantile(alpha).lo + normal::upper_quantile(beta).lo).next_down().max(0.0)
    }

    /// Lower bound on ε at δ, whatever the mechanism.
    pub fn epsilon_lower(&self, delta: f64) -> f64 {
        let (alpha, beta) = (self.false_positive_limit, self.false_negative_limit);
        let bound = |miss: f64, hit: f64| ((1.0 - miss - delta) / hit).ln();
        // A negative argument gives NaN, which `max` drops: nothing is shown.
        bound(beta, alpha).max(bound(alpha, beta)).max(0.0)
    }

    /// Lower bound on δ at ε, whatever the mechanism.
    pub fn delta_lower(&self, epsilon: f64) -> f64 {
        let (alpha, beta) = (self.false_positive_limit, self.false_negative_limit);
        let bound = |miss: f64, hit: f64| 1.0 - miss - epsilon.exp() * hit;
        bound(beta, alpha).max(bound(alpha, beta)).max(0.0)
    }
}

/// What an audit found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AuditReport {
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
    /// What the mechanism claims.
    pub promise: Promise,
    /// Lower bound on μ, from `test` and the Gaussian trade-off.
    pub mu_lower: f64,
    /// Lower bound on ε at the promised δ, from `mu_lower`.
    pub epsilon_lower: f64,
    /// Lower bound on ε at the promised δ without any assumption, from `tail_test`.
    pub epsilon_assumption_free: f64,
    /// The test at the middle, where μ shows best.
    pub test: Test,
    /// The test at the tail, where ε shows best without assumptions.
    pub tail_test: Test,
}

impl AuditReport {
    /// Whether the promise is refuted, with the confidence asked for.
    pub fn refuted(&self) -> bool {
        self.epsilon_lower > self.promise.epsilon || self.epsilon_assumption_free > self.promise.epsilon
    }
}

/// Games of a batch, enough to amortise its start and few enough to stay in the cache.
fn batch_size(mechanism: &dyn StreamMechanism) -> u64 {
    let size = mechanism.steps() * mechanism.dimension();
    ((1 << 17) / size.max(1)).clamp(16, 2048) as u64
}

/// Plays `trials` games and returns what `take` makes of the outcomes, summed.
pub(crate) fn tally<const K: usize>(
    mechanism: &dyn StreamMechanism,
    adversary: &dyn Adversary,
    neighbours: &Neighbours,
    lottery: Option<&dyn Lottery>,
    options: &AuditOptions,
    take: impl Fn(&Outcome) -> [u64; K] + Sync,
) -> Result<[u64; K]> {
    let size = batch_size(mechanism);
    let add = |a: [u64; K], b: [u64; K]| std::array::from_fn(|i| a[i] + b[i]);
    (0..options.trials.div_ceil(size))
        .into_par_iter()
        .map(|batch| {
            let games = size.min(options.trials - batch * size) as usize;
            let mut rng = game::rng(options.seed, batch);
            let outcomes = game::play(mechanism, adversary, neighbours, lottery, games, &mut rng)?;
            Ok(outcomes.iter().map(&take).fold([0; K], add))
        })
        .try_reduce(|| [0; K], |a, b| Ok(add(a, b)))
}

/// Plays the privacy game and bounds from below what the mechanism can truthfully promise.
///
/// Guarantee: with probability at least `confidence` over the simulation, each of the two lower bounds is
/// below the true value; `mu_lower` and `epsilon_lower` presume a Gaussian trade-off, the assumption-free bound
/// presumes only that games are independent. The result depends on the seed, not on the number of threads.
/// Cost: `trials` games, on all cores.
/// Errors: no trials, confidence outside (0, 1), a promise outside its domain, an adversary that breaks the
/// neighbour relation, whatever the mechanism reports.
pub fn audit(
    mechanism: &dyn StreamMechanism,
    adversary: &dyn Adversary,
    neighbours: &Neighbours,
    promise: Promise,
    options: AuditOptions,
) -> Result<AuditReport> {
    check(&promise, &options)?;
    // Each of two limits may fail half as often as the pair.
    let tail = 0.5 * (1.0 - options.confidence);
    // Both fixed in advance. The scores are standardised and symmetric about zero if the promise is honest.
    let thresholds = [0.0, tail_threshold(&promise, options.trials, tail)];
    let counts = tally(mechanism, adversary, neighbours, None, &options, |outcome| {
        let second = u64::from(outcome.second);
        let [middle, tail] = thresholds.map(|threshold| u64::from(outcome.score > threshold));
        let errors = |named: u64| ((1 - second) * named, second * (1 - named));
        let ((a, b), (c, d)) = (errors(middle), errors(tail));
        [second, 1 - second, a, b, c, d]
    })?;
    let [second_games, first_games, ..] = counts;
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
    let (test, tail_test) = (test(0), test(1));
    let mu_lower = test.mu_lower();
    Ok(AuditReport {
        adversary: adversary.name(),
        steps: mechanism.steps(),
        dimension: mechanism.dimension(),
        options,
        neighbours: *neighbours,
        promise,
        mu_lower,
        epsilon_lower: if mu_lower > 0.0 { gaussian::epsilon_lower(mu_lower, promise.delta)? } else { 0.0 },
        epsilon_assumption_free: tail_test.epsilon_lower(promise.delta),
        test,
        tail_test,
    })
}

/// The limit of a rate that was never sampled is 1.
pub(super) fn limit(count: u64, games: u64, tail: f64) -> f64 {
    if games == 0 { 1.0 } else { upper_limit(count, games, tail) }
}

/// The threshold at which the assumption-free bound is largest if the promise is kept with equality.
fn tail_threshold(promise: &Promise, trials: u64, tail: f64) -> f64 {
    let games = (trials / 2).max(1);
    let expected = |x: f64| (normal::upper_tail(x.into()).hi * games as f64) as u64;
    let bound = |threshold: f64| {
        let false_positives = expected(threshold + 0.5 * promise.mu);
        let false_negatives = games - expected(threshold - 0.5 * promise.mu).min(games);
        let test = Test {
            threshold,
            first_games: games,
            second_games: games,
            false_positives,
            false_negatives,
            false_positive_limit: limit(false_positives, games, tail),
            false_negative_limit: limit(false_negatives, games, tail),
        };
        test.epsilon_lower(promise.delta)
    };
    let candidates = (0..=48).map(|k| f64::from(k) * 0.1);
    let best = candidates.map(|t| (t, bound(t))).fold((0.0, -1.0), |a, b| if b.1 > a.1 { b } else { a });
    best.0
}

fn check(promise: &Promise, options: &AuditOptions) -> Result<()> {
    check_options(options)?;
    check_epsilon(promise.epsilon)?;
    check_positive("mu", promise.mu)?;
    check_delta(promise.delta)
}

pub(super) fn check_options(options: &AuditOptions) -> Result<()> {
    if options.trials == 0 || options.trials > 10_u64.pow(10) {
        return Err(Error::argument("trials", options.trials, "it must lie between 1 and 10¹⁰"));
    }
    if !(options.confidence > 0.0 && options.confidence < 1.0) {
        return Err(Error::argument(
            "confidence",
            options.confidence,
            "it must lie strictly between 0 and 1",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_with(false_positive_limit: f64, false_negative_limit: f64) -> Test {
        Test {
            threshold: 0.0,
            first_games: 10,
            second_games: 10,
            false_positives: 1,
            false_negatives: 1,
            false_positive_limit,
            false_negative_limit,
        }
    }

    #[test]
    fn bounds_in_closed_form() {
        // Φ(−1) = 0.158655…, so μ = 2 at α = β = Φ(−1); ln((1 − β)/α) = ln(0.8413/0.1587).
        let alpha = 0.15865525393145707;
        let test = test_with(alpha, alpha);
        assert!((test.mu_lower() - 2.0).abs() < 1e-12 && test.mu_lower() <= 2.0 + 1e-14);
        assert!((test.epsilon_lower(1e-9) - (0.8413447460685429_f64 / alpha).ln()).abs() < 1e-8);
        // The direction with fewer errors counts.
        assert!((test_with(0.01, 0.4).epsilon_lower(0.1) - (0.5_f64 / 0.01).ln()).abs() < 1e-12);
        assert!((test_with(0.4, 0.01).epsilon_lower(0.1) - (0.5_f64 / 0.01).ln()).abs() < 1e-12);
        // δ ≥ 0.9 − e·0.05 at ε = 1, by whichever of the two errors is rarer.
        for test in [test_with(0.05, 0.1), test_with(0.1, 0.05)] {
            assert!((test.delta_lower(1.0) - (0.9 - 0.05 * std::f64::consts::E)).abs() < 1e-12);
        }
        assert_eq!(test_with(0.6, 0.6).delta_lower(0.1), 0.0);
        // Guessing shows nothing.
        for test in [test_with(0.6, 0.6), test_with(1.0, 0.0001), test_with(1.0, 1.0)] {
            assert_eq!((test.mu_lower(), test.epsilon_lower(0.5)), (0.0, 0.0));
        }
    }

    #[test]
    fn the_tail_threshold_is_worth_having() {
        let promise = Promise { epsilon: 4.0, delta: 1e-6, mu: gaussian::mu(4.0, 1e-6).unwrap() };
        assert!(tail_threshold(&promise, 1_000_000, 5e-4) > 1.0);
        assert!(tail_threshold(&promise, 1_000_000, 5e-4) > tail_threshold(&promise, 1_000, 5e-4));
    }

    #[test]
    fn bad_input_is_named() {
        let promise = Promise { epsilon: 1.0, delta: 1e-6, mu: 0.2 };
        let options = AuditOptions::default();
        let message =
            |promise: Promise, options: AuditOptions| check(&promise, &options).unwrap_err().to_string();
        assert!(message(promise, AuditOptions { trials: 0, ..options }).starts_with("trials is 0"));
        assert!(message(promise, AuditOptions { confidence: 1.0, ..options }).starts_with("confidence is 1"));
        assert!(message(Promise { delta: 1.0, ..promise }, options).starts_with("delta is 1"));
        assert!(message(Promise { epsilon: f64::NAN, ..promise }, options).starts_with("epsilon is NaN"));
        assert!(message(Promise { mu: 0.0, ..promise }, options).starts_with("mu is 0"));
    }
}
