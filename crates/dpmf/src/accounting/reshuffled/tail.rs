//! The upper part of what leaving costs, from slices where it is not rare.
//!
//! The loss is the logarithm of a sum of exponentials of affine functions of the noise, and so convex: the sets `S_t = {L < −t}` are
//! convex. Cut them by the planes on which the mean `ȳ` of the patterns is `u`, and let `p_t(u)` be the Gaussian measure of a slice within its
//! plane. By Ehrhard's inequality `g_t = Φ⁻¹∘p_t` is concave, and it falls, since products of columns are not negative: noise along the
//! patterns raises the loss. So beyond a point `a` it stays below the line through its values at `a` and at `a' < a`,
//!
//! ```text
//! g_t(u) ≤ g_t(a) − (u − a)(g_t(a') − g_t(a))/(a − a'),    u ≥ a ,
//! E_Q[(1 − e^{ε+L})_+; ȳ ≥ a] = ∫_a^∞ ∫_0^∞ e^{−s} p_{ε+s}(u) ds dN(0, v)(u) .
//! ```
//!
//! Plain counts of samples on the two planes bound the values there. Where half-spaces at a right angle to the planes are all there is, this
//! is exact.
//!
//! Reference: A. Ehrhard, "Symétrisation dans l'espace de Gauss", 1983.

use crate::accounting::allocation::log_failure;
use crate::accounting::normal;

/// Distance of the thresholds beyond ε, and how many there are.
pub(super) const STEP: f64 = 1.0 / 32.0;
pub(super) const THRESHOLDS: usize = 64;

/// Cells of `u`, in standard deviations, and how many there are before the last.
const CELL: f64 = 1.0 / 32.0;
const CELLS: usize = 320;

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

/// Where slices are cut: two values of `ȳ` in standard deviations of it, and one beyond which there is nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Planes {
    pub lower: f64,
    pub upper: f64,
    pub end: f64,
}

/// An upper bound on `E_Q[(1 − e^{ε+L})_+; ȳ ≥ a]` from counts on both planes, that fails half as often as any other. With `repeats`, each
/// sample counts as so many: what as many more would be expected to give.
pub(super) fn bound(planes: Planes, lower: &Counts, upper: &Counts, repeats: f64) -> f64 {
    let log = log_failure() + (4.0 * THRESHOLDS as f64).ln();
    let at = |counts: &Counts| repeats * counts.samples as f64;
    let limits = upper.shares().into_iter().zip(lower.shares());
    // What is at most there at the upper plane, and how fast the quantile falls from there on. The share below a plane has a limit of what is
    // not in it, too.
    let lines: Vec<[f64; 3]> = limits
        .map(|(here, before)| {
            let here = limit(here, at(upper), log);
            let before = 1.0 - limit(1.0 - before, at(lower), log);
            if here >= 1.0 || before <= 0.0 {
                return [here, f64::INFINITY, 0.0];
            }
            // Φ⁻¹(p) = −quantile(p), outward.
            let (high, low) = (-normal::upper_quantile(here).lo, -normal::upper_quantile(before).hi);
            [here, high, ((high - low) / (planes.upper - planes.lower)).min(0.0)]
        })
        .collect();
    // The probability falls along the cells and along the thresholds: in each it is at most that of where it begins.
    let at_distance = |distance: f64| {
        let (mut least, mut total) = (1.0_f64, 0.0);
        for (j, &[most, value, slope]) in lines.iter().enumerate() {
            least = least.min(most);
            if slope < 0.0 {
                let line = (value + distance * slope).next_up();
                least = least.min(normal::upper_tail((-line).into()).hi);
            }
            let from = libm::exp(-(j as f64) * STEP);
            let to = if j + 1 < THRESHOLDS { libm::exp(-(j as f64 + 1.0) * STEP) } else { 0.0 };
            total += (from - to) * least;
        }
        total
    };
    // A little to the left of the plane, since rounding may put a sample on its other side.
    let left = |cell: usize| (planes.upper - 1e-6 + cell as f64 * CELL).min(planes.end + 1e-6);
    let above = |cell: usize| normal::upper_tail(left(cell).into());
    let cells = (0..CELLS).take_while(|cell| left(*cell) <= planes.end).map(|cell| {
        let mass = (above(cell).hi - above(cell + 1).lo).max(0.0);
        mass * at_distance((left(cell) - planes.upper).max(0.0))
    });
    let last = match left(CELLS) > planes.end {
        true => 0.0,
        false => above(CELLS).hi * at_distance(left(CELLS) - planes.upper),
    };
    (cells.sum::<f64>() + last) * (1.0 + 1e-12)
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

    /// Half-spaces at an angle to the planes, of which everything is known: `L = u + w − (v + s²)/2`, `u` of variance `v` and `w` of `s²`.
    #[test]
    fn half_spaces_are_extrapolated_with_little_loss() {
        let (epsilon, v, s, samples) = (3.0_f64, 0.5_f64, 0.4_f64, 1_u64 << 40);
        let (sd, half) = (v.sqrt(), 0.5 * (v + s * s));
        let phi = |x: f64| 0.5 * libm::erfc(-x / std::f64::consts::SQRT_2);
        // P(L < −ε − t) where ȳ is u.
        let slice = |u: f64, t: f64| phi((half - epsilon - t - u) / s);
        let counts = |u: f64| {
            let share = |j: usize| slice(u * sd, j as f64 * STEP);
            let below = (0..THRESHOLDS).map(|j| {
                let here = share(j) - if j + 1 < THRESHOLDS { share(j + 1) } else { 0.0 };
                (here * samples as f64) as u64
            });
            Counts { below: below.collect(), samples }
        };
        // The integral over both, by sums.
        let exact = |from: f64| {
            let h = 1e-3;
            let value = |u: f64| -> f64 {
                let mean = (0..4000).map(|k| (k as f64 + 0.5) * 2e-3);
                mean.map(|t| 2e-3 * (-t).exp() * slice(u * sd, t)).sum()
            };
            let density = |u: f64| (-0.5 * u * u).exp() / std::f64::consts::TAU.sqrt();
            (0..8000).map(|k| from + (k as f64 + 0.5) * h).map(|u| h * density(u) * value(u)).sum::<f64>()
        };
        for (lower, upper) in [(-4.2, -3.6), (-3.5, -2.5)] {
            let planes = Planes { lower, upper, end: f64::INFINITY };
            let (exact, bound) = (exact(upper), bound(planes, &counts(lower), &counts(upper), 1.0));
            assert!(bound >= exact && bound < 1.25 * exact, "{bound:e} {exact:e}");
        }
    }
}
