//! The inverse square root as a sum of simple fractions.

use crate::error::{Error, Result};
use std::f64::consts::PI;

/// `λ^{-1/2} ≈ Σ_q ω_q / (λ + t_q)` on an interval, with positive `t_q` and `ω_q`.
///
/// With `k² = min/max`, `k'² = 1 − k²`, `E = K(k')`, and elliptic functions of modulus `k'`, this is the midpoint
/// rule with `Q` nodes `u_q = (q − ½)E/Q` for `λ^{-1/2} = (2/π) ∫_0^E √min · dn/cn² / (λ + min·sc²) du`:
///
/// ```text
/// t_q = min · sc²(u_q),    ω_q = (2/π)(E/Q) √min · dn/cn²(u_q).
/// ```
///
/// Guarantee: `|1 − √λ Σ_q ω_q/(λ + t_q)| ≤ relative_error` for all `min ≤ λ ≤ max`. The quadrature's share is
/// exact, not asymptotic. Substitute `λ = min/dn²(z)`, `0 ≤ z ≤ E`. The integrand times `√λ` is even, has period
/// `2E` and simple poles at `±z ± iK(k)`; its Fourier coefficients are `cos(πlz/E)/cosh(πlK(k)/E)`. The midpoint
/// rule adds up every `2Q`-th of them, so with `x = 2πQK(k)/K(k')`
///
/// ```text
/// √λ Σ_q ω_q/(λ + t_q) = 1 + 2 Σ_{j≥1} (−1)^j cos(2πjQz/E) / cosh(jx),
/// ```
///
/// which differs from 1 by at most `2 Σ_{j≥1} 1/cosh(jx) ≤ 4/(e^x − 1)`, the bound used here. It is attained up to
/// a factor `1 + O(e^{−x})`: these are Zolotarev's poles, and no other `Q` poles do better than that factor allows.
/// For a small `k`, `x ≈ 2π²Q/ln(16 max/min)`.
///
/// For a symmetric matrix `M` with its spectrum inside the interval the same bound holds for every *diagonal entry*
/// of `M^{-1/2}`, since each is an average of `λ^{-1/2}` over the spectrum with non-negative weights, and so for
/// `aᵀM^{-1/2}a` with any vector `a`.
///
/// Reference: method 3 of Hale, Higham and Trefethen, "Computing A^α, log(A), and related matrix functions by
/// contour integrals", SIAM J. Numer. Anal. 46 (2008).
#[derive(Clone, Debug, PartialEq)]
pub struct InverseSqrt {
    /// The shifts `t_q > 0`, increasing.
    pub nodes: Vec<f64>,
    /// The weights `ω_q > 0`.
    pub weights: Vec<f64>,
    /// Largest relative error on the interval: the bound above plus [`InverseSqrt::ROUNDING`].
    pub relative_error: f64,
}

impl InverseSqrt {
    /// What rounding in nodes, weights and their sum may come to: an estimate, on which no certificate rests.
    ///
    /// Every term is positive, so a relative error δ in all `t_q` and `ω_q` moves the sum by at most 2δ. The elliptic
    /// functions come from a dozen Landen steps in which nothing is subtracted; what remains is their own condition,
    /// `u·d(log sc)/du ≤ E`, which is below 30 for 25 decades. Errors of the terms do not align: the largest seen in
    /// the sum is 13 ε.
    pub const ROUNDING: f64 = 64.0 * f64::EPSILON;

    /// The fewest nodes whose quadrature error is at most `tolerance` on `[min, max]`.
    ///
    /// Errors: unless `0 < min ≤ max < ∞` and `0 < tolerance < 1`.
    ///
    /// ```
    /// use dpmf::linalg::rational::InverseSqrt;
    /// let root = InverseSqrt::on(1e-8, 4.0, 1e-12)?;
    /// assert!((root.at(0.25) - 2.0).abs() < 1e-11);
    /// # Ok::<(), dpmf::Error>(())
    /// ```
    pub fn on(min: f64, max: f64, tolerance: f64) -> Result<Self> {
        if !(tolerance > 0.0 && tolerance < 1.0) {
            return Err(Error::argument("tolerance", tolerance, "it must lie between 0 and 1"));
        }
        let landen = Landen::new(min, max)?;
        // 4/(e^x − 1) ≤ tolerance; the last bits of the quotient must not cost a node's worth of accuracy.
        let needed = (4.0 / tolerance).ln_1p() / landen.rate * (1.0 - 1e-12);
        landen.midpoint_rule(min, needed.ceil().max(1.0) as usize)
    }

    /// `nodes` nodes on `[min, max]`.
    ///
    /// Errors: unless `0 < min ≤ max < ∞` and `nodes ≥ 1`.
    pub fn with_nodes(min: f64, max: f64, nodes: usize) -> Result<Self> {
        Landen::new(min, max)?.midpoint_rule(min, nodes)
    }

    /// Number of nodes `Q`.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether there are no nodes; never, for a value built here.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// `Σ_q ω_q / (λ + t_q)`.
    pub fn at(&self, lambda: f64) -> f64 {
        self.nodes.iter().zip(&self.weights).map(|(t, w)| w / (lambda + t)).sum()
    }
}

/// Gauss's descent of the modulus `k'`, run from the complementary modulus `k`, which is all that is ever known
/// accurately: `k'` may be within 1e-20 of 1.
struct Landen {
    /// `k = √(min/max)`.
    k: f64,
    /// `E = K(k')`.
    quarter_period: f64,
    /// `2πK(k)/K(k')`: the error falls by `e^{−rate}` a node.
    rate: f64,
    /// The arithmetic-geometric mean of 1 and `k`, step by step.
    steps: Vec<(f64, f64)>,
}

impl Landen {
    fn new(min: f64, max: f64) -> Result<Self> {
        if !(min > 0.0 && min.is_finite()) {
            return Err(Error::argument("min", min, "it must be positive and finite"));
        }
        if !(max >= min && max.is_finite()) {
            return Err(Error::argument("max", max, "it must be finite and at least min"));
        }
        // The roots first: the ratio itself may underflow.
        let k = min.sqrt() / max.sqrt();
        let steps = arithmetic_geometric(1.0, k);
        let mean = |steps: &[(f64, f64)]| steps.last().map_or(1.0, |&(a, b)| 0.5 * (a + b));
        let k_prime = ((1.0 - k) * (1.0 + k)).max(0.0).sqrt();
        let quarter_period = PI / (2.0 * mean(&steps));
        // K(k)/K(k') = mean(1, k)/mean(1, k'); infinite for a single point, where one node is exact.
        let rate = if k_prime > 0.0 {
            2.0 * PI * mean(&steps) / mean(&arithmetic_geometric(1.0, k_prime))
        } else {
            f64::INFINITY
        };
        Ok(Self { k, quarter_period, rate, steps })
    }

    fn midpoint_rule(&self, min: f64, nodes: usize) -> Result<InverseSqrt> {
        if nodes == 0 {
            return Err(Error::argument("nodes", nodes, "at least one is needed"));
        }
        let (q, k) = (nodes as f64, self.k);
        let scale = 2.0 / PI * self.quarter_period / q * min.sqrt();
        let mut result = InverseSqrt {
            nodes: vec![0.0; nodes],
            weights: vec![0.0; nodes],
            relative_error: 4.0 / (q * self.rate).exp_m1() + InverseSqrt::ROUNDING,
        };
        for i in 0..nodes.div_ceil(2) {
            let (sc, dn) = self.sc_dn((i as f64 + 0.5) / q);
            result.nodes[i] = min * sc * sc;
            result.weights[i] = scale * dn * (1.0 + sc * sc);
            // sc(E − u) = 1/(k sc u) and dn(E − u) = k/dn u: the upper half to full relative accuracy.
            let sc_upper = 1.0 / (k * sc);
            result.nodes[nodes - 1 - i] = min * sc_upper * sc_upper;
            result.weights[nodes - 1 - i] = scale * (k / dn) * (1.0 + sc_upper * sc_upper);
        }
        Ok(result)
    }

    /// `sc(u)` and `dn(u)` of modulus `k'` at `u = fraction · E`, `0 < fraction ≤ ½`.
    ///
    /// Starts from the circular functions at the foot of the descent, `tan` of at most π/4, and climbs with
    /// additions, products and quotients of positive numbers: the relative error is a few units of rounding.
    ///
    /// Reference: Bulirsch, "Numerical calculation of elliptic integrals and elliptic functions", Numer. Math. 7
    /// (1965).
    fn sc_dn(&self, fraction: f64) -> (f64, f64) {
        let foot = 1.0 / (fraction * PI / 2.0).tan();
        let (a, b) = self.steps.last().copied().unwrap_or((1.0, 1.0));
        let (mut cs, mut dn) = (0.5 * (a + b) * foot, 1.0);
        let mut ratio = foot;
        for &(a, b) in self.steps.iter().rev() {
            ratio *= cs;
            cs *= dn;
            dn = (b + ratio) / (a + ratio);
            ratio = cs / a;
        }
        (1.0 / cs, dn)
    }
}

/// The pairs `(a, b)` of the arithmetic-geometric mean, up to the one whose mean is accurate to rounding.
fn arithmetic_geometric(a: f64, b: f64) -> Vec<(f64, f64)> {
    let mut steps = vec![(a, b)];
    let (mut a, mut b) = (a, b);
    // The next gap is the square of this one, over 8a.
    while (a - b).abs() > 1e-9 * a {
        (a, b) = (0.5 * (a + b), (a * b).sqrt());
        steps.push((a, b));
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Largest relative error on a grid that is uniform in log λ and includes both ends.
    fn observed(root: &InverseSqrt, min: f64, max: f64) -> f64 {
        let points = 20_000;
        (0..=points)
            .map(|i| {
                let lambda = (min * (max / min).powf(f64::from(i) / f64::from(points))).clamp(min, max);
                (1.0 - lambda.sqrt() * root.at(lambda)).abs()
            })
            .fold(0.0, f64::max)
    }

    #[test]
    fn one_node_in_closed_form() {
        // Q = 1: sc(E/2) = k^{-1/2}, so t = √(min·max) for any interval.
        let root = InverseSqrt::with_nodes(4.0, 9.0, 1).unwrap();
        assert!((root.nodes[0] - 6.0).abs() < 1e-14);
        // A single point is exact with one node: ω/(λ + t) = 2√λ/(2λ).
        let root = InverseSqrt::on(4.0, 4.0, 1e-12).unwrap();
        assert_eq!(root.len(), 1);
        assert!((root.nodes[0] - 4.0).abs() < 1e-14 && (root.at(4.0) - 0.5).abs() < 1e-15);
        assert_eq!(root.relative_error, InverseSqrt::ROUNDING);
    }

    #[test]
    fn nodes_pair_up_around_the_geometric_mean() {
        let (min, max) = (1e-12, 1e7);
        let root = InverseSqrt::with_nodes(min, max, 41).unwrap();
        for q in 0..41 {
            let product = root.nodes[q] * root.nodes[40 - q];
            assert!((product / (min * max) - 1.0).abs() < 1e-13, "{q}: {product}");
            assert!(q == 0 || root.nodes[q] > root.nodes[q - 1]);
        }
    }

    #[test]
    fn the_bound_is_attained_where_the_error_oscillates() {
        // Few nodes, so that the quadrature error is far above rounding: the bound must hold and be nearly sharp.
        for (min, max) in [(0.5, 1.0), (1e-3, 2.0), (1e-9, 4.0), (1e-21, 10.0)] {
            for nodes in [2, 3, 5, 8, 13] {
                let root = InverseSqrt::with_nodes(min, max, nodes).unwrap();
                let observed = observed(&root, min, max);
                assert!(observed <= root.relative_error, "{min} {max} {nodes}: {observed:e}");
                if root.relative_error < 0.1 && root.relative_error > 1e-12 {
                    assert!(
                        observed > 0.9 * root.relative_error,
                        "{min} {max} {nodes}: {observed:e} {:e}",
                        root.relative_error
                    );
                }
            }
        }
    }

    #[test]
    fn full_precision_over_twenty_five_decades() {
        for decades in [1, 6, 12, 17, 21, 25] {
            let (min, max) = (3.7e-15, 3.7e-15 * 10f64.powi(decades));
            let root = InverseSqrt::on(min, max, 1e-15).unwrap();
            let observed = observed(&root, min, max);
            assert!(observed <= root.relative_error, "{decades}: {observed:e} {:e}", root.relative_error);
        }
    }

    proptest! {
        #[test]
        fn the_requested_tolerance_holds_with_the_fewest_nodes(
            log_min in -30.0..30.0_f64,
            decades in 0.0..24.0_f64,
            log_tolerance in -13.0..-1.0_f64,
        ) {
            let (min, tolerance) = (log_min.exp(), 10f64.powf(log_tolerance));
            let max = min * 10f64.powf(decades);
            let root = InverseSqrt::on(min, max, tolerance).unwrap();
            prop_assert!(root.relative_error <= tolerance * (1.0 + 1e-9) + InverseSqrt::ROUNDING);
            prop_assert!(observed(&root, min, max) <= root.relative_error);
            if root.len() > 1 {
                let fewer = InverseSqrt::with_nodes(min, max, root.len() - 1).unwrap();
                prop_assert!(fewer.relative_error > tolerance);
            }
        }
    }

    #[test]
    fn arguments_outside_their_domain_are_refused() {
        for (min, max, tolerance) in [
            (0.0, 1.0, 0.1),
            (-1.0, 1.0, 0.1),
            (f64::NAN, 1.0, 0.1),
            (1.0, 0.5, 0.1),
            (1.0, f64::INFINITY, 0.1),
            (1.0, f64::NAN, 0.1),
            (1.0, 2.0, 0.0),
            (1.0, 2.0, 1.0),
            (1.0, 2.0, f64::NAN),
        ] {
            assert!(InverseSqrt::on(min, max, tolerance).is_err(), "{min} {max} {tolerance}");
        }
        assert!(InverseSqrt::with_nodes(1.0, 2.0, 0).unwrap_err().to_string().contains("nodes is 0"));
    }
}
