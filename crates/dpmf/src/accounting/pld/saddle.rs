//! The range of the privacy loss of a composition that determines δ: exponential tilting by the saddle point.
//!
//! Nothing here enters a guarantee: the tilt and the window decide how narrow a bracket is, not whether it holds.

use super::Phase;
use super::round::Round;

/// The tilt of one phase: mass under `Q` times `e^{κL − shift}`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tilt {
    pub kappa: f64,
    pub shift: f64,
    /// κ and shift at the saddle point, where a loss counts for what it contributes to δ.
    pub saddle: (f64, f64),
    /// Standard deviation of one loss there.
    pub deviation: f64,
    /// The mass of a cell times its width squared that is not worth a finer cell.
    pub negligible: f64,
    /// The widest cell: one loss may decide alone, where there is little tilted mass.
    pub widest: f64,
    /// Whether P is tested against Q, or the other way about.
    pub remove: bool,
}

/// The losses of a phase at quadrature points, with `ln` of their weights under `Q`.
struct Points {
    rounds: f64,
    loss: Vec<f64>,
    ln_weight: Vec<f64>,
}

impl Points {
    fn new(phase: &Phase, tail: f64) -> Self {
        let round = Round::new(phase);
        let reach = (-2.0 * libm::log(tail.min(0.1))).sqrt() + 1.0;
        let step = (0.4 * round.sigma).clamp(0.04, 0.25);
        let count = ((2.0 * reach + 1.0 / round.sigma) / step) as usize + 2;
        let z = |j: usize| -reach + j as f64 * step;
        let ln_step = libm::log(step) - 0.918_938_533_204_672_8;
        Self {
            rounds: phase.rounds as f64,
            loss: (0..count).map(|j| round.loss(z(j))).collect(),
            ln_weight: (0..count).map(|j| ln_step - 0.5 * z(j) * z(j)).collect(),
        }
    }

    /// `ln E e^{κL}`, and the tilted mean and variance.
    fn cumulants(&self, kappa: f64) -> [f64; 3] {
        let exponent = |j: usize| self.ln_weight[j] + kappa * self.loss[j];
        let largest = (0..self.loss.len()).map(exponent).fold(f64::NEG_INFINITY, f64::max);
        // About the loss of the largest term, so that the variance does not cancel.
        let about = (0..self.loss.len()).find(|&j| exponent(j) == largest).map_or(0.0, |j| self.loss[j]);
        let mut sums = [0.0; 3];
        for j in 0..self.loss.len() {
            let e = exponent(j) - largest;
            if e > -46.0 {
                let (w, x) = (libm::exp(e), self.loss[j] - about);
                sums[0] += w;
                sums[1] += w * x;
                sums[2] += w * x * x;
            }
        }
        let mean = sums[1] / sums[0];
        [largest + libm::log(sums[0]), about + mean, (sums[2] / sums[0] - mean * mean).max(1e-300)]
    }
}

/// The cumulants of a whole composition, in one direction.
pub(super) struct Saddle {
    points: Vec<Points>,
    remove: bool,
}

impl Saddle {
    pub fn new(phases: &[Phase], remove: bool, tail: f64) -> Self {
        Self { points: phases.iter().map(|p| Points::new(p, tail)).collect(), remove }
    }

    /// The exponent of the loss under `Q` that tilts the numerator's measure by θ.
    fn kappa(&self, theta: f64) -> f64 {
        if self.remove { 1.0 + theta } else { -theta }
    }

    /// `ln E e^{θS}`, mean and variance of the total loss under the tilt.
    pub fn cumulants(&self, theta: f64) -> [f64; 3] {
        let sign = if self.remove { 1.0 } else { -1.0 };
        let mut total = [0.0; 3];
        for points in &self.points {
            let [k, mean, variance] = points.cumulants(self.kappa(theta));
            total[0] += points.rounds * k;
            total[1] += sign * points.rounds * mean;
            total[2] += points.rounds * variance;
        }
        total
    }

    /// `ln δ` by the saddle point of `θ`, at the ε where that is the best.
    fn ln_delta(&self, theta: f64) -> (f64, f64) {
        let [k, mean, variance] = self.cumulants(theta);
        // δ = E e^{K − θS} (1 − e^{ε − S})₊: the factor moves the saddle by 1/θ + 1/(1 + θ).
        let (a, b) = (1.0 / theta, 1.0 / (1.0 + theta));
        let epsilon = mean - a - b;
        let spread = variance + a * a + b * b;
        let ln = k - theta * epsilon + libm::log(a * b) - 0.5 * libm::log(std::f64::consts::TAU * spread);
        (ln.min(0.0), epsilon)
    }

    /// The θ at which `ln δ` is as given, and its ε.
    pub fn at_delta(&self, ln_delta: f64) -> (f64, f64) {
        let theta = bisect(|theta| self.ln_delta(theta).0 > ln_delta);
        (theta, self.ln_delta(theta).1)
    }

    /// The θ at which ε is as given, and its `ln δ`.
    pub fn at_epsilon(&self, epsilon: f64) -> (f64, f64) {
        let theta = bisect(|theta| self.ln_delta(theta).1 < epsilon);
        (theta, self.ln_delta(theta).0)
    }

    /// How far the tilted total may lie above and below its mean, but for a mass `e^{ln_mass}`, and the exponents that
    /// show it.
    pub fn window(&self, theta: f64, ln_mass: f64) -> [(f64, f64); 2] {
        let [k, mean, variance] = self.cumulants(theta);
        [1.0, -1.0].map(|sign| {
            let bound = |factor: f64| {
                let t = sign * factor / variance.sqrt();
                let [k_t, ..] = self.cumulants(theta + t);
                ((k_t - k - t * mean - ln_mass) / t.abs(), t)
            };
            [0.3, 0.6, 1.0, 1.5, 2.0, 2.6, 3.3, 4.2, 5.5, 7.5, 11.0, 16.0]
                .into_iter()
                .map(bound)
                .filter(|b| b.0.is_finite())
                .fold((f64::INFINITY, sign), |a, b| if b.0 < a.0 { b } else { a })
        })
    }

    /// The tilt of every phase by θ, where the saddle point is `saddle` and one cell may widen the bracket by `width`, or
    /// by some hundred times that if it is the one that decides.
    pub fn tilts(&self, theta: f64, saddle: f64, width: f64) -> Vec<Tilt> {
        let tilt = |points: &Points| {
            let [shift, ..] = points.cumulants(self.kappa(theta));
            let [saddle_shift, _, variance] = points.cumulants(self.kappa(saddle));
            Tilt {
                kappa: self.kappa(theta),
                shift,
                saddle: (self.kappa(saddle), saddle_shift),
                deviation: variance.sqrt(),
                negligible: 8.0 * width / (points.rounds * saddle),
                widest: (250.0 * width / saddle).sqrt(),
                remove: self.remove,
            }
        };
        self.points.iter().map(tilt).collect()
    }
}

/// The θ in [1e-9, 1e9] where a condition that holds for small ones ends, to a relative 1e-4.
fn bisect(holds: impl Fn(f64) -> bool) -> f64 {
    let (mut low, mut high) = (-20.0_f64, 20.0_f64);
    while high - low > 1e-3 {
        let middle = 0.5 * (low + high);
        if holds(libm::exp(middle)) {
            low = middle;
        } else {
            high = middle;
        }
    }
    libm::exp(0.5 * (low + high))
}
