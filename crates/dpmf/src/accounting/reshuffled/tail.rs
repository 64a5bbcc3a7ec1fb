//! The lower tail of the privacy loss, from samples of where it is not rare.
//!
//! The loss is the logarithm of a sum of exponentials of affine functions of the noise, and so convex: the sets `S_t = {L < −t}` are
//! convex. By Ehrhard's inequality, with `F_t(λ) = Φ⁻¹(N(−λd, I)(S_t))` for any direction `d`, `F_t` is concave in λ. What is asked for is
//! at λ = 0, where it is rare; at λ and 2λ it is not, so that plain counts bound it there, and
//!
//! ```text
//! F_t(0) ≤ 2F_t(λ) − F_t(2λ),      E_Q[(1 − e^{ε+L})_+] = ∫_0^∞ e^{−u} Φ(F_{ε+u}(0)) du .
//! ```
//!
//! Nothing has to be bounded but the counts. If the sets were half-spaces at a right angle to `d`, this would be exact; the rarer they are at 0,
//! the more is lost.
//!
//! Reference: A. Ehrhard, "Symétrisation dans l'espace de Gauss", 1983.

use crate::accounting::allocation::log_failure;
use crate::accounting::normal;

/// Distance of the thresholds beyond ε, and how many there are.
pub(super) const STEP: f64 = 1.0 / 16.0;
pub(super) const THRESHOLDS: usize = 64;

/// How many losses of samples were below each threshold.
#[derive(Clone, Debug)]
pub(super) struct Counts {
    below: Vec<u64>,
    samples: u64,
}

impl Counts {
    pub fn new() -> Self {
        Self { below: vec![0; THRESHOLDS], samples: 0 }
    }

    /// Counts by how much a loss is below −ε.
    pub fn take(&mut self, beyond: f64) {
        self.samples += 1;
        if beyond > 0.0 {
            // Those below the last threshold are below all others.
            let last = ((beyond / STEP) as usize).min(THRESHOLDS - 1);
            self.below[last] += 1;
        }
    }

    pub fn add(&mut self, other: &Self) {
        self.samples += other.samples;
        self.below.iter_mut().zip(&other.below).for_each(|(a, b)| *a += b);
    }

    /// Shares of samples below each threshold.
    fn shares(&self) -> Vec<f64> {
        let mut below = self.below.clone();
        for j in (1..THRESHOLDS).rev() {
            below[j - 1] += below[j];
        }
        below.into_iter().map(|count| count as f64 / self.samples.max(1) as f64).collect()
    }
}

/// An upper bound on `E_Q[(1 − e^{ε+L})_+]` from counts at λ and at 2λ, that fails no more often than any other. With `repeats`, each sample
/// counts as so many: what as many more would be expected to give.
pub(super) fn bound(once: &Counts, twice: &Counts, repeats: f64) -> f64 {
    let log = log_failure() + (2.0 * THRESHOLDS as f64).ln();
    let upper: Vec<f64> =
        once.shares().into_iter().map(|p| limit(p, repeats * once.samples as f64, log)).collect();
    // The share above has an upper limit, too.
    let lower: Vec<f64> = twice
        .shares()
        .into_iter()
        .map(|p| 1.0 - limit(1.0 - p, repeats * twice.samples as f64, log))
        .collect();
    let mut least = 1.0_f64;
    let mut total = 0.0;
    for (j, (&upper, &lower)) in upper.iter().zip(&lower).enumerate() {
        if upper < 1.0 && lower > 0.0 {
            // Φ⁻¹(p) = −quantile(p), outward.
            let at_zero = normal::upper_quantile(lower).hi - 2.0 * normal::upper_quantile(upper).lo;
            least = least.min(normal::upper_tail((-at_zero).next_down().into()).hi);
        }
        // The probability falls along the thresholds: between two it is at most that of the first.
        let from = libm::exp(-(j as f64) * STEP);
        let to = if j + 1 < THRESHOLDS { libm::exp(-(j as f64 + 1.0) * STEP) } else { 0.0 };
        total += (from - to) * least;
    }
    total * (1.0 + 1e-12)
}

/// The least probability, or a little more, under which a share of samples or less comes with a probability of at most `e^{−log}`.
///
/// Reference: the bound of Chernoff and Hoeffding by the relative entropy.
fn limit(share: f64, samples: f64, log: f64) -> f64 {
    let entropy = |p: f64| {
        let part = |a: f64, b: f64| if a > 0.0 { a * (a / b).ln() } else { 0.0 };
        part(share, p) + part(1.0 - share, 1.0 - p)
    };
    let (mut low, mut high) = (share, 1.0);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if samples * entropy(middle) >= log {
            high = middle;
        } else {
            low = middle;
        }
    }
    high
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_those_of_no_and_of_all_samples() {
        // Nothing in n samples: (1 − p)^n = e^{−log}.
        let nothing = limit(0.0, 1000.0, 20.0);
        assert!((nothing - -(-0.02_f64).exp_m1()).abs() < 1e-12, "{nothing}");
        assert_eq!(limit(1.0, 1000.0, 20.0), 1.0);
        assert!(limit(0.3, 1000.0, 20.0) > limit(0.3, 4000.0, 20.0));
        assert!(limit(0.3, 4000.0, 20.0) > 0.3);
    }

    /// Half-spaces, of which everything is known: `L = x − v/2` with a variance `v`.
    #[test]
    fn half_spaces_are_extrapolated_with_little_loss() {
        let (epsilon, v, samples) = (3.0_f64, 0.6_f64, 1_u64 << 40);
        let (sd, lambda) = (v.sqrt(), 0.5 * (epsilon - 0.3) / 0.6);
        let phi = |x: f64| 0.5 * libm::erfc(-x / std::f64::consts::SQRT_2);
        let counts = |tilt: f64| {
            let share = |j: usize| phi((-epsilon - j as f64 * STEP + 0.5 * v + tilt * v) / sd);
            let below = (0..THRESHOLDS).map(|j| {
                let here = share(j) - if j + 1 < THRESHOLDS { share(j + 1) } else { 0.0 };
                (here * samples as f64) as u64
            });
            Counts { below: below.collect(), samples }
        };
        let exact = phi((0.5 * v - epsilon) / sd) - epsilon.exp() * phi((-0.5 * v - epsilon) / sd);
        let bound = bound(&counts(lambda), &counts(2.0 * lambda), 1.0);
        assert!(bound >= exact && bound < 1.3 * exact, "{bound:e} {exact:e}");
    }
}
