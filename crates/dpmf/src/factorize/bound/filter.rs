//! The sum of singular values of a recurrence, from below, by Kalman filters in double-double arithmetic.
//!
//! For all `λ ≥ 0`, with nodes at the powers of two,
//!
//! ```text
//! √λ ≥ (1 − 10⁻¹³) · (ln 2/2π) Σ_q 2^{q/2} ln(1 + λ/2^q),
//! ```
//!
//! whichever `q` are summed, for all terms are positive. So with `M = D^{1/2}AᵀAD^{1/2}`, `tr M^{1/2}` is at least that
//! sum of `ln det(1 + M/2^q)`. The determinant is the product of `S_i/t`, `t = 2^q`, where `S_i` is the variance of
//! iterate `i` given noisy earlier ones: of `y = A D^{1/2}z` observed with noise of variance `t`. A Kalman filter finds
//! it. Its covariance obeys a recursion that is monotone in the order of positive semidefinite matrices; so whatever is
//! subtracted from it leaves lower bounds, and here that is a bound on the rounding of each step.

use crate::linalg::double::Double;
use crate::linalg::lanes::Lanes;
use crate::workload::realisation::{Realisation, Transition, with_states};
use rayon::prelude::*;
use std::f64::consts::{LN_2, PI};

/// Nodes in one pass.
pub(super) const LANES: usize = 8;

/// Nodes between two looks at what is left.
const BATCH: usize = 2 * LANES;

/// Octaves between the trace and the first node.
const HEADROOM: i32 = 30;

/// Nodes lie above 2⁻⁴⁰⁰, so that nothing underflows that matters.
const LOWEST: i32 = -400;

/// Terms that may be dropped, relative to the sum: of no use to a bound that is rounded by 10⁻¹³.
const NEGLIGIBLE: f64 = 1e-13;

/// Rounding of one step of the filter, as a share of the variances that enter it.
///
/// `P ← F P Fᵀ + v g gᵀ` sums up to 10 products of 5 factors, each coefficient with [`Transition::ERRORS`] units of
/// error: 26 units in an entry, relative to `w_a w_b` with `w_a = Σ_c |F_ac| √P_cc + |g_a| √v`. A symmetric `E` with
/// `|E_ab| ≤ δ w_a w_b` satisfies `E ≤ K δ diag(w²)`, and `w_a² ≤ (K + 1)(Σ_c F_ac² P_cc + g_a² v)`. With K = 3 these are
/// 12 · 26 units; 3 % more for covariances that are not quite positive semidefinite, and the rest is room.
const SLACK: f64 = 16.0 * (2.0 * Transition::<3>::ERRORS + 14.0) * Double::<1>::UNIT;

/// A lower bound on `‖A D^{1/2}‖_*`, as a number and the power of two to multiply it by; `v` lies in `[2⁻¹⁰⁰, 2)`.
pub(super) fn nuclear_norm(realisation: Realisation<'_>, v: &[f64]) -> (f64, i32) {
    let largest = realisation.largest_rate();
    let exponent = libm::ilogb(largest);
    let scale = libm::scalbn(1.0, exponent);
    let sum = with_states!(realisation, K => Nodes::<K> { realisation, v, scale }.sum());
    (sum, exponent)
}

/// `ln det(1 + M/t)` at nodes `t`.
struct Nodes<'a, const K: usize> {
    realisation: Realisation<'a>,
    v: &'a [f64],
    scale: f64,
}

impl<const K: usize> Nodes<'_, K> {
    fn sum(&self) -> f64 {
        let (trace, log_det) = self.invariants();
        octaves(self.v.len(), trace, log_det, |q| self.log_dets(q))
    }

    /// `tr M`, to choose nodes by, and a lower bound on `ln det M`.
    fn invariants(&self) -> (f64, f64) {
        let mut covariance = [[0.0; K]; K];
        let (mut trace, mut log_det, mut size) = (0.0, 0.0, 0.0);
        for (i, &v) in self.v.iter().enumerate() {
            let Transition { f, g, .. } = self.realisation.step::<K>(i, self.scale);
            let old = covariance;
            for a in 0..K {
                for b in 0..K {
                    covariance[a][b] = v * g[a].to_f64() * g[b].to_f64();
                    for c in 0..K {
                        for d in 0..K {
                            covariance[a][b] += f[a][c].to_f64() * old[c][d] * f[b][d].to_f64();
                        }
                    }
                }
            }
            trace += covariance[K - 1][K - 1];
            let (diagonal, weight) = (libm::log(g[K - 1].to_f64()), libm::log(v));
            log_det += 2.0 * diagonal + weight;
            size += 2.0 * diagonal.abs() + weight.abs();
        }
        // Logarithms to an ulp, of numbers rounded once, and a sum of n of them.
        let n = self.v.len() as f64;
        (trace, log_det - f64::EPSILON * ((n + 4.0) * size + 4.0 * n))
    }

    /// `ln det(1 + M/2^q)` for `q, q − 1, …`, rounded down.
    fn log_dets(&self, q: i32) -> [f64; LANES] {
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2,fma")]
            fn with_avx2<const K: usize>(nodes: &Nodes<'_, K>, q: i32) -> [f64; LANES] {
                nodes.sweep(q)
            }
            if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
                // SAFETY: the processor has AVX2 and FMA, which is all that the function asks for.
                return unsafe { with_avx2(self, q) };
            }
        }
        self.sweep(q)
    }

    #[inline(always)]
    fn sweep(&self, q: i32) -> [f64; LANES] {
        let precision = Lanes(std::array::from_fn(|l| libm::scalbn(1.0, l as i32 - q)));
        let mut filter = Filter::<K, LANES>::new(precision);
        for (i, &v) in self.v.iter().enumerate() {
            filter.step(&self.realisation.step(i, self.scale), v);
        }
        filter.log_det(self.v.len())
    }
}

/// `(1 − 10⁻¹³)(ln 2/2π) Σ_q 2^{q/2} ln det(1 + M/2^q)`, rounded down, given lower bounds on the logarithms at `q, q − 1, …`,
/// a lower bound on `ln det M`, and about the trace of `M`, to choose nodes by.
///
/// The highest node stands for those above it too: `ln(1 + λs)` is concave in `s`, so it is at least `2^{−k}` times
/// as large `k` octaves higher. Below the lowest node the determinant is at least `det M/t^n`, known from the
/// diagonal of `A`, and at least what it is at that node.
pub(super) fn octaves(
    steps: usize,
    trace: f64,
    log_det: f64,
    log_dets: impl Fn(i32) -> [f64; LANES] + Sync,
) -> f64 {
    let n = steps as f64;
    let top = libm::ilogb(trace).max(LOWEST) + HEADROOM;
    let weight =
        |q: i32| libm::scalbn(if q % 2 == 0 { 1.0 } else { std::f64::consts::SQRT_2 }, q.div_euclid(2));
    let at_least = |q: i32| {
        let shift = n * LN_2 * f64::from(q);
        log_det - shift - 4.0 * f64::EPSILON * (log_det.abs() + shift.abs())
    };

    // Down to eight octaves below the geometric mean of the spectrum at once, then batch by batch.
    let mean = if log_det.is_finite() { (log_det / (n * LN_2)) as i32 } else { top };
    let mut count = ((top - mean + 8).max(1) as usize).next_multiple_of(BATCH);
    let (mut sum, mut q) = (0.0, top);
    loop {
        let starts: Vec<i32> = (0..count / LANES).map(|chunk| q - (chunk * LANES) as i32).collect();
        let chunks: Vec<[f64; LANES]> = starts.into_par_iter().map(&log_dets).collect();
        let mut lowest = 0.0;
        for &value in chunks.as_flattened() {
            let share = if q == top { 1.0 / (1.0 - std::f64::consts::FRAC_1_SQRT_2) } else { 1.0 };
            sum += share * weight(q) * value;
            lowest = value;
            q -= 1;
        }
        // What the closed form, or nothing at all, would lose below: a geometric series each.
        let closed = weight(q) * (lowest - at_least(q + 1));
        let open = 4.0 * weight(q) * (lowest + 4.0 * n);
        if closed.min(open) <= NEGLIGIBLE * sum || q < LOWEST {
            let tail = (0..200).map(|k| weight(q - k) * lowest.max(at_least(q - k)));
            sum += tail.sum::<f64>();
            break;
        }
        count = BATCH;
    }
    sum * (LN_2 / (2.0 * PI)) * (1.0 - 2e-13)
}

/// A Kalman filter that watches the released iterates, one noise level a lane.
struct Filter<const K: usize, const M: usize> {
    /// `1/t`, powers of two.
    precision: Lanes<M>,
    /// Not above the covariance of the states given what was observed; the lower triangle.
    covariance: [[Double<M>; K]; K],
    /// `∏ S_i/t` is this times `2^{500·count}`.
    product: Double<M>,
    count: Lanes<M>,
}

impl<const K: usize, const M: usize> Filter<K, M> {
    #[inline(always)]
    fn new(precision: Lanes<M>) -> Self {
        let product = Double::new(Lanes::splat(1.0));
        Self { precision, covariance: [[Double::ZERO; K]; K], product, count: Lanes::ZERO }
    }

    /// `u ~ N(0, v)` enters, and the last state is observed.
    #[inline(always)]
    fn step(&mut self, transition: &Transition<K>, v: f64) {
        let (y, one) = (K - 1, Double::new(Lanes::splat(1.0)));
        let p = sound(self.predicted(transition, v));

        let ratio = one + p[y][y].scaled(self.precision);
        self.product = self.product * ratio;
        for l in 0..M {
            let large = self.product.hi().0[l] > SHIFT;
            self.count.0[l] += f64::from(u8::from(large));
            self.product = self.product.scaled_lane(l, if large { 1.0 / SHIFT } else { 1.0 });
        }

        // P − P_y P_yᵀ/S, where row y is P_y t/S: no difference is taken there.
        let inverse = ratio.reciprocal();
        for a in 0..y {
            let gain = (p[y][a] * inverse).scaled(self.precision);
            for b in 0..=a {
                self.covariance[a][b] = p[a][b] - gain * p[y][b];
            }
            self.covariance[a][a] = less(self.covariance[a][a], p[a][a].hi());
        }
        for a in 0..=y {
            self.covariance[y][a] = p[y][a] * inverse;
        }
        self.covariance[y][y] = less(self.covariance[y][y], self.covariance[y][y].hi());
        self.covariance = sound(self.covariance);
    }

    /// `F P Fᵀ + v g gᵀ`, rounded down.
    #[inline(always)]
    fn predicted(&self, Transition { f, size, g }: &Transition<K>, v: f64) -> [[Double<M>; K]; K] {
        let p = |a: usize, b: usize| self.covariance[a.max(b)][a.min(b)];
        let mut next = [[Double::ZERO; K]; K];
        for a in 0..K {
            let mut moved = [Double::ZERO; K];
            for c in (0..K).filter(|&c| f[a][c] != Double::ZERO) {
                let f = f[a][c].splat();
                for d in 0..K {
                    moved[d] = moved[d] + f * p(c, d);
                }
            }
            let own = g[a] * Double::scalar(v);
            for b in 0..=a {
                next[a][b] = (own * g[b]).splat();
                for d in (0..K).filter(|&d| f[b][d] != Double::ZERO) {
                    next[a][b] = next[a][b] + moved[d] * f[b][d].splat();
                }
            }
            let mut entered = Lanes::splat(g[a].to_f64() * g[a].to_f64() * v);
            for c in 0..K {
                entered += Lanes::splat(size[a][c] * size[a][c]) * self.covariance[c][c].hi();
            }
            next[a][a] = less(next[a][a], entered);
        }
        next
    }

    /// `Σ ln(S_i/t)`, rounded down.
    fn log_det(&self, steps: usize) -> [f64; M] {
        std::array::from_fn(|l| {
            let (hi, lo, count) = (self.product.hi().0[l], self.product.lo().0[l], self.count.0[l]);
            let log = if count == 0.0 && hi < 2.0 {
                libm::log1p((hi - 1.0) + lo)
            } else {
                count * libm::log(SHIFT) + libm::log(hi)
            };
            // Two operations a step, and three or four roundings in the logarithm.
            let log = log * (1.0 - 16.0 * f64::EPSILON) - 4.0 * steps as f64 * Double::<1>::UNIT;
            // An overflow is no number; no determinant is below 1.
            if log > 0.0 { log } else { 0.0 }
        })
    }
}

/// Products above this are divided by it.
const SHIFT: f64 = 3.273390607896142e150; // 2⁵⁰⁰

/// `x` less the rounding of a step, given the variances that entered it.
#[inline(always)]
fn less<const M: usize>(x: Double<M>, entered: Lanes<M>) -> Double<M> {
    x - Double::new(entered * Lanes::splat(SLACK))
}

/// A covariance, or zero, a lower bound too, in lanes where it has correlations that are not between −1 and 1, to a per
/// cent: the bound on rounding assumes them.
#[inline(always)]
fn sound<const K: usize, const M: usize>(mut p: [[Double<M>; K]; K]) -> [[Double<M>; K]; K] {
    let sound = std::array::from_fn(|l| {
        let at = |a: usize, b: usize| p[a][b].hi().0[l];
        (0..K).all(|a| {
            at(a, a) >= 0.0
                && at(a, a).is_finite()
                && (0..a).all(|b| at(a, b) == 0.0 || (at(a, b) / at(a, a)) * (at(a, b) / at(b, b)) <= 1.01)
        })
    });
    p.as_flattened_mut().iter_mut().for_each(|x| *x = x.keep(sound));
    p
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Average, Optimizer, Workload};

    #[test]
    fn two_steps_in_closed_form() {
        // S D^{1/2}: det(1 + M/t) = (1 + 2v₀/t)(1 + v₁/t) − v₀v₁/t².
        let (workload, v) = (Workload::prefix_sum(2).unwrap(), [1.5, 0.75]);
        let nodes = Nodes::<1> { realisation: workload.realisation().unwrap(), v: &v, scale: 1.0 };
        for (l, log_det) in nodes.log_dets(3).into_iter().enumerate() {
            let t = libm::scalbn(1.0, 3 - l as i32);
            let exact = ((1.0 + 2.0 * v[0] / t) * (1.0 + v[1] / t) - v[0] * v[1] / (t * t)).ln();
            let short = exact - log_det;
            assert!((0.0..1e-14).contains(&(short / exact)), "{exact} {log_det}");
        }
    }

    #[test]
    fn registers_do_not_change_a_bit() {
        let rates = (0..50).map(|i| if i % 7 == 0 { 0.0 } else { 1.0 + f64::from(i).sin() }).collect();
        let optimizer =
            Optimizer { momentum: 0.9, nesterov: true, average: Average::Ema(0.9), ..Default::default() };
        let workload = Workload::sgd(rates, optimizer).unwrap();
        let v: Vec<f64> = (0..50).map(|i| 1.5 + f64::from(i).cos() / 2.0).collect();
        let nodes = Nodes::<3> { realisation: workload.realisation().unwrap(), v: &v, scale: 1.0 };
        assert_eq!(nodes.log_dets(0), nodes.sweep(0));
    }

    /// Covariances that no filter can have are replaced by zero, and say nothing.
    #[test]
    fn impossible_covariances_are_dropped() {
        let lanes = |x: f64| Double::<2>::new(Lanes([x, 1.0]));
        let p = [[lanes(1.0), Double::ZERO], [lanes(2.0), lanes(1.0)]];
        assert_eq!(sound(p).map(|row| row.map(|x| x.hi().0)), [[[0.0, 1.0], [0.0; 2]], [[0.0, 1.0]; 2]]);
        assert_eq!(sound([[Double::<1>::scalar(f64::NAN)]]), [[Double::ZERO]]);
    }
}
