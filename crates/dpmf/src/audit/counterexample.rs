//! Noise that is private for fixed inputs and not for adaptive ones.
//!
//! The mechanism releases `(x₁ + σA, x₂ + σB)`: `A` is white in `d` dimensions, `B` is white across `A` but has
//! standard deviation `η ≪ 1` along it. An input fixed in advance is almost orthogonal to `A` and the thin
//! direction does not matter; an adversary that has seen `A` asks along it, and the noise it meets is `ση`.
//!
//! `A` has the same distribution for every input, so the hockey-stick divergence of the pair is the mean over `A`
//! of that of `B`, which is Gaussian. With `T` a coordinate of a random unit vector, non-adaptively
//!
//! `δ(ε) = E δ_{μ(T)}(ε)`, `μ(T)² = (4/σ²)(1 + T²(1/η² − 1))`,
//!
//! for the worst pair `±x₂`, `‖x₂‖ = 1`; adaptively `T = 1` and `μ = 2/(ση)`.
//!
//! Two remarks on the paper's text. Its `Σ = I − (1 − η)AAᵀ/‖A‖²` has *variance* η along `A`, while all that follows
//! uses *standard deviation* η; so does this. And it prints `η = 5√(log d)/d`, with which the proof's "`W` is at
//! most η" fails, `W` being of order `1/√d`: see [`printed_eta`]. `η = 5√(log d/d)` makes it true.
//!
//! Reference: Appendix "Not all additive noise mechanisms are adaptively private" of \[DMRST22\].

use super::adversary::Informed;
use super::binomial::upper_limit;
use super::empirical::{AuditOptions, Test, tally};
use super::game::{Adversary, AuditRng, Neighbours, Player, Session, StreamMechanism};
use super::mechanism::{MatrixMechanism, NoiseModel};
use crate::accounting::{Adjacency, check_epsilon, check_positive, gaussian, shown};
use crate::error::{Error, Result};
use faer::Mat;
use rand_distr::{Distribution, StandardNormal};
use serde::Serialize;

/// The two-step mechanism.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CounterExample {
    dimension: usize,
    noise: f64,
    eta: f64,
}

/// `5√(ln d/d)`, at most 1: thin enough to be attacked, wide enough to hide a direction fixed in advance.
pub fn sufficient_eta(dimension: usize) -> f64 {
    let d = dimension as f64;
    (5.0 * (d.ln() / d).sqrt()).min(1.0)
}

/// `5√(ln d)/d`, at most 1, as the paper prints it: so thin that even fixed inputs are exposed as `d` grows,
/// because a fixed direction has a component of order `1/√d ≫ η` along `A`.
pub fn printed_eta(dimension: usize) -> f64 {
    let d = dimension as f64;
    (5.0 * d.ln().sqrt() / d).min(1.0)
}

/// ε at one δ, for one dimension.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CounterExampleRow {
    /// Dimension `d`.
    pub dimension: usize,
    /// Standard deviation σ of the noise in all directions but one.
    pub noise: f64,
    /// Factor η of that one direction.
    pub eta: f64,
    /// δ of every ε in the row.
    pub delta: f64,
    /// Upper bound for inputs fixed in advance.
    pub epsilon_nonadaptive: f64,
    /// Lower bound for adaptive inputs, from the attack.
    pub epsilon_adaptive: f64,
    /// The Gaussian mechanism of the same σ, for both.
    pub epsilon_gaussian: f64,
}

/// One adversary's measured success against one mechanism.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Attack {
    /// `counter-example` or `gaussian`.
    pub mechanism: &'static str,
    /// `fixed` or `paper`.
    pub adversary: &'static str,
    /// The test at threshold zero.
    pub test: Test,
    /// Share of the games in which the bit was named rightly.
    pub success: f64,
    /// Lower bound on ε at δ, without assumptions.
    pub epsilon_lower: f64,
}

impl CounterExample {
    /// The mechanism in `d ≥ 3` dimensions with noise σ and thin direction `0 < η ≤ 1`.
    ///
    /// Errors: a parameter outside its domain.
    pub fn new(dimension: usize, noise: f64, eta: f64) -> Result<Self> {
        if dimension < 3 {
            return Err(Error::argument("dimension", dimension, "the counter-example needs at least 3"));
        }
        check_positive("noise", noise)?;
        if !(eta > 0.0 && eta <= 1.0) {
            return Err(Error::argument("eta", eta, "it must lie in (0, 1]"));
        }
        Ok(Self { dimension, noise, eta })
    }

    /// μ between the worst pair of second inputs whose difference has the share `t` of its length along `A`.
    fn mu(&self, t: f64) -> f64 {
        let thin = 1.0 / (self.eta * self.eta) - 1.0;
        2.0 / self.noise * (1.0 + t * t * thin).sqrt()
    }

    /// δ at ε for inputs fixed in advance.
    ///
    /// Guarantee: an upper bound, tight to about a percent: in each of 2048 cells the probability of `T` is bounded by
    /// log-concavity of its density and `δ_μ` by its value at the far end.
    /// Errors: ε not positive and finite.
    pub fn nonadaptive_delta(&self, epsilon: f64) -> Result<f64> {
        check_epsilon(epsilon)?;
        let cells = self.cells();
        Ok(self.mean_delta(&cells, epsilon))
    }

    /// ε at δ for inputs fixed in advance.
    ///
    /// Guarantee: an upper bound, from [`CounterExample::nonadaptive_delta`].
    /// Errors: δ outside (0, 1), or below 1e-25, where the mass of `T` that is left out would matter.
    pub fn nonadaptive_epsilon(&self, delta: f64) -> Result<f64> {
        if !(1e-25..1.0).contains(&delta) {
            return Err(Error::argument("delta", shown(delta), "it must lie between 1e-25 and 1"));
        }
        let cells = self.cells();
        // Gaussian ε without and with the whole thin direction: below and above the mixture's.
        let mut lo = 0.0;
        let mut hi = gaussian::epsilon(self.mu(1.0), delta)? * (1.0 + 1e-6) + 1e-9;
        while hi - lo > 1e-7 * hi {
            let middle = 0.5 * (lo + hi);
            if self.mean_delta(&cells, middle) <= delta {
                hi = middle;
            } else {
                lo = middle;
            }
        }
        Ok(hi)
    }

    /// ε at δ that the adaptive attack proves: the Gaussian one at `μ = 2/(ση)`.
    ///
    /// Guarantee: rounded down; no smaller ε is true.
    /// Errors: δ outside (0, 1).
    pub fn adaptive_epsilon(&self, delta: f64) -> Result<f64> {
        gaussian::epsilon_lower(self.mu(1.0), delta)
    }

    /// The paper's own lower bound for the attack, `1/(2(ση)²) − ln(2/(1 − 2δ))`, at least 0, for `δ < 1/2`.
    ///
    /// Errors: δ outside (0, 1/2).
    pub fn paper_lower_bound(&self, delta: f64) -> Result<f64> {
        if !(delta > 0.0 && delta < 0.5) {
            return Err(Error::argument("delta", delta, "it must lie strictly between 0 and 1/2"));
        }
        let thin = self.noise * self.eta;
        Ok((0.5 / (thin * thin) - (2.0 / (1.0 - 2.0 * delta)).ln()).max(0.0))
    }

    /// All three ε at one δ.
    ///
    /// Errors: as [`CounterExample::nonadaptive_epsilon`].
    pub fn row(&self, delta: f64) -> Result<CounterExampleRow> {
        Ok(CounterExampleRow {
            dimension: self.dimension,
            noise: self.noise,
            eta: self.eta,
            delta,
            epsilon_nonadaptive: self.nonadaptive_epsilon(delta)?,
            epsilon_adaptive: self.adaptive_epsilon(delta)?,
            epsilon_gaussian: gaussian::epsilon(self.mu(0.0), delta)?,
        })
    }

    /// Plays three matches: the best fixed input and the paper's adversary against the counter-example, and the same
    /// adversary against white Gaussian noise of the same σ, which it cannot exploit.
    ///
    /// Cost: `6 · trials · d` normal draws.
    /// Errors: no trials, confidence or δ outside (0, 1).
    pub fn simulate(&self, delta: f64, options: AuditOptions) -> Result<[Attack; 3]> {
        if options.trials == 0 {
            return Err(Error::argument("trials", 0, "at least one game is needed"));
        }
        for (name, value) in [("confidence", options.confidence), ("delta", delta)] {
            if !(value > 0.0 && value < 1.0) {
                return Err(Error::argument(name, value, "it must lie strictly between 0 and 1"));
            }
        }
        // Every pair of second inputs of norm at most 1 is a pair of neighbours.
        let neighbours = Neighbours::single(Adjacency::ReplaceOne, 1.0)?;
        let white = MatrixMechanism::new(Mat::identity(2, 2), self.noise, self.dimension)?;
        let model: NoiseModel = white.noise_model()?;
        let paper = Informed::first_answer(&model, &neighbours, self.dimension);
        let fixed = Fixed { noise: self.noise, eta: self.eta };
        let matches: [(&'static str, &dyn StreamMechanism, &dyn Adversary); 3] = [
            ("counter-example", self, &fixed),
            ("counter-example", self, &paper),
            ("gaussian", &white, &paper),
        ];
        let mut attacks = Vec::with_capacity(3);
        for (name, mechanism, adversary) in matches {
            let counts = tally(mechanism, adversary, &neighbours, None, &options, |outcome| {
                let (second, named) = (u64::from(outcome.second), u64::from(outcome.score > 0.0));
                [1 - second, second, (1 - second) * named, second * (1 - named)]
            })?;
            let [first_games, second_games, false_positives, false_negatives] = counts;
            let tail = 0.5 * (1.0 - options.confidence);
            let limit = |count, games| if games == 0 { 1.0 } else { upper_limit(count, games, tail) };
            let test = Test {
                threshold: 0.0,
                first_games,
                second_games,
                false_positives,
                false_negatives,
                false_positive_limit: limit(false_positives, first_games),
                false_negative_limit: limit(false_negatives, second_games),
            };
            attacks.push(Attack {
                mechanism: name,
                adversary: adversary.name(),
                test,
                success: 1.0 - (false_positives + false_negatives) as f64 / options.trials as f64,
                epsilon_lower: test.epsilon_lower(delta),
            });
        }
        Ok([attacks[0], attacks[1], attacks[2]])
    }

    /// Cells of `T ∈ [0, 1]`: an upper bound on the probability of each, and μ at its far end.
    fn cells(&self) -> Vec<(f64, f64)> {
        const CELLS: usize = 2048;
        let d = self.dimension as f64;
        let end = (12.0 / d.sqrt()).min(1.0);
        let h = end / CELLS as f64;
        let k = 0.5 * (d - 3.0);
        // Density 2c(1 − t²)ᵏ, c = Γ(d/2)/(√π Γ((d − 1)/2)) ≤ √((d − 1)/(2π)) by Wendel's inequality.
        let ln_factor = (2.0 * ((d - 1.0) / std::f64::consts::TAU).sqrt()).ln();
        let mut cells = Vec::with_capacity(CELLS + 1);
        for i in 0..CELLS {
            let middle = (i as f64 + 0.5) * h;
            let ln_density = ln_factor + k * libm::log1p(-middle * middle);
            // Below its tangent in the logarithm: the mean over the cell is at most sinh(x)/x times the middle.
            let x = k * middle / (1.0 - middle * middle) * h;
            let spread = if x < 1e-4 { 1.0 + x * x } else { x.sinh() / x };
            // 1e-9 for the roundings of this line and the two above.
            cells.push((ln_density.exp() * h * spread * (1.0 + 1e-9), self.mu((i + 1) as f64 * h)));
        }
        if end < 1.0 {
            // P(|T| > t) ≤ 2 exp(−dt²/2): at 12/√d, 1e-31.
            cells.push((2.0 * (-72.0_f64).exp(), self.mu(1.0)));
        }
        cells
    }

    fn mean_delta(&self, cells: &[(f64, f64)], epsilon: f64) -> f64 {
        let delta = |&(mass, mu): &(f64, f64)| mass * gaussian::ln_delta_enclosure(mu, epsilon).hi.exp();
        (cells.iter().map(delta).sum::<f64>() * (1.0 + 1e-9)).min(1.0)
    }
}

impl StreamMechanism for CounterExample {
    fn steps(&self) -> usize {
        2
    }

    fn dimension(&self) -> usize {
        self.dimension
    }

    fn start(&self, games: usize, rng: &mut AuditRng) -> Result<Box<dyn Session + '_>> {
        let mut normal =
            || -> Vec<f64> { (0..games * self.dimension).map(|_| StandardNormal.sample(rng)).collect() };
        let (a, mut b) = (normal(), normal());
        for (a, b) in a.chunks_exact(self.dimension).zip(b.chunks_exact_mut(self.dimension)) {
            // White noise, its component along A scaled by η.
            let along = dot(a, b) / dot(a, a);
            b.iter_mut().zip(a).for_each(|(b, a)| *b += (self.eta - 1.0) * along * a);
        }
        Ok(Box::new(Noise { noise: self.noise, rows: vec![b, a] }))
    }
}

struct Noise {
    noise: f64,
    /// Noise of the steps still to come, the next one last.
    rows: Vec<Vec<f64>>,
}

impl Session for Noise {
    fn answer(&mut self, rows: &mut [f64]) -> Result<()> {
        let noise =
            self.rows.pop().ok_or_else(|| Error::argument("step", 2, "the counter-example has two steps"))?;
        rows.iter_mut().zip(&noise).for_each(|(x, z)| *x += self.noise * z);
        Ok(())
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The best adversary that fixes its inputs in advance: `∓e₁` at the second step, then the likelihood ratio
/// given the first answer.
#[derive(Clone, Copy, Debug)]
struct Fixed {
    noise: f64,
    eta: f64,
}

struct FixedPlayer {
    adversary: Fixed,
    first_answer: Vec<f64>,
    score: f64,
}

impl Adversary for Fixed {
    fn name(&self) -> &'static str {
        "fixed"
    }

    fn player(&self) -> Box<dyn Player + '_> {
        Box::new(FixedPlayer { adversary: *self, first_answer: vec![], score: 0.0 })
    }
}

impl Player for FixedPlayer {
    fn reset(&mut self) {
        self.first_answer.clear();
        self.score = 0.0;
    }

    fn choose(&mut self, step: usize, first: &mut [f64], second: &mut [f64]) {
        if step == 1 {
            (first[0], second[0]) = (-1.0, 1.0);
        }
    }

    fn observe(&mut self, step: usize, answer: &[f64]) {
        if step == 0 {
            self.first_answer.extend_from_slice(answer);
        } else {
            // ⟨2e₁, Σ⁻¹b⟩ with Σ⁻¹ = (I + (1/η² − 1) aaᵀ/‖a‖²)/σ².
            let Fixed { noise, eta } = self.adversary;
            let a = &self.first_answer;
            let along = a[0] * dot(a, answer) / dot(a, a);
            self.score = 2.0 * (answer[0] + (1.0 / (eta * eta) - 1.0) * along) / (noise * noise);
        }
    }

    fn score(&mut self) -> f64 {
        self.score
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::game::rng;

    #[test]
    fn noise_is_thin_along_the_first_answer_only() {
        let example = CounterExample::new(16, 3.0, 0.25).unwrap();
        let games = 20_000;
        let mut session = example.start(games, &mut rng(2, 0)).unwrap();
        let (mut a, mut b) = (vec![0.0; 16 * games], vec![0.0; 16 * games]);
        session.answer(&mut a).unwrap();
        session.answer(&mut b).unwrap();
        assert!(session.answer(&mut a.clone()).is_err());
        let (mut along, mut total) = (0.0, 0.0);
        for (a, b) in a.chunks_exact(16).zip(b.chunks_exact(16)) {
            along += dot(a, b).powi(2) / dot(a, a) / games as f64;
            total += dot(b, b) / games as f64;
        }
        // (ση)² = 0.5625 along, 15σ² across; 5 standard deviations of each mean.
        assert!((along - 0.5625).abs() < 5.0 * 0.5625 * (2.0 / games as f64).sqrt(), "{along}");
        assert!((total - 135.5625).abs() < 5.0 * 9.0 * (30.0 / games as f64).sqrt(), "{total}");
    }

    #[test]
    fn without_a_thin_direction_all_are_the_gaussian() {
        let row = CounterExample::new(50, 4.0, 1.0).unwrap().row(1e-6).unwrap();
        let exact = gaussian::epsilon(0.5, 1e-6).unwrap();
        assert!((row.epsilon_adaptive / exact - 1.0).abs() < 1e-9);
        assert!(
            row.epsilon_nonadaptive >= exact && row.epsilon_nonadaptive < exact * 1.002,
            "{row:?} {exact}"
        );
    }

    #[test]
    fn the_bound_of_fixed_inputs_is_tight() {
        // In three dimensions T is uniform on [0, 1]: a plain midpoint rule for comparison.
        let example = CounterExample::new(3, 5.0, 0.3).unwrap();
        for epsilon in [0.3, 2.0] {
            let n = 20_000;
            let mean = (0..n)
                .map(|i| {
                    gaussian::delta(example.mu((i as f64 + 0.5) / n as f64), epsilon).unwrap() / n as f64
                })
                .sum::<f64>();
            let bound = example.nonadaptive_delta(epsilon).unwrap();
            // Wendel's inequality costs a factor √(4/π) at d = 3.
            assert!(bound >= mean && bound < mean * 1.14, "{bound} {mean}");
        }
        // And in a hundred, against random directions.
        use rand_distr::{Distribution, StandardNormal};
        let example = CounterExample::new(100, 5.0, 0.3).unwrap();
        let mut rng = rng(3, 0);
        let draws = 20_000;
        let mut values = Vec::new();
        for _ in 0..draws {
            let a: Vec<f64> = (0..100).map(|_| StandardNormal.sample(&mut rng)).collect();
            values.push(gaussian::delta(example.mu(a[0].abs() / dot(&a, &a).sqrt()), 1.0).unwrap());
        }
        let mean = values.iter().sum::<f64>() / draws as f64;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / draws as f64;
        let (bound, deviation) = (example.nonadaptive_delta(1.0).unwrap(), (variance / draws as f64).sqrt());
        assert!(bound > mean - 4.0 * deviation && bound < mean * 1.02 + 4.0 * deviation, "{bound} {mean}");
    }

    #[test]
    fn private_for_fixed_inputs_and_not_for_adaptive_ones() {
        let row = |d: usize, eta: f64| CounterExample::new(d, 10.0, eta).unwrap().row(1e-6).unwrap();
        let rows = [1_000, 10_000, 100_000, 1_000_000].map(|d| row(d, sufficient_eta(d)));
        for pair in rows.windows(2) {
            // Fixed inputs: ever closer to the Gaussian. Adaptive inputs: ever worse.
            assert!(pair[1].epsilon_nonadaptive < pair[0].epsilon_nonadaptive, "{pair:?}");
            assert!(pair[1].epsilon_adaptive > 2.0 * pair[0].epsilon_adaptive, "{pair:?}");
        }
        let last = rows[3];
        assert!(last.epsilon_nonadaptive < 1.1 * last.epsilon_gaussian, "{last:?}");
        assert!(last.epsilon_adaptive > 100.0 * last.epsilon_nonadaptive, "{last:?}");
        // The scale that the paper prints exposes fixed inputs as well, the more the larger d is.
        let printed = [1_000, 100_000].map(|d| row(d, printed_eta(d)));
        assert!(printed[0].epsilon_nonadaptive > 5.0 * printed[0].epsilon_gaussian, "{printed:?}");
        assert!(printed[1].epsilon_nonadaptive > 10.0 * printed[0].epsilon_nonadaptive, "{printed:?}");
    }

    #[test]
    fn the_papers_bound_is_below_the_exact_attack() {
        // ση < 1/3 and δ = 1/4: at least 1/(3(ση)²), as the proposition says.
        for (noise, eta) in [(1.0, 0.3), (2.0, 0.1), (10.0, 0.001)] {
            let example = CounterExample::new(100, noise, eta).unwrap();
            let (paper, exact) =
                (example.paper_lower_bound(0.25).unwrap(), example.adaptive_epsilon(0.25).unwrap());
            assert!(paper >= 1.0 / (3.0 * (noise * eta).powi(2)) && exact >= paper, "{paper} {exact}");
        }
    }

    #[test]
    fn the_attack_succeeds_where_it_should() {
        let example = CounterExample::new(256, 2.0, 0.15).unwrap();
        let options = AuditOptions { trials: 20_000, seed: 9, ..Default::default() };
        let [fixed, adaptive, gaussian] = example.simulate(1e-6, options).unwrap();
        assert_eq!([fixed.adversary, adaptive.adversary, gaussian.adversary], ["fixed", "paper", "paper"]);
        // Φ(1/(ση)) = Φ(3.33) = 0.99957 against Φ(1/σ) = 0.6915; five standard deviations of 20 000 games.
        assert!((adaptive.success - 0.99957).abs() < 5.0 * 1.5e-4, "{adaptive:?}");
        assert!((gaussian.success - 0.69146).abs() < 5.0 * 3.3e-3, "{gaussian:?}");
        // Fixed inputs gain a little from the thin direction: the mean of Φ(μ(T)/2).
        assert!(fixed.success > gaussian.success && fixed.success < 0.76, "{fixed:?}");
        assert!(
            adaptive.epsilon_lower > 6.0 && adaptive.epsilon_lower < example.adaptive_epsilon(1e-6).unwrap()
        );
        assert!(fixed.epsilon_lower < example.nonadaptive_epsilon(1e-6).unwrap());
    }

    #[test]
    fn bad_input_is_named() {
        let message = |result: Result<CounterExample>| result.unwrap_err().to_string();
        assert!(message(CounterExample::new(2, 1.0, 0.5)).starts_with("dimension is 2"));
        assert!(message(CounterExample::new(9, 0.0, 0.5)).starts_with("noise is 0"));
        assert!(message(CounterExample::new(9, 1.0, 1.5)).starts_with("eta is 1.5"));
        let example = CounterExample::new(9, 1.0, 0.5).unwrap();
        assert!(example.nonadaptive_epsilon(1e-30).unwrap_err().to_string().starts_with("delta is 1e-30"));
        assert!(example.nonadaptive_delta(f64::NAN).unwrap_err().to_string().starts_with("epsilon is NaN"));
        assert!(example.paper_lower_bound(0.5).unwrap_err().to_string().starts_with("delta is 0.5"));
        let options = AuditOptions { trials: 0, ..Default::default() };
        assert!(example.simulate(1e-6, options).unwrap_err().to_string().starts_with("trials is 0"));
    }
}
