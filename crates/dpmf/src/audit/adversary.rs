//! Adversaries against Gaussian noise of known covariance.
//!
//! All of them make one difference of the largest allowed norm and end with the likelihood ratio, which for
//! a difference `r v` at step `j` is a weighted sum of the answers:
//!
//! `score = Σ_t Λ_tj ⟨v, a_t − x_t⟩ / √Λ_jj − r √Λ_jj / 2`, with `Λ` the [`NoiseModel`]'s precision.
//!
//! Against the noise the model describes the score is `N(∓μ/2, 1)`, `μ = r√Λ_jj`, and no test does better for
//! that difference. Against any other mechanism it is merely some statistic, and an audit stays valid.

use super::game::{Adversary, Neighbours, Player};
use super::mechanism::NoiseModel;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Keeps a difference below the allowed norm in spite of rounding; costs 1e-12 of μ.
const SHRINK: f64 = 1.0 - 1e-12;

/// The adversaries by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AdversaryKind {
    /// [`Informed::worst_column`].
    #[default]
    WorstColumn,
    /// [`Informed::descent`].
    Adaptive,
    /// [`Informed::first_answer`].
    Paper,
}

impl AdversaryKind {
    /// Every adversary.
    pub const ALL: [AdversaryKind; 3] =
        [AdversaryKind::WorstColumn, AdversaryKind::Adaptive, AdversaryKind::Paper];

    /// The name used on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            AdversaryKind::WorstColumn => "worst-column",
            AdversaryKind::Adaptive => "adaptive",
            AdversaryKind::Paper => "paper",
        }
    }
}

impl std::str::FromStr for AdversaryKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| Error::argument("adversary", text, "it must be worst-column, adaptive or paper"))
    }
}

/// Where and how an adversary puts its one difference.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Strategy {
    /// At a fixed step along the first coordinate.
    WorstColumn { step: usize },
    /// At a fixed step in the direction of the first answer.
    FirstAnswer { step: usize },
    /// Runs gradient descent on the answers and strikes, along the gradient, once the iterate has wandered off.
    Descent { first: usize, last: usize },
}

/// An adversary that knows the distribution of the noise and plays the likelihood ratio.
#[derive(Clone, Debug)]
pub struct Informed<'a> {
    model: &'a NoiseModel,
    distance: f64,
    symmetric: bool,
    strategy: Strategy,
}

impl<'a> Informed<'a> {
    /// The adversary of a name.
    pub fn of(kind: AdversaryKind, model: &'a NoiseModel, neighbours: &Neighbours) -> Self {
        match kind {
            AdversaryKind::WorstColumn => Self::worst_column(model, neighbours),
            AdversaryKind::Adaptive => Self::descent(model, neighbours),
            AdversaryKind::Paper => Self::first_answer(model, neighbours),
        }
    }

    /// The best non-adaptive adversary: the difference goes where the encoder's column is longest.
    ///
    /// A factorization with more noise rows than steps hides part of its noise from every observer of the
    /// answers; against it even this adversary stays below the μ of the sensitivity.
    pub fn worst_column(model: &'a NoiseModel, neighbours: &Neighbours) -> Self {
        Self::new(model, neighbours, Strategy::WorstColumn { step: model.worst_step(0) })
    }

    /// The paper's adversary: the first answer chooses the direction of a later query, the one where a
    /// difference shows most. A mechanism of a single step leaves it nothing to adapt to.
    ///
    /// Reference: the attack of Appendix "Not all additive noise mechanisms are adaptively private" in
    /// \[DMRST22\].
    pub fn first_answer(model: &'a NoiseModel, neighbours: &Neighbours) -> Self {
        let step = model.worst_step(usize::from(model.steps() > 1));
        Self::new(model, neighbours, Strategy::FirstAnswer { step })
    }

    /// Gradient descent on `½‖θ − θ*‖²` from the mechanism's own answers, as training would run it. Step and
    /// direction of the difference both depend on the iterate: it is made along the gradient, as soon as noise
    /// has carried the iterate away from its course, and at the latest at the last of the worst steps.
    pub fn descent(model: &'a NoiseModel, neighbours: &Neighbours) -> Self {
        // From the second step on there is something to adapt to.
        let first = model.worst_step(usize::from(model.steps() > 1));
        let worst = model.mu(first, 1.0);
        // Only steps that show a difference about as well are worth waiting for.
        let last =
            (first..model.steps()).rev().find(|&j| model.mu(j, 1.0) > worst * WORTH_WAITING).unwrap_or(first);
        Self::new(model, neighbours, Strategy::Descent { first, last })
    }

    fn new(model: &'a NoiseModel, neighbours: &Neighbours, strategy: Strategy) -> Self {
        // One of two records replaced: +ζ against −ζ. Otherwise: ζ against nothing.
        let symmetric = neighbours.adjacency.sensitivity_factor() > 1.0;
        Self { model, distance: neighbours.distance() * SHRINK, symmetric, strategy }
    }

    /// μ between the adversary's two streams, if the noise is what the model says, for the step that matters.
    pub fn mu(&self) -> f64 {
        let step = match self.strategy {
            Strategy::WorstColumn { step } | Strategy::FirstAnswer { step } => step,
            Strategy::Descent { first, .. } => first,
        };
        self.model.mu(step, self.distance)
    }
}

impl Adversary for Informed<'_> {
    fn name(&self) -> &'static str {
        match self.strategy {
            Strategy::WorstColumn { .. } => AdversaryKind::WorstColumn.name(),
            Strategy::FirstAnswer { .. } => AdversaryKind::Paper.name(),
            Strategy::Descent { .. } => AdversaryKind::Adaptive.name(),
        }
    }

    fn player(&self) -> Box<dyn Player + '_> {
        Box::new(InformedPlayer {
            adversary: self,
            struck: None,
            direction: vec![],
            residuals: vec![],
            theta: vec![],
        })
    }
}

struct InformedPlayer<'a> {
    adversary: &'a Informed<'a>,
    /// The step of the difference, once made.
    struck: Option<usize>,
    /// Unit direction of the difference.
    direction: Vec<f64>,
    /// `a_t − x_t` for the first stream's `x`, step after step.
    residuals: Vec<f64>,
    /// Iterate of the descent; its target is the origin, its start at a difference's
    /// length from it.
    theta: Vec<f64>,
}

/// Share of the worst step's μ that a later step must reach to be waited for.
const WORTH_WAITING: f64 = 0.99;
/// Step size of the descent.
const LEARNING_RATE: f64 = 0.25;

impl InformedPlayer<'_> {
    fn strike(&mut self, step: usize, towards: &[f64]) {
        let norm = towards.iter().map(|x| x * x).sum::<f64>().sqrt();
        self.direction.clear();
        if norm > 0.0 && norm.is_finite() {
            self.direction.extend(towards.iter().map(|x| x / norm));
        } else {
            self.direction.resize(towards.len(), 0.0);
            self.direction[0] = 1.0;
        }
        self.struck = Some(step);
    }
}

impl Player for InformedPlayer<'_> {
    fn reset(&mut self) {
        self.struck = None;
        self.direction.clear();
        self.residuals.clear();
        self.theta.clear();
    }

    fn choose(&mut self, step: usize, first: &mut [f64], second: &mut [f64]) {
        let d = first.len();
        match self.adversary.strategy {
            Strategy::WorstColumn { step: at } if step == at => self.strike(step, &vec![0.0; d]),
            Strategy::FirstAnswer { step: at } if step == at => {
                let towards = if step == 0 { vec![0.0; d] } else { self.residuals[..d].to_vec() };
                self.strike(step, &towards);
            }
            Strategy::Descent { first: from, last } => {
                if self.theta.is_empty() {
                    self.theta.resize(d, 0.0);
                    self.theta[0] = self.adversary.distance;
                }
                // The gradient of ½‖θ‖² is θ itself: both streams share it.
                first.copy_from_slice(&self.theta);
                second.copy_from_slice(&self.theta);
                let course = self.adversary.distance * (1.0 - LEARNING_RATE).powi(step as i32);
                let off = |(k, x): (usize, &f64)| (x - course * f64::from(k == 0)).powi(2);
                let off = self.theta.iter().enumerate().map(off).sum::<f64>();
                // In units of the noise, as far as the sensitivity tells: neither almost always nor never.
                let model = self.adversary.model;
                let wandered = off * model.mu(from, 1.0).powi(2) > LEARNING_RATE
                    && model.mu(step, 1.0) > model.mu(from, 1.0) * WORTH_WAITING;
                if self.struck.is_none() && step >= from && step <= last && (wandered || step == last) {
                    self.strike(step, &self.theta.clone());
                }
            }
            _ => {}
        }
        if self.struck == Some(step) {
            let distance = self.adversary.distance;
            let (plus, minus) = if self.adversary.symmetric { (0.5, -0.5) } else { (1.0, 0.0) };
            for k in 0..d {
                first[k] += minus * distance * self.direction[k];
                second[k] += plus * distance * self.direction[k];
            }
        }
        // The first stream's input, negated: the answer is added to it when it comes.
        self.residuals.extend(first.iter().map(|x| -x));
    }

    fn observe(&mut self, step: usize, answer: &[f64]) {
        let d = answer.len();
        for k in 0..d {
            self.residuals[step * d + k] += answer[k];
        }
        for (theta, a) in self.theta.iter_mut().zip(answer) {
            *theta -= LEARNING_RATE * a;
        }
    }

    fn score(&mut self) -> f64 {
        let Some(step) = self.struck else { return 0.0 };
        let weights = self.adversary.model.weights(step);
        let d = self.direction.len();
        let matched: f64 = self
            .residuals
            .chunks_exact(d)
            .zip(weights)
            .map(|(r, w)| w * r.iter().zip(&self.direction).map(|(r, v)| r * v).sum::<f64>())
            .sum();
        let root = weights[step].sqrt();
        matched / root - 0.5 * self.adversary.distance * root
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounting::Adjacency;
    use crate::audit::game::{StreamMechanism, rng};
    use crate::audit::mechanism::MatrixMechanism;
    use faer::Mat;
    use std::collections::BTreeSet;

    /// Plays the first stream and returns where and along what the adversary struck, with its scores.
    fn games(
        adversary: &Informed<'_>,
        mechanism: &MatrixMechanism,
        count: usize,
    ) -> Vec<(usize, Vec<f64>, f64)> {
        let d = mechanism.dimension();
        let mut player =
            InformedPlayer { adversary, struck: None, direction: vec![], residuals: vec![], theta: vec![] };
        let play = |seed| {
            let mut session = mechanism.start(1, &mut rng(11, seed)).unwrap();
            player.reset();
            for step in 0..mechanism.steps() {
                let (mut first, mut second) = (vec![0.0; d], vec![0.0; d]);
                player.choose(step, &mut first, &mut second);
                session.answer(&mut first).unwrap();
                player.observe(step, &first);
            }
            (player.struck.unwrap(), player.direction.clone(), player.score())
        };
        (0..count as u64).map(play).collect()
    }

    #[test]
    fn each_adversary_adapts_to_what_it_should() {
        let mechanism = MatrixMechanism::new(Mat::identity(8, 8), 2.0, 2).unwrap();
        let model = mechanism.noise_model().unwrap();
        let neighbours = Neighbours::single(Adjacency::ReplaceWithZero, 1.0).unwrap();
        let observe = |adversary: Informed<'_>| {
            let games = games(&adversary, &mechanism, 200);
            let steps: BTreeSet<usize> = games.iter().map(|g| g.0).collect();
            let directions: BTreeSet<u64> = games.iter().map(|g| g.1[0].to_bits()).collect();
            (steps.len(), directions.len())
        };
        assert_eq!(observe(Informed::worst_column(&model, &neighbours)), (1, 1));
        assert_eq!(observe(Informed::first_answer(&model, &neighbours)), (1, 200));
        let (steps, directions) = observe(Informed::descent(&model, &neighbours));
        assert!(steps >= 4 && directions > 190, "{steps} {directions}");
    }

    #[test]
    fn names_round_trip() {
        let model = NoiseModel::new(&Mat::identity(2, 2), 1.0).unwrap();
        let neighbours = Neighbours::single(Adjacency::ReplaceWithZero, 1.0).unwrap();
        for kind in AdversaryKind::ALL {
            assert_eq!(kind.name().parse::<AdversaryKind>().unwrap(), kind);
            assert_eq!(Informed::of(kind, &model, &neighbours).name(), kind.name());
        }
        assert!(
            "best".parse::<AdversaryKind>().unwrap_err().to_string().starts_with("adversary is best, but")
        );
    }

    #[test]
    fn scores_of_the_first_stream_are_standard_normal_about_minus_half_mu() {
        // N = [1; −½ 1], s = 0.5, ζ = 0.4: μ = 0.4 √1.25 / 0.5. α = 1e-4 for the mean, variance within 5 sd.
        let n = Mat::from_fn(2, 2, |i, j| {
            if i == j {
                1.0
            } else if i > j {
                -0.5
            } else {
                0.0
            }
        });
        let mechanism = MatrixMechanism::new(n, 0.5, 1).unwrap();
        let model = mechanism.noise_model().unwrap();
        for (adjacency, mu) in [
            (Adjacency::ReplaceWithZero, 0.8 * 1.25_f64.sqrt()),
            (Adjacency::ReplaceOne, 1.6 * 1.25_f64.sqrt()),
        ] {
            let neighbours = Neighbours::single(adjacency, 0.4).unwrap();
            let adversary = Informed::worst_column(&model, &neighbours);
            assert!((adversary.mu() - mu).abs() < 1e-8);
            let scores: Vec<f64> = games(&adversary, &mechanism, 20_000).into_iter().map(|g| g.2).collect();
            let mean = scores.iter().sum::<f64>() / 2e4;
            let variance = scores.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / 2e4;
            assert!((mean + mu / 2.0).abs() < 3.9 / 2e4_f64.sqrt(), "{mean} {mu}");
            assert!((variance - 1.0).abs() < 5.0 * (2.0 / 2e4_f64).sqrt(), "{variance}");
        }
    }
}
