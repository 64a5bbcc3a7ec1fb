//! The sum of singular values for several participations, from below, by eliminations in double-double arithmetic.
//!
//! As in `filter.rs` the sum is at least one of `ln det(1 + M/t)` over octaves of `t`, now with `M = GᵀAᵀA G`. With
//! `A = P⁻¹R` the determinant is `det(P Pᵀ + R G Gᵀ Rᵀ/t)/det(P Pᵀ)`, of a matrix `H` that couples only neighbouring steps and
//! steps of one phase.
//!
//! A computed `L Δ Lᵀ` is the exact factorization of a matrix that differs from `H` by some `E`. Entries of `H` are sums of
//! products, and eliminations too, so `|E_ij| ≤ δ√(h_i h_j)` with `h` the diagonal of `H`, by Cauchy and Schwarz; hence
//! `E ≤ mδ diag(h)` with `m` entries a row. That much is subtracted from the diagonal beforehand: then `L Δ Lᵀ ≤ H`, and the product
//! of the pivots, if all are positive, is not above `det H`.

use super::Factor;
use super::filter::{LANES, octaves};
use crate::error::Result;
use crate::linalg::double::Double;
use crate::linalg::lanes::Lanes;
use crate::linalg::phases::{Layout, Terms};
use crate::workload::realisation::Realisation;
use crate::workload::{Average, Optimizer, Workload};

/// Double-double operations behind one coefficient of `P` or `R`.
const ERRORS: f64 = 16.0;

/// A lower bound on `‖A G‖_*`, as a number and the power of two to multiply it by; nothing where a step size is zero, or so small
/// that the inverse of the workload is no recurrence, and for epochs not longer than the recurrence reaches back.
pub(super) fn nuclear_norm(
    workload: &Workload,
    realisation: Realisation<'_>,
    factor: &Factor,
) -> Result<Option<(f64, i32)>> {
    if !workload.is_invertible() {
        return Ok(None);
    }
    let exponent = libm::ilogb(realisation.largest_rate());
    let inverse = Inverse::new(realisation, libm::scalbn(1.0, exponent));
    let reach = inverse.left.bandwidth().max(inverse.right.as_ref().map_or(0, |r| r.bandwidth() + 1)).max(1);
    let (n, phases) = (factor.steps, factor.separation);
    if phases <= reach {
        return Ok(None);
    }
    let layout = Layout { n, phases, epochs: factor.times(), reach };
    let matrix = Matrix { terms: terms(&inverse, factor, layout), order: order(&inverse, layout) };

    let norms = workload.column_norms_sq()?;
    let size = |i: usize| factor.row(i).iter().map(|g| g * g).sum::<f64>();
    let trace: f64 = (0..n).map(|i| libm::scalbn(norms[i], -2 * exponent) * size(i)).sum();
    let (mut log_det, mut sizes) = (0.0, 0.0);
    for i in 0..n {
        let own = libm::log(factor.row(i)[i / phases].abs());
        let left = libm::log(inverse.left.at(i, 0).value.to_f64());
        let right = inverse.right.as_ref().map_or(0.0, |r| libm::log(r.at(i, 0).value.to_f64()));
        log_det += 2.0 * (own + right - left);
        sizes += 2.0 * (own.abs() + right.abs() + left.abs());
    }
    let log_det = log_det - f64::EPSILON * ((n as f64 + 8.0) * sizes + 8.0 * n as f64);
    let sum = octaves(n, factor.times() as f64 * trace, log_det, |q| matrix.log_dets(q));
    Ok(Some((sum, exponent)))
}

/// A coefficient, and the size of what was summed for it: its error is at most [`ERRORS`] units of that.
#[derive(Clone, Copy)]
struct Coefficient {
    value: Double<1>,
    size: f64,
}

impl Coefficient {
    const ZERO: Self = Self { value: Double::ZERO, size: 0.0 };

    fn of(value: Double<1>) -> Self {
        Self { value, size: value.to_f64().abs() }
    }

    fn exact(value: f64) -> Self {
        Self::of(Double::scalar(value))
    }

    fn plus(self, other: Self) -> Self {
        Self { value: self.value + other.value, size: self.size + other.size }
    }

    fn times(self, other: Self) -> Self {
        Self { value: self.value * other.value, size: self.size * other.size }
    }
}

/// A lower banded matrix by rows, from the diagonal leftwards.
struct Banded(Vec<Vec<Coefficient>>);

impl Banded {
    fn from_fn(n: usize, width: usize, entry: impl Fn(usize, usize) -> Coefficient) -> Self {
        Self((0..n).map(|i| (0..=width.min(i)).map(|k| entry(i, k)).collect()).collect())
    }

    fn bidiagonal(n: usize, diagonal: Coefficient, below: Coefficient) -> Self {
        Self::from_fn(n, 1, |_, k| if k == 0 { diagonal } else { below })
    }

    fn bandwidth(&self) -> usize {
        self.0.last().map_or(0, |row| row.len() - 1)
    }

    /// The entry `k` places left of the diagonal.
    fn at(&self, i: usize, k: usize) -> Coefficient {
        self.0[i].get(k).copied().unwrap_or(Coefficient::ZERO)
    }

    fn product(&self, right: &Self) -> Self {
        let width = self.bandwidth() + right.bandwidth();
        Self::from_fn(self.0.len(), width, |i, k| {
            let terms = (0..=k).map(|a| self.at(i, a).times(right.at(i - a, k - a)));
            terms.filter(|term| term.size > 0.0).fold(Coefficient::ZERO, Coefficient::plus)
        })
    }

    fn sum(&self, other: &Self) -> Self {
        let width = self.bandwidth().max(other.bandwidth());
        Self::from_fn(self.0.len(), width, |i, k| self.at(i, k).plus(other.at(i, k)))
    }
}

/// `A = P⁻¹R` as in [`Recurrence`](crate::workload::Recurrence), in more digits, with iterates in units of `scale`.
struct Inverse {
    left: Banded,
    right: Option<Banded>,
}

impl Inverse {
    fn new(realisation: Realisation<'_>, scale: f64) -> Self {
        let Optimizer { momentum: beta, weight_decay: lambda, coupled, nesterov, average } =
            *realisation.optimizer;
        let n = realisation.steps();
        let (exact, one) = (Coefficient::exact, Double::ONE);
        let mut left = Banded::from_fn(n, 1, |i, k| {
            let inverse = Coefficient::of(Double::scalar(realisation.learning_rates[i] / scale).reciprocal());
            match k {
                0 => inverse,
                _ if coupled || lambda == 0.0 => Coefficient { value: -inverse.value, ..inverse },
                _ => {
                    let decay = Double::scalar(realisation.decay_rates[i]) * Double::scalar(lambda);
                    let kept = Coefficient { value: decay - one, size: 1.0 + decay.to_f64() };
                    kept.times(inverse)
                }
            }
        });
        if beta > 0.0 {
            left = Banded::bidiagonal(n, exact(1.0), exact(-beta)).product(&left);
        }
        let right = (nesterov && beta > 0.0)
            .then(|| Banded::bidiagonal(n, Coefficient::of(one + Double::scalar(beta)), exact(-beta)));
        if coupled {
            let shift = Banded::bidiagonal(n, Coefficient::ZERO, exact(lambda * scale));
            left = left.sum(&match &right {
                Some(right) => right.product(&shift),
                None => shift,
            });
        }
        left = match average {
            Average::None => left,
            Average::Uniform => left.product(&Banded::from_fn(n, 1, |i, k| {
                if k == 0 { exact(i as f64 + 1.0) } else { exact(-(i as f64)) }
            })),
            Average::Ema(alpha) => {
                let share = (one - Double::scalar(alpha)).reciprocal();
                let below = Coefficient::of(-(Double::scalar(alpha) * share));
                left.product(&Banded::bidiagonal(n, Coefficient::of(share), below))
            }
        };
        Self { left, right }
    }
}

/// `H`, with what rounding may add taken off its diagonal; `t` of the terms is `1/t` here.
fn terms(inverse: &Inverse, factor: &Factor, layout: Layout) -> Terms {
    let Layout { n, phases, .. } = layout;
    let slack = Slack::new(layout);
    let mut terms = Terms::new(layout);
    let mut add = |pivot: usize, (i, j): (usize, usize), constant: Coefficient, shifted: Coefficient| {
        let [mut c, mut s] = [constant, shifted].map(|x| x.value);
        if i == j {
            let less = Double::scalar(slack.of(i % phases));
            c = c - less * Double::scalar(constant.size);
            s = s - less * Double::scalar(shifted.size);
        }
        terms.add(pivot, (i, j), c, s);
    };
    for j in 0..n {
        let pivot = layout.pivot(j % phases);
        for k in 0..=inverse.left.bandwidth().min(n - 1 - j) {
            for l in 0..=k {
                let product = inverse.left.at(j + k, k).times(inverse.left.at(j + l, l));
                if product.size > 0.0 {
                    add(pivot, (j + k, j + l), product, Coefficient::ZERO);
                }
            }
        }
        for i in (j % phases..=j).step_by(phases) {
            // Products of two f64 are exact, and so is their sum but for K units of its size.
            let d = factor.row(i).iter().zip(factor.row(j)).filter(|(a, b)| **a != 0.0 && **b != 0.0);
            let d = d
                .map(|(a, b)| Coefficient::exact(*a).times(Coefficient::exact(*b)))
                .fold(Coefficient::ZERO, Coefficient::plus);
            match &inverse.right {
                None => add(pivot, (j, i), Coefficient::ZERO, d),
                Some(right) => {
                    for k in (0..=right.bandwidth()).filter(|k| j + k < n) {
                        for l in (0..=right.bandwidth()).filter(|l| i < j || *l <= k) {
                            let r = right.at(j + k, k).times(right.at(i + l, l));
                            add(pivot, (j + k, i + l), Coefficient::ZERO, d.times(r));
                        }
                    }
                }
            }
        }
    }
    terms.fill();
    terms
}

/// What is taken off the diagonal, as a share of it.
///
/// An entry is a sum of products of four coefficients at most, and of `K` for `D`: `4·ERRORS + K` units and a few for each term, of
/// which there are `4 (w + 1)²` at most. Each elimination adds 4 units of what it takes off. Entries of two steps that are not both
/// separators see the eliminations of `w + 1` phases; the others those of all steps. A row has entries in `2w + 1` phases and the
/// separators, theirs in all.
struct Slack {
    chain: f64,
    separators: f64,
    reach: usize,
}

impl Slack {
    fn new(Layout { n, epochs, reach, .. }: Layout) -> Self {
        let [n, k, w] = [n, epochs, reach].map(|x| x as f64);
        let entry = 4.0 * ERRORS + 2.0 * k + 4.0 * (w + 1.0) * (w + 1.0) + 32.0;
        let unit = 4.0 * Double::<1>::UNIT;
        let (short, long) = (unit * (entry + (w + 1.0) * k), unit * (entry + n));
        let chain = (3.0 * w + 1.0) * k * short;
        Self { chain, separators: n * short + w * k * long + chain, reach }
    }

    fn of(&self, phase: usize) -> f64 {
        if phase < self.reach { self.separators } else { self.chain }
    }
}

/// `1/P_ii²` in the order of elimination, ones where there is no step.
fn order(inverse: &Inverse, layout: Layout) -> Vec<Double<1>> {
    let phases = (layout.reach..layout.phases).chain(0..layout.reach);
    let steps = phases.flat_map(|phase| (0..layout.epochs).map(move |e| phase + e * layout.phases));
    let of = |i: usize| match i < layout.n {
        true => {
            let reciprocal = inverse.left.at(i, 0).value.reciprocal();
            reciprocal * reciprocal
        }
        false => Double::ONE,
    };
    steps.map(of).collect()
}

struct Matrix {
    terms: Terms,
    order: Vec<Double<1>>,
}

impl Matrix {
    /// `ln det(1 + M/2^q)` for `q, q − 1, …`, rounded down.
    fn log_dets(&self, q: i32) -> [f64; LANES] {
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2,fma")]
            fn with_avx2(matrix: &Matrix, q: i32) -> [f64; LANES] {
                matrix.sweep(q)
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
        let precision = Double::new(Lanes(std::array::from_fn(|l| libm::scalbn(1.0, l as i32 - q))));
        let mut product = Double::<LANES>::new(Lanes::splat(1.0));
        let mut count = [0_i32; LANES];
        let mut positive = [true; LANES];
        let mut order = self.order.iter();
        self.terms.eliminate(precision, |pivot: Double<LANES>| {
            let scale = order.next().copied().unwrap_or(Double::ONE);
            product = product * (pivot * scale.splat());
            for l in 0..LANES {
                positive[l] &= pivot.hi().0[l] > 0.0;
                let hi = product.hi().0[l];
                if hi > SHIFT {
                    product = product.scaled_lane(l, 1.0 / SHIFT);
                    count[l] += 1;
                } else if hi < 1.0 / SHIFT {
                    product = product.scaled_lane(l, SHIFT);
                    count[l] -= 1;
                }
            }
        });
        std::array::from_fn(|l| {
            if !positive[l] {
                return 0.0;
            }
            // Back by what was shifted, where that stays in range.
            while count[l] != 0 && libm::ilogb(product.hi().0[l]).signum() == -count[l].signum() {
                product = product.scaled_lane(l, if count[l] > 0 { SHIFT } else { 1.0 / SHIFT });
                count[l] -= count[l].signum();
            }
            let (hi, lo, shifts) =
                (product.hi().0[l], product.lo().0[l], f64::from(count[l]) * libm::log(SHIFT));
            let (log, size) = match count[l] == 0 && hi < 2.0 {
                true => {
                    let log = libm::log1p((hi - 1.0) + lo);
                    (log, log.abs())
                }
                false => (shifts + libm::log(hi), shifts.abs() + libm::log(hi).abs()),
            };
            // Four operations a step, and three or four roundings in the logarithm.
            let log = log - 16.0 * f64::EPSILON * size - 8.0 * self.order.len() as f64 * Double::<1>::UNIT;
            // What is no number says nothing; no determinant is below 1.
            if log > 0.0 && log.is_finite() { log } else { 0.0 }
        })
    }
}

/// Products above this, or below its reciprocal, are divided or multiplied by it.
const SHIFT: f64 = 3.273390607896142e150; // 2⁵⁰⁰

#[cfg(test)]
mod tests {
    use super::*;
    use crate::factorize::{Dual, lower_bound_at};
    use proptest::prelude::*;

    fn exact(workload: &Workload, dual: &Dual) -> f64 {
        let (n, b) = (dual.steps(), dual.separation());
        let mut factor = faer::Mat::<f64>::zeros(n, n);
        for i in 0..n {
            for j in (i % b..=i).step_by(b) {
                factor[(i, j)] = dual.v()[i % b].sqrt() * dual.directions()[i * dual.times() + j / b];
            }
        }
        let values = (workload.to_dense() * factor).singular_values().unwrap();
        values.iter().sum::<f64>().powi(2) / dual.v().iter().sum::<f64>()
    }

    fn any_optimizer() -> impl Strategy<Value = Optimizer> {
        let average =
            prop_oneof![Just(Average::None), Just(Average::Uniform), (0.0..0.95).prop_map(Average::Ema)];
        let momentum = prop_oneof![Just(0.0), 0.01..0.99];
        let decay = prop_oneof![Just(0.0), 0.001..0.3];
        (momentum, any::<bool>(), decay, any::<bool>(), average).prop_map(
            |(momentum, nesterov, weight_decay, coupled, average)| Optimizer {
                momentum,
                nesterov: nesterov && momentum > 0.0,
                weight_decay,
                coupled: coupled && weight_decay > 0.0,
                average,
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        /// Tight and never above, for every recurrence, epochs of any length, and the same workload as a matrix.
        #[test]
        fn the_bound_is_that_of_the_singular_values(
            optimizer in any_optimizer(),
            steps in prop::collection::vec((0.05..2.0_f64, -3.0..3.0_f64), 2..24),
            separation in 1..12_usize,
            entries in prop::collection::vec(-1.0..1.0_f64, 64),
        ) {
            let n = steps.len();
            prop_assume!(separation < n);
            let times = n.div_ceil(separation);
            let v: Vec<f64> = steps[..separation].iter().map(|(_, u)| u.exp()).collect();
            let entry = |i: usize, k: usize| match k.cmp(&(i / separation)) {
                std::cmp::Ordering::Less => entries[(5 * i + k) % 64],
                std::cmp::Ordering::Equal => 0.1 + entries[i % 64].abs(),
                std::cmp::Ordering::Greater => 0.0,
            };
            let directions = (0..n).flat_map(|i| (0..times).map(move |k| entry(i, k))).collect();
            let dual = Dual::new(n, separation, v, directions).unwrap();
            let workload = Workload::sgd(steps.into_iter().map(|(eta, _)| eta).collect(), optimizer).unwrap();
            let exact = exact(&workload, &dual);
            for workload in [Workload::dense(workload.to_dense()).unwrap(), workload] {
                let short = 1.0 - lower_bound_at(&workload, &dual).unwrap() / exact;
                // The singular values themselves are known to a few units only.
                prop_assert!(short > -1e-13 && short < 1e-8, "{:e}", short);
            }
        }
    }

    /// Directions that no solver would find, and weights over many decades: the bound holds, or says little.
    #[test]
    fn wild_points_prove_no_more_than_the_optimum() {
        let workload = Workload::prefix_sum(6).unwrap();
        // Users of two epochs: C = I/√2 has sensitivity 1, so no bound is above ‖S‖_F² · 2.
        let loss = 2.0 * 21.0;
        for power in [0, 1, 40, 150] {
            let size = 10f64.powi(power);
            let v = vec![size, 1.0, 1.0 / size];
            for angle in [1.0, 1e-8, 1e-150, 0.0] {
                let rows = (0..6).flat_map(|i| if i < 3 { [1.0, 0.0] } else { [-1.0, angle] });
                let dual = Dual::new(6, 3, v.clone(), rows.collect()).unwrap();
                let bound = lower_bound_at(&workload, &dual).unwrap();
                assert!(bound > 0.0 && bound <= loss, "{power} {angle}: {bound}");
            }
        }
    }

    /// Step sizes of zero, and epochs of one step, are left to the polar factor; a matrix that is the same has the same bound.
    #[test]
    fn what_has_no_recurrence_is_proved_densely() {
        let momentum = Optimizer { momentum: 0.9, ..Default::default() };
        let workload = Workload::sgd(vec![1.0, 0.0, 0.5, 1.0], momentum).unwrap();
        let halves = [[1.0, 0.0], [1.0, 0.0], [0.5, 1.0], [0.5, 1.0]].concat();
        let every: Vec<f64> = (0..16).map(|at| if at % 4 <= at / 4 { 1.0 } else { 0.0 }).collect();
        for (separation, directions) in [(2, halves), (1, every)] {
            let dual = Dual::new(4, separation, vec![1.0; separation], directions).unwrap();
            let exact = exact(&workload, &dual);
            let short = 1.0 - lower_bound_at(&workload, &dual).unwrap() / exact;
            assert!((-1e-14..1e-12).contains(&short), "{short:e}");
        }
    }
}
