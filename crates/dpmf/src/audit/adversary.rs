//! Adversaries against Gaussian noise of known covariance.
//!
//! All of them make differences of the largest allowed norm, wherever one unit of privacy may take part once it has begun,
//! and end with the likelihood ratio. For differences `r u_i` at steps `j_i` it is a weighted sum of the answers:
//!
//! `score = Σ_t ⟨Σ_i Λ_{t j_i} u_i, a_t − x_t⟩ / √Q − r √Q / 2`, with `Λ` the [`NoiseModel`]'s precision and
//! `Q = Σ_{i,k} Λ_{j_i j_k} ⟨u_i, u_k⟩`.
//!
//! Against the noise the model describes the score is `N(∓μ/2, 1)`, `μ = r√Q`, and no test does better for those
//! differences. Against any other mechanism it is merely some statistic, and an audit stays valid. The directions `u_i` may
//! differ in sign and in kind from step to step: they are chosen so that `Q` is large.

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

/// Where and how an adversary puts its differences.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Strategy {
    /// From a fixed step on, in fixed directions.
    WorstColumn { start: usize },
    /// From a fixed step on, turned into the direction of the first answer.
    FirstAnswer { start: usize },
    /// Runs gradient descent on the answers and strikes, along the gradient, once the iterate has wandered off.
    Descent { first: usize, last: usize },
}

/// The participations of one unit that begins at a given step, and what it does at each.
#[derive(Clone, Debug, PartialEq)]
struct Pattern {
    steps: Vec<usize>,
    /// Unit vectors, all of the same few coordinates, one a step.
    directions: Vec<Vec<f64>>,
    /// `Q` of the module's formula.
    strength: f64,
}

impl Pattern {
    /// As often as one may take part from `start` on, in directions of at most `dimension` coordinates.
    fn new(model: &NoiseModel, neighbours: &Neighbours, start: usize, dimension: usize) -> Self {
        let steps: Vec<usize> =
            (start..model.steps()).step_by(neighbours.separation).take(neighbours.participations).collect();
        let (k, m) = (steps.len(), dimension.clamp(1, steps.len()));
        let axis = |i: usize| (0..m).map(|l| f64::from(u8::from(l == i % m))).collect::<Vec<f64>>();
        let scaled = |factor: f64| axis(0).into_iter().map(|x| factor * x).collect::<Vec<f64>>();
        // All alike, alternating, and all different: the best of what each leads to.
        let starts: [Vec<Vec<f64>>; 3] = [
            vec![axis(0); k],
            (0..k).map(|i| scaled(if i % 2 == 0 { 1.0 } else { -1.0 })).collect(),
            (0..k).map(axis).collect(),
        ];
        let gram = |i: usize, j: usize| model.weights(steps[j])[steps[i]];
        let mut best = Self { steps: steps.clone(), directions: starts[0].clone(), strength: 0.0 };
        for mut directions in starts {
            for _ in 0..SWEEPS {
                for i in 0..k {
                    let mut towards = vec![0.0; m];
                    for j in (0..k).filter(|j| *j != i) {
                        towards.iter_mut().zip(&directions[j]).for_each(|(to, x)| *to += gram(i, j) * x);
                    }
                    let norm = towards.iter().map(|x| x * x).sum::<f64>().sqrt();
                    if norm > 0.0 && norm.is_finite() {
                        directions[i] = towards.into_iter().map(|x| x / norm).collect();
                    }
                }
            }
            let dot = |i: usize, j: usize| -> f64 {
                directions[i].iter().zip(&directions[j]).map(|(x, y)| x * y).sum()
            };
            let pairs = (0..k).flat_map(|i| (0..k).map(move |j| (i, j)));
            let strength: f64 = pairs.map(|(i, j)| gram(i, j) * dot(i, j)).sum();
            if strength > best.strength {
                best = Self { steps: steps.clone(), directions, strength };
            }
        }
        best
    }
}

/// Rounds in which the directions of a pattern adapt to each other.
const SWEEPS: usize = 40;

/// An adversary that knows the distribution of the noise and plays the likelihood ratio.
#[derive(Clone, Debug)]
pub struct Informed<'a> {
    model: &'a NoiseModel,
    distance: f64,
    symmetric: bool,
    strategy: Strategy,
    /// What a unit does that begins at a step, for every step.
    patterns: Vec<Pattern>,
}

impl<'a> Informed<'a> {
    /// The adversary of a name, for inputs of so many coordinates.
    pub fn of(kind: AdversaryKind, model: &'a NoiseModel, neighbours: &Neighbours, dimension: usize) -> Self {
        match kind {
            AdversaryKind::WorstColumn => Self::worst_column(model, neighbours, dimension),
            AdversaryKind::Adaptive => Self::descent(model, neighbours, dimension),
            AdversaryKind::Paper => Self::first_answer(model, neighbours, dimension),
        }
    }

    /// The best non-adaptive adversary: the differences go where the encoder's columns add up to most.
    ///
    /// A factorization with more noise rows than steps hides part of its noise from every observer of the
    /// answers; against it even this adversary stays below the μ of the sensitivity.
    pub fn worst_column(model: &'a NoiseModel, neighbours: &Neighbours, dimension: usize) -> Self {
        Self::new(model, neighbours, dimension, |worst, _| Strategy::WorstColumn { start: worst(0) })
    }

    /// The paper's adversary: the first answer chooses the direction of later queries, those where
    /// differences show most. A mechanism of a single step leaves it nothing to adapt to.
    ///
    /// Reference: the attack of Appendix "Not all additive noise mechanisms are adaptively private" in
    /// \[DMRST22\].
    pub fn first_answer(model: &'a NoiseModel, neighbours: &Neighbours, dimension: usize) -> Self {
        let from = usize::from(model.steps() > 1);
        Self::new(model, neighbours, dimension, |worst, _| Strategy::FirstAnswer { start: worst(from) })
    }

    /// Gradient descent on `½‖θ − θ*‖²` from the mechanism's own answers, as training would run it. Steps and
    /// directions of the differences both depend on the iterate: they begin along the gradient, as soon as noise
    /// has carried the iterate away from its course, and at the latest at the last of the worst steps.
    pub fn descent(model: &'a NoiseModel, neighbours: &Neighbours, dimension: usize) -> Self {
        Self::new(model, neighbours, dimension, |worst, patterns| {
            // From the second step on there is something to adapt to.
            let first = worst(usize::from(model.steps() > 1));
            // Only steps that show differences about as well are worth waiting for.
            let needed = patterns[first].strength * WORTH_WAITING * WORTH_WAITING;
            let last =
                (first..patterns.len()).rev().find(|&j| patterns[j].strength > needed).unwrap_or(first);
            Strategy::Descent { first, last }
        })
    }

    fn new(
        model: &'a NoiseModel,
        neighbours: &Neighbours,
        dimension: usize,
        strategy: impl FnOnce(&dyn Fn(usize) -> usize, &[Pattern]) -> Strategy,
    ) -> Self {
        let patterns: Vec<Pattern> =
            (0..model.steps()).map(|start| Pattern::new(model, neighbours, start, dimension)).collect();
        let worst = |from: usize| {
            let strengths = || patterns.iter().map(|pattern| pattern.strength).enumerate().skip(from);
            let largest = strengths().map(|(_, strength)| strength).fold(0.0, f64::max);
            let found = strengths().find(|(_, strength)| *strength >= largest * (1.0 - 1e-6));
            found.map_or(from, |(start, _)| start)
        };
        let strategy = strategy(&worst, &patterns);
        // One of two records replaced: +ζ against −ζ. Otherwise: ζ against nothing.
        let symmetric = neighbours.adjacency.sensitivity_factor() > 1.0;
        Self { model, distance: neighbours.distance() * SHRINK, symmetric, strategy, patterns }
    }

    /// μ between the adversary's two streams, if the noise is what the model says, for the start that matters.
    pub fn mu(&self) -> f64 {
        let start = match self.strategy {
            Strategy::WorstColumn { start } | Strategy::FirstAnswer { start } => start,
            Strategy::Descent { first, .. } => first,
        };
        self.distance * self.patterns[start].strength.sqrt()
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
            frame: vec![],
            residuals: vec![],
            theta: vec![],
        })
    }
}

struct InformedPlayer<'a> {
    adversary: &'a Informed<'a>,
    /// The step of the first difference, once made.
    struck: Option<usize>,
    /// Orthonormal vectors that the directions of the pattern are turned into.
    frame: Vec<Vec<f64>>,
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
    /// Begins to take part, with the first of the pattern's coordinates along a vector.
    fn strike(&mut self, step: usize, towards: &[f64]) {
        self.struck = Some(step);
        self.frame.clear();
        let coordinates = self.adversary.patterns[step].directions[0].len();
        let axes = (0..towards.len()).map(|k| {
            let mut axis = vec![0.0; towards.len()];
            axis[k] = 1.0;
            axis
        });
        for mut vector in std::iter::once(towards.to_vec()).chain(axes) {
            if self.frame.len() == coordinates {
                break;
            }
            let size = vector.iter().map(|x| x * x).sum::<f64>().sqrt();
            for known in &self.frame {
                let along: f64 = vector.iter().zip(known).map(|(x, y)| x * y).sum();
                vector.iter_mut().zip(known).for_each(|(x, y)| *x -= along * y);
            }
            let norm = vector.iter().map(|x| x * x).sum::<f64>().sqrt();
            // What is left of an axis that the others span is rounding.
            if norm > 1e-6 * size && norm.is_finite() {
                self.frame.push(vector.into_iter().map(|x| x / norm).collect());
            }
        }
    }

    /// The direction of the pattern's participation number `i`.
    fn direction(&self, pattern: &Pattern, i: usize) -> Vec<f64> {
        let mut direction = vec![0.0; self.frame[0].len()];
        for (x, axis) in pattern.directions[i].iter().zip(&self.frame) {
            direction.iter_mut().zip(axis).for_each(|(to, axis)| *to += x * axis);
        }
        direction
    }
}

impl Player for InformedPlayer<'_> {
    fn reset(&mut self) {
        self.struck = None;
        self.frame.clear();
        self.residuals.clear();
        self.theta.clear();
    }

    fn choose(&mut self, step: usize, first: &mut [f64], second: &mut [f64]) {
        let d = first.len();
        match self.adversary.strategy {
            Strategy::WorstColumn { start } if step == start => self.strike(step, &vec![0.0; d]),
            Strategy::FirstAnswer { start } if step == start => {
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
                let strength = |start: usize| self.adversary.patterns[start].strength;
                let wandered = off * self.adversary.model.mu(from, 1.0).powi(2) > LEARNING_RATE
                    && strength(step) > strength(from) * WORTH_WAITING * WORTH_WAITING;
                if self.struck.is_none() && step >= from && step <= last && (wandered || step == last) {
                    self.strike(step, &self.theta.clone());
                }
            }
            _ => {}
        }
        let pattern = self.struck.map(|start| &self.adversary.patterns[start]);
        if let Some((pattern, i)) =
            pattern.and_then(|pattern| Some((pattern, pattern.steps.iter().position(|at| *at == step)?)))
        {
            let (distance, direction) = (self.adversary.distance, self.direction(pattern, i));
            let (plus, minus) = if self.adversary.symmetric { (0.5, -0.5) } else { (1.0, 0.0) };
            for k in 0..d {
                first[k] += minus * distance * direction[k];
                second[k] += plus * distance * direction[k];
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
        let Some(start) = self.struck else { return 0.0 };
        let pattern = &self.adversary.patterns[start];
        let d = self.frame[0].len();
        let mut matched = 0.0;
        for (i, &step) in pattern.steps.iter().enumerate() {
            let (weights, direction) = (self.adversary.model.weights(step), self.direction(pattern, i));
            for (residual, weight) in self.residuals.chunks_exact(d).zip(weights) {
                matched += weight * residual.iter().zip(&direction).map(|(r, v)| r * v).sum::<f64>();
            }
        }
        let root = pattern.strength.sqrt();
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
            InformedPlayer { adversary, struck: None, frame: vec![], residuals: vec![], theta: vec![] };
        let play = |seed| {
            let mut session = mechanism.start(1, &mut rng(11, seed)).unwrap();
            player.reset();
            for step in 0..mechanism.steps() {
                let (mut first, mut second) = (vec![0.0; d], vec![0.0; d]);
                player.choose(step, &mut first, &mut second);
                session.answer(&mut first).unwrap();
                player.observe(step, &first);
            }
            (player.struck.unwrap(), player.frame[0].clone(), player.score())
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
        assert_eq!(observe(Informed::worst_column(&model, &neighbours, 2)), (1, 1));
        assert_eq!(observe(Informed::first_answer(&model, &neighbours, 2)), (1, 200));
        let (steps, directions) = observe(Informed::descent(&model, &neighbours, 2));
        assert!(steps >= 4 && directions > 190, "{steps} {directions}");
    }

    #[test]
    fn names_round_trip() {
        let model = NoiseModel::new(&Mat::identity(2, 2), 1.0).unwrap();
        let neighbours = Neighbours::single(Adjacency::ReplaceWithZero, 1.0).unwrap();
        for kind in AdversaryKind::ALL {
            assert_eq!(kind.name().parse::<AdversaryKind>().unwrap(), kind);
            assert_eq!(Informed::of(kind, &model, &neighbours, 2).name(), kind.name());
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
            let adversary = Informed::worst_column(&model, &neighbours, 2);
            assert!((adversary.mu() - mu).abs() < 1e-8);
            let scores: Vec<f64> = games(&adversary, &mechanism, 20_000).into_iter().map(|g| g.2).collect();
            let mean = scores.iter().sum::<f64>() / 2e4;
            let variance = scores.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / 2e4;
            assert!((mean + mu / 2.0).abs() < 3.9 / 2e4_f64.sqrt(), "{mean} {mu}");
            assert!((variance - 1.0).abs() < 5.0 * (2.0 / 2e4_f64).sqrt(), "{variance}");
        }
    }
}
